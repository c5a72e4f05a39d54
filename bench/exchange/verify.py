"""Repeat a few measurements of another user's file, and judge the file by them.

Errors come from the same seeds, so that they are reproducible anywhere; where a kernel does not
run, a kernel that emulates its arithmetic replaces it. Times are measured on the same GPU type
only, for a whole problem at a time, with all its kernels timed in the file. Rows of one kind (times
of a regime, or errors of one arithmetic on one architecture) hold or fail by the drawn rows. One
kind that fails rejects the file, because whoever invents one row invents others.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lokakern.bench.exchange.remeasure import ERROR_COLUMNS, ERRORS, TIMES, Foreign, Row
from lokakern.device import current_device, current_environment
from lokakern.problems import accuracy_problem, baseline_name
from lokakern.progress import Progress
from lokakern.registry.quarantine import QuarantinedFile
from lokakern.registry.register import KERNELS, fp8_format, load_kernels
from lokakern.registry.schema.records import AccuracyRecord
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import Rows, read_rows
from lokakern.selection.ties import is_unsteady
from lokakern.sweep.worker import (
    CPU_WATCHDOG_S,
    GPU_WATCHDOG_S,
    AccuracyTask,
    Death,
    Done,
    Record,
    Task,
    TimingTask,
    run_tasks,
)
from lokakern.workloads.suites import Case

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.registry.storage.run_files import RunFile

# Two H200s differed in 8369 times by 1.1 % in the median and by 4 % at the 90th percentile. A GPU
# may be slower as a whole, which changes no choice; single times must keep their relative place.
WHOLE_FACTOR, PLACE, PLACED_SHARE = 1.25, 0.15, 0.9
FARTHEST = 0.5  # out of place: a single time this far off is not noise
LARGER_ERROR = 1.05  # with one seed, errors differ only by the order of sums
SHIFTED = 0.01  # of the row error: the mean shift from another order of sums
FEWEST = 3  # rows needed to judge a kind
STEADY = ("row_err_upper", "row_p99_upper", "rel_err_upper")
SHOWN = 3  # printed disagreements

Value = dict[str, float] | str
Known = Callable[[Row], Mapping[str, float]]


@dataclass(slots=True)
class Verdict:
    """Result for a quarantined file.

    Attributes:
        name: The first digits of its checksum.
        rejected: Whether the measurements disagree.
        measured: Rows with the values found here, by column, or with the text of a failure.
        reasons: Why the file is rejected, or why rows stay quarantined.
        accepted: Rows to add to the database.
        left: Rows that stay quarantined.
        known: Rows that trusted files have.
    """

    name: str
    rejected: bool = False
    measured: list[tuple[Row, Value]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    accepted: Rows = field(default_factory=dict)
    left: Rows = field(default_factory=dict)
    known: Rows = field(default_factory=dict)


def verify(
    run: RunFile,
    imported: QuarantinedFile,
    trusted: Snapshot,
    *,
    count: int,
    seed: int,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Repeat some measurements of a file and judge it by them; no file is moved.

    Args:
        run: Receives the measurements as ordinary rows.
        imported: The file.
        trusted: Rows that need no verification.
        count: Problems to time, and errors to measure; at least `FEWEST` of each kind.
        seed: Seed of the selection, which the author of the file must not know.
        time_limit_s: Seconds after which no new work begins.
        progress: Receives the progress.
    """
    load_kernels()
    foreign = Foreign(read_rows(imported.path), trusted)
    rows = foreign.repeatable()
    asked = _draw(rows, count, random.Random(seed), _known_errors(trusted, rows))
    found = _Again(run, progress or Progress(), time_limit_s).measure(asked)
    verdict = Verdict(imported.name, measured=[(row, found[row]) for row in asked if row in found])
    held = _judge(verdict, rows, asked)
    keys = {row.key for row in rows if row.kind in held}
    verdict.accepted, verdict.left = foreign.divided(keys)
    verdict.known = foreign.known
    left = {name: len(verdict.left[name]) for name in FACTS if verdict.left[name]}
    if left and not verdict.rejected:
        words = ", ".join(f"{count} {_WORDS[name]}" for name, count in left.items())
        verdict.reasons.append(
            f"{words} were not measured here: failures, another GPU, other kernels or "
            "distributions, or too long"
        )
    return verdict


_WORDS = {
    "timing": "times", "accuracy": "errors", "test_result": "results of tests",
    "host_cost": "host costs",
}  # fmt: skip


