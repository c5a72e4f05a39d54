"""CUDA kernels compiled for the CPU, and their launches."""

from __future__ import annotations

import copy
import ctypes
import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from lokakern.nvrtc import Program
from tests.support.sharing import made_once, shared_folder

HEADER = Path(__file__).with_name("cuda_on_host.hpp")
NORM_HEADER = Path(__file__).with_name("norm_backward_on_host.hpp")
TOGETHER_HEADER = Path(__file__).with_name("quantize_together_on_host.hpp")
GELU_HEADER = Path(__file__).with_name("gelu_on_host.hpp")
HALF_HEADER = Path(__file__).with_name("half_on_host.hpp")
SHORT_HEADER = Path(__file__).with_name("quantize_short_on_host.hpp")
DEQUANTIZE_HEADER = Path(__file__).with_name("dequantize_on_host.hpp")
RUNTIME = Path(__file__).with_name("cuda_on_host.cpp")
FOUND = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
# `make` installs Zig, which brings a C++ compiler, where there is none.
COMPILER = [FOUND] if FOUND else [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=all"]
IS_GCC = bool(FOUND) and Path(FOUND).name == "g++"
# Only the runtime needs C++'s library, whose symbols take the linker a third of all its time.
LINKER = [str(Path(FOUND).with_name("gcc"))] if FOUND and IS_GCC else COMPILER
OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-w"]
CALLS = {
    "quantize": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x, unsigned char* data,
                       float* scale, int rows, long long x_stride, long long data_stride,
                       long long scale_stride) {
    run_grid(blocks, threads, CLUSTER > 1, [=] {
        quantize(x, data, scale, rows, x_stride, data_stride, scale_stride);
    });
}
""",
    "quantize_short": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x, unsigned char* data,
                       float* scale, int rows) {
    run_grid(blocks, threads, false, [=] { quantize_short(x, data, scale, rows); });
}
""",
    "quantize_tile": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* y, unsigned char* data,
                       unsigned char* across, float* scale, float* across_scale, unsigned* amax,
                       float* parts, int rows, int columns, long long y_stride,
                       long long data_stride, long long across_stride, long long scale_stride,
                       long long across_scale_stride) {
    run_grid(blocks, threads, false, [=] {
        quantize_tile(y, data, across, scale, across_scale, amax, parts, rows, columns, y_stride,
                      data_stride, across_stride, scale_stride, across_scale_stride);
    });
}
""",
    "quantize_together": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x0, unsigned char* data0,
                       float* scale0, const char* x1, unsigned char* data1, float* scale1,
                       const char* x2, unsigned char* data2, float* scale2, int rows0, int columns0,
                       int end0, int rows1, int columns1, int end1, int rows2, int columns2,
                       int end2, long long x_stride0, long long data_stride0, long long x_stride1,
                       long long data_stride1, long long x_stride2, long long data_stride2) {
    forget_told();
    run_grid(blocks, threads, true, [=] {
        quantize_together(x0, data0, scale0, x1, data1, scale1, x2, data2, scale2, rows0, columns0,
                          end0, rows1, columns1, end1, rows2, columns2, end2, x_stride0,
                          data_stride0, x_stride1, data_stride1, x_stride2, data_stride2);
    });
}
""",
    "quantize_tiles_together": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x0, unsigned char* data0,
                       float* scale0, const char* x1, unsigned char* data1, float* scale1,
                       int rows0, int columns0, int rows1, int columns1, int end,
                       long long x_stride0, long long data_stride0, long long scale_stride0,
                       long long x_stride1, long long data_stride1, long long scale_stride1) {
    run_grid(blocks, threads, false, [=] {
        quantize_tiles_together(x0, data0, scale0, x1, data1, scale1, rows0, columns0, rows1,
                                columns1, end, x_stride0, data_stride0, scale_stride0, x_stride1,
                                data_stride1, scale_stride1);
    });
}
""",
    "quantize_scales": """
extern "C" void launch(unsigned blocks, unsigned threads, float* scale, float* other, int count,
                       int others) {
    run_grid(blocks, threads, false, [=] { quantize_scales(scale, other, count, others); });
}
""",
    "quantize_sums": """
extern "C" void launch(unsigned blocks, unsigned threads, const float* parts, float* sums,
                       int tiles, int columns) {
    run_grid(blocks, threads, false, [=] { quantize_sums(parts, sums, tiles, columns); });
}
""",
    "gradient_sums": """
extern "C" void launch(unsigned blocks, unsigned threads, const float* parts, unsigned short* sums,
                       int tiles, int columns) {
    run_grid(blocks, threads, false, [=] { gradient_sums(parts, sums, tiles, columns); });
}
""",
    "sum_parts": """
