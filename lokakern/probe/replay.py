"""Replay: errors of every candidate on what a site was seen to hold, as a sweep measures them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lokakern.build.prebuild import prebuild
from lokakern.device import current_device, current_environment
from lokakern.measure.accuracy import SEEDS, Cell, cells_for, measure_cells
from lokakern.measure.time_problem import torch_device
from lokakern.probe.as_distribution import LearnedSite
from lokakern.probe.fingerprint import fingerprint_of, nearest
from lokakern.probe.problems import Replayed, norms_after, problem_of, problems_to_time
from lokakern.probe.site import SiteStatistics
from lokakern.progress import tell
from lokakern.registry.register import Kernel, kernels_for, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, DistributionRow
from lokakern.sweep.engine import sweep
from lokakern.sweep.plan import harness_digest
from lokakern.torchrun import cores_of_rank
from lokakern.types import Device, Problem
from lokakern.workloads.distributions import learned
from lokakern.workloads.gemm_cases import Case

ROWS_OF_P99 = 1024  # from which the limit of the 99th percentile is below the largest of rows


def replay(
    name: str,
    statistics: SiteStatistics,
    *,
    seeds: Sequence[int] = SEEDS,
    database: str | Path | None = None,
) -> tuple[Replayed, ...]:
    """Measure every candidate here on the rows that were sampled of a site, and its weight.

    Candidates are the kernels registered for the device here; with no GPU they emulate. The output
    is measured before and after the site's norm, and after a BlockNorm in its place.

    Args:
        name: Of the site.
        statistics: What was seen of it.
        seeds: Of the samples of a weight's gradient: the first gives its error, the others say how
            certain that is. Rows of other GEMMs err one by one, whatever the seed.
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
    return tuple(_summarized(site, cells, norms, records))


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
            drawn = seeds if gemm == "grad_weight" else seeds[:1]
            found = _cells(problem, device, site.distribution_name(gemm), drawn)
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
    from lokakern.registry.storage.run_files import RunFile

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
    site: LearnedSite,
    cells: Sequence[Cell],
    norms: Sequence[str],
    records: dict[int, AccuracyRecord],
) -> Iterable[Replayed]:
    groups: dict[tuple[str, str, str], list[AccuracyRecord]] = {}
    kernels: dict[str, Kernel] = {}
    for place, record in sorted(records.items()):  # by seed
        gemm, kernel = cells[place].distribution.rpartition("/")[2], cells[place].kernel
        kernels[kernel.name] = kernel
        groups.setdefault((gemm, norms[place], kernel.name), []).append(record)
    for (gemm, norm, name), found in groups.items():
        kernel = kernels[name]
        bad = next((r for r in found if r.status != "ok" or r.errors is None), None)
        infinite = float("inf")
        errors = (infinite,) * 6
        if bad is None:
            errors = _errors_of(site, gemm, found)
        yield Replayed(
            gemm, norm, name, kernel.granularity, kernel.b_granularity, *errors,
            rows=site.rows_of(gemm), reason=f"{bad.status}: {bad.reason}" if bad else "",
            accumulation=kernel.accumulation,
        )  # fmt: skip


def _errors_of(
    site: LearnedSite, gemm: str, found: Sequence[AccuracyRecord]
) -> tuple[float, float, float, float, float, float]:
    """Errors of the first draw with limits that know how few rows it was made of."""
    rows, unlike, lost = site.rows_of(gemm), site.unlike(gemm), site.lost(gemm)
    uppers: list[tuple[float, float, float]] = []
    for record in found:
        e = record.errors
        assert e is not None
        # Rows that are repeated say nothing new: a standard error is by different rows. Those of a
        # weight's gradient are all there are.
        more = max(record.rows / max(rows, 1), 1.0) ** 0.5 if gemm != "grad_weight" else 1.0
        square = e.row_err**2 + (e.row_err_upper**2 - e.row_err**2) * more
        # Where fewer rows were seen than this quantile needs, the largest error is what is known.
        p99 = e.row_p99_upper if rows >= ROWS_OF_P99 or gemm == "grad_weight" else e.row_max
        shift = e.mean_shift + (e.mean_shift_upper - e.mean_shift) * more
        # What is unlike the sample may be wrong altogether, which counts as an error of 1.
        uppers.append((min(square + unlike, 1.0) ** 0.5, p99, shift))
    first = found[0].errors
    assert first is not None
    upper, p99, shift = (max(values) for values in zip(*uppers, strict=True))
    more = lost**0.5
    return (
        min(first.row_err * more, 1.0), min(upper * more, 1.0), first.row_p99 * more, p99 * more,
        first.mean_shift * more, shift * more,
    )  # fmt: skip
