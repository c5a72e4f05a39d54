"""Formats that no kernel here multiplies, emulated in stock PyTorch, beside FP8 to compare with.

    format       elements of a row under one scale          scale
    nvfp4        e2m1, 16                                   e4m3, and float32 of the whole tensor
    mxfp4        e2m1, 32                                   power of two
    mxfp8        e4m3, 32                                   power of two
    fp8-row      e4m3, all                                  float32
    int8         int8, all                                  float32
    int8-weight  the weight alone: int8, all                float32
    int4-weight  the weight alone: int4, 128, and a shift   bfloat16

Elements and scales have the bits of torchao's casts of bfloat16: `nvfp4_quantize` with a dynamic
scale of the tensor, `to_mx` with scales rounded up, `quantize_affine` with the parameters of
`Int8Tensor`, and those of tinygemm. They differ where torchao's are not usable: a tensor of zeros
is no NaN in nvfp4, and groups smaller than the smallest power of two keep their values in mxfp4.
fp8-row and mxfp8 are `numerics.quantize`, to which kernels are equal.

Products are summed in float32, as tensor cores do; those of int8 are exact in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import mx, numerics
from lokakern.types import Format, Granularity, QuantizedTensor

LARGEST_E2M1 = 6.0
LARGEST_E4M3 = Format.E4M3FN.maximum
SMALLEST_E4M3 = 2.0**-6  # normal; torchao's smallest scale of an nvfp4 group
NV_GROUP, INT4_GROUP = 16, 128
INT8_STEPS = 127.5  # half of -128..127, which torchao divides amax by
SMALLEST_INT8_SCALE = 2.0**-23  # torch.finfo(torch.float32).eps
INT4_STEPS, INT4_MIDDLE = 15, 8


class Emulated(NamedTuple):
    """Rows in a format: elements and scales as numbers, and what they stand for."""

    elements: Tensor  # float32 [rows, k]
    scale: Tensor  # [rows, groups]
    value: Tensor  # float32 [rows, k]


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the even code, saturating."""
    size = x.abs().clamp_max(LARGEST_E2M1)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def nvfp4(x: Tensor) -> Emulated:
    """Two scales, each of what the other leaves; see the module."""
    wide = _groups(x, NV_GROUP)
    amax = wide.abs().amax()
    whole = torch.where(amax == 0, 1.0, amax / (LARGEST_E4M3 * LARGEST_E2M1))
    group = wide.abs().amax(dim=2) / LARGEST_E2M1 / whole
    scale = group.clamp(SMALLEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float()
    encode = (1.0 / whole) / scale
    elements = round_e2m1(wide * encode[..., None])
    value = elements * (scale * whole)[..., None]
    return Emulated(_rows(elements, x), scale, _rows(value, x))


def mxfp4(x: Tensor) -> Emulated:
    """The power of two is amax / 6 rounded up, so that nothing saturates."""
    wide = _groups(x, mx.GROUP)
    ratio = (wide.abs().amax(dim=2) / LARGEST_E2M1).clamp_min(numerics.SMALLEST_SCALE)
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(ratio), exponent)
    elements = round_e2m1(wide / scale[..., None])
    return Emulated(_rows(elements, x), scale, _rows(elements * scale[..., None], x))


def fp8(granularity: Granularity, x: Tensor) -> Emulated:
    """As every kernel quantizes to E4M3."""
    found = numerics.quantize(x, Format.E4M3FN, granularity)
    assert found.scale is not None  # FP8 has scales
    return Emulated(found.data.float(), found.scale.float(), numerics.dequantize(found))


def int8(x: Tensor) -> Emulated:
    """Symmetric; the scale is computed in the format of x, as torchao does."""
    amax = x.abs().amax(dim=1, keepdim=True)
    scale = (amax / INT8_STEPS).clamp_min(SMALLEST_INT8_SCALE).float()
    elements = torch.round(x * (1.0 / scale)).clamp(-128, 127) + 0.0  # integers have no -0
    return Emulated(elements, scale, elements * scale)


def int4(x: Tensor) -> Emulated:
    """From the least of 128 elements to the largest in 15 steps, in bfloat16 as tinygemm does."""
    wide = _groups(x.bfloat16(), INT4_GROUP, like_last=True)
    least, most = wide.amin(dim=2, keepdim=True), wide.amax(dim=2, keepdim=True)
    tiny = torch.finfo(torch.bfloat16).smallest_normal
    scale = ((most - least) / INT4_STEPS).clamp_min(tiny)
    middle = least + scale * INT4_MIDDLE
    first = middle - scale * INT4_MIDDLE
    elements = torch.round((wide - first) / scale).clamp(0, INT4_STEPS) + 0.0
    value = (elements - INT4_MIDDLE) * scale + middle
    return Emulated(_rows(elements.float(), x), scale[..., 0], _rows(value.float(), x))


def _groups(x: Tensor, width: int, *, like_last: bool = False) -> Tensor:
    """``[rows, groups, width]``; the last group is filled with zeros, or with its last element."""
    rows, columns = x.shape
    wide, more = x if like_last else x.float(), -columns % width
    if more and like_last:
        wide = torch.cat([wide, wide[:, -1:].expand(rows, more)], dim=1)
    elif more:
        wide = torch.nn.functional.pad(wide, (0, more))
    return wide.reshape(rows, -1, width)


def _rows(grouped: Tensor, x: Tensor) -> Tensor:
    return grouped.flatten(1)[:, : x.shape[1]]


@dataclass(frozen=True)
class WhatIf:
    """A format of products.

    Attributes:
        name: Such as "nvfp4".
        cast: Of rows ``[rows, k]`` of an operand.
        weight_only: Whether activations stay as they are.
        way: Scales of kernels that quantize the same, as Probe names them; "" if there are none.
    """

    name: str
    cast: Callable[[Tensor], Emulated]
    weight_only: bool = False
    way: str = ""

    def quantized_as(self, which: str, rows: Tensor) -> QuantizedTensor:
        """Values of rows of a ("x"), or of columns of b as rows ("w"), see `Kernel`."""
        kept = self.weight_only and which == "x"
        value = rows if kept else self.cast(rows).value
        return QuantizedTensor(value, None, Granularity.NONE)


FORMATS = {
    found.name: found
    for found in (
        WhatIf("nvfp4", nvfp4),
        WhatIf("mxfp4", mxfp4),
        WhatIf("mxfp8", functools.partial(fp8, Granularity.MX), way="1x32"),
        WhatIf("fp8-row", functools.partial(fp8, Granularity.ROW), way="row"),
        WhatIf("int8", int8),
        WhatIf("int8-weight", int8, weight_only=True),
        WhatIf("int4-weight", int4, weight_only=True),
    )
}
