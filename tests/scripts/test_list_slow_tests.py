"""scripts/list_slow_tests.py: functions whose cases take long, from a report of pytest."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    ("tests.nn.test_a", "test_slow[one]", 0.2, ""),
    ("tests.nn.test_a", "test_slow[two]", 0.5, ""),
    ("tests.nn.test_a", "test_fast[one]", 0.1, ""),
    ("tests.nn.test_a", "test_fast[two]", 0.4, ""),
    ("tests.test_b", "test_alone", 7, ""),
    ("tests.test_b", "test_on_a_gpu", 9, "<skipped/>"),
)


def test_functions_whose_cases_take_long_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, listed = tmp_path / "tests.xml", tmp_path / "slow_tests.txt"
    cases = (
        f'<testcase classname="{path}" name="{name}" time="{seconds}">{more}</testcase>'
        for path, name, seconds, more in CASES
    )
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    script = runpy.run_path(str(ROOT / "scripts" / "list_slow_tests.py"))
    monkeypatch.setitem(script["main"].__globals__, "LISTED", listed)
    monkeypatch.setattr(sys, "argv", ["list_slow_tests.py", str(report)])
    script["main"]()
    slow = ["tests/nn/test_a.py::test_slow", "tests/test_b.py::test_alone"]
    assert listed.read_text().split() == slow
    # Another report: what it does not tell of stays, unless it is gone.
    here = "tests/scripts/test_list_slow_tests.py::test_functions_whose_cases_take_long_are_listed"
    gone = ["tests/no_such_file.py::test_it", f"{here.partition('::')[0]}::test_that_is_gone"]
    listed.write_text("\n".join([*gone, here, "tests/nn/test_a.py::test_fast"]))
    script["main"]()
    assert listed.read_text().split() == sorted([*slow, here])
