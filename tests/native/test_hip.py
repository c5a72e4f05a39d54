"""Plans with kernels of HIP, launched by a stand-in for AMD's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lokakern.native import build

ROOT = Path(__file__).parents[2]

LAUNCHES = """
import ctypes, sys, torch
hip = ctypes.CDLL(sys.argv[1])
noted = (ctypes.c_uint64 * 16).in_dll(hip, "noted")
from lokakern import jit
from lokakern.errors import LaunchError
from lokakern.native import replayed
from tests.support import native

def launcher(blocks):
    @replayed
    def call(x):
        out = torch.empty(4)
        workspace = torch.empty(8)
        if jit.recorder is not None:
            scalars = [("i", 7)]
            jit.recorder.launched_by_hip(blocks, 256, (x[2:], None, workspace), scalars, 0x1234)
            jit.recorder.launched_by_hip(blocks, 256, (x[2:], None), scalars, 0x1234)
        return out
    return call

with native.in_use() as library, torch.no_grad():
    call, failing = launcher(5), launcher(999)
    for _ in range(3):
        x = torch.empty(16, 4)
        out = call(x)
    expected = [0x1234, 5, 1, 1, 256, 1, 1, 0, 0, 0, x.data_ptr() + 32, 0, 7]
    assert list(noted)[:13] == expected, list(noted)
    failing(x), failing(x)
    try:
        failing(x)
    except LaunchError as error:
        print(error)
"""


@pytest.mark.rest
@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
def test_plans_launch_kernels_of_hip(tmp_path: Path) -> None:
    cxx, made = build.compiler(), tmp_path / "libtorch_hip.so"
    source = str(ROOT / "tests/support/fake_hip.cpp")
    assert cxx is not None
    name = "-Wl,-soname,libtorch_hip.so"
    subprocess.run([cxx, "-shared", "-fPIC", name, "-o", str(made), source], check=True)
    script = [sys.executable, "-c", LAUNCHES, str(made)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "grid 999x1x1, 256 threads, 0 bytes of shared memory: invalid argument (1)\n"
    )
