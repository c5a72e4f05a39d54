"""float16: times of bfloat16 where there are none of its own, and errors of its own."""

from __future__ import annotations

from typing import Any

import pytest

from lokakern.problems import make_problem
from lokakern.registry import float16
from lokakern.registry.register import KERNELS
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.types import Format, Granularity, Operand, Problem, Rejected
from tests.support.measurements import BF16, H200, Book, accuracy, time

FP8 = "cuda.quantize_row+cuda.scaled_gemm_row"
OTHER = "cuda.quantize_row+torch.scaled_mm_row"
HALF = Operand(Format.FLOAT16)
SHAPE = (4096, 512, 512)
PLAIN, HALVED = make_problem("gemm", SHAPE), make_problem("gemm", SHAPE, a=HALF)


def ask(budget: Any = 0.06, **options: Any) -> Choice:
    return dispatch("gemm", SHAPE, budget, device="NVIDIA H200", a=HALF, **options)


def test_a_problem_has_float16_operands_if_its_left_one_has() -> None:
    assert HALVED.b is not None and HALVED.b.format is Format.FLOAT16
    assert HALVED.out_format is Format.FLOAT16
    assert float16.is_in(HALVED) and not float16.is_in(PLAIN)
    assert float16.as_bfloat16(HALVED) == PLAIN
    assert HALVED.bytes_moved == PLAIN.bytes_moved


def test_times_are_those_of_bfloat16_and_errors_are_not(book: Book) -> None:
    book.write(time(BF16, PLAIN, 60.0), time(FP8, PLAIN, 15.0), time(OTHER, PLAIN, 12.0),
               accuracy(FP8, PLAIN, 0.04))  # fmt: skip
    choice = ask()
    assert (choice.kernel, choice.latency_us) == (BF16, 60.0) and not choice.is_miss
    assert "time: that of bfloat16, which has as many bytes" in choice.explain()
    assert choice.rejected[FP8].startswith("error not measured")
    assert choice.rejected[OTHER] == "torch.scaled_mm_row: takes no float16"
    book.write(accuracy(FP8, HALVED, 0.03))
    choice = ask()
    assert (choice.kernel, choice.latency_us) == (FP8, 15.0)
    assert choice.errors["row_err"] == 0.03
    assert dispatch("gemm", SHAPE, 0.06, device="NVIDIA H200").errors["row_err"] == 0.04


def test_times_of_its_own_come_first(book: Book) -> None:
    book.write(time(BF16, PLAIN, 60.0), time(FP8, PLAIN, 15.0), time(BF16, HALVED, 58.0),
               accuracy(FP8, HALVED, 0.03))  # fmt: skip
    choice = ask()
    assert (choice.kernel, choice.latency_us) == (BF16, 58.0)
    assert "bfloat16" not in choice.explain() and FP8 not in choice.rejected


def test_ops_without_an_unquantized_kernel_take_the_fastest(book: Book) -> None:
    a = Operand(Format.E4M3FN, Granularity.ROW)
    asked = {"a": a, "out_format": Format.FLOAT16}
    plain = make_problem("scaled_gemm", SHAPE, a=a)
    book.write(time("cuda.scaled_gemm_row", plain, 15.0),
               time("torch.scaled_mm_row", plain, 12.0))  # fmt: skip
    choice = dispatch("scaled_gemm", SHAPE, device="NVIDIA H200", **asked)
    assert (choice.kernel, choice.latency_us) == ("cuda.scaled_gemm_row", 15.0)
    assert choice.rejected["torch.scaled_mm_row"] == "takes no float16"


@pytest.mark.parametrize(
    "problem",
    [
        make_problem("gemm", SHAPE, a=HALF, out_format=Format.BFLOAT16),
        make_problem("gemm", SHAPE, a=HALF, b=Operand(Format.BFLOAT16)),
    ],
    ids=["output", "b"],
)
def test_no_kernel_mixes_it_with_bfloat16(problem: Problem) -> None:
    for kernel in KERNELS.values():
        if kernel.op == "gemm" and kernel.runs_on(H200):
            answer = kernel.supports(problem, H200)
            assert isinstance(answer, Rejected)


def test_kernels_take_what_is_listed() -> None:
    answers = {name: kernel.supports(HALVED, H200) for name, kernel in KERNELS.items()}
    taking = {name for name, answer in answers.items() if not isinstance(answer, Rejected)}
    assert taking >= {BF16, FP8}
    assert not any("torch.scaled_mm" in name for name in taking)
    fast = {name for name in taking if "fast" in name}
    assert fast and all("cuda.scaled_gemm_" in name for name in fast)
    assert not any(KERNELS[name].library for name in taking)
