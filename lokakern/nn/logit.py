"""The output of a layer with one column, such as a logit, as a sum over products of elements.

`dot` has a gradient. The op ``lokakern::logit`` computes the same, and Inductor lowers it to the
same kernels (`lokakern.nn.inductor`); passes over graphs know a converted model by it.
"""

from __future__ import annotations

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
