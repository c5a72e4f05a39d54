"""Timing with a clock of our own, and operand sets with kernels that are wrong on purpose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.measure import operand_cache, operands, time_problem, timing
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, time_case
from lokakern.measure.timing import Contender, quantiles, time_contenders
from lokakern.problems import make_problem
from lokakern.registry.register import ANY, KERNELS, Kernel, load_kernels
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
)
from lokakern.workloads.suites import Case

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operands, many calls: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Clock:
    """Time that passes only when a call says so."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.visits: list[str] = []

    def call(self, name: str, *microseconds: float) -> Callable[[], None]:
        """A call that takes so long; of several times the next one each time, then the last."""
        left = list(microseconds)

        def call() -> None:
            self.visits.append(name)
            self.now_ns += round(1e3 * (left.pop(0) if len(left) > 1 else left[0]))

        return call

    def perf_counter_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that `lokakern.measure.timing` reads."""
    clock = Clock()
    monkeypatch.setattr(timing, "SETTLED_SHARE", -1.0)  # whatever they say, replay on
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=clock.perf_counter_ns))
    return clock


def run(*contenders: Contender, seed: int = 0, budget_ms: float = 25.0) -> None:
    time_contenders(
        contenders, regime="eager", device=CPU, floor_us=1.0, seed=seed, budget_ms=budget_ms
    )


# --- quantiles


def test_quantiles_of_five_samples() -> None:
    found = quantiles(Contender("a", (), samples_us=[5.0, 1.0, 4.0, 2.0, 3.0]))
    assert (found.p20, found.p50, found.p80) == pytest.approx((1.8, 3.0, 4.2))
    assert (found.replay_count, found.void_count, found.clock_mhz) == (5, 0, None)


def test_quantiles_of_one_sample() -> None:
    found = quantiles(Contender("a", (), samples_us=[7.0]))
    assert (found.p20, found.p50, found.p80, found.replay_count) == (7.0, 7.0, 7.0, 1)


def test_replays_under_90_percent_of_the_median_clock_are_void() -> None:
    samples = [10.0, 11.0, 12.0, 13.0, 99.0]
    clocks = [2000.0, 1980.0, 1800.0, 2000.0, 1781.0]  # 90 % of the median is 1782
    found = quantiles(Contender("a", (), samples_us=samples, clocks_mhz=clocks))
    assert (found.replay_count, found.void_count, found.clock_mhz) == (4, 1, 1980.0)
    assert (found.p20, found.p50, found.p80) == pytest.approx((10.6, 11.5, 12.4))


def test_without_a_clock_for_each_sample_nothing_is_void() -> None:
    found = quantiles(Contender("a", (), samples_us=[1.0, 2.0, 3.0], clocks_mhz=[9.0, 1.0]))
    assert (found.replay_count, found.void_count, found.clock_mhz) == (3, 0, None)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(MeasurementError, match="a: no replay was timed"):
        quantiles(Contender("a", ()))


# --- time_contenders


def test_replays_stop_when_the_median_is_settled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 20 replays, and then every 10, until 25 ms are spent."""
    monkeypatch.setattr(timing, "SETTLED_SHARE", 0.0025)
    steady = Contender("steady", [clock.call("steady", 100.0)])
    calms = [100.0, 140.0] * 10 + [100.0] * 400
    calm = Contender("calm", [clock.call("calm", *calms)])
    wild = Contender("wild", [clock.call("wild", *([100.0, 140.0] * 200))])
    for contender in (steady, calm, wild):
        contender.calls = list(contender.calls)
        run(contender)
    assert len(steady.samples_us) == timing.SETTLED_REPLAYS
    assert timing.SETTLED_REPLAYS < len(calm.samples_us) < 200
    assert len(calm.samples_us) % 10 == 0
    assert len(wild.samples_us) == timing.MOST_REPLAYS


