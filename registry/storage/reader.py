"""Reading databases: read-only, checked, never migrated in place."""

from __future__ import annotations

import functools
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import URL, ColumnElement, Connection, Engine, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from lokakern.errors import DatabaseError
from lokakern.registry.schema.tables import (
    COLUMNS,
    KEYS_IN_BYTES_SINCE,
    REFERENCES,
    TABLES,
    schema_comment,
    sqlite_statements,
    tables_of,
)
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    REMAKE,
    SCHEMA_VERSION,
    VERSIONS,
    Schema,
    check_header,
    connect_readonly,
    schema_of,
    shown,
    translate,
    unreadable,
)

# Every row of a database: by table, tuples in the order of `tables.COLUMNS`, references as keys.
Rows = dict[str, list[tuple[Any, ...]]]
Source = str | Path | URL
T = TypeVar("T")


def resolve(source: Source) -> Path | URL:
    """A path for anything that is a SQLite file, a URL for other databases.

    Raises:
        DatabaseError: A URL that SQLAlchemy cannot parse, or SQLite in memory.
    """
    if "\0" in str(source):
        raise DatabaseError(f"database {str(source)!r} has a zero byte; expected a path or a URL")
    if isinstance(source, Path):
        return source
    if isinstance(source, str):
        if "://" not in source:
            return Path(source)
        try:
            source = make_url(source)
        except (ArgumentError, ValueError):  # which would repeat it, with its password
            scheme = str(source).split("://")[0]
            raise DatabaseError(
                f"database URL '{scheme}://...' cannot be parsed; expected a path or, say, "
                "'postgresql+psycopg://user@host/name'"
            ) from None
    if source.get_backend_name() != "sqlite":
        return source
    if not source.database or source.database == ":memory:":
        raise DatabaseError(
            f"database URL {shown(source)} has no file; expected 'sqlite:////a/path'"
        )
    return Path(source.database)


@contextmanager
def open_readonly(path: str | Path) -> Iterator[Connection]:
    """Open a database file for reading; nothing is ever written, locked or recovered.

    Header, version and schema are checked before anything is read from a table, so that neither
    views nor triggers of a foreign file run.

    Raises:
        DatabaseError: Not a lokakern database, newer than this code, truncated or corrupt.
    """
    path = Path(path)
    check_header(path, shown(path))
    engine = sqlalchemy.create_engine(
        "sqlite://", creator=functools.partial(connect_readonly, path), poolclass=NullPool
    )
    try:
        with engine.connect() as connection:
            _check_schema(path, connection)
            yield connection
    except (SQLAlchemyError, sqlite3.Error, UnicodeDecodeError) as error:
        raise unreadable(shown(path), short(error)) from error
    finally:
        engine.dispose()


def short(error: Exception) -> str:
    """The message of a driver, in one line."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def _check_schema(path: Path, connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    version = version_of(connection)
    found, expected = schema_of(driver), _expected_schema(version)
    if found == expected:
        return
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise DatabaseError(
                f"database {shown(path)} does not have the schema of version {version}: "
                f"{name} is {found.get(name, 'missing')}; expected "
                f"{expected.get(name, 'nothing of that name')}; {REMAKE}"
            )


def version_of(connection: Connection) -> int:
    """The schema version of a file."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


@functools.cache
def _expected_schema(version: int) -> Schema:
    return of_empty_file(version, schema_of)


