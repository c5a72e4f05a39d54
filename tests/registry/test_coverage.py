"""Evidence of kernels, and missing evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lokakern.registry import coverage
from lokakern.registry.coverage import Coverage, Gap, coverage_of, missing_evidence
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.records import (
    DistributionRow,
    KernelRow,
    TestResultRecord,
    TimingRecord,
)
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.types import Device, Environment, Format, Operand, Problem
from tests.support.rows_at_once import RowsAtOnce

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
CPU = Device("cpu", "A CPU", "x86_64", 2, 4)
PROBLEM = Problem(op="quantize", m=64, n=1, k=64, a=Operand(Format.BFLOAT16))
load_kernels()
TEMPLATE = KERNELS["torch.quantize_row"]


def kernel(digest: str = "1" * 64, **changes: Any) -> Kernel:
    made = replace(TEMPLATE, name="a.kernel", **changes)
    made.__dict__["digest"] = digest  # a state of its source that is nowhere
    return made


class Facts:
    """A database to be, row by row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshot()

    def time(self, of: Kernel, device: Device = H200, status: str = "ok") -> None:
        metrics: dict[str, Any] = {
            "latency_us_p20": 1.0, "latency_us_p50": 1.0, "latency_us_p80": 1.0,
            "replay_count": 9, "void_count": 0, "calls_per_replay": 1,
            "kernel_err": 0.0, "kernel_err_row_p99": 0.0,
        }  # fmt: skip
        record = (
            TimingRecord(status="ok", **metrics)
            if status == "ok"
            else TimingRecord(status=status, reason="it would not")
        )
        with self._begin() as run:
            run.add_timing(
                KernelRow.of(of), PROBLEM, DistributionRow.of("X1"), device, Environment(),
                "eager", record,
            )  # fmt: skip

    def test(self, of: Kernel, *counts: int, suite: str = "tests/test_a.py", when: int = 1) -> None:
        passed, failed, skipped = counts
        record = TestResultRecord(
            seeds="0", passed_count=passed, failed_count=failed, skipped_count=skipped,
            reason="" if passed and not failed else "1 > 0.5", measured_utc_ms=when,
        )  # fmt: skip
        with self._begin() as run:
            run.add_test_result(KernelRow.of(of), "sm_90", suite, Environment(), record)

    def _begin(self) -> RowsAtOnce:
        return RowsAtOnce.create(self.path, suite="s", command="c", harness_digest="h")

    def snapshot(self) -> Snapshot:
        return load_snapshot([self.path] if self.path.exists() else [])

    def gaps(self, of: Kernel) -> list[tuple[str, str]]:
        return [(gap.table, gap.why) for gap in missing_evidence(self.snapshot(), [of])]

    def states(self, of: Kernel) -> dict[str, tuple[str, str]]:
        found = coverage_of(self.snapshot(), [of])
        return {one.architecture: (one.state, one.why) for one in found}


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return Facts(tmp_path / "facts.sqlite")


ON_HOPPER = frozenset({"sm_90"})


