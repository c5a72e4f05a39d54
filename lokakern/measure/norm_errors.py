"""Whether what a normalizing kernel wrote is right, FP8 with scales of its own making included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lokakern.numerics import SMALLEST_SCALE, KernelError, kernel_error, spread_scale
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor

SCALE_ROUNDOFF = 2.0**-10  # of a scale that a kernel makes of its own outputs
SUM_ROUNDOFF = 2.0**-13  # of magnitudes, as of `numerics.kernel_error`


def norm_kernel_error(
    out: Tensor | QuantizedTensor, exact: Tensor, magnitude: Tensor, out_unit_roundoff: float
) -> KernelError:
    """`numerics.kernel_error` of an output that is bfloat16, or FP8 with scales of any kind.

    Values of dynamic scales are compared as they are, ``data * scale``, with what the format rounds
    off under the scale found; each scale must be within ``2^-10 s + 2^-13 M / MAX`` of that of the
    exact outputs, M the largest magnitude under it. One wrong element, or scale, fails. What is
    infinite is either saturated or NaN under a scale that is given.

    Args:
        out: What the kernel wrote, ``[m, n]``.
        exact: What it should be, float64, from `registry.ops.normalized`.
        magnitude: The scale of its rounding errors, from there as well.
        out_unit_roundoff: Of the output format, see `Format.unit_roundoff`.
    """
    if isinstance(out, Tensor):
        return kernel_error(out, exact, magnitude, out_unit_roundoff)
    assert out.scale is not None  # FP8 has scales
    if out.granularity is Granularity.TENSOR:
        # An infinity under a scale that is given may saturate or become NaN.
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
    return _summary(torch.maximum(worst, _scale_errors(out, exact, known).amax(dim=1)))


def scale_error(out: QuantizedTensor, exact: Tensor, magnitude: Tensor) -> float:
    """How far scales of rows or of 1x128 are from those of the exact outputs; 1 is the limit."""
    errors = _scale_errors(out, exact, torch.where(torch.isfinite(exact), magnitude, 0.0))
    return float(errors.max()) if errors.numel() else 0.0


def _scale_errors(out: QuantizedTensor, exact: Tensor, magnitude: Tensor) -> Tensor:
    """Of each scale; where an amax may be 0, a scale of 1 is as right as the amax's."""
    form = Format.of(out.data.dtype)
    finite = torch.isfinite(exact)
    amax = _largest(torch.where(finite, exact.abs(), 0.0), out.granularity)
    slack = SCALE_ROUNDOFF * amax + SUM_ROUNDOFF * _largest(magnitude, out.granularity)
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


def _summary(per_row: Tensor) -> KernelError:
    ordered = per_row.sort().values
    rank = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return KernelError(float(ordered[-1]), float(ordered[rank]))
