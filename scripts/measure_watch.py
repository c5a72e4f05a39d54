"""Measure what `Conversion.watch` costs a training, and that it swaps without compiling.

    python scripts/measure_watch.py [samples] [graph] [compiled] [--model wukong] [--rounds N]
        [--quiet-steps N] [--quiet-rate RATE] [--out FILE]

The dense part of MLPerf's DLRM-DCNv2, bfloat16, fused AdamW: "graph" at 8192 samples in CUDA graphs
of torch.compile, "compiled" at 2048 without graphs. Or that of Wukong S, in float32 under autocast,
with the gradients of its embeddings. Blocks of steps with and without a watch, each with one
sampled step, run in turn; the overhead is the median of their ratios, with its 95 % interval from
six rounds on, and else with the range of the rounds, which is called so. What it consists of is
measured apart: the sampled step and others by themselves, steps without a watch, what of a sampled
step its ops, its hooks and its end take, the thread's time for each window, and how many products
it replayed. With ``--quiet-steps`` the model then learns a teacher's clicks on batches that change,
and alarms are counted and printed. Then the embeddings of DLRM-DCNv2 drift, one way after the
other: their mean moves, their spread is 100 times as large, and one feature grows until FP8 is
unsafe; in a model that learned before it need not become so. "samples" takes those of the nine
layers without the model, by the kernel and by torch: what both take must be equal, and it prints
the host's time of a sampled step, warm and with other work in between, and launches and time of the
device. Prints some lines for each case, and writes all figures to FILE. About a minute on an H200
without a quiet run; ``--size tiny --every 10 --kernels row`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import lokakern
from lokakern import native
from lokakern.bench.models.arms import apply_mods
from lokakern.bench.models.blocks import ClickModel
from lokakern.bench.models.catalog import CATALOG, config_named
from lokakern.bench.models.click_log import ClickLog
from lokakern.bench.models.dlrm import SIZES
from lokakern.bench.models.throughput import sent
from lokakern.bench.models.zoo.architecture import Feature
from lokakern.bench.models.zoo.catalog import dlrm_dcnv2
from lokakern.conversion import drift_judge
from lokakern.conversion.convert import Conversion
from lokakern.conversion.drift_watch import STAYS, TO_BF16, DriftWatch, _WindowProbe
from lokakern.probe import hooks, sample_kernel
from lokakern.probe.drift import Ranges
from lokakern.probe.statistics import PARTS
from lokakern.probe.windows import MEAN, Numbers, SiteWindow, transfers_of
from lokakern.types import COMPILED, COMPILED_GRAPH
from lokakern.workloads.distributions import distribution_named, draw_rows

POOL = 4  # batches, from whose rows the steps of the quiet run take theirs
SAMPLES = "samples"
CASES = {  # regime, mode of torch.compile, samples
    "graph": (COMPILED_GRAPH, "reduce-overhead", 8192),
    "compiled": (COMPILED, "default", 2048),
}
KNOWN = (SAMPLES, *CASES)
BUDGET, GROWTH = 0.06, 1e6
DRIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean that moves by 8 standard deviations": lambda x: x + 8 * x.std(),
    "a spread 100 times as large": lambda x: x * 100,
    f"a feature {GROWTH:.0e} times as large": lambda x: torch.cat([x[:, :1] * GROWTH, x[:, 1:]], 1),
}
BAR, MOST_STEPS = 500, 1500  # steps in which a drift should be found, and after which none is
APART, APART_EVERY = 8, 10  # sampled steps that are measured by themselves, and steps from one on
LAYERS = [(3456, 512), (512, 3456)] * 3 + [(3456, 1024), (1024, 1024), (1024, 512)]  # k, n
STEPS = 50  # of samples alone
# Half of a logarithm to the base 2, of a ratio of sums of squares of numbers that are rounded to
# float32: see tests/kernels/test_window_samples.py.
SLACK_OF_MEAN = 4 * 2.0**-24 * 1.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEWEST = 6  # values whose order gives an interval of a median at 95 %
COUNTERS = torch._dynamo.utils.counters["stats"]


class Training:
    """A converted model with its optimizer and a batch; it is compiled at the first step."""

    def __init__(self, case: str, model: str, size: str, kernels: str | None) -> None:
        regime, mode, samples = CASES[case]
        torch.manual_seed(0)
        build = self._dlrm if model == "dlrm" else self._wukong
        build(size, 64 if size == "tiny" else samples)
        own_code(self.model)
        self.handle: Conversion = (
            lokakern.convert(self.model, kernels=kernels, regime=regime)
            if kernels
            else lokakern.convert(self.model, BUDGET, regime=regime)
        )
        # At a rate of 0 the drift is found in the model that was timed.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.inputs[1].requires_grad_()
        self.labels = (torch.rand(len(self.inputs[0]), 1, device=DEVICE) < 0.03).bfloat16()
        self.compiled: Any = torch.compile(self.model, fullgraph=True, dynamic=False, mode=mode)

    def _dlrm(self, size: str, samples: int) -> None:
        config = SIZES[size]
        self.model: nn.Module = dlrm_dcnv2(size).to(DEVICE, torch.bfloat16)
        self.ignored = config.dim  # the column of the first embedding's first element
        self.ignore()
        columns = config.inputs.dense, len(config.inputs.rows) * config.dim
        self.inputs = [
            Feature(k, kind).draw(samples, 0).to(DEVICE)
            for k, kind in zip(columns, ("X7", "X5"), strict=True)
        ]

        def pool() -> list[Tensor]:  # one seed, as another has tables of other sizes
            return [
                draw_rows(distribution_named(kind), POOL * samples, k, 0).bfloat16().to(DEVICE)
                for k, kind in zip(columns, ("X7", "X5"), strict=True)
            ]

        self.pool = pool

    def ignore(self) -> None:
        """Have products not read a column, as of a feature that tells nothing."""
        with torch.no_grad():
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear) and name.endswith((".down", "head.0")):
                    module.weight[:, self.ignored] = 0.0

    def _wukong(self, size: str, samples: int) -> None:
        config = config_named("wukong", "tiny" if size == "tiny" else "S")
        tables = tuple(min(rows, 64) for rows in config.inputs.rows)  # they are no part of a step
        config = replace(config, inputs=replace(config.inputs, rows=tables))
        model = CATALOG["wukong"].build(config)
        apply_mods(model)
        model.to(DEVICE)
        self.model = DensePart(model)
        log = ClickLog(config.inputs, 0, torch.device(DEVICE))

        def drawn(step: int) -> list[Tensor]:
            batch = log.batch(step, samples)
            with torch.no_grad():
                return [batch.dense, *(x.bfloat16() for x in model.embed(batch))]

        self.inputs = drawn(0)
        self.pool = lambda: [
            torch.cat(x) for x in zip(*map(drawn, range(1, POOL + 1)), strict=True)
        ]

    def step(self) -> None:
        logits = self.compiled(*map(sent, self.inputs))
        nn.functional.binary_cross_entropy_with_logits(logits, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def learn(self, steps: int, rate: float) -> None:
        """Steps on batches that change, in place, of a pool of rows, with a teacher's labels."""
        pool = self.pool()
        logits = torch.zeros(len(pool[0]), 1, device=DEVICE)
        for x in pool:
            direction = torch.randn(x[0].numel(), 1, device=DEVICE, dtype=x.dtype)
            score = (x.flatten(1) @ direction).float()
            logits += (score - score.mean()) / score.std()
        clicked = (logits / logits.std() - 3.0).sigmoid()
        (group,) = self.optimizer.param_groups
        group["lr"] = rate
        for _ in range(steps):
            rows = torch.randint(len(clicked), (len(self.labels),), device=DEVICE)
            with torch.no_grad():
                for x, some in zip(self.inputs, pool, strict=True):
                    x.copy_(some[rows])
                self.labels.copy_(torch.bernoulli(clicked[rows]))
            self.step()
        group["lr"] = 0.0

    def block_ms(self, count: int) -> float:
        """Time of a step, in a block of them; the host waits for the last one only."""
        if DEVICE == "cpu":
            begun = time.perf_counter()
            for _ in range(count):
                self.step()
            return (time.perf_counter() - begun) * 1e3 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            self.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count


