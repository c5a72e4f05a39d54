"""`Linear` with routes: its results, the quantization of weights, and wrappers around it.

Kernels of an H200 are emulated here; m from 16 on is quantized, less is not.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lokakern import numerics
from lokakern.errors import UnknownNameError
from lokakern.functional.checks import row_major
from lokakern.nn import compiled_form, linear, routed_matmul
from lokakern.nn.adoption import adopt, release
from lokakern.nn.linear import Linear, PlainLinear, Routed
from lokakern.nn.routed_matmul import PLAIN, emulation_of, kernel_at, read_route, route_text
from lokakern.registry.register import kernel_named
from lokakern.types import Format, Granularity
from tests.support.routed_layers import (
    BLOCK,
    BLOCK_KERNEL,
    BY_GROUP,
    BY_ROW,
    GROUP,
    ROUTES,
    ROW,
    ROW_KERNEL,
    K,
    M,
    N,
    layer_of,
    passed,
    plain_of,
    rows,
    same,
)

SEEDS = (0,)
BY_TRITON = route_text(ROW, *[[(0, "triton.quantize_row+triton.scaled_gemm_row")]] * 2)
BY_BLOCK = route_text(BLOCK, [(0, BLOCK_KERNEL)], [(0, BLOCK_KERNEL)])


def rounded(x: Tensor, scales: Granularity) -> Tensor:
    """Quantize a matrix along its rows and dequantize it, in float64."""
    return numerics.dequantize(numerics.quantize(x, Format.E4M3FN, scales)).double()


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Within the rounding of the output to bfloat16, and float32 sums."""
    assert found.shape == exact.shape
    scale = exact.abs().max().clamp(min=1e-30)
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * scale).all()


# ---- what is computed ----


@pytest.mark.parametrize(("n", "k"), [(N, K), (37, 51), (1, 3), (130, 257)])
def test_each_product_equals_that_of_its_quantized_operands(n: int, k: int) -> None:
    layer = layer_of(n=n, k=k)
    x, gradient = rows(k=k), rows(k=n, seed=2)
    y, grad_x, grad_weight, grad_bias = passed(layer, x, gradient)
    w = layer.weight.detach()
    assert_close(y, rounded(x, ROW) @ rounded(w, ROW).t() + layer.bias.detach().double())
    assert_close(grad_x, rounded(gradient, ROW) @ rounded(w.t(), ROW).t())
    assert_close(grad_weight, rounded(gradient.t(), GROUP) @ rounded(x.t(), GROUP).t())
    assert_close(grad_bias, gradient.double().sum(0))


def test_block_scales_without_a_bias() -> None:
    layer = layer_of((BY_BLOCK, BY_BLOCK, PLAIN), 130, 257, bias=False)
    x, gradient = rows(7, 257), rows(7, 130, seed=2)
    y, grad_x, grad_weight = passed(layer, x, gradient)
    w = layer.weight.detach()
    assert_close(y, rounded(x, GROUP) @ rounded(w, BLOCK).t())
    assert_close(grad_x, rounded(gradient, GROUP) @ rounded(w.t(), BLOCK).t())
    assert_close(grad_weight, gradient.double().t() @ x.double())


@pytest.mark.parametrize("routes", [(PLAIN, PLAIN, PLAIN), ROUTES])
@pytest.mark.parametrize("m", [0, 1, 8])
def test_unquantized_layers_are_bitwise_equal_to_linear(
    m: int, routes: tuple[str, str, str]
) -> None:
    layer = layer_of(routes)
    x, gradient = rows(m), rows(m, N, seed=2)
    assert same(passed(layer, x, gradient), passed(plain_of(layer), x, gradient))


