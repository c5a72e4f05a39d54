"""Where rows are unaligned, FP8 is compared with bfloat16 of padded rows, measured or estimated."""

from __future__ import annotations

from typing import Any

import pytest

from lokakern.bench.fp8_gain.gain import worth
from lokakern.bench.fp8_gain.products import Product
from lokakern.conversion.routes import Judge, problem_of, routes_of
from lokakern.nn.routed_matmul import kernel_at
from lokakern.probe import verdicts
from lokakern.problems import PADDED, make_problem
from lokakern.registry.register import KERNELS
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.selection.padded_rows import padded_problem
from lokakern.types import COMPILED, ErrorBudget, Format, Granularity, Layout, Operand, Problem
from lokakern.workloads.gemm_cases import quantize_case
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case
from tests.support.measurements import BF16, H200, Book, accuracy, time

FP8 = "cuda.quantize_row+cuda.scaled_gemm_row"
GROUP = "cuda.quantize_group+cuda.scaled_gemm_group"
M, N, K, WIDE = 4096, 512, 479, 480


def ask(n: int = N, k: int = K, m: int = M, budget: Any = 0.06, **options: Any) -> Choice:
    return dispatch("gemm", (m, n, k), budget, device="NVIDIA H200", **options)


def odd(bf16: float = 60.0, fp8: float = 15.0, m: int = M, **sizes: int) -> list[Any]:
    """Rows of bf16 and FP8 at unaligned sizes."""
    n, k = sizes.get("n", N), sizes.get("k", K)
    problem = make_problem("gemm", (m, n, k))
    return [time(BF16, problem, bf16), accuracy(BF16, problem, 0.003),
            time(FP8, problem, fp8), accuracy(FP8, problem, 0.04)]  # fmt: skip


def wide(us: float, m: int = M, n: int = N, k: int = WIDE, **fields: Any) -> Any:
    return time(BF16, make_problem("gemm", (m, n, k), **fields), us)


def quantizer(us: float, m: int = M, k: int = K) -> Any:
    case = quantize_case(m, k, Granularity.ROW, "X1", Format.E4M3FN)
    return time("cuda.quantize_row", case.problem, us)


def test_fp8_is_not_chosen_by_the_time_of_unaligned_bf16_alone(book: Book) -> None:
    book.write(*odd())
    for regime in (None, COMPILED):
        choice = ask(regime=regime)
        assert choice.kernel == BF16 and not choice.is_miss
        assert choice.rejected[FP8].startswith(f"bf16 of rows padded to n={N} k={WIDE} was not")
    assert ask(budget=None).kernel == BF16


def test_aligned_sizes_need_no_padded_rows(book: Book) -> None:
    book.write(*odd(k=WIDE))
    choice = ask(k=WIDE)
    assert choice.kernel == FP8 and choice.table.padded == ""


def test_a_compiled_model_pads_at_no_cost(book: Book) -> None:
    """A copy of rows at 1 TB/s costs 8 us here: in a compiled model bf16 is faster than FP8."""
    moved = M * (2 * K + K) + 4 * M  # what the quantizer reads and writes
    book.write(*odd(), wide(12.0), quantizer(moved / 1e6))
    copied = 2 * (M * (K + WIDE) + N * (K + WIDE)) / 1e6
    alone, compiled = ask(), ask(regime=COMPILED)
    assert alone.kernel == FP8
    assert alone.rejected[PADDED] == f"slower: {12 + copied:.2f} us, estimated"
    assert (compiled.kernel, compiled.latency_us) == (PADDED, 12.0)
    assert compiled.rejected[FP8] == "slower: 15.00 us"
    assert compiled.rejected[BF16] == "slower: 60.00 us"
    prepared = ask(budget=None)
    assert prepared.kernel == PADDED
    assert prepared.latency_us == pytest.approx(12 + copied)


