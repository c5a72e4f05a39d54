"""Triton's interpreter rounds as GPUs do, and is left alone where lokakern knows no better."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lokakern.triton_interpreter import is_interpreted

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import torch
import triton
import triton.language as tl

from lokakern.triton_interpreter import make_exact


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def multiply(a, b, d, SUMS: tl.constexpr):
    at = tl.arange(0, 16)
    place = at[:, None] * 16 + at[None, :]
    tl.store(d + place, tl.dot(tl.load(a + place), tl.load(b + place), out_dtype=SUMS))


make_exact()
make_exact()  # once is enough
torch.manual_seed(0)
x = torch.randn(4096)
x[:2] = torch.tensor([1 + 2**-8 + 2**-9, float("nan")])
for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float64):
    y = torch.empty(4096, dtype=dtype)
    cast[1,](x, y, N=4096)
    print("cast", dtype, torch.equal(y.double().nan_to_num(9), x.to(dtype).double().nan_to_num(9)))
for kind, sums, dtype in (
    (torch.int8, tl.int32, torch.int32), (torch.float16, tl.float16, torch.float16),
    (torch.float8_e5m2, tl.float32, torch.float32),
):
    a, b = (torch.randint(-4, 4, (16, 16)).to(kind) for _ in range(2))
    d = torch.empty(16, 16, dtype=dtype)
    multiply[1,](a, b, d, SUMS=sums)
    print("dot", kind, torch.equal(d.double(), a.double() @ b.double()))
"""


def test_conversions_round_to_nearest_even_and_other_types_still_work(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "program.py"],
        env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count(" True\n") == len(ran.stdout.splitlines()) == 7, ran.stdout


def test_it_is_interpreted_where_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="needs Triton")
    for value in ("", "0", "1", "on", "True", "false", "YES", "2", "y", "no"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        try:
            assert is_interpreted() is knobs.runtime.interpret, value
        except ValueError:  # triton itself takes no such value
            assert not is_interpreted()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not is_interpreted()
