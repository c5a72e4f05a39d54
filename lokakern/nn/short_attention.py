"""Attention over few tokens in one kernel, where compilers take several or general ones.

Recommendation models attend among the fields of a sample, or over the last events of a user: tens
of tokens and heads of few columns. Kernels of attention for language models compute tiles of 64 and
more queries in a loop, and one with a mask reads it for every head and query; products and a
softmax of their own move all scores three times. `lokakern.kernels.triton.short_attention` holds a
head's keys in one tile. It takes the place of torch's fused attention without dropout, and of

    softmax(q @ k.mT * scale + bias or mask) @ v        silu(q @ k.mT * scale + bias) / n @ v

in the graph of a compiled inference. Scores stay in float32, so that results differ by roundings.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lokakern.nn.graph_edit import RESHAPES, add, replace, value
from lokakern.nn.token_mixing import has_triton

aten, prims = torch.ops.aten, torch.ops.prims
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
MOST_KEYS = 128
MOST_COLUMNS = 64
# Keys times columns, above which cuDNN's kernel is faster: at 128 x 64, 261 us of an H200 and 349
# (2048 samples of 8 heads; FlashAttention 399, products 2983), at 64 x 64 531 and 266.
MOST_BEFORE_CUDNN = 4096
_TURNED = [0, 2, 1, 3]
_COPIES = (prims.convert_element_type.default, aten.clone.default)
_MOVES = (*RESHAPES, aten.clone.default)
_FUSED = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
)


def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float,
) -> Tensor:  # fmt: skip
    if q.is_cuda:
        from lokakern.kernels.triton.short_attention import short_attention

        return short_attention(q, k, v, bias, scale, causal, zeros, silu)
    score = q.float() @ k.float().mT * scale
    left_out = torch.zeros_like(score, dtype=torch.bool)
    if bias is not None and bias.dtype is torch.bool:
        left_out |= bias
    elif bias is not None:
        score = score + bias.float()
    if causal:
        left_out |= torch.ones_like(left_out).triu(1)
    if silu:
        p = (silu * score * score.sigmoid()).masked_fill(left_out, 0.0)
    else:
        score = score.masked_fill(left_out, -math.inf)
        p = score.softmax(-1)
        p = p.masked_fill((score == -math.inf).all(-1, keepdim=True), 0.0) if zeros else p
    return (p @ v.float()).to(q.dtype).transpose(1, 2).contiguous()


def _short_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float,
) -> Tensor:  # fmt: skip
    batch, heads = (max(x.shape[dim] for x in (q, k, v)) for dim in (0, 1))
    return q.new_empty((batch, q.shape[2], heads, q.shape[3]))


_LIBRARY.define(
    "short_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal, "
    "bool zeros, float silu) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.impl("short_attention", _short_attention, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::short_attention", _short_attention_fake, lib=_LIBRARY)


def is_fast_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel was measured against others on such GPUs: Hopper's."""
    return has_triton(device, dtype) and torch.cuda.get_device_capability(device)[0] == 9


class _Found(NamedTuple):
    """An attention of a graph; operands are ``[batch, heads, tokens, d]``."""

    out: fx.Node  # ``[batch, heads, queries, d]``, or with the first two as one
    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | None
    scale: float
    causal: bool = False
    zeros: bool = True
    silu: float = 0.0


def attend_at_once(graph: fx.Graph) -> None:
    """Compute attentions over few tokens by one kernel each."""
    for node in list(graph.nodes):
        found = None
        if node.target in _FUSED:
            found = _of_fused(node)
        elif node.target in (aten.bmm.default, aten.slice.Tensor):
            found = _of_products(node)
        views = [] if found is None else _views_of(found.out)
        if found is not None and all(x.target is not aten.as_strided.default for x in views):
            for view in views:  # of other strides, now and then
                view.target = aten.reshape.default if view.target in RESHAPES else view.target
            _write(found)
    graph.eliminate_dead_code()


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


