"""1x32 scales: powers of two in one byte, from quantizing to the product."""

from __future__ import annotations

import math

import pytest
import torch

import lokakern
from lokakern import mx, numerics
from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.kernels.torch.mx import in_tiles, tiles_for
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import (
    Accepted,
    Device,
    Format,
    Granularity,
    Operand,
    QuantizedTensor,
    Rejected,
)

load_kernels()
B200 = Device("nvidia", "NVIDIA B200", "sm_100", 148, 180)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
MI350X = Device("amd", "AMD Instinct MI350X", "gfx950", 256, 288)


def quantized(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, QuantizedTensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    return x, numerics.quantize(x, Format.E4M3FN, Granularity.MX)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 128, 260])
def test_scales_are_powers_of_two_and_nothing_saturates(columns: int) -> None:
    x, q = quantized(7, columns)
    assert q.scale is not None and q.scale.shape == (7, -(-columns // 32))
    mantissa, _ = torch.frexp(q.scale.float())
    assert (mantissa == 0.5).all()
    assert (q.data.float().abs() <= 448).all()
    assert (q.data.float().abs() > 448 / 2).any()  # of a scale twice as large half is unused
    smallest = q.scale.float().amax(1, keepdim=True) * 2**-9  # of the format, in its scale
    assert ((numerics.dequantize(q) - x).abs() <= 2**-4 * x.abs() + smallest / 2).all()


@pytest.mark.parametrize(
    ("largest", "byte"),
    [(0.0, 127), (448.0, 127), (448.0001, 128), (2.0**-149, 1), (2.0**-126, 1),
     (torch.finfo(torch.float32).max, 127 + 120)],
)  # fmt: skip
def test_a_scale_is_rounded_up(largest: float, byte: int) -> None:
    q = numerics.quantize(torch.tensor([[largest, math.nan]]), Format.E4M3FN, Granularity.MX)
    assert q.scale is not None
    assert q.scale.view(torch.uint8).tolist() == [[byte]]


def test_rows_of_scales_start_at_words() -> None:
    scale = Granularity.MX.empty_scale(5, 200, torch.device("cpu"))
    assert scale.dtype is mx.SCALE and scale.shape == (5, 7) and scale.stride() == (8, 1)
    assert scale.untyped_storage().nbytes() == 5 * 8  # words of the last row are there, too


def test_scales_of_another_dtype_raise() -> None:
    _, q = quantized(4, 64)
    assert q.scale is not None
    with pytest.raises(ShapeError, match="float8_e8m0fnu"):
        QuantizedTensor(q.data, q.scale.float(), Granularity.MX)
    by_group = numerics.quantize(torch.ones(4, 64), Format.E4M3FN, Granularity.GROUP)
    assert by_group.scale is not None
    with pytest.raises(ShapeError, match="float32"):
        QuantizedTensor(by_group.data, by_group.scale.to(mx.SCALE), Granularity.GROUP)


def test_no_norm_writes_1x32_scales() -> None:
    a, b = torch.ones(4, 64), torch.ones(64, 64)
    with pytest.raises(FormatError, match=r"'1x32'; expected tensor, row or 1x128"):
        lokakern.gemm_norm(a.bfloat16(), b.bfloat16(), norm="rms", out_format="e4m3fn",
                           out_granularity="1x32")  # fmt: skip


SHAPES = (
    (1, 1, 1), (3, 24, 13), (70, 40, 300), (33, 17, 39), (64, 64, 128), (65, 130, 200),
    (128, 48, 144), (5, 1, 640), (130, 33, 257), (64, 128, 384), (1, 8, 16), (97, 71, 511),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_public_functions_support_mx_scales(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(n, k, generator=generator)
    a, b = lokakern.quantize(x, "1x32"), lokakern.quantize(w, "1x32", power_of_two=True)
    assert torch.equal(a.data.float(), numerics.quantize(x, a.format, Granularity.MX).data.float())
    bias = torch.randn(n, generator=generator).bfloat16()
    out = lokakern.scaled_gemm(a, b.t(), bias=bias)
    exact = numerics.dequantize(a, torch.float64) @ numerics.dequantize(b, torch.float64).t()
    magnitude = exact.abs() + bias.abs() + 1
    assert ((out - (exact + bias)).abs() <= 2**-7 * magnitude).all()
    back = lokakern.dequantize(a, out_format="float32")
    assert torch.equal(back, numerics.dequantize(a))


def test_quantize_transpose_has_mx_scales_both_ways() -> None:
    x = torch.randn(70, 50, generator=torch.Generator().manual_seed(1))
    one, other, sums = lokakern.quantize_transpose(x, "1x32", column_sums=True)
    for found, source in ((one, x), (other, x.t())):
        exact = numerics.quantize(source, Format.E4M3FN, Granularity.MX)
        assert torch.equal(found.data.view(torch.uint8), exact.data.view(torch.uint8))
    assert sums is not None and torch.allclose(sums, x.sum(0), atol=1e-4)


def test_other_scales_cannot_be_mixed_with_mx_scales() -> None:
    a = lokakern.quantize(torch.ones(4, 64), "1x32")
    b = lokakern.quantize(torch.ones(8, 64), "row")
    with pytest.raises(UnsupportedError, match="1x32"):
        lokakern.scaled_gemm(a, b.t())


def test_moves_and_packing_keep_mx_scales() -> None:
    _, q = quantized(9, 70)
    assert q.scale is not None
    again = QuantizedTensor.packed(q.data.clone(), q.scale.contiguous(), Granularity.MX)
    for found in (again, q.to("cpu")):
        assert torch.equal(numerics.dequantize(found), numerics.dequantize(q))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (128, 4), (129, 5), (300, 33)])
def test_scale_tiles_have_the_layout_of_cublaslt(shape: tuple[int, int]) -> None:
    rows, groups = shape
    bits = torch.randint(0, 254, shape, generator=torch.Generator().manual_seed(rows))
    scale = bits.to(torch.uint8).view(mx.SCALE)
    tiles, padded = tiles_for(scale)
    in_tiles(scale, padded, tiles)
    flat = tiles.flatten().view(torch.uint8)
    across = -(-groups // 4)
    assert len(flat) == -(-rows // 128) * across * 512
    found = torch.zeros_like(bits)
    for row in range(rows):
        for column in range(groups):
            tile = row // 128 * across + column // 4
            place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
            found[row, column] = flat[place]
    assert torch.equal(found, bits)
    assert int(flat.count_nonzero()) == int(bits.count_nonzero())  # the rest is padding


def test_architectures_that_multiply_with_mx_scales() -> None:
    """Each where its matrix cores do, and nobody elsewhere but the emulation."""
    a = Operand(Format.E4M3FN, Granularity.MX)
    for device, wanted in (
        (B200, "torch.scaled_mm_mx"),
        (MI350X, "hip.scaled_gemm_mx"),
        (MI300X, None),
    ):
        problem = make_problem("scaled_gemm", (256, 64, 96), a=a)
        takes = {
            name
            for name, kernel in KERNELS.items()
            if isinstance(kernel.supports(problem, device), Accepted)
        }
        assert takes == {"torch.emulated_mx"} | ({wanted} if wanted else set())
    kernel = KERNELS["torch.scaled_mm_mx"]
    odd = make_problem("scaled_gemm", (256, 64, 80), a=a)
    assert isinstance(kernel.supports(odd, B200), Rejected)
    assert kernel.unmeasured and not kernel.compile_only
