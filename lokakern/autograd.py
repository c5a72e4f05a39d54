"""`gemm` under autograd and torch.compile.

Both differentiate the unquantized product, with unquantized kernels.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import BudgetError, ShapeError, UnsupportedError
from lokakern.operands import check_bias, check_out
from lokakern.types import ErrorBudget, Granularity, QuantizedTensor


class _Differentiable(torch.autograd.Function):
    """The gradient of the unquantized product, by unquantized kernels."""

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
        return (*_gemm_gradients(grad, a, weight, ctx.needs_input_grad), None)


def _gemm_gradients(
    grad: Tensor, a: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``a @ weight + bias`` for a, weight ``[k, n]`` and bias."""
    return (
        grad @ weight.t() if needs[0] else None,
        a.t() @ grad if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "lokakern.gemm multiplies unquantized under torch.func, torch.jit.trace and forward-mode "
        "AD, and so does what they produce",
        stacklevel=3,
    )


def plain_gemm(a: Tensor, b: Tensor | QuantizedTensor, bias: Tensor | None) -> Tensor:
    """The unquantized product in torch's steps, which can be transformed and traced.

    Raises:
        UnsupportedError: There is no unquantized b.
    """
    weight = _unquantized(b)
    if weight.dtype != a.dtype:
        raise UnsupportedError(
            "gemm: torch.func and torch.jit.trace see the unquantized product, and b has no "
            "source: pass the weight itself, or call gemm outside of them"
        )
    _say_once()
    return a @ weight if bias is None else torch.addmm(bias, a, weight)


def _unquantized(b: Tensor | QuantizedTensor) -> Tensor:
    if not isinstance(b, QuantizedTensor):
        return b
    source = b.data if b.source is None else b.source
    return source.t() if b.transposed else source


def differentiable_gemm(
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
    weight = _unquantized(b)

    from lokakern.functional import gemm  # at call time: functional imports this module

    def call() -> Tensor:
        return gemm(a, b, budget=budget, bias=bias, distribution=distribution, on_miss=on_miss,
                    check=check)  # fmt: skip

    result: Tensor = _Differentiable.apply(a, weight, bias, call)  # type: ignore[no-untyped-call]
    return result


# Under torch.compile the product is one opaque op: a look-up made while tracing would bake the
# kernel for one m into the graph.
_LIBRARY = torch.library.Library("lokakern", "DEF")
_LIBRARY.define(
    "gemm(Tensor a, Tensor b, Tensor? b_scale, Tensor? source, Tensor? bias, str granularity, "
    "float[] limits, str[] distributions, str on_miss, str? check=None) -> Tensor"
)
_LIMITS = ("row_err", "row_p99", "rel_err", "sqnr_db", "mean_rel_err", "mean_shift")


def traced_gemm(
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
    # No ErrorBudget is made here: up to torch 2.11 Dynamo cannot trace the hash of a tuple.
    limits: list[float] = []
    if isinstance(budget, ErrorBudget):
        given = [getattr(budget, name) for name in _LIMITS]
        limits = [math.nan if limit is None else limit for limit in given]
    elif budget is not None:
        if isinstance(budget, bool) or budget != budget:
            raise BudgetError(f"budget is {budget!r}; expected a number or an ErrorBudget")
        limits = [budget]  # of row_err, checked further when the op runs
    names = [distribution] if isinstance(distribution, str) else list(distribution or ())
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
    from lokakern.functional import gemm  # at call time: functional imports this module

    given = {n: v for n, v in zip(_LIMITS, limits, strict=False) if not math.isnan(v)}
    budget = ErrorBudget(**given) if given else None
    right: Tensor | QuantizedTensor = b
    if not granularity.endswith("/tensor"):
        right = QuantizedTensor(b, b_scale, Granularity(granularity), True, source, budget)
    with torch.no_grad():
        return gemm(a, right, budget=budget, bias=bias, on_miss=on_miss, check=check,
                    distribution=tuple(distributions) or None)  # fmt: skip


_LIBRARY.impl("gemm", _gemm_op, "CompositeExplicitAutograd")


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
    a, weight, bias = _gemm_gradients(
        grad, left, right, (needs[0], weight_needs, ctx.has_bias and needs[4])
    )
    if weight is not None and not ctx.plain:
        weight = weight.t()
    b, source = (None, weight) if ctx.has_source else (weight, None)
    return (a, b, None, source, bias, *[None] * 5)


torch.library.register_fake("lokakern::gemm", _gemm_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "lokakern::gemm", _gemm_backward, setup_context=_save_for_gemm, lib=_LIBRARY
)
