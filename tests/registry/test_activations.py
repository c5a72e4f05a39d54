"""Kernels that do not have GELU say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lokakern.epilogue import gelu_refusal
from lokakern.functional.norm_checks import norm_quantize_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device, Format, Granularity, NormEpilogue, Rejected
from lokakern.workloads.norm_cases import chain_layer_cases

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
PROBLEMS = [
    case.problem for case in chain_layer_cases(512, 256, 256, "bias+gelu", "X1", Format.E4M3FN)
]
WITH_GELU = ("cuda.", "torch.")


@pytest.mark.parametrize("last", ["gelu", "gelu_tanh", "layer+gelu", "gelu+residual_last"])
def test_only_kernels_that_have_gelu_take_it(last: str) -> None:
    taking = set()
    for name, kernel in KERNELS.items():
        for problem in PROBLEMS if kernel.op == "gemm_norm" else ():
            silu = last.replace("gelu_tanh", "gelu").replace("gelu", "silu")
            plain, asked = (
                replace(problem, epilogue=problem.epilogue.replace("gelu", word))
                for word in (silu, last)
            )
            answer = kernel.supports(asked, H200)
            if isinstance(answer, Rejected):
                takes_silu = not isinstance(kernel.supports(plain, H200), Rejected)
                assert not takes_silu or "has no gelu" in answer.reason, name
            else:
                taking.add(name)
    assert {"cuda.gemm_norm_bf16", "cuda.quantize_row+cuda.gemm_norm_row_fast"} <= taking
    lasts = {name.rpartition("+")[-1] for name in taking}
    assert all(name.startswith(WITH_GELU) for name in lasts)


def test_a_composition_names_the_kernel_that_has_none() -> None:
    problem = replace(PROBLEMS[0], epilogue="bias+layer+affine+gelu+residual_last")
    parts = ("torch.bf16", "triton.norm_quantize")
    found = gelu_refusal("+".join(parts), parts, problem.epilogue)
    assert found == "triton.norm_quantize: has no gelu"
    assert gelu_refusal("triton.gemm_norm_row", (), problem.epilogue) == "has no gelu"
    assert gelu_refusal("cuda.gemm_norm_row", (), problem.epilogue) is None
    silu = replace(problem, epilogue="bias+silu")
    assert gelu_refusal("triton.gemm_norm_row", (), silu.epilogue) is None


def test_activations_are_quantized_by_kernels_that_have_them() -> None:
    x, epilogue = torch.empty(512, 256).bfloat16(), NormEpilogue(activation="gelu")
    problem = norm_quantize_problem(x, epilogue, (Format.E4M3FN, Granularity.ROW), None)
    names = {"cuda.activate_quantize_row", "cuda.norm_quantize", "torch.norm_quantize"}
    found = {
        name for name, kernel in KERNELS.items() if kernel.op == "norm_quantize"
        if not isinstance(kernel.supports(problem, H200), Rejected)
    }  # fmt: skip
    assert found == names
