"""Tables: the choices for one problem at every m, from measurements or from a file."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from lokakern.problems import PADDED, baseline_name
from lokakern.registry.register import FP8_GPUS, KERNELS, Kernel, kernels_for
from lokakern.registry.unmeasured import NEW_KERNELS
from lokakern.sampled_check import Watch
from lokakern.selection.candidates import Candidate, Time
from lokakern.selection.counted import counted_cycles
from lokakern.selection.measured_neighbors import sizes_of
from lokakern.selection.ties import TOGETHER, Timed, break_tie, may_tie, within_noise
from lokakern.types import Device, ErrorBudget, Granularity, Problem, alignment_of

if TYPE_CHECKING:
    from lokakern.selection.prediction.forecast import Forecast, Prediction


E4M3_FLOOR = 0.035  # row error of E4M3 x E4M3, about
Rejections = tuple[tuple[str, str], ...]  # names of kernels, and the reason against each


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice at one m.

    Words are found when they are asked for, which few are.

    Attributes:
        why_rejected: Tells the reason against every other kernel.
        why_missed: Tells why there is no answer, and what was measured nearest; None if there is
            one.
    """

    candidate: Candidate | None
    time: Time | None = None
    interpolated: bool = False
    tied: tuple[str, ...] = ()
    why_rejected: Callable[[], Rejections] = field(default=tuple, compare=False)
    why_missed: Callable[[], str] | None = None
    prediction: Prediction | None = None  # without measurements, see `why_missed`
    is_too_strict: bool = False  # nothing measured is within the budget
    excess: str = ""  # of a kernel over the budget, taken for lack of another

    @property
    def name(self) -> str:
        return self.candidate.name if self.candidate else ""

    @property
    def rejected(self) -> Rejections:
        """The reason against every other kernel."""
        found = self.why_rejected()
        return tuple(pair for pair in found if not (self.excess and pair[0] == self.name))

    @property
    def is_miss(self) -> bool:
        return self.why_missed is not None

    @property
    def note(self) -> str:
        """The words of a miss, or ""."""
        return self.why_missed() if self.why_missed else ""


class Undecided(NamedTuple):
    """A kernel that would win if its error, which is unknown, were within the budget."""

    name: str
    time: Time
    speedup: float  # over the choice
    why: str  # its error is unknown

    def __str__(self) -> str:
        return f"{self.name} takes {_us_words(self.time)}, {self.speedup:.2f}x as fast: {self.why}"


class Ranges(NamedTuple):
    """The choices by ranges of m, ascending from 0: the first m of each, and the winner there."""

    breakpoints: list[int]
    winners: list[str]
    kernels: list[Kernel | None]
    misses: list[bool]


@dataclass(frozen=True, slots=True)
class Origin:
    """The file of frozen choices that a table was read from.

    Attributes:
        path: The path as it was given.
        frozen_utc_ms: When it was written.
        snapshot: Digest of the snapshot from which it was frozen.
        unverified_count: Number of tables that rested on unverified imports.
    """

    path: str
    frozen_utc_ms: int
    snapshot: str
    unverified_count: int = 0

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.frozen_utc_ms / 1000, UTC)
        words = f"{self.path}, frozen {when:%Y-%m-%d %H:%M} UTC from snapshot {self.snapshot[:12]}"
        if self.unverified_count:
            words += f", {self.unverified_count} of its choices by imports that were not verified"
        return words

    @property
    def remedy(self) -> str:
        """The remedy for a miss."""
        return (
            f"run it where the database is and write the file again: lokakern.freeze({self.path!r})"
        )


