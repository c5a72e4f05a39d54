"""Reading database files that may come from anyone: read-only, checked, never migrated in place."""

from __future__ import annotations

import functools
import hashlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import URL, ColumnElement, Connection, Engine, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from lokakern.errors import DatabaseError
from lokakern.registry.tables import (
    APPLICATION_ID,
    COLUMNS,
    DIMENSIONS,
    FACTS,
    KEYS_IN_BYTES_SINCE,
    REFERENCES,
    SCHEMA_VERSION,
    TABLES,
    schema_comment,
    sqlite_statements,
    tables_of,
)

# Every row of a database: by table, tuples in the order of `tables.COLUMNS`, references as keys.
Rows = dict[str, list[tuple[Any, ...]]]
Source = str | Path | URL

_MAGIC = b"SQLite format 3\0"
REMAKE = "ask for the file again, or make one with `python -m lokakern.bench sweep`"


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
        "sqlite://", creator=functools.partial(_connect_readonly, path), poolclass=NullPool
    )
    try:
        with engine.connect() as connection:
            _check_schema(path, connection)
            yield connection
    except (SQLAlchemyError, sqlite3.Error, UnicodeDecodeError) as error:
        raise DatabaseError(
            f"database {shown(path)} cannot be read: {short(error)}; expected a whole SQLite file "
            f"(SQLite here is {sqlite3.sqlite_version}, 3.37 or later is needed); {REMAKE}"
        ) from error
    finally:
        engine.dispose()


def _connect_readonly(path: Path) -> sqlite3.Connection:
    # Unquoted, a "?" in the name would end it and turn read-only into writable.
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def shown(source: Path | URL) -> str:
    """A path or URL for a message, without its password."""
    return repr(source.render_as_string() if isinstance(source, URL) else str(source))


def short(error: Exception) -> str:
    """What a driver says, in one line."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def check_header(path: Path, name: str) -> None:
    """See that a file is a finished database of ours, in a schema version that is read here.

    Args:
        path: The file.
        name: What errors call it.

    Raises:
        DatabaseError: It is not.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DatabaseError(f"database {name} is not a file; expected a SQLite file")
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise DatabaseError(
            f"database {name} cannot be read: {error.strerror}; check the path (LOKAKERN_DB, "
            "--db), or make one with `python -m lokakern.bench sweep`"
        ) from error
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise DatabaseError(
            f"database {name} starts with {header[:16]!r}; expected a SQLite file; {REMAKE}"
        )
    application = int.from_bytes(header[68:72], "big")
    if application != APPLICATION_ID:
        raise DatabaseError(
            f"database {name} has application id {application:#x}; expected {APPLICATION_ID:#x}, "
            f"which lokakern writes; {REMAKE}"
        )
    version = int.from_bytes(header[60:64], "big")
    if version not in READERS:
        known = ", ".join(map(str, READERS))
        raise DatabaseError(
            f"database {name} has schema version {version}; this lokakern reads {known}; "
            + ("install a newer lokakern" if version > SCHEMA_VERSION else REMAKE)
        )
    page_bytes = int.from_bytes(header[16:18], "big")
    expected_bytes = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(
        header[28:32], "big"
    )
    if status.st_size != expected_bytes:
        raise DatabaseError(
            f"database {name} is {status.st_size} bytes; its header says {expected_bytes}; it was "
            f"cut off or is still being written; {REMAKE}"
        )
    if header[18:20] != b"\1\1":
        raise _unfinished(name, "a write-ahead log")
    check_beside(path, name)


def check_beside(path: Path, name: str) -> None:
    """See that nobody left a transaction beside a file, which is not in it yet.

    Raises:
        DatabaseError: Somebody did.
    """
    for beside in (path.with_name(path.name + ending) for ending in ("-journal", "-wal")):
        if beside.exists() and beside.stat().st_size:
            raise _unfinished(name, beside.name)


def _unfinished(name: str, what: str) -> DatabaseError:
    return DatabaseError(
        f"database {name} has {what}, which a reader of an immutable file does not see; expected a "
        "finished file: close its writer first"
    )


