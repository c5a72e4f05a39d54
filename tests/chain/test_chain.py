"""Chains: the search compared with all combinations, the choices, and their execution."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

import lokakern
from lokakern import dispatch_chain
from lokakern.bench.cli.main import app
from lokakern.bench.compare import chain_timing as bench_chain
from lokakern.bench.compare import compiled_baselines
from lokakern.chain import candidates
from lokakern.chain.candidates import Chain, Form, Layer, Step, options_of
from lokakern.chain.choice import ChainChoice
from lokakern.chain.dispatch import INPUTS
from lokakern.chain.search import LayerOption, Path, best_paths, fastest_within
from lokakern.device import current_device
from lokakern.errors import (
    BudgetError,
    DeviceError,
    FormatError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.functional.run import run
from lokakern.measure import operands
from lokakern.norm import norm_named, static_scale
from lokakern.numerics import Errors
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry import float16
from lokakern.registry.ops import ACTIVATIONS
from lokakern.registry.register import KERNELS, kernel_named, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, KernelRow, TimingRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, misses
from lokakern.selection.candidates import Time
from lokakern.sweep.resume import distribution_row
from lokakern.types import (
    Device,
    Environment,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
)
from tests.support.rows_at_once import RowsAtOnce

load_kernels()
NONE, TENSOR, ROW, GROUP = (
    Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.GROUP
)  # fmt: skip
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
BLOCK = "bias+block_rms(64)+hardswish"
LAYERS = [(128, 128, BLOCK)] * 4
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
UNFUSED, EMULATED = "torch.norm_unfused", "torch.norm_emulated_row"
QUANTIZED = f"torch.quantize_row+{EMULATED}"
Told = Callable[[Problem, str], tuple[float, float] | None]


def tell(monkeypatch: pytest.MonkeyPatch, told: Told, kernels: list[str]) -> None:
    """Replace the database by these times and errors of kernels, by problem."""

    def measured(
        chain: Chain, place: int, problem: Problem, *, unquantized: bool = False
    ) -> Iterator[Step]:
        for name in kernels:
            kernel = KERNELS[name]
            plain = kernel.granularity is NONE
            known = told(problem, name)
            fits = kernel.refusal(problem, current_device()) is None
            if known and fits and not (plain and problem.prepared) and (plain or not unquantized):
                us, row_err = known
                yield Step(place, problem, name, Time(us, 0.0, "fresh", 1), False, row_err)

    monkeypatch.setattr(candidates, "_measured", measured)


def usual(problem: Problem, name: str) -> tuple[float, float] | None:
    """FP8 takes half as long as bfloat16, writes faster under one scale, and errs."""
    if problem.op in ("quantize", "dequantize"):
        return 2.0, 0.02
    if name == UNFUSED:
        return (20.0, 0.002) if problem.out_granularity is NONE else (21.0, 0.02)
    writes = {NONE: (10.0, 0.04), ROW: (9.0, 0.05), TENSOR: (8.0, 0.051), GROUP: (9.5, 0.05)}
    us, row_err = writes[problem.out_granularity]
    return us + (3.0 if name == QUANTIZED else 0.0), row_err


KERNELS_OF_TESTS = [UNFUSED, EMULATED, QUANTIZED, "torch.quantize_row", "torch.dequantize_row"]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current_device.cache_clear()
    tell(monkeypatch, usual, KERNELS_OF_TESTS)
    yield
    current_device.cache_clear()


# --- search

forms = st.sampled_from("abc")
one_option = st.builds(
    LayerOption, forms, forms, st.integers(1, 30), st.integers(0, 9), st.integers()
)
some_layers = st.lists(st.lists(one_option, max_size=6), min_size=1, max_size=5)


def every_path(layers: list[list[LayerOption]], first: object, last: object) -> list[Path]:
    """The best chain, found by trying all combinations."""
    return [
        Path(sum(w.time_us for w in options), sum(w.square for w in options), options)
        for options in itertools.product(*layers)
        if (options[0].reads, options[-1].writes) == (first, last)
        and all(one.writes == two.reads for one, two in itertools.pairwise(options))
    ]


@settings(max_examples=300, deadline=None)
@given(some_layers, forms, forms, st.integers(0, 45))
def test_the_search_equals_exhaustive_search(
    layers: list[list[LayerOption]], first: str, last: str, limit: int
) -> None:
    found, every = best_paths(layers, first, last), every_path(layers, first, last)
    numbers = {path[:2] for path in every}
    pareto_optimal = {
        (us, square) for us, square in numbers
        if not any(a <= us and b <= square and (a, b) != (us, square) for a, b in numbers)
    }  # fmt: skip
    assert [path[:2] for path in found] == sorted(pareto_optimal)
    assert all(path in every for path in found)
    best, allowed = fastest_within(found, limit), [us for us, square in numbers if square <= limit]
    assert (best.time_us if best else None) == min(allowed, default=None)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.floats(0.0, 0.2), st.integers(0, 10**6))
def test_dispatch_finds_the_fastest_of_all_combinations(
    count: int, budget: float, seed: int
) -> None:
    random = Random(seed)
    told: dict[tuple[Problem, str], tuple[float, float] | None] = {}

    def drawn(problem: Problem, name: str) -> tuple[float, float] | None:
        made = (random.uniform(5, 20), random.uniform(0.001, 0.08))
        return told.setdefault((problem, name), made if random.random() < 0.7 else None)

    with pytest.MonkeyPatch.context() as patch:
        tell(patch, drawn, KERNELS_OF_TESTS)
        choice = dispatch_chain([(64, 64, "rms")] * count, 32, budget)
        layers = [options_of(choice.chain, place) for place in range(count)]
    every = every_path(layers, Form(NONE, NONE), Form(NONE, NONE))
    allowed = [path.time_us for path in every if path.square <= budget**2]
    plain = choice.unquantized.latency_us
    best = min(allowed, default=None)
    if plain is None:
        assert choice.is_miss and choice.steps == choice.plain
    elif best is None or best > 0.95 * plain:
        assert choice.latency_us == plain or choice.latency_us == pytest.approx(best)
    else:
        assert choice.latency_us == pytest.approx(best)
        assert choice.row_err is not None and choice.row_err <= budget * (1 + 1e-9)


# --- dispatch


@pytest.mark.usefixtures("known")
def test_a_chain_stays_in_fp8_where_the_budget_is_wide() -> None:
    choice = dispatch_chain(LAYERS, 32, 0.2)
    assert choice.kernels == ("torch.quantize_row", EMULATED, EMULATED, EMULATED, EMULATED)
    static = "e4m3fn/tensor"
    assert choice.formats == ("bfloat16", static, static, static, "bfloat16")
    assert choice.latency_us == pytest.approx(2 + 8 + 8 + 8 + 10)
    assert choice.unquantized.kernels == (UNFUSED,) * 4
    assert choice.unquantized.latency_us == 80.0


@pytest.mark.usefixtures("known")
def test_rounding_between_layers_counts_once_with_its_gain() -> None:
    """As if bfloat16 were written, but for what one scale loses more than one for each row."""
    choice = dispatch_chain(LAYERS, 32, 0.2)
    gain = candidates.GAINS["hardswish"]
    first = 0.04**2 + 0.051**2 - 0.05**2
    assert choice.row_err is not None
    assert choice.row_err**2 == pytest.approx(first * (gain + gain**2 + gain**3) + 0.04**2)
    assert choice.unquantized.row_err == pytest.approx(
        0.002 * math.sqrt(1 + gain + gain**2 + gain**3)
    )


@pytest.mark.usefixtures("known")
def test_a_tighter_budget_leaves_layers_in_bfloat16() -> None:
    times = []
    for budget in (0.001, 0.03, 0.05, 0.07, 0.2):
        choice = dispatch_chain(LAYERS, 32, budget)
        assert choice.latency_us is not None and choice.row_err is not None
        assert choice.row_err <= budget or choice.steps == choice.plain
        times.append(choice.latency_us)
    assert times == sorted(times, reverse=True)
    assert times[0] == times[1] == 80.0 and len(set(times)) > 3
    assert dispatch_chain(LAYERS, 32).steps == dispatch_chain(LAYERS, 32, 0.03).plain


@pytest.mark.usefixtures("known")
def test_explain_shows_the_chain_and_its_alternatives() -> None:
    words = dispatch_chain(LAYERS, 32, 0.07).explain()
    assert "within row_err 0.07" in words and "unquantized: 80.00 us" in words
    assert "rejected, over the budget: 36.00 us" in words
    assert f"4      128 x 128  {EMULATED}" in words
    assert "all realistic distributions but X12" in words
    assert "worst on X1\n" in dispatch_chain(LAYERS, 32, 0.07, distribution="X1").explain() + "\n"


def test_fp8_is_not_taken_within_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(problem: Problem, name: str) -> tuple[float, float]:
        return (20.0, 0.002) if name == UNFUSED else (19.7, 0.01)

    tell(monkeypatch, near, [UNFUSED, EMULATED, QUANTIZED])
    choice = dispatch_chain(LAYERS, 32, 0.2)
    assert choice.kernels == (UNFUSED,) * 4 and not choice.is_miss
    assert "no faster, or not beyond noise" in choice.explain()


def test_without_measurements_the_unquantized_chain_is_a_miss() -> None:
    choice = dispatch_chain(LAYERS[:2], 32, 0.06, device="NVIDIA H200")
    assert choice.is_miss and choice.latency_us is None and choice.row_err is None
    assert choice.kernels == (UNFUSED,) * 2
    assert "miss: no unquantized kernel was measured at gemm_norm m=32" in choice.explain()
    words = shlex.split(choice.sweep_command)
    assert words[:4] == ["python", "-m", "lokakern.bench", "sweep"]
    problems = [misses.parse(text) for text in words[5::2]]
    assert tuple(problems) == choice.missing and set(words[4::2]) == {"--problem"}
    facts = {(p.a.granularity, p.prepared, p.out_granularity) for p in problems}
    assert facts >= {(NONE, False, NONE), (NONE, True, TENSOR), (ROW, False, NONE)}
    with pytest.raises(UnsupportedError, match="this chain is for NVIDIA H200; here is"):
        choice.prepare([torch.zeros(128, 128, dtype=torch.bfloat16)] * 2)


def test_times_and_errors_come_from_the_database(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times between measured m are interpolated, and marked."""
    n, k = 512, 512
    fused, whole = "cuda.gemm_norm_row", "cuda.quantize_row+cuda.gemm_norm_row"
    scaled = Operand(Format.E4M3FN, ROW)
    weight = Operand(Format.E4M3FN, ROW, Layout.COLUMN)
    static: dict[str, Any] = {"out_format": Format.E4M3FN, "out_granularity": TENSOR}
    rows: list[tuple[str, dict[str, Any], float, float]] = [
        (UNFUSED, {}, 100.0, 0.003),
        (whole, {"b": weight, "prepared": True, **static}, 40.0, 0.05),
        (fused, {"a": scaled, **static}, 20.0, 0.05),
        (fused, {"a": scaled}, 30.0, 0.04),
    ]
    path = tmp_path / "rows.sqlite"
    with RowsAtOnce.create(path, suite="test", command="test", harness_digest="0" * 64,
                        grade="full") as run:  # fmt: skip
        for name, fields, us, row_err in rows:
            for m in (2048, 4096):
                problem = make_problem("gemm_norm", (m, n, k), epilogue="block_rms(256)", **fields)
                add_time(run, name, problem, us * m / 2048)
            asked = accuracy_problem(problem, Format.E4M3FN)
            for distribution, seed in itertools.product(INPUTS, (0, 1, 2)):
                add_error(run, name, asked, distribution, seed, row_err)
    dispatcher.use_snapshot(load_snapshot([path]))
    try:
        layers = [(n, k, "block_rms(256)")] * 3
        choice = dispatch_chain(layers, 2048, 0.1, device="NVIDIA H200")
        assert choice.kernels == (whole, fused, fused) and not choice.interpolated
        assert choice.latency_us == pytest.approx(90.0)
        assert choice.unquantized.latency_us == pytest.approx(300.0)
        between = dispatch_chain(layers, 3072, 0.1, device="NVIDIA H200")
        assert between.latency_us == pytest.approx(135.0) and between.interpolated
        assert between.explain().count("(interpolated)") == 3
        assert dispatch_chain(layers, 8192, 0.1, device="NVIDIA H200").is_miss
        strict = dispatch_chain(layers, 2048, 0.05, device="NVIDIA H200")
        assert strict.kernels == (UNFUSED,) * 3  # nothing reads what one layer would write in FP8
        # In float16 times are those of bfloat16, and errors are not known but from FP8 to FP8.
        half = {"device": "NVIDIA H200", "dtype": torch.float16}
        plain = dispatch_chain(layers, 2048, 0.1, **half)
        assert plain.kernels == (UNFUSED,) * 3 and plain.latency_us == pytest.approx(300.0)
        ends = {"in_granularity": "row", "out_granularity": "tensor"}
        (path,) = dispatch_chain(layers[:1], 2048, 0.1, **half, **ends).paths
        assert [step.kernel for step in path.options[0].steps] == [fused]
        takes = float16.why_not
        monkeypatch.setattr(
            float16, "why_not", lambda name, parts: "no" if name == fused else takes(name, parts)
        )
        refused = dispatch_chain(layers[:1], 2048, 0.1, **half, **ends)
        assert not refused.paths
        assert dispatch_chain(layers[:1], 2048, 0.1, device="NVIDIA H200", **ends).paths
    finally:
        dispatcher.use_snapshot(None)


