"""The public functions on tensors: check once, choose once, then allocate and launch."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern import autograd, selection
from lokakern.arguments import budget_of
from lokakern.chooser import Chooser, after_miss, check_on_miss, fastest_within, only
from lokakern.errors import FormatError, ShapeError
from lokakern.multiply import multiply
from lokakern.multiply import scaled_gemm as scaled_gemm
from lokakern.normalizing import gemm_norm as gemm_norm
from lokakern.normalizing import gemm_norm_by, norm_quantize_by
from lokakern.normalizing import norm_quantize as norm_quantize
from lokakern.operands import (
    device_of,
    gemm_problem,
    is_traced,
    operand_of,
)
from lokakern.problems import format_named
from lokakern.quantizing import quantize as quantize
from lokakern.quantizing import quantize_by, quantize_transpose_by
from lokakern.quantizing import quantize_transpose as quantize_transpose
from lokakern.registry.register import Kernel
from lokakern.sampled_check import watch_of_gemm
from lokakern.table import Table
from lokakern.types import (
    ErrorBudget,
    Format,
    Problem,
    QuantizedTensor,
)

_PLANS: dict[Any, Table] = {}
selection.on_new_snapshot(_PLANS.clear)


def gemm(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    *,
    budget: ErrorBudget | float | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    distribution: str | Sequence[str] | None = None,
    on_miss: str = "bf16",
    check: str | None = None,
) -> Tensor:
    """Multiply ``a`` by ``b`` with the fastest kernel inside ``budget``.

    The kernel's error is within the budget on the distributions on which it was measured (X1 to X14
    of ``list distributions``, or those of ``distribution``), not on every input: with columns that
    have a common mean, and a weight whose rows sum to zero, a product may lose all of its digits.
    If you need more, let ``check`` compare rows of the actual operands, or `Probe` judge the layer.

    Quantizing is part of it and of its time. A call that needs gradients is differentiated as the
    unquantized product, with unquantized kernels.

    Args:
        a: Left operand, ``[m, k]``, bfloat16 or float32, any strides.
        b: Right operand, ``[k, n]``, same dtype and device as ``a``; ``weight.t()`` is the fast
            layout. Or a weight from `prepare_weight`, which is not quantized again.
        budget: Largest accepted row error against a float64 product, or an `ErrorBudget`, over
            measured distributions. None means the unquantized kernel, or the budget a weight was
            prepared for.
        bias: ``[n]``, dtype of ``a``, added before the output is rounded.
        out: Where to write, ``[m, n]``, dtype of ``a``, columns contiguous; may be a slice.
        distribution: Input distributions to judge the error on; None means all realistic ones.
        on_miss: What to do where nothing was measured: "bf16" (the unquantized kernel, logged once
            and kept for ``sweep --from-misses``), "raise", or "measure" (sweep this problem now).
        check: ``"every:rows"``, such as "1000:64": at every 1000th call with operands of this kind
            64 rows are also computed in float32, and a later call issues an `ErrorBudgetWarning` if
            their error exceeds the budget (`lokakern.sampled_check`). None: what LOKAKERN_CHECK
            says when operands of this kind first come; "off": no check.

    Returns:
        ``[m, n]``, dtype of ``a``.

    Raises:
        ShapeError: The operands do not multiply, or ``out`` or ``bias`` does not fit.
        FormatError: A dtype is not supported, or dtypes differ.
        DeviceError: Operands are on different devices.
        BudgetError: The budget is not a finite, non-negative number, or the check, which may come
            from LOKAKERN_CHECK, is not ``every:rows``.
        MissError: Nothing was measured and ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
    """
    if torch.compiler.is_compiling():
        return autograd.traced_gemm(a, b, budget, bias, out, distribution, on_miss, check)
    if is_traced():
        product = autograd.plain_gemm(a, b, bias)
        return product if out is None else out.copy_(product)
    if torch.is_grad_enabled() and _needs_grad(a, b, bias, out):
        return autograd.differentiable_gemm(a, b, budget, bias, out, distribution, on_miss, check)
    try:
        m, k = a.shape
        low = m & -m
        key = (
            a.dtype, k, a.stride(), a.device, a.data_ptr() & 15, low if low < 16 else 16, m > 1,
            b.signature if type(b) is QuantizedTensor
            else (b.dtype, b.shape, b.stride(), b.device, b.data_ptr() & 15),  # type: ignore[union-attr]
            budget, type(budget), distribution, on_miss, check,
            None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.device),
            None if out is None else (out.dtype, out.shape[1:], out.stride(), out.device),
        )  # fmt: skip
        table = _PLANS.get(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        key, table = None, None  # a wrong argument: the checks say which
    if table is None:
        generation = selection.generation()
        table = _plan(a, b, budget, bias, out, distribution, on_miss, check)
        if len(_PLANS) > 4096:
            _PLANS.clear()
        if key is not None and generation == selection.generation():
            _PLANS[key] = table
    m = a.shape[0]
    if out is None:
        out = a.new_empty((m, table.problem.n))
    elif out.shape[0] != m:
        raise ShapeError(f"gemm: out is {list(out.shape)}; expected [{m}, {table.problem.n}]")
    if not m or not table.problem.n:
        return out
    place = bisect_right(table.breakpoints, m) - 1
    if table.misses[place] and table.budget is not None:
        kernel = after_miss(table, m, on_miss)
        if kernel is None:
            return gemm(a, b, budget=table.budget, bias=bias, out=out, on_miss="raise",
                        distribution=table.distributions, check=check)  # fmt: skip
    else:
        kernel = table.kernels[place]
    assert kernel is not None  # a table for the device here has an unquantized kernel at least
    kernel.launch(a, b, out, bias, kernel.workspace(a, b))
    if table.watch is not None and kernel.quantizes:
        right = _unquantized(b) if type(b) is QuantizedTensor else b
        table.watch.see(a, right, out, bias, kernel.name)  # type: ignore[arg-type]
    return out


def _unquantized(b: QuantizedTensor) -> Tensor | None:
    """What a prepared weight was made of."""
    return b.source.t() if b.transposed and b.source is not None else b.source


def _needs_grad(a: Any, b: Any, bias: Any, out: Any) -> bool:
    if any(getattr(x, "requires_grad", False) for x in (a, bias, out)):
        return True
    weight = b.source if type(b) is QuantizedTensor else b
    return getattr(weight, "requires_grad", False)


def _plan(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    budget: ErrorBudget | float | None,
    bias: Tensor | None,
    out: Tensor | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
    check: str | None,
) -> Table:
    """Check everything a warm call relies on, and build the table it reads."""
    check_on_miss("gemm", on_miss)
    problem = gemm_problem(a, b, bias, out)
    if budget is None and isinstance(b, QuantizedTensor):
        budget = b.budget
    names = selection.distribution_names(distribution)
    if budget is None:  # needs no measurement, and none that cannot be read stands in its way
        return selection.unquantized_table(problem, device_of(a))
    limits = budget_of(budget)
    table = selection.table_for(problem, limits, names, device_of(a))
    site = f"gemm n={problem.n} k={problem.k} {problem.a.format.value}"
    watch = watch_of_gemm(check, limits, site + (" prepared" if problem.prepared else ""))
    if watch is not None:
        table = copy.copy(table)  # others of this problem may not be checked
        table.watch = watch
    return table


def dequantize(x: QuantizedTensor, out_format: Format | str = Format.BFLOAT16) -> Tensor:
    """``data * scale`` in float32, rounded to ``out_format``, in the orientation of ``x``.

    Raises:
        FormatError: ``out_format`` is neither bfloat16 nor float32, or ``x`` has no scales.
    """
    return _dequantize(x, out_format, fastest_within(None))


def _dequantize(x: QuantizedTensor, out_format: Format | str, choose: Chooser) -> Tensor:
    form = format_named("dequantize", out_format)
    if form.is_fp8:
        raise FormatError(f"dequantize: out_format is {form.value!r}; expected bfloat16 or float32")
    if not isinstance(x, QuantizedTensor) or x.scale is None:
        raise FormatError(
            f"dequantize: x is {type(x).__name__}; expected a QuantizedTensor with scales"
        )
    rows, columns = x.data.shape
    out = torch.empty((rows, columns), dtype=form.dtype, device=x.device)
    if rows and columns:
        operand = replace(operand_of(x.data), granularity=x.granularity)
        problem = Problem(op="dequantize", m=rows, n=1, k=columns, a=operand, out_format=form)
        kernel = choose(problem, x.data)
        kernel.launch(x.data, x.scale, out, kernel.workspace(x.data, x.scale, out))
    return out.t() if x.transposed else out


def run(
    kernel: Kernel,
    *operands: Any,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    **options: Any,
) -> Any:
    """Run one kernel as the public function of its op runs the chosen one, checks included.

    Args:
        kernel: A registered kernel.
        operands: ``a, b`` of gemm, scaled_gemm or gemm_norm, ``x`` of the others.
        bias: Of the ops with two operands.
        out: Of the ops with two operands.
        out_format: Of all ops but gemm; None means the usual.
        options: Others of the op's public function.

    Raises:
        UnsupportedError: The kernel does not take these operands; its reason is in the message.
    """
    choose = only(kernel)
    if kernel.op == "quantize":
        return quantize_by(choose, operands[0], kernel.granularity, out_format, **options)
    if kernel.op == "quantize_transpose":
        return quantize_transpose_by(choose, operands[0], kernel.granularity, out_format, **options)
    if kernel.op == "dequantize":
        return _dequantize(operands[0], out_format or Format.BFLOAT16, choose)
    if kernel.op == "norm_quantize":
        return norm_quantize_by(choose, operands[0], out_format=out_format, **options)
    a, b = operands
    if kernel.op == "gemm_norm":
        return gemm_norm_by(choose, a, b, bias=bias, out=out, out_format=out_format, **options)
    if kernel.op == "scaled_gemm":
        return multiply(a, b, choose, bias=bias, out=out, out_format=out_format, **options)
    problem = gemm_problem(a, b, bias, out)
    choose(problem, a)
    out = a.new_empty((problem.m, problem.n)) if out is None else out
    if problem.m and problem.n:
        kernel.launch(a, b, out, bias, kernel.workspace(a, b))
    return out
