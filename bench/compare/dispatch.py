"""Choices of dispatch timed now: against baselines, against libraries, or a random sample."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.problems import PADDED, baseline_name
from lokakern.registry.register import KERNELS, Kernel, kernel_named, load_kernels
from lokakern.render.did_you_mean import did_you_mean
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.selection.dispatcher import Choice
from lokakern.selection.ties import within_noise
from lokakern.sweep.engine import candidates
from lokakern.types import Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

DISPATCH = "dispatch"
UNQUANTIZED = "bf16"
Chooser = Callable[[Case], Choice]


@dataclass(frozen=True, slots=True)
class Row(Shape):
    """One problem: dispatch's choice and each baseline, microseconds per call."""

    prepared: str
    chosen: str
    is_fp8: bool
    latency_us: dict[str, float]
    margin_us: dict[str, float]
    speedup: dict[str, float]  # baseline's time over dispatch's; above 1 dispatch is faster
    failed: dict[str, str]
    fastest_admissible: str
    should_be_fp8: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Speedups over the rows of a group, by baseline."""

    count: int
    geometric_mean: dict[str, float]
    least_speedup: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """All rows and their summary."""

    rows: tuple[Row, ...]
    geometric_mean: dict[str, float]
    least_speedup: dict[str, float]
    groups: dict[str, Group]
    fp8_share: float
    fp8_missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """A choice measured again."""

    problem: str
    chosen: str  # the quantized kernel that the database chooses
    chosen_us: float | None  # its median time now; None if it failed
    unquantized_us: float | None  # that of the unquantized kernel, in the same interleaved rounds
    speedup: float | None  # the latter over the former; above 1 the choice was good
    promised: float | None  # the same by the times of the database
    slower: bool  # whether the choice is slower beyond noise, or one of both has no time
    why: str  # why one has none


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A random sample of choices, measured again."""

    rows: tuple[HeldOutRow, ...]  # rows in the order of measurement
    candidates: int  # number of problems to draw from
    seed: int  # seed of the draw, the operands and the order
    slower: tuple[str, ...]  # problems at which the choice is slower beyond noise
    geometric_mean: float | None  # geometric mean of speedups; None without any
    least_speedup: float | None  # the least of them


def compare(
    cases: Iterable[Case],
    setting: Setting,
    baselines: Sequence[str] = (UNQUANTIZED,),
    *,
    alone: bool = False,
) -> Comparison:
    """Time dispatch's choice for every gemm of the cases against baselines.

    All admissible kernels run in the same race, which shows choices that are not the fastest. The
    output of each is checked; incorrect kernels get no time.

    Args:
        cases: Problems of any op; only gemm is compared. Of the prepared forms of one shape, the
            one that `prepare_weight` would take for that m is compared.
        setting: How to run it.
        baselines: Kernel names, or "bf16" for the unquantized kernel.
        alone: Time only dispatch's choice and the baselines.

    Raises:
        UnknownNameError: A baseline is no kernel.
    """
    load_kernels()
    for name in baselines:
        if name not in {UNQUANTIZED, *KERNELS}:
            raise UnknownNameError(
                f"kernel {name!r} is not registered; {did_you_mean(name, [UNQUANTIZED, *KERNELS])}"
                f"`list kernels` shows all, and {UNQUANTIZED} is the unquantized one"
            )
    choose, groups = chooser(setting), setting.groups
    races, admissible = [], []
    for case in compared_of(cases, choose):
        choice = choose(case)
        kernels = admissible_of(case, choice)
        entrants = _entrants(case, choice, baselines, () if alone else kernels)
        races.append(Race(case.problem, [case], entrants))
        admissible.append({kernel.name for kernel in kernels})
    results = zip(races, admissible, run(races, setting), strict=True)
    rows = [_row(*result, baselines, groups) for result in results]
    (_, every), *parts = ((text, _group(some, baselines)) for text, some in by_group(rows, groups))
    return Comparison(
        rows=tuple(rows),
        geometric_mean=every.geometric_mean,
        least_speedup=every.least_speedup,
        groups=dict(parts),
        fp8_share=sum(row.is_fp8 for row in rows) / len(rows) if rows else 0.0,
        fp8_missed=tuple(row.problem for row in rows if row.should_be_fp8 and not row.is_fp8),
    )


