"""Unverified imports reject nothing that was measured here or shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lokakern.problems import make_problem
from lokakern.registry.quarantine import quarantined_files
from lokakern.registry.register import kernels_for
from lokakern.registry.sharing.import_file import import_file, merge_files
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.types import ACCEPTED
from tests.support.imported_measurements import DEEPER, HERE, M, chosen, others, own
from tests.support.measurements import BF16, H200, ROW, TENSOR, Book, accuracy, gemm, time

WIDE = gemm(M, n=1024)
UNUSED = (907, 908, 909)  # seeds nobody draws
SHAPES = [(32768, 2048, 2048), (16384, 1024, 4096), (4096, 512, 512), (1024, 4096, 4096)]


def failures(name: str, problem: Any, device: Any = H200) -> list[list[Any]]:
    """All failures that hostile files can claim of a kernel at a problem and its neighbors."""
    near = [gemm(m, problem.n, problem.k) for m in (problem.m, 4 * problem.m)]
    beside, few = gemm(M, problem.n + 8, problem.k), ("X3", "X12")
    return [
        *([time(name, at, 1e4, status=status, device=device) for at in near]
          for status in ("wrong", "crashed", "timeout", "error")),
        *([accuracy(name, problem, 0.9, seeds=(0, UNUSED[0]), status=status, only=few),
           accuracy(name, beside, 0.9, seeds=UNUSED, status=status, only=few)]
          for status in ("wrong", "crashed")),
        [accuracy(name, problem, 0.9, seeds=UNUSED, only=few)],
    ]  # fmt: skip


def together(each: list[list[list[Any]]]) -> list[list[Any]]:
    """The rows of several, in one file each."""
    return [[row for rows in same for row in rows] for same in zip(*each, strict=True)]


def answer(choice: Choice) -> tuple[Any, ...]:
    return choice.kernel, choice.latency_us, choice.errors, choice.is_miss, choice.interpolated


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user with the shipped file and no database."""
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "mine.sqlite"))
    dispatcher.use_snapshot(None)
    yield tmp_path / "mine.sqlite"
    dispatcher.use_snapshot(None)


def test_imported_failures_change_no_choice_of_the_shipped_file(
    shipped: Path, tmp_path: Path
) -> None:
    """For each problem, the winner and bf16 are claimed to be incorrect, to crash and to err."""
    questions = [(shape, budget) for shape in SHAPES for budget in (0.04, 0.06, 0.2)]

    def ask() -> list[Choice]:
        return [
            dispatch("gemm", shape, budget, device="NVIDIA H200") for shape, budget in questions
        ]

    before = ask()
    hostile = together([
        failures(name, gemm(*shape), before[0].table.device)
        for shape in SHAPES
        for name in sorted({c.kernel for c in before if c.problem.shape == shape} | {BF16})
    ])  # fmt: skip
    for number, rows in enumerate(hostile):
        Book(tmp_path / f"{number}.sqlite").write(*rows)
    merge_files([tmp_path / f"{number}.sqlite" for number in range(len(hostile))],
                tmp_path / "hostile.sqlite")  # fmt: skip
    import_file(tmp_path / "hostile.sqlite", shipped)
    dispatcher.use_snapshot(None)
    after = ask()
    assert len(quarantined_files(shipped)) == 1 and len({c.kernel for c in before}) > 3
    assert list(map(answer, after)) == list(map(answer, before))
    assert any("imported and not verified" in choice.explain() for choice in after)


@pytest.mark.parametrize("name", [ROW, BF16])
@pytest.mark.parametrize("number", range(7))
def test_an_imported_failure_does_not_reject_a_measured_kernel(
    mine: Path, name: str, number: int
) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04), accuracy(BF16, HERE, 0.002))
    before = answer(chosen())
    assert before[0] == ROW
    others(mine, *failures(name, HERE)[number])
    choice = chosen()
    assert answer(choice) == before
    assert not choice.table.rests_on_imports


def test_explain_lists_imported_failures_that_are_set_aside(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    assert "set aside" not in chosen().explain()
    others(mine, time(ROW, gemm(2 * M), 5.0, status="wrong"))
    words = "set aside, imported and not verified: wrong at m=8192: made up"
    assert words in chosen().explain()
    others(mine, accuracy(ROW, HERE, 0.9, seeds=UNUSED, only=("X3",)))
    others(mine, accuracy(ROW, HERE, 0.9, seeds=UNUSED, only=("X4",), status="crashed"))
    found = chosen().explain()
    assert words in found
    assert "set aside, imported and not verified: row_err 0.9 on X3" in found
    assert "set aside, imported and not verified: crashed on X4: made up" in found


def test_an_imported_error_below_the_measured_one_is_not_listed(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    others(mine, accuracy(ROW, HERE, 0.04, seeds=UNUSED))
    assert "set aside" not in chosen().explain()


def test_imported_failures_count_without_measurements(mine: Path) -> None:
    own(mine, accuracy(ROW, WIDE, 0.041), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0))
    assert chosen().kernel == ROW
    others(mine, time(ROW, gemm(2 * M), 5.0, status="wrong"))
    choice = chosen()
    assert choice.kernel == BF16
    assert choice.rejected[ROW] == "wrong at m=8192: made up (imported and not verified)"


def test_imported_incorrect_results_count_if_times_are_imported(mine: Path) -> None:
    own(mine, accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0))
    assert chosen().kernel == ROW
    others(mine, accuracy(ROW, HERE, 0.9, seeds=(907,), only=("X3",), status="wrong"))
    assert chosen().rejected[ROW].startswith("wrong on X3: made up (imported")


