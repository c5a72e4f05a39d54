"""Misses name measured neighbors; the form of a prepared weight is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lokakern
from lokakern.device import current_device
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.types import Format, Granularity, Operand, Problem
from lokakern.workloads.gemm_cases import prepared_weight
from tests.support.measurements import BF16, H200, ROW, TENSOR, Book, accuracy, gemm, time

ROWS, WHOLE = (prepared_weight(Format.E4M3FN, g) for g in (Granularity.ROW, Granularity.TENSOR))


def ask(m: int = 4096, budget: Any = 0.06, **fields: Any) -> Choice:
    return dispatch("gemm", (m, 512, 512), budget, device="NVIDIA H200", **fields)


def noted(**fields: Any) -> str:
    choice = ask(**fields)
    assert choice.is_miss and choice.kernel == BF16 and choice.pick.note in choice.explain()
    return choice.pick.note


def bf16_at(**fields: Any) -> Any:
    return time(BF16, gemm(4096, **fields), 20.0)


def arguments_of(note: str) -> dict[str, Any]:
    """The first way to ask that a note names, without options of the command."""
    text = note.split("ask with ")[1].split(" or ")[0].split(" (")[0]
    return dict(eval(f"dict({text})", {"lokakern": lokakern}))


@pytest.mark.parametrize(
    ("measured", "asked", "words", "differ", "way"),
    [
        ({"epilogue": "bias"}, {}, "with bias", "epilogue differs",
         "epilogue='bias' (--epilogue bias)"),
        ({}, {"epilogue": "bias"}, "without epilogue", "epilogue differs",
         "epilogue='none' (without --epilogue and --bias)"),
        ({"b": ROWS, "prepared": True}, {}, "prepared (row)", "prepared differs",
         "prepared=True (--prepared row)"),
        ({}, {"b": ROWS, "prepared": True}, "not prepared", "prepared differs",
         "prepared=False (without --prepared)"),
        ({"epilogue": "bias"}, {"b": ROWS, "prepared": True}, "not prepared with bias",
         "prepared and epilogue differ",
         "prepared=False, epilogue='bias' (--epilogue bias without --prepared)"),
        ({}, {"regime": "eager"}, "in graph-cold", "regime differs",
         "regime='graph-cold' (--regime graph-cold)"),
        ({"batch": 4}, {}, "with batch=4", "batch differs", "batch=4"),
        ({"out_strided": True}, {}, "with out_strided=True", "out_strided differs",
         "out_strided=True"),
        ({"a": Operand(Format.BFLOAT16, alignment=4)}, {},
         "with a=bfloat16/none/row-major/4 with b=bfloat16/none/column-major/4",
         "alignment of a and alignment of b differ",
         "a=lokakern.types.Operand.parse('bfloat16/none/row-major/4'), "
         "b=lokakern.types.Operand.parse('bfloat16/none/column-major/4')"),
        ({"b": ROWS, "prepared": True, "epilogue": "bias"}, {}, "prepared (row) with bias",
         "prepared and epilogue differ",
         "prepared=True, epilogue='bias' (--prepared row --epilogue bias)"),
    ],
)  # fmt: skip
def test_a_miss_names_measured_neighbors_and_their_arguments(
    book: Book, measured: dict[str, Any], asked: dict[str, Any], words: str, differ: str, way: str
) -> None:
    book.write(bf16_at(**measured))
    note = noted(**asked)
    assert note == (
        f"n=512 k=512 was measured on NVIDIA H200 only {words} ({differ}): ask with {way}"
    )
    named = arguments_of(note)
    if "prepared" not in named or named["prepared"]:
        kept = {name: value for name, value in asked.items() if name not in named}
        assert not ask(**{**kept, **named}).is_miss, "asked so there is an answer"


def test_neighbors_of_a_miss_are_searched_for_once_and_only_where_words_are_asked_for(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.write(bf16_at(epilogue="bias"))
    searched, search = [], dispatcher.measured_instead
    monkeypatch.setattr(
        dispatcher, "measured_instead", lambda *given: searched.append(given) or search(*given)
    )
    choice = ask()
    assert choice.is_miss and choice.kernel == BF16 and not searched
    assert choice.explain() == choice.explain() and "with bias" in choice.pick.note
    assert len(searched) == 1


def test_equally_near_neighbors_are_all_named(book: Book) -> None:
    book.write(bf16_at(epilogue="bias"), bf16_at(b=ROWS, prepared=True),
               bf16_at(b=WHOLE, prepared=True), bf16_at(epilogue="bias", batch=4),
               time(BF16, gemm(64, epilogue="bias"), 2.0))  # fmt: skip
    assert noted().endswith(
        "only prepared (row) (prepared differs) or prepared (tensor) (prepared differs) or with "
        "bias (epilogue differs): ask with prepared=True (--prepared row, --prepared tensor) or "
        "epilogue='bias' (--epilogue bias)"
    )


@pytest.mark.parametrize("what", ["k", "device", "op", "failed", "stale"])
def test_a_miss_without_neighbors_says_that_nothing_was_measured(book: Book, what: str) -> None:
    other = {
        "k": time(BF16, gemm(4096, k=640, epilogue="bias"), 20.0),
        "device": time(BF16, gemm(4096, epilogue="bias"), 20.0,
                       device=replace(H200, product="NVIDIA H100")),
        "op": time("torch.scaled_mm_row", replace_op(gemm(4096)), 20.0),
        "failed": time(BF16, gemm(4096, epilogue="bias"), 20.0, status="error"),
        "stale": time(BF16, gemm(4096, epilogue="bias"), 20.0, digest="f" * 64),
    }  # fmt: skip
    book.write(other[what], time(BF16, gemm(4096, n=64), 5.0))
    assert noted() == (
        "nothing was measured at n=512 k=512, graph-cold, on NVIDIA H200; nearest is n=64 k=512 "
        "(n differs)"
    )


def test_the_nearest_problem_differs_in_the_fewest_attributes(book: Book) -> None:
    wide, odd = gemm(4096, n=4096), replace_a(gemm(4096, n=520), alignment=2)
    book.write(time(BF16, wide, 20.0), time(BF16, odd, 5.0))
    assert noted().endswith("; nearest is n=4096 k=512 (n differs)")
    book.write(time(BF16, gemm(4096, n=1024, k=500), 20.0))
    assert noted().endswith("; nearest is n=4096 k=512 (n differs)"), "of equal attributes"
    book.write(time(BF16, gemm(4096, n=1024, k=1024), 20.0, digest="f" * 64))
    assert noted().endswith("; nearest is n=4096 k=512 (n differs)"), "not of a changed kernel"
    book.write(time(BF16, gemm(4096, n=640), 20.0))
    assert noted().endswith("; nearest is n=640 k=512 (n differs)")


def replace_a(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, a=replace(problem.a, **changes))


def replace_op(problem: Problem) -> Problem:
    a = Operand(Format.E4M3FN, Granularity.ROW)
    return replace(problem, op="scaled_gemm", a=a, b=replace(a, layout=ROWS.layout))


def test_a_miss_names_times_that_do_not_count(book: Book) -> None:
    book.write(time(ROW, gemm(4096), 10.0, status="wrong"), bf16_at(epilogue="bias"))
    assert noted() == (
        f"no time at n=512 k=512, graph-cold, counts: {ROW}: wrong at m=4096: made up"
    )


def test_a_missing_baseline_is_not_an_m_outside(book: Book) -> None:
    book.write(*(time(ROW, gemm(m), 10.0) for m in (1024, 4096)), accuracy(ROW, gemm(1), 0.04))
    book.write(time(BF16, gemm(1024), 20.0))
    assert noted() == "torch.bf16 was not measured at m=4096 (measured: 1024)"
    outside = "is outside what was measured (1024, 4096); nearest is"
    assert noted(m=8192) == f"m=8192 {outside} m=4096 (m differs)"
    assert noted(m=512) == f"m=512 {outside} m=1024 (m differs)"
    assert not ask(m=1024).is_miss


def prepared(book: Book, m: int = 4096, *, row: float = 10.0, whole: float = 12.0) -> Book:
    problems = [gemm(m, b=b, prepared=True) for b in (ROWS, WHOLE)]
    return book.write(
        time(BF16, problems[0], 20.0), time(BF16, problems[1], 21.0), time(ROW, problems[0], row),
        time(TENSOR, problems[1], whole),
    )  # fmt: skip


def test_a_prepared_weight_without_a_description_takes_the_fastest_form(book: Book) -> None:
    """The fastest form is chosen at each m among the forms within the budget."""
    book.write(accuracy(ROW, gemm(1), 0.04), accuracy(TENSOR, gemm(1), 0.05))
    prepared(book), prepared(book, 8192, row=10.0, whole=8.0)
    for _ in range(2):
        choice = ask(prepared=True)
        assert (choice.kernel, choice.latency_us, choice.problem.b) == (ROW, 10.0, ROWS)
        other = ask(8192, prepared=True)
        assert (other.kernel, other.latency_us, other.problem.b) == (TENSOR, 8.0, WHOLE)
    assert ask(8192, 0.045, prepared=True).kernel == ROW
    assert ask(8192, 0.03, prepared=True).kernel == BF16
    assert ask(prepared=True, b=WHOLE).kernel == TENSOR, "a weight that is described is that one"
    assert ask(prepared=True, b=None).kernel == ROW
    assert ask(prepared=False).is_miss


def test_a_warm_call_builds_no_problem(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a weight in whatever form, at each m that was asked."""
    book.write(accuracy(ROW, gemm(1), 0.04), accuracy(TENSOR, gemm(1), 0.05))
    prepared(book), prepared(book, 8192, row=10.0, whole=8.0)
    asked: list[dict[str, Any]] = [
        {}, {"prepared": True}, {"m": 8192, "prepared": True}, {"epilogue": "bias", "batch": 2}
    ]  # fmt: skip
    cold = [ask(**fields) for fields in asked]
    assert [choice.kernel for choice in cold[1:3]] == [ROW, TENSOR]

    def build(*_: object) -> None:
        raise AssertionError("it was built again")

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "problem_of", build)
        warm = [ask(**fields) for fields in asked]
        with pytest.raises(AssertionError, match="built again"):
            ask(4097, prepared=True)
    assert [(c.table, c.m) for c in warm] == [(c.table, c.m) for c in cold]
    dispatcher.use_snapshot(dispatcher.snapshot())
    assert ask(prepared=True).table is not cold[1].table, "of another snapshot"


