"""A watched conversion runs products in bfloat16 while FP8 rounds their operands too badly."""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import mods
from lokakern.conversion import drift_judge, drift_watch
from lokakern.conversion.convert import OFF
from lokakern.conversion.drift_watch import (
    SECOND_PART,
    STAYS,
    TO_BF16,
    TO_FLOAT16,
    TO_FP8,
    DriftEvent,
    DriftWatch,
)
from lokakern.conversion.routes import GEMMS
from lokakern.errors import ShapeError, UnsupportedError
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.module_scan import WATCHED
from lokakern.nn.routed_matmul import has_switch, kernels_of, switched, traced_route, turn
from lokakern.probe.replay import replay
from lokakern.probe.windows import SiteWindow, transfers_of
from tests.support import native
from tests.support.conversions import H200, rows_of
from tests.support.measurements import Book, gemm

K, M = 64, 256
EVERY = 2
NOT_RUN = "0/grad_input"


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(K, 48), nn.ReLU(), nn.Linear(48, 32))
    return layers.bfloat16()


def batch(seed: int, small: float = 1.0) -> Tensor:
    """Every second row by that much smaller: a tensorwise scale leaves nothing of them."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    x[::2] *= small
    return x.bfloat16()


class Training:
    """Steps of SGD, after each of which all windows are judged."""

    def __init__(self, model: nn.Module, watch: DriftWatch, call: Any = None) -> None:
        self.watch, self.call, self.done, self.shift = watch, call or model, 0, 0.0
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def run(self, steps: int, small: float = 1.0) -> list[DriftEvent]:
        before = len(self.watch.events)
        for _ in range(steps):
            self.call(batch(self.done, small) + self.shift).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.watch.apply(wait=True)
            self.done += 1
        return self.watch.events[before:]


def swaps(events: list[DriftEvent]) -> dict[str, str]:
    return {f"{e.site}/{e.gemm}": e.action for e in events if e.action != STAYS}


def plain_output(model: nn.Sequential, x: Tensor) -> Tensor:
    first = model[0]
    return nn.functional.linear(x, first.weight, first.bias)


def test_a_second_sample_follows_soon_where_one_left_the_usual_range() -> None:
    every, second = 20, 20 // SECOND_PART
    handle = lokakern.convert(model_of(), kernels="tensor")
    with handle.watch(budget=0.06, every=every) as watch:
        training = Training(handle.model, watch)
        probe: Any = watch._probe
        training.run(5 * every)
        assert probe._windows == 5
        # A batch that is unlike the others: what follows is not, and nothing is judged.
        assert not training.run(1, 1e-5) and not training.run(every - 1)
        assert probe._windows == 7
        training.run(2 * every)
        assert probe._windows == 9
        # From the middle of two samples on: the next one, and another soon.
        training.run(every // 2)
        begun, events = training.done, training.run(every, 1e-5)
        assert swaps(events)["0/output"] == TO_BF16
        assert {event.step - begun for event in events if event.moved} == {every // 2 + second + 1}
        assert probe._windows == 12


def test_a_suspicion_ends_where_a_layer_is_not_called_any_more() -> None:
    every = 20
    handle = lokakern.convert(model_of(), kernels="tensor")
    with handle.watch(budget=0.06, every=every) as watch:
        training = Training(handle.model, watch)
        training.run(6 * every)
        probe: Any = watch._probe
        training.run(1, 1e-5)
        training.call = handle.model[0]
        training.run(every - 1)
        before = probe._windows
        training.run(4 * every)
        assert probe._windows - before <= 4


@pytest.mark.parametrize("regime", ["eager", "compiled", "compiled-graph"])
def test_a_drift_turns_products_off_and_its_end_turns_them_on(regime: str) -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor", regime=regime)
    before = [row["choice"] for row in handle.choices]
    told: list[DriftEvent] = []
    with handle.watch(budget=0.06, every=EVERY, callbacks=[told.append]) as watch:
        training = Training(model, watch)
        first = training.run(4 * EVERY)
        assert {e.action for e in first} == {STAYS}, "judged once, as there is no report"
        assert not training.run(2 * EVERY)
        x = batch(99, 1e-5)
        assert not torch.equal(model[0](x), plain_output(model, x))
        events = training.run(4 * EVERY, 1e-5)
        assert swaps(events)["0/output"] == TO_BF16
        assert watch.in_bf16 == sorted(swaps(events))
        event = next(e for e in events if (e.site, e.gemm) == ("0", "output"))
        assert event.safety == "unsafe"
        assert 6 * EVERY < event.step <= 8 * EVERY, "by two samples after the first six"
        assert "input.row_spread rose from" in event.moved
        assert "row_err" in event.reason
        assert torch.equal(model[0](x), plain_output(model, x))
        (row,) = [r for r in handle.choices if (r["site"], r["gemm"]) == ("0", "output")]
        assert row["choice"] == f"bf16, {OFF}"
        back = training.run(4 * EVERY)
        assert swaps(back) == dict.fromkeys(swaps(events), TO_FP8)
        assert watch.in_bf16 == []
        assert not torch.equal(model[0](x), plain_output(model, x))
    assert told == watch.events
    assert [row["choice"] for row in handle.choices] == before
    assert {row["action"] for row in map(DriftEvent.row, told)} == {STAYS, TO_BF16, TO_FP8}


def test_events_are_the_same_where_the_library_takes_samples_and_compares() -> None:
    found = []
    for in_use in (native.in_use, contextlib.nullcontext):
        with in_use():
            model = model_of()
            handle = lokakern.convert(model, kernels="tensor")
            with handle.watch(budget=0.06, every=1) as watch:
                training = Training(model, watch)
                for steps, small in ((5, 1.0), (3, 1e-5), (3, 1.0)):
                    training.run(steps, small)
                run_on(
                    training, 1, lambda seed: batch(seed).index_fill_(0, torch.tensor(3), torch.inf)
                )
            found.append([event.row() for event in watch.events])
    assert {row["action"] for row in found[0]} == {STAYS, TO_BF16, TO_FP8}
    assert any("nonfinite_rows" in row["moved"] for row in found[0])
    assert found[0] == found[1]


def test_compiled_steps_are_not_compiled_again() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=EVERY) as watch:
        compiled = torch.compile(model, backend="aot_eager")
        training = Training(model, watch, compiled)
        training.run(4 * EVERY)
        counts = torch._dynamo.utils.counters["stats"]
        graphs = counts["unique_graphs"]
        x = batch(99, 1e-5)
        with torch.no_grad():
            wrong = compiled(x)
        graphs_without_gradients = counts["unique_graphs"]
        assert swaps(training.run(4 * EVERY, 1e-5))["0/output"] == TO_BF16
        with torch.no_grad():
            right = compiled(x)
        assert counts["unique_graphs"] == graphs_without_gradients > 0
        assert graphs <= graphs_without_gradients
        assert not torch.equal(wrong, right)


@pytest.mark.parametrize("regime", ["compiled", "compiled-graph"])
@pytest.mark.parametrize("way", ["model", "step", "layers"])
def test_a_step_that_is_not_sampled_is_that_of_an_unwatched_model(regime: str, way: str) -> None:
    """Without hooks, whose guards are checked in each call, and by code that outlasts the watch."""
    model = model_of()
    model.insert(1, nn.LayerNorm(48, dtype=torch.bfloat16))
    handle = lokakern.convert(model, kernels="tensor", regime=regime)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with handle.watch(budget=0.06, every=3) as watch:
        call: Any = model
        if way == "layers":
            for layer in model:
                layer.compile(backend=backend)
        else:
            function = model if way == "model" else lambda x: model(x).float()
            call = torch.compile(function, backend=backend)
        training, probe = Training(model, watch, call), watch._probe
        assert probe is not None
        training.run(2)
        known = len(graphs)
        for _ in range(7):
            hooks = [x for m in model.modules() for x in (m._forward_hooks, m._forward_pre_hooks)]
            hooks += [x._backward_hooks for x in model.parameters()]
            assert any(map(len, filter(None, hooks))) is probe.is_sampling
            training.run(1)
        assert (probe._windows, watch.unseen) == (3, [])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        call(batch(0)).float().square().mean().backward()
    finally:
        torch.compiler.set_stance("default")
    assert len(graphs) == known
    assert way == "layers" or known == 2


def test_calls_are_steps_until_an_optimizer_steps() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=4) as watch:
        for seed in range(7):
            model(batch(seed)).float().square().mean().backward()
            watch.apply(wait=True)
        assert watch.steps == 6
        assert model._forward_pre_hooks
        Training(model, watch).run(3)
        assert watch.steps == 10
        assert not model._forward_pre_hooks
        assert watch._probe is not None
        assert watch._probe._windows == 3


@pytest.mark.parametrize("in_cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "weights_unchanged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_that_are_off_have_the_bits_of_the_unconverted_layer(
    dtype: torch.dtype, keeps: bool, in_cpp: bool
) -> None:
    """Also where FP8 weights are kept: of the weight, too, nothing is rounded to FP8."""
    model = model_of().to(dtype)
    handle = lokakern.convert(model, kernels="row")
    x = batch(0).to(dtype)

    def gradients() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            loss = model(leaf).float().square().mean()
        return [loss, *torch.autograd.grad(loss, [leaf, *model.parameters()])]

    with handle.watch(budget=0.06):
        places = [(name, gemm) for name in handle.sites for gemm in GEMMS]
        kept = handle.weights_unchanged() if keeps else contextlib.nullcontext()
        with native.in_use() if in_cpp else contextlib.nullcontext(), kept:
            on = gradients()
            handle.turn(places, False)
            off = gradients()
    handle.undo()
    plain = gradients()
    assert all(map(torch.equal, off, plain))
    assert not torch.equal(on[1], plain[1])


@pytest.mark.rest  # Inductor compiles two models
def test_compiled_products_that_are_off_have_the_bits_of_the_unconverted_model() -> None:
    """Also where Inductor quantizes an operand in the kernel that computes it."""
    torch.manual_seed(0)
    layers = [nn.LayerNorm(K), nn.Linear(K, 48), nn.ReLU(), nn.Linear(48, 32)]
    model = nn.Sequential(*layers).bfloat16()
    handle = lokakern.convert(model, kernels="row")
    x = batch(0)

    def gradients(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        loss = call(leaf).float().square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]

    with handle.watch(budget=0.06):
        compiled = torch.compile(model)
        on = gradients(compiled)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        handle.turn([(name, gemm) for name in handle.sites for gemm in GEMMS], False)
        off = gradients(compiled)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    handle.undo()
    torch._dynamo.reset()
    plain = gradients(torch.compile(model))
    assert all(map(torch.equal, off, plain))
    assert not torch.equal(on[1], plain[1])


def test_a_report_says_what_is_usual_and_nothing_is_judged_before_it_moves() -> None:
    model = model_of()
    with lokakern.Probe(model, every=1) as probe:
        for seed in range(3):
            model(batch(seed)).float().square().mean().backward()
    report = probe.report(seeds=(0,))
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(report, every=EVERY) as watch:
        training = Training(model, watch)
        assert not training.run(4 * EVERY)
        assert "0/output" in swaps(training.run(4 * EVERY, 1e-5))
        assert watch.unseen == []


def test_products_are_judged_in_turn_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums may cancel ever more, which no number of an operand tells."""
    monkeypatch.setattr(drift_judge, "IN_TURN", 3)
    judged: list[str] = []
    real = drift_judge.replay

    def replay(site: Any, **options: Any) -> Any:
        judged.extend(f"{site.name}/{gemm}" for gemm in options["only"])
        return real(site, **options)

    model = model_of()
    with lokakern.Probe(model, every=1) as probe:
        model(batch(0)).float().square().mean().backward()
    report = probe.report(seeds=(0,))
    monkeypatch.setattr(drift_judge, "replay", replay)
    handle = lokakern.convert(model, kernels="row")
    with handle.watch(report, every=EVERY) as watch:
        training = Training(model, watch)
        assert not training.run(3 * 6 * EVERY)
        # One product in three windows; nothing reads the gradient of the first layer's input.
        assert sorted(judged) == sorted({f"{n}/{g}" for n in "02" for g in GEMMS} - {NOT_RUN})
        with torch.no_grad():  # of mean 4, and sums without it
            model[0].weight -= model[0].weight.mean(dim=1, keepdim=True)
        monkeypatch.setattr(drift_judge.Ranges, "see", lambda *_: {})
        training.shift = 4.0
        events = training.run(3 * 6 * EVERY)
    assert swaps(events)["0/output"] == TO_BF16
    assert {e.action for e in events} == {TO_BF16}


