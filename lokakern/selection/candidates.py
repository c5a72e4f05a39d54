"""Candidates: the times and errors of a kernel at a problem, from the rows of a snapshot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lokakern.device import current_environment
from lokakern.problems import accuracy_problem, baseline_name
from lokakern.registry.libraries import named, plugin_of, why_not_tried
from lokakern.registry.register import KERNELS, Kernel, fp8_format
from lokakern.registry.staleness import is_current
from lokakern.selection.ties import is_unsteady, margin_us
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Environment,
    Granularity,
    Problem,
    norm_form,
)

if TYPE_CHECKING:
    from lokakern.registry.schema.records import KernelRow
    from lokakern.registry.snapshot.cells import (
        AccuracyCell,
        AccuracyHead,
        TimingCell,
        TimingHead,
    )
    from lokakern.registry.snapshot.snapshot import Snapshot

FRESHNESS = ("fresh", "usable", "stale")  # from best to worst, see `freshness_of`
FEWEST_SEEDS = 3  # a bound is the largest error of so many seeds
# From an n of `WIDE` on, row errors at one n hold for every other n at the same k: in the shipped
# file they differ by at most 13 % (row_p99: 19 %). See DESIGN.md. Unquantized products are those of
# a library, which may use other kernels if ALIGNMENT_OF_N does not divide n: errors of cuBLAS at
# n = 900 are up to 1.4 times those at 904.
WIDE, ERRORS_ELSEWHERE, ALIGNMENT_OF_N = 256, 1.25, 8
# Errors of a quantizer are those of rounding: by emulation, those at k = 128 to 8192 exceed those
# at k = 512 by at most 24 % (row_p99, one scale for all of x; rows: 16 %). From short to long rows
# errors grow: at k = 512 they are 1.31 times those at k = 128 (X6). With one scale for all of x
# row_p99 also grows from long to short rows: at k = 64 it is 1.28 times that at 512 (X9).
ROUNDING_OPS, LONG_ROWS, TIMES_SHORTER, TIMES_LONGER = ("quantize", "norm_quantize"), 512, 4, 16
CARRIED = ("row_err", "row_p99", "rel_err")
LIMIT_COLUMNS = {
    "row_err": "row_err_upper",
    "row_p99": "row_p99_upper",
    "rel_err": "rel_err_upper",
    "sqnr_db": "rel_err_upper",
    "mean_rel_err": "mean_rel_err_upper",
    "mean_shift": "mean_shift_upper",
}


@dataclass(frozen=True, slots=True)
class HostCost:
    """The time of the host for one call, see `lokakern.selection.host_cost`.

    Attributes:
        us: The median.
        margin_us: Half-width of its 95 % interval.
        is_assumed: Whether it is that of bfloat16, because this call was not measured.
        least_us: What counts at least, see `HostCosts.of`.
    """

    us: float
    margin_us: float
    is_assumed: bool = False
    least_us: float = 0.0

    @property
    def counted_us(self) -> float:
        """What choices compare with the time of the GPU."""
        return max(self.us, self.least_us)


@dataclass(frozen=True, slots=True)
class Time:
    """The median time over runs at one m.

    ``latency_us`` is what choices compare. With a host cost it is the longer of ``gpu_us`` and the
    time of the host.
    """

    latency_us: float
    margin_us: float
    freshness: str
    run_count: int
    is_verified: bool = True  # measured here, or imported and verified here
    is_steady: bool = True  # see `lokakern.selection.ties.is_unsteady`
    host: HostCost | None = None
    _gpu_us: float | None = None  # None without a host cost, where it is latency_us

    @property
    def gpu_us(self) -> float:
        """The median time on the GPU."""
        return self.latency_us if self._gpu_us is None else self._gpu_us

    @property
    def is_of_host(self) -> bool:
        """Whether the host takes longer than the GPU."""
        return self.host is not None and self.host.counted_us > self.gpu_us

    def beside(self, host: HostCost) -> Time:
        """This time on the GPU, in a step in which the host makes each call."""
        if host.counted_us <= self.latency_us:
            return replace(self, host=host, _gpu_us=self.latency_us)
        return replace(
            self,
            latency_us=host.counted_us,
            margin_us=host.margin_us,
            host=host,
            _gpu_us=self.latency_us,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with its times and errors at a problem without m."""

    name: str
    kernel: Kernel | None
    granularity: Granularity
    times: dict[int, Time]
    failed: dict[int, str]  # m at which it only failed, with the reason
    errors: dict[str, float]  # limit -> largest bound; empty if unknown
    worst_distribution: str
    error_unknown: str  # why errors is empty
    unquantized: bool
    errors_verified: bool = True
    has_unverified: bool = False  # whether any time is unverified
    failed_here: frozenset[int] = frozenset()  # the m in `failed` that rest on verified rows
    errors_at: str = ""  # where errors are from, if from another n, or k of a quantizer
    set_aside: tuple[str, ...] = ()  # unverified failures that verified rows refute
    errors_predicted: bool = False  # a bound from other n and k
    estimated: str = ""  # what the times are made of, if the kernel itself was not timed
    host: HostCost | None = None  # of a call, if it counts

    @property
    def is_predicted(self) -> bool:
        """Whether its times are those of a time model."""
        return self.estimated.startswith("predicted")

    def time_at(self, m: int) -> tuple[Time, bool] | None:
        """The time at m and whether it is interpolated; None outside the measured range.

        With a host cost, the longer of the times of GPU and host.
        """
        found = self._gpu_time_at(m)
        if found is None or self.host is None:
            return found
        return found[0].beside(self.host), found[1]

    def _gpu_time_at(self, m: int) -> tuple[Time, bool] | None:
        """The time on the GPU.

        There is none between two measured m if the kernel failed in between. Interpolation between
        verified times comes before an unverified time at m.
        """
        if self.has_unverified or len(self.failed) > len(self.failed_here):
            ours = {x: time for x, time in self.times.items() if time.is_verified}
            found = self._among(ours, m, self.failed_here)
            if found is not None:
                return found
        return self._among(self.times, m, self.failed)

    def _among(
        self, times: dict[int, Time], m: int, failed: Iterable[int]
    ) -> tuple[Time, bool] | None:
        found = times.get(m)
        if found is not None:
            return found, False
        below = max((x for x in times if x < m), default=None)
        above = min((x for x in times if x > m), default=None)
        if below is None or above is None or any(below < x < above for x in failed):
            return None
        low, high = times[below], times[above]
        share = (m - below) / (above - below)
        worse = max(low.freshness, high.freshness, key=FRESHNESS.index)
        return (
            Time(
                low.latency_us + share * (high.latency_us - low.latency_us),
                low.margin_us + share * (high.margin_us - low.margin_us),
                worse,
                min(low.run_count, high.run_count),
                low.is_verified and high.is_verified,
                low.is_steady and high.is_steady,
            ),
            True,
        )


