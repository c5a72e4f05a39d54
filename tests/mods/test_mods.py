"""Mods: exact ones keep the results of a model, others change them as documented; all undo."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import lokakern
from lokakern import mods
from lokakern.errors import (
    FormatError,
    LokakernError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.mods.editor import Editor
from lokakern.mods.together import FusedLinear
from lokakern.nn.linear import Linear
from lokakern.nn.module_scan import INNER, inner_layers
from lokakern.norm import norm_named, normalize
from tests.support.exact_models import passed, whole, with_whole_weights
from tests.support.routed_layers import same

SEEDS = (0,)


class Tower(nn.Module):
    """Layers that share an input, equal ones that do not, and a residual, as in attention."""

    def __init__(self, bias: bool = True, activation: Any = functional.silu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(24, 16, bias), nn.Linear(24, 8, bias)
        self.experts = nn.ModuleList(nn.Linear(12, 20, bias) for _ in range(3))
        self.mix = nn.Sequential(nn.Linear(60, 24, bias), nn.SiLU(), nn.LayerNorm(24))
        self.head = nn.Linear(24, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.query(x), self.key(x)], -1)
        y = [layer(both[..., 4 * i : 4 * i + 12]) for i, layer in enumerate(self.experts)]
        x = x + self.mix(self.activation(torch.cat(y, -1)))
        return self.head(x)  # type: ignore[no-any-return]


EXACT = [
    mods.Pad(16, most_growth=99.0),
    mods.Pad(k=16, n=1, most_growth=2.0),
    mods.FuseShared(),
    mods.BatchEqual(),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mod", EXACT, ids=str)
def test_exact_mods_are_exact(mod: mods.Mod, bias: bool) -> None:
    """Bit-identical in float64 on integers, gradients too."""
    model = with_whole_weights(Tower(bias, functional.relu))
    model.mix = model.mix[0]  # no norm: its quotients round
    x = whole(2, 7, 24)
    expected, keys = passed(model, x), list(model.state_dict())
    report = mods.apply(model, [mod])
    assert report.changed and report.is_exact
    assert same(passed(model, x), expected)
    assert list(model.state_dict()) == keys
    assert same(passed(copy.deepcopy(model), x), expected)
    empty = model(x[:, :0])
    assert empty.shape == (2, 0, 1)
    report.undo()
    assert same(passed(model, x), expected)
    assert [type(m) for m in model.modules()] == [type(m) for m in with_whole_relu(bias).modules()]


def with_whole_relu(bias: bool) -> nn.Module:
    model = Tower(bias, functional.relu)
    model.mix = model.mix[0]
    return model


def test_exact_mods_keep_nonfinite_values_in_their_rows() -> None:
    model = Tower(activation=functional.relu).double()
    x = whole(6, 24)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    expected = model(x)
    mods.apply(model, [mods.FuseShared(), mods.BatchEqual(), mods.Pad(16)])
    found = model(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found, expected, equal_nan=True, rtol=1e-12)


def test_fused_and_batched_layers_compile_as_one_graph_and_train() -> None:
    torch._dynamo.reset()
    model = Tower(activation=functional.relu)
    expected = [passed(model, whole(5, 24).float())]
    mods.apply(model, [mods.FuseShared(), mods.BatchEqual()])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected.append(passed(model, whole(5, 24).float()))
    found = passed(compiled, whole(5, 24).float())
    for case in expected:
        assert all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, case, strict=True)
        )


def test_layers_with_a_shared_input_become_one_site() -> None:
    model = Tower(activation=functional.relu)
    report = mods.apply(model, [mods.FuseShared()])
    assert [(c.before, c.site) for c in report.changed] == [("query, key", "fusedlinear_0")]
    fused = model.fusedlinear_0
    assert isinstance(fused, FusedLinear) and fused.product_shape()[:3] == (24, 24, True)
    handle = lokakern.convert(model, 0.06)
    assert "fusedlinear_0" in handle.sites and "query" in handle.skipped
    assert "a part of another layer" in handle.skipped["query"]
    assert "2 layers, k=24, n=24, output=bf16" in repr(model)


ROUTE = "row;16:0=cuda.quantize_row+cuda.scaled_gemm_row;1:0=cuda.quantize_row+cuda.scaled_gemm_row"


@pytest.mark.parametrize("mod", [mods.FuseShared(), mods.Pad(16, most_growth=9.0)], ids=str)
def test_exact_mods_do_not_change_quantized_results(mod: mods.Mod) -> None:
    """Bit-identical: each row of a weight has its own scale, and zeros change none."""
    model = Tower(activation=functional.relu).bfloat16()
    x = torch.randn(6, 24).bfloat16()
    expected = []
    for layer in (model.query, model.key):
        routed = Linear(24, layer.out_features, dtype=torch.bfloat16)
        routed.load_state_dict(layer.state_dict())
        routed.take_routes((ROUTE, ROUTE, ""), routed.weight)
        expected.append(passed(routed, x))
    mods.apply(model, [mod])
    fused = getattr(model, "fusedlinear_0", None)
    sites = [model.query, model.key] if fused is None else [fused]
    for site in sites:
        site.take_routes((ROUTE, ROUTE, ""), None)
    outputs = sites[0](x) if len(sites) == 1 else [site(x) for site in sites]
    assert same(list(outputs), [case[0] for case in expected])
    sum(y.sum() for y in outputs).backward()
    assert torch.equal(model.query.weight.grad, expected[0][2])
    assert torch.equal(model.key.bias.grad, expected[1][3])
    with torch.no_grad():
        for site in sites:
            site.freeze()
        model.query.weight.zero_()
        frozen = sites[0](x) if len(sites) == 1 else [site(x) for site in sites]
    assert same(list(frozen), [case[0] for case in expected])


@pytest.mark.parametrize(
    ("route", "kept"),
    [("", ["held_weight"]), (ROUTE, ["fp8_data", "fp8_scale"])],
    ids=["bf16", "fp8"],
)
def test_a_frozen_fused_layer_keeps_the_weights_of_its_parts(route: str, kept: list[str]) -> None:
    model = Tower(activation=functional.relu).bfloat16()
    x = torch.randn(6, 24).bfloat16()
    mods.apply(model, [mods.FuseShared()])
    fused = model.fusedlinear_0
    fused.take_routes((route, "", ""), None)
    with torch.no_grad():
        expected = fused(x)
        fused.freeze()
        assert [name for name, _ in fused.named_buffers()] == kept
        model.query.weight.zero_()
        assert same([*fused(x)], [*expected])
        twice = {name: 2 * value for name, value in model.state_dict().items()}
        model.load_state_dict(twice)
        frozen = fused(x)
        fused.take_routes((route, "", ""), None)
        assert not list(fused.buffers())
        assert same([*frozen], [*fused(x)]) and not torch.equal(frozen[1], expected[1])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(51, 16, bias=False), nn.Linear(51, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.query(x), self.key(x)], -1)


@pytest.mark.parametrize("route", ["", ROUTE], ids=["bf16", "fp8"])
def test_a_frozen_fused_layer_can_be_sharded_and_loaded(route: str) -> None:
    model, x = Pair().bfloat16(), torch.randn(6, 51).bfloat16()
    mods.apply(model, [mods.FuseShared()])
    fused = model.fusedlinear_0
    fused.take_routes((route, "", ""), None)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            fused.freeze()
            expected = model(x)
            fully_shard(model)
            assert torch.equal(model(x), expected)
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
            assert torch.equal(model(x), 2 * expected)
            # Each rank has its own rows of an unquantized weight now.
            assert len(list(fused.buffers())) == (2 if route else 0)
    finally:
        distributed.destroy_process_group()


def test_a_frozen_bfloat16_fused_layer_does_not_read_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Tower(activation=functional.relu).bfloat16()
    mods.apply(model, [mods.FuseShared()])
    lokakern.convert(model, None, inference=True)
    x = torch.randn(6, 24).bfloat16()
    expected = model(x).detach()
    monkeypatch.delattr(FusedLinear, "weight")
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with pytest.raises(AttributeError, match="weight"):
        model(x)  # gradients need the parts


def test_only_independent_layers_are_batched() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.c(z)  # type: ignore[no-any-return]

    model = Chain()
    x, z = torch.randn(2, 4, 8)
    expected = model(x, z)
    report = mods.apply(model, [mods.BatchEqual()])
    assert [c.before for c in report.changed] == ["a, c"]
    assert torch.allclose(model(x, z), expected, atol=1e-6)
    assert torch.allclose(
        model(x, z[:1].expand(4, 8)), model.b(model.a(x)) + model.c(z[:1]), atol=1e-6
    )
    assert torch.allclose(model(x, z[:1]), model.b(model.a(x)) + model.c(z[:1]), atol=1e-6)


def test_a_forward_that_cannot_be_traced_is_left_alone() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)  # type: ignore[no-any-return]

    class Dropping(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.a(x) + self.b(x), 0.5, self.training)

    for model, why in (
        (Branching(), "torch.fx cannot trace it"),
        (Dropping(), "whether it trains"),
    ):
        report = mods.apply(model, [mods.FuseShared()])
        assert not report.changed and why in report[0].effect
        assert "forward" not in vars(model) and model.training


class Shared(nn.Module):
    """Two layers whose input each forward reads in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 8), nn.Linear(24, 16)

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(y)], -1)


