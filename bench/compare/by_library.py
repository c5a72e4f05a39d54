"""By library: what dispatch over everybody's kernels gains over any single library, timed now."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lokakern.bench.compare.dispatch import admissible_of, choice_of, compared_of
from lokakern.bench.compare.kernels import contests_of, geometric_mean
from lokakern.bench.compare.race import Entry, timed
from lokakern.build.prebuild import prebuild
from lokakern.device import current_device
from lokakern.measure import timing
from lokakern.measure.operand_cache import prefetched_groups
from lokakern.measure.time_problem import torch_device
from lokakern.problems import baseline_name
from lokakern.registry.register import KERNELS, Kernel
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep.engine import FEWEST_PREBUILT, candidates
from lokakern.types import ErrorBudget, Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

OURS = ("cuda", "hip", "triton")  # folders of hand-written kernels
ALL, OTHERS = "all", "not ours"


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: dispatch's choice, and each library alone, from the same race.

    Attributes:
        problem: The problem as dispatch would take it: of the prepared forms the best.
        chosen: The kernel that dispatch takes.
        dispatch_us: Its median time per call; None if it did not run or was wrong.
        library_us: By library, the time of the fastest of its admissible kernels, in whichever
            prepared form, and of the unquantized kernel; empty where that has no time.
        kernels: By library, whose time that is.
        fp8_us: By library, the time of the fastest of its admissible kernels that quantize, or a
            lower bound of it; of the unquantized kernel only where it has none.
        fastest: The library that is the fastest here; "" where there is nothing to compare.
        speedup: Its time over dispatch's; above 1 dispatch is faster.
        fastest_other: The fastest of the libraries that are not ours.
        other_speedup: The same against it.
        groups: Texts of the conditions that hold.
        entries: Everybody.
    """

    problem: str
    m: int
    n: int
    k: int
    chosen: str
    dispatch_us: float | None
    library_us: dict[str, float]
    kernels: dict[str, str]
    fp8_us: dict[str, float]
    fastest: str
    speedup: float | None
    fastest_other: str
    other_speedup: float | None
    groups: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What rows come to against libraries; ratios are a library's time over dispatch's.

    Attributes:
        group: Text of a condition, or "all".
        libraries: "all" of them, or those that are "not ours".
        count: Rows of the group.
        compared: Those where dispatch's choice and the unquantized kernel have times.
        geometric_mean: By library, over the rows compared.
        least: By library, the least over these rows.
        best: The best single library: whose geometric mean is lowest; "" if nothing is compared.
        speedup: The geometric mean against it.
        least_speedup: The least over rows of the ratio to the library that is the fastest there.
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
    """All rows, and what they come to: all of them first, then by group."""

    libraries: tuple[str, ...]
    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who races at a shape: its forms, that of dispatch first, and the names admissible there."""

    same: Sequence[Case]
    chosen: str
    names: frozenset[str]


def owner_of(kernel: Kernel) -> str:
    """The library of a kernel, or the language of one that is in none.

    A composition belongs to the owner of its GEMM, whoever's quantizer is in front: ours lend
    their speed to libraries that have none as fast, which flatters these.
    """
    last = KERNELS.get(kernel.parts[-1], kernel) if kernel.parts else kernel
    return last.library or last.language


def by_library(
    cases: Sequence[Case],
    *,
    budget: ErrorBudget,
    regime: str | None = None,
    distribution: str | None = None,
    groups: Sequence[Condition] = (),
    seed: int = 0,
    begin: Callable[[int], None] = lambda _count: None,
    step: Callable[[str], None] = lambda _text: None,
) -> ByLibrary:
    """Time dispatch's choice for every gemm of the cases against each library alone.

    All prepared forms of a shape race together: dispatch runs the kernel and the form that its
    database says, a library whatever is fastest now of its kernels within the budget. Nobody has
    to use FP8: each may run the unquantized kernel instead. So a library is served by a perfect
    choice of its own, which is more than it brings; what it comes to where its FP8 kernels run
    wherever they can, as where a library is all there is, is said beside. What a kernel wrote is
    checked; who is wrong has no time.

    Args:
        cases: Of any op; only gemm is compared.
        budget: What every kernel may err, by the errors in the database; one without is left out
            unless it was slower than the unquantized kernel.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        distribution: Judge errors on one distribution instead of all realistic ones.
        groups: Conditions under which means are taken, too.
        seed: Of operands and order; rows of a database have 0.
        begin: Called with the number of shapes.
        step: Called with each problem.

    Raises:
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    device, where = current_device(), torch_device()
    regime = regime or default_regime(device)
    timing.check_regime(regime, where)
    plans = [
        _plan(same, budget, regime, distribution) for same in contests_of(cases, "gemm").values()
    ]
    begin(len(plans))
    names = sorted(frozenset[str]().union(*(plan.names for plan in plans)))
    libraries = sorted({owner_of(KERNELS[name]) for name in names})
    problems = [case.problem for plan in plans for case in plan.same]
    if device.is_gpu and len(problems) >= FEWEST_PREBUILT:
        prebuild(problems, device, names)
    timing.warm(where)
    rows = []
    for plan, same in zip(
        plans, prefetched_groups([p.same for p in plans], seed=seed), strict=True
    ):
        problem = same[0].problem
        step(str(problem))
        sides = _sides(plan, libraries, baseline_name(problem))
        takes_part = functools.partial(_takes_part, plan.names)
        entries = timed(same, takes_part, regime, sides, seed)
        rows.append(row_of(problem, plan.chosen, libraries, entries, groups))
    return ByLibrary(tuple(libraries), tuple(rows), tuple(summaries_of(rows, libraries, groups)))


