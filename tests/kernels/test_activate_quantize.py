"""Kernels that activate and quantize: every supported row, bitwise equal where f(x) is exact."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lokakern import numerics, nvrtc
from lokakern.epilogue import ACTIVATIONS
from lokakern.functional.norm_checks import norm_quantize_problem
from lokakern.registry import ops
from lokakern.registry.register import KERNELS
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    QuantizedTensor,
    Rejected,
)
from tests.support.kernel_cases import ACTIVATING, cases, drawn, kernel_here
from tests.support.norm_runs import Run, poisoned

(NAME,) = ACTIVATING
# And the emulation on a CPU, which shows that the tests are right.
CASES = [
    case
    for case in cases("norm_quantize")
    if case.values[0] in ACTIVATING or case.values == ("torch.norm_quantize", "cpu")
]
SEEDS = (0,)  # of everything drawn here
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
# Parts of a warp, a warp, blocks of many sizes; rows that end inside 16 bytes, or one that starts.
COLUMNS = (1, 7, 8, 64, 200, 264, 1000, 1024, 1031, 2048, 4096, 5120, 7173, 8192)


def test_it_supports_its_problems_and_rejects_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, kind = KERNELS[NAME], (Format.E4M3FN, Granularity.ROW)
    epilogue = NormEpilogue(activation="relu")
    usual = norm_quantize_problem(torch.empty(4, 64).bfloat16(), epilogue, kind, None)
    for right in (
        {"epilogue": "silu"},
        {"out_format": Format.E5M2},
        {"k": 13, "a": Operand(Format.BFLOAT16, alignment=2)},
        {"k": 16384, "m": 2**31 - 1},
        {"k": 8192, "a": Operand(Format.FLOAT32)},
    ):
        assert kernel.supports(replace(usual, **right), H200) is ACCEPTED, right
    column = Operand(Format.BFLOAT16, layout=Layout.COLUMN)
    for wrong, word in (
        ({"epilogue": "rms"}, "activation"),
        ({"epilogue": "none"}, "activation"),
        ({"epilogue": "bias+relu"}, "activation"),
        ({"epilogue": "relu+residual_last"}, "activation"),
        ({"epilogue": "gate"}, "activation"),
        ({"out_granularity": Granularity.GROUP}, "scales of rows"),
        ({"out_format": Format.BFLOAT16, "out_granularity": Granularity.NONE}, "e4m3fn"),
        ({"a": column}, "row-major"),
        ({"a": Operand(Format.E4M3FN)}, "bfloat16 or float32"),
        ({"k": 16385}, "16384"),
        ({"k": 8193, "a": Operand(Format.FLOAT32)}, "8192"),
        ({"m": 2**31}, "2^31"),
    ):
        answer = kernel.supports(replace(usual, **wrong), H200)
        assert isinstance(answer, Rejected) and word in answer.reason, wrong
    monkeypatch.setattr(nvrtc, "why_not", lambda _device: "no compiler")
    answer = kernel.supports(usual, H200)
    assert isinstance(answer, Rejected) and answer.reason == "no compiler"


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_any_length(name: str, where: str, activation: str, dtype: torch.dtype) -> None:
    kernel = kernel_here(name, where)
    longest = 16384 * 2 // dtype.itemsize
    for columns, rows in itertools.product((*COLUMNS, longest - 3, longest), (1, 3, 130)):
        x = drawn(rows, columns, where=where, dtype=dtype, seed=columns)
        x *= 2.0 ** torch.randint(-40, 40, (rows, 1), device=where)
        found = Run(kernel, x, None, NormEpilogue(activation=activation), Granularity.ROW)
        assert found.check() or (name not in ACTIVATING and dtype is torch.float32)


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_relu_is_bitwise_equal_to_the_reference(
    name: str, where: str, dtype: torch.dtype, form: Format
) -> None:
    """Inputs include slices whose rows start anywhere, and rows of zeros, infinities and NaN."""
    kernel = kernel_here(name, where)
    for columns, skipped in itertools.product((64, 96, 2048, 2053, 4096), (0, 1, 8)):
        x = drawn(40, columns + 24, where=where, dtype=dtype)[:, skipped : skipped + columns]
        x[1] = 0.0
        x[2] = -x[2].abs()
        x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, -math.inf
        x[6] = math.inf
        x[7] *= 2.0**-120
        x[8] = -0.0
        expected = numerics.quantize(functional.relu(x), form, Granularity.ROW)
        found = poisoned(form, Granularity.ROW, *x.shape, where, None)
        kernel.launch(x, found, NormEpilogue(activation="relu"), ())
        assert torch.equal(found.scale, expected.scale)
        left, right = (q.data.float().nan_to_num(-1.0) for q in (found, expected))
        assert torch.equal(left, right)  # with either sign of 0


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_non_finite_values_do_not_affect_scales(
    name: str, where: str, activation: str, form: Format
) -> None:
    """Within a step of FP8 of torch's activation; into data that begin anywhere."""
    kernel, rows, columns = kernel_here(name, where), 8, 1000
    x = drawn(rows, columns, where=where)
    x[1, 3], x[2, 999], x[3, 0], x[4] = math.nan, math.inf, -math.inf, math.inf
    x[5] = 0.0
    # From 5.7e37 on torch's hardswish is infinite, which multiplies by 6 in between; ours is not.
    x[6, 7] = 5e37 if activation == "hardswish" else 3e38
    expected = numerics.quantize(ops.ACTIVATIONS[activation][0](x.float()), form, Granularity.ROW)
    for skipped in (0, 1, 8):
        pitch = expected.data.stride(0)
        memory = torch.full((rows * pitch + 16,), 7, dtype=torch.uint8, device=where)
        data = memory[skipped:].as_strided((rows, columns), (pitch, 1)).view(form.dtype)
        scale = Granularity.ROW.empty_scale(rows, columns, x.device).fill_(math.nan)
        found = QuantizedTensor(data, scale, Granularity.ROW)
        kernel.launch(x, found, NormEpilogue(activation=activation), ())
        assert torch.allclose(found.scale, expected.scale, rtol=1e-5)
        left, right = (q.data.float() for q in (found, expected))
        assert torch.equal(left.isfinite(), right.isfinite())
        left, right = left.nan_to_num(0.0, 0.0, 0.0), right.nan_to_num(0.0, 0.0, 0.0)
        known = torch.finfo(form.dtype)
        step = known.eps * right.abs().clamp_min(known.tiny)
        assert ((left - right).abs() <= step).all()
        beside = torch.ones_like(memory, dtype=torch.bool)
        beside[skipped:].as_strided((rows, columns), (pitch, 1)).fill_(False)
        assert (memory[beside] == 7).all()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_results_are_reproducible(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    epilogue = NormEpilogue(activation="silu")
    found = Run(kernel, drawn(77, 2048, where=where), None, epilogue, Granularity.ROW)
    first = found.out.data.view(torch.uint8).clone()
    for _ in range(3):
        found.out.data.view(torch.uint8).fill_(7)
        found.launch()
        assert torch.equal(found.out.data.view(torch.uint8), first)
