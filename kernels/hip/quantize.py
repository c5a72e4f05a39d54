"""Quantize rows, 1x128 and 1x32 groups to FP8 on AMD GPUs, as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

Scales of 1x32 are rounded up to powers of two (`lokakern.mx`); gfx950 alone multiplies with them.

x: [rows, columns], bfloat16 or float32, any row stride; q and scales as `types.empty_data` and
`Granularity.empty_scale` lay them out. amax is over finite values. See quantize.hip.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import mx
from lokakern.hip import HipLaunch, Program
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
ARCHITECTURES = frozenset({"gfx942", "gfx950"})
MX_ARCHITECTURES = frozenset({"gfx950"})
UNMEASURED = dict.fromkeys(
    ARCHITECTURES, "no such GPU was at hand: run on a CPU only (kernels/hip/README.md)"
)
THREADS = 256
WAVE = 64  # lanes that share a row
EACH = 8  # columns of a lane
GROUPS = {Granularity.ROW: 0, Granularity.GROUP: GROUP, Granularity.MX: mx.GROUP}


def why_not_counted(blocks: int, *sizes: int) -> str | None:
    """Why a launch is too large, or None.

    Args:
        blocks: Of the grid, each of `THREADS`; HIP launches grids of fewer than 2^32 threads.
        sizes: Rows and columns, which kernels count in 32 bits, rounded up to a step or tile.
    """
    if max(sizes) > 2**31 - 1024:
        return f"counts rows and columns in 32 bits, not {max(sizes)}"
    if blocks * THREADS >= 2**32:
        return f"HIP launches fewer than 2^32 threads, not {blocks * THREADS}"
    return None


def blocks_of(group: int, rows: int, columns: int) -> int:
    lanes = rows * (-(-columns // group) * group // EACH if group else WAVE)
    return -(-lanes // THREADS)


@functools.lru_cache(maxsize=64)
def bind(group: int, dtype: torch.dtype, aligned: bool) -> HipLaunch:
    """The launch of one signature; 0 columns under one scale are the row."""
    macros = {"GROUP": group, "WIDE": dtype is torch.float32, "ALIGNED": aligned}
    program = Program(SOURCE, "quantize", tuple((k, int(v)) for k, v in macros.items()))
    return HipLaunch(program, pointers=3, scalars="iiqqi", threads=THREADS)


def _quantize(
    group: int, x: Tensor, data: Tensor, scale: Tensor, _workspace: tuple[Tensor, ...]
) -> None:
    rows, columns = x.shape
    stride = x.stride(0)
    aligned = not (x.data_ptr() | stride * x.element_size()) & 15
    scale_stride = {0: 0, GROUP: scale.stride(1), mx.GROUP: scale.stride(0)}[group]
    bind(group, x.dtype, aligned)(
        blocks_of(group, rows, columns), (x, data, scale),
        (rows, columns, stride, data.stride(0), scale_stride),
    )  # fmt: skip


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.out_granularity is not granularity:
        return Rejected(f"makes {granularity.value} scales, not {problem.out_granularity.value}")
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"quantizes bfloat16 and float32, not {problem.a.format.value}")
    if problem.out_format is not fp8_format(device):
        return Rejected(f"writes {fp8_format(device).value} there, not {problem.out_format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("rows of x must be contiguous")
    blocks = blocks_of(GROUPS[granularity], problem.m, problem.k)
    why = why_not_counted(blocks, problem.m, problem.k)
    return ACCEPTED if why is None else Rejected(why)


for _granularity, _group in GROUPS.items():
    _where = MX_ARCHITECTURES if _granularity is Granularity.MX else ARCHITECTURES
    register(
        "quantize",
        name=f"quantize_{_granularity.suffix}",
        architectures=_where,
        unmeasured={name: UNMEASURED[name] for name in _where},
        granularity=_granularity,
        supports=functools.partial(_supports, _granularity),
    )(functools.partial(_quantize, _group))
