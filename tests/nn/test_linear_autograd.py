"""Second derivatives, tracing and transforms of converted layers.

Kernels of an H200 are emulated here; m from 16 on is quantized.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lokakern
from lokakern.errors import UnsupportedError
from lokakern.functional import checks
from lokakern.functional.norm_backward import norm_backward
from lokakern.mods.together import FusedLinear
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import PLAIN
from tests.support.routed_layers import BY_GROUP, BY_ROW, ROUTES, K, M, N, layer_of, plain_of, rows

SEEDS = (0,)
SINGLE = [(BY_ROW, PLAIN, PLAIN), (PLAIN, BY_ROW, PLAIN), (PLAIN, PLAIN, BY_GROUP)]


def norms(found: Any) -> list[float | None]:
    return [None if x is None else x.float().norm().item() for x in found]


def behind(layer: nn.Module, before: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Derivatives of a gradient penalty, of all parameters and x."""
    model = nn.Sequential(before, nn.Tanh(), layer)
    model.zero_grad()
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.float().square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


# ---- twice ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("routes", [ROUTES, *SINGLE], ids=["all", "output", "input", "weight"])
def test_a_gradient_penalty_has_the_gradients_of_linear(
    routes: tuple[str, str, str], dtype: torch.dtype
) -> None:
    """Nothing of it is quantized; a weight behind which nothing requires a gradient is no less."""
    layer = layer_of(routes, dtype=dtype)
    before = nn.Linear(K, K, dtype=dtype)
    x = rows().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        for other in (layer, layer_of(routes, n=K)):  # the last one, and one in front of another
            expected, found = (behind(a, before, x) for a in (plain_of(other), other))
            assert [x is None for x in found] == [x is None for x in expected]
            assert found[3] is not None and found[3].any()  # the weight of the layer
            for a, b in zip(found, expected, strict=True):
                if a is not None and b is not None:
                    assert a.dtype is b.dtype
                    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_second_derivatives_equal_linear() -> None:
    """Derivatives of x, weight and bias through each gradient equal manual ones in float64."""
    layer = layer_of()
    x, gradient = rows().requires_grad_(), rows(k=N, seed=2).requires_grad_()
    results = []
    for call in (layer, plain_of(layer)):
        leaves = (x, *call.parameters())
        first = torch.autograd.grad(call(x), leaves, gradient, create_graph=True)
        total = sum(g.float().square().sum() for g in first)
        assert isinstance(total, Tensor)
        second = torch.autograd.grad(total, (*leaves[:2], gradient))
        results.append([*first, *second])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)  # the first, too, is not quantized then
    (quantized,) = torch.autograd.grad(layer(x), x, gradient)
    assert not torch.equal(quantized, results[0][0])


