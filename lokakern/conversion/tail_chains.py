"""Chains of layers whose norm and activation a forward calls (`lokakern.nn.tail`).

The forward of the module that calls them is traced, as for crosses. Layers with their tails that
follow each other, such as ``act(norm(layer(x)))`` in a loop over layers, are a span, as they are in
an `nn.Sequential`. A wide tail, with a residual or a gate, is in a span where it was measured and a
chain has it; elsewhere the tail before the residual is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer, is_pointwise
from lokakern.conversion.chain_spans import (
    ChainSites,
    FoundLayer,
    Span,
    is_worth,
    layer_at,
    takes_once,
)
from lokakern.conversion.chain_verdicts import SafeWays, ways_at
from lokakern.conversion.chains import SpanPlan, is_measured, plan_span
from lokakern.conversion.cross_sites import tensors_of
from lokakern.conversion.routes import Route
from lokakern.nn.tail import FoundTail, Tail, beside_in, joined_run, modules_behind, runs_of
from lokakern.probe.verdicts import Verdict
from lokakern.types import NormForm, norm_form

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
    planner = _Planner(names, routes, judge_of, verdicts)
    return [span for module, tails in found for span in planner.spans_of(module, tails)]


class _Planner:
    """Plans the spans of modules; the arguments are those of `planned_tail_chains`."""

    def __init__(
        self, names: Mapping[int, str], routes: Mapping[str, Route],
        judge_of: Callable[[Tensor], ChainJudge], verdicts: Mapping[str, Verdict] | None,
    ) -> None:  # fmt: skip
        self._names, self._routes, self._verdicts = names, routes, verdicts
        self._judge_of = judge_of
        self._known: dict[tuple[object, ...], SpanPlan] = {}

    def spans_of(self, module: nn.Module, tails: Sequence[FoundTail]) -> list[TailSpan]:
        """The spans of a module with these tails."""
        wide = self._wide_tails(module, tails)
        used = {names for names, (x, judge) in wide.items() if is_measured(x, judge)}
        while True:
            spans = self._spans(module, _chosen(tails, used))
            in_chains = {
                names for span in spans for chain in span.plan.chains
                for names in span.names[chain.start : chain.stop]
            }  # fmt: skip
            if used <= in_chains:
                break
            used &= in_chains  # others keep a layer from a chain without the residual
        for names, (x, judge) in wide.items():
            plan = self._plan((x,), judge)
            if names not in used and not plan.chains:
                layer = _layer_of(names, module)
                assert layer is not None
                site = self._names[id(layer.linear)]
                plan = replace(plan, why=f"with {x.layer.epilogue}: {plan.why}")
                spans.append(TailSpan(module, (layer,), (site,), plan, (names,)))
        return spans

    def _plan(self, span: tuple[SpanLayer, ...], judge: ChainJudge) -> SpanPlan:
        key = (span, judge)
        if key not in self._known:
            self._known[key] = plan_span(span, judge)
        return self._known[key]

    def _wide_tails(
        self, module: nn.Module, tails: Sequence[FoundTail]
    ) -> dict[tuple[str, ...], tuple[SpanLayer, ChainJudge]]:
        """The wide tails that kernels take, of layers whose every call has that tail."""
        found = {}
        for tail in tails:
            calls = [other for other in tails if other.layer.target == tail.layer.target]
            layers = {other.layer for other in calls}
            alike = {other.layer for other in calls if other.names == tail.names}
            layer = self._taken(tail.names, module) if tail.is_wide and alike == layers else None
            if layer is None:
                continue
            judge, site = self._judge_of(layer.linear.weight), self._names[id(layer.linear)]
            ways, unsafe = ways_at([site], self._verdicts, judge.device, judge.half)
            if not unsafe:
                moved = _tensors_moved(tail, layer, module)
                x = SpanLayer(layer.layer, layer.eps, self._routes[site], False, moved, ways[site])
                found[tail.names] = x, judge
        return found

    def _taken(self, names: tuple[str, ...], module: nn.Module) -> FoundLayer | None:
        """A layer with its tail, if it is a site and a kernel computes both."""
        if id(module.get_submodule(names[0])) not in self._names:
            return None
        found = _layer_of(names, module)
        if found is None:
            return None
        judge = self._judge_of(found.linear.weight)
        return found if takes_once(found.layer, judge.device, half=judge.half) else None

    def _spans(self, module: nn.Module, tails: Sequence[FoundTail]) -> list[TailSpan]:
        spans: list[TailSpan] = []
        every = _runs_by_names(tails, module)
        moved = {tail.names: tail for tail in tails}
        # Tails of each layer: the name of a layer tells its chain, which has one weight of it.
        counts = Counter(tail[0] for tail in {tail for run in every for tail in run})
        for run in every:
            layers: list[tuple[tuple[str, ...], FoundLayer | None]] = []
            ways: dict[str, SafeWays | None] = {}
            for tail in run:
                layer = self._taken(tail, module) if counts[tail[0]] == 1 else None
                if layer is not None:
                    judge, site = self._judge_of(layer.linear.weight), self._names[id(layer.linear)]
                    safe, unsafe = ways_at([site], self._verdicts, judge.device, judge.half)
                    ways |= safe
                    if unsafe:
                        plan = SpanPlan((), unsafe[site])
                        spans.append(TailSpan(module, (layer,), (site,), plan, (tail,)))
                        layer = None
                layers.append((tail, layer))
            for part in _parts(layers):
                sites = tuple(self._names[id(x.linear)] for _, x in part)
                span = tuple(
                    SpanLayer(
                        x.layer, x.eps, self._routes[site], False,
                        _tensors_moved(moved[tail], x, module) if tail in moved else 0, ways[site], x.added,
                    )
                    for (tail, x), site in zip(part, sites, strict=True)
                )  # fmt: skip
                plan = self._plan(span, self._judge_of(part[0][1].linear.weight))
                called, of_part = zip(*part, strict=True)
                spans.append(TailSpan(module, of_part, sites, plan, called))
        return spans


def _chosen(tails: Sequence[FoundTail], wide: Collection[tuple[str, ...]]) -> list[FoundTail]:
    """The tails without wide ones but these, which replace others of their layers."""
    replaced = {tail.layer for tail in tails if tail.names in wide}
    return [
        tail for tail in tails
        if tail.names in wide or not (tail.is_wide or tail.layer in replaced)
    ]  # fmt: skip


def _tensors_moved(tail: FoundTail, layer: FoundLayer, module: nn.Module) -> int:
    """Tensors that are read and written less if what a wide tail reads has no kernel of its own.

    A product without a bias may add a residual itself: that is read in any case.
    """
    form = norm_form(layer.layer.epilogue)
    if not is_pointwise(layer.layer):
        return 0
    if form == NormForm(residual=True):
        return 1
    return tensors_of(1 + len(form.beside), tail.end, module)


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


def _layer_of(names: tuple[str, ...], parent: nn.Module) -> FoundLayer | None:
    """A layer with its tail, if kernels may compute both."""
    behind = modules_behind(names, parent)
    found = None if behind is None else layer_at([parent.get_submodule(names[0]), *behind], 0)
    if behind is None or found is None or found.stop != 1 + len(behind):
        return None
    beside = beside_in(names)
    if not beside.beside:
        return found
    form = norm_form(found.layer.epilogue)
    last = form.last if beside.last == "none" else beside.last
    form = form._replace(
        residual=beside.residual, last=last, residual_last=beside.residual_last
    )  # fmt: skip
    return found._replace(layer=found.layer._replace(epilogue=str(form)))
