"""Cells: one measurement each, with the rows that it refers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.types import Problem


@dataclass(frozen=True, slots=True)
class TimingCell:
    """One timing. Metrics are NaN where the status is not "ok" and nothing was measured.

    ``environment`` and ``run`` are keys, ``started_utc_ms`` is when the run began; ``tier`` is
    the tier of a quarantined row (`registry.quarantine.Tier`), "" of a trusted one.
    """

    kernel: KernelRow
    problem: Problem
    distribution: str
    environment: str
    grade: str
    status: str
    reason: str
    latency_us_p20: float
    latency_us_p50: float
    latency_us_p80: float
    replay_count: int
    kernel_err: float
    run: str
    started_utc_ms: int
    measured_utc_ms: int
    tier: str = ""

    @property
    def m(self) -> int:
        """Rows of a."""
        return self.problem.m


@dataclass(frozen=True, slots=True)
class AccuracyCell:
    """One accuracy: the upper limits a budget is compared with, NaN where nothing was measured.

    ``environment`` and ``run`` are keys; ``parameters`` are the distribution's, canonical JSON;
    ``tier`` is as in `TimingCell`.
    """

    kernel: KernelRow
    distribution: str
    parameters: str
    realistic: bool
    environment: str
    grade: str
    seed: int
    status: str
    reason: str
    row_err_upper: float
    row_p99_upper: float
    rel_err_upper: float
    mean_rel_err_upper: float
    mean_shift_upper: float
    kernel_err: float
    run: str
    started_utc_ms: int
    measured_utc_ms: int
    tier: str = ""


class TimingHead(NamedTuple):
    """What a timing is of, without what was measured: a tenth of the time of a cell.

    ``problem`` and ``environment`` are keys; ``tier`` is as in `TimingCell`.
    """

    kernel: KernelRow
    problem: str
    environment: str
    grade: str
    measured_utc_ms: int
    tier: str


class AccuracyHead(NamedTuple):
    """What an accuracy is of, how it ended, and the limits of a report, None if it failed.

    ``problem``, ``environment`` and ``tier`` are as in `TimingHead`.
    """

    kernel: KernelRow
    problem: str
    environment: str
    grade: str
    measured_utc_ms: int
    tier: str
    distribution: DistributionRow
    seed: int
    status: str
    row_err_upper: float
    row_p99_upper: float
    mean_rel_err_upper: float
    mean_shift_upper: float


@dataclass(frozen=True, slots=True)
class HostCostCell:
    """How long the host takes for a call, in us.

    ``torch`` is a version; ``tier`` is as in `TimingCell`. The other fields are those of
    `lokakern.registry.schema.records.HostCostRecord`.
    """

    cpu: str
    torch: str
    regime: str
    call: str
    language: str
    path: str
    host_us_p20: float
    host_us_p50: float
    host_us_p80: float
    round_count: int
    run: str
    started_utc_ms: int
    tier: str = ""


@dataclass(frozen=True, slots=True)
class TestResultCell:
    """How the tests of one module (`suite`) ended for a kernel on GPUs of an architecture.

    ``status`` is "ok", "failed", or "nothing" where no test ran; ``environment`` and ``run`` are
    keys.
    """

    __test__: ClassVar[bool] = False  # pytest takes every other class of such a name for tests

    kernel: KernelRow
    architecture: str
    suite: str
    environment: str
    seeds: str
    passed_count: int
    failed_count: int
    skipped_count: int
    status: str
    reason: str
    run: str
    started_utc_ms: int
    measured_utc_ms: int
