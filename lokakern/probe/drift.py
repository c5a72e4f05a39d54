"""Whether the operands of a site leave what they were, told by a few numbers of each window.

The numbers are those of `lokakern.probe.windows`. Of 60 windows of 256, 512 and 2048 rows by 64
columns of each of the 13 realistic distributions, 2,340 in all, two left the range of the first
three twice in a row (X12 at 256 rows, which have two sizes).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from lokakern.probe.fingerprint import OCTAVES_OF_SLACK
from lokakern.probe.windows import MEAN, NONFINITE, Numbers

LEARNED = 3  # windows whose range counts as usual
CONFIRMED = 2  # windows in a row that leave it
SLACK_OF_MEAN = 0.5

Profile = Mapping[str, float]
# Of fingerprints of the GEMM that reads an operand alone, what windows tell, too.
_KNOWN = {"input": "output", "grad_output": "grad_input"}
_SHARED = ("row_spread", "crest", MEAN)


def usual_of(fingerprints: Mapping[str, Profile]) -> dict[str, float]:
    """What the fingerprints of a site, by GEMM, say of its windows."""
    return {
        f"{part}.{name}": fingerprints[gemm][name]
        for part, gemm in _KNOWN.items()
        if gemm in fingerprints
        for name in _SHARED
        if name in fingerprints[gemm]
    }


class Usual:
    """The range of each number of a site's windows, and how often in a row it was left.

    Args:
        known: Numbers of an earlier report, see `usual_of`; of others the first windows decide.

    Attributes:
        is_left: Whether the last window left the range, and the next one decides.
    """

    def __init__(self, known: Profile | None = None) -> None:
        self._ranges = {name: (value, value) for name, value in (known or {}).items()}
        self._windows = 0
        self._beyond: Counter[str] = Counter()  # windows in a row, by number and direction
        self.is_left = False

    def see(self, profile: Profile, *, falls: bool = False) -> str:
        """Take in a window; what moved, if it did so in as many windows as confirm it, or "".

        What falls makes rounding better, and counts with ``falls`` alone, such as of a site that
        was unsafe: gradients of a model that learns have ever less spread.
        """
        self._windows += 1
        is_learning = self._windows <= LEARNED
        # Of what a window does not tell, such as weights, its next number goes on.
        beyond = Counter(
            {way: n for way, n in self._beyond.items() if way.partition(" ")[0] not in profile}
        )
        words = []
        self.is_left = False
        for name, value in profile.items():
            low, high = self._ranges.get(name, (value, value))
            slack = _slack(name)
            if low - slack <= value <= high + slack:
                if is_learning or name not in self._ranges:
                    self._ranges[name] = min(low, value), max(high, value)
                continue
            if value < low and not falls:
                continue
            way = f"{name} {'rose' if value > high else 'fell'}"
            beyond[way] = self._beyond[way] + 1
            self.is_left = True
            if beyond[way] >= CONFIRMED or name.endswith(NONFINITE):
                usual = f"{low:.3g}" if high - low <= slack / 8 else f"{low:.3g} to {high:.3g}"
                words.append(f"{way} from {usual} to {value:.3g}")
        self._beyond = beyond
        self.is_left &= not words
        return ", ".join(words)

    def limits(self, name: str) -> tuple[float, float]:
        """Between which a number tells nothing; the upper one below the other if any does."""
        if self._windows < LEARNED or self._beyond or name not in self._ranges:
            return math.inf, -math.inf
        (low, high), slack = self._ranges[name], _slack(name)
        return low - slack, high + slack


class Ranges:
    """What is usual of all sites.

    Args:
        known: Numbers of an earlier report, by site, see `usual_of`.

    Attributes:
        are_left: Whether a site left its range in the last window, and the next one decides.
    """

    are_left = False

    def __init__(self, known: Mapping[str, Profile]) -> None:
        self._usual = {site: Usual(numbers) for site, numbers in known.items()}
        self._limits: dict[Any, tuple[Any, Any]] = {}  # arrays of the lower and of the upper ones

    def see(self, numbers: Numbers, off: Collection[str]) -> dict[str, str]:
        """Take in a window; what moved, by site; of those in ``off`` also what fell.

        All numbers are compared at once, and sites one by one only where one is beyond its limits.
        """
        key = numbers.names, frozenset(off)
        if key not in self._limits:
            limits = [
                self._usual[site].limits(name) if site in self._usual else (math.inf, -math.inf)
                for site, name in numbers.names
            ]
            low, high = np.array(limits).reshape(-1, 2).T
            falls = np.array([site in off for site, _ in numbers.names], dtype=bool)
            self._limits[key] = np.where(falls, low, -math.inf), high
        low, high = self._limits[key]
        beyond = np.flatnonzero((numbers.values > high) | (numbers.values < low))
        found = {}
        self.are_left = False
        for site in dict.fromkeys(numbers.names[place][0] for place in beyond.tolist()):
            if site not in numbers.parts:  # of few rows
                continue
            self._limits.clear()
            profile = numbers.of(site)
            usual = self._usual.setdefault(site, Usual())
            words = usual.see(profile, falls=site in off)
            self.are_left |= usual.is_left
            if words:  # what is usual begins anew
                self._usual[site] = Usual()
                self._usual[site].see(profile)
                found[site] = words
        return found


def _slack(name: str) -> float:
    last = name.rpartition(".")[2]
    if last == NONFINITE:
        return 0.0
    return SLACK_OF_MEAN if last == MEAN else OCTAVES_OF_SLACK
