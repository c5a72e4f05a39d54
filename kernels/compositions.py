"""Op ``gemm`` as compositions: quantize a (and b, unless prepared), then a scaled GEMM.

A composition is a kernel like any other: named from its parts, measured whole.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern import jit
from lokakern.registry.register import (
    ANY,
    KERNELS,
    Kernel,
    Launcher,
    Workspace,
    add,
    fp8_format,
    load_parts,
)
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
    alignment_of,
)


def compose(quantizer: str, gemm: str) -> Kernel | None:
    """Register ``gemm`` on unquantized operands as a quantizer followed by a scaled GEMM.

    The composition is named from its parts and measured whole. A prepared weight is not quantized
    again. Returns None when a part could not be imported on this machine.
    """
    if quantizer not in KERNELS or gemm not in KERNELS:
        return None
    first, second = KERNELS[quantizer], KERNELS[gemm]
    b_quantizer = first
    if second.b_granularity is not second.granularity:
        stem = quantizer.rsplit("_", 1)[0]
        b_quantizer = KERNELS[f"{stem}_{second.b_granularity.suffix}"]
    parts = [k for k in (first, second) if k.architectures != ANY]
    kernel = Kernel(
        name=f"{quantizer}+{gemm}",
        op="gemm",
        language=second.language,
        modules=tuple(
            dict.fromkeys(("compositions", *first.modules, *b_quantizer.modules, *second.modules))
        ),
        launch=_launcher_of(first.launch, b_quantizer.launch, second.launch),
        architectures=frozenset.intersection(*(k.architectures for k in parts)) if parts else ANY,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        supports_problem=functools.partial(_supports_composition, first, b_quantizer, second),
        workspace=_workspace_of(first, b_quantizer, second),
        compile_only={**first.compile_only, **second.compile_only},
        unmeasured={**first.unmeasured, **second.unmeasured},
        kernel_err_bound=second.kernel_err_bound,
        parts=tuple(dict.fromkeys((quantizer, b_quantizer.name, gemm))),
    )
    add(kernel)
    return kernel


def quantized_operand(granularity: Granularity, fp8: Format, layout: Layout, k: int) -> Operand:
    """How quantized data ``[rows, k]`` that lokakern allocates lies in memory."""
    return Operand(fp8, granularity, layout, alignment_of(k))


def _supports_composition(
    first: Kernel, b_quantizer: Kernel, second: Kernel, problem: Problem, device: Device
) -> Support:
    fp8 = fp8_format(device)
    assert problem.b is not None
    if problem.a.format.is_fp8:
        return Rejected("takes an unquantized a; use scaled_gemm")
    a = quantized_operand(second.granularity, fp8, Layout.ROW, problem.k)
    b = quantized_operand(second.b_granularity, fp8, Layout.COLUMN, problem.k)
    if problem.prepared:
        have = (problem.b.format, problem.b.granularity)
        if have != (fp8, second.b_granularity):
            return Rejected(
                f"needs a weight prepared as {fp8.value}/{second.b_granularity.value}; "
                f"it is {have[0].value}/{have[1].value}"
            )
    else:
        if problem.b.layout is not Layout.COLUMN:
            return Rejected("b is row-major; pass weight.t() of a row-major weight")
        weight = replace(problem.b, layout=Layout.ROW)
        answer = b_quantizer.supports(
            _quantize_problem(problem.n, problem.k, weight, fp8, second.b_granularity), device
        )
        if isinstance(answer, Rejected):
            return Rejected(f"{b_quantizer.name}: {answer.reason}")
    answer = first.supports(
        _quantize_problem(problem.m, problem.k, problem.a, fp8, second.granularity), device
    )
    if isinstance(answer, Rejected):
        return Rejected(f"{first.name}: {answer.reason}")
    answer = second.supports(replace(problem, op="scaled_gemm", a=a, b=b, prepared=False), device)
    if isinstance(answer, Rejected):
        return Rejected(f"{second.name}: {answer.reason}")
    return ACCEPTED


def _quantize_problem(
    m: int, k: int, operand: Operand, fp8: Format, granularity: Granularity
) -> Problem:
    return Problem(
        op="quantize", m=m, n=1, k=k, a=operand, out_format=fp8, out_granularity=granularity
    )


def _workspace_of(first: Kernel, b_quantizer: Kernel, second: Kernel) -> Workspace:
    """Elements and scales of a, then of b unless it is prepared, then what the parts want."""
    by_row = second.granularity is Granularity.ROW

    def workspace(a: Tensor, b: Any, *_: Any) -> tuple[Tensor, ...]:
        device = a.device
        dtype = _device_fp8(device)
        data = torch.empty_like(a, dtype=dtype, memory_format=torch.contiguous_format)
        if by_row:  # spelled out: on a warm call every microsecond of the host counts
            scale = torch.empty_strided((a.shape[0], 1), (1, 1), dtype=torch.float32, device=device)
        else:
            scale = second.granularity.empty_scale(a.shape[0], a.shape[1], device)
        extra = first.workspace(a, data, scale)
        if type(b) is QuantizedTensor:
            return (data, scale, *extra)
        weight = b.t()
        b_data = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        b_scale = second.b_granularity.empty_scale(weight.shape[0], weight.shape[1], device)
        # One scratch serves both quantizers: they run one after the other on one stream.
        extra = extra or b_quantizer.workspace(weight, b_data, b_scale)
        return (data, scale, b_data, b_scale, *extra)

    return workspace


@jit.cached
def _device_fp8(device: torch.device) -> torch.dtype:
    if device.type == "meta" and jit.recording is not None:
        return fp8_format(jit.recording.device).dtype
    if device.type != "cuda" or torch.version.hip is None:
        return torch.float8_e4m3fn
    return fp8_format(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]).dtype


def _launcher_of(quantize: Launcher, quantize_b: Launcher, multiply: Launcher) -> Launcher:
    def launch(
        a: Tensor,
        b: Any,
        out: Tensor,
        bias: Tensor | None,
        workspace: tuple[Tensor, ...],
    ) -> None:
        data, scale = workspace[:2]
        if type(b) is QuantizedTensor:
            quantize(a, data, scale, workspace[2:])
            multiply(data, scale, *b.transpose, out, bias, ())
            return
        b_data, b_scale, *extra = workspace[2:]
        quantize(a, data, scale, extra)
        quantize_b(b.t(), b_data, b_scale, extra)
        multiply(data, scale, b_data.t(), b_scale.t(), out, bias, ())

    return launch


load_parts()
for _quantizer, _gemms in {
    "torch.quantize": (
        "torch.emulated_tensor",
        "torch.emulated_row",
        "torch.emulated_block",
    ),
    "triton.quantize": (
        "torch.scaled_mm_tensor",
        "torch.scaled_mm_tensor_fast",
        "torch.scaled_mm_row",
        "torch.scaled_mm_row_fast",
        "torch.scaled_mm_block",
        "triton.scaled_gemm_tensor",
        "triton.scaled_gemm_tensor_fast",
        "triton.scaled_gemm_row",
        "triton.scaled_gemm_row_fast",
        "triton.scaled_gemm_block",
    ),
}.items():
    for _gemm in _gemms:
        if _gemm in KERNELS:
            compose(f"{_quantizer}_{KERNELS[_gemm].granularity.suffix}", _gemm)
