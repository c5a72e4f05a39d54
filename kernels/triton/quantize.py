"""Quantize to FP8, byte for byte as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32; q: [rows, columns]; both with any row stride; scales as
`Granularity.empty_scale` lays them out. amax is over finite values.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import Launch, TritonLauncher, cached, for_amd
from lokakern.registry.register import COMPILED_ONLY, FP8_GPUS, register
from lokakern.types import (
    ACCEPTED,
    GROUP,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
)

# Elements of one program: 32 for each of 128 threads are four 16-byte loads of bfloat16 in flight.
TILE = 4096
# Longest row held in registers: 32 elements for each of 256 threads. Longer rows are read twice.
LONGEST_ROW = 8192
# Partial maxima of a tensor: 7.8 programs for each of 132 SMs, and every program of the second
# launch reads them all in 4 KiB.
PARTIALS = 1024


@triton.jit
def _finite_magnitude(x: tl.tensor) -> tl.tensor:
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _decode_scale(amax: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    smallest: tl.constexpr = 1.1754943508222875e-38  # 2^-126: x / s stays finite
    scale = tl.maximum(tl.div_rn(amax, MAX), smallest)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def _cast(
    x: tl.tensor, scale: tl.tensor, FORMAT: tl.constexpr, MAX: tl.constexpr, NAN_BYTE: tl.constexpr
) -> tl.tensor:
    """cast(rn(x / scale)) as bytes; NaN and infinity become the format's NaN.

    The division is Markstein's: from the correctly rounded reciprocal, two steps of fused
    multiply-add give the correctly rounded quotient in 5 instructions, where ``div.rn`` takes
    about 12 and a branch, more than there is time for at 4 TB/s. Scales under 2^-60 are lifted
    with x, so that no remainder which matters underflows. Remainders are taken with the sign that
    keeps -0. Infinities turn into NaN by themselves (inf - inf).
    """
    lift = tl.where(scale < 8.673617379884035e-19, 18446744073709551616.0, 1.0)  # 2^-60, 2^64
    divisor = scale * lift
    reciprocal = tl.div_rn(1.0, divisor)
    lifted = x * lift
    quotient = lifted * reciprocal
    quotient = tl.fma(tl.fma(quotient, divisor, -lifted), -reciprocal, quotient)
    quotient = tl.fma(tl.fma(quotient, divisor, -lifted), -reciprocal, quotient)
    if NAN_BYTE == 0:  # the cast instruction saturates and writes the one NaN (PTX says so)
        return quotient.to(FORMAT).to(tl.uint8, bitcast=True)
    # AMD: a quotient a last place above MAX may overflow to NaN, and -0 and NaN are set by hand.
    limited = tl.minimum(tl.maximum(quotient, -MAX), MAX)
    encoded = limited.to(FORMAT).to(tl.uint8, bitcast=True)
    if NAN_BYTE == 0x80:
        encoded = tl.where(encoded == 0x80, 0, encoded)
    return tl.where(tl.abs(x) < float("inf"), encoded, NAN_BYTE).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def quantize_row_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    data_stride: tl.tensor,
    rows: tl.tensor,
    MAX: tl.constexpr,
    NAN_BYTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
) -> None:
    """ROWS whole rows a program; COLUMNS at a time, twice, where a row is too long."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    known = (row < rows)[:, None]
    source = x + row[:, None] * x_stride + column[None, :]
    target = data + row[:, None] * data_stride + column[None, :]
    if IN_REGISTERS:
        mask = known & (column < columns)[None, :]
        values = tl.load(source, mask, other=0.0).to(tl.float32)
        scales = _decode_scale(tl.max(_finite_magnitude(values), 1), MAX)
        encoded = _cast(values, scales[:, None], data.dtype.element_ty, MAX, NAN_BYTE)
        tl.store(target, encoded.to(data.dtype.element_ty, bitcast=True), mask)
    else:
        amax = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, columns, COLUMNS):
            mask = known & (column < columns - start)[None, :]
            values = tl.load(source + start, mask, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, _finite_magnitude(values))
        scales = _decode_scale(tl.max(amax, 1), MAX)
        for start in range(0, columns, COLUMNS):
            mask = known & (column < columns - start)[None, :]
            values = tl.load(source + start, mask, other=0.0).to(tl.float32)
            encoded = _cast(values, scales[:, None], data.dtype.element_ty, MAX, NAN_BYTE)
            tl.store(target + start, encoded.to(data.dtype.element_ty, bitcast=True), mask)
    tl.store(scale + row, scales, row < rows)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def quantize_tile_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    data_stride: tl.tensor,
    rows: tl.tensor,
    scale_stride: tl.tensor,
    MAX: tl.constexpr,
    NAN_BYTE: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """ROWS x 128 elements a program: one scale for each row, or for the WHOLE tile."""
    # Neighbors in the grid are neighbors along a row, so that they share its memory pages.
    across = tl.cdiv(columns, 128)
    down, group = tl.program_id(0) // across, tl.program_id(0) % across
    row = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = group * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask, other=0.0)
    values = values.to(tl.float32)
    amax = tl.max(_finite_magnitude(values), 1)
    if WHOLE:
        scales = _decode_scale(tl.max(amax, 0), MAX)
        tl.store(scale + down * scale_stride + group, scales)
        encoded = _cast(values, scales, data.dtype.element_ty, MAX, NAN_BYTE)
    else:
        scales = _decode_scale(amax, MAX)
        tl.store(scale + group.to(tl.int64) * scale_stride + row, scales, row < rows)
        encoded = _cast(values, scales[:, None], data.dtype.element_ty, MAX, NAN_BYTE)
    target = data + row[:, None] * data_stride + column[None, :]
    tl.store(target, encoded.to(data.dtype.element_ty, bitcast=True), mask)


