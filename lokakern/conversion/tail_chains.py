"""Chains of layers whose norm and activation a forward calls (`lokakern.nn.tail`).

The forward of the module that calls them is traced, as for crosses. Layers with their tails that
follow each other, such as ``act(norm(layer(x)))`` in a loop over layers, are a span, as they are in
an `nn.Sequential`. A wide tail, with a residual or a gate, is in a span where it was measured and a
chain has it; elsewhere the tail before the residual is. Dropout and identities are passed over, as
the forward has them in evaluation. Blocks, each an `nn.Sequential` of layers,
are in spans as wholes; a chain of one block alone is that of the sequence.
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
from lokakern.nn.static_handoff import is_inner, leaves, passes_on
from lokakern.nn.tail import (
    PASSED,
    FoundTail,
    Tail,
    beside_in,
    joined_run,
    modules_behind,
    runs_of,
)
from lokakern.probe.verdicts import Verdict
from lokakern.types import NormForm, norm_form

Names = tuple[tuple[str, ...], ...]  # of a run of layers with their tails


@dataclass(frozen=True)
class TailSpan(Span):
    """Layers with their tails that follow each other, and their chains.

    Attributes:
        names: Of each layer, as of `lokakern.nn.tail.Tail`; none of those in a block after its
            first one.
        blocks: Names of the blocks among them.
    """

    names: Names = ()
    blocks: frozenset[tuple[str, ...]] = frozenset()

    @property
    def in_blocks(self) -> set[str]:
        """Names of the layers in its chains that are of blocks."""
        found = set()
        for chain in self.plan.chains:
            for place in range(chain.start, chain.stop):
                if not self.names[place] or self.names[place] in self.blocks:
                    found.add(self.sites[place])
        return found

    def tails(self, off: Collection[ChainSites]) -> list[Tail]:
        """A tail for each chain, whose plan is "" if it is off."""
        found = []
        for chain in self.plan.chains:
            names = [name for some in self.names[chain.start : chain.stop] for name in some]
            while names[-1] == PASSED:  # before a layer of no chain, or of another one
                names.pop()
            text = "" if self.sites_of(chain) in off else chain.text
            found.append(Tail(tuple(names), "", "", text))
        return found


def planned_tail_chains(
    found: Iterable[tuple[nn.Module, Sequence[FoundTail]]],
    names: Mapping[int, str],
    routes: Mapping[str, Route],
    judge_of: Callable[[Tensor], ChainJudge],
    scales_of: Callable[[Sequence[nn.Module], Tensor], tuple[str, ...]],
    verdicts: Mapping[str, Verdict] | None = None,
) -> list[TailSpan]:
    """The layers with tails that chains may run.

    Args:
        found: Modules, each with the tails of its forward.
        names: Names of the layers that may be part of a chain, by id.
        routes: Routes of their outputs by name.
        judge_of: The judge of layers on the device of a weight.
        scales_of: As of `lokakern.conversion.chain_spans.planned_spans`, for blocks.
        verdicts: Those of a report on outputs by name; None: errors are those of the database.
    """
    planner = _Planner(names, routes, judge_of, scales_of, verdicts)
    return [span for module, tails in found for span in planner.spans_of(module, tails)]


class _Planner:
    """Plans the spans of modules; the arguments are those of `planned_tail_chains`."""

    def __init__(
        self, names: Mapping[int, str], routes: Mapping[str, Route],
        judge_of: Callable[[Tensor], ChainJudge],
        scales_of: Callable[[Sequence[nn.Module], Tensor], tuple[str, ...]],
        verdicts: Mapping[str, Verdict] | None,
    ) -> None:  # fmt: skip
        self._names, self._routes, self._verdicts = names, routes, verdicts
        self._judge_of, self._scales_of = judge_of, scales_of
        self._known: dict[tuple[object, ...], SpanPlan] = {}

    def spans_of(self, module: nn.Module, tails: Sequence[FoundTail]) -> list[TailSpan]:
        """The spans of a module with these tails."""
        tails = _in_evaluation(tails)
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
                (layer,) = _layers_of(names, module)
                site = self._names[id(layer.linear)]
                plan = replace(plan, why=f"with {x.layer.epilogue}: {plan.why}")
                spans.append(TailSpan(module, (layer,), (site,), plan, (names,)))
        return spans

    def _plan(
        self, span: tuple[SpanLayer, ...], judge: ChainJudge, cuts: tuple[int, ...] | None = None
    ) -> SpanPlan:
        key = (span, judge, cuts)
        if key not in self._known:
            self._known[key] = plan_span(span, judge, cuts)
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
            taken = self._taken(tail.names, module) if tail.is_wide and alike == layers else []
            if not taken:
                continue
            (layer,) = taken
            judge, site = self._judge_of(layer.linear.weight), self._names[id(layer.linear)]
            ways, unsafe = ways_at([site], self._verdicts, judge.device, judge.half)
            if not unsafe:
                moved = _tensors_moved(tail, layer, module)
                x = SpanLayer(layer.layer, layer.eps, self._routes[site], False, moved, ways[site])
                found[tail.names] = x, judge
        return found

    def _taken(self, names: tuple[str, ...], module: nn.Module) -> list[FoundLayer]:
        """A layer with its tail, or those of a block, if they are sites and kernels compute all."""
        found = _layers_of(names, module)
        for x in found:
            judge = self._judge_of(x.linear.weight)
            is_site = id(x.linear) in self._names
            if not is_site or not takes_once(x.layer, judge.device, half=judge.half):
                return []
        return found

    def _spans(self, module: nn.Module, tails: Sequence[FoundTail]) -> list[TailSpan]:
        spans: list[TailSpan] = []
        every = _runs_by_names(tails, module)
        known = {tail.names: tail for tail in tails}
        blocks = frozenset(
            names for names, tail in known.items()
            if isinstance(module.get_submodule(names[0]), nn.Sequential)
        )  # fmt: skip
        # Tails of each layer: the name of a layer tells its chain, which has one weight of it.
        counts = Counter(tail[0] for tail in {tail for run in every for tail in run})
        for run in every:
            layers: list[tuple[tuple[str, ...], FoundLayer | None]] = []
            ways: dict[str, SafeWays | None] = {}
            handed: set[str] = set()  # sites whose inputs have static scales in their blocks
            for tail in run:
                taken = self._taken(tail, module) if counts[tail[0]] == 1 else []
                for x in taken:
                    judge, site = self._judge_of(x.linear.weight), self._names[id(x.linear)]
                    safe, unsafe = ways_at([site], self._verdicts, judge.device, judge.half)
                    ways |= safe
                    if unsafe:
                        if tail not in blocks:  # of which the sequence tells
                            plan = SpanPlan((), unsafe[site])
                            spans.append(TailSpan(module, (x,), (site,), plan, (tail,)))
                        taken = []
                        break
                if taken and tail in blocks:
                    modules = leaves([module.get_submodule(tail[0])])
                    scales = self._scales_of(modules, taken[0].linear.weight)
                    handed |= {self._names[id(x.linear)] for x in taken if scales[x.place]}
                layers += [(() if i else tail, x) for i, x in enumerate(taken)] or [(tail, None)]
            for part in _parts(layers):
                called, of_part = zip(*part, strict=True)
                sites = tuple(self._names[id(x.linear)] for x in of_part)
                span = tuple(
                    SpanLayer(
                        x.layer, x.eps, self._routes[site], site in handed,
                        _tensors_moved(known[tail], x, module) if tail in known else 0,
                        ways[site], x.added,
                    )
                    for (tail, x), site in zip(part, sites, strict=True)
                )  # fmt: skip
                cuts = tuple(i for i, names in enumerate(called) if names)
                plan = self._plan(
                    span, self._judge_of(of_part[0].linear.weight),
                    None if len(cuts) == len(called) else cuts,
                )  # fmt: skip
                found = TailSpan(module, of_part, sites, plan, called, blocks)
                spans += _across_blocks(found)
        return spans


def _across_blocks(span: TailSpan) -> list[TailSpan]:
    """A span without chains of one block; none if nothing is left but blocks."""
    if not span.blocks.intersection(span.names):
        return [span]
    chains = tuple(
        chain for chain in span.plan.chains
        if span.names[chain.start] not in span.blocks
        or any(span.names[chain.start + 1 : chain.stop])
    )  # fmt: skip
    is_told = bool(chains) or any(names and names not in span.blocks for names in span.names)
    return [replace(span, plan=replace(span.plan, chains=chains))] if is_told else []


def _in_evaluation(tails: Sequence[FoundTail]) -> list[FoundTail]:
    """Those of the graph of evaluation, of each layer that with what is passed over, if any."""
    found = [tail for tail in tails if tail.layer.graph is tails[-1].layer.graph]
    passing = {tail.layer for tail in found if tail.passed and not tail.is_wide}
    return [x for x in found if x.is_wide or bool(x.passed) == (x.layer in passing)]


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

    They end where a tail cannot move to the first layer of its run. Tails are alone where a layer
    comes twice: in a run or in two.
    """
    runs = {
        tuple(tail.names for tail in part): None
        for run in runs_of(tails, module) for part in _movable(run, module)
    }  # fmt: skip
    times = Counter(tail[0] for run in runs for tail in run)
    parts: list[Names] = []
    for run in runs:
        parts += [run] if all(times[tail[0]] == 1 for tail in run) else [(tail,) for tail in run]
    return list(dict.fromkeys(parts))


