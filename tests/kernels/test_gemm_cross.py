"""Kernels for DCN's cross after a product: any size, view, scale and value within their bounds."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from lokakern import jit, numerics, nvrtc
from lokakern.kernels.cuda import gemm_cross
from lokakern.kernels.cuda.tiles import SHARED_BYTES, Kind
from lokakern.nvrtc import Program
from lokakern.registry.register import KERNELS
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
    empty_data,
)
from tests.support.kernel_cases import CROSSING, cases, drawn, kernel_here
from tests.support.norm_runs import Run

# And an emulation on a CPU, which shows that the tests are right.
CASES = [
    case
    for case in cases("gemm_norm")
    if case.values[0] in CROSSING or case.values == ("torch.norm_emulated_row", "cpu")
]
SEEDS = (0,)  # of everything drawn here, but for the fuzz
FUZZ_SEEDS = tuple(range(int(os.environ.get("LOKAKERN_FUZZ", "12"))))
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
BIASES = (None, torch.bfloat16, torch.float32)
# Weights that stay in shared memory and such that are streamed; tails of tiles, pieces and steps.
SIZES = tuple(itertools.product((1, 63, 200), (8, 72, 264), (16, 173, 1500)))


def cross_of(
    m: int, n: int, where: str, bias: torch.dtype | None = None, pitch: int = 0
) -> NormEpilogue:
    """A cross whose matrices are columns of wider ones."""
    x0, x = (drawn(m, n + pitch, where=where, seed=10 + i)[:, :n] for i in range(2))
    vector = None if bias is None else drawn(n, where=where, seed=20, dtype=bias)
    return NormEpilogue(bias=vector, x0=x0, x=x)


def run(
    name: str, where: str, m: int, n: int, k: int, epilogue: NormEpilogue,
    out: torch.Tensor | None = None,
) -> Run:  # fmt: skip
    x, w = drawn(m, k, where=where, seed=2), drawn(n, k, where=where, seed=1)
    return Run(kernel_here(name, where), x, w, epilogue, out=out)


@pytest.mark.parametrize("name", [name for name in CROSSING if not KERNELS[name].parts])
def test_they_support_their_problems_and_reject_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KERNELS[name]
    usual = Problem(
        op="gemm_norm", m=8192, n=3456, k=512, a=Operand(Format.E4M3FN, kernel.granularity),
        b=Operand(Format.E4M3FN, kernel.b_granularity, Layout.COLUMN), epilogue="bias+cross",
    )  # fmt: skip
    wide = replace(usual.a, format=Format.E5M2)
    for right in ({}, {"epilogue": "cross"}, {"m": 1}, {"n": 8}, {"k": 8192}, {"a": wide}):
        assert kernel.supports(replace(usual, **right), H200) is ACCEPTED, right
    for wrong, word in (
        ({"epilogue": "bias"}, "cross"),
        ({"epilogue": "bias+layer+cross"}, "cross"),
        ({"epilogue": "bias+residual+cross"}, "cross"),
        ({"epilogue": "cross+residual_last"}, "cross"),
        ({"a": Operand(Format.BFLOAT16)}, "scales"),
        ({"a": replace(usual.a, alignment=8)}, "16 bytes"),
        ({"b": replace(usual.b, layout=Layout.ROW)}, "column-major"),
        ({"out_format": Format.E4M3FN, "out_granularity": Granularity.ROW}, "bfloat16"),
        ({"n": 1677}, "n=1677"),
        ({"k": 0}, "sizes"),
        ({"m": 2**30}, "sizes"),
    ):
        answer = kernel.supports(replace(usual, **wrong), H200)
        assert isinstance(answer, Rejected) and word in answer.reason, wrong
    monkeypatch.setattr(nvrtc, "why_not", lambda _device: "no compiler")
    answer = kernel.supports(usual, H200)
    assert isinstance(answer, Rejected) and answer.reason == "no compiler"


@pytest.mark.parametrize("scales", gemm_cross.SCALES)
def test_every_size_has_a_tile_that_fits_shared_memory(scales: str) -> None:
    tiles = set()
    for n, k, bias in itertools.product((8, 1680, 3456), (1, 64, 512, 1024, 8192), (0, 2, 4)):
        kind = Kind(scales, bias_bytes=bias)
        tile = gemm_cross.tile_for(n, k, kind)
        macros = gemm_cross.macros_of(n, k, tile, kind)
        assert int(macros["SHARED_BYTES"]) <= SHARED_BYTES and int(macros["STAGES"]) >= 2
        tiles.add(tile.resident)
    assert tiles == {True, False}  # the weight stays, or is streamed


@pytest.mark.parametrize(("name", "where"), CASES)
@pytest.mark.parametrize("bias", BIASES)
def test_any_size_is_right(name: str, where: str, bias: torch.dtype | None) -> None:
    for m, n, k in SIZES if where == "cuda" else SIZES[::4]:
        assert run(name, where, m, n, k, cross_of(m, n, where, bias)).check(), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CROSSING)
def test_many_tiles_of_each_block_are_right(name: str) -> None:
    """Rings go round many times: 8191 rows are 64 tiles of each warpgroup."""
    for n, k in ((264, 128), (1024, 512), (264, 1500)):
        assert run(name, "cuda", 8191, n, k, cross_of(8191, n, "cuda", torch.bfloat16)).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_views_are_read_and_slices_are_written(name: str, where: str) -> None:
    m, n = 70, 136
    whole = torch.full((m + 3, n + 24), 7.0, dtype=torch.bfloat16, device=where)
    epilogue = cross_of(m, n, where, torch.bfloat16, pitch=8)
    assert run(name, where, m, n, 192, epilogue, whole[:m, 16 : 16 + n]).check()
    assert (whole[m:] == 7).all() and (whole[:, :16] == 7).all() and (whole[:, 16 + n :] == 7).all()
    one = epilogue.x
    assert run(name, where, m, n, 192, epilogue._replace(x0=one)).check()  # the first cross of DCN


@pytest.mark.parametrize(("name", "where"), CASES)
def test_nan_stays_in_its_place(name: str, where: str) -> None:
    m, n = 40, 136
    x = drawn(m, 256, where=where, seed=2)
    x[5, 7] = math.nan
    x[9] = 0.0
    epilogue = cross_of(m, n, where)
    assert epilogue.x0 is not None and epilogue.x is not None
    epilogue.x0[3, 4], epilogue.x[8, 131] = math.nan, math.inf
    w = drawn(n, 256, where=where, seed=1)
    found = Run(kernel_here(name, where), x, w, epilogue)
    values = found.values()
    if KERNELS[name].granularity is not Granularity.TENSOR:
        assert torch.equal(values[9], epilogue.x[9].float())  # a product of 0 leaves x
    nan = values.isnan()
    assert nan[5].all() and nan[3, 4] and values[8, 131] == math.inf
    assert int(nan.sum()) == n + 1


@pytest.mark.parametrize(("name", "where"), CASES)
def test_scales_of_any_magnitude(name: str, where: str) -> None:
    """Scales whose product is subnormal or overflows."""
    for i, j in ((-60, -20), (-30, -15), (25, 25), (50, -50)):
        x = drawn(72, 256, where=where, seed=2) * 2.0**i
        w = drawn(136, 256, where=where, seed=1) * 2.0**j
        epilogue = cross_of(72, 136, where, torch.float32)
        assert Run(kernel_here(name, where), x, w, epilogue).check(), (i, j)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_results_are_reproducible(name: str, where: str) -> None:
    found = run(name, where, 200, 264, 512, cross_of(200, 264, where, torch.bfloat16))
    first = found.out.clone()
    for _ in range(3):
        found.out.fill_(math.nan)
        found.launch()
        assert torch.equal(found.out.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("scales", gemm_cross.SCALES)
def test_a_product_that_is_kept_takes_no_more_shared_memory(scales: str) -> None:
    """It lies where x0 was: tiles are those of a cross alone."""
    kind = Kind(scales, bias_bytes=2)
    tile = gemm_cross.tile_for(3456, 512, kind)
    plain = gemm_cross.macros_of(3456, 512, tile, kind)
    assert gemm_cross.macros_of(3456, 512, tile, kind, True) == {**plain, "KEEPS": 1}


def test_columns_are_shared_by_blocks_where_that_fills_the_last_wave() -> None:
    kind, plan = Kind("row"), gemm_cross.make_plan
    for n, m, blocks in (
        (123200, 8192, 2 * 963),  # 7.3 waves of 132
        (132 * 128, 8192, 132),
        (133 * 128, 8192, 4 * 133),  # else one block would run alone
        (123200, 64, 963),  # one tile of each
        (3456, 8192, 4 * 27),
    ):
        tile = gemm_cross.tile_for(n, 512, kind)
        assert plan(m, n, 512, kind, tile, 132).grid == (blocks, 1, 1), (n, m)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", gemm_cross.SCALES)
def test_a_product_is_kept_by_a_program_of_its_own(scales: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[f"cuda.gemm_cross_{scales}"]
    meta, m, n, k = torch.device("meta"), 64, 136, 256
    left, right = (
        QuantizedTensor(
            empty_data(rows, k, torch.float8_e4m3fn, meta), form.empty_scale(rows, k, meta), form
        )
        for rows, form in ((m, kernel.granularity), (n, kernel.b_granularity))
    )
    x0, x, out, kept = torch.empty((4, m, n), dtype=dtype, device=meta)
    with jit.record(H200) as found:
        kernel.launch(left, right.t(), out, NormEpilogue(x0=x0, x=x), ())
        kernel.launch(left, right.t(), out, NormEpilogue(x0=x0, x=x), (), kept)
        kernel.launch(left, right.t(), out, NormEpilogue(x0=x, x=x), (), kept)
    plain, keeping, of_one = (x for x in found.jobs.values() if isinstance(x, Program))
    assert dict(keeping.macros) == {**dict(plain.macros), "KEEPS": 1}
    assert (dict(keeping.macros)["SAME"], dict(of_one.macros)["SAME"]) == (0, 1)
    assert plain.source == keeping.source == of_one.source
    assert ("half_" in keeping.source) is (dtype is torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", gemm_cross.SCALES)
def test_what_is_kept_is_the_product_rounded_and_the_cross_is_as_without(
    scales: str, dtype: torch.dtype
) -> None:
    """Bits of both, of views, of one matrix twice, and of many tiles of a block."""
    kernel, plain = KERNELS[f"cuda.gemm_cross_{scales}"], KERNELS[f"cuda.scaled_gemm_{scales}"]
    sizes = [(m, n, k) for m in (1, 63, 201) for n, k in ((8, 16), (136, 192), (264, 1500))]
    for (m, n, k), bias in itertools.product((*sizes, (8191, 1096, 512)), (None, dtype)):
        x, w = (drawn(i, k, where="cuda", seed=j, dtype=dtype) for j, i in enumerate((m, n)))
        left = numerics.quantize(x, Format.E4M3FN, kernel.granularity)
        right = numerics.quantize(w, Format.E4M3FN, kernel.b_granularity).t()
        wide = [drawn(m, n + 8, where="cuda", seed=5 + i, dtype=dtype) for i in range(2)]
        x0, term = (y[:, :n] for y in wide)
        vector = None if bias is None else drawn(n, where="cuda", seed=9, dtype=dtype)
        product = torch.full((m, n), math.nan, dtype=dtype, device="cuda")
        scratch = plain.workspace(left.data, left.scale, *right.transpose, None, None)
        plain.launch(left.data, left.scale, *right.transpose, product, vector, scratch)
        apart = NormEpilogue(bias=vector, x0=term.clone(), x=term)
        crossed = torch.empty((m, n), dtype=dtype, device="cuda")
        kernel.launch(left, right, crossed, apart, ())
        for factor in (x0, term):
            epilogue = NormEpilogue(bias=vector, x0=factor, x=term)
            outputs = torch.full((3, m + 1, n), 7.0, dtype=dtype, device="cuda")
            expected, found, kept = outputs[:, :m]
            kernel.launch(left, right, expected, epilogue, ())
            kernel.launch(left, right, found, epilogue, (), kept)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), (m, n, k)
            if factor is term:  # one matrix, which is read once
                assert torch.equal(found.view(torch.int16), crossed.view(torch.int16)), (m, n, k)
            # Compilers contract a scale and a bias in one of both kernels: a sum rounds otherwise.
            steps = (kept.view(torch.int16).int() - product.view(torch.int16).int()).abs()
            assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.01, (m, n, k)
            assert (outputs[:, m] == 7).all()


@pytest.mark.parametrize("seed", FUZZ_SEEDS)
@pytest.mark.parametrize(("name", "where"), [c for c in CASES if not KERNELS[c.values[0]].parts])
def test_random_calls_are_right(name: str, where: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = 5000 if where == "cuda" else 100
    m, n, k = int(rng.integers(1, most)), 8 * int(rng.integers(1, 300)), int(rng.integers(1, 2500))
    bias = BIASES[int(rng.integers(3))]
    epilogue = cross_of(m, n, where, bias, 8 * int(rng.integers(3)))
    assert run(name, where, m, n, k, epilogue).check(), (m, n, k)
