"""Statistics of a site, which is one linear layer, and of its operands.

Tensors stay on the device of the model. Updates take operands of one shape together, because a
layer at a time would cost a GPU hundreds of small launches. The host reads nothing before a report.
Histograms and sums add up over shards, largest magnitudes are compared, and a sample keeps the rows
with the smallest random keys, so shards merge into the statistics of the whole. Inputs and
gradients of the same rows have the same keys, so both samples keep the same rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.types import GROUP

GEMMS = ("output", "grad_input", "grad_weight")
PARTS = ("input", "grad_output")
# A bin is the exponent of a float32 and 4 bits of its fraction, found by a shift: 16 an octave.
SHIFT = 19
BINS = 1 << (31 - SHIFT)
FINITE = 255 << (23 - SHIFT)  # the first bin of numbers that are not finite
VALUES = 2**16  # sampled elements of a matrix whose magnitudes are counted
TRACE = 64  # largest magnitudes of steps that are kept; when full, pairs become one
ROWS = 512  # of a sample: the 99th percentile is still an order statistic, the fifth
ELEMENTS = 2**19  # of a sample, 2 MiB of float32: fewer rows where they are long
FEWEST_ROWS = 64  # for a verdict
SNAPSHOT_ELEMENTS = 2**22  # of the newest weight, 8 MiB of bfloat16
FEWEST_BLOCKS = 8  # of 128 rows that stand for a weight; of fewer rows, single ones do
MOST_CANCELLED = 700.0  # where rounding by 3.8 % leaves nothing of a sum
DISTINCT_SIZES = 1024  # numbers of rows told apart; of more, 7 bits each
SUMMED = ("count", "sums", "squares", "row_sizes", "values", "mean_ratios", "cancellations")
LARGEST = ("column_sizes", "trace")

# Owners, and tensors of each stacked.
Update = Callable[..., None]


class Magnitudes:
    """Histogram of the magnitudes of numbers, ``counts`` ``[BINS]``; those below 2^-130 are 0."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)

    @property
    def count(self) -> int:
        """Number of finite numbers, zeros included."""
        return int(self.counts[:FINITE].sum())

    @property
    def nonfinite_count(self) -> int:
        return int(self.counts[FINITE:].sum())

    @property
    def zero_share(self) -> float:
        return float(self.counts[0]) / max(self.count, 1)

    def share_beyond(self, low: float, high: float) -> float:
        """Share of finite numbers that are not 0 and lie outside of a range; 0 if empty."""
        ends = torch.tensor([low, high], dtype=torch.float64)
        ends = ends.clamp_max(torch.finfo(torch.float32).max).float().view(torch.int32) >> SHIFT
        first, last = ends.tolist()
        inside = self.counts[max(first, 1) : last + 1].sum()
        return float(self.counts[1:FINITE].sum() - inside) / max(self.count, 1)

    def log2_quantiles(self, *shares: float) -> list[float]:
        """log2 of quantiles of finite nonzero numbers, right to 1/16; NaN if there are none."""
        sums = self.counts[1:FINITE].cpu().cumsum(0)
        total = float(sums[-1])
        if total == 0:
            return [math.nan] * len(shares)
        ranks = torch.tensor(shares, dtype=torch.float64) * total
        places = torch.searchsorted(sums, ranks.clamp(0.5, total)) + 1
        # The bin after the last finite one begins at infinity, which stands for 2^128.
        edges = (torch.stack((places, places + 1)) << SHIFT).int().view(torch.float32).double()
        return list(edges.log2().clamp_max(128.0).mean(dim=0).tolist())

    def spread_log2(self) -> float:
        """Octaves between the 1st and the 99th percentile; 0 if empty."""
        first, last = self.log2_quantiles(0.01, 0.99)
        return 0.0 if math.isnan(first) else last - first


def add_magnitudes(many: Sequence[Magnitudes], x: Tensor) -> None:
    """Add ``x[i]`` to the i-th histogram; ``[count, ...]``, any float dtype."""
    bits = x.detach().float().abs().view(torch.int32).flatten(1)
    places = (bits >> SHIFT).long()
    places += BINS * torch.arange(len(many), device=x.device)[:, None]
    one = torch.ones((), dtype=torch.float64, device=x.device)
    counts = torch.zeros(len(many) * BINS, dtype=torch.float64, device=x.device)
    counts.scatter_add_(0, places.flatten(), one.expand(places.numel()))
    torch._foreach_add_([m.counts for m in many], list(counts.view(-1, BINS)))


