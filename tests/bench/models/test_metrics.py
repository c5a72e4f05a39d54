"""Log loss, normalized entropy and AUC against plain float64 arithmetic over all pairs."""

from __future__ import annotations

import math

import pytest
import torch

from lokakern.bench.models.learning import quality_of
from lokakern.errors import MeasurementError


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels", [7, 10**6], ids=["ties", "no ties"])
def test_quality_matches_its_definitions(seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (300,), generator=generator) / levels * 6 - 4
    probabilities = torch.rand(300, generator=generator)
    labels = (torch.rand(300, generator=generator) < probabilities).float()
    found = quality_of(logits, labels, probabilities)

    losses, expected, wins = [], [], []
    pairs = list(zip(logits.double().tolist(), labels.tolist(), strict=True))
    for (logit, label), chance in zip(pairs, probabilities.double().tolist(), strict=True):
        p = 1 / (1 + math.exp(-logit))
        losses.append(-math.log(p) if label else -math.log(1 - p))
        expected.append(-chance * math.log(p) - (1 - chance) * math.log(1 - p))
    for logit, label in pairs:
        for other, no in pairs:
            if label == 1 and no == 0:
                wins.append(1.0 if logit > other else 0.5 if logit == other else 0.0)
    rate = sum(label for _, label in pairs) / 300
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found.log_loss == pytest.approx(sum(losses) / 300, rel=1e-12)
    assert found.expected_log_loss == pytest.approx(sum(expected) / 300, rel=1e-12)
    assert found.normalized_entropy == pytest.approx(sum(losses) / 300 / entropy, rel=1e-12)
    assert found.auc == pytest.approx(sum(wins) / len(wins), rel=1e-12)
    assert found.samples == 300


def test_predicting_the_click_rate_has_a_normalized_entropy_of_one() -> None:
    labels = torch.tensor([1.0, 0, 0, 0])
    found = quality_of(torch.full((4,), math.log(1 / 3), dtype=torch.float64), labels, labels)
    assert found.normalized_entropy == pytest.approx(1)
    assert found.auc == 0.5


def test_diverged_predictions_have_an_infinite_loss() -> None:
    found = quality_of(torch.tensor([0.0, math.nan]), *[torch.tensor([1.0, 0.0])] * 2)
    assert (found.log_loss, found.expected_log_loss) == (math.inf, math.inf)
    assert (found.normalized_entropy, found.auc) == (math.inf, 0.5)


def test_equal_labels_raise() -> None:
    with pytest.raises(MeasurementError, match="0 clicks in 5 samples"):
        quality_of(torch.zeros(5), torch.zeros(5), torch.zeros(5))
