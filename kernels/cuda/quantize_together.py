"""Quantize several matrices in one launch: by rows in any layout, or column-major ones by tiles.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16 or float32, row-major or column-major, any stride; q: [rows, columns],
any row stride; scales as `Granularity.empty_scale` lays them out. See quantize_together.cu, for
rowwise scales, and quantize_tiles_together.cu. `cuda.quantize_row` and its like take a launch for
each matrix, and by rows four for a column-major one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize_tile import (
    ARCHITECTURES,
    CHUNK_BYTES,
    is_column_major,
    supports,
)
from lokakern.registry.register import register
from lokakern.types import GROUP, Device, Format, Granularity, Layout, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
TILES_SOURCE = str(Path(__file__).with_name("quantize_tiles_together.cu"))
THREADS = 256
MOST = 3  # matrices of a launch by rows
MOST_BY_TILES = 2
TILE_BYTES = THREADS * 8 * CHUNK_BYTES  # 8 chunks of a thread
MOST_HELD = 4  # tiles of a block
LARGEST_CLUSTER = 8  # that every GPU takes
ACCESSES = 4  # chunks of a row that a thread holds
SMALLEST_TEAM = 8


class Matrix(NamedTuple):
    """An operand and where its data and scales go."""

    x: Tensor
    data: Tensor
    scale: Tensor
    granularity: Granularity = Granularity.ROW


class Strip(NamedTuple):
    """How blocks share the columns of a column-major matrix."""

    cluster: int  # blocks of a strip
    chunks: int  # 16 bytes of each row
    held: int  # tiles in shared memory


def strip_of(rows: int) -> Strip:
    """The strip for so many rows of what is read: of 8 strips the fastest on an H100, or nearly so.

    8192 x 2048 take 32 us with 64 bytes of each row and all rows of a block in shared memory, 43
    with 128 bytes, where a multiprocessor holds one block; 4096 x 4096 take 28 with 128 bytes, 36
    with 64. Of 32768 rows the last are held.
    """
    chunks = 4 if 4096 < rows <= 16384 else 8
    tiles = -(-rows // (TILE_BYTES // (chunks * CHUNK_BYTES)))
    cluster = min(1 << max(0, tiles - 1).bit_length(), LARGEST_CLUSTER)
    of_block = -(-tiles // cluster)
    return Strip(cluster, chunks, max(1, of_block) if of_block <= MOST_HELD else 1)


class Words(NamedTuple):
    """What decides how matrices are read and written."""

    in_place: bool  # whether every row of what is read starts at a multiple of 16 bytes
    whole: bool  # whether every row of data does
    ragged: bool  # whether rows of what is read end inside 16 bytes
    source: torch.dtype
    target: torch.dtype
    power_of_two: bool

    @classmethod
    def of(cls, matrices: tuple[Matrix, ...], power_of_two: bool) -> Words:
        first = matrices[0]
        item = first.x.element_size()
        read = written = 0
        ragged = False
        for x, data, *_ in matrices:
            turned = is_column_major(x)
            read |= x.data_ptr() | x.stride(int(turned)) * item
            written |= data.data_ptr() | data.stride(0)
            ragged = ragged or bool(x.shape[0 if turned else 1] * item % CHUNK_BYTES)
        return cls(not read & 15, not written & 15, ragged, first.x.dtype, first.data.dtype,
                   power_of_two)  # fmt: skip

    def macros(self) -> dict[str, int]:
        return {
            "INPUT_BYTES": self.source.itemsize,
            "IS_E5M2": int(Format.of(self.target) is Format.E5M2),
            "IN_PLACE": int(self.in_place),
            "WHOLE": int(self.whole),
            "POWER_OF_TWO": int(self.power_of_two),
            "RAGGED": int(self.ragged),
        }


@functools.lru_cache(maxsize=1024)
def bind(teams: tuple[int, ...], strip: Strip, words: Words) -> CudaLaunch:
    """The launch of one signature by rows.

    Args:
        teams: Of each matrix the threads that share a row, or 0 for a column-major one.
        strip: How blocks share columns of column-major ones.
        words: How they are read and written.
    """
    of_rows = (*teams, *[teams[-1]] * (MOST - len(teams)))
    macros = {
        **words.macros(),
        "JOBS": len(teams),
        **{f"TEAM{place}": team for place, team in enumerate(of_rows)},
        "CLUSTER": strip.cluster,
        "CHUNKS": strip.chunks,
        "HELD": strip.held,
    }
    program = nvrtc.Program(SOURCE, "quantize_together", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=3 * MOST, scalars="i" * (3 * MOST) + "q" * (2 * MOST), threads=THREADS,
        shared_bytes=strip.held * TILE_BYTES if 0 in teams else 0, cluster=strip.cluster,
        programmatic=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def bind_tiles(blocks: tuple[bool, ...], words: Words) -> CudaLaunch:
    """The launch of one signature by tiles.

    Args:
        blocks: Of each matrix whether a scale covers 128x128, not 1x128.
        words: How they are read and written.
    """
    macros = {
        **words.macros(),
        "JOBS": len(blocks),
        "BLOCK0": int(blocks[0]),
        "BLOCK1": int(blocks[-1]),
    }
    program = nvrtc.Program(TILES_SOURCE, "quantize_tiles_together", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=3 * MOST_BY_TILES, scalars="iiiii" + "q" * (3 * MOST_BY_TILES),
        threads=THREADS, programmatic=True,
    )  # fmt: skip


def team_of(columns: int, chunk: int) -> int:
    """Threads that share a row of so many columns, read ``chunk`` elements at a time."""
    wanted = 1 << max(0, -(-columns // (chunk * ACCESSES)) - 1).bit_length()
    return min(max(wanted, SMALLEST_TEAM), THREADS)


def launch_together(matrices: tuple[Matrix, ...], power_of_two: bool = False) -> None:
    """Quantize matrices of one dtype in one launch: by rows, or column-major ones by tiles."""
    if matrices[0].granularity is Granularity.ROW:
        _launch_rows(matrices, power_of_two)
    else:
        _launch_tiles(matrices, power_of_two)


def _launch_rows(matrices: tuple[Matrix, ...], power_of_two: bool) -> None:
    chunk = CHUNK_BYTES // matrices[0].x.element_size()
    turned = [is_column_major(x) for x, *_ in matrices]
    strip = strip_of(max((x.shape[1] for (x, *_), is_so in zip(matrices, turned, strict=True)
                          if is_so), default=0))  # fmt: skip
    teams, sizes, strides, end = [], [], [], 0
    for (x, data, *_), is_turned in zip(matrices, turned, strict=True):
        rows, columns = x.shape[::-1] if is_turned else x.shape
        if is_turned:
            team = 0
            end += -(-columns // (strip.chunks * chunk)) * strip.cluster
        else:
            team = team_of(columns, chunk)
            end += -(-rows // (THREADS // team * strip.cluster)) * strip.cluster
        teams.append(team)
        sizes += [rows, columns, end]
        strides += [x.stride(int(is_turned)), data.stride(0)]
    launch = bind(tuple(teams), strip, Words.of(matrices, power_of_two))
    spare = MOST - len(matrices)
    scalars = (*sizes, *[0] * (3 * spare), *strides, *[0] * (2 * spare))
    launch((end, 1, 1), _pointers(matrices, MOST), scalars)


def _launch_tiles(matrices: tuple[Matrix, ...], power_of_two: bool) -> None:
    sizes, strides, ends = [], [], [0]
    for x, data, scale, granularity in matrices:
        columns, rows = x.shape
        sizes += [rows, columns]
        by_group = int(granularity is Granularity.GROUP)  # the other stride of a scale counts there
        strides += [x.stride(1), data.stride(0), scale.stride(by_group)]
        ends.append(ends[-1] + -(-rows // GROUP) * -(-columns // GROUP))
    blocks = tuple(matrix.granularity is Granularity.BLOCK for matrix in matrices)
    launch = bind_tiles(blocks, Words.of(matrices, power_of_two))
    spare = MOST_BY_TILES - len(matrices)
    scalars = (*sizes, *[0] * (2 * spare), ends[1], *strides, *[0] * (3 * spare))
    launch((ends[-1], 1, 1), _pointers(matrices, MOST_BY_TILES), scalars)


def _pointers(matrices: tuple[Matrix, ...], count: int) -> tuple[Tensor, ...]:
    """Tensors of so many matrices; the first stands in for those that are missing."""
    found = [tensor for matrix in matrices for tensor in matrix[:3]]
    return (*found, *matrices[0][:3] * (count - len(matrices)))


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.op == "quantize" and problem.a.layout is not Layout.COLUMN:
        return Rejected(
            f"reads one matrix if it is column-major; cuda.quantize_{granularity.suffix} is for others"  # noqa: E501
        )
    return supports(granularity, problem, device)


def _quantize(
    granularity: Granularity,
    power_of_two: bool,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    """One launch for a column-major matrix."""
    launch_together((Matrix(x, data, scale, granularity),), power_of_two)


def _quantize_transpose(
    power_of_two: bool,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    _sums: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    """Both ways: the strips of columns first, which take longer than as many rows."""
    both = [Matrix(x, data, scale), Matrix(x.t(), data_t, scale_t)]
    both.sort(key=lambda matrix: not is_column_major(matrix.x))
    launch_together((both[0], both[1]), power_of_two)


def _register() -> None:
    for epilogue in ("none", "power_of_two"):
        suffix = "" if epilogue == "none" else f"_{epilogue}"
        options: dict[str, Any] = {
            "architectures": ARCHITECTURES,
            "epilogues": frozenset({epilogue}),
        }
        for granularity in (Granularity.ROW, Granularity.GROUP, Granularity.BLOCK):
            register(
                "quantize",
                name=f"quantize_together_{granularity.suffix}{suffix}",
                granularity=granularity,
                supports=functools.partial(_supports, granularity),
                **options,
            )(functools.partial(_quantize, granularity, bool(suffix)))
        register(
            "quantize_transpose",
            name=f"quantize_transpose_together_row{suffix}",
            granularity=Granularity.ROW,
            supports=functools.partial(_supports, Granularity.ROW),
            **options,
        )(functools.partial(_quantize_transpose, bool(suffix)))


_register()
