"""The shipped measurements: current, sound, and what dispatch answers from them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import lokakern
from lokakern import selection
from lokakern.bench.suites import SUITES, Case
from lokakern.evidence import is_current
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.snapshot import Snapshot, load_snapshot
from lokakern.registry.store import database_digest, shipped_databases
from lokakern.types import Device, ErrorBudget, Granularity

H200 = "NVIDIA H200"
LARGEST_BYTES = 10 * 2**20
load_kernels()


@pytest.fixture(scope="module")
def path() -> Path:
    (found,) = [p for p in shipped_databases() if p.name == "nvidia-h200.sqlite"]
    return found


@pytest.fixture(scope="module")
def facts(path: Path) -> Snapshot:
    return load_snapshot([path])


@pytest.fixture(autouse=True)
def shipped_only(facts: Snapshot) -> Iterator[None]:
    selection.use_snapshot(facts)
    yield
    selection.use_snapshot(None)


def gemms(device: Device) -> list[Case]:
    return [case for case in SUITES["anchors"].cases(device) if case.problem.op == "gemm"]


def test_the_file_is_small_and_its_digest_is_of_its_rows(path: Path, facts: Snapshot) -> None:
    assert path.stat().st_size <= LARGEST_BYTES
    assert database_digest(path) == facts.digest


def test_every_kernel_that_runs_on_it_was_measured_as_it_is_now(facts: Snapshot) -> None:
    """Changing a line of a kernel, or removing its rows, fails here."""
    measured = {(name, digest) for name, digest, _ in facts.measured_kernels()}
    missing = [
        name
        for name, kernel in KERNELS.items()
        if (kernel.architectures == {"any"} or "sm_90" in kernel.architectures)
        and "sm_90" not in {**kernel.compile_only, **kernel.unmeasured}
        and (name, kernel.digest) not in measured
    ]
    assert not missing, f"changed or never measured on an H200: {missing}"


def test_kernels_claim_no_architecture_without_evidence_or_a_reason() -> None:
    for name, kernel in KERNELS.items():
        if kernel.architectures != {"any"}:
            explained = {"sm_90", *kernel.compile_only, *kernel.unmeasured}
            assert kernel.architectures <= explained, f"{name}: {kernel.architectures - explained}"


def test_every_anchor_is_answered_and_never_slower_than_bf16(facts: Snapshot) -> None:
    device = facts.find_device(H200)
    chosen_fp8 = 0
    for case in gemms(device):
        table = selection.table_for(case.problem, ErrorBudget.of(0.06), None, device)
        pick = table.pick(case.problem.m)
        assert not pick.note, f"{case.problem}: {pick.note}"
        assert pick.time is not None and pick.candidate is not None
        base = next(c for c in table.candidates if c.name == table.baseline)
        plain = base.times[case.problem.m]
        if pick.candidate.granularity is Granularity.NONE:
            continue
        chosen_fp8 += 1
        assert pick.time.latency_us < plain.latency_us
        assert pick.candidate.error_at(case.problem.m)["row_err"] <= 0.06
    assert chosen_fp8 > 0


def test_no_budget_under_the_floor_admits_fp8(facts: Snapshot) -> None:
    device = facts.find_device(H200)
    for case in gemms(device):
        for budget in (0.03, None):
            limits = None if budget is None else ErrorBudget.of(budget)
            table = selection.table_for(case.problem, limits, None, device)
            assert table.pick(case.problem.m).name == table.baseline


def test_tensor_scales_are_kept_out_by_heterogeneous_rows() -> None:
    choice = lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200)
    why = choice.rejected["triton.quantize_tensor+torch.scaled_mm_tensor_fast"]
    assert "worst on X14" in why
    narrow = lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200, distribution="X1")
    assert "row_err" not in narrow.rejected.get(
        "triton.quantize_tensor+torch.scaled_mm_tensor_fast", ""
    )


def test_it_answers_between_measured_m_and_not_outside() -> None:
    assert lokakern.dispatch("gemm", (20000, 2048, 2048), 0.06, device=H200).interpolated
    assert lokakern.dispatch("gemm", (40000, 2048, 2048), 0.06, device=H200).is_miss
    assert lokakern.dispatch("gemm", (20000, 2048, 2047), 0.06, device=H200).is_miss


def test_deleting_a_row_changes_the_answer(path: Path, tmp_path: Path) -> None:
    shape = (32768, 2048, 2048)
    before = lokakern.dispatch("gemm", shape, 0.06, device=H200)
    assert before.kernel != "torch.bf16"
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    copy.chmod(0o644)
    with closing(sqlite3.connect(copy)) as connection, connection:
        deleted = connection.execute(
            """DELETE FROM accuracy WHERE kernel IN (SELECT rowid FROM kernel WHERE name = ?)
               AND distribution IN (SELECT rowid FROM distribution WHERE name = 'X7')""",
            (before.kernel,),
        ).rowcount
    assert deleted >= 3
    selection.use_snapshot(load_snapshot([copy]))
    after = lokakern.dispatch("gemm", shape, 0.06, device=H200)
    assert after.kernel != before.kernel
    assert "X7" in after.rejected[before.kernel]


def test_its_kernels_are_known_by_their_files_alone(facts: Snapshot) -> None:
    """Freshness needs no import: it holds where Triton is not installed."""
    device = facts.find_device(H200)
    problem = gemms(device)[0].problem
    from lokakern.registry.snapshot import family_key

    cells = facts.timing_cells(device, family_key(problem), "graph-cold")
    assert cells and all(is_current(cell.kernel) for cell in cells)
