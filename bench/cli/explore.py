"""The command `explore`: browse databases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.cli.options import say, says_errors


@says_errors
def explore(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Databases. Default: the shipped ones and yours."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 is any free port.")
    ] = 8001,
) -> None:
    """Browse databases with Datasette, read-only and on this machine only.

    It has facets, descriptions of columns, and queries: the fastest kernel within a budget, where
    FP8 loses, which kernel regressed, errors by distribution, who measured what. Ctrl-C ends it.
    Needs the extra `explore`.
    """
    from lokakern.bench.explorer.server import LOOPBACK, explorer_of, listen, serve
    from lokakern.registry.storage.paths import shipped_databases, user_database

    if not files:
        user = user_database()
        files = [*shipped_databases(), *([user] if user.exists() else [])]
    explorer = explorer_of([path.expanduser() for path in files])
    with listen(port) as listening:
        place = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        say(f"{place} shows {', '.join(path.name for path in files)}; Ctrl-C ends it")
        serve(explorer, listening)
