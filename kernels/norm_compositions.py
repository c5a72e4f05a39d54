"""Op ``gemm_norm`` as compositions: a GEMM, then a norm; or quantizers, then a fused kernel.

A composition is a kernel like any other: named from its parts, measured whole. Between a GEMM and a
norm the sums are rounded to bfloat16. A bfloat16 bias is the GEMM's, a float32 one the norm's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern.kernels import compositions
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
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
    alignment_of,
    empty_data,
    norm_form,
)

# Rounding sums to bfloat16 loses up to 2^-9 of them, 16 times the 2^-13 that a bound of 1 leaves.
ROUNDED_BOUND = 16.0
Matrix = Tensor | QuantizedTensor


def compose(gemm: str, norm: str, architectures: frozenset[str] = ANY) -> Kernel | None:
    """Register a GEMM that writes bfloat16, followed by a norm that reads it.

    Args:
        gemm: Name of a kernel of op gemm, a composition too, or scaled_gemm.
        norm: Name of a kernel of op norm_quantize.
        architectures: Where the composition is worth its time, of those where its parts run.

    Returns:
        None where a part could not be imported on this machine.
    """
    first, second = KERNELS.get(gemm), KERNELS.get(norm)
    if first is None or second is None:
        return None
    rounded = "rounded" if first.accumulation == "float32" else f"{first.accumulation}+rounded"
    odd = first.odd_kernel_err_bound
    return _added(
        (first, second),
        architectures,
        parts=(*(first.parts or (gemm,)), norm),
        language=second.language,
        granularity=first.granularity,
        b_granularity=first.b_granularity,
        accumulation=rounded,
        launch=_launcher(first, second.launch),
        supports_problem=functools.partial(_supports, first, second),
        workspace=_workspace(first, second),
        kernel_err_bound=first.kernel_err_bound + ROUNDED_BOUND,
        odd_kernel_err_bound=None if odd is None else odd + ROUNDED_BOUND,
    )


def compose_quantized(stem: str, fused: str, architectures: frozenset[str] = ANY) -> Kernel | None:
    """Register quantizers followed by a kernel that multiplies and normalizes in one.

    Args:
        stem: Of the quantizers' names, such as ``cuda.quantize``.
        fused: Name of a kernel of op gemm_norm with scales.
        architectures: As of `compose`.

    Returns:
        None where a part could not be imported on this machine.
    """
    second = KERNELS.get(fused)
    if second is None:
        return None
    names = [f"{stem}_{g.suffix}" for g in (second.granularity, second.b_granularity)]
    first, b_quantizer = map(KERNELS.get, names)
    if first is None or b_quantizer is None:
        return None
    return _added(
        (first, b_quantizer, second),
        architectures,
        parts=tuple(dict.fromkeys((*names, fused))),
        name=f"{names[0]}+{fused}",
        language=second.language,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        launch=_quantizing_launcher(first.launch, b_quantizer.launch, second.launch),
        supports_problem=functools.partial(_supports_quantizing, first, b_quantizer, second),
        workspace=_quantizing_workspace(first, b_quantizer, second),
        kernel_err_bound=second.kernel_err_bound,
    )


def _added(
    every: tuple[Kernel, ...], architectures: frozenset[str], name: str = "", **fields: Any
) -> Kernel | None:
    runs = [x for x in (architectures, *(k.architectures for k in every)) if x != ANY]
    where = frozenset.intersection(*runs) if runs else ANY
    if not where:
        return None
    modules = ("norm_compositions", *(module for k in every for module in k.modules))
    kernel = Kernel(
        name=name or "+".join(k.name for k in every),
        op="gemm_norm",
        modules=tuple(dict.fromkeys(modules)),
        architectures=where,
        compile_only=_reasons(where, [k.compile_only for k in every]),
        unmeasured=_reasons(where, [k.unmeasured for k in every]),
        **fields,
    )
    add(kernel)
    return kernel


def _reasons(where: frozenset[str], given: list[dict[str, str]]) -> dict[str, str]:
    return {name: why for found in given for name, why in found.items() if name in where}


def _supports(first: Kernel, second: Kernel, problem: Problem, device: Device) -> Support:
    form = norm_form(problem.epilogue)
    product = replace(
        problem,
        op=first.op,
        epilogue="bias" if form.bias else "none",
        out_format=Format.BFLOAT16,
        out_granularity=Granularity.NONE,
        out_strided=False,
    )
    answer = first.supports(product, device)
    if isinstance(answer, Rejected):
        return Rejected(f"{first.name}: {answer.reason}")
    n = problem.n
    sums = Operand(Format.BFLOAT16, alignment=alignment_of(2 * n) if problem.m > 1 else 16)
    rows = Problem(
        op="norm_quantize", m=problem.m, n=1, k=n, a=sums,
        epilogue=str(form), out_format=problem.out_format,
        out_granularity=problem.out_granularity, out_strided=problem.out_strided,
    )  # fmt: skip
    answer = second.supports(rows, device)
    if isinstance(answer, Rejected):
        return Rejected(f"{second.name}: {answer.reason}")
    return ACCEPTED


def _operands(kernel: Kernel) -> Callable[[Matrix, Matrix], tuple[Any, ...]]:
    """What the launcher of a GEMM gets for a and b."""
    if kernel.op == "gemm":
        return lambda a, b: (a, b)

    def quantized(a: Any, b: Any) -> tuple[Any, ...]:
        return a.data, a.scale, *b.transpose

    return quantized


def _workspace(first: Kernel, second: Kernel) -> Workspace:
    """The sums, the GEMM's bias, and what the GEMM and the norm want."""
    operands, is_scaled = _operands(first), first.op == "scaled_gemm"

    def workspace(a: Any, b: Any, out: Matrix, epilogue: NormEpilogue) -> tuple[Any, ...]:
        sums = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
        given = operands(a, b)
        bias, rest = epilogue.bias, epilogue
        if bias is not None and bias.dtype is torch.bfloat16:
            rest = epilogue._replace(bias=None)
        else:
            bias = None
        scratch = first.workspace(*given, *((sums, bias) if is_scaled else ()))
        return sums, bias, scratch, rest, second.workspace(sums, out, rest)

    return workspace


