"""`Pad`: zero padding of operands to sizes that fast kernels support."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn

from lokakern.errors import ShapeError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.adoption import resize
from lokakern.nn.linear import LINEARS_OF_ANY
from lokakern.nn.module_scan import INNER, inner_layers
from lokakern.nn.torch_owners import NEVER_CALLED, never_called

_FROZEN = "its weight is quantized: put Mods before convert"


@dataclass(frozen=True)
class Pad(Mod):
    """Pad inputs and outputs of linear layers with zeros to a multiple, at each call.

    Parameters and checkpoints keep their shapes; for inference with bfloat16 weights
    `lokakern.convert` keeps a padded copy. Exact, because zeros add nothing to a sum.

    Args:
        k: Multiple of the number of inputs; FP8 kernels of libraries need 16.
        n: Multiple of the number of outputs.
        most_growth: Largest factor by which a product may grow; beyond it, zeros cost too much.
    """

    is_exact = True
    k: int = 16
    n: int = 16
    most_growth: float = 1.25

    def sizes_of(self, n: int, k: int) -> tuple[int, int] | None:
        """N and k of a layer with the zeros; None if they are multiples, or grow too much."""
        wide_n, wide_k = self._wide(n, k)
        is_left = (wide_n, wide_k) == (n, k) or wide_n * wide_k / (k * n) > self.most_growth
        return None if is_left else (wide_n, wide_k)

    def takes(self, layer: nn.Module) -> bool:
        """Whether it is a layer of a kind that can be padded."""
        return type(layer) in LINEARS_OF_ANY and not getattr(layer, "is_mixing", False)

    def _wide(self, n: int, k: int) -> tuple[int, int]:
        return -(-n // self.n) * self.n, -(-k // self.k) * self.k

    def edit(self, editor: Editor) -> None:
        if not all(isinstance(x, int) and x >= 1 for x in (self.k, self.n)):
            raise ShapeError(
                f"Pad: multiples are {self.k!r} and {self.n!r}; expected integers >= 1"
            )
        inner, uncalled = inner_layers(editor.model), never_called(editor.model)
        for name, layer in editor.modules(nn.Linear):
            assert isinstance(layer, nn.Linear)  # as filtered
            k, n = layer.in_features, layer.out_features
            wide_n, wide_k = self._wide(n, k)
            more = (wide_k - k, wide_n - n)
            if more == (0, 0):
                continue
            shape, wide = f"k={k} n={n}", f"k={wide_k} n={wide_n}"
            growth = wide_k * wide_n / (k * n)
            reasons = {
                NEVER_CALLED: id(layer) in uncalled,
                f"it is a {type(layer).__name__}": type(layer) not in LINEARS_OF_ANY,
                INNER: id(layer) in inner,
                _FROZEN: getattr(layer, "is_frozen", False),
                "MixTokens has it multiply tokens as they lie": getattr(layer, "is_mixing", False),
                f"the product would be {growth:.2f} times as large": growth > self.most_growth,
            }
            why = next((why for why, holds in reasons.items() if holds), "")
            if why:
                editor.left(self, name, shape, why)
            else:
                before = getattr(layer, "_choices", ())
                what = f"Pad of {name or 'the model'}"
                undo = functools.partial(resize, layer, before, what)  # type: ignore[arg-type]
                editor.set_of_linear(layer, "padding", more, undo)
                editor.done(self, name, shape, wide, "zeros are added to sums")
