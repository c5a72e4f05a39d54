"""Arms of a comparison: a model in a setting, and the ways of running it in bf16 or FP8."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.bench.compare.by_library import owner_of
from lokakern.bench.models.blocks import Batch, ClickModel, Inputs, Tables
from lokakern.bench.models.catalog import CATALOG
from lokakern.bench.models.click_log import ClickLog
from lokakern.conversion.convert import convert
from lokakern.device import current_device
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.nn.module_scan import inner_layers
from lokakern.nn.routed_matmul import PLAIN, route_text
from lokakern.registry.libraries import LIBRARIES
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.selection import dispatcher
from lokakern.types import Granularity

LEARNING_RATE = 1e-3

Interact = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model in a given size, trained or asked for predictions.

    Attributes:
        name: Of the model.
        size: Name of its size.
        config: Of that size.
        samples: In a batch.
        training: Whether steps are of training; else they are predictions.
        device: Where it runs.
        budget: Largest row error of a product that is quantized.
    """

    name: str
    size: str
    config: Any
    samples: int
    training: bool
    device: torch.device
    budget: float

    @property
    def inputs(self) -> Inputs:
        """What the model is fed."""
        return cast(Inputs, self.config.inputs)

    def build(self, seed: int) -> ClickModel:
        """The model as written, with parameters of a seed, the same on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CATALOG[self.name].build(self.config)
        return model.to(self.device)


def to_bfloat16(model: ClickModel) -> ClickModel:
    """All parameters but those of the tables, in place: what predictions are made with."""
    for module in model.modules():
        if not isinstance(module, Tables):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16(), False))
    return model


class Predictor:
    """Predictions in bfloat16.

    Args:
        model: After `to_bfloat16`.
        interact: Its `interact`, compiled or not.
    """

    def __init__(self, model: ClickModel, interact: Interact) -> None:
        self.model, self.interact = model.eval(), interact

    @torch.no_grad()
    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """What the tables give, as the layers take it."""
        given = (batch.dense, *self.model.embed(batch))
        return [x.bfloat16() if x.is_floating_point() else x for x in given]

    @torch.no_grad()
    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of what `embed` gave."""
        return self.interact(*given).float()


