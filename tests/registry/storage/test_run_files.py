"""The database on disk: run files, merging, and foreign files."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from lokakern.errors import DatabaseError
from lokakern.numerics import Errors
from lokakern.registry.schema import row_keys, tables
from lokakern.registry.schema.records import (
    AccuracyRecord,
    DistributionRow,
    KernelRow,
    TestResultRecord,
    TimingRecord,
    canonical_seeds,
)
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.sqlite_file import VERSIONS
from lokakern.registry.storage.merge import MergeReport, insert_missing, merge
from lokakern.registry.storage.paths import shipped_databases, user_database
from lokakern.registry.storage.reader import (
    check_server,
    database_digest,
    open_readonly,
    read_rows,
    read_tables,
)
from lokakern.registry.storage.run_files import RunFile, collect_runs, runs_folder
from lokakern.registry.storage.writer import write_file
from lokakern.selection import dispatcher
from lokakern.types import Device, Environment, Format, Granularity, Operand, Problem
from tests.support.run_files import (
    ACCURATE,
    CHOICES,
    DEVICE,
    ENVIRONMENT,
    ERRORS,
    FIXTURES,
    HOST_COST,
    KERNEL,
    OK,
    PROBLEM,
    TESTED,
    X1,
    A,
    B,
    add,
    begin,
    changed,
    content_digest,
    edited,
    rows_as_dicts,
    rows_of,
    small_rows,
    write_fixture,
)

FIXTURE = FIXTURES[tables.SCHEMA_VERSION]


def add_accuracy(run: RunFile, record: AccuracyRecord = ACCURATE) -> str:
    return run.add_accuracy(KERNEL, PROBLEM, X1, "sm_90", ENVIRONMENT, record)


def add_test_result(run: RunFile, record: TestResultRecord = TESTED) -> str:
    return run.add_test_result(KERNEL, "sm_90", "tests/test_kernels.py", ENVIRONMENT, record)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "lokakern.sqlite"


# Run files


def test_everything_written_is_read_back(database: Path) -> None:
    with begin(database, grade="quick") as run:
        timing_key, accuracy_key, result_key = add(run), add_accuracy(run), add_test_result(run)
    (timing,) = rows_as_dicts(database, "timing")
    for name, value in dataclasses.asdict(OK).items():
        assert timing[name] == value, name
    assert timing["key"] == timing_key
    assert timing["kernel"] == row_keys.key_of(KERNEL)
    (accuracy,) = rows_as_dicts(database, "accuracy")
    assert accuracy["key"] == accuracy_key
    for name, value in dataclasses.asdict(ACCURATE)["errors"].items():
        assert accuracy[name] == value, name
    assert accuracy["seed"] == 1 and accuracy["rows"] == 2048 and accuracy["saturated_share"] == 1
    (result,) = rows_as_dicts(database, "test_result")
    assert result == {
        "key": result_key,
        "run": run.run,
        "kernel": row_keys.key_of(KERNEL),
        "architecture": "sm_90",
        "suite": "tests/test_kernels.py",
        "environment": row_keys.key_of(ENVIRONMENT),
        "status": "ok",
        **dataclasses.asdict(TESTED),
    }
    (kernel,) = rows_as_dicts(database, "kernel")
    assert row_keys.from_row(KernelRow, kernel) == KERNEL
    (problem,) = rows_as_dicts(database, "problem")
    assert row_keys.from_row(Problem, problem) == PROBLEM
    (distribution,) = rows_as_dicts(database, "distribution")
    assert row_keys.from_row(DistributionRow, distribution) == X1
    (device,) = rows_as_dicts(database, "device")
    assert row_keys.from_row(Device, device) == DEVICE
    (environment,) = rows_as_dicts(database, "environment")
    assert row_keys.from_row(Environment, environment) == ENVIRONMENT
    (run_row,) = rows_as_dicts(database, "run")
    assert (run_row["key"], run_row["grade"], run_row["suite"]) == (run.run, "quick", "lrm")
    assert not list(runs_folder(database).iterdir()), "the run file and its lock are gone"


def test_every_field_of_our_types_has_a_column() -> None:
    """A field that is no column would be lost, or two different problems would be one row."""
    pairs = {
        "device": Device,
        "environment": Environment,
        "kernel": KernelRow,
        "problem": Problem,
        "distribution": DistributionRow,
    }
    for name, type_ in pairs.items():
        found = {"key", *(field.name for field in dataclasses.fields(type_))}
        assert set(tables.COLUMNS[name]) == found, name
    assert {field.name for field in dataclasses.fields(Errors)} == set(tables.ERROR_METRICS)
    assert set(tables.ACCURACY_METRICS) <= set(tables.COLUMNS["accuracy"])
    timed = {field.name for field in dataclasses.fields(TimingRecord)}
    assert timed < set(tables.COLUMNS["timing"])
    tested = {field.name for field in dataclasses.fields(TestResultRecord)}
    assert tested < set(tables.COLUMNS["test_result"])


@pytest.mark.parametrize("metric", ["latency_us_p50", "kernel_err", "clock_mhz"])
def test_nan_is_refused(database: Path, metric: str) -> None:
    """SQLite would store NULL, and MAX over {NULL, 0.037} is 0.037."""
    run = begin(database)
    with pytest.raises(DatabaseError, match=rf"{metric} is nan"):
        changes: dict[str, Any] = {metric: math.nan}
        add(run, dataclasses.replace(OK, **changes))
    with pytest.raises(DatabaseError, match="row_err is nan"):
        errors = dataclasses.replace(ERRORS, row_err=math.nan)
        add_accuracy(run, dataclasses.replace(ACCURATE, errors=errors))
    assert run.finish().added["timing"] == 0


def test_infinite_metrics_are_kept(database: Path) -> None:
    errors = dataclasses.replace(ERRORS, row_max=math.inf, sqnr_db=-math.inf)
    with begin(database) as run:
        add_accuracy(run, dataclasses.replace(ACCURATE, status="wrong", reason="x", errors=errors))
    (row,) = rows_as_dicts(database, "accuracy")
    assert row["row_max"] == math.inf and row["sqnr_db"] == -math.inf


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kernel_err": None}, "CHECK"),
        ({"status": "fine"}, "CHECK"),
        ({"status": "timeout"}, "CHECK"),  # without a reason
        ({"latency_us_p20": 11.5}, "CHECK"),  # above p50
        ({"latency_us_p20": -1.0}, "CHECK"),
        ({"latency_us_p80": math.inf}, "finite"),
        ({"replay_count": 1.5}, "replay_count"),
        ({"replay_count": 2**63}, "64 bits"),
        ({"timer": None}, "NOT NULL"),
        ({"timer": 3}, "expected text"),
        ({"timer": "a\0b"}, "printable"),
        ({"timer": "a\u202eb"}, "printable"),
    ],
)
def test_impossible_rows_are_refused_and_the_run_goes_on(
    database: Path, changes: dict[str, Any], complaint: str
) -> None:
    with begin(database) as run:
        with pytest.raises(DatabaseError, match=complaint):
            add(run, dataclasses.replace(OK, **changes))
        add(run)
    assert len(rows_as_dicts(database, "timing")) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"failed_count": 1},  # without a reason
        {"reason": "1 > 0.5"},  # of nothing that failed
        {"passed_count": 0},  # without a reason
        {"passed_count": -1},
        {"passed_count": 0, "skipped_count": 0, "reason": "no test"},
        {"seeds": ""},
    ],
    ids=str,
)
def test_impossible_test_results_are_refused(database: Path, changes: dict[str, Any]) -> None:
    with begin(database) as run:
        with pytest.raises(DatabaseError, match=r"test_result row .* CHECK"):
            add_test_result(run, dataclasses.replace(TESTED, **changes))
        add_test_result(run)
        with pytest.raises(DatabaseError, match="UNIQUE"):
            add_test_result(run)
    assert len(rows_as_dicts(database, "test_result")) == 1


def test_status_of_a_test_result_agrees_with_its_counts(database: Path) -> None:
    failed = dataclasses.replace(TESTED, failed_count=1, reason="1 > 0.5")
    skipped = dataclasses.replace(TESTED, passed_count=0, reason="needs 60 GiB")
    for record, status in [(TESTED, "ok"), (failed, "failed"), (skipped, "nothing")]:
        with begin(database) as run:
            add_test_result(run, record)
        rows = {row["run"]: row for row in rows_as_dicts(database, "test_result")}
        assert (rows[run.run]["status"], rows[run.run]["reason"]) == (status, record.reason)


def test_seeds_have_one_text() -> None:
    assert canonical_seeds([7, 0, 7]) == canonical_seeds((0, 7)) == "0,7"
    assert canonical_seeds([]) == "none"


def test_a_failure_needs_no_metrics_and_its_reason_may_be_anything(database: Path) -> None:
    reason = "nvcc: \0 \udcff \n" + "x" * 10_000
    with begin(database) as run:
        add(run, TimingRecord(status="error", reason=reason))
    (row,) = rows_as_dicts(database, "timing")
    assert row["latency_us_p50"] is None and len(row["reason"]) == 500
    assert row["reason"].startswith("nvcc:      xx") and row["reason"].isprintable()


def test_a_run_measures_the_same_once(database: Path) -> None:
    with begin(database) as run:
        add(run)
        with pytest.raises(DatabaseError, match="UNIQUE"):
            add(run)


def test_negative_zero_has_one_content(database: Path) -> None:
    """SQLite does not keep the sign, PostgreSQL does."""
    with begin(database) as run:
        add(run, dataclasses.replace(OK, kernel_err=-0.0))
    (row,) = rows_as_dicts(database, "timing")
    assert str(row["kernel_err"]) == "0.0"


KILLED = """
import runpy, sys, time
tests = runpy.run_path(sys.argv[1])
run = tests["begin"](sys.argv[2])
for m in range(1, 1_000_000):
    tests["add"](run, problem=tests["dataclasses"].replace(tests["PROBLEM"], m=m))
    print(m, flush=True)
