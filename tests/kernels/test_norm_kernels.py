"""Every kernel with a norm is correct: norms, epilogues, outputs, odd sizes, NaN, views.

Parametrized over the registry, like tests/kernels/test_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.norm import norm_named
from lokakern.registry import ops
from lokakern.registry.register import KERNELS, Kernel
from lokakern.types import (
    Granularity,
    NormEpilogue,
    Rejected,
)
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight
from tests.support.kernel_cases import cases, drawn, kernel_here
from tests.support.norm_runs import (
    CASES,
    LASTS,
    OUTPUTS,
    VECTORS,
    Run,
    epilogue_of,
)

SEEDS = (0,)  # of everything drawn here
NORMS = ("layer", "rms", "block_rms(128)", "block_rms(256)", "none")
# Each norm with each output, each last word, and each choice of vectors, but not all with all.
WAYS = [
    (norm, LASTS[i % len(LASTS)], OUTPUTS[(i + j) % 4], VECTORS[(i + i // 4) % 4], i % 3 == 0)
    for j, norm in enumerate(NORMS)
    for i in range(len(LASTS))
]


def run(
    kernel: Kernel, where: str, m: int, n: int, k: int, way: tuple[Any, ...] = WAYS[0],
    x: torch.Tensor | None = None,
) -> Run:  # fmt: skip
    norm, last, granularity, vectors, wide = way
    if kernel.op == "norm_quantize":
        w, k = None, n
        vectors = tuple(name for name in vectors if name != "bias")
    else:
        w = drawn(n, k, where=where, seed=1)
    rows = drawn(m, k, where=where, seed=2) if x is None else x
    epilogue = epilogue_of(norm, last, vectors, wide, m, n, where)
    return Run(kernel, rows, w, epilogue, granularity)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("name", "where"), CASES)
def test_every_norm_epilogue_and_output(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    taken = [run(kernel, where, 72, 256, 256, way).check() for way in WAYS]
    assert any(taken)
    if kernel.architectures == {"any"}:
        assert all(taken)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_sizes_that_are_not_multiples_of_tiles(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    ways = [("layer", {}, g, ("bias", "norm_weight", "norm_bias"), False) for g in OUTPUTS]
    sizes = itertools.product((1, 3, 129), (1, 8, 77, 264, 520), (1, 48, 173))
    taken = [run(kernel, where, m, n, k, ways[i % 4]).check() for i, (m, n, k) in enumerate(sizes)]
    if kernel.architectures == {"any"}:
        assert all(taken)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("name", "where"), CASES)
def test_long_and_wide_rows(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    sizes = (512, "layer"), (1024, "rms"), (2048, "layer"), (4096, "rms"), (2304, "block_rms(256)")
    taken = [
        run(kernel, where, 150, n, 192, (norm, {}, granularity, ("norm_weight",), True)).check()
        for n, norm in sizes
        for granularity in (Granularity.NONE, Granularity.ROW)
    ]
    assert any(taken) and (kernel.language == "triton" or all(taken))


@pytest.mark.parametrize(("name", "where"), CASES)
def test_rows_of_zeros_a_common_mean_and_nan(name: str, where: str) -> None:
    """Zeros stay zeros, and what is NaN is all of a row, or of its blocks, and no other."""
    kernel = kernel_here(name, where)
    m, k = 40, 256
    for norm, granularity in itertools.product(("layer", "rms", "block_rms(128)"), OUTPUTS):
        x = drawn(m, k, where=where, seed=2)
        x[1] = 0.0
        x[2] += 64
        x[3] *= 1e9
        x[4] *= 1e-9
        x[5, 7] = math.nan
        found = run(kernel, where, m, 256, k, (norm, {}, granularity, (), False), x)
        if not found.check():
            continue
        values = found.values()
        assert (values[1] == 0).all()
        assert values[[0, 1, 2, 3, 4, 6]].isfinite().all()
        nan = values[5].isnan()
        if kernel.op == "gemm_norm" or norm != "block_rms(128)":
            assert nan.all()
        else:
            assert nan[:128].all() and not nan[128:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda.gemm_norm_bf16", "triton.gemm_norm_bf16"])
def test_unrounded_sums_are_accurate_with_a_common_mean(name: str) -> None:
    """X13: rounded to bfloat16 first, the sums' error is a multiple of what the norm leaves."""
    fused, rounding = kernel_here(name, "cuda"), KERNELS["torch.norm_unfused"]
    recipe = distribution_named("X13")
    x, w = (
        draw(recipe, rows, 512, 0).bfloat16().cuda()
        for draw, rows in ((draw_rows, 1024), (draw_weight, 512))
    )
    epilogue = NormEpilogue(norm_named("layer"))
    errors = {}
    for kernel in (fused, rounding):
        found = Run(kernel, x, w, epilogue)
        exact = ops.normalized(*found.sums, epilogue)[0]
        errors[kernel] = numerics.measure_errors(found.out, exact).row_err
    assert errors[fused] < 0.003 and errors[fused] < errors[rounding] / 5


