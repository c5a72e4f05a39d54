"""Memory that launches leave as they found it: zeros at first, and taken in turns afterwards.

A launch on a stream waits for the one before, so that all of a stream share one. A graph may be
replayed on any stream, and so may what keeps its scratch: these have their own. What is kept is
made by another thread (`outlasting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_OWNED: ContextVar[bool] = ContextVar("lokakern_owned_scratch", default=False)
_OF_CALL: ContextVar[list[Tensor] | None] = ContextVar("lokakern_call_scratch", default=None)
_ON_OWNED: list[Callable[[int], None]] = []
_OF_STREAM: dict[tuple[int, int], Tensor] = {}


@contextmanager
def owned() -> Iterator[None]:
    """Give scratch memory to one owner within the block."""
    token = _OWNED.set(True)
    told = tuple(_ON_OWNED)  # another thread may add one within the block
    for tell in told:
        tell(1)
    try:
        yield
    finally:
        _OWNED.reset(token)
        for tell in told:
            tell(-1)


@contextmanager
def of_one_call() -> Iterator[None]:
    """Let launches within the block, on one stream, share scratch that is cleared once.

    Each clearing is a launch: 2.4 us of an H200 between two kernels of a graph.
    """
    token = _OF_CALL.set([])
    try:
        yield
    finally:
        _OF_CALL.reset(token)


def on_owned(tell: Callable[[int], None]) -> None:
    """Call ``tell`` with 1 and -1 as this thread enters and leaves `owned`."""
    if tell not in _ON_OWNED:
        _ON_OWNED.append(tell)


def zeros(byte_count: int, device: torch.device) -> Tensor:
    """So many bytes: zeros, or what the last launch of the current stream left of them.

    Inside `owned`, and while a graph is captured, they are new, or those of the call
    (`of_one_call`); a graph clears its own at each replay.
    """
    shared = device.type == "cuda" and not _OWNED.get()
    if not shared or torch.cuda.is_current_stream_capturing():
        held = _OF_CALL.get()
        if held and held[0].numel() >= byte_count and held[0].device == device:
            return held[0]
        made = torch.zeros(byte_count, dtype=torch.uint8, device=device)
        if held is not None:
            held[:] = [made]
        return made
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream)
    found = _OF_STREAM.get(key)
    if found is None or found.numel() < byte_count:
        found = outlasting(
            device, lambda: torch.zeros(byte_count, dtype=torch.uint8, device=device)
        )
        _OF_STREAM[key] = found
    return found


def outlasting(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` allocates on the current stream of a device, to be kept beyond the call.

    In mode="reduce-overhead" torch.compile lets a thread allocate in the pool of a CUDA graph, and
    raises an error for what outlives the call, or overwrites it. So another thread makes it.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def work() -> Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "lokakern-memory") as threads:
        return threads.submit(work).result()
