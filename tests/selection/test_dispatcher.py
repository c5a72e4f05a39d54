"""Dispatch with made-up rows: each rule is tested by rows that would break it."""

from __future__ import annotations

import functools
import math
import random
import sys
import time as clock
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lokakern.device import current_device
from lokakern.errors import BudgetError, DeviceError, ShapeError, UnknownNameError, UnsupportedError
from lokakern.problems import alignment_of, make_problem
from lokakern.registry.register import KERNELS, Kernel
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import merge
from lokakern.selection import candidates, dispatcher, ties
from lokakern.selection import table as tables
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Accepted,
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    Rejected,
)
from tests.support.measurements import (
    BF16,
    H200,
    ROW,
    TENSOR,
    Book,
    accuracy,
    gemm,
    measured,
    time,
)


def ask(m: int = 4096, budget: Any = 0.06, **options: Any) -> Choice:
    return dispatch("gemm", (m, 512, 512), budget, device="NVIDIA H200", **options)


def test_the_fastest_within_budget_wins(book: Book) -> None:
    book.write(*measured())
    choice = ask()
    assert (choice.kernel, choice.latency_us) == (ROW, 10.0)
    assert choice.errors["row_err"] == pytest.approx(0.04)
    assert "slower: 20.00 us" in choice.rejected[BF16]


def test_bf16_is_taken_if_no_other_kernel_is_within_budget(book: Book) -> None:
    book.write(*measured())
    choice = ask(budget=0.03)
    assert choice.kernel == BF16
    assert "row_err 0.0400 > 0.03" in choice.rejected[ROW]
    assert "floor" in choice.rejected[ROW]
    assert ask(budget=None).kernel == BF16
    assert "no budget" in ask(budget=None).rejected[ROW]


def test_never_slower_than_bf16(book: Book) -> None:
    book.write(*measured(bf16=10.0, row=12.0))
    assert ask().kernel == BF16


def test_a_tie_goes_to_the_lower_error_and_is_marked(book: Book) -> None:
    book.write(*measured(bf16=10.0, row=9.95))
    choice = ask()
    assert choice.kernel == BF16
    assert choice.tied == (ROW,)
    assert "tied" in choice.explain()


def test_fp8_wins_only_beyond_noise(book: Book) -> None:
    problem = gemm(4096)
    book.write(
        time(BF16, problem, 10.0, spread=0.2, count=5), accuracy(BF16, problem, 0.003),
        time(ROW, problem, 9.6, spread=0.2, count=5), accuracy(ROW, problem, 0.04),
    )  # fmt: skip
    assert ask().kernel == BF16
    margin = ties.margin_us(8.0, 12.0, 5)
    assert margin > 0.5
    assert ties.within_noise(10.0, margin, 9.6, margin)
    assert not ties.within_noise(10.0, margin, 9.4, margin)


@pytest.mark.parametrize("missing", REALISTIC_DISTRIBUTIONS)
def test_a_missing_distribution_rejects_a_kernel(book: Book, missing: str) -> None:
    book.write(*measured(errors={"without": (missing,)}))
    assert ask().kernel == BF16
    assert missing in ask().rejected[ROW]
    present = next(d for d in REALISTIC_DISTRIBUTIONS if d != missing)
    assert ask(distribution=present).kernel == ROW
    assert present in ask(distribution=present).explain()
    assert ask(distribution=(present, missing)).kernel == BF16


def test_the_largest_error_of_seeds_and_runs_counts(book: Book) -> None:
    book.write(*measured())
    book.write(accuracy(ROW, gemm(4096), 0.07, only=("X5",), seeds=(1,)))
    choice = ask()
    assert choice.kernel == BF16
    assert "0.0700" in choice.rejected[ROW] and "X5" in choice.rejected[ROW]


def test_one_incorrect_result_rejects_a_kernel(book: Book) -> None:
    book.write(*measured())
    book.write(time(ROW, gemm(4096), 10.0, status="wrong"))
    assert ask().kernel == BF16
    assert "wrong" in ask().rejected[ROW]


def test_an_incorrect_result_in_an_error_row_rejects_a_kernel(book: Book) -> None:
    book.write(*measured())
    book.write(accuracy(ROW, gemm(4096), 0.04, only=("X7",), seeds=(2,), status="wrong"))
    assert ask().kernel == BF16


def test_stale_errors_never_count(book: Book) -> None:
    old = {"digest": "f" * 64}
    book.write(*measured(times=old, errors=old))
    assert ask().kernel == BF16
    assert "stale" in ask().rejected[ROW]