def test_times_are_per_call(clock: Clock) -> None:
    one, both = Contender("one", [clock.call("one", 100.0)]), None
    both = Contender("both", [clock.call("both", 90.0), clock.call("both", 110.0)])
    run(one, both)
    for contender in (one, both):
        assert (contender.status, contender.reason, contender.dropped) == ("ok", "", False)
        assert contender.samples_us == pytest.approx([100.0] * len(contender.samples_us))
    assert (one.calls_per_replay, both.calls_per_replay) == (1, 2)
    assert len(one.samples_us) == timing.MOST_REPLAYS
    assert len(both.samples_us) == 25_000 / 200  # the budget of time


def test_slow_contenders_get_the_fewest_replays(clock: Clock) -> None:
    slow = Contender("slow", [clock.call("slow", 50_000.0)])
    run(slow)
    assert slow.samples_us == [50_000.0] * timing.FEWEST_REPLAYS


def test_eager_replays_share_many_cold_sets(clock: Clock) -> None:
    calls = [clock.call(str(i), 1000.0) for i in range(12)]
    cold = Contender("cold", calls)
    run(cold, budget_ms=30.0)
    assert cold.calls_per_replay == 5  # 25 ms over 5 replays of 1 ms calls
    assert len(cold.samples_us) == 6
    assert cold.samples_us == [1000.0] * 6
    timed = [int(name) for name in clock.visits[2:]]  # after the first call and the last
    assert timed == [i % 12 for i in range(len(timed))]  # every set once before any again


def test_slow_contenders_are_dropped_after_three_replays(clock: Clock) -> None:
    quick = Contender("quick", [clock.call("quick", 1000.0)])
    near = Contender("near", [clock.call("near", 1490.0)])
    behind = Contender("behind", [clock.call("behind", 1510.0)])
    run(quick, near, behind)
    assert [c.dropped for c in (quick, near, behind)] == [False, False, True]
    assert len(behind.samples_us) == timing.DROP_AFTER
    assert len(quick.samples_us) == 25
    assert behind.status == "ok"
    assert quantiles(behind).p50 == 1510.0


def test_one_slow_replay_drops_no_contender(clock: Clock) -> None:
    quick = Contender("quick", [clock.call("quick", 1000.0)])
    # Two calls prepare and one replay warms; then the first of those that count is slow.
    unlucky = Contender("unlucky", [clock.call("unlucky", 1, 1, 1000, 90_000, 1000)])
    run(quick, unlucky, budget_ms=200.0)
    assert unlucky.samples_us[0] == 90_000.0
    assert not unlucky.dropped
    assert len(unlucky.samples_us) > 10


class Broken(Exception):
    """An error of a library."""


@pytest.mark.parametrize("lives", [0, 1, 2, 5])
def test_a_failure_affects_only_its_contender(clock: Clock, lives: int) -> None:
    left = itertools.count(lives, -1)
    tick = clock.call("bad", 100.0)

    def call() -> None:
        if next(left) <= 0:
            raise Broken("out of luck")
        tick()

    bad = Contender("bad", [call])
    good = [Contender(name, [clock.call(name, 100.0)]) for name in ("first", "last")]
    run(good[0], bad, good[1])
    assert (bad.status, bad.reason) == ("error", "Broken: out of luck")
    assert len(bad.samples_us) == max(0, lives - 3)
    for contender in good:
        assert contender.status == "ok"
        assert len(contender.samples_us) == timing.MOST_REPLAYS


def test_reasons_are_never_empty_nor_long() -> None:
    contender = Contender("a", ())
    contender.fail(Broken())
    assert (contender.status, contender.reason) == ("error", "Broken: no message")
    contender.fail(MemoryError("x" * 9999))
    assert (contender.status, len(contender.reason)) == ("out_of_memory", 500)


def test_out_of_memory_has_its_own_status(clock: Clock) -> None:
    def call() -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    big = Contender("big", [call])
    small = Contender("small", [clock.call("small", 5000.0)])
    run(big, small)
    assert (big.status, small.status) == ("out_of_memory", "ok")
    assert "tried to allocate" in big.reason


def test_nothing_to_time_is_fine() -> None:
    run()
    empty = Contender("empty", [])
    run(empty)
    assert empty.status == "error"