def _worse(limit: str, a: float, b: float) -> float:
    return min(a, b) if limit == "sqnr_db" else max(a, b)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest bounds by limit, and the distribution with the largest row error."""

    errors: dict[str, float]
    worst_distribution: str
    is_verified: bool = True
    elsewhere: str = ""  # where they were measured, if at another n, or k of a quantizer
    set_aside: str = ""  # the largest claimed row error that is disregarded
    around: tuple[str, ...] = ()  # keys of other n and k that were looked at, if it is from these

    @property
    def is_predicted(self) -> bool:
        """Whether it is from other n and k."""
        return bool(self.around)


# Bounds of a numerics class at an `accuracy_problem`, by the keys of both and the rows that count,
# which many kernels and problems share; and the status of a wrong result, or "", by the name of a
# kernel and the key of a problem. For one snapshot, device and choice of distributions.
Memory = dict[tuple[str, ...], Bounds | str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The rows of a snapshot that count for problems on a device."""

    facts: Snapshot
    device: Device
    local: bool
    distributions: tuple[str, ...]
    memory: Memory

    def asked(self, problem: Problem) -> Problem:
        """The problem under which errors of a problem are stored."""
        return accuracy_problem(problem, fp8_format(self.device))

    def freshness(self, cell: TimingCell | AccuracyCell) -> str:
        return freshness_of(cell, self.local, self.facts)


