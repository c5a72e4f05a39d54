"""Verify: measure a few of what others measured again, and say whether it can be believed.

Errors are drawn from the same seeds, so that they come out alike wherever they are measured; where
a kernel does not run, one that emulates its arithmetic takes its place. Times are measured on the
same GPU type only: a whole problem at a time, every kernel of it that was timed there.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lokakern.bench import cost, timing
from lokakern.bench.accuracy import Cell
from lokakern.bench.distributions import DISTRIBUTIONS
from lokakern.bench.known import distribution_row
from lokakern.bench.measure import torch_device
from lokakern.bench.suites import Case
from lokakern.bench.sweep import Progress
from lokakern.bench.worker import (
    CPU_WATCHDOG_S,
    GPU_WATCHDOG_S,
    AccuracyTask,
    Death,
    Done,
    Task,
    TimingTask,
    run_tasks,
)
from lokakern.device import current_device, current_environment
from lokakern.errors import MeasurementError
from lokakern.registry import identity
from lokakern.registry.freshness import is_current
from lokakern.registry.reader import Rows, read_rows
from lokakern.registry.records import TimingRecord
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernels_for, load_kernels
from lokakern.registry.tables import COLUMNS
from lokakern.registry.trust import Tier, Waiting
from lokakern.types import REGIMES, Problem, Rejected

if TYPE_CHECKING:
    from lokakern.registry.records import KernelRow
    from lokakern.registry.store import RunFile

# Two H200s disagreed on 8369 times by 1.1 % in the median and by 4 % at the 90th percentile. A GPU
# may be slower as a whole, which changes no choice; single times are asked to keep their place.
WHOLE_FACTOR, PLACE, PLACED_SHARE = 1.25, 0.15, 0.9
WRONGER = 1.05  # of one seed the error is the same but for the order of sums
UNSTEADY = 1.25  # p80 over p20 of a time that says little
LONGEST_S = 60.0  # to measure one row; longer ones are not drawn


@dataclass(frozen=True, slots=True)
class Row:
    """A row that could be measured again, or was.

    Attributes:
        what: "time_us" or "row_err".
        kernel: That was measured there.
        here: The kernel that is measured here: the same, or one of its arithmetic.
        problem: Of both.
        distribution: Of both.
        regime: Of times; "" for errors.
        seed: Of errors.
        there: What the file says.
    """

    what: str
    kernel: str
    here: str
    problem: Problem
    distribution: str
    regime: str
    seed: int
    there: float


@dataclass(slots=True)
class Verdict:
    """What became of a file that waited.

    Attributes:
        name: The first digits of its checksum.
        tier: Where it is now; None: in the database.
        measured: Rows with what was found here: a number, or words where it failed.
        reasons: Why, in words.
    """

    name: str
    tier: Tier | None
    measured: list[tuple[Row, float | str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def verify(
    run: RunFile,
    waiting: Waiting,
    *,
    count: int,
    seed: int,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> tuple[Verdict, Rows]:
    """Measure some of a file's rows again and judge it by them; nothing is moved yet.

    Args:
        run: Gets what is measured: rows like any other.
        waiting: The file.
        count: Problems whose times are measured, and errors.
        seed: Draws which. Whoever made the file must not know it.
        time_limit_s: After which nothing new is begun.
        progress: Where to tell.

    Returns:
        The verdict, and the rows of the file.
    """
    load_kernels()
    rows = read_rows(waiting.path)
    drawn = random.Random(seed)
    table = _Table(rows)
    times = table.times()
    groups = sorted({(r.problem, r.distribution, r.regime) for r in times}, key=str)
    chosen = set(drawn.sample(groups, min(count, len(groups))))
    errors = sorted(table.errors(), key=str)
    asked = [row for row in times if (row.problem, row.distribution, row.regime) in chosen]
    asked += drawn.sample(errors, min(count, len(errors)))
    found = _measure(run, asked, time_limit_s, progress or Progress())
    measured = [(row, found[row]) for row in asked if row in found]
    return _judge(waiting, table, measured), rows


class _Table:
    """Rows of a file, with what they refer to."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._device = current_device()
        self._parts: dict[str, dict[str, Any]] = {
            name: {row[0]: build(_named(name, row)) for row in rows[name]}
            for name, build in _BUILD.items()
        }
        self.counts = Counter(
            name
            for name in ("timing", "accuracy")
            for row in rows[name]
            if _named(name, row)["status"] == "ok"
        )

    def _ok(self, name: str) -> Iterator[tuple[dict[str, Any], KernelRow, Problem, str]]:
        """Good rows of kernels as they are here, on distributions as they are here."""
        for values in self._rows[name]:
            row = _named(name, values)
            kernel = self._parts["kernel"][row["kernel"]]
            distribution = self._parts["distribution"][row["distribution"]]
            known = DISTRIBUTIONS.get(distribution.name)
            if (
                row["status"] == "ok"
                and known is not None
                and distribution_row(known.name) == distribution
                and is_current(kernel)
                and kernel.name in KERNELS
            ):
                yield row, kernel, self._parts["problem"][row["problem"]], known.name

    def times(self) -> list[Row]:
        """Those that can be measured here."""
        found = []
        for row, kernel, problem, distribution in self._ok("timing"):
            if (
                self._parts["device"][row["device"]] == self._device
                and _runs(KERNELS[kernel.name], problem)
                and row["regime"] in _regimes_here()
                and cost.timing_s(problem, 1, self._device) <= LONGEST_S
            ):
                found.append(Row("time_us", kernel.name, kernel.name, problem, distribution,
                                 row["regime"], 0, row["latency_us_p50"]))  # fmt: skip
        return found

    def errors(self) -> list[Row]:
        """Those that can be measured here, by the same kernel or by one of its arithmetic."""
        found = []
        for row, kernel, problem, distribution in self._ok("accuracy"):
            here = self._of_its_arithmetic(kernel, problem, row["architecture"])
            if here is None:
                continue
            cell = Cell(here, problem, distribution, row["seed"])
            if cost.error_s(cell, self._device) <= LONGEST_S:
                found.append(Row("row_err", kernel.name, here.name, problem, distribution, "",
                                 row["seed"], row["row_err"]))  # fmt: skip
        return found

    def _of_its_arithmetic(
        self, kernel: KernelRow, problem: Problem, architecture: str
    ) -> Kernel | None:
        if fp8_format(architecture) is not fp8_format(self._device):
            return None  # a GEMM would be quantized to another format here
        alike = [
            other
            for other in kernels_for(problem.op, self._device)
            if (other.granularity, other.b_granularity)
            == (kernel.granularity, kernel.b_granularity)
            and _runs(other, problem)
        ]
        return min(alike, key=lambda other: (
            other.name != kernel.name, other.accumulation != kernel.accumulation, other.name,
        ), default=None)  # fmt: skip


