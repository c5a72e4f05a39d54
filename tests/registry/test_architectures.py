"""What kernels claim beyond their files: enough, with a reason, within the hardware's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lokakern.problems import make_problem
from lokakern.registry.architectures import FP8_GPUS
from lokakern.registry.register import KERNELS, kernel_named, load_kernels
from lokakern.selection import dispatcher
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem

L4 = Device("nvidia", "NVIDIA L4", "sm_89", 58, 22)
RTX_5090 = Device("nvidia", "NVIDIA GeForce RTX 5090", "sm_120", 170, 32)
B200 = Device("nvidia", "NVIDIA B200", "sm_100", 148, 180)
B300 = Device("nvidia", "NVIDIA B300", "sm_103", 148, 270)
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
A100 = Device("nvidia", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 80)
LATE = [L4, RTX_5090, B200, B300]


def products(granularity: Granularity, b: Format = Format.E4M3FN) -> Problem:
    return make_problem(
        "scaled_gemm", (256, 256, 512), a=Operand(Format.E4M3FN, granularity),
        b=Operand(b, granularity, Layout.COLUMN),
    )  # fmt: skip


def refusal(kernel: str, problem: Problem, device: Device) -> str | None:
    return kernel_named(kernel).refusal(problem, device)


@pytest.mark.parametrize("gpu", sorted(FP8_GPUS))
def test_ten_kernels_or_more_run_or_compile_on_every_gpu_with_fp8(gpu: str) -> None:
    load_kernels()
    found = [k for k in KERNELS.values() if gpu in k.architectures and not k.parts]
    written = [k for k in found if k.language in ("triton", "cuda", "hip")]
    assert len(written) >= 10
    if gpu != "sm_90":
        for kernel in written:
            assert kernel.compile_only.get(gpu) or kernel.unmeasured.get(gpu), kernel.name


def test_reasons_are_of_claimed_gpus_only() -> None:
    load_kernels()
    for kernel in KERNELS.values():
        if kernel.language != "torch" and "any" not in kernel.architectures:
            assert set(kernel.compile_only) <= kernel.architectures, kernel.name


@pytest.mark.parametrize("device", [L4, RTX_5090], ids=str)
def test_what_needs_more_than_99_kib_is_refused(device: Device) -> None:
    row = products(Granularity.ROW)
    assert refusal("triton.scaled_gemm_row", row, device) is None
    assert "needs" in (refusal("triton.scaled_gemm_row_fast", row, device) or "")
    for n, k, norm, fits in (
        (256, 512, "layer", True), (200, 2048, "layer", True), (128, 2048, "layer", True),
        (256, 528, "layer", False), (257, 512, "layer", False), (512, 512, "rms", False),
        (1024, 512, "block_rms(128)", True), (1024, 512, "block_rms(256)", False),
        (256, 512, "block_rms(256)", True),
    ):  # fmt: skip
        block = "block" in norm
        operands = {"a": Operand(Format.E4M3FN, Granularity.ROW),
                    "b": Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)}  # fmt: skip
        problem = make_problem("gemm_norm", (65536, n, k), epilogue=norm, **operands)
        kernel = f"triton.gemm_{'block_' if block else ''}norm_row"
        why = refusal(kernel, problem, device)
        assert why is None if fits else "do not fit 99 KiB of shared memory" in (why or ""), (
            n,
            k,
            norm,
        )
        assert refusal(kernel, problem, H200) is None, (n, k, norm)
    wide = make_problem("gemm_norm", (65536, 512, 512), epilogue="layer")
    unfused = "triton.quantize_row+triton.scaled_gemm_row"
    assert refusal(f"{unfused}+triton.norm_quantize", wide, device) is None
    why = refusal("triton.quantize_row+triton.gemm_norm_row", wide, device)
    assert (why or "").startswith("triton.gemm_norm_row: 512 columns together, k=512, do not fit")


@pytest.mark.parametrize("device", LATE, ids=str)
def test_sums_that_triton_does_not_promote_are_short(device: Device) -> None:
    """mma.sync of sm_89 and sm_120; scales of 128 of k are multiplied, and added, in float32."""
    is_short = device in (L4, RTX_5090)
    for granularity, kernel in ((Granularity.ROW, "row"), (Granularity.TENSOR, "tensor")):
        problem = replace(products(granularity), k=2048)
        assert refusal(f"triton.scaled_gemm_{kernel}", problem, device) is None
        why = refusal(f"triton.scaled_gemm_{kernel}", replace(problem, k=2064), device)
        assert ("promotes no sums" in (why or "")) is is_short
        composed = make_problem("gemm", (256, 256, 2064))
        why = refusal(f"triton.quantize_{kernel}+triton.scaled_gemm_{kernel}", composed, device)
        assert ("promotes no sums" in (why or "")) is is_short
    block = replace(products(Granularity.GROUP), k=8192)
    assert block.b is not None
    block = replace(block, b=replace(block.b, granularity=Granularity.BLOCK))
    assert refusal("triton.scaled_gemm_block", block, device) is None


def test_torch_multiplies_row_by_row_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_89 its kernel ran on no stream but the default one before 2.12."""
    row, tensor = products(Granularity.ROW), products(Granularity.TENSOR)
    for version, refused in (("2.11.0+cu130", True), ("2.12.0+cu130", False), ("2.13.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        for name in ("torch.scaled_mm_row", "torch.scaled_mm_row_fast"):
            why = refusal(name, row, L4)
            assert (why or "").startswith(f"torch {version} ignores streams") is refused
            assert all(refusal(name, row, device) is None for device in (RTX_5090, B300, H200))
        assert refusal("torch.scaled_mm_tensor", tensor, L4) is None
    five = products(Granularity.ROW, Format.E5M2)
    for device in LATE:
        assert "torch multiplies by e4m3fn only" in (
            refusal("torch.scaled_mm_row", five, device) or "")  # fmt: skip
    assert refusal("torch.scaled_mm_row", five, H200) is None  # by cuBLASLt
    assert refusal("torch.scaled_mm_tensor", products(Granularity.TENSOR, Format.E5M2), L4) is None


def test_quantizers_of_cuda_are_those_with_the_launches_of_sm_90() -> None:
    problem = make_problem("quantize", (256, 512))
    for device in (B200, B300, RTX_5090):
        assert refusal("cuda.quantize_row", problem, device) is None
    assert "needs sm_100" in (refusal("cuda.quantize_row", problem, L4) or "")
    for kernel in KERNELS.values():
        if kernel.language == "cuda" and not kernel.parts:
            extended = kernel.architectures > {"sm_90"}
            known = kernel.name.startswith(("cuda.quantize_", "cuda.dequantize_"))
            own = known and not ("_together_" in kernel.name or "_long_" in kernel.name)
            assert extended is own, kernel.name


def test_an_a100_is_told_plainly_that_it_gets_bf16() -> None:
    load_kernels()
    late = [k for k in KERNELS.values() if "any" not in k.architectures]
    assert late and not any(kernel.runs_on(A100) for kernel in late)
    words = "sm_80 does not multiply FP8: all is bf16"
    choice = dispatcher.dispatch("gemm", (8192, 1024, 1024), 0.06, device=A100)
    assert choice.kernel == "torch.bf16" and words in choice.explain()
    for device in LATE:
        unmeasured = dispatcher.dispatch("gemm", (8192, 1024, 1024), 0.06, device=device)
        assert unmeasured.kernel == "torch.bf16" and "multiply FP8" not in unmeasured.explain()


@pytest.mark.parametrize("epilogue", ["affine+cross", "bias+affine+cross"])
@pytest.mark.parametrize("kernel", ["cuda.gemm_cross_row", "cuda.quantize_row+cuda.gemm_cross_row"])
def test_a_cross_with_the_weight_of_a_norm_is_for_kernels_that_read_it(
    kernel: str, epilogue: str
) -> None:
    """It was ignored: wrong by 4000 times the bound."""
    row = products(Granularity.ROW) if "+" not in kernel else make_problem("gemm", (256, 256, 512))
    problem = replace(row, op="gemm_norm", epilogue=epilogue)
    assert "weight" in (refusal(kernel, problem, H200) or "")
    without = epilogue.replace("affine+", "")
    assert refusal(kernel, replace(problem, epilogue=without), H200) is None