Schema = dict[str, tuple[object, ...]]


def _check_schema(path: Path, connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    version = version_of(connection)
    found, expected = _schema(driver), _expected_schema(version)
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


def _schema(connection: sqlite3.Connection) -> Schema:
    """Everything in a file: its tables with columns and options; anything else with its type."""
    schema: Schema = {}
    entries = connection.execute("SELECT type, name FROM sqlite_schema").fetchall()
    for kind, name in entries:
        if kind == "index" and name.startswith("sqlite_autoindex_"):
            continue
        schema[name] = (kind,)
    for name in [name for name, (kind, *_) in schema.items() if kind == "table" and name in TABLES]:
        columns = connection.execute("SELECT * FROM pragma_table_xinfo(?)", (name,)).fetchall()
        options = connection.execute(
            "SELECT type, wr, strict FROM pragma_table_list WHERE name = ?", (name,)
        ).fetchall()
        schema[name] = (*options, *columns)
    return schema


@functools.cache
def _expected_schema(version: int) -> Schema:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in sqlite_statements(version):
            connection.execute(statement)
        return _schema(connection)


def _read_tables(connection: Connection, version: int) -> Rows:
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
            rows[name] = translate(name, _all_rows(connection, name, in_bytes), keys)
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


def translate(
    name: str, rows: list[tuple[Any, ...]], names: Mapping[str, Mapping[Any, Any]]
) -> list[tuple[Any, ...]]:
    """Facts with other names for what they refer to: keys for ids, or ids for keys.

    Raises:
        DatabaseError: A fact refers to a row that is not there.
    """
    if not rows:
        return []
    columns: list[Iterable[Any]] = list(zip(*rows, strict=True))  # by column: 100k rows in 0.1 s
    try:
        for place, table in REFERENCES[name].items():
            columns[place] = list(map(names[table].__getitem__, columns[place]))
    except KeyError as error:
        raise DatabaseError(
            f"a {name} row refers to {table} {error}, which is not there; the file was edited: "
            "leave it out, or ask for it again"
        ) from None
    return list(zip(*columns, strict=True))


# One reader for each released schema version; all return rows of the present one.
READERS: dict[int, Callable[[Connection], Rows]] = {
    version: functools.partial(_read_tables, version=version) for version in (1, 2, 3)
}


def read_rows(source: Source) -> Rows:
    """Every row of a database, by table, in the order of `tables.COLUMNS`.

    Raises:
        DatabaseError: It cannot be read, see `open_readonly`.
    """
    found = resolve(source)
    if isinstance(found, Path):
        with open_readonly(found) as connection:
            return _read_with(READERS[version_of(connection)], found, connection)
    engine = open_server(found)
    try:
        with engine.connect() as connection:
            version = check_server(connection)
            return _read_with(READERS[version], found, connection)
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {shown(found)} cannot be read: {short(error)}") from error
    finally:
        engine.dispose()


def _read_with(
    reader: Callable[[Connection], Rows], source: Path | URL, connection: Connection
) -> Rows:
    try:
        return reader(connection)
    except DatabaseError as error:
        raise DatabaseError(f"database {shown(source)}: {error}") from None


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

    versions: dict[str | None, int] = {schema_comment(version): version for version in READERS}
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
    engine = open_server(found)
    try:
        with engine.connect() as connection:
            return sqlalchemy.inspect(connection).has_table("run")
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {shown(found)} cannot be read: {short(error)}") from error
    finally:
        engine.dispose()


def rows_digest(rows: Rows) -> str:
    """SHA-256, in hex, of rows sorted by key: equal content, equal digest, whatever the file.

    The rows are those of the present schema version, whichever version the file has.
    """
    digest = hashlib.sha256(f"lokakern {SCHEMA_VERSION}\n".encode())
    for name in sorted(rows):
        digest.update(f"{name}\n".encode())
        for row in by_key(rows[name]):
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
