"""Tables, JSON and CSV on stdout; progress on stderr."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable
from rich.text import Text

from lokakern.progress import Progress

FORMATS = ("table", "json", "csv")
A_MOMENT_S = 0.5
NO_WIDTH = 100_000  # columns, for the natural width of a table


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    how: str,
    *,
    title: str = "",
    note: str = "",
    spare: Sequence[str] = (),
) -> None:
    """Print rows with equal columns.

    Args:
        rows: Values by column name (with its unit); None prints as "-".
        how: "table", "json" or "csv".
        title: Title of a table.
        note: Text below a table.
        spare: Columns that a table omits, in this order, if the terminal is too narrow.
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
    # A pipe has no width: print whole lines there.
    width = None if sys.stdout.isatty() else 220
    console = Console(width=width, highlight=False, markup=False)  # errors may contain brackets
    left_out: list[str] = []
    table = _table_of(rows, columns, title)
    for name in spare if sys.stdout.isatty() else ():
        natural = Measurement.get(console, console.options.update(width=NO_WIDTH), table)
        if natural.maximum <= console.width:
            break
        if name in columns:
            columns.remove(name)
            left_out.append(name)
            table = _table_of(rows, columns, title)
    console.print(table)
    if left_out:
        console.print(f"(too narrow for {', '.join(left_out)}; --format csv or json has all)")
    if note:
        console.print(note)


def _table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str) -> RichTable:
    table = RichTable(title=title or None, title_justify="left", show_edge=False)
    for column in columns:
        numbers = all(isinstance(row[column], (int, float, type(None))) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)


class _Amount(MofNCompleteColumn):
    """Steps of a phase, or the percentage of a task without steps."""

    def render(self, task: Task) -> Text:
        if isinstance(task.total, float):
            return Text(f"{task.percentage:.0f}%")
        return super().render(task)


class TerminalProgress(Progress):
    """Bars with the remaining time on stderr; if that is no terminal, only notes.

    A task of `share` gets a bar once it has run longer than `A_MOMENT_S`.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._phase: TaskID | None = None
        self._task: TaskID | None = None  # of `share`
        self._what, self._began = "", 0.0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._bar.stop()

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def begin(self, phase: str, total: int) -> None:
        self._phase = self._add(phase, total or None)

    def step(self, text: str) -> None:
        if self._phase is not None:
            self._bar.update(self._phase, advance=1, what=text[:60])

    def reach(self, done: int, text: str = "") -> None:
        if self._phase is not None:
            words: dict[str, Any] = {"what": text[:60]} if text else {}
            self._bar.update(self._phase, completed=done, **words)

    def share(self, what: str, share: float) -> None:
        now = time.monotonic()
        if what != self._what or share >= 1:
            self._what, self._began = what, now
            if self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None
            if not self._bar.tasks:
                self._bar.stop()
        elif self._task is not None:
            self._bar.update(self._task, completed=share)
        elif now - self._began > A_MOMENT_S:
            self._task = self._add(what, 1.0, share)

    def _add(self, name: str, total: float | None, completed: float = 0) -> TaskID:
        self._bar.start()
        return self._bar.add_task(name, total=total, completed=completed, what="")  # type: ignore[arg-type]