def test_a_kernel_said_to_be_unmeasured_lacks_its_time_only(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = kernel(architectures=ON_HOPPER)
    monkeypatch.setitem(coverage.UNMEASURED, (it.name, "sm_90"), "no machine")
    assert facts.gaps(it) == [("test_result", "never tested")]
    assert facts.states(it) == {"sm_90": ("unmeasured", "no machine")}
    facts.time(it, status="wrong")
    assert [table for table, _ in facts.gaps(it)] == ["timing", "test_result"]


def test_a_kernel_needs_a_time_and_a_test_run(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER)
    assert facts.gaps(it) == [("timing", "never timed"), ("test_result", "never tested")]
    assert facts.states(it) == {"sm_90": ("unmeasured", "never timed")}
    facts.time(it)
    assert facts.gaps(it) == [("test_result", "never tested")]
    assert facts.states(it) == {"sm_90": ("measured", "NVIDIA H200; never tested")}
    facts.test(it, 40, 0, 2)
    assert facts.gaps(it) == []
    assert facts.states(it) == {"sm_90": ("measured", "NVIDIA H200; 40 tests passed")}


def test_a_changed_kernel_needs_new_times_and_a_new_test_run(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER)
    facts.time(it)
    facts.test(it, 40, 0, 0)
    changed = kernel("2" * 64, architectures=ON_HOPPER)
    assert facts.gaps(changed) == [
        ("timing", "changed since it was timed on NVIDIA H200"),
        ("test_result", "changed since it was tested"),
    ]
    assert facts.states(changed) == {
        "sm_90": ("stale", "changed since it was timed on NVIDIA H200")
    }
    assert facts.gaps(it) == [], "the old state has what it had"


def test_a_failed_test_counts_until_its_suite_passes(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER)
    facts.time(it)
    facts.test(it, 39, 1, 0)
    facts.test(it, 5, 0, 0, suite="tests/test_b.py")
    failed = "1 tests failed: 1 > 0.5"
    assert facts.gaps(it) == [("test_result", failed)]
    assert facts.states(it) == {"sm_90": ("failed", failed)}
    facts.test(it, 40, 0, 0, when=2)
    assert facts.gaps(it) == []
    assert facts.states(it) == {"sm_90": ("measured", "NVIDIA H200; 45 tests passed")}


def test_skipped_tests_are_no_evidence(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER)
    facts.time(it)
    facts.test(it, 0, 0, 3)
    assert facts.gaps(it) == [("test_result", "no test ran: 1 > 0.5")]


def test_a_time_that_is_not_ok_is_no_evidence(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER)
    facts.time(it, status="timeout")
    facts.test(it, 40, 0, 0)
    why = "no time on NVIDIA H200: timeout: it would not"
    assert facts.gaps(it) == [("timing", why)]
    assert facts.states(it) == {"sm_90": ("failed", why)}
    facts.time(it)
    assert facts.gaps(it) == []
    assert facts.states(it)["sm_90"][0] == "measured"


@pytest.mark.parametrize("status", ["wrong", "crashed"])
def test_a_kernel_that_was_wrong_once_is_a_gap_until_it_changes(facts: Facts, status: str) -> None:
    it = kernel(architectures=ON_HOPPER)
    facts.time(it)
    facts.test(it, 40, 0, 0)
    facts.time(it, status=status)
    why = f"{status} on NVIDIA H200: it would not"
    assert facts.gaps(it) == [("timing", why)]
    assert facts.states(it) == {"sm_90": ("failed", why)}
    changed = kernel("2" * 64, architectures=ON_HOPPER)
    facts.time(changed)
    facts.test(changed, 40, 0, 0)
    assert facts.gaps(changed) == []


def test_a_kernel_of_a_new_op_needs_no_evidence_until_it_is_tested(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = kernel(architectures=ON_HOPPER)
    assert facts.gaps(it) == [("timing", "never timed"), ("test_result", "never tested")]
    monkeypatch.setitem(coverage.NEW_OPS, (it.op, "sm_90"), "new")
    assert facts.gaps(it) == []
    assert facts.states(it) == {"sm_90": ("unmeasured", "new")}
    facts.test(it, 0, 1, 0)
    assert [table for table, _ in facts.gaps(it)] == ["test_result"]


@pytest.mark.parametrize("declared", ["compile_only", "unmeasured"])
def test_a_reason_replaces_evidence(facts: Facts, declared: str) -> None:
    both = frozenset({"sm_90", "gfx942"})
    it = kernel(architectures=both, **{declared: {"gfx942": "no such GPU"}})
    facts.time(it)
    facts.test(it, 40, 0, 0)
    assert facts.gaps(it) == []
    assert facts.states(it)["gfx942"] == (declared, "no such GPU")
    silent = kernel(architectures=both, **{declared: {"gfx942": ""}})
    (timing, result) = missing_evidence(facts.snapshot(), [silent])
    assert timing == Gap("a.kernel", "gfx942", "timing", "never timed")
    assert str(result) == "a.kernel on gfx942: never tested"


def test_measured_state_counts_before_declared_state(facts: Facts) -> None:
    it = kernel(architectures=ON_HOPPER, compile_only={"sm_90": "no such GPU"})
    facts.time(it)
    assert facts.states(it) == {"sm_90": ("measured", "NVIDIA H200; never tested")}


def test_a_kernel_for_any_device_claims_the_gpus_that_were_measured(facts: Facts) -> None:
    it = kernel()
    assert it.architectures == {"any"}
    assert facts.gaps(it) == []
    assert coverage_of(facts.snapshot(), [it]) == [
        Coverage("a.kernel", "any", "unmeasured", "never timed")
    ]
    facts.time(it, CPU)
    assert facts.gaps(it) == [], "tests on a CPU leave no rows and none are asked for"
    assert facts.states(it) == {"x86_64": ("measured", "A CPU")}
    other = replace(TEMPLATE, name="another.kernel")
    facts.time(other)
    assert facts.gaps(it) == [("timing", "never timed"), ("test_result", "never tested")]
    assert set(facts.states(it)) == {"sm_90", "x86_64"}
