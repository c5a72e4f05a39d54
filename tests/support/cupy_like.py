"""An array library on the CPU with the attributes and constructors of CuPy's that C++ uses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import arrays
from lokakern.arrays import Library, QuantizedArray

# Objects that stand for dtypes.
DTYPES = {x: getattr(torch, x) for x in ("bfloat16", "float16", "float32", "uint8")}


class Memory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class Pointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class Array:
    def __init__(
        self, shape: tuple[int, ...], dtype: Any, memptr: Pointer, strides: Any = None
    ) -> None:
        itemsize = torch.empty(0, dtype=DTYPES[dtype]).element_size()
        self.shape, self.dtype, self.data = shape, dtype, memptr
        self.strides = strides or tuple(
            itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))
        )

    @property
    def T(self) -> Array:
        return Array(self.shape[::-1], self.dtype, self.data, self.strides[::-1])


def of_tensor(x: Tensor) -> Array:
    """An array that shares memory and keeps the tensor."""
    item = x.element_size()
    place = Pointer(Memory(x.data_ptr(), x.numel() * item, x, 0), 0)
    strides = tuple(item * step for step in x.stride())
    return Array(tuple(x.shape), str(x.dtype).removeprefix("torch."), place, strides)


def tensor_of(x: Array) -> Tensor:
    """A tensor that shares memory and keeps the array."""
    if min(x.strides, default=0) < 0:
        raise ValueError(f"strides are {x.strides}")
    if str(x.dtype) not in DTYPES:
        raise TypeError(f"no tensor is of {x.dtype}")
    dtype = DTYPES[str(x.dtype)]
    steps = [step // dtype.itemsize for step in x.strides]
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True))
    held = (ctypes.c_uint8 * (max(size, 0) * dtype.itemsize)).from_address(x.data.ptr)
    held.array = x  # type: ignore[attr-defined]
    flat = torch.frombuffer(held, dtype=dtype) if size > 0 else torch.empty(0, dtype=dtype)
    return flat.as_strided(x.shape, steps)


LIBRARY = Library("tests", tensor_of, of_tensor)


class Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@contextmanager
def served(module: Any, **replaced: Any) -> Iterator[Library]:
    """Arrays of this library in calls of Python, and in replays of the C++ library."""
    given: dict[str, Any] = {
        "array": Array, "quantized": QuantizedArray, "library": LIBRARY, "memory": Memory,
        "pointer": Pointer, "current": lambda index: Stream(0), "entered": None,
        "dtypes": list(DTYPES.items()), "is_cuda": False,
    }  # fmt: skip
    given.update(replaced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(arrays._LIBRARIES, Array, LIBRARY)
        assert not module.bind_arrays(**given)  # the layout is not CuPy's
        try:
            yield LIBRARY
        finally:
            module.bind_arrays(**{**given, "array": type("Other", (), {})})
