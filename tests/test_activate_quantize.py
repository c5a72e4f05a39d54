"""Kernels that activate and quantize: any row they hold, byte for byte where f(x) is exact."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lokakern import numerics
from lokakern.norm_checks import norm_quantize_problem
from lokakern.registry.register import KERNELS
from lokakern.types import Device, Format, Granularity, Layout, NormEpilogue, Operand, Rejected
from tests.kernel_cases import cases, drawn, kernel_here
from tests.test_norm_kernels import Run, poisoned

NAME = "cuda.activate_quantize_row"
CASES = [case for case in cases("norm_quantize") if "activate" in case.values[0]]
SEEDS = (0,)  # of everything drawn here
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
ACTIVATIONS = ("relu", "hardswish", "silu")
# Parts of a warp, a warp, blocks of many sizes; rows that end inside 16 bytes, or one that starts.
COLUMNS = (1, 7, 8, 64, 200, 264, 1000, 1024, 1031, 2048, 4096, 5120, 7173, 8192)


def test_it_refuses_what_it_does_not_do() -> None:
    kernel, kind = KERNELS[NAME], (Format.E4M3FN, Granularity.ROW)
    epilogue = NormEpilogue(activation="relu")
    usual = norm_quantize_problem(torch.empty(4, 64).bfloat16(), epilogue, kind, None)
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
    ):
        answer = kernel.supports(replace(usual, **wrong), H200)
        assert isinstance(answer, Rejected) and word in answer.reason, wrong


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_any_length(name: str, where: str, activation: str, dtype: torch.dtype) -> None:
    kernel = kernel_here(name, where)
    longest = 16384 * 2 // dtype.itemsize
    for columns, rows in itertools.product((*COLUMNS, longest - 3, longest), (1, 3, 130)):
        x = drawn(rows, columns, where=where, dtype=dtype, seed=columns)
        x *= 2.0 ** torch.randint(-40, 40, (rows, 1), device=where)
        assert Run(kernel, x, None, NormEpilogue(activation=activation), Granularity.ROW).check()


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_relu_is_byte_for_byte_that_of_the_reference(
    name: str, where: str, dtype: torch.dtype, form: Format
) -> None:
    """Of slices, too, whose rows start anywhere, and of rows of zeros, infinities and NaN."""
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
def test_the_same_bits_every_time(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    epilogue = NormEpilogue(activation="silu")
    found = Run(kernel, drawn(77, 2048, where=where), None, epilogue, Granularity.ROW)
    first = found.out.data.view(torch.uint8).clone()
    for _ in range(3):
        found.out.data.view(torch.uint8).fill_(7)
        found.launch()
        assert torch.equal(found.out.data.view(torch.uint8), first)