class ByKey(Shared):
    def forward(self, batch: Any) -> Tensor:
        return self.both(batch["x"], batch["x"])


class ByPath(Shared):
    def forward(self, batch: Any) -> Tensor:
        return self.both(batch["all"][1], batch["all"][1])


class Unpacked(Shared):
    def forward(self, xs: Any) -> Tensor:
        x, _ = xs
        return self.both(x, x)


class Concatenated(Shared):
    def forward(self, xs: Any) -> Tensor:
        x = torch.cat(xs, -1)
        return self.both(x, x)


X24 = torch.arange(48.0).reshape(2, 24).sin()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ByKey, {"x": X24}), (ByPath, {"all": [X24 + 1, X24]}), (Unpacked, (X24, X24 + 1)),
        (Concatenated, [X24[:, :10], X24[:, 10:]]),
    ],
)  # fmt: skip
def test_inputs_in_lists_and_dictionaries_are_shared(kind: type[Shared], given: Any) -> None:
    model = kind()
    expected = model(given)
    (change,) = mods.apply(model, [mods.FuseShared()]).changed
    assert change.before == "a, b"
    assert torch.allclose(model(given), expected, atol=1e-6)


class OtherItems(Shared):
    def forward(self, xs: Any) -> Tensor:
        return self.both(xs[0], xs[1])


