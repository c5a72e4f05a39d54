"""How a site is seen: hooks on its module, and an op that stands in a compiled graph for them.

A hook asks one Python bool, whether this step is sampled. Run eagerly it reads what is there and
changes nothing. Traced by torch.compile the bool is a guard: one graph without anything of this for
the steps between, and one for sampled steps, in which `tap` copies the output of the site, so that
no compiler drops it, and its backward copies the gradient. Both look at operands when they run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lokakern.probe.site import SiteStatistics

SAMPLED_ROWS = 256  # of a matrix, for all that costs more than two passes
MOST_CALLS = 16  # of one site that are looked at in a step: of many micro-batches, the first


class Switch:
    """Whether the present step is sampled, and how.

    Attributes:
        on: Whether operands are looked at.
        weights: Whether weights are, too.
        share: Where in a matrix the sampled rows begin, 0..1.
        step: Counts steps.
    """

    def __init__(self, seed: int) -> None:
        self.on = self.weights = False
        self.share, self.step = 0.0, 0
        self._random = random.Random(seed)  # its own, lest a model's dropout change
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def turn(self, on: bool, weights: bool) -> None:
        """Decide about the next step."""
        self.on, self.weights = on, weights
        self.share = self._random.random()
        self.step += 1

    def keys(self, count: int, device: torch.device) -> Tensor:
        """Random numbers of 0..1 for a sample, ``[count]`` float64, drawn on the device."""
        if device not in self._generators:
            generator = torch.Generator(device)
            generator.manual_seed(self._seed)
            self._generators[device] = generator
        generator = self._generators[device]
        return torch.rand(count, generator=generator, dtype=torch.float64, device=device)

    def rows_of(self, x: Tensor) -> Tensor:
        """Some rows of ``[rows, columns]``, evenly spaced, float64."""
        stride = max(1, len(x) // SAMPLED_ROWS)
        return x[int(self.share * stride) :: stride][:SAMPLED_ROWS].double()


class SideStreams:
    """A stream beside the current one for each GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def beside(self, x: Tensor) -> Iterator[None]:
        """What is launched meanwhile runs beside the current stream; on a CPU, at once."""
        if not x.is_cuda:
            yield
            return
        stream = self._streams.get(x.device)
        if stream is None:
            stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
            self._streams[x.device] = stream
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            yield
        x.record_stream(stream)

    def join(self) -> None:
        """Let current streams wait for all that was launched beside them; the host does not."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


SIDE = SideStreams()


class Recorder:
    """Takes what hooks see of one site.

    Attributes:
        statistics: None before it was called.
        number: By which an op in a graph finds it.
    """

    _numbers = itertools.count()

    def __init__(self, switch: Switch, n: int, k: int, has_bias: bool, norm: str) -> None:
        self.switch, self.n, self.k, self.has_bias, self.norm = switch, n, k, has_bias, norm
        self.statistics: SiteStatistics | None = None
        self.number = next(self._numbers)
        self._step, self._calls = -1, 0
        self._weight: Tensor | None = None  # a snapshot that is still to be looked at
        # Of calls in a graph whose gradient is still to come; None of those that count for nothing.
        self._keys: list[Tensor | None] = []
        _RECORDERS[self.number] = self

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        y: Tensor,
        has_gradient: bool,
        *,
        is_in_graph: bool = False,
    ) -> Tensor | None:
        """Look at a call.

        Args:
            x: Input, ``[..., k]``.
            weight: ``[n, k]``, where it is at hand.
            y: Output, ``[..., n]``.
            has_gradient: Whether a gradient of y is to come.
            is_in_graph: Whether that comes to `backward_in_graph`, which is not told of what call.

        Returns:
            Random keys of the rows that were sampled, for `backward`; None where none were.
        """
        # Inside a backward pass: a checkpoint runs the forward pass again, and it counted already.
        if torch._C._current_graph_task_id() != -1:
            return None
        if self._step != self.switch.step:
            self._step, self._calls = self.switch.step, 0
            self._keys.clear()
        self._calls += 1
        fits = x.shape[-1] == self.k and y.shape[-1] == self.n and x.numel() > 0
        if self._calls > MOST_CALLS or not fits or _is_captured(x):
            if is_in_graph and has_gradient:
                self._keys.append(None)
            return None
        with torch.inference_mode(False), torch.no_grad():
            if self.statistics is None:
                self.statistics = SiteStatistics(
                    self.n, self.k, x.device, has_bias=self.has_bias, norm=self.norm
                )
            flat = x.detach().reshape(-1, self.k)
            rows = self.switch.rows_of(flat)
            keys = self.switch.keys(len(rows), x.device)
            self.statistics.add_input(flat, rows, keys)
            self.statistics.add_output(self.switch.rows_of(y.detach().reshape(-1, self.n)))
            if weight is not None and self.switch.weights and self._calls == 1:
                self._weight = weight.detach().clone()
        if is_in_graph and has_gradient:
            self._keys.append(keys)
        return keys

    def look_at_weight(self) -> bool:
        """Take in a snapshot of the weight, if one waits; whether one did.

        Not while the layer runs, and on a GPU on a stream of its own, for which `SideStreams.join`
        waits: a flip-flop over 1024 x 1024 is some GFLOP of float64.
        """
        weight, self._weight = self._weight, None
        if weight is None or self.statistics is None:
            return False
        with torch.inference_mode(False), torch.no_grad(), SIDE.beside(weight):
            self.statistics.add_weight(weight)
        return True

    def backward_in_graph(self, gradient: Tensor) -> None:
        """Look at the gradient of the last call that has not got its own."""
        keys = self._keys.pop() if self._keys else None
        if keys is not None:
            self.backward(keys, gradient)

    def backward(self, keys: Tensor, gradient: Tensor) -> None:
        """Look at the gradient of the output of a call, whose rows got these keys."""
        if self.statistics is None or _is_captured(gradient):
            return
        with torch.inference_mode(False), torch.no_grad():
            flat = gradient.detach().reshape(-1, self.n)
            rows = self.switch.rows_of(flat)
            if len(rows) == len(keys):
                self.statistics.grad_output.add(flat, rows, keys)


_RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


def _is_captured(x: Tensor) -> bool:
    """A CUDA graph would replay what is done now, and the host's part of it never."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


