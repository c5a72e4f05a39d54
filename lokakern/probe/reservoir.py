"""A bounded sample of rows, kept on their device: those with the smallest random keys.

Which rows stay depends on keys alone, so samples of shards merge into the sample of the whole, and
two streams that are given the same keys (inputs, and gradients of the same rows) keep the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 512  # from which the 99th percentile of rows is still an order statistic, the fifth
ELEMENTS = 2**19  # 2 MiB of float32; fewer of longer rows
FEWEST_ROWS = 64  # of which tails are judged; 30 MiB at k = 123200


def capacity_of(columns: int) -> int:
    """Rows that are kept of so many columns."""
    return max(FEWEST_ROWS, min(ROWS, ELEMENTS // max(columns, 1)))


class Reservoir:
    """Rows, uniformly sampled from a stream.

    Attributes:
        rows: ``[capacity, columns]`` float32, by key.
        keys: ``[capacity]`` float64, ascending; infinite where there is no row.
    """

    def __init__(self, columns: int, device: torch.device, capacity: int | None = None) -> None:
        size = capacity_of(columns) if capacity is None else capacity
        self.rows = torch.zeros((size, columns), device=device)
        self.keys = torch.full((size,), math.inf, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, keys: Tensor) -> None:
        """Take in what of these rows ranks among the smallest keys.

        Args:
            rows: ``[rows, columns]``.
            keys: ``[rows]`` float64, uniform over 0..1; infinite for a row not to be kept.
        """
        all_keys = torch.cat((self.keys, keys))
        found, places = torch.topk(all_keys, len(self.keys), largest=False, sorted=True)
        stacked = torch.cat((self.rows, rows.to(self.rows.dtype)))
        self.rows.copy_(stacked[places])
        self.keys.copy_(found)

    def merge(self, other: Reservoir) -> None:
        """Take in another's rows."""
        device = self.rows.device
        self.add(other.rows.to(device), other.keys.to(device))

    def kept(self) -> tuple[Tensor, Tensor]:
        """Rows ``[count, columns]`` and their keys, on the CPU."""
        keys = self.keys.cpu()
        count = int(torch.isfinite(keys).sum())
        return self.rows[:count].cpu(), keys[:count]
