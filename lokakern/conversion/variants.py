"""Variants of a conversion: groups of like products and chains, each on or off.

A group that is off is multiplied as `nn.Linear`, a chain by the routes of its layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lokakern.conversion.chain_spans import ChainSites, Span, words_of
from lokakern.conversion.chains import PlannedChain
from lokakern.conversion.paired_timing import Variant
from lokakern.conversion.restored_state import DERIVED
from lokakern.conversion.routes import EMULATED, GEMMS, Route
from lokakern.errors import UnsupportedError
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn.autocast import half_of
from lokakern.nn.chain_plan import read_plan, steps_at
from lokakern.nn.compiled_form import BEHIND_CROSS
from lokakern.nn.crossed_gradients import KERNEL as CROSS_KERNEL
from lokakern.nn.linear import CHAIN_DATA, CHAIN_SCALE, is_linear
from lokakern.nn.module_scan import shape_of
from lokakern.nn.raw_product import RawProduct
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.routed_matmul import PLAIN, kernel_at, read_route
from lokakern.registry.register import KERNELS
from lokakern.selection.arguments import device_of
from lokakern.selection.choice import Choice
from lokakern.types import Device

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion

LAYOUT = "bf16, with another layout of the weight"
RELU = "relu"
OTHER_FORM = "bf16, in another form in compiled code"
Off = frozenset[int]  # places of groups
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # see `Observed.unfit`
Rows = Mapping[str, list[int]]  # rows of the inputs of each site


@dataclass(frozen=True)
class Group:
    """Products that are alike.

    Attributes:
        gemm: "output", "grad_input" or "grad_weight"; "chain" for equal chains; "relu" for all
            products that apply the relu behind them, and for all else of that kind.
        n: Outputs of the layers, or of the last layer of a chain; None if they differ.
        k: Inputs of the layers, or of the first layer of a chain; None if they differ.
        kernels: Names of the kernels in the step.
        rows: Rows of the inputs in the step.
        sites: Names of the layers.
        predicted_us: Gain of all of them in a step by the database, in microseconds, if known.
        chains: Names of the layers of each chain.
    """

    gemm: str
    n: int | None
    k: int | None
    kernels: tuple[str, ...]
    rows: tuple[int, ...]
    sites: tuple[str, ...]
    predicted_us: float | None
    chains: tuple[ChainSites, ...] = ()


class Observed(NamedTuple):
    """What a step calls.

    Attributes:
        rows: Rows of the inputs of each site.
        trained: Sites that are called with gradients.
        unfit: Sites whose every call multiplies operands that kernels do not take, and dtypes of
            input and weight in such a call, and the one that they take; they are multiplied as by
            `nn.Linear`.
    """

    rows: dict[str, list[int]]
    trained: set[str]
    unfit: dict[str, Dtypes]


def observed_rows(conversion: Conversion, step: Callable[[], object]) -> Observed:
    """Rows and dtypes of the inputs of each site in a step.

    The step runs once, without torch.compile, whose graphs run no hooks.
    """
    rows: dict[str, set[int]] = defaultdict(set)
    trained: set[str] = set()
    fit: set[str] = set()
    unfit: dict[str, Dtypes] = {}

    def see(name: str, weight: torch.dtype, half: torch.dtype) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if inputs else named["input"]
            if isinstance(x, Tensor) and x.numel():
                # Inputs of a raw product may be [..., k, 1].
                columns = module.in_features if isinstance(module, RawProduct) else x.shape[-1]
                rows[name].add(x.numel() // columns)
                if half_of(x.dtype, weight, x.device.type) is half:
                    fit.add(name)
                else:
                    unfit[name] = x.dtype, weight, half
                if torch.is_grad_enabled():
                    trained.add(name)

        return hook

    handles = [
        site.module.register_forward_pre_hook(
            see(name, shape_of(site.module)[3].dtype, conversion.dtype_of(site.module)),
            with_kwargs=True,
        )
        for name, site in conversion.sites.items()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            step()
    finally:
        for handle in handles:
            handle.remove()
    return Observed(
        {name: sorted(found) for name, found in rows.items()}, trained,
        {name: dtypes for name, dtypes in unfit.items() if name not in fit},
    )  # fmt: skip


def groups_of(conversion: Conversion, rows: Rows, trained: set[str]) -> list[Group]:
    """Groups of chains, and of the products that differ from `nn.Linear`'s in the step.

    Chains come first, then the largest gain, and relus last.
    """
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    predicted: dict[tuple[Any, ...], float | None] = {}
    for name, site in conversion.sites.items():
        n, k, has_bias, _ = shape_of(site.module)
        for place, route in enumerate(site.routes):
            if place and name not in trained:
                continue
            sizes = tuple(rows.get(name, ()))
            kernels = tuple(dict.fromkeys(filter(None, (kernel_at(route.text, m) for m in sizes))))
            is_held = place == 0 and bool(sizes) and site.module.is_held
            if not kernels and not is_held:
                continue
            key = (route.gemm, n, k, kernels or (LAYOUT,), sizes, has_bias, route.text)
            found[key].append(name)
            predicted[key] = _predicted_us(route, sizes) if kernels else None
    groups = []
    for key, names in found.items():
        us = predicted[key]
        groups.append(Group(*key[:5], tuple(names), None if us is None else us * len(names)))
    groups.sort(key=lambda group: -(group.predicted_us or 0.0))
    chains = _chain_groups(conversion.spans, rows, conversion.over_limit_chains)
    return [*chains, *groups, *_relu_groups(conversion, rows)]


def idle_products(
    conversion: Conversion, rows: Rows, trained: set[str], groups: Sequence[Group], off: Off
) -> dict[tuple[str, str], str]:
    """Site and gemm of products with kernels for other rows than those of the step, and why not.

    Only of layers that then are no more than an `nn.Linear`: where another product, a layout, a
    chain or a form stays, nothing is saved. Products that the step does not call may run elsewhere.
    """
    kept = {
        name for place, group in enumerate(groups) if place not in off
        for name in (*group.sites, *(name for sites in group.chains for name in sites))
    }  # fmt: skip
    found: dict[tuple[str, str], str] = {}
    for name, routes in conversion.untuned.items():
        sizes, module = rows.get(name), conversion.sites[name].module
        is_whole = module._is_adopted and is_linear(module) and name not in kept
        if not sizes or not is_whole:
            continue
        if name not in trained and any(route.text for route in routes[1:]):
            continue
        why = f"no kernel runs at the rows of the step, {words_of_rows(sizes)}"
        found |= {
            (name, route.gemm): why for route in routes
            if route.text and not any(kernel_at(route.text, m) for m in sizes)
        }  # fmt: skip
    return found


def words_of_rows(rows: Sequence[int]) -> str:
    """Numbers of rows, the first few of many."""
    return ", ".join(map(str, rows[:4])) + (f" and {len(rows) - 4} more" if rows[4:] else "")


def _relu_groups(conversion: Conversion, rows: Rows) -> list[Group]:
    """Relus in products, gradients behind layers, and forms: one group, if the step has any."""
    found = {
        name: sizes for name, route in conversion.rectified.items()
        if (sizes := [m for m in rows.get(name, ()) if kernel_at(route, m)])
    }  # fmt: skip
    kernels = [RELU_KERNEL] if found else []
    if joined := {name: list(rows[name]) for name in conversion.joined if rows.get(name)}:
        kernels.append(GRADIENT_KERNEL)
        found |= joined
    if formed := {name: list(rows[name]) for name in conversion.forms if rows.get(name)}:
        forms = [conversion.forms[name] for name in formed]
        kernels += [OTHER_FORM] * any(not form.startswith(BEHIND_CROSS) for form in forms)
        kernels += [CROSS_KERNEL] * any(BEHIND_CROSS in form for form in forms)
        found |= formed
    if not found:
        return []
    shapes = {shape_of(conversion.sites[name].module)[:2] for name in found}
    n, k = shapes.pop() if len(shapes) == 1 else (None, None)
    every = tuple(sorted({m for sizes in found.values() for m in sizes}))
    return [Group(RELU, n, k, tuple(kernels), every, tuple(found), None)]


def _chain_groups(
    spans: Iterable[Span], rows: Rows, over_limit: Collection[ChainSites]
) -> list[Group]:
    """Groups of equal chains that are used in the step, largest gain first."""
    found: dict[tuple[str, tuple[int, ...]], tuple[PlannedChain, list[ChainSites]]] = {}
    for span in spans:
        for chain in span.plan.chains:
            sites = span.sites_of(chain)
            sizes = tuple(m for m in rows.get(sites[0], ()) if steps_at(chain.text, m))
            if sizes and sites not in over_limit:
                found.setdefault((chain.text, sizes), (chain, []))[1].append(sites)
    groups = []
    for (text, sizes), (chain, every) in found.items():
        kernels = dict.fromkeys(step.kernel for m in sizes for step in steps_at(text, m))
        us = _predicted_of_chain(chain, sizes)
        groups.append(
            Group(
                "chain", chain.layers[-1].n, chain.layers[0].k, tuple(kernels), sizes,
                tuple(map(words_of, every)), None if us is None else us * len(every),
                tuple(every),
            )
        )  # fmt: skip
    return sorted(groups, key=lambda group: -(group.predicted_us or 0.0))


def _predicted_of_chain(chain: PlannedChain, sizes: Sequence[int]) -> float | None:
    """What a chain gains over all m by times in the database; None if one was not measured."""
    gains = {t.m: t.rival_us - t.us for t in chain.times}
    return sum(gains[m] for m in sizes) if gains.keys() >= set(sizes) else None


def _predicted_us(route: Route, sizes: Iterable[int]) -> float | None:
    """What a product gains over all m by times in the database; None if one is unknown."""
    total = 0.0
    for m in sizes:
        choices: Sequence[Choice] = route.choices
        if route.gemm == "grad_weight":  # which sums over m, so that each m has its own table
            choices = [choice for choice in choices if choice.problem.k == m]
        if not choices:
            return None
        table = choices[0].table
        at = choices[0].m if route.gemm == "grad_weight" else m
        names = (table.baseline, kernel_at(route.text, m) or table.baseline)
        times = [
            next((c.time_at(at) for c in table.candidates if c.name == name), None)
            for name in names
        ]
        if times[0] is None or times[1] is None:
            return None
        total += times[0][0].latency_us - times[1][0].latency_us
    return total


# ---- how variants are applied


class Switch:
    """Applies variants to a model; FP8 weights stay where they are, which CUDA graphs read."""

    def __init__(self, conversion: Conversion, groups: Sequence[Group]) -> None:
        self._conversion, self._groups = conversion, groups
        self._derived: dict[tuple[Any, ...], dict[str, Tensor | None]] = {}
        self._of_chains: dict[tuple[str, str], Tensor | None] = {}
        self._keep(conversion.sites)

    def __call__(
        self,
        off: Variant,
        reasons: Mapping[int, str] | None = None,
        idle: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """Apply a variant; at the end with the reasons, and without products that are idle."""
        assert isinstance(off, frozenset)
        dropped = dict(idle or {}) | self._conversion.over_limit
        off_chains = set(self._conversion.over_limit_chains)
        has_relus = applies_relus(self._groups, off)
        for place in off:
            group = self._groups[place]
            off_chains.update(group.chains)
            why = "" if reasons is None else reasons[place]
            if group.gemm in GEMMS:
                dropped |= dict.fromkeys(((name, group.gemm) for name in group.sites), why)
        plain = {name for name, gemm in dropped if gemm == "output"}
        routes = {}
        for name, original in self._conversion.untuned.items():
            new = tuple(
                as_plain(r, dropped[name, r.gemm]) if (name, r.gemm) in dropped else r
                for r in original
            )
            is_same = new == self._conversion.sites[name].routes
            if not is_same or (name in plain) != (name in self._conversion.plain):
                routes[name] = new
        is_same = off_chains == self._conversion.off_chains
        if routes or not is_same or has_relus != self._conversion.has_relus:
            self._conversion.use_routes(
                routes, plain, keep_classes=True, off_chains=off_chains, has_relus=has_relus
            )
            self._keep(self._conversion.sites)

    def _keep(self, changed: Iterable[str]) -> None:
        """Give changed sites the derived weights that they had before with the same routes."""
        for name in changed:
            module = self._conversion.sites[name].module
            key = (name, module._routes[0], name in self._conversion.plain)
            buffers = {b: module._buffers[b] for b in DERIVED if b in module._buffers}
            module._buffers.update(self._derived.setdefault(key, buffers))
            for b in module._buffers:  # weights of chains are the same with all routes
                if b.startswith((CHAIN_DATA, CHAIN_SCALE)):
                    first = self._of_chains.setdefault((name, b), module._buffers[b])
                    module._buffers[b] = first


def applies_relus(groups: Sequence[Group], off: Off) -> bool:
    """Whether products apply relus: not with everything off, which is nn.Linear to the bit."""
    is_everything = bool(groups) and len(off) == len(groups)
    return not is_everything and all(groups[place].gemm != RELU for place in off)


def as_plain(route: Route, why: str) -> Route:
    """A route without kernels."""
    return replace(route, text=PLAIN, why=why)


def start_again(conversion: Conversion) -> None:
    """Restore what `refresh` chose, as far as it is within a limit of the loss."""
    over = conversion.over_limit
    names = {name for name, _ in over}
    chosen = {
        name: tuple(
            as_plain(route, over[name, route.gemm]) if (name, route.gemm) in over else route
            for route in routes
        )
        for name, routes in conversion.untuned.items()
    }
    changed = {
        name: routes for name, routes in chosen.items()
        if routes != conversion.sites[name].routes
        or (name in names) != (name in conversion.plain)
    }  # fmt: skip
    conversion.use_routes(
        changed, names & changed.keys(), keep_classes=True,
        off_chains=conversion.over_limit_chains, has_relus=True,
    )  # fmt: skip


def is_emulated(name: str, here: Device) -> bool:
    """Whether a device runs no such kernel, but torch operations with the same rounding."""
    return name in KERNELS and not KERNELS[name].runs_on(here)


def refuse_emulation(conversion: Conversion) -> None:
    """Raise UnsupportedError where a step would be timed with emulated kernels."""
    weight = shape_of(next(iter(conversion.sites.values())).module)[3]
    here = device_of(weight)
    texts = (route.text for routes in conversion.untuned.values() for route in routes)
    names = {name for text in texts if text for part in read_route(text)[1:] for _, name in part}
    plans = (read_plan(chain.text) for span in conversion.spans for chain in span.plan.chains)
    names |= {
        step.kernel for plan in plans for part in plan[1:] for _, steps in part for step in steps
    }
    emulated = sorted(
        name for name in names
        if is_emulated(name, here) or (EMULATED in name and not here.is_gpu)  # forced kernels
    )  # fmt: skip
    if not emulated:
        return
    device = conversion._device_for(weight)
    of, where = (device.product, "it") if device.is_gpu else ("GPUs", "a GPU")
    place = here.product if here.is_gpu else "this CPU"
    raise UnsupportedError(
        f"tune: kernels of {of} are emulated on {place}, such as {emulated[0]}; times here say "
        f"nothing of {where}: run tune on the GPU"
    )


def refuse_ranks(what: str) -> None:
    """Raise UnsupportedError where torch.distributed has several ranks."""
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
        if count > 1:
            raise UnsupportedError(
                f"{what}: there are {count} ranks, which would measure and decide differently: run "
                "it in one process, save the outcome, and convert with tuned= in all of them"
            )
