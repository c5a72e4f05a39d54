"""Measurements and Probe reports made by hand, for conversions of small models."""

from __future__ import annotations

from typing import Any

from lokakern.conversion.routes import _grad_input_problem
from lokakern.probe.report import Judged, ProbeReport
from lokakern.probe.verdicts import ClassVerdict, Verdict
from lokakern.types import ErrorBudget, Problem
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.measurements import BF16, TENSOR, accuracy, gemm, time
from tests.support.measurements import ROW as ROW_KERNEL

H200 = "NVIDIA H200"
N, K = 64, 48
BLOCK_KERNEL = "cuda.quantize_group+cuda.scaled_gemm_block"


def rows_of(problem: Problem, *, bf16: float, errors: bool = True, **kernels: float) -> list[Any]:
    """Times of bf16 and of others, and an error of 0.04, which is of every m."""
    names = {"row": ROW_KERNEL, "tensor": TENSOR, "block": BLOCK_KERNEL}
    rows = [time(BF16, problem, bf16)]
    for name, us in kernels.items():
        rows.append(time(names[name], problem, us))
        if errors:
            rows.append(accuracy(names[name], problem, 0.04, only=("X1",)))
    return rows


def measured() -> list[Any]:
    """The output is worth it from m = 256 on, the input's gradient everywhere, its weight's at 256.

    Without a bias, and of weights that are not prepared.
    """
    rows = []
    for m, bf16, row in ((16, 2.0, 4.0), (256, 4.0, 3.0), (1024, 16.0, 8.0)):
        rows += rows_of(gemm(m, N, K), bf16=bf16, row=row, errors=m == 16)
        problem = _grad_input_problem(N, K)(m)
        rows += rows_of(problem, bf16=bf16, row=bf16 / 2, errors=m == 16)
    for m, row in ((16, 9.0), (256, 5.0), (1024, 9.0)):
        rows += rows_of(grad_weight_case(m, N, K).problem, bf16=8.0, row=row)
    return rows


def verdict(gemm: str, scales: str, safety: str, row_err: float, site: str = "0") -> Verdict:
    found = ClassVerdict(scales, safety, row_err, row_err, row_err, reason="few rows")
    return Verdict(site, gemm, (256, N, K), "", safety, "", "", 0.002, None, "", (), (found,))


def report_of(*verdicts: Verdict) -> ProbeReport:
    judged = [Judged(verdict, {}, 1) for verdict in verdicts]
    return ProbeReport(judged, ErrorBudget(row_err=0.06), None)
