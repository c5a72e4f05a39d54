"""FP8 scaled GEMM, scales per tensor, per row, or 1x128 by 128x128.

    d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

a: [m, k], FP8, row-major; b: [k, n], FP8, column-major; d: [m, n], bfloat16 or float32; rows of a
and d and columns of b have any stride; bias: [n] or None; scales as `Granularity.empty_scale` lays
them out, of b transposed. Persistent programs, as many as the compute units hold, walk over tiles
of d.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import Launch, TritonLauncher, cached, compute_units, for_amd
from lokakern.registry.register import (
    COMPILED_ONLY,
    FAST_KERNEL_ERR_BOUND,
    FAST_LARGEST_K,
    FP8_GPUS,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time, and with how much hardware."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def resident(self) -> int:
        """Programs of a compute unit at a time: as many as 227 KiB of shared memory hold."""
        return 227 * 1024 // ((self.block_m + self.block_n) * self.block_k * self.num_stages)

    def count(self, m: int, n: int) -> int:
        """Tiles of an output."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    @property
    def clocks(self) -> float:
        """Of one step along k: the slower of tensor cores and loads, on sm_90."""
        products = self.block_m * self.block_n * self.block_k / 4096  # FP8 multiply-adds a clock
        bytes_loaded = (self.block_m + self.block_n) * self.block_k
        return max(products, bytes_loaded / 40)  # of the 64 a clock that an SM can get from the L2


# block_k is 128 throughout: 128 bytes are one swizzled row of shared memory, the depth at which
# running sums are promoted, and the depth of one block scale. Four stages of 128x256 take 192 KiB
# of the 227 KiB that an SM has. A warpgroup (4 warps) has registers for 64x128 of sums twice
# (64 + 64 a thread) or 64x256 once.
LARGE = Tile(128, 256, 128, 8, 4)  # most products for each byte loaded
TILES = (
    Tile(128, 128, 128, 8, 4),
    Tile(64, 128, 128, 4, 4),  # few rows: twice the tiles
    Tile(128, 64, 128, 4, 4),  # n <= 64
    Tile(64, 64, 128, 4, 4),  # small outputs: spreads over more of the GPU
    Tile(128, 32, 128, 4, 4),  # n <= 32: heads of a model
)


