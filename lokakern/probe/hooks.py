"""What is taken of a site's operands, and the op that stands in a compiled graph for its hooks."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lokakern.probe.operand import Look, OperandStatistics, coprime_from
from lokakern.probe.site import SiteStatistics
from lokakern.probe.step_buffer import Pair, Stash

SAMPLED_ROWS = 256  # of a matrix, for all that costs more than two passes
# Of a matrix of `MANY_ROWS` two passes read some `READ_ROWS`: factorization machines have 327680 of
# each batch of 2048, and two passes over all of them took 0.4 of an H200's step.
MANY_ROWS, READ_ROWS = 2**17, 2**14
NO_CALL = -1
MOST_CALLS = 16  # of one site that are looked at in a step: of many micro-batches, the first


class Switch:
    """Whether the present step is sampled, and how.

    Attributes:
        on: Whether operands are looked at.
        weights: Whether weights are, too.
        step: Counts steps.
        stash: What was seen and is still to be taken in.
    """

    def __init__(self, seed: int) -> None:
        self.on = self.weights = False
        self.step = 0
        self.stash = Stash()
        self._share = 0.0  # where in a matrix the sampled rows begin, 0..1
        self._random = random.Random(seed)  # its own, lest a model's dropout change
        self._generators: dict[torch.device, torch.Generator] = {}
        self._samples: dict[tuple[torch.device, int], Sample] = {}
        self._seed = seed

    def turn(self, on: bool, weights: bool) -> None:
        """Decide about the next step."""
        self.on, self.weights = on, weights
        self._share = self._random.random()
        self._samples.clear()
        self.step += 1

    def reseed(self, seen: int) -> None:
        """Draw other random numbers, after so many steps of an earlier session."""
        self._seed += 7919 * (seen + 1)
        self._random = random.Random(self._seed)
        self._generators.clear()

    def sample(self, call: int, device: torch.device) -> Sample:
        """Which rows of a matrix to take, and random keys for them, made on the device.

        The same for all sites in a step: only of one site must they differ, by the call.
        """
        found = self._samples.get((device, call))
        if found is None:
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            keys = torch.rand(
                SAMPLED_ROWS, generator=self._generators[device], dtype=torch.float64, device=device
            )
            found = self._samples[device, call] = Sample(self._share, keys)
        return found


GOLDEN = (math.sqrt(5) - 1) / 2  # of which multiples, less their integers, are spread most evenly


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Rows that are taken of a matrix, and of the gradient of what became of it.

    Attributes:
        share: Where in the matrix they begin, 0..1.
        keys: ``[SAMPLED_ROWS]`` float64, uniform over 0..1.
    """

    share: float
    keys: Tensor
    _places: dict[tuple[tuple[int, ...], int], tuple[Tensor, ...]] = field(default_factory=dict)

    def rows_of(self, x: Tensor) -> Tensor:
        """Some rows of ``[..., columns]``, evenly spread, in memory of their own."""
        if x.is_contiguous():
            x = x.view(-1, x.shape[-1])
        index = self._index(x.shape[:-1])
        return x.index_select(0, index[0]) if len(index) == 1 else x[index]

    def part_of(self, x: Tensor) -> Tensor:
        """Of many rows ``[..., columns]`` some, evenly spread, as a view if they lie in order."""
        count = math.prod(x.shape[:-1])
        if count < MANY_ROWS:
            return x
        if not x.is_contiguous():
            return x[self._index(x.shape[:-1], READ_ROWS)]
        step = coprime_from(count // READ_ROWS, count)
        return x.view(count, -1)[int(self.share * step) :: step]

    def _index(self, shape: tuple[int, ...], most: int = SAMPLED_ROWS) -> tuple[Tensor, ...]:
        """Of the rows; made once for all matrices of a shape.

        The stride has no factor in common with the number of rows: where rows are of samples by
        features, a stride that the features divide would meet one of them alone.
        """
        if (shape, most) not in self._places:
            count = math.prod(shape)
            kept, stride, first = min(most, count), 1, 0
            if kept < count:
                stride = coprime_from(int(GOLDEN * count), count)
                first = int(self.share * count)
            places = (first + stride * torch.arange(kept, device=self.keys.device)) % count
            index = []
            for extent in reversed(shape):
                index.append(places % extent)
                places = places // extent
            self._places[shape, most] = tuple(reversed(index))
        return self._places[shape, most]


class Recorder:
    """Takes what hooks see of one site.

    Args:
        switch: Of the probe.
        n: Outputs; 0 of a lazy layer, which has the shape of its first call.
        k: Inputs, alike.
        has_bias: Whether the layer adds one.
        norm: Of its output, "" where none is known.

    Attributes:
        statistics: None before it was called.
        number: By which an op in a graph finds it.
        steps: In which it was called.
        unseen: Why a call of it was not looked at; "" if none was.
        check: Given the operands and the output of the first call of a sampled step; the weight is
            None where it is not at hand.
    """

    _numbers = itertools.count()

    def __init__(self, switch: Switch, n: int, k: int, has_bias: bool, norm: str) -> None:
        self.switch, self.n, self.k, self.has_bias, self.norm = switch, n, k, has_bias, norm
        self.statistics: SiteStatistics | None = None
        self.number = next(self._numbers)
        self.unseen, self.steps = "", 0
        self.check: Callable[[Tensor, Tensor | None, Tensor], None] | None = None
        self._step, self._calls, self._reruns = -1, 0, 0
        # Of calls in a graph whose gradient is still to come; None of those that count for nothing.
        self._samples: dict[int, Sample | None] = {}
        self._calls_in_graph = 0
        self._inputs: dict[Sample, tuple[Tensor, int]] = {}  # rows, and of how many
        self._pairs: list[Pair] = []  # that wait for the gradient of the weight
        _RECORDERS[self.number] = self

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        y: Tensor,
        has_gradient: bool = False,
    ) -> Sample | None:
        """Look at a call.

        Args:
            x: Input, ``[..., k]``.
            weight: ``[n, k]``, where it is at hand.
            y: Output, ``[..., n]``.
            has_gradient: Whether a gradient of it may come.

        Returns:
            What was taken of it, for `backward`; None where nothing was.
        """
        if is_backward_under_way():  # a checkpoint runs the forward pass again: it counted already
            return None
        self._begin_step()
        self._calls += 1
        if self._calls > MOST_CALLS or not self._fits(x, y) or _is_captured(x):
            return None
        stash = self.switch.stash
        with torch.inference_mode(False), torch.no_grad():
            sample = self.switch.sample(self._calls, x.device)
            statistics = self.statistics_on(x.device)
            x, y = (_matrices(operand) for operand in (x, y))
            statistics.count(x.numel() // self.k)
            rows = self._look(statistics.input, x, sample)
            if has_gradient:
                self._inputs[sample] = rows, x.numel() // self.k
            stash.outputs.append((statistics, sample.rows_of(y)))
            if weight is not None and self.switch.weights and self._calls == 1:
                self.take_weight(weight)
            if self.check is not None and self._calls == 1:
                self.check(x, weight, y)
        return sample

    def take_weight(self, weight: Tensor) -> None:
        """Keep what the site multiplies by, where it is whole: of a shard nothing can be said."""
        if self.statistics is not None and weight.shape == (self.n, self.k):
            with torch.inference_mode(False), torch.no_grad():
                self.statistics.add_weight(weight)

    def forward_in_graph(
        self, x: Tensor, weight: Tensor | None, y: Tensor, has_gradient: bool
    ) -> int:
        """The same of a call whose gradient comes to `backward_in_graph` with the number given."""
        sample = self.forward(x, weight, y, has_gradient)
        if not has_gradient or is_backward_under_way():
            return NO_CALL
        self._calls_in_graph += 1
        self._samples[self._calls_in_graph] = sample
        return self._calls_in_graph

    def sample_of_rerun(self, y: Tensor) -> Sample | None:
        """What to take of the gradient of a call that a checkpoint makes again.

        Where the first pass had no gradient, the second has. It is what was taken of the first
        pass if that was one call, and something else if it is not known which call it was.
        """
        if self.statistics is None or self._step != self.switch.step:
            return None
        if self._calls == 1:
            return self.switch.sample(1, y.device)
        self._reruns += 1
        return self.switch.sample(-self._reruns, y.device) if self._reruns <= MOST_CALLS else None

    def backward_in_graph(self, gradient: Tensor, call: int) -> None:
        """Look at the gradient of a call.

        Of one that a checkpoint made again in the graph, which has no number: of the last call that
        still waits for its own.
        """
        if call == NO_CALL and self._samples:
            call = next(reversed(self._samples))
        sample = self._samples.pop(call, None)
        if sample is not None:
            self.backward(sample, gradient)

    def backward(self, sample: Sample, gradient: Tensor) -> None:
        """Look at the gradient of the output of a call of which this was taken."""
        if self.statistics is None or not is_plain(gradient) or _is_captured(gradient):
            return
        with torch.inference_mode(False), torch.no_grad():
            rows = self._look(self.statistics.grad_output, _matrices(gradient), sample)
        if sample in self._inputs:
            self._pairs.append(Pair(*self._inputs.pop(sample), rows))

    def weight_gradient(self, gradient: Tensor) -> None:
        """Look at the gradient of the weight, ``[n, k]``: how much of its sum over samples is left.

        What samples of one batch have in common, as a sum of zero, no rows of many batches have.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs or self.statistics is None or not is_plain(gradient) or _is_captured(gradient):
            return
        with torch.inference_mode(False), torch.no_grad():
            sizes = torch.linalg.vector_norm(gradient.detach(), dim=1)
            self.switch.stash.products.append((self.statistics, sizes, pairs))

    def statistics_on(self, device: torch.device) -> SiteStatistics:
        """Statistics on a device, to which what was learned follows the model."""
        known = self.statistics
        if known is None or known.device != device:
            self.statistics = SiteStatistics(
                self.n, self.k, device, has_bias=self.has_bias, norm=self.norm
            )
            if known is not None:
                self.switch.stash.settle()
                self.statistics.merge(known)
        assert self.statistics is not None
        return self.statistics

    def _begin_step(self) -> None:
        if self._step != self.switch.step:
            self._step, self._calls, self._reruns = self.switch.step, 0, 0
            self._samples.clear()
            self._inputs.clear()
            self._pairs.clear()
            self.steps += 1

    def _fits(self, x: Tensor, y: Tensor) -> bool:
        if not self.k and x.dim() and y.dim():
            self.n, self.k = y.shape[-1], x.shape[-1]
        fits = x.shape[-1:] == (self.k,) and y.shape == (*x.shape[:-1], self.n)
        if not fits:
            self.unseen = (
                f"it maps {list(x.shape)} to {list(y.shape)}; expected [..., {self.k}] to "
                f"[..., {self.n}]"
            )
        return fits and x.numel() > 0 and y.numel() > 0

    def _look(self, operand: OperandStatistics, x: Tensor, sample: Sample) -> Tensor:
        rows = sample.rows_of(x)
        look = Look.at(operand, sample.part_of(x), rows, sample.keys[: len(rows)])
        self.switch.stash.looks.append(look)
        return rows


def _matrices(x: Tensor) -> Tensor:
    return x.detach() if x.dim() > 1 else x.detach()[None]


def is_backward_under_way() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_plain(x: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor that any op takes: not spread over devices, not nested."""
    return isinstance(x, Tensor) and not hasattr(x, "to_local") and not x.is_nested


_RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


def _is_captured(x: Tensor) -> bool:
    """A CUDA graph would replay what is done now, and the host's part of it never."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# Not `torch.library.custom_op`, whose layers for autograd took half of the host's time of a tap.
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def _tap(
    y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """A copy of y, the output of a site, which is looked at; and the number of the call.

    A compiler may order the gradients of calls as it likes: the number tells them apart. It is on
    the CPU, where nobody waits for it.
    """
    recorder, call = _RECORDERS.get(site), NO_CALL
    if recorder is not None and recorder.switch.on:
        call = recorder.forward_in_graph(x, weight, y, has_gradient)
    return y.clone(), torch.tensor(call)


def _tap_gradient(gradient: Tensor, call: Tensor, site: int) -> Tensor:
    """A copy of the gradient of a site's output, which is looked at."""
    recorder = _RECORDERS.get(site)
    if recorder is not None:
        recorder.backward_in_graph(gradient, int(call))
    return gradient.clone()


def _tap_fake(
    y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty((), dtype=torch.int64)


def _tap_gradient_fake(gradient: Tensor, call: Tensor, site: int) -> Tensor:
    return torch.empty_like(gradient)


_LIBRARY.define(
    "probe_tap(Tensor y, Tensor x, Tensor? weight, int site, bool has_gradient) -> "
    "(Tensor, Tensor)",
    tags=_tags,
)
_LIBRARY.define("probe_tap_gradient(Tensor gradient, Tensor call, int site) -> Tensor", tags=_tags)
_LIBRARY.impl("probe_tap", _tap, "CompositeExplicitAutograd")
_LIBRARY.impl("probe_tap_gradient", _tap_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::probe_tap", _tap_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::probe_tap_gradient", _tap_gradient_fake, lib=_LIBRARY)
