"""Misses: the counts, the ledger and the commands that measure them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lokakern.errors import MeasurementError
from lokakern.problems import make_problem
from lokakern.selection import misses, remedies
from lokakern.types import Device, Format, Layout, Operand, Problem

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
CPU = Device("cpu", "some CPU", "x86_64", 2, 16)
PROBLEM = make_problem("gemm", (16, 32, 64))
ONE_ROW = make_problem("gemm", (1, 32, 65))


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "deep" / "user.sqlite"))
    misses._COUNTS.clear()
    yield tmp_path / "deep" / "misses.jsonl"
    misses._COUNTS.clear()


def test_misses_are_counted_by_problem_and_device(ledger: Path) -> None:
    other = replace(PROBLEM, m=17)
    for problem, device in ((other, CPU), (PROBLEM, H200), (PROBLEM, CPU), (PROBLEM, H200)):
        misses.record(problem, device)
    assert misses.ledger_path() == ledger and not ledger.exists()
    misses.save()
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [(row["problem"]["m"], row["device"], row["count"]) for row in rows] == [
        (17, "some CPU", 1), (16, "NVIDIA H200", 2), (16, "some CPU", 1)
    ]  # fmt: skip
    assert "key" not in rows[0]["problem"]
    assert misses.read() == [(PROBLEM, 3), (other, 1)]  # most frequent first
    misses.save()
    assert misses.read() == [(PROBLEM, 3), (other, 1)], "what was saved is not saved again"
    misses.record(other, CPU)
    misses.save()
    assert misses.read() == [(PROBLEM, 3), (other, 2)]


def test_misses_are_saved_once_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(misses.atexit, "register", registered.append)
    misses.record(PROBLEM, CPU)
    misses.record(replace(PROBLEM, m=17), CPU)
    assert registered == [misses.save]


def test_the_number_of_counted_problems_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MOST_COUNTED", 3)
    for m in (16, 17, 18, 19, 20, 16):
        misses.record(replace(PROBLEM, m=m), CPU)
    counts = {problem.m: count for (problem, _), count in misses._COUNTS.items()}
    assert counts == {16: 2, 17: 1, 18: 1}


def test_a_ledger_that_is_too_large_begins_anew(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misses.record(PROBLEM, CPU)
    misses.save()
    size = ledger.stat().st_size
    for largest, count in ((size, 2), (2 * size - 1, 1)):
        monkeypatch.setattr(misses, "LARGEST_FILE_BYTES", largest)
        misses.record(PROBLEM, CPU)
        misses.save()
        assert misses.read() == [(PROBLEM, count)]


def test_a_ledger_that_cannot_be_written_loses_only_misses(ledger: Path) -> None:
    ledger.mkdir(parents=True)
    misses.record(PROBLEM, CPU)
    misses.save()
    assert misses.read() == [] and not misses._COUNTS


def test_misses_that_cannot_be_measured_are_not_read() -> None:
    misses.record(replace(PROBLEM, out_strided=True), CPU)
    misses.record(PROBLEM, CPU)
    misses.save()
    assert misses.read() == [(PROBLEM, 1)]


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (PROBLEM, None),
        (make_problem("gemm", (16, 33, 65)), None),
        (replace(ONE_ROW, a=replace(ONE_ROW.a, alignment=16)), None),
        (ONE_ROW, "a is not row-major and aligned"),
        (replace(PROBLEM, a=replace(PROBLEM.a, layout=Layout.COLUMN)), "a is not row-major"),
        (replace(PROBLEM, a=replace(PROBLEM.a, alignment=2)), "a is not row-major and aligned"),
        (replace(PROBLEM, k=65), "a is not row-major and aligned"),  # 130 bytes a row
        (replace(PROBLEM, b=Operand(Format.BFLOAT16, layout=Layout.ROW)), "b is not weight.t()"),
        (replace(PROBLEM, b=Operand(Format.BFLOAT16, layout=Layout.COLUMN, alignment=8)),
         "b is not aligned"),
        (replace(PROBLEM, out_strided=True), "out is a slice"),
        (replace(PROBLEM, m=0), "it has no rows"),
        (make_problem("quantize", (16, 64)), None),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_layouts_have_a_reason(problem: Problem, why: str | None) -> None:
    found = remedies.why_not_measurable(problem)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_rows_of_fp8_are_always_aligned() -> None:
    a = Operand(Format.E4M3FN, alignment=16)
    assert remedies._natural_alignment(16, 65, a) == 16
    assert remedies._natural_alignment(16, 65, replace(a, format=Format.BFLOAT16)) == 2
    assert remedies._natural_alignment(2, 65, replace(a, format=Format.FLOAT32)) == 4
    assert remedies._natural_alignment(1, 65, replace(a, format=Format.BFLOAT16)) == 16


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        make_problem("gemm", (16, 32, 64), epilogue="bias"),
        make_problem("quantize", (16, 64)),
        make_problem("gemm_norm", (64, 96, 32), epilogue="rms"),
    ],
    ids=str,
)
def test_a_sweep_command_parses_to_its_problem(problem: Problem) -> None:
    words = shlex.split(remedies.sweep_command(problem))
    assert words[:4] == ["python", "-m", "lokakern.bench", "sweep"] and len(words) == 6
    if problem == PROBLEM:
        assert words[4:] == ["--shape", "16,32,64"]
    else:
        assert words[4] == "--problem"
        assert misses.parse(words[5]) == problem


@pytest.mark.parametrize(
    "change",
    [{"m": 0}, {"n": -1}, {"k": 1.5}, {"m": True}, {"op": "sing"}, {"a": "bf17"}, {"k": None}],
    ids=str,
)
def test_malformed_problems_are_refused(change: dict[str, Any]) -> None:
    text = json.dumps({**misses.plain(PROBLEM), **change})
    with pytest.raises(MeasurementError, match="which is no problem"):
        misses.parse(text)


@pytest.mark.parametrize(("code", "good"), [(0, True), (5, True), (1, False), (-9, False)])
def test_a_failed_sweep_process_raises_with_its_output(
    code: int, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], **_: Any) -> Any:
        ran.append(words)
        return SimpleNamespace(returncode=code, stderr="x" * 3000 + "why")

    monkeypatch.setattr(subprocess, "run", run)
    if good:
        misses.measure(PROBLEM)
    else:
        with pytest.raises(MeasurementError, match=rf"16,32,64 ended with {code}: x+why$"):
            misses.measure(PROBLEM)
    assert ran == [[sys.executable, "-m", "lokakern.bench", "sweep", "--shape", "16,32,64"]]
    with pytest.raises(MeasurementError, match="cannot be measured: out is a slice"):
        misses.measure(replace(PROBLEM, out_strided=True))
    assert len(ran) == 1
