"""Kernel errors of outputs with a norm, including FP8 outputs with dynamic scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lokakern.numerics import SMALLEST_SCALE, KernelError, kernel_error, spread_scale
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor

SCALE_ROUNDOFF = 2.0**-10  # of a dynamic scale
SUM_ROUNDOFF = 2.0**-13  # of magnitudes, as of `numerics.kernel_error`


def norm_kernel_error(
    out: Tensor | QuantizedTensor, exact: Tensor, magnitude: Tensor, out_unit_roundoff: float
) -> KernelError:
    """`numerics.kernel_error` of a bfloat16 output, or of an FP8 output with scales of any kind.

    With dynamic scales, ``data * scale`` is compared within the rounding of the format under the
    scale found, and each scale must be within ``2^-10 s + 2^-13 M / MAX`` of the scale of the exact
    outputs, M the largest magnitude that it covers. One incorrect element or scale fails. Under a
    static scale an infinite output may saturate or be NaN.

    Args:
        out: The kernel's output, ``[m, n]``.
        exact: The exact output, float64, from `registry.ops.normalized`.
        magnitude: The scale of its rounding errors, also from there.
        out_unit_roundoff: See `Format.unit_roundoff`.
    """
    if isinstance(out, Tensor):
        return kernel_error(out, exact, magnitude, out_unit_roundoff)
    assert out.scale is not None  # FP8 has scales
    if out.granularity is Granularity.TENSOR:
        # An infinity under a static scale may saturate or become NaN.
        lost = torch.isinf(exact) & torch.isnan(out.data.float())
        exact = torch.where(lost, math.nan, exact)
        return kernel_error(out.data, exact, magnitude, out_unit_roundoff, out.scale)
    if not exact.numel():
        return KernelError(0.0, 0.0)
    rows, columns = exact.shape
    scale = spread_scale(out.scale, out.granularity, rows, columns).double()
    found = out.data.double() * scale
    finite = torch.isfinite(exact)
    known = torch.where(finite, magnitude, 0.0)
    smallest = torch.finfo(out.data.dtype).smallest_normal * out_unit_roundoff * 2
    allowed = out_unit_roundoff * exact.abs() + SUM_ROUNDOFF * known + smallest * scale
    ratio = torch.where(finite, (found - exact).abs() / allowed, 0.0)
    ratio = torch.where(torch.isfinite(found) == finite, ratio, math.inf)
    worst = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).amax(dim=1)
    worst = torch.maximum(worst, scale_errors(out, exact, magnitude).amax(dim=1))
    ordered = worst.sort().values
    rank = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return KernelError(float(ordered[-1]), float(ordered[rank]))


def scale_errors(out: QuantizedTensor, exact: Tensor, magnitude: Tensor) -> Tensor:
    """Error of each rowwise or 1x128 scale, relative to the tolerance.

    A scale of 1 is exact for an amax of 0.
    """
    form = Format.of(out.data.dtype)
    finite = torch.isfinite(exact)
    amax = _largest(torch.where(finite, exact.abs(), 0.0), out.granularity)
    largest = _largest(torch.where(finite, magnitude, 0.0), out.granularity)
    slack = SCALE_ROUNDOFF * amax + SUM_ROUNDOFF * largest
    assert out.scale is not None  # checked by the caller
    found = out.scale.double()
    wanted = (amax / form.maximum).clamp_min(SMALLEST_SCALE)
    allowed = (slack / form.maximum).clamp_min(SMALLEST_SCALE * SCALE_ROUNDOFF)
    error = (found - wanted).abs() / allowed
    error = torch.where((found == 1.0) & (amax <= slack), 0.0, error)
    return torch.nan_to_num(error, nan=math.inf, posinf=math.inf)


def _largest(values: Tensor, granularity: Granularity) -> Tensor:
    rows, columns = values.shape
    if granularity is Granularity.ROW:
        return values.amax(dim=1, keepdim=True)
    groups = -(-columns // GROUP)
    padded = torch.nn.functional.pad(values, (0, groups * GROUP - columns))
    return padded.view(rows, groups, GROUP).amax(dim=2)
