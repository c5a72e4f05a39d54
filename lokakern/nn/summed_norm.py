"""RMS norms of concatenated tokens in one kernel, where Inductor's is slow.

Inductor computes a norm over more than 64 concatenated columns in a loop, by a power of two at a
time, and reads all of it twice: at 160 columns 252 us on an H200 where
`lokakern.kernels.triton.summed_norm` takes 175, and the bytes 157. It takes the place of
``norm(cat(parts, 1) + addend)`` where products compute, or read, all that is concatenated and
added. What other kernels of Inductor compute is left to it, which makes one kernel of both; and
sums of whole tensors, of which it is as fast.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lokakern.nn.concatenated_tokens import PLUS_OUTER
from lokakern.nn.graph_edit import (
    RESHAPES,
    VIEWS,
    add,
    bytes_of,
    readers,
    replace,
    value,
)
from lokakern.nn.token_mixing import has_triton

aten, prims = torch.ops.aten, torch.ops.prims
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
MOST_PARTS = 3
LOOPED_FROM = 64  # columns above which Inductor loops
# Of an output, above which the kernel gains more than its launch costs: 20 us of an H200.
LEAST_BYTES = 32_000_000


def _summed_norm(
    parts: Sequence[Tensor], addend: Tensor | None, column: Tensor | None, token: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    if parts[0].is_cuda:
        from lokakern.kernels.triton.summed_norm import summed_norm

        return summed_norm(parts, addend, column, token, eps)
    x = torch.cat([part.float() for part in parts], 1)
    if addend is not None:
        x = x + addend.float()
    if column is not None and token is not None:
        x = x + column[:, None] * token.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(parts[0].dtype)


def _summed_norm_fake(
    parts: Sequence[Tensor], addend: Tensor | None, column: Tensor | None, token: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    batch, _, d = parts[0].shape
    return parts[0].new_empty((batch, sum(part.shape[1] for part in parts), d))


_LIBRARY.define(
    "summed_norm(Tensor[] parts, Tensor? addend, Tensor? column, Tensor? token, float eps) "
    "-> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.impl("summed_norm", _summed_norm, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::summed_norm", _summed_norm_fake, lib=_LIBRARY)


def is_slow_at(d: int) -> bool:
    """Whether Inductor loops over d columns with a fifth of its lanes idle.

    Then d is the sum of two powers of two, as the kernel needs. Measured at 160 columns only.
    """
    wide = 1 << d.bit_length() - 1
    narrow = d - wide
    return d > LOOPED_FROM and narrow >= 16 and narrow & narrow - 1 == 0 and 5 * d <= 8 * wide


def norm_sums(graph: fx.Graph) -> None:
    """Compute norms of sums in a graph of ATen operators by one kernel each."""
    for mean in list(graph.find_nodes(op="call_function", target=aten.mean.dim)):
        norm = _norm_of(mean)
        if norm is None:
            continue
        with graph.inserting_before(norm.out):
            op = torch.ops.lokakern.summed_norm.default
            column = _column(graph, norm)
            made = add(graph, op, norm.parts, norm.addend, column, norm.token, norm.eps)
            of: Tensor = norm.out.meta["val"]
            replace(norm.out, add(graph, aten.reshape.default, made, list(of.shape)))
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Norm:
    out: fx.Node
    parts: list[fx.Node]
    addend: fx.Node | None
    # Columns of outer products that are added, by the number of a part; -1: of all tokens.
    columns: list[tuple[int, fx.Node]]
    token: fx.Node | None  # the other factor of all of them
    eps: float


def _column(graph: fx.Graph, norm: _Norm) -> fx.Node | None:
    """The sum of the columns of outer products, for all tokens of the output, in float32."""
    if norm.token is None:
        return None
    counts = [part.meta["val"].shape[1] for part in norm.parts]
    total = None
    for place, column in norm.columns:
        one = add(graph, aten.select.int, column, 0, 0)
        one = add(graph, prims.convert_element_type.default, one, torch.float32)
        if place >= 0:
            before, after = sum(counts[:place]), sum(counts[place + 1 :])
            one = add(graph, aten.constant_pad_nd.default, one, [0, 0, before, after], 0.0)
        total = one if total is None else add(graph, aten.add.Tensor, total, one)
    assert total is not None
    return add(graph, aten.reshape.default, total, [sum(counts)])


def _norm_of(mean: fx.Node) -> _Norm | None:
    """The norm around a mean of squares: see `lokakern.nn.block_rms_norm`."""
    square: Any = mean.args[0]
    of = value(square)
    if of is None or mean.args[1:] not in (([-1], True), ([of.dim() - 1], True)):
        return None
    if square.target is not aten.pow.Tensor_Scalar or square.args[1] != 2:
        return None
    wide = square.args[0]
    shifted = _only_user(mean, aten.add.Tensor)
    scale = None if shifted is None else _only_user(shifted, aten.rsqrt.default)
    scaled = None if scale is None else _only_user(scale, aten.mul.Tensor)
    out = None if scaled is None else _only_user(scaled, prims.convert_element_type.default)
    if shifted is None or scaled is None or out is None or set(scaled.args) != {wide, scale}:
        return None
    if set(wide.users) != {square, scaled} or set(square.users) != {mean}:
        return None
    eps, x = shifted.args[1], wide.args[0]
    if wide.target is not prims.convert_element_type.default or not isinstance(eps, float):
        return None
    if shifted.kwargs or scaled.kwargs:
        return None
    terms = _terms_of(x, of.shape[-1], wide)
    dtype = x.meta["val"].dtype
    if terms is None or out.meta["val"].dtype is not dtype or of.dtype is not torch.float32:
        return None
    return _Norm(out, *terms, eps)


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    """The only user of a node, if it is a call of ``target``."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target is target else None


