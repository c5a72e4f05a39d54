"""Products with concatenated tokens, without the concatenation.

A recommendation model puts the embedding of its dense features beside those of its tables,
``x = cat([dense, embeddings], 1)``, and multiplies across tokens: ``W x`` and ``x y``. A library's
product needs x in memory, whose copy moves all embeddings twice: 3.8 of the 22 GB that an inference
of Wukong S moves at 8192 samples, and 878 of its 7510 us on an H200. Here

    W x = W[:, 1:] embeddings + W[:, :1] dense        x y = cat([dense y, embeddings y], 1)

where every reader of x is such a product, and all parts but one are of few tokens. Terms of these
are added in float32 to the rounded product of the large part, and products of rows are written
where they belong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lokakern.nn.autocast import HALF
from lokakern.nn.graph_edit import add, bytes_of, readers, replace, same, value
from lokakern.nn.token_mixing import ALIGNMENT

aten = torch.ops.aten
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
FEW_TOKENS = 4  # of all parts but the large one
# What the copy moves has to exceed what the parts cost by so much: 20 us of an H200, four launches.
LEAST_SAVED_BYTES = 80_000_000


@dataclass(frozen=True)
class _Part:
    node: fx.Node
    begin: int  # token
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin


def multiply_parts(graph: fx.Graph) -> None:
    """Multiply parts of concatenations in a graph of ATen operators, where that moves less."""
    for cat in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        parts = _parts_of(cat)
        users = readers(cat) if parts else []
        found = [_product(user, cat) for user in users]
        products = [x for x in found if x is not None]
        if not products or len(products) < len(found):
            continue
        if _saved_bytes(cat, products) < LEAST_SAVED_BYTES:
            continue
        for node, write in products:
            with graph.inserting_before(node):
                write(node, parts)
    graph.eliminate_dead_code()


def _parts_of(cat: fx.Node) -> list[_Part]:
    """The parts of ``[batch, tokens, d]`` along tokens; none if more than one is large."""
    whole = value(cat)
    given: Any = cat.args[0]
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if whole is None or whole.dim() != 3 or dim not in (1, -2) or len(given) < 2:
        return []
    parts, begin = [], 0
    for node in given:
        of = value(node)
        if of is None or of.dim() != 3 or of.dtype is not whole.dtype or of.stride(-1) != 1:
            return []
        parts.append(_Part(node, begin, begin + of.shape[1]))
        begin += of.shape[1]
    large = max(part.count for part in parts)
    return parts if 0 < begin - large <= FEW_TOKENS and whole.dtype in HALF else []


_Write = Callable[[fx.Node, list[_Part]], None]


def _product(user: fx.Node, cat: fx.Node) -> tuple[fx.Node, _Write] | None:
    """The product that a reader is, and what writes it by parts."""
    if user.target is not aten.bmm.default:
        return None
    left, right = user.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    is_left, is_right = same(left) is cat, same(right) is cat
    if is_left == is_right or value(user) is None or value(left if is_right else right) is None:
        return None
    if is_left:
        return user, _write_rows
    # Partial sums in float16 could overflow where the whole does not.
    is_safe = cat.meta["val"].dtype is not torch.float16
    return (user, _write_sums) if is_safe and _shared(left) is not None else None


def _saved_bytes(cat: fx.Node, products: list[tuple[fx.Node, _Write]]) -> int:
    whole = value(cat)
    assert whole is not None
    added = 0
    for node, _ in products:
        of = value(node)
        assert of is not None
        added += 2 * bytes_of(of)  # read and written once more, at most
    return 2 * bytes_of(whole) - added


def _write_rows(node: fx.Node, parts: list[_Part]) -> None:
    """``cat(parts) @ y``, each part's rows in their place."""
    op = torch.ops.lokakern.rows_of_parts.default
    replace(node, add(node.graph, op, [part.node for part in parts], node.args[1]))


def _write_sums(node: fx.Node, parts: list[_Part]) -> None:
    """``w @ cat(parts)`` as a sum over parts, each reader of a slice with a sum of its own."""
    graph, w = node.graph, node.args[0]
    assert isinstance(w, fx.Node)
    large = max(parts, key=lambda part: part.count)
    product = add(graph, aten.bmm.default, _columns(w, large), large.node)
    terms = [
        (add(graph, aten.slice.Tensor, w, 2, part.begin + token, part.begin + token + 1),
         add(graph, aten.slice.Tensor, part.node, 1, token, token + 1))
        for part in parts if part is not large for token in range(part.count)
    ]  # fmt: skip

    def summed(y: fx.Node, begin: int, end: int) -> fx.Node:
        for column, token in terms:
            some = add(graph, aten.slice.Tensor, column, 1, begin, end)
            y = add(graph, PLUS_OUTER, y, some, token)
        return y

    splits = [user for user in node.users if user.target is aten.split_with_sizes.default]
    items = [item for split in splits for item in split.users]
    reads_memory = any(x.target is aten.as_strided.default for item in items for x in item.users)
    by_tokens = all(split.args[2:] in ((1,), (-2,)) for split in splits)
    if len(splits) != len(node.users) or not by_tokens or reads_memory:
        of = value(node)
        assert of is not None
        replace(node, summed(product, 0, of.shape[1]))
        return
    for split in splits:
        sizes: Any = split.args[1]
        for item in list(split.users):
            assert item.target is operator.getitem
            place: Any = item.args[1]
            begin = sum(sizes[:place])
            end = begin + sizes[place]
            with graph.inserting_before(item):
                some = add(graph, aten.slice.Tensor, product, 1, begin, end)
                replace(item, summed(some, begin, end))


