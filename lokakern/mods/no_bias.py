"""`NoBias`: linear layers without a bias, but for the last one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lokakern.errors import UnknownNameError
from lokakern.mods.editor import Editor, Mod


@dataclass(frozen=True)
class NoBias(Mod):
    """Take the biases of all linear layers but the prediction layer.

    A bias costs a pass over the output in backward, its norm may diverge under FP8, and a norm
    behind the layer has one of its own. The prediction layer is the last `nn.Linear` of the model,
    in the order of registration, unless `keep` says otherwise.

    Args:
        keep: Names of the layers that keep theirs, such as several prediction layers.
    """

    keep: tuple[str, ...] | None = None

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        every = [name for name, m in _linears(editor.model)]
        unknown = sorted(set(self.keep or ()) - set(every))
        if unknown:
            raise UnknownNameError(
                f"NoBias: keep names {', '.join(unknown)}; linear layers are {', '.join(every)}"
            )
        kept = set(every[-1:] if self.keep is None else self.keep)
        for name, module in editor.modules(nn.Linear):
            bias = module.bias
            if not isinstance(bias, Tensor):
                continue
            if name in kept:
                editor.left(self, name, "bias", "it is a prediction layer")
                continue
            largest = float("nan") if bias.is_meta else _largest(bias)
            editor.set(module, "bias", None)
            effect = f"y = x @ w.t(); the largest |bias| was {largest:.3g}"
            editor.done(self, name, "bias", "no bias", effect, is_exact=largest == 0.0)


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return Editor(model, None).modules(nn.Linear)


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
