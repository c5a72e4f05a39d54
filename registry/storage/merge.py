"""Merging databases: set union of facts by key, into a new file or a server.

A database file is never changed: merging writes a new one beside it and renames that over the old
one, under a lock, so readers see the old file or the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Insert, Table, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from lokakern.errors import DatabaseError
from lokakern.registry.schema.row_keys import row_key
from lokakern.registry.schema.tables import COLUMNS, REFERENCES, TABLES, Base
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    SCHEMA_VERSION,
    shown,
    translate,
)
from lokakern.registry.storage.reader import (
    Rows,
    Source,
    by_key,
    check_server,
    open_server,
    read_rows,
    resolve,
    short,
)
from lokakern.registry.storage.writer import locked, replace_file


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did.

    Attributes:
        added: Rows that were new to the target, by table.
        known: Rows of the sources that the target had.
        skipped: Run files that could not be read, with the reason; left where they are.
    """

    added: dict[str, int]
    known: dict[str, int]
    skipped: dict[str, str] = field(default_factory=dict)


def merge(sources: Iterable[Source], target: Source) -> MergeReport:
    """Add every row of the sources to the target: set union by key, all or nothing.

    Equal content gives equal bytes in a new file, whatever the order or number of merges.

    Args:
        sources: Database files or URLs; never changed.
        target: A file, made if it is missing, or a URL, whose tables are made if missing.

    Raises:
        DatabaseError: A source or the target cannot be read, a row's key does not fit its content,
            or one key has two contents. The target is as it was.
    """
    return merge_rows([read_checked(source) for source in sources], target)


def read_checked(source: Source) -> Rows:
    """Rows of a database, each with the key of its content.

    Raises:
        DatabaseError: It cannot be read, or a row was damaged or edited.
    """
    rows = read_rows(source)
    for name, found in rows.items():
        columns = COLUMNS[name]
        for row in found:
            values = dict(zip(columns, row, strict=True))
            if row_key(name, values) != row[0] or any(x != x for x in row):
                raise DatabaseError(
                    f"database {shown(resolve(source))}: {name} row {row[0]} does not have the key "
                    "of its content, or holds NaN; it was damaged or edited; ask for it again"
                )
    return rows


def merge_rows(sources: Sequence[Rows], target: Source) -> MergeReport:
    """`merge` of rows that were read."""
    place = resolve(target)
    new = union(sources)
    if not isinstance(place, Path):
        engine = open_server(place)
        try:
            return insert_missing(engine, new)
        finally:
            engine.dispose()
    with locked(place) as place:
        old = read_rows(place) if place.exists() else {name: [] for name in TABLES}
        merged = union([old, new])
        added = {name: len(merged[name]) - len(old[name]) for name in TABLES}
        if any(added.values()) or not place.exists():
            replace_file(place, merged)
    return MergeReport(added, {name: len(new[name]) - added[name] for name in TABLES})


def union(parts: Sequence[Rows]) -> Rows:
    """Rows of several databases, one a key, sorted.

    Raises:
        DatabaseError: One key has two contents.
    """
    merged: Rows = {}
    for name in TABLES:
        rows: dict[str, tuple[Any, ...]] = {}
        for part in parts:
            for row in part[name]:
                if rows.setdefault(row[0], row) != row:
                    raise conflict(name, rows[row[0]], row)
        merged[name] = by_key(rows.values())
    return merged


def without_unused(facts: Rows, dimensions: Rows) -> Rows:
    """Facts with those rows that they refer to, and no others."""
    kept: Rows = {name: facts[name] for name in FACTS}
    for name in DIMENSIONS:
        used = {
            row[place]
            for fact in FACTS
            for place, table in REFERENCES[fact].items()
            if table == name
            for row in kept[fact]
        }
        kept[name] = [row for row in dimensions[name] if row[0] in used]
    return kept


def conflict(
    name: str, one: tuple[Any, ...], other: tuple[Any, ...], source: str = ""
) -> DatabaseError:
    """The error of one key with two contents; `source` has the second."""
    differing = ", ".join(
        f"{column} {a!r} and {b!r}"
        for column, a, b in zip(COLUMNS[name], one, other, strict=True)
        if a != b
    )
    second = f", the second in {source}" if source else ""
    return DatabaseError(
        f"merge: {name} row {one[0]} has two contents ({differing}{second}); rows are facts and "
        "never change, so one of the files was edited: leave it out"
    )


def insert_missing(engine: Engine, rows: Rows) -> MergeReport:
    """Add rows to a server in one transaction; the tables are made if they are missing.

    Raises:
        DatabaseError: One key has two contents, or the server refuses. Nothing was added.
    """
    url = shown(engine.url)
    try:
        with suppress(SQLAlchemyError), engine.begin() as connection:  # another may make them
            if not inspect(connection).has_table("run"):  # else they may be of an older version
                Base.metadata.create_all(connection)
        with engine.begin() as connection:
            version = check_server(connection)
            if version != SCHEMA_VERSION:
                raise DatabaseError(
                    f"database {url} has schema version {version}; merges write version "
                    f"{SCHEMA_VERSION}; merge it into a new database"
                )
            ids: dict[str, dict[str, int]] = {}
            added = {}
            for name in TABLES:
                found = (
                    rows[name]
                    if name in DIMENSIONS
                    else translate(name, rows[name], REFERENCES[name], ids)
                )
                added[name] = _insert_missing(connection, name, found)
                if name in DIMENSIONS:
                    ids[name] = ids_of(connection, name, [row[0] for row in found])
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {url}: merge was refused: {short(error)}") from error
    return MergeReport(added, {name: len(rows[name]) - added[name] for name in TABLES})


def _insert_missing(connection: Connection, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
    table, columns = TABLES[name], COLUMNS[name]
    added = 0
    for start in range(0, len(rows), 500):
        part = {row[0]: row for row in rows[start : start + 500]}
        query = select(*(table.c[c] for c in columns)).where(table.c.key.in_(list(part)))
        found = {row[0]: tuple(row) for row in connection.execute(query)}
        for key, row in found.items():
            if part[key] != row:
                raise conflict(name, row, part[key])
        missing = [
            dict(zip(columns, row, strict=True)) for key, row in part.items() if key not in found
        ]
        if missing:
            connection.execute(insert_if_absent(connection, table), missing)
        added += len(missing)
    return added


def ids_of(connection: Connection, name: str, keys: Sequence[str]) -> dict[str, int]:
    """What a database calls these rows, by key."""
    table = TABLES[name]
    ids: dict[str, int] = {}
    for start in range(0, len(keys), 500):
        query = select(table.c.key, table.c.id).where(table.c.key.in_(keys[start : start + 500]))
        ids |= {key: number for key, number in connection.execute(query)}
    return ids


def insert_if_absent(connection: Connection, table: Table) -> Insert:
    """An insert that leaves a row of the same key as it is."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return insert(table)