def by_method(x: Tensor) -> None:
    x.add_(1)


def by_item(x: Tensor) -> None:
    x[0] = 1.0


def by_out(x: Tensor) -> None:
    torch.add(x, 1, out=x)


def by_option(x: Tensor) -> None:
    functional.relu(x, True)


def by_view(x: Tensor) -> None:
    view = x.view(-1)
    view *= 2


@pytest.mark.parametrize("mod", [mods.FuseShared(), mods.BatchEqual()], ids=str)
@pytest.mark.parametrize("write", [by_method, by_item, by_out, by_option, by_view])
def test_what_is_written_between_two_calls_is_read_by_the_second(
    write: Callable[[Tensor], None], mod: mods.Mod
) -> None:
    """`FuseShared` multiplied the second layer by the input as it was before."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 8), nn.Linear(24, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            write(x)
            return y + self.b(x)  # type: ignore[no-any-return]

    model = Writing()
    with torch.no_grad():
        expected = model(X24.clone())
        mods.apply(model, [mod])
        assert torch.equal(model(X24.clone()), expected)


def test_different_items_are_not_shared_and_loops_say_what_to_do() -> None:
    class Looping(Shared):
        def forward(self, xs: Any) -> Any:
            return [self.both(x, x) for x in xs]

    class Counting(Shared):
        def forward(self, xs: Any) -> Any:
            return self.both(xs[0], xs[0]) if len(xs) > 1 else None

    assert not mods.apply(OtherItems(), [mods.FuseShared()]).changed
    for model, why in (
        (Looping(), "unpack it (x, y = xs)"),
        (Counting(), "the length of an input"),
    ):
        (change,) = mods.apply(model, [mods.FuseShared()])
        assert not change.is_done and why in change.effect


# ---- mods that change results ----


def test_no_bias_keeps_the_bias_of_the_prediction_layer() -> None:
    model = Tower()
    with torch.no_grad():
        model.key.bias.zero_()
    report = mods.apply(model, [mods.NoBias()])
    left = [name for name, m in model.named_modules() if getattr(m, "bias", None) is not None]
    assert left == ["mix.2", "head"]  # a norm is no linear layer
    exact = {c.site: c.is_exact for c in report.changed}
    assert exact["key"] and not exact["query"] and not report.is_exact
    assert [c.site for c in report if not c.is_done] == ["head"]
    x = torch.randn(3, 24)
    plain = Tower()
    report.undo()
    with torch.no_grad():
        plain.key.bias.zero_()
    assert torch.equal(model(x), plain(x))
    mods.apply(model, [mods.NoBias(keep=("query", "head"))])
    assert model.query.bias is not None and model.mix[0].bias is None
    with pytest.raises(UnknownNameError, match=r"keep names nobody; linear layers are query, key"):
        mods.apply(model, [mods.NoBias(keep=("nobody",))])


def test_no_bias_ignores_a_batch_norm_of_another_axis() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(5), nn.Linear(6, 1))
    report = mods.apply(model, [mods.NoBias()])
    assert "batch norm" not in report[0].effect
    model(torch.randn(3, 5, 8))


def test_a_batch_norm_without_a_bias_refuses_another_axis() -> None:
    """With as many channels as columns, sizes do not show the axis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    nn.init.normal_(model[0].bias)
    rows, tokens = torch.randn(64, 16), torch.randn(64, 8, 16)
    model(rows)
    model.eval()
    expected = model(rows), model(tokens)
    report = mods.apply(model, [mods.NoBias()])
    assert report[0].is_exact
    torch.testing.assert_close(model(rows), expected[0])
    torch.testing.assert_close(torch.compile(model, backend="eager")(rows), expected[0])
    for is_training in (True, False):
        with pytest.raises(ShapeError, match=r"after '0' got \[64, 8, 8\]; NoBias removed"):
            model.train(is_training)(tokens)
    report.undo()
    for x, y in zip((rows, tokens), expected, strict=True):
        torch.testing.assert_close(model(x), y)
    assert type(model[1]) is nn.BatchNorm1d and "layer" not in vars(model[1])
    report = mods.apply(model, [mods.NoBias(keep=("0", "3"))])  # as the error says
    torch.testing.assert_close(model(tokens), expected[1])


