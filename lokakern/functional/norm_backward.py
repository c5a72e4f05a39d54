"""The backward pass of a norm and what follows: check, choose a kernel, allocate, launch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.functional.checks import (
    check_matrix,
    check_same_device,
    granularity_named,
    operand_of,
)
from lokakern.functional.norm_checks import check_epilogue, worded
from lokakern.gradients import NormGradients, empty_gradients
from lokakern.norm import Norm
from lokakern.problems import format_named
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of
from lokakern.selection.kernel_policy import Chooser, fastest_within
from lokakern.types import (
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
)

OP = "norm_backward"
WIDE = {Format.E4M3FN: Format.E5M2, Format.E4M3FNUZ: Format.E5M2FNUZ}


class NormBackward(NamedTuple):
    """Gradients of what went into a norm; None for what is not asked for.

    Attributes:
        dy: Of what was normalized, and of a residual added before, bfloat16 ``[m, k]``.
        quantized: The same as the left operand of the GEMM that makes the gradient of the input,
            ``[m, k]``: quantized from float32, not from `dy`.
        quantized_t: Its transpose as the left operand of the GEMM that makes the weight's gradient,
            ``[k, m]``, with scales of its own.
        norm_weight: Of the norm's weight, float32 ``[k]``.
        norm_bias: Of the norm's bias, float32 ``[k]``.
        bias: Of the bias of the GEMM before, float32 ``[k]``.
    """

    dy: Tensor | None
    quantized: QuantizedTensor | None
    quantized_t: QuantizedTensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    bias: Tensor | None


def norm_backward(
    dd: Tensor,
    y: Tensor,
    *,
    norm: str | Norm,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str | None = None,
    eps: float | None = None,
    out_format: Format | str | None = None,
    granularity: Granularity | str = Granularity.GROUP,
    plain: bool = True,
) -> NormBackward:
    """Gradients of ``activation(norm(y))``, quantized for the next GEMMs of a backward pass.

    One read of ``dd`` and ``y`` makes all of them. A residual that was added before the norm has
    the gradient ``dy``, one that was added last has ``dd``.

    Args:
        dd: Gradient of the output, ``[m, k]``, bfloat16.
        y: What was normalized, ``[m, k]``, bfloat16: sums, bias and residual.
        norm: As of `gemm_norm`, as are the next five.
        bias: Of the GEMM before, ``[k]``: given, its gradient is made; it is in ``y`` already.
        norm_weight: ``[k]``.
        norm_bias: ``[k]``.
        activation: "relu", "hardswish", "silu", or None.
        eps: Of the norm.
        out_format: An FP8 format; None means the device's E5M2; "bfloat16" quantizes nothing.
        granularity: Of the scales of both: "1x128" or "row".
        plain: Whether ``dy`` is wanted, beside what is quantized.

    Raises:
        ShapeError: Tensors do not fit each other, or the norm a row.
        FormatError: A dtype, format or granularity is not supported.
        UnknownNameError: No such norm or activation.
        DeviceError: Tensors are on different devices.
        UnsupportedError: No kernel runs here, or what is made would be differentiated again.
    """
    operands = (dd, y, bias, norm_weight, norm_bias)
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in operands):
        raise UnsupportedError(
            f"{OP}: an operand requires a gradient, and the gradients that {OP} returns cannot be "
            "differentiated: detach it, use torch.no_grad(), or leave out create_graph=True"
        )
    epilogue = worded(
        OP, norm, eps, activation, None, None, False, None,
        bias=bias, norm_weight=norm_weight, norm_bias=norm_bias,
    )  # fmt: skip
    return norm_backward_by(
        fastest_within(None), dd, y, epilogue, out_format=out_format, granularity=granularity,
        plain=plain,
    )  # fmt: skip


@torch.no_grad()
def norm_backward_by(
    choose: Chooser,
    dd: Tensor,
    y: Tensor,
    epilogue: NormEpilogue,
    *,
    out_format: Format | str | None = None,
    granularity: Granularity | str = Granularity.GROUP,
    plain: bool = True,
) -> NormBackward:
    """`norm_backward` by the kernel that somebody chooses."""
    problem = _posed(dd, y, epilogue, out_format, granularity, plain)
    m, k = problem.shape
    outputs = empty_gradients(problem, epilogue, y.device)
    if not m or not k:
        _fill_empty(outputs)
    else:
        kernel = choose(problem, y)
        operands = (dd, y, outputs, epilogue)
        kernel.launch(*operands, kernel.workspace(*operands))
    sums = iter(() if outputs.sums is None else outputs.sums)
    bias, weight, shift = (
        None if x is None else next(sums)
        for x in (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    )
    return NormBackward(outputs.dy, outputs.quantized, outputs.quantized_t, weight, shift, bias)


def _posed(
    dd: Tensor,
    y: Tensor,
    epilogue: NormEpilogue,
    out_format: Format | str | None,
    granularity: Granularity | str,
    plain: bool,
) -> Problem:
    for name, x in (("dd", dd), ("y", y)):
        check_matrix(OP, name, x)
        if x.dtype != torch.bfloat16:
            raise FormatError(f"{OP}: {name} is {x.dtype}; expected torch.bfloat16")
    if dd.shape != y.shape:
        raise ShapeError(f"{OP}: dd is {list(dd.shape)} and y {list(y.shape)}; expected one shape")
    vectors = {name: getattr(epilogue, name) for name in ("bias", "norm_weight", "norm_bias")}
    check_same_device(OP, dd=dd, y=y, **vectors)
    check_epilogue(OP, epilogue, *y.shape)
    form = WIDE[fp8_format(device_of(y))]
    form = form if out_format is None else format_named(OP, out_format)
    scales = granularity_named(OP, granularity)
    if form is Format.FLOAT32:
        raise FormatError(f"{OP}: out_format is 'float32'; expected 'bfloat16' or an FP8 format")
    if scales not in (Granularity.ROW, Granularity.GROUP):
        raise FormatError(f"{OP}: granularity is {scales.value!r}; expected 1x128 or row")
    if not form.is_fp8:
        scales = Granularity.NONE
    words = epilogue.form._replace(residual=plain and form.is_fp8)
    rows, columns = y.shape
    return Problem(
        op=OP, m=rows, n=1, k=columns, a=_operand_of(dd, y), epilogue=str(words), out_format=form,
        out_granularity=scales,
    )  # fmt: skip


def _operand_of(dd: Tensor, y: Tensor) -> Operand:
    """How both lie in memory, the harder of them."""
    first, second = operand_of(dd), operand_of(y)
    layout = first.layout if second.layout is Layout.ROW else second.layout
    return replace(first, layout=layout, alignment=min(first.alignment, second.alignment))


def _fill_empty(outputs: NormGradients) -> None:
    """Of no elements: scales are 1, and sums 0."""
    for made in (outputs.quantized, outputs.quantized_t):
        if made is not None and made.scale is not None:
            made.scale.fill_(1.0)
    if outputs.sums is not None:
        outputs.sums.zero_()
