"""Tiles of the FP8 GEMM whose sums are not promoted, their macros, and which is the fastest.

Beside `lokakern.kernels.cuda.tiles`. See scaled_gemm_fast.py and fast_mainloop.cuh.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lokakern.kernels.cuda.tiles import (
    CLUSTERS,
    DEPTH,
    MOST_STAGES,
    ROWS,
    SHARED_BYTES,
    Kind,
    Tile,
    chunk_bytes,
    depth_of,
    fits,
    macros_of,
    split_tile_for,
    tile_for,
)

LINE_BYTES, SECTOR_BYTES = 128, 32  # of the L2
SURELY_RESIDENT_K, RESIDENT_K = 640, 1024  # up to the second, a weight that stays may be faster
NARROW = 96  # columns of a weight that stays, of which n may leave less idle than of 128


@dataclass(frozen=True, slots=True)
class FastTile(Tile):
    """A `Tile` with the macros of fast_mainloop.cuh."""

    pairs: int = 1
    in_turn: bool = False

    @property
    def columns(self) -> int:
        """That one block writes; of a tile of half the width, for copies of a pair, up to 16.

        `scaled_gemm.run` makes a map of the output only where rows of this length have one.
        """
        return self.block_n // self.parts if self.parts > 1 else -(-self.block_n // 16) * 16

    def groups(self, m: int, n: int) -> int:
        """Pairs of tiles, or tiles, of an output."""
        return -(-m // (self.height * self.pairs)) * -(-n // self.block_n)


class Cost(NamedTuple):
    """What a tile of a shape takes on an H200, in us."""

    sums: float  # 10^5 of them, each of one step along k
    step: float  # beside its sums
    tile: float  # beside its steps
    once: float
    idle: float  # part of the last wave that is saved where it has no tiles
    most_waves: float = math.inf  # of outputs that take such tiles


class Shape(NamedTuple):
    """Tiles that differ in their width."""

    tile: FastTile
    widths: tuple[int, ...]
    cost: Cost  # where all rows start at lines of the L2
    within_lines: float  # times as much, where some start at sectors of lines
    askew: Cost  # where some start within sectors, of pairs of blocks


# Fitted to 336 sizes of 72 to 3500 columns and sums of 260 to 5000, of outputs in bfloat16. Beside
# two chunks of 240 columns three steps fit shared memory, where other widths have four. Large
# outputs are bound by the GPU's power, of which two warpgroups in turn need the least and three the
# most.
SHAPES = (
    Shape(FastTile(0, warpgroups=1), tuple(range(64, 225, 16)),
          Cost(2.75, 0.0, 1.11, 1.92, 0.28), 1.18, Cost(2.50, 0.14, 1.13, 2.13, 0.60)),
    Shape(FastTile(0), (*range(64, 225, 16), 256),
          Cost(2.14, 0.0, 1.45, 3.42, 0.07), 1.05, Cost(1.64, 0.26, 1.11, 2.16, 0.41)),
    Shape(FastTile(0, in_turn=True), (112, 128, 144),
          Cost(2.15, 0.0, 0.87, 3.49, 0.49), 1.13, Cost(0.67, 0.38, 1.33, 0.94, 0.13)),
    Shape(FastTile(0, warpgroups=3, chunks=1), (160, 176, 192),
          Cost(0.93, 0.35, 2.44, 3.15, 0.20, most_waves=4.0), 1.0,
          Cost(0.86, 0.50, 2.32, 2.69, 0.13)),
)  # fmt: skip
# A tile whose weight stays in shared memory, fitted to the same sizes.
STAYS, RESIDENT = Tile(128, resident=True), Cost(2.32, 0.0, 0.34, 3.12, 0.16)
ROW_US = 1.3e-3  # of 128 bytes that an SM takes from the L2: at least so long is a step
LARGE = 8 * 128 * 128  # sums of each SM
# Of tiles that are all computed at once, in us.
LEAST_STEP_US = 0.148
CLUSTER_US = {1: 0.0, 2: 0.73, 4: 0.96, 8: 0.84}  # by blocks
SURELY_FASTER = 0.95
NARROW_FROM_K = 768  # of outputs of at most 64 columns, whose weight stays below


def macros_for(n: int, k: int, tile: Tile, kind: Kind) -> dict[str, int | str]:
    """All macros.

    Raises:
        ValueError: Shared memory does not hold the tile, or its steps are too few for its parts, or
            columns of a part are no bulk copy's.
    """
    macros = macros_of(n, k, tile, kind)
    if not isinstance(tile, FastTile):
        return macros | {"PAIRS": 1, "IN_TURN": 0}
    columns, left = divmod(tile.block_n, 8 * tile.parts)
    if left or not chunk_bytes(8 * columns, kind.out_bytes) or -(-k // DEPTH) < tile.parts:
        raise ValueError(f"{tile} has too many parts for n={n} k={k} of {kind.out_bytes} bytes")
    row = tile.columns * kind.out_bytes
    width = staged_bytes(row, kind.out_bytes)
    if not macros["DIRECT"] and width:
        chunks = min(tile.chunks, row // width)
        fixed = tile.warpgroups * chunks * -(-ROWS * width // 1024) * 1024 + 16
        fixed += tile.warpgroups * tile.block_n * 4  # b's scales
        stage = (tile.height + tile.block_n) * depth_of(k) + 16
        total = SHARED_BYTES // tile.blocks - (1024 if tile.blocks > 1 else 0)
        stages = min(MOST_STAGES, (total - fixed) // stage)
        if stages < 2:
            raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
        macros |= {
            "CHUNK_BYTES": width, "CHUNKS": chunks, "STAGES": stages,
            "SHARED_BYTES": fixed + stages * stage,
        }  # fmt: skip
    return macros | {"PAIRS": tile.pairs, "IN_TURN": int(tile.in_turn)}


def staged_bytes(row: int, item: int) -> int:
    """Bytes of a row of a tile that one bulk copy writes, where `chunk_bytes` has few; else 0.

    Then an odd number of 16 bytes, which are in different banks of shared memory in 8 rows that
    follow each other. Of rows of float32 that would be no whole 8 columns, and rows of up to 64
    bytes leave in one copy, permuted.
    """
    if item > 2 or row <= 64 or chunk_bytes(row // item, item) >= (128 if item == 2 else 64):
        return 0
    while row % 32 == 0:
        row //= 2
    return row


def askew(starts: int) -> int:
    """Where rows start, from the bits of all addresses: 0 at lines, 1 at sectors, 2 within them."""
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
    split = shared_tile_for(m, n, k, kind, askew, sms) if may_split else None
    if split is not None:
        return split
    usual = tile_for(m, n, k, kind, 1, sms)
    if n <= 64:
        return narrow_output_tile_for(m, n, k, askew, sms) or usual
    is_small = -(-m // ROWS) * -(-n // ROWS) <= sms  # one wave of the smallest tiles
    if is_small and (askew < 2 or usual.block_n <= 32):
        return usual
    if k <= SURELY_RESIDENT_K:
        narrow = narrow_tile_for(m, n, k, kind, askew, sms)
        # Narrow tiles read a again for each 64 columns, which rows askew within sectors make slow.
        if narrow or (usual.resident and not (usual.warpgroups == 1 and askew > 1 and n > 128)):
            return narrow or usual

    pairs = 2 if askew > 1 else 1
    found: list[tuple[float, int]] = []
    tiles, groups = tiles_of(pairs, kind.out_bytes), max(1, sms // pairs)
    for i, (tile, cost, within_lines) in enumerate(tiles):
        if tile.block_n < n + 16:
            us = cost_us(m, n, k, tile, cost, groups)
            found.append((us * within_lines if askew == 1 else us, i))
    least_us, best = min(found)
    may_stay = k <= RESIDENT_K and pairs == 1 and usual == STAYS
    stays = may_stay and cost_us(m, n, k, STAYS, RESIDENT, sms) < least_us
    return STAYS if stays else tiles[best][0]


@functools.cache
def tiles_of(pairs: int, out_bytes: int) -> tuple[tuple[FastTile, Cost, float], ...]:
    """All tiles, what they cost, and how many times as much within lines.

    Where the compiler does not unroll the loops over what is staged, sums lie in local memory: of
    float32 with two chunks, or from 192 columns on, and of FP8 with 192 or three warpgroups.
    """
    return tuple(
        (
            replace(
                shape.tile, block_n=width, pairs=pairs,
                chunks=1 if out_bytes == 4 else shape.tile.chunks,
            ),
            shape.askew if pairs > 1 else shape.cost,
            shape.within_lines,
        )
        for shape in SHAPES
        for width in shape.widths
        if out_bytes == 2
        or (out_bytes == 4 and width < 192)
        or (out_bytes == 1 and width != 192 and shape.tile.warpgroups < 3)
    )  # fmt: skip


def cost_us(m: int, n: int, k: int, tile: Tile, cost: Cost, groups: int) -> float:
    """About what a product takes, by so many groups of SMs at a time; infinity: no such tiles."""
    pairs, alternates = (tile.pairs, tile.in_turn) if isinstance(tile, FastTile) else (1, True)
    height, width = ROWS * tile.warpgroups, tile.block_n
    waves = -(-m // (height * pairs)) * -(-n // width) / groups
    # In one wave a warpgroup of two that write in turn would have nothing to do.
    if waves > cost.most_waves or (waves <= 1 and alternates):
        return math.inf
    sums = height * width
    step = cost.step + cost.sums * sums * 1e-5
    if pairs == 1:
        step = max(step, ROW_US * (height + width))
    missing = math.ceil(waves) - waves if waves > 1 else 0.0
    us = cost.once + (math.ceil(waves) - cost.idle * missing) * (-(-k // DEPTH) * step + cost.tile)
    is_large = pairs == 1 and waves * sums > LARGE
    return us * (1.03 if is_large and not alternates else 1.0)


def shared_tile_for(m: int, n: int, k: int, kind: Kind, askew: int, sms: int) -> Tile | None:
    """A tile whose sums a cluster shares; None where tiles of whole sums are about as fast."""
    usual = split_tile_for(m, n, k, 1, sms)
    if n <= 64:
        return usual
    whole, shared, best = math.inf, math.inf, None
    for tile in one_wave_tiles(kind.out_bytes):
        # Where all rows start at lines, pairs gain less than their second barrier costs.
        if tile.block_n >= n + 16 or tile.parts * DEPTH > k or tile.pairs > 1 + askew:
            continue
        us = one_wave_us(m, n, k, tile, askew, sms)
        if tile.parts > 1:
            if us < shared:
                shared, best = us, tile
        elif tile.block_n <= NARROW and tile.pairs == 1 + (askew > 1):  # as those that were timed
            whole = min(whole, us)
    return best if best and (usual or shared < SURELY_FASTER * whole) else usual


@functools.cache
def one_wave_tiles(out_bytes: int) -> tuple[FastTile, ...]:
    """Of one warpgroup, with and without parts, whose columns bulk copies can write."""
    return tuple(
        FastTile(width, warpgroups=1, pairs=pairs, parts=parts)
        for width in (48, 64, 80, 96, 112, 128, 160, 192)
        for pairs in (1, 2)
        for parts in (1, 2, 4, 8)
        if pairs * parts <= 8
        and width % (8 * parts) == 0
        and chunk_bytes(width // parts, out_bytes)
    )


def one_wave_us(m: int, n: int, k: int, tile: FastTile, askew: int, sms: int) -> float:
    """About what a product takes whose tiles are all computed at once; else infinity.

    Fitted to 85 times of 25 sizes: 6 % off in the median. How long a step takes depends on how many
    others copy from the L2.
    """
    cluster = tile.pairs * tile.parts
    wave = tile.groups(m, n) / CLUSTERS.get(cluster, sms)
    if wave > 1:
        return math.inf
    rows = ROWS + tile.block_n / tile.pairs
    copies = (0.23e-3 + 1.6e-3 * wave) * rows * (1.0, 1.34, 1.65)[askew]
    step = math.pow(LEAST_STEP_US**6 + copies**6, 1 / 6)  # about the longer of both
    of_columns = (1.92 if tile.parts > 1 else 0.2) * tile.block_n / 128
    return 1.44 + CLUSTER_US[cluster] + -(-k // (DEPTH * tile.parts)) * step + of_columns


def narrow_output_tile_for(m: int, n: int, k: int, askew: int, sms: int) -> FastTile | None:
    """Of an output of at most 64 columns; None where a tile of the promoted kernels is as fast.

    Three warpgroups take the rows of 25344 in one wave of an H200, where two with a weight that
    stays take up to 4 tiles at an SM and 2.9 in the mean: 24668 x 64 x 912 took 11.8 us, now 9.7.
    """
    if k < NARROW_FROM_K or n <= 16:
        return None
    width = next(width for width in (32, 48, 64) if n <= width)
    if m > ROWS * sms:
        pairs = 2 if askew > 1 else 1
        is_one_wave = width == 64 and m <= 3 * ROWS * sms
        return FastTile(width, warpgroups=3, pairs=pairs) if is_one_wave or pairs > 1 else None
    # One wave of tiles of 32 columns is as fast.
    is_tiny = -(-m // ROWS) * -(-n // 32) <= sms
    if width != 48 or is_tiny:
        return None
    return FastTile(48, warpgroups=1, pairs=2 if askew > 1 else 1)


def narrow_tile_for(m: int, n: int, k: int, kind: Kind, askew: int, sms: int) -> Tile | None:
    """A tile of 96 columns whose weight stays; None where one of 128 leaves about as few idle.

    And None of small outputs, with fewer pieces of 64 x 96 than nine tenths of the SMs.
    """
    columns = -(-n // NARROW)
    is_full = NARROW * columns <= 0.8 * (-(-n // 128) * 128)
    few = -(-m // ROWS) * columns < 0.9 * sms
    if n <= 64 or not is_full or few or (askew > 1 and n > 128):
        return None
    tile = Tile(NARROW, resident=True)
    if k <= 512:
        tile = Tile(NARROW, warpgroups=1, resident=True, blocks=2)
    return tile if fits(n, k, tile, kind) else None
