"""The command line: what it prints where, its exit codes, and sweeps that stop and go on."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lokakern.bench.cli.main import app
from lokakern.bench.cli.options import ExitCode
from lokakern.bench.report import listing
from lokakern.device import current_device, current_environment, devices_here
from lokakern.measure import operands
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.storage.reader import open_readonly
from lokakern.selection import dispatcher, misses, remedies
from lokakern.sweep import engine
from lokakern.types import REALISTIC_DISTRIBUTIONS, Format, Layout, Operand
from lokakern.workloads.distributions import DISTRIBUTIONS
from lokakern.workloads.suites import SUITES
from tests.support.inline_worker import run_tasks_here
from tests.support.measurements import BF16, ROW, gemm, time
from tests.support.rows_at_once import RowsAtOnce

load_kernels()
ROOT = Path(__file__).resolve().parents[3]
SHAPE = ("--shape", "64,32,32")
# The unquantized kernel, one quantizer, and their composition: 3 kernels, 7 times at one shape.
FEW = ("--kernel", "torch.bf16", "--kernel", "torch.quantize_row")


@dataclass(frozen=True)
class Ran:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


Command = Callable[..., Ran]


@pytest.fixture(scope="module", autouse=True)
def _small_and_quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On the CPU, one thread, few operand sets, and a database of the user for this module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", run_tasks_here)  # workers: tests/sweep/test_worker.py
        patch.setenv("LOKAKERN_DB", str(tmp_path_factory.mktemp("user") / "user.sqlite"))
        patch.setenv("COLUMNS", "200")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        forget_devices()
        yield
    forget_devices()
    torch.set_num_threads(threads)


def forget_devices() -> None:
    for cached in (current_device, current_environment, devices_here):
        cached.cache_clear()


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


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of one tiny shape, with every kernel that runs here."""
    path = tmp_path_factory.mktemp("measured") / "measured.sqlite"
    with pytest.raises(SystemExit) as ended:
        app(("sweep", *SHAPE, "--db", str(path), "--quiet"))
    assert not ended.value.code
    return str(path)


def count(database: str | Path, table: str) -> int:
    with open_readonly(database) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


# --- list


@pytest.mark.rest
def test_list_kernels(command: Command, measured: str) -> None:
    ran = command("list", "kernels", "--json", "--db", measured)
    assert (ran.code, ran.err) == (0, "")
    rows = {row["kernel"]: row for row in ran.json}
    assert set(rows) == set(KERNELS)
    states: dict[tuple[str, str], tuple[str, str]] = {}
    for row in ran.json:
        kernel = KERNELS[row["kernel"]]
        assert (row["op"], row["scales"]) == (kernel.op, kernel.granularity.value)
        for architecture in row["architectures"].split(", "):
            assert (kernel.name, architecture) not in states
            states[kernel.name, architecture] = (row["state"], row["why"])
    for name, kernel in KERNELS.items():
        for architecture, why in {**kernel.unmeasured, **kernel.compile_only}.items():
            state = "compile_only" if architecture in kernel.compile_only else "unmeasured"
            assert states[name, architecture] == (state, why)
    here = current_device()
    emulated = "torch.quantize_row+torch.emulated_row"
    assert states[emulated, here.architecture] == ("measured", here.product)
    assert ("triton.quantize_row", here.architecture) not in states


def test_a_table_of_kernels_fits_100_columns() -> None:
    rows = listing.rows_of("kernels", brief=True)
    assert {column for row in rows for column in row} == {
        "kernel", "state", "architectures", "why"
    }  # fmt: skip
    assert max(len(row["architectures"]) for row in rows) <= 29
    assert max(len(row["state"]) for row in rows) <= 12


def test_kernels_are_listed_by_name(command: Command) -> None:
    rows = command("list", "kernels", "Scaled_MM_row", "--json").json
    assert {row["kernel"] for row in rows} == {
        name for name in KERNELS if "scaled_mm_row" in name
    }  # fmt: skip
    name = "torch.scaled_mm_row"
    facts = {row["what"]: row["value"] for row in command("list", "kernels", name, "--json").json}
    kernel = KERNELS[name]
    assert (facts["kernel"], facts["op"], facts["digest"]) == (name, kernel.op, kernel.digest)
    assert facts["scales of a, b"] == "row, row" and "bias" in facts["epilogues"]
    assert facts["on sm_90"].startswith("measured: ")
    rows = command("list", "kernels", "hip.scaled_gemm_row", "--resources", "--json").json
    assert rows and all("hip.scaled_gemm_row" in row["kernel"] for row in rows)


@pytest.mark.parametrize("words", [("kernels", "scaled_mm_rwo"), ("suites", "lrm")])
def test_kernels_of_no_name_are_an_error(command: Command, words: tuple[str, str]) -> None:
    ran = command("list", *words)
    assert ran.code == 2 and not ran.out
    expected = {"kernels": "no kernel listed here has 'scaled_mm_rwo'", "suites": "not suites"}
    assert expected[words[0]] in " ".join(ran.err.split())


