"""Keys of the database: SHA-256 of what makes a row itself; and rows to and from our types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from lokakern.errors import DatabaseError
from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.types import Device, Environment, Format, Granularity, Operand, Problem

Entity = Device | Environment | KernelRow | Problem | DistributionRow
T = TypeVar("T", bound=Entity)
Value = str | int | float | None
Row = dict[str, Value]

# By table, the type that its rows stand for.
ENTITIES: dict[str, type[Entity]] = {
    "device": Device,
    "environment": Environment,
    "kernel": KernelRow,
    "problem": Problem,
    "distribution": DistributionRow,
}
TABLE_OF: dict[type, str] = {kind: table for table, kind in ENTITIES.items()}

# Identity fields that a later schema adds, by table, with their defaults: at its default such a
# field is left out of the hash, so the keys of older rows stay. Version 1 fields are never here.
ADDED_LATER: dict[str, dict[str, str | int]] = {}

# One run is one process on one machine, so its environment need be part of no identity.
FACT_IDENTITY: dict[str, tuple[str, ...]] = {
    "timing": ("run", "kernel", "problem", "distribution", "device", "environment", "regime"),
    "accuracy": ("run", "kernel", "problem", "distribution", "architecture", "seed"),
    "test_result": ("run", "kernel", "architecture", "suite"),
    "host_cost": ("run", "device", "environment", "cpu", "regime", "call", "language", "path"),
}


def identity_key(table: str, identity: Mapping[str, Value]) -> str:
    """SHA-256, in hex, of a row's identity fields.

    Raises:
        DatabaseError: A field is NULL or a float, which have no one text.
    """
    later = ADDED_LATER.get(table, {})
    kept: dict[str, str | int] = {"table": table}
    for name, value in identity.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise DatabaseError(
                f"identity of a {table} row: {name} is {value!r}; expected text or an integer "
                '(unknown is "unknown")'
            )
        if name not in later or value != later[name]:
            kept[name] = value
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def row_key(table: str, row: Mapping[str, Value]) -> str:
    """The key that a row of that table must have; a run's is given, not computed."""
    if table == "run":
        key = row["key"]
        if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{32}", key):
            raise DatabaseError(f"run {key!r} is not a UUID in hex")
        return key
    if table in FACT_IDENTITY:
        return identity_key(table, {name: row[name] for name in FACT_IDENTITY[table]})
    return identity_key(table, {name: value for name, value in row.items() if name != "key"})


def fact_keys(table: str, columns: Mapping[str, Sequence[Value]]) -> list[str]:
    """`row_key` of many facts: a million in 2.5 s instead of 12.

    Args:
        table: Its name.
        columns: Values of the identity's fields, by name; all texts or all integers, nothing NULL.
    """
    names = sorted(("table", *FACT_IDENTITY[table]))
    if table in ADDED_LATER:
        rows = zip(*(columns[name] for name in FACT_IDENTITY[table]), strict=True)
        return [
            identity_key(table, dict(zip(FACT_IDENTITY[table], row, strict=True))) for row in rows
        ]
    words = {"table": json.dumps(table)}
    form = ",".join(f"{json.dumps(name)}:{words.get(name, '%s')}" for name in names)
    form = f"{{{form}}}"
    texts: list[list[str]] = []
    for name in (name for name in names if name != "table"):
        known = {value: json.dumps(value) for value in set(columns[name])}
        texts.append([known[value] for value in columns[name]])
    sha256 = hashlib.sha256
    return [sha256((form % row).encode()).hexdigest() for row in zip(*texts, strict=True)]


def row_of(entity: Entity) -> Row:
    """The row of a device, environment, kernel, problem or distribution, with its key."""
    row = {part.name: _plain(getattr(entity, part.name)) for part in fields(entity)}
    return {"key": row_key(TABLE_OF[type(entity)], row), **row}


def _plain(value: Any) -> Value:
    if value is None:
        return "none"
    if isinstance(value, (Operand, Format, Granularity)):
        return str(value)
    if isinstance(value, tuple):
        return ",".join(value)
    plain: Value = int(value) if isinstance(value, bool) else value
    return plain


def key_of(entity: Entity) -> str:
    """The key of the row of a device, environment, kernel, problem or distribution."""
    return str(row_of(entity)["key"])


def family_key(problem: Problem) -> str:
    """What a problem shares with itself at every other m."""
    row = row_of(problem)
    return json.dumps([value for name, value in sorted(row.items()) if name not in {"key", "m"}])


def from_row(kind: type[T], row: Mapping[str, Value]) -> T:
    """The inverse of `row_of`, for one of `ENTITIES`.

    Raises:
        DatabaseError: The row is none of that kind.
    """
    try:
        given: dict[str, Any] = {
            name: _READ[name](value) if name in _READ else value
            for name, value in row.items()
            if name != "key"
        }
        return kind(**given)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DatabaseError(
            f"{TABLE_OF[kind]} row {row.get('key')!r} cannot be read: {error}; was it written by "
            "a newer lokakern?"
        ) from None


# By column, the conversion from its value; others are equal in both.
_READ: dict[str, Callable[[Any], Any]] = {
    "modules": lambda text: tuple(filter(None, text.split(","))),
    "a": Operand.parse,
    "b": lambda text: None if text == "none" else Operand.parse(text),
    "out_format": Format,
    "out_granularity": Granularity,
    **dict.fromkeys(("prepared", "out_strided", "accumulate", "realistic"), bool),
}