def test_second_derivatives_of_batched_fused_padded_and_recomputed_layers() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(K, 24, dtype=torch.bfloat16) for _ in range(2)]
    fused, padded = FusedLinear(parts), layer_of(n=37, k=51)
    fused.take_routes(ROUTES, None)
    padded.padding = (5, 3)
    padded.changed()
    plain = plain_of(padded)
    layer = layer_of()
    cases: list[tuple[Callable[..., Any], Callable[..., Any], list[Tensor], Tensor]] = [
        (lambda x: torch.cat(fused(x), -1), lambda x: torch.cat([p(x) for p in parts], -1),
         [part.weight for part in parts], rows()),
        (padded, plain, [padded.weight, plain.weight], rows(k=51)),
        (layer, functional_of(layer), [layer.weight], rows().view(2, M // 2, K).transpose(0, 1)),
        (lambda x: checkpoint(layer, x, use_reentrant=False), functional_of(layer),
         [layer.weight], rows()),
    ]  # fmt: skip
    for call, other, weights, x in cases:
        results = []
        for function in (call, other):
            leaf = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(function(leaf).float().sum(), leaf, create_graph=True)
            loss = g.float().square().sum()
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            results.append([g for g in grads if g is not None])
        assert results[0] and len(results[0]) == len(results[1])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def functional_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.linear(x, layer.weight, layer.bias)


def test_second_derivatives_raise_after_a_weight_changed() -> None:
    """Once it is what was multiplied, of a copy in FP8; of that there is no second derivative."""
    layer, x = layer_of(dtype=torch.float32), rows().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3.0)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(UnsupportedError, match=r"\[40, 64\], which was changed since"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("call", ["gemm", "gemm_norm"])
def test_second_derivatives_of_products_equal_torch(call: str) -> None:
    torch.manual_seed(0)
    a, w, bias = (torch.randn(*s).bfloat16().requires_grad_() for s in ((32, K), (N, K), (N,)))
    weights = torch.randn(32, N)
    mine: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    if call == "gemm":
        mine = lambda a: lokakern.gemm(a, w.t(), bias=bias, budget=0.06)  # noqa: E731
        theirs = lambda a: functional.linear(a, w, bias)  # noqa: E731
    else:
        mine = lambda a: lokakern.gemm_norm(  # noqa: E731
            a, w.t() * (1 + a.sum(0)[:, None]), norm="layer", bias=bias
        )
        theirs = lambda a: functional.layer_norm(  # noqa: E731
            a.float() @ (w.t() * (1 + a.sum(0)[:, None])).float() + bias.float(), (N,)
        ).bfloat16()
    results = []
    for function in (mine, theirs):
        # Of a itself, and of what it is multiplied by: where that depends on a, no path twice.
        y = function(a * w.float().mean().bfloat16())
        (g,) = torch.autograd.grad((y.float() * weights).sum(), a, create_graph=True)
        assert g.requires_grad
        results.append(
            torch.autograd.grad(g.float().square().sum(), [a, w, bias], allow_unused=True)
        )
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(
                found, expected, rtol=0.03, atol=0.03 * expected.abs().max().item()
            )


def test_differentiating_gradients_of_a_norm_raises() -> None:
    dd, y = rows(), rows(seed=2)
    expected = norm_backward(dd, y, norm="layer", out_format="bfloat16").dy
    for operands in ((dd.clone().requires_grad_(), y), (dd, y.clone().requires_grad_())):
        with pytest.raises(UnsupportedError, match=r"norm_backward.*detach"):
            norm_backward(*operands, norm="layer", out_format="bfloat16")
        with torch.no_grad():
            found = norm_backward(*operands, norm="layer", out_format="bfloat16").dy
        assert found is not None and expected is not None and torch.equal(found, expected)


# ---- transformed and traced ----


@pytest.fixture(autouse=True)
def said() -> None:
    checks.warn_once.cache_clear()


def test_torch_func_transforms_the_unquantized_layer_with_a_warning() -> None:
    layer, x = layer_of(), rows()
    plain = plain_of(layer)

    def loss(call: nn.Module) -> Callable[..., Tensor]:
        return lambda p, x: torch.func.functional_call(call, p, (x,)).float().square().mean()

    def all_of(call: nn.Module) -> list[Tensor]:
        p = dict(call.named_parameters())
        each = torch.func.vmap(torch.func.grad(loss(call)), (None, 0))(p, x.view(M, 1, K))
        tangents = torch.func.jvp(call, (x,), (rows(seed=5),))
        grads = torch.func.grad(loss(call))(p, x)
        return [torch.func.vmap(call)(x.view(2, M // 2, K)), *each.values(), *tangents,
                *grads.values()]  # fmt: skip

    with pytest.warns(UserWarning, match=r"lokakern multiplies unquantized.*undo") as record:
        found = all_of(layer)
    assert sum("lokakern" in str(warning.message) for warning in record) == 1
    for a, b in zip(found, all_of(plain), strict=True):
        assert torch.equal(a, b)


def test_compiled_torch_func_transforms_the_unquantized_layer() -> None:
    """An op of ours in such a graph has no derivative: gradients would be zero."""
    torch._dynamo.reset()
    layer, x = layer_of(), rows()
    results = []
    for call in (layer, plain_of(layer)):

        def loss(p: dict[str, Tensor], x: Tensor, call: nn.Module = call) -> Tensor:
            return torch.func.functional_call(call, p, (x,)).float().square().mean()  # type: ignore[no-any-return]

        p = {name: value.detach() for name, value in call.named_parameters()}
        compiled = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)
        each = torch.compile(torch.func.vmap(call), backend="aot_eager", fullgraph=True)
        results.append([*compiled(p, x).values(), each(x.view(2, M // 2, K))])
    for a, b in zip(*results, strict=True):
        assert a.any() and torch.equal(a, b)


def test_functional_call_without_transforms_quantizes() -> None:
    layer, other = layer_of(), layer_of()
    p = {name: 2.0 * x.detach() for name, x in layer.named_parameters()}
    other.load_state_dict(p)
    assert torch.equal(torch.func.functional_call(layer, p, (rows(),)), other(rows()))


def test_torch_jit_trace_and_fx_give_the_unquantized_layer() -> None:
    layer = layer_of()
    plain = plain_of(layer)
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace, torch\.fx"):
        traced = torch.jit.trace(layer, rows(), check_trace=False)  # type: ignore[no-untyped-call]
    symbolic = fx.symbolic_trace(nn.Sequential(layer))
    for m in (M, 8, 100):
        for call in (traced, symbolic):
            assert torch.equal(call(rows(m)), plain(rows(m)))
    norm = LinearNormAct(K, N, dtype=torch.bfloat16)
    norm.take_routes(ROUTES, norm.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fx.symbolic_trace(nn.Sequential(norm))(rows()).shape == (M, N)


@pytest.mark.parametrize("kind", ["routed", "plain", "norm", "fused"])
def test_torch_jit_script_raises_with_a_remedy_and_changes_nothing(kind: str) -> None:
    layers = {
        "routed": layer_of(), "plain": layer_of((PLAIN,) * 3),
        "norm": LinearNormAct(K, N, dtype=torch.bfloat16),
        "fused": FusedLinear([nn.Linear(K, N, dtype=torch.bfloat16)]),
    }  # fmt: skip
    model = nn.Sequential(layers[kind])
    with pytest.raises(UnsupportedError, match=r"lokakern's \w+: undo.*handle\.undo\(\)"):
        torch.jit.script(model)
    assert model[0] is layers[kind]
    first = nn.Sequential(nn.Linear(K, N).bfloat16())
    handle = lokakern.convert(first, 0.06)
    handle.undo()
    assert torch.equal(torch.jit.script(first)(rows()), first(rows()))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_multiplied_unquantized_with_a_warning(layout: torch.layout) -> None:
    layer = layer_of()
    plain = plain_of(layer)
    parts = [rows(m) for m in (16, 5, 32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a prototype
        nested = torch.nested.nested_tensor(parts, layout=layout)
    checks.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="multiplies nested tensors unquantized") as told:
        found, expected, _ = [one(nested) for one in (layer, plain, layer)]
    assert len(told) == 1
    for y, z in zip(found.unbind(), expected.unbind(), strict=True):
        assert torch.equal(y, z)


def test_gemm_under_torch_func_equals_the_unquantized_product() -> None:
    a, w = rows(), rows(N, seed=2)
    prepared = lokakern.prepare_weight(w, 0.06, (16, 4096))

    def mine(a: Tensor, b: Any = w.t()) -> Tensor:  # noqa: B008
        return lokakern.gemm(a, b, budget=0.06).float().square().sum()

    def theirs(a: Tensor) -> Tensor:
        return (a @ w.t()).float().square().sum()

    expected = torch.func.grad(theirs)(a)
    assert torch.equal(torch.func.grad(mine)(a), expected)
    assert torch.equal(torch.func.grad(lambda a: mine(a, prepared))(a), expected)
    batches = a.view(2, M // 2, K)
    assert torch.equal(torch.func.vmap(mine)(batches), torch.func.vmap(theirs)(batches))
    found, expected = (torch.func.jvp(f, (a,), (a,))[1] for f in (mine, theirs))
    assert torch.equal(found, expected)
    lost = lokakern.quantize(w, granularity="row").t()
    with pytest.raises(UnsupportedError, match="b has no source"):
        torch.func.grad(lambda a: mine(a, lost))(a)


def test_gemm_is_traced_unquantized_and_other_functions_raise() -> None:
    w = rows(N, seed=2)
    traced = torch.jit.trace(lambda a: lokakern.gemm(a, w.t(), budget=0.06), rows())  # type: ignore[no-untyped-call]
    for m in (M, 8):
        assert torch.equal(traced(rows(m)), rows(m) @ w.t())
    for call in (
        lambda a: lokakern.gemm_norm(a, w.t(), norm="layer"), lambda a: lokakern.quantize(a).data,
    ):  # fmt: skip
        call(rows())  # a plan is kept
        with pytest.raises(UnsupportedError, match=r"torch\.func, torch\.jit\.trace"):
            torch.jit.trace(call, rows())  # type: ignore[no-untyped-call]
        with pytest.raises(UnsupportedError, match=r"torch\.func, torch\.jit\.trace"):
            torch.func.vmap(call)(rows()[None])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode_keeps_tangents(mode: Any) -> None:
    layer, x, tangent = layer_of(), rows(), rows(seed=5)
    w = layer.weight
    with mode(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        for call in (layer, lambda x: lokakern.gemm(x, w.t(), budget=0.06)):
            found = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
            assert torch.equal(found, tangent @ w.t())


def test_deep_copies_have_second_derivatives() -> None:
    layer = copy.deepcopy(layer_of())
    assert isinstance(layer, Linear)
    before = nn.Linear(K, K, dtype=torch.bfloat16)
    found, expected = (norms(behind(a, before, rows())) for a in (layer, plain_of(layer)))
    assert found[:4] == pytest.approx(expected[:4], rel=0.02) and found[4] is expected[4] is None
