"""A synthetic click log: Zipf ids in bags, skewed dense features, and labels of a teacher.

A batch is a function of the log's seed and the step (on one type of device), so all arms of a
comparison see the same samples. The teacher is the same for all seeds: its logit adds effects of
single ids and features, products between them, and the match of the history with the first table's
bag. Clicks are drawn with its probability, so the best possible log loss is known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.bench.models.blocks import PADDING, Batch, Inputs

# As in NVIDIA's recommender benchmark: 1.05 for ids, 1.2 for lengths of histories.
ID_EXPONENT, LENGTH_EXPONENT = 1.05, 1.2
MISSING_SHARE = 0.1  # of empty bags
ZERO_SHARE, SPREAD = 0.3, 2.0  # of dense features, as distribution X7
CLICK_RATE = 0.1
# Of the teacher's logits: at this click rate a perfect model has a normalized entropy of 0.8.
DEVIATION = 1.5
LATENT = 4  # columns of the teacher's latent factors
CALIBRATION_SAMPLES = 8192
HELD_OUT = 2**40  # the first step of the batches for evaluation


def zipf(uniform: Tensor, largest: Tensor, exponent: float) -> Tensor:
    """Map uniform numbers to Zipf ranks from 1 to ``largest``: a bounded Pareto law, rounded down.

    Args:
        uniform: In [0, 1), float64.
        largest: Broadcastable to it.
        exponent: The share of rank r is proportional to ``r^-exponent``; not 1.
    """
    power = 1 - exponent
    end = (largest.double() + 1) ** power
    ranks = (1 + uniform * (end - 1)) ** (1 / power)
    return ranks.long().clamp(min=1).minimum(largest)


@dataclass(frozen=True, slots=True)
class _Teacher:
    """Parameters of the click probabilities."""

    effects: Tensor  # ``[1 + rows]``, effects of single ids
    latent: Tensor  # ``[1 + rows, LATENT]``, factors of products between two halves of the tables
    slot_half: Tensor  # ``[slots, 2]``, weights of a slot in each half
    dense_effects: Tensor  # ``[dense]``
    dense_latent: Tensor  # ``[dense, LATENT]``, added to the second half
    mixing: Tensor  # ``[dense, dense]``, correlates the dense features

    @staticmethod
    def make(inputs: Inputs, device: torch.device | str) -> _Teacher:
        generator = torch.Generator().manual_seed(2026)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        rows, dense = 1 + sum(inputs.rows), inputs.dense
        effects, latent = normal(rows), normal(rows, LATENT)
        effects[PADDING], latent[PADDING] = 0, 0
        slots = torch.tensor(inputs.slots)
        # A few tables matter most, as in real data; a model learns these first.
        weight = 1 / torch.arange(1, len(slots) + 1)
        share = (weight * slots.rsqrt()).repeat_interleave(slots)
        half = (torch.arange(len(slots)) % 2).repeat_interleave(slots)
        slot_half = torch.stack([share * (half == 0), share * (half == 1)], dim=1).to(device)
        mixing = torch.eye(dense, device=device) + normal(dense, 2) @ normal(2, dense) / 2
        mixing /= mixing.norm(dim=0)
        return _Teacher(
            effects, latent, slot_half, normal(dense), normal(dense, LATENT), mixing
        )  # fmt: skip

    def parts(self, batch: Batch, slots: tuple[int, ...]) -> Tensor:
        """Single effects, products, and match of the history, ``[3, batch]``, uncalibrated."""
        ids = batch.ids.view(len(batch.dense), -1)
        dense = batch.dense - batch.dense.new_tensor(1.0)  # about its mean
        single = (self.effects[ids] @ self.slot_half).sum(1) + dense @ self.dense_effects
        first, second = torch.einsum("bsl,sh->hbl", self.latent[ids], self.slot_half)
        products = (first * (second + dense @ self.dense_latent)).sum(1)
        present = (batch.history != PADDING).sum(1, keepdim=True).clamp(min=1)
        past = self.latent[batch.history].sum(1) / present.sqrt()
        suits = (past * self.latent[ids[:, : slots[0]]].sum(1)).sum(1)
        return torch.stack([single, products, suits])


class ClickLog:
    """Batches by step.

    Args:
        inputs: What the model is fed.
        seed: Seed of the samples, not of the teacher.
        device: Where batches are generated.
    """

    def __init__(self, inputs: Inputs, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.inputs, self.seed, self.device = inputs, seed, torch.device(device)
        slots = torch.tensor(inputs.slots)
        self._rows = torch.tensor(inputs.rows).repeat_interleave(slots).to(device)
        self._starts = torch.tensor(inputs.starts).repeat_interleave(slots).to(device)
        self._slots = slots.to(device)
        # Place of a slot within its bag.
        self._places = torch.cat([torch.arange(count) for count in inputs.slots]).to(device)
        self._teacher = _Teacher.make(inputs, device)
        self._scale = torch.zeros(3, 1, device=device)
        self._intercept = torch.zeros((), device=device)
        self._calibrate()

    def batch(self, step: int, samples: int) -> Batch:
        """Samples of a step; steps from `HELD_OUT` on are never trained on."""
        return self._draw(f"{self.seed} {step}", samples)

    def teacher_logits(self, batch: Batch) -> Tensor:
        """Logits ``[batch]`` of the click probabilities."""
        parts = self._teacher.parts(batch, self.inputs.slots)
        return self._intercept + (self._scale * parts).sum(0)

    def probabilities(self, batch: Batch) -> Tensor:
        """Probabilities ``[batch]`` by which labels were drawn, float64."""
        return self.teacher_logits(batch).double().sigmoid()

    def _draw(self, stream: str, samples: int) -> Batch:
        words = hashlib.sha256(stream.encode()).digest()
        seed = int.from_bytes(words[:7], "little")
        generator = torch.Generator(self.device).manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=self.device, dtype=torch.float64)

        dense = self._dense(samples, generator)
        ids = self._starts + zipf(uniform(samples, len(self._rows)), self._rows, ID_EXPONENT) - 1
        lengths = 1 + (uniform(samples, len(self._slots)) * self._slots).long()
        lengths[uniform(samples, len(self._slots)) < MISSING_SHARE] = 0
        lengths = lengths.repeat_interleave(self._slots, dim=1, output_size=len(self._rows))
        ids[self._places >= lengths] = PADDING
        history = self._history(uniform(samples, self.inputs.history), uniform(samples, 1))
        offsets = self.inputs.offsets(samples, self.device)
        blank = Batch(dense, ids.flatten(), offsets, history, dense.new_zeros(samples))
        clicked = uniform(samples) < self.probabilities(blank)
        return blank._replace(labels=clicked.float())

    def _dense(self, samples: int, generator: torch.Generator) -> Tensor:
        """``log(1 + count)`` of counts that are 0 or log-normal."""
        shape = (samples, self.inputs.dense)
        normal = torch.randn(shape, generator=generator, device=self.device)
        counts = (SPREAD * (normal @ self._teacher.mixing)).exp()
        counts[torch.rand(shape, generator=generator, device=self.device) < ZERO_SHARE] = 0
        return counts.log1p()

    def _history(self, places: Tensor, length: Tensor) -> Tensor:
        longest = self.inputs.history
        if not longest:
            return places.long()
        items = torch.tensor(self.inputs.rows[0], device=self.device)
        history = zipf(places, items, ID_EXPONENT)
        lengths = zipf(length, torch.tensor(longest, device=self.device), LENGTH_EXPONENT)
        history[torch.arange(longest, device=self.device) < longest - lengths] = PADDING
        return history

    def _calibrate(self) -> None:
        """Scale the parts equally, the logits to `DEVIATION` and the clicks to `CLICK_RATE`."""
        batch = self._draw("calibration", CALIBRATION_SAMPLES)
        parts = self._teacher.parts(batch, self.inputs.slots)
        deviation = parts.std(1, keepdim=True)
        counts = (deviation > 0).sum().sqrt()
        self._scale = torch.where(deviation > 0, DEVIATION / (counts * deviation), 0.0)
        logits = (self._scale * parts).sum(0).double()
        low, high = torch.full_like(logits[0], -50), torch.full_like(logits[0], 50)
        for _ in range(60):  # bisection
            middle = (low + high) / 2
            above = (logits + middle).sigmoid().mean() > CLICK_RATE
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        self._intercept = ((low + high) / 2).float()
