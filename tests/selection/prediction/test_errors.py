"""Bounds of errors at sizes without measured ones, from rows made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import lokakern
from lokakern.chain.candidates import Chain, _measured
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.selection.candidates import Bounds, Evidence
from lokakern.selection.prediction.errors import MARGIN, predicted_errors
from lokakern.selection.prediction.models import model_for
from lokakern.types import REALISTIC_DISTRIBUTIONS, ErrorBudget
from tests.support.measurements import BF16, H200, ROW, Book, accuracy, gemm, time
from tests.support.shipped import H200_FILE

SAME_CLASS = "cuda.quantize_row+cuda.scaled_gemm_row"  # as `ROW`
ASKED = gemm(4096)
AROUND = [accuracy(ROW, gemm(4096, k=k), 0.04) for k in (256, 1024)]


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "rows.sqlite")


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions by the shipped model, whatever the rows are."""
    facts = load_snapshot([H200_FILE])
    model = model_for(facts, facts.find_device(H200.product))
    assert model is not None
    monkeypatch.setattr(dispatcher, "model_of", lambda _: model)


def bounds_of(book: Book, *names: str) -> list[Bounds | str]:
    """Bounds of kernels, asked in this order with one memory."""
    facts = load_snapshot([book.path])
    evidence = Evidence(facts, H200, False, REALISTIC_DISTRIBUTIONS, {})
    return [predicted_errors(KernelRow.of(KERNELS[name]), ASKED, evidence) for name in names]


def test_the_bound_is_above_the_largest_around(book: Book) -> None:
    (found,) = bounds_of(book.write(*AROUND), ROW)
    assert isinstance(found, Bounds) and found.is_predicted
    assert found.errors["row_err"] == pytest.approx(MARGIN * 0.04)


@pytest.mark.parametrize("order", [(ROW, SAME_CLASS), (SAME_CLASS, ROW)])
def test_a_kernel_that_is_wrong_nearby_has_no_bound_and_others_do(
    book: Book, order: tuple[str, str]
) -> None:
    """Whichever of a class is asked for first."""
    book.write(*AROUND, accuracy(SAME_CLASS, gemm(4096, k=256), 0.04, status="wrong"))
    found = dict(zip(order, bounds_of(book, *order), strict=True))
    assert isinstance(found[ROW], Bounds)
    assert isinstance(found[SAME_CLASS], str)


def test_errors_at_the_size_come_before_bounds_around_it(book: Book) -> None:
    """Also those of too few seeds, which may be larger."""
    book.write(*AROUND, accuracy(SAME_CLASS, ASKED, 0.5, seeds=(0, 1)))
    for found in bounds_of(book, ROW, SAME_CLASS):
        assert isinstance(found, str) and "error not measured on any of the 13" in found


def test_a_budget_holds_where_errors_of_one_seed_exceed_it(book: Book, predicting: None) -> None:
    times = [time(BF16, ASKED, 20.0), time(ROW, ASKED, 10.0)]
    book.write(*AROUND, *times)
    assert lokakern.dispatch("gemm", (4096, 512, 512), 0.06, device=H200).kernel == ROW
    book.write(accuracy(ROW, ASKED, 0.5, seeds=(0,)))
    assert lokakern.dispatch("gemm", (4096, 512, 512), 0.06, device=H200).kernel == BF16


def test_a_report_has_the_bounds_of_dispatch(book: Book, predicting: None) -> None:
    book.write(*AROUND, time(BF16, ASKED, 20.0), time(ROW, ASKED, 10.0))
    table = dispatcher.loose_table(ASKED, H200, None)
    for limit in (0.06, 0.045):
        asked = lokakern.dispatch("gemm", (4096, 512, 512), limit, device=H200)
        assert table.within(ErrorBudget.of(limit)).pick(4096).name == asked.kernel
    assert table.forecast is None
    assert dispatcher.table_for(ASKED, None, None, H200, predicts=False).forecast is None


def test_a_bound_beyond_the_budget_is_no_error_beyond_it(book: Book, predicting: None) -> None:
    asked = lokakern.dispatch("scaled_gemm", (4096, 512, 512), 0.045, device=H200).problem
    book.write(*AROUND, time("cuda.scaled_gemm_row", asked, 10.0))
    choice = lokakern.dispatch("scaled_gemm", (4096, 512, 512), 0.045, device=H200)
    assert choice.is_miss and choice.kernel == "cuda.scaled_gemm_row"
    words = choice.explain()
    assert "by bounds from other n and k no kernel is within row_err" in words
    assert "measure it" in words and "allow a larger error" not in words
    within = lokakern.dispatch("scaled_gemm", (4096, 512, 512), 0.06, device=H200)
    assert not within.is_miss and within.kernel == "cuda.scaled_gemm_row"


def test_chains_have_no_bounds(book: Book, predicting: None) -> None:
    asked = lokakern.dispatch("scaled_gemm", (4096, 512, 512), 0.06, device=H200).problem
    book.write(*AROUND, time("cuda.scaled_gemm_row", asked, 10.0))
    chain = Chain((), 4096, H200, REALISTIC_DISTRIBUTIONS, None)
    (step,) = _measured(chain, 0, asked)
    assert step.kernel == "cuda.scaled_gemm_row" and step.row_err is None
