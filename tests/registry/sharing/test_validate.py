"""Impossible problems in a foreign database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lokakern.problems import make_problem
from lokakern.registry.sharing.validate import MODULE, _why_no_problem
from lokakern.types import Problem

GEMM = make_problem("gemm", (16, 32, 64))
NORM = make_problem("gemm_norm", (16, 96, 64), epilogue="block_rms(32)")
NORM_QUANTIZE = make_problem("norm_quantize", (16, 64), epilogue="rms")


@pytest.mark.parametrize(
    "problem",
    [
        GEMM, NORM, NORM_QUANTIZE, make_problem("quantize", (16, 64)), replace(GEMM, m=0),
        replace(GEMM, m=1, n=1, k=1),
    ],
    ids=str,
)  # fmt: skip
def test_a_possible_problem_is_accepted(problem: Problem) -> None:
    assert _why_no_problem(problem) is None


@pytest.mark.parametrize(
    ("problem", "change", "why"),
    [
        (GEMM, {"op": "convolve"}, "op is 'convolve'"),
        (GEMM, {"b": None}, "b of gemm is None"),
        (make_problem("quantize", (16, 64)), {"b": GEMM.b}, "b of quantize is "),
        (GEMM, {"m": -1}, "sizes are m=-1 n=32 k=64 batch=1"),
        (GEMM, {"n": 0}, "sizes are m=16 n=0"),
        (GEMM, {"k": 0}, "sizes are m=16 n=32 k=0"),
        (GEMM, {"batch": 0}, "sizes are m=16 n=32 k=64 batch=0"),
        (NORM, {"epilogue": "block_rms(64)"}, "epilogue is 'block_rms(64)' ("),  # of 96 columns
        (NORM, {"epilogue": "sing"}, "epilogue is 'sing' ("),
        (NORM_QUANTIZE, {"epilogue": "block_rms(48)"}, "epilogue is 'block_rms(48)' ("),  # of 64
    ],
    ids=str,
)
def test_an_impossible_problem_has_a_reason(
    problem: Problem, change: dict[str, Any], why: str
) -> None:
    found = _why_no_problem(replace(problem, **change))
    assert found is not None and found.startswith(why)


def test_a_norm_spans_columns_of_the_product_or_of_its_input() -> None:
    """96 of n and 64 of k: each is divided by a block that does not divide the other."""
    assert _why_no_problem(replace(NORM, epilogue="block_rms(48)")) is None
    assert _why_no_problem(replace(NORM_QUANTIZE, epilogue="block_rms(64)")) is None


@pytest.mark.parametrize(
    ("module", "good"),
    [
        ("triton/scaled_gemm", True), ("compositions", True), ("python:acme.kernels", True),
        ("package:acme==1.0", True), ("../secrets", False), ("/etc/passwd", False), ("", False),
        ("triton/a b", False),
    ],
)  # fmt: skip
def test_modules_are_names_of_files_or_packages(module: str, good: bool) -> None:
    assert (MODULE.fullmatch(module) is not None) is good
