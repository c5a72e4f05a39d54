"""cuBLASLt by itself: FP8 GEMMs by others of its algorithms than the one that torch runs.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

torch asks cuBLASLt's heuristic for one algorithm. At 16 shapes on an H200 (cuBLASLt 13.1) the best
of the first eight takes 0.96 of its time where one scale covers a tensor and sums are fast (least
0.87), 0.98 where they are promoted; of row scales there is but one. So the second, third and fourth
for fast sums are kernels here. It is called through the library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import LaunchError
from lokakern.kernels.adapters.layouts import aligned
from lokakern.registry.libraries import Library, Package, declare
from lokakern.registry.register import FAST_KERNEL_ERR_BOUND, FAST_LARGEST_K, register
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

LIBRARY = declare(
    Library(
        name="cublaslt",
        # Its binary interface is that of a major version; torch brings one of these.
        packages=(
            Package("nvidia-cublas", ">=13,<14", ()),
            Package("nvidia-cublas-cu12", ">=12,<13", ()),
        ),
        install="with a torch for CUDA",
    )
)
RANKS = (2, 3, 4)  # in the order of the heuristic; torch's is the first
MOST_PLANS = 4096  # shapes that are remembered
LARGEST_WORKSPACE_BYTES = 4 << 20  # every call in flight has its own; most algorithms want none

# From cublasLt.h and library_types.h.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_FORMATS = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _FAST_ACCUMULATION, _BIAS_TYPE = 3, 7, 8, 25, 26
_A_SCALE_POINTER, _B_SCALE_POINTER = 17, 18
_OP_T, _EPILOGUE_BIAS = 1, 4
_MOST_WORKSPACE_BYTES = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """A product of one shape: descriptors and the algorithm, made once.

    cuBLASLt computes column-major products, d^T = b^T a^T: its A is our b.
    """

    product: ctypes.c_void_p
    b: ctypes.c_void_p
    a: ctypes.c_void_p
    out: ctypes.c_void_p
    found: _Found
    lock: threading.Lock  # pointers to scales are part of the descriptor

    def __del__(self) -> None:
        library().cublasLtMatmulDescDestroy(self.product)
        for layout in (self.b, self.a, self.out):
            library().cublasLtMatrixLayoutDestroy(layout)


@functools.cache
def library() -> ctypes.CDLL:
    """The library that torch has loaded, by the name under which it did."""
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise LaunchError(f"{name} of cuBLASLt returned {status}")


@functools.cache
def _handle(_device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatmulDescSetAttribute", descriptor, attribute, ctypes.byref(value), size)


def _layout(kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, *sizes)
    return layout


@functools.lru_cache(maxsize=MOST_PLANS)
def _plan(
    rank: int, m: int, n: int, k: int, types: tuple[torch.dtype, torch.dtype],
    strides: tuple[int, int], bias: bool, device: int,
) -> _Plan:  # fmt: skip
    """The plan of a shape; of the last algorithm where the heuristic knows fewer than ``rank``."""
    product = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(product), _COMPUTE_32F, _R_32F)
    _set(product, _TRANSPOSE_A, ctypes.c_int32(_OP_T))
    _set(product, _FAST_ACCUMULATION, ctypes.c_int8(1))
    for pointer in (_A_SCALE_POINTER, _B_SCALE_POINTER):
        _set(product, pointer, ctypes.c_void_p(256))  # that there is one, and that it is aligned
    if bias:
        _set(product, _EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        _set(product, _BIAS_TYPE, ctypes.c_int32(_R_16BF))
    a = _layout(_FORMATS[types[0]], k, m, strides[0])
    b = _layout(_FORMATS[types[1]], k, n, strides[1])
    out = _layout(_R_16BF, n, m, n)
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    most = ctypes.c_size_t(LARGEST_WORKSPACE_BYTES)
    _call(
        "cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE_BYTES,
        ctypes.byref(most), ctypes.c_size_t(ctypes.sizeof(most)),
    )  # fmt: skip
    found, count = (_Found * rank)(), ctypes.c_int()
    _call(
        "cublasLtMatmulAlgoGetHeuristic", _handle(device), product, b, a, out, out, preference,
        rank, found, ctypes.byref(count),
    )  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    usable = [entry for entry in found[: count.value] if entry.state == 0]
    if not usable:
        raise LaunchError(f"cuBLASLt has no algorithm for m={m} n={n} k={k}")
    return _Plan(product, b, a, out, usable[-1], threading.Lock())


def _plan_for(rank: int, a: Tensor, b: Tensor, bias: bool) -> _Plan:
    (m, k), n = a.shape, b.shape[1]
    strides = a.stride(0), b.stride(1)
    return _plan(rank, m, n, k, (a.dtype, b.dtype), strides, bias, a.get_device())


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def _multiply(
    rank: int,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    plan = _plan_for(rank, a, b, bias is not None)
    (scratch,) = workspace
    with aligned(out) as target, plan.lock:
        _set(plan.product, _A_SCALE_POINTER, ctypes.c_void_p(b_scale.data_ptr()))
        _set(plan.product, _B_SCALE_POINTER, ctypes.c_void_p(a_scale.data_ptr()))
        if bias is not None:
            _set(plan.product, _BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        written = ctypes.c_void_p(target.data_ptr()), plan.out
        stream = torch.cuda.current_stream(a.device).cuda_stream
        _call(
            "cublasLtMatmul", _handle(a.get_device()), plan.product, ctypes.byref(_ONE),
            ctypes.c_void_p(b.data_ptr()), plan.b, ctypes.c_void_p(a.data_ptr()), plan.a,
            ctypes.byref(_ZERO), *written, *written, ctypes.byref(plan.found.algorithm),
            ctypes.c_void_p(scratch.data_ptr()), ctypes.c_size_t(scratch.numel()),
            ctypes.c_void_p(stream),
        )  # fmt: skip


def _workspace(
    rank: int, a: Tensor, _a_scale: Tensor, b: Tensor, _b_scale: Tensor, _out: Tensor | None,
    _bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the algorithm wants, with or without a bias, of which a composition does not know."""
    size = 0
    if a.device.type != "meta":  # of a compilation ahead, which launches nothing
        size = max(_plan_for(rank, a, b, bias).found.workspace_bytes for bias in (False, True))
    return (torch.empty(size, dtype=torch.uint8, device=a.device),)


