"""Words about wrong elements of outputs, and trials that say them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.measure.time_problem import check_case
from lokakern.measure.wrong_elements import Compared, wrong_words
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device, Format, Granularity, Layout, Operand, QuantizedTensor
from lokakern.workloads.suites import Case

load_kernels()
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
EXACT = torch.arange(1.0, 67 * 90 + 1).view(67, 90).double()


def words_of(found: Tensor, first_row: int = 0) -> str:
    slack = torch.full_like(EXACT, 1e-3)
    return wrong_words(Compared(found, EXACT, slack, 2.0**-9), 1.0, first_row)


def changed(rows: Any, columns: Any, factor: Any) -> Tensor:
    found = EXACT.clone()
    found[rows, columns] *= factor
    return found


EVERY = slice(None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (EXACT * (1 + 2.0**-9), ""),
        (EXACT.bfloat16().double(),
         "1759 of 6030 elements are wrong, the first at row 2, column 76: 256, not 257; only rows "
         "from 2 of 67; all are bfloat16 numbers, as if rounded before they are written"),
        (changed([1, 2, 4, 8, 16, 32, 64], EVERY, 1.01),
         "630 of 6030 elements are wrong, the first at row 1, column 0: 91.91, not 91; off by 1 %: "
         "sums or scales are rounded, or products left out"),
        (EXACT * 0.5, "6030 of 6030 elements are wrong, the first at row 0, column 0: 0.5, not 1; "
                      "each 0.5 times what it should be"),
        (changed(slice(64, None), EVERY, 0.0),
         "270 of 6030 elements are wrong, the first at row 64, column 0: 0, not 5761; only rows "
         "from 64 of 67, past the last whole 64; all of them 0"),
        (changed(EVERY, slice(64, None), float("nan")),
         "1742 of 6030 elements are wrong, the first at row 0, column 64: nan, not 65; only "
         "columns from 64 of 90, past the last whole 64; all of them NaN, as if not written, or "
         "read beyond k"),
        (changed(EVERY, slice(1, None, 4), 3.0),
         "1541 of 6030 elements are wrong, the first at row 0, column 1: 6, not 2; only columns "
         "1 to 89 in steps of 4; each 3 times what it should be"),
        (changed(5, 7, 2.0),
         "1 of 6030 elements is wrong, the first at row 5, column 7: 916, not 458; only row 5; "
         "only column 7"),
        (changed(slice(16, 32), EVERY, float("inf")),
         "1440 of 6030 elements are wrong, the first at row 16, column 0: inf, not 1441; only rows "
         "16 to 31"),
        (EXACT * torch.linspace(2, 3, 67)[:, None],
         "6030 of 6030 elements are wrong, the first at row 0, column 0: 2, not 1; each row is off "
         "by a factor of its own, as without its scale"),
        (EXACT * torch.linspace(2, 3, 90),
         "6030 of 6030 elements are wrong, the first at row 0, column 0: 2, not 1; each column is "
         "off by a factor of its own, as without its scale"),
        (EXACT + torch.linspace(500, 900, 90),
         "6030 of 6030 elements are wrong, the first at row 0, column 0: 501, not 1; each column "
         "is off by a value of its own, as without its bias"),
    ],
    ids=["right", "bfloat16", "loss", "factor", "tail rows", "tail columns", "every 4th", "one",
         "block", "row factor", "column factor", "bias"],
)  # fmt: skip
def test_words_say_where_and_how(found: Tensor, words: str) -> None:
    assert words_of(found) == words


def test_no_pattern_is_told_of_noise() -> None:
    noise = EXACT * (2 + torch.rand(67, 90, generator=torch.Generator().manual_seed(0)))
    noise[::7, ::5] = EXACT[::7, ::5]
    words = words_of(noise, first_row=1000)
    assert words.startswith("5850 of 6030 elements are wrong, the first at row 1000, column 1: ")
    assert ";" not in words


ROW = {
    "a": Operand(Format.E4M3FN, Granularity.ROW),
    "b": Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN),
}


FP8 = {"out_format": Format.E4M3FN, "out_granularity": Granularity.ROW}


@pytest.mark.parametrize(
    ("case", "name", "out_at"),
    [
        (Case.of("scaled_gemm", (67, 90, 200), "X1", **ROW), "torch.emulated_row", 4),
        (Case.of("gemm", (67, 90, 200), "X1"), "torch.bf16", 2),
        (Case.of("gemm", (67, 90, 200), "X1", batch=2), "torch.bf16", 2),
        (Case.of("gemm_norm", (67, 90, 200), "X1", epilogue="bias+layer+affine", **ROW),
         "torch.norm_emulated_row", 2),
        (Case.of("gemm_norm", (67, 90, 200), "X1", epilogue="bias+layer+affine", **ROW, **FP8),
         "torch.norm_emulated_row", 2),
    ],
    ids=["scaled_gemm", "gemm", "batch", "gemm_norm", "FP8"],
)  # fmt: skip
def test_a_trial_says_where_a_product_is_wrong(case: Case, name: str, out_at: int) -> None:
    kernel = KERNELS[name]
    assert check_case(case, kernel, HERE).status == "ok"

    def launch(*given: Any) -> None:
        kernel.launch(*given)
        out = given[out_at]
        (out.scale if isinstance(out, QuantizedTensor) else out)[..., 64:, :].mul_(0.5)

    record = check_case(case, replace(kernel, launch=launch), HERE)
    where = "in batch 0 " if case.problem.batch > 1 else ""
    # Of the 270 elements some are within the bound.
    assert re.fullmatch(
        rf"kernel_err \S+ > \d+: {where}2\d\d of 6030 elements are wrong, the first at row 64, "
        r"column \d: (\S+), not (\S+); only rows from 64 of 67, past the last whole 64; each 0\.5 "
        r"times what it should be",
        record.reason,
    ), record