def strided(m: int) -> list[Tensor]:
    """Rows in every order in which they come, ``[..., K]``."""
    x = rows(m)
    return [
        x, x.view(2, m // 2, K), x.view(2, 2, m // 4, K), x.view(m // 4, 4, K).transpose(0, 1),
        x.t().contiguous().t(), torch.cat([x, x], 1).view(m, 2, K)[:, 1:],
        x[:1].expand(m, K), x.view(m // 4, 2, 2, K).permute(2, 0, 1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("place", range(8))
def test_unquantized_layers_are_bitwise_equal_for_any_layout_of_rows(
    place: int, is_trained: bool, bias: bool
) -> None:
    layer = layer_of(bias=bias)
    plain = plain_of(layer)
    layer.requires_grad_(is_trained)
    plain.requires_grad_(is_trained)
    x = strided(12)[place]
    gradient = torch.randn(*x.shape[:-1], N).bfloat16()
    assert same(passed(layer, x, gradient), passed(plain, x, gradient))
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        wide, other = layer.float(), plain.float()
        assert same(passed(wide, x.float(), gradient), passed(other, x.float(), gradient))


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("routes", [(PLAIN, BY_ROW, PLAIN), (BY_ROW, PLAIN, PLAIN)], ids=str)
def test_quantizing_one_product_does_not_change_bits_of_the_others(
    routes: tuple[str, str, str], place: int
) -> None:
    layer = layer_of(routes)
    x = strided(48)[place]
    gradient = torch.randn(*x.shape[:-1], N).bfloat16()
    found, plain = passed(layer, x, gradient), passed(plain_of(layer), x, gradient)
    are_equal = [torch.equal(a, b) for a, b in zip(found, plain, strict=True)]
    assert are_equal == [not routes[0], not routes[1], True, True]


def test_strided_rows_are_bitwise_equal_with_dynamic_m() -> None:
    torch._dynamo.reset()
    layer = layer_of()
    plain = plain_of(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for m in (12, 8):
        x = rows(m).view(m // 4, 4, K).transpose(0, 1)
        assert torch.equal(compiled(x), plain(x))
    assert counter.frame_count == 1


def test_products_have_separate_routes() -> None:
    for place in range(3):
        routes = [PLAIN] * 3
        routes[place] = ROUTES[place]
        layer = layer_of((routes[0], routes[1], routes[2]))
        found = passed(layer, rows(), rows(k=N, seed=2))
        plain = passed(plain_of(layer), rows(), rows(k=N, seed=2))
        whole = passed(layer_of(), rows(), rows(k=N, seed=2))
        for number in range(3):
            expected = whole if number == place else plain
            assert torch.equal(found[number], expected[number]), (place, number)


def test_non_finite_rows_affect_only_themselves_and_zero_rows_stay_zero() -> None:
    layer = layer_of(bias=False)
    x = rows()
    x[3] = 0.0
    x[5, 7], x[6, 0] = float("nan"), float("inf")
    with torch.no_grad():
        y = layer(x)
    assert (y[3] == 0).all()
    assert y[5:7].isnan().all()
    others = [i for i in range(M) if i not in (5, 6)]
    assert torch.equal(y[others], layer(rows_without(x, 5, 6)).detach()[others])


def rows_without(x: Tensor, *places: int) -> Tensor:
    x = x.clone()
    x[list(places)] = 0.0
    return x


def test_any_axes_and_strides() -> None:
    layer = layer_of()
    x = rows(96)
    expected = layer(x)
    assert torch.equal(layer(x.view(2, 3, 16, K)), expected.view(2, 3, 16, N))
    assert torch.equal(layer(x.t().contiguous().t()), expected)
    wide = torch.cat([rows(96, 1), x], 1)[:, 1:]  # every row askew
    assert torch.equal(layer(wide), expected)
    y = layer(x.clone().requires_grad_())
    y.sum().backward()  # the gradient is one element, expanded
    assert_close(layer.bias.grad, torch.full((N,), 96.0).double())


def test_autocast_quantizes_only_bfloat16() -> None:
    layer = layer_of(dtype=torch.float32)
    plain = plain_of(layer)
    x = rows().float()
    assert torch.equal(layer(x), plain(x))  # float32 products were never measured
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    w = layer.weight.detach()  # which is rounded once
    bias = layer.bias.detach().bfloat16().double()
    assert y.dtype == torch.bfloat16
    assert_close(y.detach(), rounded(x.bfloat16(), ROW) @ rounded(w, ROW).t() + bias)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        layer(rows())  # as nn.Linear: nobody casts


def test_a_weight_may_change_before_the_backward_pass() -> None:
    """The gradient is that of nn.Linear under autocast, by the multiplied operands."""
    gradients = []
    for changes in (False, True):
        layer, x = layer_of(dtype=torch.float32), rows().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        if changes:
            with torch.no_grad():
                layer.weight.mul_(3.0)
        gradients.append(torch.autograd.grad(y.float().square().sum(), (x, layer.weight)))
    assert same(list(gradients[0]), list(gradients[1]))


def test_route_texts_are_parsed_back() -> None:
    assert read_route(BY_ROW) == (ROW, [(0, ""), (16, ROW_KERNEL)], [(0, ""), (17, ROW_KERNEL)])
    assert [kernel_at(BY_ROW, m) for m in (0, 15, 16, 17, 4096)] == ["", "", *[ROW_KERNEL] * 3]
    assert kernel_at(PLAIN, 5) == "" and route_text(ROW, [(0, "")], [(0, "")]) == PLAIN
    assert emulation_of(kernel_named(BLOCK_KERNEL)).b_granularity is BLOCK
    layer = layer_of((BY_ROW.replace("scaled_gemm_row", "nobody"), PLAIN, PLAIN))
    with pytest.raises(UnknownNameError, match=r"nobody.* is not registered"):
        layer(rows())


# ---- compiled ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_compiles_without_graph_breaks_to_the_same_result(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    layer = layer_of(dtype=dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, gradient = rows().to(dtype), rows(k=N, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        expected, found = (passed(call, x, gradient) for call in (layer, compiled))
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert same(found, expected)


@pytest.mark.parametrize("m", [8, 48])
@pytest.mark.parametrize("routes", [ROUTES, (BY_ROW, PLAIN, PLAIN)], ids=["all", "output"])
def test_compiled_unquantized_layers_equal_linear(m: int, routes: tuple[str, str, str]) -> None:
    """The graph contains no op of lokakern if m is known."""
    torch._dynamo.reset()
    layer, ops = layer_of(routes), []

    def look(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=look)

    x, gradient = rows(2 * m).view(2, m, K).transpose(0, 1), rows(2 * m, N, 2).view(m, 2, N)
    x = x[: m // 4] if m == 8 else x
    gradient = gradient[: len(x)]
    found = passed(torch.compile(layer, backend=backend, fullgraph=True), x, gradient)
    assert any("lokakern" in op for op in ops) == (m == 48)
    if m == 8:
        assert same(found, passed(plain_of(layer), x, gradient))


@pytest.mark.parametrize("route", [BY_ROW, BY_BLOCK])
def test_a_column_major_gradient_gives_the_same_result(route: str) -> None:
    torch._dynamo.reset()
    layer = layer_of((route, route, PLAIN), n=256, k=256)

    def turned(x: Tensor) -> Tensor:
        return layer(x).t().contiguous() * 3.0

    x = rows(k=256).requires_grad_()
    found = []
    for call in (turned, torch.compile(turned, backend="aot_eager", fullgraph=True)):
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), x)))
    assert same(list(found[0]), list(found[1]))


@pytest.mark.parametrize(("n", "start", "pitch"), [(N, 8, 96), (N, 3, 96), (N, 8, 77), (37, 8, 96)])
def test_sliced_gradients_give_the_same_result(n: int, start: int, pitch: int) -> None:
    layer = layer_of(n=n)
    gradient = rows(k=n, seed=2)
    wide = torch.full((M, pitch), float("nan")).bfloat16()
    wide[:, start : start + n] = gradient
    tall = torch.full((pitch, M + 8), float("nan")).bfloat16()
    tall[start : start + n, :M] = gradient.t()
    expected = passed(layer, rows(), gradient)
    for given in (wide[:, start : start + n], tall[start : start + n, :M].t()):
        assert same(passed(layer, rows(), given), expected)


@pytest.mark.parametrize("is_ours", [True, False], ids=["quantizer of ours", "library"])
def test_kernels_get_slices_without_a_copy_if_they_read_them(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    cpu = torch.device("cpu")
    loaded = routed_matmul._load_route(BY_GROUP, cpu)
    kernel = loaded.kernels[0][1]
    assert kernel is not None and kernel.parts
    given = []

    def launch(a: Tensor, *others: Any) -> None:
        given.append((a.data_ptr(), a.stride()))
        kernel.launch(a, *others)

    spied = replace(kernel, launch=launch, parts=kernel.parts if is_ours else ())
    both = ([None, spied], loaded.kernels[1])
    monkeypatch.setitem(routed_matmul._ROUTES, (BY_GROUP, cpu), loaded._replace(kernels=both))
    wide = rows(k=96, seed=2)
    gradient = wide[:, 8 : 8 + N]
    found = torch.ops.lokakern.weight_gradient(gradient, rows(), BY_GROUP)
    ((place, stride),) = given
    assert (place == gradient.data_ptr()) == is_ours and stride == (1, 96 if is_ours else N)
    expected = torch.ops.lokakern.weight_gradient(gradient.contiguous(), rows(), BY_GROUP)
    assert torch.equal(found, expected)


def test_a_compiled_sliced_gradient_is_not_copied() -> None:
    """The gradient is a slice of a sum over a concatenation, as in the norms of Wukong."""
    torch._dynamo.reset()
    layer, other = layer_of(), rows(k=16)
    graphs = []

    def look(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=look)

    def beside(x: Tensor) -> Tensor:
        return torch.cat([other, layer(x)], 1).relu() * 3.0

    x = rows().requires_grad_()
    found = []
    for call in (beside, torch.compile(beside, backend=backend, fullgraph=True)):
        found.append(torch.autograd.grad(call(x).float().square().sum(), [x, layer.weight]))
    assert same(list(found[0]), list(found[1]))
    asked = torch.ops.lokakern.weight_gradient.default
    (gradient,) = (n.args[0] for n in graphs[-1].graph.nodes if n.target is asked)
    assert gradient.target is torch.ops.aten.slice.Tensor
    assert gradient.meta["val"].stride() == (N + 16, 1)


def test_an_unpickled_layer_compiles() -> None:
    layer, x = layer_of(), rows()
    routed_matmul.prepare_to_be_compiled.cache_clear()
    del (
        routed_matmul.find_activator._dynamo_marked_constant
    )  # as in a process that converts nothing
    torch._dynamo.reset()
    arrived = pickle.loads(pickle.dumps(layer))
    compiled = torch.compile(arrived, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_compiled_layers_accept_no_rows() -> None:
    torch._dynamo.reset()
    layer = layer_of((BY_BLOCK, PLAIN, PLAIN), k=256)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert compiled(rows(0, 256)).shape == (0, N)
        assert layer(rows(k=256).t().contiguous().t(), "0.01").isfinite().all()


def test_one_graph_serves_all_m_with_the_kernel_of_each() -> None:
    torch._dynamo.reset()
    layer = layer_of()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for m in (96, 8, 33, 16, 15, 4096):  # not k first: sizes that are equal share a symbol
        assert torch.equal(compiled(rows(m)), layer(rows(m))), m
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape", [(1, K), (0, K), (1, 1, K)], ids=str)
def test_a_graph_of_dynamic_sizes_begins_with_one_sample_or_none(shape: tuple[int, ...]) -> None:
    """Its number of rows is then a symbol with a known value."""
    x = rows(shape[0]).view(shape)
    for is_frozen in (False, True):
        torch._dynamo.reset()
        layer = layer_of()
        if is_frozen:
            layer.freeze()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))


def test_fake_implementations_match_the_ops() -> None:
    x, w = rows(), rows(N, seed=3)
    data, scale = routed_matmul.quantize_weight(w, "row")
    # Not "test_schema", which subtracts outputs, and FP8 has no difference.
    check = functools.partial(
        torch.library.opcheck, test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
    )
    for weight in (w, w.t(), w[:, :51].contiguous()):
        check(torch.ops.lokakern.quantize_weight, (weight, "row"))
    for a in (x, x.t().contiguous().t()):
        check(torch.ops.lokakern.routed_gemm, (a, w.t(), data, scale, None, BY_ROW))
        check(torch.ops.lokakern.weight_gradient, (rows(k=N, seed=2), a, BY_GROUP))


# ---- weights in FP8 ----


def test_inference_freezes_a_weight_that_casts_do_not_change() -> None:
    layer = layer_of(k=51)
    x = rows(k=51)
    with torch.no_grad():
        expected = layer(x)
        layer.freeze()
        assert torch.equal(layer(x), expected)
        layer.weight.zero_()
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer.float().bfloat16()(x), expected)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        assert list(layer.state_dict()) == ["weight", "bias"]
        other = layer_of(k=51)
        other.weight.mul_(2.0)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), other(x))
        layer.thaw()
        assert torch.equal(layer(x), other(x)) and not list(layer.buffers())


