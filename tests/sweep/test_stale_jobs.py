"""Stale evidence: its report, its repetition, and held-out choices."""

from __future__ import annotations

import gc
import json
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lokakern import device as devices
from lokakern.bench.cli import sweep as cli_sweep
from lokakern.bench.cli.main import app
from lokakern.bench.report import listing
from lokakern.bench.report.coverage import COUNTED, Holdings
from lokakern.device import current_device, current_environment
from lokakern.measure import operands
from lokakern.measure.accuracy import Cell
from lokakern.numerics import Errors
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.ops import OPS
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.records import (
    AccuracyRecord,
    DistributionRow,
    KernelRow,
    TimingRecord,
)
from lokakern.registry.schema.row_keys import row_key
from lokakern.registry.schema.tables import COLUMNS, REFERENCES
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.snapshot.loading import SweepDatabase, load_snapshot
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import read_rows
from lokakern.registry.storage.writer import write_file
from lokakern.render import terminal
from lokakern.selection import dispatcher
from lokakern.sweep import engine
from lokakern.sweep.ranks import RankGroup
from lokakern.sweep.resume import Job, distribution_row
from lokakern.sweep.stale_jobs import Staleness, cases_timed
from lokakern.types import Device, Environment, Format, Problem
from lokakern.workloads.distributions import DISTRIBUTIONS
from lokakern.workloads.suites import SUITES, Case
from tests.support.inline_worker import launches_take, run_tasks_here
from tests.support.rows_at_once import RowsAtOnce

load_kernels()
SHAPES = ("--shape", "64,32,32", "--shape", "96,32,32")
QUANTIZER, PLAIN = "torch.quantize_row", "torch.bf16"
COMPOSED = "torch.quantize_row+torch.emulated_row"
FEW = ("--kernel", PLAIN, "--kernel", QUANTIZER)  # and their composition
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
OK: dict[str, Any] = {
    "latency_us_p20": 1.0, "latency_us_p50": 1.0, "latency_us_p80": 1.0, "replay_count": 9,
    "void_count": 0, "calls_per_replay": 1, "kernel_err": 0.0, "kernel_err_row_p99": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ran]


def forget_devices() -> None:
    for cached in (current_device, current_environment, devices.devices_here):
        cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _small_and_quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On the CPU, one thread, few rows and operand sets, and no shipped file."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 64)
        patch.setattr("lokakern.registry.storage.paths.shipped_databases", tuple)
        patch.setattr(listing, "shipped_databases", tuple)
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", run_tasks_here)
        patch.setenv("LOKAKERN_DB", str(tmp_path_factory.mktemp("user") / "user.sqlite"))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        forget_devices()
        yield
    forget_devices()
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs the command line here."""

    def run(*words: str) -> Ran:
        capsys.readouterr()
        dispatcher.use_snapshot(None)
        with pytest.raises(SystemExit) as ended:
            app(words, prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return Ran(int(ended.value.code or 0), found.out, found.err)

    yield run
    dispatcher.use_snapshot(None)


def of_old(kernel: Kernel) -> Kernel:
    """A kernel as it was: in a state of its source that is nowhere any more."""
    made = replace(kernel)
    made.__dict__["digest"] = "1" * 64
    return made


@pytest.fixture(scope="module")
def fresh_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fresh") / "rows.sqlite"
    with pytest.raises(SystemExit) as ended:
        app(("sweep", *SHAPES, *FEW, "--db", str(path), "--quiet", "--json"))
    assert not ended.value.code
    return path


def copy_of(file: Path, folder: Path) -> str:
    path = folder / "copy.sqlite"
    path.write_bytes(file.read_bytes())
    return str(path)


def edited(file: Path, folder: Path, change: Callable[[str, dict[str, Any]], Any]) -> Path:
    """A database with other rows, under the keys that such rows have."""
    keys: dict[str, str] = {}
    made: dict[str, list[tuple[Any, ...]]] = {}
    for name, rows in sorted(read_rows(file).items(), key=lambda item: item[0] in FACTS):
        for values in rows:
            row = dict(zip(COLUMNS[name], values, strict=True))
            change(name, row)
            if name in FACTS:
                row |= {column: keys[row[column]] for column in keys_in(name)}
            keys[values[0]] = row["key"] = row_key(name, row)
            made.setdefault(name, []).append(tuple(row.values()))
    path = folder / "edited.sqlite"
    write_file(path, {name: made.get(name, []) for name in COLUMNS})
    return path


def keys_in(name: str) -> list[str]:
    """Columns of a table that hold keys of others."""
    return [COLUMNS[name][place] for place in REFERENCES[name]]


def changed(*names: str) -> Callable[[str, dict[str, Any]], None]:
    """Rows as they were before kernels of these names changed."""

    def change(table: str, row: dict[str, Any]) -> None:
        if table == "kernel" and row["name"] in names:
            row["digest"] = "1" * 64

    return change


def retooled(table: str, row: dict[str, Any]) -> None:
    """Rows as another torch would have left them."""
    if table == "environment":
        row["torch"] = "0.4.1"


@pytest.fixture(scope="module")
def changed_file(fresh_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured before the quantizer changed."""
    return edited(fresh_file, tmp_path_factory.mktemp("changed"), changed(QUANTIZER))


