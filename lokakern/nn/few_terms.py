"""Products of batches with one row and few terms, as sums that Inductor fuses.

A gate that weighs experts, as in MMoE and PLE, is such a product: ``[b, 1, e] @ [b, e, n]``, of e
experts that are stacked for it. A library takes 26 us of an H200 for 8192 x 4 x 256, whose bytes
take 5, and stacking 14. As a sum of e terms, which Inductor computes together with what the product
is read by, it needs no stack. So are outer products, ``[b, e, 1] @ [b, 1, n]``: its gradients.

Terms are multiplied and added in float32, as a library does, and rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from lokakern.nn.graph_edit import RESHAPES, add, replace, same, value

aten, prims = torch.ops.aten, torch.ops.prims
MOST_TERMS = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sum_few_terms(graph: fx.Graph) -> None:
    """Write products of batches with one row, and outer ones, as sums."""
    for product in list(graph.find_nodes(op="call_function", target=aten.bmm.default)):
        a, b = product.args
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        left, right = value(a), value(b)
        if left is None or right is None or left.dtype not in _DTYPES:
            continue
        rows, terms = left.shape[1:]
        is_outer = terms == 1
        if product.kwargs or not (is_outer or (rows == 1 and 0 < terms <= MOST_TERMS)):
            continue
        with graph.inserting_before(product):
            if is_outer:
                total = _product(graph, a, b)
            else:
                weights = (add(graph, aten.slice.Tensor, a, 2, i, i + 1) for i in range(terms))
                pairs = zip(weights, _parts(graph, b, terms), strict=True)
                products = [_product(graph, *pair) for pair in pairs]
                total = functools.reduce(lambda x, y: add(graph, aten.add.Tensor, x, y), products)
            total = add(graph, prims.convert_element_type.default, total, left.dtype)
            if not total.meta["val"].is_contiguous():  # as a product is, and `as_strided` reads it
                form = torch.contiguous_format
                total = add(graph, aten.clone.default, total, memory_format=form)
            replace(product, total)
    graph.eliminate_dead_code()


def _product(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    wide = (add(graph, prims.convert_element_type.default, x, torch.float32) for x in (a, b))
    return add(graph, aten.mul.Tensor, *wide)


def _parts(graph: fx.Graph, b: fx.Node, terms: int) -> list[fx.Node]:
    """The rows ``[batch, 1, n]`` of each sample of b, of which a stack is made if it is one."""
    batch, _, n = b.meta["val"].shape
    stack = same(b)
    source = stack.args[0] if stack.target in RESHAPES else stack
    if isinstance(source, fx.Node) and source.target is aten.cat.default:
        parts: list[fx.Node] = list(source.args[0])  # type: ignore[arg-type]
        shapes = {tuple(part.meta["val"].shape) for part in parts}
        is_stack = source.args[1:] in ((1,), (-2,)) and shapes == {(batch, 1, n)}
        # torch writes a stack as the concatenation of rows, in another shape.
        if is_stack or (source.args[1:] in ((1,), (-1,)) and shapes == {(batch, n)}):
            return parts if is_stack else [add(graph, aten.unsqueeze.default, x, 1) for x in parts]
    return [add(graph, aten.slice.Tensor, b, 1, i, i + 1) for i in range(terms)]
