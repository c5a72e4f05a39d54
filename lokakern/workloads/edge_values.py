"""Operands of trials: zeros, NaN, infinity and tiny ones for quantizers, and sums of one sign."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lokakern.workloads.distributions import (
    DISTRIBUTIONS,
    LearnedDistribution,
    draw_rows,
    draw_weight,
)

TINY = 2.0**-120  # amax / MAX is below 2^-126, the least scale, in all formats
WHITE = DISTRIBUTIONS["X1"]


def _edge_rows(rows: int, k: int, seed: int) -> Tensor:
    """White rows after one of zeros, one with NaN and infinity, and one of NaN."""
    x = draw_rows(WHITE, rows, k, seed)
    x[:1] = 0.0
    for column, value in enumerate((math.nan, math.inf, -math.inf)):
        x[1:2, column::7] = value
    x[2:3] = math.nan
    return x


def _zeros(rows: int, k: int, seed: int) -> Tensor:
    x = torch.zeros((rows, k), dtype=torch.float64)
    x[0, 0] = math.nan
    return x


def _tiny(rows: int, k: int, seed: int) -> Tensor:
    x = draw_rows(WHITE, rows, k, seed).clamp(-4.0, 4.0) * TINY
    x[0, 0] = math.inf
    return x


def _weight(n: int, k: int, seed: int) -> Tensor:
    return draw_weight(WHITE, n, k, seed)


def _positive(rows: int, k: int, seed: int) -> Tensor:
    return torch.rand(rows, k, generator=torch.Generator().manual_seed(seed)).double() + 0.5


def _positive_weight(n: int, k: int, seed: int) -> Tensor:
    # 1.25: a power of two as the sum of a block would be added without loss in any format.
    return _positive(n, k, seed + 1) * 1.25


def _named(
    name: str,
    rows: Callable[[int, int, int], Tensor],
    weight: Callable[[int, int, int], Tensor] = _weight,
) -> LearnedDistribution:
    return LearnedDistribution(
        name=name, title=name, parameters=(), realistic=False, digest=name,
        rows=rows, weight=weight,
    )  # fmt: skip


# Of any operand. A scale of all elements sees no row of zeros, so two more follow for quantizers.
EDGE_ROWS = _named("rows of zeros, NaN and infinity", _edge_rows)
ONLY_ZEROS = _named("zeros and a NaN", _zeros)
ONLY_TINY = _named("tiny values and an infinity", _tiny)
# Of products: what a sum loses at each step adds up, where sums of both signs hide it.
POSITIVE = _named("positive values", _positive, _positive_weight)
