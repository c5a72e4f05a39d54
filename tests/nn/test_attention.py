"""`nn.MultiheadAttention` in conversions: its projections in FP8, and its own forward elsewhere."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import numerics
from lokakern.conversion.variants import observed_rows
from lokakern.functional import checks
from lokakern.nn.attention import Attention
from lokakern.nn.raw_product import RawProduct, products_of
from lokakern.nn.torch_owners import NEVER_CALLED
from tests.support.conversions import H200

WIDTH, HEADS, BATCH, ROWS, SOURCE = 40, 4, 3, 7, 5
forced = functools.partial(lokakern.convert, device=H200, kernels="row")
KINDS: dict[str, dict[str, Any]] = {
    "packed": {}, "without bias": {"bias": False}, "separate": {"kdim": 24, "vdim": 56},
}  # fmt: skip
MASKS = ["none", "padding", "pairs", "each head", "both", "causal", "both, causal"]


def attention_of(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    found = nn.MultiheadAttention(WIDTH, HEADS, **options).to(dtype)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "bias" in name:
                p.add_(torch.randn_like(p) * 0.3)  # torch makes them 0
    return found


def inputs_of(model: nn.MultiheadAttention, is_self: bool, dtype: torch.dtype = torch.bfloat16
              ) -> list[Tensor]:  # fmt: skip
    """Query, key and value; one tensor, or two, where their widths allow."""
    draw = torch.Generator().manual_seed(1)
    sizes = (ROWS, SOURCE, SOURCE)
    widths = (model.embed_dim, model.kdim, model.vdim)
    leading = [(BATCH, x) if model.batch_first else (x, BATCH) for x in sizes]
    made = [
        torch.randn(*shape, width, generator=draw)
        for shape, width in zip(leading, widths, strict=True)
    ]
    query, key, value = (x.to(dtype).requires_grad_() for x in made)
    if not model._qkv_same_embed_dim:
        return [query, key, value]
    return [query] * 3 if is_self else [query, key, key]


def masks_of(kind: str, source: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(2)
    padding = torch.zeros(BATCH, source, dtype=torch.bool)
    padding[0, -2:] = True
    if kind == "padding":
        return {"key_padding_mask": padding}
    if kind == "pairs":
        return {"attn_mask": torch.randn(ROWS, source, generator=draw).bfloat16()}
    if kind == "each head":
        mask = torch.rand(BATCH * HEADS, ROWS, source, generator=draw) < 0.3
        mask[:, :, 0] = False
        return {"attn_mask": mask}
    causal = torch.ones(ROWS, source, dtype=torch.bool).triu(1)
    if "both" in kind:
        hint = {"is_causal": True} if "causal" in kind else {}
        return {"attn_mask": causal, "key_padding_mask": padding, **hint}
    return {"attn_mask": causal, "is_causal": True} if kind == "causal" else {}


def passed(model: nn.Module, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The outputs, and gradients of inputs and parameters."""
    torch.manual_seed(3)  # of dropout
    y, weights = model(*inputs, **options)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)
    loss = (y * gradient).float().sum()
    if weights is not None:
        loss = loss + weights.float().square().sum()
    distinct = {id(x): x for x in (*inputs, *model.parameters())}
    grads = torch.autograd.grad(loss, list(distinct.values()))
    return [y.detach(), *([] if weights is None else [weights.detach()]), *grads]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the matrices of products that were quantized."""
    found: list[str] = []
    real = RawProduct.product

    def spy(self: RawProduct, *arguments: Any) -> Tensor:
        found.append(self.matrix.name)
        return real(self, *arguments)

    monkeypatch.setattr(RawProduct, "product", spy)
    return found


def test_the_steps_are_those_of_torch(slow_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With unquantized products outputs and gradients have the bits of torch."""
    ran: list[bool] = []
    real = Attention._attend
    monkeypatch.setattr(Attention, "_attend", lambda *a: ran.append(True) or real(*a))
    monkeypatch.setattr(RawProduct, "_routed", lambda *_: None)
    for kind, batch_first in itertools.product(KINDS, (True, False)):
        plain = attention_of(batch_first=batch_first, dropout=0.3, **KINDS[kind])
        model = copy.deepcopy(plain)
        forced(model)
        for place, (is_self, mask) in enumerate(itertools.product((True, False), MASKS)):
            inputs = inputs_of(model, is_self)
            options = masks_of(mask, inputs[1].shape[1 if batch_first else 0])
            for need_weights in (True, False):
                for each in (plain, model):
                    each.train(bool(place % 2) or need_weights)
                options |= {"need_weights": need_weights, "average_attn_weights": place % 3 > 0}
                found, expected = (passed(each, inputs, **options) for each in (model, plain))
                assert same(found, expected), (kind, batch_first, is_self, options)
    assert len(ran) == 2 * len(KINDS) * 4 * len(MASKS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_self", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_projections_are_quantized(
    products: list[str], kind: str, is_self: bool, autocast: bool
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    expected = ["in_proj_weight.0:40", "in_proj_weight.40:120"]
    expected = ["in_proj_weight"] if is_self else expected
    if kind == "separate":
        expected = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    for batch_first, need_weights in itertools.product((True, False), repeat=2):
        model = attention_of(dtype, batch_first=batch_first, **KINDS[kind])
        plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        forced(model)
        inputs = inputs_of(model, is_self, dtype)
        wide = inputs_of(model, is_self, torch.float64)
        options = masks_of("padding", inputs[1].shape[1 if batch_first else 0])
        options["need_weights"] = need_weights
        products.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, unquantized = (passed(each, inputs, **options) for each in (model, plain))
        assert products == [*expected, "out_proj.weight"]
        assert [x.dtype for x in found] == [x.dtype for x in unquantized]
        names = ["y", *(["weights"] if need_weights else []), *(["q", "k", "v"] if kind ==
                 "separate" else ["q"] if is_self else ["q", "k"])]  # fmt: skip
        names += [name for name, _ in model.named_parameters()]
        reference = passed(exact, wide, **options)
        for name, one, other, best in zip(names, found, unquantized, reference, strict=True):
            if name != "weights":
                assert error(other, best) <= error(one, best) < 0.15, name
        y, z = (x.double().flatten(0, -2) for x in (found[0], reference[0]))
        assert numerics.measure_errors(y, z).row_err < 0.1


def test_bits_are_those_of_converted_linear_layers() -> None:
    model = attention_of(batch_first=True)
    inner, out = nn.Linear(WIDTH, 3 * WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH).bfloat16()
    inner.load_state_dict({"weight": model.in_proj_weight, "bias": model.in_proj_bias})
    out.load_state_dict(model.out_proj.state_dict())
    layers = nn.ModuleList([inner, out])
    (x, *_) = inputs_of(model, True)

    def by_layers(x: Tensor) -> Tensor:
        x = layers[0](x.transpose(0, 1)).unflatten(-1, (3, HEADS, -1))
        q, k, v = x.permute(2, 1, 3, 0, 4).contiguous()
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        y = layers[1](y.permute(2, 0, 1, 3).reshape(ROWS * BATCH, -1))
        return y.view(ROWS, BATCH, -1).transpose(0, 1)

    for inference in (False, True):
        handles = [forced(each, inference=inference) for each in (model, layers)]
        with torch.set_grad_enabled(not inference):
            assert torch.equal(model(x, x, x, need_weights=False)[0], by_layers(x))
        for handle in handles:
            handle.undo()


# --- where nothing is quantized


def test_without_routes_the_forward_of_torch_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast: list[bool] = []
    real = torch._native_multi_head_attention
    monkeypatch.setattr(
        torch, "_native_multi_head_attention", lambda *a: fast.append(True) or real(*a)
    )
    model = attention_of(batch_first=True)
    plain = copy.deepcopy(model)
    forced(model, m_range=(16, 20))
    x, *_ = inputs_of(model, True)  # of 21 rows
    assert same(passed(model, [x] * 3), passed(plain, [x] * 3))
    less = x[:, :6]  # 18 rows
    assert not same(passed(model, [less] * 3)[:1], passed(plain, [less] * 3)[:1])
    with torch.no_grad():
        for each in (model.eval(), plain.eval()):
            each(x, x, x)
        assert len(fast) == 2
        model(less, less, less)
        assert len(fast) == 2
    # Without autocast float32 is not quantized.
    wide = attention_of(torch.float32, batch_first=True)
    plain = copy.deepcopy(wide)
    forced(wide)
    inputs = inputs_of(wide, True, torch.float32)
    assert same(passed(wide, inputs), passed(plain, inputs))


def test_unusual_calls_run_the_forward_of_torch_and_say_so(
    monkeypatch: pytest.MonkeyPatch, products: list[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lokakern.nn.attention.warn_once", told.append)
    model = attention_of(batch_first=True).eval()
    plain = copy.deepcopy(model)
    forced(model)
    x, key, value = (torch.randn(BATCH, rows, WIDTH).bfloat16() for rows in (ROWS, SOURCE, SOURCE))
    nested = torch.nested.nested_tensor([x[0], x[1, :3]])
    with torch.no_grad():
        for inputs, why in (
            ((x, key, value), "two tensors"), ((x[0],) * 3, "no batch"),
            ((nested,) * 3, "nested"),
        ):  # fmt: skip
            one, other = (
                model(*inputs, need_weights=False)[0],
                plain(*inputs, need_weights=False)[0],
            )
            if one.is_nested:
                one, other = one.to_padded_tensor(0.0), other.to_padded_tensor(0.0)
            assert torch.equal(one, other)
            assert why in told[-1], told
        with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
            model(x, x, x, attn_mask=torch.zeros(2, 2).bfloat16())
        with pytest.raises(AssertionError, match="key shape"):
            model(x, key, key[:1])
        assert torch.equal(model(x, x, x, is_causal=True)[0], plain(x, x, x, is_causal=True)[0])
        assert "is_causal" in told[-1]
    assert len(told) == 6 and not products
    monkeypatch.setattr("lokakern.nn.attention.warn_once", checks.warn_once)
    checks.warn_once.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="multiplies unquantized"):
        found = torch.func.vmap(lambda x: model(x, x, x, need_weights=False)[0])(x[:, None])
    assert error(found[:, 0], plain(x, x, x, need_weights=False)[0].detach()) < 0.02


class Doubled(nn.MultiheadAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        y, weights = super().forward(*arguments, **options)
        return y * 2, weights


def test_unusual_modules_are_left_alone_with_a_reason() -> None:
    own = nn.MultiheadAttention(8, 2)
    own.forward = own.forward
    model = nn.ModuleDict({
        "bias": nn.MultiheadAttention(8, 2, add_bias_kv=True), "own": own,
        "zero": nn.MultiheadAttention(8, 2, add_zero_attn=True), "kind": Doubled(8, 2),
        "head": nn.Linear(8, 8),
    })  # fmt: skip
    handle = forced(model)
    assert list(handle.sites) == ["head"]
    for name, why in (
        ("bias", "add_bias_kv"), ("zero", "add_zero_attn"), ("own", "forward of its own"),
        ("kind", "argument arguments of its forward is not positional"),
    ):  # fmt: skip
        assert why in handle.skipped[f"{name}.in_proj_weight"]
        assert handle.skipped[f"{name}.out_proj"] == NEVER_CALLED
        assert not isinstance(model[name], Attention)


def test_an_attention_that_became_unusual_runs_the_forward_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lokakern.nn.attention.warn_once", told.append)
    model = attention_of()
    forced(model)
    model.add_zero_attn = True
    inputs = inputs_of(model, True)
    twin = attention_of(add_zero_attn=True)
    assert same(passed(model, inputs), passed(twin, inputs)) and "add_zero_attn" in told[0]


def test_rows_that_are_not_finite_stay_in_their_sample() -> None:
    model = attention_of(batch_first=True)
    forced(model)
    x = inputs_of(model, True)[0].detach()
    y = model(x, x, x)[0]
    for bad in (float("nan"), float("inf")):
        other = x.clone()
        other[1, 2, 3] = bad
        z = model(other, other, other)[0]
        assert z[1].isnan().all() and torch.equal(z[[0, 2]], y[[0, 2]])
    zero = x.clone()
    zero[1] = 0
    assert torch.equal(model(zero, zero, zero)[0][[0, 2]], y[[0, 2]])
    assert model(zero, zero, zero)[0].isfinite().all()
    assert model(*[x[:, :0]] * 3)[0].shape == (BATCH, 0, WIDTH)


# --- compiled


@pytest.mark.parametrize(
    ("kind", "is_self", "dynamic"),
    [
        ("packed", True, False), ("separate", False, True),
        pytest.param("packed", False, True, marks=pytest.mark.rest),
        pytest.param("separate", True, True, marks=pytest.mark.rest),
        pytest.param("separate", False, False, marks=pytest.mark.rest),
        pytest.param("packed", True, True, marks=pytest.mark.rest),
        pytest.param("packed", False, False, marks=pytest.mark.rest),
        pytest.param("separate", True, False, marks=pytest.mark.rest),
    ],
)  # fmt: skip
def test_compiled_attentions(kind: str, is_self: bool, dynamic: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = attention_of(batch_first=True, **KINDS[kind])
    forced(model)
    count = 4 if kind == "separate" else 2 if is_self else 3
    inputs = inputs_of(model, is_self)
    need_weights = dynamic == is_self
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    options = masks_of("padding", inputs[1].shape[1]) | {"need_weights": need_weights}
    found, expected = (passed(each, inputs, **options) for each in (compiled, model))
    assert torch.equal(found[0], expected[0])
    assert all(error(a, b) < 0.02 for a, b in zip(found, expected, strict=True) if b.any())
    with torch.no_grad():
        found, expected = (each(*inputs, **options)[0] for each in (compiled, model))
        assert torch.equal(found, expected)
        assert counter.graphs[-1].code.count("ops.lokakern.routed_gemm") == count
        if dynamic and kind == "packed":
            more = [torch.cat([x, x]) for x in inputs]
            more = [more[0]] * 3 if is_self else [more[0], more[1], more[1]]
            options = {"need_weights": need_weights}
            assert torch.equal(compiled(*more, **options)[0], model(*more, **options)[0])


@pytest.mark.rest
def test_compiled_by_inductor() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True).bfloat16().eval()
    forced(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    x = torch.randn(BATCH, ROWS, WIDTH).bfloat16()
    y = compiled(x)
    assert error(y, model(x)) < 0.04
    y.float().sum().backward()
    assert model.self_attn.in_proj_weight.grad is not None


class Padded(nn.Module):
    """An attention of one tensor or two with padding."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, source: Tensor | None, mask: Tensor) -> Tensor:
        source = x if source is None else source
        y: Tensor = self.attention(x, source, source, key_padding_mask=mask, need_weights=False)[0]
        return y


# In torch 2.11 an nn.MultiheadAttention with a mask of a dynamic length exports only if strict.
STRICT = [True] if torch.__version__ < (2, 12) else [False, True]


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.parametrize("is_self", [True, False])
def test_exported_attentions(strict: bool, is_self: bool) -> None:
    attention = attention_of(batch_first=True).eval()
    forced(attention, inference=True)
    model = Padded(attention)
    x, source, _ = (x.detach() for x in inputs_of(attention, False))
    mask = masks_of("padding", ROWS if is_self else SOURCE)["key_padding_mask"]
    batch, length, rows = (torch.export.Dim(name, min=2, max=64) for name in ("b", "l", "s"))
    rows = length if is_self else rows
    sizes = ({0: batch, 1: length}, None if is_self else {0: batch, 1: rows}, {0: batch, 1: rows})
    inputs = (x, None if is_self else source, mask)
    with torch.no_grad():
        exported = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=strict)
        targets = [str(node.target) for node in exported.graph.nodes]
        assert targets.count("lokakern.routed_gemm.default") == (2 if is_self else 3)
        for given in (inputs, [x if x is None else torch.cat([x, x]) for x in inputs]):
            assert torch.equal(exported.module()(*given), model(*given))


# --- conversions


def test_a_replaced_projection_is_not_multiplied_by_its_old_weight() -> None:
    model = attention_of(batch_first=True).eval()
    x = inputs_of(model, True)[0].detach()
    with torch.no_grad():
        handle = forced(model, inference=True)
        other = nn.Linear(WIDTH, WIDTH).bfloat16()
        plain = copy.deepcopy(handle.undo() or model)
        handle = forced(model, inference=True)
        model.out_proj.weight = nn.Parameter(other.weight.clone())
        plain.out_proj.weight = nn.Parameter(other.weight.clone())
        checks.warn_once.cache_clear()
        with pytest.warns(UserWarning, match="out_proj.weight .* is another parameter"):
            stale = model(x, x, x)[0]
        expected = plain(x, x, x)[0]
        assert 0 < error(stale, expected) < 0.1 and stale.is_contiguous()
        handle.refresh()
        assert not torch.equal(model(x, x, x)[0], stale)
        assert error(model(x, x, x)[0], expected) < 0.1


@pytest.mark.parametrize("is_self", [True, False])
def test_weights_are_quantized_once_in_inference(is_self: bool) -> None:
    model = attention_of(batch_first=True).eval()
    plain = copy.deepcopy(model)
    inputs = inputs_of(model, is_self)
    with torch.no_grad():
        handle = forced(model, inference=True)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        y = model(*inputs)[0]
        assert 0.003 < error(y, plain(*inputs)[0]) < 0.1
        model.in_proj_weight.mul_(2)
        assert torch.equal(model(*inputs)[0], y)
        model.load_state_dict(model.state_dict())
        assert not torch.equal(model(*inputs)[0], y)
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model(*inputs)[0], y)
        twins = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        assert all(torch.equal(twin(*inputs)[0], y) for twin in twins)
        handle.refresh(None)
        assert torch.equal(model(*inputs)[0], plain(*inputs)[0])
        assert isinstance(model, Attention)
        handle.refresh(kernels="row")
        assert torch.equal(model(*inputs)[0], y)
        handle.undo()
        assert type(model) is nn.MultiheadAttention and not list(model.buffers())
        assert vars(model).keys() == vars(plain).keys()
        assert torch.equal(model(*inputs)[0], plain(*inputs)[0])
        assert torch.equal(twins[2](*inputs)[0], y)


def test_kept_weights_and_undoing_in_any_order() -> None:
    model = attention_of()
    inputs = inputs_of(model, False)
    plain = passed(model, inputs)
    first = forced(model, skip="out_proj")
    assert first.skipped["out_proj"] == "skip='out_proj' names it"
    half = passed(model, inputs)
    second = forced(model)
    whole = passed(model, inputs)
    with second.weights_unchanged():
        assert same(passed(model, inputs), whole)
        assert any(product._kept for product in products_of(model).values())
    second.undo()
    assert same(passed(model, inputs), half) and isinstance(model, Attention)
    second = forced(model)
    first.undo()
    assert same(passed(model, inputs), whole)
    second.undo()
    assert same(passed(model, inputs), plain) and type(model) is nn.MultiheadAttention


def test_one_projection_alone(products: list[str]) -> None:
    for skip, name in (("in_proj*", "out_proj.weight"), ("out_proj", "in_proj_weight")):
        model = attention_of()
        plain = copy.deepcopy(model)
        handle = forced(model, skip=skip)
        products.clear()
        inputs = inputs_of(model, True)
        assert 0.003 < error(model(*inputs)[0], plain(*inputs)[0]) < 0.1
        assert products == [name] and skip in repr(handle.skipped)


def test_sites_are_the_products_that_layers_of_torch_compute() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 48, batch_first=True)
    names = {name.split("layers.0.")[1] for name in forced(model).sites}
    assert names == {
        "self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2",
        "multihead_attn.in_proj_weight.0:40", "multihead_attn.in_proj_weight.40:120",
        "multihead_attn.out_proj",
    }  # fmt: skip
    attention = nn.MultiheadAttention(WIDTH, HEADS)
    shapes = {
        name: (site.module.out_features, site.module.in_features)
        for name, site in forced(attention).sites.items()
    }
    assert shapes == {
        "in_proj_weight": (120, 40), "in_proj_weight.0:40": (40, 40),
        "in_proj_weight.40:120": (80, 40), "out_proj": (40, 40),
    }  # fmt: skip


def test_layers_of_torch_quantize_each_product(products: list[str]) -> None:
    for norm_first in (False, True):
        model = nn.Transformer(
            WIDTH, HEADS, 1, 1, 48, 0.0, batch_first=True, norm_first=norm_first
        ).bfloat16()
        plain = copy.deepcopy(model)
        handle = forced(model)
        x, y = (torch.randn(BATCH, rows, WIDTH).bfloat16() for rows in (ROWS, SOURCE))
        for is_training, has_gradients in ((True, True), (False, True), (False, False)):
            products.clear()
            with torch.set_grad_enabled(has_gradients):
                found = model.train(is_training)(x, y)
                expected = plain.train(is_training)(x, y)
            assert len(products) == 7 and 0.003 < error(found, expected) < 0.1
        rows, *_ = observed_rows(handle, lambda model=model, x=x, y=y: model(x, y))
        assert set(rows) == set(handle.sites) and all(rows.values())