def candidate_of(
    name: str, cells: list[TimingCell], problem: Problem, evidence: Evidence
) -> Candidate | str:
    """The candidate, or the reason why a kernel is none at any m."""
    local, device = evidence.local, evidence.device
    kernel = KERNELS.get(name)
    if local and kernel is None:
        return _why_not_registered(cells, device)
    for library in kernel.libraries if kernel is not None else ():
        absent = named(library).why_not_here()
        if absent is not None:
            return absent
    if not cells:
        refusal = kernel.refusal(problem, device) if kernel is not None and local else None
        return refusal or "not measured here"
    graded = [(cell, evidence.freshness(cell)) for cell in cells]
    is_baseline = name == baseline_name(problem)  # that is always legal: hearsay stops nobody
    current = [c for c, fresh in graded if fresh != "stale"]
    bad = unsafe((c for c in current if not (is_baseline and c.tier)), lambda c: c.problem)
    is_ours = any(c.status == "ok" and not c.tier for c in current)
    set_aside: list[str] = []
    if bad is not None:
        words = f"{bad.status} at m={bad.m}: {bad.reason}"
        if not bad.tier or not is_ours:
            return words + _unverified_words(bad)
        set_aside.append(words)
        graded = [(c, fresh) for c, fresh in graded if not c.tier or c.status != "ok"]
    good, failed, ours = _outcomes(graded)
    times = _times(good)
    if not times:
        never = "not measured since the kernel changed"
        return failed[max(failed)] if failed else never
    row = _class_of(kernel, cells)
    granularity = Granularity(row.granularity)
    unquantized = (
        granularity is Granularity.NONE
        and kernel is not None
        and baseline_name(problem) is not None
    )
    found = errors_or_reason(row, problem, evidence)
    unknown = found if isinstance(found, str) else ""
    bounds = Bounds({}, "") if isinstance(found, str) else found
    wrong = _wrong(row, problem, evidence, is_elsewhere=bool(bounds.elsewhere))
    if wrong is not None:
        words, cell = wrong
        if not (cell.tier and (is_baseline or (is_ours and bounds.is_verified))):
            return words + _unverified_words(cell)
        set_aside.append(words)
    set_aside += [bounds.set_aside] if bounds.set_aside else []
    return Candidate(
        name, kernel, granularity, times, failed, bounds.errors, bounds.worst_distribution, unknown,
        unquantized, bounds.is_verified, not all(time.is_verified for time in times.values()), ours,
        bounds.elsewhere, tuple(set_aside),
    )  # fmt: skip


def _why_not_registered(cells: list[TimingCell], device: Device) -> str:
    """Why a kernel is in the database but not here: that of its plugin, if it is of one."""
    modules = (module for cell in cells for module in cell.kernel.modules)
    for module in dict.fromkeys(m for m in modules if m.startswith("python:")):
        plugin = plugin_of(module.removeprefix("python:"))
        why = why_not_tried(plugin, device) if plugin is not None else None
        if why is not None:
            return why
    return "is in the database but not registered here"


def _class_of(kernel: Kernel | None, cells: list[TimingCell]) -> KernelRow:
    """A row with the numerics class of the registered kernel; a database may claim another."""
    row = min(cells, key=lambda cell: bool(cell.tier)).kernel
    if kernel is None:
        return row
    return replace(
        row,
        granularity=str(kernel.granularity),
        b_granularity=str(kernel.b_granularity),
        accumulation=kernel.accumulation,
    )


Cell = TypeVar("Cell", "TimingCell", "AccuracyCell")


def unsafe(cells: Iterable[Cell], place: Callable[[Cell], Any]) -> Cell | None:
    """A wrong result or crash at any place, which rejects the kernel at all places.

    A verified one if there is any, else an unverified one.
    """
    found = list(cells)
    return _bad([c for c in found if not c.tier], place) or _bad(found, place)


def _bad(found: list[Cell], place: Callable[[Cell], Any]) -> Cell | None:
    """The first wrong result or crash that no other row cancels.

    A later success (``sweep --retry``) cancels a crash. Any verified success at a place cancels an
    unverified failure there.
    """
    for cell in found:
        if cell.status not in ("wrong", "crashed"):
            continue
        ended_well = [
            c
            for c in found
            if c.status == "ok"
            and place(c) == place(cell)
            and c.kernel.digest == cell.kernel.digest
            and (not c.tier or cell.tier)
        ]
        if cell.tier and any(not c.tier for c in ended_well):
            continue
        later = any(c.measured_utc_ms > cell.measured_utc_ms for c in ended_well)
        if cell.status == "wrong" or not later:
            return cell
    return None


def _unverified_words(cell: TimingCell | AccuracyCell) -> str:
    return " (imported and not verified)" if cell.tier else ""


