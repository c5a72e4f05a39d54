"""cuda.norm_backward is correct, compiled for the CPU as in test_cuda_on_host.py."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lokakern.kernels.cuda import gradient_sums, norm_backward, quantize_sums
from lokakern.registry.register import KERNELS
from lokakern.sums import column_sums
from lokakern.types import Format
from tests.support import cuda_host_launch as host
from tests.support.kernel_cases import drawn
from tests.support.norm_backward_runs import LASTS, VARIANTS, VECTORS, Run, Variant

HEADER = Path(__file__).parents[1] / "support" / "norm_backward_on_host.hpp"
CALL = """
extern "C" void launch(unsigned blocks, unsigned threads, const char* dd, const char* y,
                       const void* weight, const void* shift, char* dy, unsigned char* data,
                       float* scale, unsigned char* across, float* across_scale, float* parts,
                       int rows, float eps, long long dd_stride, long long y_stride,
                       long long dy_stride, long long data_stride, long long across_stride,
                       long long scale_stride, long long across_scale_stride) {
    forget_told();
    for (int round = 0; round < (CLUSTER > 1 ? 3 : 1); ++round) {
        run_grid(blocks, threads, false, [=] {
            norm_backward(dd, y, weight, shift, dy, data, scale, across, across_scale, parts, rows,
                          eps, dd_stride, y_stride, dy_stride, data_stride, across_stride,
                          scale_stride, across_scale_stride);
        });
    }
}
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    sources = Path(norm_backward.SOURCE).parent
    names = ("norm_backward.cu", "gradient_sums.cu", "folds.cuh", "gelu.cuh",
             "gelu_norm_backward.cu", "half_norm_backward.cu")  # fmt: skip
    own = [sources / name for name in names]
    copies = {path.name: path for path in (*sources.glob("quantize*.cu*"), *own)}
    headers = dict.fromkeys(("norm.cuh", "norm_backward_ptx.cuh"), HEADER)
    headers["gelu_ptx.cuh"] = host.GELU_HEADER
    return host.sources("norm_backward", copies | headers | {"ptx.cuh": host.HEADER})


@pytest.fixture
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host.CALLS, "norm_backward", CALL)
    monkeypatch.setitem(host.C_TYPES, "f", ctypes.c_float)
    launch = functools.partial(host.HostLaunch, folder)
    for module in (norm_backward, gradient_sums, quantize_sums):
        monkeypatch.setattr(module, "CudaLaunch", launch)
        monkeypatch.setattr(module, "bind", functools.cache(module.bind.__wrapped__))


def run(variant: Variant, m: int, k: int, **given: Any) -> Run:
    found = Run(KERNELS["cuda.norm_backward"], variant, m, k, "cpu", on_host=True, **given)
    assert found.check()
    return found


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.sample(every=4)
def test_every_norm_activation_and_output(variant: Variant) -> None:
    run(variant, 140, 512)


@pytest.mark.rest
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("m", [1, 130, 259])
def test_tails_of_rows_and_columns(m: int) -> None:
    sizes = {8: "layer", 72: "rms", 136: "layer", 200: "block_rms(8)", 520: "none"}
    for k, norm in sizes.items():
        for out in (Format.E5M2, None):
            run(Variant(norm, "silu", out=out), m, k)


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("k", "norm"),
    [(1024, "rms"), (1032, "layer"), (2048, "rms"), (2056, "layer"), (4096, "layer"), (8192, "rms"),
     (768, "block_rms(256)")],
)  # fmt: skip
def test_long_rows_are_shared_by_a_cluster(k: int, norm: str) -> None:
    found = run(Variant(norm, "relu", plain=False), 5, k)
    split = norm_backward.split_of(k, found.epilogue.norm.span(k))
    assert split.cluster > 1 and split.cluster * split.teams * split.steps * 128 >= min(k, 256)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("norm", ["layer", "block_rms(64)", "rms"])
def test_a_common_mean_zeros_and_nan(norm: str) -> None:
    y, dd = drawn(140, 256, where="cpu", seed=2), drawn(140, 256, where="cpu", seed=1)
    y[1], dd[2] = 0.0, 0.0
    y[3] += 64
    y[4] *= 1e9
    y[5] *= 1e-9
    dd[6] *= 1e-9
    run(Variant(norm, "hardswish"), 140, 256, y=y, dd=dd)
    y[7, 9], dd[8, 3] = torch.nan, torch.inf
    found = run(Variant(norm, "hardswish", ()), 140, 256, y=y, dd=dd)
    assert found.outputs.dy is not None
    assert int((~found.outputs.dy.isfinite()).any(dim=1).sum()) == 2


@pytest.mark.usefixtures("on_host")
def test_views_are_read_and_padding_is_left() -> None:
    y, dd = (drawn(131, 3, 136, where="cpu", seed=seed)[:, 1] for seed in (1, 2))
    found = run(Variant(), 131, 136, y=y, dd=dd)
    for made in (found.outputs.quantized, found.outputs.quantized_t):
        assert made is not None
        whole = made.data.view(torch.uint8)
        rows, pitch = made.data.shape[0], made.data.stride(0)
        beyond = whole.as_strided((rows, pitch), (pitch, 1))[:, made.data.shape[1] :]
        before = beyond.clone()
        found.launch()
        assert torch.equal(beyond, before)


@pytest.mark.usefixtures("on_host")
def test_a_bias_has_the_sums_of_float32_gradients_in_their_order() -> None:
    for last in LASTS[:2]:
        found = run(Variant("none", last, VECTORS[1]), 16700, 8)
        exact = found.dd.float() * ((found.y > 0) if last == "relu" else 1.0)
        assert found.outputs.sums is not None
        assert torch.equal(found.outputs.sums[0], column_sums(exact))


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("m", "k"), [(1, 8), (130, 264), (16700, 8)])
def test_sums_of_bfloat16_vectors_are_rounded_once(m: int, k: int) -> None:
    found = run(Variant("layer", "relu", out=None), m, k)
    wide, outputs = found.outputs.sums, found.outputs._replace(sums=None)
    assert wide is not None
    operands = (found.dd, found.y, outputs, found.epilogue)
    workspace = found.kernel.workspace(*operands)
    found.kernel.launch(*operands, workspace)  # leaves the sums of each 128 rows
    for dtype in (torch.bfloat16, torch.float32):
        sums = torch.full_like(wide, torch.nan, dtype=dtype)
        gradient_sums.launch_sums(workspace[0], sums.view(-1))
        assert torch.equal(sums, wide.to(dtype))
