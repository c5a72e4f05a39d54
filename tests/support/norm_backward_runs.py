"""Runs of norm_backward kernels, checked against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern.gradients import NormGradients
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.norm import norm_named
from lokakern.numerics import kernel_error
from lokakern.problems import make_problem
from lokakern.registry.float16 import as_bfloat16
from lokakern.registry.norm_gradients import norm_gradients
from lokakern.registry.register import Kernel
from lokakern.selection.arguments import device_of
from lokakern.types import (
    Format,
    Granularity,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
    empty_data,
)
from tests.support.kernel_cases import drawn

NORMS = ("layer", "rms", *(f"block_rms({n})" for n in (8, 64, 128, 256)), "none")
LASTS = ("none", "relu", "hardswish", "silu", "gelu", "gelu_tanh")
VECTORS = ((), ("bias",), ("norm_weight",), ("norm_bias",), ("bias", "norm_weight", "norm_bias"))
# Format of dy in FP8 if any, and whether it is wanted in bfloat16.
OUTPUTS = (
    (Format.E5M2, True), (Format.E4M3FN, False), (None, True), (Format.E5M2, False)
)  # fmt: skip


class Variant(NamedTuple):
    norm: str = "layer"
    last: str = "none"
    vectors: tuple[str, ...] = ("bias", "norm_weight", "norm_bias")
    wide: bool = True  # vectors in float32
    out: Format | None = Format.E5M2
    plain: bool = True
    granularity: Granularity = Granularity.GROUP


# Each norm with each activation, output and choice of vectors, but not all with all.
VARIANTS = [
    Variant(norm, last, VECTORS[(3 * i + j) % 5], (i + j) % 2 == 0, *OUTPUTS[(i + j) % 4])
    for i, norm in enumerate(NORMS)
    for j, last in enumerate(LASTS)
]


def epilogue_of(
    variant: Variant, m: int, k: int, where: str, half: Format = Format.BFLOAT16
) -> NormEpilogue:
    dtype = torch.float32 if variant.wide else half.dtype
    vectors = {
        name: drawn(k, where=where, seed=20 + i, dtype=dtype)
        for i, name in enumerate(variant.vectors)
    }
    residual = None
    if variant.plain and variant.out:
        residual = drawn(m, k, where=where, seed=30, dtype=half.dtype)
    is_cross = variant.last == "cross"
    return NormEpilogue(
        norm_named(variant.norm), activation="none" if is_cross else variant.last,
        residual=residual, x0=drawn(m, k, where=where, seed=40, dtype=half.dtype) if is_cross
        else None, **vectors,
    )  # fmt: skip


def poisoned(
    variant: Variant, epilogue: NormEpilogue, m: int, k: int, where: str,
    half: Format = Format.BFLOAT16,
) -> NormGradients:  # fmt: skip
    device = torch.device(where)

    def quantized(rows: int, columns: int) -> QuantizedTensor | None:
        if variant.out is None:
            return None
        data = empty_data(rows, columns, variant.out.dtype, device)
        data.view(torch.uint8).fill_(variant.out.nan_byte)
        scale = variant.granularity.empty_scale(rows, columns, device).fill_(math.nan)
        return QuantizedTensor(data, scale, variant.granularity)

    dy = torch.full((m, k), math.nan, dtype=half.dtype, device=device) if variant.plain else None
    count = sum(x is not None for x in (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias))
    sums = torch.full((count, k), math.nan, device=device) if count else None
    return NormGradients(dy, quantized(m, k), quantized(k, m), sums)


def problem_of(
    variant: Variant, epilogue: NormEpilogue, m: int, k: int, half: Format = Format.BFLOAT16
) -> Problem:
    form = half if variant.out is None else variant.out
    granularity = Granularity.NONE if variant.out is None else variant.granularity
    return make_problem(
        "norm_backward", (m, k), a=Operand(half), epilogue=epilogue.name(), out_format=form,
        out_granularity=granularity,
    )  # fmt: skip


class Run:
    """One launch of a kernel on gradients and what was normalized."""

    def __init__(
        self, kernel: Kernel, variant: Variant, m: int, k: int, where: str,
        dd: Tensor | None = None, y: Tensor | None = None, on_host: bool = False,
        half: Format = Format.BFLOAT16,
    ) -> None:  # fmt: skip
        self.kernel, self.variant = kernel, variant
        self.dd = drawn(m, k, where=where, seed=1, dtype=half.dtype) if dd is None else dd
        self.y = drawn(m, k, where=where, seed=2, dtype=half.dtype) if y is None else y
        self.half = half
        self.epilogue = epilogue_of(variant, m, k, where, half)
        self.problem = problem_of(variant, self.epilogue, m, k, half)
        answers = kernel.supports_problem if on_host else kernel.supports
        asked = as_bfloat16(self.problem) if on_host else self.problem
        self.answer = answers(asked, device_of(self.y))
        self.outputs = poisoned(variant, self.epilogue, m, k, where, half)
        if not isinstance(self.answer, Rejected):
            self.launch()

    def launch(self) -> None:
        operands = (self.dd, self.y, self.outputs, self.epilogue)
        self.kernel.launch(*operands, self.kernel.workspace(*operands))

    def errors(self) -> dict[str, float]:
        exact = norm_gradients(self.dd, self.y, self.epilogue)
        out, found = self.outputs, {}
        if out.dy is not None:
            roundoff = self.half.unit_roundoff
            found["dy"] = kernel_error(out.dy, exact.dy, exact.size, roundoff).maximum
        for name, made, value, size in (
            ("quantized", out.quantized, exact.dy, exact.size),
            ("quantized_t", out.quantized_t, exact.dy.t(), exact.size.t()),
        ):
            if made is not None:
                roundoff = made.format.unit_roundoff
                found[name] = norm_kernel_error(made, value, size, roundoff).maximum
        if out.sums is not None:
            roundoff = Format.FLOAT32.unit_roundoff
            found["sums"] = kernel_error(out.sums, exact.sums, exact.sums_size, roundoff).maximum
        return found

    def check(self) -> bool:
        """Whether the kernel takes the problem; it must be right then."""
        if isinstance(self.answer, Rejected):
            assert self.answer.reason
            return False
        errors, bound = self.errors(), self.kernel.bound_at(self.problem)
        assert max(errors.values()) <= bound, f"{self.kernel} {self.problem}: {errors}"
        return True
