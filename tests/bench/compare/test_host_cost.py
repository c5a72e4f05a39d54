"""The measurement of host costs: what is called, how rounds are timed, and what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lokakern
from lokakern.bench.cli.main import app
from lokakern.bench.compare import host_cost
from lokakern.bench.compare.host_cost import Arm, arms_on, representatives, table_of, timed
from lokakern.errors import UnknownNameError
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection.host_cost import (
    PREPARED,
    STEP,
    TRAINING,
    TRAINING_BF16,
    UNPREPARED,
    machine_class,
)
from lokakern.types import Device

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": 32, "WIDTH": 64, "LAYERS": 2, "WARM_ROUNDS": 1}.items():
        monkeypatch.setattr(host_cost, name, value)


class Clock:
    """A host whose calls take as long as they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.log = 1000, [""]
        monkeypatch.setattr(host_cost.time, "perf_counter_ns", lambda: self.now_ns)

    def arm(self, call: str, *us: float, calls: int = 20) -> Arm:
        left = list(us)

        def run() -> None:
            self.log.append(call)
            self.now_ns += round(calls * 1e3 * (left.pop(0) if len(left) > 1 else left[0]))

        return Arm("eager", call, "torch", False, run, calls)

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.now_ns += 10**9  # of the GPU, which does not count


def test_a_time_is_that_of_one_call_without_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    arms = [clock.arm("bf16", 12.0), clock.arm("training bf16", 99.0, 5.0, 6.0, 7.0, calls=60)]
    one, other = timed(arms, clock.synchronize, rounds=4)
    assert (one.host_us_p20, one.host_us_p50, one.host_us_p80) == (12.0, 12.0, 12.0)
    assert (other.host_us_p50, other.calls_per_round, other.round_count) == (6.5, 60, 4)
    assert other.host_us_p20 < 6.5 < other.host_us_p80 < 99.0
    calls = clock.log[1:]
    assert calls[::2] == ["synchronize"] * 9, "before each round, and at the end"
    assert all({*calls[i : i + 4]} == {"synchronize", "bf16", "training bf16"}
               for i in range(0, 16, 4)), "interleaved"  # fmt: skip


def test_ratios_are_to_functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    arms = [clock.arm("torch.mm", 10.0), clock.arm("bf16", 12.0)]
    first, second = table_of(timed(arms, clock.synchronize, rounds=2))
    assert (first["/ torch.mm"], second["/ torch.mm"]) == (1.0, 1.2)
    assert second["/ torch._scaled_mm"] is None, "was not timed"
    assert (second["regime"], second["call"], second["host us"]) == ("eager", "bf16", 12.0)


@pytest.mark.parametrize(
    ("device", "languages"), [(H200, {"cuda", "torch"}), (MI300X, {"hip", "torch", "triton"})]
)
def test_a_kernel_of_each_language_stands_for_its_calls(
    device: Device, languages: set[str]
) -> None:
    found = representatives(device)
    assert set(found) == languages
    for kernel in found.values():
        assert kernel.quantizes and not kernel.libraries and "emulated" not in kernel.name


def test_every_kind_of_call_runs() -> None:
    """Of the kernels of an H200, emulated, in eager mode and compiled."""
    arms, notes = arms_on(CPU, H200, ("eager", "compiled"))
    assert notes == []
    kinds = {(arm.regime, arm.call, arm.language) for arm in arms}
    assert kinds == {
        (regime, call, language)
        for regime in ("eager", "compiled")
        for call, language in [
            ("bf16", "torch"), ("training bf16", "torch"), (STEP, "torch"),
            *((call, language) for call in (PREPARED, UNPREPARED, TRAINING)
              for language in ("cuda", "torch")),
        ]
    }  # fmt: skip
    for arm in arms:
        if arm.regime == "eager":
            arm.run()
        assert arm.calls == (6 if arm.call in (TRAINING, TRAINING_BF16) else 2)
        assert arm.is_ours is ("bf16" not in arm.call and arm.call != STEP)