def rows_of_last_run(database: str | Path, table: str) -> list[tuple[str, str, int]]:
    """Kernel, op of the problem and its m, of what the newest run measured."""
    query = f"""
        SELECT kernel.name, problem.op, problem.m FROM {table}
        JOIN kernel ON kernel.id = {table}.kernel JOIN problem ON problem.id = {table}.problem
        WHERE run = (SELECT id FROM run ORDER BY started_utc_ms DESC LIMIT 1)
    """
    with closing(sqlite3.connect(database)) as connection:
        return sorted(connection.execute(query).fetchall())


def words_of_coverage(command: Command, database: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = command("list", "coverage", "--json", "--db", database).json
    return {(row["part"], row["of"]): row for row in rows}


def run_count(database: str | Path) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT count(*) FROM run").fetchone()[0])


# --- sweep --only-stale


@pytest.mark.parametrize("words", [(), SHAPES, ("--suite", "smoke")], ids=str)
def test_fresh_measurements_are_not_repeated(
    command: Command, fresh_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = copy_of(fresh_file, tmp_path)
    ran = command("sweep", "--only-stale", *words, "--db", path, "--json")
    assert ran.code == 0
    assert "nothing is stale" in ran.err
    assert "0 times of 0 problems and 0 errors" in ran.err
    assert (ran.json, run_count(path)) == ([], 1)


def test_exactly_the_stale_measurements_are_repeated(
    command: Command, changed_file: Path, tmp_path: Path
) -> None:
    path = copy_of(changed_file, tmp_path)
    ran = command("sweep", "--only-stale", "--kernel", "torch.", "--db", path, "--json")
    assert ran.code == 0
    assert "stale: 2 of 10 problems, and 39 of " in ran.err
    assert "nothing is stale" not in ran.err
    times = rows_of_last_run(path, "timing")
    assert times == [(QUANTIZER, "quantize", 64), (QUANTIZER, "quantize", 96)]
    errors = rows_of_last_run(path, "accuracy")
    assert set(errors) == {(QUANTIZER, "quantize", 64)} and len(errors) == 13 * 3
    # Rows of before are not shown beside those that replace them.
    assert [(row["kernel"], row["status"]) for row in ran.json] == 2 * [(QUANTIZER, "ok")]
    again = command("sweep", "--only-stale", "--db", path)
    assert "nothing is stale" in again.err and run_count(path) == 2


def test_a_problem_with_one_stale_kernel_is_timed_with_all_kernels(
    command: Command, fresh_file: Path, tmp_path: Path
) -> None:
    path = edited(fresh_file, tmp_path, changed(COMPOSED))
    words = ("--db", str(path), "--errors", "none")
    shown = command("sweep", *SHAPES, "--kernel", PLAIN, *words, "--json").json
    assert {(r["kernel"], r["status"]) for r in shown if r["kernel"] in (PLAIN, COMPOSED)} == {
        (PLAIN, "ok"), (COMPOSED, "stale, ok")
    }  # fmt: skip
    ran = command("sweep", "--only-stale", *FEW, *words)
    assert "stale: 4 of 10 problems" in ran.err  # as it is, and with a weight prepared by rows
    assert rows_of_last_run(path, "timing") == sorted(
        2 * [(name, "gemm", m) for name in (PLAIN, COMPOSED) for m in (64, 96)]
    )


def test_a_kernel_and_a_condition_select_stale_measurements(
    command: Command, changed_file: Path, tmp_path: Path
) -> None:
    path = copy_of(changed_file, tmp_path)
    words = ("sweep", "--only-stale", "--db", path, "--errors", "none")
    assert "nothing is stale" in command(*words, "--kernel", PLAIN).err
    ran = command(*words, "--where", "m == 96")
    assert rows_of_last_run(path, "timing") == [(QUANTIZER, "quantize", 96)]
    assert "stale: 1 of 5 problems, and 0 of 0 errors" in ran.err
    ran = command(*words, "--where", "m == 7")
    assert ran.code == 2 and "no problem of stale meets 'm == 7'" in ran.err


def test_another_toolchain_makes_everything_usable(
    command: Command, fresh_file: Path, tmp_path: Path
) -> None:
    path = edited(fresh_file, tmp_path, retooled)
    before = words_of_coverage(command, str(path))
    assert (before["gemm", "times"]["usable"], before["gemm", "times"]["fresh"]) == (12, 0)
    words = ("sweep", "--only-stale", "--db", str(path))
    ran = command(*words, *FEW, "--errors", "none")
    assert "stale: 10 of 10 problems, and 0 of 0 errors" in ran.err
    assert len(rows_of_last_run(path, "timing")) == 14
    ran = command(*words, "--kernel", QUANTIZER, "--where", "m == 96 and not prepared")
    assert "stale: 0 of 2 problems, and 78 of 78 errors" in ran.err
    assert rows_of_last_run(path, "timing") == []
    assert len(rows_of_last_run(path, "accuracy")) == 78
    after = words_of_coverage(command, str(path))
    found = after["gemm", "times"]
    assert [found[name] for name in ("rows", "fresh", "usable", "older")] == [24, 12, 0, 12]
    found = after["gemm", "errors"]  # those of the plain one wait
    assert [found[name] for name in ("rows", "fresh", "usable", "older")] == [117, 39, 39, 39]


def test_unmeasured_problems_are_left_out(
    command: Command, changed_file: Path, tmp_path: Path
) -> None:
    path = copy_of(changed_file, tmp_path)
    ran = command("sweep", "--only-stale", "--shape", "48,32,32", "--db", path, "--errors", "none")
    assert (ran.code, run_count(path)) == (0, 1)
    assert "nothing is stale" in ran.err
    missing = command("sweep", "--only-stale", *FEW, "--db", str(tmp_path / "none.sqlite"))
    assert missing.code == 0 and "nothing is stale" in missing.err


def test_shipped_rows_are_stale_too(
    command: Command, changed_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatch reads them: a sweep makes up for them in the database of the user."""
    monkeypatch.setattr("lokakern.registry.storage.paths.shipped_databases", lambda: [changed_file])
    path = tmp_path / "user.sqlite"
    words = ("sweep", "--only-stale", "--errors", "none", "--db", str(path))
    assert "stale: 2 of 10 problems" in command(*words).err
    assert rows_of_last_run(path, "timing") == [
        (QUANTIZER, "quantize", 64), (QUANTIZER, "quantize", 96)
    ]  # fmt: skip
    assert "nothing is stale" in command(*words).err


@pytest.mark.parametrize("word", ["--fresh", "--prebuild"])
def test_only_stale_excludes_other_options(command: Command, word: str) -> None:
    ran = command("sweep", "--only-stale", word)
    assert ran.code == 2 and f"goes without {word}" in ran.err


# --- ranks


@pytest.fixture
def ranks() -> Iterator[tuple[RankGroup, RankGroup]]:
    """Two of one ranks, each a client of a store of torch.distributed."""
    first = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        distributed.TCPStore("127.0.0.1", first.port, wait_for_workers=False) for _ in range(2)
    ]
    yield RankGroup(stores[0], 0, 2, patience_s=60), RankGroup(stores[1], 1, 2, patience_s=60)


def test_ranks_use_the_plan_of_the_first_rank(
    ranks: tuple[RankGroup, RankGroup], changed_file: Path, tmp_path: Path
) -> None:
    """However fresh everything is by their own databases."""
    here, path = current_device(), Path(copy_of(changed_file, tmp_path))
    reports, asked = [], []
    for group, target in zip(ranks, (path, tmp_path / "another.sqlite"), strict=True):
        with group:
            database = SweepDatabase(target)
            cases = cli_sweep._cases_timed(database, None, here, group)
            asked.append(cases)
            reports.append(
                engine.sweep(cases, database=database, suite="stale", command="", only_stale=True,
                            errors="none", ranks=group)
            )  # fmt: skip
    assert asked[0] == asked[1] and len(asked[0]) == 10
    assert reports[0].stale == reports[1].stale and len(reports[0].stale) == 2
    assert [report.timed for report in reports] == [2, 0]  # the first took all shares
    assert {str(asked[0][place].problem.op) for place in reports[1].stale} == {"quantize"}


# --- which rows make up for which


class Facts:
    """A database to be, row by row, of one problem."""

    problem = make_problem("quantize", (64, 32), out_format=Format.E4M3FN)
    # Errors of a numerics class, of which two kernels are.
    other = replace(KERNELS[QUANTIZER], name="another.quantize_row")

    def __init__(self, path: Path) -> None:
        self.path = path

    def time(
        self, kernel: Kernel, status: str = "ok", where: Device | None = None, drawn: str = "X1",
        problem: Problem = problem, torch: str = "", us: float = 1.0,
    ) -> None:  # fmt: skip
        environment = current_environment()
        environment = replace(environment, torch=torch or environment.torch)
        us_of = {name: us for name in OK if name.startswith("latency")}
        record = TimingRecord(
            status=status, **(OK | us_of if status == "ok" else {"reason": "it would"})
        )
        with self._begin() as run:
            run.add_timing(
                KernelRow.of(kernel), problem, DistributionRow.of(drawn),
                where or current_device(), environment, "eager", record,
            )  # fmt: skip

    def error(self, kernel: Kernel, status: str = "ok", **parameters: float) -> None:
        metrics: dict[str, Any] = {}
        if status == "ok":
            names = Errors.__dataclass_fields__
            metrics = {
                "errors": Errors(**{name: 0 for name in names}), "kernel_err": 0.0,
                "kernel_err_row_p99": 0.0, "flushed_share": 0.0, "saturated_share": 0.0,
            }  # fmt: skip
        record = AccuracyRecord(
            status=status, reason="" if status == "ok" else "it would", seed=0, rows=64, **metrics
        )
        distribution = distribution_row("X1")
        if parameters:
            distribution = DistributionRow.of("X1", parameters)
        with self._begin() as run:
            run.add_accuracy(
                KernelRow.of(kernel), accuracy_problem(self.problem, Format.E4M3FN), distribution,
                current_device().architecture, current_environment(), record,
            )  # fmt: skip

    def _begin(self) -> RowsAtOnce:
        return RowsAtOnce.create(self.path, suite="s", command="c", harness_digest="h")

    def staleness(self) -> Staleness:
        return Staleness(load_snapshot([self.path]), current_device(), "eager")

    def is_stale(self, *kernels: Kernel) -> bool:
        return self.staleness().is_stale(Job(Case(self.problem, "X1"), kernels))

    def stale_part(self, *kernels: Kernel) -> tuple[str, ...]:
        asked = accuracy_problem(self.problem, Format.E4M3FN)
        left = self.staleness().stale_part(Cell(kernels[0], asked, "X1", 0, kernels[1:]))
        return () if left is None else (left.kernel.name, *(k.name for k in left.stand_ins))


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return Facts(tmp_path / "facts.sqlite")


@pytest.mark.parametrize("status", ["ok", "error"])
def test_a_fresh_row_replaces_stale_times(facts: Facts, status: str) -> None:
    """Also a failure: who would time it again at every sweep?"""
    now = KERNELS[QUANTIZER]
    facts.time(of_old(now))
    assert facts.is_stale(now)
    assert not facts.is_stale(facts.other), "never timed"
    facts.time(now, status, drawn="X2")
    assert not facts.is_stale(now)


def test_times_of_other_devices_are_not_stale(facts: Facts, command: Command) -> None:
    facts.time(of_old(KERNELS[QUANTIZER]), where=H200)
    assert not facts.is_stale(KERNELS[QUANTIZER])
    assert "nothing is stale" in command("sweep", "--only-stale", "--db", str(facts.path)).err


def test_one_error_per_numerics_class_is_enough(facts: Facts) -> None:
    now = KERNELS[QUANTIZER]
    facts.error(of_old(now))
    assert facts.stale_part(now, facts.other) == (now.name, facts.other.name)
    facts.error(now, "wrong")  # it will not bring one; another of its class may
    assert facts.stale_part(now, facts.other) == (facts.other.name,)
    assert facts.stale_part(now) == ()
    facts.error(now)
    assert facts.stale_part(now, facts.other) == ()


def test_errors_on_other_parameters_are_separate(facts: Facts) -> None:
    facts.time(KERNELS[QUANTIZER])
    facts.error(of_old(KERNELS[QUANTIZER]), s=9.0)
    assert facts.stale_part(KERNELS[QUANTIZER]) == ()


def test_a_problem_is_swept_on_the_distribution_of_its_newest_times(facts: Facts) -> None:
    for drawn in ("X1", "X5", "recorded"):  # nobody can draw the last
        facts.time(KERNELS[QUANTIZER], drawn=drawn)
        time.sleep(0.002)
    found = cases_timed(load_snapshot([facts.path]), current_device(), "eager")
    assert found == [Case(facts.problem, "X5")]
    assert "recorded" not in DISTRIBUTIONS


# --- list


def test_list_device_shows_its_rows(command: Command, fresh_file: Path, changed_file: Path) -> None:
    def held(file: Path) -> dict[str, Any]:
        rows = command("list", "device", "--json", "--db", str(file)).json
        return {row["what"]: row["value"] for row in rows}

    found = held(fresh_file)
    assert found["product"] == current_device().product
    assert found["times"] == "14 rows of 10 problems: 14 fresh, 0 usable, 0 stale"
    assert found["errors"] == "117 rows of 2 problems: 117 fresh, 0 usable, 0 stale"
    assert (found["grades"], found["last measured"]) == ("full", f"{datetime.now(UTC):%Y-%m-%d}")
    found = held(changed_file)
    assert found["times"] == "14 rows of 10 problems: 12 fresh, 0 usable, 2 stale"
    assert found["errors"] == "117 rows of 2 problems: 78 fresh, 0 usable, 39 stale"


def test_list_coverage_counts_rows_and_missing_kernels(
    command: Command, changed_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: KERNELS[name] for name in (PLAIN, QUANTIZER, COMPOSED)}
    monkeypatch.setattr(
        "lokakern.bench.report.coverage.kernels_for",
        lambda op, _device: [kernel for kernel in few.values() if kernel.op == op],
    )
    rows = words_of_coverage(command, str(changed_file))
    gemms, quantizers = rows["gemm", "times"], rows["quantize", "times"]
    assert [gemms[name] for name in ("problems", "covered", "share")] == [8, 8, 1.0]
    assert [gemms[name] for name in ("kernels", "rows", "fresh", "missing")] == [2, 12, 12, 0]
    assert [quantizers[name] for name in ("problems", "covered", "stale")] == [2, 0, 2]
    assert (quantizers["missing"], quantizers["grade"]) == (0, "full")
    errors = rows["quantize", "errors"]
    assert [errors[name] for name in ("problems", "rows", "stale", "seeds")] == [
        1,
        39,
        39,
        "0, 1, 2",
    ]
    smoke = rows["suite smoke", "times"]
    assert (smoke["problems"], smoke["untimed"], smoke["newest"]) == (22, 22, "never")
    assert (smoke["covered"], smoke["missing"]) == (0, 0)


@pytest.fixture
def mixed(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Times that are fresh, usable, unverified, stale, and superseded, at problems of one op."""
    now = KERNELS[QUANTIZER]
    fresh, usable, unverified, stale = (
        make_problem("quantize", (m, 4096), out_format=Format.E4M3FN)
        for m in (4096, 8192, 16384, 32768)
    )
    facts.time(of_old(now), problem=fresh)  # superseded
    facts.time(now, problem=fresh, us=50.0)
    facts.time(now, problem=usable, us=100.0, torch="0.4.1")
    facts.time(of_old(now), problem=stale, us=400.0)
    theirs = Facts(facts.path.with_name("theirs.sqlite"))
    theirs.time(now, problem=unverified, us=200.0)
    import_file(theirs.path, facts.path)
    monkeypatch.setenv("LOKAKERN_DB", str(facts.path))  # with its quarantine
    return facts.path


def test_every_command_counts_rows_alike(command: Command, mixed: Path, tmp_path: Path) -> None:
    """`report` called rows stale that `list coverage` did not show, and printed another digest."""
    device = {row["what"]: row["value"] for row in command("list", "device", "--json").json}
    words = "5 rows of 4 problems: 1 fresh, 1 usable, 1 unverified, 1 stale, 1 older"
    assert device["times"] == words
    rows = command("list", "coverage", "--json").json
    (coverage,) = [row for row in rows if (row["part"], row["of"]) == ("quantize", "times")]
    assert {word: coverage[word] for word in COUNTED} == dict.fromkeys(COUNTED, 1)
    assert (coverage["problems"], coverage["rows"]) == (4, 5)
    page = tmp_path / "page.html"
    assert words in command("report", "--out", str(page)).err
    text = page.read_text("utf-8")
    assert f"Times: {words}, by file: {device['times by file']}." in text
    assert f"Snapshot {device['snapshot digest'][:12]}," in text
    table = command("list", "coverage").out
    assert all(word in table for word in COUNTED)


def test_a_suite_counts_a_problem_once(command: Command, fresh_file: Path) -> None:
    """Suite `lrm` has problems under two distributions: 2066 cases are 1974 problems."""
    suites = {row["suite"]: row["problems"] for row in command("list", "suites", "--json").json}
    rows = words_of_coverage(command, str(fresh_file))
    for name, suite in SUITES.items():
        different = {case.problem for case in suite.cases(current_device())}
        assert suites[name] == len(different)
        assert not different or rows[f"suite {name}", "times"]["problems"] == len(different)
    assert suites["lrm"] < len(SUITES["lrm"].cases(current_device()))


def test_kernels_that_others_timed_are_not_measured(
    command: Command, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_DB", str(facts.path))
    theirs = Facts(facts.path.with_name("theirs.sqlite"))
    theirs.time(KERNELS[QUANTIZER], us=1e3)
    facts.time(KERNELS[PLAIN])
    import_file(theirs.path, facts.path)

    def state() -> str:
        rows = command("list", "kernels", "--json").json
        (why,) = [row["why"] for row in rows if row["kernel"] == QUANTIZER]
        return str(why)

    assert state().endswith("by others, and not verified")
    facts.time(KERNELS[QUANTIZER])
    assert "others" not in state()


def test_a_problem_without_a_kernel_is_not_covered(fresh_file: Path) -> None:
    held = Holdings(load_snapshot([fresh_file]), current_device()).of_ops()
    (times,) = [h for h in held if (h.part, h.of) == ("gemm", "times")]
    # At each shape the other four scales, and those of two prepared forms, were left out.
    assert (times.problems, times.covered, times.missing) == (8, 2, 2 * (4 + 1 + 1))


def test_holdings_need_no_garbage_collector(fresh_file: Path) -> None:
    held = Holdings(load_snapshot([fresh_file]), current_device())
    assert held.rows()
    alive = weakref.ref(held)
    gc.disable()
    try:
        del held
        assert alive() is None
    finally:
        gc.enable()


def test_a_table_of_coverage_is_narrow(
    capsys: pytest.CaptureFixture[str], fresh_file: Path
) -> None:
    dispatcher.use_snapshot(load_snapshot([fresh_file]))
    rows = listing.rows_of("coverage", brief=True)
    dispatcher.use_snapshot(None)
    wide = max((*OPS, *(f"suite {name}" for name in SUITES)), key=len)
    wide_rows = [
        {name: value if isinstance(value, str) else 123456 for name, value in row.items()}
        | {"part": wide}
        for row in rows
    ]
    terminal.print_rows(wide_rows, "table")
    assert max(map(len, capsys.readouterr().out.splitlines())) < 100


def test_devices_are_listed_by_name(command: Command, facts: Facts) -> None:
    facts.time(of_old(KERNELS[QUANTIZER]), where=H200)
    words = ("--device", "nvidia-h200", "--json", "--db", str(facts.path))
    rows = {row["what"]: row["value"] for row in command("list", "device", *words).json}
    assert (rows["product"], rows["architecture"]) == ("NVIDIA H200", "sm_90")
    assert "torch" not in rows, "nobody knows what is installed there"
    assert rows["regime"] == "graph-cold" and rows["times"] == "none"
    ran = command("list", "device", "--device", "no such", "--db", str(facts.path))
    assert ran.code == 2 and ran.err.startswith("DeviceError: device 'no such' is in no")
    assert command("list", "kernels", "--device", "NVIDIA H200").code == 2


def test_on_other_devices_only_the_digest_counts(facts: Facts) -> None:
    facts.time(KERNELS[QUANTIZER], where=H200)
    then = replace(current_environment(), torch="0.4.1")
    assert then != current_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.selection.candidates.current_environment", lambda: Environment())
        elsewhere = Staleness(load_snapshot([facts.path]), H200, "eager").times[facts.problem]
        facts.time(KERNELS[QUANTIZER])
        here = facts.staleness().times[facts.problem]
    assert (elsewhere, here) == ({QUANTIZER: "fresh"}, {QUANTIZER: "usable"})


# --- compare --held-out


@pytest.fixture(scope="module")
def choosy_file(fresh_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a slow unquantized kernel, so that dispatch chooses quantized ones."""
    plain = {row[0] for row in read_rows(fresh_file)["kernel"] if PLAIN in row}

    def change(table: str, row: dict[str, Any]) -> None:
        if table == "timing" and row["kernel"] in plain:
            row |= dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80"), 1e6)

    return edited(fresh_file, tmp_path_factory.mktemp("choosy"), change)


HELD_OUT = ("compare", "--held-out", "3", "--json", "--quiet", "--db")


def test_correct_choices_are_confirmed(
    command: Command, choosy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches_take(monkeypatch, lambda name: 3e4 if name == PLAIN else 1e4)
    ran = command(*HELD_OUT, str(choosy_file))
    assert ran.code == 0, ran.err
    found = ran.json
    assert (found["candidates"], found["seed"], found["slower"]) == (4, 1, [])
    assert len(found["rows"]) == 3 and len({row["problem"] for row in found["rows"]}) == 3
    for row in found["rows"]:
        assert (row["chosen"], row["slower"], row["why"]) == (COMPOSED, False, "")
        assert row["speedup"] == row["unquantized_us"] / row["chosen_us"] > 1.05
        assert row["promised"] > 1.05
    assert "3 of 4 choices of a quantized kernel, drawn with seed 1: " in ran.err
    assert "0 slower than bf16 beyond noise" in ran.err


def test_a_slow_choice_is_found(
    command: Command, choosy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches_take(monkeypatch, lambda name: 3e4 if name == COMPOSED else 1e4)
    ran = command(*HELD_OUT, str(choosy_file))
    assert ran.code == 4
    assert len(ran.json["slower"]) == 3
    assert all(row["slower"] and row["speedup"] < 0.95 < row["promised"]
               for row in ran.json["rows"])  # fmt: skip
    assert "3 slower than bf16 beyond noise" in ran.err
    assert len([line for line in ran.err.splitlines() if line.startswith("slower: gemm")]) == 3
    table = command("compare", "--held-out", "9", "--quiet", "--db", str(choosy_file))
    assert table.code == 4 and "x promised" in table.out and "4 of 4 choices" in table.err


def test_a_failing_choice_is_not_faster(
    command: Command, choosy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(KERNELS, COMPOSED, replace(KERNELS[COMPOSED], launch=refuse))
    ran = command(*HELD_OUT, str(choosy_file))
    assert ran.code == 4
    assert all(row["chosen_us"] is None and "no such instruction" in row["why"]
               for row in ran.json["rows"])  # fmt: skip


def test_an_incorrect_choice_gets_no_time(
    command: Command, choosy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KERNELS[COMPOSED]

    def launch(a: Any, b: Any, out: Any, bias: Any, workspace: Any) -> None:
        right.launch(a, b, out, bias, workspace)
        out[1, 1] = 99.0

    monkeypatch.setitem(KERNELS, COMPOSED, replace(right, launch=launch))
    ran = command(*HELD_OUT, str(choosy_file))
    assert ran.code == 4
    assert all(row["chosen_us"] is None and "dispatch: kernel_err " in row["why"]
               for row in ran.json["rows"])  # fmt: skip


def test_a_seed_repeats_the_sample_and_another_changes_it(
    command: Command, choosy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    made = operands.Operands.__init__

    def noting(*arguments: Any, **named: Any) -> None:
        seeds.append(named["seed"])
        made(*arguments, **named)

    monkeypatch.setattr(operands.Operands, "__init__", noting)

    def drawn(seed: str) -> list[str]:
        ran = command("compare", "--held-out", "1", "--seed", seed, "--json", "--quiet", "--db",
                      str(choosy_file))  # fmt: skip
        return [row["problem"] for row in ran.json["rows"]]

    assert drawn("5") == drawn("5")
    assert seeds == [5, 5], "operands are others than the database's"
    assert len({tuple(drawn(str(seed))) for seed in range(1, 4)}) > 1


def test_nothing_is_held_out_without_quantized_choices(command: Command, fresh_file: Path) -> None:
    ran = command("compare", "--held-out", "3", "--budget", "1e-6", "--quiet", "--db",
                  str(fresh_file))  # fmt: skip
    assert ran.code == 1
    assert ran.err.startswith("MeasurementError: the database chooses no quantized kernel for")


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "0"), ("--by-library",), ("--baseline", "bf16"), ("--ours", "torch.*"),
        ("--op", "quantize"), ("--fail-under", "1"), ("--group", "m > 1"),
    ],
    ids=str,
)  # fmt: skip
def test_held_out_excludes_other_options(command: Command, words: tuple[str, ...]) -> None:
    ran = command("compare", "--held-out", "3", *words)
    assert ran.code == 2 and "held-out" in ran.err
