"""FP8 scaled GEMM for long sums of few outputs, which all SMs share. See scaled_gemm_split.cu.

    parts[p] = scaled a[:, part p of k] @ b[part p of k],  d = sum over p of parts[p]  (+ bias, + d)

The products of scaled_gemm.py, whose blocks share a sum in clusters of at most 8: of an output of
one tile 124 SMs idle. Here as many parts of k as there are SMs for a tile go through memory, and a
second launch, sum_parts.cu, adds them.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.fast_tiles import LEAST_STEP_US, RATES, ROW_US
from lokakern.kernels.cuda.scaled_gemm import SCALES
from lokakern.kernels.cuda.tiles import DEPTH, Kind, Tile, fits, macros_of
from lokakern.registry.register import KERNELS, PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import PLAIN, Device, Epilogue, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
SUMS_SOURCE = str(Path(__file__).with_name("sum_parts.cu"))
SUM_THREADS, MOST_LINES = 256, 32  # of sum_parts.cu
SMS = 132  # of an H200, by which problems are refused
WIDTHS = (8, 16, 24, 32, 64, 96, 128)  # of tiles
LEAST_STEPS = 4  # along k, of a part
MOST_K = 2**30  # 132 times its steps are an int
PART_US = 2e-6  # of an element of a part: written to the L2, and read; a guess
# DIRECT says that no bulk copy writes the output: for tests of machine code.
_MAIN_LOOP = ("N", "K", "BLOCK_N", "WARPGROUPS", "RESIDENT", "PARTS", "STAGES", "DOUBLE", "BAND",
              "SCALES", "BATCH", "A_TYPE", "B_TYPE", "A_SLICES", "A_ENDS", "TENSOR_SCALES",
              "ROW_SCALES", "BIAS", "ACCUMULATE", "DIRECT", "SHARED_BYTES")  # fmt: skip


_OUTPUTS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 4}
_BIASES: dict[torch.dtype | None, int] = {None: 0} | _OUTPUTS


class Plan(NamedTuple):
    """A launch with all that follows from sizes and types, and maps by addresses and strides."""

    launch: CudaLaunch
    tile: Tile
    grid: tuple[int, int, int]
    maps: dict[tuple[int, ...], tuple[TensorMap, ...]]


@functools.lru_cache(maxsize=1024)
def bind(n: int, k: int, tile: Tile, kind: Kind, bias: torch.dtype | None = None) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_of(n, k, tile, kind) | {"BIAS": _BIASES[bias]}
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple((x, macros[x]) for x in _MAIN_LOOP))
    return CudaLaunch(
        program, pointers=3 + (bias is not None) + kind.accumulate,
        scalars="i" + "ii" * (kind.scales == "block"), threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]),
        tensor_maps=2 + kind.in_mainloop, programmatic=True,
    )  # fmt: skip


@functools.cache
def bind_sums(lines: int, width: int, dtype: torch.dtype) -> CudaLaunch:
    """The launch that adds parts, one for all sizes."""
    macros = {"LINES": lines, "WIDTH": width, "OUT": _OUTPUTS[dtype]}
    program = nvrtc.Program(SUMS_SOURCE, "sum_parts", tuple(macros.items()))
    return CudaLaunch(program, pointers=2, scalars="ii", threads=SUM_THREADS, programmatic=True)


@functools.lru_cache(maxsize=4096)
def tile_of(m: int, n: int, k: int, kind: Kind, sms: int) -> Tile | None:
    """The tile with the least cost by a formula; None where no sum has two parts.

    The constants of a step are those of `fast_tiles`, which were fitted to another main loop: this
    one adds a step while it multiplies the next in groups of 16 only.
    """
    steps = -(-k // DEPTH)
    best, least = None, math.inf
    for warpgroups in (1, 2):
        for width in WIDTHS:
            whole = Tile(width, warpgroups)
            parts = min(sms // whole.count(m, n), steps // LEAST_STEPS)
            tile = Tile(width, warpgroups, parts=parts)
            if parts < 2 or not fits(n, k, tile, kind):
                continue
            products = RATES[warpgroups, False].promoted * whole.height * width * 1e-5
            copies = sum(ROW_US) * (whole.height + width)
            us = -(-steps // parts) * max(products, copies, LEAST_STEP_US)
            us += parts * m * n * PART_US
            if us < least:
                best, least = tile, us
    return best


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, bias: torch.dtype | None, device: int) -> Plan:
    sms = jit.compute_units(device)
    tile = tile_of(m, n, k, kind, sms) or tile_of(m, n, k, kind, SMS)  # a smaller GPU: two waves
    assert tile is not None  # `supports` said so
    grid = tile.count(m, n) * tile.parts
    return Plan(bind(n, k, tile, kind, bias), tile, (grid, 1, 1), {})


def _planned(
    scales: str, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, epilogue: Epilogue = PLAIN
) -> tuple[Plan, Kind]:
    kind = Kind(
        scales, 4, accumulate=epilogue.accumulate, direct=True,
        a_type=scaled_gemm._TYPES[a.dtype], b_type=scaled_gemm._TYPES[b.dtype],
    )  # fmt: skip
    of_bias = None if bias is None else bias.dtype
    (m, n), k = out.shape, b.shape[0]
    return _plan(m, n, k, kind, of_bias, out.get_device()), kind


def _parts(
    scales: str,
    a: Tensor,
    _a_scale: Tensor,
    b: Tensor,
    _b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue = PLAIN,
) -> tuple[Tensor, ...]:
    """Room for what the parts of k add up to."""
    tile = _planned(scales, a, b, out, bias, epilogue)[0].tile
    return (torch.empty((tile.parts, out.numel()), dtype=torch.float32, device=out.device),)


def _launch(
    scales: str,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    plan, kind = _planned(scales, a, b, out, bias, epilogue)
    (parts,), m = workspace, len(out)
    key: tuple[int, ...] = (a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(1))
    if kind.in_mainloop:
        key += (a_scale.data_ptr(), b_scale.data_ptr(), *a_scale.stride(), *b_scale.stride())
    maps = plan.maps.get(key)
    if maps is None:
        given: Any = plan
        maps = scaled_gemm._make_maps(given, kind, m, 1, (a,), (a_scale,), b, b_scale, out)
        if len(plan.maps) >= scaled_gemm._MOST_MAPS:
            plan.maps.clear()
        plan.maps[key] = maps
    pointers: tuple[Tensor, ...] = (a_scale, b_scale, parts)
    pointers += () if bias is None else (bias,)
    pointers += (out,) if kind.accumulate else ()
    strides = b_scale.stride() if kind.scales == "block" else ()
    plan.launch(plan.grid, pointers, (m, *strides), maps)
    count, elements = parts.shape
    starts = parts.data_ptr() | elements * 4 | out.data_ptr() * (4 // out.element_size())
    width = 1 if starts & 15 else 4
    # Of a thread about four parts, whose loads are under way at once.
    lines = min(MOST_LINES, 1 << max(count // 4 - 1, 0).bit_length())
    grid = -(-elements // (SUM_THREADS // lines * width))
    bind_sums(lines, width, out.dtype)((grid, 1, 1), (parts, out), (count, elements))


def supports(scales: str, problem: Problem, device: Device) -> Support:
    """Sums of at least two parts, each of some steps, by the tiles of an H200."""
    answer = KERNELS[f"cuda.scaled_gemm_{scales}"].supports_problem(problem, device)
    if isinstance(answer, Rejected):
        return answer
    if problem.out_format.is_fp8:
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    if problem.out_strided:
        return Rejected("needs a contiguous output")
    m, n, k = problem.shape
    if k >= MOST_K:
        return Rejected(f"k must be less than 2^30; it is {k}")
    if m * n and tile_of(m, n, k, Kind(scales, 4, direct=True), SMS) is None:
        return Rejected(
            f"k is too short to split, or the output has too many tiles: it takes k from "
            f"{2 * LEAST_STEPS * DEPTH} on, of at most {SMS // 2} tiles; m={m} n={n} k={k}"
        )
    return answer


for _scales, (_a, _b) in SCALES.items():
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_split",
        architectures=frozenset({"sm_90"}),
        granularity=_a,
        b_granularity=_b,
        accumulation="promoted",
        supports=functools.partial(supports, _scales),
        workspace=functools.partial(_parts, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
        accumulates=True,
        compile_only={"sm_90": "not run on a GPU yet: none was available"},
    )(functools.partial(_launch, _scales))
