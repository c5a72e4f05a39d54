"""Gradients behind relus that are quantized where they are computed: the op, and graphs with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lokakern import numerics
from lokakern.kernels.cuda import relu_backward
from lokakern.nn import graph_passes, rectified_gradients
from lokakern.nn.graph_edit import add
from lokakern.nn.linear import Linear
from lokakern.nn.rectified_gradients import quantize_behind_relus, rectified_gradient
from lokakern.nn.routed_matmul import OPS, PLAIN, in_dtype, route_text, switched
from lokakern.types import Format, Granularity
from tests.support.routed_layers import BLOCK_KERNEL, BY_GROUP, BY_ROW, layer_of
from tests.support.traced_graphs import graphs_of

M, N, K = 128, 256, 128
BF16, aten = torch.bfloat16, torch.ops.aten
BY_BLOCK = route_text(Granularity.NONE, [(0, ""), (16, BLOCK_KERNEL)], [(0, "")])
ROUTES = (BY_ROW, BY_ROW, BY_BLOCK)
OP, WEIGHT_OP = "lokakern.rectified_gradient.", "lokakern.quantized_weight_gradient."
SAVED_OP = "lokakern.saved_weight_gradient."
Run = Callable[["Layers", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with the kernel, at any size."""
    monkeypatch.setattr(rectified_gradients, "_is_fast", lambda m, n, device: True)
    torch._dynamo.reset()


