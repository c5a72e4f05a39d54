"""Relus in products: values and gradients, where both modules run, and routes between others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lokakern.native import NATIVE
from lokakern.nn import rectified
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import KERNEL, rectified_between, route_between
from lokakern.nn.static_handoff import BoundedSequential, set_handoff
from tests.support import native
from tests.support.routed_layers import BY_ROW, K, layer_of, rows

ALWAYS = f"none;16:0={KERNEL};1:0={KERNEL}"
ONLY_16 = f"none;16:0={KERNEL};1:0="


@pytest.fixture(params=["Python", "C++"])
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """Rows of calls with the relu in the product; in C++ those that profilers see."""
    found: list[int] = []
    product = torch._addmm_activation

    def counted(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found.append(len(x))
        return product(bias, x, weight)

    if request.param == "Python":
        monkeypatch.setattr(NATIVE, "call_sequence", None)
        monkeypatch.setattr(NATIVE, "call_layer", None)
        monkeypatch.setattr(rectified, "_addmm_activation", counted)
        yield found
        return
    monkeypatch.setattr(rectified, "_addmm_activation", counted)
    with native.in_use():
        yield found


def model_of(*modules: nn.Module, routes: list[str] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*modules).bfloat16().eval()
    none = [""] * len(model)
    set_handoff(model, none, none, rectified=routes or [*rectified_between(model)])
    return model


def usual(routes: list[str] | None = None) -> nn.Sequential:
    return model_of(
        Linear(K, 2 * K), nn.ReLU(), Linear(2 * K, K), nn.ReLU(inplace=True), Linear(K, 8),
        routes=routes,
    )  # fmt: skip


def plain(model: nn.Sequential) -> nn.Sequential:
    """The modules without settings."""
    return nn.Sequential(*copy.deepcopy(list(model)))


def run_of_profile(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
    """The output, and the number of products with a relu."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        y = model(x)
    return y, sum(event.name == "aten::_addmm_activation" for event in found.events())


def test_where_the_relu_may_be_in_the_product() -> None:
    model = nn.Sequential(
        Linear(K, K), nn.ReLU(), Linear(K, K), nn.ReLU(inplace=True), Linear(K, K), nn.Tanh(),
        Linear(K, K, bias=False), nn.ReLU(), Linear(K, 12), nn.ReLU(), nn.Linear(12, K), nn.ReLU(),
    ).bfloat16()  # fmt: skip
    assert [place for place, route in enumerate(rectified_between(model)) if route] == [0, 2]
    assert rectified_between(model)[0] == ALWAYS
    model[2] = layer_of((BY_ROW, "", ""), n=K)  # which quantizes from 16 rows on
    first, _, second, *_ = rectified_between(model)
    assert first == second != ALWAYS
    assert not any(rectified_between(model.float()))
    padded = Linear(K, K).bfloat16()
    padded.padding = (8, 0)
    assert not any(rectified_between(nn.Sequential(padded, nn.ReLU())))


def test_the_route_between_two_others() -> None:
    own = "row;16:0=,64=a,1024=;1:0="
    then = "row;16:0=,2048=b;1:0=,33=b"
    assert route_between("", "") == ALWAYS
    assert route_between(own, then) == (
        f"none;16:0={KERNEL},64=,1024={KERNEL},2048=;1:0={KERNEL},33="
    )
    assert route_between("row;16:0=a;1:0=a", "") == ""


@pytest.mark.parametrize("shape", [(32, K), (3, K), (0, K), (4, 8, K)])
def test_values_are_those_of_both_modules(launched: list[int], shape: tuple[int, ...]) -> None:
    model = usual()
    x = torch.randn(shape).bfloat16()
    expected = plain(model)(x)
    with torch.no_grad():
        for _ in range(3):
            y, count = run_of_profile(model, x)
            assert torch.equal(y, expected) and count == 2


def test_a_route_holds_at_its_rows_only(launched: list[int]) -> None:
    model = usual([ONLY_16, "", "", "", ""])
    with torch.no_grad():
        for m, expected in ((32, 1), (33, 0), (32, 1)):
            assert run_of_profile(model, torch.randn(m, K).bfloat16())[1] == expected


