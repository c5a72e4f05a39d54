"""Mean and covariance of a stream of rows, by the update of Welford and Chan.

    d = mean_b - mean;  mean += (b / n') d;  S += S_b + (n b / n') d d^T;  covariance = S / (n' - 1)

Everything is float64 on the device of the rows, because squares of gradients of 1e-20 are below
what float32 holds, and nothing is read by the host. Of more columns than `DENSE`, S itself is not
kept but its diagonal and ``S O`` of a fixed random O ``[columns, RANK]``: both are linear in S, so
shards merge as exactly as S does, and Nystrom's formula makes a low rank plus a diagonal of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.errors import ShapeError

DENSE = 512  # columns up to which S is kept whole: 2 MiB
RANK = 64  # of the sketch beyond; 0.5 KiB a column
TINY = 1e-300


@functools.lru_cache(maxsize=16)
def _probes(columns: int, device: torch.device) -> Tensor:
    """Random signs ``[columns, RANK]``, the same for every stream, rank and process."""
    generator = torch.Generator().manual_seed(columns)
    signs = torch.randint(0, 2, (columns, RANK), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).to(device)


@dataclass(frozen=True, eq=False)
class Covariance:
    """``factor factor^T + diag(rest)``, float64 on the CPU.

    Attributes:
        factor: ``[columns, rank]``.
        rest: ``[columns]``, variance that the factor leaves; 0 where it has all.
    """

    factor: Tensor
    rest: Tensor

    def matrix(self) -> Tensor:
        """The matrix, ``[columns, columns]``."""
        return self.factor @ self.factor.t() + self.rest.diag()

    @property
    def variance(self) -> Tensor:
        """Its diagonal, ``[columns]``."""
        return self.factor.square().sum(dim=1) + self.rest

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Rows of mean 0 with this covariance, ``[rows, columns]`` float64."""
        columns, rank = self.factor.shape
        strong = torch.randn((rows, rank), generator=generator, dtype=torch.float64)
        found = strong @ self.factor.t()
        if bool(self.rest.any()):
            rest = torch.randn((rows, columns), generator=generator, dtype=torch.float64)
            found += rest * self.rest.sqrt()
        return found


def root_of(matrix: Tensor) -> Tensor:
    """``L`` with ``L L^T`` equal to a covariance ``[size, size]``, whatever its columns' scales.

    By the correlation: of a column 1e7 times smaller than the others the eigenvectors of the
    covariance itself would keep nothing.
    """
    deviation = matrix.diagonal().clamp_min(0.0).sqrt()
    scale = torch.where(deviation > 0, deviation, 1.0)
    values, vectors = torch.linalg.eigh(matrix / scale / scale[:, None])
    root: Tensor = vectors * values.clamp_min(0.0).sqrt() * deviation[:, None]
    return root


class Moments:
    """Count, mean and covariance of rows.

    Args:
        columns: Of a row.
        device: Of the rows.
        dense: Columns up to which the covariance is kept whole.
    """

    def __init__(self, columns: int, device: torch.device, *, dense: int = DENSE) -> None:
        self.columns, self.is_dense = columns, columns <= dense
        width = columns if self.is_dense else RANK
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(columns, dtype=torch.float64, device=device)
        self.squares = torch.zeros(columns, dtype=torch.float64, device=device)
        self.products = torch.zeros((columns, width), dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of."""
        return {
            "count": self.count,
            "mean": self.mean,
            "squares": self.squares,
            "products": self.products,
        }

    def _times_probes(self, x: Tensor) -> Tensor:
        return x if self.is_dense else x @ _probes(self.columns, x.device).to(x.dtype)

    def add(self, rows: Tensor, keep: Tensor) -> None:
        """Take rows in.

        Args:
            rows: ``[rows, columns]`` float64, finite.
            keep: ``[rows]``, whether a row counts.
        """
        kept = keep.to(torch.float64)
        count = kept.sum()
        mean = (kept @ rows) / count.clamp_min(1.0)
        centered = (rows - mean) * kept[:, None]
        products = centered.t() @ self._times_probes(centered)
        self._merge(count, mean, centered.square().sum(dim=0), products)

    def merge(self, other: Moments) -> None:
        """Take in what another saw.

        Raises:
            ShapeError: It saw other columns, or keeps them in another form.
        """
        if self.products.shape != other.products.shape:
            raise ShapeError(
                f"moments of {self.columns} columns cannot take in those of {other.columns}"
            )
        self._merge(*(x.to(self.mean.device) for x in other.tensors().values()))

    def _merge(self, count: Tensor, mean: Tensor, squares: Tensor, products: Tensor) -> None:
        total = self.count + count
        share = count / total.clamp_min(1.0)
        weight = self.count * share
        apart = mean - self.mean
        self.mean += share * apart
        self.squares += squares + weight * apart.square()
        self.products += products + weight * torch.outer(apart, self._times_probes(apart))
        self.count.copy_(total)

    def sums(self) -> dict[str, Tensor]:
        """Plain sums over the rows, which add up over ranks; see `use_sums`."""
        spread = self._times_probes(self.mean)
        return {
            "count": self.count,
            "mean": self.count * self.mean,
            "squares": self.squares + self.count * self.mean.square(),
            "products": self.products + self.count * torch.outer(self.mean, spread),
        }

    def use_sums(self, sums: dict[str, Tensor]) -> None:
        """Become what these sums are of.

        Subtracting the mean back loses ``2^-53 (1 + mean^2 / variance)`` of the variance: 1e-6 at
        a mean of 1e5 deviations.
        """
        count = sums["count"]
        mean = sums["mean"] / count.clamp_min(1.0)
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.squares.copy_((sums["squares"] - count * mean.square()).clamp_min(0.0))
        outer = torch.outer(mean, self._times_probes(mean))
        self.products.copy_(sums["products"] - count * outer)

    def covariance(self) -> Covariance:
        """The covariance so far; read by the host."""
        degrees = max(float(self.count) - 1.0, 1.0)
        products, variance = self.products.cpu() / degrees, self.squares.cpu() / degrees
        if self.is_dense:
            factor = root_of((products + products.t()) / 2)
            return Covariance(factor, torch.zeros_like(variance))
        # Nystrom on the correlation's scale, for the sake of columns of any size.
        scale = torch.where(variance > 0, variance.sqrt(), 1.0)[:, None]
        probes = _probes(self.columns, torch.device("cpu")).double()
        core = probes.t() @ products
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        largest = float(values[-1])
        kept = values > 1e-10 * max(largest, TINY)
        factor = products @ (vectors[:, kept] / values[kept].sqrt())
        excess = (factor / scale).square().sum(dim=1, keepdim=True).sqrt().clamp_min(1.0)
        factor = factor / excess  # rounding must not give a column more than its variance
        return Covariance(factor, (variance - factor.square().sum(dim=1)).clamp_min(0.0))
