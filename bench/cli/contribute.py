"""The command `contribute`: measures a GPU type and writes the file to send to others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import ExitCode, say, says_errors
from lokakern.bench.cli.sweep import Errors, sweep
from lokakern.bench.cli.verify import verify

# Of the time limit, for repeating measurements: 24 problems and as many errors.
VERIFY_SHARE = 0.1
FEWEST_VERIFY_S = 60.0


@says_errors
def contribute(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: the GPU type, such as nvidia-b200.sqlite."),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="Suite: a name from `list suites`, or a .toml file.")
    ] = "lrm",
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds for everything; run again to resume.")
    ] = 1200.0,
    db: options.Database = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure the GPU here and write a file for others: sweep, verify and export in one command.

    The sweep compiles first, on all cores, and resumes where an earlier one stopped. Then the file
    is imported into a scratch database and some of its measurements are repeated, as whoever gets
    it will do; one that does not hold is not written (exit code 6). Your database keeps all rows.
    """
    from lokakern.bench.exchange.export import current_rows, export
    from lokakern.device import current_device
    from lokakern.registry.locks import private_folder
    from lokakern.registry.schema.manifest import place_of
    from lokakern.registry.sharing.import_file import import_file, union_of
    from lokakern.registry.sqlite_file import FACTS
    from lokakern.registry.storage.paths import user_database

    begun, device = time.monotonic(), current_device()
    name = re.sub(r"[^a-z0-9]+", "-", device.product.lower()).strip("-")
    place = (out or Path(f"{name}.sqlite")).expanduser()
    if not place.parent.is_dir():  # said now, not in 20 minutes
        raise typer.BadParameter(f"no folder {str(place.parent)!r}", param_hint="--out")
    source = db or str(user_database())
    if place.is_dir() or place.resolve() == Path(source).expanduser().resolve():
        what = "a folder" if place.is_dir() else "the database, which would lose rows"
        raise typer.BadParameter(f"{str(place)!r} is {what}: name a new file", param_hint="--out")
    swept = _code_of(sweep, suite=suite, errors=Errors.NEEDED, db=source, quiet=quiet,
                     time_limit=(1 - VERIFY_SHARE) * time_limit)  # fmt: skip
    rows = union_of([], [options.source_of(source)]).as_rows()
    if swept is ExitCode.TIME_LIMIT and not any(map(current_rows(rows, device).get, FACTS)):
        say(f"nothing was measured within {time_limit:g} s, so that no file is written: run again "
            "with a longer --time-limit")  # fmt: skip
        raise typer.Exit(ExitCode.TIME_LIMIT)
    with private_folder() as folder:
        sent, received = folder / "sent.sqlite", folder / "received.sqlite"
        export(rows, sent, device)
        import_file(sent, received)
        left_s = max(time_limit - (time.monotonic() - begun), FEWEST_VERIFY_S)
        verified = _code_of(
            verify, context=context, db=str(received), time_limit=left_s, quiet=quiet
        )
        if verified is ExitCode.WORSE:
            say(f"measurements did not repeat, so that no file is written: measure again with "
                f"`sweep --suite {suite} --fresh{f' --db {db}' if db else ''}` when nothing else "
                "uses the GPU")  # fmt: skip
            raise typer.Exit(ExitCode.WORSE)
    export(rows, place, device)
    say(f"send {place} ({place.stat().st_size / 2**20:.2f} MiB) and {place_of(place).name}: the "
        f"type {device}, versions of software, times and errors, and no names or paths of this "
        f"machine. Who gets them runs `python -m lokakern.bench import {place.name}`, then "
        "`verify`")  # fmt: skip
    if swept is ExitCode.TIME_LIMIT:
        say("not all was measured: the file is good as it is, and the same command adds the rest")
    if swept is not ExitCode.DONE:
        raise typer.Exit(swept)


def _code_of(command: Callable[..., Any], **given: Any) -> ExitCode:
    """Run a command; those that could not do their work end this one, too."""
    try:
        command(**given)
    except typer.Exit as ended:
        code = ExitCode(ended.exit_code)
        if code in (ExitCode.FAILED, ExitCode.WRONG_USAGE, ExitCode.INTERRUPTED):
            raise
        return code
    return ExitCode.DONE