def test_operands_that_are_unsafe_from_the_first_window_on_run_in_bfloat16() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=EVERY) as watch:
        training = Training(model, watch)
        assert "0/output" in swaps(training.run(2 * EVERY, 1e-5))
    x = batch(99, 1e-5)
    assert torch.equal(model[0](x), plain_output(model, x)), "products stay as they are"
    handle.refresh()
    assert not torch.equal(model[0](x), plain_output(model, x)), "chosen anew"


def test_events_are_logged_and_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    quiet = caplog.at_level(logging.INFO, drift_watch.LOGGER.name)
    with quiet, handle.watch(budget=0.06, every=EVERY) as watch:
        Training(model, watch).run(2 * EVERY, 1e-5)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("0/output to bf16, unsafe: row_err" in words for words in warned)
    watch.table()
    assert "products turned off after 4 steps" in capsys.readouterr().out


def test_what_cannot_be_watched_is_refused() -> None:
    serving = lokakern.convert(model_of(), kernels="tensor", inference=True)
    with pytest.raises(UnsupportedError, match="it follows training"):
        serving.watch(budget=0.06)
    handle = lokakern.convert(model_of(), kernels="tensor")
    with pytest.raises(UnsupportedError, match="no budget to judge by: pass budget="):
        handle.watch()
    with pytest.raises(UnsupportedError, match="Probe judges by row_err"):
        handle.watch(budget=lokakern.ErrorBudget(rel_err=1.0))
    with pytest.raises(ShapeError, match="every is 0; expected at least 1 step"):
        handle.watch(budget=0.06, every=0)
    handle.undo()
    with pytest.raises(UnsupportedError, match="was undone"):
        handle.watch(budget=0.06)


