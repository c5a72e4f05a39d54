"""A bfloat16 product with a bias and relu, which cuBLASLt applies to its sums, in one launch.

    d[m, n] = relu(sum_k a[m, k] * b[k, n] + bias[n])

torch.compile makes two launches of it: the product with its bias, and a kernel that reads and
writes all of its output again. Compiled MLPs in CUDA graphs are 1.07 to 1.36 times as fast with
this in inference and 1.02 to 1.10 in training (H200, 256 to 4096 columns, 512 to 32768 rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.kernels.torch.matmul import ROUNDED_PARTS_BOUND
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

EPILOGUE = "bias+relu"


def _supports(problem: Problem, _device: Device) -> Support:
    if problem.epilogue != EPILOGUE:
        return Rejected(f"computes {EPILOGUE}, not {problem.epilogue}")
    formats = [problem.a.format, problem.out_format]
    if problem.b is not None and not problem.prepared:
        formats.append(problem.b.format)
    other = next((x for x in formats if x is not Format.BFLOAT16), None)
    return ACCEPTED if other is None else Rejected(f"multiplies bfloat16 only, not {other.value}")


@register(
    "gemm_norm",
    accumulation="float32",
    supports=_supports,
    # A bias in float32 is rounded to bfloat16 first, by at most 2^-9 of it.
    kernel_err_bound=ROUNDED_PARTS_BOUND,
)
def bf16_relu(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    out: Tensor,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    """See the module."""
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        b = source.t()
    assert epilogue.bias is not None  # of the epilogue that it supports
    torch._addmm_activation(epilogue.bias.to(a.dtype), a, b, out=out)
