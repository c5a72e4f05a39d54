"""Foreign files, with any content, are read completely or refused without an effect."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import CheckConstraint

from lokakern.errors import DatabaseError
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.schema.value_rules import constraints_of
from lokakern.registry.sharing.import_file import import_file, read_foreign
from lokakern.registry.sharing.untrusted import GUARDS, open_guarded
from lokakern.registry.sharing.validate import check
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import read_rows
from tests.support.foreign_files import (
    BYTES,
    SCHEMA,
    STATEMENTS,
    VALUES,
    Mutation,
    base_rows,
    mutate_rows,
    write_base,
)
from tests.support.fuzz_foreign import attempt
from tests.support.run_files import FIXTURES, changed

LARGE = st.integers(0, 2**32 - 1)
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of others, and a database to import into."""
    place = tmp_path_factory.mktemp("foreign")
    write_base(place / "base.sqlite")
    write_base(place / "target.sqlite", run=2)
    return place


@pytest.fixture
def base(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "base.sqlite"
    path.write_bytes((folder / "base.sqlite").read_bytes())
    return path


def mutations(kinds: int) -> st.SearchStrategy[list[Mutation]]:
    return st.lists(
        st.builds(Mutation, st.integers(0, kinds - 1), LARGE, LARGE), min_size=1, max_size=4
    )


@QUICK
@given(found=mutations(len(BYTES)))
def test_files_with_damaged_bytes_are_refused_or_harmless(
    folder: Path, found: list[Mutation]
) -> None:
    attempt(folder / "base.sqlite", folder, ("bytes", found))


@pytest.mark.rest
@QUICK
@given(found=mutations(len(STATEMENTS)))
@example(found=[Mutation(STATEMENTS.index(SCHEMA[0]), 0, 1)])
def test_files_with_edited_rows_are_refused_or_harmless(
    folder: Path, found: list[Mutation]
) -> None:
    attempt(folder / "base.sqlite", folder, ("rows", found))


HARMLESS = ("CREATE VIRTUAL TABLE", "CREATE TEMP", "auto_vacuum", "page_size", "UTF-16")


@pytest.mark.parametrize("statement", SCHEMA)
def test_an_edited_schema_is_refused(folder: Path, statement: str) -> None:
    """Some of them this SQLite does not do, and some leave the rows as they were."""
    found = Mutation(STATEMENTS.index(statement), 0, 0)
    outcome = attempt(folder / "base.sqlite", folder, ("rows", [found]))
    assert outcome == "refused" or any(words in statement for words in HARMLESS) or (
        (folder / "damaged.sqlite").read_bytes() == (folder / "base.sqlite").read_bytes()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        (
            "timing",
            "latency_us_p50 = 1e999",
            "latency_us_p50 is inf; expected a number of at mo",
        ),
        ("timing", "latency_us_p50 = NULL", "breaks a constraint; expected status <> 'ok' OR"),
        ("timing", "latency_us_p50 = x'7ff8'", r"latency_us_p50 is b'.*'; expected a number"),
        ("timing", "latency_us_p20 = -1", "latency_us_p20 is -1; expected at least"),
        (
            "timing",
            "latency_us_p20 = 0.125",
            "latency_us_p20 is 0.125; expected at least [0-9.]+, which gemm .* takes on ",
        ),
        ("timing", "latency_us_p20 = 1e6", "expected latency_us_p20 <= latency_us_p50"),
        ("timing", "replay_count = -9223372036854775808", "replay_count is -9.*from 0 to"),
        ("timing", "status = 'fine'", "status is 'fine'; expected one of crashed, error, ok"),
        ("timing", "regime = 'warm'", "regime is 'warm'; expected one of eager, graph-cold"),
        ("timing", "timer = CAST(x'c328' AS TEXT)", r"timer is b'\\xc3\('; expected UTF-8"),
        ("timing", "timer = 'a' || char(27)", "timer is 'a.x1b'; expected text of at most 1000"),
        ("timing", "timer = x'00'", "timer is b'.x00'; expected text"),
        ("timing", "reason = hex(zeroblob(300))", "reason is '0000.*at most 500 printable"),
        ("timing", "measured_utc_ms = 1", "measured_utc_ms is 1; expected a whole number from 157"),
        ("timing", "measured_utc_ms = 9e15", "measured_utc_ms is 9000000000000000; expected"),
        ("timing", "kernel = 99", "it refers to kernel 99, which is not there; expected an id"),
        ("timing", "kernel = 'x'", "kernel is 'x'; expected a whole number"),
        ("timing", "key = zeroblob(32)", "0000: it does not have the key of its content"),
        ("timing", "key = zeroblob(31)", "it does not have the key of its content"),
        ("accuracy", "row_err = -0.1", "row_err is -0.1; expected at least"),
        (
            "accuracy",
            "row_err = 0.0005",
            "row_err is 0.0005; expected at least 0.000564, which rounding leaves",
        ),
        ("accuracy", "mean_rel_err = -0.1", "mean_rel_err is -0.1; expected at least"),
        ("accuracy", "row_err_upper = row_err / 2", "expected at least row_err, which is"),
        ("accuracy", "mean_shift_upper = 0", "expected at least mean_shift, which is"),
        ("accuracy", "flushed_share = 1.5", "constraint; expected flushed_share <= 1"),
        ("accuracy", "seed = 0.5", "seed is 0.5; expected a whole number"),
        ("accuracy", "rows = 1 << 60", "rows is 1152921504606846976; expected a whole number"),
        (
            "test_result",
            "failed_count = 1 - failed_count",
            "expected .status = '(failed|ok)'. = .failed_count",
        ),
        ("host_cost", "host_us_p50 = 1e999", "host_us_p50 is inf; expected a number of at most 1"),
        ("host_cost", "host_us_p80 = 2e5", "host_us_p80 is 200000.0; expected a number of at mo"),
        ("host_cost", "host_us_p20 = 0.1", "host_us_p20 is 0.1; expected at least 0.3, which no"),
        ("host_cost", "host_us_p20 = 1e3", "constraint; expected host_us_p20 <= host_us_p50"),
        ("host_cost", "host_us_p50 = NULL", "host_us_p50 is None; expected a number"),
        ("host_cost", "round_count = 0", "constraint; expected round_count > 0"),
        ("host_cost", "regime = 'graph-cold'", "regime is 'graph-cold'; expected one of comp"),
        ("host_cost", "path = ''", "path is ''; expected one of native, python, torch"),
        ("host_cost", "cpu = 'a' || char(27)", "cpu is 'a.x1b'; expected text of at most 1000"),
        ("host_cost", "call = 'training'", "it does not have the key of its content"),
        ("problem", "m = 7", "it does not have the key of its content"),
        ("kernel", "granularity = 'x'", "granularity is 'x'; expected one of"),
        ("run", "grade = 'best'", "grade is 'best'; expected one of full, quick"),
        ("run", "key = x'77'", "run '77' is not a UUID in hex"),
        ("distribution", "realistic = 2", "it does not have the key|breaks a constraint"),
    ],
)
def test_a_value_that_no_row_may_have_is_named(
    folder: Path, tmp_path: Path, table: str, change: str, words: str
) -> None:
    """The error names the table, the key and the expected value."""
    path = tmp_path / "edited.sqlite"
    (where, *_) = (s for s in VALUES if s.startswith(f"UPDATE {table} "))
    statement = f"UPDATE {table} SET {change} WHERE {where.split(' WHERE ')[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.foreign_files.STATEMENTS", (statement,))
        patch.setattr("tests.support.foreign_files.VALUES", (statement,))
        mutate_rows(folder / "base.sqlite", path, [Mutation(0, 0, 1)])
    with pytest.raises(DatabaseError, match=words) as caught:
        read_foreign(path)
    assert re.search(rf"edited.sqlite': {table} row [0-9a-f]+: ", str(caught.value))
    assert len(str(caught.value).splitlines()) == 1


