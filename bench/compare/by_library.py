"""Dispatch over all kernels against each library alone, timed now."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lokakern.bench.compare.dispatch import Chooser, admissible_of, chooser, compared_of
from lokakern.bench.compare.kernels import contests_of
from lokakern.bench.compare.race import (
    RIVALS,
    Entrant,
    Entry,
    Race,
    Setting,
    Shape,
    Side,
    by_group,
    means_of,
    run,
    shape_of,
)
from lokakern.device import current_device
from lokakern.problems import baseline_name
from lokakern.registry.register import KERNELS, Kernel
from lokakern.sweep.engine import candidates
from lokakern.types import Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

OURS = ("cuda", "hip", "triton")  # folders of hand-written kernels
ALL, OTHERS = "all", "not ours"


@dataclass(frozen=True, slots=True)
class Row(Shape):
    """One shape: dispatch's choice, and each library alone, from the same race.

    The problem is the one dispatch would run: of prepared forms the best.

    Attributes:
        chosen: The kernel that dispatch chooses.
        dispatch_us: Its median time per call; None if it failed or was incorrect.
        library_us: By library, the time of the fastest of its admissible kernels, in any prepared
            form, and of the unquantized kernel; empty where the unquantized kernel has no time.
        kernels: By library, the kernel of that time.
        fp8_us: By library, the time of the fastest of its admissible kernels that quantize, or a
            lower bound of it; of the unquantized kernel only where it has none.
        fastest: The fastest library; "" where there is nothing to compare.
        speedup: Its time over dispatch's; above 1 dispatch is faster.
        fastest_other: The fastest of the libraries that are not ours.
        other_speedup: The same against it.
        entries: All kernels of the race.
    """

    chosen: str
    dispatch_us: float | None
    library_us: dict[str, float]
    kernels: dict[str, str]
    fp8_us: dict[str, float]
    fastest: str
    speedup: float | None
    fastest_other: str
    other_speedup: float | None
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Speedups of dispatch over libraries: a library's time over dispatch's.

    Attributes:
        group: Text of a condition, or "all".
        libraries: "all" of them, or those that are "not ours".
        count: Rows of the group.
        compared: Those where dispatch's choice and the unquantized kernel have times.
        geometric_mean: By library, over the rows compared.
        least: By library, the least over these rows.
        best: The best single library, with the lowest geometric mean; "" if nothing is compared.
        speedup: The geometric mean against it.
        least_speedup: The least ratio of a row to the fastest library of that row.
        fp8_mean: By library, the geometric mean where it runs its FP8 kernels wherever it can.
        fp8_best: The best single library then.
        fp8_speedup: The geometric mean against it.
    """

    group: str
    libraries: str
    count: int
    compared: int
    geometric_mean: dict[str, float]
    least: dict[str, float]
    best: str
    speedup: float | None
    least_speedup: float | None
    fp8_mean: dict[str, float]
    fp8_best: str
    fp8_speedup: float | None


@dataclass(frozen=True, slots=True)
class ByLibrary:
    """All rows, and summaries of all of them and of each group."""

    libraries: tuple[str, ...]
    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]


def owner_of(kernel: Kernel) -> str:
    """The library of a kernel, or the language of one that is in none.

    A composition belongs to the owner of its GEMM, whichever quantizer it has: libraries without a
    fast quantizer profit from ours.
    """
    last = KERNELS.get(kernel.parts[-1], kernel) if kernel.parts else kernel
    return last.library or last.language


