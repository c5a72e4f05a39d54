"""Operands of a measurement: drawn once, laid out as many cold sets, with exact references."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.bench.distributions import distribution_named, draw_rows, draw_weight
from lokakern.device import l2_bytes
from lokakern.numerics import KernelError
from lokakern.registry import ops
from lokakern.registry.register import Kernel, fp8_format
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
)

DRAWN_ROWS = 2048  # rows drawn in float64 on the CPU; larger m repeats them in fresh order
CHECKED_ELEMENTS = 2**26  # of outputs, after timing; at least one whole set
CHECKED_SETS = 64  # of the thousands that a tiny problem has


@functools.lru_cache(maxsize=64)
def _draw(distribution: str, rows: int, k: int, seed: int, weight: bool) -> Tensor:
    recipe = distribution_named(distribution)
    found = draw_weight(recipe, rows, k, seed) if weight else draw_rows(recipe, rows, k, seed)
    return found


def drawn(
    distribution: str, rows: int, k: int, seed: int, form: Format, *, weight: bool = False
) -> Tensor:
    """Operand values in the operand's own format, on the CPU: ``[rows, k]``."""
    return _draw(distribution, rows, k, seed, weight).to(form.dtype)


def draw_ahead(cases, alive):  # TEMPORARY
    alive()


