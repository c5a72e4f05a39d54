"""Quantize and dequantize in stock PyTorch: slow, exact, on any device, in every format.

s = max(rn(amax / MAX), 2^-126),  q = cast(rn(x / s)),  x ~ q * s
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.registry.register import register
from lokakern.sums import column_sums
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
    epilogue: str,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    workspace: tuple[Tensor, ...],
) -> None:
    form = Format.of(data.dtype)
    if epilogue in ("static", "delayed"):
        _, amax = numerics.quantize_static(x, form, granularity, scale, data=data)
        if epilogue == "delayed":
            torch.maximum(workspace[0], amax, out=workspace[0])
        return
    by_power = epilogue == "power_of_two"
    numerics.quantize(x, form, granularity, power_of_two_scale=by_power, data=data, scale=scale)


def _quantize_transpose(
    granularity: Granularity,
    epilogue: str,
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    data_t: Tensor,
    scale_t: Tensor,
    sums: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    if granularity is Granularity.TENSOR and epilogue != "none":
        scale_t.copy_(scale)
    _quantize(granularity, epilogue, x, data, scale, workspace)
    _quantize(granularity, epilogue, x.t(), data_t, scale_t, workspace)
    if sums is not None:
        column_sums(x, sums)


def _no_workspace(*_: Tensor | None) -> tuple[Tensor, ...]:
    return ()


def _amax(x: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    return (torch.zeros((1, 1), dtype=torch.float32, device=x.device),)


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


_EPILOGUES = {
    "none": (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK),
    "power_of_two": (Granularity.ROW, Granularity.GROUP, Granularity.BLOCK),
    "static": (Granularity.TENSOR,),
    "delayed": (Granularity.TENSOR,),
}
for _epilogue, _granularities in _EPILOGUES.items():
    for _granularity in _granularities:
        for _op, _launch in (
            ("quantize", _quantize),
            ("quantize_transpose", _quantize_transpose),
        ):
            _suffix = "" if _epilogue == "none" else f"_{_epilogue}"
            _sums = "column_sums" if _epilogue == "none" else f"{_epilogue}+column_sums"
            register(
                _op,
                name=f"{_op}_{_granularity.suffix}{_suffix}",
                granularity=_granularity,
                supports=functools.partial(_supports_quantize, _granularity),
                epilogues=frozenset({_epilogue} if _op == "quantize" else {_epilogue, _sums}),
                workspace=_amax if _epilogue == "delayed" else _no_workspace,
            )(functools.partial(_launch, _granularity, _epilogue))
for _granularity in _EPILOGUES["none"]:
    register(
        "dequantize",
        name=f"dequantize_{_granularity.suffix}",
        granularity=_granularity,
        supports=functools.partial(_supports_dequantize, _granularity),
    )(functools.partial(_dequantize, _granularity))
