"""Whether a Gaussian stands for rows: two samples compared where rounding to FP8 would tell.

X2-X4 are near enough to their Gaussians, X5, X6 and X12 are not. Of 512 rows, k = 64-512, 5 seeds:

    small elements   largest distance of the distribution functions, over rows, of the share of a
                     row's elements under 1/16 of its root mean square: X1-X4 up to 0.10, X6 from
                     0.31, X12 1.0. Chance alone makes 0.12 in one of 1000 samples.
    sizes of rows    octaves between the 1st and 99th percentile that the Gaussian lacks: X1-X4 up
                     to 0.1 (LayerNorm makes rows more alike, which harms nobody), X12 5, X14 15.
    kurtosis         mean over columns: X5 1.9-2.2 (of few values), X3 2.7-2.9, X1 and X2 3.0, X4
                     5.0-6.0, X12 135 and more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_DISTANCE = 0.2
MOST_OCTAVES = 1.0
LEAST_KURTOSIS, MOST_KURTOSIS = 2.4, 10.0
FEWEST_ROWS = 64  # of which anything is said
SMALL = 1 / 16


@dataclass(frozen=True, slots=True)
class Fit:
    """How a Gaussian fits rows.

    Attributes:
        distance: Of the shares of small elements, 0..1.
        octaves: That rows are spread more than the Gaussian's.
        kurtosis: 3 of a Gaussian.
        rows: How many were compared.
    """

    distance: float
    octaves: float
    kurtosis: float
    rows: int

    @property
    def is_gaussian(self) -> bool:
        """Whether nothing says otherwise."""
        return not self.reason

    @property
    def reason(self) -> str:
        """What the Gaussian misses; "" if nothing that could be seen."""
        if self.rows < FEWEST_ROWS:
            return ""
        found = []
        if self.distance > MOST_DISTANCE:
            found.append(f"small elements differ by {self.distance:.2f} > {MOST_DISTANCE}")
        if self.octaves > MOST_OCTAVES:
            found.append(f"rows are spread {self.octaves:.1f} octaves more (> {MOST_OCTAVES:g})")
        if not LEAST_KURTOSIS <= self.kurtosis <= MOST_KURTOSIS:
            found.append(f"kurtosis is {self.kurtosis:.1f}, not {LEAST_KURTOSIS}-{MOST_KURTOSIS:g}")
        return ", ".join(found)


def fit_of(sample: Tensor, drawn: Tensor) -> Fit:
    """Compare rows that were seen with rows that the Gaussian draws.

    Args:
        sample: ``[rows, columns]``.
        drawn: ``[other, columns]``.
    """
    x, model = sample.double(), drawn.double()
    if len(x) < FEWEST_ROWS:
        return Fit(0.0, 0.0, 3.0, len(x))
    return Fit(
        _distance(_small_share(x), _small_share(model)),
        _spread(x) - _spread(model),
        _kurtosis(x),
        len(x),
    )


def _size(x: Tensor) -> Tensor:
    """Root mean square of each row, without underflow of squares."""
    peak = x.abs().amax(dim=1, keepdim=True)
    safe = torch.where(peak > 0, peak, 1.0)
    return ((x / safe).square().mean(dim=1).sqrt()) * peak.squeeze(1)


def _small_share(x: Tensor) -> Tensor:
    return (x.abs() < SMALL * _size(x)[:, None]).double().mean(dim=1)


def _distance(a: Tensor, b: Tensor) -> float:
    """Kolmogorov's and Smirnov's."""
    a, b = a.sort().values, b.sort().values
    places = torch.cat((a, b))
    shares = (torch.searchsorted(x, places, right=True) / len(x) for x in (a, b))
    first, second = shares
    return float((first - second).abs().max())


def _spread(x: Tensor) -> float:
    sizes = _size(x)
    sizes = sizes[sizes > 0].log2()
    if len(sizes) < 2:
        return 0.0
    low, high = torch.quantile(sizes, torch.tensor([0.01, 0.99], dtype=torch.float64))
    return float(high - low)


def _kurtosis(x: Tensor) -> float:
    centered = x - x.mean(dim=0)
    peak = centered.abs().amax(dim=0)
    centered = (centered / torch.where(peak > 0, peak, 1.0))[:, peak > 0]
    squares = centered.square()
    found = squares.square().mean(dim=0) / squares.mean(dim=0).square()
    return float(found.mean()) if len(found) else 3.0
