"""The click log: reproducible, with the documented distributions, and learnable."""

from __future__ import annotations

import math

import pytest
import torch

from lokakern.bench.models.blocks import PADDING, Inputs
from lokakern.bench.models.click_log import (
    CLICK_RATE,
    DEVIATION,
    HELD_OUT,
    ID_EXPONENT,
    MISSING_SHARE,
    ClickLog,
    zipf,
)
from lokakern.bench.models.learning import quality_of

INPUTS = Inputs(dense=6, rows=(2000, 3, 500), slots=(1, 2, 5), history=8)


@pytest.fixture(scope="module")
def log() -> ClickLog:
    return ClickLog(INPUTS, seed=1)


def test_a_batch_depends_only_on_seed_and_step(log: ClickLog) -> None:
    log.batch(3, 64)  # what was drawn before does not matter
    again = ClickLog(INPUTS, seed=1).batch(7, 64)
    assert all(map(torch.equal, log.batch(7, 64), again))
    for other in (log.batch(8, 64), ClickLog(INPUTS, seed=2).batch(7, 64)):
        assert not torch.equal(other.ids, again.ids)
        assert not torch.equal(other.dense, again.dense)


def test_the_teacher_is_the_same_for_every_seed(log: ClickLog) -> None:
    batch = log.batch(0, 64)
    other = ClickLog(INPUTS, seed=2)
    torch.testing.assert_close(other.teacher_logits(batch), log.teacher_logits(batch))


def test_ids_are_in_their_tables_and_bags_may_be_short_or_empty(log: ClickLog) -> None:
    ids = log.batch(0, 4096).ids.view(-1, 8)
    for start, rows, slots in zip(INPUTS.starts, INPUTS.rows, (ids[:, :1], ids[:, 1:3], ids[:, 3:]),
                                  strict=True):  # fmt: skip
        named = slots[slots != PADDING]
        assert start <= named.min() and named.max() < start + rows
        empty = (slots == PADDING).all(1).float().mean().item()
        assert empty == pytest.approx(MISSING_SHARE, abs=0.02)  # 4 deviations
    lengths = (ids[:, 3:] != PADDING).sum(1)
    assert set(lengths.tolist()) == {0, 1, 2, 3, 4, 5}
    filled = ids[:, 3:] != PADDING
    assert torch.equal(filled, filled.long().cummin(1).values.bool())  # no holes within a bag


def test_histories_are_padded_at_the_front(log: ClickLog) -> None:
    present = log.batch(0, 512).history != PADDING
    assert torch.equal(present, present.long().cummax(1).values.bool())
    assert present[:, -1].all() and not present[:, 0].all()


def test_popularity_follows_zipf() -> None:
    """The share of ranks 8 to 512 falls by the exponent, in 2e5 draws of 10000 ids."""
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranks = zipf(uniform, torch.tensor(10_000), ID_EXPONENT)
    assert ranks.min() == 1 and ranks.max() <= 10_000

    def share(low: int) -> float:
        return ((ranks >= low) & (ranks < 2 * low)).double().mean().item()

    octaves = math.log2(512 / 8)
    slope = (math.log2(share(512)) - math.log2(share(8))) / octaves
    assert slope == pytest.approx(1 - ID_EXPONENT, abs=0.03)  # of an octave, not of one rank


def test_dense_features_are_skewed_with_zeros_and_a_mean(log: ClickLog) -> None:
    dense = log.batch(0, 8192).dense.double()
    assert (dense == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)
    counts = dense.expm1()
    centered = counts - counts.mean(0)
    kurtosis = (centered**4).mean(0) / (centered**2).mean(0) ** 2
    assert dense.min() >= 0
    assert kurtosis.min() > 30, "a Gaussian has 3"
    assert (dense.mean(0) / dense.std(0)).min() > 0.5
    correlation = torch.corrcoef(dense.t()).fill_diagonal_(0)
    assert correlation.abs().max() > 0.1


def test_clicks_follow_the_teacher(log: ClickLog) -> None:
    """The teacher is calibrated, and better than distorted predictions."""
    batches = [log.batch(HELD_OUT + step, 8192) for step in range(4)]
    labels = torch.cat([batch.labels for batch in batches])
    logits = torch.cat([log.teacher_logits(batch) for batch in batches])
    assert labels.mean().item() == pytest.approx(CLICK_RATE, abs=0.01)
    assert logits.std().item() == pytest.approx(DEVIATION, rel=0.15)
    chances = logits.double().sigmoid()
    best = quality_of(logits, labels, chances)
    # As many clicks as were expected, but for their chance.
    assert best.log_loss == pytest.approx(best.expected_log_loss, rel=0.02)
    assert 0.6 < best.normalized_entropy < 0.95
    for worse in (logits * 1.5, logits * 0.5, logits + 0.5):
        found = quality_of(worse, labels, chances)
        assert found.log_loss > best.log_loss
        assert found.expected_log_loss > best.expected_log_loss
    for low, high in ((-9.0, -3.0), (-3.0, -1.0), (-1.0, 9.0)):
        among = (logits > low) & (logits <= high)
        said, seen = logits[among].sigmoid().mean().item(), labels[among].mean().item()
        assert said == pytest.approx(seen, abs=4 * math.sqrt(said / int(among.sum())))


def test_every_part_of_the_teacher_affects_its_logits(log: ClickLog) -> None:
    batch = log.batch(0, 4096)
    said = log.teacher_logits(batch)
    for changed in (
        batch._replace(dense=torch.zeros_like(batch.dense)),
        batch._replace(ids=torch.zeros_like(batch.ids)),
        batch._replace(history=torch.zeros_like(batch.history)),
    ):
        assert (log.teacher_logits(changed) - said).std() > 0.2
