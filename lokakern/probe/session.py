"""`Probe`: samples operands of the linear layers of a model while it runs."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.optimizer import register_optimizer_step_post_hook

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.nn.linear import LINEARS_OF_ANY, Linear
from lokakern.nn.module_scan import (
    INNER,
    MIXING,
    ModuleFilter,
    inner_layers,
    named_modules,
    shape_of,
    weight_of,
)
from lokakern.nn.raw_product import is_layer
from lokakern.nn.routed_matmul import kernel_at
from lokakern.probe import files, ranks
from lokakern.probe.hooks import (
    Hook,
    Recorder,
    Sampler,
    hook_of,
    is_backward_under_way,
    is_plain,
)
from lokakern.probe.statistics import SiteStatistics
from lokakern.probe.unhooked_products import products_elsewhere
from lokakern.probe.verdicts import BUDGET
from lokakern.sampled_check import Watch, rows_of, watch_of_site
from lokakern.types import Granularity

if TYPE_CHECKING:
    from lokakern.probe.loss import LossChange
    from lokakern.probe.report import ProbeReport

_SOURCES = ("forward", "optimizer", "step")  # of steps, by rank
STEPS_OF_OTHERS = 32  # after which an optimizer that stepped no more was replaced
_RUNNING: dict[Any, bool] = {}  # probes, and whether compiled code checked no hooks before


def _guard_hooks(probe: Any, is_running: bool) -> None:
    """While some probe runs, compiled code checks whether modules have hooks."""
    config = torch._dynamo.config
    if is_running:
        _RUNNING[probe] = next(iter(_RUNNING.values()), config.skip_nnmodule_hook_guards)
        config.skip_nnmodule_hook_guards = False
    elif probe in _RUNNING:
        before = _RUNNING.pop(probe)
        config.skip_nnmodule_hook_guards = before and not _RUNNING


class Probe:
    """Samples operands of a model's linear layers, while the model runs as it is.

    Used as a context manager, or by `start` and `stop`. A step is a step of an optimizer that owns
    a parameter of the model. Until there was one, it is an uncompiled call of the model or, where
    methods of the model are called instead, of the site that they call first. After the first call
    of `step`, it is a call of `step`. The first step is sampled, and then every ``every``-th. A
    copy of a watched model, by ``copy.deepcopy`` or in a file, is not watched.

    A compiled model stays compiled: a sampled step runs a second graph, compiled once, and after
    the end a third without hooks. Begin before the model is compiled, or what was compiled in this
    process is compiled again. Inside torch.compile only optimizers and `step` tell steps apart,
    unless the compiled model itself is probed.

    Args:
        model: Any module; only hooks are added to it.
        every: Steps from one that is sampled to the next.
        filter: ``(module, name) -> bool``, which modules are sites; None: every `nn.Linear`, and
            each that `mods.FuseShared` made of several, under the name that it has then. A module
            with a two-dimensional ``weight`` ``[n, k]`` that maps ``[..., k]`` to ``[..., n]`` may
            be one. A layer of `mods.MixTokens` is none, nor is a part of another layer.
        norms: By name of a site, the normalization of its output (`lokakern.norm.norm_named`). Of
            others it is found where a norm's module is given what the site's module returned, or
            comes next in an `nn.Sequential`.
        seed: Of the choice of rows.
        check: ``"every:rows"``, such as "1:64": of every such sampled step 64 rows of the output of
            each converted layer are compared with the float32 product, as by ``convert(check=)``,
            and an `ErrorBudgetWarning` tells of a row error over 0.06, the default budget of
            `report`; `checks` lists the results. None: as LOKAKERN_CHECK says now; "off": nothing.

    Raises:
        ShapeError: A number of steps is below 1, or a site has no two-dimensional weight.
        UnknownNameError: No site is left, or ``norms`` names none.
        BudgetError: The check, which may be LOKAKERN_CHECK's, is not ``every:rows``.
    """

    _recorder_type = Recorder
    _looks_elsewhere = True  # whether to name products outside of sites

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        filter: ModuleFilter | None = None,
        norms: Mapping[str, str] | None = None,
        seed: int = 0,
        check: str | None = None,
    ) -> None:
        if every < 1:
            raise ShapeError(f"Probe: every is {every!r}; expected at least 1 step")
        self.model, self.every = model, every
        self._sampler = Sampler(seed + 1_000_003 * ranks.rank())
        inner = inner_layers(model)
        self._modules: dict[str, nn.Module] = {}
        self._left: dict[str, tuple[nn.Module, str]] = {}  # and why
        is_site = filter or (lambda module, _: is_layer(module))
        for name, module in named_modules(model, is_site):
            if id(module) in inner:
                self._left[name] = module, INNER
            elif getattr(module, "is_mixing", False):
                self._left[name] = module, MIXING
            else:
                self._modules[name] = module
        if not self._modules:
            reasons = "".join(f"; {name}: {why}" for name, (_, why) in self._left.items())
            raise UnknownNameError(
                f"Probe: no module of {type(model).__name__} is a site; expected an nn.Linear, or "
                f"what filter= accepts{reasons}"
            )
        given = dict(norms or {})
        unknown = sorted(given.keys() - self._modules.keys())
        if unknown:
            raise UnknownNameError(
                f"Probe: norms= names {', '.join(unknown)}; sites are {', '.join(self._modules)}"
            )
        found = _norms_in_sequence(model)
        self._recorders: dict[str, Recorder] = {}
        self._watches: list[Watch] = []
        for name, module in self._modules.items():
            norm = given.get(name, found.get(module, ""))
            padding = module.padding if isinstance(module, Linear) else (0, 0)
            self._recorders[name] = self._recorder_type(
                self._sampler, *_shape_of(name, module), norm, padding
            )
            watch = watch_of_site(check, BUDGET, name)
            if watch is not None and type(module) in LINEARS_OF_ANY:
                self._recorders[name].check = functools.partial(_compare, watch, module)
                self._watches.append(watch)
        self._handles: list[Any] = []
        self._site_handles: list[Any] = []  # of sites and norms
        self._norms: list[nn.Module] = []
        self._call_handles: list[Any] = []  # of the model, whose calls may be steps
        self._weight_handles: list[Any] = []
        self._first: list[Any] = []  # the hook of the site that methods of the model call first
        self._steps = 0
        self._source, self._begun = 0, False
        self._optimizer: weakref.ref[Any] | None = None
        self._others = 0  # steps of other optimizers since that one's
        self._parameters: set[int] = set()
        self._outputs: dict[int, tuple[weakref.ref[Tensor], Recorder]] = {}
        self._elsewhere: dict[str, str] | None = None

    def __enter__(self) -> Probe:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:  # the device may have failed: nothing more is asked of it
            self._remove_hooks()

    def start(self) -> None:
        """Begin to watch; without effect while it does."""
        if self._handles:
            return
        self._parameters = {id(p) for p in self.model.parameters()}
        self._begun = False
        # Compiled code does not check whether a module got hooks. Code traced anew sees them, and
        # checks, or another model of the same class would lend its code without them.
        torch.compiler.reset()
        _guard_hooks(self, True)
        self._norms = [module for module in self.model.modules() if _norm_of(module)]
        self._handles.append(register_optimizer_step_post_hook(self._optimizer_stepped))
        if self._looks_elsewhere:
            self._handles.append(self.model.register_forward_hook(Hook(self._forward_ended)))
        self._hook_modules()
        self._turn()

    def _hook_modules(self) -> None:
        """Have sites, norms and the model tell of their calls; without effect while they do."""
        if not self._call_handles:
            begins = self.model.register_forward_pre_hook(Hook(self._forward_begins))
            self._call_handles.append(begins)
        if self._site_handles:
            return
        for name, module in self._modules.items():
            seen = functools.partial(self._site_called, module)
            hook = hook_of(self._recorders[name], seen)
            # Before other hooks: FSDP's puts the weight away.
            handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            self._site_handles.append(handle)
        for norm in self._norms:
            begins = norm.register_forward_pre_hook(Hook(self._norm_begins))
            self._site_handles.append(begins)

    def stop(self) -> None:
        """Watch no more; statistics stay."""
        self._remove_hooks()
        self._sampler.buffer.settle()

    def _remove_hooks(self) -> None:
        for handles in (
            self._handles, self._site_handles, self._call_handles, self._weight_handles,
            self._first,
        ):  # fmt: skip
            remove_all(handles)
        self._outputs.clear()
        self._sampler.turn(False)
        _guard_hooks(self, False)

    def step(self) -> None:
        """Say that a step ended, where no optimizer of the model's parameters does."""
        self._ended("step")

    @property
    def is_sampling(self) -> bool:
        """Whether the present step is sampled."""
        return self._sampler.on

    def sites(self) -> dict[str, SiteStatistics]:
        """Statistics of each site that was called, by name; not copied."""
        self._sampler.buffer.settle()
        return {
            name: recorder.statistics
            for name, recorder in self._recorders.items()
            if recorder.statistics is not None
        }

    def merged_sites(self, group: Any = None) -> dict[str, SiteStatistics]:
        """`sites` over all ranks of a process group, each of which must call."""
        empty = {name: r.empty_statistics for name, r in self._recorders.items() if r.k}
        return ranks.merged(self.sites(), empty, group)

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Results of ``check=`` for each site so far, see `lokakern.sampled_check.results`."""
        return rows_of(self._watches)

    def unseen(self) -> dict[str, str]:
        """Sites without statistics, and products outside of sites, by name, and why.

        Products, by parameters and of activations, are those of the first sampled call of the model
        that has gradients and is not compiled; calls of its methods tell nothing.
        """
        found = {name: why for name, (_, why) in self._left.items()}
        for name, recorder in self._recorders.items():
            if recorder.statistics is None:
                lacks = "" if recorder.k else "its weight is not initialized, and "
                found[name] = recorder.unseen or f"{lacks}it was not called in a sampled step"
        return found | (self._elsewhere or {})

    def report(self, **options: Any) -> ProbeReport:
        """Verdicts on every site, see `ProbeReport.of`; over all ranks, each of which must call.

        Warns of sites without statistics, but for layers that Mods changed.
        """
        from lokakern.probe.report import ProbeReport

        self._take_weights()
        sites = self.merged_sites()
        unseen = {name: why for name, why in self.unseen().items() if name not in sites}
        words = "; ".join(f"{n}: {why}" for n, why in unseen.items() if n not in self._left)
        if words:
            warnings.warn(f"no verdict on what was not seen: {words}", stacklevel=2)
        return ProbeReport.of(sites, unseen=unseen, **options)

    def loss_changes(
        self,
        loss: Callable[[Any], Tensor],
        batches: Iterable[Any],
        granularity: Granularity = Granularity.ROW,
    ) -> dict[str, LossChange]:
        """True change of a loss with one site at a time in FP8; see `lokakern.probe.loss`.

        The model must not be compiled. Nothing is sampled meanwhile.
        """
        from lokakern.probe.loss import loss_changes

        on, self._sampler.on = self._sampler.on, False
        begun, source, self._source = self._begun, self._source, len(_SOURCES)  # calls, no steps
        try:
            buffers = list(self.model.buffers())
            return loss_changes(self._modules, loss, batches, granularity, buffers)
        finally:
            self._sampler.on, self._begun, self._source = on, begun, source

    def save(self, path: str | Path) -> None:
        """Write the statistics of this rank into a file, see `lokakern.probe.files`."""
        self._take_weights()
        files.save(path, self.sites())

    def load(self, path: str | Path) -> None:
        """Take in statistics that an earlier session saved, as of other rows of the same steps.

        Raises:
            DatabaseError: The file is not one, or not in order.
            ShapeError: A site is of another shape here.
        """
        found = files.load(path)
        self._sampler.buffer.settle()
        # Other keys than those that the earlier session gave to its rows.
        self._sampler.reseed(sum(site.sizes.total() for site in found.values()))
        for name, statistics in found.items():
            recorder = self._recorders.get(name)
            if recorder is not None:
                if not recorder.k:
                    recorder.n, recorder.k = statistics.n, statistics.k
                device = next(iter(self._modules[name].parameters())).device
                recorder.statistics_on(device).merge(statistics)

    def forget(self) -> None:
        """Drop all statistics, as for `ProbeReport.drift`, which asks about recent steps."""
        self._sampler.buffer.settle()
        for recorder in self._recorders.values():
            recorder.statistics, recorder.steps = None, 0

    def _take_weights(self) -> None:
        """Keep the current weights of sites that were called, unless they are sharded."""
        for name, recorder in self._recorders.items():
            if recorder.steps:
                weight = weight_of(self._modules[name])
                if is_plain(weight) and not weight.is_meta:
                    recorder.take_weight(weight)

    def _is_due(self) -> bool:
        """Whether the step that begins is sampled."""
        return self._steps % self.every == 0

    def _turn(self) -> None:
        """Begin a step."""
        self._sampler.buffer.take_in(steps=self.every)
        on = self._is_due()
        self._sampler.turn(on)
        self._outputs.clear()
        remove_all(self._weight_handles)
        for name, module in self._modules.items() if on else ():
            weight: Any = module._parameters.get("weight")
            is_there = is_plain(weight) and not isinstance(weight, nn.UninitializedParameter)
            if is_there and weight.requires_grad:
                hook = self._recorders[name].weight_gradient
                self._weight_handles.append(weight.register_hook(hook))

    def _ended(self, source: str) -> None:
        rank = _SOURCES.index(source)
        if rank < self._source or not self._handles:
            return
        self._source = rank
        self._steps += 1
        self._turn()

    def _forward_begins(self, module: nn.Module, _args: Any) -> None:
        # A checkpoint of the whole module calls it again.
        if torch.compiler.is_compiling() or is_backward_under_way():
            return
        if module is self.model:
            remove_all(self._first)
        if self._begun:
            self._ended("forward")
        self._begun = True

    def _site_called(self, module: nn.Module, recorder: Recorder, y: Tensor) -> None:
        if not self._begun:  # the model itself was not called, but a method of it
            self._begun = True
            self._first.append(module.register_forward_pre_hook(Hook(self._forward_begins)))
        if not recorder.norm:
            self._outputs[id(y)] = (weakref.ref(y), recorder)

    def _norm_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Whether the input of a norm is the output of a site."""
        if torch.compiler.is_compiling() or not self._sampler.on or not args:
            return
        reference, recorder = self._outputs.get(id(args[0]), (None, None))
        if reference is not None and recorder is not None and reference() is args[0]:
            recorder.norm = _norm_of(module)
            if recorder.statistics is not None:
                recorder.statistics.norm = recorder.norm

    def _forward_ended(self, _module: nn.Module, _args: Any, output: Any) -> None:
        is_known = self._elsewhere is not None or not self._sampler.on
        if is_known or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        modules = [*self._modules.values(), *(module for module, _ in self._left.values())]
        of_sites = {id(p) for module in modules for p in module.parameters()}
        layers = named_modules(self.model, lambda module, _: is_layer(module))
        filtered = {id(p): name for name, layer in layers for p in layer.parameters()}
        self._elsewhere = products_elsewhere(output, names, of_sites, filtered)

    def _optimizer_stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        known = self._optimizer() if self._optimizer is not None else None
        if known is not optimizer:
            groups = (group["params"] for group in optimizer.param_groups)
            if not any(id(p) in self._parameters for params in groups for p in params):
                return
            self._others += 1
            # The first counts where there are several, while it steps.
            if known is not None and self._others < STEPS_OF_OTHERS:
                return
            self._optimizer = weakref.ref(optimizer)
        self._others = 0
        self._ended("optimizer")