def test_modules_that_cannot_be_imported_are_listed(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(listing, "load_kernels", lambda: {"triton/quantize": "No module 'triton'"})
    row = command("list", "kernels", "--json").json[-1]
    assert (row["kernel"], row["state"]) == ("(triton/quantize)", "unavailable")
    assert row["why"] == "cannot be imported here: No module 'triton'"


def test_list_suites_and_distributions(command: Command) -> None:
    suites = command("list", "suites", "--json").json
    assert [row["suite"] for row in suites] == list(SUITES)
    assert all(row["what"] for row in suites)
    assert all(row["problems"] > 0 for row in suites if row["suite"] != "mx")
    distributions = command("list", "distributions", "--json").json
    assert [row["distribution"] for row in distributions] == list(DISTRIBUTIONS)
    default = [row["distribution"] for row in distributions if row["default"]]
    assert tuple(default) == REALISTIC_DISTRIBUTIONS
    assert distributions[-1]["parameters"] == "spread=100000"


def test_list_device(command: Command) -> None:
    rows = {row["what"]: row["value"] for row in command("list", "device", "--json").json}
    assert rows["product"] == current_device().product
    assert rows["user database"] == os.environ["LOKAKERN_DB"]
    assert rows["torch"] == torch.__version__.split("+")[0]
    assert len(rows["snapshot digest"]) == 64


def test_tables_csv_and_json_say_the_same(command: Command) -> None:
    rows = command("list", "suites", "--format", "json").json
    read = list(csv.DictReader(io.StringIO(command("list", "suites", "--format", "csv").out)))
    assert read == [{name: str(value) for name, value in row.items()} for row in rows]
    table = command("list", "suites").out
    assert all(row["what"] in table and str(row["problems"]) in table for row in rows)


# --- sweep


def test_a_sweep_measures_every_kernel_that_takes_the_shape(
    command: Command, measured: str
) -> None:
    runnable = [k for k in KERNELS.values() if k.architectures == {"any"}]
    assert {row[0] for row in timed_kernels(measured)} <= {k.name for k in runnable}
    assert {"torch.bf16", "torch.quantize_row", "torch.emulated_block"} <= {
        row[0] for row in timed_kernels(measured)
    }
    assert {status for _, status in timed_kernels(measured)} == {"ok"}
    cells = count(measured, "accuracy")
    assert cells % (len(REALISTIC_DISTRIBUTIONS) * 3) == 0
    assert cells > 0


def timed_kernels(database: str) -> list[tuple[str, str]]:
    with open_readonly(database) as connection:
        found = connection.execute(
            "SELECT kernel.name, timing.status FROM timing JOIN kernel ON kernel.id = timing.kernel"
        )
        return [(str(name), str(status)) for name, status in found]


def test_a_sweep_prints_data_and_progress_apart(command: Command, tmp_path: Path) -> None:
    ran = command("sweep", *SHAPE, *FEW, "--db", str(tmp_path / "a.sqlite"), "--json")
    assert ran.code == 0
    rows = ran.json
    assert {row["kernel"] for row in rows} == {
        "torch.bf16", "torch.quantize_row", "torch.quantize_row+torch.emulated_row"
    }  # fmt: skip
    for row in rows:
        assert row["status"] == "ok"
        assert row["time us"] > 0
        assert row["kernel_err"] <= 1
        assert row["on"] in DISTRIBUTIONS
    error = {row["kernel"]: row["worst row_err"] for row in rows}
    assert (
        error["torch.bf16"] < 0.004 < 0.02 < error["torch.quantize_row+torch.emulated_row"] < 0.06
    )
    assert "7 times of 5 problems" in ran.err
    assert "117 errors" in ran.err


def test_a_sweep_of_part_of_a_suite(command: Command, tmp_path: Path) -> None:
    where = ("--where", "m == 512 and not prepared", "--errors", "none", "--json")
    ran = command("sweep", "--db", str(tmp_path / "a.sqlite"), *FEW, *where, "--quiet")
    assert ran.code == 0 and ran.json and all("m=512" in row["problem"] for row in ran.json)
    ran = command("sweep", "--where", "m == 3", "--quiet")
    assert ran.code != 0 and "no problem of smoke meets 'm == 3'" in ran.err


def test_a_second_sweep_does_nothing(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    words = ("sweep", *SHAPE, *FEW, "--db", str(path), "--quiet", "--json")
    first = command(*words)
    before = path.read_bytes()
    again = command(*words)
    assert again.code == 0
    assert "0 times of 0 problems and 0 errors" in again.err
    assert f"{7 + 117} were there already" in again.err
    assert again.json == first.json
    assert path.read_bytes() == before
    more = command("sweep", "--shape", "80,32,32", *FEW, "--db", str(path), "--quiet", "--json")
    assert "7 times of 5 problems and 0 errors" in more.err  # errors are stored at one m
    assert "117 were there already" in more.err


def test_fresh_measures_again(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    words = ("sweep", *SHAPE, "--kernel", "torch.quantize_row", "--errors", "none", "--quiet")
    for times in (1, 2):
        ran = command(*words, "--db", str(path), "--fresh")
        assert "3 times of 3 problems and 0 errors" in ran.err
        assert count(path, "timing") == 3 * times
        assert count(path, "run") == times
    assert count(path, "accuracy") == 0


def test_sizes_that_others_tuned_are_swept_first(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tuned.csv"
    table.write_text("cu_num,M,N,K,us\n304,64,48,32,20.5\n")
    swept: list[tuple[int, ...]] = []
    real = engine.sweep

    def sweep(cases: Any, **options: Any) -> Any:
        swept.extend(case.problem.shape for case in cases)
        assert str(tmp_path) not in options["command"], "rows hold no paths"
        return real(cases, **options)

    monkeypatch.setattr(engine, "sweep", sweep)
    words = ("sweep", "--shape", "64,32,32", "--shape", "64,48,32", "--kernel", "torch.bf16",
             "--errors", "none", "--db", str(tmp_path / "new.sqlite"))  # fmt: skip
    assert command(*words).code == 0
    plain, swept[:] = list(swept), []
    words = (*words, "--tuned", str(table))
    monkeypatch.setattr("sys.argv", ["lokakern", *words])
    ran = command(*words)
    assert ran.code == 0 and "and 7 for other GPUs: they come first" in ran.err
    assert sorted(swept) == sorted(plain)
    assert plain[0] == (64, 32, 32) and set(swept[:7]) == {(64, 48, 32)}
    table.unlink()
    refused = command(*words)
    assert refused.code == 2 and "cannot be read" in refused.err


def test_a_time_limit_ends_a_sweep_and_the_next_one_goes_on(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "a.sqlite"
    words = ("sweep", *SHAPE, *FEW, "--db", str(path), "--quiet", "--json")
    cut = command(*words, "--time-limit", "0")
    assert cut.code == 3
    assert "the time limit of 0 s ended the sweep; run it again" in cut.err
    assert isinstance(cut.json, list)
    assert count(path, "timing") == 0
    assert count(path, "accuracy") < 117
    rest = command(*words)
    assert rest.code == 0
    assert (count(path, "timing"), count(path, "accuracy")) == (7, 117)
    assert "were there already" in rest.err
    assert "0 times of 0 problems and 0 errors" in command(*words).err


def test_a_sweep_goes_to_the_users_database_by_default(command: Command) -> None:
    target = os.environ["LOKAKERN_DB"]
    ran = command("sweep", *SHAPE, "--kernel", "torch.quantize_row", "--errors", "none", "--quiet")
    assert ran.code == 0
    assert target in ran.err
    assert count(target, "timing") == 3


def test_a_sweep_fits_a_model_at_its_end_or_says_why_not(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "own.sqlite"
    ran = command("sweep", *SHAPE, *FEW, "--errors", "none", "--fit", "--db", str(path), "--quiet")
    assert ran.code == 1
    assert "MeasurementError: too few times of" in ran.err
    assert count(path, "timing") > 0  # what was measured is kept


def test_a_sweep_makes_folders(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.sqlite"
    ran = command("sweep", *SHAPE, *FEW, "--errors", "none", "--quiet", "--db", str(path))
    assert ran.code == 0
    assert count(path, "timing") == 7


def test_quick_rows_are_marked(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    command(
        "sweep", *SHAPE, *FEW, "--errors", "none", "--quiet", "--grade", "quick", "--db", str(path)
    )
    with open_readonly(path) as connection:
        grades = connection.execute("SELECT grade, suite FROM run").fetchall()
    assert [tuple(row) for row in grades] == [("quick", "shapes")]


def test_a_sweep_of_misses(command: Command, tmp_path: Path) -> None:
    plain = make_problem("gemm", (48, 16, 32))
    asked = (
        plain,
        replace(plain, epilogue="bias"),
        make_problem("gemm", (48, 16, 32), a=Operand(Format.FLOAT32)),
        replace(plain, b=replace(cast(Operand, plain.b), layout=Layout.ROW)),  # nobody measures it
    )
    for problem in asked:
        misses.record(problem, current_device())
    misses.save()
    ledger = misses.ledger_path()
    with ledger.open("a") as file:
        file.write('not of ours\n{"op": "ge')
    words = ("sweep", "--from-misses", "--errors", "none", "--quiet", "--json")
    try:
        ran = command(*words, "--kernel", "torch.bf16", "--kernel", "torch.fp32",
                      "--db", str(tmp_path / "a.sqlite"))  # fmt: skip
    finally:
        ledger.unlink()
    assert ran.code == 0, ran.err
    measured = {row["problem"] for row in ran.json}
    assert {str(problem) for problem in asked[:3]} <= measured
    assert str(asked[3]) not in measured


def test_a_sweep_of_a_problem_that_a_miss_printed(command: Command, tmp_path: Path) -> None:
    problem = make_problem("gemm", (48, 16, 32), epilogue="bias")
    words = shlex.split(remedies.sweep_command(problem))[3:]
    turned = replace(problem, a=replace(problem.a, layout=Layout.COLUMN))  # stops nothing beside it
    other = json.dumps(remedies.plain(turned))
    ran = command(*words, "--problem", other, "--errors", "none", "--quiet", "--json",
                  "--kernel", "torch.bf16", "--db", str(tmp_path / "a.sqlite"))  # fmt: skip
    assert ran.code == 0, ran.err
    assert str(problem) in {row["problem"] for row in ran.json}
    assert f"left out: {turned} cannot be measured: a is not row-major" in ran.err
    ran = command("sweep", "--problem", other, "--db", str(tmp_path / "a.sqlite"))
    assert ran.code == 1 and "MeasurementError: " in ran.err


def test_rows_that_are_not_ok_have_an_exit_code(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    name = "torch.quantize_row"
    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], launch=refuse))
    path = tmp_path / "a.sqlite"
    ran = command("sweep", "--shape", "64,32", "--kernel", "torch.quantize", "--errors", "none",
                  "--quiet", "--json", "--db", str(path))  # fmt: skip
    assert ran.code == 5
    assert "RuntimeError: no such instruction" in ran.err
    status = {row["kernel"]: row["status"] for row in ran.json}
    assert status.pop(name) == "error: RuntimeError: no such instruction"
    assert set(status.values()) == {"ok"}


def test_a_sweep_without_misses_has_nothing_to_do(command: Command, tmp_path: Path) -> None:
    ran = command("sweep", "--from-misses", "--quiet", "--db", str(tmp_path / "a.sqlite"))
    assert ran.code == 0
    assert "0 times of 0 problems" in ran.err


# --- a database by URL


def test_a_database_may_be_an_sqlite_url(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    url = f"sqlite:///{path}"
    ran = command("sweep", *SHAPE, *FEW, "--quiet", "--json", "--db", url)
    assert ran.code == 0, ran.err
    assert count(path, "timing") == 7
    assert ran.json == command("sweep", *SHAPE, *FEW, "--quiet", "--json", "--db", str(path)).json


@pytest.mark.parametrize(
    "words", [("list", "kernels"), ("explain", *SHAPE), ("compare", *SHAPE)], ids=str
)
def test_every_command_reads_an_sqlite_url(
    command: Command, measured: str, words: tuple[str, ...]
) -> None:
    ran = command(*words, "--json", "--db", f"sqlite:///{measured}")
    assert ran.code == 0, ran.err
    if words[0] == "list":
        assert any(row["state"] == "measured" for row in ran.json)
    elif words[0] == "explain":
        assert ran.json["miss"] is False


# --- explain


def test_explain_prints_the_choice_and_the_rejections(command: Command, measured: str) -> None:
    ran = command("explain", *SHAPE, "--db", measured)
    assert (ran.code, ran.err) == (0, "")
    first, *rest = ran.out.splitlines()
    assert first.startswith("gemm m=64 n=32 k=32 a=bfloat16 b=bfloat16 out=bfloat16 on ")
    assert "within row_err 0.06: torch." in first
    assert any("torch.quantize_tensor+torch.emulated_tensor" in line and "worst on X14" in line
               for line in rest)  # fmt: skip
    assert any("takes float32 operands" in line for line in rest)


def test_explain_as_json(command: Command, measured: str) -> None:
    facts = command("explain", *SHAPE, "--json", "--db", measured).json
    assert facts["problem"].startswith("gemm m=64 n=32 k=32")
    assert facts["device"] == current_device().product
    assert facts["kernel"] in KERNELS
    assert facts["kernel"] not in facts["rejected"]
    assert (facts["miss"], facts["interpolated"]) == (False, False)
    assert facts["latency_us"] > 0
    assert 0 < facts["errors"]["row_err"] < 0.06
    assert all(facts["rejected"].values())
    strict = command("explain", *SHAPE, "--json", "--budget", "0.01", "--db", measured).json
    assert strict["kernel"] == "torch.bf16"
    assert "row_err" in strict["rejected"]["torch.quantize_row+torch.emulated_row"]


def test_explain_names_the_formats_that_a_gpu_nobody_measured_would_admit(command: Command) -> None:
    words = ("explain", "--shape", "4096,1024,1024", "--device", "b200")
    ran = command(*words)
    assert (ran.code, ran.err) == (0, "")
    assert "formats that NVIDIA B200 has, within row_err 0.06" in ran.out
    assert "Emulated errors, no times" in ran.out
    assert "Within row_err 0.06 for no product: nvfp4, mxfp4" in ran.out
    facts = command(*words, "--json").json
    assert (facts["device"], facts["emulated"]) == ("NVIDIA B200", True)
    (layer,) = facts["layers"]
    formats = layer["formats"]
    assert {name for name, found in formats.items() if found["within"]} == {
        "mxfp8", "fp8-row", "int8", "int8-weight",
    }  # fmt: skip
    assert formats["nvfp4"]["why"].startswith("row_err 0.")
    assert formats["nvfp4"]["errors"]["row_err"] > 0.06
    assert facts["total"]["int8"] == {"within": 1, "flops_share": 1.0}
    loose = command(*words, "--json", "--budget", "0.17", "--distribution", "X1").json
    assert loose["layers"][0]["formats"]["mxfp4"] | {"errors": 0} == {
        "within": True, "why": "", "worst_on": "X1", "errors": 0,
    }  # fmt: skip


def test_explain_tells_where_errors_of_formats_are_those_of_another_k(command: Command) -> None:
    found = {}
    for k in (32, 128, 8192, 16384):
        words = ("explain", "--shape", f"4096,512,{k}", "--device", "b200")
        found[k] = command(*words, "--json").json["notes"]
        assert all(note in command(*words).out for note in found[k])
    assert found == {
        32: ["Below k = 128 errors are those at 128."], 128: [], 8192: [],
        16384: ["Beyond k = 8192 errors are those at 8192, and may be larger."],
    }  # fmt: skip


def test_explain_formats_of_many_products(command: Command, tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("m,n,k,count,layer\n4096,512,512,3,up\n4096,512,8192,,down\n")
    words = ("explain", "--shapes", str(shapes), "--device", "A100", "--budget", "0.015",
             "--distribution", "X1")  # fmt: skip
    ran = command(*words, "--format", "csv")
    head, *lines = ran.out.splitlines()
    assert head == 'layer,"m,n,k",within the budget,int8,int8-weight,int4-weight'
    assert [line.split(",")[0] for line in lines] == ["up", "down"]
    facts = command(*words, "--json", "--budget", "0.0125").json
    assert [[n for n, f in layer["formats"].items() if f["within"]] for layer in facts["layers"]] \
        == [["int8", "int8-weight"], ["int8-weight"]]  # fmt: skip
    assert facts["total"]["int8"] == {"within": 1, "flops_share": 3 / 19}


@pytest.mark.parametrize(
    "words",
    [("--training", "--shapes", "x.csv"), ("--regime", "eager"), ("--prepared", "row"),
     ("--epilogue", "bias"), ("gemm_norm",)],
    ids=str,
)  # fmt: skip
def test_explain_knows_only_errors_of_plain_products_there(
    command: Command, words: tuple[str, ...]
) -> None:
    ran = command("explain", *words, "--device", "MI355X")
    assert ran.code == 2
    assert "nothing was measured on AMD Instinct MI355X" in " ".join(ran.err.split())


@pytest.mark.parametrize("op", ["quantize", "dequantize", "scaled_gemm"])
def test_explain_every_op(command: Command, measured: str, op: str) -> None:
    shape = "64,32,32" if op == "scaled_gemm" else "64,32"
    facts = command("explain", op, "--shape", shape, "--json", "--db", measured).json
    assert facts["kernel"] in KERNELS
    assert KERNELS[facts["kernel"]].op == op


def test_explain_reports_an_unmeasured_problem_as_a_miss(command: Command, measured: str) -> None:
    facts = command("explain", "--shape", "64,48,48", "--json", "--db", measured).json
    assert (facts["miss"], facts["kernel"], facts["latency_us"]) == (True, "torch.bf16", None)
    ran = command("explain", "--shape", "64,48,48", "--db", measured)
    assert f"\n  miss: {facts['why']}\n" in ran.out
    assert facts["why"].startswith("nothing was measured at n=48 k=48, eager, on ")
    assert "; nearest is n=32 k=32 (n and k differ); measure it with: " in facts["why"]


@pytest.mark.parametrize(
    "words", [("gemm", "64", "32", "32"), ("gemm", "64,32,32"), ("64", "32", "32"), ("64,32,32",)]
)
def test_explain_takes_sizes_as_arguments(
    command: Command, measured: str, words: tuple[str, ...]
) -> None:
    asked = command("explain", "--shape", "64,32,32", "--json", "--db", measured).json
    assert command("explain", *words, "--json", "--db", measured).json == asked
    ran = command("explain", *words, "--shape", "64,32,32", "--db", measured)
    assert ran.code == 2 and "goes without M N K" in ran.err


@pytest.mark.parametrize("op", ["quantize", "norm_quantize"])
def test_explain_refuses_scales_of_operands_that_have_none(command: Command, op: str) -> None:
    ran = command("explain", op, "--shape", "64,32", "--scale", "row")
    assert ran.code == 2 and "--out-scale row" in ran.err


def test_explain_a_prepared_weight(command: Command, measured: str) -> None:
    facts = command("explain", *SHAPE, "--prepared", "row", "--json", "--db", measured).json
    assert "b=e4m3fn/row prepared" in facts["problem"]
    assert facts["rejected"]["torch.quantize_group+torch.emulated_block"].startswith(
        "needs a weight prepared as e4m3fn/128x128"
    )


def test_explain_on_one_distribution(command: Command, measured: str) -> None:
    ran = command("explain", *SHAPE, "--distribution", "X1", "--db", measured)
    assert "  judged on X1 only" in ran.out.splitlines()
    assert "worst on X14" not in ran.out


# --- compare


def test_compare_as_json(command: Command, measured: str) -> None:
    ran = command("compare", *SHAPE, "--json", "--db", measured)
    assert ran.code == 0
    found = ran.json
    assert {row["prepared"] == "no" for row in found["rows"]} == {True, False}
    for row in found["rows"]:
        assert (row["m"], row["n"], row["k"]) == (64, 32, 32)
        assert row["chosen"] in KERNELS
        assert row["failed"] == {}
        assert row["latency_us"]["dispatch"] > 0
        ratio = row["latency_us"]["bf16"] / row["latency_us"]["dispatch"]
        assert row["speedup"]["bf16"] == pytest.approx(ratio)
    speedups = [row["speedup"]["bf16"] for row in found["rows"]]
    assert found["least_speedup"]["bf16"] == min(speedups)
    assert min(speedups) <= found["geometric_mean"]["bf16"] <= max(speedups)
    assert f"of {len(found['rows'])} problems" in ran.err


def test_compare_against_kernels(command: Command, measured: str) -> None:
    row = "torch.quantize_row+torch.emulated_row"
    ran = command("compare", *SHAPE, "--json", "--baseline", row, "--baseline", "torch.fp32",
                  "--db", measured)  # fmt: skip
    assert ran.code == 0
    for found in ran.json["rows"]:
        assert found["failed"]["torch.fp32"] == "does not take this problem"
        assert (row in found["speedup"]) == (found["prepared"] in ("no", "row"))
    assert set(ran.json["geometric_mean"]) == {row}


@pytest.mark.parametrize(("limit", "code"), [("1e-9", 0), ("1e9", 4)])
def test_compare_fails_under_a_limit(
    command: Command, measured: str, limit: str, code: int
) -> None:
    ran = command("compare", *SHAPE, "--json", "--fail-under", limit, "--db", measured)
    assert ran.code == code
    assert ran.json["rows"]


def test_compare_as_a_table(command: Command, measured: str) -> None:
    ran = command("compare", *SHAPE, "--quiet", "--db", measured)
    assert ran.code == 0
    assert "gemm m=64 n=32 k=32 a=bfloat16" in ran.out
    assert "x bf16" in ran.out
    assert "geometric mean against bf16" in ran.err


def test_compare_takes_conditions(command: Command, measured: str) -> None:
    ran = command("compare", *SHAPE, "--json", "--where", "prepared", "--group", "n * k <= 2**10",
                  "--group", "m > 64", "--db", measured)  # fmt: skip
    assert ran.code == 0
    (row,) = ran.json["rows"]
    assert row["prepared"] != "no"
    assert row["groups"] == ["n * k <= 2**10"]
    found = ran.json["groups"]
    assert {text: group["count"] for text, group in found.items()} == {
        "n * k <= 2**10": 1, "m > 64": 0
    }  # fmt: skip
    assert found["n * k <= 2**10"]["geometric_mean"] == ran.json["geometric_mean"]
    assert "against bf16 where n * k <= 2**10 (1 problems): " in ran.err


@pytest.mark.parametrize(("limit", "code"), [("1e-9", 0), ("1e9", 4)])
def test_compare_by_library(command: Command, measured: str, limit: str, code: int) -> None:
    ran = command("compare", *SHAPE, "--by-library", "--seed", "7", "--json", "--fail-under", limit,
                  "--group", "prepared", "--db", measured)  # fmt: skip
    assert ran.code == code
    found = ran.json
    assert found["libraries"] == ["torch"]
    assert len(found["rows"]) == 2  # whole, and prepared in any form
    for row in found["rows"]:
        assert row["fastest"] == row["fastest_other"] == "torch"
        assert row["speedup"] == row["library_us"]["torch"] / row["dispatch_us"]
        assert row["kernels"]["torch"] in KERNELS
    every = found["summaries"][0]
    assert every["least_speedup"] == min(row["speedup"] for row in found["rows"])
    assert "libraries that are not ours, prepared, 1 of 1 compared: " in ran.err


def test_compare_by_library_as_a_table(command: Command, measured: str) -> None:
    ran = command("compare", *SHAPE, "--by-library", "--quiet", "--db", measured)
    assert ran.code == 0
    assert "best library" in ran.out and "torch us" in ran.out
    every, others = ran.errors
    assert every.startswith("all libraries, all, 2 of 2 compared: ")
    assert others.startswith("libraries that are not ours, all, 2 of 2 compared: ")


def test_compare_kernels_with_rivals(command: Command) -> None:
    ran = command("compare", "--op", "scaled_gemm", *SHAPE, "--ours", "torch.emulated_row",
                  "--rivals", "torch.*", "--group", "m > 64", "--seed", "7", "--quiet")  # fmt: skip
    assert ran.code == 0
    assert "scaled_gemm: torch.emulated_row against torch.* on" in ran.out
    assert "m=64 n=32 k=32 a=e4m3fn b=e4m3fn out=bfloat16" in ran.out
    assert "x accurate" in ran.out and "/ bound" in ran.out
    assert "bound: 1 times the bytes at 4.3 TB/s, and 0 us" in ran.out
    every, none = ran.errors
    assert every.startswith("all, 1 of 1 compared: ")
    assert "x among the accurate (least " in every
    assert none == "m > 64, 0 of 0 compared: nothing to compare"


def test_compare_quantizers_as_json(command: Command) -> None:
    ran = command("compare", "--op", "quantize", "--shape", "64,32", "--ours", "torch.*",
                  "--where", "scale != 'tensor'", "--json", "--quiet")  # fmt: skip
    assert ran.code == 0
    assert [row["ours"] for row in ran.json["rows"]] == [
        "torch.quantize_row", "torch.quantize_group", "torch.quantize_block"
    ]  # fmt: skip
    (summary,) = ran.json["summaries"]
    worst = max(row["over_bound"] for row in ran.json["rows"])
    assert summary["most_over_bound"] == worst
    assert (summary["count"], summary["compared"]) == (3, 0)


@pytest.mark.parametrize(("limit", "code"), [("1e-9", 0), ("1e9", 4)])
def test_compare_with_rivals_fails_under_a_limit(command: Command, limit: str, code: int) -> None:
    ran = command("compare", *SHAPE, "--ours", "torch.quantize_*+*", "--rivals",
                  "torch.bf16", "--fail-under", limit, "--quiet")  # fmt: skip
    assert ran.code == code


def test_compare_says_where_ours_did_not_run(command: Command) -> None:
    """The CUDA kernels need a GPU."""
    ran = command("compare", "--op", "quantize", "--shape", "64,32", "--fail-under", "0.5",
                  "--where", "scale == 'row'", "--quiet")  # fmt: skip
    assert ran.code == 4
    assert any(line.startswith("none of ours: quantize m=64 k=32") for line in ran.errors)


def test_compare_loads_rivals(command: Command, tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "a_rival.py").write_text(
        "from lokakern.registry.register import KERNELS, register\n"
        "from lokakern.types import Granularity\n"
        "same = KERNELS['torch.emulated_row']\n"
        "@register('scaled_gemm', granularity=Granularity.ROW, accumulation='fast',\n"
        "          supports=same.supports_problem)\n"
        "def gemm(*operands): same.launch(*operands)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(KERNELS)
    try:
        ran = command("compare", "--op", "scaled_gemm", *SHAPE, "--load", "a_rival", "--ours",
                      "torch.emulated_row", "--rivals", "*.gemm", "--json", "--quiet")  # fmt: skip
    finally:
        for name in KERNELS.keys() - before.keys():
            del KERNELS[name]
    assert ran.code == 0
    (row,) = ran.json["rows"]
    assert (row["rival"], row["accurate_rival"]) == ("a_rival.gemm", "")


# --- export


def test_export_writes_current_rows(command: Command, measured: str, tmp_path: Path) -> None:
    target = tmp_path / "out.sqlite"
    ran = command("export", str(target), "--device", current_device().product, "--db", measured)
    assert (ran.code, ran.out) == (0, "")
    assert "0 timing rows, 0 accuracy rows, 0 test_result rows, 0 host_cost rows" in ran.errors[0]
    for table in ("timing", "accuracy"):
        assert count(target, table) == count(measured, table) > 0


# --- errors


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("sweep", "--shape", "64"), "ShapeError: --shape is '64'; expected m,n,k"),
        (("sweep", "--shape", "64,32,x"), "ShapeError: --shape is '64,32,x'"),
        (("sweep", "--shape", "64,0,32"), "ShapeError: --shape is '64,0,32'"),
        (
            ("sweep", "--suite", "smok"),
            "UnknownNameError: suite 'smok' is unknown; did you mean 'smoke'? expected one of",
        ),
        (
            ("sweep", *SHAPE, "--kernel", "torch.bf61"),
            "UnknownNameError: --kernel is torch.bf61; no kernel that accepts these problems has "
            "such a name; did you mean 'torch.bf16'?",
        ),
        (
            ("sweep", *SHAPE, "--prebuild", "--device", "NVIDIA H200", "--kernel", "hip.scaled"),
            "UnknownNameError: --kernel is hip.scaled; no kernel that accepts these problems has "
            "such a name; hip.quantize_mx+hip.scaled_gemm_mx does not run on NVIDIA H200 (sm_90); ",
        ),
        (
            ("sweep", *SHAPE, "--prebuild", "--device", "no such"),
            "DeviceError: device 'no such' is unknown; kernels compile for 'AMD Instinct MI300X', ",
        ),
        (("sweep", *SHAPE, "--epilogue", "nope"), "UnknownNameError: epilogue 'nope' is unknown"),
        (("explain", "--epilogue", "nope"), "UnknownNameError: gemm: epilogue is 'nope'"),
        (
            ("explain", "scaled_gemm", "--scale", "row", "--epilogue", "bias+nope"),
            "UnknownNameError: scaled_gemm: epilogue is 'bias+nope'; expected one of bias,",
        ),
        (
            ("explain", "quantize", "--shape", "64,32", "--epilogue", "nope"),
            "UnknownNameError: quantize: epilogue is 'nope'",
        ),
        (
            ("chain", "--epilogue", "nope", "--quiet"),
            "UnknownNameError: epilogue 'nope' is unknown",
        ),
        (("explain", "gem"), "UnknownNameError: op 'gem' is unknown"),
        (("explain", "quantize", *SHAPE), "ShapeError: quantize: shape is (64, 32, 32)"),
        (("explain", "--budget", "-1"), "BudgetError: budget row_err is -1"),
        (("explain", "--budget", "nan"), "BudgetError: budget row_err is nan"),
        (("explain", "--device", "no such"), "DeviceError: device 'no such' is in no database"),
        (("explain", "--distribution", "X99"), "UnknownNameError: distribution 'X99'"),
        (("explain", "--prepared", "col"), "UnknownNameError: --prepared is 'col'; expected one"),
        (("compare", *SHAPE, "--baseline", "nope"), "UnknownNameError: kernel 'nope' is not reg"),
        (
            ("compare", *SHAPE, "--baseline", "torch.bf61"),
            "UnknownNameError: kernel 'torch.bf61' is not registered; did you mean 'torch.bf16'?",
        ),
        (
            ("compare", *SHAPE, "--ours", "torch.emulated_rwo"),
            "UnknownNameError: no kernel of gemm is named 'torch.emulated_rwo'; did you mean ",
        ),
        (
            ("explain", "--device", "nvidia h20"),
            "DeviceError: device 'nvidia h20' is in no database; did you mean 'NVIDIA H200'?",
        ),
        (
            ("explain", "--device", "nvidia b20"),
            "DeviceError: device 'nvidia b20' is in no database; did you mean 'NVIDIA B200'? known",
        ),
        (("compare", "--suite", "smok"), "UnknownNameError: suite 'smok' is unknown"),
        (("compare", "--op", "gem"), "UnknownNameError: op 'gem' is unknown"),
        (
            ("compare", "--op", "quantize", *SHAPE, "--ours", "x"),
            "UnknownNameError: no kernel of q",
        ),
        (("compare", "--where", "m > 9**9"), "UnknownNameError: no problem of gemm is in smoke"),
        (("compare", "--where", "rows > 9"), "SuiteError: condition 'rows > 9' cannot be"),
        (("compare", "--load", "no_such"), "UnknownNameError: --load: 'no_such' cannot be"),
        (("export", "a.sqlite", "--device", "no such"), "DeviceError: device 'no such' is in no"),
        (("diff", "--db", "/nowhere/a.sqlite", "b"), "DatabaseError: database '/nowhere/a.sqlite'"),
        (("merge", "--db", "/nowhere/a", "--out", "b"), "DatabaseError: database '/nowhere/a'"),
        (("explore", "--db", "/nowhere/a.sqlite"), "DatabaseError: database '/nowhere/a.sqlite'"),
        (("list", "--db", "/nowhere/a.sqlite"), "DatabaseError: database '/nowhere/a.sqlite'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_are_one_line_on_stderr(
    command: Command,
    words: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # `merge` leaves a lock beside its target
    quiet = ("--quiet",) if words[0] in ("sweep", "compare") else ()
    ran = command(*words, *quiet)
    code = ExitCode.FAILED if error.startswith("DatabaseError") else ExitCode.WRONG_USAGE
    assert (ran.code, ran.out) == (code, "")
    assert len(ran.errors) == 1, ran.err
    assert ran.errors[0].startswith(error)


def test_graphs_need_a_gpu(command: Command, tmp_path: Path) -> None:
    if current_device().is_gpu:
        return  # there, they are what a sweep uses
    ran = command("sweep", *SHAPE, *FEW, "--regime", "graph-cold", "--quiet",
                  "--db", str(tmp_path / "a.sqlite"))  # fmt: skip
    assert ran.code == 1
    assert ran.errors == [
        "MeasurementError: regime 'graph-cold' needs a GPU; a cpu has only 'eager'"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "--nope"),
        ("sweep", "--regime", "hot"),
        ("sweep", "--time-limit", "soon"),
        ("sweep", "--epilogue", "layer"),
        ("compare", "--epilogue", "layer"),
        ("explain", "--bias", "--epilogue", "bias"),
        ("merge", "--out", "a.sqlite"),
        ("diff", "--before", "2026-01-31"),
        ("diff", "a", "b", "--db", "c"),
        ("explore", "a", "--db", "b"),
        ("list", "everything"),
        ("list", "--format", "xml"),
        ("list", "suites", "--resources"),
        ("explain", "--budget", "small"),
        ("compare", *SHAPE, "--ours", "torch.*", "--baseline", "bf16"),
        ("compare", *SHAPE, "--ours", "torch.*", "--by-library"),
        ("compare", *SHAPE, "--baseline", "bf16", "--by-library"),
        ("compare", *SHAPE, "--seed", "-1"),
        ("nothing",),
        (),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_code_2(command: Command, words: tuple[str, ...]) -> None:
    ran = command(*words)
    assert ran.code == 2
    assert "Usage" in ran.err + ran.out
    assert not ran.out or not words


def test_times_are_counted_by_file_and_shipped_ones_may_be_left_out(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "mine.sqlite"
    with RowsAtOnce.create(path, suite="s", command="c", harness_digest="h") as run:
        time(BF16, gemm(8192, 2048, 2048), 90.0)(run)
    asked = ("--device", "NVIDIA H200", "--db", str(path))

    def by_file(*words: str) -> str:
        rows = command("list", "device", "--json", *asked, *words).json
        return str({row["what"]: row["value"] for row in rows}["times by file"])

    assert re.fullmatch(r"nvidia-h200.sqlite \(shipped\): \d{5}, mine.sqlite: 1", by_file())
    assert by_file("--no-shipped") == "mine.sqlite: 1"
    done = command("report", *asked, "--no-shipped", "--json")
    assert done.err == "times by file: mine.sqlite: 1\n"
    assert {(row["m"], row["n"], row["k"]) for row in done.json} == {(8192, 2048, 2048)}
    explained = command("explain", "8192", "2048", "2048", *asked, "--no-shipped").out
    assert BF16 in explained and ROW not in explained


def test_devices_are_named_in_any_case(command: Command, measured: str, tmp_path: Path) -> None:
    product = current_device().product
    name = product.swapcase()
    assert name != product
    asked = ("--device", name, "--db", measured)
    assert product in command("explain", *SHAPE, *asked).out
    rows = {row["what"]: row["value"] for row in command("list", "device", "--json", *asked).json}
    assert rows["product"] == product
    assert command("list", "coverage", *asked).code == 0
    assert command("report", "--json", *asked).code == 0
    assert product in command("chain", "--m", "64", "--layers", "32x32", *asked).out
    assert command("export", str(tmp_path / "out.sqlite"), *asked).code == 0
    assert command("diff", "--device", name, "--db", measured, measured).code == 0
    both = ("--from-device", name, "--to-device", product)
    assert command("diff", "--db", measured, *both).code == 0


def test_the_database_of_merge_and_import_may_be_an_option(
    command: Command, measured: str, tmp_path: Path
) -> None:
    merged, own = tmp_path / "merged.sqlite", tmp_path / "own.sqlite"
    assert command("merge", "--db", measured, "--out", str(merged)).code == 0
    assert count(merged, "timing") == count(measured, "timing")
    ran = command("import", str(merged), "--db", str(own), "--trust")
    assert ran.code == 0, ran.err
    assert count(own, "timing") == count(measured, "timing")


def test_help_breaks_no_line_within_a_paragraph() -> None:
    """Docstrings do, at 100 columns; a terminal of 80 would break each line again."""
    for command in app.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        assert text and not [part for part in text.split("\n\n") if "\n" in part], command.name


def test_help_is_no_error(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    assert all(
        name in ran.out for name in ("sweep", "explain", "compare", "export", "list", "Exit codes")
    )


def spoil_newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer": (spoil_newer, "has schema version 99"),
    "garbage": (lambda path: path.write_bytes(b"not a database\n" * 20), "expected a SQLite file"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:9000]), "cut"),
    "empty": (lambda path: path.write_bytes(b""), "expected a SQLite file"),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(
    "words", [("sweep", *SHAPE, *FEW), ("explain",), ("compare", *SHAPE), ("list",)], ids=str
)
def test_a_database_that_cannot_be_read_is_left_alone(
    command: Command, measured: str, tmp_path: Path, words: tuple[str, ...], spoil: str
) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(Path(measured).read_bytes())
    change, expected = SPOILS[spoil]
    change(path)
    before = path.read_bytes()
    quiet = ("--quiet",) if words[0] in ("sweep", "compare") else ()
    ran = command(*words, *quiet, "--db", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.errors) == 1, ran.err
    assert ran.errors[0].startswith(f"DatabaseError: database {str(path)!r} ")
    assert expected in ran.errors[0]
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("**/*.sqlite"))[1:]


# --- in a process of its own


def in_a_process(*words: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "lokakern.bench", *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


@pytest.mark.rest
def test_the_module_runs_and_prints_json_alone() -> None:
    process = in_a_process("list", "suites", "--json")
    out, err = process.communicate(timeout=1800)
    assert (process.returncode, err) == (0, "")
    assert [row["suite"] for row in json.loads(out)] == list(SUITES)


@pytest.mark.rest
def test_a_reader_may_close_the_pipe_early() -> None:
    process = in_a_process("list", "distributions", "--json")
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=1800)
    assert (process.returncode, err) == (0, "")
