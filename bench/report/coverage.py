"""Coverage and staleness of the database for a device, by op and suite.

What commands count is defined here, and for users in docs/look.md.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lokakern.device import current_device
from lokakern.problems import accuracy_problem
from lokakern.progress import tell
from lokakern.registry.libraries import named
from lokakern.registry.register import Kernel, fp8_format, kernels_for
from lokakern.registry.schema.tables import GRADES
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep.stale_jobs import WORDS, ErrorClass, Staleness, fresher
from lokakern.types import Device, Problem, Rejected
from lokakern.workloads.suites import SUITES

if TYPE_CHECKING:
    from lokakern.registry.snapshot.cells import AccuracyCell, TimingCell
    from lokakern.registry.snapshot.snapshot import Snapshot

COUNTED = (*WORDS, "older")  # each row is counted under one of them
ALWAYS_TOLD = ("fresh", "usable", "stale")  # of `COUNTED`, even if there are none


@dataclass(frozen=True, slots=True)
class Holding:
    """Coverage of the problems of an op or a suite.

    Attributes:
        part: An op, for its timed problems on the device; or a suite, for its own problems.
        of: "times", or "errors" of timed problems.
        problems: Number of different problems, or of problems with errors.
        covered: Problems with a row, possibly a failure, of every kernel that supports them, no
            older than the kernel.
        share: `covered` over `problems`.
        untimed: Problems without any row.
        kernels: Kernels with rows.
        rows: Rows of times in the regime, or of errors; each is counted in one of the next five.
        fresh: By `lokakern.selection.candidates.freshness_of`, like `usable` and `stale`.
        unverified: Rows of current kernels that were imported and not verified.
        older: Rows that one of an earlier of these words supersedes.
        missing: Kernels without a row of a problem they support, summed over problems with rows.
        seeds: Seeds of errors.
        grade: "full", "quick" or both.
        newest: Day of the newest row, UTC.
    """

    part: str
    of: str
    problems: int
    covered: int | None
    share: float | None
    untimed: int | None
    kernels: int
    rows: int
    fresh: int
    usable: int
    unverified: int
    stale: int
    older: int
    missing: int | None
    seeds: str | None
    grade: str
    newest: str


@dataclass
class _Rows:
    """Counts of rows."""

    words: Counter[str] = field(default_factory=Counter)  # of `COUNTED`
    kernels: set[str] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    grades: set[str] = field(default_factory=set)
    newest_utc_ms: int = 0

    def add(self, cell: TimingCell | AccuracyCell, word: str) -> None:
        self.words[word] += 1
        self.kernels.add(cell.kernel.name)
        self.grades.add(cell.grade)
        self.newest_utc_ms = max(self.newest_utc_ms, cell.measured_utc_ms)

    def join(self, other: _Rows) -> None:
        self.words += other.words
        self.kernels |= other.kernels
        self.seeds |= other.seeds
        self.grades |= other.grades
        self.newest_utc_ms = max(self.newest_utc_ms, other.newest_utc_ms)

    def holding(
        self, part: str, of: str, problems: int, lacking: Iterable[Lack | None] = ()
    ) -> Holding:
        covered = untimed = missing = None
        if of == "times":
            lacks = list(lacking)
            covered = sum(lack == (0, 0) for lack in lacks)
            untimed = lacks.count(None)
            missing = sum(lack[0] for lack in lacks if lack is not None)
        day = datetime.fromtimestamp(self.newest_utc_ms / 1000, UTC)
        return Holding(
            part=part,
            of=of,
            problems=problems,
            covered=covered,
            share=None if covered is None or not problems else covered / problems,
            untimed=untimed,
            kernels=len(self.kernels),
            rows=self.words.total(),
            **{word: self.words[word] for word in COUNTED},
            missing=missing,
            seeds=", ".join(map(str, sorted(self.seeds))) if of == "errors" else None,
            grade=" and ".join(grade for grade in GRADES if grade in self.grades) or "-",
            newest=f"{day:%Y-%m-%d}" if self.newest_utc_ms else "never",
        )


Lack = tuple[int, int]  # kernels supporting a problem: without rows, and with stale rows only


class Holdings:
    """Coverage of a device by a snapshot, by default in the regime of dispatch."""

    def __init__(self, facts: Snapshot, device: Device, regime: str | None = None) -> None:
        self._facts, self._device = facts, device
        self._staleness = Staleness(facts, device, regime or default_regime(device))
        self._rows: dict[Problem, _Rows] = {}
        for cell, word in self._staleness.timings:
            best = self._staleness.times[cell.problem][cell.kernel.name]
            here = self._rows.setdefault(cell.problem, _Rows())
            here.add(cell, word if word == best else "older")
        self._lacks: dict[Problem, Lack] = {}
        self._kernels = functools.cache(self._registered)

    def rows(self) -> list[dict[str, Any]]:
        """All holdings as rows."""
        return [asdict(holding) for holding in self.every()]

    def every(self) -> list[Holding]:
        """Holdings of all ops and suites."""
        return [*self.of_ops(), *self.of_suites()]

    def of_ops(self) -> list[Holding]:
        """Times and errors of each op that was timed."""
        problems: dict[str, list[Problem]] = {}
        for problem in self._rows:
            problems.setdefault(problem.op, []).append(problem)
        errors = self._errors()
        found = []
        every = sorted({*problems, *errors})
        for place, op in enumerate(every, 1):
            tell("counting rows of ops", place / (len(every) + 1))
            if op in problems:
                found.append(self._times(op, problems[op]))
            if op in errors:
                rows, asked = errors[op]
                found.append(rows.holding(op, "errors", len(asked)))
        tell("counting rows of ops", 1)
        return found

    def of_suites(self) -> list[Holding]:
        """Times of each suite that has problems for the device."""
        found = []
        for place, suite in enumerate(SUITES.values(), 1):
            tell("counting rows of suites", place / len(SUITES))
            problems = [case.problem for case in suite.cases(self._device)]
            if problems:
                found.append(self._times(f"suite {suite.name}", problems))
        return found

    def _times(self, part: str, problems: Sequence[Problem]) -> Holding:
        rows = _Rows()
        different = dict.fromkeys(problems)  # a suite may repeat one with another distribution
        for problem in different:
            if problem in self._rows:
                rows.join(self._rows[problem])
        return rows.holding(part, "times", len(different), map(self._lack, different))

    def _registered(self, op: str) -> list[Kernel]:
        """Kernels of an op whose libraries are available; a plugin is tried on the device here."""
        here = self._device == current_device()
        return [
            kernel
            for kernel in kernels_for(op, self._device)
            if not any(
                named(library).why_not_here() or (named(library).is_plugin and not here)
                for library in kernel.libraries
            )
        ]

    def _lack(self, problem: Problem) -> Lack | None:
        """Missing and stale kernels of a problem; None if it has no row."""
        if problem not in self._rows:
            return None
        found = self._lacks.get(problem)
        if found is None:
            here = self._staleness.times[problem]
            # `supports` takes 90 % of the time: it is not called for kernels with a current row.
            words = [
                here.get(kernel.name)
                for kernel in self._kernels(problem.op)
                if here.get(kernel.name) in (None, "stale")
                and not isinstance(kernel.supports(problem, self._device), Rejected)
            ]
            found = self._lacks[problem] = (words.count(None), words.count("stale"))
        return found

    def errors(self) -> Iterator[tuple[Problem, AccuracyCell, str]]:
        """Errors of timed problems: the problem of the row, the row, and its freshness.

        The freshness is a word of `COUNTED`.
        """
        fp8 = fp8_format(self._device)
        asked = dict.fromkeys(accuracy_problem(problem, fp8) for problem in self._rows)
        classes: dict[ErrorClass, None] = dict.fromkeys(
            (row.granularity, row.b_granularity, row.accumulation) for row in self._facts.kernels
        )
        for problem in asked:
            for which in classes:
                cells = self._staleness.errors(problem, which)
                best: dict[tuple[str, str, int], str] = {}
                for cell, word in cells:
                    place = (cell.distribution, cell.parameters, cell.seed)
                    best[place] = fresher(best.get(place), word)
                for cell, word in cells:
                    place = (cell.distribution, cell.parameters, cell.seed)
                    yield problem, cell, word if word == best[place] else "older"

    def _errors(self) -> dict[str, tuple[_Rows, set[Problem]]]:
        """Counts of errors and their problems, by the op of the kernel."""
        found: dict[str, tuple[_Rows, set[Problem]]] = {}
        for problem, cell, word in self.errors():
            rows, problems = found.setdefault(cell.kernel.op, (_Rows(), set()))
            rows.add(cell, word)
            rows.seeds.add(cell.seed)
            problems.add(problem)
        return found


def totals(holdings: Sequence[Holding]) -> dict[str, str]:
    """Sums over ops in words (times, errors, grades, newest), and each suite."""
    words: dict[str, str] = {}
    for of in ("times", "errors"):
        parts = [h for h in holdings if h.of == of and not h.part.startswith("suite ")]
        counts = {name: sum(getattr(h, name) for h in parts) for name in COUNTED}
        rows = sum(h.rows for h in parts)
        each = ", ".join(
            f"{count} {name}" for name, count in counts.items() if count or name in ALWAYS_TOLD
        )
        words[of] = f"{rows} rows of {sum(h.problems for h in parts)} problems: {each}"
        words[of] = words[of] if rows else "none"
    words["grades"] = " and ".join(g for g in GRADES if any(g in h.grade for h in holdings)) or "-"
    measured = [h.newest for h in holdings if h.rows]
    words["last measured"] = max(measured, default="never")
    for h in holdings:
        if h.part.startswith("suite "):
            words[h.part] = f"{h.covered} of {h.problems} problems covered ({h.share:.0%})"
    return words
