"""Evidence: from the rows of a snapshot to what is known of each kernel at a problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lokakern.device import current_environment
from lokakern.problems import accuracy_problem, baseline_name
from lokakern.registry.freshness import is_current
from lokakern.registry.libraries import named
from lokakern.registry.register import KERNELS, Kernel, fp8_format
from lokakern.types import Device, Environment, Granularity, Problem, Rejected

if TYPE_CHECKING:
    from lokakern.registry.records import KernelRow
    from lokakern.registry.snapshot import AccuracyCell, Snapshot, TimingCell

# Times within 3 % are equal. Two H200s disagreed on 8369 times by 1.1 % in the median and by 4 % at
# the 90th percentile; of 1318 choices 10 differed, 2 of them unmarked with a floor of 1 %; 6 and 1
# with 3 %.
TIE_FLOOR = 0.03
TIE_CEILING = 0.05  # and beyond 5 % they differ, however few the replays
FRESHNESS = ("fresh", "usable", "stale")  # from best to worst, see `freshness_of`
FEWEST_SEEDS = 3  # of which a bound is the worst; fewer are no evidence
LIMIT_COLUMNS = {
    "row_err": "row_err_upper",
    "row_p99": "row_p99_upper",
    "rel_err": "rel_err_upper",
    "sqnr_db": "rel_err_upper",
    "mean_rel_err": "mean_rel_err_upper",
    "mean_shift": "mean_shift_upper",
}


def margin_us(p20: float, p80: float, count: int) -> float:
    """Half-width of the 95 % interval of a median, from its quantiles (normal approximation)."""
    deviation = (p80 - p20) / 1.683  # p80 - p20 of a unit normal
    return 1.96 * 1.2533 * deviation / math.sqrt(max(count, 1))


def within_noise(a_us: float, a_margin: float, b_us: float, b_margin: float) -> bool:
    """Whether two times cannot be told apart."""
    least = min(a_us, b_us)
    noise = max(TIE_FLOOR * least, math.hypot(a_margin, b_margin))
    return abs(a_us - b_us) <= min(noise, TIE_CEILING * least)


@dataclass(frozen=True, slots=True)
class Time:
    """Median over runs at one m."""

    latency_us: float
    margin_us: float
    freshness: str
    run_count: int
    is_verified: bool = True  # measured here, or by others and some of it again here


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with everything measured of it at a problem without m."""

    name: str
    kernel: Kernel | None
    granularity: Granularity
    times: dict[int, Time]
    failed: dict[int, str]  # m where it was tried and never ended well, with the reason
    errors: dict[str, float]  # limit name -> worst bound; empty where not known
    worst_distribution: str
    error_unknown: str  # why errors is empty
    unquantized: bool
    errors_verified: bool = True

    def time_at(self, m: int) -> tuple[Time, bool] | None:
        """Time at m, and whether it is interpolated; None outside what was measured.

        Nor is there one between measured m when it failed at one of them.
        """
        found = self.times.get(m)
        if found is not None:
            return found, False
        below = max((x for x in self.times if x < m), default=None)
        above = min((x for x in self.times if x > m), default=None)
        if below is None or above is None or any(below < x < above for x in self.failed):
            return None
        low, high = self.times[below], self.times[above]
        share = (m - below) / (above - below)
        worse = max(low.freshness, high.freshness, key=FRESHNESS.index)
        return (
            Time(
                low.latency_us + share * (high.latency_us - low.latency_us),
                low.margin_us + share * (high.margin_us - low.margin_us),
                worse,
                min(low.run_count, high.run_count),
                low.is_verified and high.is_verified,
            ),
            True,
        )


def _worse(limit: str, a: float, b: float) -> float:
    return min(a, b) if limit == "sqnr_db" else max(a, b)


