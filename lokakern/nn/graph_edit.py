"""Reading and writing graphs of ATen operators, as Inductor's passes have them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
RESHAPES = frozenset({aten.view.default, aten.reshape.default})
VIEWS = RESHAPES | {aten.expand.default}
# What shows elements of a tensor, without a kernel.
PARTS = VIEWS | {
    operator.getitem, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unbind.int, aten.unsqueeze.default,
}  # fmt: skip
CHUNK = 8  # bfloat16 elements in 16 bytes, which rows start at multiples of
PRODUCTS = {aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default}


def value(x: Any) -> Tensor | None:
    """The fake tensor of a node, if its sizes are known and it is no other value."""
    found = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        return None
    is_known = all(isinstance(size, int) for size in (*found.shape, *found.stride()))
    return found if is_known else None


def joins_columns(node: fx.Node) -> bool:
    """Whether a node concatenates matrices along columns."""
    y = value(node) if node.target is aten.cat.default else None
    return y is not None and y.dim() == 2 and node.args[1:] in ((1,), (-1,))


def bytes_of(x: Tensor) -> int:
    """Bytes of its elements."""
    return x.numel() * x.element_size()


def add(graph: fx.Graph, op: Any, *given: Any, **options: Any) -> fx.Node:
    """A call with its value, at the point of insertion."""
    node = graph.call_function(op, given, options)
    values: Any = fx.node.map_arg((given, options), lambda x: x.meta["val"])
    node.meta["val"] = op(*values[0], **values[1])
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let all users of a node read another, and drop it."""
    old.replace_all_uses_with(new)
    new.meta = {**old.meta, **new.meta}
    old.graph.erase_node(old)


def same(x: fx.Node) -> fx.Node:
    """What a node is a view of with the same sizes: as itself."""
    while x.target in VIEWS and isinstance(x.args[0], fx.Node):
        source, of = value(x.args[0]), value(x)
        if source is None or of is None or source.shape != of.shape:
            break
        x = x.args[0]
    return x


def is_written(x: fx.Node, *, but: frozenset[fx.Node] = frozenset()) -> bool:
    """Whether something other than Inductor's kernels reads a node, or a part of it.

    Products of FP8 do not count, whose operands Inductor's kernels quantize.
    """
    ops = torch.ops.lokakern
    quantizing = (ops.routed_gemm.default, ops.rectified_product.default)
    for reader in x.users.keys() - but:
        is_ours = getattr(reader.target, "namespace", "") == "lokakern"
        is_ours = is_ours and reader.target not in quantizing
        if is_ours or reader.target in PRODUCTS or reader.op == "output":
            return True
        if reader.target in PARTS and is_written(reader, but=but):
            return True
    return False


def is_read_so(x: fx.Node, m: int, n: int) -> bool:
    """Whether the op may read a node as ``[m, n]`` as it lies in memory."""
    of = x.meta["val"]
    if of.shape != (m, n):
        return bool(of.numel() == m * n and of.is_contiguous())
    starts = of.stride(0), of.storage_offset()
    return bool(of.stride(1) == 1 and starts[0] >= n and not any(y % CHUNK for y in starts))


def is_there(x: fx.Node) -> bool:
    """Whether a node is written anyway: by a caller, a library or one of our ops, or for one."""
    while True:
        if is_written(x):
            return True
        source = x.args[0] if x.args else None
        if x.target not in PARTS or not isinstance(source, fx.Node):
            break
        x = source
    is_ours = getattr(x.target, "namespace", "") == "lokakern"
    return x.op == "placeholder" or x.target in PRODUCTS or is_ours


def readers(x: fx.Node) -> list[fx.Node]:
    """What reads a node, itself or through views with the same sizes."""
    found = []
    for user in x.users:
        found += readers(user) if user.target in VIEWS and same(user) is same(x) else [user]
    return found


def is_recomputed(*nodes: fx.Node) -> bool:
    """Whether a checkpoint computes one of them again in the backward pass."""
    return any("recompute" in x.meta for x in nodes)


def behind_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What is computed from gradients of the outputs, not in the forward pass."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
