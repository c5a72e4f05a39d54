"""Adapters of libraries' norms follow the calling rules of the libraries.

Stand-ins as in test_adapters.py: they compute what a library documents, on the CPU, and check what
it checks, and what it should check.
"""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.kernels.adapters import flashinfer, quack, transformer_engine
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.norm_operands import draw_epilogue, operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.norm import norm_named, normalize
from lokakern.problems import make_problem
from lokakern.registry import ops
from lokakern.registry.libraries import LIBRARIES
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import (
    Accepted,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    Rejected,
    norm_form,
)

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16
# What each does, and no other.
KINDS = {
    "flashinfer.rms_norm": ("rms",),
    "quack.norm": ("layer", "rms"),
    "transformer_engine.layer_norm": ("layer",),
    "transformer_engine.rms_norm": ("rms",),
}
WAYS = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
every_way = pytest.mark.parametrize(("name", "kind"), WAYS)


def check_rows(x: Tensor, out: Tensor) -> None:
    assert x.dtype is out.dtype is BFLOAT16 and x.shape == out.shape and len(x)
    assert x.is_contiguous() and out.is_contiguous()
    assert not x.data_ptr() % 16 and not out.data_ptr() % 16


def check_vectors(x: Tensor, *vectors: Tensor) -> None:
    for vector in vectors:
        assert vector.shape == x.shape[1:] and vector.is_contiguous()
        assert not vector.data_ptr() % 16


def rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """FlashInfer's norm, which reads the weight in the dtype of the rows."""
    check_rows(input, out)
    check_vectors(input, weight)
    assert weight.dtype is BFLOAT16
    return out.copy_(normalize(input.float(), norm_named("rms", eps), weight))


def rmsnorm_forward(
    x: Tensor, weight: Tensor | None, out: Tensor, bias: Tensor | None = None,
    rstd: Tensor | None = None, mean: Tensor | None = None, residual: Tensor | None = None,
    residual_out: Tensor | None = None, eps: float = 1e-6, is_layernorm: bool = False,
) -> None:  # fmt: skip
    """quack's norm, which compiles for any dtypes."""
    check_rows(x, out)
    check_vectors(x, *(vector for vector in (weight, bias) if vector is not None))
    assert rstd is mean is residual is residual_out is None
    norm = norm_named("layer" if is_layernorm else "rms", eps)
    out.copy_(normalize(x.float(), norm, weight, bias))


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Tensor, quantizer: None, otype: str,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """TransformerEngine's norm, which needs weights in the dtype of the rows."""
    check_rows(input, ln_out)
    check_vectors(input, weight)
    assert weight.dtype is BFLOAT16 and otype == "bfloat16" and quantizer is None
    assert sm_margin == 0 and not zero_centered_gamma
    return [ln_out.copy_(normalize(input.float(), norm_named("rms", eps), weight))]


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: Tensor, quantizer: None,
    otype: str, sm_margin: int, zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """TransformerEngine's norm, which would read address 0 without a bias."""
    check_rows(input, ln_out)
    check_vectors(input, weight, bias)
    assert weight.dtype is bias.dtype is BFLOAT16 and otype == "bfloat16" and quantizer is None
    assert sm_margin == 0 and not zero_centered_gamma
    return [ln_out.copy_(normalize(input.float(), norm_named("layer", eps), weight, bias))]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: Any = SimpleNamespace(
        rmsnorm=rmsnorm, _rmsnorm_fwd=rmsnorm_forward, rmsnorm_fwd=rmsnorm_fwd,
        layernorm_fwd=layernorm_fwd, TE_DType={BFLOAT16: "bfloat16"},
    )  # fmt: skip
    monkeypatch.setattr(flashinfer, "library_of_norms", lambda: functions)
    for adapter in (quack, transformer_engine):
        monkeypatch.setattr(adapter, "library", lambda: functions)


def problem_of(kind: str, m: int = 37, k: int = 264, affine: bool = True) -> Problem:
    epilogue = f"{kind}+affine" if affine else kind
    return make_problem("norm_quantize", (m, k), epilogue=epilogue, out_format=Format.BFLOAT16)


def answer_of(name: str, problem: Problem) -> Accepted | Rejected:
    """Whether a kernel supports a problem, wherever its library is installed."""
    return KERNELS[name].supports_problem(problem, H200)


def error_of(name: str, x: Tensor, out: Tensor, epilogue: NormEpilogue) -> float:
    """After a launch, over the bound."""
    kernel = KERNELS[name]
    kernel.launch(x, out, epilogue, kernel.workspace(x, out, epilogue))
    exact, magnitude = ops.normalized(*ops.norm_rows(x), epilogue)
    found = norm_kernel_error(out, exact, magnitude, Format.BFLOAT16.unit_roundoff)
    return found.maximum / kernel.kernel_err_bound


def rows(m: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


def test_every_norm_of_a_library_is_tested_here() -> None:
    found = {k.name for k in KERNELS.values() if k.library in LIBRARIES and k.op == "norm_quantize"}
    assert found == set(KINDS)


@every_way
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (37, 264), (128, 1024), (5, 4096)])
def test_an_adapter_passes_the_arguments_of_its_library(
    name: str, kind: str, affine: bool, m: int, k: int
) -> None:
    """Weights are drawn in float32: what the adapter rounds is within its bound."""
    kernel, problem = KERNELS[name], problem_of(kind, m, k, affine)
    assert isinstance(answer_of(name, problem), Accepted)
    for distribution in ("X1", "X5", "X13"):
        operands = operands_of(problem, distribution, CPU, H200, cold=False)
        operands.poison()
        for call in contender_of(operands, kernel).calls:
            call()
        error, wrong = operands.check(kernel)
        assert not wrong and error.maximum <= kernel.kernel_err_bound, f"{error} {wrong}"


