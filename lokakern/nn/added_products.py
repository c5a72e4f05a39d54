"""The sum of two batched products in one kernel, in the graph of a compiled training.

Embeddings that both a factorization machine and products across tokens read get the sum of two
gradients, ``a @ b + w @ x`` with w for all samples. A compiler has a library compute both products,
and adds them in a kernel of its own: results of all embeddings are written and read five times.
`lokakern.kernels.triton.added_products` writes them once, and rounds the sum once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lokakern.nn.graph_edit import RESHAPES, add, bytes_of, replace, value
from lokakern.nn.short_attention import is_fast_on

aten = torch.ops.aten
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
MOST_K, MOST_R = 64, 256  # of a tile
# Of the result: an H200 takes 75 us to write and read it four times.
LEAST_BYTES = 80_000_000


def _added_products(a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Tensor:
    if a.is_cuda:
        from lokakern.kernels.cuda import added_products as cuda
        from lokakern.kernels.triton.added_products import added_products

        return (cuda.added_products if cuda.takes(a, b, w, x) else added_products)(a, b, w, x)
    return (a.float() @ b.float() + w.float() @ x.float()).to(a.dtype)


def _added_products_fake(a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]))


_LIBRARY.define(
    "added_products(Tensor a, Tensor b, Tensor w, Tensor x) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.impl("added_products", _added_products, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::added_products", _added_products_fake, lib=_LIBRARY)


def add_in_products(graph: fx.Graph) -> None:
    """Compute sums of two large products, one with a left operand for all samples, at once."""
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        of = value(node)
        if of is None or node.kwargs or of.dim() != 3 or bytes_of(of) < LEAST_BYTES:
            continue
        found = [_product_of(x, of) for x in node.args]
        products = sorted((x for x in found if x is not None), key=_is_shared)
        if len(products) < 2 or products[0] is products[1]:
            continue
        (a, b), (w, x) = (product.args for product in products)
        if not _takes(a, b, w, x):
            continue
        with graph.inserting_before(node):
            first = add(graph, aten.select.int, w, 0, 0)
            op = torch.ops.lokakern.added_products.default
            replace(node, add(graph, op, a, b, first, x))
    graph.eliminate_dead_code()


def _product_of(node: Any, of: Tensor) -> fx.Node | None:
    """The batched product that a node is, by reshapes and permutations that change nothing."""
    dims = [0, 1, 2]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        found = value(node)
        if found is None or found.dim() != 3 or found.dtype is not of.dtype:
            return None
        if node.target is aten.bmm.default:
            return node if dims == [0, 1, 2] and found.shape == of.shape else None
        source: Any = node.args[0] if node.args else None
        before = value(source)
        if node.target is aten.permute.default:
            places: Any = node.args[1]
            dims = [places[dim] for dim in dims]
        elif node.target not in RESHAPES or before is None or before.shape != found.shape:
            return None
        node = source
    return None


def _is_shared(product: fx.Node) -> bool:
    """Whether the left operand is one for all samples."""
    left = value(product.args[0])
    return left is not None and left.stride(0) == 0 and left.shape[0] > 1


def _takes(a: Any, b: Any, w: Any, x: Any) -> bool:
    values = [value(y) for y in (a, b, w, x)]
    if any(y is None for y in values):
        return False
    of_a, of_b, of_w, of_x = values
    assert of_a is not None and of_b is not None and of_w is not None and of_x is not None
    if of_w.stride(0) != 0 or not 0 < of_a.shape[2] <= MOST_K or not 0 < of_w.shape[2] <= MOST_R:
        return False
    same = of_a.dtype is of_b.dtype is of_w.dtype is of_x.dtype
    return same and is_fast_on(of_a.device, of_a.dtype)
