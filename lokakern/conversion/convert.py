"""`convert`: chooses kernels for the linear layers of a model, once and in place."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Real
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lokakern import sampled_check
from lokakern.conversion import tuning_file
from lokakern.conversion.chain_rivals import ChainJudge
from lokakern.conversion.chain_spans import (
    ChainSites,
    Span,
    chain_judge,
    chain_rows,
    chain_texts,
    chains_at,
    placed_chains,
    planned_spans,
    why_no_chains,
    words_of,
)
from lokakern.conversion.cross_gradients import (
    CrossGradients,
    cross_gradients,
    is_whole,
    lacks_time,
    last_layers,
)
from lokakern.conversion.cross_sites import CrossSpan, calls_blocks, calls_layers, planned_crosses
from lokakern.conversion.delayed_scaling import DelayedScaling
from lokakern.conversion.forced import FORCED, Forced, Kernels, forced_by, forced_routes
from lokakern.conversion.inlined_forwards import (
    InlinedForward,
    calls_forwards,
    planned_inlined,
)
from lokakern.conversion.kept_inputs import READERS, KeptInput, kept_inputs, total
from lokakern.conversion.loss_limit import LossLimit, limit_loss
from lokakern.conversion.main_grads import MainGrads
from lokakern.conversion.raw_sites import raw_sites
from lokakern.conversion.routes import (
    ANY_M,
    FORMS,
    GEMMS,
    NO_GRADIENTS,
    Judge,
    MRange,
    Route,
    activating_route,
    measures_bias,
    routes_of,
    with_padded_sizes,
    without_chain,
)
from lokakern.conversion.step_host import StepHost, host_of_step
from lokakern.conversion.tail_chains import TailSpan, planned_tail_chains
from lokakern.conversion.tail_sites import called_apart, found_tails
from lokakern.conversion.tune import Tuning, apply_tuning, tune
from lokakern.conversion.variants import as_plain
from lokakern.device import current_device
from lokakern.errors import FormatError, ShapeError, UnknownNameError, UnsupportedError
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.mods.pad import Pad
from lokakern.nn.adoption import Chosen, adopt, apply_choice, remove_choice
from lokakern.nn.autocast import CAST, HALF
from lokakern.nn.compiled_form import BEHIND_CROSS, DOT, LAYER_FORMS, LOGIT, SUMS, form_of
from lokakern.nn.crossed_forward import (
    children_of,
    crossed_of,
    remove_crosses,
    renew_products,
    set_crosses,
)
from lokakern.nn.crossed_gradients import KERNEL as CROSS_KERNEL
from lokakern.nn.joined import joined_between
from lokakern.nn.linear import Linear, Routed, is_linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.module_scan import (
    INNER,
    MIXING,
    ModuleFilter,
    inner_layers,
    named_modules,
    shape_of,
)
from lokakern.nn.raw_product import RawProduct, is_layer
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.rectified import rectified_between
from lokakern.nn.routed_matmul import (
    PLAIN,
    has_activator,
    in_dtype,
    kernel_at,
    kernels_of,
    read_route,
    switched,
    traced_route,
    turn,
)
from lokakern.nn.saved_inputs import SAVED, saved
from lokakern.nn.static_handoff import (
    BoundedSequential,
    activations_between,
    is_affordable,
    leaves,
    remove_handoff,
    scales_between,
    set_handoff,
)
from lokakern.nn.tail import FoundTail, Tail, planned_tails
from lokakern.nn.torch_owners import NEVER_CALLED, fast_paths, never_called, set_fast_paths
from lokakern.nn.traced_forward import PASSING_MASKS
from lokakern.probe.report import ProbeReport
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of, m_range_of
from lokakern.selection.candidates import Time
from lokakern.selection.choice import Choice
from lokakern.selection.dispatcher import AnyDevice
from lokakern.types import COMPILED, COMPILED_GRAPH, Device, ErrorBudget, Format, Granularity

if TYPE_CHECKING:
    from lokakern.conversion.drift_watch import DriftEvent, DriftWatch

Wanted = ProbeReport | ErrorBudget | float | None
OFF = "turned off by a watch"
_COMPILED = (COMPILED, COMPILED_GRAPH)
# How a model runs in each regime.
_RUNS = {
    COMPILED: "torch.compile, with each call made by the host; in CUDA graphs: 'compiled-graph'",
    COMPILED_GRAPH: "torch.compile, in CUDA graphs",
    "eager": "not compiled, with each call made by the host",
    "graph-cold": "CUDA graphs, operands not in the cache",
    "graph-hot": "CUDA graphs, operands in the cache",
}


def convert(
    model: nn.Module,
    report_or_budget: Wanted | EllipsisType = ...,
    *,
    kernels: Kernels | None = None,
    filter: ModuleFilter | None = None,
    skip: str | Sequence[str] = (),
    inference: bool = False,
    device: AnyDevice = None,
    distribution: str | Sequence[str] | None = None,
    m_range: MRange | None = None,
    between: bool = True,
    chains: bool = True,
    weight_scales: Sequence[Granularity | str] | None = None,
    check: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
    regime: str = COMPILED,
    main_grads: bool = False,
    scaling: str = "dynamic",
    history: int = 16,
    margin: int = 0,
    dtype: torch.dtype | None = None,
    keep_inputs: str | None = None,
) -> Conversion:
    """Give each linear layer of a model the fastest kernels within a budget, in place.

    Every `nn.Linear` becomes a `lokakern.Linear`: the same object, with the same parameters, hooks
    and names. The kernels of its output, and of the gradients of its input and weight, are chosen
    separately, by ranges of m, from measurements on the device, or by its time model where nothing
    was measured (LOKAKERN_PREDICT=0: bfloat16 there); only `Conversion.refresh` changes them.
    Without a faster quantizing kernel a product stays bitwise equal to `nn.Linear`, but for relus
    and gradients behind layers, and in compiled code for layers with one output and gradients
    of biases (``between``). Only products in bfloat16 or float16 are quantized: of such parameters,
    or of float32 ones under autocast to ``dtype``.

    Products with a parameter of another module, such as ``x @ self.w``, are sites, too, except with
    a report, if torch.fx can trace the forward of the module (`lokakern.nn.raw_pattern`), and those
    of `nn.MultiheadAttention`. Their names are those of the parameters, which stay;
    `Conversion.skipped` has the reasons for others.

    Errors of kernels are those on the measured distributions, or on the data of a report, not on
    every input: ``check`` compares sampled rows of actual inputs.

    Convert before DDP, `fully_shard` and torch.compile.

    Args:
        model: Any module, or a linear layer.
        report_or_budget: A `ProbeReport`, whose safe kernels are used where they are fast, if it
            judges products in the dtype of the layer, see ``dtype``. Or the largest accepted row
            error of each product in the database, a number or an `ErrorBudget`. None quantizes
            nothing. Left out if ``kernels`` is given.
        kernels: Kernels to force for accuracy trials, *not chosen by measurement*: nothing says
            that they are fast, or accurate enough. They need no measurements, so that a trial runs
            on any device, if need be in emulation. A text for all three GEMMs, or a mapping from
            "output", "grad_input" and "grad_weight" to texts, where a GEMM that is left out stays
            bfloat16. The texts:

            - "tensor", "row": E4M3 operands with these scales;
            - "1x128": 1x128 scales of inputs and gradients, 128x128 of weights;
            - "bf16": unquantized;
            - the name of a kernel (``python -m lokakern.bench list kernels``), which has to take
              the product.

            ``distribution``, ``between``, ``weight_scales`` and ``regime`` have no effect then.
        filter: ``(module, name) -> bool``, which accepts layers to convert; None: all. For a
            product with a parameter the module has ``in_features`` and ``out_features``.
        skip: Names of sites to leave out of those, or patterns of them as of `fnmatch`, such as
            "head.*"; unlike those that the filter rejects, they are listed in
            `Conversion.skipped`.
        inference: Whether weights are quantized once, now, without training: later changes of a
            weight have no effect, except `load_state_dict` of the model; nor have those of a norm
            whose outputs a chain writes with a static scale. Unquantized bfloat16
            weights are copied to buffers where that is faster: of fused layers concatenated, of
            padded layers padded, and column-major where k is not a multiple of 8
            (`lokakern.nn.token_mixing.with_aligned_layout`).
        device: Device of the measurements, or of forced kernels, such as "NVIDIA H200"; None: the
            parameters' device. On other devices kernels are emulated: slow, with the same rounding.
        distribution: With a budget, the input distributions for errors; with a report, for those of
            FP8 outputs in chains.
        m_range: Smallest and largest number of rows to choose for; None: all measured m, or all m
            with ``kernels``.
        between: Whether inputs of layers in an `nn.Sequential` are quantized before the layer: with
            a static scale after BlockNorm and an activation, if the budget is a row error of at
            least 0.05; in inference also after an activation alone, in one kernel, at m where that
            was timed, and in chains of layers. And whether products apply relus behind them, and
            one op computes gradients behind layers, also in forwards that torch.fx can trace. See
            `lokakern.nn.static_handoff` and `lokakern.nn.tail`.
        chains: Whether, in inference, layers of an `nn.Sequential`, a `LinearNormAct`, and DCN's
            crosses ``x0 * layer(x) + x`` in forwards that torch.fx can trace may run as chains, in
            one op with FP8 between the layers, also across forwards of a module's children, where
            that was measured to be faster and the error of each layer is within the budget, or its
            product safe by the report; see `Conversion.explain`.
        weight_scales: Granularities of weights, of "tensor", "row" and "128x128"; None: all. With
            ["tensor"] FSDP2 can gather them as FP8, see `lokakern.distributed.fsdp2_gather`.
        check: ``"every:rows"``, such as "1000:64": in every 1000th call of each FP8 product,
            gradients included, 64 rows are also computed in float32, and a later call issues an
            `ErrorBudgetWarning` if their error exceeds the budget (with ``kernels`` there is none);
            see `lokakern.sampled_check` and `Conversion.checks`. None: the value of LOKAKERN_CHECK
            now; "off": no check.
        tuned: A file of `Tuning.save` or `LossLimit.save`, whose products that did not gain in
            place, or were over the limit, are not quantized. It must be for this model, device and
            versions, and for the same other arguments.
        regime: How the model runs, as of `dispatch`. The default, "compiled", is for torch.compile:
            bf16 at an n or k that is no multiple of 8 is compared as if its rows were padded at no
            cost, and left to the compiler where that is faster. "compiled-graph" is for a compiled
            model in CUDA graphs, "graph-cold" for one that is not compiled: it counts the padding
            of activations. Eager calls, in which nothing pads, also run FP8 where it is faster than
            the product of unaligned rows, and then round differently than compiled ones. In
            "compiled" and "eager" the host makes each call. If its cost was measured on this class
            of machines (``python -m lokakern.bench host``), a product takes the longer of the times
            of GPU and host, so that small ones may stay in bfloat16; in training all do, at m at
            which the host takes longer for the whole step than the GPU for the products of all
            sites, each once (`lokakern.conversion.step_host`). In CUDA graphs the GPU counts alone.
            Without host costs "eager" needs times of that regime. `Conversion.table` and `explain`
            tell regime and host costs.
        main_grads: Whether gradients of the weights of linear layers add up in float32, in
            ``weight.main_grad``, to which kernels add each product: see `Conversion.main_grads`.
            ``weight.grad`` stays None, and ``check`` samples outputs and gradients of inputs only.
            With this or delayed scaling no product applies a relu, nor does one op compute
            gradients behind layers.
        scaling: "dynamic", by each operand itself, or "delayed", in training: tensorwise scales of
            operands of linear layers follow from their amax in earlier steps, see
            `Conversion.delayed_scaling`, which has to be updated after each step. Products with
            other scales, and calls without gradients, stay dynamic.
        history: With delayed scaling, how many steps count.
        margin: With delayed scaling, powers of two between the amax of these steps and the largest
            FP8 value, against saturation.
        keep_inputs: "fp8", in training: where the gradient of a weight reads FP8, the input is
            quantized for it in the forward pass, and FP8 data and scales are saved instead of the
            input: about half the bytes, with the same bits of the gradient. None: the input is
            saved. Where something else saves the input, too, such as a relu before the layer, or a
            layer that stays in bfloat16, nothing is gained, see `Conversion.saved_inputs`. Where
            several layers read one input, eager calls save a copy for each of them, which may take
            more memory than the input; compiled code shares one. Inputs are saved as they are with
            ``check``, and in the regime "compiled" from the start of a `Conversion.watch` until
            `Conversion.refresh` after its end. Gradients of such a weight that are differentiated
            again raise an error.
        dtype: Of autocast, in which layers with float32 weights multiply: ``torch.bfloat16``, which
            None means, or ``torch.float16``. Other weights have a dtype of their own. In another
            dtype than that a layer multiplies unquantized, and a warning says so. Kernels for
            float16 need errors that were measured with it (``sweep --suite float16``), of which the
            shipped files have none, or a report of Probe in float16.

    Returns:
        The choices, their reasons, and methods to change and undo them.

    Raises:
        UnknownNameError: There is no layer to convert, ``skip`` matches none, or a distribution, a
            granularity, a kernel, the regime or the scaling is unknown.
        ShapeError: ``m_range`` is not two integers in order, or ``history`` or ``margin`` no
            integer in its range.
        FormatError: The model is no module; ``report_or_budget``, ``kernels`` or ``check`` has
            another type; not exactly one of ``report_or_budget`` and ``kernels`` is given;
            ``main_grads``, ``keep_inputs`` or delayed scaling with ``inference``, or the latter two
            together; or ``dtype`` or ``keep_inputs`` is another one.
        UnsupportedError: A kernel that ``kernels`` names does not take a product of a layer.
        BudgetError: The budget is not a finite, non-negative number, or ``check`` or LOKAKERN_CHECK
            is not ``every:rows``.
        DeviceError: The device is not in the database.
        ChoicesError: The file ``tuned`` cannot be read, or is for something else; or the frozen
            choices in use hold something that is no choice for a layer. The model is then
            unchanged.
    """
    given: object = model  # from a program without types
    if not isinstance(given, nn.Module):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise FormatError(f"convert: model is {what}; expected an nn.Module, such as an instance")
    wanted = _wanted_of("convert", report_or_budget, kernels)
    if scaling not in ("dynamic", "delayed"):
        raise UnknownNameError(f"convert: scaling is {scaling!r}; expected 'dynamic' or 'delayed'")
    if inference and (main_grads or scaling == "delayed"):
        what = "main_grads" if main_grads else "delayed scaling"
        raise FormatError(f"convert: {what} is for training, and inference is given; leave one out")
    if keep_inputs not in (None, "fp8"):
        raise FormatError(f"convert: keep_inputs is {keep_inputs!r}; expected 'fp8' or None")
    if keep_inputs and (inference or scaling == "delayed"):
        what = (
            "is for training, and inference is given" if inference
            else "saves what dynamic scales quantize, and scaling is 'delayed'"
        )  # fmt: skip
        raise FormatError(f"convert: keep_inputs {what}; leave one out")
    if dtype not in (None, *HALF):
        raise FormatError(
            f"convert: dtype is {dtype!r}; expected torch.bfloat16 or torch.float16, as of autocast"
        )
    if m_range is not None:
        m_range = m_range_of("convert", m_range)
    kept = None if tuned is None else tuning_file.read(tuned)
    dispatcher.check_regime(regime)
    names = dispatcher.distribution_names(distribution)
    marker = sampled_check.Marker(check)
    forms = FORMS if weight_scales is None else tuple(_form_named(x) for x in weight_scales)
    raw, elsewhere = raw_sites(model, wanted.unseen if isinstance(wanted, ProbeReport) else None)
    found, skipped = _sites_of(model, raw, filter, _patterns_of(skip))
    if not found:
        reasons = "".join(f"; {name}: {why}" for name, why in skipped.items())
        raise UnknownNameError(
            f"convert: {type(model).__name__} has no layer to convert; expected an nn.Linear, or a "
            f"product with a parameter, that filter= accepts and skip= does not name{reasons}"
        )
    skipped |= {name: why for name, why in elsewhere.items() if name not in found}
    conversion = Conversion(
        model,
        found,
        skipped,
        wanted,
        inference,
        device,
        names,
        m_range,
        between,
        chains,
        forms,
        marker,
        regime,
        main_grads,
        (history, margin) if scaling == "delayed" else None,
        dtype or torch.bfloat16,
        keep_inputs is not None,
    )
    try:
        conversion.refresh()
        if tuned is not None and kept is not None:
            tuning_file.check(kept, conversion, os.fspath(tuned))
    except BaseException:
        conversion.undo()
        raise
    if kept is not None:
        apply_tuning(conversion, kept)
    return conversion


_Sizes = tuple[int, int, bool, Format]  # n, k, whether with a bias, and the format of operands


@dataclass
class Site:
    """A converted layer, or the products of a module with a parameter of its own.

    Attributes:
        name: Its name in the model, or that of the parameter.
        module: The layer, or a `lokakern.nn.raw_product.RawProduct`.
        routes: Routes of output, grad_input and grad_weight.
    """

    name: str
    module: Routed
    routes: tuple[Route, ...] = field(default=(), repr=False)


class Conversion:
    """The result of `lokakern.convert`.

    Attributes:
        sites: Converted layers, and products with parameters of other modules, by name.
        skipped: Reasons by name, for linear layers and products that were not converted: those in a
            report of Probe, or else parameters of modules that may multiply by them.
        regime: The regime of the times by which kernels were chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        skipped: dict[str, str],
        wanted: Wanted | Forced,
        inference: bool,
        device: AnyDevice,
        distributions: tuple[str, ...] | None,
        m_range: MRange | None,
        between: bool,
        chains: bool,
        forms: Sequence[Granularity],
        marker: sampled_check.Marker,
        regime: str,
        main_grads: bool,
        delayed: tuple[int, int] | None,
        dtype: torch.dtype,
        keeps_inputs: bool,
    ) -> None:
        self._modules, self.skipped, self._inference = modules, skipped, inference
        self._wanted = wanted
        self._device, self._distributions, self._m_range = device, distributions, m_range
        self._between, self._forms, self._marker = between, forms, marker
        self._has_chains = chains
        self.untuned: dict[str, tuple[Route, ...]] = {}  # routes as chosen by `refresh`
        self.plain: set[str] = set()  # sites that keep the parameter as it is, see `use_routes`
        self.regime = regime
        self.sites: dict[str, Site] = {}
        self.sequences = [m for m in model.modules() if isinstance(m, nn.Sequential)]
        self.fused = [m for m in model.modules() if type(m) is LinearNormAct]
        self.callers = [m for m in model.modules() if calls_layers(m)]
        # In whose forwards sequences may be parts of chains, and layers of torch.
        self._block_callers = [m for m in model.modules() if inference and calls_blocks(m)]
        if inference:
            self._block_callers += [m for m in model.modules() if type(m) in PASSING_MASKS]
        # In whose forwards those of others may be.
        self._outer_callers = [m for m in model.modules() if inference and calls_forwards(m)]
        self.left_crosses: dict[str, str] = {}  # reasons
        self.spans: list[Span] = []  # layers that may be chains
        self.off_chains: frozenset[ChainSites] = frozenset()  # by tuning
        self._dtype = dtype  # of autocast
        self._keeps_inputs = keeps_inputs  # in FP8
        self._main_grads = MainGrads(modules) if main_grads else None
        # Relus in products, gradients behind layers; tuning decides.
        self.has_relus = not main_grads and delayed is None
        # Products with the reason, and chains, that `limit_loss` gave up; tuning does not try them.
        self.over_limit: dict[tuple[str, str], str] = {}
        self.over_limit_chains: frozenset[ChainSites] = frozenset()
        self.why_no_chains = ""
        self._step_host: StepHost | None = None  # of training, where it is known
        self._tails: dict[int, list[FoundTail]] = {}  # of callers, by id
        self._inlined: dict[int, InlinedForward] = {}  # of outer callers, by id
        self._inner_spans: list[TailSpan] = []  # that spans of outer callers replace
        self._behind_crosses: dict[str, CrossGradients] = {}  # by the name of the last layer
        self._untimed: set[tuple[int, int, str]] = set()  # n and k of the reading layer, activation
        self._model = weakref.ref(model)
        self._key = uuid.uuid4().hex  # of its choices in layers, which may be copied and saved
        self.has_switches = False  # whether routes have switches, see `watch`
        self._delayed = None if delayed is None else DelayedScaling(modules, self._key, *delayed)
        self._watch: DriftWatch | None = None  # that is under way
        # Products that watches turned off, by site and GEMM, with the routes that they had.
        self.turned_off: dict[tuple[str, str], Route] = {}
        self._owners = fast_paths(model)

    def refresh(
        self, report_or_budget: Wanted | EllipsisType = ..., *, kernels: Kernels | None = None
    ) -> list[str]:
        """Choose again, such as after a sweep, or by another report, budget or kernels.

        A tuning and a limit of the loss are forgotten.

        Compiled graphs of changed layers are compiled again. In inference weights are quantized
        again.

        Args:
            report_or_budget: As of `convert`. Without an argument: as the last time.
            kernels: As of `convert`.

        Returns:
            The products with another choice, as ``site/gemm``, and the chains, as
            ``first to last site/chain``.

        Raises:
            FormatError: ``report_or_budget`` is neither a report nor a budget, ``kernels`` no text
                or mapping, or both are given.
            UnknownNameError: The conversion was undone, or a kernel is unknown.
            UnsupportedError: A kernel that ``kernels`` names does not take a product of a layer.
        """
        self._refuse_while_watched("refresh")
        wanted = self._wanted
        if kernels is not None or not isinstance(report_or_budget, EllipsisType):
            wanted = _wanted_of("refresh", report_or_budget, kernels)
        if not self._modules:
            raise UnknownNameError("refresh: the conversion was undone; convert the model again")
        for module in self._modules.values():
            if isinstance(module, Linear):
                module.bring_back()  # to choose for the device of the weight
        chosen = self._chosen(wanted, self._m_range)  # before any change, as it may raise
        host = None if self._inference or isinstance(wanted, Forced) else self._host_of(chosen)
        if host is not None:
            chosen = {name: tuple(map(host.limited, routes)) for name, routes in chosen.items()}
        chosen = {name: tuple(r.with_eager() for r in routes) for name, routes in chosen.items()}
        self._behind_crosses = self._chosen_behind_crosses(wanted, host)
        self._wanted, self._step_host = wanted, host
        self.untuned = chosen
        self.over_limit, self.over_limit_chains = {}, frozenset()
        before = chain_texts(self.spans)
        self.spans, self._inner_spans, self._tails, self._inlined = [], [], {}, {}
        self._forget_watches()
        changed = self.use_routes(chosen, off_chains=(), has_relus=True)
        self.spans = self._planned()  # of layers that have their routes
        if any(span.plan.chains for span in self.spans):
            self.use_routes({}, self.plain)
        now = chain_texts(self.spans)
        return changed + [
            f"{words_of(sites)}/chain" for sites in dict.fromkeys((*before, *now))
            if before.get(sites) != now.get(sites)
        ]  # fmt: skip

    def _last_layers(self, wanted: Wanted | Forced) -> Iterator[tuple[str, nn.Linear]]:
        """The last layers of crosses whose gradients one kernel may quantize, by site."""
        if not self._may_quantize_gradients(wanted):
            return
        names = {id(module): name for name, module in self._modules.items()}
        for layer in last_layers(self.callers):
            if id(layer) in names and self.dtype_of(layer) is torch.bfloat16:
                yield names[id(layer)], layer

    def _may_quantize_gradients(self, wanted: Wanted | Forced) -> bool:
        is_usual = not (self._inference or self._main_grads or self._delayed or self._marker.is_on)
        is_chosen = not isinstance(wanted, Forced) and wanted is not None
        return is_usual and is_chosen and self.regime in _COMPILED and not dispatcher.choices()

    def _chosen_behind_crosses(
        self, wanted: Wanted | Forced, host: StepHost | None
    ) -> dict[str, CrossGradients]:
        """Which gradients behind crosses are quantized as they are computed, by site."""
        devices = {self._device_for(shape_of(m)[3]) for m in self._modules.values()}
        if not any(dispatcher.is_timed(CROSS_KERNEL, device) for device in devices):
            return {}
        low, high = self._m_range or (0, ANY_M)
        low = low if host is None else max(low, host.least_m)
        m_range = None if (low, high) == (0, ANY_M) else (low, high)
        known: dict[Any, CrossGradients] = {}
        found = {}
        for name, layer, is_crossed in self._quantizing_layers(wanted):
            n, k, has_bias, weight = shape_of(layer)
            by = _source_of(wanted, name, self._distributions)
            assert isinstance(by, Judge)  # as nothing is forced
            judge, device = replace(by, regime=self.regime), self._device_for(weight)
            key = (n, k, has_bias, device, judge, is_crossed)
            if key not in known:
                known[key] = cross_gradients(
                    n, k, has_bias, judge, device, m_range, is_crossed=is_crossed
                )
            if is_crossed or known[key].times:
                found[name] = known[key]
        return found

    def _quantizing_layers(self, wanted: Wanted | Forced) -> Iterator[tuple[str, nn.Module, bool]]:
        """Layers whose gradient a kernel may quantize for both products; first those of crosses.

        Each with its name, and whether it is the last layer of a cross.
        """
        last = dict(self._last_layers(wanted))
        yield from ((name, layer, True) for name, layer in last.items())
        if self._may_quantize_gradients(wanted):
            for name, layer in self._modules.items():
                if name not in last and is_whole(layer) and self.dtype_of(layer) is torch.bfloat16:
                    yield name, layer, False

    def _form_at(self, site: Site) -> str:
        """The form of a site, with kernels of gradients behind a cross where they are used."""
        form, found = self._form_of(site.module), self._usable_behind_cross(site.name)
        is_off = any((site.name, gemm) in self.turned_off for gemm in GEMMS)
        return form if found is None or is_off else found.form(form)

    def _usable_behind_cross(self, site: str) -> CrossGradients | None:
        """Not with switches: what these turn is a route, which such kernels are not."""
        return self._behind_crosses.get(site) if self.has_relus and not self.has_switches else None

    def gradient_kernels(self, site: str) -> dict[str, tuple[str, ...]]:
        """By GEMM, kernels of gradients that compiled code of a site has beside its routes."""
        found = self._usable_behind_cross(site)
        used = [] if found is None else found.used
        return {
            gemm: tuple(dict.fromkeys(x.kernels[place] for x in used))
            for place, gemm in enumerate(GEMMS[1:])
            if used
        }

    def _planned(self) -> list[Span]:
        """The spans of the model with their chains."""
        wanted, budget = self._wanted, _budget_of(self._wanted)
        self.why_no_chains = why_no_chains(
            budget, is_forced=isinstance(wanted, Forced), is_inference=self._inference,
            is_checked=self._marker.is_on, is_between=self._between, is_wanted=self._has_chains,
        )  # fmt: skip
        self.left_crosses = {}
        if self.why_no_chains:
            return []
        assert budget is not None  # else there are none
        names = {id(site.module): site.name for site in self.sites.values()}
        routes = {site.name: site.routes[0] for site in self.sites.values()}
        verdicts = None
        if isinstance(wanted, ProbeReport):
            verdicts = {v.site: v for v in wanted.verdicts if v.gemm == "output"}

        def judge_of(weight: Tensor) -> ChainJudge:
            device = self._device_for(weight)
            return chain_judge(
                budget, device, self._distributions, self.regime, self._m_range,
                tuple(self._forms),
                Format.FLOAT16 if weight.dtype is torch.float16 else Format.BFLOAT16,
            )  # fmt: skip

        def scales_of(modules: Sequence[nn.Module], weight: Tensor) -> tuple[str, ...]:
            return self._scales_of(modules, self._device_for(weight))

        spans = planned_spans(
            [*self.sequences, *self.fused], names, routes, judge_of, scales_of, verdicts,
            called_apart(self._block_callers),
        )  # fmt: skip
        crosses, self.left_crosses = planned_crosses(
            self.callers, names, routes, judge_of, verdicts
        )
        found = ((module, self._tails_found_in(module)) for module in self._all_callers)
        # One call replaces a layer: the last one of a run may be the first one of a cross.
        crossed = {site for x in crosses for chain in x.plan.chains for site in x.sites_of(chain)}
        others = {key: site for key, site in names.items() if site not in crossed}
        tails = planned_tail_chains(found, others, routes, judge_of, scales_of, verdicts)
        blocks = {site for tail in tails for site in tail.in_blocks}
        spans = [*(x for x in spans if blocks.isdisjoint(x.sites)), *crosses, *tails]

        def plan(module: nn.Module, tails: Sequence[FoundTail]) -> list[TailSpan]:
            found = [(module, tails)]
            return planned_tail_chains(found, others, routes, judge_of, scales_of, verdicts)

        with_crosses = {id(x.module) for x in crosses if x.plan.chains}
        inlined = planned_inlined(self._outer_callers, spans, plan, with_crosses)
        self._inner_spans, self._inlined = inlined.inner, inlined.forwards
        return inlined.spans

    @property
    def _all_callers(self) -> list[nn.Module]:
        """Modules that call layers or blocks of them."""
        return list({id(x): x for x in (*self.callers, *self._block_callers)}.values())

    @property
    def _changed_callers(self) -> list[nn.Module]:
        """Those whose forwards may be traced ones, and modules that call such ones."""
        return list({id(x): x for x in (*self._all_callers, *self._outer_callers)}.values())

    def _scales_of(self, modules: Sequence[nn.Module], device: Device) -> tuple[str, ...]:
        """Static scale of the input of each of several modules in a row, or ""."""
        # Of a step that a watch samples hooks take them away, and it judges what it sampled.
        if self._watch is None and self._between and is_affordable(_budget_of(self._wanted)):
            return scales_between(modules, device)
        return ("",) * len(modules)

    def use_routes(
        self,
        routes: Mapping[str, tuple[Route, ...]],
        plain: Collection[str] = (),
        *,
        keep_classes: bool = False,
        off_chains: Collection[ChainSites] | None = None,
        has_relus: bool | None = None,
    ) -> list[str]:
        """Set the routes of some sites, and the chains, for `refresh` and `tune`.

        Args:
            routes: Routes of the three products by site.
            plain: Sites that in inference keep the parameter as it is, in its own layout.
            keep_classes: Whether a sequence stays a `BoundedSequential` without quantized inputs:
                if it was compiled as one, Dynamo would not enter the forward of an `nn.Sequential`.
            off_chains: Chains that are not used, by the names of their layers; None: as before.
            has_relus: Whether products may apply the relu behind them, and one op compute the
                gradients behind layers; None: as before.

        Returns:
            The products with another route, as ``site/gemm``.
        """
        changed = []
        self.plain = self.plain - routes.keys() | {name for name in routes if name in plain}
        for name, chosen in routes.items():
            module = self._modules[name]
            adopt(module)
            assert isinstance(module, Routed)  # all sites are
            site = self.sites.setdefault(name, Site(name, module))
            old = dict.fromkeys((r.gemm for r in chosen), "")
            old |= {r.gemm: r.text for r in site.routes}
            changed += [f"{name}/{r.gemm}" for r in chosen if r.text != old[r.gemm]]
            site.routes = chosen
        if off_chains is not None:
            self.off_chains = frozenset(off_chains)
        if self._main_grads is not None or self._delayed is not None:
            has_relus = False  # unknown to ops of these
        others = self.sites if has_relus not in (None, self.has_relus) else ()
        if has_relus is not None:
            self.has_relus = has_relus
        chains = {
            span.sites[0]: span.text(self.off_chains)
            for span in self.spans
            if isinstance(span.module, LinearNormAct)
        }
        for name in dict.fromkeys((*routes, *chains, *others)):
            self._apply(self.sites[name], chains.get(name, ""))
        set_fast_paths(self._owners)
        self._apply_handoffs(keep_classes)
        for owner in self._raw_owners():
            renew_products(owner, is_kept=keep_classes)
        self._apply_crosses(keep_classes)
        return changed

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        """The dtype in which a site multiplies: float16, or bfloat16."""
        weight = shape_of(module)[3].dtype
        return weight if weight in HALF else self._dtype

    def _raw_owners(self) -> list[nn.Module]:
        """Modules of users whose products with parameters of their own are sites."""
        raw = (m.owner[0] for m in self._modules.values() if isinstance(m, RawProduct))
        return list({id(x): x for x in raw if not isinstance(x, nn.MultiheadAttention)}.values())

    def _apply(self, site: Site, chain: str) -> None:
        """Apply the routes of a site, and a chain of a `LinearNormAct` alone."""
        budget = _budget_of(self._wanted)
        dtype = self.dtype_of(site.module)
        adds = None if self._main_grads is None else dtype
        texts = []
        for r in site.routes:
            text = in_dtype(r.text, dtype)
            if r.gemm == "grad_weight" and self._saves:
                text = saved(text)
            if self.has_switches:
                text = switched(text, self._switch_of(site.name, r.gemm))
            if self._delayed is not None:
                text = self._delayed.marked(site.name, text)
            if not (adds and r.gemm == "grad_weight"):  # a sum of products has no rows to check
                text = self._marker.mark(text, budget, f"{site.name}/{r.gemm}")
            texts.append(text)
        is_inference = self._inference and site.name not in self.plain
        form = self._form_at(site)
        apply_choice(site.module, Chosen(self._key, tuple(texts), is_inference, chain, form, adds))

    @property
    def _saves(self) -> bool:
        """Whether inputs are saved in FP8 where they can be."""
        return self._keeps_inputs and not self._why_not_saved

    @property
    def _why_not_saved(self) -> str:
        """What reads inputs unquantized, so that they are saved as they are, or ""."""
        if self._marker.is_on:
            return "products are checked"
        if not self.has_switches:
            return ""
        return (
            "a watch is under way" if self._watch else "a watch has ended: refresh the conversion"
        )

    def saved_inputs(self, m: int) -> list[dict[str, Any]]:
        """What sites save of m rows of input for the gradients of their weights, in bytes.

        Of those with a trained weight: "bytes_in_16_bits", "bytes_in_fp8" with
        ``keep_inputs="fp8"``, which is the same where the gradient of the weight reads no FP8 at m,
        and "bytes" as converted. An input of several readers counts for each of them: in 16 bits it
        is saved once for all, in FP8 once for all in compiled code, and once for each in eager
        calls, which then may need more memory than in 16 bits.

        Raises:
            ShapeError: ``m`` is no positive integer.
        """
        if type(m) is not int or m < 1:
            raise ShapeError(f"saved_inputs: m is {m!r}; expected at least 1 row")
        return [x.row(m) for x in self._kept_inputs()]

    def _kept_inputs(self) -> list[KeptInput]:
        sites = [] if self._inference else list(self.sites.values())
        saving = {
            site.name for site in sites
            if any(SAVED in route for c in self._chosen_for(site) for route in c.routes)
        }  # fmt: skip
        return kept_inputs(sites, saving)

    def _notes_of_inputs(self, names: Collection[str]) -> list[str]:
        """What the inputs of some sites are saved in, and why."""
        found = [x for x in self._kept_inputs() if x.site in names]
        if not self._keeps_inputs or not found:
            return []
        words = [f"input of {x.site}: {x.words}" for x in found]
        is_any = any(after < before for before, after in (x.per_sample for x in found))
        why = self._why_not_saved
        return words + ([f"inputs saved in 16 bits: {why}"] if why else [READERS] * is_any)

    def _form_of(self, module: Routed) -> str:
        """The form of a layer in compiled code."""
        is_wanted = self.has_relus and self._between and not isinstance(self._wanted, Forced)
        if not is_wanted or not isinstance(module, Linear):
            return ""
        form = module.joined if isinstance(module, LinearNormAct) else ""
        form = form or form_of(module)
        if self._inference and form != DOT:
            return ""
        form = LOGIT if form == DOT and self._wanted is not None else form
        is_timed = form and dispatcher.is_timed(GRADIENT_KERNEL, self._device_for(module.weight))
        return form if is_timed else ""

    def _apply_handoffs(self, keep_classes: bool) -> None:
        """Set in sequences which inputs are quantized before their layers, and their chains."""
        is_wanted = self._between and not isinstance(self._wanted, Forced)
        self._untimed.clear()
        placed = placed_chains(self.spans, self.off_chains)
        for sequence in self.sequences:
            weight = next(sequence.parameters(), None) if is_wanted else None
            modules, chains = chains_at(sequence, placed)
            scales, activating = ("",) * len(modules), [""] * len(modules)
            rectified: tuple[str, ...] = ()
            joined: tuple[str, ...] = ()
            if weight is not None:
                device = self._device_for(weight)
                has_relus, is_joined = self._rules_for(device)
                if has_relus:
                    rectified = rectified_between(modules)
                if is_joined:
                    joined = joined_between(modules)
                scales = self._scales_of(modules, device)
                found = activations_between(modules, scales) if self._inference else {}
                for place, (name, reader) in found.items():
                    k = reader.in_features
                    route = activating_route(device, k, name, m_range=self._m_range)
                    if not route:
                        self._untimed.add((reader.out_features, k, name))
                        continue
                    route = without_chain(route, chains[place + 1])
                    if route and has_activator(route, reader._routes[0], k):
                        activating[place] = route
            was_told = isinstance(sequence, BoundedSequential)
            remove_handoff(sequence, self._key)
            is_told = isinstance(sequence, BoundedSequential)  # by another conversion
            if (
                is_told
                or (was_told and keep_classes)
                or (
                    type(sequence) is nn.Sequential
                    and any((*scales, *activating, *chains, *rectified, *joined))
                )
            ):
                set_handoff(
                    sequence, scales, activating, self._key, chains, rectified, joined, modules
                )

    def _rules_for(self, device: Device) -> tuple[bool, bool]:
        """Whether products may apply relus on a device, and one op compute gradients."""
        is_trained = self.has_relus and not self._inference
        return (
            self.has_relus and dispatcher.is_timed(RELU_KERNEL, device),
            is_trained and dispatcher.is_timed(GRADIENT_KERNEL, device),
        )

    def _tails_of(self, module: nn.Module, *, keeps_off: bool) -> list[Tail]:
        """The layers with tails that a module calls, all without plans where tuning decided so.

        With ``keeps_off`` layers of a chain that is off stay one call.
        """
        inlined = self._inlined.get(id(module))
        if inlined is None and all(module is not x for x in self._all_callers):
            return []
        names = () if inlined is None else inlined.names
        try:
            parts = [module, *map(module.get_submodule, names)]
        except AttributeError:  # a child was removed since
            return []
        children = [x for part in parts for x in children_of(part) if x is not None]
        layer = next((x for x in leaves(children) if is_linear(x)), None)
        if not self._between or isinstance(self._wanted, Forced) or layer is None:
            return []
        has_relus, is_joined = self._rules_for(self._device_for(layer.weight))
        spans = [x for x in self.spans if isinstance(x, TailSpan) and x.module is module]
        chains = [tail for span in spans for tail in span.tails(self.off_chains)]
        # Chains that a forward around this one replaces are off where one of its own is: with that
        # alone a step was timed, and the loss computed.
        inner = [x for x in self._inner_spans if x.module is module]
        given_up = {site for sites in self.off_chains for site in sites}
        every = [span.sites_of(chain) for span in inner for chain in span.plan.chains]
        off = [sites for sites in every if not given_up.isdisjoint(sites)]
        chains += [tail for span in inner for tail in span.tails(off)]
        if not keeps_off:
            chains = [tail for tail in chains if tail.chain]
        if id(module) not in self._tails and not (has_relus or is_joined or chains):
            return []
        found = self._tails_found_in(module) if inlined is None else inlined.tails
        try:
            tails = planned_tails(found, module, has_relus=has_relus, is_joined=is_joined)
        except AttributeError:  # a child was removed since
            return []
        plans = {tail.names: tail.chain for tail in chains}
        alone = {tail.names for tail in tails}
        runs = [tail for tail in chains if tail.names not in alone]
        taken = {name for run in runs for name in run.names}
        return [
            *(x._replace(chain=plans.get(x.names, "")) for x in tails if x.names[0] not in taken),
            *runs,
        ]

    def _tails_found_in(self, module: nn.Module) -> list[FoundTail]:
        """The layers with tails in the forward of a module, which is traced once."""
        if id(module) not in self._tails:
            self._tails[id(module)] = found_tails(module)
        return self._tails[id(module)]

    @property
    def main_grads(self) -> MainGrads:
        """What adds up in ``weight.main_grad``, and the calls for ranks and optimizers.

        Raises:
            UnsupportedError: The model was converted without ``main_grads=True``, or the conversion
                was undone.
        """
        if self._main_grads is None or not self._modules:
            raise UnsupportedError(
                "main_grads: the model was converted without main_grads=True, or the conversion "
                "was undone; gradients are in weight.grad"
            )
        return self._main_grads

    @property
    def delayed_scaling(self) -> DelayedScaling:
        """The scales of earlier steps, and the call that renews them after each step.

        Raises:
            UnsupportedError: The model was converted without ``scaling="delayed"``, or the
                conversion was undone.
        """
        if self._delayed is None or not self._modules:
            raise UnsupportedError(
                "delayed_scaling: the model was converted without scaling='delayed', or the "
                "conversion was undone; scales are dynamic"
            )
        return self._delayed

    @property
    def rectified(self) -> dict[str, str]:
        """Names of sites whose product may apply the relu behind it, and its route."""
        return self._between_sites("rectified")

    @property
    def joined(self) -> dict[str, str]:
        """Names of sites with what is behind them whose gradients one op computes, as text."""
        alone = {name: form for name, form in self._forms_at().items() if not _is_of_layer(form)}
        return self._between_sites("joined") | alone

    @property
    def forms(self) -> dict[str, str]:
        """Names of sites with a form in compiled code, see `lokakern.nn.compiled_form`."""
        return {name: form for name, form in self._forms_at().items() if _is_of_layer(form)}

    def _forms_at(self) -> dict[str, str]:
        """The forms of sites by name, those of a `LinearNormAct` with joined gradients, too."""
        return {
            name: form for name, site in self.sites.items()
            for form in (chosen.form for chosen in self._chosen_for(site)) if form
        }  # fmt: skip

    def _between_sites(self, column: str) -> dict[str, str]:
        """The texts of a column of the newest handoffs and tails, by the names of sites."""
        names = {id(site.module): site.name for site in self.sites.values()}
        found = {
            names[id(module)]: text
            for sequence in self.sequences
            if isinstance(sequence, BoundedSequential) and sequence.is_as_known
            for handoff in sequence._handoffs[-1:]
            for module, text in zip(handoff.modules, getattr(handoff, column), strict=True)
            if text and id(module) in names
        }
        for module in self._changed_callers:
            crossed = crossed_of(module)
            for tail in crossed.tails if crossed is not None and crossed.is_as_traced else ():
                layer, text = module.get_submodule(tail.names[0]), getattr(tail, column)
                if text and id(layer) in names:
                    found[names[id(layer)]] = text
        return found

    def _apply_crosses(self, keep_classes: bool) -> None:
        """Set the chains of crosses, and plans of tails, in the modules that call their layers."""
        for module in self._changed_callers:
            crosses = [
                cross for span in self.spans
                if isinstance(span, CrossSpan) and span.module is module
                for cross in span.crosses(self.off_chains)
            ]  # fmt: skip
            tails = self._tails_of(module, keeps_off=keep_classes)
            crossed = crossed_of(module)
            is_of_others = crossed is not None and {x.key for x in crossed.settings} != {self._key}
            # In tuning a traced forward stays, because compiled graphs are of it.
            is_kept = crossed is not None and bool(crosses or tails) and keep_classes
            plans = [*(plan for _, plan in crosses), *(tail.plan for tail in tails)]
            if any(plans) or is_of_others or is_kept:
                try:
                    inlined = self._inlined.get(id(module))
                    names = () if inlined is None else inlined.names
                    set_crosses(module, crosses, self._key, tails, names)
                except UnsupportedError:  # the module was changed since a refresh
                    if crosses:
                        raise
                    remove_crosses(module, self._key)
            else:
                remove_crosses(module, self._key)

    def tune(
        self,
        step: Callable[[], object],
        *,
        graph: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        rounds: int = 64,
        time_limit: float | None = None,
    ) -> Tuning:
        """Time a step of the model, and keep only products that make it faster.

        Times in the database are of products alone. Here ``step`` runs as it will be used: with
        some layers as chosen and as `nn.Linear`, in turn. Layers that are alike form a group. A
        group is kept if the interval of its gain in time is above 1. At the end the outcome is
        timed against no FP8 at all; if it does not gain, every product of the step is that of
        `nn.Linear`, to the bit. So is a layer that runs no kernel at the rows of the step. ``step``
        may be compiled: each variant is then compiled, which takes most of the time. The outcome
        holds for other numbers of rows, too, where it was not timed.

        Tuning again starts from what `convert` or `refresh` chose.

        Parameters, buffers, gradients and torch's random numbers are as before afterwards; what
        else the step changes, it changes as often as it is called.

        Args:
            step: A function without arguments that runs one step on the current stream, such as a
                forward pass, or forward and backward. If it calls an optimizer, pass that too.
            graph: Whether to capture the step in CUDA graphs, and time their replays.
            optimizer: The optimizer that the step calls, whose state is restored.
            rounds: Most rounds of a comparison, each of four times, at least 8.
            time_limit: Seconds after which no further group is tried: groups of the least predicted
                gain are then decided together, or only by the outcome. A comparison that is not
                finished then is cut off at the next call of the step, and the choices of `convert`
                stay, if they gained in the first one. None: 150 in inference, 300 in training,
                after which comparisons are finished.

        Returns:
            The outcome: a table, and `save` for ``convert(..., tuned=)``.

        Raises:
            MeasurementError: The step cannot be captured, ``rounds`` is less than 8, or
                ``time_limit`` passed before the first comparison had 8 rounds.
            UnknownNameError: The conversion was undone.
            UnsupportedError: Kernels are emulated here, as on a CPU, whose times say nothing of a
                GPU; the conversion has delayed scaling; or torch.distributed has several ranks,
                which would decide differently.
        """
        self._refuse_while_watched("tune")
        self._refuse_delayed("tune", "its steps would record the amax of every variant")
        if self.turned_off:
            raise UnsupportedError(
                f"tune: a watch turned off {len(self.turned_off)} products: choose again first "
                "(refresh), by a report of their operands now"
            )
        return tune(
            self, step, graph=graph, optimizer=optimizer, rounds=rounds, time_limit=time_limit
        )

    def limit_loss(
        self,
        loss: Callable[[Any], Tensor | float],
        batches: Sequence[Any],
        *,
        relative: float = 2e-4,
    ) -> LossLimit:
        """Give up products in FP8 until a loss of the model rises no more than this.

        An error limit holds for one product; this is about what all of them do together. Each layer
        and chain runs alone in FP8 on one half of the batches. Those whose losses together stay
        within the limit are kept, with the largest gain in time by the database, and then measured
        together: the upper end of the 95 % interval of the mean change, against the same batches
        without FP8, has to be within the limit on this half and on the other one. If it is not,
        fewer are kept. In predictions only: what errors of gradients do, shows only in training.

        It starts from what `convert` or `refresh` chose, so that a tuning is forgotten; ``tune``
        afterwards tries what is left. What runs at other numbers of rows than those of the batches
        is not judged: a product goes at all or none. One that is quantized at none of them stays,
        and the outcome names it.

        Args:
            loss: From a batch to its mean loss, by the model, which runs without torch.compile.
            batches: At least 4. The second half only accepts or rejects a set.
            relative: Largest accepted rise of the loss, over its size.

        Returns:
            The outcome: a table, and `save` for ``convert(..., tuned=)``.

        Raises:
            MeasurementError: There are fewer than 4 batches, ``relative`` is not above 0, or the
                loss is not one finite number of float32 or more, differs between two runs of a
                batch, or calls no converted layer.
            UnknownNameError: The conversion was undone.
            UnsupportedError: The conversion is for training, the operands are not multiplied in the
                dtype that it is for, so that nothing runs in FP8, or torch.distributed has several
                ranks, which would decide differently.
        """
        return limit_loss(self, loss, batches, relative)

    def watch(
        self,
        report: ProbeReport | None = None,
        *,
        budget: ErrorBudget | float | None = None,
        every: int = 200,
        callbacks: Sequence[Callable[[DriftEvent], None]] = (),
        seed: int = 0,
    ) -> DriftWatch:
        """Watch a training run: products run unquantized while FP8 rounds their operands too badly.

        ::

            with lokakern.convert(model, report).watch(callbacks=[print]):
                ...  # compile and train

        Every ``every``-th step is sampled, as by `lokakern.Probe`, and where a sample leaves the
        usual range of a site, one more after a fifth of ``every``. Where two samples in a row leave
        it, Probe judges the site anew in a thread of its own, and products
        whose kernels are not safe any more run as in nn.Linear until another judgement finds them
        safe. In the regime "compiled" compiled graphs do not change for that; routes keep what this
        needs, and inputs are saved in 16 bits in spite of ``keep_inputs``, until `refresh` after
        the end, which compiles again. In those of CUDA
        graphs they are compiled, and captured by the compiler, again, and what the program captured
        itself it has to capture again, as in a callback.

        Args:
            report: What is usual; None: the report of the conversion. Without either each site is
                judged once on its first sample.
            budget: The largest error that is safe, as of `ProbeReport.of`; None: that of the
                report, or of the conversion.
            every: Steps from one sample to the next.
            callbacks: Called with each `DriftEvent`, in the thread of the training. Events are also
                logged, by the logger ``lokakern.conversion.drift_watch``.
            seed: Of the choice of rows.

        Returns:
            A context manager; `DriftWatch.start` and `DriftWatch.stop` do the same. Begin before
            the model is compiled.

        Raises:
            UnsupportedError: The conversion is for inference, was undone, is being watched or has
                delayed scaling, there is no budget or one that Probe cannot judge by, the report is
                of products in another dtype, or there are several ranks.
            ShapeError: ``every`` is below 1.
        """
        from lokakern.conversion.drift_watch import DriftWatch  # it imports Probe

        self._refuse_while_watched("watch")
        self._refuse_undone()
        self._refuse_delayed("watch", "it judges dynamic scales")
        if report is None and isinstance(self._wanted, ProbeReport):
            report = self._wanted
        for verdict in report or ():
            site = self.sites.get(verdict.site)
            if site is None or not any(route.text for route in site.routes):
                continue
            half = Format.of(self.dtype_of(site.module)).value
            if verdict.dtype != half:
                raise UnsupportedError(
                    f"watch: {verdict.site} multiplies in {half}, and the report judges it in "
                    f"{verdict.dtype}: probe the model in {half}, or make a report of the same "
                    f"statistics by report(dtype=torch.{half})"
                )
        limit = report.budget if report is not None else _budget_of(self._wanted)
        limit = limit if budget is None else budget_of(budget)
        if limit is None:
            raise UnsupportedError(
                "watch: the conversion has no budget to judge by: pass budget=, such as 0.06"
            )
        return DriftWatch(self, report, limit, every, callbacks, seed)

    def begin_watch(self, watch: DriftWatch) -> None:
        """Give the routes of products switches; for `DriftWatch`."""
        self._refuse_while_watched("watch")
        self._refuse_undone()
        newer = [name for name in self.sites if not self.determines(name)]
        if newer:
            raise UnsupportedError(
                f"watch: a newer conversion determines the kernels of {', '.join(newer)}: watch "
                "that one, or undo it"
            )
        has_scales = self._has_scales
        self._watch = watch
        try:
            if has_scales:
                self._apply_handoffs(keep_classes=True)
                self._apply_crosses(keep_classes=True)
            if self.regime == COMPILED and not self.has_switches:
                self.has_switches = True
                routes = {name: site.routes for name, site in self.sites.items()}
                self.use_routes(routes, self.plain, keep_classes=True)
        except BaseException:
            self._watch = None
            raise

    def end_watch(self) -> None:
        """Allow other changes again; for `DriftWatch`."""
        self._watch = None
        # Of sequences that a newer conversion determines it does.
        if self._has_scales and all(map(self.determines, self.sites)):
            self._apply_handoffs(keep_classes=True)
            self._apply_crosses(keep_classes=True)

    @property
    def _has_scales(self) -> bool:
        """Whether inputs in a sequence have static scales."""
        placed = placed_chains(self.spans, self.off_chains)
        for sequence in self.sequences:
            weight = next(sequence.parameters(), None)
            modules, _ = chains_at(sequence, placed)
            if weight is not None and any(self._scales_of(modules, self._device_for(weight))):
                return True
        return False

    def turn(self, places: Sequence[tuple[str, str]], is_on: bool) -> None:
        """Turn products, by site and GEMM, off or on; for `DriftWatch`."""
        originals = {}
        for place in places:
            route = next(r for r in self.sites[place[0]].routes if r.gemm == place[1])
            if is_on:
                originals[place] = self.turned_off.pop(place, route)
            else:
                self.turned_off.setdefault(place, route)
        if self.has_switches:
            turn([self._switch_of(*place) for place in places], is_on)
            return

        def now(name: str, route: Route) -> Route:
            if (name, route.gemm) in self.turned_off:
                return as_plain(route, "a watch found its operands unsafe")
            return originals.get((name, route.gemm), route)

        self.use_routes(
            {
                name: tuple(now(name, route) for route in self.sites[name].routes)
                for name in dict.fromkeys(name for name, _ in places)
            },
            keep_classes=True,
        )

    def determines(self, site: str) -> bool:
        """Whether this conversion, and no newer one, determines the kernels of a site."""
        choices = self.sites[site].module._choices
        return bool(choices) and choices[-1].key == self._key

    def _forget_watches(self) -> None:
        """Turn on what watches turned off, without switches: routes are chosen anew, or removed."""
        if self.has_switches:
            turn([self._switch_of(name, gemm) for name in self._modules for gemm in GEMMS], True)
        self.turned_off, self.has_switches = {}, False

    def _switch_of(self, site: str, gemm: str) -> str:
        """Name of the switch of a product."""
        return f"{self._key[:12]}.{list(self._modules).index(site)}.{gemm}"

    def _refuse_undone(self) -> None:
        if not self._modules:
            raise UnsupportedError("watch: the conversion was undone; convert the model again")

    def _refuse_delayed(self, what: str, why: str) -> None:
        if self._delayed is not None:
            raise UnsupportedError(
                f"{what}: the conversion has delayed scaling, and {why}: use a conversion with "
                "dynamic scaling for it"
            )

    def _refuse_while_watched(self, what: str) -> None:
        if self._watch is not None:
            raise UnsupportedError(f"{what}: the model is being watched: stop the watch first")

    @property
    def device(self) -> Device | None:
        """The device whose times were asked for; None: that of the weights."""
        return None if self._device is None else dispatcher.device_named(self._device)

    @property
    def is_inference(self) -> bool:
        """Whether weights are quantized once."""
        return self._inference

    @property
    def model(self) -> nn.Module:
        """The converted model.

        Raises:
            UnknownNameError: It was deleted, or the conversion undone.
        """
        model = self._model()
        if model is None or not self._modules:
            raise UnknownNameError("the conversion was undone, or its model deleted")
        return model

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
                handoff.modules, handoff.scales, ("", *handoff.activating[:-1]), strict=True
            )
            if any(known) and id(module) in names  # other sites belong to another conversion
        ]
        return list(dict.fromkeys(found))

    def _chosen(
        self, wanted: Wanted | Forced, m_range: MRange | None
    ) -> dict[str, tuple[Route, ...]]:
        found: dict[str, tuple[Route, ...]] = {}
        known: dict[Any, tuple[Route, ...]] = {}  # layers often have the same sizes
        for name, module in self._modules.items():
            assert isinstance(module, nn.Linear | Routed)  # all sites are
            n, k, has_bias, weight = shape_of(module)
            is_turned = isinstance(module, RawProduct) and module.matrix.is_turned
            device = self._device_for(weight)
            if getattr(module, "is_mixing", False):
                found[name] = tuple(Route(gemm, PLAIN, MIXING) for gemm in GEMMS)
                continue
            by = _source_of(wanted, name, self._distributions)
            if isinstance(by, Judge):
                by = replace(by, regime=self.regime)
            can_pad = Pad().takes(module)
            half = Format.of(self.dtype_of(module))
            key = (n, k, has_bias, device, by, is_turned, can_pad, half)
            if key not in known:
                known[key] = self._routes_by(
                    by, n, k, has_bias, device, name, is_turned, can_pad, m_range, half
                )
            found[name] = known[key]
        return found

    def _host_of(self, chosen: Mapping[str, tuple[Route, ...]]) -> StepHost | None:
        """The host of a training step; None if nothing is quantized or its cost is unknown.

        None for a layer alone, too: the model that it is a part of is unknown.
        """
        routes = [route for routes in chosen.values() for route in routes]
        if not any(route.text for route in routes) or "" in chosen:
            return None
        weight = shape_of(next(iter(self._modules.values())))[3]
        return host_of_step(routes, self._device_for(weight), self.regime)

    def _routes_by(
        self, by: Judge | Forced, n: int, k: int, has_bias: bool, device: Device, site: str,
        is_turned: bool, can_pad: bool, m_range: MRange | None, half: Format,
    ) -> tuple[Route, ...]:  # fmt: skip
        if isinstance(by, Forced):
            return forced_routes(
                n, k, by, device, has_bias=has_bias, inference=self._inference,
                m_range=m_range, site=site, is_turned=is_turned, half=half,
            )  # fmt: skip
        return routes_of(
            n, k, by, device, has_bias=has_bias, inference=self._inference,
            m_range=m_range, forms=self._forms, is_turned=is_turned, can_pad=can_pad,
            half=half,
        )  # fmt: skip

    @property
    def choices(self) -> list[dict[str, Any]]:
        """One row for each product of each site, and for each chain, as plain data.

        "eager_choice" is what eager calls run, which differs from "choice" and its times where a
        compiler pads rows.
        Chains have gemm "chain", the names of their layers, n of the last layer, k of the first
        one, and "rival_us": the time without the chain at each m.
        """
        rows = []
        for site in self.sites.values():
            n, k, _, _ = shape_of(site.module)
            texts = tuple(route.text for route in site.routes)
            plain = "float16" if self.dtype_of(site.module) is torch.float16 else "bf16"
            off = f"{plain}, {OFF}"
            is_there = texts in [tuple(map(kernels_of, c.routes)) for c in self._chosen_for(site)]
            routes = site.routes
            if not is_there:
                routes = tuple(Route(route.gemm, PLAIN, _RESIZED) for route in routes)
            for route in routes:
                is_off = (site.name, route.gemm) in self.turned_off
                traced = traced_route(route.text)
                timed = [c for c in route.choices if c.latency_us is not None]
                times = [_time_of(route, c) for c in timed]
                rows.append(
                    {
                        "site": site.name, "gemm": route.gemm, "n": n, "k": k,
                        "choice": off if is_off else _summary(route, traced, plain),
                        "eager_choice": off if is_off else _summary(route, route.text, plain),
                        "m": [route.rows_at(c) for c in timed],
                        "us": [t and t.latency_us for t in times],
                        "host_us": [t and t.host and t.host.us for t in times],
                        "why": route.why,
                    }
                )  # fmt: skip
        return rows + [row for span in self.spans for row in chain_rows(span, self.off_chains)]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Results of ``check=`` for each product, see `lokakern.sampled_check.results`.

        Products that never ran in FP8 have no row, such as those without a kernel at m.
        """
        chosen = (c for site in self.sites.values() for c in self._chosen_for(site))
        return sampled_check.results(route for c in chosen for route in c.routes)

    def _chosen_for(self, site: Site) -> list[Chosen]:
        """The choices of this conversion in a layer, also if a newer one determines its routes."""
        return [c for c in site.module._choices if c.key == self._key]

    def table(self) -> None:
        """Print a table of the choices, in inference without gradients."""
        from lokakern.render.terminal import print_rows

        rows = [row for row in self.choices if row["why"] != NO_GRADIENTS]
        left_out = {"m", "us", "host_us", "rival_us"}
        if all(row["eager_choice"] == row["choice"] for row in rows):
            left_out.add("eager_choice")
        rows = [{k: v for k, v in row.items() if k not in left_out} for row in rows]
        notes = self._reasons()
        notes += self._chain_notes()
        if self.rectified:
            notes.append(f"{RELU_KERNEL} applies the relu behind {', '.join(self.rectified)}")
        if self.joined:
            notes.append(
                f"compiled training: {GRADIENT_KERNEL} computes gradients of biases and of what is "
                f"behind {', '.join(_joined_words(*x) for x in self.joined.items())}"
            )
        if dots := [name for name, form in self.forms.items() if form in (DOT, LOGIT)]:
            notes.append(f"compiled code: sums over products of elements in {', '.join(dots)}")
        if behind := [name for name, form in self.forms.items() if BEHIND_CROSS in form]:
            notes += [
                f"compiled training: {words.format(', '.join(names))}"
                for words, names in _by_words(self._behind_crosses, behind).items()
            ]
        if any(form.startswith(SUMS) for form in self.forms.values()):
            notes.append(
                "compiled training: gradients of biases are summed apart where the compiler's "
                "kernel would not read along rows"
            )
        notes += self._notes_of_inputs(self.sites)
        notes += [f"{name} is unchanged: {why}" for name, why in self.skipped.items()]
        note = "\n".join(notes)
        print_rows(rows, "table", title=repr(self), note=note)

    def _reasons(self) -> list[str]:
        """By what kernels were chosen: the regime, and host costs or why there are none."""
        if isinstance(self._wanted, Forced):
            return [f"kernels were {FORCED}"]
        routes = [route for site in self.sites.values() for route in site.routes]
        hosts = dict.fromkeys(c.table.host for route in routes for c in route.choices)
        of_bfloat16 = "times are those with bfloat16, which has as many bytes"
        if not isinstance(self._wanted, ProbeReport):
            of_bfloat16 += (
                "; kernels also need errors with float16: sweep the suite that handle.suite(m) "
                "writes"
            )
        return [
            f"kernels were chosen by times of regime {self.regime} ({_RUNS[self.regime]})",
            *[f"float16: {of_bfloat16}"] * any(route.is_of_bfloat16 for route in routes),
            *(f"host cost: {words}" for words in (*hosts, self._step_host) if words),
        ]

    def _chain_notes(self) -> list[str]:
        """Why spans of layers have no chains."""
        if self.why_no_chains and self._inference:
            return [f"no chains: {self.why_no_chains}"]
        whys = {span.plan.why for span in self.spans if span.plan.why}
        return [
            f"no chain of {', '.join(s.words for s in self.spans if s.plan.why == why)}: {why}"
            for why in sorted(whys)
        ]

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
            module.changed()
        try:
            yield
        finally:
            for module, kept in zip(modules, before, strict=True):
                if kept is None:  # else an outer block continues
                    vars(module).pop("_kept", None)  # also after an undo in the block
                    if isinstance(module, Routed):
                        module.changed()

    def offload(self, device: torch.device | str = "cpu", *, m_range: MRange | None = None) -> int:
        """Move weights of FP8 products in inference to another device.

        A state_dict stays the same, `load_state_dict` quantizes again, and `refresh` and `undo`
        move weights back. Nothing else may read these weights; capture graphs afterwards. At m
        outside the range such a layer multiplies in bfloat16 by its dequantized weight, which takes
        time in each call and has a smaller error than the FP8 product. Layers that are fused, share
        a weight, are part of a chain, or run in bfloat16 at one of these m are not moved.

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
        stay |= {
            id(self._modules[name]) for sites in chain_texts(self.spans)
            if sites not in self.off_chains for name in sites
        }  # fmt: skip
        freed = 0
        for site in self.sites.values():
            module = site.module
            if not isinstance(module, Linear) or not site.routes or id(module) in stay:
                continue
            at = [c.problem.m for c in site.routes[0].choices if c.latency_us is not None]
            at = at or list(self._m_range or _BOTH)  # of forced kernels, which were not timed
            if m_range is not None:
                at = [*m_range, *(m for m in at if m_range[0] <= m <= m_range[1])]
            if all(kernel_at(traced_route(site.routes[0].text), m) for m in at):
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

    def explain(self, name: str | None = None, *, m: int | None = None) -> str:
        """The reasons for each product of a site, or of all sites, kernel by kernel.

        At every measured m, which is long; or with ``m`` at that number of rows alone, where the
        gradient of a weight has reasons only if it was measured or predicted there.

        In inference also its chain, with the times of chain and rival at each m, or why there is
        none. The rival is what runs without the chain, for each layer the faster of the unquantized
        layer and of the layer as converted.

        Raises:
            UnknownNameError: The site is unknown.
        """
        if name is not None and name not in self.sites:
            raise UnknownNameError(
                f"explain: no site {name!r}; expected one of {', '.join(self.sites)}"
            )
        sites = self.sites.values() if name is None else [self.sites[name]]
        products = [f"{s.name}: {r.explain(m)}" for s in sites for r in s.routes]
        products += [
            f"{s.name}: {found.explain(is_off=BEHIND_CROSS not in self.forms.get(s.name, ''))}"
            for s in sites if (found := self._behind_crosses.get(s.name)) is not None
        ]  # fmt: skip
        products += self._notes_of_inputs({s.name for s in sites})
        is_forced = isinstance(self._wanted, Forced)  # which each product tells
        chains = [
            span.explain(self.off_chains)
            for span in self.spans
            if name is None or name in span.sites
        ]
        chains += [
            f"{sites}: no cross is a chain: {why}"
            for sites, why in self.left_crosses.items() if name is None or sites == name
        ]  # fmt: skip
        if self.why_no_chains and self._inference:
            chains = [f"no chains: {self.why_no_chains}"]
        return "\n".join([*([] if is_forced else self._reasons()), *products, *chains])

    def suite(self, m: Sequence[int], name: str = "model") -> str:
        """Missing measurements of this model as a suite, TOML for ``sweep --suite FILE``.

        They are those of products without a time at m, measured or between measured m, as of
        ``explain --missing``; of their padded sizes, where n or k is no multiple of 8 and
        `mods.Pad` would pad the layer; and those of activations, of gradients behind crosses and of
        layers that may be part of a chain, which `explain` does not know.

        With forced kernels, for which no measurements were looked up, these are all products.

        Args:
            m: Numbers of rows to measure.
            name: Name of the suite.

        Returns:
            "" if nothing is missing.
        """
        missing: dict[_Sizes, dict[str, list[int]]] = {}  # m of each form
        for rows in m:
            for sizes, forms in self._unmeasured_at(rows).items():
                of_sizes = missing.setdefault(sizes, {})
                for form in forms:
                    of_sizes.setdefault(form, []).append(rows)
        layers, in_float16 = [], f"format = {json.dumps(Format.FLOAT16.value)}\n"
        for (n, k, has_bias, half), of_sizes in missing.items():
            more = "bias = true\n" * has_bias
            more += f"format = {json.dumps(half.value)}\n" * (half is not Format.BFLOAT16)
            for at in dict.fromkeys(map(tuple, of_sizes.values())):
                forms = [form for form, every in of_sizes.items() if tuple(every) == at]
                layers.append(
                    f"[[layer]]\nm = {list(at)}\nn = {n}\nk = {k}\n{more}"
                    f"forms = {json.dumps(forms)}\n"
                )
        layers += [
            f"[[layer]]\nm = {list(m)}\nn = {n}\nk = {k}\nactivation = {json.dumps(activation)}\n"
            'forms = ["activate"]\n'
            for n, k, activation in sorted(self._untimed)
        ]
        unmeasured = {
            (*layer, span.found[0].linear.weight.dtype is torch.float16)
            for span in self.spans for layer in span.plan.missing
        }  # fmt: skip
        layers += [
            f"[[layer]]\nm = {list(m)}\nn = {n}\nk = {k}\nepilogue = {json.dumps(epilogue)}\n"
            f'{is_half * in_float16}forms = ["chain"]\n'
            for n, k, epilogue, is_half in sorted(unmeasured)
        ]
        return "\n".join([f"name = {json.dumps(name)}\n", *layers]) if layers else ""

    def _unmeasured_at(self, m: int) -> dict[_Sizes, list[str]]:
        """Forms of products without a time at m, as in a file of layers, by sizes."""
        is_forced = isinstance(self._wanted, Forced)
        chosen = {} if is_forced else self._chosen(self._wanted, (m, m))
        missing: dict[_Sizes, list[str]] = {}
        for site in self.sites.values():
            if site.module.is_mixing:
                continue
            n, k, has_bias, weight = shape_of(site.module)
            turned = isinstance(site.module, RawProduct) and site.module.matrix.is_turned
            device = self._device_for(weight)
            with_bias = has_bias and (self._inference or not turned)  # else no suite has it
            with_bias = with_bias and measures_bias(m, n, k, device, self.regime)
            routes = chosen.get(site.name, site.routes)
            for route in routes[: 1 if self._inference else None]:
                if route.choices and not (route.is_predicted or route.is_of_bfloat16):
                    continue
                gemm, sizes = route.gemm, (n, k)
                if turned and not self._inference and gemm in _TURNED:
                    gemm, sizes = _TURNED[gemm], (k, n)
                half = Format.of(self.dtype_of(site.module))
                forms = missing.setdefault((*sizes, with_bias, half), [])
                wanted = ("gemm", "prepared") if self._inference else ("gemm",)
                wanted = wanted if gemm == "output" else (gemm,)
                forms += [form for form in wanted if form not in forms]
        for (n, k, has_bias, half), forms in list(missing.items()):
            for wide, of_wide in with_padded_sizes(n, k, forms).items():
                is_wide_with = has_bias and measures_bias(m, *wide, device, self.regime)
                also = missing.setdefault((*wide, is_wide_with, half), [])
                also += [form for form in of_wide if form not in also]
        for _, layer in self._last_layers(self._wanted):
            n, k, _, weight = shape_of(layer)
            if lacks_time(m, n, self._device_for(weight), self.regime):
                missing[n, k, False, Format.BFLOAT16] = [
                    *missing.get((n, k, False, Format.BFLOAT16), ()), "cross_gradient"
                ]  # fmt: skip
        return missing

    def undo(self) -> None:
        """Restore the class of every layer; parameters stay.

        Conversions and mods can be undone in any order: the newest remaining conversion determines
        the kernels of a layer. A second call does nothing.
        """
        self._refuse_while_watched("undo")
        self._forget_watches()
        for site in self.sites.values():
            remove_choice(site.module, self._key)
        if self._delayed is not None:
            self._delayed.forget()
        for sequence in self.sequences:
            remove_handoff(sequence, self._key)
        for module in self._changed_callers:
            remove_crosses(module, self._key)
        for owner in self._raw_owners():
            renew_products(owner)
        set_fast_paths(self._owners)
        self.sites, self._modules, self.sequences, self._owners = {}, {}, [], []
        self.fused, self.callers, self.spans, self.left_crosses = [], [], [], {}
        self._block_callers, self._outer_callers = [], []
        self._inner_spans, self._tails, self._inlined = [], {}, {}

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        routes = [r for site in self.sites.values() for r in site.routes if r.why != NO_GRADIENTS]
        count = sum(bool(traced_route(route.text)) for route in routes)
        in_eager = sum(bool(route.text) for route in routes) - count
        words = f", {in_eager} more in eager calls only" if in_eager else ""
        handed = len(self.handed_over)
        words += f", {handed} inputs quantized ahead" if handed else ""
        chains = [
            chain for span in self.spans for chain in span.plan.chains
            if span.sites_of(chain) not in self.off_chains
        ]  # fmt: skip
        if chains:
            layers = sum(len(chain.layers) for chain in chains)
            words += f", {len(chains)} {'chain' if len(chains) == 1 else 'chains'}"
            words += f" of {layers} {'layer' if layers == 1 else 'layers'}"
        products = f"{count} of {len(routes)} products quantized"
        needs_autocast = any(
            shape_of(site.module)[3].dtype is torch.float32
            for site in self.sites.values() if any(traced_route(r.text) for r in site.routes)
        )  # fmt: skip
        products += f" under {Format.of(self._dtype).value} autocast" * needs_autocast
        if self._delayed is not None and self._modules:
            words += f", {len(self._delayed.products)} by delayed scaling"
        if self._keeps_inputs and self._modules:
            words += f", {total(self._kept_inputs(), self._why_not_saved)}"
        if isinstance(self._wanted, Forced):
            words += f", kernels {FORCED}"
        else:
            words += f", regime {self.regime}"
        return f"Conversion({len(self.sites)} sites, {products}{words})"


