"""GELU of gelu.cuh against float64, compiled for the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from lokakern.gradients import slope
from lokakern.kernels.cuda import gelu
from lokakern.registry.ops import ACTIVATIONS
from tests.support import cuda_host_launch as host

SOURCE = """
#define __device__
#define __forceinline__ inline
#include <cmath>
#include "gelu.cuh"
extern "C" void values(const float* v, float* value, float* slope, int count) {
    for (int i = 0; i < count; ++i) value[i] = gelu(v[i]), slope[i] = gelu_slope(v[i]);
}
"""


def values_of(name: str, v: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    (folder / "gelu_ptx.cuh").write_text(f"#include <cmath>\n{host.GELU_HEADER.read_text()}")
    (folder / "gelu.cuh").write_text(Path(gelu.__file__).with_suffix(".cuh").read_text())
    (folder / "gelu.cpp").write_text(SOURCE)
    by_tanh = f"-DBY_TANH={gelu.MACROS[name]['BY_TANH']}"
    library = folder / f"{name}.so"
    command = ["g++", "-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", by_tanh]
    subprocess.run([*command, folder / "gelu.cpp", "-o", library], check=True)
    found = [torch.full_like(v, torch.nan) for _ in range(2)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (v, *found)]
    ctypes.CDLL(str(library)).values(*pointers, len(v))
    return found


@pytest.mark.parametrize("name", gelu.MACROS)
def test_values_and_slopes_are_near_those_of_float64(name: str, tmp_path: Path) -> None:
    v = torch.cat([torch.linspace(-30, 30, 400001), torch.logspace(-40, 18, 500),
                   -torch.logspace(-40, 18, 500)])  # fmt: skip
    value, found = values_of(name, v, tmp_path)
    exact, exact_slope = ACTIVATIONS[name][0](v.double()), slope(v.double(), name)
    error = (value.double() - exact).abs()
    assert bool((error <= 7e-7 + 2.0**-22 * exact.abs()).all())
    inner = (v >= -4.5) & (v.abs() > 1e-30)
    assert bool((error[inner] <= 8e-4 * exact[inner].abs()).all())
    assert bool((error[v.abs() < 1] <= 2e-6 * exact[v.abs() < 1].abs() + 1e-44).all())
    usual = v.abs() < 1e4  # by tanh that of 1e13 is NaN, torch's only that of 2e19
    assert bool(((found.double() - exact_slope).abs() <= 2.5e-6)[usual].all())


@pytest.mark.parametrize("name", gelu.MACROS)
def test_what_is_not_finite_is_as_in_torch(name: str, tmp_path: Path) -> None:
    v = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, -0.0])
    value, _ = values_of(name, v, tmp_path)
    assert torch.equal(value.isnan(), torch.tensor([1, 0, 1, 0, 0, 0, 0]).bool())
    assert value[1] == torch.inf and value[3] == v[3] and value[4] == 0
    assert not value[5:].any() and bool(value[6].signbit())