def add_time(run: RowsAtOnce, name: str, problem: Problem, us: float) -> None:
    record = TimingRecord(
        status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us, replay_count=50,
        void_count=0, calls_per_replay=10, clock_mhz=1980.0, kernel_err=0.5,
        kernel_err_row_p99=0.4, timer="test",
    )  # fmt: skip
    run.add_timing(KernelRow.of(KERNELS[name]), problem, distribution_row("X1"), H200,
                   Environment(), "graph-cold", record)  # fmt: skip


def add_error(
    run: RowsAtOnce, name: str, asked: Problem, distribution: str, seed: int, row_err: float
) -> None:
    errors = Errors(
        row_err=row_err, row_err_upper=row_err, row_p50=row_err, row_p99=row_err,
        row_p99_upper=row_err, row_max=row_err, rel_err=row_err, rel_err_upper=row_err,
        sqnr_db=28.0, mean_rel_err=row_err, mean_rel_err_upper=row_err,
        mean_rel_err_excluded_share=0.0, mean_shift=0.0, mean_shift_upper=1e-4, nonfinite_count=0,
        nonfinite_unexpected_count=0,
    )  # fmt: skip
    record = AccuracyRecord(
        status="ok", seed=seed, rows=asked.m, errors=errors, kernel_err=0.5,
        kernel_err_row_p99=0.4, flushed_share=0.0, saturated_share=0.0,
    )  # fmt: skip
    run.add_accuracy(KernelRow.of(KERNELS[name]), asked, distribution_row(distribution), "sm_90",
                     Environment(), record)  # fmt: skip


