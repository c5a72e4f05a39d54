"""FP8 scaled GEMM on Hopper's tensor cores. See mainloop.cuh and scaled_gemm.cu.

    d[m, n] = f((sum_k a[m, k] * b[k, n]) * sa * sb + bias[n])

a: [m, k], FP8, row-major, or slices of it along k; b: [k, n], FP8, column-major; rows of both start
at multiples of 16 bytes; d: [m, n], bfloat16, float32 or e4m3 with one scale, any row stride;
scales as `Granularity.empty_scale` lays them out, of b transposed. f: `lokakern.types.Epilogue`.

``gemm_block`` takes a in bfloat16 and quantizes it on its way to the tensor cores, by 1x128: its
bytes are read once and no FP8 copy is written.

Long sums of few tiles are split among the SMs of a cluster, unless bits must not depend on m.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.errors import UnsupportedError
from lokakern.registry.register import PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import (
    ACCEPTED,
    EPILOGUES,
    PLAIN,
    Device,
    Epilogue,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
ROWS = 64  # of a warpgroup's tile
DEPTH = 128  # of a step along k, in bytes: one row of the copies' swizzle
SHARED_BYTES = 227 * 1024  # of an SM for all its blocks, each of which loses 1 KiB to the system
MOST_STAGES = 8
OTHER_REGISTERS = 36  # of a thread, beside sums
MOST_SLICES = 8
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
    quantizes: bool = False  # a is bfloat16

    @property
    def in_mainloop(self) -> int:
        """Scales that change along k: 1 those of 128x128 blocks of b, 2 of both operands."""
        return {"block": 1, "group": 2}.get(self.scales, 0)

    @property
    def loads_scales(self) -> bool:
        """Whether scales of a come with a."""
        return self.in_mainloop > 0 and not self.quantizes


_ACTIVATIONS = {"none": 0, "relu": 1, "hardswish": 2, "silu": 3}


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
    item = 2 if kind.quantizes else 1
    width = chunk_bytes(tile.columns, kind.out_bytes)
    direct = kind.direct or width == 0
    stage = tile.height * DEPTH * item + (0 if tile.resident else tile.block_n * DEPTH)
    small = scale_rows(tile, kind) * 4 if kind.loads_scales else 0
    small += -(-scale_columns(tile, kind) * 4 // 128) * 128 if kind.scales == "group" else 0
    ring = pipelines * (stage + small + 16)  # of one stage, with its two barriers
    chunks = 0 if direct else min(tile.chunks, -(-tile.columns * kind.out_bytes // width))
    fixed = tile.warpgroups * chunks * (-(-64 * width // 1024) * 1024) + 16
    fixed += tile.warpgroups * tile.block_n * 4 if kind.scales == "row" else 0
    fixed += steps * (tile.block_n * DEPTH + 8) if tile.resident else 0
    total = SHARED_BYTES // tile.blocks - (1024 if tile.blocks > 1 else 0)
    stages = min(MOST_STAGES, (total - fixed) // ring)
    if stages < 2 or fixed + stages * ring > total:
        raise ValueError(f"{tile} does not fit n={n} k={k}: {stages} stages")
    # Units of work are 64 rows by at most 128 columns; two may be in registers beside the sums. But
    # for scales of columns that change along k: they take too many.
    registers = tile.block_n // 2 + min(tile.block_n, 128) + OTHER_REGISTERS + 8 * direct
    double = steps > tile.parts and registers <= tile.registers
    double = double and kind.scales != "group" and not kind.quantizes
    band = 16 if n * k > 2**24 else 1  # reuse b, too, where it passes a third of the L2
    return {
        "N": n, "K": k, "BLOCK_N": tile.block_n, "WARPGROUPS": tile.warpgroups,
        "RESIDENT": int(tile.resident), "STAGES": stages, "PARTS": tile.parts,
        "DOUBLE": int(double), "BAND": band, "SCALES": kind.in_mainloop, "BATCH": kind.batch,
        "A_BFLOAT16": int(kind.quantizes), "A_TYPE": kind.a_type, "B_TYPE": kind.b_type,
        "A_SLICES": max(1, len(kind.a_steps)),
        "A_ENDS": ",".join(map(str, kind.a_steps or (steps,))),
        "TENSOR_SCALES": int(kind.scales == "tensor"), "ROW_SCALES": int(kind.scales == "row"),
        "OUT": kind.out_bytes, "BIAS": kind.bias_bytes, "BIAS_PAIRS": int(kind.bias_pairs),
        "ACTIVATION": _ACTIVATIONS[kind.activation], "CROSS": kind.cross,
        "ACCUMULATE": int(kind.accumulate), "CHUNK_BYTES": width or 16, "CHUNKS": max(chunks, 1),
        "DIRECT": int(direct), "SHARED_BYTES": -(-(fixed + stages * ring) // 16) * 16,
        "SM_BLOCKS": tile.blocks,
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

    Which tile is the fastest where was measured on an H200, exhaustively at 50 sizes: the rule is
    0.4 % slower than the best of them in geometric mean, 4 % at most.
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
            Tile(256, resident=True, chunks=4),
            Tile(min(128, narrow if n <= 64 else 128), resident=True),
        )
        if kind.batch == 1 and fits(n, k, tile, kind)
    ]
    twice, often, wide, usual = (
        next((tile for tile in resident if (tile.blocks, tile.block_n == 256) == what), None)
        for what in ((2, False), (4, False), (1, True), (1, False))
    )
    if k <= 256:  # bound by bytes: many blocks, each of which waits for something else
        if wide and square > 32 * sms and n >= 512:
            return wide
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


def quantizing_tile_for(m: int, n: int, k: int, kind: Kind, sms: int) -> Tile:
    """The tile where a is quantized on its way: wide, because every tile of a row does it again.

    Not measured yet.
    """
    rows = -(-m // 64)
    widest = next(width for width in (32, 64, 128, 256) if width >= min(n, 256))
    width = widest
    while width > 32 and rows * -(-n // width) < 0.9 * sms:
        width //= 2
    tiles = rows * -(-n // width)
    if tiles <= sms:
        return Tile(width, warpgroups=1)
    if tiles <= 2 * sms and width <= 128:
        return Tile(width, warpgroups=1, blocks=2)
    resident = Tile(widest, resident=True)
    return resident if fits(n, k, resident, kind) else Tile(widest)


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


# --- launches


class Plan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses."""

    launch: CudaLaunch
    tile: Tile
    grid: tuple[int, int, int]
    chunk: int  # columns of a box of the output
    swizzle_bytes: int
    maps: dict[tuple[int, ...], tuple[TensorMap, ...]]


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, kind: Kind) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_of(n, k, tile, kind)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()))
    pointers = 3 + (kind.bias_bytes > 0) + 2 * (kind.cross > 0) + (kind.out_bytes == 1)
    pointers += kind.batch == 0
    scalars = "iq" + "qq" * (kind.cross > 0) + "i" * (kind.batch != 1)
    scalars += "ii" * (kind.scales == "block")
    slices = max(1, len(kind.a_steps)) * (2 if kind.loads_scales else 1)
    maps = 1 + (not macros["DIRECT"]) + (kind.scales == "group") + slices
    return CudaLaunch(
        program, pointers=pointers, scalars=scalars, threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]), tensor_maps=maps, cluster=tile.parts,
        programmatic=True,
    )  # fmt: skip


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


