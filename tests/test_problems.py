"""Problems as callers ask for them, and as their errors are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.problems import (
    accuracy_problem,
    baseline_name,
    has_column_sums,
    make_problem,
    scaling_of,
    sums_over_samples,
)
from lokakern.registry.schema.row_keys import key_of
from lokakern.types import Format, Granularity, Layout, Operand
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case

E4M3 = Format.E4M3FN


@pytest.mark.parametrize("batch", [0, -1, 1.0, "2", None, True, [2]])
def test_a_batch_is_an_integer_of_at_least_one(batch: Any) -> None:
    with pytest.raises(ShapeError, match="expected an integer >= 1"):
        make_problem("gemm", (8, 8, 8), batch=batch)


def test_a_batch_is_part_of_a_problem() -> None:
    one, many = (make_problem("gemm", (64, 32, 16), batch=batch) for batch in (1, 3))
    assert one == make_problem("gemm", (64, 32, 16))
    assert key_of(one) == key_of(make_problem("gemm", (64, 32, 16)))
    assert key_of(one) != key_of(many)
    assert many.bytes_moved == 3 * one.bytes_moved == 3 * 2 * (64 * 16 + 32 * 16 + 64 * 32)
    assert many.flops == 3 * one.flops == 3 * 2 * 64 * 32 * 16
    assert "batch=3" in str(many)


def test_a_transposed_a_does_not_change_b() -> None:
    a = Operand(Format.BFLOAT16, layout=Layout.COLUMN, alignment=16)
    problem = make_problem("gemm", (64, 32, 13), a=a)
    assert (problem.b and problem.b.alignment) == 2
    assert (problem.b and problem.b.layout) is Layout.COLUMN


@pytest.mark.parametrize("scaling", ["none", "power_of_two", "static", "delayed"])
def test_sums_of_columns_are_part_of_a_problem_beside_its_scales(scaling: str) -> None:
    epilogue = "column_sums" if scaling == "none" else f"{scaling}+column_sums"
    plain, summing = (
        make_problem("quantize_transpose", (64, 48), epilogue=words)
        for words in (scaling, epilogue)
    )
    assert scaling_of(plain) == scaling_of(summing) == scaling
    assert has_column_sums(summing) and not has_column_sums(plain)
    assert summing.bytes_moved == plain.bytes_moved + 4 * 48


def test_error_problems_have_no_batch_and_one_m() -> None:
    many = make_problem("gemm", (64, 32, 16), batch=3)
    assert accuracy_problem(many, E4M3) == make_problem("gemm", (2048, 32, 16))


def test_error_problems_of_gradients_are_plain_gemms() -> None:
    for case in grad_input_cases(4096, 48, 40, E4M3):
        assert accuracy_problem(case.problem, E4M3) == make_problem("gemm", (2048, 40, 48))
    problem = grad_weight_case(4096, 39, 13, batch=2).problem
    assert sums_over_samples(problem)
    asked = accuracy_problem(problem, E4M3)
    assert sums_over_samples(asked)
    assert (asked.shape, asked.batch) == ((2048, 13, 1024), 1)
    assert (asked.a.alignment, asked.b and asked.b.alignment) == (16, 16)
    assert accuracy_problem(replace(problem, epilogue="bias"), E4M3) == asked
    assert accuracy_problem(asked, E4M3) == asked


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.ROW, Granularity.GROUP])
def test_a_scaled_gemm_has_the_error_of_its_gemm(granularity: Granularity) -> None:
    a = Operand(E4M3, granularity)
    scaled = make_problem("scaled_gemm", (64, 32, 16), a=a)
    assert accuracy_problem(scaled, E4M3) == make_problem("gemm", (2048, 32, 16))
    other = accuracy_problem(scaled, Format.E4M3FNUZ)  # the device's own is another
    assert (other.op, other.m, other.a.granularity) == ("scaled_gemm", 2048, granularity)
    mixed = make_problem("scaled_gemm", (64, 32, 16), a=replace(a, format=Format.E5M2))
    assert accuracy_problem(mixed, E4M3).op == "scaled_gemm"


def test_ops_with_a_norm_have_the_usual_outputs() -> None:
    plain = make_problem("gemm_norm", (64, 256, 128), epilogue="bias+layer+affine")
    assert (plain.out_format, plain.out_granularity) == (Format.BFLOAT16, Granularity.NONE)
    assert plain.shape == (64, 256, 128) and plain.flops == 2 * 64 * 256 * 128
    scaled = make_problem("gemm_norm", (64, 256, 128), epilogue="rms", out_format="e4m3fn")
    assert scaled.out_granularity is Granularity.ROW
    assert plain.bytes_moved - scaled.bytes_moved == 64 * 256 - 4 * 64
    rows = make_problem("norm_quantize", (64, 256), epilogue="block_rms(128)")
    assert (rows.out_format, rows.out_granularity) == (E4M3, Granularity.ROW)
    assert rows.shape == (64, 256) and rows.bytes_moved == 64 * 256 * 3 + 4 * 64
    wide = make_problem("norm_quantize", (64, 256), epilogue="rms", out_format="bfloat16")
    assert wide.out_granularity is Granularity.NONE
    assert str(scaled).endswith("rms out=e4m3fn/row")


@pytest.mark.parametrize(
    ("words", "matrices"),
    [("residual+layer", 1), ("layer+gate", 1), ("rms+cross", 2), ("rms+gate+residual_last", 2)],
)
def test_other_inputs_of_a_norm_count_as_traffic(words: str, matrices: int) -> None:
    for op, shape in (("gemm_norm", (64, 256, 128)), ("norm_quantize", (64, 256))):
        plain, reading = (make_problem(op, shape, epilogue=e) for e in ("layer", words))
        assert reading.bytes_moved - plain.bytes_moved == matrices * 64 * 256 * 2


def test_an_unknown_epilogue_of_a_norm_raises() -> None:
    with pytest.raises(UnknownNameError, match="'layer\\+bias' is unknown"):
        make_problem("gemm_norm", (64, 256, 128), epilogue="layer+bias")
    with pytest.raises(ShapeError, match="norm_quantize: block_rms\\(96\\) of 256 columns"):
        make_problem("norm_quantize", (64, 256), epilogue="block_rms(96)")


def test_error_problems_with_a_norm_keep_norm_and_activation() -> None:
    shape = (64, 256, 128)
    words = "bias+residual+block_rms(128)+affine+silu"
    asked = accuracy_problem(make_problem("gemm_norm", shape, epilogue=words), E4M3)
    assert asked == make_problem("gemm_norm", (2048, 256, 128), epilogue="block_rms(128)+silu")
    for last in ("gate", "cross", "residual_last"):
        found = accuracy_problem(make_problem("gemm_norm", shape, epilogue=f"rms+{last}"), E4M3)
        assert found.epilogue == "rms"
    a = Operand(E4M3, Granularity.GROUP)
    scaled = make_problem("gemm_norm", shape, a=a, epilogue="layer", out_format="e4m3fn")
    plain = make_problem("gemm_norm", shape, epilogue="layer", out_format="e4m3fn")
    assert accuracy_problem(scaled, E4M3) == accuracy_problem(plain, E4M3)
    assert accuracy_problem(scaled, Format.E4M3FNUZ).a.granularity is Granularity.GROUP
    weight = Operand(E4M3, Granularity.BLOCK, Layout.COLUMN)
    prepared = make_problem("gemm_norm", shape, b=weight, prepared=True, epilogue="layer")
    asked = accuracy_problem(prepared, E4M3)
    assert asked == make_problem("gemm_norm", (2048, 256, 128), epilogue="layer")
    rows = make_problem("norm_quantize", (64, 250), epilogue="residual+layer+affine+relu")
    asked = accuracy_problem(rows, E4M3)
    assert (asked.op, asked.m, asked.epilogue, asked.a.alignment) == (
        "norm_quantize", 2048, "layer+relu", 16,
    )  # fmt: skip


def test_only_unquantized_operands_leave_a_choice() -> None:
    shape = (64, 256, 128)
    assert baseline_name(make_problem("gemm_norm", shape)) == "torch.norm_unfused"
    scaled = make_problem("gemm_norm", shape, a=Operand(E4M3, Granularity.ROW))
    assert baseline_name(scaled) is None
    assert baseline_name(make_problem("norm_quantize", (64, 256))) is None