@every_way
@pytest.mark.parametrize("weight", [None, BFLOAT16, torch.float32])
@pytest.mark.parametrize("bias", [None, BFLOAT16, torch.float32])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_vectors_of_either_dtype_or_none_and_any_epsilon(
    name: str, kind: str, weight: torch.dtype | None, bias: torch.dtype | None, eps: float
) -> None:
    """No problem tells which of weight and bias there are, nor what they and the epsilon are."""
    drawn = draw_epilogue(norm_form(f"{kind}+affine"), 37, 264, CPU)
    assert drawn.norm_weight is not None and drawn.norm_bias is not None
    epilogue = NormEpilogue(
        norm_named(kind, eps),
        norm_weight=None if weight is None else drawn.norm_weight.to(weight),
        norm_bias=None if bias is None else drawn.norm_bias.to(bias),
    )
    before = [None if v is None else v.clone() for v in (epilogue.norm_weight, epilogue.norm_bias)]
    out = torch.full((37, 264), math.nan, dtype=BFLOAT16)
    assert error_of(name, rows(37, 264), out, epilogue) <= 1
    for vector, kept in zip((epilogue.norm_weight, epilogue.norm_bias), before, strict=True):
        assert vector is kept or torch.equal(vector, kept)  # type: ignore[arg-type]


@every_way
def test_a_bias_that_cancels_a_product_is_within_the_bound(name: str, kind: str) -> None:
    """Only the rounding errors remain after the bias cancels the product."""
    x = rows(64, 512)
    x[:] = x[0]
    z = normalize(x[:1].double(), norm_named(kind))[0]
    weight = torch.linspace(0.5, 1.9, 512)
    epilogue = NormEpilogue(
        norm_named(kind), norm_weight=weight, norm_bias=-(z * weight.double()).float()
    )
    assert error_of(name, x, torch.empty_like(x), epilogue) <= 1


@every_way
def test_slices_unaligned_outputs_and_empty_inputs(name: str, kind: str) -> None:
    epilogue = draw_epilogue(norm_form(f"{kind}+affine"), 33, 128, CPU)
    x = rows(33, 384)[:, 128:256]
    packed = torch.empty(33, 128, dtype=BFLOAT16)
    askew = torch.full((33 * 128 + 3,), 2.0, dtype=BFLOAT16)
    assert error_of(name, x, packed, epilogue) <= 1
    assert error_of(name, x, askew[3:].view(33, 128), epilogue) <= 1
    assert torch.equal(askew[3:].view(33, 128), packed) and (askew[:3] == 2.0).all()
    kernel, nothing = KERNELS[name], packed[:0]
    kernel.launch(x[:0], nothing, epilogue, kernel.workspace(x[:0], nothing, epilogue))


@every_way
def test_nan_makes_the_whole_row_nan_and_zeros_stay_zeros(name: str, kind: str) -> None:
    x = rows(4, 256)
    x[1, 7], x[2] = math.nan, 0.0
    out = torch.empty_like(x)
    assert error_of(name, x, out, NormEpilogue(norm_named(kind))) <= 1
    assert out[1].isnan().all() and (out[2] == 0).all() and out[[0, 3]].isfinite().all()


@every_way
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 260}, "multiple of 8 columns"),
        ({"a": Operand(Format.FLOAT32)}, "not float32"),
        ({"a": Operand(Format.BFLOAT16, alignment=8)}, "16 bytes"),
        ({"a": Operand(Format.BFLOAT16, Granularity.NONE, Layout.COLUMN)}, "contiguous"),
        ({"out_strided": True}, "contiguous outputs"),
        ({"out_format": Format.E4M3FN, "out_granularity": Granularity.ROW}, "and e4m3fn"),
        ({"out_format": Format.E4M3FN, "out_granularity": Granularity.TENSOR}, "and e4m3fn"),
        ({"m": 2**26}, "32 bits"),
    ],
)
def test_operands_that_a_library_would_misread_are_rejected(
    name: str, kind: str, change: dict[str, Any], words: str
) -> None:
    answer = answer_of(name, dataclasses.replace(problem_of(kind), **change))
    assert isinstance(answer, Rejected) and re.search(words, answer.reason)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "epilogue",
    ["none", "layer", "rms", "block_rms(8)", "bias+layer", "residual+rms+affine", "rms+silu",
     "layer+affine+gate", "rms+cross", "layer+affine+residual_last"],
)  # fmt: skip
def test_unsupported_operations_of_a_library_are_rejected(name: str, epilogue: str) -> None:
    answer = answer_of(name, dataclasses.replace(problem_of("rms"), epilogue=epilogue))
    assert isinstance(answer, Accepted) == (epilogue in KINDS[name])
    if isinstance(answer, Rejected):
        assert answer.reason.endswith(f", not {epilogue}")


@every_way
def test_a_norm_without_its_library_is_unavailable_with_a_reason(name: str, kind: str) -> None:
    kernel = KERNELS[name]
    if LIBRARIES[kernel.library].here is not None:
        return  # what it says then is of the version and of trials
    answer = kernel.supports(problem_of(kind), H200)
    assert isinstance(answer, Rejected) and " is not installed (" in answer.reason
    assert all("never run" in kernel.unmeasured[name] for name in kernel.architectures)
