"""Facts in files: copies in memory, several sources as one, forks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lokakern.errors import DatabaseError
from lokakern.registry import sqlite_file
from lokakern.registry.schema import row_keys, tables
from lokakern.registry.snapshot import facts
from lokakern.registry.snapshot.facts import Facts, Image, image_of, image_of_rows
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.storage.merge import merge, own_part, write_union
from lokakern.registry.storage.reader import Rows, database_digest, read_rows
from lokakern.registry.storage.writer import write_file
from lokakern.selection import dispatcher
from lokakern.types import REGIMES
from tests.benchmarks.many_rows import write_many
from tests.support.run_files import FIXTURES, content_digest
from tests.support.shipped import H100_FILE, H200_FILE

PROBLEM = ("gemm", (32768, 2048, 2048), 0.06)


@pytest.fixture(scope="module")
def given() -> Rows:
    return read_rows(H200_FILE)


def same(a: Any, b: Any) -> bool:
    """Equal, and NaN where the other is NaN."""
    return repr(a) == repr(b)


def test_constants_for_reading_agree_with_the_models() -> None:
    """A new schema changes these constants, and may not be forgotten here."""
    assert tuple(tables.TABLES) == sqlite_file.TABLE_NAMES
    assert tables.COLUMNS["host_cost"] == sqlite_file.HOST_COST_COLUMNS
    assert max(sqlite_file.SCHEMA_DIGESTS) == sqlite_file.SCHEMA_VERSION
    for version, digest in sqlite_file.SCHEMA_DIGESTS.items():
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            for statement in tables.sqlite_statements(version):
                connection.execute(statement)
            assert sqlite_file.schema_digest(connection) == digest
    stored = image_of(H200_FILE)
    assert isinstance(stored, Image) and stored.columns == tables.COLUMNS


@pytest.mark.rest
def test_dispatch_imports_no_sqlalchemy(tmp_path: Path) -> None:
    """SQLAlchemy's import takes 0.45 s."""
    user = tmp_path / "user.sqlite"
    write_many(user, 100)
    code = (
        "import sys, lokakern\n"
        f"choice = lokakern.dispatch(*{PROBLEM!r}, device='NVIDIA H200')\n"
        "assert not choice.is_miss\n"
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    environment = {**os.environ, "LOKAKERN_DB": str(user)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.rest  # 10 s
def test_the_shipped_file_answers_like_its_rows(given: Rows) -> None:
    stored, rows = load_snapshot([H200_FILE]), Snapshot(given)
    assert stored.devices == rows.devices and stored.kernels == rows.kernels
    assert stored.distributions == rows.distributions
    assert same(stored.test_results, rows.test_results)
    assert stored.timing_outcomes() == rows.timing_outcomes()
    (device,) = rows.devices
    problems = [row[0] for row in given["problem"]]
    for name in ("timing", "accuracy"):  # every row; then cells, which take longer, of some
        found = {problem: stored._facts.at(name, [problem]) for problem in problems}
        assert found == {problem: rows._facts.at(name, [problem]) for problem in problems}
        assert sum(map(len, found.values())) == len(given[name])
    for regime in REGIMES:
        cells = [*itertools.islice(stored.timings_on(device, regime), 0, 5000, 250)]
        for cell in cells:
            asked = (device, row_keys.family_key(cell.problem), regime)
            assert repr(cell) in map(repr, stored.timing_cells(*asked))
            assert same(stored.timing_cells(*asked), rows.timing_cells(*asked))
    place = tables.COLUMNS["accuracy"].index("problem")
    for problem in sorted({row[place] for row in given["accuracy"]})[::40]:
        for kernel in {row.name for row in rows.kernels}:
            own = ("sm_90", kernel, problem)
            assert same(stored.accuracy_cells(*own), rows.accuracy_cells(*own))
        for alike in {(k.granularity, k.b_granularity, k.accumulation) for k in rows.kernels}:
            of_class = ("sm_90", problem, *alike)
            assert same(
                stored.accuracy_cells_of_class(*of_class), rows.accuracy_cells_of_class(*of_class)
            )
    for row in given["environment"]:
        assert stored.casualties(device, row[0]) == rows.casualties(device, row[0])
    for distribution in rows.distributions:
        for architecture in ("sm_90", "sm_100"):
            where = (architecture, distribution.name)
            assert stored.parameters_of(*where) == rows.parameters_of(*where)
    assert stored.digest == rows.digest
    assert content_digest(stored) == content_digest(rows)
    assert repr(stored) == repr(Snapshot(given, [str(H200_FILE)]))


def split(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Two sources that have a third of the facts both."""
    draw = random.Random(seed)
    one, other = dict(rows), dict(rows)
    for name in sqlite_file.FACTS:
        where = [draw.choice("12b") for _ in rows[name]]
        one[name] = [row for row, side in zip(rows[name], where, strict=True) if side in "1b"]
        other[name] = [row for row, side in zip(rows[name], where, strict=True) if side in "2b"]
    return one, other


@pytest.mark.parametrize("stored", [(True, True), (True, False), (False, False)])
def test_facts_in_two_sources_count_once(
    given: Rows, tmp_path: Path, stored: tuple[bool, bool]
) -> None:
    few = {
        name: rows if name in sqlite_file.DIMENSIONS else rows[::20] for name, rows in given.items()
    }
    parts: list[Image] = []
    for place, (rows, is_stored) in enumerate(zip(split(few, 0), stored, strict=True)):
        path = tmp_path / f"{place}.sqlite"
        write_file(path, rows)
        parts.append(image_of(path) if is_stored else image_of_rows(rows))
    both, expected = Facts(parts), Facts([image_of_rows(few)])
    for name in sqlite_file.FACTS:
        assert both.count(name) == len(few[name])
        assert list(both.rows(name)) == list(expected.rows(name))
    (device,) = (row[0] for row in few["device"])
    assert both.count("timing", device=device, status="ok") == expected.count(
        "timing", device=device, status="ok"
    )
    assert not both.has("timing", device="0" * 64) and both.has("timing", device=device)
    problems = [row[0] for row in few["problem"]]
    for name in ("timing", "accuracy"):
        found = [sorted(part.at(name, problems), key=lambda row: row[0])
                 for part in (both, expected)]  # fmt: skip
        assert found[0] == found[1] and len(found[0]) == len(few[name])
        columns = ("kernel", "run", "status")
        assert {*both.picked(name, columns)} == {*expected.picked(name, columns)}
    assert Snapshot(both).digest == Snapshot(few).digest
    assert content_digest(Snapshot(both)) == content_digest(Snapshot(few))


def edited(path: Path, *statements: str) -> Path:
    """A file after somebody got past its constraints."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.sqlite"
    write_many(path, 100)
    return path


def test_a_file_loaded_three_times_counts_once(small: Path) -> None:
    thrice = load_snapshot([small] * 3)
    assert content_digest(thrice) == database_digest(small)
    assert thrice._facts.count("accuracy") == 60


@pytest.mark.parametrize(
    ("change", "table"),
    [
        ("UPDATE timing SET latency_us_p80 = 1e9 WHERE key = (SELECT max(key) FROM timing)",
         "timing"),
        ("UPDATE accuracy SET row_err = 2.5 WHERE key = (SELECT min(key) FROM accuracy)",
         "accuracy"),
        ("UPDATE distribution SET parameters = '[]' WHERE id = 1", "distribution"),
        ("UPDATE run SET command = 'other'", "run"),
    ],
)  # fmt: skip
def test_one_key_with_two_contents(small: Path, change: str, table: str) -> None:
    """The error of merging, at load: nobody asked for the row yet."""
    other = edited(Path(shutil.copy(small, small.with_name("other.sqlite"))), change)
    with pytest.raises(DatabaseError) as expected:
        write_union(small.with_name("united.sqlite"), [own_part(small), own_part(other)])
    assert f"{table} row" in str(expected.value)
    with pytest.raises(DatabaseError) as found:
        load_snapshot([small, other])
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("as_rows", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("changes", "timings", "accuracies"),
    [
        (["UPDATE timing SET latency_us_p80 = 1e9 WHERE key = (SELECT max(key) FROM timing)"],
         39, 60),
        (["UPDATE timing SET latency_us_p80 = 1e9", "DELETE FROM accuracy"], 0, 60),
        (["UPDATE accuracy SET row_err = 2.5 WHERE key = (SELECT min(key) FROM accuracy)",
          "DELETE FROM timing WHERE key > (SELECT min(key) FROM timing)"], 40, 59),
        (["UPDATE run SET command = 'other'"], 0, 0),
        ([], 40, 60),
    ],
)  # fmt: skip
def test_contradictory_rows_are_removed_from_both_sources(
    small: Path, as_rows: tuple[bool, bool], changes: list[str], timings: int, accuracies: int
) -> None:
    other = edited(Path(shutil.copy(small, small.with_name("other.sqlite"))), *changes)
    parts = [
        image_of_rows(read_rows(path)) if is_rows else image_of(path)
        for path, is_rows in zip((small, other), as_rows, strict=True)
    ]
    assert facts.has_all(parts[0], parts[1]) is (not changes)
    assert facts.has_all(parts[1], parts[0]) is (not changes)
    assert not facts.unknown_keys(parts[1], "timing", [parts[0]])
    assert len(facts.unknown_keys(parts[0], "timing", [image_of_rows({})])) == 40
    pairs = facts.set_disputed_apart(parts)
    assert [pair[:2] for pair in pairs] == ([tuple(parts)] if changes else [])
    both = Facts(parts)
    assert (both.count("timing"), both.count("accuracy")) == (timings, accuracies)
    assert len(both.keys("timing")) == 32 * timings
    assert len(parts[0].dimensions["run"]) == (timings + accuracies > 0)


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["UPDATE timing SET problem = 99"], "timing row refers to problem 99, which is not there"),
        (["UPDATE timing SET key = CAST(key || key AS BLOB)"], "timing rows are not of 32 bytes"),
        (["ALTER TABLE timing DROP COLUMN timer"], "does not have the schema of version 4"),
        (["CREATE VIEW v AS SELECT 1"], "does not have the schema of version 4"),
    ],
)  # fmt: skip
def test_edited_files_are_refused_at_load(small: Path, statements: list[str], words: str) -> None:
    with pytest.raises(DatabaseError, match=words):
        load_snapshot([edited(small, *statements)])


