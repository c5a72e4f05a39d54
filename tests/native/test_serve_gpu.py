"""The example program serves an exported model as Python does, without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/serve_cpp"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    given = {**os.environ, "PYTHONPATH": path, "LOKAKERN_NATIVE": ""}  # off in other tests
    return subprocess.run(words, capture_output=True, text=True, env=given, timeout=900)


def checked(*command: object) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.rest
def test_a_program_without_python_gives_equal_bits(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    if torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("the layers of the example were measured on an H200")
    exported = checked(sys.executable, EXAMPLE / "export.py", tmp_path)
    assert "plans" in exported
    build = tmp_path / "build"
    checked("cmake", "-S", EXAMPLE, "-B", build, "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={torch.__path__[0]}")  # fmt: skip
    checked("cmake", "--build", build)
    plans, package = tmp_path / "model.plans", tmp_path / "model.pt2"
    files = (package, tmp_path / "input.pt", tmp_path / "output.pt")
    printed = checked(build / "serve", plans, *files, 20)
    facts = dict(line.split() for line in printed.splitlines())
    assert facts.get("equal_in_graph", "1") == "1"
    output = torch.load(tmp_path / "output.pt")
    assert torch.equal(output, torch.load(tmp_path / "expected.pt"))

    product = torch.cuda.get_device_name().encode()
    other = tmp_path / "other.plans"
    other.write_bytes(plans.read_bytes().replace(product, b"?" * len(product), 1))
    refused = run(build / "serve", other, *files)
    assert refused.returncode == 1
    assert f"this GPU is {product.decode()}" in refused.stderr

    without = tmp_path / "without.plans"
    data = plans.read_bytes()
    without.write_bytes(data[: len(data) // 2])
    cut = run(build / "serve", without, *files)
    assert cut.returncode == 1
    assert "cut off" in cut.stderr
