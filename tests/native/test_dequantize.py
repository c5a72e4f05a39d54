"""Warm calls of `dequantize` launch CUDA's kernel from C++, also with CuPy's arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern import arrays, jit
from lokakern.driver import CudaLaunch
from lokakern.functional import quantize
from lokakern.kernels.cuda import dequantize
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import GROUP, Granularity, Problem
from tests.support import cupy_like, native

FUNCTION = 0x1234_5678
ROWS, COLUMNS = 24, 272


class Told(CudaLaunch):
    """Tells what a launch on a GPU tells, and launches nothing."""

    def __call__(self, grid: Any, pointers: Any, scalars: Any = (), tensor_maps: Any = ()) -> None:
        if jit.recorder is not None:
            jit.recorder.launched(self, grid, pointers, scalars, tensor_maps, FUNCTION)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[native.FakeDriver]:
    load_kernels()
    monkeypatch.setattr(dequantize, "CudaLaunch", Told)
    monkeypatch.setattr(dequantize, "bind", functools.cache(dequantize.bind.__wrapped__))

    def choose(problem: Problem, _: Tensor) -> Kernel:
        if problem.op == "dequantize":
            return KERNELS[f"cuda.dequantize_{problem.a.granularity.suffix}"]
        return KERNELS[f"torch.quantize_{problem.out_granularity.suffix}"]

    monkeypatch.setattr(quantize, "fastest_within", lambda _: choose)
    with native.in_use() as module, cupy_like.served(module), native.FakeDriver(module) as fake:
        fake.parameter_count = 9
        yield fake


@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scales", dequantize.SCALES, ids=str)
def test_a_warm_call_is_launched_from_cpp(
    scales: Granularity, form: str, driver: native.FakeDriver
) -> None:
    x = lokakern.quantize(torch.randn(ROWS, COLUMNS), scales)
    assert x.scale is not None
    for _ in range(2):
        lokakern.dequantize(x, form)  # by Python
    assert not driver.launches
    again = lokakern.quantize(torch.randn(ROWS, COLUMNS), scales)
    assert again.scale is not None
    out = lokakern.dequantize(again, form)
    ((shape, function, values),) = driver.launches
    piece = 16 // out.element_size()
    pieces = COLUMNS // piece
    blocks = -(-ROWS * pieces // dequantize.THREADS)
    assert shape == (blocks, 1, 1, dequantize.THREADS, 1, 1, 0) and function == FUNCTION
    assert values[:3] == [again.data.data_ptr(), again.scale.data_ptr(), out.data_ptr()]
    sizes = [value & 0xFFFFFFFF for value in values[3:6]]
    assert sizes == [ROWS, COLUMNS, pieces]
    strides = again.scale.stride()
    wanted = strides[1] if scales is Granularity.GROUP else strides[0]
    assert values[6:] == [again.data.stride(0), COLUMNS, wanted]
    assert out.shape == (ROWS, COLUMNS) and str(out.dtype) == f"torch.{form}"
    assert scales is not Granularity.GROUP or (wanted == ROWS and COLUMNS > 2 * GROUP)


def test_a_warm_call_with_arrays_is_launched_from_cpp(
    driver: native.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x: Any = lokakern.quantize(cupy_like.of_tensor(torch.randn(ROWS, COLUMNS)))  # type: ignore[arg-type]
    for _ in range(2):
        lokakern.dequantize(x, "float32")
    assert not driver.launches
    monkeypatch.setattr(quantize, "dequantize_by", None)
    monkeypatch.setattr(arrays, "call", None)
    out: Any = lokakern.dequantize(x, "float32")
    ((_, _, values),) = driver.launches
    assert isinstance(out, cupy_like.Array) and out.shape == (ROWS, COLUMNS)
    assert values[:3] == [x.data.data.ptr, x.scale.data.ptr, out.data.ptr]
