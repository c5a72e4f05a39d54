"""Two processes with a gloo process group, whose results are JSON.

python -m tests.support.two_ranks MODULE RANK FOLDER
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def results_of_two_ranks(module: str, folder: Path) -> list[Any]:
    """What ``one_of_two_ranks(rank)`` of a module returns on each rank."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.two_ranks", module, str(rank), str(folder)],
            stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]  # fmt: skip
    for worker in workers:
        _, errors = worker.communicate(timeout=1800)
        assert worker.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def main(module: str, rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = importlib.import_module(module).one_of_two_ranks(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