def operand_digest(*operands: Tensor | None) -> str:
    """Sixteen hex digits that tell whether two measurements saw the same values."""
    digest = hashlib.sha256()
    for x in operands:
        if x is not None:
            digest.update(x.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Case64:
    """Exact product and product of magnitudes of the drawn rows, float64."""

    exact: Tensor
    magnitude: Tensor


class Operands:
    """Everything a problem's candidates are timed on.

    Every set holds its own copy of every operand, weight, scale and output, so that a replay over
    all sets finds none of it in the cache. Rows repeat the drawn ones in an order of each set.

    Args:
        problem: What is computed.
        distribution: Name of the input distribution.
        device: Torch device.
        target: The device type (formats follow it).
        cold: Whether to make enough sets to pass 2x the last-level cache; else one set.
        seed: Of the draw and of the order of rows.
    """

    def __init__(
        self,
        problem: Problem,
        distribution: str,
        device: torch.device,
        target: Device,
        *,
        cold: bool,
        seed: int = 0,
    ) -> None:
        self.problem = problem
        self.device = device
        self.target = target
        self.form = problem.a.format if problem.op != "dequantize" else Format.BFLOAT16
        if problem.op == "scaled_gemm":
            self.form = Format.BFLOAT16
        rows = min(problem.m, DRAWN_ROWS)
        x = drawn(distribution, rows, problem.k, seed, self.form)
        w = None
        if problem.b is not None:
            w = drawn(distribution, problem.n, problem.k, seed, self.form, weight=True)
        self.digest = operand_digest(x, w)
        self.x = x.to(device)
        self.w = None if w is None else w.to(device)
        generator = torch.Generator().manual_seed(seed + 1)
        self.bias = (
            torch.randn(problem.n, generator=generator).to(problem.out_format.dtype).to(device)
            if problem.epilogue == "bias"
            else None
        )
        self._quantized: dict[Any, QuantizedTensor] = {}
        self._references: dict[Any, Case64] = {}
        set_bytes = max(problem.bytes_moved, 1)
        count = math.ceil(2 * l2_bytes() / set_bytes) if cold else 1
        # Rows under one scale stay together; elsewhere their order is fresh in every set.
        fixed = problem.a.granularity is Granularity.BLOCK
        self.order = [
            torch.arange(problem.m) % rows
            if fixed
            else self._fresh_order(rows, problem.m, generator)
            for _ in range(count)
        ]
        self.sets = [self._make_set(order) for order in self.order]

    @staticmethod
    def _fresh_order(rows: int, m: int, generator: torch.Generator) -> Tensor:
        pieces = [torch.randperm(rows, generator=generator) for _ in range(-(-m // rows))]
        return torch.cat(pieces)[:m]

    def quantized(self, which: str, form: Format, granularity: Granularity) -> QuantizedTensor:
        """The drawn rows ("x") or the weight ("w"), exactly quantized."""
        key = (which, form, granularity)
        if key not in self._quantized:
            source = self.x if which == "x" else self.w
            assert source is not None  # "w" is asked for by ops with two operands only
            self._quantized[key] = numerics.quantize(source, form, granularity)
        return self._quantized[key]

    def _tiled(self, quantized: QuantizedTensor, order: Tensor) -> tuple[Tensor, Tensor]:
        index = order.to(self.device)
        data = quantized.data.view(torch.uint8)[index].view(quantized.data.dtype)
        assert quantized.scale is not None  # made by `quantized`
        scale = quantized.granularity.empty_scale(len(order), data.shape[1], self.device)
        match quantized.granularity:
            case Granularity.TENSOR:
                return data, scale.copy_(quantized.scale)
            case Granularity.BLOCK:
                blocks = torch.arange(len(scale), device=self.device) % len(quantized.scale)
                return data, scale.copy_(quantized.scale[blocks])
        return data, scale.copy_(quantized.scale[index])

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        """Operands of one call, outputs last; see `Kernel` for the order."""
        problem = self.problem
        m, n, k = problem.m, problem.n, problem.k
        out_dtype = problem.out_format.dtype
        if problem.op == "quantize":
            x = self.x[order.to(self.device)]
            data = torch.empty((m, k), dtype=out_dtype, device=self.device)
            return x, data, problem.out_granularity.empty_scale(m, k, self.device)
        if problem.op == "dequantize":
            quantized = self.quantized("x", problem.a.format, problem.a.granularity)
            data, scale = self._tiled(quantized, order)
            return data, scale, torch.empty((m, k), dtype=out_dtype, device=self.device)
        assert problem.b is not None and self.w is not None  # the other two ops have two operands
        out = torch.empty((m, n), dtype=out_dtype, device=self.device)
        bias = None if self.bias is None else self.bias.clone()
        if problem.op == "scaled_gemm":
            left = self.quantized("x", problem.a.format, problem.a.granularity)
            right = self.quantized("w", problem.b.format, problem.b.granularity)
            assert right.scale is not None  # made by `quantized`
            scale = right.granularity.empty_scale(n, k, self.device).copy_(right.scale)
            return *self._tiled(left, order), right.data.clone().t(), scale.t(), out, bias
        a = self.x[order.to(self.device)]
        weight = self.w.clone()
        b: Tensor | QuantizedTensor = weight.t()
        if problem.prepared:
            right = self.quantized("w", problem.b.format, problem.b.granularity)
            assert right.scale is not None  # made by `quantized`
            scale = right.granularity.empty_scale(n, k, self.device).copy_(right.scale)
            b = QuantizedTensor(right.data.clone(), scale, right.granularity, True, weight)
        elif problem.b.layout is Layout.ROW:
            b = weight.t().contiguous()
        return a, b, out, bias

    def workspace_of(self, kernel: Kernel, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return (
            kernel.workspace(*operands[:2]) if kernel.op == "gemm" else kernel.workspace(*operands)
        )

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What a launch writes."""
        if self.problem.op == "quantize":
            return operands[1], operands[2]
        return (operands[2],) if self.problem.op in ("gemm", "dequantize") else (operands[4],)

    def poison(self) -> None:
        """Fill every output with what no kernel may leave there."""
        for operands in self.sets:
            for out in self.outputs(operands):
                if out.dtype.itemsize == 1:
                    out.view(torch.uint8).fill_(0xA5)
                else:
                    out.fill_(math.nan)

    def reference(self, kernel: Kernel) -> Case64:
        """Exact result of the operands as the kernel sees them, for the drawn rows."""
        problem = self.problem
        if problem.op == "gemm":
            fp8 = fp8_format(self.target)
            key = (kernel.granularity, kernel.b_granularity)
        else:
            fp8 = problem.a.format
            key = (problem.a.granularity, Granularity.NONE)
        if key not in self._references:
            left: Any = self.x
            right: Any = None if self.w is None else self.w.t()
            if problem.op == "gemm" and kernel.quantizes:
                left = self.quantized("x", fp8, kernel.granularity)
                right = self.quantized("w", fp8, kernel.b_granularity).t()
            elif problem.op != "gemm":
                left = self.quantized("x", problem.a.format, problem.a.granularity)
                if problem.b is not None:
                    right = self.quantized("w", problem.b.format, problem.b.granularity).t()
            if right is None:
                exact = ops.exact(left)
                self._references[key] = Case64(exact, torch.zeros_like(exact))
            else:
                self._references[key] = Case64(
                    ops.product(left, right, self.bias), ops.magnitude(left, right, self.bias)
                )
        return self._references[key]

    def check(self, kernel: Kernel) -> tuple[KernelError, str]:
        """Kernel error over the sets just written, and what is wrong ("" if nothing is)."""
        worst = KernelError(0.0, 0.0)
        checked = 0
        pairs = list(zip(self.sets, self.order, strict=True))[:CHECKED_SETS]
        for operands, order in pairs:
            if checked and checked >= CHECKED_ELEMENTS:
                break
            index = order.to(self.device)
            if self.problem.op == "quantize":
                wrong = self._check_bytes(operands, index)
                if wrong:
                    return KernelError(math.inf, math.inf), wrong
                checked += operands[1].numel()
                continue
            case = self.reference(kernel)
            (out,) = self.outputs(operands)
            found = numerics.kernel_error(
                out, case.exact[index], case.magnitude[index], self.problem.out_format.unit_roundoff
            )
            worst = KernelError(
                max(worst.maximum, found.maximum), max(worst.row_p99, found.row_p99)
            )
            checked += out.numel()
        if worst.maximum > kernel.kernel_err_bound:
            return worst, f"kernel_err {worst.maximum:.3g} > {kernel.kernel_err_bound:g}"
        return worst, ""

    def _check_bytes(self, operands: tuple[Any, ...], index: Tensor) -> str:
        x, data, scale = operands
        granularity = self.problem.out_granularity
        if granularity is Granularity.BLOCK:  # rows under one scale: quantize them as they lie
            expected = numerics.quantize(x, self.problem.out_format, granularity)
            exact_data, exact_scale = expected.data, expected.scale
        else:
            expected = self.quantized("x", self.problem.out_format, granularity)
            exact_data = expected.data.view(torch.uint8)[index]
            assert expected.scale is not None  # made by `quantized`
            per_row = granularity in (Granularity.ROW, Granularity.GROUP)
            exact_scale = expected.scale[index] if per_row else expected.scale
        return compare_bytes(data, scale, exact_data, exact_scale)


def compare_bytes(
    data: Tensor, scale: Tensor, exact_data: Tensor, exact_scale: Tensor | None
) -> str:
    """What differs from the exact quantization, "" if nothing does."""
    differ = int((data.view(torch.uint8) != exact_data.view(torch.uint8)).sum())
    if exact_scale is None or differ:
        return f"{differ} of {data.numel()} bytes differ from the exact quantization"
    differ = int((scale.contiguous().view(torch.int32)
                  != exact_scale.contiguous().view(torch.int32)).sum())  # fmt: skip
    if differ:
        return f"{differ} of {scale.numel()} scales differ from the exact quantization"
    return ""
