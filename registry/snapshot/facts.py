"""What a snapshot asks of rows, those that are in Python already, and several sources as one."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from lokakern.errors import DatabaseError
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS, KEY_BYTES

Row = tuple[Any, ...]
Value = str | int


class Facts(Protocol):
    """Rows of a database, one a key, keys and references as hex digits, in order of `columns`.

    Attributes:
        columns: By table.
        dimensions: By table and key, rows that facts refer to.
    """

    columns: Mapping[str, tuple[str, ...]]
    dimensions: Mapping[str, Mapping[str, Row]]

    def count(self, name: str, **equal: Value) -> int:
        """How many facts have these values."""
        ...

    def has(self, name: str, **equal: Value) -> bool:
        """Whether any fact has these values."""
        ...

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        """Facts that have these values, by key."""
        ...

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterable[Row]:
        """Some columns of facts that have these values; equal ones need not be repeated."""
        ...

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        """Facts about problems of these keys."""
        ...

    def keys(self, name: str) -> bytes:
        """Keys of facts, sorted, one after the other."""
        ...


class Part(Facts, Protocol):
    """Facts of one source, from which those can be taken out that another has too."""

    def of_keys(self, name: str, keys: Sequence[bytes]) -> list[Row]:
        """Facts of these keys, which are sorted, in their order; all are there."""
        ...

    def drop(self, name: str, keys: Sequence[bytes]) -> None:
        """Take rows out, those that are there: facts, or what no fact refers to any more."""
        ...


class GivenFacts:
    """Facts that are in Python already."""

    def __init__(self, rows: Mapping[str, Sequence[Row]]) -> None:
        from lokakern.registry.schema.tables import COLUMNS

        self.columns: Mapping[str, tuple[str, ...]] = COLUMNS
        self.dimensions: Mapping[str, Mapping[str, Row]] = {
            name: {row[0]: row for row in rows.get(name, ())} for name in DIMENSIONS
        }
        self._facts = {name: rows.get(name, ()) for name in FACTS}
        self._at: dict[str, dict[str, list[Row]]] = {}

    def count(self, name: str, **equal: Value) -> int:
        return sum(1 for _ in self._having(name, equal))

    def has(self, name: str, **equal: Value) -> bool:
        return any(True for _ in self._having(name, equal))

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        return iter(sorted(self._having(name, equal), key=itemgetter(0)))

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterable[Row]:
        places = [self.columns[name].index(column) for column in columns]
        return (tuple(row[place] for place in places) for row in self._having(name, equal))

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        if name not in self._at:
            found: dict[str, list[Row]] = {}
            place = self.columns[name].index("problem")
            for row in self._facts[name]:
                found.setdefault(row[place], []).append(row)
            self._at[name] = found
        return [row for problem in problems for row in self._at[name].get(problem, ())]

    def keys(self, name: str) -> bytes:
        digits = sorted(row[0] for row in self._facts[name])
        for key in digits:
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise DatabaseError(f"{name} row {key!r}: its key is not 64 hex digits; it was "
                                    "edited: leave its file out")  # fmt: skip
        return bytes.fromhex("".join(digits))

    def of_keys(self, name: str, keys: Sequence[bytes]) -> list[Row]:
        wanted = {key.hex() for key in keys}
        found = {row[0]: row for row in self._facts[name] if row[0] in wanted}
        return [found[key.hex()] for key in keys]

    def drop(self, name: str, keys: Sequence[bytes]) -> None:
        dropped = {key.hex() for key in keys}
        if name in DIMENSIONS:
            kept = {k: row for k, row in self.dimensions[name].items() if k not in dropped}
            self.dimensions = {**self.dimensions, name: kept}
            return
        self._facts[name] = [row for row in self._facts[name] if row[0] not in dropped]
        self._at.pop(name, None)

    def _having(self, name: str, equal: Mapping[str, Value]) -> Iterator[Row]:
        places = [(self.columns[name].index(column), value) for column, value in equal.items()]
        for row in self._facts[name]:
            if all(row[place] == value for place, value in places):
                yield row


class UnitedFacts:
    """Facts of several sources, each in one of them only."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.columns = parts[0].columns
        self.dimensions: Mapping[str, Mapping[str, Row]] = {
            name: _one_a_key(name, parts) for name in DIMENSIONS
        }
        self._parts = parts
        for one, other in combinations(parts, 2):
            check_agreement(one, other)
        for name in FACTS:
            for one, other in combinations(parts, 2):
                _make_disjoint(name, one, other)

    def count(self, name: str, **equal: Value) -> int:
        return sum(part.count(name, **equal) for part in self._parts)

    def has(self, name: str, **equal: Value) -> bool:
        return any(part.has(name, **equal) for part in self._parts)

    def rows(self, name: str, **equal: Value) -> Iterator[Row]:
        return heapq.merge(*(part.rows(name, **equal) for part in self._parts), key=itemgetter(0))

    def picked(self, name: str, columns: Sequence[str], **equal: Value) -> Iterable[Row]:
        return chain.from_iterable(part.picked(name, columns, **equal) for part in self._parts)

    def at(self, name: str, problems: Iterable[str]) -> list[Row]:
        wanted = list(problems)
        return [row for part in self._parts for row in part.at(name, wanted)]

    def keys(self, name: str) -> bytes:
        joined = b"".join(part.keys(name) for part in self._parts)
        return np.sort(np.frombuffer(joined, dtype=f"S{KEY_BYTES}")).tobytes()