@dataclass(eq=False)
class Table:
    """The choices for one problem at every m; built once, then only read.

    `pick` answers at one m. The ranges of m are searched when one of `breakpoints`, `winners`,
    `kernels` and `misses` is first read: many tables are only asked at a few m.
    """

    problem: Problem  # at any m
    device: Device
    budget: ErrorBudget | None
    distributions: tuple[str, ...]
    regime: str
    callable_here: bool
    candidates: tuple[Candidate, ...] = ()
    rejected: Rejections = ()
    needs: frozenset[str] = frozenset()
    instead: Callable[[], str] = str  # without candidates: what was measured for the same sizes
    padded: str = ""  # sizes with which rows are aligned, if they are not
    host: str = ""  # where host costs were measured, or why they do not count
    origin: Origin | None = None  # None if it was computed from databases
    is_choice: bool = False  # whether a kernel was chosen by it, so that `freeze` writes it
    watch: Watch | None = None  # checks the products of `gemm`
    forecast: Forecast | None = None  # used where nothing was measured

    def __post_init__(self) -> None:
        self.baseline = baseline_name(self.problem)
        self.baseline_kernel = KERNELS.get(self.baseline or "")
        self.m_alignment = alignment_of(self.problem.m)

    # Kept by themselves: a warm call reads three of them.
    @functools.cached_property
    def breakpoints(self) -> list[int]:
        return self.ranges.breakpoints

    @functools.cached_property
    def winners(self) -> list[str]:
        return self.ranges.winners

    @functools.cached_property
    def kernels(self) -> list[Kernel | None]:
        return self.ranges.kernels

    @functools.cached_property
    def misses(self) -> list[bool]:
        return self.ranges.misses

    @property
    def measured_m(self) -> list[int]:
        names = {m for c in self.candidates for m in c.times}
        return sorted(names)

    @property
    def rests_on_imports(self) -> bool:
        """Whether an unverified import may have changed a choice."""
        return any(
            c.has_unverified or (not c.errors_verified and c.name in self.winners)
            for c in self.candidates
        )

    @functools.cached_property
    def ranges(self) -> Ranges:
        """The winner changes at measured m and where interpolated times cross."""
        starts = [0]
        measured = self.measured_m
        pick = functools.cache(self.pick)  # at the ends of two intervals
        for low, high in itertools.pairwise(measured):
            is_level = all(c.times.get(low) == c.times.get(high) for c in self._within_budget)
            starts += [low] if is_level else _changes(low, high, pick)
        if measured:
            starts += [measured[0], measured[-1], measured[-1] + 1]
        if self.forecast is not None:
            starts += [
                m for m in self.forecast.changes
                if not (measured and measured[0] <= m <= measured[-1])
            ]  # fmt: skip
        found = Ranges([], [], [], [])
        previous: tuple[str, bool] | None = None
        for start in sorted(set(starts)):
            won = pick(start)
            if (won.name, won.is_miss) != previous:
                found.breakpoints.append(start)
                found.winners.append(won.name)
                found.kernels.append(won.candidate.kernel if won.candidate else None)
                found.misses.append(won.is_miss)
                previous = won.name, won.is_miss
        return found

    @functools.cached_property
    def _within_budget(self) -> list[Candidate]:
        return [c for c in self.candidates if self._excess(c, self.problem, None) is None]

    def pick(self, m: int) -> Pick:
        """The choice at m, by the rules of `dispatch`.

        Whether a kernel takes a problem is slow to ask: kernels that cannot win are not asked.
        """
        problem = self._at(m)
        rejected = functools.partial(self._rejected, m)
        found = ((c, c.time_at(m)) for c in self._within_budget)
        rivals = [Timed(c, *time) for c, time in found if time is not None]
        if self.lacks_padded(m):
            rivals = [x for x in rivals if x.candidate.unquantized]
        rivals.sort(key=lambda x: x.time.latency_us)
        timed: list[Timed] = []
        for x in rivals:
            may_win = not timed or may_tie(x.time.latency_us, timed[0].time.latency_us)
            is_asked = may_win or self._is_baseline(x.candidate)
            if is_asked and self._refusal(x.candidate, problem) is None:
                timed.append(x)
        if not self._has_baseline(timed):
            base = self._base() or _unmeasured(self.baseline or "", self.baseline_kernel)
            reason = self._refusal(base, problem)
            if reason is not None:
                words = f"not even {self.baseline} takes it: {reason}"
                return Pick(None, why_missed=lambda: words, why_rejected=rejected)
            why = functools.partial(self._miss_words, m)
            predicted = self._predicted(m, problem, why, base)
            return predicted or Pick(base, why_missed=why, why_rejected=rejected)
        if not timed:
            return self._default(m, problem, rejected)
        chosen, tied = break_tie(timed, self._limit)
        names = tuple(sorted(x.candidate.name for x in tied if x is not chosen))
        return Pick(*chosen, names, rejected)

    def _rejected(self, m: int) -> Rejections:
        """The reasons against the kernels that `pick` does not choose by a measured time."""
        rejected = list(self.rejected)
        timed: list[Timed] = []
        problem = self._at(m)
        for candidate in self.candidates:
            found = candidate.time_at(m)
            reason = self._reason_against(candidate, problem, found[0] if found else None)
            if reason is None and found is None:
                measured = sorted(candidate.times)
                reason = f"not measured at m={m} (measured: {_range_words(measured)})"
                if candidate.failed:
                    worst = min(candidate.failed, key=lambda x: abs(x - m))
                    reason += f"; at m={worst} {candidate.failed[worst]}"
            if reason is not None:
                rejected.append((candidate.name, reason))
            elif found is not None:
                timed.append(Timed(candidate, *found))
        if not self._has_baseline(timed):
            words = f"but {self.baseline}, to compare it with, has no time that counts at m={m}"
            rejected += [(x.candidate.name, f"{_us_words(x.time)}, {words}") for x in timed]
            return tuple(rejected)
        if self.lacks_padded(m):
            reason = (
                f"bf16 of rows padded to {self.padded} was not measured; bf16 of unaligned rows is "
                "slow, and no measure of a gain"
            )
            rejected += [(x.candidate.name, reason) for x in timed if not x.candidate.unquantized]
            timed = [x for x in timed if x.candidate.unquantized]
        if timed:
            chosen, tied = break_tie(timed, self._limit)
            for other in timed:
                if other is not chosen:
                    is_tied = other in tied
                    words = (
                        "tied, larger error, more launches or later name" if is_tied else "slower"
                    )
                    words += f": {_us_words(other.time)}"
                    words += ", estimated" if other.candidate.estimated else ""
                    rejected.append((other.candidate.name, words))
        return tuple(rejected)

    def _at(self, m: int) -> Problem:
        """The problem for which kernels are asked at m."""
        return replace(self.problem, m=self.like(m))

    @property
    def _limit(self) -> str:
        """The error that decides a tie."""
        return next(iter(self.budget.limits)) if self.budget else "row_err"

    def _has_baseline(self, timed: Sequence[Timed]) -> bool:
        """Whether the unquantized kernel has a time, if the op has one."""
        return self.baseline is None or any(self._is_baseline(c) for c, _, _ in timed)

    def _is_baseline(self, candidate: Candidate) -> bool:
        """Whether others are compared with it: bf16, and with padded rows where they need that."""
        return candidate.name == self.baseline or (bool(self.padded) and candidate.name == PADDED)

    def has_baseline_at(self, m: int) -> bool:
        """Whether a kernel with which others are compared was timed at m, not interpolated."""
        return any(self._is_baseline(c) and m in c.times for c in self.candidates)

    def _predicted(
        self, m: int, problem: Problem, why_missed: Callable[[], str], base: Candidate | None
    ) -> Pick | None:
        """The choice by predicted times, where no kernel has a measured one; None if there is none.

        Args:
            m: Asked for.
            problem: At an m like it.
            why_missed: As of `Pick`.
            base: What runs where a prediction is shown only.
        """
        forecast = self.forecast
        if forecast is None or not forecast.covers(m):
            return None
        if any(c.time_at(m) is not None for c in self.candidates):
            return None
        named = {c.name: c for c in forecast.candidates}
        against = functools.cache(lambda name: self._reason_against(named[name], problem, None))
        found = forecast.choose(m, lambda name: against(name) is None)
        if found is None:
            return None
        chosen, prediction = found
        if prediction.transferred_from:
            return Pick(
                base, why_missed=why_missed, why_rejected=lambda: self.rejected,
                prediction=prediction,
            )  # fmt: skip

        def why_rejected() -> Rejections:
            reasons = {name: against(name) for name in named}
            others = {name: why for name, why in self.rejected if name not in reasons}
            for name, why in reasons.items():
                if why is None and name != chosen.name:
                    why = f"predicted {forecast.time_us(name, m):.2f} us"
                    if name == prediction.quantizing:
                        why += f"; its speedup may be as little as {prediction.low:.2f}"
                if why is not None:
                    others[name] = why
            return tuple(others.items())

        return Pick(chosen, why_rejected=why_rejected, why_missed=why_missed, prediction=prediction)

    def undecided(self, m: int, chosen: Pick) -> Undecided | None:
        """The fastest kernel that beats an unquantized choice, but whose error is unknown.

        None where the budget is less than any error of FP8.
        """
        is_plain = chosen.candidate is not None and chosen.candidate.unquantized
        if chosen.time is None or self.budget is None or not is_plain or self.lacks_padded(m):
            return None
        if self.budget.limits.get("row_err", math.inf) < E4M3_FLOOR:
            return None
        plain, problem = chosen.time, self._at(m)
        unknown = (c for c in self.candidates if not (c.errors or c.unquantized))
        timed = ((timed[0], c) for c in unknown if (timed := c.time_at(m)) is not None)
        for time, candidate in sorted(timed, key=lambda pair: pair[0].latency_us):
            times = plain.latency_us, plain.margin_us, time.latency_us, time.margin_us
            if time.latency_us > plain.latency_us or within_noise(*times):
                continue
            if self._refusal(candidate, problem) is None:
                speedup = plain.latency_us / time.latency_us
                return Undecided(candidate.name, time, speedup, candidate.error_unknown)
        return None

    def kernel_at(self, m: int) -> Kernel | None:
        """The chosen kernel; None if there is none, or it is not registered here."""
        return self.kernels[bisect_right(self.breakpoints, m) - 1]

    def like(self, m: int) -> int:
        """An m near m with the alignment of this table, for which kernels are asked."""
        unit = self.m_alignment
        if unit == 16:
            return max(m // 16, 1) * 16
        return m // (2 * unit) * 2 * unit + unit

    def takes(self, candidate: Candidate, m: int) -> bool:
        """Whether a kernel supports the problem at an m, whatever its error."""
        return self._refusal(candidate, self._at(m)) is None

    def admits(self, candidate: Candidate, m: int) -> bool:
        """Whether a kernel that takes the problem is within the budget."""
        return self._excess(candidate, replace(self.problem, m=m), None) is None

    def _reason_against(
        self, candidate: Candidate, problem: Problem, time: Time | None
    ) -> str | None:
        refusal = self._refusal(candidate, problem)
        return self._excess(candidate, problem, time) if refusal is None else refusal

    def _excess(self, candidate: Candidate, problem: Problem, time: Time | None) -> str | None:
        """Why an error is not within the budget, which is so at every m."""
        if candidate.name == self.baseline or candidate.unquantized:
            return None  # every unquantized kernel is legal
        if self.budget is None:
            return "no budget: only unquantized kernels" if self.baseline else None
        error = candidate.errors
        if not error:
            if time is None:
                return candidate.error_unknown
            if self._is_behind(time, problem.m):
                return f"slower: {_us_words(time)}; {candidate.error_unknown}"
            return f"{candidate.error_unknown}; it takes {_us_words(time)}"
        for limit, allowed in self.budget.limits.items():
            if limit not in error:  # errors of another n or of a replay have fewer limits
                return f"{limit} is not known at n={problem.n}"
            found = error[limit]
            passed = found >= allowed if limit == "sqnr_db" else found <= allowed
            if not passed:
                sign = "<" if limit == "sqnr_db" else ">"
                return (
                    f"{limit} {found:.4f} {sign} {allowed:g} "
                    f"(worst on {candidate.worst_distribution}{_floor_words(limit, allowed)})"
                )
        return None

    def _refusal(self, candidate: Candidate, problem: Problem) -> str | None:
        """Why a kernel does not support a problem."""
        if problem.prepared and TOGETHER in candidate.name:
            apart = candidate.name.replace(TOGETHER, "quantize")
            return f"launches what {apart} does where the weight is prepared"
        kernel = candidate.kernel
        return None if kernel is None else kernel.refusal(problem, self.device)

    def _base(self) -> Candidate | None:
        return next((c for c in self.candidates if c.name == self.baseline), None)

    def lacks_padded(self, m: int) -> bool:
        """Whether rows are unaligned, and the time of bf16 with padded rows is unknown."""
        return bool(self.padded) and not any(
            c.name == PADDED and c.time_at(m) is not None for c in self.candidates
        )

    def plain_at(self, m: int) -> Time | None:
        """The time of the fastest unquantized kernel at m; None if unknown."""
        return min(self._plain_times(m), key=lambda pair: pair[0].latency_us, default=(None, ""))[0]

    def plain_name_at(self, m: int) -> str:
        """The fastest unquantized kernel at m; "" if unknown."""
        return min(self._plain_times(m), key=lambda pair: pair[0].latency_us, default=(None, ""))[1]

    def _plain_times(self, m: int) -> list[tuple[Time, str]]:
        found = ((c, c.time_at(m)) for c in self.candidates if c.unquantized)
        return [(timed[0], c.name) for c, timed in found if timed is not None]

    def _is_behind(self, time: Time, m: int) -> bool:
        """Whether an unquantized choice is faster, so that the error does not matter."""
        bases = (c.time_at(m) for c in self.candidates if self._is_baseline(c))
        plain = self.plain_at(m) if any(bases) else None
        return plain is not None and time.latency_us > plain.latency_us

    def _default(self, m: int, problem: Problem, rejected: Callable[[], Rejections]) -> Pick:
        """The choice if no timed kernel is legal: the most accurate one, else one that supports it.

        Kernels of libraries are excluded from the latter: nothing is known of them at this problem.
        """
        why: Callable[[], str] = functools.partial(self._miss_words, m)
        predicted = self._predicted(m, problem, why, None)
        if predicted is not None:
            return predicted
        if self.budget is not None:
            limit = next(iter(self.budget.limits))
            usable = [
                c for c in self.candidates if c.time_at(m) and self._refusal(c, problem) is None
            ]
            known = [c for c in usable if limit in c.errors]
            if known:
                sign = -1 if limit == "sqnr_db" else 1
                best = min(known, key=lambda c: (sign * c.errors[limit], c.name))
                words = (
                    f"no kernel is within {self.budget}; the most accurate of those that run is "
                    "taken"
                )
                if best.errors_predicted:  # its error may be less than that
                    words = (
                        f"by bounds from other n and k no kernel is within {self.budget}; the one "
                        "with the least is taken"
                    )
                return Pick(
                    best, why_missed=lambda: words, why_rejected=rejected,
                    is_too_strict=not best.errors_predicted,
                    excess=self._excess(best, problem, None) or "",
                )  # fmt: skip
            if usable:
                missing = (
                    f"no error is known of what was timed there: nothing is within {self.budget}"
                )
                why = functools.partial(str, missing)

        def cycles(kernel: Kernel) -> float:
            if kernel.accumulation == "fast":  # sums are promoted unless a measured time is better
                return math.inf
            return counted_cycles(kernel.name, problem, self.device)

        def order(kernel: Kernel) -> tuple[bool, float, bool, int, bool, str]:
            here = self.device.architecture
            without_rows = {**kernel.unmeasured, **kernel.compile_only}
            is_unmeasured = here in without_rows or (kernel.name, here) in NEW_KERNELS
            # Quantizes a column-major matrix in one launch instead of four.
            is_apart = problem.b is not None or TOGETHER not in kernel.name
            return (
                kernel.language == "torch", cycles(kernel), is_unmeasured, len(kernel.parts),
                is_apart, kernel.name,
            )  # fmt: skip

        def legal() -> Iterator[Kernel]:
            kernels = kernels_for(problem.op, self.device) if self.callable_here else ()
            for kernel in sorted(kernels, key=order):
                if kernel.libraries or kernel.lacks(self.needs) is not None:
                    continue
                if self._refusal(_unmeasured(kernel.name, kernel), problem) is None:
                    yield kernel

        def with_counts() -> str:
            counts = [(cycles(kernel), kernel.name) for kernel in legal()]
            words = [f"{name} {count:.3g}" for count, name in counts if math.isfinite(count)]
            return f"{why()}; by cycles counted from instructions, not measured: {', '.join(words)}"

        kernel = next(legal(), None)
        if kernel is None:
            return Pick(None, why_missed=why, why_rejected=rejected)
        is_counted = math.isfinite(cycles(kernel))
        return Pick(
            _unmeasured(kernel.name, kernel), why_missed=with_counts if is_counted else why,
            why_rejected=rejected,
        )  # fmt: skip

    def _miss_words(self, m: int) -> str:
        if self.origin is not None:
            return f"not among the choices of {self.origin}"
        measured = self.measured_m
        if measured and measured[0] <= m <= measured[-1]:
            kept = (c.times for c in self.candidates if self.baseline in (None, c.name))
            at = sorted({x for times in kept for x in times})
            what = f"{self.baseline} was not" if self.baseline else "nothing that counts was"
            return f"{what} measured at m={m} (measured: {_range_words(at)})"
        if measured:
            nearest = measured[0] if m < measured[0] else measured[-1]
            return (
                f"m={m} is outside what was measured ({_range_words(measured)}); nearest is "
                f"m={nearest} (m differs)"
            )
        no_fp8 = self.device.is_gpu and self.device.architecture not in FP8_GPUS
        return self.instead() or (
            f"nothing was measured at {sizes_of(self.problem)}, {self.regime}, on "
            f"{self.device.product}"
            + (f"; {self.device.architecture} does not multiply FP8: all is bf16" * no_fp8)
        )


@dataclass(eq=False)
class FrozenTable(Table):
    """A table read from a file, which has winners without reasons."""

    ranges: Ranges = field(kw_only=True)

    @property
    def measured_m(self) -> list[int]:
        """The m at which the winner changes; the measured m are not in the file."""
        return self.breakpoints[1:]

    def pick(self, m: int) -> Pick:
        place = bisect_right(self.breakpoints, m) - 1
        name = self.winners[place]
        words = f"dispatch had no answer for it in {self.origin}"
        why = (lambda: words) if self.misses[place] else None
        return Pick(_unmeasured(name, self.kernels[place]) if name else None, why_missed=why)


@dataclass(eq=False)
class LooseTable(Table):
    """A table for `pick` at few m and within many budgets, which remembers refusals."""

    _refusals: dict[tuple[str, int], str | None] = field(default_factory=dict)

    def within(self, budget: ErrorBudget | None) -> LooseTable:
        """The same table with another budget."""
        return replace(self, budget=budget)

    def _refusal(self, candidate: Candidate, problem: Problem) -> str | None:
        key = (candidate.name, problem.m)
        if key not in self._refusals:
            self._refusals[key] = super()._refusal(candidate, problem)
        return self._refusals[key]


def _changes(low: int, high: int, pick: Callable[[int], Pick]) -> list[int]:
    """The m between two measured m at which the winner changes, by sampling and bisection."""
    samples = sorted({low + (high - low) * i // 16 for i in range(17)})
    changes = [low, *([low + 1] if low + 1 < high else [])]
    for left, right in itertools.pairwise(samples):
        first, last = pick(left).name, pick(right).name
        while first != last and right - left > 1:
            middle = (left + right) // 2
            if pick(middle).name == first:
                left = middle
            else:
                right = middle
        if first != last:
            changes.append(right)
    return changes


def _unmeasured(name: str, kernel: Kernel | None) -> Candidate:
    return Candidate(name, kernel, Granularity.NONE, {}, {}, {}, "", "not measured here", True)


def _us_words(time: Time) -> str:
    """A time, marked if it is that of the host, stale, unsteady, or unverified."""
    of_host = " of the host" if time.is_of_host else ""
    stale = ", stale" if time.freshness == "stale" else ""
    unsteady = "" if time.is_steady else ", unsteady"
    unverified = "" if time.is_verified else ", imported and not verified"
    return f"{time.latency_us:.2f} us{of_host}{stale}{unsteady}{unverified}"


def _range_words(measured: list[int]) -> str:
    return ", ".join(map(str, measured)) if measured else "never"


def _floor_words(limit: str, allowed: float) -> str:
    if limit == "row_err" and allowed < E4M3_FLOOR:
        return f"; the floor of E4M3 x E4M3 is about {E4M3_FLOOR:g}"
    return ""
