"""Import and merge foreign files: all or nothing, the sources unchanged.

`quarantine.py` beside this file puts imported rows into quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lokakern.errors import DatabaseError
from lokakern.registry.quarantine import QuarantinedFile
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.sharing.download import DIGEST
from lokakern.registry.sharing.quarantine import add_to_quarantine
from lokakern.registry.sharing.untrusted import GUARDS, Foreign, Guards, open_guarded
from lokakern.registry.sharing.validate import Checked, check
from lokakern.registry.snapshot.facts import Facts, check_agreement, image_of
from lokakern.registry.sqlite_file import shown
from lokakern.registry.staleness import is_current
from lokakern.registry.storage import paths
from lokakern.registry.storage.merge import (
    MergeReport,
    Part,
    add_to_file,
    merge_checked,
    publish_grown,
    write_union,
)
from lokakern.registry.storage.reader import Rows, Source, read_tables, resolve
from lokakern.registry.storage.writer import locked


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did, by table.

    Attributes:
        added: Rows that were new.
        known: Rows that were there.
        shipped: Rows that were not, and that the shipped files have.
        left_out: Rows to which no measurement refers.
        changed_kernels: Kernels of the file whose source differs here.
        contradicted: Quarantined files with other contents of the same rows, with the first
            difference. One of the two was edited, and dispatch reads such rows of neither.
    """

    added: dict[str, int]
    known: dict[str, int]
    shipped: dict[str, int]
    left_out: dict[str, int]
    changed_kernels: tuple[str, ...]
    contradicted: tuple[tuple[QuarantinedFile, str], ...] = ()


def import_file(
    path: Path,
    target: Path,
    *,
    trusted: bool = False,
    sha256: str | None = None,
    guards: Guards = GUARDS,
) -> ImportReport:
    """Add the measurements of a file to a database.

    Args:
        path: The file; a manifest beside it has to agree.
        target: What it is added to; made if it is missing.
        trusted: Whether rows go into the database at once, as if measured here; else they go
            into quarantine (`registry.quarantine`).
        sha256: The expected checksum of the file, in hex.
        guards: Bounds on the cost of reading the file.

    Raises:
        DatabaseError: The file is not what it was said to be, cannot be read, holds what no row
            may, or contradicts the target or the shipped files. The target is as it was.
    """
    with open_guarded(path, guards) as opened:
        _check_sha256(opened, sha256)
        checked = check(opened)
        part = Part(opened.name, opened.copy, opened.version, checked.used)
        left_out = dict.fromkeys(TABLES, 0) | {
            name: len(rows) - len(checked.used[name]) for name, rows in checked.dimensions.items()
        }
        brought = {name: checked.counts[name] - left_out[name] for name in TABLES}
        contradicted: tuple[tuple[QuarantinedFile, str], ...] = ()
        shipped = dict.fromkeys(TABLES, 0)
        if trusted:
            added = _add(part, target)
        else:
            added, shipped, contradicted = add_to_quarantine(part, brought, target)
    known = {name: brought[name] - added[name] - shipped[name] for name in TABLES}
    return ImportReport(added, known, shipped, left_out, _changed(checked), contradicted)


def _check_sha256(opened: Foreign, sha256: str | None) -> None:
    if sha256 is None:
        return
    if not DIGEST.fullmatch(sha256.lower()):
        raise DatabaseError(f"the checksum is {sha256!r}; expected --sha256 with 64 hex digits")
    if sha256.lower().removeprefix("sha256:") != opened.sha256:
        raise DatabaseError(
            f"database {opened.name} has SHA-256 {opened.sha256}; expected {sha256} (--sha256); it "
            "was changed or is another file: ask for it again"
        )


def _add(part: Part, target: Path) -> dict[str, int]:
    """Add a part to a file.

    Returns:
        How many rows were new to it, by table.
    """
    with locked(target) as target:
        for path in paths.shipped_databases():  # reading both would fail ever after
            check_agreement(image_of(path), image_of(part.path), part.name)
        return add_to_file(target, [part])


def _changed(checked: Checked) -> tuple[str, ...]:
    rows = [
        dict(zip(COLUMNS["kernel"], row, strict=True))
        for number, row in checked.dimensions["kernel"].items()
        if number in checked.used["kernel"]
    ]
    kernels = [row_keys.from_row(KernelRow, row) for row in rows]
    return tuple(sorted({kernel.name for kernel in kernels if not is_current(kernel)}))


def merge_files(sources: Sequence[Source], out: Source, *, guards: Guards = GUARDS) -> MergeReport:
    """Write the union of databases into a new one.

    The order of the sources does not matter, nor whether one is there twice: the rows are the
    same, and with one version of SQLite the bytes.

    Args:
        sources: Files or URLs; never changed.
        out: A file that is not there, or the URL of a server, to which the rows are added.
        guards: Bounds on the cost of reading each source.

    Returns:
        Rows of the union, by table, and how many more the sources had together.

    Raises:
        DatabaseError: A source cannot be read or holds what no row may, one key has two contents,
            or `out` is there. Nothing was written.
    """
    place = resolve(out)
    if not isinstance(place, Path):
        return merge_checked({source: read_foreign(source, guards) for source in sources}, place)
    if any(_is_same(source, place) for source in sources):
        raise DatabaseError(
            f"merge: {shown(place)} is one of the sources, which stay as they are; expected the "
            "name of a new file"
        )
    _refuse_existing(place)
    has: dict[str, int] = {}
    with locked(place, once=True) as place, ExitStack() as stack:
        _refuse_existing(place)
        parts, brought = [], dict.fromkeys(TABLES, 0)
        for source in sources:
            opened = stack.enter_context(open_guarded(source, guards))
            checked = check(opened)
            brought = {name: brought[name] + checked.counts[name] for name in TABLES}
            parts.append(Part(opened.name, opened.copy, opened.version))
        publish_grown(place, lambda temporary: has.update(write_union(temporary, parts)))
    return MergeReport(has, {name: brought[name] - has[name] for name in TABLES})


def _is_same(source: Source, place: Path) -> bool:
    found = resolve(source)
    return isinstance(found, Path) and found.exists() and place.exists() and found.samefile(place)


def _refuse_existing(place: Path) -> None:
    if place.exists():
        raise DatabaseError(
            f"merge: {shown(place)} is there; expected the name of a new file; remove it, or add "
            "to it with `import --into`"
        )


def read_foreign(source: Source, guards: Guards = GUARDS) -> Rows:
    """Every row of a foreign database, as `reader.read_rows` gives them.

    Raises:
        DatabaseError: It cannot be read, or has an invalid row.
    """
    with checked_file(source, guards) as (opened, _):
        return read_tables(opened.connection, opened.version)


@contextmanager
def checked_file(source: Source, guards: Guards = GUARDS) -> Iterator[tuple[Foreign, Checked]]:
    """An open foreign database with every row checked.

    Raises:
        DatabaseError: It cannot be read, or has an invalid row.
    """
    with open_guarded(source, guards) as opened:
        yield opened, check(opened)


def union_of(trusted: Sequence[Source], foreign: Sequence[Source]) -> Facts:
    """The union of trusted and foreign databases in memory.

    Raises:
        DatabaseError: One cannot be read, has an invalid row, or contradicts another.
    """
    parts = [image_of(source) for source in trusted]
    for source in foreign:
        with checked_file(source) as (opened, _):
            parts.append(image_of(opened.copy))
            parts[-1].name = opened.name
    return Facts(parts)
