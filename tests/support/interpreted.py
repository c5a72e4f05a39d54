"""Run a test's check of a Triton kernel interpreted, in a process of its own.

What `triton.jit` makes under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(module: str) -> None:
    """``python -m module``, which has to end without an error; skipped without Triton."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
