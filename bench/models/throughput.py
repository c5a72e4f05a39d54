"""Step times of each arm against the baseline, and the shares of kinds of kernels in a step.

The baseline and one arm alternate in random order, so that heating and throttling affect both;
speedups are ratios within a round. A replay is `BATCHES` steps on as many batches: a CUDA graph for
compiled arms where capture works, otherwise calls from the host, whose time is included.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lokakern import native
from lokakern.bench.models.arms import Built, Setting
from lokakern.bench.models.blocks import Batch
from lokakern.measure import timing
from lokakern.selection.ties import margin_us

BATCHES = 4
# 40 rounds of a step of 1.5 ms without graphs left margins of up to 5.6 %.
FEWEST_ROUNDS, USUAL_ROUNDS, MOST_ROUNDS, RACE_SECONDS = 7, 40, 400, 8.0
PRECISE = 0.01  # margin of a ratio after which the usual rounds suffice
WARM_STEPS = 3
EVENTS, GRAPH = "device events", "device events around a CUDA graph"
HOST = "host clock of a CPU: says nothing of a GPU"


@dataclass
class Stepper:
    """An arm that is ready to be timed."""

    name: str  # the arm's name
    replay: Callable[[], None]  # runs the steps
    step: Callable[[], None]  # the same, never as a CUDA graph
    timer: str  # the clock
    note: str = ""  # why capturing a CUDA graph failed
    graph_breaks: int = 0  # graph breaks of the compilation
    peak_gib: float | None = None  # peak memory of a step with the arm's parameters; None on a CPU
    steps: int = BATCHES  # number of steps of a replay


@dataclass(frozen=True, slots=True)
class Pace:
    """The step time of an arm; other attributes are those of `Stepper`."""

    arm: str  # the arm's name
    step_us: float  # median
    margin_us: float  # half of its 95 % interval
    baseline_us: float  # median of the baseline in the same rounds
    speedup: float  # median over rounds of the baseline's time over the arm's
    speedup_margin: float  # half of its 95 % interval
    rounds: int  # rounds with a steady clock
    timer: str
    note: str
    graph_breaks: int
    recompiles: int  # graphs compiled after the warm-up
    peak_gib: float | None


def pace_words(pace: Pace) -> str:
    """The step time and speedup of an arm in words."""
    words = f"{pace.step_us / 1e3:.3f} ms, {pace.speedup:.3f}x +- {pace.speedup_margin:.3f}"
    return f"{words} ({pace.note})" if pace.note else words


def stepper(built: Built, setting: Setting, *, whole: bool, before: int = 0) -> Stepper:
    """Warm up and compile an arm, and capture its steps in a CUDA graph where possible.

    Args:
        built: The arm.
        setting: The model and where it runs.
        whole: Whether a step includes the lookup in the tables and their training; otherwise
            embeddings are inputs, whose gradients are part of a step.
        before: Bytes in use before the arm was built.
    """
    on_gpu = setting.device.type == "cuda"
    log = setting.log(0)
    batches = [log.batch(step, setting.samples) for step in range(BATCHES)]
    torch._dynamo.utils.counters.clear()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    steps = _steps(built, setting, batches, whole)

    def replay() -> None:
        for step in steps:
            step()

    found = Stepper(built.arm.name, replay, replay, EVENTS if on_gpu else HOST)
    with aside(on_gpu):
        warm(replay)
    counters = torch._dynamo.utils.counters
    found.graph_breaks = sum(counters["graph_break"].values())
    if on_gpu:
        found.peak_gib = (torch.cuda.max_memory_allocated(setting.device) - before) / 2**30
        if built.arm.compiled:
            capture(found)
    return found


def warm(replay: Callable[[], object]) -> None:
    """Make calls that compile and record; the first one begins to build the native library."""
    for _ in range(WARM_STEPS):
        replay()
    if native.wait():
        warm(replay)


@contextlib.contextmanager
def aside(on_gpu: bool) -> Iterator[None]:
    """Run on a side stream, as the warm-up of a later capture requires."""
    if not on_gpu:
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _steps(
    built: Built, setting: Setting, batches: Sequence[Batch], whole: bool
) -> list[Callable[[], object]]:
    if setting.training:
        trainer = built.trainer()
        if whole:
            return [functools.partial(trainer.step, batch, batch.labels) for batch in batches]

        def train(batch: Batch) -> Callable[[], object]:
            with torch.no_grad():
                dense, *embedded = trainer.embed(batch)
            for x in embedded:
                x.requires_grad_(x.is_floating_point())
            return lambda: trainer.step([dense, *map(sent, embedded)], batch.labels)

        return [train(batch) for batch in batches]
    predictor = built.predictor()

    def predict(batch: Batch) -> Callable[[], object]:
        if whole:
            return lambda: predictor.logits(predictor.embed(batch))
        return functools.partial(predictor.logits, predictor.embed(batch))

    return [predict(batch) for batch in batches]


def sent(x: Tensor) -> Tensor:
    """An input whose gradient is computed and dropped, if it needs one."""
    return _Sent.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]


class _Sent(torch.autograd.Function):
    """Embeddings whose gradient is computed and dropped.

    A leaf tensor would copy its gradient, a slice of the gradient of all embeddings: 5.4 ms on an
    H200 for 8192 samples of 770 embeddings of 160, 1/14 of DHEN's step.
    """

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        return None


def capture(found: Stepper) -> None:
    """Capture the replay in a CUDA graph; if that fails, the note says why.

    `found.replay` and `found.timer` are those of the graph afterwards.
    """
    # A graph has its own memory pool, so free that of the warm-up: Wukong M trains in 41 GiB at a
    # batch of 8192, which an arm would otherwise hold twice.
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found.replay()
    except Exception as error:  # a library may launch work that cannot be captured
        torch.cuda.synchronize()
        found.note = f"no CUDA graph: {timing.status_and_reason(error)[1][:160]}"
        return
    found.replay, found.timer = graph.replay, GRAPH


def race(baseline: Stepper, other: Stepper, device: torch.device) -> Pace:
    """Time an arm, or the baseline itself, against the baseline.

    More rounds than usual follow until the margin of their ratio is at most `PRECISE`, or
    `RACE_SECONDS` have passed.
    """
    timing.warm(device)
    read_clock = timing.clock_reader(device)
    for stepper in (baseline, other):  # the first replay of a graph also uploads it
        elapsed_us(stepper, device)
    end = time.monotonic() + RACE_SECONDS
    counters = torch._dynamo.utils.counters["stats"]
    compiled = counters["unique_graphs"]
    runners = [("baseline", baseline), ("other", other)]
    times: dict[str, list[float]] = {name: [] for name, _ in runners}
    clocks: list[tuple[float, float]] = []
    order = random.Random(0)
    ratios: list[float] = []
    for count in range(MOST_ROUNDS):
        if count >= FEWEST_ROUNDS and time.monotonic() >= end:
            break
        if count >= USUAL_ROUNDS and _margin(ratios) <= PRECISE:
            break
        order.shuffle(runners)
        seen: dict[str, float] = {}
        for name, runner in runners:
            times[name].append(elapsed_us(runner, device) / runner.steps)
            seen[name] = read_clock() or 0.0
        clocks.append((seen["baseline"], seen["other"]))
        ratios.append(times["baseline"][-1] / times["other"][-1])
    kept = _steady(clocks)
    base = [times["baseline"][place] for place in kept]
    mine = [times["other"][place] for place in kept]
    ratios = [ratios[place] for place in kept]
    return Pace(
        other.name, statistics.median(mine), _margin(mine), statistics.median(base),
        statistics.median(ratios), _margin(ratios), len(kept), other.timer, other.note,
        other.graph_breaks, counters["unique_graphs"] - compiled, other.peak_gib,
    )  # fmt: skip


def elapsed_us(runner: Stepper, device: torch.device) -> float:
    """Microseconds of a replay, the host's included."""
    if device.type != "cuda":
        begun = time.perf_counter_ns()
        runner.replay()
        return (time.perf_counter_ns() - begun) / 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    runner.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _steady(clocks: Sequence[tuple[float, float]]) -> list[int]:
    """Rounds in which neither ran below 90 % of its own median clock."""
    medians = [statistics.median(column) for column in zip(*clocks, strict=True)]
    return [
        place
        for place, pair in enumerate(clocks)
        if all(c >= timing.VOID_CLOCK_SHARE * m for c, m in zip(pair, medians, strict=True))
    ]


