"""The quarantine of imported measurements, until some of them are measured again here.

It is the folder NAME.imports beside a database: one file for each import, named by its content, in
a folder for each tier of trust. `lokakern.bench.exchange.verify` moves rows that hold into the
database. Dispatch reads quarantined files and marks their rows; it does not read rejected ones.
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
    """The trust in rows that were not measured here."""

    UNVERIFIED = "unverified"
    REJECTED = "rejected"  # repeated measurements disagree


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    """A file in quarantine, or a rejected one."""

    path: Path
    tier: Tier

    @property
    def name(self) -> str:
        """The first digits of the checksum of the import."""
        return self.path.stem

    @property
    def since(self) -> str:
        """The time of the import."""
        try:
            when = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        except OSError:  # verified meanwhile
            return "not there any more"
        return f"imported {when:%Y-%m-%d %H:%M} UTC"


def imports_folder(database: Path) -> Path:
    """The quarantine of a database."""
    real = Path(os.path.realpath(database))
    return real.with_name(real.name + ".imports")


def quarantined_files(database: Path, tier: Tier = Tier.UNVERIFIED) -> list[QuarantinedFile]:
    """The quarantined imports of a database, by name."""
    folder = imports_folder(database) / tier
    return [QuarantinedFile(path, tier) for path in sorted(folder.glob("*.sqlite"))]


def place_for(database: Path, sha256: str) -> Path:
    """The place of an import in quarantine, by the SHA-256 of a file of its rows alone."""
    return imports_folder(database) / Tier.UNVERIFIED / f"{sha256[:16]}.sqlite"


class QuarantinedRows:
    """The quarantined facts of several sources, by row: a file may add rows to a known run.

    Args:
        trusted: Trusted sources. Their rows are trusted even if a quarantined file has them too.
        quarantined: Quarantined sources.
    """

    def __init__(self, trusted: Sequence[Image] = (), quarantined: Sequence[Image] = ()) -> None:
        self._keys = {
            name: [
                without(key_array(part.keys(name)), [key_array(t.keys(name)) for t in trusted])
                for part in quarantined
            ]
            for name in FACTS
        }

    def __bool__(self) -> bool:
        return any(len(keys) for found in self._keys.values() for keys in found)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the quarantined facts."""
        digest = hashlib.sha256()
        for name, found in sorted(self._keys.items()):
            for keys in sorted(found, key=lambda keys: keys.tobytes()):
                digest.update(f"{name} {len(keys)}".encode() + keys.tobytes())
        return digest.hexdigest()

    def count(self, name: str, keys: Iterable[str]) -> int:
        """The number of quarantined ones among facts, given by distinct keys as hex digits."""
        asked = key_array(bytes.fromhex("".join(keys)))
        return len(asked) - len(without(np.sort(asked), self._keys[name]))

    def tier_of(self, name: str, key: str) -> str:
        """The tier of a fact, by its key as hex digits; "" if it is trusted."""
        asked = np.frombuffer(bytes.fromhex(key), dtype=_KEY)
        is_quarantined = any(len(keys) and len(places_of(asked, keys)) for keys in self._keys[name])
        return Tier.UNVERIFIED if is_quarantined else ""


_KEY = np.dtype(f"S{KEY_BYTES}")
Keys = np.ndarray[tuple[int], np.dtype[np.bytes_]]


def key_array(keys: bytes) -> Keys:
    """Keys that lie one after the other, as an array."""
    return np.frombuffer(keys, dtype=_KEY)


def places_of(some: Keys, many: Keys) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The places of the keys in `some` that are in `many`, which is sorted."""
    places = np.minimum(np.searchsorted(many, some), max(len(many) - 1, 0))
    return np.flatnonzero(many[places] == some) if len(many) else np.flatnonzero([])


def without(keys: Keys, others: Sequence[Keys]) -> Keys:
    """Sorted keys without those in `others`."""
    for other in others:
        keys = np.delete(keys, places_of(keys, other))
    return keys
