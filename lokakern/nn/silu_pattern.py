"""Silu and sigmoid in a graph of ATen operators, as torch decomposes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
Nodes = tuple[fx.Node, ...]


def silu_operand(rounded: fx.Node) -> fx.Node | None:
    """x, if a node is ``silu(x)`` of 16 bits, computed in float32; else None."""
    if rounded.target is aten.silu.default:
        return rounded.args[0]  # type: ignore[return-value]
    silu = rounded.args[0] if rounded.target is _CAST else None
    wide = next(iter(nodes_of_silu(silu)), None)
    if wide is None or wide.target is not _CAST or wide.args[1] is not torch.float32:
        return None
    x = wide.args[0]
    is_same = isinstance(x, fx.Node) and x.meta["val"].dtype is rounded.args[1]
    return x if is_same else None  # type: ignore[return-value]


def nodes_of_silu(node: Any) -> Nodes:
    """The operand of a silu and the nodes that compute it, the last one given; else none."""
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs:
        return ()
    x, by = node.args
    nodes: Nodes = ()
    if node.target is aten.div.Tensor:
        nodes = _one_more_than_exp_of_minus(by, x)
    elif node.target is aten.mul.Tensor:
        nodes = nodes_of_sigmoid(by, x)
    return (x, node, *nodes) if nodes and isinstance(x, fx.Node) else ()


def nodes_of_sigmoid(node: Any, x: Any) -> Nodes:
    """The nodes that compute ``sigmoid(x)``, whole or as torch 2.11 does: ``1 / y * 1``."""
    if _is(node, aten.sigmoid.default) and node.args[0] is x:
        return (node,)
    times = (node,) if _is(node, aten.mul.Tensor) and node.args[1] == 1 else ()
    one = node.args[0] if times else node
    if not _is(one, aten.reciprocal.default):
        return ()
    nodes = _one_more_than_exp_of_minus(one.args[0], x)
    return (*times, one, *nodes) if nodes else ()


def _one_more_than_exp_of_minus(node: Any, x: Any) -> Nodes:
    if not _is(node, aten.add.Tensor) or node.args[1] != 1 or node.kwargs:
        return ()
    exp: Any = node.args[0]
    if not _is(exp, aten.exp.default) or not _is(exp.args[0], aten.neg.default):
        return ()
    return (node, exp, exp.args[0]) if exp.args[0].args[0] is x else ()


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target
