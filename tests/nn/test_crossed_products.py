"""DCN's crosses behind FP8 products of compiled trainings, computed by the products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern import jit, nvrtc
from lokakern.bench.models.blocks import CrossNetwork
from lokakern.device import current_device
from lokakern.nn import crossed_products, graph_passes, routed_matmul
from lokakern.nn.bias_gradient import AddedBias
from lokakern.nn.routed_matmul import in_dtype, switched
from lokakern.registry.register import KERNELS
from lokakern.sampled_check import Marker
from lokakern.types import ErrorBudget
from tests.support.compiled_steps import codes_of
from tests.support.measurements import H200
from tests.support.routed_layers import BLOCK, BLOCK_KERNEL, BY_ROW, ROUTE, layer_of, rows
from tests.support.routed_layers import ROUTES as USUAL
from tests.support.traced_graphs import graphs_of

M, N, K = 48, 64, 32
OP = "lokakern.crossed_product"
BY_BLOCK = f"{BLOCK.value};16:0={BLOCK_KERNEL};1:0={BLOCK_KERNEL}"
TENSOR_KERNEL = "cuda.quantize_tensor+cuda.scaled_gemm_tensor"
BY_TENSOR = f"tensor;16:0={TENSOR_KERNEL};1:0={TENSOR_KERNEL}"
Read = Callable[["Model", Tensor], Tensor]


@pytest.fixture(autouse=True)
def every_device_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossed_products, "current_device", lambda *_: H200)
    monkeypatch.setattr(nvrtc, "why_not", lambda _: None)


class Model(nn.Module):
    """Two crosses of low rank by FP8 products, each behind the other, and what reads them."""

    def __init__(
        self, read: Read, route: str = ROUTE, dtype: torch.dtype = torch.bfloat16, k: int = K
    ) -> None:
        super().__init__()
        routes = [in_dtype(x, dtype) for x in (route, *USUAL[1:])]
        self.crosses = CrossNetwork(N, k, 2)
        for layer in self.crosses.layers:
            layer.down = layer_of((routes[0], *routes[1:]), k, N, bias=False, dtype=dtype)
            layer.up = layer_of((routes[0], *routes[1:]), N, k, dtype=dtype)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)

    def up(self, x: Tensor) -> Tensor:
        """The product of a cross, twice of each of its terms."""
        layer: Any = self.crosses.layers[0]
        found: Tensor = layer.up(layer.down(x))
        return found


def usual(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.crosses(x)
    return y


def with_leading_axes(model: Model, x: Tensor) -> Tensor:
    return usual(model, x.view(4, -1, N))


def turned_around(model: Model, x: Tensor) -> Tensor:
    return x + model.up(x) * x.sin()


def with_a_bias_summed_apart(model: Model, x: Tensor) -> Tensor:
    layer: Any = model.crosses.layers[0]
    z: Tensor = AddedBias.apply(layer.up(layer.down(x)), layer.up.bias)  # type: ignore[no-untyped-call]
    return x.sin() * z + x


def steps(
    model: Model, x: Tensor, change: Callable[[Any], None]
) -> tuple[Tensor, list[Tensor], str]:
    """Output and gradients of a compiled step whose graph is changed, and its graphs' text."""
    x = x.clone().requires_grad_()
    found, graphs = graphs_of(
        model, x, change=lambda graph: None, trains=True, change_both=change
    )  # fmt: skip
    torch.manual_seed(2)
    weights = torch.randn(found.shape).to(found)
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad((found * weights).sum(), leaves, allow_unused=True)
    text = "\n".join(graph.python_code("self").src for graph in graphs)
    return found, [x for x in gradients if x is not None], text


