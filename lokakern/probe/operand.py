"""What one operand of a site looked like: input, gradient of the output, or weight.

Sizes of rows and columns come from whole tensors, in two passes that keep nothing; the rest from
a sample of rows. Nothing here is read by the host until a report is made.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lokakern.probe.magnitudes import Magnitudes
from lokakern.probe.moments import DENSE, Moments
from lokakern.probe.reservoir import Reservoir

TRACE = 64  # largest magnitudes of steps that are kept; when full, pairs become one


class OperandStatistics:
    """Statistics of matrices ``[rows, columns]`` that came one after another.

    Args:
        columns: Of a row.
        device: Of the matrices.
        dense: Columns up to which the covariance is kept whole.

    Attributes:
        moments: Mean and covariance of sampled rows.
        row_sizes: Largest magnitude of each row.
        values: Magnitudes of elements of sampled rows.
        column_sizes: ``[columns]`` float32, the largest magnitude of each.
        trace: ``[TRACE]`` float32, the largest magnitude of steps, ``stride`` of them in one.
        sample: Some of the rows.
    """

    def __init__(self, columns: int, device: torch.device, *, dense: int = DENSE) -> None:
        self.columns = columns
        self.moments = Moments(columns, device, dense=dense)
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
        sizes = torch.linalg.vector_norm(x, math.inf, dim=1).float()
        self.row_sizes.add(sizes)
        columns = torch.linalg.vector_norm(x, math.inf, dim=0).float()
        columns = columns.nan_to_num(nan=0.0, posinf=0.0)
        torch.maximum(self.column_sizes, columns, out=self.column_sizes)
        self.values.add(rows)
        keep = torch.isfinite(rows).all(dim=1)
        clean = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self.moments.add(clean, keep)
        self.sample.add(clean, keys.masked_fill(~keep, math.inf))
        self._trace(sizes.nan_to_num(nan=0.0, posinf=0.0).max())

    def _trace(self, largest: Tensor) -> None:
        place = self.steps // self.stride
        if place == TRACE:
            self._coarsen()
            place = self.steps // self.stride
        self.trace[place] = torch.maximum(self.trace[place], largest)
        self.steps += 1

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
