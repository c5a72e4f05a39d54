"""The native library in tests: built once, and used by this process inside a block."""

from __future__ import annotations

import ctypes
import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern.errors import LokakernError
from lokakern.native import build, replay
from lokakern.types import Format, QuantizedTensor

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
    names = ("module", "replay", "call_layer", "call_chain", "call_op", "call_sequence", "reason")
    before = {name: getattr(native, name) for name in names}
    native.take(module, "in use")
    module.clear()
    try:
        yield module
    finally:
        module.clear()
        vars(native).update(before)


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


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _A_SCALE, _B_SCALE, _FAST = 3, 7, 8, 17, 18, 25
_BIAS_TYPE, _A_MODE = 26, 31
_DTYPES = {2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}


def _memory(address: int, dtype: torch.dtype, elements: int) -> Tensor:
    held = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=torch.uint8).view(dtype)


class FakeLt:
    """Functions of cuBLASLt on a CPU: column-major products, computed by `torch._scaled_mm`.

    Attributes:
        products, layouts, preferences: Those alive, and what was set of them.
        multiplied: Launches so far.
        asked: Questions for an algorithm so far.
        most_workspace_bytes: What the last question allowed.
        workspaces: Addresses and sizes that launches were given.
        is_capturing: Whether streams say that they capture.
        is_slow: Whether other threads run between the settings of a product.
        is_other: Whether sums are added in another order than torch's.
        failure: The status of every launch.
        algorithms: How many the heuristic finds.
        workspace_bytes: What they need.
    """

    MOST_WORKSPACE_BYTES = 123456  # that torch allows

    def __init__(self, module: Any) -> None:
        self.products: dict[int, dict[int, bytes]] = {}
        self.layouts: dict[int, tuple[torch.dtype, int, int, int]] = {}
        self.preferences: dict[int, int] = {}
        self.multiplied = self.asked = self.most_workspace_bytes = 0
        self.workspaces: list[tuple[int | None, int]] = []
        self.is_capturing = self.is_other = self.is_slow = False
        self.failure, self.algorithms, self.workspace_bytes = 0, 1, 0
        self._module, self._next = module, 100
        self.errors: list[Exception] = []  # that ctypes would drop
        self._functions = [
            ctypes.CFUNCTYPE(_INT, *types)(functools.partial(self._call, function))
            for function, types in (
                (lambda to: self._new(to, {}, 0), [_POINTER]),
                (lambda to, compute, _: self._new(to, self.products, {0: bytes([compute])}),
                 [_POINTER, _INT, _INT]),
                (self._set, [_POINTER, _INT, _POINTER, _SIZE]),
                (lambda x: self._delete(self.products, x), [_POINTER]),
                (lambda to, dtype, *sizes: self._new(to, self.layouts, (_DTYPES[dtype], *sizes)),
                 [_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]),
                (lambda x: self._delete(self.layouts, x), [_POINTER]),
                (lambda to: self._new(to, self.preferences, 0), [_POINTER]),
                (self._prefer, [_POINTER, _INT, _POINTER, _SIZE]),
                (lambda x: self._delete(self.preferences, x), [_POINTER]),
                (self._heuristic, [_POINTER] * 7 + [_INT, _POINTER, _POINTER]),
                (self._multiply, [_POINTER] * 14 + [_SIZE, _POINTER]),
                (lambda _: int(self.is_capturing), [_POINTER]),
            )
        ]  # fmt: skip
        self._functions.append(ctypes.CFUNCTYPE(_SIZE)(lambda: self.MOST_WORKSPACE_BYTES))

    def __enter__(self) -> FakeLt:
        addresses = [ctypes.cast(x, ctypes.c_void_p).value for x in self._functions]
        self._module.use_lt(addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._module.clear()  # products end through these functions
        self._module.use_lt([])
        assert not self.errors, self.errors
        assert not self.products and not self.layouts and not self.preferences

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        try:
            return function(*arguments)
        except Exception as error:
            self.errors.append(error)
            return 99

    def _new(self, to: int, known: dict[int, Any], value: Any) -> int:
        self._next += 1
        known[self._next] = value
        ctypes.c_uint64.from_address(to).value = self._next
        return 0

    def _delete(self, known: dict[int, Any], number: int) -> int:
        del known[number]
        return 0

    def _set(self, product: int, attribute: int, value: int, size: int) -> int:
        self.products[product][attribute] = ctypes.string_at(value, size)
        if self.is_slow:
            time.sleep(1e-3)
        return 0

    def _prefer(self, preference: int, attribute: int, value: int, size: int) -> int:
        assert attribute == 1 and size == 8
        self.preferences[preference] = ctypes.c_uint64.from_address(value).value
        return 0

    def _heuristic(self, _handle: int, product: int, a: int, b: int, c: int, d: int,
                   preference: int, requested: int, found: int, count: int) -> int:  # fmt: skip
        assert requested == 1 and c == d and self.layouts.keys() >= {a, b, c}
        assert self._address(product, _A_SCALE) and self._address(product, _B_SCALE)
        self.asked += 1
        self.most_workspace_bytes = self.preferences[preference]
        ctypes.c_uint64.from_address(found).value = 77
        ctypes.c_uint64.from_address(found + 64).value = self.workspace_bytes
        ctypes.c_int.from_address(count).value = self.algorithms
        return 0

    def _address(self, product: int, attribute: int) -> int:
        return int.from_bytes(self.products[product][attribute], "little")

    def _multiply(self, _handle: int, product: int, alpha: int, a: int, a_layout: int, b: int,
                  b_layout: int, beta: int, c: int, c_layout: int, d: int, d_layout: int,
                  algorithm: int, workspace: int | None, size: int,
                  _stream: int | None) -> int:  # fmt: skip
        if self.failure:
            return self.failure
        self.multiplied += 1
        self.workspaces.append((workspace, size))
        scalars = [ctypes.c_float.from_address(x).value for x in (alpha, beta)]
        facts = self.products[product]
        assert scalars == [1, 0] and ctypes.c_uint64.from_address(algorithm).value == 77
        assert (c, c_layout) == (d, d_layout) and facts[_TRANSPOSE_A] == bytes([1, 0, 0, 0])
        (out_dtype, n, m, n_stride), k = self.layouts[d_layout], self.layouts[a_layout][1]
        assert self.layouts[a_layout][1:3] == (k, n) and self.layouts[b_layout][1:3] == (k, m)
        left, right = (
            _memory(address, self.layouts[layout][0], (rows - 1) * self.layouts[layout][3] + k)
            .as_strided((rows, k), (self.layouts[layout][3], 1))
            for address, layout, rows in ((b, b_layout, m), (a, a_layout, n))
        )  # fmt: skip
        modes = [facts.get(x, bytes(4))[0] for x in (_A_MODE, _A_MODE + 1)]
        assert modes in ([0, 0], [3, 3])
        scales = [
            _memory(self._address(product, attribute), torch.float32, count if modes[0] else 1)
            for attribute, count in ((_B_SCALE, m), (_A_SCALE, n))
        ]
        bias = None
        if facts.get(_EPILOGUE) == bytes([4, 0, 0, 0]):
            assert _DTYPES[facts[_BIAS_TYPE][0]] is out_dtype
            bias = _memory(self._address(product, _BIAS_POINTER), out_dtype, n)
        if self.is_other:
            left, right = (x.view(torch.uint8).flip(1).view(x.dtype) for x in (left, right))
        made = torch._scaled_mm(
            left, right.t(), scales[0][:, None], scales[1][None], bias, None, out_dtype,
            bool(facts[_FAST][0]),
        )  # fmt: skip
        _memory(d, out_dtype, m * n_stride).view(m, n_stride)[:, :n].copy_(made)
        return 0


def calls(
    m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[Tensor], Any]]:
    """Public calls with one left operand, ``[m, k]``."""
    w = torch.randn(n, k, device=device, dtype=dtype)
    bias = torch.randn(n, device=device, dtype=dtype)
    gamma = torch.rand(n, device=device)
    prepared = lokakern.prepare_weight(w, 0.06, (16, 65536))
    weights = {name: lokakern.quantize(w, name).t() for name in ("tensor", "row")}
    residual = torch.randn(m, n, device=device, dtype=dtype)
    form = Format.of(dtype)
    scaled_gemm = functools.partial(lokakern.scaled_gemm, out_format=form)
    static = torch.full((1,), 0.02, device=device)
    quantize = lokakern.quantize
    return {
        "gemm": lambda x: lokakern.gemm(x, w.t(), budget=0.06, bias=bias),
        "bf16": lambda x: lokakern.gemm(x, w.t()),
        "prepared": lambda x: lokakern.gemm(x, prepared, bias=bias),
        "rows": lambda x: scaled_gemm(quantize(x), weights["row"]),
        "tensor": lambda x: scaled_gemm(
            quantize(x, "tensor"), weights["tensor"], bias=bias, activation="relu"),
        "fp8": lambda x: lokakern.scaled_gemm(quantize(x), weights["row"], out_scale=0.05),
        "cross": lambda x: scaled_gemm(
            quantize(x), weights["row"], cross=(residual, residual)),
        "tensorwise": lambda x: quantize(x, "tensor"),
        "1x32": lambda x: quantize(x, "1x32"),
        "power of two": lambda x: quantize(x, power_of_two=True),
        "group": lambda x: quantize(x, "1x128"),
        "block": lambda x: quantize(x, "128x128"),
        "static": lambda x: quantize(x, "tensor", scale=static),
        "transposed": lambda x: quantize(x.t()),
        "both": lambda x: lokakern.quantize_transpose(x, "1x128", column_sums=True),
        "dequantize": lambda x: lokakern.dequantize(quantize(x), form),
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


def compare_bits(
    draw: random.Random, m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Assert that replays of all calls have the bits of Python; the number of calls compared.

    On a CPU the fourth call has to be replayed; on a GPU Python launches kernels of Triton.
    """
    compared = 0
    for name, call in calls(m, n, k, device, dtype).items():
        inputs = [
            torch.randn(m, k, device=device, dtype=dtype) * 10 ** draw.uniform(-2, 2)
            for _ in range(4)
        ]
        own, replay.NATIVE.replay = replay.NATIVE.replay, None
        try:
            expected = [bits(call(x)) for x in inputs]
        except LokakernError:  # this form does not exist for these sizes
            continue
        finally:
            replay.NATIVE.replay = own
        made: list[bool] = []

        def counted(*given: Any, own: Any = own, made: list[bool] = made) -> Any:
            y = own(*given)
            made.append(y is not None and type(y) is not bytes)
            return y

        for x, wanted in zip(inputs, expected, strict=True):
            made.clear()
            poison = torch.empty(1 << 12 if device == "cpu" else 1 << 24, device=device)
            poison.fill_(float("nan"))
            del poison
            replay.NATIVE.replay = counted
            try:
                found = bits(call(x))
            finally:
                replay.NATIVE.replay = own
            assert all(map(torch.equal, found, wanted)), f"{name} at {m}x{n}x{k}"
        assert device != "cpu" or (made and all(made)), f"{name} at {m}x{n}x{k} {dtype}"
        compared += 1
    return compared
