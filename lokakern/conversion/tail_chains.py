"""Chains of layers whose norm and activation a forward calls (`lokakern.nn.tail`).

The forward of the module that calls them is traced, as for crosses: ``act(norm(layer(x)))`` is then
a span of one layer, as `LinearNormAct` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer
from lokakern.conversion.chain_spans import (
    ChainSites,
    FoundLayer,
    Span,
    layer_at,
    takes_once,
)
from lokakern.conversion.chains import SpanPlan, plan_span
from lokakern.conversion.routes import Route
from lokakern.nn.tail import FoundTail, behind_names


@dataclass(frozen=True)
class TailSpan(Span):
    """A layer with its tail, and their chain.

    Attributes:
        names: As of `lokakern.nn.tail.Tail`.
    """

    names: tuple[str, ...] = ()

    def chain(self, off: Collection[ChainSites]) -> str:
        """The plan of the chain; "" without one, and where it is off."""
        return self.texts(off).get(0, "")


def planned_tail_chains(
    found: Iterable[tuple[nn.Module, Iterable[FoundTail]]],
    names: Mapping[int, str],
    routes: Mapping[str, Route],
    judge_of: Callable[[Tensor], ChainJudge],
) -> list[TailSpan]:
    """The layers with tails that chains may run.

    Args:
        found: Modules, each with the tails of its forward.
        names: Names of the layers that may be part of a chain, by id.
        routes: Routes of their outputs by name.
        judge_of: The judge of layers on the device of a weight.
    """
    spans: list[TailSpan] = []
    known: dict[tuple[object, ...], SpanPlan] = {}
    for module, tails in found:
        every = list(dict.fromkeys(tail.names for tail in tails))
        calls = Counter(tail[0] for tail in every)
        for tail in every:
            layer = module.get_submodule(tail[0])
            site = names.get(id(layer))
            # One weight of a layer is kept for a chain, and one plan told by its name.
            if site is None or calls[tail[0]] > 1:
                continue
            one = _layer_of(layer, tail, module)
            if one is None:
                continue
            judge = judge_of(one.linear.weight)
            if not takes_once(one.layer, judge.device, half=judge.half):
                continue
            span = (SpanLayer(one.layer, one.eps, routes[site]),)
            key = (span, judge)
            if key not in known:
                known[key] = plan_span(span, judge)
            spans.append(TailSpan(module, (one,), (site,), known[key], tail))
    return spans


def _layer_of(layer: nn.Module, names: tuple[str, ...], parent: nn.Module) -> FoundLayer | None:
    """A layer with its tail, if kernels know them."""
    behind = behind_names(names, parent)
    found = None if behind is None else layer_at([layer, *behind], 0)
    is_whole = found is not None and found.stop == len(names)
    return found if is_whole else None
