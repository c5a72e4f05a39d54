"""Spans of a model: consecutive layers that chains may run, and the chains chosen for them.

A layer is a converted linear layer, then a norm if there is one, then an activation if there is
one; or a `LinearNormAct`. Layers of a span follow each other in one `nn.Sequential`, also in
sequences that are its children. Identities and dropout are passed over; in training, calls with
dropout run the modules one by one. Any other module ends a span, and so does a layer that no kernel
takes. A `LinearNormAct` outside such a sequence is a span of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lokakern.chain.candidates import Layer
from lokakern.chain.dispatch import INPUTS
from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer
from lokakern.conversion.chain_verdicts import ways_at
from lokakern.conversion.chains import PlannedChain, SpanPlan, plan_span, takes
from lokakern.conversion.routes import Route
from lokakern.conversion.static_rounding import added_error
from lokakern.nn.activations import activation_of
from lokakern.nn.autocast import HALF
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_call import are_same, is_plain_call
from lokakern.nn.linear import LINEARS, Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.static_handoff import (
    BoundedSequential,
    is_affordable,
    is_inner,
    leaves,
    passes_on,
)
from lokakern.norm import NO_NORM, Norm, norm_named
from lokakern.probe.verdicts import Verdict
from lokakern.types import Device, ErrorBudget, Format, Granularity, NormForm

takes_once = functools.lru_cache(maxsize=4096)(takes)
ChainSites = tuple[str, ...]  # names of the layers of a chain, which tell it
OFF = "tuning, or a limit of the loss, gave it up"
_SEQUENCES = (nn.Sequential, BoundedSequential)


class FoundLayer(NamedTuple):
    """A layer of a span.

    Attributes:
        linear: The linear layer.
        place: Its index in the leaves of the sequence; 0 of a `LinearNormAct`.
        stop: Index after its last module.
        layer: Sizes and epilogue.
        eps: Of the norm.
        added: As of `SpanLayer`.
    """

    linear: Linear
    place: int
    stop: int
    layer: Layer
    eps: float
    added: float = math.inf


@dataclass(frozen=True)
class Span:
    """A span of a model with its chains.

    Attributes:
        module: The sequence, or a `LinearNormAct`.
        found: Its layers.
        sites: Their names.
        plan: The chains, or why there is none.
    """

    module: nn.Module
    found: tuple[FoundLayer, ...]
    sites: tuple[str, ...]
    plan: SpanPlan

    def text(self, off: Collection[ChainSites]) -> str:
        """The plan of its first chain, unless that is off; "" without one."""
        return next((x.text for x in self.plan.chains if self.sites_of(x) not in off), "")

    def sites_of(self, chain: PlannedChain) -> tuple[str, ...]:
        """Names of the layers of a chain."""
        return self.sites[chain.start : chain.stop]

    @property
    def words(self) -> str:
        """Names of the layers."""
        return words_of(self.sites)

    def explain(self, off: Collection[ChainSites]) -> str:
        """The chains with their times at each m, or why there is none."""
        if not self.plan.chains:
            return f"{self.words}: no chain: {self.plan.why}"
        lines = []
        for chain in self.plan.chains:
            sites = self.sites_of(chain)
            mark = f" ({OFF})" if sites in off else ""
            lines.append(f"{words_of(sites)}{mark}: {chain.explain()}")
        return "\n".join(lines)


def spans_of(module: nn.Module, accepts: Callable[[Linear], bool]) -> list[list[FoundLayer]]:
    """The spans of a sequence, or of a `LinearNormAct`.

    Args:
        module: Any module; others have none.
        accepts: Whether a linear layer may be part of a chain.
    """
    if isinstance(module, LinearNormAct):
        alone = layer_at([module], 0) if accepts(module) else None
        return [] if alone is None else _worth([[alone]])
    if not isinstance(module, nn.Sequential) or type(module) not in _SEQUENCES:
        return []
    spans: list[list[FoundLayer]] = [[]]
    modules, place = leaves(module), 0
    while place < len(modules):
        first = modules[place]
        if passes_on(first, in_call=False):
            place += 1
            continue
        is_ours = isinstance(first, Linear) and accepts(first)
        found = layer_at(modules, place) if is_ours else None
        if found is None:
            spans.append([])
            place += 1
            continue
        before = spans[-1][-1] if spans[-1] else found
        if before is not found and (
            before.layer.n != found.layer.k
            or before.linear.weight.dtype != found.linear.weight.dtype
        ):
            spans.append([])
        spans[-1].append(found)
        place = found.stop
    return _worth(spans)


def _worth(spans: list[list[FoundLayer]]) -> list[list[FoundLayer]]:
    return [span for span in spans if is_worth(span)]


def is_worth(span: Sequence[FoundLayer]) -> bool:
    """Whether a span is more than one product."""
    return len(span) > 1 or any(found.layer.epilogue not in ("none", "bias") for found in span)


def layer_at(modules: list[nn.Module], place: int) -> FoundLayer | None:
    """The layer that begins at a place, with the norm and the activation behind it.

    None if it is no layer that a kernel computes.
    """
    linear = modules[place]
    if not isinstance(linear, Linear) or not is_usable(linear):
        return None
    columns, stop, activation = linear.out_features, place + 1, "none"
    dtype = linear.weight.dtype
    module: nn.Module | None = None
    norm = NO_NORM
    if isinstance(linear, LinearNormAct):
        activation = linear.activation
        if type(linear.norm) is not nn.Identity:
            own = _norm_of(linear.norm, columns, dtype)
            if own is None:
                return None
            module, norm = linear.norm, own
    else:
        following = [
            (x, place + 1) for place, x in enumerate(modules)
            if place >= stop and not passes_on(x, in_call=False)
        ]  # fmt: skip
        # What is behind a module with hooks, or a call of its own, is no part of the layer.
        plain = list(itertools.takewhile(lambda one: is_plain_call(one[0]), following))
        own = _norm_of(plain[0][0], columns, dtype) if plain else None
        if own is not None:
            (module, stop), norm = plain.pop(0), own
        last = activation_of(plain[0][0]) if plain else ""
        if last:
            activation, stop = last, plain[0][1]
    is_affine = any(getattr(module, name, None) is not None for name in ("weight", "bias"))
    form = NormForm(norm, linear.bias is not None, affine=is_affine, last=activation)
    layer, added = Layer(columns, linear.in_features, str(form)), math.inf
    if is_affine:
        weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
        added = added_error(norm, columns, activation, weight, bias)
    return FoundLayer(linear, place, stop, layer, norm.eps, added)


def _norm_of(module: nn.Module, columns: int, dtype: torch.dtype) -> Norm | None:
    """The norm of a module over rows of so many columns; None if a kernel has none like it."""
    if type(module) is BlockRMSNorm and module.columns == columns:
        return norm_named(module.norm_name, module.eps)
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        # Without eps that of RMSNorm depends on the dtype of the input.
        is_of_rows = tuple(module.normalized_shape) == (columns,)
        if is_of_rows and module.eps is not None and _are_in(dtype, module):
            return norm_named("layer" if type(module) is nn.LayerNorm else "rms", module.eps)
    return None


def is_usable(linear: Linear) -> bool:
    """Whether a layer multiplies by its whole weight, bfloat16 or float16, and nothing else."""
    is_whole = linear.padding == (0, 0) and not linear.is_mixing
    is_known = type(linear) in (*LINEARS, LinearNormAct) and linear.weight.dtype in HALF
    return is_known and is_whole and _are_in(linear.weight.dtype, linear)


def _are_in(dtype: torch.dtype, module: nn.Module) -> bool:
    """Whether all parameters of a module are usual ones in a dtype, as kernels read them."""
    return all(type(x) is nn.Parameter and x.dtype is dtype for x in module.parameters())


def words_of(sites: Sequence[str]) -> str:
    """Names of consecutive layers."""
    return sites[0] if len(sites) == 1 else f"{sites[0]} to {sites[-1]}"


def chain_texts(spans: Iterable[Span]) -> dict[ChainSites, str]:
    """The plan of each chain by the names of its layers."""
    return {span.sites_of(chain): chain.text for span in spans for chain in span.plan.chains}


class PlacedChain(NamedTuple):
    """A chain in a sequence: its modules, with those that are passed over, and its plan."""

    modules: tuple[nn.Module, ...]
    text: str


def placed_chains(
    spans: Iterable[Span], off: Collection[ChainSites]
) -> dict[int, list[PlacedChain]]:
    """The chains of sequences, without those that are off, by the id of their first layer."""
    placed: dict[int, list[PlacedChain]] = {}
    for span in spans:
        if type(span) is Span and isinstance(span.module, nn.Sequential):
            modules = leaves(span.module)
            for chain in span.plan.chains:
                first, last = span.found[chain.start], span.found[chain.stop - 1]
                if span.sites_of(chain) not in off:
                    found = PlacedChain(tuple(modules[first.place : last.stop]), chain.text)
                    placed.setdefault(id(first.linear), []).append(found)
    return placed


def chains_at(
    sequence: nn.Sequential, placed: Mapping[int, Sequence[PlacedChain]]
) -> tuple[list[nn.Module], list[str]]:
    """The modules of a sequence that its settings are for, and for each the plan of a chain, or "".

    They are its children, or, where a chain crosses one that is a sequence itself, its leaves.
    A chain within such a child is set there.
    """
    children = list(sequence)
    if type(sequence) not in _SEQUENCES:
        return children, [""] * len(children)
    owners = [place for place, child in enumerate(children) for _ in leaves([child])]
    modules, crosses = leaves(children), False
    plans = [""] * len(modules)
    for place, module in enumerate(modules):
        for chain in placed.get(id(module), ()):
            stop = place + len(chain.modules)
            if are_same(tuple(modules[place:stop]), chain.modules):
                plans[place] = chain.text
                ours = set(owners[place:stop])
                crosses |= len(ours) > 1 and any(is_inner(children[i]) for i in ours)
    if crosses:
        return modules, plans
    own = {owner: plan for owner, plan in zip(owners, plans, strict=True) if plan}
    return children, [
        "" if is_inner(child) else own.get(place, "") for place, child in enumerate(children)
    ]


def chain_rows(span: Span, off: Collection[ChainSites]) -> list[dict[str, Any]]:
    """One row for each chain, as of `Conversion.choices`."""
    rows = []
    for chain in span.plan.chains:
        is_off = span.sites_of(chain) in off
        used = [t for t in chain.times if t.is_faster and not is_off]
        every = [t.kernels for t in used]
        if not (chain.times or is_off):  # of frozen choices
            every = [", ".join(step.kernel for step in steps) for steps in chain.launches]
        choice = "; ".join(dict.fromkeys(every)) or "off"
        rows.append(
            {
                "site": words_of(span.sites_of(chain)), "gemm": "chain",
                "n": chain.layers[-1].n, "k": chain.layers[0].k,
                "choice": choice, "eager_choice": choice,
                "m": [t.m for t in used], "us": [t.us for t in used],
                "host_us": [None] * len(used), "why": OFF if is_off else chain.why,
                "rival_us": [t.rival_us for t in used],
            }
        )  # fmt: skip
    return rows


def why_no_chains(
    budget: ErrorBudget | None, *, is_forced: bool, is_inference: bool, is_checked: bool,
    is_between: bool, is_wanted: bool,
) -> str:  # fmt: skip
    """Why a conversion as a whole has no chains, or ""."""
    if is_forced:
        return "kernels were forced"
    if not is_inference:
        return "chains have no gradients: convert with inference=True"
    if not is_wanted:
        return "chains=False"
    if not is_between:
        return "between=False"
    if is_checked:
        return "check= compares products, and a chain has none of its own"
    if budget is None:
        return "there is no budget"
    if set(budget.limits) != {"row_err"}:
        limits = ", ".join(budget.limits)
        return f"the budget limits {limits}; of chains only row_err is known"
    return ""


def chain_judge(
    budget: ErrorBudget, device: Device, distributions: tuple[str, ...] | None, regime: str,
    m_range: tuple[int, int] | None, weights: tuple[Granularity, ...], half: Format,
) -> ChainJudge:  # fmt: skip
    """The judge of a conversion within a budget of a row error, for weights of granularities.

    Without given distributions stored errors are those on all realistic ones but gradients, which
    no forward pass reads.
    """
    return ChainJudge(
        budget.limits["row_err"], device, distributions or INPUTS, regime, m_range,
        is_affordable(budget), weights, half,
    )  # fmt: skip


def planned_spans(
    modules: Iterable[nn.Module],
    names: Mapping[int, str],
    routes: Mapping[str, Route],
    judge_of: Callable[[Tensor], ChainJudge],
    scales_of: Callable[[Sequence[nn.Module], Tensor], tuple[str, ...]],
    verdicts: Mapping[str, Verdict] | None = None,
    apart: Collection[int] = (),
) -> list[Span]:
    """The spans of modules with their chains.

    Args:
        modules: Sequences and layers.
        names: Names of the layers that may be part of a chain, by id.
        routes: Routes of their outputs by name.
        judge_of: The judge of layers on the device, and in the dtype, of a weight.
        scales_of: Static scale of the input of each module of several in a row, or "", on the
            device of a weight.
        verdicts: Those of a report on outputs by name; None: errors are those of the database.
        apart: Ids of sequences whose children are called one by one.
    """
    spans = []
    modules = [module for module in modules if id(module) not in apart]
    inner = {id(x) for m in modules if type(m) in _SEQUENCES for x in m.children()}
    known: dict[tuple[object, ...], SpanPlan] = {}  # models repeat their layers
    for module in modules:
        if id(module) in inner and (isinstance(module, LinearNormAct) or is_inner(module)):
            continue
        for found in spans_of(module, lambda linear: id(linear) in names):
            judge = judge_of(found[0].linear.weight)
            every = [names[id(x.linear)] for x in found]
            ways, unsafe = ways_at(every, verdicts, judge.device, judge.half)
            spans += [
                Span(module, (x,), (site,), SpanPlan((), unsafe[site]))
                for x, site in zip(found, every, strict=True) if site in unsafe
            ]  # fmt: skip
            left = (None if names[id(x.linear)] in unsafe else x for x in found)
            for part in _taken(left, judge):
                sites = tuple(names[id(x.linear)] for x in part)
                scales: Sequence[str] = ("",)
                if isinstance(module, nn.Sequential):
                    scales = scales_of(leaves(module), part[0].linear.weight)
                layers = tuple(
                    SpanLayer(
                        x.layer, x.eps, routes[site], bool(scales[x.place]), 0, ways[site], x.added
                    )
                    for x, site in zip(part, sites, strict=True)
                )
                key = (layers, judge)
                if key not in known:
                    known[key] = plan_span(layers, judge)
                spans.append(Span(module, tuple(part), sites, known[key]))
    return spans


def _taken(span: Iterable[FoundLayer | None], judge: ChainJudge) -> list[list[FoundLayer]]:
    """Parts of a span between layers that no kernel takes, or that are None."""
    parts: list[list[FoundLayer]] = [[]]
    for found in span:
        if found is not None and takes_once(found.layer, judge.device, half=judge.half):
            parts[-1].append(found)
        else:
            parts.append([])
    return _worth(parts)
