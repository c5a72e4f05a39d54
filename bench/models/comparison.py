"""Arms of a model side by side: how fast, how good, and by which kernels."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lokakern.bench.fp8_gain.gain import time_us
from lokakern.bench.fp8_gain.products import counted, suite_of
from lokakern.bench.models import arms as ways
from lokakern.bench.models.arms import Arm, Built, Setting, apply_mods
from lokakern.bench.models.blocks import Batch
from lokakern.bench.models.catalog import CATALOG
from lokakern.bench.models.learning import Quality, Run, best_quality, judged, learn
from lokakern.bench.models.throughput import (
    BATCHES,
    GRAPH,
    Pace,
    Shares,
    Stepper,
    pace_words,
    race,
    shares_of,
    stepper,
)  # fmt: skip
from lokakern.errors import UnsupportedError
from lokakern.measure import timing
from lokakern.nn.linear import Routed
from lokakern.nn.module_scan import shape_of
from lokakern.nn.routed_matmul import kernel_at, traced_route
from lokakern.probe.loss import LossChange, interval_of
from lokakern.selection.choice import Choice

EXPLAINED = 0.10  # share of the step's gain; a larger gap is explained


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The kernel of one product of a layer."""

    site: str  # name of the layer
    gemm: str  # "output", "grad_input" or "grad_weight"
    rows: int  # rows of the layer's input
    n: int  # outputs
    k: int  # inputs
    kernel: str  # the kernel; "bf16" if nothing is quantized
    bf16_us: float | None  # time of the unquantized product in the database, if known
    us: float | None  # time of the kernel with its quantization, if known
    why: str  # a short reason

    @property
    def gain_us(self) -> float:
        """Time saved according to the database."""
        return 0.0 if self.bf16_us is None or self.us is None else self.bf16_us - self.us


def layer_choices(built: Built, rows: dict[str, int], training: bool) -> list[LayerChoice]:
    """The kernel of each product of the layers that were called."""
    found = []
    for name, site in built.conversion.sites.items():
        if name not in rows:
            continue
        m = rows[name]
        n, k, _, _ = shape_of(site.module)
        for route in site.routes if training else site.routes[:1]:
            text = traced_route(route.text) if built.arm.compiled else route.text
            kernel = kernel_at(text, m) or "bf16"
            plain, chosen = _times(route.choices, route.gemm, m, kernel)
            found.append(LayerChoice(name, route.gemm, m, n, k, kernel, plain, chosen, route.why))
    return found


def _times(
    choices: Sequence[Choice], gemm: str, m: int, kernel: str
) -> tuple[float | None, float | None]:
    """Times of the unquantized product and of the kernel at m rows of a layer."""
    if gemm == "grad_weight":  # m is the summed dimension: each m has its own table
        choices = [choice for choice in choices if choice.problem.k == m]
    if not choices:
        return None, None
    table = choices[0].table
    at = choices[0].m if gemm == "grad_weight" else m
    fastest = table.plain_at(at)
    plain = None if fastest is None else fastest.latency_us
    return plain, plain if kernel == "bf16" else time_us(table, kernel, at)


def gap_words(
    choices: Sequence[LayerChoice], gained_us: float, before: Shares, after: Shares
) -> str:
    """Compare the sum of the layers' gains with the gain of the step, and explain the difference.

    Shares are of the baseline (before) and of the arm (after).
    """
    summed = sum(choice.gain_us for choice in choices)
    missing = sum(choice.bf16_us is None for choice in choices)
    words = (
        f"the layers' gains add up to {summed:.0f} us by the database, the step's is "
        f"{gained_us:.0f} us"
    )
    if missing:
        words += f"; {missing} of {len(choices)} products have no time in it"
    gap = gained_us - summed
    if abs(gap) <= EXPLAINED * abs(gained_us):
        return f"{words}: within {EXPLAINED:.0%}"
    moved = {kind: before.us[kind] - us for kind, us in after.us.items()}
    seen = moved["GEMM"] + moved["quantizing"]
    rest = ", ".join(
        f"{kind} {us:+.0f}" for kind, us in moved.items() if kind not in ("GEMM", "quantizing")
    )
    idle = gained_us - sum(moved.values())
    return (
        f"{words}. Of the gap of {gap:+.0f} us, GEMMs and quantizing, {seen:.0f} us shorter in the "
        f"profile, are {seen - summed:+.0f}; what is gained (+) or lost (-) elsewhere: {rest}, "
        f"gaps between kernels {idle:+.0f}"
    )


