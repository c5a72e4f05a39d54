"""Products across tokens equal those of linear layers, without transposed copies."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

import lokakern
from lokakern import mods
from lokakern.bench.models.arms import Setting
from lokakern.bench.models.catalog import config_named
from lokakern.bench.models.comparison import products_of
from lokakern.bench.models.throughput import kind_of
from lokakern.errors import UnsupportedError
from lokakern.kernels.cuda import token_gradient
from lokakern.kernels.cuda.tiles import SHARED_BYTES
from lokakern.mods.together import BatchedLinear, FusedLinear
from lokakern.nn import token_mixing
from lokakern.nn.linear import Linear, Routed
from lokakern.nn.routed_matmul import route_text
from lokakern.nn.token_mixing import mix_tokens, mixes
from lokakern.probe.unhooked_products import products_elsewhere
from lokakern.types import Granularity
from tests.support.exact_models import passed, whole, with_whole_weights
from tests.support.routed_layers import same

ROOT = Path(__file__).resolve().parents[2]


class Mixer(nn.Module):
    """Layers across tokens: two that share an input, one alone, and one that is none of them."""

    def __init__(self, tokens: int, bias: bool = False) -> None:
        super().__init__()
        self.few = nn.Linear(tokens, 8, bias)
        self.kept = nn.Linear(tokens, 8, bias)
        self.back = nn.Linear(8, 16, bias)
        self.inner = nn.Linear(6, 6, bias)

    def forward(self, x: Tensor) -> Tensor:
        across = x.transpose(1, 2)
        few, kept = self.few(across).mT, self.kept(across).mT
        y = self.back(kept.permute(0, 2, 1)).transpose(-1, -2)
        return torch.cat([self.inner(few @ few.mT @ few), y], 1)  # type: ignore[no-any-return]


def mixer_of(tokens: int = 16, bias: bool = False) -> nn.Module:
    return with_whole_weights(Mixer(tokens, bias))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_kept_graph_gets_no_code_that_overwrites_saved_tensors(
    is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it where nothing of the model is converted."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Mixer(16)
    mods.apply(model, [mods.MixTokens(), *([mods.FuseShared()] if is_fused else [])])
    x = torch.randn(8, 16, 6, requires_grad=True)

    def gradients(times: int) -> list[Tensor]:
        def call(x: Tensor) -> Tensor:
            y = torch.tanh(model(x))
            return (torch.sigmoid(y @ y.mT) * torch.tanh(y @ y.mT)).square().sum()

        torch._dynamo.reset()
        loss = torch.compile(call)(x)
        return [torch.autograd.grad(loss, x, retain_graph=times > 1)[0] for _ in range(times)]

    unset = {"post_grad_custom_post_pass": None, "joint_custom_pre_pass": None}
    with config.patch(unset):
        (expected,) = gradients(1)
        assert all(torch.equal(found, expected) for found in gradients(3))


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("tokens", "bias"), [(16, False), (13, True), (1, True)])
def test_mixing_changes_no_results(tokens: int, bias: bool, is_fused: bool) -> None:
    """Results and gradients in float64, of integers, are bitwise equal."""
    model, x = mixer_of(tokens, bias), whole(3, tokens, 6)
    expected, keys = passed(model, x), list(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    together = [mods.FuseShared()] if is_fused else []
    report = mods.apply(model, [*together, mods.MixTokens()])
    assert report.is_exact and all(change.is_done for change in report)
    sites = ["back", "fusedlinear_0"] if is_fused else ["back", "few", "kept"]
    assert sorted(c.site for c in report if c.mod == "MixTokens") == sites
    assert same(passed(model, x), expected) and list(model.state_dict()) == keys
    assert same(passed(copy.deepcopy(model), x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model.few))(x.mT), model.few(x.mT))
    turned = whole(3, 6, tokens).mT  # lies otherwise than expected: multiplied as ever
    assert torch.equal(model(turned), model(turned.contiguous()))
    assert model(x[:0]).shape == (0, 24, 6)
    report.undo()
    assert same(passed(model, x), expected) and [type(m) for m in model.modules()] == kinds


def test_operands_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    bmm = torch.bmm

    def spy(a: Tensor, b: Tensor) -> Tensor:
        seen.append((b.data_ptr(), b.stride()))
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", spy)
    monkeypatch.setattr(nn.functional, "linear", None)
    x, layer = torch.randn(3, 16, 6), Linear(16, 8)
    layer.is_mixing = True
    layer.changed()
    y = layer(x.mT)
    assert seen == [(x.data_ptr(), x.stride())]
    assert y.mT.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "turn", "expected"),
    [
        ((3, 16, 6), (1, 2), True), ((3, 16, 6), (0, 1), False), ((3, 6), (0, 1), False),
        ((0, 16, 6), (1, 2), False), ((2, 3, 16, 6), (2, 3), True), ((2, 3, 16, 6), (1, 2), False),
        ((3, 1, 6), (1, 2), False), ((3, 16, 1), (1, 2), False),
    ],
)  # fmt: skip
def test_only_transposed_tokens_mix(
    shape: tuple[int, ...], turn: tuple[int, int], expected: bool
) -> None:
    weight = torch.randn(8, 16)
    assert mixes(torch.randn(shape).transpose(*turn), weight, None) == expected
    assert not mixes(torch.randn(shape), weight, None)
    assert not mixes(torch.randn(3, 16, 12)[..., :6].mT, weight, None)
    assert mixes(torch.randn(3, 32, 6)[:, 8:24].mT, weight, None)  # a slice of tokens
    assert not mixes(torch.randn(2, 3, 32, 6)[:, :, 8:24].mT, weight, None)
    assert not mixes(torch.randn(3, 16, 12)[..., ::2].mT, weight, None)


class Sharded(Tensor):
    """Stands for what knows more of itself than a tensor."""


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Linear, nn.Linear]:
    """One that mixes, and the same that does not."""
    torch.manual_seed(0)
    plain = nn.Linear(16, 8, bias, dtype=dtype)
    layer = copy.deepcopy(plain)
    layer.__class__ = Linear
    assert isinstance(layer, Linear)
    layer.is_mixing = True
    layer.changed()
    return layer, plain


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64],
)
def test_dtypes_are_accepted_rejected_and_cast_as_by_linear(
    dtype: torch.dtype, weight: torch.dtype, autocast: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = dtype if dtype.is_complex else torch.float32
    x = (8 * torch.randn(3, 16, 6, generator=generator, dtype=kind)).to(dtype)
    found: list[Any] = []
    for layer in layers(dtype=weight):
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = layer(x.mT)
            y.abs().float().sum().backward()
        except RuntimeError:
            found.append(None)
        else:
            found.append((y.detach(), layer.weight.grad))
    if None in found:
        assert found == [None, None]
        return
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 0.02 * b.abs().max()


def test_subclasses_transforms_and_meta_tensors_do_not_mix() -> None:
    layer, plain = layers()
    x = torch.randn(4, 3, 16, 6)
    assert mixes(x.mT, layer.weight, layer.bias)
    assert not mixes(x.mT, layer.weight.detach().as_subclass(Sharded), None)
    assert not mixes(x.mT.as_subclass(Sharded), layer.weight, None)
    traced = torch.jit.trace(layer, (x.mT,))
    assert "Mixed" not in str(traced.graph) and torch.allclose(traced(x.mT), plain(x.mT), atol=1e-5)
    assert layer.to("meta")(x.to("meta").mT).shape == (4, 3, 6, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, parameters, (x.mT,))
        return y.square().sum()

    parameters = {name: p.detach() for name, p in plain.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for sample, gradient in zip(x, found["weight"], strict=True):
        plain.zero_grad()
        plain(sample.mT).square().sum().backward()
        assert torch.allclose(gradient, plain.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [True, False])
def test_it_exports_with_any_number_of_samples(strict: bool) -> None:
    layer, plain = layers()
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(
        layer, (torch.randn(3, 16, 6).mT,), dynamic_shapes=shapes, strict=strict
    )
    x = torch.randn(7, 16, 6).mT
    assert torch.allclose(exported.module()(x), plain(x), atol=1e-5)


def test_only_needed_tensors_are_saved_for_backward() -> None:
    kept: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    for to_x, to_weight, expected in [
        (True, True, [(3, 16, 6), (8, 16)]), (False, True, [(3, 16, 6)]), (True, False, [(8, 16)])
    ]:  # fmt: skip
        layer, _ = layers(bias=False)
        layer.weight.requires_grad_(to_weight)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = layer(torch.randn(3, 16, 6, requires_grad=to_x).mT)
        assert kept == expected
        y.sum().backward()
        assert (layer.weight.grad is not None) == to_weight


def test_leading_dimensions_are_samples() -> None:
    layer, plain = layers(dtype=torch.float64)
    for shape in ((2, 3, 16, 6), (5, 1, 2, 16, 1)):
        x, gradient = torch.randn(shape).double(), torch.randn(*shape[:-2], shape[-1], 8).double()
        found = []
        for way in (plain, layer):
            way.zero_grad()
            leaf = x.clone().requires_grad_()
            y = way(leaf.mT)
            y.backward(gradient)
            found.append([y, leaf.grad, way.weight.grad, way.bias.grad])
        assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_a_mixing_model_compiles_without_graph_breaks(backend: str) -> None:
    torch._dynamo.reset()
    model, x = mixer_of(13, True).float(), whole(5, 13, 6).float()
    expected = passed(model, x)
    mods.apply(model, [mods.FuseShared(), mods.MixTokens()])
    found = passed(torch.compile(model, backend=backend, fullgraph=True), x)
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))


def test_compiled_layers_mix() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    layer, _ = layers()
    with torch.no_grad():
        torch.compile(layer, backend=keep, fullgraph=True)(torch.randn(3, 16, 6).mT)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("bmm" in name or "autograd_function_apply" in name for name in names)
    assert not any("linear" in name for name in names)


@pytest.mark.parametrize("tokens", [13, 16])
def test_autocast_rounds_operands_and_sums_gradients_in_float32(tokens: int) -> None:
    torch.manual_seed(0)
    layer, x = Linear(tokens, 8), torch.randn(4096, tokens, 6)
    plain = copy.deepcopy(layer).double()
    plain.weight.data = layer.weight.data.bfloat16().double()
    layer.is_mixing = True
    layer.changed()
    expected = plain(x.bfloat16().double().mT)
    expected.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.mT)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert torch.allclose(y.double(), expected, rtol=0.02, atol=0.02)
    assert layer.weight.grad is not None and plain.weight.grad is not None
    errors = (layer.weight.grad.double() - plain.weight.grad).norm() / plain.weight.grad.norm()
    assert layer.weight.grad.dtype is torch.float32 and errors < 2**-9


def test_second_derivatives_raise() -> None:
    """Also of a sum, behind which a part of the second derivative would be missing."""
    x, weight = torch.randn(2, 16, 6, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    for y in (mix_tokens(x.mT, weight, None).square(), mix_tokens(x.mT, weight, None)):
        with pytest.raises(UnsupportedError, match="create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_convert_leaves_mixing_layers_unquantized_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = mixer_of(13).float(), whole(3, 13, 6).float()
    expected = model(x)
    mods.apply(model, [mods.FuseShared(), mods.MixTokens()])
    with monkeypatch.context() as patch:
        patch.setattr("lokakern.conversion.convert.routes_of", None)
        conversion = lokakern.convert(model, 0.06, filter=lambda _, name: name != "inner")
    assert sorted(conversion.sites) == ["back", "fusedlinear_0"]
    assert all(row["choice"] == "bf16" and "MixTokens" in row["why"] for row in conversion.choices)
    assert torch.equal(model(x), expected) and "MixTokens" in conversion.explain("back")
    assert conversion.suite([8192]) == ""  # nothing to measure
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr("lokakern.nn.linear.mix_tokens", lambda *a: calls.append(a) or mix_tokens(*a))
        model(x)
        assert len(calls) == 1  # a route of its own does not hide that a layer mixes
        conversion.undo()
        assert torch.equal(model(x), expected)
        assert len(calls) == 2


def test_quantized_layers_do_not_mix() -> None:
    layer, plain = layers(dtype=torch.bfloat16)
    x = torch.randn(3, 16, 6).bfloat16().mT
    route = route_text(Granularity.ROW, [(0, "cuda.quantize_row+cuda.scaled_gemm_row")], [(0, "")])
    layer.take_routes([route, "", ""], None)
    assert not layer.mixes(x, layer.weight, layer.bias)
    assert layer(x).shape == plain(x).shape
    layer.is_mixing = False
    (left,) = mods.apply(Named(layer), [mods.MixTokens()])
    assert not left.is_done and "convert" in left.effect


class Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT)  # type: ignore[no-any-return]


def test_mixing_and_conversion_can_be_undone_in_either_order() -> None:
    for is_conversion_first in (True, False):
        model = mixer_of().float()
        kinds = [type(m) for m in model.modules()]
        conversion = lokakern.convert(model, None)
        report = mods.apply(model, [mods.MixTokens()])
        assert report.changed
        undone = [conversion, report]
        for one in undone if is_conversion_first else reversed(undone):
            one.undo()  # type: ignore[attr-defined]
            if one is conversion and is_conversion_first:
                assert model.back.mixes(torch.randn(3, 8, 6).mT, model.back.weight, None)
        assert not any("is_mixing" in vars(m) for m in model.modules())
        left = [type(m) for m in model.modules()]
        assert left == kinds or is_conversion_first  # whose layers mixed on, as lokakern's
        assert set(left) <= {*kinds, Linear}


@pytest.mark.parametrize("tokens", [13, 16])
def test_frozen_layers_still_mix(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mixer_of(tokens).bfloat16(), whole(3, tokens, 6).bfloat16()
    expected = model(x)
    mods.apply(model, [mods.FuseShared(), mods.MixTokens()])
    lokakern.convert(model, None, inference=True)
    monkeypatch.setattr(Routed, "product", None)  # which nothing falls back to
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert model.fusedlinear_0.held_weight.is_contiguous() == (tokens == 16)


class Untraceable(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Fickle(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else -super().forward(x)


class Viewed(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return self.few(x.mT).view(x.shape[0], -1)  # type: ignore[no-any-return]


class ViewedLater(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        across = x.mT
        few, _ = self.few(across), self.kept(across)
        return nn.functional.relu(few).chunk(2, 1)[0].view(x.shape[0], -1)  # type: ignore[no-any-return]


class ViewedAnew(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.few(x.mT) @ x[:, :8]).view(x.shape[0], -1)  # type: ignore[no-any-return]


class Elsewhere(nn.Module):
    """Calls that must not be taken for mixing, a layer that a filter keeps, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.rows, self.named, self.kept = (nn.Linear(6, 6) for _ in range(4))
        self.listed = nn.ModuleList([nn.Linear(6, 6)])
        self.padded = Linear(6, 6)
        self.padded.padding = (2, 0)
        self.padded.changed()

    def forward(self, x: Tensor) -> Tensor:
        x = self.heads(x.transpose(0, 1)) + self.rows(x)
        x = self.named(x.transpose(dim0=1, dim1=2))
        x = self.listed[0](x.transpose(-1, 1))
        return self.padded(self.kept(x.mT).mT)  # type: ignore[no-any-return]