def spread_of(sizes: Tensor) -> float:
    """Octaves between the smallest and the largest of nonzero sizes ``[count]``; 0 of none."""
    octaves = sizes[sizes > 0].double().log2().cpu()
    return float(octaves.max() - octaves.min()) if len(octaves) else 0.0


def capacity_of(columns: int) -> int:
    """Rows of a sample."""
    return max(FEWEST_ROWS, min(ROWS, ELEMENTS // max(columns, 1)))


class OperandStatistics:
    """Statistics of an operand, inputs or outputs' gradients: matrices ``[rows, columns]``."""

    def __init__(self, columns: int, device: torch.device) -> None:
        # Of sampled rows: their number, and sums of them and of their squares.
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(columns, dtype=torch.float64, device=device)
        self.squares = torch.zeros(columns, dtype=torch.float64, device=device)
        # Magnitudes of up to `VALUES` elements of the sampled rows, and the largest ones of rows,
        # columns and steps, of which the trace keeps `stride` in one place.
        self.values, self.row_sizes = Magnitudes(device), Magnitudes(device)
        self.column_sizes = torch.zeros(columns, device=device)
        self.trace = torch.zeros(TRACE, device=device)
        self.steps, self.stride = 0, 1  # known to the host, which counts calls
        # A uniform sample by ascending key, infinite where there is no row.
        self.rows = torch.zeros((capacity_of(columns), columns), device=device)
        self.keys = torch.full((len(self.rows),), math.inf, dtype=torch.float64, device=device)

    def updates(
        self, x: Tensor, rows: Tensor, keys: Tensor
    ) -> Iterator[tuple[Update, tuple[Tensor, ...]]]:
        """Updates by a matrix ``[..., columns]``, some of its rows and their random keys, 0..1.

        Each is to be called with owners and stacked tensors; rows have memory of their own.
        """
        row_sizes = torch.linalg.vector_norm(x, math.inf, dim=-1).flatten()
        column_sizes = torch.linalg.vector_norm(x, math.inf, dim=tuple(range(x.dim() - 1)))
        yield _add_row_sizes, (row_sizes,)
        yield _add_column_sizes, (column_sizes,)
        yield _add_values, (rows,)
        yield _add_sums, (rows,)
        yield _add_sample, (rows, keys)

    def add(self, x: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take one matrix in at once, see `updates`."""
        for update, tensors in self.updates(x, rows, keys):
            update([self], *(tensor[None] for tensor in tensors))

    def place(self) -> Tensor:
        """Where the trace keeps this step, ``[1]``; the next is another."""
        if self.steps // self.stride == TRACE:
            self.align(2 * self.stride)
        place = self.steps // self.stride
        self.steps += 1
        return self.trace[place : place + 1]

    def align(self, stride: int) -> None:
        """Let each place of the trace hold at least so many steps, a power of two."""
        if stride > self.stride:
            self.trace.copy_(_coarse(self.trace, stride // self.stride))
            self.stride = stride

    def merge(self, other: OperandStatistics) -> None:
        """Take in other rows of the same steps."""
        mine, theirs = self.tensors(), {n: x.to(self.keys.device) for n, x in other.tensors()}
        self.align(other.stride)
        theirs["trace"] = _coarse(theirs["trace"], self.stride // other.stride)
        for name, x in mine:
            if name in SUMMED:
                x.add_(theirs[name])
            elif name in LARGEST:
                torch.maximum(x, theirs[name], out=x)
        _add_sample([self], theirs["rows"][None], theirs["keys"][None])
        self.steps = max(self.steps, other.steps)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for name in ("count", "sums", "squares", "row_sizes", "values", *LARGEST, "rows", "keys"):
            x = getattr(self, name)
            yield name, x.counts if isinstance(x, Magnitudes) else x

    def kept(self) -> tuple[Tensor, Tensor]:
        """Sampled rows ``[count, columns]`` and their keys, on the CPU."""
        keys = self.keys.cpu()
        count = int(torch.isfinite(keys).sum())
        return self.rows[:count].cpu(), keys[:count]

    @property
    def rows_seen(self) -> int:
        return self.row_sizes.count + self.row_sizes.nonfinite_count

    @property
    def amax(self) -> float:
        """The largest magnitude of finite rows."""
        return float(self.trace.max())

    @property
    def amax_drift_log2(self) -> float:
        """Octaves by which amax rose from the first quarter of steps to the last; 0 of few."""
        used = -(-self.steps // self.stride)
        quarter = used // 4
        if quarter == 0:
            return 0.0
        trace = self.trace[:used].double().cpu()
        first, last = float(trace[:quarter].median()), float(trace[-quarter:].median())
        return math.log2(last / first) if first > 0 and last > 0 else 0.0


def _coarse(trace: Tensor, ratio: int) -> Tensor:
    """A trace of which each place holds `ratio` times as many steps, a power of two."""
    while ratio > 1:
        trace = torch.cat((trace.view(-1, 2).amax(dim=1), trace.new_zeros(TRACE // 2)))
        ratio //= 2
    return trace


def _add_row_sizes(operands: Sequence[OperandStatistics], sizes: Tensor) -> None:
    add_magnitudes([one.row_sizes for one in operands], sizes)
    largest = sizes.float().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    torch._foreach_maximum_([one.place() for one in operands], list(largest))


def _add_column_sizes(operands: Sequence[OperandStatistics], sizes: Tensor) -> None:
    sizes = sizes.float().nan_to_num(nan=0.0, posinf=0.0)
    torch._foreach_maximum_([one.column_sizes for one in operands], list(sizes))


def _add_values(operands: Sequence[OperandStatistics], rows: Tensor) -> None:
    # Of 17280 columns all took an H200 0.4 ms: additions meet in a few bins. Others at each step.
    stride = coprime_from(-(-rows[0].numel() // VALUES), rows.shape[2])
    first = max(operands[0].steps - 1, 0) % stride
    add_magnitudes([one.values for one in operands], rows[:, :, first::stride])


def _add_sums(operands: Sequence[OperandStatistics], rows: Tensor) -> None:
    # In float64, because squares of gradients of 1e-20 are below what float32 holds.
    keep = torch.isfinite(rows).all(dim=2).double()
    clean = rows.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    torch._foreach_add_([one.count for one in operands], list(keep.sum(dim=1)))
    torch._foreach_add_([one.sums for one in operands], list((keep[:, None] @ clean)[:, 0]))
    squares = (keep[:, None] @ clean.square())[:, 0]
    torch._foreach_add_([one.squares for one in operands], list(squares))


def _add_sample(operands: Sequence[OperandStatistics], rows: Tensor, keys: Tensor) -> None:
    keys = keys.masked_fill(~torch.isfinite(rows).all(dim=2), math.inf)
    rows = rows.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    own_keys, own_rows = [one.keys for one in operands], [one.rows for one in operands]
    all_keys = torch.cat((torch.stack(own_keys), keys), dim=1)
    found, places = torch.topk(all_keys, len(own_keys[0]), largest=False, sorted=True)
    stacked = torch.cat((torch.stack(own_rows), rows), dim=1)
    kept = stacked.gather(1, places[:, :, None].expand(-1, -1, stacked.shape[2]))
    torch._foreach_copy_(own_keys, list(found))
    torch._foreach_copy_(own_rows, list(kept))


def coprime_from(number: int, other: int) -> int:
    """The smallest that is not less than a number, and has no factor in common with another.

    As a stride over rows of samples by features, or over columns in blocks, it meets all alike.
    """
    while math.gcd(number, other) > 1:
        number += 1
    return number


class SiteStatistics:
    """Statistics of ``Y[m, n] = X[m, k] W[n, k]^T`` and of the gradient of Y.

    Attributes:
        norm: The normalization of Y, as `lokakern.norm.norm_named` reads it; "" if not known.
        input: Rows of X.
        grad_output: Rows of the gradient of Y.
        snapshot: The newest W, some of its rows where it is large; None before one was seen.
        snapshot_t: Some rows of its transpose ``[.., n]``, where the snapshot is not whole.
        snapshots: Number of snapshots so far.
        mean_ratios: ``|mean| / deviation`` of rows of Y, before a LayerNorm subtracts the mean.
        cancellations: ``[2]`` float64: the sum of `cancellation_of` over backward passes, and their
            number.
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

    def count(self, calls: Mapping[int, int]) -> None:
        """Count calls by their numbers of rows."""
        self.sizes.update(calls)
        if len(self.sizes) > DISTINCT_SIZES:
            coarse: Counter[int] = Counter()
            for m, count in self.sizes.items():
                shift = max(m.bit_length() - 7, 0)
                coarse[(m >> shift) << shift] += count
            self.sizes = coarse

    def add_weight(self, weight: Tensor) -> None:
        """Keep W, ``[n, k]``, in the place of an older one; on its device, unread by the host."""
        self.snapshots += 1
        self.snapshot = _kept(weight.detach())
        is_whole = len(self.snapshot) == self.n
        # A product with W^T sums over all n, and so it needs whole columns.
        self.snapshot_t = None if is_whole else _kept(weight.detach().t())

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

    def merge(self, other: SiteStatistics) -> None:
        """Take in statistics of the same site from another rank.

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
        self.count(other.sizes)
        self.norm = self.norm or other.norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for part in PARTS:
            for name, x in getattr(self, part).tensors():
                yield f"{part}.{name}", x
        yield "mean_ratios", self.mean_ratios.counts
        yield "cancellations", self.cancellations
        for name in ("snapshot", "snapshot_t"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def numbers(self) -> dict[str, Any]:
        """Everything that the host knows and is no tensor, as JSON."""
        return {
            "n": self.n,
            "k": self.k,
            "bias": self.has_bias,
            "norm": self.norm,
            "snapshots": self.snapshots,
            "steps": [self.input.steps, self.grad_output.steps],
            "strides": [self.input.stride, self.grad_output.stride],
            "sizes": sorted(self.sizes.items()),
        }

    def m_quantile(self, share: float) -> int:
        """A quantile of m over calls; 0 of none."""
        reached, total = 0, sum(self.sizes.values())
        for m in sorted(self.sizes):
            reached += self.sizes[m]
            if reached >= share * total:
                return m
        return 0

    @property
    def m(self) -> int:
        """The median of m, at least 1."""
        return max(self.m_quantile(0.5), 1)

    @property
    def mean_ratio(self) -> float:
        """The 99th percentile of `mean_ratios`; 0 of none."""
        found = self.mean_ratios.log2_quantiles(0.99)[0]
        return 0.0 if math.isnan(found) else 2.0**found


def add_outputs(sites: Sequence[SiteStatistics], rows: Tensor) -> None:
    """Take in some rows of the output of each site, ``[sites, sampled, n]``."""
    deviation, mean = torch.std_mean(rows.double(), dim=2, correction=0)
    # Infinite where all are equal: no quantile has it.
    add_magnitudes([site.mean_ratios for site in sites], mean / deviation)


def add_cancellations(
    counts: Sequence[int], sites: Sequence[SiteStatistics], sizes: Tensor, *pairs: Tensor
) -> None:
    """Take in how much of one site's weight gradient cancels in one backward pass.

    Args:
        counts: Rows of each call.
        sites: One.
        sizes: L2 norms of the rows of the gradient, ``[1, n]``.
        pairs: Of each call some rows of the input and of the gradient, ``[1, sampled, ..]``.
    """
    calls = zip(counts, pairs[::2], pairs[1::2], strict=True)
    terms = [count / len(x[0]) * terms_of(y[0], x[0]) for count, x, y in calls]
    value = cancellation_of(torch.stack(terms).sum(dim=0), sizes[0])
    sites[0].cancellations += torch.stack([value, torch.ones_like(value)])


def terms_of(gradients: Tensor, inputs: Tensor) -> Tensor:
    """Sums of squared terms of each row of a weight's gradient, ``[n]`` float64."""
    return inputs.double().square().sum(dim=1) @ gradients.double().square()


def cancellation_of(terms: Tensor, sizes: Tensor) -> Tensor:
    """Mean over rows of squared terms over the square of their sum; 1 if terms are independent.

    The squared error of a sum whose terms are rounded, in units of that of a term. Sizes are L2
    norms of the rows of the sum, ``[n]``, and terms those of `terms_of`.
    """
    ratios = torch.where(terms > 0, terms / sizes.double().square(), 0.0)
    return ratios.nan_to_num(nan=0.0).clamp_max(MOST_CANCELLED).mean()


def places_of(count: int, total: int, device: torch.device | None = None) -> Tensor:
    """Indices of rows that stand for all, ``[count]``: repeated, or in blocks, evenly spread.

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
