"""What a sweep will cost, so that its estimate can be told before it begins.

The constants were fitted to the sweeps of an H200 (DESIGN.md, Timing contract).
"""

from __future__ import annotations

from lokakern.measure.accuracy import Cell, rows_drawn
from lokakern.measure.time_problem import floor_us
from lokakern.registry.ops import NORM_OPS
from lokakern.types import Device, Problem

BEGIN_S = 20.0  # kernels compiled on all cores, a worker, a GPU context
PROBLEM_S, CANDIDATE_S = 0.02, 0.022
NORM_CANDIDATE_S = 0.03  # compared after a norm in float64
# Calls of a candidate, in floors of its problem: warmed, replayed at least 5 times, checked.
GPU_CALLS, CPU_CALLS = 60.0, 8.0
CPU_SLOWDOWN = 1e4  # of an H200's floor, by a core
CPU_CANDIDATE_S = 0.06
ERROR_S, DRAWN_ELEMENT_S = 0.0013, 9.5e-10  # of one error; 16 cores draw while the GPU measures
NORM_ERROR_S = 0.0087  # 12090 of suite norms in 138 s: norms in float64, too
NEEDED_SHARE = 0.6  # of all errors, those of kernels that somebody might choose


def timing_s(problem: Problem, candidates: int, device: Device) -> float:
    """Seconds to time a problem's candidates."""
    call_s = floor_us(problem) * 1e-6
    if not device.is_gpu:
        each = CPU_CANDIDATE_S + CPU_CALLS * CPU_SLOWDOWN * call_s / device.compute_units
        return PROBLEM_S + candidates * each
    candidate_s = NORM_CANDIDATE_S if problem.op in NORM_OPS else CANDIDATE_S
    return PROBLEM_S + candidates * (candidate_s + GPU_CALLS * call_s)


def error_s(cell: Cell, device: Device) -> float:
    """Seconds to measure one error."""
    problem = cell.problem
    rows, columns = rows_drawn(problem.m, problem.k), rows_drawn(problem.n, problem.k)
    if problem.b is None:
        columns = 0
    if device.is_gpu:
        each_s = NORM_ERROR_S if problem.op in NORM_OPS else ERROR_S
        return each_s + DRAWN_ELEMENT_S * (rows + columns) * problem.k
    return ERROR_S + rows * max(columns, 1) * problem.k / 1e10
