"""`gemm_norm` and `norm_quantize`: checks and dispatch on the first call, then launches."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lokakern.device import current_device
from lokakern.errors import FormatError, ShapeError, UnknownNameError, UnsupportedError
from lokakern.functional.checks import (
    check_matrix,
    check_out,
    check_untraced,
    checked_scale,
    note_write,
)
from lokakern.functional.gemm import gemm, product_gradients
from lokakern.functional.norm_checks import (
    MATRICES,
    VECTORS,
    Cross,
    aligned_epilogue,
    check_bounded,
    check_epilogue,
    epilogue_of_call,
    gemm_norm_problem,
    half_of,
    is_aligned,
    is_fp8,
    norm_of,
    norm_quantize_problem,
    out_kind,
    scale_of,
    shown_name,
)
from lokakern.functional.norm_gradient import is_faster_compiled  # and its module defines the op
from lokakern.functional.static_scale import (
    bound_scale,
    check_number,
    kept,
    output_scale,
    with_kept_scale,
)
from lokakern.functional.traced import (
    budget_of_limits,
    columns_of,
    limits_of,
    names_of,
    norm_words,
    parts_of,
    text_of,
    whole,
)
from lokakern.native import plain_op, recorded_op, replayed
from lokakern.norm import Norm, largest
from lokakern.problems import format_named
from lokakern.registry.register import Kernel, fp8_format
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

HALVES = "bfloat16", "float16"
GRADIENTS = "X12"  # the distribution of operands of a backward pass
Matrix = Tensor | QuantizedTensor
Scale = Tensor | float | str | None
_PLANS: dict[Any, Table] = {}
dispatcher.on_new_snapshot(_PLANS.clear)


def _kept_scale(given: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """The scale of ``out_scale`` in memory that nobody may write; None for what is refused."""
    operands = [*args, *(options[name] for name in ("x", "a", "b") if name in options)]
    device = operands[0].device
    if given != "static":
        return None if isinstance(given, str) else checked_scale("out_scale", given, device)
    weight, shift = options.get("norm_weight"), options.get("norm_bias")
    if (
        options.get("gate") is not None
        or options.get("cross") is not None
        or options.get("residual_last")
    ):
        return None
    columns, norm, form = operands[-1].shape[1], options["norm"], options.get("out_format")
    key = (norm, columns, form, device, id(weight), id(shift))
    make = functools.partial(_made_scale, norm, columns, form, device, weight, shift)
    return kept(key, device, (weight, shift), make)


def _made_scale(
    norm: str | Norm,
    columns: int,
    out_format: Format | str | None,
    device: torch.device,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """The scale of a call with this norm.

    Raises:
        LokakernError: An argument is not valid.
    """
    for x in (weight, shift):
        if x is not None and (
            x.device != device
            or x.shape != (columns,)
            or x.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or x.layout is not torch.strided
        ):
            raise FormatError("out_scale: a vector of the norm does not fit")
    found = norm_of("out_scale", norm, None)
    if found.kind == "none":
        raise UnknownNameError("out_scale: norm 'none' bounds nothing")
    if out_format is None:
        form = fp8_format(current_device(device.type, device.index or 0))
    else:
        form = format_named("out_scale", out_format)
    if not form.is_fp8:
        raise FormatError(f"out_scale: {form.value} has no scale")
    return bound_scale(largest(found, columns), form, weight, shift, device)


@with_kept_scale(_kept_scale)
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
    unquantized function; with a budget, the products that they take are within it, on gradients.

    Args:
        a: ``[m, k]``, bfloat16 or float16, any strides; or from `quantize`.
        b: ``[k, n]``: in the dtype of ``a``, ``weight.t()`` is the fast layout; or a weight from
            `prepare_weight`; or ``quantize(weight).t()``, where ``a`` is quantized.
        norm: "layer", "rms", "block_rms(n)" with n a divisor of the columns, or "none"; or a
            `lokakern.norm.Norm`.
        bias: ``[n]``, added to the sums; of one dtype with the next two: float32, or bfloat16,
            or float16 where ``a`` or the output is. From FP8 to FP8 these tensors tell by
            themselves: those that are not float32 are all bfloat16, or all float16.
        norm_weight: ``[n]``, multiplied with the normalized sums.
        norm_bias: ``[n]``, added after that.
        activation: f: "relu", "hardswish", "silu", "gelu", "gelu_tanh", or None.
        gate: f is ``gate * sigmoid(z)``; ``[m, n]``, bfloat16 or float16 as ``bias``, columns
            contiguous, as ``residual`` and ``cross``.
        residual: Added to the sums before the norm.
        residual_last: Whether the residual is added to the output instead.
        cross: ``(x0, x)``: f is DCN's ``x0 * z + x``.
        eps: Of the norm; None means 1e-5, or that of a `Norm`.
        out: Output, ``[m, n]``, in ``out_format``, columns contiguous; may be a slice.
        out_format: "bfloat16", "float16" or an FP8 format. None means the device's E4M3 with
            ``out_granularity`` or ``out_scale``, else the dtype of ``a``, or bfloat16 where that
            is quantized. Beyond 65504 a float16 output is infinite, and so are sums that a kernel
            rounds to float16 before the norm, as torch's layers do: rows with them are NaN.
        out_granularity: Granularity of an FP8 output: "row" (default) or "1x128" with dynamic
            scales, or "tensor" with ``out_scale``.
        out_scale: Static descale of an FP8 output: a number, float32 ``[1, 1]``, or "static", the
            bound of the norm, its weight and bias, so that nothing saturates (not with a gate, a
            cross, a last residual, or without a norm). The scale of "static" and of a number is
            computed once and shared by results: do not write to it. "static" is computed in every
            call if the weight or bias requires a gradient, else again after a write to them (not
            one through NumPy, or in place through ``.data``, which nothing tells of). A CUDA graph
            keeps the scale of its capture.
        budget: Largest accepted row error against a float64 result, or an `ErrorBudget`, over
            measured distributions. None means the fastest measured unquantized kernel, or the
            budget of a prepared weight; for quantized operands, the fastest kernel.
        distribution: As of `gemm`.
        on_miss: As of `gemm`; "bf16" logs nothing without a budget or with quantized operands.

    Returns:
        ``[m, n]``: a bfloat16 or float16 tensor, ``out`` if given; or a `QuantizedTensor`, which
        can be the next ``a``, for an FP8 format.

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
    if is_compiling():
        return _traced_gemm_norm(
            a, b, norm, eps, activation, gate, residual, residual_last, cross,
            (bias, norm_weight, norm_bias), out, (out_format, out_granularity, out_scale), budget,
            distribution, on_miss,
        )  # fmt: skip
    check_untraced("gemm_norm")
    epilogue = epilogue_of_call(
        "gemm_norm", norm=norm, eps=eps, activation=activation, gate=gate, residual=residual,
        residual_last=residual_last, cross=cross, bias=bias, norm_weight=norm_weight,
        norm_bias=norm_bias,
    )  # fmt: skip
    kind = (out_format, out_granularity, out_scale)
    if torch.is_grad_enabled() and _needs_grad(a, b, epilogue):
        plain = out_format in (None, *HALVES) and kind[1:] == (None, None)
        return _differentiable(
            a, b, epilogue, out, plain, budget,
            lambda: _dispatched(a, b, epilogue, out, kind, budget, distribution, on_miss),
        )  # fmt: skip
    return _dispatched(a, b, epilogue, out, kind, budget, distribution, on_miss)


@with_kept_scale(_kept_scale)
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
        x: ``[rows, columns]``, bfloat16 or float16.
        norm: As of `gemm_norm`, as are the other arguments; matrices have the dtype of ``x``, and
            vectors it or float32.
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
    if is_compiling():
        return _traced_norm_quantize(
            x, norm, eps, activation, gate, residual, residual_last, cross,
            (None, norm_weight, norm_bias), (out_format, granularity, out_scale),
        )  # fmt: skip
    return norm_quantize_by(
        fastest_within(None), x, norm=norm, norm_weight=norm_weight, norm_bias=norm_bias,
        activation=activation, gate=gate, residual=residual, residual_last=residual_last,
        cross=cross, granularity=granularity, out_format=out_format, out_scale=out_scale, eps=eps,
    )  # fmt: skip


_NO_GRADIENT = "norm_quantize: FP8 outputs have no gradient; use torch.no_grad()"


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
        kernel = choose(problem, left, _needs_of(problem, left, epilogue))
        _launch(kernel, a, b, result, epilogue)
        note_write(out)
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
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(f"{op}: x is {x.dtype}; expected torch.bfloat16 or torch.float16")
    if torch.is_grad_enabled() and _needs_grad(x, None, epilogue):
        raise UnsupportedError(_NO_GRADIENT)
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
    note_write(out)
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
    needs = _needs_of(problem, left, epilogue)
    return dispatcher.table_for(problem, limits, names, device_of(left), needs=needs)


def _needs_of(problem: Problem, a: Tensor, epilogue: NormEpilogue) -> frozenset[str]:
    """What a kernel has to be able to that the problem does not tell: float16 beside FP8."""
    form = problem.out_format
    is_half = is_fp8(a, form) and half_of(a, form, epilogue) is torch.float16
    return frozenset({"float16"} if is_half else ())


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
    weight = b
    if type(b) is QuantizedTensor:
        weight = b.data if b.source is None else b.source
    operands = (a, weight, *(getattr(epilogue, name) for name in _TENSORS))
    return any(getattr(x, "requires_grad", False) for x in operands)


def _check_differentiable(a: Matrix, plain: bool, out: Tensor | None) -> None:
    """Check that a call has a gradient.

    Raises:
        UnsupportedError: It has none.
    """
    reason = None
    if isinstance(a, QuantizedTensor):
        reason = "a is quantized: pass it unquantized"
    elif not plain:
        reason = "an FP8 output has no gradient: leave its format out"
    elif out is not None:
        reason = "out= cannot be differentiated: drop it"
    if reason is not None:
        raise UnsupportedError(f"gemm_norm: an operand requires a gradient, and {reason}, or use "
                               "torch.no_grad()")  # fmt: skip


def _differentiable(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    out: Tensor | None,
    plain: bool,
    budget: ErrorBudget | float | None,
    call: Callable[[], Any],
) -> Tensor:
    """The result of ``call``, with the gradient of the unquantized function.

    Only operands are saved; the backward pass multiplies and normalizes again.
    """
    _check_differentiable(a, plain, out)
    weight = b
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        weight = source.t() if b.transposed else source
        budget = b.budget if budget is None else budget
    tensors = (getattr(epilogue, name) for name in _TENSORS)
    result: Tensor = _Differentiable.apply(a, weight, *tensors, epilogue, budget, call)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    """Forward by a kernel; backward from operands, by `_gradients`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return arguments[-1]()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-3])
        ctx.epilogue = inputs[-3]._replace(**dict.fromkeys(_TENSORS))
        ctx.budget = inputs[-2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = ctx.needs_input_grad[:-3]
        found = _gradients(grad, ctx.saved_tensors, ctx.epilogue, needs, ctx.budget)
        return (*found, None, None, None)


def _gradients(
    grad: Tensor,
    saved: Sequence[Tensor | None],
    form: NormEpilogue,
    needs: Sequence[bool],
    budget: ErrorBudget | float | None,
) -> list[Tensor | None]:
    """Gradients of ``a``, ``b`` and the tensors of an epilogue, from rows multiplied again.

    That product is unquantized, in the dtype of its operands: the norm and the activation are
    differentiated where the unquantized function is. So are the products with the gradient of the
    rows, unless a kernel was measured to be faster within the budget. Between them everything is
    float32: by one kernel, or by torch's operators behind a gate or a cross, for a second
    derivative, and where a compiler fuses them into faster kernels.

    Args:
        grad: Of the output, ``[m, n]``.
        saved: a, b ``[k, n]``, and `_TENSORS` of the epilogue.
        form: The epilogue without tensors.
        needs: Of which of ``saved`` a gradient is needed.
        budget: Of the call; for a second derivative nothing is quantized.
    """
    again = torch.is_grad_enabled() and not is_compiling()  # with create_graph=True
    a, weight, *tensors = saved
    assert a is not None and weight is not None
    epilogue = form._replace(**dict[str, Any](zip(_TENSORS, tensors, strict=True)))
    wanted = {name for name, need in zip(_TENSORS, needs[2:], strict=True) if need}
    added = {"x", "residual"} if form.residual_last else {"x"}  # to the output
    found: dict[str, Tensor | None] = dict.fromkeys(wanted & added, grad)
    wanted -= added
    if needs[0] or needs[1]:
        wanted.add("y")
    left = right = None
    if wanted:
        with torch.set_grad_enabled(again), _without_autocast(grad.device.type):
            by_op = not again and _has_op(epilogue, wanted, grad)
            make = _gradients_by_op if by_op else _gradients_by_steps
            found |= make(grad, a, weight, epilogue, wanted)
            dy = found.get("y")
            if dy is not None:
                multiply = torch.matmul
                if budget is not None and not again and dy.numel():  # a GEMM has terms
                    multiply = functools.partial(gemm, budget=budget, distribution=GRADIENTS)
                left, right = product_gradients(dy, a, weight, needs[:2], multiply)
    return [left, right, *map(found.get, _TENSORS)]


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """No autocast around a backward pass, which may be to another dtype than the forward pass."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _has_op(epilogue: NormEpilogue, wanted: Set[str], grad: Tensor) -> bool:
    """Whether the gradient of the norm is that of an op, and not of torch's operators."""
    if epilogue.gate is not None or epilogue.x0 is not None:
        return False
    if not is_compiling():
        return True
    summed = sum(name in wanted for name in VECTORS)
    return is_faster_compiled(grad.shape[1], epilogue.norm, summed, grad.device.type)


def _gradients_by_op(
    grad: Tensor, a: Tensor, weight: Tensor, epilogue: NormEpilogue, wanted: Set[str]
) -> dict[str, Tensor | None]:
    """Gradients of the sums, y, and of an epilogue with an activation, by name."""
    bias, residual = epilogue.bias, epilogue.residual
    # Rounded as by the unfused kernel: the op reads rows in the dtype of the operands.
    y = a @ weight if bias is None else torch.addmm(bias.to(a.dtype), a, weight)
    if residual is not None and not epilogue.residual_last:
        y = y + residual
    vectors = {name: getattr(epilogue, name) for name in VECTORS}
    vectors["bias"] = bias if "bias" in wanted else None
    norm = epilogue.norm
    dy, sums = torch.ops.lokakern.norm_gradient(
        grad, y, *vectors.values(), str(norm), epilogue.activation, norm.eps
    )
    names = [name for name, x in vectors.items() if x is not None]
    found = {"y": dy, "residual": dy, **{name: sums[i] for i, name in enumerate(names)}}
    return {name: found[name] for name in wanted}


def _gradients_by_steps(
    grad: Tensor, a: Tensor, weight: Tensor, epilogue: NormEpilogue, wanted: Set[str]
) -> dict[str, Tensor | None]:
    """Gradients of the product, y, and of any epilogue, by name; differentiable with grad mode."""
    from lokakern.kernels.torch.norm import normalized  # lazily: a module of kernels

    again, leaves = torch.is_grad_enabled(), dict[str, Any](y=a @ weight)
    for name in _TENSORS:
        x = getattr(epilogue, name)
        if x is not None:
            leaves[name] = x.view_as(x)  # two of them may be one tensor
    if not again:
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
    inputs = {name: leaves[name] for name in sorted(wanted)}
    y = leaves.pop("y")
    with torch.enable_grad():
        rows = normalized(y.float(), epilogue._replace(**leaves)).to(grad.dtype)
        found = torch.autograd.grad(rows, tuple(inputs.values()), grad, create_graph=again)
    return dict(zip(inputs, found, strict=True))


# --- as ops of torch.compile

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_EPILOGUE = (
    "Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? residual, Tensor? gate, "
    "Tensor? x0, Tensor? x, str norm, float eps, str activation, bool residual_last, "
    "str out_format, str out_granularity, Tensor? out_scale"
)
_OPERANDS = (
    "Tensor a, Tensor? a_scale, str a_granularity, Tensor b, Tensor? b_scale, Tensor? source, "
    "str b_granularity"
)
_CHOICE = "float[] limits, str[] distributions, str on_miss"


def _traced_epilogue(
    op: str,
    like: Tensor,
    columns: Any,
    norm: str | Norm,
    eps: float | None,
    activation: str | None,
    gate: Tensor | None,
    residual: Tensor | None,
    residual_last: bool,
    cross: Cross | None,
    vectors: tuple[Tensor | None, ...],
    kind: tuple[Any, Any, Scale],
) -> tuple[Any, ...]:
    """Arguments of `_EPILOGUE`, with a tensor of a static scale."""
    name, found_eps = norm_words(op, norm, eps)
    x0, x = (None, None) if cross is None else cross
    out_format, out_granularity, scale = text_of(kind[0]), text_of(kind[1]), kind[2]
    if isinstance(scale, Tensor):
        scale = checked_scale(op, scale.detach(), scale.device)
    elif scale == "static":
        check_bounded(
            op, name, gate=gate, cross=cross,
            residual_last=residual is not None and bool(residual_last),
        )  # fmt: skip
        _, weight, shift = (None if v is None else v.detach() for v in vectors)
        scale = output_scale(like.detach(), weight, shift, name, columns, out_format)
    elif scale is not None:
        check_number(op, scale)
        scale = output_scale(like.detach(), None, None, "", 0, "", float(scale))
    return (
        *vectors, residual, gate, x0, x, name, found_eps, activation or "none",
        bool(residual_last), out_format, out_granularity, scale,
    )  # fmt: skip


def _traced_gemm_norm(
    a: Matrix,
    b: Matrix,
    norm: str | Norm,
    eps: float | None,
    activation: str | None,
    gate: Tensor | None,
    residual: Tensor | None,
    residual_last: bool,
    cross: Cross | None,
    vectors: tuple[Tensor | None, ...],
    out: Tensor | None,
    kind: tuple[Any, Any, Scale],
    budget: ErrorBudget | float | None,
    distribution: str | Sequence[str] | None,
    on_miss: str,
) -> Matrix:
    op = "gemm_norm"
    if budget is None and isinstance(b, QuantizedTensor) and isinstance(a, Tensor):
        budget = b.budget
    left, left_scale, _, left_form = parts_of(op, "a", a, False)
    right, right_scale, source, right_form = parts_of(op, "b", b, True)
    columns = columns_of(right, right_form)
    words = _traced_epilogue(
        op, right, columns, norm, eps, activation, gate, residual, residual_last, cross, vectors,
        kind,
    )  # fmt: skip
    out_format, out_granularity, scale = words[-3:]
    quantizes = out_format not in ("", *HALVES) or bool(out_granularity) or scale is not None
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (left, right, source, *words[:7])
    ):
        _check_differentiable(a, not quantizes, out)
    choice = (limits_of(budget), names_of(distribution), on_miss)
    given = (left, left_scale, left_form, right, right_scale, source, right_form, *words, *choice)
    ops = torch.ops.lokakern
    if out is not None:
        if quantizes:
            half = half_of(left)
            raise FormatError(f"gemm_norm: out is given and the output is FP8; out is for {half}")
        check_out(op, out, (left.shape[0], columns), half_of(left, out_format))
        ops.gemm_norm_out(out, *given)
        return out
    if not quantizes:
        result: Tensor = ops.gemm_norm(*given)
        return result
    if scale is not None:
        return QuantizedTensor(ops.gemm_norm(*given), scale, Granularity.TENSOR)
    data, scales = ops.gemm_norm_scaled(*given)
    return QuantizedTensor(data, scales, Granularity(out_granularity or "row"))


