"""Statistics of a site, which is one linear layer, and of its operands.

Tensors stay on the device of the model. Updates take operands of one shape together, because a
layer at a time would cost a GPU hundreds of small launches. The host reads nothing before a report.
Histograms add up over shards, largest magnitudes are compared, and a sample keeps the rows with the
smallest random keys, so shards merge into the statistics of the whole. Inputs and gradients of the
same rows have the same keys, so both samples keep the same rows.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.types import GROUP, Format

GEMMS = ("output", "grad_input", "grad_weight")
PARTS = ("input", "grad_output")
# A bin is the exponent of a float32 and 4 bits of its fraction, found by a shift: 16 an octave.
SHIFT = 19
BINS = 1 << (31 - SHIFT)
FINITE = 255 << (23 - SHIFT)  # the first bin of numbers that are not finite
ROWS = 512  # of a sample: the 99th percentile is still an order statistic, the fifth
ELEMENTS = 2**19  # of a sample, 2 MiB of float32: fewer rows where they are long
FEWEST_ROWS = 64  # for a verdict
MULTIPLIED_ROWS = 128  # of a sample, to see means and cancellation of its products
SNAPSHOT_ELEMENTS = 2**22  # of the newest weight, 8 MiB of bfloat16
FEWEST_BLOCKS = 8  # of 128 rows that stand for a weight; of fewer rows, single ones do
MOST_CANCELLED = 700.0  # where rounding by 3.8 % leaves nothing of a sum
DISTINCT_SIZES = 1024  # numbers of rows told apart; of more, 7 bits each
SUMMED = ("row_sizes", "cancellations")
LARGEST = ("column_sizes", "largest")

# Owners, and tensors of each stacked.
Update = Callable[..., None]


def capacity_of(columns: int) -> int:
    """Rows of a sample."""
    return max(FEWEST_ROWS, min(ROWS, ELEMENTS // max(columns, 1)))


class OperandStatistics:
    """Statistics of an operand, inputs or outputs' gradients: matrices ``[rows, columns]``."""

    def __init__(self, columns: int, device: torch.device) -> None:
        # Largest magnitudes of rows (a histogram; below 2^-130 is 0), of columns, of finite rows.
        self.row_sizes = torch.zeros(BINS, dtype=torch.float64, device=device)
        self.column_sizes = torch.zeros(columns, device=device)
        self.largest = torch.zeros(1, device=device)
        # A uniform sample by ascending key, infinite where there is no row.
        self.rows = torch.zeros((capacity_of(columns), columns), device=device)
        self.keys = torch.full((len(self.rows),), math.inf, dtype=torch.float64, device=device)

    def add(self, x: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take one matrix in at once, see `add_rows`."""
        add_rows([self], *(tensor[None] for tensor in (*sizes_of(x), rows, keys)))

    def merge(self, other: OperandStatistics) -> None:
        """Take in other rows."""
        theirs = {name: x.to(self.keys.device) for name, x in other.tensors()}
        for name, x in self.tensors():
            if name in SUMMED:
                x.add_(theirs[name])
            elif name in LARGEST:
                torch.maximum(x, theirs[name], out=x)
        _add_sample([self], theirs["rows"][None], theirs["keys"][None])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for name in ("row_sizes", *LARGEST, "rows", "keys"):
            yield name, getattr(self, name)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Sampled rows ``[count, columns]`` and their keys, on the CPU."""
        keys = self.keys.cpu()
        count = int(torch.isfinite(keys).sum())
        return self.rows[:count].cpu(), keys[:count]

    @property
    def rows_seen(self) -> int:
        return int(self.row_sizes.sum())

    @property
    def nonfinite_rows(self) -> int:
        return int(self.row_sizes[FINITE:].sum())

    def share_beyond(self, low: float, high: float) -> float:
        """Share of finite rows that are not 0 and whose sizes lie outside of a range."""
        ends = torch.tensor([low, high], dtype=torch.float64)
        ends = ends.clamp_max(torch.finfo(torch.float32).max).float().view(torch.int32) >> SHIFT
        first, last = ends.tolist()
        outside = self.row_sizes[1:FINITE].sum() - self.row_sizes[max(first, 1) : last + 1].sum()
        return float(outside) / max(self.rows_seen - self.nonfinite_rows, 1)

    @property
    def amax(self) -> float:
        """The largest magnitude of finite rows."""
        return float(self.largest)


def sizes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows and of the columns of ``[..., columns]``."""
    rows = torch.linalg.vector_norm(x, math.inf, dim=-1).flatten()
    return rows, torch.linalg.vector_norm(x, math.inf, dim=tuple(range(x.dim() - 1)))


def add_rows(
    operands: Sequence[OperandStatistics],
    row_sizes: Tensor,
    column_sizes: Tensor,
    rows: Tensor,
    keys: Tensor,
) -> None:
    """Take in a matrix of each operand: sizes, some rows, and their random keys, 0..1."""
    places = (row_sizes.float().abs().view(torch.int32) >> SHIFT).long()
    counts = torch.zeros((len(operands), BINS), dtype=torch.float64, device=places.device)
    counts.scatter_add_(1, places, counts.new_ones(()).expand_as(places))
    torch._foreach_add_([one.row_sizes for one in operands], list(counts))
    columns = column_sizes.float().nan_to_num(nan=0.0, posinf=0.0)
    torch._foreach_maximum_([one.column_sizes for one in operands], list(columns))
    largest = row_sizes.float().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    torch._foreach_maximum_([one.largest for one in operands], list(largest))
    _add_sample(operands, rows, keys)


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
        cancellations: ``[2]`` float64: the sum of `cancellation_of` over backward passes, and their
            number.
        sizes: How often each m came.
        needs_input_gradient: Whether some X needed a gradient, as that of a first layer does not.
        half: Format in which products are judged: float16 if some Y was, else bfloat16.
        padding: Zeros that `mods.Pad` adds to k and to n in the product; operands are without them.
    """

    def __init__(
        self,
        n: int,
        k: int,
        device: torch.device,
        *,
        has_bias: bool = False,
        norm: str = "",
        padding: tuple[int, int] = (0, 0),
        needs_input_gradient: bool = True,
    ) -> None:
        self.n, self.k, self.has_bias, self.norm = n, k, has_bias, norm
        self.padding, self.needs_input_gradient = padding, needs_input_gradient
        self.half = Format.BFLOAT16
        self.device = device
        self.input = OperandStatistics(k, device)
        self.grad_output = OperandStatistics(n, device)
        self.snapshot: Tensor | None = None
        self.snapshot_t: Tensor | None = None
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
        self.snapshot, self.snapshot_t = snapshots_of(weight)

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
        if self.snapshot is None and other.snapshot is not None:
            kept = (other.snapshot, other.snapshot_t)
            self.snapshot, self.snapshot_t = (x if x is None else x.to(self.device) for x in kept)
        self.cancellations += other.cancellations.to(self.device)
        self.count(other.sizes)
        self.norm = self.norm or other.norm
        self.needs_input_gradient |= other.needs_input_gradient
        self.see_half(other.half.dtype)

    def see_half(self, dtype: torch.dtype) -> None:
        """Take in the dtype of a Y."""
        if dtype is torch.float16:
            self.half = Format.FLOAT16

    def in_dtype(self, dtype: torch.dtype) -> SiteStatistics:
        """The same tensors, judged in another dtype."""
        found = copy.copy(self)
        found.half = Format.of(dtype)
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name."""
        for part in PARTS:
            for name, x in getattr(self, part).tensors():
                yield f"{part}.{name}", x
        yield "cancellations", self.cancellations
        for name in ("snapshot", "snapshot_t"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    @property
    def m(self) -> int:
        """The median of m over calls; 1 of none."""
        sizes = sorted(self.sizes)
        reached = list(itertools.accumulate(self.sizes[m] for m in sizes))
        return max(sizes[bisect.bisect_left(reached, reached[-1] / 2)], 1) if sizes else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The median m, n and k of the product, with padding."""
        more_k, more_n = self.padding
        return self.m, self.n + more_n, self.k + more_k

    def products(self, gemm: str) -> tuple[Tensor, Tensor] | None:
        """Some sampled rows ``[.., k]`` and rows of the weight, float64; None where one lacks.

        Of the output or the input's gradient, whose product is ``rows @ weight.t()``.
        """
        operand, weight = (
            (self.input, self.snapshot) if gemm == "output" else (self.grad_output, self.weight_t())
        )
        rows = operand.kept()[0][:MULTIPLIED_ROWS].double()
        return None if weight is None or not len(rows) else (rows, weight.double().cpu())

    @property
    def mean_ratio(self) -> float:
        """``|mean| / deviation`` of rows of X W^T, the 99th percentile; 0 of none.

        A LayerNorm subtracts the mean.
        """
        operands = self.products("output")
        if operands is None:
            return 0.0
        deviation, mean = torch.std_mean(operands[0] @ operands[1].t(), dim=1, correction=0)
        ratios = (mean / deviation).abs()
        ratios = ratios[ratios.isfinite()]
        return float(ratios.quantile(0.99)) if len(ratios) else 0.0


def add_cancellations(
    counts: Sequence[int], sites: Sequence[SiteStatistics], sizes: Tensor, *pairs: Tensor
) -> None:
    """Take in how much of one site's weight gradient cancels in one backward pass.

    Sizes are L2 norms of the rows of the gradient, ``[1, n]``; counts are rows of each call, and
    pairs some rows of its input and of its gradient, ``[1, sampled, ..]``.
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


def snapshots_of(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copies of W, ``[n, k]``, or of some of its rows, and then of some of its transpose."""
    kept = _kept(weight.detach())
    # A product with W^T sums over all n, and so it needs whole columns.
    return kept, None if len(kept) == len(weight) else _kept(weight.detach().t())


def _kept(weight: Tensor) -> Tensor:
    """A copy of a matrix, or of some of its rows: one holds the largest magnitude of all."""
    total, columns = weight.shape
    most = max(FEWEST_ROWS, SNAPSHOT_ELEMENTS // columns)
    if total <= most:
        return weight.clone()
    places = places_of(most, total, weight.device)
    places[-1] = torch.linalg.vector_norm(weight, math.inf, dim=1).argmax()
    return weight.index_select(0, places)
