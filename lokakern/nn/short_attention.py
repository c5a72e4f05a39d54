"""Attention over few tokens in one kernel each way, where compilers take several or general ones.

Recommendation models attend among the fields of a sample, or over the last events of a user: tens
of tokens and heads of few columns. Kernels of attention for language models compute tiles of 64 and
more queries in a loop, and one with a mask reads it for every head and query; products and a
softmax of their own move all scores three times. `lokakern.kernels.triton.short_attention` holds a
head's keys in one tile. It takes the place of what
`lokakern.nn.attention_patterns` finds in the graph of a compiled inference, and in that of a
training, whose backward pass computes the weights once more from q and k instead of reading them.
Scores stay in float32, so that results differ by roundings.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from lokakern.nn.attention_patterns import Attention, Gradients, by_heads, find_attention
from lokakern.nn.graph_edit import PARTS, RESHAPES, add, is_written, replace, value
from lokakern.nn.silu_pattern import silu_operand
from lokakern.nn.token_mixing import has_triton

aten = torch.ops.aten
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
MOST_KEYS = 128
MOST_COLUMNS = 64
_TURNED = [0, 2, 1, 3]


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool, silu: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what values are weighted by, and which scores are left out; in float32."""
    score = q.float() @ k.float().mT * scale
    left_out = torch.zeros_like(score, dtype=torch.bool)
    if bias is not None and bias.dtype is torch.bool:
        left_out |= bias
    elif bias is not None:
        score = score + bias.float()
    if causal:
        left_out |= torch.ones_like(left_out).triu(1)
    if silu:
        return score, (silu * score * score.sigmoid()).masked_fill(left_out, 0.0), left_out
    score = score.masked_fill(left_out, -math.inf)
    p = score.softmax(-1)
    p = p.masked_fill((score == -math.inf).all(-1, keepdim=True), 0.0) if zeros else p
    return score, p, left_out


def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float, activated: bool = False,
) -> Tensor:  # fmt: skip
    if q.is_cuda:
        from lokakern.kernels.triton.short_attention import short_attention

        return short_attention(q, k, v, bias, scale, causal, zeros, silu, activated)
    if activated:
        q, k, v = map(functional.silu, (q, k, v))
    _, p, _ = _weights(q, k, bias, scale, causal, zeros, silu)
    return (p @ v.float()).to(q.dtype).transpose(1, 2).contiguous()


def _short_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float, activated: bool = False,
) -> Tensor:  # fmt: skip
    batch, heads = (max(x.shape[dim] for x in (q, k, v)) for dim in (0, 1))
    return q.new_empty((batch, q.shape[2], heads, q.shape[3]))


def _gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool,
    zeros: bool, silu: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k and v; ``[batch, tokens, heads, d]``."""
    if q.is_cuda:
        from lokakern.kernels.triton.short_attention import short_attention_gradients

        return short_attention_gradients(dy, q, k, v, bias, scale, causal, zeros, silu)
    score, p, left_out = _weights(q, k, bias, scale, causal, zeros, silu)
    dp = dy.float() @ v.float().mT
    if silu:
        sigmoid = score.sigmoid()
        ds = (silu * dp * sigmoid * (1 + score * (1 - sigmoid))).masked_fill(left_out, 0.0)
    else:
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).masked_fill(left_out, 0.0)
    found = ds @ k.float() * scale, ds.mT @ q.float() * scale, p.mT @ dy.float()
    dq, dk, dv = (x.to(q.dtype).transpose(1, 2).contiguous() for x in found)
    return dq, dk, dv


def _gradients_fake(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool,
    zeros: bool, silu: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads = (max(x.shape[dim] for x in (q, k, v)) for dim in (0, 1))
    sizes = [(batch, x.shape[2], heads, x.shape[3]) for x in (q, k, v)]
    dq, dk, dv = map(q.new_empty, sizes)
    return dq, dk, dv


_GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal, bool zeros, float silu"
)
for _name, _schema, _run, _fake in (
    ("short_attention", f"({_GIVEN}, bool activated=False) -> Tensor", _short_attention,
     _short_attention_fake),
    ("short_attention_gradients", f"(Tensor dy, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
     _gradients, _gradients_fake),
):  # fmt: skip
    _LIBRARY.define(f"{_name}{_schema}", tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lokakern::{_name}", _fake, lib=_LIBRARY)


def is_fast_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels were measured against others on such GPUs: Hopper's."""
    return has_triton(device, dtype) and torch.cuda.get_device_capability(device)[0] == 9


