"""Mods and conversions are undone in any order, and leave nothing."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import mods
from lokakern.conversion import convert
from lokakern.errors import UnsupportedError
from lokakern.nn.linear import Linear
from lokakern.nn.static_handoff import BoundedSequential
from tests.support.routed_layers import ROUTE, is_quantized

SEEDS = (0,)
SEQUENCES = 120


@pytest.fixture(autouse=True)
def quantizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`convert` with a budget quantizes all that it converts, in emulation."""
    monkeypatch.setattr(convert, "routes_of", is_quantized)
    yield


class Tower(nn.Module):
    """Something for each mod: sequences, norms, layers that share an input, an encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(20, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 32), nn.ReLU(),
            nn.LayerNorm(32), nn.Linear(32, 24), nn.BatchNorm1d(24),
        )  # fmt: skip
        self.query, self.key = nn.Linear(24, 32), nn.Linear(24, 32)
        self.attention = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
        self.last = nn.Sequential(nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = torch.stack([self.query(y), self.key(y)], 1)
        return self.last(self.attention(y)[:, 0])  # type: ignore[no-any-return]


def tower() -> Tower:
    torch.manual_seed(0)
    model = Tower()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


State = list[tuple[str, type, list[str], list[str]]]


def state(model: nn.Module) -> State:
    """Names, classes, attributes and children of all modules, in order."""
    return [(name, type(m), sorted(vars(m)), list(m._modules)) for name, m in model.named_modules()]


def sums(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, of evaluation under autocast and without gradients in float32, and gradients."""
    model.zero_grad(set_to_none=True)
    y = run(model, x)
    y.float().sum().backward()
    with torch.no_grad():
        return [y.detach(), model(x), *(p.grad for p in model.parameters() if p.grad is not None)]


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


ACTS: dict[str, Callable[[nn.Module], Any]] = {
    "no bias": lambda m: mods.apply(m, [mods.NoBias()]),
    "norms": lambda m: mods.apply(m, [mods.BlockNorm(16)]),
    "order": lambda m: mods.apply(m, [mods.NormOrder("post")]),
    "swish": lambda m: mods.apply(m, [mods.HardSwish()]),
    "pad": lambda m: mods.apply(m, [mods.Pad(64, 64, most_growth=99.0)]),
    "pad more": lambda m: mods.apply(m, [mods.Pad(48, 48, most_growth=99.0)]),
    "fuse": lambda m: mods.apply(m, [mods.FuseShared()]),
    "wide": lambda m: mods.apply(m, [mods.KeepIntermediates()]),
    "convert": lambda m: lokakern.convert(m, 0.06),
    "another": lambda m: lokakern.convert(m, 0.06),
    "a part": lambda m: lokakern.convert(m, 0.06, filter=lambda _, name: name.startswith("first")),
    "not between": lambda m: lokakern.convert(m, 0.06, between=False),
    "nothing": lambda m: lokakern.convert(m, None),
    "frozen": lambda m: lokakern.convert(m, 0.06, inference=True),
}


@pytest.mark.rest  # a long search
def test_undo_in_any_order_restores_the_class_of_every_layer() -> None:
    """Drawn sequences of mods and conversions; what is refused changes nothing, and waits."""
    x, plain = torch.randn(16, 20), tower()
    expected, before = sums(plain, x), state(plain)
    refused = 0
    for seed in range(SEQUENCES):
        draw = random.Random(seed)
        names = draw.sample(list(ACTS), draw.randint(2, 5))
        model = tower()
        waiting = [(name, ACTS[name](model)) for name in names]
        undone: list[str] = []
        draw.shuffle(waiting)
        while waiting:
            name, one = waiting.pop()
            there = state(model)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    one.undo()
            except UnsupportedError as error:
                assert "undo the later change first" in str(error)
                assert state(model) == there and waiting, names
                refused += 1
                waiting.insert(0, (name, one))
                continue
            undone.append(name)
            one.undo()  # nothing is left to do
            with torch.no_grad():
                assert run(model, x).isfinite().all(), (names, undone)
        assert state(model) == before, (names, undone)
        pairs = zip(sums(model, x), expected, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), (names, undone)
    assert refused


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(60, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 1)
    ).bfloat16()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_layer_uses_the_newest_remaining_conversion(order: tuple[int, ...]) -> None:
    model, x = sequence(), torch.randn(48, 60).bfloat16()
    plain = model(x)
    handles = [lokakern.convert(model, 0.06), lokakern.convert(model[2], None)]
    handles.append(lokakern.convert(model, 0.06, inference=True))
    left = [0, 1, 2]
    for place in order:
        handles[place].undo()
        left.remove(place)
        of_all = [one for one in left if one != 1]
        assert isinstance(model[0], Linear) == bool(of_all)
        assert isinstance(model[2], Linear) == bool(left)
        if left:
            expected = "" if left[-1] == 1 else ROUTE
            assert model[2]._routes[0] == expected
            assert model[2].is_frozen == (left[-1] == 2)
    assert torch.equal(model(x), plain) and state(model) == state(sequence())


def test_a_refresh_counts_as_the_newest() -> None:
    model = sequence()
    one, other = lokakern.convert(model, 0.06), lokakern.convert(model, None)
    assert model[0]._routes[0] == ""
    one.refresh(0.06)
    assert model[0]._routes[0] == ROUTE
    other.undo()
    assert model[0]._routes[0] == ROUTE
    one.undo()
    assert state(model) == state(sequence())


