"""Tiles of the FP8 GEMM: how an output is cut up, what fits an SM, and which is the fastest.

The macros of mainloop.cuh and scaled_gemm.cu are made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ROWS = 64  # of a warpgroup's tile
DEPTH = 128  # of a step along k, in bytes
SHARED_BYTES = 227 * 1024  # of an SM for all its blocks, each of which loses 1 KiB to the system
MOST_STAGES = 8
# A bulk copy takes as long over a short row as over a long one. It takes so many rows for one, of
# those that lie side by side and are shorter than 64 bytes; longer ones are better permuted against
# conflicts of banks. 327680 x 24 x 720 took 66.7 us on an H200 without, 64.6 with it.
FOLD = 8
OTHER_REGISTERS = 36  # of a thread, beside sums
WIDTHS = (8, 16, 24, 32, 64, 96, 128, 256)  # of tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """How an output is cut up; the macros of mainloop.cuh explain each."""

    block_n: int
    warpgroups: int = 2
    resident: bool = False
    parts: int = 1
    chunks: int = 2
    blocks: int = 1

    @property
    def pipelines(self) -> int:
        return self.warpgroups if self.resident else 1

    @property
    def height(self) -> int:
        return ROWS * self.warpgroups // self.pipelines

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return 232 if self.warpgroups > 1 else min(255, 65536 // (self.threads * self.blocks))

    @property
    def columns(self) -> int:
        """Of a tile, that one block writes."""
        return self.block_n // self.parts

    def count(self, m: int, n: int) -> int:
        """Tiles of an output."""
        return -(-m // self.height) * -(-n // self.block_n)


class Kind(NamedTuple):
    """What is computed, but for sizes."""

    scales: str  # "tensor", "row", "block" (1x128 by 128x128), "group" (both 1x128)
    out_bytes: int = 2
    bias_bytes: int = 0
    bias_pairs: bool = True
    activation: str = "none"
    cross: int = 0
    accumulate: bool = False
    direct: bool = False
    batch: int = 1  # 1: one product; 2: several of as many rows; 0: of any rows
    a_type: str = "e4m3"
    b_type: str = "e4m3"
    a_steps: tuple[int, ...] = ()  # where slices of a end
    folds: bool = False  # rows of the output are short and lie side by side, see FOLD

    @property
    def in_mainloop(self) -> int:
        """Scales that change along k: 1 those of 128x128 blocks of b, 2 of both operands."""
        return {"block": 1, "group": 2}.get(self.scales, 0)


_ACTIVATIONS = {"none": 0, "relu": 1, "hardswish": 2, "silu": 3}


def depth_of(k: int) -> int:
    """Bytes of a row in a step: also the span of the copies' swizzle."""
    return DEPTH if k > DEPTH // 2 else DEPTH // 2


def chunk_bytes(columns: int, item: int) -> int:
    """Bytes of a row that one bulk copy writes; 0 where none can."""
    width = columns * item
    for size in (128, 64, 32, 16):
        if width % size == 0 and (width >= 128 or width == size):
            return size
    return width if width < 128 and width % 16 == 0 else 0


def scale_rows(tile: Tile, kind: Kind) -> int:
    """Rows of a's scales that a stage holds: in a batch, a tile's start anywhere in 16 bytes."""
    return tile.height + (0 if kind.batch == 1 else 32)


def scale_columns(tile: Tile, kind: Kind) -> int:
    """Columns of b's 1x128 scales that a stage holds."""
    return tile.block_n + (0 if kind.batch == 1 else 32)


