"""Dispatch's choices against named baselines, timed now; all of them or a held-out sample."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lokakern.bench.compare.race import (
    Entrant,
    Entry,
    Race,
    Setting,
    Shape,
    by_group,
    means_of,
    run,
    shape_of,
)
from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.problems import baseline_name
from lokakern.registry.register import Kernel, kernel_named
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import Choice
from lokakern.selection.ties import within_noise
from lokakern.sweep.engine import candidates
from lokakern.types import ErrorBudget, Granularity
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
    """A choice measured again.

    Attributes:
        chosen: The quantized kernel that the database chooses.
        chosen_us: Its median time now; None if it failed.
        unquantized_us: That of the unquantized kernel, in the same interleaved rounds.
        speedup: The latter over the former; above 1 the choice was good.
        promised: The same by the times of the database.
        slower: Whether the choice is slower beyond noise, or one of both has no time.
        why: Why one has none.
    """

    problem: str
    chosen: str
    chosen_us: float | None
    unquantized_us: float | None
    speedup: float | None
    promised: float | None
    slower: bool
    why: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A random sample of choices, measured again.

    Attributes:
        rows: Rows in the order of measurement.
        candidates: Number of problems to draw from.
        seed: Seed of the draw, the operands and the order.
        slower: Problems at which the choice is slower beyond noise.
        geometric_mean: Geometric mean of speedups; None without any.
        least_speedup: The least of them.
    """

    rows: tuple[HeldOutRow, ...]
    candidates: int
    seed: int
    slower: tuple[str, ...]
    geometric_mean: float | None
    least_speedup: float | None


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
    for name in baselines:
        if name != UNQUANTIZED:
            kernel_named(name)
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
        if not choice.is_miss and choice.callable and is_quantized(kernel_named(choice.kernel))
    ]  # fmt: skip
    if not promised:
        raise MeasurementError(
            f"the database chooses no quantized kernel for any of these {len(cases)} problems on "
            f"{current_device()} within {ErrorBudget.of(setting.budget)}; sweep first, or choose "
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
    """The speedup over the unquantized kernel by the times of the database."""
    plain = next((c for c in choice.table.candidates if c.name == choice.table.baseline), None)
    found = plain.time_at(choice.m) if plain is not None else None
    return found[0].latency_us / choice.latency_us if found and choice.latency_us else None


def _group(rows: Sequence[Row], baselines: Sequence[str]) -> Group:
    ratios = {name: [r.speedup[name] for r in rows if name in r.speedup] for name in baselines}
    return Group(len(rows), *means_of(ratios))


def chooser(setting: Setting) -> Chooser:
    """Return a function that gives the choice of dispatch for a case."""
    budget = ErrorBudget.of(setting.budget)
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


def is_quantized(kernel: Kernel) -> bool:
    return kernel.granularity is not Granularity.NONE


def _entrants(
    case: Case, choice: Choice, baselines: Sequence[str], others: Sequence[Kernel]
) -> list[Entrant]:
    """Dispatch's choice and the baselines that take the problem, then other kernels."""
    base = baseline_name(case.problem)
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
    quantized = [x for x in us if kernels[x].name in admissible and is_quantized(kernels[x])]
    best = min(quantized, key=us.__getitem__, default="")
    named, base = (DISPATCH, *baselines), baseline_name(problem)
    plain = next((name for name in named if name in us and kernels[name].name == base), "")
    timed = [name for name in baselines if name in us and DISPATCH in us]
    return Row(
        **shape_of(problem, groups),
        prepared=problem.b.granularity.value if problem.prepared and problem.b else "no",
        chosen=kernels[DISPATCH].name,
        is_fp8=is_quantized(kernels[DISPATCH]),
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
