"""Host time of a command in a process of its own, as a ratio to importing torch.

Machines differ by a factor of two, and torch takes 1.6 to 3 s on them: `x torch` of the JSON
(``make bench ARGS=--benchmark-json=FILE``) counts, and in the table the order of magnitude.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("-c", "import torch")  # the first, by which the others are divided
BENCH = ("-m", "lokakern.bench")
PROCESSES = {
    "import torch": TORCH,
    "version": (*BENCH, "--version"),
    "help": (*BENCH, "--help"),
    "help of model": (*BENCH, "model", "--help"),  # the most options
    "first explain": (*BENCH, "explain", "--device", "NVIDIA H200"),
    "list device": (*BENCH, "list", "device", "--device", "NVIDIA H200"),
}
MEDIANS: dict[str, float] = {}


@pytest.mark.rest
@pytest.mark.benchmark(group="start")
@pytest.mark.parametrize("name", PROCESSES)
def test_start_of_a_process(name: str, tmp_path: Path, benchmark: Any) -> None:
    environment = {**os.environ, "LOKAKERN_DB": str(tmp_path / "none.sqlite")}

    def run() -> int:
        return subprocess.run(
            [sys.executable, *PROCESSES[name]], cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip

    assert benchmark.pedantic(run, warmup_rounds=1, rounds=5) == 0  # the first compiles Python
    if benchmark.stats is not None:
        MEDIANS[name] = benchmark.stats.stats.median
        if "import torch" in MEDIANS:
            benchmark.extra_info["x torch"] = MEDIANS[name] / MEDIANS["import torch"]
