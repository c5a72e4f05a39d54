"""Exact quantization, and the error metrics of the Error contract. Runs on any device.

Every other quantize kernel must produce the bytes of `quantize` here; every stored error comes
from `measure_errors` or `kernel_error` here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# digest: off (1x32 scales came later, see lokakern/mx.py)
from lokakern import mx

# digest: on
from lokakern.errors import FormatError, ShapeError
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor, empty_data

SMALLEST_SCALE = 2.0**-126  # smallest normal float32: x / s stays finite for every finite x
UPPER_95 = 1.6448536269514722  # one-sided 95 % quantile of the normal distribution


def quantize(
    x: Tensor,
    out_format: Format,
    granularity: Granularity,
    *,
    power_of_two_scale: bool = False,
    data: Tensor | None = None,
    scale: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize ``x`` exactly as every kernel must.

    ``amax`` over finite values in float32; ``s = max(rn(amax / MAX), 2^-126)``, 1 if amax is 0;
    ``q = cast(rn(x / s))`` with IEEE division, round to nearest even, saturating. NaN and infinity
    become the format's NaN. Scales are decode factors: ``x ~ q * s``.

    Args:
        x: ``[rows, columns]``, bfloat16 or float32, any strides.
        out_format: An FP8 format.
        granularity: What one scale covers.
        power_of_two_scale: Round each scale up to a power of two (exact to apply), as those of
            1x32 always are.
        data: Where to write the elements, ``[rows, columns]``; allocated if None.
        scale: Where to write the scales; allocated if None.

    Raises:
        ShapeError: ``x`` is not two-dimensional.
        FormatError: ``out_format`` is not FP8, or there is no granularity.
    """
    if x.dim() != 2:
        raise ShapeError(f"quantize: x is {list(x.shape)}; expected two dimensions")
    if not out_format.is_fp8:
        raise FormatError(f"quantize: out_format is {out_format.value!r}; expected an FP8 format")
    # digest: off
    if granularity is Granularity.MX:
        power_of_two_scale = True
    # digest: on
    rows, columns = x.shape
    wide = x.float()
    finite = torch.isfinite(wide)
    magnitude = torch.where(finite, wide.abs(), 0.0)
    if scale is None:
        scale = granularity.empty_scale(rows, columns, x.device)
    scale.copy_(_decode_scale(_amax(magnitude, granularity), out_format, power_of_two_scale))
    ratio = wide / spread_scale(scale, granularity, rows, columns)
    if data is None:
        data = empty_data(rows, columns, out_format.dtype, x.device)
    ratio = torch.where(finite, ratio, math.nan)
    return QuantizedTensor(cast(ratio, data), scale, granularity)


def cast(x: Tensor, data: Tensor) -> Tensor:
    """Round float32 to nearest even into FP8 data, saturating; NaN becomes the format's one NaN."""
    form = Format.of(data.dtype)
    limit = form.maximum  # torch <= 2.11 makes NaN of overflow
    encoded = x.clamp(-limit, limit).to(data.dtype).view(torch.uint8)
    data.view(torch.uint8).copy_(torch.where(x.isnan(), form.nan_byte, encoded))
    return data


def quantize_static(
    x: Tensor,
    out_format: Format,
    granularity: Granularity,
    scale: Tensor,
    *,
    data: Tensor | None = None,
) -> tuple[QuantizedTensor, Tensor]:
    """Quantize ``x`` by given scales: ``q = cast(rn(x / s))``, saturating.

    Args:
        x: ``[rows, columns]``, bfloat16 or float32, any strides.
        out_format: An FP8 format.
        granularity: What one scale covers.
        scale: Decode factors from 2^-126 to 2^125, as `Granularity.empty_scale` lays them out.
        data: Where to write the elements, ``[rows, columns]``; allocated if None.

    Returns:
        The quantized tensor, and amax over the finite values of ``x``, float32 ``[1, 1]``.
    """
    rows, columns = x.shape
    wide = x.float()
    finite = torch.isfinite(wide)
    ratio = wide / spread_scale(scale, granularity, rows, columns)
    if data is None:
        data = empty_data(rows, columns, out_format.dtype, x.device)
    cast(torch.where(finite, ratio, math.nan), data)
    amax = _amax(torch.where(finite, wide.abs(), 0.0), Granularity.TENSOR)
    return QuantizedTensor(data, scale, granularity), amax


