"""Converted layers in float16: products by routes for it, its range, and what is left alone.

Kernels of an H200 are emulated on a CPU; m from 16 on is quantized, less is not.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.functional import checks
from lokakern.native import NATIVE
from lokakern.nn.chain_plan import ChainLayer, ChainStep, plan_text
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, delayed, in_dtype, kernels_of, new_delayed, settle
from lokakern.nn.static_handoff import set_handoff
from lokakern.types import Format, Granularity
from tests.support import native
from tests.support.routed_layers import BY_GROUP, BY_ROW, GROUP, ROUTES, ROW, passed, plain_of, same

HALF = torch.float16
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
IN_HALF = tuple(in_dtype(route, HALF) for route in ROUTES)
M, N, K = 64, 96, 128


def layer_of(
    where: str = "cpu", routes: tuple[str, ...] = IN_HALF, n: int = N, k: int = K,
    bias: bool = True, dtype: torch.dtype = HALF,
) -> Linear:  # fmt: skip
    torch.manual_seed(0)
    layer = Linear(k, n, bias, dtype=dtype).to(where)
    layer.take_routes(routes, layer.weight)
    return layer


def rows(m: int = M, k: int = K, seed: int = 1, where: str = "cpu") -> Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return x.to(HALF).to(where)


def rounded(x: Tensor, scales: Granularity) -> Tensor:
    """Quantize a matrix along its rows and dequantize it, in float64."""
    return numerics.dequantize(numerics.quantize(x, Format.E4M3FN, scales)).double()


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Within the rounding of the output to float16, subnormal too, and of sums.

    Those are float32 in emulations; FP8 tensor cores of Hopper add with some 14 bits.
    """
    assert found.shape == exact.shape and found.dtype is HALF
    scale = exact.abs().max().clamp(min=1e-30)
    sums = 1e-3 if found.is_cuda else 1e-5
    allowed = 2.0**-11 * exact.abs() + sums * scale + 2.0**-25
    assert ((found.double() - exact).abs() <= allowed).all()


# ---- what is computed ----


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("n", "k"), [(N, K), (48, 272)])
def test_each_product_equals_that_of_its_quantized_operands(where: str, n: int, k: int) -> None:
    layer = layer_of(where, n=n, k=k)
    x, gradient = rows(k=k, where=where), rows(k=n, seed=2, where=where)
    y, grad_x, grad_weight, grad_bias = passed(layer, x, gradient)
    w = layer.weight.detach()
    assert_close(y, rounded(x, ROW) @ rounded(w, ROW).t() + layer.bias.detach().double())
    assert_close(grad_x, rounded(gradient, ROW) @ rounded(w.t(), ROW).t())
    assert_close(grad_weight, rounded(gradient.t(), GROUP) @ rounded(x.t(), GROUP).t())
    assert_close(grad_bias, gradient.double().sum(0))


@pytest.mark.parametrize("m", [0, 1, 8])
def test_small_calls_are_bitwise_equal_to_linear(m: int) -> None:
    layer = layer_of()
    x, gradient = rows(m), rows(m, N, seed=2)
    assert same(passed(layer, x, gradient), passed(plain_of(layer), x, gradient))


def test_no_rows_of_a_route_without_a_lower_end() -> None:
    every = in_dtype(f"row;16:0={BY_ROW.split('=')[2].split(';')[0]};1:0=", HALF)
    layer = layer_of(routes=(every, every, PLAIN))
    y, *_ = passed(layer, rows(0), rows(0, N))
    assert y.shape == (0, N) and y.dtype is HALF


@pytest.mark.parametrize("where", WHERE)
def test_what_is_not_finite_and_what_overflows_is_never_a_finite_number(where: str) -> None:
    """Rows with NaN and infinities have NaN; those whose sums exceed 65504 infinities."""
    layer = layer_of(where)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
    x = rows(where=where)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0.0, math.nan, math.inf, -math.inf
    x[4], x[5] = 65504.0, -65504.0
    x[6] = 65504.0 / K  # whose sum is the largest number
    with torch.no_grad():
        y = layer(x)
    exact = rounded(x[6:], ROW).sum(1)
    assert (y[0] == 0.0).all() and y[1:4].isnan().all()
    assert (y[4] == math.inf).all() and (y[5] == -math.inf).all()
    assert y[6:].isfinite().all()
    assert_close(y[6:], exact[:, None].expand(-1, N))


