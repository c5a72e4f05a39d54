"""Predicted times of the kernels at a problem, on a grid of m, and the choice by their intervals.

A kernel that quantizes is chosen only where the lower end of its speedup over the fastest
unquantized kernel is above 1; else that kernel is chosen. For an op without an unquantized kernel
it is the one whose time is least at the upper end of its interval.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lokakern.problems import PADDED, baseline_name
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import KernelRow
from lokakern.selection.candidates import FRESHNESS, Bounds, Candidate, Evidence, Time
from lokakern.selection.padded_rows import bytes_copied, padded_problem
from lokakern.selection.prediction.errors import predicted_errors
from lokakern.selection.prediction.features import described, is_covered
from lokakern.selection.prediction.laws import Law, Spread
from lokakern.selection.prediction.model_file import KINDS, KernelModel, Model, kind_of
from lokakern.types import Granularity, Layout, Problem

SAMPLED_M = tuple(4**i for i in range(4, 10))  # 256 to 262144, where conversions choose
CELLS_PER_OCTAVE = 4  # of m; powers of two are in the middle of a cell


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times at one m, none of which is a fact.

    Attributes:
        latency_us: Predicted time of the chosen kernel, in microseconds.
        plain: The unquantized kernel with the least predicted time; for an op without one the
            kernel that was chosen.
        plain_us: That time.
        quantizing: The quantizing kernel with the least predicted time within the budget; "" if
            there is none.
        speedup: Predicted speedup of `quantizing` over `plain`; 1 if there is none.
        low: Lower end of the interval of the speedup.
        high: Upper end.
        coverage: Share of left-out measurements that such an interval contained.
        transferred_from: The GPU type whose measurements it rests on, if that is another; then it
            is shown only, and nothing is chosen by it.
        interval_us: Interval of `latency_us`, where it is that of a law (`prediction.laws`).
    """

    latency_us: float
    plain: str
    plain_us: float
    quantizing: str
    speedup: float
    low: float
    high: float
    coverage: float
    transferred_from: str = ""
    interval_us: tuple[float, float] | None = None

    def __str__(self) -> str:
        time = f"{self.latency_us:.2f} us"
        if self.interval_us is not None:
            time += " ({:.2f} to {:.2f})".format(*self.interval_us)
        if not self.quantizing:
            return time
        return (
            f"{time}; {self.quantizing} {self.speedup:.2f}x as fast as "
            f"{self.plain}, {self.low:.2f} to {self.high:.2f} in {self.coverage:.0%} of "
            "measurements that were left out"
        )


