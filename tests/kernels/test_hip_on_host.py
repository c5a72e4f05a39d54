"""HIP kernels, from their own sources, on the CPU: under AddressSanitizer and UBSan, in lockstep.

Only the compiler built-ins for AMD GPUs in amd.hpp are replaced (tests/support/hip_on_host.hpp).
Each kernel runs with the waves of a block in both orders, as for gfx942 and as for gfx950.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import hip, jit, numerics
from lokakern.errors import CompilationError, LaunchError
from lokakern.hip import HipLaunch, Program
from lokakern.kernels.hip import dequantize, gemm_norm, quantize, scaled_gemm
from lokakern.kernels.hip.scaled_gemm import Tile
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.norm import norm_named
from lokakern.problems import make_problem
from lokakern.quantized_tensor import pitch_of
from lokakern.registry import ops
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
    empty_data,
)
from tests.support.sharing import made_once, shared_folder

load_kernels()
KERNELS_FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "hip"
HEADER = Path(__file__).parents[1] / "support" / "hip_on_host.hpp"
RUNTIME = Path(__file__).parents[1] / "support" / "hip_on_host.cpp"
COMPILER = shutil.which("g++") or shutil.which("c++")
OPTIONS = ("-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
           "-Wno-unknown-pragmas", "-Wno-psabi")  # fmt: skip
FORMATS = {"gfx942": Format.E4M3FNUZ, "gfx950": Format.E4M3FN}
BLOCK = 256  # threads of most kernels
# What a program calls, with buffers `p` and numbers `i`.
CALLS = {
    "quantize": "quantize((const Number*)p[0], (unsigned char*)p[1], (Scale*)p[2], i[0], i[1], "
    "i[2], i[3], i[4])",
    "dequantize": "dequantize((unsigned char*)p[0], (Scale*)p[1], p[2], i[0], i[1], i[2], i[3], "
    "i[4], i[5])",
    "scaled_gemm": "scaled_gemm((unsigned char*)p[0], (Scale*)p[1], (unsigned char*)p[2], "
    "(Scale*)p[3], (unsigned short*)p[4], (unsigned short*)(p.size() > 5 ? p[5] : nullptr), i[0], "
    "i[1], i[2], i[3], i[4], i[5], i[6], i[7])",
    "places": "places((int*)p[0], i[0], i[1])",
    "exchange": "exchange((int*)p[0], i[0])",
    "activations": "activations((Floats4*)p[0], i[0])",
    "gemm_norm": "gemm_norm((unsigned char*)p[0], (float*)p[1], (unsigned char*)p[2], "
    "(float*)p[3], p[4], (float*)p[5], (float*)p[6], (float*)p[7], (float*)p[8], i[0], i[1], i[2], "
    "i[3], i[4], i[5], i[6], i[7], i[8], 1e-5f)",  # the only eps of suites
}
CALL = """
const int THREADS_OF_A_BLOCK = {threads};
void call(const std::vector<char*>& p, const std::vector<long>& i) {{ {call}; }}
"""


def headers() -> Path:
    """A folder with what stands in for the GPU's header, for each format."""
    found = shared_folder("hip")
    for gpu in FORMATS:
        header = found / f"{gpu}.hpp"
        text = f"#define __{gpu}__ 1\n{HEADER.read_text()}"
        made_once(header, lambda to, text=text: to.write_text(text))
        if Path(COMPILER or "").name == "g++":  # a third of the time, compiled before
            command = [str(COMPILER), *OPTIONS, "-x", "c++-header", str(header), "-o"]
            made_once(
                header.with_suffix(".hpp.gch"),
                lambda to, command=command: subprocess.run([*command, str(to)], check=True),
            )
    return found


def folder(edited: str = "") -> Path:
    """A copy of the kernels."""
    found = shared_folder(f"hip_kernels{edited}")
    for source in (*KERNELS_FOLDER.glob("*.hip"), *KERNELS_FOLDER.glob("*.hpp")):
        made_once(found / source.name, lambda to, source=source: shutil.copy(source, to))
    return found


def runtime() -> Path:
    """Scheduler of lanes, linked to every program; compiled once, half of the work for each."""
    command = [str(COMPILER), *OPTIONS, "-c", str(RUNTIME), "-o"]
    return made_once(shared_folder("hip") / "hip_on_host.o",
                     lambda to: subprocess.run([*command, str(to)], check=True))  # fmt: skip


def program(kernel: str, gpu: str, macros: dict[str, int], where: Path) -> Path:
    """An executable that runs one launch."""
    assert COMPILER, "tests of HIP kernels need a C++ compiler with AddressSanitizer, such as g++"
    given = [f"-D{name}={value}" for name, value in macros.items()]
    name = "_".join([kernel, gpu, *map(str, macros.values())])
    threads = threads_of(kernel, macros)
    text = f'#include "{kernel}.hip"\n' + CALL.format(threads=threads, call=CALLS[kernel])
    source = made_once(where / f"{name}.cpp", lambda to: to.write_text(text))
    header = ["-include", str(headers() / f"{gpu}.hpp"), "-I", str(where)]
    command = [COMPILER, *OPTIONS, *header, *given, str(source), str(runtime()), "-o"]

    def build(to: Path) -> None:
        subprocess.run([*command, str(to)], check=True, cwd=where)

    return made_once(where / name, build)


def threads_of(kernel: str, macros: dict[str, int]) -> int:
    """Threads of a block."""
    is_wide = kernel == "scaled_gemm" and macros["TILE_N"] > 128 and macros["SCALES"] == 1
    return 2 * BLOCK if is_wide else BLOCK