@pytest.mark.parametrize(("name", "where"), CASES)
def test_blocks_of_any_size_are_correct_or_rejected(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    sizes = ((96, 12), (96, 4), (128, 1), (120, 40), (128, 16), (192, 96), (1024, 512))
    ways = [(f"block_rms({block})", {"activation": "silu"}, Granularity.NONE, (), False)
            for _, block in sizes]  # fmt: skip
    taken = [run(kernel, where, 70, n, 192, way).check()
             for (n, _), way in zip(sizes, ways, strict=True)]  # fmt: skip
    assert any(taken) and (kernel.language != "cuda" or all(taken[3:]))


@pytest.mark.parametrize(("name", "where"), CASES)
def test_views_are_read_and_slices_are_written(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    if kernel.op == "norm_quantize":
        x, w = drawn(33, 3, 128, where=where)[:, 1], None
    else:
        x, w = drawn(33, 192, where=where)[:, :96], drawn(128, 96, where=where, seed=1)
    beside = [drawn(33, 256, where=where, seed=i)[:, 64:192] for i in range(3)]
    for last in ({"residual": 0}, {"gate": 1}, {"x0": 1, "x": 2}, {"residual": 2, "gate": 0}):
        fields = {key: beside[i] for key, i in last.items()}
        epilogue = NormEpilogue(norm_named("layer"), **fields)
        Run(kernel, x, w, epilogue, Granularity.ROW).check()
        whole = torch.full((33, 384), 7.0, dtype=torch.bfloat16, device=where)
        if w is not None:
            Run(kernel, x, w, epilogue, out=whole[:, 128:256]).check()
            assert (whole[:, :128] == 7).all() and (whole[:, 256:] == 7).all()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_scales_of_any_magnitude(name: str, where: str) -> None:
    """Scales whose product is subnormal or overflows, alone or multiplied by the sums."""
    kernel = kernel_here(name, where)
    widths = (256, 1024) if where == "cuda" else (256,)
    for exponents in ((-60, -20), (-30, -15), (25, 25), (50, -50)):
        taken = []
        for (norm, vectors), n in itertools.product({
            "layer": ("bias", "norm_weight", "norm_bias"), "rms": (), "block_rms(64)": ("bias",),
        }.items(), widths):  # fmt: skip
            epilogue = epilogue_of(norm, {}, vectors, True, 72, n, where)
            quantizer = kernel.op == "norm_quantize"
            x, w = (
                drawn(rows, columns, where=where, seed=i) * 2.0**exponent
                for i, (rows, columns, exponent) in enumerate(
                    zip((72, n), (n if quantizer else 256, 256), exponents, strict=True)
                )
            )
            weight = None if quantizer else w
            for granularity in (Granularity.NONE, Granularity.TENSOR, Granularity.ROW):
                taken.append(Run(kernel, x, weight, epilogue, granularity).check())
        assert any(taken)


@pytest.mark.parametrize(("name", "where"), cases("gemm_norm"))
@pytest.mark.parametrize("n", [128, 1024])
def test_biases_that_are_large_against_the_sums_or_infinite(name: str, where: str, n: int) -> None:
    """Dividing such a bias by a scale, one way of adding it, makes its squares overflow."""
    kernel = kernel_here(name, where)
    x, w = (drawn(size, 256, where=where, seed=i) * 2.0**-17 for i, size in enumerate((72, n)))
    for norm in ("layer", "rms", "block_rms(64)"):
        bias = drawn(n, where=where, seed=3, dtype=torch.float32)
        bias[5], bias[n - 3] = 1e12, -3e12
        if not Run(kernel, x, w, NormEpilogue(norm_named(norm), bias)).check():
            continue
        bias[n - 3] = math.inf
        values = Run(kernel, x, w, NormEpilogue(norm_named(norm), bias)).values()
        assert values[:, n - 3].isnan().all()  # infinity by infinity
        finite = torch.arange(n, device=where) != n - 3
        if norm == "layer":  # the mean is infinite
            assert values.isnan().all()
        elif norm == "rms":
            assert (values[:, finite] == 0).all()
        else:
            assert values[:, finite].isfinite().all() and (values[:, : n - 64] != 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda.gemm_norm_tensor_fast", "cuda.gemm_norm_bf16"])
def test_sums_that_overflow_bfloat16_are_added_in_float32(name: str) -> None:
    """Scales far from 1 whose product is not; biases that bfloat16 rounds to infinity."""
    kernel = kernel_here(name, "cuda")
    x = drawn(72, 256, where="cuda") * 2.0**60
    w = drawn(1024, 256, where="cuda", seed=1) * 2.0**-60
    bias = drawn(1024, where="cuda", seed=3, dtype=torch.float32)
    bias[5] = 2e17
    assert Run(kernel, x, w, NormEpilogue(norm_named("layer"), bias)).check()
    bias[5] = 3.4e38
    values = Run(kernel, x, w, NormEpilogue(norm_named("none"), bias)).values()
    assert (values[:, 5] == math.inf).all() and values[:, 6:].isfinite().all()


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("name", "where"), CASES)
def test_nothing_saturates_with_the_static_scale_of_a_norm(name: str, where: str) -> None:
    """Rows with one value that is not 0 come as near to the bound as any."""
    kernel = kernel_here(name, where)
    n = 512
    rows = torch.eye(n, device=where).bfloat16() * 1e4
    weight = rows if kernel.op == "gemm_norm" else None
    for norm in ("block_rms(256)", "rms", "layer"):
        for activation in ("none", "hardswish"):
            epilogue = NormEpilogue(norm_named(norm), activation=activation)
            found = Run(kernel, rows, weight, epilogue, Granularity.TENSOR)
            if found.check():
                exact = ops.normalized(*found.sums, epilogue)[0]
                lost = (found.values().double() - exact).abs() - exact.abs() / 16
                assert float(lost.max()) <= float(found.out.scale) / 64


@pytest.mark.parametrize(("name", "where"), CASES)
def test_results_are_reproducible(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for granularity in OUTPUTS:
        way = ("layer", {"activation": "silu"}, granularity, ("norm_weight",), False)
        found = run(kernel, where, 200, 256, 1024, way)
        if isinstance(found.answer, Rejected):
            continue
        first = found.out.data.clone() if granularity.value != "none" else found.out.clone()
        for _ in range(3):
            found.launch()
            again = found.out.data if granularity.value != "none" else found.out
            assert torch.equal(again.view(torch.uint8), first.view(torch.uint8))