def test_a_watched_conversion_is_not_changed_otherwise() -> None:
    handle = lokakern.convert(model_of(), kernels="tensor")
    watch = handle.watch(budget=0.06)
    with watch:
        for change in (handle.refresh, handle.undo, lambda: handle.watch(budget=0.06)):
            with pytest.raises(UnsupportedError, match="stop the watch first"):
                change()
        watch.start()  # without effect
    watch.stop()
    handle.undo()


def test_a_model_without_quantized_layers_is_trained_with_a_warning() -> None:
    model = model_of()
    handle = lokakern.convert(model, 0.06, m_range=(16, 16))
    assert all(not r.text for site in handle.sites.values() for r in site.routes)
    warned = pytest.warns(UserWarning, match="no layer is quantized, and nothing is watched")
    with warned, handle.watch(every=EVERY) as watch:
        model(batch(0)).sum().backward()
    assert (watch.steps, watch.unseen, watch.events) == (0, [], [])


def test_an_error_of_the_thread_is_told_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")

    def fails(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(drift_judge.Transfer, "numbers", fails)
    warned = pytest.warns(UserWarning, match="a window was not judged.*no memory left")
    with warned, handle.watch(budget=0.06, every=EVERY) as watch:
        assert not Training(model, watch).run(2 * EVERY)


def test_an_error_of_the_training_ends_the_watch() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with pytest.raises(ZeroDivisionError), handle.watch(budget=0.06, every=1) as watch:
        Training(model, watch).run(2)
        raise ZeroDivisionError
    assert not model[0]._forward_hooks
    handle.undo()


def test_of_windows_that_nobody_judges_only_the_newest_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, judged = threading.Event(), threading.Event(), []

    def wait(_self: object, window: drift_judge.Window) -> None:
        judged.append(next(iter(window.sites)))
        begun.set()
        goes_on.wait()

    monkeypatch.setattr(drift_judge.DriftJudge, "_judge", wait)
    judge = drift_judge.DriftJudge({}, None, lokakern.ErrorBudget(row_err=0.06), set)
    for step in range(5):
        judge.put({str(step): SiteWindow(K, K, torch.device("cpu"))})
        begun.wait()
    goes_on.set()
    judge.wait()
    judge.end(wait=True)
    assert judged == ["0", "3", "4"]


def test_a_watch_starts_again_and_knows_what_is_off() -> None:
    """Also another watch, and where the optimizer is another one."""
    for regime in ("eager", "compiled"):
        model = model_of()
        handle = lokakern.convert(model, kernels="tensor", regime=regime)
        watch = handle.watch(budget=0.06, every=EVERY)
        with watch:
            assert "0/output" in swaps(Training(model, watch).run(2 * EVERY, 1e-5))
        off, steps = watch.in_bf16, watch.steps
        with pytest.raises(UnsupportedError, match=f"a watch turned off {len(off)} products"):
            handle.tune(lambda: None)
        with watch:
            watch.apply(wait=True)
            assert watch.in_bf16 == off
            Training(model, watch).run(2 * EVERY, 1e-5)
            assert (watch.in_bf16, watch.steps) == (off, steps + 2 * EVERY)
        with handle.watch(budget=0.06, every=EVERY) as other:
            assert other.in_bf16 == off
            assert swaps(Training(model, other).run(2 * EVERY)) == dict.fromkeys(off, TO_FP8)
        assert watch.in_bf16 == other.in_bf16 == []
        handle.undo()
        with pytest.raises(UnsupportedError, match="undone"):
            watch.start()


def test_evaluation_is_no_part_of_a_window() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=EVERY) as watch:
        training = Training(model, watch)
        for _ in range(8):
            model.eval()
            with torch.no_grad():
                for seed in range(20):
                    model(batch(seed))
            model.train()
            training.run(1, 1e-5)
        assert "0/output" in watch.in_bf16
        assert {e.gemm for e in watch.events} == set(GEMMS)


