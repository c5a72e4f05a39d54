"""`Conversion.tune` with times from a script, so that no test depends on a clock."""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lokakern
from lokakern.conversion import tune as tune_module
from lokakern.conversion.convert import Conversion
from lokakern.conversion.paired_timing import Ratio, StepTimer, Variant, compare, interval
from lokakern.conversion.tune import Tuning, tune
from lokakern.conversion.tuning_file import check, read
from lokakern.conversion.variants import LAYOUT, observed_rows
from lokakern.errors import ChoicesError, MeasurementError, UnknownNameError, UnsupportedError
from lokakern.measure import timing
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.linear import Linear, PlainLinear
from lokakern.nn.routed_matmul import EAGER, kernel_at
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.selection import dispatcher
from lokakern.types import Format, Granularity
from lokakern.workloads.gemm_cases import prepared_weight
from tests.support.conversions import H200, K, N, measured, rows_of
from tests.support.measurements import Book, gemm

M = 256
Product = tuple[str, str]  # site and gemm
On = set[Product]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Book:
    return Book(tmp_path_factory.mktemp("book") / "rows.sqlite").write(*measured())


@pytest.fixture
def known(written: Book) -> Iterator[Book]:
    written.use()
    yield written
    dispatcher.use_snapshot(None)


convert = functools.partial(lokakern.convert, distribution="X1", device=H200)