def test_a_dangling_reference_is_refused_when_checks_are_requested(small: Path) -> None:
    snapshot = load_snapshot([edited(small, "UPDATE timing SET kernel = 99 WHERE kernel = 1")])
    with pytest.raises(DatabaseError, match=r"small\.sqlite.*timing row refers to kernel 99"):
        snapshot.timing_outcomes()


def test_a_corrupt_page_is_refused_at_load(tmp_path: Path) -> None:
    path = tmp_path / "corrupt.sqlite"
    write_many(path, 2000)
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2 // 8192 * 8192
    damaged[middle : middle + 8192] = b"\xff" * 8192
    path.write_bytes(damaged)
    with pytest.raises(DatabaseError, match="cannot be read"):
        load_snapshot([path])


def test_keys_are_found_among_many() -> None:
    draw = random.Random(1)
    many = sorted({draw.randbytes(32) for _ in range(2000)} | {b"\0" * 32, b"\xff" * 32})
    few = sorted({*draw.sample(many, 50), b"\xff" * 32, draw.randbytes(31) + b"\0",
                  b"a" * 31 + b"\0", b"a" * 31 + b"\1"})  # fmt: skip
    expected = [key for key in few if key in set(many)]
    assert facts.common_keys(b"".join(few), b"".join(many)) == expected
    assert facts.common_keys(b"", b"".join(many)) == []