def rewritten(base: Path, table: str, **changes: Any) -> None:
    """Change what a row stands for and give it, and what refers to it, the keys of that."""
    with closing(sqlite3.connect(base)) as connection, connection:
        columns = ", ".join(f'"{column}"' for column in COLUMNS[table])
        number, *values = connection.execute(f"SELECT id, {columns} FROM {table}").fetchone()
        row = dict(zip(COLUMNS[table], values, strict=True)) | changes
        key = bytes.fromhex(row_keys.row_key(table, row))
        for column, value in (row | {"key": key}).items():
            statement = f'UPDATE {table} SET "{column}" = ? WHERE id = ?'
            connection.execute(statement, (value, number))


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ("problem", {"a": "bfloat17/none/row-major/16"}, "'bfloat17' is not a valid Format"),
        ("problem", {"b": "bfloat16/none"}, "problem row .* cannot be read"),
        ("kernel", {"modules": "cuda/a,../../../etc/passwd"}, r"modules has '\.\./\.\."),
        ("kernel", {"modules": "/etc/passwd"}, "modules has '/etc/passwd'; expected names of file"),
        (
            "distribution",
            {"parameters": '{"a":NaN}'},
            "parameters is .*; expected a JSON",
        ),
        ("distribution", {"parameters": '{"b":1, "a":1}'}, "expected a JSON object, canonical"),
        ("distribution", {"parameters": "[" * 60_000}, "expected a JSON object, canonical"),
        ("device", {"product": "GPU\x1b[2J"}, "product is 'GPU.x1b"),
    ],
)
def test_an_invalid_row_with_a_correct_key_is_refused(
    base: Path, table: str, changes: dict[str, Any], words: str
) -> None:
    rewritten(base, table, **changes)
    with pytest.raises(DatabaseError, match=words):
        read_foreign(base)


def test_errors_may_be_infinite(folder: Path, base: Path) -> None:
    with closing(sqlite3.connect(base)) as connection, connection:
        connection.execute("UPDATE accuracy SET row_max = 1e999")
    assert {
        row[COLUMNS["accuracy"].index("row_max")] for row in read_foreign(base)["accuracy"]
    } == {float("inf")}