def model_of() -> nn.Sequential:
    """Layers 0 and 4 are alike; layers 2 and 6 were never measured."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K), nn.ReLU(), nn.Linear(K, N), nn.Tanh(),
        nn.Linear(N, 1),
    ).bfloat16()  # fmt: skip


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Script:
    """A timer whose times follow from the products that are quantized."""

    def __init__(
        self, handle: Conversion, cost: Callable[[On], float], *, noise: float = 0.0,
        prepare_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.handle, self.cost, self.noise, self.prepare_s = handle, cost, noise, prepare_s
        self.seconds, self.prepared, self.random = 0.0, list[Variant](), random.Random(0)

    def __call__(
        self, step: Callable[[], object], switch: Callable[[Variant], None],
        device: torch.device, graph: bool,
    ) -> Script:  # fmt: skip
        self.step, self.switch = step, switch
        return self

    def on(self) -> On:
        sites = self.handle.sites.values()
        return {(s.name, r.gemm) for s in sites for r in s.routes if kernel_at(r.text, M)}

    def prepare(self, variant: Variant) -> float:
        if variant in self.prepared:
            return 0.0
        self.switch(variant)
        self.step()
        self.prepared.append(variant)
        self.seconds += self.prepare_s
        return self.prepare_s

    def step_us(self, variant: Variant) -> float:
        self.switch(variant)
        self.seconds += 0.001
        return self.cost(self.on()) * (1 + self.random.gauss(0, self.noise))

    def clock_mhz(self) -> float | None:
        return None

    def keep(self, variants: Collection[Variant]) -> None:
        pass

    def now(self) -> float:
        return self.seconds


def training_step(model: nn.Module) -> Callable[[], object]:
    x = rows()
    return lambda: model(x).float().square().sum().backward()


def cost_of(gains_us: dict[str, float]) -> Callable[[On], float]:
    """A step of 100 us, less a gain for each quantized product by its gemm."""
    return lambda on: 100.0 - sum(gains_us[gemm] for _, gemm in on)


def run(gains_us: dict[str, float], **options: Any) -> tuple[Tuning, Conversion, nn.Module]:
    model = model_of()
    handle = convert(model, 0.06)
    script = Script(handle, cost_of(gains_us), noise=options.pop("noise", 0.0),
                    prepare_s=options.pop("prepare_s", 1.0))  # fmt: skip
    found = tune(handle, training_step(model), make_timer=script, **options)
    return found, handle, model


def quantized(handle: Conversion) -> set[str]:
    sites = handle.sites.values()
    return {r.gemm for s in sites for r in s.routes if kernel_at(r.text, M)}


# ---- what is kept


def test_groups_that_gain_are_kept_and_others_dropped(known: Book) -> None:
    gains = {"output": 5.0, "grad_input": -3.0, "grad_weight": 1.0}
    found, handle, _ = run(gains)
    assert quantized(handle) == {"output", "grad_weight"}
    assert [t.group.sites for t in found.groups] == [("0", "4")] * 3
    assert {t.group.gemm: t.is_kept for t in found.groups} == {
        "output": True, "grad_input": False, "grad_weight": True,
    }  # fmt: skip
    assert found.before is not None and found.after is not None
    assert found.before.value == pytest.approx(100 / 94)
    assert found.after.value == pytest.approx(100 / 88)
    gain_us = {t.group.gemm: t.gain_us for t in found.groups}
    assert gain_us == pytest.approx({"output": 10.0, "grad_input": -6.0, "grad_weight": 2.0})
    assert "loses in place" in handle.sites["0"].routes[1].why


def test_the_largest_predicted_gain_comes_first(known: Book) -> None:
    found, _, _ = run({"output": 1.0, "grad_input": 1.0, "grad_weight": 1.0})
    predicted = [t.group.predicted_us for t in found.groups]
    assert predicted == [6.0, 4.0, 2.0]  # of two sites, at m = 256
    assert [t.group.gemm for t in found.groups] == ["grad_weight", "grad_input", "output"]


@pytest.mark.parametrize("seed", range(5))
def test_decisions_hold_under_noise(known: Book, seed: int) -> None:
    """Noise of 2 % in each time, and gains of 4, -4 and 0 %: what gains nothing may go."""
    model = model_of()
    handle = convert(model, 0.06)
    script = Script(handle, cost_of({"output": 2.0, "grad_input": -2.0, "grad_weight": 2.0}),
                    noise=0.02)  # fmt: skip
    script.random.seed(seed)
    found = tune(handle, training_step(model), make_timer=script)
    assert quantized(handle) == {"output", "grad_weight"}
    assert found.after is not None and found.after.low > 1


def test_a_group_without_a_certain_gain_is_dropped(known: Book) -> None:
    found, handle, _ = run({"output": 5.0, "grad_input": 0.0, "grad_weight": 0.0}, noise=0.01)
    assert quantized(handle) == {"output"}
    assert {t.gain.low <= 1 for t in found.groups if t.gain and not t.is_kept} == {True}


def test_gains_below_the_noise_count_together(known: Book) -> None:
    """Each group gains 0.4 %, and an interval of 64 rounds is about 0.5 % to each side."""
    found, handle, _ = run({"output": 0.2, "grad_input": 0.2, "grad_weight": 0.2}, noise=0.02)
    together = [t.together for t in found.groups]
    assert len(quantized(handle)) == 3 and max(together) > 1
    assert found.after is not None and found.after.low > 1


def test_where_nothing_gains_the_model_is_that_of_linear_layers_to_the_bit(known: Book) -> None:
    found, handle, model = run({"output": -1.0, "grad_input": -1.0, "grad_weight": -1.0})
    assert found.after is None and not quantized(handle)
    plain, x = model_of(), rows(2)
    y, expected = model(x), plain(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None)
    assert "nothing is quantized" in found.summary


def test_a_whole_that_does_not_gain_is_dropped(known: Book) -> None:
    """Each group gains beside the others, all of them together lose."""

    def cost(on: On) -> float:
        gemms = {gemm for _, gemm in on}
        return {0: 100.0, 1: 120.0, 2: 115.0, 3: 110.0}[len(gemms)]

    model = model_of()
    handle = convert(model, 0.06)
    found = tune(handle, training_step(model), make_timer=Script(handle, cost))
    assert found.after is None and not quantized(handle)
    assert "but the step does not" in handle.sites["0"].routes[0].why


def test_little_time_decides_groups_together(known: Book) -> None:
    """Variants of 10 s: two for the whole, one for a group, one for the others, and the last."""
    gains = {"output": -1.0, "grad_input": 2.0, "grad_weight": 3.0}
    found, handle, _ = run(gains, prepare_s=10.0, time_limit=52.0)
    assert found.is_timed_out and [t.together for t in found.groups] == [1, 2, 2]
    assert quantized(handle) == {"output", "grad_input", "grad_weight"}
    found, handle, _ = run(gains, prepare_s=10.0, time_limit=25.0)
    assert found.is_timed_out and found.variants == 2
    assert [t.gain for t in found.groups] == [None] * 3
    assert found.after is not None and len(quantized(handle)) == 3
    found, handle, _ = run({**gains, "output": -9.0}, prepare_s=10.0, time_limit=25.0)
    assert found.after is None and not quantized(handle)


def test_each_variant_is_prepared_once(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    script = Script(handle, cost_of({"output": 1.0, "grad_input": -1.0, "grad_weight": 1.0}))
    found = tune(handle, training_step(model), make_timer=script)
    assert len(script.prepared) == found.variants == 5  # on, off, and without each group


def test_a_refresh_forgets_a_tuning(known: Book) -> None:
    _, handle, _ = run({"output": -1.0, "grad_input": -1.0, "grad_weight": -1.0})
    changed = handle.refresh(0.06)
    assert len(changed) == 6 and len(quantized(handle)) == 3


def test_tuning_again_starts_from_the_choices(known: Book, tmp_path: Path) -> None:
    _, handle, model = run({"output": -1.0, "grad_input": 1.0, "grad_weight": 1.0})
    gains = {"output": 1.0, "grad_input": -1.0, "grad_weight": 1.0}
    found = tune(handle, training_step(model), make_timer=Script(handle, cost_of(gains)))
    assert quantized(handle) == {"output", "grad_weight"}
    found.save(tmp_path / "tuned.json")
    again = convert(model_of(), 0.06, tuned=tmp_path / "tuned.json")
    assert quantized(again) == {"output", "grad_weight"}


def test_a_tuning_that_fails_leaves_an_earlier_one(book: Book) -> None:
    model, handle = inference_model(book)
    cost: Callable[[On], float] = lambda on: 90.0 + len(on)  # noqa: E731
    tune(handle, predict(model), make_timer=Script(handle, cost))
    assert not list(model.buffers())

    def fail() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        tune(handle, fail, make_timer=Script(handle, cost))
    assert not list(model.buffers()) and not quantized(handle)
    handle.refresh(0.06)
    assert len(list(model.buffers())) > 2 and quantized(handle) == {"output"}


def test_choices_show_what_runs(known: Book) -> None:
    _, handle, _ = run({"output": -1.0, "grad_input": 1.0, "grad_weight": 1.0})
    row = next(r for r in handle.choices if (r["site"], r["gemm"]) == ("0", "output"))
    assert row["choice"] == "bf16" and row["us"] == [2.0, 4.0, 16.0]
    assert "loses in place" in row["why"]


def test_grad_products_of_a_step_without_gradients_are_not_tuned(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)

    def step() -> object:
        with torch.no_grad():
            return model(rows())

    script = Script(handle, cost_of(dict.fromkeys(("output", "grad_input", "grad_weight"), -1.0)))
    found = tune(handle, step, make_timer=script)
    assert [t.group.gemm for t in found.groups] == ["output"] and found.variants == 2
    assert quantized(handle) == {"grad_input", "grad_weight"}


def test_a_step_without_quantized_products_has_nothing_to_tune(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    step = functools.partial(model, rows()[:7])
    found = tune(handle, step, make_timer=Script(handle, lambda on: 1.0))
    assert found.before is None and found.variants == 0 and not found.groups
    assert "nothing to tune" in found.summary


def test_products_without_kernels_at_the_rows_of_the_step_are_those_of_linear_layers(
    book: Book, tmp_path: Path
) -> None:
    """The kernel of layer 0 is for 256 rows and more."""
    model, handle = inference_model(book)
    timer = Script(handle, lambda on: 1.0)
    with torch.no_grad():
        others = functools.partial(model[2:4], torch.randn(16, N).bfloat16())
        assert not tune(handle, others, make_timer=timer).idle  # it is not called
        assert quantized(handle) == {"output"} and type(model[0]) is Linear
        found = tune(handle, functools.partial(model[:2], rows()[:16]), make_timer=timer)
    assert found.idle == ("0/output",) and "0/output" in found.summary and not found.groups
    assert type(model[0]) is PlainLinear and not model[0]._buffers
    assert "no kernel runs at the rows of the step, 16" in handle.sites["0"].routes[0].why

    found.save(tmp_path / "tuned.json")
    again, _ = inference_model(book, tuned=tmp_path / "tuned.json")
    assert type(again[0]) is PlainLinear
    handle.refresh(0.06)
    assert type(model[0]) is Linear and model[0].is_frozen


def test_products_with_a_kernel_at_some_rows_of_the_step_are_not_idle(book: Book) -> None:
    model, handle = inference_model(book)

    def step() -> None:
        with torch.no_grad():
            model(rows()), model(rows()[:16])

    found = tune(handle, step, make_timer=Script(handle, lambda on: 100.0 - len(on)))
    assert not found.idle and quantized(handle) == {"output"}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_layer_of_which_a_product_stays_keeps_those_for_other_rows(
    known: Book, keeps: bool
) -> None:
    """At 64 rows the gradient of the input has a kernel, the two other products have not."""
    model = model_of()
    handle = convert(model, 0.06)

    def step() -> None:
        model(rows()[:64].requires_grad_()).float().square().sum().backward()

    def gain(on: On) -> float:
        is_on = any(kernel_at(s.routes[1].text, 64) for s in handle.sites.values() if s.routes)
        return 90.0 if is_on == keeps else 100.0

    found = tune(handle, step, make_timer=Script(handle, gain))
    assert [t.group.gemm for t in found.groups] == ["grad_input"]
    assert quantized(handle) == ({"output", "grad_input", "grad_weight"} if keeps else set())
    assert {type(model[0]), type(model[4])} == {Linear if keeps else PlainLinear}
    idle = {f"{name}/{gemm}" for name in "04" for gemm in ("output", "grad_weight")}
    assert set(found.idle) == (set() if keeps else idle)


def test_a_layout_that_stays_keeps_the_product_for_other_rows(book: Book) -> None:
    """In eager calls only: compiled ones hold the weight in another layout."""
    model, handle = inference_model(book)
    text = re.sub(r"=(?=\w)", f"={EAGER}", handle.sites["0"].routes[0].text)
    eager = replace(handle.sites["6"].routes[0], text=text)
    handle.untuned = {**handle.untuned, "6": (eager, *handle.sites["6"].routes[1:])}
    handle.use_routes({"6": handle.untuned["6"]})
    assert model[6].is_held
    held: Callable[[On], float] = lambda on: 90.0 if model[6].is_held else 100.0  # noqa: E731
    x = torch.randn(16, 63).bfloat16()
    with torch.no_grad():
        found = tune(handle, functools.partial(model[6:], x), make_timer=Script(handle, held))
    assert [(t.group.kernels, t.is_kept) for t in found.groups] == [((LAYOUT,), True)]
    assert not found.idle and model[6].is_held


def test_the_real_timer_times_a_step(known: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them is faster is not known here, where kernels are emulated."""
    model = model_of()
    handle = convert(model, 0.06)
    monkeypatch.setattr(tune_module, "refuse_emulation", lambda _conversion: None)
    monkeypatch.setitem(tune_module.TIME_LIMIT_S, False, 0.0)
    found = handle.tune(training_step(model), rounds=8)
    assert found.before is not None and 0 < found.before.low <= found.before.high
    assert found.before.one_us > 0 and found.variants == 2


