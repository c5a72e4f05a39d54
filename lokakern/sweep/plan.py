"""The plan of a sweep: jobs and cells, and the remaining ones as plain values for other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lokakern.measure.accuracy import Cell, cells_for
from lokakern.registry.register import KERNELS, Kernel, kernels_for
from lokakern.sweep.resume import Job, Known
from lokakern.sweep.stale_jobs import Staleness
from lokakern.sweep.worker import AccuracyTask
from lokakern.types import Device, Problem, Rejected
from lokakern.workloads.suites import Case


def candidates(problem: Problem, device: Device, only: Sequence[str] = ()) -> list[Kernel]:
    """Registered kernels that accept a problem; ``only`` are words, one of which a name has."""
    return [
        kernel
        for kernel in kernels_for(problem.op, device)
        if not isinstance(kernel.supports(problem, device), Rejected)
        and (not only or any(word in kernel.name for word in only))
    ]


def digest_of(words: Iterable[str]) -> str:
    """SHA-256 of words in order."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def kernels_digest() -> str:
    """Digest of all registered kernels."""
    return digest_of(f"{name} {kernel.digest}" for name, kernel in sorted(KERNELS.items()))


def harness_digest() -> str:
    """Digest of the measuring code, which distinguishes rows of different versions."""
    lokakern = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in ("measure", "sweep", "workloads"):
        for path in sorted((lokakern / folder).rglob("*.py")):
            digest.update(str(path.relative_to(lokakern)).encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Found:
    """Remaining work: indices of jobs, and of cells, with names of their kernels.

    ``given_up`` are digests of kernels that are no longer launched, ``why`` the reasons, and
    ``plan`` is the digest of all jobs and cells.
    """

    todo: list[int]
    cells: list[tuple[int, list[str]]]
    given_up: list[str]
    why: list[str]
    plan: str


class Plan:
    """The jobs and cells of a sweep.

    Ranks with the same arguments have the same plan, except for the contents of the database: one
    rank reads it with `look`, and all ranks apply the answer with `use`.

    Attributes:
        jobs: Problems with their kernels, without kernels that are given up.
        cells: Errors of these kernels.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        only: Sequence[str],
        device: Device,
        distributions: Sequence[str],
    ) -> None:
        self._device, self._distributions = device, distributions
        self._every = [(case, candidates(case.problem, device, only)) for case in cases]
        self.jobs: list[Job] = []
        self.cells: list[Cell] = []

    def look(
        self, known: Known, given_up: Mapping[str, int], staleness: Staleness | None = None
    ) -> Found:
        """The work that a database leaves.

        Args:
            known: The database.
            given_up: Digests of kernels that crashed or hung, with counts.
            staleness: If given, only stale measurements remain. A problem with one stale kernel
                remains with all kernels, because only times of the same session are comparable.
        """
        why = []
        for kernel in {kernel: None for _, kernels in self._every for kernel in kernels}:
            if _is_from_script(kernel):
                why.append(f"{kernel.name}: a worker cannot import the script that registers it; "
                           "move it to a module")  # fmt: skip
            elif kernel.digest in given_up:
                times = given_up[kernel.digest]
                why.append(f"{kernel.name}: crashed or hung {times} times before")
        self.use(given_up)
        todo = [n for n, job in enumerate(self.jobs) if not known.has_timings(job)]
        remaining = [known.remaining(cell) for cell in self.cells]
        if staleness is not None:
            todo = [n for n in todo if staleness.is_stale(self.jobs[n])]
            remaining = [None if left is None else staleness.stale_part(left) for left in remaining]
        return Found(
            todo=todo,
            cells=[
                (n, [kernel.name for kernel in left.members])
                for n, left in enumerate(remaining)
                if left is not None
            ],
            given_up=list(given_up),
            why=why,
            plan=self.digest(),
        )

    def digest(self) -> str:
        """Digest of all jobs and cells; indices of equal plans mean the same."""
        jobs = (f"{job.case} {[kernel.name for kernel in job.kernels]}" for job in self.jobs)
        cells = (
            f"{cell.kernel.name} {cell.problem} {cell.distribution} {cell.seed}"
            for cell in self.cells
        )
        return digest_of([*jobs, *cells])

    def use(self, given_up: Iterable[str]) -> None:
        """Make the jobs and cells without kernels of these digests."""
        without = set(given_up)
        self.jobs = []
        for case, kernels in self._every:
            usable = [k for k in kernels if not _is_from_script(k) and k.digest not in without]
            if usable:
                self.jobs.append(Job(case, tuple(usable)))
        pairs = [(kernel, job.case.problem) for job in self.jobs for kernel in job.kernels]
        asked = self._distributions
        self.cells = cells_for(pairs, self._device, asked) if asked else []

    def tasks(self, left: Iterable[tuple[int, Sequence[str]]]) -> list[AccuracyTask]:
        """The tasks of entries of `Found.cells`."""
        wanted = ((self.cells[place], names) for place, names in left)
        return [
            AccuracyTask(names[0], cell.problem, cell.distribution, cell.seed, tuple(names[1:]))
            for cell, names in wanted
        ]


def _is_from_script(kernel: Kernel) -> bool:
    return "python:__main__" in kernel.modules