"""


def start_run(database: Path, code: str = KILLED) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, __file__, str(database)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.rest
def test_killed_run_loses_no_committed_row(database: Path) -> None:
    process = start_run(database)
    assert process.stdout is not None
    committed = 0
    for line in process.stdout:
        committed = int(line)
        if committed == 25:
            break
    assert collect_runs(database).added["timing"] == 0, "the run of a living process is let alone"
    os.kill(process.pid, signal.SIGKILL)
    committed = max(committed, *(int(line) for line in process.stdout if line.endswith("\n")), 0)
    assert process.wait() == -signal.SIGKILL
    assert not database.exists()
    report = collect_runs(database)
    # The row that was being written may be there too.
    assert report.added["timing"] in {committed, committed + 1}
    assert sorted(row["m"] for row in rows_as_dicts(database, "problem"))[:25] == [*range(1, 26)]
    assert not list(runs_folder(database).iterdir())
    nothing = dict.fromkeys(tables.TABLES, 0)
    assert collect_runs(database) == MergeReport(nothing, nothing)


def test_a_journal_that_was_just_begun_loses_no_row(database: Path) -> None:
    """Killed before the journal's header was written: there is nothing to roll back."""
    run = begin(database)
    add(run)
    run.close()
    journal = run.path.with_name(run.path.name + "-journal")
    journal.write_bytes(bytes(512) + b"pages" * 200)
    report = collect_runs(database)
    assert not report.skipped
    assert report.added["timing"] == 1


