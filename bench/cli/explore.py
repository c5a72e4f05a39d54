"""The command `explore`: browse databases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.cli.options import say, says_errors, with_shipped


@says_errors
def explore(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Databases. Default: the shipped ones and yours.")
    ] = None,
    db: Annotated[
        Path | None, typer.Option("--db", help="Database to show with the shipped ones.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 selects a free one.")
    ] = 8001,
) -> None:
    """Show databases in a browser with Datasette, read-only and on this machine only.

    The pages have facets, a description of each column, and queries: the fastest kernel within a
    budget, where FP8 is slower, regressions, errors by distribution, and the origin of each
    measurement. Ctrl-C ends the server. This command needs the extra `explore`.
    """
    from lokakern.bench.explorer.server import LOOPBACK, explorer_of, listen, serve
    from lokakern.registry.storage.paths import shipped_databases, user_database

    if files and db is not None:
        raise typer.BadParameter("goes without FILES", param_hint="--db")
    if not files:
        files = with_shipped(user_database()) if db is None else [*shipped_databases(), db]
    explorer = explorer_of([path.expanduser() for path in files])
    with listen(port) as listening:
        place = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        say(f"{place} shows {', '.join(path.name for path in files)}; Ctrl-C ends it")
        serve(explorer, listening)