def test_no_bias_is_not_exact_where_the_batch_norm_keeps_the_bias() -> None:
    """A layer with a norm and an activation after its bias, and a layer with a hook."""
    hooked = nn.Linear(8, 6)
    hooked.register_forward_hook(lambda module, args, output: output.relu())
    for layer in (lokakern.LinearNormAct(8, 6), hooked):
        model = nn.Sequential(layer, nn.BatchNorm1d(6), nn.Linear(6, 1))
        nn.init.normal_(layer.bias)
        report = mods.apply(model, [mods.NoBias()])
        assert layer.bias is None and not report[0].is_exact
        assert type(model[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("train", [True, False])
def test_no_bias_is_exact_before_a_batch_norm(train: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
    x = torch.randn(32, 8, dtype=torch.float64)
    for _ in range(3):  # running statistics
        model(x)
    with torch.no_grad():
        model[0].bias.mul_(100.0)
    model(x)
    other = copy.deepcopy(model)
    report = mods.apply(other, [mods.NoBias()])
    assert report.is_exact and other[0].bias is None and "batch norm" in report[0].effect
    for one in (model, other):
        one.train(train)
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    for _ in range(2):
        close(other(x), model(x))
    close(other.eval()(x), model.eval()(x))  # as running statistics are by now
    report.undo()
    close(other(x), model(x))


def test_batch_norms_and_calls_of_silu_are_left_alone_with_a_reason() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.silu(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Gate())
    report = mods.apply(model, [mods.BlockNorm(4), mods.HardSwish()])
    assert [(c.site, c.is_done, c.effect) for c in report] == [
        ("1", False, "it does not normalize rows"), ("2", False, "its forward itself calls silu"),
    ]  # fmt: skip


@pytest.mark.parametrize(("columns", "block"), [(512, 256), (24, 256), (24, 8), (1, 1)])
def test_block_norm_equals_block_rms_of_gemm_norm(columns: int, block: int) -> None:
    model = nn.Sequential(nn.LayerNorm(columns, eps=1e-3), nn.RMSNorm(columns))
    mods.apply(model, [mods.BlockNorm(block)])
    x = torch.randn(5, columns)
    x[1] = 0.0
    x[2, 0] = float("nan")
    for norm, eps in zip(model, (1e-3, 1e-5), strict=True):
        assert isinstance(norm, mods.BlockRMSNorm) and norm.eps == eps
        exact = normalize(x.double(), norm_named(f"block_rms({min(block, columns)})", eps))
        torch.testing.assert_close(norm(x).double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
        for dtype in (torch.bfloat16, torch.float64):
            y = norm(x.to(dtype))
            assert y.dtype == dtype and (y[1] == 0).all()
        if columns <= 24:
            row = torch.randn(2, columns).double().requires_grad_()
            assert torch.autograd.gradcheck(norm, row)


def test_probe_finds_the_block_norm_of_a_site() -> None:
    model = nn.Sequential(nn.Linear(24, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    mods.apply(model, [mods.BlockNorm(8)])
    with lokakern.Probe(model) as probe:
        model(torch.randn(32, 24)).sum().backward()
    assert {name: site.norm for name, site in probe.sites().items()} == {
        "0": "block_rms(8)", "2": "",
    }  # fmt: skip


def test_block_norm_leaves_norms_that_blocks_do_not_divide() -> None:
    model = nn.Sequential(nn.LayerNorm(24), nn.LayerNorm((4, 6)), nn.RMSNorm(16))
    report = mods.apply(model, [mods.BlockNorm(16)])
    assert [c.is_done for c in report] == [False, False, True]
    assert "16 does not divide its 24 columns" in report[0].effect
    assert "more than one axis" in report[1].effect
    with pytest.raises(ShapeError, match="block is 0"):
        mods.apply(model, [mods.BlockNorm(0)])
    report = mods.apply(nn.LayerNorm(8), [mods.BlockNorm(8)])
    assert "it is the model itself" in report[0].effect


def test_hard_swish_differs_by_at_most_its_documented_bound() -> None:
    x = torch.linspace(-20, 20, 400001).double()
    difference = (functional.hardswish(x) - functional.silu(x)).abs()
    assert difference.max() < 0.143 and abs(abs(x[difference.argmax()]) - 3) < 1e-3
    model = Tower()
    report = mods.apply(model, [mods.HardSwish()])
    assert isinstance(model.mix[1], nn.Hardswish) and model.activation is functional.hardswish
    assert [c.site for c in report] == [".activation", "mix.1"]
    report.undo()
    assert isinstance(model.mix[1], nn.SiLU) and model.activation is functional.silu


def test_moved_norms_keep_their_names() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.LayerNorm(4)
    )
    keys, x = list(model.state_dict()), torch.randn(3, 8)
    linear, relu, norm, last, end = model
    before = model(x)
    report = mods.apply(model, [mods.NormOrder("post")])
    assert torch.equal(model(x), end(last(relu(norm(linear(x))))))
    assert sorted(model.state_dict()) == sorted(keys) and model.get_submodule("2") is norm
    report.undo()
    assert torch.equal(model(x), before)
    square = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    report = mods.apply(square, [mods.NormOrder("pre")])
    a, b = square.get_submodule("0"), square.get_submodule("1")
    assert torch.equal(square(x), a(b(x)))
    report = mods.apply(nn.Sequential(last, end), [mods.NormOrder("pre")])
    assert "8 inputs and 4 outputs" in report[0].effect and not report.changed
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    mods.apply(layer, [mods.NormOrder("pre")])
    assert layer.norm_first
    with pytest.raises(UnknownNameError, match="order is 'before'; expected 'pre' or 'post'"):
        mods.apply(model, [mods.NormOrder("before")])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * 0.05
        return x


def test_a_float32_residual_has_smaller_errors() -> None:
    model = Blocks()
    x = torch.randn(64, 16)
    exact = copy.deepcopy(model).double()(x.double())

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x.bfloat16())
        return float(((y.double() - exact).norm() / exact.norm()).detach())

    before = error()
    report = mods.apply(model, [mods.HighResidual(("blocks.*",))])
    assert len(report.changed) == 40 and error() < 0.5 * before
    report.undo()
    assert error() == before
    with pytest.raises(UnknownNameError, match="no module is a transformer layer"):
        mods.apply(model, [mods.HighResidual()])
    with pytest.raises(FormatError, match=r"parameters of blocks\.0 are torch\.bfloat16"):
        mods.apply(model.bfloat16(), [mods.HighResidual(("blocks.*",))])
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert len(mods.apply(layer, [mods.HighResidual()]).changed) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 2, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("half", "least", "most"), [(torch.bfloat16, 0.1, 0.02), (torch.float16, 0.01, 1e-4)]
)
def test_float32_sums_are_exact_before_a_norm_with_a_large_mean(
    half: torch.dtype, least: float, most: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight.add_(3.0)
        model[0].weight.copy_(model[0].weight.bfloat16())
    x = torch.rand(128, 64).bfloat16().to(half)
    exact = model.double()[1](model[0](x.double()))
    model.float()

    def error() -> float:
        with torch.autocast("cpu", half):
            y = model[1](model[0](x))
        return float(((y.double() - exact).norm() / exact.norm()).detach())

    before = error()
    report = mods.apply(model, [mods.KeepIntermediates()])
    assert [c.site for c in report.changed] == ["0"]
    assert error() < most < least < before
    plain = nn.Linear(64, 32)
    plain.load_state_dict(model[0].state_dict())
    assert torch.equal(model[0](x.float()), plain(x.float()))  # without autocast, as it was
    found = []
    for layer in (model[0], plain):
        with torch.autocast("cpu", half):
            layer(x).backward(torch.ones(128, 32, dtype=layer(x).dtype))
        found.append([p.grad for p in layer.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(*found, strict=True))
    assert "it is a WideLinear" in lokakern.convert(model, 0.06).skipped["0"]
    report.undo()
    assert error() == before and type(model[0]) is nn.Linear


def test_sums_are_rounded_before_a_norm_without_float32_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)).bfloat16()
    report = mods.apply(model, [mods.KeepIntermediates()])
    assert not report.changed and "takes no float32 sums" in report[0].effect
    model(torch.randn(3, 8).bfloat16())


def test_parts_of_a_fused_layer_are_not_padded() -> None:
    """The fused layer does not pad its parts."""
    model = Tower(True, functional.relu)
    mods.apply(model, [mods.FuseShared()])
    inner = inner_layers(model)
    report = mods.apply(model, [mods.Pad(16, most_growth=9.0)])
    left = {c.site for c in report if c.effect == INNER}
    assert inner and left
    for name, layer in model.named_modules():
        if id(layer) in inner:
            assert getattr(layer, "padding", (0, 0)) == (0, 0) and name in left


def test_padding_with_too_much_growth_is_left() -> None:
    model = nn.Sequential(nn.Linear(312, 512), nn.Linear(512, 1), nn.Linear(13, 512))
    report = mods.apply(model, [mods.Pad(16)])
    assert [c.is_done for c in report] == [True, False, True]
    assert report[0].after == "k=320 n=512" and "16.00 times" in report[1].effect
    assert isinstance(model[0], Linear) and model[0].weight.shape == (512, 312)
    handle = lokakern.convert(model, 0.06)
    assert [(r["n"], r["k"]) for r in handle.choices[::3]] == [(512, 320), (1, 512), (512, 16)]
    model[0].is_frozen = True
    (frozen,) = [c for c in mods.apply(model, [mods.Pad(64)]) if c.site == "0"]
    assert "before convert" in frozen.effect and model[0].padding == (8, 0)
    with pytest.raises(ShapeError, match="multiples are 0 and 16"):
        mods.apply(model, [mods.Pad(0)])


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.blocks = Tower(), nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24))
        self.last = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x) + self.last(x + self.blocks[0](x))  # type: ignore[no-any-return]


