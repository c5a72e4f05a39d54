"""The command line on the ops with a norm: sweep, explain, compare and list."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from lokakern.bench.cli.main import app
from lokakern.device import current_device
from lokakern.measure import operands
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.selection import remedies
from lokakern.sweep import engine
from lokakern.types import Format, Granularity, Operand
from tests.support.inline_worker import run_tasks_here

load_kernels()
SHAPE = ("--shape", "48,64,32")
LAYER = (*SHAPE, "--epilogue", "bias+layer+affine")
# One unfused, one fused in FP8, one composition.
FEW = ("--kernel", "torch.norm_unfused", "--kernel", "torch.norm_emulated_row",
       "--kernel", "torch.norm_quantize")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 64)
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", run_tasks_here)
        patch.setenv("LOKAKERN_DB", str(tmp_path_factory.mktemp("user") / "user.sqlite"))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        current_device.cache_clear()
        yield
    current_device.cache_clear()
    torch.set_num_threads(threads)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("swept") / "rows.sqlite")
    for shape in (LAYER, ("--shape", "48,64", "--epilogue", "rms")):
        swept = run("sweep", *shape, *FEW, "--db", path, "--quiet", "--json")
        assert swept.exit_code == 0, swept.output
    return path


def test_a_sweep_measures_times_and_errors(database: str) -> None:
    again = run("sweep", *LAYER, *FEW, "--db", database, "--quiet", "--json")
    assert again.exit_code == 0
    rows = json.loads(again.stdout)
    assert {row["status"] for row in rows} == {"ok"}
    assert all(isinstance(row["worst row_err"], float) for row in rows)
    found = {row["kernel"] for row in rows}
    assert found >= {"torch.norm_unfused", "torch.norm_emulated_row",
                     "torch.bf16+torch.norm_quantize"}  # fmt: skip
    assert "0 times of 0 problems and 0 errors" in again.stderr


def test_explain_chooses_by_the_error_after_the_norm(database: str) -> None:
    words = ("explain", "gemm_norm", *LAYER, "--db", database, "--json")
    loose, strict = (json.loads(run(*words, "--budget", budget).stdout)
                     for budget in ("0.06", "0.02"))  # fmt: skip
    assert loose["miss"] is strict["miss"] is False
    rejected = strict["rejected"]["torch.quantize_row+torch.norm_emulated_row"]
    assert rejected.startswith("row_err ") and strict["errors"]["row_err"] < 0.02
    quantized = json.loads(run(*words, "--scale", "row").stdout)
    either = ("torch.norm_emulated_row", "torch.emulated_row+torch.norm_quantize")
    assert quantized["kernel"] in either, "whichever was faster"
    assert "a=e4m3fn/row b=e4m3fn/row" in quantized["problem"]
    small = json.loads(run(*words, "--scale", "row", "--out-scale", "row").stdout)
    assert small["problem"].endswith("out=e4m3fn/row")
    rows = run("explain", "norm_quantize", "--shape", "48,64", "--epilogue", "rms", "--db",
               database)  # fmt: skip
    assert rows.exit_code == 0 and "torch.norm_quantize" in rows.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("explain", "gemm_norm", *SHAPE, "--epilogue", "bias+nrom"), "is unknown; expected words"),
        (("explain", "gemm_norm", *SHAPE, "--epilogue", "block_rms(7)"), "must divide the row"),
        (("explain", "gemm_norm", *SHAPE, "--epilogue", "layer", "--scale", "cell"),
         "granularity is 'cell'"),
        (("sweep", *SHAPE, "--epilogue", "layer+bias"), "is unknown; expected words"),
        (("compare", "--op", "gemm_norm", *SHAPE), "no problem of gemm_norm is in the shapes"),
    ],
)  # fmt: skip
def test_unsupported_options_are_errors_of_one_line(words: tuple[str, ...], says: str) -> None:
    ran = run(*words)
    assert ran.exit_code == 2
    assert says in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_a_miss_can_be_measured(tmp_path: Path) -> None:
    problem = make_problem("gemm_norm", (48, 64, 32), epilogue="layer",
                           a=Operand(Format.E4M3FN, Granularity.ROW))  # fmt: skip
    words = shlex.split(remedies.sweep_command(problem))[3:]
    ran = run(*words, "--errors", "none", "--quiet", "--json", *FEW, "--db",
              str(tmp_path / "a.sqlite"))  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert {row["problem"] for row in json.loads(ran.stdout)} == {str(problem)}


def test_compare_prints_the_bound(tmp_path: Path) -> None:
    words = ("compare", "--op", "gemm_norm", *LAYER, "--ours", "torch.norm_emulated_*",
             "--rivals", "torch.norm_unfused", "--quiet")  # fmt: skip
    ran = run(*words, "--format", "csv", "--group", "n == 64 and epilogue == 'bias+layer+affine'")
    assert ran.exit_code == 0, ran.output
    (row,) = csv.DictReader(io.StringIO(ran.stdout.split("bound:")[0]))
    assert row["best rival"] == "torch.norm_unfused"
    assert float(row["bound us"]) == pytest.approx(1.5, abs=0.1)
    assert "n == 64 and epilogue == 'bias+layer+affine', 1 of 1 compared" in ran.stderr


def test_kernels_and_suites_are_listed() -> None:
    kernels = json.loads(run("list", "kernels", "--json").stdout)
    listed = {row["kernel"] for row in kernels}
    assert listed >= {name for name, kernel in KERNELS.items() if kernel.op == "gemm_norm"}
    listed_suites = json.loads(run("list", "suites", "--json").stdout)
    suites = {row["suite"]: row["problems"] for row in listed_suites}
    assert suites["norms"] > 27 * 4