_BOTH = (16, 17)  # an m that 16 divides, and one that it does not
_RESIZED = "a mod was undone, which changed the sizes: refresh, or convert the model again"
# A product with a weight [k, n] is another one of a layer with k outputs and n inputs.
_TURNED = {"output": "grad_input", "grad_input": "output"}


def _sites_of(
    model: nn.Module,
    raw: Mapping[str, nn.Module],
    accepts: ModuleFilter | None,
    skip: Sequence[str],
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    found: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    inner, uncalled = inner_layers(model), never_called(model)
    layers = dict(named_modules(model, lambda module, _: is_layer(module)))
    layers |= raw  # also layers that an attention multiplies by and never calls
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UnknownNameError(
                f"convert: skip={pattern!r} matches no layer; layers are {', '.join(layers)}"
            )
    for name, module in layers.items():
        if accepts is not None and not accepts(module, name):
            continue
        reason = NEVER_CALLED if id(module) in uncalled else _why_not(module, id(module) in inner)
        matching = [pattern for pattern in skip if fnmatchcase(name, pattern)]
        if matching:
            reason = f"skip={matching[0]!r} names it"
        if reason:
            skipped[name] = reason
        else:
            found[name] = module
    return found, skipped


def _patterns_of(skip: str | Sequence[str]) -> Sequence[str]:
    found = [skip] if isinstance(skip, str) else skip
    if not isinstance(found, Sequence) or not all(isinstance(x, str) for x in found):
        raise FormatError(f"convert: skip is {skip!r}; expected names of layers, or patterns")
    return found


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
        if "FSDPModule" in (kind.__name__ for kind in type(module).__mro__):
            return (
                "fully_shard wrapped the layer itself: call convert before fully_shard, or "
                "fully_shard for the modules around it"
            )
        return f"it is a {type(module).__name__}, which may do more than nn.Linear"
    weight = shape_of(module)[3]
    if weight.dtype not in CAST:
        known = "torch.float32, torch.bfloat16 or torch.float16"
        return f"its weight is {weight.dtype}; expected {known}"
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized; run the model once"
    return ""


def _wanted_of(
    op: str, report_or_budget: Wanted | EllipsisType, kernels: Kernels | None
) -> Wanted | Forced:
    """What choices follow: exactly one of the arguments."""
    if isinstance(report_or_budget, EllipsisType) == (kernels is None):
        given = "neither of" if kernels is None else "both"
        raise FormatError(
            f"{op}: {given} report_or_budget and kernels= is given; expected one: a budget or a "
            "report, by which kernels are chosen, or kernels, which are forced"
        )
    if kernels is not None:
        return forced_by(kernels)
    assert not isinstance(report_or_budget, EllipsisType)
    return report_or_budget


def _budget_of(wanted: Wanted | Forced) -> ErrorBudget | None:
    by = _source_of(wanted, "", None)
    return None if isinstance(by, Forced) else by.budget


def _source_of(
    wanted: Wanted | Forced, name: str, distributions: tuple[str, ...] | None
) -> Judge | Forced:
    """What determines the routes of a site."""
    if isinstance(wanted, Forced):
        return wanted
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


def _is_of_layer(form: str) -> bool:
    """Whether it is a form of a layer alone, not with what is behind it in a `LinearNormAct`."""
    return form in LAYER_FORMS or BEHIND_CROSS in form


def _by_words(found: Mapping[str, CrossGradients], names: Iterable[str]) -> dict[str, list[str]]:
    """Names of sites by the words of their choice."""
    by: dict[str, list[str]] = {}
    for name in names:
        words = "gradients of {}"
        if name in found:
            behind = " behind crosses" * found[name].is_crossed
            words = f"{words}{behind}: {found[name].words}"
        by.setdefault(words, []).append(name)
    return by


def _joined_words(name: str, text: str) -> str:
    """A site and what is behind it, such as "0 (layer norm, relu)"."""
    norm, activation, *_ = text.split()
    words = [*([] if norm == "none" else [f"{norm} norm"]), activation]
    return f"{name} ({', '.join(word for word in words if word != 'none')})"


def _time_of(route: Route, choice: Choice) -> Time | None:
    """Time of a choice, or of the unquantized kernel where tuning dropped the choice."""
    kernel, table = choice.table.kernel_at(choice.m), choice.table
    is_used = kernel_at(traced_route(route.text), route.rows_at(choice))
    if is_used or kernel is None or not kernel.quantizes:
        return choice.pick.time
    plain = next((c.time_at(choice.m) for c in table.candidates if c.name == table.baseline), None)
    return plain[0] if plain else None


def _summary(route: Route, text: str, plain: str) -> str:
    """Names of a text's kernels over the measured m, or of all where none was looked up.

    ``plain`` is the word for none.
    """
    names = [kernel_at(text, route.rows_at(c)) for c in route.choices]
    if not names and text != PLAIN:
        names = [name for part in read_route(text)[1:] for _, name in part]
    return ", ".join(dict.fromkeys(name or plain for name in names)) or plain
