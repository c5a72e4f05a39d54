"""Digests of what torchao's reference casts make of known rows.

``python -m tests.support.torchao_casts`` writes them into torchao_bits.json, with torchao 0.18
installed. Rows are made of random bits, so that they are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BITS = Path(__file__).with_name("torchao_bits.json")
SPREADS = (1, 4, 12, 30)  # of exponents


def rows_of(spread: int) -> Tensor:
    """Rows of bfloat16 ``[128, 512]``: some zeros, some tiny, exponents up to a spread around 1."""
    generator = torch.Generator().manual_seed(spread)

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (128, 512), generator=generator, dtype=torch.int32)

    exponent = 127 + drawn(-spread, spread + 1)
    exponent[5, 7:200] -= 90
    bits = drawn(0, 2) << 15 | exponent << 7 | drawn(0, 128)
    bits[3] = 0
    bits[9, 32:64] = 0x8000  # -0
    return torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.bfloat16)


def digest_of(form: str, scale: Tensor, elements: Tensor, value: Tensor | None = None) -> str:
    """SHA-256 of scales and elements, and of values if they are given.

    MX groups of zeros and with a scale of 2^-127 are left out: there torchao multiplies by 1.
    """
    scale = scale.float().reshape(len(scale), -1)
    whole = elements.float().reshape(*scale.shape, -1)
    if form.startswith("mx"):
        used = whole.any(-1) & (scale > 2.0**-127)
        scale, whole = scale[used], whole[used]
    digest = hashlib.sha256()
    for x in (scale, whole, *(() if value is None else (value.float(),))):
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def to_mx(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx as cast

    scale, data = cast(x, dtype, 32, ScaleCalculationMode.RCEIL)
    return scale.float(), data


def from_f4(data: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

    found: Tensor = f4_unpacked_to_f32(unpack_uint4(data))
    return found


def torchao_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    scale, data = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))
    return scale.float(), from_f4(data)


def torchao_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    scale, data = to_mx(x, torch.float4_e2m1fn_x2)
    return scale, from_f4(data)


def torchao_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale, data = to_mx(x, torch.float8_e4m3fn)
    return scale, data.float()


def torchao_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    found = Int8Tensor.from_hp(x, PerRow())
    return found.scale, found.qdata.float()


def torchao_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from torchao.quantization import quant_primitives as primitives

    limits = {"quant_min": 0, "quant_max": 15}
    scale, middle = primitives._choose_qparams_affine_tinygemm(
        x, primitives.MappingType.ASYMMETRIC, (1, 128), torch.int32, **limits,
        scale_dtype=x.dtype, zero_point_dtype=x.dtype,
    )  # fmt: skip
    data = primitives._quantize_affine_tinygemm(x, (1, 128), scale, middle, torch.int32, **limits)
    value = primitives._dequantize_affine_tinygemm(
        data, (1, 128), scale, middle, torch.int32, output_dtype=x.dtype, **limits
    )
    return scale.float(), data.float(), value.float()


THEIRS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "nvfp4": torchao_nvfp4, "mxfp4": torchao_mxfp4, "mxfp8": torchao_mxfp8, "int8": torchao_int8,
    "int4-weight": torchao_int4,
}  # fmt: skip


def record() -> None:
    found = {
        form: {str(spread): digest_of(form, *cast(rows_of(spread))) for spread in SPREADS}
        for form, cast in THEIRS.items()
    }
    BITS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