def test_half_written_transaction_is_rolled_back(database: Path) -> None:
    """A process killed inside a commit leaves a journal, which only the collector may use."""
    run = begin(database)
    add(run)
    run.close()
    hot = database.parent / "hot"
    code = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA cache_size = 1'); c.execute('PRAGMA synchronous = OFF')\n"
        "c.execute('BEGIN'); c.execute('DELETE FROM timing')\n"
        "c.executemany(\"INSERT INTO environment VALUES (?, ?, '', '', '', '', '', '')\",\n"
        "    [(i, i.to_bytes(32, 'big')) for i in range(10, 3000)])\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    journal = run.path.with_name(run.path.name + "-journal")
    assert journal.exists() and not hot.exists()
    with pytest.raises(DatabaseError, match=r"journal|bytes"):
        merge([run.path], database)
    assert collect_runs(database).added["timing"] == 1


def test_unreadable_run_file_stops_no_other(database: Path) -> None:
    run = begin(database)
    add(run)
    run.close()
    broken = run.path.with_name("f" * 32 + ".sqlite")
    broken.write_bytes(b"not a database")
    report = collect_runs(database)
    assert report.added["timing"] == 1 and list(report.skipped) == [str(broken)]
    assert broken.read_bytes() == b"not a database"


FINISHED = """
import runpy, sys
tests = runpy.run_path(sys.argv[1])
with tests["begin"](sys.argv[2]) as run:
    for m in range(1, 20):
        tests["add"](run, problem=tests["dataclasses"].replace(tests["PROBLEM"], m=m))
"""