@pytest.mark.parametrize("where", WHERE)
def test_float32_weights_under_autocast(where: str) -> None:
    layer = layer_of(where, dtype=torch.float32)
    plain = plain_of(layer).to(where)
    x = rows(where=where).float()
    assert torch.equal(layer(x), plain(x))
    with torch.autocast(where, HALF):
        y = layer(x)
        y.float().square().sum().backward()
    bias = layer.bias.detach().to(HALF).double()
    w = layer.weight.detach()  # which is rounded once
    assert_close(y.detach(), rounded(x.to(HALF), ROW) @ rounded(w, ROW).t() + bias)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_other_dtypes_than_the_one_of_the_route_are_multiplied_unquantized() -> None:
    for routes, dtype, others in ((IN_HALF, HALF, torch.bfloat16), (ROUTES, torch.bfloat16, HALF)):
        checks.warn_once.cache_clear()
        layer = layer_of(routes=routes, dtype=torch.float32)
        plain = plain_of(layer)
        name = str(dtype).removeprefix("torch.")
        with torch.autocast("cpu", others), pytest.warns(match=f"its kernels are for {name}"):
            assert torch.equal(layer(rows().float()), plain(rows().float()))
        given = rows().to(others)
        layer, plain = layer.to(others), plain.to(others)
        with torch.no_grad():
            assert torch.equal(layer(given), plain(given))
            assert torch.equal(torch.compile(layer, backend="aot_eager")(given), plain(given))