def test_a_stale_time_only_ranks_and_is_marked(book: Book) -> None:
    book.write(*measured(times={"digest": "f" * 64}))
    choice = ask()
    assert choice.kernel == ROW
    assert "10.00 us (measured, 1 run, graph-cold, stale)" in choice.explain()
    book.write(*measured(m=8192, bf16=5.0, times={"digest": "f" * 64}))
    assert ask(m=8192).rejected[ROW] == "slower: 10.00 us, stale"


def test_unsteady_times_are_marked(book: Book) -> None:
    book.write(*measured(times={"spread": 0.2}))
    book.write(*measured(m=8192, bf16=5.0, times={"spread": 0.2}))
    assert "10.00 us (measured, 1 run, graph-cold, unsteady)" in ask().explain()
    assert ask(m=8192).rejected[ROW] == "slower: 10.00 us, unsteady"
    book.write(*measured(m=2048, times={"spread": 0.1}))
    assert "unsteady" not in ask(m=2048).explain()


def test_a_fresh_time_replaces_a_stale_one(book: Book) -> None:
    book.write(*measured(bf16=20.0, row=30.0))
    book.write(time(ROW, gemm(4096), 1.0, digest="f" * 64))
    assert ask().kernel == BF16


def test_the_median_of_full_runs_counts(book: Book) -> None:
    book.write(*measured())
    book.write(time(ROW, gemm(4096), 90.0))
    book.write(time(ROW, gemm(4096), 11.0))
    assert ask().latency_us == 11.0
    book.grade = "quick"
    book.write(time(ROW, gemm(4096), 1.0))
    assert ask().latency_us == 11.0


def test_times_between_measured_m_are_interpolated_and_marked(book: Book) -> None:
    rows = measured(bf16=20.0, row=10.0, m=4096)
    book.write(*rows, *(r for r in measured(bf16=40.0, row=30.0, m=8192)
                        if "time" in r.__qualname__))  # fmt: skip
    choice = ask(6144)
    assert choice.latency_us == pytest.approx(20.0)
    assert choice.interpolated and "interpolated" in choice.explain()
    assert not ask(4096).interpolated


def test_the_winner_changes_where_interpolated_times_cross(book: Book) -> None:
    times = {4096: (10.0, 20.0), 8192: (60.0, 40.0)}  # bf16, row: they cross at 5505 or so
    rows: list[Any] = [accuracy(BF16, gemm(1), 0.003), accuracy(ROW, gemm(1), 0.04)]
    for m, (bf16, row) in times.items():
        rows += [time(BF16, gemm(m), bf16), time(ROW, gemm(m), row)]
    book.write(*rows)
    table = ask(4096).table
    crossing = 4096 + (20 - 10) / ((60 - 10) - (40 - 20)) * 4096
    before, after = int(crossing * 0.95), int(crossing * 1.05)  # beyond the noise of 3 %
    assert ask(before - before % 16).kernel == BF16
    assert ask(after - after % 16).kernel == ROW
    # The frozen table answers as the rules do, at every m.
    for m in range(4000, 8300, 7):
        place = table.breakpoints[max(i for i, b in enumerate(table.breakpoints) if b <= m)]
        assert table.winners[table.breakpoints.index(place)] == table.pick(m).name


