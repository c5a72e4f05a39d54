"""Sweep: time every candidate of every problem, then measure every error, row by row into a run.

What is already in the database for the same kernel digest, problem, device and environment is not
measured again, so an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lokakern.bench import timing
from lokakern.bench.accuracy import Cell, cells_for, measure_cells
from lokakern.bench.distributions import distribution_named
from lokakern.bench.operands import Operands
from lokakern.bench.suites import Case
from lokakern.bench.timing import Contender
from lokakern.device import current_device, current_environment
from lokakern.registry.identity import (
    device_key,
    distribution_key,
    environment_key,
    problem_key,
)
from lokakern.registry.records import AccuracyRecord, DistributionRow, TimingRecord
from lokakern.registry.register import Kernel, kernels_for
from lokakern.selection import default_regime
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Environment,
    Problem,
    Rejected,
)

# Ceilings of an H200, for choosing how long a replay is; elsewhere they only have to be near.
FLOOR_BYTES_PER_US, FLOOR_FLOPS_PER_US, FLOOR_LAUNCH_US = 4.3e6, 1.979e9, 1.5


@dataclass(frozen=True)
class Job:
    """One problem to be timed."""

    case: Case
    kernels: tuple[Kernel, ...]


@dataclass
class Progress:
    """What a sweep tells about itself; replace the methods to show it."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of so many steps begins."""

    def step(self, text: str) -> None:
        """One step is done; the text says what comes next or came last."""


@dataclass
class SweepReport:
    """What a sweep did."""

    timed: int = 0
    measured: int = 0
    skipped: int = 0
    problems: int = 0
    failures: list[str] = field(default_factory=list)
    out_of_time: bool = False
    seconds: float = 0.0


@functools.cache
def distribution_row(name: str) -> DistributionRow:
    """The database's row of a distribution."""
    recipe = distribution_named(name)
    return DistributionRow.of(recipe.name, dict(recipe.parameters), realistic=recipe.realistic)


def harness_digest() -> str:
    """Digest of the measuring code: rows of different harnesses can be told apart."""
    folder = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def torch_device() -> torch.device:
    """The device that `current_device` describes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if current_device().is_gpu
        else (torch.device("cpu"))
    )


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
    distributions: Sequence[str] = REALISTIC_DISTRIBUTIONS,
    with_accuracy: bool = True,
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
        distributions: Whose errors are measured.
        with_accuracy: Whether errors are measured at all.
        progress: Where to tell.

    Raises:
        DatabaseError: The database cannot be read or written.
        MeasurementError: The regime is not possible here.
    """
    from lokakern.registry.store import RunFile, collect_runs

    begun = time.monotonic()
    deadline = None if time_limit_s is None else begun + time_limit_s
    device, environment = current_device(), current_environment()
    regime = regime or default_regime(device)
    timing.check_regime(regime, torch_device())
    progress = progress or Progress()
    report = SweepReport()
    collect_runs(database)
    known = _Known(database, device, environment, regime, grade, fresh)
    jobs = [
        Job(case, found)
        for case in cases
        if (found := tuple(candidates(case.problem, device, only)))
    ]
    todo = [job for job in jobs if not known.has_timings(job)]
    report.skipped = sum(len(job.kernels) for job in jobs) - sum(len(j.kernels) for j in todo)
    problems = list(dict.fromkeys(case.problem for case in cases))
    kernels = [k for op in dict.fromkeys(p.op for p in problems)
               for k in kernels_for(op, device)
               if not only or any(word in k.name for word in only)]  # fmt: skip
    cells = cells_for(kernels, problems, device, distributions) if with_accuracy else []
    wanted = [cell for cell in cells if not known.has_accuracy(cell)]
    report.skipped += len(cells) - len(wanted)
    if not todo and not wanted:
        return report
    run = RunFile.create(
        database, suite=suite, command=command, harness_digest=harness_digest(), grade=grade
    )
    with run:
        timing.warm(torch_device())
        progress.begin("times", len(todo))
        for job in todo:
            if deadline is not None and time.monotonic() > deadline:
                report.out_of_time = True
                break
            for kernel, record in time_case(job, device, regime):
                run.add_timing(kernel, job.case.problem, distribution_row(job.case.distribution),
                               device, environment, regime, record)  # fmt: skip
                report.timed += 1
                if record.status != "ok":
                    report.failures.append(f"{kernel.name}: {job.case.problem}: {record.reason}")
            report.problems += 1
            progress.step(str(job.case.problem))
        progress.begin("errors", len(wanted))

        def write(cell: Cell, record: AccuracyRecord) -> None:
            run.add_accuracy(cell.kernel, cell.problem, distribution_row(cell.distribution),
                             device.architecture, environment, record)  # fmt: skip
            report.measured += 1
            if record.status != "ok":
                report.failures.append(
                    f"{cell.kernel.name}: {cell.problem} on {cell.distribution} "
                    f"seed {cell.seed}: {record.reason}"
                )
            progress.step(f"{cell.distribution} {cell.problem}")

        report.out_of_time |= _measure_in_time(wanted, device, write, deadline)
    report.seconds = time.monotonic() - begun
    return report


