"""What the smallest steps of a static scale add to errors, compared with rounding itself."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from lokakern.conversion.static_rounding import added_error
from lokakern.norm import norm_named, static_scale
from lokakern.types import Format

COLUMNS = 512
LAYER = norm_named("layer")
FUNCTIONS = {
    "none": nn.Identity(), "relu": nn.ReLU(), "hardswish": nn.Hardswish(), "silu": nn.SiLU(),
    "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"),
}  # fmt: skip
RELATIVE = 0.0265  # of E4M3 with a step that does not matter: the root mean square over columns


def weight_of(spread: float) -> Tensor:
    """Magnitudes from 1 down to 1 / spread, evenly in their logarithms."""
    return torch.logspace(0, -math.log10(spread), COLUMNS, dtype=torch.float64)


@functools.cache
def drawn() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4_000, COLUMNS, dtype=torch.float64, generator=generator)


def measured(activation: str, weight: Tensor, bias: Tensor | None, scale: float) -> float:
    """The error of each column relative to its size, of normal rows; the root mean square."""
    z = drawn() * weight
    y = FUNCTIONS[activation](z if bias is None else z + bias)
    rounded = (y / scale).float().to(torch.float8_e4m3fn).double() * scale
    errors, sizes = (rounded - y).square().mean(0), y.square().mean(0)
    return (errors / sizes).mean().sqrt().item()


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e3, 1e4, 1e5])
def test_what_is_added_bounds_the_error(activation: str, is_shifted: bool, spread: float) -> None:
    weight = weight_of(spread)
    bias = 0.5 * weight.flip(0) if is_shifted else None
    scale = static_scale(LAYER, COLUMNS, Format.E4M3FN, weight, bias)
    added = added_error(LAYER, COLUMNS, activation, weight, bias)
    found = measured(activation, weight, bias, scale)
    # Values of hardswish and silu near zero are many, and relative errors of FP8 differ there.
    assert found <= math.hypot(RELATIVE, added) * 1.1 + 1e-4
    if added > 0.05:
        assert found > added / 3, "the bound is near"


def test_equal_weights_add_next_to_nothing() -> None:
    ones, zeros = torch.ones(4096), torch.zeros(4096)
    for activation in FUNCTIONS:
        assert added_error(LAYER, 4096, activation, ones, zeros) <= 2e-4
        assert added_error(LAYER, 4096, activation, None, None) <= 2e-4


def test_one_large_weight_adds_to_the_error_of_all_others() -> None:
    weight = torch.ones(1024)
    found = []
    for factor in (1.0, 10.0, 1e3, 1e4):
        weight[7] = factor
        found.append(added_error(LAYER, 1024, "relu", weight, None))
    assert found == sorted(found) and found[0] <= 1e-4 < 0.01 < found[2] < 0.06 < 0.3 < found[3]


def test_a_column_that_a_relu_makes_small_counts() -> None:
    weight, bias = torch.ones(1024), torch.zeros(1024)
    bias[:512] = -4.0
    without = added_error(LAYER, 1024, "none", weight, bias)
    assert without < 2e-4 < 1e-3 < added_error(LAYER, 1024, "relu", weight, bias)


def test_columns_of_zeros_have_no_error() -> None:
    weight = torch.ones(64)
    weight[:32] = 0
    assert added_error(LAYER, 64, "relu", weight, None) <= 1e-4
    assert added_error(LAYER, 64, "relu", 0 * weight, 0 * weight) == 0.0


@pytest.mark.parametrize("spread", [1.0, 7.0, 40.0, 1e3])
def test_errors_are_rounded_up(spread: float) -> None:
    found = added_error(LAYER, COLUMNS, "silu", weight_of(spread), None)
    assert found > 0 and round(found * 1e4, 6) == round(found * 1e4)


def test_nothing_is_known_without_values_or_bound() -> None:
    ones = torch.ones(64)
    assert added_error(LAYER, 64, "relu", ones.to("meta"), None) == math.inf
    assert added_error(norm_named("none"), 64, "relu", ones, None) == math.inf
    assert added_error(LAYER, 64, "cross", ones, None) == math.inf
    assert added_error(LAYER, 64, "relu", ones * math.nan, None) == math.inf
    assert added_error(LAYER, 64, "relu", ones * math.inf, None) == math.inf
