"""Errors of normalized outputs: what passes, and that one wrong element or scale does not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern import numerics
from lokakern.measure.norm_errors import norm_kernel_error, scale_errors
from lokakern.norm import norm_named
from lokakern.registry import ops
from lokakern.types import Format, Granularity, NormEpilogue, QuantizedTensor

E4M3 = Format.E4M3FN
DYNAMIC = [Granularity.ROW, Granularity.GROUP]


def outputs(
    m: int = 20, n: int = 200, norm: str = "layer", seed: int = 0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, 64, generator=generator, dtype=torch.float64)
    b = torch.randn(64, n, generator=generator, dtype=torch.float64)
    return ops.normalized(*ops.norm_sums(a, b), NormEpilogue(norm_named(norm)))


def error_of(
    out: QuantizedTensor | torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor
) -> float:
    form = Format.of(out.dtype) if isinstance(out, torch.Tensor) else out.format
    return norm_kernel_error(out, exact, magnitude, form.unit_roundoff).maximum


@pytest.mark.parametrize("granularity", DYNAMIC, ids=str)
@pytest.mark.parametrize("form", [E4M3, Format.E5M2, Format.E4M3FNUZ], ids=str)
def test_exact_quantizing_passes(granularity: Granularity, form: Format) -> None:
    exact, magnitude = outputs()
    exact[3] = 0.0
    exact[4] *= 1e-30
    exact[5] *= 1e-38
    exact[6, 9] = math.nan
    exact[7] = math.nan
    out = numerics.quantize(exact.float(), form, granularity)
    assert error_of(out, exact, magnitude) <= 1
    assert float(scale_errors(out, exact, magnitude).max()) <= 1
    assert error_of(exact.bfloat16(), exact, magnitude) <= 1


def test_infinity_with_a_static_scale_saturates_or_becomes_nan() -> None:
    exact, magnitude = outputs()
    exact[2, 5] = -math.inf
    scale = torch.full((1, 1), 0.05)
    out, _ = numerics.quantize_static(exact.float(), E4M3, Granularity.TENSOR, scale)
    for byte, passes in ((0xFE, True), (0x7F, True), (0xFF, True), (0x7E, False), (0, False)):
        out.data.view(torch.uint8)[2, 5] = byte
        assert (error_of(out, exact, magnitude) <= 1) is passes, hex(byte)
    out.data.view(torch.uint8)[2, 5] = 0xFE
    out.data.view(torch.uint8)[2, 6] = 0x7F  # NaN where the output is finite
    assert error_of(out, exact, magnitude) == math.inf


@settings(deadline=None, max_examples=60)
@given(
    granularity=st.sampled_from(DYNAMIC), seed=st.integers(0, 2**31), row=st.integers(0, 19),
    column=st.integers(0, 199),
)  # fmt: skip
def test_one_incorrect_element_fails(
    granularity: Granularity, seed: int, row: int, column: int
) -> None:
    exact, magnitude = outputs(seed=seed)
    out = numerics.quantize(exact.float(), E4M3, granularity)
    bits = out.data.view(torch.uint8)
    before = int(bits[row, column])
    bits[row, column] = before ^ 0x80 if (before & 0x7F) > 0x40 else 0x7C
    assert error_of(out, exact, magnitude) > 4
    bits[row, column] = 0x7F
    assert error_of(out, exact, magnitude) == math.inf


@pytest.mark.parametrize("granularity", DYNAMIC, ids=str)
@pytest.mark.parametrize("factor", [0.9, 1.02, 1.25, 2.0])
def test_one_incorrect_scale_fails(granularity: Granularity, factor: float) -> None:
    """Even where the data make up for it."""
    exact, magnitude = outputs(norm="rms")
    out = numerics.quantize(exact.float(), E4M3, granularity)
    assert out.scale is not None
    out.scale[11, -1] *= factor
    ratio = exact.float() / numerics.spread_scale(out.scale, granularity, *exact.shape)
    numerics.cast(ratio, out.data)
    assert error_of(out, exact, magnitude) > 4
    assert float(scale_errors(out, exact, magnitude).max()) > 4


def test_the_scale_of_zeros_may_be_one_or_that_of_rounding_errors() -> None:
    exact, magnitude = outputs()
    exact[2] = -1e-9
    positive = torch.relu(exact)
    out = numerics.quantize(positive.float(), E4M3, Granularity.ROW)
    assert out.scale is not None and out.scale[2] == 1
    assert error_of(out, positive, magnitude) <= 1
    out.scale[2] = 2.0**-126
    assert error_of(out, positive, magnitude) <= 1
    out.scale[2] = 2.0
    assert error_of(out, positive, magnitude) > 4
    out.scale[2] = math.nan
    assert error_of(out, positive, magnitude) == math.inf


def test_a_static_scale_saturates_and_empty_outputs_have_no_error() -> None:
    exact, magnitude = outputs()
    scale = torch.full((1, 1), 2.0**-9)
    out, _ = numerics.quantize_static(exact.float(), E4M3, Granularity.TENSOR, scale)
    assert out.data.float().abs().max() == 448
    assert error_of(out, exact, magnitude) <= 1
    empty = numerics.quantize(torch.empty(0, 200), E4M3, Granularity.ROW)
    assert error_of(empty, exact[:0], magnitude[:0]) == 0
    assert scale_errors(empty, exact[:0], magnitude[:0]).numel() == 0


@settings(deadline=None, max_examples=80)
@given(
    norm=st.sampled_from(["layer", "rms", "block_rms(50)", "none"]),
    seed=st.integers(0, 2**31), mean=st.sampled_from([0.0, 10.0, 1000.0]),
    last=st.sampled_from(["none", "relu", "hardswish", "silu", "gate", "cross"]),
)  # fmt: skip
def test_errors_of_sums_stay_within_the_magnitude(
    norm: str, seed: int, mean: float, last: str
) -> None:
    """Sums off by as much as 2^-13 of their magnitude, anyhow, give outputs off by as much."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    y = draw(12, 200) * torch.logspace(-3, 3, 12, dtype=torch.float64)[:, None]
    y = y + mean * y.abs().amax(1, keepdim=True)
    magnitude = y.abs() * (1 + draw(12, 200).abs())
    weight, bias = draw(200), draw(200)
    given = {"gate": {"gate": draw(12, 200)}, "cross": {"x0": draw(12, 200), "x": draw(12, 200)}}
    fields = given.get(last, {"activation": last})
    epilogue = NormEpilogue(norm_named(norm), norm_weight=weight, norm_bias=bias, **fields)
    exact, through = ops.normalized(y, magnitude, epilogue)
    off = 2.0**-13 * magnitude * draw(12, 200).sign()
    found = ops.normalized(y + off, magnitude, epilogue)[0]
    # To first order: what is left is of the square of an error of as much as the deviation.
    share = float((2.0**-13 * through / (exact.abs() + through)).max())
    assert ((found - exact).abs() <= 2.0**-13 * through * (1 + 8 * share) + 1e-300).all()