def test_inference_makes_unquantized_weights_column_major_where_faster() -> None:
    layer = layer_of((PLAIN,) * 3, k=51)
    x = rows(k=51).t().contiguous().t()
    with torch.no_grad():
        expected = layer(x)
        layer.freeze()
        assert [name for name, _ in layer.named_buffers()] == ["held_weight"]
        assert layer.held_weight.stride() == (1, N) and layer.weight.is_contiguous()
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for call in (layer, compiled, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(call(x), expected)
        layer.weight.zero_()
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x.contiguous()), plain_of(layer)(x))  # rows are for the parameter
        assert list(layer.state_dict()) == ["weight", "bias"]
        other, place = layer_of(k=51), layer.held_weight.data_ptr()
        other.weight.mul_(2.0)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), plain_of(other)(x)) and place == layer.held_weight.data_ptr()
        layer.load_state_dict({n: 3 * p for n, p in other.state_dict().items()}, assign=True)
        assert torch.equal(layer(x), plain_of(layer)(x)) and layer.held_weight.stride() == (1, N)
    gradient = rows(k=N, seed=2)
    assert same(passed(layer, x, gradient), passed(plain_of(layer), x, gradient))
    layer.thaw()
    assert not list(layer.buffers()) and torch.equal(layer(x), plain_of(layer)(x))


