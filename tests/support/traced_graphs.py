"""Graphs of ATen operators as Inductor gets them, changed by a pass and then run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from lokakern.nn import graph_passes


def graphs_of(
    run: Callable[..., Any], *given: Tensor, change: Callable[[fx.Graph], None], trains: bool,
    change_both: Callable[[fx.Graph], None] = lambda graph: None,
) -> tuple[Any, list[fx.Graph]]:  # fmt: skip
    """The result after a pass over each graph, and one over forward and backward, and the graphs.

    The graph of the backward pass is there once a gradient is computed.
    """
    graphs: list[fx.Graph] = []

    def compile_one(gm: fx.GraphModule, _: Any) -> Any:
        change(gm.graph)
        gm.graph.lint()
        gm.recompile()
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def split(gm: fx.GraphModule, *given: Any, **options: Any) -> Any:
        change_both(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return min_cut_rematerialization_partition(gm, *given, **options)

    backend = aot_autograd(
        fw_compiler=compile_one, partition_fn=split, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    with torch.set_grad_enabled(trains):
        return torch.compile(run, backend=backend, dynamic=False)(*given), graphs


def passed(run: Callable[..., Any], *given: Tensor, trains: bool = False) -> tuple[Any, str]:
    """The result after all passes for converted models, and the text of the graphs."""

    def change(graph: fx.Graph) -> None:
        graph_passes.Passes(None)(graph, is_inference=not trains)

    found, graphs = graphs_of(run, *given, change=change, trains=trains)
    return found, "\n".join(graph.python_code("self").src for graph in graphs)
