"""A model of the zoo: its layers, and the inputs that it expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lokakern.bench.models.blocks import ClickModel
from lokakern.workloads.distributions import distribution_named, draw_rows

DRAWN_ROWS = 1024  # a larger batch repeats them: its time and its errors stay the same


@dataclass(frozen=True, slots=True)
class Feature:
    """An input ``[batch, columns]`` of a model, in bfloat16."""

    columns: int  # columns
    distribution: str  # name of the distribution of its values, such as X5
    is_learned: bool = True  # whether a training step computes its gradient, as of embeddings

    def draw(self, batch: int, seed: int) -> Tensor:
        """Values ``[batch, columns]`` in bfloat16, on the CPU."""
        distribution = distribution_named(self.distribution)
        drawn = draw_rows(distribution, min(batch, DRAWN_ROWS), self.columns, seed).bfloat16()
        return drawn.repeat(-(-batch // DRAWN_ROWS), 1)[:batch].contiguous()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of the zoo: `build` makes a module from its features to logits ``[rows, tasks]``."""

    build: Callable[[], nn.Module]
    features: tuple[Feature, ...]


class DensePart(nn.Module):
    """A click model without its tables: embeddings ``[batch, tables * dim]`` are an input."""

    def __init__(self, model: ClickModel) -> None:
        super().__init__()
        del model.tables
        self.model, self.dim = model, model.config.dim

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        logits: Tensor = self.model.interact(dense, embedded.view(len(embedded), -1, self.dim))
        return logits[:, None]


class Parallel(nn.Module):
    """Modules that read the same input; their outputs are concatenated."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)
