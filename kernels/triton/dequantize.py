"""Dequantize from FP8: x = rn(q * s).

q: [rows, columns]; x: [rows, columns], bfloat16 or float32; both with any row stride; scales as
`Granularity.empty_scale` lays them out.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import TritonLauncher
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

# 32 x 128 elements a program: 32 for each of 128 threads, two 16-byte loads in flight. Tiles one
# group wide serve every granularity, with one scale for each row of a tile.
ROWS = 32


@triton.jit(do_not_specialize=["rows", "down_stride", "across_stride"])
def dequantize_kernel(
    data: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    data_stride: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    down_stride: tl.tensor,
    across_stride: tl.tensor,
    ROWS: tl.constexpr,
    ROWS_OF_SCALE: tl.constexpr,
) -> None:
    """One tile of ROWS x 128. Scale of a row: scale[row / ROWS_OF_SCALE, group]."""
    across = tl.cdiv(columns, 128)
    down, group = tl.program_id(0) // across, tl.program_id(0) % across
    row = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = group * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    scales = tl.load(
        scale + row // ROWS_OF_SCALE * down_stride + group.to(tl.int64) * across_stride,
        row < rows,
        other=0.0,
    )
    values = tl.load(data + row[:, None] * data_stride + column[None, :], mask, other=0.0)
    result = values.to(tl.float32) * scales[:, None]
    target = out + row[:, None] * out_stride + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask)


_launch = TritonLauncher(dequantize_kernel)


def _dequantize(
    granularity: Granularity,
    data: Tensor,
    scale: Tensor,
    out: Tensor,
    workspace: tuple[Tensor, ...],
) -> None:
    rows, columns = data.shape
    down = 0 if granularity is Granularity.TENSOR else scale.stride(0)
    across = scale.stride(1) if granularity in (Granularity.GROUP, Granularity.BLOCK) else 0
    _launch(
        -(-rows // ROWS) * -(-columns // GROUP),
        (data, scale, out),
        (columns, data.stride(0), out.stride(0)),
        (rows, down, across),
        (ROWS, GROUP if granularity is Granularity.BLOCK else 1),
        4,
        1,
    )


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.a.granularity is not granularity:
        return Rejected(f"takes {granularity.value} scales, not {problem.a.granularity.value}")
    form = problem.a.format
    fnuz = device.architecture == "gfx942"
    if not form.is_fp8 or form.value.endswith("fnuz") is not fnuz:
        return Rejected(f"{device.architecture} does not convert from {form.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    if max(problem.m, problem.k) >= 2**31:
        return Rejected(f"sizes must be less than 2^31; they are {problem.shape}")
    return ACCEPTED


for _granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK):
    register(
        "dequantize",
        name=f"dequantize_{_granularity.suffix}",
        architectures=FP8_GPUS,
        compile_only=COMPILED_ONLY,
        granularity=_granularity,
        supports=functools.partial(_supports, _granularity),
    )(functools.partial(_dequantize, _granularity))