def test_layers_that_do_not_visibly_mix_are_left_alone() -> None:
    for kind, why in [
        (Untraceable, "torch.fx"), (Fickle, "trains"), (Viewed, "view"), (ViewedLater, "view"),
    ]:  # fmt: skip
        found = mods.apply(kind(16), [mods.MixTokens()])
        assert any(not change.is_done and why in change.effect for change in found)
        assert [change.site for change in found if change.is_done] in ([], ["kept"])
    (fused, left) = mods.apply(ViewedLater(16), [mods.FuseShared(), mods.MixTokens()])
    assert fused.is_done and not left.is_done  # through what takes the parts out
    (done,) = mods.apply(ViewedAnew(16), [mods.MixTokens()])
    assert done.is_done
    model = Elsewhere()
    expected = model(torch.ones(6, 6, 6))
    report = mods.apply(model, [mods.MixTokens()], filter=lambda _, name: name != "kept")
    assert [c.site for c in report] == ["listed.0"]
    assert [c.site for c in mods.apply(model, [mods.MixTokens()])] == ["kept"]
    assert not len(mods.apply(model, [mods.MixTokens()]))  # once is enough
    assert torch.allclose(model(torch.ones(6, 6, 6)), expected)


def test_other_mods_keep_mixing_layers() -> None:
    x = whole(3, 13, 6)
    for behind, left in [
        (mods.Pad(16, most_growth=99.0), 3), (mods.FuseShared(), 0), (mods.BatchEqual(), 0),
    ]:  # fmt: skip
        model = mixer_of(13)
        expected = passed(model, x)
        report = mods.apply(model, [mods.MixTokens(), behind])
        assert sum("MixTokens" in c.effect for c in report if not c.is_done) == left
        assert same(passed(model, x), expected)
        called = [m for m in model.modules() if getattr(m, "is_mixing", False)]
        fused = [m for m in called if isinstance(m, FusedLinear)]
        assert len(called) == 3 + len(fused) and len(fused) == isinstance(behind, mods.FuseShared)
        assert not any(isinstance(m, BatchedLinear) for m in model.modules())
    model = mixer_of(13)
    mods.apply(model, [mods.MixTokens()], filter=lambda _, name: name != "few")
    assert not mods.apply(
        model, [mods.FuseShared()]
    ).changed  # one that mixes, and one that does not


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(6, 6)])})

    def forward(self, x: Tensor) -> Tensor:
        return self.named["one"][0](x.mT)  # type: ignore[no-any-return, index]