def _plan(
    same: Sequence[Case], budget: ErrorBudget, regime: str, distribution: str | None
) -> _Plan:
    taken = compared_of(same, budget, regime, distribution)[0]
    names: set[str] = set()
    for case in same:
        choice = choice_of(case, budget, regime, distribution)
        kernels = candidates(case.problem, current_device())
        names.update(kernel.name for kernel in admissible_of(choice, kernels))
    # The unquantized kernel runs on the operands of the first form, which are needed anyway.
    forms = [taken, *(case for case in same if case != taken)]
    return _Plan(forms, choice_of(taken, budget, regime, distribution).kernel, frozenset(names))


def _takes_part(names: frozenset[str], kernel: Kernel) -> bool | None:
    return False if kernel.name in names else None


def _sides(
    plan: _Plan, libraries: Sequence[str], base: str | None
) -> list[Callable[[Kernel], bool]]:
    """Whose fastest kernel needs a time that is no lower bound: dispatch's, and each library's.

    With the unquantized kernel, so that a library behind that by a lower bound is left at it.
    """

    def is_among(kernel: Kernel, library: str) -> bool:
        return kernel.name == base or owner_of(kernel) == library

    return [
        lambda kernel: kernel.name == plan.chosen,
        *(functools.partial(is_among, library=library) for library in libraries),
    ]


def row_of(
    problem: Problem,
    chosen: str,
    libraries: Sequence[str],
    entries: Sequence[Entry],
    groups: Sequence[Condition] = (),
) -> Row:
    """One shape's row, of a race of all its forms.

    Args:
        problem: In the form that dispatch would take.
        chosen: The kernel that it would.
        libraries: Who is compared.
        entries: Of the race; times in microseconds.
        groups: Conditions that may hold.
    """
    base = baseline_name(problem)  # it runs once, at any of the forms
    us = {entry: entry.latency_us for entry in entries if entry.latency_us is not None}
    mine = [
        time for entry, time in us.items()
        if entry.kernel == chosen and (chosen == base or entry.problem == str(problem))
    ]  # fmt: skip
    dispatch_us = min(mine, default=None)
    alone: dict[str, Entry] = {}
    fp8_us: dict[str, float] = {}
    unquantized = [entry for entry in us if entry.kernel == base]
    for library in libraries if unquantized else ():
        own = [e for e in us if e.kernel != base and owner_of(KERNELS[e.kernel]) == library]
        alone[library] = min((*own, *unquantized), key=us.__getitem__)
        fp8_us[library] = min(us[entry] for entry in own or unquantized)

    def order(library: str) -> tuple[float, bool]:  # of those that run the same, whose it is
        entry = alone[library]
        return us[entry], owner_of(KERNELS[entry.kernel]) != library

    def speedup(library: str) -> float | None:
        return us[alone[library]] / dispatch_us if library and dispatch_us else None

    fastest = min(alone, key=order, default="")
    fastest_other = min(_others(alone), key=order, default="")
    return Row(
        problem=str(problem),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        chosen=chosen,
        dispatch_us=dispatch_us,
        library_us={library: us[entry] for library, entry in alone.items()},
        kernels={library: entry.kernel for library, entry in alone.items()},
        fp8_us=fp8_us,
        fastest=fastest,
        speedup=speedup(fastest),
        fastest_other=fastest_other,
        other_speedup=speedup(fastest_other),
        groups=tuple(str(group) for group in groups if group.holds(problem)),
        entries=tuple(entries),
    )


def _others(libraries: Iterable[str]) -> list[str]:
    return [library for library in libraries if library not in OURS]


def summaries_of(
    rows: Sequence[Row], libraries: Sequence[str], groups: Sequence[Condition] = ()
) -> Iterator[Summary]:
    """What all rows come to, and those of each group: against all libraries, and the others'."""
    for group in ("all", *map(str, groups)):
        inside = [row for row in rows if group == "all" or group in row.groups]
        yield _summary(group, ALL, inside, libraries)
        yield _summary(group, OTHERS, inside, _others(libraries))


def _summary(group: str, which: str, rows: Sequence[Row], libraries: Sequence[str]) -> Summary:
    compared = [(row, row.dispatch_us) for row in rows if row.dispatch_us and row.library_us]
    libraries = libraries if compared else ()
    columns = {name: [row.library_us[name] / us for row, us in compared] for name in libraries}
    fp8_columns = {name: [row.fp8_us[name] / us for row, us in compared] for name in libraries}
    means, best = _means(columns)
    fp8_means, fp8_best = _means(fp8_columns)
    return Summary(
        group=group,
        libraries=which,
        count=len(rows),
        compared=len(compared),
        geometric_mean=means,
        least={library: min(column) for library, column in columns.items()},
        best=best,
        speedup=means.get(best),
        least_speedup=min((min(column) for column in columns.values()), default=None),
        fp8_mean=fp8_means,
        fp8_best=fp8_best,
        fp8_speedup=fp8_means.get(fp8_best),
    )


def _means(columns: dict[str, list[float]]) -> tuple[dict[str, float], str]:
    """Geometric means by library, and whose is the lowest."""
    means = {library: geometric_mean(column) or 0.0 for library, column in columns.items()}
    return means, min(means, key=means.__getitem__, default="")
