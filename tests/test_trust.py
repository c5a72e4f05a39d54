"""Dispatch on measurements of others: cautious until some of them were measured again here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lokakern import selection
from lokakern.registry.exchange import import_file
from lokakern.registry.identity import row_key
from lokakern.registry.reader import database_digest, read_rows
from lokakern.registry.register import KERNELS
from lokakern.registry.snapshot import load_snapshot
from lokakern.registry.tables import COLUMNS
from lokakern.registry.trust import Tier, move, waiting_for
from lokakern.registry.writer import write_file
from lokakern.selection import Choice, dispatch
from tests.test_selection import BF16, H200, ROW, TENSOR, Book, accuracy, gemm, time

M = 4096
HERE, ELSEWHERE = gemm(M), gemm(M, n=1024)
Write = Callable[..., None]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A database with bf16's times of two layers, and no shipped file."""
    path = tmp_path / "mine.sqlite"
    monkeypatch.setenv("LOKAKERN_DB", str(path))
    monkeypatch.setattr("lokakern.registry.places.shipped_databases", list)
    own(path, time(BF16, HERE, 20.0), time(BF16, ELSEWHERE, 40.0))
    yield path
    selection.use_snapshot(None)


def own(path: Path, *rows: Any) -> None:
    Book(path).write(*rows)
    selection.use_snapshot(None)


def others(path: Path, *rows: Any) -> None:
    """Import what somebody else measured."""
    theirs = path.with_name(f"theirs{len(os.listdir(path.parent))}.sqlite")
    Book(theirs).write(*rows)
    import_file(theirs, path)
    selection.use_snapshot(None)


def chosen(budget: float = 0.06, m: int = M) -> Choice:
    selection.use_snapshot(load_snapshot())
    return dispatch("gemm", (m, 512, 512), budget, device=H200)


def test_an_imported_error_counts_as_what_is_known_of_its_arithmetic(mine: Path) -> None:
    own(mine, time(ROW, ELSEWHERE, 50.0), accuracy(ROW, ELSEWHERE, 0.041))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.02))
    choice = chosen()
    assert choice.kernel == ROW and choice.latency_us == 5.0
    assert choice.errors["row_err"] == 0.041, "the worse of 0.02 and 0.041"
    assert choice.errors["row_p99"] == pytest.approx(0.041 * 1.2)
    assert "5.00 us (measured, 1 run, graph-cold, imported and not verified)" in choice.explain()
    assert "error: imported and not verified: the worse of it" in choice.explain()
    assert chosen(0.03).kernel == BF16


def test_a_larger_imported_error_stays(mine: Path) -> None:
    own(mine, accuracy(ROW, ELSEWHERE, 0.041))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.055))
    assert chosen().errors["row_err"] == 0.055


def test_an_imported_error_with_nothing_to_compare_is_none(mine: Path) -> None:
    """Neither another granularity, nor another distribution, tells anything."""
    own(mine, accuracy(TENSOR, ELSEWHERE, 0.041), accuracy(ROW, ELSEWHERE, 0.041, without=("X3",)))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    choice = chosen()
    assert choice.kernel == BF16
    assert "error on X3 is only imported" in choice.rejected[ROW]
    assert "`python -m lokakern.bench verify`" in choice.rejected[ROW]


def test_a_larger_error_of_ours_at_the_problem_is_joined(mine: Path) -> None:
    """Evidence of ours at the problem itself needs no comparison; theirs can only make it worse."""
    own(mine, time(ROW, HERE, 6.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.02))
    choice = chosen()
    assert (choice.errors["row_err"], choice.latency_us) == (0.04, 6.0)
    assert "not verified" not in choice.explain()
    others(mine, accuracy(ROW, HERE, 0.07))
    assert chosen().kernel == BF16


def test_times_measured_here_come_first(mine: Path) -> None:
    own(mine, time(ROW, HERE, 30.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0), time(ROW, gemm(2 * M), 5.0), time(BF16, gemm(2 * M), 50.0))
    assert chosen().kernel == BF16, "30 us here, whatever others say"
    far = chosen(m=2 * M)
    assert far.kernel == ROW and "imported and not verified" in far.explain()


def test_a_wrong_result_of_others_is_believed(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    assert chosen().kernel == ROW
    others(mine, time(ROW, gemm(2 * M), 5.0, status="wrong"))
    assert chosen().kernel == BF16


def test_where_a_file_lies_says_how_far_it_is_trusted(mine: Path) -> None:
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    assert chosen().kernel == BF16, "there is nothing to compare its errors with"
    (waiting,) = waiting_for(mine)
    move(waiting, Tier.ERRORS)
    choice = chosen()
    assert (choice.kernel, choice.errors["row_err"]) == (ROW, 0.04)
    assert "graph-cold, imported and not verified)" in choice.explain()
    assert "error: imported" not in choice.explain()
    (waiting,) = waiting_for(mine)
    move(waiting, Tier.REJECTED)
    assert ROW not in chosen().explain() or "not measured here" in chosen().rejected[ROW]


def test_what_is_trusted_too_is_trusted(mine: Path) -> None:
    """A run that is in the database does not become doubtful because somebody sends it back."""
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    Book(mine.with_name("more.sqlite")).write(time(ROW, ELSEWHERE, 5.0))
    import_file(mine, mine.with_name("again.sqlite"))
    os.replace(mine, mine.with_name("again.sqlite"))
    os.rename(mine.with_name("again.sqlite"), mine)
    os.rename(mine.with_name("again.sqlite.imports"), mine.with_name("mine.sqlite.imports"))
    assert len(waiting_for(mine)) == 1
    choice = chosen()
    assert choice.kernel == ROW and "not verified" not in choice.explain()


def test_an_import_of_another_state_of_a_kernel_is_no_evidence(mine: Path) -> None:
    own(mine, accuracy(ROW, ELSEWHERE, 0.041))
    others(mine, time(ROW, HERE, 5.0, digest="f" * 64),
           accuracy(ROW, HERE, 0.04, digest="f" * 64))  # fmt: skip
    assert chosen().kernel == BF16 and KERNELS[ROW].digest != "f" * 64


def test_a_row_that_somebody_adds_to_a_run_of_ours_is_theirs(mine: Path) -> None:
    own(mine, time(ROW, HERE, 30.0), accuracy(ROW, HERE, 0.04))
    rows = read_rows(mine)
    forged = []
    for values in rows["timing"]:
        row = dict(zip(COLUMNS["timing"], values, strict=True))
        if row["latency_us_p50"] == 30.0:
            row |= {"regime": "graph-hot", "latency_us_p20": 5.0, "latency_us_p50": 5.0}
            forged.append((row_key("timing", row), *list(row.values())[1:]))
    theirs = mine.with_name("forged.sqlite")
    write_file(theirs, {**rows, "timing": sorted([*rows["timing"], *forged])})
    import_file(theirs, mine)
    facts = load_snapshot()
    tiers = {cell.tier for cell in facts.timings_on(H200, "graph-cold")}
    assert tiers == {""}, "what we have, too, is ours"
    (cell,) = facts.timings_on(H200, "graph-hot")
    assert cell.tier == Tier.UNVERIFIED
    assert facts.digest != database_digest(mine)


def test_the_digest_says_what_is_trusted(mine: Path) -> None:
    """Ranks that differ in it choose differently."""
    own(mine, time(ROW, HERE, 5.0))
    before = load_snapshot().digest
    others(mine, accuracy(ROW, HERE, 0.04))
    waits = load_snapshot().digest
    move(waiting_for(mine)[0], Tier.ERRORS)
    assert len({before, waits, load_snapshot().digest}) == 3
