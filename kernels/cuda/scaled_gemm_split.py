"""FP8 scaled GEMM for long sums of few outputs, which all SMs share. See scaled_gemm_split.cu.

    parts[p] = scaled a[:, part p of k] @ b[part p of k],  d = sum over p of parts[p]  (+ bias, + d)

The products of scaled_gemm.py, whose blocks share a sum in clusters of at most 8: of an output of
one tile 124 SMs idle. Here up to as many parts of k as there are SMs for a tile go through memory,
and a second launch, sum_parts.cu, adds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.scaled_gemm import SCALES
from lokakern.kernels.cuda.tiles import DEPTH, ROWS, Kind, Tile, fits, macros_of
from lokakern.registry.register import KERNELS, PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import PLAIN, Device, Epilogue, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
SUMS_SOURCE = str(Path(__file__).with_name("sum_parts.cu"))
SUM_THREADS, MOST_LINES = 256, 32  # of sum_parts.cu
SMS = 132  # of an H200, by which problems are refused
WIDTHS = (8, 16, 24, 32, 64, 96, 128)  # of tiles
LEAST_STEPS = 4  # along k, of a part
MOST_K = 2**30  # 132 times its steps are an int
# Problems are refused where the kernel cannot win. The second launch takes as long as 10 steps or
# so. What two parts move, 16 bytes of an output, may be a quarter of the operands: on an H200, 300
# x 520 x 5120 took 8.9 us by the best tile and 6.7 without parts, 512 x 128 x 4096 5.6 and 4.8, and
# 128 x 128 x 16384, which is taken, 5.9 and 5.7.
LEAST_K, LEAST_SHARE = 2048, 4

# What a tile takes on an H200, in us. Fitted to 228 times of 14 sizes with row scales and cold
# operands, of which slow tiles count less: 7 % off in the median.
PRODUCTS_US = 2.5e-5, 1.9e-5  # of a sum in a step, by warpgroups: two take turns
ROW_US = 1.2e-3  # of 128 bytes of an operand from the L2, where all SMs copy
STEP_US = 0.125  # at least: how soon bytes are there
BYTES_PER_US = 4.1e6  # of the GPU's memory
PART_US = 3.5e-6  # of an element of a part: written, and read
SUM_US = 2.5e-4  # of an element of a block's tile: leaves registers
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


def _tiles(m: int, n: int, k: int, kind: Kind, sms: int) -> Iterator[Tile]:
    """Tiles and parts of which one is taken: for all SMs, for half, or for some steps a part."""
    steps = -(-k // DEPTH)
    for warpgroups in (1, 2) if m > ROWS else (1,):
        for width in WIDTHS:
            whole = Tile(width, warpgroups)
            most = min(sms // whole.count(m, n), steps // LEAST_STEPS)
            if most < 2 or (width > WIDTHS[0] and width >= 2 * n) or not fits(n, k, whole, kind):
                continue
            for parts in {most, most // 2, steps // 8, steps // 16}:
                if 2 <= parts <= most:
                    yield Tile(width, warpgroups, parts=parts)


def _cost_us(m: int, n: int, k: int, tile: Tile, sms: int) -> float:
    """What a tile takes by the formula, without launches."""
    steps = -(-k // (DEPTH * tile.parts))  # of the longest part
    products = PRODUCTS_US[tile.warpgroups - 1] * tile.height * tile.block_n
    busy = tile.count(m, n) * tile.parts / sms
    copies = ROW_US * busy * (tile.height + tile.block_n)
    memory = (m + n) * k / BYTES_PER_US / steps
    # Nearly the longest of them; those of about the same length delay each other.
    step = math.cbrt(sum(us**3 for us in (products, copies, memory, STEP_US)))
    return steps * step + PART_US * tile.parts * m * n + SUM_US * tile.height * tile.block_n


@functools.lru_cache(maxsize=4096)
def tile_of(m: int, n: int, k: int, kind: Kind, sms: int) -> Tile | None:
    """The tile with the least cost by a formula; None where no sum has two parts.

    At the sizes that its constants were fitted to, that tile is 0.4 % slower than the best in
    geometric mean, 3 % at most; at sizes that were left out of a fit 1.9 %, and 15 % at most.
    """
    tiles = _tiles(m, n, k, kind, sms)
    return min(tiles, key=lambda tile: _cost_us(m, n, k, tile, sms), default=None)


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
    """Sums so long that it may be faster in parts, by the tiles of an H200."""
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
    of_parts = LEAST_SHARE * 2 * 8 * m * n
    if k < LEAST_K or (m + n) * k < of_parts:
        least = max(LEAST_K, -(-of_parts // max(m + n, 1)))
        return Rejected(f"k is too short to split: it takes m={m} n={n} from k={least} on; k={k}")
    if m * n and tile_of(m, n, k, Kind(scales, 4, direct=True), SMS) is None:
        return Rejected(f"has too many tiles for two parts of each: m={m} n={n} k={k}")
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
    )(functools.partial(_launch, _scales))
