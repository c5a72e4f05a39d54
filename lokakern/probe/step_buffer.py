"""What was seen in a step, until it is taken into the statistics of its sites.

Layers only leave a few rows and sizes here. When the step is over they are taken in, all of one
form together and that in parts, on a GPU on a stream of its own beside the next steps, a part or a
few in each.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.probe.operand import PARTS, Look, taking_in
from lokakern.probe.site import SiteStatistics, add_outputs, cancellation_of, terms_of

_ENDED = object()
MOST_ELEMENTS = 2**24  # of float64 that are worked on together: 128 MiB


class SideStreams:
    """A stream beside the current one for each GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def beside(self, tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
        """What is launched meanwhile runs beside the current stream; on a CPU, at once.

        Args:
            tensors: Made on the current stream, and read meanwhile.
            device: Of all of them.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for x in tensors:
            x.record_stream(stream)

    def join(self) -> None:
        """Let current streams wait for all that was launched beside them; the host does not."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Some rows of an input, and of the gradient of what became of it.

    Attributes:
        inputs: ``[sampled, k]``.
        count: Of how many rows.
        gradients: ``[sampled, n]``.
    """

    inputs: Tensor
    count: int
    gradients: Tensor


class Stash:
    """What is still to be taken in.

    Attributes:
        looks: At operands.
        products: Sizes ``[n]`` of rows of weights' gradients, with their sites, and with the
            operands that they are sums over.
        outputs: Some rows of outputs, ``[sampled, n]``, with their sites.
    """

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.outputs: list[tuple[SiteStatistics, Tensor]] = []
        self.products: list[tuple[SiteStatistics, Tensor, list[Pair]]] = []
        self._tasks: deque[Iterator[None]] = deque()
        self._pace = 1
        self._side = SideStreams()

    def take_in(self, *, everything: bool = False, steps: int = 1) -> None:
        """Take in parts of operands, lest one step pay for all.

        A step that was sampled while others wait is worked off first. A part is some 20 launches.
        While a CUDA graph is captured everything waits: it would be captured, too.

        Args:
            everything: Whether to take in all there is.
            steps: From one step that is sampled to the next: over so many parts are spread.
        """
        is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_up and torch.cuda.is_current_stream_capturing():
            return
        if self.looks:
            self._work()
            products, self.products = self.products, []
            looks, self.looks = self.looks, []
            outputs, self.outputs = self.outputs, []
            self._tasks += [self._taking_in(found) for found in _together(looks)]
            parts = PARTS * len(self._tasks)
            made = [self._adding_outputs(x) for x in _outputs_together(outputs)]
            made += [self._adding_product(*x) for x in products]
            self._tasks += made
            self._pace = -(-(parts + len(made)) // steps)
        self._work(None if everything else self._pace)

    def _work(self, parts: int | None = None) -> None:
        """So many parts, or all."""
        while self._tasks and parts != 0:
            parts = None if parts is None else parts - 1
            if next(self._tasks[0], _ENDED) is _ENDED:
                self._tasks.popleft()

    def _taking_in(self, looks: list[Look]) -> Iterator[None]:
        tensors = [x for look in looks for x in look.tensors]
        parts = taking_in(looks)
        for place in range(PARTS):
            if place:
                yield
            with self._aside(tensors):
                next(parts)
        assert next(parts, _ENDED) is _ENDED  # or there are more

    def _adding_outputs(self, pairs: list[tuple[SiteStatistics, Tensor]]) -> Iterator[None]:
        yield from ()  # as others are iterators, which do a part before each yield, and the last
        rows = [x for _, x in pairs]
        with self._aside(rows):
            add_outputs([site for site, _ in pairs], torch.stack(rows))

    def _adding_product(
        self, site: SiteStatistics, sizes: Tensor, pairs: list[Pair]
    ) -> Iterator[None]:
        yield from ()
        with self._aside([sizes, *(x for pair in pairs for x in (pair.inputs, pair.gradients))]):
            terms = [
                pair.count / len(pair.inputs) * terms_of(pair.gradients, pair.inputs)
                for pair in pairs
            ]
            site.add_cancellation(cancellation_of(torch.stack(terms).sum(dim=0), sizes))

    @contextlib.contextmanager
    def _aside(self, tensors: list[Tensor]) -> Iterator[None]:
        device = tensors[0].device
        with torch.inference_mode(False), torch.no_grad(), self._side.beside(tensors, device):
            yield

    def settle(self) -> None:
        """Take in everything; current streams wait for it."""
        self.take_in(everything=True)
        self._side.join()


def _together(looks: Sequence[Look]) -> Iterator[list[Look]]:
    """Looks of one form, each at another operand, as many as may be worked on together."""
    groups: dict[Hashable, list[Look]] = {}
    seen: Counter[int] = Counter()
    for look in looks:
        seen[id(look.operand)] += 1
        groups.setdefault((seen[id(look.operand)], look.form), []).append(look)
    for group in groups.values():
        size = max(1, MOST_ELEMENTS // group[0].elements)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _outputs_together(
    outputs: Sequence[tuple[SiteStatistics, Tensor]],
) -> Iterator[list[tuple[SiteStatistics, Tensor]]]:
    groups: dict[Hashable, list[tuple[SiteStatistics, Tensor]]] = {}
    seen: Counter[int] = Counter()
    for site, rows in outputs:
        seen[id(site)] += 1
        form = (seen[id(site)], rows.device, rows.dtype, rows.shape)
        groups.setdefault(form, []).append((site, rows))
    for group in groups.values():
        size = max(1, MOST_ELEMENTS // group[0][1].numel())
        yield from (group[start : start + size] for start in range(0, len(group), size))