def _traced_norm_quantize(
    x: Tensor,
    norm: str | Norm,
    eps: float | None,
    activation: str | None,
    gate: Tensor | None,
    residual: Tensor | None,
    residual_last: bool,
    cross: Cross | None,
    vectors: tuple[Tensor | None, ...],
    kind: tuple[Any, Any, Scale],
) -> QuantizedTensor:
    op = "norm_quantize"
    words = _traced_epilogue(
        op, x, x.shape[1], norm, eps, activation, gate, residual, residual_last, cross, vectors,
        kind,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *words[:7])):
        raise UnsupportedError(_NO_GRADIENT)
    scale = words[-1]
    if scale is not None:
        data = torch.ops.lokakern.norm_quantize(x, *words)
        return QuantizedTensor(data, scale, Granularity.TENSOR)
    data, scales = torch.ops.lokakern.norm_quantize_scaled(x, *words)
    return QuantizedTensor(data, scales, Granularity(words[-2] or "row"))


def _options(words: Sequence[Any]) -> dict[str, Any]:
    """Named arguments of a public function from those of `_EPILOGUE`."""
    (bias, weight, shift, residual, gate, x0, x, norm, eps, activation, last, out_format,
     granularity, scale) = words  # fmt: skip
    return {
        "bias": bias, "norm_weight": weight, "norm_bias": shift, "residual": residual,
        "gate": gate, "cross": None if x0 is None else (x0, x), "norm": norm, "eps": eps,
        "activation": activation, "residual_last": last, "out_format": out_format or None,
        "out_granularity": granularity or None, "out_scale": scale,
    }  # fmt: skip


