"""FlashInfer: FP8 GEMMs of one scale a tensor (cuBLASLt) and of 1x128 by 128x128, and a norm.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb
z = rms(x) * weight + bias

The GEMMs read what they are given as packed, whatever its strides. All compile when they are first
launched, with nvcc and ninja. The norm reads a weight as bfloat16, whatever it is, and has no bias:
it is added to rows that are rounded. `rmsnorm_quant` is not adapted: NaN becomes 448 in it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from lokakern.kernels.adapters import norms
from lokakern.kernels.adapters.layouts import aligned, packed_scales, room_for_packed_scales
from lokakern.registry.libraries import Library, Package, declare, import_modules
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
    Rejected,
    Support,
)

LIBRARY = declare(
    Library(
        name="flashinfer",
        packages=(Package("flashinfer-python", ">=0.6,<0.8", ("flashinfer",)),),
    )
)
_SM_90 = frozenset({"sm_90"})  # 0.5 and 0.6 gave wrong results on sm_100
_UNMEASURED = {"sm_90": "right on an NVIDIA H200 where it was tried, not timed"}
_NEVER_RUN = {"sm_90": "written, never run: it came after its library was last tried"}


@functools.cache
def library() -> Any:
    """Its GEMMs, imported when the first is launched."""
    import_modules(LIBRARY)
    return importlib.import_module("flashinfer.gemm")


@functools.cache
def library_of_norms() -> Any:
    import_modules(LIBRARY)
    return importlib.import_module("flashinfer.norm")


def _supports_tensors(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.TENSOR, Granularity.TENSOR):
        return Rejected(f"takes tensor x tensor scales, not {have[0].value} x {have[1].value}")
    if problem.k > FAST_LARGEST_K:
        return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
    if problem.k % 16 or problem.n % 16:
        return Rejected(f"n and k must be multiples of 16; n={problem.n}, k={problem.k}")
    return _takes_formats_and_layouts(problem)


def _supports_groups(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.GROUP, Granularity.BLOCK):
        return Rejected(f"takes 1x128 x 128x128 scales, not {have[0].value} x {have[1].value}")
    if problem.k % 128 or problem.n % 64 or problem.m % 4:  # it reads scales of 4 rows at a time
        return Rejected(
            f"k must be a multiple of 128, n of 64 and m of 4; m={problem.m}, n={problem.n}, "
            f"k={problem.k}"
        )
    return _takes_formats_and_layouts(problem)


def _takes_formats_and_layouts(problem: Problem) -> Support:
    assert problem.b is not None  # an op with two operands
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not Format.E4M3FN:
            return Rejected(f"is given e4m3fn only; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 only")
    return ACCEPTED


@register(
    "scaled_gemm",
    architectures=_SM_90,
    unmeasured=_UNMEASURED,
    granularity=Granularity.TENSOR,
    accumulation="fast",
    supports=_supports_tensors,
    kernel_err_bound=FAST_KERNEL_ERR_BOUND,
    epilogues=frozenset({"none"}),
)
def tensor_fast(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Multiply a batch of one; sums are never promoted."""
    left, right = a.contiguous()[None], b.t().contiguous().t()[None]
    with aligned(out) as target:
        library().bmm_fp8(left, right, a_scale, b_scale, out.dtype, target[None], "cublas")


@register(
    "scaled_gemm",
    architectures=_SM_90,
    unmeasured=_UNMEASURED,
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=_supports_groups,
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
    """Multiply; scales of a are read as [k / 128, m], with rows that start every 16 bytes."""
    columns, stride = a_scale.shape[1], a_scale.stride(1)
    left_scale = a_scale.as_strided((columns, stride), (stride, 1))
    right_scale = packed_scales(b_scale, workspace)
    left, right = a.contiguous(), b.t().contiguous()
    with aligned(out) as target:
        library().fp8_blockscale_gemm_sm90(left, right, left_scale, right_scale, target)


@register(
    "norm_quantize",
    architectures=_SM_90,
    unmeasured=_NEVER_RUN,
    accumulation="rounded",
    supports=functools.partial(norms.supports, ("rms",)),
    workspace=norms.room_for_vectors,
    kernel_err_bound=norms.ROUNDED_BOUND,
)
def rms_norm(x: Tensor, out: Tensor, epilogue: NormEpilogue, workspace: tuple[Tensor, ...]) -> None:
    """Normalize, and add a bias where there is one."""
    if not len(x):
        return
    weight = norms.as_bfloat16(epilogue.norm_weight, workspace[0][0], 1.0)
    with aligned(out) as target:
        library_of_norms().rmsnorm(x.contiguous(), weight, epilogue.norm.eps, target)
        if epilogue.norm_bias is not None:
            target += epilogue.norm_bias