def _margin(values: Sequence[float]) -> float:
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return margin_us(low, high, len(ordered))


# --- shares

# The first match counts. Names of fused Inductor kernels list their operations.
KINDS = {
    "attention": r"attention|sdpa|fmha",  # before GEMM: some names contain cutlass
    "quantizing": r"quantize|float8|_fp8|amax",
    "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|triton_tem|_mm\b|::mm|addmm|bmm|linear"
    r"|token_gradient",
    "norm": r"norm|rsqrt",
    "tables": r"embedding|segment|radix|sort",
    "optimizer": r"adam|multi_tensor",
}
OTHER = "other"
FP8_GAIN = 2.0  # peak rate of FP8 tensor cores over bf16


@dataclass(frozen=True, slots=True)
class Shares:
    """Time of a step by kind of kernel."""

    us: dict[str, float]  # microseconds of a step by kind
    timer: str  # whether kernels of a GPU or operators of a CPU were profiled

    @property
    def total_us(self) -> float:
        """Time of all kernels, without the gaps between them."""
        return sum(self.us.values())

    def share(self, *kinds: str) -> float:
        """Share of some kinds in the total."""
        return sum(self.us[kind] for kind in kinds) / self.total_us if self.total_us else 0.0

    @property
    def bound(self) -> float:
        """Amdahl's bound on the speedup if GEMMs took half of their time and norms none."""
        return 1 / (1 - self.share("GEMM") * (1 - 1 / FP8_GAIN) - self.share("norm"))

    @property
    def limit(self) -> float:
        """The same bound if GEMMs and norms took no time."""
        left = 1 - self.share("GEMM", "norm")
        return 1 / left if left > 0 else float("inf")


def kind_of(kernel: str) -> str:
    """The kind of a kernel or CPU operator by its name."""
    return next((k for k, words in KINDS.items() if re.search(words, kernel, re.I)), OTHER)


def shares_of(run: Callable[[], None], steps: int, device: torch.device) -> Shares:
    """Profile ``run``, which runs ``steps`` steps on a device."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    us = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in found.key_averages():
        us[kind_of(event.key)] += _spent_us(event, on_gpu) / steps
    return Shares(us, "kernels of the GPU" if on_gpu else "operators of the CPU")


def _spent_us(event: Any, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total)
    # Annotated ranges, such as an optimizer step, contain kernels that are counted themselves.
    is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return float(event.self_device_time_total) if is_kernel else 0.0