def _supports(problem: Problem, _device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    if have != (Granularity.TENSOR, Granularity.TENSOR):
        return Rejected(f"takes tensor x tensor scales, not {have[0].value} x {have[1].value}")
    formats = (problem.a.format, problem.b.format)
    for form, name in zip(formats, "ab", strict=True):
        if form not in (Format.E4M3FN, Format.E5M2):
            return Rejected(f"multiplies e4m3fn and e5m2; {name} is {form.value}")
    if formats == (Format.E5M2, Format.E5M2):
        return Rejected("does not multiply e5m2 by e5m2")
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.alignment < 16:
            return Rejected(f"rows of {name} must start at multiples of 16 bytes")
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return Rejected("a must be row-major and b column-major")
    if problem.k > FAST_LARGEST_K:
        return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
    if problem.n % 16 or problem.k % 16:
        return Rejected(f"n and k must be multiples of 16; n={problem.n}, k={problem.k}")
    if problem.out_format is not Format.BFLOAT16 or problem.out_strided:
        return Rejected("writes contiguous bfloat16 only")
    return ACCEPTED


for _rank in RANKS:
    register(
        "scaled_gemm",
        name=f"tensor_fast_{_rank}",
        architectures=frozenset({"sm_90", "sm_100"}),
        unmeasured={"sm_100": "no such GPU was at hand to run it"},
        granularity=Granularity.TENSOR,
        accumulation="fast",
        supports=_supports,
        workspace=functools.partial(_workspace, _rank),
        kernel_err_bound=FAST_KERNEL_ERR_BOUND,
    )(functools.partial(_multiply, _rank))
