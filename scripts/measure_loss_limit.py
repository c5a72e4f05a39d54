"""Measure `Conversion.limit_loss` on models that learned a teacher: its prediction, and the time.

    python scripts/measure_loss_limit.py [wukong] [dhen] [dlrm] [hstu] [--out FILE]

Each model trains in bfloat16 for some hundred steps, is converted for predictions, and limited. Its
loss is that expected over the teacher's clicks, whose noise is then no part of a change. On fresh
batches the change is measured of the limited model, and of budgets for all products alike; then the
steps are timed in CUDA graphs in turn. Prints a line for each model, and writes all figures to
FILE. ``--size tiny --samples 512 --batches 32 --kernels row`` tries it on a CPU, with kernels
emulated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lokakern
from lokakern.bench.models import arms, catalog, hstu
from lokakern.bench.models.arms import Arm, Built, Predictor, Setting
from lokakern.bench.models.blocks import Batch, ClickModel
from lokakern.bench.models.click_log import HELD_OUT, ClickLog
from lokakern.bench.models.learning import learn
from lokakern.bench.models.throughput import Stepper, elapsed_us, stepper
from lokakern.conversion.loss_limit import LossLimit
from lokakern.measure import timing
from lokakern.probe.loss import LossChange, interval_of, relative_change
from lokakern.types import COMPILED_GRAPH

UNIFORM, LEAST_GAIN, CLOSE, TINY = 0.06, 1.05, 0.3, 1e-5
FREE = 0.1  # the budget before the limit
# Budgets below, at which other kernels are chosen on an H200; then there is bfloat16.
LOWER = (0.045, 0.04, 0.039, 0.038)
FRESH = HELD_OUT + 2**20  # the first step of batches that no limit saw
ROUNDS = 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Item = tuple[Batch, Tensor]  # samples, and probabilities of clicks
Loss = Callable[[Item], Tensor]

# Samples of a batch, and batches for the limit: a million for the loss of each half where runs are
# short, because a change of 1e-4 of a loss is seen in no fewer.
MODELS = {"wukong": (8192, 256), "dhen": (8192, 128), "dlrm": (8192, 256), "hstu": (1024, 384)}
catalog.CATALOG["hstu"] = hstu.ENTRY


def built_of(
    setting: Setting, state: arms.State, wanted: float | str | None,
    limit: Callable[[Loss, Any], LossLimit] | None = None,
) -> tuple[Built, LossLimit | None]:  # fmt: skip
    """The model converted by a budget or forced kernels (None: bfloat16), and limited."""
    model = setting.build(0)
    arms.apply_mods(model)
    model.load_state_dict(state)
    arms.to_bfloat16(model).eval()
    is_forced = isinstance(wanted, str)
    handle = lokakern.convert(
        model, *([] if is_forced else [wanted]), kernels=wanted if is_forced else None,
        inference=True, regime=COMPILED_GRAPH,
    )  # fmt: skip
    outcome = limit(loss_by(model), handle) if limit else None
    backend = "inductor" if DEVICE.type == "cuda" else "eager"
    interact: Any = torch.compile(model.interact, dynamic=False, backend=backend)
    return Built(Arm(str(wanted), ""), model, interact, handle), outcome


def loss_by(model: ClickModel) -> Loss:
    predictor = Predictor(model, model.interact)

    def loss(item: Item) -> Tensor:
        logits = predictor.logits(predictor.embed(item[0]))
        return F.binary_cross_entropy_with_logits(logits.double(), item[1])

    return loss


def items_of(log: ClickLog, first: int, count: int, samples: int) -> list[Item]:
    batches = [log.batch(first + place, samples) for place in range(count)]
    return [(batch, log.teacher_logits(batch).double().sigmoid()) for batch in batches]


def losses_of(built: Built, items: Sequence[Item]) -> list[float]:
    loss = loss_by(built.model)
    return [float(loss(item)) for item in items]


def change_of(built: Built, items: Sequence[Item], plain: Sequence[float]) -> LossChange:
    pairs = zip(plain, losses_of(built, items), strict=True)
    return interval_of([relative_change(*pair) for pair in pairs])


def steps_us(steppers: dict[str, Stepper]) -> dict[str, list[float]]:
    """Times of a step in rounds, in random order in each."""
    timing.warm(DEVICE)
    found: dict[str, list[float]] = {name: [] for name in steppers}
    order, shuffled = list(steppers), random.Random(0)
    for place in range(-1, ROUNDS):  # the first replay of a graph also uploads it
        shuffled.shuffle(order)
        for name in order:
            us = elapsed_us(steppers[name], DEVICE) / steppers[name].steps
            if place >= 0:
                found[name].append(us)
    return found


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    sizes = catalog.CATALOG[name].sizes
    size = asked.size if asked.size in sizes else catalog.CATALOG[name].default_size
    config = catalog.config_named(name, size)
    samples, count = asked.samples or MODELS[name][0], asked.batches or MODELS[name][1]
    setting = Setting(name, size, config, samples, False, DEVICE, UNIFORM)
    training = replace(setting, training=True, samples=min(samples, 2048))
    begun = time.perf_counter()
    trained = arms.build(Arm(arms.BASELINE, "", compiled=False), training, 0)
    run = learn(trained, training, 0, asked.steps)
    state = {key: x.clone() for key, x in trained.model.state_dict().items()}
    trained_s = time.perf_counter() - begun
    log = ClickLog(setting.inputs, 0, DEVICE)
    batches = items_of(log, HELD_OUT, count, samples)
    fresh = items_of(log, FRESH, count, samples)

    plain, _ = built_of(setting, state, None)
    before = losses_of(plain, fresh)
    built = {"bf16": plain}
    changes = {}
    for budget in (UNIFORM, FREE):
        limit = None if budget is UNIFORM else lambda loss, handle: handle.limit_loss(
            loss, batches, relative=asked.relative
        )  # fmt: skip
        key = "limited" if limit else "uniform"
        built[key], outcome = built_of(setting, state, asked.kernels or budget, limit)
        changes[key] = change_of(built[key], fresh, before)
    assert outcome is not None
    equal = "uniform"
    most = changes["limited"].mean
    if changes["uniform"].mean > most:
        equal = "bf16"
        for budget in () if asked.kernels else LOWER:
            other, _ = built_of(setting, state, budget)
            found = change_of(other, fresh, before)
            if found.mean <= most:
                equal = f"uniform {budget}"
                built[equal], changes[equal] = other, found
                break
    steppers = {key: stepper(x, setting, whole=False) for key, x in built.items()}
    times = steps_us(steppers)
    ratios = [a / b for a, b in zip(times[equal], times["limited"], strict=True)]
    gain, true, predicted = statistics.median(ratios), changes["limited"], outcome.predicted.mean
    return {
        "model": f"{name} {size}", "samples": samples, "relative": asked.relative,
        "loss": statistics.fmean(before), "trained": asdict(run.quality),
        "everything_in_fp8": asdict(outcome.before), "predicted": predicted,
        "added": outcome.added, "second_half": asdict(outcome.change),
        "fresh": {key: asdict(change) for key, change in changes.items()},
        "kept": [site.name for site in outcome.sites if site.is_kept],
        "judged": len(outcome.sites), "runs": outcome.runs, "summary": outcome.summary,
        "step_us": {key: statistics.median(us) for key, us in times.items()},
        "timers": {key: f"{x.timer} {x.note}".strip() for key, x in steppers.items()},
        "equal_loss": equal, "faster_than_equal_loss": gain,
        "is_predicted": abs(true.mean - predicted) <= max(CLOSE * abs(predicted), TINY),
        "is_within": true.high <= asked.relative, "is_faster": gain >= LEAST_GAIN,
        "trained_s": trained_s, "limited_s": outcome.seconds,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    fresh = "; ".join(
        f"{key} {x['mean']:+.1e} ({x['low']:+.1e} to {x['high']:+.1e})"
        for key, x in row["fresh"].items()
    )
    us = ", ".join(f"{key} {us:.0f}" for key, us in row["step_us"].items())
    bars = ", ".join(f"{key[3:]} {row[key]}" for key in ("is_predicted", "is_within", "is_faster"))
    return (
        f"{row['model']} at {row['samples']}: loss {row['loss']:.4f}, predicted "
        f"{row['predicted']:+.1e}, second half {row['second_half']['mean']:+.1e}, fresh: {fresh}; "
        f"{len(row['kept'])} of {row['judged']} kept; step us: {us}; {row['equal_loss']} has at "
        f"most the loss of limited, which is {row['faster_than_equal_loss']:.3f} times as fast; "
        f"{bars}; {row['took_s']} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"{', '.join(MODELS)}; all of them if none")
    parser.add_argument("--relative", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--batches", type=int, help="for the limit, and as many fresh ones")
    parser.add_argument("--samples", type=int, help="of a batch")
    parser.add_argument("--size", help="of the catalog, where a model has it")
    parser.add_argument("--kernels", help="for all products, as of convert, instead of budgets")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if unknown := set(asked.models) - MODELS.keys():
        parser.error(f"no model {', '.join(unknown)}; expected some of {', '.join(MODELS)}")
    rows = []
    for name in asked.models or MODELS:
        begun = time.perf_counter()
        with torch._dynamo.config.patch(recompile_limit=64):
            row = measure(name, asked)
        torch._dynamo.reset()
        row |= {
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
            "torch": torch.__version__, "took_s": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        rows.append(row)
        print(line_of(row), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