def test_gradients_are_judged_first_when_there_are_some() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=1) as watch:
        for seed in range(3):
            model(batch(seed))
            watch._probe.step()
            watch.apply(wait=True)
        assert {e.gemm for e in watch.events} == {"output"}
        assert len(watch.events) == len(handle.sites)
        small = torch.ones(M, 1)
        small[::2] = 1e-7
        for seed in range(3):
            (model(batch(seed)).float() * small).sum().backward()
            watch._probe.step()
            watch.apply(wait=True)
        assert "2/grad_input" in watch.in_bf16


def test_batches_of_few_rows_decide_nothing() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=1) as watch:
        for _ in range(4):
            model(batch(0)[:48]).float().square().mean().backward()
            watch._probe.step()
            watch.apply(wait=True)
        assert watch.events == []
        model(batch(0, 1e-5)).float().square().mean().backward()
        watch._probe.step()
        watch.apply(wait=True)
        assert "0/output" in watch.in_bf16


def test_a_newer_conversion_is_not_turned() -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=EVERY) as watch:
        newer = lokakern.convert(model, kernels="row")
        with pytest.warns(UserWarning, match="a newer conversion determines the kernels of 0"):
            assert not swaps(Training(model, watch).run(2 * EVERY, 1e-5))
    with pytest.raises(UnsupportedError, match="a newer conversion determines the kernels of 0, 2"):
        watch.start()
    newer.undo()
    with watch:
        pass


