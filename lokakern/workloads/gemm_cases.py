"""Cases of GEMMs: the forms in which a layer of a model is measured.

A layer is ``Y[m, n] = X[m, k] W[n, k]^T``. It is measured as an unquantized GEMM, with a prepared
weight, as the parts of an FP8 GEMM, and as the two GEMMs of its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lokakern.problems import make_problem
from lokakern.types import Format, Granularity, Layout, Operand, Problem, alignment_of

PREPARED_FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)
# Scales of the transposed weight in a backward pass; tensorwise scales are never better there.
PREPARED_BACKWARD_FORMS = (Granularity.ROW, Granularity.BLOCK)
LEFT_SCALES = (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP)
# Formats of gradients, which need range more than precision.
WIDE_RANGE = {Format.E4M3FN: Format.E5M2, Format.E4M3FNUZ: Format.E5M2FNUZ}
GRADIENTS = "X12"  # distribution of all GEMMs of a backward pass


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the distribution of its operands in timings."""

    problem: Problem
    distribution: str


def dense_operand(form: Format, shape: tuple[int, int], layout: Layout, prefer: Layout) -> Operand:
    """`lokakern.functional.checks.operand_of` a contiguous matrix or its transpose.

    Args:
        form: Element format.
        shape: Rows and columns.
        layout: Contiguous axis.
        prefer: Layout of a vector, which is contiguous along both axes.
    """
    rows, columns = shape
    strides = (columns, 1) if layout is Layout.ROW else (1, rows)
    if rows == 1 or columns == 1:
        layout = prefer
    outer, count = (strides[0], rows) if layout is Layout.ROW else (strides[1], columns)
    step = outer * form.dtype.itemsize if count > 1 else 0
    return Operand(form, Granularity.NONE, layout, alignment_of(step))


def prepared_weight(fp8: Format, granularity: Granularity) -> Operand:
    return Operand(fp8, granularity, Layout.COLUMN)


def gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, *, bias: bool = False
) -> Iterator[Case]:
    """A GEMM in all forms: unquantized, with prepared weights, and the parts of an FP8 GEMM."""
    yield from whole_gemm_cases(m, n, k, distribution, fp8, bias=bias)
    yield from scaled_gemm_cases(m, n, k, distribution, fp8)
    for granularity in LEFT_SCALES:
        yield quantize_case(m, k, granularity, distribution, fp8)


def whole_gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, *, bias: bool = False
) -> Iterator[Case]:
    """A GEMM of unquantized operands, and with a weight prepared with each granularity."""
    yield unquantized_case(m, n, k, distribution, bias=bias)
    yield from prepared_cases(m, n, k, distribution, fp8, bias=bias)


def unquantized_case(
    m: int,
    n: int,
    k: int,
    distribution: str,
    form: Format = Format.BFLOAT16,
    *,
    bias: bool = False,
    batch: int = 1,
) -> Case:
    """A GEMM, or a batch of GEMMs, of unquantized operands."""
    fields: dict[str, Any] = {"epilogue": "bias"} if bias else {}
    if form is not Format.BFLOAT16:
        fields["a"] = dense_operand(form, (m, k), Layout.ROW, Layout.ROW)
        fields["b"] = dense_operand(form, (k, n), Layout.COLUMN, Layout.COLUMN)
    return Case(make_problem("gemm", (m, n, k), batch=batch, **fields), distribution)


def prepared_cases(
    m: int,
    n: int,
    k: int,
    distribution: str,
    fp8: Format,
    form: Format = Format.BFLOAT16,
    *,
    bias: bool = False,
    granularities: Sequence[Granularity] = PREPARED_FORMS,
) -> Iterator[Case]:
    """A GEMM with a prepared weight, for each granularity."""
    fields: dict[str, Any] = {"epilogue": "bias"} if bias else {}
    if form is not Format.BFLOAT16:
        fields["a"] = dense_operand(form, (m, k), Layout.ROW, Layout.ROW)
    for granularity in granularities:
        weight = prepared_weight(fp8, granularity)
        yield Case(make_problem("gemm", (m, n, k), b=weight, prepared=True, **fields), distribution)