@pytest.mark.parametrize("kernels", [None, "row"])
def test_emulated_kernels_are_not_timed(known: Book, kernels: str | None) -> None:
    """Forced kernels of a CPU are emulations, too."""
    model = model_of()
    handle = convert(model, 0.06) if kernels is None else lokakern.convert(model, kernels=kernels)
    before = quantized(handle)

    def step() -> None:
        raise AssertionError("the step ran")

    of = "NVIDIA H200" if kernels is None else "GPUs"
    with pytest.raises(UnsupportedError, match=f"kernels of {of} are emulated on this CPU, such"):
        handle.tune(step)
    assert quantized(handle) == before and before


def test_a_time_limit_cuts_comparisons_off(known: Book) -> None:
    """Variants of 10 s: two of the first comparison, a third for the first group."""
    gains = {"output": 2.0, "grad_input": 2.0, "grad_weight": -3.0}
    calls: list[float] = []
    for limit, is_refused in ((15.0, True), (20.01, True), (29.0, False)):
        model = model_of()
        handle = convert(model, 0.06)
        script = Script(handle, cost_of(gains), prepare_s=10.0)

        def step(model: nn.Module = model, script: Script = script) -> None:
            calls.append(script.seconds)
            training_step(model)()

        calls.clear()
        with (
            pytest.raises(MeasurementError, match=f"time_limit={limit:g} passed before")
            if (is_refused)
            else contextlib.nullcontext()
        ):
            found = tune(handle, step, make_timer=script, time_limit=limit)
        assert max(calls) <= limit and script.seconds <= limit + 10.0
        assert len(quantized(handle)) == 3  # as before, or as first compared
    assert found.is_timed_out and found.after == found.before
    assert {t.gain for t in found.groups} == {None}


