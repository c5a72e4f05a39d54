"""Both operands of a problem, drawn from one distribution."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lokakern.workloads.distributions import Distribution, draw_rows, draw_weight


class Draw(NamedTuple):
    """x ``[rows, k]`` and the weight ``[n, k]``, float64 on the CPU."""

    x: Tensor
    w: Tensor


def draw(distribution: Distribution, rows: int, n: int, k: int, seed: int) -> Draw:
    return Draw(draw_rows(distribution, rows, k, seed), draw_weight(distribution, n, k, seed))
