"""A weight as a matrix-normal variable: ``W = M + L_U Z L_V^T``, Z white.

By a flip-flop moving average over snapshots of the weight:

    U' = W_c V^-1 W_c^T / k;  V' = W_c^T U^-1 W_c / n;  U <- m U + (1 - m) U', V alike;  tr U = n

One matrix cannot tell its own mean from its noise element by element, so M is what its rows share:
the mean of each column, rows weighed by ``1 / U_ii`` lest one large row make the mean of all.
Snapshots of a training run are few and alike, so inverses and draws use U and V shrunk towards
their diagonals, the less the more was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.moments import TINY, root_of

MOMENTUM = 0.9
DENSE = 1024  # rows or columns up to which U or V is kept whole (8 MiB); beyond, its diagonal
FIRST_PASSES = 3  # over the first snapshot, from the diagonals


class MatrixNormal:
    """Mean, and covariance of rows and of columns, of a weight ``[n, k]``.

    Attributes:
        mean: ``[k]`` float64, of every row of M.
        u: ``[n, n]``, or its diagonal ``[n]`` beyond `DENSE`; the mean of the diagonal is 1.
        v: ``[k, k]`` or ``[k]``.
        count: Snapshots.
    """

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        self.n, self.k, self.count = n, k, 0
        self.mean = torch.zeros(k, dtype=torch.float64, device=device)
        self.u, self.v = (
            torch.zeros((size, size) if size <= DENSE else size, dtype=torch.float64, device=device)
            for size in (n, k)
        )

    def add(self, weight: Tensor) -> None:
        """Take a snapshot in, ``[n, k]``; on its device, unread by the host.

        Raises:
            ShapeError: It is of another shape.
        """
        if weight.shape != (self.n, self.k):
            raise ShapeError(
                f"a matrix-normal weight [{self.n}, {self.k}] was given {list(weight.shape)}"
            )
        wide = torch.nan_to_num(weight.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
        keep = min(MOMENTUM, self.count / (self.count + 1))
        if self.count == 0:
            self._begin(wide)
        weights = _inverse(_diagonal(self.u))
        mean = (weights @ wide) / weights.sum().clamp_min(TINY)
        self.mean.lerp_(mean, 1.0 - keep)
        centered = wide - self.mean
        for _ in range(FIRST_PASSES if self.count == 0 else 1):
            u = _product(centered, self._shrunk(self.v, self.n), self.u.dim() == 2) / self.k
            v = _product(centered.t(), self._shrunk(self.u, self.k), self.v.dim() == 2) / self.n
            self.u.lerp_(u, 1.0 - keep)
            self.v.lerp_(v, 1.0 - keep)
            scale = _diagonal(self.u).mean().clamp_min(TINY)
            self.u /= scale
            self.v *= scale
        self.count += 1

    def _begin(self, wide: Tensor) -> None:
        """Diagonals alone, from sizes of columns and of rows in turn."""
        squares = wide.square()
        rows = torch.ones_like(squares[:, 0])
        for _ in range(FIRST_PASSES):
            columns = (squares * _inverse(rows)[:, None]).mean(dim=0)
            rows = (squares * _inverse(columns)).mean(dim=1)
            rows = rows / rows.mean().clamp_min(TINY)
        for mine, diagonal in ((self.u, rows), (self.v, columns)):
            mine.copy_(diagonal.diag() if mine.dim() == 2 else diagonal)

    def _shrunk(self, matrix: Tensor, others: int) -> Tensor:
        """A covariance between itself and its diagonal, by how many vectors it was made of."""
        if matrix.dim() == 1:
            return matrix
        size = len(matrix)
        share = size / (size + others * max(min(self.count, 1 / (1 - MOMENTUM)), 1))
        if self.count == 0:
            share = max(share, 0.5)
        return matrix * (1.0 - share) + share * matrix.diagonal().diag()

    def merge(self, other: MatrixNormal) -> None:
        """Take in what another saw of the same weight."""
        total = max(self.count + other.count, 1)
        for name, x in other.tensors().items():
            mine = getattr(self, name)
            mine.lerp_(x.to(mine.device), other.count / total)
        self.count += other.count

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {
            "mean": self.mean,
            "u": self.u,
            "v": self.v,
        }

    def drawable(self) -> DrawableWeight:
        """What was seen up to now, to be drawn often."""
        roots = (
            root_of(found) if found.dim() == 2 else found.sqrt()
            for x, others in ((self.u, self.k), (self.v, self.n))
            for found in (self._shrunk(x, others).cpu(),)
        )
        return DrawableWeight(self.mean.cpu(), *roots)


@dataclass(frozen=True, slots=True, eq=False)
class DrawableWeight:
    """``1 mean^T + L_U Z L_V^T``, float64 on the CPU.

    Attributes:
        mean: ``[k]``.
        left: L_U, ``[n, n]``, or its diagonal ``[n]``.
        right: L_V, ``[k, k]`` or ``[k]``.
    """

    mean: Tensor
    left: Tensor
    right: Tensor

    def draw(self, generator: torch.Generator, rows: int, columns: int) -> Tensor:
        """The first rows and columns of a weight; no more is drawn than they are made of."""
        left, right = self.left[:rows], self.right[:columns]
        # Of a diagonal the first are enough; of a whole root a row takes all.
        inner = (left.shape[-1], right.shape[-1])
        white = torch.randn(inner, generator=generator, dtype=torch.float64)
        drawn = left @ white if left.dim() == 2 else white.mul_(left[:, None])
        drawn = drawn @ right.t() if right.dim() == 2 else drawn.mul_(right)
        return drawn.add_(self.mean[:columns])


def _inverse(variance: Tensor) -> Tensor:
    """1 / variance; 0 where there is none."""
    return torch.where(variance > 0, 1.0 / variance.clamp_min(TINY), 0.0)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal() if matrix.dim() == 2 else matrix


def _product(x: Tensor, covariance: Tensor, whole: bool) -> Tensor:
    """``x C^-1 x^T`` or its diagonal, on the scale of C's correlation.

    A column without variance counts nothing.
    """
    deviation = _diagonal(covariance).clamp_min(0.0).sqrt()
    half = torch.where(deviation > 0, x / deviation.clamp_min(1e-150), 0.0)
    if covariance.dim() == 2:
        safe = deviation.clamp_min(1e-150)
        correlation = covariance / safe / safe[:, None]
        correlation.diagonal().fill_(1.0 + 1e-6)
        lower, _ = torch.linalg.cholesky_ex(correlation)  # `cholesky` would wait for the device
        half = torch.linalg.solve_triangular(lower, half.t(), upper=False).t()
    return half @ half.t() if whole else half.square().sum(dim=1)