@pytest.mark.parametrize(("rounds", "is_refused"), [(7.5, True), (8.5, False), (20.5, False)])
def test_a_comparison_that_is_cut_off_has_the_rounds_before(
    known: Book, rounds: float, is_refused: bool
) -> None:
    """Without a gain rounds go on to the limit, which ends amid one."""
    model = model_of()
    handle = convert(model, 0.06)
    same = dict.fromkeys(("output", "grad_input", "grad_weight"), 0.0)
    script = Script(handle, cost_of(same), prepare_s=10.0, noise=0.05)
    limit = 20.0 + rounds * 4 * 0.001
    if is_refused:
        with pytest.raises(MeasurementError, match="in 8 rounds"):
            tune(handle, training_step(model), make_timer=script, time_limit=limit)
        return
    found = tune(handle, training_step(model), make_timer=script, time_limit=limit)
    assert found.before is not None and found.before.rounds == int(rounds)
    assert found.is_timed_out and found.after is None and not quantized(handle)


def test_an_outcome_that_is_cut_off_is_that_of_the_first_comparison(known: Book) -> None:
    """All groups are on if they gained together; a group that was dropped is on again."""
    gains = {"output": 2.0, "grad_input": -1.0, "grad_weight": 3.0}
    for more, kept in ((0.0, 3), (-9.0, 0)):
        model = model_of()
        handle = convert(model, 0.06)
        script = Script(handle, cost_of({**gains, "output": 2.0 + more}), prepare_s=10.0)
        prepare = script.prepare

        def slow(variant: Variant, prepare: Any = prepare, script: Script = script) -> float:
            script.prepare_s = 10.0 if len(script.prepared) < 3 else 1000.0
            return float(prepare(variant))

        script.prepare = slow  # type: ignore[method-assign]
        found = tune(handle, training_step(model), make_timer=script, time_limit=80.0)
        assert found.is_timed_out and len(quantized(handle)) == kept
        assert (found.after is None) == (not kept)
        assert not any("it gains in place" in row["why"] for row in found.rows)


