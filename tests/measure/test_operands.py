"""Operands of every layout and batch: drawn little, repeated much, checked against float64."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern import numerics
from lokakern.errors import MeasurementError, ShapeError
from lokakern.functional.checks import operand_of
from lokakern.measure import operand_cache, operands, tiled_compare
from lokakern.measure.operand_cache import (
    OperandKey,
    clear_operand_cache,
    cpu_operand,
    most_rows,
    operand_plan,
    prefetch_and_wait,
)
from lokakern.measure.operands import Operands
from lokakern.measure.tiled_compare import (
    Piece,
    compare_bytes,
    pieces_of,
    pieces_to_check,
    product_of_piece,
)
from lokakern.measure.time_problem import contender_of
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
)
from lokakern.workloads.gemm_cases import Case, prepared_cases, unquantized_case
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
FP8 = Format.E4M3FN
BF16 = KERNELS["torch.bf16"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caps so small that everything here repeats, is cut and is checked in part."""
    clear_operand_cache()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(operands, "l2_bytes", lambda: 300_000)
    monkeypatch.setattr(operand_cache, "SAMPLED_ROWS", 256)
    monkeypatch.setattr(operand_cache, "FEWEST_ROWS", 128)
    monkeypatch.setattr(tiled_compare, "PIECE_ELEMENTS", 2_000)
    yield
    torch.set_num_threads(threads)
    clear_operand_cache()


def lying(a: Layout, b: Layout, m: int, n: int, k: int, batch: int) -> Problem:
    form = Format.BFLOAT16
    usual = make_problem("gemm", (m, n, k), batch=batch)
    assert usual.b is not None
    left = replace(usual.a, layout=a)
    right = replace(usual.b, layout=b)
    assert form is left.format
    return replace(usual, a=left, b=right)


LAYOUTS = list(itertools.product((Layout.ROW, Layout.COLUMN), (Layout.ROW, Layout.COLUMN)))


def problems() -> list[Problem]:
    found = [
        lying(a, b, m, n, k, batch)
        for a, b in LAYOUTS
        for m, n, k, batch in [(40, 24, 16, 1), (300, 400, 48, 1), (24, 40, 700, 1), (8, 24, 40, 5)]
    ]
    found += [unquantized_case(27, 13, 39, "X5", batch=40).problem]
    found += [unquantized_case(64, 300, 24, "X5", epilogue="bias", batch=3).problem]
    found += [unquantized_case(64, 300, 24, "X1", epilogue="bias").problem]
    for m, n, k in [(600, 13, 24), (64, 1, 39), (300, 300, 8)]:
        found += [case.problem for case in grad_input_cases(m, n, k, FP8)]
        found.append(grad_weight_case(m, n, k).problem)
    found.append(grad_weight_case(100, 24, 39, batch=7).problem)
    found.append(grad_weight_case(300, 8, 16, Format.FLOAT32).problem)
    found += [case.problem for case in prepared_cases(40, 330, 136, "X1", FP8)]
    return found


def make(problem: Problem, *, cold: bool = True, distribution: str = "X3") -> Operands:
    return Operands(problem, distribution, CPU, HERE, cold=cold)


def right_kernel(problem: Problem) -> Kernel:
    return KERNELS["torch.fp32"] if problem.a.format is Format.FLOAT32 else BF16


def wide(b: Any) -> torch.Tensor:
    if isinstance(b, QuantizedTensor):
        assert b.source is not None
        return b.source.t().double()
    return b.double()  # type: ignore[no-any-return]


every_problem = pytest.mark.parametrize("problem", problems(), ids=str)


