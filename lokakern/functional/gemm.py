"""`gemm`: checks and dispatch on the first call, then launches; autograd and the compiled op."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import ShapeError, UnsupportedError
from lokakern.functional.checks import (
    check_bias,
    check_out,
    gemm_problem,
    is_traced,
    note_write,
    warn_once,
)
from lokakern.functional.traced import budget_of_limits, limits_of, names_of
from lokakern.native import forget, recorded_op, replayed
from lokakern.sampled_check import watch_of_gemm
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of
from lokakern.selection.misses import after_miss, check_on_miss
from lokakern.selection.table import Table
from lokakern.types import (
    ErrorBudget,
    Granularity,
    QuantizedTensor,
)

_PLANS: dict[Any, Table] = {}
dispatcher.on_new_snapshot(_PLANS.clear)
dispatcher.on_new_snapshot(forget)


@replayed
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
    """Multiply ``a`` by ``b`` with the fastest kernel within ``budget``.

    The kernel's error is within the budget on the distributions on which it was measured (X1 to X10
    and X12 to X14 of ``list distributions``, or those of ``distribution``), not on every input:
    with columns that have a common mean, and a weight whose rows sum to zero, a product may lose
    all digits. To verify the error on actual operands, use ``check`` or `Probe`.

    The call quantizes its operands, and measured times include that. Gradients are those of the
    unquantized product, computed by unquantized kernels.

    Args:
        a: Left operand, ``[m, k]``, bfloat16, float16 or float32, any strides.
        b: Right operand, ``[k, n]``, same dtype and device as ``a``; ``weight.t()`` is the fast
            layout. Or a weight from `prepare_weight`, which is not quantized again.
        budget: Largest accepted row error against a float64 product, or an `ErrorBudget`, over
            measured distributions. None means the unquantized kernel, or the budget of a prepared
            weight.
        bias: ``[n]``, dtype of ``a``, added before the output is rounded.
        out: Output, ``[m, n]``, dtype of ``a``, columns contiguous; may be a slice. It must
            share no memory with an operand.
        distribution: Input distributions for the error; None means all realistic ones.
        on_miss: Action without measurements: "bf16" (the unquantized kernel, or one that a model
            predicts to be faster; logged once and saved for ``sweep --from-misses``), "raise", or
            "measure" (sweep this problem now).
        check: ``"every:rows"``, such as "1000:64": in every 1000th call with such operands 64 rows
            are also computed in float32, and a later call issues an `ErrorBudgetWarning` if their
            error exceeds the budget (`lokakern.sampled_check`). None: the value of LOKAKERN_CHECK
            at the first call with such operands; "off": no check.

    Returns:
        ``[m, n]``, dtype of ``a``.

    Raises:
        ShapeError: Shapes do not match.
        FormatError: A dtype is not supported, or dtypes differ.
        DeviceError: Operands are on different devices.
        BudgetError: The budget is not a finite, non-negative number, or ``check`` or LOKAKERN_CHECK
            is not ``every:rows``.
        MissError: There is no measurement and ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
    """
    if torch.compiler.is_compiling():
        return _traced_gemm(a, b, budget, bias, out, distribution, on_miss, check)
    if is_traced():
        product = _plain_gemm(a, b, bias)
        return product if out is None else out.copy_(product)
    if torch.is_grad_enabled() and _needs_grad(a, b, bias, out):
        return _differentiable_gemm(a, b, budget, bias, out, distribution, on_miss, check)
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
        key, table = None, None  # the checks raise for an invalid argument
    if table is None:
        generation = dispatcher.generation()
        table = _plan(a, b, budget, bias, out, distribution, on_miss, check)
        if len(_PLANS) > 4096:
            _PLANS.clear()
        if key is not None and generation == dispatcher.generation():
            _PLANS[key] = table
    m, given = a.shape[0], out
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
    assert kernel is not None  # a table for this device has an unquantized kernel
    kernel.launch(a, b, out, bias, kernel.workspace(a, b))
    note_write(given)
    if table.watch is not None and kernel.quantizes:
        right: Tensor | None = b  # type: ignore[assignment]
        if type(b) is QuantizedTensor:
            right = b.source.t() if b.transposed and b.source is not None else b.source
        table.watch.see(a, right, out, bias, kernel.name)
    return out


def _needs_grad(a: Any, b: Any, bias: Any, out: Any) -> bool:
    if any(getattr(x, "requires_grad", False) for x in (a, bias, out)):
        return True
    if type(b) is QuantizedTensor:
        b = b.data if b.source is None else b.source
    return getattr(b, "requires_grad", False)


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
    """Check everything that warm calls rely on, and build their table."""
    check_on_miss("gemm", on_miss)
    problem = gemm_problem(a, b, bias, out)
    if budget is None and isinstance(b, QuantizedTensor):
        budget = b.budget
    names = dispatcher.distribution_names(distribution)
    if budget is None:  # works without a readable database
        return dispatcher.unquantized_table(problem, device_of(a))
    limits = budget_of(budget)
    table = dispatcher.table_for(problem, limits, names, device_of(a))
    site = f"gemm n={problem.n} k={problem.k} {problem.a.format.value}"
    watch = watch_of_gemm(check, limits, site + (" prepared" if problem.prepared else ""))
    if watch is not None:
        table = copy.copy(table)  # calls without a check may share the table
        table.watch = watch
    return table


class _Differentiable(torch.autograd.Function):
    """`gemm` with the gradient of the unquantized product, by unquantized kernels."""

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        result: Tensor = call()
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        bias = grad.sum(0) if needs[2] else None
        return (*product_gradients(grad, a, weight, needs[:2]), bias, None)


def product_gradients(
    grad: Tensor, a: Tensor, weight: Tensor, needs: Sequence[bool],
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``a @ weight`` for a and weight ``[k, n]``, in their layouts, as torch's are."""
    of_a = multiply(grad, weight.t()) if needs[0] else None
    if not needs[1]:
        return of_a, None
    # A weight.t() is column-major: autograd would copy the gradient of a weight in another layout.
    is_turned = weight.stride(0) == 1 and weight.stride(1) != 1
    return of_a, multiply(grad.t(), a).t() if is_turned else multiply(a.t(), grad)


