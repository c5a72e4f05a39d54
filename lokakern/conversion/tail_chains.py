"""Chains of layers whose norm and activation a forward calls (`lokakern.nn.tail`).

The forward of the module that calls them is traced, as for crosses. Layers with their tails that
follow each other, such as ``act(norm(layer(x)))`` in a loop over layers, are a span, as they are in
an `nn.Sequential`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer
from lokakern.conversion.chain_spans import (
    ChainSites,
    FoundLayer,
    Span,
    is_worth,
    layer_at,
    takes_once,
)
from lokakern.conversion.chain_verdicts import SafeWays, ways_at
from lokakern.conversion.chains import SpanPlan, plan_span
from lokakern.conversion.routes import Route
from lokakern.nn.tail import FoundTail, Tail, behind_names, joined_run, runs_of
from lokakern.probe.verdicts import Verdict

Names = tuple[tuple[str, ...], ...]  # of a run of layers with their tails


@dataclass(frozen=True)
class TailSpan(Span):
    """Layers with their tails that follow each other, and their chains.

    Attributes:
        names: Of each layer, as of `lokakern.nn.tail.Tail`.
    """

    names: Names = ()

    def tails(self, off: Collection[ChainSites]) -> list[Tail]:
        """A tail for each chain, whose plan is "" if it is off."""
        return [
            Tail(
                tuple(name for some in self.names[chain.start : chain.stop] for name in some),
                "", "", "" if self.sites_of(chain) in off else chain.text,
            )
            for chain in self.plan.chains
        ]  # fmt: skip


def planned_tail_chains(
    found: Iterable[tuple[nn.Module, Sequence[FoundTail]]],
    names: Mapping[int, str],
    routes: Mapping[str, Route],
    judge_of: Callable[[Tensor], ChainJudge],
    verdicts: Mapping[str, Verdict] | None = None,
) -> list[TailSpan]:
    """The layers with tails that chains may run.

    Args:
        found: Modules, each with the tails of its forward.
        names: Names of the layers that may be part of a chain, by id.
        routes: Routes of their outputs by name.
        judge_of: The judge of layers on the device of a weight.
        verdicts: Those of a report on outputs by name; None: errors are those of the database.
    """
    spans: list[TailSpan] = []
    known: dict[tuple[object, ...], SpanPlan] = {}
    for module, tails in found:
        every = _runs_by_names(tails, module)
        calls = Counter(tail[0] for tail in dict.fromkeys(x for run in every for x in run))
        for run in every:
            # One weight of a layer is kept for a chain, and one plan told by its name.
            usable = [
                tail if id(module.get_submodule(tail[0])) in names and calls[tail[0]] == 1 else ()
                for tail in run
            ]
            ways: dict[str, SafeWays | None] = {}
            for place, tail in enumerate(usable):
                found_layer = _layer_of(tail, module, judge_of) if tail else None
                if found_layer is None:
                    continue
                site, judge = names[id(found_layer.linear)], judge_of(found_layer.linear.weight)
                safe, unsafe = ways_at([site], verdicts, judge.device, judge.half)
                ways |= safe
                if unsafe:
                    plan = SpanPlan((), unsafe[site])
                    spans.append(TailSpan(module, (found_layer,), (site,), plan, (tail,)))
                    usable[place] = ()
            for part, layers in _parts(usable, module, judge_of):
                sites = tuple(names[id(x.linear)] for x in layers)
                judge = judge_of(layers[0].linear.weight)
                span = tuple(
                    SpanLayer(x.layer, x.eps, routes[site], ways=ways[site])
                    for x, site in zip(layers, sites, strict=True)
                )
                key = (span, judge)
                if key not in known:
                    known[key] = plan_span(span, judge)
                spans.append(TailSpan(module, tuple(layers), sites, known[key], tuple(part)))
    return spans


def _runs_by_names(tails: Sequence[FoundTail], module: nn.Module) -> list[Names]:
    """The runs of a module, each told by the names of its tails, once.

    Tails are alone where they cannot move to the first layer of their run, or where a layer comes
    twice: in a run or in two.
    """
    runs = {
        tuple(tail.names for tail in run): joined_run(run, module) is not None
        for run in runs_of(tails, module)
    }
    times = Counter(tail[0] for run in runs for tail in run)
    parts: list[Names] = []
    for run, can_move in runs.items():
        is_one = can_move and all(times[tail[0]] == 1 for tail in run)
        parts += [run] if is_one else [(tail,) for tail in run]
    return list(dict.fromkeys(parts))


def _parts(
    run: Iterable[tuple[str, ...]], module: nn.Module, judge_of: Callable[[Tensor], ChainJudge]
) -> Iterator[tuple[list[tuple[str, ...]], list[FoundLayer]]]:
    """Parts of a run whose layers kernels take, with these layers; () ends a part."""
    part: list[tuple[str, ...]] = []
    layers: list[FoundLayer] = []
    for tail in (*run, ()):
        found = _layer_of(tail, module, judge_of) if tail else None
        if layers and (
            found is None
            or layers[-1].layer.n != found.layer.k
            or layers[-1].linear.weight.dtype != found.linear.weight.dtype
        ):
            if is_worth(layers):
                yield part, layers
            part, layers = [], []
        if found is not None:
            part.append(tail)
            layers.append(found)


def _layer_of(
    names: tuple[str, ...], parent: nn.Module, judge_of: Callable[[Tensor], ChainJudge]
) -> FoundLayer | None:
    """A layer with its tail, if a kernel computes both."""
    behind = behind_names(names, parent)
    found = None if behind is None else layer_at([parent.get_submodule(names[0]), *behind], 0)
    if found is None or found.stop != len(names):
        return None
    judge = judge_of(found.linear.weight)
    return found if takes_once(found.layer, judge.device, half=judge.half) else None