@pytest.mark.usefixtures("known")
def test_without_prepared_weights_tensors_between_layers_are_bfloat16() -> None:
    choice = dispatch_chain(LAYERS, 32, 0.2, prepared=False)
    assert set(choice.formats) == {"bfloat16"}
    assert choice.kernels == (QUANTIZED,) * 4  # which quantizes weights, too


@pytest.mark.usefixtures("known")
def test_a_chain_in_float16_is_that_everywhere() -> None:
    choice = dispatch_chain(LAYERS, 32, 0.2, dtype=torch.float16, in_granularity="row")
    static = "e4m3fn/tensor"
    assert choice.formats == ("e4m3fn/row", static, static, static, "float16")
    assert [step.problem.out_format for step in choice.plain] == [Format.FLOAT16] * 5
    run = dispatch_chain([(64, 64, "none")], 8, dtype=torch.float16).prepare(
        [torch.full((64, 64), 64.0, dtype=torch.float16)]
    )
    assert run(torch.full((8, 64), 1024.0, dtype=torch.float16)).isinf().all()  # 2 ** 22


@pytest.mark.usefixtures("known")
def test_inputs_and_outputs_of_a_chain_may_be_fp8() -> None:
    choice = dispatch_chain(LAYERS, 32, 0.2, in_granularity="row", out_granularity="tensor")
    assert (choice.formats[0], choice.formats[-1]) == ("e4m3fn/row", "e4m3fn/tensor")
    assert choice.kernels == (EMULATED,) * 4
    plain = dispatch_chain(LAYERS, 32, None, in_granularity="row").kernels
    assert len(plain) == 5 and KERNELS[plain[0]].op == "dequantize"


