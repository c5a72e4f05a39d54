"""What is compared: a model, its sizes, where it runs, and how a step of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.bench.models.batch import Batch, Inputs
from lokakern.bench.models.catalog import CATALOG, Model
from lokakern.bench.models.tables import Tables

LEARNING_RATE = 1e-3

Interact = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model in a given size, trained or asked for predictions.

    Attributes:
        name: Of the model.
        size: Name of its size.
        config: Of that size.
        samples: In a batch.
        training: Whether steps are of training; else they are predictions.
        device: Where it runs.
        budget: Largest row error of a product that is quantized.
    """

    name: str
    size: str
    config: Any
    samples: int
    training: bool
    device: torch.device
    budget: float

    @property
    def inputs(self) -> Inputs:
        """What the model is fed."""
        return cast(Inputs, self.config.inputs)

    def build(self, seed: int) -> nn.Module:
        """The model as written, with parameters of a seed, the same on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CATALOG[self.name].build(self.config)
        return model.to(self.device)


def to_bfloat16(model: nn.Module) -> nn.Module:
    """All parameters but those of the tables, in place: what predictions are made with."""
    for module in model.modules():
        if not isinstance(module, Tables):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16(), False))
    return model


class Predictor:
    """Predictions in bfloat16.

    Args:
        model: After `to_bfloat16`.
        interact: Its `interact`, compiled or not.
    """

    def __init__(self, model: nn.Module, interact: Interact) -> None:
        self.model, self.interact = model.eval(), interact

    @torch.no_grad()
    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """What the tables give, as the layers take it."""
        given = (batch.dense, *cast(Model, self.model).embed(batch))
        return [x.bfloat16() if x.is_floating_point() else x for x in given]

    @torch.no_grad()
    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of what `embed` gave."""
        return self.interact(*given).float()


class Trainer:
    """Steps of training: bfloat16 by autocast, parameters in float32, Adam.

    Args:
        model: Its parameters are changed.
        interact: Its `interact`, compiled or not.
    """

    def __init__(self, model: nn.Module, interact: Interact) -> None:
        self.model, self.interact = model.train(), interact
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.Adam(
            model.parameters(), LEARNING_RATE, fused=True, capturable=self.device.type == "cuda"
        )

    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """What the tables give, in bfloat16: so they send it, and are sent its gradients."""
        found = cast(Model, self.model).embed(batch)
        return (batch.dense, *(x.bfloat16() if x.is_floating_point() else x for x in found))

    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of what `embed` gave."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.interact(*given).float()

    def loss(self, given: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean cross entropy of what `embed` gave."""
        return F.binary_cross_entropy_with_logits(self.logits(given), labels)

    def step(self, given: Sequence[Tensor] | Batch, labels: Tensor) -> Tensor:
        """One step on a batch, or on what `embed` gave of one; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.embed(given) if isinstance(given, Batch) else given, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()
