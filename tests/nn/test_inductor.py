"""Inductor quantizes an operand where it computes it, with the bits of the kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lokakern.nn import linear
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import rectified_between
from lokakern.nn.routed_matmul import PLAIN, route_text
from lokakern.nn.static_handoff import set_handoff
from lokakern.types import Granularity
from tests.support.routed_layers import (
    BLOCK_KERNEL,
    BY_ROW,
    ROUTES,
    K,
    N,
    layer_of,
    rows,
)

BY_BLOCK = route_text(Granularity.BLOCK, [(0, BLOCK_KERNEL)], [(0, BLOCK_KERNEL)])
BY_TRITON = route_text(Granularity.ROW, *[[(0, "triton.quantize_row+triton.scaled_gemm_row")]] * 2)


def compiled(call: Callable[..., Any], *inputs: Any) -> tuple[Any, list[tuple[bool, bool]]]:
    """The result, and for each product whether it reads an unquantized and a quantized operand."""
    torch._dynamo.reset()
    call = torch.compile(call, fullgraph=True, dynamic=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(call, *inputs)
    products = []
    for code in codes:
        is_direct = "lokakern_routed_gemm" in code
        assert not (is_direct and re.search(r"assert_\w+\(.*routed_gemm", code))
        for line in re.findall(r"routed_gemm(?:\.default)?\((.*)\)", code):
            given, text, rest = re.split(r"('[^']*')", line, maxsplit=1)
            products.append((not given.startswith("None"), "buf" in rest))
            assert ";" in text
    return found, products


def hostile_rows(m: int, k: int) -> Tensor:
    x = rows(m, k)
    x[1], x[2, 3], x[4, 5] = 0.0, float("nan"), float("inf")
    return x


@pytest.mark.parametrize(
    ("route", "m", "k", "is_fused"),
    [
        (BY_ROW, 48, 64, True), (BY_BLOCK, 48, 256, True), (BY_TRITON, 16, 8208, True),
        # k is too long, it has no whole groups, or the layouts do not fit.
        (BY_ROW, 16, 8208, False), (BY_BLOCK, 48, 192, False), (BY_BLOCK, 6, 256, False),
    ],
)  # fmt: skip
def test_the_kernel_that_computes_an_operand_quantizes_it(
    route: str, m: int, k: int, is_fused: bool
) -> None:
    layer, x = layer_of((route, PLAIN, PLAIN), n=32, k=k), hostile_rows(m, k)

    def activated(x: Tensor) -> Tensor:
        return layer(x.relu())

    with torch.no_grad():
        found, products = compiled(activated, x)
        expected = activated(x)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert products == [(not is_fused, is_fused)]


def test_operands_from_elsewhere_are_quantized_by_the_product() -> None:
    """Inputs of the graph, and outputs of other products."""
    first, second = layer_of((BY_ROW, PLAIN, PLAIN)), Linear(N, K, dtype=torch.bfloat16)
    second.take_routes((BY_ROW, PLAIN, PLAIN), second.weight)
    with torch.no_grad():
        found, products = compiled(lambda x: second(first(x)), rows())
        assert torch.equal(found, second(first(rows())))
    assert products == [(True, False), (True, False)]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("route", "k"), [(BY_ROW, K), (BY_BLOCK, 256)])
def test_an_operand_of_several_products_is_quantized_once(
    route: str, k: int, is_fused: bool
) -> None:
    layers = [layer_of((route, PLAIN, PLAIN), n=32, k=k) for _ in range(2)]

    def call(x: Tensor) -> Tensor:
        x = x.relu() if is_fused else x
        return layers[0](x) + layers[1](x).abs()

    x = hostile_rows(48, k)
    with torch.no_grad():
        found, products = compiled(call, x)
        expected = call(x)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert products == [(False, True)] * 2


def test_a_static_scale_spares_the_unquantized_operand() -> None:
    layer, x = layer_of((BY_ROW, PLAIN, PLAIN)), hostile_rows(48, K)
    with torch.no_grad():
        found, products = compiled(lambda x: layer(x, "0.02"), x)
        expected = layer(x, "0.02")
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert products == [(False, True)]


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_have_the_bits_of_eager_calls(bias: bool) -> None:
    """A gradient that is summed for a bias is quantized by the product."""
    layer = layer_of(ROUTES, n=32, bias=bias)

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        x = rows().requires_grad_()
        call(x).float().square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [x.grad, layer.weight.grad]

    def activated(x: Tensor) -> Tensor:
        return layer(x.relu()).relu()

    expected = step(activated)
    torch._dynamo.reset()
    call = torch.compile(activated, fullgraph=True, dynamic=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(step, call)
    assert all(map(torch.equal, found, expected))
    backward = [line for line in codes[-1].splitlines() if "= lokakern_routed_gemm(" in line]
    assert len(backward) == 1 and ("routed_gemm(None" in backward[0]) is not bias
    assert "= lokakern_weight_gradient(" in codes[-1]


@pytest.mark.parametrize(
    ("reduce", "is_fused"),
    [(lambda y: y.sum(0), False), (lambda y: y.sum(-2, keepdim=True), False),
     (lambda y: torch.ops.aten.sum.dim_IntList(y, None, True), True), (lambda y: y.sum(1), True)],
)  # fmt: skip
def test_an_operand_that_is_summed_over_rows_is_left_to_the_product(
    reduce: Callable[[Tensor], Tensor], is_fused: bool
) -> None:
    layer, x = layer_of((BY_ROW, PLAIN, PLAIN)), rows()

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.relu()
        return layer(x), reduce(x)

    with torch.no_grad():
        found, products = compiled(call, x)
        expected = call(x)
    assert torch.equal(found[0], expected[0])
    assert products == [(not is_fused, is_fused)]


def test_products_of_dynamic_size_quantize_themselves() -> None:
    layer = layer_of((BY_ROW, PLAIN, PLAIN))
    torch._dynamo.reset()
    call = torch.compile(lambda x: layer(x.relu()), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (48, 20, 64):
            assert torch.equal(call(rows(m)), layer(rows(m).relu()))


def test_products_are_correct_without_inductors_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of((BY_ROW, PLAIN, PLAIN))
    from torch._inductor import lowering

    op = torch.ops.lokakern.routed_gemm.default
    monkeypatch.setattr(linear, "fuse_quantizers", lambda: "")
    for table in (lowering.lowerings, lowering._maybe_layout_constraints):
        if op in table:
            monkeypatch.delitem(table, op)
    with torch.no_grad():
        found, products = compiled(lambda x: layer(x.relu()), rows())
        assert torch.equal(found, layer(rows().relu()))
    assert products == [(True, False)]


def test_a_product_with_a_relu_is_called_as_other_products_are() -> None:
    first, second = (Linear(K, K, dtype=torch.bfloat16) for _ in range(2))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), Linear(K, 8, dtype=torch.bfloat16))
    none = [""] * len(model)
    set_handoff(model, none, none, rectified=rectified_between(model))
    x, frozen = rows(48, K), model.requires_grad_(False)
    torch._dynamo.reset()
    call = torch.compile(frozen, fullgraph=True, dynamic=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        y, codes = run_and_get_code(call, x)
    assert torch.equal(y, frozen(x))
    (code,) = codes
    assert len(re.findall(r"^ *torch\._addmm_activation\(.*out=buf\d+\)", code, re.MULTILINE)) == 2
    assert "relu" not in code.replace("_relu", "")


def test_autotuning_chooses_a_product_with_a_relu_as_that_of_nn_linear() -> None:
    layer = Linear(K, K, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU())
    set_handoff(model, ["", ""], ["", ""], rectified=rectified_between(model))
    x = rows(48, K)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, max_autotune_gemm=True):
        y, (code,) = run_and_get_code(torch.compile(model, fullgraph=True, dynamic=False), x)
    assert torch.equal(y, model(x))
    assert "torch._addmm_activation(" not in code