_BUILD = {
    "kernel": identity.kernel_from_row,
    "problem": identity.problem_from_row,
    "distribution": identity.distribution_from_row,
    "device": identity.device_from_row,
}


def _named(table: str, row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(COLUMNS[table], row, strict=True))


def _runs(kernel: Kernel, problem: Problem) -> bool:
    device = current_device()
    runs = "any" in kernel.architectures or device.architecture in kernel.architectures
    return runs and not isinstance(kernel.supports(problem, device), Rejected)


def _regimes_here() -> list[str]:
    possible = []
    for regime in REGIMES:
        try:
            timing.check_regime(regime, torch_device())
        except MeasurementError:
            continue
        possible.append(regime)
    return possible


def _measure(
    run: RunFile, asked: Sequence[Row], time_limit_s: float | None, progress: Progress
) -> dict[Row, float | str]:
    """What is found here; without what there was no time for."""
    device, environment = current_device(), current_environment()
    tasks: dict[int, Task] = {}
    rows_of: dict[int, list[Row]] = {}
    for group, members in _grouped(asked).items():
        number = len(tasks)
        first = members[0]
        if first.what == "time_us":
            problem, distribution, regime = group
            names = tuple(row.here for row in members)
            tasks[number] = TimingTask(Case(problem, distribution), names, regime)
        else:
            tasks[number] = AccuracyTask(first.here, first.problem, first.distribution, first.seed)
        rows_of[number] = members
    found: dict[Row, float | str] = {}
    unsteady: list[Row] = []

    def done(number: int, _task: Task, event: Done) -> None:
        for row, record in zip(rows_of[number], event.records, strict=True):
            value: float | None
            if isinstance(record, TimingRecord):
                value = record.latency_us_p50
                if record.status == "ok" and not _is_steady(record):
                    unsteady.append(row)
                    value = None
                run.add_timing(
                    KERNELS[row.here], row.problem, distribution_row(row.distribution), device,
                    environment, row.regime, record,
                )  # fmt: skip
            else:
                value = None if record.errors is None else record.errors.row_err
                run.add_accuracy(
                    KERNELS[row.here], row.problem, distribution_row(row.distribution),
                    device.architecture, environment, record,
                )  # fmt: skip
            if record.status != "ok":
                found[row] = f"{record.status}: {record.reason}"
            elif value is not None:
                found[row] = value
        progress.step(str(rows_of[number][0].problem))

    def died(number: int, _task: Task, death: Death) -> None:
        for row in rows_of[number]:
            if death.kernel == row.here:
                found[row] = f"{death.status}: {death.reason}"

    progress.begin("verify", len(tasks))
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    watchdog_s = GPU_WATCHDOG_S if device.is_gpu else CPU_WATCHDOG_S
    for kind in (TimingTask, AccuracyTask):
        some = {number: task for number, task in tasks.items() if isinstance(task, kind)}
        run_tasks(some, done, died, watchdog_s=watchdog_s, deadline=deadline)
    if unsteady:
        progress.note(f"{len(unsteady)} times are no evidence: this machine is too busy")
    return found