def _measure_in_time(
    cells: Sequence[Cell],
    device: Device,
    write: Callable[[Cell, AccuracyRecord], None],
    deadline: float | None,
) -> bool:
    """Measure cells; returns whether the time ran out."""

    class OutOfTime(Exception):
        pass

    def until(cell: Cell, record: AccuracyRecord) -> None:
        write(cell, record)
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTime

    if not cells:
        return False
    try:
        measure_cells(cells, torch_device(), device, until)
    except OutOfTime:
        return True
    return False


def floor_us(problem: Problem) -> float:
    """Least time of a problem on an H200, in microseconds: bytes, FLOPs, and one launch."""
    moved = problem.bytes_moved / FLOOR_BYTES_PER_US
    return max(moved, problem.flops / FLOOR_FLOPS_PER_US) + FLOOR_LAUNCH_US


def contender_of(operands: Operands, kernel: Kernel, name: str | None = None) -> Contender:
    """A kernel on operand sets, each with its own workspace, ready to be timed."""
    calls: list[Callable[[], None]] = []
    for given in operands.sets:
        workspace = operands.workspace_of(kernel, given)

        def call(given: tuple[Any, ...] = given, workspace: Any = workspace) -> None:
            kernel.launch(*given, workspace)

        calls.append(call)
    return Contender(name or kernel.name, calls)


def time_case(
    job: Job, device: Device, regime: str, *, seed: int = 0
) -> Iterable[tuple[Kernel, TimingRecord]]:
    """Time a problem's kernels against each other, then check what each writes."""
    where = torch_device()
    problem = job.case.problem
    cold = regime != "graph-hot"
    try:
        operands = Operands(problem, job.case.distribution, where, device, cold=cold, seed=seed)
    except Exception as error:  # memory above all; another problem may fit
        return [(kernel, _failed(error)) for kernel in job.kernels]
    pairs: list[tuple[Kernel, Contender]] = []
    for kernel in job.kernels:
        try:
            pairs.append((kernel, contender_of(operands, kernel)))
        except Exception as error:  # allocating a workspace may fail like any launch
            broken = Contender(kernel.name, ())
            broken.fail("error", error)
            pairs.append((kernel, broken))
    timing.time_contenders(
        [c for _, c in pairs if c.status == "ok"],
        regime=regime, device=where, floor_us=floor_us(problem), seed=seed,
    )  # fmt: skip
    records = [(kernel, _record(kernel, contender, operands, regime, where))
               for kernel, contender in pairs]  # fmt: skip
    timing.release([contender for _, contender in pairs])
    return records


def _record(
    kernel: Kernel, contender: Contender, operands: Operands, regime: str, where: torch.device
) -> TimingRecord:
    """Replay what was timed on poisoned outputs, check them, and put the row together."""
    if contender.status != "ok":
        return TimingRecord(status=contender.status, reason=contender.reason)
    try:
        operands.poison()
        contender.run_all()
        error, wrong = operands.check(kernel)
    except Exception as failure:  # any library may raise anything; the sweep goes on
        return _failed(failure)
    found = timing.quantiles(contender)
    return TimingRecord(
        status="wrong" if wrong else "ok",
        reason=wrong,
        latency_us_p20=found.p20,
        latency_us_p50=found.p50,
        latency_us_p80=found.p80,
        replay_count=found.replay_count,
        void_count=found.void_count,
        calls_per_replay=contender.calls_per_replay,
        clock_mhz=found.clock_mhz,
        kernel_err=error.maximum,
        kernel_err_row_p99=error.row_p99,
        timer=timing.timer_name(regime, where),
        operand_digest=operands.digest,
    )


def _failed(error: Exception) -> TimingRecord:
    status = "error"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()
        status = "out_of_memory"
    reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:500]
    return TimingRecord(status=status, reason=reason)


class _Known:
    """What the database already holds for the device and environment here."""

    def __init__(
        self,
        database: str | Path,
        device: Device,
        environment: Environment,
        regime: str,
        grade: str,
        fresh: bool,
    ) -> None:
        from lokakern.registry.reader import is_there
        from lokakern.registry.snapshot import load_snapshot

        self._snapshot = None
        if not fresh and is_there(database):
            self._snapshot = load_snapshot([database])
        self._device, self._environment = device_key(device), environment_key(environment)
        self._architecture, self._regime, self._grade = device.architecture, regime, grade

    def has_timings(self, job: Job) -> bool:
        """Whether all candidates of a problem are there: they are timed together or not at all."""
        facts = self._snapshot
        if facts is None:
            return False
        problem = problem_key(job.case.problem)
        distribution = distribution_key(distribution_row(job.case.distribution))
        return all(
            facts.has_timing(
                kernel.digest, problem, distribution, self._device, self._environment,
                self._regime, self._grade,
            )
            for kernel in job.kernels
        )  # fmt: skip

    def has_accuracy(self, cell: Cell) -> bool:
        facts = self._snapshot
        if facts is None:
            return False
        return facts.has_accuracy(
            cell.kernel.digest, problem_key(cell.problem),
            distribution_key(distribution_row(cell.distribution)), self._architecture,
            self._environment, cell.seed, self._grade,
        )  # fmt: skip
