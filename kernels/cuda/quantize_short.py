"""Quantize short dense rows to FP8, by rows and 1x128 groups, as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16, float16 or float32, without gaps between rows, which do not all start
at multiples of 16 bytes, such as 39 columns; q: [rows, columns], laid out as by `empty_data`, and
gaps between rows are written too; a scale for each row, as no row has more than a group of 128. See
quantize_short.cu. What turns out not to lie so, which a problem does not tell, is left to
quantize.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize import _quantize as quantize_lines
from lokakern.kernels.cuda.quantize_tile import ARCHITECTURES, CHUNK_BYTES
from lokakern.kernels.cuda.quantize_tile import supports as supports_lines
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
    alignment_of,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
# Of a row. On an H200, 20480 rows of 479 bfloat16 took 11.9 us, as by quantize.py, and 8192 took
# 5.7 where that takes 5.2; 131072 of 121 took 20.8 of 21.7. Without writes into gaps.
MOST_BYTES = 256
LARGEST_TEAM = 4  # threads of a row: a warp takes at least 8 rows, which are whole pieces
# Chunks of 16 bytes that a thread holds. On an H200, 1310720 rows of 39 bfloat16, 5 chunks, took
# 80.8 us by 1 thread, 74.1 by 2 and 74.2 by 4; 131072 took 9.5, 8.5 and 9.3, and 16384 took 2.36,
# 2.37 and 2.80. 131072 rows of 90, 12 chunks, took 16.9, 16.5 and 15.7. Without writes into gaps.
MOST_CHUNKS = 3
WARPS = 4  # of a block: up to 18 KB of shared memory


class Tile(NamedTuple):
    """How threads share rows."""

    team: int
    warps: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return 32 // self.team * self.warps


def tile_of(columns: int, item: int) -> Tile:
    """The tile for rows of so many elements of `item` bytes."""
    chunks = -(-columns * item // CHUNK_BYTES)
    team = 1
    while team < LARGEST_TEAM and chunks > team * MOST_CHUNKS:
        team *= 2
    return Tile(team, WARPS)


@functools.lru_cache(maxsize=4096)
def bind(columns: int, tile: Tile, source: torch.dtype, target: torch.dtype) -> CudaLaunch:
    """The launch of one signature.

    Args:
        columns: Of x.
        tile: How threads share rows.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
    """
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": 1,
        "WHOLE": 1,
        "POWER_OF_TWO": 0,
        "COLUMNS": columns,
        "TEAM": tile.team,
        "WARPS": tile.warps,
    }
    program = nvrtc.Program(SOURCE, "quantize_short", tuple(macros.items()))
    return CudaLaunch(program, pointers=3, scalars="i", threads=tile.warps * 32,
                      programmatic=True)  # fmt: skip


def _quantize(
    granularity: Granularity, x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]
) -> None:
    rows, columns = x.shape
    dense = rows == 1 or x.stride(0) == columns
    # A caller may have laid out data otherwise, and its gaps hold what is not ours.
    usual = data.stride(0) == pitch_of(columns)
    if not dense or not usual or (x.data_ptr() | data.data_ptr()) & 15:
        quantize_lines(granularity, False, x, data, scale, workspace)
        return
    tile = tile_of(columns, x.element_size())
    launch = bind(columns, tile, x.dtype, data.dtype)
    launch((-(-rows // tile.rows), 1, 1), (x, data, scale), (rows,))


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    answer = supports_lines(granularity, problem, device)
    if isinstance(answer, Rejected):
        return answer
    row_bytes = problem.k * problem.a.format.dtype.itemsize
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    if row_bytes % CHUNK_BYTES == 0:
        return Rejected("rows that all start at multiples of 16 bytes need no copy")
    if row_bytes > MOST_BYTES:
        return Rejected(f"rows have at most {MOST_BYTES} bytes; these have {row_bytes}")
    if problem.m > 1 and problem.a.alignment != alignment_of(row_bytes):
        return Rejected(
            f"takes rows without gaps from a multiple of 16 bytes on; those of {row_bytes} bytes "
            f"do not start at multiples of {problem.a.alignment}"
        )
    return ACCEPTED


for _granularity in (Granularity.ROW, Granularity.GROUP):
    register(
        "quantize",
        name=f"quantize_short_{_granularity.suffix}",
        architectures=ARCHITECTURES,
        granularity=_granularity,
        supports=functools.partial(_supports, _granularity),
        epilogues=frozenset({"none"}),
    )(functools.partial(_quantize, _granularity))
