"""Facts of a file, which is copied into memory as it lies: SQLite finds those asked for.

What happens to the file later, on this machine or another, does not matter. Of a million facts
Python holds 32 bytes of key and 16 of index each, where tuples took 1.3 KiB. Only for files that
were written here: what a foreign one costs is bounded by `registry/sharing/untrusted.py`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lokakern.errors import DatabaseError
from lokakern.registry.snapshot.facts import GivenFacts, Part, Row, Value
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    KEY_BYTES,
    REMAKE,
    SCHEMA_DIGEST,
    SCHEMA_VERSION,
    TABLE_NAMES,
    check_header,
    connect_readonly,
    schema_digest,
    shown,
    translate,
    unreadable,
)

T = TypeVar("T")
_BATCH_ROWS = 10_000
_BATCH_KEYS = 200  # one by one takes twice as long
# Nobody is inside of SQLite when a process forks, so the child finds its copy of the memory whole.
_LOCK = threading.RLock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def facts_of(source: str | Path) -> Part:
    """Facts of a source: of a file of the present schema version from its copy in memory.

    Anything else (older files, servers) is read row by row.

    Raises:
        DatabaseError: It cannot be read.
    """
    from_file = isinstance(source, Path) or not ("://" in source or "\0" in source)
    if from_file and check_header(Path(source), shown(Path(source))) == SCHEMA_VERSION:
        connection = _copy_in_memory(Path(source))
        if schema_digest(connection) == SCHEMA_DIGEST:
            return StoredFacts(connection, shown(Path(source)))
        connection.close()
    from lokakern.registry.storage.reader import (
        read_rows,  # says what of the schema is not as expected
    )

    return GivenFacts(read_rows(source))


def _copy_in_memory(path: Path) -> sqlite3.Connection:
    def copy() -> sqlite3.Connection:
        memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        with closing(connect_readonly(path)) as file:
            file.backup(memory)  # 220 MB in 0.2 s
        memory.execute("PRAGMA trusted_schema = OFF")
        memory.execute("PRAGMA cell_size_check = ON")
        return memory

    return _asked(shown(path), copy)


def _asked(name: str, question: Callable[[], T]) -> T:
    try:
        with _LOCK:
            return question()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unreadable(name, str(error).splitlines()[0]) from error


class _Index(NamedTuple):
    """Where facts are: keys as they lie, and their places in the order of their problems' ids."""

    keys: bytes
    problems: NDArray[np.int64]
    places: NDArray[np.int64]

    def keys_at(self, problems: Sequence[int]) -> list[bytes]:
        starts, ends = (
            np.searchsorted(self.problems, problems, side) for side in ("left", "right")
        )
        return [
            self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
            for start, end in zip(starts, ends, strict=True)
            for place in sorted(self.places[start:end].tolist())
        ]


