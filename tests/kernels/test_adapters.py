"""Adapters follow the calling rules of their libraries.

Stand-ins compute what a library documents, on the CPU, and check what it checks, and what it should
check. That the libraries themselves do so is tried where they are installed (`list libraries`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.kernels.adapters import aiter, deep_gemm, fbgemm, flashinfer, transformer_engine
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.registry.libraries import LIBRARIES
from lokakern.registry.register import KERNELS, Kernel, fp8_format, load_kernels
from lokakern.types import Accepted, Device, Format, Layout, Operand, Problem, Rejected
from tests.support.adapters import rowwise_out

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
CPU = torch.device("cpu")
SHAPES = ((37, 24, 48), (128, 256, 384), (64, 128, 128), (4, 384, 640))
ADAPTED = sorted(  # the others are in test_adapters_gemm.py and test_adapters_norms.py
    kernel.name
    for kernel in KERNELS.values()
    if kernel.library in LIBRARIES.keys() - {"cublaslt"}
    and kernel.op == "scaled_gemm"
    and not kernel.batched
)


def by_groups(scale: Tensor, rows: int, k: int) -> Tensor:
    """Scales of 1x128, or of 128x128, as large as what they scale."""
    wide = scale.repeat_interleave(128, dim=1)[:, :k]
    return wide if scale.shape[0] == rows else wide.repeat_interleave(128, dim=0)[:rows]


# --- FBGEMM


def groupwise(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    (m, k), n = x.shape, w.shape[0]
    assert x.is_contiguous() and w.is_contiguous()
    assert x_scale.shape == (k // 128, m) and w_scale.shape == (k // 128, n // 128)
    assert x_scale.is_contiguous() and w_scale.is_contiguous()  # read as if packed
    left = x.float() * by_groups(x_scale.t(), m, k)
    right = w.float() * by_groups(w_scale.t(), n, k)
    return (left @ right.t()).bfloat16()


# --- DeepGEMM


def product_of(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor]) -> Tensor:
    (a, a_scale), (b, b_scale) = lhs, rhs
    (m, k), n = a.shape, b.shape[0]
    assert a.stride(1) == b.stride(1) == 1 and a.stride(0) % 16 == b.stride(0) % 16 == 0
    groups = -(-k // 128)
    assert a_scale.shape == (m, groups) and b_scale.shape[1] == groups
    for scale in (a_scale, b_scale):
        if scale.shape[0] in (m, n) and scale.shape[0] != -(-n // 128):
            assert scale.stride() == (1, -(-scale.shape[0] // 4) * 4)  # columns of 16 bytes
    if b_scale.shape[0] != n:
        assert b_scale.is_contiguous()
    left = a.float() * by_groups(a_scale, m, k)
    right = b.float() * by_groups(b_scale, n, k)
    return left @ right.t()


def fp8_gemm_nt(
    a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None,
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    assert disable_ue8m0_cast
    if recipe == (1, 1, 128):
        assert d.dtype is torch.float32 and c is d and not d.data_ptr() % 16
        assert all(x.is_contiguous() for x in (a[0], b[0]))
        d += product_of(a, b)
    else:
        assert d.dtype is torch.bfloat16 and c is None and not d.data_ptr() % 16
        d.copy_(product_of(a, b))


NEW = SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt)
OLD = SimpleNamespace(
    gemm_fp8_fp8_bf16_nt=lambda lhs, rhs, out: out.copy_(product_of(lhs, rhs)),
    wgrad_gemm_fp8_fp8_fp32_nt=lambda lhs, rhs, out: out.add_(product_of(lhs, rhs)),
)


# --- FlashInfer


def bmm_fp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, out: Tensor,
    backend: str,
) -> None:  # fmt: skip
    assert a.is_contiguous() and b.mT.is_contiguous() and out.is_contiguous()
    assert not out.data_ptr() % 16
    assert (a.dim(), a.shape[0], out.dtype, backend) == (3, 1, dtype, "cublas")
    assert a_scale.numel() == b_scale.numel() == 1
    out.copy_(a.float() @ b.float() * a_scale * b_scale)


def fp8_blockscale_gemm_sm90(
    x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, out: Tensor
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert k % 128 == 0 and n % 64 == 0 and out.dtype is torch.bfloat16
    assert not out.data_ptr() % 16
    assert input_scale.shape == (k // 128, -(-m // 4) * 4) and input_scale.is_contiguous()
    assert weight_scale.shape == (-(-n // 128), k // 128) and weight_scale.is_contiguous()
    left = x.float() * by_groups(input_scale.t()[:m], m, k)
    out.copy_(left @ (weight.float() * by_groups(weight_scale, n, k)).t())


# --- TransformerEngine


def float8(data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: str) -> tuple[Tensor, Tensor]:
    assert data.dtype is torch.uint8 and data.is_contiguous() and data.shape[1] % 16 == 0
    assert fp8_dtype == "e4m3fn" and fp8_scale_inv.shape == (1,)
    return data.view(torch.float8_e4m3fn).float(), fp8_scale_inv


def float8_blockwise(
    rowwise_data: Tensor, rowwise_scale_inv: Tensor, columnwise_data: None,
    columnwise_scale_inv: None, fp8_dtype: str, quantizer: None, is_2d_scaled: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    assert rowwise_data.dtype is torch.uint8 and rowwise_data.is_contiguous()
    assert columnwise_data is columnwise_scale_inv is quantizer is None and fp8_dtype == "e4m3fn"
    rows, k = rowwise_data.shape
    scale, groups = rowwise_scale_inv, k // 128
    assert rows % 8 == 0 and k % 128 == 0 and scale.is_contiguous()  # read as if packed
    if is_2d_scaled:
        assert scale.shape == (-(-rows // 128), -(-groups // 4) * 4)
        scale = scale[:, :groups]
    else:
        assert scale.shape == (groups, -(-rows // 4) * 4)
        scale = scale.t()
    return rowwise_data.view(torch.float8_e4m3fn).float() * by_groups(scale, rows, k), None


def general_gemm(
    weight: Any, rows: Any, out_dtype: torch.dtype, *, layout: str, out: Tensor,
    bias: Tensor | None, use_split_accumulator: bool,
) -> None:  # fmt: skip
    (right, right_scale), (left, left_scale) = weight, rows
    assert layout == "TN" and out.dtype is out_dtype and out.is_contiguous()
    assert out.shape == (len(left), len(right)) and not out.data_ptr() % 16
    product = left @ right.t()
    if right_scale is None:
        assert left_scale is None and use_split_accumulator
    else:
        product = product * left_scale * right_scale
    out.copy_(product if bias is None else product + bias)


# --- AITER


def gemm_a8w8_ck(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, out: Tensor) -> Tensor:
    (m, _), n = x.shape, w.shape[0]
    assert x.dtype is w.dtype is torch.float8_e4m3fnuz and out.is_contiguous()
    assert x_scale.shape == (m, 1) and w_scale.shape in ((1, n), (n, 1))
    return out.copy_(x.float() @ w.float().t() * x_scale * w_scale.view(1, n))


@pytest.fixture(params=["new", "old"])
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(f8f8bf16_rowwise_out=rowwise_out, f8f8bf16_groupwise=groupwise)
    monkeypatch.setattr(fbgemm, "operators", lambda: operators)
    monkeypatch.setattr(deep_gemm, "library", lambda: NEW if request.param == "new" else OLD)
    functions = SimpleNamespace(
        bmm_fp8=bmm_fp8, fp8_blockscale_gemm_sm90=fp8_blockscale_gemm_sm90,
        gemm_a8w8_ck=gemm_a8w8_ck,
    )  # fmt: skip
    engine = SimpleNamespace(
        general_gemm=general_gemm, Float8TensorStorage=float8,
        Float8BlockwiseQTensorStorage=float8_blockwise,
        TE_DType={torch.float8_e4m3fn: "e4m3fn"},
    )  # fmt: skip
    monkeypatch.setattr(transformer_engine, "library", lambda: engine)
    for adapter in (flashinfer, aiter):
        monkeypatch.setattr(adapter, "library", lambda: functions)


def device_of(kernel: Kernel) -> Device:
    return H200 if "sm_90" in kernel.architectures else MI300X


def problems(kernel: Kernel) -> Iterator[Problem]:
    fp8 = fp8_format(device_of(kernel))
    for m, n, k in SHAPES:
        for epilogue in ("none", "bias"):
            accumulate = kernel.accumulates
            yield Problem(
                op="scaled_gemm", m=m, n=n, k=k, epilogue=epilogue, accumulate=accumulate,
                a=Operand(fp8, kernel.granularity),
                b=Operand(fp8, kernel.b_granularity, Layout.COLUMN),
                out_format=Format.FLOAT32 if accumulate else Format.BFLOAT16,
            )  # fmt: skip


def accepts(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel supports a problem, wherever its library is installed."""
    if problem.epilogue not in kernel.epilogues:
        return False
    return isinstance(kernel.supports_problem(problem, device_of(kernel)), Accepted)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_passes_the_arguments_of_its_library(name: str) -> None:
    kernel = KERNELS[name]
    taken = [problem for problem in problems(kernel) if accepts(kernel, problem)]
    assert len(taken) >= 2
    for problem in taken:
        operands = operands_of(problem, "X5", CPU, device_of(kernel), cold=False)
        for call in contender_of(operands, kernel).calls:
            call()
        error, wrong = operands.check(kernel)
        assert not wrong and error.maximum <= kernel.kernel_err_bound, f"{problem}: {error} {wrong}"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ADAPTED)
