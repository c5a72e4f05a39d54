"""Databases in Datasette: what the columns mean, facets, and the queries of `queries.py`.

Files are opened immutable, so that nothing can write to them, and served to this machine alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lokakern.bench.explorer.queries import QUESTIONS
from lokakern.errors import DatabaseError, UnsupportedError
from lokakern.registry.schema.tables import TABLES, unit_of
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
    "host_cost": ("cpu", "regime", "call", "path"),
}
_STYLE = "dl.column-descriptions { columns: 22em; font-size: smaller; } " + " ".join(
    # Hide links to single rows: Datasette cannot look up binary keys.
    f".table-{name} .col-Link, .table-{name} .col-key {{ display: none; }}"
    for name in FACTS
)
_SETTINGS = {
    # The slowest query of the shipped file takes 0.5 s; a user's file may be ten times as large.
    "sql_time_limit_ms": 10_000,
    "facet_time_limit_ms": 2_000,
    "suggest_facets": False,  # they try every column on each page
    "truncate_cells_html": 100,
}


def explorer_of(files: Sequence[Path]) -> Datasette:
    """Open databases in Datasette without serving them yet.

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
            f"explore: {error.name} is not installed; pip install '.[explore]' in a clone of "
            "lokakern, or pip install 'datasette>=0.65,<1'"
        ) from None
    # With rich installed it prints 300 lines for every missing page.
    pm.get_plugin("datasette.handle_exception").rich = None
    for path in files:
        if any(letter in str(path) for letter in "#?%"):  # not escaped in its URI
            raise DatabaseError(
                f"database {str(path)!r}: Datasette cannot open paths with #, ? or %; copy the file"
            )
        with open_guarded(path):  # checks the schema, which the queries require
            pass
    names = _names_of(files)
    metadata = {
        "title": "lokakern: what was measured",
        "description": "Measurements, never updated. python -m lokakern.bench explain prints the "
        "choice of dispatch and its reasons.",
        "extra_css_urls": [f"data:text/css,{quote(_STYLE)}"],
        "databases": {name: metadata_of() for name in names},
    }
    found = Datasette(files=(), metadata=metadata, settings=_SETTINGS)
    found.remove_database("_memory")  # its default without files
    for name, path in names.items():
        found.add_database(Database(found, path=str(path), is_mutable=False), name=name)
    return found


def _names_of(files: Sequence[Path]) -> dict[str, Path]:
    """Stems of files, numbered where they are equal."""
    names: dict[str, Path] = {}
    for path in files:
        name, count = path.stem, 1
        while name in names:
            count += 1
            name = f"{path.stem}-{count}"
        names[name] = path
    return names


def metadata_of() -> dict[str, Any]:
    """Datasette's metadata of one database."""
    return {
        "queries": {
            name: {"title": q.title, "description": q.what, "sql": q.sql, "hide_sql": True}
            for name, q in QUESTIONS.items()
        },
        "tables": {name: _table(name) for name in TABLES},
    }


def _table(name: str) -> Mapping[str, Any]:
    columns = {}
    for column in TABLES[name].columns:
        unit = unit_of(column.name)
        columns[column.name] = (column.doc or "") + (f" [{unit}]" if unit else "")
    found: dict[str, Any] = {
        "description": TABLES[name].info["about"],
        "columns": columns,
        "facets": list(_FACETS.get(name, ())),
    }
    if name in _LABELS:
        found["label_column"] = _LABELS[name]
    return found


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0 is any free port.

    Raises:
        UnsupportedError: The port cannot be opened.
    """
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UnsupportedError(
            f"explore: port {port} of {LOOPBACK} cannot be opened: "
            f"{os.strerror(error.errno or 0)}; --port 0 takes any free port"
        ) from None


def serve(explorer: Datasette, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    import uvicorn  # comes with Datasette

    config = uvicorn.Config(explorer.app(), log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])
