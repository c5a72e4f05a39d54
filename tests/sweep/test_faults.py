"""Faults of processes, disks, locks and clocks lose no rows and give one-line errors.

More of them, by hand: tests/support/faults.py.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import fcntl
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lokakern.bench.cli.main import app
from lokakern.errors import DatabaseError
from lokakern.measure import operands
from lokakern.registry import locks
from lokakern.registry.locks import Lock, private_folder
from lokakern.registry.quarantine import quarantined_files
from lokakern.registry.register import load_kernels
from lokakern.registry.schema import records
from lokakern.registry.schema.manifest import place_of
from lokakern.registry.schema.records import TimingRecord
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.sharing.quarantine import settle
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage import run_files, writer
from lokakern.registry.storage.merge import without_unused
from lokakern.registry.storage.reader import Rows, database_digest, read_rows
from lokakern.registry.storage.run_files import collect_runs, runs_folder
from lokakern.selection import dispatcher
from lokakern.sweep import engine
from tests.support.foreign_files import write_base
from tests.support.inline_worker import run_tasks_here
from tests.support.run_files import DEVICE, OK, PROBLEM, add, begin, rows_as_dicts

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("sweep", "merge", "import", "export")
HOW = {"steps": 3, "full": 2, "readonly": 2, "nolocks": 2}  # times, at the least
DAY_MS = 24 * 3600 * 1000
YEAR_MS = 365 * DAY_MS


# Processes and disks: one process hurts all commands, for most of its time is its start


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of tests/support/faults.py."""
    words = (*COMMANDS, "--how", *HOW, "--quick", "--every", "8")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path_factory.mktemp("faults")),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.faults", *words], env=environment, cwd=ROOT,
        text=True, capture_output=True, timeout=1800, check=False,
    )  # fmt: skip
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.rest
def test_an_interrupted_command_loses_no_rows(told: str, command: str, how: str) -> None:
    """Killed, or refused by the disk: as before or finished, and the next one ends well."""
    found = re.search(rf"^{command}, {how}, .*: (\d+) times .*, (\d+) violations$", told, re.M)
    assert found is not None, told[-4000:]
    assert int(found[1]) >= HOW[how] and found[2] == "0", told[-4000:]


def killed_before(step: str, ending: str, do: Callable[[], object]) -> None:
    """Do something in a process that is killed when it begins to rename or remove such a file."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == step and str(arguments[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not matter to it
        pid = os.fork()
    if not pid:
        try:
            sys.addaudithook(hear)
            do()
        finally:
            os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_merged_run_file_that_was_not_deleted_adds_no_rows(tmp_path: Path) -> None:
    database = tmp_path / "a.sqlite"
    run = begin(database)
    add(run)
    run.close()
    killed_before("os.remove", f"{run.run}.sqlite", lambda: collect_runs(database))
    assert run.path.exists() and len(rows_as_dicts(database, "timing")) == 1
    report = collect_runs(database)
    assert (report.added["timing"], report.known["timing"]) == (0, 1)
    assert len(rows_as_dicts(database, "timing")) == 1
    assert not list(runs_folder(database).iterdir())


def test_verified_rows_are_stored_before_they_leave_quarantine(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs.sqlite", tmp_path / "mine.sqlite"
    write_base(theirs)
    import_file(theirs, mine)
    (imported,) = quarantined_files(mine)
    rows = read_rows(imported.path)
    left = without_unused({**rows, "timing": []}, rows)
    held = without_unused({**{name: [] for name in rows}, "timing": rows["timing"]}, rows)
    nothing: Rows = {name: [] for name in rows}
    killed_before("os.rename", ".tmp", lambda: settle(imported, mine, held, left))
    assert not mine.exists() and read_rows(imported.path) == rows
    settle(imported, mine, held, left)
    assert read_rows(mine) == held and read_rows(imported.path) == left
    killed_before("os.remove", imported.path.name, lambda: settle(imported, mine, left, nothing))
    assert database_digest(mine) == database_digest(theirs) and read_rows(imported.path) == left
    settle(imported, mine, left, nothing)
    assert database_digest(mine) == database_digest(theirs) and not quarantined_files(mine)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_file_is_deleted_after_its_merge(tmp_path: Path) -> None:
    database = tmp_path / "a.sqlite"
    run = begin(database)
    add(run)
    run.close()
    killed_before("os.rename", ".tmp", lambda: collect_runs(database))
    assert not database.exists() and run.path.exists()
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    assert collect_runs(database).added["timing"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.sqlite", "a.sqlite.lock", "a.sqlite.runs"
    }  # fmt: skip


def test_copies_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, other = tmp_path / f"{locks._PREFIX}dead", tmp_path / "lokakern-tests-of-others"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "copy.sqlite").touch()
    (tmp_path / f"{locks._PREFIX}link").symlink_to(other)
    with private_folder() as living, private_folder() as mine:
        assert living.is_dir() and living != mine
        assert not dead.exists() and (other / "copy.sqlite").exists()
        assert mine.stat().st_mode & 0o777 == 0o700
    assert not living.exists() and not mine.exists()


def test_temporary_files_of_another_database_stay(tmp_path: Path) -> None:
    """ "a.*.tmp" would be those of a.sqlite, which another process writes."""
    mine, other = tmp_path / f"a.{'0' * 32}.tmp", tmp_path / f"a.sqlite.{'0' * 32}.tmp"
    for path in (mine, other):
        path.touch()
    write_base(tmp_path / "base.sqlite")
    import_file(tmp_path / "base.sqlite", tmp_path / "a", trusted=True)
    assert not mine.exists() and other.exists()


def test_a_removed_lock_does_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes the file after another process opened it and before it locks it."""
    path = tmp_path / "a.lock"
    holder, other = Lock(path), Lock(path)
    assert holder.acquire() and not other.acquire()
    flock = fcntl.flock

    def remove_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        holder.release()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert not other.acquire() and not path.exists()
    assert other.acquire(1.0) and path.exists()
    assert not holder.acquire()
    other.release()


