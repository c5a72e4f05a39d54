"""Cases of GEMMs: the forms in which a layer of a model is measured.

A layer is ``Y[m, n] = X[m, k] W[n, k]^T``. It is measured as an unquantized GEMM, with a prepared
weight, and as the parts of an FP8 GEMM. Its backward pass: `gemm_gradient_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lokakern.functional.checks import operand_of
from lokakern.problems import make_problem
from lokakern.types import Format, Granularity, Layout, Operand, Problem, alignment_of

PREPARED_FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)
LEFT_SCALES = (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the distribution of its operands in timings."""

    problem: Problem
    distribution: str

    @classmethod
    def of(cls, op: str, shape: tuple[int, ...], distribution: str, **fields: Any) -> Case:
        """A case of `make_problem`."""
        return cls(make_problem(op, shape, **fields), distribution)


def dense_operand(form: Format, shape: tuple[int, int], layout: Layout, prefer: Layout) -> Operand:
    """`lokakern.functional.checks.operand_of` a contiguous matrix or its transpose.

    Args:
        form: Element format.
        shape: Rows and columns.
        layout: Contiguous axis.
        prefer: Layout of a vector, which is contiguous along both axes.
    """
    x = torch.empty(shape if layout is Layout.ROW else shape[::-1], dtype=form.dtype, device="meta")
    return operand_of(x if layout is Layout.ROW else x.t(), prefer)


def prepared_weight(fp8: Format, granularity: Granularity) -> Operand:
    return Operand(fp8, granularity, Layout.COLUMN)


def quantized_output(form: Format, granularity: Granularity) -> dict[str, Any]:
    """Fields of a problem whose output is quantized."""
    return {"out_format": form, "out_granularity": granularity}


def gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, **fields: Any
) -> Iterator[Case]:
    """A GEMM in all forms: unquantized, with prepared weights, and the parts of an FP8 GEMM."""
    yield from whole_gemm_cases(m, n, k, distribution, fp8, **fields)
    yield from scaled_gemm_cases(m, n, k, distribution, fp8)
    for granularity in LEFT_SCALES:
        yield quantize_case(m, k, granularity, distribution, fp8)


def whole_gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, **fields: Any
) -> Iterator[Case]:
    """A GEMM of unquantized operands, and with a weight prepared with each granularity."""
    yield unquantized_case(m, n, k, distribution, **fields)
    yield from prepared_cases(m, n, k, distribution, fp8, **fields)


def unquantized_case(
    m: int, n: int, k: int, distribution: str, form: Format = Format.BFLOAT16, **fields: Any
) -> Case:
    """A GEMM, or a batch of GEMMs, of unquantized operands; fields are those of `Problem`."""
    if form is not Format.BFLOAT16:
        fields["a"] = dense_operand(form, (m, k), Layout.ROW, Layout.ROW)
        fields["b"] = dense_operand(form, (k, n), Layout.COLUMN, Layout.COLUMN)
    return Case.of("gemm", (m, n, k), distribution, **fields)


def prepared_cases(
    m: int,
    n: int,
    k: int,
    distribution: str,
    fp8: Format,
    form: Format = Format.BFLOAT16,
    *,
    granularities: Sequence[Granularity] = PREPARED_FORMS,
    **fields: Any,
) -> Iterator[Case]:
    """A GEMM with a prepared weight, for each granularity."""
    if form is not Format.BFLOAT16:
        fields["a"] = dense_operand(form, (m, k), Layout.ROW, Layout.ROW)
    for granularity in granularities:
        weight = prepared_weight(fp8, granularity)
        yield Case.of("gemm", (m, n, k), distribution, b=weight, prepared=True, **fields)


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
        yield fused_case(m, n, k, granularity, distribution, fp8)


def fused_case(
    m: int,
    n: int,
    k: int,
    granularity: Granularity,
    distribution: str,
    fp8: Format,
    epilogue: str = "none",
    **fields: Any,
) -> Case:
    """A scaled GEMM with an epilogue, with FP8 outputs and a static scale, or with groups."""
    a = Operand(fp8, granularity)
    return Case.of("scaled_gemm", (m, n, k), distribution, a=a, epilogue=epilogue, **fields)


def quantize_case(
    m: int,
    k: int,
    granularity: Granularity,
    distribution: str,
    fp8: Format,
    form: Format = Format.BFLOAT16,
) -> Case:
    a = Operand(form, Granularity.NONE, Layout.ROW, alignment_of(k * form.dtype.itemsize))
    return Case.of("quantize", (m, k), distribution, a=a, **quantized_output(fp8, granularity))


def dequantize_case(
    m: int, k: int, granularity: Granularity, distribution: str, fp8: Format
) -> Case:
    return Case.of("dequantize", (m, k), distribution, a=Operand(fp8, granularity))


def shape_cases(shapes: Sequence[tuple[int, ...]], fp8: Format) -> Iterator[Case]:
    """All cases of shapes from a user: ``(m, n, k)`` of GEMMs, ``(m, k)`` of quantizers."""
    for shape in shapes:
        m, k = shape[0], shape[-1]
        if len(shape) == 3:
            yield from gemm_cases(m, shape[1], k, "X1", fp8)
            continue
        for granularity in (*LEFT_SCALES, Granularity.BLOCK):
            yield quantize_case(m, k, granularity, "X1", fp8)
            yield dequantize_case(m, k, granularity, "X1", fp8)
