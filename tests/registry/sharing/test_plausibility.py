"""Bounds of plausible measurements: impossible rows are refused, measured rows are not."""

from __future__ import annotations

import math

import pytest
import torch

from lokakern.numerics import dequantize, measure_errors, quantize
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.schema.records import DistributionRow
from lokakern.registry.sharing.plausibility import least_error, least_us
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.storage.paths import shipped_databases
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    REGIMES,
    Device,
    Format,
    Granularity,
    Problem,
)
from lokakern.workloads.distributions import distribution_named, draw_rows

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
ERRORS = ("row_err", "row_p99", "rel_err", "mean_rel_err")
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)


@pytest.fixture(scope="module")
def shipped() -> Snapshot:
    return load_snapshot(shipped_databases())


def test_every_shipped_time_is_possible(shipped: Snapshot) -> None:
    nearest = min(
        cell.latency_us_p20 / least_us(cell.problem, device, regime)
        for device in shipped.devices
        for regime in REGIMES
        for cell in shipped.timings_on(device, regime)
        if cell.status == "ok"
    )
    assert 1 < nearest < 2, "a bound that is far from everything refuses nothing"


def test_least_times_follow_from_data_sheets() -> None:
    large = make_problem("gemm", (8192, 8192, 8192))
    assert least_us(large, H200, "eager") == pytest.approx(0.9 * 2 * 8192**3 / 2.14e9, rel=0.01)
    assert least_us(large, MI300X, "eager") == pytest.approx(0.9 * 2 * 8192**3 / 2.61e9, rel=0.01)
    narrow = make_problem("quantize", (2**20, 256))
    assert least_us(narrow, H200, "graph-cold") == pytest.approx(0.9 * narrow.bytes_moved / 4.9e6)
    assert least_us(narrow, H200, "graph-hot") == least_us(narrow, H200, "eager") == 0.3
    unknown = Device("nvidia", "NVIDIA X", "sm_150", 132, 140)
    cpu = Device("cpu", "a CPU", "cpu", 2, 8)
    assert 0 < least_us(large, unknown, "eager") < least_us(large, H200, "eager")
    assert least_us(large, cpu, "eager") > 0


def test_every_shipped_error_is_possible(shipped: Snapshot) -> None:
    """Errors of each kind of arithmetic on each distribution."""
    columns = ("problem", "distribution", "kernel", *ERRORS, *(f"{name}_upper" for name in ERRORS))
    nearest = math.inf
    known: dict[tuple[object, ...], float] = {}
    for problem, distribution, kernel, *found in shipped._facts.picked(
        "accuracy", columns, status="ok"
    ):
        errors, uppers = found[: len(ERRORS)], found[len(ERRORS) :]
        assert all(upper >= error for error, upper in zip(errors, uppers, strict=True))
        scaled = shipped._column("kernel", "granularity")[kernel] != Granularity.NONE
        place = (
            shipped._entity(Problem, problem),
            shipped._entity(DistributionRow, distribution).name,
        )
        if (*place, scaled) not in known:
            known[*place, scaled] = least_error(*place, scaled)
        least = known[*place, scaled]
        nearest = min(nearest, min(errors) / least if least else math.inf)
    assert 1.2 < nearest < 2


def test_narrow_outputs_have_larger_errors_than_wide_ones(shipped: Snapshot) -> None:
    def worst(n: int) -> float:
        problem = accuracy_problem(make_problem("gemm", (64, n, 256)), Format.E4M3FN)
        return shipped.worst_errors(problem, "row", "row", "X1")["row_err_upper"]

    assert worst(1) > 0.2  # a row of one element, where sums cancel
    assert 0.03 < worst(32) < 0.05 and worst(8192) <= worst(32)


def of(op: str, out_format: Format, n: int = 256, k: int = 256) -> Problem:
    shape = (2048, k) if op in ("quantize", "dequantize") else (2048, n, k)
    return make_problem(op, shape, out_format=out_format)


@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2, Format.BFLOAT16])
@pytest.mark.parametrize("low", [1.0, 1.5, 1.75])
def test_rounding_leaves_an_error(form: Format, low: float) -> None:
    """Twice the bound at the end of a binade, up to four times over all of it."""
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * (2 - low) + low
    error = float((x.to(form.dtype).float() - x).norm() / x.norm())
    assert 2 < error / least_error(of("gemm", form), "X1", is_quantized=False) < 4
    assert least_error(of("gemm", Format.FLOAT32), "X1", is_quantized=False) == 0.0


def test_quantized_operands_leave_an_error_but_where_sums_cancel_it() -> None:
    least = least_error(of("quantize", Format.E4M3FN), "X1", is_quantized=False)
    plain = of("gemm", Format.FLOAT32)
    assert least_error(plain, "X1", is_quantized=True) == least > 0
    for name in ("X10", "X13"):
        assert least_error(plain, name, is_quantized=True) == 0.0
    assert least_error(of("gemm", Format.E4M3FN), "powers of two", is_quantized=True) == 0.0


def test_outputs_that_may_be_exact_have_no_least_error() -> None:
    """A power of two as a scale; and the largest value of a scale, which may be the only one."""
    assert least_error(of("dequantize", Format.BFLOAT16), "X1", is_quantized=False) == 0.0
    assert least_error(of("quantize", Format.E4M3FN, k=63), "X1", is_quantized=True) == 0.0
    assert least_error(of("gemm", Format.FLOAT32, k=1), "X1", is_quantized=True) == 0.0
    assert least_error(of("gemm", Format.E4M3FN, n=1, k=1), "X1", is_quantized=True) == 0.0
    assert least_error(of("gemm", Format.BFLOAT16, n=1, k=1), "X1", is_quantized=True) > 0


@pytest.mark.parametrize("name", REALISTIC_DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 8, 32, 64, 128, 720])
def test_honest_quantizers_are_less_accurate_than_the_bound(name: str, k: int) -> None:
    distribution = distribution_named(name)
    for rows, seed in ((16, 0), (64, 1), (64, 2), (512, 3)):
        x = draw_rows(distribution, rows, k, seed).to(torch.bfloat16)
        for granularity in (Granularity.ROW, Granularity.GROUP):
            found = measure_errors(dequantize(quantize(x, Format.E4M3FN, granularity)), x.double())
            least = least_error(of("quantize", Format.E4M3FN, k=k), name, is_quantized=True)
            assert min(getattr(found, error) for error in ERRORS) >= least
