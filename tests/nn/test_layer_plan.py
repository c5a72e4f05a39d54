"""The plan of a layer: the one text that a compiled call guards, and its changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend

import lokakern
from lokakern import mods
from lokakern.conversion import convert as conversion
from lokakern.nn.adoption import Chosen, adopt, apply_choice
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN
from lokakern.nn.static_handoff import BoundedSequential, set_handoff
from tests.support.routed_layers import BY_GROUP, BY_ROW, ROUTES, K, is_quantized, layer_of, rows


class Stack(nn.Module):
    """Layers of one shape in a row, without other modules."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def guards(model: nn.Module, x: Tensor) -> list[str]:
    """Lines of the guards of a compiled call."""
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True, dynamic=False)(x)
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entry.guard_manager).splitlines()


def guards_of_a_layer(make: Callable[[], nn.Module]) -> int:
    """Lines that one more layer adds."""
    few, many = (len(guards(Stack([make() for _ in range(n)]), rows())) for n in (2, 3))
    return many - few


def routed(routes: tuple[str, ...] = ROUTES, is_frozen: bool = False) -> Linear:
    """A layer as a conversion leaves it."""
    layer = nn.Linear(K, K, dtype=torch.bfloat16)
    adopt(layer)
    assert isinstance(layer, Linear)
    apply_choice(layer, Chosen("", routes, is_frozen))
    return layer


def test_a_converted_layer_adds_few_guards_to_those_of_a_linear_layer() -> None:
    """Plan, form and the class of the weight; two buffers with their dictionaries if frozen.

    Two lines an attribute of the layer itself: in torch 2.11 one of its class takes ten.
    """
    expected = guards_of_a_layer(lambda: nn.Linear(K, K, dtype=torch.bfloat16))
    assert guards_of_a_layer(routed) <= expected + 5
    assert guards_of_a_layer(lambda: routed((PLAIN,) * 3)) <= expected + 2
    with torch.no_grad():
        buffers = guards_of_a_layer(lambda: routed(is_frozen=True)) - expected - 5
    assert buffers <= 12


def test_no_guard_of_converted_layers_runs_python() -> None:
    """A module or tensor that Dynamo meets in two places costs a call of Python."""
    count = sum("LAMBDA" in line for line in guards(Stack([nn.Identity()]), rows()))
    for x in (rows(), rows(8)):
        found = guards(Stack([routed(), routed()]), x)
        assert sum("LAMBDA" in line for line in found) == count
    torch.manual_seed(0)
    sequence = nn.Sequential(*(nn.Linear(K, K).bfloat16() for _ in range(3)))
    set_handoff(sequence, ["", "0.1", ""], [""] * 3)
    assert isinstance(sequence, BoundedSequential)
    found = guards(Stack([sequence]), rows())
    assert sum("LAMBDA" in line for line in found) == count


def frozen(layer: Linear) -> None:
    layer.freeze()


def thawed(layer: Linear) -> None:
    layer.freeze()
    layer.thaw()


def offloaded(layer: Linear) -> None:
    layer.freeze()
    layer.offload(torch.device("cpu"))


def rerouted(layer: Linear) -> None:
    layer.take_routes((PLAIN, BY_ROW, BY_GROUP), layer.weight)


def unrouted(layer: Linear) -> None:
    layer.take_routes((PLAIN,) * 3, layer.weight)


def padded(layer: Linear) -> None:
    assert mods.apply(layer, [mods.Pad(k=20, n=1)]).changed


def frozen_after_pad(layer: Linear) -> None:
    padded(layer)
    layer.take_routes(layer._routes, None)
    layer.freeze()


def unpadded(layer: Linear) -> None:
    mods.apply(layer, [mods.Pad(k=20, n=1)]).undo()


def mixing(layer: Linear) -> None:
    layer.is_mixing = True
    layer.changed()


def loaded(layer: Linear) -> None:
    layer.freeze()
    layer.load_state_dict({name: 2 * p for name, p in layer.state_dict().items()})


