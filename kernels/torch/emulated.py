"""FP8 scaled GEMM in stock PyTorch, on any device and in every format.

    d[m, n] = sum_k (a[m, k] sa) * (b[k, n] sb) + bias[n]

Operands are dequantized to float32 and multiplied there: what an FP8 tensor core with a float32
accumulator would give. It says what a format costs in error where no FP8 hardware is.
"""

from __future__ import annotations

import functools

from torch import Tensor

from lokakern import numerics
from lokakern.registry.register import FP8_GPUS, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Granularity,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

# Where FP8 hardware is an emulation is for checking: an H200 emulates so much in 1 ms, 20 times as
# long as it multiplies, and a sweep of large problems would spend half of its time on it.
MOST_FLOPS = 1e10


def _multiply(
    a_granularity: Granularity,
    b_granularity: Granularity,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    left = numerics.dequantize(QuantizedTensor(a, a_scale, a_granularity))
    right = numerics.dequantize(QuantizedTensor(b.t(), b_scale.t(), b_granularity, True))
    result = left @ right
    if bias is not None:
        result += bias
    out.copy_(result)


def _supports(
    a_granularity: Granularity, b_granularity: Granularity, problem: Problem, device: Device
) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (a_granularity, b_granularity):
        return Rejected(
            f"takes {a_granularity.value} x {b_granularity.value} scales, "
            f"not {have[0].value} x {have[1].value}"
        )
    if device.architecture in FP8_GPUS and problem.flops > MOST_FLOPS:
        return Rejected(
            f"emulates up to 10 GFLOP on {device.architecture}, which has FP8 hardware; "
            f"this is {problem.flops / 1e9:.0f}"
        )
    return ACCEPTED


for _name, _a, _b in (
    ("emulated_tensor", Granularity.TENSOR, Granularity.TENSOR),
    ("emulated_row", Granularity.ROW, Granularity.ROW),
    ("emulated_block", Granularity.GROUP, Granularity.BLOCK),
):
    register(
        "scaled_gemm",
        name=_name,
        granularity=_a,
        b_granularity=_b,
        accumulation="float32",
        supports=functools.partial(_supports, _a, _b),
    )(functools.partial(_multiply, _a, _b))
