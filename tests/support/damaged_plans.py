"""Load a file of plans, and damaged ones, with a stand-in for CUDA's driver on the library path."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern.errors import LaunchError
from lokakern.native import build
from lokakern.quantized_tensor import QuantizedTensor

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-2, 300),
    st.sampled_from([2**63 - 1, -(2**63), 2**62, 2**31, 2**32 - 1, 2**20, 2**16]),
)  # fmt: skip


def main(path: Path, examples: int) -> None:
    cxx = build.compiler()
    assert cxx is not None
    module = build.load(build.build(cxx))
    module.bind(QuantizedTensor, LaunchError)
    whole, damaged = path.read_bytes(), path.with_name("damaged.plans")

    def load(data: bytes) -> int:
        damaged.write_bytes(data)
        return module.load_plans(str(damaged), 0)

    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert load(whole) == module.size() == 2
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    assert context.value is None  # as before
    cuda.cuCtxSetCurrent(ctypes.c_void_p(1))  # device 0 is current
    assert module.load_plans(str(path), 1) == 2
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    assert context.value == 1
    assert module.size() == 4  # those of another GPU
    for length in range(len(whole)):
        with pytest.raises(ValueError):
            load(whole[:length])
    with pytest.raises(ValueError, match="1 bytes follow"):
        load(whole + b"\0")
    with pytest.raises(ValueError, match="another version"):
        load(whole.replace(b"plans 2", b"plans 1"))
    with pytest.raises(LaunchError, match="compiled for Imaginary GPX; this GPU is Imaginary GPU"):
        load(whole.replace(b"Imaginary GPU", b"Imaginary GPX"))
    with pytest.raises(ValueError, match="cannot read"):
        module.load_plans(str(path.with_name("missing")), 0)
    with pytest.raises(ValueError, match="cannot read"):
        module.load_plans(str(path.parent), 0)

    def try_to(data: bytes) -> None:
        try:
            assert load(data) >= 0
        except (ValueError, LaunchError):
            module.clear()

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(st.integers(0, len(whole) - 8), NUMBERS, st.integers(0, 8))
    def numbers_are_replaced(place: int, number: int, dropped: int) -> None:
        try_to(whole[:place] + struct.pack("<q", number) + whole[place + dropped :])

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(st.binary(max_size=200), st.integers(0, len(whole)))
    def bytes_are_added(data: bytes, place: int) -> None:
        try_to(whole[:place] + data + whole[place:])
        try_to(whole[:place] + data)

    numbers_are_replaced()
    bytes_are_added()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