def test_a_callback_that_fails_ends_no_training() -> None:
    model = model_of()
    told: list[DriftEvent] = []

    def fails(_event: DriftEvent) -> None:
        raise ConnectionError("no server")

    handle = lokakern.convert(model, kernels="tensor")
    warned = pytest.warns(UserWarning, match="failed: ConnectionError.*no server")
    with warned, handle.watch(budget=0.06, every=EVERY, callbacks=[fails, told.append]) as watch:
        Training(model, watch).run(2 * EVERY)
    assert told == watch.events != []


def test_products_without_a_module_are_told() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)
            self.attention = nn.MultiheadAttention(K, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return self.attention(x, x, x)[0]

    model = Attending().bfloat16()
    handle = lokakern.convert(model, kernels="tensor")
    warned = pytest.warns(UserWarning, match="attention.*are quantized, and not watched")
    with warned, handle.watch(budget=0.06) as watch:
        pass
    assert set(watch.unseen) == set(handle.sites)


def test_a_switch_is_a_part_of_a_route() -> None:
    route = "row;16:0=,64=cuda.a+cuda.b,128=~cuda.c+cuda.b;1:0="
    marked = switched(route, "x.1.output") + ";check=1:64:0.06:1:0/output"
    assert kernels_of(marked) == route
    assert has_switch(marked) and not has_switch(route)
    assert traced_route(marked) == (
        "row;16:0=,64=cuda.a+cuda.b,128=;1:0=;switch=x.1.output;check=1:64:0.06:1:0/output"
    )
    assert switched("", "x") == ""
    turn(["x.1.output"], False)
    turn(["x.1.output"], True)


# ---- float16 ----


class ScaledTraining:
    """Steps under autocast to float16 with a scaler, whose scale overflows at first."""

    def __init__(
        self, model: nn.Sequential, watch: DriftWatch, where: str = "cpu", fused: bool = False
    ) -> None:
        self.model, self.watch, self.where, self.done = model, watch, where, 0
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-6, fused=fused)
        self.scaler = torch.amp.GradScaler(where, init_scale=2.0**28, growth_interval=3)
        self.scales = [self.scaler.get_scale()]

    def run(self, steps: int, small: float = 1.0, large: float = 1.0) -> list[DriftEvent]:
        before = len(self.watch.events)
        for _ in range(steps):
            x = batch(self.done, small).float().to(self.where)
            x[1::8] *= large
            with torch.autocast(self.where, torch.float16):
                loss = self.model(x).float().square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.watch.apply(wait=True)
            self.scales.append(self.scaler.get_scale())
            self.done += 1
        return self.watch.events[before:]

    def overflows(self) -> int:
        return sum(b < a for a, b in itertools.pairwise(self.scales))


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_scale_that_changes_is_no_drift_and_a_drift_is_found(
    every: int, fused: bool, where: str
) -> None:
    """Optimizers with ``fused=True`` are called in steps that are skipped, too."""
    model = model_of().float().to(where)
    handle = lokakern.convert(model, kernels="tensor", dtype=torch.float16)
    with handle.watch(budget=0.06, every=every) as watch:
        training = ScaledTraining(model, watch, where, fused)
        events = training.run(40)
        assert training.overflows() >= 8 and max(training.scales[10:]) > min(training.scales[10:])
        assert {event.action for event in events} == {STAYS}
        assert {event.safety for event in events} == {"safe"}
        assert len(events) == 5 and not any(event.moved for event in events), "the first judgement"
        events = training.run(10 * every, 1e-5)
        assert swaps(events)["0/output"] == TO_FLOAT16
        event = next(e for e in events if (e.site, e.gemm) == ("0", "output"))
        assert event.safety == "unsafe" and "input.row_spread rose from" in event.moved
        (row,) = [r for r in handle.choices if (r["site"], r["gemm"]) == ("0", "output")]
        assert row["choice"] == f"float16, {OFF}"
        x = batch(99, 1e-5).float().to(where)
        with torch.autocast(where, torch.float16):
            off, plain = model[0](x).double(), plain_output(model, x).double()
        assert (off - plain).norm() <= 1e-3 * plain.norm(), "with FP8 it is 0.04"
        back = training.run(10 * every)
        assert watch.in_bf16 == [] and swaps(back)["0/output"] == TO_FP8