def test_all_mods_together_compile_as_one_graph_and_train() -> None:
    torch._dynamo.reset()
    model = Whole()
    every = [
        mods.NoBias(), mods.NormOrder("post"), mods.BlockNorm(8), mods.HardSwish(),
        mods.KeepIntermediates(), mods.HighResidual(("blocks.0",)), mods.FuseShared(),
        mods.BatchEqual(), mods.Pad(16, most_growth=99.0),
    ]  # fmt: skip
    report = mods.apply(model, every)
    assert {c.mod for c in report.changed} == {type(mod).__name__ for mod in every}
    lokakern.convert(model, 0.06)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = passed(compiled, x), passed(model, x)
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(found, expected, strict=True))
    report.undo()
    assert torch.equal(model(x), Whole()(x))


# ---- apply ----


def test_mods_apply_in_order_and_a_filter_restricts_them() -> None:
    model = Tower()
    both = [mods.NoBias(), mods.BlockNorm(8), mods.HardSwish(), mods.FuseShared(), mods.Pad(16)]
    x = torch.randn(4, 24)
    before, seen = model(x), list(map(type, model.modules()))
    report = mods.apply(model, both, filter=lambda module, name: not name.startswith("mix"))
    assert not any(c.site.startswith("mix") for c in report)
    assert type(model.mix[2]) is nn.LayerNorm and model.mix[0].bias is not None
    report.undo()
    assert torch.equal(model(x), before) and list(map(type, model.modules())) == seen


