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
from lokakern.nvrtc import Program
from lokakern.types import GROUP, Format, Granularity

HEADER = Path(__file__).with_name("cuda_on_host.hpp")
FOUND = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
# `make` installs Zig, which brings a C++ compiler, where there is none.
COMPILER = [FOUND] if FOUND else [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=all"]
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
}
C_TYPES = {"i": ctypes.c_int, "q": ctypes.c_longlong, "I": ctypes.c_uint}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels beside a header that stands in for the GPU's."""
    made = tmp_path_factory.mktemp("host")
    for source in Path(quantize.SOURCE).parent.glob("quantize*.cu*"):
        shutil.copy(source, made)
    shutil.copy(HEADER, made / "ptx.cuh")
    return made


@functools.cache
def compiled(folder: Path, program: Program) -> Any:
    name = f"{program.entry}_{'_'.join(str(value) for _, value in program.macros)}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(f'#include "{Path(program.source).name}"\n{CALLS[program.entry]}')
    subprocess.run(
        [*COMPILER, "-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w",
         *(f"-D{name}={value}" for name, value in program.macros), "-o", library, source],
        check=True,
    )  # fmt: skip
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
        self._run = compiled(folder, program)
        self._threads = threads
        self._types = (
            *[ctypes.c_uint] * 2,
            *[ctypes.c_void_p] * pointers,
            *[C_TYPES[code] for code in scalars],
        )

    def __call__(
        self, grid: tuple[int, int, int], pointers: tuple[Tensor, ...], scalars: tuple[int, ...]
    ) -> None:
        values = (grid[0], self._threads, *[pointer.data_ptr() for pointer in pointers], *scalars)
        self._run(*[of(value) for of, value in zip(self._types, values, strict=True)])


@pytest.fixture
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = functools.partial(HostLaunch, folder)
    monkeypatch.setattr(quantize, "CudaLaunch", launch)
    monkeypatch.setattr(quantize, "bind", functools.cache(quantize.bind.__wrapped__))


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


def padded(rows: int, columns: int, form: Format) -> Tensor:
    """Data as lokakern allocates them: rows start every 16 bytes."""
    pitch = -(-columns // 16) * 16
    whole = torch.full((rows, pitch), 0xA5, dtype=torch.uint8)
    return whole.view(form.dtype)[:, :columns]


def check_padding(data: Tensor) -> None:
    """What lies between the rows is left as it was."""
    rows, pitch = data.shape[0], data.stride(0)
    whole = data.view(torch.uint8).as_strided((rows, pitch), (pitch, 1))
    assert (whole[:, data.shape[1] :] == 0xA5).all(), "padding was written"


def check(
    x: Tensor,
    form: Format,
    granularity: Granularity,
    power_of_two: bool = False,
    contiguous: bool = False,
) -> None:
    expected = numerics.quantize(x, form, granularity, power_of_two_scale=power_of_two)
    data = padded(*x.shape, form)
    if contiguous:
        data = torch.full(x.shape, 0xA5, dtype=torch.uint8).view(form.dtype)
    scale = granularity.empty_scale(*x.shape, x.device).fill_(math.nan)
    name = f"quantize_{granularity.suffix}{'_power_of_two' if power_of_two else ''}"
    getattr(quantize, name)(x, data, scale, ())
    wrong = compare_bytes(data, scale, expected.data, expected.scale)
    assert not wrong, f"{name} {form.value} {x.dtype} {list(x.shape)}: {wrong}"
    check_padding(data)


SOURCES = [torch.bfloat16, torch.float32]
# One size of every kind of tile: parts of a warp, a warp, a block, a cluster; exact and not.
ROW_SIZES = [(9, 8), (9, 13), (37, 128), (11, 200), (9, 520), (9, 1024), (9, 2048), (9, 4096),
             (9, 7168), (8, 9001), (8, 16384), (7, 17280), (7, 40001)]  # fmt: skip


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
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_lines_too_long_for_a_cluster_are_read_twice(
    source: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "LARGEST_BLOCK", 128)
    monkeypatch.setattr(quantize, "LONGEST_TEAM", 96)
    assert quantize.tile_of(40001, 8) == (96, quantize.LOADS, 96, 1, 1)
    check(hostile(7, 40001, source), Format.E4M3FN, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("offset", [8, 3])
def test_views_with_any_stride_are_read_in_place(granularity: Granularity, offset: int) -> None:
    for source in SOURCES:
        wide = hostile(20, 512, source)
        check(wide[:, offset : offset + 256], Format.E4M3FN, granularity)
        askew = hostile(21, 491, source)
        check(askew[1:, offset : offset + 251], Format.E4M3FN, granularity)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("columns", [13, 200, 479])
def test_contiguous_data_are_written_too(granularity: Granularity, columns: int) -> None:
    for source in SOURCES:
        check(hostile(20, columns, source), Format.E5M2, granularity, contiguous=True)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
def test_scales_may_be_powers_of_two(granularity: Granularity, form: Format) -> None:
    for source in SOURCES:
        x = hostile(40, 256, source)
        x[7, :128] = form.maximum * 2.0**-20  # amax / MAX is a power of two already
        x[8] = 1e-41
        check(x, form, granularity, power_of_two=True)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("lines", [2, 4])
def test_a_thread_may_take_several_lines(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_of = quantize.tile_of
    monkeypatch.setattr(quantize, "tile_of", lambda *size: tile_of(*size)._replace(lines=lines))
    for rows, columns in [(9, 13), (37, 128), (70, 64), (67, 200)]:
        for granularity in (Granularity.ROW, Granularity.GROUP):
            check(hostile(rows, columns, torch.bfloat16), Format.E4M3FN, granularity)


@pytest.mark.usefixtures("on_host")
def test_large_blocks_do_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "FEW_BLOCKS", 0)
    for rows, columns in [(9, 13), (70, 384), (67, 1024)]:
        for granularity in (Granularity.ROW, Granularity.GROUP):
            check(hostile(rows, columns, torch.bfloat16), Format.E4M3FN, granularity)


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
    for chunk in (4, 8):
        for span in (*range(1, 2100), 4096, 5000, 7168, *range(8192, 123200, 997), 123200):
            tile = quantize.tile_of(span, chunk)
            assert tile.team * tile.accesses * chunk * tile.cluster >= span
            assert tile.threads <= 1024 and tile.cluster <= 8
            assert tile.team <= 32 or (tile.team == tile.threads and tile.team % 32 == 0)


def test_groups_are_read_8_threads_a_line() -> None:
    tile = quantize.tile_of(GROUP, 8)
    assert (tile.team, tile.accesses, tile.rows_of_warp) == (8, 2, 4)
