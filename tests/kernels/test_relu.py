"""`torch.bf16_relu`: any size, view and value within its bound, and NaN as of torch's relu."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lokakern.registry.register import KERNELS
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
)
from tests.support.kernel_cases import RECTIFYING, cases, drawn, kernel_here
from tests.support.norm_runs import Run

(NAME,) = RECTIFYING
# And what is unfused, which shows that the tests are right.
CASES = [
    case for case in cases("gemm_norm")
    if case.values[0] in RECTIFYING or case.values == ("torch.norm_unfused", "cpu")
]  # fmt: skip
SEEDS = range(8)  # of everything drawn here
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
SIZES = tuple(itertools.product((1, 63, 200), (1, 8, 77, 264), (1, 16, 173, 1500)))


def run(
    name: str, where: str, m: int, n: int, k: int, bias: torch.dtype = torch.bfloat16,
    x: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> Run:  # fmt: skip
    epilogue = NormEpilogue(bias=drawn(n, where=where, seed=20, dtype=bias), activation="relu")
    x = drawn(m, k, where=where, seed=2) if x is None else x
    return Run(kernel_here(name, where), x, drawn(n, k, where=where, seed=1), epilogue, out=out)


def test_it_supports_its_problems_and_rejects_others() -> None:
    kernel = KERNELS[NAME]
    usual = Problem(
        op="gemm_norm", m=512, n=1024, k=1024, a=Operand(Format.BFLOAT16),
        b=Operand(Format.BFLOAT16), epilogue="bias+relu",
    )  # fmt: skip
    fp8 = Operand(Format.E4M3FN, Granularity.ROW)
    for right in ({}, {"m": 1}, {"n": 1}, {"k": 13}, {"b": fp8, "prepared": True}):
        assert kernel.supports(replace(usual, **right), H200) is ACCEPTED, right
    for wrong, word in (
        ({"epilogue": "relu"}, "bias+relu"),
        ({"epilogue": "bias+layer+relu"}, "bias+layer+relu"),
        ({"epilogue": "bias+silu"}, "bias+silu"),
        ({"a": fp8}, "e4m3fn"),
        ({"b": fp8}, "e4m3fn"),
        ({"out_format": Format.E4M3FN, "out_granularity": Granularity.ROW}, "e4m3fn"),
    ):
        answer = kernel.supports(replace(usual, **wrong), H200)
        assert isinstance(answer, Rejected) and word in answer.reason, wrong


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32])
def test_any_size_is_right(name: str, where: str, bias: torch.dtype) -> None:
    for m, n, k in SIZES if where == "cuda" else SIZES[::3]:
        assert run(name, where, m, n, k, bias).check(), (m, n, k)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_slices_are_written_and_views_are_read(name: str, where: str) -> None:
    m, n, k = 70, 136, 192
    whole = torch.full((m + 3, n + 24), 7.0, dtype=torch.bfloat16, device=where)
    x = drawn(m, k + 8, where=where, seed=2)[:, 8:]
    assert run(name, where, m, n, k, x=x, out=whole[:m, 16 : 16 + n]).check()
    assert (whole[m:] == 7).all() and (whole[:, :16] == 7).all() and (whole[:, 16 + n :] == 7).all()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_nan_and_infinities_are_those_of_relu(name: str, where: str) -> None:
    m, n, k = 40, 136, 256
    x = drawn(m, k, where=where, seed=2)
    x[5, 7], x[6, 0], x[9] = math.nan, math.inf, 0.0
    found = run(name, where, m, n, k, x=x)
    values, bias = found.values(), found.epilogue.bias
    assert bias is not None
    expected = torch.relu(x.float() @ found.operands[1].float() + bias.float())
    assert torch.equal(values.isnan(), expected.isnan()) and values[5].isnan().all()
    assert torch.equal(values.isinf(), expected.isinf()) and values[6].isinf().any()
    assert torch.equal(values[9], torch.relu(bias.float()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "where"), CASES)
def test_random_calls_are_right(name: str, where: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = 5000 if where == "cuda" else 100
    m, n, k = (int(rng.integers(1, high)) for high in (most, 2400, 2500))
    assert run(name, where, m, n, k).check(), (m, n, k)


def test_it_reads_the_source_of_a_prepared_weight() -> None:
    w, x, bias = (
        drawn(24, 32, where="cpu"),
        drawn(5, 32, where="cpu", seed=1),
        drawn(24, where="cpu"),
    )
    prepared = QuantizedTensor(w, None, Granularity.NONE, source=w)
    out = torch.full((5, 24), math.nan, dtype=torch.bfloat16)
    KERNELS[NAME].launch(x, prepared, out, NormEpilogue(bias=bias, activation="relu"), ())
    assert torch.equal(out, torch.relu(torch.addmm(bias, x, w.t())))
