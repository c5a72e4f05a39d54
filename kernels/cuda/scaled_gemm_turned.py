"""FP8 scaled GEMM in tiles whose rows are the weight's. See scaled_gemm_turned.cu.

The tensor core takes 64 rows of its first operand, and any multiple of 8 of its second. Where the
weight is the first, tiles have 64 to 256 of the output's rows in steps of 16, so that more sizes
fill the SMs. The products of scaled_gemm_fast.py and scaled_gemm_paired.py, with their bits where
these do not split sums; outputs in bfloat16 or float16, with a bias and relu at most.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.kernels.cuda import scaled_gemm, scaled_gemm_fast
from lokakern.kernels.cuda.fast_tiles import (
    ASKEW,
    CLUSTER_US,
    HALVES,
    LARGE,
    LEAST_STEP_US,
    LINE_BYTES,
    MOST_WAVES,
    OUTPUT_US,
    POWER,
    PROMOTED_WIDTHS,
    RATES,
    ROW_US,
    SHARED_STEP_US,
    WIDTHS,
    FastTile,
    askew,
    is_double,
)
from lokakern.kernels.cuda.scaled_gemm import SCALES
from lokakern.kernels.cuda.scaled_gemm_fast import OPTIONS
from lokakern.kernels.cuda.tiles import (
    DEPTH,
    MOST_STAGES,
    SHARED_BYTES,
    Kind,
    depth_of,
    macros_of,
)
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    KERNELS,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
from lokakern.types import PLAIN, Device, Epilogue, Format, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
LEAST_N = 72  # where n is at most 64, narrow tiles of other kernels are faster
LEAST_ROWS = 64  # of tiles
LINE_COLUMNS = 64  # of the output, which a bulk copy writes
WHOLE_PIECE = 112  # rows of a tile that leave in one copy; of more, each half does
ENOUGH_STAGES = 4  # of a ring, with which there is room to stage both halves: up to 15 % faster
# Macros of the usual tiles that these share.
_OF_BOTH = ("N", "K", "BLOCK_N", "WARPGROUPS", "RESIDENT", "PARTS", "SCALES", "BATCH", "A_SLICES",
            "A_ENDS", "TENSOR_SCALES", "ROW_SCALES")  # fmt: skip


class TurnedPlan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses and strides."""

    launch: CudaLaunch
    tile: FastTile  # of the transposed output
    grid: tuple[int, int, int]
    piece: int  # rows of the output that one bulk copy writes
    maps: dict[tuple[int, ...], tuple[TensorMap, ...]]


def macros_for(n: int, k: int, tile: FastTile, kind: Kind, promotes: bool) -> dict[str, int | str]:
    """All macros.

    Raises:
        ValueError: The program has no such epilogue, or shared memory does not hold the tile.
    """
    others = kind.direct or kind.cross or kind.accumulate or kind.a_steps or kind.batch != 1
    if others or kind.out_bytes != 2 or kind.activation not in ("none", "relu"):
        raise ValueError(f"turned tiles have a bias and relu at most, in 16 bits; not {kind}")
    usual = macros_of(n, k, FastTile(tile.block_n, tile.warpgroups, chunks=1), kind)
    piece = tile.block_n if tile.block_n <= WHOLE_PIECE else tile.block_n // 2
    stage = (tile.height + tile.block_n) * depth_of(k) + 16  # with its two barriers
    vectors = tile.warpgroups * tile.block_n * 4 + 16
    for chunks in range(tile.block_n // piece, 0, -1):
        fixed = tile.warpgroups * chunks * piece * LINE_BYTES + vectors
        stages = min(MOST_STAGES, (SHARED_BYTES - fixed) // stage)
        if stages >= ENOUGH_STAGES:
            break
    if stages < 2:
        raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
    double = promotes and is_double(k, tile, False)
    # All rows of a weight that stays in the L2, and then the next of the data.
    band = usual["BAND"] if usual["BAND"] != 1 else -(-n // (tile.height * tile.above))
    return {name: usual[name] for name in _OF_BOTH} | {
        "STAGES": stages, "DOUBLE": int(double), "BAND": band,
        "A_TYPE": kind.b_type, "B_TYPE": kind.a_type, "BIAS": kind.bias_bytes,
        "RELU": int(kind.activation == "relu"), "OUT": kind.out_bytes,
        "PIECE": piece, "CHUNKS": chunks, "SHARED_BYTES": -(-(fixed + stages * stage) // 16) * 16,
        "PROMOTE": int(promotes), "ABOVE": tile.above, "ALONG": tile.along, "IN_TURN": 0,
    }  # fmt: skip


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: FastTile, promotes: bool, kind: Kind) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_for(n, k, tile, kind, promotes)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()), OPTIONS)
    return CudaLaunch(
        program, pointers=2 + (kind.bias_bytes > 0), scalars="i", threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]), tensor_maps=3, cluster=tile.pairs,
        programmatic=True,
    )  # fmt: skip


@functools.cache
def tiles_of(askew: int, promotes: bool) -> tuple[FastTile, ...]:
    """All tiles of the transposed output, by the same rules as `fast_tiles.tiles_of`."""
    pairs = (((1, 1),), ((1, 1), (2, 1), (1, 2)), ((2, 1), (1, 2), (2, 2)))[askew]
    found = []
    for (warpgroups, in_turn), widths in (PROMOTED_WIDTHS if promotes else WIDTHS).items():
        if in_turn:
            continue
        for width, (above, along) in itertools.product(widths, pairs):
            small = width < (128 if warpgroups == 1 else 96)
            if (above * along > 2 - (askew == 1) and small) or above * along > 2 * warpgroups:
                continue
            chunks = 1 if warpgroups == 3 else 2
            found.append(FastTile(width, warpgroups, chunks=chunks, above=above, along=along))
    return tuple(found)


