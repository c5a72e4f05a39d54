"""What `convert` and mods put on a layer, so that each can be undone in any order.

The first that needs it makes an `nn.Linear` a `Linear`, in place; when all of them are undone it is
an `nn.Linear` again. If a layer was converted several times, the newest conversion that was not
undone decides its routes.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import Tensor, nn

from lokakern.nn.linear import PLAIN_ROUTES, Linear, Routed


class Chosen(NamedTuple):
    """What a conversion chose for a layer.

    Attributes:
        key: Of the conversion.
        routes: Of its products: output, grad_input, grad_weight.
        is_inference: Whether the weight is quantized once and for all.
    """

    key: str
    routes: tuple[str, ...]
    is_inference: bool


def adopt(layer: nn.Module) -> None:
    """Make an `nn.Linear` a `Linear`; leave any other layer as it is."""
    if type(layer) is nn.Linear:
        layer.__class__ = Linear
        layer._is_adopted = True  # type: ignore[assignment]


def release(layer: nn.Module) -> None:
    """Make an adopted layer an `nn.Linear` again if nothing else needs it to be a `Linear`.

    A class that fully_shard made stays, and a layer whose weight FSDP2 gathers as FP8: without
    routes both multiply as `nn.Linear` does.
    """
    if type(layer) is not Linear or not layer._is_adopted:
        return
    is_needed = layer._choices or layer.padding != (0, 0) or layer.is_mixing
    if is_needed or layer._gathering is not None:
        return
    for name in vars(layer).keys() & _OURS:
        delattr(layer, name)
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def choose(module: Routed, chosen: Chosen) -> None:
    """Run by these routes from now on."""
    others = (c for c in module._choices if c.key != chosen.key)
    module._choices = (*others, chosen)
    _run_newest(module)


def unchoose(module: Routed, key: str) -> None:
    """Take off what a conversion chose, if it is still there, and run by what was chosen before."""
    _keep(module, tuple(c for c in module._choices if c.key != key))
    release(module)


def resize(module: Routed, before: tuple[Chosen, ...], what: str) -> None:
    """Quantize nothing where kernels were chosen for sizes that a layer no longer has, and warn.

    Args:
        module: Whose padding was undone, or which is part of the model no longer.
        before: Choices that were made for the sizes that are left.
        what: Of the warning: what was undone.
    """
    plain = [c if c in before else c._replace(routes=PLAIN_ROUTES) for c in module._choices]
    if tuple(plain) != module._choices:
        warnings.warn(
            f"{what} is undone, but a later conversion chose kernels for the sizes that it had "
            "made: these products are not quantized until that conversion is refreshed or the "
            "model is converted again",
            stacklevel=2,
        )
        _keep(module, tuple(plain))


def retake(module: Routed) -> None:
    """Run by the same routes, after something else that `Linear.is_special` covers changed."""
    if module._choices:
        _run_newest(module)
    else:
        module.take_routes(module._routes, _parameter(module))


def _keep(module: Routed, choices: tuple[Chosen, ...]) -> None:
    is_newest_gone = module._choices[-1:] != choices[-1:]
    module._choices = choices
    if is_newest_gone:
        _run_newest(module)


def _run_newest(module: Routed) -> None:
    newest = module._choices[-1] if module._choices else Chosen("", PLAIN_ROUTES, False)
    module.take_routes(newest.routes, _parameter(module))
    if newest.is_inference:
        module.freeze()


def _parameter(module: Routed) -> Tensor | None:
    """The parameter that is multiplied as it is."""
    is_plain = isinstance(module, Linear) and module.padding == (0, 0)
    weight = module.weight if is_plain else None
    return weight if isinstance(weight, Tensor) and not hasattr(weight, "to_local") else None


# Attributes of a Linear that an nn.Linear does not have.
_OURS = {
    name
    for kind in (Routed, Linear)
    for name, value in vars(kind).items()
    if not name.startswith("__") and not callable(value)
}
