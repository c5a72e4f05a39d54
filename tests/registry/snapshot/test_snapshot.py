"""The in-memory read model of dispatch."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lokakern.errors import DatabaseError, DeviceError
from lokakern.numerics import Errors
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import (
    AccuracyRecord,
    DistributionRow,
    KernelRow,
    TestResultRecord,
    TimingRecord,
)
from lokakern.registry.schema.row_keys import family_key
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.storage.merge import merge
from lokakern.registry.storage.reader import database_digest
from lokakern.types import Device, Environment, Format, Layout, Operand, Problem
from tests.support.rows_at_once import RowsAtOnce
from tests.support.run_files import content_digest

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
SLICE = dataclasses.replace(H200, compute_units=16, memory_gib=18, partition="1g.18gb")
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
THEN, NOW = Environment(torch="2.8.0"), Environment(torch="2.9.0")
OLD = KernelRow("cuda.row", "gemm", "cuda", ("cuda/row",), "1" * 64, "promoted", "row", "row")
NEW = dataclasses.replace(OLD, digest="2" * 64)
TWIN = dataclasses.replace(OLD, name="triton.row", digest="4" * 64)
FAST = dataclasses.replace(OLD, name="triton.row_fast", digest="5" * 64, accumulation="fast")
BF16 = KernelRow("torch.bf16", "gemm", "torch", ("torch/bf16",), "3" * 64, "none", "none", "none")
X1, X7 = DistributionRow.of("X1"), DistributionRow.of("X7", {"df": 2}, realistic=False)
PROBLEM = Problem(
    op="gemm", m=2048, n=512, k=1024,
    a=Operand(Format.BFLOAT16), b=Operand(Format.BFLOAT16, layout=Layout.COLUMN),
)  # fmt: skip


def at(m: int, **changes: Any) -> Problem:
    return dataclasses.replace(PROBLEM, m=m, **changes)


def timed(latency_us: float) -> TimingRecord:
    return TimingRecord(
        status="ok", latency_us_p20=latency_us - 1, latency_us_p50=latency_us,
        latency_us_p80=latency_us + 1, replay_count=90, void_count=0, calls_per_replay=10,
        kernel_err=0.5, kernel_err_row_p99=0.25, timer="cuda-event", measured_utc_ms=7,
    )  # fmt: skip


def accurate(seed: int, row_err_upper: float) -> AccuracyRecord:
    values = {field.name: 0.0 for field in dataclasses.fields(Errors)}
    counts = {"nonfinite_count": 0, "nonfinite_unexpected_count": 0}
    uppers = {
        "row_err_upper": row_err_upper, "row_p99_upper": 0.11, "rel_err_upper": 0.12,
        "mean_rel_err_upper": 0.13, "mean_shift_upper": 0.14,
    }  # fmt: skip
    return AccuracyRecord(
        status="ok", seed=seed, rows=2048, errors=Errors(**(values | counts | uppers)),  # type: ignore[arg-type]
        kernel_err=0.5, kernel_err_row_p99=0.25, flushed_share=0.0, saturated_share=0.0,
    )  # fmt: skip


def outcome(failed_count: int = 0) -> TestResultRecord:
    return TestResultRecord(
        seeds="0,7", passed_count=3, failed_count=failed_count, skipped_count=0,
        reason="1 > 0.5" if failed_count else "", measured_utc_ms=8,
    )  # fmt: skip


def begin(path: Path, grade: str = "full") -> RowsAtOnce:
    return RowsAtOnce.create(path, suite="s", command="c", harness_digest="h", grade=grade)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A shipped file and a user's."""
    folder = tmp_path_factory.mktemp("snapshot")
    shipped, user = folder / "shipped.sqlite", folder / "user.sqlite"
    with begin(shipped) as run:
        for m in (1, 2048):
            run.add_timing(OLD, at(m), X1, H200, THEN, "graph-cold", timed(10.0 + m))
            run.add_timing(BF16, at(m), X1, H200, THEN, "graph-cold", timed(20.0 + m))
        run.add_timing(OLD, at(1), X1, H200, THEN, "graph-hot", timed(5.0))
        run.add_timing(OLD, at(1, n=640), X1, H200, THEN, "graph-cold", timed(6.0))
        run.add_timing(OLD, at(1, prepared=True), X1, H200, THEN, "graph-cold", timed(7.0))
        run.add_timing(OLD, at(1), X1, MI300X, THEN, "graph-cold", timed(8.0))
        for seed in (0, 1, 2):
            run.add_accuracy(OLD, PROBLEM, X1, "sm_90", THEN, accurate(seed, 0.03 + seed / 1000))
        run.add_accuracy(OLD, PROBLEM, X1, "gfx942", THEN, accurate(0, 0.05))
    with begin(user, "quick") as run:
        run.add_timing(NEW, at(2048), X1, H200, NOW, "graph-cold", timed(9.0))
        failed = TimingRecord(status="out_of_memory", reason="needs 200 GiB")
        run.add_timing(NEW, at(1), X1, H200, NOW, "graph-cold", failed)
        run.add_timing(NEW, at(1), X1, SLICE, NOW, "graph-cold", timed(4.0))
        run.add_accuracy(NEW, PROBLEM, X7, "sm_90", NOW, accurate(0, 0.04))
        run.add_accuracy(TWIN, PROBLEM, X1, "sm_90", NOW, accurate(0, 0.02))
        run.add_accuracy(FAST, PROBLEM, X1, "sm_90", NOW, accurate(0, 0.06))
        run.add_test_result(NEW, "sm_90", "tests/test_b.py", NOW, outcome(failed_count=1))
        run.add_test_result(NEW, "sm_90", "tests/test_a.py", NOW, outcome())
    return [shipped, user]


