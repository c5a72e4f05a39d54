"""The Timing contract: medians of interleaved replays of CUDA graphs with cold operands.

Regimes: ``graph-cold`` (calls use distinct operand sets that exceed twice the last-level cache),
``graph-hot`` (one operand set), ``eager`` (cold sets, launched from the host, whose time counts;
the only regime of a CPU).
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lokakern.errors import DeviceLostError, MeasurementError, UnknownNameError
from lokakern.selection.ties import margin_us
from lokakern.types import REGIMES

BUDGET_MS = 25.0  # longest time of the replays of a candidate
FEWEST_REPLAYS = 5
MOST_REPLAYS = 200
# Replays stop when the margin of the median is below this share, a twelfth of `TIE_FLOOR`, the
# difference between two candidates that counts.
SETTLED_REPLAYS, SETTLED_SHARE = 20, 0.0025
DROP_AFTER, DROP_FACTOR = 3, 1.5  # a candidate this much slower after so many replays is dropped
# A tiny problem has a thousand cold sets: their capture takes 20 ms, with an emulation a second,
# and a slow candidate replays them for long. So a graph of a few calls screens out slow candidates.
# Its operands may stay in the cache, which makes it look faster, so that only a factor of 2 counts.
SCREENED_CALLS, SCREEN_FACTOR = 8, 2.0
VOID_CLOCK_SHARE = 0.9  # a replay with a lower clock, relative to the candidate's median, is void
GRAPH_US = 300.0  # least duration of a graph, so that its launch (about 2 us) is noise
WARM_SECONDS = 0.5
MOST_CALLED = 8  # calls that are repeated to check outputs; a tiny problem has a thousand


@dataclass
class Contender:
    """A candidate to be timed: one call for each operand set, and its failure, if any."""

    name: str
    calls: Sequence[Callable[[], None]]
    status: str = "ok"
    reason: str = ""
    samples_us: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    calls_per_replay: int = 0
    dropped: bool = False
    _replay: Callable[[], float] | None = None
    _graph: torch.cuda.CUDAGraph | None = None
    screened: bool = False  # timed by SCREENED_CALLS only, whose operands may stay in the cache

    def run_all(self) -> None:
        """Repeat the timed launches: the graph if there is one, else the first calls."""
        if self._graph is not None and not self.screened:
            self._graph.replay()
            torch.cuda.synchronize()
            return
        for call in self.calls[:MOST_CALLED]:
            call()

    def fail(self, error: Exception) -> None:
        self.status, self.reason = status_and_reason(error)
        self._replay = None


def status_and_reason(error: Exception) -> tuple[str, str]:
    """Status and reason of a record for an exception; frees cached memory if it ran out."""
    status = "error"
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        status = "out_of_memory"
        torch.cuda.empty_cache()
    return status, f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:500]


def _nothing(_contender: Contender) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a contender's time per call, in microseconds."""

    p20: float
    p50: float
    p80: float
    replay_count: int
    void_count: int
    clock_mhz: float | None