def _called(given: Sequence[Any], out: Tensor | None = None) -> Matrix:
    """The eager call with the arguments of an op."""
    a, a_scale, a_form, b, b_scale, source, b_form = given[:7]
    words, (limits, names, on_miss) = given[7:-3], given[-3:]
    budget = budget_of_limits(limits)
    with torch.no_grad():
        return gemm_norm(
            whole(a, a_scale, None, a_form, False),
            whole(b, b_scale, source, b_form, True, budget),
            **_options(words), out=out, budget=budget, distribution=tuple(names) or None,
            on_miss=on_miss,
        )  # fmt: skip


def _gemm_norm_op(*given: Any) -> Tensor:
    made = _called(given)
    return made.data if isinstance(made, QuantizedTensor) else made


def _gemm_norm_scaled_op(*given: Any) -> tuple[Tensor, Tensor]:
    made = _called(given)
    assert isinstance(made, QuantizedTensor) and made.scale is not None  # its format is FP8
    return made.data, made.scale


def _gemm_norm_out_op(out: Tensor, *given: Any) -> None:
    _called(given, out)


def _quantized_rows(x: Tensor, words: Sequence[Any]) -> QuantizedTensor:
    options = _options(words)
    options["granularity"] = options.pop("out_granularity")
    del options["bias"]
    with torch.no_grad():
        return norm_quantize(x, **options)