def test_a_sequence_uses_the_handoff_of_the_newest_conversion() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), mods.BlockRMSNorm(32, 16), nn.ReLU(), nn.Linear(32, 16)
    ).bfloat16()
    x = torch.randn(16, 32).bfloat16()
    plain, before = model(x), state(model)
    one = lokakern.convert(model, 0.06)
    handed = model(x)
    assert one.handed_over == ["3"] and type(model) is BoundedSequential
    other = lokakern.convert(model, 0.06, between=False)
    assert one.handed_over == other.handed_over == [] and not torch.equal(model(x), handed)
    other.undo()
    assert one.handed_over == ["3"] and torch.equal(model(x), handed)
    other = lokakern.convert(model, 0.06)
    one.undo()
    assert other.handed_over == ["3"] and torch.equal(model(x), handed)
    other.undo()
    assert torch.equal(model(x), plain) and state(model) == before


def test_a_separately_converted_reader_can_be_undone_separately() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), mods.BlockRMSNorm(32, 16), nn.ReLU(), nn.Linear(32, 16)
    ).bfloat16()
    x = torch.randn(16, 32).bfloat16()
    apart = lokakern.convert(model[3], 0.06)
    rest = lokakern.convert(model, 0.06, filter=lambda _, name: name == "0")
    assert model._handoffs[-1].scales[3]  # its reader has a scale from either conversion
    apart.undo()
    expected = nn.Sequential(*model)(x)
    assert torch.equal(model(x), expected)
    rest.undo()
    assert [type(m) for m in model][::3] == [nn.Linear, nn.Linear]


def test_undoing_padding_removes_the_kernels_for_its_sizes() -> None:
    model, x = sequence(), torch.randn(48, 60).bfloat16()
    plain = model(x)
    report = mods.apply(model, [mods.Pad(16)])
    handle = lokakern.convert(model, 0.06, inference=True)
    assert model[0].padding == (4, 0) and model[0].is_frozen
    with pytest.warns(UserWarning, match="Pad of 0 is undone, but a later conversion"):
        report.undo()
    assert model[0]._routes[0] == "" and not model[0].is_frozen and model[2]._routes[0] == ROUTE
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    first, second = handle.choices[0], handle.choices[3]
    assert first["choice"] == "bf16" and first["k"] == 60 and "a mod was undone" in first["why"]
    assert "a mod was undone" not in second["why"]
    handle.refresh(0.06)
    assert model[0]._routes[0] == ROUTE
    handle.undo()
    assert torch.equal(model(x), plain) and state(model) == state(sequence())


def test_undoing_a_fused_layer_warns_that_its_parts_are_not_quantized() -> None:
    model = tower()
    report = mods.apply(model, [mods.FuseShared()])
    handle = lokakern.convert(model, 0.06)
    assert "fusedlinear_0" in handle.sites
    with pytest.warns(UserWarning, match="FuseShared of fusedlinear_0 is undone"):
        report.undo()
    handle.undo()
    assert state(model) == state(tower())


def test_reports_on_the_same_attribute_are_undone_in_reverse_order() -> None:
    model = sequence()
    one = mods.apply(model, [mods.NoBias(), mods.Pad(16)])
    other = mods.apply(model, [mods.Pad(32)])
    there = state(model)
    with pytest.raises(UnsupportedError, match=r"padding of 0.*undo the later change first"):
        one.undo()
    assert state(model) == there and model[0].bias is None and model[0].padding == (4, 0)
    other.undo()
    one.undo()
    one.undo()
    assert state(model) == state(sequence())


def test_attributes_of_users_are_kept() -> None:
    model = sequence()
    model[0].forward = model[0].forward  # of the object itself
    model[0].mine = 3
    before = state(model)
    mods.apply(model, [mods.Pad(16)]).undo()
    lokakern.convert(model, 0.06).undo()
    assert state(model) == before


def test_a_layer_created_as_lokakern_linear_keeps_its_class() -> None:
    model = nn.Sequential(Linear(20, 16))
    report, handle = mods.apply(model, [mods.Pad(16)]), lokakern.convert(model, 0.06)
    report = mods.apply(model, [mods.Pad(32, most_growth=99.0)])
    handle.undo()
    report.undo()
    assert type(model[0]) is Linear


def test_a_copy_is_not_undone_with_its_original() -> None:
    model, x = sequence(), torch.randn(48, 60).bfloat16()
    handle = lokakern.convert(model, 0.06)
    other = copy.deepcopy(model)
    quantized = other(x)
    lokakern.convert(other, None).undo()
    handle.undo()
    assert torch.equal(other(x), quantized) and not torch.equal(model(x), quantized)


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mod", [mods.MixTokens(), mods.Pad(64, 64, most_growth=99.0)], ids=str)
@pytest.mark.parametrize("is_converted_first", [True, False])
@pytest.mark.parametrize("is_report_first", [True, False])
def test_a_mod_and_a_conversion_of_a_layer_commute(
    mod: mods.Mod, is_converted_first: bool, is_report_first: bool
) -> None:
    model, x = Across(), torch.randn(2, 16, 8)
    plain, before = model(x), state(model)
    acts: list[Any] = [lambda: lokakern.convert(model, None), lambda: mods.apply(model, [mod])]
    done = [act() for act in (acts if is_converted_first else acts[::-1])]
    handle, report = done if is_converted_first else done[::-1]
    assert report.changed and type(model.mix) is Linear and model.mix.is_special
    for one in (report, handle) if is_report_first else (handle, report):
        one.undo()
        if one is report and is_report_first:
            assert isinstance(model.mix, Linear) and not model.mix.is_special
        torch.testing.assert_close(model(x), plain)
    assert torch.equal(model(x), plain) and state(model) == before
