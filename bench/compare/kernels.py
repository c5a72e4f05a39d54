"""Kernels of ours against rivals, timed now, without a database.

A contest holds all problems that ask for the same product, whatever their scales: a tensor-scaled
library kernel is a rival of a row-scaled one of ours, and of the prepared forms of a weight the
fastest counts. For a GEMM with a norm, formats are ignored, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lokakern.bench.compare.race import (
    RIVALS,
    Entrant,
    Entry,
    Race,
    Setting,
    Shape,
    Side,
    by_group,
    fastest,
    geometric_mean,
    run,
    shape_of,
)
from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.measure.time_problem import FLOOR_BYTES_PER_US, FLOOR_FLOPS_PER_US, FLOOR_LAUNCH_US
from lokakern.registry.register import KERNELS, Kernel, kernels_for
from lokakern.render.did_you_mean import did_you_mean
from lokakern.sweep.engine import candidates
from lokakern.types import Format, Granularity, Operand, Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

# Bound of an op: a factor of the time of its bytes at 4.3 TB/s, plus microseconds; (1, 0) if it is
# not listed. A GEMM with a norm is also bound by its FLOPs.
BOUNDS = {
    "quantize": (1.2, 2.0), "dequantize": (1.2, 2.0), "norm_quantize": (1.2, 2.0),
    "norm_backward": (1.2, 2.0),
    "gemm_norm": (1.0, FLOOR_LAUNCH_US),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row(Shape):
    """One contest: ours against the rivals, over all kernels and over the accurate ones.

    The problem is the one without its scales.
    """

    ours: str  # the fastest kernel of ours; "" where none ran
    ours_us: float | None
    rival: str  # the fastest rival
    rival_us: float | None
    speedup: float | None  # the rival's time over ours; above 1 ours is faster
    accurate_ours: str  # the fastest accurate kernel of ours
    accurate_ours_us: float | None
    accurate_rival: str  # the fastest accurate rival
    accurate_rival_us: float | None
    accurate_speedup: float | None  # the speedup among the accurate ones
    bound_us: float | None  # see `BOUNDS`, of the problem that ours solves
    over_bound: float | None  # time of ours over the bound
    entries: tuple[Entry, ...]  # all kernels of the race


@dataclass(frozen=True, slots=True)
class Summary:
    """Geometric means and extremes over rows; None without any.

    Of ``count`` rows, ``compared`` have a time of ours and of a rival; ``missing`` have none of
    ours. ``wrong`` counts incorrect outputs of kernels of ours, ``failed`` other failures of them.
    """

    group: str
    count: int
    compared: int
    missing: int
    wrong: int
    failed: int
    speedup: float | None
    least_speedup: float | None
    accurate_speedup: float | None
    least_accurate_speedup: float | None
    over_bound: float | None
    most_over_bound: float | None


@dataclass(frozen=True, slots=True)
class Pairing:
    """One pattern of ours against one of the rivals, where there are several.

    The fastest kernel of each side counts; ``compared`` rows have both.
    """

    ours: str
    rivals: str
    group: str
    compared: int
    speedup: float | None
    least_speedup: float | None


@dataclass(frozen=True, slots=True)
class Contest:
    """All rows, and summaries of all of them and of each group."""

    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    pairings: tuple[Pairing, ...] = ()


def unscaled(problem: Problem) -> Problem:
    """A problem without its scales and their preparation.

    For a GEMM with a norm also without the formats of operands and output, because a layer of a
    model can use any of them.
    """
    any_format = problem.op == "gemm_norm"

    def bare(operand: Operand) -> Operand:
        form = Format.BFLOAT16 if any_format else operand.format
        return replace(operand, format=form, granularity=Granularity.NONE, alignment=16)

    b = problem.b
    if b is not None:
        b = bare(b)
    problem = replace(problem, a=bare(problem.a), b=b)
    if not any_format:
        return problem
    return replace(problem, prepared=False, out_format=Format.BFLOAT16,
                   out_granularity=Granularity.NONE)  # fmt: skip


def contests_of(cases: Iterable[Case], op: str) -> dict[tuple[Problem, str], list[Case]]:
    """Cases of an op by the product that they ask for."""
    found: dict[tuple[Problem, str], list[Case]] = {}
    for case in cases:
        if case.problem.op == op:
            found.setdefault((unscaled(case.problem), case.distribution), []).append(case)
    return found


def contest(
    cases: Sequence[Case], op: str, setting: Setting, *, ours: Sequence[str], rivals: Sequence[str]
) -> Contest:
    """Time kernels of ours and rivals at every problem of an op, one race for each product.

    Outputs are checked. Incorrect kernels get no time; their count is reported separately.

    Args:
        cases: Problems of any op; other ops are left out.
        op: The op to compare.
        setting: How to run it; without a budget.
        ours: Names of kernels, with ``*`` and ``?`` as wildcards. A composition is ours if all its
            parts are, or if a name with ``+`` matches it.
        rivals: Names of kernels or of compositions; a kernel of ours is no rival. With more than
            one pattern, each of ours is also compared with each of the rivals.

    Raises:
        UnknownNameError: No kernel of the op has a name of ours, or of the rivals; or all that have
            are compositions with parts that are not ours.
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    _check_names(op, ours, rivals)
    sides, groups = _sides(ours, rivals), setting.groups
    races = []
    for (problem, _), same in contests_of(cases, op).items():
        entrants = [
            Entrant(case, kernel, kernel.name, is_ours)
            for case in same
            for kernel in candidates(case.problem, current_device())
            if (is_ours := _is_ours(kernel, ours)) or _matches(kernel.name, rivals)
        ]
        races.append(Race(problem, same, entrants, sides))
    results = zip(races, run(races, setting), strict=True)
    rows = [_row(race.problem, race.cases, entries, groups) for race, entries in results]
    summaries = [_summary(text, some) for text, some in by_group(rows, groups)]
    pairings = _pairings(rows, ours, rivals, groups) if len(ours) * len(rivals) > 1 else ()
    return Contest(tuple(rows), tuple(summaries), tuple(pairings))


