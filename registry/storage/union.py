"""Set union of database files, by SQLite itself: a million rows without one of them in Python.

What facts refer to is merged in Python and numbered anew; facts are copied from file to file with
these numbers. The result is that of `merging.union`, to the byte. Only for files whose rows were
checked, or written here.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from sqlalchemy import Column as SqlColumn
from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    MetaData,
    Select,
    Table,
    and_,
    column,
    delete,
    func,
    insert,
    not_,
    select,
    table,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError

from lokakern.errors import DatabaseError
from lokakern.progress import tell
from lokakern.registry.schema.tables import (
    COLUMNS,
    KEYS_IN_BYTES_SINCE,
    REFERENCES,
    TABLES,
    tables_of,
)
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS, shown
from lokakern.registry.storage.merge import conflict
from lokakern.registry.storage.reader import open_readonly, short, version_of
from lokakern.registry.storage.sql import compiled, insert_text, rows_text
from lokakern.registry.storage.writer import create_tables, open_writer, scratch_for

Row = tuple[Any, ...]
_CACHE_KIB = 64 * 1024
_PART = "part"  # what a file is called while it is read
_NUMBERS = {
    name: Table(
        f"numbers_of_{name}",
        MetaData(),
        SqlColumn("old", Integer, primary_key=True),
        SqlColumn("new", Integer, nullable=False),
        prefixes=["TEMPORARY"],
    )
    for name in DIMENSIONS
}


@dataclass(frozen=True, slots=True)
class Part:
    """A file, as a part of a union.

    Attributes:
        name: What errors call it.
        path: Where it lies; it stays as it is while it is used.
        version: Of its schema.
        dimensions: By table and id, rows in the order of `tables.COLUMNS`, keys as hex digits.
        counts: Facts, by table.
    """

    name: str
    path: Path
    version: int
    dimensions: Mapping[str, Mapping[int, Row]]
    counts: Mapping[str, int]


@contextmanager
def own_part(path: Path) -> Iterator[Part]:
    """A file that was written here, as a part: its rows are believed. The caller holds its lock.

    Raises:
        DatabaseError: It cannot be read.
    """
    with open_readonly(path) as connection:
        version = version_of(connection)
        in_bytes = version >= KEYS_IN_BYTES_SINCE
        dimensions = {}
        for name in DIMENSIONS:
            found = connection.exec_driver_sql(rows_text(name, "id"))
            dimensions[name] = {
                number: (key.hex() if in_bytes else key, *rest) for number, key, *rest in found
            }
        counts = dict.fromkeys(FACTS, 0)
        for name in counts.keys() & set(tables_of(version)):
            counts[name] = _count(connection, name)
        yield Part(shown(path), path, version, dimensions, counts)


def _count(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(_count_text(name)).scalar_one())


@functools.cache
def _count_text(name: str) -> str:
    return compiled(select(func.count()).select_from(TABLES[name]))


def write_union(path: Path, parts: Sequence[Part]) -> dict[str, int]:
    """Write the rows of several files, one a key, into a file that must not exist.

    Returns:
        How many rows it has, by table.

    Raises:
        DatabaseError: One key has two contents, or a row breaks a constraint.
    """
    merged = {name: _dimensions(name, parts) for name in DIMENSIONS}
    numbers = {
        name: {row[0]: place for place, row in enumerate(rows, start=1)}
        for name, rows in merged.items()
    }
    counts = {name: len(rows) for name, rows in merged.items()}
    with scratch_for(path) as scratch:
        _unite(scratch, parts, merged, numbers, counts)
    return {name: counts[name] for name in TABLES}


def _unite(
    path: Path,
    parts: Sequence[Part],
    merged: Mapping[str, list[Row]],
    numbers: Mapping[str, Mapping[str, int]],
    counts: dict[str, int],
) -> None:
    engine = open_writer(path, synchronous="OFF")  # synchronized before it is renamed
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            _prepare(driver)
            for place, part in enumerate(parts):
                # Outside of transactions: SQLite attaches only there.
                uri = f"file:{quote(str(part.path.absolute()))}?mode=ro&immutable=1"
                driver.execute("ATTACH ? AS part", (uri,))
                with connection.begin():
                    if place == 0:
                        create_tables(connection)
                        _write_dimensions(connection, merged)
                        for known in _NUMBERS.values():
                            known.create(connection, checkfirst=False)
                    _number(connection, part, numbers)
                    for fact, name in enumerate(FACTS):
                        tell("writing", (place + fact / len(FACTS)) / len(parts))
                        if part.counts[name]:
                            _copy(connection, part, name, first=place == 0)
                driver.execute("DETACH part")
            with connection.begin():
                counts.update({name: _count(connection, name) for name in FACTS})
    except (SQLAlchemyError, sqlite3.Error) as error:
        names = " and ".join(part.name for part in parts)
        raise DatabaseError(
            f"rows of {names} cannot be written to {str(path)!r}: {short(error)}; nothing was "
            "changed; make room, or leave out a file that was edited"
        ) from error
    finally:
        tell("writing", 1)
        engine.dispose()


def _prepare(driver: sqlite3.Connection) -> None:
    driver.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    driver.execute("PRAGMA temp_store = MEMORY")
    # SQLite has unhex since 3.41; keys of older schema versions are digits.
    driver.create_function("from_hex", 1, bytes.fromhex, deterministic=True)


def _dimensions(name: str, parts: Sequence[Part]) -> list[Row]:
    merged: dict[str, Row] = {}
    for part in parts:
        for row in part.dimensions[name].values():
            if merged.setdefault(row[0], row) != row:
                raise conflict(name, merged[row[0]], row, part.name)
    return sorted(merged.values(), key=lambda row: str(row[0]))


def _write_dimensions(connection: Connection, merged: Mapping[str, list[Row]]) -> None:
    for name, rows in merged.items():
        if rows:
            connection.exec_driver_sql(
                insert_text(name),
                [
                    (place, bytes.fromhex(row[0]), *row[1:])
                    for place, row in enumerate(rows, start=1)
                ],
            )


def _number(connection: Connection, part: Part, numbers: Mapping[str, Mapping[str, int]]) -> None:
    """For each row of a part that facts refer to: its number in the new file."""
    for name in _NUMBERS:
        connection.exec_driver_sql(_forget_text(name))
        pairs = [(old, numbers[name][row[0]]) for old, row in part.dimensions[name].items()]
        if pairs:
            connection.exec_driver_sql(_number_text(name), pairs)


@functools.cache
def _number_text(name: str) -> str:
    return compiled(insert(_NUMBERS[name]))


@functools.cache
def _forget_text(name: str) -> str:
    return compiled(delete(_NUMBERS[name]))


def _copy(connection: Connection, part: Part, name: str, *, first: bool) -> None:
    """Add the facts of the attached part that are not there yet.

    Raises:
        DatabaseError: One key has two contents.
    """
    texts = _texts(name, part.version >= KEYS_IN_BYTES_SINCE)
    if first:
        connection.exec_driver_sql(texts.insert)
        return
    found = connection.exec_driver_sql(texts.conflict).fetchone()
    if found is not None:
        width = len(COLUMNS[name])
        one, other = ((row[0].hex(), *row[1:]) for row in (found[:width], found[width:]))
        raise conflict(name, one, other, part.name)
    connection.exec_driver_sql(texts.insert_missing)


class _Texts(NamedTuple):
    """SQL for a table of facts of the attached file."""

    insert: str
    insert_missing: str
    conflict: str


@functools.cache
def _texts(name: str, in_bytes: bool) -> _Texts:
    target = TABLES[name]
    source = _as_in_the_new_file(name, in_bytes)
    statement = sqlite.insert(target).from_select(list(COLUMNS[name]), source)
    # Nothing but the key may be there already: other constraints still refuse.
    missing = statement.on_conflict_do_nothing(index_elements=["key"])
    brought = source.order_by(None).subquery()
    same = and_(
        *(target.c[c].is_not_distinct_from(brought.c[c]) for c in COLUMNS[name] if c != "key")
    )
    both = select(*(target.c[c] for c in COLUMNS[name]), *brought.c)
    differing = both.join_from(brought, target, target.c.key == brought.c.key).where(not_(same))
    return _Texts(compiled(statement), compiled(missing), compiled(differing))


def _as_in_the_new_file(name: str, in_bytes: bool) -> Select[Any]:
    source = table(name, *(column(c) for c in COLUMNS[name]), schema=_PART)
    columns: list[ColumnElement[Any]] = []
    for place, column_name in enumerate(COLUMNS[name]):
        found: ColumnElement[Any] = source.c[column_name]
        if place in REFERENCES[name]:
            known = _NUMBERS[REFERENCES[name][place]]
            # None that is not there is left out: NULL, which the table refuses.
            found = select(known.c.new).where(known.c.old == found).scalar_subquery()
        elif column_name == "key" and not in_bytes:
            found = func.from_hex(found)
        columns.append(found.label(column_name))
    return select(*columns).order_by(source.c.key)
