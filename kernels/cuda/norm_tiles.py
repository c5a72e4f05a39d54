"""Tiles of GEMMs with a norm: how an output is cut up, what fits an SM, and which is the fastest.

The macros of gemm_norm.cu are made here; those of mainloop.cuh by tiles.py.
"""

from __future__ import annotations

from typing import NamedTuple

from lokakern.kernels.cuda import tiles
from lokakern.kernels.cuda.tiles import Tile

LAST = {"none": 0, "relu": 1, "hardswish": 2, "silu": 3, "gate": 4, "cross": 5}
NORMS = {"none": 0, "layer": 1, "rms": 2, "block_rms": 2}
REGISTERS = 36  # of a thread, beside sums
MOST_CLUSTER = 8  # blocks: what every GPU that has clusters can place
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

    @property
    def out_bytes(self) -> int:
        return 2 if self.out == "none" else 1

    @property
    def item(self) -> int:
        """Bytes of an element of a and b."""
        return 2 if self.scales == "none" else 1

    def span(self, n: int) -> int:
        """Columns that share statistics."""
        return self.block or n


def cluster_of(n: int, tile: Tile, kind: NormKind) -> int:
    """Blocks that must tell each other something of a row."""
    whole = kind.norm in ("layer", "rms") or kind.out == "row"
    return -(-(n if whole else kind.span(n)) // tile.block_n)


def fits(n: int, k: int, tile: Tile, kind: NormKind) -> bool:
    """Whether a tile can do it and a block's shared memory holds it."""
    span, width = kind.span(n), tile.block_n
    cluster, tiles_n = cluster_of(n, tile, kind), -(-n // width)
    if cluster > MOST_CLUSTER or tiles_n % cluster:
        return False
    if kind.norm == "block_rms" and span < n and (n % width or (width % span and span % width)):
        return False
    if kind.norm == "block_rms" and kind.out == "row" and 1 < -(-span // width) != cluster:
        return False
    if kind.out == "group" and width % 128:
        return False
    if kind.scales == "block" and 128 % min(width, 128):
        return False
    # Beside sums there are those of a step of FP8, before they are promoted.
    promotes = kind.scales == "block" or (kind.item == 1 and k > tiles.DEPTH)
    beside = REGISTERS + 8 * (kind.residual > 0 or kind.last in ("gate", "cross"))
    if width // 2 + (min(width, 128) // 2 if promotes else 0) + beside > tile.registers:
        return False
    try:
        macros_of(n, k, tile, kind)
    except ValueError:
        return False
    return True


def macros_of(n: int, k: int, tile: Tile, kind: NormKind) -> dict[str, int | str]:
    """All macros, with as many stages as shared memory holds.

    Raises:
        ValueError: It does not hold two.
    """
    k_bytes = k * kind.item
    base_kind = tiles.Kind({"none": "tensor"}.get(kind.scales, kind.scales), kind.out_bytes,
                           a_type=kind.a_type, b_type=kind.b_type)  # fmt: skip
    macros = tiles.macros_of(n, k_bytes, tile, base_kind)
    cluster = cluster_of(n, tile, kind)
    width = 128 if kind.out == "group" else tiles.chunk_bytes(tile.block_n, kind.out_bytes)
    if not width:
        raise ValueError(f"no bulk copy writes {tile.block_n} columns of {kind.out_bytes} bytes")
    chunks = min(tile.chunks, tile.block_n * kind.out_bytes // width)
    depth, steps = tiles.depth_of(k_bytes), -(-k_bytes // tiles.DEPTH)
    rounds = int(kind.norm != "none" and kind.span(n) > tile.block_n)
    rounds += int(cluster > 1 and kind.out == "row")
    fixed = tile.warpgroups * chunks * (-(-64 * width // 1024) * 1024)
    fixed += 2 * tile.block_n * 8 + tile.warpgroups * rounds * 2 * (64 * cluster + 1) * 8
    fixed += steps * (tile.block_n * depth + 8) if tile.resident else 0
    fixed += 3 * 16  # what lies at multiples of 16 bytes
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
        "STAGES": stages, "BAND": 1, "BF16": int(kind.scales == "none"),
        "OPERAND_SCALES": {"tensor": 1, "row": 2}.get(kind.scales, 0),
        "NORM": NORMS[kind.norm], "SPAN": kind.span(n), "CLUSTER": cluster,
        "VECTORS": kind.vectors, "VECTOR_ITEM": kind.vector_item, "RESIDUAL": kind.residual,
        "LAST": LAST[kind.last], "OUT": kind.out_bytes,
        "OUT_SCALES": {"tensor": 1, "row": 2, "group": 3}.get(kind.out, 0),
        "CHUNK_BYTES": width, "CHUNKS": chunks,
        "SHARED_BYTES": -(-(fixed + tile.pipelines * stages * stage) // 16) * 16,
    }  # fmt: skip


def lanes_of(n: int, tile: Tile, kind: NormKind, sms: int) -> int:
    """Rows of blocks that stay on the SMs at a time; a row of blocks covers all columns once."""
    tiles_n, cluster = -(-n // tile.block_n), cluster_of(n, tile, kind)
    if cluster == 1:
        blocks = sms * tile.blocks
    else:
        partitions = PARTITIONS if sum(PARTITIONS) == sms else (sms,)
        blocks = sum(size * tile.blocks // cluster for size in partitions) * cluster
    return max(1, blocks // tiles_n)


def grid_of(tile: Tile, m: int, n: int, kind: NormKind, sms: int) -> int:
    """Blocks of a launch: as many as stay on the SMs, or as there are tiles."""
    height = tiles.ROWS * tile.warpgroups
    return -(-n // tile.block_n) * min(lanes_of(n, tile, kind, sms), -(-m // height))


def tile_for(m: int, n: int, k: int, kind: NormKind, sms: int) -> Tile | None:
    """The rule that chooses tiles; None where none does it.

    Which tile was the fastest where was measured on an H200 at the 27 anchors, layer norm to
    bfloat16 and block norm to FP8, among all that fit: DESIGN.md says how far the rule is behind.
    """

    def count(width: int) -> int:
        return -(-m // tiles.ROWS) * -(-n // width)

    cluster = cluster_of(n, Tile(128), kind)
    wide = -(-n // 256) * 256 - n <= n // 4  # few columns of the last tile are in vain
    order: list[Tile] = []
    if n <= 64:
        order += [Tile(width, warpgroups=1, resident=True, blocks=each)
                  for width in tiles.WIDTHS if n <= width <= 64 for each in (4, 2)]  # fmt: skip
    if n <= 128:
        blocks = (4, 2, 1) if count(128) >= 2 * sms else (1,)
        order += [Tile(128, warpgroups=1, resident=True, blocks=each) for each in blocks]
    # What is not promoted leaves registers: one warpgroup, and more stages, where k is long.
    if (
        kind.item == 2
        and wide
        and k >= 512
        and count(256) >= 0.9 * sms
        and (n <= 512 or count(256) < 2 * sms)
    ):
        order.append(Tile(256, warpgroups=1))
    if count(256) >= 1.9 * sms and wide and not (cluster == 8 and m <= 16384 and k > 256):
        chunks = (4, 2) if n <= 256 or (m > 16384 and n <= 1024) else (2, 4)
        order += [Tile(256, resident=True, chunks=each) for each in chunks]
        order += [Tile(256, chunks=each) for each in chunks]
    if count(128) >= 1.9 * sms and not (cluster == 8 and m <= 4096):
        if k * kind.item <= 256:
            order.append(Tile(128, warpgroups=1, resident=True, blocks=2))
        order += [Tile(128), Tile(128, resident=True)]
    if count(64) >= 1.9 * sms and k * kind.item <= 512 and kind.norm != "block_rms":
        order += [Tile(64, warpgroups=1, resident=True, blocks=3)]
    if count(128) >= 0.9 * sms or k * kind.item > 512:
        order.append(Tile(128, warpgroups=1))
    order += [Tile(64, warpgroups=1, resident=True, blocks=3), Tile(64, warpgroups=1, blocks=2),
              Tile(128, warpgroups=1), Tile(128), Tile(256), Tile(96, warpgroups=1),
              Tile(64, warpgroups=1), Tile(32, warpgroups=1), Tile(16, warpgroups=1),
              Tile(8, warpgroups=1)]  # fmt: skip
    return next((tile for tile in order if fits(n, k, tile, kind)), None)
