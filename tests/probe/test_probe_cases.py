"""Safe verdicts of Probe hold on held-out batches: part of `scripts/probe_cases.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "probe_cases.py"
    spec = importlib.util.spec_from_file_location("probe_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_cases"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 512)


@pytest.mark.rest  # 10 s
def test_safe_verdicts_hold_on_held_out_batches(cases: Any) -> None:
    """One small case of each kind, three GEMMs, three scales."""
    tally = cases.Tally()
    for place, case in enumerate(cases.random_cases(13, 5, sizes=(64, 96))):
        tally.judged += cases.judge(case, place)
    assert len(tally.judged) == 13 * 9
    assert tally.false == []
    assert tally.undecided_share <= 0.15 and tally.unsafe_share <= 0.1
    assert sum(j.verdict == "unsafe" for j in tally.judged) > 5  # budgets are where errors are


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("mean", "budget", "true", "safety"),
    [(1.0, 0.06, 0.053, "safe"), (1.0, 0.05, 0.053, "unsafe"), (2.0, 0.06, 0.084, "unsafe"),
     (5.0, 0.06, 0.193, "unsafe")],
)  # fmt: skip
def test_weight_rows_that_sum_to_zero_keep_the_rounding_of_the_mean(
    cases: Any, mean: float, budget: float, true: float, safety: str
) -> None:
    """Draws from statistics gave 0.044, 0.051 and 0.056 for means 1, 2 and 5 at k = n = 512."""
    (case,) = (c for c in cases.known_cases() if c.mean == mean and c.budget == budget)
    outputs = [j for j in cases.judge(case) if j.gemm == "output"]
    assert [j.scales for j in outputs] == ["row", "1x128", "tensor"]
    for j in outputs:
        assert j.true == pytest.approx(true, rel=0.04)
        assert j.told == pytest.approx(j.true, rel=0.03)
        assert j.verdict == safety


def test_tally_counts_false_verdicts(cases: Any) -> None:
    def judged(verdict: str, true: float) -> Any:
        return cases.Judgment("a", "output", "row", 0.05, 0.04, 0.041, true, verdict)

    tally = cases.Tally([judged("safe", 0.056), judged("safe", 0.054), judged("unsafe", 0.2),
                         judged("undecided", 0.04), judged("safe", 0.03)])  # fmt: skip
    assert tally.false == tally.judged[:1]
    assert (tally.undecided_share, tally.unsafe_share) == (0.5, 0.0)
