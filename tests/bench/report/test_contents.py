"""The contents of one database: every row is counted, and no row of another file."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lokakern.bench.cli.main import app
from lokakern.bench.report.contents import contents_of
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import TimingRecord
from lokakern.registry.storage.reader import open_readonly, read_rows
from tests.support.measurements import BF16, ROW, Book, accuracy, gemm, time
from tests.support.rows_at_once import RowsAtOnce
from tests.support.run_files import ACCURATE, ENVIRONMENT, PROBLEM, X1, add, small_rows
from tests.support.shipped import H100_FILE

Ran = tuple[int, str, str]


@pytest.fixture
def describe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*words: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(("describe", *map(str, words)), prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    return run


def database(path: Path, times: int) -> Path:
    """Times of a kernel that is current, one of one that changed, and an error that is wrong."""
    load_kernels()
    with RowsAtOnce.create(path, suite="mine", command="c", harness_digest="h") as run:
        for m in range(1, times + 1):
            add(run, kernel=KERNELS["torch.bf16"], problem=dataclasses.replace(PROBLEM, m=m))
        add(run)
        slow = TimingRecord(status="timeout", reason="60 s")
        add(run, slow, kernel=KERNELS["torch.bf16"], regime="eager")
        wrong = dataclasses.replace(ACCURATE, status="wrong", reason="kernel_err 20 > 16")
        run.add_accuracy(KERNELS["torch.bf16"], PROBLEM, X1, "sm_90", ENVIRONMENT, wrong)
    return path


def test_two_files_have_their_own_numbers(describe: Callable[..., Ran], tmp_path: Path) -> None:
    """Without the shipped files, which `list coverage --db` adds."""
    found = []
    for times in (2, 5):
        code, out, _ = describe(database(tmp_path / f"{times}.sqlite", times), "--json")
        assert code == 0
        found.append(json.loads(out))
    assert [each["facts"]["times"] for each in found] == [
        "4 rows: 3 ok, 1 timeout",
        "7 rows: 6 ok, 1 timeout",
    ]
    errors, cold, eager = sorted(found[0]["parts"], key=lambda part: part["regime"] != "-")[:3]
    assert (errors["of"], errors["wrong"], errors["seeds"]) == ("errors", 1, "1")
    by_regime = {part["regime"]: part for part in (cold, eager)}
    cold, eager = by_regime["graph-cold"], by_regime["eager"]
    assert (cold["fresh"], cold["stale"], cold["ok"]) == (2, 1, 3)
    assert (eager["ok"], eager["failed"]) == (0, 1)
    (run,) = found[0]["runs"]
    assert (run["suite"], run["times"], run["errors"], run["not ok"]) == ("mine", 4, 1, 2)
    assert run["torch"] == ENVIRONMENT.torch and "NVIDIA H200" in run["where"]
    assert [row["status"] for row in found[0]["failures"]] == ["wrong", "timeout"]
    assert found[0]["failures"][0]["reason"] == "kernel_err 20 > 16"


def test_every_row_of_a_shipped_file_is_counted(describe: Callable[..., Ran]) -> None:
    code, out, _ = describe("--db", H100_FILE, "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    with open_readonly(H100_FILE) as connection:
        for table, what in (("timing", "times"), ("accuracy", "errors"), ("test_result", "tests")):
            query = f"SELECT count(*), sum(status = 'ok') FROM {table}"
            known = connection.execute(query).fetchone()
            ours = [row for row in rows if row["of"] == what]
            assert known == (
                sum(int(row["rows"]) for row in ours),
                sum(int(row["ok"]) for row in ours),
            )
    assert {row["stale"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("reasons", "worst"),
    [
        (("kernel_err 16.8 > 16", "kernel_err 103 > 16", "kernel_err 20 > 16"), 1),
        (("kernel_err 103 > 16", "kernel_err 1e+05 > 16"), 1),
        (("kernel_err inf > 16", "kernel_err 1e+05 > 16"), 0),
        (("kernel_err 1e+05 > 16", "kernel_err nan > 16"), 1),
        (("kernel_err 1.2.3 > 16", "kernel_err 17 > 16"), 1),  # of a file of others
        (("out of memory", "60 s"), 1),  # without a number beyond a limit: the first by name
    ],
)
def test_the_worst_reason_is_told(tmp_path: Path, reasons: tuple[str, ...], worst: int) -> None:
    path = tmp_path / "wrong.sqlite"
    load_kernels()
    with RowsAtOnce.create(path, suite="s", command="c", harness_digest="h") as run:
        for seed, reason in enumerate(reasons):
            row = dataclasses.replace(ACCURATE, status="wrong", reason=reason, seed=seed)
            run.add_accuracy(KERNELS["torch.bf16"], PROBLEM, X1, "sm_90", ENVIRONMENT, row)
    (failure,) = contents_of(read_rows(path)).failures
    assert (failure["reason"], failure["rows"]) == (reasons[worst], len(reasons))


def test_tables_show_runs_rows_and_failures(describe: Callable[..., Ran], tmp_path: Path) -> None:
    code, out, err = describe(database(tmp_path / "a.sqlite", 1))
    assert (code, err) == (0, "")
    for words in ("a.sqlite", "NVIDIA H200", "memory GiB 141", "\nruns ", "\nrows ", "\nnot ok "):
        assert words in out


def test_missing_errors_and_unsteady_times_are_counted(
    describe: Callable[..., Ran], tmp_path: Path
) -> None:
    path = tmp_path / "rows.sqlite"
    whole, part = gemm(64, 512, 512), gemm(64, 1024, 512)
    Book(path).write(
        accuracy(ROW, whole, 0.04),
        accuracy(BF16, whole, 0.003, seeds=(0, 1)),
        accuracy(ROW, part, 0.04, without=("X3",)),
        accuracy(ROW, part, 0.04, only=("X3",), seeds=(2,)),
        time(BF16, whole, 10.0),
        time(ROW, whole, 9.0, spread=0.2),
    )
    facts = json.loads(describe(path, "--json")[1])["facts"]
    assert facts["errors complete"].startswith("1 of 3 pairs of arithmetic and problem have all")
    assert facts["unsteady times"].startswith("1 of 2 vary by more than 25%")
    assert facts["unsteady times"].endswith("; 0 had void replays")


def test_a_database_of_every_table_has_contents() -> None:
    found = contents_of(small_rows())
    assert {part["of"] for part in found.parts} == {"times", "errors", "tests"}
    assert [run["host costs"] for run in found.runs] == [1]


def test_usage(describe: Callable[..., Ran], tmp_path: Path) -> None:
    code, _, err = describe()
    assert code == 2 and "expected one database" in err
    code, _, err = describe(tmp_path / "none.sqlite")
    assert code == 1 and "none.sqlite" in err
    assert not [*tmp_path.iterdir()]


def test_an_empty_database_has_no_rows(describe: Callable[..., Ran], tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    with RowsAtOnce.create(path, suite="mine", command="c", harness_digest="h"):
        pass
    assert not read_rows(path)["timing"]
    code, out, _ = describe(path, "--json")
    facts = json.loads(out)["facts"]
    assert code == 0 and (facts["times"], facts["last measured"]) == ("none", "never")
