"""`gemm_norm` and `norm_quantize`: checks and dispatch on the first call, then launches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.functional.checks import check_matrix
from lokakern.functional.norm_checks import (
    MATRICES,
    Cross,
    aligned_epilogue,
    epilogue_of_call,
    gemm_norm_problem,
    is_aligned,
    norm_quantize_problem,
    out_kind,
    scale_of,
    shown_name,
)
from lokakern.native import replayed
from lokakern.norm import Norm
from lokakern.registry.register import Kernel
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of
from lokakern.selection.kernel_policy import Chooser, fastest_within, kernel_of
from lokakern.selection.misses import after_miss, check_on_miss
from lokakern.selection.table import Table
from lokakern.types import (
    ErrorBudget,
    Format,
    Granularity,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    empty_data,
)

Matrix = Tensor | QuantizedTensor
Scale = Tensor | float | str | None
_PLANS: dict[Any, Table] = {}
dispatcher.on_new_snapshot(_PLANS.clear)


@replayed
def gemm_norm(
    a: Matrix,
    b: Matrix,
    *,
    norm: str | Norm,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_last: bool = False,
    cross: Cross | None = None,
    eps: float | None = None,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    out_granularity: Granularity | str | None = None,
    out_scale: Scale = None,
    budget: ErrorBudget | float | None = None,
    distribution: str | Sequence[str] | None = None,
    on_miss: str = "bf16",
) -> Matrix:
    """Multiply and normalize, ``f(norm(a @ b + bias))``, with the fastest kernel within ``budget``.

    A fused kernel normalizes unrounded sums; statistics are float32. Gradients are those of the
    unquantized product.

    Args:
        a: ``[m, k]``, bfloat16, any strides; or from `quantize`.
        b: ``[k, n]``: bfloat16, ``weight.t()`` is the fast layout; or a weight from
            `prepare_weight`; or ``quantize(weight).t()``, where ``a`` is quantized.
        norm: "layer", "rms", "block_rms(n)" with n a divisor of the columns, or "none"; or a
            `lokakern.norm.Norm`.
        bias: ``[n]``, bfloat16 or float32, added to the sums; of one dtype with the next two.
        norm_weight: ``[n]``, multiplied with the normalized sums.
        norm_bias: ``[n]``, added after that.
        activation: f: "relu", "hardswish", "silu", or None.
        gate: f is ``gate * sigmoid(z)``; ``[m, n]``, bfloat16, columns contiguous, as ``residual``
            and ``cross``.
        residual: Added to the sums before the norm.
        residual_last: Whether the residual is added to the output instead.
        cross: ``(x0, x)``: f is DCN's ``x0 * z + x``.
        eps: Of the norm; None means 1e-5, or that of a `Norm`.
        out: Output, ``[m, n]``, bfloat16, columns contiguous; may be a slice.
        out_format: "bfloat16" or an FP8 format. None means the device's E4M3 with
            ``out_granularity`` or ``out_scale``, else bfloat16.
        out_granularity: Granularity of an FP8 output: "row" (default) or "1x128" with dynamic
            scales, or "tensor" with ``out_scale``.
        out_scale: Static descale of an FP8 output: a number, float32 ``[1, 1]``, or "static", the
            bound of the norm, its weight and bias, so that nothing saturates (not with a gate, a
            cross, a last residual, or without a norm).
        budget: Largest accepted row error against a float64 result, or an `ErrorBudget`, over
            measured distributions. None means the fastest measured unquantized kernel, or the
            budget of a prepared weight; for quantized operands, the fastest kernel.
        distribution: As of `gemm`.
        on_miss: As of `gemm`; "bf16" logs nothing without a budget or with quantized operands.

    Returns:
        ``[m, n]``: a bfloat16 tensor, ``out`` if given; or a `QuantizedTensor`, which can be the
        next ``a``, for an FP8 format.

    Raises:
        ShapeError: Shapes do not match.
        FormatError: A dtype, format, granularity or scale does not fit.
        UnknownNameError: The norm or activation is unknown, or options exclude each other.
        DeviceError: Operands are on different devices.
        BudgetError: The budget is not a finite, non-negative number.
        UnsupportedError: The call is not differentiable, or no kernel runs here.
        MissError: There is no measurement and ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
    """
    epilogue = epilogue_of_call(
        "gemm_norm", norm=norm, eps=eps, activation=activation, gate=gate, residual=residual,
        residual_last=residual_last, cross=cross, bias=bias, norm_weight=norm_weight,
        norm_bias=norm_bias,
    )  # fmt: skip
    kind = (out_format, out_granularity, out_scale)
    if torch.is_grad_enabled() and _needs_grad(a, b, epilogue):
        plain = out_format in (None, "bfloat16") and kind[1:] == (None, None)
        return _differentiable(
            a, b, epilogue, out, plain,
            lambda: _dispatched(a, b, epilogue, out, kind, budget, distribution, on_miss),
        )  # fmt: skip
    return _dispatched(a, b, epilogue, out, kind, budget, distribution, on_miss)


@replayed
def norm_quantize(
    x: Tensor,
    *,
    norm: str | Norm,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_last: bool = False,
    cross: Cross | None = None,
    granularity: Granularity | str | None = None,
    out_format: Format | str | None = None,
    out_scale: Scale = None,
    eps: float | None = None,
) -> QuantizedTensor:
    """Normalize and quantize rows, ``f(norm(x))``, in one pass over ``x``.

    Args:
        x: ``[rows, columns]``, bfloat16.
        norm: As of `gemm_norm`, as are the other arguments.
        norm_weight: ``[columns]``.
        norm_bias: ``[columns]``.
        activation: f.
        gate: ``[rows, columns]``.
        residual: Added to ``x`` before the norm.
        residual_last: Whether it is added to the output instead.
        cross: ``(x0, x)``.
        granularity: "row", "1x128", or "tensor" with ``out_scale``. None means "tensor" with
            ``out_scale``, else "row".
        out_format: An FP8 format; None means the device's E4M3.
        out_scale: As of `gemm_norm`.
        eps: As of `gemm_norm`.

    Raises:
        LokakernError: As `gemm_norm`.
        UnsupportedError: A gradient is required: FP8 has none.
    """
    return norm_quantize_by(
        fastest_within(None), x, norm=norm, norm_weight=norm_weight, norm_bias=norm_bias,
        activation=activation, gate=gate, residual=residual, residual_last=residual_last,
        cross=cross, granularity=granularity, out_format=out_format, out_scale=out_scale, eps=eps,
    )  # fmt: skip


def gemm_norm_by(
    choose: Chooser,
    a: Matrix,
    b: Matrix,
    *,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    out_granularity: Granularity | str | None = None,
    out_scale: Scale = None,
    **options: Any,
) -> Matrix:
    """`gemm_norm` with the kernel that ``choose`` returns; ``options`` of the epilogue."""
    epilogue = epilogue_of_call("gemm_norm", **options)
    problem = _problem_of(a, b, epilogue, out, (out_format, out_granularity, out_scale))
    result = _output("gemm_norm", problem, problem.m, problem.n, out, out_scale, epilogue, a.device)
    if problem.m and problem.n:
        left = a.data if isinstance(a, QuantizedTensor) else a
        _launch(choose(problem, left), a, b, result, epilogue)
    return result


def norm_quantize_by(
    choose: Chooser,
    x: Tensor,
    *,
    granularity: Granularity | str | None = None,
    out_format: Format | str | None = None,
    out_scale: Scale = None,
    **options: Any,
) -> QuantizedTensor:
    """`norm_quantize` with the kernel that ``choose`` returns; ``options`` of the epilogue."""
    op = "norm_quantize"
    epilogue = epilogue_of_call(op, **options)
    check_matrix(op, "x", x)
    if x.dtype != torch.bfloat16:
        raise FormatError(f"{op}: x is {x.dtype}; expected torch.bfloat16 (use .bfloat16())")
    if torch.is_grad_enabled() and _needs_grad(x, None, epilogue):
        raise UnsupportedError(f"{op}: FP8 outputs have no gradient; use torch.no_grad()")
    kind = out_kind(op, out_format, granularity, out_scale, x, quantizes=True)
    problem = norm_quantize_problem(x, epilogue, kind, out_scale)
    result = _output(op, problem, problem.m, problem.k, None, out_scale, epilogue, x.device)
    assert isinstance(result, QuantizedTensor)  # its format is FP8
    if problem.m and problem.k:
        kernel, epilogue = choose(problem, x), aligned_epilogue(epilogue)
        kernel.launch(x, result, epilogue, kernel.workspace(x, result, epilogue))
    return result


def _dispatched(
    a: Matrix,
    b: Matrix,
    epilogue: NormEpilogue,
    out: Tensor | None,
    kind: tuple[Any, Any, Scale],
    budget: ErrorBudget | float | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
) -> Matrix:
    key = _key_of(a, b, epilogue, out, kind, budget, distribution, on_miss)
    table = None if key is None else _PLANS.get(key)
    if table is None:
        generation = dispatcher.generation()
        table = _plan(a, b, epilogue, out, kind, budget, distribution, on_miss)
        if len(_PLANS) > 4096:
            _PLANS.clear()
        if key is not None and generation == dispatcher.generation():
            _PLANS[key] = table
    m, n = a.shape[0], table.problem.n
    for name in MATRICES:  # the table is for every m
        x = getattr(epilogue, name)
        if x is not None and x.shape[0] != m:
            raise ShapeError(f"gemm_norm: {shown_name(name)} is {list(x.shape)}; expected {[m, n]}")
    if out is not None and out.shape[0] != m:
        raise ShapeError(f"gemm_norm: out is {list(out.shape)}; expected {[m, n]}")
    result = _output("gemm_norm", table.problem, m, n, out, kind[2], epilogue, a.device)
    if not m or not n:
        return result
    place = bisect_right(table.breakpoints, m) - 1
    if table.misses[place] and _acts_on_miss(table, m, on_miss):
        found = after_miss(table, m, on_miss)
        if found is None:
            return _dispatched(
                a, b, epilogue, out, kind, table.budget, table.distributions, "raise"
            )
        kernel = found
    elif table.baseline is None:
        kernel = kernel_of(table, m)
    else:
        found = table.kernels[place]
        assert found is not None  # a table for this device has an unquantized kernel
        kernel = found
    _launch(kernel, a, b, result, epilogue)
    return result


def _acts_on_miss(table: Table, m: int, on_miss: str) -> bool:
    """Whether ``on_miss`` applies to a miss.

    "bf16" applies only with a budget and unquantized operands. A budget that no kernel for
    quantized operands meets is not a miss.
    """
    if on_miss == "bf16":
        return table.baseline is not None and table.budget is not None
    return table.baseline is not None or table.pick(m).time is None


def _launch(kernel: Kernel, a: Matrix, b: Matrix, out: Matrix, epilogue: NormEpilogue) -> None:
    if isinstance(b, QuantizedTensor) and b.scale is None:  # prepared, but FP8 is not faster
        b = b.transpose[0]
    epilogue = aligned_epilogue(epilogue)
    if isinstance(out, Tensor) and not out.shape[1] % 8 and not is_aligned(out):
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        kernel.launch(a, b, whole, epilogue, kernel.workspace(a, b, whole, epilogue))
        out.copy_(whole)
        return
    kernel.launch(a, b, out, epilogue, kernel.workspace(a, b, out, epilogue))


def _key_of(a: Any, b: Any, epilogue: NormEpilogue, out: Any, *rest: Any) -> Any:
    """The key of a cached table; None for an invalid argument, for which the checks raise."""
    try:
        data, granularity = a, None
        if isinstance(a, QuantizedTensor):
            data, granularity = a.data, (a.granularity, a.transposed)
        m, k = data.shape
        low = m & -m
        (form, out_granularity, out_scale), *others = rest
        key = (
            data.dtype, k, data.stride(), data.device, data.data_ptr() & 15,
            low if low < 16 else 16, m > 1, granularity,
            b.signature if type(b) is QuantizedTensor else (*_facts(b), b.shape, b.data_ptr() & 15),
            *map(_facts, epilogue), _facts(out), form, out_granularity,
            _facts_of_scale(out_scale),
            *others, type(others[0]),  # type of the budget: True is invalid, but equals 1
        )  # fmt: skip
        hash(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return None
    return key


def _facts(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (x.dtype, x.dim(), x.shape[-1], x.stride(), x.device)
    return x


def _facts_of_scale(x: Any) -> Any:
    """Facts of a scale that are not checked in every call."""
    return x.device if isinstance(x, Tensor) else x if isinstance(x, str) else type(x)


def _plan(
    a: Matrix,
    b: Matrix,
    epilogue: NormEpilogue,
    out: Tensor | None,
    kind: tuple[Any, Any, Scale],
    budget: ErrorBudget | float | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
) -> Table:
    """Check everything that warm calls rely on, and build their table."""
    check_on_miss("gemm_norm", on_miss)
    problem = _problem_of(a, b, epilogue, out, kind)
    if budget is None and isinstance(b, QuantizedTensor) and isinstance(a, Tensor):
        budget = b.budget
    names = dispatcher.distribution_names(distribution)
    limits = None if budget is None else budget_of(budget)
    left = a.data if isinstance(a, QuantizedTensor) else a
    return dispatcher.table_for(problem, limits, names, device_of(left))


def _problem_of(
    a: Matrix,
    b: Matrix,
    epilogue: NormEpilogue,
    out: Tensor | None,
    kind: tuple[Any, Any, Scale],
) -> Problem:
    if not isinstance(a, QuantizedTensor):
        check_matrix("gemm_norm", "a", a)
    left = a.data if isinstance(a, QuantizedTensor) else a
    found = out_kind("gemm_norm", *kind, left, quantizes=False)
    return gemm_norm_problem(a, b, epilogue, out, found, kind[2])


def _output(
    op: str,
    problem: Problem,
    rows: int,
    columns: int,
    out: Tensor | None,
    out_scale: Scale,
    epilogue: NormEpilogue,
    device: torch.device,
) -> Matrix:
    """An allocated output; scales of an empty output are 1."""
    form, granularity = problem.out_format, problem.out_granularity
    if not form.is_fp8:
        if out is None:
            return torch.empty((rows, columns), dtype=form.dtype, device=device)
        if out.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{op}: out requires a gradient, and out= cannot be differentiated: drop it, or "
                "use torch.no_grad()"
            )
        return out
    data = empty_data(rows, columns, form.dtype, device)
    if granularity is Granularity.TENSOR:
        assert out_scale is not None  # checked in `out_kind`
        scale = scale_of(op, out_scale, epilogue, columns, form, device)
    else:
        scale = granularity.empty_scale(rows, columns, device)
        if not rows or not columns:
            scale.fill_(1.0)
    return QuantizedTensor(data, scale, granularity)


_TENSORS = ("bias", "norm_weight", "norm_bias", "residual", "gate", "x0", "x")


def _needs_grad(a: Any, b: Any, epilogue: NormEpilogue) -> bool:
    """Whether any operand of a call requires a gradient."""
    weight = b.source if type(b) is QuantizedTensor else b
    operands = (a, weight, *(getattr(epilogue, name) for name in _TENSORS))
    return any(getattr(x, "requires_grad", False) for x in operands)


def _differentiable(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    out: Tensor | None,
    plain: bool,
    call: Callable[[], Any],
) -> Tensor:
    """The result of ``call``, with the gradient of the unquantized product.

    Only operands are saved; the backward pass multiplies and normalizes again.

    Raises:
        UnsupportedError: The call is not differentiable.
    """
    reason = None
    if isinstance(a, QuantizedTensor):
        reason = "a is quantized: pass it as bfloat16"
    elif not plain:
        reason = "an FP8 output has no gradient: leave its format out"
    elif out is not None:
        reason = "out= cannot be differentiated: drop it"
    if reason is not None:
        raise UnsupportedError(f"gemm_norm: an operand requires a gradient, and {reason}, or use "
                               "torch.no_grad()")  # fmt: skip
    weight = b
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        weight = source.t() if b.transposed else source
    tensors = (getattr(epilogue, name) for name in _TENSORS)
    result: Tensor = _Differentiable.apply(a, weight, *tensors, epilogue, call)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    """Forward by a kernel; backward through torch's operators in float32, computed again."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return arguments[-1]()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-2])
        ctx.epilogue = inputs[-2]._replace(**dict.fromkeys(_TENSORS))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from lokakern.kernels.torch.norm import normalized  # lazily: a module of kernels

        needs = ctx.needs_input_grad[:-2]
        again = torch.is_grad_enabled()  # with create_graph=True
        leaves: list[Any] = [
            None if x is None else x.view_as(x) if again else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        a, weight, *rest = leaves
        epilogue = ctx.epilogue._replace(**dict(zip(_TENSORS, rest, strict=True)))
        with torch.enable_grad():
            result = normalized(a.float() @ weight.float(), epilogue).to(grad.dtype)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(result, wanted, grad, create_graph=again))
        return (*(next(found) if need else None for need in needs), None, None)