def _is_steady(record: TimingRecord) -> bool:
    """Whether a time can be compared with another machine's."""
    p20, p80 = record.latency_us_p20, record.latency_us_p80
    return p20 is not None and p80 is not None and p80 <= UNSTEADY * p20


def _grouped(asked: Iterable[Row]) -> Mapping[tuple[Any, ...], list[Row]]:
    """Times of a problem together; each kernel once."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in asked:
        timed = (row.problem, row.distribution, row.regime)
        error = (*timed, row.here, row.seed)
        group = groups.setdefault(timed if row.what == "time_us" else error, [])
        if all(row.here != other.here for other in group):
            group.append(row)
    return groups


def _judge(waiting: Waiting, table: _Table, measured: list[tuple[Row, float | str]]) -> Verdict:
    verdict = Verdict(waiting.name, waiting.tier, measured)
    of_times = [(row, value) for row, value in measured if row.what == "time_us"]
    of_errors = [(row, value) for row, value in measured if row.what == "row_err"]
    errors = _errors_hold(of_errors, verdict.reasons)
    times = _times_hold(of_times, verdict.reasons)
    if errors is False or times is False:
        verdict.tier = Tier.REJECTED
        return verdict
    for name, held in (("accuracy", errors), ("timing", times)):
        if table.counts[name] and held is None:
            verdict.reasons.append(
                f"none of {table.counts[name]} {_WHAT[name]} can be measured here: another GPU, "
                "other kernels or distributions, or too long"
            )
    errors_done = errors or not table.counts["accuracy"]
    times_done = times or not table.counts["timing"]
    if errors_done and times_done and measured:
        verdict.tier = None
    elif errors_done and measured:
        verdict.tier = Tier.ERRORS
    return verdict


_WHAT = {"accuracy": "errors", "timing": "times"}


def _errors_hold(found: list[tuple[Row, float | str]], reasons: list[str]) -> bool | None:
    """Whether no error is larger here; None where none was measured."""
    wronger = []
    for row, value in found:
        if isinstance(value, str):
            wronger.append(f"{row.here} at {row.problem} on {row.distribution}: {value}")
        elif value > WRONGER * row.there:
            wronger.append(f"{row.kernel} at {row.problem} on {row.distribution}, seed {row.seed}: "
                           f"row_err is {value:.4g} here, {row.there:.4g} there")  # fmt: skip
    reasons += wronger[:3]
    if len(wronger) > 3:
        reasons.append(f"and {len(wronger) - 3} more errors")
    return None if not found else not wronger


def _times_hold(found: list[tuple[Row, float | str]], reasons: list[str]) -> bool | None:
    """Whether times keep their place; None where none was measured."""
    failed = [f"{row.here} at {row.problem}: {value}"
              for row, value in found if isinstance(value, str)]  # fmt: skip
    reasons += failed[:3]
    logs = [(math.log(value / row.there), row) for row, value in found
            if not isinstance(value, str)]  # fmt: skip
    if not logs:
        return False if failed else None
    middle = statistics.median(log for log, _ in logs)
    apart = [(log - middle, row) for log, row in logs if abs(log - middle) > math.log1p(PLACE)]
    if abs(middle) > math.log(WHOLE_FACTOR):
        reasons.append(f"times here are {math.exp(middle):.2f} of those there, in the median")
    if len(apart) > (1 - PLACED_SHARE) * len(logs):
        log, row = max(apart, key=lambda pair: abs(pair[0]))
        reasons.append(
            f"{len(apart)} of {len(logs)} times are more than {PLACE:.0%} out of place, "
            f"{row.kernel} at {row.problem} by {math.expm1(log):+.0%}"
        )
        return False
    return not failed and abs(middle) <= math.log(WHOLE_FACTOR)
