"""HSTU over a history of ids and the other features, a token each, with a logit for each sample.

Training scripts add `ENTRY` to the catalog as "hstu"; the command `model` has HSTU in its zoo,
without tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lokakern.bench.models.blocks import Batch, ClickModel, Inputs
from lokakern.bench.models.catalog import Entry
from lokakern.bench.models.zoo.hstu import HSTU


@dataclass(frozen=True, slots=True)
class HSTUConfig:
    """Sizes of an HSTU; tokens are the history, the dense features together, and the tables."""

    inputs: Inputs  # the features
    dim: int  # columns of a token
    heads: int  # heads of attention
    layers: int  # number of layers


class HSTUClicks(ClickModel):
    """A logit for each sample."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        length = config.inputs.history + 1 + len(config.inputs.rows)
        self.bottom = nn.Linear(config.inputs.dense, config.dim)
        self.layers = HSTU(config.dim, config.heads, config.layers, length)

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.tables(batch), self.tables.sequence(batch)

    def interact(self, dense: Tensor, *embedded: Tensor) -> Tensor:
        features = self.join(dense, embedded[0])
        tokens = torch.cat((embedded[1].to(features.dtype), features), dim=1)
        return self.layers(tokens.flatten(0, 1)).squeeze(1)  # type: ignore[no-any-return]


SIZES = {
    "tiny": HSTUConfig(Inputs(5, (500, 20, 60), (1, 1, 1), history=12), 32, 2, 2),
    "zoo": HSTUConfig(Inputs(13, (10_000,) * 7, (1,) * 7, history=120), 512, 8, 3),
    "wide": HSTUConfig(Inputs(13, (10_000,) * 7, (1,) * 7, history=120), 1024, 16, 3),
}
ENTRY = Entry(HSTUClicks, SIZES, "zoo", 1024)
