"""Bounds of errors at sizes whose k is left out of what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lokakern.problems import make_problem
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection.candidates import Bounds, Evidence, bounds_or_reason
from lokakern.selection.prediction.errors import predicted_errors


def measured_and_predicted(
    facts: Snapshot,
    evidence: Evidence,
    row: KernelRow,
    op: str,
    epilogue: str,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Bounds, Bounds]]:
    """Bounds of a kernel where both are known: measured, and predicted from every other k.

    Args:
        facts: With all errors.
        evidence: Of these facts.
        row: The kernel.
        op: Of the problems.
        epilogue: Of the problems.
        step: Every so many of them are looked at.
        monkeypatch: Hides errors of the same k.
    """
    every = facts.accuracies_of_form(
        evidence.asked(make_problem(op, (2048, 512, 512), epilogue=epilogue))
    )
    for n, k, key in sorted(every)[::step]:
        problem = make_problem(op, (2048, n, k), epilogue=epilogue)
        true = bounds_or_reason(row, problem, key, evidence, True)
        others = [one for one in every if one[1] != k]
        monkeypatch.setattr(facts, "accuracies_of_form", lambda _, others=others: others)
        monkeypatch.setattr(
            "lokakern.selection.prediction.errors.errors_or_reason", lambda *_: "left out"
        )
        monkeypatch.setattr("lokakern.selection.prediction.errors.is_tried", lambda *_: False)
        evidence.memory.clear()
        bound = predicted_errors(row, problem, evidence)
        monkeypatch.undo()
        if isinstance(true, Bounds) and isinstance(bound, Bounds):
            yield true, bound
