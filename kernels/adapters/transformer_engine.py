"""TransformerEngine: cuBLASLt's FP8 GEMMs with one scale a tensor or 1x128 by 128x128, and norms.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]
z = norm(x) * weight + bias

Its C++ takes what it is given as packed, whatever its strides. Norms want weights in the dtype of
the rows, and that of layers wants both: others are rounded to it, and none are ones and zeros. The
bias of an rms is added to rows that are rounded. Quantized outputs are not adapted: their scales
are made of the calls before, or by passes of their own.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lokakern.kernels.adapters import norms
from lokakern.kernels.adapters.layouts import aligned
from lokakern.registry.libraries import Library, Package, declare, import_modules
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    FAST_LARGEST_K,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    Rejected,
    Support,
)

_NEVER = "no machine with it has been at hand"
_MODULES = ("transformer_engine.pytorch", "transformer_engine_torch")
LIBRARY = declare(
    Library(
        name="transformer_engine",
        # Before 2.12 a GEMM is given its workspace; a build from source is one package.
        packages=(
            Package("transformer-engine-torch", ">=2.12,<3", _MODULES),
            Package("transformer-engine", ">=2.12,<3", _MODULES),
        ),
        install="pip install --no-build-isolation transformer-engine[pytorch]",
        never_run=_NEVER,
    )
)
_UNMEASURED = dict.fromkeys(("sm_90", "sm_100"), f"written, never run: {_NEVER}")
_TORCH = "transformer_engine.pytorch"
_PLACES = {
    "general_gemm": f"{_TORCH}.cpp_extensions",
    "TE_DType": f"{_TORCH}.constants",
    "Float8TensorStorage": f"{_TORCH}.tensor.storage.float8_tensor_storage",
    "Float8BlockwiseQTensorStorage": f"{_TORCH}.tensor.storage.float8_blockwise_tensor_storage",
    "layernorm_fwd": "transformer_engine_torch",
    "rmsnorm_fwd": "transformer_engine_torch",
}


@functools.cache
def library() -> Any:
    """What of it is called, imported when the first kernel is launched."""
    import_modules(LIBRARY)
    return SimpleNamespace(
        **{name: getattr(importlib.import_module(at), name) for name, at in _PLACES.items()}
    )


# --- GEMMs


def _supports_tensors(fast: bool, problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.TENSOR, Granularity.TENSOR):
        return Rejected(f"takes tensor x tensor scales, not {have[0].value} x {have[1].value}")
    if fast and problem.k > FAST_LARGEST_K:
        return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
    if problem.k % 16 or problem.n % 16:
        return Rejected(f"n and k must be multiples of 16; n={problem.n}, k={problem.k}")
    return _takes_formats_and_layouts(problem)


def _supports_groups(problem: Problem, device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.GROUP, Granularity.BLOCK):
        return Rejected(f"takes 1x128 x 128x128 scales, not {have[0].value} x {have[1].value}")
    if problem.k % 128 or problem.n % 128 or problem.m % 8:
        return Rejected(
            f"n and k must be multiples of 128 and m of 8; m={problem.m}, n={problem.n}, "
            f"k={problem.k}"
        )
    return _takes_formats_and_layouts(problem)


def _takes_formats_and_layouts(problem: Problem) -> Support:
    assert problem.b is not None  # an op with two operands
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not Format.E4M3FN:
            return Rejected(f"is given e4m3fn only; {name} is {operand.format.value}")
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 only")
    return ACCEPTED


def _multiply(left: Any, right: Any, out: Tensor, bias: Tensor | None, promoted: bool) -> None:
    with aligned(out) as target:
        library().general_gemm(
            right, left, out.dtype, layout="TN", out=target, bias=bias,
            use_split_accumulator=promoted,
        )  # fmt: skip


def _tensor(
    fast: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    storage, form = library().Float8TensorStorage, library().TE_DType[a.dtype]
    left, right = (
        storage(data=data.contiguous().view(torch.uint8), fp8_scale_inv=scale.view(1),
                fp8_dtype=form)
        for data, scale in ((a, a_scale), (b.t(), b_scale))
    )  # fmt: skip
    _multiply(left, right, out, bias, not fast)


for _fast in (False, True):
    register(
        "scaled_gemm",
        name="tensor" + ("_fast" if _fast else ""),
        architectures=frozenset({"sm_90", "sm_100"}),
        unmeasured=_UNMEASURED,
        granularity=Granularity.TENSOR,
        accumulation="fast" if _fast else "promoted",
        supports=functools.partial(_supports_tensors, _fast),
        kernel_err_bound=FAST_KERNEL_ERR_BOUND if _fast else PROMOTED_KERNEL_ERR_BOUND,
    )(functools.partial(_tensor, _fast))


@register(
    "scaled_gemm",
    architectures=frozenset({"sm_90"}),  # elsewhere it makes MX operands of them first
    unmeasured={"sm_90": _UNMEASURED["sm_90"]},
    granularity=Granularity.GROUP,
    b_granularity=Granularity.BLOCK,
    accumulation="promoted",
    supports=_supports_groups,
    kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
)
def block(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    """Multiply with 1x128 scales of a as [k / 128, m], and 128x128 of b with their padding."""
    storage, form = library().Float8BlockwiseQTensorStorage, library().TE_DType[a.dtype]
    width, stride = b_scale.shape[1], b_scale.stride(1)
    padded = b_scale.as_strided((width, stride), (stride, 1))
    left, right = (
        storage(data.contiguous().view(torch.uint8), scale, None, None, form, None, square)
        for data, scale, square in ((a, a_scale.t(), False), (b.t(), padded, True))
    )
    _multiply(left, right, out, bias, promoted=True)


# --- norms


def _normalize(
    kind: str, x: Tensor, out: Tensor, epilogue: NormEpilogue, workspace: tuple[Tensor, ...]
) -> None:
    if not len(x):
        return
    (room,) = workspace
    bias = epilogue.norm_bias
    vectors = [norms.as_bfloat16(epilogue.norm_weight, room[0], 1.0)]
    if kind == "layer":
        vectors.append(norms.as_bfloat16(bias, room[1], 0.0))
    module = library()
    normalize = module.layernorm_fwd if kind == "layer" else module.rmsnorm_fwd
    with aligned(out) as target:
        normalize(
            x.contiguous(), *vectors, epilogue.norm.eps, target, None,
            module.TE_DType[out.dtype], 0, False,
        )  # fmt: skip
        if bias is not None and kind == "rms":
            target += bias


for _kind in ("layer", "rms"):
    register(
        "norm_quantize",
        name=f"{_kind}_norm",
        architectures=frozenset({"sm_90", "sm_100"}),
        unmeasured=_UNMEASURED,
        accumulation="rounded",
        supports=functools.partial(norms.supports, (_kind,)),
        workspace=norms.room_for_vectors,
        kernel_err_bound=norms.ROUNDED_BOUND,
    )(functools.partial(_normalize, _kind))
