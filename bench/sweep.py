"""Sweep: time every candidate of every problem, then measure every error, row by row into a run.

What is already in the database for the same kernel digest, problem, device and environment is not
measured again, so an interrupted sweep goes on where it stopped. Everything is launched in a
disposable process (`lokakern.bench.worker`): a kernel that crashes or hangs becomes a row.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lokakern.bench import cost, timing
from lokakern.bench.accuracy import Cell, cells_for
from lokakern.bench.known import Job, Known, Races, distribution_row
from lokakern.bench.measure import torch_device
from lokakern.bench.suites import Case
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
from lokakern.errors import UnknownNameError
from lokakern.prebuild import prebuild
from lokakern.registry.records import AccuracyRecord, TimingRecord
from lokakern.registry.register import KERNELS, Kernel, kernels_for
from lokakern.selection import default_regime
from lokakern.types import REALISTIC_DISTRIBUTIONS, Device, Environment, Problem, Rejected

if TYPE_CHECKING:
    from lokakern.registry.store import RunFile

ERRORS = ("all", "needed", "none")
# A kernel that crashed or hung at so many problems is launched no more: each costs a new worker,
# and a hang the watchdog's patience as well.
STRIKES = 3
# Problems from which on it pays to compile on all cores first: those processes take 4 s to start.
FEWEST_PREBUILT = 16


@dataclass
class Progress:
    """What a sweep tells about itself; replace the methods to show it."""

    def note(self, text: str) -> None:
        """A line for whoever waits."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of so many steps begins."""

    def step(self, text: str) -> None:
        """One step is done; the text says what comes next or came last."""


@dataclass
class SweepReport:
    """What a sweep did.

    ``job_s`` holds what each problem took, in seconds, with its number of candidates.
    """

    timed: int = 0
    measured: int = 0
    skipped: int = 0
    problems: int = 0
    deaths: int = 0
    failures: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    out_of_time: bool = False
    estimated_s: float = 0.0
    seconds: float = 0.0
    job_s: list[tuple[Problem, int, float]] = field(default_factory=list)


def harness_digest() -> str:
    """Digest of the measuring code: rows of different harnesses can be told apart."""
    folder = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def candidates(problem: Problem, device: Device, only: Sequence[str] = ()) -> list[Kernel]:
    """Registered kernels that accept a problem; ``only`` keeps those whose name holds a word."""
    return [
        kernel
        for kernel in kernels_for(problem.op, device)
        if not isinstance(kernel.supports(problem, device), Rejected)
        and (not only or any(word in kernel.name for word in only))
    ]


