"""Measurements of a sweep that the database has, and the kernels whose errors are needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lokakern.measure.accuracy import Cell, NumericsClass, numerics_class
from lokakern.measure.timing import DROP_FACTOR
from lokakern.problems import PADDED, baseline_name
from lokakern.registry.register import KERNELS, Kernel
from lokakern.registry.schema.records import DistributionRow
from lokakern.registry.schema.row_keys import family_key, key_of
from lokakern.selection.ties import TIE_CEILING
from lokakern.types import Device, Environment, Problem
from lokakern.workloads.distributions import distribution_named
from lokakern.workloads.suites import Case

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Job:
    """A problem to be timed, with its kernels."""

    case: Case
    kernels: tuple[Kernel, ...]


@functools.cache
def distribution_row(name: str) -> DistributionRow:
    """The database's row of a distribution."""
    recipe = distribution_named(name)
    return DistributionRow.of(recipe.name, dict(recipe.parameters), realistic=recipe.realistic)


def needed_errors(
    times: Mapping[Problem, Mapping[str, float]], device: Device
) -> set[NumericsClass]:
    """Numerics classes with a kernel that dispatch could choose at some problem.

    Args:
        times: Times of kernels at each problem, by name.
        device: The device type.
    """
    found = set()
    for problem, here in times.items():
        base = baseline_name(problem)
        if base is not None and base in here:  # every faster one: the fastest may err too much
            limit = (1 + TIE_CEILING) * min(here[name] for name in (base, PADDED) if name in here)
        else:
            limit = DROP_FACTOR * min(here.values())
        racing = [name for name, us in here.items() if us <= limit]
        if set(racing) - {base, PADDED}:  # else there is no choice of scales
            found |= {numerics_class(KERNELS[name], problem, device) for name in racing}
    return found


class Known:
    """Measurements in the database for the device and environment here."""

    def __init__(
        self,
        snapshot: Snapshot | None,
        device: Device,
        environment: Environment,
        regime: str,
        grade: str,
        retry: bool,
    ) -> None:
        self._snapshot = snapshot
        self._target, self._regime, self._grade = device, regime, grade
        self._device, self._environment = key_of(device), key_of(environment)
        self._retry = retry

    def given_up(self, strikes: int) -> dict[str, int]:
        """Digests of kernels that crashed or hung at least so often here, with counts."""
        if self._snapshot is None:
            return {}
        found = self._snapshot.casualties(self._target, self._environment)
        return {digest: count for digest, count in found.items() if count >= strikes}

    def has_timings(self, job: Job) -> bool:
        """Whether all candidates of a problem are timed; they are timed together or not at all."""
        facts = self._snapshot
        if facts is None:
            return False
        problem = key_of(job.case.problem)
        distribution = key_of(distribution_row(job.case.distribution))
        return all(
            facts.has_timing(
                kernel.digest, problem, distribution, self._device, self._environment,
                self._regime, self._grade, retry=self._retry,
            )
            for kernel in job.kernels
        )  # fmt: skip

    def times(self, job: Job) -> dict[str, float]:
        """Median times of the candidates of a problem, by name."""
        if self._snapshot is None:
            return {}
        problem = job.case.problem
        digests = {kernel.digest for kernel in job.kernels}
        cells = self._snapshot.timing_cells(self._target, family_key(problem), self._regime)
        return {
            cell.kernel.name: cell.latency_us_p50
            for cell in cells
            if cell.m == problem.m and cell.status == "ok" and cell.kernel.digest in digests
        }

    def remaining(self, cell: Cell) -> Cell | None:
        """A cell without kernels that failed before; None if its error is measured.

        All kernels of a numerics class have the same error, measured with any of them.
        """
        facts = self._snapshot
        if facts is None:
            return cell
        asked = (
            key_of(cell.problem), key_of(distribution_row(cell.distribution)),
            self._target.architecture, self._environment, cell.seed, self._grade,
        )  # fmt: skip
        if any(facts.has_accuracy(k.digest, *asked, ok_only=True) for k in cell.members):
            return None
        retry = self._retry
        left = [k for k in cell.members if not facts.has_accuracy(k.digest, *asked, retry=retry)]
        return cell.among(left) if left else None
