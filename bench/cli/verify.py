"""The command `verify`: repeats some measurements of imported files."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import ExitCode, OutputFormat, say, says_errors
from lokakern.errors import DatabaseError

if TYPE_CHECKING:
    from lokakern.bench.exchange.remeasure import Row
    from lokakern.bench.exchange.verify import Verdict


@says_errors
def verify(
    context: typer.Context,
    db: Annotated[
        str | None, typer.Option("--db", help="Database with imports. Default: yours.")
    ] = None,
    count: Annotated[
        int,
        typer.Option(
            min=1, help="Problems to time again, and errors to repeat; at least 3 per kind."
        ),
    ] = 24,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the selection. Default: unpredictable.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds per file after which no new work begins."),
    ] = None,
    quiet: options.Quiet = False,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """Repeat some measurements of imported files, and accept the rows that hold.

    A file with rows that do not hold, or that contradicts the shipped files or the database, is
    rejected as a whole (exit code 6). Errors can be verified anywhere, by emulation, and times on
    the same GPU type only. Other rows stay quarantined. Rows that the shipped files or the database
    have already are counted, not repeated.
    """
    from lokakern.bench.exchange.verify import Verdict
    from lokakern.bench.exchange.verify import verify as measure_again
    from lokakern.registry.quarantine import imports_folder, quarantined_files
    from lokakern.registry.sharing.quarantine import reject, settle, trusted_rows
    from lokakern.registry.snapshot.loading import load_snapshot
    from lokakern.registry.storage.paths import user_database
    from lokakern.registry.storage.run_files import RunFile
    from lokakern.render import terminal
    from lokakern.selection import dispatcher
    from lokakern.sweep.plan import harness_digest

    first = "import it first: python -m lokakern.bench import"
    for given in context.args:  # which other commands refuse without a remedy
        words = f"verify repeats rows of imported files: {first} {given}"
        raise typer.BadParameter(words, param_hint=repr(given))
    found = options.file_of(db, "--db") if db else user_database()
    files = quarantined_files(found)
    if not files:
        words = f"{found}: no quarantined imports, so that nothing was verified"
        is_imported_into = imports_folder(found).exists()
        if db is not None and not is_imported_into:  # perhaps the file is meant to be verified
            raise DatabaseError(f"{words}; to verify a file, {first} {found}")
        say(words)
        return
    if seed is None:
        seed = secrets.randbits(32)
    rejected, failed, printed = False, False, []
    for quarantined in files:
        command = f"python -m lokakern.bench verify --count {count} --seed {seed}"
        trusted = options.with_shipped(found)
        try:
            known, contradiction = trusted_rows(quarantined, trusted)
            if contradiction:
                verdict = Verdict(quarantined.name, rejected=True, reasons=[contradiction])
            else:
                run = RunFile.create(
                    found, suite="verify", harness_digest=harness_digest(), command=command
                )
                with run, terminal.TerminalProgress(quiet=quiet) as progress:
                    verdict = measure_again(
                        run, quarantined, load_snapshot(trusted), count=count, seed=seed,
                        time_limit_s=time_limit, progress=progress,
                    )  # fmt: skip
            if verdict.rejected:
                reject(quarantined, found)
            else:
                settle(quarantined, found, verdict.accepted, verdict.left, verdict.known)
        except DatabaseError as error:  # the other files may be good
            say(f"{quarantined.path} cannot be verified: {error}; remove it, and import it again")
            failed = True
            continue
        finally:
            dispatcher.use_snapshot(None)
        rejected |= verdict.rejected
        printed += _rows_of(verdict)
        _tell(verdict, known, found)
    terminal.print_rows(printed, how)
    if printed:
        say(f"drawn with --seed {seed}")
    if rejected:
        raise typer.Exit(ExitCode.WORSE)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _tell(verdict: Verdict, known: Mapping[Path, int], database: Path) -> None:
    from lokakern.registry.sqlite_file import FACTS
    from lokakern.registry.storage.paths import shipped_databases, shipped_with

    accepted, left = (
        sum(len(rows.get(name, ())) for name in FACTS) for rows in (verdict.accepted, verdict.left)
    )
    if verdict.rejected:
        words = "rejected: dispatch does not read it"
    elif not (accepted or left):
        words = "nothing to verify: all rows are known"
    elif not left:
        words = f"verified: {accepted} rows are in the database now"
    elif accepted:
        words = f"verified in part: {accepted} rows are in the database now, {left} are quarantined"
    else:
        words = f"still quarantined: {left} rows"
    cells = {row.cell for row, _ in verdict.measured}
    say(f"{verdict.name}: {words} ({len(cells)} measured again)")
    shipped = [path for path in known if path in shipped_databases()]
    for path, count in known.items():
        name = f"{path.name} (shipped)" if path in shipped else path.name
        say(f"  {count} rows are in {name} already, and were not measured again")
    is_read_too = shipped_with(Path(os.path.realpath(database)))
    if shipped and not verdict.rejected and not is_read_too:
        say(f"  the shipped ones are in {database} now, too")
    for reason in verdict.reasons:
        say(f"  {reason}")


def _rows_of(verdict: Verdict) -> list[dict[str, Any]]:
    return [
        {
            "file": verdict.name,
            **_worst(row, here),
            "kernel": row.kernel,
            "measured": row.here,
            "problem": str(row.problem),
            "distribution": row.distribution,
        }
        for row, here in {row.cell: (row, here) for row, here in verdict.measured}.values()
    ]


def _worst(row: Row, here: dict[str, float] | str) -> dict[str, Any]:
    """The column with the largest ratio, and its values there and here."""
    column, there = row.there[0]
    if isinstance(here, str):
        return {"what": column, "there": there, "here": here, "here_over_there": None}
    ratios = {name: here[name] / value for name, value in row.there if value > 0}
    column = max(ratios, key=lambda name: ratios[name], default=column)
    ratio = ratios.get(column)
    value = here[column]
    return {
        "what": column,
        "there": dict(row.there)[column],
        "here": "infinite" if value == math.inf else value,
        "here_over_there": None if ratio is None or not math.isfinite(ratio) else ratio,
    }