def write_terms(graph: fx.Graph) -> None:
    """Let Inductor add what no other pass took, in the kernels that it generates."""
    for node in list(graph.find_nodes(op="call_function", target=PLUS_OUTER)):
        with graph.inserting_before(node):
            y, column, token = (_wide(x) for x in node.args)
            total = add(graph, aten.add.Tensor, y, add(graph, aten.mul.Tensor, column, token))
            replace(node, _as(total, node))


def _plus_outer(y: Tensor, column: Tensor, token: Tensor) -> Tensor:
    return (y.float() + column.float() * token.float()).to(y.dtype)


def _rows_of_parts(parts: Sequence[Tensor], y: Tensor) -> Tensor:
    out = _rows_of_parts_fake(parts, y)
    begin = 0
    for part in parts:
        end = begin + part.shape[1]
        torch.bmm(part, y, out=out[:, begin:end])
        begin = end
    return out


def _rows_of_parts_fake(parts: Sequence[Tensor], y: Tensor) -> Tensor:
    rows = sum(part.shape[1] for part in parts)
    return parts[0].new_empty((parts[0].shape[0], rows, y.shape[2]))


_LIBRARY.define("plus_outer(Tensor y, Tensor column, Tensor token) -> Tensor")
_LIBRARY.impl("plus_outer", _plus_outer, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::plus_outer", _plus_outer, lib=_LIBRARY)
_LIBRARY.define(
    "rows_of_parts(Tensor[] parts, Tensor y) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
_LIBRARY.impl("rows_of_parts", _rows_of_parts, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::rows_of_parts", _rows_of_parts_fake, lib=_LIBRARY)
# ``y + column * token`` of [batch, n, d], [batch, n, 1] and [batch, 1, d], for other passes.
PLUS_OUTER = torch.ops.lokakern.plus_outer.default


def _columns(w: fx.Node, part: _Part) -> fx.Node:
    """``w[:, :, begin:end]`` of one weight for all samples, column-major.

    Its rows would not start and end at multiples of 16 bytes, as the other parts have few tokens.
    At 8192 samples of 719 x 160 and 120 rows of w an H200 takes 664 us so, and 2914 by rows, at
    whatever pitch.
    """
    graph, of, source = w.graph, value(w), _shared(w)
    assert of is not None and source is not None
    step = ALIGNMENT // of.element_size()
    rows, last = of.shape[1], source.meta["val"].dim() - 1
    dims = [*range(last - 1), last, last - 1]
    pitch = -(-rows // step) * step
    some = add(graph, aten.slice.Tensor, source, last, part.begin, part.end)
    turned = add(graph, aten.permute.default, some, dims)
    if pitch == rows:
        padded = add(graph, aten.clone.default, turned, memory_format=torch.contiguous_format)
    else:
        padded = add(graph, aten.constant_pad_nd.default, turned, [0, pitch - rows], 0.0)
    shown = add(graph, aten.as_strided.default, padded, [1, rows, part.count], [0, 1, pitch])
    return add(graph, aten.expand.default, shown, [of.shape[0], rows, part.count])


def _shared(w: fx.Node) -> fx.Node | None:
    """The one matrix that w has for all samples, ``[rows, columns]`` or ``[1, rows, columns]``."""
    source = w.args[0] if w.target is aten.expand.default else None
    weight, of = value(source), value(w)
    if weight is None or of is None or weight.dim() < 2:
        return None
    is_one = weight.shape[-2:] == of.shape[-2:] and weight.shape[:-2].numel() == 1
    return source if is_one and isinstance(source, fx.Node) else None


def _wide(x: Any) -> fx.Node:
    of: Tensor = x.meta["val"]
    dtype = torch.promote_types(of.dtype, torch.float32)
    if dtype is of.dtype:
        return x  # type: ignore[no-any-return]
    return add(x.graph, torch.ops.prims.convert_element_type.default, x, dtype)


def _as(x: fx.Node, like: fx.Node) -> fx.Node:
    of: Tensor = like.meta["val"]
    if x.meta["val"].dtype is of.dtype:
        return x
    return add(x.graph, torch.ops.prims.convert_element_type.default, x, of.dtype)
