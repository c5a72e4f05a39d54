"""The command `describe`: what is in one database file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, say, says_errors


@says_errors
def describe(
    file: Annotated[
        str | None, typer.Argument(help="Database: a path or an SQLAlchemy URL.")
    ] = None,
    db: Annotated[str | None, typer.Option("--db", help="The same as FILE.")] = None,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """Show what one database holds by itself: devices, environments, runs, and rows by outcome.

    Every row is checked and counted, in every regime, without the shipped files, which `list
    device` and `list coverage` add. CSV has the numbers of rows by op.
    """
    from lokakern.bench.report.contents import contents_of
    from lokakern.registry.sharing.import_file import checked_file
    from lokakern.registry.storage.reader import read_tables, rows_digest
    from lokakern.render.terminal import print_rows

    if (file is None) == (db is None):
        raise typer.BadParameter("expected one database", param_hint="FILE")
    with checked_file(options.source_of(file or db or "")) as (opened, _):
        rows = read_tables(opened.connection, opened.version)
    found = contents_of(rows)
    facts: list[dict[str, Any]] = [
        {"what": "file", "value": f"{opened.name}, {opened.size_bytes / 2**20:.2f} MiB"},
        {"what": "schema version", "value": opened.version},
        {"what": "rows digest", "value": rows_digest(rows)},
        *found.facts,
    ]
    if how is OutputFormat.JSON:
        pairs = {fact["what"]: fact["value"] for fact in facts}
        print(json.dumps(asdict(found) | {"facts": pairs}, indent=2))
        return
    if how is OutputFormat.CSV:
        print_rows(found.parts, "csv")
        return
    print_rows(facts, how)
    runs = [{name: value for name, value in run.items() if name != "command"} for run in found.runs]
    for title, table in (("runs", runs), ("rows", found.parts), ("not ok", found.failures)):
        if table:
            print()
            print_rows(table[: options.MOST_ROWS], how, title=title, spare=("reason", "kernels"))
        if len(table) > options.MOST_ROWS:
            left = len(table) - options.MOST_ROWS
            say(f"and {left} more {title}: --format json prints all")
