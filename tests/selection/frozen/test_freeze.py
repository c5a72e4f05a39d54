"""Frozen choices equal those of the database, bad files are refused, and ranks compare digests.

Rows are made up for the local CPU: FP8 is faster at some m.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lokakern
from lokakern.device import current_device, current_environment
from lokakern.errors import (
    ChoicesError,
    DeviceError,
    DisagreementError,
    MeasurementError,
    MissError,
)
from lokakern.numerics import measure_errors
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, TimingRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection import dispatcher, misses, rank_agreement
from lokakern.selection.frozen import file_format
from lokakern.sweep.resume import distribution_row
from lokakern.types import (
    ACCEPTED,
    REALISTIC_DISTRIBUTIONS,
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    Rejected,
    Support,
)
from tests.support.rows_at_once import RowsAtOnce

load_kernels()
ROOT = Path(__file__).resolve().parents[3]
CPU = current_device("cpu")
BF16, FP8 = "torch.bf16", "torch.quantize_row+torch.emulated_row"
SCALED, QUANTIZE = "torch.emulated_row", "torch.quantize_row"
N = K = 64
ROW_WEIGHT = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)


def write(path: Path, fp8_us: float = 4.0) -> Path:
    """Write GEMMs of 64 x 64 for m from 64 to 512: FP8 is slower at first and then faster."""
    ones = torch.ones(4, 4, dtype=torch.float64)
    with RowsAtOnce.create(path, suite="t", command="t", harness_digest="0" * 64) as run:

        def time(name: str, problem: Problem, us: float) -> None:
            run.add_timing(
                KERNELS[name], problem, distribution_row("X1"), CPU, current_environment(), "eager",
                TimingRecord(
                    status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us,
                    replay_count=9, void_count=0, calls_per_replay=1, kernel_err=0.5,
                    kernel_err_row_p99=0.5,
                ),
            )  # fmt: skip

        def error(name: str, problem: Problem, row_err: float) -> None:
            asked = accuracy_problem(problem, Format.E4M3FN)
            found = measure_errors(ones * (1 + row_err), ones)
            for distribution, seed in itertools.product(REALISTIC_DISTRIBUTIONS, range(3)):
                run.add_accuracy(
                    KERNELS[name], asked, distribution_row(distribution), CPU.architecture,
                    current_environment(),
                    AccuracyRecord(
                        status="ok", seed=seed, rows=4, errors=found, kernel_err=0.5,
                        kernel_err_row_p99=0.5, flushed_share=0.0, saturated_share=0.0,
                    ),
                )  # fmt: skip

        for m, bf16, fp8 in ((64, 2.0, 3.0), (512, 10.0, fp8_us)):
            for fields in ({}, {"b": ROW_WEIGHT, "prepared": True}):
                problem = make_problem("gemm", (m, N, K), **fields)
                time(BF16, problem, bf16)
                time(FP8, problem, fp8)
            time(SCALED, make_problem("scaled_gemm", (m, N, K)), 2.0)
            time(QUANTIZE, make_problem("quantize", (m, K)), 1.0)
        error(BF16, make_problem("gemm", (64, N, K)), 0.003)
        error(FP8, make_problem("gemm", (64, N, K)), 0.04)
        error(FP8, make_problem("gemm", (64, N, K), a=Operand(Format.FLOAT16)), 0.04)
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.sqlite")


@pytest.fixture(scope="module")
def facts(database: Path) -> Snapshot:
    return load_snapshot([database])


@pytest.fixture(autouse=True)
def a_fresh_start(facts: Snapshot, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatcher, "current_device", lambda: CPU)
    dispatcher.use_snapshot(facts)
    misses.LOGGED.clear()
    misses._COUNTS.clear()
    yield
    dispatcher.use_snapshot(None)


SIZES = (512, 256 + 8, 256 + 4, 256 + 2, 257)  # one of each alignment
ASKED: list[tuple[str, tuple[int, ...], float | None, dict[str, Any]]] = [
    ("gemm", (N, K), 0.06, {}),
    ("gemm", (N, K), 0.03, {}),
    ("gemm", (N, K), 0.06, {"b": ROW_WEIGHT, "prepared": True}),
    ("gemm", (N, K), 0.06, {"distribution": ("X1", "X2")}),
    ("gemm", (N, 2 * K), 0.06, {}),
    ("scaled_gemm", (N, K), None, {}),
    ("quantize", (K,), None, {}),
    ("norm_quantize", (K,), None, {"epilogue": "rms"}),
    ("gemm_norm", (N, K), 0.06, {"epilogue": "bias+layer+affine", "out_format": "e4m3fn"}),
]


def ask() -> None:
    for (op, sizes, budget, options), m in itertools.product(ASKED, SIZES):
        lokakern.dispatch(op, (m, *sizes), budget, **options)


def answers() -> dict[tuple[int, int], tuple[str, bool]]:
    """The choices at every second m and at the edges."""
    found = {}
    for place, (op, sizes, budget, options) in enumerate(ASKED):
        for m in (*range(0, 700, 2), *range(1, 700, 14), 513, 100_000):
            choice = lokakern.dispatch(op, (m, *sizes), budget, **options)
            found[place, m] = choice.kernel, choice.is_miss
    return found


@pytest.fixture(scope="module")
def content(facts: Snapshot, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of a file with all choices of `ask`."""
    path = tmp_path_factory.mktemp("frozen") / "choices.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "current_device", lambda: CPU)
        dispatcher.use_snapshot(facts)
        ask()
        lokakern.freeze(path)
    return path.read_bytes()