class Failing(mods.Mod):
    def edit(self, editor: Editor) -> None:
        for name, module in editor.modules(nn.Linear):
            if name == "head":
                raise UnknownNameError("no")
            editor.set(module, "bias", None)


def test_a_failed_mod_leaves_the_model_unchanged() -> None:
    model, x = Tower(), torch.randn(3, 24)
    before, parts = model(x), list(model.named_modules())
    with pytest.raises(LokakernError):
        mods.apply(model, [mods.BlockNorm(8), mods.FuseShared(), mods.Pad(16), Failing()])
    assert list(model.named_modules()) == parts and torch.equal(model(x), before)


def test_apply_refuses_objects_that_are_no_mods() -> None:
    with pytest.raises(FormatError, match=r"NoBias'> is not a mod; make one: NoBias\(\)"):
        mods.apply(Tower(), [mods.NoBias])  # type: ignore[list-item]


def test_shared_modules_are_replaced_in_all_places() -> None:
    norm = nn.LayerNorm(8)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    mods.apply(model, [mods.BlockNorm(8)])
    assert model["a"] is model["b"][0] and isinstance(model["a"], mods.BlockRMSNorm)


def test_a_report_prints_a_table_and_gives_rows(capsys: pytest.CaptureFixture[str]) -> None:
    report = mods.apply(Tower(), [mods.NoBias(), mods.BlockNorm(8)])
    report.table()
    out = capsys.readouterr().out
    assert (
        "NoBias" in out and "mix.2" in out and "as it was" in out and "6 changes, 1 left" not in out
    )
    assert report.rows()[0].keys() == {
        "mod", "site", "before", "after", "is_exact", "effect", "is_done",
    }  # fmt: skip
    assert repr(report) == f"Report({len(report.changed)} changes, 1 left alone)"