def test_only_weights_with_unaligned_rows_become_column_major() -> None:
    for dtype, n, k, turns in [
        (torch.bfloat16, 16, 770, True), (torch.float16, 8, 3, True),
        (torch.bfloat16, 16, 768, False), (torch.bfloat16, 37, 51, False),
    ]:  # fmt: skip
        weight = torch.randn(n, k).to(dtype)
        found = linear.with_aligned_layout(weight)
        assert (found.stride() == (1, n)) == turns and torch.equal(found, weight)
    wide = layer_of((PLAIN,) * 3, k=51, dtype=torch.float32)  # autocast makes another at each call
    wide.freeze()
    assert not list(wide.buffers())


@pytest.mark.parametrize("routes", [(PLAIN,) * 3, (BY_ROW,) * 3], ids=["bf16", "row"])
def test_inference_pads_a_weight_once(
    routes: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of FP8 when the parameter was moved away: before, some m may ask for it in bfloat16."""
    layer = layer_of(routes, n=37, k=51)
    layer.padding = (5, 3)
    layer.changed()
    x = rows(k=51).view(2, M // 2, 51)
    with torch.no_grad():
        expected, few = layer(x), layer(x[0, :3])
        layer.freeze()
        for name, buffer in layer.named_buffers():
            assert name == "fp8_scale" or (len(buffer) == 40 and buffer.shape[1] >= 56)
        assert torch.equal(layer(x), expected) and torch.equal(layer(x[0, :3]), few)
        place = next(layer.buffers()).data_ptr()
        layer.weight.zero_()
        moved = layer.offload(torch.device("cpu"))
        assert layer.is_offloaded == any(routes) and moved == 0  # from the CPU to the CPU
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_padded", lambda: pytest.fail("padded at a call"))
            assert torch.equal(layer(x), expected) and torch.equal(layer(x[0]), expected[0])
            torch.testing.assert_close(layer(x[0, :3]), few, rtol=0.1, atol=0.1)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        other = layer_of(routes, n=37, k=51)
        other.weight.mul_(2.0)
        other.bias.mul_(2.0)
        layer.load_state_dict(other.state_dict(), assign=True)
        assert torch.equal(layer(x), 2 * expected) and next(layer.buffers()).data_ptr() == place
        layer.thaw()
        assert not list(layer.buffers())


def test_padding_may_change_with_a_held_weight() -> None:
    layer = layer_of((PLAIN,) * 3, k=51)  # which is turned
    plain = plain_of(layer)
    gradient = rows(k=N, seed=2)
    for x in (rows(k=51), rows(k=51).t().contiguous().t()):
        for padding in ((0, 0), (5, 0), (5, 3), (13, 3), (0, 8), (0, 0)):
            layer.padding = padding
            layer.changed()
            with torch.no_grad():
                expected = plain(x)
                for _ in range(2):
                    torch.testing.assert_close(layer(x), expected, rtol=0.01, atol=0.01)
                    layer.freeze()
                assert all(b.stride(-1) == 1 for b in layer.buffers() if padding != (0, 0))
            found = passed(layer, x, gradient)
            for a, b in zip(found, passed(plain, x, gradient), strict=True):
                torch.testing.assert_close(a, b, rtol=0.01, atol=0.05)


def test_a_refrozen_weight_keeps_its_address() -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.freeze()
        places = [b.data_ptr() for b in layer.buffers()]
        layer.load_state_dict({n: 2 * p for n, p in layer.state_dict().items()})
        assert len(places) == 2 and places == [b.data_ptr() for b in layer.buffers()]
        assert torch.equal(layer(rows()), pickle.loads(pickle.dumps(layer))(rows()))
    with torch.inference_mode():
        layer.thaw()
        layer.freeze()
    layer.load_state_dict({n: 2 * p for n, p in layer.state_dict().items()})


def test_gaps_between_rows_are_kept_only_for_kernels_that_read_them() -> None:
    wide = torch.randn(7, 96).bfloat16()
    for x, apart, is_kept in [
        (wide[:, 8:48], True, True), (wide[:, 8:48], False, False), (wide[:, :40].t(), True, False),
        (wide[:, 3:43], True, False),  # begins askew
        (torch.randn(7, 77).bfloat16()[:, 8:48], True, False),  # rows do
        (torch.randn(7, 77).bfloat16()[:, 1:38], True, True),  # which 37 columns do anyway
        (wide[:1].expand(7, 96), True, False), (wide, False, True),
    ]:  # fmt: skip
        found = row_major(x, apart)
        assert (found.data_ptr() == x.data_ptr()) == is_kept
        assert torch.equal(found, x) and (is_kept or found.is_contiguous())
    for op in (torch.ops.lokakern.weight_gradient, torch.ops.lokakern.quantize_weight):
        assert torch.Tag.flexible_layout in op.default.tags


def test_checkpoints_of_linear_and_converted_layers_are_exchangeable() -> None:
    layer = layer_of()
    plain = nn.Linear(K, N, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    other = Linear(K, N, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(rows()), plain(rows()))


def test_copies_keep_their_routes() -> None:
    layer = layer_of()
    y = layer(rows())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(rows()), y)


def test_repr_shows_the_kernels_by_m() -> None:
    text = repr(layer_of((BY_ROW, PLAIN, PLAIN)))
    assert f"output={ROW_KERNEL} at m=16.., grad_input=bf16, grad_weight=bf16" in text


# ---- without a plan ----


def adopted(routes: tuple[str, str, str] = (PLAIN, PLAIN, PLAIN)) -> Linear:
    layer = nn.Linear(K, N).bfloat16()
    adopt(layer)
    assert isinstance(layer, Linear)
    layer.take_routes(routes, layer.weight)
    return layer


def test_a_layer_without_a_plan_and_a_form_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = adopted(), rows()

    def fail(*_: object) -> None:
        raise AssertionError("asked")

    for name in ("is_compiling", "_traced_product"):
        monkeypatch.setattr(linear, name, fail)
    monkeypatch.setattr(Routed, "product", fail)
    assert type(layer) is PlainLinear and repr(layer).startswith("Linear(")
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert vars(layer).keys() <= vars(adopted(ROUTES)).keys()


def test_the_class_follows_routes_forms_and_copies() -> None:
    layer = adopted()
    layer.take_form(compiled_form.DOT)
    assert type(layer) is Linear
    layer.take_form("")
    assert type(layer) is PlainLinear
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is PlainLinear
        other.take_routes(ROUTES, other.weight)
        assert type(other) is Linear and torch.equal(other(rows()), layer_like(other)(rows()))
    release(layer)
    assert type(layer) is nn.Linear
    assert vars(layer).keys() == vars(nn.Linear(K, N)).keys()


def layer_like(layer: Linear) -> Linear:
    """A layer that was not adopted, with the same parameters and routes."""
    other = layer_of()
    other.load_state_dict(layer.state_dict())
    return other


def test_a_compiled_layer_is_quantized_when_its_class_changes() -> None:
    layer, x = adopted(), rows()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    assert torch.equal(compiled(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.take_routes(ROUTES, layer.weight)
    assert torch.equal(compiled(x), layer(x)) and type(layer) is Linear
    layer.take_routes((PLAIN, PLAIN, PLAIN), layer.weight)
    assert torch.equal(compiled(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert counter.frame_count == 2


class Shifted:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[misc]
        return y + 100


def test_subclasses_and_methods_that_others_keep_follow_the_routes() -> None:
    """As fully_shard, parametrizations and hooks of accelerate keep them."""
    x = rows()
    layer = adopted()
    layer.__class__ = type("FSDPPlainLinear", (PlainLinear,), {})
    layer.take_routes(ROUTES, layer.weight)
    assert "FSDPPlainLinear(" in repr(layer)
    assert torch.equal(layer(x), layer_like(layer)(x))

    layer.__class__ = type("Mixed", (Shifted, PlainLinear), {})
    assert torch.equal(layer(x), layer_like(layer)(x) + 100)

    layer = adopted()
    vars(layer)["forward"] = functools.partial(layer.forward)
    another = adopted()
    compiled = torch.compile(another.forward, backend="aot_eager", fullgraph=True)
    for each, call in ((layer, layer), (another, compiled)):
        each.take_routes((PLAIN, PLAIN, PLAIN), each.weight)
        assert torch.equal(call(x), nn.functional.linear(x, each.weight, each.bias))
        each.take_routes(ROUTES, each.weight)
        assert torch.equal(call(x), layer_like(each)(x))

    layer = adopted()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    layer.take_routes(ROUTES, layer.weight)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer(x), layer_like(layer)(x))

    other = PlainLinear(K, N).bfloat16()
    other.take_routes(ROUTES, other.weight)
    assert torch.equal(other(x), layer_like(other)(x))


# ---- wrapped ----


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Linear(K, 32), nn.ReLU(), Linear(32, N))
    for layer in model:
        if isinstance(layer, Linear):
            layer.take_routes(ROUTES, layer.weight)
    return model


def losses(model: nn.Module, call: nn.Module | None = None, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            y = (model if call is None else call)(rows(seed=step).float())
            loss = (y.float() - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_fsdp2_and_activation_checkpoints_train_equally() -> None:
    """Results are bitwise equal; FSDP2 reuses the memory of gathered weights."""
    expected = losses(model_of())
    assert expected[-1] < expected[0]
    model = model_of()
    assert losses(model, nn.parallel.DistributedDataParallel(model)) == expected
    for reshard in (True, False):
        model = model_of()
        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            if isinstance(layer, Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        assert losses(model) == expected

    class Saved(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x, use_reentrant=False)  # type: ignore[no-any-return]

    saved = Saved(model_of())
    assert losses(saved) == expected
    torch._dynamo.reset()
    saved = Saved(model_of())
    compiled = torch.compile(saved, backend="aot_eager", fullgraph=True)
    assert losses(saved, compiled) == expected


@pytest.mark.parametrize(
    "quantizer", ["cuda.quantize_row", "cuda.quantize_long_row", "cuda.quantize_together_row"]
)
def test_long_rows_are_left_to_the_quantizer_that_reads_them_once(quantizer: str) -> None:
    route = f"row;16:0={quantizer}+torch.scaled_mm_row;1:0="
    assert routed_matmul.quantizer_at(route, 8192) == quantizer
    assert routed_matmul.is_left_to_kernel(quantizer, 10240)
    assert not routed_matmul.is_left_to_kernel(quantizer, 4096)


@pytest.mark.parametrize("n", [1, 16])
def test_gradients_of_vectors_are_not_quantized_by_tiles(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector is row-major and column-major at once, and those kernels need one of both."""
    route = "none;16:0=cuda.quantize_together_group+cuda.scaled_gemm_group;1:0="
    monkeypatch.setattr(routed_matmul, "_multiply", lambda *_: None)
    x, grad = torch.randn(32, 48).bfloat16(), torch.randn(n, 32).bfloat16().t()
    found = routed_matmul._weight_gradient(grad, x, route)
    assert (found is None) == (n != 1)
    assert found is None or torch.equal(found, grad.t() @ x)