def tiles(m: int, n: int, compute_units: int, *, one_sum: bool, amd: bool = False) -> Tile:
    """The tile with which the busiest compute unit takes the fewest clocks.

    Args:
        m: Rows of the output.
        n: Columns of the output.
        compute_units: Of the GPU.
        one_sum: Sums need no second accumulator and leave as bfloat16: LARGE fits the registers.
        amd: The pipeline keeps loads in flight in registers, so it is two stages deep.
    """
    candidates = (LARGE, *TILES) if one_sum else TILES
    best = min(candidates, key=lambda t: -(-t.count(m, n) // compute_units) * t.clocks)
    return replace(best, num_stages=2) if amd else best


@triton.jit
def _store(
    accumulator: tl.tensor,
    a_scale: tl.tensor,
    b_scale: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    n: tl.tensor,
    out_stride: tl.tensor,
    m: tl.tensor,
    start_m: tl.tensor,
    start_n: tl.tensor,
    GRANULARITY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Scales, bias, rounding; block scales are in the sums already."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row_known, column_known = row < m - start_m, column < n - start_n
    if GRANULARITY == "row":
        accumulator *= tl.load(a_scale + start_m + row, row_known, other=0.0)[:, None]
        accumulator *= tl.load(b_scale + start_n + column, column_known, other=0.0)[None, :]
    elif GRANULARITY == "tensor":
        accumulator = accumulator * tl.load(a_scale) * tl.load(b_scale)
    if HAS_BIAS:
        added = tl.load(bias + start_n + column, column_known, other=0.0)
        accumulator += added.to(tl.float32)[None, :]
    target = out + start_m.to(tl.int64) * out_stride + start_n
    offsets = row[:, None] * out_stride + column[None, :]
    rounded = accumulator.to(out.dtype.element_ty)
    tl.store(target + offsets, rounded, row_known[:, None] & column_known[None, :])


@triton.jit(do_not_specialize=["m"])
def scaled_gemm_kernel(
    a: tl.tensor,
    a_scale: tl.tensor,
    b: tl.tensor,
    b_scale: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    out_stride: tl.tensor,
    b_scale_stride: tl.tensor,
    m: tl.tensor,
    GRANULARITY: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A persistent program: tiles program_id, program_id + programs, ..."""
    # 8 tiles down before the next one across: programs that run together share columns of b and
    # few rows of a, which is what stays in the L2.
    group_m: tl.constexpr = 8
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    # Rows are padded to 16 bytes only: no registers for strides where there is nothing to pad.
    a_pitch = k if EVEN_K else a_stride
    b_pitch = k if EVEN_K else b_stride
    in_tile_m, in_tile_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    in_step = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first_m = tile // (group_m * tiles_n) * group_m
        height = tl.minimum(tiles_m - first_m, group_m)
        start_m = (first_m + tile % (group_m * tiles_n) % height) * BLOCK_M
        start_n = tile % (group_m * tiles_n) // height * BLOCK_N
        # Rows past the end read the last row instead of being masked; they are never stored.
        # Offsets are 32 bits wide inside a tile, 64 from tile to tile.
        row = tl.minimum(in_tile_m, m - 1 - start_m)
        column = tl.minimum(in_tile_n, n - 1 - start_n)
        a_tile = a + start_m.to(tl.int64) * a_pitch + row[:, None] * a_pitch + in_step[None, :]
        b_tile = b + start_n.to(tl.int64) * b_pitch + column[None, :] * b_pitch + in_step[:, None]
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            if EVEN_K:
                left = tl.load(a_tile + step * BLOCK_K)
                right = tl.load(b_tile + step * BLOCK_K)
            else:
                inside = in_step < k - step * BLOCK_K
                left = tl.load(a_tile + step * BLOCK_K, inside[None, :], other=0.0)
                right = tl.load(b_tile + step * BLOCK_K, inside[:, None], other=0.0)
            if GRANULARITY == "block":
                # Columns of scales start every 4 of them.
                scale_column = tl.cdiv(m, 4).to(tl.int64) * 4
                row_scale = tl.load(a_scale + scale_column * step + start_m + row)
                # BLOCK_N divides 128: one scale of b for the whole tile.
                block_scale = tl.load(b_scale + start_n // 128 * b_scale_stride + step)
                accumulator += tl.dot(left, right) * row_scale[:, None] * block_scale
            elif PROMOTED:
                accumulator = tl.dot(left, right, accumulator, max_num_imprecise_acc=128)
            else:
                accumulator = tl.dot(left, right, accumulator)
        if BLOCK_N == 256:  # in halves: scales and bias of 256 columns do not fit the registers
            halves = accumulator.reshape(BLOCK_M, 2, 128).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                _store(
                    halves[half], a_scale, b_scale, out, bias, n, out_stride, m, start_m,
                    start_n + 128 * half, GRANULARITY, HAS_BIAS, BLOCK_M, 128,
                )  # fmt: skip
        else:
            _store(
                accumulator, a_scale, b_scale, out, bias, n, out_stride, m, start_m, start_n,
                GRANULARITY, HAS_BIAS, BLOCK_M, BLOCK_N,
            )  # fmt: skip


_launch = TritonLauncher(scaled_gemm_kernel)


@cached
def _programs_and_launch(
    m: int, n: int, device: int, one_sum: bool, *signature: Any
) -> tuple[int, Launch]:
    units = compute_units(device)
    tile = tiles(m, n, units, one_sum=one_sum, amd=for_amd())
    return min(tile.count(m, n), units * tile.resident), _bound(tile, n, *signature)


@cached
def _bound(
    tile: Tile,
    n: int,
    k: int,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    b_scale_stride: int,
    granularity: str,
    promoted: bool,
    has_bias: bool,
    *_dtypes: torch.dtype,
) -> Launch:
    constants = (
        granularity, promoted, has_bias, k % tile.block_k == 0,
        tile.block_m, tile.block_n, tile.block_k, tile.num_stages,
    )  # fmt: skip
    specialized = (n, k, a_stride, b_stride, out_stride, b_scale_stride)
    return _launch.bind(specialized, constants, tile.num_warps, tile.num_stages)


def _scaled_gemm(
    granularity: str,
    promoted: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    m, k = a.shape
    out_dtype = out.dtype
    programs, launch = _programs_and_launch(
        m, b.shape[1], a.get_device(), not promoted and out_dtype is torch.bfloat16,
        k, a.stride(0), b.stride(1), out.stride(0), b_scale.stride(1), granularity, promoted,
        bias is not None, a.dtype, b.dtype, out_dtype,
    )  # fmt: skip
    launch(programs, (a, a_scale, b, b_scale, out, out if bias is None else bias), (m,))


def _supports(
    a_granularity: Granularity,
    b_granularity: Granularity,
    largest_k: int | None,
    problem: Problem,
    device: Device,
) -> Support:
    b = problem.b
    if b is None:
        return Rejected("needs two operands")
    have = (problem.a.granularity, b.granularity)
    if have != (a_granularity, b_granularity):
        return Rejected(
            f"takes {a_granularity.value} x {b_granularity.value} scales, "
            f"not {have[0].value} x {have[1].value}"
        )
    fnuz = device.architecture == "gfx942"
    for operand, name in ((problem.a, "a"), (b, "b")):
        if not operand.format.is_fp8 or operand.format.value.endswith("fnuz") is not fnuz:
            return Rejected(
                f"{name} is {operand.format.value}, which {device.architecture} does not multiply"
            )
    if all(x.format in (Format.E5M2, Format.E5M2FNUZ) for x in (problem.a, b)):
        return Rejected("does not multiply E5M2 by E5M2")
    if problem.a.layout is not Layout.ROW or b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    if max(problem.k, problem.n) > LARGEST_SIDE or problem.m >= 2**31:
        return Rejected(f"m, n, k are at most 2^31 - 1, 2^23, 2^23; they are {problem.shape}")
    if largest_k is not None:
        if problem.k > largest_k:
            return Rejected(f"sums without promotion up to k={largest_k}; k={problem.k}")
        if problem.out_format is not Format.BFLOAT16:
            return Rejected("sums without promotion are worth no more than bfloat16")
    return ACCEPTED


LARGEST_SIDE = 2**23  # 256 rows of a tile times this is what 32 bits of offset reach

for _granularity, _kind in ((Granularity.TENSOR, "tensor"), (Granularity.ROW, "row")):
    for _promoted in (True, False):
        register(
            "scaled_gemm",
            name=f"scaled_gemm_{_kind}" + ("" if _promoted else "_fast"),
            architectures=FP8_GPUS,
            compile_only=COMPILED_ONLY,
            granularity=_granularity,
            accumulation="promoted" if _promoted else "fast",
            supports=functools.partial(
                _supports, _granularity, _granularity, None if _promoted else FAST_LARGEST_K
            ),
            kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND if _promoted else FAST_KERNEL_ERR_BOUND,
        )(functools.partial(_scaled_gemm, _kind, _promoted))

register(
    "scaled_gemm",
    name="scaled_gemm_block",
    architectures=FP8_GPUS,
    compile_only=COMPILED_ONLY,
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=functools.partial(_supports, Granularity.GROUP, Granularity.BLOCK, None),
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
)(functools.partial(_scaled_gemm, "block", True))
