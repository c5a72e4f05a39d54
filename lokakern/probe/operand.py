"""What one operand of a site looked like: its input, or the gradient of its output.

Sizes of rows and columns, and so the largest magnitude, come from whole tensors, of very many rows
from part of them (`taps.MANY_ROWS`), in two passes; the rest from a sample of rows.
Operands of one shape are taken in together, because a layer at a time would cost a GPU hundreds of
launches of next to nothing. Nothing here is read by the host until a report is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.probe.magnitudes import Magnitudes, add_magnitudes
from lokakern.probe.moments import Moments, add_moments
from lokakern.probe.reservoir import Reservoir, sample_rows

VALUES = 2**16  # of sampled elements whose magnitudes are counted
TRACE = 64  # largest magnitudes of steps that are kept; when full, pairs become one


class OperandStatistics:
    """Statistics of matrices ``[rows, columns]`` that came one after another.

    Args:
        columns: Of a row.
        device: Of the matrices.

    Attributes:
        moments: Mean and variance of sampled rows.
        row_sizes: Largest magnitude of each row.
        values: Magnitudes of elements of sampled rows, in up to `VALUES` elements of a matrix.
        column_sizes: ``[columns]`` float32, the largest magnitude of each.
        trace: ``[TRACE]`` float32, the largest magnitude of steps, ``stride`` of them in one.
        sample: Some of the rows.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.moments = Moments(columns, device)
        self.row_sizes = Magnitudes(device)
        self.values = Magnitudes(device)
        self.column_sizes = torch.zeros(columns, device=device)
        self.trace = torch.zeros(TRACE, device=device)
        self.steps, self.stride = 0, 1  # known to the host, which counts calls
        self.sample = Reservoir(columns, device)

    def add(self, x: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Take one matrix in.

        Args:
            x: ``[rows, columns]``, any float dtype.
            rows: Some of its rows, ``[sampled, columns]`` float64.
            keys: ``[sampled]`` float64, uniform over 0..1: which of them to keep.
        """
        add_looks([Look.at(self, x, rows, keys)])

    def _place(self) -> Tensor:
        """Where the trace keeps this step, ``[1]``; the next is another."""
        if self.steps // self.stride == TRACE:
            self._coarsen()
        place = self.steps // self.stride
        self.steps += 1
        return self.trace[place : place + 1]

    def _coarsen(self) -> None:
        pairs = self.trace.view(-1, 2).amax(dim=1)
        self.trace.zero_()
        self.trace[: TRACE // 2] = pairs
        self.stride *= 2

    def align(self, stride: int) -> None:
        """Let each place of the trace hold at least so many steps, a power of two."""
        while self.stride < stride:
            self._coarsen()

    def merge(self, other: OperandStatistics) -> None:
        """Take in other rows of the same steps, as another rank saw them.

        Raises:
            ShapeError: It saw other columns.
        """
        self.moments.merge(other.moments)
        device = self.trace.device
        for name in ("row_sizes", "values"):
            getattr(self, name).counts.add_(getattr(other, name).counts.to(device))
        torch.maximum(self.column_sizes, other.column_sizes.to(device), out=self.column_sizes)
        self.align(other.stride)
        trace = other.trace.to(device)
        if other.stride < self.stride:
            ratio = self.stride // other.stride
            coarse = torch.zeros_like(trace)
            coarse[: TRACE // ratio] = trace.view(-1, ratio).amax(dim=1)
            trace = coarse
        torch.maximum(self.trace, trace, out=self.trace)
        self.steps = max(self.steps, other.steps)
        self.sample.merge(other.sample)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, to be saved or sent."""
        found = {f"moments.{name}": x for name, x in self.moments.tensors().items()}
        return found | {
            "row_sizes": self.row_sizes.counts,
            "values": self.values.counts,
            "column_sizes": self.column_sizes,
            "trace": self.trace,
            "sample.rows": self.sample.rows,
            "sample.keys": self.sample.keys,
        }

    @property
    def rows_seen(self) -> int:
        return self.row_sizes.count + self.row_sizes.nonfinite_count

    @property
    def zero_row_share(self) -> float:
        """Of rows that are finite."""
        return self.row_sizes.zero_share

    @property
    def nonfinite_rows(self) -> int:
        return self.row_sizes.nonfinite_count

    @property
    def nonfinite_share(self) -> float:
        """Of sampled elements."""
        bad = self.values.nonfinite_count
        return bad / max(bad + self.values.count, 1)

    @property
    def amax(self) -> float:
        """The largest magnitude of rows that are finite."""
        return float(self.trace.max())

    @property
    def amax_drift_log2(self) -> float:
        """Octaves by which the largest magnitude rose from the first quarter of steps to the last.

        0 of fewer than 4 places.
        """
        used = -(-self.steps // self.stride)
        quarter = used // 4
        if quarter == 0:
            return 0.0
        trace = self.trace[:used].double().cpu()
        first, last = float(trace[:quarter].median()), float(trace[-quarter:].median())
        return math.log2(last / first) if first > 0 and last > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What is kept of a matrix until it is taken in.

    Attributes:
        operand: Whose matrix it was.
        row_sizes: ``[rows]``, the largest magnitude of each, in the matrix's dtype.
        column_sizes: ``[columns]``, alike.
        rows: ``[sampled, columns]``, some of its rows.
        keys: ``[sampled]`` float64, uniform over 0..1.
    """

    operand: OperandStatistics
    row_sizes: Tensor
    column_sizes: Tensor
    rows: Tensor
    keys: Tensor

    @classmethod
    def at(cls, operand: OperandStatistics, x: Tensor, rows: Tensor, keys: Tensor) -> Look:
        """Look at ``[..., columns]``, however it lies; `rows` are of its own memory."""
        row_sizes = torch.linalg.vector_norm(x, math.inf, dim=-1).flatten()
        column_sizes = torch.linalg.vector_norm(x, math.inf, dim=tuple(range(x.dim() - 1)))
        return cls(operand, row_sizes, column_sizes, rows, keys)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.row_sizes, self.column_sizes, self.rows, self.keys

    @property
    def elements(self) -> int:
        """Of the largest tensor that taking it in makes."""
        rows = len(self.rows) + len(self.operand.sample.keys)
        return max(rows * self.operand.columns, len(self.row_sizes), 1)

    @property
    def form(self) -> tuple[object, ...]:
        """Looks of the same form are taken in together."""
        return (self.rows.device, self.rows.dtype, self.row_sizes.dtype, self.row_sizes.shape,
                self.rows.shape)  # fmt: skip


def coprime_from(number: int, other: int) -> int:
    """The smallest that is not less than a number, and has no factor in common with another.

    A stride over rows of samples by features, or over columns in blocks, that meets all alike.
    """
    while math.gcd(number, other) > 1:
        number += 1
    return number


def add_looks(looks: Sequence[Look]) -> None:
    """Take in looks of one form, each at another operand."""
    for _ in taking_in(looks):
        pass


PARTS = 6  # of `taking_in`


def taking_in(looks: Sequence[Look]) -> Iterator[None]:
    """The same in parts of some twenty launches, less than a host has to spare in a step."""
    operands = [look.operand for look in looks]
    steps = operands[0].steps
    sizes = torch.stack([look.row_sizes for look in looks]).float()
    add_magnitudes([one.row_sizes for one in operands], sizes)
    largest = sizes.nan_to_num(nan=0.0, posinf=0.0).amax(dim=1, keepdim=True)
    torch._foreach_maximum_([one._place() for one in operands], list(largest))
    del sizes, largest  # what a part needs no more must not stay for steps
    yield
    columns = torch.stack([look.column_sizes for look in looks]).float()
    columns = columns.nan_to_num(nan=0.0, posinf=0.0)
    torch._foreach_maximum_([one.column_sizes for one in operands], list(columns))
    del columns
    yield
    rows = torch.stack([look.rows for look in looks])
    # Of 17280 columns all took an H200 0.4 ms: additions meet in a few bins. Others at each step.
    stride = coprime_from(-(-rows[0].numel() // VALUES), rows.shape[2])
    add_magnitudes([one.values for one in operands], rows[:, :, steps % stride :: stride])
    yield
    keep = torch.isfinite(rows).all(dim=2)
    clean = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    del rows
    yield
    add_moments([one.moments for one in operands], clean.double(), keep)
    yield
    keys = torch.stack([look.keys for look in looks]).masked_fill(~keep, math.inf)
    sample_rows([one.sample for one in operands], clean, keys)
    yield
