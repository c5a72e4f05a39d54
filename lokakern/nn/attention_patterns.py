"""Attention in graphs of ATen operators: what torch and its decompositions make of it.

That is torch's fused attention without dropout, and two batched products with a softmax or silu
between them,

    softmax(q @ k.mT * scale + bias or mask) @ v        silu(q @ k.mT * scale + bias) / n @ v

with their gradients where a graph has them. All that is between operands and results must be read
by nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lokakern.nn.graph_edit import RESHAPES, add, value
from lokakern.nn.silu_pattern import nodes_of_sigmoid, nodes_of_silu

aten, prims = torch.ops.aten, torch.ops.prims
Fits = Callable[[Tensor, Tensor, Tensor], bool]
_CASTS = (prims.convert_element_type.default, aten.clone.default, aten.alias.default)
_MOVES = (*RESHAPES, aten.clone.default, aten.alias.default)
_ALL = (*_MOVES, aten.expand.default, prims.convert_element_type.default)
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_FLASH = aten._scaled_dot_product_flash_attention.default
FUSED = {
    _EFFICIENT: aten._scaled_dot_product_efficient_attention_backward.default,
    _CUDNN: aten._scaled_dot_product_cudnn_attention_backward.default,
    _FLASH: aten._scaled_dot_product_flash_attention_backward.default,
}
# Keys times columns, above which cuDNN's kernel is faster: at 128 x 64, 261 us of an H200 and 349
# (2048 samples of 8 heads; FlashAttention 399, products 2983), at 64 x 64 531 and 266.
MOST_BEFORE_CUDNN = 4096


class Gradients(NamedTuple):
    """The gradients of an attention in a graph.

    Attributes:
        of_out: Of the output, with the sizes of the output.
        of_q: Of q, as a node of its sizes, or with batch and heads as one dimension.
        of_k: Of k, so.
        of_v: Of v, so.
        is_turned: Whether ``of_k`` has columns before keys.
    """

    of_out: fx.Node
    of_q: fx.Node
    of_k: fx.Node
    of_v: fx.Node
    is_turned: bool


class Attention(NamedTuple):
    """An attention of a graph; operands are ``[batch, heads, tokens, d]``.

    Attributes:
        out: ``[batch, heads, queries, d]``, or with the first two as one.
        q: Queries.
        k: Keys.
        v: Values.
        bias: What is added to scores, or bool: where none is read.
        scale: Of the scores.
        causal: Whether query t reads keys up to t only.
        zeros: Whether a query that reads no key gets zeros, instead of NaN.
        silu: 0 for a softmax; else values are weighted by so many times silu of scores.
        gradients: Where they were asked for.
    """

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | None
    scale: float
    causal: bool = False
    zeros: bool = True
    silu: float = 0.0
    gradients: Gradients | None = None


def find_attention(node: fx.Node, fits: Fits, *, trains: bool = False) -> Attention | None:
    """The attention whose output a node is.

    Args:
        node: Any node.
        fits: Whether a kernel takes q, k and v, ``[..., tokens, d]``.
        trains: Whether it has gradients, to be found with it; else it has none.
    """
    if node.target in FUSED:
        return _of_fused(node, fits, trains)
    if node.target in (aten.bmm.default, aten.slice.Tensor):
        return _of_products(node, fits, trains)
    return None


def _of_fused(node: fx.Node, fits: Fits, trains: bool) -> Attention | None:
    """An attention by a kernel of torch, if nothing but its output is read."""
    given = _arguments(node)
    out = _part(node, 0)
    if out is None or given.get("dropout_p", 0.0) != 0.0:
        return None
    q, k, v = (value(given[name]) for name in ("query", "key", "value"))
    if q is None or k is None or v is None:
        return None
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and fits(q, k, v)):
        return None
    if node.target is _CUDNN and k.shape[2] * k.shape[3] > MOST_BEFORE_CUDNN:
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
    gradients = _of_fused_gradients(node, given, out) if trains else None
    if trains and gradients is None:
        return None
    back = () if gradients is None else gradients.of_q.all_input_nodes
    if any(set(part.users).difference(back) for part in node.users if part is not out):
        return None
    operands = given["query"], given["key"], given["value"]
    return Attention(out, *operands, bias, scale, causal, gradients=gradients)


def _of_fused_gradients(
    node: fx.Node, forward: dict[str, Any], out: fx.Node
) -> Gradients | None:  # fmt: skip
    target: Any = node.target
    back = [x for name in _names_of(out) for x in name.users if x.target is FUSED[target]]
    if len(back) != 1:
        return None
    given = _arguments(back[0])
    same = all(given[name] is forward[name] for name in ("query", "key", "value"))
    same = same and _itself(given["out"]) is out and given["logsumexp"] is _part(node, 1)
    if not same or given.get("attn_bias") is not forward.get("attn_bias"):
        return None
    for name, usual in (("is_causal", False), ("scale", None), ("dropout_p", 0.0)):
        if given.get(name, usual) != forward.get(name, usual):
            return None
    dq, dk, dv, of_bias = (_part(back[0], place) for place in range(4))
    if dq is None or dk is None or dv is None or (of_bias is not None and of_bias.users):
        return None
    return Gradients(given[next(iter(given))], dq, dk, dv, is_turned=False)


def _arguments(node: fx.Node) -> dict[str, Any]:
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _part(node: fx.Node, place: int) -> fx.Node | None:
    """One output of an operator with several."""
    return next((user for user in node.users if user.args[1] == place), None)


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


def _of_products(read: fx.Node, fits: Fits, trains: bool) -> Attention | None:
    """An attention of two batched products that ends with this one."""
    walk = _Walk()
    last = walk.operands(read)
    if last is None:
        return None
    weights = walk.weights_of(last[0])
    if weights is None:
        return None
    score, silu = weights.score, weights.silu
    of = value(score)
    if of is None or of.dim() not in (3, 4):
        return None
    terms = walk.terms_of(score)
    first = walk.operands(walk.source(terms.product, _MOVES))
    if first is None:
        return None
    q, k, v = value(first[0]), value(first[1]), value(last[1])
    if q is None or k is None or v is None or not fits(q, k.mT, v):
        return None
    batch = (of.shape[0], of.shape[1] if of.dim() == 4 else 1)
    if batch[0] * batch[1] != q.shape[0] or of.shape[-2:] != (q.shape[1], k.shape[2]):
        return None
    result = read.meta["val"]
    if result.dtype is not q.dtype or result.shape != q.shape:
        return None
    bias = terms.bias
    if bias is not None:
        if terms.is_kept:
            with read.graph.inserting_before(read):
                bias = add(read.graph, aten.logical_not.default, bias)
        bias = _of_four_dimensions(bias, read)
        if not _is_bias(bias, (*batch, *of.shape[-2:])):
            return None
    if silu and bias is not None and bias.meta["val"].dtype is torch.bool:
        return None  # silu of minus infinity is NaN
    gradients = walk.gradients_of(read, last, first, weights, terms) if trains else None
    if trains and gradients is None:
        return None
    ends = {read, *(gradients[1:4] if gradients else ())}
    if not walk.is_closed(ends):
        return None
    with read.graph.inserting_before(read):
        left, right, values = (by_heads(node, batch) for node in (*first, last[1]))
        turned = add(read.graph, aten.permute.default, right, [0, 1, 3, 2])
    sizes = [x.meta["val"].shape[:2] for x in (left, right, values)]
    if tuple(map(max, *sizes)) != batch:  # all of them are expanded
        return None
    return Attention(
        read, left, turned, values, bias, terms.scale, False, False, silu, gradients
    )  # fmt: skip


class _Weights(NamedTuple):
    """What values are weighted by: a softmax of scores, or so many times silu."""

    node: fx.Node
    score: fx.Node
    silu: float


class _Terms(NamedTuple):
    """The products, the mask or bias, and the scale that scores are made of."""

    product: fx.Node
    bias: fx.Node | None
    scale: float
    is_masked: bool = False  # and not added
    is_kept: bool = False  # the mask tells what is read


class _Walk:
    """From a result to operands; it remembers all nodes between them."""

    def __init__(self) -> None:
        self.inner: set[fx.Node] = set()

    def is_closed(self, ends: Collection[fx.Node]) -> bool:
        """Whether nothing else reads what is between."""
        inner = self.inner - set(ends)
        return all(inner.issuperset(set(node.users) - set(ends)) for node in inner)

    def source(self, node: Any, through: Collection[Any]) -> fx.Node | None:
        """What a node is made of by some operators."""
        while isinstance(node, fx.Node) and node.target in through and _keeps_digits(node):
            self.inner.add(node)
            node = node.args[0]
        return node if isinstance(node, fx.Node) else None

    def scaled(self, node: fx.Node | None) -> tuple[fx.Node | None, float]:
        """What a node multiplies by a number, and the number: 1 if it does something else."""
        if node is None or node.target not in (aten.mul.Tensor, aten.div.Tensor):
            return node, 1.0
        x, by = node.args
        if not isinstance(by, int | float) or not by or not isinstance(x, fx.Node):
            return node, 1.0
        self.inner.add(node)
        return x, float(by) if node.target is aten.mul.Tensor else 1.0 / by

    def operands(self, product: fx.Node | None) -> tuple[fx.Node, fx.Node] | None:
        """The operands of a batched product, before Inductor padded them and cut the result."""
        bmm: Any = product
        while isinstance(bmm, fx.Node) and bmm.target is aten.slice.Tensor:
            if len(bmm.args) != 4 or bmm.args[2] != 0:
                return None
            self.inner.add(bmm)
            bmm = bmm.args[0]
        if not isinstance(bmm, fx.Node) or bmm.target is not aten.bmm.default:
            return None
        self.inner.add(bmm)
        of = value(product)
        pairs: Any = (tuple(map(_before_padding, bmm.args)), bmm.args)
        for left, right in pairs:
            a, b = value(left), value(right)
            if a is None or b is None or of is None or a.shape[2] != b.shape[1]:
                continue
            if of.shape == (*a.shape[:2], b.shape[2]):
                padded: Any = zip(bmm.args, (left, right), strict=True)
                self.inner.update(x for x, y in padded if x is not y)
                return left, right
        return None

    def weights_of(self, p: fx.Node) -> _Weights | None:
        node, times = self.scaled(self.source(p, _ALL))
        node = self.source(node, _ALL)
        if node is None:
            return None
        score = self.softmax_of(node)
        if score is not None:
            return _Weights(node, score, 0.0) if times == 1.0 else None
        nodes = nodes_of_silu(node)
        self.inner.update(nodes)
        return _Weights(node, nodes[0], times) if nodes else None

    def softmax_of(self, node: fx.Node) -> fx.Node | None:
        """The operand of a softmax over columns, as torch decomposes it or as Inductor does."""
        if node.target is not aten.div.Tensor:
            return None
        exp: Any
        total: Any
        exp, total = node.args
        if not isinstance(exp, fx.Node) or exp.target is not aten.exp.default:
            return None
        less: Any = exp.args[0]
        if less.target is not aten.sub.Tensor or less.kwargs:
            return None
        x: Any
        most: Any
        x, most = less.args
        if not all(isinstance(y, fx.Node) for y in (x, most, total)):
            return None
        last = x.meta["val"].dim() - 1
        if most.target is total.target is operator.getitem:
            made = most.args[0]
            is_softmax = "prepare_softmax_online" in str(made.target) and made.args[0] is x
            is_softmax = is_softmax and made.args[1] in (-1, last) and total.args[0] is made
            is_softmax = is_softmax and (most.args[1], total.args[1]) == (0, 1)
            self.inner.add(made)
        else:
            is_softmax = most.target is aten.amax.default and most.args == (x, [-1], True)
            is_softmax = is_softmax and total.target is aten.sum.dim_IntList
            is_softmax = is_softmax and total.args == (exp, [-1], True) and not total.kwargs
        self.inner.update((node, exp, total, less, most, x))
        return x if is_softmax else None

    def terms_of(self, score: fx.Node) -> _Terms:
        x = self.source(score, _CASTS)
        bias, is_masked, is_kept = None, False, False
        if x is not None and x.target is aten.where.self:
            mask, one, other = x.args
            is_masked, is_kept = True, _is_number(other, -math.inf)
            if is_kept or _is_number(one, -math.inf):
                self.inner.add(x)
                bias, x = mask, self.source(one if is_kept else other, _CASTS)
        elif x is not None and x.target is aten.add.Tensor and not x.kwargs:
            places = [i for i, y in enumerate(x.args) if _leads_to_product(y)]
            added = value(x.args[1 - places[0]]) if len(places) == 1 else None
            if added is not None and added.dtype is not torch.bool:  # a mask is added as 0 or 1
                self.inner.add(x)
                bias, x = x.args[1 - places[0]], self.source(x.args[places[0]], _CASTS)
        x, scale = self.scaled(x)
        x = self.source(x, _CASTS)
        bias = bias if isinstance(bias, fx.Node) else None
        return _Terms(score if x is None else x, bias, scale, is_masked, is_kept)

    def gradients_of(
        self, read: fx.Node, last: tuple[fx.Node, fx.Node], first: tuple[fx.Node, fx.Node],
        weights: _Weights, terms: _Terms,
    ) -> Gradients | None:  # fmt: skip
        """Gradients of both products: of bmm(a, b) they are bmm(dy, b.mT) and bmm(a.mT, dy)."""
        for of_v, of_p in _gradients_of_product(*last):
            for of_kt, of_q in _gradients_of_product(*first):
                dy, ds = of_v.args[1], of_kt.args[1]
                assert isinstance(dy, fx.Node) and isinstance(ds, fx.Node)
                walk = _Walk()
                walk.inner = set(self.inner)
                if walk.is_gradient_of_score(ds, of_p, weights, terms):
                    walk.inner |= {of_p, of_v.all_input_nodes[0], last[0]}
                    self.inner = walk.inner
                    return Gradients(dy, of_q, of_kt, of_v, is_turned=True)
        return None

    def is_gradient_of_score(
        self, ds: fx.Node, dp: fx.Node, weights: _Weights, terms: _Terms
    ) -> bool:
        """Whether ds is that of the products if dp is that of the weights."""
        x, scale = self.source(ds, _ALL), 1.0
        if terms.scale != 1.0:
            x, scale = self.scaled(x)
            x = self.source(x, _ALL)
        if x is None or scale != terms.scale:
            return False
        if terms.is_masked:
            if x.target is not aten.where.self or _itself(x.args[0]) is not _itself(terms.bias):
                return False
            zero, kept = x.args[2 if terms.is_kept else 1], x.args[1 if terms.is_kept else 2]
            if not _is_number(zero, 0.0):
                return False
            self.inner.add(x)
            x = self.source(kept, _ALL)
        if x is None:
            return False
        if weights.silu:
            return self.is_gradient_of_silu(x, dp, weights)
        return self.is_gradient_of_softmax(x, dp, weights.node)

    def is_gradient_of_softmax(self, x: fx.Node, dp: fx.Node, p: fx.Node) -> bool:
        """``p * dp - p * sum(p * dp)``, the product of the last two by fma."""
        given: Any = x.args
        if x.target is prims.fma.default:
            minus, total, both = given
            if not _is_call(minus, aten.neg.default, None):
                return False
            self.inner.add(minus)
            again = minus.args[0]
        elif x.target is aten.sub.Tensor and not x.kwargs:
            both, times = given
            if not _is_call(times, aten.mul.Tensor, None, None):
                return False
            self.inner.add(times)
            again, total = times.args
        else:
            return False
        if not _is_call(total, aten.sum.dim_IntList, both, [-1], True) or total.kwargs:
            return False
        if not _is_call(both, aten.mul.Tensor, None, None):
            return False
        self.inner.update((x, total, both))
        one, other = both.args
        sources = self.source(one, _ALL), self.source(other, _ALL)
        return sources in ((dp, p), (p, dp)) and self.source(again, _ALL) is p

    def is_gradient_of_silu(self, x: fx.Node, dp: fx.Node, weights: _Weights) -> bool:
        """``dp * sigmoid(s) * (s * (1 - sigmoid(s)) + 1)``."""
        if not _is_call(x, aten.mul.Tensor, None, None):
            return False
        left: Any
        right: Any
        left, right = x.args
        if not _is_call(left, aten.mul.Tensor, None, None):
            return False
        if not _is_call(right, aten.add.Tensor, None, 1) or right.kwargs:
            return False
        given, sigmoid = left.args
        rest = right.args[0]
        if not _is_call(rest, aten.mul.Tensor, None, None):
            return False
        s, one_less = rest.args
        if not _is_call(one_less, aten.sub.Tensor, 1, sigmoid) or one_less.kwargs:
            return False
        nodes = nodes_of_sigmoid(sigmoid, s)
        self.inner.update((x, left, right, rest, one_less, *nodes))
        if not nodes or self.source(s, _ALL) is not self.source(weights.score, _ALL):
            return False
        given, times = self.scaled(self.source(given, _ALL))
        return times == weights.silu and self.source(given, _ALL) is dp


def _gradients_of_product(a: fx.Node, b: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What may be the gradients of ``bmm(a, b)``: of b, and of a."""
    bmm = aten.bmm.default
    for turned in _turned(a):
        for of_b in turned.users:
            if of_b.target is bmm and of_b.args[0] is turned:
                for other in _turned(b):
                    for of_a in other.users:
                        if of_a.target is bmm and of_a.args == (of_b.args[1], other):
                            yield of_b, of_a


