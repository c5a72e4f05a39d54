"""`gemm_norm` under autograd: differentiated as the unquantized product, by torch's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import UnsupportedError
from lokakern.types import NormEpilogue, QuantizedTensor

_TENSORS = ("bias", "norm_weight", "norm_bias", "residual", "gate", "x0", "x")


def needs_grad(a: Any, b: Any, epilogue: NormEpilogue) -> bool:
    """Whether any operand of a call requires a gradient."""
    weight = b.source if type(b) is QuantizedTensor else b
    operands = (a, weight, *(getattr(epilogue, name) for name in _TENSORS))
    return any(getattr(x, "requires_grad", False) for x in operands)


def differentiable(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    out: Tensor | None,
    plain: bool,
    call: Callable[[], Any],
) -> Tensor:
    """The result of a call, which has the gradient of the unquantized product.

    Nothing but the operands is kept for the backward pass, which multiplies and normalizes again.

    Args:
        a: As of the call, as are the next three.
        b: Its unquantized source is what the gradient is of.
        epilogue: All that is done to the sums.
        out: Must be None.
        plain: Whether the output is bfloat16.
        call: Makes the result.

    Raises:
        UnsupportedError: What is asked for has no such gradient.
    """
    reason = None
    if isinstance(a, QuantizedTensor):
        reason = "a is quantized: pass it as bfloat16"
    elif not plain:
        reason = "an FP8 output has no gradient: leave its format out"
    elif out is not None:
        reason = "out= cannot be differentiated: drop it"
    if reason is not None:
        raise UnsupportedError(f"gemm_norm: an operand requires a gradient, and {reason}, or use "
                               "torch.no_grad()")  # fmt: skip
    weight = b
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        weight = source.t() if b.transposed else source
    tensors = (getattr(epilogue, name) for name in _TENSORS)
    result: Tensor = _Differentiable.apply(a, weight, *tensors, epilogue, call)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    """Forward by whatever kernel; backward through torch's own steps in float32, done again."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return arguments[-1]()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-2])
        ctx.epilogue = inputs[-2]._replace(**dict.fromkeys(_TENSORS))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from lokakern.kernels.torch.norm import normalized  # at call time: a kernel's module

        needs = ctx.needs_input_grad[:-2]
        again = torch.is_grad_enabled()  # whether what is made here is differentiated, too
        leaves: list[Any] = [
            None if x is None else x.view_as(x) if again else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        a, weight, *rest = leaves
        epilogue = ctx.epilogue._replace(**dict(zip(_TENSORS, rest, strict=True)))
        with torch.enable_grad():
            result = normalized(a.float() @ weight.float(), epilogue).to(grad.dtype)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(result, wanted, grad, create_graph=again))
        return (*(next(found) if need else None for need in needs), None, None)
