"""Reading databases: read-only, checked, never migrated in place."""

from __future__ import annotations

import functools
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import URL, Connection, Engine
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
    names_text,
    schema_of,
    shown,
    translate,
    unreadable,
)

# Every row of a database: by table, tuples in the order of `tables.COLUMNS`, references as keys.
Rows = dict[str, list[tuple[Any, ...]]]
Source = str | Path | URL
_DIGEST_VERSION = 3  # of the tables that a digest names also where they are empty


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
def open_readonly(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Open a database file for reading; nothing is ever written, locked or recovered.

    Header, version and schema are checked before anything is read from a table, so that neither
    views nor triggers of a foreign file run.

    Raises:
        DatabaseError: Not a lokakern database, newer than this code, truncated or corrupt.
    """
    path = Path(path)
    version = check_header(path, shown(path))
    try:
        with closing(connect_readonly(path)) as connection:
            check_schema(connection, shown(path), version)
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unreadable(shown(path), short(error)) from error


def short(error: Exception) -> str:
    """The message of a driver, in one line."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def check_schema(connection: sqlite3.Connection, name: str, version: int) -> None:
    """Compare the whole schema of a file literally, with the constraints, which SQLite would run.

    Raises:
        DatabaseError: It differs from that of the version.
    """
    found, expected = schema_of(connection), _expected_schema(version)
    differing = {entry for entry, _ in found.items() ^ expected.items()}
    if not differing:
        return
    # A view in place of a table is there, too.
    kind, what, _ = entry = min(differing, key=lambda entry: (entry not in found, entry))
    if entry not in found:
        words = f"{what} is missing; expected a {kind}"
    elif entry not in expected:
        words = f"{what} is there, a {kind}; expected nothing of that name"
    else:
        one, other = str(found[entry]), str(expected[entry])
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        start = max(same - 30, 0)
        words = f"{what} is '...{one[start:][:90]}'; expected '...{other[start:][:90]}'"
    raise DatabaseError(
        f"database {name} does not have the schema of version {version}: {words}; {REMAKE}"
    )


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of a file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@functools.cache
def _expected_schema(version: int) -> Schema:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in sqlite_statements(version):
            connection.execute(statement)
        return schema_of(connection)


def read_tables(connection: sqlite3.Connection | Connection, version: int) -> Rows:
    """Every row of a database of any released schema version, as rows of the present one."""
    execute: Callable[[str], Any]
    if isinstance(connection, sqlite3.Connection):
        execute, is_sqlite = connection.execute, True
    else:
        execute, is_sqlite = connection.exec_driver_sql, connection.dialect.name == "sqlite"
    in_bytes = is_sqlite and version >= KEYS_IN_BYTES_SINCE
    key = 'lower(hex("key"))' if in_bytes else '"key"'

    def rows_of(name: str, more: str = "") -> list[tuple[Any, ...]]:
        columns = f"{more}{key}, {names_text(COLUMNS[name][1:])}"  # the key comes first
        return [*map(tuple, execute(f"SELECT {columns} FROM {name}").fetchall())]

    rows: Rows = {name: [] for name in TABLES}  # none of a table that came later
    keys: dict[str, dict[Any, Any]] = {}
    for name in DIMENSIONS:
        found = rows_of(name, "id, ")
        keys[name] = {row[0]: row[1] for row in found}
        rows[name] = [row[1:] for row in found]
    for name in FACTS:
        if name in tables_of(version):
            rows[name] = translate(name, rows_of(name), REFERENCES[name], keys)
    return rows


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


def _read_as(name: str, connection: sqlite3.Connection | Connection, version: int) -> Rows:
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

    The rows are those of the present schema version, whichever version the file has. A table that
    came after version 3 counts only if it has rows, so that older files keep their digest.
    """
    digest = hashlib.sha256(f"lokakern {_DIGEST_VERSION}\n".encode())
    for name in sorted(rows):
        heading = f"{name}\n".encode()
        if name in tables_of(_DIGEST_VERSION):
            digest.update(heading)
            heading = b""
        for row in by_key(rows[name]):
            digest.update(heading + repr(row).encode("utf-8", "surrogatepass"))
            heading = b""
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
