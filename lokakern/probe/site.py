"""A site: one linear layer of a model, and what its operands looked like."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.magnitudes import Magnitudes, add_magnitudes
from lokakern.probe.operand import OperandStatistics
from lokakern.probe.reservoir import FEWEST_ROWS
from lokakern.types import GROUP

GEMMS = ("output", "grad_input", "grad_weight")
SNAPSHOT_ELEMENTS = 2**22  # of the newest weight that are kept: 8 MiB of bfloat16
FEWEST_BLOCKS = 8  # of 128 rows that stand for a weight; of fewer rows, single ones do
MOST_CANCELLED = 700.0  # where rounding by 3.8 % leaves nothing of a sum
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
        snapshot: The newest W, some of its rows where it is large; None before one was seen.
        snapshot_t: Some rows of its transpose ``[.., n]``, where the snapshot is not whole.
        snapshots: How often W was looked at.
        mean_ratios: ``|mean| / deviation`` of rows of Y: what LayerNorm subtracts, over what it
            leaves.
        cancellations: ``[2]`` float64: the sum of `cancellation_of` over backward passes, and how
            many there were.
        sizes: How often each m came.
    """

    def __init__(
        self, n: int, k: int, device: torch.device, *, has_bias: bool = False, norm: str = ""
    ) -> None:
        self.n, self.k, self.has_bias, self.norm = n, k, has_bias, norm
        self.device = device
        self.input = OperandStatistics(k, device)
        self.grad_output = OperandStatistics(n, device)
        self.snapshot: Tensor | None = None
        self.snapshot_t: Tensor | None = None
        self.snapshots = 0
        self.mean_ratios = Magnitudes(device)
        self.cancellations = torch.zeros(2, dtype=torch.float64, device=device)
        self.sizes: Counter[int] = Counter()

    def add_input(self, x: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take in X ``[m, k]`` with some of its rows and their keys."""
        self.count(len(x))
        self.input.add(x, rows, keys)

    def count(self, m: int) -> None:
        """Count a call with m rows."""
        self.sizes[m] += 1
        self._bound_sizes()

    def add_output(self, rows: Tensor) -> None:
        """Take in some rows of Y, ``[sampled, n]``."""
        add_outputs([self], rows[None])

    def add_weight(self, weight: Tensor) -> None:
        """Keep W, ``[n, k]``, in the place of an older one; on its device, unread by the host."""
        self.snapshots += 1
        self.snapshot = _kept(weight.detach())
        is_whole = len(self.snapshot) == self.n
        # A product with W^T sums over all n, and so it needs whole columns.
        self.snapshot_t = None if is_whole else _kept(weight.detach().t())

    def add_cancellation(self, value: Tensor) -> None:
        """Take in that of one backward pass; on its device, unread by the host."""
        self.cancellations += torch.stack([value, torch.ones_like(value)])

    @property
    def cancellation(self) -> float:
        """The mean of `cancellation_of` over backward passes; 0 of none."""
        total, count = self.cancellations.tolist()
        return total / count if count else 0.0

    def weight_t(self) -> Tensor | None:
        """Rows of W^T, ``[.., n]``; None where a large W has none."""
        if self.snapshot is None or len(self.snapshot) < self.n:
            return self.snapshot_t
        return self.snapshot.t()

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
        self.snapshots += other.snapshots
        if self.snapshot is None and other.snapshot is not None:
            kept = (other.snapshot, other.snapshot_t)
            self.snapshot, self.snapshot_t = (x if x is None else x.to(self.device) for x in kept)
        self.mean_ratios.counts += other.mean_ratios.counts.to(self.device)
        self.cancellations += other.cancellations.to(self.device)
        self.sizes += other.sizes
        self._bound_sizes()
        self.norm = self.norm or other.norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for part in ("input", "grad_output"):
            for name, x in getattr(self, part).tensors().items():
                yield f"{part}.{name}", x
        yield "mean_ratios", self.mean_ratios.counts
        yield "cancellations", self.cancellations
        for name in ("snapshot", "snapshot_t"):
            x = getattr(self, name)
            if x is not None:
                yield name, x

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


def terms_of(gradients: Tensor, inputs: Tensor) -> Tensor:
    """Squares of the terms of each row of a weight's gradient, summed up, ``[n]`` float64.

    Args:
        gradients: ``[samples, n]``.
        inputs: ``[samples, k]``.
    """
    return inputs.double().square().sum(dim=1) @ gradients.double().square()


def cancellation_of(terms: Tensor, sizes: Tensor) -> Tensor:
    """Squares of terms over the square of their sum, in the mean of rows: 1 if none knows another.

    The square of what rounding terms costs a sum, in units of what it costs a term.

    Args:
        terms: As of `terms_of`, ``[n]``.
        sizes: L2 norms of the rows of their sum, ``[n]``.
    """
    ratios = torch.where(terms > 0, terms / sizes.double().square(), 0.0)
    return ratios.nan_to_num(nan=0.0).clamp_max(MOST_CANCELLED).mean()


def places_of(count: int, total: int, device: torch.device | None = None) -> Tensor:
    """Which of `total` rows stand for all, ``[count]``: repeated, or in blocks, evenly spread.

    Scales of 128 x 128 span rows that lie together, and the parts of a joined layer may be unlike.
    """
    if count >= total:
        return torch.arange(count, device=device) % total
    size = GROUP if count >= FEWEST_BLOCKS * GROUP else 1
    blocks, most = total // size, count // size
    found = torch.arange(most, device=device) * blocks // most
    return (found[:, None] * size + torch.arange(size, device=device)).flatten()


def _kept(weight: Tensor) -> Tensor:
    """A copy of a matrix, or of some of its rows: one holds the largest magnitude of all."""
    total, columns = weight.shape
    most = max(FEWEST_ROWS, SNAPSHOT_ELEMENTS // columns)
    if total <= most:
        return weight.clone()
    places = places_of(most, total, weight.device)
    places[-1] = torch.linalg.vector_norm(weight, math.inf, dim=1).argmax()
    return weight.index_select(0, places)


def add_outputs(sites: Sequence[SiteStatistics], rows: Tensor) -> None:
    """Take in some rows of the output of each site, ``[sites, sampled, n]``, in a few launches."""
    deviation, mean = torch.std_mean(rows.double(), dim=2, correction=0)
    # Infinite where all are equal: no quantile has it.
    add_magnitudes([site.mean_ratios for site in sites], mean / deviation)