def attend_at_once(graph: fx.Graph) -> None:
    """Compute attentions of an inference over few tokens by one kernel each."""
    for node in list(graph.nodes):
        found = find_attention(node, _fits)
        if found is not None and not _has_readers_of_strides([found.out]):
            for view in _views_of(found.out):  # of other strides, now and then
                view.target = aten.reshape.default if view.target in RESHAPES else view.target
            _write(found)
    graph.eliminate_dead_code()


def activate_in_attention(graph: fx.Graph) -> None:
    """Compute silu of queries, keys and values in attention, if they are parts of one silu.

    Inductor writes what a kernel of ours reads: in HSTU silu of 8192 x 2048, 25 us of an H200. What
    else reads this silu, such as the gate, has to be Inductor's, which computes it as it loads it.
    """
    op = torch.ops.lokakern.short_attention.default
    for node in list(graph.find_nodes(op="call_function", target=op)):
        found = [_part_of_silu(x) for x in node.args[:3]]
        sources = {source for source, _, _ in filter(None, found)}
        if None in found or len(sources) > 1 or len(node.args) > 8:
            continue
        alone = frozenset((node,))
        if any(is_written(silu, but=alone) for _, silu, _ in filter(None, found)):
            continue
        with graph.inserting_before(node):
            parts = [_without_silu(graph, *part) for part in filter(None, found)]
            made = add(graph, op, *parts, *node.args[3:], True)
        replace(node, made)
    graph.eliminate_dead_code()


def _without_silu(graph: fx.Graph, x: fx.Node, silu: fx.Node, views: list[fx.Node]) -> fx.Node:
    """The same part of what silu was taken of."""
    now = add(graph, aten.reshape.default, x, list(silu.meta["val"].shape))
    for view in views:
        op = aten.reshape.default if view.target in RESHAPES else view.target
        now = add(graph, op, now, *view.args[1:], **view.kwargs)
    return now


def _part_of_silu(node: Any) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """What silu was taken of, the silu, and the views of it up to a node, from it on."""
    views: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in PARTS:
        views.insert(0, node)
        node = node.args[0]
    x = silu_operand(node) if isinstance(node, fx.Node) else None
    return None if x is None or value(x) is None else (x, node, views)


def attend_in_training(graph: fx.Graph) -> None:
    """The same in the joint graph of a forward and a backward pass, two kernels each."""
    outputs = {x: value(x) for x in graph.output_node().all_input_nodes}
    replaced: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in list(graph.nodes):
        found = None if node in replaced else find_attention(node, _fits, trains=True)
        if found is None or found.gradients is None:
            continue
        ends = [found.out, *found.gradients[1:4]]
        if _has_readers_of_strides(ends):
            continue
        for view in (view for end in ends for view in _views_of(end)):
            view.target = aten.reshape.default if view.target in RESHAPES else view.target
        replaced.update(ends)
        written |= {*_write_gradients(found, found.gradients), *_write(found)}
    graph.eliminate_dead_code()
    if written:
        _update_values(graph, written)
        _keep_strides(graph, [*outputs.values()])


def _has_readers_of_strides(ends: list[fx.Node]) -> bool:
    """Whether what results reach depends on their order in memory.

    That are operators that read memory by strides, operators of higher order, such as kernels of
    users, and results of the graph with gaps.
    """
    reached, todo = set(ends), [*ends]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                continue
            is_op = isinstance(user.target, torch._ops.OpOverload)
            if user.target is aten.as_strided.default or not (
                is_op or user.target is operator.getitem
            ):
                return True
            if user not in reached:
                reached.add(user)
                todo.append(user)
    results = ends[0].graph.output_node().all_input_nodes
    values = [value(x) for x in results if x in reached]
    return any(x is not None and _in_order(x) is None for x in values)


