"""A pool of compiler processes that survives crashes and hangs; see docs/decisions/020."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait

from lokakern.jit import Job
from lokakern.progress import Progress
from lokakern.torchrun import cores
from lokakern.types import Device

_REASON = 500  # characters of a failure's reason
LONGEST_S = 300.0  # for one job; the slowest known kernel compiles in 10


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that was not built, and why."""

    job: str
    reason: str


@dataclass
class BuildReport:
    """The result of a build.

    Attributes:
        compiled: Number of jobs compiled now.
        already_there: Number of jobs found in a cache on disk.
        failures: The other jobs; a failure does not stop a build.
        resources: What compiled kernels take, by job, of those that tell it.
        seconds: Wall time, including the start of the processes.
    """

    compiled: int = 0
    already_there: int = 0
    failures: list[Failure] = field(default_factory=list)
    resources: dict[str, str] = field(default_factory=dict)
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
    """Compile jobs in separate processes; one that fails or kills its process is reported.

    The processes import lokakern and not the caller's script. An exception here, such as
    KeyboardInterrupt, ends them.

    Args:
        jobs: From `lokakern.build.prebuild.jobs_for`, or others that can be pickled.
        device: The GPU type to compile for; it need not be present.
        workers: Number of processes; None means one for each CPU core of this process.
        progress: Receives the progress.

    Raises:
        ValueError: Fewer than one worker.
    """
    check_workers(workers)
    begun = time.monotonic()
    unique = list({job.key: job for job in jobs}.values())
    progress = progress or Progress()
    progress.begin("kernels", len(unique))
    report = BuildReport()
    if unique:
        _Build(unique, device, report, progress).run(min(workers or cores(), len(unique)))
    report.seconds = time.monotonic() - begun
    return report


def check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1, or None")


class _Worker:
    """A process that compiles one job after another."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self.connection, theirs = Pipe()
        # -c: multiprocessing would run the caller's script again. -P: the current folder must hide
        # no module; the process gets the rest of our search path.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c",
             f"from lokakern.build.pool import _work; _work({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )  # fmt: skip
        theirs.close()

    def ask(self, sent: object) -> tuple[str, str]:
        """The answer to a device or a job; ("dead", why) if the process ended or hangs."""
        try:
            payload = pickle.dumps(sent)
        except Exception as error:  # pickling may raise anything
            return "failed", reason_of(error)
        try:
            self.connection.send_bytes(payload)
            if not wait([self.connection], LONGEST_S):
                return "dead", f"not done after {LONGEST_S:g} s"
            word, reason = self.connection.recv()
            return word, reason
        except (EOFError, OSError):
            return "dead", self._why_dead()

    def _why_dead(self) -> str:
        """The exit status and the end of the output."""
        status = self._wait()
        how = f"exit status {status}"
        if status < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = names.get(-status, f"signal {-status}")
        self.log.seek(0)
        printed = self.log.read().decode(errors="replace").strip()
        return f"its process ended with {how}" + (f": {printed[-_REASON:]}" if printed else "")

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self._wait()
        self.log.close()

    def _wait(self) -> int:
        """The exit status of a process that was told to end or closed its connection."""
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class _Build:
    """Threads that each hand jobs to one worker and replace it when it dies."""

    def __init__(
        self, jobs: list[Job], device: Device, report: BuildReport, progress: Progress
    ) -> None:
        self.pending = deque(jobs)
        self.device = device
        self.report = report
        self.progress = progress
        self.workers: set[_Worker] = set()
        self.lock = threading.Lock()

    def run(self, count: int) -> None:
        with ThreadPoolExecutor(count) as threads:
            try:
                lanes = [threads.submit(self.compile_jobs) for _ in range(count)]
                reasons = [lane.result() for lane in lanes]
            except BaseException:
                self.pending.clear()
                for worker in list(self.workers):
                    worker.process.terminate()
                raise
        for job in self.pending:
            self.tally(job, "failed", f"no worker starts: {max(reasons)}")

    def compile_jobs(self) -> str:
        """Compile until no job is left; the reason if a worker does not start."""
        while self.pending:
            worker = _Worker()
            self.workers.add(worker)
            try:
                word, reason = worker.ask(self.device)
                if word == "dead":
                    return reason
                while word != "dead":
                    try:
                        job = self.pending.popleft()
                    except IndexError:
                        return ""
                    word, reason = worker.ask(job)
                    self.tally(job, word, reason)
            finally:
                self.workers.discard(worker)
                worker.end()
        return ""

    def tally(self, job: Job, word: str, reason: str) -> None:
        with self.lock:
            if word in ("compiled", "there") and reason:
                self.report.resources[str(job)] = reason
            if word == "compiled":
                self.report.compiled += 1
            elif word == "there":
                self.report.already_there += 1
            else:
                self.report.failures.append(Failure(str(job), reason))
            self.progress.step(str(job))


def reason_of(error: Exception) -> str:
    """The reason of a failure."""
    return f"{type(error).__name__}: {error}"[:_REASON]


def _work(descriptor: int) -> None:
    """Compile the jobs that arrive, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    connection = Connection(descriptor)
    try:
        device = pickle.loads(connection.recv_bytes())
        connection.send(("ready", ""))
        while True:
            payload = connection.recv_bytes()
            try:
                job = pickle.loads(payload)
                there = job.compile(device)
                answer = ("there" if there else "compiled", getattr(job, "resources", ""))
            except Exception as error:  # compilers may raise anything
                answer = ("failed", reason_of(error))
            connection.send(answer)
    except (EOFError, BrokenPipeError):  # the parent has closed the connection or died
        return
