"""Cases of the GEMMs of a backward pass, with operands and formats of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from lokakern.types import Format, Granularity, Layout, Operand
from lokakern.workloads.gemm_cases import Case, dense_operand, prepared_cases

# Scales of the transposed weight in a backward pass; tensorwise scales are never better there.
PREPARED_BACKWARD_FORMS = (Granularity.ROW, Granularity.BLOCK)
# Formats of gradients, which need range more than precision.
WIDE_RANGE = {Format.E4M3FN: Format.E5M2, Format.E4M3FNUZ: Format.E5M2FNUZ}
GRADIENTS = "X12"  # distribution of all GEMMs of a backward pass


def main_grad_case(m: int, n: int, k: int, form: Format, fp8: Format) -> Case:
    """``dW[n, k] += dY[m, n]^T X[m, k]`` in float32, with operands quantized along samples.

    ``form`` is the format of the gradient, ``fp8`` that of the activations.
    """
    a = Operand(form, Granularity.GROUP)
    b = Operand(fp8, Granularity.GROUP, Layout.COLUMN)
    fields = {"out_format": Format.FLOAT32, "accumulate": True}
    return Case.of("scaled_gemm", (n, k, m), GRADIENTS, a=a, b=b, **fields)


def grad_input_cases(
    m: int, n: int, k: int, fp8: Format, form: Format = Format.BFLOAT16, *, batch: int = 1
) -> Iterator[Case]:
    """``dX[m, k] = dY[m, n] W[n, k]``, W row-major; without a batch also with a prepared weight."""
    a = dense_operand(form, (m, n), Layout.ROW, Layout.ROW)
    b = dense_operand(form, (n, k), Layout.ROW, Layout.COLUMN)
    yield Case.of("gemm", (m, k, n), GRADIENTS, a=a, b=b, batch=batch)
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
    return Case.of("gemm", (n, k, m), GRADIENTS, a=a, b=b, batch=batch)