def _of_fused(node: fx.Node) -> _Found | None:
    """An attention by a kernel of torch, if nothing but its output is read."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    out = next((user for user in node.users if user.args[1] == 0), None)
    if out is None or any(user.users for user in node.users if user is not out):
        return None
    q, k, v = (value(given[name]) for name in ("query", "key", "value"))
    if q is None or k is None or v is None or given.get("dropout_p", 0.0) != 0.0:
        return None
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and _fits(q, k, v)):
        return None
    is_cudnn = target is aten._scaled_dot_product_cudnn_attention.default
    if is_cudnn and k.shape[2] * k.shape[3] > MOST_BEFORE_CUDNN:
        return None
    bias = given.get("attn_bias")
    if bias is not None:
        bias = _without_copies(bias)
        if not _is_bias(bias, (*q.shape[:3], k.shape[2])):
            return None
    scale = given.get("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    causal = bool(given.get("is_causal", False))
    if causal and q.shape[2] != k.shape[2]:  # FlashAttention aligns the mask at the last key
        return None
    return _Found(out, given["query"], given["key"], given["value"], bias, scale, causal)


def _without_copies(bias: fx.Node) -> fx.Node:
    """A bias before it is expanded and its rows are aligned, which wrote it for each query."""
    while True:
        source: Any = bias.args[0] if bias.args else None
        of, whole = value(source), value(bias)
        if bias.target is aten.expand.default and of is not None and whole is not None:
            if of.dim() != whole.dim():
                return bias
            bias = source
        elif bias.target is aten.slice.Tensor and source.target is aten.constant_pad_nd.default:
            before = source.args[0]
            of = value(before)
            is_whole = of is not None and whole is not None and of.shape == whole.shape
            start = bias.args[2] if len(bias.args) > 2 else 0
            if not is_whole or start != 0 or any(source.args[1][::2]):
                return bias
            bias = before
        else:
            return bias


def _of_four_dimensions(bias: fx.Node, before: fx.Node) -> fx.Node:
    """A bias of fewer dimensions, as broadcasting reads it."""
    of = value(bias)
    if of is None or of.dim() > 3:
        return bias
    with bias.graph.inserting_before(before):
        return add(bias.graph, aten.reshape.default, bias, [1] * (4 - of.dim()) + [*of.shape])


def _is_bias(node: Any, shape: tuple[int, ...]) -> bool:
    of = value(node)
    if of is None or of.dim() != 4:
        return False
    dtypes = (torch.bool, torch.bfloat16, torch.float16, torch.float32)
    fits = all(size in (1, whole) for size, whole in zip(of.shape, shape, strict=True))
    return fits and of.dtype in dtypes


def _of_products(read: fx.Node) -> _Found | None:
    """An attention of two batched products that ends with this one."""
    operands = _operands_of(read)
    if operands is None:
        return None
    p, v_node = operands
    score, silu = _score_of(p)
    of = value(score)
    if score is None or of is None or of.dim() not in (3, 4):
        return None
    x, bias, scale = _terms_of(score)
    operands = _operands_of(_only_source(x, _MOVES))
    if operands is None:
        return None
    left, right = operands
    q, k, v = value(left), value(right), value(v_node)
    if q is None or k is None or v is None or not _fits(q, k.mT, v):
        return None
    batch = (of.shape[0], of.shape[1] if of.dim() == 4 else 1)
    if batch[0] * batch[1] != q.shape[0] or of.shape[-2:] != (q.shape[1], k.shape[2]):
        return None
    result = read.meta["val"]
    if result.dtype is not q.dtype or result.shape != q.shape:
        return None
    if bias is not None:
        bias = _of_four_dimensions(bias, read)
        if not _is_bias(bias, (*batch, *of.shape[-2:])):
            return None
    if silu and bias is not None and bias.meta["val"].dtype is torch.bool:
        return None  # silu of minus infinity is NaN
    with read.graph.inserting_before(read):
        left, right, last = (_by_heads(node, batch) for node in (left, right, v_node))
        turned = add(read.graph, aten.permute.default, right, [0, 1, 3, 2])
    sizes = [x.meta["val"].shape[:2] for x in (left, right, last)]
    if tuple(map(max, *sizes)) != batch:  # all of them are expanded
        return None
    return _Found(read, left, turned, last, bias, scale, zeros=False, silu=silu)


def _operands_of(product: fx.Node | None) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a batched product, before Inductor padded them and cut the result."""
    bmm: Any = product
    while isinstance(bmm, fx.Node) and bmm.target is aten.slice.Tensor:
        if len(bmm.args) != 4 or bmm.args[2] != 0 or len(bmm.all_input_nodes[0].users) != 1:
            return None
        bmm = bmm.args[0]
    if not isinstance(bmm, fx.Node) or bmm.target is not aten.bmm.default:
        return None
    of = value(product)
    for left, right in ((_before_padding(x) for x in bmm.args), bmm.args):
        a, b = value(left), value(right)
        if a is not None and b is not None and of is not None and a.shape[2] == b.shape[1]:
            if of.shape == (*a.shape[:2], b.shape[2]):
                return left, right
    return None


