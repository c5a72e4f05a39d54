"""Inputs that layers save in FP8 for the gradients of their weights.

Kernels of an H200 are emulated here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lokakern.errors import ShapeError
from lokakern.nn import graph_passes, joined, saved_inputs
from lokakern.nn.compiled_form import behind_cross, crossed_plan
from lokakern.nn.linear import Linear, _way, described
from lokakern.nn.routed_matmul import PLAIN, in_dtype, route_text
from lokakern.nn.static_handoff import set_handoff
from lokakern.registry.register import KERNELS
from lokakern.types import Granularity
from tests.support.routed_layers import BY_GROUP, BY_ROW, layer_of, passed, rows, same
from tests.support.traced_graphs import graphs_of

M, N, K = 256, 48, 64
BY = {
    "row": "cuda.quantize_row+cuda.scaled_gemm_row",
    "1x128": "cuda.quantize_group+cuda.scaled_gemm_group",
    "tensor": "cuda.quantize_tensor+cuda.scaled_gemm_tensor",
    "128x128": "cuda.quantize_group+cuda.scaled_gemm_block",
}
ROUTES = {
    form: route_text(Granularity.NONE, [(0, ""), (16, name)], [(0, ""), (17, name)])
    for form, name in BY.items()
}
FORMS = pytest.mark.parametrize("form", ROUTES)
ops = torch.ops.lokakern


def saving(layer: Linear) -> Linear:
    """The layer with the input saved in FP8."""
    to_output, to_input, to_weight = layer._routes
    layer.take_routes((to_output, to_input, saved_inputs.saved(to_weight)), layer.weight)
    return layer


def operands(m: int = M, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return rows(m, N, seed=3).to(dtype), rows(m, K).to(dtype)


# --- the product


@FORMS
@pytest.mark.parametrize("m", [16, 100, 129, M])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_saved_input_gives_the_bits_of_the_product(m: int, form: str, dtype: torch.dtype) -> None:
    grad, x = operands(m, dtype)
    route = in_dtype(ROUTES[form], dtype)
    assert saved_inputs.saved_form(route, m) == form
    saved = saved_inputs.quantize_input(x, form)
    given = (grad, *saved, route)
    found = ops.saved_weight_gradient(*given, False)
    expected = ops.weight_gradient(grad, x, route)
    assert found.dtype is dtype and torch.equal(found, expected)
    wide = ops.saved_weight_gradient(*given, True)
    assert torch.equal(wide.to(dtype), found)
    total, other = torch.ones(N, K), torch.ones(N, K)
    ops.add_saved_weight_gradient(total, *given)
    ops.add_weight_gradient(other, grad, x, route)
    assert torch.equal(total, other) and not torch.equal(total, torch.ones(N, K))
    storages = [y.untyped_storage().nbytes() for y in saved]
    assert sum(storages) == saved_inputs.saved_bytes(form, m, K)


def test_operands_may_be_strided() -> None:
    wide, grads = rows(M, 2 * K), rows(M, 2 * N, seed=3)
    for x in (wide[:, :K], wide[:, K:], wide[:, ::2], rows(K, M).t()):
        for grad in (grads[:, :N], grads[:, ::2], rows(N, M, seed=3).t()):
            saved = saved_inputs.quantize_input(x, "1x128")
            found = ops.saved_weight_gradient(grad, *saved, ROUTES["1x128"], False)
            assert torch.equal(found, ops.weight_gradient(grad, x, ROUTES["1x128"]))


@FORMS
def test_the_ops_are_ops(form: str) -> None:
    grad, x = operands()
    given = (grad, *saved_inputs.quantize_input(x, form), ROUTES[form])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.saved_weight_gradient.default, (*given, is_wide)) for is_wide in (False, True)
    ]
    calls.append((ops.add_saved_weight_gradient.default, (torch.zeros(N, K), *given)))
    for op, arguments in calls:  # a check of the schema multiplies operands, which FP8 has not
        torch.library.opcheck(op, arguments, test_utils=("test_autograd_registration",
                                                         "test_faketensor"))  # fmt: skip


def test_a_main_gradient_has_its_shape() -> None:
    grad, x = operands()
    given = (grad, *saved_inputs.quantize_input(x, "row"), ROUTES["row"])
    for total in (torch.zeros(K, N), torch.zeros(N, K).bfloat16()):
        with pytest.raises(ShapeError, match="main_grad of a weight is"):
            ops.add_saved_weight_gradient(total, *given)


# --- routes and plans


def test_nothing_is_saved_where_nothing_is_quantized_or_a_library_quantizes() -> None:
    assert saved_inputs.saved(PLAIN) == PLAIN
    assert saved_inputs.saved_form(PLAIN, M) == ""
    assert saved_inputs.saved_form(BY_GROUP, M) == "1x128"
    assert saved_inputs.saved_form(BY_GROUP, 0) == saved_inputs.saved_form(BY_GROUP, 8) == ""
    assert saved_inputs.saved_form(BY_GROUP, M + 1) == ""
    gemms = [k for k in KERNELS.values() if k.op == "gemm" and k.quantizes]
    for name in [k.name for k in gemms if not k.parts]:
        route = route_text(Granularity.NONE, [(0, name)], [(0, name)])
        assert saved_inputs.saved_form(route, M) == ""
    unlimited = route_text(Granularity.NONE, *[[(0, BY["1x128"])]] * 2)
    forms = [saved_inputs.saved_form(unlimited, m) for m in (1, 10, 11, 16)]
    assert forms == ["", "", "1x128", "1x128"]  # a column has 16 bytes and a scale
    assert saved_inputs.saved_bytes("", M, K) == 2 * M * K
    assert saved_inputs.saved_bytes("1x128", M, K) == M * K + M * K // 128 * 4
    assert saved_inputs.saved_bytes("row", M, K) == M * K + K * 4


def test_a_compiler_knows_what_is_saved_at_static_rows_only() -> None:
    layer = saving(layer_of((BY_ROW, BY_ROW, BY_GROUP)))
    given = torch.bfloat16, torch.bfloat16, "cpu"
    word, _, _, *routes = _way(layer._plan, M, *given).split("\0")
    assert word == "saving" and saved_inputs.form_in(routes[2]) == "1x128"
    assert saved_inputs.unsaved(routes[2]) == BY_GROUP
    for plan in (layer._plan, saved_inputs.saved_at(layer._plan, "1x128")):
        assert saved_inputs.unsaved(plan).endswith("\0" + BY_GROUP)
        assert saved_inputs.unsaved(f"{plan};check=1:8\0x").endswith(f"{BY_GROUP};check=1:8\0x")
    for m in (-1, M + 1):  # dynamic, and without a kernel for the weight
        assert _way(layer._plan, m, *given).startswith("training")
    with torch.no_grad():
        assert _way(layer._plan, M, *given).startswith("inference")


def test_gradients_behind_crosses_read_inputs_as_they_are() -> None:
    """In routes with a mark for what is quantized behind a cross."""
    form = behind_cross("", [(M, (BY["128x128"], BY["1x128"]))])
    layer = layer_of((BY_ROW, BY_ROW, BY_GROUP))
    given = M, torch.bfloat16, torch.bfloat16, "cpu"
    expected = crossed_plan(form, layer._plan, *given)
    assert expected and crossed_plan(form, saving(layer)._plan, *given) == expected


def test_calls_stay_in_python() -> None:
    layer = layer_of((BY_ROW, BY_ROW, BY_GROUP))
    assert described(layer._plan) is not None
    assert described(saving(layer)._plan) is None


def test_gradients_are_those_of_a_layer_that_saves_its_input() -> None:
    for routes in ((BY_ROW, BY_ROW, BY_GROUP), (PLAIN, PLAIN, BY_GROUP), (PLAIN, BY_ROW, BY_GROUP)):
        for bias in (True, False):
            x, grad = rows(M, K), rows(M, 40, seed=3)
            expected = passed(layer_of(routes, bias=bias), x, grad)
            assert same(passed(saving(layer_of(routes, bias=bias)), x, grad), expected)


# --- graphs


class Twice(nn.Module):
    """Two layers that read the output of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (
            saving(layer_of((BY_ROW, BY_ROW, BY_GROUP), n=K)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.one(y) + self.other(y)
        return z


def crossing(model: nn.Module, x: Tensor) -> tuple[int, list[fx.Graph]]:
    """Bytes of what the backward graph reads besides parameters and gradients, and both graphs."""

    def change(graph: fx.Graph) -> None:
        graph_passes.Passes(None)(graph, is_inference=False)

    both = graph_passes.JointPasses(None)
    y, graphs = graphs_of(model, x, change=change, trains=True, change_both=both)
    y.backward(torch.ones_like(y))
    sizes = {parameter.shape for parameter in model.parameters()}
    names = [node for node in graphs[1].find_nodes(op="placeholder")]
    found = [node.meta["val"] for node in names if "tangents" not in node.name]
    assert x.shape not in sizes
    return sum(y.nbytes for y in found if y.shape not in sizes), graphs


def chain_of(*between: nn.Module, saves: bool = True) -> nn.Sequential:
    layers = [layer_of((BY_ROW, BY_ROW, BY_GROUP), n=K) for _ in range(2)]
    first, last = (saving(layer) if saves else layer for layer in layers)
    return nn.Sequential(first, *between, last)


WHOLE, SAVED = 2 * K, K + K * 4 // 128  # bytes of each sample


@pytest.mark.parametrize(
    ("between", "without", "with_it"),
    [
        ((), 2 * WHOLE, 2 * SAVED),
        ((nn.SiLU(),), 3 * WHOLE, WHOLE + 2 * SAVED),
        ((nn.GELU(),), 3 * WHOLE, WHOLE + 2 * SAVED),
        # What the backward pass reads as it is, is quantized there.
        ((nn.ReLU(),), 2 * WHOLE, WHOLE + SAVED),
        ((nn.Sigmoid(),), 2 * WHOLE, WHOLE + SAVED),
        ((nn.Tanh(),), 2 * WHOLE, WHOLE + SAVED),
        ((nn.Dropout(0.5),), 2 * WHOLE + K, 2 * SAVED + K),
    ],
    ids=["nothing", "silu", "gelu", "relu", "sigmoid", "tanh", "dropout"],
)  # fmt: skip
def test_compiled_code_keeps_what_has_the_fewest_bytes(
    between: tuple[nn.Module, ...], without: int, with_it: int
) -> None:
    x = rows(M, K).requires_grad_()
    found = [crossing(chain_of(*between, saves=saves), x)[0] for saves in (False, True)]
    assert found == [without * M, with_it * M]


@pytest.mark.parametrize(
    ("behind", "gain"),
    [((nn.LayerNorm(K), nn.SiLU()), 2), ((nn.SiLU(),), 2), ((nn.ReLU(),), 1)],
    ids=["norm", "silu", "relu"],
)
def test_gradients_behind_layers_in_one_op_are_as_without(
    behind: tuple[nn.Module, ...], gain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "is_fast", lambda columns, device: True)
    results, sizes = [], []
    for saves in (False, True):
        model = chain_of(*behind, saves=saves).bfloat16()
        none = [""] * len(model)
        set_handoff(model, none, none, joined=joined.joined_between(model))
        size, graphs = crossing(model, rows(M, K).requires_grad_())
        assert "norm_gradient" in str(graphs[1])
        sizes.append(size)
        results.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert same(*results)
    assert sizes[0] - sizes[1] == gain * (WHOLE - SAVED) * M


def test_readers_of_one_input_share_what_is_saved() -> None:
    found, graphs = crossing(Twice(), rows(M, K))
    assert found == 2 * SAVED * M
    texts = [str(graph) for graph in graphs]
    assert texts[0].count("lokakern.quantize_weight") == 2 and "quantize_weight" not in texts[1]


def test_an_input_that_is_kept_anyway_is_quantized_by_the_product() -> None:
    """In the backward pass, in one launch with the gradient; for two products by an op."""
    _, graphs = crossing(chain_of(nn.ReLU()), rows(M, K))
    text = str(graphs[1])
    assert text.count("lokakern.weight_gradient") == 1
    assert text.count("lokakern.saved_weight_gradient") == 1
    assert "quantize_weight" not in text

    class Relu(Twice):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            z: Tensor = self.one(y) + self.other(y)
            return z

    found, graphs = crossing(Relu(), rows(M, K))
    text = str(graphs[1])
    assert found == (WHOLE + SAVED) * M
    assert text.count("lokakern.quantize_weight") == 1
    assert text.count("lokakern.saved_weight_gradient") == 3


def test_the_pass_leaves_other_sources_of_fp8() -> None:
    graph = fx.symbolic_trace(lambda grad, data, scale: (grad, data, scale)).graph
    grad, data, scale = graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        made = graph.call_function(
            ops.saved_weight_gradient.default, (grad, data, scale, ROUTES["row"], False)
        )
    graph.output_node().args = (made,)
    saved_inputs.quantize_in_products(graph)
    assert "saved_weight_gradient" in str(graph)