def test_without_fp8_a_cpu_runs_no_step() -> None:
    """A compiled step of 8192 rows took minutes there, for forms that save launches of GPUs."""
    handle = convert(model_of(), 0.06)
    assert not quantized(handle)

    def step() -> None:
        raise AssertionError("the step ran")

    found = handle.tune(step)
    assert found.summary == (
        "the step has no quantized product (the model is on a CPU): there is nothing to tune"
    )
    assert (found.rows, found.variants, found.file.dropped) == ([], 0, set())
    assert [site.name for site in found.file.sites] == [*handle.sites]


# ---- state


class Noisy(nn.Module):
    """Layers with a batch norm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(K, N), nn.BatchNorm1d(N), nn.ReLU(), nn.Dropout(0.5), nn.Linear(N, 1)
        ).bfloat16()
        self.register_buffer("ones", torch.ones(1).expand(8))  # which cannot be written to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


def test_a_training_model_is_as_before(known: Book) -> None:
    torch.manual_seed(0)
    model = Noisy()
    handle = convert(model, 0.06)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = rows()

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        optimizer.step()

    step()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(3.0)
    gradients = [p.grad for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
    torch.manual_seed(7)
    seeded = torch.get_rng_state()
    gains = {"output": 1.0, "grad_input": 1.0, "grad_weight": -1.0}
    tune(handle, step, optimizer=optimizer, make_timer=Script(handle, cost_of(gains)))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert p.grad is gradient and bool((gradient == 3.0).all())
    after = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, moments, after))
    assert torch.equal(torch.get_rng_state(), seeded)


def test_main_gradients_are_as_before_and_stay(known: Book) -> None:
    """Without relus in products and gradients behind layers, which the variants turn on."""
    model = model_of()
    handle = convert(model, 0.06, main_grads=True)
    step = training_step(model)
    step()
    weights: Any = handle.main_grads.weights
    before = {name: weight.main_grad.clone() for name, weight in weights.items()}
    gains = {"output": 5.0, "grad_input": -5.0, "grad_weight": 5.0}
    tune(handle, step, make_timer=Script(handle, cost_of(gains)))
    assert quantized(handle) == {"output", "grad_weight"}
    for name, weight in weights.items():
        assert torch.equal(weight.main_grad, before[name])
        assert weight.grad is None
    assert not handle.has_relus
    handle.main_grads.zero()
    step()
    assert all(weight.grad is None and weight.main_grad.any() for weight in weights.values())


def test_a_step_that_fails_leaves_the_conversion_as_it_was(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls > 2:  # of the second variant
            raise RuntimeError("lost")
        training_step(model)()

    with pytest.raises(RuntimeError, match="lost"):
        tune(handle, step, make_timer=Script(handle, lambda on: 1.0))
    assert len(quantized(handle)) == 3
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_tuned_is_refused(known: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    step = training_step(model)
    with pytest.raises(MeasurementError, match="rounds is 3; expected at least 8"):
        handle.tune(step, rounds=3)
    with monkeypatch.context() as patched:
        patched.setattr(tune_module, "refuse_emulation", lambda _conversion: None)
        with pytest.raises(MeasurementError, match="graph=True needs a GPU"):
            handle.tune(step, graph=True)
    assert len(quantized(handle)) == 3
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="2 ranks"):
        handle.tune(step)
    monkeypatch.undo()
    handle.undo()
    with pytest.raises(UnknownNameError, match="undone"):
        handle.tune(step)


# ---- inference and compilation


def inference_model(book: Book, **options: Any) -> tuple[nn.Module, Conversion]:
    """Layers 0 and 4 read FP8 weights; the weight of layer 6 has k = 63, so another layout."""
    prepared = gemm(M, N, K, b=prepared_weight(Format.E4M3FN, Granularity.ROW), prepared=True)
    book.write(
        *rows_of(gemm(M, N, K), bf16=4.0, row=9.0),
        *rows_of(prepared, bf16=4.0, row=2.0, errors=False),
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K), nn.ReLU(), nn.Linear(K, 63), nn.ReLU(),
        nn.Linear(63, 8),
    ).bfloat16()  # fmt: skip
    return model, convert(model, 0.06, inference=True, **options)


def predict(model: nn.Module) -> Callable[[], torch.Tensor]:
    x = rows()

    def step() -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = model(x)
            return y

    return step


def test_inference_decides_fp8_weights_and_layouts(book: Book) -> None:
    model, handle = inference_model(book)
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    assert handle.sites["0"].module.is_frozen and handle.sites["6"].module.is_held
    found = tune(handle, predict(model), make_timer=Script(handle, lambda on: 90.0 + 5 * len(on)))
    assert [t.group.kernels[0] for t in found.groups][1:] == [LAYOUT]
    assert found.after is None and not list(model.buffers())
    expected = nn.Sequential(*(type(m)() if not isinstance(m, nn.Linear) else nn.Linear(
        m.in_features, m.out_features) for m in model)).bfloat16()  # fmt: skip
    expected.load_state_dict(plain)
    assert torch.equal(predict(model)(), predict(expected)())


def test_fp8_weights_stay_in_place(book: Book) -> None:
    """CUDA graphs of a variant read them after other variants were applied."""
    model, handle = inference_model(book)
    places = []

    def cost(on: On) -> float:
        if on:
            places.append(handle.sites["0"].module.fp8_data.data_ptr())
        return 100.0 - len(on)

    found = tune(handle, predict(model), make_timer=Script(handle, cost))
    assert found.after is not None and len(set(places)) == 1
    assert handle.sites["0"].module.is_frozen


@pytest.mark.parametrize("training", [True, False])
def test_variants_are_compiled_once_and_do_not_count_afterwards(book: Book, training: bool) -> None:
    torch._dynamo.reset()
    if training:
        book.write(*measured())
        model = model_of()
        handle = convert(model, 0.06)
    else:
        model, handle = inference_model(book)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    step = training_step(compiled) if training else predict(compiled)
    gains = {"output": 2.0, "grad_input": -1.0, "grad_weight": 1.0}
    script = Script(handle, cost_of(gains))
    calls = 0

    def switching(variant: Variant) -> float:  # runs the step after each switch
        nonlocal calls
        script.switch(variant)
        step()
        calls += 1
        return Script.step_us(script, variant)

    script.step_us = switching  # type: ignore[method-assign]
    with torch._dynamo.config.patch(recompile_limit=2):
        found = tune(handle, step, make_timer=script)
        assert calls >= 32 * (found.variants - 2)
        assert counter.frame_count == found.variants + 1  # the last is compiled again
        step()
        assert counter.frame_count == found.variants + 1
    torch._dynamo.reset()


def test_inputs_quantized_ahead_follow_the_layer_that_reads_them(known: Book) -> None:
    """The sequence keeps its class, because Dynamo does not enter torch's own containers."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, K), BlockRMSNorm(K, 16), nn.ReLU(), nn.Linear(K, N))
    model.bfloat16()
    handle = convert(model, 0.06)
    assert handle.handed_over == ["3"]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    x = torch.randn(M, 8).bfloat16()

    def step() -> None:
        compiled(x).float().sum().backward()

    seen = {}

    def cost(on: On) -> float:
        step()
        seen[len(on)] = (type(model), handle.handed_over)
        return 100.0 + len(on)

    found = tune(handle, step, make_timer=Script(handle, cost))
    assert seen[0] == (BoundedSequential, []) and seen[3] == (BoundedSequential, ["3"])
    assert found.after is None and not handle.handed_over
    assert counter.frame_count == found.variants + 1
    handle.undo()
    assert type(model) is nn.Sequential
    torch._dynamo.reset()