def make_plan(m: int, n: int, k: int, kind: Kind, tile: Tile, products: int, sms: int) -> Plan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, kind)
    width = int(dict(launch.program.macros)["CHUNK_BYTES"])
    swizzle_bytes = width if width in (32, 64, 128) else 0
    # Rows of groups of any size are not known here: as if all were in one, and one tile more each.
    height = m + (products - 1) * tile.height if kind.batch == 0 else m
    grid = grid_of(tile, height, n, 1 if kind.batch == 0 else products, sms)
    return Plan(launch, tile, (grid, 1, 1), width // kind.out_bytes, swizzle_bytes, {})


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, products: int, may_split: bool, device: int) -> Plan:
    sms = jit.compute_units(device)
    if kind.quantizes:
        return make_plan(m, n, k, kind, quantizing_tile_for(m, n, k, kind, sms), 1, sms)
    tile = split_tile_for(m, n, k, products, sms) if may_split else None
    tile = tile or tile_for(m, n, k, kind, products, sms)
    return make_plan(m, n, k, kind, tile, products, sms)


_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_MOST_MAPS = 1024


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
    kind = _kind_of(scales, slices, b, out, bias, epilogue)
    products = epilogue.groups if epilogue.offsets is None else len(epilogue.offsets) - 1
    m = out.shape[0] // products if kind.batch > 1 else out.shape[0]
    n, k = out.shape[1], b.shape[0]
    may_split = epilogue.offsets is None and not epilogue.batch_invariant
    plan = _plan(m, n, k, kind, products, may_split, out.get_device())
    run(plan, kind, m, products, slices, slice_scales, b, b_scale, out, bias, epilogue)