def quantiles(contender: Contender) -> Quantiles:
    """Quantiles over the replays that are not void.

    Raises:
        MeasurementError: There are no samples.
    """
    samples, clocks = contender.samples_us, contender.clocks_mhz
    if not samples:
        raise MeasurementError(f"{contender.name}: no replay was timed")
    kept = samples
    clock = None
    if len(clocks) == len(samples):
        clock = statistics.median(clocks)
        kept = [s for s, c in zip(samples, clocks, strict=True) if c >= VOID_CLOCK_SHARE * clock]
    kept = sorted(kept)
    p20, p50, p80 = (_quantile(kept, q) for q in (0.2, 0.5, 0.8))
    return Quantiles(p20, p50, p80, len(kept), len(samples) - len(kept), clock)


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def time_contenders(
    contenders: Sequence[Contender],
    *,
    regime: str,
    device: torch.device,
    floor_us: float,
    seed: int = 0,
    budget_ms: float = BUDGET_MS,
    announce: Callable[[Contender], None] = _nothing,
    inspect: Callable[[Contender], None] = _nothing,
    keep_all: bool = False,
) -> None:
    """Time contenders against each other; sets their samples, status and reason.

    Each contender is warmed up first, which compiles it. Rounds visit all contenders in random
    order; a contender that is 1.5 times slower than the fastest after 3 replays is dropped.

    Args:
        contenders: A contender that fails keeps its status and does not stop the others.
        regime: One of `REGIMES`; a CPU has only "eager".
        device: Torch device.
        floor_us: Least time of a call, which determines the number of calls in a replay.
        seed: Seed of the order within rounds.
        budget_ms: Longest time of the replays of a contender.
        announce: Called with a contender before each of its launches.
        inspect: Called with a contender after its first launches.
        keep_all: Whether to time slow contenders as well as the others.

    Raises:
        UnknownNameError: The regime is unknown.
        MeasurementError: The device has no graphs.
        DeviceLostError: A contender left the device unusable.
    """
    check_regime(regime, device)
    graphs = regime != "eager"
    for contender in contenders:
        announce(contender)
        with faults_of(contender, device):
            if graphs:
                _warm_up(contender)
            else:
                _prepare_eager(contender, device)
            inspect(contender)
    if graphs:
        if not keep_all:
            _screen(contenders, device, floor_us, announce)
        for contender in contenders:
            if contender.status == "ok" and not contender.screened:
                announce(contender)
                with faults_of(contender, device):
                    _capture(contender, contender.calls, floor_us)
    running = [c for c in contenders if c._replay is not None and not c.screened]
    _race(running, device, seed, budget_ms, announce, keep_all)
    best = min((statistics.median(c.samples_us) for c in running if c.samples_us), default=0.0)
    # The time of the screen is a lower bound. Contenders that may be less than 1.5 times slower by
    # it are timed in full.
    again = [
        c
        for c in contenders
        if c.screened and c.status == "ok" and statistics.median(c.samples_us) <= DROP_FACTOR * best
    ]
    for contender in again:
        contender.screened = contender.dropped = False
        contender.samples_us.clear()
        announce(contender)
        with faults_of(contender, device):
            _capture(contender, contender.calls, floor_us)
    _race([c for c in again if c.status == "ok"], device, seed, budget_ms, announce)


def _race(
    running: Sequence[Contender],
    device: torch.device,
    seed: int,
    budget_ms: float,
    announce: Callable[[Contender], None],
    keep_all: bool = False,
) -> None:
    """Replay contenders in rounds, until each has enough samples or is dropped."""
    read_clock = clock_reader(device)
    for contender in running:  # a first replay uploads the graph; its time does not count
        announce(contender)
        with faults_of(contender, device):
            _run(contender)
    order = random.Random(seed)
    spent_us = {c.name: 0.0 for c in running}
    while True:
        active = [c for c in running if _wants_more(c, spent_us[c.name], budget_ms)]
        if not active:
            return
        order.shuffle(active)
        for contender in active:
            announce(contender)
            with faults_of(contender, device):
                elapsed = _run(contender)
                contender.samples_us.append(elapsed / contender.calls_per_replay)
                spent_us[contender.name] += elapsed
                clock = read_clock()
                if clock is not None:
                    contender.clocks_mhz.append(clock)
        if not keep_all:
            _drop_laggards(running)


def check_regime(regime: str, device: torch.device) -> None:
    """Check that a regime can be timed on a device.

    Raises:
        UnknownNameError: The regime is unknown.
        MeasurementError: The device has no graphs.
    """
    if regime not in REGIMES:
        raise UnknownNameError(
            f"regime {regime!r} is unknown; expected one of {', '.join(REGIMES)}"
        )
    if regime != "eager" and device.type != "cuda":
        raise MeasurementError(f"regime {regime!r} needs a GPU; a {device.type} has only 'eager'")


def _run(contender: Contender) -> float:
    assert contender._replay is not None  # prepared
    return contender._replay()


@contextlib.contextmanager
def faults_of(contender: Contender, device: torch.device) -> Iterator[None]:
    """Turn an exception of a contender into its status.

    Raises:
        DeviceLostError: The device is unusable, as after an illegal memory access.
    """
    try:
        yield
    except Exception as error:  # libraries raise any exception; the sweep continues
        contender.fail(error)
        if device.type == "cuda" and contender.status == "error":
            try:
                torch.cuda.synchronize()
            except Exception:  # the context keeps its error until the process ends
                raise DeviceLostError(contender.reason) from error


def _wants_more(contender: Contender, spent_us: float, budget_ms: float) -> bool:
    if contender._replay is None or contender.dropped:
        return False
    count = len(contender.samples_us)
    if count < FEWEST_REPLAYS:
        return True
    if count >= MOST_REPLAYS or spent_us >= budget_ms * 1e3:
        return False
    return count < SETTLED_REPLAYS or count % 10 > 0 or not _settled(contender.samples_us)


