"""Sums of columns are added in one order, and are as accurate as that order permits."""

from __future__ import annotations

import torch

from lokakern.sums import LINES, column_sums, error_bound
from lokakern.types import GROUP


def test_neighbors_are_added_first_and_every_64th_tile_in_turn() -> None:
    """The values 2^24, 1 and 1 show the order: float32 loses 1 beside 2^24, but not 2."""
    large, step = 2.0**24, LINES * GROUP
    for rows, found in (((0, 1, 2), large), ((0, 2, 3), large + 2), ((0, step, 2 * step), large),
                        ((0, GROUP, 2 * GROUP), large), ((0, 2 * GROUP, 3 * GROUP), large + 2),
                        ((0, GROUP, GROUP + step), large + 2)):  # fmt: skip
        x = torch.zeros(2 * step + 1, 1)
        x[list(rows), 0] = torch.tensor([large, 1.0, 1.0])
        assert column_sums(x).tolist() == [found], rows


def test_sums_are_within_their_bound_of_float64() -> None:
    for rows in (1, 2, 127, 129, 8192, 8193, 40000):
        x = torch.randn(rows, 33, generator=torch.Generator().manual_seed(rows))
        x *= torch.logspace(-30, 30, rows).unsqueeze(1)
        x[1::2, 0] = -x[: rows - rows % 2 : 2, 0]
        for given in (x, x.bfloat16(), x.t().contiguous().t()):
            error = (column_sums(given).double() - given.double().sum(dim=0)).abs()
            assert (error <= error_bound(given)).all(), rows
            assert rows < 127 or error.sum() > 0
    assert column_sums(x[:0]).tolist() == [0.0] * 33
