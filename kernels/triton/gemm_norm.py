"""GEMM and norm in one launch, where a program holds all columns that are normalized together.

    y = sum_k a[m, k] * b[k, n] (* sa * sb) + bias[n] + residual[m, n]
    d = tail(norm(y) * weight[n] + norm_bias[n])                     (`lokakern.types.NormEpilogue`)

a: [m, k], FP8 or bfloat16, row-major; b: [k, n], alike, column-major; d: [m, n], bfloat16, or FP8
with scales; rows of a, d and of what the tail reads, and columns of b, have any stride; scales as
`Granularity.empty_scale` lays them out, of b transposed.

Statistics are of sums that nothing rounded, by the mean first and then by squared distances from
it. `gemm_norm` holds whole rows of up to 512 columns, `gemm_block_norm` blocks of up to 256, with
one program for each tile of rows and block, so no statistic leaves a program.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern import jit
from lokakern.epilogue import NormEpilogue, norm_form
from lokakern.jit import Launch, TritonLauncher, cached, compute_units, for_amd
from lokakern.kernels.triton.norm_pieces import (
    Form,
    grain,
    inverse_root,
    pieces,
    static_cast,
    tail,
    unwritable,
    whole,
    written,
)
from lokakern.kernels.triton.quantize import (
    _cast,
    _decode_scale,
    _finite_magnitude,
    format_constants,
)
from lokakern.norm import Norm
from lokakern.registry.register import (
    COMPILED_ONLY,
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
    QuantizedTensor,
    Rejected,
    Support,
)

LONGEST_ROW = 512
BLOCKS = (32, 64, 128, 256)
LARGEST_SIDE = 2**22  # 512 columns of a tile times this is what 32 bits of offset reach


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and with how much hardware.

    Columns are held as `parts` of `part_n`: products of one part at a time are promoted, so that
    only it has its sums twice, and what follows needs its scales, bias and weights of one part.
    128 columns are also what one scale of a 1x128 output covers.
    """

    block_m: int
    part_n: int
    parts: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(
    m: int,
    columns: int,
    across: int,
    k: int,
    item_bytes: int,
    compute_units: int,
    *,
    light: bool,
    hopper: bool = True,
    amd: bool = False,
) -> Tile:
    """The tile of a program.

    Steps along k are 128 bytes, one swizzled row of shared memory. Two programs or more share an SM
    up to 256 columns, so that one multiplies while another normalizes and stores; 128 rows instead
    of 64 read b half as often, which pays where k is long, and where many blocks share a row:
    32768 x 2048 x 512 in blocks of 256 took 165 us on an H200 with it, 226 without.

    Args:
        m: Rows of the output.
        columns: That are normalized together.
        across: How many times as many the output has.
        k: Length of the sums.
        item_bytes: Of an operand's element.
        compute_units: Of the GPU.
        light: What is done to 128 x 256 sums fits registers beside them.
        hopper: Sums are held twice, and four warpgroups may share a product.
        amd: The pipeline keeps loads in flight in registers, so it is two stages deep.
    """
    step = 128 // item_bytes
    plenty = m * across >= 128 * compute_units
    if columns <= 64:
        part_n = 32 if columns <= 32 else 64
        tile = Tile(128 if plenty else 64, part_n, 1, step, 4, 3)
    elif columns <= 128:
        tile = Tile(64, 128, 1, step, 4, 3)
    elif columns <= 256:
        large = light and plenty and (k > 512 or across > 1)
        tile = Tile(128, 128, 2, step, 8, 4) if large else Tile(64, 128, 2, step, 8, 2)
    elif columns <= 384:
        tile = Tile(64, 128, 3, step, 8, 3)
    elif hopper:
        tile = Tile(64, 128, 4, step, 16, 3)
    else:  # sm_100 multiplies for no more than 8 warps; CDNA 3 has 64 KiB of shared memory
        tile = Tile(64, 128, 4, step // 2 if amd else step, 8, 3)
    return replace(tile, num_stages=2) if amd else tile


@triton.jit(do_not_specialize=["m"])
def gemm_norm_kernel(
    a: tl.tensor,
    a_scale: tl.tensor,
    b: tl.tensor,
    b_scale: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    residual: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    out_stride: tl.tensor,
    b_scale_stride: tl.tensor,
    residual_stride: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    m: tl.tensor,
    GRANULARITY: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    LAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr,
    MAX: tl.constexpr,
    NAN_BYTE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    GRAIN: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One tile of whole rows, or of one block of each of its rows; blocks have no tails."""
    block_n: tl.constexpr = PART_N * PARTS
    imprecise: tl.constexpr = BLOCK_K if BLOCK_K < 128 else 128
    tile = tl.program_id(0)
    if WHOLE_ROWS:
        start_m, start_n = tile * BLOCK_M, 0
    else:
        # 8 tiles down before the next one across: programs that run together share columns of b
        # and few rows of a, which is what stays in the L2.
        tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), n // block_n
        first_m = tile // (8 * tiles_n) * 8
        height = tl.minimum(tiles_m - first_m, 8)
        start_m = (first_m + tile % (8 * tiles_n) % height) * BLOCK_M
        start_n = tile % (8 * tiles_n) // height * block_n
    columns = block_n if EVEN_N else whole(n, GRAIN)
    # FP8 rows are padded to 16 bytes only: no registers for strides where nothing is to pad.
    a_pitch = k if EVEN_K and GRANULARITY != "none" else a_stride
    b_pitch = k if EVEN_K and GRANULARITY != "none" else b_stride
    in_tile, in_part, in_step = tl.arange(0, BLOCK_M), tl.arange(0, PART_N), tl.arange(0, BLOCK_K)

    # Rows and columns past the end read the last one; they are masked out afterwards. Offsets are
    # 32 bits wide inside a tile, 64 from tile to tile.
    row = tl.minimum(in_tile, m - 1 - start_m)
    a_tile = a + tl.cast(start_m, tl.int64) * a_pitch
    a_tile += row[:, None] * a_pitch + in_step[None, :]
    b_tile = b + tl.cast(start_n, tl.int64) * b_pitch + in_step[:, None]
    b_part = b_tile + in_part[None, :] * b_pitch
    sums: tl.tuple = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([BLOCK_M, PART_N], tl.float32),)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K), num_stages=STAGES):
        inside = in_step < k - step * BLOCK_K
        at_a = a_tile + step * BLOCK_K
        left = tl.load(at_a) if EVEN_K else tl.load(at_a, inside[None, :], other=0.0)
        if GRANULARITY == "block":
            group = step * BLOCK_K // 128
            # Columns of scales start every 4 of them.
            scale_column = tl.cast(tl.cdiv(m, 4), tl.int64) * 4
            row_scale = tl.load(a_scale + scale_column * group + start_m + row)
        added: tl.tuple = ()
        for part in tl.static_range(PARTS):
            if EVEN_N:  # one set of addresses serves all parts
                at_b = b_part + part * PART_N * b_pitch + step * BLOCK_K
            else:
                column = tl.minimum(in_part, columns - 1 - part * PART_N)
                at_b = b_tile + (column + part * PART_N)[None, :] * b_pitch + step * BLOCK_K
            right = tl.load(at_b) if EVEN_K else tl.load(at_b, inside[:, None], other=0.0)
            if GRANULARITY == "block":
                at_scale = (start_n + part * PART_N) // 128 * b_scale_stride + group
                block_scale = tl.load(b_scale + at_scale)
                products = tl.dot(left, right) * row_scale[:, None] * block_scale
                added += (sums[part] + products,)
            elif GRANULARITY == "none":
                added += (tl.dot(left, right, sums[part]),)
            else:
                promoted = tl.dot(left, right, sums[part], max_num_imprecise_acc=imprecise)
                added += (promoted,)
        sums = added

    # Sums become y, and what statistics need. Rows are reduced part by part, which also keeps the
    # compiler from holding the scales, biases and residuals of all parts at a time.
    row_known = in_tile < m - start_m
    row = tl.minimum(in_tile, m - 1 - start_m)
    start_row = tl.cast(start_m, tl.int64)
    out_stride, residual_stride = whole(out_stride, GRAIN), whole(residual_stride, GRAIN)
    first_stride, second_stride = whole(first_stride, GRAIN), whole(second_stride, GRAIN)
    residual += start_row * residual_stride + start_n
    first += start_row * first_stride + start_n
    second += start_row * second_stride + start_n
    values: tl.tuple = ()
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(PARTS):
        column = in_part + part * PART_N
        column_known = column < columns
        y = sums[part]
        if GRANULARITY == "row":
            y *= tl.load(a_scale + start_m + in_tile, row_known, other=0.0)[:, None]
            y *= tl.load(b_scale + start_n + column, column_known, other=0.0)[None, :]
        elif GRANULARITY == "tensor":
            y = y * tl.load(a_scale) * tl.load(b_scale)
        if HAS_BIAS:
            extra = tl.load(bias + start_n + column, column_known, other=0.0)
            y += extra.to(tl.float32)[None, :]
        if RESIDUAL == "before":
            at_residual = residual + row[:, None] * residual_stride + column[None, :]
            y += tl.load(at_residual, column_known[None, :], other=0.0).to(tl.float32)
        if not EVEN_N:
            y = tl.where(column_known[None, :], y, 0.0)
        if NORM == "layer":
            total += tl.sum(y, 1)
        elif NORM == "rms":
            total += tl.sum(y * y, 1)
        values += (y,)
    count = columns * 1.0
    if NORM == "layer":
        mean = total / count
        total = tl.zeros([BLOCK_M], tl.float32)
        centered: tl.tuple = ()
        for part in tl.static_range(PARTS):
            y = values[part] - mean[:, None]
            if not EVEN_N:
                y = tl.where((in_part + part * PART_N < columns)[None, :], y, 0.0)
            total += tl.sum(y * y, 1)
            centered += (y,)
        values = centered
    if NORM != "none":
        inverse = inverse_root(total / count, EPS)

    # Tails and, unless a scale needs all of a row first, outputs.
    out += start_row * out_stride + start_n
    amax = tl.zeros([BLOCK_M], tl.float32)
    finished: tl.tuple = ()
    for part in tl.static_range(PARTS):
        column = in_part + part * PART_N
        column_known = column < columns
        known = row_known[:, None] & column_known[None, :]
        z = values[part]
        if NORM != "none":
            z = z * inverse[:, None]
        d = tail(
            z, norm_weight + start_n, norm_bias + start_n, residual, first, second, column,
            row, residual_stride, first_stride, second_stride, column_known,
            column_known[None, :],
            HAS_NORM_WEIGHT, HAS_NORM_BIAS, LAST, RESIDUAL,
        )  # fmt: skip
        target = out + in_tile[:, None] * out_stride + column[None, :]
        if SCALES == "none":
            tl.store(target, d.to(out.dtype.element_ty), known)
        elif SCALES == "static":
            encoded = static_cast(d, tl.load(out_scale), out.dtype.element_ty, MAX, NAN_BYTE)
            tl.store(target, encoded.to(out.dtype.element_ty, bitcast=True), known)
        elif SCALES == "group":
            scales = _decode_scale(tl.max(_finite_magnitude(d), 1), MAX)
            scale_column = tl.cast(tl.cdiv(m, 4), tl.int64) * 4
            at_scale = out_scale + scale_column * ((start_n + part * PART_N) // 128) + start_m
            tl.store(at_scale + in_tile, scales, row_known)
            encoded = _cast(d, scales[:, None], out.dtype.element_ty, MAX, NAN_BYTE)
            tl.store(target, encoded.to(out.dtype.element_ty, bitcast=True), known)
        else:
            amax = tl.maximum(amax, tl.max(_finite_magnitude(d), 1))
            finished += (d,)
    if SCALES == "row":
        scales = _decode_scale(amax, MAX)
        tl.store(out_scale + start_m + in_tile, scales, row_known)
        for part in tl.static_range(PARTS):
            column = in_part + part * PART_N
            target = out + in_tile[:, None] * out_stride + column[None, :]
            known = row_known[:, None] & (column < columns)[None, :]
            encoded = _cast(finished[part], scales[:, None], out.dtype.element_ty, MAX, NAN_BYTE)
            tl.store(target, encoded.to(out.dtype.element_ty, bitcast=True), known)


_launch = TritonLauncher(gemm_norm_kernel)


def _is_hopper(device: int) -> bool:
    """Of a tensor's GPU, or the recorded type, as `compute_units`."""
    if device >= 0:
        return not for_amd() and torch.cuda.get_device_capability(device)[0] == 9
    return jit.recording is not None and jit.recording.device.architecture == "sm_90"


@cached
def _programs_and_launch(
    m: int,
    n: int,
    k: int,
    device: int,
    granularity: str,
    whole_rows: bool,
    norm: Norm,
    form: Form,
    scales: str,
    *signature: Any,
) -> tuple[int, Launch]:
    columns = n if whole_rows else norm.block
    held = scales == "row" and form.last in ("gate", "cross")
    light = columns == 256 and not held and granularity != "block"
    tile = tile_for(
        m, columns, n // columns, k, signature[0].itemsize, compute_units(device),
        light=light, hopper=_is_hopper(device), amd=for_amd(),
    )  # fmt: skip
    programs = -(-m // tile.block_m) * (n // columns)
    return programs, _bound(tile, n, k, granularity, whole_rows, norm, form, scales, *signature)


@cached
def _bound(
    tile: Tile,
    n: int,
    k: int,
    granularity: str,
    whole_rows: bool,
    norm: Norm,
    form: Form,
    scales: str,
    _a: torch.dtype,
    _b: torch.dtype,
    out: torch.dtype,
    strides: tuple[int, ...],
) -> Launch:
    bias, norm_weight, norm_bias = (x is not None for x in form[:3])
    constants = (
        granularity, "rms" if norm.kind == "block_rms" else norm.kind, norm.eps,
        bias, norm_weight, norm_bias, form.last, form.residual,
        scales, *(format_constants(out) if scales != "none" else (0.0, 0)),
        whole_rows, grain(n, strides[2], *strides[4:]),
        not whole_rows or n == tile.part_n * tile.parts, k % tile.block_k == 0,
        tile.block_m, tile.part_n, tile.parts, tile.block_k, tile.num_stages,
    )  # fmt: skip
    return _launch.bind((n, k, *strides), constants, tile.num_warps, tile.num_stages)


def _gemm_norm(
    granularity: str,
    whole_rows: bool,
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    out: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    left, a_scale = _parts(a)
    right, b_scale = _parts(b)
    data, out_scale, scales = written(out)
    form, tensors, tail_strides = pieces(epilogue, data)
    m, k = left.shape
    n = right.shape[1]
    strides = (
        left.stride(0), right.stride(1), data.stride(0),
        b_scale.stride(1) if granularity == "block" else 1, *tail_strides,
    )  # fmt: skip
    programs, launch = _programs_and_launch(
        m, n, k, left.get_device(), granularity, whole_rows, epilogue.norm, form, scales,
        left.dtype, right.dtype, data.dtype, strides,
    )  # fmt: skip
    launch(programs, (left, a_scale, right, b_scale, data, out_scale, *tensors), (m,))


def _parts(operand: Tensor | QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Data and scales in the orientation of a product; data twice where there are no scales."""
    if isinstance(operand, Tensor):
        return operand, operand
    data, scale = operand.data, operand.scale
    if operand.transposed:
        data, scale = operand.transpose
    return data, data if scale is None else scale


def _supports(
    a_granularity: Granularity,
    b_granularity: Granularity,
    whole_rows: bool,
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
    quantized = a_granularity is not Granularity.NONE
    for operand, name in ((problem.a, "a"), (b, "b")):
        known = operand.format.is_fp8 and operand.format.value.endswith("fnuz") is fnuz
        if not (known if quantized else operand.format is Format.BFLOAT16):
            return Rejected(
                f"{name} is {operand.format.value}, which it does not multiply on "
                f"{device.architecture}"
            )
    if all(x.format in (Format.E5M2, Format.E5M2FNUZ) for x in (problem.a, b)):
        return Rejected("does not multiply E5M2 by E5M2")
    if problem.a.layout is not Layout.ROW or b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if max(problem.k, problem.n) > LARGEST_SIDE or problem.m >= 2**31:
        return Rejected(f"m, n, k are at most 2^31 - 1, 2^22, 2^22; they are {problem.shape}")
    why = unwritable(problem, device) or _unfit(problem, whole_rows)
    return Rejected(why) if why else ACCEPTED


def _unfit(problem: Problem, whole_rows: bool) -> str | None:
    """Why a program does not hold what is normalized, or gets one scale, together."""
    norm, n = norm_form(problem.epilogue).norm, problem.n
    if whole_rows:
        if norm.kind == "block_rms":
            return f"normalizes whole rows, not {norm}"
        return f"holds rows of up to {LONGEST_ROW} columns, not {n}" if n > LONGEST_ROW else None
    if norm.kind != "block_rms":
        return f"normalizes blocks, not {norm.kind}"
    if norm.block not in BLOCKS or n % norm.block:
        known = ", ".join(map(str, BLOCKS))
        return f"normalizes blocks of {known} that divide a row, not {norm.block} of {n}"
    if problem.out_granularity is Granularity.ROW and norm.block != n:
        return f"holds {norm.block} of the {n} columns under one scale"
    if problem.out_granularity is Granularity.GROUP and norm.block % 128:
        return f"makes a scale of 128 columns, not of {norm.block}"
    return None


for _whole, _stem in ((True, "gemm_norm"), (False, "gemm_block_norm")):
    for _a, _b, _kind in (
        (Granularity.TENSOR, Granularity.TENSOR, "tensor"),
        (Granularity.ROW, Granularity.ROW, "row"),
        (Granularity.GROUP, Granularity.BLOCK, "block"),
        (Granularity.NONE, Granularity.NONE, "none"),
    ):
        _quantized = _kind != "none"
        register(
            "gemm_norm",
            name=f"{_stem}_{_kind if _quantized else 'bf16'}",
            architectures=FP8_GPUS,
            compile_only=COMPILED_ONLY,
            granularity=_a,
            b_granularity=_b,
            accumulation="promoted" if _quantized else "float32",
            supports=functools.partial(_supports, _a, _b, _whole),
            kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND if _quantized else 1.0,
        )(functools.partial(_gemm_norm, _kind, _whole))