@pytest.fixture(scope="module")
def snapshot(files: list[Path]) -> Snapshot:
    return load_snapshot(files)


def test_timing_cells_of_a_family(snapshot: Snapshot) -> None:
    """Every kernel, state and m of the problem without m; no other shape, device or regime."""
    cells = snapshot.timing_cells(H200, family_key(at(99)), "graph-cold")
    found = [(c.kernel.name, c.m, c.kernel.digest[0], c.grade, c.status) for c in cells]
    assert found == [
        ("cuda.row", 1, "1", "full", "ok"),
        ("cuda.row", 1, "2", "quick", "out_of_memory"),
        ("cuda.row", 2048, "1", "full", "ok"),
        ("cuda.row", 2048, "2", "quick", "ok"),
        ("torch.bf16", 1, "3", "full", "ok"),
        ("torch.bf16", 2048, "3", "full", "ok"),
    ]
    first, failed = cells[0], cells[1]
    assert (first.latency_us_p20, first.latency_us_p50, first.latency_us_p80) == (10, 11, 12)
    assert first.replay_count == 90 and first.kernel_err == 0.5 and first.distribution == "X1"
    assert first.kernel == OLD and first.problem == at(1) and first.measured_utc_ms == 7
    assert snapshot.environment(first.environment) == THEN
    assert failed.reason == "needs 200 GiB" and snapshot.environment(failed.environment) == NOW
    assert math.isnan(failed.latency_us_p50), "NaN loses every comparison"
    assert first.started_utc_ms <= failed.started_utc_ms and first.run != failed.run


@pytest.mark.parametrize(
    ("device", "problem", "regime", "latencies_us"),
    [
        (H200, at(1), "graph-hot", [5.0]),
        (H200, at(1, n=640), "graph-cold", [6.0]),
        (H200, at(1, prepared=True), "graph-cold", [7.0]),
        (MI300X, at(1), "graph-cold", [8.0]),
        (SLICE, at(1), "graph-cold", [4.0]),
        (H200, at(1), "eager", []),
        (dataclasses.replace(H200, memory_gib=140), at(1), "graph-cold", []),
    ],
)
def test_timing_cells_belong_to_device_problem_and_regime(
    snapshot: Snapshot, device: Device, problem: Problem, regime: str, latencies_us: list[float]
) -> None:
    cells = snapshot.timing_cells(device, family_key(problem), regime)
    assert [cell.latency_us_p50 for cell in cells] == latencies_us


