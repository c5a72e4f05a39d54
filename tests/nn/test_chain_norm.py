"""Norms that chains write with a static scale are frozen, and renewed when they are loaded.

Kernels are emulated in torch.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern.nn.chain_norm import (
    MOST_ROWS,
    NORM_BIAS,
    NORM_SCALE,
    NORM_WEIGHT,
    frozen_norms,
    frozen_vectors,
)
from lokakern.nn.chain_plan import ChainLayer, plan_text
from lokakern.nn.crossed_forward import crossed_of
from lokakern.nn.linear import Linear
from lokakern.nn.static_handoff import remove_handoff, set_handoff
from lokakern.norm import norm_named, static_scale
from lokakern.types import Format
from tests.nn.test_chain_call import in_python, warmed
from tests.nn.test_chain_call import warm as warm
from tests.nn.test_routed_chain import (
    GROUP,
    NONE,
    ROW,
    TENSOR,
    chained,
    model_of,
    one_by_one,
    plan_of,
    step,
    steps_run,
)
from tests.support.routed_layers import rows

STEPS = (
    step(0, "torch.quantize_row+torch.norm_emulated_row", (NONE, ROW, TENSOR)),
    step(1, "torch.norm_emulated_row", (ROW, ROW, NONE)),
)
PLAN = plan_of(STEPS, first=1)


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()


def norm_of(kind: str) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(48, eps=1e-5)
    return nn.LayerNorm(48, bias=kind != "layer without bias")


def plan_for(kind: str) -> str:
    first = "bias+rms+affine+relu" if kind == "rms" else "bias+layer+affine+relu"
    return plan_of(STEPS, epilogues=(first, "bias+hardswish"), first=1)


def scale_in(model: nn.Sequential) -> Tensor:
    return getattr(model[0], NORM_SCALE).view(torch.float32)


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
def test_the_scale_is_that_of_the_bound(kind: str, calls: list[Any]) -> None:
    model, plan = model_of(norm_of(kind)), plan_for(kind)
    expected = model[5](steps_run(model, rows(), STEPS, plan))
    assert torch.equal(chained(model, plan)(rows()), expected)
    assert len(calls) == 1
    norm = norm_named("rms" if kind == "rms" else "layer")
    bias = getattr(model[1], "bias", None)
    wanted = static_scale(norm, 48, Format.E4M3FN, model[1].weight, bias)
    assert scale_in(model).shape == (MOST_ROWS, 1)
    assert scale_in(model).unique().item() == pytest.approx(wanted, rel=1e-6)
    assert (NORM_BIAS in model[0]._buffers) == (bias is not None)
    assert not [name for name in model.state_dict() if "chain" in name]


def test_no_output_saturates(calls: list[Any]) -> None:
    """A row of one value that is not 0 comes near the bound."""
    model = chained(model_of(), PLAN)
    most = model[1].weight.abs().argmax()
    y = torch.zeros(4, 48).double()
    y[:, most] = 1e4
    found = copy.deepcopy(model[1]).double()(y).abs().max() / scale_in(model)[0]
    assert 200 < found <= 448.0001


def test_writes_have_no_effect_before_the_norm_is_renewed(calls: list[Any]) -> None:
    model, x = chained(model_of(), PLAN), rows()
    y, scale = model(x), scale_in(model)[0].item()
    places = [getattr(model[0], n).data_ptr() for n in (NORM_WEIGHT, NORM_BIAS, NORM_SCALE)]
    model[1].weight.mul_(8)
    model[1].bias.data.mul_(8)
    assert torch.equal(model(x), y) and scale_in(model)[0].item() == scale
    chained(model, PLAN)  # as a refresh does
    assert scale_in(model)[0].item() == pytest.approx(8 * scale)
    assert not torch.equal(model(x), y)
    assert torch.equal(model(x), model[5](steps_run(model, x, STEPS, PLAN)))
    model[0].renew_chain_weights()
    now = [getattr(model[0], n).data_ptr() for n in (NORM_WEIGHT, NORM_BIAS, NORM_SCALE)]
    assert len(places) == len(now) == 3


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_loading_renews_in_the_same_memory(
    calls: list[Any], is_compiled: bool, assign: bool
) -> None:
    model, other, x = chained(model_of(), PLAN), model_of(), rows()
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    y = run(x)
    for parameter in other.parameters():
        parameter.mul_(3)
    names = (NORM_WEIGHT, NORM_BIAS, NORM_SCALE)
    places = [getattr(model[0], name).data_ptr() for name in names]
    model.load_state_dict(other.state_dict(), assign=assign)
    assert [getattr(model[0], name).data_ptr() for name in names] == places
    expected = other[5](steps_run(other, x, STEPS, PLAN))
    assert torch.equal(run(x), expected) and not torch.equal(expected, y)
    model[1].load_state_dict({"weight": torch.ones(48), "bias": torch.zeros(48)})
    assert not torch.equal(run(x), expected)
    assert torch.equal(model(x), model[5](steps_run(model, x, STEPS, PLAN)))


def test_calls_in_cpp_read_the_copies(calls: list[Any], warm: list[int]) -> None:
    model, x = chained(model_of(), PLAN), rows()
    warmed(model, x, calls=calls)
    y, count = model(x), warm[0]
    assert count and torch.equal(y, in_python(model, x))
    model[1].weight.mul_(8)
    assert torch.equal(model(x), y) and warm[0] == count + 1
    model[0].bias.mul_(2)
    state = model.state_dict()
    model.load_state_dict(state)
    found = model(x)
    assert not torch.equal(found, y) and torch.equal(found, in_python(model, x))


@pytest.mark.parametrize("is_saved", [False, True])
def test_copies_have_norms_of_their_own(calls: list[Any], is_saved: bool) -> None:
    model, x = chained(model_of(), PLAN), rows()
    y = model(x)
    if is_saved:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(model)
    assert torch.equal(other(x), y) and len(calls) == 2
    other.load_state_dict({name: 2 * value for name, value in other.state_dict().items()})
    assert torch.equal(model(x), y) and not torch.equal(other(x), y)
    assert scale_in(other)[0].item() == pytest.approx(2 * scale_in(model)[0].item())
    assert other[0]._chain_norms[0].norm[0] is other[1]


def test_nothing_stays_of_a_removed_chain(calls: list[Any]) -> None:
    model = chained(model_of(), PLAN)
    chained(model, PLAN, "newer")
    remove_handoff(model)
    assert NORM_SCALE in model[0]._buffers and model[1]._load_state_dict_post_hooks
    remove_handoff(model, "newer")
    assert not [name for name in model[0]._buffers if "chain" in name]
    assert not model[1]._load_state_dict_post_hooks and not model[0]._chain_norms


def test_more_rows_than_scales_are_read(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(), rows()
    expected = model[5](steps_run(model, x, STEPS, PLAN))
    chained(model, PLAN)
    short = getattr(model[0], NORM_SCALE)[:3].clone()
    model[0].register_buffer(NORM_SCALE, short, persistent=False)
    assert torch.equal(model(x), expected)


def test_without_the_copies_modules_run_one_by_one(calls: list[Any]) -> None:
    model, x = chained(model_of(), PLAN), rows()
    del model[0]._buffers[NORM_SCALE]
    y = x
    for module in model:
        y = module(y)
    assert torch.equal(model(x), y) and not calls


@pytest.mark.parametrize("between", [NONE, ROW, GROUP])
def test_other_outputs_freeze_no_norm(between: Any) -> None:
    steps = (step(0, "torch.quantize_row+torch.norm_emulated_row", (NONE, ROW, between)),)
    assert not frozen_norms(plan_of(steps))
    assert frozen_norms(PLAN) == ((0, MOST_ROWS),)
    assert not frozen_norms(plan_of(STEPS, epilogues=("bias+layer+relu", "bias")))


def test_rows_are_those_of_the_plan() -> None:
    plan = PLAN.replace(";1:", ",1000=;1:")
    plan = f"{plan.rpartition(';')[0]};1:0="
    assert frozen_norms(plan) == ((0, 999),)


class Called(nn.Module):
    """Layers and norms that a forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act, self.second, self.last, _ = model_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.act(self.norm(self.first(x)))))


