"""FP8 between layers: inputs with a static scale from a norm, or from a fused activation.

Outputs of BlockNorm over n columns are at most sqrt(n), and the usual activations do not increase
magnitudes. So the scale of the next layer's input is static and quantizing is elementwise, which
torch.compile fuses into the norm: there is no separate quantizer that reads the whole tensor.

After an activation without a norm scales are dynamic. In inference, where its output has no other
use, a kernel of the registry activates and quantizes in one pass.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import PLAIN, reads_rows
from lokakern.norm import norm_named, static_scale
from lokakern.quantized_tensor import ROW_BYTES
from lokakern.registry.register import fp8_format
from lokakern.types import Device, ErrorBudget

# Row errors of products after BlockNorm(256) and hard-swish, emulated on the realistic
# distributions (m 512, k 1024, n 256): 0.036-0.046 with the static scale, 0.035-0.043 with rowwise
# scales; but 0.18 on X12, gradients, which are not inputs of a forward pass.
FLOOR = 0.05
_BOUNDED = (nn.ReLU, nn.Hardswish, nn.SiLU, nn.Identity)  # |f(z)| <= |z|
ACTIVATIONS = {nn.ReLU: "relu", nn.Hardswish: "hardswish", nn.SiLU: "silu"}


class Handoff(NamedTuple):
    """Settings of a conversion for a sequence.

    Attributes:
        key: Key of the conversion.
        modules: Modules for which the settings were made.
        scales: Static scale of each module's input, as text; "" without one.
        activating: For an activation that only the next module reads, the route of kernels that
            activate and quantize; "" for other modules.
    """

    key: str = ""
    modules: tuple[nn.Module, ...] = ()
    scales: tuple[str, ...] = ()
    activating: tuple[str, ...] = ()


class BoundedSequential(nn.Sequential):
    """`nn.Sequential` that quantizes inputs of linear layers before the layers.

    The container does this, because a layer may have other callers. A slice, or a container whose
    modules changed, runs as `nn.Sequential`. The newest handoff is in effect.
    """

    # With an underscore, so that names of children do not collide.
    _handoffs: tuple[Handoff, ...] = (Handoff(),)
    # The newest handoff in one text, for compilers: for a module that Dynamo meets in two places,
    # each call of the compiled model evaluates a guard in Python.
    _known = ""

    @property
    def is_as_known(self) -> bool:
        """Whether the modules are unchanged since the settings were made."""
        modules, known = tuple(self._modules.values()), self._handoffs[-1].modules
        return len(modules) == len(known) and all(map(operator.is_, modules, known))

    def forward(self, input: Tensor) -> Tensor:
        """Call the modules in order, as `nn.Sequential` does."""
        modules = list(self._modules.values())
        if is_compiling():
            words = [word.split("\0") for word in self._known.split("\1")]
            if [word[0] for word in words] != [_kind(module) for module in modules]:
                return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
            scales, activating = tuple(w[1] for w in words), tuple(w[2] for w in words)
        elif self.is_as_known:
            _, _, scales, activating = self._handoffs[-1]
        else:
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        place = 0
        while place < len(modules):
            module, route = modules[place], activating[place]
            done = None
            reader = modules[place + 1] if route else None
            # A module that was converted separately may have been undone separately.
            if (
                isinstance(reader, Linear)
                and not getattr(module, "inplace", False)
                and _is_plain_call(module)
                and _is_plain_call(reader)
            ):
                done = reader.forward_activated(input, ACTIVATIONS[type(module)], route)
            if done is not None:
                input, place = done, place + 2
                continue
            scale = scales[place] if isinstance(module, Linear) else ""
            input = module(input, input_scale=scale) if scale else module(input)
            place += 1
        return input

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            _write_known(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _write_known(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _write_known(self)


def _kind(module: nn.Module) -> str:
    """The kind of a module in a handoff, if it has one, with the sizes of its norm.

    A compiler finds it without a guard. It tells modules apart that were exchanged in ``_modules``.
    """
    if isinstance(module, BlockRMSNorm):
        return f"norm {module.columns} {module.block}"
    if isinstance(module, LinearNormAct):
        return f"linear {_kind(module.norm)}"
    if isinstance(module, Linear):
        return "linear"
    for kind in _BOUNDED:
        if isinstance(module, kind):
            return kind.__name__
    return "other"


def _write_known(sequence: nn.Sequential) -> None:
    """Write the newest handoff for compilers, unless the modules changed."""
    assert isinstance(sequence, BoundedSequential)
    _, *columns = sequence._handoffs[-1] if sequence.is_as_known else Handoff()
    rows = ((_kind(module), *rest) for module, *rest in zip(*columns, strict=True))
    sequence._known = "\1".join(map("\0".join, rows))


def set_handoff(
    sequence: nn.Sequential, scales: Sequence[str], activating: Sequence[str], key: str = ""
) -> None:
    """Apply a conversion's settings for the current modules of a sequence."""
    handoff = Handoff(key, tuple(sequence), tuple(scales), tuple(activating))
    sequence._handoffs = (*_others(sequence, key), handoff)  # type: ignore[assignment]
    if type(sequence) is nn.Sequential:
        sequence.__class__ = BoundedSequential  # last, for concurrent calls
    _write_known(sequence)


