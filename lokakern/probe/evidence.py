"""What was seen of the operands of a GEMM, in numbers that a person reads."""

from __future__ import annotations

from typing import Any

from lokakern.probe.as_distribution import LearnedSite
from lokakern.probe.magnitudes import spread_of
from lokakern.probe.operand import OperandStatistics


def evidence_of(site: LearnedSite, gemm: str) -> dict[str, Any]:
    """Of a GEMM; names have units, a weight's gradient has both operands."""
    seen = site.statistics
    found: dict[str, Any] = {
        "m_p50": seen.m_quantile(0.5),
        "m_p99": seen.m_quantile(0.99),
        "sampled_rows": site.rows_of(gemm),
        "unlike_share": site.unlike(gemm),
    }
    if gemm != "grad_input":
        found["input"] = _operand(seen.input)
    if gemm != "output":
        found["grad_output"] = _operand(seen.grad_output)
    if gemm != "grad_weight":
        found["weight"] = {
            "snapshots": seen.snapshots,
            "row_spread_log2": spread_of(seen.snapshot.abs().amax(dim=1))
            if seen.snapshot is not None
            else None,
            "column_spread_log2": spread_of(seen.snapshot.abs().amax(dim=0))
            if seen.snapshot is not None
            else None,
        }
    if gemm == "grad_weight":
        found["cancellation"] = seen.cancellation
    if gemm == "output":
        found["output_mean_per_deviation_p99"] = seen.mean_ratio
    return found


def _operand(operand: OperandStatistics) -> dict[str, Any]:
    middle, high = operand.values.log2_quantiles(0.5, 0.999)
    return {
        "rows": operand.rows_seen,
        "amax": operand.amax,
        "amax_drift_log2": operand.amax_drift_log2,
        "p50_log2": middle,
        "p99.9_log2": high,
        "row_spread_log2": operand.row_sizes.spread_log2(),
        "column_spread_log2": spread_of(operand.column_sizes),
        "zero_row_share": operand.zero_row_share,
        "nonfinite_rows": operand.nonfinite_rows,
        "nonfinite_share": operand.nonfinite_share,
    }