def test_the_cache_of_prepared_weights_is_bounded(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(book)
    monkeypatch.setattr(dispatcher, "_MOST_TABLES", 3)
    for m in range(16, 16 * 20, 16):
        ask(m, prepared=True)
    assert 0 < len(dispatcher._PREPARED) <= 3


def test_a_measured_form_is_preferred_to_misses(book: Book) -> None:
    problem = gemm(4096, b=WHOLE, prepared=True)
    book.write(time(BF16, problem, 20.0), accuracy(BF16, gemm(1), 0.002))
    choice = ask(prepared=True)
    assert (choice.kernel, choice.problem.b, choice.is_miss) == (BF16, WHOLE, False)
    assert ask(prepared=True, batch=4).is_miss


def test_a_prepared_weight_is_faster_at_the_shipped_anchor() -> None:
    dispatcher.use_snapshot(None)
    plain = dispatch("gemm", (32768, 2048, 2048), 0.06, device="NVIDIA H200")
    choice = dispatch("gemm", (32768, 2048, 2048), 0.06, device="NVIDIA H200", prepared=True)
    every = [
        dispatch("gemm", (32768, 2048, 2048), 0.06, device="NVIDIA H200", prepared=True,
                 b=prepared_weight(Format.E4M3FN, form)).latency_us
        for form in (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)
    ]  # fmt: skip
    assert choice.latency_us == min(us for us in every if us is not None)
    assert plain.latency_us is not None and choice.latency_us < plain.latency_us


def test_only_the_chosen_form_is_frozen(book: Book, tmp_path: Path) -> None:
    book.write(accuracy(ROW, gemm(1), 0.04))
    prepared(book)
    dispatcher._answer_from(dispatcher.snapshot(), None, True)
    ask(prepared=True)
    assert [table.problem.b for table in dispatcher.chosen()] == [ROWS]


def test_frozen_choices_have_the_chosen_form(book: Book, tmp_path: Path) -> None:
    """A file has no times: of all forms the one it holds is the answer."""
    here = current_device("cpu")
    book.write(time(BF16, gemm(4096, b=ROWS, prepared=True), 20.0, device=here))

    def choose() -> Choice:
        return dispatch("gemm", (4096, 512, 512), device=here, regime="graph-cold", prepared=True)

    assert choose().problem.b == ROWS
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    choice = choose()
    assert (choice.problem.b, choice.kernel, choice.is_miss) == (ROWS, BF16, False)
