"""What a sweep says of a busy machine, of times that vary, and of its estimate."""

from __future__ import annotations

import pytest

from lokakern.sweep import conditions
from lokakern.sweep.conditions import FEWEST, FirstTasks, OtherLoad, estimate_words


def told(costs: list[float], *tasks: tuple[float, list[bool]], ranks: int = 1) -> list[str]:
    notes: list[str] = []
    first = FirstTasks(costs, ranks, notes.append)
    for place, (seconds, are_unsteady) in enumerate(tasks):
        first.done(place, seconds, are_unsteady)
    return notes


def test_the_first_problems_correct_the_estimate() -> None:
    costs = [1.0] * FEWEST + [10.0] * 6
    slow = [(2.0, [False])] * FEWEST
    assert told(costs, *slow[1:]) == []
    (note,) = told(costs, *slow, *slow[:3])
    assert "took 2.0 times as long as estimated: about 2 min 0 s more" in note
    (note,) = told(costs, *slow, ranks=2)
    assert "about 60 s more" in note
    (note,) = told(costs, *[(0.5, [False])] * FEWEST)
    assert "took 0.5 times as long" in note and "about 30 s more" in note
    assert told(costs, *[(1.2, [False])] * FEWEST) == []


def test_a_sweep_says_at_once_that_times_vary() -> None:
    some = [(1.0, [True, False, False])]
    (note,) = told([1.0] * 99, *some * 5)
    assert note.startswith("3 of the first 9 times vary by more than 25 %")
    assert told([1.0] * 99, *some * 2) == [], "too few to say"
    assert told([1.0] * 99, *[(1.0, [True] + [False] * 7)], *some * 2) == []


@pytest.mark.parametrize(
    ("busy", "own", "words"), [(6.0, 1.0, "use 50 % of its"), (6.0, 4.0, ""), (0.5, 0.0, "")]
)
def test_a_machine_that_others_use_is_called_busy(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, words: str
) -> None:
    readings = iter([(100.0, 1000.0, 7.0), (100.0 + busy, 1010.0, 7.0 + own)])
    monkeypatch.setattr(conditions, "_seconds", lambda: next(readings))
    said = OtherLoad().words()
    assert (words.replace(" %", "%") in said) if words else said == ""


def test_the_load_of_this_machine_can_be_read() -> None:
    busy, passed, own = conditions._seconds() or (0.0, 0.0, 0.0)
    assert passed >= busy >= 0.0 and own > 0.0


def test_what_the_interpreter_takes_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    unknown = (
        "unknown in Triton's interpreter, which takes milliseconds for each program of a kernel"
    )
    limit = ": --time-limit 15 shows the first"
    assert estimate_words(0.1, has_errors=False) == unknown + limit
    errors = ", and launches up to 384 rows for each error, seed by seed"
    assert estimate_words(0.1, has_errors=True) == unknown + errors + limit
    monkeypatch.delenv("TRITON_INTERPRET")
    assert estimate_words(0.1, has_errors=True) == "about 0 s"