def launch(
    path: Path, blocks: int, buffers: Sequence[Tensor], numbers: Sequence[int], tmp_path: Path,
    *, reverse: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Run a program on copies of buffers, and return them as they are then."""
    file = tmp_path / "buffers"
    with file.open("wb") as stream:
        for buffer in buffers:
            flat = buffer.contiguous().view(torch.uint8).flatten()
            stream.write(struct.pack("<Q", flat.numel()) + flat.numpy().tobytes())
    words = [str(path), str(file), str(int(reverse)), str(blocks), *map(str, numbers)]
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    data, found, start = file.read_bytes(), [], 0
    for buffer in buffers:
        size = buffer.numel() * buffer.element_size()
        after = buffer.clone()
        if size:
            part = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
            after = part.view(buffer.dtype).view(buffer.shape)
        found.append(after)
        start += size
    return found


def hostile(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, zeros, subnormals, and values that are not finite."""
    torch.manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns) * torch.logspace(-42, 36, rows)[:, None]
    x[0] = 0.0
    if rows > 4:
        x[1, 0], x[2, columns // 2], x[3, -1] = math.nan, math.inf, -math.inf
        x[4] = -1e-41
    return x.to(dtype)


# --- quantizers

SIZES = ((1, 1), (1, 128), (5, 7), (6, 130), (7, 600), (33, 64), (16, 127), (2, 1100), (9, 256),
         (64, 16), (3, 511), (8, 513))  # fmt: skip


ON_GPUS = [  # scales, by GPU: powers of two are for the one that multiplies with them
    (gpu, granularity)
    for granularity in (Granularity.ROW, Granularity.GROUP, Granularity.MX)
    for gpu in (FORMATS if granularity is not Granularity.MX else ("gfx950",))
]


@pytest.mark.sample(every=2)  # both GPUs remain, as below
@pytest.mark.parametrize(("gpu", "granularity"), ON_GPUS)
@pytest.mark.parametrize("form", [Format.BFLOAT16, Format.FLOAT32])
def test_quantize_is_bitwise_equal_to_the_emulation(
    gpu: str, granularity: Granularity, form: Format, tmp_path: Path
) -> None:
    group = quantize.GROUPS[granularity]
    aligned = form is Format.BFLOAT16  # one of each is enough
    macros = {"GROUP": group, "WIDE": int(form is Format.FLOAT32),
              "ALIGNED": int(aligned)}  # fmt: skip
    path = program("quantize", gpu, macros, folder())
    for number, (rows, columns) in enumerate(SIZES):
        stride = -(-columns // 8) * 8 if aligned else columns + 3
        x = torch.full((rows, stride), math.nan).to(form.dtype)
        x[:, :columns] = hostile(rows, columns, form.dtype)
        exact = numerics.quantize(x[:, :columns], FORMATS[gpu], granularity)
        groups, pitch = -(-columns // group) if group else 1, pitch_of(columns)
        data = torch.full((rows, pitch), 0xA5, dtype=torch.uint8)
        by_row = granularity is Granularity.MX  # else the rows of a group lie side by side
        shape = (rows, groups) if by_row else (groups, rows)
        blocks = -(-rows * (groups * group // 8 or 64) // BLOCK)
        _, data, scale = launch(
            path, blocks, [x, data, torch.full(shape, math.nan).to(granularity.scale_dtype)],
            [rows, columns, stride, pitch, groups if by_row else rows], tmp_path,
            reverse=bool(number % 2),
        )  # fmt: skip
        assert exact.scale is not None
        found = scale if by_row else scale.t()
        assert torch.equal(found.float(), exact.scale.float()), (rows, columns)
        assert torch.equal(data[:, :columns], exact.data.view(torch.uint8)), (rows, columns)
        assert (data[:, columns:] == 0xA5).all(), "it writes between the rows"


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("gpu", "width"), [("gfx942", 128), ("gfx950", 128), ("gfx950", 32)])
@pytest.mark.parametrize("form", [Format.BFLOAT16, Format.FLOAT32])
def test_dequantize_rounds_once(gpu: str, width: int, form: Format, tmp_path: Path) -> None:
    macros = {"WIDE": int(form is Format.FLOAT32), "ROWS_OF_SCALE": 1, "COLUMNS_OF_SCALE": width}
    path = program("dequantize", gpu, macros, folder())
    for rows, columns in SIZES:
        for granularity in (
            [Granularity.ROW, Granularity.GROUP] if width == 128 else [Granularity.MX]
        ):
            x = numerics.quantize(hostile(rows, columns, torch.float32), FORMATS[gpu], granularity)
            assert x.scale is not None
            if granularity is Granularity.MX:  # 2^-127, which is subnormal, and NaN
                x.scale.view(torch.uint8)[-1], x.scale.view(torch.uint8)[rows // 2, -1:] = 0, 255
            elif (
                rows > 4
            ):  # halfway between two of bfloat16, and NaN that rounding would carry away
                x.scale[1:4] = 1 + 2.0**-8
                x.scale.view(torch.int32)[rows // 2] = 0x7FFFFFFF
            pitch = x.data.stride(0) if rows > 1 else pitch_of(columns)
            data = torch.full((rows, pitch), x.format.nan_byte, dtype=torch.uint8)
            data[:, :columns] = x.data.view(torch.uint8)
            scale = x.scale.t().contiguous()
            strides = (1, 0) if granularity is Granularity.ROW else (1, rows)
            out = torch.full((rows, columns + 1), 7.0, dtype=form.dtype)
            blocks = -(-rows * -(-columns // 16) // BLOCK)
            found = launch(path, blocks, [data, scale, out],
                           [rows, columns, pitch, columns + 1, *strides], tmp_path)[2]  # fmt: skip
            exact = numerics.dequantize(x, form.dtype)
            assert torch.equal(found[:, :columns].isnan(), exact.isnan())
            kept = ~exact.isnan()
            assert torch.equal(found[:, :columns][kept], exact[kept])
            assert (found[:, columns] == 7).all()


# --- products

SQUARE = Tile(64, 64)
PRODUCTS = (
    (1, 8, 16), (3, 24, 13), (70, 40, 300), (33, 17, 39), (64, 64, 128), (65, 130, 200),
    (128, 48, 144), (5, 1, 640), (130, 33, 257), (64, 128, 384), (1, 1, 1), (97, 71, 511),
    (190, 170, 140), (260, 100, 17), (250, 300, 40),  # 9, 10 and 20 tiles, which 8 dies share
)  # fmt: skip
SCALES = {
    "row": (Granularity.ROW, Granularity.ROW),
    "group": (Granularity.GROUP, Granularity.BLOCK),
    "mx": (Granularity.MX, Granularity.MX),
}


def in_nan(q: QuantizedTensor, *, holds_nan: bool = False) -> QuantizedTensor:
    """A copy with NaN between its rows, which no kernel may count, and maybe one that counts."""
    rows, columns = q.data.shape
    whole = torch.full((rows, pitch_of(columns)), q.format.nan_byte, dtype=torch.uint8)
    whole[:, :columns] = q.data.view(torch.uint8)
    if holds_nan:
        whole[rows // 2, columns // 3] = q.format.nan_byte
    return QuantizedTensor(whole.view(q.data.dtype)[:, :columns], q.scale, q.granularity)


def product(
    path: Path, gpu: str, scales: str, m: int, n: int, k: int, tmp_path: Path,
    tile: Tile = SQUARE, *, reverse: bool, with_bias: bool, aligned: bool = False,
) -> float:  # fmt: skip
    """Kernel error of one product, of aligned rows or not; what it must leave alone is checked."""
    torch.manual_seed(m * n + k)
    form = FORMATS[gpu]
    spread = torch.logspace(-4, 4, k)  # so that scales along k differ
    holds_nan = min(m, n) > 32
    left, right = (
        in_nan(numerics.quantize(x, form, granularity), holds_nan=holds_nan)
        for x, granularity in zip(
            (torch.randn(m, k) * spread, torch.randn(n, k) / spread), SCALES[scales], strict=True
        )
    )
    if scales == "mx" and m > 4:  # behind the scales of row 3 lies NaN, which is row 4's
        assert left.scale is not None
        left.scale.view(torch.uint8)[4, 0] = 255
    bias = torch.randn(n).bfloat16() if with_bias else None
    out_pitch = -(-(n + 3) // 8) * 8 if aligned else n + 3
    found = multiplied(path, left, right, bias, tile, tmp_path, reverse=reverse,
                       out_pitch=out_pitch)  # fmt: skip
    exact = ops.product(left, right.t(), bias)
    size = ops.magnitude(left, right.t(), bias)
    return numerics.kernel_error(found, exact, size, Format.BFLOAT16.unit_roundoff).maximum


def multiplied(
    path: Path, left: QuantizedTensor, right: QuantizedTensor, bias: Tensor | None, tile: Tile,
    tmp_path: Path, *, reverse: bool = False, out_pitch: int | None = None,
) -> Tensor:  # fmt: skip
    """Output ``[m, n]`` of a program for rows of both operands, which makes such tiles."""
    (m, k), n = left.shape, right.shape[0]
    out_pitch = n + 3 if out_pitch is None else out_pitch
    assert left.scale is not None and right.scale is not None
    by_row = left.granularity is Granularity.MX  # else scales of a group lie side by side
    a_scale = left.scale.contiguous() if by_row else left.scale.t().contiguous()
    out = torch.full((m, out_pitch), 7.0, dtype=torch.bfloat16)
    buffers = [whole_rows(left), a_scale, whole_rows(right), right.scale.contiguous(), out]
    groups, pitch = right.scale.shape[1], pitch_of(k)
    strides = {Granularity.ROW: [0, 0], Granularity.GROUP: [m, groups],
               Granularity.MX: [groups, groups]}[left.granularity]  # fmt: skip
    found = launch(
        path, scaled_gemm.blocks_of(tile, m, n), [*buffers, *([bias] if bias is not None else [])],
        [m, n, k, pitch, pitch, out_pitch, *strides], tmp_path, reverse=reverse,
    )[4]  # fmt: skip
    assert (found[:, n:] == 7).all(), "it writes between the rows"
    return found[:, :n]


def whole_rows(q: QuantizedTensor) -> Tensor:
    """Data of `in_nan`, with what lies between rows."""
    rows, columns = q.data.shape
    pitch = pitch_of(columns)
    return q.data.as_strided((rows, pitch), (pitch, 1)).contiguous()


def macros_of(scales: str, tile: Tile = SQUARE) -> dict[str, int]:
    return {"TILE_M": tile.m, "TILE_N": tile.n, "SCALES": list(SCALES).index(scales)}


KINDS_ON_GPUS = [(g, s) for g in FORMATS for s in SCALES if (g, s) != ("gfx942", "mx")]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("gpu", "scales"), KINDS_ON_GPUS)
def test_scaled_gemm_is_correct(gpu: str, scales: str, tmp_path: Path) -> None:
    macros = macros_of(scales)
    path = program("scaled_gemm", gpu, macros, folder())
    for number, (m, n, k) in enumerate(PRODUCTS):
        error = product(path, gpu, scales, m, n, k, tmp_path, reverse=bool(number % 2),
                        with_bias=number % 3 == 0, aligned=number % 2 == 0)  # fmt: skip
        assert error <= 1.0, (m, n, k)


@pytest.mark.sample(every=4, of=("tile",))  # 4 s each
@pytest.mark.parametrize(
    ("gpu", "scales", "tile"),
    [("gfx950", "group", (128, 128)), ("gfx942", "group", (128, 128)), ("gfx950", "mx", (32, 32)),
     ("gfx942", "group", (32, 32)), ("gfx942", "group", (128, 32)), ("gfx950", "mx", (128, 32)),
     ("gfx942", "row", (128, 64)), ("gfx942", "group", (256, 256)), ("gfx942", "row", (256, 256)),
     ("gfx950", "group", (256, 256)), ("gfx950", "mx", (256, 256)), ("gfx950", "row", (256, 256))],
)  # fmt: skip
def test_scaled_gemm_is_correct_with_other_tiles(
    gpu: str, scales: str, tile: tuple[int, int], tmp_path: Path
) -> None:
    of = Tile(*tile)
    path = program("scaled_gemm", gpu, macros_of(scales, of), folder())
    for number, (m, n, k) in enumerate(
        ((200, 140, 300), (130, 260, 127), (33, 17, 129), (of.m, of.n + 5, 256))
    ):
        error = product(path, gpu, scales, m, n, k, tmp_path, of, reverse=bool(number % 2),
                        with_bias=number == 0, aligned=number == 3)  # fmt: skip
        assert error <= 1.0, (m, n, k)


# Pairs whose product is no normal number, though what they scale, or what comes of it, is one.
TINY = (
    (2.0**-75, 2.0**-76), (1.3 * 2.0**-70, 1.3 * 2.0**-76), (1.7 * 2.0**-126, 1.9 * 2.0**-20),
    (1.1 * 2.0**-60, 1.7 * 2.0**-88),
)  # fmt: skip
# Scales of b, and sums times 2^26, that are almost too large.
UNDER_THE_LIMIT = ((1.5 * 2.0**40, 2.0**36), (2.0**-30, 1.5 * 2.0**101))


def scaled_alike(codes: Tensor, scale: float, granularity: Granularity) -> QuantizedTensor:
    """Data of a format with one scale everywhere, or with the power of two that is not above it."""
    rows, columns = codes.shape
    shape = granularity.scale_shape(rows, columns)
    if granularity is Granularity.MX:
        exponent = 127 + math.frexp(scale)[1] - 1
        return QuantizedTensor(codes, torch.full(shape, exponent, dtype=torch.uint8).view(
            granularity.scale_dtype), granularity)  # fmt: skip
    return QuantizedTensor(codes, torch.full(shape, scale), granularity)


@pytest.mark.sample(every=2, of=("kernel", "scales"))
@pytest.mark.parametrize(
    ("kernel", "gpu", "scales"),
    [(kernel, *where) for kernel in ("scaled_gemm", "gemm_norm") for where in KINDS_ON_GPUS
     if (kernel, where[1]) != ("gemm_norm", "mx")],
)  # fmt: skip
def test_scales_are_applied_one_after_the_other(
    kernel: str, gpu: str, scales: str, tmp_path: Path
) -> None:
    """To sums that are exact: ``acc * sa * sb`` to the bit, also where ``sa * sb`` underflows."""
    form, (m, n, k) = FORMATS[gpu], (5, 9, 128)
    torch.manual_seed(1)
    codes = [torch.randint(-15, 16, (rows, k)).float() for rows in (m, n)]
    for some in codes:
        some[0] = form.maximum
    macros = macros_of(scales)
    if kernel == "gemm_norm":
        macros = {"TILE_N": 64, "BY_GROUP": int(scales == "group"), "NORM": 0,
                  "SPAN": 64, "ACTIVATION": 0, "OUT": 0}  # fmt: skip
    path = program(kernel, gpu, macros, folder())
    for pair in TINY + UNDER_THE_LIMIT:
        left, right = (
            scaled_alike(some.to(form.dtype), scale, granularity)
            for some, scale, granularity in zip(codes, pair, SCALES[scales], strict=True)
        )
        if kernel == "gemm_norm":
            found = normalized(path, left, right, NormEpilogue(norm_named("none")),
                               Granularity.NONE, tmp_path)  # fmt: skip
            assert isinstance(found, Tensor)
        else:
            found = multiplied(path, left, right, None, SQUARE, tmp_path)
        of_a, of_b = (some.scale.float()[0, 0] for some in (left, right) if some.scale is not None)
        expected = (codes[0] @ codes[1].t() * of_a * of_b).bfloat16()
        assert expected.any(), "all of it underflows"
        assert torch.equal(found, expected), pair


# What a kernel would do without: each must be seen.
BROKEN = {
    "a barrier": ("        barrier();\n    };", "    };"),
    "the swizzle of reads": (
        "joined(stage[place_of(row, quarter)], stage[place_of(row, 4 + quarter)])",
        "joined(stage[row * PARTS + quarter], stage[row * PARTS + 4 + quarter])",
    ),
    "the mask of a tail": ("const int left = count - 4 * i;", "const int left = 4;"),
    "the last row": ("copies_(data, (count - 1u) * stride", "copies_(data, count * stride"),
    "a scale": ("sums[i][j] * of_rows[i] * of_columns[j]", "sums[i][j] * of_rows[i]"),
    "a power of two": (
        "% HELD], sums[i][j], of_b[j], of_a[i]);", "% HELD], sums[i][j], of_b[j], ONE_E8M0);"
    ),
    "a power past k": (
        "for (int& scale : scales_of_a) scale = 32 * quarter < left ? scale : ONE_E8M0;", ""
    ),
    "the order of columns": (
        "return column_of(row / 16, row % 16);", "return row;"
    ),
}  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize("what", BROKEN)
def test_dropped_terms_are_found(what: str, tmp_path: Path) -> None:
    """Terms are dropped from a product of gfx950, with waves in either order."""
    here = folder("_" + what.replace(" ", "_"))
    old, new = BROKEN[what]
    texts = {n: (KERNELS_FOLDER / n).read_text() for n in ("scaled_gemm.hip", "products.hpp")}
    assert sum(text.count(old) for text in texts.values()) == 1
    for name, text in texts.items():
        (here / name).write_text(text.replace(old, new))
    scales = "mx" if "power" in what else "row"
    path = program("scaled_gemm", "gfx950", macros_of(scales), here)
    errors = []
    for reverse in (False, True):
        try:
            errors.append(product(path, "gfx950", scales, 70, 40, 300, tmp_path,
                                  reverse=reverse, with_bias=False))  # fmt: skip
        except AssertionError as found:  # what a sanitizer says
            assert "AddressSanitizer" in str(found)
            return
    assert max(errors) > 1.0, errors


# --- places in local memory

PLACES = """
#include "products.hpp"
void places(int* place, int first, int half) {
    const int lane = lane_index();
    place[thread_index()] = place_of(first + lane % 16, 4 * half + lane / 16);
}
"""
# Lanes that `ds_read_b128` serves together, as others measured and published: of MI300X, which has
# 32 banks of 4 bytes; two of these groups at once on MI350X, which has 64 banks.
TOGETHER = [
    [*range(32 * half + one, 32 * half + one + 4), *range(32 * half + other, 32 * half + other + 4)]
    for half in (0, 1)
    for one, other in ((0, 20), (12, 24), (4, 16), (8, 28))
]


def test_lanes_that_read_together_read_from_different_banks(tmp_path: Path) -> None:
    (folder() / "places.hip").write_text(PLACES)
    path = program("places", "gfx942", {}, folder())
    for first in range(0, 64, 16):
        for half in (0, 1):
            nothing = torch.zeros(BLOCK, dtype=torch.int32)
            (found,) = launch(path, 1, [nothing], [first, half], tmp_path)
            parts = found[:64].tolist()  # of 16 bytes: 8 take all of 32 banks
            assert len(set(parts)) == 64
            for lanes in TOGETHER:
                assert len({parts[lane] % 8 for lane in lanes}) == 8
            for lanes in (a + b for a, b in zip(TOGETHER[::2], TOGETHER[1::2], strict=True)):
                assert len({parts[lane] % 16 for lane in lanes}) == 16


EXCHANGE = """
#include "products.hpp"
void exchange(int* place, int waves) {
    const int lane = lane_index();
    place[thread_index()] = exchange_place(lane, thread_index() / WAVE % waves, waves);
}
"""


@pytest.mark.parametrize("waves", [2, 4])
def test_rows_that_waves_exchange_lie_in_different_banks(waves: int, tmp_path: Path) -> None:
    """Sixteen lanes write those of 16 rows at once; those of two neighboring waves stay a pair."""
    (folder() / "exchange.hip").write_text(EXCHANGE)
    path = program("exchange", "gfx942", {}, folder())
    (found,) = launch(path, 1, [torch.zeros(BLOCK, dtype=torch.int32)], [waves], tmp_path)
    places = found.view(BLOCK // 64, 64)[:waves]
    assert len(set(places.flatten().tolist())) == 64 * waves
    for rows in places.unfold(1, 16, 16).flatten(0, 1).tolist():
        assert len({place % 32 for place in rows}) == 16
    row, pair = torch.arange(64), torch.arange(waves)[:, None] // 2
    assert torch.equal(places // 2, row * waves // 2 + pair)


# --- products whose rows are normalized

# Norm, activation, output, scales of operands by group, whether there are vectors, tile, shapes.
NORMED = {
    "layer": ("layer", "none", Granularity.NONE, False, True, 128, (
        (70, 128, 300), (1, 8, 16), (33, 100, 39), (64, 127, 128), (65, 33, 257), (5, 64, 640))),
    "layer_fp8": ("layer", "relu", Granularity.ROW, True, True, 64, (
        (70, 64, 300), (3, 24, 128), (33, 17, 39), (65, 40, 512), (1, 1, 7), (64, 63, 129))),
    "rms": ("rms", "silu", Granularity.ROW, False, False, 64, (
        (97, 40, 511), (1, 1, 1), (64, 64, 384))),
    "rms_given": ("rms", "none", Granularity.TENSOR, False, True, 64, (
        (33, 40, 39), (5, 64, 128), (2, 7, 16))),
    "layer_wide": ("layer", "relu", Granularity.GROUP, True, True, 192, (
        (70, 192, 300), (33, 130, 39), (64, 191, 256))),
    "block": ("block_rms(64)", "hardswish", Granularity.GROUP, False, False, 256, (
        (70, 256, 300), (33, 192, 39), (64, 128, 128), (5, 64, 640))),
    # What four waves, and what two of four normalize together.
    "layer_of_four": ("layer", "none", Granularity.NONE, False, True, 256, (
        (65, 256, 129), (3, 201, 40))),
    "gelu_wide": ("layer", "gelu", Granularity.TENSOR, False, True, 128, (
        (70, 128, 300), (3, 100, 40))),
    "gelu_by_group": ("rms", "gelu_tanh", Granularity.GROUP, True, False, 192, (
        (33, 192, 129), (5, 130, 256))),
    "block_of_two": ("block_rms(128)", "silu", Granularity.ROW, False, False, 256, (
        (66, 256, 128), (2, 128, 17))),
    "block_by_group": ("block_rms(32)", "hardswish", Granularity.NONE, True, True, 256, (
        (66, 160, 200), (64, 256, 384), (2, 32, 128), (33, 96, 16), (65, 224, 130),
        (7, 64, 255))),
}  # fmt: skip
KINDS = {"layer": 1, "rms": 2, "block_rms": 2}
ACTIVATIONS = ("none", "relu", "hardswish", "silu", "gelu", "gelu_tanh")
OUTPUTS = (Granularity.NONE, Granularity.ROW, Granularity.GROUP, Granularity.TENSOR)
GIVEN_SCALE = 0.005  # of a tensor: most of what is normalized saturates under it


@pytest.mark.sample(every=3)  # 4 s each; both GPUs remain
@pytest.mark.parametrize("gpu", FORMATS)
@pytest.mark.parametrize("what", NORMED)
def test_gemm_norm_is_correct(gpu: str, what: str, tmp_path: Path) -> None:
    norm_name, activation, output, by_group, vectors, tile, shapes = NORMED[what]
    norm, form = norm_named(norm_name), FORMATS[gpu]
    macros = {
        "TILE_N": tile, "BY_GROUP": int(by_group), "NORM": KINDS[norm.kind],
        "SPAN": norm.block or tile, "ACTIVATION": ACTIVATIONS.index(activation),
        "OUT": OUTPUTS.index(output),
    }  # fmt: skip
    path = program("gemm_norm", gpu, macros, folder())
    a_scales, b_scales = SCALES["group" if by_group else "row"]
    for number, (m, n, k) in enumerate(shapes):
        torch.manual_seed(m * n + k)
        x = torch.randn(m, k) * 3
        x[0] *= 1e-3 / math.sqrt(k)  # where eps matters
        left = in_nan(numerics.quantize(x, form, a_scales), holds_nan=m > 32)
        right = in_nan(numerics.quantize(torch.randn(n, k), form, b_scales))
        given = [torch.randn(n) if vectors else None for _ in range(3)]
        epilogue = NormEpilogue(norm, *given, activation=activation)
        unit = (Format.BFLOAT16 if output is Granularity.NONE else form).unit_roundoff
        exact, size = ops.normalized(*ops.norm_sums(left, right.t()), epilogue)
        both = m >= 64 and n == tile and output is Granularity.NONE  # a whole tile is there
        for aligned in (False, True) if both else (False,):
            made = normalized(path, left, right, epilogue, output, tmp_path,
                              reverse=bool(number % 2) != aligned, aligned=aligned)  # fmt: skip
            error = norm_kernel_error(made, exact, size, unit)
            assert error.maximum <= 1.0, (m, n, k, aligned, error)


@pytest.mark.sample(every=3)  # each GPU, and each output
@pytest.mark.parametrize("gpu", FORMATS)
@pytest.mark.parametrize(("output", "n"), [(Granularity.ROW, 64), (Granularity.GROUP, 256)])
def test_gemm_norm_quantizes_as_the_emulation_does(
    gpu: str, output: Granularity, n: int, tmp_path: Path
) -> None:
    """Sums that are exact, to the byte: of usual rows, and of rows that take the long way."""
    form, k, of_wave = FORMATS[gpu], 128, {64: 32, 256: 64}[n]
    m = 2 * of_wave + 2
    torch.manual_seed(2)
    codes = [torch.randint(-15, 16, (rows, k)).float() for rows in (m, n)]
    of_a = torch.logspace(-9, 9, m)
    codes[0][3] = 0.0
    of_a[of_wave:-2] = torch.logspace(-39, -37, of_wave)  # with remainders that are subnormal
    of_a[-2:] = torch.tensor([math.inf, math.nan])  # of a third wave
    of_b = torch.rand(n) + 0.5
    of_b[::7] = 1e-7  # what is negative there becomes 0 of FP8
    left, right = (
        QuantizedTensor(x.to(form.dtype), scale[:, None], Granularity.ROW)
        for x, scale in zip(codes, (of_a, of_b), strict=True)
    )
    macros = {"TILE_N": n, "BY_GROUP": 0, "NORM": 0, "SPAN": n, "ACTIVATION": 0,
              "OUT": OUTPUTS.index(output)}  # fmt: skip
    path = program("gemm_norm", gpu, macros, folder())
    assert right.scale is not None
    exact = numerics.quantize(
        codes[0] @ codes[1].t() * of_a[:, None] * right.scale[:, 0], form, output
    )
    assert exact.scale is not None
    for reverse in (False, True):
        found = normalized(path, left, right, NormEpilogue(norm_named("none")), output, tmp_path,
                           reverse=reverse)  # fmt: skip
        assert isinstance(found, QuantizedTensor) and found.scale is not None
        assert torch.equal(found.scale, exact.scale)
        assert torch.equal(found.data.view(torch.uint8), exact.data.view(torch.uint8))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("gpu", FORMATS)
def test_gemm_norm_applies_any_given_scale_as_the_emulation_does(gpu: str, tmp_path: Path) -> None:
    """Sums that are exact, to the byte, in a whole tile and another one."""
    form, (m, n, k) = FORMATS[gpu], (70, 64, 128)
    torch.manual_seed(3)
    codes = [torch.randint(-15, 16, (rows, k)).float() for rows in (m, n)]
    of_b = 2.0 ** torch.randint(-3, 4, (n,))
    right = QuantizedTensor(codes[1].to(form.dtype), of_b[:, None], Granularity.ROW)
    macros = {"TILE_N": n, "BY_GROUP": 0, "NORM": 0, "SPAN": n, "ACTIVATION": 0,
              "OUT": OUTPUTS.index(Granularity.TENSOR)}  # fmt: skip
    path = program("gemm_norm", gpu, macros, folder())
    for scale in (GIVEN_SCALE, 1.1 * 2.0**-126, 1.3 * 2.0**-61, 1.7 * 2.0**60, 2.0**125):
        # Ratios from 0 to what saturates, many of them halfway between two numbers of FP8.
        of_a = scale * 2.0 ** torch.linspace(-20, 2, m).round()
        of_a[-2:] = torch.tensor([math.inf, math.nan])
        left = QuantizedTensor(codes[0].to(form.dtype), of_a[:, None], Granularity.ROW)
        sums = codes[0] @ codes[1].t() * of_a[:, None] * of_b
        found = normalized(path, left, right, NormEpilogue(norm_named("none")), Granularity.TENSOR,
                           tmp_path, given_scale=scale)  # fmt: skip
        assert isinstance(found, QuantizedTensor)
        given = torch.tensor([[scale]])
        exact, _ = numerics.quantize_static(sums, form, Granularity.TENSOR, given)
        assert torch.equal(found.data.view(torch.uint8), exact.data.view(torch.uint8)), scale


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("gpu", FORMATS)
def test_gemm_norm_rounds_beside_the_one_tie_that_a_short_quotient_misses(
    gpu: str, tmp_path: Path
) -> None:
    """2^-24 above half of the smallest number of FP8, under the largest scale below 1."""
    form, (m, n, k) = FORMATS[gpu], (64, 64, 16)
    maximum = torch.tensor(form.maximum)
    of_b = torch.full((n,), torch.finfo(form.dtype).smallest_normal / 16)
    of_b[0] = torch.nextafter(maximum, torch.tensor(0.0))
    codes = [torch.zeros(rows, k) for rows in (m, n)]
    for each in codes:
        each[:, 0] = 1.0
    left, right = (
        QuantizedTensor(x.to(form.dtype), scale[:, None], Granularity.ROW)
        for x, scale in zip(codes, (torch.ones(m), of_b), strict=True)
    )
    macros = {"TILE_N": n, "BY_GROUP": 0, "NORM": 0, "SPAN": n, "ACTIVATION": 0, "OUT": 1}
    found = normalized(program("gemm_norm", gpu, macros, folder()), left, right,
                       NormEpilogue(norm_named("none")), Granularity.ROW, tmp_path)  # fmt: skip
    exact = numerics.quantize(of_b.expand(m, n).contiguous(), form, Granularity.ROW)
    assert isinstance(found, QuantizedTensor) and exact.scale is not None
    assert exact.scale.unique().tolist() == [1.0 - 2.0**-24]
    assert exact.data.view(torch.uint8)[:, 1:].unique().tolist() == [1]
    assert torch.equal(found.data.view(torch.uint8), exact.data.view(torch.uint8))


SPECIAL = (math.nan, 1.0, -1.0, 0.0, math.inf, 2.0, -2.0, 1e-3, -math.inf, 9.0, -9.0, -1e-3,
           1e30, 30.0, -30.0, 60.0, -1e30, 100.0, -100.0, -60.0)  # fmt: skip


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("gpu", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS[3:])
def test_gemm_norm_activates_a_number_whatever_its_neighbors_are(
    gpu: str, activation: str, tmp_path: Path
) -> None:
    """Four share a reciprocal, among them NaN and infinities; what is below 2^-94 may be 0."""
    form, (m, n, k) = FORMATS[gpu], (64, 64, 16)
    bias = torch.cat([torch.tensor(SPECIAL), torch.linspace(-20, 20, n - len(SPECIAL))])
    left, right = (
        QuantizedTensor(torch.zeros(rows, k).to(form.dtype), torch.ones(rows, 1), Granularity.ROW)
        for rows in (m, n)
    )
    macros = {"TILE_N": n, "BY_GROUP": 0, "NORM": 0, "SPAN": n,
              "ACTIVATION": ACTIVATIONS.index(activation), "OUT": 0}  # fmt: skip
    path = program("gemm_norm", gpu, macros, folder())
    epilogue = NormEpilogue(norm_named("none"), bias, activation=activation)
    exact = ops.ACTIVATIONS[activation][0](bias.double())
    least = 2.0**-94 if activation == "silu" else 1e-6
    for reverse in (False, True):
        found = normalized(path, left, right, epilogue, Granularity.NONE, tmp_path, reverse=reverse)
        assert isinstance(found, Tensor)
        allowed = (2.0**-8 * exact.abs()).clamp_min(least)
        near = ((found - exact).abs() <= allowed) | (found == exact)
        assert (near | (found.isnan() & exact.isnan())).all(), bias[~near.all(dim=0)]


@pytest.mark.parametrize("activation", ACTIVATIONS[4:])
def test_gemm_norm_has_gelu_near_that_of_float64(activation: str, tmp_path: Path) -> None:
    """Before it is rounded; reciprocals err by one unit in the last place in one of both orders."""
    where = folder("_activations")
    text = """#include "gemm_norm.hip"
    static void activations(Floats4* z, long count) {
        for (long i = thread_index(); i < count; i += 256) z[i] = activated(z[i]);
    }
    """
    made_once(where / "activations.hip", lambda to: to.write_text(text))
    macros = {"TILE_N": 64, "BY_GROUP": 0, "NORM": 0, "SPAN": 64,
              "ACTIVATION": ACTIVATIONS.index(activation), "OUT": 0}  # fmt: skip
    path = program("activations", "gfx950", macros, where)
    sizes = torch.logspace(-40, 38, 500)
    given = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, -0.0, 1.0])
    v = torch.cat([given, sizes, -sizes, torch.linspace(-30, 30, 40000)])
    exact = ops.ACTIVATIONS[activation][0](v.double())
    for reverse in (False, True):
        (found,) = launch(path, 1, [v], [len(v) // 4], tmp_path, reverse=reverse)
        assert torch.equal(found.isnan(), exact.isnan())
        assert found[1] == math.inf and not found[4:7].any()
        assert not found[5].signbit() and bool(found[6].signbit())
        error, finite = (found.double() - exact).abs(), exact.isfinite()
        assert (error <= 8e-7 + 2.0**-21 * exact.abs())[finite].all(), error[finite].max()
        inner, small = (v >= -4.5) & (v.abs() > 1e-30) & finite, v.abs() < 1
        assert (error <= 8e-4 * exact.abs())[inner].all()
        assert (error <= 3e-6 * exact.abs() + 1e-38)[small].all()


def normalized(
    path: Path, left: QuantizedTensor, right: QuantizedTensor, epilogue: NormEpilogue,
    output: Granularity, tmp_path: Path, *, reverse: bool = False, aligned: bool = False,
    given_scale: float = GIVEN_SCALE,
) -> Tensor | QuantizedTensor:  # fmt: skip
    """Output ``[m, n]`` of a program with a norm, for rows of both operands.

    Rows of bfloat16 are aligned or not, those of FP8 always.
    """
    (m, k), n, form = left.shape, right.shape[0], left.format
    assert left.scale is not None and right.scale is not None
    pitch, out_pitch = pitch_of(k), pitch_of(n)
    if output is Granularity.NONE:
        out_pitch = -(-(n + 3) // 8) * 8 if aligned else n + 3
        out = torch.full((m, out_pitch), 7.0, dtype=torch.bfloat16)
    else:
        out = torch.full((m, out_pitch), form.nan_byte, dtype=torch.uint8)
    groups = -(-n // 128) if output is Granularity.GROUP else 1
    of_out = torch.full((groups, m), math.nan)
    if output is Granularity.TENSOR:
        of_out = torch.tensor([[given_scale]])
    given = (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    buffers = [
        whole_rows(left), left.scale.t().contiguous(), whole_rows(right), right.scale.contiguous(),
        out, of_out,
        *(torch.empty(0) if x is None else x for x in given),
    ]  # fmt: skip
    strides = [m, right.scale.shape[1]] if left.granularity is Granularity.GROUP else [0, 0]
    found = launch(path, -(-m // 64), buffers, [m, n, k, pitch, pitch, out_pitch, *strides, m],
                   tmp_path, reverse=reverse)  # fmt: skip
    if output is Granularity.NONE:
        assert (found[4][:, n:] == 7).all(), "it writes between the rows"
        return found[4][:, :n]
    assert (found[4][:, n:] == form.nan_byte).all(), "it writes between the rows"
    scale = output.empty_scale(m, n, torch.device("cpu")).copy_(found[5].t())
    return QuantizedTensor.packed(found[4][:, :n].view(form.dtype), scale, output)


# --- through the launchers


class HostLaunch:
    """Takes the place of a HipLaunch and runs the same program on the CPU."""

    def __init__(self, gpu: str, tmp_path: Path, made: Program, **kinds: Any) -> None:
        self._kinds = kinds
        self._threads = threads_of(made.entry, dict(made.macros))
        self._path = program(made.entry, gpu, dict(made.macros), folder())
        self._tmp_path = tmp_path

    def __call__(
        self, blocks: int, pointers: Sequence[Tensor | None], scalars: Sequence[int]
    ) -> None:
        assert len(pointers) == self._kinds["pointers"]
        assert len(scalars) == len(self._kinds["scalars"])
        assert self._kinds["threads"] == self._threads
        nothing = torch.empty(0, dtype=torch.uint8)
        whole = [nothing if pointer is None else bytes_of(pointer) for pointer in pointers]
        found = launch(self._path, blocks, whole, scalars, self._tmp_path)
        for own, after in zip(whole, found, strict=True):
            own.copy_(after)


def bytes_of(x: Tensor) -> Tensor:
    """All bytes from where a tensor begins to the end of its memory, as they lie."""
    storage = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    return storage[x.storage_offset() * x.element_size() :]


@pytest.fixture(params=sorted(FORMATS))
def amd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    on_host = functools.partial(HostLaunch, request.param, tmp_path)
    for module in (dequantize, gemm_norm, quantize, scaled_gemm):
        monkeypatch.setattr(module, "HipLaunch", on_host)
        monkeypatch.setattr(module, "bind", functools.cache(module.bind.__wrapped__))
    return Device("amd", "AMD Instinct", request.param, 304, 192)


def case_problems(fp8: Format) -> Iterator[Problem]:
    a = {form: Operand(form) for form in (Format.BFLOAT16, Format.FLOAT32)}
    mx = fp8 is Format.E4M3FN
    for granularity in (Granularity.ROW, Granularity.GROUP, Granularity.MX)[: 2 + mx]:
        for form, operand in a.items():
            fields: dict[str, Any] = {"out_format": fp8, "out_granularity": granularity}
            yield make_problem("quantize", (37, 200), a=operand, **fields)
            yield make_problem("dequantize", (37, 200), a=Operand(fp8, granularity),
                               out_format=form)  # fmt: skip
    for scales in list(SCALES.values())[: 2 + mx]:
        for epilogue in ("none", "bias"):
            for shape in ((70, 136, 272), (5, 8, 16)):
                left, right = Operand(fp8, scales[0]), Operand(fp8, scales[1], Layout.COLUMN)
                yield make_problem("scaled_gemm", shape, a=left, b=right, epilogue=epilogue)


WITH_NORM = {
    "bias+layer+affine": ((70, 136, 272), Granularity.NONE),
    "rms+silu": ((33, 40, 96), Granularity.ROW),
    "bias+block_rms(64)+hardswish": ((5, 192, 128), Granularity.GROUP),
    "block_rms(32)+relu": ((64, 64, 48), Granularity.TENSOR),
    "bias+layer+affine+gelu": ((33, 40, 96), Granularity.TENSOR),
    "bias+gelu_tanh": ((5, 64, 128), Granularity.ROW),
    "none": ((3, 8, 16), Granularity.NONE),
}


def norm_problems(fp8: Format) -> Iterator[Problem]:
    for number, (epilogue, (shape, output)) in enumerate(WITH_NORM.items()):
        scales = SCALES["row" if number else "group"]
        left, right = Operand(fp8, scales[0]), Operand(fp8, scales[1], Layout.COLUMN)
        form = Format.BFLOAT16 if output is Granularity.NONE else fp8
        yield make_problem("gemm_norm", shape, a=left, b=right, epilogue=epilogue, out_format=form,
                           out_granularity=output)  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize("amd", ["gfx950"], indirect=True)  # both run in the tests above
def test_launchers_pass_the_arguments_of_their_kernels(amd: Device) -> None:
    """Through the operands and the check of the bench, on every kernel of the registry here."""
    seen = {"hip.dequantize_tensor", "hip.dequantize_block"}  # in the next test
    own = {name for name, k in KERNELS.items() if k.language == "hip" and not k.parts}
    form = FORMATS[amd.architecture]
    for problem in (*case_problems(form), *norm_problems(form)):
        for name, kernel in KERNELS.items():
            if name not in own or isinstance(kernel.supports(problem, amd), Rejected):
                continue
            seen.add(name)
            operands = operands_of(problem, "X5", torch.device("cpu"), amd, cold=False)
            operands.poison()
            contender_of(operands, kernel).calls[0]()
            error, wrong = operands.check(kernel)
            assert not wrong, f"{name} at {problem}: {wrong} ({error})"
    assert seen == own


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.BLOCK])
def test_dequantize_supports_every_granularity(amd: Device, granularity: Granularity) -> None:
    launch = KERNELS[f"hip.dequantize_{granularity.suffix}"].launch
    for rows, columns in (*SIZES, (200, 300)):
        x = numerics.quantize(
            hostile(rows, columns, torch.float32), FORMATS[amd.architecture], granularity
        )
        out = torch.full((rows, columns), 7.0, dtype=torch.bfloat16)
        launch(x.data, x.scale, out, ())
        exact = numerics.dequantize(x, torch.bfloat16)
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out.nan_to_num(nan=0.0), exact.nan_to_num(nan=0.0)), (rows, columns)


@pytest.mark.parametrize("gpu", FORMATS)
def test_unsupported_problems_are_rejected(gpu: str) -> None:
    """The format of the other generation above all: its bits would mean half or twice as much."""
    device = Device("amd", "AMD Instinct", gpu, 304, 192)
    own = FORMATS[gpu]
    (other,) = set(FORMATS.values()) - {own}
    for problem in (*case_problems(own), *norm_problems(own)):
        for name, kernel in KERNELS.items():
            if kernel.language != "hip" or isinstance(kernel.supports(problem, device), Rejected):
                continue
            changes: list[dict[str, Any]] = [{"a": replace(problem.a, layout=Layout.COLUMN)}]
            if problem.op == "quantize":
                changes.append({"out_format": other})
            else:
                changes.append({"a": replace(problem.a, format=other)})
                changes.append({"a": replace(problem.a, alignment=8)})
            for change in changes:
                answer = kernel.supports(replace(problem, **change), device)
                assert isinstance(answer, Rejected) and answer.reason, (name, change)


# --- the largest launches

GRID = 2**32  # threads: HIP takes grids of fewer
META = torch.device("meta")


def tall(name: str, m: int, n: int, k: int, form: Format) -> Problem:
    """A problem of m rows for a kernel: columns k, and n of products."""
    kernel = KERNELS[name]
    own = Operand(form, kernel.granularity)
    if kernel.op == "quantize":
        return make_problem("quantize", (m, k), out_format=form, out_granularity=kernel.granularity)
    if kernel.op == "dequantize":
        return make_problem("dequantize", (m, k), a=own)
    of_b = Operand(form, kernel.b_granularity, Layout.COLUMN)
    return make_problem(kernel.op, (m, n, k), a=own, b=of_b)


def launch_on_meta(name: str, problem: Problem) -> None:
    """Launch a kernel on operands without memory."""
    kernel, (m, n, k) = KERNELS[name], (problem.m, problem.n, problem.k)

    def quantized(rows: int, columns: int, granularity: Granularity) -> QuantizedTensor:
        form = problem.out_format if kernel.op == "quantize" else problem.a.format
        scale = granularity.empty_scale(rows, columns, META)
        return QuantizedTensor(empty_data(rows, columns, form.dtype, META), scale, granularity)

    a = quantized(m, k, kernel.granularity)
    if kernel.op in ("quantize", "dequantize"):
        x = torch.empty((m, k), dtype=torch.bfloat16, device=META)
        operands = (x, a.data, a.scale) if kernel.op == "quantize" else (a.data, a.scale, x)
        kernel.launch(*operands, ())
        return
    b, out = quantized(n, k, kernel.b_granularity), torch.empty((m, n), dtype=torch.bfloat16,
                                                                device=META)  # fmt: skip
    if kernel.op == "gemm_norm":
        kernel.launch(a, b.t(), out, NormEpilogue(norm_named("none")), (torch.empty(3, n),))
    else:
        kernel.launch(a.data, a.scale, b.data.t(), b.t().scale, out, None, ())


@pytest.mark.parametrize(
    ("name", "n", "k", "threads_of_rows"),  # threads, and the rows that they are for
    [
        ("quantize_row", 1, 8, (64, 1)), ("quantize_group", 1, 200, (32, 1)),
        ("quantize_mx", 1, 40, (8, 1)), ("dequantize_tensor", 1, 200, (13, 1)),
        ("dequantize_row", 1, 40, (3, 1)), ("dequantize_group", 1, 140, (9, 1)),
        ("dequantize_block", 1, 70, (5, 1)), ("dequantize_mx", 1, 40, (3, 1)),
        ("scaled_gemm_row", 300, 16, (768, 128)), ("scaled_gemm_block", 300, 16, (768, 128)),
        ("scaled_gemm_mx", 300, 16, (768, 128)), ("gemm_norm_row", 64, 16, (256, 64)),
        ("gemm_norm_block", 8, 16, (256, 64)),
    ],
)  # fmt: skip
def test_a_grid_that_is_too_large_for_hip_is_rejected(
    name: str, n: int, k: int, threads_of_rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tallest problem that is taken is launched, one row more is refused with a reason."""
    grids: list[int] = []

    def launch(self: HipLaunch, blocks: int, pointers: Any, scalars: Any) -> None:
        self.packed((*(0 for _ in pointers), *scalars))  # raises where one does not fit
        grids.append(blocks * self._threads)

    monkeypatch.setattr(HipLaunch, "__call__", launch)
    monkeypatch.setattr(jit, "compute_units", lambda _: 304)
    device = Device("amd", "AMD Instinct", "gfx950", 304, 288)
    kernel, form = KERNELS[f"hip.{name}"], FORMATS["gfx950"]
    threads, rows = threads_of_rows
    tallest = (GRID // BLOCK - 1) * BLOCK // threads * rows
    taken, refused = (tall(kernel.name, m, n, k, form) for m in (tallest, tallest + 1))
    assert kernel.supports(taken, device) == ACCEPTED
    answer = kernel.supports(refused, device)
    assert isinstance(answer, Rejected) and "2^32 threads" in answer.reason
    for problem in (taken, refused):
        launch_on_meta(kernel.name, problem)
    assert grids[0] < GRID <= grids[1]


LARGE = {  # rows and columns of a that 32 bits count, what they do not, and kernels with a limit
    "rows": ((2**20, 16), (2**31, 16), "hip."),
    "columns": ((1, 2**31 - 1024), (1, 2**31 - 1023), "hip.quantize hip.dequantize"),
    "bytes": ((1, 2**23 - 128), (1, 2**23 - 127), "hip.scaled_gemm hip.gemm_norm"),
    "scales": ((2**24 - 4, 2**14), (2**24 - 3, 2**14), "hip.scaled_gemm_block hip.gemm_norm_block"),
}


@pytest.mark.parametrize("what", LARGE)
def test_sizes_beyond_32_bits_are_rejected(what: str) -> None:
    device = Device("amd", "AMD Instinct", "gfx950", 304, 288)
    taken, refused, names = LARGE[what]
    limited = [name for name, kernel in KERNELS.items() if not kernel.parts
               and name.startswith(tuple(names.split()))]  # fmt: skip
    assert len(limited) in (2, 5, 8, 13)
    for name in limited:
        by_shape = [tall(name, m, 8, k, FORMATS["gfx950"]) for m, k in (taken, refused)]
        assert KERNELS[name].supports(by_shape[0], device) == ACCEPTED, name
        answer = KERNELS[name].supports(by_shape[1], device)
        assert isinstance(answer, Rejected), name
        assert re.search("in 32 bits|fewer than 8388608 bytes", answer.reason), name


def test_tiles_need_the_fewest_counted_cycles() -> None:
    """Of the busiest compute unit."""
    tile_for = scaled_gemm.tile_for
    for n, tile in ((1024, (256, 256)), (64, (128, 64)), (16, (128, 32))):
        assert tile_for(1 << 20, n, 256, fnuz=False) == tile
        assert tile_for(1 << 20, n, 304, fnuz=True) == tile
    # 512 blocks of 128 x 128 take two rounds, 128 of 256 x 256 one, which is longer.
    assert tile_for(8192, 1024, 256, fnuz=False) == (128, 128)
    # 256 blocks of 64 x 64 take one round, 1024 of 32 x 32 four, each almost half as long.
    assert tile_for(2048, 512, 304, fnuz=True) == (64, 64)
    assert tile_for(64, 16, 304, fnuz=True) == (32, 32)


def test_cycles_of_tiles_are_those_that_are_counted() -> None:
    recorded = json.loads((KERNELS_FOLDER / "resources.json").read_text())
    for tile, cycles in scaled_gemm.TILES.items():
        name = f"scaled_gemm TILE_M={tile.m} TILE_N={tile.n} SCALES=0"
        for gpu, expected in zip(("gfx942", "gfx950"), cycles, strict=True):
            found = recorded[gpu][name]
            spent = sum(found["whole"]["k=1024"][kind] for kind in
                        ("matrix", "vector", "scalar", "local", "memory", "waits"))  # fmt: skip
            assert spent * found["waves"] // 4 == expected, (gpu, tile)


def test_rows_too_far_apart_raise_at_the_launch() -> None:
    """Where they begin in a tile is counted in 32 bits, which `supports` cannot see."""
    far = torch.empty(1, dtype=torch.float8_e4m3fn, device=META).expand(2, 16)
    far = far.as_strided((2, 16), (2**23, 1))
    near = torch.empty((2, 16), dtype=torch.float8_e4m3fn, device=META)
    scaled_gemm.check_pitches(a=near, b=near)
    scaled_gemm.check_pitches(a=far[:1], b=near)  # one row
    with pytest.raises(LaunchError, match=r"a: rows.* begin 8388608 bytes apart.*: copy a"):
        scaled_gemm.check_pitches(a=far, b=near)
    with pytest.raises(LaunchError, match=r"b: rows"):
        scaled_gemm.check_pitches(a=near, b=far)


# --- without a GPU: HIP's interface


def test_arguments_are_packed_as_hip_wants_them() -> None:
    launch = HipLaunch(Program("x.hip", "x"), pointers=2, scalars="iqif", threads=64)
    memory, table = launch.packed((0x1234, 0, 7, -(2**40), 9, 0.5))
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_int,
             ctypes.c_float)  # fmt: skip
    found = [kind.from_address(at).value for kind, at in zip(kinds, table, strict=True)]
    assert found == [0x1234, None, 7, -(2**40), 9, 0.5]
    assert all(at % ctypes.sizeof(kind) == 0 for kind, at in zip(kinds, table, strict=True))
    assert len(memory) == struct.calcsize("PPiqif")


def test_a_launch_passes_its_arguments_to_the_module_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                calls.append((name, *arguments))
                return int(name == "hipModuleLaunchKernel" and arguments[1] > 100)

            return call

        hipGetErrorString = staticmethod(lambda _failed: b"invalid configuration")

    made = Program(str(KERNELS_FOLDER / "quantize.hip"), "quantize")
    monkeypatch.setattr(hip, "_runtime", lambda: Runtime())
    monkeypatch.setattr(hip, "code_object", lambda program, architecture: b"code")
    monkeypatch.setattr(hip, "current_device", lambda *_: Device("amd", "A", "gfx942", 1, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    tensor: Any = SimpleNamespace(is_meta=False, get_device=lambda: 0, data_ptr=lambda: 4096)
    run = HipLaunch(made, pointers=2, scalars="i", threads=256)
    for _ in range(2):
        run(3, (tensor, None), (5,))
    names = [call[0] for call in calls]
    assert names == ["hipModuleLoadData", "hipModuleGetFunction", *["hipModuleLaunchKernel"] * 2]
    _, _function, *grid, stream, _table, extra = calls[-1]
    assert grid == [3, 1, 1, 256, 1, 1, 0] and stream.value == 77 and extra is None
    with pytest.raises(LaunchError, match=r"of quantize\.hip:quantize, 101 blocks: invalid config"):
        run(101, (tensor, None), (5,))
    with pytest.raises(LaunchError, match="bound for"):
        run(1, (tensor,), (5,))


def test_a_launch_without_rocm_raises_with_the_missing_library() -> None:
    made = Program(str(KERNELS_FOLDER / "quantize.hip"), "quantize")
    with pytest.raises(CompilationError, match=r"HIP kernels need ROCm's libhiprtc\.so"):
        hip.code_object(made, "gfx942")
