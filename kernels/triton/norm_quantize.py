"""Norm of rows that fit in registers, and FP8 of it, with one read.

    y = x[m, k] + bias[k] + residual[m, k]
    d = tail(norm(y) * weight[k] + norm_bias[k])                     (`lokakern.types.NormEpilogue`)

x: [m, k], bfloat16 or float32, any row stride; d: [m, k], bfloat16, or FP8 with scales as
`lokakern.numerics.quantize` makes them of d, which is float32 and never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.epilogue import NormEpilogue, norm_form
from lokakern.jit import Launch, TritonLauncher, cached
from lokakern.kernels.triton.norm_pieces import (
    Form,
    grain,
    inverse_root,
    pieces,
    static_cast,
    tail,
    unwritable,
    whole,
    written,
)
from lokakern.kernels.triton.quantize import (
    LONGEST_ROW,
    _cast,
    _decode_scale,
    _finite_magnitude,
    format_constants,
    row_tile,
)
from lokakern.norm import Norm
from lokakern.registry.register import COMPILED_ONLY, FP8_GPUS, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Layout,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)


@triton.jit(do_not_specialize=["rows"])
def norm_quantize_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    residual: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    data_stride: tl.tensor,
    residual_stride: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    rows: tl.tensor,
    NORM: tl.constexpr,
    SPAN: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    LAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr,
    MAX: tl.constexpr,
    NAN_BYTE: tl.constexpr,
    GRAIN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """ROWS whole rows a program; SPAN columns share statistics where it is not 0."""
    length = COLUMNS if EVEN else whole(columns, GRAIN)
    x_stride, data_stride = whole(x_stride, GRAIN), whole(data_stride, GRAIN)
    residual_stride = whole(residual_stride, GRAIN)
    first_stride, second_stride = whole(first_stride, GRAIN), whole(second_stride, GRAIN)
    start = tl.program_id(0).to(tl.int64) * ROWS
    in_tile, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if ROWS > 128:  # short rows may be slices of wide ones, which 32 bits do not reach
        in_tile = in_tile.to(tl.int64)
    row_known, column_known = in_tile < rows - start, column < length
    # Rows past the end read the last one and are not stored.
    row = tl.minimum(in_tile, (rows - 1 - start).to(in_tile.dtype))
    inside = column_known[None, :]
    at_x = x + start * x_stride + row[:, None] * x_stride + column[None, :]
    y = tl.load(at_x, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if HAS_BIAS:
        extra = tl.load(bias + column, column_known, other=0.0, eviction_policy="evict_last")
        y += extra.to(tl.float32)[None, :]
    if RESIDUAL == "before":
        at_residual = residual + start * residual_stride + row[:, None] * residual_stride
        added = tl.load(
            at_residual + column[None, :], inside, other=0.0, eviction_policy="evict_first"
        )
        y += added.to(tl.float32)
    if SPAN:
        blocks = tl.reshape(y, [ROWS, COLUMNS // SPAN, SPAN])
        inverse = inverse_root(tl.sum(blocks * blocks, 2) * (1.0 / SPAN), EPS)
        y = tl.reshape(blocks * inverse[:, :, None], [ROWS, COLUMNS])
    elif NORM != "none":
        if NORM == "layer":
            # Rounded once: all of a mean's error stays, where the mean is large against z.
            y -= tl.div_rn(tl.sum(y, 1), length * 1.0)[:, None]
            if not EVEN:
                y = tl.where(inside, y, 0.0)
        y *= inverse_root(tl.sum(y * y, 1) / (length * 1.0), EPS)[:, None]
    d = tail(
        y, norm_weight, norm_bias, residual + start * residual_stride,
        first + start * first_stride, second + start * second_stride, column, row,
        residual_stride, first_stride, second_stride, column_known, inside,
        HAS_NORM_WEIGHT, HAS_NORM_BIAS, LAST, RESIDUAL,
    )  # fmt: skip
    target = data + start * data_stride + in_tile[:, None] * data_stride + column[None, :]
    known = row_known[:, None] & inside
    if SCALES == "none":
        tl.store(target, d.to(data.dtype.element_ty), known)
    else:
        if SCALES == "row":
            scales = _decode_scale(tl.max(_finite_magnitude(d), 1), MAX)
            tl.store(scale + start + in_tile, scales, row_known)
            encoded = _cast(d, scales[:, None], data.dtype.element_ty, MAX, NAN_BYTE)
        elif SCALES == "group":
            width: tl.constexpr = COLUMNS if COLUMNS < 128 else 128
            groups: tl.constexpr = COLUMNS // width
            grouped = tl.reshape(d, [ROWS, groups, width])
            scales = _decode_scale(tl.max(_finite_magnitude(grouped), 2), MAX)
            group = tl.arange(0, groups)
            # Columns of scales start every 4 of them.
            at_group = group.to(tl.int64)[None, :] * (tl.cdiv(rows, 4) * 4)
            group_known = row_known[:, None] & (group * width < length)[None, :]
            tl.store(scale + start + in_tile[:, None] + at_group, scales, group_known)
            encoded = _cast(grouped, scales[:, :, None], data.dtype.element_ty, MAX, NAN_BYTE)
            encoded = tl.reshape(encoded, [ROWS, COLUMNS])
        else:
            encoded = static_cast(d, tl.load(scale), data.dtype.element_ty, MAX, NAN_BYTE)
        tl.store(target, encoded.to(data.dtype.element_ty, bitcast=True), known)


_launch = TritonLauncher(norm_quantize_kernel)


@cached
def _bound(
    columns: int,
    strides: tuple[int, ...],
    norm: Norm,
    form: Form,
    scales: str,
    out: torch.dtype,
    _x: torch.dtype,
) -> tuple[Launch, int]:
    height, width, num_warps = row_tile(columns)
    bias, norm_weight, norm_bias = (x is not None for x in form[:3])
    blocks = norm.kind == "block_rms" and norm.block != columns
    constants = (
        "rms" if norm.kind == "block_rms" else norm.kind, norm.block if blocks else 0, norm.eps,
        bias, norm_weight, norm_bias, form.last, form.residual,
        scales, *(format_constants(out) if scales != "none" else (0.0, 0)),
        grain(columns, *strides), columns == width, height, width,
    )  # fmt: skip
    return _launch.bind((columns, *strides), constants, num_warps, 1), height


def _supports(problem: Problem, device: Device) -> Support:
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    why = unwritable(problem, device)
    if why:
        return Rejected(why)
    if problem.k > LONGEST_ROW or problem.m >= 2**31:
        return Rejected(
            f"holds rows of up to {LONGEST_ROW} elements, of fewer than 2^31; they are "
            f"{problem.shape}"
        )
    norm = norm_form(problem.epilogue).norm
    uneven = norm.block and (problem.k % norm.block or norm.block & (norm.block - 1))
    if uneven and norm.block != problem.k:
        return Rejected(f"{norm} of {problem.k}: blocks are powers of two that divide a row")
    return ACCEPTED


@register(
    "norm_quantize",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    supports=_supports,
)
def norm_quantize(
    x: Tensor,
    out: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    """Tiles of as many elements as `quantize` has, so that as many loads are in flight."""
    rows, columns = x.shape
    data, scale, scales = written(out)
    form, tensors, tail_strides = pieces(epilogue, data)
    strides = (x.stride(0), data.stride(0), *tail_strides)
    launch, height = _bound(columns, strides, epilogue.norm, form, scales, data.dtype, x.dtype)
    launch(-(-rows // height), (x, data, scale, *tensors), (rows,))