class Layers(nn.Module):
    """Three layers without biases, with relus between them."""

    def __init__(
        self, run: Run | None = None, routes: tuple[str, str, str] = ROUTES, bias: bool = False,
        dtype: torch.dtype = torch.float32, n: int = N,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = ((n, K), (n, n), (K, n))
        self.layers = nn.ModuleList(layer_of(routes, *size, bias, dtype) for size in sizes)
        self.run = run or in_a_row

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_a_row(model: Layers, x: Tensor) -> Tensor:
    first, second, last = model.layers
    return last(torch.relu(second(torch.relu(first(x)))))  # type: ignore[no-any-return]


def of_functions(model: Layers, x: Tensor) -> Tensor:
    first, second, last = model.layers
    return last(functional.relu(second(first(x).relu())))  # type: ignore[no-any-return]


def gradients(y: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    given = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    return list(torch.autograd.grad(y, [x, *model.parameters()], given))


def run(model: Layers, *, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], str]:
    """Output and gradients by graphs after our passes, and their text."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16, enabled=dtype is torch.float32):
            return model(x)

    y, graphs = graphs_of(
        call, x, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    found = [y.detach(), *gradients(y, model, x)]
    return found, "\n".join(graph.python_code("self").src for graph in graphs)


def as_before(model: Layers, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    """By graphs without the op."""
    with monkeypatch.context() as patch:
        patch.setattr(rectified_gradients, "_is_fast", lambda m, n, device: False)
        found, text = run(model, **options)
    assert OP not in text
    return found


# ---- the op


@pytest.mark.parametrize("writes_output", [True, False])
def test_the_op_quantizes_gradient_and_output(writes_output: bool) -> None:
    grad, y = torch.randn(M, N).bfloat16(), torch.randn(M, N).relu().bfloat16()
    grad[3, 5], y[3, 5], y[4, 6], grad[:, 7] = torch.nan, 1.0, torch.nan, 0.0
    found = OPS.rectified_gradient(grad, y, writes_output)
    dz = torch.where(y <= 0, torch.zeros_like(grad), grad)
    scales = Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
    for place, (x, granularity) in enumerate(zip((dz, dz.t(), y.t()), scales, strict=True)):
        data, scale = found[2 * place : 2 * place + 2]
        if place == 2 and not writes_output:
            assert data.shape == (1, 1)
            continue
        right = numerics.quantize(x, Format.E4M3FN, granularity)
        assert torch.equal(data.view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(scale, right.scale)


@pytest.mark.parametrize("writes_output", [True, False])
def test_fake_results_are_like_real_ones(writes_output: bool) -> None:
    given = [torch.randn(M, N).bfloat16() for _ in range(2)]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPS.rectified_gradient(*given, writes_output)
    real = rectified_gradient(given[0], given[1], writes_output)
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


# ---- graphs that have it


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("way", [in_a_row, of_functions])
def test_one_op_quantizes_for_three_products(
    way: Run, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of before: both ways emulate the same numerics."""
    model = Layers(way, dtype=dtype)
    found, text = run(model, dtype=dtype)
    assert text.count(OP) == 2 and "where" not in text
    # That of the first weight has an input of its own; of the last one the gradient is the model's.
    assert text.count(WEIGHT_OP) == 2 and text.count(SAVED_OP) == 1
    for one, other in zip(found, as_before(model, monkeypatch, dtype=dtype), strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


def test_an_output_that_no_weight_reads_by_blocks_is_not_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Layers(routes=(BY_ROW, BY_ROW, BY_GROUP))
    found, text = run(model)
    assert text.count(OP) == text.count(WEIGHT_OP) == 2 and SAVED_OP not in text
    assert ", True)" not in "".join(x for x in text.splitlines() if OP in x)
    for one, other in zip(found, as_before(model, monkeypatch), strict=True):
        assert torch.equal(one, other)


def with_another_reader(model: Layers, x: Tensor) -> Tensor:
    """Of the gradient behind the first relu: the sum of what is in front of it."""
    first, second, last = model.layers
    y = first(x)
    return last(torch.relu(second(torch.relu(y)))) + y.sum()  # type: ignore[no-any-return]


def with_a_leak(model: Layers, x: Tensor) -> Tensor:
    first, second, last = model.layers
    leaky = functional.leaky_relu(first(x))
    return last(functional.threshold(second(leaky), 0.5, 0.0))  # type: ignore[no-any-return]


def with_a_sum_as_gradient(model: Layers, x: Tensor) -> Tensor:
    """Of the first relu's output, which nobody writes."""
    first, second, last = model.layers
    y = torch.relu(first(x))
    return last(torch.relu(second(y))) + (y @ y.t()).sum()  # type: ignore[no-any-return]


def in_its_own_mask(model: Layers, x: Tensor) -> Tensor:
    """The weight whose gradient is behind the mask reads what is compared."""
    first, second, last = model.layers
    y = torch.relu(first(x))
    return last(second(y).masked_fill(y <= 0, 0.0))  # type: ignore[no-any-return]


def selected_forward(model: Layers, x: Tensor) -> Tensor:
    """A product reads a selection of the forward pass through a view."""
    first, second, last = model.layers
    z = first(x)
    chosen = torch.where(z <= 0, 0.0, z).reshape(-1, z.shape[1])
    return last(second(chosen).masked_fill(z <= 0, 0.0).view(z.shape))  # type: ignore[no-any-return]


def in_a_checkpoint(model: Layers, x: Tensor) -> Tensor:
    return checkpoint(in_a_row, model, x, use_reentrant=False)  # type: ignore[no-any-return]


def one_layer_twice(model: Layers, x: Tensor) -> Tensor:
    """The gradient of its weight is a sum, which reads that of the later call."""
    first, second, last = model.layers
    y = torch.relu(second(torch.relu(first(x))))
    return last(torch.relu(second(y)))  # type: ignore[no-any-return]


def through_views(model: Layers, x: Tensor) -> Tensor:
    first, second, last = model.layers
    y = torch.relu(first(x)).view(-1, N)
    return last(torch.relu(second(y)).view(-1, N))  # type: ignore[no-any-return]


def in_three_dimensions(model: Layers, x: Tensor) -> Tensor:
    return in_a_row(model, x.view(4, -1, K)).view(-1, K)


@pytest.mark.parametrize(
    ("way", "options", "count"),
    [
        (with_another_reader, {}, 1), (with_a_leak, {}, 0), (with_a_sum_as_gradient, {}, 1),
        (in_its_own_mask, {}, 2), (selected_forward, {}, 2), (in_three_dimensions, {}, 0),
        (in_a_row, {"bias": True}, 0),
        (in_a_row, {"n": 200}, 0),
        (in_a_row, {"routes": (BY_ROW, PLAIN, BY_BLOCK)}, 0),
        (in_a_row, {"routes": (BY_ROW, BY_ROW, PLAIN)}, 0),
        (in_a_row, {"routes": (BY_ROW, BY_ROW, BY_BLOCK + ";check=1:64:0.06:1:x")}, 0),
        (in_a_row, {"routes": (BY_ROW, switched(BY_ROW, "one"), BY_BLOCK)}, 0),
        (in_a_row, {"routes": tuple(in_dtype(x, torch.float16) for x in ROUTES)}, 0),
    ],
)  # fmt: skip
def test_other_gradients_stay_as_they_are(
    way: Run, options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layers(way, **options)
    found, text = run(model)
    assert text.count(OP) == count
    for one, other in zip(found, as_before(model, monkeypatch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("way", "quantized"), [(in_a_checkpoint, 2), (one_layer_twice, 1), (through_views, 2)]
)
def test_bits_are_those_of_before(
    way: Run, quantized: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layers(way)
    found, text = run(model)
    lines = [line for line in text.splitlines() if OP in line]
    assert len(lines) >= 2 and sum(", True)" in line for line in lines) == quantized
    for one, other in zip(found, as_before(model, monkeypatch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_again", [False, True])
def test_forward_passes_select_as_before(is_again: bool) -> None:
    """Also those of a checkpoint, which would save what the op writes."""

    def masked(model: Layers, x: Tensor) -> Tensor:
        return checkpoint(selected_forward, model, x, use_reentrant=False)  # type: ignore[no-any-return]

    _, text = run(Layers(masked if is_again else selected_forward))
    _, forward, backward = text.split("def forward(")
    assert OP not in forward and OP in backward


@pytest.mark.parametrize(
    ("case", "count"),
    [("gradient", 1), ("selection", 0), ("recomputed", 0), ("on the right", 0), ("twice", 0)],
)
def test_only_gradients_that_are_left_operands(case: str, count: int) -> None:
    graph, operands = fx.Graph(), []
    of_grad = "x_of_forward" if case == "selection" else "tangents_1"
    for name, shape in ((of_grad, (M, N)), ("y", (M, N)), ("w", (N, N)), ("x", (M, N))):
        operands.append(graph.placeholder(name))
        operands[-1].meta["val"] = torch.zeros(shape, dtype=BF16)
    grad, y, w, x = operands
    below = add(graph, aten.le.Scalar, add(graph, aten.relu.default, y), 0)
    zero = add(graph, aten.scalar_tensor.default, 0, dtype=BF16)
    dz = add(graph, aten.where.self, below, zero, grad)
    if case == "recomputed":
        dz.meta["recompute"] = 1
    view = add(graph, aten.view.default, dz, [M, N])
    left, right = {"on the right": (x, view), "twice": (dz, view)}.get(case, (dz, x))
    dx = add(graph, OPS.routed_gemm.default, view, w, None, None, None, BY_ROW)
    dw = add(graph, OPS.weight_gradient.default, left, right, BY_BLOCK)
    kept = add(graph, aten.mm.default, below.args[0], w)  # writes the relu
    graph.output((dx, dw, kept))
    quantize_behind_relus(graph)
    graph.lint()
    called = [node.target for node in graph.nodes]
    assert called.count(OPS.rectified_gradient.default) == count


def test_the_op_takes_what_the_kernel_takes() -> None:
    most = relu_backward.MOST_COLUMNS
    assert rectified_gradients.takes(128, most) and not rectified_gradients.takes(128, most + 128)
    assert not any(rectified_gradients.takes(*x) for x in ((0, 256), (100, 256), (256, 200)))


def test_it_is_for_sizes_at_which_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(rectified_gradients, "_runs_on", lambda device: True)
    device = torch.device("cpu")
    fast = [n for n in range(128, 8192, 128) if rectified_gradients._is_fast(8192, n, device)]
    assert fast == [1024, 2048, 4096] and rectified_gradients._is_fast(32768, 2048, device)
    assert not rectified_gradients._is_fast(4096, 4096, device)


# ---- compiled steps


def compiled_step(model: Layers, x: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=BF16):
        y = torch.compile(model, dynamic=False)(x)
    return [y.detach(), *gradients(y, model, x)]


def exact(model: Layers, x: Tensor) -> list[Tensor]:
    model, x = copy.deepcopy(model), x.double().requires_grad_()
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.take_routes((PLAIN, PLAIN, PLAIN), layer.weight)
    y = model.double()(x)
    return [y.detach(), *gradients(y, model, x)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1024, 4096])
def test_compiled_steps_on_a_gpu(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are those of before."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's")
    by_row = "cuda.quantize_row+torch.scaled_mm_row"
    by_block = "cuda.quantize_group+torch.scaled_mm_block"
    routes = (
        route_text(Granularity.ROW, [(0, by_row)], [(0, by_row)]),
        route_text(Granularity.ROW, [(0, by_row)], [(0, by_row)]),
        route_text(Granularity.NONE, [(0, by_block)], [(0, by_block)]),
    )
    model, x = Layers(routes=routes, n=n).cuda(), torch.randn(2048, K, device="cuda")
    with torch.profiler.profile() as profile:
        found = compiled_step(model, x)
    names = [event.name for event in profile.events()]
    assert "lokakern::rectified_gradient" in names
    monkeypatch.setattr(rectified_gradients, "_is_fast", lambda m, n, device: False)
    before, right = compiled_step(model, x), exact(model, x)
    for one, other, true in zip(found, before, right, strict=True):
        errors = [float((z.double() - true).norm() / true.norm()) for z in (one, other)]
        assert errors[0] < 1.03 * errors[1] + 1e-6
