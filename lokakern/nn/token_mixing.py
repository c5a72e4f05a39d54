"""Products across the tokens of a sample, without a copy; layouts of weights for cuBLAS."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import is_traced
from lokakern.nn.autocast import CAST, HALF

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
KINDS = (Tensor, nn.Parameter)  # subclasses may be sharded or quantized
_MOST = 2**31  # the kernel has 32-bit indices


ALIGNMENT = 16  # bytes of a row that kernels for Hopper need


def is_aligned_by_columns(n: int, k: int, element_size: int) -> bool:
    """Whether columns of n elements are a multiple of 16 bytes, and rows of k are not."""
    step = ALIGNMENT // element_size
    return k % step != 0 and n % step == 0


def with_aligned_layout(weight: Tensor) -> Tensor:
    """The weight, column-major if only its columns are aligned to 16 bytes.

    x over embeddings is column-major, too: then no operand is read along k, and cuBLAS uses its
    kernels for Hopper. At m = 1310720 and k = 770 an H200 takes 0.78 ms instead of 3.5 at n = 160,
    and 0.60 instead of 1.7 at n = 96; padded rows do not help. Other devices were not measured.
    """
    n, k = weight.shape
    turned = is_aligned_by_columns(n, k, weight.element_size())
    return weight.t().contiguous().t() if turned else weight


@functools.cache
def has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device can run kernels of Triton: Hopper, where they were measured, or later."""
    return (
        device.type == "cuda"
        and dtype in HALF
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and importlib.util.find_spec("triton") is not None
    )


def _token_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``sum(grad[b] @ x[b].T)``, ``[count, n]``, in float32 or float64."""
    count, (batch, n, d) = grad.shape[1], x.shape
    is_small = max(batch * d, count * n) < _MOST
    if is_small and has_triton(x.device, x.dtype):
        from lokakern.kernels.cuda import token_gradient as cuda
        from lokakern.kernels.triton.token_gradient import token_gradient

        return (cuda.token_gradient if cuda.takes(grad, x) else token_gradient)(grad, x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if count * n > d * (count + n):  # gradients of each sample would be larger than copies
        left, right = (t.transpose(0, 1).reshape(t.shape[1], -1) for t in (grad, x))
        return (left @ right.t()).to(dtype)
    if is_aligned_by_columns(count, n, x.element_size()):  # writing its rows would be slow
        return torch.bmm(x, grad.mT).sum(0, dtype=dtype).t().contiguous()
    return torch.bmm(grad, x.mT).sum(0, dtype=dtype)


def _token_gradient_fake(grad: Tensor, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((grad.shape[1], x.shape[1]), dtype=dtype)


_LIBRARY.define(
    "token_gradient(Tensor grad, Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
_LIBRARY.impl("token_gradient", _token_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::token_gradient", _token_gradient_fake, lib=_LIBRARY)


class _Mixed(torch.autograd.Function):
    """``weight @ x`` of each sample: ``[batch, n, d]`` to ``[batch, count, d]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        weight = with_aligned_layout(weight.to(x.dtype))
        to_x, to_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "mods.MixTokens: gradients of this layer cannot be differentiated again "
                "(create_graph=True): leave out the Mod, or create_graph"
            )
        grad_x = grad_weight = None
        if x is not None:
            grad_weight = torch.ops.lokakern.token_gradient(grad, x).to(ctx.dtype)
        if weight is not None:
            grad_x = torch.bmm(weight.t().expand(grad.shape[0], -1, -1), grad)
        return grad_x, grad_weight


def _is_turned(x: Tensor) -> bool:
    """Whether samples ``[d, n]`` of x are ``[n, d]`` in memory; 3 dimensions may be a slice."""
    if x.dim() < 3 or x.numel() == 0:
        return False
    d, n = x.shape[-2:]
    if d == 1 or n == 1:  # both layouts are the same
        return False
    is_turned = x.stride(-2) == 1 and x.stride(-1) == d
    return is_turned and (x.dim() == 3 or x.mT.is_contiguous())


def _dtype_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype in which a linear layer multiplies them; None if it raises, or for complex."""
    found = {t.dtype for t in (x, weight, bias) if t is not None}
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if found <= CAST else None
    return x.dtype if len(found) == 1 and x.dtype.is_floating_point else None


def mixes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `mix_tokens` supports the operands of a linear layer."""
    if not torch.compiler.is_compiling() and is_traced():
        return False
    is_plain = type(x) in KINDS and type(weight) in KINDS and not x.is_meta
    return is_plain and _is_turned(x) and _dtype_of(x, weight, bias) is not None


def mix_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(x, weight, bias).mT`` as ``weight @ x.mT``, without a copy.

    Args:
        x: ``[..., d, n]``, ``[..., n, d]`` in memory.
        weight: ``[count, n]``.
        bias: ``[count]`` or None.

    Returns:
        ``[..., count, d]``.
    """
    dtype = _dtype_of(x, weight, bias)
    tokens = x.mT.to(dtype)
    y: Tensor = _Mixed.apply(tokens.flatten(0, -3), weight)  # type: ignore[no-untyped-call]
    y = y.view(*tokens.shape[:-2], *y.shape[1:])
    return y if bias is None else y + bias.to(dtype)[:, None]
