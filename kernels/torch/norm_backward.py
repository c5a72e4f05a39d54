"""Gradients of a norm and of what follows it, in stock PyTorch, on any device: float32 throughout.

    h = (y - mean) r;  z = h * weight + shift;  g = dd * last'(z);  t = g * weight
    dy = r (t - mean(t) - h mean(t h))

What is quantized is dy before it is rounded to bfloat16. Sums are in the order of `lokakern.sums`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.epilogue import ACTIVATIONS
from lokakern.gradients import NormGradients, slope
from lokakern.registry.register import register
from lokakern.sums import column_sums
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Problem,
    Rejected,
    Support,
    norm_form,
)


def supports(problem: Problem, _device: Device) -> Support:
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16, not {problem.a.format.value}")
    form, granularity = problem.out_format, problem.out_granularity
    quantizes = form.is_fp8 and granularity in (Granularity.ROW, Granularity.GROUP)
    plain = form is Format.BFLOAT16 and granularity is Granularity.NONE
    if not quantizes and not plain:
        return Rejected(
            f"writes bfloat16, or FP8 with row or 1x128 scales, not {form.value} with "
            f"{granularity.value} scales"
        )
    last = norm_form(problem.epilogue).last
    if last not in ACTIVATIONS:
        return Rejected(f"differentiates {', '.join(ACTIVATIONS)}, not {last}")
    return ACCEPTED


@register("norm_backward", supports=supports)
def norm_backward(
    dd: Tensor,
    y: Tensor,
    outputs: NormGradients,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    norm, (rows, columns) = epilogue.norm, y.shape
    h, t = y.float().contiguous(), dd.float().contiguous()
    weight, shift = epilogue.norm_weight, epilogue.norm_bias
    blocks = h.view(rows, -1, norm.span(columns))
    r = torch.ones_like(blocks[..., :1])
    if norm.kind != "none":
        if norm.kind == "layer":
            blocks = blocks - blocks.mean(-1, keepdim=True)
        r = torch.rsqrt(blocks.square().mean(-1, keepdim=True) + norm.eps)
        h = (blocks * r).view(rows, columns)
    if epilogue.activation != "none":
        z = h if weight is None else h * weight
        z = z if shift is None else z + shift
        t = t * slope(z, epilogue.activation)
    g = t
    if weight is not None:
        t = t * weight
    if norm.kind != "none":
        each, normal = t.view_as(blocks), h.view_as(blocks)
        turn = (each * normal).mean(-1, keepdim=True)
        if norm.kind == "layer":
            each = each - each.mean(-1, keepdim=True)
        t = ((each - normal * turn) * r).view(rows, columns)
    _write(t, outputs)
    if outputs.sums is not None:
        sums = iter(outputs.sums)
        for vector, factor, values in ((epilogue.bias, None, t), (weight, h, g), (shift, None, g)):
            if vector is not None:
                column_sums(values if factor is None else values * factor, next(sums))


def _write(dy: Tensor, outputs: NormGradients) -> None:
    if outputs.dy is not None:
        outputs.dy.copy_(dy)
    for values, made in ((dy, outputs.quantized), (dy.t(), outputs.quantized_t)):
        if made is not None:
            numerics.quantize(
                values, made.format, made.granularity, data=made.data, scale=made.scale
            )
