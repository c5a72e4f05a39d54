"""Modules of torch that read parameters of their children: mods and `convert` inside of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lokakern
from lokakern import mods
from lokakern.conversion import convert
from lokakern.nn.linear import Linear
from lokakern.nn.raw_product import RawProduct
from lokakern.nn.torch_owners import NEVER_CALLED
from lokakern.probe.report import ProbeReport
from lokakern.types import ErrorBudget
from tests.support.routed_layers import ROUTE, is_quantized

SEEDS = (0,)
WIDTH = 32
MODES = ((True, True), (False, True), (False, False))  # training, gradients


class Attending(nn.Module):
    """`nn.MultiheadAttention` in a module of somebody."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


class Decoding(nn.Module):
    """`nn.TransformerDecoderLayer` with its input for memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 48, 0.0, **options)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.layer(x, x)  # type: ignore[no-any-return]


def layer_of(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, **options)


def owner(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "attention":
        model: nn.Module = Attending(options["batch_first"])
    elif kind == "decoder layer":
        model = Decoding(**options)
    elif kind == "encoder layer":
        model = layer_of(**options)
    else:
        is_nested = options["batch_first"] and not options["norm_first"]
        model = nn.TransformerEncoder(layer_of(**options), 2, enable_nested_tensor=is_nested)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bias" in name or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)  # torch makes them 0 and 1
    return model


@pytest.fixture
def quantizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`convert` with a budget quantizes all that it converts, in emulation."""
    monkeypatch.setattr(convert, "routes_of", is_quantized)
    yield


