"""FP8 GEMM with DCN's cross on Hopper's tensor cores. See mainloop.cuh and gemm_cross.cu.

    d[m, n] = x0[m, n] * ((sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]) + x[m, n]

a: [m, k], FP8, row-major; b: [k, n], FP8, column-major; rows of both start at multiples of 16
bytes; x0, x, d: [m, n], bfloat16, rows that start at multiples of 16 bytes.

`cuda.gemm_norm_row` computes the same for any norm and epilogue; this kernel is for the case in
which the bytes of x0, x and d take longer than the product. In training it also writes what x0 is
multiplied by, rounded to the dtype of d, because the gradient of x0 needs it. Where x0 and x are
one matrix, as in DCN's first cross, a program of its own reads it once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.kernels.cuda import tiles
from lokakern.kernels.cuda.tiles import DEPTH, ROWS, Kind, Tile, depth_of, scale_rows
from lokakern.registry.register import PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
    norm_form,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
PIECE_COLUMNS = 64  # of x0 and x that one bulk copy moves, of 64 rows
PIECE_BYTES = ROWS * PIECE_COLUMNS * 2
STORED_ROWS = 16  # of a bulk copy of the output: a warp's, which waits for no other
FEWEST_STAGES = 3  # of a's, where b stays in shared memory
ENOUGH_STAGES = 4  # of operands; more of them gain less than slots do
# Tiles of both warpgroups that a block could have written while it loads its columns of b. At 8192
# x 123200 x 512, 963 blocks of 64 such tiles took 1916 us of an H200, twice as many of 32 1856.
STEPS_OF_A_START = 1
_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_MOST_MAPS = 1024


class Slots(NamedTuple):
    """Of x0 and x; the macros of gemm_cross.cu explain both."""

    pieces: int
    lag: int


# The first that leave enough stages, of two matrices and of one. At 8192 x 15360 x 512 on an H200,
# which keeps the product, two take 220 us and one 204, with the last of these 241 and 223.
SLOTS = {
    False: (Slots(3, 1), Slots(2, 0)),
    True: (Slots(4, 1), Slots(3, 1), Slots(2, 0)),
}


class Plan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses."""

    launch: CudaLaunch
    tile: Tile
    grid: tuple[int, int, int]
    maps: dict[tuple[int, ...], tuple[TensorMap, ...]]


def macros_of(
    n: int, k: int, tile: Tile, kind: Kind, keeps: bool = False, is_one: bool = False,
    slots: Slots | None = None,
) -> dict[str, int | str]:  # fmt: skip
    """All macros, with as many stages as shared memory holds.

    Args:
        n: Columns of the output.
        k: Summed up.
        tile: Its tile.
        kind: What is computed.
        keeps: Whether the product is written, too.
        is_one: Whether x0 is x.
        slots: None: the first of `SLOTS` that leave enough stages, else the last.

    Raises:
        ValueError: Shared memory does not hold two stages.
    """
    for tried in SLOTS[is_one] if slots is None else (slots,):
        stages, shared = _room(n, k, tile, kind, keeps, is_one, tried)
        if stages >= ENOUGH_STAGES:
            break
    if stages < 2:
        raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
    macros = tiles.macros_of(n, k, tile, kind)
    kept = ("N", "K", "BLOCK_N", "WARPGROUPS", "RESIDENT", "PARTS", "DOUBLE", "BAND", "SCALES",
            "BATCH", "A_TYPE", "B_TYPE", "A_SLICES", "A_ENDS", "TENSOR_SCALES", "ROW_SCALES",
            "BIAS")  # fmt: skip
    return {
        **{name: macros[name] for name in kept}, "STAGES": stages, "KEEPS": int(keeps),
        "SAME": int(is_one), "SLOTS": tried.pieces, "LAG": tried.lag, "SHARED_BYTES": shared,
    }  # fmt: skip


