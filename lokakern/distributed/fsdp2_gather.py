"""Weights gathered as FP8 under FSDP2: half the bytes of bfloat16, quantized once.

    lokakern.convert(model, 0.06, weight_scales=["tensor"])
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    Gathering(model)

A weight has one scale, which all ranks need before they quantize their rows. One all-reduce at the
first gather of a forward pass computes the scales of all weights, so that all changes of weights
count. Then each rank sends its rows as bytes, and the GEMMs of converted layers read the gathered
bytes, which are bitwise equal to a quantization of the whole weight. Other readers get the
dequantized weight in the dtype of FSDP2's policy. Optimizers, gradients and checkpoints are not
affected.
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
# Of policies, to which FSDP2 rounds a weight before it is quantized.
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class Scale(NamedTuple):
    """The scale of a weight, and the state for which it is valid.

    Attributes:
        values: float32 ``[1, 1]``, the same on all ranks, of the weight in each of `_DTYPES`.
        steps: Number of optimizer steps.
        weight: Id of the parameter.
        version: Its version, which loading changes, but not foreach and fused optimizers.
    """

    values: dict[torch.dtype, Tensor]
    steps: int
    weight: int
    version: int


class Gathered(NamedTuple):
    """A gathered weight.

    Attributes:
        data: FP8 ``[n, k]`` in memory of FSDP2.
        scale: float32 ``[1, 1]``.
        address: Address of the dequantized weight, by which a layer recognizes it.
    """

    data: Tensor
    scale: Tensor
    address: int

    def is_of(self, weight: Tensor) -> bool:
        """Whether the bytes belong to a weight; FSDP2 frees both together."""
        is_held = self.data.untyped_storage().size() > 0
        return is_held and self.address == weight.data_ptr() and self.data.shape == weight.shape

    def parts(self, routes: tuple[str, str, str]) -> tuple[Tensor | None, ...]:
        """FP8 weights for the output and for the gradient of the input."""
        to_output, to_input = (scales_of(route) == TENSOR.value for route in routes[:2])
        forward = (self.data, self.scale) if to_output else (None, None)
        return (*forward, *((self.data.t(), self.scale) if to_input else (None, None)))


class GatheredWeight(Tensor):
    """Rows of a weight with FSDP2's extension methods for all-gathers.

    Only FSDP2 sees this type: results of operations, and saved tensors, are plain.
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
        """Bytes of this rank's rows, padded with zeros."""
        gathering = module._gathering
        assert isinstance(gathering, Gathering)  # it made this type
        half = policy.param_dtype or torch.float32
        scale = gathering.scale_of(module, half)
        n, k = outer_size
        rows = self.as_subclass(Tensor).detach()
        wire = torch.zeros((-(-n // mesh.size()), k), dtype=torch.uint8, device=rows.device)
        if rows.numel():
            rows = rows if half is torch.float32 else rows.to(half)
            quantized = quantize(rows, TENSOR, scale=scale)
            wire[: len(rows)] = quantized.data.view(torch.uint8)
        return (wire,), (module, scale, n)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Store the bytes in the layer, and return the dequantized weight."""
        module, scale, n = metadata
        data = outputs[0][:n].view(fp8_format(device_of(outputs[0])).dtype)
        with torch.no_grad():
            dequantized = (data.float() * scale).to(dtype)
            if out is not None:  # whose memory FSDP2 allocated again
                with _unsafe_preserve_version_counter(out):
                    out.copy_(dequantized)
        weight = dequantized if out is None else out
        module._gathered = Gathered(data, scale, weight.data_ptr())
        return None if out is not None else (dequantized, (dequantized,))


# Operations of FSDP2 on rows: padding for the last ranks, and moves of offloaded rows.
_KEEPING = frozenset((Tensor.new_zeros, Tensor.narrow, Tensor.to, Tensor.cpu, Tensor.pin_memory))


class Gathering:
    """The weights of a model that FSDP2 gathers as FP8, and their scales.

    Create it on every rank, after `lokakern.convert` and `fully_shard` and before the first call of
    the model. It applies to converted layers whose output reads a tensorwise scale of the weight
    (``weight_scales=["tensor"]`` of `convert`), and whose input gradient does so, too, or is not
    quantized. Unquantized products read the dequantized weight. It stays in effect as long as the
    model is sharded, also after `Conversion.refresh` or `undo`.

    Args:
        model: Converted and sharded.

    Attributes:
        layers: Layers by name whose weights are gathered as FP8.
        skipped: Reasons by name for other converted layers.

    Raises:
        UnknownNameError: There is no such layer.
        UnsupportedError: The model was called before, so FSDP2 has fixed its all-gathers.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root is not None:
                raise UnsupportedError(
                    f"Gathering: {name or 'the model'} was called since fully_shard; create the "
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
        # References, because FSDP2 replaces parameters by unsharded ones.
        self._weights: dict[nn.Module, DTensor] = {}
        for module in self.layers.values():
            module._gathering = self
            self.keep(module)
        self._steps = 0
        self._asked: set[nn.Module] = set()  # modules gathered since the last update of scales
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
        """Make the local tensor a `GatheredWeight` again after a cast or a load."""
        weight = module.weight
        if isinstance(weight, DTensor):
            if self._weights.get(module) is not weight:  # ids may be reused
                module._weight_scale = None  # type: ignore[assignment]
            self._weights[module] = weight
            if not isinstance(weight._local_tensor, GatheredWeight):
                weight._local_tensor = weight._local_tensor.as_subclass(GatheredWeight)

    def scale_of(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """The scale of a weight rounded to one of `_DTYPES`, ``[1, 1]``; float32 rounds nothing.

        The scales of all weights are updated in each forward pass, because writes through ``data``
        do not change versions. The backward pass, and recomputation in it, uses those of the
        forward pass.
        """
        scale: Scale | None = module._weight_scale  # type: ignore[assignment]
        weight = self._weights[module]
        is_backward = torch._C._current_graph_task_id() != -1
        is_next_pass = module in self._asked and not is_backward
        is_known = scale is not None and scale[1:] == (self._steps, id(weight), weight._version)
        if is_next_pass or not is_known:
            self.update()
            scale = module._weight_scale  # type: ignore[assignment]
        self._asked.update(self._weights if is_backward else (module,))
        assert scale is not None  # by now
        return scale.values[dtype]

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales of all weights with one all-reduce; every rank must call it.

        FSDP2 calls it in each forward pass, unless weights stay unsharded
        (``reshard_after_forward=False``, without gradients).

        Raises:
            RuntimeError: The process group failed.
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
        values = []
        for dtype in _DTYPES:  # the amax of rounded values is the rounded amax
            x = amax.to(dtype).float().clamp(max=torch.finfo(dtype).max)
            values.append(torch.where(x == 0.0, 1.0, (x / most).clamp(min=2.0**-126)))
        for i, (module, weight) in enumerate(self._weights.items()):
            of_weight = {d: x[i].view(1, 1) for d, x in zip(_DTYPES, values, strict=True)}
            scale = Scale(of_weight, self._steps, id(weight), weight._version)
            module._weight_scale = scale  # type: ignore[assignment]

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
    if module.delayed is not None:
        return "its weight has a scale of earlier steps (scaling='delayed')"
    return ""


def _amax(rows: Tensor) -> Tensor:
    """The largest finite magnitude, or 0."""
    if not rows.numel():
        return torch.zeros((), device=rows.device)
    x = rows.as_subclass(Tensor).float()
    return x.nan_to_num(0.0, 0.0, 0.0).abs().amax()


def _groups_of(weight: DTensor) -> list[Any]:
    """Process groups over which a weight is sharded."""
    places = enumerate(weight.placements)
    return [weight.device_mesh.get_group(i) for i, place in places if place.is_shard()]
