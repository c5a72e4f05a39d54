"""PyTorch's own FP8 GEMMs (cuBLASLt, CUTLASS, hipBLASLt behind ``torch._scaled_mm``).

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    FAST_LARGEST_K,
    FP8_GPUS,
    NEVER_RUN,
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


def _scaled_mm(
    fast: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    torch._scaled_mm(a, b, a_scale, b_scale, bias, None, out.dtype, fast, out=out)


def _scaled_mm_block(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    # cuBLASLt wants the padding of the scales too (`Granularity.empty_scale`).
    width, stride = b_scale.shape[1], b_scale.stride(1)
    padded = b_scale.as_strided((stride, width), (1, stride))
    torch.ops.aten._scaled_mm_v2.out(
        a, b, [a_scale], _GROUP, [], [padded], _BLOCK, [], bias, out.dtype, [], False, out=out
    )


def _recipe(name: str) -> list[int]:
    kinds = getattr(torch.nn.functional, "ScalingType", None)
    return [int(getattr(kinds, name).value)] if kinds is not None else []


_GROUP = _recipe("BlockWise1x128")
_BLOCK = _recipe("BlockWise128x128")


def _supports(granularity: Granularity, fast: bool, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (granularity, granularity):
        return Rejected(
            f"takes {granularity.value} x {granularity.value} scales, "
            f"not {have[0].value} x {have[1].value}"
        )
    if fast and problem.k > FAST_LARGEST_K:
        return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
    return _takes_formats_and_sizes(problem, device)


def _supports_block(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.GROUP, Granularity.BLOCK):
        return Rejected(f"takes 1x128 x 128x128 scales, not {have[0].value} x {have[1].value}")
    if device.architecture != "sm_90":
        return Rejected(f"cuBLASLt has these scales on sm_90 only, not {device.architecture}")
    if not _GROUP or not _BLOCK:
        return Rejected(f"torch {torch.__version__} has no torch.nn.functional.ScalingType")
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format not in (Format.E4M3FN, Format.E4M3FNUZ):
            return Rejected(f"cuBLASLt has these scales for E4M3 only; {name} is {operand.format}")
    if problem.k % 128 or problem.n % 128:
        return Rejected(f"n and k must be multiples of 128; n={problem.n}, k={problem.k}")
    if problem.m % 4:
        return Rejected(f"m must be a multiple of 4 (16-byte rows of scales); m={problem.m}")
    return _takes_formats_and_sizes(problem, device)


def _takes_formats_and_sizes(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    fnuz = device.architecture == "gfx942"
    fours = {Format.E4M3FNUZ if fnuz else Format.E4M3FN}
    formats = fours | {Format.E5M2FNUZ if fnuz else Format.E5M2}
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format not in formats:
            return Rejected(f"{name} is {operand.format.value}, which {device} does not multiply")
    if problem.a.format not in fours and problem.b.format not in fours:
        return Rejected("does not multiply E5M2 by E5M2")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.n % 16 or problem.k % 16:
        return Rejected(f"n and k must be multiples of 16; n={problem.n}, k={problem.k}")
    if problem.a.alignment < 16 or problem.b.alignment < 16:
        return Rejected("operands must be 16-byte aligned")
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16 here, not {problem.out_format.value}")
    if problem.out_strided:
        return Rejected("writes contiguous outputs only")
    return ACCEPTED


for _granularity in (Granularity.TENSOR, Granularity.ROW):
    for _fast in (False, True):
        register(
            "scaled_gemm",
            name=f"scaled_mm_{_granularity.suffix}" + ("_fast" if _fast else ""),
            architectures=FP8_GPUS,
            unmeasured=NEVER_RUN,
            granularity=_granularity,
            accumulation="fast" if _fast else "promoted",
            supports=functools.partial(_supports, _granularity, _fast),
            kernel_err_bound=FAST_KERNEL_ERR_BOUND if _fast else PROMOTED_KERNEL_ERR_BOUND,
        )(functools.partial(_scaled_mm, _fast))

register(
    "scaled_gemm",
    name="scaled_mm_block",
    architectures=FP8_GPUS,
    unmeasured=NEVER_RUN,
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=_supports_block,
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
)(_scaled_mm_block)