def test_both_modules_run_where_anything_is_unusual(launched: list[int]) -> None:
    x = torch.randn(32, K).bfloat16()

    def count(model: nn.Sequential, x: Tensor = x) -> int:
        expected = plain(model)(x)
        y, found = run_of_profile(model, x)
        assert torch.equal(y, expected)
        return found

    assert count(usual()) == 0  # with gradients
    with torch.no_grad():
        assert count(usual()) == 2
        seen: list[Tensor] = []
        for place in (0, 1):
            model = usual()
            model[place].register_forward_hook(lambda _m, _x, y: seen.append(y))
            assert count(model) == 1
        assert len(seen) == 4  # those of the copies, too
        model = usual()
        model.float()
        assert count(model, x.float()) == 0
        model = usual()
        model[0].bias = None
        assert count(model) == 1
        model = usual()
        model[1] = nn.SiLU()
        assert count(model) == 0  # not as known
        model = usual()
        vars(model[0])["_routes"], model[0]._plan = (BY_ROW, "", ""), ""
        model[0].changed()
        assert run_of_profile(model, x)[1] == 1  # the layer quantizes now
        with torch.autocast("cpu", torch.bfloat16):
            assert run_of_profile(usual(), x)[1] in (0, 2)
        with torch.autocast("cpu", torch.float16):
            assert run_of_profile(usual(), x)[1] == 0
    frozen = usual().requires_grad_(False)
    assert count(frozen) == 2  # nothing needs a gradient
    assert count(frozen, x.clone().requires_grad_()) == 0


def test_a_compiled_model_has_it_with_its_gradients() -> None:
    model = usual().train()
    x = torch.randn(32, K).bfloat16().requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    other = plain(model)
    compiled(x)
    for _ in range(2):
        for each in (x, *model.parameters(), *other.parameters()):
            each.grad = None
        y, count = run_of_profile(compiled, x)
        assert count == 2
        y.float().square().sum().backward()
        found = [x.grad, *(p.grad for p in model.parameters())]
        x.grad = None
        z = other(x)
        z.float().square().sum().backward()
        assert torch.equal(y, z)
        for one, expected in zip(
            found, [x.grad, *(p.grad for p in other.parameters())], strict=True
        ):
            assert torch.equal(one, expected)
    with torch.no_grad():
        compiled(x)
        y, count = run_of_profile(compiled, x)
    assert torch.equal(y, other(x)) and count == 2


def test_gradients_by_routes_of_a_compiled_layer() -> None:
    """A layer whose gradients quantize, and not its output."""
    layer = layer_of(("", BY_ROW, BY_ROW), n=K, bias=True)
    model = model_of(layer, nn.ReLU(), Linear(K, 8))
    assert rectified_between(model)[0] == ALWAYS
    other = nn.Sequential(*copy.deepcopy(list(model)))
    x = rows(32).requires_grad_()
    results = []
    for each, count in ((model, 1), (other, 0)):
        x.grad = None
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        compiled(x)
        y, found = run_of_profile(compiled, x)
        assert found == count
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in each.parameters())])
    assert all(map(torch.equal, *results))


def test_dynamic_rows_and_another_mode_of_compilation() -> None:
    model = usual()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(64, K).bfloat16())
        for m in (32, 33, 48):
            x = torch.randn(m, K).bfloat16()
            y, count = run_of_profile(compiled, x)
            assert torch.equal(y, plain(model)(x)) and count == 2
    some = usual([ONLY_16, "", "", "", ""])
    compiled = torch.compile(some, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert run_of_profile(compiled, torch.randn(32, K).bfloat16())[1] == 0


def test_sequences_of_earlier_versions_are_read() -> None:
    model = usual()
    state = model.__getstate__()
    state["_handoffs"] = tuple(h._replace(rectified=()) for h in state["_handoffs"])
    other = BoundedSequential.__new__(BoundedSequential)
    other.__setstate__(state)
    x = torch.randn(32, K).bfloat16()
    with torch.no_grad():
        y, count = run_of_profile(other, x)
    assert torch.equal(y, plain(model)(x)) and count == 0
