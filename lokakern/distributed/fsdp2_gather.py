"""Weights gathered as FP8 under FSDP2: half the bytes of bfloat16, and quantized once for all.

    lokakern.convert(model, 0.06, weight_scales=["tensor"])
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    Gathering(model)

A weight has one scale, which all ranks have to know before they quantize their rows. Those of all
weights are found together, by one all-reduce of a number each, at the first gather of a forward
pass, so that whatever wrote to weights is seen. Then a rank sends its rows as bytes, one for each
element, and the GEMMs of converted layers read what arrives as it is, to the bit what they would
have quantized of the whole weight. Beside it stands the weight that these bytes mean, in the dtype
of FSDP2's policy, for all else that reads it. Optimizers, gradients and checkpoints see the
parameters as they are without.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.functional.quantize import quantize
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, scales_of
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of
from lokakern.types import Granularity

TENSOR = Granularity.TENSOR
_LARGEST = torch.finfo(torch.bfloat16).max


class Scale(NamedTuple):
    """Of a weight, and when it was found.

    Attributes:
        value: float32 ``[1, 1]``, the same on all ranks.
        rounded: The same of the weight in bfloat16.
        steps: Of optimizers of these weights by then.
        weight: Id of the parameter.
        version: Of it. Neither foreach nor fused optimizers move that of a DTensor; loading does.
    """

    value: Tensor
    rounded: Tensor
    steps: int
    weight: int
    version: int


class Gathered(NamedTuple):
    """A weight as it arrived.

    Attributes:
        data: FP8 ``[n, k]``, memory of FSDP2's.
        scale: float32 ``[1, 1]``.
        address: Of the weight that the bytes mean: by it a layer knows that it is asked for this.
    """

    data: Tensor
    scale: Tensor
    address: int

    def is_of(self, weight: Tensor) -> bool:
        """Whether these bytes mean a weight: FSDP2 frees them when it frees the weight."""
        is_held = self.data.untyped_storage().size() > 0
        return is_held and self.address == weight.data_ptr() and self.data.shape == weight.shape

    def parts(self, routes: tuple[str, str, str]) -> tuple[Tensor | None, ...]:
        """What the output's product reads, and what that of the input's gradient does."""
        to_output, to_input = (scales_of(route) == TENSOR.value for route in routes[:2])
        forward = (self.data, self.scale) if to_output else (None, None)
        return (*forward, *((self.data.t(), self.scale) if to_input else (None, None)))


class GatheredWeight(Tensor):
    """Rows of a weight that FSDP2 gathers as FP8, by methods that it looks for.

    Nothing but FSDP2 sees this type: what is computed of it, or saved, is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in _KEEPING else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Bytes of this rank's rows, and zeros in the place of those that it has not."""
        gathering = module._gathering
        assert isinstance(gathering, Gathering)  # it made this type
        # As the whole weight would be rounded: by FSDP2 before it is quantized, or not at all.
        is_rounded = policy.param_dtype not in (None, torch.float32)
        scale = gathering.scale_of(module, is_rounded)
        n, k = outer_size
        rows = self.as_subclass(Tensor).detach()
        wire = torch.zeros((-(-n // mesh.size()), k), dtype=torch.uint8, device=rows.device)
        if rows.numel():
            rows = rows.to(torch.bfloat16) if is_rounded else rows
            quantized = quantize(rows, TENSOR, scale=scale)
            wire[: len(rows)] = quantized.data.view(torch.uint8)
        return (wire,), (module, scale, n)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Hand the bytes to the layer, and make the weight that they mean."""
        module, scale, n = metadata
        data = outputs[0][:n].view(fp8_format(device_of(outputs[0])).dtype)
        with torch.no_grad():
            meant = (data.float() * scale).to(dtype)
            if out is not None:  # which FSDP2 gave its memory back
                with _unsafe_preserve_version_counter(out):
                    out.copy_(meant)
        weight = meant if out is None else out
        module._gathered = Gathered(data, scale, weight.data_ptr())
        return None if out is not None else (meant, (meant,))


# What FSDP2 does to rows: it pads those of the last ranks, and moves those that are offloaded.
_KEEPING = frozenset((Tensor.new_zeros, Tensor.narrow, Tensor.to, Tensor.cpu, Tensor.pin_memory))


class Gathering:
    """Which weights of a model FSDP2 gathers as FP8, and their scales.

    Make it on every rank, after `lokakern.convert` and `fully_shard` and before the model is first
    called. Weights are those of converted layers whose output reads one scale for the whole weight
    (``weight_scales=["tensor"]`` of `convert`), and whose input's gradient does or is not
    quantized: then, and at m where the output is not, it reads the weight that the bytes mean. This
    lasts as long as the model is sharded; a `Conversion.refresh` or `undo` does not end it.

    Args:
        model: Converted and sharded.

    Attributes:
        layers: By name, whose weights are gathered as FP8.
        skipped: Other converted layers, by name, and why.

    Raises:
        UnknownNameError: There is no such layer.
        UnsupportedError: The model was called already: FSDP2 has decided how it gathers.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root is not None:
                raise UnsupportedError(
                    f"Gathering: {name or 'the model'} was called since fully_shard; make a "
                    "Gathering right after fully_shard"
                )
        every = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
        reasons = {name: _why_not(module) for name, module in every.items()}
        self.layers = {name: m for name, m in every.items() if not reasons[name]}
        self.skipped = {name: why for name, why in reasons.items() if why}
        if not self.layers:
            words = "".join(f"; {name}: {why}" for name, why in self.skipped.items())
            raise UnknownNameError(
                f"Gathering: no layer of {type(model).__name__} has a weight to gather as FP8; "
                f"expected one that lokakern.convert gave tensor scales (weight_scales=){words}"
            )
        # Also while FSDP2 has whole ones in their place.
        self._weights: dict[nn.Module, DTensor] = {}
        for module in self.layers.values():
            module._gathering = self
            self.keep(module)
        self._steps = 0
        self._asked: set[nn.Module] = set()  # for whose weights since scales were found
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # of these weights
        reference = weakref.ref(self)

        def stepped(optimizer: Any, *_: Any) -> None:
            gathering = reference()
            if gathering is not None and gathering._is_stepped_by(optimizer):
                gathering._steps += 1

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _is_stepped_by(self, optimizer: Any) -> bool:
        if optimizer not in self._optimizers:
            weights = {id(weight) for weight in self._weights.values()}
            groups = optimizer.param_groups
            if not any(id(p) in weights for group in groups for p in group["params"]):
                return False
            self._optimizers.add(optimizer)
        return True

    def keep(self, module: nn.Module) -> None:
        """Make rows what FSDP2 looks for, as which a cast, or loading, does not leave them."""
        weight = module.weight
        if isinstance(weight, DTensor):
            if self._weights.get(module) is not weight:  # an id may be another's by now
                module._weight_scale = None  # type: ignore[assignment]
            self._weights[module] = weight
            if not isinstance(weight._local_tensor, GatheredWeight):
                weight._local_tensor = weight._local_tensor.as_subclass(GatheredWeight)

    def scale_of(self, module: nn.Module, is_rounded: bool) -> Tensor:
        """Of a weight, or of it in bfloat16, ``[1, 1]``.

        Where weights may have changed those of all are found anew: in each forward pass, because a
        write through ``data`` moves no version. A backward pass, and what a checkpoint computes
        again in it, takes those of the forward pass.
        """
        scale: Scale | None = module._weight_scale  # type: ignore[assignment]
        weight = self._weights[module]
        is_backward = torch._C._current_graph_task_id() != -1
        is_next_pass = module in self._asked and not is_backward
        is_known = scale is not None and scale[2:] == (self._steps, id(weight), weight._version)
        if is_next_pass or not is_known:
            self.update()
            scale = module._weight_scale  # type: ignore[assignment]
        self._asked.update(self._weights if is_backward else (module,))
        assert scale is not None  # by now
        return scale.rounded if is_rounded else scale.value

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales of all weights by one all-reduce; every rank must call.

        FSDP2 does so in each forward pass. Only of weights that stay whole from one pass to the
        next (``reshard_after_forward=False``, without gradients) nothing is gathered, nor found.

        Raises:
            RuntimeError: A rank is gone; or what else the process group raises.
        """
        self._asked.clear()
        weights = self._weights.values()
        mesh = next(iter(weights)).device_mesh
        device = torch.device(mesh.device_type)  # rows may be offloaded
        amax = torch.stack([_amax(weight._local_tensor).to(device) for weight in weights])
        groups = {group.group_name: group for weight in weights for group in _groups_of(weight)}
        for _, group in sorted(groups.items()):
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        most = torch.finfo(fp8_format(device_of(amax)).dtype).max
        # The largest of rounded numbers is the largest one, rounded.
        scales, rounded = (
            torch.where(x == 0.0, 1.0, (x / most).clamp(min=2.0**-126))
            for x in (amax, amax.to(torch.bfloat16).float().clamp(max=_LARGEST))
        )
        both = zip(scales.view(-1, 1, 1), rounded.view(-1, 1, 1), strict=True)
        for (module, weight), scale in zip(self._weights.items(), both, strict=True):
            module._weight_scale = Scale(*scale, self._steps, id(weight), weight._version)  # type: ignore[assignment]

    def __repr__(self) -> str:
        count = sum(module.in_features * module.out_features for module in self.layers.values())
        left = f", {len(self.skipped)} left alone" if self.skipped else ""
        return f"Gathering({len(self.layers)} weights, {count} bytes a gather{left})"


def _why_not(module: Linear) -> str:
    to_output, to_input, _ = module._routes
    if not isinstance(module.weight, DTensor):
        return "its weight is not sharded by fully_shard"
    if not all(place.is_shard(0) for place in module.weight.placements if place.is_shard()):
        return "its weight is sharded by columns"
    if to_output == PLAIN:
        return "its output is not quantized"
    for gemm, route in (("output", to_output), ("input's gradient", to_input)):
        if route != PLAIN and scales_of(route) != TENSOR.value:
            return f"its {gemm} reads a weight with {scales_of(route)} scales"
    if module.padding != (0, 0):
        return "mods.Pad adds zeros to its weight at each call"
    if module.is_frozen:
        return "its weight is frozen"
    return ""


def _amax(rows: Tensor) -> Tensor:
    """The largest finite magnitude; 0 of none."""
    if not rows.numel():
        return torch.zeros((), device=rows.device)
    x = rows.as_subclass(Tensor).float()
    return x.nan_to_num(0.0, 0.0, 0.0).abs().amax()


def _groups_of(weight: DTensor) -> list[Any]:
    """Process groups between whose ranks it is sharded."""
    places = enumerate(weight.placements)
    return [weight.device_mesh.get_group(i) for i, place in places if place.is_shard()]
