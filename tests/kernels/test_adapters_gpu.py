"""Outputs of libraries' kernels on a GPU, where they are installed and passed their trial.

`list libraries` tries them; here they meet every distribution, odd sizes, outputs that begin
anywhere, and values that are not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from lokakern import numerics
from lokakern.device import current_device
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.problems import make_problem
from lokakern.registry import libraries
from lokakern.registry.register import KERNELS, Kernel, fp8_format, load_kernels
from lokakern.types import REALISTIC_DISTRIBUTIONS, Accepted, Format, Granularity, Layout
from lokakern.workloads.gemm_cases import (
    Case,
    fused_case,
    prepared_cases,
    scaled_gemm_cases,
    unquantized_case,
)
from lokakern.workloads.gemm_gradient_cases import (
    grad_input_cases,
    grad_weight_case,
    main_grad_case,
)

load_kernels()
pytestmark = pytest.mark.gpu
NAMES = sorted(name for name, kernel in KERNELS.items() if kernel.libraries)
SCALED = [name for name in NAMES if KERNELS[name].op == "scaled_gemm"]
SIZES = ((512, 384, 640), (133, 136, 272), (4, 16, 16), (1, 256, 128))
LEFT_SCALES = (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP)


def kernel_here(name: str) -> Kernel:
    kernel, device = KERNELS[name], current_device("cuda")
    for library in sorted(kernel.libraries):
        why = libraries.why_not(library, device, name)
        if why is not None:
            pytest.skip(f"needs a GPU of a machine with it: {why}")
    if not kernel.runs_on(device):
        pytest.skip(f"needs a GPU of {', '.join(sorted(kernel.architectures))}")
    return kernel


def cases(distribution: str, fp8: Format) -> Iterator[Case]:
    """Problems of every op that some library does."""
    for m, n, k in SIZES:
        for epilogue in ("none", "bias"):
            yield unquantized_case(m, n, k, distribution, epilogue=epilogue)
            yield from prepared_cases(m, n, k, distribution, fp8, epilogue=epilogue)
        yield from scaled_gemm_cases(m, n, k, distribution, fp8, LEFT_SCALES)
        for case in (*grad_input_cases(m, n, k, fp8), grad_weight_case(m, n, k)):
            yield dataclasses.replace(case, distribution=distribution)
        yield dataclasses.replace(main_grad_case(m, n, k, fp8, fp8), distribution=distribution)
        for epilogue in ("none", "bias"):
            yield fused_case(m, n, k, Granularity.ROW, distribution, fp8, epilogue, batch=3)
        for norm in ("layer+affine", "rms+affine"):
            problem = make_problem(
                "norm_quantize", (m, k), epilogue=norm, out_format=Format.BFLOAT16
            )
            yield Case(problem, distribution)


def taken_by(kernel: Kernel, distribution: str) -> list[Case]:
    device = current_device("cuda")
    found = [
        case
        for case in cases(distribution, fp8_format(device))
        if case.problem.op == kernel.op
        and isinstance(kernel.supports(case.problem, device), Accepted)
    ]
    assert found, f"{kernel} takes none of the problems"
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distribution", REALISTIC_DISTRIBUTIONS)
def test_it_is_correct_on_every_distribution(name: str, distribution: str) -> None:
    kernel = kernel_here(name)
    where, device = torch.device("cuda"), current_device("cuda")
    for case in taken_by(kernel, distribution):
        operands = operands_of(case.problem, distribution, where, device, cold=False, seed=3)
        before = operands.fingerprint()
        operands.poison()
        contender_of(operands, kernel).calls[0]()
        error, wrong = operands.check(kernel)
        assert not wrong, f"{case.problem}: {wrong} ({error})"
        assert operands.fingerprint() == before, f"{case.problem}: it changes what it reads"


@pytest.mark.parametrize("name", SCALED)
def test_outputs_with_any_alignment_are_written(name: str) -> None:
    kernel = kernel_here(name)
    where, device = torch.device("cuda"), current_device("cuda")
    problem = taken_by(kernel, "X1")[0].problem
    operands = operands_of(problem, "X1", where, device, cold=False)
    *given, out, bias = operands.sets[0]
    extra = operands.epilogues[0]
    flat = torch.zeros(out.numel() + 3, dtype=out.dtype, device=where)
    askew = flat[3:].view(out.shape)
    kept = torch.zeros_like(out)
    for target in (kept, askew):
        kernel.launch(*given, target, bias, kernel.workspace(*given, target, bias, *extra), *extra)
    assert torch.equal(askew, kept) and (flat[:3] == 0).all()


@pytest.mark.parametrize("name", SCALED)
def test_non_finite_values_stay_in_their_row(name: str) -> None:
    kernel = kernel_here(name)
    where, device = torch.device("cuda"), current_device("cuda")
    case = max(taken_by(kernel, "X1"), key=lambda case: case.problem.flops)
    operands = operands_of(case.problem, "X1", where, device, cold=False)
    a = operands.sets[0][0]
    a.view(torch.uint8)[5, 3] = Format.of(a.dtype).nan_byte
    contender_of(operands, kernel).calls[0]()
    (out,) = operands.outputs(operands.sets[0])
    assert out[5].isnan().all() and not torch.cat([out[:5], out[6:]]).isnan().any()


QUANTIZING = [name for name in NAMES if KERNELS[name].quantized_as]


@pytest.mark.parametrize("name", QUANTIZING)
def test_rows_of_zeros_and_of_any_size_are_quantized_as_declared(name: str) -> None:
    kernel = kernel_here(name)
    assert kernel.quantized_as is not None
    where = torch.device("cuda")
    case = next(case for case in taken_by(kernel, "X1") if not case.problem.prepared)
    (m, k), n = (256, 128), 64
    x = torch.randn(m, k, device=where) * torch.logspace(-30, 30, m, device=where)[:, None]
    x[7] = 0.0
    w = torch.randn(n, k, device=where).bfloat16()
    a, b = x.bfloat16(), w.t()
    if case.problem.a.layout is Layout.COLUMN:
        a = a.t().contiguous().t()
    if case.problem.b is not None and case.problem.b.layout is Layout.ROW:
        b = b.contiguous()
    out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=where)
    kernel.launch(a, b, out, None, kernel.workspace(a, b))
    left, right = kernel.quantized_as("x", a), kernel.quantized_as("w", b.t())
    exact = numerics.dequantize(left, torch.float64) @ numerics.dequantize(right, torch.float64).t()
    size = (
        numerics.dequantize(left, torch.float64).abs()
        @ numerics.dequantize(right, torch.float64).abs().t()
    )
    error = numerics.kernel_error(out, exact, size, Format.BFLOAT16.unit_roundoff)
    assert error.maximum <= kernel.kernel_err_bound and (out[7] == 0).all()