def test_norms_that_a_forward_calls_are_frozen(calls: list[Any]) -> None:
    from lokakern.nn.crossed_forward import remove_crosses, set_crosses
    from lokakern.nn.tail import Tail

    model, x = Called(), rows()
    assert isinstance(model.first, Linear)
    sequence = nn.Sequential(model.first, model.norm, model.act, model.second, model.last)
    expected = steps_run(sequence, x, STEPS, PLAN)
    names = ("first", "norm", "act", "second", "last")
    set_crosses(model, [], "key", [Tail(names, "", "", PLAN)])
    assert torch.equal(model(x), expected) and NORM_SCALE in model.first._buffers
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert torch.equal(model(x), steps_run(sequence, x, STEPS, PLAN))
    remove_crosses(model, "key")
    assert crossed_of(model) is None and NORM_SCALE not in model.first._buffers
    assert not model.norm._load_state_dict_post_hooks


def scaled_norm(factor: float) -> nn.LayerNorm:
    norm = nn.LayerNorm(48).bfloat16()
    nn.init.uniform_(norm.weight, factor, 2 * factor)
    return norm


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("calls_it", ["a sequence", "a forward"])
def test_a_norm_that_was_replaced_is_not_read(
    calls: list[Any], is_compiled: bool, calls_it: str
) -> None:
    from lokakern.nn.crossed_forward import set_crosses
    from lokakern.nn.tail import Tail

    x = rows()
    block = nn.Sequential(*model_of()[:3])
    rest = [*model_of()[3:5]]

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block, nn.Sequential(*rest)])

        def forward(self, x: Tensor) -> Tensor:
            for each in self.blocks:
                x = each(x)
            return x

    model: nn.Module
    if calls_it == "a sequence":
        model = nn.Sequential(block, nn.Sequential(*rest))
        leaves = [*block, *rest]
        set_handoff(model, [""] * 5, [""] * 5, "", [PLAN] + [""] * 4, modules=leaves)
    else:
        model = Looped()
        set_crosses(model, [], "key", [Tail(("blocks.0", "blocks.1"), "", "", PLAN)])
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    expected = steps_run(nn.Sequential(*block, *rest), x, STEPS, PLAN)
    assert torch.equal(run(x), expected) and torch.equal(run(x), expected)
    old, count = block[1], len(calls)
    block[1] = scaled_norm(8.0)
    wanted = rest[1](rest[0](torch.relu(block[1](block[0](x)))))
    for _ in range(2):
        assert torch.equal(run(x), wanted)
    model.load_state_dict(model.state_dict())
    assert torch.equal(run(x), wanted) and len(calls) == count
    block[1] = old
    assert torch.equal(run(x), expected)
    block[1] = scaled_norm(4.0)
    assert not torch.equal(run(x), expected) and len(calls) == count + 1
    if calls_it == "a sequence":  # as a refresh does
        set_handoff(model, [""] * 5, [""] * 5, "", [PLAN] + [""] * 4, modules=[*block, *rest])
        expected = steps_run(nn.Sequential(*block, *rest), x, STEPS, PLAN)
        assert torch.equal(run(x), expected) and len(calls) == count + 2