def _toolchain(kernel: KernelRow, environment: Environment) -> tuple[str, ...]:
    """Versions that determine how the source of a kernel, with all its parts, is compiled."""
    tools: tuple[str, ...] = ()
    languages = {module.split("/")[0] for module in kernel.modules}
    if "triton" in languages:
        tools += (environment.triton,)
    if "cuda" in languages:
        tools += (environment.libraries,)
    if languages - {"triton", "cuda", "compositions", "norm_compositions"}:
        tools += (environment.torch, environment.toolkit)
    return tools


def freshness_of(
    cell: TimingCell | AccuracyCell | TimingHead | AccuracyHead, local: bool, facts: Snapshot
) -> str:
    """Fresh: equal digest and toolchain; usable: another toolchain; stale: another digest."""
    if not is_current(cell.kernel):
        return "stale"
    if not local:
        return "fresh"  # for another device only the digest counts
    then = facts.environment(cell.environment)
    same = _toolchain(cell.kernel, then) == _toolchain(cell.kernel, current_environment())
    return "fresh" if same else "usable"


def _outcomes(
    graded: list[tuple[TimingCell, str]],
) -> tuple[list[tuple[TimingCell, str]], dict[int, str], frozenset[int]]:
    """Cells with times; m where the best cell is a failure, with its reason; the verified of them.

    Verified cells come first, then the freshest.
    """

    def rank(cell: TimingCell, fresh: str) -> tuple[bool, int]:
        return bool(cell.tier), FRESHNESS.index(fresh)

    good: list[tuple[TimingCell, str]] = []
    failed: dict[int, str] = {}
    ours: set[int] = set()
    for m in {cell.m for cell, _ in graded}:
        here = [(cell, fresh) for cell, fresh in graded if cell.m == m]
        ok = [(cell, fresh) for cell, fresh in here if cell.status == "ok"]
        bad = [(cell, fresh) for cell, fresh in here if cell.status != "ok" and fresh != "stale"]
        best = min((rank(*pair) for pair in ok), default=(True, len(FRESHNESS)))
        worse = [cell for cell, fresh in bad if rank(cell, fresh) < best]
        if worse:
            failed[m] = f"{worse[0].status}: {worse[0].reason}{_unverified_words(worse[0])}"
            ours |= {m} if not worse[0].tier else set()
        else:
            good += ok
    return good, failed, frozenset(ours)


def _times(graded: list[tuple[TimingCell, str]]) -> dict[int, Time]:
    """The median over runs of the freshest cells of the best grade, at each m."""
    by_m: dict[int, list[tuple[TimingCell, str]]] = {}
    for cell, fresh in graded:
        by_m.setdefault(cell.m, []).append((cell, fresh))
    times = {}
    for m, found in by_m.items():
        best = min(_rank(cell, fresh) for cell, fresh in found)
        chosen = [(c, fresh) for c, fresh in found if _rank(c, fresh) == best]
        # A run that timed a problem under several distributions counts once.
        by_run: dict[str, list[float]] = {}
        for c, _ in chosen:
            by_run.setdefault(c.run, []).append(c.latency_us_p50)
        p50 = statistics.median(map(statistics.median, by_run.values()))
        margin = max(margin_us(c.latency_us_p20, c.latency_us_p80, c.replay_count)
                     for c, _ in chosen)  # fmt: skip
        is_steady = not any(is_unsteady(c.latency_us_p20, c.latency_us_p80) for c, _ in chosen)
        times[m] = Time(p50, margin, chosen[0][1], len(by_run), not chosen[0][0].tier, is_steady)
    return times


def _rank(cell: TimingCell | AccuracyCell, fresh: str) -> tuple[bool | int, ...]:
    """A key to sort cells by, the best first; unverified cells come after verified ones."""
    return fresh == "stale", bool(cell.tier), FRESHNESS.index(fresh), cell.grade != "full"


