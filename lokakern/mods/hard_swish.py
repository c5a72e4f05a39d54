"""`HardSwish`: a piecewise polynomial in the place of SiLU (Swish)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from lokakern.mods.editor import Editor, Mod

EFFECT = "x * relu6(x + 3) / 6 for x * sigmoid(x): off by at most 0.143, at -3 and 3"


@dataclass(frozen=True)
class HardSwish(Mod):
    """Put hard-swish in the place of `nn.SiLU`, and of ``functional.silu`` that a module holds.

    It needs no exponential, and is 0 below -3, so that no rounding of FP8 leaks through there. A
    ``forward`` that calls ``functional.silu`` by that name is left alone, and named.
    """

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        for name, module in editor.modules():
            if isinstance(module, nn.SiLU):
                if editor.replace(module, nn.Hardswish(module.inplace)):
                    editor.done(self, name, "SiLU", "Hardswish", EFFECT)
                else:
                    editor.left(self, name, "SiLU", "it is the model itself")
                continue
            if _calls_silu(module):
                editor.left(self, name, type(module).__name__, "its forward itself calls silu")
            for attribute, value in list(vars(module).items()):
                if value is functional.silu:
                    editor.set(module, attribute, functional.hardswish)
                    editor.done(self, f"{name}.{attribute}", "silu", "hardswish", EFFECT)


def _calls_silu(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    is_torchs = type(module).__module__.startswith("torch.")
    return code is not None and not is_torchs and "silu" in code.co_names