def test_layers_in_lists_are_found() -> None:
    (change,) = mods.apply(Listed(), [mods.MixTokens()])
    assert change.is_done and change.site == "named.one.0"


def test_probe_counts_products_across_tokens() -> None:
    model, x = mixer_of(16).float(), whole(3, 16, 6).float()
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for changes in ([], [mods.FuseShared(), mods.MixTokens()]):
        mods.apply(model, changes)
        sites = [id(p) for name, p in model.named_parameters() if name != "back.weight"]
        found.append(products_elsewhere(model(x.requires_grad_()), names, sites))
    assert found[0] == found[1] and "back.weight" in found[0]


def test_shares_and_suites_of_models_include_mixing_layers() -> None:
    assert kind_of("token_gradient_kernel") == "GEMM"
    setting = Setting(
        "dhen", "tiny", config_named("dhen", "tiny"), 64, True, torch.device("cpu"), 0.06
    )
    found = products_of(setting)
    assert found and all(m == setting.samples for m, _, _ in found)  # rows are samples, not tokens


def gradient_of(grad: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros(grad.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for some in zip(grad.split(512), x.split(512), strict=True):  # copies of all are gigabytes
        found += torch.einsum("bcd,bnd->cn", *(part.double() for part in some))
    return found


# Tails of every axis, one program and many, a sample for each and fewer than there are programs.
SHAPES = [
    (5, 24, 30, 40), (300, 70, 140, 160), (1, 1, 1, 1), (7, 64, 128, 64), (700, 33, 7, 5),
    (5, 8, 13, 6), (3, 40, 40, 4),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_samples_are_summed(shape: tuple[int, int, int, int]) -> None:
    batch, count, n, d = shape
    grad, x = torch.randn(batch, count, d), torch.randn(batch, n, d)
    found = torch.ops.lokakern.token_gradient(grad, x)
    expected = gradient_of(grad, x)
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4 * float(batch * d) ** 0.5)
    assert torch.ops.lokakern.token_gradient(grad[:0], x[:0]).abs().sum() == 0
    torch.library.opcheck(torch.ops.lokakern.token_gradient.default, (grad, x))


def test_large_gradients_of_samples_are_not_materialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "bmm", None)
    grad, x = torch.randn(3, 40, 4), torch.randn(3, 40, 4)
    found = torch.ops.lokakern.token_gradient(grad, x)
    assert torch.allclose(found.double(), gradient_of(grad, x), rtol=1e-4, atol=1e-4)


INTERPRETED = """
import torch
from lokakern.kernels.triton import token_gradient as kernel
from tests.nn.test_token_mixing import SHAPES, gradient_of
torch.manual_seed(0)
for batch, count, n, d in SHAPES:  # in float16, as the interpreter multiplies no bfloat16
    grad = torch.randn(batch, 2 * count, d).half()[:, count:]  # rows of a larger one
    for x in (torch.randn(batch, n, d).half(), torch.randn(batch, d, n).half().mT):
        expected = gradient_of(grad, x)
        found = kernel.token_gradient(grad, x)
        assert found.dtype is torch.float32
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, (batch, count, n, d, error)
grad, x = torch.randn(4, 3, 16).half(), torch.randn(3, 5, 16).half()
rows = grad.transpose(0, 1)  # a row lies behind another at more than 2^31, when they are as long
apart = torch.empty(0).set_(grad.untyped_storage(), 0, (1, 1, 16), (1, 2**31, 1))
assert kernel._reaches(rows) and not kernel._reaches(apart) and not kernel._reaches(x.mT)
expected = gradient_of(rows, x)
assert (kernel.token_gradient(rows, x) - expected).abs().max() < 1e-4
for batch, count, n, d in ((0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)):
    found = kernel.token_gradient(torch.ones(batch, count, d), torch.ones(batch, n, d))
    assert found.shape == (count, n) and not found.any()
print("right")
"""


@pytest.mark.rest
def test_the_kernel_is_correct_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.stdout == "right\n", ran.stderr[-3000:]


# Of Hopper's kernel: tiles of one to three warpgroups, several of them, and every width.
LONG = [
    (300, 200, 264, 64), (37, 65, 130, 40), (5, 193, 257, 48), (1, 1, 1, 32), (140, 64, 161, 168),
    (133, 56, 64, 160), (700, 130, 193, 72), (64, 192, 33, 128), (2048, 192, 770, 160),
    (4096, 770, 770, 160),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, *LONG, (8192, 96, 770, 160)])