def test_inputs_that_overflow_are_told_at_once() -> None:
    """No scale of a loss does that."""
    model = model_of().float()
    handle = lokakern.convert(model, kernels="tensor", dtype=torch.float16)
    with handle.watch(budget=0.06, every=1) as watch:
        training = ScaledTraining(model, watch, fused=True)
        assert {event.action for event in training.run(12)} == {STAYS}
        events = training.run(1, large=1e6)  # finite in float32; the next layer's are infinite
    moved = {event.site: event.moved for event in events}
    assert "input.nonfinite_rows rose from 0 to 0.125" in moved["2"]
    assert "inputs up to " in next(e.reason for e in events if e.site == "0")


def test_a_report_in_the_other_dtype_watches_nothing() -> None:
    model = model_of()
    with lokakern.Probe(model, every=1) as probe:
        model(batch(0)).float().square().mean().backward()
    for dtype, words in (
        (torch.float16, "0 multiplies in bfloat16, and the report judges it in float16: probe"),
        (torch.bfloat16, "0 multiplies in float16, and the report judges it in bfloat16: probe"),
    ):
        report = probe.report(seeds=(0,), dtype=dtype)
        own = torch.bfloat16 if dtype is torch.float16 else torch.float16
        handle = lokakern.convert(model.to(own), kernels="tensor")
        with pytest.raises(UnsupportedError, match=words):
            handle.watch(report)
        handle.undo()
        handle = lokakern.convert(model.to(dtype), kernels="tensor")
        with handle.watch(report, every=1) as watch:
            for seed in range(3):
                model(batch(seed).to(dtype)).float().square().mean().backward()
                watch.apply(wait=True)
        assert not swaps(watch.events)
        handle.undo()


def small_rows(seed: int) -> Tensor:
    """A third of the rows so small that the spread of rows moves, and no median does."""
    x = batch(seed)
    x[::3] *= 1e-5
    return x


def run_on(training: Training, steps: int, make: Callable[[int], Tensor]) -> list[DriftEvent]:
    before = len(training.watch.events)
    for seed in range(steps):
        training.call(make(seed)).float().square().mean().backward()
        training.optimizer.step()
        training.watch.apply(wait=True)
    return training.watch.events[before:]