def test_files_are_readable_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private copy needs none; runs of the dead are let alone where nobody can tell."""
    database = tmp_path / "a.sqlite"
    run = begin(database)
    add(run)
    run.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with private_folder() as folder:
        assert folder.is_dir()
    with pytest.raises(DatabaseError, match=r"lock .* cannot be made: No locks available; choose"):
        collect_runs(database)
    with pytest.raises(DatabaseError, match="No locks available; choose another database"):
        begin(database)
    assert [path.suffix for path in runs_folder(database).iterdir()].count(".sqlite") == 1
    monkeypatch.undo()
    assert collect_runs(database).added["timing"] == 1
    assert not list(runs_folder(database).iterdir())


def test_an_unreadable_run_file_is_reported(
    tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs_folder(tmp_path / "a.sqlite")
    folder.mkdir()
    (folder / f"{'f' * 32}.sqlite").write_bytes(b"not a database")
    code, _, err = command("sweep", *SHAPES, "--db", tmp_path / "a.sqlite")
    assert code == 0 and "not merged: run file" in err


# Clocks


SHAPES = ("--shape", "128,32", "--shape", "128,48", "--kernel", "torch.quantize_row",
          "--errors", "none", "--quiet")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _small_and_quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_kernels()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", run_tasks_here)
        patch.setenv("LOKAKERN_DB", str(tmp_path_factory.mktemp("user") / "user.sqlite"))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        dispatcher.use_snapshot(None)
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words], prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    yield run
    dispatcher.use_snapshot(None)


def set_clock(patch: pytest.MonkeyPatch, ahead_ms: int, *, back_ms: int = 0) -> None:
    """The clock is ahead, and goes back whenever it is read."""
    calls = iter(range(10**9))

    def time_ns() -> int:
        return time.time_ns() + (ahead_ms - next(calls) * back_ms) * 1_000_000

    patch.setattr(records, "time", SimpleNamespace(time_ns=time_ns))


@pytest.mark.parametrize("back_ms", [DAY_MS, YEAR_MS], ids=["a day", "a year"])
def test_a_clock_that_goes_back_does_not_stop_a_sweep(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_ms: int
) -> None:
    """The clock was ahead, and goes back with every row; the next sweep has nothing to do."""
    database = tmp_path / "a.sqlite"
    with monkeypatch.context() as patch:
        set_clock(patch, ahead_ms=3 * back_ms, back_ms=back_ms)
        code, _, err = command("sweep", *SHAPES, "--db", database)
    assert code == 0 and "2 times of 2 problems" in err
    seconds = re.search(r"errors in (\d+) s", err)
    assert seconds is not None
    assert 1000 * int(seconds[1]) < DAY_MS, "an interval is no difference of dates"
    rows = rows_as_dicts(database, "timing")
    (run,) = rows_as_dicts(database, "run")
    assert len(rows) == 2 and all(row["measured_utc_ms"] < run["started_utc_ms"] for row in rows)
    code, _, err = command("sweep", *SHAPES, "--db", database)
    assert code == 0 and "0 times of 0 problems" in err


def test_rows_from_the_future_are_kept(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from a clock that was a year ahead are accepted."""
    database, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    with monkeypatch.context() as patch:
        set_clock(patch, ahead_ms=YEAR_MS)
        assert command("sweep", *SHAPES, "--db", database)[0] == 0
    shipped = tmp_path / "c.sqlite"
    product = rows_as_dicts(database, "device")[0]["product"]
    for words in (
        ("sweep", *SHAPES, "--fresh", "--db", database),
        ("import", database, "--into", other, "--trust"),
        ("merge", database, other, "--out", tmp_path / "both.sqlite"),
        ("export", shipped, "--device", product, "--db", database),
        ("explain", "quantize", "--shape", "128,32", "--db", database),
        ("diff", database, other),
    ):
        code, _, err = command(*words)
        assert code == 0, err
    assert len(read_rows(tmp_path / "both.sqlite")["timing"]) == 4
    assert len(read_rows(shipped)["timing"]) == 4