@pytest.mark.rest
def test_concurrent_runs_are_both_stored(database: Path) -> None:
    processes = [start_run(database, FINISHED) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(rows_as_dicts(database, "timing")) == 2 * 19
    assert len(rows_as_dicts(database, "problem")) == 19
    assert len(rows_as_dicts(database, "run")) == 2


def test_after_an_exception_the_run_is_left_to_the_collector(database: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), begin(database) as run:
        add(run)
        raise RuntimeError("mine")
    assert not database.exists()
    assert collect_runs(database).added["timing"] == 1


def test_another_process_may_not_write_our_run(database: Path) -> None:
    run = begin(database)
    run._process += 1  # as after a fork
    with pytest.raises(DatabaseError, match="every process creates its own"):
        add(run)
    run.close()


# Merging


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(CHOICES, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_merge_is_a_set_union(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[tuple[int, int, int]]], seed: int
) -> None:
    """Commutative, associative, idempotent: one content, one digest, the same bytes."""
    folder = tmp_path_factory.mktemp("merge")
    files = [folder / f"{i}.sqlite" for i in range(len(parts))]
    for file, choices in zip(files, parts, strict=True):
        rows = rows_of(choices)
        for found in rows.values():
            random.Random(seed).shuffle(found)
        write_file(file, rows)
    before = [file.read_bytes() for file in files]
    merge(files, folder / "at once.sqlite")
    for file in reversed(files):
        merge([file], folder / "one by one.sqlite")
    merge([*files, folder / "at once.sqlite"], folder / "again.sqlite")
    merge(files, folder / "again.sqlite")
    write_file(folder / "direct.sqlite", rows_of([choice for part in parts for choice in part]))
    results = [folder / f"{n}.sqlite" for n in ("at once", "one by one", "again", "direct")]
    assert len({result.read_bytes() for result in results}) == 1
    assert len({database_digest(result) for result in results}) == 1
    assert [file.read_bytes() for file in files] == before, "sources are never changed"
    assert len(read_rows(results[0])["timing"]) == len({c for part in parts for c in part})
    assert not list(folder.glob("*.tmp*"))


def test_digest_tells_contents_apart(tmp_path: Path) -> None:
    digests = set()
    for i, choices in enumerate(([], [(0, 1, 0)], [(0, 1, 1)], [(0, 1, 0), (0, 1, 1)])):
        write_file(tmp_path / f"{i}.sqlite", rows_of(choices))
        digests.add(database_digest(tmp_path / f"{i}.sqlite"))
    assert len(digests) == 4


def test_two_contents_of_one_key_are_refused(tmp_path: Path, database: Path) -> None:
    rows = rows_of([(0, 1, 0)])
    write_file(database, rows)
    write_file(tmp_path / "other.sqlite", edited(rows, "timing", latency_us_p50=10.5))
    before = database.read_bytes()
    key = rows["timing"][0][0]
    with pytest.raises(DatabaseError, match=rf"timing row {key}.*latency_us_p50 11\.0 and 10\.5"):
        merge([tmp_path / "other.sqlite"], database)
    assert database.read_bytes() == before
    with pytest.raises(DatabaseError, match=key):
        merge([tmp_path / "other.sqlite", database], tmp_path / "new.sqlite")
    assert not (tmp_path / "new.sqlite").exists(), "all or nothing"


@pytest.mark.parametrize(
    ("name", "changes"), [("timing", {"regime": "eager"}), ("problem", {"m": 7}),
                          ("kernel", {"digest": "f" * 64})]
)  # fmt: skip
def test_a_row_without_the_key_of_its_content_is_refused(
    tmp_path: Path, database: Path, name: str, changes: dict[str, Any]
) -> None:
    write_file(tmp_path / "edited.sqlite", edited(rows_of([(0, 1, 0)]), name, **changes))
    with pytest.raises(DatabaseError, match=f"{name} row .* does not have the key of its content"):
        merge([tmp_path / "edited.sqlite"], database)


def test_nan_from_a_server_is_refused(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL, unlike SQLite, can hold one: it is larger than every number there."""
    rows = edited(rows_of([(0, 1, 0)]), "timing", kernel_err=math.nan)
    monkeypatch.setattr("lokakern.registry.storage.merge.read_rows", lambda _source: rows)
    with pytest.raises(DatabaseError, match="NaN"):
        merge([database], database)


def test_failed_merge_leaves_the_target(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(database, rows_of([(0, 1, 0)]))
    write_file(tmp_path / "more.sqlite", rows_of([(1, 2, 0)]))
    before = database.read_bytes()

    def full(*_paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lokakern.registry.storage.writer.os.replace", full)
    with pytest.raises(DatabaseError, match="No space left"):
        merge([tmp_path / "more.sqlite"], database)
    assert database.read_bytes() == before and not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("name", ["what?.sqlite", "100%25.sqlite", "a#b.sqlite", "a b [1]*.sqlite"])
def test_file_names_with_special_characters(tmp_path: Path, name: str) -> None:
    """A question mark would end the URI and make the reader writable."""
    with begin(tmp_path / name) as run:
        add(run)
    merge([tmp_path / name], tmp_path / "copy.sqlite")
    assert (tmp_path / "copy.sqlite").read_bytes() == (tmp_path / name).read_bytes()
    with open_readonly(tmp_path / name) as connection, pytest.raises(Exception, match="readonly"):
        connection.execute("DELETE FROM timing")
    assert {path.name for path in tmp_path.iterdir()} == {
        name, f"{name}.lock", f"{name}.runs", "copy.sqlite", "copy.sqlite.lock"
    }  # fmt: skip


def test_sqlite_url_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "u.sqlite"
    with begin(f"sqlite:///{path}") as run:
        add(run)
    assert merge([f"sqlite:///{path}"], f"sqlite:///{tmp_path}/v.sqlite").added["timing"] == 1
    assert (tmp_path / "v.sqlite").read_bytes() == path.read_bytes()
    for bad in ("sqlite://", "no such://x"):
        with pytest.raises(DatabaseError, match="URL"):
            merge([path], bad)


def test_merging_into_a_server(tmp_path: Path) -> None:
    """The statements for PostgreSQL, on a SQLite engine: missing rows in one transaction."""
    engine = create_engine(f"sqlite:///{tmp_path / 'server.sqlite'}")
    rows = rows_of([(0, 1, 0), (1, 2, 0)])
    assert insert_missing(engine, rows).added["timing"] == 2
    more = rows_of([(2, 3, 1), (1, 2, 0), (0, 9, 2)])
    report = insert_missing(engine, more)
    assert (report.added["timing"], report.known["timing"], report.added["kernel"]) == (2, 1, 2)
    both = rows_of([(0, 1, 0), (1, 2, 0), (2, 3, 1), (0, 9, 2)])
    with engine.connect() as connection:
        found = read_tables(connection, tables.SCHEMA_VERSION)
    assert {n: set(r) for n, r in found.items()} == {n: set(r) for n, r in both.items()}
    bad = edited(rows_of([(0, 1, 0), (3, 3, 2)]), "timing", kernel_err=1.0)
    with pytest.raises(DatabaseError, match="two contents"):
        insert_missing(engine, bad)
    with engine.connect() as connection:
        kept = read_tables(connection, tables.SCHEMA_VERSION)
    assert kept == found, "nothing of a refused merge stays"


def test_an_older_server_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables on a server say their version in comments, which SQLite does not have."""
    path = tmp_path / "server.sqlite"
    path.write_bytes(FIXTURES[1].read_bytes())
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection, pytest.raises(DatabaseError, match="no table 'test_res"):
        check_server(connection)
    monkeypatch.setattr(engine.dialect, "supports_comments", True)
    monkeypatch.setattr(
        engine.dialect, "get_table_comment", lambda *_, **__: {"text": "lokakern schema 1"}
    )
    with engine.connect() as connection:
        assert check_server(connection) == 1
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="has schema version 1; merges write version 4"):
        insert_missing(engine, rows_of([(0, 1, 0)]))
    assert path.read_bytes() == before


def test_passwords_are_not_shown() -> None:
    with pytest.raises(DatabaseError) as caught:
        merge([], "nosuchdialect://me:secret@host/db")
    assert "secret" not in str(caught.value)


# Files from anyone


def test_released_schema_versions_stay_readable() -> None:
    """A fixture of every released version stays."""
    assert set(VERSIONS) == set(FIXTURES), "add a fixture for the new version"
    present = {name: sorted(rows) for name, rows in small_rows().items()}
    assert read_rows(FIXTURES[4]) == present
    present["host_cost"] = []
    present["device"].sort()
    assert read_rows(FIXTURES[3]) == read_rows(FIXTURES[2]) == present
    assert read_rows(FIXTURES[1]) == {**present, "test_result": []}
    assert database_digest(FIXTURES[4]) != database_digest(FIXTURES[3])
    assert database_digest(FIXTURES[3]) == database_digest(FIXTURES[2])
    assert [database_digest(FIXTURES[version]) for version in (1, 2)] == [
        "a4f50d6b665c72afc699aab955a83b882537c9efe6c02baf3dee84443b297a74",
        "a277f618ea68eeeb2318e12b6a121ffcd01098892bafb0782d9bda39de59bbbd",
    ]


def test_files_hold_the_bytes_of_keys(database: Path) -> None:
    write_fixture(database)
    with closing(sqlite3.connect(database)) as connection:
        for table in tables.TABLES:
            kinds = connection.execute(f"SELECT DISTINCT typeof(key), length(key) FROM {table}")
            assert kinds.fetchall() == [("blob", 16 if table == "run" else 32)]
            found = connection.execute(f"SELECT lower(hex(key)) FROM {table}").fetchall()
            assert sorted(key for (key,) in found) == [row["key"] for row in
                                                       rows_as_dicts(database, table)]  # fmt: skip


def test_a_written_file_has_no_unused_pages(database: Path) -> None:
    """Inserted in order, pages would stay a tenth empty."""
    write_fixture(database)
    before = database.stat().st_size
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("VACUUM")
    assert database.stat().st_size == before


def test_an_older_file_merges_into_one_of_the_present_version(database: Path) -> None:
    before = FIXTURES[1].read_bytes()
    database.write_bytes(before)
    assert merge([FIXTURES[1]], database).added["timing"] == 0
    assert database.read_bytes() == before, "nothing new: the file is let alone"
    with begin(database) as run:
        add(run)
    assert merge([FIXTURES[2]], database).added == {
        **dict.fromkeys(tables.TABLES, 0),
        "test_result": 2,
    }
    with open_readonly(database) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert len(rows_as_dicts(database, "timing")) == len(small_rows()["timing"]) + 1


def test_dispatch_reads_an_older_file() -> None:
    facts = load_snapshot([FIXTURES[1]])
    assert content_digest(facts) == database_digest(FIXTURES[1])
    assert facts.test_results == []
    dispatcher.use_snapshot(facts)
    try:
        choice = dispatcher.dispatch(
            "gemm", (4096, 512, 1024), 0.06, device="NVIDIA H200", a=A, b=B
        )
    finally:
        dispatcher.use_snapshot(None)
    assert (choice.kernel, choice.latency_us) == ("torch.bf16", OK.latency_us_p50)
    assert "stale" in choice.explain()


def refused(path: Path, words: str) -> None:
    """Reading and merging both refuse, say why, and leave the file as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(DatabaseError, match=words) as caught:
        database_digest(path)
    assert str(path) in str(caught.value) and ";" in str(caught.value), "asked, found, what to do"
    with pytest.raises(DatabaseError, match=words):
        merge([path], path.with_name("into.sqlite"))
    with pytest.raises(DatabaseError, match=words):
        merge([FIXTURE], path) if path.exists() else database_digest(path)
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 5", "schema version 5.*reads 1, 2, 3, 4; install a newer"),
        ("PRAGMA user_version = 0", "schema version 0"),
        ("PRAGMA user_version = 2", "schema of version 2: accuracy is .*BLOB.*; expected .*TEXT"),
        ("PRAGMA application_id = 7", "application id 0x7; expected 0x4c4f4b41"),
        ("PRAGMA journal_mode = WAL", "write-ahead log"),
        ("ALTER TABLE timing DROP COLUMN timer", "timing is .*; expected"),
        ("ALTER TABLE timing ADD COLUMN note TEXT", "timing is .*note"),
        ("DROP TABLE accuracy", "accuracy is missing"),
        ("DROP TABLE test_result", "schema of version 4: test_result is missing"),
        ("DROP TABLE host_cost", "schema of version 4: host_cost is missing"),
        ("PRAGMA user_version = 3", "host_cost is there, a table; expected nothing of that name"),
        ("CREATE TABLE extra (x)", "extra is .*nothing of that name"),
        ("CREATE VIEW endless AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) "
         "SELECT x FROM c", "endless is .*view"),
        ("CREATE TRIGGER t AFTER INSERT ON run BEGIN DELETE FROM run; END", "t is .*trigger"),
        ("CREATE INDEX i ON timing (kernel)", "i is .*index"),
    ],
)  # fmt: skip
def test_foreign_schema_is_refused(database: Path, statement: str, words: str) -> None:
    refused(changed(database, statement), words)


def test_view_in_place_of_a_table_is_refused(database: Path) -> None:
    changed(
        database,
        "DROP TABLE accuracy",
        "CREATE VIEW accuracy AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) "
        "SELECT x FROM c",
    )
    refused(database, "accuracy is .*view")


def test_other_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.sqlite"
    write_fixture(whole)
    content = whole.read_bytes()
    files = {
        "text": (b"latency_us_p50,kernel\n" * 20, "starts with b'latency_us_p50,k'"),
        "empty": (b"", "is empty"),
        "cut": (content[:-4096], "cut off"),
        "cut inside a page": (content[:-100], "cut off"),
        "header only": (content[:100], "cut off"),
        "half a header": (content[:50], "is cut off after 50 bytes; expected a SQLite file"),
        "half a name": (content[:9], "is cut off after 9 bytes"),
        "grown": (content + b"x" * 4096, "header says"),
        "scrambled": (content[:100] + os.urandom(len(content) - 100), "cannot be read"),
    }
    for name, (found, words) in files.items():
        (tmp_path / name).write_bytes(found)
        refused(tmp_path / name, words)
    refused(tmp_path, "not a file")
    refused(tmp_path / "absent", "No such file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a file")


def test_file_with_a_journal_beside_it_is_refused(database: Path) -> None:
    """An immutable reader would not see that it has to be rolled back."""
    write_fixture(database)
    database.with_name(database.name + "-journal").write_bytes(b"x")
    refused(database, "journal")


def test_dangling_reference_is_refused(database: Path) -> None:
    refused(changed(database, "DELETE FROM kernel WHERE id = 1"), "refers to kernel")


COPY = "INSERT INTO {0} SELECT {1} FROM {0} LIMIT 1"


def copied(table: str, **values: str) -> str:
    """SQL that copies a row with other values."""
    columns = [column.name for column in tables.TABLES[table].columns]
    return COPY.format(table, ", ".join(values.get(column, column) for column in columns))


NEW_KEY = "x'" + "9" * 64 + "'"


@pytest.mark.parametrize(
    ("table", "values", "complaint"),
    [
        ("timing", {}, None),
        ("timing", {"status": "'ok'", "latency_us_p50": "NULL"}, "CHECK"),
        ("timing", {"status": "'wrong'", "reason": "''"}, "CHECK"),
        ("timing", {"status": "'good'"}, "CHECK"),
        ("timing", {"latency_us_p20": "-1.0"}, "CHECK"),
        ("timing", {"latency_us_p50": "x'01'"}, "cannot store BLOB"),
        ("timing", {"replay_count": "'many'"}, "cannot store TEXT"),
        ("timing", {"key": "x'99'"}, "CHECK"),
        ("timing", {"key": "'" + "9" * 64 + "'"}, "cannot store TEXT"),
        ("timing", {"key": "NULL"}, "NOT NULL"),
        ("timing", {"key": "key"}, "UNIQUE"),
        ("timing", {"kernel": "99"}, "FOREIGN KEY"),
        ("timing", {"regime": "NULL"}, "NOT NULL"),
        ("accuracy", {"row_err": "NULL"}, "CHECK"),
        ("accuracy", {"row_err": "-0.1"}, "CHECK"),
        ("accuracy", {"flushed_share": "1.5"}, "CHECK"),
        ("accuracy", {"row_err": "x'7fffffff'"}, "cannot store BLOB"),
        ("test_result", {}, None),
        ("test_result", {"passed_count": "0", "failed_count": "0"}, "CHECK"),
        ("test_result", {"failed_count": "1", "status": "'ok'", "reason": "''"}, "CHECK"),
        ("test_result", {"status": "'nothing'", "reason": "'x'"}, "CHECK"),
        ("test_result", {"seeds": "NULL"}, "NOT NULL"),
        ("problem", {"id": "NULL", "prepared": "2"}, "CHECK"),
        ("problem", {"id": "NULL", "b": "NULL"}, "NOT NULL"),
        ("problem", {"id": "NULL", "key": "key"}, "UNIQUE"),
        ("run", {"id": "NULL", "key": "x'" + "8" * 32 + "'", "grade": "'best'"}, "CHECK"),
    ],
)
def test_constraints_apply_to_inserts_outside_lokakern(
    database: Path, table: str, values: dict[str, str], complaint: str | None
) -> None:
    """They apply to any INSERT; the first case shows that a valid row passes."""
    write_fixture(database)
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA foreign_keys = ON")
    statement = copied(table, **({"key": NEW_KEY} | values))
    if complaint is None:
        connection.execute(statement)
    else:
        with pytest.raises(sqlite3.IntegrityError, match=complaint):
            connection.execute(statement)
    connection.close()


# Identity


def test_keys_are_stable() -> None:
    """Keys are stored: code that changes them splits every database in two."""
    assert (
        row_keys.key_of(PROBLEM)
        == "172bbf42bc628ccff4d8c357bb94558572ba30a93a347554bf48d808b1bbaf4f"
    )
    assert (
        row_keys.key_of(DEVICE)
        == "09f4a37b5967b122ff3ca3b5bdf3ed89abc4ea2b9c79770c3d33b4f4ea5769ed"
    )
    assert (
        row_keys.key_of(KERNEL)
        == "ca1f7f7ae8f8178568e01dbd289bee577c73ca2dfcfd228bfa99c5d0882c9cbb"
    )


@settings(max_examples=50, deadline=None)
@given(
    m=st.integers(1, 2**40),
    op=st.sampled_from(["gemm", "quantize"]),
    b=st.none() | st.builds(Operand, st.sampled_from(Format), st.sampled_from(Granularity)),
    prepared=st.booleans(),
    epilogue=st.text(max_size=5),
    out_format=st.sampled_from(Format),
)
def test_problems_survive_a_round_trip_through_a_row(**values: Any) -> None:
    problem = Problem(n=3, k=4, a=A, **values)
    row = row_keys.row_of(problem)
    assert row_keys.from_row(Problem, row) == problem
    assert row_keys.row_key("problem", row) == row["key"] == row_keys.key_of(problem)
    assert row_keys.family_key(problem) == row_keys.family_key(dataclasses.replace(problem, m=1))
    assert row_keys.key_of(problem) != row_keys.key_of(
        dataclasses.replace(problem, m=problem.m + 1)
    )


def test_every_field_of_a_problem_is_identity() -> None:
    others: dict[str, Any] = {
        "op": "scaled_gemm", "m": 1, "n": 1, "k": 1, "batch": 2, "a": B, "b": None,
        "prepared": True, "epilogue": "bias", "out_format": Format.FLOAT32,
        "out_granularity": Granularity.ROW, "out_strided": True, "accumulate": True,
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(Problem)}
    keys = {row_keys.key_of(dataclasses.replace(PROBLEM, **{n: v})) for n, v in others.items()}
    families = {
        row_keys.family_key(dataclasses.replace(PROBLEM, **{n: v})) for n, v in others.items()
    }
    assert len(keys | {row_keys.key_of(PROBLEM)}) == len(others) + 1
    assert len(families | {row_keys.family_key(PROBLEM)}) == len(others)  # all but m


def test_a_field_added_later_keeps_old_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_keys.row_of(DEVICE)
    old = row.pop("key")
    monkeypatch.setitem(row_keys.ADDED_LATER, "device", {"ecc": "unknown"})
    assert row_keys.identity_key("device", row | {"ecc": "unknown"}) == old
    assert row_keys.identity_key("device", row | {"ecc": "on"}) != old
    assert row_keys.identity_key("device", row | {"partition": "unknown"}) != old


@pytest.mark.parametrize("value", [None, 1.5, True])
def test_identity_is_never_null_nor_a_float(value: Any) -> None:
    """UNIQUE over NULL admits duplicates; floats and booleans have several texts."""
    with pytest.raises(DatabaseError, match="driver"):
        row_keys.identity_key("environment", {"driver": value})


def test_parameters_are_canonical() -> None:
    assert DistributionRow.of("X", {"b": 1, "a": [2]}) == DistributionRow.of(
        "X", {"a": [2], "b": 1}
    )
    with pytest.raises(DatabaseError, match="finite"):
        DistributionRow.of("X", {"a": math.inf})
    with pytest.raises(DatabaseError, match="finite"):
        DistributionRow.of("X", {"a": object()})


# Places


def test_user_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "mine.sqlite"))
    assert user_database() == tmp_path / "mine.sqlite"
    monkeypatch.setenv("LOKAKERN_DB", "postgresql://host/db")
    with pytest.raises(DatabaseError, match="expected a path"):
        user_database()
    monkeypatch.delenv("LOKAKERN_DB")
    assert user_database().name == "lokakern.sqlite"


def test_shipped_databases_are_readable() -> None:
    for path in shipped_databases():
        read_rows(path)


def test_host_costs_of_two_databases_merge(tmp_path: Path) -> None:
    """Each run is a fact of its own; the same fact twice is there once, and is never changed."""
    one, other, both = (tmp_path / f"{name}.sqlite" for name in ("one", "other", "both"))
    for path, us in ((one, 12.5), (other, 13.0)):
        with begin(path) as run:
            cost = dataclasses.replace(HOST_COST, host_us_p50=us)
            run.add_host_cost(DEVICE, ENVIRONMENT, cost)
            with pytest.raises(DatabaseError, match=r"host_cost row .* was refused: UNIQUE"):
                run.add_host_cost(DEVICE, ENVIRONMENT, cost)
    assert merge([one, other], both).added["host_cost"] == 2
    assert merge([other, one, both], both).added["host_cost"] == 0
    found = rows_as_dicts(both, "host_cost")
    assert sorted(row["host_us_p50"] for row in found) == [12.5, 13.0]
    assert {row["cpu"] for row in found} == {HOST_COST.cpu}
    rows = read_rows(both)
    write_file(tmp_path / "edited.sqlite", edited(rows, "host_cost", host_us_p80=99.0))
    with pytest.raises(DatabaseError, match=r"two contents .host_us_p80 "):
        merge([tmp_path / "edited.sqlite"], both)


@pytest.mark.parametrize(
    "change",
    [
        {"host_us_p20": 0.0}, {"host_us_p20": 99.0}, {"host_us_p80": 1.0}, {"cpu": ""},
        {"regime": "graph-cold"}, {"path": "rust"}, {"round_count": 0}, {"calls_per_round": 0},
    ],
)  # fmt: skip
def test_impossible_host_costs_are_refused(database: Path, change: dict[str, Any]) -> None:
    with begin(database) as run, pytest.raises(DatabaseError, match=r"host_cost row .*CHECK"):
        run.add_host_cost(DEVICE, ENVIRONMENT, dataclasses.replace(HOST_COST, **change))
