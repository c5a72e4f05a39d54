"""Conditions of a sweep: what else the machine does, how much times vary, and how long it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lokakern.measure.accuracy import FEWEST_ROWS
from lokakern.triton_interpreter import is_interpreted

BUSY = 0.25  # share of all cores that others use
FEWEST = 8  # times, or problems, to judge by
UNSTEADY_SHARE = 0.25  # of times; of 56847 on idle H200s and H100s two were unsteady
OFF = 1.5  # factor between an estimate and what it took


class OtherLoad:
    """What other processes use of the cores, from when it was made."""

    def __init__(self) -> None:
        self._then = _seconds()

    def words(self) -> str:
        """A warning if others use more than `BUSY`; "" if not, or where that is unknown."""
        now = _seconds()
        if self._then is None or now is None:
            return ""
        busy, passed, own = (b - a for a, b in zip(self._then, now, strict=True))
        share = (busy - own) / passed if passed else 0.0
        if share <= BUSY:
            return ""
        return (
            f"this machine is busy: other processes use {share:.0%} of its {os.cpu_count()} cores, "
            "so that times of the host, and of kernels on a CPU, may be too long"
        )


def _seconds() -> tuple[float, float, float] | None:
    """Seconds that all cores worked, that passed on all cores, and that this process worked."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, idle, waiting, *rest = map(int, line.split()[1:9])
    except (OSError, ValueError):
        return None
    busy = user + nice + system + sum(rest)
    tick = os.sysconf("SC_CLK_TCK")
    return busy / tick, (busy + idle + waiting) / tick, sum(os.times()[:4])


@dataclass
class FirstTasks:
    """Compares the first problems of a sweep with the estimate, and looks at how times vary.

    Attributes:
        costs: Estimated seconds of each problem.
        ranks: How many ranks share them.
        note: Gets each warning once.
    """

    costs: Sequence[float]
    ranks: int
    note: Callable[[str], None]
    spent_s: dict[int, float] = field(default_factory=dict)
    timed: int = 0
    unsteady: int = 0

    def done(self, place: int, seconds: float, are_unsteady: Sequence[bool]) -> None:
        """Note what is wrong after the first problems.

        Args:
            place: The problem's, among `costs`.
            seconds: How long it took.
            are_unsteady: Of each time, whether it is unsteady.
        """
        before = self.timed
        self.timed += len(are_unsteady)
        self.unsteady += sum(are_unsteady)
        if before < FEWEST <= self.timed and self.unsteady > UNSTEADY_SHARE * self.timed:
            self.note(
                f"{self.unsteady} of the first {self.timed} times vary by more than 25 %: this "
                "machine is busy, or its clocks change; `explain` calls such rows unsteady"
            )
        self.spent_s[place] = seconds
        if len(self.spent_s) == FEWEST:
            self._compare()

    def _compare(self) -> None:
        factor = sum(self.spent_s.values()) / sum(self.costs[place] for place in self.spent_s)
        if 1 / OFF < factor < OFF:
            return
        rest = sum(cost for place, cost in enumerate(self.costs) if place not in self.spent_s)
        self.note(
            f"the first {FEWEST} problems took {factor:.1f} times as long as estimated: about "
            f"{duration(factor * rest / self.ranks)} more for the times"
        )


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"


def estimate_words(seconds: float, *, has_errors: bool) -> str:
    """An estimate of a sweep, "about 3 s"; nothing estimates what Triton's interpreter takes."""
    if not is_interpreted():
        return f"about {duration(seconds)}"
    errors = f", and launches up to {FEWEST_ROWS} rows for each error, seed by seed"
    return (
        "unknown in Triton's interpreter, which takes milliseconds for each program of a kernel"
        f"{errors if has_errors else ''}: --time-limit 15 shows the first"
    )
