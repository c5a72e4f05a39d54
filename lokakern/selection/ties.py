"""How ties are broken: which times tie, and which of the tied kernels dispatch chooses.

Times within 3 % are ties, and times within their noise are, up to 5 %. A tie goes to the
unquantized kernel, then to the smaller error, then to operands that one launch quantizes, then to
the first name. A kernel that is slower than the fastest unquantized one never ties with it.
Predicted times never tie, because the lower end of a speedup already counts their error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lokakern.selection.candidates import Candidate, Time

# 8369 times of two H200s differed by 1.1 % in the median and by 4 % at the 90th percentile. Of 1318
# choices 10 differed with a floor of 1 %, 2 of them without a marked tie; with 3 %, 6 and 1.
TIE_FLOOR = 0.03
# In names of kernels that quantize both operands in one launch (decision 048).
TOGETHER = "quantize_together"
TIE_CEILING = 0.05  # times that differ more are no ties, however few the replays


UNSTEADY = 1.25  # p80 over p20 of a time that is not reliable


def is_unsteady(p20_us: float, p80_us: float) -> bool:
    """Whether a time varied so much between replays that it says little."""
    return p80_us > UNSTEADY * p20_us


class Timed(NamedTuple):
    """A legal candidate with its time at one m."""

    candidate: Candidate
    time: Time
    interpolated: bool


def break_tie(timed: Sequence[Timed], limit: str) -> tuple[Timed, Sequence[Timed]]:
    """The chosen candidate, and all that tie with the fastest one, itself included.

    Args:
        timed: At least one.
        limit: Name of the error that is compared.
    """
    best = min(timed, key=lambda x: (x.time.latency_us, x.candidate.name))
    plain_us = min((x.time.latency_us for x in timed if x.candidate.unquantized), default=math.inf)
    tied = [
        x
        for x in timed
        if _is_tie(x, best) and (x.candidate.unquantized or x.time.latency_us <= plain_us)
    ]

    def order(x: Timed) -> tuple[bool, float, bool, str]:
        error = x.candidate.errors.get(limit, math.inf)
        error = -error if limit == "sqnr_db" else error
        return (
            not x.candidate.unquantized,
            error,
            TOGETHER not in x.candidate.name,
            x.candidate.name,
        )

    return min(tied, key=order), tied


def _is_tie(x: Timed, best: Timed) -> bool:
    if x.candidate.is_predicted or best.candidate.is_predicted:
        return x is best
    times = x.time.latency_us, x.time.margin_us, best.time.latency_us, best.time.margin_us
    return within_noise(*times)


def within_noise(a_us: float, a_margin: float, b_us: float, b_margin: float) -> bool:
    """Whether two times are a tie."""
    least = min(a_us, b_us)
    noise = max(TIE_FLOOR * least, math.hypot(a_margin, b_margin))
    return abs(a_us - b_us) <= min(noise, TIE_CEILING * least)


def may_tie(us: float, least_us: float) -> bool:
    """Whether a time may tie with a shorter one, however noisy both are."""
    return us - least_us <= TIE_CEILING * least_us


def margin_us(p20: float, p80: float, count: int) -> float:
    """Half-width of the 95 % interval of a median, by a normal approximation from quantiles."""
    deviation = (p80 - p20) / 1.683  # p80 - p20 of a unit normal
    return 1.96 * 1.2533 * deviation / math.sqrt(max(count, 1))
