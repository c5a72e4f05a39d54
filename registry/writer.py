"""Writing database files: whole, sorted, in one transaction, and published by renaming."""

from __future__ import annotations

import math
import operator
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy
from filelock import FileLock, Timeout
from sqlalchemy import Connection, Double, Engine, Integer, event, insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from lokakern.errors import DatabaseError
from lokakern.registry.identity import Row
from lokakern.registry.reader import Rows, by_key, short, translate
from lokakern.registry.tables import (
    APPLICATION_ID,
    COLUMNS,
    DIMENSIONS,
    REFERENCES,
    SCHEMA_VERSION,
    TABLES,
    sqlite_statements,
)

LOCK_TIMEOUT_S = 600.0
PAGE_BYTES = 8192  # 4096 makes a shipped file 1.5 % larger, 16384 0.5 %
_REASON_CHARACTERS = 500  # a reason may quote a compiler's whole output


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file.

    Raises:
        DatabaseError: Another process held it for too long.
    """
    try:
        with FileLock(path, timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout:
        raise DatabaseError(
            f"lock {str(path)!r} was held for {LOCK_TIMEOUT_S:.0f} s; expected a merge to take "
            "seconds; end the process that holds it"
        ) from None


def replace_file(place: Path, rows: Rows) -> None:
    """Write a file and rename it over the old one. The caller holds the lock."""
    for left_over in place.parent.glob(f"{_glob_escape(place.name)}.*.tmp*"):
        left_over.unlink(missing_ok=True)
    temporary = place.with_name(f"{place.name}.{uuid4().hex}.tmp")
    try:
        write_file(temporary, rows)
        _synchronize(temporary)
        os.replace(temporary, place)
        _synchronize(place.parent)
    except OSError as error:
        raise DatabaseError(
            f"database {str(place)!r} cannot be written: {error.strerror}; the old file is as it "
            "was; make room or choose another path (LOKAKERN_DB)"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, rows: Rows) -> None:
    """Write rows, sorted by key, into a file that must not exist, in one transaction.

    Raises:
        DatabaseError: A row breaks a constraint.
    """
    engine = open_writer(path, synchronous="OFF")  # synchronized before it is renamed
    name = ""
    ids: dict[str, dict[str, int]] = {}
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in sqlite_statements():
                connection.exec_driver_sql(statement)
            for name, table in TABLES.items():
                found = by_key(rows.get(name, []))
                if name in DIMENSIONS:
                    ids[name] = {row[0]: place for place, row in enumerate(found, start=1)}
                    found = [
                        (place, bytes.fromhex(row[0]), *row[1:])
                        for place, row in enumerate(found, start=1)
                    ]
                else:
                    found = translate(name, found, ids)
                    found = [(bytes.fromhex(row[0]), *row[1:]) for row in found]
                if found:
                    statement = str(insert(table).compile(dialect=connection.dialect))
                    connection.exec_driver_sql(statement, found)
    except SQLAlchemyError as error:
        raise DatabaseError(
            f"database {str(path)!r}: {name} rows cannot be written: {short(error)}"
        ) from error
    finally:
        engine.dispose()
    _pack(path)


def _pack(path: Path) -> None:
    """Write pages anew, as full as may be: 7 % smaller than as they were inserted.

    Raises:
        DatabaseError: There is no room.
    """
    try:
        with closing(sqlite3.connect(os.path.abspath(path), isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("VACUUM")
    except sqlite3.Error as error:
        raise DatabaseError(f"database {str(path)!r} cannot be packed: {error}") from error


def open_writer(path: Path, *, synchronous: str = "NORMAL") -> Engine:
    """An engine for a file only this process writes."""

    def connect() -> sqlite3.Connection:
        # Transactions are begun below, tables and all: the driver would begin them at inserts only.
        connection = sqlite3.connect(os.path.abspath(path), isolation_level=None)
        pragmas = (f"page_size = {PAGE_BYTES}", "foreign_keys = ON", f"synchronous = {synchronous}")
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    engine = sqlalchemy.create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def plain_row(name: str, row: Mapping[str, Any]) -> Row:
    """A row as the database gives it back, in the order of its columns.

    Raises:
        DatabaseError: A value is NaN (which SQLite would store as NULL), or not of its column.
    """
    plain: Row = {}
    referring = set(REFERENCES.get(name, {}).values())
    for column in (TABLES[name].c[column] for column in COLUMNS[name]):
        value = row[column.name]
        if column.name in referring:  # a key, or an id
            plain[column.name] = value
            continue
        try:
            plain[column.name] = None if value is None else _plain(column, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DatabaseError(
                f"{name} row: {column.name} is {value!r}; {error}; the row was not written"
            ) from None
    return plain


def _plain(column: sqlalchemy.Column[Any], value: Any) -> str | int | float:
    if isinstance(column.type, Double):
        number = float(value) + 0.0  # SQLite does not keep the sign of zero
        if math.isnan(number):
            raise ValueError("expected a number: a metric is finite or infinite, never NaN")
        if math.isinf(number) and column.name.startswith(("latency_", "clock_")):
            raise ValueError("expected a finite number")
        return number
    if isinstance(column.type, Integer):
        whole = operator.index(value)
        if abs(whole) >= 2**63:
            raise ValueError("expected 64 bits")
        return whole
    if not isinstance(value, str):
        raise TypeError("expected text")
    if column.name == "reason":
        text = str(value).replace("\0", " ").encode("utf-8", "replace").decode()
        cut = len(text) > _REASON_CHARACTERS
        return text[: _REASON_CHARACTERS - 3] + "..." if cut else text
    if "\0" in value:
        raise ValueError("expected no zero byte")
    value.encode()  # raises on lone surrogates
    return value