def of_empty_file(version: int, read: Callable[[sqlite3.Connection], T]) -> T:
    """The result of `read` for an empty file of a schema version."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in sqlite_statements(version):
            connection.execute(statement)
        return read(connection)


def read_tables(connection: Connection, version: int) -> Rows:
    """Every row of a database of any released schema version, as rows of the present one."""
    names = tables_of(version)
    in_bytes = version >= KEYS_IN_BYTES_SINCE and connection.dialect.name == "sqlite"
    rows: Rows = {name: [] for name in TABLES}  # none of a table that came later
    keys: dict[str, dict[Any, Any]] = {}
    for name in DIMENSIONS:
        found = _all_rows(connection, name, in_bytes, "id")
        keys[name] = {row[0]: row[1] for row in found}
        rows[name] = [row[1:] for row in found]
    for name in FACTS:
        if name in names:
            rows[name] = translate(
                name, _all_rows(connection, name, in_bytes), REFERENCES[name], keys
            )
    return rows


def _all_rows(
    connection: Connection, name: str, in_bytes: bool, *more: str
) -> list[tuple[Any, ...]]:
    """Rows as the driver gives them; keys that are bytes as hex digits."""
    table = TABLES[name]
    columns: list[ColumnElement[Any]] = [table.c[c] for c in (*more, *COLUMNS[name])]
    if in_bytes:
        columns[len(more)] = func.lower(func.hex(table.c.key))  # the key comes first
    result = connection.execute(select(*columns))
    assert result.cursor is not None
    return list(result.cursor.fetchall())  # the driver's tuples: no other column needs conversion


def read_rows(source: Source) -> Rows:
    """Every row of a database, by table, in the order of `tables.COLUMNS`.

    Raises:
        DatabaseError: It cannot be read, see `open_readonly`.
    """
    found = resolve(source)
    if isinstance(found, Path):
        with open_readonly(found) as connection:
            return _read_as(shown(found), connection, version_of(connection))
    with _connected(found) as connection:
        return _read_as(shown(found), connection, check_server(connection))


def _read_as(name: str, connection: Connection, version: int) -> Rows:
    try:
        return read_tables(connection, version)
    except DatabaseError as error:
        raise DatabaseError(f"database {name}: {error}") from None


def open_server(url: URL) -> Engine:
    """An engine for a database that is not a file.

    Raises:
        DatabaseError: No driver for it is installed.
    """
    try:
        return sqlalchemy.create_engine(url, poolclass=NullPool)
    except (SQLAlchemyError, ImportError) as error:
        raise DatabaseError(
            f"database {shown(url)} has no driver here: {error}; install it (pip install "
            "'psycopg[binary]' for postgresql+psycopg)"
        ) from error


@contextmanager
def _connected(url: URL) -> Iterator[Connection]:
    """A connection to a server, for reading."""
    engine = open_server(url)
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {shown(url)} cannot be read: {short(error)}") from error
    finally:
        engine.dispose()


def check_server(connection: Connection) -> int:
    """See that a server holds our tables, in a schema version that is read here.

    Returns:
        The schema version.

    Raises:
        DatabaseError: It does not.
    """
    inspector = sqlalchemy.inspect(connection)
    url = shown(connection.engine.url)

    def comment_of(name: str) -> str | None:
        if not inspector.has_table(name):
            raise DatabaseError(f"database {url} has no table {name!r}; merge into it first")
        if not connection.dialect.supports_comments:
            return schema_comment(SCHEMA_VERSION)
        return inspector.get_table_comment(name)["text"]

    versions: dict[str | None, int] = {schema_comment(version): version for version in VERSIONS}
    version = versions.get(comment_of("run"), SCHEMA_VERSION)  # if it is none, the loop refuses
    expected = schema_comment(version)
    for name in tables_of(version):
        comment, columns = comment_of(name), COLUMNS[name]
        known = (column["name"] for column in inspector.get_columns(name))
        found = tuple(column for column in known if column != "id")
        if comment != expected or found != columns:
            raise DatabaseError(
                f"database {url}: table {name!r} is marked {comment!r} with columns "
                f"{', '.join(found)}; expected {expected!r} with {', '.join(columns)}; use "
                "another database, or another schema of it"
            )
    return version


def is_there(source: Source) -> bool:
    """Whether there is something to read: the file, or our tables on a server.

    Raises:
        DatabaseError: The server cannot be reached.
    """
    found = resolve(source)
    if isinstance(found, Path):
        return found.exists()
    with _connected(found) as connection:
        return sqlalchemy.inspect(connection).has_table("run")


def rows_digest(rows: Rows) -> str:
    """SHA-256, in hex, of rows sorted by key: equal content, equal digest, whatever the file.

    The rows are those of the present schema version, whichever version the file has.
    """
    return sorted_digest({name: by_key(found) for name, found in rows.items()})


def sorted_digest(rows: Mapping[str, Iterable[tuple[Any, ...]]]) -> str:
    """`rows_digest` of rows that come sorted by key."""
    digest = hashlib.sha256(f"lokakern {SCHEMA_VERSION}\n".encode())
    for name in sorted(rows):
        digest.update(f"{name}\n".encode())
        for row in rows[name]:
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def by_key(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows in the order files hold them."""
    return sorted(rows, key=lambda row: row[0])


def database_digest(source: Source) -> str:
    """Digest of a database's rows, see `rows_digest`.

    Raises:
        DatabaseError: It cannot be read.
    """
    return rows_digest(read_rows(source))
