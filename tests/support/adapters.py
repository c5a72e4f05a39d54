"""Stand-ins for libraries that adapters call."""

from __future__ import annotations

import torch
from torch import Tensor


def rowwise_out(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, output: Tensor, bias: Tensor | None,
    use_fast_accum: bool,
) -> None:  # fmt: skip
    for operand in (x, w):
        assert operand.is_contiguous() and operand.dtype is torch.float8_e4m3fn
    (m, k), n = x.shape, w.shape[0]
    assert k % 16 == 0 and n % 8 == 0 and output.is_contiguous() and not output.data_ptr() % 16
    assert (x_scale.numel(), w_scale.numel()) == (m, n)
    assert x_scale.is_contiguous() and w_scale.is_contiguous()
    product = x.float() @ w.float().t() * x_scale.view(m, 1) * w_scale.view(1, n)
    if bias is not None and bias.dtype is torch.bfloat16:
        product = product.bfloat16() + bias
    elif bias is not None:
        product = product + bias
    output.copy_(product)
