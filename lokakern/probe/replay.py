"""Replay: errors of every candidate on the operands of a site, as a sweep measures them.

Rows are those that were sampled, and the weight is the newest: errors depend on how they lie to
each other, which no statistics of either hold. Of inputs of mean c and weight rows that sum to zero
the sums lose c, and what rounding makes of c stays.

A scale may span more rows than were sampled. Where whole operands had larger magnitudes than the
sample, one row of it is scaled up to the largest; of a weight's gradient, whose scales span all
samples of a column, one sample has the largest of each column, and the other operand zeros there.

In float16 outputs may overflow. That of a row which was scaled up tells nothing of the model, so
rows are scaled up less. Gradients have the scale of a loss, which `torch.amp.GradScaler` changes,
and are replayed at one that fits: FP8 errs as much at any power of two.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from lokakern.build.prebuild import prebuild
from lokakern.device import current_device, current_environment
from lokakern.measure.accuracy import SEEDS, Cell, cells_for, measure_cells
from lokakern.measure.time_problem import torch_device
from lokakern.probe.fingerprint import fingerprint_of, nearest
from lokakern.probe.problems import Replayed, norms_after, problem_of, problems_to_time, way_of
from lokakern.probe.statistics import (
    GEMMS,
    PARTS,
    OperandStatistics,
    SiteStatistics,
    cancellation_of,
    places_of,
    terms_of,
)
from lokakern.progress import tell
from lokakern.registry.register import Kernel, kernel_named, kernels_for, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, DistributionRow
from lokakern.sweep.engine import sweep
from lokakern.sweep.plan import harness_digest
from lokakern.torchrun import cores_of_rank
from lokakern.types import GROUP, Device, Format, Problem
from lokakern.what_if.errors import EMULATED, kernel_of
from lokakern.what_if.formats import WhatIf
from lokakern.workloads.distributions import LearnedDistribution, learned
from lokakern.workloads.gemm_cases import Case

ROWS_OF_P99 = 1024  # from which the limit of the 99th percentile is below the largest of rows
MOST_COLUMNS = 2048  # of gradients, of which cancellation is measured
FEWEST_PAIRS = 8  # of samples; with fewer none gives its place to the largest magnitudes
_Draw = Callable[[int, int, int], Tensor]  # of rows, columns and a seed
FITTING = 2.0**15  # what outputs in float16 stay below at scales of our own; 65504 is the largest


@dataclass(frozen=True, eq=False)
class LearnedSite:
    """A site as distributions that operands are drawn from, one for each of its GEMMs."""

    name: str
    statistics: SiteStatistics

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of all statistics."""
        digest = hashlib.sha256()
        for name, x in self.statistics.tensors():
            digest.update(f"{name}{list(x.shape)}{x.dtype}".encode())
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @cached_property
    def _samples(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows of inputs and gradients and their keys, on the CPU."""
        return {part: getattr(self.statistics, part).kept() for part in PARTS}

    @cached_property
    def _weights(self) -> list[Tensor | None]:
        """The newest weight and its transpose, or some rows of each, on the CPU."""
        both = (self.statistics.snapshot, self.statistics.weight_t())
        return [x if x is None else x.cpu() for x in both]

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Places in the samples of inputs and of gradients of rows that came together."""
        (_, left), (_, right) = self._samples["input"], self._samples["grad_output"]
        places = {key: place for place, key in enumerate(left.tolist())}
        both = [(places[key], i) for i, key in enumerate(right.tolist()) if key in places]
        inputs, gradients = torch.tensor(both, dtype=torch.int64).view(-1, 2).t()
        return inputs, gradients

    def gemms(self) -> list[str]:
        """Those that run and can be drawn: no gradients come by in inference."""
        if self._weights[0] is None or not len(self._samples["input"][0]):
            return []
        if not len(self._samples["grad_output"][0]):
            return list(GEMMS[:1])
        return [x for x in GEMMS if x != "grad_input" or self.statistics.needs_input_gradient]

    def rows_of(self, gemm: str) -> int:
        """Different rows that stand for the operands of a GEMM, or pairs of them."""
        part = "input" if gemm == "output" else "grad_output"
        return len(self._pairs[0] if gemm == "grad_weight" else self._samples[part][0])

    def unlike(self, gemm: str) -> float:
        """Share of the rows of a GEMM that are unlike any of the sample: an octave beyond in size.

        Nothing is known of their errors.
        """
        part = "input" if gemm == "output" else "grad_output"
        sizes = self._samples[part][0].abs().amax(dim=1)
        sizes = sizes[sizes > 0]
        if gemm == "grad_weight" or not len(sizes):
            return 0.0
        operand: OperandStatistics = getattr(self.statistics, part)
        return operand.share_beyond(float(sizes.min()) / 2, float(sizes.max()) * 2)

    def lost(self, gemm: str) -> float:
        """How much more of a weight's gradient cancels in batches than in the sample, 1 or more.

        Samples of a batch may have in common what those of many have not: gradients through a
        BatchNorm sum to zero. Squares of errors are by so much larger.
        """
        pairs, seen = self._pairs, self.statistics.cancellation
        if gemm != "grad_weight" or not len(pairs[0]) or not seen:
            return 1.0
        samples = (rows for rows, _ in self._samples.values())
        x, y = (rows[places].double() for rows, places in zip(samples, pairs, strict=True))
        y = y[:, places_of(min(y.shape[1], MOST_COLUMNS), y.shape[1])]
        sizes = torch.linalg.vector_norm(y.t() @ x, dim=1)
        return max(seen / max(float(cancellation_of(terms_of(y, x), sizes)), 1e-9), 1.0)

    def overflow(self, gemm: str) -> str:
        """What of the operands exceeds float16, if products are judged in it; else ""."""
        if self.statistics.half is not Format.FLOAT16 or gemm == "grad_input":
            return ""
        amax, most = self.statistics.input.amax, Format.FLOAT16.maximum
        return f"inputs up to {amax:.4g} overflow float16, up to {most:g}" if amax > most else ""

    def distribution_name(self, gemm: str) -> str:
        return f"site:{self.name}/{gemm}"

    def distribution(self, gemm: str) -> LearnedDistribution:
        """The operands of one GEMM."""
        draws: dict[str, tuple[_Draw, _Draw]] = {
            "output": (partial(self._rows, "input"), partial(self._weight, 0)),
            "grad_input": (partial(self._rows, "grad_output"), partial(self._weight, 1)),
            "grad_weight": (self._fitting_pairs, partial(self._paired, 0)),
        }
        rows, weight = draws[gemm]
        return LearnedDistribution(
            self.distribution_name(gemm), f"learned of {self.name}", (), False, self.digest, rows,
            weight,
        )  # fmt: skip

    def _rows(self, part: str, rows: int, columns: int, _seed: int) -> Tensor:
        """Each of the sample as often as the others, in steps of 128 rows, as kernels want them."""
        sample = self._samples[part][0].double()
        rows = min(rows, -(-len(sample) // GROUP) * GROUP)
        found = sample[torch.arange(rows) % len(sample)]
        sizes = found.abs().amax(dim=1)
        place, most = int(sizes.argmax()), getattr(self.statistics, part).amax
        if 0 < float(sizes[place]) < most:
            found[-1] = found[place] * self._larger(part, found[place], most / float(sizes[place]))
        if part == "grad_output":
            weight_t = self._weights[1]
            assert weight_t is not None
            found = self._fitted(found, weight_t.double(), 1)
        return _padded(found, columns)

    def _larger(self, part: str, row: Tensor, factor: float) -> float:
        """The factor by which a row is scaled up, in float16 less where an output would overflow.

        Of a gradient, which is scaled to fit then, all of it.
        """
        if self.statistics.half is not Format.FLOAT16 or part != "input":
            return factor
        weight = self._weights[0]
        assert weight is not None  # or its GEMM is not in `gemms`
        largest = float((weight.double() @ row).abs().max())
        return max(min(factor, FITTING / largest), 1.0) if largest else factor

    def _fitted(self, gradients: Tensor, other: Tensor, dim: int) -> Tensor:
        """Gradients times a power of two, so that in float16 their products with another fit.

        Sums run along the axis ``dim`` of both. The bound is that of Cauchy and Schwarz.
        """
        if self.statistics.half is not Format.FLOAT16:
            return gradients
        norms = (float(torch.linalg.vector_norm(x, dim=dim).max()) for x in (gradients, other))
        largest = max(math.prod(norms), float(gradients.abs().max()))
        return gradients * 2.0 ** math.floor(math.log2(FITTING / largest)) if largest else gradients

    def _weight(self, which: int, rows: int, columns: int, _seed: int) -> Tensor:
        weight = self._weights[which]
        assert weight is not None  # or its GEMM is not in `gemms`
        return _padded(weight[places_of(rows, len(weight))].double(), columns)

    def _paired(self, which: int, samples: int, columns: int, seed: int) -> Tensor:
        """Samples of an operand that came together with those of the other, each once.

        Seed 0 takes as many as there are, others three in four: how far errors differ says how
        certain they are. None is repeated, because a second copy under another scale would cancel
        the rounding of the first; the rest of 128 are zeros. Columns of a gradient are rows of
        the product, of which an error is measured over 2048.
        """
        sample = self._samples[PARTS[which]][0]
        pairs = self._pairs[which]
        if not len(pairs):  # there is no verdict on such
            pairs = torch.arange(min(len(rows) for rows, _ in self._samples.values()))
        extremes = 2 if samples >= FEWEST_PAIRS else 0
        count = min(samples - extremes, len(pairs) if seed == 0 else max(len(pairs) * 3 // 4, 1))
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count]
        found = sample.new_zeros(
            min(samples, -(-(count + extremes) // GROUP) * GROUP), sample.shape[1]
        ).double()
        found[extremes : extremes + count] = sample[pairs[order]].double()
        if extremes:
            sizes = getattr(self.statistics, PARTS[which]).column_sizes.cpu().double()
            signs = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)) < 0.5
            found[which] = torch.where(signs, sizes, -sizes)
        return found[:, places_of(columns, sample.shape[1])]

    def _fitting_pairs(self, samples: int, columns: int, seed: int) -> Tensor:
        """Samples of the gradient, see `_fitted`."""
        inputs = self._paired(0, samples, self.statistics.k, seed)
        return self._fitted(self._paired(1, samples, columns, seed), inputs, 0)


def _padded(x: Tensor, columns: int) -> Tensor:
    """With the zeros of `mods.Pad`."""
    return nn.functional.pad(x, (0, columns - x.shape[1]))


_REPLAYING = threading.Lock()  # distributions are registered by the names of sites


def replay(
    site: LearnedSite,
    *,
    seeds: Sequence[int] = SEEDS,
    database: str | Path | None = None,
    formats: Sequence[WhatIf] = (),
    only: Mapping[str, Sequence[str]] | None = None,
) -> list[Replayed]:
    """Measure every candidate here on the rows that were sampled of a site, and its weight.

    Candidates are the kernels registered for the device here; with no GPU they emulate. So are
    formats that no kernel has, whose errors are no rows of a database. The output is measured
    before and after the site's norm, and after a BlockNorm in its place.

    The first seed of the samples of a weight's gradient gives its error, the others its limit; rows
    of other GEMMs err one by one. Rows of a database are of distributions ``site:<name>/<gemm>``,
    whose parameters are the digest of the statistics.

    ``only`` names, by GEMM, the kernels that matter, and leaves other GEMMs out. Where none of a
    way (`way_of`) can compute what is measured, all others of this way are.
    """
    device = current_device()
    asked = _cells_of(site, device, seeds, formats, only)
    cells = [cell for *_, cell in asked]
    records: dict[int, AccuracyRecord] = {}

    def keep(place: int, record: AccuracyRecord) -> None:
        records[place] = record
        tell(f"replaying {site.name}", len(records) / len(cells))

    # Of two models whose watches judge layers of one name, at once, or of a watch and a report.
    with _REPLAYING, learned(*map(site.distribution, site.gemms())):
        measure_cells(cells, torch_device(), device, lambda *_: True, keep)
    if database is not None:
        from lokakern.registry.storage.run_files import RunFile

        with RunFile.create(
            database, suite="probe", command="probe", harness_digest=harness_digest()
        ) as run:
            for place, record in records.items():
                cell, parameters = cells[place], {"statistics": site.digest}
                if cell.kernel.language == EMULATED:
                    continue
                row = DistributionRow.of(cell.distribution, parameters, realistic=False)
                where = device.architecture, current_environment()
                run.add_accuracy(cell.kernel, cell.problem, row, *where, record)
    found = []
    for (gemm, norm, kernel), places in groupby(sorted(records), lambda place: asked[place][:3]):
        many = [records[place] for place in places]  # by seed
        bad = next((r for r in many if r.status != "ok" or r.errors is None), None)
        reason = f"{bad.status}: {bad.reason}" if bad else site.overflow(gemm)
        errors = (math.inf,) * 6 if reason else _errors_of(site, gemm, many)
        found.append(
            Replayed(
                gemm, norm, kernel.name, kernel.granularity, kernel.b_granularity, *errors,
                rows=site.rows_of(gemm), reason=reason,
                accumulation=kernel.accumulation,
                format=kernel.name.partition(".")[2] if kernel.language == EMULATED else "",
            )
        )  # fmt: skip
    return found


def compile_ahead(
    sites: Iterable[LearnedSite], only: Mapping[str, Mapping[str, Sequence[str]]] | None = None
) -> None:
    """Compile kernels for replays of sites on the GPU here, on all cores of this rank.

    One after the other, as they are launched, 133 kernels of Wukong M took 46 s of a report's 119.
    ``only`` is that of `replay`, by site.
    """
    device = current_device()
    if device.is_gpu:
        cells = [
            cell
            for site in sites
            for *_, cell in _cells_of(
                site, device, (0,), only=None if only is None else only[site.name]
            )
        ]
        names = sorted({cell.kernel.name for cell in cells}) if only is not None else ()
        problems = (cell.problem for cell in cells)
        prebuild(problems, device, names, workers=cores_of_rank(), again=False)


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
    site: LearnedSite,
    device: Device,
    seeds: Sequence[int],
    formats: Sequence[WhatIf] = (),
    only: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[str, str, Kernel, Cell]]:
    """GEMMs of a site, norms after them, kernels and the cells to measure, one for each seed."""
    load_kernels()
    found: list[tuple[str, str, Kernel, Cell]] = []
    for gemm in site.gemms():
        if only is not None and gemm not in only:
            continue
        for norm in norms_after(site.statistics, gemm):
            if only is not None and norm not in ("", site.statistics.norm):
                continue
            problem = problem_of(site.statistics, gemm, norm)
            drawn = seeds if gemm == "grad_weight" else seeds[:1]
            candidates = kernels_for(problem.op, device) + [
                kernel_of(form, problem.op)
                for form in formats
                if not form.way and not (form.weight_only and gemm != "output")
            ]
            names = [site.distribution_name(gemm)]
            # One kernel at a time: none stands in for another that may be wrong here.
            cells = {
                kernel: cells_for([(kernel, problem)], device, names, drawn)
                for kernel in candidates
                if only is None or _way(kernel) in map(_way, map(kernel_named, only[gemm]))
            }
            if only is not None:
                # Also with what normalizes their output.
                mine = tuple(f"{name}+" for name in only[gemm])
                named = {k: some for k, some in cells.items()
                         if some and f"{k.name}+".startswith(mine)}  # fmt: skip
                ways = set(map(_way, named))
                cells = named | {k: some for k, some in cells.items() if _way(k) not in ways}
            found += [(gemm, norm, kernel, cell) for kernel, some in cells.items() for cell in some]
    return found


def _way(kernel: Kernel) -> str:
    return way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation)


def _errors_of(
    site: LearnedSite, gemm: str, found: Sequence[AccuracyRecord]
) -> tuple[float, float, float, float, float, float]:
    """Errors of the first draw and their limits, in the order of `Replayed`."""
    rows, more = site.rows_of(gemm), site.lost(gemm) ** 0.5
    is_sum, unlike = gemm == "grad_weight", site.unlike(gemm)
    uppers: list[tuple[float, float, float]] = []
    for record in found:
        e = record.errors
        assert e is not None
        # A standard error is by different rows. Those of a weight's gradient are all there are.
        wider = 1.0 if is_sum else max(record.rows / max(rows, 1), 1.0) ** 0.5
        square = e.row_err**2 + (e.row_err_upper**2 - e.row_err**2) * wider
        # Where fewer rows were seen than this quantile needs, the largest error is what is known.
        p99 = e.row_p99_upper if rows >= ROWS_OF_P99 or is_sum else e.row_max
        shift = e.mean_shift + (e.mean_shift_upper - e.mean_shift) * wider
        # What is unlike the sample may be wrong altogether, which counts as an error of 1.
        uppers.append((min(square + unlike, 1.0) ** 0.5, p99, shift))
    first = found[0].errors
    assert first is not None
    upper, p99, shift = (max(values) for values in zip(*uppers, strict=True))
    return (
        min(first.row_err * more, 1.0), min(upper * more, 1.0), first.row_p99 * more, p99 * more,
        first.mean_shift * more, shift * more,
    )  # fmt: skip
