"""Comparison of outputs with exact results in pieces, so that float64 copies stay small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern import mx, numerics
from lokakern.sums import column_sums
from lokakern.types import GROUP, Granularity, QuantizedTensor

# `numerics.kernel_error` holds about 8 float64 copies of what it compares: 2 GiB of 2^25 elements.
PIECE_ELEMENTS = 2**25
COLUMNS_OF_SCALE = {
    Granularity.GROUP: GROUP,
    Granularity.BLOCK: GROUP,
    Granularity.MX: mx.GROUP,
}
SECTIONS = 8  # least number of pieces of an output that is compared in part


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of rows and of batch entries of an output ``[batch, m, n]``."""

    batch: slice
    rows: slice

    def of(self, out: Tensor) -> Tensor:
        return out[self.batch, self.rows]


def pieces_of(shape: Sequence[int], elements: int) -> list[Piece]:
    """Pieces of an output ``[batch, m, n]`` with at most so many elements, or one row."""
    batch, m, n = shape
    if m * n <= elements:
        step = elements // (m * n)
        return [
            Piece(slice(first, min(first + step, batch)), slice(0, m))
            for first in range(0, batch, step)
        ]
    rows = max(1, elements // n)
    return [
        Piece(slice(entry, entry + 1), slice(first, min(first + rows, m)))
        for entry in range(batch)
        for first in range(0, m, rows)
    ]


def pieces_to_check(
    shape: Sequence[int], elements: int, seed: int
) -> tuple[list[Piece], list[Piece]]:
    """Pieces to compare, and the others.

    All pieces of an output with at most so many elements are compared; of a larger output the
    first, the last and random pieces with at least so many elements.
    """
    batch, m, n = shape
    if batch * m * n <= elements:
        return pieces_of(shape, PIECE_ELEMENTS), []
    every = pieces_of(shape, min(PIECE_ELEMENTS, max(1, elements // SECTIONS)))
    between = every[1:-1]
    random.Random(seed).shuffle(between)
    left = [every[0], every[-1], *between] if len(every) > 1 else every
    count = held = 0
    while (held < elements or count < 2) and count < len(left):
        piece = left[count]
        held += (piece.batch.stop - piece.batch.start) * (piece.rows.stop - piece.rows.start) * n
        count += 1
    return left[:count], left[count:]


def _columns(x: QuantizedTensor, start: int, stop: int) -> Tensor:
    """Columns of quantized data ``[rows, k]``, float64; start is a multiple of 128."""
    scale = x.scale
    assert scale is not None  # FP8 has scales
    width = COLUMNS_OF_SCALE.get(x.granularity)
    if width is not None:
        scale = scale[:, start // width : -(-stop // width)]
    spread = numerics.spread_scale(scale, x.granularity, x.data.shape[0], stop - start)
    return x.data[:, start:stop].to(torch.float64) * spread.to(torch.float64)


def product_of_piece(a: Any, b: Any, piece: Piece) -> tuple[Tensor, Tensor]:
    """A piece of ``a @ b`` and of ``|a| @ |b|`` in float64, ``[rows, n]``, summed in steps of k.

    Args:
        a: ``[m, k]`` or ``[batch, m, k]``, or without a batch a QuantizedTensor.
        b: ``[k, n]`` or ``[batch, k, n]``, or a transposed QuantizedTensor.
        piece: The piece of the product.
    """
    quantized = isinstance(a, QuantizedTensor)
    if not quantized and a.dim() == 2:
        a, b = a[None], b[None]
    k, n = a.shape[-1], b.shape[-1]
    entries, rows = piece.batch.stop - piece.batch.start, piece.rows.stop - piece.rows.start
    exact = torch.zeros((entries, rows, n), dtype=torch.float64, device=a.device)
    magnitude = torch.zeros_like(exact)
    step = max(GROUP, PIECE_ELEMENTS // (entries * (rows + n)) // GROUP * GROUP)
    for start in range(0, k, step):
        stop = min(start + step, k)
        if quantized:
            left = _columns(a, start, stop)[None, piece.rows]
            right = _columns(b, start, stop).t()[None]
        else:
            left = a[piece.batch, piece.rows, start:stop].to(torch.float64)
            right = b[piece.batch, start:stop].to(torch.float64)
        exact.baddbmm_(left, right)
        magnitude.baddbmm_(left.abs(), right.abs())
    return exact.flatten(0, 1), magnitude.flatten(0, 1)


def compare_bytes(
    data: Tensor, scale: Tensor, exact_data: Tensor, exact_scale: Tensor | None
) -> str:
    """A description of the bytes that differ from the exact quantization, or ""."""
    differ = data.view(torch.uint8) != exact_data.view(torch.uint8)
    bytes_words = f"{int(differ.sum())} of {data.numel()} bytes"
    if exact_scale is not None:  # first: a wrong scale makes its data wrong, too
        bits = torch.uint8 if scale.element_size() == 1 else torch.int32
        off = scale.contiguous().view(bits) != exact_scale.contiguous().view(bits)
        if off.any():
            too = f"; so do {bytes_words}" if differ.any() else ""
            return (f"{int(off.sum())} of {scale.numel()} scales differ from the exact quantization"
                    f"{_first(off, scale, exact_scale)}{too}")  # fmt: skip
    if exact_scale is None or differ.any():
        return f"{bytes_words} differ from the exact quantization{_first(differ, data, exact_data)}"
    return ""


def _first(differ: Tensor, found: Tensor, exact: Tensor) -> str:
    """The first element that differs, and what it should be; "" if none does."""
    for row, column in differ.nonzero()[:1].tolist():
        got, expected = (float(x[row, column].view(found.dtype)) for x in (found, exact))
        return f", the first at row {row}, column {column}: {got:.9g}, not {expected:.9g}"
    return ""


def compare_sums(sums: Tensor, x: Tensor) -> str:
    """A description of the column sums that differ from `lokakern.sums`, or ""."""
    exact = column_sums(x)
    differ = int(((sums != exact) & ~(sums.isnan() & exact.isnan())).sum())
    if differ:
        return f"{differ} of {sums.numel()} sums of columns differ from those in their order"
    return ""