@dataclass
class Result:
    """The measurements of an arm."""

    arm: Arm
    failed: str = ""  # why there are no measurements, else ""
    pace: Pace | None = None  # step time against the baseline's
    runs: list[Run] = field(default_factory=list)  # training runs by seed
    # Relative change of the expected log loss against the baseline, over 2 seeds or more.
    change: LossChange | None = None
    # The kernels of each layer of a converted arm.
    choices: list[LayerChoice] = field(default_factory=list)
    gap: str = ""  # `gap_words` of the choices
    shares: Shares | None = None  # time of the step by kind of kernel
    notes: tuple[str, ...] = ()  # remarks on the arm


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of all arms, the baseline first, and the best possible quality."""

    setting: Setting
    results: tuple[Result, ...]
    best: Quality | None  # None where nobody knows the probabilities of clicks


def compare(
    setting: Setting,
    arms: Sequence[Arm],
    *,
    steps: int,
    seeds: int,
    whole: bool = True,
    say: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Measure the step time and quality of arms of a model.

    Args:
        setting: The model and where it runs.
        arms: The baseline first.
        steps: Training steps before the evaluation; 0 skips it.
        seeds: Number of runs of each arm.
        whole: Whether the timed step includes the tables.
        say: Called with progress messages.

    Raises:
        UnsupportedError: The baseline cannot be built.
    """
    # All arms compile the same code for modules of their own; this is no recompilation.
    with torch._dynamo.config.patch(recompile_limit=8 * len(arms)):
        results = _Bench(setting, steps, seeds, whole, say).results(arms)
    best = None if setting.data else best_quality(setting, 0)
    return Comparison(setting, tuple(results), best)


@dataclass
class _Bench:
    """The arguments of `compare`, and parameters by whether Mods were applied, and by seed."""

    setting: Setting
    steps: int
    seeds: int
    whole: bool
    say: Callable[[str], None]
    states: dict[tuple[bool, int], ways.State] = field(default_factory=dict)

    def results(self, arms: Sequence[Arm]) -> list[Result]:
        if not self.setting.training and self.steps:
            self.train_states(arms)
        report: Any = None
        for arm in arms:  # Probe before any CUDA graph is captured: it resets the compiler
            if arm.name == ways.PROBED:
                self.say(f"{arm.name}: probing")
                try:
                    report = ways.probed(arm, self.setting, 0, self.state_of(arm))
                except Exception as error:  # reported when the arm is measured
                    report = error
        first = Result(arms[0])
        clock = self.measure(first)
        results = [first]
        for arm in arms[1:]:
            result = Result(arm)
            results.append(result)
            try:
                is_probed = arm.name == ways.PROBED
                if is_probed and isinstance(report, Exception):
                    raise report
                self.measure(result, first, clock, report if is_probed else None)
            except UnsupportedError as error:
                result.failed = f"left out: {error}"
            except Exception as error:  # a library may raise anything; other arms continue
                result.failed = "{}: {}".format(*timing.status_and_reason(error))
            gc.collect()
        return results

    def state_of(self, arm: Arm, seed: int = 0) -> ways.State | None:
        return self.states.get((arm.has_mods, seed))

    def measure(
        self,
        result: Result,
        first: Result | None = None,
        clock: Stepper | None = None,
        report: Any = None,
    ) -> Stepper:
        """Fill the result of an arm; ``first`` and ``clock`` are the baseline's, once it ran."""
        arm, setting = result.arm, self.setting
        self.say(f"{arm.name}: building")
        on_gpu = setting.device.type == "cuda"
        before = torch.cuda.memory_allocated(setting.device) if on_gpu else 0
        built = ways.build(arm, setting, 0, self.state_of(arm), report)
        result.notes = built.notes
        if built.conversion is not None:
            result.choices = choices_of(built, setting)
        mine = stepper(built, setting, whole=self.whole, before=before)
        self.say(f"{arm.name}: timing")
        result.pace = race(clock or mine, mine, setting.device)
        self.say(f"{arm.name}: {pace_words(result.pace)}")
        result.shares = shares_of(mine.step, BATCHES, setting.device)
        if result.choices and first is not None and first.shares is not None:
            gained = result.pace.baseline_us - result.pace.step_us
            result.gap = gap_words(result.choices, gained, first.shares, result.shares)
        result.runs = [self.run(built, seed) for seed in range(self.seeds if self.steps else 0)]
        if first is not None and len(result.runs) > 1:
            result.change = interval_of(
                [
                    run.quality.expected_log_loss / base.quality.expected_log_loss - 1
                    for run, base in zip(result.runs, first.runs, strict=True)
                ]
            )
        return mine

    def run(self, built: Built, seed: int) -> Run:
        setting = self.setting
        self.say(f"{built.arm.name}: seed {seed}")
        if setting.training:
            return learn(built, setting, seed, self.steps)
        # Not compiled: each seed has its own weights, and compiling a graph takes a minute.
        plain = replace(built.arm, compiled=False)
        other = ways.build(plain, setting, seed, self.state_of(plain, seed))
        log = setting.log(seed)
        return Run(plain.name, seed, (), judged(other.predictor(), log, setting.samples))

    def train_states(self, arms: Sequence[Arm]) -> None:
        """Train the parameters of predictions in bf16, with Mods and without."""
        training = replace(self.setting, training=True)
        for has_mods in sorted({arm.has_mods for arm in arms}):
            teacher = Arm(ways.BASELINE if has_mods else ways.AS_WRITTEN, "", has_mods)
            built = ways.build(teacher, training, 0)
            for seed in range(max(1, self.seeds)):
                words = " with Mods" if has_mods else ""
                self.say(f"training what predicts{words}: seed {seed}")
                learn(built, training, seed, self.steps)
                state = built.model.state_dict()
                self.states[has_mods, seed] = {name: x.cpu().clone() for name, x in state.items()}


