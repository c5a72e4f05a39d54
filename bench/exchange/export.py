"""Export a database file to ship, without rows that kernel changes made stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lokakern.errors import DatabaseError
from lokakern.progress import tell
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.manifest import manifest_of, place_of, text_of
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.snapshot.facts import Facts
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import without_unused
from lokakern.registry.storage.reader import Rows, rows_digest
from lokakern.registry.storage.writer import locked, publish, synchronize, write_file
from lokakern.types import Device

_OF_A_RUN = frozenset({"key", "run", "measured_utc_ms"})


def export(merged: Rows | Facts, target: Path, device: Device) -> dict[str, int]:
    """Write the measurements of a GPU type and of current kernels into a new file.

    The file leaves out facts of changed kernels and of other devices, and all rows that no
    remaining fact refers to. The other rows are unchanged. A manifest goes beside the file.

    Args:
        merged: Rows of all source databases.
        target: The file; an existing file is replaced.
        device: The GPU type.

    Returns:
        The number of facts left out, by table.

    Raises:
        DatabaseError: No rows are left, or the file cannot be written.
    """
    tell("exporting", 0)
    rows = merged.as_rows() if isinstance(merged, Facts) else merged
    tell("exporting", 0.2)
    kept = current_rows(rows, device)
    tell("exporting", 0.6)
    if not any(kept[name] for name in FACTS):
        raise DatabaseError(
            f"export: no measurement on {device} is of current kernels; sweep first"
        )
    with locked(target, once=True) as target:

        def write_manifest(beside: Path) -> None:
            def write(temporary: Path) -> None:
                write_file(temporary, kept)
                tell("exporting", 0.8)
                manifest = manifest_of(temporary, target.name, kept, rows_digest(kept), device)
                beside.write_text(text_of(manifest), "utf-8")
                synchronize(beside)

            publish(target, write)

        # Both are written before either is renamed. The file comes first: an import refuses it
        # with the manifest of another file.
        publish(place_of(target), write_manifest)
    tell("exporting", 1)
    return {name: len(rows[name]) - len(kept[name]) for name in FACTS}


def current_rows(rows: Rows, device: Device) -> Rows:
    """Rows of a device and of kernels whose source has not changed."""
    where = {"device": row_keys.key_of(device), "architecture": device.architecture}
    kernels = {
        row[0]
        for row in rows["kernel"]
        if is_current(row_keys.from_row(KernelRow, named("kernel", row)))
    }
    kept: Rows = {}
    for name in FACTS:
        kept[name] = [
            row
            for row in rows[name]
            if (fact := named(name, row)).get("kernel") in (None, *kernels)
            and all(fact[column] == value for column, value in where.items() if column in fact)
        ]
    kept["accuracy"] = _without_repetitions(kept["accuracy"])
    return without_unused(kept, rows)


def _without_repetitions(errors: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of errors that are equal in all but the run and the time, the newest.

    A kernel's errors at a seed are the same in each sweep: of 32,219 in an earlier file of the
    H200, 2080 were repetitions, of 170 bytes each in a compressed file.
    """
    newest: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    columns = COLUMNS["accuracy"]
    values = [place for place, column in enumerate(columns) if column not in _OF_A_RUN]
    time = columns.index("measured_utc_ms")
    for row in errors:
        known = tuple(row[place] for place in values)
        if known not in newest or row[time] > newest[known][time]:
            newest[known] = row
    kept = set(newest.values())
    return [row for row in errors if row in kept]


def named(table: str, row: tuple[Any, ...]) -> dict[str, Any]:
    """The values of a row by column."""
    return dict(zip(COLUMNS[table], row, strict=True))