def _kind_of(
    scales: str,
    slices: Sequence[Tensor],
    b: Tensor,
    out: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
) -> Kind:
    n, item = out.shape[1], out.element_size()
    # Bulk copies write whole pieces of 16 bytes.
    out_row = out.data_ptr() | out.stride(0) * item | n * item
    quantizes = slices[0].dtype is torch.bfloat16
    a_type = "e4m3" if quantizes else _TYPES[slices[0].dtype]
    b_type = _TYPES[b.dtype]
    if bias is None and epilogue is PLAIN and len(slices) == 1:
        return Kind(
            scales, item, direct=bool(out_row & 15), a_type=a_type, b_type=b_type,
            quantizes=quantizes,
        )  # fmt: skip
    steps: tuple[int, ...] = ()
    if len(slices) > 1:
        if len(slices) > MOST_SLICES:
            raise UnsupportedError(
                f"cuda.scaled_gemm: a comes in {len(slices)} slices; at most {MOST_SLICES} go into "
                "one launch: concatenate some"
            )
        widths = (-(-x.shape[1] // DEPTH) for x in slices)
        total = 0
        steps = tuple(total := total + width for width in widths)
    batch = 0 if epilogue.offsets is not None else min(epilogue.groups, 2)
    bias_item = 0 if bias is None else bias.element_size()
    cross = 0
    if epilogue.x0 is not None and epilogue.x is not None:
        x0, x = epilogue.x0, epilogue.x
        together = x0.data_ptr() | x.data_ptr() | (x0.stride(0) | x.stride(0) | n) * 2
        cross = 1 if together & 3 else 2
    return Kind(
        scales, item, bias_item, bias is not None and not (bias.data_ptr() & 3 or n & 1),
        epilogue.activation, cross, epilogue.accumulate, bool(out_row & 15), batch, a_type, b_type,
        steps, quantizes,
    )  # fmt: skip


def run(
    plan: Plan,
    kind: Kind,
    m: int,
    products: int,
    slices: Sequence[Tensor],
    slice_scales: Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Launch a plan."""
    key = (out.data_ptr(), b.data_ptr(), *[x.data_ptr() for x in slices],
           slices[0].stride(0), out.stride(0))  # fmt: skip
    if kind.in_mainloop:
        key = (*key, b_scale.data_ptr(), *[x.data_ptr() for x in slice_scales])
    maps = plan.maps.get(key)
    if maps is None:
        maps = _make_maps(plan, kind, m, products, slices, slice_scales, b, b_scale, out)
        if len(plan.maps) >= _MOST_MAPS:
            plan.maps.clear()
        plan.maps[key] = maps
    pointers: tuple[Tensor, ...] = (slice_scales[0], b_scale, out)
    scalars: tuple[int, ...] = (m, out.stride(0))
    if bias is not None:
        pointers += (bias,)
    if epilogue is not PLAIN:
        if epilogue.x0 is not None and epilogue.x is not None:
            pointers += (epilogue.x0, epilogue.x)
            scalars += (epilogue.x0.stride(0), epilogue.x.stride(0))
        if epilogue.out_scale is not None:
            pointers += (epilogue.out_scale,)
        if epilogue.offsets is not None:
            pointers += (epilogue.offsets,)
        if kind.batch != 1:
            scalars += (products,)
    if kind.scales == "block":
        scalars += (b_scale.stride(0), b_scale.stride(1))
    plan.launch(plan.grid, pointers, scalars, maps)


def _make_maps(
    plan: Plan,
    kind: Kind,
    m: int,
    products: int,
    slices: Sequence[Tensor],
    slice_scales: Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
) -> tuple[TensorMap, ...]:
    """Maps in the kernel's order: b, the output, b's scales, slices of a, their scales."""
    tile = plan.tile
    weight = b.t()
    made = [_map(weight, tile.block_n, DEPTH, 128, products if kind.batch != 1 else 0)]
    of_rows = products if kind.batch > 1 else 0
    if not kind.direct and chunk_bytes(tile.columns, kind.out_bytes):
        made.append(_map(out, 64, plan.chunk, plan.swizzle_bytes, of_rows))
    if kind.scales == "group":
        made.append(tensor_map(b_scale, (1, scale_columns(tile, kind)), 0))
    depth = DEPTH // 2 if kind.quantizes else DEPTH  # 128 bytes of a row
    made += [_map(x, tile.height, depth, 128, of_rows) for x in slices]
    if kind.loads_scales:
        box = (1, scale_rows(tile, kind))
        made += [tensor_map(scale.t(), box, 0) for scale in slice_scales]
    return tuple(made)


def _map(x: Tensor, height: int, width: int, swizzle_bytes: int, products: int) -> TensorMap:
    """The map of a matrix, or of as many as its rows are of."""
    if not products:
        return tensor_map(x, (height, width), swizzle_bytes)
    rows, columns = x.shape[0] // products, x.shape[1]
    stride = x.stride(0)
    whole = x.as_strided((products, rows, columns), (rows * stride, stride, 1))
    return tensor_map(whole, (1, height, width), swizzle_bytes)


# --- registration

SCALES = {
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
    "row": (Granularity.ROW, Granularity.ROW),
    "block": (Granularity.GROUP, Granularity.BLOCK),
    "group": (Granularity.GROUP, Granularity.GROUP),
}


def _supports(scales: str, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
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
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32, Format.E4M3FN):
        return Rejected(f"writes bfloat16, float32 or e4m3fn, not {problem.out_format.value}")
    if problem.batch > 1 and scales == "block" and problem.n % 128:
        return Rejected(f"groups share no block: n must be a multiple of 128; n={problem.n}")
    if not problem.k:
        return Rejected("k must be at least 1")
    if max(problem.m * problem.batch, problem.n * problem.batch, problem.k) >= 2**31:
        return Rejected(f"sizes must be less than 2^31; they are {problem.shape}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


for _scales, (_a, _b) in SCALES.items():
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}",
        architectures=frozenset({"sm_90"}),
        granularity=_a,
        b_granularity=_b,
        accumulation="promoted",
        supports=functools.partial(_supports, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
        batched=True,
        epilogues=EPILOGUES,
        accumulates=True,
        k_slices=True,
        batch_invariant=True,
    )(functools.partial(_launch, _scales))


def multiply_bfloat16(
    a: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, bias: Tensor | None
) -> None:
    """``a @ b + bias`` of a bfloat16 a, and b with 128x128 scales, transposed views of a weight."""
    _launch("block", a, b_scale, b, b_scale, out, bias, ())


def supports_bfloat16(problem: Problem, device: Device) -> Support:
    """Whether `multiply_bfloat16` takes a problem, but for how b is prepared."""
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16, not {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("a must be row-major, its rows 16-byte aligned")
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    if max(problem.m, problem.n, problem.k) >= 2**31 or not problem.k:
        return Rejected(f"sizes must be less than 2^31, k at least 1; they are {problem.shape}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


def _supports_prepared(problem: Problem, device: Device) -> Support:
    b = problem.b
    assert b is not None  # an op with two operands
    if not problem.prepared or (b.format, b.granularity) != (Format.E4M3FN, Granularity.BLOCK):
        return Rejected("needs a weight prepared as e4m3fn/128x128")
    if b.alignment < 16:
        return Rejected("rows of the weight must start at multiples of 16 bytes")
    return supports_bfloat16(problem, device)


@register(
    "gemm",
    architectures=frozenset({"sm_90"}),
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=_supports_prepared,
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
)
def gemm_block(
    a: Tensor, b: QuantizedTensor, out: Tensor, bias: Tensor | None, workspace: tuple[Tensor, ...]
) -> None:
    """One kernel from bfloat16 to bfloat16."""
    data, scale = b.transpose
    assert scale is not None  # `supports` asked for a prepared weight
    multiply_bfloat16(a, data, scale, out, bias)