def united(parts: Sequence[Part]) -> Facts:
    """Facts of several sources as one: a row that two have counts once.

    Raises:
        DatabaseError: One key has two contents.
    """
    return parts[0] if len(parts) == 1 else UnitedFacts(parts or [GivenFacts({})])


def _one_a_key(name: str, parts: Sequence[Facts]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for part in parts:
        for key, row in part.dimensions[name].items():
            if found.setdefault(key, row) != row:
                raise _conflict(name, found[key], row)
    return found


def check_agreement(one: Part, other: Part, source: str = "") -> None:
    """Nothing where two sources have the same content for each key that both have.

    Raises:
        DatabaseError: One key has two contents, the second in `source`.
    """
    for name, a, b in contradictions(one, other):
        raise _conflict(name, a, b, source)


def contradictions(one: Part, other: Part) -> Iterator[tuple[str, Row, Row]]:
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


def has_all(whole: Part, part: Part) -> bool:
    """Whether a source has every row of another, with the same content."""
    for name in DIMENSIONS:
        if not part.dimensions[name].items() <= whole.dimensions[name].items():
            return False
    for name in FACTS:
        keys = part.keys(name)
        both = common_keys(whole.keys(name), keys)
        if len(both) * KEY_BYTES != len(keys):
            return False
        if whole.of_keys(name, both) != part.of_keys(name, both):
            return False
    return True


def unknown_keys(part: Part, name: str, known: Sequence[Part]) -> set[str] | set[bytes]:
    """Keys of a table that no other source has."""
    if name in DIMENSIONS:
        return set(part.dimensions[name]).difference(*(one.dimensions[name] for one in known))
    keys = part.keys(name)
    found = {keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)}
    return found.difference(*(common_keys(keys, one.keys(name)) for one in known))


def set_disputed_apart(parts: Sequence[Part]) -> list[tuple[Part, Part, int]]:
    """Take out of all sources the facts of which two of them have different contents.

    Where two tell different things of a run, all its facts are disputed.

    Returns:
        Which two contradict each other, and in how many rows.
    """
    disputed: dict[str, set[str]] = {name: set() for name in (*DIMENSIONS, *FACTS)}
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
            part.drop(name, [bytes.fromhex(key) for key in sorted(keys)])
        for table in DIMENSIONS:
            part.drop(table, [bytes.fromhex(key) for key in sorted(disputed[table])])
    return pairs


def _make_disjoint(name: str, one: Part, other: Part) -> None:
    """Leave facts that two sources have, in which they agree, in the larger one."""
    keys = {part: part.keys(name) for part in (one, other)}
    small, large = sorted(keys, key=lambda part: len(keys[part]))
    both = common_keys(keys[small], keys[large])
    if both:
        small.drop(name, both)


def common_keys(one: bytes, other: bytes) -> list[bytes]:
    """Keys, which lie sorted, that are among both: 44k among a million in 15 ms."""
    small, large = sorted((one, other), key=len)
    few, many = (np.frombuffer(keys, dtype=f"S{KEY_BYTES}") for keys in (small, large))
    if not len(few):
        return []
    places = np.minimum(np.searchsorted(many, few), len(many) - 1)
    return [
        small[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        for place in np.flatnonzero(many[places] == few).tolist()
    ]


def _conflict(name: str, one: Row, other: Row, source: str = "") -> DatabaseError:
    from lokakern.registry.storage.merge import conflict

    return conflict(name, one, other, source)
