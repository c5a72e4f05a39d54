"""Held out: choices that a database made, judged by times that it has never seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lokakern.bench.compare.dispatch import DISPATCH, UNQUANTIZED, choice_of, compare, compared_of
from lokakern.bench.compare.dispatch import Row as Compared
from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.registry.register import kernel_named
from lokakern.selection.candidates import within_noise
from lokakern.selection.dispatcher import Choice, default_regime
from lokakern.types import ErrorBudget, Granularity
from lokakern.workloads.suites import Case


@dataclass(frozen=True, slots=True)
class Row:
    """A choice measured again.

    Attributes:
        problem: Where.
        chosen: The quantized kernel that the database chooses.
        chosen_us: Its median now; None if it did not end well.
        unquantized_us: That of the unquantized kernel, in the same interleaved rounds.
        speedup: The latter over the former; above 1 the choice was good.
        promised: The same by the database's times.
        slower: Whether the choice is slower beyond noise, or one of both gave no time.
        why: Why it gave none.
    """

    problem: str
    chosen: str
    chosen_us: float | None
    unquantized_us: float | None
    speedup: float | None
    promised: float | None
    slower: bool
    why: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """All rows, in the order they were measured in, and what they come to.

    Attributes:
        rows: Of the problems that were drawn.
        candidates: How many there were to draw from.
        seed: Of the draw, the operands and the order.
        slower: Problems at which the choice is slower beyond noise.
        geometric_mean: Of speedups; None without any.
        least_speedup: Of them.
    """

    rows: tuple[Row, ...]
    candidates: int
    seed: int
    slower: tuple[str, ...]
    geometric_mean: float | None
    least_speedup: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def held_out(
    cases: Sequence[Case],
    count: int,
    *,
    budget: ErrorBudget,
    seed: int,
    regime: str | None = None,
    distribution: str | None = None,
    begin: Callable[[int], None] = lambda _count: None,
    step: Callable[[str], None] = lambda _text: None,
) -> HeldOut:
    """Draw choices of a quantized kernel at random, and time each against the unquantized one.

    `compare` measures, and noise is what dispatch takes for it.

    Args:
        cases: What to draw from; only gemm has choices that promise to be no slower.
        count: How many to draw, or all if there are fewer.
        budget: What the choice may err.
        seed: Of the draw, of operands and of the order; other than 0, which the database has.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        distribution: Judge errors on one distribution instead of all realistic ones.
        begin: Called with the number of problems.
        step: Called with each problem.

    Raises:
        MeasurementError: The database chooses no quantized kernel anywhere: nothing is promised.
    """
    device = current_device()
    regime = regime or default_regime(device)

    def choice(case: Case) -> Choice:
        return choice_of(case, budget, regime, distribution)

    promised = [
        case for case in compared_of(cases, budget, regime, distribution)
        if _is_quantized(choice(case))
    ]  # fmt: skip
    if not promised:
        raise MeasurementError(
            f"at none of these {len(cases)} problems the database chooses a quantized kernel on "
            f"{device} within {budget}; sweep first, or choose others"
        )
    drawn = random.Random(seed).sample(promised, min(count, len(promised)))
    begin(len(drawn))
    found = compare(drawn, budget=budget, regime=regime, distribution=distribution, seed=seed,
                    alone=True, step=step)  # fmt: skip
    promises = {str(case.problem): _promise(choice(case)) for case in drawn}
    rows = tuple(_row(row, promises[row.problem]) for row in found.rows)
    return HeldOut(
        rows=rows,
        candidates=len(promised),
        seed=seed,
        slower=tuple(row.problem for row in rows if row.slower),
        geometric_mean=found.geometric_mean.get(UNQUANTIZED),
        least_speedup=found.least_speedup.get(UNQUANTIZED),
    )


def _is_quantized(choice: Choice) -> bool:
    if choice.is_miss or not choice.callable:
        return False
    return kernel_named(choice.kernel).granularity is not Granularity.NONE


def _promise(choice: Choice) -> float | None:
    """How many times as fast as the unquantized kernel the choice is by the database."""
    plain = next((c for c in choice.table.candidates if c.name == choice.table.baseline), None)
    found = plain.time_at(choice.m) if plain is not None else None
    latency_us = choice.latency_us
    return found[0].latency_us / latency_us if found and latency_us else None


def _row(row: Compared, promised: float | None) -> Row:
    us, margin = row.latency_us, row.margin_us
    slower = True  # what gives no time is slower than anything
    if DISPATCH in us and UNQUANTIZED in us:
        times = (us[DISPATCH], margin[DISPATCH], us[UNQUANTIZED], margin[UNQUANTIZED])
        slower = us[DISPATCH] > us[UNQUANTIZED] and not within_noise(*times)
    return Row(
        problem=row.problem,
        chosen=row.chosen,
        chosen_us=us.get(DISPATCH),
        unquantized_us=us.get(UNQUANTIZED),
        speedup=row.speedup.get(UNQUANTIZED),
        promised=promised,
        slower=slower,
        why="; ".join(f"{name}: {why}" for name, why in row.failed.items()),
    )
