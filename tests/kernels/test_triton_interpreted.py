"""Every Triton kernel is correct in Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lokakern.registry.register import KERNELS, load_kernels

pytest.importorskip("triton", reason="needs Triton")
load_kernels()
ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(k.name for k in KERNELS.values() if k.language == "triton" and not k.parts)

PROCESSES = 6  # of which each takes seconds to begin
GROUPS = [NAMES[first::PROCESSES] for first in range(PROCESSES)]


def test_all_ops_have_triton_kernels() -> None:
    """Guards the parametrization below against an import that failed in silence."""
    every = {"quantize", "dequantize", "scaled_gemm", "gemm_norm", "norm_quantize"}
    assert {KERNELS[name].op for name in NAMES} == every


@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
@pytest.mark.sample(every=6)
def test_kernels_are_correct_in_the_interpreter(names: list[str]) -> None:
    """Bytes equal `numerics.quantize`; products and norms stay within a kernel error of 1."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "support" / "interpret.py", *names],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-3000:]}"
    assert ran.stdout.count(": 0 failures\n") == len(names)
