"""`Pad`: zeros beside operands whose sizes fast kernels do not take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lokakern.errors import ShapeError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.adoption import adopt, release, resize, retake
from lokakern.nn.linear import Linear
from lokakern.nn.module_scan import INNER, inner_layers
from lokakern.nn.torch_owners import NEVER_CALLED, never_called


@dataclass(frozen=True)
class Pad(Mod):
    """Add zeros to inputs and outputs of linear layers up to a multiple, at each call.

    Parameters keep their shapes, and so do checkpoints; of weights in bfloat16, inference keeps a
    padded copy (`lokakern.convert`). Zeros add nothing to a sum: exact.

    Args:
        k: What the number of inputs becomes a multiple of; 16 is what FP8 kernels of libraries ask.
        n: The same of outputs.
        most_growth: A layer whose product would grow to more than this times its size is left
            alone: zeros would cost more than alignment gains.
    """

    is_exact = True
    k: int = 16
    n: int = 16
    most_growth: float = 1.25

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        if not all(isinstance(x, int) and x >= 1 for x in (self.k, self.n)):
            raise ShapeError(
                f"Pad: multiples are {self.k!r} and {self.n!r}; expected integers >= 1"
            )
        inner, uncalled = inner_layers(editor.model), never_called(editor.model)
        for name, layer in editor.modules(nn.Linear):
            assert isinstance(layer, nn.Linear)  # what was asked for
            k, n = layer.in_features, layer.out_features
            more = (-k % self.k, -n % self.n)
            if more == (0, 0):
                continue
            shape, wide = f"k={k} n={n}", f"k={k + more[0]} n={n + more[1]}"
            growth = (k + more[0]) * (n + more[1]) / (k * n)
            if id(layer) in uncalled:
                editor.left(self, name, shape, NEVER_CALLED)
            elif type(layer) not in (nn.Linear, Linear):
                editor.left(self, name, shape, f"it is a {type(layer).__name__}")
            elif id(layer) in inner:
                editor.left(self, name, shape, INNER)
            elif getattr(layer, "is_frozen", False):
                editor.left(self, name, shape, "its weight is quantized: put Mods before convert")
            elif getattr(layer, "is_mixing", False):
                editor.left(self, name, shape, "MixTokens has it multiply tokens as they lie")
            elif growth > self.most_growth:
                editor.left(self, name, shape, f"the product would be {growth:.2f} times as large")
            else:
                _pad(editor, name, layer, more)
                editor.done(self, name, shape, wide, "zeros are added to sums")


def _pad(editor: Editor, name: str, layer: Any, more: tuple[int, int]) -> None:
    before = getattr(layer, "_choices", ())

    def start() -> None:
        adopt(layer)
        layer.is_special = True

    def end() -> None:
        resize(layer, before, f"Pad of {name or 'the model'}")
        retake(layer)
        release(layer)

    editor.do(start, end)
    editor.set(layer, "padding", more)
