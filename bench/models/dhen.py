"""DHEN over DCNv2: ensembles of interactions, stacked; a stand-in for External Large FM.

A layer sums several interactions of n embeddings (Zhang et al., arXiv 2203.11014):

    X' = LN(sum_i interaction_i(X) + shortcut(X))

The interactions are DCNv2's cross, dot products of compressed embeddings, and a perceptron over all
embeddings. A hidden layer is a linear layer, a LayerNorm and SiLU. Production sizes of DHEN and
External Large FM are not published; the sizes below are our own, similar to Wukong's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lokakern.bench.models.blocks import (
    ClickModel,
    Compression,
    Inputs,
    perceptron,
    spread_rows,
)


@dataclass(frozen=True, slots=True)
class DHENConfig:
    """Sizes of a DHEN."""

    inputs: Inputs  # the features; all dense features become one embedding
    dim: int  # columns of an embedding, d
    layers: int  # number of layers
    count: int  # output embeddings of a layer
    rank: int  # rank of the cross
    compressed: int  # embeddings that enter the dot products
    hidden: tuple[int, ...]  # hidden layers of each interaction's perceptron
    final: tuple[int, ...]  # hidden layers before the logit
    bottom: tuple[int, ...] = (512, 256)  # hidden layers of the perceptron of the dense features


SIZES = {
    "tiny": DHENConfig(
        Inputs(dense=5, rows=(50, 3, 400, 20, 1000, 7, 60), slots=(1, 1, 3, 2, 1, 1, 4)),
        dim=16, layers=2, count=4, rank=8, compressed=4, hidden=(64,), final=(64,), bottom=(32,),
    ),
    "medium": DHENConfig(
        Inputs(dense=13, rows=spread_rows(255), slots=(4, 1, 1, 1, 1) * 51),
        dim=128, layers=4, count=64, rank=512, compressed=32, hidden=(1024, 1024),
        final=(1024, 512, 256),
    ),
    # Flattened, 770 embeddings of 160 give the largest known k of LoKA's models, 123200.
    "large": DHENConfig(
        Inputs(dense=13, rows=spread_rows(769), slots=(*(4, 1, 1, 1, 1, 1, 1, 1) * 96, 1)),
        dim=160, layers=4, count=96, rank=512, compressed=64, hidden=(1024, 1024),
        final=(2048, 1024, 512),
    ),
}  # fmt: skip


class DHENLayer(nn.Module):
    """``[batch, n, d]`` to ``[batch, count, d]``; layers of one input are called together."""

    def __init__(self, n: int, config: DHENConfig) -> None:
        super().__init__()
        flat, made = n * config.dim, config.count * config.dim
        self.shape = (config.count, config.dim)
        # DCNv2's cross of the flattened embeddings, recombined.
        self.down = nn.Linear(flat, config.rank, bias=False)
        self.up = nn.Linear(config.rank, flat)
        self.recombine = Compression(n, config.count)
        # Pairwise dot products of a few recombined embeddings, then a perceptron.
        self.few = nn.Linear(n, config.compressed, bias=False)
        self.dots = perceptron(
            (config.compressed**2, *config.hidden), last=made, norm=True, activation=nn.SiLU
        )
        # A perceptron over the flattened embeddings.
        first, *others = config.hidden
        self.first = nn.Linear(flat, first)
        self.deep = nn.Sequential(
            nn.LayerNorm(first), nn.SiLU(),
            *perceptron((first, *others), last=made, norm=True, activation=nn.SiLU),
        )  # fmt: skip
        self.shortcut = None if n == config.count else nn.Linear(n, config.count, bias=False)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        flat, across = x.flatten(1), x.transpose(1, 2)
        crossed = flat * self.up(self.down(flat)) + flat
        few = self.few(across).transpose(1, 2)
        made = self.dots((few @ few.mT).flatten(1)) + self.deep(self.first(flat))
        kept = x if self.shortcut is None else self.shortcut(across).transpose(1, 2)
        found = made.unflatten(1, self.shape) + self.recombine(crossed.view_as(x)) + kept
        return self.norm(found)  # type: ignore[no-any-return]


class DHEN(ClickModel):
    """A logit for each sample."""

    def __init__(self, config: DHENConfig) -> None:
        super().__init__(config)
        n = 1 + len(config.inputs.rows)
        self.bottom = perceptron(
            (config.inputs.dense, *config.bottom, config.dim), norm=True, activation=nn.SiLU
        )
        self.layers = nn.Sequential(
            *(DHENLayer(n if layer == 0 else config.count, config)
              for layer in range(config.layers))
        )  # fmt: skip
        self.head = perceptron(
            (config.count * config.dim, *config.final), last=1, norm=True, activation=nn.SiLU
        )
