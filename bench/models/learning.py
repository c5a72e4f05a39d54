"""Training runs of arms on equal samples, their quality on held-out samples, and loss curves."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lokakern.bench.models.arms import (
    LEARNING_RATE,
    Arm,
    Built,
    Predictor,
    Setting,
    State,
    Trainer,
    apply_mods,
)  # fmt: skip
from lokakern.bench.models.blocks import Batch
from lokakern.bench.models.click_log import HELD_OUT, ClickLog
from lokakern.bench.models.recorded_log import RecordedLog
from lokakern.errors import MeasurementError


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of predicted clicks; non-finite predictions have an infinite loss."""

    log_loss: float  # mean cross entropy in nats
    # Its expectation over the clicks, which removes their sampling noise from comparisons of
    # models; of recorded clicks the same.
    expected_log_loss: float
    normalized_entropy: float  # `log_loss` over that of always predicting the click rate
    auc: float  # probability that a click is ranked before a non-click; ties count half
    samples: int  # number of samples


def quality_of(logits: Tensor, labels: Tensor, probabilities: Tensor) -> Quality:
    """Quality of logits ``[samples]``; labels (1 for a click) were drawn with probabilities.

    Raises:
        MeasurementError: All labels are equal.
    """
    clicks, count = int(labels.sum()), len(labels)
    if clicks in (0, count):
        raise MeasurementError(f"{clicks} clicks in {count} samples; expected some of both")
    if not logits.isfinite().all():
        return Quality(math.inf, math.inf, math.inf, 0.5, count)
    logits, labels = logits.double(), labels.double()
    loss, expected = (
        F.binary_cross_entropy_with_logits(logits, target).item()
        for target in (labels, probabilities.double())
    )
    rate = clicks / count
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    return Quality(loss, expected, loss / entropy, _auc(logits, labels, clicks), count)


def _auc(logits: Tensor, labels: Tensor, clicks: int) -> float:
    """Exact AUC by the rank sum of clicks (Mann and Whitney); ties share a rank."""
    _, place, count = torch.unique(logits, return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - (count - 1) / 2
    above = float((rank[place] * labels).sum()) - clicks * (clicks + 1) / 2
    return above / (clicks * (len(labels) - clicks))


HELD_OUT_BATCHES = 32
WARM_UP = 0.1  # of the steps


@dataclass(frozen=True, slots=True)
class Run:
    """A run of an arm with one seed."""

    arm: str  # the arm's name
    seed: int  # seed of parameters and samples
    losses: tuple[float, ...]  # loss before each step; empty for predictions
    quality: Quality  # quality on held-out samples


def share_of_rate(step: int, steps: int) -> float:
    """Share of the learning rate at a step: linear warm-up, then linear decay to 0.

    At a constant rate the samples of the last steps and their rounding affect a model more than its
    arithmetic does.
    """
    return min((step + 1) / max(1.0, WARM_UP * steps), 1 - step / (steps + 1))


def learn(
    built: Built,
    setting: Setting,
    seed: int,
    steps: int,
    start: State | None = None,
    rate: float = LEARNING_RATE,
    batches: int = HELD_OUT_BATCHES,
) -> Run:
    """Train in place, and evaluate.

    Nothing is compiled anew for another seed: its parameters are copied into those of the model.

    Args:
        built: The arm.
        setting: The model and where it runs.
        seed: Seed of the samples, and of the parameters unless ``start`` has them.
        steps: Number of training steps.
        start: Parameters to start from; None takes those of the seed, which are equal for all arms
            with these Mods.
        rate: The largest learning rate; `share_of_rate` has its course.
        batches: Number of held-out batches, as large as those of a step.
    """
    built.model.load_state_dict(parameters_of(built.arm, setting, seed) if start is None else start)
    log, trainer = setting.log(seed), built.trainer()
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    losses = torch.empty(steps, device=setting.device)  # read at the end, without waiting in a step
    schedule = LambdaLR(trainer.optimizer, lambda step: share_of_rate(step, steps))
    for step in range(steps):
        batch = log.batch(step, setting.samples)
        losses[step] = trainer.step(batch, batch.labels)
        schedule.step()
    quality = judged(built.uncompiled.trainer(), log, setting.samples, batches)
    return Run(built.arm.name, seed, tuple(losses.tolist()), quality)


def parameters_of(arm: Arm, setting: Setting, seed: int) -> State:
    """The parameters of a seed, after Mods if the arm has them."""
    fresh = setting.build(seed)
    if arm.has_mods:
        apply_mods(fresh)
    return fresh.state_dict()


def judged(
    model: Trainer | Predictor,
    log: ClickLog | RecordedLog,
    samples: int,
    batches: int = HELD_OUT_BATCHES,
) -> Quality:
    """Quality on held-out batches of so many samples of a log."""
    was_training = model.model.training
    model.model.eval()
    found = _quality(log, samples, batches, lambda batch: model.logits(model.embed(batch)))
    model.model.train(was_training)
    return found


def best_quality(setting: Setting, seed: int, batches: int = HELD_OUT_BATCHES) -> Quality:
    """Quality of the teacher on the same held-out samples, the upper limit for any model."""
    log = ClickLog(setting.inputs, seed, setting.device)
    return _quality(log, setting.samples, batches, log.teacher_logits)


@torch.no_grad()
def _quality(
    log: ClickLog | RecordedLog, samples: int, batches: int, logits_of: Callable[[Batch], Tensor]
) -> Quality:
    if isinstance(log, RecordedLog):  # of which each sample counts once
        batches = max(1, min(batches, log.held_out_batches(samples)))
    found = []
    for step in range(batches):
        batch = log.batch(HELD_OUT + step, samples)
        found.append((logits_of(batch), batch.labels, log.probabilities(batch)))
    return quality_of(*(torch.cat(parts) for parts in zip(*found, strict=True)))


# --- curves

SMOOTHED = 50  # points of a curve: single losses are noisy


def save_curves(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Write runs as ``runs.jsonl``, and with matplotlib as ``loss.png``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "runs.jsonl"
    lines.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs), encoding="utf-8")
    trained = [run for run in runs if run.losses]
    if not trained or importlib.util.find_spec("matplotlib") is None:
        return [lines]
    return [lines, _plot(trained, folder / "loss.png", title)]


def smoothed(losses: Sequence[float], points: int = SMOOTHED) -> tuple[list[float], list[float]]:
    """Means over windows of steps: the middle step of each window, and its mean."""
    width = max(1, len(losses) // points)
    pieces = [losses[start : start + width] for start in range(0, len(losses), width)]
    middles = [place * width + (len(piece) - 1) / 2 for place, piece in enumerate(pieces)]
    return middles, [sum(piece) / len(piece) for piece in pieces]


def _plot(runs: Sequence[Run], path: Path, title: str) -> Path:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    ordered = sorted(runs, key=lambda run: run.arm)
    for place, (arm, mine) in enumerate(itertools.groupby(ordered, lambda run: run.arm)):
        for number, run in enumerate(mine):
            axes.plot(*smoothed(run.losses), color=f"C{place}", lw=1, alpha=0.8,
                      label=arm if number == 0 else None)  # fmt: skip
    axes.set(xlabel="step", ylabel="log loss (nats), mean over neighboring steps", title=title)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
