"""The thread of a watch: compares windows, and judges the products whose operands moved.

Whatever it does in Python, it takes from the training, whose thread waits for the interpreter
meanwhile. So windows are compared by a few calls, none of the device unless something is judged,
and of a site only the kernels are replayed that its products have.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lokakern.probe.drift import Ranges, usual_of
from lokakern.probe.replay import LearnedSite, compile_ahead, replay
from lokakern.probe.report import ProbeReport
from lokakern.probe.statistics import FEWEST_ROWS
from lokakern.probe.verdicts import ClassVerdict, worst_of
from lokakern.probe.windows import Numbers, SiteWindow, Transfer, transfers_of
from lokakern.progress import Progress
from lokakern.types import ErrorBudget

MOST_WAITING = 2  # windows of a thread that lags; of more the older are dropped
IN_TURN = 10  # windows, after which a product is judged of which nothing moved: sums may cancel
# The operands of each GEMM beside the weight.
PARTS_OF = {
    "output": {"input"},
    "grad_input": {"grad_output"},
    "grad_weight": {"input", "grad_output"},
}


Place = tuple[str, str]  # site and GEMM


class Window(NamedTuple):
    """What a probe saw in one step."""

    sites: dict[str, SiteWindow]
    numbers: list[Transfer]
    ready: dict[torch.device, Any]  # CUDA events after which the tensors are there


class Judged(NamedTuple):
    """Of some products the least safe of their kernels; None where one was not replayed."""

    worst: dict[Place, ClassVerdict | None]
    moved: dict[str, str]  # what moved, by site
    in_turn: bool  # whether nothing moved


class DriftJudge:
    """Judges windows in a thread, from its making to `end`.

    Args:
        kernels: Of each product that is judged, by site and GEMM.
        report: What is usual, and was judged before; None: nothing.
        budget: The largest error that is safe.
        turned_off: Returns the products that were turned off.

    Attributes:
        suspects: Whether the last window left a usual range, so that the next one decides.
        found: What `take` returns, oldest first.
    """

    def __init__(
        self,
        kernels: Mapping[Place, tuple[str, ...]],
        report: ProbeReport | None,
        budget: ErrorBudget,
        turned_off: Callable[[], set[Place]],
    ) -> None:
        self._kernels, self._budget, self._turned_off = dict(kernels), budget, turned_off
        known = {} if report is None else report.fingerprints()
        self._ranges = Ranges({name: usual_of(prints) for name, prints in known.items()})
        is_judged = report is not None and report.budget == budget
        # Operands whose first window is still to be judged, by site.
        self._first = {
            name: set(PARTS_OF["grad_weight"]).difference(
                *(PARTS_OF[gemm] for gemm in known.get(name, ()) if is_judged)
            )
            for name, _ in kernels
        }
        self.suspects = False  # the thread writes it, the steps read it
        self._turns = dict.fromkeys(kernels)  # the longest not judged first
        self._quiet, self._rounds = 0, itertools.count()  # windows without a judgement
        self._again: dict[str, str] = {}  # what moved, by site, of judgements that failed once
        self._compiled = set[Place]()  # whose kernels were, for a replay
        self._windows: queue.Queue[Window | None] = queue.Queue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.found: deque[Judged | BaseException] = deque()
        self._thread = threading.Thread(target=self._work, name="lokakern drift watch", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends within PyTorch aborts the process.
        atexit.register(self._end_at_exit)

    def put(self, sites: dict[str, SiteWindow]) -> None:
        """Take a window, whose tensors the device may still compute.

        One for which there is no memory is dropped: a watch ends no training.
        """
        try:
            numbers = transfers_of(sites)
        except torch.OutOfMemoryError as error:
            self.found.append(error)
            return
        ready = {x.device: x.ready for x in numbers if x.ready is not None}
        self._drop(MOST_WAITING - 1)
        self._windows.put(Window(sites, numbers, ready))

    def take(self) -> Judged | BaseException | None:
        """The next result, or the error of a window; None if there is none."""
        return self.found.popleft() if self.found else None

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

    def _end_at_exit(self) -> None:
        self.end(wait=False)
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
        atexit.unregister(self._end_at_exit)

    def _look_at(self, window: Window | None) -> bool:
        """Judge a window; whether there was one. Its statistics are freed at the return."""
        if window is None:
            return False
        try:
            self._judge(window)
        except Exception as error:  # the next step of the training tells it
            self.found.append(error)
        return True

    def _judge(self, window: Window) -> None:
        moved: dict[str, str] = {}
        parts: dict[str, set[str]] = {}
        self.suspects = suspects = False
        off = self._turned_off()
        found = [transfer.numbers() for transfer in window.numbers]
        if _overflowed(window.sites, found):
            return
        for numbers in found:
            moved |= self._ranges.see(numbers, {site for site, _ in off})
            suspects |= self._ranges.are_left
            parts |= numbers.parts
        self.suspects = suspects
        for name, waiting in self._first.items():
            if waiting & parts.get(name, set()):
                moved.setdefault(name, "")
        again = {name: words for name, words in self._again.items() if name in parts}
        waiting_still = {n: words for n, words in self._again.items() if n not in parts}
        moved |= {name: words for name, words in again.items() if not moved.get(name)}
        self._quiet = 0 if moved else self._quiet + 1
        in_turn = self._quiet >= IN_TURN
        places = [place for place in self._kernels if place[0] in moved]
        if in_turn:
            self._quiet = 0
            able = [p for p in self._turns if PARTS_OF[p[1]] <= parts.get(p[0], set())]
            places = self._next(able, off)
            moved = {name: "" for name, _ in places}
        if moved:
            with self._beside(window):
                self._judge_products(window, moved, places, again, waiting_still, in_turn)

    @contextlib.contextmanager
    def _beside(self, window: Window) -> Iterator[None]:
        """Run launches on streams of the thread, behind those of a window."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(Progress())  # shown nowhere
            for device, event in window.ready.items():
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_event(event)
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield

    def _judge_products(
        self,
        window: Window,
        moved: dict[str, str],
        places: Collection[Place],
        again: Mapping[str, str],
        waiting_still: dict[str, str],
        in_turn: bool,
    ) -> None:
        # Until it is judged: what is usual began anew, and no later window tells it again.
        fails_first = {} if in_turn else {n: w for n, w in moved.items() if n not in again}
        self._again = waiting_still | fails_first
        worst: dict[Place, ClassVerdict | None] = {}
        learned = [LearnedSite(name, window.sites[name].statistics()) for name in moved]
        only = {site.name: self._able(site, places) for site in learned}
        new = [s for s in learned if not self._compiled >= {(s.name, g) for g in only[s.name]}]
        if new:
            compile_ahead(new, only)
        for site in learned:
            kernels = only[site.name]
            replayed = replay(site, seeds=(0,), only=kernels) if kernels else []
            for gemm, names in kernels.items():
                place = site.name, gemm
                worst[place] = worst_of(site.statistics, gemm, replayed, names, self._budget)
                self._compiled.add(place)
        for place in places:
            self._turns[place] = self._turns.pop(place, None)
        self._again = waiting_still
        self.found.append(Judged(worst, moved, in_turn))

    def _able(self, site: LearnedSite, places: Collection[Place]) -> dict[str, tuple[str, ...]]:
        """The kernels of those products of a site that ran, by GEMM, with rows enough."""
        parts = {p for p in PARTS_OF["grad_weight"]
                 if len(getattr(site.statistics, p).kept()[0]) >= FEWEST_ROWS}  # fmt: skip
        self._first.get(site.name, set()).difference_update(parts)
        return {
            gemm: self._kernels[site.name, gemm]
            for gemm in site.gemms()
            if (site.name, gemm) in places and PARTS_OF[gemm] <= parts
        }

    def _next(self, able: Collection[Place], off: set[Place]) -> list[Place]:
        """The product that is judged in turn; every second time one that is off."""
        of_off = [place for place in able if place in off]
        waiting = of_off if of_off and next(self._rounds) % 2 == 0 else list(able)
        return waiting[:1]


def _overflowed(sites: Mapping[str, SiteWindow], found: Collection[Numbers]) -> bool:
    """Whether gradients overflowed float16 at a loss scale that was too large for it.

    `torch.amp.GradScaler` skips such a step, and halves the scale: nothing of it is a drift. Where
    inputs are not finite, either, it is none of that.
    """
    nonfinite = set[str]().union(*(numbers.nonfinite for numbers in found))
    return nonfinite == {"grad_output"} and any(s.half is torch.float16 for s in sites.values())
