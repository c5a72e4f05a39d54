"""The worker process that measures: a kernel may crash it, hang it or lose its device.

Workers are forked from a server with all modules imported, so that a new worker starts in
milliseconds, while importing torch takes seconds. Before each launch a worker names the kernel in
shared memory, the journal; it sends results through a pipe. If it dies or hangs, the journal names
the kernel, the results that were sent are kept, and a new worker continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import TYPE_CHECKING

from lokakern.device import current_device
from lokakern.errors import DeviceLostError, MeasurementError
from lokakern.measure.accuracy import Cell, measure_cells
from lokakern.measure.operand_cache import prefetch_and_wait
from lokakern.measure.time_problem import time_case, torch_device
from lokakern.measure.timing import warm
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, TimingRecord
from lokakern.sweep.parent import end_with
from lokakern.sweep.resume import distribution_row
from lokakern.types import Device, Environment, Problem
from lokakern.workloads.suites import Case

if TYPE_CHECKING:
    from lokakern.registry.storage.run_files import RunFile

# Longest time without progress: a first launch may compile for seconds, a CPU multiply for minutes.
GPU_WATCHDOG_S, CPU_WATCHDOG_S = 60.0, 600.0
PREPARING_FACTOR = 10.0  # while no kernel runs: sampling a few GiB takes minutes
POLL_S = 0.5
GRACE_S = 30.0  # the driver may take seconds to end a killed process
PREFETCHED = 64  # timing tasks whose operands are sampled together, on all cores
NONE = -1
# Pauses before the next worker after one that died at startup: a GPU needs seconds to release a
# killed process.
STILLBORN_PAUSES_S = (0.0, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class TimingTask:
    """A problem to be timed, with the names of its kernels."""

    case: Case
    kernels: tuple[str, ...]
    regime: str

    def __str__(self) -> str:
        return str(self.case.problem)

    def without(self, names: Collection[str]) -> TimingTask | None:
        """The task without some kernels; None if none is left."""
        left = tuple(name for name in self.kernels if name not in names)
        return replace(self, kernels=left) if left else None

    def failed(self, status: str, reason: str) -> TimingRecord:
        return TimingRecord(status=status, reason=reason)

    def write(
        self, run: RunFile, name: str, record: Record, device: Device, environment: Environment
    ) -> None:
        """Write the record of one kernel."""
        assert isinstance(record, TimingRecord)
        distribution = distribution_row(self.case.distribution)
        run.add_timing(
            KERNELS[name], self.case.problem, distribution, device, environment, self.regime, record
        )


@dataclass(frozen=True, slots=True)
class AccuracyTask:
    """An error to be measured, with the names of its kernel and of those that can replace it."""

    kernel: str
    problem: Problem
    distribution: str
    seed: int
    stand_ins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.problem} on {self.distribution} seed {self.seed}"

    @property
    def kernels(self) -> tuple[str, ...]:
        return (self.kernel,)

    def without(self, names: Collection[str]) -> AccuracyTask | None:
        """The task without some kernels; None if none is left."""
        left = [name for name in (self.kernel, *self.stand_ins) if name not in names]
        return replace(self, kernel=left[0], stand_ins=tuple(left[1:])) if left else None

    def failed(self, status: str, reason: str) -> AccuracyRecord:
        return AccuracyRecord(status=status, reason=reason, seed=self.seed, rows=0)

    def write(
        self, run: RunFile, name: str, record: Record, device: Device, environment: Environment
    ) -> None:
        """Write the record of the kernel."""
        assert isinstance(record, AccuracyRecord)
        distribution = distribution_row(self.distribution)
        run.add_accuracy(
            KERNELS[name], self.problem, distribution, device.architecture, environment, record
        )


Task = TimingTask | AccuracyTask
Record = TimingRecord | AccuracyRecord


@dataclass(frozen=True, slots=True)
class Done:
    """Results of a task: one record for each of its kernels, in order."""

    task: int
    records: tuple[Record, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker with unfinished tasks.

    ``task`` is None if no task ran; ``kernel`` is None if no kernel ran. ``status`` is that of the
    row: "crashed", "timeout" or "out_of_memory".
    """

    task: int | None
    kernel: str | None
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """A worker finished its tasks and waits for `Worker.give`."""


class _Page(ctypes.Structure):
    """The journal: the running task and kernel, and a heartbeat counter."""

    _fields_ = (
        ("beats", ctypes.c_int64),
        ("task", ctypes.c_int64),
        ("kernel", ctypes.c_int64),
        ("what", ctypes.c_char * 40),
    )
    beats: int
    task: int
    kernel: int
    what: bytes

    def announce(self, task: int, kernel: int | None, what: str) -> None:
        """Name the task and the index of the kernel that runs next, if any."""
        # Clear the kernel first: a reader in between must not blame another kernel.
        self.kernel = NONE
        self.task = task
        self.what = what.encode()[:40]
        self.kernel = NONE if kernel is None else kernel
        self.beat()

    def beat(self) -> None:
        self.beats += 1