def test_outputs_with_any_alignment_are_written(name: str) -> None:
    """Outputs may be parts of a flat buffer; the stand-ins require multiples of 16 bytes."""
    kernel = KERNELS[name]
    problem = next(problem for problem in problems(kernel) if accepts(kernel, problem))
    operands = operands_of(problem, "X5", CPU, device_of(kernel), cold=False)
    *given, out, _ = operands.sets[0]
    flat = torch.full((out.numel() + 3,), 2.0, dtype=out.dtype)
    askew = flat[3:].view(out.shape)
    kept = out.fill_(2.0)
    for target in (kept, askew):
        scratch = kernel.workspace(*given, target, None)
        kernel.launch(*given, target, None, scratch, *operands.epilogues[0])
    assert torch.equal(askew, kept) and (flat[:3] == 2.0).all()


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 712}, "multiple"),
        ({"k": 40}, "multiple"),
        ({"n": 20}, "multiple"),
        ({"a": Operand(Format.BFLOAT16)}, "scales"),
        ({"out_strided": True}, "contiguous"),
        ({"out_format": Format.E4M3FN}, "writes|only adds"),
    ],
)
def test_operands_that_a_library_would_misread_are_rejected(
    name: str, change: dict[str, Any], words: str
) -> None:
    kernel = KERNELS[name]
    device = device_of(kernel)
    good = next(problem for problem in problems(kernel) if accepts(kernel, problem))
    answer = kernel.supports_problem(dataclasses.replace(good, **change), device)
    assert isinstance(answer, Rejected) and re.search(words, answer.reason)
    for operand in ("a", "b"):
        e5m2 = dataclasses.replace(getattr(good, operand), format=Format.E5M2)
        answer = kernel.supports_problem(dataclasses.replace(good, **{operand: e5m2}), device)
        assert isinstance(answer, Rejected) and "e5m2" in answer.reason
        askew = dataclasses.replace(getattr(good, operand), alignment=8)
        answer = kernel.supports_problem(dataclasses.replace(good, **{operand: askew}), device)
        assert isinstance(answer, Rejected) and "16 bytes" in answer.reason


@pytest.mark.parametrize("name", ADAPTED)
def test_a_kernel_without_its_library_is_unavailable_with_a_reason(name: str) -> None:
    kernel = KERNELS[name]
    library = LIBRARIES[kernel.library]
    if library.here is not None:
        return  # what it says then is of the version and of trials
    good = next(problem for problem in problems(kernel) if accepts(kernel, problem))
    answer = kernel.supports(good, device_of(kernel))
    assert isinstance(answer, Rejected) and " is not installed (" in answer.reason
    assert kernel.modules == (f"adapters/{kernel.library}",)