def test_rows_are_seen_through_a_compiled_model(known: Book) -> None:
    torch._dynamo.reset()
    model = model_of()
    handle = convert(model, 0.06)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    found, trained, _ = observed_rows(handle, training_step(compiled))
    assert found == {"0": [M], "2": [M], "4": [M], "6": [M]} and trained == set(found)
    assert counter.frame_count == 0


# ---- the outcome in a file


def saved(tmp_path: Path) -> tuple[Path, Conversion, nn.Module]:
    found, handle, model = run({"output": 1.0, "grad_input": -1.0, "grad_weight": 1.0})
    path = tmp_path / "tuned.json"
    found.save(path)
    return path, handle, model


def test_a_saved_outcome_is_applied_without_tuning(known: Book, tmp_path: Path) -> None:
    path, handle, model = saved(tmp_path)
    other = model_of()
    again = convert(other, 0.06, tuned=path)
    texts = [[[r.text for r in s.routes] for s in h.sites.values()] for h in (handle, again)]
    assert texts[0] == texts[1] and quantized(again) == {"output", "grad_weight"}
    assert torch.equal(other(rows()), model(rows()))


def test_a_saved_outcome_of_inference_is_applied(book: Book, tmp_path: Path) -> None:
    model, handle = inference_model(book)
    found = tune(handle, predict(model), make_timer=Script(handle, lambda on: 100.0 - len(on)))
    found.save(tmp_path / "tuned.json")
    assert not found.groups[1].is_kept  # the layout, which the script gives no gain
    other, _ = inference_model(book)
    again = convert(other, 0.06, inference=True, tuned=tmp_path / "tuned.json")
    assert again.sites["0"].module.is_frozen and not again.sites["6"].module.is_held
    assert torch.equal(predict(other)(), predict(model)())