class Worker:
    """A process that runs tasks; leaving the context manager kills it.

    Args:
        tasks: By number; all timings or all accuracies.
        watchdog_s: Longest time without progress while a kernel runs, in seconds.
        deadline: `time.monotonic` after which it starts no new task; None: no limit.
    """

    def __init__(
        self, tasks: Mapping[int, Task], *, watchdog_s: float, deadline: float | None = None
    ) -> None:
        context = _context()
        self._tasks = dict(tasks)
        self._watchdog_s = watchdog_s
        self._page: _Page = context.RawValue(_Page)
        self._page.task = self._page.kernel = NONE
        self._connection, theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=_serve,
            args=(theirs, self._page, self._tasks, _plugin_modules(), deadline),
            daemon=True,
        )
        with _main_module_hidden():
            self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._connection.close()

    def give(self, tasks: Mapping[int, Task] | None) -> None:
        """Give an idle worker more tasks; None ends it."""
        self._tasks = dict(tasks or {})
        with contextlib.suppress(OSError):  # it died while idle: `events` reports it
            self._connection.send(None if tasks is None else self._tasks)

    def events(self) -> Iterator[Done | Death | Idle]:
        """Events in order; ends after a death, and after `give(None)`."""
        beats, silence_s, last = -1, 0.0, time.monotonic()
        while True:
            ready = connection.wait([self._connection, self._process.sentinel], timeout=POLL_S)
            # Counted in polls, so that the time of a stopped sweep does not count.
            now = time.monotonic()
            silence_s, last = silence_s + min(now - last, 2 * POLL_S), now
            if self._connection in ready:
                event = self._receive()
                if event is not None:
                    yield event
                if event is None or isinstance(event, Death):
                    return
                silence_s = 0.0
            elif ready:  # dead, and all messages are read
                yield self._death(*_exit_words(self._process))
                return
            if self._page.beats != beats:
                beats, silence_s = self._page.beats, 0.0
            elif silence_s > self._patience_s():
                yield from self._silenced()
                return

    def _receive(self) -> Done | Idle | Death | None:
        """The next event; None after the last one."""
        try:
            message = self._connection.recv()
        except Exception:  # truncated by its death, or overwritten by a kernel
            self._process.join(POLL_S)
            if self._process.is_alive():
                return self._death("crashed", "the process sent what nobody can read")
            return self._death(*_exit_words(self._process))
        if isinstance(message, str):  # the reason why it lost its device
            return self._death("crashed", message)
        return message if isinstance(message, Done | Idle) else None

    def _silenced(self) -> Iterator[Done | Death]:
        """Kill the worker; messages that it sent before count."""
        patience_s = self._patience_s()
        death = self._death("timeout", f"no sign of life for {patience_s:g} s while {self._what()}")
        self._kill()
        with contextlib.suppress(Exception):  # truncated by its death
            while self._connection.poll():
                message = self._connection.recv()
                if isinstance(message, Done):
                    yield message
                    if message.task == death.task:  # it was slow, not hung
                        return
        yield death

    def _patience_s(self) -> float:
        idle = self._page.kernel == NONE
        return self._watchdog_s * (PREPARING_FACTOR if idle else 1.0)

    def _what(self) -> str:
        return self._page.what.decode(errors="replace")

    def _death(self, status: str, reason: str) -> Death:
        number = None if self._page.task == NONE else self._page.task
        kernel = None
        if number is not None and self._page.kernel != NONE:
            kernel = self._tasks[number].kernels[self._page.kernel]
        if status != "timeout" and number is not None:
            reason = f"{reason} while {self._what()}"
        return Death(number, kernel, status, reason[:500])

    def _kill(self) -> None:
        self._process.kill()
        self._process.join(GRACE_S)  # then the driver blocks the process; abandon it


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lokakern.sweep.preload"])
    return context


def start_server() -> None:
    """Start the fork server, whose imports run while tasks are planned."""
    _context()
    with _main_module_hidden():
        forkserver.ensure_running()


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep workers from importing, and so running, the main program again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _exit_words(process: ForkServerProcess) -> tuple[str, str]:
    """Status and reason for a row."""
    code = process.exitcode
    if code is None:
        return "crashed", "the process stopped talking"
    if code >= 0:
        return "crashed", f"the process exited with {code}"
    if code == -signal.SIGKILL:  # the system sends it when memory is exhausted
        return "out_of_memory", "the process was killed by SIGKILL"
    try:
        return "crashed", f"the process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return "crashed", f"the process was killed by signal {-code}"


def _plugin_modules() -> tuple[str, ...]:
    """Modules outside lokakern that registered kernels."""
    names = {module for kernel in KERNELS.values() for module in kernel.modules}
    return tuple(sorted(n.removeprefix("python:") for n in names if n.startswith("python:")))