@torch.library.custom_op("lokakern::probe_tap", mutates_args=(), tags=_tags)
def tap(y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool) -> Tensor:
    """A copy of y, the output of a site, which is looked at."""
    recorder = _RECORDERS.get(site)
    if recorder is not None and recorder.switch.on:
        recorder.forward(x, weight, y, has_gradient, is_in_graph=True)
    return y.clone()


@torch.library.custom_op("lokakern::probe_tap_gradient", mutates_args=(), tags=_tags)
def tap_gradient(gradient: Tensor, site: int) -> Tensor:
    """A copy of the gradient of a site's output, which is looked at."""
    recorder = _RECORDERS.get(site)
    if recorder is not None:
        recorder.backward_in_graph(gradient)
    return gradient.clone()


@tap.register_fake
def _(y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool) -> Tensor:
    return torch.empty_like(y)


@tap_gradient.register_fake
def _(gradient: Tensor, site: int) -> Tensor:
    return torch.empty_like(gradient)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.site = inputs[3]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return tap_gradient(gradient, ctx.site), None, None, None, None


tap.register_autograd(_differentiate, setup_context=_remember)


def is_plain(x: Any) -> bool:
    """Whether it is a tensor that any op takes, not one that is spread over devices."""
    return isinstance(x, Tensor) and not hasattr(x, "to_local")


def hook_of(recorder: Recorder, seen: Callable[[Recorder, Tensor], None]) -> Callable[..., Any]:
    """A forward hook that shows a module's call to a recorder.

    Args:
        recorder: Of the site.
        seen: Told of outputs in eager code, to see what comes after them.
    """
    switch, number = recorder.switch, recorder.number

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        if not switch.on:
            return None
        x = args[0] if args else kwargs.get("input")
        if x is None or not (is_plain(x) and is_plain(y)):
            return None
        weight = module.weight if is_plain(module.weight) else None
        has_gradient = torch.is_grad_enabled() and y.requires_grad
        if torch.compiler.is_compiling():
            return tap(y, x, weight, number, has_gradient)
        keys = recorder.forward(x, weight, y, has_gradient)
        if keys is not None:
            seen(recorder, y)
            if has_gradient:
                y.register_hook(functools.partial(recorder.backward, keys))
        return None

    return hook
