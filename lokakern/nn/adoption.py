"""Changes of a layer by conversions and mods, which can be undone in any order.

The first change makes an `nn.Linear` a `Linear` in place; when all changes are undone, it becomes
an `nn.Linear` again. The newest remaining conversion of a layer determines its routes.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lokakern.nn.attention import adopt_attention, release_attention
from lokakern.nn.linear import PLAIN_ROUTES, Linear, Routed, is_linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.raw_product import RawProduct


class Chosen(NamedTuple):
    """The routes of a conversion for a layer.

    Attributes:
        key: Key of the conversion.
        routes: Routes of output, grad_input and grad_weight.
        is_inference: Whether the weight is quantized once.
        chain: The plan of a chain of a `LinearNormAct` alone, or "".
        form: The form of a `Linear` in compiled code, see `lokakern.nn.compiled_form`.
        adds_gradient: The dtype of products whose gradients of the weight are added to its
            ``main_grad``, bfloat16 or float16; None for ordinary gradients.
    """

    key: str
    routes: tuple[str, ...]
    is_inference: bool
    chain: str = ""
    form: str = ""
    adds_gradient: torch.dtype | None = None


def adopt(layer: nn.Module) -> None:
    """Make an `nn.Linear` a `Linear`, and a `RawProduct` a child; leave others as they are.

    The owner of a `RawProduct` becomes an `Attention` if it is an `nn.MultiheadAttention`.
    """
    if isinstance(layer, RawProduct):
        layer.register()
        adopt_attention(layer.owner[0])
    if type(layer) is nn.Linear:
        layer.__class__ = Linear
        layer._is_adopted = True  # type: ignore[assignment]


def release(layer: nn.Module) -> None:
    """Make an adopted layer an `nn.Linear` again, unless another change needs a `Linear`.

    A class from fully_shard stays, and so does a layer whose weight FSDP2 gathers as FP8: without
    routes both multiply as `nn.Linear`. A `RawProduct` leaves its module.
    """
    if isinstance(layer, RawProduct) and not layer._choices:
        layer.unregister()
        release_attention(layer.owner[0])
    if not is_linear(layer) or not layer._is_adopted:
        return
    is_needed = layer._choices or layer.padding != (0, 0) or layer.is_mixing
    if is_needed or layer._gathering is not None:
        return
    layer.drop_chain_weights()
    for name in vars(layer).keys() & _OWN_ATTRIBUTES:
        delattr(layer, name)
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def apply_choice(module: Routed, chosen: Chosen) -> None:
    """Apply the routes of a conversion, the newest one."""
    others = (c for c in module._choices if c.key != chosen.key)
    module._choices = (*others, chosen)
    _apply_newest(module)


def remove_choice(module: Routed, key: str) -> None:
    """Remove the routes of a conversion and apply those of the newest remaining one."""
    _set_choices(module, tuple(c for c in module._choices if c.key != key))
    release(module)


def resize(module: Routed, before: tuple[Chosen, ...], what: str) -> None:
    """Make routes plain that were chosen for sizes that a layer no longer has, and warn.

    Args:
        module: A layer without its padding, or one that left the model.
        before: Choices that were made for the current sizes.
        what: Name of the undone mod in the warning.
    """
    plain = [
        c if c in before else c._replace(routes=PLAIN_ROUTES, chain="") for c in module._choices
    ]
    if tuple(plain) != module._choices:
        warnings.warn(
            f"{what} is undone, but a later conversion chose kernels for its sizes: these products "
            "are not quantized until that conversion is refreshed or the model is converted again",
            stacklevel=2,
        )
        _set_choices(module, tuple(plain))


def retake(module: Routed) -> None:
    """Apply the routes again after a change of padding or mixing."""
    if module._choices:
        _apply_newest(module)
    else:
        module.take_routes(module._routes, _parameter(module))


def _set_choices(module: Routed, choices: tuple[Chosen, ...]) -> None:
    is_newest_gone = module._choices[-1:] != choices[-1:]
    module._choices = choices
    if is_newest_gone:
        _apply_newest(module)


def _apply_newest(module: Routed) -> None:
    newest = module._choices[-1] if module._choices else Chosen("", PLAIN_ROUTES, False)
    module.take_routes(newest.routes, _parameter(module))
    if isinstance(module, Linear):
        module.take_form(newest.form)
        if newest.adds_gradient or module.adds_gradient:
            module.add_gradient(newest.adds_gradient or None)
    if isinstance(module, LinearNormAct):
        module.take_chain(newest.chain)
    if newest.is_inference:
        module.freeze()


def _parameter(module: Routed) -> Tensor | None:
    """The parameter, if it is multiplied without change."""
    is_plain = isinstance(module, Linear) and module.padding == (0, 0)
    is_plain |= isinstance(module, RawProduct) and module.is_there
    weight = module.weight if is_plain else None
    return weight if isinstance(weight, Tensor) and not hasattr(weight, "to_local") else None


# Attributes of a Linear that an nn.Linear does not have.
_OWN_ATTRIBUTES = {
    name
    for kind in (Routed, Linear)
    for name, value in vars(kind).items()
    if not name.startswith("__") and not callable(value)
}
