"""Quantize to FP8 with one read of x, byte for byte as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32, any row stride; q: [rows, columns], contiguous; scales as
`Granularity.empty_scale` lays them out. amax is over finite values. See quantize.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
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
WIDE_BYTES = 16  # of a load where rows are aligned
# Loads of 16 bytes a thread has in flight. 4.3 TB/s times a latency of 0.7 us are 3 MB, or 23 KiB
# for each of 132 SMs: 366 such threads of the 2048 an SM holds.
WIDE_LOADS = 4
SINGLE_LOADS = 16  # of one element, where rows are not aligned
# A warp reads lines of up to so many times WIDE_LOADS: without a barrier, in up to 64 registers.
LONG_IN_WARP = 2
# Least threads of a line: 8 times 16 bytes are one line of the cache.
SMALLEST_TEAM = 8
THREADS = 256  # of a block of several teams
LONGEST_LINE = 8192  # columns held in registers, 32 for each of 256 threads; others are read twice
LONG_TEAM = 512  # threads of a longer line


class Tile(NamedTuple):
    """How the kernel's threads share lines; the macros of quantize.cu explain each."""

    team: int
    accesses: int
    threads: int

    @property
    def rows_of_warp(self) -> int:
        return max(1, 32 // self.team)

    @property
    def warps(self) -> int:
        """Warps of a block that work each for itself."""
        return 1 if self.team > 32 else self.threads // 32


def tile_of(span: int, width: int) -> Tile:
    """The tile for lines of `span` columns, read `width` elements at a time."""
    loads = -(-span // width)
    deep = SINGLE_LOADS if width == 1 else WIDE_LOADS
    if span > LONGEST_LINE:
        return Tile(LONG_TEAM, deep, LONG_TEAM)
    if loads > 32 * deep * LONG_IN_WARP:
        team = -(-loads // (32 * deep)) * 32
        return Tile(team, -(-loads // team), team)
    fitting = _power_of_two(-(-loads // deep))
    team = min(32, max(fitting, min(SMALLEST_TEAM, _power_of_two(loads))))
    # Short lines leave a thread fewer loads than WIDE_LOADS. Several lines a thread would fill them
    # up and took 4 % longer on an H200 (geometric mean over 21 sizes of bfloat16).
    return Tile(team, -(-loads // team), THREADS)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class Bound(NamedTuple):
    """A launch with what its grid is made of."""

    launch: CudaLaunch
    rows_of_warp: int
    groups: int
    warps: int


@functools.lru_cache(maxsize=4096)
def bind(columns: int, span: int, aligned: bool, source: torch.dtype, target: torch.dtype) -> Bound:
    """The launch of one signature.

    Args:
        columns: Of x.
        span: Columns of a line.
        aligned: Whether x is read 16 bytes at a time.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
    """
    width = WIDE_BYTES // source.itemsize if aligned else 1
    tile = tile_of(span, width)
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "COLUMNS": columns,
        "SPAN": span,
        "WIDTH": width,
        "TEAM": tile.team,
        "ACCESSES": tile.accesses,
        "THREADS": tile.threads,
    }
    program = nvrtc.Program(SOURCE, "quantize", tuple(macros.items()))
    launch = CudaLaunch(program, pointers=3, scalars="iqq", threads=tile.threads)
    return Bound(launch, tile.rows_of_warp, -(-columns // span), tile.warps)


def _launch(x: Tensor, data: Tensor, scale: Tensor, span: int, scale_stride: int) -> None:
    rows, columns = x.shape
    stride = x.stride(0)
    item = x.element_size()
    together = x.data_ptr() | data.data_ptr() | stride * item | columns * item
    launch, height, groups, warps = bind(columns, span, not together & 15, x.dtype, data.dtype)
    tiles = -(-rows // height) * groups
    launch((-(-tiles // warps), 1, 1), (x, data, scale), (rows, stride, scale_stride))


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    if problem.out_format not in (Format.E4M3FN, Format.E5M2):
        return Rejected(f"{device.architecture} does not convert to {problem.out_format.value}")
    if problem.out_granularity is not granularity:
        return Rejected(f"makes {granularity.value} scales, not {problem.out_granularity.value}")
    if max(problem.m, problem.k) >= 2**31:
        return Rejected(f"sizes must be less than 2^31; they are {problem.shape}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


@register(
    "quantize",
    name="quantize_row",
    architectures=frozenset({"sm_90"}),
    granularity=Granularity.ROW,
    supports=functools.partial(_supports, Granularity.ROW),
)
def quantize_row(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale per row, which a warp or a block holds in registers."""
    _launch(x, data, scale, x.shape[1], 0)


@register(
    "quantize",
    name="quantize_group",
    architectures=frozenset({"sm_90"}),
    granularity=Granularity.GROUP,
    supports=functools.partial(_supports, Granularity.GROUP),
)
def quantize_group(x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]) -> None:
    """One scale per row and 128 columns."""
    _launch(x, data, scale, GROUP, scale.stride(1))
