"""Database files without SQLAlchemy, whose import takes longer than reading the shipped file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from lokakern.errors import DatabaseError

APPLICATION_ID = 0x4C4F4B41  # "LOKA" in the header of every file
SCHEMA_VERSION = 4
VERSIONS = (1, 2, 3, 4)  # that are read
DIMENSIONS = ("device", "environment", "kernel", "problem", "distribution", "run")
# Facts refer to dimensions, in columns of their names.
FACTS = ("timing", "accuracy", "test_result", "host_cost")
TABLE_NAMES = (*DIMENSIONS, *FACTS)
GRADES = ("full", "quick")
STATUSES = ("ok", "wrong", "error", "out_of_memory", "timeout", "crashed", "unsupported")
KEY_BYTES = 32  # of a fact
# `schema_digest` of files that are read as they are, by version: so that reading takes no model of
# them. Version 3 has all tables of version 4 but the last.
SCHEMA_DIGESTS = {
    3: "57b0920edce8e40fe4ebcae237115c6ea4516dba525d656bbe02b842acdc9e5b",
    4: "e93d94d3e056fc35b1cbd3247735000774217a6bbd556bce1e3e14a736c8521c",
}

# What a file of version 3 lacks: the last table, by its columns.
HOST_COST_COLUMNS = (
    "key", "run", "device", "environment", "cpu", "regime", "call", "language", "path",
    "round_count", "calls_per_round", "host_us_p20", "host_us_p50", "host_us_p80",
    "measured_utc_ms",
)  # fmt: skip

REMAKE = "ask for the file again, or make one with `python -m lokakern.bench sweep`"
_MAGIC = b"SQLite format 3\0"

Schema = dict[tuple[str, str, str], str | None]


class Url(Protocol):
    """SQLAlchemy's URL."""

    def render_as_string(self) -> str: ...


def connect_readonly(path: Path) -> sqlite3.Connection:
    # Unquoted, a "?" in the name would end it and turn read-only into writable.
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def shown(source: Path | Url) -> str:
    """A path or URL for a message, without its password."""
    return repr(str(source) if isinstance(source, Path) else source.render_as_string())


def check_header(path: Path, name: str) -> int:
    """See that a file is a finished database of ours, in a schema version that is read here.

    Args:
        path: The file.
        name: What errors call it.

    Returns:
        The schema version.

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
        found = f"starts with {header[:16]!r}" if header else "is empty"
        if header and (header.startswith(_MAGIC) or _MAGIC.startswith(header)):
            found = f"is cut off after {len(header)} bytes"
        raise DatabaseError(f"database {name} {found}; expected a SQLite file; {REMAKE}")
    application = int.from_bytes(header[68:72], "big")
    if application != APPLICATION_ID:
        raise DatabaseError(
            f"database {name} has application id {application:#x}; expected {APPLICATION_ID:#x}, "
            f"which lokakern writes; {REMAKE}"
        )
    version = int.from_bytes(header[60:64], "big")
    if version not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise DatabaseError(
            f"database {name} has schema version {version}; this lokakern reads {known}; "
            + ("install a newer lokakern" if version > SCHEMA_VERSION else REMAKE)
        )
    if header[56:60] != b"\0\0\0\1":
        raise DatabaseError(
            f"database {name} has text encoding {header[56:60].hex()}; expected 00000001 (UTF-8), "
            f"which lokakern writes; {REMAKE}"
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
    if header[18:20] == b"\2\2":
        raise _unfinished(name, "a write-ahead log")
    if header[18:20] != b"\1\1":
        raise DatabaseError(
            f"database {name} has file format {header[18]} and {header[19]} for writers and "
            f"readers; expected 1 and 1; its header was damaged: {REMAKE}"
        )
    check_beside(path, name)
    return version


def unreadable(name: str, why: str) -> DatabaseError:
    """The error of a file that SQLite cannot read."""
    return DatabaseError(
        f"database {name} cannot be read: {why}; expected a whole SQLite file (SQLite here is "
        f"{sqlite3.sqlite_version}, 3.37 or later is needed); {REMAKE}"
    )


def check_beside(path: Path, name: str) -> None:
    """Refuse a file with an unfinished transaction beside it.

    Raises:
        DatabaseError: There is one.
    """
    for beside in (path.with_name(path.name + ending) for ending in ("-journal", "-wal")):
        if beside.exists() and beside.stat().st_size:
            raise _unfinished(name, beside.name)


def _unfinished(name: str, what: str) -> DatabaseError:
    return DatabaseError(
        f"database {name} has {what}, which a reader of an immutable file does not see; expected a "
        "finished file: close its writer first"
    )


def schema_of(connection: sqlite3.Connection) -> Schema:
    """Everything in a file, by kind, name and table, with its SQL; white space does not matter."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
    return {
        (str(kind), str(name), str(table)): None if sql is None else " ".join(str(sql).split())
        for kind, name, table, sql in found
    }


def schema_digest(connection: sqlite3.Connection) -> str:
    """SHA-256, in hex, of everything that `schema_of` tells."""
    return hashlib.sha256(repr(sorted(schema_of(connection).items())).encode()).hexdigest()


def translate(
    name: str,
    rows: list[tuple[Any, ...]],
    references: Mapping[int, str],
    names: Mapping[str, Mapping[Any, Any]],
) -> list[tuple[Any, ...]]:
    """Facts with other names for what they refer to: keys for ids, or ids for keys.

    Args:
        name: Their table.
        rows: Facts, or some columns of them.
        references: By place in a row, what it refers to there.
        names: By table, the other name of a row.

    Raises:
        DatabaseError: A fact refers to a row that is not there.
    """
    if not rows:
        return []
    columns: list[Iterable[Any]] = list(zip(*rows, strict=True))  # by column: 100k rows in 0.1 s
    try:
        for place, table in references.items():
            columns[place] = list(map(names[table].__getitem__, columns[place]))
    except KeyError as error:
        raise DatabaseError(
            f"a {name} row refers to {table} {error}, which is not there; the file was edited: "
            "leave it out, or ask for it again"
        ) from None
    return list(zip(*columns, strict=True))


def names_text(columns: Iterable[str], table: str = "") -> str:
    """Columns, separated by commas."""
    prefix = f"{table}." if table else ""
    return ", ".join(f'{prefix}"{column}"' for column in columns)


def conflict(
    name: str, columns: Iterable[str], one: tuple[Any, ...], other: tuple[Any, ...], source: str
) -> DatabaseError:
    """The error of one key with two contents, the second in `source`."""
    key = one[0].hex() if isinstance(one[0], bytes) else one[0]
    differing = ", ".join(
        f"{column} {a!r} and {b!r}"
        for column, a, b in zip(columns, one, other, strict=True)
        if column != "key" and a != b
    )
    second = f", the second in {source}" if source else ""
    return DatabaseError(
        f"{name} row {key} has two contents ({differing}{second}); rows are facts and "
        "never change, so one of the files was edited: leave it out"
    )
