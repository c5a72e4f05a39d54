"""Hooks of a site, and what they take of its operands.

A hook asks one Python bool, whether this step is sampled. In eager code it reads operands and
changes nothing. Traced by torch.compile the bool is a guard: one graph without anything of Probe
for the steps between, and one for sampled steps, in which an op copies the output of the site, so
that no compiler drops it, and its backward copies the gradient. Both read operands when they run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from lokakern.native import NATIVE
from lokakern.nn.module_scan import Joined, has_buffers, weight_of
from lokakern.probe.statistics import (
    SiteStatistics,
    Update,
    add_cancellations,
    add_rows,
    coprime_from,
    sizes_of,
)
from lokakern.probe.step_buffer import StepBuffer

SAMPLED_ROWS = 256  # of a matrix, for all that costs more than two passes
# Of a matrix of `MANY_ROWS` two passes read some `READ_ROWS`: factorization machines have 327680 of
# each batch of 2048, and two passes over all of them took 0.4 of an H200's step.
MANY_ROWS, READ_ROWS = 2**17, 2**14
NO_CALL = -1
MOST_CALLS = 16  # of one site that are sampled in a step: of many micro-batches, the first
GOLDEN = (math.sqrt(5) - 1) / 2  # of which multiples, less their integers, are spread most evenly
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Sampler:
    """Whether the present step is sampled (``on``), and which rows."""

    def __init__(self, seed: int) -> None:
        self.on, self.step, self.buffer = False, 0, StepBuffer()
        self.trains_only = False  # whether calls in evaluation, without gradients, do not count
        self.draws_late = False  # whether random keys are drawn only when they are asked for
        self._share = 0.0  # where in a matrix the sampled rows begin, 0..1
        self._random = random.Random(seed)  # its own, lest a model's dropout change
        self._generators: dict[torch.device, torch.Generator] = {}
        self._samples: dict[tuple[torch.device, int], Sample] = {}
        self._seed = seed

    def turn(self, on: bool) -> None:
        """Begin the next step."""
        self.on = on
        self._share = self._random.random()
        self._samples.clear()
        self.step += 1

    def reseed(self, seen: int) -> None:
        """Draw other random numbers, after so many steps of an earlier session."""
        self._seed += 7919 * (seen + 1)
        self._random = random.Random(self._seed)
        self._generators.clear()

    def sample(self, call: int, device: torch.device) -> Sample:
        """The sample of a call, the same for all sites in a step.

        Only calls of one site must differ.
        """
        found = self._samples.get((device, call))
        if found is None:
            keys = draw = None
            if self.draws_late:
                draw = functools.partial(_drawn_late, (self._seed, self.step, call), device)
            else:
                if device not in self._generators:
                    self._generators[device] = torch.Generator(device).manual_seed(self._seed)
                keys = _drawn(self._generators[device])
            found = self._samples[device, call] = Sample(self._share, device, keys, draw)
        return found


def _drawn(generator: torch.Generator) -> Tensor:
    device = generator.device
    return torch.rand(SAMPLED_ROWS, generator=generator, dtype=torch.float64, device=device)


def _drawn_late(seed: object, device: torch.device) -> Tensor:
    """Keys by a generator of their own, whose seed tells them, so that their order is no matter."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    return _drawn(torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1))


