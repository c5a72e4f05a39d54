"""Runs of kernels with a norm, checked against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from lokakern import numerics
from lokakern.functional.norm_checks import gemm_norm_problem, norm_quantize_problem, scale_of
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.norm import norm_named
from lokakern.registry import ops
from lokakern.registry.register import Kernel, fp8_format
from lokakern.selection.arguments import device_of
from lokakern.types import (
    Format,
    Granularity,
    NormEpilogue,
    QuantizedTensor,
    Rejected,
    empty_data,
)
from tests.support.kernel_cases import ACTIVATING, CROSSING, RECTIFYING, cases, drawn

LASTS = (
    {}, {"activation": "relu"}, {"activation": "hardswish"}, {"activation": "silu"},
    {"activation": "gelu"}, {"activation": "gelu_tanh"},
    {"gate": 1}, {"x0": 1, "x": 1}, {"residual": 1}, {"residual": 1, "residual_last": True},
    {"gate": 1, "residual": 1, "residual_last": True},
    {"activation": "hardswish", "residual": 1},
)  # fmt: skip
OUTPUTS = (Granularity.NONE, Granularity.ROW, Granularity.GROUP, Granularity.TENSOR)
VECTORS = ((), ("bias",), ("norm_weight",), ("bias", "norm_weight", "norm_bias"))
# Of all but those that normalize nothing, which have tests of their own.
_OTHERS = (*ACTIVATING, *CROSSING, *RECTIFYING)
CASES = [case for case in cases(*ops.NORM_OPS) if case.values[0] not in _OTHERS]


def epilogue_of(
    norm: str, last: dict[str, Any], vectors: tuple[str, ...], wide: bool, m: int, n: int,
    where: str,
) -> NormEpilogue:  # fmt: skip
    fields = {
        name: drawn(m, n, where=where, seed=10 + i) if value == 1 and value is not True else value
        for i, (name, value) in enumerate(sorted(last.items()))
    }
    dtype = torch.float32 if wide else torch.bfloat16
    for i, name in enumerate(vectors):
        fields[name] = drawn(n, where=where, seed=20 + i, dtype=dtype)
    return NormEpilogue(norm_named(norm), **fields)


def poisoned(form: Format, granularity: Granularity, m: int, n: int, where: str, scale: Any) -> Any:
    device = torch.device(where)
    if not form.is_fp8:
        return torch.full((m, n), math.nan, dtype=form.dtype, device=device)
    data = empty_data(m, n, form.dtype, device)
    data.view(torch.uint8).fill_(form.nan_byte)
    if granularity is not Granularity.TENSOR:
        scale = granularity.empty_scale(m, n, device).fill_(math.nan)
    return QuantizedTensor(data, scale, granularity)


class Run:
    """One launch of a kernel on rows and, of a GEMM, a weight."""

    def __init__(
        self, kernel: Kernel, x: torch.Tensor, w: torch.Tensor | None, epilogue: NormEpilogue,
        granularity: Granularity = Granularity.NONE, out: Any = None,
    ) -> None:  # fmt: skip
        device = device_of(x)
        fp8 = fp8_format(device)
        form = fp8 if granularity is not Granularity.NONE else Format.of(x.dtype)
        where, kind = x.device.type, (form, granularity)
        n = x.shape[1] if w is None else len(w)
        bounded = epilogue.norm.kind != "none" and epilogue.form.last not in ("gate", "cross")
        given = "static" if bounded and not epilogue.residual_last else 1 / 16
        scale = None
        if granularity is Granularity.TENSOR:
            scale = scale_of("a test", given, epilogue, n, form, x.device)
        if w is None:
            self.operands: tuple[Any, ...] = (x,)
            problem = norm_quantize_problem(x, epilogue, kind, scale)
            self.sums = ops.norm_rows(x)
        else:
            quantized = kernel.granularity is not Granularity.NONE
            left: Any = numerics.quantize(x, fp8, kernel.granularity) if quantized else x
            right: Any = numerics.quantize(w, fp8, kernel.b_granularity).t() if quantized else w.t()
            given_quantized = quantized and not kernel.quantizes
            self.operands = (left, right) if given_quantized else (x, w.t())
            problem = gemm_norm_problem(*self.operands, epilogue, out, kind, scale)
            self.sums = ops.norm_sums(left, right)
        self.kernel, self.epilogue, self.form = kernel, epilogue, form
        self.problem = replace(problem, out_format=form, out_granularity=granularity)
        self.answer = kernel.supports(self.problem, device)
        self.out = poisoned(form, granularity, len(x), n, where, scale) if out is None else out
        if not isinstance(self.answer, Rejected):
            self.launch()

    def launch(self) -> None:
        operands = (*self.operands, self.out, self.epilogue)
        self.kernel.launch(*operands, self.kernel.workspace(*operands))

    def error(self) -> float:
        exact, magnitude = ops.normalized(*self.sums, self.epilogue)
        return norm_kernel_error(self.out, exact, magnitude, self.form.unit_roundoff).maximum

    def check(self) -> bool:
        """Whether the kernel takes the problem; it must be right then."""
        if isinstance(self.answer, Rejected):
            assert self.answer.reason
            return False
        error, bound = self.error(), self.kernel.bound_at(self.problem)
        assert error <= bound, f"{self.kernel} {self.problem}: {error:.3g} > {bound:g}"
        return True

    def values(self) -> torch.Tensor:
        if isinstance(self.out, torch.Tensor):
            return self.out.float()
        return numerics.dequantize(self.out)
