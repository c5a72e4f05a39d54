"""A sweep without a worker process: its tasks run here, where tests can patch what they use.

Nor does the machine decide how long a kernel takes: time passes at launches only, as much as
`launches_take` was told to let pass, else `usual_us`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lokakern.measure import timing
from lokakern.measure.norm_operands import NormBackwardOperands, NormOperands
from lokakern.measure.operands import Operands
from lokakern.registry.register import Kernel
from lokakern.sweep import worker


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
    """Run tasks as `worker.run_tasks` does."""
    with pytest.MonkeyPatch.context() as patch:
        if timing.time is time:
            launches_take(patch)
        return _run_tasks(tasks, done, deadline, more)


def _run_tasks(
    tasks: dict[int, worker.Task],
    done: Callable[[int, worker.Task, Any], None],
    deadline: float | None,
    more: Callable[[], bool],
) -> bool:
    while tasks or more():
        if deadline is not None and worker.time.monotonic() > deadline:
            return False
        pipe = cast(Any, _Pipe())
        worker._run(pipe, worker._Page(), tasks, deadline)
        for event in pipe.sent:
            done(event.task, tasks.pop(event.task), event)
    return True


def usual_us(name: str) -> float:
    """Time of a launch, so long that few are replayed; emulations are slow, and parts add up."""
    return sum(3e4 if "emulated" in part else 1e4 for part in name.split("+"))


def launches_take(
    monkeypatch: pytest.MonkeyPatch, microseconds: Callable[[str], float] = usual_us
) -> None:
    """Let time pass for what is timed here only when a kernel is launched.

    Args:
        monkeypatch: Undoes it.
        microseconds: How long a launch takes, by the kernel's name.
    """
    now_ns = 0

    def timed(call_of: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        def of(operands: Operands, kernel: Kernel, number: int) -> Callable[[], None]:
            call = call_of(operands, kernel, number)

            def launch() -> None:
                nonlocal now_ns
                call()
                now_ns += round(1e3 * microseconds(kernel.name))

            return launch

        return of

    for kind in (Operands, NormOperands, NormBackwardOperands):
        monkeypatch.setattr(kind, "call_of", timed(kind.call_of))
    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns, monotonic=time.monotonic)
    monkeypatch.setattr(timing, "time", clock)
