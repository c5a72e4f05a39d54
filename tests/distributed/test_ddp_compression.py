"""Gradients between two ranks: what arrives, what is fed back, and that models train."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lokakern.distributed.ddp_compression import COLUMNS, Compression, compress
from lokakern.distributed.fsdp2_gather import GatheredWeight, Gathering
from lokakern.errors import UnknownNameError
from lokakern.nn.linear import Linear
from tests.support.two_ranks import results_of_two_ranks

SEEDS = (0,)
ROUTE = "row;16:0=cuda.quantize_row+cuda.scaled_gemm_row;1:0="
ONE_SCALE = "tensor;16:0=cuda.quantize_tensor+cuda.scaled_gemm_tensor;1:0="
COUNT = 3 * COLUMNS + 17
ODD = 33  # rows that two ranks share as 17 and 16


def gradient_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_of(step: int = 0) -> Tensor:
    return (gradient_of(0, step) + gradient_of(1, step)) / 2


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def averages(rank: int) -> dict[str, Any]:
    """Averages of the same gradients by each wire format."""
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
    """Losses of a model with quantized products, under DDP or FSDP2."""
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


def sharded(
    is_gathered: bool, policy: MixedPrecisionPolicy | None = None
) -> tuple[nn.Module, Gathering | None]:
    """A model in parts, the last of which has one row: none on the second rank."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, ODD), nn.ReLU(), nn.Linear(ODD, 48), Linear(48, 1))
    for place in (0, 3):
        layer = model[place]
        assert isinstance(layer, Linear)
        layer.take_routes((ONE_SCALE, ONE_SCALE, ""), layer.weight)
    mesh, options = init_device_mesh("cpu", (2,)), {} if policy is None else {"mp_policy": policy}
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh, **options)  # type: ignore[arg-type]
    return model, Gathering(model) if is_gathered else None


