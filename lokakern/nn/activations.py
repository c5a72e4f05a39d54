"""Activations that kernels apply, by the names of `lokakern.epilogue.ACTIVATIONS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import gelu, hardswish, relu, silu

# All but GELU, which is two, by what it calls `approximate`.
MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Hardswish: "hardswish",
    nn.SiLU: "silu",
}
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
CLASSES: tuple[type[nn.Module], ...] = (*MODULES, nn.GELU)
APPLY: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z, "relu": relu, "hardswish": hardswish, "silu": silu, "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}  # fmt: skip


def activation_of(module: nn.Module | None) -> str:
    """The name of the activation that a module is, or ""."""
    if type(module) is nn.GELU:
        return GELUS.get(module.approximate, "")
    return MODULES.get(type(module), "")  # type: ignore[arg-type]


def module_of(name: str) -> nn.Module:
    """A module that applies an activation."""
    for kind, known in MODULES.items():
        if known == name:
            return kind()
    return nn.GELU(next(how for how, known in GELUS.items() if known == name))
