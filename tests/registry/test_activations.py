"""Kernels that have silu have GELU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lokakern.functional.norm_checks import norm_quantize_problem
from lokakern.registry.register import KERNELS, fp8_format, load_kernels
from lokakern.types import Device, Granularity, NormEpilogue, Rejected
from lokakern.workloads.norm_cases import chain_layer_cases

load_kernels()
DEVICES = [
    Device("nvidia", "NVIDIA L40S", "sm_89", 142, 44),
    Device("nvidia", "NVIDIA H200", "sm_90", 132, 140),
    Device("nvidia", "NVIDIA B200", "sm_100", 148, 180),
    Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192),
    Device("amd", "AMD Instinct MI355X", "gfx950", 256, 288),
]
FUSED = {
    "sm_90": {"cuda.gemm_norm_bf16", "cuda.quantize_row+cuda.gemm_norm_row_fast"},
    "sm_100": {"triton.gemm_norm_bf16", "triton.gemm_norm_row"},
    "gfx942": {"triton.gemm_norm_bf16", "hip.gemm_norm_row", "hip.gemm_norm_block"},
    "gfx950": {"triton.gemm_norm_block", "hip.gemm_norm_row", "hip.gemm_norm_block"},
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("last", ["gelu", "gelu_tanh", "layer+gelu", "gelu+residual_last"])
def test_kernels_that_take_silu_take_gelu(last: str, device: Device) -> None:
    taking = set()
    given = (512, 256, 256, "bias+gelu", "X1", fp8_format(device))
    for problem in [case.problem for case in chain_layer_cases(*given)]:
        silu = last.replace("gelu_tanh", "gelu").replace("gelu", "silu")
        plain, asked = (
            replace(problem, epilogue=problem.epilogue.replace("gelu", word))
            for word in (silu, last)
        )
        for name, kernel in KERNELS.items():
            if kernel.op == "gemm_norm":
                refused, why = (kernel.refusal(each, device) for each in (plain, asked))
                assert (why is None) is (refused is None), (name, why)
                taking |= {name} if why is None else set()
    if not last.endswith("residual_last"):
        assert FUSED.get(device.architecture, set()) <= taking


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_activations_are_quantized_by_kernels_that_have_them(device: Device) -> None:
    x, epilogue = torch.empty(512, 256).bfloat16(), NormEpilogue(activation="gelu")
    form = (fp8_format(device), Granularity.ROW)
    problem = norm_quantize_problem(x, epilogue, form, None)
    names = {"triton.norm_quantize", "torch.norm_quantize"}
    if device.architecture == "sm_90":
        names |= {"cuda.activate_quantize_row", "cuda.norm_quantize"}
    found = {
        name for name, kernel in KERNELS.items() if kernel.op == "norm_quantize"
        if not isinstance(kernel.supports(problem, device), Rejected)
    }  # fmt: skip
    assert found == names
