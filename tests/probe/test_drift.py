"""What moves in windows of a site is told, and what does not is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lokakern.probe.drift import CONFIRMED, Usual, profile_of, usual_of
from lokakern.probe.fingerprint import fingerprint_of
from lokakern.probe.statistics import SiteStatistics
from lokakern.types import REALISTIC_DISTRIBUTIONS
from lokakern.workloads.distributions import distribution_named, draw_rows

K, ROWS, SAMPLED = 64, 1024, 256
CPU = torch.device("cpu")


def window(x: Tensor, seed: int = 0) -> SiteStatistics:
    site = SiteStatistics(8, x.shape[1], CPU)
    keys = torch.rand(SAMPLED, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    site.input.add(x, x[:SAMPLED], keys)
    return site


def normal(seed: int) -> Tensor:
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(seed))


def shifted(x: Tensor) -> Tensor:
    return x + 4.0


def spread(x: Tensor) -> Tensor:
    return torch.cat((x[::2] / 100, x[1::2]))[
        torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ]


def blown_up(x: Tensor) -> Tensor:
    return torch.cat((100 * x[:, :1], x[:, 1:]), dim=1)


@pytest.mark.parametrize("name", REALISTIC_DISTRIBUTIONS)
def test_windows_of_one_distribution_are_usual(name: str) -> None:
    pool = draw_rows(distribution_named(name), 4 * ROWS, K, 1)
    usual = Usual()
    for seed in range(15):
        rows = torch.randint(len(pool), (ROWS,), generator=torch.Generator().manual_seed(seed))
        assert not usual.see(profile_of(window(pool[rows].float(), seed))), seed


@pytest.mark.parametrize(
    ("drift", "number"),
    [(shifted, "mean rose"), (spread, "row_spread rose"), (blown_up, "column_crest rose"),],
)  # fmt: skip
def test_a_drift_is_told_when_a_second_window_confirms_it(drift, number: str) -> None:
    usual = Usual()
    for seed in range(4):
        assert not usual.see(profile_of(window(normal(seed))))
    for seed in range(4, 4 + CONFIRMED - 1):
        assert not usual.see(profile_of(window(drift(normal(seed)))))
    assert not usual.see(profile_of(window(normal(8)))), "one window alone is no drift"
    words = [usual.see(profile_of(window(drift(normal(seed))))) for seed in range(9, 9 + CONFIRMED)]
    assert not any(words[:-1])
    assert f"input.{number} from " in words[-1]


def test_what_falls_is_told_of_what_was_unsafe_alone() -> None:
    for falls in (False, True):
        usual = Usual()
        for seed in range(4):
            assert not usual.see(profile_of(window(blown_up(normal(seed)))), falls=falls)
        words = [usual.see(profile_of(window(normal(seed))), falls=falls) for seed in (4, 5)]
        assert ("input.column_crest fell from" in words[-1]) is falls


def test_rows_of_zeros_are_no_drift() -> None:
    usual = Usual()
    for seed in range(4):
        assert not usual.see(profile_of(window(normal(seed))))
    for seed in range(4, 8):
        x = normal(seed) * (torch.arange(ROWS) % 4 > 0)[:, None]
        assert not usual.see(profile_of(window(x)))


def test_rows_that_are_not_finite_are_told_at_once() -> None:
    usual = Usual()
    assert not usual.see(profile_of(window(normal(0))))
    x = normal(1)
    x[5, 7] = torch.nan
    assert "input.nonfinite_rows rose from 0 to 0.000977" in usual.see(profile_of(window(x)))


def test_a_report_says_what_is_usual_before_the_first_window() -> None:
    site = window(normal(0))
    known = usual_of({"output": fingerprint_of(site, "output")})
    assert {"input.row_spread", "input.mean"} <= known.keys()
    told = [Usual(known).see(profile_of(window(normal(1))))]
    usual = Usual(known)
    told += [usual.see(profile_of(window(shifted(normal(seed))))) for seed in (2, 3)]
    assert told[:2] == ["", ""]
    assert "input.mean rose" in told[2]


def test_first_windows_widen_what_is_usual_by_less_than_a_drift() -> None:
    usual = Usual()
    halves = [x * s for x, s in zip(map(normal, range(3)), itertools.repeat(1.0))]
    for number, x in enumerate(halves):  # 0.4 octaves of spread more in each
        x[: ROWS // 16] /= 2 ** (0.4 * number)
        assert not usual.see(profile_of(window(x)))
    wide = normal(9)
    wide[: ROWS // 16] /= 2**1.2
    assert not any(usual.see(profile_of(window(wide))) for _ in range(3))


def test_empty_operands_have_no_numbers() -> None:
    site = SiteStatistics(8, K, CPU)
    assert profile_of(site) == {}
    zeros = profile_of(window(torch.zeros(ROWS, K)))
    assert zeros["input.crest"] == zeros["input.row_spread"] == 0.0


def test_weights_have_numbers_too() -> None:
    site = window(normal(0))
    weight = torch.ones(8, K)
    weight[3] = 16.0
    site.add_weight(weight)
    assert profile_of(site)["weight.row_crest"] == 4.0