def test_a_file_for_something_else_is_refused(known: Book, tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    for model, options, words in (
        (nn.Sequential(nn.Linear(K, N)).bfloat16(), {}, "another model"),
        (model_of().float(), {}, "dtype of 0 is 'bfloat16', and here it is 'float32'"),
        (model_of(), {"inference": True}, "its is_inference is False"),
        (model_of(), {"m_range": (512, 2048)}, "other kernels were chosen"),
        (model_of(), {"budget": 1e-5}, "for 0/output, 0/grad_input, 0/grad_weight and .* by anoth"),
    ):
        with pytest.raises(ChoicesError, match=words):
            convert(model, options.pop("budget", 0.06), tuned=path, **options)
        assert all(type(m) is not lokakern.Linear for m in model.modules())


def test_a_size_that_differs_is_told_before_kernels(known: Book, tmp_path: Path) -> None:
    """Layers of other sizes have other kernels, whose names and digests tell less."""
    path, _, _ = saved(tmp_path)
    other = nn.Sequential(
        nn.Linear(K + 8, N), nn.ReLU(), nn.Linear(N, K), nn.ReLU(), nn.Linear(K, N), nn.Tanh(),
        nn.Linear(N, 1),
    ).bfloat16()  # fmt: skip
    file = read(path)
    changed = dict.fromkeys(file.kernels, "f" * 64)
    with pytest.raises(ChoicesError, match=f"k of 0 is {K}, and here it is {K + 8};"):
        check(msgspec.structs.replace(file, kernels=changed), convert(other, 0.06), "FILE")


def test_of_kernels_that_differ_nothing_else_is_told(known: Book, tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    file = read(path)
    more = msgspec.structs.replace(file, kernels={**file.kernels, "more": "0123456789abcdef"})
    words = "of more: the digest of more is 0123456789ab, and here it is absent;"
    with pytest.raises(ChoicesError, match=re.escape(words)):
        check(more, convert(model_of(), 0.06), "FILE")


def test_a_file_of_another_version_is_refused(
    known: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = saved(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.0")
    with pytest.raises(ChoicesError, match=r"its torch is .* and here it is '2.0'"):
        convert(model_of(), 0.06, tuned=path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"is_kept": true', b'"is_kept": false', "it was changed since it was written"),
        (b'"version": 5', b'"version": 4', "of version 4, and this lokakern reads"),
        (b'"format"', b'"farmat"', "missing required field"),
        (b'"n": 64', b'"n": -64', "Expected `int` >= 0"),
        (b'"sites"', b'"more": 1, "sites"', "unknown field"),
        (b"{", b"{{", "malformed"),
        (b'"gain"', b'"gain\xff"', "(?i:utf-8)|unknown field|malformed"),
        (b'"n": 64', b'"n": ' + b"[" * 10_000, "Expected|recursion"),
    ],
)
def test_a_damaged_file_is_refused(
    known: Book, tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    path, _, _ = saved(tmp_path)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    model = model_of()
    with pytest.raises(ChoicesError, match=words):
        convert(model, 0.06, tuned=path)
    assert type(model[0]) is nn.Linear


def test_what_is_no_file_is_refused(
    known: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(ChoicesError, match=r"regular file|cannot be read"):
            convert(model_of(), 0.06, tuned=path)
    path, _, _ = saved(tmp_path)
    monkeypatch.setattr("lokakern.conversion.tuning_file.LARGEST_FILE_BYTES", 100)
    with pytest.raises(ChoicesError, match="it has more than"):
        convert(model_of(), 0.06, tuned=path)


def test_a_file_that_cannot_be_written_is_reported(known: Book, tmp_path: Path) -> None:
    found, _, _ = run({"output": 1.0, "grad_input": -1.0, "grad_weight": 1.0})
    with pytest.raises(ChoicesError, match=r"save .*cannot be written"):
        found.save(tmp_path / "none" / "tuned.json")


# ---- comparisons


class Times:
    """A timer that returns given times."""

    def __init__(self, times: dict[str, Callable[[int], float]], clocks: list[float] | None = None):
        self.times, self.clocks, self.count, self.rounds = times, clocks, 0, 0

    def prepare(self, variant: Variant) -> float:
        return 0.0

    def step_us(self, variant: Variant) -> float:
        self.count += 1
        return self.times[str(variant)](self.count)

    def clock_mhz(self) -> float | None:
        self.rounds += 1
        return None if self.clocks is None else self.clocks[self.rounds - 1]

    def keep(self, variants: Collection[Variant]) -> None:
        pass

    def now(self) -> float:
        return float(self.count)


def test_a_drift_of_the_device_cancels() -> None:
    """Each time is 1 % longer than the one before."""
    times = Times({"a": lambda i: 100 * 1.01**i, "b": lambda i: 99 * 1.01**i})
    found = compare(times, "a", "b", rounds=64)
    assert found.value == pytest.approx(100 / 99, rel=1e-4) and found.rounds == 8
    assert found.low > 1.01


def test_a_comparison_ends_when_it_is_decided_or_settled() -> None:
    noise = random.Random(0)
    far = compare(Times({"a": lambda i: 110 + noise.gauss(0, 1), "b": lambda i: 100.0}),
                  "a", "b", rounds=64)  # fmt: skip
    equal = compare(Times({"a": lambda i: 100.0, "b": lambda i: 100.0}), "a", "b", rounds=64)
    near = compare(Times({"a": lambda i: 100 + noise.gauss(0, 5), "b": lambda i: 100.0}),
                   "a", "b", rounds=40)  # fmt: skip
    late = compare(Times({"a": lambda i: 100 + noise.gauss(0, 5), "b": lambda i: 100.0}),
                   "a", "b", rounds=40, until=39.0)  # fmt: skip
    assert [far.rounds, equal.rounds, near.rounds, late.rounds] == [8, 8, 40, 10]
    assert near.low < 1 < near.high


def test_rounds_with_a_low_clock_do_not_count() -> None:
    clocks = [1900.0] * 9 + [1000.0] * 7
    slow = {"a": lambda i: 200.0 if i > 36 else 110.0, "b": lambda i: 100.0}
    noisy = Times({**slow, "a": lambda i: 90.0 if i < 5 else slow["a"](i)}, clocks)
    found = compare(noisy, "a", "b", rounds=16)
    assert found.rounds == 16 and found.value == pytest.approx(1.1)


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    for count in (8, 16, 33):
        misses = 0
        for _ in range(2000):
            low, high = interval([draw.expovariate(1.0) for _ in range(count)])
            misses += not low <= 0.6931471805599453 <= high
        assert misses <= 35  # of 20 expected, 3.4 standard deviations
    with pytest.raises(MeasurementError, match="7 rounds"):
        interval([1.0] * 7)


def test_a_graph_is_captured_once_for_each_variant_and_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the calls of a GPU only their order is known here."""
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, _other: object) -> float:
            return 2.0

    class Stream:
        def __init__(self, _device: object = None) -> None: ...
        def wait_stream(self, _other: object) -> None: ...

    @contextlib.contextmanager
    def aside(_stream: Stream) -> Iterator[None]:
        log.append("aside")
        yield
        log.append("back")

    @contextlib.contextmanager
    def capture(_graph: Graph, **options: Any) -> Iterator[None]:
        assert options["pool"] == (0, 1) and isinstance(options["stream"], Stream)
        log.append("capture")
        yield

    for name, fake in (
        ("CUDAGraph", Graph), ("Event", Event), ("Stream", Stream), ("stream", aside),
        ("graph", capture), ("current_stream", Stream), ("synchronize", lambda _device: None),
        ("graph_pool_handle", lambda: (0, 1)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "warm", lambda _device: None)
    monkeypatch.setattr(timing, "clock_reader", lambda _device: lambda: None)
    timer = StepTimer(
        lambda: log.append("step"), lambda variant: log.append(f"switch to {variant}"),
        torch.device("cuda", 0), True,
    )  # fmt: skip
    prepared = ["aside", "step", "step", "step", "back", "capture", "step"]
    timer.prepare("a")
    assert log[:8] == ["switch to a", *prepared]
    log.clear()
    timer.prepare("b")
    assert log == ["switch to b", *prepared] and timer.prepare("b") == 0.0
    log.clear()
    assert timer.step_us("a") == pytest.approx(200.0)  # 2 ms of 10 replays
    assert log == ["replay", "record", *["replay"] * 10, "record"]
    timer.keep(["a"])
    log.clear()
    timer.prepare("b")
    assert "capture" in log


def test_a_ratio_is_words() -> None:
    assert str(Ratio(1.05, 1.04, 1.06, 8, 105.0, 100.0)) == "1.050 (1.040 to 1.060)"
