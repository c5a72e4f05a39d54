"""Wukong: stacked factorization machines over embeddings (Zhang et al., arXiv 2403.02545).

A layer maps the n embeddings X ``[n, d]`` of a sample to new ones:

    FMB(X) = reshape(MLP(LN(flatten(X (X^T Y)))))     pairwise products, of rank k
    LCB(X) = W X                                      embeddings recombined
    X'     = LN(concat(FMB(X), LCB(X)) + residual X)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lokakern.bench.models.blocks import CRITEO, ClickModel, Inputs, perceptron, spread_rows


@dataclass(frozen=True, slots=True)
class WukongConfig:
    """Sizes of a Wukong."""

    inputs: Inputs  # the features; all dense features become one embedding
    dim: int  # columns of an embedding, d
    layers: int  # number of layers
    machines: int  # output embeddings of the factorization machine, n_F
    linear: int  # output embeddings of the linear compression, n_L
    rank: int  # rank k of the products
    hidden: tuple[int, ...]  # hidden layers of a factorization machine's perceptron
    final: tuple[int, ...]  # hidden layers of the last perceptron, before the logit
    bottom: tuple[int, ...] = (512, 256)  # hidden layers of the perceptron of the dense features


def _internal(layers: int, count: int, rank: int, width: int) -> WukongConfig:
    """A size of the paper's Table 5: 720 embeddings of 160, three hidden layers.

    Table sizes, bags and the last perceptron are not published; here every eighth table has bags
    of 4.
    """
    rows = spread_rows(719)
    slots = tuple(4 if table % 8 == 0 else 1 for table in range(719))
    return WukongConfig(
        Inputs(dense=13, rows=rows, slots=slots), dim=160, layers=layers, machines=count,
        linear=count, rank=rank, hidden=(width,) * 3, final=(width,),
    )  # fmt: skip


SIZES = {
    "tiny": WukongConfig(
        Inputs(dense=5, rows=(50, 3, 400, 20, 1000, 7, 60), slots=(1, 1, 3, 2, 1, 1, 4)),
        dim=16, layers=2, machines=4, linear=4, rank=8, hidden=(64,), final=(64,), bottom=(32,),
    ),
    # On Criteo, as TorchEasyRec's example is configured.
    "small": WukongConfig(
        CRITEO, dim=128, layers=2, machines=16, linear=16, rank=24, hidden=(512,), final=(512, 64),
    ),
    "S": _internal(layers=8, count=32, rank=24, width=2048),
    "M": _internal(layers=8, count=48, rank=48, width=4096),
    "L": _internal(layers=8, count=96, rank=96, width=8192),
}  # fmt: skip


class WukongLayer(nn.Module):
    """``[batch, n, d]`` to ``[batch, machines + linear, d]``."""

    def __init__(self, n: int, config: WukongConfig) -> None:
        super().__init__()
        out = config.machines + config.linear
        self.shape = (config.machines, config.dim)
        self.project = nn.Linear(n, config.rank, bias=False)
        self.machine = nn.Sequential(
            nn.LayerNorm(n * config.rank),
            *perceptron((n * config.rank, *config.hidden), last=config.machines * config.dim),
        )
        self.compress = nn.Linear(n, config.linear, bias=False)
        self.residual = nn.Linear(n, out, bias=False) if n != out else None
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        across = x.transpose(1, 2)  # [batch, d, n]
        projected = self.project(across)
        products = (x.to(projected.dtype) @ projected).flatten(1)
        made = self.machine(products).unflatten(1, self.shape)
        made = torch.cat([made, self.compress(across).transpose(1, 2)], dim=1)
        kept = x if self.residual is None else self.residual(across).transpose(1, 2)
        return self.norm(made + kept)  # type: ignore[no-any-return]


class Wukong(ClickModel):
    """A logit for each sample."""

    def __init__(self, config: WukongConfig) -> None:
        super().__init__(config)
        n, out = 1 + len(config.inputs.rows), config.machines + config.linear
        self.bottom = perceptron((config.inputs.dense, *config.bottom, config.dim))
        self.layers = nn.Sequential(
            *(WukongLayer(n if layer == 0 else out, config) for layer in range(config.layers))
        )
        self.head = perceptron((out * config.dim, *config.final), last=1)