def own_code(model: nn.Module) -> None:
    """Let a model share no compiled code with others of its class, of whose guards some fail."""
    kind = type(model)
    plain = kind.forward
    code = plain.__code__.replace(co_name=f"forward_{id(model)}")
    given = plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    model.__class__ = type(kind.__name__, (kind,), {"forward": FunctionType(code, *given)})


class DensePart(nn.Module):
    """A click model behind its embeddings, as it trains: in float32, under autocast."""

    def __init__(self, model: ClickModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return self.model.interact(*given)[:, None]


class Samples:
    """Sampled steps of nine layers without a model: ops of a graph, hooks of weights, the end."""

    def __init__(self, samples: int, shapes: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(k, n, bias=False) for k, n in shapes)
        model = nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
        self.probe: Any = _WindowProbe(model, 1, self._end, lambda: None, check="off", seed=0)
        self.weights: Any = [layer.weight for layer in model]
        spread = torch.randn(samples, 1, device=DEVICE).exp2()
        self.xs, self.gradients = (
            [
                (torch.randn(samples, shape[i], device=DEVICE) * spread).bfloat16()
                for shape in shapes
            ]
            for i in range(2)
        )
        self.sites = [recorder.number for recorder in self.probe._recorders.values()]
        self.window: dict[str, SiteWindow] = {}
        self.transfers: Any = []

    def _end(self, window: dict[str, SiteWindow]) -> None:
        self.window, self.transfers = window, transfers_of(window)

    def step(self) -> None:
        ops = torch.ops.lokakern
        have_gradients = [True] * len(self.xs)
        # Outputs are read for their shapes alone.
        calls = ops.probe_taps(self.gradients, self.xs, self.weights, self.sites, have_gradients)
        ops.probe_tap_gradients(self.xs[0][:1], self.gradients, calls, self.sites)
        for weight in self.weights:
            for hook in weight._backward_hooks.values():
                hook(weight.detach())
        self.probe.step()

    def taken(self) -> tuple[dict[str, Tensor], Numbers]:
        """All tensors of the last window, and its numbers."""
        found = {}
        for name, site in self.window.items():
            for part in PARTS:
                ((_, tensors),) = getattr(site, part).calls()
                found |= {f"{name}.{part}.{i}": x for i, x in enumerate(tensors)}
            found |= {f"{name}.weight.{i}": x for i, x in enumerate(site.weight_sizes)}
        (transfer,) = self.transfers
        return found, transfer.numbers()


def measure_samples(asked: argparse.Namespace) -> dict[str, Any]:
    """What the kernel takes beside what torch takes, and what both cost.

    Raises:
        SystemExit: They are not equal.
    """
    native.NATIVE.need()
    is_tiny = asked.size == "tiny"
    shapes = [(k // 32, n // 32) if is_tiny else (k, n) for k, n in LAYERS]
    row: dict[str, Any] = {"case": SAMPLES, "samples": 64 if is_tiny else CASES["graph"][2]}
    taken = {}
    for way in ("by_kernel", "by_torch"):
        steps = Samples(row["samples"], shapes)
        with steps.probe, without_kernel() if way == "by_torch" else contextlib.nullcontext():
            steps.step()
            row.setdefault("status", steps.probe._kernel.status())
            if DEVICE == "cuda" and row["status"] != "loaded":
                raise SystemExit(f"the kernel of samples is not there: {row['status']}")
            taken[way] = steps.taken()  # with weights, as of each fifth window
            row[way] = costs_of(steps)
    compare(*(taken[way] for way in ("by_kernel", "by_torch")))
    return row


@contextlib.contextmanager
def without_kernel() -> Iterator[None]:
    """Have torch take all samples."""
    here = torch.cuda.current_device() if DEVICE == "cuda" else -1
    native.NATIVE.module.use_window_kernel(here, 0, sample_kernel.sizes())
    try:
        yield
    finally:
        sample_kernel.forget()


def compare(of_kernel: tuple[Any, Numbers], of_torch: tuple[Any, Numbers]) -> None:
    (found, numbers), (expected, others) = of_kernel, of_torch
    wrong = [
        name
        for name, x in expected.items()
        if not torch.equal(found[name].to(x.dtype), x)
        or not torch.equal(found[name], x.to(found[name].dtype))
    ]
    for (site, name), one, other in zip(others.names, numbers.values, others.values, strict=True):
        if not abs(one - other) <= (SLACK_OF_MEAN if name.endswith(MEAN) else 0.0):  # nor NaN
            wrong.append(f"{site}.{name}: {one} instead of {other}")
    if wrong or (numbers.names, numbers.parts) != (others.names, others.parts):
        raise SystemExit(f"samples of the kernel are not those of torch: {', '.join(wrong)}")


def costs_of(steps: Samples) -> dict[str, float]:
    """Medians of the host's time, warm and not, and what the device does, of a sampled step."""
    found: dict[str, float] = {}
    for name, between in (("warm", lambda: None), ("cold", other_work)):
        spent: dict[str, list[float]] = {}
        parts = Parts(steps.probe)
        for _ in range(STEPS):
            between()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            parts.begin()
            begun = time.perf_counter()
            steps.step()
            parts.spent["whole"] = time.perf_counter() - begun
            for part, seconds in parts.spent.items():
                spent.setdefault(part, []).append(seconds)
        parts.end()
        found |= {f"{name}_{p}_us": statistics.median(x) * 1e6 for p, x in spent.items()}
    if DEVICE == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):  # one of them with weights
                steps.step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found["device_us"] = sum(e.device_time for e in events) / 5
        found["launches"] = len(events) / 5
        for event in events:
            if "window_samples" in event.name:
                found["longest_launch_us"] = max(
                    found.get("longest_launch_us", 0.0), event.device_time
                )
    return found


_JUNK = bytearray(64 << 20)


def other_work() -> None:
    """Some that leaves no code of a sampled step in caches."""
    json.loads(json.dumps(list(range(100_000))))
    bytes(_JUNK)


class Thread:
    """What the thread of a watch did: for each window its times, and products that it replayed."""

    def __init__(self, watch: DriftWatch) -> None:
        self.windows: list[dict[str, Any]] = []
        judge: Any = watch._judge
        judge._judge, self._look = self._timed, judge._judge
        self._replay: Any = drift_judge.replay
        drift_judge.replay = self._counted  # type: ignore[assignment]

    def _counted(self, site: Any, **options: Any) -> Any:
        self.windows[-1]["products"] += len(options["only"])
        return self._replay(site, **options)

    def _timed(self, window: Any) -> None:
        begun, cpu = time.perf_counter(), time.thread_time()
        self.windows.append({"products": 0})
        self._look(window)
        self.windows[-1] |= {
            "ms": (time.perf_counter() - begun) * 1e3, "cpu_ms": (time.thread_time() - cpu) * 1e3,
        }  # fmt: skip

    def end(self) -> None:
        drift_judge.replay = self._replay


def measure(case: str, asked: argparse.Namespace) -> dict[str, Any]:
    every, rounds, size = asked.every, asked.rounds, asked.size
    torch._dynamo.reset()
    watched, alone = (Training(case, asked.model, size, asked.kernels) for _ in range(2))
    control_ms, control_other_ms = control(watched, alone)
    with watched.handle.watch(budget=BUDGET, every=2) as watch:
        thread = Thread(watch)
        off: set[tuple[str, str]] = set()
        for _ in range(3):  # the first judgements may turn products off: compiled again in graphs
            for training in (watched, alone):
                for _ in range(8):  # compiled, and captured, sampled and not
                    training.step()
            watch.apply(wait=True)
            # Other kernels are no cost of watching: the other model has the same products.
            now = set(watched.handle.turned_off)
            for places, is_on in ((now - off, False), (off - now, True)):
                if places:
                    alone.handle.turn(sorted(places), is_on)
            off = now
        for training in (watched, alone):  # where the last ones turned some
            training.step()
        off_at_first = watch.in_bf16
        native.wait()  # until then samples are taken in Python
        first = thread.windows.copy()
        probe: Any = watch._probe
        without_waits(watched, watch)
        apart = steps_apart(watched, alone, watch)
        probe.every = every
        graphs = COUNTERS["unique_graphs"]
        ratios, plain_ms, beyond_ms = [], [], []
        for place in range(-1, rounds):  # the clock of a GPU comes down to where it stays
            # Early in a block, so that what the thread does is within it.
            while watch.steps % every != every - every // 10:
                watched.step()
            watch.apply(wait=True)
            if place == 0:
                thread.windows.clear()
            found = {}
            for training in (watched, alone) if place % 2 else (alone, watched):
                found[training] = training.block_ms(every)
                begun = time.perf_counter()
                watch.apply(wait=True)
                if training is watched:
                    beyond_ms.append((time.perf_counter() - begun) * 1e3)
            if place >= 0:
                ratios.append(found[watched] / found[alone])
                plain_ms.append(found[alone])
        windows = thread.windows.copy()
        recompiled = COUNTERS["unique_graphs"] - graphs
        known = list(watch.events)
        quiet = quiet_run(watched, watch, thread, asked) if asked.quiet_steps else None
        windows_before = len(thread.windows)
        ways = DRIFTS if asked.model == "dlrm" else {}
        drifts = {name: found_after(watched, watch, drift) for name, drift in ways.items()}
        thread.end()
    return {
        "model": asked.model, "case": case, "samples": len(watched.inputs[0]), "every": every,
        "overhead": statistics.median(ratios) - 1.0, "overheads": [x - 1.0 for x in ratios],
        "overhead_interval": [x - 1.0 for x in interval_of(ratios)],
        "is_95_percent_interval": len(ratios) >= FEWEST,  # else the range of the rounds
        "library": str(native.status()), "kernel": probe._kernel.status(),
        "step_ms": statistics.median(plain_ms), "thread_beyond_block_ms": beyond_ms[1:],
        **apart, "first_windows": first, "windows": windows,
        "drift_windows": thread.windows[windows_before:],
        "layers": len({event.site for event in known}),
        "alarms": sum(bool(event.moved) for event in known), "recompiled": recompiled,
        "quiet": quiet, "drifts": drifts, "in_bf16": watch.in_bf16,
        "in_bf16_at_first": off_at_first,
        "control_ms": control_ms, "control_other_ms": control_other_ms,
        "host_waits": 0 if DEVICE == "cuda" else None,  # or an error was raised
    }  # fmt: skip


def steps_apart(watched: Training, alone: Training, watch: DriftWatch) -> dict[str, Any]:
    """Medians of sampled steps and of those before the next, each with an idle device before it.

    Until the host is done, and until the device is; of the first also without the thread, which
    takes the interpreter from the host as soon as the step is over, and what it consists of then.
    And medians of steps that are not watched, each behind such a step that is not sampled.
    """
    probe: Any = watch._probe
    judge: Any = watch._judge
    probe.every = APART_EVERY
    found: dict[str, list[float]] = {}
    parts = Parts(probe)
    for with_thread in (True, False):
        put = judge.put
        if not with_thread:
            judge.put = transfers_of
        for _ in range(APART * APART_EVERY):
            kind = "sampled" if probe.is_sampling else "other"
            is_kept = probe.is_sampling or watch.steps % APART_EVERY > APART_EVERY // 2
            parts.begin()
            host, whole = step_ms(watched)
            end = "" if with_thread else "_alone"
            if is_kept:
                found.setdefault(f"{kind}{end}_host_ms", []).append(host)
                found.setdefault(f"{kind}{end}_ms", []).append(whole)
            if kind == "sampled" and not with_thread:
                for name, spent in parts.spent.items():
                    found.setdefault(f"part_{name}_ms", []).append(spent * 1e3)
            host, whole = step_ms(alone)
            if is_kept and kind == "other":  # of both loops apart, as the clock drifts
                found.setdefault(f"unwatched{end}_host_ms", []).append(host)
                found.setdefault(f"unwatched{end}_ms", []).append(whole)
        judge.put = put
        watch.apply(wait=True)
    parts.end()
    return {name: statistics.median(values) for name, values in found.items()}


def control(watched: Training, alone: Training) -> tuple[float, float]:
    """Medians of steps of both models before the watch: what differs is no cost of watching."""
    spent: dict[Training, list[float]] = {watched: [], alone: []}
    for place in range(APART * APART_EVERY):
        for training, values in spent.items():
            _, whole = step_ms(training)
            if place >= APART_EVERY:  # before, they are compiled and captured
                values.append(whole)
    return statistics.median(spent[watched]), statistics.median(spent[alone])


def step_ms(training: Training) -> tuple[float, float]:
    """Time of a step until the host is done, and until the device is."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    training.step()
    host = time.perf_counter() - begun
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return host * 1e3, (time.perf_counter() - begun) * 1e3


class Parts:
    """What of the host's time a step spends on samples of both passes, on hooks, and at its end."""

    NAMES = ("forward", "backward", "weights", "end")

    def __init__(self, probe: Any) -> None:
        self.spent: dict[str, float] = {}
        self._taking, self._probe, self._end_window = hooks.taking, probe, probe._end_window
        self._recorders: dict[Any, Any] = {r: r.weight_gradient for r in probe._recorders.values()}
        hooks.taking = self._timed_taking  # type: ignore[assignment]
        probe._end_window = self._timed("end", self._end_window)
        for recorder, hook in self._recorders.items():
            recorder.weight_gradient = self._timed("weights", hook)

    def begin(self) -> None:
        self.spent = dict.fromkeys(self.NAMES, 0.0)

    def end(self) -> None:
        hooks.taking = self._taking
        self._probe._end_window = self._end_window
        for recorder in self._recorders:
            del recorder.weight_gradient

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            found = call(*args)
            self.spent[name] += time.perf_counter() - begun
            return found

        return timed

    @contextlib.contextmanager
    def _timed_taking(self) -> Iterator[Any]:
        begun = time.perf_counter()
        with self._taking() as wanted:
            yield wanted
        name = "backward" if hooks.is_backward_under_way() else "forward"
        self.spent[name] += time.perf_counter() - begun


def interval_of(values: list[float]) -> tuple[float, float]:
    """Of the median of what values are a sample of, at 95 %, by their order.

    Of fewer than `FEWEST` values it is their range, which holds the median less often.
    """
    ordered, count = sorted(values), len(values)
    below = [sum(math.comb(count, i) for i in range(k + 1)) / 2**count for k in range(count)]
    cut = sum(share <= 0.025 for share in below)
    return ordered[max(cut - 1, 0)] if cut else ordered[0], ordered[-max(cut, 1)]


def interval_words(low: float, high: float, rounds: int) -> str:
    """An interval of `interval_of`, or the range of a few rounds, as which it is told."""
    if rounds < FEWEST:
        return f"range of {rounds} rounds {low:+.2%} to {high:+.2%}, no 95 % interval"
    return f"95 % interval {low:+.2%} to {high:+.2%}"


def without_waits(watched: Training, watch: DriftWatch) -> None:
    """Sampled steps and others, in which an error is raised where the host waits for the GPU.

    The thread waits for it, on purpose: meanwhile it gets no windows.
    """
    if DEVICE == "cpu":
        return
    judge: Any = watch._judge
    watch.apply(wait=True)
    look, judge._judge = judge._judge, lambda window: None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            watched.step()
        watch.apply(wait=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        judge._judge = look


def quiet_run(
    watched: Training, watch: DriftWatch, thread: Thread, asked: argparse.Namespace
) -> dict[str, Any]:
    """Alarms while the model learns on batches of one distribution."""
    earlier, windows, begun = len(watch.events), len(thread.windows), time.perf_counter()
    before = [x.detach().float().clone() for x in watched.model.parameters()]
    judge: Any = watch._judge  # until now each window was of the same batch
    judge._ranges = Ranges({})
    watched.learn(asked.quiet_steps, asked.quiet_rate)
    watch.apply(wait=True)
    moved = [
        float((x.detach().float() - y).norm() / y.norm().clamp(min=1e-30))
        for x, y in zip(watched.model.parameters(), before, strict=True)
        if x.dim() > 1
    ]
    if hasattr(watched, "ignored"):
        watched.ignore()
    events = watch.events[earlier:]
    return {
        "steps": asked.quiet_steps, "rate": asked.quiet_rate,
        "seconds": time.perf_counter() - begun,
        "windows": len(thread.windows) - windows, "weights_moved": statistics.median(moved),
        "alarms": [event.row() for event in events if event.moved],
        "swaps": [event.row() for event in events if event.action != STAYS],
    }  # fmt: skip


def found_after(
    watched: Training, watch: DriftWatch, drift: Callable[[Tensor], Tensor]
) -> dict[str, int | None]:
    """Steps from a drift until it is told, and until products run in bfloat16; compiled for it.

    A drift that leaves FP8 safe swaps nothing: the steps end three samples after it is told.
    """
    earlier, begun, graphs = len(watch.events), watch.steps, COUNTERS["unique_graphs"]
    probe: Any = watch._probe
    x = watched.inputs[1].data
    usual = x.clone()
    x.copy_(drift(usual))
    told = swapped = None
    while watch.steps - begun < (MOST_STEPS if told is None else told + 3 * probe.every):
        watched.step()
        new = watch.events[earlier:]
        if told is None and any(event.moved for event in new):
            told = watch.steps - begun
        if any(event.action == TO_BF16 for event in new):
            swapped = watch.steps - begun
            break
    for _ in range(3):
        watched.step()
    compiled = COUNTERS["unique_graphs"] - graphs
    x.copy_(usual)
    return {"told_after": told, "swapped_after": swapped, "compiled": compiled}


def drift_line(row: dict[str, Any], name: str) -> str:
    told, swapped, compiled = row["drifts"][name].values()
    late = "" if max(told or MOST_STEPS, swapped or 0) <= BAR else f" (more than {BAR})"
    then = "FP8 stays" if swapped is None else f"swapped after {swapped}, {compiled} compiled"
    return f"  {name}: told after {told} steps, {then}{late}"


def quiet_lines(quiet: dict[str, Any] | None) -> list[str]:
    if quiet is None:
        return []
    return [
        f"  quiet: {quiet['steps']} steps at {quiet['rate']:g} in {quiet['seconds']:.1f} s, "
        f"{quiet['windows']} windows, "
        f"weights moved by {quiet['weights_moved']:.1%}; {len(quiet['alarms'])} alarms, "
        f"{len(quiet['swaps'])} swaps",
        *(
            f"    step {x['step']}: {x['site']}/{x['gemm']} {x['action']}: {x['moved']}"
            for x in quiet["alarms"] + [y for y in quiet["swaps"] if not y["moved"]]
        ),
    ]


def sample_lines(row: dict[str, Any]) -> list[str]:
    """What is printed of samples alone."""
    found = [f"samples of {len(LAYERS)} layers at {row['samples']}, equal; kernel {row['status']}"]
    for way in ("by_kernel", "by_torch"):
        costs, words = row[way], way.replace("_", " ")
        for state in ("warm", "cold"):
            # No backward pass is under way: samples of both passes are told as of the forward pass.
            whole, passes, _, weights, end = (
                costs[f"{state}_{part}_us"] for part in ("whole", *Parts.NAMES)
            )
            found.append(
                f"  {words}, {state}: {whole:.0f} us of the host, samples {passes:.0f}, hooks of "
                f"weights {weights:.0f}, the end {end:.0f}"
            )
        if "device_us" in costs:
            found.append(
                f"  {words}: device {costs['device_us']:.0f} us, {costs['launches']:.1f} launches, "
                f"the longest of the kernel {costs.get('longest_launch_us', 0.0):.0f} us"
            )
    return found


def lines_of(row: dict[str, Any]) -> list[str]:
    """What is printed of a case."""

    def thread(name: str) -> str:
        windows = row[name]
        cpu = [window["cpu_ms"] for window in windows]
        products = [window["products"] for window in windows]
        return f"cpu {[round(x, 2) for x in cpu]} ms, products {products}"

    low, high = row["overhead_interval"]
    beyond = row["sampled_alone_host_ms"] - row["other_alone_host_ms"]
    with_thread = row["sampled_host_ms"] - row["sampled_alone_host_ms"]
    taken = sum(row[f"part_{name}_ms"] for name in Parts.NAMES)
    of_sample, of_step = row["sampled_ms"] - row["other_ms"], row["other_ms"] - row["unwatched_ms"]
    same = row["control_ms"] - row["control_other_ms"]  # between both models without a watch
    expected = (of_sample / row["every"] + of_step - same) / row["unwatched_ms"]
    return [
        f"{row['model']}, {row['case']} at {row['samples']}: overhead {row['overhead']:+.2%} "
        f"({interval_words(low, high, len(row['overheads']))}) of {row['step_ms']:.3f} ms, "
        f"{[round(x, 3) for x in row['overheads']]}; {row['layers']} layers, "
        f"{row['recompiled']} compiled, {row['alarms']} alarms; {row['took_s']} s",
        f"  host of a step {row['other_host_ms']:.3f} ms, sampled {row['sampled_host_ms']:.3f}, "
        f"without the thread {row['sampled_alone_host_ms']:.3f}; until the device is done "
        f"{row['other_ms']:.3f}, {row['sampled_ms']:.3f} and {row['sampled_alone_ms']:.3f}; not "
        f"watched {row['unwatched_host_ms']:.3f} and {row['unwatched_ms']:.3f}; later, without the "
        f"thread, {row['other_alone_host_ms']:.3f} and {row['other_alone_ms']:.3f}, not watched "
        f"{row['unwatched_alone_host_ms']:.3f} and {row['unwatched_alone_ms']:.3f}",
        f"  a sampled step beyond another {beyond:.3f} ms of the host: samples forward "
        f"{row['part_forward_ms']:.3f}, backward {row['part_backward_ms']:.3f}, hooks of weights "
        f"{row['part_weights_ms']:.3f}, its end {row['part_end_ms']:.3f}, the rest (its graphs) "
        f"{beyond - taken:.3f}; with the thread {with_thread:+.3f}; library: {row['library']}, "
        f"kernel of samples: {row['kernel']}",
        f"  expected of these: {of_sample:.3f} ms of a sample, and {of_step:+.4f} of every step, "
        f"{same:+.4f} without a watch, are {expected:.2%}; of samples alone "
        f"{of_sample / row['every'] / row['unwatched_ms']:.2%}",
        f"  thread: first {thread('first_windows')}; in rounds {thread('windows')}; of the drift "
        f"{thread('drift_windows')}",
        *quiet_lines(row["quiet"]),
        *(drift_line(row, name) for name in row["drifts"]),
        f"  in bf16: {', '.join(row['in_bf16'])}; of both models in the rounds: "
        f"{', '.join(row['in_bf16_at_first']) or 'none'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(KNOWN)}; all of them if none")
    parser.add_argument("--model", choices=("dlrm", "wukong"), default="dlrm")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=200, help="steps between samples")
    parser.add_argument("--quiet-steps", type=int, default=0, help="in which it learns; 0: none")
    parser.add_argument(
        "--quiet-rate", type=float, default=1e-4, help="of learning; at 0 batches alone differ"
    )
    parser.add_argument("--size", choices=list(SIZES), default="mlperf")
    parser.add_argument("--kernels", help="for all products, as of convert, instead of a budget")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if unknown := set(asked.cases) - set(KNOWN):
        parser.error(f"no case {', '.join(unknown)}; expected some of {', '.join(KNOWN)}")
    rows = []
    for case in asked.cases or KNOWN:
        begun = time.perf_counter()
        row = measure_samples(asked) if case == SAMPLES else measure(case, asked)
        row |= {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
            "torch": torch.__version__, "took_s": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        rows.append(row)
        lines = sample_lines if case == SAMPLES else lines_of
        print(*lines(row), sep="\n", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
