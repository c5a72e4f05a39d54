"""Tiles of GEMMs with a norm: how an output is cut up, what fits an SM, and which is the fastest.

The macros of gemm_norm.cu are made here; those of mainloop.cuh by tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lokakern.kernels.cuda import tiles

LAST = {"none": 0, "relu": 1, "hardswish": 2, "silu": 3, "gate": 4, "cross": 5}
NORMS = {"none": 0, "layer": 1, "rms": 2, "block_rms": 2}
REGISTERS = 36  # of a thread, beside sums
MOST_CLUSTER = 8  # blocks: what every GPU that has clusters can place
MOST_THROUGH_MEMORY = 16  # of whose values a thread has registers for
# SMs of an H200 that a cluster cannot leave.
PARTITIONS = (18, 18, 18, 18, 16, 16, 14, 14)


class NormKind(NamedTuple):
    """What is computed, but for sizes."""

    scales: str  # of operands: "tensor", "row", "block" (1x128 by 128x128), "none" (bfloat16)
    norm: str = "none"
    block: int = 0  # columns of a block of block_rms
    vectors: int = 0  # bits: 1 bias, 2 weight, 4 shift
    vector_item: int = 4
    residual: int = 0  # 1: before the norm, 2: at the end
    last: str = "none"
    out: str = "none"  # "none" (bfloat16), or scales of e4m3: "tensor" (given), "row", "group"
    a_type: str = "e4m3"
    b_type: str = "e4m3"
    fast: bool = False  # sums of FP8 are not promoted

    @property
    def out_bytes(self) -> int:
        return 2 if self.out == "none" else 1

    @property
    def item(self) -> int:
        """Bytes of an element of a and b."""
        return 2 if self.scales == "none" else 1

    @property
    def operands_beside(self) -> int:
        """Matrices that go into an output beside sums."""
        return (self.residual > 0) + {"gate": 1, "cross": 2}.get(self.last, 0)

    def span(self, n: int) -> int:
        """Columns that share statistics."""
        return self.block or n

    def promotes(self, k: int) -> bool:
        """Whether the sums of a step are added up beside those of the others."""
        return self.scales == "block" or (self.item == 1 and not self.fast and k > tiles.DEPTH)


@dataclass(frozen=True, slots=True)
class Tile(tiles.Tile):
    """How an output is cut up; `memory`: blocks that share rows tell each other through memory.

    Such blocks may be on any SM, where those of a cluster must find room beside each other: on an
    H200 that leaves 112 of 132 SMs to clusters of 8.
    """

    memory: bool = False

    @property
    def registers(self) -> int:
        """Of a thread that multiplies: of two warpgroups 232, of which a third gives them some.

        Of one, what each quarter of an SM has for its share of the warps, 16384 in all.
        """
        warps = -(-self.threads * self.blocks // 128)
        return 232 if self.warpgroups > 1 else min(255, 16384 // (warps * 32) // 8 * 8)


def cluster_of(n: int, tile: Tile, kind: NormKind) -> int:
    """Blocks that must tell each other something of a row."""
    whole = kind.norm in ("layer", "rms") or kind.out == "row"
    return -(-(n if whole else kind.span(n)) // tile.block_n)


def fits(n: int, k: int, tile: Tile, kind: NormKind) -> bool:
    """Whether a tile can do it and a block's shared memory holds it."""
    span, width = kind.span(n), tile.block_n
    cluster, tiles_n = cluster_of(n, tile, kind), -(-n // width)
    most = MOST_THROUGH_MEMORY if tile.memory else MOST_CLUSTER
    if cluster > most or tiles_n % cluster:
        return False
    if kind.norm == "block_rms" and span < n and (n % width or (width % span and span % width)):
        return False
    if kind.norm == "block_rms" and kind.out == "row" and 1 < -(-span // width) != cluster:
        return False
    if kind.out == "group" and width % 128:
        return False
    if kind.scales == "block" and 128 % min(width, 128):
        return False
    # Beside sums there are, one after the other, those of a step, what others tell, and operands.
    step_sums = min(width, 128) // 2 if kind.promotes(k) else 0
    told = 4 * cluster if rounds_of(n, tile, kind) else 0
    scales = (kind.scales == "row") + (kind.out == "row" and cluster > 1)
    beside = REGISTERS + 8 * scales + max(step_sums, told, 8 * kind.operands_beside)
    if width // 2 + beside > tile.registers:
        return False
    try:
        macros_of(n, k, tile, kind)
    except ValueError:
        return False
    return True


def permutes(n: int, tile: Tile, kind: NormKind) -> bool:
    """Whether rows of b are permuted, 32 at a time, so that a thread has 8 neighbors of a row."""
    return not (n % 32 or tile.block_n % 32 or kind.span(n) % 32)


def rounds_of(n: int, tile: Tile, kind: NormKind) -> int:
    """How often the blocks that share rows tell each other something of a tile."""
    amax = cluster_of(n, tile, kind) > 1 and kind.out == "row"
    return (kind.norm != "none" and kind.span(n) > tile.block_n) + amax


def macros_of(n: int, k: int, tile: Tile, kind: NormKind) -> dict[str, int | str]:
    """All macros, with as many stages as shared memory holds.

    Raises:
        ValueError: It does not hold two.
    """
    k_bytes = k * kind.item
    base_kind = tiles.Kind("block" if kind.scales == "block" else "tensor", kind.out_bytes,
                           a_type=kind.a_type, b_type=kind.b_type)  # fmt: skip
    permuted = permutes(n, tile, kind)
    macros = tiles.macros_of(n, k_bytes, replace(tile, chunks=0) if permuted else tile, base_kind)
    cluster = cluster_of(n, tile, kind)
    width = 128 if kind.out == "group" else tiles.chunk_bytes(tile.block_n, kind.out_bytes)
    if not width:
        raise ValueError(f"no bulk copy writes {tile.block_n} columns of {kind.out_bytes} bytes")
    chunks = 1 if permuted else min(tile.chunks, tile.block_n * kind.out_bytes // width)
    depth, steps = tiles.depth_of(k_bytes), -(-k_bytes // tiles.DEPTH)
    rounds = 0 if tile.memory else rounds_of(n, tile, kind)
    fixed = 0 if permuted else tile.warpgroups * chunks * (-(-64 * width // 1024) * 1024)
    fixed += 2 * tile.block_n * 8 + tile.warpgroups * rounds * 2 * (64 * cluster + 1) * 8
    fixed += steps * (tile.block_n * depth + 8) if tile.resident else 0
    fixed += 2 * 128  # what lies at multiples of 16 and 128 bytes
    if kind.scales in ("tensor", "none") and kind.vectors & 1 and not kind.promotes(k):
        fixed += 256 + 16 * tile.block_n  # a bias that is part of the product
    stage = tile.height * depth + (0 if tile.resident else tile.block_n * depth) + 16
    stage += tiles.scale_rows(tile, base_kind) * 4 if base_kind.in_mainloop else 0
    total = tiles.SHARED_BYTES // tile.blocks - (1024 if tile.blocks > 1 else 0)
    stages = min(tiles.MOST_STAGES, (total - fixed) // (tile.pipelines * stage))
    if stages < 2:
        raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
    kept = ("N", "K", "BLOCK_N", "WARPGROUPS", "RESIDENT", "PARTS", "DOUBLE", "SCALES", "BATCH",
            "A_TYPE", "B_TYPE", "A_SLICES", "A_ENDS", "SM_BLOCKS")  # fmt: skip
    return {
        **{name: macros[name] for name in kept},
        "STAGES": stages, "BAND": 1, "BF16": int(kind.scales == "none"), "FAST": int(kind.fast),
        "OPERAND_SCALES": {"tensor": 1, "row": 2}.get(kind.scales, 0),
        "NORM": NORMS[kind.norm], "SPAN": kind.span(n), "CLUSTER": cluster,
        "VECTORS": kind.vectors, "VECTOR_ITEM": kind.vector_item, "RESIDUAL": kind.residual,
        "LAST": LAST[kind.last], "OUT": kind.out_bytes,
        "OUT_SCALES": {"tensor": 1, "row": 2, "group": 3}.get(kind.out, 0),
        "THROUGH_MEMORY": int(tile.memory), "CHUNK_BYTES": width, "CHUNKS": chunks,
        "PERMUTED": int(permuted),
        "SHARED_BYTES": -(-(fixed + tile.pipelines * stages * stage) // 16) * 16,
    }  # fmt: skip


def lanes_of(n: int, tile: Tile, kind: NormKind, sms: int) -> int:
    """Rows of blocks that stay on the SMs at a time; a row of blocks covers all columns once."""
    tiles_n, cluster = -(-n // tile.block_n), cluster_of(n, tile, kind)
    if cluster == 1 or tile.memory:
        blocks = sms * tile.blocks
    else:
        partitions = PARTITIONS if sum(PARTITIONS) == sms else (sms,)
        blocks = sum(size * tile.blocks // cluster for size in partitions) * cluster
    return max(1, blocks // tiles_n)


def told_bytes(tile: Tile, m: int, n: int, kind: NormKind, sms: int) -> int:
    """Of what blocks tell each other through memory; 0 where they do not."""
    rounds = rounds_of(n, tile, kind) if tile.memory else 0
    values = 2 * tiles.ROWS * 16  # of a block, in turn by two slots
    blocks = grid_of(tile, m, n, kind, sms)
    return 128 + blocks * tile.warpgroups * rounds * values if rounds else 0


def grid_of(tile: Tile, m: int, n: int, kind: NormKind, sms: int) -> int:
    """Blocks of a launch: as many as stay on the SMs, or as there are tiles."""
    height = tiles.ROWS * tile.warpgroups
    return -(-n // tile.block_n) * min(lanes_of(n, tile, kind, sms), -(-m // height))


def tile_for(m: int, n: int, k: int, kind: NormKind, sms: int) -> Tile | None:
    """The rule that chooses tiles; None where none does it.

    Which tile was the fastest where was measured on an H200 at the 27 anchors, of layer norm to
    bfloat16 and of block norm to FP8, of FP8 operands (promoted or not) and of bfloat16, among all
    that fit.
    """
    order = [*_narrow(m, n, k, kind, sms), *_wide(m, n, k, kind, sms), *_usual(m, n, k, kind, sms)]
    for tile in order:
        # Blocks that tell each other through memory must all be on SMs at once.
        there = not tile.memory or grid_of(tile, m, n, kind, sms) <= sms * tile.blocks
        if there and fits(n, k, tile, kind):
            return tile
    return None


def _count(m: int, n: int, width: int) -> int:
    return -(-m // tiles.ROWS) * -(-n // width)


def _narrow(m: int, n: int, k: int, kind: NormKind, sms: int) -> Iterator[Tile]:
    """Rows that one block has: several blocks an SM, of which some wait while others work."""
    if n <= 64:
        for width in (width for width in tiles.WIDTHS if n <= width <= 64):
            for blocks in (4, 2):
                yield Tile(width, warpgroups=1, resident=True, blocks=blocks)
    elif n <= 128:
        if n == 128 and 2 * _count(m, n, 128) <= sms:
            yield Tile(64, warpgroups=1, resident=True)
        many = _count(m, n, 128) >= 2 * sms
        if many and not kind.promotes(k):
            yield Tile(128, resident=True)
        for blocks in (2, 1) if many else (1,):
            yield Tile(128, warpgroups=1, resident=True, blocks=blocks)


def _wide(m: int, n: int, k: int, kind: NormKind, sms: int) -> Iterator[Tile]:
    """256 columns, where few of them are in vain and most SMs get some."""
    count, k_bytes, whole = _count(m, n, 256), k * kind.item, not kind.promotes(k)
    few = count < 1.9 * sms
    if -(-n // 256) * 256 - n > n // 4 or count < 0.9 * sms or (few and not whole and k >= 512):
        return
    shared = cluster_of(n, Tile(256), kind) > 2  # clusters of so many leave SMs idle
    if few and k_bytes >= 1024 and 512 <= n <= 1024:  # one warpgroup, and more stages
        yield Tile(256, warpgroups=1, memory=shared)
    stays = k_bytes <= 512
    if few:
        if stays and n > 256:
            for blocks in (2, 1):  # where two fit, the next launch begins beside this one
                yield Tile(256, warpgroups=1, resident=True, blocks=blocks, memory=shared)
        if shared:
            yield Tile(256, warpgroups=1, memory=True)
    else:
        for resident in (True, False) if stays else (False,):
            yield Tile(256, resident=resident, memory=shared)


def _usual(m: int, n: int, k: int, kind: NormKind, sms: int) -> Iterator[Tile]:
    """128 columns, or fewer where that makes more tiles, or nothing else fits."""
    count = _count(m, n, 128)
    stays = k * kind.item <= 512
    shared = cluster_of(n, Tile(128), kind) > 2
    if count >= 1.9 * sms:
        for resident in (True, False) if stays else (False,):
            yield Tile(128, resident=resident, memory=shared)
    if count >= 0.45 * sms or not stays:
        if stays and not kind.promotes(k):
            yield Tile(128, warpgroups=1, resident=True, blocks=2, memory=shared)
        yield Tile(128, warpgroups=1, memory=shared)
    yield Tile(64, warpgroups=1, resident=True, blocks=3)
    for memory in (False, True):
        yield Tile(64, warpgroups=1, blocks=2, memory=memory)
        yield Tile(128, warpgroups=1, memory=memory)
        yield Tile(128, memory=memory)
        yield Tile(256, memory=memory)
        yield Tile(256, warpgroups=1, memory=memory)
        for width in (96, 64, 32, 16, 8):
            yield Tile(width, warpgroups=1, memory=memory)
