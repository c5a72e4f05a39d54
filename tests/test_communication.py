"""Gradients between two ranks: what arrives, what is fed back, and that models train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lokakern.communication import COLUMNS, Compression, compress
from lokakern.errors import UnknownNameError
from lokakern.linear import Linear

SEEDS = (0,)
ROUTE = "row;16:0=cuda.quantize_row+cuda.scaled_gemm_row;1:0="
COUNT = 3 * COLUMNS + 17


def gradient_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_of(step: int = 0) -> Tensor:
    return (gradient_of(0, step) + gradient_of(1, step)) / 2


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def averages(rank: int) -> dict[str, Any]:
    """What of the same gradients arrives by each wire."""
    found: dict[str, Any] = {}
    for wire in ("fp8", "bfloat16"):
        for dtype in (torch.float32, torch.bfloat16):
            y = Compression(wire).average(gradient_of(rank).to(dtype))
            assert y.dtype == dtype
            found[f"{wire} {dtype}"] = distance(y, mean_of()), y.double().sum().item()
    for feedback in (True, False):  # the same gradient again and again
        state = Compression(error_feedback=feedback)
        total = sum(state.average(gradient_of(rank)) for _ in range(16)) / 16
        found[f"feedback {feedback}"] = distance(total, mean_of())
    state = Compression()
    broken = gradient_of(rank)
    broken[5] = float("nan") if rank else 1.0
    y = state.average(broken)
    found["nan at"] = y.isnan().nonzero().flatten().tolist()
    found["after nan"] = bool(state.average(gradient_of(rank)).isfinite().all())
    found["zeros"] = float(Compression().average(torch.zeros(7)).abs().max())
    found["other size"] = len(state.average(torch.ones(5)))
    return found


def losses(rank: int, state: Compression | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    if state is not None:
        ddp.register_comm_hook(state, compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(16):
        x = torch.randn(64, 24, generator=torch.Generator().manual_seed(step))
        half = x[rank::2]
        loss = (ddp(half) - half[:, :2].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(((model(x) - x[:, :2].sum(1, keepdim=True)).square().mean()).item())
    return found


def routed_losses(rank: int, kind: str) -> list[float]:
    """Of a model whose products are quantized, with its weights whole or in parts."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 32), nn.ReLU(), Linear(32, 40))
    for layer in model:
        if isinstance(layer, Linear):
            layer.take_routes((ROUTE, ROUTE, ""), layer.weight)
    called: nn.Module = model
    if kind == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            y = called(torch.randn(96, 64, generator=torch.Generator().manual_seed(step))[rank::2])
        loss = (y.float() - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def one_of_two_ranks(rank: int, folder: str) -> None:
    """Body of a process."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = averages(rank)
    found["plain"] = losses(rank, None)
    for wire in ("fp8", "bfloat16"):
        found[wire] = losses(rank, Compression(wire))
    for kind in ("ddp", "fsdp2"):
        found[f"routed {kind}"] = routed_losses(rank, kind)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    program = (
        "import sys; from tests.test_communication import one_of_two_ranks; "
        "one_of_two_ranks(int(sys.argv[1]), sys.argv[2])"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(folder)],
            stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
        )
        for rank in range(2)
    ]  # fmt: skip
    for worker in workers:
        _, errors = worker.communicate(timeout=240)
        assert worker.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_mean_arrives_and_is_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for key in ("fp8 torch.float32", "fp8 torch.bfloat16"):
        assert found[0][key] == found[1][key]
        assert 0.01 < found[0][key][0] < 0.05  # quantized twice
    for key in ("bfloat16 torch.float32", "bfloat16 torch.bfloat16"):
        assert found[0][key] == found[1][key]
        assert found[0][key][0] < 0.01


def test_errors_that_are_fed_back_vanish_over_steps(found: list[dict[str, Any]]) -> None:
    assert found[0]["feedback True"] < 0.2 * found[0]["feedback False"]


def test_what_is_not_finite_arrives_everywhere_and_is_not_kept(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert 5 in one["nan at"] and max(one["nan at"]) < COLUMNS
        assert one["after nan"] and one["zeros"] == 0.0 and one["other size"] == 5


def test_models_train_as_without(found: list[dict[str, Any]]) -> None:
    for wire in ("fp8", "bfloat16"):
        assert found[0][wire] == found[1][wire]  # parameters stay the same on all ranks
        assert found[0][wire][-1] == pytest.approx(found[0]["plain"][-1], rel=0.05)
        assert found[0][wire] != found[0]["plain"]
    assert found[0]["plain"][-1] < 0.8 * found[0]["plain"][0]


def test_quantized_models_train_alike_whole_and_in_parts(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["routed fsdp2"] == pytest.approx(one["routed ddp"], rel=1e-3)
        assert one["routed ddp"][-1] < one["routed ddp"][0]


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="wire is 'int4'; expected one of fp8, bfloat16"):
        Compression("int4")