@every_problem
def test_operands_have_the_formats_and_layouts_of_the_problem(problem: Problem) -> None:
    made = make(problem)
    front = () if problem.batch == 1 else (problem.batch,)
    for a, b, out, bias in made.sets:
        assert out.shape == (*front, problem.m, problem.n)
        assert (bias is None) is (problem.epilogue == "none")
        first = a if problem.batch == 1 else a[0]
        assert first.shape == (problem.m, problem.k)
        assert operand_of(first).layout is problem.a.layout or 1 in first.shape
        if isinstance(b, QuantizedTensor):
            assert b.shape == (problem.k, problem.n)
            continue
        second = b if problem.batch == 1 else b[0]
        assert second.shape == (problem.k, problem.n)
        assert operand_of(second, Layout.COLUMN).layout is problem.b.layout  # type: ignore[union-attr]
        if problem.batch != 1:
            assert a.shape[0] == b.shape[0] == problem.batch


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 13, 39), (7, 24, 40), (33, 1, 5), (16, 8, 1)])
def test_alignment_of_gradients_is_that_of_their_operands(
    m: int, n: int, k: int, batch: int
) -> None:
    cases = [*grad_input_cases(m, n, k, FP8, batch=batch), grad_weight_case(m, n, k, batch=batch)]
    for case in cases:
        problem = case.problem
        a, b, _, _ = make(problem, cold=False, distribution="X12").sets[0]
        assert operand_of(a if batch == 1 else a[0]) == problem.a
        if isinstance(b, QuantizedTensor):
            if problem.n == 1:  # one row has no stride; a problem is given that of longer weights
                continue
            assert operand_of(b.data).alignment == problem.b.alignment  # type: ignore[union-attr]
        else:
            assert operand_of(b if batch == 1 else b[0], Layout.COLUMN) == problem.b


def expected(kernel: Kernel, made: Operands, number: int) -> torch.Tensor:
    """The references of the check, in one tensor."""
    problem = made.problem
    out = torch.full((problem.batch, problem.m, problem.n), math.nan, dtype=torch.float64)
    expectation = made._expectation(kernel, number)
    for piece in pieces_of(out.shape, tiled_compare.PIECE_ELEMENTS):
        exact, magnitude = expectation(piece)
        assert (magnitude >= exact.abs() * (1 - 1e-12)).all()
        piece.of(out).copy_(exact.view(piece.of(out).shape))
    return out if problem.batch > 1 else out[0]


