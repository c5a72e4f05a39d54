"""The sampled check: its warnings, their time, and no cost of unchecked calls.

Kernels of an H200 are emulated here. Inputs have a common mean and rows of weights sum to zero:
what is left of such a product is about as large as what FP8 rounds away.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import numerics, sampled_check
from lokakern.conversion.convert import Conversion
from lokakern.conversion.routes import _grad_input_problem
from lokakern.device import current_device, current_environment
from lokakern.errors import BudgetError, FormatError
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import read_route, route_text
from lokakern.numerics import measure_errors
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import AccuracyRecord, TimingRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.sampled_check import ErrorBudgetWarning, Marker, Watch, watch_named
from lokakern.selection import dispatcher
from lokakern.sweep.resume import distribution_row
from lokakern.types import REALISTIC_DISTRIBUTIONS, Format, Granularity
from lokakern.workloads.gemm_cases import prepared_weight
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.conversions import report_of, rows_of, verdict
from tests.support.measurements import Book, gemm
from tests.support.rows_at_once import RowsAtOnce

SEEDS = (0,)
H200 = "NVIDIA H200"
M, N, K = 256, 512, 512
FP8_ROW = "torch.quantize_row+torch.emulated_row"
ROW_KERNEL = "cuda.quantize_row+cuda.scaled_gemm_row"
GROUP_KERNEL = "cuda.quantize_group+cuda.scaled_gemm_group"
BY_ROW = route_text(Granularity.ROW, *[[(0, ROW_KERNEL)]] * 2)
BY_GROUP = route_text(Granularity.NONE, *[[(0, GROUP_KERNEL)]] * 2)
BUDGET = lokakern.ErrorBudget(row_err=0.06)


@pytest.fixture(autouse=True)
def nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOKAKERN_CHECK", raising=False)
    monkeypatch.setattr(sampled_check, "_WATCHES", {})
    yield
    dispatcher.use_snapshot(None)


def weight(zero: bool) -> Tensor:
    """Rows that sum to zero, or not."""
    torch.manual_seed(0)
    w = torch.randn(N, K)
    return (w - w.mean(dim=1, keepdim=True) if zero else w).bfloat16()


def inputs(mean: float, m: int = M, device: str = "cpu") -> Tensor:
    torch.manual_seed(1)
    return (torch.randn(m, K) + mean).bfloat16().to(device)


def alarms(call: Callable[[], object]) -> list[str]:
    """Budget warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is ErrorBudgetWarning]


# ---- gemm ----


@pytest.fixture
def fp8_is_fast(tmp_path: Path) -> None:
    """Rows by which the device here takes FP8, which it emulates, for its products."""
    path = tmp_path / "rows.sqlite"
    device, environment = current_device("cpu"), current_environment()
    asked_of = functools.partial(make_problem, "gemm", (M, N, K))
    prepared = asked_of(b=prepared_weight(Format.E4M3FN, Granularity.ROW), prepared=True)
    ones = torch.ones(4, 4, dtype=torch.float64)
    with RowsAtOnce.create(path, suite="test", command="test", harness_digest="0" * 64) as run:
        for name, us, error in (("torch.bf16", 9.0, 0.003), (FP8_ROW, 3.0, 0.04)):
            for problem in (asked_of(), asked_of(epilogue="bias"), prepared):
                timing = TimingRecord(
                    status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us,
                    replay_count=9, void_count=0, calls_per_replay=1, kernel_err=0.5,
                    kernel_err_row_p99=0.5,
                )  # fmt: skip
                run.add_timing(KERNELS[name], problem, distribution_row("X1"), device, environment,
                               dispatcher.default_regime(device), timing)  # fmt: skip
            asked = accuracy_problem(problem, Format.E4M3FN)
            for distribution in REALISTIC_DISTRIBUTIONS:
                for seed in range(3):
                    record = AccuracyRecord(
                        status="ok", seed=seed, rows=4, kernel_err=0.5, kernel_err_row_p99=0.5,
                        errors=measure_errors(ones * (1 + error), ones), flushed_share=0.0,
                        saturated_share=0.0,
                    )  # fmt: skip
                    run.add_accuracy(KERNELS[name], asked, distribution_row(distribution),
                                     device.architecture, environment, record)  # fmt: skip
    dispatcher.use_snapshot(load_snapshot([path]))


