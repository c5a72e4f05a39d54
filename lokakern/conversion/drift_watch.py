"""`Conversion.watch`: products run unquantized while their operands round too badly in FP8.

A probe of its own keeps some rows and sizes of one step in so many, a window
(`lokakern.probe.windows`). A thread of its own compares windows, and judges a site anew, from the
rows of the window, where they left their usual range (`lokakern.conversion.drift_judge`). The steps
of training only hand windows over and turn switches of routes
(`lokakern.nn.routed_matmul.turn`): the host waits for nothing, and nothing is compiled again. In
other regimes than "compiled" routes change: eager calls are those of nn.Linear then, and CUDA
graphs, which would replay the old kernels, are made anew by the compiler.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lokakern.conversion.drift_judge import DriftJudge, Judged, Place
from lokakern.conversion.variants import refuse_ranks
from lokakern.errors import ShapeError, UnsupportedError
from lokakern.native import NATIVE
from lokakern.nn.module_scan import WATCHED
from lokakern.nn.raw_product import is_layer
from lokakern.nn.routed_matmul import PLAIN, read_route
from lokakern.probe.hooks import is_plain
from lokakern.probe.report import ProbeReport
from lokakern.probe.sample_kernel import SampleKernel
from lokakern.probe.session import Probe, remove_all
from lokakern.probe.verdicts import LIMITS
from lokakern.probe.windows import SiteWindow, WindowRecorder, take_weight_sizes

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion
    from lokakern.conversion.routes import Route
    from lokakern.types import ErrorBudget

LOGGER = logging.getLogger(__name__)
NO_BACKWARD = -1
WEIGHTS_EVERY = 5  # windows, after which weights are looked at, which change slowly
# Where a sample left the usual range, a second one follows after this part of the steps between
# samples: later than what lasts a few steps, and long before the next. At most one of each.
SECOND_PART = 5
TO_BF16, TO_FLOAT16, TO_FP8, STAYS = "to bf16", "to float16", "to fp8", "stays"


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A product that was judged anew.

    Attributes:
        step: The step after which it counts.
        site: Name of the layer.
        gemm: "output", "grad_input" or "grad_weight".
        action: "to bf16", or "to float16" where the layer multiplies in it, "to fp8" or "stays".
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


class _WindowProbe(Probe):
    """Hands over what a sampled step left when it is over, and says when a step begins."""

    _recorder_type = WindowRecorder
    _looks_elsewhere = False

    def __init__(
        self,
        model: nn.Module,
        every: int,
        hand_over: Callable[[dict[str, SiteWindow]], None],
        turned: Callable[[], object],
        **options: Any,
    ) -> None:
        super().__init__(model, every, **options)
        self.judge: DriftJudge | None = None  # of the windows; without one all are usual
        self._second = -1  # the step that is sampled besides, see `SECOND_PART`
        self._sampler.trains_only = self._sampler.draws_late = True
        self._hand_over, self._turned = hand_over, turned
        self._has_window, self._windows = False, 0
        self._is_counted = False  # in `WATCHED`
        self._before: list[list[int]] = []  # hooks of others that come before ours
        self._backward = NO_BACKWARD  # the backward pass in which the window's step ended
        recorders: dict[str, Any] = self._recorders
        for name, recorder in recorders.items():
            recorder.has_parameter = self._parameter_of(name) is not None
        self._kernel = SampleKernel(p.device for p in model.parameters())

    def start(self) -> None:
        self._kernel.compile()
        super().start()
        for module in self._modules.values():
            WATCHED[module] = WATCHED.get(module, 0) + 1
        self._is_counted = True

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        for module in self._modules.values() if self._is_counted else ():
            WATCHED[module] -= 1
            if not WATCHED[module]:
                del WATCHED[module]
        self._is_counted = False

    def _parameter_of(self, name: str) -> Tensor | None:
        weight: Any = self._modules[name]._parameters.get("weight")
        is_there = is_plain(weight) and not isinstance(weight, nn.UninitializedParameter)
        return weight if is_there else None

    def _turn(self) -> None:
        self._has_window |= self._sampler.on
        # A CUDA graph would replay what is recorded now: the window goes on.
        if self._has_window and not _is_captured():
            backward = torch._C._current_graph_task_id()
            if backward != NO_BACKWARD and self._backward in (NO_BACKWARD, backward):
                self._backward = backward  # an optimizer steps within: gradients are still to come
            else:
                self._has_window, self._backward = False, NO_BACKWARD
                self._end_window()
        # Nothing begins or ends between two steps that are not sampled.
        if self._sampler.on or self._is_due():
            self._kernel.load()
            super()._turn()
            if self._sampler.on:
                self._hook_modules()
            else:
                self._unhook_modules()
        elif self._source and self._call_handles:  # the first step that an optimizer ended
            self._unhook_modules()
        if self.judge is None or self.judge.found:  # not a call in each step
            self._turned()

    def _unhook_modules(self) -> None:
        """Leave a step that is not sampled without hooks, as without a watch.

        Hooks that do nothing have guards, too, which took the host 0.08 ms more before each call of
        compiled code of nine layers, where its caches are cold. And where layers have hooks, no
        product applies a relu, and no op computes the gradients behind layers.
        """
        if self._site_handles:
            self._before = [_keys_before(handle) for handle in self._site_handles]
        remove_all(self._site_handles)
        if self._source:  # calls of the model are no steps any more
            remove_all(self._call_handles)
            remove_all(self._first)

    def _hook_modules(self) -> None:
        are_new = not self._site_handles
        super()._hook_modules()
        if are_new:  # each in its place among the hooks of others
            for handle, keys in zip(self._site_handles, self._before, strict=False):
                hooks = handle.hooks_dict_ref()
                others = [key for key in hooks if key != handle.id]
                place = max((i + 1 for i, key in enumerate(others) if key in keys), default=0)
                for key in (handle.id, *others[place:]):
                    hooks.move_to_end(key)

    def _is_due(self) -> bool:
        since = self._steps % self.every
        # Where the last sample is suspicious and old enough, the step that begins is sampled, too.
        is_late = since >= self.every // SECOND_PART and self._second < self._steps - since
        if is_late and self.judge is not None and self.judge.suspects:
            self._second = self._steps
        return since == 0 or self._steps == self._second

    def _end_window(self) -> None:
        windows: dict[str, Any] = {}
        for name, recorder in self._recorders.items():
            window: Any = recorder.statistics
            recorder.statistics, recorder.steps = None, 0
            if window is not None:
                windows[name] = window
                weight = self._parameter_of(name)
                if weight is not None and weight.shape == (window.n, window.k):
                    window.weight = weight
        if self._windows % WEIGHTS_EVERY == 0:
            take_weight_sizes([x for x in windows.values() if x.weight is not None])
        self._windows += 1
        if windows:
            self._hand_over(windows)

    def abandon(self) -> None:
        """Stop after an error: the device may have failed, and nothing more is asked of it."""
        self._remove_hooks()

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps


def _keys_before(handle: Any) -> list[int]:
    """Keys of the hooks of a module that are called before one."""
    hooks = handle.hooks_dict_ref() or {}
    return list(itertools.takewhile(lambda key: key != handle.id, hooks))


def _is_captured() -> bool:
    is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_up and torch.cuda.is_current_stream_capturing()


class DriftWatch:
    """See `Conversion.watch`; a context manager, or `start` and `stop`.

    Attributes:
        events: What was judged anew so far, oldest first.
        unseen: Quantized layers and products that no window had so far.
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
        if every < 1:
            raise ShapeError(f"watch: every is {every!r}; expected at least 1 step")
        self._conversion, self._report, self._budget = conversion, report, budget
        self._callbacks, self.events = tuple(callbacks), list[DriftEvent]()
        self._every, self._seed = every, seed
        self.unseen = list(self._quantized())
        self._earlier = 0  # steps before the last start
        self._kernels: dict[Place, tuple[str, ...]] = {}
        self._probe: _WindowProbe | None = None
        self._judge: DriftJudge | None = None

    def __enter__(self) -> DriftWatch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(wait=kind is None)

    def start(self) -> None:
        """Begin to watch; without effect while it does.

        What was compiled before is compiled again.

        Raises:
            UnsupportedError: The conversion was undone, or another watch is under way.
        """
        if self._probe is not None:
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            NATIVE.ask()  # for samples, and their numbers
        self._conversion.begin_watch(self)
        try:
            probe = self._probe_of_layers()
        except BaseException:
            self._conversion.end_watch()
            raise
        if probe is None:
            self._conversion.end_watch()
            warnings.warn("watch: no layer is quantized, and nothing is watched", stacklevel=2)
            return
        self._probe = probe
        try:
            self._probe.start()
        except BaseException:
            self.stop(wait=False)
            raise

    def _probe_of_layers(self) -> _WindowProbe | None:
        """A probe of the quantized layers, with its judge; None without any."""
        quantized = self._quantized()  # with switches fewer than before
        self.unseen = [name for name in self.unseen if name in quantized]
        modules = {id(self._conversion.sites[name].module): name for name in quantized}
        layers = [m for m in self._conversion.model.modules() if id(m) in modules and is_layer(m)]
        if not layers:
            return None
        watched = {id(layer) for layer in layers}
        others = [name for module, name in modules.items() if module not in watched]
        if others:
            warnings.warn(
                f"watch: {', '.join(others)} are quantized, and not watched, as no module of the "
                "model is called for them",
                stacklevel=3,
            )
        probe = _WindowProbe(
            self._conversion.model, self._every, self._hand_over, self.apply,
            check="off", seed=self._seed + self._earlier,
            filter=lambda module, _: id(module) in watched,
        )  # fmt: skip
        names = {modules[module] for module in watched}
        self._kernels = {
            (name, route.gemm): kernels
            for name, routes in self._quantized().items()
            for route in routes
            if name in names and (kernels := self._kernels_of(name, route))
        }
        self._judge = probe.judge = DriftJudge(
            self._kernels, self._report, self._budget, lambda: set(tuple(self._off))
        )  # fmt: skip
        return probe

    def stop(self, wait: bool = True) -> None:
        """Watch no more; products stay as they are. With ``wait``, judge what was handed over."""
        if self._probe is None or self._judge is None:
            return
        (self._probe.stop if wait else self._probe.abandon)()
        self._judge.end(wait)
        self.apply()
        self._earlier, self._probe, self._judge = self.steps, None, None
        self._conversion.end_watch()

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._earlier + (0 if self._probe is None else self._probe.steps)

    @property
    def in_bf16(self) -> list[str]:
        """The products that are turned off, as ``site/gemm``, also those in float16."""
        return sorted(f"{site}/{gemm}" for site, gemm in self._off)

    def apply(self, wait: bool = False) -> list[DriftEvent]:
        """Apply what was judged by now, as each step does; with ``wait``, all handed over before.

        Returns:
            The new events, of which the callbacks were told.
        """
        if self._judge is None:
            return []
        if wait:
            self._judge.wait()
        new = []
        while (found := self._judge.take()) is not None:
            if isinstance(found, BaseException):
                warnings.warn(
                    f"a window was not judged, products stay as they are: {found!r}", stacklevel=2
                )
            else:
                new += self._events_of(found)
        self.events += new
        for event in new:
            LOGGER.log(logging.INFO if event.action == STAYS else logging.WARNING, "%s", event)
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception as error:  # a logger that fails ends no training
                    warnings.warn(f"watch: {callback!r} failed: {error!r}", stacklevel=2)
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

        title = f"{len(self._off)} products turned off after {self.steps} steps"
        print_rows([event.row() for event in self.events], "table", title=title)

    @property
    def _off(self) -> dict[tuple[str, str], Route]:
        return self._conversion.turned_off

    def _quantized(self) -> dict[str, tuple[Route, ...]]:
        """The routes of sites with kernels, as they are where nothing is turned off."""
        routes = {
            name: tuple(self._off.get((name, route.gemm), route) for route in site.routes)
            for name, site in self._conversion.sites.items()
        }
        return {
            name: some for name, some in routes.items()
            if any(r.text for r in some) or self._conversion.gradient_kernels(name)
        }  # fmt: skip

    def _kernels_of(self, site: str, route: Route) -> tuple[str, ...]:
        """All kernels of a product, those that compiled code has beside its route included."""
        segments = () if route.text == PLAIN else read_route(route.text)[1:]
        own = [name for part in segments for _, name in part if name]
        return tuple(dict.fromkeys(
            (*own, *self._conversion.gradient_kernels(site).get(route.gemm, ()))
        ))  # fmt: skip

    def _hand_over(self, sites: dict[str, SiteWindow]) -> None:
        self.unseen = [name for name in self.unseen if name not in sites]
        if self._judge is not None:
            self._judge.put(sites)

    def _events_of(self, found: Judged) -> list[DriftEvent]:
        """Turn the products of some sites, and say so."""
        new = []
        to_turn: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for name in found.moved:
            if not self._conversion.determines(name):
                warnings.warn(
                    f"watch: a newer conversion determines the kernels of {name}, which is not "
                    "watched any more", stacklevel=3,
                )  # fmt: skip
        for place, worst in found.worst.items():
            name, gemm = place
            if not self._conversion.determines(name):
                continue
            is_safe = worst is not None and worst.safety == "safe"
            action = STAYS
            if is_safe == (place in self._off):
                is_half = self._conversion.dtype_of(self._conversion.sites[name].module)
                off = TO_FLOAT16 if is_half is torch.float16 else TO_BF16
                action = TO_FP8 if is_safe else off
                to_turn[is_safe].append(place)
            elif found.in_turn:
                continue
            new.append(
                DriftEvent(
                    self.steps, name, gemm, action, found.moved[name],
                    "undecided" if worst is None else worst.safety,
                    "Probe did not replay its scales here" if worst is None else worst.reason,
                    float("inf") if worst is None else worst.row_err_upper,
                    str(self._budget), self._kernels[place],
                )
            )  # fmt: skip
        for is_on, places in to_turn.items():
            if places:
                self._conversion.turn(places, is_on)
        return new
