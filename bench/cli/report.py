"""The command `report`: the measurements of a device, or the verdicts on a Probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lokakern.bench.cli.options import (
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

if TYPE_CHECKING:
    from lokakern.bench.report.survey import Survey


@says_errors
def report(
    probe: Annotated[
        Path | None,
        typer.Option(help="A file of `Probe.save`. Default: report on a device."),
    ] = None,
    budget: BudgetOption = 0.06,
    device: Annotated[
        str | None,
        typer.Option(help='Device of the times, such as "NVIDIA H200". Default: this GPU.'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained page, FILE.html."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Write the pictures of a device as PNG into this folder."),
    ] = None,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Report the measurements of a device: winning kernels, errors, limits, coverage, staleness.

    Writes a page (--out) or its pictures (--png); by default prints a table of dispatch's choices
    within the budget. With --probe, reports on the GEMMs of a Probe instead: where FP8 is safe and
    fast, why, and what would change the verdict. Their operands are replayed with the kernels of
    this GPU, or without a GPU by emulation.
    """
    how = OutputFormat.JSON if as_json else how
    if probe is None:
        _of_device(device, budget, out, png, db, how)
    elif png is not None:
        raise typer.BadParameter("goes with a device, not with --probe", param_hint="--png")
    else:
        _of_probe(probe, budget, device, out, db, how)


def _of_device(
    name: str | None,
    budget: float,
    out: Path | None,
    png: Path | None,
    db: str | None,
    how: OutputFormat,
) -> None:
    from lokakern.bench.report import charts
    from lokakern.bench.report.survey import BUDGETS, survey_of
    from lokakern.device import current_device
    from lokakern.render.terminal import TerminalProgress, print_rows
    from lokakern.selection.dispatcher import snapshot

    if out is not None or png is not None:
        charts.vl_convert()  # raises before the work if it is missing
    with reading(db), TerminalProgress() as progress:
        facts = snapshot()
        device = current_device() if name is None else facts.find_device(name)
        survey = survey_of(facts, device, {*BUDGETS, budget}, progress)
        if not survey.choices:
            raise DatabaseError(
                f"nothing was timed on {device.product}; measure with `python -m lokakern.bench "
                'sweep`, or name another with --device, such as "NVIDIA H200"'
            )
        if png is not None:
            count = charts.save_pictures(survey, png, progress)
            progress.note(f"{png}: {count} pictures")
        if out is not None:
            _write_page(survey, out)
    if out is None and png is None:
        columns = ["op", "form", "m", "n", "k", "kernel", "us", "plain_us", "speedup", "row_err",
                   "note"]  # fmt: skip
        rows = [row for row in survey.choices if row["budget"] == f"{budget:g}"]
        print_rows([{name: row[name] for name in columns} for row in rows], how.value)


def _write_page(survey: Survey, out: Path) -> None:
    from lokakern.bench.report.survey_page import page_of

    text = page_of(survey)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DatabaseError(f"{str(out)!r} cannot be written: {error.strerror}") from error
    problems = sum(op["problems"] for op in survey.ops)
    say(f"{out}: {len(survey.ops)} ops, {problems} problems, {len(survey.times)} times of "
        f"{survey.device.product}, {len(text.encode()) / 1e6:.1f} MB")  # fmt: skip


def _of_probe(
    probe: Path,
    budget: float,
    device: str | None,
    out: Path | None,
    db: str | None,
    how: OutputFormat,
) -> None:
    from lokakern.probe import files
    from lokakern.probe.report import ProbeReport
    from lokakern.render.terminal import print_rows

    sites = files.load(probe)
    with reading(db):
        found = ProbeReport.of(sites, budget=budget, device=device)
    if out is not None:
        try:
            found.save_page(out)
        except OSError as error:
            raise DatabaseError(f"{str(out)!r} cannot be written: {error.strerror}") from error
        say(f"{out}: {len(found.verdicts)} GEMMs of {len(found.sites)} sites")
    elif how is OutputFormat.JSON:
        print(json.dumps(found.content(), indent=2, allow_nan=False))
    elif how is OutputFormat.CSV:
        print_rows(found.rows(), "csv")
    else:
        found.table()
