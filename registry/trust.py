"""Measurements of others, until some of them were measured again here.

They wait in the folder NAME.imports beside a database: a file of each import, by its checksum, in a
folder that says how far it is trusted. `lokakern.bench.verify` moves it on, into the database in
the end. Dispatch reads what waits, and says so; what was rejected it does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lokakern.errors import DatabaseError
from lokakern.registry.reader import Source, resolve


class Tier(StrEnum):
    """How far rows are trusted that nobody measured here."""

    UNVERIFIED = "unverified"
    ERRORS = "errors"  # errors were measured again here; times cannot be, on another GPU
    REJECTED = "rejected"  # what was measured again disagrees


WAITING = (Tier.UNVERIFIED, Tier.ERRORS)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that waits."""

    path: Path
    tier: Tier

    @property
    def name(self) -> str:
        """The first digits of the checksum of what was imported."""
        return self.path.stem


def imports_folder(database: Source) -> Path | None:
    """Where imports into a database wait; None for a server's, which has no files beside it."""
    place = resolve(database)
    if not isinstance(place, Path):
        return None
    real = Path(os.path.realpath(place))
    return real.with_name(real.name + ".imports")


def waiting_for(database: Source, tiers: tuple[Tier, ...] = WAITING) -> list[Waiting]:
    """Imports of a database, by tier and name."""
    folder = imports_folder(database)
    if folder is None:
        return []
    return [
        Waiting(path, tier) for tier in tiers for path in sorted((folder / tier).glob("*.sqlite"))
    ]


def place_for(database: Path, sha256: str) -> Path:
    """Where the import of a file waits, by its checksum.

    Raises:
        DatabaseError: It was imported before, and rejected.
    """
    folder = imports_folder(database)
    assert folder is not None
    name = f"{sha256[:16]}.sqlite"
    rejected = folder / Tier.REJECTED / name
    if rejected.exists():
        raise DatabaseError(
            f"import: this file was rejected by `verify`, because it disagrees with what was "
            f"measured here; to try it again remove {str(rejected)!r}"
        )
    known = [folder / tier / name for tier in WAITING]
    return next((path for path in known if path.exists()), known[0])


def move(waiting: Waiting, tier: Tier) -> Path:
    """Put a file that waits into another tier."""
    target = waiting.path.parent.parent / tier / waiting.path.name
    target.parent.mkdir(exist_ok=True)
    os.replace(waiting.path, target)
    return target
