"""Normalizations: against torch, their bounds, and moments that are merged."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern import numerics
from lokakern.errors import ShapeError, UnknownNameError
from lokakern.norm import (
    KINDS,
    Norm,
    largest,
    merged,
    moments,
    norm_named,
    normalize,
    static_scale,
)
from lokakern.types import Format, Granularity

NORMS = ["layer", "rms", "block_rms(64)", "block_rms(256)"]
DRAWS = st.integers(0, 2**31)


def drawn(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows of every size, with a common mean and outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-12, 12, rows, dtype=torch.float64).unsqueeze(1)
    x[::3] += 100 * x[::3].abs().amax(1, keepdim=True)
    x[1::3, ::7] *= 1e4
    return x.to(dtype)


def test_layer_and_rms_norm_equal_torch() -> None:
    x = drawn(30, 256, 1)
    weight, bias = torch.randn(2, 256, dtype=torch.float64)
    expected = torch.nn.functional.layer_norm(x, (256,), weight, bias, 1e-3)
    torch.testing.assert_close(normalize(x, Norm("layer", 0, 1e-3), weight, bias), expected)
    expected = torch.nn.functional.rms_norm(x, (256,), weight, 1e-3)
    torch.testing.assert_close(normalize(x, Norm("rms", 0, 1e-3), weight), expected)


def test_blocks_are_normalized_separately() -> None:
    x = drawn(5, 512, 2)
    found = normalize(x, norm_named("block_rms(128)"))
    for first in range(0, 512, 128):
        block = slice(first, first + 128)
        torch.testing.assert_close(found[:, block], normalize(x[:, block], Norm("rms")))
    assert torch.equal(normalize(x, Norm("none")), x)


@pytest.mark.parametrize("name", NORMS)
def test_non_finite_values_stay_in_their_block_and_zeros_stay_zeros(name: str) -> None:
    norm = norm_named(name)
    x = drawn(4, 512, 3)
    x[0] = 0.0
    x[1, 300] = math.nan
    x[2, 300] = math.inf
    z = normalize(x, norm)
    assert (z[0] == 0).all() and z[3].isfinite().all()
    span = norm.span(512)
    touched = slice(300 // span * span, 300 // span * span + span)
    for row in (1, 2):
        assert z[row, 300].isnan()
        outside = torch.ones(512, dtype=torch.bool)
        outside[touched] = False
        assert z[row, outside].isfinite().all()


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(NORMS), seed=DRAWS, single=st.booleans())
def test_outputs_stay_within_their_bound(name: str, seed: int, single: bool) -> None:
    """In float32 as well, but for the rounding of a mean of 256 squares or 512."""
    norm = norm_named(name, 0.0)
    dtype = torch.float32 if single else torch.float64
    x = drawn(24, 512, seed, dtype)
    x = torch.cat([x, torch.eye(512, dtype=dtype)[:8] * 3e4])  # one value: the worst row
    z = normalize(x, norm)
    slack = 1e-5 if single else 1e-12
    assert z[z.isfinite()].abs().max() <= largest(norm, 512) * (1 + slack)
    worst = z[-8:].nan_to_num().abs().amax(1)
    torch.testing.assert_close(worst, torch.full_like(worst, largest(norm, 512)))


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(NORMS), seed=DRAWS)
def test_nothing_saturates_with_the_bound_of_the_norm_as_scale(name: str, seed: int) -> None:
    norm = norm_named(name)
    weight, bias = torch.randn(2, 512, generator=torch.Generator().manual_seed(seed))
    scale = static_scale(norm, 512, Format.E4M3FN, weight, bias)
    x = torch.cat([drawn(24, 512, seed), torch.eye(512, dtype=torch.float64)[:64] * 1e6])
    z = normalize(x, norm, weight, bias)
    assert z.abs().max() <= scale * Format.E4M3FN.maximum
    for f in (torch.relu, torch.nn.functional.hardswish, torch.nn.functional.silu):
        assert f(z).abs().max() <= scale * Format.E4M3FN.maximum
    given_scale = torch.full((1, 1), scale)
    quantized, amax = numerics.quantize_static(
        z.float(), Format.E4M3FN, Granularity.TENSOR, given_scale
    )
    assert amax <= scale * Format.E4M3FN.maximum
    assert quantized.data.float().abs().max() <= Format.E4M3FN.maximum


def test_a_static_scale_of_an_empty_output() -> None:
    assert static_scale(Norm("rms"), 256, Format.E4M3FN) == 16 / 448
    assert static_scale(Norm("layer"), 1, Format.E4M3FN) == 1.0  # all outputs are 0
    with pytest.raises(UnknownNameError, match="bounds nothing"):
        static_scale(Norm("none"), 256, Format.E4M3FN)


@settings(deadline=None, max_examples=60)
@given(seed=DRAWS, cuts=st.lists(st.integers(1, 511), min_size=1, max_size=6, unique=True))
def test_merged_moments_equal_the_moments_of_the_whole_row(seed: int, cuts: list[int]) -> None:
    """The mean is 1000 times the deviation in float32, where sums of squares lose 6 digits."""
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)) + 1000
    ends = [0, *sorted(cuts), 512]
    parts = [moments(x[:, a:b]) for a, b in itertools.pairwise(ends)]
    found = functools.reduce(merged, parts)
    exact = moments(x.double())
    assert found.number == 512
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.squares.double(), exact.squares, rtol=1e-4, atol=0)
    by_squares = x.square().sum(1) - x.sum(1).square() / 512
    worst = ((by_squares.double() - exact.squares) / exact.squares).abs().max()
    assert worst > 1e-3  # what `merged` is for


def test_invalid_names_raise_with_a_reason() -> None:
    assert [str(norm_named(name)) for name in NORMS] == NORMS
    assert str(norm_named("none")) == "none" and set(KINDS) >= {"none", "layer"}
    for name in ("batch", "block_rms", "block_rms(0)", "block_rms(-4)", "block_rms(1e3)", ""):
        with pytest.raises(UnknownNameError, match="expected layer, rms"):
            norm_named(name)
    for eps in (-1.0, math.nan, math.inf, "x"):
        with pytest.raises(UnknownNameError, match="eps"):
            norm_named("rms", eps)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="divide"):
        normalize(torch.ones(2, 100), norm_named("block_rms(64)"))


def test_an_infinite_value_makes_its_row_nan() -> None:
    y = torch.ones(2, 8, dtype=torch.float64)
    y[0, 3] = math.inf
    rms = normalize(y, norm_named("rms"))
    assert rms[0, 3].isnan() and (rms[0, [0, 1, 2, 4, 5, 6, 7]] == 0).all()
    assert rms[1].isfinite().all()
    layer = normalize(y, norm_named("layer"))
    assert layer[0].isnan().all() and layer[1].isfinite().all()
    blocks = normalize(y, norm_named("block_rms(4)"))
    assert blocks[0, 3].isnan() and (blocks[0, 4:] == blocks[1, 4:]).all()
