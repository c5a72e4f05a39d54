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

from lokakern import mods
from lokakern.bench.compare.dispatch import owner_of
from lokakern.bench.models.blocks import Batch, ClickModel, Inputs, Tables
from lokakern.bench.models.catalog import CATALOG
from lokakern.bench.models.click_log import ClickLog
from lokakern.bench.models.recorded_log import RecordedData, RecordedLog
from lokakern.conversion.convert import convert
from lokakern.device import current_device
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.nn import optim
from lokakern.nn.module_scan import inner_layers
from lokakern.probe.session import Probe
from lokakern.registry.libraries import LIBRARIES
from lokakern.registry.register import KERNELS, Kernel, kernels_for
from lokakern.selection import dispatcher
from lokakern.types import COMPILED_GRAPH, Granularity

LEARNING_RATE = 1e-3

Interact = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model at one of its sizes, and how it runs."""

    name: str  # the model's name in `CATALOG`
    size: str  # the size's name
    config: Any  # the config of that size
    samples: int  # batch size
    training: bool  # whether steps are training steps or predictions
    device: torch.device  # where it runs
    budget: float  # largest accepted row error of a quantized product
    large_steps: bool = False  # whether `lokakern.nn.optim` steps the parameters of every arm
    data: RecordedData | None = None  # a user's samples; None: synthetic ones

    @property
    def inputs(self) -> Inputs:
        return cast(Inputs, self.config.inputs)

    def log(self, seed: int) -> ClickLog | RecordedLog:
        """The samples of a seed."""
        if self.data is None:
            return ClickLog(self.inputs, seed, self.device)
        return RecordedLog(self.data, self.inputs, seed, self.device)

    def build(self, seed: int) -> ClickModel:
        """The model as written, with the parameters of a seed, equal on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CATALOG[self.name].build(self.config)
        return model.to(self.device)


def to_bfloat16(model: ClickModel) -> ClickModel:
    """Cast all parameters but those of the tables in place, for predictions."""
    for module in model.modules():
        if not isinstance(module, Tables):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16(), False))
    return model


