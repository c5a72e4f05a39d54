"""The native library in tests: built once, and used by this process inside a block."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern.errors import LokakernError
from lokakern.native import build, replay
from lokakern.types import QuantizedTensor

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ctypes.c_int,
)  # fmt: skip
FILL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
)


@functools.cache
def library() -> Any:
    """The library; skips where nothing compiles it."""
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("needs a C++ compiler")
    return build.load(build.build(cxx))


@contextmanager
def in_use() -> Iterator[Any]:
    """This process replays calls inside the block."""
    module, native = library(), replay.NATIVE
    before = (native.module, native.replay, native.reason)
    native.take(module, "in use")
    module.clear()
    try:
        yield module
    finally:
        module.clear()
        native.module, native.replay, native.reason = before


class FakeDriver:
    """Functions of CUDA's driver that note their arguments."""

    def __init__(self, module: Any) -> None:
        self.launches: list[tuple[tuple[int, ...], int, list[int]]] = []
        self.encoded: list[int] = []
        self.failure = 0
        self.parameter_count = 0
        self._module = module
        self._functions = (LAUNCH(self._launch), ENCODE(self._encode), FILL(self._fill))

    def __enter__(self) -> FakeDriver:
        addresses = [ctypes.cast(x, ctypes.c_void_p).value for x in self._functions]
        self._module.use_driver(*addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._module.use_driver(0, 0, 0)

    def _launch(self, config: int, function: int, parameters: int, _extra: int) -> int:
        shape = tuple((ctypes.c_uint32 * 7).from_address(config))
        places = (ctypes.c_void_p * self.parameter_count).from_address(parameters)
        values = [ctypes.c_uint64.from_address(place).value for place in places]
        self.launches.append((shape, function, values))
        return self.failure

    def _encode(self, to: int, dtype: int, rank: int, address: int, *_: int) -> int:
        ctypes.c_uint64.from_address(to).value = address + 1
        self.encoded.append(address)
        return 0

    def _fill(self, *_: int) -> int:
        return 1  # a CPU's memory needs no driver


def calls(m: int, n: int, k: int, device: str) -> dict[str, Callable[[Tensor], Any]]:
    """Public calls with one left operand, ``[m, k]``."""
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    bias = torch.randn(n, device=device, dtype=torch.bfloat16)
    gamma = torch.rand(n, device=device)
    prepared = lokakern.prepare_weight(w, 0.06, (16, 65536))
    weights = {name: lokakern.quantize(w, name).t() for name in ("tensor", "row")}
    residual = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    static = torch.full((1,), 0.02, device=device)
    quantize = lokakern.quantize
    return {
        "gemm": lambda x: lokakern.gemm(x, w.t(), budget=0.06, bias=bias),
        "bf16": lambda x: lokakern.gemm(x, w.t()),
        "prepared": lambda x: lokakern.gemm(x, prepared, bias=bias),
        "rows": lambda x: lokakern.scaled_gemm(quantize(x), weights["row"]),
        "tensor": lambda x: lokakern.scaled_gemm(
            quantize(x, "tensor"), weights["tensor"], bias=bias, activation="relu"),
        "fp8": lambda x: lokakern.scaled_gemm(quantize(x), weights["row"], out_scale=0.05),
        "cross": lambda x: lokakern.scaled_gemm(
            quantize(x), weights["row"], cross=(residual, residual)),
        "tensorwise": lambda x: quantize(x, "tensor"),
        "1x32": lambda x: quantize(x, "1x32"),
        "power of two": lambda x: quantize(x, power_of_two=True),
        "group": lambda x: quantize(x, "1x128"),
        "block": lambda x: quantize(x, "128x128"),
        "static": lambda x: quantize(x, "tensor", scale=static),
        "transposed": lambda x: quantize(x.t()),
        "both": lambda x: lokakern.quantize_transpose(x, "1x128", column_sums=True),
        "dequantize": lambda x: lokakern.dequantize(quantize(x)),
        "norm": lambda x: lokakern.gemm_norm(
            x, w.t(), norm="layer", norm_weight=gamma, residual=residual),
        "norm fp8": lambda x: lokakern.gemm_norm(
            quantize(x), weights["row"], norm="rms", out_granularity="row"),
        "norm_quantize": lambda x: lokakern.norm_quantize(x, norm="rms"),
    }  # fmt: skip


def bits(result: Any) -> list[Tensor]:
    if isinstance(result, tuple):
        return [x for part in result for x in bits(part)]
    if isinstance(result, QuantizedTensor):
        assert result.scale is not None
        return [
            result.data.view(torch.uint8),
            result.scale.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8),
        ]
    return [result.contiguous().view(torch.uint8)]


def compare_bits(draw: random.Random, m: int, n: int, k: int, device: str) -> int:
    """Assert that replays of all calls have the bits of Python; the number of calls compared."""
    compared = 0
    for name, call in calls(m, n, k, device).items():
        inputs = [
            torch.randn(m, k, device=device, dtype=torch.bfloat16) * 10 ** draw.uniform(-2, 2)
            for _ in range(4)
        ]
        own, replay.NATIVE.replay = replay.NATIVE.replay, None
        try:
            expected = [bits(call(x)) for x in inputs]
        except LokakernError:  # this form does not exist for these sizes
            continue
        finally:
            replay.NATIVE.replay = own
        for x, wanted in zip(inputs, expected, strict=True):
            poison = torch.empty(1 << 24 if device == "cuda" else 1 << 12, device=device)
            poison.fill_(float("nan"))
            del poison
            assert all(map(torch.equal, bits(call(x)), wanted)), f"{name} at {m}x{n}x{k}"
        compared += 1
    return compared