def sweep(
    cases: Sequence[Case],
    *,
    database: str | Path,
    suite: str,
    command: str,
    regime: str | None = None,
    grade: str = "full",
    time_limit_s: float | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
    retry: bool = False,
    distributions: Sequence[str] = REALISTIC_DISTRIBUTIONS,
    errors: str = "all",
    watchdog_s: float | None = None,
    strikes: int = STRIKES,
    progress: Progress | None = None,
) -> SweepReport:
    """Measure cases on the device here and merge the rows into a database.

    Args:
        cases: Problems with the distribution each is timed under.
        database: File or URL the rows go to; created if missing.
        suite: Name kept with the run.
        command: How to do it again; kept with the run.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        grade: "full" or "quick".
        time_limit_s: Stop beginning new work after so many seconds; what is done is kept.
        only: Words of kernel names; empty for all kernels.
        fresh: Measure also what the database holds already.
        retry: Measure also what crashed or hung before.
        distributions: Whose errors are measured.
        errors: "all", "none", or "needed": only of numerics classes that have a kernel which is, at
            some problem, no slower than the unquantized one (of ops that have none: at most 1.5x
            behind the fastest). Others are never chosen.
        watchdog_s: Longest silence of a launched kernel; None means 60 on GPUs, 600 on CPUs.
        strikes: Crashes and hangs after which a kernel is launched no more.
        progress: Where to tell.

    Raises:
        DatabaseError: The database cannot be read or written.
        MeasurementError: The regime is not possible here, or no worker can be started.
        UnknownNameError: ``errors`` is none of those.
    """
    from lokakern.registry.store import RunFile, collect_runs

    if errors not in ERRORS:
        raise UnknownNameError(f"errors is {errors!r}; expected one of {', '.join(ERRORS)}")
    begun = time.monotonic()
    deadline = None if time_limit_s is None else begun + time_limit_s
    device, environment = current_device(), current_environment()
    regime = regime or default_regime(device)
    timing.check_regime(regime, torch_device())
    if watchdog_s is None:
        watchdog_s = GPU_WATCHDOG_S if device.is_gpu else CPU_WATCHDOG_S
    progress = progress or Progress()
    report = SweepReport()
    collect_runs(database)
    known = Known(database, device, environment, regime, grade, fresh, retry)
    given_up = {} if retry else known.given_up(strikes)
    jobs = []
    for case in cases:
        found = candidates(case.problem, device, only)
        for kernel in found:
            if "python:__main__" in kernel.modules:
                report.given_up.append(f"{kernel.name}: a worker cannot import the script that "
                                       "registers it; move it to a module")  # fmt: skip
        found = [kernel for kernel in found if "python:__main__" not in kernel.modules]
        usable = tuple(kernel for kernel in found if kernel.digest not in given_up)
        report.given_up += [
            f"{kernel.name}: crashed or hung {given_up[kernel.digest]} times before"
            for kernel in found
            if kernel.digest in given_up
        ]
        if usable:
            jobs.append(Job(case, usable))
    report.given_up = list(dict.fromkeys(report.given_up))
    todo = [job for job in jobs if not known.has_timings(job)]
    report.skipped = sum(len(job.kernels) for job in jobs) - sum(len(j.kernels) for j in todo)
    races = Races(device, known, jobs, todo)
    cells: list[Cell] = []
    if errors != "none":
        pairs = [(kernel, job.case.problem) for job in jobs for kernel in job.kernels]
        cells = cells_for(pairs, device, distributions)
    if errors == "needed" and not todo:
        needed = races.needed()
        cells = [cell for cell in cells if races.is_needed(cell, needed)]
    wanted = [left for cell in cells if (left := known.remaining(cell)) is not None]
    if errors != "needed" or not todo:
        report.skipped += len(cells) - len(wanted)
    if not todo and not wanted:
        return report
    report.estimated_s = cost.BEGIN_S if device.is_gpu else 0.0
    report.estimated_s += sum(cost.timing_s(j.case.problem, len(j.kernels), device) for j in todo)
    share = cost.NEEDED_SHARE if errors == "needed" else 1.0
    report.estimated_s += share * sum(cost.error_s(cell, device) for cell in wanted)
    count = sum(len(job.kernels) for job in todo)
    progress.note(
        f"{count} times at {len(todo)} problems and "
        f"{'at most ' if errors == 'needed' else ''}{len(wanted)} errors: "
        f"about {_duration(report.estimated_s)}"
    )
    if device.is_gpu and len(todo) >= FEWEST_PREBUILT:
        prebuild([job.case.problem for job in todo], device, only, progress=progress)
    run = RunFile.create(
        database, suite=suite, command=command, harness_digest=harness_digest(), grade=grade
    )
    with run:
        session = _Session(
            run, device, environment, regime, report, progress, races, watchdog_s, deadline, strikes
        )
        session.time(todo)
        if errors == "needed" and todo:
            needed = races.needed()
            report.skipped += sum(races.is_needed(c, needed) for c in cells)
            wanted = [cell for cell in wanted if races.is_needed(cell, needed)]
            report.skipped -= len(wanted)
        session.measure(wanted)
    report.seconds = time.monotonic() - begun
    return report


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"