def test_the_kernels_are_correct_on_a_gpu(
    shape: tuple[int, int, int, int], dtype: torch.dtype, is_turned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Outputs in poisoned memory match float64, are reproducible, and agree with the fallback.

    Operands are slices of larger ones, with NaN around them.
    """
    batch, count, n, d = shape
    torch.manual_seed(0)
    grad, x = (
        torch.full((batch, rows + 3, d + 8), math.nan, device="cuda", dtype=dtype)[:, 1:-2, :d]
        for rows in (count, n)
    )
    for operand in (grad, x):
        operand.copy_(torch.randn(operand.shape, device="cuda"))
    assert token_gradient.takes(grad, x) == (d % 8 == 0 and d >= 32)
    if is_turned:  # Triton's
        monkeypatch.setattr(token_gradient, "takes", lambda *_: False)
    expected = gradient_of(grad, x)

    def error(found: Tensor) -> float:
        return float((found - expected).abs().max() / expected.abs().max())

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # then torch.empty is NaN
    try:
        found = torch.ops.lokakern.token_gradient(grad, x)
    finally:
        torch.use_deterministic_algorithms(False)
    # Of sums of 1.3 million products 0.9e-4 on an H200, and by Triton's kernel, whose accumulators
    # have longer ones, 4.1e-4 of 0.66 million.
    assert error(found) < (2**-11 if is_turned else 2**-12)
    for _ in range(3):
        assert torch.equal(found, torch.ops.lokakern.token_gradient(grad, x))
    monkeypatch.setattr(token_mixing, "has_triton", lambda *_: False)
    assert error(torch.ops.lokakern.token_gradient(grad, x)) < 2**-6  # 0.015 of as many


@pytest.mark.gpu
def test_a_sample_of_nan_reaches_its_tokens_alone() -> None:
    grad, x = torch.randn(20, 70, 64, device="cuda"), torch.randn(20, 300, 64, device="cuda")
    grad[3, 5, 7], x[19, 299, 63] = math.nan, math.inf
    found = torch.ops.lokakern.token_gradient(grad.bfloat16(), x.bfloat16())
    wrong = ~found.isfinite()
    assert wrong[5].all() and wrong[:, 299].all() and int(wrong.sum()) == 300 + 70 - 1


def test_tiles_cover_all_tokens_with_little_waste() -> None:
    for count, n in itertools.product((1, 56, 64, 65, 96, 192, 193, 400), (1, 64, 224, 257, 770)):
        tile = token_gradient.tile_of(count, n)
        height, width = 64 * tile.warpgroups, tile.width
        assert 1 <= tile.warpgroups <= 3 and width <= (224 if tile.warpgroups == 3 else 256)
        assert tile.stages >= 4 and tile.stages * (tile.stage_bytes + 16) <= SHARED_BYTES
        down, across = -(-count // height), -(-n // width)
        assert down * height < count + 64 * down and across * width < n + 64 * across


def test_tensor_cores_add_up_few_products() -> None:
    assert token_gradient.samples_of_part(8192, 160, 33) == 249
    assert token_gradient.samples_of_part(8192, 160, 0) == 409  # more tiles than multiprocessors
    assert token_gradient.samples_of_part(5, 160, 33) == 1
    assert token_gradient.samples_of_part(5, 10**6, 1) == 1


def test_hopper_reads_rows_that_bulk_copies_can_start_at() -> None:
    x = torch.zeros(4, 6, 48, dtype=torch.bfloat16)
    has_maps = token_gradient._has_maps
    assert has_maps(x) and has_maps(x[:, 1:3, 8:]) and has_maps(x[::2])
    for wrong in (
        x[:, :, 1:],
        x.mT,
        x[..., :-1].contiguous(),
        x[:1].expand(3, -1, -1),
        x[..., ::2],
    ):
        assert not has_maps(wrong), wrong.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [13, 96])
def test_a_mixing_model_trains_equally_on_a_gpu(tokens: int) -> None:
    torch.manual_seed(0)
    plain = Mixer(tokens).cuda()
    model: Any = copy.deepcopy(plain)
    mods.apply(model, [mods.FuseShared(), mods.MixTokens()])
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(512, tokens, 6, device="cuda")
    found = []
    for way in (plain, model, compiled):
        way.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = way(x)
        y.float().square().mean().backward()
        found.append([y.detach().float(), *(p.grad.clone() for p in way.parameters())])
    for case in found[1:]:
        for a, b in zip(case, found[0], strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
