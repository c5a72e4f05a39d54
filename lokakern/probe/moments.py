"""Mean and variance of each column of a stream of rows, by the update of Welford and Chan.

    d = mean_b - mean;  mean += (b / n') d;  S += S_b + (n b / n') d^2;  variance = S / (n' - 1)

Everything is float64 on the device of the rows, because squares of gradients of 1e-20 are below
what float32 holds, and nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lokakern.errors import ShapeError


class Moments:
    """Count, mean and centered squares of rows.

    Args:
        columns: Of a row.
        device: Of the rows.

    Attributes:
        count: Rows, float64.
        mean: ``[columns]`` float64.
        squares: ``[columns]`` float64, sums of squared deviations from the mean.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(columns, dtype=torch.float64, device=device)
        self.squares = torch.zeros(columns, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def add(self, rows: Tensor, keep: Tensor) -> None:
        """Take rows in.

        Args:
            rows: ``[rows, columns]`` float64, finite.
            keep: ``[rows]``, whether a row counts.
        """
        add_moments([self], rows[None], keep[None])

    def merge(self, other: Moments) -> None:
        """Take in what another saw.

        Raises:
            ShapeError: It saw other columns.
        """
        if self.columns != other.columns:
            raise ShapeError(
                f"moments of {self.columns} columns cannot take in those of {other.columns}"
            )
        _merge([self], *(x.to(self.mean.device)[None] for x in other.tensors().values()))

    def sums(self) -> dict[str, Tensor]:
        """Plain sums over the rows, which add up over ranks; see `use_sums`."""
        return {
            "count": self.count,
            "mean": self.count * self.mean,
            "squares": self.squares + self.count * self.mean.square(),
        }

    def use_sums(self, sums: dict[str, Tensor]) -> None:
        """Become what these sums are of.

        Subtracting the mean back loses ``2^-53 (1 + mean^2 / variance)`` of the variance: 1e-6 at
        a mean of 1e5 deviations.
        """
        count = sums["count"]
        mean = sums["mean"] / count.clamp_min(1.0)
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.squares.copy_((sums["squares"] - count * mean.square()).clamp_min(0.0))


def add_moments(many: Sequence[Moments], rows: Tensor, keep: Tensor) -> None:
    """Take rows in as those of several streams of as many columns, in a few launches.

    Args:
        many: The streams, each once.
        rows: ``[streams, rows, columns]`` float64, finite.
        keep: ``[streams, rows]``, whether a row counts.
    """
    kept = keep.to(torch.float64)
    count = kept.sum(dim=1)
    mean = (kept[:, None] @ rows).squeeze(1) / count.clamp_min(1.0)[:, None]
    centered = (rows - mean[:, None]) * kept[:, :, None]
    _merge(many, count, mean, centered.square().sum(dim=1))


def _merge(many: Sequence[Moments], count: Tensor, mean: Tensor, squares: Tensor) -> None:
    """Chan's update of each stream by one of these."""
    counts = [one.count for one in many]
    before = torch.stack(counts)
    share = (count / (before + count).clamp_min(1.0))[:, None]
    weight = before[:, None] * share
    apart = mean - torch.stack([one.mean for one in many])
    for sums, new in (
        (counts, count),
        ([one.mean for one in many], share * apart),
        ([one.squares for one in many], squares + weight * apart.square()),
    ):
        torch._foreach_add_(sums, list(new))
