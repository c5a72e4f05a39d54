"""Conditions on problems: the supported expressions, and the refusal of all others."""

from __future__ import annotations

import pytest

from lokakern.errors import SuiteError
from lokakern.problems import make_problem
from lokakern.types import Format, Granularity, Problem
from lokakern.workloads.filters import NAMES, facts_of, parse_condition
from lokakern.workloads.gemm_cases import prepared_cases, quantize_case, scaled_gemm_cases

GEMM = make_problem("gemm", (8192, 512, 256), epilogue="bias")
(PREPARED,) = (
    case.problem
    for case in prepared_cases(
        8192, 512, 256, "X1", Format.E4M3FN, granularities=(Granularity.BLOCK,)
    )
)
(SCALED,) = (
    case.problem
    for case in scaled_gemm_cases(8192, 512, 256, "X1", Format.E4M3FN, (Granularity.ROW,))
)
QUANTIZE = quantize_case(64, 256, Granularity.GROUP, "X1", Format.E4M3FN).problem


@pytest.mark.parametrize(
    ("text", "problem", "holds"),
    [
        ("n * k <= 2**18 and m >= 8192", GEMM, True),
        ("N*K <= 2**16 and M >= 8192", GEMM, False),
        ("n == k == 1024 or m % 2 == 1", GEMM, False),
        ("256 <= k < n < m", GEMM, True),
        ("bias and not prepared", GEMM, True),
        ("epilogue == 'bias'", GEMM, True),
        ("prepared", GEMM, False),
        ("prepared and scale == '128x128'", PREPARED, True),
        ("scale == 'row' and out != 'float32'", SCALED, True),
        ("scale == '1x128' and out == 'e4m3fn'", QUANTIZE, True),
        ("batch + m // 64 - 1 == 1", QUANTIZE, True),
    ],
)
def test_conditions_hold_for_problems(text: str, problem: Problem, holds: bool) -> None:
    assert set(facts_of(problem)) == set(NAMES)
    condition = parse_condition(text)
    assert condition.holds(problem) is holds
    assert str(condition) == text


@pytest.mark.parametrize(
    "text",
    ["", "m >=", "size > 3", "m.bit_length() > 3", "__import__('os')", "m if n else k",
     "[m for m in n]", "m < 'a'", "scale * 9 == 'a'", "9 ** 9 ** 9 > m", "m in (1, 2)", "m << 3",
     "f'{m}' == '1'", "m // (n - n) == 1", "3.5 < m", "(" * 5000],
)  # fmt: skip
def test_other_expressions_raise(text: str) -> None:
    with pytest.raises(SuiteError, match="cannot be computed; expected a comparison of m, n, k"):
        parse_condition(text)
