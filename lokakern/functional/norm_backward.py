"""`norm_backward`: the backward pass of a norm and an activation."""

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
from lokakern.functional.norm_checks import check_epilogue, epilogue_of_call, half_of
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
    """Gradients of the inputs of a norm; None where not requested.

    Attributes:
        dy: Gradient of the norm's input, and of a residual added to it, ``[m, k]``, in the dtype
            of y.
        quantized: The same, quantized from float32, ``[m, k]``: left operand of the GEMM for the
            gradient of the layer's input.
        quantized_t: Its transpose, with its own scales, ``[k, m]``: left operand of the GEMM for
            the gradient of the layer's weight.
        norm_weight: Gradient of the norm's weight, float32 ``[k]``.
        norm_bias: Gradient of the norm's bias, float32 ``[k]``.
        bias: Gradient of the GEMM's bias, float32 ``[k]``.
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

    All are computed in one pass over ``dd`` and ``y``. A residual that was added before the norm
    has the gradient ``dy``, a residual that was added last has ``dd``.

    Args:
        dd: Gradient of the output, ``[m, k]``, in the dtype of y.
        y: Input of the norm, ``[m, k]``, bfloat16 or float16: sums, bias and residual.
        norm: As of `gemm_norm`.
        bias: Bias of the GEMM, ``[k]``, which ``y`` includes; if given, its gradient is computed.
        norm_weight: ``[k]``, in float32 or the dtype of y, as are all vectors.
        norm_bias: ``[k]``.
        activation: "relu", "hardswish", "silu", "gelu", "gelu_tanh", or None.
        eps: Of the norm.
        out_format: An FP8 format; None means the device's E5M2; the dtype of y quantizes
            nothing.
        granularity: "1x128" or "row".
        plain: Whether to return ``dy`` together with quantized gradients.

    Raises:
        ShapeError: Shapes do not match, or blocks do not divide the columns.
        FormatError: A dtype, format or granularity is not supported.
        UnknownNameError: The norm or activation is unknown.
        DeviceError: Tensors are on different devices.
        UnsupportedError: No kernel runs here, or the call would have to be differentiated.
    """
    operands = (dd, y, bias, norm_weight, norm_bias)
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in operands):
        raise UnsupportedError(
            f"{OP}: an operand requires a gradient, and the gradients that {OP} returns cannot be "
            "differentiated: detach it, use torch.no_grad(), or leave out create_graph=True"
        )
    epilogue = epilogue_of_call(
        OP, norm=norm, eps=eps, activation=activation, bias=bias, norm_weight=norm_weight,
        norm_bias=norm_bias,
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
    """`norm_backward` with the kernel that ``choose`` returns."""
    problem = _problem_of(dd, y, epilogue, out_format, granularity, plain)
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


def _problem_of(
    dd: Tensor,
    y: Tensor,
    epilogue: NormEpilogue,
    out_format: Format | str | None,
    granularity: Granularity | str,
    plain: bool,
) -> Problem:
    for name, x in (("dd", dd), ("y", y)):
        check_matrix(OP, name, x)
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(
                f"{OP}: {name} is {x.dtype}; expected torch.bfloat16 or torch.float16"
            )
    if dd.shape != y.shape:
        raise ShapeError(f"{OP}: dd is {list(dd.shape)} and y {list(y.shape)}; expected one shape")
    if dd.dtype != y.dtype:
        raise FormatError(f"{OP}: dd is {dd.dtype} and y {y.dtype}; expected one dtype")
    vectors = {name: getattr(epilogue, name) for name in ("bias", "norm_weight", "norm_bias")}
    check_same_device(OP, dd=dd, y=y, **vectors)
    rows, columns = y.shape
    check_epilogue(OP, epilogue, rows, columns, half_of(y))
    form = WIDE[fp8_format(device_of(y))]
    form = form if out_format is None else format_named(OP, out_format)
    scales = granularity_named(OP, granularity)
    half = Format.of(y.dtype)
    if form is not half and not form.is_fp8:
        raise FormatError(
            f"{OP}: out_format is {form.value!r}; expected {half.value!r} or an FP8 format"
        )
    if scales not in (Granularity.ROW, Granularity.GROUP):
        raise FormatError(f"{OP}: granularity is {scales.value!r}; expected 1x128 or row")
    if not form.is_fp8:
        scales = Granularity.NONE
    words = epilogue.form._replace(residual=plain and form.is_fp8)
    return Problem(
        op=OP, m=rows, n=1, k=columns, a=_operand_of(dd, y), epilogue=str(words), out_format=form,
        out_granularity=scales,
    )  # fmt: skip


def _operand_of(dd: Tensor, y: Tensor) -> Operand:
    """The operand of both, with the less favorable layout and alignment."""
    first, second = operand_of(dd), operand_of(y)
    layout = first.layout if second.layout is Layout.ROW else second.layout
    return replace(first, layout=layout, alignment=min(first.alignment, second.alignment))


def _fill_empty(outputs: NormGradients) -> None:
    """Fill outputs without elements: scales with 1, sums with 0."""
    for made in (outputs.quantized, outputs.quantized_t):
        if made is not None and made.scale is not None:
            made.scale.fill_(1.0)
    if outputs.sums is not None:
        outputs.sums.zero_()
