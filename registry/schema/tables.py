"""The tables of the benchmark database, schema version 3. Import lazily: this loads the ORM.

Rows are facts: written once, never updated. A row's key is the SHA-256 of its identity
(`lokakern.registry.schema.row_keys`), so databases merge by set union. Units are in the names,
instants are UTC milliseconds, and NULL means "not measured", never 0.

Facts (timings, accuracies, test results) refer to the other tables by ``id``, which means something
in one file only and is never part of an identity: by key each row would cost 636 bytes instead of
240. Outside of reader, writer and merging, references are keys. Keys are hex digits everywhere but
in files since version 3, which hold their bytes (`hex(key)` shows them) and are 15 % smaller.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
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
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import TypeEngine

from lokakern.registry.sqlite_file import DIMENSIONS, FACTS, SCHEMA_VERSION, STATUSES

GRADES = ("full", "quick")
TEST_STATUSES = ("ok", "failed", "nothing")  # "nothing": every test was skipped

TIMING_METRICS = (
    "latency_us_p20",
    "latency_us_p50",
    "latency_us_p80",
    "replay_count",
    "void_count",
    "calls_per_replay",
    "kernel_err",
    "kernel_err_row_p99",
)
ERROR_METRICS = (  # the fields of `numerics.Errors`
    "row_err",
    "row_err_upper",
    "row_p50",
    "row_p99",
    "row_p99_upper",
    "row_max",
    "rel_err",
    "rel_err_upper",
    "sqnr_db",
    "mean_rel_err",
    "mean_rel_err_upper",
    "mean_rel_err_excluded_share",
    "mean_shift",
    "mean_shift_upper",
    "nonfinite_count",
    "nonfinite_unexpected_count",
)
ACCURACY_METRICS = (
    *ERROR_METRICS,
    "kernel_err",
    "kernel_err_row_p99",
    "flushed_share",
    "saturated_share",
)
_SIGNED = {"sqnr_db"}
_SHARES = {"mean_rel_err_excluded_share", "flushed_share", "saturated_share"}


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


class Base(DeclarativeBase):
    """Types that make STRICT tables on SQLite and are valid on PostgreSQL."""

    metadata = MetaData()
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger().with_variant(Integer(), "sqlite"),
        float: Double().with_variant(REAL(), "sqlite"),
    }


def schema_comment(version: int) -> str:
    """What marks the tables of a schema version where there is no file header."""
    return f"lokakern schema {version}"


def _one_of(column: str, words: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


def _options(*checks: str) -> tuple[object, ...]:
    options = {"sqlite_strict": True, "comment": schema_comment(SCHEMA_VERSION)}
    return (*(CheckConstraint(check) for check in checks), options)


def _facts(*checks: str) -> tuple[object, ...]:
    *constraints, options = _options(*checks)
    assert isinstance(options, dict)
    # WITHOUT ROWID: the key is the table's order and is stored once.
    return (*constraints, {**options, "sqlite_with_rowid": False})


def _measured(*metrics: str) -> tuple[str, ...]:
    """`ok` means that every metric is there; anything else says why not."""
    present = " AND ".join(f"{metric} IS NOT NULL" for metric in metrics)
    floor = [f"{metric} >= 0" for metric in metrics if metric not in _SIGNED]
    ceiling = [f"{metric} <= 1" for metric in metrics if metric in _SHARES]
    return (
        _one_of("status", STATUSES),
        f"status <> 'ok' OR ({present})",
        "status = 'ok' OR reason <> ''",
        *floor,
        *ceiling,
        "measured_utc_ms > 0",
    )


def _id() -> Mapped[int]:
    return mapped_column(primary_key=True)


def _key(*, primary: bool = False, digits: int = 64) -> Mapped[str]:
    check = CheckConstraint(f"length(key) IN ({digits // 2}, {digits})")  # in bytes, in digits
    if primary:
        return mapped_column(Key, check, primary_key=True)
    return mapped_column(Key, check, unique=True)


def _reference(table: str) -> Mapped[int]:
    return mapped_column(ForeignKey(f"{table}.id"))


class Device(Base):
    """A GPU type."""

    __tablename__ = "device"
    __table_args__ = _options("compute_units >= 0", "memory_gib >= 0")

    id: Mapped[int] = _id()
    key: Mapped[str] = _key()
    vendor: Mapped[str]
    product: Mapped[str]
    architecture: Mapped[str]
    compute_units: Mapped[int]
    memory_gib: Mapped[int]
    partition: Mapped[str]


class Environment(Base):
    """Software and power limit of a measurement; unknown is "unknown"."""

    __tablename__ = "environment"
    __table_args__ = _options()

    id: Mapped[int] = _id()
    key: Mapped[str] = _key()
    driver: Mapped[str]
    toolkit: Mapped[str]
    torch: Mapped[str]
    triton: Mapped[str]
    libraries: Mapped[str]
    power_cap_w: Mapped[str]


class Kernel(Base):
    """One state of the source of one kernel; `modules` is comma-separated."""

    __tablename__ = "kernel"
    __table_args__ = _options("name <> ''", "digest <> ''")

    id: Mapped[int] = _id()
    key: Mapped[str] = _key()
    name: Mapped[str]
    op: Mapped[str]
    language: Mapped[str]
    modules: Mapped[str]
    digest: Mapped[str]
    accumulation: Mapped[str]
    granularity: Mapped[str]
    b_granularity: Mapped[str]


class Problem(Base):
    """A `types.Problem`; operands as `str(Operand)`, an absent b as "none"."""

    __tablename__ = "problem"
    __table_args__ = _options(
        "m >= 0",
        "n >= 0",
        "k >= 0",
        "batch >= 0",
        "prepared IN (0, 1)",
        "out_strided IN (0, 1)",
        "accumulate IN (0, 1)",
    )

    id: Mapped[int] = _id()
    key: Mapped[str] = _key()
    op: Mapped[str]
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    batch: Mapped[int]
    a: Mapped[str]
    b: Mapped[str]
    prepared: Mapped[int]
    epilogue: Mapped[str]
    out_format: Mapped[str]
    out_granularity: Mapped[str]
    out_strided: Mapped[int]
    accumulate: Mapped[int]


class Distribution(Base):
    """A recipe for operand values; `parameters` is canonical JSON."""

    __tablename__ = "distribution"
    __table_args__ = _options("name <> ''", "realistic IN (0, 1)")

    id: Mapped[int] = _id()
    key: Mapped[str] = _key()
    name: Mapped[str]
    parameters: Mapped[str]
    realistic: Mapped[int]


class Run(Base):
    """One process that measured; its key is a UUID in hex."""

    __tablename__ = "run"
    __table_args__ = _options(_one_of("grade", GRADES), "started_utc_ms > 0")

    id: Mapped[int] = _id()
    key: Mapped[str] = _key(digits=32)
    started_utc_ms: Mapped[int]
    harness_digest: Mapped[str]
    suite: Mapped[str]
    command: Mapped[str]
    grade: Mapped[str]


class Timing(Base):
    """How long one kernel took at one problem; `clock_mhz` is NULL where no clock is readable."""

    __tablename__ = "timing"
    __table_args__ = _facts(
        *_measured(*TIMING_METRICS),
        "regime <> ''",
        "latency_us_p20 > 0",
        "latency_us_p20 <= latency_us_p50",
        "latency_us_p50 <= latency_us_p80",
        "clock_mhz > 0",
    )

    key: Mapped[str] = _key(primary=True)
    run: Mapped[int] = _reference("run")
    kernel: Mapped[int] = _reference("kernel")
    problem: Mapped[int] = _reference("problem")
    distribution: Mapped[int] = _reference("distribution")
    device: Mapped[int] = _reference("device")
    environment: Mapped[int] = _reference("environment")
    regime: Mapped[str]
    status: Mapped[str]
    reason: Mapped[str]
    latency_us_p20: Mapped[float | None]
    latency_us_p50: Mapped[float | None]
    latency_us_p80: Mapped[float | None]
    replay_count: Mapped[int | None]
    void_count: Mapped[int | None]
    calls_per_replay: Mapped[int | None]
    clock_mhz: Mapped[float | None]
    kernel_err: Mapped[float | None]
    kernel_err_row_p99: Mapped[float | None]
    timer: Mapped[str]
    operand_digest: Mapped[str]
    measured_utc_ms: Mapped[int]


class Accuracy(Base):
    """How far one kernel's output was from the exact one: metrics of the Error contract."""

    __tablename__ = "accuracy"
    __table_args__ = _facts(*_measured(*ACCURACY_METRICS), "architecture <> ''", "rows >= 0")

    key: Mapped[str] = _key(primary=True)
    run: Mapped[int] = _reference("run")
    kernel: Mapped[int] = _reference("kernel")
    problem: Mapped[int] = _reference("problem")
    distribution: Mapped[int] = _reference("distribution")
    architecture: Mapped[str]
    environment: Mapped[int] = _reference("environment")
    seed: Mapped[int]
    rows: Mapped[int]
    status: Mapped[str]
    reason: Mapped[str]
    row_err: Mapped[float | None]
    row_err_upper: Mapped[float | None]
    row_p50: Mapped[float | None]
    row_p99: Mapped[float | None]
    row_p99_upper: Mapped[float | None]
    row_max: Mapped[float | None]
    rel_err: Mapped[float | None]
    rel_err_upper: Mapped[float | None]
    sqnr_db: Mapped[float | None]
    mean_rel_err: Mapped[float | None]
    mean_rel_err_upper: Mapped[float | None]
    mean_rel_err_excluded_share: Mapped[float | None]
    mean_shift: Mapped[float | None]
    mean_shift_upper: Mapped[float | None]
    nonfinite_count: Mapped[int | None]
    nonfinite_unexpected_count: Mapped[int | None]
    kernel_err: Mapped[float | None]
    kernel_err_row_p99: Mapped[float | None]
    flushed_share: Mapped[float | None]
    saturated_share: Mapped[float | None]
    operand_digest: Mapped[str]
    measured_utc_ms: Mapped[int]


