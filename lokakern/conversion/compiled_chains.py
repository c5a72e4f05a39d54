"""Chains, and relus in products, in the graphs of Dynamo: planned as in the forward of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, fx

from lokakern.conversion.chain_rivals import ChainJudge
from lokakern.conversion.chains import PlannedChain
from lokakern.conversion.cross_sites import CrossSpan, planned_crosses
from lokakern.conversion.routes import Route
from lokakern.conversion.tail_chains import TailSpan, planned_tail_chains
from lokakern.nn.graph_chains import FoundChain, Layers, cross_chain, tail_chain
from lokakern.nn.graph_products import Product, value
from lokakern.nn.rectified import ALWAYS
from lokakern.nn.routed_matmul import kernel_at
from lokakern.nn.tail import planned_tails, tails_in

GraphSpan = CrossSpan | TailSpan


def planned_in(
    layers: Layers, routes: Mapping[Product, Route], judge_of: Callable[[Product], ChainJudge]
) -> tuple[list[GraphSpan], dict[str, str]]:
    """The spans of a graph with their chains, and reasons against crosses.

    A product has its name; the second one of a weight, such as that of a layer that is called
    again, has "#2" behind it.

    Args:
        layers: The layers of the graph.
        routes: Routes of their outputs.
        judge_of: The judge of chains on the device, and in the dtype, of a product.
    """
    names: dict[int, str] = {}
    named: dict[str, Route] = {}
    weights: dict[int, Product] = {}
    for layer, product in layers.products.values():
        same = sum(other.name == product.name for other in weights.values())
        names[id(layer)] = f"{product.name}#{same + 1}" if same else product.name
        named[names[id(layer)]] = routes[product]
        weights[id(layer.weight)] = product

    def judge_at(weight: Tensor) -> ChainJudge:
        return judge_of(weights[id(weight)])

    crosses, left = planned_crosses(
        [layers.module], names, named, judge_at, graph_of=lambda _: layers.graph
    )
    crossed = {site for x in crosses for chain in x.plan.chains for site in x.sites_of(chain)}
    others = {key: site for key, site in names.items() if site not in crossed}
    tails = planned_tail_chains(
        [(layers.module, tails_in(layers.graph, layers.module))], others, named, judge_at,
        lambda modules, _: ("",) * len(modules),
    )  # fmt: skip
    return [*crosses, *tails], left


def calls_of(layers: Layers, span: GraphSpan, chain: PlannedChain) -> FoundChain:
    """The calls of a chain in the graph."""
    if isinstance(span, CrossSpan):
        return cross_chain(layers, span.names[chain.start : chain.stop])
    names = (name for some in span.names[chain.start : chain.stop] for name in some)
    return tail_chain(layers, tuple(names))


def rectified_in(
    layers: Layers, routes: Mapping[Product, Sequence[Route]]
) -> dict[Product, fx.Node]:
    """The products of a graph that apply the relu behind them, and its call.

    Args:
        layers: The layers of the graph.
        routes: Those of each product.
    """
    for layer, product in layers.products.values():
        layer.take_routes([route.text for route in routes[product]], None)
    found: dict[Product, fx.Node] = {}
    tails = tails_in(layers.graph, layers.module)
    for tail in planned_tails(tails, layers.module, has_relus=True, is_joined=False):
        _, product = layers.products[id(layers.module.get_submodule(tail.names[0]))]
        (first, *_), m = product.operands, product.m
        x = None if first is None else value(first)
        # `nn.Linear` adds the bias separately to other rows, and rounds twice.
        is_dense = isinstance(x, Tensor) and (x.dim() == 2 or x.is_contiguous())
        is_at = tail.rectified == ALWAYS if m is None else kernel_at(tail.rectified, m)
        if is_dense and is_at:
            found[product] = tail_chain(layers, tail.names).calls[-1]
    return found
