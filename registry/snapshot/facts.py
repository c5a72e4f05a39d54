"""Rows of databases, in SQLite's memory.

A file is copied as it lies, so later changes of the file do not matter. Of a million facts Python
holds 32 bytes of key and 16 of index each, where tuples took 1.3 KiB. Only for files that were
written here: `registry/sharing/untrusted.py` bounds the cost of a foreign one.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, combinations
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lokakern.errors import DatabaseError
from lokakern.registry.quarantine import key_array, places_of
from lokakern.registry.sqlite_file import (
    DIMENSIONS,
    FACTS,
    HOST_COST_COLUMNS,
    KEY_BYTES,
    REMAKE,
    SCHEMA_DIGESTS,
    SCHEMA_VERSION,
    TABLE_NAMES,
    check_header,
    conflict,
    connect_readonly,
    schema_digest,
    shown,
    translate,
    unreadable,
)

if TYPE_CHECKING:
    from lokakern.registry.storage.reader import Source

T = TypeVar("T")
Row = tuple[Any, ...]
Value = str | int

_BATCH_ROWS = 10_000
_BATCH_KEYS = 200  # one by one takes twice as long
# No thread is inside of SQLite when a process forks, so the child's copy of the memory is whole.
_LOCK = threading.RLock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def image_of(source: Source) -> Image:
    """The rows of a database: of a file of schema version 3 or 4 as its copy in memory.

    Others (older files, servers) are read row by row.

    Raises:
        DatabaseError: It cannot be read.
    """
    is_file = isinstance(source, Path) or ("://" not in str(source) and "\0" not in str(source))
    path = Path(str(source))
    version = check_header(path, shown(path)) if is_file else 0
    if version in SCHEMA_DIGESTS:

        def copy() -> sqlite3.Connection:
            memory = _new_memory()
            with closing(connect_readonly(path)) as file:
                file.backup(memory)  # 220 MB in 0.2 s
            return memory

        connection = _asked(shown(path), copy)
        if schema_digest(connection) == SCHEMA_DIGESTS[version]:
            if version < SCHEMA_VERSION:
                others = ", ".join(HOST_COST_COLUMNS[1:])
                connection.execute(
                    f"CREATE TABLE host_cost (key BLOB PRIMARY KEY, {others}) WITHOUT ROWID"
                )
            return Image(connection, shown(path))
        connection.close()
    from lokakern.registry.storage.reader import read_rows, resolve

    rows = read_rows(source)  # names what differs in the schema
    return image_of_rows(rows, shown(resolve(source)))


def image_of_rows(rows: Mapping[str, Sequence[Row]], name: str = "in memory") -> Image:
    """Rows in Python, keys and references as hex digits, as a database in memory."""
    from lokakern.registry.storage.writer import create_tables, insert_rows, rows_with_ids

    memory = _new_memory()
    memory.execute("PRAGMA ignore_check_constraints = ON")
    create_tables(memory)
    for table, found in rows_with_ids(rows):
        insert_rows(memory, table, found)
    return Image(memory, name)


def _new_memory() -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    memory.execute("PRAGMA trusted_schema = OFF")
    memory.execute("PRAGMA cell_size_check = ON")
    return memory


def _asked(name: str, question: Callable[[], T]) -> T:
    try:
        with _LOCK:
            return question()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unreadable(name, str(error).splitlines()[0]) from error


class _Index(NamedTuple):
    """The keys of facts, sorted, and their places in the order of their problems' ids."""

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


