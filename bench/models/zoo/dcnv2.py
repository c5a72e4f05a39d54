"""DCNv2 with full-rank crosses beside a perceptron (Wang et al., arXiv 2008.13535, "parallel").

On Criteo with 26 embeddings of 64 and 13 dense features, the input has 1677 columns, an odd number:
rows of bfloat16 have no alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lokakern.bench.models.blocks import perceptron
from lokakern.bench.models.zoo.architecture import Parallel


class FullCrossNetwork(nn.Module):
    """Cross layers ``x0 * (W x + b) + x`` in sequence."""

    def __init__(self, k: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, k) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


def dcnv2(
    k: int = 1677, crosses: int = 3, hidden: Sequence[int] = (1024, 1024, 512)
) -> nn.Sequential:
    """Crosses and a perceptron with LayerNorm and SiLU, side by side, and the logit of both."""
    deep = perceptron((k, *hidden), norm=True, activation=nn.SiLU)
    return nn.Sequential(Parallel(FullCrossNetwork(k, crosses), deep), nn.Linear(k + hidden[-1], 1))