def _launcher(first: Kernel, normalize: Launcher) -> Launcher:
    operands, multiply = _operands(first), first.launch

    def launch(
        a: Matrix, b: Matrix, out: Matrix, epilogue: NormEpilogue, workspace: tuple[Any, ...]
    ) -> None:
        sums, bias, scratch, rest, norm_scratch = workspace
        multiply(*operands(a, b), sums, bias, scratch)
        normalize(sums, out, rest, norm_scratch)

    return launch


def _supports_quantizing(
    first: Kernel, b_quantizer: Kernel, second: Kernel, problem: Problem, device: Device
) -> Support:
    fp8 = fp8_format(device)
    assert problem.b is not None  # an op with two operands
    if problem.a.format.is_fp8:
        return Rejected(f"takes an unquantized a; use {second.name}")
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
        weight = replace(problem.b, layout=compositions._TRANSPOSED[problem.b.layout])
        asked = compositions._quantize_problem(
            problem.n, problem.k, weight, fp8, second.b_granularity
        )
        answer = b_quantizer.supports(asked, device)
        if isinstance(answer, Rejected):
            return Rejected(f"{b_quantizer.name}: {answer.reason}")
    asked = compositions._quantize_problem(problem.m, problem.k, problem.a, fp8, second.granularity)
    answer = first.supports(asked, device)
    if isinstance(answer, Rejected):
        return Rejected(f"{first.name}: {answer.reason}")
    answer = second.supports(replace(problem, a=a, b=b, prepared=False), device)
    if isinstance(answer, Rejected):
        return Rejected(f"{second.name}: {answer.reason}")
    return ACCEPTED


def _quantizing_workspace(first: Kernel, b_quantizer: Kernel, second: Kernel) -> Workspace:
    """The quantized operands, and what the quantizers and the fused kernel want."""

    def made(x: Tensor, granularity: Granularity, transposed: bool) -> QuantizedTensor:
        rows, columns = x.shape
        data = empty_data(rows, columns, compositions._device_fp8(x.device), x.device)
        scale = granularity.empty_scale(rows, columns, x.device)
        return QuantizedTensor(data, scale, granularity, transposed)

    def workspace(a: Tensor, b: Matrix, out: Matrix, epilogue: NormEpilogue) -> tuple[Any, ...]:
        left = made(a, second.granularity, False)
        scratch = first.workspace(a, left.data, left.scale)
        right = b
        if not isinstance(b, QuantizedTensor):
            weight = b.t()
            right = made(weight, second.b_granularity, True)
            # One scratch serves both quantizers: they run one after the other on one stream.
            scratch = scratch or b_quantizer.workspace(weight, right.data, right.scale)
        return left, right, scratch, second.workspace(left, right, out, epilogue)

    return workspace


def _quantizing_launcher(quantize: Launcher, quantize_b: Launcher, fused: Launcher) -> Launcher:
    def launch(
        a: Tensor, b: Matrix, out: Matrix, epilogue: NormEpilogue, workspace: tuple[Any, ...]
    ) -> None:
        left, right, scratch, rest = workspace
        quantize(a, left.data, left.scale, scratch)
        if right is not b:
            quantize_b(b.t(), right.data, right.scale, scratch)
        fused(left, right, out, epilogue, rest)

    return launch


load_parts()
_SUMS = ("tensor", "row", "block", "group")
_TORCH = [f"torch.scaled_mm_{kind}" for kind in ("tensor", "row", "tensor_fast", "row_fast")]
_TORCH.append("torch.scaled_mm_block")
_TRITON = [f"triton.scaled_gemm_{kind}" for kind in ("tensor", "row", "tensor_fast", "row_fast")]
_TRITON.append("triton.scaled_gemm_block")
_CUDA = [f"cuda.scaled_gemm_{kind}" for kind in _SUMS]
_ELSEWHERE = FP8_GPUS - {"sm_90"}  # CUDA's parts are faster where they run


def _with_quantizers(stem: str, gemms: list[str]) -> list[str]:
    """Scaled GEMMs, and what `kernels/compositions.py` makes of them for unquantized operands."""
    ends = tuple(f"+{name}" for name in gemms)
    made = [name for name in KERNELS if name.startswith(stem) and name.endswith(ends)]
    return ["torch.bf16", *gemms, *sorted(made)]


for _gemm in ("torch.bf16", "torch.emulated_row", "torch.quantize_row+torch.emulated_row"):
    compose(_gemm, "torch.norm_quantize")
for _gemm in _with_quantizers("cuda.quantize", [*_TORCH, *_CUDA]):
    compose(_gemm, "cuda.norm_quantize")
for _gemm in _with_quantizers("triton.quantize", [*_TORCH, *_TRITON]):
    compose(_gemm, "triton.norm_quantize", _ELSEWHERE)
for _name, _kernel in sorted(KERNELS.items()):
    if _kernel.op != "gemm_norm" or _kernel.granularity is Granularity.NONE or _kernel.parts:
        continue
    if _kernel.language == "triton":
        compose_quantized("triton.quantize", _name, _ELSEWHERE)
    else:
        compose_quantized(f"{_kernel.language}.quantize", _name)
