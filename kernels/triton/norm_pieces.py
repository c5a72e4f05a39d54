"""What follows a norm, for kernels that hold the rows it normalizes: tails, scales, FP8.

All in float32; what is NaN stays NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.epilogue import NormEpilogue
from lokakern.kernels.triton.quantize import _cast
from lokakern.types import Device, Format, Granularity, Problem, QuantizedTensor

# How the output is written, by its granularity.
SCALES = {
    Granularity.NONE: "none",
    Granularity.TENSOR: "static",
    Granularity.ROW: "row",
    Granularity.GROUP: "group",
}


@triton.jit
def whole(size: tl.tensor, GRAIN: tl.constexpr) -> tl.tensor:
    """A size that GRAIN divides, in a form that says so: Triton itself notices 16 only.

    Rows of 1000 bfloat16 values start every 16 bytes, and are loaded so.
    """
    return size if GRAIN == 1 else size // GRAIN * GRAIN


@triton.jit
def inverse_root(mean_of_squares: tl.tensor, EPS: tl.constexpr) -> tl.tensor:
    """Within 2 last places; of a row of zeros infinite where eps is 0, which makes it NaN."""
    return tl.rsqrt(mean_of_squares + EPS)


@triton.jit
def tail(
    z: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    residual: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    column: tl.tensor,
    row: tl.tensor,
    residual_stride: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    column_known: tl.tensor,
    known: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """What is written, of a tile of normalized values; 0 past the end of rows.

    Args:
        z: ``[rows, columns]``.
        norm_weight: Of all columns, as is `norm_bias`.
        norm_bias: Added to z.
        residual: Where the rows begin, as do `first` and `second`.
        first: The gate, or x0 of the cross.
        second: x of the cross.
        column: Of the tile, as `column_known`, ``[columns]``.
        row: Of the tile, ``[rows]``.
        residual_stride: From row to row, as the next two.
        first_stride: Of `first`.
        second_stride: Of `second`.
        column_known: Whether it exists.
        known: Whether an element exists.
        HAS_WEIGHT: Whether there is a weight.
        HAS_BIAS: Whether there is a bias of the norm.
        LAST: "none", "relu", "hardswish", "silu", "gate" or "cross".
        RESIDUAL: "last" where it is added here.
    """
    # Weights are read by every program, all else once: what stays in the L1 is said.
    if HAS_WEIGHT:
        weight = tl.load(
            norm_weight + column, column_known, other=0.0, eviction_policy="evict_last"
        )
        z = z * weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        added = tl.load(norm_bias + column, column_known, other=0.0, eviction_policy="evict_last")
        z = z + added.to(tl.float32)[None, :]
    if LAST == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    elif LAST == "hardswish":
        z = z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    elif LAST == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif LAST == "gate" or LAST == "cross":
        at_first = first + row[:, None] * first_stride + column[None, :]
        factor = tl.load(at_first, known, other=0.0, eviction_policy="evict_first")
        if LAST == "gate":
            z = factor.to(tl.float32) / (1.0 + tl.exp(-z))
        else:
            at_second = second + row[:, None] * second_stride + column[None, :]
            added = tl.load(at_second, known, other=0.0, eviction_policy="evict_first")
            z = factor.to(tl.float32) * z + added.to(tl.float32)
    if RESIDUAL == "last":
        at_residual = residual + row[:, None] * residual_stride + column[None, :]
        added = tl.load(at_residual, known, other=0.0, eviction_policy="evict_first")
        z = z + added.to(tl.float32)
    return z


@triton.jit
def static_cast(
    d: tl.tensor, scale: tl.tensor, FORMAT: tl.constexpr, MAX: tl.constexpr, NAN_BYTE: tl.constexpr
) -> tl.tensor:
    """`_cast` by a scale that was not made of d: what is finite saturates.

    A quotient past the largest float32 would be infinite, and its remainder NaN.
    """
    limit = 2.0 * MAX * scale
    limited = tl.minimum(tl.maximum(d, -limit), limit)
    limited = tl.where(tl.abs(d) < float("inf"), limited, d)
    return _cast(limited, scale, FORMAT, MAX, NAN_BYTE)


def grain(*sizes: int) -> int:
    """What `whole` is told of sizes of rows and how far they are apart."""
    return 8 if any(size % 16 for size in sizes) and not any(size % 8 for size in sizes) else 1


class Form(NamedTuple):
    """What of an epilogue decides the compilation, beside the norm and the strides.

    Attributes:
        bias: Dtype, or None where there is none; so are the next two.
        norm_weight: Of the norm.
        norm_bias: Of the norm.
        last: See `tail`.
        residual: "none", "before" the norm, or "last".
    """

    bias: torch.dtype | None
    norm_weight: torch.dtype | None
    norm_bias: torch.dtype | None
    last: str
    residual: str


def pieces(
    epilogue: NormEpilogue, absent: Tensor
) -> tuple[Form, tuple[Tensor, ...], tuple[int, int, int]]:
    """An epilogue as a kernel takes it.

    Args:
        epilogue: All but the norm is read.
        absent: Stands for tensors that are not there.

    Returns:
        The form; bias, norm_weight, norm_bias, residual, first, second of `tail`; and how far the
        rows of the last three are apart.
    """
    bias, weight, added = epilogue.bias, epilogue.norm_weight, epilogue.norm_bias
    residual, second = epilogue.residual, epilogue.x
    first, last = epilogue.gate, "gate"
    if first is None:
        first, last = epilogue.x0, "cross"
    form = Form(
        None if bias is None else bias.dtype,
        None if weight is None else weight.dtype,
        None if added is None else added.dtype,
        epilogue.activation if first is None else last,
        "none" if residual is None else "last" if epilogue.residual_last else "before",
    )
    tensors = (bias, weight, added, residual, first, second)
    strides = (
        0 if residual is None else residual.stride(0),
        0 if first is None else first.stride(0),
        0 if second is None else second.stride(0),
    )
    return form, tuple(absent if x is None else x for x in tensors), strides


def written(out: Tensor | QuantizedTensor) -> tuple[Tensor, Tensor, str]:
    """Data and scales of an output, and one of `SCALES`."""
    if isinstance(out, Tensor):
        return out, out, "none"
    scale = out.data if out.scale is None else out.scale
    return out.data, scale, SCALES[out.granularity]


def unwritable(problem: Problem, device: Device) -> str | None:
    """Why an output cannot be written, if so."""
    form, granularity = problem.out_format, problem.out_granularity
    if form is Format.BFLOAT16 and granularity is Granularity.NONE:
        return None
    fnuz = device.architecture == "gfx942"
    if not form.is_fp8 or form.value.endswith("fnuz") is not fnuz:
        return f"{device.architecture} does not convert to {form.value}"
    if granularity not in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        return f"makes no {granularity.value} scales"
    return None