def _before_padding(x: Any) -> Any:
    """An operand before zeros were appended."""
    if x.target is not aten.constant_pad_nd.default or any(x.args[2:]) or any(x.args[1][::2]):
        return x
    return x.args[0]


def _score_of(p: Any) -> tuple[fx.Node | None, float]:
    """What weights are the softmax of, or so many times silu of."""
    through = (*_MOVES, aten.expand.default, prims.convert_element_type.default)
    node, times = _only_source(p, through), 1.0
    if node is not None and (by := _factor(node)):
        node, times = _only_source(node.args[0], through), by
    if node is None:
        return None, 0.0
    score = _softmax_of(node)
    if score is not None:
        return (score, 0.0) if times == 1.0 else (None, 0.0)
    return _silu_of(node), times


def _factor(node: fx.Node) -> float:
    """By what number a node multiplies; 0 if it does something else."""
    by = node.args[1] if node.target in (aten.mul.Tensor, aten.div.Tensor) else 0.0
    if not isinstance(by, int | float) or not by:
        return 0.0
    return float(by) if node.target is aten.mul.Tensor else 1.0 / by


def _silu_of(node: fx.Node) -> fx.Node | None:
    """The operand of silu, as torch decomposes it."""
    x: Any = node.args[0] if node.args else None
    steps: tuple[Any, ...] = (aten.sigmoid.default,)
    if node.target is aten.div.Tensor:
        steps = (aten.add.Tensor, aten.exp.default, aten.neg.default)
        if getattr(node.args[1], "args", (0, 0))[1:] != (1,):
            return None
    elif node.target is not aten.mul.Tensor:
        return None
    last: Any = node.args[1]
    for step in steps:
        if not isinstance(last, fx.Node) or last.target is not step or len(last.users) != 1:
            return None
        at, last = last, last.args[0]
    return x if last is x and set(x.users) == {node, at} else None


def _only_source(node: Any, through: tuple[Any, ...] | frozenset[Any]) -> fx.Node | None:
    """What a node is made of by some operators, if nothing else reads what is between."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target not in through or not _keeps_digits(node):
            return node
        node = node.args[0]
    return None


def _keeps_digits(node: fx.Node) -> bool:
    """Whether it is no cast to integers or to FP8."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return node.target is not prims.convert_element_type.default or node.args[1] in dtypes


def _softmax_of(node: fx.Node) -> fx.Node | None:
    """The operand of a softmax over columns, as torch decomposes it or as Inductor does."""
    if node.target is not aten.div.Tensor:
        return None
    exp, total = node.args
    if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default:
        return None
    less: Any = exp.args[0]
    if less.target is not aten.sub.Tensor or less.kwargs:
        return None
    x, most = less.args
    if not (isinstance(x, fx.Node) and isinstance(most, fx.Node) and isinstance(total, fx.Node)):
        return None
    made: Any
    last = x.meta["val"].dim() - 1
    online = [n for n in (most, total) if n.target is operator.getitem]
    if len(online) == 2:
        made = most.args[0]
        is_softmax = "prepare_softmax_online" in str(made.target) and made.args[0] is x
        is_softmax = is_softmax and made.args[1] in (-1, last) and total.args[0] is made
        is_softmax = is_softmax and (most.args[1], total.args[1]) == (0, 1)
        readers = {made, less}
        is_softmax = is_softmax and set(made.users) == {most, total}
    else:
        is_softmax = most.target is aten.amax.default and most.args == (x, [-1], True)
        is_softmax = is_softmax and total.target is aten.sum.dim_IntList
        is_softmax = is_softmax and total.args == (exp, [-1], True) and not total.kwargs
        readers = {most, less}
    is_alone = set(x.users) == readers and set(exp.users) <= {total, node}
    is_alone = is_alone and set(most.users) == {less} and set(total.users) == {node}
    return x if is_softmax and is_alone and len(less.users) == 1 else None