def rounds(visits: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(visits[i : i + size]) for i in range(0, len(visits), size)]


def test_every_round_has_a_random_order(clock: Clock) -> None:
    names = ("a", "b", "c", "d")

    def visits(seed: int) -> list[tuple[str, ...]]:
        clock.visits.clear()
        run(*(Contender(name, [clock.call(name, 1000.0)]) for name in names), seed=seed)
        return rounds(clock.visits[len(names) * 3 :], len(names))  # 3 calls prepare and warm

    found = visits(0)
    assert len(found) == 25
    assert all(sorted(order) == list(names) for order in found)
    assert len(set(found)) > 10
    firsts = [order[0] for order in found]
    assert set(firsts) == set(names)
    assert visits(0) == found
    assert visits(1) != found


def test_clocks_are_read_after_every_replay(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.count(1000.0)
    monkeypatch.setattr(timing, "clock_reader", lambda _device: lambda: next(steps))
    contender = Contender("a", [clock.call("a", 10_000.0)])
    run(contender)
    assert contender.clocks_mhz == [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
    assert quantiles(contender).clock_mhz == 1002.0


def test_a_cpu_has_no_clock_to_read_and_no_graphs(clock: Clock) -> None:
    assert timing.clock_reader(CPU)() is None
    timing.warm(CPU)
    contender = Contender("a", [clock.call("a", 1.0)])
    for regime in ("graph-cold", "graph-hot"):
        with pytest.raises(MeasurementError, match="has only 'eager'"):
            time_contenders([contender], regime=regime, device=CPU, floor_us=1.0)
    assert clock.visits == []
    whole, screened = Contender("whole", ()), Contender("screened", (), screened=True)
    names = {timing.timer_name("eager", whole), timing.timer_name("graph-cold", whole),
             timing.timer_name("graph-cold", screened)}  # fmt: skip
    assert len(names) == 3


def test_an_unknown_regime_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'hot' is unknown; expected one of graph-cold"):
        time_contenders([], regime="hot", device=CPU, floor_us=1.0)


def test_release_frees_graphs_and_operands(clock: Clock) -> None:
    contender = Contender("a", [clock.call("a", 1000.0)])
    run(contender)
    timing.release([contender])
    assert contender._replay is None
    assert contender.calls == ()
    assert len(contender.samples_us) == 25


# --- operands

FP8 = Format.E4M3FN
CACHE_BYTES = 300_000
SHAPE = (300, 136, 200)  # two groups and blocks a side, one of them partial


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "l2_bytes", lambda: CACHE_BYTES)


def problems() -> list[Problem]:
    """Every op with every granularity; row-major and prepared weights; a bias."""
    made = [make_problem("gemm", SHAPE), make_problem("gemm", SHAPE, epilogue="bias")]
    made.append(replace(made[0], b=Operand(Format.BFLOAT16, layout=Layout.ROW)))
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK):
        weight = Operand(FP8, granularity, Layout.COLUMN)
        made.append(make_problem("gemm", SHAPE, b=weight, prepared=True))
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        operand = Operand(FP8, granularity)
        made.append(make_problem("scaled_gemm", SHAPE, a=operand, epilogue="bias"))
        made.append(make_problem("dequantize", SHAPE[::2], a=operand))
        made.append(make_problem("quantize", SHAPE[::2], out_granularity=granularity))
    made.append(make_problem("quantize", SHAPE[::2], out_granularity=Granularity.BLOCK))
    made.append(make_problem("dequantize", SHAPE[::2], a=Operand(FP8, Granularity.BLOCK)))
    return made


