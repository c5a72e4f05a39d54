"""Weights' gradients in float32 that products write, in graphs of converted models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

from lokakern.nn import graph_passes, routed_matmul, wide_gradients
from lokakern.nn.routed_matmul import in_dtype, route_text, switched
from lokakern.types import Granularity
from tests.support.routed_layers import BY_GROUP, BY_ROW, layer_of, rows
from tests.support.traced_graphs import graphs_of

K = 64
WIDE_KERNEL = "cuda.quantize_group+torch.scaled_mm_block"
WIDE = route_text(Granularity.NONE, [(0, ""), (16, WIDE_KERNEL)], [(0, ""), (17, WIDE_KERNEL)])
LATER = route_text(Granularity.NONE, [(0, ""), (4096, WIDE_KERNEL)], [(0, "")])
WIDE_OP, NARROW_OP, WIDE_MM = "wide_weight_gradient.", "lokakern.weight_gradient.", "mm.dtype"
Read = Callable[["Model", Tensor], Tensor]


@pytest.fixture(autouse=True)
def every_device_writes_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has this product on CUDA devices only."""
    monkeypatch.setattr(wide_gradients, "_fits", lambda device: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    yield
    library._destroy()


class Model(nn.Module):
    """A converted layer and one of torch with float32 weights."""

    def __init__(
        self, read: Read, route: str, dtype: torch.dtype, k: int = K,
        half: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        routes = (in_dtype(BY_ROW, half), in_dtype(BY_ROW, half), in_dtype(route, half))
        self.layer = layer_of(routes, n=K, k=k, bias=False, dtype=dtype)
        self.plain = nn.Linear(K, 32, bias=False, dtype=dtype)
        self.read, self.half_dtype = read, half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.half_dtype):
            return self.read(self, x)


def usual(model: Model, x: Tensor) -> Tensor:
    return model.plain(model.layer(x).relu())


def widened(model: Model, x: Tensor) -> Tensor:
    """The output is copied to float32, as a weight's gradient is."""
    return usual(model, x).float()


def twice(model: Model, x: Tensor) -> Tensor:
    """Both gradients of a weight are added."""
    return model.plain(model.layer(x).relu()) + model.plain(model.layer(x.neg()).relu())


def turned(model: Model, x: Tensor) -> Tensor:
    """A weight that is multiplied as its transpose."""
    return model.layer(x).relu() @ model.plain.weight.view(K, 32).bfloat16()


def run(
    read: Read, route: str = WIDE, dtype: torch.dtype = torch.float32, k: int = K,
    half: torch.dtype = torch.bfloat16, scale: float = 1.0,
) -> tuple[list[Tensor], list[Tensor], str]:  # fmt: skip
    """Gradients of both weights, changed and in eager calls, and the text of the graphs."""
    model, x = Model(read, route, dtype, k, half), rows(k=k).to(half)
    found, graphs = graphs_of(
        model, x, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    torch.manual_seed(2)
    weights = torch.randn(found.shape)
    both = []
    for y in (found, model(x)):
        loss = scale * (y.float() * weights).sum()
        both.append(torch.autograd.grad(loss, list(model.parameters())))
    text = "\n".join(graph.python_code("self").src for graph in graphs)
    return list(both[0]), list(both[1]), text


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("read", "route", "counts", "half"),
    [
        (usual, WIDE, (1, 0, 1), BF16), (widened, WIDE, (1, 0, 1), BF16),
        (twice, WIDE, (0, 2, 0), BF16), (usual, LATER, (1, 0, 1), BF16),
        (usual, BY_GROUP, (0, 1, 1), BF16), (turned, WIDE, (1, 0, 1), BF16),
        (usual, WIDE, (1, 0, 1), torch.float16), (usual, LATER, (1, 0, 1), torch.float16),
    ],
)  # fmt: skip
def test_products_write_float32(
    read: Read, route: str, counts: tuple[int, int, int], half: torch.dtype
) -> None:
    found, expected, text = run(read, route, half=half)
    assert tuple(text.count(name) for name in (WIDE_OP, NARROW_OP, WIDE_MM)) == counts
    for one, other, is_wide in zip(found, expected, (counts[0], counts[2]), strict=True):
        assert one.dtype is torch.float32 and one.stride() == other.stride()
        assert (one - other).norm() < 0.003 * other.norm()
        if is_wide:  # the other one rounded
            assert torch.equal(one.to(half).float(), other) and not torch.equal(one, other)


def test_a_gradient_beyond_float16_stays_finite() -> None:
    """In float32, where autograd rounds it to infinity; that of the output is infinite in both."""
    found, expected, text = run(usual, half=torch.float16, scale=1.4e4)
    assert WIDE_OP in text and WIDE_MM in text
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all() and torch.equal(one.half().float(), other)
    assert any(other.isinf().any() for other in expected)
    found, expected, _ = run(usual, half=torch.float16, scale=2.0**40)
    assert not any(x.isfinite().all() for x in (*found, *expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_weights_that_are_not_float32_are_left(dtype: torch.dtype) -> None:
    _, _, text = run(usual, dtype=dtype, half=dtype)
    assert WIDE_OP not in text and WIDE_MM not in text


def test_what_a_compiler_pads_or_times_itself_is_left() -> None:
    _, _, text = run(usual, LATER, k=60)
    assert WIDE_MM in text  # of the plain layer
    with config.patch(max_autotune_gemm=True):
        _, _, text = run(usual)
    assert WIDE_MM not in text and WIDE_OP in text
    model = nn.Sequential(layer_of((BY_ROW, BY_ROW, WIDE), n=60, dtype=torch.float32))
    model.append(nn.Linear(60, 32))

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.relu(model(x))

    y, graphs = graphs_of(
        call, rows(), change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    y.float().sum().backward()
    assert all(WIDE_MM not in graph.python_code("self").src for graph in graphs)


@pytest.mark.parametrize("shape", [(48, 40, 64), (8, 40, 64), (48, 1, 64), (0, 40, 64)])
def test_the_op_is_the_product_before_it_is_rounded(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    grad, x = rows(m, n, seed=3), rows(m, k)
    for route in (WIDE, BY_GROUP, LATER):
        wide = torch.ops.lokakern.wide_weight_gradient(grad, x, route)
        narrow = torch.ops.lokakern.weight_gradient(grad, x, route)
        assert wide.dtype is torch.float32 and wide.shape == (n, k)
        assert torch.equal(wide.bfloat16(), narrow)
        torch.library.opcheck(torch.ops.lokakern.wide_weight_gradient.default, (grad, x, route))


def test_the_op_is_unquantized_while_its_switch_is_off() -> None:
    grad, x = rows(48, 40, seed=3), rows(48, 64)
    route = switched(WIDE, "wide")
    quantized = torch.ops.lokakern.wide_weight_gradient(grad, x, route)
    routed_matmul.turn(["wide"], False)
    try:
        found = torch.ops.lokakern.wide_weight_gradient(grad, x, route)
    finally:
        routed_matmul.turn(["wide"], True)
    exact = grad.double().t() @ x.double()
    assert (found - exact).norm() < 1e-6 * exact.norm() < (quantized - exact).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [48, 4096])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gradients_are_not_rounded_on_a_gpu(samples: int, half: torch.dtype) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Model(usual, WIDE, torch.float32, k=256, half=half).to(device)
    x = torch.randn(samples, 256, device=device).to(half)
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(model, fullgraph=True, dynamic=False), model):
        model.zero_grad()
        run(x).float().square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.stride() == other.stride()
        assert (one - other).norm() < 0.02 * other.norm()
        assert not torch.equal(one, one.to(half).float())
        assert torch.equal(other, other.to(half).float())
