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
from lokakern.nn.tail import FoundTail, Tail, joined_run, modules_behind, runs_of
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
        # Tails of each layer: the name of a layer tells its chain, which has one weight of it.
        counts = Counter(tail[0] for tail in {tail for run in every for tail in run})
        for run in every:
            layers: list[tuple[tuple[str, ...], FoundLayer | None]] = []
            ways: dict[str, SafeWays | None] = {}
            for tail in run:
                site = names.get(id(module.get_submodule(tail[0])))
                layer = None
                if site is not None and counts[tail[0]] == 1:
                    layer = _layer_of(tail, module, judge_of)
                if site is not None and layer is not None:
                    judge = judge_of(layer.linear.weight)
                    safe, unsafe = ways_at([site], verdicts, judge.device, judge.half)
                    ways |= safe
                    if unsafe:
                        plan = SpanPlan((), unsafe[site])
                        spans.append(TailSpan(module, (layer,), (site,), plan, (tail,)))
                        layer = None
                layers.append((tail, layer))
            for part in _parts(layers):
                sites = tuple(names[id(x.linear)] for _, x in part)
                judge = judge_of(part[0][1].linear.weight)
                span = tuple(
                    SpanLayer(x.layer, x.eps, routes[site], ways=ways[site], added=x.added)
                    for (_, x), site in zip(part, sites, strict=True)
                )
                key = (span, judge)
                if key not in known:
                    known[key] = plan_span(span, judge)
                called, of_part = zip(*part, strict=True)
                spans.append(TailSpan(module, of_part, sites, known[key], called))
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
    run: Iterable[tuple[tuple[str, ...], FoundLayer | None]],
) -> Iterator[list[tuple[tuple[str, ...], FoundLayer]]]:
    """Parts of a run, without what is no layer of a kernel, whose layers fit each other."""
    part: list[tuple[tuple[str, ...], FoundLayer]] = []
    for tail, layer in (*run, ((), None)):
        if part and (
            layer is None
            or part[-1][1].layer.n != layer.layer.k
            or part[-1][1].linear.weight.dtype != layer.linear.weight.dtype
        ):
            if is_worth([x for _, x in part]):
                yield part
            part = []
        if layer is not None:
            part.append((tail, layer))


def _layer_of(
    names: tuple[str, ...], parent: nn.Module, judge_of: Callable[[Tensor], ChainJudge]
) -> FoundLayer | None:
    """A layer with its tail, if a kernel computes both."""
    behind = modules_behind(names, parent)
    found = None if behind is None else layer_at([parent.get_submodule(names[0]), *behind], 0)
    if found is None or found.stop != len(names):
        return None
    judge = judge_of(found.linear.weight)
    return found if takes_once(found.layer, judge.device, half=judge.half) else None
