"""Quantize and dequantize in stock PyTorch: slow, exact, on any device, in every format.

s = max(rn(amax / MAX), 2^-126),  q = cast(rn(x / s)),  x ~ q * s
"""

from __future__ import annotations

import functools

from torch import Tensor

from lokakern import numerics
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)


def _quantize(
    granularity: Granularity,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    numerics.quantize(x, Format.of(data.dtype), granularity, data=data, scale=scale)


def _dequantize(
    granularity: Granularity,
    data: Tensor,
    scale: Tensor,
    out: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    out.copy_(numerics.dequantize(QuantizedTensor(data, scale, granularity), out.dtype))


def _supports_quantize(granularity: Granularity, problem: Problem, _device: Device) -> Support:
    if problem.out_granularity is not granularity:
        return Rejected(f"makes {granularity.value} scales, not {problem.out_granularity.value}")
    if problem.a.format.is_fp8 or not problem.out_format.is_fp8:
        return Rejected(
            f"turns bfloat16 or float32 into FP8, not {problem.a.format.value} "
            f"into {problem.out_format.value}"
        )
    return ACCEPTED


def _supports_dequantize(granularity: Granularity, problem: Problem, _device: Device) -> Support:
    if problem.a.granularity is not granularity:
        return Rejected(f"takes {granularity.value} scales, not {problem.a.granularity.value}")
    return ACCEPTED


for _granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK):
    register(
        "quantize",
        name=f"quantize_{_granularity.suffix}",
        granularity=_granularity,
        supports=functools.partial(_supports_quantize, _granularity),
    )(functools.partial(_quantize, _granularity))
    register(
        "dequantize",
        name=f"dequantize_{_granularity.suffix}",
        granularity=_granularity,
        supports=functools.partial(_supports_dequantize, _granularity),
    )(functools.partial(_dequantize, _granularity))