class Branching(nn.Module):
    """A forward that no trace can follow, with layers in two modules that read one tensor."""

    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.query = nn.Linear(16, inner)
        self.heads = nn.ModuleList([nn.Linear(16, 24), nn.Linear(16, 16)])
        self.is_writing = False

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        if x.sum() > 1e9:
            x = x + 1
        first = self.query(x)
        if self.is_writing:
            x.mul_(2)
        return [first, *(head(x) for head in self.heads)]


GROUP = ("query", "heads.0", "heads.1")


def test_a_declared_group_multiplies_once_where_no_trace_finds_it() -> None:
    model, x = Branching(), torch.randn(5, 16)
    expected = model(x)
    sum(y.square().sum() for y in expected).backward()
    gradient = model.query.weight.grad.clone()
    assert not mods.apply(model, [mods.FuseShared()]).changed
    report = mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    (change,) = report.changed
    assert (change.site, change.before) == ("fusedlinear_0", "query, heads.0, heads.1")
    assert [*model.state_dict()] == [*Branching().state_dict()]
    calls: list[int] = []
    model.fusedlinear_0.register_forward_hook(lambda *_: calls.append(1))
    model.zero_grad()
    outputs = model(x)
    torch.testing.assert_close(outputs, expected)
    assert len(calls) == 1 and not model.fusedlinear_0._round[0], "nothing is kept"
    sum(y.square().sum() for y in outputs).backward()
    torch.testing.assert_close(model.query.weight.grad, gradient)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.heads[0].weight.zero_()
        other.heads[0].bias.zero_()
    assert not other(x)[1].any() and model(x)[1].any()
    handle = lokakern.convert(model, 0.06)
    assert "fusedlinear_0" in handle.sites and "query" in handle.skipped
    handle.undo()
    report.undo()
    torch.testing.assert_close(model(x), expected)


def test_a_kept_output_is_that_of_the_input_and_weight_as_they_are() -> None:
    model, x = Branching(), torch.randn(5, 16)
    mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    model.is_writing = True
    expected = [part(y) for part, y in zip(parts_of(model), (x, 2 * x, 2 * x), strict=True)]
    torch.testing.assert_close(model(x.clone()), expected)
    first = model.query(x)
    assert model.query(x) is not first, "the same layer again"
    with torch.no_grad():
        model.heads[1].weight.zero_()
    assert torch.equal(model.heads[1](x), model.heads[1].bias.expand(5, 16))
    model.query(x)
    model.heads[0].weight.data = torch.ones(24, 16)  # leaves the version as it is
    torch.testing.assert_close(model.heads[0](x), parts_of(model)[1](x))
    model.query(x)
    with torch.no_grad():
        assert not model.heads[0](x).requires_grad
    model.query(x)
    assert model.heads[0](x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(x.clone())[0], expected[0])