def _turned(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.users if _is_call(x, aten.permute.default, node, [0, 2, 1])]


def _is_call(node: Any, target: Any, *given: Any) -> bool:
    """Whether a node calls an operator with such arguments, of which None may be any."""
    if not isinstance(node, fx.Node) or node.target is not target or len(node.args) != len(given):
        return False
    return all(
        y is None or x is y or (not isinstance(y, fx.Node) and x == y)
        for x, y in zip(node.args, given, strict=True)
    )


def _itself(node: Any) -> Any:
    """What a node is another name of."""
    while isinstance(node, fx.Node) and node.target in (aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def _names_of(node: fx.Node) -> list[fx.Node]:
    """A node and those that `_itself` leads back to it."""
    found = [node]
    for name in found:
        found += [x for x in name.users if _itself(x) is node]
    return found


def _before_padding(x: Any) -> Any:
    """An operand before zeros were appended."""
    if x.target is not aten.constant_pad_nd.default or any(x.args[2:]) or any(x.args[1][::2]):
        return x
    return x.args[0]


def _keeps_digits(node: fx.Node) -> bool:
    """Whether it is no cast to integers or to FP8."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return node.target is not prims.convert_element_type.default or node.args[1] in dtypes


def _leads_to_product(node: Any) -> bool:
    walk = _Walk()
    source = walk.source(walk.scaled(walk.source(node, _ALL))[0], _ALL)
    return walk.operands(source) is not None


def _is_number(node: Any, number: float) -> bool:
    """Whether it is a number, or a tensor of it."""
    if isinstance(node, fx.Node):
        if node.target not in (aten.scalar_tensor.default, aten.full.default):
            return False
        node = node.args[-1] if node.target is aten.full.default else node.args[0]
    return bool(node == number)


def by_heads(node: fx.Node, batch: tuple[int, int]) -> fx.Node:
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
