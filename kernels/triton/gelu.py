"""GELU for kernels of this folder, whose files are part of the digests of rows measured without it.

A kernel for GELU is the same code with another `tail`: a function of this module, which is always
loaded with the kernels. It binds launches of epilogues with GELU; those of others stay theirs.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl

from lokakern.jit import Launch, TritonLauncher
from lokakern.kernels.triton import gemm_norm, norm_pieces, norm_quantize

ACTIVATIONS = frozenset({"gelu", "gelu_tanh"})
_tail = norm_pieces.tail


@triton.jit
def activated_by_gelu(z: tl.tensor, BY_TANH: tl.constexpr) -> tl.tensor:
    """GELU as ``z (1 / (1 + 2^(z p(z^2))))``, see gelu.cuh of the kernels in CUDA."""
    square = z * z
    if BY_TANH:
        p = tl.fma(square, -0.10294324, -2.3022082)
    else:
        p = tl.fma(square, -4.25724256e-9, 3.38525126e-7)
        p = tl.fma(square, p, -1.06554126e-5)
        p = tl.fma(square, p, 1.53404442e-4)
        p = tl.fma(square, p, 1.15744762e-4)
        p = tl.fma(square, p, -0.10486605)
        p = tl.fma(square, p, -2.3021965)
    # z / (1.0 + ...) by tanh would spill 8 bytes on sm_100 in tiles of 128 x 256.
    return z * (1.0 / (1.0 + tl.exp2(z * p)))


@triton.jit
def tail(
    z: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    residual: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    column: tl.tensor,
    row: tl.tensor,
    residual_stride: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    column_known: tl.tensor,
    known: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """As `norm_pieces.tail`; LAST is "gelu" or "gelu_tanh"."""
    z = _tail(
        z, norm_weight, norm_bias, residual, first, second, column, row, residual_stride,
        first_stride, second_stride, column_known, known, HAS_WEIGHT, HAS_BIAS, "none", "none",
    )  # fmt: skip
    z = activated_by_gelu(z, LAST == "gelu_tanh")
    return _tail(
        z, norm_weight, norm_bias, residual, first, second, column, row, residual_stride,
        first_stride, second_stride, column_known, known, False, False, "none", RESIDUAL,
    )  # fmt: skip


def _with_gelu(function: Any) -> FunctionType:
    """A kernel's function with the `tail` of this module, under its name here."""
    names = {**function.__globals__, "tail": tail, "__name__": __name__}
    made = FunctionType(function.__code__, names)
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    return made


gemm_norm_kernel = triton.jit(do_not_specialize=["m"])(_with_gelu(gemm_norm.gemm_norm_kernel.fn))
norm_quantize_kernel = triton.jit(do_not_specialize=["rows"])(
    _with_gelu(norm_quantize.norm_quantize_kernel.fn)
)


class Launcher(TritonLauncher):
    """Launches a kernel, or where a constant is one of `ACTIVATIONS`, the one with GELU."""

    def __init__(self, function: Any, with_gelu: Any) -> None:
        super().__init__(function)
        self._with_gelu = with_gelu

    def bind(
        self,
        specialized: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> Launch:
        if ACTIVATIONS.isdisjoint(constants):
            return super().bind(specialized, constants, num_warps, num_stages)
        return Launch(self._with_gelu, specialized, constants, num_warps, num_stages)


def _launching(module: ModuleType, function: Any, with_gelu: Any) -> None:
    vars(module)["_launch"] = Launcher(function, with_gelu)


_launching(gemm_norm, gemm_norm.gemm_norm_kernel, gemm_norm_kernel)
_launching(norm_quantize, norm_quantize.norm_quantize_kernel, norm_quantize_kernel)