def held_out(cases: Sequence[Case], count: int, setting: Setting) -> HeldOut:
    """Draw choices of a quantized kernel at random, and time each against the unquantized one.

    Args:
        cases: Problems to draw from; only gemm has choices that promise to be no slower.
        count: How many to draw, or all if there are fewer.
        setting: How to run it; its seed, of the draw too, is not the 0 of databases.

    Raises:
        MeasurementError: The database chooses no quantized kernel at any of the problems.
    """
    choose = chooser(setting)
    choices = [(case, choose(case)) for case in compared_of(cases, choose)]
    promised = [
        (case, _promise(choice)) for case, choice in choices
        if not choice.is_miss and choice.callable and kernel_named(choice.kernel).quantizes
    ]  # fmt: skip
    if not promised:
        raise MeasurementError(
            f"the database chooses no quantized kernel for any of these {len(cases)} problems on "
            f"{current_device()} within {budget_of(setting.budget)}; sweep first, or choose "
            "others"
        )
    drawn = random.Random(setting.seed).sample(promised, min(count, len(promised)))
    found = compare([case for case, _ in drawn], setting, alone=True)
    promises = {str(case.problem): promise for case, promise in drawn}
    rows = tuple(_held_out_row(row, promises[row.problem]) for row in found.rows)
    return HeldOut(
        rows=rows,
        candidates=len(promised),
        seed=setting.seed,
        slower=tuple(row.problem for row in rows if row.slower),
        geometric_mean=found.geometric_mean.get(UNQUANTIZED),
        least_speedup=found.least_speedup.get(UNQUANTIZED),
    )


def _held_out_row(row: Row, promised: float | None) -> HeldOutRow:
    us = row.latency_us
    is_timed = DISPATCH in us and UNQUANTIZED in us
    return HeldOutRow(
        problem=row.problem,
        chosen=row.chosen,
        chosen_us=us.get(DISPATCH),
        unquantized_us=us.get(UNQUANTIZED),
        speedup=row.speedup.get(UNQUANTIZED),
        promised=promised,
        slower=not is_timed or _is_faster(UNQUANTIZED, DISPATCH, us, row.margin_us),
        why="; ".join(f"{name}: {why}" for name, why in row.failed.items()),
    )


def _promise(choice: Choice) -> float | None:
    """The speedup over the fastest unquantized kernel by the times of the database."""
    plain = choice.table.plain_at(choice.m)
    return plain.latency_us / choice.latency_us if plain and choice.latency_us else None


def _group(rows: Sequence[Row], baselines: Sequence[str]) -> Group:
    ratios = {name: [r.speedup[name] for r in rows if name in r.speedup] for name in baselines}
    return Group(len(rows), *means_of(ratios))


def chooser(setting: Setting) -> Chooser:
    """Return a function that gives the choice of dispatch for a case."""
    budget = budget_of(setting.budget)
    names = None if setting.distribution is None else (setting.distribution,)

    def choose(case: Case) -> Choice:
        table = dispatcher.table_for(case.problem, budget, names, None, setting.regime)
        return Choice(table, case.problem.m)

    return choose


def compared_of(cases: Iterable[Case], choose: Chooser) -> list[Case]:
    """Unprepared gemms, and the best prepared form of each shape."""
    chosen: list[Case] = []
    prepared: dict[Any, tuple[float, Case]] = {}
    for case in cases:
        problem = case.problem
        if problem.op != "gemm":
            continue
        if not problem.prepared:
            chosen.append(case)
            continue
        choice = choose(case)
        latency = math.inf if choice.is_miss else choice.latency_us or math.inf
        key = (problem.shape, problem.epilogue, case.distribution)
        if key not in prepared or latency < prepared[key][0]:
            prepared[key] = (latency, case)
    return chosen + [case for _, case in prepared.values()]


def admissible_of(case: Case, choice: Choice) -> list[Kernel]:
    """Kernels that only their time keeps from being chosen."""
    slower = [name for name, why in choice.rejected.items() if why.startswith(("slower", "tied"))]
    names = {choice.kernel, *slower}
    return [k for k in candidates(case.problem, current_device()) if k.name in names]


