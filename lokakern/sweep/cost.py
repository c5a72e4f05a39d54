"""Estimates of the duration of a sweep, fitted to sweeps of an H200."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lokakern.measure.accuracy import sampled_rows
from lokakern.measure.time_problem import floor_us
from lokakern.registry.ops import NORM_OPS
from lokakern.sweep.resume import Job
from lokakern.types import Device, Problem

BEGIN_S = 20.0  # compiling on all cores, a worker, a GPU context
PROBLEM_S, CANDIDATE_S = 0.02, 0.022
NORM_CANDIDATE_S = 0.03  # its check computes a norm in float64
# Duration of a candidate in multiples of `floor_us`: warm-up, at least 5 replays, check.
GPU_CALLS, CPU_CALLS = 60.0, 8.0
UNALIGNED = 6.0  # where rows are no multiples of 16 bytes, many kernels take so many floors
CPU_SLOWDOWN = 1e4  # one core against an H200
CPU_CANDIDATE_S = 0.06
ERROR_S, SAMPLED_ELEMENT_S = 0.0013, 9.5e-10  # 16 cores sample while the GPU measures
NORM_ERROR_S = 0.0087  # 12090 errors of suite norms took 138 s, with norms in float64
NEEDED_SHARE = 0.6  # share of errors that ``errors="needed"`` measures


def timing_s(problem: Problem, candidates: int, device: Device) -> float:
    """Seconds to time a problem's candidates."""
    call_s = floor_us(problem) * 1e-6
    if not device.is_gpu:
        each = CPU_CANDIDATE_S + CPU_CALLS * CPU_SLOWDOWN * call_s / device.compute_units
        return PROBLEM_S + candidates * each
    candidate_s = NORM_CANDIDATE_S if problem.op in NORM_OPS else CANDIDATE_S
    is_aligned = problem.b is None or problem.n % 8 == problem.k % 8 == 0
    call_s *= 1.0 if is_aligned else UNALIGNED
    return PROBLEM_S + candidates * (candidate_s + GPU_CALLS * call_s)


def error_s(problem: Problem, device: Device) -> float:
    """Seconds to measure one error at a problem."""
    rows, columns = sampled_rows(problem.m, problem.k), sampled_rows(problem.n, problem.k)
    if problem.b is None:
        columns = 0
    if device.is_gpu:
        each_s = NORM_ERROR_S if problem.op in NORM_OPS else ERROR_S
        return each_s + SAMPLED_ELEMENT_S * (rows + columns) * problem.k
    return ERROR_S + rows * max(columns, 1) * problem.k / 1e10


def time_costs(jobs: Sequence[Job], device: Device) -> list[float]:
    """Seconds to time each job."""
    return [timing_s(job.case.problem, len(job.kernels), device) for job in jobs]


def estimate_s(
    jobs: Sequence[Job], problems: Iterable[Problem], device: Device, errors: str
) -> float:
    """Estimated duration on one GPU, in seconds; problems are those of the errors to measure."""
    share = NEEDED_SHARE if errors == "needed" else 1.0
    errors_s = share * sum(error_s(problem, device) for problem in problems)
    return (BEGIN_S if device.is_gpu else 0.0) + sum(time_costs(jobs, device)) + errors_s