def shared_model() -> tuple[nn.Sequential, str, tuple[Any, ...]]:
    """A layer that two norms follow, and its chain of three layers."""
    torch.manual_seed(0)
    layer, last = Linear(48, 48).bfloat16(), Linear(48, 40).bfloat16()
    model = nn.Sequential(
        layer, scaled_norm(1.0), nn.ReLU(), layer, scaled_norm(8.0), nn.ReLU(), last
    )
    first = "torch.quantize_row+torch.norm_emulated_row"
    steps = (
        step(0, first, (NONE, ROW, TENSOR)),
        step(1, "torch.norm_emulated_row", (ROW, ROW, TENSOR)),
        step(2, "torch.norm_emulated_row", (ROW, ROW, NONE)),
    )
    layers = [
        ChainLayer(48, 48, "bias+layer+affine+relu", 1e-5, ROW),
        ChainLayer(48, 48, "bias+layer+affine+relu", 1e-5, ROW),
        ChainLayer(40, 48, "bias", 1e-5, ROW),
    ]
    segments: list[tuple[int, Any]] = [(0, ()), (1, steps)]
    return model, plan_text(layers, segments, segments), steps


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_norm_behind_a_shared_layer_has_its_copies(
    calls: list[Any], is_compiled: bool
) -> None:
    model, plan, _ = shared_model()
    x = torch.randn(32, 48).bfloat16()
    plain = one_by_one(model, x).float()
    chained(model, plan)
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    y = run(x).float()
    assert calls and 0.01 < ((y - plain).norm() / plain.norm()).item() < 0.1
    assert [scale_of(model[0], norm) for norm in (model[1], model[4])] == pytest.approx(
        [static_scale(norm_named("layer"), 48, Format.E4M3FN, n.weight, n.bias)
         for n in (model[1], model[4])], rel=1e-6
    )  # fmt: skip
    model[4].load_state_dict({"weight": 2 * model[4].weight, "bias": model[4].bias})
    plain, y = one_by_one(model, x).float(), run(x).float()
    assert ((y - plain).norm() / plain.norm()).item() < 0.1
    remove_handoff(model)
    assert not model[1]._load_state_dict_post_hooks and not model[4]._load_state_dict_post_hooks
    assert not [name for name in model[0]._buffers if "chain" in name]


def scale_of(layer: Linear, norm: nn.Module) -> float:
    found = frozen_vectors(layer, norm)
    assert found is not None
    return found[2].view(torch.float32)[0].item()


def test_another_sequence_drops_no_norm_of_a_chain(calls: list[Any]) -> None:
    """Layers of an inner sequence that a chain of the outer one runs."""
    inner, rest = nn.Sequential(*model_of()[:3]), [*model_of()[3:5]]
    model, x = nn.Sequential(inner, *rest), rows()
    expected = steps_run(nn.Sequential(*inner, *rest), x, STEPS, PLAN)
    none = [""] * 3
    set_handoff(inner, none, none, "key", ["", "", ""])
    leaves = [*inner, *rest]
    set_handoff(model, [""] * 5, [""] * 5, "key", [PLAN] + [""] * 4, modules=leaves)
    remove_handoff(inner, "key")
    assert torch.equal(model(x), expected) and len(calls) == 1
    other = copy.deepcopy(model)
    remove_handoff(model, "key")
    assert not inner[0]._chain_norms and "_held_norms" not in vars(model)
    remove_handoff(other, "key")
    assert not other[0][0]._chain_norms and not other[0][1]._load_state_dict_post_hooks


def test_a_layer_of_a_block_is_told_as_often_as_it_is_called() -> None:
    from lokakern.nn.tail import Tail

    layer = Linear(48, 48)
    block = nn.Sequential(nn.Sequential(layer, nn.ReLU()), layer, nn.ReLU())
    block[0].register_forward_hook(lambda *_: None)
    assert Tail(("block",), "", "", PLAN).layers({"block": block}) == [layer, layer]