def _entrants(
    case: Case, choice: Choice, baselines: Sequence[str], others: Sequence[Kernel]
) -> list[Entrant]:
    """Dispatch's choice and the baselines that take the problem, then other kernels."""
    base = choice.table.plain_name_at(choice.m) or baseline_name(case.problem)
    kernels = {name: base if name == UNQUANTIZED else name for name in baselines}
    runnable = {kernel.name: kernel for kernel in candidates(case.problem, current_device())}
    named = {name: runnable[kernel] for name, kernel in kernels.items() if kernel in runnable}
    taken = {choice.kernel, *kernels.values()}
    rest = {kernel.name: kernel for kernel in others if kernel.name not in taken}
    entering = {DISPATCH: kernel_named(choice.kernel), **named, **rest}
    return [Entrant(case, kernel, name, name == DISPATCH) for name, kernel in entering.items()]


def _row(
    race: Race,
    admissible: set[str],
    entries: Sequence[Entry],
    baselines: Sequence[str],
    groups: Sequence[Condition],
) -> Row:
    problem = race.problem
    kernels = {entrant.name: entrant.kernel for entrant in race.entrants}
    failed = {name: "does not take this problem" for name in baselines if name not in kernels}
    us = {e.kernel: e.latency_us for e in entries if e.latency_us is not None}
    margin = {e.kernel: e.margin_us for e in entries if e.margin_us is not None}
    quantized = [x for x in us if kernels[x].name in admissible and kernels[x].quantizes]
    best = min(quantized, key=us.__getitem__, default="")
    named = (DISPATCH, *baselines)
    plain = next((name for name in named if name in us and not kernels[name].quantizes), "")
    timed = [name for name in baselines if name in us and DISPATCH in us]
    return Row(
        **shape_of(problem, groups),
        prepared=problem.b.granularity.value if problem.prepared and problem.b else "no",
        chosen=kernels[DISPATCH].name,
        is_fp8=kernels[DISPATCH].quantizes,
        latency_us=us,
        margin_us=margin,
        speedup={name: us[name] / us[DISPATCH] for name in timed},
        failed=failed | {entry.kernel: entry.failed for entry in entries if entry.failed},
        fastest_admissible=kernels[best].name if best else "",
        should_be_fp8=bool(best and plain) and _is_faster(best, plain, us, margin),
    )


def _is_faster(one: str, other: str, us: dict[str, float], margin: dict[str, float]) -> bool:
    """Whether a time is shorter than another beyond noise."""
    noise = within_noise(us[one], margin[one], us[other], margin[other])
    return us[one] < us[other] and not noise


# --- by library

OURS = ("cuda", "hip", "triton")  # folders of hand-written kernels


@dataclass(frozen=True, slots=True)
class LibraryRow(Shape):
    """One shape: dispatch's choice, and each library alone, from the same race.

    The problem is the one dispatch would run: of prepared forms the best.
    """

    chosen: str  # the kernel that dispatch chooses
    dispatch_us: float | None  # its median time per call; None if it failed or was incorrect
    # By library, the time of the fastest of its admissible kernels, in any prepared form, and
    # of the unquantized kernel; empty where the unquantized kernel has no time.
    library_us: dict[str, float]
    kernels: dict[str, str]  # by library, the kernel of that time
    # By library, the time of the fastest of its admissible kernels that quantize, or a lower
    # bound of it; of the unquantized kernel only where it has none.
    fp8_us: dict[str, float]
    fastest: str  # the fastest library; "" where there is nothing to compare
    speedup: float | None  # its time over dispatch's; above 1 dispatch is faster
    fastest_other: str  # the fastest of the libraries that are not ours
    other_speedup: float | None  # the same against it
    entries: tuple[Entry, ...]  # all kernels of the race


@dataclass(frozen=True, slots=True)
class LibrarySummary:
    """Speedups of dispatch over libraries: a library's time over dispatch's."""

    group: str  # text of a condition, or "all"
    libraries: str  # "all" of them, or those that are "not ours"
    count: int  # rows of the group
    compared: int  # those where dispatch's choice and the unquantized kernel have times
    geometric_mean: dict[str, float]  # by library, over the rows compared
    least: dict[str, float]  # by library, the least over these rows
    best: str  # the best single library, with the lowest geometric mean; "" if nothing is compared
    speedup: float | None  # the geometric mean against it
    least_speedup: float | None  # the least ratio of a row to the fastest library of that row
    # By library, the geometric mean where it runs its FP8 kernels wherever it can.
    fp8_mean: dict[str, float]
    fp8_best: str  # the best single library then
    fp8_speedup: float | None  # the geometric mean against it