class Predictor:
    """Predictions in bfloat16 of a model after `to_bfloat16`."""

    def __init__(self, model: ClickModel, interact: Interact) -> None:
        self.model, self.interact = model.eval(), interact

    @torch.no_grad()
    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """The inputs of `logits`."""
        given = (batch.dense, *self.model.embed(batch))
        return [x.bfloat16() if x.is_floating_point() else x for x in given]

    @torch.no_grad()
    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of the result of `embed`."""
        return self.interact(*given).float()


class Trainer:
    """Training steps: autocast to bfloat16, float32 parameters, Adam."""

    def __init__(
        self, model: ClickModel, interact: Interact, of: type[torch.optim.Adam] = torch.optim.Adam
    ) -> None:
        self.model, self.interact = model.train(), interact
        self.device = next(model.parameters()).device
        self.optimizer = of(
            model.parameters(), LEARNING_RATE, fused=True, capturable=self.device.type == "cuda"
        )

    def embed(self, batch: Batch) -> Sequence[Tensor]:
        """The inputs of `logits`; embeddings and their gradients are communicated in bfloat16."""
        found = self.model.embed(batch)
        return (batch.dense, *(x.bfloat16() if x.is_floating_point() else x for x in found))

    def logits(self, given: Sequence[Tensor]) -> Tensor:
        """Logits ``[batch]`` of the result of `embed`."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.interact(*given).float()

    def loss(self, given: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean cross entropy of the result of `embed`."""
        return F.binary_cross_entropy_with_logits(self.logits(given), labels)

    def step(self, given: Sequence[Tensor] | Batch, labels: Tensor) -> Tensor:
        """One step on a batch or the result of `embed`; returns the loss before it."""
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
LEAST_PADDED = 128  # inputs; padding fewer costs more than it gains
REPLAYED_SEEDS = (0, 1, 2)

State = dict[str, Tensor]  # parameters by name


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run a model."""

    name: str  # its name on the command line
    title: str  # one line of explanation
    has_mods: bool = True  # whether Mods are applied to the model first
    compiled: bool = True  # whether it runs compiled, and in a CUDA graph where possible

    @property
    def library(self) -> str:
        """The only library whose kernels it may use; "" for other arms."""
        return self.name.removeprefix(ONLY) if self.name.startswith(ONLY) else ""


@dataclass(frozen=True, slots=True)
class Built:
    """An arm that is ready to run."""

    arm: Arm
    model: ClickModel  # the converted model, on its device
    interact: Interact  # its `interact`, compiled if the arm is
    conversion: Any = None  # the result of `lokakern.convert`; None for arms without it
    notes: tuple[str, ...] = ()  # remarks for the report
    optimizer: type[torch.optim.Adam] = torch.optim.Adam  # what steps its parameters

    @property
    def uncompiled(self) -> Built:
        """The same model without compilation, which takes minutes for every new use."""
        return replace(self, interact=self.model.interact)

    def trainer(self) -> Trainer:
        return Trainer(self.model, self.interact, self.optimizer)

    def predictor(self) -> Predictor:
        return Predictor(self.model, self.interact)


def arms_named(names: tuple[str, ...] = ()) -> list[Arm]:
    """Arms by name, by default all; the baseline is always the first.

    Raises:
        UnknownNameError: An arm is unknown.
    """
    here = {owner_of(k) for k in kernels_for("gemm", current_device()) if k.quantizes}
    alone = [Arm(f"{ONLY}{name}", f"kernels of {name} alone") for name in sorted(here)]
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
    """Why an arm cannot run here; "" if it can."""
    if arm.name in TORCHAO:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed (pip install torchao)"
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            return "FP8 products of torch need a GPU of compute capability 8.9 or later"
    library = LIBRARIES.get(arm.library)
    return (library.why_not_here() or "") if library else ""


def build(
    arm: Arm,
    setting: Setting,
    seed: int,
    state: State | None = None,
    report: Any = None,
) -> Built:
    """Convert a model for an arm.

    Args:
        arm: The arm.
        setting: The model and where it runs.
        seed: Seed of the parameters, and of the samples for Probe.
        state: Parameters to load after Mods, instead of those of the seed.
        report: The Probe report of `probed`; None makes one if the arm needs it.

    Raises:
        UnsupportedError: The arm needs hardware or a package that is missing.
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
        convert(model, None, inference=True)  # sets the layout of weights
    elif arm.name in TORCHAO:
        notes += _use_torchao(model, arm.name.removeprefix("torchao-"), setting.training)
    elif arm.name in EVERYWHERE:
        notes += quantize_everywhere(model, EVERYWHERE[arm.name], inference=not setting.training)
    elif arm.library or arm.name == BUDGETED or report is not None:
        with only(arm.library):
            conversion = convert(
                model, setting.budget if report is None else report,
                inference=not setting.training, regime=COMPILED_GRAPH,
            )  # fmt: skip
            if not setting.training:
                conversion.offload(m_range=(setting.samples, setting.samples))
    interact: Interact = model.interact
    if arm.compiled:
        # On a CPU it is only traced: CPU code of Inductor is no evidence for a GPU.
        backend = "inductor" if setting.device.type == "cuda" else "eager"
        interact = torch.compile(interact, dynamic=False, backend=backend)
    optimizer = optim.Adam if setting.large_steps else torch.optim.Adam
    return Built(arm, model, interact, conversion, tuple(notes), optimizer)


def _changed(
    arm: Arm, setting: Setting, seed: int, state: State | None
) -> tuple[ClickModel, list[str]]:
    """A model with the arm's Mods, and remarks on them."""
    model = setting.build(seed)
    # The tools of these arms do not recognize fused layers and would leave them in bfloat16.
    is_fused = arm.name not in (*TORCHAO, *EVERYWHERE)
    notes = apply_mods(model, is_fused=is_fused) if arm.has_mods else []
    if state is not None:
        model.load_state_dict(state)
    return model, notes


def apply_mods(model: nn.Module, *, is_fused: bool = True) -> list[str]:
    """Apply the Mods of the paper and the exact ones in place; returns remarks.

    If `is_fused`, layers that share an input become one product.
    """
    # 128 divides the 17280 columns of Wukong S's first norm; 256 does not.
    wanted = [mods.NoBias(), mods.BlockNorm(256), mods.BlockNorm(128), mods.HardSwish()]
    together = [mods.FuseShared()] if is_fused else []
    changes = [*mods.apply(model, [*wanted, *together])]
    # Other tools replace every supported layer by one that cannot mix tokens.
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
    """Whether to align rows: cuBLAS takes 114 us at k=900 and 36 us at k=904."""
    if not isinstance(layer, nn.Linear) or getattr(layer, "is_mixing", False):
        return False
    return layer.in_features >= LEAST_PADDED


@contextmanager
def only(library: str) -> Iterator[None]:
    """Restrict dispatch to the quantizing gemm kernels of one library ("" for all) inside.

    Emulations stay: they never win, but a device that is not here needs them.
    """
    if not library:
        yield
        return
    facts = dispatcher.snapshot()
    hidden = {
        kernel.name: kernel
        for kernel in kernels_for("gemm")
        if kernel.quantizes and not is_emulation(kernel) and owner_of(kernel) != library
    }
    for name in hidden:
        del KERNELS[name]
    dispatcher.use_snapshot(facts)  # clears the cached choices
    try:
        yield
    finally:
        KERNELS.update(hidden)
        dispatcher.use_snapshot(facts)


def probed(arm: Arm, setting: Setting, seed: int, state: State | None = None) -> Any:
    """The Probe report of an arm's model, on samples outside of training and evaluation.

    Probe resets torch's compiler, so it must run before a CUDA graph is captured.
    """
    model, _ = _changed(arm, setting, seed, state)
    log = setting.log(seed)
    trainer = Trainer(model, model.interact)
    with Probe(model, every=1) as probe:
        for step in range(PROBED_STEPS):
            batch = log.batch(PROBE_FROM + step, setting.samples)
            with torch.set_grad_enabled(setting.training):
                loss = trainer.loss(trainer.embed(batch), batch.labels)
            if setting.training:
                loss.backward()  # type: ignore[no-untyped-call]
            probe.step()
    return probe.report(budget=setting.budget, seeds=REPLAYED_SEEDS)


def _use_torchao(model: nn.Module, recipe: str, training: bool) -> list[str]:
    """Convert all layers that torchao supports; returns its version and the other layers."""
    left: list[str] = []

    def accepts(module: nn.Module, name: str) -> bool:
        if isinstance(module, nn.Linear) and not fits(module):
            left.append(_size_words(module, name))
        return _is_fp8(module)

    if training:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=accepts)
    else:
        quantization = importlib.import_module("torchao.quantization")
        per = {"tensorwise": "PerTensor", "rowwise": "PerRow"}[recipe]
        config = quantization.Float8DynamicActivationFloat8WeightConfig(
            # Otherwise torchao enables coordinate descent for the whole process, and later arms
            # would be compiled differently from the baseline.
            granularity=getattr(quantization, per)(), set_inductor_config=False,
        )  # fmt: skip
        quantization.quantize_(model, config, filter_fn=accepts)
        if left:  # same layout as in the baseline
            convert(model, None, filter=lambda layer, _: not _is_fp8(layer), inference=True)
    return [f"torchao {importlib.metadata.version('torchao')}", *_unfit_words(left)]