def test_every_constraint_of_the_models_is_checked() -> None:
    for name, table in TABLES.items():
        declared = sum(isinstance(c, CheckConstraint) for c in table.constraints)
        assert len(constraints_of(name)) == declared
    assert sum(len(constraints_of(name)) for name in FACTS) > 40


@pytest.mark.parametrize("version", FIXTURES)
def test_every_released_version_is_imported(tmp_path: Path, version: int) -> None:
    path, target = tmp_path / "old.sqlite", tmp_path / "target.sqlite"
    path.write_bytes(FIXTURES[version].read_bytes())
    with pytest.raises(DatabaseError, match="measured_utc_ms is 1; expected"):
        import_file(path, target, trusted=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE timing SET measured_utc_ms = 1700000000000")
    before = path.read_bytes()
    report = import_file(path, target, trusted=True)
    assert report.added["timing"] == 8 and report.added["test_result"] == (2 if version > 1 else 0)
    assert report.added["host_cost"] == (version > 3)
    assert path.read_bytes() == before, "never migrated in place"
    assert read_rows(target) == read_foreign(path)


# Guards


def test_a_file_is_read_in_private(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(tempfile, "tempdir", str(base.parent))
    with open_guarded(base) as opened:
        assert opened.copy.parent != base.parent
        seen.append(opened.copy.parent)
        assert stat.S_IMODE(opened.copy.parent.stat().st_mode) == 0o700
        base.write_bytes(b"changed while it is read")
        assert check(opened).counts["timing"] == 8
    assert not seen[0].exists()


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH ':memory:' AS other", "SELECT load_extension('x')", "DELETE FROM timing",
        "CREATE TEMP TABLE t (x)", "PRAGMA writable_schema = ON", "PRAGMA user_version = 9",
        "SELECT zeroblob(1000000000)", "SELECT randomblob(9)", "VACUUM INTO '/tmp/x'",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c",
        "SELECT * FROM pragma_database_list",
    ],
)  # fmt: skip
def test_only_allowed_statements_are_executed(base: Path, statement: str) -> None:
    with open_guarded(base) as opened, pytest.raises(sqlite3.Error):
        opened.connection.execute(statement).fetchall()
    assert read_foreign(base)


def test_a_file_beyond_the_limits_is_refused(base: Path) -> None:
    size = base.stat().st_size
    for guards, words in [
        (replace(GUARDS, largest_bytes=size - 1), f"is larger than {size - 1} bytes"),
        (replace(GUARDS, most_facts=7), "timing has more than 7 rows; expected at most that"),
        (replace(GUARDS, most_dimensions=1), "device has more than 1 rows"),
        (replace(GUARDS, most_characters=70), "kernel has more than 70 characters"),
        (replace(GUARDS, deadline_s=-1, deadline_s_per_mib=0), "not done after -1 s"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lokakern.registry.sharing.untrusted._OPERATIONS", 1)
            with pytest.raises(DatabaseError, match=words):
                read_foreign(base, guards)
    assert read_foreign(base, replace(GUARDS, largest_bytes=size, most_facts=8))


def test_rows_longer_than_any_of_ours_are_not_read(base: Path) -> None:
    with closing(sqlite3.connect(base)) as connection, connection:
        connection.execute("UPDATE timing SET reason = hex(zeroblob(10000))")
    with pytest.raises(DatabaseError, match="string or blob too big"):
        read_foreign(base)
    with closing(sqlite3.connect(base)) as connection, connection:
        connection.execute("UPDATE run SET command = ?", ("c" * 65_536,))
        connection.execute("UPDATE timing SET reason = '60 s'")
    assert read_foreign(base)["run"][0][COLUMNS["run"].index("command")] == "c" * 65_536


def test_paths_that_are_no_regular_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, words in [
        ("pipe", "not a file"), (".", "Is a directory|not a file"), ("absent", "is not there"),
        ("loop", "symbolic links"), ("/dev/zero", "not a file"),
    ]:  # fmt: skip
        with pytest.raises(DatabaseError, match=words):
            read_foreign(tmp_path / name)


def test_an_unfinished_file_is_refused(base: Path) -> None:
    for ending in ("-journal", "-wal"):
        beside = base.with_name(base.name + ending)
        beside.write_bytes(b"x")
        with pytest.raises(DatabaseError, match=f"has base.sqlite{ending}"):
            read_foreign(base)
        beside.unlink()
    with pytest.raises(DatabaseError, match="write-ahead log"):
        read_foreign(changed(base.with_name("wal.sqlite"), "PRAGMA journal_mode = WAL"))


def test_foreign_rows_are_read_unchanged(base: Path) -> None:
    expected = {name: sorted(rows) for name, rows in base_rows().items()}
    assert read_foreign(base) == read_rows(base) == expected
    link = base.with_name("li?nk #%41.sqlite")
    link.symlink_to(base)
    assert read_foreign(link) == expected
    assert read_foreign(f"sqlite:///{base}") == expected
