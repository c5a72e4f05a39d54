"""Quantize a tensor to FP8 with one scale, made from it or given, as `lokakern.numerics` does.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32, row-major or column-major; q: [rows, columns], any row
stride. What fits in the registers of all multiprocessors is read once, by a cooperative launch;
larger tensors twice, by two launches. See quantize_tensor.cu, and quantize_tile.cu for what is
written transposed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize_sums import empty_parts
from lokakern.kernels.cuda.quantize_tile import (
    ARCHITECTURES,
    CHUNK_BYTES,
    is_column_major,
    launch_tiles,
    supports,
    with_sums,
)
from lokakern.registry.register import Workspace, register
from lokakern.types import Format, Granularity

SOURCE = str(Path(__file__).with_suffix(".cu"))
GATHER, FINISH, CAST, AT_ONCE, STATIC, DELAYED = range(6)
# 8 blocks of 256 threads fill each of 132 multiprocessors; every block of the second launch reads
# the maxima of all, 4 KiB.
MOST_PARTS = 1056
THREADS, ACCESSES = 256, 4
# A cooperative launch has one block on each multiprocessor, whose threads hold up to 16 chunks of
# 16 bytes in 128 registers: 17 MB on 132 of them; fewer where addresses take registers too.
AT_ONCE_THREADS = 512
AT_ONCE_ACCESSES = (2, 4, 8, 16)
MOST_ASKEW_ACCESSES = 8


class Shape(NamedTuple):
    """How a launch sees x."""

    rows: int
    columns: int
    stride: int
    pitch: int  # of data
    flat: bool
    chunks: int


def shape_of(x: Tensor, data: Tensor | None) -> Shape:
    """Of a row-major x, or of the transpose of a column-major one; one row where that can be."""
    rows, columns = x.shape
    stride = x.stride(0)
    if is_column_major(x):
        rows, columns, stride = columns, rows, x.stride(1)
    pitch = columns if data is None else data.stride(0)
    flat = rows == 1 or (stride == columns and pitch == columns)
    if flat:
        rows, columns = 1, rows * columns
    chunk = CHUNK_BYTES // x.element_size()
    return Shape(rows, columns, stride, pitch, flat, rows * -(-columns // chunk))


@functools.lru_cache(maxsize=1024)
def bind(
    stage: int,
    accesses: int,
    in_place: bool,
    whole: bool,
    ragged: bool,
    flat: bool,
    source: torch.dtype,
    target: torch.dtype,
) -> CudaLaunch:
    """The launch of one signature; quantize_tensor.cu explains the macros."""
    threads = AT_ONCE_THREADS if stage == AT_ONCE else THREADS
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": int(in_place),
        "WHOLE": int(whole),
        "POWER_OF_TWO": 0,
        "STAGE": stage,
        "FLAT": int(flat),
        "RAGGED": int(ragged),
        "ACCESSES": accesses,
        "THREADS": threads,
    }
    program = nvrtc.Program(SOURCE, "quantize_tensor", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=4, scalars="iiqqq", threads=threads,
        cooperative=stage == AT_ONCE, programmatic=stage != AT_ONCE,
    )  # fmt: skip


def _starts(x: Tensor, data: Tensor, shape: Shape) -> tuple[bool, bool, bool]:
    """Whether rows of x, and of data, start where chunks do, and whether rows end inside one."""
    item = x.element_size()
    chunk = CHUNK_BYTES // item
    many = shape.rows > 1
    in_place = not (x.data_ptr() | (shape.stride * item if many else 0)) & CHUNK_BYTES - 1
    whole = not (data.data_ptr() | (shape.pitch if many else 0)) & chunk - 1
    return in_place, whole, bool(shape.columns % chunk)


def _launch(
    stage: int,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    maxima: Tensor,
    shape: Shape,
    blocks: int,
    parts: int = 0,
    accesses: int = ACCESSES,
) -> None:
    starts = _starts(x, data, shape)
    launch = bind(stage, accesses, *starts, shape.flat, x.dtype, data.dtype)
    sizes = (shape.rows, parts, shape.columns, shape.stride, shape.pitch)
    launch((blocks, 1, 1), (x, data, scale, maxima), sizes)


@jit.cached
def _units(index: int) -> int:
    return jit.compute_units(index)


def _partials(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (torch.empty(MOST_PARTS, dtype=torch.float32, device=x.device),)


def _amax(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (torch.zeros((1, 1), dtype=torch.float32, device=x.device),)


def _no_workspace(*_: Tensor) -> tuple[Tensor, ...]:
    return ()


def make_scale(x: Tensor, data: Tensor, scale: Tensor, maxima: Tensor) -> None:
    """The scale alone, from one read of x in either layout."""
    shape = shape_of(x, None)
    parts = min(-(-shape.chunks // (THREADS * ACCESSES)), MOST_PARTS)
    _launch(GATHER, x, data, scale, maxima, shape, parts)
    _launch(FINISH, x, data, scale, maxima, shape, 1, parts)


@register(
    "quantize",
    name="quantize_tensor",
    architectures=ARCHITECTURES,
    granularity=Granularity.TENSOR,
    supports=functools.partial(supports, Granularity.TENSOR),
    workspace=_partials,
)
def quantize_tensor(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale for all, from one read where the tensor fits in registers."""
    maxima = workspace[0]
    if is_column_major(x):
        make_scale(x, data, scale, maxima)
        launch_tiles(x, None, (data, scale), Granularity.TENSOR)
        return
    shape = shape_of(x, data)
    units = min(_units(x.get_device()), MOST_PARTS)
    easy = shape.flat and _starts(x, data, shape) == (True, True, False)
    for accesses in AT_ONCE_ACCESSES:
        blocks = -(-shape.chunks // (AT_ONCE_THREADS * accesses))
        if blocks <= units and (easy or accesses <= MOST_ASKEW_ACCESSES):
            _launch(AT_ONCE, x, data, scale, maxima, shape, blocks, accesses=accesses)
            return
    parts = min(-(-shape.chunks // (THREADS * ACCESSES)), MOST_PARTS)
    _launch(GATHER, x, data, scale, maxima, shape, parts)
    _launch(CAST, x, data, scale, maxima, shape, parts, parts)


def _quantize_given(
    epilogue: str, x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]
) -> None:
    """By a scale from before, in one read."""
    amax = workspace[0] if epilogue == "delayed" else x
    if is_column_major(x):
        launch_tiles(
            x, None, (data, scale), Granularity.TENSOR, given=epilogue,
            amax=amax if epilogue == "delayed" else None,
        )  # fmt: skip
        return
    shape = shape_of(x, data)
    stage = DELAYED if epilogue == "delayed" else STATIC
    _launch(stage, x, data, scale, amax, shape, -(-shape.chunks // (THREADS * ACCESSES)))


def _quantize_transpose(
    epilogue: str,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    sums: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Both ways, from one read by a scale from before, else from two."""
    along, across = (data, scale), (data_t, scale_t)
    if is_column_major(x):
        along, across = (data_t, scale), (data, scale_t)
    if epilogue == "none":
        make_scale(x, data, scale, workspace[0])
    launch_tiles(
        x, along, across, Granularity.TENSOR, given="" if epilogue == "none" else epilogue,
        amax=workspace[0] if epilogue == "delayed" else None,
        sums=None if sums is None else (workspace[-1], sums),
    )  # fmt: skip


def _and_parts(first: Workspace, x: Tensor, *outputs: Tensor | None) -> tuple[Tensor, ...]:
    parts = () if outputs[-1] is None else (empty_parts(x),)
    return (*first(x), *parts)


for _epilogue in ("static", "delayed"):
    register(
        "quantize",
        name=f"quantize_tensor_{_epilogue}",
        architectures=ARCHITECTURES,
        granularity=Granularity.TENSOR,
        supports=functools.partial(supports, Granularity.TENSOR),
        workspace=_amax if _epilogue == "delayed" else _no_workspace,
        epilogues=frozenset({_epilogue}),
    )(functools.partial(_quantize_given, _epilogue))
for _epilogue, _workspace in (("none", _partials), ("static", _no_workspace), ("delayed", _amax)):
    register(
        "quantize_transpose",
        name=f"quantize_transpose_tensor{'' if _epilogue == 'none' else f'_{_epilogue}'}",
        architectures=ARCHITECTURES,
        granularity=Granularity.TENSOR,
        supports=functools.partial(supports, Granularity.TENSOR),
        workspace=functools.partial(_and_parts, _workspace),
        epilogues=with_sums(_epilogue),
    )(functools.partial(_quantize_transpose, _epilogue))