def macros_of(n: int, k: int, tile: Tile, kind: Kind) -> dict[str, int | str]:
    """All macros, with as many stages as shared memory holds.

    Raises:
        ValueError: It does not hold two.
    """
    steps = -(-k // DEPTH)
    pipelines = tile.pipelines
    width = chunk_bytes(tile.columns, kind.out_bytes)
    direct = kind.direct or width == 0
    depth = depth_of(k)
    stage = tile.height * depth + (0 if tile.resident else tile.block_n * depth)
    small = scale_rows(tile, kind) * 4 if kind.in_mainloop else 0
    small += -(-scale_columns(tile, kind) * 4 // 128) * 128 if kind.scales == "group" else 0
    ring = pipelines * (stage + small + 16)  # of one stage, with its two barriers
    chunks = 0 if direct else min(tile.chunks, -(-tile.columns * kind.out_bytes // width))
    fixed = tile.warpgroups * chunks * (-(-64 * width // 1024) * 1024) + 16
    fixed += tile.warpgroups * tile.block_n * 4 if kind.scales == "row" else 0
    fixed += steps * (tile.block_n * depth + 8) if tile.resident else 0
    total = SHARED_BYTES // tile.blocks - (1024 if tile.blocks > 1 else 0)
    stages = min(MOST_STAGES, (total - fixed) // ring)
    if stages < 2 or fixed + stages * ring > total:
        raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
    # Units of work are 64 rows by at most 128 columns; two may be in registers beside the sums. But
    # for scales of columns that change along k: they take too many.
    registers = tile.block_n // 2 + min(tile.block_n, 128) + OTHER_REGISTERS + 8 * direct
    double = steps > tile.parts and registers <= tile.registers
    double = double and kind.scales != "group"
    folds = kind.folds and tile.block_n == n and tile.parts == 1 and not direct
    band = 16 if n * k > 2**24 else 1  # reuse b, too, where it passes a third of the L2
    return {
        "N": n, "K": k, "BLOCK_N": tile.block_n, "WARPGROUPS": tile.warpgroups,
        "RESIDENT": int(tile.resident), "STAGES": stages, "PARTS": tile.parts,
        "DOUBLE": int(double), "BAND": band, "SCALES": kind.in_mainloop, "BATCH": kind.batch,
        "A_TYPE": kind.a_type, "B_TYPE": kind.b_type, "A_SLICES": max(1, len(kind.a_steps)),
        "A_ENDS": ",".join(map(str, kind.a_steps or (steps,))),
        "TENSOR_SCALES": int(kind.scales == "tensor"), "ROW_SCALES": int(kind.scales == "row"),
        "OUT": kind.out_bytes, "BIAS": kind.bias_bytes, "BIAS_PAIRS": int(kind.bias_pairs),
        "ACTIVATION": _ACTIVATIONS[kind.activation], "CROSS": kind.cross,
        "ACCUMULATE": int(kind.accumulate), "CHUNK_BYTES": width or 16, "CHUNKS": max(chunks, 1),
        "DIRECT": int(direct), "FOLD": FOLD if folds else 1,
        "SHARED_BYTES": -(-(fixed + stages * ring) // 16) * 16, "SM_BLOCKS": tile.blocks,
    }  # fmt: skip


# --- which tile


def fits(n: int, k: int, tile: Tile, kind: Kind) -> bool:
    """Whether a block's shared memory holds a tile."""
    if kind.scales == "block" and 128 % min(tile.block_n, 128):
        return False  # scales of b are those of 128 columns
    try:
        macros_of(n, k, tile, kind)
    except ValueError:
        return False
    return True


def tile_for(m: int, n: int, k: int, kind: Kind, products: int, sms: int) -> Tile:
    """The rule that chooses tiles.

    Which tile is the fastest where was measured on an H200, exhaustively at 50 sizes, before there
    were 8 blocks an SM: the rule was 0.4 % slower than the best in geometric mean, 4 % at most.
    """
    square = -(-m // 64) * -(-n // 64) * products  # tiles of 64x64
    narrow = next(width for width in (*WIDTHS, n) if width >= min(n, 64))
    if kind.scales == "block" and 128 % narrow:
        narrow = 32 if narrow < 32 else 64
    # One wave of small tiles: what counts is how soon the first bytes are there.
    if -(-m // 64) * -(-n // 32) * products <= sms:
        return Tile(min(narrow, 32), warpgroups=1)
    if square <= sms:
        return Tile(narrow, warpgroups=1)
    resident = [
        tile
        for tile in (
            Tile(narrow, warpgroups=1, resident=True, blocks=2),
            Tile(narrow, warpgroups=1, resident=True, blocks=4),
            Tile(narrow, warpgroups=1, resident=True, blocks=8),
            Tile(256, resident=True, chunks=4),
            Tile(min(128, narrow if n <= 64 else 128), resident=True),
        )
        if kind.batch == 1 and fits(n, k, tile, kind)
    ]
    twice, often, most, wide, usual = (
        next((tile for tile in resident if (tile.blocks, tile.block_n == 256) == what), None)
        for what in ((2, False), (4, False), (8, False), (1, True), (1, False))
    )
    if k <= 256:  # bound by bytes: many blocks, each of which waits for something else
        if wide and square > 32 * sms and n >= 512:
            return wide
        if most and square > 32 * sms and n <= 24 and k <= 128:
            return most
        if often and (square > 5 * sms or n <= 64):
            return often
    if twice and n > 64 and (square <= 2 * sms or k <= 256):
        return twice
    if square <= 2 * sms and n > 64 and k <= 8192:
        return Tile(64, warpgroups=1, blocks=2)
    if usual:
        # Halves of the usual tile where they fill the last wave that much better.
        waves = -(-m // 64) * -(-n // 128) / (2 * sms)
        half_waves = square / (2 * sms)
        if twice and n > 64 and 0.55 * math.ceil(half_waves) < math.ceil(waves):
            return twice
        return usual
    return Tile(narrow if n <= 64 else 128)


# Clusters of so many blocks that an H200 holds at a time: its SMs come in groups of 16 and 18.
CLUSTERS = {8: 14, 4: 30, 2: 66}
SPLIT_FROM_K = 8192  # below, what clusters cost is more than what they gain


def split_tile_for(m: int, n: int, k: int, products: int, sms: int) -> Tile | None:
    """The tile whose k most SMs share; None where it is not worth it."""
    if k < SPLIT_FROM_K or n <= 32 or -(-m // 64) * -(-n // 64) * products > 2 * sms:
        return None
    best, most_blocks = None, 0
    for width in (128, 64):
        tiles = Tile(width).count(m, n) * products
        parts = next((parts for parts, most in CLUSTERS.items() if tiles <= most), 0)
        if parts * tiles > most_blocks:
            best, most_blocks = Tile(width, parts=parts), parts * tiles
    return best


def grid_of(tile: Tile, m: int, n: int, products: int, sms: int) -> int:
    """Blocks of a launch: as many as stay on the SMs, or as there are tiles."""
    tiles_n = -(-n // tile.block_n)
    if tile.resident:
        lanes = max(1, sms * tile.blocks // tiles_n)
        return tiles_n * min(lanes, -(-m // (tile.height * tile.warpgroups)))
    tiles = tile.count(m, n) * products
    if tile.parts > 1:
        return tiles * tile.parts
    return min(-(-tiles // tile.pipelines), sms * tile.blocks)