def _amax(magnitude: Tensor, granularity: Granularity) -> Tensor:
    rows, columns = magnitude.shape
    # digest: off
    if granularity is Granularity.MX:
        return mx.amax(magnitude)
    # digest: on
    height, width = granularity.scale_shape(rows, columns)
    if rows == 0 or columns == 0:
        return magnitude.new_zeros((height, width))
    if granularity is Granularity.TENSOR:
        return magnitude.amax().reshape(1, 1)
    if granularity is Granularity.ROW:
        return magnitude.amax(dim=1, keepdim=True)
    tile_rows = GROUP if granularity is Granularity.BLOCK else 1
    padded = torch.nn.functional.pad(
        magnitude, (0, width * GROUP - columns, 0, height * tile_rows - rows)
    )
    return padded.view(height, tile_rows, width, GROUP).amax(dim=(1, 3))


def _decode_scale(amax: Tensor, out_format: Format, power_of_two: bool) -> Tensor:
    limit = torch.full_like(amax, out_format.maximum)  # a tensor: a Python scalar may be inverted
    scale = (amax / limit).clamp_min(SMALLEST_SCALE)
    if power_of_two:
        mantissa, exponent = torch.frexp(
            scale
        )  # scale = mantissa * 2^exponent, mantissa in [.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(amax == 0, 1.0, scale)


def spread_scale(scale: Tensor, granularity: Granularity, rows: int, columns: int) -> Tensor:
    """Scales in a shape that broadcasts against ``[rows, columns]``."""
    # digest: off
    if granularity is Granularity.MX:
        return mx.spread(scale, columns)
    # digest: on
    if granularity in (Granularity.TENSOR, Granularity.ROW):
        return scale
    spread = scale
    if granularity is Granularity.BLOCK:
        spread = spread.repeat_interleave(GROUP, dim=0)[:rows]
    return spread.repeat_interleave(GROUP, dim=1)[:, :columns]


