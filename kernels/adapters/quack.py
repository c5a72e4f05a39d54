"""Norms of rows of quack-kernels (CuTe DSL): layer and rms, weight and bias in any dtype.

z = norm(x) * weight + bias, in float32, rounded once.

Its FP8 GEMM is not adapted: it multiplies by one number, the product of the two scales, which
underflows where each is 2^-126, and overflows. It compiles at the first launch of a row's length.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from lokakern.kernels.adapters import norms
from lokakern.kernels.adapters.layouts import aligned
from lokakern.registry.libraries import Library, Package, declare, import_modules
from lokakern.registry.register import register
from lokakern.types import NormEpilogue

_NEVER = "no machine with it has been at hand"
LIBRARY = declare(
    Library(
        name="quack",
        # Before 0.5 the variance of a layer counts what lies beyond the end of a row.
        packages=(Package("quack-kernels", ">=0.5,<0.7", ("quack.rmsnorm",)),),
        never_run=_NEVER,
    )
)
_GPUS = ("sm_90", "sm_100")


@functools.cache
def library() -> Any:
    """Its module of norms, imported when the first is launched."""
    import_modules(LIBRARY)
    return importlib.import_module("quack.rmsnorm")


@register(
    "norm_quantize",
    architectures=frozenset(_GPUS),
    unmeasured=dict.fromkeys(_GPUS, f"written, never run: {_NEVER}"),
    supports=functools.partial(norms.supports, ("layer", "rms")),
)
def norm(x: Tensor, out: Tensor, epilogue: NormEpilogue, workspace: tuple[Tensor, ...]) -> None:
    """Normalize by the operator beneath the public functions, which make outputs of their own."""
    if not len(x):
        return
    kind, _, eps = epilogue.norm
    weight, bias = epilogue.norm_weight, epilogue.norm_bias
    with aligned(out) as target:
        library()._rmsnorm_fwd(
            x.contiguous(), weight, target, bias, eps=eps, is_layernorm=kind == "layer"
        )
