"""How good predictions are: log loss, normalized entropy, AUC; and changes of them, in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