def _in_order(x: Tensor) -> list[int] | None:
    """Dimensions from the outer to the inner one in memory, or None if there are gaps."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim))
    return order if x.permute(order).is_contiguous() else None


def _keep_strides(graph: fx.Graph, before: list[Tensor | None]) -> None:
    """Let results of the graph have the order in memory that callers were told of."""
    output = graph.output_node()
    for node, of in zip(output.all_input_nodes, before, strict=True):
        now, order = value(node), None if of is None else _in_order(of)
        if now is None or of is None or order is None or now.stride() == of.stride():
            continue
        with graph.inserting_before(output):
            x = add(graph, aten.permute.default, node, order)
            x = add(graph, aten.clone.default, x, memory_format=torch.contiguous_format)
            back = [order.index(dim) for dim in range(len(order))]
            x = add(graph, aten.permute.default, x, back)
        output.replace_input_with(node, x)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """All views of a node, and views of these."""
    found = []
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema and any(x.alias_info and not x.alias_info.is_write for x in schema.arguments):
            found += [user, *_views_of(user)]
    return found


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes operands ``[..., tokens, d]``."""
    columns, keys = q.shape[-1], k.shape[-2]
    if not (v.shape == k.shape and q.dtype is k.dtype is v.dtype):
        return False
    is_short = keys <= MOST_KEYS and columns <= MOST_COLUMNS and columns % 8 == 0
    return is_short and bool(q.numel()) and is_fast_on(q.device, q.dtype)


def _write(found: Attention) -> list[fx.Node]:
    out, graph = found.out, found.out.graph
    with graph.inserting_before(out):
        op = torch.ops.lokakern.short_attention.default
        made = add(graph, op, found.q, found.k, found.v, *_settings(found))
    return _show(out, made, _TURNED)


def _settings(found: Attention) -> tuple[Any, ...]:
    return found.bias, found.scale, found.causal, found.zeros, found.silu


def _write_gradients(found: Attention, gradients: Gradients) -> list[fx.Node]:
    graph, dy = found.out.graph, gradients.of_out
    ends = gradients[1:4]
    sizes = [x.meta["val"].shape for x in (found.q, found.k, found.v)]
    first = next(node for node in graph.nodes if node in ends)
    with graph.inserting_before(first):
        if dy.meta["val"].dim() == 3:
            dy = by_heads(dy, (max(x[0] for x in sizes), max(x[1] for x in sizes)))
        op = torch.ops.lokakern.short_attention_gradients.default
        made = add(graph, op, dy, found.q, found.k, found.v, *_settings(found))
        parts = [add(graph, operator.getitem, made, place) for place in range(3)]
    moved = []
    for end, part in zip(ends, parts, strict=True):
        is_turned = end is gradients.of_k and gradients.is_turned
        moved += _show(end, part, [0, 2, 3, 1] if is_turned else _TURNED)
    return moved


def _show(out: fx.Node, made: fx.Node, dims: list[int]) -> list[fx.Node]:
    """Let what read a node read a permutation of another, or that itself: these are returned."""
    graph, of = out.graph, out.meta["val"]
    fused: Any = out.args[0] if out.target is operator.getitem else None
    with graph.inserting_before(out):
        turned = shown = add(graph, aten.permute.default, made, dims)
        if turned.meta["val"].shape != of.shape:
            shown = add(graph, aten.reshape.default, turned, list(of.shape))
        if of.is_contiguous() and not shown.meta["val"].is_contiguous():  # as views of it need
            shown = add(graph, aten.clone.default, shown, memory_format=torch.contiguous_format)
    replace(out, shown)
    if fused is not None and not any(part.users for part in fused.users):
        for unread in [*fused.users, fused]:  # it may draw random numbers: nobody else drops it
            graph.erase_node(unread)
    for user in list(shown.users):
        if user.target in RESHAPES and user.meta["val"].shape == turned.meta["val"].shape:
            user.replace_all_uses_with(turned)
            graph.erase_node(user)
    _read_through(turned, dims, made)
    for user in list(made.users):
        if user.target is aten.clone.default and graph.output_node() not in user.users:
            user.replace_all_uses_with(made)
    return [made, turned, shown]


def _read_through(node: fx.Node, dims: list[int], made: fx.Node) -> None:
    """Let permutations of ``made.permute(dims)`` that are made itself be so."""
    for user in list(node.users):
        if user.target is aten.permute.default:
            places: Any = user.args[1]
            total = [dims[place] for place in places]
            _read_through(user, total, made)
            if total == sorted(total):
                user.replace_all_uses_with(made)
                node.graph.erase_node(user)


def _update_values(graph: fx.Graph, written: set[fx.Node]) -> None:
    """Tell strides anew of what reads nodes whose order in memory is another."""
    for node in graph.nodes:
        if written.isdisjoint(node.all_input_nodes):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target != operator.getitem:
            continue
        node.target = aten.reshape.default if node.target in RESHAPES else node.target
        values: Any = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        found, before = node.target(*values[0], **values[1]), node.meta["val"]
        node.meta["val"] = found
        if not isinstance(found, Tensor) or found.stride() != before.stride():
            written.add(node)
