"""Guarded access to foreign files: they can neither write, run code, hang nor exhaust the memory.

A file is copied to a private folder, its header is checked, and it is opened read-only and
immutable with SQLite's limits, an authorizer and a deadline. Its schema must equal this one
literally before any of its text is compiled. Then `registry/sharing/validate.py` reads
every row.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from lokakern.errors import DatabaseError
from lokakern.registry.locks import private_folder
from lokakern.registry.schema.manifest import Manifest, manifest_beside
from lokakern.registry.schema.tables import TABLES
from lokakern.registry.sqlite_file import (
    check_beside,
    check_header,
    connect_readonly,
    shown,
    unreadable,
)
from lokakern.registry.storage.reader import (
    Source,
    check_schema,
    read_rows,
    resolve,
    short,
    version_of,
)
from lokakern.registry.storage.writer import write_file

_CHUNK_BYTES = 1 << 20
_OPERATIONS = 10_000  # of SQLite's machine between two looks at the clock: well under 1 ms
_LIMITS = {
    "LENGTH": 1 << 19,  # bytes of a text, and of a row: of a run with the longest command, 270 KiB
    "SQL_LENGTH": 50_000,  # the longest statement of our schema has 3 400
    "COLUMN": 64,
    "EXPR_DEPTH": 100,
    "COMPOUND_SELECT": 2,
    "VDBE_OP": 25_000,
    "FUNCTION_ARG": 8,
    "ATTACHED": 0,
    "LIKE_PATTERN_LENGTH": 100,
    "VARIABLE_NUMBER": 100,
    "TRIGGER_DEPTH": 1,
    "WORKER_THREADS": 0,
}
_OPTIONS = {"DEFENSIVE": True, "ENABLE_TRIGGER": False, "ENABLE_VIEW": False}
_READABLE = frozenset(TABLES) | {"sqlite_master", "sqlite_schema"}
_FUNCTIONS = frozenset({"hex", "length", "lower"})
_PRAGMAS = frozenset({"quick_check", "read_uncommitted", "user_version"})


@dataclass(frozen=True, slots=True)
class Guards:
    """Bounds on the cost of reading a foreign file.

    Attributes:
        largest_bytes: Of the file.
        deadline_s: Seconds to read it in; for each MiB of the file ``deadline_s_per_mib`` more.
        deadline_s_per_mib: See ``deadline_s``.
        most_facts: Rows of a table of facts.
        most_dimensions: Rows of any other table; these are held in memory.
        most_characters: Of all texts of such a table.
    """

    largest_bytes: int = 1 << 30
    deadline_s: float = 60.0
    deadline_s_per_mib: float = 0.5
    most_facts: int = 5_000_000
    most_dimensions: int = 200_000
    most_characters: int = 1 << 27


GUARDS = Guards()


@dataclass(frozen=True, slots=True)
class Foreign:
    """An open guarded file, whose rows are not checked yet.

    Attributes:
        name: What errors call it.
        sha256: Of the file's bytes, in hex.
        size_bytes: Of the file.
        version: Of its schema.
        copy: The private copy.
        connection: Reads the copy.
        manifest: What lies beside the file, and fits its bytes; None if nothing does.
        guards: Bounds on the cost of reading it.
    """

    name: str
    sha256: str
    size_bytes: int
    version: int
    copy: Path
    connection: sqlite3.Connection
    manifest: Manifest | None
    guards: Guards

    def limit_rows(self, size_bytes: int | None = None) -> None:
        """Refuse longer rows from now on; None is the limit of all tables."""
        size = _LIMITS["LENGTH"] if size_bytes is None else size_bytes
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, size)


@contextmanager
def open_guarded(source: Source, guards: Guards = GUARDS) -> Iterator[Foreign]:
    """Open a foreign database for reading. Every failure inside is a `DatabaseError`.

    Rows of a server are first written into a private file, whose constraints they have to meet.

    Raises:
        DatabaseError: No finished lokakern database, too large, damaged, with anything beside our
            tables, or not what the manifest beside it says; or reading it took too long.
    """
    found = resolve(source)
    name = shown(found)
    manifest = None
    with private_folder() as folder:
        copy = folder / "copy.sqlite"
        if isinstance(found, Path):
            digest = _copy(found, copy, name, guards)
            if (manifest := manifest_beside(found)) is not None:
                manifest.check_file(name, digest, copy.stat().st_size)
        else:
            _take(found, copy, name)
            digest = hashlib.sha256(copy.read_bytes()).hexdigest()
        check_header(copy, name)
        size = copy.stat().st_size
        deadline = guards.deadline_s + guards.deadline_s_per_mib * size / 2**20
        try:
            with closing(_connect(copy, deadline)) as connection:
                version = version_of(connection)
                check_schema(connection, name, version)
                yield Foreign(name, digest, size, version, copy, connection, manifest, guards)
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            interrupted = short(error) == "interrupted"
            why = f"not done after {deadline:.0f} s" if interrupted else short(error)
            raise unreadable(name, why) from error


def _copy(path: Path, copy: Path, name: str, guards: Guards) -> str:
    """Copy a file.

    Returns:
        SHA-256 of its bytes, in hex.

    Raises:
        DatabaseError: It is no file, cannot be read, or is too large.
    """
    digest, size = hashlib.sha256(), 0
    try:
        # Opening a pipe would block until it has a writer, and reading a device never ends.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as source, copy.open("xb") as target:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DatabaseError(f"database {name} is not a file; expected a SQLite file")
            while chunk := source.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > guards.largest_bytes:
                    raise DatabaseError(
                        f"database {name} is larger than {guards.largest_bytes} bytes; expected at "
                        "most that of a file of others; ask for one of fewer rows (`export`)"
                    )
                digest.update(chunk)
                target.write(chunk)
        check_beside(path, name)
    except FileNotFoundError:
        remedy = "check the path, or make one with `python -m lokakern.bench sweep`"
        if Path(f"{path}.imports").is_dir():
            remedy = (
                "imported rows are in quarantine beside it, which only dispatch with "
                f"LOKAKERN_DB={shlex.quote(str(path))} reads: set it and leave out --db, run "
                "`verify`, or `import --trust`"
            )
        raise DatabaseError(f"database {name} is not there; {remedy}") from None
    except OSError as error:
        raise DatabaseError(
            f"database {name} cannot be read: {error.strerror}; check the path, and the room in "
            f"{tempfile.gettempdir()!r} (TMPDIR)"
        ) from error
    return digest.hexdigest()


def _take(server: URL, copy: Path, name: str) -> None:
    """Write the rows of a server into a file.

    Raises:
        DatabaseError: They cannot be read, or are not such as a file may hold.
    """
    try:
        write_file(copy, read_rows(server))
    except DatabaseError as error:
        raise DatabaseError(str(error).replace(repr(str(copy)), name)) from error
    except (ValueError, KeyError, TypeError) as error:  # keys that are no digits, or refer nowhere
        raise DatabaseError(
            f"database {name} holds rows that lokakern did not write ({error}); remove them there"
        ) from error


def _connect(path: Path, deadline_s: float) -> sqlite3.Connection:
    connection = connect_readonly(path)
    for limit, value in _LIMITS.items():
        connection.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{limit}"), value)
    if hasattr(connection, "setconfig"):  # Python 3.12
        for option, value in _OPTIONS.items():
            connection.setconfig(getattr(sqlite3, f"SQLITE_DBCONFIG_{option}"), value)
    ends = time.monotonic() + deadline_s
    connection.set_progress_handler(lambda: time.monotonic() > ends, _OPERATIONS)
    connection.set_authorizer(_authorize)
    return connection


def _authorize(
    action: int, first: str | None, second: str | None, _database: str | None, inner: str | None
) -> int:
    """Allow only what the queries here need; `inner` is the view or trigger that asks."""
    allowed = inner is None and (
        action == sqlite3.SQLITE_SELECT
        or (action == sqlite3.SQLITE_READ and first in _READABLE)
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
