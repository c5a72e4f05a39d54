"""Routes with kernels of eager calls only: what eager calls and compiled graphs multiply by."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lokakern.nn.routed_matmul import (
    PLAIN,
    kernel_at,
    read_route,
    route_text,
    traced_route,
    with_eager,
)
from lokakern.sampled_check import Marker, check_of
from lokakern.types import ErrorBudget
from tests.nn.test_crossed_forward import rows as square_rows
from tests.nn.test_raw_product import Mixed, mixed
from tests.support.routed_layers import (
    BY_GROUP,
    BY_ROW,
    EAGER_ROUTES,
    ROUTE,
    ROUTES,
    ROW,
    ROW_KERNEL,
    M,
    N,
    layer_of,
    passed,
    plain_of,
    rows,
    same,
)

LATE = route_text(ROW, [(0, ""), (64, ROW_KERNEL)], [(0, "")])  # in compiled graphs
BOTH_ROUTES = (with_eager(LATE, BY_ROW), with_eager(PLAIN, BY_ROW), with_eager(PLAIN, BY_GROUP))


def compiled(module: nn.Module, *, dynamic: bool = False) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)  # type: ignore[return-value]


def test_a_compiled_graph_leaves_out_kernels_of_eager_calls() -> None:
    both = with_eager(LATE, BY_ROW)
    assert [kernel_at(both, m) for m in (0, 15, 16, 17, 48, 64)] == ["", "", *[ROW_KERNEL] * 4]
    assert read_route(both)[0] is ROW
    traced = traced_route(both)
    assert [kernel_at(traced, m) for m in (16, 17, 48, 64, 65)] == ["", "", "", ROW_KERNEL, ""]
    assert with_eager(LATE, PLAIN) == with_eager(LATE, LATE) == LATE
    assert traced_route(LATE) == LATE and traced_route(with_eager(PLAIN, BY_ROW)) == PLAIN


def test_a_check_stays_where_a_compiled_graph_has_a_kernel() -> None:
    marker, budget = Marker("10:4"), ErrorBudget(row_err=0.06)
    marked = marker.mark(with_eager(LATE, BY_ROW), budget, "layer=~x")
    assert traced_route(marked) == LATE + marked[len(with_eager(LATE, BY_ROW)) :]
    assert check_of(traced_route(marked)) == check_of(marked) != ""
    assert traced_route(marker.mark(with_eager(PLAIN, BY_ROW), budget, "layer=~x")) == PLAIN


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_is_that_of_torch_where_an_eager_one_quantizes(dynamic: bool) -> None:
    layer, x, gradient = layer_of(EAGER_ROUTES), rows(), rows(k=N, seed=2)
    expected = passed(layer_of(ROUTES), x, gradient)
    assert same(passed(layer, x, gradient), expected)
    call = compiled(layer, dynamic=dynamic)
    assert same(passed(call, x, gradient), passed(plain_of(layer), x, gradient))
    assert same(passed(layer, x, gradient), expected), "also after it was compiled"
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same(passed(twin, x, gradient), expected)


def test_both_quantize_at_m_at_which_a_compiler_gains_too() -> None:
    layer = layer_of(BOTH_ROUTES)
    call = compiled(layer)
    with torch.no_grad():
        for m, is_quantized in ((8, False), (M, False), (64, True), (65, False)):
            x = rows(m)
            expected = layer_of((LATE, PLAIN, PLAIN))(x)
            assert torch.equal(call(x), expected)
            assert torch.equal(expected, plain_of(layer)(x)) is not is_quantized
            assert torch.equal(layer(x), layer_of(ROUTES)(x))


def test_a_frozen_layer_keeps_what_each_reads() -> None:
    """A compiled graph reads the copy of the weight that is faster in bfloat16."""
    layer = layer_of(EAGER_ROUTES, k=51)
    frozen = layer_of(ROUTES, k=51)
    held = layer_of((PLAIN,) * 3, k=51)
    x = rows(k=51).t().contiguous().t()
    for one in (layer, frozen, held):
        one.freeze()
    assert {n for n, _ in layer.named_buffers()} == {"fp8_data", "fp8_scale", "held_weight"}
    assert layer.held_weight.stride() == (1, N)
    call = compiled(layer)

    def check() -> None:
        with torch.no_grad():
            assert torch.equal(layer(x), frozen(x))
            assert torch.equal(call(x), held(x)) and not torch.equal(call(x), layer(x))
            assert torch.equal(layer(x[:8]), held(x[:8]))

    check()
    state = {name: 2 * p for name, p in layer.state_dict().items()}
    for one in (layer, frozen, held):
        one.load_state_dict(state)
    check()
    layer.thaw()
    assert not list(layer.buffers())


def test_products_of_raw_parameters_differ_likewise() -> None:
    eager = with_eager(PLAIN, ROUTE)
    model, _ = mixed((eager, eager, ""))
    expected, _ = mixed((ROUTE, ROUTE, ""))
    torch._dynamo.reset()
    call = torch.compile(model, backend="eager", fullgraph=True)
    x = square_rows()
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
        assert torch.equal(call(x), Mixed.forward(model, x))
        exported = torch.export.export(model, (x,))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert not any("lokakern" in target for target in targets)
    assert targets.count("aten.linear.default") == 1, "the layer; the others are original calls"


def test_the_words_of_a_layer_tell_its_eager_kernels() -> None:
    assert f"output={ROW_KERNEL} at m=16.." in repr(layer_of(EAGER_ROUTES))