extern "C" void launch(unsigned blocks, unsigned threads, const float* parts, char* out, int count,
                       int elements) {
    run_grid(blocks, threads, false, [=] { sum_parts(parts, out, count, elements); });
}
""",
    "column_sums": """
extern "C" void launch(unsigned blocks, unsigned threads, const unsigned short* x, float* parts,
                       int rows, int columns, long long stride) {
    run_grid(blocks, threads, false, [=] { column_sums(x, parts, rows, columns, stride); });
}
""",
    "window_samples": """
extern "C" void launch(unsigned blocks, unsigned threads, const Table* table) {
    run_grid(blocks, threads, false, [=] { window_samples(*table); });
}
""",
    "dequantize": """
extern "C" void launch(unsigned blocks, unsigned threads, const unsigned char* data,
                       const float* scale, char* out, int rows, int columns, int across,
                       long long data_stride, long long out_stride, long long scale_stride) {
    run_grid(blocks, threads, false, [=] {
        dequantize(data, scale, out, rows, columns, across, data_stride, out_stride, scale_stride);
    });
}
""",
    "quantize_tensor": """
extern "C" void launch(unsigned blocks, unsigned threads, const char* x, unsigned char* data,
                       float* scale, unsigned* maxima, int rows, int parts, long long columns,
                       long long x_stride, long long data_stride) {
    run_grid(blocks, threads, AT_ONCE, [=] {
        quantize_tensor(x, data, scale, maxima, rows, parts, columns, x_stride, data_stride);
    });
}
""",
}
EXPORTED = 'extern "C" __attribute__((visibility("default")))'
C_TYPES = {"i": ctypes.c_int, "q": ctypes.c_longlong, "I": ctypes.c_uint}


def sources(name: str, copies: dict[str, Path]) -> Path:
    """A shared folder with kernels beside headers that stand in for the GPU's, by their names."""
    folder = shared_folder(name)
    for target, source in copies.items():
        made_once(folder / target, lambda to, source=source: shutil.copy(source, to))
    if IS_GCC:  # a third of the time, compiled before
        header = [*COMPILER, *OPTIONS, "-x", "c++-header", folder / "ptx.cuh", "-o"]
        made_once(folder / "ptx.cuh.gch", lambda to: subprocess.run([*header, to], check=True))
    return folder


@functools.cache
def runtime() -> Path:
    """Scheduler of the threads of a block, linked to every program."""
    command = [*COMPILER, *OPTIONS, "-shared", RUNTIME, "-o"]
    return made_once(shared_folder("host_runtime") / "libcuda_on_host.so",
                     lambda to: subprocess.run([*command, to], check=True))  # fmt: skip


@functools.cache
def compiled(folder: Path, program: Program) -> Any:
    name = f"{Path(program.source).stem}_{'_'.join(str(value) for _, value in program.macros)}"
    text = (
        "#pragma GCC visibility push(hidden)\n"  # else programs in one process share static memory
        f'#include "{Path(program.source).name}"\n'
        "#pragma GCC visibility pop\n" + CALLS[program.entry].replace('extern "C"', EXPORTED)
    )
    source = made_once(folder / f"{name}.cpp", lambda to: to.write_text(text))
    command = [
        *LINKER, *OPTIONS, "-shared", "-include", folder / "ptx.cuh",
        *(f"-D{name}={value}" for name, value in program.macros), source, runtime(), "-o",
    ]  # fmt: skip
    library = folder / f"{name}.so"
    made_once(library, lambda to: subprocess.run([*command, to], check=True))
    return ctypes.CDLL(str(library)).launch


class HostLaunch:
    """Takes the place of a CudaLaunch and runs the same program on the CPU."""

    def __init__(
        self,
        folder: Path,
        program: Program,
        *,
        pointers: int,
        threads: int,
        scalars: str,
        **_: Any,
    ) -> None:
        self._folder = folder
        self.program = program
        self._threads = threads
        self._types = (
            *[ctypes.c_uint] * 2,
            *[ctypes.c_void_p] * pointers,
            *[C_TYPES[code] for code in scalars],
        )

    def with_program(self, program: Program) -> HostLaunch:
        """The launch of another program with the same parameters."""
        made = copy.copy(self)
        made.program = program
        return made

    def __call__(
        self, grid: tuple[int, int, int], pointers: tuple[Tensor, ...], scalars: tuple[int, ...]
    ) -> None:
        values = (grid[0], self._threads, *[pointer.data_ptr() for pointer in pointers], *scalars)
        run = compiled(self._folder, self.program)
        run(*[of(value) for of, value in zip(self._types, values, strict=True)])