def is_emulation(kernel: Kernel) -> bool:
    return "any" in kernel.architectures


# --- FP8 without dispatch

FP8_MULTIPLE = 16  # sizes of torch's FP8 product are multiples of it


def fits(layer: nn.Linear) -> bool:
    """Whether torch's FP8 product supports the layer's sizes."""
    return layer.in_features % FP8_MULTIPLE == 0 == layer.out_features % FP8_MULTIPLE


def stock_kernel(granularity: Granularity) -> Kernel:
    """Torch's own FP8 product with promoted accumulation; without hardware its emulation.

    Raises:
        UnsupportedError: Neither supports these scales.
    """
    found = [
        kernel
        for kernel in kernels_for("gemm", current_device())
        if kernel.quantizes
        and owner_of(kernel) == "torch"
        and kernel.granularity is kernel.b_granularity is granularity
        and kernel.accumulation in ("promoted", "float32")
    ]
    if not found:
        raise UnsupportedError(f"torch has no FP8 product with {granularity} scales here")
    return min(found, key=is_emulation)


def quantize_everywhere(
    model: nn.Module, granularity: Granularity, *, inference: bool
) -> tuple[str, ...]:
    """Run all products of every layer with supported sizes in E4M3, in place, without dispatch.

    Linear layers become `lokakern.Linear`, with weights quantized once for inference.

    Returns:
        The kernel's name, and the layers with unsupported sizes.
    """
    kernel = stock_kernel(granularity)
    left: list[str] = []

    def accepts(layer: nn.Module, name: str) -> bool:
        assert isinstance(layer, nn.Linear)  # the models have no other sites
        if not fits(layer):
            left.append(_size_words(layer, name))
        return fits(layer)

    convert(model, kernels=kernel.name, filter=accepts, inference=inference)
    if left and inference:  # same layout as in the baseline
        convert(model, None, filter=lambda layer, _: not _is_fp8(layer), inference=True)
    return (kernel.name, *_unfit_words(left))


def _size_words(layer: nn.Linear, name: str) -> str:
    return f"{name} ({layer.out_features}x{layer.in_features})"


def _unfit_words(left: Sequence[str]) -> list[str]:
    words = f"{len(left)} layers are not multiples of {FP8_MULTIPLE}: {', '.join(left)}"
    return [words] if left else []
