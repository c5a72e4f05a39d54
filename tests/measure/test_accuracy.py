"""Errors as a sweep measures them: on draws of rows, or of samples where these are summed over."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.build.prebuild import jobs_for
from lokakern.measure.accuracy import Cell, cells_for, launched_for_errors, measure_cells
from lokakern.measure.operand_cache import operand_digest
from lokakern.problems import accuracy_problem, make_problem, sums_over_samples
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.records import AccuracyRecord
from lokakern.selection.candidates import (
    CARRIED,
    ERRORS_ELSEWHERE,
    LONG_ROWS,
    TIMES_SHORTER,
)
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight
from lokakern.workloads.gemm_gradient_cases import grad_weight_case

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
E4M3 = Format.E4M3FN


def measured(kernel: Kernel, problem: Problem, distribution: str = "X12") -> AccuracyRecord:
    cells = cells_for([(kernel, problem)], HERE, [distribution], seeds=[5])
    assert len(cells) == 1
    return record_of(cells[0])


def record_of(cell: Cell) -> AccuracyRecord:
    found: dict[int, AccuracyRecord] = {}
    measure_cells([cell], CPU, HERE, lambda *_: True, found.__setitem__)
    return found[0]


@pytest.mark.parametrize("scales", ["row", "group"])
def test_operands_of_weight_gradients_have_samples_as_rows(
    scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of a row span samples; sums of more samples than 1024 have the error of those."""
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 96)
    kernel = KERNELS[f"torch.quantize_{scales}+torch.emulated_{scales}"]
    problem = grad_weight_case(5000, 48, 40).problem
    found = measured(kernel, problem)
    assert (found.status, found.rows) == ("ok", 96)
    assert found.errors is not None
    assert found.errors == measured(kernel, replace(problem, m=7, k=1024)).errors
    recipe = distribution_named("X12")
    dy = draw_rows(recipe, 1024, 96, 5).float().bfloat16()
    x = draw_weight(recipe, 1024, 40, 5).float().bfloat16()
    left = numerics.quantize(dy.t(), E4M3, kernel.granularity)
    right = numerics.quantize(x.t(), E4M3, kernel.b_granularity)
    out = numerics.dequantize(left) @ numerics.dequantize(right).t()
    wanted = numerics.measure_errors(out.bfloat16(), dy.t().double() @ x.double())
    assert found.errors.row_err == pytest.approx(wanted.row_err, rel=1e-3)
    short = accuracy_problem(grad_weight_case(300, 48, 40).problem, E4M3)
    assert sums_over_samples(short) and short.k == 300


