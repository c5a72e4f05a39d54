"""A tower with layer norms and static scales between its layers, by the shipped times."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern.conversion.convert import Conversion
from lokakern.nn.chain_norm import NORM_SCALE
from lokakern.nn.chain_plan import steps_at
from lokakern.selection import dispatcher
from lokakern.types import Granularity

H200 = "NVIDIA H200"
M = 512


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for k, n in ((3200, 2048), (2048, 2048), (2048, 1024)):
        norm = nn.LayerNorm(n)
        nn.init.normal_(norm.weight, 1.0, 0.25)
        nn.init.normal_(norm.bias, 0.0, 0.1)
        modules += [nn.Linear(k, n), norm, nn.ReLU()]
    return nn.Sequential(*modules).bfloat16()


def converted(model: nn.Sequential) -> Conversion:
    return lokakern.convert(model, 0.06, device=H200, inference=True, regime="graph-cold")


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).float().norm() / b.float().norm()).item()


@pytest.mark.parametrize(
    "where",
    [pytest.param("cpu", marks=pytest.mark.rest), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_tower_has_static_scales_between_its_layers(where: str) -> None:
    plain = tower().to(where)
    model = copy.deepcopy(plain)
    handle = converted(model)
    ((chain,),) = (span.plan.chains for span in handle.spans)
    writes = [step.writes for step in steps_at(chain.text, M)]
    assert writes == [Granularity.TENSOR, Granularity.TENSOR, Granularity.NONE]
    x = torch.randn(M, 3200, device=where).bfloat16()
    with torch.no_grad():
        y = [model(x) for _ in range(4)]
        assert all(torch.equal(found, y[0]) for found in y)
        assert 0.01 < difference(y[0], plain(x)) < 0.1
        for parameter in plain.parameters():
            parameter.mul_(2)
        model.load_state_dict(plain.state_dict())
        found = model(x)
        assert not torch.equal(found, y[0])
        assert 0.01 < difference(found, plain(x)) < 0.1


@pytest.mark.gpu
def test_a_graph_follows_loaded_norms() -> None:
    """Scales and copies of norms stay in their memory, as FP8 weights do."""
    model = tower().cuda()
    converted(model)
    x = torch.randn(M, 3200, device="cuda").bfloat16()
    with torch.no_grad():
        for _ in range(4):
            y = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        graph.replay()
        assert torch.equal(out, y)
        place = getattr(model[0], NORM_SCALE).data_ptr()
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        assert getattr(model[0], NORM_SCALE).data_ptr() == place
        y = model(x)
        graph.replay()
        assert torch.equal(out, y)
        compiled = torch.compile(model, mode="reduce-overhead")
        for _ in range(3):
            assert difference(compiled(x), y) < 1e-2


@pytest.mark.gpu
def test_frozen_choices_give_the_same_tower(tmp_path: Path) -> None:
    if torch.cuda.get_device_name() != H200:
        pytest.skip("times are those of the H200")
    model, x = tower().cuda(), torch.randn(M, 3200, device="cuda").bfloat16()
    again = copy.deepcopy(model)
    try:
        dispatcher.use_snapshot(None)
        first = converted(model)
        layers = [(2048, 2048, "bias+layer+affine+relu")] * 2
        chain = lokakern.dispatch_chain(layers, M, 0.09)
        with torch.no_grad():
            y = model(x)
        lokakern.freeze(tmp_path / "choices.json")
        dispatcher.use_choices(tmp_path / "choices.json")
        second = converted(again)
        assert lokakern.dispatch_chain(layers, M, 0.09).kernels == chain.kernels
        chains = [[c.text for c in h.spans[0].plan.chains] for h in (first, second)]
        assert chains[0] == chains[1] and chains[0]
        with torch.no_grad():
            assert torch.equal(again(x), y)
    finally:
        dispatcher.use_snapshot(None)
