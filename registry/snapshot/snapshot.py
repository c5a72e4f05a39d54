"""Everything measured, in memory: one immutable snapshot of shipped and user databases.

Rows stay where they are (`registry/snapshot/facts.py`); cells are
built for the few that a question is about.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from operator import itemgetter, ne
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from lokakern.errors import DatabaseError, DeviceError
from lokakern.registry.quarantine import key_array
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.registry.snapshot.cells import (
    AccuracyCell,
    AccuracyHead,
    HostCostCell,
    TestResultCell,
    TimingCell,
    TimingHead,
)
from lokakern.registry.snapshot.facts import Facts, Image, Row, image_of_rows
from lokakern.registry.sqlite_file import FACTS, STATUSES
from lokakern.registry.staleness import is_current
from lokakern.render.did_you_mean import did_you_mean
from lokakern.types import Device, Environment, Problem

if TYPE_CHECKING:
    from lokakern.registry.quarantine import QuarantinedRows

_MAY_PASS = frozenset({"error", "out_of_memory"})  # worth another try
_CASUALTIES = frozenset({"crashed", "timeout"})
_FAILURES = frozenset(STATUSES) - {"ok"}
_TRIED_AGAIN = {False: _MAY_PASS, True: _MAY_PASS | _CASUALTIES}  # by `retry`
_WHERE = {  # what else tells measurements of a kernel at a problem apart
    "timing": ("device", "environment", "regime"),
    "accuracy": ("architecture", "environment", "seed"),
}
_MOST_KEPT = 64
_WIDE = 256  # columns of an output, from which the error of a row depends on their number no more

UPPERS = (
    "row_err_upper",
    "row_p99_upper",
    "rel_err_upper",
    "mean_rel_err_upper",
    "mean_shift_upper",
    "kernel_err",
)
T = TypeVar("T", bound=row_keys.Entity)
Cell = TypeVar("Cell", TimingCell, AccuracyCell, TestResultCell)
Read = TypeVar("Read", bound=Callable[..., Any])


def _digest_of_keys(rows: Facts | Image, more: str = "") -> str:
    digest = hashlib.sha256()
    for name in FACTS:
        digest.update(name.encode() + rows.keys(name))
    digest.update(more.encode())
    return digest.hexdigest()


def _kept(read: Read) -> Read:
    """Keep the answers to few questions, so that they never grow to the whole file."""

    @functools.wraps(read)
    def kept(self: Snapshot, *asked: Any) -> Any:
        answers = self._kept.setdefault(read.__name__, {})
        if asked not in answers:
            if len(answers) >= _MOST_KEPT:
                answers.clear()
            answers[asked] = read(self, *asked)
        return answers[asked]

    return cast(Read, kept)


class _Good(NamedTuple):
    """Of an accuracy that is ok; distribution and kernel are keys."""

    is_trusted: bool
    started_utc_ms: int
    distribution: str
    kernel: str


class Snapshot:
    """The data of dispatch. Immutable: later merges do not change it.

    Attributes:
        sources: The files it was read from.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]] | Facts,
        sources: Sequence[str] = (),
        quarantined: QuarantinedRows | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._quarantined = quarantined or None
        self._facts = rows if isinstance(rows, Facts) else Facts([image_of_rows(rows)])
        self._columns = self._facts.columns
        self._by_key = self._facts.dimensions
        self._built: dict[type, dict[str, Any]] = {}
        self._place = {
            name: {column: place for place, column in enumerate(columns)}
            for name, columns in self._columns.items()
        }
        self._kept: dict[str, dict[Row, Any]] = {}
        self._us_per_byte: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        counts = ", ".join(f"{self._facts.count(name)} {name}" for name in ("timing", "accuracy"))
        return f"Snapshot({counts} rows of {', '.join(self.sources) or 'no file'})"

    @property
    def has_quarantined(self) -> bool:
        """Whether any row is in quarantine."""
        return self._quarantined is not None

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
        return self._quarantined.tier_of(name, key) if self._quarantined else ""

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

    def _cell(self, kind: type[Cell], name: str, values: Row) -> Cell:
        """A fact with what it refers to; metrics that were not measured are NaN.

        Raises:
            DatabaseError: A metric of a good row is missing.
        """
        row = dict(zip(self._columns[name], values, strict=True))
        run = self._runs[row["run"]]
        known = {
            **row,
            "kernel": self._entity(KernelRow, row["kernel"]),
            "grade": run["grade"],
            "started_utc_ms": run["started_utc_ms"],
            "tier": self._tier(name, row["key"]),
        }
        if "distribution" in row:
            found = self._entity(DistributionRow, row["distribution"])
            known |= {
                "distribution": found.name,
                "parameters": found.parameters,
                "realistic": found.realistic,
            }
        if kind is TimingCell:
            known["problem"] = self._entity(Problem, row["problem"])
            known["replay_count"] = row["replay_count"] or 0
        cell = {field: known[field] for field in kind.__slots__}
        missing = [field for field, value in cell.items() if value is None]
        if missing and row["status"] == "ok":
            raise DatabaseError(
                f"{name} row {row['key']} is 'ok' without {', '.join(missing)}; its file was "
                "edited: ask for it again"
            )
        return kind(**{**cell, **dict.fromkeys(missing, math.nan)})

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the keys of all facts: of a million in 0.1 s.

        Equal measurements have equal keys in all databases: a key contains the run. The keys of
        quarantined rows count once more, because dispatch ranks these last.
        """
        return _digest_of_keys(self._facts, self._quarantined.digest if self._quarantined else "")

    def has_part(self, digest: str) -> bool:
        """Whether rows that were read from one file have this `digest`.

        A file that shares rows with another one may be missed.
        """
        return any(_digest_of_keys(image) == digest for image in self._facts.images)

    def unknown(self, name: str, rows: Sequence[Row]) -> list[Row]:
        """Those of a table of facts that are not here, whose first value is their key."""
        if not rows:
            return []
        asked = key_array(bytes.fromhex("".join(row[0] for row in rows)))
        known = np.isin(asked, key_array(self._facts.keys(name)))
        return [row for row, is_known in zip(rows, known, strict=True) if not is_known]

    @_kept
    def parameters_of(self, architecture: str, name: str) -> str:
        """Canonical JSON of a distribution's parameters, as its newest good row there has them.

        When a default changes, what was measured under the old one no longer counts. Rows of
        kernels as they are now come before others, and trusted ones before these: what somebody
        else has hides nothing.
        """
        variants = {
            key: found.parameters
            for key in self._by_key["distribution"]
            if (found := self._entity(DistributionRow, key)).name == name
        }
        if len({*variants.values()}) > 1:
            good = [row for row in self._good_on(architecture) if row.distribution in variants]
            newest = next((row for row in good if self._is_current(row.kernel)), None)
            return variants[(newest or good[0]).distribution] if good else ""
        good_there = {"architecture": architecture, "status": "ok"}
        for key, parameters in variants.items():
            if self._facts.has("accuracy", distribution=key, **good_there):
                return parameters
        return ""

    @_kept
    def _good_on(self, architecture: str) -> list[_Good]:
        """Good accuracies but for their numbers, trusted ones first and then the newest."""
        started = self._column("run", "started_utc_ms")
        columns = ("run", "distribution", "kernel", *(["key"] if self._quarantined else []))
        good = self._facts.picked("accuracy", columns, architecture=architecture, status="ok")
        found = {
            _Good(
                not any(self._tier("accuracy", k) for k in key), started[run], distribution, kernel
            )
            for run, distribution, kernel, *key in good
        }

        def newest(row: _Good) -> tuple[bool, int, str]:
            parameters = self._entity(DistributionRow, row.distribution).parameters
            return row.is_trusted, row.started_utc_ms, parameters

        return sorted(found, key=newest, reverse=True)

    def worst_errors(
        self, problem: Problem, granularity: str, b_granularity: str, distribution: str
    ) -> dict[str, float]:
        """Worst trusted bounds of kernels that scale alike, at about any shape of a problem's op.

        On whatever architecture, with whatever accumulation; of kernels as they are now. Not of far
        narrower outputs: the error of a row of one element is up to 20 times that of a row of 32.

        Args:
            problem: Of the op, n, the formats and layout of its operands, and the format of its
                output.
            granularity: Of a's scales.
            b_granularity: Of b's scales.
            distribution: Name; whatever its parameters were.

        Returns:
            By column of `AccuracyCell`; empty where nothing was measured.
        """
        form = (problem.op, problem.a.format, problem.a.layout, problem.out_format)
        fewest = min(problem.n, _WIDE) / 2
        return self._worst(form, fewest, (granularity, b_granularity), distribution)

    @_kept
    def _worst(
        self, form: tuple[str, ...], fewest: float, scales: tuple[str, str], name: str
    ) -> dict[str, float]:
        alike = self._picker("kernel", "granularity", "b_granularity")
        kernels = {
            key
            for key, row in self._by_key["kernel"].items()
            if alike(row) == scales and self._is_current(key)
        }
        problems = set()
        for key in self._by_key["problem"]:
            found = self._entity(Problem, key)
            its = (found.op, found.a.format, found.a.layout, found.out_format)
            if its == form and found.n >= fewest:
                problems.add(key)
        worst: dict[str, float] = {}
        columns = ("key", "kernel", "problem", *UPPERS)
        for distribution in self._by_key["distribution"]:
            if self._entity(DistributionRow, distribution).name != name:
                continue
            good = {"distribution": distribution, "status": "ok"}
            for key, kernel, problem, *bounds in self._facts.picked("accuracy", columns, **good):
                known = kernel in kernels and problem in problems
                if known and not self._tier("accuracy", key):
                    for column, bound in zip(UPPERS, bounds, strict=True):
                        worst[column] = max(worst.get(column, 0.0), bound)
        return worst

    def find_device(self, name: str, without_times: Sequence[str] = ()) -> Device:
        """The device of a product name, exact ("NVIDIA H200") or normalized ("nvidia-h200").

        Of several with that name one wins on which anything was timed by us or verified, then the
        whole device over a partition, then the one with most of these timings.

        Args:
            name: The name.
            without_times: Products that the caller also takes, for the error.

        Raises:
            DeviceError: Nothing was measured on such a device.
        """
        matches = [d for d in self.devices if d.product == name] or [
            d for d in self.devices if _normalized(d.product) == _normalized(name)
        ]
        if not matches:
            measured = sorted({d.product for d in self.devices})
            known = ", ".join(map(repr, measured)) or "none"
            if without_times:
                known += f", and without times {', '.join(map(repr, without_times))}"
            meant = did_you_mean(name, [*measured, *without_times], r"nvi\w* |amd instinct |amd ")
            raise DeviceError(
                f"device {name!r} is in no database; {meant}known are {known}; measure it with "
                "`python -m lokakern.bench sweep` there"
            )
        if len(matches) == 1:
            return matches[0]
        trusted = {device: self._trusted_timings(device) for device in matches}
        return max(
            matches,
            key=lambda d: (
                trusted[d] > 0, d.partition == "none", trusted[d], row_keys.key_of(d),
            ),
        )  # fmt: skip

    def _trusted_timings(self, device: Device) -> int:
        on_it = {"device": row_keys.key_of(device)}
        quarantined = 0
        if self._quarantined:
            keys = (key for (key,) in self._facts.picked("timing", ["key"], **on_it))
            quarantined = self._quarantined.count("timing", keys)
        return self._facts.count("timing", **on_it) - quarantined

    def timing_cells(self, device: Device, family: str, regime: str) -> list[TimingCell]:
        """Timings of every kernel and m, by kernel, m and run.

        Args:
            device: Where.
            family: `family_key` of a problem: the problem without its m.
            regime: "graph-cold", "graph-hot" or "eager".
        """
        problems = self._families.get(tuple(json.loads(family)), ())
        asked = (row_keys.key_of(device), regime)
        where = self._picker("timing", "device", "regime")
        rows = self._facts.at("timing", problems)
        return sorted(
            (self._cell(TimingCell, "timing", row) for row in rows if where(row) == asked),
            key=lambda c: (c.kernel.name, c.m, c.started_utc_ms, c.run, c.distribution),
        )

    def timed_like(self, device: Device, problem: Problem) -> set[tuple[Problem, str]]:
        """What was timed with success on a device at a problem's op, n and k, and in which regime.

        Of kernels as they are now. Each problem without its m, which is 0.
        """
        problems = self._shapes.get((problem.op, problem.n, problem.k), ())
        pick = self._picker("timing", "device", "status", "kernel", "problem", "regime")
        here = row_keys.key_of(device)
        return {
            (replace(self._entity(Problem, key), m=0), regime)
            for where, status, kernel, key, regime in map(pick, self._facts.at("timing", problems))
            if (where, status) == (here, "ok") and self._is_current(kernel)
        }

    def is_timed(self, kernel: str, device: Device) -> bool:
        """Whether a kernel, as it is now, was timed with success on a device, at any problem."""
        where = {"device": row_keys.key_of(device), "status": "ok"}
        return any(
            self._facts.has("timing", kernel=key, **where)
            for key in self._by_key["kernel"]
            if self._entity(KernelRow, key).name == kernel and self._is_current(key)
        )

    def timed_nearest(self, device: Device, problem: Problem, regime: str) -> Problem | None:
        """The problem of an op timed there with success that differs least, without its m.

        In attributes first, then in n and k by their ratios. Of kernels as they are now.
        """
        asked = row_keys.row_of(problem)
        others = sorted({*self._columns["problem"]} - {"key", "m", "n", "k"})
        pick, sizes = self._picker("problem", *others), self._picker("problem", "n", "k")
        attributes = [asked[name] for name in others]

        def distance(key: str) -> tuple[int, float, str]:
            row = self._by_key["problem"][key]
            differ = sum(map(ne, attributes, pick(row)))
            n, k = sizes(row)
            away = abs(math.log(n / problem.n)) + abs(math.log(k / problem.k))
            return differ, away, key

        timed = self._timed_problems(row_keys.key_of(device), regime, problem.op)
        for key in sorted(timed, key=distance):
            if any(map(self._is_current, timed[key])):
                return replace(self._entity(Problem, key), m=0)
        return None

    @_kept
    def _timed_problems(self, device: str, regime: str, op: str) -> dict[str, list[str]]:
        """Keys of an op's problems that were timed there with success, with those of kernels."""
        of_op = self._place["problem"]["op"]
        where = {"device": device, "regime": regime, "status": "ok"}
        found: dict[str, list[str]] = {}
        for problem, kernel in self._facts.picked("timing", ("problem", "kernel"), **where):
            if self._by_key["problem"][problem][of_op] == op:
                found.setdefault(problem, []).append(kernel)
        return found

    def problem(self, key: str) -> Problem:
        """The problem of a head.

        Raises:
            DatabaseError: There is none of that key.
        """
        return self._entity(Problem, key)

    def timing_heads(self, device: Device, regime: str) -> Iterator[TimingHead]:
        """Every timing on a device in a regime, without what was measured."""
        where = {"device": row_keys.key_of(device), "regime": regime}
        for head, _ in self._heads("timing", (), where):
            yield TimingHead(*head)

    def accuracy_heads(self, architecture: str) -> Iterator[AccuracyHead]:
        """Every accuracy on an architecture, without most of what was measured."""
        columns = AccuracyHead._fields[len(TimingHead._fields) :]
        where = {"architecture": architecture}
        for head, (distribution, *rest) in self._heads("accuracy", columns, where):
            found = self._entity(DistributionRow, distribution)
            yield AccuracyHead._make((*head, found, *rest))

    def _heads(
        self, name: str, more: Sequence[str], where: Mapping[str, str]
    ) -> Iterator[tuple[Row, Row]]:
        columns = ("key", "kernel", "problem", "environment", "run", "measured_utc_ms", *more)
        grades = self._column("run", "grade")
        for row in self._facts.picked(name, columns, **where):
            key, kernel, problem, environment, run, measured = row[:6]
            of = self._entity(KernelRow, kernel)
            head = (of, problem, environment, grades[run], measured, self._tier(name, key))
            yield head, row[6:]

    def timings_on(self, device: Device, regime: str) -> Iterator[TimingCell]:
        """Every timing on a device in a regime."""
        key = row_keys.key_of(device)
        for row in self._facts.rows("timing", device=key, regime=regime):
            yield self._cell(TimingCell, "timing", row)

    def timings_by_file(self, device: Device, regime: str) -> dict[str, int]:
        """Numbers of timings on a device in a regime, by file; of rows of two, the last counts."""
        key = row_keys.key_of(device)
        return {
            image.name: image.count("timing", device=key, regime=regime)
            for image in self._facts.images
        }

    def least_us_per_byte(self, device: Device, regime: str) -> float:
        """The least time of anything timed on a device per byte of its operands and outputs.

        0 if nothing was timed.
        """
        here = row_keys.key_of(device)
        key = here, regime
        if key not in self._us_per_byte:
            least: dict[str, float] = {}  # by problem
            columns = ["problem", "latency_us_p50"]
            for problem, us in self._facts.picked(
                "timing", columns, device=here, regime=regime, status="ok"
            ):
                least[problem] = min(us, least.get(problem, us))
            rates = (
                us / moved
                for problem, us in least.items()
                if (moved := self._entity(Problem, problem).bytes_moved)
            )
            self._us_per_byte[key] = min(rates, default=0.0)
        return self._us_per_byte[key]

    def accuracy_cells(
        self, architecture: str, kernel_name: str, problem_key: str
    ) -> list[AccuracyCell]:
        """Accuracies of every state of a kernel at a problem, by distribution, run and seed."""
        rows = self._accuracies_at(problem_key).get((architecture, kernel_name), ())
        return sorted(
            (self._cell(AccuracyCell, "accuracy", row) for row in rows),
            key=lambda c: (c.distribution, c.started_utc_ms, c.run, c.seed, c.parameters),
        )

    def accuracies_like(self, problem: Problem) -> list[tuple[int, str]]:
        """Problems with accuracies that differ from one by nothing but n: n, and the key."""
        return self._accuracies_by_form.get(_without_n(problem), [])

    def accuracies_of_form(self, problem: Problem) -> list[tuple[int, int, str]]:
        """Problems with accuracies that differ from one by n and k only: both, and the key."""
        return self._accuracies_at_sizes.get(_without_n(replace(problem, k=0)), [])

    @cached_property
    def _accuracies_at_sizes(self) -> dict[tuple[Any, ...], list[tuple[int, int, str]]]:
        found: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}
        for like in self._accuracies_by_form.values():
            for n, key in like:
                problem = self._entity(Problem, key)
                form = _without_n(replace(problem, k=0))
                found.setdefault(form, []).append((n, problem.k, key))
        return found

    @cached_property
    def _accuracies_by_form(self) -> dict[tuple[Any, ...], list[tuple[int, str]]]:
        found: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
        for key in {key for (key,) in self._facts.picked("accuracy", ["problem"])}:
            problem = self._entity(Problem, key)
            found.setdefault(_without_n(problem), []).append((problem.n, key))
        return found

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
        asked = (architecture, granularity, b_granularity, accumulation)
        rows = self._accuracies_at(problem_key).get(asked, ())
        return sorted(
            (self._cell(AccuracyCell, "accuracy", row) for row in rows),
            key=lambda c: (
                c.distribution, c.started_utc_ms, c.run, c.seed, c.parameters,
                c.kernel.name, c.kernel.digest,
            ),
        )  # fmt: skip

    @cached_property
    def test_results(self) -> list[TestResultCell]:
        """How tests of kernels ended, by kernel, architecture, suite and time."""
        rows = self._facts.rows("test_result")
        return sorted(
            (self._cell(TestResultCell, "test_result", row) for row in rows),
            key=lambda c: (
                c.kernel.name, c.architecture, c.suite, c.started_utc_ms, c.measured_utc_ms, c.run,
                c.kernel.digest,
            ),
        )  # fmt: skip

    @cached_property
    def host_costs(self) -> list[HostCostCell]:
        """Host costs of calls on every CPU, by CPU, kind of call and time."""
        found = []
        for values in self._facts.rows("host_cost"):
            row = dict(zip(self._columns["host_cost"], values, strict=True))
            row |= {
                "torch": self._entity(Environment, row["environment"]).torch,
                "started_utc_ms": self._runs[row["run"]]["started_utc_ms"],
                "tier": self._tier("host_cost", row["key"]),
            }
            found.append(HostCostCell(**{name: row[name] for name in HostCostCell.__slots__}))
        return sorted(
            found,
            key=lambda c: (
                c.cpu, c.regime, c.call, c.language, c.path, c.started_utc_ms, c.run, c.torch,
            ),
        )  # fmt: skip

    def timing_outcomes(self) -> set[tuple[str, str, Device, str, str, str]]:
        """How timings ended: kernel name, its digest, device, status, reason and tier."""
        columns = ("kernel", "device", "status", "reason", *(["key"] if self._quarantined else []))
        found = {
            (*row[:4], "".join(self._tier("timing", key) for key in row[4:]))
            for row in self._facts.picked("timing", columns)
        }
        name_of, digest_of = self._column("kernel", "name"), self._column("kernel", "digest")
        return {
            (name_of[kernel], digest_of[kernel], self._entity(Device, device), *rest)
            for kernel, device, *rest in found
        }

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
        asked = (kernel_digest, distribution_key, device_key, environment_key, regime)
        return self._has("timing", problem_key, asked, grade, _TRIED_AGAIN[retry])

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
        asked = (kernel_digest, distribution_key, architecture, environment_key, seed)
        again = _FAILURES if ok_only else _TRIED_AGAIN[retry]
        return self._has("accuracy", problem_key, asked, grade, again)

    def _has(self, name: str, problem: str, asked: Row, grade: str, but: frozenset[str]) -> bool:
        found = self._statuses_at(name, problem)
        return any(found.get((*asked, of), set()) - but for of in ("full", grade))

    @_kept
    def _statuses_at(self, name: str, problem: str) -> dict[Row, set[str]]:
        digest_of, grade_of = self._column("kernel", "digest"), self._column("run", "grade")
        pick = self._picker(name, "kernel", "run", "status", "distribution", *_WHERE[name])
        found: dict[Row, set[str]] = {}
        for kernel, run, status, *rest in map(pick, self._facts.at(name, [problem])):
            found.setdefault((digest_of[kernel], *rest, grade_of[run]), set()).add(status)
        return found

    def casualties(self, device: Device, environment_key: str) -> dict[str, int]:
        """At how many problems each kernel digest crashed or hung there and did not end well later.

        Timed on the device, or measured for errors on its architecture.
        """
        digest_of = self._column("kernel", "digest")
        last: dict[Row, tuple[int, str]] = {}
        for name, place, here in (
            ("timing", "device", row_keys.key_of(device)),
            ("accuracy", "architecture", device.architecture),
        ):
            there = {"environment": environment_key, place: here}
            problems = {
                problem
                for status in _CASUALTIES
                for (problem,) in self._facts.picked(name, ["problem"], status=status, **there)
            }
            pick = self._picker(name, "kernel", "problem", "status", "measured_utc_ms", *there)
            for kernel, problem, status, when, *where in map(pick, self._facts.at(name, problems)):
                if where == [*there.values()]:
                    key = (name, digest_of[kernel], problem)
                    last[key] = max(last.get(key, (0, "")), (when, status))
        return Counter(
            digest for (_, digest, _), (_, status) in last.items() if status in _CASUALTIES
        )

    @cached_property
    def _shapes(self) -> dict[Row, list[str]]:
        """Keys of problems by op, n and k."""
        pick = self._picker("problem", "op", "n", "k")
        shapes: dict[Row, list[str]] = {}
        for key, row in self._by_key["problem"].items():
            shapes.setdefault(pick(row), []).append(key)
        return shapes

    @cached_property
    def _families(self) -> dict[Row, list[str]]:
        """Keys of problems by `family_key`, not yet in JSON: 60k of them in 0.05 s."""
        pick = self._picker("problem", *sorted({*self._columns["problem"]} - {"key", "m"}))
        families: dict[Row, list[str]] = {}
        for key, row in self._by_key["problem"].items():
            families.setdefault(pick(row), []).append(key)
        return families

    @_kept
    def _accuracies_at(self, problem: str) -> dict[Row, list[Row]]:
        """Rows at a problem, by architecture and the kernel's name; and by its numerics class."""
        name_of = self._column("kernel", "name")
        pick = self._picker("kernel", "granularity", "b_granularity", "accumulation")
        kernels = self._by_key["kernel"]
        place = self._picker("accuracy", "architecture", "kernel")
        index: dict[Row, list[Row]] = {}
        for row in self._facts.at("accuracy", [problem]):
            architecture, kernel = place(row)
            index.setdefault((architecture, name_of[kernel]), []).append(row)
            index.setdefault((architecture, *pick(kernels[kernel])), []).append(row)
        return index


def _without_n(problem: Problem) -> tuple[Any, ...]:
    return tuple(getattr(problem, f.name) for f in fields(problem) if f.name != "n")


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Rows hold no cycles; walking them again and again would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
