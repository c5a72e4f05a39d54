"""Databases in Datasette: what the columns mean, facets, and the queries of `queries.py`.

Files are opened immutable, so that nothing can write to them, and served to this machine alone.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lokakern.bench.explorer.queries import QUESTIONS
from lokakern.errors import DatabaseError, UnsupportedError
from lokakern.registry.schema.column_docs import unit_of, what_of
from lokakern.registry.schema.tables import TABLES, Base
from lokakern.registry.sharing.untrusted import open_guarded
from lokakern.registry.sqlite_file import FACTS

if TYPE_CHECKING:
    from datasette.app import Datasette

LOOPBACK = "127.0.0.1"
_LABELS = {
    "device": "product", "environment": "torch", "kernel": "name", "problem": "op",
    "distribution": "name", "run": "suite",
}  # fmt: skip
_FACETS = {
    "kernel": ("op", "language", "granularity", "accumulation"),
    "problem": ("op", "prepared", "epilogue", "out_format"),
    "distribution": ("realistic",),
    "run": ("suite", "grade"),
    "timing": ("device", "regime", "status", "kernel"),
    "accuracy": ("architecture", "distribution", "status", "kernel"),
    "test_result": ("architecture", "status", "suite"),
}
_STYLE = "dl.column-descriptions { columns: 22em; font-size: smaller; } " + " ".join(
    # Links to single rows, which Datasette does not find by a key in bytes.
    f".table-{name} .col-Link, .table-{name} .col-key {{ display: none; }}"
    for name in FACTS
)
_SETTINGS = {
    # Of the shipped file the slowest question takes 0.4 s; a database of a user may be ten times
    # as large.
    "sql_time_limit_ms": 10_000,
    "facet_time_limit_ms": 2_000,
    "suggest_facets": False,  # each page would try every column
    "truncate_cells_html": 100,
}


def explorer_of(files: Sequence[Path]) -> Datasette:
    """Files of databases in Datasette; nothing is served yet.

    Raises:
        UnsupportedError: Datasette is not installed.
        DatabaseError: A file is not a finished lokakern database.
    """
    try:
        from datasette.app import Datasette
        from datasette.database import Database
        from datasette.plugins import pm
    except ImportError as error:
        raise UnsupportedError(
            f"explore: {error.name} is not installed; pip install 'lokakern[explore]', or "
            "pip install 'datasette>=0.65,<1'"
        ) from None
    # Where rich is installed, it prints 300 lines for every page that is not there.
    pm.get_plugin("datasette.handle_exception").rich = None
    for path in files:
        if any(letter in str(path) for letter in "#?%"):  # goes into a URI as it is
            raise DatabaseError(
                f"database {str(path)!r}: Datasette opens another file where # ? or % is in a "
                "path; copy it to one without"
            )
        with open_guarded(path):  # whose schema is ours, so that the questions have answers
            pass
    names = _names_of(files)
    metadata = {
        "title": "lokakern: what was measured",
        "description": "Facts, never updated. Which kernel dispatch would choose, and why, says "
        "python -m lokakern.bench explain.",
        "extra_css_urls": [f"data:text/css,{quote(_STYLE)}"],
        "databases": {name: metadata_of() for name in names},
    }
    found = Datasette(files=(), metadata=metadata, settings=_SETTINGS)
    found.remove_database("_memory")  # which it adds where it is given no files
    for name, path in names.items():
        found.add_database(Database(found, path=str(path), is_mutable=False), name=name)
    return found


def _names_of(files: Sequence[Path]) -> dict[str, Path]:
    """Names of files without folders and endings; a number where they are alike."""
    names: dict[str, Path] = {}
    for path in files:
        name, count = path.stem, 1
        while name in names:
            count += 1
            name = f"{path.stem}-{count}"
        names[name] = path
    return names


def metadata_of() -> dict[str, Any]:
    """What Datasette shows of one database."""
    return {
        "queries": {
            name: {"title": q.title, "description": q.what, "sql": q.sql, "hide_sql": True}
            for name, q in QUESTIONS.items()
        },
        "tables": {name: _table(name) for name in TABLES},
    }


def _table(name: str) -> Mapping[str, Any]:
    model = next(m.class_ for m in Base.registry.mappers if m.local_table is TABLES[name])
    columns = {}
    for column in TABLES[name].columns:
        unit = unit_of(column.name)
        columns[column.name] = what_of(name, column.name) + (f" [{unit}]" if unit else "")
    found: dict[str, Any] = {
        "description": " ".join((model.__doc__ or "").split()),
        "columns": columns,
        "facets": list(_FACETS.get(name, ())),
    }
    if name in _LABELS:
        found["label_column"] = _LABELS[name]
    return found


def listen(port: int) -> socket.socket:
    """A socket on this machine alone; port 0 is any that is free.

    Raises:
        UnsupportedError: The port cannot be had.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
    except OSError as error:
        found.close()
        raise UnsupportedError(
            f"explore: port {port} of {LOOPBACK} cannot be had: {error.strerror}; --port 0 takes "
            "one that is free"
        ) from None
    return found


def serve(explorer: Datasette, listening: socket.socket) -> None:
    """Answer until Ctrl-C."""
    import uvicorn  # comes with Datasette

    config = uvicorn.Config(explorer.app(), log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])
