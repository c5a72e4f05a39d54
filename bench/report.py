"""Tables, JSON and CSV on stdout; progress on stderr."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable

from lokakern.bench.sweep import Progress

FORMATS = ("table", "json", "csv")


def print_rows(
    rows: Sequence[Mapping[str, Any]], how: str, *, title: str = "", note: str = ""
) -> None:
    """Print rows of equal columns.

    Args:
        rows: Column name (with its unit) to value, None where there is none.
        how: "table", "json" or "csv".
        title: Above a table.
        note: Below a table.
    """
    if how == "json":
        print(json.dumps(list(rows), indent=2, default=str, allow_nan=False))
        return
    columns = list(rows[0]) if rows else []
    if how == "csv":
        writer = csv.DictWriter(sys.stdout, columns)
        writer.writeheader()
        writer.writerows(rows)
        return
    table = RichTable(title=title or None, title_justify="left", show_edge=False)
    for column in columns:
        numbers = all(isinstance(row[column], (int, float, type(None))) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    # A pipe has no width: print whole lines there.
    width = None if sys.stdout.isatty() else 220
    console = Console(width=width, highlight=False, markup=False)  # texts of errors hold brackets
    console.print(table)
    if note:
        console.print(note)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)


class TerminalProgress(Progress):
    """A bar with the time left, on stderr; where that is no terminal, notes only."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def begin(self, phase: str, total: int) -> None:
        self._task = self._bar.add_task(phase, total=total, what="")

    def step(self, text: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, advance=1, what=text[:60])

    def reach(self, done: int, text: str = "") -> None:
        if self._task is not None:
            words: dict[str, Any] = {"what": text[:60]} if text else {}
            self._bar.update(self._task, completed=done, **words)