def cost_us(m: int, n: int, k: int, tile: FastTile, askew: int, sms: int, promotes: bool) -> float:
    """About what a product takes with a tile; infinity where it has no such tiles.

    As `fast_tiles.cost_us` of the transposed output, but that all lines are written whole.
    """
    groups = tile.groups(n, m)
    waves = groups / tile.resident_groups(sms)
    few = waves <= MOST_WAVES or tile.warpgroups < 3 or askew == 2
    if (tile.block_n > LEAST_ROWS and tile.block_n >= m + 16) or not few:
        return math.inf
    rates, sums = RATES[tile.warpgroups, False], tile.height * tile.block_n
    products = (rates.promoted if promotes else rates.sums) * sums * 1e-5
    if tile.block_n > 128:
        products *= HALVES
    row_us = ROW_US[0] + ROW_US[1] * min(1.0, groups * tile.pairs / sms)
    copies = row_us * (tile.height / tile.along + tile.block_n / tile.above) * ASKEW[askew]
    step = math.pow(products**6 + copies**6 + LEAST_STEP_US**6, 1 / 6)
    step += SHARED_STEP_US * (tile.pairs > 1)
    of_tile = rates.tile + rates.outputs * sums * 1e-4
    all_waves = math.ceil(waves)
    counted = all_waves - rates.idle * (all_waves - waves) if waves > 1 else all_waves
    inside = counted * (-(-k // DEPTH) * step + of_tile)
    inside = math.pow(inside**4 + (m * n * OUTPUT_US) ** 4, 1 / 4)
    if m * n > LARGE * sms and not promotes:
        inside *= POWER
    return rates.once + CLUSTER_US[tile.pairs] + inside


def tile_of(m: int, n: int, k: int, askew: int, sms: int, promotes: bool) -> FastTile:
    """The tile with the least cost."""
    return min(
        tiles_of(askew, promotes),
        key=lambda tile: cost_us(m, n, k, tile, askew, sms, promotes),
    )


def make_plan(
    m: int, n: int, k: int, kind: Kind, tile: FastTile, sms: int, promotes: bool = False
) -> TurnedPlan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, promotes, kind)
    groups = min(tile.resident_groups(sms), tile.groups(n, m))
    piece = int(dict(launch.program.macros)["PIECE"])
    return TurnedPlan(launch, tile, (tile.pairs * groups, 1, 1), piece, {})


@jit.cached
def _plan(
    m: int, n: int, k: int, kind: Kind, askew: int, promotes: bool, device: int
) -> TurnedPlan:
    sms = jit.compute_units(device)
    return make_plan(m, n, k, kind, tile_of(m, n, k, askew, sms, promotes), sms, promotes)


def run(
    plan: TurnedPlan,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
) -> None:
    """Launch a plan."""
    key = (a.data_ptr(), b.data_ptr(), out.data_ptr(), a.stride(0), b.stride(1), out.stride(0))
    maps = plan.maps.get(key)
    if maps is None:
        copied, depth = plan.tile.copied, depth_of(b.shape[0])
        maps = (
            tensor_map(b.t(), (copied.height, depth), depth),
            tensor_map(out, (plan.piece, LINE_COLUMNS), LINE_BYTES),
            tensor_map(a, (copied.block_n, depth), depth),
        )
        if len(plan.maps) >= scaled_gemm._MOST_MAPS:
            plan.maps.clear()
        plan.maps[key] = maps
    pointers: tuple[Tensor, ...] = (a_scale, b_scale)
    pointers += () if bias is None else (bias,)
    plan.launch(plan.grid, pointers, (len(out),), maps)


def _launch(
    scales: str,
    promotes: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    (m, n), k = out.shape, b.shape[0]
    kind = scaled_gemm._kind_of(scales, (a,), b, out, bias, epilogue)
    if kind.direct:  # out starts where no bulk copy can write: the same bits by other tiles
        whole = epilogue._replace(batch_invariant=True)  # which do not split sums
        given = (a, a_scale, b, b_scale, out, bias, workspace, whole)
        scaled_gemm_fast.launch(scales, promotes, *given)
        return
    starts = a.data_ptr() | a.stride(0) | b.data_ptr() | b.stride(1)
    plan = _plan(m, n, k, kind, askew(starts), promotes, out.get_device())
    run(plan, a, a_scale, b, b_scale, out, bias)


def supports(scales: str, problem: Problem, device: Device) -> Support:
    """As scaled_gemm.py, with an output that bulk copies write in lines of 64 columns."""
    answer = KERNELS[f"cuda.scaled_gemm_{scales}"].supports_problem(problem, device)
    if isinstance(answer, Rejected):
        return answer
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16 or float16, not {problem.out_format.value}")
    if problem.n < LEAST_N or problem.n % 8 or problem.out_strided:
        return Rejected(
            f"needs a contiguous output of a multiple of 8 columns, {LEAST_N} at least; "
            f"n={problem.n}"
        )
    return answer


for _scales, _promotes in itertools.product(("tensor", "row"), (True, False)):
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_turned" + ("" if _promotes else "_fast"),
        architectures=frozenset({"sm_90"}),
        granularity=SCALES[_scales][0],
        b_granularity=SCALES[_scales][1],
        accumulation="promoted" if _promotes else "fast",
        supports=functools.partial(supports, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND if _promotes else FAST_KERNEL_ERR_BOUND,
        epilogues=frozenset({"none", "bias", "relu", "bias+relu"}),
        compile_only={"sm_90": "ran as a part of scaled_gemm_fast; not in this form yet"},
    )(functools.partial(_launch, _scales, _promotes))
