"""GEMM, norm and what follows in one pass, on Hopper's tensor cores. See gemm_norm.cu.

    d = last(norm((a @ b) * sa * sb + bias [+ residual]) * weight + shift) [+ residual]

a: [m, k], FP8 or bfloat16, row-major; b: [k, n], of the same item size, column-major; rows of both
start at multiples of 16 bytes; d: [m, n], bfloat16 with rows that start at multiples of 16 bytes,
or e4m3 with one scale that is given, or scales of rows or of 128 of their columns.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc, scratch
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.kernels.cuda import tiles
from lokakern.kernels.cuda.norm_quantize import OUT_SCALES, residual_of, vectors_of
from lokakern.kernels.cuda.norm_tiles import (
    NormKind,
    Tile,
    grid_of,
    macros_of,
    permutes,
    tile_for,
    told_bytes,
)
from lokakern.kernels.cuda.tiles import depth_of, scale_rows
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    FAST_LARGEST_K,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
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
OUT_NAMES = {Granularity.TENSOR: "tensor", Granularity.ROW: "row", Granularity.GROUP: "group"}
_TYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.bfloat16: "e4m3"}
_MOST_MAPS = 1024
STORED_ROWS = 16  # of a bulk copy of the output: a warp's, which waits for no other


class Plan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses."""

    launch: CudaLaunch
    tile: Tile
    grid: tuple[int, int, int]
    chunk: int  # columns of a box of the output
    swizzle_bytes: int
    maps: dict[tuple[int, ...], tuple[TensorMap, ...]]
    told_bytes: int  # of memory through which blocks tell each other of rows they share


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, kind: NormKind) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_of(n, k, tile, kind)
    program = nvrtc.Program(SOURCE, "gemm_norm", tuple(macros.items()))
    by_block = kind.scales == "block"
    return CudaLaunch(
        program, pointers=11, scalars="ifqqqqq" + "ii" * by_block, threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]), tensor_maps=3 + by_block,
        cluster=1 if tile.memory else int(macros["CLUSTER"]),
        # Blocks that wait for others in memory must all be on SMs: the driver sees to it.
        cooperative=tile.memory, programmatic=True,
    )  # fmt: skip


