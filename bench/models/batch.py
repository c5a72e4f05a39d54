"""What models are given: dense features, bags of ids, a history; and how many of each."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern.errors import ShapeError

PADDING = 0  # a row of zeros before the first table: what an id that is not there names


class Batch(NamedTuple):
    """Samples of a click log.

    Ids are rows of all tables one after the other, from 1 (`Inputs.starts`). A table has the same
    number of slots in every sample, and `PADDING` in those that a bag leaves empty: sizes never
    change, so that a step is compiled once and may be a CUDA graph.

    Attributes:
        dense: ``[batch, dense]`` float32.
        ids: ``[batch * slots]`` int64, sample by sample, in it table by table.
        offsets: ``[batch * tables]`` int64, the first slot of each bag.
        history: ``[batch, length]`` int64, rows of the first table, padded at the front.
        labels: ``[batch]`` float32, 1 for a click.
    """

    dense: Tensor
    ids: Tensor
    offsets: Tensor
    history: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model is fed.

    Attributes:
        dense: Dense features.
        rows: Of each embedding table.
        slots: Of each table in a sample: the longest bag.
        history: Length of a sequence of ids of the first table, 0 for none.
    """

    dense: int
    rows: tuple[int, ...]
    slots: tuple[int, ...]
    history: int = 0

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
        """The same with no table larger: of published models many do not fit on one GPU."""
        return replace(self, rows=tuple(min(rows, most_rows) for rows in self.rows))

    def offsets(self, samples: int, device: torch.device | str = "cpu") -> Tensor:
        """The first slot of each bag of so many samples, ``[samples * tables]`` int64."""
        slots = torch.tensor(self.slots, device=device)
        within = slots.cumsum(0) - slots
        sample = torch.arange(samples, device=device)[:, None] * sum(self.slots)
        return (sample + within).flatten()


def random_batch(
    inputs: Inputs, samples: int, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Batch:
    """Samples of no meaning: uniform ids in full bags, normal features, labels by a coin."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

    def of_slots(numbers: tuple[int, ...]) -> Tensor:
        slots = torch.tensor(inputs.slots, device=device)
        return torch.tensor(numbers, device=device).repeat_interleave(slots)

    ids = (
        of_slots(inputs.starts)
        + (uniform(samples, sum(inputs.slots)) * of_slots(inputs.rows)).long()
    )
    history = 1 + (uniform(samples, inputs.history) * inputs.rows[0]).long()
    dense = torch.randn(samples, inputs.dense, generator=generator, device=device)
    labels = (uniform(samples) < 0.5).float()
    return Batch(dense, ids.flatten(), inputs.offsets(samples, device), history, labels)


def spread_rows(tables: int, *, fewest: int = 3, most: int = 40_000_000) -> tuple[int, ...]:
    """Sizes of tables where none are published: from fewest to most, equal steps of logarithms."""
    low, high = math.log(fewest), math.log(most)
    return tuple(
        round(math.exp(low + (high - low) * table / max(1, tables - 1))) for table in range(tables)
    )


# Criteo as MLPerf's DLRMv2 has it: tables of at most 40 million rows, synthetic multi-hot bags.
CRITEO = Inputs(
    dense=13,
    rows=(
        40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
        405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
        12_973, 108, 36,
    ),
    slots=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)  # fmt: skip
