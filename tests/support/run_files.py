"""Run files and rows made by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sqlite3
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lokakern.numerics import Errors
from lokakern.registry.schema import row_keys, tables
from lokakern.registry.schema.records import (
    AccuracyRecord,
    DistributionRow,
    HostCostRecord,
    KernelRow,
    TestResultRecord,
    TimingRecord,
)
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.storage.reader import Rows, read_rows, rows_digest
from lokakern.registry.storage.run_files import RunFile
from lokakern.registry.storage.writer import write_file
from lokakern.types import Device, Environment, Format, Layout, Operand, Problem

FIXTURES = {
    version: Path(__file__).parents[1] / "fixtures" / f"schema_v{version}.sqlite"
    for version in (1, 2, 3, 4)
}
DEVICE = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
ENVIRONMENT = Environment(driver="570.1", torch="2.9.0", power_cap_w="700")
KERNEL = KernelRow(
    "cuda.gemm_row", "gemm", "cuda", ("cuda/a", "cuda/b"), "d" * 64, "promoted", "row", "row"
)
X1 = DistributionRow.of("X1", {"scale": 1.0})
A = Operand(Format.BFLOAT16)
B = Operand(Format.BFLOAT16, layout=Layout.COLUMN, alignment=8)
PROBLEM = Problem(op="gemm", m=4096, n=512, k=1024, a=A, b=B)
OK = TimingRecord(
    status="ok",
    latency_us_p20=10.0,
    latency_us_p50=11.0,
    latency_us_p80=12.5,
    replay_count=100,
    void_count=1,
    calls_per_replay=10,
    clock_mhz=1980.0,
    kernel_err=0.25,
    kernel_err_row_p99=0.125,
    timer="cuda-event",
    operand_digest="0" * 16,
    measured_utc_ms=1_700_000_000_000,
)
_VALUES: dict[str, Any] = {field.name: 0.04 for field in dataclasses.fields(Errors)}
ERRORS = Errors(**_VALUES | {"nonfinite_count": 3, "nonfinite_unexpected_count": 3})
ACCURATE = AccuracyRecord(
    status="ok",
    seed=1,
    rows=2048,
    errors=dataclasses.replace(ERRORS, sqnr_db=math.inf),
    kernel_err=0.5,
    kernel_err_row_p99=0.25,
    flushed_share=0.0,
    saturated_share=1.0,
    measured_utc_ms=1_700_000_000_001,
)
TESTED = TestResultRecord(
    seeds="0,7",
    passed_count=40,
    failed_count=0,
    skipped_count=2,
    measured_utc_ms=1_700_000_000_002,
)


HOST_COST = HostCostRecord(
    cpu="AMD EPYC 9654 96-Core Processor",
    regime="eager",
    call="bf16",
    language="torch",
    path="torch",
    host_us_p20=12.0,
    host_us_p50=12.5,
    host_us_p80=13.25,
    round_count=40,
    calls_per_round=20,
    measured_utc_ms=1_700_000_000_003,
)


def content_digest(facts: Snapshot) -> str:
    """`database_digest` of a file of all rows of a snapshot."""
    return rows_digest(facts._facts.as_rows())


def begin(database: Path | str, **changes: Any) -> RunFile:
    given = {"suite": "lrm", "command": "pytest", "harness_digest": "h"} | changes
    return RunFile.create(database, **given)


def add(run: RunFile, record: TimingRecord = OK, **changes: Any) -> str:
    given: dict[str, Any] = {
        "kernel": KERNEL,
        "problem": PROBLEM,
        "distribution": X1,
        "device": DEVICE,
        "environment": ENVIRONMENT,
        "regime": "graph-cold",
    }
    return run.add_timing(**(given | changes), record=record)


def small_rows() -> Rows:
    """The content of the files in tests/fixtures, the same every time it is made.

    Files of versions before a table was added have none of its rows.

    To make the file of a new schema version:

        PYTHONPATH=. python -c "from tests.support.run_files import write_fixture; \\
            write_fixture('tests/fixtures/schema_vN.sqlite')"

    and leave the files of older versions as they are: each must stay readable.
    """
    devices = [DEVICE, Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192, "SPX")]
    kernels = [KERNEL, KernelRow("torch.bf16", "gemm", "torch", (), "e" * 64, "none", "none",
                                 "none")]  # fmt: skip
    problems = [PROBLEM, dataclasses.replace(PROBLEM, m=1, prepared=True, out_strided=True)]
    run = {"key": "0" * 31 + "1", "started_utc_ms": 1_700_000_000_000, "harness_digest": "h"}
    run |= {"suite": "lrm", "command": "pytest", "grade": "quick"}
    dimensions: dict[str, list[Any]] = {
        "device": [row_keys.row_of(device) for device in devices],
        "environment": [row_keys.row_of(ENVIRONMENT)],
        "kernel": [row_keys.row_of(kernel) for kernel in kernels],
        "problem": [row_keys.row_of(problem) for problem in problems],
        "distribution": [row_keys.row_of(X1)],
        "run": [run],
    }
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in tables.FACTS}
    for i, parts in enumerate(itertools.product(*dimensions.values())):
        row = {name: part["key"] for name, part in zip(dimensions, parts, strict=True)}
        record: Any = OK if i else TimingRecord(status="timeout", reason="60 s", measured_utc_ms=1)
        row |= {"regime": "graph-cold", **dataclasses.asdict(record)}
        facts["timing"].append({"key": row_keys.row_key("timing", row), **row})
        measured = dataclasses.asdict(ACCURATE)
        row = {**row, **measured, **measured["errors"], "architecture": f"sm_{i}", "seed": i}
        facts["accuracy"].append({"key": row_keys.row_key("accuracy", row), **row})
    for i, kernel in enumerate(dimensions["kernel"]):
        failed = dataclasses.replace(TESTED, failed_count=i, reason="1 > 0.5" if i else "")
        row = {"run": run["key"], "kernel": kernel["key"], "suite": "tests/test_kernels.py"}
        row |= {"architecture": "sm_90", "environment": dimensions["environment"][0]["key"]}
        row |= {**dataclasses.asdict(failed), "status": failed.status}
        facts["test_result"].append({"key": row_keys.row_key("test_result", row), **row})
    row = {name: dimensions[name][0]["key"] for name in ("run", "device", "environment")}
    row |= dataclasses.asdict(HOST_COST)
    facts["host_cost"].append({"key": row_keys.row_key("host_cost", row), **row})
    return {
        name: [tuple(row[column] for column in tables.COLUMNS[name]) for row in rows]
        for name, rows in {**dimensions, **facts}.items()
    }


def write_fixture(path: str | Path) -> None:
    write_file(Path(path), small_rows())


def rows_as_dicts(database: Path | str, name: str) -> list[dict[str, Any]]:
    found = read_rows(database)[name]
    return [dict(zip(tables.COLUMNS[name], row, strict=True)) for row in found]


def rows_of(choices: list[tuple[int, int, int]]) -> Rows:
    """A small database: for each choice a run, a problem and a timing that refers to them."""
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in tables.TABLES}

    def keep(name: str, row: dict[str, Any]) -> str:
        rows[name][row["key"]] = row
        return str(row["key"])

    for run, m, kernel in choices:
        started = {"key": f"{run:032x}", "started_utc_ms": run + 1, "harness_digest": "h"}
        state = dataclasses.replace(KERNEL, digest=f"{kernel:064x}")
        row: dict[str, Any] = {
            "run": keep("run", {**started, "suite": "s", "command": "c", "grade": "full"}),
            "kernel": keep("kernel", row_keys.row_of(state)),
            "problem": keep("problem", row_keys.row_of(dataclasses.replace(PROBLEM, m=m))),
            "distribution": keep("distribution", row_keys.row_of(X1)),
            "device": keep("device", row_keys.row_of(DEVICE)),
            "environment": keep("environment", row_keys.row_of(ENVIRONMENT)),
            "regime": "graph-cold",
            **dataclasses.asdict(OK),
            "latency_us_p80": 12.5 + run + m / 3,
        }
        keep("timing", {"key": row_keys.row_key("timing", row), **row})
    return {
        name: [tuple(row[column] for column in tables.COLUMNS[name]) for row in found.values()]
        for name, found in rows.items()
    }


CHOICES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 2)), max_size=8)


def edited(rows: Rows, name: str, **changes: Any) -> Rows:
    places = [tables.COLUMNS[name].index(column) for column in changes]
    first = list(rows[name][0])
    for place, value in zip(places, changes.values(), strict=True):
        first[place] = value
    return {**rows, name: [tuple(first), *rows[name][1:]]}


def changed(path: Path, *statements: str) -> Path:
    write_fixture(path)
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path