def _draw(rows: Sequence[Row], count: int, drawn: random.Random, known: Known) -> list[Row]:
    """Rows at some places of each kind: half the least credible ones, half random ones.

    Random rows would miss a few false ones among many; but false rows that change a choice claim
    something that no known row resembles.
    """
    asked: list[Row] = []
    for table in sorted({row.table for row in rows}):
        kinds: dict[str, dict[object, list[Row]]] = {}
        for row in rows:
            if row.table == table:
                kinds.setdefault(row.kind, {}).setdefault(row.place, []).append(row)
        each = max(FEWEST, math.ceil(count / max(len(kinds), 1)))
        doubt = _gain if table == TIMES else functools.partial(_smallness, known)
        for groups in kinds.values():
            first = _doubtful(groups, doubt)[: math.ceil(each / 2)]
            others = sorted(groups.keys() - set(first), key=str)
            chosen = [*first, *drawn.sample(others, min(each - len(first), len(others)))]
            asked += [row for place in chosen for row in groups[place]]
    return asked


def _doubtful(
    groups: Mapping[object, Sequence[Row]], doubt: Callable[[Sequence[Row]], float]
) -> list[object]:
    """Places, the least credible first, in turn from each distribution."""
    ranks: dict[str, int] = {}
    found = []
    for place in sorted(groups, key=lambda place: (-doubt(groups[place]), str(place))):
        distribution = groups[place][0].distribution
        ranks[distribution] = ranks.get(distribution, 0) + 1
        found.append((ranks[distribution], place))
    return [place for _, place in sorted(found, key=lambda pair: pair[0])]


def _gain(rows: Sequence[Row]) -> float:
    """Claimed speedup of the fastest kernel over the unquantized one."""
    base = baseline_name(rows[0].problem)
    times = [(row.here == base, row.there[0][1]) for row in rows]
    plain = max((us for is_plain, us in times if is_plain), default=0.0)
    return plain / min(us for _, us in times)


def _smallness(known: Known, rows: Sequence[Row]) -> float:
    """Ratio of the known errors of such arithmetic to the claimed ones.

    It uses limits that vary little between problems: a mean is near zero by chance.
    """
    worst = known(rows[0])
    return max(
        worst[column] / max(dict(row.there)[column], 1e-30) for row in rows for column in STEADY
    )


def _known_errors(facts: Snapshot, rows: Sequence[Row]) -> Known:
    """Worst trusted errors of the arithmetic on the distribution, else medians of the file."""
    alike: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        if row.table == ERRORS:
            alike.setdefault((row.kind, row.distribution), []).append(dict(row.there))

    @functools.cache
    def medians(kind: str, distribution: str) -> dict[str, float]:
        found = alike[kind, distribution]
        return {column: statistics.median(one[column] for one in found) for column in found[0]}

    def known(row: Row) -> Mapping[str, float]:
        kernel = KERNELS[row.kernel]
        problem = accuracy_problem(row.problem, fp8_format(current_device()))
        scales = str(kernel.granularity), str(kernel.b_granularity)
        worst = facts.worst_errors(problem, *scales, row.distribution)
        return worst or medians(row.kind, row.distribution)

    return known


class _Again:
    """Repeats measurements.

    Args:
        run: Receives the rows.
        progress: Receives the progress.
        time_limit_s: Seconds after which no new work begins.
    """

    def __init__(self, run: RunFile, progress: Progress, time_limit_s: float | None) -> None:
        self._run, self._progress = run, progress
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._device, self._environment = current_device(), current_environment()
        self._found: dict[tuple[int, str], Value] = {}  # by task and kernel
        self._deaths: Counter[tuple[int, str]] = Counter()
        self._unsteady = 0

    def measure(self, asked: Sequence[Row]) -> dict[Row, Value]:
        """Values found here, without inconclusive ones and those beyond the time limit."""
        places: dict[object, list[Row]] = {}  # kernels at one place are timed together
        for row in asked:
            places.setdefault(row.place, []).append(row)
        tasks = {number: _task_of(rows) for number, rows in enumerate(places.values())}
        self._progress.begin("verify", len(tasks))
        watchdog_s = GPU_WATCHDOG_S if self._device.is_gpu else CPU_WATCHDOG_S
        for kind in (TimingTask, AccuracyTask):
            some = {number: task for number, task in tasks.items() if isinstance(task, kind)}
            run_tasks(some, self._done, self._died, watchdog_s=watchdog_s, deadline=self._deadline)
        if self._unsteady:
            self._progress.note(f"{self._unsteady} times are ignored: this machine is too busy")
        return {
            row: self._found[number, row.here]
            for number, rows in enumerate(places.values())
            for row in rows
            if (number, row.here) in self._found
        }

    def _done(self, number: int, task: Task, event: Done) -> None:
        for name, record in zip(task.kernels, event.records, strict=True):
            value = self._value_of(record)
            task.write(self._run, name, record, self._device, self._environment)
            if value is not None:
                self._found[number, name] = value
        self._progress.step(str(task))

    def _value_of(self, record: Record) -> Value | None:
        if record.status == "wrong":
            return f"wrong: {record.reason}"
        if record.status != "ok":
            return None
        if isinstance(record, AccuracyRecord):
            assert record.errors is not None
            return {column: float(getattr(record.errors, column)) for column in ERROR_COLUMNS}
        p20, p50, p80 = record.latency_us_p20, record.latency_us_p50, record.latency_us_p80
        assert p20 is not None and p50 is not None and p80 is not None
        if is_unsteady(p20, p80):
            self._unsteady += 1
            return None
        return {"latency_us_p50": p50}

    def _died(self, number: int, task: Task, death: Death) -> Task | None:
        if death.kernel is None:
            return None
        place = (number, death.kernel)
        self._deaths[place] += 1
        if self._deaths[place] < 2:
            return task  # a single death may have another cause
        record = task.failed(death.status, death.reason)
        task.write(self._run, death.kernel, record, self._device, self._environment)
        if death.status == "crashed":
            self._found[place] = f"crashed: {death.reason}"
        return task.without({death.kernel})