def _sides(ours: Sequence[str], rivals: Sequence[str]) -> list[Side]:
    """Ours, the rivals and the accurate rivals; with several patterns also each of them."""

    def is_accurate_ours(entrant: Entrant, globs: Sequence[str]) -> bool:
        return entrant.ours and entrant.accurate and _is_ours(entrant.kernel, globs)

    def is_rival(entrant: Entrant, globs: Sequence[str]) -> bool:
        return not entrant.ours and _matches(entrant.name, globs)

    sides: list[Side] = [functools.partial(is_accurate_ours, globs=ours), *RIVALS]
    if len(ours) * len(rivals) > 1:
        sides += [functools.partial(is_accurate_ours, globs=[glob]) for glob in ours]
        sides += [functools.partial(is_rival, globs=[glob]) for glob in rivals]
    return sides


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_ours(kernel: Kernel, globs: Sequence[str]) -> bool:
    """Whether a kernel is ours; a composition needs all its parts, or a pattern of its own."""
    if not kernel.parts:
        return _matches(kernel.name, globs)
    whole = [glob for glob in globs if "+" in glob]
    return _matches(kernel.name, whole) or all(_matches(part, globs) for part in kernel.parts)


def _check_names(op: str, ours: Sequence[str], rivals: Sequence[str]) -> None:
    kernels = kernels_for(op)
    names = [kernel.name for kernel in kernels]
    parts = [part for kernel in kernels for part in kernel.parts]
    for glob in (*ours, *rivals):
        if not any(fnmatchcase(name, glob) for name in (*names, *parts)):
            raise UnknownNameError(
                f"no kernel of {op} is named {glob!r}; {did_you_mean(glob, names)}`list kernels` "
                "shows all; a pattern such as 'cuda.*' is a name, too"
            )
    if not any(_is_ours(kernel, ours) for kernel in kernels):
        raise UnknownNameError(
            f"no kernel of {op} consists only of parts that match {', '.join(ours)}; add its other "
            "parts, or name whole compositions such as 'cuda.quantize_*+torch.*'"
        )


