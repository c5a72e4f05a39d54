"""Quantize rows and 1x128 groups to FP8 with one read of x, as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32, any row stride; q: [rows, columns], any row stride; scales
as `Granularity.empty_scale` lays them out. amax is over finite values. See quantize.cu, and
quantize_tile.cu for a column-major x.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize_tile import (
    ARCHITECTURES,
    CHUNK_BYTES,
    is_column_major,
    launch_column_major,
    supports,
)
from lokakern.registry.register import register
from lokakern.types import GROUP, Format, Granularity

SOURCE = str(Path(__file__).with_suffix(".cu"))
# Loads of 16 bytes a thread has in flight. 4.3 TB/s times a latency of 0.7 us are 3 MB, or 23 KiB
# for each of 132 SMs: 366 such threads of the 2048 an SM holds.
LOADS = 4
# Least threads of a line: 8 times 16 bytes are one line of the cache. Up to LOADS of each.
SMALLEST_TEAM = 8
# Longer lines are shared by a warp, then by a block with LOADS_IN_BLOCK of each thread. Lines of
# few loads a thread complete one after the other, so that some are cast while others load: 32768
# lines of 2048 took 51.5 us on an H200 with 128 threads of 2 loads each, 53.8 with 32 of 8.
LOADS_IN_BLOCK = 2
THREADS = 256  # of a block of several teams
# A thread with one load for each line has 16 KiB of a multiprocessor in flight on average: 1310720
# rows of 64 took 75 us on an H200, 3.4 TB/s, where those of 192 reach 4.0. From two rounds of its
# 132 x 64 warps on a thread takes so many lines that LOADS are on their way.
MANY_WARPS = 2 * 132 * 64
LONGEST_TEAM = 512  # threads of a block that has whole lines: longer ones go to clusters
LARGEST_CLUSTER = 8  # blocks that any GPU takes
LARGEST_BLOCK = 1024  # threads of a block in a cluster, where the line needs them


class Tile(NamedTuple):
    """How the kernel's threads share lines; the macros of quantize.cu explain each."""

    team: int
    accesses: int
    threads: int
    cluster: int = 1
    lines: int = 1

    @property
    def rows_of_warp(self) -> int:
        return max(1, 32 // self.team) * self.lines


def tile_of(span: int, chunk: int, many: bool = False) -> Tile:
    """The tile for lines of `span` columns, read `chunk` elements at a time; for many lines."""
    loads = -(-span // chunk)
    if loads > 32 * LOADS:
        cluster = min(-(-loads // (LONGEST_TEAM * LOADS)), LARGEST_CLUSTER)
        share = -(-loads // cluster)
        fitting = min(-(-share // (32 * LOADS_IN_BLOCK)) * 32, LONGEST_TEAM)
        team = max(fitting, -(-share // (32 * LOADS)) * 32)
        if team > LARGEST_BLOCK:  # read twice
            return Tile(LONGEST_TEAM, LOADS, LONGEST_TEAM)
        return Tile(team, -(-share // team), team, cluster)
    team = min(32 if loads > SMALLEST_TEAM * LOADS else SMALLEST_TEAM, _power_of_two(loads))
    accesses = -(-loads // team)
    # Short lines leave a thread fewer loads than LOADS. Several lines a thread fill them up; done
    # always, they took 4 % longer on an H200 (geometric mean over 21 sizes of bfloat16).
    return Tile(team, accesses, THREADS, lines=LOADS if many and accesses == 1 else 1)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class Bound(NamedTuple):
    """A launch with what its grid is made of."""

    launch: CudaLaunch
    rows_of_warp: int
    groups: int
    warps: int
    cluster: int


@functools.lru_cache(maxsize=4096)
def bind(
    columns: int,
    span: int,
    in_place: bool,
    whole: bool,
    source: torch.dtype,
    target: torch.dtype,
    power_of_two: bool = False,
    many: bool = False,
) -> Bound:
    """The launch of one signature.

    Args:
        columns: Of x.
        span: Columns of a line.
        in_place: Whether every row of x starts at a multiple of 16 bytes.
        whole: Whether every row of data starts where 16 bytes of x are written at once.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
        power_of_two: Whether scales are rounded up to powers of two.
        many: Whether there are enough lines for a thread to take several.
    """
    tile = tile_of(span, CHUNK_BYTES // source.itemsize, many)
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": int(in_place),
        "WHOLE": int(whole),
        "POWER_OF_TWO": int(power_of_two),
        "COLUMNS": columns,
        "SPAN": span,
        "TEAM": tile.team,
        "CLUSTER": tile.cluster,
        "ACCESSES": tile.accesses,
        "LINES": tile.lines,
        "THREADS": tile.threads,
    }
    program = nvrtc.Program(SOURCE, "quantize", tuple(macros.items()))

    launch = CudaLaunch(
        program, pointers=3, scalars="iqqq", threads=tile.threads, cluster=tile.cluster,
        programmatic=True,
    )  # fmt: skip
    warps = 1 if tile.team > 32 else tile.threads // 32
    return Bound(launch, tile.rows_of_warp, -(-columns // span), warps, tile.cluster)


def _launch(
    x: Tensor, data: Tensor, scale: Tensor, span: int, scale_stride: int, power_of_two: bool
) -> None:
    rows, columns = x.shape
    stride, pitch, item = x.stride(0), data.stride(0), x.element_size()
    in_place = not (x.data_ptr() | stride * item) & 15
    whole = not (data.data_ptr() | pitch) & CHUNK_BYTES // item - 1
    signature = (columns, span, in_place, whole, x.dtype, data.dtype, power_of_two)
    launch, height, groups, warps, cluster = bind(*signature)
    tiles = -(-rows // height) * groups
    if tiles >= MANY_WARPS and span <= SMALLEST_TEAM * CHUNK_BYTES // item:
        launch, height, groups, warps, cluster = bind(*signature, many=True)
        tiles = -(-rows // height) * groups
    blocks = -(-tiles // warps) * cluster
    launch((blocks, 1, 1), (x, data, scale), (rows, stride, pitch, scale_stride))


def _quantize(
    granularity: Granularity,
    power_of_two: bool,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    """One scale per line, which a warp, a block or a cluster of blocks holds in registers."""
    if is_column_major(x):
        launch_column_major(x, data, scale, granularity, power_of_two)
    elif granularity is Granularity.ROW:
        _launch(x, data, scale, x.shape[1], 0, power_of_two)
    else:
        _launch(x, data, scale, min(GROUP, x.shape[1]), scale.stride(1), power_of_two)


for _granularity in (Granularity.ROW, Granularity.GROUP):
    for _epilogue in ("none", "power_of_two"):
        register(
            "quantize",
            name=f"quantize_{_granularity.suffix}{'' if _epilogue == 'none' else f'_{_epilogue}'}",
            architectures=ARCHITECTURES,
            granularity=_granularity,
            supports=functools.partial(supports, _granularity),
            epilogues=frozenset({_epilogue}),
        )(functools.partial(_quantize, _granularity, _epilogue == "power_of_two"))