@dataclass
class _Session:
    """Hands tasks to workers, writes what comes back, and goes on after a death."""

    run: RunFile
    device: Device
    environment: Environment
    regime: str
    report: SweepReport
    progress: Progress
    races: Races
    watchdog_s: float
    deadline: float | None
    strikes: int
    tasks: dict[int, Task] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)
    stand_ins: dict[AccuracyTask, tuple[str, ...]] = field(default_factory=dict)

    def time(self, jobs: Sequence[Job]) -> None:
        self.tasks = {
            number: TimingTask(job.case, tuple(k.name for k in job.kernels), self.regime)
            for number, job in enumerate(jobs)
        }
        self._work("times")

    def measure(self, cells: Sequence[Cell]) -> None:
        self.tasks = {}
        for number, cell in enumerate(cells):
            task = AccuracyTask(cell.kernel.name, cell.problem, cell.distribution, cell.seed)
            self.stand_ins[task] = tuple(kernel.name for kernel in cell.stand_ins)
            self.tasks[number] = task
        self._work("errors")

    def _work(self, phase: str) -> None:
        if self.report.out_of_time or not self.tasks:
            return
        self.progress.begin(phase, len(self.tasks))
        for name in [name for name, count in self.struck.items() if count >= self.strikes]:
            self._give_up(name)
        self.report.out_of_time = not run_tasks(
            self.tasks, self._done, self._died, watchdog_s=self.watchdog_s, deadline=self.deadline
        )

    def _done(self, number: int, task: Task, done: Done) -> None:
        if isinstance(task, TimingTask):
            for name, record in zip(task.kernels, done.records, strict=True):
                assert isinstance(record, TimingRecord)
                self._write_timing(name, task, record)
            self.report.problems += 1
            self.report.job_s.append((task.case.problem, len(task.kernels), done.seconds))
            self.progress.step(str(task.case.problem))
        else:
            (record,) = done.records
            assert isinstance(record, AccuracyRecord)
            self._write_accuracy(task, record)
            if record.status != "ok":
                self._replace(number, task)
            self.progress.step(f"{task.distribution} {task.problem}")

    def _died(self, number: int, task: Task, death: Death) -> Task | None:
        self.report.deaths += 1
        if isinstance(task, TimingTask):
            return self._died_timing(task, death)
        failed = AccuracyRecord(
            status=death.status if death.kernel else "error",
            reason=death.reason,
            seed=task.seed,
            rows=0,
        )
        self._write_accuracy(task, failed)
        if death.kernel is None:
            return None
        self._strike(death.kernel)
        # Its other cells at this problem would end the same way, in this sweep and the next.
        same = [n for n, t in self.tasks.items()
                if isinstance(t, AccuracyTask)
                and (t.kernel, t.problem) == (task.kernel, task.problem)]  # fmt: skip
        for other in same:
            doomed = self.tasks.pop(other)
            assert isinstance(doomed, AccuracyTask)
            reason = f"not launched: on {task.distribution} seed {task.seed} {death.reason}"[:500]
            self._write_accuracy(doomed, replace(failed, reason=reason, seed=doomed.seed))
            self._replace(other, doomed)
        self._replace(number, task)
        return None

    def _died_timing(self, task: TimingTask, death: Death) -> Task | None:
        if death.kernel is None:  # nobody's fault: the next sweep tries again
            for name in task.kernels:
                self._write_timing(name, task, TimingRecord(status="error", reason=death.reason))
            return None
        record = TimingRecord(status=death.status, reason=death.reason)
        self._write_timing(death.kernel, task, record)
        self._strike(death.kernel)
        left = tuple(
            name
            for name in task.kernels
            if name != death.kernel and self.struck[name] < self.strikes
        )
        return replace(task, kernels=left) if left else None

    def _replace(self, number: int, task: AccuracyTask) -> None:
        """Let the next kernel of the numerics class bring the error."""
        others = [n for n in self.stand_ins.get(task, ()) if self.struck[n] < self.strikes]
        if others:
            stand_in = replace(task, kernel=others[0])
            self.stand_ins[stand_in] = tuple(others[1:])
            self.tasks[number] = stand_in

    def _strike(self, name: str) -> None:
        self.struck[name] += 1
        if self.struck[name] == self.strikes:
            self.report.given_up.append(f"{name}: crashed or hung {self.strikes} times")
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Launch a kernel no more."""
        for number, task in list(self.tasks.items()):
            if isinstance(task, AccuracyTask):
                if task.kernel == name:
                    del self.tasks[number]
                    self._replace(number, task)
            elif name in task.kernels:
                left = tuple(other for other in task.kernels if other != name)
                if left:
                    self.tasks[number] = replace(task, kernels=left)
                else:
                    del self.tasks[number]

    def _write_timing(self, name: str, task: TimingTask, record: TimingRecord) -> None:
        problem = task.case.problem
        self.run.add_timing(
            KERNELS[name], problem, distribution_row(task.case.distribution),
            self.device, self.environment, self.regime, record,
        )  # fmt: skip
        self.races.add(problem, name, record)
        self.report.timed += 1
        if record.status != "ok":
            self.report.failures.append(f"{name}: {problem}: {record.status}: {record.reason}")

    def _write_accuracy(self, task: AccuracyTask, record: AccuracyRecord) -> None:
        self.run.add_accuracy(
            KERNELS[task.kernel], task.problem, distribution_row(task.distribution),
            self.device.architecture, self.environment, record,
        )  # fmt: skip
        self.report.measured += 1
        if record.status != "ok":
            self.report.failures.append(
                f"{task.kernel}: {task.problem} on {task.distribution} seed {task.seed}: "
                f"{record.status}: {record.reason}"
            )
