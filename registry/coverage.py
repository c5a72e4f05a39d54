"""What is known of each kernel as it is now, by architecture; and what is missing.

Evidence belongs to a digest: a row of another state of a kernel's source is stale. Nothing here
needs the GPU that a row was measured on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lokakern.registry.staleness import is_current
from lokakern.registry.unmeasured import NEW_KERNELS, NEW_OPS, UNMEASURED

if TYPE_CHECKING:
    from lokakern.registry.register import Kernel
    from lokakern.registry.snapshot.cells import TestResultCell
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.types import Device


BROKEN = ("wrong", "crashed")  # one such row, and the state of the source it is of is no good


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is known of a kernel on an architecture.

    Attributes:
        architecture: Or "any", for a kernel that runs anywhere and was measured nowhere.
        state: "measured", "failed" (a GPU test, every timing, or one that was wrong or crashed),
            "stale" (measured before it changed), "compile_only" or "unmeasured".
        why: Where it was measured and how its tests ended, or the reason for the state.
    """

    kernel: str
    architecture: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A row that should be there; `table` is "timing" or "test_result"."""

    kernel: str
    architecture: str
    table: str
    why: str

    def __str__(self) -> str:
        return f"{self.kernel} on {self.architecture}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Verdict:
    state: str  # "ok", "failed", "stale" or "none"
    why: str


def missing_evidence(facts: Snapshot, kernels: Iterable[Kernel]) -> list[Gap]:
    """Timings and test results that kernels lack, as they are now, where they claim to run.

    Needed are a timing and a test result that are "ok", and no timing that was wrong or crashed, on
    each architecture that is not `compile_only` or `unmeasured` with a reason; where it is said in
    `registry/unmeasured.py`, a test result only, and neither of a kernel or an op that is new. A
    kernel for any architecture claims those of all GPUs in the facts.
    """
    rows = _Rows(facts)
    return [
        Gap(kernel.name, architecture, table, verdict.why)
        for kernel in kernels
        for architecture in sorted(rows.claimed_by(kernel))
        if not (kernel.compile_only.get(architecture) or kernel.unmeasured.get(architecture))
        for table, verdict in (
            ("timing", rows.timed(kernel, architecture)),
            ("test_result", rows.tested(kernel, architecture)),
        )
        if verdict.state != "ok" and not _is_excused(kernel, architecture, table, verdict)
    ]


def _is_excused(kernel: Kernel, architecture: str, table: str, verdict: _Verdict) -> bool:
    if verdict.state != "none":  # stale, wrong or crashed
        return False
    untimed = table == "timing" and (kernel.name, architecture) in UNMEASURED
    is_new = (kernel.name, architecture) in NEW_KERNELS or (kernel.op, architecture) in NEW_OPS
    return untimed or is_new


def coverage_of(facts: Snapshot, kernels: Iterable[Kernel]) -> list[Coverage]:
    """What is known of kernels on each architecture that they claim or were measured on."""
    rows = _Rows(facts)
    found = []
    for kernel in kernels:
        architectures = rows.claimed_by(kernel)
        if "any" in kernel.architectures:
            architectures |= rows.measured_on(kernel.name)
        for architecture in sorted(architectures) or ["any"]:
            found.append(Coverage(kernel.name, architecture, *rows.state_of(kernel, architecture)))
    return found


class _Rows:
    """The rows of a snapshot by kernel name and architecture."""

    def __init__(self, facts: Snapshot) -> None:
        self._times: dict[tuple[str, str], list[tuple[str, Device, str, str, str]]] = {}
        self._tests: dict[tuple[str, str], list[TestResultCell]] = {}
        for name, digest, device, status, reason, tier in sorted(facts.timing_outcomes(), key=str):
            row = (digest, device, status, reason, tier)
            self._times.setdefault((name, device.architecture), []).append(row)
        for cell in facts.test_results:  # the last of a suite is the newest
            self._tests.setdefault((cell.kernel.name, cell.architecture), []).append(cell)
        self._current = {row.digest for row in facts.kernels if is_current(row)}
        self._gpus = {device.architecture for device in facts.devices if device.is_gpu}

    def claimed_by(self, kernel: Kernel) -> set[str]:
        return set(self._gpus if "any" in kernel.architectures else kernel.architectures)

    def measured_on(self, name: str) -> set[str]:
        return {architecture for known, architecture in self._times if known == name}

    def _is_of(self, kernel: Kernel, digest: str) -> bool:
        """Whether a digest is the kernel's; of a library that is not here, with any version."""
        return digest == kernel.digest or bool(kernel.libraries and digest in self._current)

    def timed(self, kernel: Kernel, architecture: str) -> _Verdict:
        rows = self._times.get((kernel.name, architecture), [])
        known = [row for row in rows if self._is_of(kernel, row[0])]
        present = [row for row in known if not row[-1]]  # hearsay is no evidence
        for _, device, status, reason, _ in present:
            if status in BROKEN:  # whatever it does elsewhere, or did at another time
                return _Verdict("failed", f"{status} on {device.product}: {reason}")
        good = sorted({device.product for _, device, status, *_ in present if status == "ok"})
        if good:
            others = sorted({status for _, _, status, *_ in present} - {"ok"})
            return _Verdict("ok", "; ".join([", ".join(good), *(f"also {s}" for s in others)]))
        if present:
            _, device, status, reason, _ = present[0]
            return _Verdict("failed", f"no time on {device.product}: {status}: {reason}")
        products = ", ".join(sorted({device.product for _, device, *_ in known or rows}))
        if known:
            return _Verdict("none", f"timed on {products} by others, and not verified")
        if rows:
            library = ", or its library did" if kernel.libraries else ""
            return _Verdict("stale", f"changed since it was timed on {products}{library}")
        return _Verdict("none", "never timed")

    def tested(self, kernel: Kernel, architecture: str) -> _Verdict:
        cells = self._tests.get((kernel.name, architecture), [])
        newest = {cell.suite: cell for cell in cells if self._is_of(kernel, cell.kernel.digest)}
        for cell in newest.values():
            if cell.status == "failed":
                return _Verdict("failed", f"{cell.failed_count} tests failed: {cell.reason}")
        passed = sum(cell.passed_count for cell in newest.values())
        if passed:
            return _Verdict("ok", f"{passed} tests passed")
        for cell in newest.values():
            return _Verdict("none", f"no test ran: {cell.reason}")
        if cells:
            return _Verdict("stale", "changed since it was tested")
        return _Verdict("none", "never tested")

    def state_of(self, kernel: Kernel, architecture: str) -> tuple[str, str]:
        """The state and why; what was seen counts before what was declared."""
        timed, tested = self.timed(kernel, architecture), self.tested(kernel, architecture)
        if tested.state == "failed":
            return "failed", tested.why
        if timed.state == "ok":
            is_gpu = architecture in self._gpus  # tests on a CPU leave no rows
            return "measured", f"{timed.why}; {tested.why}" if is_gpu else timed.why
        if timed.state == "failed":
            return "failed", timed.why
        if kernel.compile_only.get(architecture):
            return "compile_only", kernel.compile_only[architecture]
        declared = kernel.unmeasured.get(architecture)
        declared = declared or UNMEASURED.get((kernel.name, architecture))
        declared = declared or NEW_KERNELS.get((kernel.name, architecture))
        declared = declared or NEW_OPS.get((kernel.op, architecture))
        if declared:
            return "unmeasured", declared
        return "stale" if timed.state == "stale" else "unmeasured", timed.why
