"""The problems of a suite whose measurement is most likely to change a predicted choice.

A choice changes where the speedup turns out to be on the other side of 1 than the lower end of its
interval. Problems are ordered by the distance of that end from 1, in widths of the interval. Over
the shipped file, with predictions of left-out pairs (n, k), the choice between bf16 and FP8 is not
that of the times at 6.0 % of 1865 problems; after a quarter was measured in this order, at 0.5 %,
and after a random quarter at 3.9 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lokakern.errors import MeasurementError
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection import dispatcher
from lokakern.selection.choice import Choice
from lokakern.selection.prediction.forecast import Prediction
from lokakern.types import Device, ErrorBudget
from lokakern.workloads.suites import Case

SHARE = 0.25  # of the predicted problems
BUDGET = ErrorBudget(row_err=0.06)  # admits every E4M3 kernel but those that fail on outliers


@dataclass(frozen=True, slots=True)
class Doubtful:
    """The cases to measure first, and what is left.

    Attributes:
        places: Indices of the cases to measure, the most doubtful first; none where no measured
            time changes the choice.
        certain: Number of predicted cases that are left.
        measured: Number of cases with measured times.
        unpredicted: Number of cases that the model does not cover.
    """

    places: tuple[int, ...]
    certain: int
    measured: int
    unpredicted: int

    def __str__(self) -> str:
        return (
            f"measuring the {len(self.places)} problems whose measurement is most likely to change "
            f"a predicted choice; left: {self.certain} whose choice is more certain, "
            f"{self.measured} that were measured, {self.unpredicted} that the model does not cover"
        )


def doubtful(
    cases: Sequence[Case],
    device: Device,
    regime: str | None,
    facts: Snapshot,
    step: Callable[[str], None] = lambda _text: None,
) -> Doubtful:
    """The `SHARE` of the predicted cases that are most in doubt.

    Args:
        cases: Of a suite.
        device: Where they are to be measured.
        regime: Regime of the times; None is the device's default.
        facts: What was measured.
        step: Called with each case.

    Raises:
        MeasurementError: No model belongs to what was measured, or predictions are off.
    """
    dispatcher.use_snapshot(facts)
    try:
        if dispatcher.model_of(device) is None:
            raise MeasurementError(
                f"--for-model needs a time model of {device}, and none belongs to the database: "
                "fit one with `python -m lokakern.bench fit`"
            )
        doubts: list[tuple[float, int]] = []
        measured = unpredicted = 0
        for place, case in enumerate(cases):
            step(str(case.problem))
            table = dispatcher.table_for(case.problem, BUDGET, None, device, regime,
                                         is_choice=False)  # fmt: skip
            choice = Choice(table, case.problem.m)
            if not choice.is_miss:
                measured += 1
            elif choice.predicted is None:
                unpredicted += 1
            else:
                doubts.append((distance(choice.predicted), place))
    finally:
        dispatcher.use_snapshot(None)
    doubts.sort()
    first = doubts[: math.ceil(SHARE * len(doubts))]
    kept = [place for doubt, place in first if doubt < math.inf]
    return Doubtful(tuple(kept), len(doubts) - len(kept), measured, unpredicted)


def distance(found: Prediction) -> float:
    """Distance of the lower end of a speedup from 1, in widths of its interval.

    Infinite where no measured time changes the choice: no kernel quantizes within the budget, or
    the host takes longer than the GPU at both ends.
    """
    if not found.quantizing or found.low == found.high:
        return math.inf
    return abs(math.log(found.low)) / math.log(found.high / found.low)
