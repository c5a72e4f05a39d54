"""The commands `export`, `import`, `merge` and `diff`, which copy and compare databases."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import ExitCode, OutputFormat, say, says_errors


class Limit(StrEnum):
    """Comparable errors."""

    ROW_ERR = "row_err"
    ROW_P99 = "row_p99"
    REL_ERR = "rel_err"
    MEAN_REL_ERR = "mean_rel_err"
    MEAN_SHIFT = "mean_shift"


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


@says_errors
def export(
    target: Annotated[str, typer.Argument(help="File to write.")],
    device: Annotated[str, typer.Option(help='GPU type, such as "NVIDIA H200".')],
    db: Annotated[
        list[str] | None,
        typer.Option("--db", help="Source database; repeatable. Default: shipped ones and yours."),
    ] = None,
) -> None:
    """Write the measurements of a GPU type and of current kernels into a file to share.

    TARGET.manifest.json beside it lists the contents, with the checksum.
    """
    from lokakern.bench.exchange.export import export as export_rows
    from lokakern.registry.schema.manifest import place_of
    from lokakern.registry.sharing.import_file import union_of
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.registry.storage.paths import shipped_databases, user_database

    user = user_database()
    given = [options.source_of(text) for text in db] if db else [user] if user.exists() else []
    rows = union_of([] if db else shipped_databases(), given)  # checks the rows of other users
    path = Path(target).expanduser()
    found = Snapshot(rows).find_device(device)
    left_out = export_rows(rows, path, found)
    words = ", ".join(f"{count} {name} rows" for name, count in left_out.items())
    say(f"{path}: {path.stat().st_size / 2**20:.2f} MiB of {found}; left out, of changed kernels "
         f"or other devices, or repeated: {words}; manifest {place_of(path).name}")  # fmt: skip


@says_errors
def import_(
    source: Annotated[str, typer.Argument(help="A file, or an http(s) URL (needs --sha256).")],
    sha256: Annotated[
        str | None, typer.Option(help="Required SHA-256 of the file, 64 hex digits.")
    ] = None,
    db: Annotated[
        str | None, typer.Option("--db", "--into", help="Target database. Default: yours.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Accept your own file without `verify`.")
    ] = False,
) -> None:
    """Add the measurements of another user's file to your database: all rows, or none.

    Every row is checked. Imported rows are quarantined in DATABASE.imports, and dispatch uses them
    with caution and marks them until `verify` has repeated some of the measurements. It reads those
    of $LOKAKERN_DB, or else of the user's database; `--db` reads none. A manifest beside the file
    must match it. Rows that no measurement refers to are left out.
    """
    from lokakern.registry.locks import private_folder
    from lokakern.registry.quarantine import imports_folder
    from lokakern.registry.schema.manifest import place_of
    from lokakern.registry.sharing.download import download, is_url
    from lokakern.registry.sharing.import_file import import_file
    from lokakern.registry.sharing.untrusted import GUARDS
    from lokakern.registry.storage.paths import user_database

    target = options.file_of(db, "--db") if db is not None else user_database()
    with private_folder() as folder:
        if is_url(source):
            path = download(source, sha256, folder, largest_bytes=GUARDS.largest_bytes)
        else:
            path = options.file_of(source, "import")
        report = import_file(path, target, trusted=trust, sha256=sha256)
    shipped = _words(report.shipped)
    in_shipped = "" if shipped == "nothing" else f"in the shipped files already: {shipped}; "
    say(f"{target}: added {_words(report.added)}; there already: {_words(report.known)}; "
        f"{in_shipped}left out, unreferenced: {_words(report.left_out)}")  # fmt: skip
    if not any((*report.added.values(), *report.known.values())) and not target.exists():
        say(f"{target} is not written: dispatch reads these rows from the shipped files")
    if any(report.added.values()) and not trust:
        where = ""
        if target.resolve() != user_database().resolve():
            where = f", with LOKAKERN_DB={shlex.quote(str(target))} (`--db` does not read them),"
        say(f"they are quarantined in {imports_folder(target)} and count with caution{where} until "
            "`verify` has repeated some of the measurements")  # fmt: skip
    if sha256 is None and not place_of(path).exists():
        say(f"no {place_of(path).name} beside it, and no --sha256: damage that leaves a possible "
            "value is not noticed")  # fmt: skip
    for other, words in report.contradicted:
        say(f"{other.path}, {other.since}, is quarantined too and differs in the same rows, "
            "which dispatch ignores in both files: run `verify`, or remove the edited file "
            f"({words.split('; ')[0]})")  # fmt: skip
    if report.changed_kernels:
        say(f"not used by dispatch here, because the kernel source differs: "
             f"{', '.join(report.changed_kernels)}")  # fmt: skip


@says_errors
def merge(
    out: Annotated[str, typer.Option(help="New file, or URL of a server to add to.")],
    databases: Annotated[
        list[str] | None, typer.Argument(help="Files, or SQLAlchemy URLs.")
    ] = None,
    db: Annotated[
        list[str] | None, typer.Option("--db", help="One more database; repeatable.")
    ] = None,
) -> None:
    """Write the union of databases into a new one, independent of their order."""
    from lokakern.registry.sharing.import_file import merge_files

    given = [*(databases or ()), *(db or ())]
    if not given:
        raise typer.BadParameter("expected a database or more", param_hint="DATABASES")
    report = merge_files([options.source_of(text) for text in given], options.source_of(out))
    say(f"{out}: {_words(report.added)}; duplicates: {_words(report.known)}")


@says_errors
def diff(
    a: Annotated[str | None, typer.Argument(help="Database: a path or an SQLAlchemy URL.")] = None,
    b: Annotated[str | None, typer.Argument(help="Another one. Default: the same.")] = None,
    device: Annotated[str | None, typer.Option(help="Only this GPU type.")] = None,
    from_device: Annotated[str | None, typer.Option(help="GPU type of A.")] = None,
    to_device: Annotated[str | None, typer.Option(help="GPU type of B.")] = None,
    before: Annotated[
        str | None, typer.Option(help="A ends before this date: 2026-01-31[T12:00], UTC.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="B starts at this date. Default: --before.")
    ] = None,
    limit: Annotated[Limit, typer.Option(help="Error to compare.")] = Limit.ROW_ERR,
    everything: Annotated[
        bool, typer.Option("--all", help="Include rows that are equal within noise.")
    ] = False,
    db: Annotated[
        str | None, typer.Option("--db", help="Database A; the only argument is then B.")
    ] = None,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """List rows that are faster, slower, less accurate or missing in B, beyond noise, worst first.

    Errors are compared at the seeds that both have; where one has all rows of the other, as a
    merged file has, nothing changed. The first line counts the rows and runs that both files have,
    and those of them that differ, the first three of which are named. JSON is an object: `shared`
    has the counts of the first line, `different` those rows, `cells` the list. The exit code is 7
    if any of these rows differs, as in an edited or damaged copy, else 6 if anything is slower,
    less accurate or fails in B, else 0.
    """
    from lokakern.bench.compare.diff import (
        WORSE,
        Side,
        counts_of,
        differences,
        rows_of,
        shared_by,
    )
    from lokakern.registry.sharing.import_file import read_foreign
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.render import terminal

    if db is not None:
        if b is not None:
            raise typer.BadParameter("goes with one database, or none", param_hint="--db")
        a, b = db, a
    if a is None:
        raise typer.BadParameter("expected a database", param_hint="A")
    given = (("--before", before), ("--after", after))
    dates = [_utc_ms(text, option) for option, text in given if text is not None]
    devices = (from_device, to_device) != (None, None)
    if b is None and not dates and not devices:
        raise typer.BadParameter("expected a second database, --from-device with --to-device, or "
                                 "--before", param_hint="B")  # fmt: skip
    if devices and (device is not None or None in (from_device, to_device)):
        raise typer.BadParameter("go together, and without --device",
                                 param_hint="--from-device, --to-device")  # fmt: skip
    until, since = (dates[0], dates[-1]) if dates else (math.inf, -math.inf)
    first = read_foreign(options.source_of(a))
    second = first if b is None else read_foreign(options.source_of(b))
    kinds = [
        None if name is None else Snapshot(rows).find_device(name)
        for rows, name in ((first, from_device or device), (second, to_device or device))
    ]
    one, other = Side(first, kinds[0], until_ms=until), Side(second, kinds[1], since)
    shared = None if b is None else shared_by(first, second)
    if shared is not None:
        say(str(shared))
    found = differences(one, other, limit=limit.value)
    shown = [d for d in found if everything or d.verdict != "same"]
    if how is OutputFormat.JSON:
        facts = {"shared": None, "different": []} if shared is None else shared.facts()
        facts["cells"] = rows_of(shown, one, other, brief=False)
        print(json.dumps(facts, indent=2, allow_nan=False))
    elif how is OutputFormat.CSV:
        terminal.print_rows(rows_of(shown, one, other, brief=False), how)
    for what in ("time_us", limit.value):
        cells = [d for d in shown if d.what == what]
        if how is OutputFormat.TABLE and cells:
            printed = rows_of(cells[: options.MOST_ROWS], one, other, brief=True)
            terminal.print_rows(printed, how, title=what)
            if len(printed) < len(cells):
                say(f"and {len(cells) - len(printed)} more: --format csv or json prints all")
        counts = counts_of(d for d in found if d.what == what)
        if count := sum(counts.values()):
            say(f"{count} cell{'s' * (count > 1)} of {what}: {_words(counts)}")
    if not found:
        say("no cells: neither has times or errors")
    if shared is not None and shared.different:
        raise typer.Exit(ExitCode.EDITED)
    if any(d.verdict in WORSE for d in found):
        raise typer.Exit(ExitCode.WORSE)


def _utc_ms(text: str, option: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a date; expected one such as 2026-01-31 or "
                                 "2026-01-31T12:00", param_hint=option) from None  # fmt: skip
    zoned = found if found.tzinfo else found.replace(tzinfo=UTC)
    return zoned.timestamp() * 1000
