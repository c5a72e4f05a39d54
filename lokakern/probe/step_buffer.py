"""Updates of statistics that wait until their step is over.

Layers only leave some rows and sizes here. Updates of one form are made together, on a GPU on a
stream of its own beside the next steps, and spread evenly over these.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lokakern.probe.statistics import OperandStatistics, Update

MOST_ELEMENTS = 2**24  # of float64 that are worked on together: 128 MiB


# Updates of one form, each of other statistics: owners, and tensors of each.
_Group = tuple[Update, list[Any], list[tuple[Tensor, ...]]]


class StepBuffer:
    """Updates that are still to be made."""

    def __init__(self) -> None:
        self._added: list[tuple[Update, Any, tuple[Tensor, ...]]] = []
        self._groups: deque[_Group] = deque()
        self._pace = 1
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def add(self, update: Update, owner: Any, *tensors: Tensor) -> None:
        """Let an update wait, which takes owners and stacked tensors; all on one device."""
        self._added.append((update, owner, tensors))

    def take_in(self, *, everything: bool = False, steps: int = 1) -> None:
        """Make some updates, so that they are spread over so many steps, or everything.

        Those of an earlier step are made first. While a CUDA graph is captured everything waits: it
        would be captured, too.
        """
        is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_up and torch.cuda.is_current_stream_capturing():
            return
        if self._added:
            self._work(len(self._groups))
            self._groups += self._grouped()
            self._added.clear()
            self._pace = -(-len(self._groups) // steps)
        self._work(len(self._groups) if everything else self._pace)

    def settle(self) -> None:
        """Make all updates; current streams wait for them, the host does not."""
        self.take_in(everything=True)
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _grouped(self) -> list[_Group]:
        found: list[_Group] = []
        open_groups: dict[Any, _Group] = {}
        seen: Counter[Any] = Counter()
        for update, owner, tensors in self._added:
            seen[update, id(owner)] += 1
            form = [(x.device, x.dtype, x.shape) for x in tensors]
            key = (update, seen[update, id(owner)], *form)
            elements = sum(x.numel() for x in tensors)
            if isinstance(owner, OperandStatistics):
                elements += owner.rows.numel()
            group = open_groups.get(key)
            if group is None or (len(group[1]) + 1) * elements > MOST_ELEMENTS:
                group = open_groups[key] = (update, [], [])
                found.append(group)
            group[1].append(owner)
            group[2].append(tensors)
        return found

    def _work(self, count: int) -> None:
        for _ in range(min(count, len(self._groups))):
            update, owners, waiting = self._groups.popleft()
            tensors = [x for many in waiting for x in many]
            device = tensors[0].device
            with torch.inference_mode(False), torch.no_grad(), self._beside(device, tensors):
                columns = zip(*waiting, strict=True)
                stacked = (torch.stack(x) if len(x) > 1 else x[0][None] for x in columns)
                update(owners, *stacked)

    @contextlib.contextmanager
    def _beside(self, device: torch.device, tensors: list[Tensor]) -> Iterator[None]:
        """Run launches beside the current stream, on which the tensors were made; on a CPU, now."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for x in tensors:
            x.record_stream(stream)
