"""Silu in a graph of ATen operators, as torch decomposes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default


def silu_operand(rounded: fx.Node) -> fx.Node | None:
    """x, if a node is ``silu(x)`` of 16 bits, computed in float32; else None."""
    if rounded.target is aten.silu.default:
        return rounded.args[0]  # type: ignore[return-value]
    silu = rounded.args[0] if rounded.target is _CAST else None
    if not isinstance(silu, fx.Node) or len(silu.args) != 2 or silu.kwargs:
        return None
    wide = silu.args[0]
    if not _is(wide, _CAST) or wide.args[1] is not torch.float32:  # type: ignore[union-attr]
        return None
    assert isinstance(wide, fx.Node)
    if silu.target is aten.div.Tensor:
        is_silu = _is_one_more_than_exp_of_minus(silu.args[1], wide)
    else:
        is_silu = silu.target is aten.mul.Tensor and _is_sigmoid(silu.args[1], wide)
    x = wide.args[0]
    is_same = isinstance(x, fx.Node) and x.meta["val"].dtype is rounded.args[1]
    return x if is_silu and is_same else None  # type: ignore[return-value]


def _is_sigmoid(node: Any, x: fx.Node) -> bool:
    """Whole, or as torch 2.11 decomposes it: ``1 / y * 1``."""
    if _is(node, aten.mul.Tensor) and node.args[1] == 1:
        node = node.args[0]
    if _is(node, aten.reciprocal.default):
        return _is_one_more_than_exp_of_minus(node.args[0], x)
    return _is(node, aten.sigmoid.default) and node.args[0] is x


def _is_one_more_than_exp_of_minus(node: Any, x: fx.Node) -> bool:
    if not _is(node, aten.add.Tensor) or node.args[1] != 1 or node.kwargs:
        return False
    exp: Any = node.args[0]
    if not _is(exp, aten.exp.default) or not _is(exp.args[0], aten.neg.default):
        return False
    return exp.args[0].args[0] is x


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target