def make(problem: Problem, *, cold: bool = True, distribution: str = "X1") -> Operands:
    return Operands(problem, distribution, CPU, HERE, cold=cold)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, QuantizedTensor):
        return tensors([value.data, value.scale, value.source])
    return [t for part in value for t in tensors(part)] if isinstance(value, (list, tuple)) else []


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last that the tensor may touch."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_cold_sets_exceed_twice_the_cache_and_share_no_memory(problem: Problem) -> None:
    cold = make(problem)
    every = tensors(cold.sets)
    assert len(cold.sets) * problem.bytes_moved >= 2 * CACHE_BYTES
    assert (len(cold.sets) - 1) * problem.bytes_moved < 2 * CACHE_BYTES
    assert sum(t.numel() * t.element_size() for t in every) >= 2 * CACHE_BYTES
    pieces = sorted(memory(t) for t in [*every, cold.x, *tensors([cold.w])])
    for (_, end), (begin, _) in itertools.pairwise(pieces):
        assert end <= begin
    hot = make(problem, cold=False)
    assert len(hot.sets) == 1


@pytest.mark.parametrize("m", [1, 300, 2048, 5000])
def test_sets_repeat_sampled_rows_in_different_orders(m: int) -> None:
    drawn = min(m, operand_cache.SAMPLED_ROWS)
    cold = make(make_problem("gemm", (m, 8, 16)), cold=m > 1)
    for (a, b, out, bias), order in zip(cold.sets, cold.order, strict=True):
        assert order.shape == (m,)
        for piece in order.split(drawn)[: m // drawn]:
            assert piece.sort().values.tolist() == list(range(drawn))
        rest = order[m // drawn * drawn :]
        assert len(set(rest.tolist())) == len(rest)
        assert torch.equal(a, cold.x[order])
        assert torch.equal(b.t(), cold.w)  # type: ignore[arg-type]
        assert (out.shape, bias) == ((m, 8), None)
    assert len({tuple(order.tolist()) for order in cold.order}) == len(cold.order)
    again = make(make_problem("gemm", (m, 8, 16)), cold=m > 1)
    assert all(torch.equal(x, y) for x, y in zip(cold.order, again.order, strict=True))


def test_quantized_operands_are_exact_quantizations_of_the_sampled_rows() -> None:
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        problem = make_problem("scaled_gemm", SHAPE, a=Operand(FP8, granularity))
        cold = make(problem, distribution="X14")
        exact = numerics.dequantize(numerics.quantize(cold.x, FP8, granularity))
        for (a, a_scale, b, b_scale, _, _), order in zip(cold.sets, cold.order, strict=True):
            found = numerics.dequantize(QuantizedTensor(a, a_scale, granularity))
            assert torch.equal(found, exact[order])
            assert problem.b is not None
            weight = QuantizedTensor(b.t(), b_scale.t(), problem.b.granularity)
            wanted = numerics.quantize(cold.w, FP8, problem.b.granularity)  # type: ignore[arg-type]
            assert torch.equal(numerics.dequantize(weight), numerics.dequantize(wanted))


def test_operands_have_the_layouts_of_the_problem() -> None:
    column = make(make_problem("gemm", SHAPE), cold=False).sets[0][1]
    row = make(
        make_problem("gemm", SHAPE, b=Operand(Format.BFLOAT16, layout=Layout.ROW)), cold=False
    ).sets[0][1]
    assert (column.shape, row.shape) == ((200, 136), (200, 136))
    assert (column.stride(), row.stride()) == ((1, 200), (136, 1))
    weight = Operand(FP8, Granularity.ROW, Layout.COLUMN)
    prepared = make(make_problem("gemm", SHAPE, b=weight, prepared=True), cold=False).sets[0][1]
    assert isinstance(prepared, QuantizedTensor)
    assert (prepared.shape, prepared.transposed) == ((200, 136), True)
    assert torch.equal(prepared.source, column.t())  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [300, 5000])
def test_rows_under_one_scale_stay_together(m: int) -> None:
    problem = make_problem("dequantize", (m, 200), a=Operand(FP8, Granularity.BLOCK))
    cold = make(problem, distribution="X14")
    assert cold.x.shape == (min(m, operand_cache.SAMPLED_ROWS), 200)
    exact = numerics.dequantize(numerics.quantize(cold.x, FP8, Granularity.BLOCK))
    for (data, scale, _), order in zip(cold.sets, cold.order, strict=True):
        assert torch.equal(order, torch.arange(m) % len(cold.x))
        found = numerics.dequantize(QuantizedTensor(data, scale, Granularity.BLOCK))
        assert torch.equal(found, exact[order])


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_poison_reaches_every_output_and_nothing_else(problem: Problem) -> None:
    cold = make(problem)
    written = [{id(out) for out in cold.outputs(given)} for given in cold.sets]
    inputs = [
        [t for t in tensors(given) if id(t) not in outs]
        for given, outs in zip(cold.sets, written, strict=True)
    ]
    before = [[t.clone() for t in given] for given in inputs]
    cold.poison()
    for given in cold.sets:
        for out in cold.outputs(given):
            if out.dtype.itemsize == 1:
                assert (out.view(torch.uint8) == 0xA5).all()
            else:
                assert torch.isnan(out).all()
    for old, new in zip(before, inputs, strict=True):
        for x, y in zip(old, new, strict=True):
            assert torch.equal(x.float(), y.float())


# --- kernels that are right, and kernels that are wrong


def right_kernel(problem: Problem) -> Kernel:
    """A kernel of the registry that computes the problem on any device."""
    of_a, of_out = problem.a.granularity.suffix, problem.out_granularity.suffix
    return KERNELS[
        {
            "gemm": "torch.bf16",
            "quantize": f"torch.quantize_{of_out}",
            "dequantize": f"torch.dequantize_{of_a}",
            "scaled_gemm": f"torch.emulated_{'block' if of_a == 'group' else of_a}",
        }[problem.op]
    ]


def spoiled(problem: Problem, spoil: Callable[..., None]) -> Kernel:
    """The right kernel, but something happens to what it wrote."""
    right = right_kernel(problem)
    output = {"quantize": (1, 2), "dequantize": (2,), "gemm": (2,), "scaled_gemm": (4,)}

    def launch(*given: Any) -> None:
        right.launch(*given)
        spoil(*(given[place] for place in output[problem.op]))

    return replace(right, name="test.spoiled", launch=launch)


def checked(problem: Problem, kernel: Kernel, *, sets: int | None = None) -> tuple[float, str]:
    cold = make(problem)
    cold.poison()
    for call in contender_of(cold, kernel).calls[:sets]:
        call()
    error, wrong = cold.check(kernel)
    return error.maximum, wrong


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_correct_kernels_pass(problem: Problem) -> None:
    error, wrong = checked(problem, right_kernel(problem))
    assert wrong == ""
    assert 0 <= error <= 1


def bump(tensor: torch.Tensor, place: tuple[int, int] = (-1, -1)) -> None:
    """Make one element wrong: by one unit in bytes, by a tenth otherwise."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8)[place] ^= 1
    else:
        tensor[place] = tensor[place] * 1.1 + 0.1


def swap_rows(tensor: torch.Tensor) -> None:
    kept = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    kept[[0, 1]] = kept[[1, 0]].clone()


@pytest.mark.parametrize("problem", problems(), ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda out, *_: bump(out), id="last element"),
        pytest.param(lambda out, *_: bump(out, (0, 0)), id="first element"),
        pytest.param(lambda out, *_: swap_rows(out), id="swapped rows"),
        pytest.param(lambda out, *_: out[-1].view(torch.uint8).fill_(0xFF), id="row not written"),
        pytest.param(lambda out, *_: out.copy_(out.float() * 1.05), id="5 % too large"),
    ],
)
def test_incorrect_outputs_are_found(problem: Problem, spoil: Callable[..., None]) -> None:
    error, wrong = checked(problem, spoiled(problem, spoil))
    assert wrong
    assert error > 1


@pytest.mark.parametrize("problem", [p for p in problems() if p.op == "quantize"], ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda _, scale: scale.fill_(math.nan), id="scales not written"),
        pytest.param(lambda _, scale: bump(scale), id="last scale"),
        pytest.param(
            lambda _, scale: scale.copy_(scale.nextafter(scale.new_tensor(math.inf))),
            id="one unit in the last place",
        ),
    ],
)
def test_incorrect_scales_are_found(problem: Problem, spoil: Callable[..., None]) -> None:
    error, wrong = checked(problem, spoiled(problem, spoil))
    assert "scales differ from the exact quantization, the first at row " in wrong
    assert error == math.inf


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_a_kernel_without_outputs_is_found(problem: Problem) -> None:
    idle = replace(right_kernel(problem), name="test.idle", launch=lambda *_: None)
    error, wrong = checked(problem, idle)
    assert error == math.inf
    assert wrong


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_an_unwritten_set_is_found(problem: Problem) -> None:
    error, wrong = checked(problem, right_kernel(problem), sets=-1)
    assert wrong
    assert error == math.inf


def test_a_kernel_is_checked_against_its_own_bound() -> None:
    problem = make_problem("gemm", SHAPE)
    step = spoiled(problem, lambda out: out[0, 0].mul_(1 + 2.0**-5))
    error, wrong = checked(problem, step)
    assert error > 1
    assert wrong == f"kernel_err {error:.3g} > 1"
    assert checked(problem, replace(step, kernel_err_bound=error)) == (error, "")
    assert checked(problem, replace(step, kernel_err_bound=error * 0.999))[1]


def test_quantizing_kernels_are_checked_against_the_quantized_product() -> None:
    """The reference has quantized operands, because rounding to FP8 is no error of a kernel."""
    problem = make_problem("gemm", SHAPE)
    for name in (
        "torch.quantize_row+torch.emulated_row",
        "torch.quantize_group+torch.emulated_block",
    ):
        assert checked(problem, KERNELS[name])[1] == ""
        plain = replace(KERNELS["torch.bf16"], name="test.plain", parts=("x",),
                        granularity=KERNELS[name].granularity,
                        b_granularity=KERNELS[name].b_granularity)  # fmt: skip
        assert checked(problem, plain)[0] > 1


def test_kernels_of_one_problem_have_their_own_references() -> None:
    cold = make(make_problem("gemm", SHAPE), distribution="X14")
    for name in ("torch.quantize_row+torch.emulated_row", "torch.bf16",
                 "torch.quantize_group+torch.emulated_block", "torch.bf16"):  # fmt: skip
        for call in contender_of(cold, KERNELS[name]).calls:
            call()
        assert cold.check(KERNELS[name])[1] == ""


def test_time_case_continues_after_failures_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("gemm", SHAPE)
    monkeypatch.setattr(timing, "BUDGET_MS", 1.0)
    monkeypatch.setattr(timing, "MOST_REPLAYS", 5)
    monkeypatch.setattr(time_problem, "torch_device", lambda: CPU)

    def refuse(*_: Any) -> None:
        raise Broken("no such instruction")

    def greedy(*_: Any) -> tuple[torch.Tensor, ...]:
        raise MemoryError("too large a workspace")

    right = right_kernel(problem)
    written: set[int] = set()

    def once(*given: Any) -> None:
        if given[2].data_ptr() not in written:
            written.add(given[2].data_ptr())
            right.launch(*given)

    kernels = (
        replace(right, name="test.refuse", launch=refuse),
        right,
        replace(right, name="test.greedy", workspace=greedy),
        spoiled(problem, lambda out: bump(out)),
        replace(right, name="test.once", launch=once),
    )
    told: list[tuple[int | None, str]] = []
    records = time_case(
        Case(problem, "X1"), kernels, HERE, "eager", announce=lambda *words: told.append(words)
    )
    assert {place for place, _ in told} == {None, *range(len(kernels))}
    refused, good, no_room, wrong, lazy = records
    assert (refused.status, refused.reason) == ("error", "Broken: no such instruction")
    assert refused.latency_us_p50 is None
    assert no_room.status == "out_of_memory"
    assert no_room.reason == "MemoryError: too large a workspace"
    assert (good.status, good.reason, good.timer) == ("ok", "", "host clock")
    assert good.kernel_err is not None
    assert good.kernel_err <= 1
    assert good.latency_us_p20 <= good.latency_us_p50 <= good.latency_us_p80  # type: ignore[operator]
    assert wrong.status == "wrong"
    assert wrong.reason.startswith("kernel_err ")
    assert wrong.kernel_err > 1  # type: ignore[operator]
    assert (lazy.status, lazy.kernel_err) == ("wrong", math.inf)


def test_floor_of_time_grows_with_the_problem() -> None:
    small, large = make_problem("gemm", (64, 64, 64)), make_problem("gemm", (8192, 8192, 8192))
    assert (
        time_problem.FLOOR_LAUNCH_US < time_problem.floor_us(small) < time_problem.floor_us(large)
    )
    assert time_problem.floor_us(large) == pytest.approx(large.flops / 1.979e9 + 1.5)


def test_the_registry_is_unchanged() -> None:
    assert not [name for name in KERNELS if name.startswith("test.")]
    assert set(ANY) == {"any"}


# --- screening, with graphs that are none


@pytest.fixture
def graphs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Graphs that call on the CPU; says whether the one that replays is of a few calls, so hot."""
    state = {"hot": False}

    def capture(contender: Contender, calls: Any, floor_us: float) -> None:
        count = timing._repeats(calls, floor_us)
        hot = len(calls) < len(contender.calls)
        contender.calls_per_replay = count

        def replay() -> float:
            begun, state["hot"] = clock.now_ns, hot
            for place in range(count):
                calls[place % len(calls)]()
            return (clock.now_ns - begun) / 1e3

        contender._replay = replay

    monkeypatch.setattr(timing, "_capture", capture)
    monkeypatch.setattr(timing, "_warm_up", lambda contender: contender.calls[0]())
    monkeypatch.setattr(timing, "check_regime", lambda *_: None)
    return state


def contender_of_many(
    clock: Clock, graphs: dict[str, bool], name: str, hot_us: float, cold_us: float
) -> Contender:
    def call() -> None:
        clock.now_ns += round(1e3 * (hot_us if graphs["hot"] else cold_us))

    return Contender(name, [call] * 50)


def race(*contenders: Contender) -> None:
    time_contenders(contenders, regime="graph-cold", device=CPU, floor_us=5.0)


def test_a_few_calls_screen_out_slow_contenders(clock: Clock, graphs: dict[str, bool]) -> None:
    fast = contender_of_many(clock, graphs, "fast", 10.0, 10.0)
    near = contender_of_many(clock, graphs, "near", 14.0, 14.0)
    slow = contender_of_many(clock, graphs, "slow", 100.0, 100.0)
    race(fast, near, slow)
    assert (slow.screened, slow.dropped, slow.samples_us) == (True, True, [100.0] * 3)
    assert slow.calls_per_replay == timing.SCREENED_CALLS
    for contender, us in ((fast, 10.0), (near, 14.0)):
        assert (contender.screened, contender.status) == (False, "ok")
        assert len(contender.samples_us) > timing.DROP_AFTER
        assert set(contender.samples_us) == {us}
        assert contender.calls_per_replay == 100  # twice 50 cold sets: 500 us by the floor


def test_screened_times_do_not_rank_contenders(clock: Clock, graphs: dict[str, bool]) -> None:
    """Screened out beside one whom the cache flatters, but not 1.5x behind its cold time."""
    flattered = contender_of_many(clock, graphs, "flattered", 4.0, 10.0)
    honest = contender_of_many(clock, graphs, "honest", 11.0, 12.0)
    behind = contender_of_many(clock, graphs, "behind", 16.0, 18.0)
    race(flattered, honest, behind)
    assert set(flattered.samples_us) == {10.0}
    assert set(honest.samples_us) == {12.0} and not honest.screened
    assert behind.screened and set(behind.samples_us) == {16.0}


def test_a_single_contender_is_not_screened(clock: Clock, graphs: dict[str, bool]) -> None:
    alone = contender_of_many(clock, graphs, "alone", 1.0, 10.0)
    race(alone)
    assert set(alone.samples_us) == {10.0}