def compared(model: Model, x: Tensor) -> str:
    """The text of the changed graphs, whose results are those of others but for roundings."""
    y, gradients, text = steps(model, x, graph_passes.JointPasses(None))
    expected, others, plain = steps(model, x, lambda graph: None)
    assert OP not in plain
    for one, other in zip((y, *gradients), (expected, *others), strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        # A cross is rounded once where it was rounded twice, so that FP8 of it is a neighbor.
        assert (one.double() - other.double()).norm() <= 0.05 * other.double().norm()
    return text


WITH_CROSSES = [(with_leading_axes, 2), (turned_around, 1), (with_a_bias_summed_apart, 1)]


@pytest.mark.parametrize(("read", "count"), WITH_CROSSES)
def test_products_compute_crosses(read: Read, count: int) -> None:
    text = compared(Model(read), rows(M, N))
    assert text.count(f"{OP}.default") == count


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("route", [BY_ROW, BY_BLOCK, BY_TENSOR])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_crosses_of_each_granularity_and_dtype(route: str, dtype: torch.dtype) -> None:
    model = Model(usual, route, dtype, 128)
    assert compared(model, rows(M, N).to(dtype)).count(f"{OP}.default") == 2


def test_gradients_are_those_of_the_function() -> None:
    """Within what FP8 loses, of unquantized layers."""
    model, x = Model(usual), rows(M, N)
    plain = copy.deepcopy(model).double()
    for layer in plain.crosses.layers:
        for name in ("down", "up"):
            linear = getattr(layer, name)
            other = nn.Linear(
                linear.in_features, linear.out_features, linear.bias is not None,
                dtype=torch.float64,
            )  # fmt: skip
            other.load_state_dict(linear.state_dict())
            setattr(layer, name, other)
    y, gradients, _ = steps(model, x, graph_passes.JointPasses(None))
    leaf = x.double().requires_grad_()
    expected = plain(leaf)
    torch.manual_seed(2)
    weights = torch.randn(y.shape).to(y).double()
    others = torch.autograd.grad((expected * weights).sum(), [leaf, *plain.parameters()])
    assert (y.double() - expected).norm() < 0.05 * expected.norm()
    for one, other in zip(gradients, others, strict=True):
        assert (one.double() - other).norm() < 0.09 * other.norm()


def reads_elsewhere(model: Model, x: Tensor) -> Tensor:
    z = model.up(x)
    return x * z + x + z.sin()


def returns_both(model: Model, x: Tensor) -> Any:
    z = model.up(x)
    return torch.cat([x * z + x, z], 1)


def reads_the_scaled(model: Model, x: Tensor) -> Tensor:
    scaled = x * model.up(x)
    return (scaled + x) * scaled.cos()


OTHERS: dict[str, Read] = {
    "the product is read elsewhere": reads_elsewhere,
    "the product is a result": returns_both,
    "the scaled product is read elsewhere": reads_the_scaled,
    "a factor for all rows": lambda model, x: x[:1] * model.up(x) + x,
    "a term for all columns": lambda model, x: x * model.up(x) + x[:, :1],
    "a factor in float32": lambda model, x: x.float() * model.up(x) + x,
    "a factor whose columns are apart": lambda model, x: x.t().contiguous().t() * model.up(x) + x,
    "a factor whose rows start anywhere": lambda model, x: (
        torch.nn.functional.pad(x, (0, 1))[:, :N] * model.up(x) + x
    ),
    "a factor of one row": lambda model, x: x[0].expand(M, N) * model.up(x) + x,
    "a difference": lambda model, x: x * model.up(x) - x,
    "twice the term": lambda model, x: torch.add(x * model.up(x), x, alpha=2),
    "a number": lambda model, x: x * model.up(x) + 1.0,
    "no cross": lambda model, x: 2.0 * model.up(x) + x,
    "the square": lambda model, x: model.up(x).square() + x,
}  # fmt: skip


def text_of(model: Model, x: Tensor | None = None) -> str:
    """The text of the graph of both passes, changed."""
    x, texts = rows(M, N).requires_grad_() if x is None else x, []

    def change(graph: Any) -> None:
        graph_passes.JointPasses(None)(graph)
        texts.append(graph.python_code("self").src)

    graphs_of(model, x, change=lambda graph: None, trains=True, change_both=change)
    assert "tangents" in texts[0]
    return str(texts[0])


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_cross_alone_is_left(name: str) -> None:
    assert OP not in text_of(Model(OTHERS[name]))


def test_rows_of_wider_matrices_are_read_where_they_start() -> None:
    def read(model: Model, x: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, 8))[:, :N]
        return wide * model.up(x) + wide

    assert OP in text_of(Model(read))


def test_routes_that_are_watched_or_turned_and_other_m_are_left() -> None:
    marked = Marker("1:4").mark(ROUTE, ErrorBudget(row_err=0.06), "here")
    for route in (marked, switched(ROUTE, "crosses"), ""):
        assert OP not in text_of(Model(usual, route))
    assert OP not in text_of(Model(usual, BY_ROW), rows(8, N).requires_grad_())


def test_long_products_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OP in text_of(Model(usual))
    monkeypatch.setattr(crossed_products, "LARGEST_K", K - 1)
    assert OP not in text_of(Model(usual))


def test_other_devices_and_libraries_that_quantize_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name, found in (
        (crossed_products, "current_device", current_device),
        (nvrtc, "why_not", lambda _: "no compiler"),
        (routed_matmul, "kernel_here", lambda *_: KERNELS["torchao.rowwise_fast"]),
    ):
        with monkeypatch.context() as here:
            here.setattr(owner, name, found)
            assert OP not in text_of(Model(usual))


