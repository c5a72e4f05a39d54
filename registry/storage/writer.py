"""Writing database files: whole, sorted, in one transaction, and published by renaming."""

from __future__ import annotations

import glob
import math
import operator
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import sqlalchemy
from sqlalchemy import Double, Integer

from lokakern.errors import DatabaseError
from lokakern.registry.locks import Lock
from lokakern.registry.schema.row_keys import Row
from lokakern.registry.schema.tables import COLUMNS, REFERENCES, TABLES, sqlite_statements
from lokakern.registry.sqlite_file import (
    APPLICATION_ID,
    DIMENSIONS,
    SCHEMA_VERSION,
    TABLE_NAMES,
    names_text,
    translate,
)
from lokakern.registry.storage.reader import Rows, by_key, resolve, short

Table = tuple[str, Iterable[tuple[Any, ...]]]  # a name, and rows in the form of a file

LOCK_TIMEOUT_S = 600.0
MAKE_ROOM = "make room or choose another path (LOKAKERN_DB)"
PAGE_BYTES = 8192  # 4096 makes a shipped file 1.5 % larger, 16384 0.5 %
_REASON_CHARACTERS = 500  # a reason may quote a compiler's whole output
_SAID_BY_OTHERS = ("reason", "command")  # what is not printable becomes a space


@contextmanager
def locked(database: Path, *, once: bool = False) -> Iterator[Path]:
    """Hold the lock of a database's file; yields where the file really lies, links followed.

    The folder is made if it is missing. The lock's file goes where no database was written.

    Args:
        database: The file.
        once: Whether it is written once, as to be shared: then the lock's file goes, too.

    Raises:
        DatabaseError: Another process held it for too long, or it cannot be made.
    """
    place = Path(os.path.realpath(str(resolve(database))))
    path = place.with_name(place.name + ".lock")
    lock = Lock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not lock.acquire(LOCK_TIMEOUT_S):
            raise DatabaseError(
                f"lock {str(path)!r} was held for {LOCK_TIMEOUT_S:.0f} s; expected a merge to take "
                "seconds; end the process that holds it"
            )
    except OSError as error:
        raise no_lock(path, error) from None
    try:
        yield place
    finally:
        with suppress(OSError):  # in a folder that cannot be written it stays
            if once or not place.exists():
                path.unlink()  # who waits for it sees that, and makes another
        lock.release()


def no_lock(path: Path, error: OSError) -> DatabaseError:
    """The error of a lock that cannot be made."""
    return DatabaseError(
        f"lock {str(path)!r} cannot be made: {error.strerror}; choose another path (LOKAKERN_DB), "
        "in a folder that can be written, of a file system that has locks"
    )


def replace_file(place: Path, rows: Rows) -> None:
    """Write a database and rename it over the old one. The caller holds the lock."""
    publish(place, lambda temporary: write_file(temporary, rows))


