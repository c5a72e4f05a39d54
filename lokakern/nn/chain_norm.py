"""Norms whose outputs a chain writes in FP8 with a static scale that depends on their parameters.

Such a norm is frozen as the FP8 weights of the chain are: the layer before it keeps copies of the
norm's weight and bias, and the scale at which ``bound * |weight| + |bias|`` is the largest FP8
value (`lokakern.norm.largest`). Chains read these, so that later writes to the parameters have no
effect on them, and no output saturates. All are renewed, in the same memory, where the FP8 weights
are, and when `load_state_dict` loads the norm. A layer with several norms behind it, or one of
several conversions, keeps each apart, and a chain reads those of the norm that it would call.

The scale is kept once for each row, as kernels with rowwise scales read it: no launch repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

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
# changes; of norms after the first one `_names_at` adds a number. `Linear.renew_chain_weights`
# finds them by how they begin, as `lokakern.nn.linear.CHAIN_SCALE`.
NORM_WEIGHT, NORM_BIAS = "chain_scale_norm_weight", "chain_scale_norm_bias"
NORM_SCALE = "chain_scale_norm"
MOST_ROWS = 2**20  # with more, a launch repeats the scale
_HELD = "_held_norms"  # of a module that runs chains: conversion, layer and norm of each


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


def keep_norms(
    holder: nn.Module, owner: str, norms: Iterable[tuple[Linear, nn.Module, int]]
) -> None:
    """Keep copies of norms' parameters and their scales for chains of a conversion.

    Args:
        holder: The module that runs the chains; it notes the norms for `drop_norms`.
        owner: Key of the conversion.
        norms: Those of `norms_of`.
    """
    held = []
    for layer, norm, rows in norms:
        held.append((owner, layer, norm))
        if all(x.norm[0] is not norm for x in layer._chain_norms):
            hook = functools.partial(_renew, layer)
            norm.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        layer._chain_norms = (*layer._chain_norms, KeptNorm(owner, (norm,), rows))
        layer.renew_chain_weights()
    if held:
        vars(holder)[_HELD] = (*vars(holder).get(_HELD, ()), *held)


def drop_norms(holder: nn.Module, owner: str) -> None:
    """Undo `keep_norms` of a holder and a conversion."""
    held = vars(holder).pop(_HELD, ())
    others = tuple(x for x in held if x[0] != owner)
    if others:
        vars(holder)[_HELD] = others
    for key, layer, norm in held:
        every = getattr(layer, "_chain_norms", ())  # none where its conversion was undone
        found = [x for x in every if x.owner == key and x.norm[0] is norm]
        if key == owner and found:
            place = every.index(found[0])
            _leave_norms(layer, (*every[:place], *every[place + 1 :]))


def drop_every_norm(layer: Linear) -> None:
    """Undo `keep_norms` of a layer."""
    _leave_norms(layer, ())


def _leave_norms(layer: Linear, wanted: tuple[KeptNorm, ...]) -> None:
    before, kept = layer._chain_norms, {id(x.norm[0]) for x in wanted}
    if len(wanted) == len(before):
        return
    layer._chain_norms = wanted
    for norm in {id(x.norm[0]): x.norm[0] for x in before if id(x.norm[0]) not in kept}.values():
        hooks = norm._load_state_dict_post_hooks
        for key, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and (hook.func, hook.args) == (_renew, (layer,)):
                del hooks[key]
    layer.renew_chain_weights()


def _renew(layer: Linear, *_: Any) -> None:
    layer.renew_chain_weights()


def admitted_norms(layer: Linear, newest: set[str] | None) -> tuple[nn.Module, ...]:
    """The norms of the newest conversion, or of those that a layer admits, each once."""
    known = [x.norm[0] for x in layer._chain_norms if newest is None or x.owner in newest]
    return tuple({id(norm): norm for norm in known}.values())


def made_buffers(layer: Linear) -> dict[str, Tensor]:
    """The buffers of the frozen norms of a layer, made anew."""
    found: dict[str, Tensor] = {}
    for place, norm in enumerate(layer._frozen_norms):
        rows = max(x.rows for x in layer._chain_norms if x.norm[0] is norm)
        made = _vectors_of(layer, norm, rows)
        found |= {name: x for name, x in zip(_names_at(place), made, strict=True) if x is not None}
    return found


def _vectors_of(layer: Linear, norm: nn.Module, rows: int) -> tuple[Tensor | None, ...]:
    """Copies of a norm's weight and bias, and the bytes of its scales; Nones if there are none."""
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    device = layer.weight.device
    given = [x for x in (weight, bias) if x is not None]
    if any(type(x) not in (nn.Parameter, Tensor) or x.device != device for x in given):
        return None, None, None
    name = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    bound = largest(norm_named(name), layer.out_features)
    form = fp8_format(current_device(device.type, device.index or 0))
    with torch.no_grad():
        scale = new_bound_scale(bound, form, weight, bias, device).expand(rows, 1).contiguous()
        copies = [None if x is None else x.detach().clone() for x in (weight, bias)]
    return *copies, scale.view(torch.uint8)


def _names_at(place: int) -> tuple[str, str, str]:
    after = f"_{place}" if place else ""
    return NORM_WEIGHT + after, NORM_BIAS + after, NORM_SCALE + after


def frozen_names(layer: Linear, norm: nn.Module | None) -> tuple[str, str, str] | None:
    """Names of the buffers of a norm: its weight, its bias and its scales; None without them."""
    for place, frozen in enumerate(layer._frozen_norms):
        if frozen is norm:
            names = _names_at(place)
            return names if names[2] in layer._buffers else None
    # A compiler guards that two are one, and that they are not by their ids: a refresh may change
    # that.
    for each in (*layer._frozen_norms, norm) if is_compiling() else ():
        id(each)
    return None


def frozen_vectors(
    layer: Linear, norm: nn.Module | None
) -> tuple[Tensor | None, Tensor | None, Tensor] | None:
    """Copies of a norm's weight and bias, and the bytes of its scales; None without them."""
    names = frozen_names(layer, norm)
    if names is None:
        return None
    buffers = layer._buffers
    weight = getattr(layer, names[0]) if names[0] in buffers else None
    bias = getattr(layer, names[1]) if names[1] in buffers else None
    return weight, bias, getattr(layer, names[2])
