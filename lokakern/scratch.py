"""Memory that launches leave as they found it: zeros at first, and taken in turns afterwards.

A launch on a stream waits for the one before, so that all of a stream share one. A graph may be
replayed on any stream, and so may what keeps its scratch: these have their own. What is kept is
made by another thread (`outlasting`).

A graph cannot clear memory once and for all, and to clear it in each replay is a launch between
kernels: 2.4 us of an H200. So calls outside of graphs lay in spares, cleared, which captures take.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lokakern import driver

SPARES = 8  # for captures before the next call outside of one
ALIGNMENT = 512  # of each, as of torch's own memory
# A graph's scratch is in use for as long as the graph, whose end nobody tells: at most 0.5 MB each.
MOST_CAPTURES = 128
_OWNED: ContextVar[bool] = ContextVar("lokakern_owned_scratch", default=False)
_OF_CALL: ContextVar[list[Tensor] | None] = ContextVar("lokakern_call_scratch", default=None)
_ON_OWNED: list[Callable[[int], None]] = []
_OF_STREAM: dict[tuple[int, int], Tensor] = {}
_SPARE: defaultdict[int, list[Tensor]] = defaultdict(list)  # by device
_OF_CAPTURE: dict[tuple[int, int, int], list[Tensor]] = {}  # by device, stream and capture
_TAKING = threading.Lock()  # threads may capture at once


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

    In a graph without a spare each clearing is a launch.
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

    While a graph is captured they are those of its launches on this stream. Inside `owned`, and in
    a capture for which no spare is left, they are new, or those of the call (`of_one_call`), and a
    graph clears them at each replay.
    """
    shared = device.type == "cuda" and not _OWNED.get()
    is_captured = shared and torch.cuda.is_current_stream_capturing()
    if is_captured:
        found = _of_capture(byte_count, device)
        if found is not None:
            return found
    if not shared or is_captured:
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
    spare = _SPARE[key[0]]
    if len(_OF_CAPTURE) < MOST_CAPTURES and (not spare or spare[0].numel() < byte_count):
        _SPARE[key[0]] = _spares(byte_count, device)
    return found


def _of_capture(byte_count: int, device: torch.device) -> Tensor | None:
    """The scratch of a stream in the graph that is being captured, if there is one or a spare."""
    index, stream = device.index or 0, torch.cuda.current_stream(device).cuda_stream
    key = (index, stream, _capture_number(stream))
    with _TAKING:
        kept = _OF_CAPTURE.get(key, [])
        for found in kept:
            if found.numel() >= byte_count:
                return found
        spare = _SPARE[index]
        place = next((i for i, x in enumerate(spare) if x.numel() >= byte_count), None)
        if place is None or len(_OF_CAPTURE) >= MOST_CAPTURES:
            return None
        taken = spare.pop(place)
        _OF_CAPTURE[key] = [*kept, taken]  # launches so far use the smaller one
        return taken


def _capture_number(stream: int) -> int:
    """A number that only one capture has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver._call(
        "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status),
        ctypes.byref(number), None, None, None,
    )  # fmt: skip
    return number.value


def _spares(byte_count: int, device: torch.device) -> list[Tensor]:
    """Spares of a size, cleared before anybody can replay a graph that uses them."""

    def make() -> Tensor:
        size = -(-byte_count // ALIGNMENT) * ALIGNMENT
        made = torch.zeros(SPARES, size, dtype=torch.uint8, device=device)
        with driver._anything_while_capturing():  # another thread may capture, and need not fail
            torch.cuda.current_stream(device).synchronize()
        return made

    return list(outlasting(device, make))


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
