"""Errors of formats: the shipped file, and what explain and Probe make of it."""

from __future__ import annotations

import math

import pytest
import torch

from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.selection.candidates import LIMIT_COLUMNS
from lokakern.types import ErrorBudget
from lokakern.what_if import errors
from lokakern.what_if.devices import DEVICES, device_named, formats_of
from lokakern.what_if.formats import FORMATS, Emulated, WhatIf
from lokakern.workloads.distributions import DISTRIBUTIONS, draw_rows, draw_weight

K = 128


def independent(form: WhatIf, name: str, k: int, seed: int) -> float:
    """row_err of a product in a format, float64 but for the output."""
    x = draw_rows(DISTRIBUTIONS[name], 2048, k, seed).bfloat16()
    w = draw_weight(DISTRIBUTIONS[name], errors.N, k, seed).bfloat16()
    left = x.double() if form.weight_only else form.cast(x).value.double()
    exact = x.double() @ w.double().t()
    out = (left @ form.cast(w).value.double().t()).bfloat16().double()
    size = torch.linalg.vector_norm(exact, dim=1)
    each = torch.linalg.vector_norm(out - exact, dim=1) / size.clamp_min(1e-300)
    each = torch.where(size > 0, each, (out.abs().amax(dim=1) > 0).double()).clamp_max(1)
    return float(each.square().mean().sqrt())


def test_the_shipped_file_is_of_the_casts_as_they_are() -> None:
    """Else: python scripts/measure_what_if.py."""
    held = errors.table()
    assert held.digest == errors.digest()
    assert (held.limits, held.sums) == (list(LIMIT_COLUMNS), list(errors.SUMS))
    assert held.errors.keys() == FORMATS.keys()
    for by_name in held.errors.values():
        assert by_name.keys() == DISTRIBUTIONS.keys()
        for rows in by_name.values():
            assert [len(row) for row in rows] == [len(held.limits)] * len(held.sums)
            assert all(math.isfinite(value) for row in rows for value in row)
    assert errors.FILE.stat().st_size < 200_000


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("name", ["X2", "X14"])
def test_errors_are_those_of_an_independent_reference(name: str, form: WhatIf) -> None:
    """The bound is an upper 95 % limit of three seeds: at most 3 % above the largest of them."""
    real = max(independent(form, name, K, seed) for seed in (0, 1, 2))
    found = errors.bounds(form.name, K, [name])
    assert real * 0.999 <= found.errors["row_err"] <= real * 1.03
    assert found.worst == name


def test_measuring_again_gives_the_shipped_bounds() -> None:
    again = errors.measure(["int8-weight"], ["X1"], [K])
    place = errors.SUMS.index(K)
    assert again.errors["int8-weight"]["X1"][0] == pytest.approx(
        errors.table().errors["int8-weight"]["X1"][place], rel=2e-3
    )


def test_a_wrong_emulation_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(x: torch.Tensor) -> Emulated:
        return Emulated(x, x, torch.full_like(x, math.nan, dtype=torch.float32))

    monkeypatch.setitem(FORMATS, "int8", WhatIf("int8", nothing))
    with pytest.raises(MeasurementError, match=r"emulated.int8 k=128 X1 seed 0: wrong"):
        errors.measure(["int8"], ["X1"], [K])


def test_between_two_measured_k_the_worse_counts() -> None:
    def row_err(k: int) -> float:
        return errors.bounds("int8", k, ["X1"]).errors["row_err"]

    low, high = row_err(512), row_err(2048)
    assert low < high  # the largest of more elements is larger
    assert row_err(513) == row_err(2047) == high
    assert row_err(1) == row_err(128)
    assert row_err(10**6) == row_err(8192)
    sqnr = [errors.bounds("int8", k, ["X1"]).errors["sqnr_db"] for k in (512, 1024, 2048)]
    assert sqnr[0] > sqnr[1] == sqnr[2]


def test_the_default_is_the_worst_realistic_distribution() -> None:
    every = errors.bounds("nvfp4", 512)
    each = {
        name: errors.bounds("nvfp4", 512, [name]).errors["row_err"]
        for name in DISTRIBUTIONS
        if DISTRIBUTIONS[name].realistic
    }
    assert every.errors["row_err"] == max(each.values())
    assert each[every.worst] == max(each.values())


def test_a_budget_has_many_limits() -> None:
    found = errors.bounds("mxfp8", 512)
    row_err, sqnr = found.errors["row_err"], found.errors["sqnr_db"]
    assert found.why_not(ErrorBudget(row_err=row_err, sqnr_db=sqnr)) == ""
    assert found.why_not(ErrorBudget(row_err=0.03)) == f"row_err {row_err:.4f} > 0.03"
    assert found.why_not(ErrorBudget(sqnr_db=60)) == f"sqnr_db {sqnr:.4f} < 60"


def test_distributions_without_errors() -> None:
    with pytest.raises(UnknownNameError, match=r"not emulated on distribution 'X99'; expected one"):
        errors.bounds("int8", 512, ["X99"])
    found = errors.bounds("int8", 512, ["X1", "outside: wider rows"])
    assert found.why_not(ErrorBudget(row_err=1.0)) == "errors are not known: outside: wider rows"


def test_formats_are_no_kernels_of_the_registry() -> None:
    load_kernels()
    assert not any(name.startswith(errors.EMULATED) for name in KERNELS)


def test_devices_are_found_by_their_words() -> None:
    for name in ("NVIDIA B200", "b200", "nvidia-b200"):
        found = device_named(name)
        assert found is not None and found.product == "NVIDIA B200"
    for name in ("nvidia", "", "H200", "B20"):
        assert device_named(name) is None
    a100 = device_named("A100")
    assert a100 is not None
    assert [form.name for form in formats_of(a100)] == ["int8", "int8-weight", "int4-weight"]
    assert all(formats_of(device) for device in DEVICES)