def _norm_quantize_op(x: Tensor, *words: Any) -> Tensor:
    return _quantized_rows(x, words).data


def _norm_quantize_scaled_op(x: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    made = _quantized_rows(x, words)
    assert made.scale is not None  # its format is FP8
    return made.data, made.scale


def _empty_output(
    op: str, x: Tensor, columns: int, words: Sequence[Any]
) -> tuple[Tensor, Tensor | None]:
    """An output, and scales that the op makes; checks all but addresses."""
    options, rows = _options(words), x.shape[0]
    out_format, out_granularity, scale = (
        options.pop(f"out_{name}") for name in ("format", "granularity", "scale")
    )
    epilogue = epilogue_of_call(op, **options)
    form, granularity = out_kind(
        op, out_format, out_granularity, scale, x, quantizes=op == "norm_quantize"
    )
    check_epilogue(op, epilogue, rows, columns, half_of(x, form, epilogue))
    if not form.is_fp8:
        return torch.empty((rows, columns), dtype=form.dtype, device=x.device), None
    data = empty_data(rows, columns, form.dtype, x.device)
    if granularity is Granularity.TENSOR:
        return data, None
    return data, granularity.empty_scale(rows, columns, x.device)


def _gemm_norm_fake(*given: Any) -> Any:
    a, b, b_form = given[0], given[3], given[6]
    rows = b.shape[0] if b_form == "" else b.shape[1]
    if a.shape[1] != rows:
        raise ShapeError(f"gemm_norm: a is {list(a.shape)} and b has {rows} rows; expected k")
    data, scale = _empty_output("gemm_norm", a, columns_of(b, b_form), given[7:-3])
    return data if scale is None else (data, scale)


def _norm_quantize_fake(x: Tensor, *words: Any) -> Any:
    data, scale = _empty_output("norm_quantize", x, x.shape[1], words)
    return data if scale is None else (data, scale)


def _save_for_gemm_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, source, b_form = inputs[0], inputs[5], inputs[6]
    words = inputs[7:-3]
    ctx.right = 3 if source is None else 5  # the place of the right operand
    ctx.is_turned = b_form != ""
    weight = inputs[ctx.right]
    ctx.count = len(inputs)
    ctx.limits = inputs[-3]
    ctx.form = epilogue_of_call("gemm_norm", norm=words[7], eps=words[8], activation=words[9],
                                gate=None)._replace(residual_last=words[10])  # fmt: skip
    ctx.save_for_backward(a, weight.t() if ctx.is_turned else weight, *words[:7])


def _gemm_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    found = _gradients(
        grad, ctx.saved_tensors, ctx.form, (needs[0], needs[ctx.right], *needs[7:14]),
        budget_of_limits(ctx.limits),
    )  # fmt: skip
    gradients: list[Tensor | None] = [None] * ctx.count
    weight = found[1]
    gradients[0] = found[0]
    gradients[ctx.right] = weight.t() if weight is not None and ctx.is_turned else weight
    gradients[7:14] = found[2:]
    return tuple(gradients)


_GEMM_NORM = f"({_OPERANDS}, {_EPILOGUE}, {_CHOICE})"
_BOTH = "(Tensor, Tensor)"
for _schema, _op, _fake in (
    (f"gemm_norm{_GEMM_NORM} -> Tensor", _gemm_norm_op, _gemm_norm_fake),
    (f"gemm_norm_scaled{_GEMM_NORM} -> {_BOTH}", _gemm_norm_scaled_op, _gemm_norm_fake),
    (f"gemm_norm_out(Tensor(a!) out, {_GEMM_NORM[1:]} -> ()", _gemm_norm_out_op, lambda *_: None),
    (f"norm_quantize(Tensor rows, {_EPILOGUE}) -> Tensor", _norm_quantize_op, _norm_quantize_fake),
    (f"norm_quantize_scaled(Tensor rows, {_EPILOGUE}) -> {_BOTH}", _norm_quantize_scaled_op,
     _norm_quantize_fake),
):  # fmt: skip
    (plain_op if "!" in _schema else recorded_op)(_LIBRARY, _schema, _op)
    torch.library.register_fake(f"lokakern::{_schema.partition('(')[0]}", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "lokakern::gemm_norm", _gemm_norm_backward, setup_context=_save_for_gemm_norm, lib=_LIBRARY
)
