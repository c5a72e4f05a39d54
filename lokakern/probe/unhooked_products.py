"""Products outside of sites, read from autograd's graph of a forward pass.

A module that multiplies by a parameter of its own, or two activations with each other, is no site.
Nothing is run for this, and nothing is changed: nodes of the graph name their products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

BETWEEN = "(activations)"  # in the place of a name: no parameter is multiplied
# Arguments of products that are the factors.
_PRODUCTS = {
    "MmBackward0": (0, 1), "AddmmBackward0": (1, 2), "BmmBackward0": (0, 1),
    "BaddbmmBackward0": (1, 2), "MvBackward0": (0, 1), "ConvolutionBackward0": (0, 1),
    "_MixedBackward": (1, 0),  # of `mods.MixTokens`
}  # fmt: skip
_ATTENTION = "ScaledDotProduct"  # beginning of the names of its nodes
# Nodes that only lay a tensor out anew, cast it or put several together.
_LAYOUTS = frozenset(
    f"{word}Backward0"
    for word in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Alias"),
        *("AsStrided", "Expand", "Select", "Slice", "Squeeze", "Unsqueeze", "Split"),
        *("SplitWithSizes", "Unbind", "Clone", "ToCopy", "Cat", "Stack", "ConstantPadNd"),
    )
)


def products_elsewhere(
    output: Any, names: Mapping[int, str], sites: Collection[int],
    filtered: Mapping[int, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Products of a forward pass outside of sites, in words, by name or `BETWEEN`.

    Empty where autograd kept nothing. The output of the model may have any structure.

    Args:
        output: Of the model.
        names: Names of parameters, by their ids.
        sites: Ids of the parameters of sites.
        filtered: Names of the linear layers that a filter left out, by ids of their parameters;
            their products are named by layer.
    """
    left = filtered or {}
    found: dict[str, list[int]] = {}
    known = 0  # multiply-adds of sites, and of what needs no gradient, which has no name
    strangers = False  # parameters that are no module's by now, as those that FSDP2 gathered
    for node in _nodes(x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)):
        kind = node.name()
        if any(x.is_nested_tensor for x in node._input_metadata):
            continue  # it has no shape; a plain one has no nested factors
        leaves: list[Tensor] = []
        constant = False
        if kind.startswith(_ATTENTION):
            work = _attention_work(node)
        elif kind in _PRODUCTS:
            factors = [node.next_functions[place] for place in _PRODUCTS[kind]]
            constant = any(factor is None for factor, _ in factors)
            leaves = [x for factor, _ in factors for x in _parameters(factor) or ()]
            work = _work(node, *factors)
        else:
            continue
        if any(id(x) in sites for x in leaves) or (constant and not leaves):
            known += work
        elif leaves and id(leaves[0]) not in names:
            strangers = True
        else:
            key = id(leaves[0]) if leaves else 0
            name = (left.get(key) or names[key]) if leaves else BETWEEN
            found.setdefault(name, []).append(work)
    total = 0 if strangers else known + sum(map(sum, found.values()))
    layers = set(left.values())
    return {name: _words(name, work, total, name in layers) for name, work in found.items()}


def _words(name: str, work: list[int], total: int, is_left: bool) -> str:
    count = "1 product" if len(work) == 1 else f"{len(work)} products"
    what = "of activations with each other" if name == BETWEEN else "with this parameter"
    share = f"{sum(work) / total:.1%} of all multiply-adds of a forward pass, " if total else ""
    if is_left:
        return f"{count} of this layer, {share}left out by filter="
    return f"{count} {what}, {share}of no nn.Linear"


def _nodes(roots: Iterable[Any]) -> Iterable[Any]:
    seen: set[Any] = {None}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions]


def _parameters(node: Any) -> list[Tensor] | None:
    """Parameters that a factor is laid out of; None where it was computed."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return [variable]
    if node is None or node.name() not in _LAYOUTS:
        return None
    found = [_parameters(child) for child, _ in node.next_functions]
    return None if None in found else [x for leaves in found for x in leaves or ()]


def _shape(node: Any, output: int = 0) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)


def _work(node: Any, left: tuple[Any, int], right: tuple[Any, int]) -> int:
    """Multiply-adds of a product: what it sums over is read from either factor."""
    size = math.prod(_shape(node))
    if node.name() == "ConvolutionBackward0":
        return size * math.prod(_shape(*right)[1:]) if right[0] is not None else 0
    if right[0] is not None:
        shape = _shape(*right)
        return size * shape[-2 if len(shape) > 1 else -1]
    return size * _shape(*left)[-1] if left[0] is not None else 0


def _attention_work(node: Any) -> int:
    key = node.next_functions[1]
    return 0 if key[0] is None else 2 * math.prod(_shape(node)) * _shape(*key)[-2]
