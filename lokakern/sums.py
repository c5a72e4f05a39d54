"""Sums of columns in float32, in one order on every device: the gradient of a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.formats import GROUP

LINES = 64  # of tiles of 128 rows
UNIT_ROUNDOFF = 2.0**-24


def column_sums(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums of the columns of x, with the bits that every kernel gives them.

    Of 128 rows neighbors are added by twos, and their sums by twos again. Every 64th of these tiles
    is added one after the other, and the 64 sums by twos. Rows that are not there are 0. NaN,
    infinities and overflow are those of float32 additions in this order.

    Args:
        x: ``[rows, columns]``, bfloat16 or float32, any strides.
        out: Where to write, float32 ``[columns]``; allocated if None.
    """
    rows, columns = x.shape
    tiles = -(-rows // GROUP)
    whole = torch.zeros((tiles * GROUP, columns), dtype=torch.float32, device=x.device)
    whole[:rows] = x
    parts = _by_twos(whole.view(tiles, GROUP, columns))
    lines = torch.zeros((LINES, columns), dtype=torch.float32, device=x.device)
    for first in range(0, tiles, LINES):
        some = parts[first : first + LINES]
        lines[: len(some)] += some
    total = _by_twos(lines[None])[0]
    return total if out is None else out.copy_(total)


def error_bound(x: Tensor) -> Tensor:
    """Most that `column_sums` may be off, float64 ``[columns]``: ``d u / (1 - d u) sum|x|``.

    d is how many additions an element passes through, ``12 + ceil(rows / 8192)``: 7 in a tile, one
    for each tile of its line, of which the first, to 0, is exact, and 6 between the lines.
    """
    depth = 12 + -(-x.shape[0] // (LINES * GROUP))
    share = depth * UNIT_ROUNDOFF
    return share / (1 - share) * x.double().abs().sum(dim=0)


def _by_twos(x: Tensor) -> Tensor:
    """Sums along the second axis, of a power of two of values."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x[:, 0]
