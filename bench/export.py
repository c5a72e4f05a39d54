"""Export: a database file to ship, without what later changes of kernels made stale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lokakern.errors import DatabaseError
from lokakern.registry import identity
from lokakern.registry.freshness import is_current
from lokakern.registry.merging import read_checked, union
from lokakern.registry.reader import Rows, Source
from lokakern.registry.tables import COLUMNS, DIMENSIONS, FACTS, REFERENCES
from lokakern.registry.writer import locked, replace_file
from lokakern.types import Device


def export(sources: Sequence[Source], target: Path, device: Device) -> dict[str, int]:
    """Write what databases hold of a GPU type and of kernels as they are now into a new file.

    Left out are facts of kernels whose source changed since, and of other devices; then whatever
    no fact refers to. The rows that stay are as they were.

    Args:
        sources: Database files or URLs; never changed.
        target: The file; what was there before is replaced.
        device: The GPU type.

    Returns:
        How many facts were left out, by table.

    Raises:
        DatabaseError: A source cannot be read, sources contradict each other, or nothing is left.
    """
    merged = union([read_checked(source) for source in sources])
    kept = current_rows(merged, device)
    if not any(kept[name] for name in FACTS):
        raise DatabaseError(
            f"export: nothing was measured on {device} of kernels as they are now; sweep first"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(target.name + ".lock")):
        replace_file(target, kept)
    return {name: len(merged[name]) - len(kept[name]) for name in FACTS}


def current_rows(rows: Rows, device: Device) -> Rows:
    """Rows of a device and of kernels whose source is as it was when they were measured."""
    where = {"device": identity.device_key(device), "architecture": device.architecture}
    kernels = {
        row[0]
        for row in rows["kernel"]
        if is_current(identity.kernel_from_row(_named("kernel", row)))
    }
    kept: Rows = {}
    for name in FACTS:
        kept[name] = [
            row
            for row in rows[name]
            if (fact := _named(name, row))["kernel"] in kernels
            and all(fact[column] == value for column, value in where.items() if column in fact)
        ]
    for name in DIMENSIONS:
        used = {
            row[place]
            for fact in FACTS
            for place, table in REFERENCES[fact].items()
            if table == name
            for row in kept[fact]
        }
        kept[name] = [row for row in rows[name] if row[0] in used]
    return kept


def _named(table: str, row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(COLUMNS[table], row, strict=True))
