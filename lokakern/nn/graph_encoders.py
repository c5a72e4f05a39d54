"""Encoder layers in the graphs of Dynamo: torch's fast path, and the parts that it stands for.

In evaluation without gradients Dynamo keeps an `nn.TransformerEncoderLayer` as one call, whose
arguments are all of its weights. `take_apart` has its parts computed one by one, as torch computes
them without the fast path of this layer, so that its feed-forward block shows; attention stays one
call, by the fast path of `nn.MultiheadAttention`. `keep_changed` undoes that where nothing gained.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from lokakern.nn.graph_products import value


class Parts(NamedTuple):
    """An encoder layer that was taken apart.

    Attributes:
        fast: Its call, which nothing reads now.
        calls: Those of its parts, with what they call; the last one is its output.
    """

    fast: fx.Node
    calls: tuple[tuple[fx.Node, Any], ...]


def take_apart(gm: fx.GraphModule) -> list[Parts]:
    """Have the parts of the encoder layers of a graph computed one by one."""
    fast = gm.graph.find_nodes(op="call_function", target=torch._transformer_encoder_layer_fwd)
    return [_taken_apart(node) for node in fast if _is_usual(node)]


def _is_usual(node: fx.Node) -> bool:
    """Whether a call is that of the layer, which names no arguments, with a dense input."""
    x = value(node.args[0]) if len(node.args) >= 18 else None  # type: ignore[arg-type]
    return type(x).__name__ == "FakeTensor" and x.layout is torch.strided  # type: ignore[union-attr]


def _taken_apart(fast: fx.Node) -> Parts:
    (
        x, columns, heads, qkv_weight, qkv_bias, out_weight, out_bias, has_gelu, is_norm_first, eps,
        *vectors,
    ) = fast.args[:14]  # fmt: skip
    weight1, bias1, weight2, bias2, *masks = fast.args[14:]
    calls: list[tuple[fx.Node, Any]] = []

    def add(target: Callable[..., Any], *given: Any) -> fx.Node:
        call = fast.graph.call_function(target, given)
        call.meta = dict(fast.meta)
        values = fx.node.map_arg(given, value)
        with torch.no_grad(), value(x).fake_mode:  # type: ignore[arg-type]
            call.meta["example_value"] = target(*values)
        calls.append((call, target))
        return call

    def norm(y: Any, place: int) -> fx.Node:
        return add(functional.layer_norm, y, (columns,), *vectors[place : place + 2], eps)

    def attend(y: Any) -> fx.Node:
        mask, kind = (*masks, None, None)[:2]
        projections = qkv_weight, qkv_bias, out_weight, out_bias
        given = y, y, y, columns, heads, *projections, mask, False, True, kind
        return add(operator.getitem, add(torch._native_multi_head_attention, *given), 0)

    def feed_forward(y: Any) -> fx.Node:
        activation = functional.gelu if has_gelu else functional.relu
        y = add(activation, add(functional.linear, y, weight1, bias1))
        return add(functional.linear, y, weight2, bias2)

    with fast.graph.inserting_before(fast):
        for place, block in ((0, attend), (2, feed_forward)):
            if is_norm_first:
                y: Any = add(operator.add, x, block(norm(x, place)))
            else:
                y = norm(add(operator.add, x, block(x)), place)
            x = y
    fast.replace_all_uses_with(y)
    return Parts(fast, tuple(calls))


def keep_changed(layers: Sequence[Parts]) -> None:
    """Leave apart the layers of which a call was replaced, the others as they were."""
    for fast, calls in layers:
        if any(call.target is not target for call, target in calls):
            fast.graph.erase_node(fast)
            continue
        calls[-1][0].replace_all_uses_with(fast)
        for call, _ in reversed(calls):
            fast.graph.erase_node(call)
