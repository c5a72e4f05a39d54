"""Times of a step: each arm against the baseline, in turn, on the device's own clock.

The baseline and one arm run side by side, in an order drawn anew each round, so that what heats or
throttles the device meets both; ratios are of rounds. A replay is `BATCHES` steps on as many
batches. Compiled arms replay a CUDA graph of them where they can be captured; what is as written
runs from the host, whose time counts.
"""

from __future__ import annotations

import contextlib
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

from lokakern.bench.models.arms import Built, Setting
from lokakern.bench.models.blocks import Batch
from lokakern.bench.models.click_log import ClickLog
from lokakern.measure import timing
from lokakern.selection.candidates import margin_us

BATCHES = 4
FEWEST_ROUNDS, MOST_ROUNDS, RACE_SECONDS = 7, 40, 8.0
WARM_STEPS = 3
EVENTS, GRAPH = "device events", "device events around a CUDA graph"
HOST = "host clock of a CPU: says nothing of a GPU"


@dataclass
class Stepper:
    """Steps of an arm, ready to be timed.

    Attributes:
        name: Of the arm.
        replay: Takes `BATCHES` steps.
        step: The same, never as a CUDA graph.
        timer: What measures.
        note: Why there is no graph, where one was tried.
        graph_breaks: While it was compiled.
        peak_gib: Memory of a step with the arm's parameters; None on a CPU.
    """

    name: str
    replay: Callable[[], None]
    step: Callable[[], None]
    timer: str
    note: str = ""
    graph_breaks: int = 0
    peak_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Time of an arm's step.

    Attributes:
        arm: Its name.
        step_us: Median.
        margin_us: Half of its 95 % interval.
        baseline_us: Of the baseline, in the same rounds.
        speedup: Median over rounds of the baseline's time over the arm's.
        speedup_margin: Half of its 95 % interval.
        rounds: How many.
        timer: What measured.
        note: Why there is no CUDA graph, where one was tried.
        graph_breaks: Of the compiled arm.
        recompiles: Graphs compiled after the warm-up.
        peak_gib: Memory of a step with the arm's parameters; None on a CPU.
    """

    arm: str
    step_us: float
    margin_us: float
    baseline_us: float
    speedup: float
    speedup_margin: float
    rounds: int
    timer: str
    note: str
    graph_breaks: int
    recompiles: int
    peak_gib: float | None


def pace_words(pace: Pace) -> str:
    """An arm's time and ratio, for who waits for the other arms."""
    words = f"{pace.step_us / 1e3:.3f} ms, {pace.speedup:.3f}x +- {pace.speedup_margin:.3f}"
    return f"{words} ({pace.note})" if pace.note else words


def memory(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def stepper(built: Built, setting: Setting, *, whole: bool, before: int = 0) -> Stepper:
    """Warm an arm up, which compiles it, and capture its steps where that is possible.

    Args:
        built: The arm.
        setting: The model and where it runs.
        whole: Whether a step looks rows up in tables, and trains these; else what came out of the
            tables is given, and its gradient is part of a step.
        before: Bytes in use before the arm was built.
    """
    on_gpu = setting.device.type == "cuda"
    log = ClickLog(setting.inputs, 0, setting.device)
    batches = [log.batch(step, setting.samples) for step in range(BATCHES)]
    torch._dynamo.utils.counters.clear()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    steps = _steps(built, setting, batches, whole)

    def replay() -> None:
        for step in steps:
            step()

    found = Stepper(built.arm.name, replay, replay, EVENTS if on_gpu else HOST)
    with _aside(on_gpu):
        for _ in range(WARM_STEPS):
            replay()
    counters = torch._dynamo.utils.counters
    found.graph_breaks = sum(counters["graph_break"].values())
    if on_gpu:
        found.peak_gib = (torch.cuda.max_memory_allocated(setting.device) - before) / 2**30
        if built.arm.compiled:
            _capture(found)
    return found


@contextlib.contextmanager
def _aside(on_gpu: bool) -> Iterator[None]:
    """Run on a stream of its own, as what is captured later must be warmed."""
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

        def train(given: Sequence[Tensor] | Batch, labels: Tensor) -> Callable[[], object]:
            if isinstance(given, Batch):
                return lambda: trainer.step(given, labels)
            return lambda: trainer.step([_sent(x) for x in given], labels)

        if whole:
            return [train(batch, batch.labels) for batch in batches]
        with torch.no_grad():
            given = [[x.detach() for x in trainer.embed(batch)] for batch in batches]
        for tensors in given:
            for x in tensors[1:]:  # not of the dense features
                x.requires_grad_(x.is_floating_point())
        return [train(x, b.labels) for x, b in zip(given, batches, strict=True)]
    predictor = built.predictor()
    ready = [predictor.embed(batch) for batch in batches]

    def predict(batch: Batch, given: Sequence[Tensor]) -> Callable[[], object]:
        return lambda: predictor.logits(predictor.embed(batch) if whole else given)

    return [predict(b, x) for b, x in zip(batches, ready, strict=True)]


def _sent(x: Tensor) -> Tensor:
    return _Sent.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]


