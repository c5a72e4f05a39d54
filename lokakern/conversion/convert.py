"""`convert`: chooses kernels for the linear layers of a model, once and in place."""

from __future__ import annotations

import contextlib
import json
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lokakern import sampled_check
from lokakern.conversion.routes import (
    FORMS,
    GEMMS,
    Judge,
    MRange,
    Route,
    activating_route,
    routes_of,
)
from lokakern.device import current_device
from lokakern.errors import FormatError, UnknownNameError, UnsupportedError
from lokakern.nn.adoption import Chosen, adopt, apply_choice, remove_choice
from lokakern.nn.linear import Linear, Routed
from lokakern.nn.module_scan import (
    INNER,
    MIXING,
    ModuleFilter,
    inner_layers,
    matrices_elsewhere,
    named_modules,
    shape_of,
)
from lokakern.nn.routed_matmul import PLAIN, has_activator, kernel_at
from lokakern.nn.static_handoff import (
    BoundedSequential,
    activations_between,
    is_affordable,
    remove_handoff,
    scales_between,
    set_handoff,
)
from lokakern.nn.torch_owners import NEVER_CALLED, fast_paths, never_called, set_fast_paths
from lokakern.probe.report import ProbeReport
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of, m_range_of
from lokakern.selection.dispatcher import AnyDevice
from lokakern.types import Device, ErrorBudget, Granularity

Wanted = ProbeReport | ErrorBudget | float | None


def convert(
    model: nn.Module,
    report_or_budget: Wanted,
    *,
    filter: ModuleFilter | None = None,
    inference: bool = False,
    device: AnyDevice = None,
    distribution: str | Sequence[str] | None = None,
    m_range: MRange | None = None,
    between: bool = True,
    weight_scales: Sequence[Granularity | str] | None = None,
    check: str | None = None,
) -> Conversion:
    """Give each linear layer of a model the fastest kernels within a budget, in place.

    Every `nn.Linear` becomes a `lokakern.Linear`: the same object, with the same parameters, hooks
    and names. The kernels of its output, and of the gradients of its input and weight, are chosen
    separately, by ranges of m, from measurements on the device; only `Conversion.refresh` changes
    them. Without a faster quantizing kernel a product stays bitwise equal to `nn.Linear`. Only
    bfloat16 products are quantized: of bfloat16 parameters, or under autocast.

    Errors of kernels are those on the measured distributions, or on the data of a report, not on
    every input: ``check`` compares sampled rows of actual inputs.

    Convert before DDP, `fully_shard` and torch.compile.

    Args:
        model: Any module, or a linear layer.
        report_or_budget: A `ProbeReport`, whose safe kernels are used where they are fast. Or the
            largest accepted row error of each product in the database, a number or an
            `ErrorBudget`. None quantizes nothing.
        filter: ``(module, name) -> bool``, which accepts layers to convert; None: all.
        inference: Whether weights are quantized once, now, without training: later changes of a
            weight have no effect, except `load_state_dict` of the model. Unquantized bfloat16
            weights are copied to buffers where that is faster: of fused layers concatenated, of
            padded layers padded, and column-major where k is not a multiple of 8
            (`lokakern.nn.token_mixing.with_aligned_layout`).
        device: Device of the measurements, such as "NVIDIA H200"; None: the parameters' device. On
            other devices kernels are emulated: slow, with the same rounding.
        distribution: With a budget, the input distributions for errors.
        m_range: Smallest and largest number of rows to choose for; None: all measured m.
        between: Whether inputs of layers in an `nn.Sequential` are quantized before the layer: with
            a static scale after BlockNorm and an activation, if the budget is a row error of at
            least 0.05; in inference also after an activation alone, in one kernel, at m where that
            was timed. See `lokakern.nn.static_handoff`.
        weight_scales: Granularities of weights, of "tensor", "row" and "128x128"; None: all. With
            ["tensor"] FSDP2 can gather them as FP8, see `lokakern.distributed.fsdp2_gather`.
        check: ``"every:rows"``, such as "1000:64": in every 1000th call of each FP8 product,
            gradients included, 64 rows are also computed in float32, and a later call issues an
            `ErrorBudgetWarning` if their error exceeds the budget; see `lokakern.sampled_check` and
            `Conversion.checks`. None: the value of LOKAKERN_CHECK now; "off": no check.

    Returns:
        The choices, their reasons, and methods to change and undo them.

    Raises:
        UnknownNameError: There is no layer to convert, or a distribution or granularity is unknown.
        ShapeError: ``m_range`` is not two integers in order.
        FormatError: ``report_or_budget`` or ``check`` has another type.
        BudgetError: The budget is not a finite, non-negative number, or ``check`` or LOKAKERN_CHECK
            is not ``every:rows``.
        DeviceError: The device is not in the database.
    """
    if m_range is not None:
        m_range = m_range_of("convert", m_range)
    names = dispatcher.distribution_names(distribution)
    marker = sampled_check.Marker(check)
    forms = FORMS if weight_scales is None else tuple(_form_named(x) for x in weight_scales)
    found, skipped = _sites_of(model, filter)
    seen = report_or_budget.unseen if isinstance(report_or_budget, ProbeReport) else {}
    if not found:
        reasons = "".join(f"; {name}: {why}" for name, why in skipped.items())
        raise UnknownNameError(
            f"convert: {type(model).__name__} has no layer to convert; expected an nn.Linear that "
            f"filter= accepts{reasons}"
        )
    elsewhere = matrices_elsewhere(model, is_seen=bool(seen)) | seen
    skipped |= {name: why for name, why in elsewhere.items() if name not in found}
    conversion = Conversion(
        model, found, skipped, inference, device, names, m_range, between, forms, marker
    )
    conversion.refresh(report_or_budget)
    return conversion


