"""FP8 GEMMs of FBGEMM GenAI and of MSLK, its successor: CUTLASS, scales of rows and of 1x128.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

Both have the same operators, in `torch.ops.mslk` and `torch.ops.fbgemm`. What is not adapted, and
why: `f8f8bf16_tensorwise` wants its scale on the host, `f8f8bf16` the product of two, which may
underflow, and `f8f8bf16_cublas` leaks a handle at each call; `f8f8bf16_blockwise` wants 128x128
scales of activations. Their quantizers have floors and rounding of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lokakern.kernels.adapters.layouts import aligned
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
    Problem,
    Rejected,
    Support,
)

_NEVER = "no machine with it has been at hand"
LIBRARY = declare(
    Library(
        name="fbgemm",
        # MSLK 1.0 needs CUDA 12; FBGEMM before 1.4 gave wrong results by shape.
        packages=(
            Package("mslk-cuda", ">=1.1,<2", ("mslk",)),
            Package("fbgemm-gpu-genai", ">=1.4,<2", ("fbgemm_gpu",)),
        ),
        never_run=_NEVER,
    )
)
_UNMEASURED = dict.fromkeys(("sm_90", "sm_100"), f"written, never run: {_NEVER}")


@functools.cache
def operators() -> Any:
    """The operators, imported when the first is launched."""
    import_modules(LIBRARY)
    here = LIBRARY.here
    return torch.ops.mslk if here is not None and here[0].name == "mslk-cuda" else torch.ops.fbgemm


# --- scales of rows


def _rowwise(
    fast: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    if bias is not None and bias.dtype is not torch.float32:
        # To a bias in bfloat16 it adds the product rounded to bfloat16: two roundings.
        bias = workspace[0].copy_(bias)
    with aligned(out) as target:
        operators().f8f8bf16_rowwise_out(a, b.t(), a_scale, b_scale, target, bias, fast)


def _float32_bias(a: Tensor, _a_scale: Tensor, b: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    return (torch.empty(b.shape[1], dtype=torch.float32, device=a.device),)


def _supports_rows(fast: bool, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.ROW, Granularity.ROW):
        return Rejected(f"takes row x row scales, not {have[0].value} x {have[1].value}")
    if fast and problem.k > FAST_LARGEST_K:
        return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
    if problem.k % 16 or problem.n % 8:
        return Rejected(f"k must be a multiple of 16 and n of 8; k={problem.k}, n={problem.n}")
    return _takes_formats_and_layouts(problem)


def _takes_formats_and_layouts(problem: Problem) -> Support:
    assert problem.b is not None  # an op with two operands
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not Format.E4M3FN:  # that of b is not looked at: another is misread
            return Rejected(f"multiplies e4m3fn; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 only")
    if max(problem.m * problem.n, problem.m * problem.k, problem.n * problem.k) >= 2**31:
        return Rejected("counts elements in 32 bits")
    return ACCEPTED


for _fast in (False, True):
    register(
        "scaled_gemm",
        name="rowwise" + ("_fast" if _fast else ""),
        architectures=frozenset({"sm_90", "sm_100"}),
        unmeasured=_UNMEASURED,
        granularity=Granularity.ROW,
        accumulation="fast" if _fast else "promoted",
        supports=functools.partial(_supports_rows, _fast),
        workspace=_float32_bias,
        kernel_err_bound=FAST_KERNEL_ERR_BOUND if _fast else PROMOTED_KERNEL_ERR_BOUND,
    )(functools.partial(_rowwise, _fast))


# --- 1x128 by 128x128


def _supports_groups(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.GROUP, Granularity.BLOCK):
        return Rejected(f"takes 1x128 x 128x128 scales, not {have[0].value} x {have[1].value}")
    if problem.k % 128 or problem.n % 128 or problem.m % 4:  # which it does not look at
        return Rejected(
            f"n and k must be multiples of 128 and m of 4; m={problem.m}, n={problem.n}, "
            f"k={problem.k}"
        )
    return _takes_formats_and_layouts(problem)


def _packed_scales(
    _a: Tensor, a_scale: Tensor, _b: Tensor, b_scale: Tensor, *_: Tensor | None
) -> tuple[Tensor, ...]:
    return (torch.empty(b_scale.shape, dtype=torch.float32, device=b_scale.device),)


@register(
    "scaled_gemm",
    architectures=frozenset({"sm_90"}),
    unmeasured={"sm_90": _UNMEASURED["sm_90"]},
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=_supports_groups,
    workspace=_packed_scales,
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
    epilogues=frozenset({"none"}),
)
def groupwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Multiply; the operator makes an output of its own, which is copied.

    It reads scales of a as [k / 128, m] and those of b as [k / 128, n / 128], both packed.
    """
    scales = workspace[0].copy_(b_scale)
    out.copy_(operators().f8f8bf16_groupwise(a, b.t(), a_scale.t(), scales))