def _task_of(rows: Sequence[Row]) -> Task:
    """The task that measures the rows of one place."""
    row = rows[0]
    if row.table == TIMES:
        names = tuple(dict.fromkeys(other.here for other in rows))
        return TimingTask(Case(row.problem, row.distribution), names, row.regime)
    return AccuracyTask(row.here, row.problem, row.distribution, row.seed)


def _judge(verdict: Verdict, rows: Sequence[Row], asked: Sequence[Row]) -> set[str]:
    """Kinds that hold; a kind that fails rejects the file."""
    held = set()
    for kind in sorted({row.kind for row in rows}):
        of_kind = [row for row in rows if row.kind == kind]
        found = [(row, value) for row, value in verdict.measured if row.kind == kind]
        failed = [f"{row.here} at {row.problem} on {row.distribution}: {value}"
                  for row, value in found if isinstance(value, str)]  # fmt: skip
        values = [(row, value) for row, value in found if not isinstance(value, str)]
        check = _misplaced if of_kind[0].table == TIMES else _larger_errors
        against = [*_told(failed, "kernels that fail"), *check(values)]
        if against:
            verdict.rejected = True
            verdict.reasons += [f"{kind}: {words}" for words in against]
        answered = {row.place for row, _ in values}
        drawn = {row.place for row in asked if row.kind == kind}
        if against:
            continue
        if len(answered) >= max(min(FEWEST, len({row.place for row in of_kind})), len(drawn) / 2):
            held.add(kind)
        else:
            verdict.reasons.append(
                f"{kind}: {len(answered)} of {len(drawn)} gave a result; half of them, and at "
                f"least {FEWEST}, are needed"
            )
    return held


def _told(words: list[str], what: str) -> list[str]:
    """The first lines, and the number of the others."""
    more = [f"and {len(words) - SHOWN} more {what}"] if len(words) > SHOWN else []
    return words[:SHOWN] + more


def _larger_errors(found: Sequence[tuple[Row, Mapping[str, float]]]) -> list[str]:
    """Errors that are larger here, among those that a budget can limit."""
    words = []
    for row, here in found:
        there = dict(row.there)
        slack = {"mean_shift_upper": SHIFTED * there["row_err"]}
        larger = [
            column
            for column, value in here.items()
            if value > LARGER_ERROR * there[column] + slack.get(column, 0.0)
        ]
        if larger:
            column = max(larger, key=lambda name: here[name] / max(there[name], 1e-30))
            words.append(
                f"{row.kernel} at {row.problem} on {row.distribution}, seed {row.seed}: {column} "
                f"is {here[column]:.4g} here, {there[column]:.4g} there"
            )
    return _told(words, "larger errors")


def _misplaced(found: Sequence[tuple[Row, Mapping[str, float]]]) -> list[str]:
    """Times that differ as a whole, or do not keep their relative place."""
    if not found:
        return []
    logs = [(math.log(here["latency_us_p50"] / row.there[0][1]), row) for row, here in found]
    middle = statistics.median(log for log, _ in logs)
    against = []
    if abs(middle) > math.log(WHOLE_FACTOR):
        against.append(f"they are {math.exp(middle):.2f} of those there, in the median")
    apart = [(log - middle, row) for log, row in logs if abs(log - middle) > math.log1p(PLACE)]
    if not apart:
        return against
    farthest, row = max(apart, key=lambda pair: abs(pair[0]))
    is_far = abs(farthest) > math.log1p(FARTHEST)
    if is_far or len(apart) > (1 - PLACED_SHARE) * len(logs):
        against.append(
            f"{len(apart)} of {len(logs)} are more than {PLACE:.0%} out of place, {row.kernel} at "
            f"{row.problem} by {math.expm1(farthest):+.0%}"
        )
    return against
