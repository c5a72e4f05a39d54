"""Common model parts: batches of a click log, embedding tables, perceptrons and cross layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.errors import ShapeError

PADDING = 0  # the row of zeros before the first table, for empty slots


class Batch(NamedTuple):
    """Samples of a click log.

    Ids are rows of the concatenated tables, from 1 (`Inputs.starts`). A table has the same number
    of slots in every sample, and empty slots hold `PADDING`: sizes never change, so a step is
    compiled once and can be a CUDA graph.
    """

    dense: Tensor  # ``[batch, dense]`` float32
    ids: Tensor  # ``[batch * slots]`` int64, by sample, then by table
    offsets: Tensor  # ``[batch * tables]`` int64, the first slot of each bag
    history: Tensor  # ``[batch, length]`` int64, rows of the first table, padded at the front
    labels: Tensor  # ``[batch]`` float32, 1 for a click


@dataclass(frozen=True, slots=True)
class Inputs:
    """Features of a model."""

    dense: int  # dense features
    rows: tuple[int, ...]  # of each embedding table
    slots: tuple[int, ...]  # of each table in a sample, the size of its largest bag
    history: int = 0  # length of a sequence of ids of the first table, 0 for none

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.slots) or min(*self.rows, *self.slots) < 1:
            raise ShapeError(
                f"{len(self.rows)} tables of {min(self.rows, default=0)} rows or more and "
                f"{len(self.slots)} bags of {min(self.slots, default=0)} slots or more; expected "
                "as many bags as tables, and at least 1 of each"
            )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each table among all rows."""
        return tuple(itertools.accumulate(self.rows[:-1], initial=1))

    def capped(self, most_rows: int) -> Inputs:
        """The same features with no table larger than a limit."""
        return replace(self, rows=tuple(min(rows, most_rows) for rows in self.rows))

    def offsets(self, samples: int, device: torch.device | str = "cpu") -> Tensor:
        """The first slot of each bag, ``[samples * tables]`` int64."""
        slots = torch.tensor(self.slots, device=device)
        within = slots.cumsum(0) - slots
        sample = torch.arange(samples, device=device)[:, None] * sum(self.slots)
        return (sample + within).flatten()


def spread_rows(tables: int, *, fewest: int = 3, most: int = 40_000_000) -> tuple[int, ...]:
    """Sizes of tables where none are published, geometrically spaced."""
    low, high = math.log(fewest), math.log(most)
    return tuple(
        round(math.exp(low + (high - low) * table / max(1, tables - 1))) for table in range(tables)
    )


# Criteo as in MLPerf's DLRMv2: tables of at most 40 million rows, synthetic multi-hot bags.
CRITEO = Inputs(
    dense=13,
    rows=(
        40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
        405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
        12_973, 108, 36,
    ),
    slots=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)  # fmt: skip


class Tables(nn.Module):
    """All tables of a model, concatenated, with sums over bags of rows.

    Hundreds of small lookups would be bound by launches; one lookup is bound by memory.
    """

    def __init__(self, inputs: Inputs, dim: int) -> None:
        super().__init__()
        self.inputs, self.dim = inputs, dim
        self.weight = nn.Parameter(torch.empty(1 + sum(inputs.rows), dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(rows) of each table, as DLRM and TorchRec initialize."""
        for start, rows in zip(self.inputs.starts, self.inputs.rows, strict=True):
            self.weight[start : start + rows].uniform_(-(rows**-0.5), rows**-0.5)
        self.weight[PADDING] = 0

    def forward(self, batch: Batch) -> Tensor:
        """Sums of bags, ``[batch, tables, dim]``."""
        found = F.embedding_bag(
            batch.ids, self.weight, batch.offsets, mode="sum", padding_idx=PADDING
        )
        return found.view(-1, len(self.inputs.rows), self.dim)

    def sequence(self, batch: Batch) -> Tensor:
        """Rows of the history, ``[batch, length, dim]``; 0 where it is padded."""
        return F.embedding(batch.history, self.weight, padding_idx=PADDING)

    def extra_repr(self) -> str:
        return f"{len(self.inputs.rows)} tables, {self.weight.shape[0]} rows, dim={self.dim}"


def perceptron(
    sizes: Sequence[int],
    *,
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    last: int | None = None,
) -> nn.Sequential:
    """Linear layers, each followed by an activation.

    Args:
        sizes: Inputs, then outputs of each layer.
        activation: Follows each of these layers.
        norm: Whether a LayerNorm precedes each activation.
        last: Outputs of a final linear layer without activation.
    """
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        layers += [nn.Linear(k, n), nn.LayerNorm(n), activation()] if norm else [
            nn.Linear(k, n), activation()
        ]  # fmt: skip
    if last is not None:
        layers.append(nn.Linear(sizes[-1], last))
    return nn.Sequential(*layers)


class ClickModel(nn.Module):
    """A model with a logit for each sample; subclasses make the layers."""

    bottom: nn.Module  # from the dense features to one embedding
    layers: nn.Module  # from all embeddings ``[batch, n, d]`` to others
    head: nn.Module  # from these, side by side, to the logit

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tables = Tables(config.inputs, config.dim)

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Embeddings of a batch, ``[batch, tables, dim]``, and what else `interact` needs."""
        return (self.tables(batch),)

    def join(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """The embedding of the dense features before the others, ``[batch, 1 + tables, dim]``."""
        bottom = self.bottom(dense)
        return torch.cat([bottom[:, None], embedded.to(bottom.dtype)], dim=1)

    def interact(self, dense: Tensor, *embedded: Tensor) -> Tensor:
        """Logits ``[batch]`` of dense features and the result of `embed`."""
        x = self.layers(self.join(dense, *embedded))
        return self.head(x.flatten(1)).squeeze(1)  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[batch]``."""
        return self.interact(batch.dense, *self.embed(batch))


class Compression(nn.Module):
    """``W X``: the n embeddings ``[batch, n, d]`` of a sample become ``count``."""

    def __init__(self, n: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n, count, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class CrossLayer(nn.Module):
    """Low-rank cross layer of DCNv2 (arXiv 2008.13535): ``x0 * (W V x + b) + x``."""

    def __init__(self, k: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(k, rank, bias=False)
        self.up = nn.Linear(rank, k)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(self.down(x)) + x  # type: ignore[no-any-return]


class CrossNetwork(nn.Module):
    """Cross layers in sequence: products of up to ``layers + 1`` features."""

    def __init__(self, k: int, rank: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(k, rank) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = cast(CrossLayer, layer)(x0, x)
        return x