class Sample:
    """Rows that are taken of a matrix, and of the gradient of its product.

    Attributes:
        share: Where in the matrix they begin, 0..1.
    """

    __slots__ = ("_device", "_draw", "_keys", "_places", "_strides", "share")

    def __init__(
        self,
        share: float,
        device: torch.device,
        keys: Tensor | None = None,
        draw: Callable[[], Tensor] | None = None,
    ) -> None:
        self.share, self._device, self._keys, self._draw = share, device, keys, draw
        self._places: dict[tuple[tuple[int, ...], int], tuple[Tensor, ...]] = {}
        self._strides: dict[int, tuple[int, int, int, int, int]] = {}

    @property
    def keys(self) -> Tensor:
        """Random numbers, ``[SAMPLED_ROWS]`` float64, uniform over 0..1, on the device."""
        if self._keys is None:
            assert self._draw is not None
            self._keys = self._draw()
        return self._keys

    def rows_of(self, x: Tensor) -> Tensor:
        """Some rows of ``[..., columns]``, evenly spread, in memory of their own."""
        if x.is_contiguous():
            x = x.view(-1, x.shape[-1])
        index = self._index(x.shape[:-1])
        return x.index_select(0, index[0]) if len(index) == 1 else x[index]

    def index_of(self, count: int) -> Tensor:
        """Places of the rows that are taken of so many."""
        return self._index((count,))[0]

    def part_of(self, x: Tensor) -> Tensor:
        """Of many rows ``[..., columns]`` some, evenly spread, as a view if they lie in order."""
        count = math.prod(x.shape[:-1])
        if count < MANY_ROWS:
            return x
        if not x.is_contiguous():
            return x[self._index(x.shape[:-1], READ_ROWS)]
        first, step = self.stride_of(count)
        return x.view(count, -1)[first::step]

    def places_of(self, count: int) -> tuple[int, int, int, int, int]:
        """Of so many rows those that are read, and those that are taken; see window.h."""
        if count not in self._strides:
            kept = min(SAMPLED_ROWS, count)
            self._strides[count] = (*self.stride_of(count), *self._first_and_stride(count), kept)
        return self._strides[count]

    def stride_of(self, count: int) -> tuple[int, int]:
        """The first of the rows of which sizes are read, of so many, and steps to the next."""
        if count < MANY_ROWS:
            return 0, 1
        step = coprime_from(count // READ_ROWS, count)
        return int(self.share * step), step

    def _index(self, shape: tuple[int, ...], most: int = SAMPLED_ROWS) -> tuple[Tensor, ...]:
        """Indices of rows, made once for all matrices of a shape."""
        if (shape, most) not in self._places:
            count = math.prod(shape)
            kept = min(most, count)
            first, stride = self._first_and_stride(count, most)
            places = (first + stride * torch.arange(kept, device=self._device)) % count
            index = []
            for extent in reversed(shape[1:]):
                index.append(places % extent)
                places = places // extent
            self._places[shape, most] = (places, *reversed(index))
        return self._places[shape, most]

    def _first_and_stride(self, count: int, most: int = SAMPLED_ROWS) -> tuple[int, int]:
        """The first row, and the stride, which has no factor in common with the number of rows.

        Where rows are of samples by features, a stride that the features divide would meet one of
        them alone.
        """
        if count <= most:
            return 0, 1
        return int(self.share * count), coprime_from(int(GOLDEN * count), count)


class Taken:
    """What a launch took of a call's operand, in the place of its tensors."""

    __slots__ = ("_sample", "_tensors", "by", "place")

    def __init__(self, by: Any, place: int, sample: Sample) -> None:
        self.by, self.place, self._sample = by, place, sample  # a `WindowPass`, see window.h
        self._tensors: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        """Sizes of rows and of columns, rows, and their keys, as of `add_rows`."""
        if not self._tensors:
            *sizes, rows = self.by.tensors(self.place)
            self._tensors = (*sizes, rows, self._sample.keys[: len(rows)])
        return self._tensors


class Wanted(NamedTuple):
    """An operand of which a sample is to be taken."""

    recorder: Recorder
    operand: Any  # statistics, or a window's part
    x: Tensor  # ``[..., columns]``
    sample: Sample
    pairs: int  # number of its rows, where its gradient will come; else 0
    is_gradient: bool = False


@contextlib.contextmanager
def taking() -> Iterator[list[Wanted]]:
    """Samples of operands that are added to the list are taken at the end.

    By a launch for all operands of a watch where there is its kernel, else in C++ by one call, or
    by torch, with the same bits; nothing is recorded for gradients.
    """
    wanted: list[Wanted] = []
    has_gradients = torch.is_grad_enabled()
    # Contexts of torch take the host 40 us where it is not warm, and training needs half of one.
    is_inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if is_inference else contextlib.nullcontext():
        torch._C._set_grad_enabled(False)
        try:
            yield wanted
            _take(wanted)
        finally:
            torch._C._set_grad_enabled(has_gradients)


def _take(wanted: list[Wanted]) -> None:
    native = NATIVE.module
    if native is not None:
        together = [one for one in wanted if one.x.is_contiguous()]
        left = _taken_by_a_launch(native, together)
        if left:
            counts = [one.x.numel() // one.x.shape[-1] for one in left]
            given = list(zip(left, counts, strict=True))
            found = native.take_samples(
                [one.x for one in left],
                [one.sample.index_of(count) for one, count in given],
                [one.sample.stride_of(count) for one, count in given],
            )
            for one, (*sizes, rows) in zip(left, found, strict=True):
                one.recorder.keep(one, sizes, rows)
        wanted = [one for one in wanted if not one.x.is_contiguous()]
    for one in wanted:
        rows = one.sample.rows_of(one.x)
        one.recorder.keep(one, [*sizes_of(one.sample.part_of(one.x))], rows)


def _taken_by_a_launch(native: Any, wanted: list[Wanted]) -> list[Wanted]:
    """Take samples of windows, if the kernel takes all of them; those that are left."""
    windows = [one for one in wanted if one.recorder.elements]
    if not windows:
        return wanted
    places = [one.sample.places_of(one.x.numel() // one.x.shape[-1]) for one in windows]
    by = native.take_pass([one.x for one in windows], places, windows[0].recorder.elements)
    if by is None:
        return wanted
    for place, one in enumerate(windows):
        one.recorder.keep_taken(one, Taken(by, place, one.sample))
    return [one for one in wanted if not one.recorder.elements]


class Recorder:
    """Samples the operands of one site; n and k of a lazy layer are 0 before its first call."""

    _numbers = itertools.count()
    elements = 0  # of an operand, which a launch picks of its rows; 0: it takes no samples

    def __init__(
        self,
        sampler: Sampler,
        n: int,
        k: int,
        has_bias: bool,
        norm: str,
        padding: tuple[int, int] = (0, 0),
    ) -> None:
        self.sampler, self.n, self.k, self.has_bias, self.norm = sampler, n, k, has_bias, norm
        self.padding = padding
        self.statistics: SiteStatistics | None = None
        self.number = next(self._numbers)  # by which an op in a graph finds it
        self.unseen, self.steps = "", 0  # why a call was not sampled; sampled steps with a call
        # Given the operands and the output of the first call of a sampled step.
        self.check: Callable[[Tensor, Tensor | None, Tensor], None] | None = None
        self._step, self._calls, self._reruns = -1, 0, 0
        # Of calls in a graph whose gradient is still to come; None of those that count for nothing.
        self._samples: dict[int, Sample | None] = {}
        # Rows, or what holds them, and of how many; and the same with rows of the gradient.
        self._inputs: dict[Sample, tuple[Tensor | Taken, int]] = {}
        self._pairs: list[tuple[Tensor | Taken, int, Tensor | Taken]] = []
        _RECORDERS[self.number] = self

    def forward(
        self, x: Tensor, weight: Tensor | None, y: Tensor, has_gradient: bool, wanted: list[Wanted]
    ) -> Sample | None:
        """Count a call ``x [..., k]`` to ``y [..., n]``; the weight is None if it is not at hand.

        What is to be taken of it is added to ``wanted``. `backward` samples the gradient by the
        result; None where nothing is sampled.
        """
        if self._step != self.sampler.step:
            self._step, self._calls, self._reruns = self.sampler.step, 0, 0
            self._samples.clear()
            self._inputs.clear()
            self._pairs.clear()
            self.steps += 1
        self._calls += 1
        if self._calls > MOST_CALLS or not self._fits(x, y) or _is_captured(x):
            return None
        sample = self.sampler.sample(self._calls, x.device)
        statistics = self.statistics_on(x.device)
        x = _as_rows(x)
        count = x.numel() // self.k
        statistics.count({count: 1})
        statistics.see_half(y.dtype)
        if self._calls == 1 and weight is not None:
            self.take_weight(weight)
        if self._calls == 1 and self.check is not None:
            self.check(x, weight, _as_rows(y))
        wanted.append(Wanted(self, statistics.input, x, sample, count if has_gradient else 0))
        return sample

    def take_weight(self, weight: Tensor) -> None:
        """Keep the weight, where it is whole: a shard tells nothing."""
        if self.statistics is not None and weight.shape == (self.n, self.k):
            with torch.inference_mode(False), torch.no_grad():
                self.statistics.add_weight(weight)

    def forward_in_graph(
        self, x: Tensor, weight: Tensor | None, y: Tensor, has_gradient: bool, wanted: list[Wanted]
    ) -> int:
        """Count a call in a graph; its gradient comes to `backward_in_graph` with the number."""
        if is_backward_under_way():  # a checkpoint runs the forward pass again: it counted already
            return NO_CALL
        sample, call = self.forward(x, weight, y, has_gradient, wanted), NO_CALL
        if has_gradient:
            self.see_input_gradient()  # which the graph does not tell
            call = next(self._numbers)
            self._samples[call] = sample
        return call

    def sample_of_rerun(self, y: Tensor) -> Sample | None:
        """The sample of a call that a checkpoint repeats, whose first pass had no gradient.

        It is that of the first pass if there was one call; else it is not known which call it was.
        """
        if self.statistics is None or self._step != self.sampler.step:
            return None
        if self._calls == 1:
            return self.sampler.sample(1, y.device)
        self._reruns += 1
        return self.sampler.sample(-self._reruns, y.device) if self._reruns <= MOST_CALLS else None

    def backward_in_graph(self, gradient: Tensor, call: int, wanted: list[Wanted]) -> None:
        """Add the gradient of a call in a graph to what is to be taken.

        A call that a checkpoint repeats has no number: it is the last one that still waits.
        """
        if call == NO_CALL and self._samples:
            call = next(reversed(self._samples))
        sample = self._samples.pop(call, None)
        if sample is not None:
            self.backward(sample, gradient, wanted)

    def backward(self, sample: Sample, gradient: Tensor, wanted: list[Wanted]) -> None:
        """Add the gradient of the output of a call to what is to be taken."""
        if self.statistics is None or not is_plain(gradient) or _is_captured(gradient):
            return
        operand = self.statistics.grad_output
        wanted.append(Wanted(self, operand, _as_rows(gradient), sample, 0, is_gradient=True))

    def keep(self, wanted: Wanted, sizes: list[Tensor], rows: Tensor) -> None:
        """Take in what was taken of an operand."""
        self._add(add_rows, wanted.operand, *sizes, rows, wanted.sample.keys[: len(rows)])
        self._pair(wanted, rows)

    def keep_taken(self, wanted: Wanted, taken: Taken) -> None:
        """Take in what a launch took of an operand, of a window alone."""
        raise NotImplementedError

    def _pair(self, wanted: Wanted, rows: Tensor | Taken) -> None:
        if wanted.pairs:
            self._inputs[wanted.sample] = rows, wanted.pairs
        elif wanted.is_gradient and wanted.sample in self._inputs:
            self._pairs.append((*self._inputs.pop(wanted.sample), rows))

    @unserializable_hook  # type: ignore[untyped-decorator]
    def weight_gradient(self, gradient: Tensor) -> None:
        """Measure how much of the weight's gradient ``[n, k]``, a sum over samples, cancels.

        A hook of the parameter, which is saved without it. Rows of one batch may sum to zero, where
        rows of many batches do not.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs or self.statistics is None or not is_plain(gradient) or _is_captured(gradient):
            return
        if NATIVE.module is not None:
            sizes = NATIVE.module.norms_of_rows(gradient)
        else:
            with torch.inference_mode(False), torch.no_grad():
                sizes = torch.linalg.vector_norm(gradient.detach(), dim=1)
        update = functools.partial(add_cancellations, [count for _, count, _ in pairs])
        tensors = [x for inputs, _, gradients in pairs for x in (inputs, gradients)]
        self._add(update, self.statistics, sizes, *tensors)

    def statistics_on(self, device: torch.device) -> SiteStatistics:
        """Statistics on a device; earlier ones follow the model there."""
        known = self.statistics
        if known is not None and known.device == device:
            return known
        found = self.empty_statistics(device)
        if known is not None:
            self.sampler.buffer.settle()
            found.merge(known)
        self.statistics = found
        return found

    def empty_statistics(self, device: torch.device) -> SiteStatistics:
        return SiteStatistics(
            self.n, self.k, device, has_bias=self.has_bias, norm=self.norm, padding=self.padding,
            needs_input_gradient=False,
        )  # fmt: skip

    def see_input_gradient(self) -> None:
        """Of a call that was seen, the input needs a gradient."""
        if self.statistics is not None:
            self.statistics.needs_input_gradient = True

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

    def _add(self, update: Update, owner: Any, *tensors: Any) -> None:
        self.sampler.buffer.add(update, owner, *tensors)


def _as_rows(x: Tensor) -> Tensor:
    return x.detach() if x.dim() > 1 else x.detach()[None]


def is_backward_under_way() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_plain(x: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor that any op takes: not spread over devices, not nested."""
    return isinstance(x, Tensor) and not hasattr(x, "to_local") and not x.is_nested


def _is_captured(x: Tensor) -> bool:
    """A CUDA graph would replay what is done now, and the host's part of it never."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_GONE = object()


class Hook:
    """A hook of a module, which a copy of the module removes at its first call."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, module: torch.nn.Module, *args: Any) -> Any:
        if self._function is not None:
            return self._function(module, *args)
        if not torch.compiler.is_compiling():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if hook is self]:
                    del hooks[key]
                    module._forward_hooks_with_kwargs.pop(key, None)
        return None

    def __deepcopy__(self, _memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def hook_of(recorder: Recorder, seen: Callable[[Recorder, Tensor], None]) -> Hook:
    """A forward hook that shows a module's calls to a recorder; in eager code `seen`, too."""
    sampler, number = recorder.sampler, recorder.number
    torch.compiler.assume_constant_result(_is_exported_or_transformed)  # type: ignore[no-untyped-call]

    # Removed while another thread calls the module, it gets no arguments by name.
    def hook(module: Any, args: tuple[Any, ...], kwargs: Any, y: Any = _GONE) -> Any:
        if not sampler.on or (torch.compiler.is_compiling() and _is_exported_or_transformed()):
            return None
        if y is _GONE:
            return None
        if sampler.trains_only and not module.training and not torch.is_grad_enabled():
            return None
        if not isinstance(module, Joined):
            return sampled(module, args, kwargs, y)
        if not all(map(is_plain, y)):
            recorder.unseen = "its outputs are no plain tensors"
            return None
        # All columns of the product together, as copies: gradients come to parts of the whole.
        whole = torch.cat(y, -1)
        tapped = sampled(module, args, kwargs, whole)
        whole = whole if tapped is None else tapped
        return whole.split([part.shape[-1] for part in y], -1)

    def sampled(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        is_compiling = torch.compiler.is_compiling()
        if (
            not is_plain(x)
            or not is_plain(y)
            or not {x.dtype, y.dtype} <= DTYPES
            or not (is_compiling or _is_at_hand(x))
        ):
            if not is_compiling:
                recorder.unseen = (
                    "its input or its output is no plain tensor of float16, bfloat16, float32 or "
                    "float64"
                )
            return None
        if getattr(module, "_is_replica", False):
            recorder.unseen = "nn.DataParallel runs copies of it; use DistributedDataParallel"
            return None
        # A parametrized one is made when it is asked for, and with buffers not in a graph.
        weight: Any = None if is_compiling and has_buffers(module) else weight_of(module)
        weight = weight if is_plain(weight) else None
        has_gradient = torch.is_grad_enabled() and y.requires_grad
        if is_compiling:
            return _Tap.apply(y, x, weight, number, has_gradient)  # type: ignore[no-untyped-call]
        if is_backward_under_way():
            sample = recorder.sample_of_rerun(y) if has_gradient else None
        else:
            with taking() as wanted:
                sample = recorder.forward(x, weight, y, has_gradient, wanted)
            if sample is not None:
                seen(recorder, y)
        if has_gradient and x.requires_grad:
            recorder.see_input_gradient()
        if sample is not None and has_gradient:
            y.register_hook(functools.partial(_sample_gradient, recorder, sample))  # type: ignore[no-untyped-call]
        return None

    return Hook(hook)


def _sample_gradient(recorder: Recorder, sample: Sample, gradient: Tensor) -> None:
    with taking() as wanted:
        recorder.backward(sample, gradient, wanted)


def _is_at_hand(x: Tensor) -> bool:
    """Whether it holds numbers: not within torch.func, and not faked."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped


def _is_exported_or_transformed() -> bool:
    """Whether the traced code will run elsewhere, or within torch.func, where taps have no rule.

    Asked while it is traced (`hook_of`), not when it runs.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    return is_transformed or torch.compiler.is_exporting()


class _Tap(torch.autograd.Function):
    """A copy of the output of a site; both passes are sampled."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool
    ) -> Tensor:
        copy, call = torch.ops.lokakern.probe_tap(y, x, weight, site, has_gradient)
        ctx.save_for_backward(call)
        ctx.site = site
        return copy  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (call,) = ctx.saved_tensors
        found = torch.ops.lokakern.probe_tap_gradient(gradients[0], call, ctx.site)
        return found, None, None, None, None


_RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


def _tap(
    y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """A copy of the output y of a site, and the number of the call.

    A compiler may order the gradients of calls as it likes: the number tells them apart. It is on
    the CPU, where reading it waits for nothing.
    """
    (number,) = _taps([y], [x], [weight], [site], [has_gradient])
    return y.clone(), number


def _taps(
    ys: list[Tensor], xs: list[Tensor], weights: list[Tensor | None], sites: list[int],
    have_gradients: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Several `_tap` behind all else in a graph, without copies: the numbers of the calls."""
    calls = []
    with taking() as wanted:
        for y, x, weight, site, has_gradient in zip(
            ys, xs, weights, sites, have_gradients, strict=True
        ):
            recorder, call = _RECORDERS.get(site), NO_CALL
            if recorder is not None and recorder.sampler.on:
                call = recorder.forward_in_graph(x, weight, y, has_gradient, wanted)
            calls.append(call)
    native = NATIVE.module
    return [*map(torch.tensor, calls)] if native is None else native.as_tensors(calls)


def _tap_gradient(gradient: Tensor, call: Tensor, site: int) -> Tensor:
    _take_gradients([gradient], [call], [site])
    return gradient.clone()


def _tap_gradients(
    result: Tensor, gradients: list[Tensor], calls: list[Tensor], sites: list[int]
) -> Tensor:
    """Several `_tap_gradient` behind all else in a graph, of which a copy of a result is left."""
    _take_gradients(gradients, calls, sites)
    return result.clone()


def _take_gradients(gradients: list[Tensor], calls: list[Tensor], sites: list[int]) -> None:
    with taking() as wanted:
        for gradient, call, site in zip(gradients, calls, sites, strict=True):
            recorder = _RECORDERS.get(site)
            if recorder is not None:
                recorder.backward_in_graph(gradient, int(call), wanted)


# Not `torch.library.custom_op`, whose layers for autograd took half of the host's time of a tap.
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_tags = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
for _schema, _function, _fake in (
    ("probe_tap(Tensor y, Tensor x, Tensor? weight, int site, bool has_gradient) -> "
     "(Tensor, Tensor)",
     _tap, lambda y, *_: (torch.empty_like(y), torch.empty((), dtype=torch.int64))),
    ("probe_tap_gradient(Tensor gradient, Tensor call, int site) -> Tensor",
     _tap_gradient, lambda gradient, *_: torch.empty_like(gradient)),
    ("probe_taps(Tensor[] ys, Tensor[] xs, Tensor?[] weights, int[] sites, bool[] have_gradients) "
     "-> Tensor[]",
     _taps, lambda ys, *_: [torch.empty((), dtype=torch.int64) for _ in ys]),
    ("probe_tap_gradients(Tensor result, Tensor[] gradients, Tensor[] calls, int[] sites) -> "
     "Tensor",
     _tap_gradients, lambda result, *_: torch.empty_like(result)),
):  # fmt: skip
    _name = _LIBRARY.define(_schema, tags=_tags)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lokakern::{_name}", _fake, lib=_LIBRARY)