def candidate_of(
    name: str,
    cells: list[TimingCell],
    problem: Problem,
    distributions: tuple[str, ...],
    device: Device,
    local: bool,
    facts: Snapshot,
) -> Candidate | str:
    """The candidate, or the reason why a kernel is none at any m."""
    kernel = KERNELS.get(name)
    if local and kernel is None:
        return "is in the database but not registered here"
    for library in kernel.libraries if kernel is not None else ():
        absent = named(library).why_not_here()
        if absent is not None:
            return absent
    if kernel is not None and local:
        answer = kernel.supports(problem, device)
        if isinstance(answer, Rejected) and not cells:
            return answer.reason
    if not cells:
        return "not measured here"
    graded = _graded(cells, local, facts)
    bad = _unsafe((c for c, fresh in graded if fresh != "stale"), lambda c: c.problem)
    if bad is not None:
        return f"{bad.status} at m={bad.m}: {bad.reason}"
    good, failed = _outcomes(graded)
    times = _times(good)
    if not times:
        never = "not measured since the kernel changed"
        return failed[max(failed)] if failed else never
    row = cells[0].kernel
    granularity = Granularity(row.granularity)
    unquantized = granularity is Granularity.NONE and baseline_name(problem) is not None
    found = _errors_or_reason(row, problem, distributions, device, local, facts)
    if isinstance(found, Wrong):
        return found.reason
    unknown = found if isinstance(found, str) else ""
    bounds = Bounds({}, "") if isinstance(found, str) else found
    return Candidate(
        name, kernel, granularity, times, failed, bounds.errors, bounds.worst_distribution, unknown,
        unquantized, bounds.is_verified,
    )  # fmt: skip


Cell = TypeVar("Cell", "TimingCell", "AccuracyCell")


def _unsafe(cells: Iterable[Cell], place: Callable[[Cell], Any]) -> Cell | None:
    """A wrong result or a crash: at one place, so not to be trusted at another.

    A crash that did not happen again when it was asked for (``sweep --retry``) is forgiven.
    """
    found = list(cells)
    for cell in found:
        redeemed = any(
            c.status == "ok"
            and place(c) == place(cell)
            and c.kernel.digest == cell.kernel.digest
            and c.measured_utc_ms > cell.measured_utc_ms
            for c in found
        )
        if cell.status == "wrong" or (cell.status == "crashed" and not redeemed):
            return cell
    return None


def _toolchain(kernel: KernelRow, environment: Environment) -> tuple[str, ...]:
    """Versions that decide what a kernel's source turns into; of all parts of a composition."""
    tools: tuple[str, ...] = ()
    languages = {module.split("/")[0] for module in kernel.modules}
    if "triton" in languages:
        tools += (environment.triton,)
    if "cuda" in languages:
        tools += (environment.libraries,)
    if languages - {"triton", "cuda", "compositions", "norm_compositions"}:
        tools += (environment.torch, environment.toolkit)
    return tools


def freshness_of(cell: TimingCell | AccuracyCell, local: bool, facts: Snapshot) -> str:
    """fresh: digest and toolchain equal; usable: toolchain differs; stale: digest differs."""
    if not is_current(cell.kernel):
        return "stale"
    if not local:
        return "fresh"  # for a device that is not here only the digest counts
    then = facts.environment(cell.environment)
    same = _toolchain(cell.kernel, then) == _toolchain(cell.kernel, current_environment())
    return "fresh" if same else "usable"


def _graded(
    cells: Iterable[TimingCell], local: bool, facts: Snapshot
) -> list[tuple[TimingCell, str]]:
    return [(cell, freshness_of(cell, local, facts)) for cell in cells]


def _outcomes(
    graded: list[tuple[TimingCell, str]],
) -> tuple[list[tuple[TimingCell, str]], dict[int, str]]:
    """Cells with times, and the m where the freshest word is a failure, with its reason."""
    age = FRESHNESS.index
    good: list[tuple[TimingCell, str]] = []
    failed: dict[int, str] = {}
    for m in {cell.m for cell, _ in graded}:
        here = [(cell, fresh) for cell, fresh in graded if cell.m == m]
        ok = [(cell, fresh) for cell, fresh in here if cell.status == "ok"]
        bad = [(cell, fresh) for cell, fresh in here if cell.status != "ok" and fresh != "stale"]
        youngest = min((age(fresh) for _, fresh in ok), default=3)
        worse = [cell for cell, fresh in bad if age(fresh) < youngest]
        if worse:
            failed[m] = f"{worse[0].status}: {worse[0].reason}"
        else:
            good += ok
    return good, failed


def _times(graded: list[tuple[TimingCell, str]]) -> dict[int, Time]:
    """Per m: the median over runs of the freshest cells of the best grade."""
    by_m: dict[int, list[tuple[TimingCell, str]]] = {}
    for cell, fresh in graded:
        by_m.setdefault(cell.m, []).append((cell, fresh))
    times = {}
    for m, found in by_m.items():
        best = min(_rank(cell, fresh, bool(cell.tier)) for cell, fresh in found)
        chosen = [(c, fresh) for c, fresh in found if _rank(c, fresh, bool(c.tier)) == best]
        # One run may have timed a problem under several distributions; it counts once.
        by_run: dict[str, list[float]] = {}
        for c, _ in chosen:
            by_run.setdefault(c.run, []).append(c.latency_us_p50)
        p50 = statistics.median(map(statistics.median, by_run.values()))
        margin = max(margin_us(c.latency_us_p20, c.latency_us_p80, c.replay_count)
                     for c, _ in chosen)  # fmt: skip
        times[m] = Time(p50, margin, chosen[0][1], len(by_run), not chosen[0][0].tier)
    return times