def trained(rank: int, model: nn.Module, autocast: bool) -> list[float]:
    """Losses of steps with two micro-batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # foreach: moves no version
    found = []
    for number in range(6):
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(number))[rank::2]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        loss = (y.float() - 1.0).square().mean()
        loss.backward()
        found.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return found


def gathered(rank: int) -> dict[str, Any]:
    """Losses and traffic with weights gathered as FP8, and unquantized."""
    found: dict[str, Any] = {}
    sent: list[int] = []
    reduced: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, reduce = getattr(dist, name), dist.all_reduce

    def count_gather(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input.nbytes)
        return gather(output, input, *args, **kwargs)

    def count_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(x.nbytes)
        return reduce(x, *args, **kwargs)

    setattr(dist, name, count_gather)
    dist.all_reduce = count_reduce
    policies = {
        "autocast": None,
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for kind, policy in policies.items():
        for is_gathered in (True, False):
            model, _ = sharded(is_gathered, policy)
            sent.clear(), reduced.clear()
            losses = trained(rank, model, policy is None)
            found[f"{kind} {is_gathered}"] = {
                "losses": losses, "sent": sum(sent), "reduced": list(reduced)
            }  # fmt: skip
            if kind == "autocast" and is_gathered:
                kept = model
    setattr(dist, name, gather)
    dist.all_reduce = reduce

    def output(model: nn.Module) -> float:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return float(model(torch.ones(32, 64)).double().sum())

    found["output"] = output(kept)
    state = kept.state_dict()
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    loaded = torch.load(stream)  # weights only, as by default
    found["saved as"] = type(loaded["0.weight"]._local_tensor).__name__
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole = get_model_state_dict(kept, options=StateDictOptions(full_state_dict=True))
    found["whole"] = {key: type(x).__name__ for key, x in whole.items()}
    for assign in (False, True):
        other, _ = sharded(True)
        output(other)  # with scales of other weights
        other.load_state_dict(loaded, assign=assign)
        found[f"loaded, assign={assign}"] = output(other)
    other, _ = sharded(True)
    set_model_state_dict(other, whole, options=options)
    found["loaded whole"] = output(other)
    found["cast"] = output(kept.double().float())
    weight = kept[0].weight  # type: ignore[index]
    found["type"] = isinstance(weight._local_tensor, GatheredWeight)
    found["computed"] = type((weight * 2).to_local()).__name__
    return found


def one_of_two_ranks(rank: int) -> dict[str, Any]:
    """Results of one process, see `results_of_two_ranks`."""
    found = averages(rank)
    found["plain"] = losses(rank, None)
    for wire in ("fp8", "bfloat16"):
        found[wire] = losses(rank, Compression(wire))
    for kind in ("ddp", "fsdp2"):
        found[f"routed {kind}"] = routed_losses(rank, kind)
    found["gathered"] = gathered(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of_two_ranks("tests.distributed.test_ddp_compression")


def test_the_mean_arrives_and_is_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for key in ("fp8 torch.float32", "fp8 torch.bfloat16"):
        assert found[0][key] == found[1][key]
        assert 0.01 < found[0][key][0] < 0.05  # quantized twice
    for key in ("bfloat16 torch.float32", "bfloat16 torch.bfloat16"):
        assert found[0][key] == found[1][key]
        assert found[0][key][0] < 0.01


def test_errors_that_are_fed_back_vanish_over_steps(found: list[dict[str, Any]]) -> None:
    assert found[0]["feedback True"] < 0.2 * found[0]["feedback False"]


def test_non_finite_gradients_reach_all_ranks_and_are_not_fed_back(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert 5 in one["nan at"] and max(one["nan at"]) < COLUMNS
        assert one["after nan"] and one["zeros"] == 0.0 and one["other size"] == 5


def test_models_train_as_without(found: list[dict[str, Any]]) -> None:
    for wire in ("fp8", "bfloat16"):
        assert found[0][wire] == found[1][wire]  # parameters stay the same on all ranks
        assert found[0][wire][-1] == pytest.approx(found[0]["plain"][-1], rel=0.05)
        assert found[0][wire] != found[0]["plain"]
    assert found[0]["plain"][-1] < 0.8 * found[0]["plain"][0]


def test_quantized_models_train_equally_under_ddp_and_fsdp2(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["routed fsdp2"] == pytest.approx(one["routed ddp"], rel=1e-3)
        assert one["routed ddp"][-1] < one["routed ddp"][0]


def test_fp8_gathering_trains_bitwise_like_quantizing_after_the_gather(
    found: list[dict[str, Any]],
) -> None:
    """Uneven shards and empty ones, micro-batches, autocast and mixed precision."""
    for one in found:
        for kind in ("autocast", "policy"):
            with_it, without = one["gathered"][f"{kind} True"], one["gathered"][f"{kind} False"]
            assert with_it["losses"] == without["losses"]
            assert with_it["losses"][-1] < with_it["losses"][0]


def test_weights_gathered_as_fp8_take_one_byte_per_element(found: list[dict[str, Any]]) -> None:
    elements = 17 * 64 + 48  # of a rank's part: the first layer's, padded, and the last one's
    for one in found:
        for kind, size in (("autocast", 4), ("policy", 2)):
            with_it, without = one["gathered"][f"{kind} True"], one["gathered"][f"{kind} False"]
            gathers = 12  # forward and backward of six micro-batches
            assert without["sent"] - with_it["sent"] == gathers * elements * (size - 1)
            assert with_it["reduced"] == [2 * 4] * 6  # of two scales, once for each forward pass
            assert without["reduced"] == []


def test_checkpoints_of_weights_gathered_as_fp8_are_plain(found: list[dict[str, Any]]) -> None:
    for one in (one["gathered"] for one in found):
        assert one["saved as"] == one["computed"] == "Tensor" and one["type"]
        assert set(one["whole"].values()) <= {"Tensor"}
        for how in ("loaded, assign=False", "loaded, assign=True", "loaded whole", "cast"):
            assert one[how] == one["output"], how


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="wire is 'int4'; expected one of fp8, bfloat16"):
        Compression("int4")


@pytest.mark.rest
def test_the_script_that_measures_wires_runs_between_ranks_without_gpus() -> None:
    """Losses of FP8 products are the same to the bit however weights were gathered."""
    script = Path(__file__).parents[2] / "scripts" / "measure_communication.py"
    small = ["--layers=2", "--width=64", "--batch=64", "--steps=8", "--mebibytes=1"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "--standalone", str(script), *small],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    average, ddp, fsdp = (json.loads(line) for line in done.stdout.splitlines())
    (means,) = average["average"]
    errors = [means[wire]["error"] for wire in ("float32", "bfloat16", "fp8")]
    assert errors[0] < 1e-6 < errors[1] < 0.004 < errors[2] < 0.06
    losses = {wire: found["losses"] for wire, found in ddp["ddp"].items()}
    for wire in ("bfloat16", "fp8"):
        assert losses[wire] != losses["float32"]
        assert losses[wire] == pytest.approx(losses["float32"], rel=0.01)
    products = fsdp["fsdp"]["fp8 products"]["losses"]
    assert products == fsdp["fsdp"]["gathered as fp8"]["losses"]
    assert products != fsdp["fsdp"]["bfloat16"]["losses"]
