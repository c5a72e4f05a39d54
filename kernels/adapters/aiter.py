"""The FP8 GEMM of AITER with scales of rows, for AMD's gfx942 and gfx950 (Composable Kernel).

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa[m] * sb[n]
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from lokakern.kernels.adapters.layouts import aligned
from lokakern.registry.libraries import Library, Package, declare, import_modules
from lokakern.registry.register import fp8_format, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
)

_NEVER = "no AMD GPU was at hand"
LIBRARY = declare(
    Library(
        name="aiter",
        packages=(Package("amd-aiter", ">=0.1.4", ("aiter",)),),
        install="see github.com/ROCm/aiter; PyPI's aiter is another",
        never_run=_NEVER,
    )
)
_GPUS = ("gfx942", "gfx950")


@functools.cache
def library() -> Any:
    """The module, imported when the first kernel is launched."""
    import_modules(LIBRARY)
    return importlib.import_module("aiter")


def _supports(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.ROW, Granularity.ROW):
        return Rejected(f"takes row x row scales, not {have[0].value} x {have[1].value}")
    fp8 = fp8_format(device)
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not fp8:
            return Rejected(f"multiplies {fp8.value} here; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.k % 16 or problem.n % 8:
        return Rejected(f"k must be a multiple of 16 and n of 8; k={problem.k}, n={problem.n}")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 only")
    return ACCEPTED


@register(
    "scaled_gemm",
    architectures=frozenset(_GPUS),
    unmeasured=dict.fromkeys(_GPUS, f"written, never run: {_NEVER}"),
    granularity=Granularity.ROW,
    accumulation="promoted",
    supports=_supports,
    epilogues=frozenset({"none"}),
)
def row(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Multiply; sums are float32 throughout."""
    with aligned(out) as target:
        library().gemm_a8w8_ck(a, b.t(), a_scale, b_scale, target)
