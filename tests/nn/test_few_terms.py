"""Products of batches with one row and few terms, and outer ones, as sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern.nn import graph_passes
from tests.support.compiled_steps import codes_of
from tests.support.routed_layers import ROUTE, layer_of
from tests.support.traced_graphs import graphs_of, passed

BATCH, N, K = 32, 24, 64


class Experts(nn.Module):
    """Experts that a gate weighs, as in PLE, behind a product that `convert` chose a kernel for."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = layer_of((ROUTE, "", ""), K, K)
        self.experts = nn.ModuleList(nn.Linear(K, N) for _ in range(experts)).bfloat16()
        self.gate = nn.Linear(K, experts).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        made = torch.stack([expert(x).relu() for expert in self.experts], dim=1)
        return (self.gate(x).softmax(1)[:, None] @ made)[:, 0]


def rows() -> Tensor:
    return torch.randn(BATCH, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("experts", [1, 2, 4, 9, 16])
def test_weighted_experts_are_a_sum_without_a_stack(experts: int) -> None:
    model = Experts(experts)
    found, graph = passed(model, rows())
    assert "bmm" not in graph and "aten.cat" not in graph
    with torch.no_grad():
        close(found, model(rows()))


def test_many_terms_several_rows_and_columns_are_left() -> None:
    model = Experts(17)
    found, graph = passed(model, rows())
    assert "bmm" in graph
    with torch.no_grad():
        close(found, model(rows()))
    first = layer_of((ROUTE, "", ""), K, K)
    for shape in ((2, 4, 8), (8, 8, 1)):
        m, k, n = shape

        def run(x: Tensor, m: int = m, k: int = k, n: int = n) -> Tensor:
            y = first(x)
            return torch.bmm(y[:, : m * k].reshape(-1, m, k), y[:, : k * n].reshape(-1, k, n))

        found, graph = passed(run, rows())
        assert "bmm" in graph
        with torch.no_grad():
            assert torch.equal(found, run(rows()))


def test_an_outer_product_is_exact() -> None:
    first = layer_of((ROUTE, "", ""), K, K)

    def run(x: Tensor) -> Tensor:
        y = first(x)
        return torch.bmm(y[:, :8, None], y[:, None, 8:])

    found, graph = passed(run, rows())
    assert "bmm" not in graph
    with torch.no_grad():
        assert torch.equal(found, run(rows()))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", ["sum", "outer"])
def test_results_are_contiguous_as_those_of_products(kind: str, trains: bool) -> None:
    """Though operands are transposed: operators may read memory by strides."""
    first = layer_of((ROUTE, "", ""), K, K)

    def run(x: Tensor) -> Tensor:
        y = first(x)
        turned = y.t().clone(memory_format=torch.contiguous_format)[:, :, None].permute(1, 2, 0)
        assert turned.stride()[0] == 1
        if kind == "outer":
            product = torch.bmm(turned[:, :, :1], turned)
        else:
            product = torch.bmm(y[:, None, :2], turned.expand(-1, 2, -1))
        return product.as_strided((product.numel() // 8, 8), (8, 1))

    x = rows().requires_grad_(trains)
    change = graph_passes.Passes(None)
    found, _ = graphs_of(
        run, x, change=lambda graph: change(graph, is_inference=not trains),
        change_both=graph_passes.JointPasses(None), trains=trains,
    )  # fmt: skip
    assert found.stride() == (8, 1)
    with torch.no_grad():
        close(found.detach(), run(x))


def test_no_terms_are_left() -> None:
    first = layer_of((ROUTE, "", ""), K, K)
    found, _ = passed(lambda x: torch.bmm(first(x)[:, None, :0], first(x)[:, :0, None]), rows())
    assert not found.any() and found.shape == (BATCH, 1, 1)


def test_graphs_of_inference_have_no_joint_pass() -> None:
    """Inductor calls it for them, too, before it finds attention."""
    graphs: list[str] = []

    def change(graph: torch.fx.Graph) -> None:
        before = graph.python_code("self").src
        graph_passes.JointPasses(None)(graph)
        assert graph.python_code("self").src == before
        graphs.append(before)

    graphs_of(Experts(), rows(), change=change, trains=False)
    assert "bmm" in graphs[0]


def test_a_slice_that_is_no_stack_is_read_as_it_is() -> None:
    first = layer_of((ROUTE, "", ""), K, K)

    def run(x: Tensor) -> Tensor:
        y = first(x)
        wide = torch.cat([y[:, None, :16], y[:, 16:48].view(-1, 2, 16)], 1)
        return torch.bmm(y[:, None, :3], wide)

    found, graph = passed(run, rows())
    assert "bmm" not in graph
    with torch.no_grad():
        close(found, run(rows()))


def test_nan_and_infinity_reach_their_samples_only() -> None:
    model = Experts()
    x = rows()
    x[3], x[5, 0] = torch.nan, torch.inf
    found, _ = passed(model, x)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01, equal_nan=True)


def test_gradients_are_sums_and_outer_products() -> None:
    model = Experts()

    def trained(run: Any) -> list[Tensor]:
        model.zero_grad()
        run(rows().requires_grad_()).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = trained(model)
    graphs: list[Any] = []

    def run(x: Tensor) -> Tensor:
        y, found = graphs_of(
            model, x, change=lambda _: None, change_both=graph_passes.JointPasses(None), trains=True
        )
        graphs.append(found)
        return y  # type: ignore[no-any-return]

    found = trained(run)
    forward, backward = (graph.python_code("self").src for graph in graphs[0])
    assert "bmm" not in forward
    assert backward.count("aten.bmm.default") == 1  # of the gate: sums over columns
    for one, other in zip(found, expected, strict=True):
        assert (one - other).float().norm() < 0.02 * other.float().norm()


@pytest.mark.rest
def test_inductor_stacks_nothing() -> None:
    with torch.no_grad():
        (code,) = codes_of(Experts(), rows())
    assert "extern_kernels.bmm" not in code and "extern_kernels.addmm" in code