def _plain_gemm(a: Tensor, b: Tensor | QuantizedTensor, bias: Tensor | None) -> Tensor:
    """The unquantized product by torch's operators, which can be transformed and traced.

    Raises:
        UnsupportedError: There is no unquantized b.
    """
    weight = _weight_of(b)
    if weight.dtype != a.dtype:
        raise UnsupportedError(
            "gemm: torch.func and torch.jit.trace need the unquantized product, but b has no "
            "source: pass the weight itself, or call gemm outside of them"
        )
    warn_once(
        "lokakern.gemm multiplies unquantized under torch.func, torch.jit.trace and forward-mode "
        "AD, and so do their results"
    )
    return a @ weight if bias is None else torch.addmm(bias, a, weight)


def _weight_of(b: Tensor | QuantizedTensor) -> Tensor:
    if not isinstance(b, QuantizedTensor):
        return b
    source = b.data if b.source is None else b.source
    return source.t() if b.transposed else source


def _differentiable_gemm(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    budget: ErrorBudget | float | None,
    bias: Tensor | None,
    out: Tensor | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
    check: str | None,
) -> Tensor:
    if out is not None:
        raise UnsupportedError(
            "gemm: out= cannot be differentiated; drop it or use torch.no_grad()"
        )
    weight = _weight_of(b)

    def call() -> Tensor:
        return gemm(a, b, budget=budget, bias=bias, distribution=distribution, on_miss=on_miss,
                    check=check)  # fmt: skip

    result: Tensor = _Differentiable.apply(a, weight, bias, call)  # type: ignore[no-untyped-call]
    return result


# Under torch.compile the product is one opaque op: a look-up during tracing would fix the kernel of
# one m in the graph.
_LIBRARY = torch.library.Library("lokakern", "DEF")


def _traced_gemm(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    budget: ErrorBudget | float | None,
    bias: Tensor | None,
    out: Tensor | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
    check: str | None,
) -> Tensor:
    if budget is None and isinstance(b, QuantizedTensor):
        budget = b.budget
    limits, names = limits_of(budget), names_of(distribution)
    n = b.shape[1]
    check_bias("gemm", bias, n, a.dtype)
    check_out("gemm", out, (a.shape[0], n), a.dtype)
    if isinstance(b, QuantizedTensor):
        if not b.transposed:
            raise ShapeError("gemm: b is a QuantizedTensor stored [k, n]; pass quantize(w).t()")
        parts = (b.data, b.scale, b.source, bias, b.granularity.value)
    else:
        parts = (b, None, None, bias, Granularity.NONE.value + "/tensor")
    result: Tensor = torch.ops.lokakern.gemm(a, *parts, limits, names, on_miss, check)
    return result if out is None else out.copy_(result)


def _gemm_op(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    source: Tensor | None,
    bias: Tensor | None,
    granularity: str,
    limits: list[float],
    distributions: list[str],
    on_miss: str,
    check: str | None = None,
) -> Tensor:
    budget = budget_of_limits(limits)
    right: Tensor | QuantizedTensor = b
    if not granularity.endswith("/tensor"):
        right = QuantizedTensor(b, b_scale, Granularity(granularity), True, source, budget)
    with torch.no_grad():
        return gemm(a, right, budget=budget, bias=bias, on_miss=on_miss, check=check,
                    distribution=tuple(distributions) or None)  # fmt: skip


recorded_op(
    _LIBRARY,
    "gemm(Tensor a, Tensor b, Tensor? b_scale, Tensor? source, Tensor? bias, str granularity, "
    "float[] limits, str[] distributions, str on_miss, str? check=None) -> Tensor",
    _gemm_op,
)


def _gemm_fake(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    source: Tensor | None,
    bias: Tensor | None,
    granularity: str,
    limits: list[float],
    distributions: list[str],
    on_miss: str,
    check: str | None = None,
) -> Tensor:
    n = b.shape[1] if granularity.endswith("/tensor") else b.shape[0]
    return a.new_empty((a.shape[0], n))


def _save_for_gemm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _scale, source, bias, granularity = inputs[:6]
    plain = granularity.endswith("/tensor")
    ctx.plain = plain
    ctx.has_source = source is not None
    ctx.has_bias = bias is not None
    ctx.save_for_backward(a, b if plain else (b if source is None else source).t())


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    weight_needs = needs[1] if ctx.plain or not ctx.has_source else needs[3]
    left, right = ctx.saved_tensors
    a, weight = product_gradients(grad, left, right, (needs[0], weight_needs))
    bias = grad.sum(0) if ctx.has_bias and needs[4] else None
    if weight is not None and not ctx.plain:
        weight = weight.t()
    b, source = (None, weight) if ctx.has_source else (weight, None)
    return (a, b, None, source, bias, *[None] * 5)


torch.library.register_fake("lokakern::gemm", _gemm_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "lokakern::gemm", _gemm_backward, setup_context=_save_for_gemm, lib=_LIBRARY
)
