"""Suites: problems that can be measured, each once, with a distribution that exists."""

from __future__ import annotations

from collections import Counter

import pytest

from lokakern.bench.distributions import DISTRIBUTIONS
from lokakern.bench.suites import (
    ANCHOR_M,
    ANCHOR_N_K,
    LRM_BATCHES,
    LRM_LAYERS,
    SUITES,
    Case,
    gemm_cases,
    shape_cases,
    suite_named,
)
from lokakern.bench.sweep import candidates
from lokakern.errors import ShapeError, UnknownNameError
from lokakern.problems import baseline_name, make_problem
from lokakern.registry.register import fp8_format
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    alignment_of,
)

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
CPU = Device("cpu", "some CPU", "x86_64", 2, 16)
EVERY = [(name, device) for name in SUITES for device in (H200, MI300X, CPU)]
every_suite = pytest.mark.parametrize(
    ("name", "device"), EVERY, ids=[f"{name} on {device}" for name, device in EVERY]
)


def remade(problem: Problem) -> Problem:
    """The same problem through the checks that a caller's problem goes through."""
    names = ("a", "b", "prepared", "epilogue", "out_format", "out_granularity", "out_strided")
    fields = {name: getattr(problem, name) for name in names}
    return make_problem(problem.op, problem.shape, **fields)


@every_suite
def test_cases_are_problems_with_a_distribution(name: str, device: Device) -> None:
    cases = SUITES[name].cases(device)
    assert cases
    for case in cases:
        problem = case.problem
        assert case.distribution in DISTRIBUTIONS
        assert case.distribution in REALISTIC_DISTRIBUTIONS
        assert remade(problem) == problem
        assert min(problem.shape) >= 1
        assert problem.batch == 1
        for operand in (problem.a, problem.b):
            if operand is not None:
                assert operand.alignment == alignment_of(problem.k * operand.format.dtype.itemsize)
        formats = [problem.a.format, problem.out_format, *([problem.b.format] if problem.b else [])]
        assert {form for form in formats if form.is_fp8} <= {fp8_format(device)}


@every_suite
def test_no_case_comes_twice(name: str, device: Device) -> None:
    cases = SUITES[name].cases(device)
    assert len(set(cases)) == len(cases)
    assert cases == SUITES[name].cases(device)


@every_suite
def test_some_kernel_takes_every_case(name: str, device: Device) -> None:
    for case in SUITES[name].cases(device):
        assert candidates(case.problem, device), case


@pytest.mark.parametrize("name", SUITES)
def test_fp8_competes_with_the_unquantized_kernel_on_an_h200(name: str) -> None:
    for case in SUITES[name].cases(H200):
        if case.problem.op != "gemm":
            continue
        kernels = {kernel.name: kernel for kernel in candidates(case.problem, H200)}
        assert baseline_name(case.problem) in kernels
        assert any(kernel.quantizes for kernel in kernels.values()), case


def gemm_shapes(name: str) -> set[tuple[int, ...]]:
    return {c.problem.shape for c in SUITES[name].cases(H200) if c.problem.op == "gemm"}


def test_anchors_are_27_shapes() -> None:
    found = gemm_shapes("anchors")
    assert len(found) == 27
    assert found == {(m, n, k) for m in ANCHOR_M for n, k in ANCHOR_N_K}
    assert {m for m, _, _ in found} == {2048, 8192, 32768}
    problems = [case.problem for case in SUITES["anchors"].cases(H200)]
    of_bf16 = Counter(p.op for p in problems if p.a.format is not Format.FLOAT32)
    assert of_bf16["gemm"] == 27 * 4 * 2  # with and without a bias
    assert of_bf16["scaled_gemm"] == 27 * 3
    assert any(p.op == "gemm" and p.a.format is Format.FLOAT32 for p in problems)


@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_anchors_have_every_granularity(op: str) -> None:
    problems = [c.problem for c in SUITES["anchors"].cases(H200) if c.problem.op == op]
    found = {p.out_granularity if op == "quantize" else p.a.granularity for p in problems}
    assert found == set(Granularity) - {Granularity.NONE}


def test_lrm_has_every_layer_at_every_batch() -> None:
    assert gemm_shapes("lrm") == {(m, n, k) for n, k, _, _ in LRM_LAYERS for m in LRM_BATCHES}
    paired = {
        (c.problem.n, c.problem.k, c.distribution, c.problem.epilogue == "bias")
        for c in SUITES["lrm"].cases(H200)
        if c.problem.op == "gemm"
    }
    assert paired == set(LRM_LAYERS)
    assert len(LRM_LAYERS) == len(set(LRM_LAYERS))


def test_smoke_is_small() -> None:
    cases = SUITES["smoke"].cases(CPU)
    assert len(cases) <= 30
    assert max(case.problem.flops for case in cases) <= 2 * 2048 * 256 * 256
    assert {case.problem.op for case in cases} == {
        "gemm", "scaled_gemm", "quantize", "dequantize"
    }  # fmt: skip


def test_a_gemm_comes_whole_prepared_and_in_parts() -> None:
    cases = list(gemm_cases(64, 32, 48, "X4", Format.E4M3FN, bias=True))
    gemms = [case.problem for case in cases if case.problem.op == "gemm"]
    assert [problem.prepared for problem in gemms] == [False, True, True, True]
    assert [problem.b.granularity for problem in gemms if problem.b] == [
        Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK
    ]  # fmt: skip
    assert {problem.epilogue for problem in gemms} == {"bias"}
    for problem in gemms:
        assert problem.b is not None
        assert problem.b.layout is Layout.COLUMN
    parts = [case.problem for case in cases if case.problem.op != "gemm"]
    scales = {Granularity.TENSOR, Granularity.ROW, Granularity.GROUP}
    assert {p.out_granularity for p in parts if p.op == "quantize"} == scales
    assert {p.a.granularity for p in parts if p.op == "scaled_gemm"} == scales
    assert {case.distribution for case in cases} == {"X4"}


def test_shapes_of_a_user() -> None:
    cases = list(shape_cases([(64, 32, 48), (128, 64)], Format.E4M3FN))
    assert all(isinstance(case, Case) for case in cases)
    assert {c.problem.shape for c in cases if c.problem.op == "gemm"} == {(64, 32, 48)}
    of_two = [c.problem for c in cases if c.problem.shape == (128, 64)]
    assert Counter(problem.op for problem in of_two) == {"quantize": 4, "dequantize": 4}
    assert list(shape_cases([], Format.E4M3FN)) == []
    with pytest.raises(ShapeError):
        list(shape_cases([(64, 0, 48)], Format.E4M3FN))


def test_suites_are_found_by_name() -> None:
    for name, suite in SUITES.items():
        assert suite_named(name) is suite
        assert suite.name == name
        assert suite.title
    with pytest.raises(UnknownNameError, match="'anchor' is unknown; expected one of smoke, anch"):
        suite_named("anchor")
