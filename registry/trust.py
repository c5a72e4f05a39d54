"""Measurements of others, until some of them were measured again here.

They wait in the folder NAME.imports beside a database: a file of each import, by its checksum, in a
folder that says how far it is trusted. `lokakern.bench.verify` moves it on, into the database in
the end. Dispatch reads what waits, and says so; what was rejected it does not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lokakern.errors import DatabaseError
from lokakern.registry.files import FACTS, KEY_BYTES

if TYPE_CHECKING:
    from lokakern.registry.facts import Part


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


def imports_folder(database: Path) -> Path:
    """Where imports into a database wait."""
    real = Path(os.path.realpath(database))
    return real.with_name(real.name + ".imports")


def waiting_for(database: Path, tiers: tuple[Tier, ...] = WAITING) -> list[Waiting]:
    """Imports of a database, by tier and name."""
    folder = imports_folder(database)
    return [
        Waiting(path, tier) for tier in tiers for path in sorted((folder / tier).glob("*.sqlite"))
    ]


def place_for(database: Path, sha256: str) -> Path:
    """Where the import of a file waits, by its checksum.

    Raises:
        DatabaseError: It was imported before, and rejected.
    """
    folder = imports_folder(database)
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


class Doubts:
    """Which facts of several sources wait, row by row: a file may add rows to a run that is known.

    Args:
        trusted: Sources that are.
        waiting: Others, with their tiers. What a trusted source has too is trusted.
    """

    def __init__(self, trusted: Sequence[Part] = (), waiting: Sequence[tuple[Tier, Part]] = ()):
        self._keys = {
            name: [
                (tier, _without(_array(part.keys(name)), [_array(t.keys(name)) for t in trusted]))
                for tier in reversed(WAITING)  # whose errors hold, before it is doubted elsewhere
                for its_tier, part in waiting
                if its_tier is tier
            ]
            for name in FACTS
        }

    def __bool__(self) -> bool:
        return any(len(keys) for found in self._keys.values() for _, keys in found)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what waits and how far it is trusted."""
        digest = hashlib.sha256()
        for name, found in sorted(self._keys.items()):
            for tier, keys in sorted(found, key=lambda pair: (pair[0], pair[1].tobytes())):
                digest.update(f"{name} {tier} {len(keys)}".encode() + keys.tobytes())
        return digest.hexdigest()

    def tier_of(self, name: str, key: str) -> str:
        """The tier of a fact, by its key as hex digits; "" if it is trusted."""
        asked = np.frombuffer(bytes.fromhex(key), dtype=_KEY)
        for tier, keys in self._keys[name]:
            if len(keys) and len(_places_of(asked, keys)):
                return tier
        return ""


_KEY = np.dtype(f"S{KEY_BYTES}")
_Keys = np.ndarray[tuple[int], np.dtype[np.bytes_]]


def _array(keys: bytes) -> _Keys:
    return np.frombuffer(keys, dtype=_KEY)


def _places_of(some: _Keys, many: _Keys) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Places of those of some keys that are among many, which are sorted."""
    places = np.minimum(np.searchsorted(many, some), max(len(many) - 1, 0))
    return np.flatnonzero(many[places] == some) if len(many) else np.flatnonzero([])


def _without(keys: _Keys, others: Sequence[_Keys]) -> _Keys:
    for other in others:
        keys = np.delete(keys, _places_of(keys, other))
    return keys
