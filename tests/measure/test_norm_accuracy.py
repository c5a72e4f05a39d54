"""Errors of layers with a norm: after the norm, against float64 of the unquantized operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.measure import accuracy
from lokakern.measure.accuracy import Cell, cells_for, measure_cells
from lokakern.norm import normalize, static_scale
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.records import AccuracyRecord
from lokakern.types import (
    ACCEPTED,
    REALISTIC_DISTRIBUTIONS,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Operand,
    Problem,
    Rejected,
    Support,
    norm_form,
)
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
FP8 = Format.E4M3FN
ROW = Operand(FP8, Granularity.ROW)
STATIC: dict[str, Any] = {"out_format": FP8, "out_granularity": Granularity.TENSOR}
M, N, K = 96, 64, 256
EMULATED, UNFUSED = KERNELS["torch.norm_emulated_row"], KERNELS["torch.norm_unfused"]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", M)
    yield


def layer(epilogue: str, **fields: Any) -> Problem:
    return make_problem("gemm_norm", (5000, N, K), epilogue=epilogue, **fields)


def measured(kernel: Kernel, problem: Problem, distribution: str = "X1") -> AccuracyRecord:
    (cell,) = cells_for([(kernel, problem)], HERE, [distribution], seeds=[5])
    return record_of(cell)


def record_of(cell: Cell) -> AccuracyRecord:
    found: dict[int, AccuracyRecord] = {}
    measure_cells([cell], CPU, HERE, lambda *_: True, found.__setitem__)
    return found[0]


def drawn(distribution: str, n: int = N) -> tuple[Tensor, Tensor]:
    recipe = distribution_named(distribution)
    x = draw_rows(recipe, M, K, 5).float().bfloat16()
    return x, draw_weight(recipe, n, K, 5).float().bfloat16()


def quantized(x: Tensor, granularity: Granularity = Granularity.ROW) -> Tensor:
    return numerics.dequantize(numerics.quantize(x, FP8, granularity), torch.float64)


def row_err(out: Tensor, reference: Tensor) -> float:
    return numerics.measure_errors(out, reference).row_err


def test_errors_are_measured_after_norm_and_activation() -> None:
    problem = layer("bias+residual+layer+affine+hardswish", a=ROW)
    found = measured(EMULATED, problem, "X8")
    x, w = drawn("X8")
    norm = norm_form("layer").norm
    swish = torch.nn.functional.hardswish
    reference = swish(normalize(x.double() @ w.double().t(), norm))
    out = swish(normalize(quantized(x) @ quantized(w).t(), norm)).bfloat16()
    assert found.status == "ok" and found.errors is not None
    assert found.errors.row_err == pytest.approx(row_err(out, reference), rel=1e-3)
    assert found.rows == M and 0 < (found.kernel_err or 0) <= 1
    # What stands around the norm is in no error: bias, residual, weight, gate and cross.
    for text in ("layer+hardswish", "bias+layer+hardswish+residual_last"):
        assert measured(EMULATED, layer(text, a=ROW), "X8").errors == found.errors
    bare = measured(EMULATED, layer("layer", a=ROW), "X8").errors
    assert measured(EMULATED, layer("layer+gate", a=ROW), "X8").errors == bare
    assert bare != found.errors


def test_a_static_scale_is_the_bound_of_the_norm() -> None:
    found = measured(EMULATED, layer("block_rms(16)+hardswish", a=ROW, **STATIC))
    x, w = drawn("X1")
    norm = norm_form("block_rms(16)").norm
    swish = torch.nn.functional.hardswish
    reference = swish(normalize(x.double() @ w.double().t(), norm))
    exact = swish(normalize(quantized(x) @ quantized(w).t(), norm))
    scale = torch.full((1, 1), static_scale(norm, N, FP8))
    out, _ = numerics.quantize_static(exact.float(), FP8, Granularity.TENSOR, scale)
    assert found.status == "ok" and found.errors is not None
    expected = row_err(numerics.dequantize(out, torch.float64), reference)
    assert found.errors.row_err == pytest.approx(expected, rel=1e-2)
    plain = measured(EMULATED, layer("block_rms(16)+hardswish", a=ROW)).errors
    assert plain is not None and plain.row_err < found.errors.row_err


def test_quantized_operands_have_the_cells_of_unquantized_ones() -> None:
    """One budget then applies to FP8, to operands quantized on the fly, and to bfloat16."""
    pairs = [(EMULATED, layer("bias+layer", a=ROW)), (UNFUSED, layer("layer"))]
    cells = cells_for(pairs, HERE, ["X1"], seeds=[0])
    assert [cell.kernel for cell in cells] == [EMULATED, UNFUSED]
    (problem,) = {cell.problem for cell in cells}
    assert problem == accuracy_problem(layer("layer"), FP8)
    assert not problem.a.format.is_fp8
    narrow, wide = (record_of(cell).errors for cell in cells)
    assert narrow is not None and wide is not None
    assert wide.row_err < 0.005 < 0.02 < narrow.row_err < 0.06


def test_kernels_of_one_numerics_class_share_errors() -> None:
    twin = replace(EMULATED, name="other.norm_row")
    rounded = replace(EMULATED, name="other.norm_rounded", accumulation="rounded")
    problem = layer("layer", a=ROW)
    cells = cells_for([(k, problem) for k in (EMULATED, twin, rounded)], HERE, ["X1"], seeds=[0])
    found = {cell.kernel.name: cell.stand_ins for cell in cells}
    assert found == {twin.name: (EMULATED,), rounded.name: ()}


def test_a_kernel_for_one_epilogue_is_not_measured_without_it() -> None:
    def supports(problem: Problem, _device: Device) -> Support:
        return ACCEPTED if problem.epilogue == "cross" else Rejected("computes a cross")

    crossing = replace(EMULATED, name="a.first_by_name", supports_problem=supports)
    pairs = [(kernel, layer("cross", a=ROW)) for kernel in (crossing, EMULATED)]
    (cell,) = cells_for(pairs, HERE, ["X1"], seeds=[0])
    assert (cell.kernel, cell.stand_ins) == (EMULATED, ())


def test_a_composition_gets_unquantized_operands() -> None:
    seen: list[Any] = []

    def launch(a: Tensor, b: Tensor, out: Tensor, epilogue: NormEpilogue, _workspace: Any) -> None:
        seen.append(a)
        left = numerics.quantize(a, FP8, Granularity.ROW)
        right = numerics.quantize(b.t(), FP8, Granularity.ROW).t()
        EMULATED.launch(left, right, out, epilogue, ())

    parts = ("torch.quantize_row", EMULATED.name)
    composed = replace(EMULATED, name="some+other", launch=launch, parts=parts,
                       supports_problem=UNFUSED.supports_problem)  # fmt: skip
    errors = measured(composed, layer("layer")).errors
    assert [x.dtype for x in seen] == [torch.bfloat16]
    assert errors == measured(EMULATED, layer("layer", a=ROW)).errors


def test_a_large_common_mean_increases_errors_of_sums_rounded_before_the_norm() -> None:
    """X13's outputs deviate by a seventh of their mean, which torch rounds with them.

    An output that is rounded once, after the norm, errs as little as on any other distribution.
    """
    unfused = measured(UNFUSED, layer("layer"), "X13").errors
    white = measured(UNFUSED, layer("layer"), "X1").errors
    assert unfused is not None and white is not None
    x, w = drawn("X13")
    reference = normalize(x.double() @ w.double().t(), norm_form("layer").norm)
    once = row_err(reference.bfloat16(), reference)
    assert once < 0.0018 < white.row_err < 0.0025
    assert unfused.row_err > 5 * white.row_err


@pytest.mark.parametrize("distribution", REALISTIC_DISTRIBUTIONS)
def test_correct_kernels_have_small_errors_on_all_distributions(distribution: str) -> None:
    group: dict[str, Any] = {"out_format": FP8, "out_granularity": Granularity.GROUP}
    for kernel, problem in (
        (UNFUSED, layer("layer")),
        (EMULATED, layer("rms+silu", a=ROW)),
        (EMULATED, layer("block_rms(16)+hardswish", a=ROW, **STATIC)),
        (EMULATED, layer("layer", a=ROW, **group)),
        (KERNELS["torch.norm_quantize"], make_problem("norm_quantize", (M, K), epilogue="rms")),
    ):
        found = measured(kernel, problem, distribution)
        assert found.status == "ok", (kernel, problem, found.reason)
        assert found.errors is not None and found.errors.nonfinite_unexpected_count == 0


@pytest.mark.parametrize("distribution", ["X6", "X12"])
def test_a_kernel_without_eps_is_incorrect(distribution: str) -> None:
    """X6 has rows of zeros; the squares of X12 are small beside eps."""

    def launch(a: Any, b: Any, out: Any, epilogue: NormEpilogue, workspace: Any) -> None:
        bare = epilogue._replace(norm=epilogue.norm._replace(eps=0.0))
        EMULATED.launch(a, b, out, bare, workspace)

    careless = replace(EMULATED, name="careless", launch=launch)
    found = measured(careless, layer("rms", a=ROW), distribution)
    assert found.status == "wrong" and found.reason


def test_whole_rows_are_normalized_with_fewer_sampled_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accuracy, "FEWEST_ROWS", 128)
    monkeypatch.setattr(accuracy, "SAMPLED_ELEMENTS", 128 * K)
    problem = make_problem("gemm_norm", (5000, 320, K), epilogue="block_rms(64)", a=ROW)
    found = measured(EMULATED, problem)
    x, w = drawn("X1", 128)
    w = w[torch.arange(320) % 128]
    norm = norm_form("block_rms(64)").norm
    reference = normalize(x.double() @ w.double().t(), norm)
    out = normalize(quantized(x) @ quantized(w).t(), norm).bfloat16()
    assert found.status == "ok" and found.errors is not None
    assert found.errors.row_err == pytest.approx(row_err(out, reference), rel=1e-3)


def test_quantized_norms_are_judged_dequantized() -> None:
    problem = make_problem("norm_quantize", (7, K), epilogue="layer+affine")
    found = measured(KERNELS["torch.norm_quantize"], problem)
    assert found.status == "ok" and found.errors is not None and found.rows == M
    x, _ = drawn("X1")
    reference = normalize(x.double(), norm_form("layer").norm)
    expected = row_err(quantized(reference.float()), reference)
    assert found.errors.row_err == pytest.approx(expected, rel=1e-2)