def test_a_window_without_memory_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    failing = [True]

    def fails_once(sites: Any) -> Any:
        if failing and failing.pop():
            raise torch.OutOfMemoryError("no memory left")
        return transfers_of(sites)

    monkeypatch.setattr(drift_judge, "transfers_of", fails_once)
    with handle.watch(budget=0.06, every=1) as watch:
        training = Training(model, watch)
        with pytest.warns(UserWarning, match="a window was not judged.*no memory left"):
            events = training.run(4)
    assert {event.site for event in events} == {"0", "2"}


def test_what_moved_is_judged_by_the_next_window_where_a_judgement_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    failing = [True]

    def fails_once(*args: Any, **options: Any) -> Any:
        if failing and failing.pop():
            raise RuntimeError("no memory left")
        return replay(*args, **options)

    monkeypatch.setattr(drift_judge, "replay", fails_once)
    with handle.watch(budget=0.06, every=1) as watch:
        training = Training(model, watch)
        with pytest.warns(UserWarning, match="a window was not judged.*no memory left"):
            first = training.run(2)
        assert {(e.site, e.action) for e in first} == {("0", STAYS), ("2", STAYS)}
        assert not training.run(4)
        failing.append(True)
        with pytest.warns(UserWarning, match="a window was not judged.*no memory left"):
            events = run_on(training, 3, small_rows)
    (event,) = [e for e in events if e.action == TO_BF16]
    assert (event.site, event.gemm, event.step) == ("0", "output", 9)
    assert "input.row_spread rose from" in event.moved


def test_gradients_that_come_after_an_optimizer_stepped_belong_to_the_window() -> None:
    """As where each parameter has an optimizer that steps within the backward pass."""
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-6)

        def update(p: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    with handle.watch(budget=0.06, every=2) as watch:
        for seed in range(8):
            model(batch(seed)).float().square().mean().backward()
            watch.apply(wait=True)
    judged = {f"{e.site}/{e.gemm}" for e in watch.events}
    assert judged == {f"{name}/{gemm}" for name in "02" for gemm in GEMMS} - {NOT_RUN}


def test_watches_of_two_models_with_layers_of_one_name_judge_both() -> None:
    models = [model_of(), model_of()]
    watches = [lokakern.convert(m, kernels="tensor").watch(budget=0.06, every=1) for m in models]
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("error")
        for watch in watches:
            stack.enter_context(watch)
        for step in range(12):
            for model, watch in zip(models, watches, strict=True):
                x = small_rows(step) if step >= 6 else batch(step)
                model(x).float().square().mean().backward()
                watch._probe.step()  # type: ignore[union-attr]
            for watch in watches:
                watch.apply(wait=True)
    assert [watch.in_bf16 for watch in watches] == [["0/output"]] * 2


EXITS = """
import sys, threading, time
import lokakern, torch
from lokakern.conversion import drift_judge
from tests.conversion.test_drift_watch import model_of
begun = threading.Event()
def slow(*args, **options):
    begun.set()
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    torch.ones(300, 300) @ torch.ones(300, 300)
    sys.stderr.write("replayed")
    return []
drift_judge.replay = slow
model = model_of()
watch = lokakern.convert(model, kernels="tensor").watch(budget=0.06, every=1)
watch.start()
x = torch.randn(256, 64).bfloat16()
model(x).float().square().mean().backward()
watch._probe.step()
begun.wait()
sys.exit(7)
"""


def test_the_end_of_the_program_waits_for_a_judgement() -> None:
    """A thread that ends within PyTorch aborts the process: exit status -6."""
    found = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True)
    assert found.returncode == 7, found.stderr
    assert "replayed" in found.stderr


# --- what hooks that come and go must not change


