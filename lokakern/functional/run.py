"""Run a given kernel, with the checks of its op's public function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lokakern.functional.checks import gemm_problem, note_write
from lokakern.functional.gemm_norm import gemm_norm_by, norm_quantize_by
from lokakern.functional.quantize import dequantize_by, quantize_by, quantize_transpose_by
from lokakern.functional.scaled_gemm import scaled_gemm_by
from lokakern.registry.register import Kernel
from lokakern.selection import choice
from lokakern.selection.kernel_policy import only
from lokakern.types import Format


def run(
    kernel: Kernel,
    *operands: Any,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    **options: Any,
) -> Any:
    """Run a kernel on operands.

    Args:
        kernel: A registered kernel.
        operands: ``a, b`` of gemm, scaled_gemm or gemm_norm, ``x`` of other ops.
        bias: Only for ops with two operands.
        out: Only for ops with two operands.
        out_format: Not for gemm; None means the default.
        options: Other options of the op's public function.

    Raises:
        UnsupportedError: The kernel rejects these operands; the message has its reason.
    """
    choose = only(kernel)
    if kernel.op == "quantize":
        return quantize_by(choose, operands[0], kernel.granularity, out_format, **options)
    if kernel.op == "quantize_transpose":
        return quantize_transpose_by(choose, operands[0], kernel.granularity, out_format, **options)
    if kernel.op == "dequantize":
        return dequantize_by(choose, operands[0], out_format or Format.BFLOAT16)
    if kernel.op == "norm_quantize":
        return norm_quantize_by(choose, operands[0], out_format=out_format, **options)
    a, b = operands
    if kernel.op == "gemm_norm":
        return gemm_norm_by(choose, a, b, bias=bias, out=out, out_format=out_format, **options)
    if kernel.op == "scaled_gemm":
        return scaled_gemm_by(choose, a, b, bias=bias, out=out, out_format=out_format, **options)
    problem = gemm_problem(a, b, bias, out)
    choose(problem, a)
    result = a.new_empty((problem.m, problem.n)) if out is None else out
    if problem.m and problem.n:
        kernel.launch(a, b, result, bias, kernel.workspace(a, b))
        note_write(out)
    return result


choice.set_runner(run)
