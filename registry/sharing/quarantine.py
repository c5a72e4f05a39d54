"""Moves of imported rows: into quarantine, and out of it when they were measured again.

`lokakern.registry.quarantine` says where the quarantine of a database is, and which rows are in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lokakern.errors import DatabaseError
from lokakern.registry.locks import private_folder
from lokakern.registry.quarantine import QuarantinedFile, Tier, place_for, quarantined_files
from lokakern.registry.schema.tables import TABLES
from lokakern.registry.snapshot.facts import (
    Image,
    check_agreement,
    has_all,
    image_of,
    unknown_keys,
)
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage import paths
from lokakern.registry.storage.merge import Part, add_to_file, own_part, write_union
from lokakern.registry.storage.reader import Rows
from lokakern.registry.storage.writer import (
    locked,
    publish,
    replace_file,
    synchronize,
    write_file,
)


def add_to_quarantine(
    part: Part, brought: Mapping[str, int], database: Path
) -> tuple[dict[str, int], dict[str, int], tuple[tuple[QuarantinedFile, str], ...]]:
    """Put a part into the quarantine of a database, unless all of it is known.

    Contradictions with quarantined files do not prevent that: `verify` finds out which of two was
    edited.

    Returns:
        How many rows are new, by table, how many only the shipped files have, and the quarantined
        files that contradict them.
    """
    with locked(database) as place, private_folder() as folder:
        alone = folder / "alone.sqlite"
        write_union(alone, [part])
        _check_rejected(alone, place)
        with alone.open("rb") as file:
            target = place_for(place, hashlib.file_digest(file, "sha256").hexdigest())
        own = [image_of(path) for path in ([place] if place.exists() else [])]
        shipped = {path: image_of(path) for path in paths.shipped_databases()}
        for image in (*own, *shipped.values()):
            check_agreement(image, image_of(alone), part.name)
        read_too = [shipped[path] for path in paths.shipped_with(place)]
        contradicted = []
        for quarantined in quarantined_files(place):
            with suppress(DatabaseError):  # dispatch leaves out unreadable files, too
                others = image_of(quarantined.path)
                try:
                    check_agreement(others, image_of(alone), part.name)
                    own.append(others)
                except DatabaseError as error:
                    contradicted.append((quarantined, str(error)))
        here, added = (
            {name: len(unknown_keys(image_of(alone), name, known)) for name in TABLES}
            if known
            else dict(brought)
            for known in (own, [*own, *read_too])
        )
        if any(added.values()) and not target.exists():
            _make_folder(target.parent)
            publish(target, lambda temporary: shutil.copyfile(alone, temporary))
    return added, {name: here[name] - added[name] for name in TABLES}, tuple(contradicted)


def _check_rejected(alone: Path, database: Path) -> None:
    """Refuse a file with all rows of a rejected one.

    A file with only some of its rows may be its origin and is accepted.

    Raises:
        DatabaseError: It has all rows of a rejected file.
    """
    for rejected in quarantined_files(database, Tier.REJECTED):
        if has_all(image_of(alone), image_of(rejected.path)):
            raise DatabaseError(
                f"import: all rows of {str(rejected.path)!r}, {rejected.since}, are in the file; "
                "`verify` rejected them, because some disagree with what was measured here; leave "
                "them out, or, to try them again, remove that file"
            )


def trusted_rows(
    quarantined: QuarantinedFile, trusted: Iterable[Path]
) -> tuple[dict[Path, int], str]:
    """How many facts of a quarantined file each trusted one has; those of two, the first.

    Returns:
        Numbers of facts, and the first contradiction in words, or "".

    Raises:
        DatabaseError: A file cannot be read.
    """
    part = image_of(quarantined.path)
    known: list[Image] = []
    unknown = [sum(len(unknown_keys(part, name, known)) for name in FACTS)]
    counts = {}
    for path in trusted:
        known.append(image_of(path))
        try:
            check_agreement(known[-1], part)
        except DatabaseError as error:
            return {}, f"it contradicts {path.name}: {error}"
        unknown.append(sum(len(unknown_keys(part, name, known)) for name in FACTS))
        counts[path] = unknown[-2] - unknown[-1]
    return {path: count for path, count in counts.items() if count}, ""


def settle(
    quarantined: QuarantinedFile,
    database: Path,
    accepted: Rows,
    left: Rows,
    known: Rows | None = None,
) -> None:
    """Move rows of an import into its database; the rest stays in quarantine.

    If the process is killed in between, the file stays in quarantine as it was, and its rows that
    are in the database are trusted.

    Args:
        quarantined: The quarantined file.
        database: The database of the import.
        accepted: Rows to move.
        left: Those that were not repeated. Without facts the file is removed.
        known: Those that trusted files have. They are moved, too, unless dispatch reads these files
            with the database.

    Raises:
        DatabaseError: Another process settled it, or a row contradicts the database.
    """
    with locked(database) as place:
        _check_quarantined(quarantined)
        moved = [accepted, *([known] if known and not paths.shipped_with(place) else [])]
        moved = [rows for rows in moved if any(rows[name] for name in FACTS)]
        with private_folder() as folder:
            parts = []
            for number, rows in enumerate(moved):
                write_file(folder / f"{number}.sqlite", rows)
                parts.append(own_part(folder / f"{number}.sqlite"))
            if parts:
                add_to_file(place, parts)
        if any(left[name] for name in FACTS):
            replace_file(quarantined.path, left)
        else:
            quarantined.path.unlink()
            synchronize(quarantined.path.parent)


def reject(quarantined: QuarantinedFile, database: Path) -> Path:
    """Move a quarantined file to a place that dispatch does not read.

    Raises:
        DatabaseError: Another process settled it, or it cannot be moved.
    """
    with locked(database):
        _check_quarantined(quarantined)
        target = quarantined.path.parent.parent / Tier.REJECTED / quarantined.path.name
        _make_folder(target.parent)
        os.replace(quarantined.path, target)
        return target


def _check_quarantined(quarantined: QuarantinedFile) -> None:
    if not quarantined.path.exists():
        raise DatabaseError(
            f"import {quarantined.name} is not in quarantine any more: another `verify` moved it; "
            "nothing was changed"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"folder {str(folder)!r} cannot be made: {error.strerror}; choose another database "
            "(--into, LOKAKERN_DB)"
        ) from None
