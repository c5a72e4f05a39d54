"""Statistics of operands: known parameters are recovered, and shards merge into the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.fingerprint import fingerprint_of
from lokakern.probe.statistics import (
    DISTINCT_SIZES,
    FINITE,
    OperandStatistics,
    SiteStatistics,
    capacity_of,
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


def test_nonfinite_rows_are_counted_and_left_out() -> None:
    x = normal(50, 6)
    spoiled = torch.cat((x, x[:3]))
    spoiled[50, 1], spoiled[51, 2], spoiled[52] = math.nan, math.inf, math.nan
    clean, found = statistics_of(x), statistics_of(spoiled)
    assert found.nonfinite_rows == 3
    assert found.amax == clean.amax
    assert torch.isfinite(found.kept()[0]).all()
    assert len(found.kept()[0]) == 50


def sized(*sizes: float) -> OperandStatistics:
    return statistics_of(torch.tensor(sizes)[:, None])


def test_sizes_of_rows_count_zeros_and_extremes() -> None:
    found = sized(0.0, -0.0, 2.0**-129, -3.4e38, math.nan, -math.inf)
    assert (found.rows_seen, found.nonfinite_rows) == (6, 2)
    assert found.row_sizes[0] == 2 and found.row_sizes[FINITE - 1] == 1


def test_share_beyond_a_range_leaves_out_zeros() -> None:
    found = sized(0.0, 1e-6, 0.5, 1.0, 2.0, 3e9, math.inf)
    assert found.share_beyond(0.4, 4.0) == pytest.approx(2 / 6)
    assert found.share_beyond(0.0, math.inf) == 0.0
    assert found.share_beyond(0.4, 1e300) == pytest.approx(1 / 6)


def test_spreads_of_rows_and_columns_are_measured() -> None:
    rows = torch.exp2(torch.linspace(0, 20, 401, dtype=torch.float64))[:, None]
    x = rows * torch.ones(401, 30)
    site = SiteStatistics(401, 30, CPU)
    site.input, site.grad_output = statistics_of(x), statistics_of(x.t())
    found = fingerprint_of(site, "output")
    assert found["row_spread"] == pytest.approx(20 * 0.98, abs=0.1)
    assert found["column_spread"] == 0.0 and found["crest"] == pytest.approx(10, abs=0.1)
    found = fingerprint_of(site, "grad_input")
    assert found["column_spread"] == pytest.approx(20) and found["row_spread"] == 0.0


def test_zeros_and_zero_rows_are_counted() -> None:
    x = normal(40, 5)
    x[::4] = 0.0
    x[1, :3] = 0.0
    site = SiteStatistics(3, 5, CPU)
    assert fingerprint_of(site, "output")["crest"] == 0.0  # of no rows
    site.input = statistics_of(x)
    found = fingerprint_of(site, "output")
    assert (found["zero_rows"], found["zeros"]) == (0.25, 53 / 200)


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
    x = normal(200, 40, 6) * torch.logspace(-3, 3, 6, dtype=torch.float64)
    keys = torch.rand((200, 40), generator=generator(4), dtype=torch.float64)
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


def test_sites_count_sizes() -> None:
    site = SiteStatistics(3, 2, CPU)
    assert site.m == 1
    for m in (*([100] * 98), 7, 5000):
        site.count({m: 1})
    assert site.m == 100
    other = SiteStatistics(3, 2, CPU)
    other.sizes.update(range(1000, 1000 + 2 * DISTINCT_SIZES))
    site.merge(other)
    assert len(site.sizes) <= DISTINCT_SIZES
    assert site.m == pytest.approx(1000 + 0.95 * DISTINCT_SIZES, rel=0.02)
    with pytest.raises(ShapeError, match="n=3 k=2 cannot take in one of n=2 k=3"):
        site.merge(SiteStatistics(2, 3, CPU))


def test_mean_ratios_are_those_of_the_product_with_the_weight() -> None:
    site = SiteStatistics(3, 1, CPU)
    assert site.mean_ratio == 0.0
    x = torch.linspace(1, 2, 100)[:, None]
    site.input.add(x, x.double(), torch.rand(100, dtype=torch.float64))
    assert site.mean_ratio == 0.0  # without a weight
    site.add_weight(torch.tensor([[49.0], [50.0], [51.0]]))
    assert site.mean_ratio == pytest.approx(50 / math.sqrt(2 / 3))
    site.add_weight(torch.ones(3, 1))  # all are equal: no deviation
    assert site.mean_ratio == 0.0
