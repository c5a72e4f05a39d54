"""The tables of the benchmark database, schema version 4. Import lazily: this loads SQLAlchemy.

Rows are facts: written once, never updated. A row's key is the SHA-256 of its identity
(`lokakern.registry.schema.row_keys`), so databases merge by set union. Units are in the names,
instants are UTC milliseconds, and NULL means "not measured", never 0.

Facts (timings, accuracies, test results, host costs) refer to the other tables by ``id``, which
means something in one file only and is never part of an identity: by key each row would cost 636
bytes instead of 240. Outside of reader, writer and merging, references are keys. Keys are hex
digits everywhere but in files since version 3, which hold their bytes (`hex(key)` shows them) and
are 15 % smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import REAL
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import TypeEngine

from lokakern.registry.schema.records import HOST_PATHS, HOST_REGIMES
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    GRADES,
    SCHEMA_VERSION,
    STATUSES,
)

TEST_STATUSES = ("ok", "failed", "nothing")  # "nothing": every test was skipped
METADATA = MetaData()
_UNITS = {
    "_us": "us", "_utc_ms": "ms since 1970, UTC", "_mhz": "MHz", "_gib": "GiB", "_w": "W",
    "_db": "dB", "_share": "share, 0 to 1",
}  # fmt: skip
_REFERENCES = {
    "run": "of which process",
    "kernel": "what was measured",
    "problem": "at which problem",
    "distribution": "of which values",
    "device": "on which GPU type",
    "environment": "under which software",
}
_KERNEL_ERRORS = {
    "kernel_err": "largest error against the exact product of what was given, in roundings",
    "kernel_err_row_p99": "its 99th percentile over rows",
}
# Errors with an upper limit, in the column NAME_upper after theirs.
BOUNDED = ("row_err", "row_p99", "rel_err", "mean_rel_err", "mean_shift")
_SIGNED = {"sqnr_db"}


class Key(TypeDecorator[str]):
    """Hex digits; in a file, the bytes they stand for."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        in_bytes = dialect.name == "sqlite"
        return dialect.type_descriptor(LargeBinary() if in_bytes else Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        in_bytes = dialect.name == "sqlite" and value is not None
        return bytes.fromhex(value) if in_bytes and value is not None else value

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return value.hex() if isinstance(value, bytes) else value


# These make STRICT tables on SQLite and are valid on PostgreSQL.
_WHOLE = BigInteger().with_variant(Integer(), "sqlite")
_REAL: Double[float] = Double().with_variant(REAL(), "sqlite")
Columns = Iterable[Column[Any]]


def schema_comment(version: int) -> str:
    """What marks the tables of a schema version where there is no file header."""
    return f"lokakern schema {version}"


def unit_of(column: str) -> str:
    """The unit of a column, from its name; "" if it has none."""
    for end, unit in _UNITS.items():
        if column.endswith(end) or column.startswith((f"latency{end}_", f"host{end}_")):
            return unit
    return ""


def _text(**about: str) -> Columns:
    return [Column(name, Text(), nullable=False, doc=doc) for name, doc in about.items()]


def _whole(**about: str) -> Columns:
    return [Column(name, _WHOLE, nullable=False, doc=doc) for name, doc in about.items()]


def _quantity(**about: str) -> Columns:
    return [Column(name, _REAL, nullable=False, doc=doc) for name, doc in about.items()]


def _metrics(kind: TypeEngine[Any], **about: str) -> Iterator[Column[Any]]:
    """Columns that are NULL where nothing was measured."""
    for name, doc in about.items():
        yield Column(name, kind, doc=doc)
        if name in BOUNDED:
            yield Column(f"{name}_upper", kind, doc=f"upper limit of it: {doc}")


def _references(*tables: str) -> Columns:
    return [
        Column(name, _WHOLE, ForeignKey(f"{name}.id"), nullable=False, doc=_REFERENCES[name])
        for name in tables
    ]


def _outcome() -> Columns:
    return _text(status="how it ended", reason="why not `ok`; empty where it is")


def _table(name: str, about: str, *parts: Columns, checks: Iterable[str] = ()) -> Table:
    """A table; `about` describes it to users, as each column's `doc` does."""
    is_fact, digits = name in FACTS, 32 if name == "run" else 64
    number = Column("id", _WHOLE, primary_key=True,
                    doc="number in this file only, never part of an identity")  # fmt: skip
    key = Column(
        "key",
        Key,
        CheckConstraint(f"length(key) IN ({digits // 2}, {digits})"),  # in bytes, in digits
        primary_key=is_fact,
        unique=None if is_fact else True,
        nullable=False,
        doc="SHA-256 of the row's identity, 32 bytes (of a run: its UUID, 16 bytes)",
    )
    return Table(
        name,
        METADATA,
        *([key] if is_fact else [number, key]),
        *(column for part in parts for column in part),
        *map(CheckConstraint, checks),
        comment=schema_comment(SCHEMA_VERSION),
        info={"about": about},
        sqlite_strict=True,
        # WITHOUT ROWID: the key is the table's order and is stored once.
        sqlite_with_rowid=not is_fact,
    )


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(map(repr, words))})"


