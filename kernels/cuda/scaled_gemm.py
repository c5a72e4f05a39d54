"""FP8 scaled GEMM on Hopper's tensor cores. See mainloop.cuh and scaled_gemm.cu.

    d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

a: [m, k], FP8, row-major; b: [k, n], FP8, column-major; rows of both 16-byte aligned; d: [m, n],
bfloat16 or float32, any row stride; scales as `Granularity.empty_scale` lays them out, of b
transposed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch, tensor_map

SOURCE = str(Path(__file__).with_suffix(".cu"))
DEPTH = 128  # of a step along k, in bytes: one row of the copies' swizzle
SHARED_BYTES = 227 * 1024  # of an SM for all its blocks, each of which loses 1 KiB to the system
MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """How an output is cut up; the macros of mainloop.cuh explain each."""

    block_n: int
    rows: int = 64
    warpgroups: int = 2
    resident: bool = False
    cluster: int = 1
    split_k: bool = False
    double: bool = False
    skew: int = 0
    chunks: int = 2
    blocks: int = 1
    stages: int = 0  # as many as fit

    @property
    def tile_rows(self) -> int:
        return self.rows if self.resident else self.rows * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def columns(self) -> int:
        """Of a tile that one block writes."""
        return self.block_n // self.cluster if self.split_k else self.block_n


def chunk_bytes(columns: int, item: int) -> int:
    """Bytes of a row that one bulk copy writes; 0 where none can."""
    width = columns * item
    for size in (128, 64, 32, 16):
        if width % size == 0 and (width >= 128 or width == size):
            return size
    return width if width < 128 and width % 16 == 0 else 0


class Kind(NamedTuple):
    """What is computed, but for sizes."""

    scales: str  # "tensor", "row", "group" (1x128 by 128x128), "groups" (both 1x128)
    out_bytes: int
    bias_bytes: int = 0
    bias_pairs: bool = True
    activation: int = 0
    cross: bool = False
    accumulate: bool = False
    direct: bool = False
    batch: int = 1
    a_type: str = "e4m3"
    b_type: str = "e4m3"


def macros_of(n: int, k: int, tile: Tile, kind: Kind, band: int = 1) -> dict[str, Any]:
    """All macros, with as many stages as shared memory holds.

    Raises:
        ValueError: It does not hold two.
    """
    steps = -(-k // DEPTH)
    pipelines = tile.warpgroups if tile.resident else 1
    in_mainloop = {"group": 1, "groups": 2}.get(kind.scales, 0)
    width = chunk_bytes(tile.columns, kind.out_bytes)
    direct = kind.direct or width == 0
    stage = tile.tile_rows * DEPTH + (0 if tile.resident else tile.block_n * DEPTH)
    small = tile.tile_rows * 4 if in_mainloop else 0
    small += -(-tile.block_n * 4 // 128) * 128 if in_mainloop == 2 else 0
    total = SHARED_BYTES // tile.blocks - (1024 if tile.blocks > 1 else 0)
    fixed = steps * tile.block_n * DEPTH if tile.resident else 0
    chunks = min(tile.chunks, -(-tile.columns * kind.out_bytes // width)) if not direct else 0
    fixed += 0 if direct else tile.warpgroups * chunks * (-(-64 * width // 1024) * 1024)
    fixed += tile.warpgroups * tile.block_n * 4 if kind.scales == "row" else 0
    fixed += steps * 8 + 16 if tile.resident else 16
    stages = min(MOST_STAGES, (total - fixed) // (pipelines * (stage + small + 16)))
    stages = min(stages, tile.stages or stages)
    if tile.split_k:
        sums = tile.warpgroups * tile.rows * tile.block_n * 4
        stages = max(stages, -(-sums // stage))
    used = fixed + stages * pipelines * (stage + small + 16)
    if stages < 2 or used > total:
        raise ValueError(f"{tile} does not fit {n}x{k}: {used} bytes, {stages} stages")
    return {
        "N": n, "K": k, "BLOCK_N": tile.block_n, "ROWS": tile.rows, "WARPGROUPS": tile.warpgroups,
        "RESIDENT": int(tile.resident), "STAGES": stages, "CLUSTER": tile.cluster,
        "SPLIT_K": int(tile.split_k), "DOUBLE": int(tile.double), "SKEW": tile.skew, "BAND": band, "SCALES": in_mainloop, "BATCH": kind.batch,
        "A_TYPE": kind.a_type, "B_TYPE": kind.b_type,
        "TENSOR_SCALES": int(kind.scales == "tensor"), "ROW_SCALES": int(kind.scales == "row"),
        "OUT": kind.out_bytes, "BIAS": kind.bias_bytes, "BIAS_PAIRS": int(kind.bias_pairs),
        "ACTIVATION": kind.activation, "CROSS": int(kind.cross),
        "ACCUMULATE": int(kind.accumulate), "CHUNK_BYTES": width or 16, "CHUNKS": max(chunks, 1),
        "DIRECT": int(direct), "SHARED_BYTES": -(-used // 16) * 16, "BLOCKS": tile.blocks,
    }  # fmt: skip


class Bound(NamedTuple):
    """A launch with what its grid and maps are made of."""

    launch: CudaLaunch
    tile: Tile
    tiles_n: int
    chunk: tuple[int, int]  # box of an output
    swizzle_bytes: int


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, kind: Kind, band: int = 1) -> Bound:
    """The launch of one signature."""
    macros = macros_of(n, k, tile, kind, band)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()))
    pointers = 3 + (kind.bias_bytes > 0) + 2 * kind.cross + (kind.out_bytes == 1)
    pointers += kind.batch == 0
    scalars = "iq" + "qq" * kind.cross + "i" * (kind.batch == 0) + "ii" * (kind.scales == "group")
    maps = 2 + (not macros["DIRECT"]) + (macros["SCALES"] > 0) + (macros["SCALES"] == 2)
    launch = CudaLaunch(
        program, pointers=pointers, scalars=scalars, threads=tile.threads,
        shared_bytes=macros["SHARED_BYTES"], tensor_maps=maps, cluster=tile.cluster,
        programmatic=True,
    )  # fmt: skip
    width = macros["CHUNK_BYTES"]
    return Bound(
        launch, tile, -(-n // tile.block_n), (64, width // kind.out_bytes),
        width if width in (32, 64, 128) else 0,
    )  # fmt: skip


def grid_of(bound: Bound, m: int, sms: int) -> int:
    """Blocks of a launch: as many as stay on the SMs, or as there are tiles."""
    tile, tiles_n = bound.tile, bound.tiles_n
    tiles_m = -(-m // tile.tile_rows)
    if tile.resident:
        lanes = max(1, sms * tile.blocks // tiles_n)
        return tiles_n * min(lanes, -(-tiles_m // tile.warpgroups))
    if tile.split_k:
        return tiles_m * tiles_n * tile.cluster
    pairs = -(-tiles_m // tile.cluster) * tiles_n
    return min(pairs, sms * tile.blocks // tile.cluster) * tile.cluster