def test_imported_incorrect_results_count_if_errors_are_imported(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, DEEPER, 0.041))
    others(mine, accuracy(ROW, HERE, 0.04))
    assert chosen().kernel == ROW
    others(mine, accuracy(ROW, HERE, 0.9, seeds=(907,), only=("X3",), status="wrong"))
    assert chosen().rejected[ROW].startswith("wrong on X3: made up (imported")


def test_the_larger_imported_error_counts_if_errors_are_imported(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, DEEPER, 0.041))
    others(mine, accuracy(ROW, HERE, 0.04))
    others(mine, accuracy(ROW, HERE, 0.055, seeds=UNUSED))
    assert chosen().errors["row_err"] == 0.055


def test_imported_errors_of_a_lower_grade_count_if_errors_are_imported(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, DEEPER, 0.041))
    others(mine, accuracy(ROW, HERE, 0.04))
    quick = Book(mine.with_name("quick.sqlite"))
    quick.grade = "quick"
    quick.write(accuracy(ROW, HERE, 0.055, seeds=UNUSED, only=("X3",)))
    import_file(quick.path, mine)
    assert chosen().errors["row_err"] == 0.055


def test_imported_incorrect_results_reject_imported_times_only(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04), time(BF16, gemm(4 * M), 90.0))
    others(mine, time(ROW, gemm(4 * M), 20.0))
    assert chosen(m=4 * M).kernel == ROW
    others(mine, time(ROW, gemm(2 * M), 5.0, status="wrong"))
    assert chosen(m=4 * M).kernel == BF16 and chosen().kernel == ROW
    assert "at m=8192 wrong: made up (imported" in chosen(m=4 * M).rejected[ROW]


@pytest.mark.parametrize("status", ["wrong", "crashed"])
def test_a_measured_failure_outweighs_an_imported_success(mine: Path, status: str) -> None:
    own(mine, time(ROW, gemm(2 * M), 5.0, status=status), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0), time(ROW, gemm(2 * M), 5.0))
    assert chosen().rejected[ROW] == f"{status} at m=8192: made up"


def test_an_imported_failure_hides_no_measured_failure(mine: Path) -> None:
    """The order of m and of the names of distributions does not matter."""
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, gemm(64), 5.0, status="wrong"))
    others(mine, accuracy(ROW, HERE, 0.9, seeds=(907,), only=("X1",), status="wrong"))
    assert chosen().kernel == ROW
    own(mine, accuracy(ROW, HERE, 0.9, seeds=(908,), only=("X9",), status="wrong"))
    assert chosen().rejected[ROW] == "wrong on X9: made up"
    own(mine, time(ROW, gemm(2 * M), 5.0, status="wrong"))
    assert chosen().rejected[ROW] == "wrong at m=8192: made up"


def test_a_measured_incorrect_result_outweighs_imported_errors(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0))
    own(mine, accuracy(ROW, HERE, 0.04, only=("X3",), seeds=(0,), status="wrong"))
    own(mine, accuracy(ROW, DEEPER, 0.041))
    others(mine, accuracy(ROW, HERE, 0.04))
    assert chosen().rejected[ROW] == "wrong on X3: made up"


def test_a_choice_by_time_alone_needs_no_error(mine: Path) -> None:
    """Without a budget any quantizer counts that was correct where it was timed."""
    quantizing = make_problem("quantize", (M, 512))
    names = [kernel.name for kernel in kernels_for("quantize", H200)
             if kernel.supports(quantizing, H200) == ACCEPTED][:2]  # fmt: skip
    own(mine, *(time(name, quantizing, us) for name, us in zip(names, (5.0, 9.0), strict=True)))

    def choose() -> str:
        dispatcher.use_snapshot(None)
        return dispatch("quantize", (M, 512), device=H200).kernel

    assert choose() == names[0]
    others(mine, accuracy(names[0], quantizing, 0.9, seeds=(907,), status="wrong"))
    assert choose() == names[0]


def test_an_imported_error_does_not_hide_a_measured_one_at_another_n(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, WIDE, 0.04))
    before = chosen()
    assert before.kernel == ROW and before.errors["row_err"] == pytest.approx(0.05)
    for seeds in ((907,), UNUSED):
        others(mine, accuracy(ROW, HERE, 0.9, seeds=seeds))
        assert answer(chosen()) == answer(before)
    assert "set aside, imported and not verified: row_err 0.9 on X" in chosen().explain()


def test_an_imported_error_at_the_same_n_comes_first(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, DEEPER, 0.041))
    others(mine, accuracy(ROW, WIDE, 0.04))
    assert chosen().errors["row_err"] == pytest.approx(0.041 * 1.25)
    others(mine, accuracy(ROW, HERE, 0.05))
    assert chosen().errors["row_err"] == 0.05


def test_imported_failures_of_one_kernel_leave_another_unchanged(mine: Path) -> None:
    own(mine, *(time(name, HERE, us) for name, us in ((ROW, 5.0), (TENSOR, 9.0))))
    own(mine, *(accuracy(name, HERE, 0.04) for name in (ROW, TENSOR)))
    before = answer(chosen())
    for rows in failures(TENSOR, HERE):
        others(mine, *rows)
    assert answer(chosen()) == before and len(quarantined_files(mine)) == 7
