"""What arms learn: the same samples in the same order, and held-out ones to tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lokakern.bench.models.arms import Built, apply_mods
from lokakern.bench.models.batch import Batch
from lokakern.bench.models.click_log import HELD_OUT, ClickLog
from lokakern.bench.models.metrics import Quality, quality_of
from lokakern.bench.models.setting import Predictor, Setting, Trainer

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
