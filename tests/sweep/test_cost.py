"""Estimated costs of sweeps, compared with the sweeps of the shipped rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from lokakern.registry.schema.row_keys import from_row
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.reader import read_rows
from lokakern.sweep import cost
from lokakern.sweep.conditions import duration
from lokakern.types import Device, Problem
from lokakern.workloads.suites import SUITES
from tests.support.shipped import H200_FILE

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
CPU = Device("cpu", "some CPU", "x86_64", 2, 16)
FEWEST = 500  # rows of a run that says something about time
# Random and narrow sizes, not all of them shipped; the most doubtful ones, most of few rows, took
# 120 s where 71 are estimated: each problem waits for operands of twice the cache.
PARTS = {
    "random300",
    "random",
    "random-70",
    "random-doubtful",
    "narrow-errors",
    "residuals",
    "gelu",
}
MOST_REPLACED = 0.25  # of its rows, that a later run measured again: it may have replaced more


@pytest.fixture(scope="module")
def shipped() -> Path:
    return H200_FILE


def runs_of(path: Path, table: str) -> list[list[dict[str, Any]]]:
    """Rows of the last run of each suite that left enough, with their problems.

    Of earlier runs only what kernels did not outlive may be there, of a run whose problems a later
    one has, only what that did not replace, and of `PARTS` not the times and errors of all kernels.
    Runs with torchao's kernels took longer: Inductor compiles them for each shape, in 3 to 7 s.
    """
    rows = {
        name: [dict(zip(COLUMNS[name], row, strict=True)) for row in found]
        for name, found in read_rows(path).items()
    }
    problems = {row["key"]: from_row(Problem, row) for row in rows["problem"]}
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows[table]:
        runs[row["run"]].append({**row, "problem": problems[row["problem"]]})
    slow = {row["key"] for row in rows["kernel"] if row["name"].startswith("torchao.")}
    compiling = {run for run, found in runs.items() if any(row["kernel"] in slow for row in found)}
    begun = sorted(rows["run"], key=lambda row: row["started_utc_ms"])
    left_out = compiling | {row["key"] for row in begun if row["suite"] in PARTS}
    last = {
        row["suite"]: runs[row["key"]]
        for row in begun
        if row["key"] not in left_out and len(runs[row["key"]]) >= FEWEST
    }
    later: Counter[Problem] = Counter()  # rows of later runs
    whole = []
    for row in reversed(begun):
        run = runs[row["key"]]
        measured_again = sum(later[problem] for problem in {found["problem"] for found in run})
        if run is last.get(row["suite"]) and measured_again <= MOST_REPLACED * len(run):
            whole.append(run)
        later.update(found["problem"] for found in run)
    return whole


def seconds(run: list[dict[str, Any]]) -> float:
    """The time from the first row of a run to its last."""
    written = [row["measured_utc_ms"] for row in run]
    return (max(written) - min(written)) / 1e3


def test_estimated_times_match_shipped_sweeps(shipped: Path) -> None:
    device = load_snapshot([shipped]).find_device(H200.product)
    runs = runs_of(shipped, "timing")
    assert runs
    for run in runs:
        candidates = Counter(row["problem"] for row in run)
        estimate = sum(cost.timing_s(problem, n, device) for problem, n in candidates.items())
        assert estimate == pytest.approx(seconds(run), rel=0.3), f"{len(run)} times"


def test_estimated_errors_match_shipped_sweeps(shipped: Path) -> None:
    """All together: neighbors share draws more or less, and not all that was measured ships."""
    runs = runs_of(shipped, "accuracy")
    estimate = sum(cost.error_s(row["problem"], H200) for run in runs for row in run)
    assert estimate == pytest.approx(sum(map(seconds, runs)), rel=0.4)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device", [H200, CPU], ids=str)
def test_every_problem_has_a_cost(suite: str, device: Device) -> None:
    problems: set[Problem] = {case.problem for case in SUITES[suite].cases(device)}
    for problem in problems:
        one, two = (cost.timing_s(problem, count, device) for count in (1, 2))
        assert 0 < one < two
        assert cost.error_s(problem, device) > 0
        if device is H200:
            assert two < 10, problem


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89, "89 s"), (90, "1 min 30 s"), (350, "5 min 50 s"), (359.6, "6 min 0 s"),
     (3599, "59 min")],
)  # fmt: skip
def test_durations_are_rounded_down_to_whole_minutes(seconds: float, words: str) -> None:
    assert duration(seconds) == words
