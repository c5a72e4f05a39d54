"""Recipes of input distributions: their stated properties and known quantization errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lokakern.numerics import Errors, dequantize, measure_errors, quantize
from lokakern.types import REALISTIC_DISTRIBUTIONS, Format, Granularity
from lokakern.workloads import distributions as recipes
from lokakern.workloads.distributions import (
    DISTRIBUTIONS,
    distribution_named,
    draw_rows,
    draw_weight,
)
from tests.support.draws import draw

EVERY = tuple(DISTRIBUTIONS)
SEEDS = (0, 1)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: waiting for a second thread costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(name: str, rows: int = 1024, k: int = 512, seed: int = 0) -> Tensor:
    """x of a distribution by name, ``[rows, k]``."""
    return draw_rows(distribution_named(name), rows, k, seed)


def errors_of(name: str, seed: int, *granularities: Granularity) -> list[Errors]:
    """Emulated E4M3 x E4M3 with bf16 operands and output, at the shape the anchors are for."""
    operands = draw(distribution_named(name), 1024, 512, 512, seed)
    x, w = operands.x.bfloat16(), operands.w.bfloat16()
    reference = x.double() @ w.double().T
    found = []
    for granularity in granularities:
        by_weight = Granularity.BLOCK if granularity is Granularity.GROUP else granularity
        decoded_x = dequantize(quantize(x, Format.E4M3FN, granularity), torch.float64)
        decoded_w = dequantize(quantize(w, Format.E4M3FN, by_weight), torch.float64)
        found.append(measure_errors((decoded_x @ decoded_w.T).bfloat16(), reference))
    return found


# --- what each recipe promises


@pytest.mark.parametrize("k", [1, 2, 3, 13, 64, 200])
def test_the_transform_is_orthogonal(k: int) -> None:
    matrix = recipes.hartley(np.eye(k))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(k), atol=1e-12)
    angle = 2 * np.pi * np.outer(np.arange(k), np.arange(k)) / k
    np.testing.assert_allclose(matrix, (np.cos(angle) + np.sin(angle)) / math.sqrt(k), atol=1e-12)


def test_x2_has_its_spectrum_and_mean() -> None:
    k = 64
    x = rows_of("X2", 16384, k).numpy()
    spectrum = np.linalg.eigvalsh(np.cov(x.T))[::-1]
    expected = 1.0 / np.arange(1, k + 1)
    np.testing.assert_allclose(spectrum, expected / expected.mean(), rtol=0.15)
    mean = np.linalg.norm(x.mean(axis=0)) / math.sqrt(k)
    assert mean == pytest.approx(0.5, abs=0.03)


def test_neighboring_columns_of_x2_are_not_more_correlated() -> None:
    # A scale covers neighbors: were they alike, 1x128 scales would look better than they are.
    correlations = [np.abs(np.corrcoef(rows_of("X2", 1024, 64, seed).T)) for seed in range(16)]
    neighbors = np.mean([np.diag(one, 1).mean() for one in correlations])
    pairs = np.mean([one[np.triu_indices(64, 1)].mean() for one in correlations])
    assert neighbors < 1.4 * pairs


def test_the_weight_of_x2_is_correlated_along_both_axes() -> None:
    w = draw_weight(DISTRIBUTIONS["X2"], 256, 128, 0).numpy() * math.sqrt(128)
    assert np.mean(w * w) == pytest.approx(1.25, rel=0.15)
    white = draw_weight(DISTRIBUTIONS["X1"], 256, 128, 0).numpy() * math.sqrt(128)
    for axis in (w, w.T):
        # A white matrix of this shape has a largest singular value of sqrt(256) + sqrt(128).
        assert np.linalg.norm(axis @ axis.T) > 1.5 * np.linalg.norm(white @ white.T)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("X2", "X13")])
def test_other_weights_are_white(name: str) -> None:
    w = draw_weight(DISTRIBUTIONS[name], 256, 400, 0)
    assert float(w.std()) == pytest.approx(1 / math.sqrt(400), rel=0.02)
    assert abs(float(w.mean())) < 0.01 / math.sqrt(400)


def test_x3_is_normed_by_row_with_lognormal_gains() -> None:
    plain = rows_of("X3(s=0)")
    differences = plain[1:] - plain[:-1]  # the shift drops out, a normed row has mean 0
    assert float(differences.mean(dim=1).abs().max()) < 1e-12
    assert float((plain - plain.mean(dim=0)).std()) == pytest.approx(0.9, abs=0.1)
    assert float(rows_of("X3").std(dim=0).log().std()) == pytest.approx(0.55, abs=0.12)


def test_x4_is_normed_by_block_before_the_hard_swish() -> None:
    x = rows_of("X4", k=600)
    assert float(x.min()) >= -0.375  # least value of hard-swish
    assert 0.2 < float((x < 0).double().mean()) < 0.6
    for block in (x[:, :256], x[:, 256:512], x[:, 512:]):
        size = block.square().mean(dim=1).sqrt()
        assert float(size.max()) <= 1.0  # hard-swish never grows what the norm made 1
        assert float(size.min()) > 0.3


def test_x5_repeats_rows_of_tables_of_unequal_size() -> None:
    x = rows_of("X5", 1024, 16 * 128).reshape(1024, 16, 128)
    sizes = x.abs().amax(dim=(0, 2))
    assert float(sizes.max() / sizes.min()) > 100
    distinct = [len(torch.unique(x[:, block], dim=0)) for block in range(16)]
    assert all(3 <= count < 1000 for count in distinct)
    hottest = max(float((x[:, 0] == row).all(dim=1).double().mean()) for row in x[:32, 0])
    assert hottest > 0.05  # of Zipf(1.05): at least 1 / 9 on the first id
    uniform = rows_of("X5(alpha=0)", 1024, 16 * 128).reshape(1024, 16, 128)
    assert max(len(torch.unique(uniform[:, block], dim=0)) for block in range(16)) > 1000


def test_x6_has_missing_blocks_and_rows() -> None:
    x = rows_of("X6", 4096, 16 * 128).reshape(4096, 16, 128)
    missing = (x == 0).all(dim=2)
    assert torch.equal(missing, (x == 0).any(dim=2))
    assert float(missing.double().mean()) == pytest.approx(0.505, abs=0.02)
    assert float(missing.all(dim=1).double().mean()) == pytest.approx(0.01, abs=0.006)
    assert not bool(torch.signbit(x[x == 0]).any())


def test_x7_has_zeros_and_a_long_tail() -> None:
    x = rows_of("X7")
    assert float((x == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(x.min()) == 0.0
    assert float(x[x > 0].median()) == pytest.approx(math.log(2), abs=0.02)
    assert float(x.max()) > 7


def test_x8_is_one_sided() -> None:
    x = rows_of("X8")
    assert float(x.min()) == 0.0
    assert float((x == 0).double().mean()) == pytest.approx(0.5, abs=0.06)


def test_x9_has_heavy_tails_that_grow_with_depth() -> None:
    def kurtosis(name: str) -> float:
        x = rows_of(name)
        centered = x - x.mean()
        return float(centered.pow(4).mean() / centered.square().mean().square())

    assert 9 < kurtosis("X9(depth=0)") < kurtosis("X9") < kurtosis("X9(depth=2)")


@pytest.mark.parametrize("name", ["X10", "X10(c=100)", "X13"])
def test_gates_are_between_0_and_1(name: str) -> None:
    x = rows_of(name)
    assert float(x.min()) > 0.0
    assert float(x.max()) < 1.0
    assert float(x.mean()) == pytest.approx(0.5, abs=0.03)


def test_x11_has_outlier_columns_and_spikes() -> None:
    plain = rows_of("X11(p_spike=0)")
    size = plain.std(dim=0)
    assert int((size > 8 * size.median()).sum()) == math.ceil(0.01 * 512)
    spiked = rows_of("X11")
    changed = (spiked != plain).double().mean()  # another stream: nearly every value differs
    assert float(changed) > 0.99
    assert float(rows_of("X11(p_spike=0.5,r=0)").std()) > 5 * float(rows_of("X11(r=0)").std())


def test_x12_has_two_levels_of_rows_and_masked_columns() -> None:
    x = rows_of("X12", 8192, 256)
    norm = x.norm(dim=1)
    clicked = norm > 10 * norm.median()
    assert float(clicked.double().mean()) == pytest.approx(0.03, abs=0.008)
    assert 15 < float(norm[clicked].median() / norm[~clicked].median()) < 60
    assert 1e-8 < float(x.abs().mean()) < 1e-4
    active = (x != 0).double().mean(dim=0)
    assert float(active.mean()) == pytest.approx(0.5, abs=0.07)
    assert float(active.min()) < 0.05
    assert float(active.max()) > 0.95
    # Spikes: a thousand times rarer, and 30 times larger, than the rest of their rows.
    relative = x.abs() / x.square().mean(dim=1, keepdim=True).sqrt()
    assert 1e-5 < float((relative > 10).double().mean()) < 1e-3


def test_x14_spreads_rows_over_its_range() -> None:
    for spread in (1e5, 1e7):
        size = rows_of(f"X14(spread={spread})", 2048).square().mean(dim=1).sqrt().log10()
        assert float(size.max() - size.min()) == pytest.approx(math.log10(spread), abs=0.2)
        assert float(size.std()) == pytest.approx(math.log10(spread) / math.sqrt(12), rel=0.05)


# --- errors known from the notes


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", [name for name in REALISTIC_DISTRIBUTIONS if name not in ("X13", "X14")]
)
def test_floor_of_the_error(name: str, seed: int) -> None:
    by_tensor, by_row, by_group = errors_of(
        name, seed, Granularity.TENSOR, Granularity.ROW, Granularity.GROUP
    )
    assert 0.034 <= by_row.row_err <= 0.041
    assert 0.034 <= by_row.row_p50 <= 0.041
    # Matrix-normal weights: a row's output depends on few directions, so rows differ more.
    assert 0.036 <= by_row.row_p99 <= (0.058 if name == "X2" else 0.046)
    assert 0.034 <= by_tensor.row_err <= 0.045
    assert 0.032 <= by_group.row_err <= 0.041


@pytest.mark.parametrize("seed", SEEDS)
def test_x14_separates_tensorwise_and_rowwise_scales(seed: int) -> None:
    by_tensor, by_row = errors_of("X14", seed, Granularity.TENSOR, Granularity.ROW)
    assert by_tensor.row_err == pytest.approx(0.11, abs=0.025)
    assert by_row.row_err == pytest.approx(0.0375, abs=0.002)
    by_tensor, by_row = errors_of("X14(spread=1e7)", seed, Granularity.TENSOR, Granularity.ROW)
    assert by_tensor.row_p99 == pytest.approx(1.0, abs=0.01)
    assert by_row.row_p99 < 0.046


@pytest.mark.parametrize("seed", SEEDS)
def test_x13_has_a_large_mean_that_hides_its_error(seed: int) -> None:
    operands = draw(DISTRIBUTIONS["X13"], 1024, 512, 512, seed)
    y = operands.x @ operands.w.T
    assert float((y.mean(dim=1) / y.std(dim=1)).mean()) == pytest.approx(10, abs=1.5)
    (by_row,) = errors_of("X13", seed, Granularity.ROW)
    assert 0.003 < by_row.row_err < 0.006
    assert 0.004 < by_row.row_p99 < 0.007


def test_x11_separates_tensorwise_scales() -> None:
    by_tensor, by_row = errors_of("X11", 0, Granularity.TENSOR, Granularity.ROW)
    assert 0.048 < by_tensor.row_p99 < 0.069
    assert by_row.row_p99 < 0.046