def _terms_of(score: fx.Node) -> tuple[fx.Node, fx.Node | None, float]:
    """The products, the mask or bias, and the scale that scores are made of."""
    x = _only_source(score.args[0], _COPIES) if score.target in _COPIES else score
    bias = None
    if x is not None and x.target is aten.where.self:
        mask: Any = x.args[0]
        if _is_least(x.args[1]):
            bias, x = mask, _only_source(x.args[2], _COPIES)
        elif _is_least(x.args[2]):
            with score.graph.inserting_before(score):
                bias = add(score.graph, aten.logical_not.default, mask)
            x = _only_source(x.args[1], _COPIES)
    elif x is not None and x.target is aten.add.Tensor and not x.kwargs:
        places = [i for i, y in enumerate(x.args) if _leads_to_product(y)]
        other = value(x.args[1 - places[0]]) if len(places) == 1 else None
        if other is not None and other.dtype is not torch.bool:  # a mask is added as 0 or 1
            bias, x = x.args[1 - places[0]], _only_source(x.args[places[0]], _COPIES)
    scale = 1.0
    if x is not None and (by := _factor(x)):
        x, scale = _only_source(x.args[0], _COPIES), by
    return x if x is not None else score, bias if isinstance(bias, fx.Node) else None, scale


def _leads_to_product(node: Any) -> bool:
    through = (prims.convert_element_type.default, aten.mul.Tensor, aten.div.Tensor, *_MOVES)
    source = _only_source(node, through)
    return _operands_of(source) is not None


def _is_least(node: Any) -> bool:
    """Whether it is minus infinity."""
    if isinstance(node, fx.Node):
        if node.target not in (aten.scalar_tensor.default, aten.full.default):
            return False
        node = node.args[-1]
    return bool(node == -math.inf)


def _by_heads(node: fx.Node, batch: tuple[int, int]) -> fx.Node:
    """An operand ``[batch * heads, ...]`` as ``[batch, heads, ...]``, without the copy for it."""
    of: Tensor = node.meta["val"]
    shape = (*batch, *of.shape[1:])
    x = node
    while x.target in (*RESHAPES, aten.clone.default) and isinstance(x.args[0], fx.Node):
        x = x.args[0]
        if value(x) is not None and x.meta["val"].shape == shape:
            return _before_copies(x)
    return add(node.graph, aten.reshape.default, node, list(shape))


def _before_copies(x: fx.Node) -> fx.Node:
    """What a node has copied or expanded, with 1 where it is expanded."""
    while x.target in (aten.clone.default, aten.expand.default):
        source: Any = x.args[0]
        if value(source) is None:
            break
        sizes = source.meta["val"].shape
        if sizes[-2:] != x.meta["val"].shape[-2:]:
            break
        missing = x.meta["val"].dim() - len(sizes)
        if missing:
            return add(x.graph, aten.reshape.default, source, [1] * missing + [*sizes])
        x = source
    return x


def _write(found: _Found) -> None:
    out = found.out
    fused: Any = out.args[0] if out.target is operator.getitem else None
    graph, of = out.graph, out.meta["val"]
    with graph.inserting_before(out):
        q, k, v = found.q, found.k, found.v
        op = torch.ops.lokakern.short_attention.default
        given = found.bias, found.scale, found.causal, found.zeros, found.silu
        made = add(graph, op, q, k, v, *given)
        by_heads = add(graph, aten.permute.default, made, _TURNED)
        shown = by_heads
        if by_heads.meta["val"].shape != of.shape:
            shown = add(graph, aten.reshape.default, by_heads, list(of.shape))
        if of.is_contiguous() and not shown.meta["val"].is_contiguous():  # as views of it need
            shown = add(graph, aten.clone.default, shown, memory_format=torch.contiguous_format)
    replace(out, shown)
    if fused is not None:  # it may draw random numbers, so that nobody else drops it
        for unread in [*fused.users, fused]:
            graph.erase_node(unread)
    turned = list(by_heads.users)
    for user in list(shown.users):
        if user.target in RESHAPES and user.meta["val"].shape == by_heads.meta["val"].shape:
            turned += list(user.users)
    for user in turned:
        if user.target is aten.permute.default and user.args[1] == _TURNED:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
    for user in list(made.users):
        if user.target is aten.clone.default and graph.output_node() not in user.users:
            user.replace_all_uses_with(made)