def test_what_a_checkpoint_computes_again_is_left() -> None:
    def read(model: Model, x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(model.crosses, x, use_reentrant=False)
        return y

    def behind(model: Model, x: Tensor) -> Tensor:
        """The product before it is not computed again."""
        z = model.up(x)
        y: Tensor = torch.utils.checkpoint.checkpoint(
            lambda x, z: (x * z + x).sin(), x, z, use_reentrant=False
        )
        return y

    for model in (Model(read), Model(behind)):
        assert OP not in text_of(model)


def test_rows_of_any_number_are_left() -> None:
    x = rows(M, N).requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    assert OP not in text_of(Model(usual), x)


def test_a_weight_in_float32_or_quantized_before_is_read() -> None:
    def read(model: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return usual(model, x)

    assert OP in compared(Model(read, dtype=torch.float32), rows(M, N))
    x0, x, a = rows(M, N, seed=4), rows(M, N, seed=5), rows(M, K)
    layer = layer_of((ROUTE, "", ""), N, K)
    b = layer.weight.detach().t()
    found = {}
    data, scale = routed_matmul.quantize_weight(b.t(), "row")
    left, left_scales = routed_matmul.quantize_weight(a, "row")
    bias = layer.bias.detach()
    for name, given, more in (
        ("plain", (a, b, None, None), ()), ("prepared", (a, None, data, scale), ()),
        ("left", (None, b, None, None), (left, left_scales)),
        ("float32", (a, b.float(), None, None), ()),
    ):  # fmt: skip
        operands = (*given, bias, x0, x, ROUTE, *more)
        found[name] = torch.ops.lokakern.crossed_product(*operands)
    op, usual_operands = torch.ops.lokakern.crossed_product.default, (a, b, None, None, bias)
    torch.library.opcheck(op, (*usual_operands, x0, x, ROUTE))
    z = torch.ops.lokakern.routed_gemm(*usual_operands, ROUTE)
    for d, other in found.values():
        assert torch.equal(other, z)
        assert torch.equal(d, torch.addcmul(x.float(), x0.float(), z.float()).bfloat16())


def test_both_operands_are_quantized_in_one_launch_where_the_route_has_one() -> None:
    kernel = KERNELS["cuda.quantize_together_row+cuda.scaled_gemm_row"]
    x, weight = (torch.empty(size, 256, dtype=torch.bfloat16, device="meta") for size in (64, 128))
    with jit.record(H200) as found:
        left, right = routed_matmul.quantized_operands(kernel, x, weight.t(), None, None)
    (job,) = found.jobs.values()
    assert getattr(job, "entry", "") == "quantize_together"
    assert (left.granularity, right.granularity) == (kernel.granularity, kernel.b_granularity)
    assert left.data.shape == x.shape and right.data.shape == weight.shape


def test_generated_code_keeps_the_product_and_quantizes_where_an_operand_is_computed() -> None:
    """The backward pass reads the product, and computes no cross again."""

    def read(model: Model, x: Tensor) -> Tensor:
        layer: Any = model.crosses.layers[0]
        return x * layer.up(layer.down(x).sin()) + x

    graph_passes.install_passes()
    forward, backward = codes_of(Model(read), rows(M, N).requires_grad_())
    assert forward.count("= lokakern_crossed_product(None, ") == 1
    assert forward.count("= lokakern_routed_gemm(") == 1
    assert "crossed" not in backward and backward.count("= lokakern_routed_gemm(") == 2


def _is_of_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


@pytest.mark.gpu
@pytest.mark.parametrize("route", [BY_ROW, BY_BLOCK, BY_TENSOR])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_a_step_is_as_near_as_that_of_products_apart(
    route: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    graph_passes.install_passes()
    model = Model(usual, route, dtype, 128).cuda()
    x = rows(1024, N).to("cuda", dtype).requires_grad_()
    leaves, results = [x, *model.parameters()], []
    for largest in (1024, 0):
        monkeypatch.setattr(crossed_products, "LARGEST_K", largest)
        torch._dynamo.reset()
        no_caches = torch._inductor.config.patch(force_disable_caches=True)
        with no_caches, torch.profiler.profile() as found:
            y = torch.compile(model, dynamic=False)(x)
            results.append([y, *torch.autograd.grad(y.float().sin().sum(), leaves)])
        called = sum("gemm_cross" in event.name for event in found.events() if _is_of_gpu(event))
        assert called == (2 if largest else 0)
    for one, other in zip(*results, strict=True):
        assert (one.double() - other.double()).norm() <= 0.05 * other.double().norm()
