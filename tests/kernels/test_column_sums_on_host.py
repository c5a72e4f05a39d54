"""Sums of columns for gradients of biases, compiled for the CPU as in test_cuda_on_host.py."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from lokakern.kernels.cuda import column_sums as kernel
from lokakern.kernels.cuda import gradient_sums, quantize_sums
from lokakern.sums import column_sums
from tests.support import cuda_host_launch as host


@pytest.fixture(scope="module")
def folder() -> Path:
    sources = Path(kernel.SOURCE).parent
    names = ("column_sums.cu", "gradient_sums.cu", "quantize_sums.cu", "quantize_sums.cuh",
             "half_column_sums.cu", "half_gradient_sums.cu")  # fmt: skip
    copies = {name: sources / name for name in names}
    headers = {"ptx.cuh": host.HEADER, "half_ptx.cuh": host.HALF_HEADER}
    return host.sources("column_sums", copies | headers)


@pytest.fixture
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = functools.partial(host.HostLaunch, folder)
    for module in (kernel, gradient_sums, quantize_sums):
        monkeypatch.setattr(module, "CudaLaunch", launch)
        monkeypatch.setattr(module, "bind", functools.cache(module.bind.__wrapped__))


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("dtype", "half"),
    [
        (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16), (torch.float16, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("m", "n"), [(1, 8), (127, 264), (128, 256), (129, 72), (300, 520), (8400, 16)]
)
def test_sums_have_the_bits_of_the_emulation(
    m: int, n: int, dtype: torch.dtype, half: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(m + n)
    x = torch.randn((m, n + 8), generator=generator) * torch.logspace(-3, 3, n + 8)
    x = x.to(half)[:, :n]  # rows with gaps between
    x[:, 6] = 60000.0
    x[m // 2, 3] = float("inf")
    x[m // 3, 5] = float("nan")
    sums = torch.full((n,), float("nan"), dtype=dtype)
    kernel.launch(x, sums)
    expected = column_sums(x).to(dtype)
    torch.testing.assert_close(sums, expected, rtol=0, atol=0, equal_nan=True)
    assert sums[3].isinf()
    assert sums[5].isnan()
    assert bool(sums[6].isinf()) is (dtype is torch.float16 and m > 1)
