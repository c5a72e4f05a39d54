"""A site: one linear layer of a model, and what its operands looked like."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.magnitudes import Magnitudes
from lokakern.probe.matrix_normal import MatrixNormal
from lokakern.probe.operand import OperandStatistics
from lokakern.probe.reservoir import FEWEST_ROWS

GEMMS = ("output", "grad_input", "grad_weight")
SNAPSHOT_ELEMENTS = 2**22  # of the newest weight that are kept: 8 MiB of bfloat16
DISTINCT_SIZES = 1024  # numbers of rows told apart; of more, 7 bits each


class SiteStatistics:
    """What was seen of ``Y[m, n] = X[m, k] W[n, k]^T`` and of the gradient of Y.

    Args:
        n: Outputs.
        k: Inputs.
        device: Of the statistics.
        has_bias: Whether the layer adds one.
        norm: The normalization of its output, as `lokakern.norm.norm_named` reads it; "" if none
            is known.

    Attributes:
        input: Rows of X.
        grad_output: Rows of the gradient of Y.
        weight: W over time.
        snapshot: The newest W, its first rows where it is large; None before one was seen.
        mean_ratios: ``|mean| / deviation`` of rows of Y: what LayerNorm subtracts, over what it
            leaves.
        sizes: How often each m came.
    """

    def __init__(
        self, n: int, k: int, device: torch.device, *, has_bias: bool = False, norm: str = ""
    ) -> None:
        self.n, self.k, self.has_bias, self.norm = n, k, has_bias, norm
        self.device = device
        self.input = OperandStatistics(k, device)
        self.grad_output = OperandStatistics(n, device)
        self.weight = MatrixNormal(n, k, device)
        self.snapshot: Tensor | None = None
        self.mean_ratios = Magnitudes(device)
        self.sizes: Counter[int] = Counter()

    def add_input(self, x: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take in X ``[m, k]`` with some of its rows, float64, and their keys."""
        self.sizes[len(x)] += 1
        self._bound_sizes()
        self.input.add(x, rows, keys)

    def add_output(self, rows: Tensor) -> None:
        """Take in some rows of Y, ``[sampled, n]``."""
        wide = rows.double()
        deviation, mean = torch.std_mean(wide, dim=1, correction=0)
        self.mean_ratios.add(mean / deviation)  # infinite where all are equal: no quantile has it

    def add_weight(self, weight: Tensor) -> None:
        """Take in a snapshot of W, ``[n, k]``."""
        self.weight.add(weight)
        rows = min(self.n, max(FEWEST_ROWS, SNAPSHOT_ELEMENTS // self.k))
        self.snapshot = weight.detach()[:rows].clone()

    def _bound_sizes(self) -> None:
        if len(self.sizes) > DISTINCT_SIZES:
            coarse: Counter[int] = Counter()
            for m, count in self.sizes.items():
                shift = max(m.bit_length() - 7, 0)
                coarse[(m >> shift) << shift] += count
            self.sizes = coarse

    def merge(self, other: SiteStatistics) -> None:
        """Take in what another rank saw of the same site.

        Raises:
            ShapeError: It is of another shape.
        """
        if (self.n, self.k) != (other.n, other.k):
            raise ShapeError(
                f"a site of n={self.n} k={self.k} cannot take in one of n={other.n} k={other.k}"
            )
        self.input.merge(other.input)
        self.grad_output.merge(other.grad_output)
        self.weight.merge(other.weight)
        if self.snapshot is None and other.snapshot is not None:
            self.snapshot = other.snapshot.to(self.device)
        self.mean_ratios.counts += other.mean_ratios.counts.to(self.device)
        self.sizes += other.sizes
        self._bound_sizes()
        self.norm = self.norm or other.norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for part in ("input", "grad_output", "weight"):
            for name, x in getattr(self, part).tensors().items():
                yield f"{part}.{name}", x
        yield "mean_ratios", self.mean_ratios.counts
        if self.snapshot is not None:
            yield "snapshot", self.snapshot

    def m_quantile(self, share: float) -> int:
        """A quantile of m over calls; 0 of none."""
        total = sum(self.sizes.values())
        reached = 0
        for m in sorted(self.sizes):
            reached += self.sizes[m]
            if reached >= share * total:
                return m
        return 0

    @property
    def mean_ratio(self) -> float:
        """The 99th percentile of `mean_ratios`; 0 of none."""
        found = self.mean_ratios.log2_quantiles(0.99)[0]
        return 0.0 if math.isnan(found) else 2.0**found