def remove_all(handles: list[Any]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()


def _compare(watch: Watch, module: nn.Module, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
    """Compare the output of a layer with its operands, if it was converted by now."""
    if isinstance(module, Linear):
        kernel = kernel_at(module._routes[0], x.shape[:-1].numel())
        if kernel:
            right = None if weight is None else weight.detach().t()
            a, out = (t.reshape(-1, t.shape[-1]) for t in (x, y))
            watch.see(a, right, out, module.bias, kernel)


def _norm_of(module: nn.Module) -> str:
    """Name of a normalization of whole rows, or of blocks of them; "" of any other module."""
    for kind, norm in ((nn.LayerNorm, "layer"), (nn.RMSNorm, "rms")):
        if isinstance(module, kind) and len(module.normalized_shape) == 1:
            return norm
    name = getattr(module, "norm_name", "")  # of one that says so itself
    return name if isinstance(name, str) else ""


def _norms_in_sequence(model: nn.Module) -> dict[nn.Module, str]:
    return {
        child: _norm_of(following)
        for parent in model.modules()
        if isinstance(parent, nn.Sequential)
        for child, following in itertools.pairwise(parent)
        if _norm_of(following)
    }


def _shape_of(name: str, module: nn.Module) -> tuple[int, int, bool]:
    """n, k and whether there is a bias; n and k are 0 where they are not known yet."""
    if getattr(module, "makes_weight", False):
        return shape_of(module)[:3]
    has_bias = getattr(module, "bias", None) is not None
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return 0, 0, has_bias  # its first call tells
    try:
        weight = weight_of(module)  # `hasattr` would ask a spectral norm in training
    except AttributeError:
        weight = None
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        found = "none" if weight is None else str(list(getattr(weight, "shape", ())))
        raise ShapeError(
            f"Probe: site {name!r} has a weight of shape {found}; expected [n, k] (leave it out "
            "by filter=)"
        )
    return weight.shape[0], weight.shape[1], has_bias
