"""Triton's interpreter, which runs kernels on a CPU under TRITON_INTERPRET=1, rounding as GPUs do.

Up to Triton 3.9 its conversions round halves up or truncate and know no FP8 NaN, and up to 3.7 its
fused multiply-add rounds twice and it has no fnuz types. No part of a kernel's digest: nothing here
runs on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np
import torch

_YES = ("1", "true", "yes", "on", "y")  # what Triton takes for TRITON_INTERPRET
_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz, "fp8e5b16": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def is_interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _YES


@functools.cache
def make_exact() -> None:
    """Replace what the interpreter does differently from the GPUs, in this process."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    own_convert, own_fma, own_dot = (
        interpreter._convert_float, builder.create_fma, builder.create_dot
    )  # fmt: skip

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not {str(source), str(target)} <= _DTYPES.keys():
            return own_convert(data, source, target, rounding)
        return _converted(data, str(source), str(target))

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return own_fma(self, x, y, z)
        product = x.data.astype(np.float64) * y.data.astype(np.float64)  # exact: 24 + 24 bits
        result = (product + z.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(result, z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        forms = [str(x.dtype.scalar) for x in (a, b)]
        if d.data.dtype != np.float32 or not _DTYPES.keys() >= set(forms):
            return own_dot(self, a, b, d, *rest)
        left, right = (
            _converted(x.data, form, "fp32").view(np.float32)
            for x, form in zip((a, b), forms, strict=True)
        )
        return interpreter.TensorHandle(left @ right + d.data, d.dtype.scalar)

    patch_core = interpreter._patch_lang_core

    def patch_core_with_fnuz(language: Any, *scope: Any) -> None:
        patch_core(language, *scope)
        known = language.dtype.to_ir
        language.dtype.to_ir = lambda self, target: (
            self if self.name in ("fp8e4b8", "fp8e5b16") else known(self, target)
        )

    interpreter._patch_lang_core = patch_core_with_fnuz
    interpreter._convert_float = convert
    builder.create_fma, builder.create_dot = fma, dot


def _converted(data: Any, source: str, target: str) -> Any:
    """Bits of one of Triton's types to bits of another, rounded to nearest even."""
    have, want = _DTYPES[source], _DTYPES[target]
    raw = np.array(data, order="C")  # a copy: broadcast views have no bytes of their own
    raw = raw.view(np.dtype(f"{'u' if have.itemsize == 1 else ''}int{8 * have.itemsize}"))
    wide = torch.from_numpy(raw).view(have)
    if want.itemsize == 1:  # a NaN loses its sign, as in PTX's cvt
        wide = torch.where(torch.isnan(wide), torch.full_like(wide, torch.nan), wide)
    result = wide.to(want)
    return result.view(_BITS[want.itemsize]).numpy().view(f"u{want.itemsize}")
