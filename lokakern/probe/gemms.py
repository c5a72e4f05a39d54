"""The GEMMs of a site as problems, and what a replay finds at them."""

from __future__ import annotations

from dataclasses import dataclass

from lokakern.bench.forms import grad_input_cases, grad_weight_case
from lokakern.device import current_device
from lokakern.norm import norm_named
from lokakern.probe.site import SiteStatistics
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format
from lokakern.types import Granularity, Problem

BLOCK = 256  # columns of BlockNorm, where they divide a row


@dataclass(frozen=True, slots=True)
class Replayed:
    """Errors of one numerics class at one GEMM of a site: the worst of all seeds.

    Attributes:
        gemm: "output", "grad_input" or "grad_weight".
        norm: The normalization after which the error was taken; "" before any.
        kernel: Who was measured.
        granularity: Of the scales of its left operand; NONE if it does not quantize.
        b_granularity: Of those of its right one.
        row_err: As measured.
        row_err_upper: The 95 % upper limit: what is held against a budget.
        row_p99: Of rows.
        rows: Of each draw.
        reason: Why there is no error; "" where there is.
    """

    gemm: str
    norm: str
    kernel: str
    granularity: Granularity
    b_granularity: Granularity
    row_err: float
    row_err_upper: float
    row_p99: float
    rows: int
    reason: str = ""


def problem_of(site: SiteStatistics, gemm: str, m: int, norm: str = "") -> Problem:
    """One GEMM of a site at m rows, and the normalization after it, if it is asked for."""
    if norm:
        return make_problem("gemm_norm", (m, site.n, site.k), epilogue=norm)
    if gemm == "output":
        return make_problem("gemm", (m, site.n, site.k))
    if gemm == "grad_input":
        fp8 = fp8_format(current_device())
        return next(iter(grad_input_cases(m, site.n, site.k, fp8))).problem
    return grad_weight_case(m, site.n, site.k).problem


def block_norm(columns: int) -> str:
    """BlockNorm of the most columns, at most 256, that divide a row."""
    block = max(size for size in range(1, min(BLOCK, columns) + 1) if columns % size == 0)
    return str(norm_named(f"block_rms({block})"))
