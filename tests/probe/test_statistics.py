"""Statistics of operands: known parameters are recovered, and shards merge into the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.statistics import (
    DISTINCT_SIZES,
    TRACE,
    Magnitudes,
    OperandStatistics,
    SiteStatistics,
    add_magnitudes,
    add_outputs,
    capacity_of,
    spread_of,
)

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def statistics_of(*parts: Tensor, seed: int = 0) -> OperandStatistics:
    found = OperandStatistics(parts[0].shape[1], CPU)
    for part in parts:
        keys = torch.rand(len(part), generator=generator(seed), dtype=torch.float64)
        found.add(part, part.double(), keys)
    return found


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    columns=st.integers(1, 12),
    mean=st.floats(-1e3, 1e3),
    log_scale=st.floats(-18, 6),
)
def test_batches_have_the_sums_of_the_whole(
    sizes: list[int], columns: int, mean: float, log_scale: float
) -> None:
    x = (normal(sum(sizes), columns) + mean) * 10.0**log_scale
    found = statistics_of(*x.split(sizes))
    assert found.count == len(x)
    assert torch.allclose(found.sums, x.sum(dim=0), rtol=1e-12, atol=1e-12 * float(x.abs().sum()))
    assert torch.allclose(found.squares, x.square().sum(dim=0), rtol=1e-12, atol=0)


def test_nonfinite_rows_are_counted_and_left_out() -> None:
    x = normal(50, 6)
    spoiled = torch.cat((x, x[:3]))
    spoiled[50, 1], spoiled[51, 2], spoiled[52] = math.nan, math.inf, math.nan
    clean, found = statistics_of(x), statistics_of(spoiled)
    assert found.row_sizes.nonfinite_count == 3
    assert found.values.nonfinite_count == 8
    assert found.amax == clean.amax
    assert found.count == clean.count == 50
    for name in ("sums", "squares"):
        # Sums over 53 rows, three of them zeros, may be added up in another order.
        assert torch.allclose(getattr(found, name), getattr(clean, name), rtol=1e-12), name
    assert torch.isfinite(found.kept()[0]).all()
    assert len(found.kept()[0]) == 50


@settings(max_examples=50, deadline=None)
@given(log_sigma=st.floats(0, 12), shift=st.floats(-60, 60), share=st.floats(0.02, 0.98))
def test_quantiles_are_accurate_to_a_sixteenth_of_an_octave(
    log_sigma: float, shift: float, share: float
) -> None:
    logs = normal(1000) * log_sigma + shift
    found = Magnitudes(CPU)
    add_magnitudes([found], torch.exp2(logs)[None])
    exact = float(logs.sort().values[math.ceil(share * 1000) - 1])
    assert abs(found.log2_quantiles(share)[0] - exact) <= 1 / 16 + 1e-9


def test_magnitudes_count_zeros_and_extremes() -> None:
    found = Magnitudes(CPU)
    add_magnitudes([found], torch.tensor([[0.0, -0.0, 2.0**-129, -3.4e38, math.nan, -math.inf]]))
    assert (found.count, found.nonfinite_count, found.zero_share) == (4, 2, 0.5)
    low, high = found.log2_quantiles(0.0, 1.0)
    assert low == pytest.approx(-129, abs=0.6) and high == pytest.approx(128, abs=0.1)
    assert math.isnan(Magnitudes(CPU).log2_quantiles(0.5)[0])


def test_share_beyond_a_range_leaves_out_zeros() -> None:
    found = Magnitudes(CPU)
    add_magnitudes([found], torch.tensor([[0.0, 1e-6, 0.5, 1.0, 2.0, 3e9, math.inf]]))
    assert found.share_beyond(0.4, 4.0) == pytest.approx(2 / 6)
    assert found.share_beyond(0.0, math.inf) == 0.0
    assert found.share_beyond(0.4, 1e300) == pytest.approx(1 / 6)


def test_spreads_of_rows_and_columns_are_measured() -> None:
    rows = torch.exp2(torch.linspace(0, 20, 401, dtype=torch.float64))[:, None]
    found = statistics_of(rows * torch.ones(401, 30))
    assert found.row_sizes.spread_log2() == pytest.approx(20 * 0.98, abs=0.3)
    assert spread_of(found.column_sizes) == 0.0
    found = statistics_of((rows * torch.ones(401, 30)).t())
    assert spread_of(found.column_sizes) == pytest.approx(20)
    assert found.row_sizes.spread_log2() < 0.2


def test_zero_rows_are_counted() -> None:
    x = normal(40, 5)
    x[::4] = 0.0
    assert statistics_of(x).row_sizes.zero_share == 0.25


def test_amax_drift_is_kept_when_the_trace_is_full() -> None:
    steps = [normal(8, 3) * 2.0 ** (i / 32) for i in range(4 * TRACE)]
    found = statistics_of(*steps)
    assert found.stride == 4 and found.steps == 4 * TRACE
    assert found.amax == pytest.approx(max(float(x.abs().max()) for x in steps))
    assert found.amax_drift_log2 == pytest.approx(4 * TRACE / 32 * 0.75, abs=0.6)
    assert abs(statistics_of(*(normal(8, 3, seed=i) for i in range(99))).amax_drift_log2) < 0.5


def test_kept_rows_are_a_uniform_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lokakern.probe.statistics.capacity_of", lambda _columns: 20)
    counts = torch.zeros(200)
    for seed in range(300):
        found = OperandStatistics(1, CPU)
        keys = torch.rand(200, generator=generator(seed), dtype=torch.float64)
        for rows, part in zip(
            torch.arange(200.0).view(-1, 1).split(37), keys.split(37), strict=True
        ):
            found.add(rows, rows, part)
        counts[found.kept()[0].long().flatten()] += 1
    # Binomial of 300 tries at 1/10: deviation 5.2; five of them over 200 rows is 1 in 10^4.
    assert counts.sum() == 300 * 20
    assert (counts - 30).abs().max() < 5 * 5.2


def test_the_capacity_of_a_sample_is_bounded_in_elements() -> None:
    assert len(OperandStatistics(4, CPU).kept()[0]) == 0
    assert [capacity_of(k) for k in (1, 1024, 4096, 123200)] == [512, 512, 128, 64]


def test_merged_shards_equal_the_whole() -> None:
    """Ranks see other rows of the same steps."""
    x = normal(3 * TRACE, 40, 6) * torch.logspace(-3, 3, 6, dtype=torch.float64)
    keys = torch.rand((3 * TRACE, 40), generator=generator(4), dtype=torch.float64)
    whole, left, right = (OperandStatistics(6, CPU) for _ in range(3))
    for batch, key in zip(x, keys, strict=True):
        whole.add(batch, batch, key)
        left.add(batch[:11], batch[:11], key[:11])
        right.add(batch[11:], batch[11:], key[11:])
    left.merge(right)
    merged = dict(left.tensors())
    for name, exact in whole.tensors():
        assert torch.allclose(merged[name].double(), exact.double(), rtol=1e-5), name
    assert torch.equal(left.rows, whole.rows) and torch.equal(left.keys, whole.keys)
    assert (left.steps, left.stride) == (whole.steps, whole.stride)


def test_sites_count_sizes_and_mean_ratios() -> None:
    site = SiteStatistics(3, 2, CPU)
    for m in (*([100] * 98), 7, 5000):
        site.count({m: 1})
    assert [site.m_quantile(q) for q in (0.001, 0.5, 0.99, 0.999)] == [7, 100, 100, 5000]
    assert SiteStatistics(3, 2, CPU).m_quantile(0.5) == 0
    outputs = torch.tensor([[49.0, 50.0, 51.0], [-1.0, 0.0, 1.0]]).repeat(100, 1)
    add_outputs([site], outputs[None])
    assert site.mean_ratio == pytest.approx(50 / math.sqrt(2 / 3), rel=0.05)
    other = SiteStatistics(3, 2, CPU)
    other.sizes.update(range(1000, 1000 + 2 * DISTINCT_SIZES))
    site.merge(other)
    assert len(site.sizes) <= DISTINCT_SIZES
    assert site.m_quantile(0.9) == pytest.approx(1000 + 1.8 * DISTINCT_SIZES, rel=0.02)
    with pytest.raises(ShapeError, match="n=3 k=2 cannot take in one of n=2 k=3"):
        site.merge(SiteStatistics(2, 3, CPU))