def make_plan(m: int, n: int, k: int, kind: NormKind, tile: Tile, sms: int) -> Plan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, kind)
    width = int(dict(launch.program.macros)["CHUNK_BYTES"])
    grid = (grid_of(tile, m, n, kind, sms), 1, 1)
    swizzle_bytes = width if width in (32, 64, 128) else 0
    told = told_bytes(tile, m, n, kind, sms)
    return Plan(launch, tile, grid, width // kind.out_bytes, swizzle_bytes, {}, told)


@jit.cached
def _plan(m: int, n: int, k: int, kind: NormKind, device: int) -> Plan:
    sms = jit.compute_units(device)
    tile = tile_for(m, n, k, kind, sms)
    assert tile is not None  # `supports` has asked
    return make_plan(m, n, k, kind, tile, sms)


Operand = Tensor | QuantizedTensor


def _planned(
    scales: str, fast: bool, a: Operand, b: Operand, out: Operand, epilogue: NormEpilogue
) -> tuple[Plan, NormKind]:
    left = a.data if isinstance(a, QuantizedTensor) else a
    weight = b.data if isinstance(b, QuantizedTensor) else b
    n = len(weight) if isinstance(b, QuantizedTensor) else weight.shape[1]
    made = OUT_NAMES[out.granularity] if isinstance(out, QuantizedTensor) else "none"
    form = epilogue.form
    kind = NormKind(
        scales, form.norm.kind, form.norm.block, *vectors_of(epilogue), residual_of(epilogue),
        form.last, made, _TYPES[left.dtype], _TYPES[weight.dtype], fast,
    )  # fmt: skip
    m, k = left.shape
    return _plan(m, n, k, kind, left.get_device()), kind


def _workspace(
    scales: str, fast: bool, a: Operand, b: Operand, out: Operand, epilogue: NormEpilogue
) -> tuple[Tensor, ...]:
    """Memory through which blocks tell each other of rows they share."""
    size = _planned(scales, fast, a, b, out, epilogue)[0].told_bytes
    return (scratch.zeros(size, a.device),) if size else ()


def _launch(
    scales: str,
    fast: bool,
    a: Operand,
    b: Operand,
    out: Operand,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    plan, kind = _planned(scales, fast, a, b, out, epilogue)
    left, a_scale = (a.data, a.scale) if isinstance(a, QuantizedTensor) else (a, None)
    weight, b_scale = (b.data, b.scale) if isinstance(b, QuantizedTensor) else (b.t(), None)
    data, out_scale = (out.data, out.scale) if isinstance(out, QuantizedTensor) else (out, None)
    told = workspace[0] if workspace else None
    run(plan, kind, left, a_scale, weight, b_scale, data, out_scale, epilogue, told)


def run(
    plan: Plan,
    kind: NormKind,
    left: Tensor,
    a_scale: Tensor | None,
    weight: Tensor,
    b_scale: Tensor | None,
    data: Tensor,
    out_scale: Tensor | None,
    epilogue: NormEpilogue,
    told: Tensor | None,
) -> None:
    """Launch a plan."""
    key: tuple[int, ...] = (
        data.data_ptr(), left.data_ptr(), weight.data_ptr(), left.stride(0), weight.stride(0),
        data.stride(0),
    )  # fmt: skip
    if kind.scales == "block":
        assert a_scale is not None  # FP8 has scales
        key = (*key, a_scale.data_ptr(), a_scale.stride(1))
    maps = plan.maps.get(key)
    if maps is None:
        maps = _make_maps(plan, kind, left, a_scale, weight, data)
        if len(plan.maps) >= _MOST_MAPS:
            plan.maps.clear()
        plan.maps[key] = maps
    first = epilogue.x0 if epilogue.gate is None else epilogue.gate
    others = (epilogue.residual, first, epilogue.x)
    pointers = (a_scale, b_scale, epilogue.bias, epilogue.norm_weight, epilogue.norm_bias,
                out_scale, *others, told, data)  # fmt: skip
    scale_stride = out_scale.stride(1) if out_scale is not None and kind.out == "group" else 0
    scalars = (left.shape[0], epilogue.norm.eps, data.stride(0) * kind.out_bytes, scale_stride,
               *[0 if x is None else x.stride(0) for x in others])  # fmt: skip
    if kind.scales == "block":
        assert b_scale is not None  # FP8 has scales; [n / 128, k / 128] here
        scalars += (b_scale.stride(1), b_scale.stride(0))
    plan.launch(plan.grid, tuple(left if x is None else x for x in pointers), scalars, maps)


def map_of_b(weight: Tensor, tile: Tile, kind: NormKind, depth: int) -> TensorMap:
    """Of b's rows, in bytes; where they are permuted, 32 are 4 x 4 x 2, and change places."""
    if not permutes(len(weight), tile, kind):
        return tensor_map(weight, (tile.block_n, depth), depth)
    row = weight.stride(0)
    size, strides = (len(weight) // 32, 4, 4, 2), (32 * row, 2 * row, 8 * row, row)
    rows = weight.as_strided((*size, weight.shape[1]), (*strides, 1))
    return tensor_map(rows, (tile.block_n // 32, 4, 4, 2, depth), depth)


def _make_maps(
    plan: Plan, kind: NormKind, left: Tensor, a_scale: Tensor | None, weight: Tensor, data: Tensor
) -> tuple[TensorMap, ...]:
    """Maps in the kernel's order: b, the output, a, its scales. Operands are maps of bytes."""
    tile = plan.tile
    depth = depth_of(left.shape[1] * kind.item)
    made = [
        map_of_b(weight.view(torch.uint8), tile, kind, depth),
        tensor_map(data, (STORED_ROWS, plan.chunk), plan.swizzle_bytes),
        tensor_map(left.view(torch.uint8), (tile.height, depth), depth),
    ]
    if kind.scales == "block":
        assert a_scale is not None  # FP8 has scales
        rows = scale_rows(tile, tiles.Kind("block"))
        made.append(tensor_map(a_scale.t(), (1, rows), 0))
    return tuple(made)


# --- registration

SCALES = {
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
    "row": (Granularity.ROW, Granularity.ROW),
    "block": (Granularity.GROUP, Granularity.BLOCK),
    "none": (Granularity.NONE, Granularity.NONE),
}


def _supports(scales: str, fast: bool, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    if fast and not tiles.DEPTH < problem.k <= FAST_LARGEST_K:
        return Rejected(f"sums without promotion of k from {tiles.DEPTH + 1} to {FAST_LARGEST_K}; "
                        f"k={problem.k}")  # fmt: skip
    have = (problem.a.granularity, problem.b.granularity)
    if have != SCALES[scales]:
        wanted = " x ".join(granularity.value for granularity in SCALES[scales])
        return Rejected(f"takes {wanted} scales, not {have[0].value} x {have[1].value}")
    formats = (Format.BFLOAT16,) if scales == "none" else (Format.E4M3FN, Format.E5M2)
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format not in formats:
            return Rejected(f"takes {formats[0].value}; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format not in (Format.BFLOAT16, Format.E4M3FN):
        return Rejected(f"writes bfloat16 or e4m3fn, not {problem.out_format.value}")
    if not problem.out_format.is_fp8 and problem.n % 8:
        return Rejected(f"rows of the output must start at multiples of 16 bytes; n={problem.n}")
    if problem.out_format.is_fp8 and problem.out_granularity not in OUT_SCALES:
        return Rejected(f"makes no {problem.out_granularity.value} scales")
    if not problem.k or max(problem.m, problem.n, problem.k) >= 2**30:
        return Rejected(f"sizes must be from 1 to 2^30; they are {problem.shape}")
    form = norm_form(problem.epilogue)
    span = form.norm.block
    if span and span != problem.n and span % 8:
        return Rejected(f"blocks must be multiples of 8 columns, or the row; not {span}")
    if problem.n % 2 and (form.residual or form.residual_last or form.last in ("gate", "cross")):
        return Rejected(f"reads two columns of a residual, gate or cross at once; n={problem.n}")
    out = OUT_NAMES.get(problem.out_granularity, "none")
    kind = NormKind(
        scales, form.norm.kind, form.norm.block, 7, 4, form.residual + 2 * form.residual_last,
        form.last, out, fast=fast,
    )  # fmt: skip
    sms = device.compute_units or 1
    tile = tile_for(problem.m, problem.n, problem.k, kind, sms)
    if tile is None:
        return Rejected(
            f"no tile holds what shares statistics on {sms} SMs; n={problem.n} {form.norm}"
        )
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


for _scales, (_a, _b) in SCALES.items():
    for _fast in (False, True) if _scales in ("tensor", "row") else (False,):
        _bound = FAST_KERNEL_ERR_BOUND if _fast else PROMOTED_KERNEL_ERR_BOUND
        _unquantized = _scales == "none"
        register(
            "gemm_norm",
            name="gemm_norm_" + ("bf16" if _unquantized else _scales) + ("_fast" if _fast else ""),
            architectures=frozenset({"sm_90"}),
            granularity=_a,
            b_granularity=_b,
            accumulation="float32" if _unquantized else "fast" if _fast else "promoted",
            supports=functools.partial(_supports, _scales, _fast),
            workspace=functools.partial(_workspace, _scales, _fast),
            kernel_err_bound=1.0 if _unquantized else _bound,
        )(functools.partial(_launch, _scales, _fast))
