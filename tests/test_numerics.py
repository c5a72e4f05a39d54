"""Exact quantization against NumPy and exact arithmetic; metrics against their formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, fields
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lokakern import numerics
from lokakern.errors import FormatError, ShapeError
from lokakern.numerics import Errors, kernel_error, measure_errors
from lokakern.types import Format, Granularity, QuantizedTensor

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

FP8 = tuple(form for form in Format if form.is_fp8)
SCALED = tuple(g for g in Granularity if g is not Granularity.NONE)
SMALLEST = 2.0**-126
BIG = float(np.finfo(np.float32).max)
fast = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operands, many calls: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the four formats, decoded from their bits by hand: (exponent bits, bias, NaN and infinity)

BITS = {
    Format.E4M3FN: (4, 7, {0x7F: math.nan, 0xFF: math.nan}),
    Format.E5M2: (
        5,
        15,
        {0x7C: math.inf, 0xFC: -math.inf}
        | dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), math.nan),
    ),
    Format.E4M3FNUZ: (4, 8, {0x80: math.nan}),
    Format.E5M2FNUZ: (5, 16, {0x80: math.nan}),
}


def decoded(byte: int, form: Format) -> float:
    exponent_bits, bias, special = BITS[form]
    if byte in special:
        return special[byte]
    mantissa_bits = 7 - exponent_bits
    exponent = (byte >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = byte & (2**mantissa_bits - 1)
    if exponent == 0:
        size = mantissa * 2.0 ** (1 - bias - mantissa_bits)
    else:
        size = (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)
    return -size if byte & 0x80 else size


VALUES = {form: np.array([decoded(byte, form) for byte in range(256)]) for form in FP8}
# Finite magnitudes in the order of their bytes 0, 1, 2, ...: an even byte is an even mantissa.
GRIDS = {form: np.array([v for v in VALUES[form][:128] if math.isfinite(v)]) for form in FP8}


def encoded(ratio: Array, form: Format) -> Bytes:
    """Nearest value of the format, ties to even, saturating; by looking at all of them."""
    grid = GRIDS[form]
    size = np.minimum(np.abs(ratio), grid[-1])
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    below = above - 1
    down, up = size - grid[below], grid[above] - size
    byte = np.where(down < up, below, above)
    byte = np.where(down == up, np.where(below % 2 == 0, below, above), byte)
    negative = np.signbit(ratio) & ((byte != 0) | (form in (Format.E4M3FN, Format.E5M2)))
    return (byte | np.where(negative, 0x80, 0)).astype(np.uint8)


def scale_places(granularity: Granularity, rows: int, columns: int) -> tuple[Any, Any]:
    """Row and column of the scale of every element, broadcast to ``[rows, columns]``."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    zero = np.zeros((rows, columns), dtype=int)
    return {
        Granularity.TENSOR: (zero, zero),
        Granularity.ROW: (row + zero, zero),
        Granularity.GROUP: (row + zero, column // 128 + zero),
        Granularity.BLOCK: (row // 128 + zero, column // 128 + zero),
        Granularity.MX: (row + zero, column // 32 + zero),
    }[granularity]


def nearest_single(x: Array) -> Array:
    """Rounded to float32. Quotients of float32 that were rounded to float64 come out right."""
    with np.errstate(under="ignore", over="ignore"):
        return np.asarray(x).astype(np.float32).astype(np.float64)


def expected_quantization(
    x: Array, form: Format, granularity: Granularity, *, power_of_two: bool = False
) -> tuple[Bytes, Array]:
    """The bytes and scales that the contract asks for."""
    places = scale_places(granularity, *x.shape)
    finite = np.isfinite(x)
    shape = [int(p.max()) + 1 for p in places]
    amax = np.zeros(shape)
    np.maximum.at(amax, places, np.where(finite, np.abs(x), 0.0))
    scale = np.maximum(nearest_single(amax / GRIDS[form][-1]), SMALLEST)
    if power_of_two or granularity is Granularity.MX:
        scale = np.vectorize(lambda s: 2.0 ** math.ceil(math.log2(s)), otypes=[float])(scale)
    scale = np.where(amax == 0, 1.0, scale)
    ratio = nearest_single(np.where(finite, x, 0.0) / scale[places])
    nan = {Format.E4M3FN: 0x7F, Format.E5M2: 0x7F}.get(form, 0x80)
    return np.where(finite, encoded(ratio, form), nan).astype(np.uint8), scale


def found_quantization(q: QuantizedTensor) -> tuple[Bytes, Array]:
    assert q.scale is not None
    by_byte = q.granularity is Granularity.MX
    assert q.scale.dtype == (torch.float8_e8m0fnu if by_byte else torch.float32)
    return q.data.view(torch.uint8).numpy(), q.scale.double().numpy()


def assert_exactly_quantized(
    x: torch.Tensor, form: Format, granularity: Granularity, *, power_of_two: bool = False
) -> None:
    found = found_quantization(
        numerics.quantize(x, form, granularity, power_of_two_scale=power_of_two)
    )
    wanted = expected_quantization(x.double().numpy(), form, granularity, power_of_two=power_of_two)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.parametrize("form", FP8)
def test_formats_equal_torchs_decoding(form: Format) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(form.dtype).double().numpy()
    np.testing.assert_array_equal(every, VALUES[form])
    assert form.maximum == GRIDS[form][-1]
    assert math.isnan(VALUES[form][form.nan_byte])
    one = int(np.flatnonzero(GRIDS[form] == 1.0)[0])
    assert form.unit_roundoff == (GRIDS[form][one + 1] - 1.0) / 2


# --- quantize

_HOSTILE = (
    0.0, -0.0, 1.0, 448.0, 3e38, -3e38, BIG, math.inf, -math.inf, math.nan,
    1e-45, -1e-45, 2.0**-126, 2.0**-127, 1e-38, 1e-30, 2.0**-119, 1.17549421e-38,
)  # fmt: skip


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Any shape; values of a small palette in any order, or normal around one, rows of zeros."""
    rows = draw(st.sampled_from([1, 2, 3, 5, 127, 128, 129, 260]))
    columns = draw(st.sampled_from([1, 2, 3, 16, 127, 128, 129, 200, 256, 300]))
    if rows * columns > 40_000:
        columns = 129
    single = st.floats(width=32) | st.sampled_from(_HOSTILE)
    palette = np.array(draw(st.lists(single, min_size=1, max_size=12)), dtype=np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.choice(palette, size=(rows, columns))
    if draw(st.booleans()):
        level = draw(st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e37]))
        normal = (rng.standard_normal((rows, columns)) * level).astype(np.float32)
        values = np.where(rng.random((rows, columns)) < draw(st.floats(0, 1)), normal, values)
    values[rng.random(rows) < 0.2] = 0.0
    x = torch.from_numpy(values.astype(np.float32))
    if draw(st.booleans()):
        x = x.bfloat16()
    if draw(st.booleans()):
        x = x.t().contiguous().t()
    return x


@given(
    x=matrices(),
    form=st.sampled_from(FP8),
    granularity=st.sampled_from(SCALED),
    power_of_two=st.booleans(),
)
@settings(fast, max_examples=400)
def test_quantize_is_exact(
    x: torch.Tensor, form: Format, granularity: Granularity, power_of_two: bool
) -> None:
    assert_exactly_quantized(x, form, granularity, power_of_two=power_of_two)


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("granularity", SCALED)
def test_quantize_is_exact_on_every_kind_of_row(form: Format, granularity: Granularity) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((140, 270)).astype(np.float32)
    x *= np.exp(rng.uniform(-80, 80, (140, 1))).astype(np.float32)
    x[3] = 0.0
    x[4] = np.float32(1e-45) * rng.integers(-9, 10, 270)
    x[5, 7], x[6, 0], x[7, 269] = math.nan, math.inf, -math.inf
    x[8] = math.nan
    x[9, :3] = BIG, -BIG, 3e38
    x[128:, :130] = 0.0
    assert_exactly_quantized(torch.from_numpy(x), form, granularity)
    assert_exactly_quantized(torch.from_numpy(x), form, granularity, power_of_two=True)
    assert_exactly_quantized(torch.from_numpy(x).bfloat16(), form, granularity)


@pytest.mark.parametrize("form", FP8)
def test_ties_round_to_even_and_neighbors_to_the_nearest(form: Format) -> None:
    grid = GRIDS[form]
    middle = (grid[:-1] + grid[1:]) / 2
    assert np.array_equal(middle, middle.astype(np.float32))
    for sign in (1.0, -1.0):
        ties = np.concatenate([[grid[-1]], sign * middle])[None, :]
        x = torch.from_numpy(ties).float()
        q = numerics.quantize(x, form, Granularity.TENSOR)
        assert q.scale is not None
        assert float(q.scale) == 1.0
        bytes_ = q.data.view(torch.uint8).numpy()[0, 1:]
        assert not (bytes_ & 1).any()
        for step in (-math.inf, math.inf):
            near = np.nextafter(middle.astype(np.float32), np.float32(step))
            values = np.concatenate([[grid[-1]], sign * near.astype(np.float64)])[None, :]
            found = numerics.quantize(torch.from_numpy(values).float(), form, Granularity.TENSOR)
            wanted = grid[:-1] if step < 0 else grid[1:]
            np.testing.assert_array_equal(found.data.double().numpy()[0, 1:], sign * wanted)


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 2.0**-126, 2.0**-120, 1.0, 3e38, BIG])
def test_scale_of_any_amax(form: Format, amax: float) -> None:
    amax = float(np.float32(amax))
    q = numerics.quantize(torch.tensor([[amax, -amax, 0.0]]), form, Granularity.ROW)
    assert q.scale is not None
    wanted = max(float(np.float32(Fraction(amax) / Fraction(form.maximum))), SMALLEST)
    assert float(q.scale) == wanted
    if wanted > SMALLEST:  # the largest element saturates exactly, whatever the scale rounded to
        assert q.data.float().tolist() == [[form.maximum, -form.maximum, 0.0]]


@pytest.mark.parametrize("form", FP8)
def test_a_row_without_values_has_scale_one(form: Format) -> None:
    x = torch.tensor([[0.0, -0.0], [math.nan, math.inf], [math.nan, 0.0], [1.0, 2.0]])
    q = numerics.quantize(x, form, Granularity.ROW)
    assert q.scale is not None
    assert q.scale[:3].flatten().tolist() == [1.0, 1.0, 1.0]
    bytes_ = q.data.view(torch.uint8).tolist()
    minus_zero = 0x80 if form in (Format.E4M3FN, Format.E5M2) else 0
    assert bytes_[:3] == [[0, minus_zero], [form.nan_byte] * 2, [form.nan_byte, 0]]


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("granularity", SCALED)
def test_non_finite_values_become_nan_and_do_not_affect_scales(
    form: Format, granularity: Granularity
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, 140, generator=generator)
    clean = numerics.quantize(x, form, granularity)
    amax_at = int(x.abs().argmax())
    spoiled = x.clone()
    places = [place for place in (0, 141, 9000, 18199) if place != amax_at]
    payload = torch.tensor(-0x00012345, dtype=torch.int32).view(torch.float32)  # a negative NaN
    for place, value in zip(places, itertools.cycle([math.inf, payload, -math.inf, math.nan])):
        spoiled.view(-1)[place] = value
    q = numerics.quantize(spoiled, form, granularity)
    bad = ~torch.isfinite(spoiled)
    assert (q.data.view(torch.uint8)[bad] == form.nan_byte).all()
    if granularity is Granularity.TENSOR:
        assert torch.equal(q.scale, clean.scale)  # type: ignore[arg-type]
        kept = q.data.view(torch.uint8)[~bad]
        assert torch.equal(kept, clean.data.view(torch.uint8)[~bad])
    value = numerics.dequantize(q)
    assert torch.equal(torch.isnan(value), bad)


@pytest.mark.parametrize("form", [Format.E4M3FNUZ, Format.E5M2FNUZ])
def test_fnuz_has_no_negative_zero(form: Format) -> None:
    x = torch.tensor([[1.0, -0.0, -1e-30, -1e-45, -(2.0**-40)]])
    q = numerics.quantize(x, form, Granularity.TENSOR)
    assert q.data.view(torch.uint8)[0, 1:].tolist() == [0, 0, 0, 0]
    assert torch.isfinite(q.data.float()).all()


@given(st.floats(SMALLEST * 500, BIG, width=32), st.sampled_from(FP8))
@settings(fast, max_examples=200)
def test_power_of_two_scales_are_the_next_power_of_two(amax: float, form: Format) -> None:
    x = torch.tensor([[amax, amax / 3]])
    plain = numerics.quantize(x, form, Granularity.TENSOR)
    q = numerics.quantize(x, form, Granularity.TENSOR, power_of_two_scale=True)
    assert plain.scale is not None
    assert q.scale is not None
    mantissa, _ = math.frexp(float(q.scale))
    assert mantissa == 0.5
    assert float(plain.scale) <= float(q.scale) < 2 * float(plain.scale)
    assert float(q.data.float().abs().max()) <= form.maximum


def test_power_of_two_scale_of_a_power_of_two_is_itself() -> None:
    for exponent in (-126, -100, -1, 0, 1, 100):
        x = torch.tensor([[448.0 * 2.0**exponent]])
        q = numerics.quantize(x, Format.E4M3FN, Granularity.ROW, power_of_two_scale=True)
        assert q.scale is not None
        assert float(q.scale) == 2.0**exponent


@pytest.mark.parametrize("granularity", SCALED)
def test_quantize_writes_to_given_outputs(granularity: Granularity) -> None:
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(1))
    wanted = numerics.quantize(x, Format.E4M3FN, granularity)
    frame = torch.zeros(132, 260, dtype=torch.uint8)
    data = frame[1:131].view(torch.float8_e4m3fn)
    scale = granularity.empty_scale(130, 260, x.device).fill_(math.nan)
    q = numerics.quantize(x, Format.E4M3FN, granularity, data=data, scale=scale)
    assert q.data is data
    assert q.scale is scale
    assert torch.equal(frame[1:131], wanted.data.view(torch.uint8))
    assert not frame[[0, 131]].any()
    assert torch.equal(scale, wanted.scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", SCALED)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_inputs_can_be_quantized(granularity: Granularity, shape: tuple[int, int]) -> None:
    q = numerics.quantize(torch.empty(shape), Format.E4M3FN, granularity)
    assert q.data.shape == shape
    assert q.scale is not None
    assert tuple(q.scale.shape) == granularity.scale_shape(*shape)
    assert (q.scale == 1.0).all()
    assert numerics.dequantize(q).shape == shape


def test_quantize_rejects_invalid_arguments() -> None:
    for shape in ((4,), (2, 3, 4)):
        with pytest.raises(ShapeError, match="two dimensions"):
            numerics.quantize(torch.zeros(shape), Format.E4M3FN, Granularity.ROW)
    for form in (Format.BFLOAT16, Format.FLOAT32):
        with pytest.raises(FormatError, match="FP8"):
            numerics.quantize(torch.zeros(2, 2), form, Granularity.ROW)
    with pytest.raises(FormatError, match="none"):
        numerics.quantize(torch.zeros(2, 2), Format.E4M3FN, Granularity.NONE)


# --- dequantize, spread_scale, to_fnuz


@pytest.mark.parametrize("granularity", SCALED)
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (128, 128), (129, 257)])
def test_every_element_gets_its_scale(granularity: Granularity, shape: tuple[int, int]) -> None:
    height, width = granularity.scale_shape(*shape)
    scale = granularity.empty_scale(*shape, torch.device("cpu"))
    scale.copy_(torch.arange(1.0, height * width + 1).view(height, width))
    spread = numerics.spread_scale(scale, granularity, *shape).expand(shape)
    np.testing.assert_array_equal(
        spread.numpy(), scale.float().numpy()[scale_places(granularity, *shape)]
    )


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("granularity", SCALED)
def test_dequantize_multiplies(form: Format, granularity: Granularity) -> None:
    shape = (129, 260)
    rng = np.random.default_rng(3)
    bytes_ = rng.integers(0, 256, shape, dtype=np.uint8)
    scale = granularity.empty_scale(*shape, torch.device("cpu"))
    scale.copy_(torch.from_numpy(np.exp(rng.uniform(-50, 50, tuple(scale.shape)))))
    q = QuantizedTensor(torch.from_numpy(bytes_).view(form.dtype), scale, granularity)
    places = scale_places(granularity, *shape)
    exact = VALUES[form][bytes_] * scale.double().numpy()[places]  # 28 significant bits
    np.testing.assert_array_equal(numerics.dequantize(q, torch.float64).numpy(), exact)
    np.testing.assert_array_equal(numerics.dequantize(q).double().numpy(), nearest_single(exact))
    assert numerics.dequantize(q).dtype == torch.float32
    single = torch.from_numpy(nearest_single(exact)).float()
    narrow = numerics.dequantize(q, torch.bfloat16)
    assert torch.equal(narrow.nan_to_num(), single.bfloat16().nan_to_num())
    turned = QuantizedTensor(q.data, q.scale, granularity, transposed=True)
    np.testing.assert_array_equal(numerics.dequantize(turned, torch.float64).numpy(), exact.T)


@pytest.mark.parametrize(("columns", "padding"), [(512, 0), (513, 3), (385, 0), (128, 3)])
def test_scales_of_blocks_are_filled_only_where_they_have_padding(
    columns: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []

    def zeros(shape: tuple[int, int], **options: Any) -> torch.Tensor:
        filled.append(shape)
        return torch.empty(shape, **options).fill_(0.0)

    monkeypatch.setattr(torch, "zeros", zeros)
    scale = Granularity.BLOCK.empty_scale(256, columns, torch.device("cpu"))
    assert bool(filled) is bool(padding) and Granularity.BLOCK.lays_out(scale)
    assert scale.stride(0) - scale.shape[1] == padding
    whole = scale.as_strided((2, scale.stride(0)), scale.stride())
    assert not whole[:, scale.shape[1] :].any()


def test_dequantize_takes_an_unquantized_prepared_weight() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    plain = QuantizedTensor(weight, None, Granularity.NONE, transposed=True)
    assert numerics.dequantize(plain).tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("form", "twin"), [(Format.E4M3FN, Format.E4M3FNUZ), (Format.E5M2, Format.E5M2FNUZ)]
)
@pytest.mark.parametrize("granularity", [g for g in SCALED if g is not Granularity.MX])
def test_to_fnuz_keeps_every_value(form: Format, twin: Format, granularity: Granularity) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(130, 1)
    scale = granularity.empty_scale(130, 256, torch.device("cpu"))
    scale.copy_(torch.rand(scale.shape, generator=torch.Generator().manual_seed(0)) + SMALLEST)
    q = QuantizedTensor(every.view(form.dtype), scale, granularity, transposed=True)
    before = every.clone(), scale.clone()
    out = numerics.to_fnuz(q)
    assert out.format is twin
    assert out.transposed
    assert out.granularity is granularity
    assert torch.equal(out.scale, scale * 2)  # type: ignore[arg-type]
    assert torch.equal(every, before[0])
    assert torch.equal(scale, before[1])
    old, new = numerics.dequantize(q, torch.float64), numerics.dequantize(out, torch.float64)
    finite = torch.isfinite(old)
    assert torch.equal(old[finite], new[finite])
    assert torch.isnan(new[~finite]).all()
    bits = out.data.view(torch.uint8)
    assert (bits[:, 0x80] == 0).all()
    assert (bits[:, 0x7F] == 0x80).all()
    assert (bits[:, 0xFF] == 0x80).all()
    kept = [byte for byte in range(256) if math.isfinite(VALUES[form][byte]) and byte != 0x80]
    assert torch.equal(bits[:, kept], every[:, kept])


@pytest.mark.parametrize("form", [Format.E4M3FNUZ, Format.E5M2FNUZ])
def test_conversion_back_from_fnuz_raises(form: Format) -> None:
    q = numerics.quantize(torch.ones(2, 2), form, Granularity.ROW)
    with pytest.raises(FormatError, match="refused"):
        numerics.to_fnuz(q)


def test_to_fnuz_rejects_mx_scales() -> None:
    q = numerics.quantize(torch.ones(2, 64), Format.E4M3FN, Granularity.MX)
    with pytest.raises(FormatError, match="1x32"):
        numerics.to_fnuz(q)


def test_to_fnuz_rejects_unquantized_tensors() -> None:
    plain = QuantizedTensor(torch.ones(2, 2).bfloat16(), None, Granularity.NONE)
    with pytest.raises(FormatError, match="bfloat16"):
        numerics.to_fnuz(plain)


# --- measure_errors


def expected_errors(out: Array, ref: Array) -> dict[str, float]:
    """Every estimate by its formula; both arguments finite, the reference not all zero."""
    difference = out - ref
    size = np.linalg.norm(ref, axis=1)
    error = np.linalg.norm(difference, axis=1)
    rows = np.where(size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, 1.0, 0.0))
    rms = math.sqrt((ref**2).mean())
    counted = np.abs(ref) > 1e-6 * rms
    whole = math.sqrt((difference**2).sum() / (ref**2).sum())
    return {
        "row_err": math.sqrt((np.minimum(rows, 1) ** 2).mean()),
        "row_p50": float(np.quantile(rows, 0.5, method="higher")),
        "row_p99": float(np.quantile(rows, 0.99, method="inverted_cdf")),
        "row_max": float(rows.max()),
        "rel_err": whole,
        "sqnr_db": 10 * math.log10((ref**2).sum() / (difference**2).sum()) if whole else math.inf,
        "mean_rel_err": float((np.abs(difference)[counted] / np.abs(ref)[counted]).mean()),
        "mean_rel_err_excluded_share": 1 - counted.mean(),
        "mean_shift": abs(difference.mean()) / rms,
    }


UPPERS = tuple(f.name.removesuffix("_upper") for f in fields(Errors) if f.name.endswith("_upper"))


def assert_no_nan(found: Errors) -> None:
    assert not any(math.isnan(value) for value in astuple(found)), found
    for name in UPPERS:
        assert getattr(found, f"{name}_upper") >= getattr(found, name) * (1 - 1e-12), name


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 40),
    noise=st.sampled_from([0.0, 1e-9, 0.03, 0.7, 5.0]),
    spread=st.sampled_from([0.0, 3.0, 10.0]),
    level=st.sampled_from([1e-75, 1e-6, 1.0, 1e30]),
    seed=st.integers(0, 2**32),
)
@settings(fast, max_examples=150)
@example(rows=200, columns=16, noise=0.03, spread=3.0, level=1.0, seed=0)
@example(rows=4, columns=4, noise=0.7, spread=10.0, level=1e-6, seed=52318)
def test_metrics_are_their_formulas(
    rows: int, columns: int, noise: float, spread: float, level: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ref = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-spread, spread, (rows, 1)))
    ref = np.where(rng.random(ref.shape) < 0.1, ref * 1e-8, ref) * level
    ref[rng.random(rows) < 0.1] = 0.0
    ref[0] = level
    out = ref * (1 + noise * rng.standard_normal(ref.shape)) + 0.1 * noise * level
    out[rng.random(rows) < 0.3] = 0.0
    found = measure_errors(torch.from_numpy(out), torch.from_numpy(ref))
    assert_no_nan(found)
    for name, value in expected_errors(out, ref).items():
        # Near 0 dB a last place of the ratio is 1e-15 dB, whatever the value.
        smallest = 1e-12 if name == "sqnr_db" else 1e-15
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=smallest), name
    assert found.nonfinite_count == found.nonfinite_unexpected_count == 0


def test_metrics_of_a_manually_computed_case() -> None:
    ref = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    out = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 9.0], [-4.0, 0.0]], dtype=torch.float64)
    found = measure_errors(out, ref)  # rows: 0.1; 0 of 0; a value where 0 was; 5 counts as 1
    assert numerics.row_errors(out, ref).tolist() == pytest.approx([0.1, 0.0, 1.0, 5.0])
    assert found.row_err == pytest.approx(math.sqrt((0.01 + 0 + 1 + 1) / 4))
    assert (found.row_p50, found.row_p99, found.row_max) == pytest.approx((1.0, 5.0, 5.0))
    assert found.rel_err == pytest.approx(math.sqrt((0.25 + 81 + 25) / 26))
    assert found.sqnr_db == pytest.approx(-20 * math.log10(found.rel_err))
    assert found.mean_rel_err == pytest.approx((0.0 + 0.125 + 5.0) / 3)
    assert found.mean_rel_err_excluded_share == pytest.approx(5 / 8)
    assert found.mean_shift == pytest.approx(4.5 / 8 / math.sqrt(26 / 8))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_output_has_an_infinite_error(value: float) -> None:
    ref = torch.randn(256, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = ref.clone()
    out[17, 3] = value
    found = measure_errors(out, ref)
    assert_no_nan(found)
    assert found.nonfinite_count == found.nonfinite_unexpected_count == 1
    assert found.row_err == pytest.approx(math.sqrt(1 / 256))
    assert found.row_p50 == 0.0
    for name in ("row_max", "rel_err", "mean_rel_err", "mean_shift", "row_p99_upper",
                 "rel_err_upper", "mean_rel_err_upper", "mean_shift_upper"):  # fmt: skip
        assert getattr(found, name) == math.inf, name
    assert found.sqnr_db == -math.inf


def test_a_non_finite_output_is_correct_for_a_non_finite_reference() -> None:
    ref = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = ref * 1.01
    ref[5, 5] = ref[6, 0] = math.nan
    ref[9] = math.inf
    found = measure_errors(torch.where(torch.isfinite(ref), out, math.nan), ref)
    assert_no_nan(found)
    assert (found.nonfinite_count, found.nonfinite_unexpected_count) == (10, 0)
    assert found.rel_err == pytest.approx(0.01)
    assert found.row_max == pytest.approx(0.01)


def test_an_output_for_a_zero_reference() -> None:
    ref = torch.zeros(8, 4, dtype=torch.float64)
    right = measure_errors(torch.zeros(8, 4), ref)
    assert_no_nan(right)
    assert (right.row_err, right.row_max, right.rel_err, right.mean_shift) == (0, 0, 0, 0)
    assert right.sqnr_db == math.inf
    out = torch.zeros(8, 4)
    out[2, 1] = 1e-30
    wrong = measure_errors(out, ref)
    assert_no_nan(wrong)
    assert wrong.row_err == pytest.approx(math.sqrt(1 / 8))
    assert (wrong.row_max, wrong.rel_err, wrong.sqnr_db) == (1.0, 1.0, -math.inf)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_outputs_have_no_error(shape: tuple[int, int]) -> None:
    found = measure_errors(torch.empty(shape), torch.empty(shape, dtype=torch.float64))
    assert_no_nan(found)
    assert (found.row_err, found.rel_err, found.sqnr_db) == (0.0, 0.0, math.inf)


def test_measure_errors_rejects_other_shapes() -> None:
    with pytest.raises(ShapeError, match="must be equal"):
        measure_errors(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.float64))


wide = st.floats(1e-90, 1e38) | st.floats(-1e38, -1e-90) | st.sampled_from([0.0, 1.0, -1.0])


@given(
    st.lists(st.tuples(wide, wide | st.sampled_from([math.nan, math.inf])), min_size=1),
    st.integers(1, 3),
)
@settings(fast, max_examples=300)
@example([(1e-90, 1e38), (1e-90, 1e-90)], 1)
def test_metrics_are_never_nan(pairs: list[tuple[float, float]], columns: int) -> None:
    pairs = (pairs * columns)[: len(pairs) // columns * columns] or pairs * columns
    ref, out = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    assert_no_nan(measure_errors(out.view(-1, columns), ref.view(-1, columns)))


def test_upper_limits_cover_the_truth_95_times_in_100() -> None:
    rng = np.random.default_rng(11)
    population, rows, repetitions = 40_000, 1024, 300
    # Away from zero: |d| / |ref| has no variance where ref may be anything.
    ref = rng.choice([-1.0, 1.0], (population, 4)) * (0.5 + rng.random((population, 4)))
    share = 0.02 * np.exp(0.5 * rng.standard_normal((population, 1)))
    out = ref + share * np.linalg.norm(ref, axis=1, keepdims=True) * (
        0.2 + rng.standard_normal((population, 4))
    )
    truth = measure_errors(torch.from_numpy(out), torch.from_numpy(ref))
    covered = dict.fromkeys(UPPERS, 0)
    for _ in range(repetitions):
        drawn = rng.integers(0, population, rows)
        found = measure_errors(torch.from_numpy(out[drawn]), torch.from_numpy(ref[drawn]))
        for name in UPPERS:
            covered[name] += getattr(found, f"{name}_upper") >= getattr(truth, name)
            assert getattr(found, f"{name}_upper") >= getattr(found, name)
    # 300 draws of probability 0.95 have a standard deviation of 0.0126: four of them each way.
    for name, count in covered.items():
        assert 0.90 <= count / repetitions <= 0.997, (name, count)


def test_rows_with_equal_errors_have_tight_limits() -> None:
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(300, 8, dtype=torch.float64, generator=generator)
    ref *= torch.logspace(-3, 3, 300, dtype=torch.float64)[:, None]
    found = measure_errors(ref * 1.01, ref)
    for name in ("row_err", "row_p99", "rel_err", "mean_rel_err"):
        assert getattr(found, name) == pytest.approx(0.01)
        assert getattr(found, f"{name}_upper") == pytest.approx(0.01)


# --- kernel_error


def product(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A right output, with its exact value and the product of magnitudes."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(500, 64, dtype=torch.float64, generator=generator)
    b = torch.randn(64, 48, dtype=torch.float64, generator=generator)
    exact = a @ b
    return exact.to(dtype), exact, a.abs() @ b.abs()


@pytest.mark.parametrize("form", [Format.BFLOAT16, Format.FLOAT32])
def test_exact_rounding_passes(form: Format) -> None:
    out, exact, magnitude = product(form.dtype)
    found = kernel_error(out, exact, magnitude, form.unit_roundoff)
    assert 0 < found.row_p99 <= found.maximum <= 1
    tight = kernel_error(out, exact, torch.zeros_like(exact), form.unit_roundoff)
    assert tight.maximum <= 1


@pytest.mark.parametrize("level", [1e-40, 1e-38, 1e-30])
def test_exact_rounding_of_subnormal_outputs_passes(level: float) -> None:
    _, exact, magnitude = product()
    exact, magnitude = exact * level, magnitude * level
    for form in (Format.BFLOAT16, Format.FLOAT32):
        out = exact.to(form.dtype)
        found = kernel_error(out, exact, torch.zeros_like(exact), form.unit_roundoff)
        assert found.maximum <= 1, form


def test_the_allowance_is_the_formula() -> None:
    out, exact, magnitude = product()
    ratio = (out.double() - exact).abs() / (2.0**-8 * exact.abs() + 2.0**-13 * magnitude)
    found = kernel_error(out, exact, magnitude, 2.0**-8)
    assert found.maximum == pytest.approx(float(ratio.max()), rel=1e-6)
    rows = np.quantile(ratio.amax(dim=1).numpy(), 0.99, method="inverted_cdf")
    assert found.row_p99 == pytest.approx(float(rows), rel=1e-6)


@pytest.mark.parametrize("place", [(0, 0), (123, 7), (499, 47)])
def test_one_incorrect_element_fails(place: tuple[int, int]) -> None:
    out, exact, magnitude = product(torch.float32)
    allowed = 2.0**-24 * exact.abs() + 2.0**-13 * magnitude
    for sign in (1, -1):
        wrong = out.clone()
        wrong[place] += sign * 1.5 * float(allowed[place])
        found = kernel_error(wrong, exact, magnitude, 2.0**-24)
        assert found.maximum == pytest.approx(1.5, abs=0.01)
        assert found.row_p99 < 1  # the other rows are right


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_element_that_was_not_written_fails(value: float) -> None:
    out, exact, magnitude = product()
    out[499, 0] = value
    found = kernel_error(out, exact, magnitude, 2.0**-8)
    assert found.maximum == math.inf
    assert math.isfinite(found.row_p99)


def test_swapped_rows_fail() -> None:
    out, exact, magnitude = product()
    out[[3, 4]] = out[[4, 3]]
    assert kernel_error(out, exact, magnitude, 2.0**-8).maximum > 10


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_must_stay_non_finite(value: float) -> None:
    out, exact, magnitude = product()
    exact[7, 7] = magnitude[7, 7] = value
    assert kernel_error(out, exact, magnitude, 2.0**-8).maximum == math.inf
    out[7, 7] = math.nan
    assert kernel_error(out, exact, magnitude, 2.0**-8).maximum <= 1


@pytest.mark.parametrize("form", [Format.BFLOAT16, Format.FLOAT32])
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_to_infinity_is_correct_beyond_the_largest_finite_value(
    form: Format, sign: int
) -> None:
    largest = form.maximum
    past = sign * largest * (1 + 2.5 * form.unit_roundoff)
    exact = torch.tensor([[past, 1.0]], dtype=torch.float64)
    right = exact.to(form.dtype)
    assert torch.isinf(right[0, 0])
    assert kernel_error(right, exact, exact.abs(), form.unit_roundoff).maximum == 0.0
    other_sign = torch.tensor([[-sign * math.inf, 1.0]], dtype=form.dtype)
    assert kernel_error(other_sign, exact, exact.abs(), form.unit_roundoff).maximum == math.inf
    nan = torch.tensor([[math.nan, 1.0]], dtype=form.dtype)
    assert kernel_error(nan, exact, exact.abs(), form.unit_roundoff).maximum == math.inf
    infinite = torch.tensor([[sign * math.inf, 1.0]], dtype=form.dtype)
    for share in (0.5, 1.0):  # which do not round past the largest
        within = torch.tensor([[sign * largest * share, 1.0]], dtype=torch.float64)
        found = kernel_error(infinite, within, torch.zeros_like(within), form.unit_roundoff)
        assert found.maximum == math.inf
    # A sum within the allowance of such a value may have rounded past it.
    near = torch.tensor([[sign * largest * (1 - 2.0**-10), 1.0]], dtype=torch.float64)
    assert kernel_error(infinite, near, near.abs() * 100, form.unit_roundoff).maximum == 0.0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_outputs_are_correct(shape: tuple[int, int]) -> None:
    nothing = torch.empty(shape, dtype=torch.float64)
    found = kernel_error(nothing.bfloat16(), nothing, nothing, 2.0**-8)
    assert (found.maximum, found.row_p99) == (0.0, 0.0)


# --- shares


def test_flushed_and_saturated_shares() -> None:
    x = torch.tensor([[448.0, -448.0, 1e-9, 0.0], [448.0, 2.0, -1e-9, 1e-9]])
    q = numerics.quantize(x, Format.E4M3FN, Granularity.TENSOR)
    assert numerics.flushed_and_saturated_shares(x, q) == (3 / 8, 3 / 8)
    empty = numerics.quantize(torch.empty(0, 4), Format.E4M3FN, Granularity.TENSOR)
    assert numerics.flushed_and_saturated_shares(torch.empty(0, 4), empty) == (0.0, 0.0)
