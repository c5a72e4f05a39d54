"""Manifests: JSON beside a database file that describes its content.

The checksum detects damage in transit and identifies a file. It is not a signature: a change of
the file can change the manifest, too. Trust in the origin comes with the source of the checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.errors import DatabaseError
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import now_utc_ms
from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.sqlite_file import SCHEMA_VERSION
from lokakern.types import Device, Environment
from lokakern.version import __version__

if TYPE_CHECKING:
    from lokakern.registry.sharing.untrusted import Foreign
    from lokakern.registry.storage.reader import Rows

FORMAT = "lokakern manifest 1"
ENDING = ".manifest.json"
LARGEST_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a manifest says: see `FIELDS`."""

    format: str
    file: str
    sha256: str
    bytes: int
    rows_digest: str
    schema_version: int
    device: dict[str, Any]
    environments: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    suites: list[str]
    counts: dict[str, int]
    lokakern_version: str
    created_utc_ms: int

    def check_file(self, opened: Foreign) -> None:
        """See that it is the manifest of a file.

        Raises:
            DatabaseError: It is of another.
        """
        pairs = {
            "sha256": (opened.sha256, self.sha256),
            "bytes": (opened.size_bytes, self.bytes),
            "schema_version": (opened.version, self.schema_version),
        }
        _compare(opened.name, pairs)

    def check_counts(self, opened: Foreign, counts: Mapping[str, int]) -> None:
        """See that it knows how many rows a file has.

        Raises:
            DatabaseError: It does not.
        """
        pairs = {f"counts of {name}": (counts[name], self.counts.get(name)) for name in counts}
        _compare(opened.name, pairs)


def _compare(name: str, pairs: Mapping[str, tuple[object, object]]) -> None:
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise DatabaseError(
                f"database {name}: {what} is {found}; expected {expected}, as its manifest says; "
                "one of the two was damaged or edited: ask for both again"
            )


def manifest_of(path: Path, name: str, rows: Rows, digest: str, device: Device) -> Manifest:
    """The manifest of a file that was just written.

    Args:
        path: The file.
        name: What it will be called.
        rows: What it holds.
        digest: `reader.rows_digest` of that.
        device: The GPU type.
    """
    content = path.read_bytes()
    named = {
        table: [dict(zip(COLUMNS[table], row, strict=True)) for row in rows[table]]
        for table in ("environment", "kernel", "run")
    }
    return Manifest(
        format=FORMAT,
        file=name,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        rows_digest=digest,
        schema_version=SCHEMA_VERSION,
        device=asdict(device),
        environments=[asdict(row_keys.from_row(Environment, row)) for row in named["environment"]],
        kernels=[{"name": row["name"], "digest": row["digest"]} for row in named["kernel"]],
        suites=sorted({row["suite"] for row in named["run"]}),
        counts={name: len(rows[name]) for name in TABLES},
        lokakern_version=__version__,
        created_utc_ms=now_utc_ms(),
    )


def place_of(path: Path) -> Path:
    """Where the manifest of a file lies."""
    return path.with_name(path.name + ENDING)


def text_of(manifest: Manifest) -> str:
    """A manifest as it is written."""
    return json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n"


def manifest_beside(path: Path) -> Manifest | None:
    """The manifest beside a file, if there is one.

    Raises:
        DatabaseError: It is none.
    """
    place = place_of(path)
    try:
        if not place.is_file():
            return None
        with place.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise DatabaseError(f"manifest {str(place)!r} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST_BYTES:
        raise DatabaseError(
            f"manifest {str(place)!r} is larger than {LARGEST_BYTES} bytes; ask for it again"
        )
    return parse(content, str(place))


def parse(content: bytes, name: str) -> Manifest:
    """Read the bytes of a manifest; `name` is for errors.

    Raises:
        DatabaseError: It is none, or a field is not what it must be.
    """

    def refuse(words: str) -> DatabaseError:
        return DatabaseError(
            f"manifest {name!r}: {words}; remove it to go without, or ask for it again"
        )

    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is no JSON: {error}") from None
    if not isinstance(found, dict) or found.keys() != FIELDS.keys():
        raise refuse(f"expected an object of {', '.join(FIELDS)}")
    for key, (kind, holds, meaning) in FIELDS.items():
        if type(found[key]) is not kind or not holds(found[key]):
            raise refuse(f"{key} is {repr(found[key])[:100]}; expected {kind.__name__}: {meaning}")
    return Manifest(**found)


def _is_counts(found: dict[str, Any]) -> bool:
    return set(found) == set(TABLES) and all(type(n) is int and n >= 0 for n in found.values())


def _are_objects(names: set[str]) -> Any:
    return lambda found: all(isinstance(row, dict) and set(row) == names for row in found)


def _is_positive(number: int) -> bool:
    return number > 0


# By field: its type in Python, what else holds of it, and what it says.
FIELDS: dict[str, tuple[type, Any, str]] = {
    "format": (str, lambda text: text == FORMAT, f'"{FORMAT}"'),
    "file": (str, lambda text: text and "/" not in text, "name of the file, without its folder"),
    "sha256": (
        str, _DIGEST.fullmatch,
        "SHA-256 of the file's bytes, 64 hex digits; another version of SQLite writes other bytes",
    ),
    "bytes": (int, _is_positive, "size of the file"),
    "rows_digest": (
        str, _DIGEST.fullmatch,
        "SHA-256 of the sorted rows, 64 hex digits: the same in every file of these rows",
    ),
    "schema_version": (int, _is_positive, "version of the tables"),
    "device": (
        dict, lambda row: set(row) == set(COLUMNS["device"]) - {"key"},
        "the GPU type, as in table `device`",
    ),
    "environments": (
        list, _are_objects(set(COLUMNS["environment"]) - {"key"}),
        "software and power limits, as in table `environment`",
    ),
    "kernels": (
        list, _are_objects({"name", "digest"}), "name and digest of the source of each kernel"
    ),
    "suites": (
        list, lambda found: all(isinstance(text, str) for text in found), "suites of the runs"
    ),
    "counts": (dict, _is_counts, "rows, by table"),
    "lokakern_version": (str, lambda _: True, "the lokakern that wrote the file"),
    "created_utc_ms": (int, _is_positive, "when it was written, UTC milliseconds"),
}  # fmt: skip