@pytest.fixture
def file(content: bytes, facts: Snapshot, tmp_path: Path) -> Path:
    dispatcher.use_snapshot(facts)
    (tmp_path / "choices.json").write_bytes(content)
    return tmp_path / "choices.json"


def content_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def seal(path: Path, whole: dict[str, Any]) -> Path:
    """Write edited content with a valid digest."""
    whole["digest"] = file_format.digest_of(whole)
    path.write_text(json.dumps(whole))
    return path


# --- the file answers as the database did


def test_frozen_choices_equal_choices_from_the_database(tmp_path: Path) -> None:
    before = answers()
    assert {name for name, _ in before.values()} >= {BF16, FP8, SCALED, QUANTIZE}
    assert {miss for _, miss in before.values()} == {True, False}
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_snapshot(load_snapshot([]))  # which would miss
    assert answers() != before
    dispatcher.use_choices(tmp_path / "choices.json")
    assert answers() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemm_is_bit_identical_with_frozen_choices(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(512, K).to(dtype), torch.randn(N, K).to(dtype)

    def run() -> list[torch.Tensor]:
        weight = lokakern.prepare_weight(w, 0.06, (512, 512))
        assert weight.granularity is Granularity.ROW
        q, qw = lokakern.quantize(x), lokakern.quantize(w)
        made = (lokakern.gemm(x, w.t(), budget=0.06), lokakern.gemm(x, weight),
                lokakern.scaled_gemm(q, qw.t()), q.data.view(torch.uint8))  # fmt: skip
        return [y for y in made if isinstance(y, torch.Tensor)]

    before = run()
    assert not torch.equal(before[0], lokakern.gemm(x, w.t())), "FP8 was chosen"
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    after = run()
    assert len(after) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_tables_that_were_only_compared_are_not_frozen(tmp_path: Path) -> None:
    """Such as other forms of a weight, and the layers of a chain."""
    lokakern.prepare_weight(torch.randn(N, K).bfloat16(), 0.06, (512, 512))
    lokakern.dispatch_chain([(N, K, "bias+layer")], 512, 0.06)
    lokakern.freeze(tmp_path / "choices.json")
    whole = content_of(tmp_path / "choices.json")
    assert [table["problem"]["op"] for table in whole["tables"]] == ["quantize"]
    assert [weight["form"] for weight in whole["weights"]] == ["row"]


def test_explain_names_the_file(file: Path) -> None:
    digest = dispatcher.snapshot().digest
    assert "frozen" not in lokakern.dispatch("gemm", (512, N, K), 0.06).explain()
    dispatcher.use_choices(file)
    choice = lokakern.dispatch("gemm", (512, N, K), 0.06)
    text = choice.explain()
    assert f"{FP8}, frozen" in text and str(file) in text and digest[:12] in text
    assert " UTC" in text and "miss" not in text
    assert "frozen" in repr(choice)
    assert (choice.kernel, choice.latency_us, choice.is_miss) == (FP8, None, False)
    assert choice(torch.randn(512, K).bfloat16(), torch.randn(K, N).bfloat16()).shape == (512, N)


def test_a_file_counts_choices_that_rest_on_imports(
    facts: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lokakern.selection.table.Table.rests_on_imports", True)
    lokakern.dispatch("gemm", (512, N, K), 0.06)
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    text = lokakern.dispatch("gemm", (512, N, K), 0.06).explain()
    assert ", 1 of its choices by imports that were not verified" in text


def test_the_order_of_calls_does_not_change_the_file(facts: Snapshot, tmp_path: Path) -> None:
    """Ranks that choose in different orders get equal digests."""
    contents = []
    for place, order in enumerate((ASKED[:3], ASKED[2::-1])):
        dispatcher.use_snapshot(facts)
        for op, sizes, budget, options in order:
            lokakern.dispatch(op, (512, *sizes), budget, **options)
        path = tmp_path / f"{place}.json"
        lokakern.freeze(path)
        contents.append({**content_of(path), "frozen_utc_ms": 0})
    assert contents[0] == contents[1] and len(contents[0]["tables"]) == 3


SCRIPT = """
import json, logging, sys
import torch, lokakern
from lokakern.registry.register import KERNELS
logging.disable()
x, w = torch.ones(512, 64).bfloat16(), torch.ones(64, 64).bfloat16()
weight = lokakern.prepare_weight(w, 0.06, (512, 512))
with torch.no_grad():
    lokakern.gemm(x, w.t(), budget=0.06)
    lokakern.gemm(x, w.t(), budget=0.05)
    lokakern.gemm(x, weight)
    lokakern.scaled_gemm(lokakern.quantize(x), lokakern.quantize(w).t())
    lokakern.gemm_norm(x, w.t(), norm="rms", budget=0.06)
chain = lokakern.dispatch_chain([(64, 64, "rms")], 512, 0.06)
choice = lokakern.dispatch("gemm", (512, 64, 64), 0.06)
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU()).bfloat16()
handle = lokakern.convert(model, 0.06, inference=True, regime="eager")
route = handle.sites["0"].routes[0].text
read = sorted({"sqlalchemy", "sqlite3", "_sqlite3"} & set(sys.modules))
print(json.dumps([choice.kernel, weight.granularity.value, chain.note, route, read]))
"""


@pytest.mark.rest
def test_no_database_is_read(database: Path, tmp_path: Path) -> None:
    """The user's database is unreadable; the shipped ones would be opened before it."""
    lokakern.dispatch("gemm", (512, N, K), 0.06)
    lokakern.prepare_weight(torch.ones(N, K).bfloat16(), 0.06, (512, 512))
    model = torch.nn.Linear(N, K, bias=False).bfloat16()
    handle = lokakern.convert(model, 0.06, inference=True, regime="eager")
    expected = handle.sites[""].routes[0].text
    assert FP8 in expected
    lokakern.freeze(tmp_path / "choices.json")
    bad = tmp_path / "user.sqlite"
    bad.write_bytes(b"no database")
    environment = {
        **os.environ, "LOKAKERN_DB": str(bad), "LOKAKERN_CHOICES": str(tmp_path / "choices.json"),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=1800, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernel, form, note, route, read = json.loads(done.stdout)
    assert (kernel, form, route, read) == (FP8, "row", expected, [])
    assert note.startswith("not among the choices of ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["choices.json", "user.sqlite"]


# --- misses


@pytest.mark.parametrize("asked", ["another size", "another budget", "another m", "more"])
def test_a_problem_that_is_not_in_the_file_is_a_miss(
    asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lokakern.dispatch("gemm", (512, N, K), 0.06)
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    n, m, budget, names = {
        "another size": (32, 512, 0.06, None), "another budget": (N, 512, 0.05, None),
        "another m": (N, 511, 0.06, None), "more": (N, 512, 0.06, "X1"),
    }[asked]  # fmt: skip
    x, w = torch.ones(m, K).bfloat16(), torch.ones(n, K).bfloat16()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = lokakern.gemm(x, w.t(), budget=budget, distribution=names)
    assert torch.equal(y, x @ w.t())
    (said,) = caplog.records
    assert "not among the choices of" in said.message and "lokakern.freeze(" in said.message
    assert not misses._COUNTS
    choice = lokakern.dispatch("gemm", (m, n, K), budget, distribution=names)
    assert (choice.kernel, choice.is_miss) == (BF16, True)
    assert str(tmp_path / "choices.json") in choice.explain()
    with pytest.raises(MissError, match=r"choices\.json.*lokakern\.freeze\("):
        lokakern.gemm(x, w.t(), budget=budget, distribution=names, on_miss="raise")
    with pytest.raises(MeasurementError, match="refused while answers are frozen"):
        lokakern.gemm(x, w.t(), budget=budget, distribution=names, on_miss="measure")


def test_a_frozen_miss_names_the_command_that_measures_it(file: Path) -> None:
    dispatcher.use_choices(file)
    x, w = torch.ones(512, 2 * K).bfloat16(), torch.ones(N, 2 * K).bfloat16()
    with pytest.raises(MissError, match=r"lokakern\.freeze\(.*bench sweep --shape 512,64,128"):
        lokakern.gemm(x, w.t(), budget=0.06, on_miss="raise")


def test_misses_of_ops_without_an_unquantized_kernel_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lokakern.dispatch("gemm", (512, N, K), 0.06)
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    with caplog.at_level(logging.WARNING):
        for m in (512, 512, 511):
            q = lokakern.quantize(torch.ones(m, K).bfloat16())
    assert q.granularity is Granularity.ROW
    assert len([r for r in caplog.records if r.message.startswith("quantize ")]) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            weight = lokakern.prepare_weight(torch.ones(N, K).bfloat16(), 0.05, (1, 9))
    assert weight.granularity is Granularity.NONE
    assert [r.message.split()[0] for r in caplog.records] == ["prepare_weight"]


def test_a_file_answers_for_its_device_only(file: Path) -> None:
    dispatcher.use_choices(file)
    choice = lokakern.dispatch("gemm", (512, N, K), 0.06, device=CPU.product)
    assert (choice.kernel, choice.callable) == (FP8, True)
    with pytest.raises(DeviceError, match="answers are those of"):
        lokakern.dispatch("gemm", (512, N, K), 0.06, device="NVIDIA H9000")
    other = replace(CPU, product="another")
    assert lokakern.dispatch("gemm", (512, N, K), 0.06, device=other).is_miss


# --- what is answered from


def test_the_environment_is_read_at_first_use(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_CHOICES", str(file))
    choices = dispatcher.choices()
    assert choices is None, "a snapshot was given"
    dispatcher.use_snapshot(None)
    choices = dispatcher.choices()
    assert choices is not None and choices.origin.path == str(file)
    dispatcher.use_choices(None)
    assert dispatcher.choices() is None
    dispatcher.use_snapshot(None)
    monkeypatch.setenv("LOKAKERN_CHOICES", str(file) + ".not")
    for _ in range(2):
        with pytest.raises(ChoicesError, match="cannot be read"):
            lokakern.dispatch("gemm", (512, N, K), 0.06)
    x = torch.ones(4, 4).bfloat16()
    assert torch.equal(lokakern.gemm(x, x), x @ x), "needs no choice"


def test_a_refused_file_leaves_the_previous_source(file: Path) -> None:
    dispatcher.use_choices(file)
    with pytest.raises(ChoicesError):
        dispatcher.use_choices(file.with_name("none.json"))
    assert lokakern.dispatch("gemm", (512, N, K), 0.06).kernel == FP8
    dispatcher.use_choices(None)
    assert lokakern.dispatch("gemm", (512, N, K), 0.06).latency_us == pytest.approx(4.0)


# --- freezing


def test_freeze_without_choices_is_refused(tmp_path: Path) -> None:
    x = torch.ones(16, 16).bfloat16()
    lokakern.gemm(x, x)
    with pytest.raises(ChoicesError, match="Run the model once, or `dispatch`"):
        lokakern.freeze(tmp_path / "choices.json")
    lokakern.dispatch("gemm", (16, 16, 16), 0.06, device=replace(CPU, product="another"))
    with pytest.raises(ChoicesError, match="no choice was made here yet"):
        lokakern.freeze(tmp_path / "choices.json")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16)).bfloat16()
    lokakern.convert(model, 0.06)
    model(x)
    with pytest.raises(ChoicesError, match="`convert` chooses no kernel where none is faster"):
        lokakern.freeze(tmp_path / "choices.json")
    assert not list(tmp_path.iterdir())


def test_frozen_choices_are_not_frozen_again(file: Path) -> None:
    dispatcher.use_choices(file)
    ask()
    with pytest.raises(ChoicesError, match="copy that file"):
        lokakern.freeze(file)


def test_freeze_is_refused_after_choices_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_MOST_TABLES", 2)
    for columns in (16, 32, 48, 64):
        lokakern.dispatch("quantize", (512, columns))
    with pytest.raises(ChoicesError, match="more than 2 choices"):
        lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_snapshot(dispatcher.snapshot())
    lokakern.dispatch("quantize", (512, K))
    lokakern.freeze(tmp_path / "choices.json")
    assert len(content_of(tmp_path / "choices.json")["tables"]) == 1


def test_a_file_is_replaced_atomically(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    lokakern.dispatch("gemm", (512, N, K), 0.06)

    def full(_descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ChoicesError, match="no space left"):
        lokakern.freeze(file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["choices.json"]
    with pytest.raises(ChoicesError, match="cannot be written"):
        lokakern.freeze(file / "inside a file")


def test_a_file_that_would_be_refused_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lokakern.dispatch("gemm", (512, N, K), 0.06).table
    monkeypatch.setattr(table, "winners", [QUANTIZE] * len(table.winners))
    with pytest.raises(ChoicesError, match="computes quantize, not gemm"):
        lokakern.freeze(tmp_path / "choices.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def sample(content: bytes) -> tuple[bytes, dict[tuple[Any, ...], tuple[Any, ...]]]:
    """A file with fewer tables, and their choices."""
    whole = json.loads(content)
    tables = [table for table in whole["tables"] if table["m_alignment"] == 16]
    whole["tables"] = sorted(tables, key=lambda table: FP8 not in table["winners"])[:5]
    asked = {"n": N, "k": K, "format": "bfloat16", "budget": {"row_err": 0.06},
             "distributions": ["X1"], "least_m": 8, "largest_m": 9, "form": "row"}  # fmt: skip
    whole["weights"] = [asked]
    whole["digest"] = file_format.digest_of(whole)
    made = json.dumps(whole).encode()
    return made, answers_of(made)


# --- files that are refused


def test_a_kernel_that_changed_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS[FP8].__dict__, "digest", "f" * 64)
    with pytest.raises(ChoicesError) as found:
        dispatcher.use_choices(file)
    assert FP8 in str(found.value) and "is ffffffffffff here" in str(found.value)
    assert "freeze again" in str(found.value)
    monkeypatch.delitem(KERNELS, FP8)
    with pytest.raises(ChoicesError, match="is not registered here"):
        dispatcher.use_choices(file)


@pytest.mark.parametrize("limit", [100, 400])
def test_a_kernel_must_support_both_ends_of_its_range(
    sample: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    def small(problem: Problem, device: Device) -> Support:
        return ACCEPTED if problem.m < limit else Rejected("too many rows")

    monkeypatch.setitem(KERNELS[FP8].__dict__, "supports_problem", small)
    with pytest.raises(ChoicesError, match=f"{re.escape(FP8)} does not take .* too many rows"):
        file_format.parse(sample[0], "choices.json")


@pytest.mark.parametrize("limit", [400, 1001])
def test_the_last_range_ends_where_operands_are_too_large(
    sample: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of cuda.quantize_row: a choice at 2048 columns was not written before."""

    def small(problem: Problem, device: Device) -> Support:
        return ACCEPTED if problem.m < limit else Rejected("too many elements")

    monkeypatch.setitem(KERNELS[FP8].__dict__, "supports_problem", small)
    monkeypatch.setattr(file_format, "MOST_ELEMENTS", 1000 * K + 1)
    if limit > 1000:
        file_format.parse(sample[0], "choices.json")
        return
    with pytest.raises(ChoicesError, match="too many elements"):
        file_format.parse(sample[0], "choices.json")


def test_another_device_is_refused(file: Path) -> None:
    whole = content_of(file)
    for change in ({"product": "NVIDIA H9000"}, {"compute_units": 999_999}, {"partition": "1g"}):
        edited = {**whole, "device": {**asdict(CPU), **change}}
        with pytest.raises(ChoicesError, match=r"they are for .* here is .* freeze"):
            dispatcher.use_choices(seal(file, edited))


@pytest.mark.parametrize("version", [0, 3, "1", True, None, 10**30])
def test_another_version_is_refused(file: Path, version: Any) -> None:
    with pytest.raises(ChoicesError, match="this lokakern reads 1 and 2"):
        dispatcher.use_choices(seal(file, {**content_of(file), "version": version}))


def nothing(path: Path) -> None:
    path.unlink()


def too_large(path: Path) -> None:
    os.truncate(path, file_format.LARGEST_FILE_BYTES + 1)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def text(words: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (nothing, "cannot be read"),
        (too_large, "more than 16 MiB"),
        (a_pipe, "not a regular file"),
        (a_folder, "not a regular file"),
        (text(""), "damaged"),
        (text("[]"), "is not 'lokakern choices'"),
        (text("{}"), "is not 'lokakern choices'"),
        (text('{"format": "lokakern choices", "version": NaN}'), "holds NaN"),
        (text('{"version": 1, "version": 1}'), "twice"),
        (text('{"version": ' + "9" * 5000 + "}"), "damaged"),
        (text("[" * 100_000), "damaged"),
        (text("[" + "0," * (3 << 20) + "0]"), "more than 2097152 of ','"),
        (text("[" + "{}" * (1 << 20) + "]"), "more than 524288 of '{'"),
        (text("[" * (1 << 20)), r"more than 524288 of '\['"),
        (
            text('{"format": "lokakern choices", "version": ' + "[" * 900 + "]" * 900 + "}"),
            "version is|damaged",
        ),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged"),
    ],
)
def test_other_and_damaged_files_are_refused(
    file: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(file)
    with pytest.raises(ChoicesError, match=words):
        dispatcher.use_choices(file)


def set_in(*place: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(whole: dict[str, Any]) -> None:
        inner: Any = whole
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = to

    return edit


def in_gemm(*place: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Replace a value in the table of a GEMM for which FP8 is fastest."""

    def edit(whole: dict[str, Any]) -> None:
        table = next(t for t in whole["tables"] if FP8 in t["winners"])
        set_in(*place, to=to)(table)

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (set_in("tables", to={}), "at `$.tables`, found {}"),
        (set_in("extra", to=1), "unknown field `extra`"),
        (set_in("snapshot", to="0"), "at `$.snapshot`, found '0'"),
        (set_in("unverified", to=-1), "at `$.unverified`, found -1"),
        (set_in("frozen_utc_ms", to=-1), "at `$.frozen_utc_ms`, found -1"),
        (set_in("lokakern", to="\x1b[2J"), "at `$.lokakern`, found '\\x1b[2J'"),
        (set_in("lokakern", to="\x7f"), "at `$.lokakern`, found '\\x7f'"),
        (set_in("lokakern", to="1" * 1001), "at most 1000 printable characters - at `$.lokakern`"),
        (set_in("device", "memory_gib", to="1"), ", 1 GiB); here is"),
        (set_in("device", "speed", to=1), "fields of device are missing or unknown: ['speed']"),
        (lambda whole: whole["device"].pop("partition"), "missing or unknown: ['partition']"),
        (set_in("kernels", to=[]), "at `$.kernels`, found []"),
        (set_in("kernels", BF16, to=7), "got `int` - at `$.kernels[...]`"),
        (lambda whole: whole["tables"].append(whole["tables"][0]), "occurs twice"),
        (lambda whole: whole["kernels"].pop(FP8), "expected a kernel of the file"),
        (in_gemm("problem", "op", to="gem"), "op 'gem' is unknown"),
        (in_gemm("problem", "op", to="quantize"), "not the operands of its op"),
        (in_gemm("problem", "n", to=-1), "`$.tables[0].problem.n`, found -1"),
        (in_gemm("problem", "n", to=64.0), "problem.n`, found 64.0"),
        (in_gemm("problem", "k", to=2**60), "problem.k`, found 1152921504606846976"),
        (in_gemm("problem", "k", to=True), "problem.k`, found True"),
        (in_gemm("problem", "prepared", to=2), "problem.prepared`, found 2"),
        (in_gemm("problem", "a", to="bfloat16/none"), "cannot be read"),
        (in_gemm("problem", "a", to="bfloat17/none/row-major/16"), "bfloat17"),
        (in_gemm("problem", "out_format", to="e4m3fn"), "does not take"),
        (in_gemm("problem", "epilogue", to="silly"), "does not take"),
        (in_gemm("problem", to=None), "`$.tables[0].problem`, found None"),
        (in_gemm("m_alignment", to=3), "m_alignment`, found 3"),
        (in_gemm("budget", to=0.06), "`$.tables[0].budget`, found 0.06"),
        (in_gemm("budget", to={}), "no limit"),
        (in_gemm("budget", to={"row_err": -1}), "zero or larger"),
        (in_gemm("budget", to={"row_err": 10**400}), "out of range - at `$.tables[0].budget[...]`"),
        (in_gemm("budget", to={"_hash": 1}), "unexpected keyword argument '_hash'"),
        (in_gemm("distributions", to=[]), "at `$.tables[0].distributions`, found []"),
        (in_gemm("distributions", to=["X1\n"]), "at `$.tables[0].distributions[0]`, found 'X1\\n'"),
        (in_gemm("regime", to="warm"), "regime is"),
        (in_gemm("needs", to=["wings"]), "needs are"),
        (in_gemm("needs", to=["offsets"]), "takes no groups"),
        (in_gemm("breakpoints", to=[]), "breakpoints`, found []"),
        (in_gemm("breakpoints", 0, to=1), "breakpoints are"),
        (in_gemm("breakpoints", 1, to=10**6), "breakpoints are"),
        (in_gemm("breakpoints", 1, to=0), "breakpoints are"),
        (in_gemm("breakpoints", 1, to=1.5), "breakpoints[1]`, found 1.5"),
        (in_gemm("winners", to=[BF16]), "one for each breakpoint - at `$.tables[0]`"),
        (in_gemm("winners", 1, to="torch.nothing"), "is 'torch.nothing'; expected"),
        (in_gemm("winners", 1, to=["torch.bf16"]), "winners[1]`, found ['torch.bf16']"),
        (in_gemm("winners", 1, to=QUANTIZE), "computes quantize, not gemm"),
        (in_gemm("winners", 1, to=""), "is ''; expected a kernel of the file"),
        (in_gemm("misses", 1, to=0), "misses[1]`, found 0"),
        (set_in("weights", 0, "form", to="1x32"), "at `$.weights[0]`, found"),
        (set_in("weights", 0, "format", to="e4m3fn"), "format is 'e4m3fn'"),
        (set_in("weights", 0, "least_m", to=0), "least_m`, found 0"),
        (set_in("weights", 0, "largest_m", to=3), "largest_m is 3"),
        (lambda whole: whole["weights"].append(whole["weights"][0]), "occurs twice"),
    ],
)
def test_forged_files_are_refused(
    sample: Any, tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    whole = json.loads(sample[0])
    edit(whole)
    path = seal(tmp_path / "choices.json", whole)
    with pytest.raises(ChoicesError) as found:
        dispatcher.use_choices(path)
    assert words in str(found.value)
    assert str(path) in str(found.value)


def answers_of(content: bytes) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    tables = file_format.parse(content, "choices.json").tables
    return {
        (t.problem, t.m_alignment, t.budget, t.distributions, t.regime, t.needs): (
            t.breakpoints, t.winners, t.misses, t.kernels
        )
        for t in tables
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10**6), what=st.integers(0, 255), kind=st.integers(0, 3))
def test_damage_is_detected(sample: Any, place: int, what: int, kind: int) -> None:
    """A file with a changed, added or lost byte is refused or gives the same choices."""
    content, before = bytearray(sample[0]), sample[1]
    place %= len(content)
    if kind == 0:
        content[place] = what
    elif kind == 1:
        content.insert(place, what)
    elif kind == 2:
        del content[place]
    else:
        del content[place:]
    with contextlib.suppress(ChoicesError):
        assert answers_of(bytes(content)) == before


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**70), st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from([BF16, FP8, SCALED, QUANTIZE, "", "gemm", "row", "none", "X1", "eager",
                     "e4m3fn", "bfloat16/none/row-major/16", "e4m3fn/row/column-major/16"]),
)  # fmt: skip
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.just({}), st.just({"row_err": 0.1}))


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_in(value[key])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_forged_file_runs_a_kernel_on_an_unsupported_problem(
    sample: Any, data: st.DataObject
) -> None:
    """Including files with a valid digest."""
    whole = json.loads(sample[0])
    table = data.draw(st.sampled_from(whole["tables"]))
    for value in data.draw(st.lists(VALUES, min_size=1, max_size=2)):
        here = [*places_in(table if data.draw(st.booleans()) else whole)]
        inside, key = data.draw(st.sampled_from(here))
        inside[key] = copy.deepcopy(value)  # hypothesis gives one {} twice: no {} inside itself
    whole["digest"] = file_format.digest_of(whole)
    try:
        choices = file_format.parse(json.dumps(whole).encode(), "choices.json")
    except ChoicesError:
        return
    for found in choices.tables:
        assert found.breakpoints[0] == 0
        for start, name, kernel in zip(
            found.breakpoints, found.winners, found.kernels, strict=True
        ):
            assert kernel is KERNELS.get(name)
            if kernel is not None:
                asked = replace(found.problem, m=found.like(start))
                assert not isinstance(kernel.supports(asked, CPU), Rejected)


# --- ranks


def said(snapshot: str = "snapshot " + "a" * 64, kernels: str = "kernels " + "b" * 64) -> Any:
    return {"answers": snapshot, "kernels": kernels}


def test_disagreeing_ranks_get_both_digests_and_the_other_rank() -> None:
    store = torch.distributed.HashStore()
    rank_agreement.compare(store, CPU, "rank 0 on a", said())
    rank_agreement.compare(store, CPU, "rank 1 on b", said())
    with pytest.raises(DisagreementError) as found:
        rank_agreement.compare(store, CPU, "rank 2 on c", said(snapshot="snapshot " + "c" * 64))
    words = str(found.value)
    assert words.startswith("rank 2 on c would choose other kernels than rank 0 on a")
    assert "snapshot cccccccccccc here, snapshot aaaaaaaaaaaa there" in words
    assert "kernels bbbb" not in words and "LOKAKERN_CHOICES" in words and "LOKAKERN_DB" in words
    with pytest.raises(DisagreementError, match=r"kernels d{12} here, kernels b{12} there"):
        rank_agreement.compare(store, CPU, "rank 3 on d", said(kernels="kernels " + "d" * 64))
    other = replace(CPU, product="another")
    rank_agreement.compare(store, other, "rank 4 on e", said(kernels="kernels " + "d" * 64))
    with pytest.raises(DisagreementError, match="than rank 4 on e"):
        rank_agreement.compare(store, other, "rank 5 on f", said())


def test_the_digest_of_kernels_covers_the_toolchain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = rank_agreement.usable_digest(CPU)
    assert rank_agreement.usable_digest(CPU) == now
    with monkeypatch.context() as patch:
        patch.delitem(KERNELS, next(n for n, k in KERNELS.items() if k.runs_on(CPU)))
        assert rank_agreement.usable_digest(CPU) != now
    with monkeypatch.context() as patch:
        patch.delitem(KERNELS, next(n for n, k in KERNELS.items() if not k.runs_on(CPU)))
        assert rank_agreement.usable_digest(CPU) == now
    with monkeypatch.context() as patch:
        patch.setitem(KERNELS[BF16].__dict__, "digest", "f" * 64)
        assert rank_agreement.usable_digest(CPU) != now
    here = replace(current_environment(), torch="0.1")
    monkeypatch.setattr(rank_agreement, "current_environment", lambda: here)
    assert rank_agreement.usable_digest(CPU) != now


RANK = """
import sys
from datetime import timedelta
import torch.distributed as distributed
import lokakern
from lokakern.selection import dispatcher, rank_agreement
from lokakern.errors import DisagreementError
from lokakern.registry.snapshot.loading import load_snapshot

rank, folder, same, other, choices = int(sys.argv[1]), *sys.argv[2:]

def snapshot(path):
    return lambda: dispatcher.use_snapshot(load_snapshot([path]))

def frozen():
    dispatcher.use_choices(choices)

ways = {
    "same": (snapshot(same), snapshot(same)),
    "other": (snapshot(same), snapshot(other)),
    "alone": (snapshot(same), None),
    "frozen": (frozen, frozen),
    "mixed": (snapshot(same), frozen),
}
for name, each in ways.items():
    store = distributed.FileStore(f"{folder}/{name}", 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1800)
    )
    rank_agreement.COMPARED.clear()
    said = "nothing"
    if each[rank] is not None:
        each[rank]()
        try:
            for _ in range(2):
                said = lokakern.dispatch("gemm", (512, 64, 64), 0.06).kernel
        except DisagreementError as error:
            said = f"refused: {error}"
    print(name, said, sep=": ", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
"""


@pytest.mark.rest
def test_ranks_compare_their_sources_of_choices(database: Path, file: Path, tmp_path: Path) -> None:
    """A rank that dispatches alone waits for no other."""
    other = write(tmp_path / "other.sqlite", fp8_us=30.0)
    command = [sys.executable, "-c", RANK]
    rest = [str(tmp_path), str(database), str(other), str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *rest], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [rank.communicate(timeout=1800) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    first, second = (dict(x.split(": ", 1) for x in out.splitlines()) for out, _ in ended)
    assert first["same"] == second["same"] == FP8
    assert first["frozen"] == second["frozen"] == FP8
    assert (first["alone"], second["alone"]) == (FP8, "nothing")
    for name in ("other", "mixed"):  # whoever comes second is refused
        pair = sorted((first[name], second[name]), key=lambda x: x.startswith("refused"))
        assert not pair[0].startswith("refused") and pair[1].startswith("refused: rank "), pair
    words = " ".join((first["mixed"], second["mixed"]))
    assert "frozen choices " in words and "snapshot " in words and "what was measured" in words
    assert "the kernels that run here" not in words


def test_a_single_rank_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "COMPARED", set())
    monkeypatch.setattr(rank_agreement, "compare", lambda *_: pytest.fail("compared"))
    lokakern.dispatch("gemm", (512, N, K), 0.06)
    assert not rank_agreement.COMPARED, "there is no job yet"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert lokakern.dispatch("gemm", (512, N, 2 * K), ErrorBudget(row_err=0.06)).is_miss
        assert CPU in rank_agreement.COMPARED
    finally:
        torch.distributed.destroy_process_group()
