"""Host cost of a warm dispatch and of an eager gemm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lokakern
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.types import Granularity

H200 = "NVIDIA H200"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


def test_dict_look_up(benchmark: Any) -> None:
    """Baseline for a warm dispatch."""
    key = ("gemm", 2048, 2048, 0.06, None, H200, None, 16)
    table = {key: 1}

    def look_up() -> int:
        return table[("gemm", 2048, 2048, 0.06, None, H200, None, 16)]

    assert benchmark(look_up) == 1


def test_warm_dispatch(benchmark: Any, shipped: None) -> None:
    lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200)
    choice = benchmark(lokakern.dispatch, "gemm", (32768, 2048, 2048), 0.06, device=H200)
    assert choice.kernel and not choice.is_miss


def test_cold_dispatch(benchmark: Any, shipped: None) -> None:
    facts = dispatcher.snapshot()

    def cold() -> str:
        dispatcher.use_snapshot(facts)
        return lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200).kernel

    assert benchmark(cold)


@pytest.fixture
def choices(shipped: None, tmp_path: Path) -> Path:
    """A file of 100 choices for the device here."""
    for columns in range(64, 6464, 64):
        lokakern.dispatch("quantize", (4096, columns))
    lokakern.freeze(tmp_path / "choices.json")
    return tmp_path / "choices.json"


def test_warm_dispatch_of_frozen_choices(benchmark: Any, choices: Path) -> None:
    dispatcher.use_choices(choices)
    choice = benchmark(lokakern.dispatch, "quantize", (4096, 64))
    assert choice.kernel and choice.table.origin is not None


def test_loading_frozen_choices(benchmark: Any, choices: Path) -> None:
    benchmark(dispatcher.use_choices, choices)
    held = dispatcher.choices()
    assert held is not None and len(held.tables) == 100


@pytest.mark.parametrize("m", [64, 2048])
def test_eager_gemm_unquantized(benchmark: Any, m: int) -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = (torch.randn(s, 512, device=where).bfloat16() for s in (m, 512))
    dispatcher.use_snapshot(load_snapshot([]))
    with torch.no_grad():
        lokakern.gemm(x, w.t())
        benchmark(lokakern.gemm, x, w.t())
    dispatcher.use_snapshot(None)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(2048, 2048)])
def test_twenty_eager_gemms_on_a_prepared_weight(
    benchmark: Any, shipped: None, n: int, k: int
) -> None:
    """Quantize, GEMM and allocations; few enough calls that the queue to the GPU never fills."""
    x, w = (torch.randn(s, k, device="cuda").bfloat16() for s in (2048, n))
    prepared = lokakern.prepare_weight(w, 0.06, (2048, 32768))
    assert prepared.granularity is not Granularity.NONE, "FP8 pays at this size on an H200"
    with torch.no_grad():
        lokakern.gemm(x, prepared)

        def calls() -> None:
            for _ in range(20):
                lokakern.gemm(x, prepared)

        benchmark.pedantic(calls, setup=torch.cuda.synchronize, rounds=100, warmup_rounds=5)


@pytest.mark.parametrize("kind", ["torch", "plain", "routed"])
def test_linear(benchmark: Any, kind: str) -> None:
    """Host time of a layer: a plain one costs as much as torch's, routes add an autograd step."""
    layer: torch.nn.Linear = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    if kind != "torch":
        layer = lokakern.Linear(16, 16, dtype=torch.bfloat16)
    if kind == "routed":
        layer.take_routes(("row;16:0=;1:0=",) * 3, layer.weight)  # type: ignore[operator]
    x = torch.randn(2, 16).bfloat16()
    assert benchmark(layer, x).shape == (2, 16)
