"""`Conversion.watch`: products run in bfloat16 while their operands round too badly in FP8.

A probe of its own samples one step of each window. A thread of its own compares windows, and judges
a site anew, from the rows of the window, where they left their usual range. The steps of training
only hand windows over and turn switches of routes (`lokakern.nn.routed_matmul.turn`): the host
waits for nothing, and nothing is compiled again. In other regimes than "compiled" routes change:
eager calls are those of nn.Linear then, and CUDA graphs, which would replay the old kernels, are
made anew by the compiler.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lokakern.conversion.variants import as_plain, refuse_ranks
from lokakern.errors import UnsupportedError
from lokakern.nn.raw_product import is_layer
from lokakern.nn.routed_matmul import PLAIN, read_route, turn
from lokakern.probe.drift import Usual, profile_of, usual_of
from lokakern.probe.problems import way_of
from lokakern.probe.report import ProbeReport
from lokakern.probe.session import Probe
from lokakern.probe.statistics import SiteStatistics
from lokakern.probe.verdicts import LIMITS, ClassVerdict, Verdict
from lokakern.progress import Progress
from lokakern.registry.register import kernel_named, load_kernels

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion
    from lokakern.conversion.routes import Route
    from lokakern.types import ErrorBudget

LOGGER = logging.getLogger(__name__)
TO_BF16, TO_FP8, STAYS = "to bf16", "to fp8", "stays"
MOST_WAITING = 2  # windows of a thread that lags; of more the older are dropped
IN_TURN = 10  # windows, after which a site is judged of which nothing moved: sums may cancel


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A product that was judged anew.

    Attributes:
        step: The step after which it counts.
        site: Name of the layer.
        gemm: "output", "grad_input" or "grad_weight".
        action: "to bf16", "to fp8" or "stays".
        moved: What left its usual range; "" of a first judgement, and of those in turn.
        safety: Of the kernels of its route: "safe", "unsafe" or "undecided".
        reason: Why they are not safe; "" where they are.
        row_err: The largest upper limit of their errors, of 95 % confidence.
        budget: In words.
        kernels: Those of the route.
    """

    step: int
    site: str
    gemm: str
    action: str
    moved: str
    safety: str
    reason: str
    row_err: float
    budget: str
    kernels: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "kernels": ", ".join(self.kernels)}

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else f": row_err at most {self.row_err:.3g}"
        return (
            f"step {self.step}: {self.site}/{self.gemm} {self.action}, {self.safety}{why}; moved: "
            f"{self.moved or 'nothing'}"
        )


class _Window(NamedTuple):
    step: int
    sites: dict[str, SiteStatistics]
    ready: dict[torch.device, Any]  # CUDA events after which statistics are there


class _Judged(NamedTuple):
    report: ProbeReport  # on these sites alone
    moved: dict[str, str]  # by site
    in_turn: bool  # whether only swaps are events


