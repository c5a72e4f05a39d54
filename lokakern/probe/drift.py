"""Whether the operands of a site leave what they were, told by a few numbers of each window.

A window is what Probe sampled in one step. The numbers are those that decide how operands round,
as in a fingerprint, but of all rows where Probe counts all, and by quantiles and medians, so that a
window of 256 rows tells about as much as many: of 60 windows of 256, 512 and 2048 rows by 64
columns of each of the 13 realistic distributions, 2,340 in all, one left the range of the first
three twice in a row (X12, whose rows have two sizes). Zeros are left out, which nothing rounds and
training changes. Nothing is multiplied: a window of a site takes some milliseconds of a core.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lokakern.probe.fingerprint import OCTAVES_OF_SLACK, mean_octaves
from lokakern.probe.statistics import FINITE, PARTS, SHIFT, OperandStatistics, SiteStatistics

LEARNED = 3  # windows whose range counts as usual
CONFIRMED = 2  # windows in a row that leave it
LEAST_SHARE = 0.01  # of rows that are smaller, or larger, than the ends of their spread
FEWEST_BELOW = 10  # rows: with three of 256, windows of one distribution differed by 2 octaves
BINS_AN_OCTAVE = 1 << (23 - SHIFT)
NONFINITE = "nonfinite_rows"
MEAN = "mean"  # of which half an octave is 1.4 times the size
SLACK_OF_MEAN = 0.5

Profile = Mapping[str, float]
# Of fingerprints of the GEMM that reads an operand alone, what windows tell, too.
_KNOWN = {"input": "output", "grad_output": "grad_input"}
_SHARED = ("row_spread", "crest", MEAN)


def profile_of(site: SiteStatistics) -> dict[str, float]:
    """Octaves of the operands of one window and of the weight, by ``part.name``.

    And the share of rows that are not finite.
    """
    found: dict[str, float] = {}
    for part in PARTS:
        operand: OperandStatistics = getattr(site, part)
        if operand.rows_seen:
            found |= {f"{part}.{name}": value for name, value in _of_operand(operand).items()}
    if site.snapshot is not None:
        for name, dim in (("row_crest", 1), ("column_crest", 0)):
            sizes = torch.linalg.vector_norm(site.snapshot, math.inf, dim=dim)
            found[f"weight.{name}"] = _crest(sizes.float().cpu())
    return found


def _of_operand(operand: OperandStatistics) -> dict[str, float]:
    sizes = operand.row_sizes.cpu()
    total, counted = float(sizes.sum()), sizes[1:FINITE].cumsum(0)
    count = float(counted[-1])
    share = min(max(LEAST_SHARE, FEWEST_BELOW / max(count, 1.0)), 0.25)
    low, high = (int(torch.searchsorted(counted, s * count)) for s in (share, 1.0 - share))
    rows = operand.kept()[0].double()
    elements = rows.abs().flatten()
    nonzero = elements[elements > 0]
    return {
        "row_spread": (high - low) / BINS_AN_OCTAVE if count else 0.0,
        "column_crest": _crest(operand.column_sizes.cpu()),
        "crest": math.log2(_at(nonzero, 0.999) / _at(nonzero, 0.5)) if len(nonzero) else 0.0,
        MEAN: mean_octaves(rows),
        NONFINITE: float(sizes[FINITE:].sum()) / total,
    }


def _at(values: Tensor, share: float) -> float:
    return float(values.kthvalue(1 + round(share * (len(values) - 1))).values)


def _crest(sizes: Tensor) -> float:
    """Octaves of the largest over the median of nonzero sizes."""
    nonzero = sizes[sizes > 0]
    return math.log2(float(nonzero.max()) / _at(nonzero, 0.5)) if len(nonzero) else 0.0


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
    """

    def __init__(self, known: Profile | None = None) -> None:
        self._ranges = {name: (value, value) for name, value in (known or {}).items()}
        self._windows = 0
        self._beyond: Counter[str] = Counter()  # windows in a row, by number and direction

    def see(self, profile: Profile, *, falls: bool = False) -> str:
        """Take in a window; what moved, if it did so in as many windows as confirm it, or "".

        What falls makes rounding better, and counts with ``falls`` alone, such as of a site that
        was unsafe: gradients of a model that learns have ever less spread.
        """
        self._windows += 1
        is_learning = self._windows <= LEARNED
        beyond: Counter[str] = Counter()
        words = []
        for name, value in profile.items():
            low, high = self._ranges.get(name, (value, value))
            slack = _slack(name)
            if low - slack <= value <= high + slack:
                if is_learning:
                    self._ranges[name] = min(low, value), max(high, value)
                continue
            if value < low and not falls:
                continue
            way = f"{name} {'rose' if value > high else 'fell'}"
            beyond[way] = self._beyond[way] + 1
            if beyond[way] >= CONFIRMED or name.endswith(NONFINITE):
                usual = f"{low:.3g}" if high - low <= slack / 8 else f"{low:.3g} to {high:.3g}"
                words.append(f"{way} from {usual} to {value:.3g}")
        self._beyond = beyond
        return ", ".join(words)


def _slack(name: str) -> float:
    last = name.rpartition(".")[2]
    if last == NONFINITE:
        return 0.0
    return SLACK_OF_MEAN if last == MEAN else OCTAVES_OF_SLACK
