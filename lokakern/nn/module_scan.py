"""Sites: the modules of a model that multiply by a weight, with their names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd as _Convolution

# What watches look at in some steps, without hooks in others, and how many do: nothing may take its
# place.
WATCHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
ModuleFilter = Callable[[nn.Module, str], bool]
INNER = "it is multiplied as a part of another layer"
NOT_SHOWN = "no forward of its module shows a product of rows with it"
OF_TORCH = "products of torch's own modules are not converted"
MIXING = "MixTokens makes it multiply across tokens, whose layout no FP8 kernel reads"
# Modules of torch that multiply by a parameter of their own; others only hold parameters, look rows
# up or scale by them.
_MULTIPLYING = (
    nn.MultiheadAttention, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, _Convolution,
    nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
_HIDDEN = (nn.Bilinear, nn.RNNBase)  # whose nodes hold several products, or are the backend's
# Parts of names from wrappers: torch.compile, FSDP1, checkpoints.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Joined(nn.Module):
    """Linear layers that are multiplied as one; they keep their parameters and names."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # not children: the layers stay registered at their places


def named_modules(model: nn.Module, accepts: ModuleFilter) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules that a filter accepts; names lack the parts from wrappers."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    for full, module in model.named_modules():
        words = [word for word in full.split(".") if word not in _WRAPPERS]
        if is_ddp and words[:1] == ["module"]:
            words = words[1:]
        name = ".".join(words)
        if accepts(module, name):
            yield name, module


def inner_layers(model: nn.Module) -> set[int]:
    """Ids of layers that are parts of a `Joined`, which are no longer called."""
    return {id(part) for m in model.modules() if isinstance(m, Joined) for part in m.parts}


def shape_of(module: nn.Module) -> tuple[int, int, bool, Tensor]:
    """N and k of a site with padding, whether it has a bias, and a parameter."""
    if isinstance(module, nn.Linear):
        k, n = getattr(module, "padding", (0, 0))
        return (
            module.out_features + n, module.in_features + k, module.bias is not None, module.weight
        )  # fmt: skip
    shape: tuple[int, int, bool, Tensor] = module.product_shape()  # type: ignore[operator]
    return shape


def weight_of(module: nn.Module) -> Any:
    """The weight ``[n, k]`` of a module; concatenated if it is several parameters.

    A parametrization with buffers, such as a spectral norm, updates them in training mode; in eval
    mode it returns the weight of the latest call.
    """
    if has_buffers(module):
        parametrized = module.parametrizations.weight  # type: ignore[union-attr]
        training = [m for m in parametrized.modules() if m.training]  # type: ignore[union-attr]
        for m in training:
            m.training = False
        try:
            return module.weight
        finally:
            for m in training:
                m.training = True
    weight: Any = module.weight
    return weight() if getattr(module, "makes_weight", False) else weight


def has_buffers(module: nn.Module) -> bool:
    """Whether the weight has a parametrization with buffers."""
    parametrized = getattr(getattr(module, "parametrizations", None), "weight", None)
    return parametrized is not None and any(True for _ in parametrized.buffers())


def matrices_elsewhere(model: nn.Module, *, is_seen: bool = False) -> dict[str, str]:
    """Parameters that modules other than `nn.Linear` may multiply by.

    Of torch's own modules only those count that do multiply by a parameter.

    Args:
        model: Any module.
        is_seen: Whether a Probe report lists products of a forward pass: then only parameters that
            autograd does not show there.
    """
    found = {}
    for name, module in named_modules(model, lambda *_: True):
        is_known = type(module).__module__.startswith(("torch.", "lokakern."))
        may_multiply = isinstance(module, _MULTIPLYING) or not is_known
        is_hidden = isinstance(module, _HIDDEN)
        if isinstance(module, nn.Linear) or not (is_hidden if is_seen else may_multiply):
            continue
        why = NOT_SHOWN
        if is_known and not isinstance(module, nn.ParameterList | nn.ParameterDict):
            why = OF_TORCH
        for key, p in module.named_parameters(recurse=False):
            size = "a parameter that is not initialized"
            if not isinstance(p, nn.UninitializedParameter):
                is_kernel = isinstance(module, _Convolution)  # [outputs, inputs / groups, *window]
                if p.dim() < 2 or min(p.flatten(1).shape if is_kernel else p.shape[-2:]) < 2:
                    continue  # it is no factor of a product of matrices
                size = str(list(p.shape))
            found[f"{name}.{key}" if name else key] = (
                f"a {type(module).__name__} holds {size}; {why}"
            )
    return found