@pytest.mark.parametrize("is_compiled", [False, True])
def test_all_steps_have_the_scales_that_are_judged(is_compiled: bool, tmp_path: Path) -> None:
    """Of a sampled step hooks take static scales away: no other step has them either."""
    rows = [
        row
        for m, bf16, by_row in ((16, 2.0, 1.0), (256, 4.0, 3.0), (1024, 16.0, 8.0))
        for row in rows_of(gemm(m, 64, 256), bf16=bf16, row=by_row, errors=m == 16)
    ]
    Book(tmp_path / "rows.sqlite").write(*rows).use()
    torch.manual_seed(0)
    # The norm bounds the layer's input, to which a static scale belongs.
    layers = BlockRMSNorm(256, 256), nn.ReLU(), nn.Linear(256, 64, bias=False)
    model = nn.Sequential(*layers).bfloat16()
    handle = lokakern.convert(model, 0.06, distribution="X1", device=H200)
    call = torch.compile(model, backend="aot_eager") if is_compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-8)
    x = torch.randn(M, 256).abs() * 1e-5
    x[:, 0] = -1.0  # most of a row's norm, which the relu takes away
    x = x.bfloat16()
    kind = type(model)
    assert handle._has_scales and kind is not nn.Sequential
    with handle.watch(budget=0.06, every=3) as watch:
        assert type(model) is kind, "compilers would not enter another one"
        probe: Any = watch._probe
        outputs: dict[bool, Tensor] = {}
        for _ in range(6):
            is_sampled = probe.is_sampling
            y = outputs[is_sampled] = call(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.apply(wait=True)
    assert torch.equal(outputs[False], outputs[True])
    assert handle._has_scales and not torch.equal(call(x), outputs[True])


def test_hooks_of_users_stay_in_their_order() -> None:
    model = model_of()
    model.insert(1, nn.LayerNorm(48, dtype=torch.bfloat16))
    handle = lokakern.convert(model, kernels="tensor")
    called: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    with handle.watch(budget=0.06, every=3) as watch:
        layer, norm, weight = model[0], model[1], model[0].weight
        handles = [
            layer.register_forward_hook(noted("before"), prepend=True),
            layer.register_forward_hook(noted("behind")),
            norm.register_forward_pre_hook(noted("behind norm's")),
        ]
        before = list(layer._forward_hooks), list(norm._forward_pre_hooks)
        of_weight = weight._backward_hooks
        probe: Any = watch._probe
        Training(model, watch).run(3)
        assert probe.is_sampling
        for place, hooks in zip(
            before, (layer._forward_hooks, norm._forward_pre_hooks), strict=True
        ):
            (ours,) = set(place) - {handle.id for handle in handles}
            (now,) = hooks.keys() - {handle.id for handle in handles}
            assert [now if key == ours else key for key in place] == list(hooks)
        # A setter of torch would drop the hooks that C++ has.
        assert weight._backward_hooks is of_weight
        Training(model, watch).run(1)
        assert not probe.is_sampling
        handles.append(layer.register_forward_hook(noted("first"), prepend=True))
        Training(model, watch).run(2)
        assert probe.is_sampling
        called.clear()
        Training(model, watch).run(2)
    assert called[:2] == ["first", "before"] == called[-4:-2]


def test_mods_leave_what_is_watched_alone() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, 32), nn.Linear(K, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).relu() * self.b(x)

    model = Gated().bfloat16()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=5) as watch:
        training = Training(model, watch)
        training.run(2)
        assert not any(x.is_done for x in mods.apply(model, [mods.FuseShared()]))
        training.run(5)
        assert watch.unseen == []
    assert any(x.is_done for x in mods.apply(model, [mods.FuseShared()]))


def test_what_two_watch_is_watched_until_both_end() -> None:
    model = model_of()
    first = lokakern.convert(model, kernels="tensor").watch(budget=0.06, every=3)
    first.start()
    newer = lokakern.convert(model, kernels="tensor")
    with newer.watch(budget=0.06, every=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first.stop()
        assert set(WATCHED.values()) == {1}
    assert not len(WATCHED)


@pytest.mark.parametrize("name", ["DriftJudge", "_WindowProbe"])
def test_a_watch_that_does_not_begin_leaves_the_conversion_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    handle = lokakern.convert(model_of(), kernels="tensor")
    with monkeypatch.context() as patch:
        patch.setattr(drift_watch, name, refuse)
        with pytest.raises(RuntimeError, match="no room"):
            handle.watch(budget=0.06).start()
    assert not len(WATCHED)
    with handle.watch(budget=0.06):
        pass
    handle.undo()


def test_a_hook_that_goes_while_another_thread_calls_the_module() -> None:
    """torch then calls it without the arguments by name."""
    model = model_of()
    handle = lokakern.convert(model, kernels="tensor")
    with handle.watch(budget=0.06, every=3):
        (hook,) = model[0]._forward_hooks.values()
        x = batch(0)
        assert hook(model[0], (x,), model[0](x)) is None
