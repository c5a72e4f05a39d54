"""Measure what FP8 changes in the loss of a trained model, over pairs of runs.

    python scripts/measure_training_loss.py MODEL [--seeds N] [--steps N] [--seconds S] [--out FILE]

Each seed trains a model in bfloat16 for the steps of ``--warm``, until its loss no longer falls
fast, and then two copies of it on the same further samples at a third of the learning rate: one
goes on in bfloat16, one in FP8. The metric is the relative change of the log loss expected over the
teacher's clicks on held-out samples, each copy predicting as it was trained, with a 95 % interval
by Student's t over seeds. ``--warm 0`` trains both from the beginning: two runs that differ by a
rounding then learn at slightly different times, which is most of what they differ by.

Nothing is compiled for a further seed. From the third on, a seed begins only if ``--seconds``
suffice for one that takes as long as the longest before, the first one aside, which compiles. FILE
is written after each. ``--size tiny --batch 256 --arm fp8-rowwise`` tries it on a CPU, with kernels
emulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lokakern.bench.models import arms, catalog, hstu
from lokakern.bench.models.arms import LEARNING_RATE, Built, Setting, State
from lokakern.bench.models.comparison import choices_of
from lokakern.bench.models.learning import (
    HELD_OUT_BATCHES,
    best_quality,
    judged,
    learn,
    parameters_of,
)  # fmt: skip
from lokakern.errors import MeasurementError
from lokakern.probe.loss import LossChange, interval_of, relative_change

BAR = 2e-4  # largest upper end of the interval
RATE = LEARNING_RATE / 3  # after the warm steps, as late in a decay
WARM_SEEDS = 2**20  # added to a seed: the samples of warm steps are no samples of the pair
HELD_OUT_SAMPLES = 2**16  # at least, and 32 batches: 2**14 added 0.003 % to deviations
# By default: the size, and the samples of a batch. With 128 tokens in a sample, from 512 samples on
# no product of HSTU's published width is quantized by times on an H200.
MODELS = {
    "wukong": ("S", 8192), "dhen": ("medium", 8192), "dlrm": ("mlperf", 8192), "hstu": ("zoo", 256)
}  # fmt: skip
catalog.CATALOG["hstu"] = hstu.ENTRY


@dataclass(frozen=True, slots=True)
class Pair:
    """Expected log losses of a seed's two copies on the same held-out samples."""

    seed: int
    start: float | None  # before the pair's steps, on other samples; None without warm steps
    bf16: float
    fp8: float  # predicting in FP8
    fp8_in_bf16: float  # the parameters trained in FP8, predicting in bfloat16
    teacher: float  # of the teacher, the least that is possible
    seconds: float

    @property
    def change(self) -> float:
        """Relative change of the loss by FP8."""
        return relative_change(self.bf16, self.fp8)


@dataclass(frozen=True, slots=True)
class Course:
    """Steps of a seed, and largest learning rates, which fall to 0."""

    steps: int  # of each copy
    rate: float
    warm: int  # of the model that both copies go on from; 0 for parameters as initialized
    warm_rate: float = LEARNING_RATE


