"""Mods of the epilogue of linear layers: `NoBias`, `BlockNorm`, `NormOrder` and `HardSwish`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.mods.editor import Editor, Mod, site_of
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.linear import LINEARS_OF_ANY
from lokakern.nn.module_scan import WATCHED
from lokakern.nn.torch_owners import NEVER_CALLED, never_called

NORMS = (nn.LayerNorm, nn.RMSNorm, BlockRMSNorm)
_NOT_OF_ROWS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm1d)
_ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Sigmoid, nn.Tanh, nn.ReLU6)
_PRE, _POST = ((nn.Linear,), NORMS), ((nn.Linear,), _ACTIVATIONS, NORMS)  # that NormOrder moves
_HARD_SWISH = "x * relu6(x + 3) / 6 for x * sigmoid(x): off by at most 0.143, at -3 and 3"
_ABSORBED = (
    "the batch norm behind it subtracts any bias of rows; its running mean lacks it now, and it "
    "takes no inputs of three axes"
)


class RowBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` of rows behind a layer whose bias is subtracted from the running mean.

    Inputs ``[batch, channels, length]`` raise: channels are normalized, the bias was of columns.
    """

    layer = ""  # its name

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 2:
            raise ShapeError(
                f"BatchNorm1d after {self.layer!r} got {list(input.shape)}; NoBias removed that "
                "layer's bias, which is exact only for [batch, columns]. Undo the report, and add "
                f"{self.layer!r} to NoBias(keep=)"
            )


@dataclass(frozen=True)
class NoBias(Mod):
    """Remove the biases of all linear layers but the prediction layer.

    A bias costs a pass over the output in backward, its norm may diverge under FP8, and a norm
    behind the layer has a bias of its own. The prediction layer is the last registered `nn.Linear`
    of the model, unless `keep` names others. ``out_proj`` of `nn.MultiheadAttention` keeps its
    bias, because attention would fail in evaluation without it. An `nn.BatchNorm1d` that follows in
    an `nn.Sequential` gets it subtracted from its running mean: outputs do not change. They would
    for inputs ``[batch, channels, length]``, which raise a ShapeError.

    Args:
        keep: Names of the layers that keep their bias, such as several prediction layers.
    """

    keep: tuple[str, ...] | None = None

    def edit(self, editor: Editor) -> None:
        every = [name for name, _ in Editor(editor.model, None).modules(nn.Linear)]
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
            if name in kept or id(module) in uncalled:
                editor.left(self, name, "bias", why if name in kept else NEVER_CALLED)
                continue
            norm = following.get(module)
            if norm is not None and not bias.is_meta:
                editor.set(norm, "__class__", RowBatchNorm)
                editor.set(norm, "layer", name)
                _shift(editor, norm, bias.detach().clone())
                effect, is_exact = _ABSORBED, True
            else:
                size = bias.detach().abs()
                largest = math.nan if bias.is_meta else float(size.max()) if size.numel() else 0.0
                effect = f"y = x @ w.t(); the largest |bias| was {largest:.3g}"
                is_exact = largest == 0.0
            editor.set(module, "bias", None)
            editor.done(self, name, "bias", "no bias", effect, is_exact=is_exact)