def _row(
    problem: Problem, same: Sequence[Case], entries: Sequence[Entry], groups: Sequence[Condition]
) -> Row:
    best = {
        "ours": fastest(e for e in entries if e.ours),
        "rival": fastest(e for e in entries if not e.ours),
        "accurate_ours": fastest(e for e in entries if e.ours and e.accurate),
        "accurate_rival": fastest(e for e in entries if not e.ours and e.accurate),
    }
    ours = best["ours"]
    names: dict[str, Any] = {side: entry.kernel if entry else "" for side, entry in best.items()}
    us: dict[str, Any] = {f"{side}_us": e.latency_us if e else None for side, e in best.items()}
    problems = {str(case.problem): case.problem for case in same}
    bound = None if ours is None else bound_us(problems[ours.problem])
    return Row(
        **shape_of(same[0].problem, groups, str(problem)),
        **names,
        **us,
        speedup=_ratio(best["rival"], ours),
        accurate_speedup=_ratio(best["accurate_rival"], best["accurate_ours"]),
        bound_us=bound,
        over_bound=ours.latency_us / bound if ours and ours.latency_us and bound else None,
        entries=tuple(entries),
    )


def bound_us(problem: Problem) -> float:
    """The bound of a problem; see `BOUNDS`."""
    factor, launch_us = BOUNDS.get(problem.op, (1.0, 0.0))
    moved = factor * problem.bytes_moved / FLOOR_BYTES_PER_US
    if problem.op == "gemm_norm":
        moved = max(moved, problem.flops / FLOOR_FLOPS_PER_US)
    return moved + launch_us


def bound_words(op: str) -> str:
    """Describe the formula of `bound_us` for an op."""
    factor, launch_us = BOUNDS.get(op, (1.0, 0.0))
    moved = f"{factor:g} times the bytes at 4.3 TB/s"
    if op == "gemm_norm":
        moved = f"the larger of {moved} and products at {FLOOR_FLOPS_PER_US / 1e6:g} TFLOP/s"
    return f"bound: {moved}, and {launch_us:g} us"


def _ratio(one: Entry | None, other: Entry | None) -> float | None:
    if one is None or other is None or not one.latency_us or not other.latency_us:
        return None
    return one.latency_us / other.latency_us


def _pairings(
    rows: Sequence[Row], ours: Sequence[str], rivals: Sequence[str], groups: Sequence[Condition]
) -> Iterable[Pairing]:
    for (group, some), mine, theirs in itertools.product(by_group(rows, groups), ours, rivals):
        ratios = []
        for row in some:
            one = fastest(e for e in row.entries if e.ours and _is_ours(KERNELS[e.kernel], [mine]))
            other = fastest(e for e in row.entries if not e.ours and _matches(e.kernel, [theirs]))
            if ratio := _ratio(other, one):
                ratios.append(ratio)
        least = min(ratios, default=None)
        yield Pairing(mine, theirs, group, len(ratios), geometric_mean(ratios), least)


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    speedups = [row.speedup for row in rows if row.speedup]
    accurate = [row.accurate_speedup for row in rows if row.accurate_speedup]
    over = [row.over_bound for row in rows if row.over_bound]
    ours = [entry for row in rows for entry in row.entries if entry.ours]
    return Summary(
        group=name,
        count=len(rows),
        compared=len(speedups),
        missing=sum(not row.ours for row in rows),
        wrong=sum(entry.wrong for entry in ours),
        failed=sum(bool(entry.failed) and not entry.wrong for entry in ours),
        speedup=geometric_mean(speedups),
        least_speedup=min(speedups, default=None),
        accurate_speedup=geometric_mean(accurate),
        least_accurate_speedup=min(accurate, default=None),
        over_bound=geometric_mean(over),
        most_over_bound=max(over, default=None),
    )
