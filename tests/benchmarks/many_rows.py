"""Databases of any size, and what importing one costs, or the first dispatch with one.

python -m tests.benchmarks.many_rows write FILE 1000000
python -m tests.benchmarks.many_rows dispatch FILE
python -m tests.benchmarks.many_rows import FILE TARGET
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.schema.tables import (
    ACCURACY_METRICS,
    COLUMNS,
    REFERENCES,
    TABLES,
    TIMING_METRICS,
)
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS
from lokakern.registry.storage.writer import write_tables
from lokakern.sweep.resume import distribution_row
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Environment,
    Format,
    Layout,
    Operand,
    Problem,
)

NOW = 1_700_000_000_000
KERNELS, DISTRIBUTIONS = 40, REALISTIC_DISTRIBUTIONS[:10]
DEVICE = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)  # as the shipped file has it
CHOSEN = {
    "regime": "graph-cold", "architecture": "sm_90", "status": "ok", "reason": "",
    "timer": "device events around a graph", "clock_mhz": 1980.0, "rows": 2048,
}  # fmt: skip


def dimensions(
    problems: int, run: str, kernels: Sequence[KernelRow] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Rows that facts refer to."""
    a, b = Operand(Format.BFLOAT16), Operand(Format.BFLOAT16, layout=Layout.COLUMN)
    kernels = kernels or [
        KernelRow(f"cuda.gemm_{i}", "gemm", "cuda", ("cuda/gemm",), f"{i:064x}", "promoted",
                  "row", "row")
        for i in range(KERNELS)
    ]  # fmt: skip
    started: dict[str, Any] = {"key": run, "started_utc_ms": NOW, "harness_digest": "unknown"}
    found: dict[str, list[dict[str, Any]]] = {
        "device": [row_keys.row_of(DEVICE)],
        "environment": [row_keys.row_of(Environment())],
        "kernel": [row_keys.row_of(kernel) for kernel in kernels],
        "problem": [
            row_keys.row_of(Problem(op="gemm", m=2 ** (i % 12), n=64 + i // 12, k=512, a=a, b=b))
            for i in range(problems)
        ],
        "distribution": [row_keys.row_of(distribution_row(name)) for name in DISTRIBUTIONS],
        "run": [{**started, "suite": "synthetic", "command": "none", "grade": "full"}],
    }
    return {name: sorted(rows, key=lambda row: str(row["key"])) for name, rows in found.items()}


def write_many(
    path: Path, count: int, run: str = "a" * 32, kernels: Sequence[KernelRow] = ()
) -> None:
    """Write so many facts, two in five of them times and the others errors.

    They are of `KERNELS` kernels: of these, or of such as are nowhere.
    """
    times = count * 2 // 5
    problems = count // (KERNELS * len(DISTRIBUTIONS)) + 1
    known = dimensions(problems, run, kernels)

    def tables() -> Iterator[tuple[str, Any]]:
        for name in TABLES:
            if name in DIMENSIONS:
                yield (
                    name,
                    [
                        (i, bytes.fromhex(row["key"]), *(row[c] for c in COLUMNS[name][1:]))
                        for i, row in enumerate(known[name], start=1)
                    ],
                )
            else:
                size = {"timing": times, "accuracy": count - times}.get(name, 0)
                yield name, facts(name, size, known)

    write_tables(path, tables())


def facts(
    name: str, count: int, known: dict[str, list[dict[str, Any]]]
) -> Iterator[tuple[Any, ...]]:
    """Rows as they lie in a file, by key."""
    places = [place_of(i) for i in range(count)]
    columns: dict[str, list[Any]] = {
        table: [known[table][place.get(table, 0)]["key"] for place in places]
        for table in REFERENCES[name].values()
    }
    for column in row_keys.FACT_IDENTITY[name]:
        if column not in columns:
            columns[column] = [place.get(column, CHOSEN.get(column)) for place in places]
    keys = row_keys.fact_keys(name, columns)
    for i in sorted(range(count), key=keys.__getitem__):
        row: dict[str, Any] = {**CHOSEN, **{table: places[i].get(table, 0) + 1
                               for table in REFERENCES[name].values()}}  # fmt: skip
        row |= {metric: 0.04 + i % 1009 * 1e-6 for metric in ACCURACY_METRICS}
        row |= {metric: 10 + i % 997 for metric in TIMING_METRICS if "count" in metric}
        row |= {"nonfinite_count": 0, "nonfinite_unexpected_count": 0, "calls_per_replay": 10}
        row |= {f"latency_us_p{p}": 10.0 + i % 10007 / 7 + p for p in (20, 50, 80)}
        row |= {"seed": places[i]["seed"], "measured_utc_ms": NOW + i,
                "operand_digest": f"{i:016x}", "key": bytes.fromhex(keys[i])}  # fmt: skip
        yield tuple(row[column] for column in COLUMNS[name])


def place_of(i: int) -> dict[str, int]:
    """Kernel, distribution, problem and seed of the fact with number i; no two facts share them."""
    i, kernel = divmod(i, KERNELS)
    i, distribution = divmod(i, len(DISTRIBUTIONS))
    return {"kernel": kernel, "distribution": distribution, "problem": i, "seed": 0}


def import_many(path: Path, target: Path) -> dict[str, float]:
    """Import a file.

    Returns:
        Rows added, seconds, and the peak of this process's memory, MiB.
    """
    from lokakern.registry.sharing.import_file import import_file

    start = time.perf_counter()
    report = import_file(path, target, trusted=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    added = sum(report.added[name] for name in FACTS)
    return {"rows": added, "seconds": seconds, "peak_mib": peak}


_FIRST_DISPATCH = """
import json, resource, time
import lokakern
start, cpu = time.perf_counter(), time.process_time()
choice = lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device="NVIDIA H200")
assert not choice.is_miss
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "cpu_seconds": time.process_time() - cpu,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def first_dispatch(path: Path) -> dict[str, float]:
    """Measure the first dispatch of a new process, with the shipped files and a user's database.

    Returns:
        Seconds and CPU seconds after `import lokakern`, and the peak of its memory, MiB, of which
        importing torch takes 300.
    """
    process = subprocess.run(
        [sys.executable, "-c", _FIRST_DISPATCH],
        env={**os.environ, "LOKAKERN_DB": str(path)}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(process.stdout)
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path, count]:
            write_many(Path(path), int(count))
        case ["dispatch", path]:
            print(first_dispatch(Path(path)))
        case ["import", path, target]:
            print(import_many(Path(path), Path(target)))
        case _:
            sys.exit(__doc__)
