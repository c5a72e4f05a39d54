"""What a sweep says it will cost, against what sweeps of an H200 took."""

from __future__ import annotations

import pytest

from lokakern.bench import cost
from lokakern.bench.accuracy import cells_for
from lokakern.bench.suites import SUITES
from lokakern.bench.sweep import _duration, candidates
from lokakern.types import Device

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)


@pytest.mark.parametrize(("suite", "seconds"), [("lrm", 400.4), ("anchors", 65.7)])
def test_estimates_are_within_30_percent_of_measured_sweeps(suite: str, seconds: float) -> None:
    """With --errors needed, including what was compiled first."""
    cases = SUITES[suite].cases(H200)
    found = [(case.problem, candidates(case.problem, H200)) for case in cases]
    cells = cells_for([(k, problem) for problem, kernels in found for k in kernels], H200)
    estimate = cost.BEGIN_S + sum(cost.timing_s(p, len(kernels), H200) for p, kernels in found)
    estimate += cost.NEEDED_SHARE * sum(cost.error_s(cell, H200) for cell in cells)
    assert estimate == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89, "89 s"), (90, "1 min 30 s"), (350, "5 min 50 s"), (359.6, "6 min 0 s"),
     (3599, "59 min")],
)  # fmt: skip
def test_durations_are_rounded_down_to_whole_minutes(seconds: float, words: str) -> None:
    assert _duration(seconds) == words
