"""GEMMs that are normalized, and normalizing alone, in stock PyTorch, on any device.

    y = a @ b + bias;  y += residual;  z = norm(y) * norm_weight + norm_bias
    d = activation(z), gate * sigmoid(z) or x0 * z + x;  d += residual, where it comes last

`norm_unfused` is what a model does today: a bfloat16 product, torch's own norm, and each step
rounded to bfloat16 in between. The others do everything in float32 and round once: what an FP8
tensor core with a float32 accumulator, and a kernel that normalizes its sums, would give.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.norm import Norm, normalize
from lokakern.registry.ops import ACTIVATIONS
from lokakern.registry.register import FP8_GPUS, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

# As of torch.emulated_*: where FP8 hardware is, an emulation is for checking.
MOST_FLOPS = 1e10
Output = Tensor | QuantizedTensor


def _unfused(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    out: Output,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        b = source.t()
    bias, residual = epilogue.bias, epilogue.residual
    y = torch.mm(a, b) if bias is None else torch.addmm(bias.to(a.dtype), a, b)
    if residual is not None and not epilogue.residual_last:
        y += residual
    weight, shift = epilogue.norm_weight, epilogue.norm_bias
    inside = all(x is None or x.dtype == y.dtype for x in (weight, shift))
    z = _torch_norm(y, epilogue.norm, *((weight, shift) if inside else (None, None)))
    if not inside:  # float32 ones, which torch does not mix with bfloat16 rows on every device
        z = z if weight is None else z * weight
        z = z if shift is None else z + shift
    _write(_tail(z, epilogue), out)


def _torch_norm(y: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    columns = y.shape[-1:]
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(y, columns, weight, bias, norm.eps)
    if norm.kind == "rms":
        z = torch.nn.functional.rms_norm(y, columns, weight, norm.eps)
    elif norm.kind == "block_rms":
        blocks = y.view(len(y), -1, norm.block)
        z = torch.nn.functional.rms_norm(blocks, (norm.block,), None, norm.eps).view_as(y)
        z = z if weight is None else z * weight
    else:
        z = y if weight is None else y * weight
    return z if bias is None else z + bias


def _tail(z: Tensor, epilogue: NormEpilogue) -> Tensor:
    """All that comes after the norm, in the dtype of z."""
    if epilogue.gate is not None:
        d = epilogue.gate * torch.sigmoid(z)
    elif epilogue.x0 is not None and epilogue.x is not None:
        d = torch.addcmul(epilogue.x.to(z.dtype), epilogue.x0.to(z.dtype), z)
    else:
        d = ACTIVATIONS[epilogue.activation][0](z)
    if epilogue.residual is not None and epilogue.residual_last:
        d = d + epilogue.residual
    return d


def _write(d: Tensor, out: Output) -> None:
    if isinstance(out, Tensor):
        out.copy_(d)
        return
    form, granularity = out.format, out.granularity
    assert out.scale is not None  # FP8 has scales
    if granularity is Granularity.TENSOR:
        numerics.quantize_static(d, form, granularity, out.scale, data=out.data)
    else:
        numerics.quantize(d, form, granularity, data=out.data, scale=out.scale)


def normalized(y: Tensor, epilogue: NormEpilogue) -> Tensor:
    """What an epilogue makes of rows, in their dtype: float32, so that only the result is rounded.

    By steps that torch differentiates.
    """
    if epilogue.bias is not None:
        y = y + epilogue.bias
    if epilogue.residual is not None and not epilogue.residual_last:
        y = y + epilogue.residual
    z = normalize(y, epilogue.norm, epilogue.norm_weight, epilogue.norm_bias)
    return _tail(z, epilogue)


def _emulated(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Output,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    _write(normalized(numerics.dequantize(a) @ numerics.dequantize(b), epilogue), out)


def _quantize(
    x: Tensor, out: Output, epilogue: NormEpilogue, _workspace: tuple[Tensor, ...]
) -> None:
    _write(normalized(x.float(), epilogue), out)


def _writes(problem: Problem) -> Support:
    form, granularity = problem.out_format, problem.out_granularity
    if form.is_fp8 and granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        return ACCEPTED
    if form is Format.BFLOAT16 and granularity is Granularity.NONE:
        return ACCEPTED
    return Rejected(
        f"writes bfloat16, or FP8 with tensor, row or 1x128 scales, not {form.value} with "
        f"{granularity.value} scales"
    )


def _supports_unfused(problem: Problem, _device: Device) -> Support:
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16 operands; a is {problem.a.format.value}")
    if problem.b is not None and not problem.prepared and problem.b.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16 operands; b is {problem.b.format.value}")
    return _writes(problem)


def _supports_emulated(
    a_granularity: Granularity, b_granularity: Granularity, problem: Problem, device: Device
) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (a_granularity, b_granularity):
        return Rejected(
            f"takes {a_granularity.value} x {b_granularity.value} scales, "
            f"not {have[0].value} x {have[1].value}"
        )
    if device.architecture in FP8_GPUS and problem.flops > MOST_FLOPS:
        return Rejected(
            f"emulates up to 10 GFLOP on {device.architecture}, which has FP8 hardware; "
            f"this is {problem.flops / 1e9:.0f}"
        )
    return _writes(problem)


def _supports_quantize(problem: Problem, _device: Device) -> Support:
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16; x is {problem.a.format.value}")
    return _writes(problem)


# Each rounding to bfloat16 loses up to 2^-9, 16 times the 2^-13 that a bound of 1 leaves: of the
# sums, twice where torch rounds parts of them, with the residual, and of the norm, its weight and
# bias and what follows.
UNFUSED_BOUND = 1.0 + 16 * 7

register(
    "gemm_norm",
    name="norm_unfused",
    accumulation="rounded",
    supports=_supports_unfused,
    kernel_err_bound=UNFUSED_BOUND,
)(_unfused)
for _name, _a, _b in (
    ("norm_emulated_tensor", Granularity.TENSOR, Granularity.TENSOR),
    ("norm_emulated_row", Granularity.ROW, Granularity.ROW),
    ("norm_emulated_block", Granularity.GROUP, Granularity.BLOCK),
    ("norm_emulated_group", Granularity.GROUP, Granularity.GROUP),
):
    register(
        "gemm_norm",
        name=_name,
        granularity=_a,
        b_granularity=_b,
        accumulation="float32",
        supports=functools.partial(_supports_emulated, _a, _b),
    )(_emulated)
register("norm_quantize", name="norm_quantize", supports=_supports_quantize)(_quantize)
