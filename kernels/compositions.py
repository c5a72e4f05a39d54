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
from lokakern.problems import sums_over_samples
from lokakern.registry.register import (
    ANY,
    FP8_GPUS,
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
    empty_data,
)


def compose(stem: str, gemm: str, architectures: frozenset[str] = ANY) -> Kernel | None:
    """Register ``gemm`` on unquantized operands as quantizers followed by a scaled GEMM.

    The composition is named from its parts and measured whole. A prepared weight is not quantized
    again.

    Args:
        stem: Of the quantizers' names, such as ``cuda.quantize``.
        gemm: Name of the scaled GEMM.
        architectures: Where the composition is worth its time, of those where its parts run.

    Returns:
        None where a part could not be imported on this machine.
    """
    second = KERNELS.get(gemm)
    if second is None:
        return None
    quantizer = f"{stem}_{second.granularity.suffix}"
    first = KERNELS.get(quantizer)
    b_quantizer = KERNELS.get(f"{stem}_{second.b_granularity.suffix}")
    if first is None or b_quantizer is None:
        return None
    every = (first, b_quantizer, second)
    runs = [x for x in (architectures, *(k.architectures for k in every)) if x != ANY]
    where = frozenset.intersection(*runs) if runs else ANY
    if not where:
        return None
    kernel = Kernel(
        name=f"{quantizer}+{gemm}",
        op="gemm",
        language=second.language,
        modules=tuple(
            dict.fromkeys(("compositions", *(name for k in every for name in k.modules)))
        ),
        launch=_launcher_of(first.launch, b_quantizer.launch, second.launch),
        architectures=where,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        supports_problem=functools.partial(_supports_composition, first, b_quantizer, second),
        workspace=_workspace_of(first, b_quantizer, second),
        compile_only=_reasons(where, *(k.compile_only for k in every)),
        unmeasured=_reasons(where, *(k.unmeasured for k in every)),
        kernel_err_bound=second.kernel_err_bound,
        parts=tuple(dict.fromkeys((quantizer, b_quantizer.name, gemm))),
    )
    add(kernel)
    return kernel


def _reasons(where: frozenset[str], *given: dict[str, str]) -> dict[str, str]:
    return {name: why for found in given for name, why in found.items() if name in where}


def _supports_composition(
    first: Kernel, b_quantizer: Kernel, second: Kernel, problem: Problem, device: Device
) -> Support:
    fp8 = fp8_format(device)
    assert problem.b is not None
    if problem.a.format.is_fp8:
        return Rejected("takes an unquantized a; use scaled_gemm")
    if second.accumulation == "fast" and sums_over_samples(problem):
        return Rejected("sums over samples are promoted; errors of long ones are not measured")
    if problem.out_format.is_fp8:
        return Rejected(f"writes the format of a, not {problem.out_format.value}")
    a = Operand(fp8, second.granularity)
    b = Operand(fp8, second.b_granularity, Layout.COLUMN)
    if problem.prepared:
        have = (problem.b.format, problem.b.granularity)
        if have != (fp8, second.b_granularity):
            return Rejected(
                f"needs a weight prepared as {fp8.value}/{second.b_granularity.value}; "
                f"it is {have[0].value}/{have[1].value}"
            )
        b = replace(b, alignment=problem.b.alignment)
    else:
        # The quantizer gets b.t(): row-major where b is column-major, and the other way round.
        weight = replace(problem.b, layout=_TRANSPOSED[problem.b.layout])
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
    """Elements and scales of a, what the quantizers and the GEMM want, then those of b.

    A prepared weight has its own. The scaled GEMM's output and bias are not known here.
    """
    by_row = second.granularity is Granularity.ROW
    b_scales, second_workspace = second.b_granularity.empty_scale, second.workspace

    def workspace(a: Tensor, b: Any, *_: Any) -> tuple[Any, ...]:
        device = a.device
        dtype = _device_fp8(device)
        data = _empty_data(a, dtype)
        if by_row:  # spelled out: on a warm call every microsecond of the host counts
            scale = torch.empty_strided((a.shape[0], 1), (1, 1), dtype=torch.float32, device=device)
        else:
            scale = second.granularity.empty_scale(a.shape[0], a.shape[1], device)
        scratch = first.workspace(a, data, scale)
        if type(b) is QuantizedTensor:
            sums = second_workspace(data, scale, *b.transpose, None, None)
            return data, scale, scratch, sums
        weight = b.t()
        b_data = _empty_data(weight, dtype)
        b_scale = b_scales(weight.shape[0], weight.shape[1], device)
        # One scratch serves both quantizers: they run one after the other on one stream.
        scratch = scratch or b_quantizer.workspace(weight, b_data, b_scale)
        turned = b_data.t(), b_scale.t()
        sums = second_workspace(data, scale, *turned, None, None)
        return data, scale, scratch, sums, b_data, b_scale, turned

    return workspace


def _empty_data(x: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = x.shape
    if columns & 15:
        return empty_data(rows, columns, dtype, x.device)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


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
        workspace: tuple[Any, ...],
    ) -> None:
        data, scale, scratch, sums = workspace[:4]
        quantize(a, data, scale, scratch)
        if type(b) is QuantizedTensor:
            multiply(data, scale, *b.transpose, out, bias, sums)
            return
        b_data, b_scale, turned = workspace[4:]
        quantize_b(b.t(), b_data, b_scale, scratch)
        multiply(data, scale, *turned, out, bias, sums)

    return launch


_TRANSPOSED = {
    Layout.ROW: Layout.COLUMN,
    Layout.COLUMN: Layout.ROW,
    Layout.STRIDED: Layout.STRIDED,
}

load_parts()
_TORCH = [f"torch.scaled_mm_{kind}" for kind in ("tensor", "row", "tensor_fast", "row_fast")]
_TORCH.append("torch.scaled_mm_block")
_TRITON = [f"triton.scaled_gemm_{kind}" for kind in ("tensor", "row", "tensor_fast", "row_fast")]
_TRITON.append("triton.scaled_gemm_block")
_CUDA = [f"cuda.scaled_gemm_{kind}" for kind in ("tensor", "row", "block", "group")]
for _gemm in ("tensor", "row", "block", "group"):
    compose("torch.quantize", f"torch.emulated_{_gemm}")
for _gemm in (*_TORCH, *_CUDA):
    compose("cuda.quantize", _gemm)
for _gemm in (*_TORCH, *_TRITON):  # CUDA's quantizers are faster where they run
    compose("triton.quantize", _gemm, FP8_GPUS - {"sm_90"})