@triton.jit(do_not_specialize=["rows"])
def amax_kernel(
    x: tl.tensor,
    partials: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """partials[p] = largest finite magnitude of tiles p, p + programs, ..."""
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    amax = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask, other=0.0)
        amax = tl.maximum(amax, _finite_magnitude(values.to(tl.float32)))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(amax, 1), 0))


@triton.jit(do_not_specialize=["rows"])
def quantize_tensor_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    partials: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    data_stride: tl.tensor,
    rows: tl.tensor,
    MAX: tl.constexpr,
    NAN_BYTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
) -> None:
    """As many programs as `amax_kernel` had; each reduces all of its partials first."""
    programs = tl.num_programs(0)
    index = tl.arange(0, PARTIALS)
    scales = _decode_scale(tl.max(tl.load(partials + index, index < programs, other=0.0), 0), MAX)
    if tl.program_id(0) == 0:
        tl.store(scale, scales)
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    for index_of_tile in range(tl.program_id(0), tiles, programs):
        tile = tiles - 1 - index_of_tile  # backwards: the last tiles read are still in the L2
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask, other=0.0)
        encoded = _cast(values.to(tl.float32), scales, data.dtype.element_ty, MAX, NAN_BYTE)
        target = data + row[:, None] * data_stride + column[None, :]
        tl.store(target, encoded.to(data.dtype.element_ty, bitcast=True), mask)


_launch_row = TritonLauncher(quantize_row_kernel)
_launch_tile = TritonLauncher(quantize_tile_kernel)
_launch_amax = TritonLauncher(amax_kernel)
_launch_tensor = TritonLauncher(quantize_tensor_kernel)


def row_tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a program that holds whole rows, and its warps."""
    width = min(triton.next_power_of_2(columns), LONGEST_ROW)
    return max(1, TILE // width), width, 8 if width > TILE else 4


_row_tile = functools.cache(row_tile)


@cached
def format_constants(dtype: torch.dtype) -> tuple[float, int]:
    """MAX, and the NaN byte where the cast instruction cannot be relied upon, else 0."""
    form = Format.of(dtype)
    by_hand = for_amd() or form.nan_byte == 0x80
    return form.maximum, form.nan_byte if by_hand else 0


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    out = problem.out_format
    fnuz = device.architecture == "gfx942"
    if not out.is_fp8 or out.value.endswith("fnuz") is not fnuz:
        return Rejected(f"{device.architecture} does not convert to {out.value}")
    if problem.out_granularity is not granularity:
        return Rejected(f"makes {granularity.value} scales, not {problem.out_granularity.value}")
    if max(problem.m, problem.k) >= 2**31:
        return Rejected(f"sizes must be less than 2^31; they are {problem.shape}")
    return ACCEPTED


def _partials(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (torch.empty(PARTIALS, dtype=torch.float32, device=x.device),)


@register(
    "quantize",
    name="quantize_tensor",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    granularity=Granularity.TENSOR,
    supports=functools.partial(_supports, Granularity.TENSOR),
    workspace=_partials,
)
def quantize_tensor(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """Two launches: partial maxima, then every program reduces them and casts. No atomics."""
    rows, columns = x.shape
    height, width, num_warps = _row_tile(columns)
    tiles = -(-rows // height) * -(-columns // width)
    programs = min(tiles, PARTIALS)
    partials = workspace[0]
    sizes = (columns, x.stride(0))
    _launch_amax(programs, (x, partials), sizes, (rows,), (height, width), num_warps, 1)
    _launch_tensor(
        programs,
        (x, data, scale, partials),
        (*sizes, data.stride(0)),
        (rows,),
        (*format_constants(data.dtype), height, width, PARTIALS),
        num_warps,
        1,
    )


@register(
    "quantize",
    name="quantize_row",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    granularity=Granularity.ROW,
    supports=functools.partial(_supports, Granularity.ROW),
)
def quantize_row(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale per row."""
    rows, columns = x.shape
    strides = (x.stride(0), data.stride(0))
    launch, height = _row_launch(columns, strides, x.dtype, data.dtype)
    launch(-(-rows // height), (x, data, scale), (rows,))


@cached
def _row_launch(
    columns: int, strides: tuple[int, int], source: torch.dtype, target: torch.dtype
) -> tuple[Launch, int]:
    height, width, num_warps = row_tile(columns)
    constants = (*format_constants(target), height, width, columns <= width)
    return _launch_row.bind((columns, *strides), constants, num_warps, 1), height


@register(
    "quantize",
    name="quantize_group",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    granularity=Granularity.GROUP,
    supports=functools.partial(_supports, Granularity.GROUP),
)
def quantize_group(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale per row and 128 columns; 32 rows a program store 32 scales side by side."""
    rows, columns = x.shape
    height = TILE // GROUP
    _launch_tile(
        -(-rows // height) * -(-columns // GROUP),
        (x, data, scale),
        (columns, x.stride(0), data.stride(0)),
        (rows, scale.stride(1)),
        (*format_constants(data.dtype), height, False),
        4,
        1,
    )


@register(
    "quantize",
    name="quantize_block",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    granularity=Granularity.BLOCK,
    supports=functools.partial(_supports, Granularity.BLOCK),
)
def quantize_block(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale per 128 rows and 128 columns, one program each, 32 elements a thread."""
    rows, columns = x.shape
    _launch_tile(
        -(-rows // GROUP) * -(-columns // GROUP),
        (x, data, scale),
        (columns, x.stride(0), data.stride(0)),
        (rows, scale.stride(0)),
        (*format_constants(data.dtype), GROUP, True),
        16,
        1,
    )
