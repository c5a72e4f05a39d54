"""Norms whose outputs a chain writes in FP8 with a static scale that depends on their parameters.

Such a norm is frozen as the FP8 weights of the chain are: the layer before it keeps copies of the
norm's weight and bias, and the scale at which ``bound * |weight| + |bias|`` is the largest FP8
value (`lokakern.norm.largest`). Chains read these, so that later writes to the parameters have no
effect on them, and no output saturates. All are renewed, in the same memory, where the FP8 weights
are, and when `load_state_dict` loads the norm.

The scale is kept once for each row, as kernels with rowwise scales read it: no launch repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lokakern.device import current_device
from lokakern.epilogue import norm_form
from lokakern.functional.static_scale import new_bound_scale
from lokakern.nn.chain_plan import read_plan
from lokakern.norm import largest, norm_named
from lokakern.registry.register import fp8_format, kernel_named
from lokakern.types import Granularity

if TYPE_CHECKING:
    from lokakern.nn.linear import Linear

# Names of buffers of a layer: copies, and the bytes of the scales, which no cast of a module
# changes.
NORM_WEIGHT, NORM_BIAS = "chain_scale_norm_weight", "chain_scale_norm_bias"
NORM_SCALE = "chain_scale_norm"
MOST_ROWS = 2**20  # with more, a launch repeats the scale


class KeptNorm(NamedTuple):
    """A norm behind a layer, of which a chain reads copies.

    Attributes:
        owner: Key of the conversion.
        norm: The module, in a tuple so that it is no child of the layer.
        rows: How many scales are kept.
    """

    owner: str
    norm: tuple[nn.Module]
    rows: int


@functools.lru_cache(maxsize=1024)
def frozen_norms(plan: str) -> tuple[tuple[int, int], ...]:
    """Places of layers whose affine norm a plan writes with a static scale, and the most rows."""
    layers, *both = read_plan(plan)
    found: dict[int, int] = {}
    for segments in both:
        ends = [*(start for start, _ in segments[1:]), MOST_ROWS + 1]
        for (_, steps), end in zip(segments, ends, strict=True):
            for step in steps:
                is_static = step.writes is Granularity.TENSOR and (
                    kernel_named(step.kernel).op == "gemm_norm"
                )
                if is_static and norm_form(layers[step.place].epilogue).affine:
                    rows = min(end - 1, MOST_ROWS)
                    found[step.place] = max(rows, found.get(step.place, 1))
    return tuple(sorted(found.items()))


def norms_of(
    plan: str, parts: Sequence[tuple[Linear, nn.Module | None, str]]
) -> Iterator[tuple[Linear, nn.Module, int]]:
    """Layers of a chain with the norms to freeze, and the most rows."""
    for place, rows in frozen_norms(plan) if plan and parts else ():
        layer, norm, _ = parts[place]
        if norm is not None:
            yield layer, norm, rows


def keep_norm(layer: Linear, owner: str, norm: nn.Module, rows: int) -> None:
    """Keep copies of a norm's parameters and its scale for a chain of a conversion."""
    drop_norm(layer, owner)
    layer._chain_norms = (*layer._chain_norms, KeptNorm(owner, (norm,), rows))
    hook = functools.partial(_renew, layer)
    norm.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    layer.renew_chain_weights()


def drop_norm(layer: Linear, owner: str | None = None) -> None:
    """Undo `keep_norm` of a conversion, or of all."""
    dropped = [x for x in layer._chain_norms if owner in (None, x.owner)]
    if not dropped:
        return
    layer._chain_norms = tuple(x for x in layer._chain_norms if x not in dropped)
    kept = {id(x.norm[0]) for x in layer._chain_norms}
    for (norm,) in (x.norm for x in dropped):
        hooks = norm._load_state_dict_post_hooks
        for key, hook in list(hooks.items()) if id(norm) not in kept else ():
            if isinstance(hook, functools.partial) and (hook.func, hook.args) == (_renew, (layer,)):
                del hooks[key]
    layer.renew_chain_weights()


def _renew(layer: Linear, *_: Any) -> None:
    layer.renew_chain_weights()


def made_buffers(layer: Linear, newest: set[str] | None) -> dict[str, Tensor]:
    """The buffers of the newest norm that the choices of a layer admit, made anew."""
    known = [x for x in layer._chain_norms if newest is None or x.owner in newest]
    if not known:
        return {}
    (norm,), rows = known[-1].norm, known[-1].rows
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    vectors = {NORM_WEIGHT: weight, NORM_BIAS: bias}
    device = layer.weight.device
    given = [x for x in (weight, bias) if x is not None]
    if any(type(x) not in (nn.Parameter, Tensor) or x.device != device for x in given):
        return {}
    name = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    bound = largest(norm_named(name), layer.out_features)
    form = fp8_format(current_device(device.type, device.index or 0))
    with torch.no_grad():
        scale = new_bound_scale(bound, form, weight, bias, device).expand(rows, 1).contiguous()
        copies = {name: x.detach().clone() for name, x in vectors.items() if x is not None}
    return {**copies, NORM_SCALE: scale.view(torch.uint8)}


def frozen_vectors(layer: Linear) -> tuple[Tensor | None, Tensor | None, Tensor] | None:
    """Copies of the norm's weight and bias, and the bytes of its scales; None without them."""
    buffers = layer._buffers
    if NORM_SCALE not in buffers:
        return None
    weight = getattr(layer, NORM_WEIGHT) if NORM_WEIGHT in buffers else None
    bias = getattr(layer, NORM_BIAS) if NORM_BIAS in buffers else None
    return weight, bias, getattr(layer, NORM_SCALE)
