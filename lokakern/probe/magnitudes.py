"""Magnitudes of a stream of numbers: a histogram of logarithms, from which quantiles are read.

Eight bins an octave over all that float32 holds: a quantile is right to 1/16 of an octave, 4.4 %.
Histograms of shards add up exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BINS_PER_OCTAVE = 8
LOWEST, HIGHEST = -150, 128  # log2; the smallest float32 is 2^-149
BINS = 1 + (HIGHEST - LOWEST) * BINS_PER_OCTAVE  # the first is of zeros


class Magnitudes:
    """How often numbers of each magnitude came.

    Attributes:
        counts: ``[BINS]`` float64, which is exact up to 2^53.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)

    def add(self, x: Tensor, keep: Tensor) -> None:
        """Take numbers in, on their device and unread by the host.

        Args:
            x: Numbers of either sign, any shape.
            keep: Whether a number counts; not one that is not finite.
        """
        place = (torch.log2(x.double().abs()) - LOWEST) * BINS_PER_OCTAVE
        place = torch.nan_to_num(place.floor() + 1.0, nan=0.0, neginf=0.0, posinf=BINS - 1.0)
        place = place.clamp(0, BINS - 1).long()
        self.counts.scatter_add_(0, place.flatten(), keep.double().expand_as(x).flatten())

    @property
    def count(self) -> float:
        """How many numbers, zeros included."""
        return float(self.counts.sum())

    @property
    def zero_share(self) -> float:
        """Share of zeros; 0 of nothing."""
        return float(self.counts[0]) / max(self.count, 1.0)

    def log2_quantiles(self, *shares: float) -> tuple[float, ...]:
        """log2 of quantiles of what is not 0; NaN if that is nothing."""
        sums = self.counts[1:].cpu().cumsum(0)
        total = float(sums[-1])
        if total == 0:
            return (math.nan,) * len(shares)
        ranks = torch.tensor([share * total for share in shares], dtype=torch.float64)
        places = torch.searchsorted(sums, ranks.clamp(0.5, total))
        return tuple(LOWEST + (float(place) + 0.5) / BINS_PER_OCTAVE for place in places)

    def spread_log2(self, low: float = 0.01, high: float = 0.99) -> float:
        """Octaves between two quantiles; 0 of nothing."""
        first, last = self.log2_quantiles(low, high)
        return 0.0 if math.isnan(first) else last - first


def spread_of(values: Tensor) -> float:
    """Octaves between the 1st and the 99th percentile of nonzero sizes ``[count]``."""
    sizes = values[values > 0].double().cpu()
    if sizes.numel() == 0:
        return 0.0
    low, high = torch.quantile(sizes.log2(), torch.tensor([0.01, 0.99], dtype=torch.float64))
    return float(high - low)
