"""Casts to formats that no kernel has: against float64, and against bits of torchao."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lokakern.types import Format, Granularity
from lokakern.what_if import formats
from lokakern.what_if.formats import FORMATS, Emulated
from lokakern.workloads.distributions import DISTRIBUTIONS, draw_rows
from tests.support import torchao_casts

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code
E4M3 = [  # from 2^-6, by code
    (1 + mantissa / 8) * 2.0**exponent
    for exponent in range(-6, 9)
    for mantissa in range(8)
    if (exponent, mantissa) != (8, 7)
]


def rows_of(name: str, k: int = 160) -> Tensor:
    """Rows in bfloat16, one of zeros, and one of magnitudes far apart; k is no multiple of 128."""
    x = draw_rows(DISTRIBUTIONS[name], 48, k, 0).bfloat16()
    x[3], x[5, 7:90] = 0, x[5, 7:90] * 1e-3
    return x


def nearest(x: Fraction, codes: list[float]) -> float:
    """The nearest number, ties to the even code, saturating."""
    size = abs(x)
    place = min(range(len(codes)), key=lambda c: (abs(Fraction(codes[c]) - size), c % 2))
    return math.copysign(codes[place], x)


def exactly(codes: list[float], ratios: Tensor) -> Tensor:
    """`nearest` of each."""
    found = [nearest(Fraction(float(r)), codes) for r in ratios.flatten()]
    return torch.tensor(found, dtype=torch.float64).view(ratios.shape)


def test_e2m1_is_the_nearest_of_eight_numbers_and_ties_are_even() -> None:
    x = torch.cat([torch.linspace(-7, 7, 15 * 32 + 1), torch.tensor([0.25, 0.75, 1.25, 2.5, 5.0])])
    found = formats.round_e2m1(x)
    assert torch.equal(found.double(), exactly(E2M1, x))
    assert math.copysign(1, formats.round_e2m1(torch.tensor(-0.1))) == -1


@pytest.mark.parametrize("name", ["X2", "X6", "X12", "X14"])
def test_mxfp4_scales_are_the_least_powers_under_which_nothing_saturates(name: str) -> None:
    x = rows_of(name)
    found = formats.mxfp4(x)
    for row, group in ((0, 0), (5, 1), (7, 4), (47, 4)):
        columns = slice(32 * group, 32 * group + 32)
        part = x[row, columns].double()
        least = math.ceil(math.log2(float(part.abs().max()) / 6)) if part.any() else -126
        scale = 2.0 ** max(least, -126)
        assert float(found.scale[row, group]) == scale
        elements = exactly(E2M1, part / scale)
        assert torch.equal(found.elements[row, columns].double(), elements)
        assert torch.equal(found.value[row, columns].double(), elements * scale)
    assert not found.value[3].any()


@pytest.mark.parametrize("name", ["X2", "X6", "X12", "X14"])
def test_nvfp4_has_a_scale_of_e4m3_in_units_of_the_whole_tensor(name: str) -> None:
    x = rows_of(name)
    found = formats.nvfp4(x)
    whole = x.abs().max().double() / (448 * 6)
    for row, group in ((0, 0), (5, 1), (7, 9), (47, 4)):
        columns = slice(16 * group, 16 * group + 16)
        part = x[row, columns].double()
        scale = exactly(E4M3, (part.abs().max() / 6 / whole).float())
        assert torch.equal(found.scale[row, group].double(), scale)
        elements = exactly(E2M1, part / (scale * whole))
        assert torch.equal(found.elements[row, columns].double(), elements)
        assert torch.allclose(found.value[row, columns].double(), elements * scale * whole, 1e-6, 0)
    assert not formats.nvfp4(torch.zeros(2, 16)).value.any()


@pytest.mark.parametrize("name", ["X2", "X7", "X14"])
def test_int8_is_within_half_a_step_of_a_255th_of_the_range(name: str) -> None:
    x = rows_of(name)
    found = formats.int8(x)
    assert ((found.elements == found.elements.round()) & (found.elements.abs() <= 128)).all()
    step = x.abs().amax(dim=1, keepdim=True).double() / 127.5
    assert torch.allclose(found.scale.double(), step.clamp_min(2.0**-23), rtol=2.0**-8, atol=0)
    # The scale is rounded to bfloat16, and so may the largest element saturate.
    error = (found.value.double() - x.double()).abs()
    assert (error <= found.scale * 0.5 + x.double().abs() * 2.0**-7).all()


@pytest.mark.parametrize("name", ["X2", "X7", "X14"])
def test_int4_covers_a_group_from_its_least_to_its_largest_element(name: str) -> None:
    x = rows_of(name)
    x[7] = 1 + x[7].abs() / x[7].abs().max() / 30  # a group need not contain 0
    found = formats.int4(x)
    assert ((found.elements >= 0) & (found.elements <= 15)).all()
    for columns in (slice(0, 128), slice(128, 160)):
        part = x[:, columns].double()
        least, most = part.amin(dim=1, keepdim=True), part.amax(dim=1, keepdim=True)
        step = (most - least) / 15
        # bfloat16 rounds the scale, the middle and the value to 2^-9 of themselves.
        slack = 2.0**-6 * torch.maximum(least.abs(), most.abs())
        error = (found.value[:, columns].double() - part).abs()
        assert (error <= step / 2 + slack).all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_columns_beyond_whole_groups_are_cast_as_those_within(form: formats.WhatIf) -> None:
    x = rows_of("X2", 160)
    found = form.quantized_as("w", x)
    assert found.data.shape == x.shape
    assert torch.isfinite(found.data).all()
    longer = torch.nn.functional.pad(x, (0, 96))
    if form.name != "int4-weight":  # whose groups need not contain 0
        assert torch.equal(form.quantized_as("w", longer).data[:, :160], found.data)


def test_formats_of_the_weight_leave_activations_as_they_are() -> None:
    x = rows_of("X2")
    for form in FORMATS.values():
        assert torch.equal(form.quantized_as("x", x).data, x) == form.weight_only


# --- torchao


@pytest.mark.parametrize("spread", torchao_casts.SPREADS)
@pytest.mark.parametrize("form", torchao_casts.THEIRS)
def test_elements_and_scales_have_the_bits_of_torchao(form: str, spread: int) -> None:
    """As recorded by `python -m tests.support.torchao_casts`, which needs torchao."""
    recorded = json.loads(torchao_casts.BITS.read_text())
    ours: Emulated = FORMATS[form].cast(torchao_casts.rows_of(spread))
    value = ours.value if form == "int4-weight" else None
    found = torchao_casts.digest_of(form, ours.scale, ours.elements, value)
    assert found == recorded[form][str(spread)]


def test_fp8_is_what_kernels_make() -> None:
    from lokakern import numerics

    x = rows_of("X14")
    for name, granularity in (("fp8-row", Granularity.ROW), ("mxfp8", Granularity.MX)):
        exact = numerics.dequantize(numerics.quantize(x, Format.E4M3FN, granularity))
        assert torch.equal(FORMATS[name].quantized_as("x", x).data, exact)