def _movable(run: Sequence[FoundTail], module: nn.Module) -> Iterator[list[FoundTail]]:
    """Parts of a run whose tails can move to the first layer of their part."""
    part: list[FoundTail] = []
    for tail in run:
        if part and joined_run([*part, tail], module) is None:
            yield part
            part = []
        part.append(tail)
    yield part


def _parts(
    run: Iterable[tuple[tuple[str, ...], FoundLayer | None]],
) -> Iterator[list[tuple[tuple[str, ...], FoundLayer]]]:
    """Parts of a run, without what is no layer of a kernel, whose layers fit each other."""
    part: list[tuple[tuple[str, ...], FoundLayer]] = []
    for tail, layer in (*run, ((), None)):
        if part and (layer is None or not _fits(part[-1][1], layer)):
            if is_worth([x for _, x in part]):
                yield part
            part = []
        if layer is not None:
            part.append((tail, layer))


def _fits(before: FoundLayer, layer: FoundLayer) -> bool:
    """Whether a layer may read the one before it."""
    is_alike = before.linear.weight.dtype == layer.linear.weight.dtype
    return is_alike and before.layer.n == layer.layer.k


def _layers_of(names: tuple[str, ...], parent: nn.Module) -> list[FoundLayer]:
    """A layer with its tail, or all layers of a block, if kernels may compute them."""
    module = parent.get_submodule(names[0])
    if isinstance(module, nn.Sequential):
        return _layers_in(leaves([module])) if is_inner(module) else []
    behind = modules_behind(names, parent)
    found = None if behind is None else layer_at([module, *behind], 0)
    if behind is None or found is None or found.stop != 1 + len(behind):
        return []
    beside = beside_in(names)
    if beside.beside:
        form = norm_form(found.layer.epilogue)
        last = form.last if beside.last == "none" else beside.last
        form = form._replace(
            residual=beside.residual, last=last, residual_last=beside.residual_last
        )  # fmt: skip
        found = found._replace(layer=found.layer._replace(epilogue=str(form)))
    return [found]


def _layers_in(modules: list[nn.Module]) -> list[FoundLayer]:
    """The layers that all of some modules are, if each reads the one before."""
    found: list[FoundLayer] = []
    place = 0
    while place < len(modules):
        if passes_on(modules[place], in_call=False):
            place += 1
            continue
        layer = layer_at(modules, place)
        if layer is None or (found and not _fits(found[-1], layer)):
            return []
        found.append(layer)
        place = layer.stop
    return found
