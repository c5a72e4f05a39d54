"""Modules of torch that read parameters of their children instead of calling them.

`nn.MultiheadAttention` never calls ``out_proj``. `nn.TransformerEncoderLayer` has a fast path in
inference that passes all parameters to one kernel; `nn.TransformerEncoder` packs padded sequences
into a nested tensor for that kernel. Both would ignore a child that `convert` or a mod changed, or
fail, so the fast path is disabled while there is such a child.
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
    """Ids of layers that are never called, because their parent reads their parameters."""
    return {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


def fast_paths(model: nn.Module) -> list[nn.Module]:
    """Modules with a fast path that does not call their children."""
    return [module for module in model.modules() if isinstance(module, tuple(_SWITCHES))]


def set_fast_paths(owners: list[nn.Module]) -> None:
    """Disable the fast path of modules that must call their children, else enable it again."""
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


def without_fast_path(owner: nn.Module) -> dict[str, Any]:
    """The attribute of a module that turns its fast path off, and its value then."""
    return dict([_SWITCHES[type(owner)]]) if type(owner) in _SWITCHES else {}


def _must_call(layer: nn.Module) -> bool:
    """Whether an encoder layer has children that its fast path would not compute.

    Any converted or padded layer counts, even if it does not quantize now, so that numerics do not
    change between training and evaluation, or after `Conversion.refresh`.
    """
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return False
    if any(isinstance(module, Routed) for module in layer.modules()):
        return True
    attention: Any = layer.self_attn
    if attention.in_proj_bias is None:  # without biases it has no fast path
        return False
    children: list[Any] = [getattr(layer, name, None) for name in _READ]
    return any(child is not None and getattr(child, "bias", None) is None for child in children)