@pytest.mark.parametrize(
    ("timed", "padded"),
    [
        (Format.FLOAT16, Format.FLOAT16), (Format.FLOAT16, Format.BFLOAT16),
        (Format.BFLOAT16, Format.BFLOAT16),
    ],
)  # fmt: skip
def test_float16_is_compared_with_padded_rows_too(
    book: Book, timed: Format, padded: Format
) -> None:
    """Also where padded sizes, or all of them, were timed with bfloat16 alone."""
    moved = M * (2 * K + K) + 4 * M
    problem, asked = (problem_of("output", M, N, K, half=x) for x in (timed, Format.FLOAT16))
    book.write(time(BF16, problem, 60.0), time(FP8, problem, 15.0), accuracy(FP8, asked, 0.04),
               time(BF16, problem_of("output", M, N, WIDE, half=padded), 12.0),
               quantizer(moved / 1e6))  # fmt: skip
    device = dispatcher.device_named("NVIDIA H200")
    for regime, kernel in ((COMPILED, PADDED), (None, FP8)):
        table = dispatcher.table_for(asked, ErrorBudget(row_err=0.06), ("X1",), device, regime)
        choice = Choice(table, M)
        assert choice.kernel == kernel and choice.table.padded == f"n={N} k={WIDE}"
        assert choice.kernel == PADDED or "slower" in choice.rejected[PADDED]


