"""Norms of rows in float16, and their gradients, are right, compiled for the CPU."""

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
from lokakern.epilogue import ACTIVATIONS
from lokakern.kernels.cuda import (
    activate_quantize,
    half,
    norm_backward,
    norm_quantize,
    quantize_sums,
)
from lokakern.nn.activations import APPLY
from lokakern.norm import norm_named
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Format, Granularity, NormEpilogue, Rejected
from tests.kernels.test_float16 import FORMS, H200, WIDTHS, hostile, normed
from tests.kernels.test_norm_backward_on_host import CALL
from tests.kernels.test_norm_backward_on_host import HEADER as BACKWARD_HEADER
from tests.support import cuda_host_launch as host
from tests.support import norm_backward_runs
from tests.support.norm_backward_runs import VARIANTS, Variant
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
             "norm_quantize.cu", "half_activate_quantize.cu", "half_norm_quantize.cu", "gelu.cuh",
             "gelu_activate_quantize.cu", "gelu_norm_quantize.cu")  # fmt: skip
    stands = dict.fromkeys(("half_ptx.cuh", "half_relu_ptx.cuh"), HEADER)
    headers = {"ptx.cuh": host.HEADER, "half_on_host.hpp": host.HALF_HEADER,
               "gelu_ptx.cuh": host.GELU_HEADER}  # fmt: skip
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


@pytest.mark.sample(every=2, of=("name",))
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
    for activation in ACTIVATIONS[2:]:
        epilogue = NormEpilogue(activation=activation)
        found = Run(kernels["activate_quantize"], x, None, epilogue, Granularity.ROW)
        found.launch()
        wide = APPLY[activation](x.float())
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


# ---- gradients ----


@pytest.fixture(scope="module")
def backward_folder() -> Path:
    kernels = Path(norm_backward.SOURCE).parent
    names = ("norm_backward.cu", "half_norm_backward.cu", "folds.cuh", "gelu.cuh",
             "gelu_norm_backward.cu")  # fmt: skip
    own = [kernels / name for name in names]
    copies = {path.name: path for path in (*kernels.glob("quantize*.cu*"), *own)}
    headers = dict.fromkeys(("norm.cuh", "norm_backward_ptx.cuh"), BACKWARD_HEADER)
    headers |= {"ptx.cuh": host.HEADER, "half_ptx.cuh": host.HALF_HEADER,
                "gelu_ptx.cuh": host.GELU_HEADER}  # fmt: skip
    return host.sources("half_norm_backward", copies | headers)


@pytest.fixture
def backward(backward_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel with its launcher, which launches on the CPU."""
    monkeypatch.setitem(host.CALLS, "norm_backward", CALL)
    monkeypatch.setitem(host.C_TYPES, "f", ctypes.c_float)
    launch = functools.partial(host.HostLaunch, backward_folder)
    for module in (norm_backward, quantize_sums):
        monkeypatch.setattr(module, "CudaLaunch", launch)
    monkeypatch.setattr(quantize_sums, "bind", functools.cache(quantize_sums.bind.__wrapped__))
    plain = norm_backward.bind.__wrapped__
    bind = functools.cache(lambda signature: half._bound_in_half(plain(signature)))
    code = norm_backward.norm_backward.__code__
    in_half = FunctionType(code, {**vars(norm_backward), "bind": bind})
    return replace(KERNELS["cuda.norm_backward"], launch=in_half)


def gradients(kernel: Any, variant: Variant, m: int, k: int, **given: Any) -> Any:
    found = norm_backward_runs.Run(
        kernel, variant, m, k, "cpu", on_host=True, half=Format.FLOAT16, **given
    )
    assert found.check()
    return found


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.sample(every=4)
def test_gradients_of_every_norm_activation_and_output(backward: Any, variant: Variant) -> None:
    gradients(backward, variant, 140, 512)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("m", "k", "norm"), [
    (1, 8, "layer"), (130, 72, "rms"), (259, 200, "block_rms(8)"), (130, 520, "none"),
    (5, 1032, "layer"), (5, 8192, "rms"), (5, 2056, "layer"),  # 6 s with 8192 columns
])  # fmt: skip
def test_gradients_at_tails_and_of_long_rows(backward: Any, m: int, k: int, norm: str) -> None:
    for out in (Format.E5M2, None):
        gradients(backward, Variant(norm, "silu", out=out), m, k)


@pytest.mark.parametrize("norm", ["layer", "block_rms(64)", "rms"])
def test_gradients_of_hostile_rows(backward: Any, norm: str) -> None:
    """Large, subnormal and zero rows are right; rows with NaN are NaN, and no others."""
    y, dd = (torch.randn(140, 256, generator=torch.Generator().manual_seed(i)) for i in (2, 1))
    y[1], dd[2] = 0.0, 0.0
    y[3] += 64.0
    y[4], y[5], dd[6], dd[7] = y[4] * 1e4, y[5] * 1e-6, dd[6] * 1e-6, dd[7] * 1e4
    y, dd = y.half(), dd.half()
    gradients(backward, Variant(norm, "hardswish"), 140, 256, y=y, dd=dd)
    y[8, 9], dd[9, 3] = torch.nan, torch.inf
    found = gradients(backward, Variant(norm, "hardswish", ()), 140, 256, y=y, dd=dd)
    wrong = (~found.outputs.dy.isfinite()).any(dim=1)
    assert wrong[[8, 9]].all() and int(wrong.sum()) == 2