def publish(place: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, and rename it over the old one.

    The caller holds the lock. Whatever `write` raises, the old file is as it was.

    Raises:
        DatabaseError: There is no room, or no permission.
    """
    temporary = place.with_name(f"{place.name}.{uuid4().hex}.tmp")
    try:
        remove_temporaries(place)
        temporary.touch(exist_ok=False)  # SQLite would not say why it cannot
        temporary.unlink()
        write(temporary)
        synchronize(temporary)
        os.replace(temporary, place)
        synchronize(place.parent)
    except OSError as error:
        raise DatabaseError(
            f"database {str(place)!r} cannot be written: {error.strerror}; the old file is as it "
            f"was; {MAKE_ROOM}"
        ) from error
    finally:
        _remove(place.parent, temporary.name)  # SQLite may leave a journal, which takes room


def remove_temporaries(place: Path) -> None:
    """Remove what killed processes were writing beside a place. The caller holds its lock."""
    # Digits of a UUID: "a.*.tmp" would be temporary files of a.sqlite, too.
    _remove(place.parent, place.name, f".{'[0-9a-f]' * 32}.tmp")


def _remove(folder: Path, name: str, more: str = "") -> None:
    """Remove files whose names begin so; `more` is a pattern."""
    for path in folder.glob(f"{glob.escape(name)}{more}*"):
        path.unlink(missing_ok=True)


def synchronize(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
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
    write_tables(path, rows_with_ids(rows))


def rows_with_ids(rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> Iterator[Table]:
    """Rows as files hold them: sorted, numbered, with ids for references and keys in bytes."""
    ids: dict[str, dict[str, int]] = {}
    for name in TABLE_NAMES:
        found = by_key(rows.get(name, ()))
        if name in DIMENSIONS:
            ids[name] = {row[0]: place for place, row in enumerate(found, start=1)}
            yield name, ((ids[name][row[0]], _key(name, row), *row[1:]) for row in found)
        else:
            translated = translate(name, found, REFERENCES[name], ids)
            yield name, ((_key(name, row), *row[1:]) for row in translated)


def _key(name: str, row: tuple[Any, ...]) -> bytes:
    try:
        return bytes.fromhex(row[0])
    except ValueError:
        raise DatabaseError(
            f"{name} row {row[0]!r}: its key is not hex digits; it was edited: leave its file out"
        ) from None


def write_tables(path: Path, tables: Iterable[Table]) -> None:
    """Write rows in the form of a file, which must not exist, in one transaction.

    Args:
        path: The file.
        tables: Names in the order of `tables.TABLES`, with rows by key: dimensions with their ids
            in front, facts with ids as references. Keys are bytes.

    Raises:
        DatabaseError: A row breaks a constraint, or there is no room.
    """
    with new_file(path) as connection:
        name = ""
        try:
            connection.execute("BEGIN")
            create_tables(connection)
            for name, rows in tables:
                insert_rows(connection, name, rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise DatabaseError(
                f"database {str(path)!r}: {f'{name} rows' if name else 'tables'} cannot be "
                f"written: {short(error)}{'; ' + MAKE_ROOM if is_of_the_disk(error) else ''}"
            ) from error


def insert_text(name: str) -> str:
    """A row into a table, with its id where it has one."""
    columns = ("id", *COLUMNS[name]) if name in DIMENSIONS else COLUMNS[name]
    return f"INSERT INTO {name} ({names_text(columns)}) VALUES ({', '.join('?' * len(columns))})"


def insert_rows(connection: sqlite3.Connection, name: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Add rows in the form of a file to a table."""
    connection.executemany(insert_text(name), rows)


def is_of_the_disk(error: sqlite3.Error) -> bool:
    """Whether a file could not be written, rather than a row was refused."""
    return isinstance(error, sqlite3.OperationalError)


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty database."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    for statement in sqlite_statements():
        connection.execute(statement)


@contextmanager
def new_file(path: Path) -> Iterator[sqlite3.Connection]:
    """Write a database, which is then packed into a file that must not exist.

    VACUUM writes the pages anew and full: 7 % smaller than as they were inserted, and the same
    bytes for any number of transactions and any order of inserts.

    Raises:
        DatabaseError: There is no room.
    """
    scratch = path.with_name(f"{path.name}.tmp-scratch")
    try:
        with closing(connect_writer(scratch)) as connection:
            yield connection
            connection.execute("VACUUM INTO ?", (_uri(path),))
    except sqlite3.Error as error:
        raise DatabaseError(
            f"database {str(path)!r} cannot be packed: {error}; {MAKE_ROOM}"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
        scratch.with_name(scratch.name + "-journal").unlink(missing_ok=True)


def _uri(path: Path) -> str:
    # As a URI, so that other files can be attached read-only; quoted, as "?" would end the name.
    return f"file:{quote(os.path.abspath(path))}"


def connect_writer(path: Path, *, synchronous: str = "OFF") -> sqlite3.Connection:
    """Connect to a file that only this process writes. Transactions are begun explicitly."""
    connection = sqlite3.connect(_uri(path), uri=True, isolation_level=None)
    pragmas = (f"page_size = {PAGE_BYTES}", "foreign_keys = ON", f"synchronous = {synchronous}")
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    return connection


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
    text = value
    if column.name in _SAID_BY_OTHERS:
        text = "".join(c if c.isprintable() else " " for c in text)
    if column.name == "reason" and len(text) > _REASON_CHARACTERS:
        text = text[: _REASON_CHARACTERS - 3] + "..."
    if not text.isprintable():  # a terminal would obey some, and a lone surrogate is no text
        raise ValueError("expected printable characters")
    return text