def errors_or_reason(kernel: KernelRow, problem: Problem, evidence: Evidence) -> Bounds | str:
    """Largest bounds of a kernel's numerics class, or why there are none.

    Errors measured here at the problem come first, then those at another n, or k of a quantizer,
    then imported ones. A product with a cross, residual or gate that is not FP8 has the errors of
    the product alone, where no others are known: these are left out of stored errors.
    """
    from lokakern.registry.schema.row_keys import key_of

    facts, memory = evidence.facts, evidence.memory
    stored = evidence.asked(problem)
    asked = key_of(stored)
    place = (asked, kernel.granularity, kernel.b_granularity, kernel.accumulation)
    if place in memory:
        return memory[place]
    found: Bounds | str = ""
    for ours_only in (True, False) if facts.has_quarantined else (True,):
        found = bounds_or_reason(kernel, problem, asked, evidence, ours_only)
        if isinstance(found, str) and not is_tried(kernel, asked, evidence, ours_only=ours_only):
            found = _elsewhere(kernel, problem, evidence, ours_only) or found
        if isinstance(found, Bounds):
            break
    if (
        isinstance(found, Bounds)
        and found.elsewhere
        and found.is_verified
        and facts.has_quarantined
    ):
        heard = bounds_or_reason(kernel, problem, asked, evidence, False)
        if isinstance(heard, Bounds) and heard.errors["row_err"] > found.errors["row_err"]:
            words = f"row_err {heard.errors['row_err']:.4g} on {heard.worst_distribution}"
            found = replace(found, set_aside=words)
    is_wide = problem.op == "gemm_norm" and bool(norm_form(problem.epilogue).beside)
    is_product = is_wide and stored.epilogue == "none"
    is_known = not isinstance(found, str) or is_tried(kernel, asked, evidence)
    if is_product and not is_known and not stored.out_format.is_fp8:
        alone = errors_or_reason(kernel, replace(stored, op="gemm"), evidence)
        found = found if isinstance(alone, str) else alone
    memory[place] = found
    return found


def _wrong(
    kernel: KernelRow, problem: Problem, evidence: Evidence, *, is_elsewhere: bool
) -> tuple[str, AccuracyCell] | None:
    """A wrong result or crash of the kernel itself, on any distribution and in any grade.

    If errors of another size are used, at any. One measured here comes before an imported one.
    """
    from lokakern.registry.schema.row_keys import key_of

    stored = evidence.asked(problem)
    places = [(key_of(stored), "")]
    if is_elsewhere:
        axis, sizes = _alike(stored, evidence)
        places += [(key, f" at {axis}={size}") for size, key in sizes]
    heard = None
    for key, where in places:
        own = evidence.facts.accuracy_cells(evidence.device.architecture, kernel.name, key)
        current = (c for c in own if evidence.freshness(c) != "stale")
        bad = unsafe(current, lambda c: (c.distribution, c.parameters, c.seed))
        if bad is not None:
            found = f"{bad.status} on {bad.distribution}{where}: {bad.reason}", bad
            if not bad.tier:
                return found
            heard = heard or found
    return heard


def _cells_of_class(kernel: KernelRow, asked: str, evidence: Evidence) -> list[AccuracyCell]:
    scales = (kernel.granularity, kernel.b_granularity, kernel.accumulation)
    return evidence.facts.accuracy_cells_of_class(evidence.device.architecture, asked, *scales)


def is_tried(kernel: KernelRow, asked: str, evidence: Evidence, *, ours_only: bool = False) -> bool:
    """Whether any error of the class is stored there, even with too few seeds."""
    return any(not (ours_only and c.tier) for c in _cells_of_class(kernel, asked, evidence))


def _alike(asked: Problem, evidence: Evidence) -> tuple[str, list[tuple[int, str]]]:
    """An axis on which errors hardly depend, and its sizes with errors and the keys of problems."""
    if asked.op in ROUNDING_OPS:
        return "k", [(k, key) for _, k, key in evidence.facts.accuracies_of_form(asked)]
    return "n", evidence.facts.accuracies_like(asked)


