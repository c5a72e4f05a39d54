"""A sweep without a worker process: its tasks run here, where tests can patch what they use."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from lokakern.bench import worker


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
        if deadline is not None and time.monotonic() > deadline:
            return False
        pipe, page = cast(Any, _Pipe()), cast(Any, SimpleNamespace(beats=0))
        timings = {n: t for n, t in tasks.items() if isinstance(t, worker.TimingTask)}
        errors = {n: t for n, t in tasks.items() if isinstance(t, worker.AccuracyTask)}
        worker._time(pipe, page, timings, deadline)
        worker._measure(pipe, page, errors, deadline)
        for event in pipe.sent:
            done(event.task, tasks.pop(event.task), event)
    return True
