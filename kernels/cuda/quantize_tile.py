"""Quantize to FP8 in tiles of 128 x 128: 128x128 blocks, column-major x, and both ways at once.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32; q: [rows, columns], any row stride; its transpose
[columns, rows] with scales of its own. See quantize_tile.cu. A column-major x is read as the
row-major matrix it is a view of, and written transposed. Sums of the columns of a row-major x come
with the same read: of the rows of a tile here, of all in quantize_sums.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize_sums import empty_parts, launch_sums
from lokakern.registry.register import register
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

SOURCE = str(Path(__file__).with_suffix(".cu"))
SCALES_SOURCE = str(Path(__file__).with_name("quantize_scales.cu"))
ARCHITECTURES = frozenset({"sm_90"})
CHUNK_BYTES = 16  # of one load
HELD = 8  # rows of a chunk a thread holds
SCALES = {Granularity.GROUP: 0, Granularity.BLOCK: 1, Granularity.ROW: 2, Granularity.TENSOR: 3}
SCALES_THREADS = 256
LAYOUTS = (Layout.ROW, Layout.COLUMN)


def supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    """What all CUDA quantizers take, in either layout."""
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.a.layout not in LAYOUTS:
        return Rejected("takes row-major or column-major input")
    if problem.a.layout is Layout.COLUMN and "column_sums" in problem.epilogue:
        return Rejected("adds up columns of row-major input only")
    if problem.out_format not in (Format.E4M3FN, Format.E5M2):
        return Rejected(f"{device.architecture} does not convert to {problem.out_format.value}")
    if problem.out_granularity is not granularity:
        return Rejected(f"makes {granularity.value} scales, not {problem.out_granularity.value}")
    if max(problem.m, problem.k) >= 2**31 or problem.m * problem.k >= 2**33:
        return Rejected(
            f"sizes must be less than 2^31, and elements less than 2^33; they are {problem.shape}"
        )
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


def is_column_major(x: Tensor) -> bool:
    """Of an x that is row-major or column-major."""
    return x.stride(1) != 1 and x.shape[1] > 1


@functools.lru_cache(maxsize=1024)
def bind(
    granularity: Granularity,
    ways: tuple[bool, bool],
    starts: tuple[bool, bool, bool],
    ragged: bool,
    source: torch.dtype,
    target: torch.dtype,
    power_of_two: bool = False,
    gather: bool = False,
    given: str = "",
    sums: bool = False,
) -> CudaLaunch:
    """The launch of one signature.

    Args:
        granularity: What one scale covers.
        ways: Whether data, and their transpose, are written.
        starts: Whether every row of what is read starts at a multiple of 16 bytes, of data at one
            of as many bytes as 16 bytes of x become, and of the transpose at one of 16 bytes.
        ragged: Whether rows of what is read end inside 16 bytes.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
        power_of_two: Whether scales are rounded up to powers of two.
        gather: Whether amax of rows and columns is all that is written.
        given: "static" or "delayed" where amax does not bound a scale of the tensor.
        sums: Whether sums of the columns of tiles are written.
    """
    along, across = ways
    in_place, whole, across_whole = starts
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": int(in_place),
        "WHOLE": int(whole),
        "POWER_OF_TWO": int(power_of_two),
        "SCALES": SCALES[granularity],
        "ALONG": int(along),
        "ACROSS": int(across),
        "ACROSS_WHOLE": int(across_whole),
        "GATHER": int(gather),
        "ANY_SCALE": int(bool(given)),
        "DELAYED": int(given == "delayed"),
        "RAGGED": int(ragged),
        "SUMS": int(sums),
    }
    program = nvrtc.Program(SOURCE, "quantize_tile", tuple(macros.items()))
    threads = GROUP * source.itemsize // CHUNK_BYTES * (GROUP // HELD)
    return CudaLaunch(program, pointers=7, scalars="iiqqqqq", threads=threads, programmatic=True)


@functools.lru_cache(maxsize=64)
def bind_scales(stage: int, target: torch.dtype, power_of_two: bool) -> CudaLaunch:
    """The launch that clears amax (stage 0), or turns it into scales (1)."""
    macros = {
        "INPUT_BYTES": 2,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": 1,
        "WHOLE": 1,
        "POWER_OF_TWO": int(power_of_two),
        "STAGE": stage,
        "THREADS": SCALES_THREADS,
    }
    program = nvrtc.Program(SCALES_SOURCE, "quantize_scales", tuple(macros.items()))
    return CudaLaunch(program, pointers=2, scalars="ii", threads=SCALES_THREADS, programmatic=True)


def launch_tiles(
    x: Tensor,
    along: tuple[Tensor, Tensor] | None,
    across: tuple[Tensor, Tensor] | None,
    granularity: Granularity,
    *,
    power_of_two: bool = False,
    given: str = "",
    amax: Tensor | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Quantize x by tiles.

    Args:
        x: Row-major, or column-major: then its transpose is what is read.
        along: Data and scale with the shape of what is read, if wanted.
        across: Data and scale of its transpose, if wanted.
        granularity: What one scale covers. Scales of a tensor are read, not made.
        power_of_two: Whether scales are rounded up to powers of two.
        given: "static" or "delayed" where amax does not bound a scale of the tensor.
        amax: What "delayed" raises.
        sums: `empty_parts` of a row-major x, and where the sums of its columns go, if wanted.
    """
    rows, columns = x.shape
    stride = x.stride(0)
    if is_column_major(x):
        rows, columns, stride = columns, rows, x.stride(1)
    item = x.element_size()
    chunk = CHUNK_BYTES // item
    data, scale = along or (x, x)
    turned, turned_scale = across or (x, x)
    if granularity is Granularity.TENSOR and along is None:
        scale = turned_scale
    pitch, turned_pitch = data.stride(0), turned.stride(0)
    by_group = int(granularity is Granularity.GROUP)  # the other stride of a scale counts there
    starts = (
        not (x.data_ptr() | stride * item) & CHUNK_BYTES - 1,
        along is None or not (data.data_ptr() | pitch) & chunk - 1,
        across is None or not (turned.data_ptr() | turned_pitch) & 15,
    )
    signature = (
        granularity, (along is not None, across is not None), starts, bool(columns % chunk),
        x.dtype, turned.dtype if along is None else data.dtype, power_of_two,
    )  # fmt: skip
    grid = (-(-rows // GROUP) * -(-columns // GROUP), 1, 1)
    amax, parts = x if amax is None else amax, x if sums is None else sums[0]
    tensors = (x, data, turned, scale, turned_scale, amax, parts)
    strides = (pitch, turned_pitch, scale.stride(by_group), turned_scale.stride(by_group))
    if granularity is Granularity.ROW:  # amax of whole rows first, in the place of their scales
        ends = (rows if along else 0, columns if across else 0)
        blocks = (-(-sum(ends) // SCALES_THREADS), 1, 1)
        target = signature[5]
        bind_scales(0, target, power_of_two)(blocks, (scale, turned_scale), ends)
        gather = bind(*signature, gather=True, sums=sums is not None)
        gather(grid, tensors, (rows, columns, stride, *strides))
        bind_scales(1, target, power_of_two)(blocks, (scale, turned_scale), ends)
    by_tile = sums is not None and granularity is not Granularity.ROW
    bound = bind(*signature, given=given, sums=by_tile)
    bound(grid, tensors, (rows, columns, stride, *strides))
    if sums is not None:
        launch_sums(*sums)


def launch_column_major(
    x: Tensor, data: Tensor, scale: Tensor, granularity: Granularity, power_of_two: bool
) -> None:
    """Quantize a column-major x by rows, groups or blocks."""
    launch_tiles(x, None, (data, scale), granularity, power_of_two=power_of_two)


def _quantize_block(
    power_of_two: bool, x: Tensor, data: Tensor, scale: Tensor, _workspace: tuple[Tensor, ...]
) -> None:
    """One scale per 128 rows and 128 columns, one block of threads each."""
    made = (data, scale)
    along, across = (None, made) if is_column_major(x) else (made, None)
    launch_tiles(x, along, across, Granularity.BLOCK, power_of_two=power_of_two)


def _quantize_transpose(
    granularity: Granularity,
    power_of_two: bool,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    sums: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Both ways from one read, or two where scales cover whole rows."""
    along, across = (data, scale), (data_t, scale_t)
    if is_column_major(x):
        along, across = across, along
    launch_tiles(
        x, along, across, granularity, power_of_two=power_of_two,
        sums=None if sums is None else (workspace[0], sums),
    )  # fmt: skip


def _parts(x: Tensor, *outputs: Tensor | None) -> tuple[Tensor, ...]:
    return () if outputs[-1] is None else (empty_parts(x),)


def with_sums(epilogue: str) -> frozenset[str]:
    """What a kernel does that makes scales in one way, and sums of columns too where asked."""
    return frozenset({epilogue, "column_sums" if epilogue == "none" else f"{epilogue}+column_sums"})


for _epilogue in ("none", "power_of_two"):
    _suffix = "" if _epilogue == "none" else f"_{_epilogue}"
    _power_of_two = _epilogue == "power_of_two"
    register(
        "quantize",
        name=f"quantize_block{_suffix}",
        architectures=ARCHITECTURES,
        granularity=Granularity.BLOCK,
        supports=functools.partial(supports, Granularity.BLOCK),
        epilogues=frozenset({_epilogue}),
    )(functools.partial(_quantize_block, _power_of_two))
    for _granularity in (Granularity.ROW, Granularity.GROUP, Granularity.BLOCK):
        register(
            "quantize_transpose",
            name=f"quantize_transpose_{_granularity.suffix}{_suffix}",
            architectures=ARCHITECTURES,
            granularity=_granularity,
            supports=functools.partial(supports, _granularity),
            workspace=_parts,
            epilogues=with_sums(_epilogue),
        )(functools.partial(_quantize_transpose, _granularity, _power_of_two))
