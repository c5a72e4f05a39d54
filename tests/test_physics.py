"""What no measurement can be, and that nothing that was measured is refused for it."""

from __future__ import annotations

import math

import pytest
import torch

from lokakern.problems import make_problem
from lokakern.registry.loading import load_snapshot
from lokakern.registry.physics import least_error, least_us
from lokakern.registry.snapshot import Snapshot
from lokakern.registry.store import shipped_databases
from lokakern.types import REGIMES, Device, Format, Granularity

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


def test_light_is_as_fast_as_data_sheets_say() -> None:
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
    """Of each kind of arithmetic on each distribution."""
    columns = ("problem", "distribution", "kernel", *ERRORS, *(f"{name}_upper" for name in ERRORS))
    nearest = math.inf
    for problem, distribution, kernel, *found in shipped._facts.picked(
        "accuracy", columns, status="ok"
    ):
        errors, uppers = found[: len(ERRORS)], found[len(ERRORS) :]
        assert all(upper >= error for error, upper in zip(errors, uppers, strict=True))
        scaled = shipped._column("kernel", "granularity")[kernel] != Granularity.NONE
        out_format = shipped._column("problem", "out_format")[problem]
        least = least_error(Format(out_format), shipped._distribution(distribution).name, scaled)
        nearest = min(nearest, min(errors) / least if least else math.inf)
    assert 1.2 < nearest < 2


@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2, Format.BFLOAT16])
@pytest.mark.parametrize("low", [1.0, 1.5, 1.75])
def test_rounding_leaves_an_error(form: Format, low: float) -> None:
    """Twice the bound at the end of a binade, up to four times over all of it."""
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * (2 - low) + low
    error = float((x.to(form.dtype).float() - x).norm() / x.norm())
    assert 2 < error / least_error(form, "X1", is_quantized=False) < 4
    assert least_error(Format.FLOAT32, "X1", is_quantized=False) == 0.0


def test_quantized_operands_leave_an_error_but_where_sums_cancel_it() -> None:
    least = least_error(Format.E4M3FN, "X1", is_quantized=False)
    assert least_error(Format.FLOAT32, "X1", is_quantized=True) == least
    for name in ("X10", "X13"):
        assert least_error(Format.FLOAT32, name, is_quantized=True) == 0.0
    assert least_error(Format.E4M3FN, "powers of two", is_quantized=True) == 0.0