def _elsewhere(
    kernel: KernelRow, problem: Problem, evidence: Evidence, ours_only: bool
) -> Bounds | None:
    """Bounds at the nearest size with equal row errors, times `ERRORS_ELSEWHERE`.

    That is another n of a GEMM, or another k of a quantizer.
    """
    asked = evidence.asked(problem)
    axis, sizes = _alike(asked, evidence)
    here = getattr(asked, axis)
    if asked.op in ROUNDING_OPS:
        least = max(LONG_ROWS, here / TIMES_LONGER)
        sizes = [(k, key) for k, key in sizes if least <= k <= here * TIMES_SHORTER]
    elif asked.op == "gemm":
        step = ALIGNMENT_OF_N if Granularity(kernel.granularity) is Granularity.NONE else 1
        is_wide = here >= WIDE and here % step == 0
        sizes = [(n, key) for n, key in sizes if is_wide and n >= WIDE and n % step == 0]
    else:
        return None
    for size, key in sorted(sizes, key=lambda other: (abs(math.log(other[0] / here)), other)):
        there = replace(problem, n=size) if axis == "n" else replace(problem, k=size)
        found = bounds_or_reason(kernel, there, key, evidence, ours_only)
        if isinstance(found, Bounds):
            errors = {limit: ERRORS_ELSEWHERE * found.errors[limit] for limit in CARRIED}
            errors["sqnr_db"] = found.errors["sqnr_db"] - 20 * math.log10(ERRORS_ELSEWHERE)
            return replace(found, errors=errors, elsewhere=f"{axis}={size}", set_aside="")
    return None


def bounds_or_reason(
    kernel: KernelRow, problem: Problem, asked: str, evidence: Evidence, ours_only: bool
) -> Bounds | str:
    """Largest bounds over distributions, or why there are none.

    Kernels of one numerics class have equal errors, so that rows of any of them count; that each
    kernel is correct was checked at every problem where it was timed. Where enough seeds were
    measured here, they decide. Elsewhere all unverified rows join them, unless `ours_only`, and
    count at least as much as the largest error known here for such arithmetic on the distribution.
    """
    place = (asked, kernel.granularity, kernel.b_granularity, kernel.accumulation,
             "ours" if ours_only else "all")  # fmt: skip
    if place not in evidence.memory:
        evidence.memory[place] = _bounds_or_reason(kernel, problem, asked, evidence, ours_only)
    return evidence.memory[place]


def _bounds_or_reason(
    kernel: KernelRow, problem: Problem, asked: str, evidence: Evidence, ours_only: bool
) -> Bounds | str:
    facts = evidence.facts
    cells = _cells_of_class(kernel, asked, evidence)
    usable = [(c, evidence.freshness(c)) for c in cells if c.status == "ok"]
    usable = [(c, fresh) for c, fresh in usable if fresh != "stale"]
    bounds: dict[str, float] = {}
    worst_name, worst_value = "", -1.0
    missing, few, incomparable = [], [], []
    is_verified = True
    set_aside, claimed = "", 0.0
    for distribution in evidence.distributions:
        here = [
            (c, fresh)
            for c, fresh in usable
            if c.distribution == distribution
            and c.parameters == facts.parameters_of(evidence.device.architecture, distribution)
        ]
        chosen: list[AccuracyCell] = []
        ranked = [(_rank(c, fresh), c) for c, fresh in here if not (ours_only and c.tier)]
        for rank in sorted({rank for rank, _ in ranked}):
            chosen += [c for its_rank, c in ranked if its_rank == rank]
            if len({c.seed for c in chosen}) >= FEWEST_SEEDS:
                break  # a rank with too few seeds is joined by the next
        else:
            missing.append(distribution)
            few += [distribution] if chosen else []
            continue
        known: dict[str, float] = {}
        heard = [c for c, _ in here if c.tier]
        if any(c.tier for c in chosen):
            is_verified = False
            chosen += heard
            known = facts.worst_errors(
                evidence.asked(problem),
                kernel.granularity, kernel.b_granularity, distribution,
            )  # fmt: skip
            if not known:
                incomparable.append(distribution)
                continue
        else:
            larger = max((c.row_err_upper for c in heard), default=0.0)
            if larger > max(claimed, *(c.row_err_upper for c in chosen)):
                set_aside, claimed = f"row_err {larger:.4g} on {distribution}", larger
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
        where = "" if few == missing else f" on {', '.join(few)}"
        some = f", fewer measured{where}: run the sweep again" if few else ""
        count = len(REALISTIC_DISTRIBUTIONS)
        on = ", ".join(missing)
        if set(missing) >= set(REALISTIC_DISTRIBUTIONS):
            on = f"any of the {count} realistic distributions"
        return f"error not measured on {on} ({FEWEST_SEEDS} seeds needed{some})"
    if incomparable:
        return (
            f"error on {', '.join(incomparable)} is only imported, and nothing is known here to "
            "compare it with: `python -m lokakern.bench verify` measures some of it again"
        )
    return Bounds(bounds, worst_name, is_verified, set_aside=set_aside)
