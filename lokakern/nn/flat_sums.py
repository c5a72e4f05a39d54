"""Sums over rows whose result is a vector, for a compiler that forgets other shapes.

Inductor of torch 2.10 to 2.12 computes a sum over rows beside a sum along them in one kernel, and
hands out a vector whatever the shape of the result was. The gradient of a weight ``[1, n]`` that is
read where rows are quantized is such a sum, and its step ends with "returned an invalid gradient".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lokakern.nn.graph_edit import add, replace, value

aten = torch.ops.aten
IS_NEEDED = torch.__version__ < (2, 13)  # type: ignore[operator]  # a version of torch compares so


def sum_to_vectors(graph: fx.Graph) -> None:
    """Write sums over the first dimensions as sums over rows of a matrix."""
    for node in list(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        x: Any = node.args[0]
        of, result = value(x), value(node)
        dims: Any = node.args[1] if len(node.args) > 1 else None
        if of is None or result is None or result.dim() == 1 or not dims or not of.numel():
            continue
        if not of.dim():
            continue
        over = sorted(dim % of.dim() for dim in dims)
        if over != list(range(len(over))) or len(over) == of.dim():
            continue
        with graph.inserting_before(node):
            matrix = x  # as it is: `inductor` looks for sums of a product's operand
            if of.dim() != 2:
                columns = of.shape[len(over) :].numel()
                matrix = add(graph, aten.reshape.default, x, [-1, columns])
            total = add(graph, aten.sum.dim_IntList, matrix, [0], **node.kwargs)
            replace(node, add(graph, aten.reshape.default, total, list(result.shape)))
    graph.eliminate_dead_code()