def scaled_gemm_cases(
    m: int,
    n: int,
    k: int,
    distribution: str,
    fp8: Format,
    granularities: Sequence[Granularity] = LEFT_SCALES,
) -> Iterator[Case]:
    """A GEMM of quantized operands, without bias."""
    for granularity in granularities:
        a = Operand(fp8, granularity)
        yield Case(make_problem("scaled_gemm", (m, n, k), a=a), distribution)


def fused_case(
    m: int,
    n: int,
    k: int,
    granularity: Granularity,
    distribution: str,
    fp8: Format,
    epilogue: str = "none",
    *,
    out_fp8: bool = False,
    batch: int = 1,
) -> Case:
    """A scaled GEMM with an epilogue, with FP8 outputs and a static scale, or with groups."""
    fields: dict[str, Any] = {"epilogue": epilogue, "batch": batch}
    if out_fp8:
        fields |= {"out_format": fp8, "out_granularity": Granularity.TENSOR}
    a = Operand(fp8, granularity)
    return Case(make_problem("scaled_gemm", (m, n, k), a=a, **fields), distribution)


def main_grad_case(m: int, n: int, k: int, form: Format, fp8: Format) -> Case:
    """``dW[n, k] += dY[m, n]^T X[m, k]`` in float32, with operands quantized along samples.

    ``form`` is the format of the gradient, ``fp8`` that of the activations.
    """
    a = Operand(form, Granularity.GROUP)
    b = Operand(fp8, Granularity.GROUP, Layout.COLUMN)
    problem = make_problem(
        "scaled_gemm", (n, k, m), a=a, b=b, out_format=Format.FLOAT32, accumulate=True
    )
    return Case(problem, GRADIENTS)


def grad_input_cases(
    m: int, n: int, k: int, fp8: Format, form: Format = Format.BFLOAT16, *, batch: int = 1
) -> Iterator[Case]:
    """``dX[m, k] = dY[m, n] W[n, k]``, W row-major; without a batch also with a prepared weight."""
    a = dense_operand(form, (m, n), Layout.ROW, Layout.ROW)
    b = dense_operand(form, (n, k), Layout.ROW, Layout.COLUMN)
    yield Case(make_problem("gemm", (m, k, n), a=a, b=b, batch=batch), GRADIENTS)
    if batch == 1:
        yield from prepared_cases(
            m, k, n, GRADIENTS, fp8, form, granularities=PREPARED_BACKWARD_FORMS
        )


def grad_weight_case(
    m: int, n: int, k: int, form: Format = Format.BFLOAT16, *, batch: int = 1
) -> Case:
    """``dW[n, k] = dY[m, n]^T X[m, k]``, a sum over samples."""
    a = dense_operand(form, (n, m), Layout.COLUMN, Layout.ROW)
    b = dense_operand(form, (m, k), Layout.ROW, Layout.COLUMN)
    return Case(make_problem("gemm", (n, k, m), a=a, b=b, batch=batch), GRADIENTS)


def quantize_case(
    m: int,
    k: int,
    granularity: Granularity,
    distribution: str,
    fp8: Format,
    form: Format = Format.BFLOAT16,
) -> Case:
    a = Operand(form, Granularity.NONE, Layout.ROW, alignment_of(k * form.dtype.itemsize))
    problem = make_problem("quantize", (m, k), a=a, out_format=fp8, out_granularity=granularity)
    return Case(problem, distribution)


def dequantize_case(
    m: int, k: int, granularity: Granularity, distribution: str, fp8: Format
) -> Case:
    operand = Operand(fp8, granularity)
    return Case(make_problem("dequantize", (m, k), a=operand), distribution)


def shape_cases(shapes: Sequence[tuple[int, ...]], fp8: Format) -> Iterator[Case]:
    """All cases of shapes from a user: ``(m, n, k)`` of GEMMs, ``(m, k)`` of quantizers."""
    for shape in shapes:
        m, k = shape[0], shape[-1]
        if len(shape) == 3:
            yield from gemm_cases(m, shape[1], k, "X1", fp8)
            continue
        for granularity in LEFT_SCALES:
            yield quantize_case(m, k, granularity, "X1", fp8)
            yield dequantize_case(m, k, granularity, "X1", fp8)
        yield quantize_case(m, k, Granularity.BLOCK, "X1", fp8)
        yield dequantize_case(m, k, Granularity.BLOCK, "X1", fp8)
