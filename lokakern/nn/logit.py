"""The output of a layer with one column, such as a logit, as a sum over products of elements.

The op ``lokakern::logit`` computes what `dot` does, and Inductor lowers it to the same kernels
(`lokakern.nn.inductor`); passes over graphs know a converted model by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


def dot(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.t() + bias`` in bfloat16, ``[..., 1]``; weight ``[1, k]``, bias ``[1]``."""
    # Of a vector: see `lokakern.nn.flat_sums` for gradients [1, k] by a sum.
    wide = (_rounded(x) * _rounded(weight).squeeze(0)).sum(-1, keepdim=True)
    return (wide if bias is None else wide + _rounded(bias)).bfloat16()


def _rounded(x: Tensor) -> Tensor:
    """X as a product reads it, in float32."""
    return x.bfloat16().float()


_LIBRARY.define(
    "logit(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
_LIBRARY.impl("logit", dot, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::logit", dot, lib=_LIBRARY)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """As autograd has them of `dot`."""
    x, weight = ctx.saved_tensors
    wide, (of_x, of_weight, of_bias) = dy.bfloat16().float(), ctx.needs_input_grad
    over = tuple(range(x.dim() - 1))
    dx = (wide * _rounded(weight).squeeze(0)).bfloat16().to(x.dtype) if of_x else None
    dw = (wide * _rounded(x)).sum(over).bfloat16().to(weight.dtype)[None] if of_weight else None
    db = wide.sum(over).bfloat16().to(ctx.bias_dtype) if of_bias else None
    return dx, dw, db


torch.library.register_autograd("lokakern::logit", _gradients, setup_context=_keep, lib=_LIBRARY)
