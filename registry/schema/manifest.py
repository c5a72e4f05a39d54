"""Manifests: JSON beside a database file that describes its content.

The checksum detects damage in transit and identifies a file. It is not a signature: a change of
the file can change the manifest, too. Trust in the origin comes with the source of the checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from lokakern.errors import DatabaseError
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import now_utc_ms
from lokakern.registry.schema.tables import COLUMNS, TABLES, tables_of
from lokakern.registry.sqlite_file import SCHEMA_VERSION
from lokakern.types import Device, Environment
from lokakern.version import __version__

if TYPE_CHECKING:
    from lokakern.registry.storage.reader import Rows

ENDING = ".manifest.json"
LARGEST_BYTES = 4 << 20
_DIGEST = r"^[0-9a-f]{64}\Z"


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a manifest; the descriptions of its fields are in registry/README.md."""

    format: Annotated[Literal["lokakern manifest 1"], Meta(description='"lokakern manifest 1"')]
    file: Annotated[
        str,
        Meta(
            pattern=r"^[^/]+\Z",
            description="name under which it was written, without its folder; not compared: the "
            "two may be renamed together",
        ),
    ]
    sha256: Annotated[
        str,
        Meta(
            pattern=_DIGEST,
            description="SHA-256 of the file's bytes, 64 hex digits; another version of SQLite "
            "writes other bytes",
        ),
    ]
    bytes: Annotated[int, Meta(gt=0, description="size of the file")]
    rows_digest: Annotated[
        str,
        Meta(
            pattern=_DIGEST,
            description="SHA-256 of the sorted rows, 64 hex digits: the same in every file of "
            "these rows",
        ),
    ]
    schema_version: Annotated[int, Meta(gt=0, description="version of the tables")]
    device: Annotated[dict[str, Any], Meta(description="the GPU type, as in table `device`")]
    environments: Annotated[
        list[dict[str, Any]],
        Meta(description="software and power limits, as in table `environment`"),
    ]
    kernels: Annotated[
        list[dict[str, Any]], Meta(description="name and digest of the source of each kernel")
    ]
    suites: Annotated[list[str], Meta(description="suites of the runs")]
    counts: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(description="rows, by table")]
    lokakern_version: Annotated[str, Meta(description="the lokakern that wrote the file")]
    created_utc_ms: Annotated[int, Meta(gt=0, description="when it was written, UTC milliseconds")]

    def __post_init__(self) -> None:
        device, environment = ({*COLUMNS[name]} - {"key"} for name in ("device", "environment"))
        for name, found, expected in (
            ("device", [self.device], device),
            ("environments", self.environments, environment),
            ("kernels", self.kernels, {"name", "digest"}),
            ("counts", [self.counts], set(tables_of(self.schema_version))),
        ):
            if any(row.keys() != expected for row in found):
                raise ValueError(f"{name} must have the fields {', '.join(sorted(expected))}")

    def check_file(self, name: str, sha256: str, size_bytes: int) -> None:
        """See that it is the manifest of a file, whose rows may still be damaged.

        Raises:
            DatabaseError: It is of another.
        """
        _compare(name, {"sha256": (sha256, self.sha256), "bytes": (size_bytes, self.bytes)})

    def check_content(self, name: str, version: int, counts: Mapping[str, int]) -> None:
        """See that it knows the schema version and how many rows a file has.

        Raises:
            DatabaseError: It does not.
        """
        pairs = {f"counts of {table}": (n, self.counts.get(table)) for table, n in counts.items()}
        _compare(name, {"schema_version": (version, self.schema_version), **pairs})


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
        format="lokakern manifest 1",
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
    return json.dumps(structs.asdict(manifest), indent=1, allow_nan=False) + "\n"


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
    try:
        return msgspec.json.decode(content, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise DatabaseError(
            f"manifest {name!r}: it is invalid JSON or has an invalid field: {str(error)!r}; "
            "remove it to go without, or ask for it again"
        ) from None
