"""Paired times of a user's step: two variants of a model in turn, and the ratio of their times.

A round times the variants as A B B A, or B A A B, so that a drift of the device cancels within it.
A ratio is the median over rounds; its interval comes from order statistics, which assume no
distribution of the noise.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lokakern import native
from lokakern.errors import MeasurementError
from lokakern.measure import timing

CONFIDENCE = 0.99  # of an interval; a comparison looks at `LOOKS` of them
LOOKS = (8, 16, 32, 64)  # rounds after which a comparison may end; 7 rounds have no such interval
FEWEST_ROUNDS = LOOKS[0]
SETTLED = 0.001  # no ratio in an interval this close to 1 is worth another round
WARM_STEPS = 3  # after a switch to a new variant: compilation, and CUDA graphs of torch.compile
RESUMED_STEPS = 2  # after a switch to a known variant, before the clock starts
WINDOW_US = 20_000.0  # least time between two readings of the clock
MOST_STEPS = 200  # in a window

Variant = Hashable


class Timer(Protocol):
    """Times a step of a model in any of its variants."""

    def prepare(self, variant: Variant) -> float:
        """Make a variant ready to be timed; returns the seconds that took, 0 if it was ready."""

    def step_us(self, variant: Variant) -> float:
        """Time of a step, in microseconds."""

    def clock_mhz(self) -> float | None:
        """The present clock of the device, if it is known."""

    def keep(self, variants: Collection[Variant]) -> None:
        """Free what other variants need."""

    def now(self) -> float:
        """Seconds of a steady clock."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one variant over that of another.

    Attributes:
        value: The median over rounds.
        low: Lower end of its interval.
        high: Upper end.
        rounds: Number of rounds.
        one_us: Median time of a step of the variant in the numerator, in microseconds.
        other_us: That of the variant in the denominator.
    """

    value: float
    low: float
    high: float
    rounds: int
    one_us: float
    other_us: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class OutOfTime(Exception):
    """A comparison was cut off before it had an interval."""


def compare(
    timer: Timer, one: Variant, other: Variant, *, rounds: int, until: float = math.inf,
    deadline: float = math.inf,
) -> Ratio:  # fmt: skip
    """The time of a step of one variant over that of another.

    Rounds end when the interval is on one side of 1 or very close to it.

    Args:
        timer: Both variants are prepared.
        one: The variant in the numerator.
        other: The variant in the denominator.
        rounds: Most rounds, at least `FEWEST_ROUNDS`.
        until: Time of ``timer.now()`` after which a comparison with `FEWEST_ROUNDS` ends.
        deadline: Time after which a round is given up, and the comparison ends with those before.

    Raises:
        OutOfTime: The deadline passed before `FEWEST_ROUNDS`.
    """
    logs: list[float] = []
    times: dict[Variant, list[float]] = {one: [], other: []}
    clocks: list[float] = []
    while True:
        order = (one, other) if len(logs) % 2 == 0 else (other, one)
        try:
            spent = _round(timer, order, deadline)
        except OutOfTime:
            if len(logs) < FEWEST_ROUNDS:
                raise
            is_late = True
        else:
            logs.append(math.log(spent[one] / spent[other]))
            clocks.append(timer.clock_mhz() or 0.0)
            for variant, us in spent.items():
                times[variant].append(us)
            is_late = timer.now() > until and len(logs) >= FEWEST_ROUNDS
        count = len(logs)
        if count in LOOKS or count >= rounds or is_late:
            low, high = interval(_steady(logs, clocks))
            is_settled = low > 0 or high < 0 or max(-low, high) < SETTLED
            if is_settled or is_late or count >= rounds:
                value = statistics.median(_steady(logs, clocks))
                return Ratio(
                    math.exp(value), math.exp(low), math.exp(high), count,
                    statistics.median(times[one]), statistics.median(times[other]),
                )  # fmt: skip


def _round(timer: Timer, order: tuple[Variant, Variant], deadline: float) -> dict[Variant, float]:
    """Times of a step of both variants, as A B B A."""
    first, second = order
    spent = dict.fromkeys(order, 0.0)
    for variant in (first, second, second, first):
        if timer.now() > deadline:
            raise OutOfTime
        spent[variant] += timer.step_us(variant) / 2
    return spent


def interval(values: list[float]) -> tuple[float, float]:
    """The interval of the median with a confidence of at least `CONFIDENCE`.

    The k-th smallest and largest of n values enclose the median unless fewer than k values are on
    one of its sides, a binomial event.

    Raises:
        MeasurementError: There are fewer than 8 values.
    """
    count, ordered = len(values), sorted(values)
    outside, place = 0.0, -1
    while True:
        outside += 2 * math.comb(count, place + 1) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        place += 1
    if place < 0:
        raise MeasurementError(f"{count} rounds have no interval; expected {FEWEST_ROUNDS}")
    return ordered[place], ordered[-1 - place]


def _steady(values: list[float], clocks: list[float]) -> list[float]:
    """Values of rounds whose clock was not much below the median, if enough are left."""
    least = timing.VOID_CLOCK_SHARE * statistics.median(clocks)
    kept = [value for value, clock in zip(values, clocks, strict=True) if clock >= least]
    return kept if len(kept) >= FEWEST_ROUNDS else values


@dataclass
class StepTimer:
    """Times the calls of a step, or the replays of a CUDA graph of it.

    Calls are timed by the host's clock between two synchronizations, so that the time of the host
    counts; replays by device events.

    Attributes:
        step: Runs one step on the current stream.
        switch: Applies a variant to the model.
        device: Device of the model.
        graph: Whether to capture the step.
    """

    step: Callable[[], object]
    switch: Callable[[Variant], None]
    device: torch.device
    graph: bool
    _steps: int = 0  # of a window
    _ready: set[Variant] = field(default_factory=set)
    _graphs: dict[Variant, torch.cuda.CUDAGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock_mhz = timing.clock_reader(self.device)
        self.now = time.monotonic
        if self.graph:
            if self.device.type != "cuda":
                raise MeasurementError(
                    f"tune: graph=True needs a GPU, and the model is on {self.device}; omit it"
                )
            self._pool = torch.cuda.graph_pool_handle()  # one, because graphs never run together
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        timing.warm(self.device)

    def prepare(self, variant: Variant) -> float:
        """Warm up, which compiles, and capture."""
        if variant in (self._graphs if self.graph else self._ready):
            return 0.0
        begun = self.now()
        self.switch(variant)
        with self._aside():
            self._warm()
        self._synchronize()
        if self.graph:
            self._graphs[variant] = self._captured()
        self._ready.add(variant)
        seconds = self.now() - begun
        if not self._steps:
            self._steps = 1
            once_us = min(self.step_us(variant) for _ in range(WARM_STEPS))
            self._steps = max(1, min(MOST_STEPS, math.ceil(WINDOW_US / max(once_us, 1.0))))
        return seconds

    def _warm(self) -> None:
        for _ in range(WARM_STEPS):
            self.step()
        if native.wait():  # the first call begins a build, and calls are in Python until then
            self._warm()

    def step_us(self, variant: Variant) -> float:
        """Time of a step, the mean over a window."""
        if self.graph:
            return self._replay_us(self._graphs[variant])
        self.switch(variant)
        for _ in range(min(RESUMED_STEPS, self._steps)):
            self.step()
        self._synchronize()
        begun = time.perf_counter_ns()
        for _ in range(self._steps):
            self.step()
        self._synchronize()
        return (time.perf_counter_ns() - begun) / 1e3 / self._steps

    def keep(self, variants: Collection[Variant]) -> None:
        """Free the graphs of other variants."""
        for variant in self._graphs.keys() - set(variants):
            del self._graphs[variant]

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()  # the clock starts on a busy device
        start.record()
        for _ in range(self._steps):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._steps

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                self.step()
        except OutOfTime:
            raise
        except Exception as error:  # whatever the user's step raises under capture
            raise MeasurementError(
                "tune: the step cannot be captured in a CUDA graph: "
                f"{timing.status_and_reason(error)[1]}; pass the step without what waits for the "
                "GPU, or omit graph=True to time calls"
            ) from error
        return graph

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of the capture, if there is one."""
        if not self.graph:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
