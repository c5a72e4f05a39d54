"""FP8 scaled GEMM on Hopper's tensor cores. See mainloop.cuh and scaled_gemm.cu.

    d[m, n] = f((sum_k a[m, k] * b[k, n]) * sa * sb + bias[n])

a: [m, k], FP8, row-major, or slices of it along k; b: [k, n], FP8, column-major; rows of both start
at multiples of 16 bytes; d: [m, n], bfloat16, float32 or e4m3 with one scale, any row stride;
scales as `Granularity.empty_scale` lays them out, of b transposed. f: `lokakern.types.Epilogue`.

Long sums of few tiles are split among the SMs of a cluster, unless bits must not depend on m.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.errors import UnsupportedError
from lokakern.kernels.cuda.tiles import (
    DEPTH,
    FOLD,
    Kind,
    Tile,
    chunk_bytes,
    depth_of,
    grid_of,
    macros_of,
    scale_columns,
    scale_rows,
    split_tile_for,
    tile_for,
)
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
    Rejected,
    Support,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
MOST_SLICES = 8  # of a, in one launch


class Plan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses."""

    launch: CudaLaunch
    tile: Tile
    grid: tuple[int, int, int]
    chunk: int  # columns of a box of the output
    swizzle_bytes: int
    fold: int  # rows of the output that bulk copies take for one
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
    slices = max(1, len(kind.a_steps)) * (2 if kind.in_mainloop else 1)
    maps = 1 + (not macros["DIRECT"]) + (kind.scales == "group") + slices
    return CudaLaunch(
        program, pointers=pointers, scalars=scalars, threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]), tensor_maps=maps, cluster=tile.parts,
        programmatic=True,
    )  # fmt: skip


def make_plan(m: int, n: int, k: int, kind: Kind, tile: Tile, products: int, sms: int) -> Plan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, kind)
    macros = dict(launch.program.macros)
    width, fold = int(macros["CHUNK_BYTES"]), int(macros["FOLD"])
    swizzle_bytes = width if width in (32, 64, 128) and fold == 1 else 0
    # Rows of groups of any size are not known here: as if all were in one, and one tile more each.
    height = m + (products - 1) * tile.height if kind.batch == 0 else m
    grid = grid_of(tile, height, n, 1 if kind.batch == 0 else products, sms)
    chunk = width // kind.out_bytes * fold
    return Plan(launch, tile, (grid, 1, 1), chunk, swizzle_bytes, fold, {})


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, products: int, may_split: bool, device: int) -> Plan:
    sms = jit.compute_units(device)
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
    folds = n * item < 64 and out.stride(0) == n and out.shape[0] % FOLD == 0
    a_type, b_type = _TYPES[slices[0].dtype], _TYPES[b.dtype]
    if bias is None and epilogue is PLAIN and len(slices) == 1:
        return Kind(
            scales, item, direct=bool(out_row & 15), a_type=a_type, b_type=b_type, folds=folds
        )
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
        steps, folds and batch == 1,
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
    weight, depth = b.t(), depth_of(b.shape[0])
    made = [_map(weight, tile.block_n, depth, depth, products if kind.batch != 1 else 0)]
    of_rows = products if kind.batch > 1 else 0
    if not kind.direct and chunk_bytes(tile.columns, kind.out_bytes):
        lines = out.view(-1, out.shape[1] * plan.fold) if plan.fold > 1 else out
        made.append(_map(lines, 64 // plan.fold, plan.chunk, plan.swizzle_bytes, of_rows))
    if kind.scales == "group":
        made.append(tensor_map(b_scale, (1, scale_columns(tile, kind)), 0))
    made += [_map(x, tile.height, depth, depth, of_rows) for x in slices]
    if kind.in_mainloop:
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
