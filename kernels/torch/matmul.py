"""Unquantized matrix products: the baselines, and the answer when no FP8 kernel is good enough.

d[m, n] = sum_k a[m, k] * b[k, n] + bias[n]

With a batch: a [batch, m, k], b [batch, k, n] and d [batch, m, n], one bias [n] for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)


def _takes(form: Format, problem: Problem, _device: Device) -> Support:
    if problem.a.format is not form:
        return Rejected(f"takes {form.value} operands; a is {problem.a.format.value}")
    if problem.out_format is not form:
        return Rejected(f"writes {form.value}, not {problem.out_format.value}")
    if problem.prepared and problem.batch != 1:
        return Rejected("takes no batch of prepared weights")
    if problem.b is not None and not problem.prepared and problem.b.format is not form:
        return Rejected(f"takes {form.value} operands; b is {problem.b.format.value}")
    return ACCEPTED


def _takes_bfloat16(problem: Problem, device: Device) -> Support:
    return _takes(Format.BFLOAT16, problem, device)


def _takes_float32(problem: Problem, device: Device) -> Support:
    return _takes(Format.FLOAT32, problem, device)


def _multiply(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    if isinstance(b, QuantizedTensor):
        source = b.data if b.source is None else b.source
        b = source.t()
    if a.dim() == 3:
        if bias is None:
            torch.bmm(a, b, out=out)
        else:
            torch.baddbmm(bias, a, b, out=out)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


# Where rows are not 16-byte aligned torch's bfloat16 kernels may round parts of a sum to bfloat16
# before they add them up: at most 2^-9 sum|a||b|, 16 times the 2^-13 that a bound of 1 leaves.
# 12.4 was seen at k = 13, 4.3 at k = 479.
ROUNDED_PARTS_BOUND = 17.0

for _name, _supports, _odd in (
    ("bf16", _takes_bfloat16, ROUNDED_PARTS_BOUND),
    ("fp32", _takes_float32, None),
):
    register(
        "gemm",
        name=_name,
        accumulation="float32",
        supports=_supports,
        batched=True,
        odd_kernel_err_bound=_odd,
    )(_multiply)
