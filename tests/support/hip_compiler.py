"""HIP kernels compiled for AMD GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "hip"
CLANG = shutil.which("clang++-22")
OPTIONS = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib",
           "-O3", "-std=c++17", "-S", "-o", "-")  # fmt: skip
GPUS = ("gfx942", "gfx950")
MATRIX = {
    "gfx942": "v_mfma_f32_16x16x32_fp8_fp8",
    "gfx950": "v_mfma_scale_f32_16x16x128_f8f6f4",
}
needs_clang = pytest.mark.skipif(CLANG is None, reason="needs clang 22")


def compiled(gpu: str, source: Path, macros: dict[str, int]) -> str:
    """Assembly of a source, which may include the headers of kernels."""
    given = [f"-D{name}={value}" for name, value in macros.items()]
    command = [
        str(CLANG),
        f"--offload-arch={gpu}",
        *OPTIONS,
        *given,
        "-I",
        str(KERNELS),
        str(source),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
