"""Two processes with a gloo process group, whose results are JSON.

python -m tests.support.two_ranks RANK FOLDER
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.sharing import made_once, shared_folder

# All run in one pair of processes: a process takes longer to begin than most of them.
MODULES = (
    "tests.nn.test_tensor_parallel",
    "tests.distributed.test_ddp_compression",
    "tests.conversion.test_main_grads",
    "tests.conversion.test_delayed_scaling",
)


def results_of_two_ranks(module: str) -> list[Any]:
    """What ``one_of_two_ranks(rank)`` of one of `MODULES` returns on each rank."""
    made = made_once(shared_folder("two_ranks") / "results.json", _run_modules)
    return [found[module] for found in json.loads(made.read_text())]


def _run_modules(to: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=to.parent))  # the store of a run that failed stays apart
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.two_ranks", str(rank), str(folder)],
            stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]  # fmt: skip
    for worker in workers:
        _, errors = worker.communicate(timeout=1800)
        assert worker.returncode == 0, errors
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    to.write_text(json.dumps(found))


def main(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = {name: importlib.import_module(name).one_of_two_ranks(rank) for name in MODULES}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