def _metrics_of(columns: Columns) -> tuple[str, ...]:
    """Metrics of a good row, in which `clock_mhz` may be NULL."""
    return tuple(c.name for c in columns if c.nullable and c.name != "clock_mhz")


def _measured(name: str, about: str, *parts: Columns, checks: Iterable[str]) -> Table:
    """A table in which `ok` means that every metric is there; anything else says why not."""
    columns = [column for part in parts for column in part]
    metrics = _metrics_of(columns)
    present = " AND ".join(f"{metric} IS NOT NULL" for metric in metrics)
    return _table(
        name,
        about,
        columns,
        checks=(
            _one_of("status", STATUSES),
            f"status <> 'ok' OR ({present})",
            "status = 'ok' OR reason <> ''",
            *(f"{metric} >= 0" for metric in metrics if metric not in _SIGNED),
            *(f"{metric} <= 1" for metric in metrics if metric.endswith("_share")),
            "measured_utc_ms > 0",
            *checks,
        ),
    )


_TABLES = (
    _table(
        "device",
        "A GPU type.",
        _text(
            vendor="nvidia, amd or cpu",
            product="name of the GPU type",
            architecture="such as sm_90 or gfx942",
        ),
        _whole(compute_units="multiprocessors", memory_gib="memory"),
        _text(partition="MIG or compute partition; none"),
        checks=("compute_units >= 0", "memory_gib >= 0"),
    ),
    _table(
        "environment",
        'Software and power limit of a measurement; unknown is "unknown".',
        _text(
            driver="version",
            toolkit="version of CUDA or ROCm",
            torch="version",
            triton="version",
            libraries="other versions that decide what a kernel becomes",
            power_cap_w="power limit, as text",
        ),
    ),
    _table(
        "kernel",
        "One state of the source of one kernel; `modules` is comma-separated.",
        _text(
            name="as registered",
            op="what is computed",
            language="what it is written in, or whose library it calls",
            modules="its files, and versions of packages, separated by commas",
            digest="SHA-256 of its source",
            accumulation="how sums are added up",
            granularity="scales of a",
            b_granularity="scales of b",
        ),
        checks=("name <> ''", "digest <> ''"),
    ),
    _table(
        "problem",
        'A `types.Problem`; operands as `str(Operand)`, an absent b as "none".',
        _text(op="what is computed"),
        _whole(m="rows of a", n="columns of b", k="columns of a", batch="products at once"),
        _text(a="format, scales, layout and alignment of a", b="those of b; none"),
        _whole(prepared="whether b was quantized ahead"),
        _text(
            epilogue="what comes after the product",
            out_format="format of the output",
            out_granularity="scales of the output",
        ),
        _whole(out_strided="whether the output is a slice", accumulate="whether it is added to"),
        checks=(
            *(f"{size} >= 0" for size in ("m", "n", "k", "batch")),
            *(f"{flag} IN (0, 1)" for flag in ("prepared", "out_strided", "accumulate")),
        ),
    ),
    _table(
        "distribution",
        "A recipe for operand values; `parameters` is canonical JSON.",
        _text(name="such as X1", parameters="canonical JSON"),
        _whole(realistic="whether errors are judged on it by default"),
        checks=("name <> ''", "realistic IN (0, 1)"),
    ),
    _table(
        "run",
        "One process that measured; its key is a UUID in hex.",
        _whole(started_utc_ms="when the process began"),
        _text(
            harness_digest="of the measuring code",
            suite="what was measured",
            command="how to do it again",
            grade="`quick` counts only where nothing is `full`",
        ),
        checks=(_one_of("grade", GRADES), "started_utc_ms > 0"),
    ),
    _measured(
        "timing",
        "How long one kernel took at one problem; `clock_mhz` is NULL where no clock is readable.",
        _references("run", "kernel", "problem", "distribution", "device", "environment"),
        _text(regime="graph-cold, graph-hot or eager"),
        _outcome(),
        _metrics(
            _REAL,
            latency_us_p20="time of a call, 20th percentile",
            latency_us_p50="median",
            latency_us_p80="80th percentile",
        ),
        _metrics(
            _WHOLE,
            replay_count="measurements that count",
            void_count="measurements that do not, for the clock was low",
            calls_per_replay="calls in each",
        ),
        _metrics(_REAL, clock_mhz="median clock; NULL where none is readable", **_KERNEL_ERRORS),
        _text(timer="what was read", operand_digest="of the values"),
        _whole(measured_utc_ms="when"),
        checks=(
            "regime <> ''",
            "latency_us_p20 > 0",
            "latency_us_p20 <= latency_us_p50",
            "latency_us_p50 <= latency_us_p80",
            "clock_mhz > 0",
        ),
    ),
    _measured(
        "accuracy",
        "How far one kernel's output was from the exact one: metrics of the Error contract.",
        _references("run", "kernel", "problem", "distribution"),
        _text(architecture="such as sm_90 or gfx942"),
        _references("environment"),
        _whole(seed="of the values", rows="rows compared"),
        _outcome(),
        _metrics(
            _REAL,
            row_err="root mean square over rows of min(e, 1), e a row's relative error",
            row_p50="median of e",
            row_p99="99th percentile of e",
            row_max="largest e",
            rel_err="relative error of the whole output",
            sqnr_db="signal to quantization noise",
            mean_rel_err="mean of |out - ref| / |ref|",
            mean_rel_err_excluded_share="elements that it leaves out, too close to 0",
            mean_shift="|mean(out - ref)| / rms(ref)",
        ),
        _metrics(
            _WHOLE,
            nonfinite_count="outputs not finite",
            nonfinite_unexpected_count="of these, where the reference is finite",
        ),
        _metrics(
            _REAL,
            **_KERNEL_ERRORS,
            flushed_share="operands that became 0",
            saturated_share="operands that became the largest",
        ),
        _text(operand_digest="of the values"),
        _whole(measured_utc_ms="when"),
        checks=("architecture <> ''", "rows >= 0"),
    ),
    _table(
        "test_result",
        "How the tests of one module (`suite`) ended for one kernel on a GPU of an architecture. "
        '`seeds` are those that the module\'s tests draw from, ascending, such as "0,7".',
        _references("run", "kernel"),
        _text(architecture="such as sm_90 or gfx942", suite="the test module"),
        _references("environment"),
        _text(seeds="that the module's tests draw from"),
        _whole(passed_count="tests", failed_count="tests", skipped_count="tests"),
        _outcome(),
        _whole(measured_utc_ms="when"),
        checks=(
            _one_of("status", TEST_STATUSES),
            "(status = 'failed') = (failed_count > 0)",
            "(status = 'ok') = (failed_count = 0 AND passed_count > 0)",
            "(status = 'ok') = (reason = '')",
            "passed_count >= 0",
            "failed_count >= 0",
            "skipped_count >= 0",
            "passed_count + failed_count + skipped_count > 0",
            "architecture <> ''",
            "suite <> ''",
            "seeds <> ''",
            "measured_utc_ms > 0",
        ),
    ),
    _table(
        "host_cost",
        "How long the host takes for one call of a linear layer, in a model of many, or for a "
        "training step without products: the time of calls in a row, without waiting for the GPU.",
        _references("run", "device", "environment"),
        _text(
            cpu="name of the CPU, as the operating system gives it",
            regime="eager or compiled",
            call="what is called, such as `bf16`, `prepared`, `training` or `training step`",
            language="of the kernel of the GEMM",
            path="how it is called: native, python, or torch",
        ),
        _whole(round_count="measurements", calls_per_round="calls in each"),
        _quantity(
            host_us_p20="host time of a call, 20th percentile",
            host_us_p50="median",
            host_us_p80="80th percentile",
        ),
        _whole(measured_utc_ms="when"),
        checks=(
            _one_of("regime", HOST_REGIMES),
            _one_of("path", HOST_PATHS),
            "cpu <> ''",
            "call <> ''",
            "language <> ''",
            "round_count > 0",
            "calls_per_round > 0",
            "host_us_p20 > 0",
            "host_us_p20 <= host_us_p50",
            "host_us_p50 <= host_us_p80",
            "measured_utc_ms > 0",
        ),
    ),
)
TABLES: dict[str, Table] = {table.name: table for table in _TABLES}
KEYS_IN_BYTES_SINCE = 3  # in files; text before
ADDED_IN = {"test_result": 2, "host_cost": 4}  # schema versions of tables that version 1 lacks
COLUMNS: dict[str, tuple[str, ...]] = {  # ids are left out
    name: tuple(column.name for column in table.columns if column.name != "id")
    for name, table in TABLES.items()
}
TIMING_METRICS, ACCURACY_METRICS = (
    _metrics_of(TABLES[name].columns) for name in ("timing", "accuracy")
)
# The fields of `numerics.Errors`.
ERROR_METRICS = ACCURACY_METRICS[: ACCURACY_METRICS.index("kernel_err")]
# By fact: places among COLUMNS of references, with the table referred to (and so named).
REFERENCES: dict[str, dict[int, str]] = {
    name: {place: column for place, column in enumerate(COLUMNS[name]) if column in DIMENSIONS}
    for name in FACTS
}


def tables_of(version: int) -> tuple[str, ...]:
    """Names of the tables of a schema version, those that others refer to first."""
    return tuple(name for name in TABLES if ADDED_IN.get(name, 1) <= version)


@functools.cache
def sqlite_statements(version: int = SCHEMA_VERSION) -> tuple[str, ...]:
    """What creates the tables of a schema version in a new SQLite file."""
    dialect = sqlite.dialect()
    statements = (
        str(CreateTable(TABLES[name]).compile(dialect=dialect)) for name in tables_of(version)
    )
    if version < KEYS_IN_BYTES_SINCE:
        return tuple(map(_with_keys_in_digits, statements))
    return tuple(statements)


def _with_keys_in_digits(statement: str) -> str:
    statement = statement.replace('"key" BLOB', '"key" TEXT')
    for digits in (32, 64):
        statement = statement.replace(f"length(key) IN ({digits // 2}, {digits})",
                                      f"length(key) = {digits}")  # fmt: skip
    return statement
