"""Processes that compile: `build` hands them jobs, and survives their deaths."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Protocol

from lokakern.jit import Job
from lokakern.progress import Progress
from lokakern.types import Device

_REASON = 500  # characters of a failure's reason
LONGEST_S = 300.0  # of one job, where the slowest kernel seen compiled for 10: it hangs


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that was not built, and why."""

    job: str
    reason: str


@dataclass
class BuildReport:
    """What a build did.

    Attributes:
        compiled: Jobs compiled now.
        already_there: Jobs that a cache on disk held.
        failures: The others; they do not stop a build.
        seconds: Wall time, with the start of the processes.
    """

    compiled: int = 0
    already_there: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.compiled} compiled, {self.already_there} already there"
        if self.failures:
            text += f", {len(self.failures)} failed"
        return f"{text}, in {self.seconds:.1f} s"


def build(
    jobs: Iterable[Job],
    device: Device,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compile jobs in processes of their own; one that fails or kills its process is reported.

    The processes are plain children of this one, which import lokakern and not the caller's
    script; an exception here, such as KeyboardInterrupt, ends them.

    Args:
        jobs: From `lokakern.build.prebuild.jobs_for`, or others that pickle.
        device: The GPU type they are compiled for; it need not be here.
        workers: Processes; None means one for each CPU core this process may use.
        progress: Where to tell.

    Raises:
        ValueError: Fewer than one worker.
    """
    check_workers(workers)
    begun = time.monotonic()
    unique = list({job.key: job for job in jobs}.values())
    if progress is not None:
        progress.begin("kernels", len(unique))
    report = BuildReport()
    if unique:
        _Build(unique, device, report, progress).run(workers or _cores())
    report.seconds = time.monotonic() - begun
    return report


def check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1, or None")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """A process that compiles one job after the other."""

    def __init__(self, device: Device) -> None:
        self.job = ""  # its text, while it is being compiled
        self.ready = False
        self.begun = time.monotonic()
        self.overdue = False
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self.connection, theirs = Pipe()
        # -c: multiprocessing would run the caller's script again. -P: the folder we happen to be
        # in must hide no module; the rest of our search path is theirs.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c",
             f"from lokakern.build.pool import _work; _work({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )  # fmt: skip
        theirs.close()
        with contextlib.suppress(OSError):  # dead already: its answer will be missed
            self.connection.send_bytes(pickle.dumps(device))

    def why_dead(self) -> str:
        """In words, with what it printed last."""
        status = self.wait()
        if self.overdue:
            return f"not done after {LONGEST_S:g} s"
        how = f"exit status {status}"
        if status < 0:
            try:
                how = signal.Signals(-status).name
            except ValueError:
                how = f"signal {-status}"
        self.log.seek(0)
        printed = self.log.read().decode(errors="replace").strip()
        return f"its process ended with {how}" + (f": {printed[-_REASON:]}" if printed else "")

    def end(self) -> None:
        """Let an idle process go, and stop one at work."""
        self.connection.close()
        if self.job or not self.ready:
            self.process.terminate()
        self.wait()
        self.log.close()

    def wait(self) -> int:
        """Exit status, of a process that has closed its end or was told to end."""
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class _Build:
    """Hands jobs to workers as these come free."""

    def __init__(
        self, jobs: list[Job], device: Device, report: BuildReport, progress: Progress | None
    ) -> None:
        self.pending = deque(jobs)
        self.device = device
        self.report = report
        self.progress = progress
        self.workers: dict[Connection, _Worker] = {}

    def run(self, workers: int) -> None:
        try:
            for _ in range(min(workers, len(self.pending))):
                self.start()
            while self.workers:
                for connection in wait(list(self.workers), timeout=1.0):
                    assert isinstance(connection, Connection)  # we wait for nothing else
                    self.hear(self.workers[connection])
                for worker in list(self.workers.values()):
                    if time.monotonic() - worker.begun > LONGEST_S:
                        worker.overdue = True
                        worker.process.kill()
                        self.bury(worker)
        finally:
            for worker in self.workers.values():
                worker.end()

    def start(self) -> None:
        worker = _Worker(self.device)
        self.workers[worker.connection] = worker

    def hear(self, worker: _Worker) -> None:
        """Take a worker's answer, or its death, and give it the next job."""
        try:
            word, reason = worker.connection.recv()
        except (EOFError, OSError):
            self.bury(worker)
            return
        if worker.ready:
            self.tally(worker.job, word, reason)
        worker.ready, worker.job, worker.begun = True, "", time.monotonic()
        while self.pending:
            job = self.pending.popleft()
            try:
                payload = pickle.dumps(job)
            except Exception as error:  # pickling may raise anything
                self.tally(str(job), "failed", f"{type(error).__name__}: {error}"[:_REASON])
                continue
            worker.job = str(job)
            try:
                worker.connection.send_bytes(payload)
            except OSError:  # it died since
                self.bury(worker)
            return
        self.workers.pop(worker.connection).end()

    def bury(self, worker: _Worker) -> None:
        """Blame the job for a dead worker and start another; blame all jobs if none can start."""
        reason = worker.why_dead()
        if worker.ready:
            self.tally(worker.job, "failed", reason)
        worker.job = ""
        self.workers.pop(worker.connection).end()
        if worker.ready and self.pending:
            self.start()
        elif not worker.ready and not self.workers:
            while self.pending:
                self.tally(str(self.pending.popleft()), "failed", f"no worker starts: {reason}")

    def tally(self, job: str, word: str, reason: str) -> None:
        if word == "compiled":
            self.report.compiled += 1
        elif word == "there":
            self.report.already_there += 1
        else:
            self.report.failures.append(Failure(job, reason))
        if self.progress is not None:
            self.progress.step(job)


def _work(descriptor: int) -> None:
    """The life of a worker: jobs in, one word about each out, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, and reports
    connection = Connection(descriptor)
    try:
        device = pickle.loads(connection.recv_bytes())
        connection.send(("ready", ""))
        while True:
            payload = connection.recv_bytes()
            try:
                there = pickle.loads(payload).compile(device)
                answer = ("there" if there else "compiled", "")
            except Exception as error:  # whatever a compiler raises is a row of the report
                answer = ("failed", f"{type(error).__name__}: {error}"[:_REASON])
            connection.send(answer)
    except (EOFError, BrokenPipeError):  # the parent is done with us, or dead
        return
