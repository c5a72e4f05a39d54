"""Modules of torch that read parameters of their children instead of calling them.

`nn.MultiheadAttention` never calls ``out_proj``. `nn.TransformerEncoderLayer`, evaluated without
gradients, gives all of its parameters to one kernel, its fast path; `nn.TransformerEncoder` packs
padded sequences into a nested tensor for that kernel. Both would pass over a child that `convert`
or a mod changed, or fail, so the fast path is switched off while there is such a child.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lokakern.nn.linear import Routed

NEVER_CALLED = "nn.MultiheadAttention reads its parameters and never calls it"
_SWITCHES = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_READ = ("linear1", "linear2", "norm1", "norm2")


def never_called(model: nn.Module) -> set[int]:
    """Ids of layers whose parameters are read by the module that they belong to, in every mode."""
    return {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


def fast_paths(model: nn.Module) -> list[nn.Module]:
    """Modules that have a fast path past their children."""
    return [module for module in model.modules() if isinstance(module, tuple(_SWITCHES))]


def set_fast_paths(owners: list[nn.Module]) -> None:
    """Switch off the fast path of each that must call its children, and on again what was on."""
    for owner in owners:
        kind = next(kind for kind in _SWITCHES if isinstance(owner, kind))
        name, off = _SWITCHES[kind]
        kept = f"_lokakern_{name}"
        if any(_must_call(layer) for layer in owner.modules()):
            value = getattr(owner, name, off)
            if value != off:
                setattr(owner, kept, value)
                setattr(owner, name, off)
        elif hasattr(owner, kept):
            setattr(owner, name, getattr(owner, kept))
            delattr(owner, kept)


def _must_call(layer: nn.Module) -> bool:
    """Whether it is an encoder layer whose fast path would not do what its children do.

    Any converted or padded layer counts, whether or not it quantizes at this moment: numerics then
    do not change between training and evaluation, or by a `Conversion.refresh`.
    """
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return False
    if any(isinstance(module, Routed) for module in layer.modules()):
        return True
    attention: Any = layer.self_attn
    if attention.in_proj_bias is None:  # made without biases: it has no fast path
        return False
    children: list[Any] = [getattr(layer, name, None) for name in _READ]
    return any(child is not None and getattr(child, "bias", None) is None for child in children)
