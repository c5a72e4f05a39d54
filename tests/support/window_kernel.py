"""The kernel that takes samples of a watch, run on the CPU by the library's own launches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lokakern.kernels.cuda import window_samples as kernel
from lokakern.probe.sample_kernel import sizes
from tests.support import cuda_host_launch as host
from tests.support import native

PARAMETER_BYTES = 4096


class Launches:
    """What the driver was asked for: the blocks of launches, and words that were cleared."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.cleared: list[int] = []
        self.failure = 0


@contextmanager
def on_host() -> Iterator[Launches]:
    """Inside the block the library's launches for the CPU's tensors run there."""
    folder = host.sources(
        "window_samples", {"window_samples.cu": Path(kernel.SOURCE), "ptx.cuh": host.HEADER}
    )
    run: Any = host.compiled(folder, kernel.program())
    run.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
    found = Launches()

    def launch(config: int, function: int, parameters: int, _extra: int) -> int:
        shape = (ctypes.c_uint32 * 7).from_address(config)
        assert function == 1 and tuple(shape[1:3]) == (1, 1)
        found.blocks.append(shape[0])
        run(shape[0], shape[3], ctypes.c_void_p.from_address(parameters).value)
        return found.failure

    def fill(address: int, pattern: int, count: int, _stream: int) -> int:
        found.cleared.append(count)
        ctypes.memset(address, pattern, 4 * count)
        return 0

    functions = native.LAUNCH(launch), native.ENCODE(lambda *_: 1), native.FILL(fill)
    library = native.library()
    library.use_driver(*(ctypes.cast(x, ctypes.c_void_p).value for x in functions))
    library.use_window_kernel(-1, 1, sizes())
    try:
        yield found
    finally:
        library.use_window_kernel(-1, 0, sizes())
        library.use_driver(0, 0, 0)
