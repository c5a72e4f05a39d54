"""What models have in common: linear layers one after the other, or over embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn


def perceptron(
    sizes: Sequence[int],
    *,
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    last: int | None = None,
) -> nn.Sequential:
    """``sizes[0]`` inputs, and layers of the others, each with an activation.

    Args:
        sizes: Inputs, then outputs of each layer.
        activation: After each of these layers.
        norm: Whether a LayerNorm comes before the activation.
        last: Outputs of one more linear layer with nothing after it.
    """
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        layers += [nn.Linear(k, n), nn.LayerNorm(n), activation()] if norm else [
            nn.Linear(k, n), activation()
        ]  # fmt: skip
    if last is not None:
        layers.append(nn.Linear(sizes[-1], last))
    return nn.Sequential(*layers)


class Compression(nn.Module):
    """``W X``: the n embeddings ``[batch, n, d]`` of a sample become ``count``."""

    def __init__(self, n: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n, count, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
