"""Measurements made by hand: a database of chosen times and errors, and dispatch on it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from lokakern.numerics import Errors
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, KernelRow, TimingRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.run_files import RunFile
from lokakern.selection import dispatcher
from lokakern.sweep.resume import distribution_row
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Environment,
    Format,
    Problem,
)
from tests.support.rows_at_once import RowsAtOnce

load_kernels()

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
ENVIRONMENT = Environment(
    driver="580", toolkit="13.0", torch="2.11.0", triton="3.6.0", power_cap_w="700"
)
BF16 = "torch.bf16"
ROW = "cuda.quantize_row+torch.scaled_mm_row"
TENSOR = "cuda.quantize_tensor+torch.scaled_mm_tensor"


def errors(row_err: float) -> Errors:
    return Errors(
        row_err=row_err * 0.99, row_err_upper=row_err, row_p50=row_err, row_p99=row_err * 1.1,
        row_p99_upper=row_err * 1.2, row_max=row_err * 2, rel_err=row_err * 0.99,
        rel_err_upper=row_err, sqnr_db=-20 * math.log10(row_err), mean_rel_err=row_err * 5,
        mean_rel_err_upper=row_err * 6, mean_rel_err_excluded_share=0.0, mean_shift=0.0,
        mean_shift_upper=1e-4, nonfinite_count=0, nonfinite_unexpected_count=0,
    )  # fmt: skip


class Book:
    """Writes rows into a database and answers from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.grade = "full"

    def write(self, *rows: Any) -> Book:
        run = RowsAtOnce.create(
            self.path, suite="test", command="test", harness_digest="0" * 64, grade=self.grade
        )
        with run:
            for row in rows:
                row(run)
        self.use()
        return self

    def use(self) -> None:
        dispatcher.use_snapshot(load_snapshot([self.path]))


def kernel_row(name: str, digest: str | None = None) -> KernelRow:
    row = KernelRow.of(KERNELS[name])
    return row if digest is None else replace(row, digest=digest)


def time(
    name: str, problem: Problem, us: float, *, spread: float = 0.001, status: str = "ok",
    digest: str | None = None, count: int = 50, environment: Environment = ENVIRONMENT,
    device: Device = H200, **of_kernel: str,
) -> Any:  # fmt: skip
    def write(run: RunFile) -> None:
        metrics: dict[str, Any] = {
            "latency_us_p20": us * (1 - spread), "latency_us_p50": us,
            "latency_us_p80": us * (1 + spread), "replay_count": count, "void_count": 0,
            "calls_per_replay": 10, "clock_mhz": 1980.0, "kernel_err": 0.5,
            "kernel_err_row_p99": 0.4, "timer": "test",
        }  # fmt: skip
        record = TimingRecord(status=status, reason="" if status == "ok" else "made up", **metrics)
        kernel = replace(kernel_row(name, digest), **of_kernel)
        run.add_timing(kernel, problem, distribution_row("X1"), device,
                       environment, "graph-cold", record)  # fmt: skip

    return write


def accuracy(
    name: str, problem: Problem, row_err: float, *, only: tuple[str, ...] | None = None,
    without: tuple[str, ...] = (), seeds: tuple[int, ...] = (0, 1, 2), status: str = "ok",
    digest: str | None = None,
) -> Any:  # fmt: skip
    def write(run: RunFile) -> None:
        asked = accuracy_problem(problem, Format.E4M3FN)
        for distribution in only or REALISTIC_DISTRIBUTIONS:
            if distribution in without:
                continue
            for seed in seeds:
                record = AccuracyRecord(
                    status=status, reason="" if status == "ok" else "made up", seed=seed,
                    rows=asked.m, errors=errors(row_err), kernel_err=0.5, kernel_err_row_p99=0.4,
                    flushed_share=0.0, saturated_share=0.0,
                )  # fmt: skip
                run.add_accuracy(kernel_row(name, digest), asked, distribution_row(distribution),
                                 "sm_90", ENVIRONMENT, record)  # fmt: skip

    return write


def gemm(m: int, n: int = 512, k: int = 512, **fields: Any) -> Problem:
    return make_problem("gemm", (m, n, k), **fields)


def measured(
    *, bf16: float = 20.0, row: float = 10.0, m: int = 4096, row_err: float = 0.04,
    times: dict[str, Any] | None = None, errors: dict[str, Any] | None = None, **fields: Any,
) -> list[Any]:  # fmt: skip
    """Times and errors of two kernels, with other options for the rows of ROW."""
    problem = gemm(m, **fields)
    return [
        time(BF16, problem, bf16), accuracy(BF16, problem, 0.003),
        time(ROW, problem, row, **times or {}), accuracy(ROW, problem, row_err, **errors or {}),
    ]  # fmt: skip