def test_frozen_weights_and_static_scales() -> None:
    layer, x = layer_of(), rows()
    layer.freeze()
    bias = layer.bias.detach().double()
    with torch.no_grad():
        y = layer(x)
        assert_close(y, rounded(x, ROW) @ rounded(layer.weight, ROW).t() + bias)
        small = x[:8]  # unquantized, by the weight itself
        assert torch.equal(layer(small), nn.functional.linear(small, layer.weight, layer.bias))
        layer.offload(torch.device("cpu"))
        assert layer.is_offloaded and torch.equal(layer(x), y)
        dequantized = rounded(layer.weight, ROW).to(HALF).double()
        assert_close(layer(small), small.double() @ dequantized.t() + bias)
        scale = 0.03125
        values = (x.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        layer.bring_back()
        assert_close(layer(x, str(scale)), values @ rounded(layer.weight, ROW).t() + bias)


@pytest.mark.parametrize("where", WHERE)
def test_scales_of_earlier_steps(where: str) -> None:
    tensor = "tensor;16:0=cuda.quantize_tensor+cuda.scaled_gemm_tensor;1:0="
    key = f"float16-{where}"
    routes = tuple(delayed(in_dtype(tensor, HALF), key) for _ in range(2))
    layer = layer_of(where, (*routes, PLAIN))
    layer.keep_delayed(key, new_delayed(torch.device(where)))
    x, gradient = rows(where=where), rows(k=N, seed=2, where=where)
    first = passed(layer, x, gradient)
    state = layer.delayed[key]  # type: ignore[index]
    assert state.amax.tolist() == [float(x.abs().max()), float(layer.weight.abs().max())]
    state.scales.copy_(torch.tensor([state.amax[0], state.amax[1], state.amax_behind[0]]) / 448.0)
    settle(key, range(3))
    again = passed(layer, x, gradient)
    assert all(y.dtype is HALF for y in again)
    assert same(again[:2], first[:2])  # by scales of the same amax
    x[0, 0] = math.inf
    assert not layer(x)[0].isfinite().any() and state.amax.isfinite().all()


# ---- chains ----

STEPS = {
    "fused": ("cuda.quantize_row+cuda.gemm_norm_row", "cuda.gemm_norm_row"),
    "composed": ("cuda.quantize_row+cuda.scaled_gemm_row+cuda.norm_quantize",
                 "cuda.scaled_gemm_row+cuda.norm_quantize"),
}  # fmt: skip
WIDTHS = (K, N, 128, 64)


def chain_of(kinds: str) -> tuple[nn.Sequential, str]:
    """Three layers, of which the second reads and writes FP8, and their plan."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for k, n in itertools.pairwise(WIDTHS):
        modules += [Linear(k, n), nn.LayerNorm(n), nn.SiLU()]
    model = nn.Sequential(*modules)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -0.5, 1.0)
    words = "bias+layer+affine+silu"
    layers = [ChainLayer(n, k, words, 1e-5, ROW) for k, n in itertools.pairwise(WIDTHS)]
    (first, later), none = STEPS[kinds], Granularity.NONE
    steps = (ChainStep(0, first, none, ROW, ROW), ChainStep(1, later, ROW, ROW, ROW),
             ChainStep(2, later, ROW, ROW, none))  # fmt: skip
    segments = [(0, ()), (16, steps)]
    return model.to(HALF), in_dtype(plan_text(layers, segments, segments), HALF)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kinds", STEPS)
def test_a_chain_passes_fp8_between_layers(where: str, kinds: str) -> None:
    """With vectors in float16 where nothing else of a step is; and its range is float16's."""
    model, plan = chain_of(kinds)
    model.to(where)
    x = rows(where=where)
    expected = x.double()
    with torch.no_grad():
        for i in range(0, 9, 3):
            left = rounded(expected.float(), ROW)
            weight, bias = model[i].weight, model[i].bias.double()
            y = left @ rounded(weight, ROW).t() + bias
            y = y.half().double() if kinds == "composed" else y
            norm = (model[i + 1].weight.double(), model[i + 1].bias.double())
            y = nn.functional.layer_norm(y, y.shape[1:], *norm)
            expected = nn.functional.silu(y)
        plain = model(x)
        set_handoff(model, [""] * 9, [""] * 9, "", [plan] + [""] * 8)
        for _ in range(3):  # the third one replays
            y = model(x)
            assert y.dtype is HALF and y.shape == (M, 64)
            # A sum in another order moves some elements to the next FP8 number.
            assert (y.double() - expected).norm() < 0.03 * expected.norm()
        assert not torch.equal(y, plain)
        assert torch.equal(model(x[:8]), one_by_one(model, x[:8]))
        x[1], x[2, 3] = 0.0, math.nan
        y = model(x)
        assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kinds", STEPS)
def test_a_chain_in_cpp_has_the_bits_of_python(where: str, kinds: str, calls: list[Any]) -> None:
    """What is not finite, too."""
    model, plan = chain_of(kinds)
    set_handoff(model.to(where), [""] * 9, [""] * 9, "", [plan] + [""] * 8)
    x, made = rows(where=where), list[bool]()
    x[0], x[1, 1], x[2, 2] = 65504.0, math.inf, math.nan
    model[6].weight[0], model[6].bias[1] = 60000.0, math.inf
    with native.in_use() as library, pytest.MonkeyPatch.context() as patch:

        def counted(*given: Any) -> Any:
            y = library.call_chain(*given)
            made.append(y is not None)
            return y

        patch.setattr(NATIVE, "call_chain", counted)
        expected = model(x)  # of which nothing is recorded
        for _ in range(2):
            library.replay_chain(*calls[0])
        for _ in range(3):
            assert torch.equal(model(x).view(torch.int16), expected.view(torch.int16))
    assert made == [True] * 2 and not expected.isfinite().all()


def one_by_one(model: nn.Sequential, x: Tensor) -> Tensor:
    for module in model:
        x = module(x)
    return x


# ---- gradients that are scaled ----


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_scaled_loss_that_overflows_skips_the_step(where: str, is_compiled: bool) -> None:
    """Gradients above 65504 are infinite, and GradScaler halves its scale until they are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 64)).to(where)
    expected, like = copy.deepcopy(model).double(), copy.deepcopy(model)
    for one, routes in ((model, IN_HALF), (like, ROUTES)):
        for module in one[::2]:
            module.__class__ = Linear
            module.take_routes(routes, module.weight)  # type: ignore[operator]
    call: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
    x = rows(where=where).float()
    scaler = torch.amp.GradScaler(where, init_scale=2.0**16, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    scales = []
    while True:
        optimizer.zero_grad()
        with torch.autocast(where, HALF):
            loss = 500.0 * call(x).float().square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        is_finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]
        if is_finite:
            break
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert all(map(torch.equal, before, model.parameters())), "stepped by infinite gradients"
        assert len(scales) < 32
    assert len(scales) > 2  # at 2^16 the gradient of the output overflows
    (500.0 * expected(x.double()).square().sum()).backward()
    with torch.autocast(where, torch.bfloat16):
        (500.0 * like(x).float().square().sum()).backward()
    every = (one.parameters() for one in (model, like, expected))
    for p, other, exact in zip(*every, strict=True):
        found, of_bfloat16 = ((y.grad - exact.grad).norm() / exact.grad.norm() for y in (p, other))
        assert 0 < found < 1.1 * of_bfloat16, f"{found} of {list(p.shape)}"
    scaler.step(optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


# ---- compiled code ----


def compiled(call: Any, *inputs: Tensor) -> Any:
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        return torch.compile(call, fullgraph=True, dynamic=False)(*inputs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_compiled_products_have_the_bits_of_eager_ones(where: str, is_frozen: bool) -> None:
    """Where Inductor quantizes what it computes, and where the product does."""
    layer, x = layer_of(where), rows(where=where)
    x[1], x[2, 3], x[4, 5], x[6, 7] = 0.0, math.nan, math.inf, 65504.0
    if is_frozen:
        layer.freeze()
    with torch.no_grad():
        for call in (lambda x: layer(x.relu()), lambda x: layer(x)):
            found, expected = compiled(call, x), call(x)
            assert found.dtype is HALF
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_compiled_training_has_the_gradients_of_eager_training(
    where: str, dtype: torch.dtype
) -> None:
    layer = layer_of(where, dtype=dtype)
    x, gradient = rows(where=where).to(dtype), rows(k=N, seed=2, where=where)

    def call(x: Tensor) -> Tensor:
        with torch.autocast(where, HALF, enabled=dtype is not HALF):
            return layer(x)

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        traced = torch.compile(call, fullgraph=True, dynamic=False)
        found, expected = (passed(Called(c, layer), x, gradient) for c in (traced, call))
    *_, bias = found
    assert same(found[:-1], expected[:-1])
    if where == "cpu":
        assert torch.equal(bias, expected[-1])
    else:  # a sum in another order
        assert (bias - expected[-1]).norm() < 1e-3 * expected[-1].norm()


class Called(nn.Module):
    """A function that calls a layer, with the parameters of that."""

    def __init__(self, call: Any, layer: nn.Module) -> None:
        super().__init__()
        self.call, self.layer = call, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)  # type: ignore[no-any-return]


def test_a_route_says_its_dtype() -> None:
    route = in_dtype(BY_GROUP, HALF)
    assert kernels_of(route) == BY_GROUP and route != BY_GROUP
    assert in_dtype(PLAIN, HALF) == PLAIN and in_dtype(BY_ROW, torch.bfloat16) == BY_ROW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert layer_of()(rows()).dtype is HALF


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "activation",
    ["relu", *(pytest.param(x, marks=pytest.mark.rest) for x in ("silu", "hardswish"))],
)
def test_a_kernel_activates_and_quantizes_the_input_of_a_layer(where: str, activation: str) -> None:
    """Eager and compiled; a layer whose kernels are for bfloat16 leaves float16 to torch."""
    layer, x = layer_of(where), rows(where=where)
    layer.freeze()
    route = "row;16:0=,16=cuda.activate_quantize_row;1:0="
    function = getattr(torch.nn.functional, activation)

    def call(x: Tensor) -> Tensor | None:
        return layer.forward_activated(x, activation, route)

    with torch.no_grad():
        expected = layer(function(x))
        for run in (call, lambda x: compiled(call, x)):
            y = run(x)
            assert y is not None and y.dtype is HALF
            if activation == "relu":  # others are not rounded before they are quantized
                assert torch.equal(y, expected)
            else:
                assert (y - expected).norm() < 0.02 * expected.norm()
            assert call(x.bfloat16()) is None and call(x.float()) is None
    layer.thaw()
    layer.take_routes((BY_ROW, "", ""), layer.weight)
    layer.freeze()
    with torch.no_grad():
        assert call(x) is None
