"""Quantize long rows to FP8 with a scale each, as `lokakern.numerics.quantize`.

    s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))

x: [rows, columns], bfloat16, float16 or float32, rows start at multiples of 16 bytes; q: [rows,
columns], any row stride. amax is over finite values. `cuda.quantize_row` takes any rows; those of
more than 16384 columns it moves at 3.1 to 3.3 TB/s of an H200. See quantize_long.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import quantize, tiles
from lokakern.kernels.cuda.quantize_tile import is_column_major
from lokakern.kernels.cuda.quantize_tile import supports as supports_any
from lokakern.registry.register import register
from lokakern.types import Device, Format, Granularity, Layout, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
MOST_SHORT = 16384  # columns of rows that are left to quantize.cu
WIDE = 16  # columns of a thread at a time
CLUSTERS = (1, 2, 4, 8)  # blocks that share a row
THREADS = 512  # of a block, beside the warp that brings boxes
TURNS = 4  # of rows whose magnitudes are kept
# Pieces of rows that the ring holds, at the least: one that is cast, one whose amax is taken, and
# one that is on its way.
LEAST_PIECES = 3
# And at the most: 8192 rows of 17280 columns take an H200 106 us with four, 111 with six.
MOST_PIECES = 4
# Of a row a block takes at most so much: 256 rows of 69120 columns take 18.4 us with pieces of 34
# KB in clusters of four, 27 with half of that in clusters of eight.
PIECE_BYTES = 40 * 1024


class Plan(NamedTuple):
    """How blocks share a row; the macros of quantize_long.cu explain each."""

    cluster: int
    piece: int
    box: int
    per_piece: int
    boxes: int
    threads: int = THREADS
    ahead: bool = True

    def shared_bytes(self, item: int) -> int:
        """Shared memory of a block, for elements of so many bytes."""
        return self.boxes * (self.box * item + 16) + _told_bytes(self.cluster, self.threads)


def _told_bytes(cluster: int, threads: int) -> int:
    return TURNS * (threads // 32 * cluster * 4 + 8)


def plan_for(
    columns: int, item: int, cluster: int, threads: int = THREADS, rounds: int = 1
) -> Plan | None:
    """The plan with so many blocks; None where the ring does not hold enough pieces.

    Args:
        columns: Of x.
        item: Bytes of an element.
        cluster: Blocks.
        threads: Of a block.
        rounds: How often a thread has 16 columns of a box, at most.
    """
    piece = _round_up(-(-columns // cluster))
    per_piece = -(-piece // (threads * WIDE * rounds))
    box = _round_up(-(-piece // per_piece))
    free_bytes = tiles.SHARED_BYTES - _told_bytes(cluster, threads)
    boxes = free_bytes // (box * item + 16)
    if boxes < LEAST_PIECES * per_piece:
        return None
    return Plan(cluster, piece, box, per_piece, min(boxes, MOST_PIECES * per_piece), threads)


def _round_up(columns: int) -> int:
    return -(-columns // WIDE) * WIDE


def clusters_at_once(cluster: int, units: int) -> int:
    """Clusters that so many multiprocessors hold."""
    return max(1, min(units // cluster, tiles.CLUSTERS.get(cluster, units)))


@functools.lru_cache(maxsize=4096)
def plan_of(columns: int, item: int) -> Plan:
    """The smallest cluster with pieces of at most `PIECE_BYTES`, else the largest one."""
    fitting = (n for n in CLUSTERS if _round_up(-(-columns // n)) * item <= PIECE_BYTES)
    plan = plan_for(columns, item, next(fitting, CLUSTERS[-1]))
    assert plan is not None  # `supports` says so
    return plan


@functools.lru_cache(maxsize=4096)
def bind(
    columns: int, plan: Plan, whole: bool, source: torch.dtype, target: torch.dtype,
    power_of_two: bool = False,
) -> CudaLaunch:  # fmt: skip
    """The launch for any number of rows.

    Args:
        columns: Of x.
        plan: How blocks share a row.
        whole: Whether every row of data starts at a multiple of 16 bytes.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": 1,
        "WHOLE": int(whole),
        "POWER_OF_TWO": int(power_of_two),
        "COLUMNS": columns,
        "CLUSTER": plan.cluster,
        "PIECE": plan.piece,
        "BOX": plan.box,
        "PER_PIECE": plan.per_piece,
        "BOXES": plan.boxes,
        "AHEAD": int(plan.ahead),
        "THREADS": plan.threads,
    }
    program = nvrtc.Program(SOURCE, "quantize_long", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=3, scalars="iqq", threads=plan.threads + 32,
        shared_bytes=plan.shared_bytes(source.itemsize), cluster=plan.cluster, programmatic=True,
    )  # fmt: skip


def launch(
    x: Tensor, data: Tensor, scale: Tensor, plan: Plan, units: int, power_of_two: bool = False
) -> None:
    """Quantize x by a plan, with as many clusters as so many multiprocessors hold."""
    rows, columns = x.shape
    stride, pitch = x.stride(0), data.stride(0)
    whole = not (data.data_ptr() | pitch) & 15
    clusters = min(rows, clusters_at_once(plan.cluster, units))
    bound = bind(columns, plan, whole, x.dtype, data.dtype, power_of_two)
    bound((clusters * plan.cluster, 1, 1), (x, data, scale), (rows, stride, pitch))


def supports(problem: Problem, device: Device) -> Support:
    answer = supports_any(Granularity.ROW, problem, device)
    if isinstance(answer, Rejected):
        return answer
    if problem.k <= MOST_SHORT:
        return Rejected(f"takes rows of more than {MOST_SHORT} columns; k={problem.k}")
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    item = problem.a.format.dtype.itemsize
    if plan_for(problem.k, item, CLUSTERS[-1]) is None:
        return Rejected(
            f"{LEAST_PIECES} rows must fit the shared memory of {CLUSTERS[-1]} blocks; "
            f"k={problem.k} takes {problem.k * item} bytes"
        )
    return answer


def _quantize(
    power_of_two: bool, x: Tensor, data: Tensor, scale: Tensor, workspace: tuple[Tensor, ...]
) -> None:
    # The route of a layer is chosen for rows that lie as usual, and its input may be a slice.
    if is_column_major(x) or (x.data_ptr() | x.stride(0) * x.element_size()) & 15:
        quantize._quantize(Granularity.ROW, power_of_two, x, data, scale, workspace)
        return
    plan = plan_of(x.shape[1], x.element_size())
    launch(x, data, scale, plan, jit.compute_units(x.get_device()), power_of_two)


for _epilogue in ("none", "power_of_two"):
    register(
        "quantize",
        name=f"quantize_long_row{'' if _epilogue == 'none' else f'_{_epilogue}'}",
        architectures=frozenset({"sm_90"}),
        granularity=Granularity.ROW,
        supports=supports,
        epilogues=frozenset({_epilogue}),
    )(functools.partial(_quantize, _epilogue == "power_of_two"))