def dequantize(x: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``data * scale`` in the orientation of ``x``; exact in float64, else by way of float32."""
    wide = x.data.to(torch.float64 if dtype is torch.float64 else torch.float32)
    if x.scale is not None:
        rows, columns = x.data.shape
        wide = wide * spread_scale(x.scale, x.granularity, rows, columns).to(wide.dtype)
    wide = wide.to(dtype)
    return wide.t() if x.transposed else wide


def to_fnuz(x: QuantizedTensor) -> QuantizedTensor:
    """The same values in the fnuz twin of an OCP format: bits kept, scales doubled. Exact.

    fnuz has one more exponent bias, so the same bits mean half the value; its 0x80 is NaN, so
    negative zero becomes 0x00 and OCP's NaNs (and E5M2's infinities) become 0x80.

    Raises:
        FormatError: ``x`` is not in an OCP format; the way back would overflow.
    """
    # digest: off
    if x.granularity is Granularity.MX:
        raise FormatError(
            "to_fnuz: x has 1x32 scales, which no GPU of fnuz formats reads; dequantize it, and "
            "quantize with row or 1x128 scales"
        )
    # digest: on
    twins = {Format.E4M3FN: Format.E4M3FNUZ, Format.E5M2: Format.E5M2FNUZ}
    if x.format not in twins or x.scale is None:
        raise FormatError(
            f"to_fnuz: x is {x.format.value!r}; expected 'e4m3fn' or 'e5m2' (fnuz reaches 240 or "
            "57344 only after doubling the scale, so the other way is refused)"
        )
    bits = x.data.view(torch.uint8)
    finite = torch.isfinite(x.data.float())
    bits = torch.where(bits == 0x80, torch.zeros_like(bits), bits)
    bits = torch.where(finite, bits, torch.full_like(bits, 0x80))
    rows, columns = x.data.shape
    data = empty_data(rows, columns, twins[x.format].dtype, x.device)
    data.view(torch.uint8).copy_(bits)
    doubled = x.granularity.empty_scale(rows, columns, x.device)
    doubled.copy_(x.scale * 2.0)
    return QuantizedTensor(data, doubled, x.granularity, x.transposed)


@dataclass(frozen=True, slots=True)
class Errors:
    """Metrics of the Error contract. Finite or +inf (``sqnr_db`` also -inf), never NaN.

    ``*_upper`` are one-sided 95 % upper confidence limits over the rows drawn.
    """

    row_err: float
    row_err_upper: float
    row_p50: float
    row_p99: float
    row_p99_upper: float
    row_max: float
    rel_err: float
    rel_err_upper: float
    sqnr_db: float
    mean_rel_err: float
    mean_rel_err_upper: float
    mean_rel_err_excluded_share: float
    mean_shift: float
    mean_shift_upper: float
    nonfinite_count: int
    nonfinite_unexpected_count: int


def row_errors(out: Tensor, reference: Tensor) -> Tensor:
    """Relative L2 error of each row; a row whose reference is 0 has 0 if the output is 0, else 1.

    Rows whose reference is not finite are compared where it is finite.
    """
    known = torch.isfinite(reference)
    ref = torch.where(known, reference, 0.0)
    error = torch.where(known, out.to(torch.float64) - reference, 0.0)
    norm = _safe_norm(ref)
    size = _safe_norm(error)
    ratio = torch.where(norm > 0, size / norm.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
    ratio = torch.where((norm == 0) & (size == 0), 0.0, ratio)
    return torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf)


def _safe_norm(x: Tensor) -> Tensor:
    """L2 norm over the last axis, without underflow of squares."""
    peak = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    usable = (peak > 0) & torch.isfinite(peak)
    scaled = x / torch.where(usable, peak, 1.0)
    norm = scaled.square().sum(dim=-1).sqrt() * torch.where(usable, peak, 1.0).squeeze(-1)
    return norm


def measure_errors(out: Tensor, reference: Tensor) -> Errors:
    """Compare an output with the float64 reference of the unquantized operands.

    Args:
        out: ``[rows, columns]``, any float dtype.
        reference: ``[rows, columns]``, float64, on the same device.

    Raises:
        ShapeError: The shapes differ.
    """
    if out.shape != reference.shape:
        raise ShapeError(
            f"measure_errors: out is {list(out.shape)}, reference {list(reference.shape)}; "
            "they must be equal"
        )
    if reference.numel() == 0:
        nothing = dict.fromkeys((f.name for f in fields(Errors)), 0.0)
        return Errors(**{**nothing, "sqnr_db": math.inf})  # type: ignore[arg-type]
    exact = out.to(torch.float64)
    known = torch.isfinite(reference)
    unexpected = int((known & ~torch.isfinite(exact)).sum())
    nonfinite = int((~torch.isfinite(exact)).sum())
    per_row = row_errors(exact, reference)
    rows = per_row.numel()
    capped = per_row.clamp_max(1.0).square()
    row_err = math.sqrt(float(capped.mean()))
    row_err_upper = math.sqrt(float(capped.mean()) + UPPER_95 * _standard_error(capped))
    ordered = per_row.sort().values
    p99, p99_upper = _quantile_with_upper(ordered, 0.99)

    reference = torch.where(known, reference, 0.0)
    delta = torch.where(known, exact - reference, 0.0)
    if unexpected:
        worst = math.inf
        return Errors(
            row_err, max(row_err_upper, row_err), float(ordered[rows // 2]), p99, worst, worst,
            worst, worst, -worst, worst, worst, 0.0, worst, worst, nonfinite, unexpected,
        )  # fmt: skip
    peak = float(reference.abs().max())
    if peak == 0.0:
        wrong = bool((delta != 0).any())
        level = 1.0 if wrong else 0.0
        return Errors(
            row_err, row_err_upper, float(ordered[rows // 2]), p99, p99_upper, float(ordered[-1]),
            level, level, -math.inf if wrong else math.inf,
            0.0, 0.0, 1.0, level, level, nonfinite, 0,
        )  # fmt: skip
    signal = (reference / peak).square().sum(dim=1)
    noise = (delta / peak).square().sum(dim=1)
    rel_err, rel_err_upper = _ratio_with_upper(noise, signal)
    rms = math.sqrt(float(signal.sum()) / reference.numel()) * peak
    counted = known & (reference.abs() > 1e-6 * rms)
    relative = torch.where(counted, delta.abs() / torch.where(counted, reference.abs(), 1.0), 0.0)
    per_row_count = counted.sum(dim=1).to(torch.float64)
    mean_rel = float(relative.sum() / per_row_count.sum())
    mean_rel_upper = mean_rel + UPPER_95 * _ratio_error(relative.sum(dim=1), per_row_count)
    shift_rows = (delta / rms).mean(dim=1)
    shift = abs(float(shift_rows.mean()))
    return Errors(
        row_err=row_err,
        row_err_upper=row_err_upper,
        row_p50=float(ordered[rows // 2]),
        row_p99=p99,
        row_p99_upper=p99_upper,
        row_max=float(ordered[-1]),
        rel_err=rel_err,
        rel_err_upper=rel_err_upper,
        sqnr_db=-20 * math.log10(rel_err) if rel_err > 0 else math.inf,
        mean_rel_err=mean_rel,
        mean_rel_err_upper=mean_rel_upper,
        mean_rel_err_excluded_share=1.0 - float(counted.sum()) / reference.numel(),
        mean_shift=shift,
        mean_shift_upper=shift + UPPER_95 * _standard_error(shift_rows),
        nonfinite_count=nonfinite,
        nonfinite_unexpected_count=0,
    )


def _standard_error(values: Tensor) -> float:
    count = values.numel()
    return float(values.std()) / math.sqrt(count) if count > 1 else 0.0


def _quantile_with_upper(ordered: Tensor, q: float) -> tuple[float, float]:
    """A quantile and its upper limit, by order statistics (normal approximation of the rank)."""
    count = ordered.numel()
    rank = min(count - 1, math.ceil(q * count) - 1)
    spread = UPPER_95 * math.sqrt(count * q * (1 - q))
    upper = min(count - 1, math.ceil(q * count + spread) - 1)
    return float(ordered[rank]), float(ordered[upper])


def _ratio_with_upper(noise: Tensor, signal: Tensor) -> tuple[float, float]:
    """sqrt(sum noise / sum signal) over rows, with its upper limit by the delta method."""
    ratio = float(noise.sum() / signal.sum())
    return math.sqrt(ratio), math.sqrt(ratio + UPPER_95 * _ratio_error(noise, signal))


def _ratio_error(numerator: Tensor, denominator: Tensor) -> float:
    """Standard error of sum(numerator) / sum(denominator) over independent rows."""
    count = numerator.numel()
    total = float(denominator.sum())
    if count < 2 or total == 0:
        return 0.0
    residual = numerator - numerator.sum() / total * denominator
    return float(residual.std()) * math.sqrt(count) / total


@dataclass(frozen=True, slots=True)
class KernelError:
    """Error of a kernel against the exact product of its operands; 1 is the limit."""

    maximum: float
    row_p99: float


def kernel_error(
    out: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    out_unit_roundoff: float,
    out_scale: Tensor | float | None = None,
) -> KernelError:
    """Whether a kernel is right, apart from what its formats lose.

    ``max |d - e| / (u_out |e| + 2^-13 sum|a||b|)`` over elements: rounding of the output plus the
    14 bits a Hopper FP8 tensor core keeps of a running sum. One wrong element fails.

    Args:
        out: The kernel's output ``d``, ``[m, n]``.
        exact: Product of the operands in float64, scales applied, ``[m, n]``.
        magnitude: The same product of absolute values, ``[m, n]``.
        out_unit_roundoff: Of the output format, see `Format.unit_roundoff`.
        out_scale: Decode scale of an FP8 output, which saturates; None for other outputs.

    Returns:
        The maximum, and the 99th percentile over rows of each row's maximum; +inf where the output
        is finite and must not be, or is not finite and must be.
    """
    if out.numel() == 0:
        return KernelError(0.0, 0.0)
    wide = out.to(torch.float64)
    finite = torch.isfinite(exact)
    # An output in the subnormal range is spaced by this, not by |e|.
    smallest = torch.finfo(out.dtype).smallest_normal * out_unit_roundoff * 2
    if out_scale is not None:
        scale = float(out_scale)
        wide, smallest = wide * scale, smallest * scale
        limit = Format.of(out.dtype).maximum * scale
        finite = ~torch.isnan(exact)  # infinity saturates
        exact = torch.clamp(exact, -limit, limit)
        magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    allowed = out_unit_roundoff * exact.abs() + 2.0**-13 * magnitude
    ratio = (wide - exact).abs() / (allowed + smallest)
    ratio = torch.where(finite, ratio, 0.0)
    ratio = torch.where(torch.isfinite(wide) == finite, ratio, math.inf)
    if out_scale is None:
        # Infinity is right where a sum as far off as it may be rounds past the largest finite one.
        furthest = exact + exact.sign() * 2.0**-13 * magnitude
        rounded = furthest.to(out.dtype).to(torch.float64)
        ratio = torch.where(finite & torch.isinf(rounded) & (wide == rounded), 0.0, ratio)
    per_row = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).amax(dim=1)
    ordered = per_row.sort().values
    return KernelError(float(ordered[-1]), _quantile_with_upper(ordered, 0.99)[0])


def flushed_and_saturated_shares(x: Tensor, q: QuantizedTensor) -> tuple[float, float]:
    """Shares of elements that are nonzero in ``x`` but 0 in ``q``, and at the format's maximum."""
    if x.numel() == 0:
        return 0.0, 0.0
    value = q.data.float()
    flushed = (x != 0) & (value == 0)
    saturated = value.abs() >= q.format.maximum
    return float(flushed.double().mean()), float(saturated.double().mean())
