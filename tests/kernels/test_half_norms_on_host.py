"""Norms of rows in float16 are right, compiled for the CPU as in test_cuda_on_host.py."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from lokakern import jit, numerics
from lokakern.kernels.cuda import activate_quantize, half, norm_quantize
from lokakern.norm import norm_named
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Format, Granularity, NormEpilogue, Rejected
from tests.kernels.test_float16 import FORMS, H200, WIDTHS, hostile, normed
from tests.support import cuda_host_launch as host
from tests.support.norm_runs import Run

load_kernels()
EMULATION = KERNELS["torch.norm_quantize"]
HEADER = Path(__file__).parents[1] / "support" / "half_norm_on_host.hpp"
CALLS = {
    "activate_quantize": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x, unsigned char* data,
                       float* scale, int rows, long long x_stride, long long data_stride) {
    run_grid(blocks, threads, false, [=] {
        activate_quantize(x, data, scale, rows, x_stride, data_stride);
    });
}
""",
    "norm_quantize": """
extern "C" void launch(unsigned blocks, unsigned threads, const void* x, const void* bias,
                       const void* weight, const void* shift, const unsigned short* residual,
                       const unsigned short* first, const unsigned short* second, void* out,
                       float* out_scale, int rows, float eps, long long x_stride,
                       long long out_stride, long long out_scale_stride, long long residual_stride,
                       long long first_stride, long long second_stride) {
    run_grid(blocks, threads, false, [=] {
        norm_quantize(x, bias, weight, shift, residual, first, second, out, out_scale, rows, eps,
                      x_stride, out_stride, out_scale_stride, residual_stride, first_stride,
                      second_stride);
    });
}
""",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    kernels = Path(norm_quantize.SOURCE).parent
    names = ("quantize.cuh", "norm.cuh", "half_quantize.cuh", "activate_quantize.cu",
             "norm_quantize.cu", "half_activate_quantize.cu", "half_norm_quantize.cu")  # fmt: skip
    stands = dict.fromkeys(("half_ptx.cuh", "half_relu_ptx.cuh"), HEADER)
    headers = {"ptx.cuh": host.HEADER, "half_on_host.hpp": host.HALF_HEADER}
    return host.sources("half_norms", {name: kernels / name for name in names} | stands | headers)


class Launch(host.HostLaunch):
    """One that takes no tensor maps."""

    def __call__(self, grid: Any, pointers: Any, scalars: Any, _maps: Any = ()) -> None:
        super().__call__(grid, pointers, scalars)


@pytest.fixture
def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both kernels with their launchers, which launch on the CPU."""
    for name, call in CALLS.items():
        monkeypatch.setitem(host.CALLS, name, call)
    monkeypatch.setitem(host.C_TYPES, "f", ctypes.c_float)
    monkeypatch.setattr(jit, "compute_units", lambda _: 3)
    for module in (activate_quantize, norm_quantize):
        monkeypatch.setattr(module, "CudaLaunch", functools.partial(Launch, folder))
    plain = norm_quantize.bind.__wrapped__
    binds = {
        activate_quantize: functools.cache(activate_quantize.bind.__wrapped__),
        norm_quantize: functools.cache(lambda signature: half._bound_in_half(plain(signature))),
    }
    found = {}
    for module, bind in binds.items():
        name = module.__name__.rsplit(".", 1)[-1]
        function: Any = getattr(module, name)
        launch = FunctionType(function.__code__, {**vars(module), "bind": bind})
        kernel = KERNELS[f"cuda.{name}" if module is norm_quantize else f"cuda.{name}_row"]
        found[name] = replace(kernel, launch=launch)
    return found


def run(kernel: Any, x: torch.Tensor, epilogue: NormEpilogue, granularity: Granularity) -> Any:
    """The outputs of a launch on the CPU; None if the kernel does not take the problem."""
    found = Run(kernel, x, None, epilogue, granularity)
    if isinstance(kernel.supports(found.problem, H200), Rejected):
        return None
    found.launch()
    error, bound = found.error(), kernel.bound_at(found.problem)
    assert error <= bound, f"{found.problem}: {error} > {bound}"
    return found.out


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["norm_quantize", "activate_quantize"])
def test_rows_are_normalized_and_quantized(
    kernels: dict[str, Any], name: str, columns: int
) -> None:
    taken = 0
    for place, (norm, last, vectors) in enumerate(FORMS):
        granularity = (Granularity.ROW, Granularity.GROUP, Granularity.TENSOR)[place % 3]
        granularity = granularity if name == "norm_quantize" else Granularity.ROW
        x, epilogue = normed("cpu", columns, norm, last, vectors)
        taken += run(kernels[name], x, epilogue, granularity) is not None
    assert taken >= 2


def test_relu_and_a_quantizer_give_the_bytes_of_both(kernels: dict[str, Any]) -> None:
    """Of rows with NaN, infinities, subnormals and the largest numbers, which start anywhere."""
    epilogue = NormEpilogue(activation="relu")
    for columns, skipped in itertools.product((8, 100, 2053), (0, 1, 8)):
        x = hostile(40, columns + 24, "cpu")[:, skipped : skipped + columns]
        expected = numerics.quantize(torch.relu(x), Format.E4M3FN, Granularity.ROW)
        found = Run(kernels["activate_quantize"], x, None, epilogue, Granularity.ROW)
        found.launch()
        assert torch.equal(found.out.scale, expected.scale)
        left, right = (q.data.float().nan_to_num(-1.0) for q in (found.out, expected))
        assert torch.equal(left, right)  # with either sign of 0


def test_rows_that_are_not_finite_are_nan_alone(kernels: dict[str, Any]) -> None:
    """As in the emulation: of activations the elements, of norms rows with a NaN."""
    x = hostile(40, 1024, "cpu")
    for activation in ("hardswish", "silu"):
        epilogue = NormEpilogue(activation=activation)
        found = Run(kernels["activate_quantize"], x, None, epilogue, Granularity.ROW)
        found.launch()
        wide = getattr(torch.nn.functional, activation)(x.float())
        expected = numerics.quantize(wide, Format.E4M3FN, Granularity.ROW)
        assert torch.allclose(found.out.scale, expected.scale, rtol=1e-5)
        assert torch.equal(found.out.data.float().isnan(), ~wide.isfinite())
    for norm in ("layer", "rms"):
        given = x, None, NormEpilogue(norm_named(norm)), Granularity.ROW
        found, expected = Run(kernels["norm_quantize"], *given), Run(EMULATION, *given)
        found.launch()
        missing = expected.out.data.float().isnan()
        assert torch.equal(found.out.data.float().isnan(), missing)
        assert missing[x.isnan().any(1)].all() and missing[x.isinf()].all()
        assert not missing[x.isfinite().all(1)].any()