def test_the_least_time_per_byte_is_that_of_the_fastest_kernel_of_a_device_and_regime(
    snapshot: Snapshot,
) -> None:
    for device, regime, us, m in (
        (H200, "graph-cold", 9.0, 2048), (H200, "graph-hot", 5.0, 1),
        (SLICE, "graph-cold", 4.0, 1),
        (MI300X, "graph-cold", 8.0, 1),
    ):  # fmt: skip
        assert snapshot.least_us_per_byte(device, regime) == us / at(m).bytes_moved
    assert snapshot.least_us_per_byte(H200, "eager") == 0.0  # nothing was timed


def test_accuracy_cells(snapshot: Snapshot) -> None:
    cells = snapshot.accuracy_cells("sm_90", "cuda.row", row_keys.key_of(PROBLEM))
    found = [(c.distribution, c.seed, c.kernel.digest[0], c.grade, c.realistic) for c in cells]
    assert found == [
        ("X1", 0, "1", "full", True),
        ("X1", 1, "1", "full", True),
        ("X1", 2, "1", "full", True),
        ("X7", 0, "2", "quick", False),
    ]
    assert [cell.row_err_upper for cell in cells] == [0.03, 0.031, 0.032, 0.04]
    cell = cells[0]
    uppers = (cell.row_p99_upper, cell.rel_err_upper, cell.mean_rel_err_upper)
    assert (*uppers, cell.mean_shift_upper, cell.kernel_err) == (0.11, 0.12, 0.13, 0.14, 0.5)
    assert cells[3].parameters == '{"df":2}'
    assert not snapshot.accuracy_cells("sm_90", "torch.bf16", row_keys.key_of(PROBLEM))
    assert not snapshot.accuracy_cells("sm_90", "cuda.row", row_keys.key_of(at(1)))
    (other,) = snapshot.accuracy_cells("gfx942", "cuda.row", row_keys.key_of(PROBLEM))
    assert other.row_err_upper == 0.05


def test_accuracy_cells_of_a_class(snapshot: Snapshot) -> None:
    """Whatever the kernel: those that scale and accumulate alike, and no others."""
    asked = row_keys.key_of(PROBLEM)
    cells = snapshot.accuracy_cells_of_class("sm_90", asked, "row", "row", "promoted")
    found = [(c.distribution, c.seed, c.kernel.name, c.kernel.digest[0]) for c in cells]
    assert found == [
        ("X1", 0, "cuda.row", "1"),
        ("X1", 1, "cuda.row", "1"),
        ("X1", 2, "cuda.row", "1"),
        ("X1", 0, "triton.row", "4"),
        ("X7", 0, "cuda.row", "2"),
    ]
    (fast,) = snapshot.accuracy_cells_of_class("sm_90", asked, "row", "row", "fast")
    assert fast.row_err_upper == 0.06
    (other,) = snapshot.accuracy_cells_of_class("gfx942", asked, "row", "row", "promoted")
    assert other.row_err_upper == 0.05
    for changed in (
        ("sm_100", asked, "row", "row", "promoted"),
        ("sm_90", row_keys.key_of(at(1)), "row", "row", "promoted"),
        ("sm_90", asked, "tensor", "row", "promoted"),
        ("sm_90", asked, "row", "tensor", "promoted"),
    ):
        assert not snapshot.accuracy_cells_of_class(*changed)


def test_test_results(snapshot: Snapshot) -> None:
    found = [(c.kernel, c.architecture, c.suite, c.status) for c in snapshot.test_results]
    assert found == [
        (NEW, "sm_90", "tests/test_a.py", "ok"),
        (NEW, "sm_90", "tests/test_b.py", "failed"),
    ]
    cell = snapshot.test_results[1]
    assert (cell.seeds, cell.passed_count, cell.failed_count, cell.skipped_count) == (
        "0,7",
        3,
        1,
        0,
    )
    assert cell.reason == "1 > 0.5" and snapshot.environment(cell.environment) == NOW


