"""DLRMv2: cross layers over dense features and embeddings, as in MLPerf on Criteo."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lokakern.bench.models.blocks import (
    CRITEO,
    ClickModel,
    CrossNetwork,
    Inputs,
    perceptron,
)


@dataclass(frozen=True, slots=True)
class DLRMConfig:
    """Sizes of a DLRMv2."""

    inputs: Inputs  # the features
    dim: int  # columns of an embedding, and outputs of the bottom perceptron
    bottom: tuple[int, ...]  # hidden layers of the perceptron of the dense features
    crosses: int  # number of cross layers
    rank: int  # rank of the cross layers
    over: tuple[int, ...]  # hidden layers between the cross layers and the logit


SIZES = {
    "tiny": DLRMConfig(
        Inputs(dense=5, rows=(50, 3, 400, 20), slots=(1, 1, 3, 2)), dim=16, bottom=(32,),
        crosses=2, rank=8, over=(64, 32),
    ),
    "mlperf": DLRMConfig(
        CRITEO, dim=128, bottom=(512, 256), crosses=3, rank=512, over=(1024, 1024, 512, 256),
    ),
}  # fmt: skip


class DLRM(ClickModel):
    """A logit for each sample."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__(config)
        k = (1 + len(config.inputs.rows)) * config.dim
        self.bottom = perceptron((config.inputs.dense, *config.bottom, config.dim))
        self.cross = CrossNetwork(k, config.rank, config.crosses)
        self.head = perceptron((k, *config.over), last=1)

    def interact(self, dense: Tensor, *embedded: Tensor) -> Tensor:
        x = self.cross(self.join(dense, *embedded).flatten(1))
        return self.head(x).squeeze(1)  # type: ignore[no-any-return]
