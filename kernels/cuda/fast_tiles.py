"""Tiles of any width of the FP8 GEMM, their macros, and which is the fastest.

Beside `lokakern.kernels.cuda.tiles`. See scaled_gemm_fast.py, scaled_gemm_paired.py and
fast_mainloop.cuh.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from lokakern.kernels.cuda.tiles import (
    CLUSTERS,
    DEPTH,
    MOST_STAGES,
    OTHER_REGISTERS,
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
THIRD_REGISTERS = 152  # of a thread of three warpgroups or more that multiply
NARROW = 96  # columns of a weight that stays, of which n may leave less idle than of 128


@dataclass(frozen=True, slots=True)
class FastTile(Tile):
    """A `Tile` with the macros of fast_mainloop.cuh."""

    above: int = 1
    along: int = 1
    in_turn: bool = False

    @property
    def pairs(self) -> int:
        """Blocks whose tiles share operands."""
        return self.above * self.along

    @property
    def copied(self) -> Copied:
        """What a block of a pair copies: half of the operand that both read."""
        return Copied(
            self.block_n // self.above, rows=self.height // self.along, written=self.columns
        )

    def groups(self, m: int, n: int) -> int:
        """Pairs of tiles, or tiles, of an output."""
        return -(-m // (self.height * self.above)) * -(-n // (self.block_n * self.along))

    @property
    def may_share(self) -> bool:
        """Whether clusters of its blocks may share sums."""
        if self.pairs > 2 or self.pairs * self.parts > 8 or self.block_n % (8 * self.parts):
            return False
        return self.warpgroups < 3 and not self.in_turn

    def resident_groups(self, sms: int) -> int:
        """Of these, or of clusters that share them, that a GPU holds at a time."""
        blocks = self.pairs * self.parts
        if blocks == 1:
            return sms * self.blocks
        return max(1, min(CLUSTERS[blocks], sms // blocks))


@dataclass(frozen=True, slots=True)
class Copied(Tile):
    """The rows of both operands that a block copies, and the columns that it writes."""

    rows: int = 0
    written: int = 0

    @property
    def height(self) -> int:
        return self.rows

    @property
    def columns(self) -> int:
        return self.written


class Rates(NamedTuple):
    """What tiles of one shape take on an H200, in us."""

    sums: float  # 10^5 of them, each of one step along k
    promoted: float  # the same, with promoted sums
    once: float
    tile: float  # beside its steps
    outputs: float  # 10^4 of them
    idle: float  # part of the last wave that is saved where it has no tiles


# Tiles by warpgroups and whether they take turns. Fitted, with the constants below, to 5030 times
# of 300 sizes of more than 64 columns in bfloat16: 5 % off in the median. At sizes that were held
# out, the tile with the least cost is 2.7 % slower than the best of those that were timed in
# geometric mean, 1.7 % with promoted sums, and up to 22 % at a size.
RATES = {
    (1, False): Rates(2.00, 2.37, 1.70, 0.03, 0.91, 0.46),
    (2, False): Rates(2.15, 2.26, 2.25, 0.00, 0.48, 0.31),
    (3, False): Rates(2.21, 2.64, 2.28, 0.00, 0.49, 0.27),
    (2, True): Rates(2.22, math.inf, 2.47, 0.76, 0.00, 0.44),
}
WIDTHS = {
    (1, False): tuple(range(64, 225, 16)),
    (2, False): (*range(64, 225, 16), 256),
    (3, False): tuple(range(64, 193, 16)),
    (2, True): (112, 128, 144),
}
# Beyond 128 columns promoted sums come in halves of a tile, each of which has a product in
# whole_products.cuh or more_products.cuh; three warpgroups have registers for 112.
PROMOTED_WIDTHS = {
    (1, False): (64, 80, 96, 112, 128, 160, 192),
    (2, False): (64, 80, 96, 112, 128, 160, 192),
    (3, False): (64, 80, 96, 112),
}
LEAST_STEP_US = 0.137
ROW_US = 0.37e-3, 0.97e-3  # of 128 bytes from the L2: alone, and what others add that copy, too
ASKEW = 1.0, 1.29, 2.06  # times as long, by where rows start
HALVES = 1.08  # times as long, of more than 128 columns
CLUSTER_US = {1: 0.0, 2: 0.09, 4: 0.37, 8: 1.09}  # by blocks
SHARED_STEP_US = 0.017  # of blocks that wait for each other
SHARED_SUM_US = 1.65  # of 128 columns
# Bulk copies write whole lines of 128 bytes where a tile has a multiple of 64 columns in bfloat16.
BROKEN_LINES, BROKEN_OUTPUT = 1.40, 1.69  # times as long, of a tile and of what memory takes
OUTPUT_US = 0.54e-6  # of an element, at the rate of memory
# Outputs of each SM, from which the GPU's power is the limit, of which two warpgroups in turn need
# the least and three the most.
LARGE, POWER = 3 * 128 * 128, 1.05
MOST_WAVES = 4.0  # of three warpgroups
FEW_STEPS_K = 2560  # of small outputs: below, what counts is how soon the first bytes are there
# Of outputs of at most 64 columns, whose weight stays below; the second of pairs.
NARROW_FROM_K, NARROW_PAIRS_FROM_K = 768, 640


class Stays(NamedTuple):
    """What tiles take whose weight stays in shared memory, in us; see `Rates`."""

    sums: float
    tile: float
    outputs: float
    once: float
    idle: float


# By columns, fitted to 163 sizes: 5 % off in the median.
STAYS = {
    64: Stays(1.45, 0.00, 0.67, 1.88, 0.52),
    128: Stays(2.63, 0.19, 0.15, 2.04, 0.09),
    256: Stays(1.46, 0.33, 0.39, 2.49, 0.00),
}
STAYS[96] = STAYS[64]
STREAMED_ROW_US, STREAMED_ASKEW = 1.3e-3, (1.0, 1.25, 3.0)  # as ROW_US and ASKEW, of a alone
WEIGHT_US = 0.008  # of 1024 bytes of b
STAYING_OUTPUT_US = 0.2e-6
# Where all rows start at lines, tiles that stay are slower by the formula than they are, where sums
# are short.
SHORT_K, STAYING_SHARE = 640, 0.93


def macros_for(
    n: int, k: int, tile: Tile, kind: Kind, promotes: bool = False
) -> dict[str, int | str]:
    """All macros.

    Raises:
        ValueError: Shared memory does not hold the tile, or its steps are too few for its parts, or
            columns of a part are no bulk copy's.
    """
    macros = macros_of(n, k, tile, kind)
    macros["PROMOTE"] = int(promotes)
    if not isinstance(tile, FastTile):
        return macros | {"ABOVE": 1, "ALONG": 1, "IN_TURN": 0}
    if promotes:
        macros["DOUBLE"] = int(is_double(k, tile, bool(macros["DIRECT"])))
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
    return macros | {
        "ABOVE": tile.above, "ALONG": tile.along, "IN_TURN": int(tile.in_turn)
    }  # fmt: skip


def is_double(k: int, tile: FastTile, direct: bool) -> bool:
    """Whether a warpgroup multiplies a step while it adds the one before."""
    unit = tile.block_n if tile.block_n <= 128 else tile.block_n // 2
    registers = tile.block_n // 2 + unit + OTHER_REGISTERS + 8 * direct
    most = tile.registers if tile.warpgroups < 3 else THIRD_REGISTERS
    return -(-k // DEPTH) > tile.parts and registers <= most


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


def tile_of(
    m: int,
    n: int,
    k: int,
    kind: Kind,
    askew: int,
    may_split: bool,
    sms: int,
    promotes: bool = False,
) -> Tile:
    """The tile of an output of these sizes.

    Args:
        m: Rows.
        n: Columns.
        k: Length of the sums.
        kind: What is computed.
        askew: See `askew`.
        may_split: Whether blocks may share a sum.
        sms: SMs of the GPU.
        promotes: Whether sums are promoted.
    """
    usual = tile_for(m, n, k, kind, 1, sms)
    if n <= 64:
        split = split_tile_for(m, n, k, 1, sms) if may_split else None
        return split or narrow_output_tile_for(m, n, k, askew, sms) or usual
    is_small = -(-m // ROWS) * -(-n // ROWS) <= sms  # one wave of the smallest tiles
    if is_small and k < FEW_STEPS_K and (askew < 2 or usual.block_n <= 32):
        return usual
    best = min(
        tiles_of(kind.out_bytes, askew, may_split, promotes),
        key=lambda tile: cost_us(m, n, k, tile, askew, sms, promotes),
    )
    # With promoted sums, products of 96 columns would take turns (ptxas warns of it: C7514).
    narrow = None if promotes else narrow_tile_for(m, n, k, kind, sms)
    stays = narrow or usual
    # Narrow tiles read a again for each 64 columns, which rows askew within sectors make slow.
    if not stays.resident or (stays.warpgroups == 1 and askew > 1):
        return best
    best_us = cost_us(m, n, k, best, askew, sms, promotes)
    us = staying_us(m, n, k, stays, askew, sms)
    if askew == 0 and k <= SHORT_K:
        us *= STAYING_SHARE
    return stays if us <= best_us else best


@functools.cache
def tiles_of(out_bytes: int, askew: int, may_split: bool, promotes: bool) -> tuple[FastTile, ...]:
    """All tiles of an output of more than 64 columns that may be the fastest.

    Where all rows start at lines, blocks gain less by shared copies than their barriers cost; where
    some start within sectors, they always gain.
    Where the compiler does not unroll the loops over what is staged, sums lie in local memory: of
    float32 with two chunks, or from 192 columns on, and of FP8 with 192 or three warpgroups.
    """
    pairs = (((1, 1),), ((1, 1), (2, 1), (1, 2)), ((2, 1), (1, 2), (2, 2)))[askew]
    found = []
    for (warpgroups, in_turn), widths in (PROMOTED_WIDTHS if promotes else WIDTHS).items():
        for width, (above, along) in itertools.product(widths, pairs):
            if (out_bytes == 4 and width >= 192) or (
                out_bytes == 1 and (width == 192 or warpgroups == 3)
            ):
                continue
            small = width < (128 if warpgroups == 1 else 96)
            if (above * along > 2 - (askew == 1) and small) or above * along > 2 * warpgroups:
                continue
            chunks = 1 if out_bytes == 4 or warpgroups == 3 else 2
            for parts in (1, 2, 4, 8) if may_split else (1,):
                tile = FastTile(width, warpgroups, False, parts, chunks, 1, above, along, in_turn)
                if parts == 1 or (tile.may_share and chunk_bytes(width // parts, out_bytes)):
                    found.append(tile)
    return tuple(found)


def cost_us(
    m: int, n: int, k: int, tile: FastTile, askew: int, sms: int, promotes: bool = False
) -> float:
    """About what a product takes with a tile; infinity where it has no such tiles."""
    cluster, groups = tile.pairs * tile.parts, tile.groups(m, n)
    waves = groups / tile.resident_groups(sms)
    if tile.block_n >= n + 16:
        return math.inf
    if tile.parts > 1 and (waves > 1 or tile.parts * DEPTH > k):
        return math.inf
    if waves <= 1 and tile.in_turn:  # one of two warpgroups would have nothing to do
        return math.inf
    if waves > MOST_WAVES and tile.warpgroups > 2 and askew < 2:
        return math.inf
    rates, sums = RATES[tile.warpgroups, tile.in_turn], tile.height * tile.block_n
    products = (rates.promoted if promotes else rates.sums) * sums * 1e-5
    if tile.block_n > 128:
        products *= HALVES
    row_us = ROW_US[0] + ROW_US[1] * min(1.0, groups * cluster / sms)
    copies = row_us * (tile.height / tile.along + tile.block_n / tile.above) * ASKEW[askew]
    # About the longest of the three.
    step = math.pow(products**6 + copies**6 + LEAST_STEP_US**6, 1 / 6)
    if tile.pairs > 1:
        step += SHARED_STEP_US
    is_broken = tile.block_n % 64 > 0
    of_tile = rates.tile + rates.outputs * sums * 1e-4 * (BROKEN_LINES if is_broken else 1.0)
    all_waves = math.ceil(waves)
    counted = all_waves - rates.idle * (all_waves - waves) if waves > 1 else all_waves
    inside = counted * (-(-k // (DEPTH * tile.parts)) * step + of_tile)
    if tile.parts > 1:
        inside += SHARED_SUM_US * tile.block_n / 128
    memory = m * n * OUTPUT_US * (BROKEN_OUTPUT if is_broken else 1.0)
    inside = math.pow(inside**4 + memory**4, 1 / 4)
    if m * n > LARGE * sms and not tile.in_turn and not promotes:
        inside *= POWER
    return rates.once + CLUSTER_US[cluster] + inside


def staying_us(m: int, n: int, k: int, tile: Tile, askew: int, sms: int) -> float:
    """About what a product takes whose weight stays in shared memory."""
    rates, rows = STAYS[tile.block_n], ROWS * tile.warpgroups * tile.blocks
    lanes = max(1, sms * tile.blocks // -(-n // tile.block_n))
    waves = -(-m // ROWS) / tile.warpgroups / lanes
    all_waves = math.ceil(waves)
    counted = all_waves - rates.idle * (all_waves - waves) if waves > 1 else 1
    products = rates.sums * rows * tile.block_n * 1e-5
    copies = STREAMED_ROW_US * rows * STREAMED_ASKEW[askew]
    step = math.pow(products**6 + copies**6, 1 / 6)
    of_tile = rates.tile + rates.outputs * rows * tile.block_n * 1e-4
    inside = counted * (-(-k // DEPTH) * step + of_tile)
    memory = m * n * STAYING_OUTPUT_US
    weight = WEIGHT_US * tile.block_n * tile.blocks * k / 1024
    return rates.once + weight + math.pow(inside**4 + memory**4, 1 / 4)


def narrow_output_tile_for(m: int, n: int, k: int, askew: int, sms: int) -> FastTile | None:
    """Of an output of at most 64 columns; None where a tile of the promoted kernels is as fast.

    Three warpgroups take the rows of 25344 in one wave of an H200, where two with a weight that
    stays take up to 4 tiles at an SM and 2.9 in the mean: 24668 x 64 x 912 took 11.8 us, now 9.7.
    Rows askew within sectors are copied by pairs: 8960 x 48 x 688 took 6.4 us, now 5.1.
    """
    width = next(width for width in (16, 32, 48, 64) if n <= width)
    tiles = -(-m // ROWS)
    is_one_wave = width == 64 and tiles <= 3 * sms
    if askew > 1:
        if tiles <= sms and (k < NARROW_PAIRS_FROM_K or 2 * tiles < sms):
            return None
        if 2 * tiles <= 3 * sms:
            return FastTile(width, warpgroups=1, above=2)
        return FastTile(width, warpgroups=3 if is_one_wave else 2, above=2)
    if k < NARROW_FROM_K or n <= 16:
        return None
    if tiles > sms:
        return FastTile(width, warpgroups=3) if is_one_wave else None
    # One wave of tiles of 32 columns is as fast.
    is_tiny = tiles * -(-n // 32) <= sms
    return None if width != 48 or is_tiny else FastTile(48, warpgroups=1)


def narrow_tile_for(m: int, n: int, k: int, kind: Kind, sms: int) -> Tile | None:
    """A tile of 96 columns whose weight stays; None where one of 128 leaves about as few idle.

    And None of small outputs, with fewer pieces of 64 x 96 than nine tenths of the SMs.
    """
    columns = -(-n // NARROW)
    is_full = NARROW * columns <= 0.8 * (-(-n // 128) * 128)
    few = -(-m // ROWS) * columns < 0.9 * sms
    if not is_full or few:
        return None
    tile = Tile(NARROW, resident=True)
    if k <= 512:
        tile = Tile(NARROW, warpgroups=1, resident=True, blocks=2)
    return tile if fits(n, k, tile, kind) else None