_Terms = tuple[list[fx.Node], fx.Node | None, list[tuple[int, fx.Node]], fx.Node | None]


def _terms_of(x: fx.Node, d: int, reader: fx.Node) -> _Terms | None:
    """What is concatenated and added to x, ``[batch, tokens, d]`` but for a view, all in memory.

    None where that is anything else, or too little, or of a device without the kernel.
    """
    while x.target in RESHAPES and len(x.users) == 1 and isinstance(x.args[0], fx.Node):
        x, reader = x.args[0], x
    of = value(x)
    if of is None or of.dim() != 3 or of.shape[-1] != d or set(x.users) != {reader}:
        return None
    if not is_slow_at(d) or bytes_of(of) < LEAST_BYTES or not has_triton(of.device, of.dtype):
        return None
    addend: Any = None
    if x.target is aten.add.Tensor and len(x.args) == 2 and not x.kwargs:
        terms: Any = x.args
        cat = next((t for t in terms if isinstance(t, fx.Node) and _is_cat(t)), None)
        if cat is None or set(cat.users) != {x}:
            return None
        addend = terms[1] if terms[0] is cat else terms[0]
        x = cat
    given: Any = x.args[0] if _is_cat(x) else None
    if given is None or len(given) > MOST_PARTS:
        return None
    columns: list[tuple[int, fx.Node]] = []
    tokens: set[tuple[Any, ...]] = set()
    token = None

    def without_outer(node: Any, place: int) -> Any:
        nonlocal token
        while node.target is PLUS_OUTER:
            node, column, token = node.args
            columns.append((place, column))
            tokens.add((token.target, token.args))
        return node

    parts = [without_outer(node, place) for place, node in enumerate(given)]
    addend = None if addend is None else without_outer(addend, -1)
    if len(tokens) > 1 or any(column.meta["val"].stride(0) for _, column in columns):
        return None
    if not all(_is_made(node, of) for node in (*parts, *([] if addend is None else [addend]))):
        return None
    if addend is not None and addend.meta["val"].shape != of.shape:
        return None
    return parts, addend, columns, token


def _is_cat(x: fx.Node) -> bool:
    return x.target is aten.cat.default and x.args[1:] in ((1,), (-2,))


def _is_made(node: Any, like: Tensor) -> bool:
    """Whether rows of a node are in memory: inputs, or what a library computes or reads."""
    of = value(node)
    if of is None or of.dim() != 3 or of.stride(-1) != 1 or of.dtype is not like.dtype:
        return False
    if any(_is_of_library(user) for user in readers(node)):
        return True
    parts = (*VIEWS, aten.split_with_sizes.default, aten.slice.Tensor, operator.getitem)
    while node.target in parts:
        node = node.args[0]
    return node.op == "placeholder" or _is_of_library(node)


def _is_of_library(node: fx.Node) -> bool:
    products = (aten.bmm.default, aten.mm.default, aten.addmm.default, aten.baddbmm.default)
    return node.target in products or str(node.target).startswith("lokakern.")
