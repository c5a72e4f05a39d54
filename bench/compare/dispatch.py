"""Compare: what dispatch would run against named baselines, timed against each other now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lokakern.build.prebuild import prebuild
from lokakern.device import current_device
from lokakern.measure import timing
from lokakern.measure.operand_cache import prefetched_groups
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device
from lokakern.problems import baseline_name
from lokakern.registry.register import Kernel, kernel_named
from lokakern.selection import dispatcher
from lokakern.selection.candidates import margin_us, within_noise
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep.engine import FEWEST_PREBUILT, candidates
from lokakern.types import ErrorBudget, Granularity
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

DISPATCH = "dispatch"
UNQUANTIZED = "bf16"


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: dispatch's choice and each baseline, microseconds per call."""

    problem: str
    m: int
    n: int
    k: int
    prepared: str
    groups: tuple[str, ...]
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
    """What rows under a condition come to, by baseline."""

    count: int
    geometric_mean: dict[str, float]
    least_speedup: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they come to."""

    rows: tuple[Row, ...]
    geometric_mean: dict[str, float]
    least_speedup: dict[str, float]
    groups: dict[str, Group]
    fp8_share: float
    fp8_missed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    cases: Sequence[Case],
    *,
    budget: ErrorBudget,
    baselines: Sequence[str] = (UNQUANTIZED,),
    regime: str | None = None,
    distribution: str | None = None,
    groups: Sequence[Condition] = (),
    seed: int = 0,
    alone: bool = False,
    step: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Time dispatch's choice for every gemm of the cases against baselines.

    Every admissible kernel is timed too, in the same interleaved rounds, so that a choice that is
    not the fastest shows.

    Args:
        cases: Of any op; only gemm is compared. Of the prepared forms of one shape, the one that
            `prepare_weight` would take for that m is compared.
        budget: What the choice may err.
        baselines: Kernel names, or "bf16" for the unquantized kernel.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        distribution: Judge errors on one distribution instead of all realistic ones.
        groups: Conditions under which means are taken, too.
        seed: Of operands and order; rows of a database have 0.
        alone: Time nobody but dispatch's choice and the baselines.
        step: Called with each problem.

    Raises:
        UnknownNameError: A baseline is no kernel.
    """
    for name in baselines:
        if name != UNQUANTIZED:
            kernel_named(name)
    device = current_device()
    regime = regime or default_regime(device)
    where = torch_device()
    compared = compared_of(cases, budget, regime, distribution)
    if device.is_gpu and len(compared) >= FEWEST_PREBUILT:
        prebuild([case.problem for case in compared], device)
    timing.warm(where)
    rows = []
    for (case,) in prefetched_groups([[case] for case in compared], seed=seed):
        step(str(case.problem))
        rows.append(
            _compare_one(case, budget, baselines, regime, distribution, groups, seed, alone)
        )
    every = _group(rows, baselines)
    share = sum(row.is_fp8 for row in rows) / len(rows) if rows else 0.0
    missed = tuple(row.problem for row in rows if row.should_be_fp8 and not row.is_fp8)
    found = {str(g): _group([r for r in rows if str(g) in r.groups], baselines) for g in groups}
    return Comparison(tuple(rows), every.geometric_mean, every.least_speedup, found, share, missed)


def _group(rows: Sequence[Row], baselines: Sequence[str]) -> Group:
    means, least = {}, {}
    for name in baselines:
        ratios = [row.speedup[name] for row in rows if name in row.speedup]
        if ratios:
            means[name] = math.exp(sum(map(math.log, ratios)) / len(ratios))
            least[name] = min(ratios)
    return Group(len(rows), means, least)


def compared_of(
    cases: Sequence[Case], budget: ErrorBudget, regime: str, distribution: str | None
) -> list[Case]:
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
        choice = choice_of(case, budget, regime, distribution)
        latency = choice.latency_us
        if choice.is_miss or latency is None:
            latency = math.inf
        key = (problem.shape, problem.epilogue, case.distribution)
        if key not in prepared or latency < prepared[key][0]:
            prepared[key] = (latency, case)
    return chosen + [case for _, case in prepared.values()]


def choice_of(
    case: Case, budget: ErrorBudget, regime: str, distribution: str | None
) -> dispatcher.Choice:
    names = None if distribution is None else (distribution,)
    table = dispatcher.table_for(case.problem, budget, names, None, regime)
    return dispatcher.Choice(table, case.problem.m)


def _compare_one(
    case: Case,
    budget: ErrorBudget,
    baselines: Sequence[str],
    regime: str,
    distribution: str | None,
    groups: Sequence[Condition],
    seed: int,
    alone: bool,
) -> Row:
    device, where, problem = current_device(), torch_device(), case.problem
    choice = choice_of(case, budget, regime, distribution)
    base = baseline_name(problem)
    assert base is not None  # only gemms are compared
    operands = Operands(
        problem, case.distribution, where, device, cold=regime != "graph-hot", seed=seed
    )
    admissible = admissible_of(choice, candidates(problem, device))
    contenders = [contender_of(operands, kernel_named(choice.kernel), DISPATCH)]
    wanted = {name: base if name == UNQUANTIZED else name for name in baselines}
    runnable = {kernel.name: kernel for kernel in candidates(problem, device)}
    failed = {name: "does not take this problem" for name, k in wanted.items() if k not in runnable}
    contenders += [
        contender_of(operands, runnable[kernel], name)
        for name, kernel in wanted.items()
        if kernel in runnable
    ]
    others = [k for k in admissible if k.name not in {choice.kernel, *wanted.values()}]
    contenders += [contender_of(operands, kernel) for kernel in others if not alone]
    timing.time_contenders(
        contenders, regime=regime, device=where, floor_us=floor_us(problem), seed=seed
    )
    latency, margin = {}, {}
    for contender in contenders:
        if contender.status != "ok":
            failed[contender.name] = contender.reason
            continue
        found = timing.quantiles(contender)
        latency[contender.name] = found.p50
        margin[contender.name] = margin_us(found.p20, found.p80, found.replay_count)
    timing.release(contenders)
    speedup = {
        name: latency[name] / latency[DISPATCH]
        for name in baselines
        if name in latency and DISPATCH in latency
    }
    is_fp8 = kernel_named(choice.kernel).granularity is not Granularity.NONE
    names = {DISPATCH: choice.kernel, **{name: kernel for name, kernel in wanted.items()}}
    quantized = {
        label: us
        for label, us in latency.items()
        if kernel_named(names.get(label, label)).granularity is not Granularity.NONE
        and names.get(label, label) in {k.name for k in admissible}
    }
    best = min(quantized, key=lambda label: quantized[label], default="")
    plain = next((label for label, name in names.items() if name == base and label in latency), "")
    faster = bool(
        best
        and plain
        and latency[best] < latency[plain]
        and not within_noise(latency[best], margin[best], latency[plain], margin[plain])
    )
    return Row(
        problem=str(problem),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        prepared=problem.b.granularity.value if problem.prepared and problem.b else "no",
        groups=tuple(str(group) for group in groups if group.holds(problem)),
        chosen=choice.kernel,
        is_fp8=is_fp8,
        latency_us=latency,
        margin_us=margin,
        speedup=speedup,
        failed=failed,
        fastest_admissible=names.get(best, best),
        should_be_fp8=faster,
    )


def admissible_of(choice: dispatcher.Choice, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels that only their time keeps from being chosen."""
    reasons = choice.rejected
    slower = ("slower", "tied")
    return [
        kernel
        for kernel in kernels
        if kernel.name == choice.kernel or reasons.get(kernel.name, "?").startswith(slower)
    ]