def test_a_kept_output_is_for_one_state_of_autocast_and_autograd() -> None:
    model = Branching()
    mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        model.query(x)
    assert model.heads[0](x).dtype is torch.float32
    x = torch.randn(5, 16)
    model.query(x)
    x.requires_grad_()
    model.heads[0](x).sum().backward()
    assert x.grad is not None
    x = torch.randn(5, 16)
    model.query(x)
    other = torch.zeros_like(model.heads[0].weight).requires_grad_()
    while other._version < model.heads[0].weight._version:
        other.detach().zero_()
    y = torch.func.functional_call(model.heads[0], {"weight": other}, (x,))
    assert torch.equal(y, model.heads[0].bias.expand(5, -1)), "another one, written as often"


def parts_of(model: Branching) -> list[Any]:
    """The products of each layer alone."""
    layers = [model.query, *model.heads]
    return [functools.partial(functional.linear, weight=x.weight, bias=x.bias) for x in layers]


def test_a_compiled_declared_group_multiplies_apart() -> None:
    model, x = Branching(), torch.randn(5, 16)
    expected = model(x)
    mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    model.is_writing = True
    torch.testing.assert_close(compiled(x.clone()), model(x.clone()))


class Separate(Branching):
    """A forward that a trace cannot follow, and a compiler can."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x + 1 if len(x) > 1000 else x
        return [self.query(x), *(head(x) for head in self.heads)]


class Traceable(Branching):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.query(x), *(head(x) for head in self.heads)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_declared_group_is_compiled_as_one_graph_with_its_gradients(
    dynamic: bool, is_converted: bool
) -> None:
    model, results = Separate().bfloat16(), []
    other = copy.deepcopy(model)
    mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    if is_converted:
        lokakern.convert(model, kernels="row")
    model(torch.randn(5, 16).bfloat16())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for each in (compiled, other):
        x = torch.linspace(-1, 1, 80).bfloat16().view(5, 16).requires_grad_()
        sum(y.square().sum() for y in each(x)).backward()
        with torch.no_grad():
            found = each(x)
        results.append([x.grad, *(p.grad for p in each.parameters()), *found])
    assert all(map(torch.equal, *results))


def test_layers_of_a_declared_group_and_of_a_replaced_forward_are_left_to_it() -> None:
    model, x = Traceable(), torch.randn(5, 16)
    expected = model(x)
    report = mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    assert [change.site for change in report.changed] == ["fusedlinear_0"]
    calls: list[int] = []
    model.fusedlinear_0.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == 1
    report.undo()
    model.query.forward = lambda x: functional.linear(x, model.query.weight)
    (change,) = mods.apply(model, [mods.FuseShared()]).changed
    assert change.before == "heads.0, heads.1"
    torch.testing.assert_close(model(x)[0], expected[0] - model.query.bias)


def test_a_declared_group_multiplies_apart_under_torch_func() -> None:
    model, x = Branching(), torch.randn(5, 16)
    mods.apply(model, [mods.FuseShared(groups=[GROUP])])
    head, query = model.heads[0], model.query

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return query(x).sum() + torch.func.functional_call(head, weights, (x,)).sum()

    gradient = torch.func.grad(loss)(dict(head.named_parameters()))["weight"]
    torch.testing.assert_close(gradient, x.sum(0).expand(24, 16))


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        ([("query", "heads.7")], UnknownNameError, "no layer 'heads.7'; did you mean 'heads."),
        ([("query",)], UnknownNameError, "at least two names"),
        (["query"], UnknownNameError, "at least two names"),
        ([("query", "heads")], UnsupportedError, "heads is no linear layer"),
        (
            [GROUP, ("query", "heads.0")],
            UnsupportedError,
            "query is no linear layer that is",
        ),
        ([("query", "other")], UnsupportedError, "differ in k"),
    ],
)
def test_a_group_that_cannot_be_fused_is_told_and_nothing_changes(
    groups: Any, error: type[Exception], words: str
) -> None:
    model = Branching()
    model.other = nn.Linear(8, 8)
    with pytest.raises(error, match=re.escape(words)):
        mods.apply(model, [mods.FuseShared(groups=groups)])
    assert not hasattr(model, "fusedlinear_0") and "forward" not in vars(model.query)


def test_a_container_of_torch_gets_no_child() -> None:
    """It would call the child."""
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match="containers call all of their children"):
        mods.apply(pair, [mods.FuseShared(groups=[("0", "1")])])
