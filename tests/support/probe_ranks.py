"""A small model that is trained, and processes that train it as two ranks.

    python -m tests.support.probe_ranks FOLDER

Processes import for longer than they run, so that one imports and forks into two, before anything
has threads; and all kinds of ranks are one run.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lokakern.probe import files
from lokakern.probe.session import Probe

M, K, HIDDEN, N = 64, 12, 20, 8


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(K, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, N, bias=False)
    )


def inputs(step: int) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(step)) + 1.0


def train(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    steps: int,
    rate: float = 0.0,
    first: int = 0,
    given: Callable[[int], Tensor] | None = None,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(first, first + steps):
        loss = call((given or inputs)(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


KINDS = ("ddp", "fsdp2")


def run_rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    half = slice(rank * M // 2, (rank + 1) * M // 2)
    for kind in KINDS:
        model = model_of()
        called: nn.Module = model
        if kind == "ddp":
            called = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with Probe(called, every=2) as probe:
            train(called, lambda x, called=called: called(x[half]), 5)
        if kind == "ddp" and rank == 1:
            probe.sites()["0"].see_half(torch.float16)
        sites = probe.merged_sites()
        if rank == 0:
            files.save(f"{folder}/{kind}", sites)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str) -> int:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