@pytest.mark.parametrize(
    ("layers", "options", "error", "says"),
    [
        ([], {}, ShapeError, "there are no layers"),
        (None, {}, ShapeError, "layers is None; expected a sequence"),
        (None, {"device": H200}, ShapeError, "layers is None; expected a sequence"),
        ([(64, 32, "rms")], {"device": 3}, DeviceError, "device is 3; expected a product"),
        ([(64,)], {}, ShapeError, r"layer 1 is \(64,\)"),
        ([(64, 32, 7)], {}, ShapeError, "expected .n, k, epilogue."),
        ([(64, 32, "rms"), (64, 32, "rms")], {}, ShapeError, "layer 2 reads 32 columns"),
        ([(64, 0, "rms")], {}, ShapeError, "integers"),
        ([(64, 32, "rsm")], {}, UnknownNameError, "is unknown"),
        ([(64, 32, "rms+gate")], {}, UnknownNameError, "layer 1 has gate"),
        ([(64, 32, "residual+rms")], {}, UnknownNameError, "has residual"),
        ([(64, 32, "rms")], {"m": 0}, ShapeError, "m is 0"),
        ([(64, 32, "rms")], {"m": 3.5}, ShapeError, "m is 3.5"),
        ([(64, 32, "rms")], {"budget": -1.0}, BudgetError, "row_err is -1.0"),
        ([(64, 32, "rms")], {"budget": lokakern.ErrorBudget(rel_err=0.1)}, BudgetError, "row_err"),
        ([(64, 32, "rms")], {"in_granularity": "128x128"}, FormatError, "expected tensor, row"),
        ([(64, 32, "rms")], {"in_granularity": "cell"}, FormatError, "granularity is 'cell'"),
        ([(64, 32, "none")], {"out_granularity": "tensor"}, FormatError, "is not bounded"),
        ([(64, 32, "rms")], {"dtype": torch.float32}, FormatError, "dtype is torch.float32"),
        ([(64, 32, "rms")], {"distribution": "X99"}, UnknownNameError, "X99"),
    ],
)  # fmt: skip
def test_invalid_requests_raise(
    layers: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    given = {"m": 32, "budget": 0.06, **options}
    with pytest.raises(error, match=says):
        dispatch_chain(layers, given.pop("m"), given.pop("budget"), **given)


# --- run


def drawn(
    layers: list[Any] = LAYERS, m: int = 32, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((m, layers[0][1]), generator=generator).to(dtype)
    weights = [(torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype)
               for n, k, _ in layers]  # fmt: skip
    biases = [torch.randn(n, generator=generator) for n, _, _ in layers]
    return x, weights, biases


def layer_by_layer(choice: ChainChoice, x: Any, weights: list[Tensor], biases: list[Tensor]) -> Any:
    """The same kernels through the public functions, one at a time."""
    for step in choice.steps:
        kernel, problem = kernel_named(step.kernel), step.problem
        if problem.op == "quantize":
            x = run(kernel, x)
            continue
        if problem.op == "dequantize":
            x = run(kernel, x, out_format=problem.out_format)
            continue
        assert problem.b is not None
        weight = weights[step.place]
        b: Any = weight.t()
        if problem.b.granularity is not NONE:
            made = lokakern.quantize(weight, problem.b.granularity)
            b = QuantizedTensor(made.data, made.scale, made.granularity, True, weight)
        if isinstance(x, QuantizedTensor) and x.granularity is not problem.a.granularity:
            assert x.granularity is TENSOR and x.scale is not None
            spread = problem.a.granularity.scale_shape(*x.data.shape)
            x = QuantizedTensor.packed(x.data, x.scale.expand(spread), problem.a.granularity)
        kind: dict[str, Any] = {"out_format": problem.out_format}
        if problem.out_format.is_fp8:
            kind |= {"out_granularity": problem.out_granularity}
        if problem.out_granularity is TENSOR:
            kind["out_scale"] = "static"
        x = run(kernel, x, b, bias=biases[step.place], norm="block_rms(64)",
                           activation="hardswish", **kind)  # fmt: skip
    return x


ENDS: list[dict[str, Any]] = [
    {}, {"in_granularity": "row"}, {"out_granularity": "row"}, {"out_granularity": "tensor"}
]  # fmt: skip


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("budget", [None, 0.05, 0.07, 0.2])
@HALVES
def test_a_run_equals_its_kernels_in_sequence(
    dtype: torch.dtype, budget: float | None, ends: dict[str, Any]
) -> None:
    choice = dispatch_chain(LAYERS, 32, budget, dtype=dtype, **ends)
    x, weights, biases = drawn(dtype=dtype)
    if budget != 0.2:  # else in float32
        biases = [bias.to(dtype) for bias in biases]
    given = lokakern.quantize(x, "row") if "in_granularity" in ends else x
    run = choice.prepare(weights, biases)
    expected = layer_by_layer(choice, given, weights, biases)
    for out in (run(given), run(given), run(given, run.empty_output())):
        if isinstance(out, Tensor):
            assert out.dtype is dtype and torch.equal(out, expected)
            continue
        assert torch.equal(out.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert out.scale is not None and torch.equal(out.scale, expected.scale)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "whole", [QUANTIZED, "torch.quantize_row+torch.emulated_row+torch.norm_quantize"]
)
def test_a_composition_reads_bfloat16(monkeypatch: pytest.MonkeyPatch, whole: str) -> None:
    def told(problem: Problem, name: str) -> tuple[float, float]:
        quantizes_weights = problem.b is not None and not problem.b.format.is_fp8
        return (20.0 if name == UNFUSED else 9.0 + quantizes_weights), 0.01

    tell(monkeypatch, told, [UNFUSED, EMULATED, whole])
    choice = dispatch_chain(LAYERS, 32, 0.2)
    assert choice.kernels[0] == whole and choice.steps[0].problem.prepared
    x, weights, biases = drawn()
    expected = layer_by_layer(choice, x, weights, biases)
    assert torch.equal(choice.prepare(weights, biases)(x), expected)


@pytest.mark.usefixtures("known")
def test_a_run_does_not_change_its_input_or_earlier_outputs() -> None:
    x, weights, biases = drawn()
    run = dispatch_chain(LAYERS, 32, 0.2).prepare(weights, biases)
    first, second = run(x), run(-x)
    assert not torch.equal(first, second)
    assert torch.equal(run(x), first)
    weights[0].zero_()  # quantized before
    assert torch.equal(run(x), first)


@pytest.mark.usefixtures("known")
def test_a_static_scale_depends_on_the_weights_of_the_norm() -> None:
    layers = [(128, 128, "block_rms(64)+affine+relu")] * 2
    choice = dispatch_chain(layers, 32, 0.2, out_granularity="tensor")
    x, weights, _ = drawn(layers)
    factor = torch.full((128,), 3.0)
    run = choice.prepare(weights, norm_weights=[factor] * 2)
    out = run(x)
    assert isinstance(out, QuantizedTensor) and out.scale is not None
    expected = static_scale(norm_named("block_rms(64)"), 128, Format.E4M3FN, factor)
    assert float(out.scale) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.rest)]
)
def test_the_error_of_a_chain_is_near_its_prediction(
    known: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With the errors of single layers, as `bench sweep` finds them on X1 at n = k = 512."""

    def told(problem: Problem, name: str) -> tuple[float, float] | None:
        stored = {NONE: 0.039, ROW: 0.0468, TENSOR: 0.0475}
        us, row_err = usual(problem, name) or (0.0, 0.0)
        return us, row_err if name == UNFUSED else stored.get(problem.out_granularity, 0.5)

    tell(monkeypatch, told, KERNELS_OF_TESTS)
    for count in (2, 4):
        layers = [(512, 512, "bias+block_rms(256)+hardswish")] * count
        choice = dispatch_chain(layers, 256, 0.2, distribution="X1", dtype=dtype)
        assert set(choice.formats[1:-1]) == {"e4m3fn/tensor"} and choice.row_err
        (errors,) = bench_chain._errors(choice, "X1", (0,))
        assert choice.row_err == pytest.approx(errors.row_err, rel=0.04)


def wrong_calls() -> list[tuple[Callable[[Any, Any, Any], Any], type[Exception], str]]:
    ready = dispatch_chain
    return [
        (lambda x, w, b: ready(LAYERS, 32).prepare(w[:2], b), ShapeError, "2 weights of 4 layers"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(3, b), FormatError, "weights is int; expected"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b[0]), FormatError, "biases is Tensor"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w), ShapeError, "is 'bias.block_rms"),
        (lambda x, w, b: ready(LAYERS, 32).prepare([v.t() for v in w], b), ShapeError, "row-major"),
        (lambda x, w, b: ready(LAYERS, 32).prepare([v.float() for v in w], b), FormatError,
         "weight of layer 1 is torch.float32"),
        (lambda x, w, b: ready(LAYERS, 32).prepare([v.half() for v in w], b), FormatError,
         "weight of layer 1 is torch.float16; expected torch.bfloat16"),
        (lambda x, w, b: ready(LAYERS, 32, dtype=torch.float16).prepare(w, b), FormatError,
         "weight of layer 1 is torch.bfloat16; expected torch.float16"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, [v[:64] for v in b]), ShapeError, "bias is"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, [3, None, *b[2:]]), FormatError,
         "bias is int; expected a torch.Tensor"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b, eps=math.nan), UnknownNameError,
         "chain: norm .* eps is nan"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b, eps=-1e9), UnknownNameError,
         "eps is -1000000000.0"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b, eps="x"), UnknownNameError, "eps is 'x'"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x[:16]), ShapeError, "chosen for one m"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x.float()), FormatError, "x is"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(lokakern.quantize(x)), FormatError, "row"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x, x.float()), FormatError, "out is"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x.repeat(1, 2)[:, :128]), ShapeError,
         "contiguous"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x.requires_grad_()), UnsupportedError,
         "no gradient"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x, torch.zeros_like(x).requires_grad_()),
         UnsupportedError, "no gradient"),
        (lambda x, w, b: ready(LAYERS, 32).prepare(w, b)(x, torch.zeros(32 * 128 + 1).bfloat16()[1:]
         .view(32, 128)), ShapeError, "aligned to 16 bytes"),
    ]  # fmt: skip


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_tensors_that_do_not_fit_raise(number: int) -> None:
    call, error, says = wrong_calls()[number]
    with pytest.raises(error, match=says):
        call(*drawn())


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("ends", ["in_granularity", "out_granularity"])
def test_rows_of_fp8_data_start_at_multiples_of_16_bytes(ends: str) -> None:
    columns = 100
    layers = [(columns, columns, "rms")]
    x, weights, _ = drawn(layers)
    made = lokakern.quantize(x, "row")
    tight = QuantizedTensor(made.data.contiguous(), made.scale, made.granularity)
    assert made.data.stride(0) == 112 and tight.data.stride(0) == columns
    run = dispatch_chain(layers, 32, 0.2, **{ends: "row"}).prepare(weights)  # type: ignore[arg-type]
    operands = (lambda y: (y,)) if ends == "in_granularity" else (lambda y: (x, y))
    run(*operands(made))
    with pytest.raises(ShapeError, match=r"has strides \(100, 1\); .* aligned to 16 bytes"):
        run(*operands(tight))
    one = dispatch_chain(layers, 1, 0.2, **{ends: "row"}).prepare(weights)  # type: ignore[arg-type]
    x = x[:1]
    made = lokakern.quantize(x, "row")
    one(*operands(QuantizedTensor(made.data.contiguous(), made.scale, made.granularity)))


# --- the command


@pytest.fixture
def small(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
    monkeypatch.setattr(bench_chain, "l2_bytes", lambda: 300_000)
    monkeypatch.setattr(bench_chain, "SEEDS", (0,))
    monkeypatch.setattr(compiled_baselines, "BACKEND", "eager")


WORDS = ("chain", "--m", "32", "--layers", "128x128,64x128", "--epilogue", BLOCK, "--quiet")


@pytest.mark.usefixtures("small")
def test_the_command_measures_a_whole_chain() -> None:
    words = (*WORDS, "--budget", "0.2", "--distribution", "X1", "--rivals", "torch.compile")
    ran = CliRunner().invoke(app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["choice"]["formats"] == ["bfloat16", "e4m3fn/tensor", "bfloat16"]
    rows = {row["name"]: row for row in found["measured"]}
    assert list(rows) == ["dispatch_chain", "unquantized", *bench_chain.COMPILED]
    assert not any(row["failed"] for row in rows.values())
    assert all(row["latency_us"] > 0 and row["speedup"] > 0 for row in rows.values())
    chosen, plain = rows["dispatch_chain"], rows["unquantized"]
    assert chosen["summed_us"] == 20.0 and plain["summed_us"] == 40.0
    assert 0.04 < chosen["row_err"] < 0.07 and plain["row_err"] < 0.01
    assert chosen["worst_on"] == "X1"
    shown = CliRunner().invoke(app, [*words])
    assert shown.exit_code == 0 and "measured whole" in shown.stdout
    torch._dynamo.reset()


def test_the_command_answers_for_another_device() -> None:
    ran = CliRunner().invoke(app, [*WORDS, "--device", "NVIDIA H200"])
    assert ran.exit_code == 0, ran.output
    assert "on NVIDIA H200" in ran.stdout and "measured whole" not in ran.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layers", "128"), "expected nxk of each layer"),
        (("--epilogue", "rms", "--epilogue", "rms"), "3 --epilogue options for 2 layers"),
        (("--rivals", "cublas"), "rival 'cublas' is unknown"),
    ],
)
def test_invalid_arguments_of_the_command(words: tuple[str, ...], says: str) -> None:
    ran = CliRunner().invoke(app, [*WORDS, *words])
    assert ran.exit_code == 2 and says in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_layers_are_bounded_by_their_norm() -> None:
    assert Layer(64, 64, "bias+rms+affine+silu").is_bounded
    for words in ("none", "bias+hardswish", "rms+gate", "rms+residual_last", "rms+cross"):
        assert not Layer(64, 64, words).is_bounded


def test_the_gain_of_an_activation_is_that_of_normal_values() -> None:
    z = torch.randn(2_000_000, dtype=torch.float64, requires_grad=True)
    for name, gain in candidates.GAINS.items():
        value = ACTIVATIONS[name][0](z)
        (slope,) = torch.autograd.grad(value.sum(), z)
        found = slope.square().mean() / value.detach().square().mean()
        assert float(found) == pytest.approx(gain, rel=0.01)