def pair_of(baseline: Built, other: Built, setting: Setting, seed: int, course: Course) -> Pair:
    """Train and judge the two copies of a seed."""
    begun = time.perf_counter()
    batches = max(HELD_OUT_BATCHES, HELD_OUT_SAMPLES // setting.samples)
    before: float | None = None
    if course.warm:
        run = learn(baseline, setting, WARM_SEEDS + seed, course.warm, None, course.warm_rate)
        before = run.quality.expected_log_loss
        start: State = {key: x.clone() for key, x in baseline.model.state_dict().items()}
    else:
        start = parameters_of(baseline.arm, setting, seed)
    plain, quantized = (
        learn(
            built, setting, seed, course.steps, start, course.rate, batches
        ).quality.expected_log_loss
        for built in (baseline, other)
    )
    baseline.model.load_state_dict(other.model.state_dict())
    log = setting.log(seed)
    mixed = judged(baseline.uncompiled.trainer(), log, setting.samples, batches)
    best = best_quality(setting, seed, batches)
    return Pair(
        seed, before, plain, quantized, mixed.expected_log_loss, best.expected_log_loss,
        time.perf_counter() - begun,
    )  # fmt: skip


def within(seconds: float, measure: Callable[[int], Pair], seeds: range) -> Iterator[Pair]:
    """Pairs of seeds, as long as one more of the longest fits into the seconds."""
    begun, longest = time.perf_counter(), 0.0
    for place, seed in enumerate(seeds):
        if place and time.perf_counter() - begun + longest > seconds:
            return
        pair = measure(seed)
        if place:  # the first one compiles
            longest = max(longest, pair.seconds)
        yield pair


def quantized_words(built: Built, setting: Setting) -> str:
    """How many products are quantized at the setting's batch, by kind.

    Raises:
        MeasurementError: None is.
    """
    if built.conversion is None:
        return "; ".join(built.notes)
    choices = choices_of(built, setting)
    all_of = Counter(choice.gemm for choice in choices)
    fp8 = [choice for choice in choices if choice.kernel != "bf16"]
    if not fp8:
        raise MeasurementError(
            f"{built.arm.name} quantizes none of {len(choices)} products of {setting.name} "
            f"{setting.size} at {setting.samples} samples, so both copies are the same; choose "
            "another --batch, or --arm fp8-rowwise, which forces FP8"
        )
    few = Counter(choice.gemm for choice in fp8)
    kernels = ", ".join(f"{name} {n}" for name, n in Counter(c.kernel for c in fp8).most_common())
    shares = ", ".join(f"{few[gemm]} of {n} {gemm}" for gemm, n in all_of.items())
    return f"{shares} ({kernels})"


def facts_of(pairs: list[Pair]) -> dict[str, Any]:
    """The pairs, their intervals if there are two or more, and means of losses."""
    return {
        "pairs": [asdict(pair) for pair in pairs],
        "change": _interval([pair.change for pair in pairs]),
        "change_in_bf16": _interval([relative_change(p.bf16, p.fp8_in_bf16) for p in pairs]),
        "bf16": statistics.fmean(pair.bf16 for pair in pairs),
        "teacher": statistics.fmean(pair.teacher for pair in pairs),
    }


def _interval(changes: list[float]) -> dict[str, Any] | None:
    return asdict(interval_of(changes)) if len(changes) > 1 else None


def line_of(facts: dict[str, Any]) -> str:
    """The figures of `facts_of` in words."""
    count = len(facts["pairs"])
    if count < 2:
        return f"{count} seed: no interval"
    change, in_bf16 = LossChange(**facts["change"]), LossChange(**facts["change_in_bf16"])
    is_within = "within" if change.high <= BAR else "not within"
    return (
        f"{100 * change.mean:+.4f} % ({100 * change.low:+.4f} to {100 * change.high:+.4f}), "
        f"{is_within} {100 * BAR:.2f} %, {count} seeds; its parameters in bf16 "
        f"{100 * in_bf16.mean:+.4f} % ({100 * in_bf16.low:+.4f} to {100 * in_bf16.high:+.4f}); "
        f"loss {facts['bf16']:.5f}, of the teacher {facts['teacher']:.5f}"
    )


def asked_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", help="of the catalog")
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument("--arm", default=arms.BUDGETED, help="as of the command model")
    parser.add_argument("--most-rows", type=int, default=1000, help="of a table")
    parser.add_argument("--warm", type=int, default=300, help="steps in bfloat16 before")
    parser.add_argument("--warm-rate", type=float, default=LEARNING_RATE, help="of these steps")
    parser.add_argument("--steps", type=int, default=100, help="of each copy")
    parser.add_argument("--rate", type=float, help="their largest learning rate")
    parser.add_argument("--seeds", type=int, default=1000, help="at most")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    size, batch = MODELS[asked.model]
    asked.size, asked.batch = asked.size or size, asked.batch or batch
    if asked.rate is None:
        asked.rate = RATE if asked.warm else LEARNING_RATE
    return asked


def main(words: list[str] | None = None) -> None:
    begun, asked = time.perf_counter(), asked_of(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = catalog.config_named(asked.model, asked.size, asked.most_rows)
    setting = Setting(asked.model, asked.size, config, asked.batch, True, device, 0.06)
    chosen = arms.arms_named((asked.arm,))
    # Probe resets the compiler, so all are built before one is compiled, which the first step does.
    baseline, other = (arms.build(arm, setting, 0) for arm in (chosen[0], chosen[-1]))
    quantized = quantized_words(other, setting)
    title = f"{asked.model} {asked.size}, {asked.arm}, {asked.batch} samples"
    print(f"{title}: {quantized}", flush=True)
    course = Course(asked.steps, asked.rate, asked.warm, asked.warm_rate)
    counters = torch._dynamo.utils.counters["stats"]
    graphs, pairs = None, list[Pair]()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    left = asked.seconds - (time.perf_counter() - begun)

    def measure(seed: int) -> Pair:
        return pair_of(baseline, other, setting, seed, course)

    # Both arms compile the same code for modules of their own; this is no recompilation.
    with torch._dynamo.config.patch(recompile_limit=16):
        for pair in within(left, measure, seeds):
            pairs.append(pair)
            graphs = graphs or counters["unique_graphs"]
            facts = {
                "asked": {key: str(x) for key, x in vars(asked).items()}, "quantized": quantized,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__, "graphs_of_first_seed": graphs,
                "graphs": counters["unique_graphs"], "seconds": time.perf_counter() - begun,
                **facts_of(pairs),
            }  # fmt: skip
            if asked.out:
                asked.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            print(
                f"seed {pair.seed}: {100 * pair.change:+.4f} % (start {pair.start}, bf16 "
                f"{pair.bf16:.5f}, {pair.seconds:.1f} s); {line_of(facts)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
