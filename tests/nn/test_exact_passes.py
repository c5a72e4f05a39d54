"""Passes that change no bit: norms of blocks with what follows, and sums of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from lokakern.nn import graph_passes
from lokakern.nn.block_rms_norm import block_rms_norm
from lokakern.nn.flat_sums import sum_to_vectors
from lokakern.nn.graph_edit import value
from lokakern.nn.normalized_blocks import keep_blocks
from lokakern.nn.routed_matmul import quantize_by
from tests.support.routed_layers import ROUTE, layer_of
from tests.support.traced_graphs import graphs_of

ROWS, N, BLOCK = 12, 64, 16
aten = torch.ops.aten


def activated(x: Tensor) -> Tensor:
    return quantize_by(functional.hardswish(block_rms_norm(x, BLOCK, 1e-5)), "0.05")


def read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """In FP8, and by a product in bfloat16."""
    y = functional.relu(block_rms_norm(x, BLOCK, 1e-5))
    return quantize_by(y, "0.05"), y @ y.t()


def between(x: Tensor) -> tuple[Tensor, Tensor]:
    """Operators that read another tensor, too, stay as rows."""
    y = functional.silu(block_rms_norm(x, BLOCK, 1e-5))
    return (y + x).sigmoid(), (y * 2).exp()


def scaled(x: Tensor) -> Tensor:
    """A norm with a weight of the block."""
    blocks = x.view(ROWS, -1, BLOCK).float()
    y = functional.layer_norm(blocks, (BLOCK,), torch.linspace(0, 1, BLOCK))
    return functional.gelu(y.view(ROWS, N)).bfloat16()


def pointwise_of_rows(graph: fx.Graph) -> list[fx.Node]:
    return [
        node for node in graph.nodes
        if torch.Tag.pointwise in getattr(node.target, "tags", ())
        and (of := value(node)) is not None and of.shape == (ROWS, N)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "left"), [(activated, 0), (read_twice, 0), (between, 2), (scaled, 0)]
)
def test_what_follows_a_norm_of_blocks_is_by_blocks(run: Callable[..., Any], left: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, N).bfloat16()
    x[3] = 0.0
    x[4, 5] = torch.nan
    before, (graph,) = graphs_of(run, x, change=lambda graph: None, trains=False)
    assert len(pointwise_of_rows(graph)) > left
    found, (graph,) = graphs_of(run, x, change=keep_blocks, trains=False)
    assert len(pointwise_of_rows(graph)) == left
    several = isinstance(found, tuple)
    for one, other in zip(found, before, strict=True) if several else [(found, before)]:
        assert one.dtype is other.dtype and one.stride() == other.stride()
        assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0))


def test_views_without_a_norm_stay() -> None:
    def run(x: Tensor) -> Tensor:
        return functional.relu((x.view(ROWS, -1, BLOCK) * 2).view(ROWS, N))

    _, (graph,) = graphs_of(run, torch.randn(ROWS, N), change=keep_blocks, trains=False)
    assert pointwise_of_rows(graph)


def test_a_copy_in_another_format_stays() -> None:
    def run(x: Tensor) -> Tensor:
        y = functional.relu(block_rms_norm(x, BLOCK, 1e-5))
        return y.contiguous(memory_format=torch.channels_last)

    x = torch.randn(2, 3, 4, N)
    found, _ = graphs_of(run, x, change=keep_blocks, trains=False)
    assert torch.equal(found, run(x)) and found.stride() == run(x).stride()


def test_it_runs_in_training_of_a_converted_model() -> None:
    layer = layer_of((ROUTE, "", ""), N, N, bias=False)
    graphs: list[fx.Graph] = []

    def change(graph: fx.Graph) -> None:
        graph_passes.Passes(None)(graph, is_inference=False)
        graphs.append(graph)

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return functional.hardswish(block_rms_norm(y, BLOCK, 1e-5))

    torch.manual_seed(0)
    x = torch.randn(ROWS, N).bfloat16()
    found, _ = graphs_of(run, x, change=change, trains=True)
    found.sum().backward()
    mine = layer.weight.grad.clone()
    layer.weight.grad = None
    run(x).sum().backward()
    assert not pointwise_of_rows(graphs[0])
    assert (mine - layer.weight.grad).norm() <= 0.02 * mine.norm()


@pytest.mark.parametrize("shape", [(1, N), (BLOCK, N), (1, BLOCK, N), (N,)])
def test_sums_over_rows_are_vectors(shape: tuple[int, ...]) -> None:
    """Gradients of what is read in every sample."""
    torch.manual_seed(0)
    given = torch.randn(shape, requires_grad=True)
    x = torch.randn(ROWS, BLOCK, N)

    def run(given: Tensor) -> Tensor:
        return (x * given).square()

    expected = torch.autograd.grad(run(given).sum(), given)[0]
    found, graphs = graphs_of(run, given, change=sum_to_vectors, trains=True)
    mine = torch.autograd.grad(found.sum(), given)[0]
    assert mine.shape == expected.shape and torch.allclose(mine, expected, rtol=1e-5)
    sums = graphs[-1].find_nodes(op="call_function", target=aten.sum.dim_IntList)
    leading = [node for node in sums if 0 in node.args[1]]
    assert leading and all(node.meta["val"].dim() == 1 for node in leading)


def test_a_sum_of_a_matrix_reads_the_matrix() -> None:
    """A product with this operand looks for the sum, see `lokakern.nn.inductor`."""
    x = torch.randn(ROWS, N)
    found, (graph,) = graphs_of(
        lambda x: x.sum(-2, keepdim=True), x, change=sum_to_vectors, trains=False
    )
    assert torch.equal(found, x.sum(0, keepdim=True))
    (total,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert total.args[0].op == "placeholder" and total.args[1] == [0]


def test_other_sums_stay() -> None:
    def run(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True) + x.sum((0, 2), keepdim=True) + x.sum()

    empty, one = torch.randn(3, 0, 4), torch.tensor(2.0)
    graphs_of(lambda x: x.sum(0), empty, change=sum_to_vectors, trains=False)
    graphs_of(lambda x: x.sum(-1), one, change=sum_to_vectors, trains=False)
    x = torch.randn(3, 4, 5)
    found, (graph,) = graphs_of(run, x, change=sum_to_vectors, trains=False)
    assert torch.allclose(found, run(x))
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert [node.args[1] for node in sums if node.args[1]] in ([[-1], [0, 2]], [[2], [0, 2]])