def _batch_norms(model: nn.Module) -> dict[nn.Module, nn.BatchNorm1d]:
    """The batch norm that follows each linear layer, where nothing shares either."""
    pairs = [
        (layer, norm)
        for sequence in model.modules()
        if isinstance(sequence, nn.Sequential)
        for layer, norm in pairwise(sequence)
        if type(layer) in LINEARS_OF_ANY  # subclasses may add the bias earlier
        and type(norm) is nn.BatchNorm1d
        and not (layer._forward_hooks or norm._forward_pre_hooks or layer in WATCHED)
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


@dataclass(frozen=True)
class BlockNorm(Mod):
    """Replace every `nn.LayerNorm` and `nn.RMSNorm` of whole rows by an RMS norm of column blocks.

    The statistics of a block stay within a tile of a GEMM. Rows with fewer columns than a block are
    one block. A norm whose columns the block does not divide is left alone.

    Args:
        block: Columns that are normalized together.
        eps: Added to the mean of squares; None: that of the replaced norm.
    """

    block: int = 256
    eps: float | None = None

    def edit(self, editor: Editor) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ShapeError(f"BlockNorm: block is {self.block!r}; expected an integer >= 1")
        for name, module in editor.modules(nn.LayerNorm, nn.RMSNorm):
            norm: Any = module
            before = f"{type(norm).__name__}({', '.join(map(str, norm.normalized_shape))})"
            columns = int(norm.normalized_shape[-1])
            block = min(self.block, columns)
            eps = next((float(x) for x in (self.eps, norm.eps) if x is not None), 1e-5)
            if len(norm.normalized_shape) != 1:
                editor.left(self, name, before, "it normalizes more than one axis")
            elif columns % block:
                why = f"{block} does not divide its {columns} columns; pad them, or take a divisor"
                editor.left(self, name, before, why)
            elif editor.replace(norm, BlockRMSNorm(columns, block, eps)):
                lost = [x for x in ("weight", "bias") if getattr(norm, x, None) is not None]
                effect = "no mean is subtracted; " if isinstance(norm, nn.LayerNorm) else ""
                effect += f"each {block} columns have their own scale"
                effect += f"; its {' and '.join(lost)} are gone" if lost else ""
                editor.done(self, name, before, f"BlockRMSNorm({columns}, {block})", effect)
            else:
                editor.left(self, name, before, "it is the model itself")
        for name, module in editor.modules(*_NOT_OF_ROWS):
            editor.left(self, name, type(module).__name__, "it does not normalize rows")


@dataclass(frozen=True)
class NormOrder(Mod):
    """Move norms before or behind linear layers.

    "post": a norm behind an activation moves before it, right behind the linear layer, where it can
    be part of the epilogue. "pre": a norm behind a linear layer with as many outputs as inputs
    moves before it, so that the quantized input is normalized. Both in an `nn.Sequential`, whose
    modules keep their names; transformer layers of torch get ``norm_first``.

    Args:
        order: "pre" or "post".
    """

    order: str

    def edit(self, editor: Editor) -> None:
        if self.order not in ("pre", "post"):
            raise UnknownNameError(f"NormOrder: order is {self.order!r}; expected 'pre' or 'post'")
        is_pre = self.order == "pre"
        before, after = ("post-norm", "pre-norm") if is_pre else ("pre-norm", "post-norm")
        for name, module in editor.modules():
            moved = []
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                if module.norm_first != is_pre:
                    editor.set(module, "norm_first", is_pre)
                    word = "not normalized" if is_pre else "normalized"
                    moved.append((name, f"the residual stream is {word}"))
            elif type(module) is nn.Sequential:
                moved = self._reorder(editor, name, module)
            for site, effect in moved:
                editor.done(self, site, before, after, effect)

    def _reorder(self, editor: Editor, name: str, sequence: nn.Sequential) -> list[tuple[str, str]]:
        items: list[tuple[str, Any]] = list(sequence._modules.items())
        kinds = _PRE if self.order == "pre" else _POST
        moved = []
        for place in range(len(items) - len(kinds) + 1):
            end = place + len(kinds)
            found = [module for _, module in items[place:end]]
            if not all(isinstance(m, kind) for m, kind in zip(found, kinds, strict=True)):
                continue
            effect = "the norm reads the input of the activation"
            if self.order == "pre":
                if place and isinstance(items[place - 1][1], NORMS):
                    continue
                sizes = f"{found[0].in_features} inputs and {found[0].out_features} outputs"
                if found[0].in_features != found[0].out_features:
                    why = f"the layer has {sizes}: the norm does not fit before it"
                    editor.left(self, site_of(name, items[place + 1][0]), "post-norm", why)
                    continue
                effect = "the norm reads the input of the layer"
            items[end - 2 : end] = items[end - 1], items[end - 2]
            moved.append((site_of(name, items[end - 2][0]), effect))
        if moved:  # modules keep their names, and so the keys of a state_dict
            before, after = list(sequence._modules), [key for key, _ in items]
            editor.do(lambda: _sort(sequence, after), lambda: _sort(sequence, before))
        return moved


def _sort(sequence: nn.Sequential, keys: list[str]) -> None:
    """Put the current children in the order of these keys; others come last."""
    children = dict(sequence._modules)
    order = [*(key for key in keys if key in children), *(k for k in children if k not in keys)]
    sequence._modules = {key: children[key] for key in order}


@dataclass(frozen=True)
class HardSwish(Mod):
    """Replace `nn.SiLU`, and ``functional.silu`` in attributes of modules, by hard-swish.

    It needs no exponential, and is 0 below -3, where FP8 would otherwise round. A ``forward`` that
    itself calls ``functional.silu`` is reported and left alone.
    """

    def edit(self, editor: Editor) -> None:
        for name, module in editor.modules():
            if isinstance(module, nn.SiLU):
                if editor.replace(module, nn.Hardswish(module.inplace)):
                    editor.done(self, name, "SiLU", "Hardswish", _HARD_SWISH)
                else:
                    editor.left(self, name, "SiLU", "it is the model itself")
                continue
            code = getattr(type(module).forward, "__code__", None)
            is_torchs = type(module).__module__.startswith("torch.")
            if code is not None and not is_torchs and "silu" in code.co_names:
                editor.left(self, name, type(module).__name__, "its forward itself calls silu")
            for attribute, value in list(vars(module).items()):
                if value is functional.silu:
                    editor.set(module, attribute, functional.hardswish)
                    editor.done(self, f"{name}.{attribute}", "silu", "hardswish", _HARD_SWISH)
