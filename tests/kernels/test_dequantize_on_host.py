"""Dequantizing by CUDA, compiled for the CPU as in test_cuda_on_host.py."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.kernels.cuda import dequantize
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import (
    ACCEPTED,
    Format,
    Granularity,
    Layout,
    Operand,
    QuantizedTensor,
    Rejected,
)
from tests.support import cuda_host_launch as host
from tests.support.measurements import H200

load_kernels()
FORMS = (Format.E4M3FN, Format.E5M2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK)


@pytest.fixture(scope="module")
def folder() -> Path:
    headers = {
        "ptx.cuh": host.HEADER,
        "half_ptx.cuh": host.HALF_HEADER,
        "dequantize_ptx.cuh": host.DEQUANTIZE_HEADER,
    }
    return host.sources("dequantize", {"dequantize.cu": Path(dequantize.SOURCE)} | headers)


@pytest.fixture(autouse=True)
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "CudaLaunch", functools.partial(host.HostLaunch, folder))
    monkeypatch.setattr(dequantize, "bind", functools.cache(dequantize.bind.__wrapped__))


def quantized(rows: int, columns: int, form: Format, scales: Granularity) -> QuantizedTensor:
    """Any bytes, NaN among them, with scales of any size; bytes between rows, too."""
    generator = torch.Generator().manual_seed(rows * columns)
    data = numerics.quantize(torch.zeros(rows, columns), form, scales).data
    whole = data.as_strided((rows, data.stride(0)), (data.stride(0), 1))
    whole.view(torch.uint8).random_(0, 256, generator=generator)
    scale = scales.empty_scale(rows, columns, data.device)
    scale.copy_(torch.exp2(torch.rand(scale.shape, generator=generator) * 40 - 24))
    return QuantizedTensor(data, scale, scales)


def check(
    x: QuantizedTensor,
    dtype: torch.dtype,
    gap: int = 0,
    offset: int = 0,
    data: Tensor | None = None,
) -> None:
    """Bits are those of the emulation, and nothing beside rows is written; of data elsewhere."""
    rows, columns = x.data.shape
    data = x.data if data is None else data
    whole = torch.full((rows * (columns + gap) + offset + 64,), 77.0, dtype=dtype)
    out = whole[offset:].as_strided((rows, columns), (columns + gap, 1))
    expected = whole.clone()
    exact = numerics.dequantize(x, dtype)
    expected[offset:].as_strided(out.shape, out.stride()).copy_(exact)
    KERNELS[f"cuda.dequantize_{x.granularity.suffix}"].launch(data, x.scale, out, ())
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[exact == 0], exact.signbit()[exact == 0])


# Whole pieces; rows that end within one, and within a word of q; groups that end within a row.
SIZES = ((1, 1), (3, 8), (5, 13), (9, 200), (130, 272))


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sample(every=5)
def test_values_have_the_bits_of_the_emulation(scales: Granularity, dtype: torch.dtype) -> None:
    form = Format.E5M2 if dtype is torch.float16 else Format.E4M3FN
    for rows, columns in SIZES:
        for gap in (0, 16):
            check(quantized(rows, columns, form, scales), dtype, gap)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sample(every=5)
def test_rows_may_start_and_end_anywhere(scales: Granularity, dtype: torch.dtype) -> None:
    """Of q and of the output: pieces reach beyond rows and into the next group."""
    form = Format.E5M2 if dtype is torch.float16 else Format.E4M3FN
    for rows, columns, gap in [(1, 1, 0), (6, 3, 0), (7, 13, 2), (6, 269, 1), (5, 136, 7)]:
        x = quantized(rows, columns, form, scales)
        for offset in (0, 1, 3):
            for stride in (columns, columns + 5):
                memory = torch.full((rows * stride + offset,), 0x11, dtype=torch.uint8)
                data = memory[offset:].as_strided((rows, columns), (stride, 1))
                data = data.copy_(x.data.view(torch.uint8)).view(form.dtype)
                check(x, dtype, gap, offset, data)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.sample(every=4)
def test_a_thread_may_have_several_rows(
    scales: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a GPU is full: rows that are no multiple of these, and blocks that are not full."""
    monkeypatch.setattr(dequantize, "FILLING", 0)
    for rows, columns in [(4, 8), (7, 13), (131, 272), (9, 261)]:
        x = quantized(rows, columns, Format.E4M3FN, scales)
        for gap, offset in ((0, 0), (16, 0), (3, 1)):
            check(x, torch.bfloat16, gap, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.sample(every=6)
def test_every_byte_is_dequantized(form: Format, dtype: torch.dtype) -> None:
    """NaN, infinity and subnormal bytes; float16 beyond 65504 becomes infinity."""
    data = torch.arange(256, dtype=torch.uint8).repeat(64, 1).view(form.dtype)
    scale = torch.logspace(-38, 37, 64).unsqueeze(1)
    x = QuantizedTensor(data, scale, Granularity.ROW)
    check(x, dtype)
    exact = numerics.dequantize(x, dtype)
    assert exact.isnan().any() and exact.isinf().any()


@pytest.mark.parametrize("filling", [0, dequantize.FILLING])
def test_offsets_are_64_bits_wide(filling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last row 2 GiB behind the first, in memory of which only a few pages are used."""
    monkeypatch.setattr(dequantize, "FILLING", filling)
    x = quantized(4, 16, Format.E4M3FN, Granularity.ROW)
    stride = 2**31 // 3 // 16 * 16 + 32
    far = torch.empty(3 * stride + 16, dtype=torch.uint8).as_strided((4, 16), (stride, 1))
    out = torch.empty(3 * stride // 2 + 16, dtype=torch.bfloat16)
    out = out.as_strided((4, 16), (stride // 2, 1))
    data = far.copy_(x.data.view(torch.uint8)).view(x.data.dtype)
    KERNELS["cuda.dequantize_row"].launch(data, x.scale, out, ())
    exact = numerics.dequantize(x, torch.bfloat16)
    torch.testing.assert_close(out, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_what_it_takes(scales: Granularity) -> None:
    kernel = KERNELS[f"cuda.dequantize_{scales.suffix}"]
    other = Granularity.ROW if scales is not Granularity.ROW else Granularity.TENSOR
    e4m3 = Operand(Format.E4M3FN, scales)
    fits = make_problem("dequantize", (70, 13), a=replace(e4m3, alignment=1))
    assert kernel.supports(fits, H200) == ACCEPTED
    assert kernel.supports(replace(fits, out_format=Format.FLOAT16), H200) == ACCEPTED
    for a, shape, why in (
        (replace(e4m3, granularity=other), (70, 13), "not"),
        (replace(e4m3, format=Format.E4M3FNUZ), (70, 13), "does not convert"),
        (replace(e4m3, layout=Layout.COLUMN), (70, 13), "row-major"),
        (e4m3, (2**31, 8), "2^31"),
        (e4m3, (2**20, 2**15), "2^35"),
    ):
        refused = kernel.supports(make_problem("dequantize", shape, a=a), H200)
        assert isinstance(refused, Rejected) and why in refused.reason
