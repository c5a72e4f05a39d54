"""Run a named kernel on tensors, as the public function of its op does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lokakern.functional.checks import gemm_problem
from lokakern.functional.gemm_norm import gemm_norm_by, norm_quantize_by
from lokakern.functional.quantize import dequantize_by, quantize_by, quantize_transpose_by
from lokakern.functional.scaled_gemm import multiply
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
    """Run one kernel as the public function of its op runs the chosen one, checks included.

    Args:
        kernel: A registered kernel.
        operands: ``a, b`` of gemm, scaled_gemm or gemm_norm, ``x`` of the others.
        bias: Of the ops with two operands.
        out: Of the ops with two operands.
        out_format: Of all ops but gemm; None means the usual.
        options: Others of the op's public function.

    Raises:
        UnsupportedError: The kernel does not take these operands; its reason is in the message.
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
        return multiply(a, b, choose, bias=bias, out=out, out_format=out_format, **options)
    problem = gemm_problem(a, b, bias, out)
    choose(problem, a)
    out = a.new_empty((problem.m, problem.n)) if out is None else out
    if problem.m and problem.n:
        kernel.launch(a, b, out, bias, kernel.workspace(a, b))
    return out


choice.set_runner(run)
