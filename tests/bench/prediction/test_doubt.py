"""Which problems `sweep --for-model` measures first."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from lokakern.bench.cli.main import app
from lokakern.bench.prediction.doubt import BUDGET, SHARE, distance, doubtful
from lokakern.errors import MeasurementError
from lokakern.problems import make_problem
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.paths import shipped_databases
from lokakern.selection import dispatcher
from lokakern.selection.prediction.forecast import Prediction
from lokakern.types import ErrorBudget
from lokakern.workloads.suites import Case


@pytest.fixture(scope="module")
def shipped():
    return load_snapshot(shipped_databases())


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    yield
    dispatcher.use_snapshot(None)


def prediction(low: float, high: float, quantizing: str = "fast") -> Prediction:
    speedup = math.sqrt(low * high)
    return Prediction(10 / speedup, "plain", 10, quantizing, speedup, low, high, 0.8)


def test_doubt_is_largest_where_the_lower_end_is_nearest_to_one() -> None:
    order = [prediction(1.01, 1.2), prediction(0.95, 1.2), prediction(1.3, 1.6),
             prediction(0.5, 0.6), prediction(1, 1, "")]  # fmt: skip
    assert sorted(order, key=distance) == order
    assert distance(prediction(0.9, 2.0)) < distance(prediction(0.9, 1.05))  # less is known


def test_an_interval_without_width_is_not_in_doubt() -> None:
    """Both ends are equal where the host takes longer than the GPU."""
    assert distance(prediction(0.8, 0.8)) == math.inf
    assert distance(prediction(1.0, 1.0)) == math.inf


def test_cases_that_no_time_changes_are_not_measured(
    predicting: None, shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = shipped.find_device("NVIDIA H200")
    monkeypatch.setattr("lokakern.bench.prediction.doubt.BUDGET", ErrorBudget(row_err=1e-9))
    shapes = [(8192, 16 * n, 16 * 65) for n in (21, 70, 131, 165)]
    found = doubtful([Case(make_problem("gemm", s), "X1") for s in shapes], device, None, shipped)
    assert (found.places, found.certain) == ((), len(shapes))


def test_a_quarter_of_the_predicted_cases_is_kept_and_the_rest_counted(
    predicting: None, shipped
) -> None:
    device = shipped.find_device("NVIDIA H200")
    sizes = [(8192, 16 * n, 16 * k) for n in (21, 70, 131, 165) for k in (30, 65, 129, 177)]
    known, other = (8192, 4096, 4096), make_problem("dequantize", (8192, 1000))
    cases = [Case(make_problem("gemm", shape), "X1") for shape in (*sizes, known)]
    cases.append(Case(other, "X1"))
    found = doubtful(cases, device, None, shipped)
    assert (found.measured, found.unpredicted) == (1, 1)
    assert len(found.places) == math.ceil(SHARE * len(sizes))
    assert found.certain == len(sizes) - len(found.places)
    assert f"measuring the {len(found.places)} problems" in str(found)
    dispatcher.use_snapshot(shipped)
    doubts = {}
    for place, case in enumerate(cases[: len(sizes)]):
        choice = dispatcher.dispatch("gemm", case.problem.shape, BUDGET, device=device)
        assert choice.predicted is not None
        doubts[place] = distance(choice.predicted)
    most = max(doubts[place] for place in found.places)
    assert most <= min(doubt for place, doubt in doubts.items() if place not in found.places)


def test_without_a_model_it_says_what_to_do(shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "0")
    device = shipped.find_device("NVIDIA H200")
    with pytest.raises(MeasurementError, match="bench fit"):
        doubtful([], device, None, shipped)


@pytest.mark.parametrize("other", ["--fresh", "--only-stale", "--prebuild"])
def test_it_goes_without_what_repeats_measurements(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["sweep", "--for-model", other])
    assert ended.value.code == 2
    assert other in capsys.readouterr().err


def test_a_device_without_a_model_sweeps_nothing(
    predicting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["sweep", "--for-model", "--suite", "smoke", "--quiet"])
    assert ended.value.code == 1
    assert "--for-model needs a time model" in capsys.readouterr().err
