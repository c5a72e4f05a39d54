"""Dequantize from FP8 on AMD GPUs: x = rn(q * s).

q: [rows, columns] as `types.empty_data` lays it out; x: [rows, columns], bfloat16 or float32, any
row stride; scales as `Granularity.empty_scale` lays them out. See dequantize.hip.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import mx
from lokakern.hip import HipLaunch, Program
from lokakern.kernels.hip.quantize import (
    ARCHITECTURES,
    MX_ARCHITECTURES,
    THREADS,
    UNMEASURED,
    why_not_counted,
)
from lokakern.registry.register import fp8_format, register
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

SOURCE = str(Path(__file__).with_suffix(".hip"))
EACH = 16  # bytes of a thread


def blocks_of(rows: int, columns: int) -> int:
    return -(-rows * -(-columns // EACH) // THREADS)


@functools.lru_cache(maxsize=64)
def bind(dtype: torch.dtype, rows_of_scale: int, columns_of_scale: int) -> HipLaunch:
    """The launch of one signature."""
    macros = {"WIDE": int(dtype is torch.float32), "ROWS_OF_SCALE": rows_of_scale,
              "COLUMNS_OF_SCALE": columns_of_scale}  # fmt: skip
    program = Program(SOURCE, "dequantize", tuple(macros.items()))
    return HipLaunch(program, pointers=3, scalars="iiqqii", threads=THREADS)


def _dequantize(
    granularity: Granularity,
    data: Tensor,
    scale: Tensor,
    out: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    rows, columns = data.shape
    down = 0 if granularity is Granularity.TENSOR else scale.stride(0)
    across = 0 if granularity in (Granularity.TENSOR, Granularity.ROW) else scale.stride(1)
    height = GROUP if granularity is Granularity.BLOCK else 1
    width = mx.GROUP if granularity is Granularity.MX else GROUP
    bind(out.dtype, height, width)(
        blocks_of(rows, columns), (data, scale, out),
        (rows, columns, data.stride(0), out.stride(0), down, across),
    )  # fmt: skip


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.a.granularity is not granularity:
        return Rejected(f"takes {granularity.value} scales, not {problem.a.granularity.value}")
    if problem.a.format is not fp8_format(device):
        return Rejected(f"reads {fp8_format(device).value} there, not {problem.a.format.value}")
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"writes bfloat16 and float32, not {problem.out_format.value}")
    if problem.a.layout is not Layout.ROW or problem.a.alignment < EACH:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    why = why_not_counted(blocks_of(problem.m, problem.k), problem.m, problem.k)
    return ACCEPTED if why is None else Rejected(why)


for _granularity in Granularity:
    if _granularity is Granularity.NONE:
        continue
    _where = MX_ARCHITECTURES if _granularity is Granularity.MX else ARCHITECTURES
    register(
        "dequantize",
        name=f"dequantize_{_granularity.suffix}",
        architectures=_where,
        unmeasured={name: UNMEASURED[name] for name in _where},
        granularity=_granularity,
        supports=functools.partial(_supports, _granularity),
    )(functools.partial(_dequantize, _granularity))