gemm_within = functools.partial(lokakern.gemm, budget=0.06, on_miss="raise")


@pytest.mark.parametrize("way", ["plain", "prepared", "bias", "gradients", "compiled"])
def test_gemm_warns_if_the_error_of_sampled_rows_exceeds_the_budget(
    fp8_is_fast: None, way: str
) -> None:
    w, x = weight(zero=True), inputs(5.0)
    b: Any = lokakern.prepare_weight(w, 0.06, (M, M)) if way == "prepared" else w.t()
    call: Any = functools.partial(gemm_within, check="1:64")
    if way == "bias":
        call = functools.partial(call, bias=torch.randn(N).bfloat16())
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    x.requires_grad_(way == "gradients")
    (message,) = alarms(lambda: call(x, b))
    kind = "gemm n=512 k=512 bfloat16" + (" prepared" if way == "prepared" else "")
    assert message.startswith(f"{kind}: row error 0.1")
    for words in ("of 64 sampled rows", "budget 0.06", FP8_ROW, "m=256 n=512 k=512", "budget=None"):
        assert words in message
    (row,) = sampled_check.results()
    assert (row["site"], row["calls"], row["checks"]) == (kind, 1, 1)


@pytest.mark.parametrize(("mean", "zero"), [(0.0, False), (0.0, True), (5.0, False)])
def test_gemm_does_not_warn_within_the_budget(fp8_is_fast: None, mean: float, zero: bool) -> None:
    call = functools.partial(gemm_within, inputs(mean), weight(zero).t(), check="1:64")
    assert not alarms(lambda: [call() for _ in range(4)])
    (row,) = sampled_check.results()
    assert row["checks"] == 4 and 0.01 < row["row_err"] < 0.05


def test_the_error_over_all_rows_follows_the_error_contract(fp8_is_fast: None) -> None:
    w, x, bias = weight(zero=True), inputs(5.0), torch.randn(N).bfloat16()
    y = gemm_within(x, w.t(), bias=bias)
    exact = x.double() @ w.t().double() + bias.double()
    with pytest.warns(ErrorBudgetWarning):
        gemm_within(x, w.t(), bias=bias, check=f"1:{M}")
    (row,) = sampled_check.results()
    assert row["rows"] == M
    assert row["row_err"] == pytest.approx(measure_errors(y, exact).row_err, rel=1e-5)


def test_errors_of_special_rows_follow_the_error_contract() -> None:
    torch.manual_seed(0)
    exact = torch.randn(10, 8)
    out = exact * 1.05
    exact[0] = out[0] = 0.0
    exact[1] = 0.0
    out[2, 3] = math.nan
    out[3, 3] = -math.inf
    exact[4, 5], exact[5, 5] = math.inf, math.nan
    exact[6], out[6] = exact[6] * 1e-41, out[6] * 1e-41  # subnormal
    exact[7], out[7] = 3e38, 3.1e38
    out[8] = -out[8]
    found = sampled_check.errors_of_rows(torch.eye(10), exact.nan_to_num(0.0, 0.0), out)
    for rows, reference in ((found, exact.nan_to_num(0.0, 0.0)), (errors_of(exact, out), exact)):
        expected = numerics.row_errors(out.double(), reference.double()).clamp_max(1.0)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-12)


def test_what_overflows_float16_anyway_is_no_error() -> None:
    """As gradients of a step that GradScaler skips; what only the kernel has beyond it, is one."""
    exact = torch.tensor([7e4, -7e4, 65000.0, 100.0, -7e4, 7e4]).repeat(2, 1).t()
    exact[:, 1] = 3e4
    out = (1.04 * exact).half()
    out[3, 0], out[4, 0], out[5, 0] = math.inf, math.inf, math.nan
    assert out[:3, 0].isinf().all()
    found = sampled_check.errors_of_rows(torch.eye(6), exact, out).tolist()
    assert found[:3] == pytest.approx(
        [0.04 * 3e4 / math.hypot(65504.0, 3e4)] * 2
        + [math.hypot(504.0, 0.04 * 3e4) / math.hypot(65000.0, 3e4)],
        rel=1e-2,
    )
    assert found[3:] == [1.0, 1.0, 1.0]


