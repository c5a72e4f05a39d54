"""Gradient of what a cross multiplies, in stock PyTorch, on any device: float32 throughout.

    dy = dd * x0

What is quantized is dy before any rounding. Sums are in the order of `lokakern.sums`.
"""

from __future__ import annotations

from torch import Tensor

from lokakern import numerics
from lokakern.gradients import NormGradients
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
    form = norm_form(problem.epilogue)
    if form.norm.kind != "none" or form.affine or form.residual_last or form.last != "cross":
        return Rejected(f"differentiates a cross without a norm, not {problem.epilogue}")
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16, not {problem.a.format.value}")
    scales = problem.out_granularity
    if not problem.out_format.is_fp8 or scales not in (Granularity.ROW, Granularity.GROUP):
        return Rejected(
            f"writes FP8 with row or 1x128 scales, not {problem.out_format.value} with "
            f"{scales.value} scales"
        )
    return ACCEPTED


@register("norm_backward", name="cross_backward", supports=supports)
def cross_backward(
    dd: Tensor,
    x0: Tensor,
    outputs: NormGradients,
    _epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    dy = dd.float() * x0.float()
    if outputs.dy is not None:
        outputs.dy.copy_(dy)
    for values, made in ((dy, outputs.quantized), (dy.t(), outputs.quantized_t)):
        if made is not None:
            numerics.quantize(
                values, made.format, made.granularity, data=made.data, scale=made.scale
            )
    if outputs.sums is not None:
        column_sums(dy, outputs.sums[0])
