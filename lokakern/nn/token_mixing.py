"""Products across the tokens of a sample, multiplied as they lie in memory."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import is_traced

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
HALF = frozenset((torch.bfloat16, torch.float16))
CAST = HALF | {torch.float32}  # what autocast casts
KINDS = (Tensor, nn.Parameter)  # no subclass, which may be sharded or quantized
_MOST = 2**31  # what the kernel counts in


ALIGNMENT = 16  # bytes of a row that kernels for Hopper need


def is_askew(n: int, k: int, element_size: int) -> bool:
    """Whether rows of k are no multiple of 16 bytes, and columns of n are one."""
    step = ALIGNMENT // element_size
    return k % step != 0 and n % step == 0


def laid_out(weight: Tensor) -> Tensor:
    """The same numbers by columns, where a row of k is no multiple of 16 bytes and one of n is.

    x over embeddings comes by columns, too: then no operand is read along k, and cuBLAS has kernels
    of Hopper for it. At m = 1310720 and k = 770 an H200 takes 0.78 ms instead of 3.5 at n = 160,
    and 0.60 instead of 1.7 at n = 96; room behind each row changes nothing. On other devices it was
    not measured.
    """
    n, k = weight.shape
    turned = is_askew(n, k, weight.element_size())
    return weight.t().contiguous().t() if turned else weight


@functools.cache
def _has_kernel(index: int, dtype: torch.dtype) -> bool:
    """Whether Triton's kernel is for a GPU: of Hopper, where it was measured, or later."""
    return (
        dtype in HALF
        and torch.version.hip is None
        and torch.cuda.get_device_capability(index) >= (9, 0)
        and importlib.util.find_spec("triton") is not None
    )


def _token_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``sum(grad[b] @ x[b].T)``, ``[count, n]``, in float32 or what is wider."""
    count, (batch, n, d) = grad.shape[1], x.shape
    is_small = max(batch * d, count * n) < _MOST
    if x.is_cuda and is_small and _has_kernel(x.get_device(), x.dtype):
        from lokakern.kernels.triton.token_gradient import token_gradient

        return token_gradient(grad, x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if count * n > d * (count + n):  # gradients of samples would be larger than copies
        left, right = (t.transpose(0, 1).reshape(t.shape[1], -1) for t in (grad, x))
        return (left @ right.t()).to(dtype)
    if is_askew(count, n, x.element_size()):  # whose rows would be written slowly
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
        weight = laid_out(weight.to(x.dtype))
        to_x, to_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "mods.MixTokens: a gradient of this layer is differentiated again "
                "(create_graph=True): leave the Mod out, or create_graph"
            )
        grad_x = grad_weight = None
        if x is not None:
            grad_weight = torch.ops.lokakern.token_gradient(grad, x).to(ctx.dtype)
        if weight is not None:
            grad_x = torch.bmm(weight.t().expand(grad.shape[0], -1, -1), grad)
        return grad_x, grad_weight


def _is_turned(x: Tensor) -> bool:
    """Whether samples ``[d, n]`` of x are ``[n, d]`` in memory; three dimensions may be a slice."""
    if x.dim() < 3 or x.numel() == 0:
        return False
    d, n = x.shape[-2:]
    if d == 1 or n == 1:  # then it lies both ways
        return False
    is_turned = x.stride(-2) == 1 and x.stride(-1) == d
    return is_turned and (x.dim() == 3 or x.mT.is_contiguous())


def _dtype_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """In which a linear layer multiplies them; None where it refuses, or they are not real."""
    found = {t.dtype for t in (x, weight, bias) if t is not None}
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if found <= CAST else None
    return x.dtype if len(found) == 1 and x.dtype.is_floating_point else None


def mixes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `mix_tokens` multiplies them, and as a linear layer would but for how they lie."""
    if not torch.compiler.is_compiling() and is_traced():
        return False
    is_plain = type(x) in KINDS and type(weight) in KINDS and not x.is_meta
    return is_plain and _is_turned(x) and _dtype_of(x, weight, bias) is not None


def mix_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(x, weight, bias).mT`` as ``weight @ x.mT``, of which nothing is copied.

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
