"""FP8 GEMMs of DeepGEMM: 1x128 by 128x128 scales, and 1x128 by 1x128 into a float32 sum.

d[m, n] = sum_g (sum_{k in g} a[m, k] * b[k, n]) * sa[m, g] * sb[g, n]

There is no wheel: whatever can be imported as `deep_gemm` counts. Of both generations of its
interface: `fp8_gemm_nt` (from 2.1 on), and `gemm_fp8_fp8_bf16_nt` with
`wgrad_gemm_fp8_fp8_fp32_nt`. It compiles at the first launch of a shape, with nvcc or NVRTC.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from lokakern.kernels.adapters.layouts import aligned, packed_scales, room_for_packed_scales
from lokakern.registry.libraries import Library, Package, declare, import_modules
from lokakern.registry.register import PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import (
    ACCEPTED,
    PLAIN,
    Device,
    Epilogue,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    Rejected,
    Support,
)

LIBRARY = declare(
    Library(
        name="deep_gemm",
        packages=(Package("deep_gemm", ">=1.0,<3", ("deep_gemm",), or_folder=True),),
        install="put its checkout on the path; PyPI's deep-gemm is another",
    )
)
_SM_90 = frozenset({"sm_90"})  # on sm_100 it wants scales that are powers of two


@functools.cache
def library() -> Any:
    """The module, imported when the first kernel is launched."""
    import_modules(LIBRARY)
    return importlib.import_module("deep_gemm")


def _supports(b_granularity: Granularity, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.GROUP, b_granularity):
        return Rejected(
            f"takes 1x128 x {b_granularity.value} scales, not {have[0].value} x {have[1].value}"
        )
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        reason = _why_not(operand)
        if reason is not None:
            return Rejected(f"{name} {reason}")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.k % 16 or problem.n % 8:
        return Rejected(f"k must be a multiple of 16 and n of 8; k={problem.k}, n={problem.n}")
    if b_granularity is Granularity.GROUP:
        if not problem.accumulate or problem.out_format is not Format.FLOAT32:
            return Rejected("only adds to a float32 output")
    elif problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    if problem.out_strided:
        return Rejected("writes contiguous outputs only")
    return ACCEPTED


def _why_not(operand: Operand) -> str | None:
    if operand.format is not Format.E4M3FN:
        return f"is {operand.format.value}; it multiplies e4m3fn"
    return None if operand.alignment >= 16 else "must have rows that start at multiples of 16 bytes"


@register(
    "scaled_gemm",
    architectures=_SM_90,
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=functools.partial(_supports, Granularity.BLOCK),
    workspace=room_for_packed_scales,
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
    epilogues=frozenset({"none"}),
)
def block(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Multiply with 1x128 scales of a, whose columns start every 16 bytes, and 128x128 of b."""
    left, right = (a, a_scale), (b.t(), packed_scales(b_scale, workspace))
    module = library()
    with aligned(out) as target:
        if hasattr(module, "fp8_gemm_nt"):
            module.fp8_gemm_nt(left, right, target, disable_ue8m0_cast=True)
        else:
            module.gemm_fp8_fp8_bf16_nt(left, right, target)


@register(
    "scaled_gemm",
    architectures=_SM_90,
    granularity=Granularity.GROUP,
    accumulation="promoted",
    supports=functools.partial(_supports, Granularity.GROUP),
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
    epilogues=frozenset({"none"}),
    accumulates=True,
)
def group(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    """Add the product to a float32 output, with 1x128 scales of both: gradients of weights."""
    # Of rows that lie apart it reads others.
    left, right = (a.contiguous(), a_scale), (b.t().contiguous(), b_scale.t())
    module = library()
    with aligned(out) as target:
        if hasattr(module, "fp8_gemm_nt"):
            recipe = (1, 1, 128)
            module.fp8_gemm_nt(
                left, right, target, c=target, recipe=recipe, disable_ue8m0_cast=True
            )
        else:
            module.wgrad_gemm_fp8_fp8_fp32_nt(left, right, target)