def by_library(cases: Sequence[Case], setting: Setting) -> ByLibrary:
    """Time dispatch's choice for every gemm of the cases against each library alone.

    All prepared forms of a shape are in one race: dispatch runs the kernel and the form of its
    database, a library its kernel within the budget that is fastest now, or the unquantized kernel.
    So each library is given a perfect choice. Times of libraries that run their FP8 kernels
    wherever they can are reported separately. A kernel without errors in the database takes part
    only if it was slower than the unquantized kernel. Outputs are checked; incorrect kernels get no
    time.

    Raises:
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    choose, groups = chooser(setting), setting.groups
    plans = [_plan(same, choose) for same in contests_of(cases, "gemm").values()]
    libraries = sorted({owner_of(e.kernel) for plan in plans for e in plan.entrants})
    races = [
        Race(plan.same[0].problem, plan.same, plan.entrants, _sides(plan, libraries))
        for plan in plans
    ]
    rows = [
        row_of(plan.same[0].problem, plan.chosen, libraries, entries, groups)
        for plan, entries in zip(plans, run(races, setting), strict=True)
    ]
    return ByLibrary(tuple(libraries), tuple(rows), tuple(summaries_of(rows, libraries, groups)))


class _Plan(NamedTuple):
    """The forms of a shape, that of dispatch first, with its choice and the admissible kernels."""

    same: Sequence[Case]
    chosen: str
    entrants: Sequence[Entrant]


def _plan(same: Sequence[Case], choose: Chooser) -> _Plan:
    taken = compared_of(same, choose)[0]
    names = {kernel.name for case in same for kernel in admissible_of(case, choose(case))}
    # The unquantized kernel runs on the operands of the first form, which are needed anyway.
    forms = [taken, *(case for case in same if case != taken)]
    entrants = [
        Entrant(case, kernel, kernel.name, False)
        for case in forms
        for kernel in candidates(case.problem, current_device())
        if kernel.name in names
    ]
    return _Plan(forms, choose(taken).kernel, entrants)


def _sides(plan: _Plan, libraries: Sequence[str]) -> list[Side]:
    """Dispatch's choice, and each library with the unquantized kernel.

    A library that even by a lower bound is behind the unquantized kernel needs no time.
    """
    base = baseline_name(plan.same[0].problem)

    def is_among(entrant: Entrant, library: str) -> bool:
        return entrant.name == base or owner_of(entrant.kernel) == library

    return [
        *RIVALS,
        lambda entrant: entrant.name == plan.chosen,
        *(functools.partial(is_among, library=library) for library in libraries),
    ]


def row_of(
    problem: Problem,
    chosen: str,
    libraries: Sequence[str],
    entries: Sequence[Entry],
    groups: Sequence[Condition] = (),
) -> Row:
    """The row of one shape.

    Args:
        problem: The problem in the form that dispatch would run.
        chosen: The kernel that it would run.
        libraries: The libraries to compare.
        entries: The race of all forms.
        groups: Conditions that may hold.
    """
    base = baseline_name(problem)  # it runs once, at any of the forms
    us = {entry: entry.latency_us for entry in entries if entry.latency_us is not None}
    own_form = (e for e in us if chosen == base or e.problem == str(problem))
    dispatch_us = min((us[e] for e in own_form if e.kernel == chosen), default=None)
    alone: dict[str, Entry] = {}
    fp8_us: dict[str, float] = {}
    unquantized = [entry for entry in us if entry.kernel == base]
    for library in libraries if unquantized else ():
        own = [e for e in us if e.kernel != base and owner_of(KERNELS[e.kernel]) == library]
        alone[library] = min((*own, *unquantized), key=us.__getitem__)
        fp8_us[library] = min(us[entry] for entry in own or unquantized)

    def order(library: str) -> tuple[float, bool]:  # of equal kernels, the owner's library first
        entry = alone[library]
        return us[entry], owner_of(KERNELS[entry.kernel]) != library

    def speedup(library: str) -> float | None:
        return us[alone[library]] / dispatch_us if library and dispatch_us else None

    fastest = min(alone, key=order, default="")
    fastest_other = min((x for x in alone if x not in OURS), key=order, default="")
    return Row(
        **shape_of(problem, groups),
        chosen=chosen,
        dispatch_us=dispatch_us,
        library_us={library: us[entry] for library, entry in alone.items()},
        kernels={library: entry.kernel for library, entry in alone.items()},
        fp8_us=fp8_us,
        fastest=fastest,
        speedup=speedup(fastest),
        fastest_other=fastest_other,
        other_speedup=speedup(fastest_other),
        entries=tuple(entries),
    )


def summaries_of(
    rows: Sequence[Row], libraries: Sequence[str], groups: Sequence[Condition] = ()
) -> Iterator[Summary]:
    """Summaries of all rows and of each group, against all libraries and those not ours."""
    others = [library for library in libraries if library not in OURS]
    for group, some in by_group(rows, groups):
        yield _summary(group, ALL, some, libraries)
        yield _summary(group, OTHERS, some, others)


def _summary(group: str, which: str, rows: Sequence[Row], libraries: Sequence[str]) -> Summary:
    compared = [(row, row.dispatch_us) for row in rows if row.dispatch_us and row.library_us]
    libraries = libraries if compared else ()
    ratios = {name: [row.library_us[name] / us for row, us in compared] for name in libraries}
    fp8_ratios = {name: [row.fp8_us[name] / us for row, us in compared] for name in libraries}
    (means, least), (fp8_means, _) = means_of(ratios), means_of(fp8_ratios)
    best = min(means, key=means.__getitem__, default="")
    fp8_best = min(fp8_means, key=fp8_means.__getitem__, default="")
    return Summary(
        group=group,
        libraries=which,
        count=len(rows),
        compared=len(compared),
        geometric_mean=means,
        least=least,
        best=best,
        speedup=means.get(best),
        least_speedup=min(least.values(), default=None),
        fp8_mean=fp8_means,
        fp8_best=fp8_best,
        fp8_speedup=fp8_means.get(fp8_best),
    )