@dataclass
class Site:
    """A converted layer.

    Attributes:
        name: Its name in the model.
        module: The layer.
        routes: Routes of output, grad_input and grad_weight.
    """

    name: str
    module: Routed
    routes: tuple[Route, ...] = field(default=(), repr=False)


class Conversion:
    """The result of `lokakern.convert`.

    Attributes:
        sites: Converted layers by name.
        skipped: Reasons by name, for linear layers that were not converted, and for products
            outside linear layers: those in a report of Probe, or else parameters of modules that
            may multiply by them.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        skipped: dict[str, str],
        inference: bool,
        device: AnyDevice,
        distributions: tuple[str, ...] | None,
        m_range: MRange | None,
        between: bool,
        forms: Sequence[Granularity],
        marker: sampled_check.Marker,
    ) -> None:
        self._modules, self.skipped, self._inference = modules, skipped, inference
        self._device, self._distributions, self._m_range = device, distributions, m_range
        self._between, self._forms, self._marker = between, forms, marker
        self.sites: dict[str, Site] = {}
        self.sequences = [m for m in model.modules() if isinstance(m, nn.Sequential)]
        self._untimed: set[tuple[int, int, str]] = set()  # n and k of the reading layer, activation
        self._model = weakref.ref(model)
        self._key = uuid.uuid4().hex  # of its choices in layers, which may be copied and saved
        self._owners = fast_paths(model)

    def refresh(self, report_or_budget: Wanted) -> list[str]:
        """Choose again, with another report or budget, or after a sweep.

        Compiled graphs of changed layers are compiled again. In inference weights are quantized
        again.

        Returns:
            The products with another choice, as ``site/gemm``.

        Raises:
            FormatError: The argument is neither a report nor a budget.
            UnknownNameError: The conversion was undone.
        """
        if not self._modules:
            raise UnknownNameError("refresh: the conversion was undone; convert the model again")
        for site in self.sites.values():
            if isinstance(site.module, Linear):
                site.module.bring_back()  # to choose for the device of the weight
        chosen = self._chosen(report_or_budget)  # before any change, as it may raise
        changed = []
        for name, module in self._modules.items():
            adopt(module)
            assert isinstance(module, Routed)  # all sites are
            site = self.sites.setdefault(name, Site(name, module))
            old = dict.fromkeys((r.gemm for r in chosen[name]), "")
            old |= {r.gemm: r.text for r in site.routes}
            changed += [f"{name}/{r.gemm}" for r in chosen[name] if r.text != old[r.gemm]]
            site.routes = chosen[name]
            budget = _judge_of(report_or_budget, name, None).budget
            routes = tuple(
                self._marker.mark(r.text, budget, f"{name}/{r.gemm}") for r in chosen[name]
            )
            apply_choice(module, Chosen(self._key, routes, self._inference))
        set_fast_paths(self._owners)
        self._apply_handoffs(report_or_budget)
        return changed

    def _apply_handoffs(self, wanted: Wanted) -> None:
        """Set in sequences which inputs are quantized before their layers."""
        budget = _judge_of(wanted, "", None).budget
        self._untimed.clear()
        for sequence in self.sequences:
            weight = next(sequence.parameters(), None) if self._between else None
            scales, activating = ("",) * len(sequence), [""] * len(sequence)
            if weight is not None:
                device = self._device_for(weight)
                if is_affordable(budget):
                    scales = scales_between(sequence, device)
                found = activations_between(sequence, scales) if self._inference else {}
                for place, (name, reader) in found.items():
                    k = reader.in_features
                    route = activating_route(device, k, name, m_range=self._m_range)
                    if not route:
                        self._untimed.add((reader.out_features, k, name))
                    elif has_activator(route, reader._routes[0], k):
                        activating[place] = route
            remove_handoff(sequence, self._key)
            is_told = isinstance(sequence, BoundedSequential)  # by another conversion
            if is_told or (type(sequence) is nn.Sequential and (any(scales) or any(activating))):
                set_handoff(sequence, scales, activating, self._key)

    @property
    def handed_over(self) -> list[str]:
        """Names of sites with quantized inputs, at m for which kernels were timed."""
        names = {id(site.module): site.name for site in self.sites.values()}
        found = [
            names[id(module)]
            for sequence in self.sequences
            if isinstance(sequence, BoundedSequential) and sequence.is_as_known
            for handoff in sequence._handoffs[-1:]
            for module, *known in zip(
                sequence, handoff.scales, ("", *handoff.activating[:-1]), strict=True
            )
            if any(known) and id(module) in names  # other sites belong to another conversion
        ]
        return list(dict.fromkeys(found))

    def _chosen(self, wanted: Wanted) -> dict[str, tuple[Route, ...]]:
        found: dict[str, tuple[Route, ...]] = {}
        known: dict[Any, tuple[Route, ...]] = {}  # layers often have the same sizes
        for name, module in self._modules.items():
            assert isinstance(module, nn.Linear | Routed)  # all sites are
            n, k, has_bias, weight = shape_of(module)
            device = self._device_for(weight)
            judge = _judge_of(wanted, name, self._distributions)
            if getattr(module, "is_mixing", False):
                found[name] = tuple(Route(gemm, PLAIN, MIXING) for gemm in GEMMS)
                continue
            key = (n, k, has_bias, device, judge)
            if key not in known:
                known[key] = routes_of(
                    n, k, judge, device, has_bias=has_bias, inference=self._inference,
                    m_range=self._m_range, forms=self._forms,
                )  # fmt: skip
            found[name] = known[key]
        return found

    @property
    def choices(self) -> list[dict[str, Any]]:
        """One row for each product of each site, as plain data."""
        rows = []
        for site in self.sites.values():
            n, k, _, _ = shape_of(site.module)
            texts = tuple(route.text for route in site.routes)
            is_there = texts in [
                tuple(map(sampled_check.unchecked, c.routes)) for c in self._chosen_for(site)
            ]
            routes = site.routes
            if not is_there:
                routes = tuple(Route(route.gemm, PLAIN, _RESIZED) for route in routes)
            for route in routes:
                timed = [c for c in route.choices if c.latency_us is not None]
                rows.append(
                    {
                        "site": site.name, "gemm": route.gemm, "n": n, "k": k,
                        "choice": _summary(route),
                        "m": [_rows_of(route, c) for c in timed],
                        "us": [c.latency_us for c in timed],
                        "why": route.why,
                    }
                )  # fmt: skip
        return rows

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Results of ``check=`` for each product, see `lokakern.sampled_check.results`."""
        chosen = (c for site in self.sites.values() for c in self._chosen_for(site))
        return sampled_check.results(route for c in chosen for route in c.routes)

    def _chosen_for(self, site: Site) -> list[Chosen]:
        """The choices of this conversion in a layer, also if a newer one determines its routes."""
        return [c for c in site.module._choices if c.key == self._key]

    def table(self) -> None:
        """Print a table of the choices."""
        from lokakern.render.terminal import print_rows

        rows = [{k: v for k, v in row.items() if k not in ("m", "us")} for row in self.choices]
        note = "\n".join(f"{name} is unchanged: {why}" for name, why in self.skipped.items())
        print_rows(rows, "table", title=repr(self), note=note)

    def _device_for(self, weight: Tensor) -> Device:
        if self._device is not None:
            return dispatcher.device_named(self._device)
        return dispatcher.device_named(current_device() if weight.is_meta else device_of(weight))

    @contextlib.contextmanager
    def weights_unchanged(self) -> Iterator[None]:
        """Quantize each weight once in the block, such as for the micro-batches of a step.

        ::

            with handle.weights_unchanged():
                for x, target in micro_batches:
                    loss(model(x), target).backward()
            optimizer.step()

        Weights must not change in the block: changes would have no effect. At the end the FP8
        copies of a weight, one for the output and one for the gradient of the input, are freed.
        Outside the block, weights are quantized in each forward and backward pass. Compiled layers
        and CUDA graphs quantize in each call also inside, because a replay runs no Python.
        """
        modules = [site.module for site in self.sites.values()]
        before = [module._kept for module in modules]
        for module in modules:
            module._kept = {} if module._kept is None else module._kept
        try:
            yield
        finally:
            for module, kept in zip(modules, before, strict=True):
                if kept is None:  # else an outer block continues
                    vars(module).pop("_kept", None)  # also after an undo in the block

    def offload(self, device: torch.device | str = "cpu", *, m_range: MRange | None = None) -> int:
        """Move weights of FP8 products in inference to another device.

        A state_dict stays the same, `load_state_dict` quantizes again, and `refresh` and `undo`
        move weights back. Nothing else may read these weights; capture graphs afterwards. At m
        outside the range such a layer multiplies in bfloat16 by its dequantized weight, which takes
        time in each call and has a smaller error than the FP8 product. Layers that are fused, share
        a weight, or run in bfloat16 at one of these m are not moved.

        Args:
            device: The target.
            m_range: Smallest and largest number of rows in use; None: all measured m.

        Returns:
            Freed bytes on the weights' device.

        Raises:
            UnsupportedError: The conversion is not for inference, or the target has no memory.
            ShapeError: ``m_range`` is not two integers in order.
        """
        place = torch.device(device)
        if not self._inference or place.type == "meta":
            raise UnsupportedError(
                f"offload to {place}: expected a device with memory, and a conversion with "
                "inference=True, whose weights are not trained"
            )
        if m_range is not None:
            m_range = m_range_of("offload", m_range)
        stay = self._shared_weights()
        freed = 0
        for site in self.sites.values():
            module = site.module
            if not isinstance(module, Linear) or not site.routes or id(module) in stay:
                continue
            at = [c.problem.m for c in site.routes[0].choices if c.latency_us is not None]
            if m_range is not None:
                at = [*m_range, *(m for m in at if m_range[0] <= m <= m_range[1])]
            if at and all(kernel_at(site.routes[0].text, m) for m in at):
                freed += module.offload(place)
        return freed

    def _shared_weights(self) -> set[int]:
        """Modules whose weight has other readers."""
        model = self._model()
        found: set[int] = set()
        users: Counter[int] = Counter()
        for module in model.modules() if model is not None else ():
            users.update(id(p) for p in module.parameters(recurse=False))
        for module in self._modules.values():
            weight = shape_of(module)[3]
            is_whole = not hasattr(weight, "to_local") and (
                weight.untyped_storage().nbytes() == weight.nbytes
            )
            if users[id(weight)] > 1 or not is_whole:
                found.add(id(module))
        return found

    def explain(self, name: str | None = None) -> str:
        """The reasons for each product of a site, or of all sites, kernel by kernel.

        Raises:
            UnknownNameError: The site is unknown.
        """
        if name is not None and name not in self.sites:
            raise UnknownNameError(
                f"explain: no site {name!r}; expected one of {', '.join(self.sites)}"
            )
        sites = self.sites.values() if name is None else [self.sites[name]]
        return "\n".join(f"{s.name}: {r.explain()}" for s in sites for r in s.routes)

    def suite(self, m: Sequence[int], name: str = "model") -> str:
        """Missing measurements of this model as a suite, TOML for ``sweep --suite FILE``.

        Args:
            m: Numbers of rows to measure.
            name: Name of the suite.

        Returns:
            "" if nothing is missing.
        """
        missing: dict[tuple[int, int], list[str]] = {}
        for site in self.sites.values():
            if site.module.is_mixing:
                continue
            n, k, _, _ = shape_of(site.module)
            forms = missing.setdefault((n, k), [])
            forms += [
                form
                for route in site.routes[: 1 if self._inference else None]
                for form in _FORMS[route.gemm]
                if not route.choices and form not in forms
            ]
        layers = [
            f"[[layer]]\nm = {list(m)}\nn = {n}\nk = {k}\nforms = {json.dumps(forms)}\n"
            for (n, k), forms in missing.items()
            if forms
        ]
        layers += [
            f"[[layer]]\nm = {list(m)}\nn = {n}\nk = {k}\nactivation = {json.dumps(activation)}\n"
            'forms = ["activate"]\n'
            for n, k, activation in sorted(self._untimed)
        ]
        return "\n".join([f"name = {json.dumps(name)}\n", *layers]) if layers else ""

    def undo(self) -> None:
        """Restore the class of every layer; parameters stay.

        Conversions and mods can be undone in any order: the newest remaining conversion determines
        the kernels of a layer. A second call does nothing.
        """
        for site in self.sites.values():
            remove_choice(site.module, self._key)
        for sequence in self.sequences:
            remove_handoff(sequence, self._key)
        set_fast_paths(self._owners)
        self.sites, self._modules, self.sequences, self._owners = {}, {}, [], []

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        routes = [route for site in self.sites.values() for route in site.routes]
        count = sum(bool(route.text) for route in routes)
        handed = len(self.handed_over)
        words = f", {handed} inputs quantized ahead" if handed else ""
        products = f"{count} of {len(routes)} products quantized"
        return f"Conversion({len(self.sites)} sites, {products}{words})"


