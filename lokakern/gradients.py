"""Outputs of kernels of op ``norm_backward``, and derivatives of activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lokakern.epilogue import ACTIVATIONS, NormEpilogue
from lokakern.errors import UnknownNameError
from lokakern.quantized_tensor import QuantizedTensor, empty_data

if TYPE_CHECKING:
    from lokakern.types import Problem


class NormGradients(NamedTuple):
    """Gradients of what was normalized, of the vectors around it, and of what is quantized.

    Attributes:
        dy: Of what was normalized, ``[m, k]`` in its dtype; None where nobody wants it so.
        quantized: The same, FP8 ``[m, k]`` with scales of rows or 1x128; None as well.
        quantized_t: Of its transpose, ``[k, m]``; with `quantized`.
        sums: Of columns, float32 ``[n, k]``: of the bias of the GEMM before, the norm's weight and
            its bias, as far as the epilogue has them, in this order; None if it has none.
    """

    dy: Tensor | None
    quantized: QuantizedTensor | None
    quantized_t: QuantizedTensor | None
    sums: Tensor | None


def sums_of(epilogue: NormEpilogue) -> int:
    """Bit mask of column sums: 1 bias, 2 norm weight, 4 norm bias."""
    given = (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    return sum(1 << i for i, x in enumerate(given) if x is not None)


def slope(z: Tensor, activation: str) -> Tensor:
    """The derivative of an activation, as torch has it, in the dtype of z; NaN, or 1, at NaN.

    Raises:
        UnknownNameError: There is none.
    """
    if activation == "none":
        return torch.ones_like(z)
    if activation == "relu":
        return (~(z <= 0.0)).to(z.dtype)
    if activation == "hardswish":
        rising = torch.where(z >= 3.0, 1.0, z / 3.0 + 0.5)
        return torch.where(z <= -3.0, 0.0, rising)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    if activation == "gelu":
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 + 0.5 * torch.erf(z / math.sqrt(2)) + z * density
    if activation == "gelu_tanh":  # z s, s = sigmoid(u), u = 2 sqrt(2 / pi) (z + 0.044715 z^3)
        factor, square = 2 * math.sqrt(2 / math.pi), 0.044715 * z * z
        s = torch.sigmoid(factor * z * (1.0 + square))
        return s * (1.0 + factor * z * (1.0 + 3.0 * square) * (1.0 - s))
    raise UnknownNameError(
        f"activation {activation!r} is unknown; expected one of {', '.join(ACTIVATIONS)}"
    )


def empty_gradients(
    problem: Problem, epilogue: NormEpilogue, device: torch.device
) -> NormGradients:
    """Allocate the outputs; dy only with a residual or without FP8 output."""
    m, k = problem.shape
    form, granularity = problem.out_format, problem.out_granularity
    dy = quantized = quantized_t = sums = None
    if not form.is_fp8 or "residual" in problem.epilogue.split("+"):
        dy = torch.empty((m, k), dtype=problem.a.format.dtype, device=device)
    if form.is_fp8:
        quantized, quantized_t = (
            QuantizedTensor(
                empty_data(rows, columns, form.dtype, device),
                granularity.empty_scale(rows, columns, device),
                granularity,
            )
            for rows, columns in ((m, k), (k, m))
        )
    count = sums_of(epilogue).bit_count()
    if count:
        sums = torch.empty((count, k), dtype=torch.float32, device=device)
    return NormGradients(dy, quantized, quantized_t, sums)