def test_the_interpreter_gets_few_rows_and_one_seed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that ends early then has an error of every distribution."""
    torchs = KERNELS["torch.emulated_row"]
    plugin = replace(torchs, name="acme.row", modules=("python:acme",))
    problem = make_problem("scaled_gemm", (64, 500, 128))
    rows = {}
    for kernel in (torchs, plugin):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        cells = cells_for([(kernel, problem)], HERE, ["X1", "X8"], seeds=[0, 1])
        for interpreted in ("0", "1"):
            monkeypatch.setenv("TRITON_INTERPRET", interpreted)
            found: dict[int, AccuracyRecord] = {}
            measure_cells(cells, CPU, HERE, lambda *_: True, found.__setitem__)
            rows[kernel.name, interpreted] = {record.rows for record in found.values()}
            order = [(cells[place].seed, cells[place].distribution) for place in found]
            assert order == [(0, "X1"), (0, "X8"), (1, "X1"), (1, "X8")]
    assert rows == {(torchs.name, "0"): {2048}, (torchs.name, "1"): {2048},
                    ("acme.row", "0"): {2048}, ("acme.row", "1"): {384}}  # fmt: skip


def test_fast_sums_over_samples_are_incorrect() -> None:
    kernel = KERNELS["cuda.quantize_row+torch.scaled_mm_row_fast"]
    h200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
    answer = kernel.supports(grad_weight_case(2048, 64, 64).problem, h200)
    assert "are promoted" in answer.reason  # type: ignore[union-attr]


def test_an_fp8_output_has_a_larger_error_after_dequantization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 96)
    kernel = KERNELS["torch.emulated_row"]
    wide = make_problem("scaled_gemm", (64, 48, 256))
    small = replace(wide, out_format=E4M3, out_granularity=Granularity.TENSOR, epilogue="relu")
    before, after = (measured(kernel, p, "X1").errors for p in (wide, small))
    assert before is not None and after is not None
    assert 0.03 < before.row_err < 0.04 < after.row_err < 0.06
    added = replace(
        wide, out_format=Format.FLOAT32, accumulate=True, epilogue="bias",
        a=Operand(Format.E5M2, Granularity.ROW),
        b=Operand(E4M3, Granularity.ROW, Layout.COLUMN),
    )  # fmt: skip
    errors = measured(kernel, added, "X1").errors
    assert errors is not None and 0.05 < errors.row_err < 0.07


def test_outputs_that_overflow_float16_are_no_fault_of_a_kernel() -> None:
    """Their error is unknown on the distribution, with the reason; elsewhere it is measured."""
    kernel = KERNELS["torch.quantize_row+torch.emulated_row"]
    half, plain = (
        make_problem("gemm", (2048, 64, 1024), a=Operand(form))
        for form in (Format.FLOAT16, Format.BFLOAT16)
    )
    overflows = measured(kernel, half, "X13(c=5000)")
    assert overflows.status == "error"
    assert "of 131072 outputs overflow float16, up to 65504" in overflows.reason
    assert measured(kernel, plain, "X13(c=5000)").status == "ok"
    found = measured(kernel, half, "X13")
    assert found.status == "ok" and found.errors is not None
    expected = measured(kernel, plain, "X13")
    assert expected.errors is not None
    assert found.errors.row_err < expected.errors.row_err  # 2^-11 of each output, not 2^-8
    wrong = replace(kernel, launch=lambda a, b, out, *_: out.fill_(math.inf))
    assert measured(wrong, half, "X13").status == "wrong"


def test_sums_that_overflow_float16_before_a_norm_are_no_fault_of_a_kernel() -> None:
    """Of one that rounds them; one that keeps them in float32 is right."""
    half = make_problem("gemm_norm", (2048, 64, 1024), a=Operand(Format.FLOAT16), epilogue="layer",
                        out_format=Format.FLOAT16)  # fmt: skip
    rounds = KERNELS["torch.bf16+torch.norm_quantize"]
    overflows = measured(rounds, half, "X13(c=5000)")
    assert overflows.status == "error"
    assert "overflow float16, up to 65504, or the sums of their rows" in overflows.reason
    kept = measured(KERNELS["torch.quantize_row+torch.norm_emulated_row"], half, "X13(c=5000)")
    assert kept.status == "ok"
    assert measured(rounds, half, "X1").status == "ok"
    wrong = replace(rounds, launch=lambda a, b, out, *_: out.fill_(math.inf))
    assert measured(wrong, half, "X1").status == "wrong"

    def wrong_elsewhere(*given: Any) -> None:
        rounds.launch(*given)
        given[2].nan_to_num_(nan=math.nan).mul_(2.0)

    assert measured(replace(rounds, launch=wrong_elsewhere), half, "X1").status == "wrong"


@pytest.mark.parametrize("form", [Format.FLOAT16, E4M3])
def test_norms_and_their_gradients_are_measured_in_float16(form: Format) -> None:
    fields = {"a": Operand(Format.FLOAT16), "epilogue": "bias+layer+affine+silu"}
    for op, shape, name in (
        ("gemm_norm", (64, 64, 128), "torch.norm_unfused"),
        ("norm_backward", (64, 128), "torch.norm_backward"),
    ):
        problem = make_problem(op, shape, out_format=form, **fields)
        found = measured(KERNELS[name], problem, "X1")
        assert found.status == "ok", found.reason
        assert found.errors is not None and found.errors.row_err < (0.06 if form is E4M3 else 2e-3)


def test_quantized_operands_of_float16_outputs_are_made_from_float16() -> None:
    """So that errors of `gemm` and `scaled_gemm` are the same rows."""
    a = Operand(E4M3, Granularity.ROW)
    scaled = make_problem("scaled_gemm", (64, 64, 64), a=a, out_format=Format.FLOAT16)
    whole = make_problem("gemm", (64, 64, 64), a=Operand(Format.FLOAT16))
    assert accuracy_problem(scaled, E4M3) == accuracy_problem(whole, E4M3)


def test_operand_digests_depend_on_values_not_layout() -> None:
    x = torch.randn(1, 5)
    assert operand_digest(x.t()) == operand_digest(x.flatten())  # of strides (1, 5) before
    assert operand_digest(x, None) != operand_digest(2 * x)


@pytest.mark.parametrize("left", [Format.BFLOAT16, E4M3])
def test_errors_are_launched_at_their_m_without_a_bias(left: Format) -> None:
    """The kernels of a timed layer with a bias are others, which a sweep has to compile, too."""
    device = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
    scales = Granularity.ROW if left.is_fp8 else Granularity.NONE
    problem = make_problem(
        "gemm_norm", (8192, 256, 512), a=Operand(left, scales), epilogue="bias+layer+affine+relu"
    )
    launched = launched_for_errors(problem, device)
    assert (launched.m, launched.n, launched.k) == (2048, 256, 512)
    assert launched.epilogue == "layer+relu"
    assert launched.a == problem.a and launched.b == problem.b
    kernel = KERNELS["cuda.gemm_norm_row" if left.is_fp8 else "cuda.gemm_norm_bf16"]
    timed, checked = (jobs_for([p], device, [kernel]) for p in (problem, launched))
    assert len(timed) == len(checked) == 1
    assert timed != checked
    assert launched_for_errors(launched, device) == launched


@pytest.mark.parametrize(
    ("op", "kernel", "scales", "distribution"),
    [
        ("quantize", "torch.quantize_row", Granularity.ROW, "X14"),
        ("quantize", "torch.quantize_group", Granularity.GROUP, "X5"),
        ("quantize", "torch.quantize_tensor", Granularity.TENSOR, "X14"),
        ("quantize", "torch.quantize_tensor", Granularity.TENSOR, "X7"),
        ("norm_quantize", "torch.norm_quantize", Granularity.ROW, "X12"),
    ],
)
def test_errors_of_quantizers_hardly_depend_on_k_where_dispatch_says_so(
    op: str, kernel: str, scales: Granularity, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ERRORS_ELSEWHERE` covers those at other k, by those at `LONG_ROWS`, the least measured."""
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 512)
    fields = {"epilogue": "layer"} if op == "norm_quantize" else {}
    found = {}
    for k in (LONG_ROWS // TIMES_SHORTER, LONG_ROWS, 4096):
        problem = make_problem(op, (512, k), out_granularity=scales, **fields)
        errors = measured(KERNELS[kernel], problem, distribution).errors
        assert errors is not None
        found[k] = errors
    for limit in CARRIED:
        here = {k: getattr(errors, limit) for k, errors in found.items()}
        assert max(here.values()) <= ERRORS_ELSEWHERE * here[LONG_ROWS], limit
