"""A sweep without a worker process: its tasks run here, where tests can patch what they use.

So can the time: `launches_take` makes a kernel as slow as a test says, whatever the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lokakern.bench import timing, worker
from lokakern.bench.norm_backward_operands import NormBackwardOperands
from lokakern.bench.norm_operands import NormOperands
from lokakern.bench.operands import Operands
from lokakern.registry.register import Kernel


class _Pipe:
    """Keeps what a worker would send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def run_tasks_here(
    tasks: dict[int, worker.Task],
    done: Callable[[int, worker.Task, Any], None],
    died: Callable[..., Any],
    *,
    watchdog_s: float,
    deadline: float | None = None,
    more: Callable[[], bool] = lambda: False,
) -> bool:
    """As `worker.run_tasks`."""
    while tasks or more():
        if deadline is not None and worker.time.monotonic() > deadline:
            return False
        pipe, page = cast(Any, _Pipe()), cast(Any, SimpleNamespace(beats=0))
        timings = {n: t for n, t in tasks.items() if isinstance(t, worker.TimingTask)}
        errors = {n: t for n, t in tasks.items() if isinstance(t, worker.AccuracyTask)}
        worker._time(pipe, page, timings, deadline)
        worker._measure(pipe, page, errors, deadline)
        for event in pipe.sent:
            done(event.task, tasks.pop(event.task), event)
    return True


def _method(timed: Callable[..., Any], call_of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda operands, kernel, number: timed(call_of, operands, kernel, number)


def launches_take(monkeypatch: pytest.MonkeyPatch, microseconds: Callable[[str], float]) -> None:
    """Let time pass for what is timed here only when a kernel is launched.

    Args:
        monkeypatch: Undoes it.
        microseconds: How long a launch takes, by the kernel's name.
    """
    now_ns = 0

    def timed(
        call_of: Callable[[Any, Kernel, int], Callable[[], None]],
        operands: Operands, kernel: Kernel, number: int,
    ) -> Callable[[], None]:  # fmt: skip
        call = call_of(operands, kernel, number)

        def launch() -> None:
            nonlocal now_ns
            call()
            now_ns += round(1e3 * microseconds(kernel.name))

        return launch

    for kind in (Operands, NormOperands, NormBackwardOperands):
        monkeypatch.setattr(kind, "call_of", _method(timed, kind.call_of))
    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns, monotonic=time.monotonic)
    monkeypatch.setattr(timing, "time", clock)