def test_kernels_that_cannot_win_are_not_asked(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons against them are found when they are asked for."""
    book.write(*measured(), time(TENSOR, gemm(4096), 15.0), accuracy(TENSOR, gemm(1), 0.04))
    asked = []
    refusal = Kernel.refusal

    def recorded(self: Kernel, problem: Problem, device: Device) -> str | None:
        asked.append(self.name)
        return refusal(self, problem, device)

    monkeypatch.setattr(Kernel, "refusal", recorded)
    choice = ask()
    assert choice.latency_us == 10.0 and {*asked} == {ROW, BF16}
    assert choice.rejected[TENSOR] == "slower: 15.00 us" and TENSOR in asked


def test_kernels_that_are_not_asked_change_no_choice(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    names = [BF16, ROW, TENSOR, "cuda.quantize_together_row+torch.scaled_mm_row"]
    rows: list[Any] = [accuracy(name, gemm(1), draw.uniform(0.03, 0.05)) for name in names]
    sizes = [256 * i for i in range(1, 60)]
    rows += [time(name, gemm(m), draw.uniform(19.0, 21.0)) for name in names for m in sizes]
    book.write(*rows)
    picks = [ask(m).table.pick(m) for m in sizes]
    monkeypatch.setattr(tables, "may_tie", lambda *_: True)
    every = [ask(m).table.pick(m) for m in sizes]
    assert [(p.name, p.time, p.tied) for p in picks] == [(p.name, p.time, p.tied) for p in every]
    assert {p.name for p in picks} == {*names}
    assert {len(p.tied) for p in picks} > {0, 1}


@pytest.mark.parametrize("m", [1, 2048, 4095, 8193, 10**6])
def test_nothing_is_extrapolated(book: Book, m: int) -> None:
    book.write(*measured(bf16=20.0, row=10.0, m=4096),
               time(BF16, gemm(8192), 40.0), time(ROW, gemm(8192), 20.0))  # fmt: skip
    choice = ask(m)
    assert choice.kernel == BF16
    assert choice.is_miss and choice.latency_us is None
    assert "outside what was measured" in choice.explain()


def test_without_rows_there_is_nothing_to_measure(book: Book) -> None:
    book.write(*measured())
    assert "bench sweep" in ask(1).explain()
    words = ask(0).explain()
    assert "there is nothing to measure" in words and "bench sweep" not in words


def test_an_unknown_shape_is_a_miss(book: Book) -> None:
    book.write(*measured())
    choice = dispatch("gemm", (4096, 512, 640), 0.06, device="NVIDIA H200")
    assert choice.kernel == BF16 and choice.is_miss
    assert "nothing was measured" in choice.explain()


def test_a_batch_is_dispatched_once_it_is_measured(book: Book) -> None:
    book.write(*measured())
    assert ask(batch=16).is_miss
    assert ask(batch=16).kernel == BF16
    book.write(time(BF16, gemm(4096, batch=16), 90.0))
    choice = ask(batch=16)
    assert (choice.kernel, choice.latency_us, choice.is_miss) == (BF16, 90.0, False)
    assert ask().kernel == ROW


def test_kernels_of_a_numerics_class_share_errors(book: Book) -> None:
    """Any kernel of a class provides its errors, except an incorrect one, which is rejected."""
    rival = "cuda.quantize_row+cuda.scaled_gemm_row"
    assert rival in KERNELS and KERNELS[rival].accumulation == KERNELS[ROW].accumulation
    problem = gemm(4096)
    book.write(
        time(BF16, problem, 20.0), time(ROW, problem, 12.0), time(rival, problem, 10.0),
        accuracy(ROW, problem, 0.04),
    )  # fmt: skip
    assert ask().kernel == rival
    assert ask().errors["row_err"] == pytest.approx(0.04)
    book.write(accuracy(rival, problem, 0.05))
    assert ask().errors["row_err"] == pytest.approx(0.05)
    book.write(accuracy(rival, problem, 0.9, status="wrong", only=("X3",)))
    assert ask().kernel == ROW
    assert "wrong on X3" in ask().rejected[rival]
    assert ask().errors["row_err"] == pytest.approx(0.05)


def test_a_scaled_gemm_has_the_error_of_its_gemm(book: Book) -> None:
    problem = make_problem("scaled_gemm", (4096, 512, 512))
    book.write(time("torch.scaled_mm_row", problem, 10.0))
    ask_scaled = functools.partial(dispatch, "scaled_gemm", problem.shape, device="NVIDIA H200")
    assert ask_scaled(0.06).is_miss
    book.write(accuracy(ROW, gemm(4096), 0.04))
    assert ask_scaled(0.06).kernel == "torch.scaled_mm_row"
    assert ask_scaled(0.03).is_miss


def test_errors_of_another_n_are_used_with_a_margin(book: Book) -> None:
    """Times 1.25, from n = 256 on and at the same k."""
    problem = gemm(4096)
    book.write(time(BF16, problem, 20.0), time(ROW, problem, 10.0))
    book.write(accuracy(ROW, gemm(4096, n=128), 0.04), accuracy(ROW, gemm(4096, k=1024), 0.04))
    assert ask().kernel == BF16 and "error not measured" in ask().rejected[ROW]
    book.write(accuracy(ROW, gemm(1024, n=4096), 0.045), accuracy(ROW, gemm(1, n=300), 0.04))
    choice = ask()
    assert choice.kernel == ROW
    assert choice.errors["row_err"] == pytest.approx(0.05), "of the nearest n, which is 300"
    assert "1.25 times what was measured at n=300, other sizes equal" in choice.explain()
    assert ask(budget=0.045).rejected[ROW].startswith("row_err 0.0500 > 0.045")
    book.write(accuracy(ROW, problem, 0.03))
    assert ask().errors["row_err"] == pytest.approx(0.03)
    narrow = gemm(4096, n=128)
    book.write(
        time(BF16, narrow, 20.0), time(TENSOR, narrow, 10.0), accuracy(TENSOR, problem, 0.03)
    )
    assert dispatch("gemm", narrow.shape, 0.06, device="NVIDIA H200").kernel == BF16


def test_errors_of_a_quantizer_at_another_k_are_used_with_a_margin(book: Book) -> None:
    """Times 1.25, of long rows at a k not too far, and none where the kernel was wrong at any."""
    quantize = functools.partial(dispatch, "quantize", device="NVIDIA H200")
    kernel = "cuda.quantize_row"
    for k in (64, 128, 1024, 8192, 16384):
        book.write(time(kernel, make_problem("quantize", (4096, k)), 10.0))
    short = make_problem("quantize", (2048, 256))
    book.write(accuracy(kernel, short, 0.02))
    assert quantize((4096, 1024), 0.06).is_miss, "short rows err less"
    measured = make_problem("quantize", (2048, 512))
    book.write(accuracy(kernel, measured, 0.026))
    choice = quantize((4096, 8192), 0.06)
    assert choice.kernel == kernel and not choice.is_miss
    assert choice.errors["row_err"] == pytest.approx(0.0325)
    assert "1.25 times what was measured at k=512, other sizes equal" in choice.explain()
    assert quantize((4096, 8192), 0.03).is_miss
    assert not quantize((4096, 128), 0.06).is_miss
    for k in (64, 16384):
        assert quantize((4096, k), 0.06).is_miss, "too far"
    assert quantize((4096, 8192), 0.06, out_granularity="1x128").is_miss, "another class"
    book.write(accuracy(kernel, replace(measured, k=1024), 0.9, status="wrong", only=("X3",)))
    assert quantize((4096, 8192), 0.06).is_miss
    assert "wrong on X3 at k=1024" in quantize((4096, 8192), 0.06).rejected[kernel]


def test_unquantized_errors_of_another_n_need_an_aligned_n(book: Book) -> None:
    """Errors of cuBLAS at n = 900 are up to 1.4 times those at 904; those of FP8 are equal."""
    book.write(time(BF16, gemm(4096), 10.0), accuracy(BF16, gemm(1, n=900), 0.003))
    assert ask().kernel == BF16 and not ask().errors
    askew = gemm(4096, n=479)
    book.write(time(BF16, askew, 10.0), accuracy(BF16, gemm(1, n=480), 0.002))
    book.write(time(ROW, askew, 12.0), accuracy(ROW, gemm(1, n=480), 0.04))
    choice = dispatch("gemm", askew.shape, 0.06, device="NVIDIA H200")
    assert choice.kernel == BF16 and not choice.errors
    book.write(accuracy(BF16, gemm(1, n=4096), 0.002))
    assert ask().errors["row_err"] == pytest.approx(0.0025)
    book.write(time(ROW, gemm(4096), 9.0), accuracy(ROW, gemm(1, n=900), 0.04))
    assert ask().kernel == ROW and ask().errors["row_err"] == pytest.approx(0.05)


def test_limits_that_depend_on_n_are_not_taken_from_another_n(book: Book) -> None:
    problem = gemm(4096)
    book.write(time(BF16, problem, 20.0), accuracy(BF16, problem, 0.003), time(ROW, problem, 10.0))
    book.write(accuracy(ROW, gemm(1, n=1024), 0.04))
    for budget in (ErrorBudget(row_err=0.06, row_p99=0.9, sqnr_db=1.0), ErrorBudget(rel_err=0.9)):
        assert ask(budget=budget).kernel == ROW
    choice = ask(budget=ErrorBudget(row_err=0.06, mean_shift=0.9))
    assert choice.kernel == BF16
    assert choice.rejected[ROW] == "mean_shift is not known at n=512"
    assert not set(ask().errors) & {"mean_shift", "mean_rel_err"}
    problem = make_problem("scaled_gemm", (4096, 512, 512))
    book.write(time("torch.scaled_mm_row", problem, 10.0))
    ask_scaled = functools.partial(dispatch, "scaled_gemm", problem.shape, device="NVIDIA H200")
    assert ask_scaled(0.06).kernel == "torch.scaled_mm_row"
    assert "no error is known" in ask_scaled(ErrorBudget(mean_shift=0.01)).explain()


@pytest.mark.parametrize(
    "here",
    [
        accuracy(ROW, gemm(4096), 0.5, seeds=(0,)), accuracy(ROW, gemm(4096), 0.5, only=("X1",)),
        accuracy(ROW, gemm(4096), 0.5, digest="f" * 64),
    ],
    ids=["one seed", "one distribution", "stale"],
)  # fmt: skip
def test_errors_of_another_n_do_not_replace_incomplete_ones(book: Book, here: Any) -> None:
    problem = gemm(4096)
    book.write(time(BF16, problem, 20.0), time(ROW, problem, 10.0), here)
    book.write(accuracy(ROW, gemm(1, n=1024), 0.04))
    assert ask().kernel == BF16


def test_an_incorrect_result_at_another_n_rejects_a_kernel(book: Book) -> None:
    problem, other = gemm(4096), "cuda.quantize_row+cuda.scaled_gemm_row"
    book.write(time(BF16, problem, 20.0), time(ROW, problem, 10.0), time(other, problem, 12.0))
    book.write(accuracy(other, gemm(1, n=1024), 0.04))
    assert ask().kernel == ROW
    book.write(accuracy(ROW, gemm(1, n=2048), 0.04, only=("X7",), status="wrong"))
    assert ask().kernel == other
    assert ask().rejected[ROW].startswith("wrong on X7 at n=2048")


def test_a_slower_kernel_needs_no_error(book: Book) -> None:
    problem = gemm(4096)
    book.write(time(BF16, problem, 20.0), time(ROW, problem, 30.0), time(TENSOR, problem, 10.0))
    choice = ask()
    assert choice.kernel == BF16
    assert choice.rejected[ROW].startswith("slower: 30.00 us; error not measured")
    assert choice.rejected[TENSOR].startswith("error not measured")


def test_a_crash_rejects_a_kernel_at_every_m(book: Book) -> None:
    book.write(
        *(time(BF16, gemm(m), m / 100) for m in (2048, 4096)),
        time(ROW, gemm(2048), 10.0, status="crashed"), time(ROW, gemm(4096), 20.0),
        accuracy(ROW, gemm(1), 0.04),
    )  # fmt: skip
    assert ask().kernel == BF16
    assert ask().rejected[ROW] == "crashed at m=2048: made up"


@pytest.mark.parametrize("crash", ["while it was timed", "while its error was measured"])
def test_a_later_success_cancels_a_crash(book: Book, crash: str) -> None:
    book.write(time(BF16, gemm(4096), 20.0), accuracy(BF16, gemm(1), 0.003))
    if crash == "while it was timed":
        book.write(time(ROW, gemm(4096), 10.0, status="crashed"))
    else:
        book.write(accuracy(ROW, gemm(1), 0.04, only=("X1",), seeds=(0,), status="crashed"))
        book.write(time(ROW, gemm(4096), 10.0))
    assert ask().kernel == BF16
    assert ask().rejected[ROW].startswith("crashed ")
    clock.sleep(0.002)  # rows carry milliseconds
    book.write(time(ROW, gemm(4096), 10.0), accuracy(ROW, gemm(1), 0.04))
    assert ask().kernel == ROW


@pytest.mark.parametrize("status", ["error", "out_of_memory", "timeout"])
def test_no_time_is_interpolated_across_a_failure(book: Book, status: str) -> None:
    rows: list[Any] = [accuracy(BF16, gemm(1), 0.003), accuracy(ROW, gemm(1), 0.04)]
    for m in (2048, 8192, 32768):
        rows.append(time(BF16, gemm(m), m / 100))
        rows.append(time(ROW, gemm(m), m / 200, status="ok" if m != 8192 else status))
    book.write(*rows)
    assert ask(2048).kernel == ROW
    for m in (4096, 8192, 16384):
        assert ask(m).kernel == BF16
        assert status in ask(m).rejected[ROW]


def test_the_unquantized_kernel_wins_a_tie_without_a_known_error(book: Book) -> None:
    problem = gemm(4096)
    book.write(
        time(BF16, problem, 10.1), time(ROW, problem, 10.0), accuracy(ROW, problem, 0.04)
    )  # fmt: skip
    choice = dispatch("gemm", (4096, 512, 512), 0.06, device=H200)
    assert (choice.kernel, choice.tied) == (BF16, (ROW,))


def test_a_noisy_time_is_no_tie_with_a_much_shorter_one(book: Book) -> None:
    write_with_a_noisy_time(book, bf16=12.0, noisy=13.0)
    assert ask().kernel == ROW


def test_a_noisy_time_behind_the_unquantized_one_is_no_tie(book: Book) -> None:
    write_with_a_noisy_time(book, bf16=10.4, noisy=10.45)
    assert ask().kernel == ROW and ask().tied == ()


def write_with_a_noisy_time(book: Book, *, bf16: float, noisy: float) -> None:
    other = "cuda.quantize_row+torch.scaled_mm_row_fast"
    book.write(*measured(bf16=bf16), time(other, gemm(4096), noisy, spread=0.3, count=3),
               accuracy(other, gemm(4096), 0.0399))  # fmt: skip


def test_fewer_than_three_seeds_do_not_count(book: Book) -> None:
    book.write(*measured(errors={"seeds": (0, 1)}))
    assert ask().kernel == BF16
    why = ask().rejected[ROW]
    count = len(REALISTIC_DISTRIBUTIONS)
    assert why.startswith(f"error not measured on any of the {count} realistic distributions (3")
    assert "(3 seeds needed, fewer measured: run the sweep again)" in why


def test_a_fresh_failure_outweighs_a_stale_time(book: Book) -> None:
    problem = gemm(4096)
    book.write(
        time(BF16, problem, 20.0), accuracy(BF16, problem, 0.003), accuracy(ROW, problem, 0.04),
        time(ROW, problem, 10.0, digest="f" * 64), time(ROW, problem, 10.0, status="error"),
    )  # fmt: skip
    assert ask().kernel == BF16
    assert "error" in ask().rejected[ROW]


def test_failures_with_an_old_digest_do_not_count(book: Book) -> None:
    problem = gemm(4096)
    book.write(
        time(BF16, problem, 20.0), accuracy(BF16, problem, 0.003),
        time(ROW, problem, 10.0, status="crashed", digest="f" * 64),
    )  # fmt: skip
    assert ask().kernel == BF16
    assert "changed" in ask().rejected[ROW]


def test_one_full_seed_does_not_hide_three_quick_ones(book: Book) -> None:
    problem = gemm(4096)
    book.grade = "quick"
    book.write(*measured())
    book.grade = "full"
    book.write(accuracy(ROW, problem, 0.05, only=("X1",), seeds=(0,)))
    assert ask().kernel == ROW
    assert ask().errors["row_err"] == pytest.approx(0.05)


def test_database_rows_import_no_module(book: Book) -> None:
    row = replace(KernelRow.of(KERNELS[ROW]), modules=("python:this.x",), digest="0" * 64)
    assert not is_current(row)
    assert "this" not in sys.modules
    assert not is_current(replace(row, modules=("python:torch._C",)))


def test_an_error_row_beside_good_ones_is_ignored(book: Book) -> None:
    book.write(*measured())
    book.write(accuracy(ROW, gemm(4096), 0.04, only=("X5",), seeds=(1,), status="error"))
    assert ask().kernel == ROW


def test_a_quick_incorrect_result_on_another_distribution_rejects_a_kernel(book: Book) -> None:
    book.write(*measured())
    book.grade = "quick"
    book.write(accuracy(ROW, gemm(4096), 0.04, only=("X3",), seeds=(0,), status="wrong"))
    assert ask().kernel == BF16
    assert ask(distribution="X1").kernel == BF16


def test_another_toolchain_is_usable_and_marked(book: Book) -> None:
    """The toolchain of every part of a composition counts."""
    from lokakern.device import current_environment

    now = current_environment()
    for change in ({"libraries": "0.1"}, {"torch": "0.1"}, {}):
        then = replace(now, **change)
        row = KernelRow.of(KERNELS[ROW])
        assert (candidates._toolchain(row, then) == candidates._toolchain(row, now)) is not bool(
            change
        )
    torch_only = KernelRow.of(KERNELS[BF16])
    assert candidates._toolchain(
        torch_only, replace(now, libraries="0.1")
    ) == candidates._toolchain(torch_only, now)


def test_a_choice_for_another_device_is_supported_there(book: Book) -> None:
    """Blockwise scaling of cuBLASLt needs m in multiples of 4."""
    weight = Operand(Format.E4M3FN, Granularity.BLOCK, Layout.COLUMN, 16)
    block = "cuda.quantize_group+torch.scaled_mm_block"
    rows: list[Any] = [accuracy(BF16, gemm(1), 0.003), accuracy(block, gemm(1), 0.04)]
    for m in (4096, 8192):
        problem = gemm(m, b=weight, prepared=True)
        rows += [time(BF16, problem, m / 100), time(block, problem, m / 200)]
    book.write(*rows)
    assert ask(6000, b=weight, prepared=True).kernel == block
    assert ask(6001, b=weight, prepared=True).kernel == BF16


def test_warm_calls_check_shapes(book: Book) -> None:
    book.write(*measured())
    ask(4096)
    for m in (-4096, -1):
        with pytest.raises(ShapeError):
            ask(m)
    with pytest.raises(ShapeError):
        dispatch("gemm", (), 0.06)


def test_deleting_a_row_changes_the_answer(book: Book, tmp_path: Path) -> None:
    first, second = Book(tmp_path / "a.sqlite"), Book(tmp_path / "b.sqlite")
    first.write(*measured()[:2])
    assert ask().kernel == BF16
    second.write(*measured()[2:])
    merge([first.path, second.path], book.path)
    book.use()
    assert ask().kernel == ROW


@pytest.mark.parametrize(
    ("budget", "kernel"),
    [
        (ErrorBudget(row_err=0.05), ROW),
        (ErrorBudget(row_err=0.04), ROW),
        (ErrorBudget(row_p99=0.047), BF16),
        (ErrorBudget(row_p99=0.049), ROW),
        (ErrorBudget(row_err=0.05, mean_rel_err=0.2), BF16),
        (ErrorBudget(sqnr_db=27.0), ROW),
        (ErrorBudget(sqnr_db=28.5), BF16),
        (ErrorBudget(rel_err=0.039), BF16),
        (ErrorBudget(mean_shift=1e-3), ROW),
        (ErrorBudget(mean_shift=1e-5), BF16),
    ],
    ids=str,
)
def test_every_limit_of_a_budget_holds(book: Book, budget: ErrorBudget, kernel: str) -> None:
    book.write(*measured())  # row_err 0.04: p99 0.048, 27.96 dB
    assert ask(budget=budget).kernel == kernel


def test_a_prepared_weight_takes_only_kernels_of_its_form(book: Book) -> None:
    weight = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN, alignment_of(512))
    book.write(*measured(b=weight, prepared=True))
    assert ask(b=weight, prepared=True).kernel == ROW
    assert ask().is_miss  # nothing was measured with the weight quantized on the way


def test_a_choice_for_another_device_says_so_when_called(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "devices_here", lambda: frozenset({current_device("cpu")}))
    book.write(*measured())
    choice = ask()
    assert not choice.callable
    with pytest.raises(UnsupportedError, match="NVIDIA H200"):
        choice()


def test_untimed_kernels_are_named_on_the_local_device(book: Book) -> None:
    here = current_device("cpu")
    book.write(time(BF16, gemm(4096), 20.0, device=here))
    choice = dispatch("gemm", (4096, 512, 512), 0.06, device=here, regime="graph-cold")
    assert (choice.kernel, choice.latency_us) == (BF16, 20.0)
    assert choice.rejected["torch.quantize_row+torch.emulated_row"] == "not measured here"


def test_explain_names_every_kernel_once(book: Book) -> None:
    book.write(*measured(), time(TENSOR, gemm(4096), 5.0))
    text = ask().explain()
    assert text.startswith("gemm m=4096 n=512 k=512")
    for name in (BF16, ROW, TENSOR):
        assert sum(line.split()[0] == name for line in text.splitlines()[1:]) == (name != ROW)


def test_dispatch_is_a_pure_function_of_the_snapshot(book: Book) -> None:
    book.write(*measured())
    first = ask().explain()
    assert "judged on" not in first
    book.use()
    assert ask().explain() == first


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("gem", (1, 2, 3), 0.1), {}, UnknownNameError, "expected one of dequantize, gemm"),
        (("gemm", (1, 2), 0.1), {}, ShapeError, "(m, n, k)"),
        (("gemm", (1, 2, 0), 0.1), {}, ShapeError, "others >= 1"),
        (("gemm", (-1, 2, 3), 0.1), {}, ShapeError, "m >= 0"),
        (("gemm", (1.5, 2, 3), 0.1), {}, ShapeError, "integers"),
        (("gemm", 7, 0.1), {}, ShapeError, "expected"),
        (("gemm", (1, 2, 3), -0.1), {}, BudgetError, "zero or larger"),
        (("gemm", (1, 2, 3), math.nan), {}, BudgetError, "finite"),
        (("gemm", (1, 2, 3), math.inf), {}, BudgetError, "finite"),
        (("gemm", (1, 2, 3), "much"), {}, BudgetError, "number"),
        (("gemm", (1, 2, 3), True), {}, BudgetError, "number"),
        (("gemm", (1, 2, 3), 0.1), {"device": "NVIDIA H9000"}, DeviceError, "known are"),
        (("gemm", (1, 2, 3), 0.1), {"regime": "warm"}, UnknownNameError, "graph-cold"),
        (("gemm", (1, 2, 3), 0.1), {"distribution": "X99"}, UnknownNameError, "X1"),
        (("gemm", (1, 2, 3), 0.1), {"layout": 3}, UnknownNameError, "epilogue"),
    ],
)
def test_invalid_arguments_raise(
    book: Book, arguments: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    book.write(*measured())
    with pytest.raises(error) as found:
        dispatch(*arguments, **options)
    assert words in str(found.value)


def test_budget_without_limits_is_refused() -> None:
    with pytest.raises(BudgetError, match="no limit"):
        ErrorBudget()


# --- GEMMs with a norm

UNFUSED = "torch.norm_unfused"
ROUNDED = "torch.bf16+torch.norm_quantize"
FUSED_FP8 = "torch.quantize_row+torch.norm_emulated_row"
NORM: dict[str, Any] = {"epilogue": "bias+layer+affine", "out_format": "e4m3fn"}


def normed(book: Book, *, unfused: float, rounded: float, fp8: float, row_err: float) -> Book:
    """Times with everything around the norm, errors of the norm alone."""
    problem = make_problem("gemm_norm", (4096, 512, 512), **NORM)
    return book.write(
        time(UNFUSED, problem, unfused), time(ROUNDED, problem, rounded),
        time(FUSED_FP8, problem, fp8), accuracy(FUSED_FP8, problem, row_err),
    )  # fmt: skip


def ask_normed(budget: Any = 0.06, **fields: Any) -> Choice:
    asked = {**NORM, **fields}
    return dispatch("gemm_norm", (4096, 512, 512), budget, device="NVIDIA H200", **asked)


def test_a_gemm_with_a_norm_is_dispatched(book: Book) -> None:
    normed(book, unfused=20.0, rounded=15.0, fp8=10.0, row_err=0.05)
    choice = ask_normed()
    assert (choice.kernel, choice.latency_us) == (FUSED_FP8, 10.0)
    assert choice.errors["row_err"] == pytest.approx(0.05)
    assert "bias+layer+affine out=e4m3fn/row" in choice.explain()
    assert ask_normed(epilogue="rms").is_miss
    assert ask_normed(out_granularity=Granularity.GROUP).is_miss


def test_unquantized_kernels_with_a_norm_are_legal_with_any_budget(
    book: Book,
) -> None:
    """Even without a measured error: it is no worse than torch without fusion."""
    normed(book, unfused=20.0, rounded=15.0, fp8=10.0, row_err=0.05)
    for budget in (None, 0.03, 1e-9):
        choice = ask_normed(budget)
        assert (choice.kernel, choice.is_miss) == (ROUNDED, False)
        assert choice.rejected[FUSED_FP8].startswith(("no budget", "row_err 0.0500 >"))
        assert choice.rejected[UNFUSED] == "slower: 20.00 us"


def test_the_most_accurate_kernel_must_support_the_problem(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may refuse a problem that it was measured at."""
    a = Operand(Format.E4M3FN, Granularity.ROW)
    problem = make_problem("gemm_norm", (4096, 512, 512), a=a, **NORM)
    better, worse = "torch.norm_emulated_row", "cuda.gemm_norm_row"
    book.write(time(better, problem, 10.0), accuracy(better, problem, 0.05),
               time(worse, problem, 9.0), accuracy(worse, problem, 0.055))  # fmt: skip
    assert ask_normed(0.03, a=a).kernel == better
    supports = Kernel.supports

    def refuses(kernel: Kernel, asked: Problem, device: Device) -> Accepted | Rejected:
        return Rejected("no more") if kernel.name == better else supports(kernel, asked, device)

    monkeypatch.setattr(Kernel, "supports", refuses)
    book.use()
    choice = ask_normed(0.03, a=a)
    assert choice.kernel == worse and choice.rejected[better] == "no more"


def test_quantized_operands_with_a_norm_take_the_fastest_kernel(book: Book) -> None:
    a = Operand(Format.E4M3FN, Granularity.ROW)
    problem = make_problem("gemm_norm", (4096, 512, 512), a=a, **NORM)
    emulated = "torch.norm_emulated_row"
    book.write(time(emulated, problem, 10.0), accuracy(emulated, problem, 0.05))
    for budget in (None, 0.06):
        assert ask_normed(budget, a=a).kernel == emulated
    choice = ask_normed(0.03, a=a)
    assert choice.kernel == emulated and emulated not in choice.rejected
    assert "the most accurate of those that run is taken" in choice.pick.note
    words = "10.00 us (measured, 1 run, graph-cold), over budget: row_err 0.0500 > 0.03 (worst on"
    assert f"{emulated}, {words}" in choice.explain().split("\n")[0]
    rows = make_problem("norm_quantize", (4096, 512), epilogue="rms")
    book.write(time("torch.norm_quantize", rows, 5.0))
    found = dispatch("norm_quantize", (4096, 512), device="NVIDIA H200", epilogue="rms")
    assert (found.kernel, found.latency_us) == ("torch.norm_quantize", 5.0)


def test_a_kernel_that_never_ran_comes_after_others_where_nothing_was_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = Operand(Format.E4M3FN, Granularity.ROW)
    problem = make_problem("dequantize", (1000, 777), a=a, out_format=Format.FLOAT16)
    table = dispatcher.table_for(problem, None, device=H200)
    chosen = []
    for new in ({}, {("cuda.dequantize_row", "sm_90"): "never run"}):
        monkeypatch.setattr(tables, "NEW_KERNELS", new)
        kernel = replace(table, callable_here=True).kernel_at(1000)
        chosen.append(kernel and kernel.name)
    monkeypatch.setattr(tables, "NEW_KERNELS", {})
    monkeypatch.setitem(KERNELS["cuda.dequantize_row"].compile_only, "sm_90", "never run")
    kernel = replace(table, callable_here=True).kernel_at(1000)
    chosen.append(kernel and kernel.name)
    assert chosen == ["cuda.dequantize_row", *["triton.dequantize_row"] * 2]
