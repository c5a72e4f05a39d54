"""What moves in windows of a site is told, and what does not is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lokakern.probe.drift import CONFIRMED, Ranges, Usual, usual_of
from lokakern.probe.fingerprint import fingerprint_of
from lokakern.probe.statistics import add_rows, sizes_of
from lokakern.probe.windows import SiteWindow, transfers_of
from lokakern.types import REALISTIC_DISTRIBUTIONS
from lokakern.workloads.distributions import distribution_named, draw_rows

K, ROWS, SAMPLED = 64, 1024, 256
CPU = torch.device("cpu")


def window(x: Tensor, seed: int = 0) -> SiteWindow:
    site = SiteWindow(8, x.shape[1], CPU)
    keys = torch.rand(SAMPLED, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    site.input.waiting.append((add_rows, (*sizes_of(x), x[:SAMPLED], keys)))
    return site


def profile_of(site: SiteWindow) -> dict[str, float]:
    (transfer,) = transfers_of({"site": site})
    return transfer.numbers().of("site")


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
    known = usual_of({"output": fingerprint_of(site.statistics(), "output")})
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
    assert transfers_of({"site": SiteWindow(8, K, CPU)}) == []
    zeros = profile_of(window(torch.zeros(ROWS, K)))
    assert zeros["input.crest"] == zeros["input.row_spread"] == 0.0


def test_weights_have_numbers_too() -> None:
    site = window(normal(0))
    weight = torch.ones(8, K)
    weight[3] = 16.0
    site.weight_sizes = sizes_of(weight)
    assert profile_of(site)["weight.row_crest"] == 4.0


def test_weights_that_only_some_windows_tell_are_compared_with_their_last_ones() -> None:
    usual, words = Usual(), []
    for number in range(16):
        site = window(normal(number))
        if number % 5 == 0:
            weight = torch.ones(8, K)
            weight[3] = 16.0 if number else 1.0
            site.weight_sizes = sizes_of(weight)
        words.append(usual.see(profile_of(site)))
    assert [bool(word) for word in words] == [number in (10, 15) for number in range(16)]
    assert words[10] == ("weight.row_crest rose from 0 to 4")


def test_all_sites_at_once_are_told_as_one_by_one() -> None:
    """Also what falls, and after what was usual began anew."""
    drifts = {"same": lambda x: x, "a": shifted, "b": spread, "c": blown_up}
    ranges, alone = Ranges({}), {name: Usual() for name in drifts}
    told = []
    for number in range(24):
        sites = {
            name: window(drift(normal(number + 50 * place)) if number // 6 % 2 else normal(number))
            for place, (name, drift) in enumerate(drifts.items())
        }
        off = {"b"} if number > 11 else set()
        (transfer,) = transfers_of(sites)
        found = ranges.see(transfer.numbers(), off)
        expected = {}
        for name, usual in alone.items():
            words = usual.see(profile_of(sites[name]), falls=name in off)
            if words:
                expected[name] = words
                alone[name] = Usual()
                alone[name].see(profile_of(sites[name]))
        assert found == expected
        told += [(number, name) for name in found]
    assert {(7, "a"), (7, "b"), (7, "c"), (13, "b")} <= set(told)
    assert not any(name == "same" for _, name in told)


def test_an_operand_that_comes_later_has_a_range_too() -> None:
    usual, words = Usual(), []
    for number in range(9):
        site = window(normal(number))
        if number > 4:
            x = normal(number) if number < 7 else blown_up(normal(number))
            site.grad_output = window(x).input
        words.append(usual.see(profile_of(site)))
    assert not any(words[:-1])
    assert "grad_output.column_crest rose" in words[-1]