class Image:
    """Rows of a database in memory, one a key; keys and references are hex digits.

    Attributes:
        name: What errors call it.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self.name = connection, name
        weakref.finalize(self, connection.close)
        self._indices: dict[str, _Index] = {}

    @cached_property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Columns by table, in the order of rows."""
        found = {
            table: self._all("SELECT name FROM pragma_table_info(?)", [table])
            for table in TABLE_NAMES
        }
        return {
            table: tuple(column for (column,) in columns if column != "id")
            for table, columns in found.items()
        }

    @cached_property
    def dimensions(self) -> Mapping[str, Mapping[str, Row]]:
        """The rows that facts refer to, by table and key."""
        return {
            table: {(key := row[1].hex()): (key, *row[2:]) for row in rows}
            for table, rows in self._numbered.items()
        }

    @cached_property
    def _numbered(self) -> dict[str, list[Row]]:
        return {table: self._all(f"SELECT * FROM {table}") for table in DIMENSIONS}

    @cached_property
    def _key_of(self) -> dict[str, dict[int, str]]:
        return {
            table: dict(zip((row[0] for row in self._numbered[table]), rows, strict=True))
            for table, rows in self.dimensions.items()
        }

    @cached_property
    def _id_of(self) -> dict[str, dict[str, int]]:
        return {
            table: {key: number for number, key in keys.items()}
            for table, keys in self._key_of.items()
        }

    def check(self) -> None:
        """Read keys and references to problems.

        Raises:
            DatabaseError: The file was edited.
        """
        for name in FACTS:
            self._index(name)

    def count(self, name: str, **equal: Value) -> int:
        """How many facts have these values."""
        ((count,),) = self._all(*self._select("count(*)", name, equal))
        return int(count)

    def has(self, name: str, **equal: Value) -> bool:
        """Whether any fact has these values."""
        text, values = self._select("1", name, equal)
        return bool(self._all(f"{text} LIMIT 1", values))

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        """Facts that have these values, by key."""
        text, values = self._select("*", name, equal)
        for batch in self._batches(f"{text} ORDER BY key", values):
            yield from self._as_rows(name, batch)

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterator[Row]:
        """Distinct values of some columns, of facts that have these values."""
        selected = ", ".join("lower(hex(key))" if name == "key" else name for name in columns)
        distinct = "" if "key" in columns else "DISTINCT "  # a key tells all rows apart
        text, values = self._select(f"{distinct}{selected}", name, equal)
        for batch in self._batches(text, values):
            yield from self._translated(name, columns, batch)

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        """Facts about problems of these keys."""
        id_of = self._id_of["problem"]
        ids = [id_of[key] for key in problems if key in id_of]
        return self.of_keys(name, self._index(name).keys_at(ids))

    def keys(self, name: str) -> bytes:
        """Keys of facts, sorted, one after the other."""
        return self._index(name).keys

    def of_keys(self, name: str, keys: Sequence[bytes]) -> list[Row]:
        """Facts of these keys, which are sorted, in their order; all are there."""
        found: list[Row] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            batch = sorted(keys[start : start + _BATCH_KEYS])
            marks = ", ".join("?" * len(batch))
            found += self._all(f"SELECT * FROM {name} WHERE key IN ({marks}) ORDER BY key", batch)
        return self._as_rows(name, found)

    def drop(self, name: str, keys: Iterable[bytes]) -> None:
        """Remove the rows of these keys: facts, or dimensions that no fact refers to any more."""
        text = f"DELETE FROM {name} WHERE key = ?"
        asked = [(key,) for key in keys]
        _asked(self.name, lambda: self._connection.executemany(text, asked))
        self._indices.pop(name, None)
        for cached in (
            ("dimensions", "_numbered", "_key_of", "_id_of") if name in DIMENSIONS else ()
        ):
            self.__dict__.pop(cached, None)

    def _index(self, name: str) -> _Index:
        if name not in self._indices:
            self._indices[name] = self._read_index(name)
        return self._indices[name]

    def _read_index(self, name: str) -> _Index:
        """One pass inside of SQLite: 600k facts in 0.3 s, which took 1.2 s as tuples."""
        has_problem = "problem" in self.columns[name]
        problems = "group_concat(problem)" if has_problem else "NULL"
        # What text with zero bytes in it becomes is not promised, so the result is checked.
        for keys in ("CAST(group_concat(key, '') AS BLOB)", "group_concat(hex(key), '')"):
            ((count, joined, ids),) = self._all(f"SELECT count(*), {keys}, {problems} FROM {name}")
            found = bytes.fromhex(joined) if isinstance(joined, str) else joined or b""
            if len(found) == count * KEY_BYTES:
                break
        else:
            raise DatabaseError(
                f"database {self.name}: keys of {name} rows are not of {KEY_BYTES} bytes; the "
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
        """A query of facts with these values; its text has names of the schema only."""
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
            raise DatabaseError(f"database {self.name}: {error}") from None

    def _all(self, text: str, values: Sequence[Value | bytes | None] = ()) -> list[Row]:
        return _asked(self.name, lambda: self._connection.execute(text, values).fetchall())

    def _batches(self, text: str, values: Sequence[Value | None]) -> Iterator[list[Row]]:
        cursor = _asked(self.name, lambda: self._connection.execute(text, values))
        while batch := _asked(self.name, lambda: cursor.fetchmany(_BATCH_ROWS)):
            yield batch


class Facts:
    """The rows of several databases as one: a row that two have is removed from the first.

    Images stay side by side, each row in one of them: to copy 40k rows into another image would
    take 0.2 s, four times as long as to load them. See `Image` for the methods.

    Raises:
        DatabaseError: One key has two contents, or a file was edited.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        self.images = images = images or [image_of_rows({})]
        self.columns = images[0].columns
        for one, other in combinations(images, 2):
            check_agreement(one, other, other.name)
        self.dimensions = dict(images[0].dimensions)
        for image in images[1:]:
            for name in DIMENSIONS:
                self.dimensions[name] = {**image.dimensions[name], **self.dimensions[name]}
        for name in FACTS:
            for one, other in combinations(images, 2):
                both = common_keys(one.keys(name), other.keys(name))
                if both:
                    one.drop(name, both)
        for image in images:
            image.check()

    def count(self, name: str, **equal: Value) -> int:
        return sum(image.count(name, **equal) for image in self.images)

    def has(self, name: str, **equal: Value) -> bool:
        return any(image.has(name, **equal) for image in self.images)

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        return heapq.merge(*(image.rows(name, **equal) for image in self.images), key=itemgetter(0))

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterator[Row]:
        """As `Image.picked`; equal values of two images are repeated."""
        return chain.from_iterable(image.picked(name, columns, **equal) for image in self.images)

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        wanted = list(problems)
        return [row for image in self.images for row in image.at(name, wanted)]

    def keys(self, name: str) -> bytes:
        if len(self.images) == 1:
            return self.images[0].keys(name)
        return np.sort(key_array(b"".join(image.keys(name) for image in self.images))).tobytes()

    def as_rows(self) -> dict[str, list[Row]]:
        """Every row, by table and key."""
        found = {name: sorted(rows.values()) for name, rows in self.dimensions.items()}
        return found | {name: [*self.rows(name)] for name in FACTS}


def check_agreement(one: Image, other: Image, source: str = "") -> None:
    """Nothing where two sources have the same content for each key that both have.

    Raises:
        DatabaseError: One key has two contents, the second in `source`.
    """
    for name, a, b in contradictions(one, other):
        raise conflict(name, one.columns[name], a, b, source)


def contradictions(one: Image, other: Image) -> Iterator[tuple[str, Row, Row]]:
    """Rows of one key with two contents, with their table."""
    for name in DIMENSIONS:
        rows, others = one.dimensions[name], other.dimensions[name]
        for key in rows.keys() & others.keys():
            if rows[key] != others[key]:
                yield name, rows[key], others[key]
    for name in FACTS:
        both = common_keys(one.keys(name), other.keys(name))
        for a, b in zip(one.of_keys(name, both), other.of_keys(name, both), strict=True):
            if a != b:
                yield name, a, b


def has_all(whole: Image, part: Image) -> bool:
    """Whether a source has every row of another, with the same content."""
    unknown = any(unknown_keys(part, name, [whole]) for name in TABLE_NAMES)
    return not unknown and next(contradictions(whole, part), None) is None


def unknown_keys(part: Image, name: str, known: Sequence[Image]) -> set[str] | set[bytes]:
    """Keys of a table that no other source has."""
    if name in DIMENSIONS:
        return set(part.dimensions[name]).difference(*(one.dimensions[name] for one in known))
    keys = part.keys(name)
    found = {keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)}
    return found.difference(*(common_keys(keys, one.keys(name)) for one in known))


def set_disputed_apart(parts: Sequence[Image]) -> list[tuple[Image, Image, int]]:
    """Remove from all sources the facts of which two of them have different contents.

    Where two differ about a run, all its facts are disputed.

    Returns:
        Which two contradict each other, and in how many rows.
    """
    disputed: dict[str, set[str]] = {name: set() for name in TABLE_NAMES}
    pairs = []
    for one, other in combinations(parts, 2):
        found = [(name, a[0]) for name, a, _ in contradictions(one, other)]
        for name, key in found:
            disputed[name].add(key)
        if found:
            pairs.append((one, other, len(found)))
    for part in parts if pairs else ():
        for name in FACTS:
            keys = set(disputed[name])
            for table in {*DIMENSIONS} & {*part.columns[name]}:
                for key in disputed[table] & part.dimensions[table].keys():
                    keys |= {row[0] for row in part.picked(name, ("key",), **{table: key})}
            part.drop(name, map(bytes.fromhex, keys))
        for table in DIMENSIONS:
            part.drop(table, map(bytes.fromhex, disputed[table]))
    return pairs


def common_keys(one: bytes, other: bytes) -> list[bytes]:
    """Keys, which lie sorted, that are among both: 44k among a million in 15 ms."""
    few, many = sorted(map(key_array, (one, other)), key=len)
    found = few[places_of(few, many)].tobytes()
    return [found[start : start + KEY_BYTES] for start in range(0, len(found), KEY_BYTES)]
