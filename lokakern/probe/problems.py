"""The GEMMs of a site as problems, and errors that a replay measures at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lokakern.device import current_device
from lokakern.norm import norm_named
from lokakern.probe.statistics import SiteStatistics
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format
from lokakern.types import Format, Granularity, Operand, Problem, alignment_of
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case

BLOCK = 256  # columns of BlockNorm, where they divide a row
ALIGNED = 16  # elements of FP8 that rows must be multiples of for libraries to take them


@dataclass(frozen=True, slots=True)
class Replayed:
    """Errors of one kernel at one GEMM of a site, with their 95 % upper limits."""

    gemm: str
    norm: str  # after which the error was taken; "" before any
    kernel: str
    granularity: Granularity  # of the left operand; NONE if it does not quantize
    b_granularity: Granularity
    row_err: float
    row_err_upper: float
    row_p99: float
    row_p99_upper: float
    mean_shift: float
    mean_shift_upper: float
    rows: int  # different ones; of a weight's gradient, pairs of them
    reason: str = ""  # why there is no error
    accumulation: str = "promoted"
    format: str = ""  # of `lokakern.what_if.formats`; "" of a kernel that is registered

    @property
    def way(self) -> str:
        return self.format or way_of(self.granularity, self.b_granularity, self.accumulation)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is quantized."""
        return not self.format and self.granularity is Granularity.NONE

    @property
    def is_everywhere(self) -> bool:
        """Whether its errors are those of every GPU: sums that are not promoted are one's own."""
        return not _of_its_own(self.accumulation)


def way_of(granularity: Granularity, b_granularity: Granularity, accumulation: str) -> str:
    """Name of kernels that have the same errors on all operands: scales, and other differences.

    "row", "1x128 x 128x128"; "row fast" where sums are not promoted, "row fast torchao" where a
    library quantizes in its own way, too. Sums in float32, such as emulated ones, err as promoted
    ones do; of the rounding before a norm the database knows more (`NumericsClass`).
    """
    one = granularity is b_granularity
    scales = granularity.value if one else f"{granularity.value} x {b_granularity.value}"
    return " ".join([scales, *_of_its_own(accumulation)])


def _of_its_own(accumulation: str) -> list[str]:
    alike = ("none", "float32", "promoted", "rounded")
    return [word for word in accumulation.split("+") if word not in alike]


def problem_of(site: SiteStatistics, gemm: str, norm: str = "") -> Problem:
    """One GEMM of a site at the median m, and the normalization after it, if it is asked for."""
    (m, n, k), half = site.shape, site.half
    if norm:  # of the outputs alone
        a = Operand(half, alignment=alignment_of(2 * k))
        return make_problem("gemm_norm", (m, site.n, k), a=a, epilogue=norm, out_format=half)
    if gemm == "output":
        return _output_problem(m, n, k, half)
    if gemm == "grad_input":
        fp8 = fp8_format(current_device())
        return next(iter(grad_input_cases(m, n, k, fp8, half))).problem
    return grad_weight_case(m, n, k, half).problem


def _output_problem(m: int, n: int, k: int, half: Format) -> Problem:
    return make_problem("gemm", (m, n, k), a=Operand(half, alignment=alignment_of(2 * k)))


def norms_after(site: SiteStatistics, gemm: str) -> list[str]:
    """Normalizations after which a GEMM is judged: "", the site's, and a BlockNorm in its place."""
    if gemm != "output" or not site.norm:
        return [""]
    return ["", site.norm, *([block_norm(site.n)] if site.norm == "layer" else [])]


def padded(site: SiteStatistics) -> Problem | None:
    """The output's GEMM with K padded to what libraries take; None where it is."""
    m, n, k = site.shape
    wide = -(-k // ALIGNED) * ALIGNED
    return _output_problem(m, n, wide, site.half) if wide != k else None


def problems_to_time(site: SiteStatistics, gemm: str) -> Iterator[Problem]:
    """A GEMM of a site, and what might be done instead of it."""
    yield from (problem_of(site, gemm, norm) for norm in norms_after(site, gemm))
    if gemm == "output":
        if site.has_bias:
            yield replace(problem_of(site, gemm), epilogue="bias")
        wider = padded(site)
        if wider is not None:
            yield wider


def block_norm(columns: int) -> str:
    """BlockNorm of the most columns, at most 256, that divide a row."""
    block = max(size for size in range(1, min(BLOCK, columns) + 1) if columns % size == 0)
    return str(norm_named(f"block_rms({block})"))
