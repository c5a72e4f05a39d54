"""Low-rank cross layers of DCNv2 (Wang et al., arXiv 2008.13535)."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class CrossLayer(nn.Module):
    """``x0 * (W V x + b) + x`` on rows of k features, V of few rows."""

    def __init__(self, k: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(k, rank, bias=False)
        self.up = nn.Linear(rank, k)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(self.down(x)) + x  # type: ignore[no-any-return]


class CrossNetwork(nn.Module):
    """Cross layers one after the other: products of up to as many features, and one more."""

    def __init__(self, k: int, rank: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(k, rank) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = cast(CrossLayer, layer)(x0, x)
        return x
