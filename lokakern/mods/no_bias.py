"""`NoBias`: linear layers without a bias, but for the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lokakern.errors import UnknownNameError
from lokakern.mods.editor import Editor, Mod


@dataclass(frozen=True)
class NoBias(Mod):
    """Take the biases of all linear layers but the prediction layer.

    A bias costs a pass over the output in backward, its norm may diverge under FP8, and a norm
    behind the layer has one of its own. The prediction layer is the last `nn.Linear` of the model,
    in the order of registration, unless `keep` says otherwise. A batch norm that comes next in an
    `nn.Sequential` subtracts any bias: it is taken off its running mean, and nothing changes.

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
        why = "keep= names it" if self.keep is not None else (
            "it is the last linear layer: as a rule the prediction layer (keep=() takes it, too)"
        )  # fmt: skip
        following = _batch_norms(editor.model)
        for name, module in editor.modules(nn.Linear):
            bias = module.bias
            if not isinstance(bias, Tensor):
                continue
            if name in kept:
                editor.left(self, name, "bias", why)
                continue
            norm = following.get(module)
            if norm is not None and not bias.is_meta:
                _shift(editor, norm, bias.detach().clone())
                editor.set(module, "bias", None)
                effect = (
                    "the batch norm behind it subtracts any bias; its running mean lacks it now"
                )
                editor.done(self, name, "bias", "no bias", effect, is_exact=True)
                continue
            largest = float("nan") if bias.is_meta else _largest(bias)
            editor.set(module, "bias", None)
            effect = f"y = x @ w.t(); the largest |bias| was {largest:.3g}"
            editor.done(self, name, "bias", "no bias", effect, is_exact=largest == 0.0)


def _batch_norms(model: nn.Module) -> dict[nn.Module, nn.BatchNorm1d]:
    """Of linear layers, the batch norm that follows and that nothing else shares."""
    pairs = [
        (layer, norm)
        for sequence in model.modules()
        if isinstance(sequence, nn.Sequential)
        for layer, norm in pairwise(sequence)
        if isinstance(layer, nn.Linear)
        and type(norm) is nn.BatchNorm1d
        and norm.num_features == layer.out_features  # else it is over another axis
    ]
    layers, norms = Counter(x for x, _ in pairs), Counter(x for _, x in pairs)
    return {x: norm for x, norm in pairs if layers[x] == norms[norm] == 1}


def _shift(editor: Editor, norm: nn.BatchNorm1d, bias: Tensor) -> None:
    def add(sign: float) -> None:
        mean = norm.running_mean  # another tensor after `to`
        if mean is not None:  # else it always takes the batch's
            with torch.no_grad():
                mean.add_(bias.to(mean), alpha=sign)

    editor.do(lambda: add(-1.0), lambda: add(1.0))


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return Editor(model, None).modules(nn.Linear)


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
