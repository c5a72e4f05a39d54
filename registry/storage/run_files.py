"""The database on disk: where it is, and run files, one for each process that measures.

A process writes only its own run file, and commits every row. Run files are merged when they are
finished, or by `collect_runs` when their process died: one GPU, eight, and `kill -9` are one path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lokakern.errors import DatabaseError
from lokakern.registry.locks import Lock
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import (
    AccuracyRecord,
    DistributionRow,
    HostCostRecord,
    KernelRow,
    TestResultRecord,
    TimingRecord,
    now_utc_ms,
)
from lokakern.registry.schema.row_keys import Row
from lokakern.registry.schema.tables import ERROR_METRICS, TABLES
from lokakern.registry.schema.value_rules import EARLIEST_UTC_MS
from lokakern.registry.sqlite_file import shown
from lokakern.registry.storage.merge import MergeReport, merge, merge_checked, read_checked
from lokakern.registry.storage.paths import user_folder
from lokakern.registry.storage.reader import Rows, Source, resolve, short
from lokakern.registry.storage.writer import (
    MAKE_ROOM,
    connect_writer,
    insert_rows,
    insert_text,
    is_of_the_disk,
    no_lock,
    plain_row,
    remove_temporaries,
    replace_file,
)
from lokakern.types import Device, Environment, Problem

if TYPE_CHECKING:
    from lokakern.registry.register import Kernel


def runs_folder(database: Source) -> Path:
    """The folder of run files of a database that are not merged yet."""
    target = resolve(database)
    if isinstance(target, Path):
        return target.with_name(target.name + ".runs")
    name = hashlib.sha256(target.render_as_string().encode()).hexdigest()[:16]
    return user_folder() / "runs" / name


class RunFile:
    """What one process measures, committed row by row into a file of its own.

    While open it holds a lock, by which `collect_runs` knows that its process lives. Used as a
    context manager it is merged at the end; after an exception it is left for `collect_runs`.

    Attributes:
        run: UUID of the run, in hex.
        path: The run file.
    """

    def __init__(self, run: str, path: Path, target: Source, lock: Lock) -> None:
        self.run = run
        self.path = path
        self._target = target
        self._lock = lock
        self._ids: dict[str, int] = {}
        self._process = os.getpid()

    @classmethod
    def create(
        cls,
        database: Source,
        *,
        suite: str,
        command: str,
        harness_digest: str,
        grade: str = "full",
    ) -> RunFile:
        """Begin a run whose rows go to a database in the end.

        Args:
            database: The file or URL to merge into; need not exist.
            suite: Name of what is measured.
            command: How to do it again.
            harness_digest: Digest of the measuring code.
            grade: "full", or "quick" for rows that count only where there is no full row.

        Raises:
            DatabaseError: The folder cannot be written, an argument is not what it must be, or the
                clock was never set.
        """
        run, started = uuid4().hex, now_utc_ms()
        if started < EARLIEST_UTC_MS:
            raise DatabaseError(
                f"the clock says {started} ms after 1970; expected 2020 or later: set it, for rows "
                "keep when they were measured"
            )
        path = runs_folder(database) / f"{run}.sqlite"
        row = plain_row(
            "run",
            {
                "key": run,
                "started_utc_ms": started,
                "harness_digest": harness_digest,
                "suite": suite,
                "command": command,
                "grade": grade,
            },
        )
        lock = Lock(path.with_suffix(".lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not lock.acquire(10):  # a collector may look at it for a moment
                raise TimeoutError(errno.ETIMEDOUT, "its lock is held")
            replace_file(path, {"run": [tuple(row.values())]})
        except (OSError, DatabaseError) as error:
            with suppress(OSError):
                _delete_run(path)  # no other process knows it
            lock.release()
            if isinstance(error, DatabaseError):
                raise
            raise DatabaseError(
                f"run folder {str(path.parent)!r} cannot be written: {error.strerror}; choose "
                "another database (LOKAKERN_DB), in a folder that can be written, of a file system "
                "that has locks"
            ) from error
        return cls(run, path, database, lock)

    def add_timing(
        self,
        kernel: Kernel | KernelRow,
        problem: Problem,
        distribution: DistributionRow,
        device: Device,
        environment: Environment,
        regime: str,
        record: TimingRecord,
    ) -> str:
        """Write a timing; committed when this returns.

        Returns:
            The row's key.

        Raises:
            DatabaseError: A value is impossible, or this run has timed the same already.
        """
        parts = (kernel, problem, distribution, device, environment)
        return self._add("timing", parts, {"regime": regime, **asdict(record)})

    def add_accuracy(
        self,
        kernel: Kernel | KernelRow,
        problem: Problem,
        distribution: DistributionRow,
        architecture: str,
        environment: Environment,
        record: AccuracyRecord,
    ) -> str:
        """Write an accuracy; committed when this returns.

        Returns:
            The row's key.

        Raises:
            DatabaseError: A value is impossible, or this run has measured the same already.
        """
        row = {name: getattr(record.errors, name, None) for name in ERROR_METRICS}
        row |= {name: getattr(record, name) for name in record.__slots__ if name != "errors"}
        parts = (kernel, problem, distribution, environment)
        return self._add("accuracy", parts, {**row, "architecture": architecture})

    def add_test_result(
        self,
        kernel: Kernel | KernelRow,
        architecture: str,
        suite: str,
        environment: Environment,
        record: TestResultRecord,
    ) -> str:
        """Write how a kernel's tests ended; committed when this returns.

        Args:
            kernel: What was tested.
            architecture: Of the GPU it ran on.
            suite: Name of the test module, such as "tests/kernels/test_kernels.py".
            environment: Software and power limit.
            record: The outcome.

        Returns:
            The row's key.

        Raises:
            DatabaseError: A value is impossible, or this run has tested the same already.
        """
        row = {"architecture": architecture, "suite": suite, "status": record.status}
        return self._add("test_result", (kernel, environment), {**row, **asdict(record)})

    def add_host_cost(
        self, device: Device, environment: Environment, record: HostCostRecord
    ) -> str:
        """Write how long the host takes for a call; committed when this returns.

        Returns:
            The row's key.

        Raises:
            DatabaseError: A value is impossible, or this run has measured the same already.
        """
        return self._add("host_cost", (device, environment), asdict(record))

    def _add(
        self, name: str, entities: Iterable[Kernel | row_keys.Entity], row: dict[str, Any]
    ) -> str:
        if os.getpid() != self._process:
            raise DatabaseError(
                f"run {self.run} belongs to process {self._process}, this is {os.getpid()}; every "
                "process creates its own run file"
            )
        parts: dict[str, Row] = {}
        for entity in entities:
            known = entity if isinstance(entity, row_keys.Entity) else KernelRow.of(entity)
            parts[row_keys.TABLE_OF[type(known)]] = row_keys.row_of(known)
        row |= {table: part["key"] for table, part in parts.items()} | {"run": self.run}
        row["key"] = row_keys.row_key(name, row)
        self._commit(name, parts, plain_row(name, row))
        return str(row["key"])

    def _commit(self, name: str, parts: dict[str, Row], fact: Row) -> None:
        """Write a row of table `name` and what it refers to."""
        key = str(fact["key"])
        ids = dict(self._ids)
        try:
            with closing(connect_writer(self.path, synchronous="NORMAL")) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for table, part in parts.items():
                    part_key = str(part["key"])
                    if part_key not in ids:
                        _, *values = plain_row(table, part).values()
                        in_bytes = bytes.fromhex(part_key)
                        text = f"{insert_text(table)} ON CONFLICT DO NOTHING"
                        connection.execute(text, (None, in_bytes, *values))
                        query = f"SELECT id FROM {table} WHERE key = ?"
                        (ids[part_key],) = connection.execute(query, (in_bytes,)).fetchone()
                fact |= {table: ids[str(part["key"])] for table, part in parts.items()} | {"run": 1}
                _, *values = fact.values()
                insert_rows(connection, name, [(bytes.fromhex(key), *values)])
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            words = f"was refused: {short(error)}"
            if is_of_the_disk(error):
                words = (
                    f"cannot be written: {short(error)}; {MAKE_ROOM}: what was measured before is "
                    f"in {shown(self.path)}, which the next sweep collects"
                )
            raise DatabaseError(
                f"run {self.run}: {name} row {key} ({fact.get('status', 'ok')}) {words}"
            ) from error
        self._ids = ids

    def close(self) -> None:
        """Stop writing and leave the file to `collect_runs`."""
        self._lock.release()

    def finish(self) -> MergeReport:
        """Merge into the database and delete the run file.

        Raises:
            DatabaseError: The merge failed; the run file is left to `collect_runs`.
        """
        try:
            report = merge([self.path], self._target)
            _delete_run(self.path)
        except DatabaseError as error:
            raise DatabaseError(
                f"{error}; what was measured is in {shown(self.path)}, which the next sweep "
                "collects"
            ) from error
        finally:
            self._lock.release()
        return report

    def __enter__(self) -> RunFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.close()


def _delete_run(path: Path) -> None:
    """Delete a run file, then its lock; the caller holds the lock."""
    path.unlink(missing_ok=True)
    remove_temporaries(path)
    path.with_suffix(".lock").unlink(missing_ok=True)


def collect_runs(database: Source) -> MergeReport:
    """Merge the run files that dead processes left; those of living ones are let alone.

    Raises:
        DatabaseError: The database cannot be read or written, or a run contradicts it.
    """
    locks: list[Lock] = []
    runs: dict[Source, Rows] = {}
    skipped: dict[str, str] = {}
    try:
        folder = runs_folder(database)
        for name in sorted({p.stem for e in ("sqlite", "lock") for p in folder.glob(f"*.{e}")}):
            path = folder / f"{name}.sqlite"
            lock = Lock(path.with_suffix(".lock"))
            try:
                if not lock.acquire():
                    continue  # its process lives
            except OSError as error:
                raise no_lock(path.with_suffix(".lock"), error) from None
            locks.append(lock)
            try:
                if path.exists():
                    _recover(path)
                    runs[path] = read_checked(path)
                else:  # merged since it was listed, or killed before its first row
                    _delete_run(path)
            except DatabaseError as error:
                skipped[str(path)] = str(error)
        if not runs:
            nothing = dict.fromkeys(TABLES, 0)
            return MergeReport(nothing, dict(nothing), skipped)
        report = merge_checked(runs, database)
        for run in runs:
            _delete_run(Path(str(run)))
        return MergeReport(report.added, report.known, skipped)
    finally:
        for lock in locks:
            lock.release()


def _recover(path: Path) -> None:
    """Roll back what a killed process was writing; its committed rows stay."""
    try:
        with closing(sqlite3.connect(os.path.abspath(path))) as connection:
            connection.execute("SELECT count(*) FROM run").fetchone()
            # A journal whose header was not on disk yet is no reason to roll back, but it stays
            # until something is written.
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {int(version)}")
    except sqlite3.Error as error:
        raise DatabaseError(f"run file {shown(path)} cannot be recovered: {error}") from error