class StoredFacts:
    """Facts of a file of the present schema version, see `facts.Facts` and `facts.Part`."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name
        weakref.finalize(self, connection.close)
        columns: dict[str, tuple[str, ...]] = {}
        for table in TABLE_NAMES:
            found = self._all("SELECT name FROM pragma_table_info(?)", [table])
            columns[table] = tuple(column for (column,) in found if column != "id")
        self.columns: Mapping[str, tuple[str, ...]] = columns
        dimensions: dict[str, dict[str, Row]] = {}
        self._key_of: dict[str, dict[int, str]] = {}
        self._id_of: dict[str, dict[str, int]] = {}
        for table in DIMENSIONS:
            rows = self._all(f"SELECT * FROM {table}")
            self._key_of[table] = {row[0]: row[1].hex() for row in rows}
            self._id_of[table] = {key: number for number, key in self._key_of[table].items()}
            dimensions[table] = {(key := row[1].hex()): (key, *row[2:]) for row in rows}
        self.dimensions: Mapping[str, Mapping[str, Row]] = dimensions
        self._indices = {table: self._index(table) for table in FACTS}

    def count(self, name: str, **equal: Value) -> int:
        ((count,),) = self._all(*self._select("count(*)", name, equal))
        return int(count)

    def has(self, name: str, **equal: Value) -> bool:
        text, values = self._select("1", name, equal)
        return bool(self._all(f"{text} LIMIT 1", values))

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        text, values = self._select("*", name, equal)
        for batch in self._batches(f"{text} ORDER BY key", values):
            yield from self._as_rows(name, batch)

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterator[Row]:
        selected = ("lower(hex(key))" if column == "key" else column for column in columns)
        text, values = self._select(f"DISTINCT {', '.join(selected)}", name, equal)
        for batch in self._batches(text, values):
            yield from self._translated(name, columns, batch)

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        id_of = self._id_of["problem"]
        ids = [id_of[key] for key in problems if key in id_of]
        return self.of_keys(name, self._indices[name].keys_at(ids))

    def keys(self, name: str) -> bytes:
        return self._indices[name].keys

    def of_keys(self, name: str, keys: Sequence[bytes]) -> list[Row]:
        found: list[Row] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            batch = sorted(keys[start : start + _BATCH_KEYS])
            marks = ", ".join("?" * len(batch))
            found += self._all(f"SELECT * FROM {name} WHERE key IN ({marks}) ORDER BY key", batch)
        return self._as_rows(name, found)

    def drop(self, name: str, keys: Sequence[bytes]) -> None:
        if name in DIMENSIONS:
            dropped = {key.hex() for key in keys}
            kept = {k: row for k, row in self.dimensions[name].items() if k not in dropped}
            self.dimensions = {**self.dimensions, name: kept}
            return
        text = f"DELETE FROM {name} WHERE key = ?"
        self._asked(lambda: self._connection.executemany(text, [(key,) for key in keys]))
        self._indices[name] = self._index(name)

    def _index(self, name: str) -> _Index:
        """One pass inside of SQLite: 600k facts in 0.3 s, which took 1.2 s as tuples."""
        has_problem = "problem" in self.columns[name]
        problems = "group_concat(problem)" if has_problem else "NULL"
        # What text with zero bytes in it becomes is not promised, so the result is looked at.
        for keys in ("CAST(group_concat(key, '') AS BLOB)", "group_concat(hex(key), '')"):
            ((count, joined, ids),) = self._all(f"SELECT count(*), {keys}, {problems} FROM {name}")
            found = bytes.fromhex(joined) if isinstance(joined, str) else joined or b""
            if len(found) == count * KEY_BYTES:
                break
        else:
            raise DatabaseError(
                f"database {self._name}: keys of {name} rows are not of {KEY_BYTES} bytes; the "
                f"file was edited; {REMAKE}"
            )
        of_rows = np.fromstring(ids or "", dtype=np.int64, sep=",")
        places = np.argsort(of_rows)  # in any order at one problem: 4 times as fast as in theirs
        of_rows = of_rows[places]
        here = of_rows[np.diff(of_rows, prepend=of_rows[:1] - 1) != 0].tolist()
        self._translated(name, ("problem",), [(problem,) for problem in here])
        return _Index(found, of_rows, places)

    def _select(
        self, what: str, name: str, equal: Mapping[str, Value]
    ) -> tuple[str, list[Value | None]]:
        """A query of facts with these values; its text is of names of ours only."""
        values = [
            self._id_of[column].get(str(value)) if column in DIMENSIONS else value
            for column, value in equal.items()
        ]  # NULL, of a key that is not there, equals nothing
        conditions = " AND ".join(f"{column} = ?" for column in equal)
        return f"SELECT {what} FROM {name}" + (f" WHERE {conditions}" if equal else ""), values

    def _as_rows(self, name: str, found: list[Row]) -> list[Row]:
        rows = self._translated(name, self.columns[name], found)
        return [(row[0].hex(), *row[1:]) for row in rows]

    def _translated(self, name: str, columns: Sequence[str], found: list[Row]) -> list[Row]:
        references = {place: column for place, column in enumerate(columns) if column in DIMENSIONS}
        try:
            return translate(name, found, references, self._key_of)
        except DatabaseError as error:
            raise DatabaseError(f"database {self._name}: {error}") from None

    def _all(self, text: str, values: Sequence[Value | bytes | None] = ()) -> list[Row]:
        return self._asked(lambda: self._connection.execute(text, values).fetchall())

    def _batches(self, text: str, values: Sequence[Value | None]) -> Iterator[list[Row]]:
        cursor = self._asked(lambda: self._connection.execute(text, values))
        while batch := self._asked(lambda: cursor.fetchmany(_BATCH_ROWS)):
            yield batch

    def _asked(self, question: Callable[[], T]) -> T:
        return _asked(self._name, question)
