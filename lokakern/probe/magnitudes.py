"""Magnitudes of a stream of numbers: a histogram of logarithms, from which quantiles are read.

A bin is the exponent of a float32 and the first four bits of its fraction, so that finding it takes
a GPU one shift: 16 bins an octave, at most 0.088 of an octave wide, and a quantile is right to half
of that. Numbers below 2^-130 count as 0. Histograms of shards add up exactly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

SHIFT = 19  # of 32 bits: sign, 8 of exponent and 4 of fraction are left
BINS = 1 << (31 - SHIFT)
FINITE = 255 << (23 - SHIFT)  # the first bin of what is not finite
LARGEST = (2 - 2**-23) * 2.0**127  # float32


class Magnitudes:
    """How often numbers of each magnitude came.

    Attributes:
        counts: ``[BINS]`` float64, which is exact up to 2^53.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Take numbers in, any shape, sign and float dtype; on their device, unread by the host."""
        add_magnitudes([self], x[None])

    @property
    def count(self) -> int:
        """How many finite numbers, zeros included."""
        return int(self.counts[:FINITE].sum())

    @property
    def nonfinite_count(self) -> int:
        return int(self.counts[FINITE:].sum())

    @property
    def zero_share(self) -> float:
        """Share of zeros among finite numbers; 0 of nothing."""
        return float(self.counts[0]) / max(self.count, 1)

    def share_beyond(self, low: float, high: float) -> float:
        """Share of finite numbers that are not 0 and lie outside of a range; 0 of nothing."""
        first, last = (_place(x) for x in (low, high))
        inside = self.counts[max(first, 1) : last + 1].sum()
        return float(self.counts[1:FINITE].sum() - inside) / max(self.count, 1)

    def log2_quantiles(self, *shares: float) -> tuple[float, ...]:
        """log2 of quantiles of what is finite and not 0; NaN if that is nothing."""
        sums = self.counts[1:FINITE].cpu().cumsum(0)
        total = float(sums[-1])
        if total == 0:
            return (math.nan,) * len(shares)
        ranks = torch.tensor([share * total for share in shares], dtype=torch.float64)
        places = torch.searchsorted(sums, ranks.clamp(0.5, total))
        return tuple((_edge(place + 1) + _edge(place + 2)) / 2 for place in places.tolist())

    def spread_log2(self, low: float = 0.01, high: float = 0.99) -> float:
        """Octaves between two quantiles; 0 of nothing."""
        first, last = self.log2_quantiles(low, high)
        return 0.0 if math.isnan(first) else last - first


def add_magnitudes(many: Sequence[Magnitudes], x: Tensor) -> None:
    """Take in ``x[i]`` as the i-th, all in a few launches; ``[count, ...]``, any float dtype."""
    bits = x.detach().float().abs().view(torch.int32).flatten(1)
    places = (bits >> SHIFT).long()
    places += BINS * torch.arange(len(many), device=x.device)[:, None]
    one = torch.ones((), dtype=torch.float64, device=x.device)
    counts = torch.zeros(len(many) * BINS, dtype=torch.float64, device=x.device)
    counts.scatter_add_(0, places.flatten(), one.expand(places.numel()))
    torch._foreach_add_([m.counts for m in many], list(counts.view(-1, BINS)))


def _place(value: float) -> int:
    """The bin of a number that is not negative; of one too large for a float32, the last."""
    (bits,) = struct.unpack("<I", struct.pack("<f", min(value, LARGEST)))
    return int(bits) >> SHIFT


def _edge(place: int) -> float:
    """log2 of where a bin begins."""
    if place >= FINITE:
        return 128.0
    (value,) = struct.unpack("<f", struct.pack("<I", place << SHIFT))
    return math.log2(value)


def spread_of(values: Tensor) -> float:
    """Octaves between the 1st and the 99th percentile of nonzero sizes ``[count]``."""
    sizes = values[values > 0].double().cpu()
    if sizes.numel() == 0:
        return 0.0
    low, high = torch.quantile(sizes.log2(), torch.tensor([0.01, 0.99], dtype=torch.float64))
    return float(high - low)