class _WindowProbe(Probe):
    """Hands each window over, begins another, and says when a step begins."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        hand_over: Callable[[int, dict[str, SiteStatistics]], None],
        turned: Callable[[], object],
        **options: Any,
    ) -> None:
        super().__init__(model, every, **options)
        self._hand_over, self._turned = hand_over, turned

    def _turn(self) -> None:
        if self._steps and self._handles and self._steps % self.every == 0:
            sites = self.sites()
            self.forget()
            self._hand_over(self._steps, sites)
        super()._turn()
        self._turned()

    def abandon(self) -> None:
        """Stop after an error: the device may have failed, and nothing more is asked of it."""
        self._remove_hooks()

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps


class DriftWatch:
    """See `Conversion.watch`; a context manager, or `start` and `stop`.

    Attributes:
        events: What was judged anew so far, oldest first.
    """

    def __init__(
        self,
        conversion: Conversion,
        report: ProbeReport | None,
        budget: ErrorBudget,
        every: int,
        callbacks: Sequence[Callable[[DriftEvent], None]],
        seed: int,
    ) -> None:
        if conversion.is_inference:
            raise UnsupportedError(
                "watch: it follows training; of a model converted with inference=True, whose FP8 "
                "weights are all that is kept, convert(check='1000:64') compares products"
            )
        refuse_ranks("watch")
        if not budget.limits.keys() <= set(LIMITS):
            raise UnsupportedError(
                f"watch: Probe judges by {', '.join(LIMITS)}; the budget is {budget}"
            )
        quantized = [s for s in conversion.sites.values() if any(r.text for r in s.routes)]
        self._routes = {site.name: site.routes for site in quantized}
        modules = {id(site.module) for site in quantized}
        self._conversion, self._report, self._budget = conversion, report, budget
        self._callbacks, self.events = tuple(callbacks), list[DriftEvent]()
        self._probe: _WindowProbe | None = None
        if any(is_layer(site.module) for site in quantized):
            self._probe = _WindowProbe(
                conversion.model, every, self._hand_over, self.apply, seed=seed, check="off",
                filter=lambda module, _: is_layer(module) and id(module) in modules,
            )  # fmt: skip
        self._off: set[tuple[str, str]] = set()
        self._seen: set[str] = set()
        self._windows: queue.Queue[_Window | None] = queue.Queue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the thread
        self._found: deque[_Judged | BaseException] = deque()  # of the thread
        self._unjudged = set(self._routes) if report is None else set()
        self._turns = dict.fromkeys(self._routes)  # sites, the longest not judged first
        self._quiet = 0  # windows without a judgement
        self._thread: threading.Thread | None = None
        known = {} if report is None else report.fingerprints()
        self._usual = {name: Usual(usual_of(prints)) for name, prints in known.items()}

    def __enter__(self) -> DriftWatch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(wait=kind is None)

    def start(self) -> None:
        """Begin to watch; without effect while it does.

        What was compiled before is compiled again.
        """
        if self._thread is not None:
            return
        if self._probe is None:
            warnings.warn("watch: no layer is quantized, and nothing is watched", stacklevel=2)
            return
        self._conversion.begin_watch(self)
        self._probe.start()
        self._thread = threading.Thread(target=self._work, name="lokakern drift watch", daemon=True)
        self._thread.start()

    def stop(self, wait: bool = True) -> None:
        """Watch no more; products stay as they are. With ``wait``, judge what was handed over."""
        if self._thread is None or self._probe is None:
            return
        if wait:
            self._probe.stop()
        else:
            self._probe.abandon()
            self._drop(0)
        self._windows.put(None)
        if wait:
            self._thread.join()
        self._thread = None
        self.apply()
        self._conversion.end_watch()

    @property
    def steps(self) -> int:
        """Steps so far."""
        return 0 if self._probe is None else self._probe.steps

    @property
    def unseen(self) -> list[str]:
        """Quantized layers and products that no window had so far."""
        return [name for name in self._routes if name not in self._seen]

    @property
    def in_bf16(self) -> list[str]:
        """The products that it turned off, as ``site/gemm``."""
        return sorted(f"{site}/{gemm}" for site, gemm in self._off)

    def apply(self, wait: bool = False) -> list[DriftEvent]:
        """Apply what was judged by now, as each step does; with ``wait``, all handed over before.

        Returns:
            The new events, of which the callbacks were told.
        """
        if wait and self._thread is not None:
            self._windows.join()
        new = []
        while self._found:
            found = self._found.popleft()
            if isinstance(found, BaseException):
                warnings.warn(
                    f"a window was not judged, products stay as they are: {found!r}", stacklevel=2
                )
                continue
            new += self._events_of(found)
        self.events += new
        for event in new:
            LOGGER.log(logging.INFO if event.action == STAYS else logging.WARNING, "%s", event)
            for callback in self._callbacks:
                callback(event)
        return new

    def lightning_callback(self) -> Any:
        """A callback for Lightning's Trainer, which watches each fit and logs to its logger.

        Where events are new it logs how many products are in bfloat16, and how many judgements
        there were, as ``lokakern/in_bf16`` and ``lokakern/events``.

        Raises:
            ImportError: Neither ``lightning`` nor ``pytorch_lightning`` is installed.
        """
        from lokakern.conversion.lightning_callback import callback_of  # imports Lightning: seconds

        return callback_of(self)

    def table(self) -> None:
        """Print the events."""
        from lokakern.render.terminal import print_rows

        title = f"{len(self._off)} products in bfloat16 after {self.steps} steps"
        print_rows([event.row() for event in self.events], "table", title=title)

    def _hand_over(self, step: int, sites: dict[str, SiteStatistics]) -> None:
        devices = {s.device for s in sites.values() if s.device.type == "cuda"}
        ready = {}
        for device in devices:  # statistics are whole when what was launched by now has run
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            ready[device] = event
        self._seen |= sites.keys()
        self._drop(MOST_WAITING - 1)
        self._windows.put(_Window(step, sites, ready))

    def _drop(self, most: int) -> None:
        """Forget the oldest windows that wait."""
        while self._windows.qsize() > most:
            try:
                self._windows.get_nowait()
            except queue.Empty:
                return
            self._windows.task_done()

    def _work(self) -> None:
        while (window := self._windows.get()) is not None:
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(torch.no_grad())
                    stack.enter_context(Progress())  # shown nowhere
                    for device, event in window.ready.items():
                        stream = self._streams.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                        self._streams[device] = stream
                        stream.wait_event(event)
                        stack.enter_context(torch.cuda.stream(stream))
                    self._look(window)
            except Exception as error:  # of the thread: the next step tells it
                self._found.append(error)
            finally:
                self._windows.task_done()

    def _look(self, window: _Window) -> None:
        moved = {}
        turned_off = {site for site, _ in tuple(self._off)}
        for name, statistics in window.sites.items():
            profile = profile_of(statistics)
            usual = self._usual.setdefault(name, Usual())
            words = usual.see(profile, falls=name in turned_off)
            if words or name in self._unjudged:
                moved[name] = words
                if words:  # what is usual begins anew
                    self._usual[name] = Usual()
                    self._usual[name].see(profile)
        self._quiet = 0 if moved else self._quiet + 1
        in_turn = self._quiet >= IN_TURN
        if in_turn:
            self._quiet = 0
            moved = {name: "" for name in self._turns if name in window.sites}
            moved = dict(itertools.islice(moved.items(), 1))
        if moved:
            for name in moved:
                self._turns[name] = self._turns.pop(name, None)
            sites = {name: window.sites[name] for name in moved}
            report = ProbeReport.of(
                sites, budget=self._budget, device=self._conversion.device, seeds=(0,)
            )
            self._unjudged -= moved.keys()
            self._found.append(_Judged(report, moved, in_turn))

    def _events_of(self, found: _Judged) -> list[DriftEvent]:
        """Turn the products of some sites, and say so."""
        new = []
        to_turn: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for name, moved in found.moved.items():
            verdicts = {v.gemm: v for v in found.report.verdicts if v.site == name}
            for route in self._routes[name]:
                verdict = verdicts.get(route.gemm)
                if verdict is None or route.text == PLAIN:
                    continue
                kernels = _kernels_of(route)
                worst = _worst(verdict, kernels)
                is_safe = worst is not None and worst.safety == "safe"
                place = (name, route.gemm)
                action = STAYS
                if is_safe == (place in self._off):
                    action = TO_FP8 if is_safe else TO_BF16
                    to_turn[is_safe].append(place)
                elif found.in_turn:
                    continue
                new.append(
                    DriftEvent(
                        self.steps, name, route.gemm, action, moved,
                        "undecided" if worst is None else worst.safety,
                        "Probe did not replay its scales here" if worst is None else worst.reason,
                        float("inf") if worst is None else worst.row_err_upper,
                        str(found.report.budget), kernels,
                    )
                )  # fmt: skip
        for is_on, places in to_turn.items():
            (self._off.difference_update if is_on else self._off.update)(places)
            if places:
                self._turn(places, is_on)
        return new

    def _turn(self, places: Sequence[tuple[str, str]], is_on: bool) -> None:
        if self._conversion.has_switches:
            turn([self._conversion.switch_of(*place) for place in places], is_on)
            return
        why = "the watch found its operands unsafe"
        self._conversion.use_routes({
            name: tuple(
                as_plain(route, why) if (name, route.gemm) in self._off else route
                for route in self._routes[name]
            )
            for name in {name for name, _ in places}
        }, keep_classes=True)  # fmt: skip


def _kernels_of(route: Route) -> tuple[str, ...]:
    names = (name for segments in read_route(route.text)[1:] for _, name in segments if name)
    return tuple(dict.fromkeys(names))


def _worst(verdict: Verdict, kernels: Sequence[str]) -> ClassVerdict | None:
    """Of the classes of some kernels the least safe; None where one has none."""
    load_kernels()
    found = []
    for name in kernels:
        kernel = kernel_named(name)
        one = verdict.of(way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation))
        if one is None:
            return None
        found.append(one)
    order = ("safe", "undecided", "unsafe")
    return max(found, key=lambda c: (order.index(c.safety), c.row_err_upper))
