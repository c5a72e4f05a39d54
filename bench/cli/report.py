"""The command `report`: the measurements of a device, or the verdicts on a Probe file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors
from lokakern.errors import DatabaseError


@says_errors
def report(
    probe: Annotated[
        Path | None,
        typer.Option(help="A file of `Probe.save` to judge. Default: report on a device."),
    ] = None,
    budget: options.Budget = 0.06,
    device: options.Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report as a self-contained page, FILE.html.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write the pictures of a device into this folder.")
    ] = None,
    db: options.Database = None,
    no_shipped: options.NoShipped = False,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """Show the measurements of a device: fastest kernels, errors, bounds, coverage and staleness.

    The output is a page with pictures (--out), the pictures (--png), or a table of dispatch's
    choices within the budget. With --probe, judge the GEMMs that a Probe observed instead: where
    FP8 is safe and fast, why, and what would change the verdict. The recorded rows are replayed
    here, on a GPU with its kernels, elsewhere by emulation.
    """
    if probe is not None and png is not None:
        raise typer.BadParameter("goes with a device, not with --probe", param_hint="--png")
    with reading(db, no_shipped=no_shipped):
        if probe is None:
            _of_device(device, budget, out, png, how)
        else:
            _of_probe(probe, budget, device, out, how)


def _of_device(
    name: str | None, budget: float, out: Path | None, png: Path | None, how: OutputFormat
) -> None:
    from lokakern.bench.report import charts
    from lokakern.bench.report.survey import BUDGETS, survey_of
    from lokakern.render.terminal import TerminalProgress, print_rows
    from lokakern.selection.dispatcher import device_named, snapshot

    if out is not None or png is not None:
        charts.vl_convert()  # fails here if it is not installed
    with TerminalProgress() as progress:
        device = device_named(name)
        survey = survey_of(snapshot(), device, {*BUDGETS, budget}, progress)
        if not survey.choices:
            raise DatabaseError(
                f"nothing was timed on {device.product}; measure with `python -m lokakern.bench "
                'sweep`, or choose another device with --device, such as "NVIDIA H200"'
            )
        undecided = survey.undecided_words(f"{budget:g}")
        if png is not None:
            count = charts.save_pictures(survey, png, progress)
            progress.note(f"{png}: {count} pictures")
        if out is not None:
            from lokakern.bench.report.survey_page import page_of  # Jinja

            page = page_of(survey)
            with options.writing(out):
                out.write_text(page, encoding="utf-8")
            say(f"{out}: {len(survey.ops)} ops of {survey.device.product}, "
                f"{len(page.encode()) / 1e6:.1f} MB; times: {survey.totals['times']}, by file: "
                f"{survey.totals['times by file']}; "
                f"errors: {survey.totals['errors']}")  # fmt: skip
    if out is None and png is None:
        columns = ["op", "form", "m", "n", "k", "kernel", "us", "plain_us", "speedup", "row_err",
                   "answer", "undecided", "note"]  # fmt: skip
        rows = [row for row in survey.choices if row["budget"] == f"{budget:g}"]
        print_rows([{name: row[name] for name in columns} for row in rows], how)
        say(f"times by file: {survey.totals['times by file']}")
    if undecided:
        say(f"undecided: {undecided}")


def _of_probe(
    probe: Path, budget: float, device: str | None, out: Path | None, how: OutputFormat
) -> None:
    from lokakern.probe import files
    from lokakern.probe.report import ProbeReport
    from lokakern.render.terminal import print_rows

    found = ProbeReport.of(files.load(probe), budget=budget, device=device)
    if out is not None:
        with options.writing(out):
            found.save_page(out)
        say(f"{out}: {len(found.verdicts)} GEMMs of {len(found.sites)} sites")
    elif how is OutputFormat.JSON:
        print(found.to_json())
    elif how is OutputFormat.CSV:
        print_rows(found.rows(), "csv")
    else:
        found.table()
