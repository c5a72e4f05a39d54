"""Merging databases: the set union of their rows by key, in SQL, into a new file or a server.

A database file is never changed: merging writes a new one beside it and renames that over the old
one, under a lock, so readers see the old file or the new one.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, column, insert, inspect, table
from sqlalchemy.exc import SQLAlchemyError

from lokakern.errors import DatabaseError
from lokakern.progress import tell
from lokakern.registry.locks import private_folder
from lokakern.registry.schema.manifest import place_of
from lokakern.registry.schema.row_keys import row_key
from lokakern.registry.schema.tables import (
    COLUMNS,
    KEYS_IN_BYTES_SINCE,
    METADATA,
    REFERENCES,
    TABLES,
    tables_of,
)
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    SCHEMA_VERSION,
    conflict,
    names_text,
    shown,
)
from lokakern.registry.storage.reader import (
    Rows,
    Source,
    check_server,
    open_readonly,
    open_server,
    read_rows,
    resolve,
    short,
    version_of,
)
from lokakern.registry.storage.writer import (
    create_tables,
    locked,
    new_file,
    publish,
    rows_with_ids,
    write_file,
)

_CACHE_KIB = 64 * 1024


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


@dataclass(frozen=True, slots=True)
class Part:
    """A file, as a part of a union.

    Attributes:
        name: What errors call it.
        path: Where it lies; it stays as it is while it is used.
        version: Of its schema.
        used: Ids of the dimensions to add, by table; None adds all.
    """

    name: str
    path: Path
    version: int
    used: Mapping[str, set[int]] | None = None


def own_part(path: Path, name: str = "") -> Part:
    """A file that was written here, as a part: its rows are trusted. The caller holds its lock.

    Raises:
        DatabaseError: It cannot be read.
    """
    with open_readonly(path) as connection:
        return Part(name or shown(path), path, version_of(connection))


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
    return merge_checked({source: read_checked(source) for source in sources}, target)


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


def merge_checked(sources: Mapping[Source, Rows], target: Source) -> MergeReport:
    """`merge` of sources whose rows were read and checked."""
    place = resolve(target)
    if not isinstance(place, Path):
        engine = open_server(place)
        try:
            return insert_missing(engine, *sources.values())
        finally:
            engine.dispose()
    with locked(place) as place, ExitStack() as stack:
        parts = []
        for source, rows in sources.items():
            path = resolve(source)
            if not isinstance(path, Path):
                path = stack.enter_context(private_folder()) / "rows.sqlite"
                write_file(path, rows)
            parts.append(own_part(path, shown(resolve(source))))
        added = add_to_file(place, parts)
    return MergeReport(added, _known(sources.values(), added))


def add_to_file(place: Path, parts: Sequence[Part]) -> dict[str, int]:
    """Add parts to a file, which is made if it is missing. The caller holds its lock.

    Where nothing is new the file stays as it is.

    Returns:
        How many rows were new, by table.
    """
    had, has = dict.fromkeys(TABLES, 0), dict.fromkeys(TABLES, 0)
    known = [own_part(place)] if place.exists() else []
    if known:
        with open_readonly(place) as connection:
            had |= _counts(connection, tables_of(known[0].version))

    def write(temporary: Path) -> None:
        has.update(write_union(temporary, [*known, *parts]))
        if known and has == had:
            raise _NothingNew

    with suppress(_NothingNew):
        publish_grown(place, write)
    return {name: has[name] - had[name] for name in TABLES}


def publish_grown(place: Path, write: Callable[[Path], object]) -> None:
    """`publish` of a file without a manifest: one beside it would be that of an earlier file."""

    def write_alone(temporary: Path) -> None:
        write(temporary)
        place_of(place).unlink(missing_ok=True)  # first: a file without one can be read

    publish(place, write_alone)


class _NothingNew(Exception):
    """Ends a publication that would change nothing."""


def _counts(connection: sqlite3.Connection, names: Iterable[str] = TABLES) -> dict[str, int]:
    count = "SELECT count(*) FROM {}".format
    return {name: connection.execute(count(name)).fetchone()[0] for name in names}


def write_union(path: Path, parts: Sequence[Part]) -> dict[str, int]:
    """Write the rows of several files, one a key, into a file that must not exist.

    Returns:
        How many rows it has, by table.

    Raises:
        DatabaseError: One key has two contents, or a row breaks a constraint.
    """
    with new_file(path) as connection:
        try:
            return _unite(connection, parts)
        except sqlite3.Error as error:
            names, why = " and ".join(part.name for part in parts), short(error)
            dangling = re.fullmatch(rf"NOT NULL .*: (\w+)\.({'|'.join(DIMENSIONS)})", why)
            if dangling:
                why = "a {} row refers to {} that is not there".format(*dangling.groups())
            raise DatabaseError(
                f"rows of {names} cannot be written to {str(path)!r}: {why}; nothing was changed; "
                "make room, or leave out a file that was edited"
            ) from error
        finally:
            tell("writing", 1)


class _Union:
    """Adds the rows of a part to the tables of a target, by key.

    The rows of `DIMENSIONS` come first. Each of them has an id in the part and another one in the
    target, and temporary tables of the target map one to the other.

    Args:
        execute: Runs a statement on the target's connection.
        part: What comes before the names of the part's tables: `part.` for an attached file.
        equal: The operator that compares NULL as a value.
        key: The part's key in the target's form.
    """

    def __init__(
        self,
        execute: Callable[[str], Any],
        *,
        part: str = "part.",
        equal: str = "IS",
        key: str = 'p."key"',
    ) -> None:
        self._execute, self._part, self._equal, self._key = execute, part, equal, key

    def number(self) -> None:
        """Map the ids of the part to those of the target, which has its dimensions."""
        for name in DIMENSIONS:
            self._execute(
                f"CREATE TEMPORARY TABLE IF NOT EXISTS numbers_of_{name} "
                "(old INTEGER PRIMARY KEY, new INTEGER)"
            )
            self._execute(f"DELETE FROM numbers_of_{name}")
            self._execute(
                f"INSERT INTO numbers_of_{name} SELECT p.id, t.id FROM {self._part}{name} AS p "
                f'JOIN {name} AS t ON t."key" = {self._key}'
            )

    def add_all(self) -> dict[str, int]:
        """`add` of every table."""
        added = {name: self.add(name) for name in DIMENSIONS}
        self.number()
        return added | {name: self.add(name) for name in FACTS}

    def add(
        self, name: str, *, where: str = "true", source: str = "", is_empty: bool = False
    ) -> int:
        """Add the rows of a table that the target lacks.

        Args:
            name: The table.
            where: Which rows `p` of the part, in SQL.
            source: What errors call the part.
            is_empty: Whether the target has no row of the table, so that none can differ.

        Returns:
            How many were added.

        Raises:
            DatabaseError: One key has two contents.
        """
        columns = COLUMNS[name]
        selected = ", ".join(self._selected(name))
        content = f"SELECT {selected} FROM {self._part}{name} AS p WHERE {where}"
        if not is_empty:
            self._refuse_conflicts(name, content, source)
        # Other constraints than that of the key still refuse a row.
        result = self._execute(
            f"INSERT INTO {name} ({names_text(columns)}) SELECT {names_text(columns)} "
            f'FROM ({content}) AS p WHERE true ORDER BY "key" ON CONFLICT ("key") DO NOTHING'
        )
        return int(result.rowcount)

    def _refuse_conflicts(self, name: str, content: str, source: str) -> None:
        columns = COLUMNS[name]
        same = " AND ".join(f't."{c}" {self._equal} p."{c}"' for c in columns if c != "key")
        found = self._execute(
            f"SELECT {names_text(columns, 't')}, {names_text(columns, 'p')} FROM ({content}) AS p "
            f'CROSS JOIN {name} AS t WHERE t."key" = p."key" AND NOT ({same}) LIMIT 1'
        ).fetchone()
        if found is not None:
            one, other = found[: len(columns)], found[len(columns) :]
            raise conflict(name, columns, one, other, source)

    def _selected(self, name: str) -> list[str]:
        found = []
        for place, its_name in enumerate(COLUMNS[name]):
            value = f'p."{its_name}"' if place else self._key
            if name in FACTS and its_name in DIMENSIONS:
                # A missing row gives NULL, which the table refuses.
                value = f"(SELECT new FROM numbers_of_{its_name} WHERE old = {value})"
            found.append(f'{value} AS "{its_name}"')
        return found


def _unite(connection: sqlite3.Connection, parts: Sequence[Part]) -> dict[str, int]:
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute("PRAGMA temp_store = MEMORY")
    # SQLite has unhex since 3.41; keys of older schema versions are digits.
    connection.create_function("from_hex", 1, bytes.fromhex, deterministic=True)
    connection.execute("CREATE TEMPORARY TABLE used (id INTEGER PRIMARY KEY)")
    create_tables(connection)
    for part in parts:
        with _attached(connection, part) as union:
            for name in DIMENSIONS:
                where = "true"
                if part.used is not None:
                    where = "p.id IN (SELECT id FROM used)"
                    connection.execute("DELETE FROM used")
                    ids = ((number,) for number in part.used[name])
                    connection.executemany("INSERT INTO used VALUES (?)", ids)
                union.add(name, where=where, source=part.name)
    for name in DIMENSIONS:  # ids in the order of keys
        connection.execute(f"CREATE TEMPORARY TABLE moved AS SELECT * FROM {name}")
        connection.execute(f"DELETE FROM {name}")
        columns = names_text(COLUMNS[name])
        connection.execute(
            f"INSERT INTO {name} SELECT row_number() OVER (ORDER BY key), {columns} FROM moved"
        )
        connection.execute("DROP TABLE moved")
    for place, part in enumerate(parts):
        with _attached(connection, part) as union:
            union.number()
            for done, name in enumerate(FACTS):
                tell("writing", (place + done / len(FACTS)) / len(parts))
                if name in tables_of(part.version):
                    union.add(name, source=part.name, is_empty=not place)
    return _counts(connection)


@contextmanager
def _attached(connection: sqlite3.Connection, part: Part) -> Iterator[_Union]:
    """A part's rows within reach of a connection, in one transaction."""
    uri = f"file:{quote(str(part.path.absolute()))}?mode=ro&immutable=1"
    connection.execute("ATTACH ? AS part", (uri,))  # only possible outside of transactions
    connection.execute("BEGIN")
    in_bytes = part.version >= KEYS_IN_BYTES_SINCE
    yield _Union(connection.execute, key='p."key"' if in_bytes else 'from_hex(p."key")')
    connection.execute("COMMIT")
    connection.execute("DETACH part")


