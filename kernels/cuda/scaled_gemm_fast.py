"""FP8 scaled GEMM whose sums are not promoted. See scaled_gemm_fast.cu and fast_mainloop.cuh.

The same product, scales and epilogues as scaled_gemm.py with one scale or scales of rows, but the
tensor core's some 14 bits of each sum are kept for all of k, as `use_fast_accum` does in
`torch._scaled_mm`: `kernel_err` is bounded by `FAST_KERNEL_ERR_BOUND`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.scaled_gemm import SCALES, Plan
from lokakern.kernels.cuda.tiles import (
    DEPTH,
    ROWS,
    Kind,
    Tile,
    fits,
    grid_of,
    macros_of,
    split_tile_for,
    tile_for,
)
from lokakern.registry.register import FAST_KERNEL_ERR_BOUND, KERNELS, register
from lokakern.types import EPILOGUES, PLAIN, Device, Epilogue, Problem, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))


# Which products and sums of an epilogue the compiler contracts depends on the tile, and so would
# bits of float32 outputs.
OPTIONS = ("--fmad=false",)
LINE_BYTES, SECTOR_BYTES = 128, 32  # of the L2
LONGEST_RESIDENT_K = 1024  # above, a weight of 128 columns leaves a too little shared memory
NARROW = 96  # columns, of which n may leave less idle than of 128


@dataclass(frozen=True, slots=True)
class FastTile(Tile):
    """A `Tile` with the macros of fast_mainloop.cuh."""

    pairs: int = 1
    in_turn: bool = False


_SHARED = FastTile(128)
_IN_TURN, _IN_TURN_PAIRS = FastTile(128, in_turn=True), FastTile(128, pairs=2, in_turn=True)
_WIDE = FastTile(192, pairs=2), FastTile(256, pairs=2)
# us of an H200 for a step along k, and for the rest of a tile, fitted to 75 sizes: where all rows
# start at lines of the L2, where some start within lines, and where some do within sectors.
_COSTS_US = (
    {_SHARED: (0.40, 1.2), _IN_TURN: (0.36, 0.9), _WIDE[0]: (0.60, 1.5), _WIDE[1]: (0.78, 1.7)},
    {_SHARED: (0.45, 1.5), _IN_TURN_PAIRS: (0.385, 0.7), _WIDE[0]: (0.60, 1.5),
     _WIDE[1]: (0.78, 1.7)},
    {_SHARED: (0.62, 1.0), _IN_TURN_PAIRS: (0.55, 0.7), _WIDE[0]: (0.70, 1.3),
     _WIDE[1]: (0.78, 1.7)},
)  # fmt: skip
_COST_OF_NARROW_US = 0.28, 1.2  # of a weight that does not stay; fitted to 25 sizes


def macros_for(n: int, k: int, tile: Tile, kind: Kind) -> dict[str, int | str]:
    """All macros.

    Raises:
        ValueError: Shared memory does not hold the tile.
    """
    pairs, in_turn = (tile.pairs, tile.in_turn) if isinstance(tile, FastTile) else (1, False)
    return macros_of(n, k, tile, kind) | {"PAIRS": pairs, "IN_TURN": int(in_turn)}


def askew(starts: int) -> int:
    """Which of `_COSTS_US` holds for rows, from the bits of all their addresses."""
    return (starts % LINE_BYTES != 0) + (starts % SECTOR_BYTES != 0)


def tile_of(m: int, n: int, k: int, kind: Kind, askew: int, may_split: bool, sms: int) -> Tile:
    """The tile of an output of these sizes.

    Args:
        m: Rows.
        n: Columns.
        k: Length of the sums.
        kind: What is computed.
        askew: See `askew`.
        may_split: Whether blocks may share a sum.
        sms: SMs of the GPU.
    """
    split = split_tile_for(m, n, k, 1, sms) if may_split else None
    if split is not None:
        return split
    usual = tile_for(m, n, k, kind, 1, sms)
    narrow = narrow_tile_for(m, n, k, kind, askew, sms)
    if narrow is not None and narrow.resident:
        return narrow
    is_narrow = usual.warpgroups == 1
    # Narrow tiles read a again for each 64 columns, which rows askew within sectors make slow.
    stays = usual.resident and k <= LONGEST_RESIDENT_K and not (is_narrow and askew > 1 and n > 128)
    if n <= 64 or stays or (is_narrow and not usual.resident):
        return narrow or usual

    def cost_us(tile: FastTile) -> float:
        per_step, rest = costs[tile]
        waves = math.ceil(_groups(m, n, tile) / (sms // tile.pairs))
        # Of a single tile, one warpgroup would have nothing to do.
        idle = 2 if tile.in_turn and waves == 1 else 1
        return idle * waves * (-(-k // DEPTH) * per_step + rest)

    costs = _COSTS_US[askew]
    best = min(costs, key=cost_us)
    if narrow is None:
        return best
    per_step, rest = _COST_OF_NARROW_US
    waves = math.ceil(narrow.count(m, n) / sms)
    return narrow if waves * (-(-k // DEPTH) * per_step + rest) < cost_us(best) else best


def narrow_tile_for(m: int, n: int, k: int, kind: Kind, askew: int, sms: int) -> Tile | None:
    """A tile of 96 columns; None where it leaves about as many columns idle as one of 128.

    And None of small outputs, with fewer pieces of 64 x 96 than nine tenths of the SMs. Of 48 sizes
    of 72 to 480 columns on an H200, others of 65 to 96, 129 to 192 and 257 to 288 columns take 0.55
    to 0.99 of the time so; one takes 1.04.
    """
    columns = -(-n // NARROW)
    is_full = NARROW * columns <= 0.8 * (-(-n // 128) * 128)
    few = -(-m // ROWS) * columns < 0.9 * sms
    if n <= 64 or not is_full or few or (askew > 1 and n > 128):
        return None
    tile = Tile(NARROW)
    if k <= LONGEST_RESIDENT_K // 2:
        tile = Tile(NARROW, warpgroups=1, resident=True, blocks=2)
    elif k <= LONGEST_RESIDENT_K:
        tile = Tile(NARROW, resident=True)
    return tile if fits(n, k, tile, kind) else None


def _groups(m: int, n: int, tile: FastTile) -> int:
    """Pairs of tiles, or tiles."""
    return -(-m // (tile.height * tile.pairs)) * -(-n // tile.block_n)


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, kind: Kind) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_for(n, k, tile, kind)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()), OPTIONS)
    pointers = 3 + (kind.bias_bytes > 0) + 2 * (kind.cross > 0) + (kind.out_bytes == 1)
    return CudaLaunch(
        program, pointers=pointers, scalars="iq" + "qq" * (kind.cross > 0), threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]),
        tensor_maps=1 + (not macros["DIRECT"]) + max(1, len(kind.a_steps)),
        cluster=tile.parts * int(macros["PAIRS"]), programmatic=True,
    )  # fmt: skip


def make_plan(m: int, n: int, k: int, kind: Kind, tile: Tile, sms: int) -> Plan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, kind)
    macros = dict(launch.program.macros)
    width, fold, pairs = (int(macros[name]) for name in ("CHUNK_BYTES", "FOLD", "PAIRS"))
    swizzle_bytes = width if width in (32, 64, 128) and fold == 1 else 0
    if isinstance(tile, FastTile):
        grid = pairs * min(sms // pairs, _groups(m, n, tile))
    else:
        grid = grid_of(tile, m, n, 1, sms)
    # The maps are of what one block of a pair copies.
    copied = replace(tile, block_n=tile.block_n // pairs)
    return Plan(
        launch, copied, (grid, 1, 1), width // kind.out_bytes * fold, swizzle_bytes, fold, {}
    )


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, askew: int, may_split: bool, device: int) -> Plan:
    sms = jit.compute_units(device)
    return make_plan(m, n, k, kind, tile_of(m, n, k, kind, askew, may_split, sms), sms)


def _launch(
    scales: str,
    a: Tensor | Sequence[Tensor],
    a_scale: Tensor | Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    slices: Sequence[Tensor] = (a,) if isinstance(a, Tensor) else a
    slice_scales: Sequence[Tensor] = (a_scale,) if isinstance(a_scale, Tensor) else a_scale
    (m, n), k = out.shape, b.shape[0]
    kind = scaled_gemm._kind_of(scales, slices, b, out, bias, epilogue)
    starts = b.data_ptr() | b.stride(1)
    for x in slices:
        starts |= x.data_ptr() | x.stride(0)
    if out.stride(0) * out.element_size() % LINE_BYTES:
        starts |= SECTOR_BYTES
    plan = _plan(m, n, k, kind, askew(starts), not epilogue.batch_invariant, out.get_device())
    scaled_gemm.run(plan, kind, m, 1, slices, slice_scales, b, b_scale, out, bias, epilogue)


def _supports(scales: str, problem: Problem, device: Device) -> Support:
    return KERNELS[f"cuda.scaled_gemm_{scales}"].supports_problem(problem, device)


for _scales in ("tensor", "row"):
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_fast",
        architectures=frozenset({"sm_90"}),
        granularity=SCALES[_scales][0],
        b_granularity=SCALES[_scales][1],
        accumulation="fast",
        supports=functools.partial(_supports, _scales),
        kernel_err_bound=FAST_KERNEL_ERR_BOUND,
        epilogues=EPILOGUES,
        accumulates=True,
        k_slices=True,
        batch_invariant=True,
    )(functools.partial(_launch, _scales))