class Trainer:
    """Steps of training: bfloat16 by autocast, parameters in float32, Adam.

    Args:
        model: Its parameters are changed.
        interact: Its `interact`, compiled or not.
    """

    def __init__(self, model: ClickModel, interact: Interact) -> None:
        self.model, self.interact = model.train(), interact
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.Adam(
            model.parameters(), LEARNING_RATE, fused=True, capturable=self.device.type == "cuda"
        )

    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """What the tables give, in bfloat16: so they send it, and are sent its gradients."""
        found = self.model.embed(batch)
        return (batch.dense, *(x.bfloat16() if x.is_floating_point() else x for x in found))

    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of what `embed` gave."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.interact(*given).float()

    def loss(self, given: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean cross entropy of what `embed` gave."""
        return F.binary_cross_entropy_with_logits(self.logits(given), labels)

    def step(self, given: Sequence[Tensor] | Batch, labels: Tensor) -> Tensor:
        """One step on a batch, or on what `embed` gave of one; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.embed(given) if isinstance(given, Batch) else given, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


# --- arms

AS_WRITTEN, BASELINE, BUDGETED, PROBED = "as-written", "bf16", "by-budget", "lokakern"
TORCHAO = ("torchao-tensorwise", "torchao-rowwise")
EVERYWHERE = {"fp8-tensorwise": Granularity.TENSOR, "fp8-rowwise": Granularity.ROW}
ONLY = "only-"  # and the name of a library
PROBED_STEPS, PROBE_FROM = 4, 2**39
LEAST_PADDED = 128  # inputs; fewer are read in little time, and a copy costs a launch
REPLAYED_SEEDS = (0, 1, 2)

State = dict[str, Tensor]  # parameters by name


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run a model.

    Attributes:
        name: As on the command line.
        title: What it is.
        has_mods: Whether the model is changed by Mods first.
        compiled: Whether it runs compiled, and in a CUDA graph where it can.
    """

    name: str
    title: str
    has_mods: bool = True
    compiled: bool = True

    @property
    def library(self) -> str:
        """The only library that it may take kernels of; "" where it is no such arm."""
        return self.name.removeprefix(ONLY) if self.name.startswith(ONLY) else ""


@dataclass(frozen=True, slots=True)
class Built:
    """An arm that is ready.

    Attributes:
        arm: Which.
        model: Changed, and where it is to run.
        interact: Its `interact`, compiled if the arm is.
        conversion: What `lokakern.convert` gave; None in arms without it.
        notes: What a reader should know of it.
    """

    arm: Arm
    model: ClickModel
    interact: Interact
    conversion: Any = None
    notes: tuple[str, ...] = ()

    @property
    def uncompiled(self) -> Built:
        """The same model, called as it is: a graph for every use of it would take minutes."""
        return replace(self, interact=self.model.interact)

    def trainer(self) -> Trainer:
        """Takes steps with it."""
        return Trainer(self.model, self.interact)

    def predictor(self) -> Predictor:
        """Predicts with it."""
        return Predictor(self.model, self.interact)


def libraries_here() -> list[str]:
    """Owners of kernels of op gemm that quantize and run on this device."""
    load_kernels()
    device = current_device()
    return sorted(
        {
            owner_of(kernel)
            for kernel in KERNELS.values()
            if kernel.op == "gemm" and kernel.quantizes and kernel.runs_on(device)
        }
    )


def arms_named(names: tuple[str, ...] = ()) -> list[Arm]:
    """Arms by name; all of them where none is named. The baseline is always the first.

    Raises:
        UnknownNameError: There is no such arm.
    """
    alone = [Arm(f"{ONLY}{name}", f"kernels of {name} alone") for name in libraries_here()]
    arms = [
        Arm(BASELINE, "bf16 with Mods, compiled: the baseline"),
        Arm(AS_WRITTEN, "bf16 as written", has_mods=False, compiled=False),
        Arm(TORCHAO[0], "torchao, tensorwise, all layers"),
        Arm(TORCHAO[1], "torchao, rowwise, all layers"),
        *(Arm(name, f"torch's FP8, {name[4:]}, all layers") for name in EVERYWHERE),
        *alone,
        Arm(BUDGETED, "lokakern by the errors in the database"),
        Arm(PROBED, "lokakern with Probe"),
    ]
    known = {arm.name: arm for arm in arms}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownNameError(f"no arm {', '.join(unknown)}; expected one of {', '.join(known)}")
    return [arm for arm in arms if not names or arm.name in names or arm.name == BASELINE]


def why_not(arm: Arm, device: torch.device) -> str:
    """Why an arm cannot run here; "" where it can."""
    if arm.name in TORCHAO:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed (pip install torchao)"
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            return "torch multiplies FP8 matrices on GPUs of compute capability 8.9 and later"
    library = LIBRARIES.get(arm.library)
    return (library.why_not_here() or "") if library else ""


def build(
    arm: Arm,
    setting: Setting,
    seed: int,
    state: State | None = None,
    report: Any = None,
) -> Built:
    """A model as an arm runs it.

    Args:
        arm: Which.
        setting: The model and where it runs.
        seed: Of the parameters, and of the samples that Probe sees.
        state: Parameters instead of those of the seed, after Mods.
        report: Of Probe, see `probed`; None: it is made where the arm needs one.

    Raises:
        UnsupportedError: The arm needs what is not here.
    """
    reason = why_not(arm, setting.device)
    if reason:
        raise UnsupportedError(f"{arm.name}: {reason}")
    if arm.name == PROBED and report is None:
        report = probed(arm, setting, seed, state)
    model, notes = _changed(arm, setting, seed, state)
    if not setting.training:
        to_bfloat16(model)
    conversion = None
    if arm.name == BASELINE and not setting.training:
        public("convert")(model, None, inference=True)  # which lays weights out
    elif arm.name in TORCHAO:
        notes += _use_torchao(model, arm.name.removeprefix("torchao-"), setting.training)
    elif arm.name in EVERYWHERE:
        notes += quantize_everywhere(model, EVERYWHERE[arm.name], inference=not setting.training)
    elif arm.library or arm.name == BUDGETED or report is not None:
        with only(arm.library):
            conversion = public("convert")(
                model, setting.budget if report is None else report, inference=not setting.training
            )
            if not setting.training:
                conversion.offload(m_range=(setting.samples, setting.samples))
    interact: Interact = model.interact
    if arm.compiled:
        # On a CPU it is traced and nothing more: what Inductor makes of it there is no evidence.
        backend = "inductor" if setting.device.type == "cuda" else "eager"
        interact = torch.compile(interact, dynamic=False, backend=backend)
    return Built(arm, model, interact, conversion, tuple(notes))


def _changed(
    arm: Arm, setting: Setting, seed: int, state: State | None
) -> tuple[ClickModel, list[str]]:
    """A model with the arm's Mods, and what is to be said of them."""
    model = setting.build(seed)
    # Of a fused layer the tools of these arms would see nothing, and leave it in bfloat16.
    is_fused = arm.name not in (*TORCHAO, *EVERYWHERE)
    notes = apply_mods(model, is_fused=is_fused) if arm.has_mods else []
    if state is not None:
        model.load_state_dict(state)
    return model, notes


def public(name: str) -> Any:
    """A public name of lokakern that arms need.

    Raises:
        UnsupportedError: This version has none.
    """
    import lokakern

    try:
        return getattr(lokakern, name)
    except AttributeError:
        raise UnsupportedError(
            f"this version of lokakern has no {name!r}, which the arm needs"
        ) from None


def apply_mods(model: nn.Module, *, is_fused: bool = True) -> list[str]:
    """The Mods of the paper and exact ones, in place; returns what is to be said of them.

    Args:
        model: Is changed.
        is_fused: Whether layers that share an input become one product, too.
    """
    mods = public("mods")
    # 128 divides the 17280 columns of Wukong S's first norm, and 256 does not.
    wanted = [mods.NoBias(), mods.BlockNorm(256), mods.BlockNorm(128), mods.HardSwish()]
    together = [mods.FuseShared()] if is_fused else []
    changes = [*mods.apply(model, [*wanted, *together])]
    # Tools that are not of here replace every layer that fits by one that does not mix.
    changes += mods.apply(
        model, [mods.MixTokens()], filter=lambda layer, _: is_fused or not _is_fp8(layer)
    )
    inner = inner_layers(model)
    changes += mods.apply(
        model, [mods.Pad(8, 1)], filter=lambda layer, _: _is_long(layer) and id(layer) not in inner
    )
    done = Counter(c.mod for c in changes if c.is_done)
    words = ", ".join(f"{mod}: {count}" for mod, count in done.items()) or "none"
    changed = {(c.mod, c.site) for c in changes if c.is_done}
    left: dict[tuple[str, str], str] = {}
    for c in changes:
        if not c.is_done and (c.mod, c.site) not in changed:
            left.setdefault((c.site, c.effect), c.mod)
    lines = [f"{mod} left {site} alone: {effect}" for (site, effect), mod in left.items()]
    return [f"changes: {words}", *lines]


def _is_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and fits(layer)


def _is_long(layer: nn.Module) -> bool:
    """Whether to align rows: of k = 900 cuBLAS takes 114 us, of 904 36."""
    if not isinstance(layer, nn.Linear) or getattr(layer, "is_mixing", False):
        return False
    return layer.in_features >= LEAST_PADDED


@contextmanager
def only(library: str) -> Iterator[None]:
    """Dispatch knows no quantizing kernel of op gemm but those of one library while inside.

    Emulations, which run anywhere and win nowhere, stay: a device that is not here needs them.

    Args:
        library: Its name; "" for all of them.
    """
    if not library:
        yield
        return
    load_kernels()
    facts = dispatcher.snapshot()
    hidden = {
        kernel.name: kernel
        for kernel in KERNELS.values()
        if kernel.op == "gemm"
        and kernel.quantizes
        and "any" not in kernel.architectures
        and owner_of(kernel) != library
    }
    for name in hidden:
        del KERNELS[name]
    dispatcher.use_snapshot(facts)  # which forgets what was chosen among all
    try:
        yield
    finally:
        KERNELS.update(hidden)
        dispatcher.use_snapshot(facts)


def probed(arm: Arm, setting: Setting, seed: int, state: State | None = None) -> Any:
    """What Probe says of an arm's model on samples that neither training nor evaluation sees.

    Probe makes torch forget what it compiled: what is to be replayed is captured afterwards.
    """
    model, _ = _changed(arm, setting, seed, state)
    log = ClickLog(setting.inputs, seed, setting.device)
    trainer = Trainer(model, model.interact)
    with public("Probe")(model, every=1) as probe:
        for step in range(PROBED_STEPS):
            batch = log.batch(PROBE_FROM + step, setting.samples)
            with torch.set_grad_enabled(setting.training):
                loss = trainer.loss(trainer.embed(batch), batch.labels)
            if setting.training:
                loss.backward()  # type: ignore[no-untyped-call]
            probe.step()
    return probe.report(budget=setting.budget, seeds=REPLAYED_SEEDS)


def _use_torchao(model: nn.Module, recipe: str, training: bool) -> list[str]:
    """All layers that torchao takes in FP8; names those that it does not."""
    left: list[str] = []

    def accepts(module: nn.Module, name: str) -> bool:
        if isinstance(module, nn.Linear) and not fits(module):
            left.append(f"{name} ({module.out_features}x{module.in_features})")
        return _is_fp8(module)

    if training:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=accepts)
    else:
        quantization = importlib.import_module("torchao.quantization")
        per = {"tensorwise": "PerTensor", "rowwise": "PerRow"}[recipe]
        config = quantization.Float8DynamicActivationFloat8WeightConfig(
            # Else torchao turns coordinate descent on in the whole process: every arm after it
            # would be compiled otherwise than the baseline, in minutes.
            granularity=getattr(quantization, per)(), set_inductor_config=False,
        )  # fmt: skip
        quantization.quantize_(model, config, filter_fn=accepts)
        if left:  # as the baseline's
            public("convert")(model, None, filter=lambda layer, _: not fits(layer), inference=True)
    version = importlib.metadata.version("torchao")
    found = [f"torchao {version}"]
    if left:
        found.append(f"{len(left)} layers are not multiples of {FP8_MULTIPLE}: {', '.join(left)}")
    return found


