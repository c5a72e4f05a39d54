"""Rows of a snapshot as objects: devices, kernels, problems, and cells of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from lokakern.errors import DatabaseError
from lokakern.registry.freshness import is_current
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.registry.snapshot.cells import AccuracyCell, TestResultCell, TimingCell
from lokakern.registry.snapshot.facts import Facts, Row, image_of_rows
from lokakern.types import Device, Environment, Problem

if TYPE_CHECKING:
    from lokakern.registry.quarantine import Doubts

T = TypeVar("T", bound=row_keys.Entity)
UPPERS = (
    "row_err_upper",
    "row_p99_upper",
    "rel_err_upper",
    "mean_rel_err_upper",
    "mean_shift_upper",
    "kernel_err",
)
_SHARED = ("environment", "status", "reason", "run", "measured_utc_ms")
_LATENCIES = ("latency_us_p20", "latency_us_p50", "latency_us_p80")


class Lookup:
    """Rows of databases, by key.

    Attributes:
        sources: The files they were read from.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]] | Facts,
        sources: Sequence[str] = (),
        doubts: Doubts | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._doubts = doubts or None
        self._facts = rows if isinstance(rows, Facts) else Facts([image_of_rows(rows)])
        self._columns = self._facts.columns
        self._by_key = self._facts.dimensions
        self._built: dict[type, dict[str, Any]] = {}
        self._place = {
            name: {column: place for place, column in enumerate(columns)}
            for name, columns in self._columns.items()
        }

    @property
    def has_doubts(self) -> bool:
        """Whether any row is in quarantine."""
        return self._doubts is not None

    @cached_property
    def devices(self) -> list[Device]:
        """Devices anything was timed on, by vendor, product and partition."""
        found = (self._entity(Device, key) for key in self._by_key["device"])
        return sorted(found, key=lambda d: (d.vendor, d.product, d.partition != "none", str(d)))

    @cached_property
    def kernels(self) -> list[KernelRow]:
        """Kernels anything is known of, each state of their source, by name and digest."""
        found = (self._entity(KernelRow, key) for key in self._by_key["kernel"])
        return sorted(found, key=lambda row: (row.name, row.digest))

    @cached_property
    def distributions(self) -> list[DistributionRow]:
        """Distributions anything was measured under, by name and parameters."""
        found = (self._entity(DistributionRow, key) for key in self._by_key["distribution"])
        return sorted(found, key=lambda d: (d.name, d.parameters, d.realistic))

    @cached_property
    def distribution_names(self) -> frozenset[str]:
        """Names of `distributions`."""
        return frozenset(found.name for found in self.distributions)

    def environment(self, key: str) -> Environment:
        """The environment of a cell.

        Raises:
            DatabaseError: There is none of that key.
        """
        return self._entity(Environment, key)

    def _is_current(self, key: str) -> bool:
        return is_current(self._entity(KernelRow, key))

    def _tier(self, name: str, key: str) -> str:
        return self._doubts.tier_of(name, key) if self._doubts else ""

    def _picker(self, name: str, *columns: str) -> Callable[[Row], Row]:
        """What gives some columns of a row, at least two."""
        return itemgetter(*(self._place[name][column] for column in columns))

    def _column(self, name: str, column: str) -> dict[str, Any]:
        place = self._place[name][column]
        return {key: row[place] for key, row in self._by_key[name].items()}

    def _entity(self, kind: type[T], key: str) -> T:
        """The device, environment, kernel, problem or distribution of a key.

        Raises:
            DatabaseError: There is none.
        """
        built = self._built.setdefault(kind, {})
        found: T | None = built.get(key)
        if found is None:
            row = self._row(row_keys.TABLE_OF[kind], key)
            found = built[key] = row_keys.from_row(kind, row)
        return found

    def _row(self, name: str, key: str) -> dict[str, Any]:
        row = self._by_key[name].get(key)
        if row is None:
            raise DatabaseError(f"{name} {key!r} is in no database read")
        return dict(zip(self._columns[name], row, strict=True))

    @cached_property
    def _runs(self) -> dict[str, dict[str, Any]]:
        return {key: self._row("run", key) for key in self._by_key["run"]}

    def _shared(self, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that cells of timings and accuracies share."""
        run = self._runs[row["run"]]
        return {
            "kernel": self._entity(KernelRow, row["kernel"]),
            "grade": run["grade"],
            "started_utc_ms": run["started_utc_ms"],
            "tier": self._tier(name, row["key"]),
            **{column: row[column] for column in _SHARED},
        }

    def _timing_cell(self, values: tuple[Any, ...]) -> TimingCell:
        row = dict(zip(self._columns["timing"], values, strict=True))
        return TimingCell(
            problem=self._entity(Problem, row["problem"]),
            distribution=self._entity(DistributionRow, row["distribution"]).name,
            **_metrics("timing", row, (*_LATENCIES, "kernel_err")),
            replay_count=row["replay_count"] or 0,
            **self._shared("timing", row),
        )

    def _accuracy_cell(self, values: tuple[Any, ...]) -> AccuracyCell:
        row = dict(zip(self._columns["accuracy"], values, strict=True))
        distribution = self._entity(DistributionRow, row["distribution"])
        return AccuracyCell(
            distribution=distribution.name,
            parameters=distribution.parameters,
            realistic=distribution.realistic,
            seed=row["seed"],
            **_metrics("accuracy", row, UPPERS),
            **self._shared("accuracy", row),
        )

    def _test_result_cell(self, values: tuple[Any, ...]) -> TestResultCell:
        row = dict(zip(self._columns["test_result"], values, strict=True))
        run = self._runs[row["run"]]
        kernel = self._entity(KernelRow, row["kernel"])
        kept = {name: value for name, value in row.items() if name not in ("key", "kernel")}
        return TestResultCell(kernel=kernel, started_utc_ms=run["started_utc_ms"], **kept)


def _metrics(name: str, row: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, Any]:
    missing = [metric for metric in metrics if row[metric] is None]
    if missing and row["status"] == "ok":
        raise DatabaseError(
            f"{name} row {row['key']} is 'ok' without {', '.join(missing)}; its file was edited: "
            "ask for it again"
        )
    return {metric: float("nan") if row[metric] is None else row[metric] for metric in metrics}
