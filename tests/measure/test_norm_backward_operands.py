"""Operands of norm_backward: laid out as a launch wants them, and a wrong kernel is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.gradients import NormGradients
from lokakern.measure import operands as common
from lokakern.measure.accuracy import cells_for, measure_cells
from lokakern.measure.norm_operands import NormBackwardOperands, operands_of
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Format, Granularity, Operand, Problem
from lokakern.workloads.norm_cases import norm_backward_cases

load_kernels()
CPU, HERE = torch.device("cpu"), current_device("cpu")
TORCH = KERNELS["torch.norm_backward"]
SEEDS = (0,)  # of everything drawn here


def problem(m: int, k: int, epilogue: str, **fields: Any) -> Problem:
    return make_problem("norm_backward", (m, k), epilogue=epilogue, **fields)


def made_of(asked: Problem, distribution: str = "X12", cold: bool = False) -> NormBackwardOperands:
    made = operands_of(asked, distribution, CPU, HERE, cold=cold)
    assert isinstance(made, NormBackwardOperands)
    made.poison()
    return made


ASKED = [
    problem(300, 72, "bias+residual+layer+affine+silu", out_format=Format.E5M2),
    problem(128, 256, "block_rms(64)+hardswish", out_format=Format.E4M3FN),
    problem(2500, 40, "bias+rms+affine", out_format=Format.BFLOAT16),
    problem(7, 24, "relu"),
    problem(128, 128, "bias+layer+affine+silu", a=Operand(Format.FLOAT16), out_format=Format.E5M2),
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_correct_kernel_passes_and_one_without_outputs_fails(asked: Problem) -> None:
    for distribution in ("X1", "X12", "X13"):
        made = made_of(asked, distribution)
        error, wrong = made.check(TORCH)
        assert wrong or error.maximum > TORCH.bound_at(asked)
        before = made.fingerprint()
        for number in range(len(made.sets)):
            made.call_of(TORCH, number)()
        assert made.fingerprint() == before
        error, wrong = made.check(TORCH)
        assert not wrong and error.maximum <= TORCH.bound_at(asked)


@pytest.mark.parametrize("part", ["dy", "data", "scale", "data_t", "scale_t", "sums"])
def test_one_incorrect_element_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for elements in (common.CHECKED_ELEMENTS, 300 * 72):
        monkeypatch.setattr(common, "CHECKED_ELEMENTS", elements)
        made = made_of(ASKED[0])
        made.call_of(TORCH, 0)()
        out: NormGradients = made.sets[0][-1]
        assert out.dy is not None and out.quantized is not None and out.quantized_t is not None
        wrong = {
            "dy": out.dy, "data": out.quantized.data, "scale": out.quantized.scale,
            "data_t": out.quantized_t.data, "scale_t": out.quantized_t.scale, "sums": out.sums,
        }[part]  # fmt: skip
        assert wrong is not None
        at = (5, 17) if wrong.shape[1] > 17 else (5, 0)
        if part == "sums":
            at = (1, 17)
        if wrong.dtype.itemsize == 1:
            byte = wrong.view(torch.uint8)
            byte[at] ^= 0x40
        else:
            wrong[at] = 1.5 * wrong[at] + 0.5
        _, found = made.check(TORCH)
        assert found, part


def test_rows_that_are_not_compared_are_searched_for_unwritten_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "CHECKED_ELEMENTS", 256 * 40)
    asked = problem(3000, 40, "layer", out_format=Format.E5M2)
    made = made_of(asked)
    made.call_of(TORCH, 0)()
    assert made.check(TORCH)[1] == ""
    out: NormGradients = made.sets[0][-1]
    assert out.quantized_t is not None
    out.quantized_t.data.view(torch.uint8)[3, 128:2900] = out.quantized_t.format.nan_byte
    assert made.check(TORCH)[1]


def test_unmeasurable_problems_raise() -> None:
    for asked in (
        problem(64, 32, "layer", out_granularity=Granularity.ROW),
        replace(problem(64, 32, "layer"), a=Operand(Format.FLOAT32)),
    ):
        with pytest.raises(MeasurementError, match="norm_backward"):
            made_of(asked)


def test_bytes_moved_count_inputs_and_outputs() -> None:
    asked = problem(256, 128, "bias+residual+layer+affine", out_format=Format.E5M2)
    elements = 256 * 128
    scales = 4 * (256 + 128 * 2)
    assert asked.bytes_moved == elements * (2 + 2 + 1 + 1 + 2) + scales + 3 * 128 * 4
    plain = problem(256, 128, "rms", out_format=Format.BFLOAT16)
    assert plain.bytes_moved == elements * 6


def test_errors_are_measured_on_sampled_gradients() -> None:
    records = []
    pairs = [(TORCH, case.problem) for case in norm_backward_cases(256, 128, Format.E4M3FN)]
    cells = cells_for(pairs, HERE, ("X12",), (0,))
    assert len(cells) == 4
    measure_cells(cells, CPU, HERE, lambda *_: True, lambda _, record: records.append(record))
    assert [record.status for record in records] == ["ok"] * 4
    errors = {str(cell.problem.out_format): record.errors.row_err
              for cell, record in zip(cells, records, strict=True) if record.errors}  # fmt: skip
    assert errors["bfloat16"] < 0.005 < 0.04 < errors["e5m2"] < 0.08
