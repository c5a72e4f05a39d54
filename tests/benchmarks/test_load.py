"""Host time of reading and merging databases."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import DistributionRow, KernelRow
from lokakern.registry.schema.row_keys import family_key
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.merge import merge
from lokakern.registry.storage.reader import Rows
from lokakern.registry.storage.writer import write_file
from lokakern.types import Environment, Format, Layout, Operand, Problem
from tests.benchmarks.many_rows import DEVICE, first_dispatch


def many_rows(count: int) -> Rows:
    """This many timings: 20 kernels at 12 sizes of m, for as many weights as needed."""
    a = Operand(Format.BFLOAT16)
    b = Operand(Format.BFLOAT16, layout=Layout.COLUMN)
    kernels = [
        row_keys.row_of(
            KernelRow(f"cuda.gemm_{i}", "gemm", "cuda", ("cuda/gemm",), f"{i:064x}", "promoted",
                      "row", "row")
        )
        for i in range(20)
    ]  # fmt: skip
    problems = [
        row_keys.row_of(Problem(op="gemm", m=2**j, n=64 * (i + 1), k=1024, a=a, b=b))
        for i in range(-(-count // 240))
        for j in range(12)
    ]
    device = row_keys.row_of(DEVICE)
    environment = row_keys.row_of(Environment())
    distribution = row_keys.row_of(DistributionRow("X1"))
    run: dict[str, Any] = {
        "key": "a" * 32,
        "started_utc_ms": 1_700_000_000_000,
        "harness_digest": "unknown",
        "suite": "synthetic",
        "command": "none",
        "grade": "full",
    }
    timings = []
    for i in range(count):
        row: dict[str, Any] = {
            "run": run["key"],
            "kernel": kernels[i % 20]["key"],
            "problem": problems[i // 20]["key"],
            "distribution": distribution["key"],
            "device": device["key"],
            "environment": environment["key"],
            "regime": "graph-cold",
            "status": "ok",
            "reason": "",
            "latency_us_p20": 10 + i / 7,
            "latency_us_p50": 11 + i / 7,
            "latency_us_p80": 12 + i / 7,
            "replay_count": 100,
            "void_count": 0,
            "calls_per_replay": 10,
            "clock_mhz": 1980.0,
            "kernel_err": 0.25,
            "kernel_err_row_p99": 0.125,
            "timer": "cuda-event",
            "operand_digest": hashlib.sha256(str(i // 20).encode()).hexdigest(),
            "measured_utc_ms": 1_700_000_000_000 + i,
        }
        timings.append({"key": row_keys.row_key("timing", row), **row})
    found: dict[str, list[Any]] = {
        "device": [device],
        "environment": [environment],
        "kernel": kernels,
        "problem": problems,
        "distribution": [distribution],
        "run": [run],
        "timing": timings,
        "accuracy": [],
    }
    return {
        name: [tuple(row[column] for column in COLUMNS[name]) for row in rows]
        for name, rows in found.items()
    }


COUNTS = [pytest.param(1_000, id="1k"), pytest.param(100_000, id="100k", marks=pytest.mark.rest)]


@pytest.fixture(scope="module", params=COUNTS)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of so many timings."""
    path = tmp_path_factory.mktemp("load") / "lokakern.sqlite"
    write_file(path, many_rows(request.param))
    return path


def test_loading_a_snapshot(database: Path, benchmark: Any) -> None:
    """Load a file into rows in memory."""
    snapshot = benchmark(load_snapshot, [database])
    assert snapshot.devices == [DEVICE]


def test_first_question_to_a_snapshot(database: Path, benchmark: Any) -> None:
    """Loading, the index, and the cells of one family of problems."""
    a, b = Operand(Format.BFLOAT16), Operand(Format.BFLOAT16, layout=Layout.COLUMN)
    family = family_key(Problem(op="gemm", m=1, n=64, k=1024, a=a, b=b))

    def ask() -> int:
        return len(load_snapshot([database]).timing_cells(DEVICE, family, "graph-cold"))

    assert benchmark(ask) == 240


def test_digest_of_a_snapshot(database: Path, benchmark: Any) -> None:
    """Ranks compare this digest once at start."""
    rows = load_snapshot([database])

    def digest() -> str:
        rows.__dict__.pop("digest", None)
        return rows.digest

    assert len(benchmark(digest)) == 64


@pytest.mark.rest
def test_merging_a_file_into_another(database: Path, tmp_path: Path, benchmark: Any) -> None:
    """Reading, checking every key, writing, renaming."""

    def merge_into_nothing() -> int:
        (tmp_path / "target.sqlite").unlink(missing_ok=True)
        return merge([database], tmp_path / "target.sqlite").added["timing"]

    assert benchmark.pedantic(merge_into_nothing, rounds=2) >= 1_000


@pytest.mark.rest
def test_first_dispatch_of_a_new_process(database: Path, benchmark: Any) -> None:
    """Time beyond `import lokakern`: files, kernels, their digests, one table."""
    found = benchmark.pedantic(first_dispatch, [database], rounds=2)
    benchmark.extra_info.update(found)
    assert found["seconds"] > 0