def padding_mask(x: Tensor, batch_first: bool) -> Tensor:
    mask = torch.zeros(x.shape[:2] if batch_first else x.shape[1::-1], dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def outputs(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Training, evaluation, and evaluation without gradients, each without and with a mask."""
    found = []
    for is_training, has_gradients in MODES:
        model.train(is_training)
        with torch.set_grad_enabled(has_gradients):
            found.append(model(x, **options).detach())
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(model: nn.Module, x: Tensor, batch_first: bool) -> Tensor:
    """All modes compute the same, what the children do; returns it."""
    # Attention has a fast path of its own, and FP8 makes more of how that rounds.
    limit = 0.02 if x.dtype is torch.bfloat16 else 1e-6
    expected = [y.clone() for y in outputs(model, x)]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        called = outputs(model, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    for one, other in itertools.product(expected, called):
        assert one.dtype == other.dtype
        assert error(one, other) < limit
    mask = padding_mask(x, batch_first)
    keep = ~mask if batch_first else ~mask.t()
    first, *others = outputs(model, x, src_key_padding_mask=mask)
    for one in others:  # what is masked may be zeros
        assert error(one[keep], first[keep]) < limit
    return called[0]


def sites_of(model: nn.Module) -> list[nn.Module]:
    """Converted layers and products that a model calls; `Attending` passes one tensor."""
    found = [m for m in model.modules() if isinstance(m, Linear | RawProduct)]
    is_one = isinstance(model, Attending)
    return [m for m in found if not (is_one and isinstance(m, RawProduct) and m.matrix.rows)]


KINDS = ["encoder layer", "encoder", "decoder layer", "attention"]
EVERY: dict[str, list[Any]] = {
    "NoBias": [mods.NoBias(keep=())], "BlockNorm": [mods.BlockNorm(16)],
    "Pad": [mods.Pad(32, 32, most_growth=99.0)], "HardSwish": [mods.HardSwish()],
    "pre": [mods.NormOrder("pre")], "post": [mods.NormOrder("post")],
    "HighResidual": [mods.HighResidual()], "KeepIntermediates": [mods.KeepIntermediates()],
    "MixTokens": [mods.MixTokens()], "FuseShared": [mods.FuseShared()],
    "BatchEqual": [mods.BatchEqual()],
    "all": [mods.NormOrder("pre"), mods.NoBias(), mods.BlockNorm(16), mods.Pad(32, 32)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    # Attention alone has no residual.
    [case for case in itertools.product(KINDS, EVERY) if case != ("attention", "HighResidual")],
)
def test_a_changed_encoder_computes_the_same_in_each_mode(kind: str, name: str) -> None:
    for batch_first, norm_first in itertools.product((True, False), repeat=2):
        model = owner(kind, batch_first=batch_first, norm_first=norm_first)
        plain, x = copy.deepcopy(model), torch.randn(3, 6, WIDTH)
        state = {name: dict(vars(m)) for name, m in model.named_modules()}
        report = mods.apply(model, EVERY[name])
        y = check(model, x, batch_first)
        if report.is_exact:
            torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-5)
        elif report.changed and name != "HighResidual":  # which changes bfloat16 only
            assert not torch.allclose(y, plain(x), atol=1e-3)
        report.undo()
        model.train()
        assert torch.equal(model(x), plain(x))
        for place, module in model.named_modules():
            assert vars(module).keys() == state[place].keys()
            assert type(module) is type(plain.get_submodule(place))
        assert fast_paths(model) == fast_paths(plain)


def fast_paths(model: nn.Module) -> list[tuple[Any, Any]]:
    words = ("activation_relu_or_gelu", "use_nested_tensor")
    return [tuple(getattr(m, word, None) for word in words) for m in model.modules()]  # type: ignore[misc]


@pytest.mark.parametrize("activation", [nn.SiLU(), functional.silu, nn.GELU()])
def test_an_activation_is_replaced_in_each_mode(activation: Any) -> None:
    model = layer_of(batch_first=True, activation=activation)
    report = mods.apply(model, [mods.HardSwish()])
    assert bool(report.changed) == (not isinstance(activation, nn.GELU))
    check(model, torch.randn(3, 6, WIDTH), True)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_converted_layers_run_in_each_mode(
    quantizing: None, monkeypatch: pytest.MonkeyPatch, kind: str, inference: bool
) -> None:
    called: set[int] = set()
    for each in (Linear, RawProduct):
        real: Callable[..., Any] = each.forward

        def spy(self: nn.Module, *arguments: Any, real: Any = real, **options: Any) -> Tensor:
            called.add(id(self))
            return real(self, *arguments, **options)

        monkeypatch.setattr(each, "forward", spy)
    for batch_first, norm_first in itertools.product((True, False), repeat=2):
        model = owner(kind, batch_first=batch_first, norm_first=norm_first).bfloat16()
        plain, x = copy.deepcopy(model), torch.randn(3, 6, WIDTH).bfloat16()
        handle = lokakern.convert(model, 0.06, inference=inference)
        assert all(site.module._routes[0] == ROUTE for site in handle.sites.values())
        found, wanted = check(model, x, batch_first), plain(x)
        assert 0.003 < error(found, wanted.detach()) < 0.1
        for one in (model, copy.deepcopy(model)):
            for is_training, has_gradients in MODES:
                called.clear()
                with torch.set_grad_enabled(has_gradients):
                    one.train(is_training)(x)
                assert called == {id(site) for site in sites_of(one)}
        assert not handle.skipped
        handle.refresh(None)
        handle.refresh(0.06)
        assert torch.equal(check(model, x, batch_first), found)
        handle.undo()
        assert fast_paths(model) == fast_paths(plain)
        for one, other in zip(outputs(model, x), outputs(plain, x), strict=True):
            assert torch.equal(one, other)


def test_the_fast_path_is_disabled_and_enabled_again(
    quantizing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder with converted layers calls them, and does not pack padded sequences."""
    taken: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask"):
        real: Callable[..., Any] = getattr(torch, name)

        def spy(*arguments: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            taken.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(torch, name, spy)
    model = owner("encoder", batch_first=True, norm_first=False).bfloat16().eval()
    x = torch.randn(3, 6, WIDTH).bfloat16()
    mask = padding_mask(x, True)

    @torch.no_grad()
    def run() -> list[str]:
        taken.clear()
        model(x, src_key_padding_mask=mask)
        return sorted(set(taken))

    usual = ["_nested_tensor_from_mask", "_transformer_encoder_layer_fwd"]
    assert run() == usual
    one = lokakern.convert(model, 0.06, filter=lambda module, name: name == "layers.1.linear2")
    assert len(one) == 1 and run() == ["_transformer_encoder_layer_fwd"]  # of the first layer
    other = lokakern.convert(model, 0.06, filter=lambda module, name: "in_proj" in name)
    assert len(other) == 2 and run() == []
    other.undo()
    report = mods.apply(model, [mods.BlockNorm(16)])
    assert run() == []
    one.undo()
    assert run() == []
    report.undo()
    assert run() == usual
    model.layers[0].activation_relu_or_gelu = 0  # by its owner's will
    one = lokakern.convert(model, 0.06)
    one.undo()
    assert model.layers[0].activation_relu_or_gelu == 0


def test_biases_that_attention_reads_stay_with_a_reason() -> None:
    model = owner("attention", batch_first=True)
    report = mods.apply(model, [mods.NoBias(keep=()), mods.Pad(64, 64, most_growth=99.0)])
    left = [(c.mod, c.site) for c in report if not c.is_done and c.effect == NEVER_CALLED]
    assert left == [("NoBias", "attention.out_proj"), ("Pad", "attention.out_proj")]
    assert model.attention.out_proj.bias is not None and model.head.bias is None


def test_a_replaced_out_proj_is_a_product_of_the_attention(quantizing: None) -> None:
    model = owner("attention", batch_first=True)
    model.attention.out_proj = nn.Linear(WIDTH, WIDTH)
    handle = lokakern.convert(model, 0.06)
    assert isinstance(handle.sites["attention.out_proj"].module, RawProduct)
    assert type(model.attention.out_proj) is nn.Linear
    assert not handle.skipped


def test_a_layer_without_biases_keeps_its_switches() -> None:
    """torch itself has no fast path for it: nothing is remembered in it."""
    model = nn.TransformerEncoderLayer(WIDTH, 4, 48, bias=False, batch_first=True)
    before = set(vars(model))
    mods.apply(model, [mods.NoBias()])
    assert model.activation_relu_or_gelu == 1 and set(vars(model)) == before


def test_the_fast_path_does_not_read_offloaded_weights(quantizing: None) -> None:
    model = owner("encoder layer", batch_first=True, norm_first=False).bfloat16().eval()
    x = torch.randn(3, 6, WIDTH).bfloat16()
    lokakern.convert(model, 0.06, inference=True)
    with torch.no_grad():
        before = model(x)
        for layer in (model.linear1, model.linear2):
            assert isinstance(layer, Linear) and layer.is_frozen
            layer.weight.data = torch.full_like(layer.weight, float("nan"))
            layer.is_offloaded = True
            layer.changed()
        assert torch.equal(model(x), before)


# ---- products of torch's own modules ----


class Everything(nn.Module):
    """One of each module of torch that holds a parameter of two axes or more."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.same = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.other = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
        self.bilinear = nn.Bilinear(4, 5, 6)
        self.rnn = nn.LSTM(4, 5, proj_size=3)
        self.gru = nn.GRUCell(4, 5)
        self.point, self.window = nn.Conv1d(4, 6, 1), nn.Conv2d(4, 6, 3)
        self.back = nn.ConvTranspose1d(4, 6, 2)
        self.table, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)
        self.norm, self.scale = nn.LayerNorm((3, 4)), nn.PReLU(4)
        self.lazy = nn.LazyConv1d(6, 1)


def test_products_of_torchs_own_modules_are_named() -> None:
    found = lokakern.convert(Everything(), None).skipped
    assert found.pop("same.out_proj") == NEVER_CALLED
    expected = {
        "same.in_proj_weight": "a MultiheadAttention holds [24, 8]",
        "bilinear.weight": "a Bilinear holds [6, 4, 5]",
        "rnn.weight_ih_l0": "a LSTM holds [20, 4]", "rnn.weight_hh_l0": "a LSTM holds [20, 3]",
        "rnn.weight_hr_l0": "a LSTM holds [3, 5]",
        "gru.weight_ih": "a GRUCell holds [15, 4]", "gru.weight_hh": "a GRUCell holds [15, 5]",
        "point.weight": "a Conv1d holds [6, 4, 1]", "window.weight": "a Conv2d holds [6, 4, 3, 3]",
        "back.weight": "a ConvTranspose1d holds [4, 6, 2]",
        "lazy.weight": "a LazyConv1d holds a parameter that is not initialized",
        "lazy.bias": "a LazyConv1d holds a parameter that is not initialized",
    }  # fmt: skip
    assert {name: why.partition(";")[0] for name, why in found.items()} == expected


def test_products_without_autograd_nodes_are_also_reported() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.bilinear = nn.LSTM(8, 8, batch_first=True), nn.Bilinear(8, 8, 4)
            self.window, self.head = nn.Conv1d(4, 6, 1), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.rnn(x)[0]
            return self.head(self.window(self.bilinear(y, y).mT).mT)  # type: ignore[no-any-return]

    model = Model()
    with lokakern.Probe(model, every=1) as probe:
        model(torch.randn(5, 3, 8)).sum().backward()
    report = ProbeReport([], ErrorBudget(row_err=0.06), None, unseen=probe.unseen())
    found = lokakern.convert(model, report).skipped
    names = ("rnn.weight_ih_l0", "rnn.weight_hh_l0", "bilinear.weight", "window.weight")
    assert set(found) == set(names)
    assert found["window.weight"].startswith("1 product with this parameter")
