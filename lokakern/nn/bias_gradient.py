"""The gradient of a bias in compiled training: sums of columns by a kernel of their own.

A compiler sums in the kernel that computes the gradient of the layer's output. That is the least
work where this kernel reads its operands in the order of their memory. Elsewhere, as after a
concatenation or a transpose of attention's heads, reading down the columns is slow: for 8192 x 2048
of an HSTU layer that kernel takes 94 us of an H200. With the sums apart, which take 12, the
gradient is computed in an order that suits it, in 49.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lokakern.functional.checks import row_major
from lokakern.functional.norm_gradient import KERNEL, gradient_kernel
from lokakern.native import recorded_op
from lokakern.nn.routed_matmul import OPS
from lokakern.sums import column_sums

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


def bias_gradient(grad: Tensor, bias: Tensor) -> Tensor:
    """Sums of the columns of a gradient, in the order of `lokakern.sums`.

    Args:
        grad: Of the output of a layer, ``[m, n]``, bfloat16 or float16.
        bias: ``[n]``, in that dtype or float32, as its gradient.

    Returns:
        The gradient of the bias, ``[n]``.
    """
    sums = _empty(grad, bias)
    if not len(grad):
        return sums.zero_()
    if gradient_kernel(grad.device).name != KERNEL:
        return column_sums(grad, out=sums)
    from lokakern.kernels.cuda.column_sums import launch  # needs NVRTC's bindings

    launch(row_major(grad, apart=True), sums)
    return sums


def _empty(grad: Tensor, bias: Tensor) -> Tensor:
    return torch.empty(grad.shape[1], dtype=bias.dtype, device=grad.device)


recorded_op(
    _LIBRARY,
    "bias_gradient(Tensor grad, Tensor bias) -> Tensor",
    bias_gradient,
    tags=(torch.Tag.flexible_layout,),  # a fixed one would copy views of what is not there yet
)
torch.library.register_fake("lokakern::bias_gradient", _empty, lib=_LIBRARY)


class AddedBias(torch.autograd.Function):
    """The output of a layer, which contains its bias, with the gradient of the bias."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return y.clone()  # which Inductor removes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (bias,) = ctx.saved_tensors
        return gradients[0], OPS.bias_gradient(gradients[0], bias)