CHANGES = (
    frozen, thawed, offloaded, rerouted, unrouted, padded, frozen_after_pad, unpadded, mixing,
    loaded,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_compiled_layer_follows_a_change(change: Callable[[Linear], None]) -> None:
    torch._dynamo.reset()
    layer, x = routed(), rows()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x)) and counter.frame_count == 1
        before = layer._plan
        change(layer)
        assert torch.equal(compiled(x), layer(x))
        assert counter.frame_count == 1 + (layer._plan != before)
        for _ in range(2):
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1 + (layer._plan != before)
    assert (layer._plan == before) == (change in (thawed, unpadded))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
def test_copies_have_the_plan_of_their_layer(
    change: Callable[[Linear], None], copied: Callable[[Linear], Linear]
) -> None:
    layer, x = routed(), rows()
    change(layer)
    other = copied(layer)
    assert other._plan == layer._plan
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))


def test_a_state_without_a_plan_is_accepted() -> None:
    """As of a file of an earlier version, which has a flag instead."""
    layer, x = routed(is_frozen=True), rows()
    state = layer.__getstate__() | {"is_special": True}
    assert "_plan" not in state
    other = Linear.__new__(Linear)
    other.__setstate__(state)
    assert other._plan == layer._plan and "is_special" not in vars(other)
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))


def test_a_compiled_model_follows_its_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(conversion, "routes_of", is_quantized)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)).bfloat16(), rows()
    plain = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(x), plain(x))
        handle = lokakern.convert(model, 0.06, inference=True)
        assert torch.equal(compiled(x), model(x)) and not torch.equal(model(x), plain(x))
        handle.refresh(None)
        assert torch.equal(compiled(x), plain(x))
        handle.refresh(0.06)
        assert torch.equal(compiled(x), model(x)) and not torch.equal(model(x), plain(x))
        handle.undo()
        assert torch.equal(compiled(x), plain(x)) and "_plan" not in vars(model[0])


def test_a_compiled_handoff_follows_a_change_of_modules() -> None:
    torch._dynamo.reset()

    def sequence() -> Any:
        torch.manual_seed(0)
        made = nn.Sequential(mods.BlockRMSNorm(K, 16), nn.Hardswish(), layer_of(ROUTES, n=K))
        set_handoff(made, ["", "", repr(4.0 / 448.0)], [""] * 3)
        return made

    model, x = sequence(), rows()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        handed = model(x)
        assert torch.equal(compiled(x), handed)
        model[0] = mods.BlockRMSNorm(K, 16)  # of the same class, which need not be as known
        assert not torch.equal(model(x), handed) and torch.equal(compiled(x), model(x))
        for name, new in (("0", mods.BlockRMSNorm(K, 32)), ("1", nn.Identity())):
            model = sequence()
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
            assert torch.equal(compiled(x), handed)
            model._modules[name] = new  # past nn.Module
            assert torch.equal(compiled(x), model(x))
        for model in (copy.deepcopy(sequence()), pickle.loads(pickle.dumps(sequence()))):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
            assert torch.equal(compiled(x), handed)


def test_autocast_and_no_grad_within_a_compiled_function_are_in_effect() -> None:
    torch._dynamo.reset()
    layer, x = layer_of(ROUTES, n=K, dtype=torch.float32), rows().float()

    def within(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            cast = layer(x)
            with torch.no_grad():
                return cast, layer(x) + layer(cast)

    compiled: Any = torch.compile(within, backend="aot_eager", fullgraph=True)
    found, expected = compiled(x), within(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].requires_grad and not found[1].requires_grad
    plain = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert not torch.equal(found[0], plain)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_an_exported_layer_takes_any_number_of_rows(
    leading: tuple[int, ...], strict: bool, is_frozen: bool
) -> None:
    layer, auto = routed(is_frozen=is_frozen), torch.export.Dim.AUTO
    with torch.no_grad():
        sizes = ({place: auto for place in range(1 + len(leading))},)
        x = rows(48).view(*leading, -1, K)
        model = nn.Sequential(layer)
        exported = torch.export.export(model, (x,), strict=strict, dynamic_shapes=sizes).module()
        for m in (48, 6, 34):  # as of the route, not quantized, and not divisible by 16
            x = rows(m).view(*leading, -1, K)
            assert torch.equal(exported(x), layer(x))
