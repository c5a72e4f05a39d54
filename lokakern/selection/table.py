"""Tables: the choices for one problem at every m, from measurements or from a file."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lokakern.problems import PADDED, baseline_name
from lokakern.registry.register import FP8_GPUS, KERNELS, Kernel, kernels_for
from lokakern.sampled_check import Watch
from lokakern.selection.candidates import Candidate, Time
from lokakern.selection.measured_neighbors import sizes_of
from lokakern.selection.ties import TOGETHER, Timed, break_tie
from lokakern.types import Device, ErrorBudget, Granularity, Problem, alignment_of

if TYPE_CHECKING:
    from lokakern.selection.prediction.forecast import Forecast, Prediction


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice at one m.

    Attributes:
        why_missed: Tells why there is no answer, and what was measured nearest; None if there is
            one. Words are found when they are asked for, which few are.
    """

    candidate: Candidate | None
    time: Time | None = None
    interpolated: bool = False
    tied: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    why_missed: Callable[[], str] | None = None
    prediction: Prediction | None = None  # without measurements, see `why_missed`
    is_too_strict: bool = False  # nothing measured is within the budget

    @property
    def name(self) -> str:
        return self.candidate.name if self.candidate else ""

    @property
    def is_miss(self) -> bool:
        return self.why_missed is not None

    @property
    def note(self) -> str:
        """The words of a miss, or ""."""
        return self.why_missed() if self.why_missed else ""


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
    """The choices for one problem at every m; built once, then only read."""

    problem: Problem  # at any m
    device: Device
    budget: ErrorBudget | None
    distributions: tuple[str, ...]
    regime: str
    callable_here: bool
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    needs: frozenset[str] = frozenset()
    breakpoints: list[int] = field(default_factory=list)
    winners: list[str] = field(default_factory=list)
    kernels: list[Kernel | None] = field(default_factory=list)
    misses: list[bool] = field(default_factory=list)
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
        if not self.breakpoints:
            self._freeze()

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

    def _freeze(self) -> None:
        """Find where the winner changes: at measured m and where interpolated times cross."""
        starts = [0]
        measured = self.measured_m
        # What exceeds the budget wins nowhere, and whether a kernel takes a problem is slow to ask.
        legal = [c for c in self.candidates if self._excess(c, self.problem, None) is None]
        # Asked for twice at most m: at the ends of two intervals.
        pick = functools.cache(functools.partial(self._pick, legal))
        for low, high in itertools.pairwise(measured):
            is_level = all(c.times.get(low) == c.times.get(high) for c in legal)
            starts += [low] if is_level else _changes(low, high, pick)
        if measured:
            starts += [measured[0], measured[-1], measured[-1] + 1]
        if self.forecast is not None:
            starts += [
                m for m in self.forecast.changes
                if not (measured and measured[0] <= m <= measured[-1])
            ]  # fmt: skip
        previous: tuple[str, bool] | None = None
        for start in sorted(set(starts)):
            found = pick(start)
            state = (found.name, found.is_miss)
            if state != previous:
                self.breakpoints.append(start)
                self.winners.append(found.name)
                self.kernels.append(found.candidate.kernel if found.candidate else None)
                self.misses.append(found.is_miss)
                previous = state

    def pick(self, m: int) -> Pick:
        """The choice at m with reasons, by the rules of `dispatch`."""
        return self._pick(self.candidates, m)

    def _pick(self, candidates: Sequence[Candidate], m: int) -> Pick:
        """`pick`, with reasons against `candidates` alone, which hold all that may win."""
        rejected = list(self.rejected)
        timed: list[Timed] = []
        problem = replace(self.problem, m=self.like(m))
        for candidate in candidates:
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
        if self.baseline and not any(c.name == self.baseline for c, _, _ in timed):
            base = self._base() or _unmeasured(self.baseline, self.baseline_kernel)
            reason = self._refusal(base, problem)
            if reason is not None:
                words = f"not even {self.baseline} takes it: {reason}"
                return Pick(None, why_missed=lambda: words, rejected=tuple(rejected))
            why = functools.partial(self._miss_words, m)
            predicted = self._predicted(m, problem, why, base)
            return predicted or Pick(base, why_missed=why, rejected=tuple(rejected))
        if self.lacks_padded(m):
            reason = (
                f"bf16 of rows padded to {self.padded} was not measured; bf16 of unaligned rows is "
                "slow, and no measure of a gain"
            )
            rejected += [(x.candidate.name, reason) for x in timed if not x.candidate.unquantized]
            timed = [x for x in timed if x.candidate.unquantized]
        if not timed:
            return self._default(m, problem, rejected)
        limit = next(iter(self.budget.limits)) if self.budget else "row_err"
        chosen, tied = break_tie(timed, limit)
        for other in timed:
            if other is not chosen:
                words = (
                    "tied, larger error, more launches or later name" if other in tied else "slower"
                )
                words += f": {_us_words(other.time)}"
                words += ", estimated" if other.candidate.estimated else ""
                rejected.append((other.candidate.name, words))
        names = tuple(sorted(x.candidate.name for x in tied if x is not chosen))
        return Pick(*chosen, names, tuple(rejected))

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
        rejected = {c.name: self._reason_against(c, problem, None) for c in forecast.candidates}
        legal = {name for name, reason in rejected.items() if reason is None}
        found = forecast.choose(m, legal)
        if found is None:
            return None
        chosen, prediction = found
        if prediction.transferred_from:
            return Pick(base, why_missed=why_missed, rejected=self.rejected, prediction=prediction)
        for name in legal - {chosen.name}:
            words = f"predicted {forecast.time_us(name, m):.2f} us"
            if name == prediction.quantizing:
                words += f"; its speedup may be as little as {prediction.low:.2f}"
            rejected[name] = words
        others = {name: why for name, why in self.rejected if name not in rejected}
        others |= {name: why for name, why in rejected.items() if why is not None}
        return Pick(
            chosen, rejected=tuple(others.items()), why_missed=why_missed, prediction=prediction
        )

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
        return self._refusal(candidate, replace(self.problem, m=self.like(m))) is None

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
            slower = ""
            if time is not None and self._is_behind(time, problem.m):
                slower = f"slower: {_us_words(time)}; "
            return slower + candidate.error_unknown
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
        """Whether an unquantized kernel is faster, so that the error does not matter."""
        plain = self.plain_at(m)
        return plain is not None and time.latency_us > plain.latency_us

    def _default(self, m: int, problem: Problem, rejected: list[tuple[str, str]]) -> Pick:
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
                words = f"no kernel is within {self.budget}; the most accurate is taken"
                if best.errors_predicted:  # its error may be less than that
                    words = (
                        f"by bounds from other n and k no kernel is within {self.budget}; the one "
                        "with the least is taken"
                    )
                return Pick(best, why_missed=lambda: words, rejected=tuple(rejected),
                            is_too_strict=not best.errors_predicted)  # fmt: skip
            if usable:
                missing = (
                    f"no error is known of what was timed there: nothing is within {self.budget}"
                )
                why = functools.partial(str, missing)

        def order(kernel: Kernel) -> tuple[bool, bool, int, bool, str]:
            is_unmeasured = self.device.architecture in kernel.unmeasured
            # Quantizes a column-major matrix in one launch instead of four.
            is_apart = problem.b is not None or TOGETHER not in kernel.name
            return (
                kernel.language == "torch", is_unmeasured, len(kernel.parts), is_apart, kernel.name
            )  # fmt: skip

        kernels = kernels_for(problem.op, self.device) if self.callable_here else ()
        for kernel in sorted(kernels, key=order):
            if not kernel.libraries and kernel.lacks(self.needs) is None:
                candidate = _unmeasured(kernel.name, kernel)
                if self._refusal(candidate, problem) is None:
                    return Pick(candidate, why_missed=why, rejected=tuple(rejected))
        return Pick(None, why_missed=why, rejected=tuple(rejected))

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


class FrozenTable(Table):
    """A table read from a file, which has winners without reasons."""

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


class LooseTable(Table):
    """A table for `pick` only, at few m and within many budgets.

    It skips the search for breakpoints, which takes most of the time of building a table.
    """

    _refusals: dict[tuple[str, int], str | None]

    def _freeze(self) -> None:
        """Leave `breakpoints` and `winners` empty."""
        self._refusals = {}

    def within(self, budget: ErrorBudget | None) -> LooseTable:
        """The same table with another budget."""
        table = replace(self, budget=budget)
        table._refusals = self._refusals
        return table

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
    if limit == "row_err" and allowed < 0.035:
        return "; the floor of E4M3 x E4M3 is about 0.035"
    return ""