class Forecast:
    """Predicted times for one problem at every m that the model covers.

    Attributes:
        candidates: The kernels, without measured times.
        changes: The m at which predictions change, ascending; beyond both ends there are none.
    """

    def __init__(
        self, problem: Problem, model: Model, candidates: Sequence[Candidate], m_unit: int, *,
        is_compiled: bool,
    ) -> None:  # fmt: skip
        self._problem, self._model, self._is_compiled = problem, model, is_compiled
        self._laws = {law.name: law for law in model.laws_at(problem)}
        self.candidates = tuple(candidates)
        low, high = model.content.least[0], model.content.largest[0]
        if self._laws:
            low = min(law.least_m for law in self._laws.values())
            high = max(law.largest[0] for law in self._laws.values())
        octaves = CELLS_PER_OCTAVE
        first, last = (round(octaves * math.log2(m)) for m in (low, high))
        centers = [round(2 ** (i / octaves)) for i in range(first, last + 1)]
        edges = [round(2 ** ((i - 0.5) / octaves)) for i in range(first + 1, last + 1)]
        self.changes = [low, *edges, high + 1]
        self._m = np.array([_near(m, m_unit) for m in centers], np.int64)

    def leave_out_errors(self, why: str) -> None:
        """Count the errors of all candidates as unknown."""
        self.candidates = tuple(
            replace(c, errors={}, error_unknown=why, errors_at="", errors_predicted=False)
            for c in self.candidates
        )

    @cached_property
    def times_us(self) -> dict[str, NDArray[np.float64]]:
        """Predicted times by kernel, one for each cell of m."""
        return self._times_us(self._m)

    def _times_us(self, m: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Predicted times by kernel, one for each m."""
        found = {}
        for candidate in self.candidates:
            if candidate.name != PADDED or self._predicts_padding:
                granularity = candidate.granularity
                found[candidate.name] = self._times(candidate.name, self._problem, granularity, m)
        wide = padded_problem(self._problem)
        base = baseline_name(self._problem)
        if wide is not None and base in self._model.kernels and not self._predicts_padding:
            # Where m is padded, m of the grid are unaligned, too: at 1500 x 1500 x 16384, a and b
            # transposed, 368.56 us on an H200 in place of 103.21.
            rows = m if wide.m == self._problem.m else np.array([_near(x, 16) for x in m.tolist()])
            times = self._times(base, wide, Granularity.NONE, rows)
            if not self._is_compiled:
                rate = self._model.content.rates.bytes_per_us
                times = times + np.array([self._bytes_copied(x) / rate for x in m.tolist()])
            found[PADDED] = times
        return found

    @property
    def _predicts_padding(self) -> bool:
        """Whether the model has times of padded products with their copies, and these count."""
        return PADDED in self._model.kernels and not self._is_compiled

    def _bytes_copied(self, m: int) -> int:
        return bytes_copied(replace(self._problem, m=m))

    def _times(
        self, name: str, problem: Problem, granularity: Granularity, m: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        rates = self._model.content.rates
        if name in self._laws:
            return self._laws[name].times_us(problem, m, rates.compute_units)
        base, rows = described(problem, m, granularity, rates, pads=name == PADDED)
        found: NDArray[np.float64] = base * np.exp(self._model.forest(name)(rows))
        return found

    def _counted_us(self, candidate: Candidate, us: float) -> float:
        """The longer of a time of the GPU and that of the host, where host costs count."""
        return us if candidate.host is None else max(us, candidate.host.counted_us)

    @cached_property
    def _kinds(self) -> NDArray[np.intp]:
        along_m = self._problem.a.layout is Layout.COLUMN
        return kind_of(self._m, self._problem.n, self._problem.k, along_m=along_m)

    def _speedup(self, cell: int) -> Spread:
        """The spread of speedups over the fastest unquantized kernel."""
        content = self._model.content
        laws = content.laws.get(self._problem.op)
        of_laws = laws.speedup if laws is not None else None
        return of_laws or content.spreads[KINDS[int(self._kinds[cell])]]

    def _spread(self, name: str, m: int) -> Spread | None:
        """Of the time of a kernel by a law; None where it has no time, or is not of a law."""
        law = self._laws.get(name)
        return law.spread_at(m, self._problem.n, self._problem.k) if law is not None else None

    def _interval_us(self, name: str, m: int, us: float) -> tuple[float, float] | None:
        spread = self._spread(name, m)
        return spread.around(us) if spread is not None else None

    def covers(self, m: int) -> bool:
        """Whether there are predictions at m."""
        return self.changes[0] <= m < self.changes[-1]

    def _cell(self, m: int) -> int:
        return bisect_right(self.changes, m) - 1

    def time_us(self, name: str, m: int) -> float:
        """The predicted time of a kernel at the middle of the cell of m, in microseconds."""
        return float(self.times_us[name][self._cell(m)])

    def low_ends(self, at: Sequence[int] = ()) -> list[Candidate]:
        """The kernels with times at some m, to choose between them like measured ones.

        Times of quantizing kernels are so long that a speedup over an unquantized kernel is the
        lower end of its interval. None by the model of another GPU type, which is shown only.

        Args:
            at: More m than the usual ones.
        """
        if self._model.transferred_from:
            return []
        spreads = self._model.content.spreads
        places = {m: self._cell(m) for m in (*SAMPLED_M, self._problem.m, *at) if self.covers(m)}
        cells = sorted({*places.values()})
        slower = [math.exp(-spreads[KINDS[kind]].low) for kind in self._kinds[cells].tolist()]
        times_us = self._times_us(self._m[cells])
        found = []
        for candidate in self.candidates:
            if candidate.name not in times_us:
                continue
            is_plain = candidate.unquantized
            its_us = times_us[candidate.name] * (1.0 if is_plain else np.array(slower))
            timed = [Time(us, 0.0, FRESHNESS[0], 0) for us in its_us.tolist()]
            by_cell = dict(zip(cells, timed, strict=True))
            times = {m: by_cell[cell] for m, cell in places.items()}
            how = "predicted" if is_plain else "predicted, at the lower end of its speedup"
            found.append(replace(candidate, times=times, estimated=how))
        return found

    def choose(
        self, m: int, is_legal: Callable[[str], bool]
    ) -> tuple[Candidate, Prediction] | None:
        """The choice among legal kernels at m; None if no unquantized one is legal, but exists.

        Kernels that cannot be chosen are not asked for.
        """
        cell = self._cell(m)
        named = list(self.candidates)
        if self._laws:
            named = [c for c in named if self._spread(c.name, m) is not None]
        if baseline_name(self._problem) is None:
            return self._least(m, named, is_legal)
        found = sorted(
            ((self._counted_us(c, self.time_us(c.name, m)), c.name, c) for c in named),
            key=lambda x: x[:2],
        )
        plain = next((x for x in found if x[2].unquantized and is_legal(x[1])), None)
        if plain is None:
            return None
        best = next((x for x in found if not x[2].unquantized and is_legal(x[1])), None)
        content = self._model.content
        if best is None:
            return plain[2], self._of_one(plain[1], m, plain[0])
        spread = self._speedup(cell)
        speedup = plain[0] / best[0]
        best_us = self.time_us(best[1], m)
        low, high = (
            plain[0] / self._counted_us(best[2], best_us * math.exp(-end))
            for end in (spread.low, spread.high)
        )
        chosen = best if low > 1 else plain
        return chosen[2], Prediction(
            chosen[0], plain[1], plain[0], best[1], speedup, low, high, content.coverage,
            self._model.transferred_from, self._interval_us(chosen[1], m, chosen[0]),
        )  # fmt: skip

    def _of_one(self, name: str, m: int, us: float) -> Prediction:
        content = self._model.content
        return Prediction(
            us, name, us, "", 1.0, 1.0, 1.0, content.coverage, self._model.transferred_from,
            self._interval_us(name, m, us),
        )  # fmt: skip

    def _least(
        self, m: int, candidates: Sequence[Candidate], is_legal: Callable[[str], bool]
    ) -> tuple[Candidate, Prediction] | None:
        """The choice without an unquantized kernel."""

        def upper(candidate: Candidate) -> tuple[float, str]:
            us = self.time_us(candidate.name, m)
            _, high = self._interval_us(candidate.name, m, us) or (us, us)
            return self._counted_us(candidate, high), candidate.name

        chosen = next((c for c in sorted(candidates, key=upper) if is_legal(c.name)), None)
        if chosen is None:
            return None
        us = self._counted_us(chosen, self.time_us(chosen.name, m))
        return chosen, self._of_one(chosen.name, m, us)


def _near(m: int, unit: int) -> int:
    """An m near m with the alignment of a table: an odd multiple of a unit below 16."""
    return max(m // 16, 1) * 16 if unit == 16 else m // (2 * unit) * 2 * unit + unit


def forecast(
    problem: Problem,
    model: Model,
    evidence: Evidence,
    m_unit: int,
    needs: frozenset[str],
    barred: Collection[str],
    *,
    is_compiled: bool,
    with_costs: Callable[[list[Candidate]], list[Candidate]] = list,
) -> Forecast | None:
    """Predictions for a problem; None if the model does not cover it.

    Args:
        problem: At any m.
        model: Of the device.
        evidence: The rows whose errors count.
        m_unit: Alignment of m.
        needs: Abilities that a kernel must have.
        barred: Kernels that have measured failures here, or cannot run.
        is_compiled: Whether a compiler pads activations at no cost.
        with_costs: Gives candidates their host costs.
    """
    fitted: dict[str, KernelModel | Law] = {law.name: law for law in model.laws_at(problem)}
    names = list(fitted)
    if is_covered(problem) and model.covers(model.content.least[0], problem.n, problem.k):
        fitted = {**model.kernels}
        names = [name for name in fitted if name != PADDED]
        names += [PADDED] if padded_problem(problem) is not None else []
    base = baseline_name(problem)
    candidates = []
    for name in names:
        kernel = KERNELS.get(name)
        if kernel is None or name in barred or kernel.lacks(needs) is not None:
            continue
        known = fitted.get(name)
        if known is not None and kernel.digest != known.digest:
            continue  # changed since
        row = KernelRow.of(kernel)
        is_plain = kernel.granularity is Granularity.NONE and base is not None
        found = "" if is_plain else predicted_errors(row, problem, evidence)
        bounds = Bounds({}, "") if isinstance(found, str) else found
        candidates.append(
            Candidate(
                name, kernel, kernel.granularity, {}, {}, bounds.errors, bounds.worst_distribution,
                found if isinstance(found, str) else "", is_plain, errors_at=bounds.elsewhere,
                errors_predicted=bounds.is_predicted,
            )
        )  # fmt: skip
    if not candidates or not any(base in (None, candidate.name) for candidate in candidates):
        return None
    return Forecast(problem, model, with_costs(candidates), m_unit, is_compiled=is_compiled)
