"""Measure what a launch takes the host: by ctypes, as this library does, by cuda.core and by CuPy.

    python scripts/measure_launches.py [--rounds N]

Prints a line of JSON for each kernel: 3 arguments, 16, and 3 with two tensor maps. All launch the
same machine code on torch's current stream, with programmatic dependent launch where they offer it,
from tensors of torch. Rounds of 20 launches and a synchronization alternate in random order, and
the median counts. Needs an NVIDIA GPU, cuda-core and CuPy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lokakern.device import current_device
from lokakern.driver import CudaLaunch, tensor_map
from lokakern.nvrtc import Program, cubin

LAUNCHES = 20  # of a round: the queue of the GPU never fills
POINTERS = {"three": 2, "sixteen": 8, "maps": 2}
SCALARS = {"three": 1, "sixteen": 8, "maps": 1}
MAPS = {"three": 0, "sixteen": 0, "maps": 2}
BOX = (64, 64)
GRID, THREADS = 1, 32


def by_ctypes(name: str, tensors: list[Tensor], scalars: list[int]) -> Callable[[], None]:
    """As this library launches; maps are made by the driver in the first call."""
    launch = CudaLaunch(
        program_of(name), pointers=len(tensors), scalars="i" * len(scalars), threads=THREADS,
        tensor_maps=MAPS[name], programmatic=True,
    )  # fmt: skip
    made = tuple(tensor_map(wide(), BOX) for _ in range(MAPS[name]))
    grid, pointers, values = (GRID, 1, 1), tuple(tensors), tuple(scalars)
    return lambda: launch(grid, pointers, values, made)


def by_cuda_core(name: str, tensors: list[Tensor], scalars: list[int]) -> Callable[[], None]:
    """Pointers are integers, other arguments of NumPy's types or descriptors."""
    import numpy as np
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
    from cuda.core.utils import StridedMemoryView

    Device(0).set_current()
    kernel = ObjectCode.from_cubin(code_of(name)).get_kernel(name)
    config = LaunchConfig(grid=GRID, block=THREADS, programmatic_stream_serialization=True)
    streams: dict[int, Any] = {}  # torch's handles
    views = [StridedMemoryView.from_dlpack(wide(), stream_ptr=-1) for _ in range(MAPS[name])]
    made = [view.as_tensor_map(BOX) for view in views]

    def call() -> None:
        handle = torch._C._cuda_getCurrentRawStream(0)
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = Stream.from_handle(handle)
        launch(stream, config, kernel, *[x.data_ptr() for x in tensors],
               *[np.int32(value) for value in scalars], *made)  # fmt: skip

    return call


def by_cupy(name: str, tensors: list[Tensor], scalars: list[int]) -> Callable[[], None]:
    """Without programmatic dependent launch, which CuPy does not offer."""
    import cupy
    import numpy as np

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code_of(name))
        function = cupy.RawModule(path=file.name).get_function(name)
    maps = [tensor_map(wide(), BOX) for _ in range(MAPS[name])]
    made = [np.frombuffer(ctypes.string_at(m.address, 128), "V128") for m in maps]
    streams: dict[int, Any] = {}

    def call() -> None:
        handle = torch._C._cuda_getCurrentRawStream(0)
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = cupy.cuda.ExternalStream(handle)
        function((GRID,), (THREADS,), (*[np.uintp(x.data_ptr()) for x in tensors],
                                       *[np.int32(value) for value in scalars], *made),
                 stream=stream)  # fmt: skip

    return call


def program_of(name: str) -> Program:
    return Program(str(Path(__file__).parent / "launches.cu"), name)


def code_of(name: str) -> bytes:
    return cubin(program_of(name), current_device("cuda", 0).architecture)


def wide() -> Tensor:
    """What a tensor map describes."""
    return torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16)


def round_us(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter_ns()
    for _ in range(LAUNCHES):
        call()
    spent = time.perf_counter_ns() - begun
    torch.cuda.synchronize()
    return spent / LAUNCHES / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    order = random.Random(0)
    for name in POINTERS:
        tensors = [torch.full((2,), float(i), device="cuda") for i in range(POINTERS[name])]
        scalars = list(range(1, 1 + SCALARS[name]))
        expected = sum(range(POINTERS[name])) + sum(scalars)
        calls: dict[str, Callable[[], None]] = {}
        why: dict[str, str] = {}
        for route in (by_ctypes, by_cuda_core, by_cupy):
            try:
                calls[route.__name__] = call = route(name, tensors, scalars)
                tensors[0].fill_(-1.0)
                call()
                if tensors[0][0].item() != expected:
                    raise RuntimeError(f"wrote {tensors[0][0].item()}, not {expected}")
            except Exception as error:  # of a library that is not this one
                calls.pop(route.__name__, None)
                why[route.__name__] = f"{type(error).__name__}: {error}"
        times: dict[str, list[float]] = {one: [] for one in calls}
        for _ in range(rounds):
            for one in order.sample(list(calls), len(calls)):
                times[one].append(round_us(calls[one]))
        medians = {one: round(statistics.median(us), 2) for one, us in times.items()}
        print(json.dumps({"kernel": name, "us": medians, "failed": why}), flush=True)


if __name__ == "__main__":
    main()
