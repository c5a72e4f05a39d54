"""Rows made by hand, written into a database together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lokakern.registry.locks import Lock
from lokakern.registry.schema.row_keys import Row
from lokakern.registry.schema.tables import TABLES
from lokakern.registry.storage.merge import MergeReport
from lokakern.registry.storage.reader import Source, read_rows
from lokakern.registry.storage.run_files import RunFile
from lokakern.registry.storage.writer import plain_row, replace_file


class RowsAtOnce(RunFile):
    """A run file that commits its rows at the end: each alone takes ms, and waits for the disk."""

    def __init__(self, run: str, path: Path, target: Source, lock: Lock) -> None:
        super().__init__(run, path, target, lock)
        self._rows: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in TABLES}

    def _commit(self, name: str, parts: dict[str, Row], fact: Row) -> None:
        for table, part in parts.items():
            if part["key"] not in self._rows[table]:
                self._rows[table][part["key"]] = tuple(plain_row(table, part).values())
        assert fact["key"] not in self._rows[name], "measured twice"
        self._rows[name][fact["key"]] = tuple(fact.values())

    def finish(self) -> MergeReport:
        rows = read_rows(self.path)  # of the run
        replace_file(self.path, rows | {n: [*r.values()] for n, r in self._rows.items() if r})
        return super().finish()
