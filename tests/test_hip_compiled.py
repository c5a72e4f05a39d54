"""HIP kernels compile for gfx942 and gfx950, keep their matrix instruction, and use no scratch.

What they take is compared with kernels/hip/resources.json; `python -m tests.test_hip_compiled`
writes it. Nothing of ROCm is needed, only clang 22 and lld 22.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels" / "hip"
RECORDED = KERNELS / "resources.json"
CLANG = shutil.which("clang++-22")
OPTIONS = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib",
           "-O3", "-std=c++17", "-S", "-o", "-")  # fmt: skip
GPUS = ("gfx942", "gfx950")
MATRIX = {
    "gfx942": "v_mfma_f32_16x16x32_fp8_fp8",
    "gfx950": "v_mfma_scale_f32_16x16x128_f8f6f4",
}
LOCAL_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
TILES = ((32, 32), (64, 64), (64, 128), (128, 128))
VARIANTS = [
    *(("quantize", {"BY_GROUP": group, "WIDE": wide, "ALIGNED": aligned})
      for group in (0, 1) for wide in (0, 1) for aligned in (0, 1)),
    *(("dequantize", {"WIDE": wide, "ROWS_OF_SCALE": rows})
      for wide in (0, 1) for rows in (1, 128)),
    *(("scaled_gemm", {"TILE_M": m, "TILE_N": n, "BY_GROUP": group})
      for m, n in TILES for group in (0, 1)),
]  # fmt: skip
needs_clang = pytest.mark.skipif(CLANG is None, reason="needs clang 22")


def name_of(kernel: str, macros: dict[str, int]) -> str:
    return f"{kernel} " + " ".join(f"{name}={value}" for name, value in macros.items())


@functools.cache
def assembly(gpu: str, number: int) -> str:
    kernel, macros = VARIANTS[number]
    given = [f"-D{name}={value}" for name, value in macros.items()]
    command = [
        str(CLANG),
        f"--offload-arch={gpu}",
        *OPTIONS,
        *given,
        str(KERNELS / f"{kernel}.hip"),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(gpu: str, number: int) -> dict[str, int]:
    """What a kernel takes, as the compiler notes it."""
    text = assembly(gpu, number)

    def noted(name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+)", text)
        assert found, name
        return int(found[1])

    return {
        "vector_registers": noted(r"\.vgpr_count"),
        "scalar_registers": noted(r"\.sgpr_count"),
        "local_bytes": noted(r"\.group_segment_fixed_size"),
        "scratch_bytes": noted(r"\.private_segment_fixed_size"),
        "occupancy": noted("Occupancy"),
        "matrix_instructions": text.count(MATRIX[gpu]),
    }


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda i: name_of(*VARIANTS[i]))
def test_a_kernel_compiles_into_what_was_recorded(gpu: str, number: int) -> None:
    found = resources(gpu, number)
    kernel, macros = VARIANTS[number]
    assert found["scratch_bytes"] == 0
    assert found["local_bytes"] <= LOCAL_BYTES[gpu]
    text = assembly(gpu, number)
    if kernel == "scaled_gemm":
        assert found["matrix_instructions"] > 0 and "ds_read_b128" in text
        assert ("global_load_lds_dwordx4" in text) == (gpu == "gfx950")
        twice = macros["TILE_M"] * macros["TILE_N"] <= 64 * 64
        assert found["occupancy"] >= (2 if twice else 1)
    else:
        assert found["occupancy"] >= 8
        assert "v_cvt_" in text  # FP8 by the instruction, not by arithmetic
    recorded = json.loads(RECORDED.read_text())[gpu][name_of(kernel, macros)]
    assert found == recorded, "another compiler, or `python -m tests.test_hip_compiled`"


def main() -> None:
    every = {
        gpu: {name_of(*VARIANTS[i]): resources(gpu, i) for i in range(len(VARIANTS))}
        for gpu in GPUS
    }
    RECORDED.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