def _room(
    n: int, k: int, tile: Tile, kind: Kind, keeps: bool, is_one: bool, slots: Slots
) -> tuple[int, int]:
    """Stages of each ring that shared memory holds beside slots, and its bytes with them."""
    steps, depth = -(-k // DEPTH), depth_of(k)
    stage = tile.height * depth + (0 if tile.resident else tile.block_n * depth) + 16
    stage += scale_rows(tile, kind) * 4 if kind.in_mainloop else 0
    fixed = steps * (tile.block_n * depth + 8) if tile.resident else 0
    held = slots.pieces * (2 - is_one) + (slots.lag + 1) * (keeps and is_one)
    fixed += tile.warpgroups * (held * PIECE_BYTES + slots.pieces * 16)
    fixed += tile.warpgroups * tile.block_n * 4 * ((kind.scales == "row") + (kind.bias_bytes > 0))
    fixed += 64  # what lies at multiples of 16 bytes
    stages = min(tiles.MOST_STAGES, (tiles.SHARED_BYTES - fixed) // (tile.pipelines * stage))
    return stages, -(-(fixed + tile.pipelines * stages * stage) // 16) * 16


def tile_for(n: int, k: int, kind: Kind) -> Tile:
    """128 columns, of which b stays in shared memory where it leaves enough stages for a."""
    tile = Tile(128, resident=True)
    try:
        has_room = int(macros_of(n, k, tile, kind)["STAGES"]) >= FEWEST_STAGES
    except ValueError:
        has_room = False
    return tile if has_room else Tile(128)


@functools.lru_cache(maxsize=4096)
def bind(
    n: int, k: int, tile: Tile, kind: Kind, keeps: bool = False, is_one: bool = False
) -> CudaLaunch:
    """The launch of one signature; arguments are those of `macros_of`."""
    macros = macros_of(n, k, tile, kind, keeps, is_one)
    program = nvrtc.Program(SOURCE, "gemm_cross", tuple(macros.items()))
    by_block = kind.scales == "block"
    return CudaLaunch(
        program, pointers=2 + (kind.bias_bytes > 0), scalars="i" + "ii" * by_block,
        threads=tile.threads, shared_bytes=int(macros["SHARED_BYTES"]),
        tensor_maps=5 + keeps + by_block, programmatic=True,
    )  # fmt: skip


def make_plan(
    m: int, n: int, k: int, kind: Kind, tile: Tile, sms: int, keeps: bool = False,
    is_one: bool = False,
) -> Plan:  # fmt: skip
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, kind, keeps, is_one)
    return Plan(launch, tile, (_grid_of(tile, m, n, sms), 1, 1), {})


def _grid_of(tile: Tile, m: int, n: int, sms: int) -> int:
    """Blocks of a launch: some columns more than once, where the last wave is better filled."""
    blocks = tiles.grid_of(tile, m, n, 1, sms)
    tiles_n, rounds = -(-n // tile.block_n), -(-m // (tile.height * tile.warpgroups))
    if not tile.resident or tiles_n <= sms:
        return blocks

    def steps(lanes: int) -> int:
        return -(-tiles_n * lanes // sms) * (-(-rounds // lanes) + STEPS_OF_A_START)

    return tiles_n * min(range(1, min(4, rounds) + 1), key=steps)


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, device: int, keeps: bool, is_one: bool) -> Plan:
    tile = tile_for(n, k, kind)
    return make_plan(m, n, k, kind, tile, jit.compute_units(device), keeps, is_one)


def _launch(
    scales: str,
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
    kept: Tensor | None = None,
) -> None:
    """``kept``, of the shape and dtype of the output, gets what x0 is multiplied by."""
    bias = epilogue.bias
    kind = Kind(
        scales, bias_bytes=0 if bias is None else bias.element_size(),
        a_type=_TYPES[a.data.dtype], b_type=_TYPES[b.data.dtype],
    )  # fmt: skip
    m, k = a.data.shape
    x0, x = epilogue.x0, epilogue.x
    assert x0 is not None and x is not None  # the problem's epilogue says so
    is_one = x0 is x or (0 != x0.data_ptr() == x.data_ptr() and x0.stride(0) == x.stride(0))
    plan = _plan(m, len(b.data), k, kind, out.get_device(), kept is not None, is_one)
    run(plan, kind, a, b, out, epilogue, kept)


def run(
    plan: Plan, kind: Kind, a: QuantizedTensor, b: QuantizedTensor, out: Tensor,
    epilogue: NormEpilogue, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch a plan."""
    x0, x, bias = epilogue.x0, epilogue.x, epilogue.bias
    assert x0 is not None and x is not None  # the problem's epilogue says so
    matrices = (out, a.data, b.data, x0, x, *([] if kept is None else [kept]))
    key: tuple[int, ...] = (*[t.data_ptr() for t in matrices], *[t.stride(0) for t in matrices])
    if kind.scales == "block":
        key = (*key, a.scale.data_ptr(), a.scale.stride(1))  # type: ignore[union-attr]
    maps = plan.maps.get(key)
    if maps is None:
        maps = _make_maps(plan, kind, a, b, out, x0, x, kept)
        if len(plan.maps) >= _MOST_MAPS:
            plan.maps.clear()
        plan.maps[key] = maps
    pointers = (a.scale, b.scale) if bias is None else (a.scale, b.scale, bias)
    scalars: tuple[int, ...] = (len(a.data),)
    if kind.scales == "block":  # [n / 128, k / 128] here
        scalars += (b.scale.stride(1), b.scale.stride(0))  # type: ignore[union-attr]
    plan.launch(plan.grid, pointers, scalars, maps)  # type: ignore[arg-type]


def _make_maps(
    plan: Plan, kind: Kind, a: QuantizedTensor, b: QuantizedTensor, out: Tensor, x0: Tensor,
    x: Tensor, kept: Tensor | None,
) -> tuple[TensorMap, ...]:  # fmt: skip
    """Maps in the kernel's order: b, the output, x0, x, what is kept, a, its scales."""
    tile, depth = plan.tile, depth_of(a.data.shape[1])
    made = [
        tensor_map(b.data, (tile.block_n, depth), depth),
        tensor_map(out, (STORED_ROWS, PIECE_COLUMNS)),
        tensor_map(x0, (ROWS, PIECE_COLUMNS)),
        tensor_map(x, (ROWS, PIECE_COLUMNS)),
        *([] if kept is None else [tensor_map(kept, (STORED_ROWS, PIECE_COLUMNS))]),
        tensor_map(a.data, (tile.height, depth), depth),
    ]
    if kind.scales == "block":
        made.append(tensor_map(a.scale.t(), (1, scale_rows(tile, kind)), 0))  # type: ignore[union-attr]
    return tuple(made)


# --- registration

SCALES = {
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
    "row": (Granularity.ROW, Granularity.ROW),
    "block": (Granularity.GROUP, Granularity.BLOCK),
}


def _supports(scales: str, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    form = norm_form(problem.epilogue)
    if form.norm.kind != "none" or form.last != "cross" or form.residual or form.residual_last:
        return Rejected(f"computes a cross after a product, not {problem.epilogue}")
    have = (problem.a.granularity, problem.b.granularity)
    if have != SCALES[scales]:
        wanted = " x ".join(granularity.value for granularity in SCALES[scales])
        return Rejected(f"takes {wanted} scales, not {have[0].value} x {have[1].value}")
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format not in (Format.E4M3FN, Format.E5M2):
            return Rejected(f"{name} is {operand.format.value}, which {device} does not multiply")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    if problem.n % 8:
        return Rejected(f"rows of the output must start at multiples of 16 bytes; n={problem.n}")
    if not problem.k or max(problem.m, problem.n, problem.k) >= 2**30:
        return Rejected(f"sizes must be from 1 to 2^30; they are {problem.shape}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


for _scales, (_a, _b) in SCALES.items():
    register(
        "gemm_norm",
        name=f"gemm_cross_{_scales}",
        architectures=frozenset({"sm_90"}),
        granularity=_a,
        b_granularity=_b,
        accumulation="promoted",
        supports=functools.partial(_supports, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
    )(functools.partial(_launch, _scales))