def is_rounding(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Whether only the order of sums differs; what cancels leaves more of it than of the sum."""
    return bool(((found - exact).abs() <= 1e-13 * magnitude).all())


@every_problem
def test_references_equal_naive_products(problem: Problem) -> None:
    made = make(problem)
    for number, (a, b, _, _) in list(enumerate(made.sets))[:3]:
        found = expected(right_kernel(problem), made, number)
        left, right = a.double(), wide(b)
        assert is_rounding(found, left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize(
    "name", ["torch.quantize_row+torch.emulated_row", "torch.quantize_tensor+torch.emulated_tensor",
             "torch.quantize_group+torch.emulated_block"],
)  # fmt: skip
@pytest.mark.parametrize(
    "problem",
    [
        lying(Layout.ROW, Layout.COLUMN, 300, 333, 200, 1),
        lying(Layout.COLUMN, Layout.COLUMN, 300, 333, 200, 1),
        lying(Layout.COLUMN, Layout.ROW, 24, 40, 700, 1),
        lying(Layout.COLUMN, Layout.ROW, 200, 130, 300, 1),
    ],
    ids=str,
)
def test_references_of_quantizing_kernels_use_quantized_operands(
    problem: Problem, name: str
) -> None:
    kernel = KERNELS[name]
    made = make(problem, distribution="X14")
    for number, (a, b, _, _) in list(enumerate(made.sets))[:2]:
        left, right = (
            numerics.dequantize(numerics.quantize(x, FP8, granularity), torch.float64)
            for x, granularity in ((a, kernel.granularity), (b.t(), kernel.b_granularity))
        )
        found = expected(kernel, made, number)
        assert is_rounding(found, left @ right.t(), left.abs() @ right.t().abs())


def test_a_prepared_weight_is_the_quantization_of_its_source() -> None:
    """Also where fewer rows were drawn than it has, and its last block is cut."""
    for case in prepared_cases(40, 330, 136, "X14", FP8):
        made = make(case.problem)
        assert made.columns is not None
        for _, b, _, _ in made.sets:
            assert isinstance(b, QuantizedTensor)
            assert b.source is not None
            exact = numerics.quantize(b.source, FP8, b.granularity)
            assert torch.equal(b.data.view(torch.uint8), exact.data.view(torch.uint8))
            assert torch.equal(b.scale, exact.scale)  # type: ignore[arg-type]


def checked(
    problem: Problem, kernel: Kernel, spoil: Callable[[torch.Tensor], Any] | None = None
) -> tuple[float, str]:
    made = make(problem)
    made.poison()
    for call in contender_of(made, kernel).calls:
        call()
    if spoil is not None:
        for _, _, out, _ in made.sets:
            spoil(out)
    error, wrong = made.check(kernel)
    return error.maximum, wrong


@every_problem
def test_correct_kernels_pass_and_incorrect_ones_fail(problem: Problem) -> None:
    kernel = right_kernel(problem)
    error, wrong = checked(problem, kernel)
    assert wrong == ""
    assert 0 <= error <= 1
    for place in (0, -1):

        def spoil(out: torch.Tensor, place: int = place) -> None:
            flat = out.view(-1)
            flat[place] = flat[place] * 2 + 4  # past the bound of 17 of odd sizes too

        error, wrong = checked(problem, kernel, spoil)
        assert error > 1
        assert wrong.startswith("kernel_err")


@pytest.mark.parametrize("problem", [p for p in problems() if p.m * p.n * p.batch > 2000], ids=str)
def test_partly_compared_outputs_are_searched_for_unwritten_elements(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "CHECKED_ELEMENTS", 400)
    made = make(problem, cold=False)
    kernel = right_kernel(problem)
    assert checked(problem, kernel)[1] == ""
    out = made.outputs(made.sets[0])[0]
    shape = out.shape if out.dim() == 3 else (1, *out.shape)
    some, rest = pieces_to_check(shape, 400, seed=0)
    assert rest
    seen = torch.zeros(shape, dtype=torch.int)
    for piece in some:
        piece.of(seen).add_(1)
    assert int(seen.sum()) >= 400
    assert seen.max() == 1
    assert seen[0, 0, 0] == seen[-1, -1, -1] == 1
    for piece in rest:
        piece.of(seen).add_(1)
    assert (seen == 1).all()

    def unwritten(written: torch.Tensor) -> None:
        view = written if written.dim() == 3 else written[None]
        rest[len(rest) // 2].of(view)[-1, -1, -1] = math.nan

    made.poison()
    for call in contender_of(made, kernel).calls:
        call()
    unwritten(out)
    error, wrong = made.check(kernel)
    assert error.maximum == math.inf
    assert wrong.startswith("1 outputs of batch ")


def scaled_problems() -> list[Problem]:
    """Scaled GEMMs with everything that may come after their sums, on k and n of any remainder."""
    found = []
    five = Operand(Format.E5M2, Granularity.ROW)
    right = Operand(FP8, Granularity.ROW, Layout.COLUMN)
    group = Operand(FP8, Granularity.GROUP)
    by_group = Operand(FP8, Granularity.GROUP, Layout.COLUMN)
    small: dict[str, Any] = {"out_format": FP8, "out_granularity": Granularity.TENSOR}
    for m, n, k, fields in [
        (40, 24, 13, {"epilogue": "bias+relu"}),
        (300, 400, 39, {"epilogue": "hardswish", **small}),
        (300, 40, 312, {"epilogue": "bias+silu", **small}),
        (40, 33, 648, {"epilogue": "bias+cross", "a": group}),
        (300, 24, 40, {"epilogue": "cross", **small}),
        (70, 40, 130, {"accumulate": True, "out_format": Format.FLOAT32, "a": five, "b": right}),
        (70, 40, 300, {"accumulate": True, "out_format": Format.FLOAT32, "a": group,
                       "b": by_group, "epilogue": "bias"}),
        (40, 128, 39, {"batch": 3, "a": group, "epilogue": "bias+relu"}),
        (33, 24, 48, {"batch": 5, "epilogue": "cross", **small}),
        (33, 24, 48, {"batch": 5, "accumulate": True, "out_format": Format.FLOAT32}),
    ]:  # fmt: skip
        found.append(make_problem("scaled_gemm", (m, n, k), **fields))
    return found


def emulation_of(problem: Problem) -> Kernel:
    assert problem.b is not None
    suffix = problem.b.granularity.suffix
    return KERNELS[f"torch.emulated_{suffix}"]


@pytest.mark.parametrize("problem", scaled_problems(), ids=str)
def test_epilogues_are_sampled_and_checked(problem: Problem) -> None:
    kernel = emulation_of(problem)
    assert kernel.supports(problem, HERE) == ACCEPTED
    made = make(problem)
    for a, _, b, _, out, bias in made.sets:
        assert (operand_of(a).alignment, operand_of(b.t()).alignment) == (16, 16)
        assert out.shape == (problem.batch * problem.m, problem.n)
        assert (bias is None) is not problem.epilogue.startswith("bias")
    before = made.fingerprint()
    for spoiled in (False, True):
        for _ in range(2):  # what is added to is restored
            made.poison()
            for call in contender_of(made, kernel).calls:
                call()
        assert made.fingerprint() == before
        if spoiled:
            out = made.sets[0][4]
            value = -float(out[-1, -1]) or 1.0
            out[-1, -1] = torch.tensor(value * 2, device=CPU).to(out.dtype)
        error, wrong = made.check(kernel)
        assert bool(wrong) is spoiled
        assert (error.maximum > 1) is spoiled


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 60), st.integers(1, 60),
    st.integers(1, 3000), st.integers(1, 3000),
)  # fmt: skip
def test_pieces_cover_an_output_once(batch: int, m: int, n: int, size: int, most: int) -> None:
    seen = torch.zeros(batch, m, n, dtype=torch.int)
    for piece in pieces_of(seen.shape, size):
        part = piece.of(seen)
        assert 0 < part.numel() <= max(size, n)
        part.add_(1)
    assert (seen == 1).all()
    some, rest = pieces_to_check(seen.shape, most, seed=3)
    assert sum(p.of(seen).numel() for p in some) >= min(most, seen.numel())
    assert sum(p.of(seen).numel() for p in (*some, *rest)) == seen.numel()


@pytest.mark.parametrize("largest", [1, 100, 10**9])
def test_products_are_summed_in_steps_of_bounded_size(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_compare, "PIECE_ELEMENTS", largest)
    a, b = torch.randn(3, 20, 1000), torch.randn(3, 1000, 30)
    exact, magnitude = product_of_piece(a, b, Piece(slice(1, 3), slice(5, 9)))
    whole = (a.double() @ b.double())[1:3, 5:9].flatten(0, 1)
    size = (a.double().abs() @ b.double().abs())[1:3, 5:9].flatten(0, 1)
    assert is_rounding(exact, whole, size)
    assert torch.allclose(magnitude, size, rtol=1e-12)


@pytest.mark.parametrize("batch", [1, 3])
def test_samples_along_k_come_in_the_same_order_on_both_sides(batch: int) -> None:
    problem = grad_weight_case(700, 24, 40, batch=batch).problem
    made = make(problem, distribution="X12")
    assert made.w is not None
    assert made.x.shape == (256, 24)
    assert made.w.shape == (256, 40)
    for (a, b, _, _), order in zip(made.sets, made.order, strict=True):
        assert order.shape == (700 * batch,)
        for piece in order.split(256)[:-1]:
            assert piece.sort().values.tolist() == list(range(256))
        assert torch.equal(a.mT.reshape(-1, 24), made.x[order])
        assert torch.equal(b.reshape(-1, 40), made.w[order])
    assert len({tuple(order.tolist()) for order in made.order}) == len(made.order)


def test_batches_repeat_sampled_rows_and_weights() -> None:
    made = make(unquantized_case(27, 13, 39, "X5", batch=40).problem)
    assert made.w is not None
    assert made.columns is not None
    for (a, b, _, _), order in zip(made.sets, made.order, strict=True):
        assert torch.equal(a.reshape(-1, 39), made.x[order])
        assert torch.equal(b.mT.reshape(-1, 39), made.w[made.columns])
    assert not torch.equal(made.sets[0][1][0], made.sets[0][1][1])


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (make_problem("gemm", (8, 8, 8), a=Operand(Format.BFLOAT16, layout=Layout.STRIDED)),
         "strided along both"),
        (make_problem("quantize", (8, 8), batch=2), "and scaled_gemm only"),
        (make_problem("scaled_gemm", (8, 8, 8), a=Operand(FP8, Granularity.ROW, Layout.COLUMN)),
         "a row-major"),
        (make_problem("gemm", (8, 8, 8), b=Operand(FP8, Granularity.ROW, Layout.ROW),
                      prepared=True), "b column-major"),
        (make_problem("gemm", (8, 8, 8), b=Operand(FP8, Granularity.ROW, Layout.COLUMN),
                      prepared=True, batch=2), "with unquantized gemm and"),
        (make_problem("gemm", (8, 8, 2**21 + 1)), "2097153 columns are not sampled"),
    ],
)  # fmt: skip
def test_problems_without_operands_raise(problem: Problem, says: str) -> None:
    with pytest.raises(MeasurementError, match=says):
        make(problem)


def test_empty_problems_raise() -> None:
    with pytest.raises(ShapeError, match="m is 0"):
        make(make_problem("gemm", (0, 8, 8)))


# --- draws


def test_limits_on_sampled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert most_rows(1) == most_rows(8192) == 2048
    for columns in (1, 479, 9000, 17280, 69120, 123200, 2**20, 1310720, 2**21):
        rows = most_rows(columns)
        fewest = 256 if columns <= 2**20 else 128
        assert rows % 128 == 0
        assert fewest <= rows <= 2048
        assert rows == fewest or rows * columns <= operand_cache.SAMPLED_ELEMENTS
        assert rows * columns * 8 <= 2 * 2**30
    assert (most_rows(2**20), most_rows(2**20 + 1)) == (256, 128)
    with pytest.raises(MeasurementError):
        most_rows(2**21 + 1)


def test_plans_of_large_problems_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned only: nothing here is drawn."""
    monkeypatch.undo()
    for case in (
        unquantized_case(2048, 1024, 123200, "X5"),
        unquantized_case(20480, 115200, 512, "X5"),
        grad_weight_case(160 * 20480, 24, 720),
        grad_weight_case(2048, 16384, 69120),
        unquantized_case(720, 96, 160, "X5", batch=20480),
    ):
        plan = operand_plan(case.problem, case.distribution, 0)
        assert plan.w is not None
        for draw, rows in ((plan.x, plan.x_rows), (plan.w, plan.w_rows)):
            assert rows <= draw.rows <= 2048
            assert draw.rows * draw.columns <= 2**25


def test_shorter_operands_are_first_rows_of_the_same_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[OperandKey] = []
    plain = operand_cache._sample

    def counted(key: OperandKey) -> torch.Tensor:
        made.append(key)
        return plain(key)

    monkeypatch.setattr(operand_cache, "_sample", counted)
    long, short, other = (make(make_problem("gemm", (m, 16, 32))) for m in (1000, 100, 256))
    assert len(long.x) == len(other.x) == 256
    assert torch.equal(short.x, long.x[:100])
    assert torch.equal(short.w, long.w)  # type: ignore[arg-type]
    assert sorted(key.weight for key in made) == [False, True]
    assert long.digest == other.digest
    assert short.digest != long.digest
    assert len(long.digest) == 16
    assert make(make_problem("gemm", (100, 16, 32)), distribution="X1").digest != short.digest
    exact = Operands(make_problem("gemm", (100, 16, 32)), "X3", CPU, HERE, cold=False, seed=1)
    assert exact.digest != short.digest


def test_operands_are_samples_of_the_distribution() -> None:
    """bfloat16 by way of float32 is bfloat16 of the float64 values."""
    from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

    made = make(make_problem("gemm", (300, 16, 32)))
    x = draw_rows(distribution_named("X3"), 256, 32, 0)
    w = draw_weight(distribution_named("X3"), 16, 32, 0)
    assert torch.equal(made.x, x.bfloat16())
    assert torch.equal(made.w, w.bfloat16())  # type: ignore[arg-type]


def test_cached_operands_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OperandKey("X1", 10, 100, 0, False)
    monkeypatch.setattr(operand_cache, "CPU_BYTES", 2 * one.byte_count)
    for seed in range(5):
        cpu_operand(replace(one, seed=seed))
        assert operand_cache._on_cpu.byte_count <= 2 * one.byte_count
    last = cpu_operand(replace(one, seed=4))
    assert cpu_operand(replace(one, seed=4)) is last
    cpu_operand(replace(one, columns=1000))  # larger than the limit: kept alone
    assert operand_cache._on_cpu.byte_count == 10 * one.byte_count
    clear_operand_cache()
    assert operand_cache._on_cpu.byte_count == 0


def test_prefetched_operands_equal_operands_made_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(make_problem("gemm", (m, n, 64)), "X3") for m in (100, 300) for n in (16, 24)]
    alone = [make(case.problem, cold=False).digest for case in cases]
    clear_operand_cache()
    names: list[str] = []
    plain = operand_cache._sample

    def noted(key: OperandKey) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return plain(key)

    monkeypatch.setattr(operand_cache, "_sample", noted)
    assert prefetch_and_wait(cases) == 4
    assert prefetch_and_wait(iter(cases)) == 4
    assert [make(case.problem, cold=False).digest for case in cases] == alone
    assert len(names) == 3  # one x, two weights, each once
    assert all(name.startswith("operands") for name in names)


