"""FP8 between layers: what a norm bounds, or an activation makes, is handed over quantized.

No output of BlockNorm over n columns passes sqrt(n), whatever the row, and the usual activations
enlarge no magnitude. So the scale of what follows is known before it is, and quantizing is a step
for each element by itself, which torch.compile does where the norm is computed: the kernel that
quantizes, and its reading of the whole tensor, are gone.

Behind an activation alone scales have to be found. In inference, where nobody asks for its output,
a kernel of the registry activates and quantizes in one read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import PLAIN, reads_rows
from lokakern.norm import norm_named, static_scale
from lokakern.quantized_tensor import ROW_BYTES
from lokakern.registry.register import fp8_format
from lokakern.types import Device, ErrorBudget

# Row errors of products whose left operand comes from BlockNorm(256) and hard-swish, emulated on
# the realistic distributions (m 512, k 1024, n 256): 0.036-0.046 under the scale that is known, and
# 0.035-0.043 under those of rows; but 0.18 on X12, gradients, which no forward pass reads.
FLOOR = 0.05
_BOUNDED = (nn.ReLU, nn.Hardswish, nn.SiLU, nn.Identity)  # |f(z)| <= |z|
ACTIVATIONS = {nn.ReLU: "relu", nn.Hardswish: "hardswish", nn.SiLU: "silu"}


class _Telling(NamedTuple):
    key: str
    known: tuple[nn.Module, ...]
    scales: tuple[str, ...]
    activating: tuple[str, ...]


class BoundedSequential(nn.Sequential):
    """`nn.Sequential` that hands the inputs of linear layers over in FP8, where it was told how.

    The one who calls says so, because a layer cannot know what else it is called with. A slice of
    it, and one whose modules were changed, is called as `nn.Sequential` is.

    Attributes:
        _tellings: What conversions told it, by key; the newest is in force, and is the following.
        _known: Its modules when the following was found.
        _scales: Of the input of each module in order, as text; "" where none is known.
        _activating: Of an activation whose output the next module alone reads, the route of kernels
            that activate and quantize; "" of other modules.
    """

    # With an underscore: children have names, too.
    _tellings: tuple[_Telling, ...] = ()
    _known: tuple[nn.Module, ...] = ()
    _scales: tuple[str, ...] = ()
    _activating: tuple[str, ...] = ()

    @property
    def is_as_known(self) -> bool:
        """Whether its modules are those of which something was found."""
        modules = tuple(self._modules.values())
        return len(modules) == len(self._known) and all(
            a is b for a, b in zip(modules, self._known, strict=True)
        )

    def forward(self, input: Tensor) -> Tensor:
        """As of `nn.Sequential`."""
        if not self.is_as_known:
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        modules, place = self._known, 0
        while place < len(modules):
            module, route = modules[place], self._activating[place]
            done = None
            reader = modules[place + 1] if route else None
            # One that was converted apart may have been undone apart, too.
            if isinstance(reader, Linear) and _is_by_itself(module) and _is_by_itself(reader):
                done = reader.forward_activated(input, ACTIVATIONS[type(module)], route)
            if done is not None:
                input, place = done, place + 2
                continue
            scale = self._scales[place] if isinstance(module, Linear) else ""
            input = module(input, input_scale=scale) if scale else module(input)
            place += 1
        return input


def tell(
    sequence: nn.Sequential, scales: Sequence[str], activating: Sequence[str], key: str = ""
) -> None:
    """Let a sequence hand over what a conversion found of its modules as they are now."""
    told = _Telling(key, tuple(sequence), tuple(scales), tuple(activating))
    _put(sequence, (*_others(sequence, key), told))
    if type(sequence) is nn.Sequential:
        sequence.__class__ = BoundedSequential  # last: another thread may be calling it


def forget(sequence: nn.Sequential, key: str = "") -> None:
    """Make it what it was before this conversion told it something."""
    others = _others(sequence, key)
    if others:
        _put(sequence, others)
        return
    if type(sequence) is BoundedSequential:  # a class that fully_shard made stays
        sequence.__class__ = nn.Sequential  # type: ignore[assignment]
    for name in _OURS & vars(sequence).keys():
        delattr(sequence, name)


def _others(sequence: nn.Sequential, key: str) -> tuple[_Telling, ...]:
    return tuple(told for told in getattr(sequence, "_tellings", ()) if told.key != key)


def _put(sequence: Any, tellings: tuple[_Telling, ...]) -> None:
    sequence._tellings = tellings
    _, sequence._known, sequence._scales, sequence._activating = tellings[-1]


_OURS = {"_tellings", "_known", "_scales", "_activating"}


def _is_by_itself(module: nn.Module) -> bool:
    """Whether calling a module is nothing but its class's forward, and leaves the input alone."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or nn.modules.module._global_forward_hooks
        or nn.modules.module._global_forward_pre_hooks
        or "forward" in module.__dict__
        or getattr(module, "inplace", False)
    )


def scales_between(sequence: nn.Sequential, device: Device) -> tuple[str, ...]:
    """Of the input of each module of a sequence; "" where none is known, or nothing reads it."""
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
    """Activations that a linear layer alone reads, in FP8 whose scale is not known: who, by place.

    Args:
        sequence: Its modules.
        scales: See `scales_between`.
    """
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
    """Whether a budget allows for the rounding under such a scale."""
    limits = {} if budget is None else budget.limits
    return set(limits) == {"row_err"} and limits["row_err"] >= FLOOR
