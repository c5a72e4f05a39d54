"""A bounded sample of rows, kept on their device: those with the smallest random keys.

Which rows stay depends on keys alone, so samples of shards merge into the sample of the whole, and
two streams that are given the same keys (inputs, and gradients of the same rows) keep the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 512  # from which the 99th percentile of rows is still an order statistic, the fifth
ELEMENTS = 2**19  # 2 MiB of float32; fewer of longer rows
FEWEST_ROWS = 64  # of which anything is said; 30 MiB at k = 123200


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
        sample_rows([self], rows[None], keys[None])

    def merge(self, other: Reservoir) -> None:
        """Take in another's rows."""
        device = self.rows.device
        self.add(other.rows.to(device), other.keys.to(device))

    @property
    def is_filled(self) -> bool:
        """Whether there is a row."""
        return bool(torch.isfinite(self.keys).any())

    def kept(self) -> tuple[Tensor, Tensor]:
        """Rows ``[count, columns]`` and their keys, on the CPU."""
        keys = self.keys.cpu()
        count = int(torch.isfinite(keys).sum())
        return self.rows[:count].cpu(), keys[:count]


def sample_rows(many: Sequence[Reservoir], rows: Tensor, keys: Tensor) -> None:
    """Take rows into samples of as many rows and columns, in a few launches.

    Args:
        many: The samples, each once.
        rows: ``[samples, rows, columns]``.
        keys: ``[samples, rows]``.
    """
    own_keys, own_rows = [one.keys for one in many], [one.rows for one in many]
    all_keys = torch.cat((torch.stack(own_keys), keys), dim=1)
    found, places = torch.topk(all_keys, len(own_keys[0]), largest=False, sorted=True)
    stacked = torch.cat((torch.stack(own_rows), rows.to(torch.float32)), dim=1)
    kept = stacked.gather(1, places[:, :, None].expand(-1, -1, stacked.shape[2]))
    torch._foreach_copy_(own_keys, list(found))
    torch._foreach_copy_(own_rows, list(kept))