def without_unused(facts: Rows, dimensions: Rows) -> Rows:
    """Facts with the rows that they refer to, and no others."""
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


def insert_missing(engine: Engine, *sources: Rows) -> MergeReport:
    """Add rows to a server in one transaction; the tables are made if they are missing.

    Raises:
        DatabaseError: One key has two contents, or the server refuses. Nothing was added.
    """
    url = shown(engine.url)
    added = dict.fromkeys(TABLES, 0)
    try:
        with suppress(SQLAlchemyError), engine.begin() as connection:  # another may make them
            if not inspect(connection).has_table("run"):  # else they may be of an older version
                METADATA.create_all(connection)
        with engine.begin() as connection:
            version = check_server(connection)
            if version != SCHEMA_VERSION:
                raise DatabaseError(
                    f"database {url} has schema version {version}; merges write version "
                    f"{SCHEMA_VERSION}; merge it into a new database"
                )
            equal = "IS" if connection.dialect.name == "sqlite" else "IS NOT DISTINCT FROM"
            union = _Union(connection.exec_driver_sql, part="part_", equal=equal)
            for rows in sources:
                _stage(connection, rows)
                for name, count in union.add_all().items():
                    added[name] += count
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {url}: merge was refused: {short(error)}") from error
    return MergeReport(added, _known(sources, added))


def _known(sources: Iterable[Rows], added: Mapping[str, int]) -> dict[str, int]:
    keys = {name: {row[0] for rows in sources for row in rows[name]} for name in TABLES}
    return {name: len(found) - added[name] for name, found in keys.items()}


def _stage(connection: Connection, rows: Rows) -> None:
    """Put the rows of a source into temporary tables of a server."""
    for name, found in rows_with_ids(rows):
        connection.exec_driver_sql(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS part_{name} AS SELECT * FROM {name} WHERE false"
        )
        connection.exec_driver_sql(f"DELETE FROM part_{name}")
        columns = TABLES[name].columns
        part = table(f"part_{name}", *(column(c.name, c.type) for c in columns))
        values = [dict(zip(columns.keys(), row, strict=True)) for row in found]
        if values:
            connection.execute(insert(part), [{**row, "key": row["key"].hex()} for row in values])
