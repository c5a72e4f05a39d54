"""Everything measured, in memory: one immutable snapshot of shipped and user databases.

Rows stay the driver's tuples; cells are built for the few that a question is about.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from lokakern.errors import DatabaseError, DeviceError
from lokakern.registry import identity
from lokakern.registry.cells import AccuracyCell, TestResultCell, TimingCell
from lokakern.registry.freshness import is_current
from lokakern.registry.identity import family_key
from lokakern.registry.records import DistributionRow, KernelRow
from lokakern.types import Device, Environment

__all__ = [
    "AccuracyCell",
    "Snapshot",
    "TestResultCell",
    "TimingCell",
    "family_key",
    "load_snapshot",
]

Tuples = list[tuple[Any, ...]]


_UPPERS = (
    "row_err_upper",
    "row_p99_upper",
    "rel_err_upper",
    "mean_rel_err_upper",
    "mean_shift_upper",
    "kernel_err",
)
_MAY_PASS = frozenset({"error", "out_of_memory"})  # worth another try
_CASUALTIES = frozenset({"crashed", "timeout"})
_LATENCIES = ("latency_us_p20", "latency_us_p50", "latency_us_p80")


class Snapshot:
    """What dispatch reads. Immutable: later merges do not change it.

    Attributes:
        sources: The files it was read from.
    """

    def __init__(self, rows: Mapping[str, Tuples], sources: Sequence[str] = ()) -> None:
        from lokakern.registry.tables import COLUMNS

        self.sources = tuple(sources)
        self._rows = rows
        self._columns = COLUMNS
        self._by_key = {
            name: {row[0]: row for row in rows.get(name, ())}
            for name in ("device", "environment", "kernel", "problem", "distribution", "run")
        }
        self._built: dict[str, dict[str, Any]] = {name: {} for name in self._by_key}
        self._place = {
            name: {column: place for place, column in enumerate(columns)}
            for name, columns in COLUMNS.items()
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self._rows.get(n, ()))} {n}" for n in ("timing", "accuracy"))
        return f"Snapshot({counts} rows of {', '.join(self.sources) or 'no file'})"

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the sorted rows; equal to `database_digest` of the merged files."""
        from lokakern.registry.reader import rows_digest

        return rows_digest({name: self._rows.get(name, []) for name in self._columns})

    @cached_property
    def devices(self) -> list[Device]:
        """Devices anything was timed on, by vendor, product and partition."""
        found = (self._device(key) for key in self._by_key["device"])
        return sorted(found, key=lambda d: (d.vendor, d.product, d.partition != "none", str(d)))

    @cached_property
    def kernels(self) -> list[KernelRow]:
        """Kernels anything is known of, each state of their source, by name and digest."""
        found = (
            self._dimension("kernel", key, identity.kernel_from_row)
            for key in self._by_key["kernel"]
        )
        return sorted(found, key=lambda row: (row.name, row.digest))

    @cached_property
    def distributions(self) -> list[DistributionRow]:
        """Distributions anything was measured under, by name and parameters."""
        found = (self._distribution(key) for key in self._by_key["distribution"])
        return sorted(found, key=lambda d: (d.name, d.parameters, d.realistic))

    def parameters_of(self, architecture: str, name: str) -> str:
        """Canonical JSON of a distribution's parameters, as its newest good row there has them.

        When a default changes, what was measured under the old one no longer counts. Rows of
        kernels as they are now come before others: somebody else's version hides nothing.
        """
        return self._newest_parameters.get((architecture, name), "")

    @cached_property
    def _newest_parameters(self) -> dict[tuple[str, str], str]:
        started = {
            key: self._dimension("run", key, dict)["started_utc_ms"] for key in self._by_key["run"]
        }
        current = {
            key: is_current(self._dimension("kernel", key, identity.kernel_from_row))
            for key in self._by_key["kernel"]
        }
        newest: dict[tuple[str, str], tuple[bool, int, str]] = {}
        columns = ("kernel", "run", "distribution", "architecture", "status")
        for kernel, run, key, architecture, status in {*self._picked("accuracy", columns)}:
            if status == "ok":
                row, place = self._distribution(key), (architecture, self._distribution(key).name)
                seen = (current[kernel], started[run], row.parameters)
                newest[place] = max(newest.get(place, seen), seen)
        return {place: parameters for place, (*_, parameters) in newest.items()}

    @cached_property
    def distribution_names(self) -> frozenset[str]:
        """Names of `distributions`."""
        return frozenset(found.name for found in self.distributions)

    def find_device(self, name: str) -> Device:
        """The device of a product name, exact ("NVIDIA H200") or normalized ("nvidia-h200").

        Of several with that name the whole device wins over a partition, then the one with most
        timings.

        Raises:
            DeviceError: Nothing was measured on such a device.
        """
        matches = [d for d in self.devices if d.product == name] or [
            d for d in self.devices if _normalized(d.product) == _normalized(name)
        ]
        if not matches:
            known = ", ".join(sorted({repr(d.product) for d in self.devices})) or "none"
            raise DeviceError(
                f"device {name!r} is in no database; known are {known}; measure it with "
                "`python -m lokakern.bench sweep` there"
            )
        return max(
            matches,
            key=lambda d: (
                d.partition == "none",
                self._timing_counts.get(identity.device_key(d), 0),
                identity.device_key(d),
            ),
        )

    def timing_cells(self, device: Device, family: str, regime: str) -> list[TimingCell]:
        """Timings of every kernel and m, by kernel, m and run.

        Args:
            device: Where.
            family: `family_key` of a problem: the problem without its m.
            regime: "graph-cold", "graph-hot" or "eager".
        """
        rows = self._timing_index.get((identity.device_key(device), family, regime), ())
        return sorted(
            map(self._timing_cell, rows),
            key=lambda c: (c.kernel.name, c.m, c.started_utc_ms, c.run, c.distribution),
        )

    def timings_on(self, device: Device, regime: str) -> Iterator[TimingCell]:
        """Every timing on a device in a regime."""
        key = identity.device_key(device)
        for (where, _, how), rows in self._timing_index.items():
            if (where, how) == (key, regime):
                yield from map(self._timing_cell, rows)

    def accuracy_cells(
        self, architecture: str, kernel_name: str, problem_key: str
    ) -> list[AccuracyCell]:
        """Accuracies of every state of a kernel at a problem, by distribution, run and seed."""
        rows = self._accuracy_index.get((architecture, kernel_name, problem_key), ())
        return sorted(
            map(self._accuracy_cell, rows),
            key=lambda c: (c.distribution, c.started_utc_ms, c.run, c.seed, c.parameters),
        )

    def accuracy_cells_of_class(
        self,
        architecture: str,
        problem_key: str,
        granularity: str,
        b_granularity: str,
        accumulation: str,
    ) -> list[AccuracyCell]:
        """Accuracies at a problem of all kernels that scale and accumulate alike.

        By distribution, run, seed and kernel. The arguments after `problem_key` are fields of
        `KernelRow`.
        """
        asked = (architecture, problem_key, granularity, b_granularity, accumulation)
        return sorted(
            map(self._accuracy_cell, self._accuracy_class_index.get(asked, ())),
            key=lambda c: (
                c.distribution, c.started_utc_ms, c.run, c.seed, c.parameters,
                c.kernel.name, c.kernel.digest,
            ),
        )  # fmt: skip

    @cached_property
    def test_results(self) -> list[TestResultCell]:
        """How tests of kernels ended, by kernel, architecture, suite and time."""
        return sorted(
            map(self._test_result_cell, self._rows.get("test_result", ())),
            key=lambda c: (
                c.kernel.name, c.architecture, c.suite, c.started_utc_ms, c.measured_utc_ms, c.run,
                c.kernel.digest,
            ),
        )  # fmt: skip

    def timing_outcomes(self) -> set[tuple[str, str, Device, str, str]]:
        """How timings ended: kernel name, its digest, device, status and reason."""
        found = {*self._picked("timing", ("kernel", "device", "status", "reason"))}
        name_of, digest_of = self._column("kernel", "name"), self._column("kernel", "digest")
        return {
            (name_of[kernel], digest_of[kernel], self._device(device), status, reason)
            for kernel, device, status, reason in found
        }

    def environment(self, key: str) -> Environment:
        """The environment of a cell.

        Raises:
            DatabaseError: There is none of that key.
        """
        found: Environment = self._dimension("environment", key, identity.environment_from_row)
        return found

    def has_timing(
        self,
        kernel_digest: str,
        problem_key: str,
        distribution_key: str,
        device_key: str,
        environment_key: str,
        regime: str,
        grade: str = "full",
        *,
        retry: bool = False,
    ) -> bool:
        """Whether the same was timed before; a full row serves for a quick one.

        A crash or a hang counts as timed, unless it is to be tried again.
        """
        asked = (
            kernel_digest, problem_key, distribution_key, device_key, environment_key, regime
        )  # fmt: skip
        return self._has("timing", asked, grade, int(retry))

    def has_accuracy(
        self,
        kernel_digest: str,
        problem_key: str,
        distribution_key: str,
        architecture: str,
        environment_key: str,
        seed: int,
        grade: str = "full",
        *,
        retry: bool = False,
        ok_only: bool = False,
    ) -> bool:
        """Whether the same error was measured before, as `has_timing` says; or with success."""
        asked = (
            kernel_digest, problem_key, distribution_key, architecture, environment_key, seed
        )  # fmt: skip
        return self._has("accuracy", asked, grade, 2 if ok_only else int(retry))

    def _has(self, name: str, asked: tuple[str | int, ...], grade: str, which: int) -> bool:
        measured = self._measured[which][name]
        return (*asked, "full") in measured or (*asked, grade) in measured

    def casualties(self, device: Device, environment_key: str) -> dict[str, int]:
        """At how many problems each kernel digest crashed or hung there and did not end well later.

        Timed on the device, or measured for errors on its architecture.
        """
        digest_of = self._column("kernel", "digest")
        place = ("kernel", "problem", "status", "measured_utc_ms", "environment")
        last: dict[tuple[str, str, str], tuple[int, str]] = {}
        for name, column, here in (
            ("timing", "device", identity.device_key(device)),
            ("accuracy", "architecture", device.architecture),
        ):
            for kernel, problem, status, when, environment, where in self._picked(
                name, (*place, column)
            ):
                if where == here and environment == environment_key:
                    key = (name, digest_of[kernel], problem)
                    last[key] = max(last.get(key, (0, "")), (when, status))
        return Counter(
            digest for (_, digest, _), (_, status) in last.items() if status in _CASUALTIES
        )

    @cached_property
    def _measured(self) -> tuple[dict[str, set[tuple[Any, ...]]], ...]:
        """What need not be measured again; that without crashes and hangs; what is ok."""
        from lokakern.registry.tables import STATUSES

        failures = frozenset(STATUSES) - {"ok"}
        return tuple(map(self._measured_but, (_MAY_PASS, _MAY_PASS | _CASUALTIES, failures)))

    def _measured_but(self, statuses: frozenset[str]) -> dict[str, set[tuple[Any, ...]]]:
        digest_of = self._column("kernel", "digest")
        grade_of = self._column("run", "grade")
        columns = {
            "timing": ("problem", "distribution", "device", "environment", "regime"),
            "accuracy": ("problem", "distribution", "architecture", "environment", "seed"),
        }
        return {
            name: {
                (digest_of[kernel], *rest, grade_of[run])
                for kernel, run, status, *rest in self._picked(
                    name, ("kernel", "run", "status", *wanted)
                )
                if status not in statuses
            }
            for name, wanted in columns.items()
        }

    @cached_property
    def _timing_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (device, _, _), rows in self._timing_index.items():
            counts[device] = counts.get(device, 0) + len(rows)
        return counts

    @cached_property
    def _timing_index(self) -> dict[tuple[str, str, str], Tuples]:
        columns = self._columns["problem"]
        families = {
            key: identity.family_of_row(dict(zip(columns, row, strict=True)))
            for key, row in self._by_key["problem"].items()
        }
        index: dict[tuple[str, str, str], Tuples] = {}
        picked = self._picked("timing", ("device", "problem", "regime"))
        for (device, problem, regime), row in zip(
            picked, self._rows.get("timing", ()), strict=True
        ):
            index.setdefault((device, families[problem], regime), []).append(row)
        return index

    @cached_property
    def _accuracy_index(self) -> dict[tuple[str, str, str], Tuples]:
        name_of = self._column("kernel", "name")
        index: dict[tuple[str, str, str], Tuples] = {}
        picked = self._picked("accuracy", ("architecture", "kernel", "problem"))
        for (architecture, kernel, problem), row in zip(
            picked, self._rows.get("accuracy", ()), strict=True
        ):
            index.setdefault((architecture, name_of[kernel], problem), []).append(row)
        return index

    @cached_property
    def _accuracy_class_index(self) -> dict[tuple[str, ...], Tuples]:
        alike = ("granularity", "b_granularity", "accumulation")
        pick = itemgetter(*(self._place["kernel"][column] for column in alike))
        class_of = {key: pick(row) for key, row in self._by_key["kernel"].items()}
        index: dict[tuple[str, ...], Tuples] = {}
        picked = self._picked("accuracy", ("architecture", "problem", "kernel"))
        for (architecture, problem, kernel), row in zip(
            picked, self._rows.get("accuracy", ()), strict=True
        ):
            index.setdefault((architecture, problem, *class_of[kernel]), []).append(row)
        return index

    def _picked(self, name: str, columns: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        places = self._place[name]
        return map(itemgetter(*(places[column] for column in columns)), self._rows.get(name, ()))

    def _column(self, name: str, column: str) -> dict[str, str]:
        place = self._place[name][column]
        return {key: row[place] for key, row in self._by_key[name].items()}

    def _dimension(
        self, name: str, key: str, build: Callable[[Mapping[str, identity.Value]], Any]
    ) -> Any:
        built = self._built[name]
        if key not in built:
            row = self._by_key[name].get(key)
            if row is None:
                raise DatabaseError(f"{name} {key!r} is in no database read")
            built[key] = build(dict(zip(self._columns[name], row, strict=True)))
        return built[key]

    def _device(self, key: str) -> Device:
        found: Device = self._dimension("device", key, identity.device_from_row)
        return found

    def _distribution(self, key: str) -> DistributionRow:
        build = identity.distribution_from_row
        found: DistributionRow = self._dimension("distribution", key, build)
        return found

    def _timing_cell(self, values: tuple[Any, ...]) -> TimingCell:
        row = dict(zip(self._columns["timing"], values, strict=True))
        run = self._dimension("run", row["run"], dict)
        return TimingCell(
            kernel=self._dimension("kernel", row["kernel"], identity.kernel_from_row),
            problem=self._dimension("problem", row["problem"], identity.problem_from_row),
            distribution=self._distribution(row["distribution"]).name,
            environment=row["environment"],
            grade=run["grade"],
            status=row["status"],
            reason=row["reason"],
            **_metrics("timing", row, (*_LATENCIES, "kernel_err")),
            replay_count=row["replay_count"] or 0,
            run=row["run"],
            started_utc_ms=run["started_utc_ms"],
            measured_utc_ms=row["measured_utc_ms"],
        )

    def _accuracy_cell(self, values: tuple[Any, ...]) -> AccuracyCell:
        row = dict(zip(self._columns["accuracy"], values, strict=True))
        run = self._dimension("run", row["run"], dict)
        distribution = self._distribution(row["distribution"])
        return AccuracyCell(
            kernel=self._dimension("kernel", row["kernel"], identity.kernel_from_row),
            distribution=distribution.name,
            parameters=distribution.parameters,
            realistic=distribution.realistic,
            environment=row["environment"],
            grade=run["grade"],
            seed=row["seed"],
            status=row["status"],
            reason=row["reason"],
            **_metrics("accuracy", row, _UPPERS),
            run=row["run"],
            started_utc_ms=run["started_utc_ms"],
            measured_utc_ms=row["measured_utc_ms"],
        )

    def _test_result_cell(self, values: tuple[Any, ...]) -> TestResultCell:
        row = dict(zip(self._columns["test_result"], values, strict=True))
        run = self._dimension("run", row["run"], dict)
        kernel = self._dimension("kernel", row["kernel"], identity.kernel_from_row)
        kept = {name: value for name, value in row.items() if name not in ("key", "kernel")}
        return TestResultCell(kernel=kernel, started_utc_ms=run["started_utc_ms"], **kept)


def _metrics(name: str, row: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, float]:
    missing = [metric for metric in metrics if row[metric] is None]
    if missing and row["status"] == "ok":
        raise DatabaseError(
            f"{name} row {row['key']} is 'ok' without {', '.join(missing)}; its file was edited: "
            "ask for it again"
        )
    return {metric: float("nan") if row[metric] is None else row[metric] for metric in metrics}


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def load_snapshot(paths: Sequence[str | Path] | None = None) -> Snapshot:
    """Read database files into memory, merged by key.

    Args:
        paths: Files, all of which must exist; by default the shipped files and, if there is one,
            the user's.

    Raises:
        DatabaseError: A file cannot be read, or files contradict each other.
    """
    from lokakern.registry.merging import union
    from lokakern.registry.reader import read_rows
    from lokakern.registry.store import shipped_databases, user_database

    if paths is None:
        user = user_database()
        paths = [*shipped_databases(), *([user] if user.exists() else [])]
    with _without_garbage_collection():
        parts = [read_rows(path) for path in paths]
        rows = parts[0] if len(parts) == 1 else union(parts)
    return Snapshot(rows, [str(path) for path in paths])


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Rows hold no cycles; walking them again and again would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