def errors_of(exact: Tensor, out: Tensor) -> Tensor:
    """Errors row by row, because non-finite values would reach other rows through the product."""
    one = torch.ones(1, 1)
    pairs = zip(exact.split(1), out.split(1), strict=True)
    return torch.cat([sampled_check.errors_of_rows(one, e, o) for e, o in pairs])


def test_long_sums_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = torch.randn(3, 1000), torch.randn(1000, 5), torch.randn(5)
    out = (a @ b + bias).bfloat16()
    whole = sampled_check.errors_of_rows(a, b, out, bias)
    monkeypatch.setattr(sampled_check, "_CHUNK", 35)  # seven of the 1000 at a time
    parts = sampled_check.errors_of_rows(a, b, out, bias)
    assert whole.min() > 1e-4 and whole.max() < 2.0**-8
    torch.testing.assert_close(parts, whole, rtol=1e-2, atol=0.0)


def test_the_environment_variable_applies_without_an_argument(
    fp8_is_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, b = inputs(5.0), weight(zero=True).t()
    assert not alarms(lambda: gemm_within(x, b)) and not sampled_check.results()
    dispatcher.use_snapshot(dispatcher.snapshot())  # as another process
    monkeypatch.setenv("LOKAKERN_CHECK", "1:64")
    assert not alarms(lambda: gemm_within(x, b, check="off"))
    assert len(alarms(lambda: gemm_within(x, b))) == 1
    gemm_within(x, b, check="off")
    assert [row["calls"] for row in sampled_check.results()] == [1]


def test_without_a_budget_nothing_is_quantized_and_nothing_checked(
    fp8_is_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_CHECK", "1:64")
    lokakern.gemm(inputs(5.0), weight(zero=True).t())
    lokakern.gemm(inputs(5.0), weight(zero=True).t(), budget=0.01)
    assert [row["calls"] for row in sampled_check.results()] == [0]


UNREADABLE = ["often", "1000", "0:64", "10:0", "1:2:3", "-1:4", "1.5:4", ":", "\u00b2:1"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_invalid_check_raises_with_the_expected_form(
    fp8_is_fast: None, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    words = f"is '{text}'; expected 'every:rows', two integers of at least 1 such as '1000:64'"
    x, b = inputs(0.0), weight(zero=False).t()
    model = nn.Sequential(nn.Linear(K, N))
    for call in (
        lambda **given: gemm_within(x, b, **given),
        lambda **given: lokakern.convert(model, 0.06, **given),
    ):
        with pytest.raises(BudgetError, match=f"^check {words}"):
            call(check=text)
        monkeypatch.setenv("LOKAKERN_CHECK", text)
        with pytest.raises(BudgetError, match=f"^LOKAKERN_CHECK {words}"):
            call()
        monkeypatch.delenv("LOKAKERN_CHECK")
        with pytest.raises(FormatError, match="check is a tuple; expected text"):
            call(check=(1000, 64))
    assert type(model[0]) is nn.Linear


def test_a_budget_without_a_row_error_is_not_checked_with_a_warning(fp8_is_fast: None) -> None:
    budget = lokakern.ErrorBudget(sqnr_db=20.0)
    with pytest.warns(UserWarning, match=r"not checked .* the budget limits sqnr_db 20; add row_"):
        lokakern.gemm(inputs(5.0), weight(zero=True).t(), budget=budget, check="1:64")
    assert not sampled_check.results()


# ---- when, and which rows ----


class Spy(Watch):
    """Notes which calls were checked, by the first row that was taken and the number of rows."""

    def __init__(self, every: int, rows: int) -> None:
        super().__init__(every, rows, 0.06, 1, "spy")
        self.taken: dict[int, list[int]] = {}

    def call(self, m: int) -> None:
        numbers = torch.arange(1.0, m + 1).unsqueeze(1)
        with pytest.MonkeyPatch.context() as patch:
            found: list[int] = []

            def errors(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
                assert torch.equal(a, out)  # rows of the one belong to rows of the other
                found.extend(int(x) - 1 for x in a.flatten())
                return torch.zeros(len(a), dtype=torch.float64)

            patch.setattr(sampled_check, "errors_of_rows", errors)
            self.see(numbers, torch.ones(1, 1), numbers, None, "kernel")
        if found:
            self.taken[self.calls] = found


def test_the_first_and_then_every_nth_call_are_checked() -> None:
    spy = Spy(every=5, rows=4)
    for _ in range(17):
        spy.call(16)
    assert list(spy.taken) == [1, 6, 11, 16]
    assert spy.row()["calls"] == 17 and spy.row()["checks"] == 4


@pytest.mark.parametrize("m", [1, 3, 4, 5, 7, 8, 63, 64, 65, 127, 1000])
def test_checked_rows_are_evenly_spaced_and_eventually_all(m: int) -> None:
    spy = Spy(every=1, rows=4)
    for _ in range(-(-m // 4)):
        spy.call(m)
    for taken in spy.taken.values():
        assert 1 <= len(taken) <= 4
        assert len({b - a for a, b in itertools.pairwise(taken)}) <= 1
    assert sorted(row for taken in spy.taken.values() for row in taken) == list(range(m))


def test_a_warning_repeats_only_after_the_error_doubles() -> None:
    watch = Watch(1, 4, 0.06, 1, "layer/output")

    def call(error: float) -> list[str]:
        exact = torch.ones(4, 8)
        return alarms(lambda: watch.see(exact, torch.eye(8), exact * (1 + error), None, "kernel"))

    told = [bool(call(e)) for e in (0.05, 0.07, 0.07, 0.13, 0.15, 0.2, 0.29, 0.31, 9.0, 9.0)]
    assert told == [False, True, False, False, True, False, False, True, True, False]
    assert not call(0.05)
    row = watch.row()
    assert row["row_err"] == 1.0 and row["last"] == pytest.approx(0.05) and row["budget"] == 0.06


def test_non_finite_outputs_count_as_errors() -> None:
    watch = Watch(1, 4, 0.06, 1, "layer/output")
    exact = torch.ones(4, 8)
    out = exact.clone()
    out[1, 1] = math.nan
    (message,) = alarms(lambda: watch.see(exact, torch.eye(8), out, None, "kernel"))
    assert "row error 0.5 of 4" in message


class Event:
    """Stands for an event of a GPU: what it is behind is done when the test says so."""

    def __init__(self) -> None:
        self.is_done, self.waits = False, 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waits, self.is_done = self.waits + 1, True


def test_a_result_is_read_by_the_first_call_after_its_event() -> None:
    """A check runs while the program continues, as on a GPU."""
    watch = Watch(100, 4, 0.06, 1, "layer/output")
    exact = torch.ones(4, 8)

    def call() -> list[str]:
        return alarms(lambda: watch.see(exact, torch.eye(8), exact, None, "kernel"))

    assert not call()
    event = Event()
    value = torch.tensor(0.09, dtype=torch.float64)
    watch._pending.append(sampled_check._Pending(value, event, 4, (4, 8, 8), "late kernel"))
    watch._wake = watch.calls + 1
    assert not call() and not call()
    event.is_done = True
    (message,) = call()
    assert "row error 0.3" in message and "late kernel" in message
    assert not call() and event.waits == 0 and watch._wake == 101  # sleeps till its turn again
    watch._pending.append(sampled_check._Pending(9 * value, Event(), 4, (4, 8, 8), "late kernel"))
    (message,) = alarms(lambda: watch.read(wait=True))  # who asks for results waits
    assert "row error 0.9" in message


def test_threads_share_a_watch_and_each_result_is_judged_once() -> None:
    """Replicas of a layer have its route, and so its watch."""
    watch = Watch(100, 4, 0.06, 1, "layer/output")

    class Asked(Event):
        def query(self) -> bool:
            other = threading.Thread(target=watch.read)
            other.start()
            other.join()
            return True

    value = torch.tensor(0.09, dtype=torch.float64)
    watch._pending.append(sampled_check._Pending(value, Asked(), 4, (4, 8, 8), "kernel"))
    assert len(alarms(watch.read)) == 1
    assert watch.checks == 1 and not watch._pending


def test_a_call_during_capture_is_not_checked_but_the_next_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is an event asked then: that would end the capture."""
    watch = Watch(100, 4, 0.06, 1, "layer/output")
    captured: Any = types.SimpleNamespace(is_cuda=True)  # nothing else of it may be read
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Watch, "read", lambda self, wait=False: pytest.fail("asked"))
    with pytest.warns(UserWarning, match="layer/output: not checked .*captured CUDA graph") as told:
        watch.see(captured, captured, captured, None, "kernel")
        watch.see(captured, captured, captured, None, "kernel")
    assert len(told) == 1
    monkeypatch.undo()
    exact = torch.ones(4, 8)
    assert len(alarms(lambda: watch.see(exact, torch.eye(8), 2 * exact, None, "kernel"))) == 1


def ops_of(call: Callable[[], object]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return Counter(e.name for e in profile.events() if e.name.startswith(("aten", "lokakern")))


def test_calls_between_checks_run_nothing_else(fp8_is_fast: None) -> None:
    x, b = inputs(0.0), weight(zero=False).t()
    layers = [layer_of(zero=False, check=check) for check in ("off", "3:64")]
    for plain, checked in (
        (lambda: gemm_within(x, b), lambda: gemm_within(x, b, check="3:64")),
        (lambda: layers[0](x), lambda: layers[1](x)),
    ):
        plain()
        alone = ops_of(plain)
        first, second, third, fourth = [ops_of(checked) for _ in range(4)]
        assert alone and second == third == alone
        assert first > alone and fourth > alone


# ---- modules ----


def model_of(zero: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16))
    with torch.no_grad():
        model[0].weight.copy_(weight(zero))
        model[0].bias.zero_()  # type: ignore[operator]
    return model


def layer_of(zero: bool, check: str = "1:64", name: str = "layer", device: str = "cpu") -> Linear:
    """All products of the layer use FP8, regardless of measurements."""
    layer = Linear(K, N, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight(zero))
        layer.bias.zero_()
    layer.to(device)
    marker = Marker(check)
    routes = [
        marker.mark(route, BUDGET, f"{name}/{gemm}")
        for route, gemm in ((BY_ROW, "output"), (BY_ROW, "grad_input"), (BY_GROUP, "grad_weight"))
    ]
    layer.take_routes(routes, layer.weight)
    return layer


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """Rows by which an H200 takes FP8 for all three products."""
    rows = rows_of(gemm(M, N, K), bf16=9.0, row=3.0)  # whose errors are the input's gradient's
    rows += rows_of(_grad_input_problem(N, K)(M), bf16=9.0, row=3.0, errors=False)
    rows += rows_of(grad_weight_case(M, N, K).problem, bf16=9.0, row=3.0)
    return Book(tmp_path / "rows.sqlite").write(*rows)


def converted(zero: bool, **options: Any) -> tuple[nn.Sequential, Conversion]:
    model = model_of(zero)
    return model, lokakern.convert(model, 0.06, device=H200, distribution="X1", **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_converted_layer_warns_and_names_its_site(book: Book, compiled: bool) -> None:
    torch._dynamo.reset()
    model, handle = converted(zero=True, check="1:64")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    (message,) = alarms(lambda: call(inputs(5.0)))
    assert message.startswith("0/output: row error 0.19") and "budget 0.06" in message
    assert FP8_ROW in message and "leave the layer out (skip=)" in message
    assert not alarms(lambda: call(inputs(5.0))), "once a site"
    (first, *_) = handle.checks
    assert first["site"] == "0/output" and first["checks"] == 2 and 0.18 < first["row_err"] < 0.21


def test_products_without_a_kernel_at_m_have_no_row(book: Book) -> None:
    model, handle = converted(zero=True, check="1:64", m_range=(M, M))
    assert not alarms(lambda: model(inputs(5.0)[: M // 2])) and handle.checks == []
    alarms(lambda: model(inputs(5.0)))
    assert [(row["site"], row["calls"]) for row in handle.checks] == [("0/output", 1)]


def test_a_converted_layer_does_not_warn_for_measured_distributions(book: Book) -> None:
    model, handle = converted(zero=True, check="1:64")
    assert not alarms(lambda: model(inputs(0.0)).float().square().mean().backward())
    assert {r["site"] for r in handle.checks} == {"0/output", "0/grad_weight"}  # x has no gradient
    assert all(r["checks"] == 1 and 0.01 < r["row_err"] < 0.06 for r in handle.checks)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_checked_too(compiled: bool) -> None:
    """Rows of the gradient have a common mean, and columns of the weight sum to zero."""
    torch._dynamo.reset()
    layer = layer_of(zero=False)
    with torch.no_grad():
        layer.weight.sub_(layer.weight.mean(dim=0, keepdim=True))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, gradient = inputs(0.0).requires_grad_(), inputs(8.0)
    with torch.no_grad():  # samples that cancel in the sums of the weight's gradient
        x -= x.mean(dim=0, keepdim=True)
    found = alarms(lambda: call(x).backward(gradient))
    assert sorted(message.split(":")[0] for message in found) == [
        "layer/grad_input", "layer/grad_weight",
    ]  # fmt: skip
    rows = {row["site"]: row for row in sampled_check.results(layer._routes)}
    assert rows["layer/output"]["row_err"] < 0.05
    x = x.detach().requires_grad_()
    y = layer_of(zero=False, check="off")
    y.load_state_dict(layer.state_dict())
    y(x).backward(gradient)
    weight_, plain = layer.weight.detach().double(), gradient.double()
    for site, made, exact in (
        ("layer/grad_input", x.grad, plain @ weight_),
        ("layer/grad_weight", y.weight.grad, plain.t() @ x.detach().double()),
    ):
        assert made is not None
        whole = measure_errors(made, exact).row_err
        assert rows[site]["row_err"] == pytest.approx(whole, rel=0.1), site


def test_a_changed_weight_before_the_backward_pass_causes_no_warning() -> None:
    layer = layer_of(zero=False).float()
    layer.take_routes(layer._routes, layer.weight)
    x = inputs(0.0).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3.0)
    assert not alarms(lambda: y.float().square().sum().backward())


def test_convert_uses_the_variable_and_off(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_CHECK", "1:64")
    model, handle = converted(zero=True)
    assert len(alarms(lambda: model(inputs(5.0)))) == 1 and handle.checks
    model, handle = converted(zero=True, check="off")
    assert not alarms(lambda: model(inputs(5.0))) and not handle.checks
    assert model[0]._routes[0] == handle.sites["0"].routes[0].text


def test_verdicts_of_probe_are_checked_on_later_inputs(book: Book) -> None:
    report = report_of(verdict("output", "row", "safe", 0.04))
    model = model_of(zero=True)
    handle = lokakern.convert(model, report, device=H200, check="1:64")
    (message,) = alarms(lambda: model(inputs(5.0)))
    assert message.startswith("0/output: row error 0.19") and "budget 0.06" in message
    assert [row["site"] for row in handle.checks] == ["0/output"]


def test_conversions_have_separate_checks_that_undo_ends(book: Book) -> None:
    (first, one), (second, other) = converted(zero=True, check="1:8"), converted(True, check="1:8")
    assert alarms(lambda: first(inputs(5.0))) and alarms(lambda: second(inputs(5.0)))
    assert one.checks[0]["calls"] == other.checks[0]["calls"] == 1
    routes = first[0]._routes
    assert one.refresh(0.06) == [] and first[0]._routes == routes
    one.refresh(0.5)
    assert not alarms(lambda: first(inputs(5.0))) and one.checks[0]["budget"] == 0.5
    other.undo()
    assert not alarms(lambda: second(inputs(5.0))) and not other.checks


@pytest.mark.parametrize("compiled", [False, True])
def test_probe_compares_outputs_of_a_converted_layer(compiled: bool) -> None:
    model = nn.Sequential(Linear(K, N, dtype=torch.bfloat16), nn.Linear(N, 8).bfloat16())
    model[0].weight.data.copy_(weight(zero=True))
    model[0].take_routes((BY_ROW, "", ""), model[0].weight)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    with lokakern.Probe(model, every=2, check="1:64") as probe:

        def two_steps() -> None:
            for _ in range(2):
                called(inputs(5.0)).sum().backward()
                probe.step()

        (told,) = alarms(two_steps)
    assert told.startswith("0: row error 0.1") and "budget 0.06" in told and ROW_KERNEL in told
    converted, other = sorted(probe.checks, key=lambda row: row["site"])
    assert (converted["checks"], converted["rows"]) == (1, 64)  # one of the two steps is sampled
    assert converted["row_err"] == pytest.approx(0.19, abs=0.02)
    assert other["checks"] == 0  # it is no converted layer


def test_probe_without_a_check_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(K, N))
    assert lokakern.Probe(model).checks == []
    monkeypatch.setenv("LOKAKERN_CHECK", "7:3")
    (watch,) = lokakern.Probe(model)._watches
    assert (watch.every, watch.rows, watch.site) == (7, 3, "0")
    assert lokakern.Probe(model, check="off").checks == []
    with pytest.raises(BudgetError, match="expected 'every:rows'"):
        lokakern.Probe(model, check="1000")


def test_a_check_does_not_change_reported_choices(book: Book) -> None:
    (_, plain), (model, checked) = converted(zero=True, check="off"), converted(True, check="1:8")
    assert checked.choices == plain.choices
    assert any(row["choice"] != "bf16" for row in checked.choices)
    alarms(lambda: model(inputs(5.0)))
    newer = lokakern.convert(model, 0.5, device=H200, distribution="X1", check="1:8")
    model(inputs(5.0))
    assert checked.choices == plain.choices
    assert [row["budget"] for row in checked.checks] == [0.06], "not what a newer one found"
    assert [row["budget"] for row in newer.checks] == [0.5]


def test_copies_of_a_layer_keep_its_check() -> None:
    layer = layer_of(zero=True)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        sampled_check._WATCHES.clear()
        lokakern.nn.routed_matmul._ROUTES.clear()
        assert len(alarms(functools.partial(copied, inputs(5.0)))) == 1


def test_a_route_with_a_check_is_parsed_as_one_without() -> None:
    marked = Marker("10:4").mark(BY_ROW, BUDGET, "odd;name:of=1,a site/output")
    assert read_route(marked) == read_route(BY_ROW)
    watch = watch_named(sampled_check.check_of(marked))
    assert (watch.every, watch.rows, watch.limit) == (10, 4, 0.06)
    assert watch.site == "odd;name:of=1,a site/output"
    assert Marker("10:4").mark("", BUDGET, "layer") == ""


@torch.no_grad()
def test_a_layer_with_an_offloaded_weight_warns_that_it_is_not_checked() -> None:
    layer = layer_of(zero=True)
    layer.freeze()
    layer.offload(torch.device("cpu"))
    with pytest.warns(UserWarning, match="layer/output: not checked .*weight is not kept"):
        layer(inputs(5.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(inputs(5.0))


@torch.no_grad()
def test_a_checked_call_does_not_use_the_fused_activation() -> None:
    """The check reads what is multiplied, which that kernel does not write."""
    layer = layer_of(zero=True, check="3:64")
    layer.freeze()
    x, activating = inputs(5.0), route_text(Granularity.ROW, *[[(0, "torch.norm_quantize")]] * 2)
    fused = functools.partial(layer.forward_activated, x, "relu", activating)
    assert fused() is None
    assert len(alarms(lambda: layer(x.relu()))) == 1  # what the sequence does then
    assert fused() is not None and fused() is not None and fused() is None


# ---- on a GPU ----


@pytest.mark.gpu
def test_checks_do_not_synchronize_and_warn_later() -> None:
    layer = layer_of(zero=True, device="cuda")
    x, zero = inputs(5.0, device="cuda").requires_grad_(), inputs(0.0, device="cuda")
    gradient = torch.ones(M, N, device="cuda", dtype=torch.bfloat16)
    layer_of(zero=False, name="warm", device="cuda")(zero.requires_grad_()).backward(gradient)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert not alarms(lambda: layer(x).backward(gradient)), "nothing was read yet"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (message,) = alarms(lambda: layer(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert message.startswith("layer/output: row error 0.19") and "cuda." in message
    rows = {row["site"]: row for row in sampled_check.results(layer._routes)}
    assert rows["layer/output"]["checks"] == 2
    assert {r["checks"] for s, r in rows.items() if s != "layer/output"} == {1}


@pytest.mark.gpu
@torch.no_grad()
def test_replays_of_a_graph_are_not_checked_with_a_warning() -> None:
    layer, x = layer_of(zero=True, device="cuda"), inputs(5.0, device="cuda")
    layer.freeze()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    words = "layer/output: not checked .*captured CUDA graph"
    with pytest.warns(UserWarning, match=words), torch.cuda.graph(graph):
        y = layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph.replay()
    assert torch.equal(y, layer(x))


@pytest.mark.gpu
def test_checks_work_with_inductor() -> None:
    torch._dynamo.reset()
    layer, x = layer_of(zero=True, device="cuda"), inputs(5.0, device="cuda")
    compiled = torch.compile(nn.Sequential(nn.ReLU(), layer), fullgraph=True, dynamic=False)

    def twice() -> None:
        compiled(x)
        torch.cuda.synchronize()
        compiled(x)

    (message,) = alarms(twice)
    assert message.startswith("layer/output: row error 0.1")
