"""scripts/measure_training_loss.py: pairs of training runs, and their interval."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern.bench.models import arms
from lokakern.bench.models.arms import Arm, Built, Setting
from lokakern.bench.models.catalog import CATALOG, config_named
from lokakern.errors import MeasurementError

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(
    "dlrm", "tiny", config_named("dlrm", "tiny", 50), 128, True, torch.device("cpu"), 0.06
)
BASELINE = Arm(arms.BASELINE, "", compiled=False)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    known = dict(CATALOG)
    path = ROOT / "scripts" / "measure_training_loss.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    module.HELD_OUT_SAMPLES = 0  # type: ignore[attr-defined]  # 32 batches
    yield module
    del sys.modules[path.stem]
    CATALOG.clear()
    CATALOG.update(known)


@pytest.mark.parametrize("warm", [0, 2])
def test_equal_arms_have_equal_losses(script: Any, warm: int) -> None:
    """So the copies share parameters and samples."""
    one, other = (arms.build(BASELINE, SETTING, seed) for seed in (0, 1))
    course = script.Course(steps=2, rate=1e-3, warm=warm)
    pairs = [script.pair_of(one, other, SETTING, seed, course) for seed in (3, 4)]
    for pair in pairs:
        assert pair.change == 0 and pair.bf16 == pair.fp8 == pair.fp8_in_bf16 > pair.teacher
        assert (pair.start is None) == (warm == 0)
    assert pairs[0].bf16 != pairs[1].bf16


def test_warm_steps_see_other_samples_and_both_copies_go_on_from_them(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, dict[str, Tensor] | None]] = []
    learn = script.learn

    def spy(built: Built, setting: Setting, seed: int, steps: int, *rest: Any) -> Any:
        start = rest[0]
        calls.append((seed, start and {key: x.clone() for key, x in start.items()}))
        return learn(built, setting, seed, steps, *rest)

    monkeypatch.setattr(script, "learn", spy)
    one, other = (arms.build(BASELINE, SETTING, 0) for _ in range(2))
    script.pair_of(one, other, SETTING, 5, script.Course(steps=2, rate=1e-3, warm=2))
    (warm, none), (first, start), (second, same) = calls
    assert none is None and warm != first == second == 5
    assert start is not None and same is not None
    assert all(torch.equal(x, same[key]) for key, x in start.items())
    fresh = SETTING.build(5).state_dict()
    assert not torch.equal(start["head.0.weight"], fresh["head.0.weight"])


@pytest.mark.rest  # 19 s
def test_a_wrong_row_scale_is_found(script: Any) -> None:
    """Scales of every other row are 10 % too large, which no weight makes good."""
    setting = replace(SETTING, samples=256)
    one = arms.build(BASELINE, setting, 0)
    two = arms.build(Arm("fp8-rowwise", "", compiled=False), setting, 0)

    def wrong(_layer: nn.Module, _args: Any, y: Tensor) -> Tensor:
        factor = torch.ones(len(y), 1, dtype=y.dtype)
        factor[::2] = 1.1
        return y * factor

    course, changes = script.Course(steps=10, rate=1e-4, warm=200, warm_rate=1e-2), []
    for is_wrong in (False, True):
        if is_wrong:
            for layer in two.model.modules():
                if isinstance(layer, nn.Linear) and arms.fits(layer):
                    layer.register_forward_hook(wrong)
        pairs = [script.pair_of(one, two, setting, seed, course) for seed in range(8)]
        changes.append(script.facts_of(pairs)["change"])
    right, found = changes
    assert right["low"] < script.BAR, "not told from 0.02 %"
    assert found["low"] > max(right["high"], script.BAR)


def test_the_interval_is_that_of_student(script: Any) -> None:
    changes = (1e-4, 2e-4, 3e-4)
    pairs = [
        script.Pair(place, None, 0.5, 0.5 * (1 + x), 0.5, 0.4, 1.0)
        for place, x in enumerate(changes)
    ]
    facts = script.facts_of(pairs)
    half = 4.303 * 1e-4 / math.sqrt(3)  # two degrees of freedom
    found = [facts["change"][key] for key in ("mean", "low", "high")]
    assert found == pytest.approx([2e-4, 2e-4 - half, 2e-4 + half])
    assert facts["change_in_bf16"]["high"] == 0
    words = script.line_of(facts)
    assert "+0.0200 % (-0.0048 to +0.0448), not within 0.02 %, 3 seeds" in words
    assert script.line_of(script.facts_of(pairs[:1])) == "1 seed: no interval"


def test_a_seed_that_does_not_fit_does_not_begin(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])
    took = itertools.chain([60.0], itertools.repeat(10.0))  # the first one compiles

    def measure(seed: int) -> Any:
        seconds = next(took)
        now[0] += seconds
        return script.Pair(seed, None, 1.0, 1.0, 1.0, 0.9, seconds)

    assert [pair.seed for pair in script.within(95, measure, range(7, 100))] == [7, 8, 9, 10]
    assert now[0] == 90
    assert len(list(script.within(1e9, measure, range(3)))) == 3


def test_an_arm_that_quantizes_nothing_is_refused(script: Any) -> None:
    built = arms.build(Arm(arms.BUDGETED, "", compiled=False), SETTING, 0)
    with pytest.raises(MeasurementError, match="quantizes none of 27 products of dlrm tiny at 128"):
        script.quantized_words(built, SETTING)


def test_the_file_has_all_pairs(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = "--size tiny --batch 32 --arm fp8-rowwise --warm 2 --steps 2 --seeds 2 --first-seed 3"
    script.main(["hstu", *words.split(), "--out", str(out)])
    found = json.loads(out.read_text())
    assert [pair["seed"] for pair in found["pairs"]] == [3, 4]
    changes = [pair["fp8"] / pair["bf16"] - 1 for pair in found["pairs"]]
    assert 0 not in changes and found["change"]["mean"] == pytest.approx(sum(changes) / 2)
    assert found["graphs"] == found["graphs_of_first_seed"] > 0, "compiled anew for a seed"
    assert "torch.quantize_row+torch.emulated_row" in found["quantized"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("hstu tiny, fp8-rowwise, 32 samples: ")
    assert said[-1].startswith("seed 4: ")
