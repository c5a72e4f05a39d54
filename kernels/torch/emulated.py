"""FP8 scaled GEMM in stock PyTorch, on any device and in every format.

    d[m, n] = f(sum_k (a[m, k] sa) * (b[k, n] sb) + bias[n])

Operands are dequantized to float32 and multiplied there: what an FP8 tensor core with a float32
accumulator would give. It says what a format costs in error where no FP8 hardware is, and does
everything that `Epilogue` can ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.registry.ops import ACTIVATIONS, rows_of_groups
from lokakern.registry.register import FP8_GPUS, register
from lokakern.types import (
    ACCEPTED,
    EPILOGUES,
    PLAIN,
    Device,
    Epilogue,
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
    a: Tensor | Sequence[Tensor],
    a_scale: Tensor | Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    data = (a,) if isinstance(a, Tensor) else a
    scales = (a_scale,) if isinstance(a_scale, Tensor) else a_scale
    slices = (QuantizedTensor(x, s, a_granularity) for x, s in zip(data, scales, strict=True))
    left = torch.cat([numerics.dequantize(x) for x in slices], dim=1)
    right = numerics.dequantize(QuantizedTensor(b.t(), b_scale.t(), b_granularity, True))
    n = out.shape[1]
    for group, rows in enumerate(rows_of_groups(len(left), epilogue)):
        result = left[rows] @ right[:, group * n : (group + 1) * n]
        _write(result, out, rows, bias, epilogue)


def _write(
    result: Tensor, out: Tensor, rows: slice, bias: Tensor | None, epilogue: Epilogue
) -> None:
    if bias is not None:
        result += bias
    if epilogue.x0 is not None and epilogue.x is not None:
        result = epilogue.x0[rows].float() * result + epilogue.x[rows].float()
    else:
        result = ACTIVATIONS[epilogue.activation][0](result)
    if epilogue.accumulate:
        out[rows] += result
    elif epilogue.out_scale is not None:
        numerics.cast(result / epilogue.out_scale, out[rows])
    else:
        out[rows] = result.to(out.dtype)


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
    ("emulated_group", Granularity.GROUP, Granularity.GROUP),
):
    register(
        "scaled_gemm",
        name=_name,
        granularity=_a,
        b_granularity=_b,
        accumulation="float32",
        supports=functools.partial(_supports, _a, _b),
        batched=True,
        epilogues=EPILOGUES,
        accumulates=True,
        k_slices=True,
    )(functools.partial(_multiply, _a, _b))
