"""Converted layers whose weights are sharded by n or by k between two ranks.

Kernels of an H200 are emulated here.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lokakern
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import in_dtype
from tests.support.two_ranks import results_of_two_ranks

SEEDS = (0,)
ROW_PAIR = "cuda.quantize_row+cuda.scaled_gemm_row"
ROW = f"row;16:0=,16={ROW_PAIR};1:0=,17={ROW_PAIR}"
GROUP = "none;16:0=,16=cuda.quantize_group+cuda.scaled_gemm_group;1:0="
INSIDE = 34  # columns, of which each of two ranks has 17: torch shares evenly only


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, INSIDE), nn.SiLU(), nn.Linear(INSIDE, 40)).to(dtype)


def routed(model: nn.Sequential, inference: bool = False) -> nn.Sequential:
    handle = lokakern.convert(model, 0.0)
    for site in handle.sites.values():
        assert isinstance(site.module, Linear)
        routes = [in_dtype(route, site.module.weight.dtype) for route in (ROW, ROW, GROUP)]
        site.module.take_routes(routes, site.module.weight)
        if inference:
            site.module.freeze()
    return model


def plan_of(kind: str) -> dict[str, Any]:
    if kind == "sequence":  # the rows of x are sharded before and after
        return {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
        }
    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach()


def rows() -> Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def passed(model: Any, parameters: nn.Module, mesh: DeviceMesh, kind: str) -> dict[str, Tensor]:
    """The output and all gradients, of all rows on each rank."""
    x = rows().to(next(parameters.parameters()).dtype)
    x = x.view(6, 8, 64) if kind == "axes" else x
    if kind == "sequence":
        x = x.chunk(2)[mesh.get_local_rank()]
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.randn(48, 40, generator=torch.Generator().manual_seed(2)).view(-1, *y.shape[1:])
    if kind == "sequence":
        weights = weights.chunk(2)[mesh.get_local_rank()]
    (y.float() * weights).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    if kind == "sequence":
        found = {name: gathered(part) for name, part in found.items() if part is not None}
    found |= {name: whole(p.grad) for name, p in parameters.named_parameters()}
    parameters.zero_grad()
    return {name: t.reshape(-1, t.shape[-1]) for name, t in found.items() if t is not None}


def gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {
        name: float((x.double() - exact[name].double()).norm() / exact[name].double().norm())
        for name, x in found.items()
    }


def one_of_two_ranks(rank: int) -> dict[str, Any]:
    """Results of one process, see `results_of_two_ranks`."""
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    plain = model_of()
    exact = passed(plain, plain, mesh, "")
    alone = routed(model_of())
    found["alone"] = errors(passed(alone, alone, mesh, ""), exact)
    for kind in ("", "axes", "sequence"):
        torch_only = parallelize_module(model_of(), mesh, plan_of(kind))
        found[f"torch {kind}"] = errors(passed(torch_only, torch_only, mesh, kind), exact)
        model = parallelize_module(routed(model_of()), mesh, plan_of(kind))
        found[f"before {kind}"] = errors(passed(model, model, mesh, kind), exact)
        if kind == "sequence":
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            found[f"compiled {kind}"] = errors(passed(compiled, model, mesh, kind), exact)
        model = routed(parallelize_module(model_of(), mesh, plan_of(kind)))
        found[f"after {kind}"] = errors(passed(model, model, mesh, kind), exact)
    half = parallelize_module(routed(model_of(torch.float16)), mesh, plan_of(""))
    found["float16 "] = errors(passed(half, half, mesh, ""), exact)
    with torch.no_grad():
        for when in ("before", "after"):
            model = model_of()
            model = routed(model, inference=True) if when == "before" else model
            parallelize_module(model, mesh, plan_of(""))
            model = routed(model, inference=True) if when == "after" else model
            y = model(rows())
            for layer in (model[0], model[2]):
                layer.weight.to_local().zero_()  # type: ignore[operator, union-attr]
            found[f"frozen {when}"] = errors({"y": model(rows())}, {"y": exact["y"]})
            found[f"frozen {when}"]["kept"] = float(torch.equal(model(rows()), y))
    found |= left_to_torch(mesh) | {"trained": trained(mesh)}
    return found


def left_to_torch(mesh: DeviceMesh) -> dict[str, Any]:
    """A layout for which there is no rule: sharded k beside a weight that is whole."""
    layer, plain = routed(model_of()[:1])[0], model_of()[0]
    results = []
    for one in (layer, plain):
        weight = nn.Parameter(distribute_tensor(one.weight.detach(), mesh, [Replicate()]))
        bias = nn.Parameter(distribute_tensor(one.bias.detach(), mesh, [Replicate()]))
        one.weight, one.bias = weight, bias
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = [one(distribute_tensor(rows(), mesh, [Shard(1)])) for _ in range(2)]
        results.append((whole(y[0]), sum("unquantized" in str(w.message) for w in said)))
    return {"left": torch.equal(results[0][0], results[1][0]), "said": [r[1] for r in results]}


def trained(mesh: DeviceMesh) -> list[list[float]]:
    """Losses by hand-written SGD, sharded and not."""
    losses = []
    for model in (parallelize_module(routed(model_of()), mesh, plan_of("")), routed(model_of())):
        found = []
        for _ in range(5):
            loss = (model(rows()).float() - 1.0).square().mean()
            loss.backward()
            found.append(loss.item())
            for p in model.parameters():
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=2.0)
                p.grad = None
        losses.append(found)
    return losses


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of_two_ranks("tests.nn.test_tensor_parallel")


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        *itertools.product(("before", "after"), ("", "axes", "sequence")),
        ("compiled", "sequence"),
        ("float16", ""),
    ],
)
def test_sharded_fp8_layers_have_the_error_of_unsharded_ones(
    found: list[dict[str, Any]], when: str, kind: str
) -> None:
    """Converted before or after they are sharded: outputs and all gradients."""
    for one in found:
        sharded, whole, unquantized = one[f"{when} {kind}"], one["alone"], one[f"torch {kind}"]
        assert sharded.keys() == whole.keys()
        for name, error in sharded.items():
            assert error < 1.3 * whole[name] + 0.005, name
            if "bias" not in name:
                assert error > 0.02 > 0.01 > unquantized[name], name


def test_in_inference_each_rank_keeps_its_shard_in_fp8(found: list[dict[str, Any]]) -> None:
    for one in found:
        for when in ("before", "after"):
            assert one[f"frozen {when}"]["kept"] == 1.0
            assert 0.02 < one[f"frozen {when}"]["y"] < 0.08


def test_an_unsupported_placement_is_left_to_torch_with_one_warning(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert one["left"] and one["said"] == [1, 0]


def test_sharded_models_train_as_unsharded_ones(found: list[dict[str, Any]]) -> None:
    for one in found:
        sharded, whole = one["trained"]
        assert sharded == pytest.approx(whole, rel=0.03) and sharded[-1] < 0.7 * sharded[0]
    assert found[0]["trained"] == found[1]["trained"]