class _Sent(torch.autograd.Function):
    """What tables sent: its gradient is made, and then it is theirs.

    A tensor that keeps it would copy what is a slice of the gradient of all embeddings: 5.4 ms of
    an H200 for 8192 samples of 770 embeddings of 160, a 14th of DHEN's step.
    """

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        return None


def _capture(found: Stepper) -> None:
    # A graph has memory of its own: what was only warmed up with must not stand beside it. Wukong M
    # trains in 41 GiB at a batch of 8192: an arm would hold that twice.
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found.replay()
    except Exception as error:  # any library may do what a graph cannot hold
        torch.cuda.synchronize()
        found.note = f"no CUDA graph: {timing.status_and_reason(error)[1][:160]}"
        return
    found.replay, found.timer = graph.replay, GRAPH


def race(baseline: Stepper, other: Stepper, device: torch.device, *, seed: int = 0) -> Pace:
    """Time an arm against the baseline; it may be the baseline itself."""
    timing.warm(device)
    read_clock = timing.clock_reader(device)
    once = max(_elapsed_us(s, device) for s in (baseline, other))
    counters = torch._dynamo.utils.counters["stats"]
    compiled = counters["unique_graphs"]
    rounds = int(min(MOST_ROUNDS, max(FEWEST_ROUNDS, RACE_SECONDS * 1e6 / (2 * once))))
    runners = [("baseline", baseline), ("other", other)]
    times: dict[str, list[float]] = {name: [] for name, _ in runners}
    clocks: list[tuple[float, float]] = []
    order = random.Random(seed)
    for _ in range(rounds):
        order.shuffle(runners)
        seen: dict[str, float] = {}
        for name, runner in runners:
            times[name].append(_elapsed_us(runner, device) / BATCHES)
            seen[name] = read_clock() or 0.0
        clocks.append((seen["baseline"], seen["other"]))
    kept = _steady(clocks)
    base = [times["baseline"][place] for place in kept]
    mine = [times["other"][place] for place in kept]
    ratios = [b / m for b, m in zip(base, mine, strict=True)]
    return Pace(
        other.name, statistics.median(mine), _margin(mine), statistics.median(base),
        statistics.median(ratios), _margin(ratios), len(kept), other.timer, other.note,
        other.graph_breaks, counters["unique_graphs"] - compiled, other.peak_gib,
    )  # fmt: skip


def _elapsed_us(runner: Stepper, device: torch.device) -> float:
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
    """Rounds in which neither ran at under 90 % of its own median clock."""
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

# The first that matches counts. Kernels that Inductor fused are named after what they hold.
KINDS = {
    "attention": r"attention|sdpa|fmha",  # some say cutlass as well
    "quantizing": r"quantize|float8|_fp8|amax",
    "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|triton_tem|_mm\b|::mm|addmm|bmm|linear"
    r"|token_gradient",
    "norm": r"norm|rsqrt",
    "tables": r"embedding|segment|radix|sort",
    "optimizer": r"adam|multi_tensor",
}
OTHER = "other"
FP8_GAIN = 2.0  # of FP8 tensor cores over bf16's, at their peaks


@dataclass(frozen=True, slots=True)
class Shares:
    """Time of a step by kind of kernel.

    Attributes:
        us: By kind, of a step.
        timer: Whose clock: a GPU's kernels, or a CPU's operators.
    """

    us: dict[str, float]
    timer: str

    @property
    def total_us(self) -> float:
        """Of all kernels, without the gaps between them."""
        return sum(self.us.values())

    def share(self, *kinds: str) -> float:
        """Part of the total."""
        return sum(self.us[kind] for kind in kinds) / self.total_us if self.total_us else 0.0

    @property
    def bound(self) -> float:
        """Amdahl's: the speedup if GEMMs took half of their time and norms none."""
        return 1 / (1 - self.share("GEMM") * (1 - 1 / FP8_GAIN) - self.share("norm"))

    @property
    def limit(self) -> float:
        """The same if GEMMs and norms took no time at all."""
        left = 1 - self.share("GEMM", "norm")
        return 1 / left if left > 0 else float("inf")


def kind_of(kernel: str) -> str:
    """What a kernel, or an operator of a CPU, is for, by its name."""
    return next((k for k, words in KINDS.items() if re.search(words, kernel, re.I)), OTHER)


def shares_of(run: Callable[[], None], steps: int, device: torch.device) -> Shares:
    """Profile a few steps.

    Args:
        run: Takes them.
        steps: How many it takes.
        device: Where they run.
    """
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
    # Ranges that torch marks, such as an optimizer's step, hold kernels that count by themselves.
    is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return float(event.self_device_time_total) if is_kernel else 0.0