def _serve(
    pipe: Connection,
    page: _Page,
    tasks: Mapping[int, Task],
    modules: Sequence[str],
    deadline: float | None,
) -> None:
    """Main function of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    parent = multiprocessing.parent_process()
    if parent is not None:  # else a hanging kernel would keep the GPU after a killed sweep
        end_with(parent.sentinel)
    try:
        load_kernels()
        for module in modules:
            importlib.import_module(module)
        device = torch_device()
        warm(device)
        while tasks:
            _run(pipe, page, tasks, deadline)
            pipe.send(Idle())
            tasks = pipe.recv()
        pipe.send(None)
    except (BrokenPipeError, EOFError):  # the parent is gone
        pass
    except DeviceLostError as error:
        pipe.send(str(error))
    pipe.close()
    os._exit(0)  # exit handlers of libraries may hang on a faulty device


def _run(pipe: Connection, page: _Page, tasks: Mapping[int, Task], deadline: float | None) -> None:
    """Run tasks until the deadline, first those that time kernels, and send the results."""
    _time(pipe, page, {n: t for n, t in tasks.items() if isinstance(t, TimingTask)}, deadline)
    _measure(pipe, page, {n: t for n, t in tasks.items() if isinstance(t, AccuracyTask)}, deadline)


def _time(
    pipe: Connection, page: _Page, tasks: Mapping[int, TimingTask], deadline: float | None
) -> None:
    device = current_device()
    for place, (number, task) in enumerate(tasks.items()):
        if deadline is not None and time.monotonic() > deadline:
            return
        if place % PREFETCHED == 0:
            page.announce(number, None, "operands are drawn")
            following = itertools.islice(tasks.values(), place, place + PREFETCHED)
            prefetch_and_wait([later.case for later in following], page.beat)
        begun = time.monotonic()
        kernels = [KERNELS[name] for name in task.kernels]
        announce = functools.partial(page.announce, number)
        records = time_case(task.case, kernels, device, task.regime, announce=announce)
        page.announce(NONE, None, "the next task begins")
        pipe.send(Done(number, tuple(records), time.monotonic() - begun))


def _measure(
    pipe: Connection, page: _Page, tasks: Mapping[int, AccuracyTask], deadline: float | None
) -> None:
    if not tasks:
        return
    numbers = list(tasks)
    cells = [Cell(KERNELS[t.kernel], t.problem, t.distribution, t.seed) for t in tasks.values()]
    last = time.monotonic()

    def begin(place: int, launches: bool) -> bool:
        what = "its error is measured" if launches else "operands are drawn"
        page.announce(numbers[place], 0 if launches else None, what)
        return deadline is None or time.monotonic() <= deadline

    def done(place: int, record: AccuracyRecord) -> None:
        nonlocal last
        page.announce(NONE, None, "the next task begins")
        seconds, last = time.monotonic() - last, time.monotonic()
        pipe.send(Done(numbers[place], (record,), seconds))

    measure_cells(cells, torch_device(), current_device(), begin, done, page.beat)


def run_tasks(
    tasks: dict[int, Task],
    done: Callable[[int, Task, Done], None],
    died: Callable[[int, Task, Death], Task | None],
    *,
    watchdog_s: float,
    deadline: float | None = None,
    more: Callable[[], bool] = lambda: False,
) -> bool:
    """Run tasks in a worker, and in a new one whenever a worker dies.

    Args:
        tasks: By number; emptied. ``done`` and ``died`` may add and remove tasks.
        done: Called with the records of a task.
        died: Called when a worker died in a task; returns the remaining task, if any.
        watchdog_s: See `Worker`.
        deadline: See `Worker`.
        more: Called without remaining tasks: may add tasks; returns whether it did.

    Returns:
        Whether all tasks are done; False after the deadline.

    Raises:
        MeasurementError: Workers die before their first task.
    """

    def is_over() -> bool:
        return deadline is not None and time.monotonic() > deadline

    finished = False

    def is_work_left() -> bool:
        nonlocal finished
        finished = not tasks and not more()
        return not finished

    stillborn = 0
    while not is_over() and is_work_left():
        with Worker(tasks, watchdog_s=watchdog_s, deadline=deadline) as worker:
            for event in worker.events():
                if isinstance(event, Done):
                    done(event.task, tasks.pop(event.task), event)
                elif isinstance(event, Idle):
                    worker.give(tasks if not is_over() and is_work_left() else None)
                elif event.task is None or event.task not in tasks:
                    stillborn += 1
                    if stillborn == len(STILLBORN_PAUSES_S):
                        raise MeasurementError(
                            f"{stillborn} workers ended before they began to measure: "
                            f"{event.reason}; see their output"
                        )
                    time.sleep(STILLBORN_PAUSES_S[stillborn])
                    break
                else:
                    left = died(event.task, tasks.pop(event.task), event)
                    if left is not None:
                        tasks[event.task] = left
                stillborn = 0
    return finished or not is_work_left()