_RESIZED = "a mod was undone, which changed the sizes: refresh, or convert the model again"
# Forms of each product in suites of users.
_FORMS = {
    "output": ("gemm", "prepared"), "grad_input": ("grad_input",), "grad_weight": ("grad_weight",),
}  # fmt: skip


def _sites_of(
    model: nn.Module, accepts: ModuleFilter | None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    found: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    inner, uncalled = inner_layers(model), never_called(model)

    def is_wanted(module: nn.Module, name: str) -> bool:
        is_linear = isinstance(module, nn.Linear | Routed)
        return is_linear and (accepts is None or accepts(module, name))

    for name, module in named_modules(model, is_wanted):
        reason = NEVER_CALLED if id(module) in uncalled else _why_not(module, id(module) in inner)
        if reason:
            skipped[name] = reason
        else:
            found[name] = module
    return found, skipped


def _form_named(name: Granularity | str) -> Granularity:
    if name not in FORMS:
        raise UnknownNameError(
            f"convert: weight_scales names {name!r}; expected some of {', '.join(FORMS)}"
        )
    return Granularity(name)


def _why_not(module: nn.Module, is_inner: bool) -> str:
    if is_inner:
        return INNER
    if not isinstance(module, Routed) and type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, which may do more than nn.Linear"
    weight = shape_of(module)[3]
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is {weight.dtype}; expected torch.float32 or torch.bfloat16"
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized; run the model once"
    return ""


def _judge_of(wanted: Wanted, name: str, distributions: tuple[str, ...] | None) -> Judge:
    if isinstance(wanted, ProbeReport):
        verdicts = tuple(v for v in wanted.verdicts if v.site == name)
        return Judge(wanted.budget, None, verdicts)
    if wanted is None:
        return Judge(None)
    if isinstance(wanted, bool) or not isinstance(wanted, Real | ErrorBudget):
        raise FormatError(
            f"convert: report_or_budget is {type(wanted).__name__}; expected a ProbeReport, a "
            "number (the largest row error, 0.06 admits E4M3), an ErrorBudget or None"
        )
    return Judge(budget_of(wanted), distributions)


def _rows_of(route: Route, choice: Any) -> int:
    """Samples of a choice; the gradient of a weight sums over them."""
    problem = choice.problem
    return int(problem.k if route.gemm == "grad_weight" else problem.m)


def _summary(route: Route) -> str:
    """Names of kernels over the measured m."""
    names = dict.fromkeys(
        kernel_at(route.text, _rows_of(route, c)) or "bf16" for c in route.choices
    )
    return ", ".join(names) or "bf16"