class TestResult(Base):
    """How the tests of one module (`suite`) ended for one kernel on a GPU of an architecture.

    `seeds` are those that the module's tests draw from, ascending, such as "0,7".
    """

    __tablename__ = "test_result"
    __table_args__ = _facts(
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
    )

    key: Mapped[str] = _key(primary=True)
    run: Mapped[int] = _reference("run")
    kernel: Mapped[int] = _reference("kernel")
    architecture: Mapped[str]
    suite: Mapped[str]
    environment: Mapped[int] = _reference("environment")
    seeds: Mapped[str]
    passed_count: Mapped[int]
    failed_count: Mapped[int]
    skipped_count: Mapped[int]
    status: Mapped[str]
    reason: Mapped[str]
    measured_utc_ms: Mapped[int]


TABLES: dict[str, Table] = {
    model.__tablename__: Base.metadata.tables[model.__tablename__]
    for model in (
        Device,
        Environment,
        Kernel,
        Problem,
        Distribution,
        Run,
        Timing,
        Accuracy,
        TestResult,
    )
}
KEYS_IN_BYTES_SINCE = 3  # in files; text before
ADDED_IN = {"test_result": 2}  # the schema version of tables that version 1 did not have
COLUMNS: dict[str, tuple[str, ...]] = {  # ids are left out
    name: tuple(column.name for column in table.columns if column.name != "id")
    for name, table in TABLES.items()
}
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
