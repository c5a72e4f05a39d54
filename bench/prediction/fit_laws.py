"""Fits the laws of a time model, and measures how well they predict sizes that they did not see.

As in `fit`, pairs (n, k) are left out in folds, the intervals of times and of speedups over the
fastest unquantized kernel come from these predictions, and the laws are fitted to all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lokakern.bench.prediction.left_out import (
    COVERAGE,
    Timings,
    fold_of,
    least_and_largest,
    median_times,
    upper_quantile,
)
from lokakern.problems import baseline_name
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection.prediction.laws import (
    BEYOND,
    Law,
    Laws,
    Spread,
    form_of,
    is_plain,
    parts_of,
    work_of,
)
from lokakern.types import Device, Granularity, Problem

Logs = tuple[float, float]  # of a predicted and of a measured time
FEWEST_ROWS, FEWEST_PAIRS = 24, 4  # of a kernel
LEAST, LARGEST = (64, 1, 64), (2**18, 2**14, 2**14)  # m, n and k


def fit_laws(facts: Snapshot, device: Device, regime: str) -> dict[str, Laws]:
    """The laws by op; none of an op without a kernel that has enough times."""
    known = map(_with_known_parts, median_times(facts, device, regime, _is_fitted))
    by_op: dict[str, list[Timings]] = {}
    for one in known:
        if len(one.problems) >= FEWEST_ROWS and len(set(one.pairs)) >= FEWEST_PAIRS:
            by_op.setdefault(one.problems[0].op, []).append(one)
    return {op: _laws(found, device.compute_units) for op, found in sorted(by_op.items())}


def _is_fitted(problem: Problem) -> bool:
    sizes = zip(LEAST, (problem.m, problem.n, problem.k), LARGEST, strict=True)
    return is_plain(problem) and all(low <= size <= high for low, size, high in sizes)


def _with_known_parts(one: Timings) -> Timings:
    """The times of products whose parts were all timed at enough pairs (n, k).

    A part of one pair has no time where that is left out. Of the 44 FP8 choices of `gemm_norm` at
    pairs left out, 4 were slower than bf16, 3 of them crosses, which the shipped file has at one
    pair only. Without these parts it is 1 of 69. `norm_quantize` competes with no unquantized
    kernel, and was timed at few k.
    """
    if one.problems[0].op == "norm_quantize":
        return one
    pairs: dict[str, set[tuple[int, int]]] = {}
    for problem, pair in zip(one.problems, one.pairs, strict=True):
        for part in parts_of(problem):
            pairs.setdefault(part, set()).add(pair)
    rare = {part for part, its in pairs.items() if len(its) < FEWEST_PAIRS}
    kept = [place for place, p in enumerate(one.problems) if rare.isdisjoint(parts_of(p))]
    problems = [one.problems[place] for place in kept]
    return replace(one, problems=problems, times_us=one.times_us[kept])


def _laws(known: Sequence[Timings], compute_units: int) -> Laws:
    works = [work_in(one.problems, compute_units) for one in known]
    left_out = [left_out_us(one, work) for one, (_, work) in zip(known, works, strict=True)]
    speedup = _speedup(known, left_out)
    kernels = []
    for one, (kinds, work), guess in zip(known, works, left_out, strict=True):
        error = np.abs(guess / one.times_us - 1)
        parts = set().union(*map(parts_of, one.problems))
        us = zip(kinds, fitted_us(work, one.times_us).tolist(), strict=True)
        least, largest = least_and_largest([one])
        kernels.append(
            Law(
                name=one.name, digest=one.digest, granularity=one.granularity, rows=len(error),
                median_error=round(float(np.median(error)), 4),
                p90_error=round(float(np.quantile(error, 0.9)), 4),
                least=least, largest=largest, forms=sorted(set(map(form_of, one.problems))),
                us={kind: float(f"{its:.4g}") for kind, its in us if its > 0 or kind in parts},
                spread=_spread(np.log(one.times_us / guess), one.pairs),
                beyond=_beyond(one, work) if speedup is None else None,
            )
        )  # fmt: skip
    return Laws(speedup=speedup, kernels=kernels)


def work_in(
    problems: Sequence[Problem], compute_units: int
) -> tuple[list[str], NDArray[np.float64]]:
    """Kinds of work, and their amounts, ``[problems, kinds]``."""
    found = [work_of(problem, np.array([problem.m]), compute_units) for problem in problems]
    kinds = sorted({kind for work in found for kind in work})
    none = np.zeros(1)
    return kinds, np.array([[work.get(kind, none)[0] for kind in kinds] for work in found])


def fitted_us(work: NDArray[np.float64], times_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Microseconds for a unit of each kind of work, none negative.

    Least squares of relative errors; while a number is negative, its kind of work is left out.
    """
    relative = work / times_us[:, None]
    scale = relative.max(0)
    us = np.zeros(work.shape[1])
    kept = np.flatnonzero(scale)
    while True:
        found = np.linalg.lstsq(relative[:, kept] / scale[kept], np.ones(len(work)), rcond=None)[0]
        if (found >= 0).all():
            us[kept] = found / scale[kept]
            return us
        kept = kept[found > 0]


