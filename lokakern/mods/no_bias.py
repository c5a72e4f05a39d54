"""`NoBias`: linear layers without a bias, but for the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.linear import Linear
from lokakern.nn.torch_owners import NEVER_CALLED, never_called


class RowBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` of rows, ``[batch, columns]``, behind a layer whose bias was removed.

    Its running mean lacks that bias. It raises for ``[batch, channels, length]``, of which it would
    normalize channels, where the bias was of the last axis.

    Attributes:
        layer: Name of the layer that had the bias.
    """

    layer = ""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 2:
            raise ShapeError(
                f"the BatchNorm1d behind {self.layer!r} gets {list(input.shape)}; expected "
                "[batch, columns]: NoBias removed the bias of the layer, which is exact for these "
                f"only. Undo the report, and name {self.layer!r} in NoBias(keep=)"
            )


@dataclass(frozen=True)
class NoBias(Mod):
    """Take the biases of all linear layers but the prediction layer.

    A bias costs a pass over the output in backward, its norm may diverge under FP8, and a norm
    behind the layer has one of its own. The prediction layer is the last `nn.Linear` of the model,
    in the order of registration, unless `keep` says otherwise. ``out_proj`` of
    `nn.MultiheadAttention` keeps its bias, without which attention would fail in evaluation.

    An `nn.BatchNorm1d` that comes next in an `nn.Sequential` subtracts any bias of rows: the bias
    is subtracted from its running mean, and outputs do not change. They would for inputs ``[batch,
    channels, length]``, which sizes do not tell apart if there are as many channels as columns, so
    such a norm raises a ShapeError when it is given them.

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
        following, uncalled = _batch_norms(editor.model), never_called(editor.model)
        for name, module in editor.modules(nn.Linear):
            bias = module.bias
            if not isinstance(bias, Tensor):
                continue
            if name in kept:
                editor.left(self, name, "bias", why)
                continue
            if id(module) in uncalled:
                editor.left(self, name, "bias", NEVER_CALLED)
                continue
            norm = following.get(module)
            if norm is not None and not bias.is_meta:
                editor.set(norm, "__class__", RowBatchNorm)
                editor.set(norm, "layer", name)
                _shift(editor, norm, bias.detach().clone())
                editor.set(module, "bias", None)
                effect = (
                    "the batch norm behind it subtracts any bias of rows; its running mean lacks "
                    "it now, and it takes no inputs of three axes"
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
        if type(layer) in (nn.Linear, Linear)  # of others the bias may not be what is added last
        and type(norm) is nn.BatchNorm1d
        and not (layer._forward_hooks or norm._forward_pre_hooks)
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
