"""Measurements of others, until some of them were measured again here.

They wait in the folder NAME.imports beside a database: a file of each import, by its content, in a
folder that says how far it is trusted. `lokakern.bench.exchange.verify` moves what holds into the
database. Dispatch reads what waits, and says so; what was rejected it does not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lokakern.registry.sqlite_file import FACTS, KEY_BYTES

if TYPE_CHECKING:
    from lokakern.registry.snapshot.facts import Image


class Tier(StrEnum):
    """How far rows are trusted that nobody measured here."""

    UNVERIFIED = "unverified"
    REJECTED = "rejected"  # what was measured again disagrees


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that waits, or was rejected."""

    path: Path
    tier: Tier

    @property
    def name(self) -> str:
        """The first digits of the checksum of what was imported."""
        return self.path.stem

    @property
    def since(self) -> str:
        """When it was put there."""
        try:
            when = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        except OSError:  # verified meanwhile
            return "not there any more"
        return f"imported {when:%Y-%m-%d %H:%M} UTC"


def imports_folder(database: Path) -> Path:
    """Where imports into a database wait."""
    real = Path(os.path.realpath(database))
    return real.with_name(real.name + ".imports")


def waiting_for(database: Path, tier: Tier = Tier.UNVERIFIED) -> list[Waiting]:
    """Imports of a database, by name."""
    folder = imports_folder(database) / tier
    return [Waiting(path, tier) for path in sorted(folder.glob("*.sqlite"))]


def place_for(database: Path, sha256: str) -> Path:
    """Where an import into a database waits, by the SHA-256 of its rows as they lie alone."""
    return imports_folder(database) / Tier.UNVERIFIED / f"{sha256[:16]}.sqlite"


class Doubts:
    """Which facts of several sources wait, row by row: a file may add rows to a run that is known.

    Args:
        trusted: Sources that are. What they have is trusted, whoever has it too.
        waiting: Others.
    """

    def __init__(self, trusted: Sequence[Image] = (), waiting: Sequence[Image] = ()) -> None:
        self._keys = {
            name: [
                without(key_array(part.keys(name)), [key_array(t.keys(name)) for t in trusted])
                for part in waiting
            ]
            for name in FACTS
        }

    def __bool__(self) -> bool:
        return any(len(keys) for found in self._keys.values() for keys in found)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what waits."""
        digest = hashlib.sha256()
        for name, found in sorted(self._keys.items()):
            for keys in sorted(found, key=lambda keys: keys.tobytes()):
                digest.update(f"{name} {len(keys)}".encode() + keys.tobytes())
        return digest.hexdigest()

    def count(self, name: str, keys: Iterable[str]) -> int:
        """How many of some facts wait, by their keys as hex digits, each there once."""
        asked = key_array(bytes.fromhex("".join(keys)))
        waiting = without(np.sort(asked), self._keys[name])
        return len(asked) - len(waiting)

    def tier_of(self, name: str, key: str) -> str:
        """The tier of a fact, by its key as hex digits; "" if it is trusted."""
        asked = np.frombuffer(bytes.fromhex(key), dtype=_KEY)
        waits = any(len(keys) and len(places_of(asked, keys)) for keys in self._keys[name])
        return Tier.UNVERIFIED if waits else ""


_KEY = np.dtype(f"S{KEY_BYTES}")
Keys = np.ndarray[tuple[int], np.dtype[np.bytes_]]


def key_array(keys: bytes) -> Keys:
    """Keys that lie one after the other, as an array."""
    return np.frombuffer(keys, dtype=_KEY)


def places_of(some: Keys, many: Keys) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Places of those of some keys that are among many, which are sorted."""
    places = np.minimum(np.searchsorted(many, some), max(len(many) - 1, 0))
    return np.flatnonzero(many[places] == some) if len(many) else np.flatnonzero([])


def without(keys: Keys, others: Sequence[Keys]) -> Keys:
    """Keys, sorted, but for those that others have."""
    for other in others:
        keys = np.delete(keys, places_of(keys, other))
    return keys