@pytest.mark.parametrize(
    ("n", "copies"),
    [(1677, True), (1597, False), (1001, False), (1680, False)],
    ids=["", "to a multiple of 64", "short rows", "not padded"],
)
def test_a_compiler_copies_a_bias_over_padded_rows(book: Book, n: int, copies: bool) -> None:
    """At 1 TB/s, the fastest that was timed, 14 of 40 us: then FP8 in 45 us is faster."""
    up, k = -(-n // 8) * 8, 1677
    moved = M * (2 * K + K) + 4 * M
    book.write(*odd(90.0, 45.0, n=n, k=k), wide(40.0, n=up, k=1680), quantizer(moved / 1e6))
    problem = make_problem("gemm", (M, n, k))
    device = dispatcher.device_named("NVIDIA H200")
    budget, sources = ErrorBudget(row_err=0.06), ("X1",)

    def at(**options: Any) -> Choice:
        table = dispatcher.table_for(problem, budget, sources, device, COMPILED, **options)
        return Choice(table, M)

    assert (at().kernel, at().latency_us) == (PADDED, 40.0)
    biased = at(has_bias=True)
    assert biased.kernel == (FP8 if copies else PADDED)
    if copies:
        copied = 40 + 2 * M * up / 1e6
        assert biased.rejected[PADDED] == f"slower: {copied:.2f} us, estimated"
    alone = dispatcher.table_for(problem, budget, sources, device, has_bias=True)
    assert "bias" not in Choice(alone, M).explain()  # the kernel itself adds it


@pytest.mark.parametrize("has_bias", [True, False])
def test_worth_and_probe_count_the_copy_as_convert_does(book: Book, has_bias: bool) -> None:
    n = k = 1677
    moved = M * (2 * K + K) + 4 * M
    book.write(*odd(90.0, 45.0, n=n, k=k), wide(40.0, n=1680, k=1680), quantizer(moved / 1e6))
    device = dispatcher.device_named("NVIDIA H200")
    (row,) = worth(
        [Product("layer", M, n, k, 1, has_bias)], budget=ErrorBudget(row_err=0.06), device=device,
        distributions=("X1",), gemms=("output",),
    ).rows  # fmt: skip
    assert row.kernel == (FP8 if has_bias else PADDED)
    times = verdicts._Times(make_problem("gemm", (M, n, k)), device, has_bias=has_bias)
    assert times.bf16 is not None and times.bf16.latency_us == pytest.approx(
        40 + has_bias * 2 * M * 1680 / 1e6
    )
    (route, *_) = routes_of(
        n, k, Judge(ErrorBudget(row_err=0.06), ("X1",)), device, has_bias=has_bias, inference=True,
        is_prepared=False,
    )  # fmt: skip
    assert (kernel_at(route.text, M) == FP8) is has_bias


def test_an_estimate_is_told(book: Book) -> None:
    book.write(*odd(), wide(12.0), quantizer(9.0))
    choice = ask(regime=COMPILED)
    words = choice.explain()
    assert f"12.00 us (estimated, 1 run, {COMPILED})" in words
    assert f"of {BF16} at n={N} k={WIDE}; the kernel itself was not measured" in words
    assert "copies" not in words
    assert "and of copies at the rate of a quantizer" in ask(budget=None).explain()


def test_a_measured_time_replaces_the_estimate(book: Book) -> None:
    own = time(PADDED, make_problem("gemm", (M, N, K)), 14.0)
    book.write(*odd(), own)
    choice = ask()
    assert (choice.kernel, choice.latency_us) == (PADDED, 14.0)
    assert "(measured" in choice.explain()
    # A compiler pads for less, and for how much less is unknown without the padded sizes.
    compiled = ask(regime=COMPILED)
    assert compiled.kernel == BF16 and "was not measured" in compiled.rejected[FP8]
    book.write(wide(12.0, m=2048))  # at another m
    compiled = ask(regime=COMPILED)
    assert compiled.kernel == BF16 and "was not measured" in compiled.rejected[FP8]
    book.write(wide(12.0))
    assert ask().latency_us == 14.0
    assert ask(regime=COMPILED).latency_us == 12.0


def test_padded_rows_stand_in_for_unaligned_ones_that_were_not_timed(book: Book) -> None:
    """As in a file that lost rows: at M only FP8 and padded rows have times."""
    here, small = make_problem("gemm", (M, N, K)), make_problem("gemm", (2048, N, K))
    book.write(time(PADDED, here, 14.0), time(FP8, here, 10.0), time(BF16, small, 30.0))
    choice = ask()
    assert (choice.kernel, choice.latency_us, choice.is_miss) == (PADDED, 14.0, False)
    assert choice.undecided is not None and choice.undecided.name == FP8
    assert choice.rejected[BF16].startswith(f"not measured at m={M}")
    book.write(accuracy(FP8, here, 0.04))
    assert (ask().kernel, ask().rejected[PADDED]) == (FP8, "slower: 14.00 us")
    assert ask(m=2048).is_miss is False and ask(m=2048).kernel == BF16
    # The time that a compiler saves is unknown without the padded sizes.
    assert ask(regime=COMPILED).is_miss
    book.write(wide(12.0))
    assert ask(regime=COMPILED).kernel == FP8


def test_padded_rows_alone_are_an_answer_of_eager_code_only(book: Book) -> None:
    here = make_problem("gemm", (M, N, K))
    book.write(time(PADDED, here, 14.0), time(FP8, here, 15.0), accuracy(FP8, here, 0.04))
    assert (ask().kernel, ask().rejected[FP8]) == (PADDED, "slower: 15.00 us")
    assert ask(regime=COMPILED).is_miss
    book.write(wide(12.0))
    compiled = ask(regime=COMPILED)
    assert (compiled.kernel, compiled.latency_us) == (PADDED, 12.0)


def test_a_kernel_without_anything_to_compare_with_is_listed(book: Book) -> None:
    here = make_problem("gemm", (M, N, WIDE))
    book.write(time(FP8, here, 10.0), accuracy(FP8, here, 0.04))
    choice = ask(k=WIDE)
    assert choice.is_miss and choice.kernel == BF16
    words = f"10.00 us, but {BF16}, to compare it with, has no time that counts at m={M}"
    assert choice.rejected[FP8] == words


def test_fp8_that_beats_padded_rows_is_chosen(book: Book) -> None:
    book.write(*odd(fp8=10.0), wide(12.0))
    for regime in (None, COMPILED):
        choice = ask(regime=regime)
        assert (choice.kernel, choice.latency_us) == (FP8, 10.0)
        plain = choice.table.plain_at(M)
        assert plain is not None and plain.latency_us == 12.0
        assert choice.table.plain_name_at(M) == PADDED and choice.table.plain_name_at(1) == ""


def test_a_tie_goes_to_padded_rows(book: Book) -> None:
    book.write(*odd(fp8=11.9), wide(12.0))
    choice = ask()
    assert choice.kernel == PADDED and FP8 in choice.tied


def test_fp8_slower_than_padded_rows_never_ties_with_them(book: Book) -> None:
    book.write(*odd(bf16=12.1, fp8=12.05), wide(12.0))
    assert FP8 not in ask().tied


def test_each_m_needs_padded_rows(book: Book) -> None:
    small = make_problem("gemm", (2048, N, K))
    book.write(*odd(fp8=10.0), time(BF16, small, 30.0), time(FP8, small, 6.0), wide(12.0))
    assert ask().kernel == FP8
    assert ask(m=2048).kernel == BF16 and "was not measured" in ask(m=2048).rejected[FP8]
    book.write(wide(7.0, m=2048))
    assert ask(m=2048).kernel == FP8
    assert ask(m=3072).latency_us == pytest.approx(8.0)  # interpolated, as the padded time


def test_a_bias_and_a_prepared_weight_have_the_times_without(book: Book) -> None:
    fields = {"epilogue": "bias", "prepared": True,
              "b": Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)}  # fmt: skip
    problem = make_problem("gemm", (M, N, K), **fields)
    book.write(time(BF16, problem, 60.0), accuracy(BF16, problem, 0.003), time(FP8, problem, 15.0),
               accuracy(FP8, problem, 0.04), wide(12.0))  # fmt: skip
    choice = ask(**fields)
    assert (choice.kernel, choice.latency_us) == (PADDED, 12.0)


