"""Sweep: time all candidates of all problems, then measure their errors, and write a run file.

Measurements that the database has for the same kernel digest, problem, device and environment are
not repeated, so that an interrupted sweep continues where it stopped. Kernels run in a worker
process (`lokakern.sweep.worker`): a crash or a hang becomes a row. Several ranks may share a sweep
(`lokakern.sweep.ranks`).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.build.prebuild import prebuild
from lokakern.device import current_device, current_environment
from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.measure import timing
from lokakern.measure.accuracy import launched_for_errors, numerics_class
from lokakern.measure.time_problem import torch_device
from lokakern.progress import Progress
from lokakern.registry.schema.records import TimingRecord
from lokakern.selection.dispatcher import default_regime
from lokakern.selection.ties import is_unsteady
from lokakern.sweep import cost
from lokakern.sweep.conditions import FirstTasks, OtherLoad, estimate_words
from lokakern.sweep.plan import Found, Plan, digest_of, harness_digest, kernels_digest
from lokakern.sweep.plan import candidates as candidates
from lokakern.sweep.ranks import Share, SingleRank
from lokakern.sweep.resume import Job, Known, needed_errors
from lokakern.sweep.stale_jobs import Staleness
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
    start_server,
)
from lokakern.types import REALISTIC_DISTRIBUTIONS, Device, Environment, Problem
from lokakern.workloads.suites import Case

if TYPE_CHECKING:
    from lokakern.registry.snapshot.loading import SweepDatabase
    from lokakern.registry.storage.run_files import RunFile

ERRORS = ("all", "needed", "none")
# A kernel that crashed or hung so often is no longer launched: each failure costs a new worker, and
# a hang also the watchdog's time.
STRIKES = 3
# Least number of problems for a parallel compilation, whose processes take 4 s to start.
FEWEST_PREBUILT = 16


@dataclass
class SweepReport:
    """Counts, failures and durations of a sweep.

    ``job_s`` holds the seconds of each problem, with its number of candidates; ``stale`` the
    indices of cases with stale times, if only stale measurements were asked for.
    """

    timed: int = 0
    unsteady: int = 0
    measured: int = 0
    skipped: int = 0
    problems: int = 0
    deaths: int = 0
    failures: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    out_of_time: bool = False
    estimated_s: float = 0.0
    seconds: float = 0.0
    stale: list[int] = field(default_factory=list)
    job_s: list[tuple[Problem, int, float]] = field(default_factory=list)

    def counts(self) -> dict[str, Any]:
        """Fields to send to other ranks."""
        return {name: value for name, value in vars(self).items() if name != "job_s"}

    @classmethod
    def of_all(cls, counts: Sequence[dict[str, Any]]) -> SweepReport:
        """The report of all ranks; only that of the first counts measurements of the database."""
        every = cls(**counts[0])
        for other in counts[1:]:
            for name in ("timed", "unsteady", "measured", "problems", "deaths", "failures"):
                setattr(every, name, getattr(every, name) + other[name])
            every.given_up += [words for words in other["given_up"] if words not in every.given_up]
            every.out_of_time |= other["out_of_time"]
            every.seconds = max(every.seconds, other["seconds"])
        return every


def sweep(
    cases: Sequence[Case],
    *,
    database: str | Path | SweepDatabase,
    suite: str,
    command: str,
    regime: str | None = None,
    grade: str = "full",
    time_limit_s: float | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
    retry: bool = False,
    only_stale: bool = False,
    distributions: Sequence[str] = REALISTIC_DISTRIBUTIONS,
    errors: str = "all",
    watchdog_s: float | None = None,
    strikes: int = STRIKES,
    progress: Progress | None = None,
    ranks: SingleRank | None = None,
) -> SweepReport:
    """Measure cases on the device here and merge the rows into a database.

    Args:
        cases: Problems with their input distributions.
        database: File or URL for the rows; created if missing. A `SweepDatabase` hands on what
            was read of it.
        suite: Name of the run.
        command: Command that repeats the run.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        grade: "full" or "quick".
        time_limit_s: Start no new work after so many seconds; finished work is kept.
        only: Words of kernel names; empty for all kernels.
        fresh: Repeat measurements that the database has.
        retry: Repeat measurements that crashed or hung.
        only_stale: Measure only where a kernel or the toolchain changed since the last measurement
            in this database and the shipped ones.
        distributions: Distributions to measure errors on.
        errors: "all", "none", or "needed": only of numerics classes with a kernel that is, at some
            problem, no slower than the unquantized one (for ops without one: at most 1.5 times
            slower than the fastest). Other kernels are never chosen.
        watchdog_s: Longest time without progress of a launched kernel, in seconds; None means 60 on
            GPUs and 600 on CPUs.
        strikes: Crashes and hangs after which a kernel is no longer launched.
        progress: Receives the progress.
        ranks: The ranks that share the sweep, with the same arguments; None for a single rank.

    Returns:
        The report of this rank.

    Raises:
        DatabaseError: The database cannot be read or written.
        MeasurementError: The regime is not possible here, workers do not start, or ranks have
            different devices, software or cases.
        UnknownNameError: ``errors`` is unknown.
    """
    from lokakern.registry.snapshot.loading import SweepDatabase
    from lokakern.registry.storage.run_files import RunFile

    if errors not in ERRORS:
        raise UnknownNameError(f"errors is {errors!r}; expected one of {', '.join(ERRORS)}")
    begun, load = time.monotonic(), OtherLoad()
    deadline = None if time_limit_s is None else begun + time_limit_s
    device, environment = current_device(), current_environment()
    regime = regime or default_regime(device)
    timing.check_regime(regime, torch_device())
    if watchdog_s is None:
        watchdog_s = GPU_WATCHDOG_S if device.is_gpu else CPU_WATCHDOG_S
    progress, ranks = progress or Progress(), ranks or SingleRank()
    read = database if isinstance(database, SweepDatabase) else SweepDatabase(database)
    report = SweepReport()
    if device.is_gpu:  # on a CPU planning is short
        start_server()
    ranks.agree({
        "device": repr(device), "environment": repr(environment), "kernels": kernels_digest(),
        "cases": digest_of(map(str, cases)), "regime": regime,
        "arguments": str((tuple(only), errors, grade, fresh, retry, only_stale, strikes,
                          tuple(distributions))),
    })  # fmt: skip
    plan = Plan(cases, only, device, distributions if errors != "none" else ())

    @functools.cache
    def known() -> Known:
        return Known(None if fresh else read.own, device, environment, regime, grade, retry)

    def look() -> dict[str, Any]:
        for why in read.collect_runs().skipped.values():
            progress.note(f"not merged: {why}")
        staleness = Staleness(read.dispatched, device, regime) if only_stale else None
        return asdict(plan.look(known(), {} if retry else known().given_up(strikes), staleness))

    def look_at_times() -> dict[str, Any]:
        """The cells whose errors are needed, given all times."""
        times: dict[Problem, dict[str, float]] = defaultdict(dict)
        for place, name, latency_us in itertools.chain(*(ranks.results("times") if todo else ())):
            times[todo[place].case.problem][name] = latency_us
        timed = set(found.todo)
        for place, job in enumerate(plan.jobs):
            if place not in timed and (before := known().times(job)):
                times[job.case.problem].update(before)
        needed = needed_errors(times, device)
        places = {
            place
            for place, cell in enumerate(plan.cells)
            if numerics_class(cell.kernel, cell.problem, device) in needed
        }
        return {"cells": [cell for cell in left if cell[0] in places], "needed": len(places)}

    found = Found(**ranks.plan("times", look))
    plan.use(found.given_up)
    if plan.digest() != found.plan:  # its indices would have another meaning here
        raise MeasurementError(
            f"rank {ranks.rank} finds other kernels for these problems than the rank that plans; "
            "use the same plugins, libraries and GPUs on all hosts"
        )
    report.given_up = found.why
    todo, left = [plan.jobs[place] for place in found.todo], found.cells
    report.skipped = sum(len(job.kernels) for job in plan.jobs)
    report.skipped -= sum(len(job.kernels) for job in todo)
    if only_stale:
        places = {case: place for place, case in enumerate(cases)}
        report.stale = [places[job.case] for job in todo]

    def choose_errors() -> list[Any]:
        cells, count = left, len(plan.cells)
        if errors == "needed":
            chosen = ranks.plan("errors", look_at_times)
            cells, count = chosen["cells"], chosen["needed"]
        report.skipped += count - len(cells)
        return cells

    if not todo:
        left = choose_errors()
        if not left:
            return report
    if only_stale:
        progress.note(f"stale: {len(todo)} of {len(plan.jobs)} problems, and {len(left)} of "
                      f"{len(plan.cells)} errors")  # fmt: skip
    problems = (task.problem for task in plan.tasks(left))
    report.estimated_s = cost.estimate_s(todo, problems, device, errors) / ranks.world
    count = sum(len(job.kernels) for job in todo)
    progress.note(
        f"{count} times at {len(todo)} problems and "
        f"{'at most ' if errors == 'needed' and todo else ''}{len(left)} errors: "
        f"{estimate_words(report.estimated_s, has_errors=bool(left))}"
        + (f" on {ranks.world} ranks" if ranks.world > 1 else "")
    )
    if ranks.world == 1 and (words := load.words()):  # ranks are others to each other
        progress.note(words)
    if device.is_gpu and len(todo) >= FEWEST_PREBUILT:
        launched = [job.case.problem for job in todo]
        if plan.cells:
            launched += [launched_for_errors(problem, device) for problem in launched]
        ranks.once(
            "prebuild", lambda: prebuild(launched, device, only, progress=progress, again=False)
        )
    run = RunFile.create(
        read.source, suite=suite, command=command, harness_digest=harness_digest(), grade=grade
    )
    with run:
        session = _Session(
            run, device, environment, regime, report, progress, ranks, watchdog_s, deadline, strikes
        )
        if todo:
            session.time(todo)
            left = choose_errors()
        session.measure(plan.tasks(left))
    read.forget()
    report.seconds = time.monotonic() - begun
    return report


def _is_unsteady(record: Record) -> bool:
    if not isinstance(record, TimingRecord) or record.status != "ok":
        return False
    p20, p80 = record.latency_us_p20, record.latency_us_p80
    return p20 is not None and p80 is not None and is_unsteady(p20, p80)


@dataclass
class _Session:
    """Gives tasks to workers, writes their results, and replaces workers that die."""

    run: RunFile
    device: Device
    environment: Environment
    regime: str
    report: SweepReport
    progress: Progress
    ranks: SingleRank
    watchdog_s: float
    deadline: float | None
    strikes: int
    phase: str = ""
    tasks: dict[int, Task] = field(default_factory=dict)
    results: list[tuple[int, str, float]] = field(default_factory=list)  # times with status ok
    struck: Counter[str] = field(default_factory=Counter)
    first: FirstTasks | None = None  # of the times

    def time(self, jobs: Sequence[Job]) -> None:
        tasks = [
            TimingTask(job.case, tuple(kernel.name for kernel in job.kernels), self.regime)
            for job in jobs
        ]
        costs = cost.time_costs(jobs, self.device)
        self.first = FirstTasks(costs, self.ranks.world, self.progress.note)
        self._work("times", costs, tasks)
        self.report.unsteady = self.first.unsteady

    def measure(self, tasks: Sequence[AccuracyTask]) -> None:
        self._work("errors", [cost.error_s(task.problem, self.device) for task in tasks], tasks)

    def _work(self, phase: str, costs: Sequence[float], tasks: Sequence[Task]) -> None:
        """Do the shares of this rank in a phase."""
        if self.report.out_of_time or not costs:
            return
        self.phase = phase
        self.progress.begin(phase, len(costs))
        shares = self.ranks.shares(phase, costs, self.progress.reach)
        share: Share | None = None

        def more() -> bool:
            """Finish the last share and take the next one."""
            nonlocal share
            if share is not None:
                share.done(self.results)
            share = next(shares, None)
            if share is None:
                return False
            self.results = []
            self.tasks |= {place: tasks[place] for place in share.places}
            self._drop_given_up()
            return bool(self.tasks) or more()

        self.tasks = {}
        self.report.out_of_time = not run_tasks(
            self.tasks, self._done, self._died,
            watchdog_s=self.watchdog_s, deadline=self.deadline, more=more,
        )  # fmt: skip
        while share is not None:  # time ran out: other ranks must not wait for the rest
            share.done(self.results)
            share, self.results = next(shares, None), []

    def _done(self, number: int, task: Task, done: Done) -> None:
        for name, record in zip(task.kernels, done.records, strict=True):
            self._write(name, task, record)
            if isinstance(record, TimingRecord):
                if record.status == "ok" and record.latency_us_p50 is not None:
                    self.results.append((number, name, record.latency_us_p50))
            elif record.status != "ok":  # another kernel of the numerics class may do better
                self._put(number, task.without(self._given_up() | {name}))
        if isinstance(task, TimingTask):
            self.report.problems += 1
            self.report.job_s.append((task.case.problem, len(task.kernels), done.seconds))
            if self.first is not None:
                self.first.done(number, done.seconds, [*map(_is_unsteady, done.records)])
        self.progress.reach(self.ranks.step(self.phase), str(task))

    def _died(self, _number: int, task: Task, death: Death) -> Task | None:
        self.report.deaths += 1
        if death.kernel is None:  # no kernel ran: the next sweep tries again
            for name in task.kernels:
                self._write(name, task, task.failed("error", death.reason))
            return None
        self._write(death.kernel, task, task.failed(death.status, death.reason))
        self._strike(death.kernel)
        without = self._given_up() | {death.kernel}
        if isinstance(task, AccuracyTask):
            # Its other errors at this problem would fail in the same way, now and in later sweeps.
            reason = f"not launched: on {task.distribution} seed {task.seed} {death.reason}"[:500]
            for number, other in list(self.tasks.items()):
                if isinstance(other, AccuracyTask) and (
                    (other.kernel, other.problem) == (task.kernel, task.problem)
                ):
                    self._write(other.kernel, other, other.failed(death.status, reason))
                    self._put(number, other.without(without))
        return task.without(without)

    def _strike(self, name: str) -> None:
        self.struck[name] += 1
        if self.struck[name] == self.strikes:
            self.report.given_up.append(f"{name}: crashed or hung {self.strikes} times")
            self._drop_given_up()

    def _given_up(self) -> set[str]:
        return {name for name, count in self.struck.items() if count >= self.strikes}

    def _drop_given_up(self) -> None:
        """Remove kernels that are given up from the remaining tasks."""
        if given_up := self._given_up():
            for number, task in list(self.tasks.items()):
                self._put(number, task.without(given_up))

    def _put(self, number: int, task: Task | None) -> None:
        """Replace a remaining task; None removes it."""
        if task is None:
            self.tasks.pop(number, None)
        else:
            self.tasks[number] = task

    def _write(self, name: str, task: Task, record: Record) -> None:
        task.write(self.run, name, record, self.device, self.environment)
        if isinstance(task, TimingTask):
            self.report.timed += 1
        else:
            self.report.measured += 1
        if record.status != "ok":
            self.report.failures.append(f"{name}: {task}: {record.status}: {record.reason}")
