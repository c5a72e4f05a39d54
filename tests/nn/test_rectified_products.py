"""Relus behind FP8 products of compiled graphs, computed by the products."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern import nvrtc
from lokakern.nn import graph_passes, joined, rectified_products, routed_matmul
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.static_handoff import set_handoff
from lokakern.registry.register import KERNELS
from lokakern.sampled_check import Marker
from lokakern.types import ErrorBudget
from tests.support.compiled_steps import codes_of
from tests.support.measurements import H200
from tests.support.routed_layers import BY_ROW, ROUTE, ROUTES, layer_of
from tests.support.traced_graphs import graphs_of, passed

M, N, K = 48, 64, 32
OP = "ops.lokakern.rectified_product"
WEIGHT = torch.randn(N, 8, generator=torch.Generator().manual_seed(3)).bfloat16()


def layer(
    route: str = ROUTE, *, bias: bool = True, k: int = K, n: int = N,
    half: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    made = layer_of((in_dtype(route, half), "", ""), n, k, bias=bias, dtype=half)
    made.freeze()
    return made.eval().requires_grad_(False)


def rows(m: int = M, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16()


def exact(x: Tensor, linear: Any) -> Tensor:
    """The relu by the public function."""
    weight = layer_of(("", "", ""), N, K, bias=linear.bias is not None).weight.detach()
    left, right = lokakern.quantize(x), lokakern.quantize(weight).t()
    return lokakern.scaled_gemm(left, right, bias=linear.bias, activation="relu")


def found_in(run: Callable[[Tensor], Any], x: Tensor | None = None, **options: Any) -> bool:
    return OP in passed(run, rows() if x is None else x, **options)[1]


@pytest.mark.parametrize(
    ("bias", "half"),
    [(True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float16)],
)
def test_a_product_computes_the_relu_that_a_library_reads(bias: bool, half: torch.dtype) -> None:
    linear, weight = layer(bias=bias, half=half), WEIGHT.to(half)
    x = rows().to(half)
    found, graph = passed(lambda x: F.relu(linear(x)) @ weight, x)
    assert OP in graph and "routed_gemm" not in graph and "aten.relu" not in graph
    with torch.no_grad():
        assert found.dtype is half and torch.equal(found, F.relu(linear(x)) @ weight)
        if half is torch.bfloat16:
            assert torch.equal(found, exact(x, linear) @ weight)


def test_parts_of_the_activation_are_read_by_products_of_batches() -> None:
    """And one by a kernel of Inductor."""
    linear = layer()

    def parts(y: Tensor) -> Tensor:
        gate, q, k, v = y.view(4, 12, N).chunk(4, -1)
        return torch.bmm(torch.bmm(q, k.mT), v) * gate

    x = rows()
    found, graph = passed(lambda x: parts(F.relu(linear(x.view(4, 12, K)))), x)
    assert OP in graph
    with torch.no_grad():
        assert torch.equal(found, parts(exact(x, linear)))


def test_the_relu_is_an_output_or_an_unbound_part_is_read() -> None:
    first, second = layer(), layer(k=N)
    assert found_in(lambda x: F.relu(first(x)))
    assert found_in(
        lambda x: torch.bmm(
            *F.relu(first(x)).view(-1, 2, 4, 8).unbind(1)[:1], WEIGHT[:8, :4].expand(M, 8, 4)
        )
    )
    # Inductor's kernel that quantizes computes it.
    assert not found_in(lambda x: second(F.relu(first(x))))


def reads_elsewhere(linear: Any, x: Tensor) -> Any:
    y = linear(x)
    return F.relu(y) @ WEIGHT, y


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "only Inductor reads it": lambda linear, x: (F.relu(linear(x)) * 2).sum(1),
    "the product is read elsewhere": reads_elsewhere,
    "silu": lambda linear, x: F.silu(linear(x)) @ WEIGHT,
    "twice the product": lambda linear, x: F.relu(2 * linear(x)) @ WEIGHT,
    "in float32": lambda linear, x: F.relu(linear(x).float()) @ WEIGHT.float(),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_other_functions_and_other_readers_keep_the_product(name: str) -> None:
    linear = layer()
    with torch.no_grad():
        expected = CASES[name](linear, rows())
    found, graph = passed(lambda x: CASES[name](linear, x), rows())
    assert OP not in graph
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("m", [8, 17])  # in bfloat16, and of a layout that no compiler makes
def test_other_m_keep_the_product(m: int) -> None:
    linear = layer(BY_ROW)
    assert not found_in(lambda x: F.relu(linear(x)) @ WEIGHT, rows(m))


@pytest.mark.parametrize(("gemm", "takes"), [("cuda.scaled_gemm_row", True),
                                             ("torch.scaled_mm_row", False)])  # fmt: skip
def test_libraries_have_no_relus(monkeypatch: pytest.MonkeyPatch, gemm: str, takes: bool) -> None:
    kernel = KERNELS[f"cuda.quantize_row+{gemm}"]
    asked = SimpleNamespace(**{**vars(routed_matmul), "kernel_here": lambda *_: kernel})
    monkeypatch.setattr(rectified_products, "routed_matmul", asked)
    monkeypatch.setattr(rectified_products, "current_device", lambda *_: H200)
    monkeypatch.setattr(nvrtc, "why_not", lambda _: None)
    linear = layer()
    assert found_in(lambda x: F.relu(linear(x)) @ WEIGHT) is takes


def test_checks_keep_the_product_and_a_weight_need_not_be_quantized() -> None:
    marked = Marker("1:4").mark(ROUTE, ErrorBudget(row_err=0.06), "here")
    assert marked != ROUTE
    for linear, takes in ((layer(marked), False), (layer_of((ROUTE, "", ""), N, K), True)):
        with torch.no_grad():
            found, text = passed(lambda x, linear=linear: F.relu(linear(x)) @ WEIGHT, rows())
            assert (OP in text) is takes
            assert torch.equal(found, F.relu(linear(rows())) @ WEIGHT)


def steps(
    model: Callable[[Tensor], Tensor], leaves: list[Tensor], *, trains: bool = True
) -> tuple[list[Tensor], str]:
    """Output and gradients of a compiled step, and the text of its graph before it is split."""
    texts = []

    def change(graph: Any) -> None:
        (graph_passes.JointPasses(None) if trains else lambda graph: None)(graph)
        texts.append(graph.python_code("self").src)

    y, _ = graphs_of(
        model, leaves[0], change=lambda graph: None, trains=True, change_both=change
    )  # fmt: skip
    return [y, *torch.autograd.grad(y.float().cos().sum(), leaves)], str(texts[0])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_in_training_a_product_computes_the_relu_that_gradients_of_weights_read(
    half: torch.dtype,
) -> None:
    routes = tuple(in_dtype(route, half) for route in ROUTES)
    first, second = layer_of(routes, N, K, dtype=half), layer_of(routes, K, N, dtype=half)
    leaves = [rows().to(half).requires_grad_(), first.weight, first.bias, second.weight]

    def run(x: Tensor) -> Tensor:
        return second(F.relu(first(x))).relu()  # of which the last one is only a result

    found, text = steps(run, leaves)
    expected, plain = steps(run, leaves, trains=False)
    assert text.count(f"{OP}.default") == 2 and OP not in plain
    assert all(map(torch.equal, found, expected))


def test_in_training_a_product_computes_the_relu_whose_gradient_is_one_with_that_of_the_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joined, "is_fast", lambda *_: True)
    model = nn.Sequential(layer_of(ROUTES, N, K), nn.ReLU(), layer_of(ROUTES, K, N))
    none = [""] * len(model)
    set_handoff(model, none, none, joined=joined.joined_between(model))
    leaves = [rows().requires_grad_(), *model.parameters()]
    found, text = steps(model, leaves)
    expected, _ = steps(model, leaves, trains=False)
    assert text.count(f"{OP}.default") == 1 and "norm_gradient" in text and "aten.relu" not in text
    assert all(map(torch.equal, found, expected))


def test_in_training_a_relu_that_only_compilers_read_is_left() -> None:
    first = layer_of(ROUTES, N, K)
    leaves = [rows().requires_grad_(), first.weight]
    assert OP not in steps(lambda x: F.relu(first(x)).sum(1), leaves)[1]
    assert OP not in steps(lambda x: sum(y.sum() for y in reads_elsewhere(first, x)), leaves)[1]
    assert OP not in steps(lambda x: F.silu(first(x)) @ WEIGHT, leaves)[1]


def test_in_training_a_relu_that_a_checkpoint_computes_again_is_left() -> None:
    """Else it would compute the product before it again."""
    first, second = layer_of(ROUTES, N, K), layer_of(ROUTES, K, N)

    def run(x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(
            lambda z: second(F.relu(z)), first(x), use_reentrant=False
        )
        return y

    assert OP not in steps(run, [rows().requires_grad_(), first.weight])[1]


def test_generated_code_quantizes_an_operand_once() -> None:
    """In the kernel that computes it, for products with and without an activation."""
    first, second = layer(), layer()

    def run(x: Tensor) -> Tensor:
        x = F.layer_norm(x, (K,))
        return F.relu(first(x)) @ WEIGHT + second(x) @ WEIGHT

    with torch.no_grad():
        (code,) = codes_of(run, rows())
    assert code.count("lokakern_rectified_product(None, ") == 1
    assert code.count("lokakern_routed_gemm(None, ") == 1
    assert code.count("quantize_weight") == 0


def test_generated_code_quantizes_an_input_by_a_kernel() -> None:
    linear = layer()
    with torch.no_grad():
        (code,) = codes_of(lambda x: F.relu(linear(x)) @ WEIGHT, rows())
    assert code.count("= lokakern_rectified_product(") == 1
    assert "lokakern_rectified_product(None, " not in code and "quantize_weight" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_product_computes_the_relu(half: torch.dtype) -> None:
    linear = layer(k=512, n=2048, half=half).cuda()
    x = rows(256, 512).cuda().to(half)
    weight = torch.randn(2048, 64, device="cuda", dtype=half) / 64

    def run(x: Tensor) -> Tensor:
        return F.relu(linear(F.layer_norm(x, (512,)))) @ weight

    torch._dynamo.reset()
    with torch.no_grad(), torch.profiler.profile() as found:
        y = torch.compile(run, dynamic=False)(x)
        separate = run(x)
    assert any(event.name == "lokakern::rectified_product" for event in found.events())
    torch.testing.assert_close(y, separate, rtol=0.03, atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_product_of_a_training_computes_the_relu(half: torch.dtype) -> None:
    graph_passes.install_passes()
    routes = tuple(in_dtype(route, half) for route in ROUTES)
    first = layer_of(routes, 1024, 512, dtype=half).cuda()
    second = layer_of(routes, 256, 1024, dtype=half).cuda()
    leaves = [rows(256, 512).cuda().to(half).requires_grad_(), first.weight, second.weight]

    def run(x: Tensor) -> list[Tensor]:
        y = second(F.relu(first(x)))
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    torch._dynamo.reset()
    with torch.profiler.profile() as found:
        y = torch.compile(lambda x: second(F.relu(first(x))), dynamic=False)(leaves[0])
        gradients = torch.autograd.grad(y.float().square().sum(), leaves)
    assert any(event.name == "lokakern::rectified_product" for event in found.events())
    for one, other in zip((y, *gradients), run(leaves[0]), strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()