# --- FP8 without dispatch

FP8_MULTIPLE = 16  # of the sizes that torch's FP8 product takes


def fits(layer: nn.Linear) -> bool:
    """Whether torch's FP8 product takes its sizes."""
    return layer.in_features % FP8_MULTIPLE == 0 == layer.out_features % FP8_MULTIPLE


def stock_kernel(granularity: Granularity) -> Kernel:
    """The FP8 product of torch itself, promoted, on this device; its emulation elsewhere.

    Raises:
        UnsupportedError: Neither takes such scales.
    """
    load_kernels()
    found = [
        kernel
        for kernel in KERNELS.values()
        if kernel.op == "gemm"
        and kernel.quantizes
        and owner_of(kernel) == "torch"
        and kernel.granularity is kernel.b_granularity is granularity
        and kernel.accumulation in ("promoted", "float32")
        and kernel.runs_on(current_device())
    ]
    if not found:
        raise UnsupportedError(f"torch has no FP8 product with {granularity} scales here")
    return min(found, key=lambda kernel: ("any" in kernel.architectures, kernel.name))


def quantize_everywhere(
    model: nn.Module, granularity: Granularity, *, inference: bool
) -> tuple[str, ...]:
    """Run all three products of every layer that fits in E4M3, in place.

    Args:
        model: Its linear layers become `lokakern.Linear`.
        granularity: Of all scales: TENSOR or ROW.
        inference: Whether weights are quantized once and for all.

    Returns:
        What ran, and the layers that do not fit.
    """
    kernel = stock_kernel(granularity)
    everywhere, nowhere = [(0, kernel.name)], [(0, "")]
    weight_route = route_text(granularity, everywhere, nowhere)
    sum_route = route_text(Granularity.NONE, everywhere, nowhere)
    left = []
    for site in convert(model, None, inference=inference).sites.values():
        layer = site.module
        assert isinstance(layer, nn.Linear)  # of which the models are made
        if not fits(layer):
            left.append(f"{site.name} ({layer.out_features}x{layer.in_features})")
            continue
        routes = (
            weight_route,
            PLAIN if inference else weight_route,
            PLAIN if inference else sum_route,
        )
        layer.take_routes(routes, layer.weight)
        if inference:
            layer.freeze()
    words = f"{len(left)} layers are not multiples of {FP8_MULTIPLE}: {', '.join(left)}"
    return (kernel.name, *([words] if left else []))
