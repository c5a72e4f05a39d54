"""Measure the time saved by FP8 gradients and weights between GPUs, and the change of losses.

    torchrun --nproc-per-node 2 scripts/measure_communication.py [average] [ddp] [fsdp]

Prints a line of JSON for each. `average` is of flat gradients alone, `ddp` trains with each wire of
`lokakern.distributed.ddp_compression`, `fsdp` with weights gathered in bfloat16 and as FP8. Without
GPUs it runs over gloo, in emulation: then times say nothing, and losses do. Layers are ``width`` by
``width`` with a LayerNorm and ReLU; every rank has samples of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lokakern.conversion.convert import convert
from lokakern.distributed.ddp_compression import Compression, compress
from lokakern.distributed.fsdp2_gather import Gathering
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import route_text
from lokakern.types import Granularity

WARM_STEPS = 5
KERNEL = "cuda.quantize_tensor+cuda.scaled_gemm_tensor"  # what reads weights under one scale
ONE_SCALE = route_text(Granularity.TENSOR, [(0, ""), (16, KERNEL)], [(0, "")])


class Ranks:
    """The rank of this process and its device.

    Attributes:
        rank: Index of the process.
        device: Device of the process.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Milliseconds of a call between two waits, the ranks beginning together; its result."""
        dist.barrier()
        self.wait()
        begun = time.perf_counter()
        result = run()
        self.wait()
        return (time.perf_counter() - begun) * 1e3, result


def average(ranks: Ranks, asked: argparse.Namespace) -> dict[str, Any]:
    """Means of flat float32 gradients over ranks: time, and error against float64."""
    found = []
    for mebibytes in asked.mebibytes:
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        gradient = torch.randn(mebibytes * 2**18, device=ranks.device, generator=generator)
        exact = gradient.double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        row: dict[str, Any] = {"mebibytes": mebibytes}
        for wire in ("float32", "bfloat16", "fp8"):
            ms, mean = [], gradient
            for _ in range(WARM_STEPS + 7):
                took, mean = ranks.timed(functools.partial(_mean, gradient.clone(), wire))
                ms.append(took)
            error = (mean.double() - exact).norm() / exact.norm()
            row[wire] = {"ms": statistics.median(ms[WARM_STEPS:]), "error": float(error)}
        found.append(row)
    return {"average": found}


def _mean(gradient: Tensor, wire: str) -> Tensor:
    if wire == "float32":
        dist.all_reduce(gradient)
        return gradient.div_(dist.get_world_size())
    # What rounding took of one gradient belongs to no other here.
    return Compression(wire, error_feedback=False).average(gradient)


def ddp(ranks: Ranks, asked: argparse.Namespace) -> dict[str, Any]:
    """Training with gradients over each wire; parameters have to stay alike on all ranks."""
    found = {}
    for wire in ("float32", "bfloat16", "fp8"):
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model_of(ranks, asked), device_ids=ids)
        if wire != "float32":
            model.register_comm_hook(Compression(wire), compress)
        found[wire] = _trained(ranks, asked, model)
        sums = torch.stack([p.detach().double().sum() for p in model.parameters()])
        first = sums.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, sums):
            raise SystemExit(f"{wire}: parameters of rank {ranks.rank} are not the first's")
        del model
    return {"ddp": found}


def fsdp(ranks: Ranks, asked: argparse.Namespace) -> dict[str, Any]:
    """FSDP2 with bfloat16 products; with FP8 products; and with weights gathered as FP8, too."""
    found: dict[str, Any] = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name in ("bfloat16", "fp8 products", "gathered as fp8"):
        model = model_of(ranks, asked)
        layers = [layer for layer in model[:-1] if isinstance(layer, nn.Linear)]
        if name != "bfloat16":
            convert(model, None)
            for layer in layers:
                assert isinstance(layer, Linear)  # by now
                layer.take_routes((ONE_SCALE, ONE_SCALE, ""), layer.weight)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if name == "gathered as fp8":
            found["gathering"] = repr(Gathering(model))
        found[name] = _trained(ranks, asked, model)
        del model
    return {"fsdp": found}


def model_of(ranks: Ranks, asked: argparse.Namespace) -> nn.Sequential:
    """A model with the same parameters on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(asked.layers):
        layers += [
            nn.Linear(asked.width, asked.width, bias=False), nn.LayerNorm(asked.width), nn.ReLU()
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.Linear(asked.width, 1)).to(ranks.device)


def _trained(ranks: Ranks, asked: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    generator = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)
    losses, ms = [], []
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(asked.steps):
        x = torch.randn(asked.batch, asked.width, device=ranks.device, generator=generator)
        label = (x[:, :8].sum(1, keepdim=True) > 0).float()

        def step(x: Tensor = x, label: Tensor = label) -> Tensor:
            with torch.autocast(ranks.device.type, torch.bfloat16):
                logit = model(x)
            loss = F.binary_cross_entropy_with_logits(logit.float(), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        took, loss = ranks.timed(step)
        ms.append(took)
        losses.append(loss)
    means = torch.stack(losses)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    on_gpu = ranks.device.type == "cuda"
    return {
        "step_ms": statistics.median(ms[WARM_STEPS:] or ms),
        "losses": [float(means[place]) for place in (0, asked.steps // 2, -1)],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def main() -> None:
    measures = {"average": average, "ddp": ddp, "fsdp": fsdp}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wanted", nargs="*", help=f"{', '.join(measures)}; all of them if none")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8192, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mebibytes", type=int, nargs="*", default=[16, 64, 256, 1024])
    asked = parser.parse_args()
    unknown = set(asked.wanted) - set(measures)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(measures)}")
    ranks = Ranks()
    for name in asked.wanted or measures:
        begun = time.perf_counter()
        found = measures[name](ranks, asked)
        found |= {"ranks": dist.get_world_size(), "took_s": round(time.perf_counter() - begun, 1)}
        if ranks.rank == 0:
            on_gpu = ranks.device.type == "cuda"
            found["device"] = torch.cuda.get_device_name() if on_gpu else "CPU, over gloo"
            print(json.dumps(found))
            sys.stdout.flush()
    dist.destroy_process_group()
    # Caches of DTensor keep groups of gloo, and so their threads. One that lets go of what it sent
    # while Python ends aborts the process: seen twice. So Python does not end.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