@dataclass(frozen=True, slots=True)
class ByLibrary:
    """All rows, and summaries of all of them and of each group."""

    libraries: tuple[str, ...]
    rows: tuple[LibraryRow, ...]
    summaries: tuple[LibrarySummary, ...]


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
    races, chosen = [], []
    for same in contests_of(cases, "gemm").values():
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
        races.append(Race(taken.problem, forms, entrants))
        chosen.append(choose(taken).kernel)
    libraries = sorted({owner_of(e.kernel) for race in races for e in race.entrants})
    races = [
        race._replace(sides=_sides(race.problem, kernel, libraries))
        for race, kernel in zip(races, chosen, strict=True)
    ]
    rows = [
        row_of(race.problem, kernel, libraries, entries, groups)
        for race, kernel, entries in zip(races, chosen, run(races, setting), strict=True)
    ]
    return ByLibrary(tuple(libraries), tuple(rows), tuple(summaries_of(rows, libraries, groups)))


def _sides(problem: Problem, chosen: str, libraries: Sequence[str]) -> list[Side]:
    """Dispatch's choice, and each library with the unquantized kernel.

    A library that even by a lower bound is behind the unquantized kernel needs no time.
    """
    plain = (baseline_name(problem), PADDED)

    def is_among(entrant: Entrant, library: str) -> bool:
        return entrant.name in plain or owner_of(entrant.kernel) == library

    return [
        *RIVALS,
        lambda entrant: entrant.name == chosen,
        *(functools.partial(is_among, library=library) for library in libraries),
    ]


def row_of(
    problem: Problem,
    chosen: str,
    libraries: Sequence[str],
    entries: Sequence[Entry],
    groups: Sequence[Condition] = (),
) -> LibraryRow:
    """The row of one shape, by the race of all forms; the problem is in the form of dispatch."""
    plain = (baseline_name(problem), PADDED)  # they run once, at any of the forms
    us = {entry: entry.latency_us for entry in entries if entry.latency_us is not None}
    own_form = (e for e in us if chosen in plain or e.problem == str(problem))
    dispatch_us = min((us[e] for e in own_form if e.kernel == chosen), default=None)
    alone: dict[str, Entry] = {}
    fp8_us: dict[str, float] = {}
    unquantized = [entry for entry in us if entry.kernel in plain]
    for library in libraries if unquantized else ():
        own = [e for e in us if e.kernel not in plain and owner_of(KERNELS[e.kernel]) == library]
        alone[library] = min((*own, *unquantized), key=us.__getitem__)
        fp8_us[library] = min(us[entry] for entry in own or unquantized)

    def order(library: str) -> tuple[float, bool]:  # of equal kernels, the owner's library first
        entry = alone[library]
        return us[entry], owner_of(KERNELS[entry.kernel]) != library

    def speedup(library: str) -> float | None:
        return us[alone[library]] / dispatch_us if library and dispatch_us else None

    fastest = min(alone, key=order, default="")
    fastest_other = min((x for x in alone if x not in OURS), key=order, default="")
    return LibraryRow(
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
    rows: Sequence[LibraryRow], libraries: Sequence[str], groups: Sequence[Condition] = ()
) -> Iterator[LibrarySummary]:
    """Summaries of all rows and of each group, against all libraries and those not ours."""
    others = [library for library in libraries if library not in OURS]
    for group, some in by_group(rows, groups):
        yield _summary(group, "all", some, libraries)
        yield _summary(group, "not ours", some, others)


def _summary(
    group: str, which: str, rows: Sequence[LibraryRow], libraries: Sequence[str]
) -> LibrarySummary:
    compared = [(row, row.dispatch_us) for row in rows if row.dispatch_us and row.library_us]
    libraries = libraries if compared else ()
    ratios = {name: [row.library_us[name] / us for row, us in compared] for name in libraries}
    fp8_ratios = {name: [row.fp8_us[name] / us for row, us in compared] for name in libraries}
    (means, least), (fp8_means, _) = means_of(ratios), means_of(fp8_ratios)
    best = min(means, key=means.__getitem__, default="")
    fp8_best = min(fp8_means, key=fp8_means.__getitem__, default="")
    return LibrarySummary(
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
