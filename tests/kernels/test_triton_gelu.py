"""GELU in Triton's kernels: against float64 in the interpreter, and as programs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.build.prebuild import jobs_for
from lokakern.epilogue import ACTIVATIONS
from lokakern.norm import NO_NORM
from lokakern.problems import make_problem
from lokakern.registry import ops
from lokakern.registry.register import fp8_format, kernel_named, load_kernels
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
)
from tests.support.interpreted import run_interpreted

pytest.importorskip("triton", reason="needs Triton")
from lokakern.kernels.triton import gelu, gemm_norm, norm_quantize
from lokakern.triton_job import TritonJob

load_kernels()
GELUS = ("gelu", "gelu_tanh")
DEVICES = [
    Device("nvidia", "NVIDIA H200", "sm_90", 132, 140),
    Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192),
]


def hard_values() -> Tensor:
    """Both tails, all magnitudes, and what is not finite: ``[rows, 1024]``."""
    sizes = torch.logspace(-40, 38, 500)
    given = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, -0.0])
    v = torch.cat([given, sizes, -sizes, torch.linspace(-30, 30, 40000)])
    return torch.nn.functional.pad(v, (0, -len(v) % 1024)).view(-1, 1024)


def check_values(activation: str) -> None:
    """Before they are rounded: of a float32 output, which the launcher has and no op asks for."""
    v = hard_values()
    found, exact = torch.empty_like(v), ops.ACTIVATIONS[activation][0](v.double())
    epilogue = NormEpilogue(NO_NORM, activation=activation)
    kernel_named("triton.norm_quantize").launch(v, found, epilogue, ())
    assert torch.equal(found.isnan(), exact.isnan())
    special, v, found, exact = found.flatten()[:7], v[1:], found[1:], exact[1:]
    assert special[1] == torch.inf and special[3] == torch.tensor(3e38)
    assert not special[4:].any() and bool(special[6].signbit()) and not special[5].signbit()
    error = (found.double() - exact).abs()
    assert bool((error <= 7e-7 + 2.0**-22 * exact.abs()).all())
    inner = (v >= -4.5) & (v.abs() > 1e-30)
    assert bool((error[inner] <= 8e-4 * exact[inner].abs()).all())
    assert bool((error[v.abs() < 1] <= 2e-6 * exact[v.abs() < 1].abs() + 1e-44).all())


def check_static_outputs(activation: str, form: Format) -> None:
    """FP8 under a given scale: the numbers of GELU of float64, or their neighbors near a tie."""
    v, scale = hard_values(), torch.tensor([[0.01]])
    found = QuantizedTensor(torch.empty(v.shape, dtype=form.dtype), scale, Granularity.TENSOR)
    kernel_named("triton.norm_quantize").launch(
        v, found, NormEpilogue(NO_NORM, activation=activation), ()
    )
    exact = ops.ACTIVATIONS[activation][0](v.double())
    rounded = numerics.quantize_static(exact.float(), form, Granularity.TENSOR, scale)[0].data
    values, expected = found.data.float(), rounded.float()
    assert torch.equal(values.isnan(), expected.isnan())
    known = ~expected.isnan()
    ratio = (exact / scale.double()).clamp(-form.maximum, form.maximum)[known]
    least = torch.finfo(form.dtype).smallest_normal * torch.finfo(form.dtype).eps
    allowed = form.unit_roundoff * ratio.abs() + least / 2 + 8e-7 / 0.01
    assert bool(((values[known].double() - ratio).abs() <= allowed).all())
    assert int((values[known] != expected[known]).sum()) <= 40  # of 40000 numbers


def main() -> None:
    from lokakern.triton_interpreter import make_exact

    make_exact()
    for activation in GELUS:
        check_values(activation)
        for form in (Format.E4M3FN, Format.E4M3FNUZ):
            check_static_outputs(activation, form)


def test_interpreted() -> None:
    run_interpreted("tests.kernels.test_triton_gelu")


def problems(fp8: Format, last: str) -> list[Problem]:
    row: dict[str, Any] = {"out_format": fp8, "out_granularity": Granularity.ROW}
    both = {"a": Operand(fp8, Granularity.ROW), "b": Operand(fp8, Granularity.ROW, Layout.COLUMN)}
    epilogues = f"bias+layer+affine+{last}", f"bias+block_rms(64)+{last}"
    return [
        make_problem("gemm_norm", (4096, 256, 512), epilogue=epilogues[0], **both, **row),
        make_problem("gemm_norm", (4096, 1024, 512), epilogue=epilogues[1], **both),
        make_problem("norm_quantize", (4096, 512), epilogue=last, **row),
    ]


KERNELS = ("gemm_norm_row", "gemm_block_norm_row", "norm_quantize")


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("last", ACTIVATIONS[1:])
def test_only_launches_with_gelu_have_its_programs(device: Device, last: str) -> None:
    for problem, name in zip(problems(fp8_format(device), last), KERNELS, strict=True):
        (job,) = jobs_for([problem], device, [kernel_named(f"triton.{name}")])
        assert isinstance(job, TritonJob) and last in job.constants
        own = norm_quantize if problem.op == "norm_quantize" else gemm_norm
        assert job.module == (gelu if last in GELUS else own).__name__
        assert getattr(gelu, job.name).fn.__code__ is getattr(own, job.name).fn.__code__


def test_its_functions_are_declared_as_those_that_they_are_of() -> None:
    for name, own in (("gemm_norm_kernel", gemm_norm), ("norm_quantize_kernel", norm_quantize)):
        made, plain = getattr(gelu, name), getattr(own, name)
        for of_parameter in ("name", "is_constexpr", "do_not_specialize"):
            assert [getattr(p, of_parameter) for p in made.params] == [
                getattr(p, of_parameter) for p in plain.params
            ]
        assert made.cache_key != plain.cache_key


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_job_compiles_in_another_process(device: Device) -> None:
    """As `sweep --prebuild` does it: by the names of a module and of a function."""
    problem = replace(problems(fp8_format(device), "gelu_tanh")[2], k=64)
    (job,) = jobs_for([problem], device, [kernel_named("triton.norm_quantize")])
    job.compile(device)
    assert job.compile(device)


if __name__ == "__main__":
    main()
