"""Rows made by hand, written into a database together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from lokakern.registry.locks import Lock
from lokakern.registry.schema.records import now_utc_ms
from lokakern.registry.schema.row_keys import Row
from lokakern.registry.schema.tables import TABLES
from lokakern.registry.storage.merge import MergeReport
from lokakern.registry.storage.reader import Source, read_rows
from lokakern.registry.storage.run_files import RunFile
from lokakern.registry.storage.writer import plain_row, write_file


class RowsAtOnce(RunFile):
    """A run that writes its rows into the database at the end, without a file of its own.

    A run file commits each row by itself, which takes ms and waits for the disk. Each run begins
    after those before it, however fast they were.
    """

    _last_started: ClassVar[int] = 0

    @classmethod
    def create(
        cls, database: Source, *, suite: str, command: str, harness_digest: str, grade: str = "full"
    ) -> RowsAtOnce:
        path = Path(str(database))
        run = cls(uuid4().hex, path, database, Lock(path.with_suffix(".lock")))
        RowsAtOnce._last_started = max(now_utc_ms(), RowsAtOnce._last_started + 1)
        row = {"key": run.run, "started_utc_ms": RowsAtOnce._last_started, "suite": suite,
               "command": command, "harness_digest": harness_digest, "grade": grade}  # fmt: skip
        run._rows["run"][run.run] = tuple(plain_row("run", row).values())
        return run

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._rows: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in TABLES}

    def _commit(self, name: str, parts: dict[str, Row], fact: Row) -> None:
        for table, part in parts.items():
            if part["key"] not in self._rows[table]:
                self._rows[table][part["key"]] = tuple(plain_row(table, part).values())
        assert fact["key"] not in self._rows[name], "measured twice"
        self._rows[name][fact["key"]] = tuple(fact.values())

    def finish(self) -> MergeReport:
        known = read_rows(self.path) if self.path.exists() else dict.fromkeys(TABLES, ())
        rows = {n: {row[0]: row for row in known[n]} | self._rows[n] for n in TABLES}
        self.path.unlink(missing_ok=True)
        write_file(self.path, {name: [*found.values()] for name, found in rows.items()})
        added = {name: len(rows[name]) - len(known[name]) for name in TABLES}
        return MergeReport(added, {name: len(self._rows[name]) - added[name] for name in TABLES})
