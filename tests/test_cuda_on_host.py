"""CUDA kernels compute the right bytes, compiled for the CPU with their own launch parameters."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.bench.pieces import compare_bytes
from lokakern.kernels.cuda import quantize
from lokakern.types import GROUP, Format, Granularity

HEADER = Path(__file__).with_name("cuda_on_host.hpp")
FOUND = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
# `make` installs Zig, which brings a C++ compiler, where there is none.
COMPILER = [FOUND] if FOUND else [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=all"]
CALL = """
extern "C" void launch(unsigned blocks, const char* x, unsigned char* data, float* scale, int rows,
                       long long x_stride, long long scale_stride) {
    for (unsigned index = 0; index < blocks; ++index) {
        run_block(index, THREADS, [=] { quantize(x, data, scale, rows, x_stride, scale_stride); });
    }
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """quantize.cu beside a header that stands in for the GPU's."""
    made = tmp_path_factory.mktemp("host")
    text = Path(quantize.SOURCE).read_text(encoding="utf-8")
    (made / "kernel.cpp").write_text(text + CALL, encoding="utf-8")
    (made / "ptx.cuh").write_text(HEADER.read_text(encoding="utf-8"), encoding="utf-8")
    return made


@functools.cache
def compiled(folder: Path, macros: tuple[tuple[str, Any], ...]) -> Any:
    library = folder / f"{'_'.join(str(value) for _, value in macros)}.so"
    subprocess.run(
        [*COMPILER, "-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w",
         *(f"-D{name}={value}" for name, value in macros), "-o", library, folder / "kernel.cpp"],
        check=True,
    )  # fmt: skip
    launch = ctypes.CDLL(str(library)).launch
    pointer, wide = ctypes.c_void_p, ctypes.c_longlong
    launch.argtypes = [ctypes.c_uint, pointer, pointer, pointer, ctypes.c_int, wide, wide]
    return launch


class HostLaunch:
    """Takes the place of a CudaLaunch and runs the same program on the CPU."""

    def __init__(self, folder: Path, program: Any) -> None:
        self._run = compiled(folder, program.macros)

    def __call__(
        self, grid: tuple[int, int, int], pointers: tuple[Tensor, ...], scalars: tuple[int, ...]
    ) -> None:
        self._run(grid[0], *[pointer.data_ptr() for pointer in pointers], *scalars)


@pytest.fixture
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "CudaLaunch", lambda program, **_: HostLaunch(folder, program))
    monkeypatch.setattr(quantize, "bind", quantize.bind.__wrapped__)


def hostile(rows: int, columns: int, source: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    x *= torch.logspace(-40, 36, rows).unsqueeze(1)  # every size of scale, subnormal ones too
    x[::3] = x[::3].abs().sqrt()
    if rows > 6:
        x[1] = 0.0
        x[2] = -0.0
        x[3, -1], x[4, 0], x[5, columns // 2] = math.nan, math.inf, -math.inf
        x[6] = math.nan
    return x.to(source)


def check(x: Tensor, form: Format, granularity: Granularity) -> None:
    expected = numerics.quantize(x, form, granularity)
    data = torch.empty_like(expected.data)
    data.view(torch.uint8).fill_(0xA5)
    scale = granularity.empty_scale(*x.shape, x.device).fill_(math.nan)
    launch = quantize.quantize_row if granularity is Granularity.ROW else quantize.quantize_group
    launch(x, data, scale, ())
    wrong = compare_bytes(data, scale, expected.data, expected.scale)
    assert not wrong, f"{granularity.value} {form.value} {x.dtype} {list(x.shape)}: {wrong}"


SOURCES = [torch.bfloat16, torch.float32]
# One size of every kind of tile: parts of a warp, a warp, a block, two reads; exact and not.
ROW_SIZES = [(9, 8), (9, 13), (37, 128), (11, 200), (9, 520), (9, 1024), (9, 2048), (9, 4096),
             (9, 7168), (8, 9001), (8, 16384)]  # fmt: skip


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), ROW_SIZES)
def test_row_scales_and_bytes_are_those_of_numerics(
    rows: int, columns: int, source: torch.dtype
) -> None:
    form = Format.E4M3FN if source is torch.bfloat16 else Format.E5M2
    check(hostile(rows, columns, source), form, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(9, 13), (37, 128), (70, 384), (9, 1000), (9, 201)])
def test_group_scales_and_bytes_are_those_of_numerics(
    rows: int, columns: int, source: torch.dtype
) -> None:
    form = Format.E5M2 if source is torch.bfloat16 else Format.E4M3FN
    check(hostile(rows, columns, source), form, Granularity.GROUP)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("offset", [8, 3])
def test_views_with_any_stride_are_read_in_place(granularity: Granularity, offset: int) -> None:
    wide = hostile(20, 512, torch.bfloat16)
    check(wide[:, offset : offset + 256], Format.E4M3FN, granularity)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
def test_every_bfloat16_value_is_cast_right(form: Format) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check(values.reshape(512, 128), form, Granularity.ROW)
    check(values.reshape(8192, 8), form, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("exponent", [0, -100, -112, 90])
def test_quotients_beside_the_ties_are_rounded_once(exponent: int) -> None:
    """x next to a tie of E4M3 times each scale: a quotient off by a last place would show.

    Tiny scales too, where remainders underflow unless they are lifted.
    """
    ties = torch.tensor([17.0, 19.0, 27.0, 29.0, 104.0, 232.0, 2.0**-10, 3 * 2.0**-10])
    amax = torch.rand(4096, 1, generator=torch.Generator().manual_seed(1)) * 448 + 1
    amax = amax * 2.0**exponent
    near = ties * (amax / 448)
    up = torch.nextafter(near, torch.tensor(math.inf))
    down = torch.nextafter(near, torch.tensor(0.0))
    check(torch.cat([amax, near, up, down, amax, near, -up], 1), Format.E4M3FN, Granularity.ROW)


def test_tiles_cover_their_lines() -> None:
    for width in (1, 4, 8):
        for span in (*range(1, 2100), 4096, 5000, 7168, quantize.LONGEST_LINE):
            tile = quantize.tile_of(span, width)
            assert tile.team * tile.accesses * width >= span
            assert tile.threads <= 1024
            assert tile.team <= 32 or (tile.team == tile.threads and tile.team % 32 == 0)


def test_groups_are_read_8_threads_a_line() -> None:
    tile = quantize.tile_of(GROUP, 8)
    assert (tile.team, tile.accesses, tile.rows_of_warp) == (8, 2, 4)
