"""The kernels that take float16, which their files do not say.

The text of a kernel's file is part of the digest of its rows, which were measured with bfloat16.
What a kernel does with float16 stands here, where it makes no row stale: it is asked as for
bfloat16 (`as_bfloat16`), runs the same program with other conversions, and `dispatch` takes its
times in bfloat16 where it has none in float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lokakern.types import Format, NormEpilogue, Problem

# Those of PyTorch and Triton convert whatever they read and write; those of CUDA have programs of
# their own, see kernels/cuda/half.py.
_TAKE_IT = ("torch.bf16", "torch.bf16_padded", "torch.norm_quantize", "torch.norm_unfused",
            "torch.norm_backward", "torch.cross_backward", "torch.bf16_relu")  # fmt: skip
_FAMILIES = (
    "torch.quantize_",
    "torch.dequantize_",
    "torch.emulated_",
    "torch.norm_emulated_",
    "triton.quantize_",
    "triton.dequantize_",
    "triton.scaled_gemm_",
    "triton.norm_quantize",
    "triton.gemm_norm_",
    "triton.gemm_block_norm_",
    "cuda.quantize_",
    "cuda.dequantize_",
    "cuda.scaled_gemm_",
    "cuda.gemm_norm_",
    "cuda.gemm_cross_",
    "cuda.norm_quantize",
    "cuda.norm_backward",
    "cuda.cross_backward",
    "cuda.activate_quantize_",
)
_WRITTEN_FOR_BFLOAT16 = "_fast"  # its sums are worth no more
_WITH_FAST = "cuda.scaled_gemm_"  # but for these, whose operands are FP8 and lose more


def is_in(problem: Problem) -> bool:
    """Whether an operand or the output is float16."""
    return Format.FLOAT16 in _formats(problem)


def as_bfloat16(problem: Problem) -> Problem:
    """The problem with bfloat16 in the place of float16, which has as many bytes."""
    right = problem.b and replace(problem.b, format=_twin(problem.b.format))
    left = replace(problem.a, format=_twin(problem.a.format))
    return replace(problem, a=left, b=right, out_format=_twin(problem.out_format))


def _twin(form: Format) -> Format:
    return Format.BFLOAT16 if form is Format.FLOAT16 else form


def refusal(kernel: str, parts: Sequence[str], problem: Problem) -> str | None:
    """Why a kernel does not take a problem with float16, or None.

    Args:
        kernel: Its name.
        parts: Those of a composition.
        problem: With float16.
    """
    if Format.BFLOAT16 in _formats(problem):
        return "operands and outputs are float16 and bfloat16; expected one of them"
    return why_not(kernel, parts)


def why_not(kernel: str, parts: Sequence[str]) -> str | None:
    """Why a kernel takes no float16 at all, or None.

    Of what it reads beside products that are FP8, and that it writes as FP8, no problem tells.
    """
    for name in parts or (kernel,):
        if not _takes(name):
            return "takes no float16" if name == kernel else f"{name}: takes no float16"
    return None


def _takes(name: str) -> bool:
    known = name in _TAKE_IT or name.startswith(_FAMILIES)
    written_for_it = name.endswith(_WRITTEN_FOR_BFLOAT16) and not name.startswith(_WITH_FAST)
    return known and not written_for_it


def _formats(problem: Problem) -> Iterator[Format]:
    yield problem.a.format
    yield problem.out_format
    if problem.b is not None:
        yield problem.b.format


class InHalf(tuple[Any, ...]):
    """Of a named tuple of what a kernel computes, in float16: no cache takes it for bfloat16's."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:  # a tuple has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self))


def has_half(a: Any, out: Any, epilogue: NormEpilogue | None = None) -> bool:
    """Whether a launch of op gemm_norm is with float16.

    Args:
        a: The left operand.
        out: The output.
        epilogue: Read where both are FP8, and a composition has quantized a.
    """
    for x in (a, out):
        if isinstance(x, torch.Tensor):
            return x.dtype is torch.float16
    return epilogue is not None and any(
        x.dtype is torch.float16 for x in epilogue if isinstance(x, torch.Tensor)
    )
