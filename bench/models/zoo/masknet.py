"""Parallel MaskNet (Wang et al., arXiv 2102.07619) as in the ranker that Twitter published.

Sizes are those of projects/home/recap/config/local_prod.yaml in twitter/the-algorithm-ml on GitHub:
2117 continuous and 59 binary features, three embeddings of 200, four blocks of 1024, a layer of
2048, and ten tasks: 48 million parameters. The features are given, not learned. The
dropout of two towers is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lokakern.bench.models.blocks import perceptron
from lokakern.bench.models.zoo.architecture import Parallel


class MaskBlock(nn.Module):
    """``LN(W (x * mask(x)))``: a perceptron with one hidden layer makes the mask."""

    def __init__(self, k: int, hidden: int, n: int) -> None:
        super().__init__()
        self.mask = perceptron((k, hidden), last=k)
        self.hidden = nn.Linear(k, n)
        self.norm = nn.LayerNorm(n)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.hidden(x * self.mask(x)))  # type: ignore[no-any-return]


def _tower(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        layers += [nn.Linear(k, n), nn.BatchNorm1d(n, affine=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


class MaskNet(nn.Module):
    """Features ``[batch, k]`` and embeddings ``[batch, e]`` to logits ``[batch, tasks]``."""

    def __init__(
        self,
        k: int = 2776,
        blocks: int = 4,
        width: int = 1024,
        shared: int = 2048,
        tower: Sequence[int] = (256, 128),
        tasks: int = 10,
    ) -> None:
        super().__init__()
        self.blocks = Parallel(*(MaskBlock(k, width, width) for _ in range(blocks)))
        self.shared = perceptron((blocks * width, shared))
        self.towers = Parallel(*(_tower((shared, *tower)) for _ in range(tasks)))

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        x = self.blocks(torch.cat([features, embedded], dim=1))
        return self.towers(self.shared(x))  # type: ignore[no-any-return]
