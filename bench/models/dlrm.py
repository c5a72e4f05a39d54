"""DLRMv2: dense features and embeddings through cross layers, as MLPerf trains it on Criteo."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lokakern.bench.models.batch import CRITEO, Batch, Inputs
from lokakern.bench.models.cross import CrossNetwork
from lokakern.bench.models.perceptron import perceptron
from lokakern.bench.models.tables import Tables


@dataclass(frozen=True, slots=True)
class DLRMConfig:
    """Sizes of a DLRMv2.

    Attributes:
        inputs: What it is fed.
        dim: Columns of an embedding, and outputs of the perceptron of the dense features.
        bottom: Hidden layers of that.
        crosses: Cross layers.
        rank: Of them.
        over: Hidden layers after them, before the logit.
    """

    inputs: Inputs
    dim: int
    bottom: tuple[int, ...]
    crosses: int
    rank: int
    over: tuple[int, ...]


SIZES = {
    "tiny": DLRMConfig(
        Inputs(dense=5, rows=(50, 3, 400, 20), slots=(1, 1, 3, 2)), dim=16, bottom=(32,),
        crosses=2, rank=8, over=(64, 32),
    ),
    "mlperf": DLRMConfig(
        CRITEO, dim=128, bottom=(512, 256), crosses=3, rank=512, over=(1024, 1024, 512, 256),
    ),
}  # fmt: skip


class DLRM(nn.Module):
    """A logit for each sample."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        k = (1 + len(config.inputs.rows)) * config.dim
        self.tables = Tables(config.inputs, config.dim)
        self.bottom = perceptron((config.inputs.dense, *config.bottom, config.dim))
        self.cross = CrossNetwork(k, config.rank, config.crosses)
        self.head = perceptron((k, *config.over), last=1)

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """What comes out of the tables: ``[batch, tables, dim]``."""
        return (self.tables(batch),)

    def interact(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[batch]`` of dense features and what came out of the tables."""
        bottom = self.bottom(dense)
        x = torch.cat([bottom, embedded.flatten(1).to(bottom.dtype)], dim=1)
        return self.head(self.cross(x)).squeeze(1)  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[batch]``."""
        return self.interact(batch.dense, *self.embed(batch))
