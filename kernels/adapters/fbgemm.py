"""FP8 GEMMs of FBGEMM GenAI and of MSLK, its successor: CUTLASS, scales of rows and of 1x128.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

Both have the same GEMMs, in `torch.ops.mslk` and `torch.ops.fbgemm`, FBGEMM a quantizer of rows,
too. That has a floor: of a row with nothing above 1/512 it keeps fewer bits, or none, and so of
most gradients. What is not adapted, and why: `f8f8bf16_tensorwise` wants its scale on the host,
`f8f8bf16` the product of two, which may underflow, and `f8f8bf16_cublas` leaks a handle at each
call; `f8f8bf16_blockwise` wants 128x128 scales of activations; grouped GEMMs other than the batched
one begin their groups at the first row, and write all rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
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
    PLAIN,
    Device,
    Epilogue,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

LIBRARY = declare(
    Library(
        name="fbgemm",
        # MSLK 1.0 needs CUDA 12; FBGEMM before 1.4 gave wrong results by shape.
        packages=(
            Package("mslk-cuda", ">=1.1,<2", ("mslk",)),
            Package("fbgemm-gpu-genai", ">=1.4,<2", ("fbgemm_gpu",)),
        ),
    )
)
_UNMEASURED = {"sm_100": "written, never run: no such GPU was at hand"}


SMALLEST_AMAX = 1 / 512  # below which FBGEMM's quantizer takes its scale from this
LARGEST_QUANTIZED_K = 24576  # a row in 48 KiB of shared memory


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
    b_scale: Tensor | None,
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


# --- groups of equal rows


@register(
    "scaled_gemm",
    architectures=frozenset({"sm_90", "sm_100"}),
    unmeasured=_UNMEASURED,
    granularity=Granularity.ROW,
    accumulation="fast",
    supports=lambda problem, device: _supports_batches(problem, device),
    workspace=lambda *operands: _bias_of_groups(*operands),
    kernel_err_bound=FAST_KERNEL_ERR_BOUND,
    batched=True,
    equal_groups=True,
)
def rowwise_batched_fast(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    """Multiply each group's rows by its weight; each group wants a bias of its own, in float32."""
    groups, n = epilogue.groups, out.shape[1]
    if bias is not None:
        bias = workspace[0].copy_(bias)
    with aligned(out) as target:
        operators().f8f8bf16_rowwise_batched(
            a.view(groups, -1, a.shape[1]), b.t().view(groups, n, -1), a_scale.view(groups, -1),
            b_scale.view(groups, n), bias, True, target.view(groups, -1, n),
        )  # fmt: skip


def _bias_of_groups(
    a: Tensor, _a_scale: Tensor, b: Tensor, _b_scale: Tensor, out: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    groups = rest[-1].groups if rest and isinstance(rest[-1], Epilogue) else 1
    return (torch.empty((groups, b.shape[1] // groups), dtype=torch.float32, device=a.device),)


def _supports_batches(problem: Problem, device: Device) -> Support:
    if problem.batch == 1:
        return Rejected("takes groups only")
    if problem.batch * max(problem.m, problem.n) * max(problem.n, problem.k) >= 2**31:
        return Rejected("counts elements in 32 bits")
    return _supports_rows(True, problem, device)


# --- rows, with FBGEMM's own quantizer


def quantized_with_floor(_which: str, rows: Tensor) -> QuantizedTensor:
    """What FBGEMM's quantizer makes of rows ``[rows, k]``, in stock PyTorch."""
    amax = rows.float().abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST_AMAX)
    scale = amax / torch.full_like(amax, Format.E4M3FN.maximum)
    data = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    return QuantizedTensor(numerics.cast(rows.float() / scale, data), scale, Granularity.ROW)


def _quantize_and_multiply(
    fast: bool,
    a: Tensor,
    b: Any,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    quantize = operators().quantize_fp8_per_row
    data, scale = quantize(a.contiguous())  # it reads one row after the other
    if type(b) is QuantizedTensor:
        b_data, b_scale = b.data, b.scale
    else:
        b_data, b_scale = quantize(b.t().contiguous())
    _rowwise(fast, data, scale, b_data.t(), b_scale, out, bias, workspace)


def _bias_beside_weight(a: Tensor, b: Any) -> tuple[Tensor, ...]:
    return (torch.empty(b.shape[1], dtype=torch.float32, device=a.device),)


def _supports_quantizing(fast: bool, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    here = LIBRARY.here
    if here is not None and here[0].name == "mslk-cuda":
        return Rejected("MSLK has no such quantizer")
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"quantizes bfloat16, not {problem.a.format.value}")
    if not problem.prepared and problem.b.format is not Format.BFLOAT16:
        return Rejected(f"quantizes bfloat16, not {problem.b.format.value}")
    if problem.k > LARGEST_QUANTIZED_K:
        return Rejected(f"quantizes rows of {LARGEST_QUANTIZED_K} elements at most; k={problem.k}")
    quantized = Operand(Format.E4M3FN, Granularity.ROW)
    b = problem.b if problem.prepared else replace(quantized, layout=Layout.COLUMN)
    scaled = replace(problem, op="scaled_gemm", a=quantized, b=b, prepared=False)
    return _supports_rows(fast, scaled, device)


for _fast in (False, True):
    register(
        "gemm",
        name="quantized_rowwise" + ("_fast" if _fast else ""),
        architectures=frozenset({"sm_90", "sm_100"}),
        unmeasured=_UNMEASURED,
        granularity=Granularity.ROW,
        accumulation=("fast" if _fast else "promoted") + "+fbgemm",
        supports=functools.partial(_supports_quantizing, _fast),
        workspace=_bias_beside_weight,
        kernel_err_bound=FAST_KERNEL_ERR_BOUND if _fast else PROMOTED_KERNEL_ERR_BOUND,
        quantized_as=quantized_with_floor,
    )(functools.partial(_quantize_and_multiply, _fast))


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
