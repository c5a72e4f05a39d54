"""A small model that is trained, and a process that trains a shard of it as one of two ranks.

    python -m tests.probe_ranks RANK FOLDER

Processes import for longer than they run: little is imported, and all kinds of ranks are one run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

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
    model: nn.Module, call: Callable[[Tensor], Tensor], steps: int, rate: float = 0.0
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        loss = call(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


KINDS = ("ddp", "fsdp2")


def main(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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
        sites = probe.merged_sites()
        if rank == 0:
            files.save(f"{folder}/{kind}", sites)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
