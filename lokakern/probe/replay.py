"""Replay: errors of every candidate on what a site was seen to hold, as a sweep measures them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lokakern.bench.accuracy import SEEDS, Cell, cells_for, measure_cells
from lokakern.bench.crew import cores_of_rank
from lokakern.bench.distributions import learned
from lokakern.bench.forms import Case
from lokakern.bench.measure import torch_device
from lokakern.bench.plan import harness_digest
from lokakern.bench.sweep import sweep
from lokakern.device import current_device, current_environment
from lokakern.prebuild import prebuild
from lokakern.probe.fingerprint import fingerprint_of, nearest
from lokakern.probe.gemms import Replayed, norms_after, problem_of, problems_to_time
from lokakern.probe.learned import LearnedSite
from lokakern.probe.site import SiteStatistics
from lokakern.registry.progress import tell
from lokakern.registry.records import AccuracyRecord, DistributionRow
from lokakern.registry.register import kernels_for, load_kernels
from lokakern.types import Device, Problem


def replay(
    name: str,
    statistics: SiteStatistics,
    *,
    seeds: Sequence[int] = SEEDS,
    database: str | Path | None = None,
) -> tuple[Replayed, ...]:
    """Measure every candidate here on draws from what was learned of a site.

    Candidates are the kernels registered for the device here; with no GPU they emulate. The output
    is measured before and after the site's norm, and after a BlockNorm in its place.

    Args:
        name: Of the site.
        statistics: What was seen of it.
        seeds: Of the draws.
        database: Where the rows go, under distributions ``site:<name>/<gemm>`` whose parameters
            are the digest of the statistics; None: nowhere.
    """
    return replay_site(LearnedSite(name, statistics), seeds=seeds, database=database)


def replay_site(
    site: LearnedSite, *, seeds: Sequence[int] = SEEDS, database: str | Path | None = None
) -> tuple[Replayed, ...]:
    """`replay` of a site that can be drawn."""
    device = current_device()
    cells, norms = _cells_of(site, device, seeds)
    records: dict[int, AccuracyRecord] = {}

    def keep(place: int, record: AccuracyRecord) -> None:
        records[place] = record
        tell(f"replaying {site.name}", len(records) / len(cells))

    with learned(*map(site.distribution, site.gemms())):
        measure_cells(cells, torch_device(), device, lambda *_: True, keep)
    if database is not None:
        _write(database, site.digest, cells, records, device)
    return tuple(_summarized(cells, norms, records))


def compile_ahead(sites: Iterable[LearnedSite]) -> None:
    """Compile what replays of sites launch on the GPU here, on all cores of this rank.

    One after the other, as they are launched, 133 kernels of Wukong M took 46 s of a report's 119.
    """
    device = current_device()
    if device.is_gpu:
        problems = (cell.problem for site in sites for cell in _cells_of(site, device, (0,))[0])
        prebuild(problems, device, workers=cores_of_rank(), again=False)


def time_sites(sites: Mapping[str, SiteStatistics], database: str | Path) -> None:
    """Time every candidate of every GEMM of some sites here, into a database, as a sweep does.

    Each under the benchmarked distribution that it is most like: a time hardly depends on which.
    What the database holds already is not timed again.
    """
    load_kernels()
    cases: dict[Problem, Case] = {}
    for name, statistics in sites.items():
        for gemm in LearnedSite(name, statistics).gemms():
            like = nearest(fingerprint_of(statistics, gemm))
            for problem in problems_to_time(statistics, gemm):
                cases.setdefault(problem, Case(problem, like))
    sweep(list(cases.values()), database=database, suite="probe", command="probe", errors="none")


def _cells_of(
    site: LearnedSite, device: Device, seeds: Sequence[int]
) -> tuple[list[Cell], list[str]]:
    """What is to be measured of a site, and the norm after each."""
    load_kernels()
    statistics = site.statistics
    m = max(statistics.m_quantile(0.5), 1)
    cells: list[Cell] = []
    norms: list[str] = []
    for gemm in site.gemms():
        for norm in norms_after(statistics, gemm):
            problem = problem_of(statistics, gemm, m, norm)
            found = _cells(problem, device, site.distribution_name(gemm), seeds)
            cells += found
            norms += [norm] * len(found)
    return cells, norms


def _cells(problem: Problem, device: Device, distribution: str, seeds: Sequence[int]) -> list[Cell]:
    # One kernel at a time: none stands in for another that may be wrong here.
    return [
        cell
        for kernel in kernels_for(problem.op, device)
        for cell in cells_for([(kernel, problem)], device, [distribution], seeds)
    ]


def _write(
    database: str | Path,
    digest: str,
    cells: Sequence[Cell],
    records: dict[int, AccuracyRecord],
    device: Device,
) -> None:
    from lokakern.registry.store import RunFile

    with RunFile.create(
        database, suite="probe", command="probe", harness_digest=harness_digest()
    ) as run:
        for place, record in records.items():
            cell = cells[place]
            row = DistributionRow.of(cell.distribution, {"statistics": digest}, realistic=False)
            run.add_accuracy(
                cell.kernel, cell.problem, row, device.architecture, current_environment(), record
            )


def _summarized(
    cells: Sequence[Cell], norms: Sequence[str], records: dict[int, AccuracyRecord]
) -> Iterable[Replayed]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for place in records:
        gemm = cells[place].distribution.rpartition("/")[2]
        groups.setdefault((gemm, norms[place], cells[place].kernel.name), []).append(place)
    for (gemm, norm, name), places in groups.items():
        found = [records[place] for place in places]
        kernel = cells[places[0]].kernel
        make = functools.partial(
            Replayed, gemm, norm, name, kernel.granularity, kernel.b_granularity
        )
        bad = next((r for r in found if r.status != "ok" or r.errors is None), None)
        rows = min(record.rows for record in found)
        if bad is not None:
            infinite = float("inf")
            yield make(
                infinite, infinite, infinite, infinite, infinite, rows,
                f"{bad.status}: {bad.reason}", kernel.accumulation,
            )  # fmt: skip
            continue
        errors = [record.errors for record in found if record.errors is not None]
        yield make(
            max(e.row_err for e in errors),
            max(e.row_err_upper for e in errors),
            max(e.row_p99 for e in errors),
            max(abs(e.mean_shift) for e in errors),
            max(e.mean_shift_upper for e in errors),
            rows,
            accumulation=kernel.accumulation,
        )
