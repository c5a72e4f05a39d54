"""What arms learn: the same samples in the same order; quality on held-out ones; loss curves."""

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

from lokakern.bench.models.arms import Built, Predictor, Setting, Trainer, apply_mods
from lokakern.bench.models.blocks import Batch
from lokakern.bench.models.click_log import HELD_OUT, ClickLog
from lokakern.errors import MeasurementError


@dataclass(frozen=True, slots=True)
class Quality:
    """Of predictions of clicks; what is not finite has an infinite loss.

    Attributes:
        log_loss: Mean cross entropy, in nats.
        expected_log_loss: Its mean over the clicks that might have been; two models differ by it as
            by the other, without the chance of clicks.
        normalized_entropy: The same over that of a model that always says the click rate.
        auc: How probably a click is ranked before what is none; equal ranks count half.
        samples: How many.
    """

    log_loss: float
    expected_log_loss: float
    normalized_entropy: float
    auc: float
    samples: int


def quality_of(logits: Tensor, labels: Tensor, probabilities: Tensor) -> Quality:
    """Quality of logits ``[samples]``, computed in float64.

    Args:
        logits: What a model says.
        labels: 1 where there was a click, else 0.
        probabilities: With which these were drawn.

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
    """Exact, by the sum of the ranks of clicks (Mann and Whitney); equal logits share a rank."""
    _, place, count = torch.unique(logits, return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - (count - 1) / 2
    above = float((rank[place] * labels).sum()) - clicks * (clicks + 1) / 2
    return above / (clicks * (len(labels) - clicks))


HELD_OUT_BATCHES = 32
WARM_UP = 0.1  # of the steps


@dataclass(frozen=True, slots=True)
class Run:
    """An arm with a seed.

    Attributes:
        arm: Its name.
        seed: Of parameters and samples.
        losses: Of each step, before it; none of predictions.
        quality: On held-out samples.
    """

    arm: str
    seed: int
    losses: tuple[float, ...]
    quality: Quality


def share_of_rate(step: int, steps: int) -> float:
    """Part of the learning rate at a step: up during `WARM_UP` of all, then down to nothing.

    At a constant rate the last steps' samples, and what rounding made of them, decide more about a
    model than its arithmetic does.
    """
    return min((step + 1) / max(1.0, WARM_UP * steps), 1 - step / (steps + 1))


def restart(built: Built, setting: Setting, seed: int) -> None:
    """Give an arm the parameters that every arm with its Mods begins with at a seed."""
    fresh = setting.build(seed)
    if built.arm.has_mods:
        apply_mods(fresh)
    built.model.load_state_dict(fresh.state_dict())


def learn(built: Built, setting: Setting, seed: int, steps: int) -> Run:
    """Train for so many steps from the start, then judge on held-out samples.

    The learning rate rises, then falls to nothing: see `share_of_rate`.
    """
    restart(built, setting, seed)
    log, trainer = ClickLog(setting.inputs, seed, setting.device), built.trainer()
    losses = torch.empty(steps, device=setting.device)  # read once: a step must not wait
    schedule = LambdaLR(trainer.optimizer, lambda step: share_of_rate(step, steps))
    for step in range(steps):
        batch = log.batch(step, setting.samples)
        losses[step] = trainer.step(batch, batch.labels)
        schedule.step()
    quality = judged(built.uncompiled.trainer(), log, setting.samples)
    return Run(built.arm.name, seed, tuple(losses.tolist()), quality)


def judged(model: Trainer | Predictor, log: ClickLog, samples: int) -> Quality:
    """Quality on the held-out samples of a log."""
    was_training = model.model.training
    model.model.eval()
    found = _quality(log, samples, lambda batch: model.logits(model.embed(batch)))
    model.model.train(was_training)
    return found


def best_quality(setting: Setting, seed: int) -> Quality:
    """What the teacher itself reaches on the same held-out samples: nobody can do better."""
    log = ClickLog(setting.inputs, seed, setting.device)
    return _quality(log, setting.samples, log.teacher_logits)


@torch.no_grad()
def _quality(log: ClickLog, samples: int, logits_of: Callable[[Batch], Tensor]) -> Quality:
    found = []
    for step in range(HELD_OUT_BATCHES):
        batch = log.batch(HELD_OUT + step, samples)
        found.append((logits_of(batch), batch.labels, log.teacher_logits(batch).double().sigmoid()))
    return quality_of(*(torch.cat(parts) for parts in zip(*found, strict=True)))


# --- curves

SMOOTHED = 50  # points of a curve: a step's loss is mostly noise


def save_curves(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Write the runs into a folder.

    Args:
        runs: Of all arms and seeds.
        folder: Made if it is not there.
        title: Above the plot.

    Returns:
        The files: ``runs.jsonl`` with one line for each run, and ``loss.png``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "runs.jsonl"
    lines.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs), encoding="utf-8")
    trained = [run for run in runs if run.losses]
    if not trained or importlib.util.find_spec("matplotlib") is None:
        return [lines]
    return [lines, _plot(trained, folder / "loss.png", title)]


def smoothed(losses: Sequence[float], points: int = SMOOTHED) -> tuple[list[float], list[float]]:
    """Means over equal runs of steps: the steps in their middles, and the means."""
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