def test_a_step_without_products_computes_its_gradients_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms: list[nn.LayerNorm] = []

    class Norm(nn.LayerNorm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            norms.append(self)

    monkeypatch.setattr(host_cost.nn, "LayerNorm", Norm)
    (arm,), notes = arms_on(CPU, H200, ("eager",), (STEP,))
    assert (arm.call, notes) == (STEP, []), "no other kind was asked for"
    arm.run()
    (norm,) = norms
    assert norm.weight.grad is not None
    first = norm.weight.grad.clone()
    arm.run()
    assert first.count_nonzero() and torch.equal(norm.weight.grad, first), "was not added up"


def test_an_unknown_kind_of_call_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'training steps' is unknown; expected some of bf1"):
        host_cost.measure_host_costs(calls=("training steps",))


@pytest.mark.rest
def test_stacks_compile_apart() -> None:
    """Each compiled call finds the graph of its own stack, and gives its results."""
    x = torch.randn(32, 64).bfloat16()
    stacks = [host_cost._stack(CPU) for _ in range(12)]  # more than Dynamo's limit per code object
    with torch.no_grad():
        for stack in stacks:
            torch.testing.assert_close(host_cost._forward_of(stack, "compiled")(x), stack(x))


def test_a_kind_of_call_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler\nand more")

    arms = [Arm("compiled", "bf16", "torch", False, broken, 1),
            Arm("eager", "bf16", "torch", False, lambda: None, 1)]  # fmt: skip
    ready, notes = host_cost._warmed(arms, lambda: None, lokakern.progress.Progress())
    assert ready == arms[1:]
    assert notes == ["compiled bf16 torch was not measured: no compiler"]


@pytest.mark.gpu
def test_every_kind_of_call_is_measured_on_a_gpu() -> None:
    costs, notes = host_cost.measure_host_costs()
    assert notes == []
    calls = {(cost.regime, cost.call) for cost in costs}
    assert calls >= {
        (regime, call)
        for regime in ("eager", "compiled")
        for call in ("bf16", "training bf16", PREPARED, UNPREPARED, TRAINING, STEP)
    } | {("eager", "torch.mm"), ("eager", "torch._scaled_mm")}
    assert all(cost.host_us_p20 > 0.3 for cost in costs)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app(words, prog_name="python -m lokakern.bench")
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out, found.err


def test_the_command_stores_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    asked: list[Any] = []

    def measure(regimes: Any, calls: Any, progress: Any) -> Any:
        asked.append((regimes, calls))
        arms = [clock.arm("torch.mm", 10.0), clock.arm("bf16", 12.5)]
        return timed(arms, clock.synchronize), ["training cuda was not measured: a reason"]

    monkeypatch.setattr(host_cost, "measure_host_costs", measure)
    path = tmp_path / "costs.sqlite"
    code, out, err = run(capsys, "host", "--regime", "eager", "--db", str(path), "--json")
    assert code == 0 and asked == [(["eager"], host_cost.CALLS)]
    assert "training cuda was not measured: a reason" in err
    assert f"2 host costs were added to {path}" in err
    rows = {row["call"]: row for row in json.loads(out)}
    assert rows["bf16"]["host us"] == 12.5 and rows["bf16"]["/ torch.mm"] == 1.25
    stored = {cell.call: cell for cell in load_snapshot([path]).host_costs}
    assert set(stored) == set(rows)
    assert stored["bf16"].host_us_p50 == 12.5 and stored["bf16"].cpu == machine_class().cpu
    run(capsys, "host", "--call", "training step", "--db", str(path), "--quiet")
    assert asked[1] == (["eager", "compiled"], ["training step"]), "both by default"
    assert len(load_snapshot([path]).host_costs) == 4, "facts are added, never changed"


def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "costs.sqlite"
    code, _, err = run(capsys, "host", "--db", str(path))
    assert code == 1 and "MeasurementError: host costs are those of calls on a GPU" in err
    assert not path.exists()