def test_a_crash_from_the_future_still_counts(tmp_path: Path) -> None:
    """Rows alone decide which one is newest; the clock of the reader does not matter."""
    database, ahead = tmp_path / "a.sqlite", records.now_utc_ms() + YEAR_MS
    for record in (
        TimingRecord(status="crashed", reason="SIGSEGV", measured_utc_ms=ahead),
        dataclasses.replace(OK, measured_utc_ms=records.now_utc_ms()),
    ):
        with begin(database) as run:
            add(run, record)
        facts = load_snapshot([database])
        environment = rows_as_dicts(database, "environment")[0]["key"]
        assert list(facts.casualties(DEVICE, environment).values()) == [1]
    with begin(database) as run:
        add(run, dataclasses.replace(OK, measured_utc_ms=ahead + 1))
    assert not load_snapshot([database]).casualties(DEVICE, environment)


def test_an_unset_clock_is_reported(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1970 would be refused by all who read them."""
    monkeypatch.setattr(records, "time", SimpleNamespace(time_ns=lambda: 5_000_000_000))
    code, _, err = command("sweep", *SHAPES, "--db", tmp_path / "a.sqlite")
    lines = err.splitlines()
    assert code == 1 and lines[-1].startswith("DatabaseError: the clock says 5000 ms after 1970")
    assert not (tmp_path / "a.sqlite").exists()


def test_intervals_use_the_monotonic_clock() -> None:
    """The date is read in one place."""
    dates = {"time", "time_ns", "now", "utcnow", "localtime", "gmtime"}
    found = set()
    for folder in ("lokakern", "registry", "bench", "kernels"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in dates
                    and isinstance(node.value, ast.Name)
                    and node.value.id in ("time", "datetime")
                ):
                    found.add(f"{path.relative_to(ROOT)}: {node.value.id}.{node.attr}")
    assert found == {"registry/schema/records.py: time.time_ns"}


# Disks: what is said where


def test_an_export_without_room_for_its_manifest_changes_nothing(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, shipped = tmp_path / "a.sqlite", tmp_path / "c.sqlite"
    assert command("sweep", *SHAPES, "--db", database)[0] == 0
    product = rows_as_dicts(database, "device")[0]["product"]
    words = ("export", shipped, "--device", product, "--db", database)
    assert command(*words)[0] == 0
    before = [path.read_bytes() for path in (shipped, place_of(shipped))]
    assert command("sweep", *SHAPES, "--fresh", "--db", database)[0] == 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        code, _, err = command(*words)
    assert code == 1 and err.count("\n") == 1 and "No space left on device; the old" in err
    assert [path.read_bytes() for path in (shipped, place_of(shipped))] == before
    assert command(*words)[0] == 0 and place_of(shipped).read_bytes() != before[1]
    import_file(shipped, tmp_path / "d.sqlite", trusted=True)


def test_rows_before_the_disk_was_full_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "a.sqlite"
    run = begin(database)
    keys = [add(run)]

    def connect_full(path: Path, **options: Any) -> sqlite3.Connection:
        connection = writer.connect_writer(path, **options)
        connection.execute("PRAGMA max_page_count = 1")  # SQLite keeps the pages in use
        return connection

    problems = (dataclasses.replace(PROBLEM, m=m) for m in range(1, 10_000))
    with monkeypatch.context() as patch:
        patch.setattr(run_files, "connect_writer", connect_full)
        with pytest.raises(DatabaseError, match=r"disk is full; make room .* next sweep collects"):
            for problem in problems:  # until the pages in use have no room left
                keys.append(add(run, problem=problem))
    keys.append(add(run, problem=problem))  # there is room again
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", lambda *_: (_ for _ in ()).throw(
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))  # fmt: skip
        with pytest.raises(DatabaseError, match=r"No space left .* which the next sweep collects"):
            run.finish()
    assert not database.exists()
    assert collect_runs(database).added["timing"] == len(keys)
    assert {row["key"] for row in rows_as_dicts(database, "timing")} == set(keys)