def test_heads_are_what_cells_are_of(snapshot: Snapshot) -> None:
    heads = [
        (head.kernel, snapshot.problem(head.problem), *head[2:])
        for head in snapshot.timing_heads(H200, "graph-cold")
    ]
    cells = [
        (c.kernel, c.problem, c.environment, c.grade, c.measured_utc_ms, c.tier)
        for c in snapshot.timings_on(H200, "graph-cold")
    ]
    assert len(heads) == 8 and sorted(heads, key=str) == sorted(cells, key=str)
    errors = sorted(
        (h.kernel.name, h.distribution.name, h.seed, h.status, h.row_err_upper, h.grade)
        for h in snapshot.accuracy_heads("sm_90")
    )
    asked = row_keys.key_of(PROBLEM)
    assert errors == sorted(
        (c.kernel.name, c.distribution, c.seed, c.status, c.row_err_upper, c.grade)
        for name in {row.name for row in snapshot.kernels}
        for c in snapshot.accuracy_cells("sm_90", name, asked)
    )


def test_timing_outcomes(snapshot: Snapshot) -> None:
    outcomes = snapshot.timing_outcomes()
    assert ("cuda.row", NEW.digest, H200, "out_of_memory", "needs 200 GiB", "") in outcomes
    assert {
        ("cuda.row", NEW.digest, H200, "ok", "", ""),
        ("cuda.row", NEW.digest, SLICE, "ok", "", ""),
    } < outcomes
    good = {(name, digest, device.product)
            for name, digest, device, status, *_ in outcomes if status == "ok"}  # fmt: skip
    assert good == {
        ("cuda.row", OLD.digest, "NVIDIA H200"),
        ("cuda.row", OLD.digest, "AMD Instinct MI300X"),
        ("cuda.row", NEW.digest, "NVIDIA H200"),
        ("torch.bf16", BF16.digest, "NVIDIA H200"),
    }


def test_devices(snapshot: Snapshot) -> None:
    assert snapshot.devices == [MI300X, H200, SLICE]
    assert snapshot.distributions == [X1, X7]
    assert snapshot.distribution_names == {"X1", "X7"}
    for name in ("NVIDIA H200", "nvidia-h200", "NVIDIA_h200"):
        assert snapshot.find_device(name) == H200, "the whole device, not a slice of it"
    assert snapshot.find_device("amd-instinct-mi300x") == MI300X
    with pytest.raises(DeviceError, match=r"'NVIDIA H2' .* 'AMD Instinct MI300X', 'NVIDIA H200'"):
        snapshot.find_device("NVIDIA H2")


def test_resume(snapshot: Snapshot) -> None:
    """Rows of the same state need not be measured again; a quick row is not enough."""
    problem, x1 = row_keys.key_of(at(1)), row_keys.key_of(X1)
    h200 = row_keys.key_of(H200)
    then, now = row_keys.key_of(THEN), row_keys.key_of(NOW)
    timing = snapshot.has_timing
    assert timing(OLD.digest, problem, x1, h200, then, "graph-cold")
    assert timing(OLD.digest, problem, x1, h200, then, "graph-cold", "quick")
    failed_before = timing(NEW.digest, problem, x1, h200, now, "graph-cold", "quick")
    assert not failed_before, "an error may pass: it is tried again"
    assert not timing(NEW.digest, problem, x1, h200, now, "graph-cold", "full")
    assert not timing(NEW.digest, problem, x1, h200, then, "graph-cold", "quick")
    assert not timing(OLD.digest, problem, x1, h200, then, "eager")
    asked = row_keys.key_of(PROBLEM)
    assert snapshot.has_accuracy(OLD.digest, asked, x1, "sm_90", then, 2)
    assert not snapshot.has_accuracy(OLD.digest, asked, x1, "sm_90", then, 3)
    assert not snapshot.has_accuracy(OLD.digest, asked, x1, "sm_100", then, 2)


