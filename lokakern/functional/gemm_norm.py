"""`gemm_norm` and `norm_quantize`: check once, choose once, then allocate and launch."""

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
    gemm_norm_problem,
    in_place,
    norm_quantize_problem,
    out_kind,
    scale_of,
    settled,
    shown_name,
    worded,
)
from lokakern.norm import Norm
from lokakern.registry.register import Kernel
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of
from lokakern.selection.kernel_policy import (
    Chooser,
    after_miss,
    check_on_miss,
    fastest_within,
    kernel_of,
)
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
    """Multiply and normalize, ``f(norm(a @ b + bias))``, with the fastest kernel inside ``budget``.

    The norm is that of unrounded sums where a kernel does both; statistics are float32. A call that
    needs gradients is differentiated as the unquantized product.

    Args:
        a: ``[m, k]``, bfloat16, any strides; or from `quantize`.
        b: ``[k, n]``: bfloat16, ``weight.t()`` is the fast layout; or a weight from
            `prepare_weight`; or ``quantize(weight).t()``, where ``a`` is quantized.
        norm: "layer", "rms", "block_rms(n)" with n a divisor of the columns, or "none"; or a
            `lokakern.norm.Norm`.
        bias: ``[n]``, bfloat16 or float32, added to the sums; of one dtype with the next two.
        norm_weight: ``[n]``, what the norm is multiplied by.
        norm_bias: ``[n]``, what is added then.
        activation: f: "relu", "hardswish", "silu", or None.
        gate: f is ``gate * sigmoid(z)`` instead; ``[m, n]``, bfloat16, columns contiguous, as are
            the next two.
        residual: Added to the sums before the norm.
        residual_last: Whether the residual is added to the output instead.
        cross: f of DCN instead: ``(x0, x)`` make it ``x0 * z + x``.
        eps: Of the norm; None means 1e-5, or that of a `Norm`.
        out: Where to write, ``[m, n]``, bfloat16, columns contiguous; may be a slice.
        out_format: "bfloat16" or an FP8 format. None means the device's E4M3 where one of the next
            two is given, else bfloat16.
        out_granularity: Of the scales of an FP8 output: "row" (usual) or "1x128", made of the
            outputs as `quantize` makes them; or "tensor", of ``out_scale``.
        out_scale: Decode scale of a whole FP8 output, known ahead: a number, float32 ``[1, 1]``, or
            "static", under which nothing saturates: what the norm, its weight and its bias bound
            the output by (not with a gate, a cross, a last residual, or without a norm).
        budget: Largest accepted row error against a float64 result, or an `ErrorBudget`, over
            measured distributions. None means
            the fastest unquantized kernel that was measured, or the budget a weight was prepared
            for; of quantized operands, the fastest of all.
        distribution: As of `gemm`.
        on_miss: As of `gemm`; with "bf16", and without a budget or of quantized operands, nothing
            is logged.

    Returns:
        ``[m, n]``: a bfloat16 tensor, ``out`` where it is given; a `QuantizedTensor`, ready to be
        the next ``a``, in an FP8 format.

    Raises:
        ShapeError: The operands do not multiply, or another tensor does not fit them.
        FormatError: A dtype, format, granularity or scale does not fit.
        UnknownNameError: No such norm or activation, or words that exclude each other.
        DeviceError: Operands are on different devices.
        BudgetError: The budget is not a finite, non-negative number.
        UnsupportedError: A gradient is asked for of what has none, or no kernel runs here.
        MissError: Nothing was measured and ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
    """
    epilogue = worded(
        "gemm_norm", norm, eps, activation, gate, residual, residual_last, cross,
        bias=bias, norm_weight=norm_weight, norm_bias=norm_bias,
    )  # fmt: skip
    kind = (out_format, out_granularity, out_scale)
    if torch.is_grad_enabled() and _needs_grad(a, b, epilogue):
        plain = out_format in (None, "bfloat16") and kind[1:] == (None, None)
        return _differentiable(
            a, b, epilogue, out, plain,
            lambda: _chosen(a, b, epilogue, out, kind, budget, distribution, on_miss),
        )  # fmt: skip
    return _chosen(a, b, epilogue, out, kind, budget, distribution, on_miss)


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
    """Normalize rows and quantize them, ``f(norm(x))``, in one read of ``x``.

    Args:
        x: ``[rows, columns]``, bfloat16.
        norm: As of `gemm_norm`, as are the next seven.
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
        UnsupportedError: A gradient is asked for: FP8 has none.
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
    norm: str | Norm,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    out_granularity: Granularity | str | None = None,
    out_scale: Scale = None,
    eps: float | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_last: bool = False,
    cross: Cross | None = None,
    **vectors: Tensor | None,
) -> Matrix:
    """`gemm_norm` by the kernel that somebody chooses."""
    epilogue = worded(
        "gemm_norm", norm, eps, activation, gate, residual, residual_last, cross, **vectors
    )
    problem = _posed(a, b, epilogue, out, (out_format, out_granularity, out_scale))
    result = _output("gemm_norm", problem, problem.m, problem.n, out, out_scale, epilogue, a.device)
    if problem.m and problem.n:
        left = a.data if isinstance(a, QuantizedTensor) else a
        _launch(choose(problem, left), a, b, result, epilogue)
    return result


def norm_quantize_by(
    choose: Chooser,
    x: Tensor,
    *,
    norm: str | Norm,
    granularity: Granularity | str | None = None,
    out_format: Format | str | None = None,
    out_scale: Scale = None,
    eps: float | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_last: bool = False,
    cross: Cross | None = None,
    **vectors: Tensor | None,
) -> QuantizedTensor:
    """`norm_quantize` by the kernel that somebody chooses."""
    op = "norm_quantize"
    epilogue = worded(op, norm, eps, activation, gate, residual, residual_last, cross, **vectors)
    check_matrix(op, "x", x)
    if x.dtype != torch.bfloat16:
        raise FormatError(f"{op}: x is {x.dtype}; expected torch.bfloat16 (use .bfloat16())")
    if torch.is_grad_enabled() and _needs_grad(x, None, epilogue):
        raise UnsupportedError(f"{op}: FP8 outputs have no gradient; use torch.no_grad()")
    kind = out_kind(op, out_format, granularity, out_scale, x, Granularity.ROW)
    problem = norm_quantize_problem(x, epilogue, kind, out_scale)
    result = _output(op, problem, problem.m, problem.k, None, out_scale, epilogue, x.device)
    assert isinstance(result, QuantizedTensor)  # its format is FP8
    if problem.m and problem.k:
        kernel, epilogue = choose(problem, x), settled(epilogue)
        kernel.launch(x, result, epilogue, kernel.workspace(x, result, epilogue))
    return result


def _chosen(
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
    for name in MATRICES:  # a plan is for every m
        x = getattr(epilogue, name)
        if x is not None and x.shape[0] != m:
            raise ShapeError(f"gemm_norm: {shown_name(name)} is {list(x.shape)}; expected {[m, n]}")
    if out is not None and out.shape[0] != m:
        raise ShapeError(f"gemm_norm: out is {list(out.shape)}; expected {[m, n]}")
    result = _output("gemm_norm", table.problem, m, n, out, kind[2], epilogue, a.device)
    if not m or not n:
        return result
    place = bisect_right(table.breakpoints, m) - 1
    if table.misses[place] and _is_told(table, m, on_miss):
        found = after_miss(table, m, on_miss)
        if found is None:
            return _chosen(a, b, epilogue, out, kind, table.budget, table.distributions, "raise")
        kernel = found
    elif table.baseline is None:
        kernel = kernel_of(table, m)
    else:
        found = table.kernels[place]
        assert found is not None  # a table for the device here has an unquantized kernel at least
        kernel = found
    _launch(kernel, a, b, result, epilogue)
    return result


def _is_told(table: Table, m: int, on_miss: str) -> bool:
    """Whether a miss is acted upon, or logged: without a budget only if that is asked for.

    Of quantized operands none is logged, and one that a budget alone makes is no miss.
    """
    if on_miss == "bf16":
        return table.baseline is not None and table.budget is not None
    return table.baseline is not None or table.pick(m).time is None


def _launch(kernel: Kernel, a: Matrix, b: Matrix, out: Matrix, epilogue: NormEpilogue) -> None:
    if isinstance(b, QuantizedTensor) and b.scale is None:  # prepared, and FP8 never pays
        b = b.transpose[0]
    epilogue = settled(epilogue)
    if isinstance(out, Tensor) and not out.shape[1] % 8 and not in_place(out):
        whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        kernel.launch(a, b, whole, epilogue, kernel.workspace(a, b, whole, epilogue))
        out.copy_(whole)
        return
    kernel.launch(a, b, out, epilogue, kernel.workspace(a, b, out, epilogue))


def _key_of(a: Any, b: Any, epilogue: NormEpilogue, out: Any, *rest: Any) -> Any:
    """What a plan depends on; None where an argument is wrong: the checks say which."""
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
            *others, type(others[0]),  # of the budget: True is none, and equals 1
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
    """A number is checked at every call, and so is a tensor, but for its device."""
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
    """Check everything a warm call relies on, and build the table it reads."""
    check_on_miss("gemm_norm", on_miss)
    problem = _posed(a, b, epilogue, out, kind)
    if budget is None and isinstance(b, QuantizedTensor) and isinstance(a, Tensor):
        budget = b.budget
    names = dispatcher.distribution_names(distribution)
    limits = None if budget is None else budget_of(budget)
    left = a.data if isinstance(a, QuantizedTensor) else a
    return dispatcher.table_for(problem, limits, names, device_of(left))


def _posed(
    a: Matrix,
    b: Matrix,
    epilogue: NormEpilogue,
    out: Tensor | None,
    kind: tuple[Any, Any, Scale],
) -> Problem:
    if not isinstance(a, QuantizedTensor):
        check_matrix("gemm_norm", "a", a)
    left = a.data if isinstance(a, QuantizedTensor) else a
    found = out_kind("gemm_norm", *kind, left, None)
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
    """What a kernel writes, allocated; scales of no output are 1."""
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
        assert out_scale is not None  # or the granularity were another
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
    """The result of a call, which has the gradient of the unquantized product.

    Nothing but the operands is kept for the backward pass, which multiplies and normalizes again.

    Args:
        a: As of the call, as are the next three.
        b: Its unquantized source is what the gradient is of.
        epilogue: All that is done to the sums.
        out: Must be None.
        plain: Whether the output is bfloat16.
        call: Makes the result.

    Raises:
        UnsupportedError: What is asked for has no such gradient.
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
    """Forward by whatever kernel; backward through torch's own steps in float32, done again."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return arguments[-1]()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-2])
        ctx.epilogue = inputs[-2]._replace(**dict.fromkeys(_TENSORS))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from lokakern.kernels.torch.norm import normalized  # at call time: a kernel's module

        needs = ctx.needs_input_grad[:-2]
        again = torch.is_grad_enabled()  # whether what is made here is differentiated, too
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