def test_keys_are_read_whichever_way_text_with_zero_bytes_goes(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere SQLite may end text at its first zero byte; then digits are read."""
    expected = image_of(small).keys("timing")
    ask: Callable[..., Any] = Image._all

    def cut(self: Image, text: str, *rest: Any) -> Any:
        found = ask(self, text, *rest)
        if "CAST(group_concat(key" in text and found[0][1]:
            count, keys, *more = found[0]
            return [(count, keys.split(b"\0")[0], *more)]
        return found

    monkeypatch.setattr(Image, "_all", cut)
    assert b"\0" in expected and image_of(small).keys("timing") == expected


def test_a_replaced_or_overwritten_file_changes_nothing(small: Path, tmp_path: Path) -> None:
    before = load_snapshot([small])
    digest = database_digest(small)
    more = tmp_path / "more.sqlite"
    write_many(more, 300, run="b" * 32)
    merge([more], small)
    assert database_digest(small) != digest, "it was replaced"
    small.write_bytes(b"overwritten in place")
    os.unlink(small)
    assert content_digest(before) == digest


def cells_at_first(snapshot: Snapshot) -> str:
    problem = next(iter(snapshot._by_key["problem"]))
    name = snapshot.kernels[0].name
    return repr(snapshot.accuracy_cells("sm_90", name, problem))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_give_the_same_choices(small: Path) -> None:
    """While other threads of the parent are inside of SQLite, and the file is gone."""
    expected = cells_at_first(load_snapshot([small]))
    snapshot = load_snapshot([small])
    small.unlink()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            list(snapshot._facts.rows("accuracy"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        fork = multiprocessing.get_context("fork")
        for _ in range(8):
            receiver, sender = fork.Pipe(duplex=False)

            def answer(sender: Any = sender) -> None:
                sender.send((cells_at_first(snapshot), content_digest(snapshot)))

            child = fork.Process(target=answer)
            child.start()
            assert receiver.poll(60), "the child hangs"
            found = receiver.recv()
            child.join(60)
            assert child.exitcode == 0 and found == (expected, content_digest(snapshot))
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_threads_give_the_same_choices(given: Rows) -> None:
    snapshot, rows = load_snapshot([H200_FILE]), Snapshot(given)
    (device,) = rows.devices
    families = sorted({cell.problem for cell in rows.timings_on(device, "graph-cold")}, key=str)
    asked = [row_keys.family_key(problem) for problem in families[::100]]

    def ask(family: str) -> str:
        return repr(snapshot.timing_cells(device, family, "graph-cold"))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, asked))
    assert found == [repr(rows.timing_cells(device, family, "graph-cold")) for family in asked]


def test_parameters_of_several_variants_are_the_newest_of_current_kernels(given: Rows) -> None:
    """The result equals that of a scan of all rows, for any set of current kernels."""
    draw = random.Random(2)
    variants = [dataclasses.replace(row, name=f"X{i % 3}", parameters=f'{{"v":{i}}}')
                for i, row in enumerate(Snapshot(given).distributions)]  # fmt: skip
    rows_of = [row_keys.row_of(row) for row in variants]
    few: Rows = {**given, "timing": []}
    few["distribution"] = [tuple(row[c] for c in tables.COLUMNS["distribution"]) for row in rows_of]
    place = tables.COLUMNS["accuracy"].index("distribution")
    few["accuracy"] = [(*row[:place], draw.choice(rows_of)["key"], *row[place + 1 :])
                       for row in draw.sample(given["accuracy"], 60)]  # fmt: skip
    snapshot = Snapshot(few)
    started = {row[0]: row[1] for row in few["run"]}
    current = {key for key in snapshot._by_key["kernel"] if snapshot._is_current(key)}
    by_key = {row["key"]: found for row, found in zip(rows_of, variants, strict=True)}
    best: dict[str, Any] = {}
    for row in few["accuracy"]:
        values = dict(zip(tables.COLUMNS["accuracy"], row, strict=True))
        found = by_key[values["distribution"]]
        seen = (values["kernel"] in current, started[values["run"]], found.parameters)
        if values["status"] == "ok":
            best[found.name] = max(best.get(found.name, seen), seen)
    for name in ("X0", "X1", "X2"):
        assert snapshot.parameters_of("sm_90", name) == best[name][-1]
        assert snapshot.parameters_of("sm_100", name) == ""


def test_snapshots_from_rows_and_from_a_file_choose_equally(
    given: Rows,
) -> None:
    import lokakern

    explained = []
    for snapshot in (load_snapshot([H200_FILE]), Snapshot(given)):
        dispatcher.use_snapshot(snapshot)
        explained.append(lokakern.dispatch(*PROBLEM, device="NVIDIA H200").explain())
    dispatcher.use_snapshot(None)
    assert explained[0] == explained[1]


def test_memory_is_given_back() -> None:
    """Memory is freed at once, without the garbage collector, because it may be large."""
    snapshot = load_snapshot([H200_FILE])
    cells_at_first(snapshot)
    (image,) = snapshot._facts.images
    connection = image._connection
    del image
    gc.disable()
    try:
        del snapshot
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    finally:
        gc.enable()


def test_a_file_of_version_3_is_copied_with_an_empty_table() -> None:
    """The shipped file need not be read row by row because a table was added."""
    image = image_of(FIXTURES[3])
    assert image.columns == image_of(FIXTURES[4]).columns == tables.COLUMNS
    assert image.count("host_cost") == 0 and image_of(FIXTURES[4]).count("host_cost") == 1
    assert content_digest(load_snapshot([FIXTURES[3]])) == database_digest(FIXTURES[3])
    both = load_snapshot([FIXTURES[3], FIXTURES[4]])
    assert content_digest(both) == database_digest(FIXTURES[4])
    assert [cell.call for cell in both.host_costs] == ["bf16"]


def test_a_snapshot_knows_the_digests_of_its_files() -> None:
    both = load_snapshot([H100_FILE, H200_FILE])
    for path in (H100_FILE, H200_FILE):
        alone = load_snapshot([path])
        assert both.has_part(alone.digest) and alone.has_part(alone.digest)
        assert not alone.has_part(both.digest)
    assert not both.has_part(both.digest)
