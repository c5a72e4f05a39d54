"""DCN's cross in a traced forward: ``x0 * layer(x) + x``, or ``x0 * up(down(x)) + x``."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx, nn

PRODUCTS = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
SUMS = (operator.add, torch.add, "add")
_READS = (getattr, operator.getitem)  # of attributes and items, which change nothing


class FoundCross(NamedTuple):
    """A cross in a graph.

    Attributes:
        layers: Calls of its one or two linear layers; only the next one reads the first.
        x0: The factor.
        x: The other summand.
        product: The product with x0, which only the sum reads.
        sum: The result.
        why: Why it cannot be replaced by one call at the place of the sum, or "".
    """

    layers: tuple[fx.Node, ...]
    x0: fx.Node
    x: fx.Node
    product: fx.Node
    sum: fx.Node
    why: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers in the traced module."""
        return tuple(str(node.target) for node in self.layers)


def crosses_in(graph: fx.Graph, parent: nn.Module) -> list[FoundCross]:
    """The crosses of a traced forward, in order.

    Where other calls come between the two layers of a cross, it has its last layer alone.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    found = []
    for node in nodes:
        tried = [
            cross._replace(why=_why_not(cross, nodes[places[cross.layers[0]] : places[node]]))
            for cross in _matches(node, parent)
        ]
        if tried:
            found.append(next((cross for cross in tried if not cross.why), tried[0]))
    return found


def _why_not(cross: FoundCross, before: list[fx.Node]) -> str:
    # What comes between might write to what the layers, the product or the sum read.
    others = (
        node for node in before
        if node not in (*cross.layers, cross.product) and node.op not in ("get_attr", "placeholder")
        and not (node.op == "call_function" and node.target in _READS)
    )  # fmt: skip
    other = next(others, None)
    if other is None:
        return ""
    return f"{other.name} is computed between the layer and the sum: compute it before the layer"


def _matches(node: fx.Node, parent: nn.Module) -> Iterator[FoundCross]:
    """The ways to read a sum as a cross; with two layers first."""
    for product, x in pairs(node, SUMS):
        if len(product.users) > 1 or x is product:
            continue
        for last, x0 in pairs(product, PRODUCTS):
            if x0 is last or not _is_layer(last, parent):
                continue
            first = last.args[0]
            if isinstance(first, fx.Node) and _is_layer(first, parent):
                yield FoundCross((first, last), x0, x, product, node)
            yield FoundCross((last,), x0, x, product, node)


def pairs(node: fx.Node, targets: tuple[object, ...]) -> list[tuple[fx.Node, fx.Node]]:
    """The two operands of a function or a method in both orders."""
    is_call = node.op in ("call_function", "call_method") and node.target in targets
    if not is_call or node.kwargs or len(node.args) != 2:
        return []
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return []
    return [(second, first), (first, second)]


def _is_layer(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node calls a linear layer with one tensor, and has one reader."""
    if node.op != "call_module" or len(node.users) != 1 or node.kwargs:
        return False
    is_one = len(node.args) == 1 and isinstance(node.args[0], fx.Node)
    return is_one and isinstance(parent.get_submodule(str(node.target)), nn.Linear)