def _settled(samples_us: Sequence[float]) -> bool:
    ordered = sorted(samples_us)
    p20, p50, p80 = (_quantile(ordered, q) for q in (0.2, 0.5, 0.8))
    return margin_us(p20, p80, len(ordered)) <= SETTLED_SHARE * p50


def _drop_laggards(running: Sequence[Contender]) -> None:
    timed = [c for c in running if c.status == "ok" and len(c.samples_us) >= DROP_AFTER]
    if not timed:
        return
    best = min(statistics.median(c.samples_us) for c in timed)
    for contender in timed:
        if statistics.median(contender.samples_us) > DROP_FACTOR * best:
            contender.dropped = True


def _repeats(calls: Sequence[Callable[[], None]], floor_us: float) -> int:
    """Number of calls in a graph: all of them, repeated to at least GRAPH_US."""
    return len(calls) * max(1, math.ceil(GRAPH_US / (len(calls) * max(floor_us, 0.5))))


def _warm_up(contender: Contender) -> None:
    for call in (contender.calls[0], contender.calls[-1]):
        call()
    torch.cuda.synchronize()


def _screen(
    contenders: Sequence[Contender],
    device: torch.device,
    floor_us: float,
    announce: Callable[[Contender], None],
) -> None:
    """Drop slow contenders by a graph of a few calls, where a full graph is long."""
    running = [c for c in contenders if c.status == "ok"]
    if len(running) < 2 or _repeats(running[0].calls, floor_us) <= SCREENED_CALLS:
        return
    for contender in running:
        announce(contender)
        with faults_of(contender, device):
            _capture(contender, contender.calls[:SCREENED_CALLS], math.inf)
            contender.screened = True
            _run(contender)  # uploads the graph
            for _ in range(DROP_AFTER):
                contender.samples_us.append(_run(contender) / contender.calls_per_replay)
    timed = [c for c in running if c.status == "ok"]
    best = min((statistics.median(c.samples_us) for c in timed), default=0.0)
    for contender in timed:
        if statistics.median(contender.samples_us) > SCREEN_FACTOR * best:
            contender.dropped = True
        else:
            contender.screened = False
            contender.samples_us.clear()


def _capture(contender: Contender, calls: Sequence[Callable[[], None]], floor_us: float) -> None:
    """Capture a graph of calls, repeated to at least GRAPH_US."""
    count = _repeats(calls, floor_us)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for place in range(count):
            calls[place % len(calls)]()
    contender.calls_per_replay = count
    contender._graph = graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    contender._replay = replay


def _prepare_eager(contender: Contender, device: torch.device) -> None:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    contender.calls[0]()
    synchronize()
    begun = time.perf_counter_ns()
    contender.calls[-1]()
    synchronize()
    once_us = max((time.perf_counter_ns() - begun) / 1e3, 1.0)
    # A CPU is slow: replays share the many cold sets.
    count = max(1, min(len(contender.calls), math.ceil(BUDGET_MS * 1e3 / FEWEST_REPLAYS / once_us)))
    contender.calls_per_replay = count
    position = 0

    def replay() -> float:
        nonlocal position
        chosen = [contender.calls[(position + i) % len(contender.calls)] for i in range(count)]
        position += count
        synchronize()
        begun = time.perf_counter_ns()
        for call in chosen:
            call()
        synchronize()
        return (time.perf_counter_ns() - begun) / 1e3

    contender._replay = replay


def release(contenders: Sequence[Contender]) -> None:
    """Free the graphs and the operands of their calls."""
    for contender in contenders:
        contender._replay = contender._graph = None
        contender.calls = ()


def warm(device: torch.device) -> None:
    """Raise the clocks: multiply random matrices for half a second."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    begun = time.monotonic()
    while time.monotonic() - begun < WARM_SECONDS:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def clock_reader(device: torch.device) -> Callable[[], float | None]:
    """A function that reads the SM clock in MHz; it returns None without NVML."""
    if device.type != "cuda" or torch.version.hip is not None:
        return lambda: None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except Exception:  # no NVML: the clock stays unknown
        return lambda: None

    def read() -> float | None:
        return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

    return read


def timer_name(regime: str, contender: Contender) -> str:
    """Name of the timer; times of different timers must not be compared."""
    if regime == "eager":
        return "host clock"
    if contender.screened:
        return f"device events around {SCREENED_CALLS} calls, a lower bound"
    return "device events around a graph"
