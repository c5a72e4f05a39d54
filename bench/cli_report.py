"""The command `report`: what a Probe learned, judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.options import (
    BudgetOption,
    DatabaseOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    reading,
    say,
    says_errors,
)
from lokakern.errors import DatabaseError


@says_errors
def report(
    probe: Annotated[Path, typer.Option(help="What `Probe.save` wrote.")],
    budget: BudgetOption = 0.06,
    device: Annotated[
        str | None,
        typer.Option(help='Whose times count, such as "NVIDIA H200". Default: the GPU here.'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write everything as a page, FILE.html, that needs nothing else."),
    ] = None,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Judge the GEMMs that a Probe saw: where FP8 is safe and fast, why, and what would change it.

    What was learned is replayed here, on a GPU by its kernels, elsewhere by emulation.
    """
    from lokakern.bench.report import print_rows
    from lokakern.probe import files
    from lokakern.probe.report import ProbeReport

    sites = files.load(probe)
    with reading(db):
        found = ProbeReport.of(sites, budget=budget, device=device)
    if out is not None:
        try:
            found.save_page(out)
        except OSError as error:
            raise DatabaseError(f"{str(out)!r} cannot be written: {error.strerror}") from error
        say(f"{out}: {len(found.verdicts)} GEMMs of {len(found.sites)} sites")
    elif as_json or how is OutputFormat.JSON:
        print(json.dumps(found.content(), indent=2, allow_nan=False))
    elif how is OutputFormat.CSV:
        print_rows(found.rows(), "csv")
    else:
        found.table()
