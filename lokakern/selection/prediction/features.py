"""Features of a GEMM, and a base time by physics that a fitted model corrects.

The base is the time of the tensor cores, with the last wave of tiles counted as full, or of memory,
whichever is longer; to it are added launches and the traffic of quantizing. A model is fitted to
the logarithm of a measured time over this base, so that it stays plausible between and beyond the
sizes that were measured. A change of a feature makes every model file useless: raise `VERSION`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from lokakern.quantized_tensor import pitch_of
from lokakern.selection.padded_rows import bytes_copied
from lokakern.types import Format, Granularity, Layout, Problem

VERSION = 2
_TILES = ((128, 128), (128, 256), (256, 128), (64, 256), (128, 64), (128, 32))  # of common kernels
_FULL_ALIGNMENT = 256  # elements; more does not matter
_TMA_ALIGNMENT = 8  # elements of 16 bits, below which cuBLAS does not use its kernels for Hopper
_LAUNCH_US, _QUANTIZE_US, _WEIGHT_US = 2.2, 1.2, 0.8  # of a GEMM, and of quantizing a and b
_SPLIT_LOSS, _SPLIT_US = 1.5, 2.0  # of sums that are split among SMs
_QUANTIZED_BYTES = 3  # of an element: read in 16 bits, written in 8
_NONE_LOG = -9.0  # in place of the logarithm of 0

_Rate = Annotated[float, Meta(ge=1, le=1e12)]


class Rates(Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of a device that its kernels reach.

    Attributes:
        compute_units: Number of SMs.
        fp8_flops_per_us: Of large FP8 GEMMs.
        bf16_flops_per_us: Of large GEMMs of bfloat16 with aligned rows.
        unaligned_flops_per_us: Of those whose rows are not aligned to 16 bytes.
        bytes_per_us: Of memory.
    """

    compute_units: Annotated[int, Meta(ge=1, le=4096)]
    fp8_flops_per_us: _Rate
    bf16_flops_per_us: _Rate
    unaligned_flops_per_us: _Rate
    bytes_per_us: _Rate


def is_covered(problem: Problem) -> bool:
    """Whether features describe a problem.

    They do for one product of bfloat16 operands, or of one and a prepared weight, with bfloat16
    output and at most a bias.
    """
    b = problem.b
    if problem.op != "gemm" or b is None or problem.batch != 1:
        return False
    plain = problem.a.format is problem.out_format is Format.BFLOAT16
    plain = plain and not problem.out_strided and not problem.accumulate
    form = b.format.is_fp8 if problem.prepared else b.format is Format.BFLOAT16
    return plain and form and problem.epilogue in ("none", "bias")


def _alignment(size: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """The largest power of two that divides a size, at most `_FULL_ALIGNMENT`."""
    sizes = np.asarray(size, np.int64)
    found: NDArray[np.float64] = np.minimum(sizes & -sizes, _FULL_ALIGNMENT).astype(float)
    return found


def described(
    problem: Problem,
    m: NDArray[np.int64],
    granularity: Granularity,
    rates: Rates,
    *,
    pads: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Base times in microseconds and features of a kernel at a problem.

    Args:
        problem: At any m; `is_covered` holds.
        m: Rows of a, ``[count]``.
        granularity: Of the kernel's scales of a; NONE does not quantize.
        rates: Of the device.
        pads: Whether the kernel copies unaligned operands into padded rows.

    Returns:
        ``[count]`` and ``[count, features]``.
    """
    assert problem.b is not None
    n, k = problem.n, problem.k
    rows = m.astype(float)
    is_fp8 = granularity is not Granularity.NONE
    quantizes_b = is_fp8 and not problem.prepared
    a_column = problem.a.layout is Layout.COLUMN
    b_row = problem.b.layout is Layout.ROW
    item = 1 if is_fp8 else 2
    gemm_bytes = item * (rows * k + float(n) * k) + 2 * rows * n
    quantized_bytes = np.zeros_like(rows)
    if is_fp8:
        quantized_bytes = _QUANTIZED_BYTES * (rows * k + (float(n) * k if quantizes_b else 0.0))
    flops = 2.0 * rows * n * k

    every = np.full_like(rows, 1.0)
    a_alignment = _alignment(m) if a_column else every * _alignment(k)
    b_alignment = every * _alignment(n if b_row else k)
    out_alignment = every * _alignment(n)
    if is_fp8:  # of the rows that quantizers write, in bytes
        a_alignment = b_alignment = every * _alignment(pitch_of(k))
    least = np.minimum(np.minimum(a_alignment, b_alignment), out_alignment)
    unaligned = (least < _TMA_ALIGNMENT) & (not (is_fp8 or pads))
    peak = np.where(unaligned, rates.unaligned_flops_per_us, rates.bf16_flops_per_us)
    if is_fp8:
        peak = every * rates.fp8_flops_per_us

    columns: list[NDArray[np.float64]] = []
    tiled_us = np.full_like(rows, np.inf)
    for height, width in _TILES:
        tiles = np.ceil(rows / height) * math.ceil(n / width)
        waves = np.ceil(tiles / rates.compute_units)
        covered = waves * rates.compute_units * (height * width)
        tiled_us = np.minimum(tiled_us, covered * 2.0 * k / peak)
        columns += [
            np.log(tiles / rates.compute_units / waves),
            np.log(rows * n / (tiles * (height * width))),
            np.log2(np.minimum(waves, 64)),
        ]
    ideal_us = flops / peak
    memory_us = gemm_bytes / rates.bytes_per_us
    product_us = np.maximum(np.minimum(tiled_us, ideal_us * _SPLIT_LOSS + _SPLIT_US), memory_us)
    quantize_us = quantized_bytes / rates.bytes_per_us
    base_us = _LAUNCH_US + product_us + quantize_us
    base_us = base_us + (_QUANTIZE_US if is_fp8 else 0.0) + (_WEIGHT_US if quantizes_b else 0.0)
    if pads:
        copied_bytes = [bytes_copied(replace(problem, m=x)) for x in m.tolist()]
        base_us = base_us + np.array(copied_bytes) / rates.bytes_per_us

    weight_us = _QUANTIZED_BYTES * float(n) * k / rates.bytes_per_us
    columns += [
        np.log(rows), every * math.log(n), every * math.log(k), np.log(flops),
        np.log(gemm_bytes + quantized_bytes), np.log(flops / gemm_bytes),
        np.log2(a_alignment), np.log2(b_alignment), np.log2(out_alignment),
        every * a_column, every * b_row, every * problem.prepared,
        every * (problem.epilogue != "none"), np.log(base_us), np.log(memory_us / product_us),
        np.log(ideal_us / product_us), np.log(tiled_us / product_us), quantize_us / base_us,
        _LAUNCH_US / base_us, every * (k % 128 / 128), every * (n % 128 / 128),
        every * (n % 256 / 256), m % 128 / 128, np.log(rows * n),
        np.log(np.minimum(rows, n) / np.maximum(rows, n)), unaligned.astype(float),
        every * (math.log(weight_us) if quantizes_b else _NONE_LOG), np.log(quantize_us + 1e-3),
    ]  # fmt: skip
    return base_us, np.stack(columns, 1).astype(np.float32)


FEATURES = 3 * len(_TILES) + 28