def _rank(cell: TimingCell | AccuracyCell, fresh: str, doubted: bool) -> tuple[bool | int, ...]:
    """The least is the best: what nobody verified comes after what was measured here."""
    return fresh == "stale", doubted, FRESHNESS.index(fresh), cell.grade != "full"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Worst bounds by limit, and the distribution that is worst in row error."""

    errors: dict[str, float]
    worst_distribution: str
    is_verified: bool = True


@dataclass(frozen=True, slots=True)
class Wrong:
    """A kernel wrote what it must not, on whatever distribution and in whatever grade."""

    reason: str


def _errors_or_reason(
    kernel: KernelRow,
    problem: Problem,
    distributions: tuple[str, ...],
    device: Device,
    local: bool,
    facts: Snapshot,
) -> Bounds | Wrong | str:
    """Worst bounds over distributions; or why there are none.

    Kernels of one numerics class have one error, so that any of them may bring the rows; that each
    is right was checked at every problem it was timed at. Rows of others that nobody verified count
    as much as the worst that is known here of such arithmetic on the distribution, at least.
    """
    from lokakern.registry.identity import problem_key

    asked = problem_key(accuracy_problem(problem, fp8_format(device)))
    own = facts.accuracy_cells(device.architecture, kernel.name, asked)
    fresh_enough = (c for c in own if freshness_of(c, local, facts) != "stale")
    bad = _unsafe(fresh_enough, lambda c: (c.distribution, c.parameters, c.seed))
    if bad is not None:
        return Wrong(f"{bad.status} on {bad.distribution}: {bad.reason}")
    cells = facts.accuracy_cells_of_class(
        device.architecture, asked, kernel.granularity, kernel.b_granularity, kernel.accumulation
    )
    usable = [(c, freshness_of(c, local, facts)) for c in cells if c.status == "ok"]
    usable = [(c, fresh) for c, fresh in usable if fresh != "stale"]
    bounds: dict[str, float] = {}
    worst_name, worst_value = "", -1.0
    missing, incomparable = [], []
    is_verified = True
    for distribution in distributions:
        here = [
            (c, fresh)
            for c, fresh in usable
            if c.distribution == distribution
            and c.parameters == facts.parameters_of(device.architecture, distribution)
        ]
        chosen: list[AccuracyCell] = []
        ranked = [(_rank(c, fresh, _is_doubted(c)), c) for c, fresh in here]
        for rank in sorted({rank for rank, _ in ranked}):
            chosen += [c for its_rank, c in ranked if its_rank == rank]
            if len({c.seed for c in chosen}) >= FEWEST_SEEDS:
                break  # a younger rank with too few seeds is joined by the next, not hidden
        else:
            missing.append(distribution)
            continue
        known: dict[str, float] = {}
        if any(map(_is_doubted, chosen)):
            is_verified = False
            known = facts.worst_errors(
                accuracy_problem(problem, fp8_format(device)),
                kernel.granularity, kernel.b_granularity, distribution,
            )  # fmt: skip
            if not known:
                incomparable.append(distribution)
                continue
        chosen += [c for c, _ in here if _is_doubted(c)]
        for limit, column in LIMIT_COLUMNS.items():
            value = max([getattr(c, column) for c in chosen] + [known.get(column, 0.0)])
            if limit == "sqnr_db":
                value = -20 * math.log10(value) if value > 0 else math.inf
            bounds[limit] = _worse(limit, bounds.get(limit, value), value)
            if limit == "row_err" and value > worst_value:
                worst_name, worst_value = distribution, value
    if missing and cells and not usable:
        return "error is stale: the kernel changed since it was measured"
    if missing:
        return f"error not measured on {', '.join(missing)} ({FEWEST_SEEDS} seeds)"
    if incomparable:
        return (
            f"error on {', '.join(incomparable)} is only imported, and nothing is known here to "
            "compare it with: `python -m lokakern.bench verify` measures some of it again"
        )
    return Bounds(bounds, worst_name, is_verified)


def _is_doubted(cell: AccuracyCell) -> bool:
    return cell.tier == "unverified"