def left_out_us(one: Timings, work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times of each problem by a law of the other folds."""
    of = fold_of(one.pairs)
    guess = np.zeros(len(of))
    for fold in set(of.tolist()):
        guess[of == fold] = _without(one, work, of == fold)
    return guess


def _beyond(one: Timings, work: NDArray[np.float64]) -> Spread | None:
    """The spread where the smallest of m, n or k are left out; None if too few times are left."""
    sizes = np.array([(p.m, p.n, p.k) for p in one.problems])
    surprise: list[float] = []
    groups: list[tuple[int, int]] = []
    for axis in (axis for axis in range(3) if len(set(sizes[:, axis])) > 1):
        out = sizes[:, axis] < BEYOND * sizes[:, axis].min()
        if (~out).sum() < FEWEST_ROWS / 2:
            return None
        surprise += np.log(one.times_us[out] / _without(one, work, out)).tolist()
        groups += [pair for pair, its in zip(one.pairs, out, strict=True) if its]
    return _spread(np.array(surprise), groups)


def _without(
    one: Timings, work: NDArray[np.float64], out: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Times of some problems, by a law of the others."""
    found: NDArray[np.float64] = work[out] @ fitted_us(work[~out], one.times_us[~out])
    return found


def _spread(surprise: NDArray[np.float64], groups: Sequence[tuple[int, int]]) -> Spread:
    """The interval of measured over predicted values, of which logarithms are given."""
    level = (1 + COVERAGE) / 2
    low, high = -upper_quantile(-surprise, groups, level), upper_quantile(surprise, groups, level)
    return Spread(low=round(min(low, 0), 4), high=round(max(high, 0), 4), pairs=len(set(groups)))


def _speedup(known: Sequence[Timings], left_out: Sequence[NDArray[np.float64]]) -> Spread | None:
    """The interval of speedups over the fastest unquantized kernel; None for an op without one.

    Of the quantizing kernel with the least predicted time, which is what would be chosen: it is
    more often slower than predicted than any given kernel.
    """
    plain: dict[Problem, Logs] = {}
    quantized: dict[Problem, Logs] = {}
    for one, times in zip(known, left_out, strict=True):
        for problem, true, guess in zip(one.problems, one.times_us, times, strict=True):
            logs = math.log(guess), math.log(true)
            if one.granularity is not Granularity.NONE:
                quantized[problem] = min(quantized.get(problem, logs), logs)
            elif baseline_name(problem) is not None:
                before = plain.get(problem, (math.inf, math.inf))
                plain[problem] = min(before[0], logs[0]), min(before[1], logs[1])
    surprise, groups = [], []
    for problem in plain.keys() & quantized.keys():
        (guess, true), (guess_quantized, true_quantized) = plain[problem], quantized[problem]
        surprise.append(true - true_quantized - (guess - guess_quantized))
        groups.append((problem.n, problem.k))
    return _spread(np.array(surprise), groups) if surprise else None
