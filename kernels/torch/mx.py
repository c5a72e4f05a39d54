"""FP8 with 1x32 scales that are powers of two (MX), in stock PyTorch.

    d[m, n] = sum_k (a[m, k] sa[m, k / 32]) * (b[k, n] sb[k / 32, n]) + bias[n]

`quantize_mx`, `dequantize_mx` and `emulated_mx` run on any device; the last multiplies in float32,
as matrix cores that apply such scales do. `scaled_mm_mx` is cuBLASLt's, on sm_100.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern import mx, numerics
from lokakern.registry.register import (
    FP8_GPUS,
    NEVER_RUN,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
from lokakern.sums import column_sums
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

MOST_FLOPS = 1e10  # as of torch.emulated_*: where FP8 hardware is, an emulation is for checking
# cuBLASLt reads scales in tiles of 128 rows by 4 columns, each of which holds rows 32 apart side by
# side: row r and column c are at byte 16 * (r % 32) + 4 * (r // 32) + c.
TILE_ROWS, ROWS_APART = 128, 32


def _quantize(x: Tensor, data: Tensor, scale: Tensor, _workspace: tuple[Tensor, ...]) -> None:
    numerics.quantize(x, Format.of(data.dtype), Granularity.MX, data=data, scale=scale)


def _quantize_transpose(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    sums: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    _quantize(x, data, scale, workspace)
    _quantize(x.t(), data_t, scale_t, workspace)
    if sums is not None:
        column_sums(x, sums)


def _dequantize(data: Tensor, scale: Tensor, out: Tensor, _workspace: tuple[Tensor, ...]) -> None:
    out.copy_(numerics.dequantize(QuantizedTensor(data, scale, Granularity.MX), out.dtype))


def _emulated(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    left = numerics.dequantize(QuantizedTensor(a, a_scale, Granularity.MX))
    right = numerics.dequantize(QuantizedTensor(b.t(), b_scale.t(), Granularity.MX, True))
    result = left @ right
    if bias is not None:
        result += bias
    out.copy_(result)


def _scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    _bias: None,
    workspace: tuple[Tensor, ...],
) -> None:
    left, left_padded, right, right_padded = workspace
    in_tiles(a_scale, left_padded, left)
    in_tiles(b_scale.t(), right_padded, right)
    torch._scaled_mm(a, b, left.flatten(), right.flatten(), None, None, out.dtype, False, out=out)


def in_tiles(scale: Tensor, padded: Tensor, tiles: Tensor) -> None:
    """Scales ``[rows, groups]`` as cuBLASLt reads them, see `tiles_for`."""
    rows, groups = scale.shape
    padded[:rows, :groups].copy_(scale)
    down, across = tiles.shape[:2]
    apart = padded.view(down, TILE_ROWS // ROWS_APART, ROWS_APART, across, mx.TOGETHER)
    tiles.copy_(apart.permute(0, 3, 2, 1, 4))


def tiles_for(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Room for scales ``[rows, groups]``: in tiles, ``[down, across, 32, 4, 4]``, and padded."""
    rows, groups = scale.shape
    down, across = -(-rows // TILE_ROWS), -(-groups // mx.TOGETHER)
    shape = (down, across, ROWS_APART, TILE_ROWS // ROWS_APART, mx.TOGETHER)
    tiles = torch.empty(shape, dtype=mx.SCALE, device=scale.device)
    padded = torch.zeros(
        (down * TILE_ROWS, across * mx.TOGETHER), dtype=mx.SCALE, device=scale.device
    )
    return tiles, padded


def _room_for_tiles(
    _a: Tensor, a_scale: Tensor, _b: Tensor, b_scale: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return *tiles_for(a_scale), *tiles_for(b_scale.t())


def _supports_quantize(problem: Problem, _device: Device) -> Support:
    if problem.out_granularity is not Granularity.MX:
        return Rejected(f"makes 1x32 scales, not {problem.out_granularity.value}")
    if problem.a.format.is_fp8 or not problem.out_format.is_fp8:
        return Rejected(
            f"turns bfloat16 or float32 into FP8, not {problem.a.format.value} "
            f"into {problem.out_format.value}"
        )
    return ACCEPTED


def _supports_dequantize(problem: Problem, _device: Device) -> Support:
    if problem.a.granularity is not Granularity.MX:
        return Rejected(f"takes 1x32 scales, not {problem.a.granularity.value}")
    return ACCEPTED


def _why_not_scales(problem: Problem) -> str | None:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.MX, Granularity.MX):
        return f"takes 1x32 x 1x32 scales, not {have[0].value} x {have[1].value}"
    return None


def _supports_emulated(problem: Problem, device: Device) -> Support:
    why = _why_not_scales(problem)
    if why is not None:
        return Rejected(why)
    if problem.out_format.is_fp8:
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    if device.architecture in FP8_GPUS and problem.flops > MOST_FLOPS:
        return Rejected(
            f"emulates up to 10 GFLOP on {device.architecture}, which has FP8 hardware; "
            f"this is {problem.flops / 1e9:.0f}"
        )
    return ACCEPTED


def _supports_scaled_mm(problem: Problem, _device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    why = _why_not_scales(problem)
    if why is not None:
        return Rejected(why)
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not Format.E4M3FN:
            return Rejected(f"multiplies e4m3fn; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected("operands must be 16-byte aligned")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.n % 16 or problem.k % mx.GROUP:
        return Rejected(f"n must be a multiple of 16 and k of 32; n={problem.n}, k={problem.k}")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 outputs only")
    return ACCEPTED


register("quantize", name="quantize_mx", granularity=Granularity.MX,
         supports=_supports_quantize)(_quantize)  # fmt: skip
register("quantize_transpose", name="quantize_transpose_mx", granularity=Granularity.MX,
         supports=_supports_quantize,
         epilogues=frozenset({"none", "column_sums"}))(_quantize_transpose)  # fmt: skip
register("dequantize", name="dequantize_mx", granularity=Granularity.MX,
         supports=_supports_dequantize)(_dequantize)  # fmt: skip
register("scaled_gemm", name="emulated_mx", granularity=Granularity.MX, accumulation="float32",
         supports=_supports_emulated)(_emulated)  # fmt: skip
register(
    "scaled_gemm",
    name="scaled_mm_mx",
    architectures=frozenset({"sm_100"}),
    unmeasured={"sm_100": NEVER_RUN["sm_100"]},
    granularity=Granularity.MX,
    accumulation="promoted",
    supports=_supports_scaled_mm,
    workspace=_room_for_tiles,
    epilogues=frozenset({"none"}),
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
)(_scaled_mm)
