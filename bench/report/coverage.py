"""Coverage and staleness of the database for a device, by op and suite.

What commands count is defined here, and for users in docs/look.md.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.device import current_device
from lokakern.problems import accuracy_problem
from lokakern.progress import tell
from lokakern.registry.libraries import named
from lokakern.registry.register import Kernel, fp8_format, kernels_for
from lokakern.registry.schema.row_keys import key_of
from lokakern.registry.sqlite_file import GRADES, shown
from lokakern.registry.storage.paths import shipped_databases
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep.stale_jobs import OLDER, WORDS, Staleness, without_superseded
from lokakern.types import Device, Problem, Rejected
from lokakern.workloads.suites import SUITES

if TYPE_CHECKING:
    from lokakern.registry.snapshot.cells import AccuracyHead, TimingHead
    from lokakern.registry.snapshot.snapshot import Snapshot

COUNTED = (*WORDS, OLDER)  # each row is counted under one of them
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

    def add(self, head: TimingHead | AccuracyHead, word: str) -> None:
        self.words[word] += 1
        self.kernels.add(head.kernel.name)
        self.grades.add(head.grade)
        self.newest_utc_ms = max(self.newest_utc_ms, head.measured_utc_ms)

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
            grade=_grades_told(self.grades),
            newest=_day_told(self.newest_utc_ms),
        )

    def told(self, problems: int) -> str:
        """The counts in words."""
        if not self.words:
            return "none"
        each = (
            f"{self.words[word]} {word}"
            for word in COUNTED
            if self.words[word] or word in ALWAYS_TOLD
        )
        return f"{self.words.total()} rows of {problems} problems: {', '.join(each)}"


def _grades_told(grades: set[str]) -> str:
    return " and ".join(grade for grade in GRADES if grade in grades) or "-"


def _day_told(utc_ms: int) -> str:
    day = datetime.fromtimestamp(utc_ms / 1000, UTC)
    return f"{day:%Y-%m-%d}" if utc_ms else "never"


def _available(device: Device, op: str) -> list[Kernel]:
    """Kernels of an op whose libraries are available; a plugin is tried on the device here."""
    here = device == current_device()
    return [
        kernel
        for kernel in kernels_for(op, device)
        if not any(
            named(library).why_not_here() or (named(library).is_plugin and not here)
            for library in kernel.libraries
        )
    ]


Lack = tuple[int, int]  # kernels supporting a problem: without rows, and with stale rows only


class Holdings:
    """Coverage of a device by a snapshot, by default in the regime of dispatch."""

    def __init__(self, facts: Snapshot, device: Device, regime: str | None = None) -> None:
        self._facts, self._device = facts, device
        tell("counting rows", 0)
        self._regime = regime or default_regime(device)
        self._staleness = Staleness(facts, device, self._regime)
        rows: defaultdict[str, _Rows] = defaultdict(_Rows)
        for head, word in self._staleness.timings:
            rows[head.problem].add(head, word)
        self._rows = {facts.problem(key): found for key, found in rows.items()}
        tell("counting rows", 0.5)
        self._lacks: dict[Problem, Lack] = {}
        # Without a cycle, so that 95k rows of heads go when this object goes.
        self._kernels = functools.cache(functools.partial(_available, device))

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

    def totals(self) -> dict[str, str]:
        """Sums in words: times, the files that have them, errors, grades, and the newest day."""
        times, errors = _Rows(), _Rows()
        for rows in self._rows.values():
            times.join(rows)
        by_op = self._errors().values()
        for rows, _ in by_op:
            errors.join(rows)
        tell("counting rows", 1)
        grades = times.grades | errors.grades
        return {
            "times": times.told(len(self._rows)),
            "times by file": self._by_file(),
            "errors": errors.told(sum(len(problems) for _, problems in by_op)),
            "grades": _grades_told(grades),
            "last measured": _day_told(max(times.newest_utc_ms, errors.newest_utc_ms)),
        }

    def _by_file(self) -> str:
        shipped = {shown(path) for path in shipped_databases()}
        counts = self._facts.timings_by_file(self._device, self._regime)
        words = [
            Path(name.strip("'")).name + (" (shipped)" if name in shipped else "") + f": {count}"
            for name, count in counts.items()
            if count or name not in shipped  # shipped files of other devices go without saying
        ]
        return ", ".join(words) or "none"

    @functools.cached_property
    def errors(self) -> list[tuple[AccuracyHead, str]]:
        """Errors of timed problems with their words of `COUNTED`."""
        fp8 = fp8_format(self._device)
        asked = {key_of(p) for p in {accuracy_problem(problem, fp8) for problem in self._rows}}
        heads = self._facts.accuracy_heads(self._device.architecture)
        found = [(head, self._staleness.word(head)) for head in heads if head.problem in asked]

        def place(head: AccuracyHead) -> Hashable:
            """All kernels of a numerics class share an error."""
            kernel = head.kernel
            of_class = (kernel.granularity, kernel.b_granularity, kernel.accumulation)
            return head.problem, of_class, head.distribution, head.seed

        return without_superseded(found, place)

    def _errors(self) -> dict[str, tuple[_Rows, set[str]]]:
        """Counts of errors and the keys of their problems, by the op of the kernel."""
        found: defaultdict[str, tuple[_Rows, set[str]]] = defaultdict(lambda: (_Rows(), set()))
        for head, word in self.errors:
            rows, problems = found[head.kernel.op]
            rows.add(head, word)
            rows.seeds.add(head.seed)
            problems.add(head.problem)
        return found