def test_prefetch_stops_before_operands_evict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(make_problem("quantize", (256, k)), "X1") for k in (64, 65, 66, 67)]
    monkeypatch.setattr(operand_cache, "CPU_BYTES", 256 * 4 * (64 + 65))
    assert prefetch_and_wait(cases) == 2
    assert prefetch_and_wait(cases[2:]) == 1
    monkeypatch.setattr(operand_cache, "CPU_BYTES", 1)
    assert prefetch_and_wait(cases) == 1
    assert prefetch_and_wait([]) == 0
    refused = [Case(make_problem("gemm", shape), "X1") for shape in ((0, 8, 8), (8, 8, 2**22))]
    assert prefetch_and_wait(refused) == 2  # it is for `Operands` to say


def test_a_failed_sample_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = operand_cache._sample
    left = [MemoryError("no room")]

    def once(key: OperandKey) -> torch.Tensor:
        if left:
            raise left.pop()
        return plain(key)

    monkeypatch.setattr(operand_cache, "_sample", once)
    problem = make_problem("gemm", (8, 8, 8))
    with pytest.raises(MemoryError):
        make(problem)
    assert operand_cache._on_cpu.byte_count <= 8 * 8 * 4
    assert make(problem).x.shape == (8, 8)


QUANTIZERS = sorted(
    name
    for name, kernel in KERNELS.items()
    if kernel.language == "torch" and kernel.op in operands.QUANTIZERS
)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("layout", [Layout.ROW, Layout.COLUMN], ids=str)
@pytest.mark.parametrize("sums", [False, True], ids=["alone", "sums"])
def test_all_outputs_of_a_quantizer_are_checked(name: str, layout: Layout, sums: bool) -> None:
    """Outputs are poisoned before each call; a given scale is no output."""
    kernel = KERNELS[name]
    scaling = "none" if "none" in kernel.epilogues else min(kernel.epilogues)
    with_sums = {epilogue for epilogue in kernel.epilogues if epilogue.endswith("column_sums")}
    if sums and not with_sums:
        assert kernel.op == "quantize"
        return
    epilogue = with_sums.pop() if sums else scaling
    problem = make_problem(
        kernel.op, (200, 144), a=Operand(Format.BFLOAT16, layout=layout), epilogue=epilogue,
        out_granularity=kernel.granularity,
    )  # fmt: skip
    made = Operands(problem, "X1", CPU, HERE, cold=False)
    (given,) = made.sets
    assert operand_of(given[0]).layout is layout
    made.poison()
    before = made.fingerprint()
    assert made.check(kernel)[1]
    made.call_of(kernel, 0)()
    assert made.check(kernel)[1] == ""
    assert made.fingerprint() == before
    for out in made.outputs(given):
        kept = out.clone()
        flat = out.view(torch.uint8) if out.dtype.itemsize == 1 else out
        flat[(0,) * flat.dim()] += 1
        assert made.check(kernel)[1]
        out.copy_(kept)
    written = {"quantize": 2, "quantize_transpose": 4}[kernel.op] + sums
    assert len(made.outputs(given)) == written - (scaling in operands.GIVEN_SCALES)


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name.endswith("_delayed")])
def test_a_delayed_quantizer_must_update_amax(name: str) -> None:
    """From where it is poisoned: what it was raised to before is no evidence."""
    kernel = KERNELS[name]
    problem = make_problem(
        kernel.op, (200, 144), epilogue="delayed", out_granularity=kernel.granularity
    )

    def launch(*given: Any) -> None:
        *tensors, workspace = given
        kernel.launch(*tensors, (workspace[0].clone(),))

    silent = replace(kernel, launch=launch)
    made = Operands(problem, "X1", CPU, HERE, cold=False)
    for one, words in ((kernel, ""), (silent, "amax is 0.0, not "), (kernel, "")):
        call = made.call_of(one, 0)
        for _ in range(2):
            made.poison()
            call()
        assert made.check(one)[1].startswith(words) and bool(made.check(one)[1]) is bool(words)


def test_the_first_wrong_scale_or_byte_of_a_quantizer_is_told() -> None:
    exact = torch.ones(3, 7).to(torch.float8_e4m3fn)
    found, scale = exact.clone(), torch.ones(3, 1)
    found[1, 5] = found[2, 0] = -3.5
    words = "2 of 21 bytes differ from the exact quantization, the first at row 1, column 5: -3.5"
    assert compare_bytes(found, scale, exact.view(torch.uint8), scale) == f"{words}, not 1"
    scale[2] = 0.1
    words = "1 of 3 scales differ from the exact quantization, the first at row 2, column 0"
    words += ": 0.100000001, not 1"
    assert compare_bytes(exact, scale, exact, torch.ones(3, 1)) == words
    words += "; so do 2 of 21 bytes"  # of which the scale is the reason
    assert compare_bytes(found, scale, exact.view(torch.uint8), torch.ones(3, 1)) == words