@pytest.mark.parametrize("layout", [Layout.ROW, Layout.COLUMN])
def test_a_vector_has_the_time_of_either_layout(book: Book, layout: Layout) -> None:
    """The gradient of the input of a layer with one output: k is 1."""
    problem = grad_input_of_one_output()
    book.write(time(BF16, problem, 60.0), accuracy(BF16, problem, 0.003),
               time(FP8, problem, 15.0), accuracy(FP8, problem, 0.04))  # fmt: skip
    table = dispatcher.table_for(problem, ErrorBudget(row_err=0.06), None, H200)
    assert table.padded == "n=512 k=8" and table.pick(M).name == BF16
    book.write(wide(12.0, k=8, b=Operand(Format.BFLOAT16, layout=layout)))
    table = dispatcher.table_for(problem, ErrorBudget(row_err=0.06), None, H200)
    assert table.pick(M).name == PADDED


def grad_input_of_one_output() -> Problem:
    return next(iter(grad_input_cases(M, 1, N, Format.E4M3FN))).problem


def test_rows_of_the_gradient_of_a_weight_are_padded_too(book: Book) -> None:
    """``dW[n, k] = dY[m, n]^T X[m, k]``: n is along rows of dY, the sum along none."""
    problem = grad_weight_case(8192, 13, 512).problem
    book.write(time(BF16, problem, 60.0), accuracy(BF16, problem, 0.003),
               time(GROUP, problem, 15.0), accuracy(GROUP, problem, 0.04))  # fmt: skip
    table = dispatcher.table_for(problem, ErrorBudget(row_err=0.06), None, H200)
    assert table.padded == "m=16 n=512 k=8192"
    assert table.pick(13).name == BF16
    book.write(time(BF16, grad_weight_case(8192, 16, 512).problem, 12.0))
    table = dispatcher.table_for(problem, ErrorBudget(row_err=0.06), None, H200)
    assert table.pick(13).name == PADDED


@pytest.mark.parametrize(
    ("shape", "fields", "expected"),
    [
        ((64, 13, 39), {}, (64, 16, 40)),
        ((64, 1, 39), {}, (64, 1, 40)),
        ((64, 16, 1), {}, (64, 16, 8)),
        ((64, 16, 32), {}, None),
        ((63, 16, 32), {}, None),
        ((64, 13, 39), {"batch": 4}, None),
        ((64, 13, 39), {"a": Operand(Format.FLOAT32)}, None),
        ((64, 13, 39), {"a": Operand(Format.FLOAT16)}, (64, 16, 40)),
    ],
)
def test_the_padded_problem(
    shape: tuple[int, int, int], fields: dict[str, Any], expected: tuple[int, int, int] | None
) -> None:
    problem = make_problem("gemm", shape, **fields)
    found = padded_problem(problem)
    assert (None if found is None else found.shape) == expected
    if found is not None:
        assert found.a.alignment == 16 and found.b is not None and found.b.alignment == 16


def test_the_kernel_takes_what_is_padded() -> None:
    """Else a table would name a kernel that refuses its problems."""
    for k in range(1, 40):
        for n in range(1, 40):
            problem: Problem = make_problem("gemm", (64, n, k))
            refusal = KERNELS[PADDED].refusal(problem, H200)
            assert (refusal is None) == (padded_problem(problem) is not None), problem


def test_the_shipped_file_has_no_gain_of_5_at_k_479() -> None:
    """Against padded rows the largest speedup at these sizes is below 2."""
    dispatcher.use_snapshot(None)
    gains = []
    for m in (256, 1024, 2048, 6144, 8192, 20480):
        for regime in (None, COMPILED):
            choice = dispatch("gemm", (m, 1024, 479), 0.06, device=H200, prepared=True,
                              regime=regime)  # fmt: skip
            plain = choice.table.plain_at(m)
            assert plain is not None and choice.latency_us is not None
            gains.append(plain.latency_us / choice.latency_us)
    assert min(gains) >= 1.0 and max(gains) < 2.0
