"""Rows of another user's file that can be measured again here, grouped into kinds."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lokakern.bench.exchange.export import named
from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.measure import timing
from lokakern.measure.time_problem import torch_device
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernels_for
from lokakern.registry.schema import row_keys
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import without_unused
from lokakern.registry.storage.reader import Rows
from lokakern.selection.candidates import LIMIT_COLUMNS
from lokakern.sweep import cost
from lokakern.sweep.resume import distribution_row
from lokakern.types import REGIMES, Problem, Rejected
from lokakern.workloads.distributions import DISTRIBUTIONS

if TYPE_CHECKING:
    from lokakern.registry.schema.records import KernelRow
    from lokakern.registry.snapshot.snapshot import Snapshot

LONGEST_S = 60.0  # per row; rows that take longer are not drawn
TIMES, ERRORS = "timing", "accuracy"
# All errors that dispatch compares with a budget, and the row error.
ERROR_COLUMNS = ("row_err", *dict.fromkeys(LIMIT_COLUMNS.values()))


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be measured again.

    Attributes:
        table: "timing" or "accuracy".
        key: Key of the row.
        kind: Group of rows that hold or fail together.
        kernel: The kernel measured there.
        here: The kernel to measure here: the same, or one with its arithmetic.
        regime: Timing regime; "" for errors.
        seed: Seed of an error; 0 for times.
        there: Values in the file, by column.
    """

    table: str
    key: str
    kind: str
    kernel: str
    here: str
    problem: Problem
    distribution: str
    regime: str
    seed: int
    there: tuple[tuple[str, float], ...]

    @property
    def cell(self) -> tuple[object, ...]:
        """Key of a measurement; several rows may share it."""
        return self.table, self.here, self.problem, self.distribution, self.regime, self.seed

    @property
    def place(self) -> tuple[object, ...]:
        """Unit of the selection: a cell, or for times a problem with all its kernels."""
        return (self.problem, self.distribution, self.regime) if self.table == TIMES else self.cell


class Foreign:
    """Rows of a file, apart from those that are trusted already.

    Attributes:
        known: Those, with the rows they refer to.
    """

    def __init__(self, rows: Rows, trusted: Snapshot) -> None:
        self._rows: Rows = dict(rows) | {name: trusted.unknown(name, rows[name]) for name in FACTS}
        unknown = {name: {row[0] for row in self._rows[name]} for name in FACTS}
        known = {name: [row for row in rows[name] if row[0] not in unknown[name]] for name in FACTS}
        self.known = without_unused(known, rows)
        self._device = current_device()
        self._parts: dict[str, dict[str, Any]] = {
            name: {row[0]: row_keys.from_row(kind, named(name, row)) for row in rows[name]}
            for name, kind in row_keys.ENTITIES.items()
        }

    def divided(self, keys: Set[str]) -> tuple[Rows, Rows]:
        """Facts with these keys, and the other untrusted ones, each with the rows they refer to."""
        some: Rows = {n: [row for row in self._rows[n] if row[0] in keys] for n in FACTS}
        others: Rows = {n: [row for row in self._rows[n] if row[0] not in keys] for n in FACTS}
        return without_unused(some, self._rows), without_unused(others, self._rows)

    def repeatable(self) -> list[Row]:
        """Successful rows that can be measured here, with current kernels and distributions.

        Failures are excluded: they need not occur on another machine.
        """
        found = [*self._times(), *self._errors()]
        return sorted(found, key=lambda row: (row.kind, row.key))

    def _times(self) -> Iterator[Row]:
        """Times of this GPU type."""
        regimes = _regimes_here()
        for row, kernel, problem, distribution in self._good(TIMES):
            if (
                self._parts["device"][row["device"]] == self._device
                and row["regime"] in regimes
                and _runs(KERNELS[kernel.name], problem)
                and cost.timing_s(problem, 1, self._device) <= LONGEST_S
            ):
                there = (("latency_us_p50", row["latency_us_p50"]),)
                kind = f"times, {row['regime']}"
                yield Row(TIMES, row["key"], kind, kernel.name, kernel.name, problem, distribution,
                          row["regime"], 0, there)  # fmt: skip

    def _errors(self) -> Iterator[Row]:
        """Errors of the same kernel, or of one with its arithmetic."""
        stand_ins: dict[tuple[Any, ...], Kernel | None] = {}
        for row, kernel, problem, distribution in self._good(ERRORS):
            asked = (kernel, problem, row["architecture"])
            if asked not in stand_ins:
                stand_ins[asked] = self._of_its_arithmetic(*asked)
            here = stand_ins[asked]
            if here is None or cost.error_s(problem, self._device) > LONGEST_S:
                continue
            scales = f"{kernel.granularity} x {kernel.b_granularity}, {kernel.accumulation}"
            yield Row(ERRORS, row["key"], f"errors, {row['architecture']}, {kernel.op}, {scales}",
                      kernel.name, here.name, problem, distribution, "", row["seed"],
                      tuple((column, row[column]) for column in ERROR_COLUMNS))  # fmt: skip

    def _good(self, name: str) -> Iterator[tuple[dict[str, Any], KernelRow, Problem, str]]:
        for values in self._rows[name]:
            row = named(name, values)
            kernel = self._parts["kernel"][row["kernel"]]
            distribution = self._parts["distribution"][row["distribution"]]
            known = DISTRIBUTIONS.get(distribution.name)
            if (
                row["status"] == "ok"
                and known is not None
                and distribution_row(known.name) == distribution
                and is_current(kernel)
                and kernel.name in KERNELS
            ):
                yield row, kernel, self._parts["problem"][row["problem"]], known.name

    def _of_its_arithmetic(
        self, kernel: KernelRow, problem: Problem, architecture: str
    ) -> Kernel | None:
        if fp8_format(architecture) is not fp8_format(self._device):
            return None  # a GEMM would use another FP8 format here
        alike = [
            other
            for other in kernels_for(problem.op, self._device)
            if (other.granularity, other.b_granularity)
            == (kernel.granularity, kernel.b_granularity)
            and _runs(other, problem)
        ]
        return min(alike, key=lambda other: (
            other.name != kernel.name, other.accumulation != kernel.accumulation, other.name,
        ), default=None)  # fmt: skip


def _runs(kernel: Kernel, problem: Problem) -> bool:
    device = current_device()
    return kernel.runs_on(device) and not isinstance(kernel.supports(problem, device), Rejected)


def _regimes_here() -> list[str]:
    possible = []
    for regime in REGIMES:
        try:
            timing.check_regime(regime, torch_device())
        except MeasurementError:
            continue
        possible.append(regime)
    return possible