def remove_handoff(sequence: nn.Sequential, key: str = "") -> None:
    """Remove a conversion's settings from a sequence."""
    others = _others(sequence, key)
    if others:
        sequence._handoffs = others  # type: ignore[assignment]
        _write_known(sequence)
        return
    if type(sequence) is BoundedSequential:  # a class from fully_shard stays
        sequence.__class__ = nn.Sequential  # type: ignore[assignment]
    for name in ("_handoffs", "_known"):
        vars(sequence).pop(name, None)


def _others(sequence: nn.Sequential, key: str) -> tuple[Handoff, ...]:
    return tuple(h for h in vars(sequence).get("_handoffs", ()) if h.key != key)


def _is_plain_call(module: nn.Module) -> bool:
    """Whether a call of a module runs only its class's forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or nn.modules.module._global_forward_hooks
        or nn.modules.module._global_forward_pre_hooks
        or "forward" in module.__dict__
    )


def scales_between(sequence: nn.Sequential, device: Device) -> tuple[str, ...]:
    """Static scale of the input of each module; "" without one, or if no kernel reads it."""
    found, known = [], ""
    for module in sequence:
        found.append(known if _reads(module) else "")
        norm = module.norm if isinstance(module, LinearNormAct) else module
        if isinstance(norm, BlockRMSNorm):
            form = fp8_format(device)
            known = repr(static_scale(norm_named(norm.norm_name), norm.columns, form))
        elif type(module) not in _BOUNDED:
            known = ""
    return tuple(found)


def activations_between(
    sequence: nn.Sequential, scales: Sequence[str]
) -> dict[int, tuple[str, Linear]]:
    """Activations before a linear layer without a static scale, and the layer, by place."""
    found = {}
    for place, (module, reader) in enumerate(itertools.pairwise(sequence)):
        name = ACTIVATIONS.get(type(module))
        if not name or getattr(module, "inplace", False) or scales[place + 1]:
            continue
        if type(reader) is Linear and _reads(reader) and reads_rows(reader._routes[0]):
            found[place] = name, reader
    return found


def _reads(module: nn.Module) -> bool:
    if not isinstance(module, Linear) or type(module) not in (Linear, LinearNormAct):
        return False
    is_whole = module.padding == (0, 0) and module.in_features % ROW_BYTES == 0
    return is_whole and module._routes[0] != PLAIN


def is_affordable(budget: ErrorBudget | None) -> bool:
    """Whether a budget admits the rounding with a static scale."""
    limits = {} if budget is None else budget.limits
    return set(limits) == {"row_err"} and limits["row_err"] >= FLOOR
