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
    """``x @ weight.t() + bias``, ``[..., 1]``; weight ``[1, k]``, bias ``[1]``.

    In bfloat16, or in float16 if x is.
    """
    # Of a vector: see `lokakern.nn.flat_sums` for gradients [1, k] by a sum.
    half = _half(x)
    wide = (_rounded(x, half) * _rounded(weight, half).squeeze(0)).sum(-1, keepdim=True)
    return (wide if bias is None else wide + _rounded(bias, half)).to(half)


def _half(x: Tensor) -> torch.dtype:
    """The dtype of the product: autocast to float16 casts x before."""
    return torch.float16 if x.dtype is torch.float16 else torch.bfloat16


def _rounded(x: Tensor, half: torch.dtype) -> Tensor:
    """X as a product reads it, in float32."""
    return x.to(half).float()


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
    half, (of_x, of_weight, of_bias) = _half(x), ctx.needs_input_grad
    wide, over = _rounded(dy, half), tuple(range(x.dim() - 1))
    dx = (wide * _rounded(weight, half).squeeze(0)).to(half).to(x.dtype) if of_x else None
    dw = (wide * _rounded(x, half)).sum(over).to(half).to(weight.dtype)[None] if of_weight else None
    db = wide.sum(over).to(half).to(ctx.bias_dtype) if of_bias else None
    return dx, dw, db


torch.library.register_autograd("lokakern::logit", _gradients, setup_context=_keep, lib=_LIBRARY)
