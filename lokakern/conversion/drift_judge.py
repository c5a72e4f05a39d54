"""The thread of a watch: compares windows, and judges the sites that moved."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from lokakern.probe.drift import Usual, profile_of, usual_of
from lokakern.probe.report import ProbeReport
from lokakern.probe.statistics import FEWEST_ROWS, SiteStatistics
from lokakern.progress import Progress
from lokakern.types import Device, ErrorBudget

MOST_WAITING = 2  # windows of a thread that lags; of more the older are dropped
IN_TURN = 10  # windows, after which a site is judged of which nothing moved: sums may cancel
# The operands of each GEMM beside the weight.
PARTS_OF = {
    "output": {"input"},
    "grad_input": {"grad_output"},
    "grad_weight": {"input", "grad_output"},
}


class Window(NamedTuple):
    """What a probe saw in one step."""

    sites: dict[str, SiteStatistics]
    ready: dict[torch.device, Any]  # CUDA events after which statistics are there


class Judged(NamedTuple):
    """The verdicts on some sites."""

    report: ProbeReport
    moved: dict[str, str]  # what moved, by site
    parts: dict[str, set[str]]  # operands of which there were enough rows, by site
    in_turn: bool  # whether nothing moved


class DriftJudge:
    """Judges windows in a thread, from its making to `end`.

    Args:
        sites: Names of the sites.
        report: What is usual, and was judged before; None: nothing.
        budget: The largest error that is safe.
        device: For which verdicts are.
        turned_off: Returns the sites with products that were turned off.
    """

    def __init__(
        self,
        sites: Iterable[str],
        report: ProbeReport | None,
        budget: ErrorBudget,
        device: Device | None,
        turned_off: Callable[[], set[str]],
    ) -> None:
        self._budget, self._device, self._turned_off = budget, device, turned_off
        known = {} if report is None else report.fingerprints()
        self._usual = {name: Usual(usual_of(prints)) for name, prints in known.items()}
        is_judged = report is not None and report.budget == budget
        # Operands whose first window is still to be judged, by site.
        self._first = {
            name: set(PARTS_OF["grad_weight"]).difference(
                *(PARTS_OF[gemm] for gemm in known.get(name, ()) if is_judged)
            )
            for name in sites
        }
        self._turns = dict.fromkeys(sites)  # the longest not judged first
        self._quiet, self._rounds = 0, itertools.count()  # windows without a judgement
        self._windows: queue.Queue[Window | None] = queue.Queue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._found: deque[Judged | BaseException] = deque()
        self._thread = threading.Thread(target=self._work, name="lokakern drift watch", daemon=True)
        self._thread.start()

    def put(self, sites: dict[str, SiteStatistics]) -> None:
        """Take a window, whose statistics the device may still compute."""
        ready = {}
        for device in {s.device for s in sites.values() if s.device.type == "cuda"}:
            ready[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready[device].record(torch.cuda.current_stream(device))
        self._drop(MOST_WAITING - 1)
        self._windows.put(Window(sites, ready))

    def take(self) -> Judged | BaseException | None:
        """The next result, or the error of a window; None if there is none."""
        return self._found.popleft() if self._found else None

    def wait(self) -> None:
        """Wait for the windows that were put."""
        self._windows.join()

    def end(self, wait: bool) -> None:
        """End the thread; with ``wait`` after the windows that were put."""
        if not wait:
            self._drop(0)
        self._windows.put(None)
        if wait:
            self._thread.join()

    def _drop(self, most: int) -> None:
        """Forget the oldest windows that wait."""
        while self._windows.qsize() > most:
            try:
                self._windows.get_nowait()
            except queue.Empty:
                return
            self._windows.task_done()

    def _work(self) -> None:
        while self._look_at(self._windows.get()):
            self._windows.task_done()
        self._windows.task_done()

    def _look_at(self, window: Window | None) -> bool:
        """Judge a window; whether there was one. Its statistics are freed at the return."""
        if window is None:
            return False
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(Progress())  # shown nowhere
                for device, event in window.ready.items():
                    if device not in self._streams:
                        self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    self._streams[device].wait_event(event)
                    stack.enter_context(torch.cuda.stream(self._streams[device]))
                self._judge(window.sites)
        except Exception as error:  # the next step of the training tells it
            self._found.append(error)
        return True

    def _judge(self, sites: Mapping[str, SiteStatistics]) -> None:
        parts = {
            name: {p for p in ("input", "grad_output")
                   if len(getattr(statistics, p).kept()[0]) >= FEWEST_ROWS}
            for name, statistics in sites.items()
        }  # fmt: skip
        seen = [name for name in sites if parts[name]]  # of fewer rows there is no verdict
        off = self._turned_off()
        moved = {}
        for name in seen:
            profile = profile_of(sites[name])
            usual = self._usual.setdefault(name, Usual())
            words = usual.see(profile, falls=name in off)
            if words:  # what is usual begins anew
                self._usual[name] = Usual()
                self._usual[name].see(profile)
            if words or self._first.get(name, set()) & parts[name]:
                moved[name] = words
        self._quiet = 0 if moved else self._quiet + 1
        in_turn = self._quiet >= IN_TURN
        if in_turn:
            self._quiet = 0
            moved = dict.fromkeys(self._next(seen, off), "")
        if not moved:
            return
        for name in moved:
            self._turns[name] = self._turns.pop(name, None)
        report = ProbeReport.of(
            {name: sites[name] for name in moved}, budget=self._budget, device=self._device,
            seeds=(0,),
        )  # fmt: skip
        for name in moved:
            self._first.get(name, set()).difference_update(parts[name])
        self._found.append(Judged(report, moved, {n: parts[n] for n in moved}, in_turn))

    def _next(self, seen: Collection[str], off: set[str]) -> list[str]:
        """The site that is judged in turn; every second time one with products that are off."""
        waiting = [name for name in self._turns if name in seen]
        of_off = [name for name in waiting if name in off]
        first = of_off if of_off and next(self._rounds) % 2 == 0 else waiting
        return first[:1]
