"""Stale jobs: measurements from before a kernel or the toolchain changed, to be repeated.

Of several rows of a kernel at a problem dispatch reads the freshest, whatever distribution it was
timed on; all kernels of a numerics class share an error. So a problem is stale if some kernel has
rows there and none is fresh. A fresh row replaces all older ones, also if its status is a failure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from lokakern.device import devices_here
from lokakern.errors import UnknownNameError
from lokakern.measure.accuracy import Cell
from lokakern.registry.schema.row_keys import key_of
from lokakern.selection.candidates import freshness_of
from lokakern.sweep.resume import Job, distribution_row
from lokakern.types import Device, Problem
from lokakern.workloads.distributions import distribution_named
from lokakern.workloads.suites import Case

if TYPE_CHECKING:
    from lokakern.registry.snapshot.cells import AccuracyCell, AccuracyHead, TimingHead
    from lokakern.registry.snapshot.snapshot import Snapshot

ErrorClass = tuple[str, str, str]  # granularity, b_granularity and accumulation of a `KernelRow`
# Words for rows in the order in which dispatch reads them: `freshness_of`, and "unverified" for
# rows of current kernels that were imported and not verified.
WORDS = ("fresh", "usable", "unverified", "stale")
OLDER = "older"  # of which dispatch reads another instead
Head = TypeVar("Head", "TimingHead", "AccuracyHead")


def without_superseded(
    found: Sequence[tuple[Head, str]], place: Callable[[Head], Hashable]
) -> list[tuple[Head, str]]:
    """Rows with their words, `OLDER` where the word of another at the same place comes first."""
    if len({word for _, word in found}) < 2:  # as usual in shipped files: 0.1 s of 95k rows
        return list(found)
    best: dict[Hashable, str] = {}
    places = [place(head) for head, _ in found]
    for here, (_, word) in zip(places, found, strict=True):
        known = best.setdefault(here, word)
        if known != word:  # of few
            best[here] = min(known, word, key=WORDS.index)
    return [
        (head, word if word == best[here] else OLDER)
        for here, (head, word) in zip(places, found, strict=True)
    ]


class Staleness:
    """Freshness, a word of `WORDS`, of all rows that dispatch could read for a device and a regime.

    Attributes:
        timings: Every timing with its word, or "older" if one of its kernel and problem is fresher.
        times: For each timed problem, the best word of each kernel, by name.
    """

    def __init__(self, facts: Snapshot, device: Device, regime: str) -> None:
        self._facts, self._device = facts, device
        self._local = device in devices_here()
        self._words: dict[tuple[int, str, str], str] = {}
        self._errors: dict[tuple[Problem, ErrorClass], list[tuple[AccuracyCell, str]]] = {}
        self._problem_key = functools.cache(key_of)  # needed for many classes of each problem
        found = [(head, self.word(head)) for head in facts.timing_heads(device, regime)]
        self.timings = without_superseded(found, lambda head: (head.problem, head.kernel.name))
        by_problem: dict[str, dict[str, str]] = {}
        for head, word in self.timings:
            if word != OLDER:
                by_problem.setdefault(head.problem, {})[head.kernel.name] = word
        self.times = {facts.problem(key): words for key, words in by_problem.items()}

    def word(self, cell: AccuracyCell | TimingHead | AccuracyHead) -> str:
        """The word for a row, cached by kernel, environment and tier.

        A snapshot keeps one object for each kernel, and to hash 95k of them would take 0.3 s.
        """
        key = (id(cell.kernel), cell.environment, cell.tier)
        found = self._words.get(key)
        if found is None:
            word = freshness_of(cell, self._local, self._facts)
            found = self._words[key] = "unverified" if cell.tier and word != "stale" else word
        return found

    def errors(self, asked: Problem, which: ErrorClass) -> list[tuple[AccuracyCell, str]]:
        """All errors of a numerics class at an accuracy problem, with their freshness."""
        key = (asked, which)
        if key not in self._errors:
            cells = self._facts.accuracy_cells_of_class(
                self._device.architecture, self._problem_key(asked), *which
            )
            self._errors[key] = [(cell, self.word(cell)) for cell in cells]
        return self._errors[key]

    def is_stale(self, job: Job) -> bool:
        """Whether some kernel of a job has times at its problem and none is fresh."""
        here: Mapping[str, str] = self.times.get(job.case.problem, {})
        return any(here.get(kernel.name, "fresh") != "fresh" for kernel in job.kernels)

    def stale_part(self, cell: Cell) -> Cell | None:
        """The cell if its error is stale, without kernels that freshly failed; else None."""
        kernel = cell.kernel
        which = (str(kernel.granularity), str(kernel.b_granularity), kernel.accumulation)
        asked = (cell.distribution, distribution_row(cell.distribution).parameters, cell.seed)
        rows = [
            (row, word)
            for row, word in self.errors(cell.problem, which)
            if (row.distribution, row.parameters, row.seed) == asked
        ]
        if not rows or any(word == "fresh" and row.status == "ok" for row, word in rows):
            return None
        tried = {row.kernel.name for row, word in rows if word == "fresh"}
        left = [k for k in cell.members if k.name not in tried]
        return cell.among(left) if left else None


def cases_timed(facts: Snapshot, device: Device, regime: str) -> list[Case]:
    """Every problem that was timed on a device, with the distribution of its newest times.

    Times on distributions that are not available here, such as recorded ones, are left out.
    """
    newest: dict[Problem, tuple[int, str]] = {}
    for cell in facts.timings_on(device, regime):
        if _is_available(cell.distribution):
            found = (cell.measured_utc_ms, cell.distribution)
            newest[cell.problem] = max(newest.get(cell.problem, found), found)
    cases = (Case(problem, distribution) for problem, (_, distribution) in newest.items())
    return sorted(cases, key=str)


@functools.cache
def _is_available(name: str) -> bool:
    try:
        distribution_named(name)
    except UnknownNameError:
        return False
    return True
