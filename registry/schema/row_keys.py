"""Keys of the database: SHA-256 of what makes a row itself; and rows to and from our types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from lokakern.errors import DatabaseError
from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.types import Device, Environment, Format, Granularity, Operand, Problem

T = TypeVar("T")
Value = str | int | float | None
Row = dict[str, Value]

# Identity fields that a later schema adds, by table, with their defaults: at its default such a
# field is left out of the hash, so the keys of older rows stay. Version 1 fields are never here.
ADDED_LATER: dict[str, dict[str, str | int]] = {}

# One run is one process on one machine, so its environment need be part of no identity.
FACT_IDENTITY: dict[str, tuple[str, ...]] = {
    "timing": ("run", "kernel", "problem", "distribution", "device", "environment", "regime"),
    "accuracy": ("run", "kernel", "problem", "distribution", "architecture", "seed"),
    "test_result": ("run", "kernel", "architecture", "suite"),
}


def key_of(table: str, identity: Mapping[str, Value]) -> str:
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
        return key_of(table, {name: row[name] for name in FACT_IDENTITY[table]})
    return key_of(table, {name: value for name, value in row.items() if name != "key"})


def fact_keys(table: str, columns: Mapping[str, Sequence[Value]]) -> list[str]:
    """`row_key` of many facts: a million in 2.5 s instead of 12.

    Args:
        table: Its name.
        columns: Values of the identity's fields, by name; all texts or all integers, nothing NULL.
    """
    names = sorted(("table", *FACT_IDENTITY[table]))
    if table in ADDED_LATER:
        rows = zip(*(columns[name] for name in FACT_IDENTITY[table]), strict=True)
        return [key_of(table, dict(zip(FACT_IDENTITY[table], row, strict=True))) for row in rows]
    words = {"table": json.dumps(table)}
    form = ",".join(f"{json.dumps(name)}:{words.get(name, '%s')}" for name in names)
    form = f"{{{form}}}"
    texts: list[list[str]] = []
    for name in (name for name in names if name != "table"):
        known = {value: json.dumps(value) for value in set(columns[name])}
        texts.append([known[value] for value in columns[name]])
    sha256 = hashlib.sha256
    return [sha256((form % row).encode()).hexdigest() for row in zip(*texts, strict=True)]


def _with_key(table: str, row: Row) -> Row:
    return {"key": row_key(table, row), **row}


def device_row(device: Device) -> Row:
    """The row of a device, with its key."""
    return _with_key("device", asdict(device))


def environment_row(environment: Environment) -> Row:
    """The row of an environment, with its key."""
    return _with_key("environment", asdict(environment))


def kernel_row(kernel: KernelRow) -> Row:
    """The row of a kernel, with its key."""
    return _with_key("kernel", {**asdict(kernel), "modules": ",".join(kernel.modules)})


def problem_row(problem: Problem) -> Row:
    """The row of a problem, with its key."""
    row: Row = {}
    for part in fields(problem):
        value = getattr(problem, part.name)
        if value is None or isinstance(value, (Operand, Format, Granularity)):
            row[part.name] = "none" if value is None else str(value)
        else:
            row[part.name] = int(value) if isinstance(value, bool) else value
    return _with_key("problem", row)


def distribution_row(distribution: DistributionRow) -> Row:
    """The row of a distribution, with its key."""
    row = asdict(distribution)
    return _with_key("distribution", {**row, "realistic": int(distribution.realistic)})


def device_key(device: Device) -> str:
    """Key of a device."""
    return str(device_row(device)["key"])


def environment_key(environment: Environment) -> str:
    """Key of an environment."""
    return str(environment_row(environment)["key"])


def kernel_key(kernel: KernelRow) -> str:
    """Key of a kernel."""
    return str(kernel_row(kernel)["key"])


def problem_key(problem: Problem) -> str:
    """Key of a problem."""
    return str(problem_row(problem)["key"])


def distribution_key(distribution: DistributionRow) -> str:
    """Key of a distribution."""
    return str(distribution_row(distribution)["key"])


def family_key(problem: Problem) -> str:
    """What a problem shares with itself at every other m."""
    return family_of_row(problem_row(problem))


def family_of_row(row: Mapping[str, Value]) -> str:
    """`family_key` of a problem's row."""
    return json.dumps([value for name, value in sorted(row.items()) if name not in {"key", "m"}])


def device_from_row(row: Mapping[str, Value]) -> Device:
    """The device of a row."""
    return _read("device", row, lambda r: Device(**_without_key(r)))


def environment_from_row(row: Mapping[str, Value]) -> Environment:
    """The environment of a row."""
    return _read("environment", row, lambda r: Environment(**_without_key(r)))


def kernel_from_row(row: Mapping[str, Value]) -> KernelRow:
    """The kernel of a row."""

    def build(r: Mapping[str, Any]) -> KernelRow:
        plain = _without_key(r)
        return KernelRow(**{**plain, "modules": tuple(filter(None, plain["modules"].split(",")))})

    return _read("kernel", row, build)


def distribution_from_row(row: Mapping[str, Value]) -> DistributionRow:
    """The distribution of a row."""
    return _read(
        "distribution",
        row,
        lambda r: DistributionRow(r["name"], r["parameters"], bool(r["realistic"])),
    )


def problem_from_row(row: Mapping[str, Value]) -> Problem:
    """The problem of a row.

    Raises:
        DatabaseError: The row is not a problem.
    """

    def build(r: Mapping[str, Any]) -> Problem:
        plain = _without_key(r)
        plain["a"] = Operand.parse(plain["a"])
        plain["b"] = None if plain["b"] == "none" else Operand.parse(plain["b"])
        plain["out_format"] = Format(plain["out_format"])
        plain["out_granularity"] = Granularity(plain["out_granularity"])
        for name in ("prepared", "out_strided", "accumulate"):
            plain[name] = bool(plain[name])
        return Problem(**plain)

    return _read("problem", row, build)


def _without_key(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "key"}


def _read(table: str, row: Mapping[str, Value], build: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        return build(row)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DatabaseError(
            f"{table} row {row.get('key')!r} cannot be read: {error}; was it written by a newer "
            "lokakern?"
        ) from None
