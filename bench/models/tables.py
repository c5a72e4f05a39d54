"""Embedding tables: high precision, one lookup for all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.bench.models.batch import PADDING, Batch, Inputs


class Tables(nn.Module):
    """All tables of a model, one below the other, and sums over bags of their rows.

    Hundreds of small lookups would be bound by launches; one is bound by memory.

    Args:
        inputs: How many rows each has.
        dim: Columns of all of them.
    """

    def __init__(self, inputs: Inputs, dim: int) -> None:
        super().__init__()
        self.inputs, self.dim = inputs, dim
        self.weight = nn.Parameter(torch.empty(1 + sum(inputs.rows), dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(rows) of each table, as DLRM and TorchRec begin."""
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
