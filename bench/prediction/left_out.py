"""Times of kernels, in folds that a fit leaves out, and quantiles of what it did not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.staleness import is_current
from lokakern.types import Device, Granularity, Problem

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot

FOLDS = 8
COVERAGE = 0.85  # of the intervals: three values in forty are below the lower end


@dataclass(frozen=True, slots=True)
class Timings:
    """Median times of one kernel.

    Attributes:
        name: Of the kernel.
        digest: Of its source.
        granularity: Of its scales of a.
        problems: One for each time.
        times_us: ``[count]``.
    """

    name: str
    digest: str
    granularity: Granularity
    problems: list[Problem]
    times_us: NDArray[np.float64]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pair (n, k) of each problem."""
        return [(problem.n, problem.k) for problem in self.problems]


def median_times(
    facts: Snapshot, device: Device, regime: str, is_fitted: Callable[[Problem], bool]
) -> list[Timings]:
    """Times of the kernels of PyTorch and of this library at some problems, by name."""
    load_kernels()
    by_kernel: dict[str, dict[Problem, list[float]]] = {}
    digests: dict[str, str] = {}
    for cell in facts.timings_on(device, regime):
        name = cell.kernel.name
        kernel = KERNELS.get(name)
        if kernel is None or kernel.libraries or cell.status != "ok" or cell.tier:
            continue
        if "emulated" in name:  # never the choice on a GPU with FP8
            continue
        if is_fitted(cell.problem) and is_current(cell.kernel):
            digests[name] = cell.kernel.digest
            times = by_kernel.setdefault(name, {})
            times.setdefault(cell.problem, []).append(cell.latency_us_p50)
    found = []
    for name, times in sorted(by_kernel.items()):
        problems = sorted(times, key=lambda p: (p.n, p.k, p.m, str(p)))
        medians = np.array([np.median(times[problem]) for problem in problems])
        found.append(Timings(name, digests[name], KERNELS[name].granularity, problems, medians))
    return found


def least_and_largest(
    known: Sequence[Timings],
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Smallest and largest m, n and k of all problems."""
    sizes = np.array([(p.m, p.n, p.k) for one in known for p in one.problems])
    return triple(sizes.min(0)), triple(sizes.max(0))


def triple(values: NDArray[np.int64]) -> tuple[int, int, int]:
    m, n, k = map(int, values)
    return m, n, k


def fold_of(pairs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Folds of pairs (n, k), spread evenly; a pair is in the same fold for every kernel."""
    sizes = np.array(pairs, np.int64)
    return (sizes[:, 0] * 1_000_003 + sizes[:, 1] * 7919) % 104_729 % FOLDS


def upper_quantile(
    values: NDArray[np.float64], groups: Sequence[tuple[int, int]], level: float
) -> float:
    """The conformal quantile of values in groups, each of which counts once.

    With G groups, a new one makes G + 1; the quantile is the least value that `level` of this
    weight does not exceed, and the largest value where there are too few groups.
    """
    _, inverse, count = np.unique(np.array(groups), axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)  # NumPy 2.0 gave it another shape
    order = np.argsort(values, kind="stable")
    weight = np.cumsum((1 / count[inverse])[order])
    place = int(np.searchsorted(weight, level * (len(count) + 1) - 1e-9))
    return float(values[order][min(place, len(values) - 1)])
