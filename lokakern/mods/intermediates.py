"""`KeepIntermediates`: sums go to a norm as float32."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lokakern.mods.editor import Editor, Mod
from lokakern.nn.block_rms_norm import BlockRMSNorm

_NORMS = (nn.LayerNorm, nn.RMSNorm, BlockRMSNorm)


class _Unrounded(torch.autograd.Function):
    """``x @ weight.t()`` of bfloat16 operands as float32; gradients as of a bfloat16 product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):  # which would round the sums
            if x.is_cuda:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return x.float() @ weight.t().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = gradients[0].to(x.dtype)
        return grad @ weight, grad.t() @ x


class WideLinear(nn.Linear):
    """`nn.Linear` whose output is float32 where its operands are bfloat16, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.t() + bias``, sums not rounded."""
        kind, x = input.device.type, input
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if dtype is not torch.bfloat16 or x.dtype is torch.float64:
            return functional.linear(x, self.weight, self.bias)
        rows = x.to(dtype).reshape(-1, self.in_features)
        y: Tensor = _Unrounded.apply(rows, self.weight.to(dtype))  # type: ignore[no-untyped-call]
        y = y if self.bias is None else y + self.bias.float()
        return y.view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class KeepIntermediates(Mod):
    """Keep sums in float32 from a linear layer through the norm behind it.

    A norm that subtracts a large mean enlarges what was rounded before by mean / deviation; sums
    that reach it as float32 lose nothing. For an `nn.Linear` whose norm comes next in an
    `nn.Sequential`. `lokakern.convert` leaves such a layer alone: its product stays unquantized.
    """

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        for name, sequence in editor.modules(nn.Sequential):
            for (key, layer), (_, norm) in pairwise(list(sequence._modules.items())):
                site = f"{name}.{key}" if name else key
                if not isinstance(layer, nn.Linear) or not isinstance(norm, _NORMS):
                    continue
                if not editor.accepts(layer, site):
                    continue
                if type(layer) is not nn.Linear:
                    editor.left(self, site, type(layer).__name__, "it is not a plain nn.Linear")
                    continue
                if any(p.dtype not in (torch.float32, torch.float64) for p in norm.parameters()):
                    why = "the norm has no float32 parameters, and takes no float32 sums"
                    editor.left(self, site, "Linear", why)
                    continue
                editor.set(layer, "__class__", WideLinear)
                effect = "sums are not rounded to bfloat16 before the norm"
                editor.done(self, site, "Linear", "WideLinear", effect)