@pytest.mark.parametrize(
    ("status", "again"),
    [("error", True), ("out_of_memory", True), ("crashed", False), ("timeout", False),
     ("wrong", False)],
)  # fmt: skip
def test_crashes_are_not_tried_again(tmp_path: Path, status: str, again: bool) -> None:
    path = tmp_path / "a.sqlite"
    with begin(path) as run:
        record = TimingRecord(status=status, reason="why")
        run.add_timing(NEW, at(1), X1, H200, NOW, "graph-cold", record)
    measured = load_snapshot([path]).has_timing(
        NEW.digest, row_keys.key_of(at(1)), row_keys.key_of(X1),
        row_keys.key_of(H200), row_keys.key_of(NOW), "graph-cold",
    )  # fmt: skip
    assert measured is not again


def test_digest_depends_on_content_only(files: list[Path], tmp_path: Path) -> None:
    merge(files, tmp_path / "merged.sqlite")
    digests = {
        load_snapshot(files).digest,
        load_snapshot(files[::-1]).digest,
        load_snapshot([*files, files[0]]).digest,
        load_snapshot([tmp_path / "merged.sqlite"]).digest,
    }
    assert len(digests) == 1
    assert load_snapshot(files[:1]).digest not in digests
    merged = tmp_path / "merged.sqlite"
    assert content_digest(load_snapshot(files)) == database_digest(merged)


def test_snapshot_does_not_change(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "growing.sqlite"
    merge(files[:1], path)
    before = load_snapshot([path])
    merge(files, path)
    assert load_snapshot([path]).digest == load_snapshot(files).digest
    assert before.digest == load_snapshot(files[:1]).digest
    assert before.find_device("NVIDIA H200").partition == "none"


def test_no_file_is_an_empty_snapshot() -> None:
    empty = load_snapshot([])
    assert empty.devices == [] and len(empty.digest) == 64
    assert empty.timing_cells(H200, family_key(PROBLEM), "graph-cold") == []
    assert empty.accuracy_cells("sm_90", "cuda.row", row_keys.key_of(PROBLEM)) == []
    assert empty.test_results == [] and empty.timing_outcomes() == set()
    assert not empty.has_timing("d", "p", "x", "h", "e", "eager")
    with pytest.raises(DeviceError, match="known are none"):
        empty.find_device("NVIDIA H200")
    with pytest.raises(DatabaseError, match="in no database read"):
        empty.environment("0" * 64)


def test_default_files(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lokakern.registry.storage.paths.shipped_databases", lambda: files[:1])
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "absent.sqlite"))
    assert load_snapshot().digest == load_snapshot(files[:1]).digest
    monkeypatch.setenv("LOKAKERN_DB", str(files[1]))
    assert load_snapshot().digest == load_snapshot(files).digest
    with pytest.raises(DatabaseError, match=r"absent\.sqlite"):
        load_snapshot([tmp_path / "absent.sqlite"])


def test_ok_row_without_its_metrics_is_refused(files: list[Path]) -> None:
    """A file whose CHECK constraints were taken out may hold one."""
    from lokakern.registry.schema.tables import COLUMNS
    from lokakern.registry.storage.reader import read_rows

    rows = read_rows(files[0])
    place = COLUMNS["timing"].index("latency_us_p50")
    bare = [(*row[:place], None, *row[place + 1 :]) for row in rows["timing"]]
    with pytest.raises(DatabaseError, match="'ok' without latency_us_p50"):
        Snapshot({**rows, "timing": bare}).timing_cells(H200, family_key(PROBLEM), "graph-hot")


@pytest.mark.rest
def test_sqlalchemy_is_imported_late() -> None:
    """`import lokakern` and the names of cells cost no SQLAlchemy."""
    code = (
        "import sys, lokakern, lokakern.registry.snapshot.snapshot\n"
        "import lokakern.registry.schema.row_keys\n"
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