def choices_of(built: Built, setting: Setting) -> list[LayerChoice]:
    """The kernel of each product of a converted arm at the setting's batch."""
    batch = setting.log(0).batch(0, setting.samples)
    plain = built.uncompiled
    model = plain.trainer() if setting.training else plain.predictor()
    sites = {name: site.module for name, site in built.conversion.sites.items()}
    with torch.no_grad(), counted(sites) as calls:
        model.logits(model.embed(batch))
    rows = dict(calls.keys())
    return layer_choices(built, rows, setting.training)


def rows_of(found: Comparison) -> list[dict[str, Any]]:
    """One row for each arm, with units in the names of columns."""
    rows = []
    for result in found.results:
        pace, change = result.pace, result.change
        qualities = [run.quality for run in result.runs]
        row = {
            "arm": result.arm.name,
            "step us": pace and pace.step_us,
            "+- us": pace and pace.margin_us,
            "x bf16": pace and pace.speedup,
            "+-": pace and pace.speedup_margin,
            "samples/s": pace and round(found.setting.samples / pace.step_us * 1e6),
            "graph": pace and pace.timer == GRAPH,
            "peak GiB": pace and pace.peak_gib,
            "breaks": pace and pace.graph_breaks,
            "recompiles": pace and pace.recompiles,
            "log loss": _mean([quality.log_loss for quality in qualities]),
            "NE": _mean([quality.normalized_entropy for quality in qualities]),
            "AUC": _mean([quality.auc for quality in qualities]),
            "expected %": change and 100 * change.mean,
            "+- %": change and 100 * (change.high - change.low) / 2,
            "note": result.failed or (pace.note if pace else ""),
        }
        rows.append({name: _finite(value) for name, value in row.items()})
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- suites

# Of the operands in a sweep: most inputs of these layers come from a norm.
DISTRIBUTION = "X3"
FEW = 16  # samples of the traced batch; the rows of every layer scale with them


def products_of(setting: Setting) -> Counter[tuple[int, int, int]]:
    """Count the (rows, outputs, inputs) of the linear layers on the meta device."""
    with torch.device("meta"):
        model = CATALOG[setting.name].build(setting.config)
    apply_mods(model)
    layers = {
        name: layer for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Routed)
        and not getattr(layer, "is_mixing", False)  # never quantized
    }  # fmt: skip
    inputs = setting.inputs
    offsets, ids = inputs.offsets(FEW, "meta"), FEW * sum(inputs.slots)
    with torch.device("meta"), counted(layers) as calls:
        history = torch.empty(FEW, inputs.history, dtype=torch.int64)
        model(Batch(torch.empty(FEW, inputs.dense), torch.empty(ids, dtype=torch.int64), offsets,
                    history, torch.empty(FEW)))  # fmt: skip
    found: Counter[tuple[int, int, int]] = Counter()
    for (name, rows), count in calls.items():
        n, k, _, _ = shape_of(layers[name])
        found[rows * setting.samples // FEW, n, k] += count
    return found


def write_suite(setting: Setting, path: Path) -> int:
    """Write a suite of the layers for ``sweep --suite``; returns their number."""
    forms = ["gemm", "prepared", *(["grad_input", "grad_weight"] if setting.training else [])]
    products = products_of(setting)
    text = suite_of(
        (
            {"m": m, "n": n, "k": k, "count": count, "distribution": DISTRIBUTION, "forms": forms}
            for (m, n, k), count in products.items()
        ),
        name=f"{setting.name}-{setting.size}-{setting.samples}",
        title=f"layers of {setting.name} {setting.size}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return len(products)
