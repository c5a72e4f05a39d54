"""The command `verify`: whether measurements of others can be believed here."""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.options import (
    FormatOption,
    JsonOption,
    OutputFormat,
    say,
    says_errors,
    source_of,
)
from lokakern.errors import DatabaseError

if TYPE_CHECKING:
    from lokakern.bench.verify import Verdict

REJECTED_EXIT = 6


@says_errors
def verify(
    db: Annotated[
        str | None,
        typer.Option("--db", help="Database that was imported into. Default: the user's."),
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Problems whose times are measured again, and errors.")
    ] = 24,
    seed: Annotated[
        int | None, typer.Option(help="Which ones. Default: nobody can foresee it.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which nothing new is begun, for each file."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Measure some rows of imported files again: files that hold join the database.

    Others are rejected (exit code 6). Errors can be verified anywhere, by emulation; times on the
    same GPU type only.
    """
    from lokakern import selection
    from lokakern.bench import report
    from lokakern.bench.plan import harness_digest
    from lokakern.bench.verify import verify as measure_again
    from lokakern.registry.merging import merge_rows
    from lokakern.registry.store import RunFile, user_database
    from lokakern.registry.trust import Tier, move, waiting_for

    found = source_of(db) if db else user_database()
    if not isinstance(found, Path):
        raise DatabaseError("--db: a server has no imports that wait; expected a path")
    files = waiting_for(found)
    if not files:
        say(f"{found}: no import waits to be verified")
        return
    if seed is None:
        seed = secrets.randbits(32)
    rejected, printed = False, []
    for waiting in files:
        run = RunFile.create(
            found, suite="verify", harness_digest=harness_digest(),
            command=f"python -m lokakern.bench verify --count {count} --seed {seed}",
        )  # fmt: skip
        with run, report.TerminalProgress(quiet=quiet) as progress:
            verdict, rows = measure_again(
                run, waiting, count=count, seed=seed, time_limit_s=time_limit, progress=progress
            )
        if verdict.tier is None:
            merge_rows([rows], found)
            waiting.path.unlink()
        elif verdict.tier is not waiting.tier:
            move(waiting, verdict.tier)
        rejected |= verdict.tier is Tier.REJECTED
        printed += _rows_of(verdict)
        _tell(verdict)
    selection.use_snapshot(None)
    report.print_rows(printed, "json" if as_json else how.value)
    say(f"drawn with --seed {seed}")
    if rejected:
        raise typer.Exit(REJECTED_EXIT)


def _tell(verdict: Verdict) -> None:
    from lokakern.registry.trust import Tier

    numbers = f"{len(verdict.measured)} rows measured again"
    words = {
        None: "verified: it is in the database now",
        Tier.ERRORS: "its errors hold, its times wait for the same GPU type",
        Tier.UNVERIFIED: "still waits",
        Tier.REJECTED: "rejected: dispatch does not read it",
    }[verdict.tier]
    say(f"{verdict.name}: {words} ({numbers})")
    for reason in verdict.reasons:
        say(f"  {reason}")


def _ratio(here: float | str, there: float) -> float | None:
    if isinstance(here, str) or not there > 0 or not math.isfinite(here / there):
        return None
    return here / there


def _rows_of(verdict: Verdict) -> list[dict[str, Any]]:
    return [
        {
            "file": verdict.name,
            "what": row.what,
            "there": row.there,
            "here": "infinite" if here == math.inf else here,
            "here_over_there": _ratio(here, row.there),
            "kernel": row.kernel,
            "measured": row.here,
            "problem": str(row.problem),
            "distribution": row.distribution,
        }
        for row, here in verdict.measured
    ]
