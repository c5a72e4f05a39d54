"""Kernels of norm_backward are correct: every norm, activation and output, odd sizes, NaN.

Their reference is tested against autograd in float64. Parametrized over the registry, like
tests/kernels/test_norm_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.errors import FormatError, ShapeError, UnknownNameError
from lokakern.functional.norm_backward import norm_backward
from lokakern.gradients import slope
from lokakern.kernels.torch.norm import normalized
from lokakern.norm import norm_named
from lokakern.registry.norm_gradients import CURVATURES, JUMPS, norm_gradients
from lokakern.sums import column_sums
from lokakern.types import (
    Format,
    Granularity,
    NormEpilogue,
)
from tests.support.kernel_cases import BEHIND_CROSSES, cases, drawn, kernel_here
from tests.support.norm_backward_runs import (
    LASTS,
    VARIANTS,
    Run,
    Variant,
)

SEEDS = (0,)  # of everything drawn here


CASES = [case for case in cases("norm_backward") if case.values[0] not in BEHIND_CROSSES]


# --- the reference


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("norm", ["layer", "rms", "block_rms(3)", "block_rms(8)", "none"])
def test_the_reference_equals_autograd_of_the_norm(norm: str, last: str) -> None:
    """The forward pass is that of `registry.ops.normalized`, in float64."""
    generator = torch.Generator().manual_seed(0)
    y, dd = torch.randn((2, 13, 24), generator=generator, dtype=torch.float64)
    y = y.mul(2).add(1).bfloat16().double()
    y[3] = 0.0
    vectors = torch.randn((3, 24), generator=generator, dtype=torch.float64)
    for chosen in itertools.product((True, False), repeat=3):
        bias, weight, shift = (
            x if there else None for x, there in zip(vectors, chosen, strict=True)
        )
        epilogue = NormEpilogue(norm_named(norm), bias, weight, shift, last)
        leaves = [y.clone().requires_grad_(), *(
            x.clone().requires_grad_() for x in (weight, shift) if x is not None
        )]  # fmt: skip
        rest = iter(leaves[1:])
        forward = NormEpilogue(
            norm_named(norm), None, None if weight is None else next(rest),
            None if shift is None else next(rest), last,
        )  # fmt: skip
        expected = torch.autograd.grad(normalized(leaves[0], forward), leaves, dd)
        found = norm_gradients(dd, y, epilogue)
        torch.testing.assert_close(found.dy, expected[0], rtol=1e-12, atol=1e-12)
        sums = [*([expected[0].sum(dim=0)] if bias is not None else []), *expected[1:]]
        assert len(found.sums) == len(sums)
        for one, other in zip(found.sums, sums, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        assert found.size.isfinite().all() and (found.size >= 0).all()


# --- kernels


@pytest.mark.parametrize("activation", sorted(CURVATURES))
def test_the_reference_has_jumps_and_curvatures_of_activations(activation: str) -> None:
    step = 2.0**-10
    z = torch.arange(-8.0, 8.0, step, dtype=torch.float64) + step / 2  # no jump is a point of it
    slopes = slope(z, activation)
    steps = slopes.diff()
    jumped = steps.abs() > 0.1
    found = [
        (float(x), abs(float(y)))
        for x, y in zip((z + step / 2)[:-1][jumped], steps[jumped], strict=True)
    ]
    assert found == [
        (place, pytest.approx(jump, abs=2 * step)) for place, jump in JUMPS.get(activation, ())
    ]
    curvature = float((steps[~jumped].abs() / step).max())
    assert CURVATURES[activation] == pytest.approx(curvature, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_every_norm_activation_and_output(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for m, k in ((140, 512), (72, 256)):
        assert all([Run(kernel, variant, m, k, where).check() for variant in VARIANTS])


@pytest.mark.parametrize(("name", "where"), CASES)
def test_sizes_that_are_not_multiples_of_tiles(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    sizes = itertools.product((1, 3, 129, 300), (1, 8, 72, 77, 264, 520, 1000))
    norms = itertools.cycle(("layer", "rms", "none"))
    for (m, k), norm, last in zip(sizes, norms, itertools.cycle(LASTS), strict=False):
        taken = Run(kernel, Variant(norm, last), m, k, where).check()
        assert taken or k % 8
    for m, k, span in ((5, 24, 8), (130, 200, 8), (3, 768, 256)):
        assert Run(kernel, Variant(f"block_rms({span})", "silu"), m, k, where).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_long_rows(name: str, where: str) -> None:
    """Clusters of 8, two teams, and several tiles for each team."""
    kernel = kernel_here(name, where)
    for k in (1024, 1032, 1536, 2048, 2056, 4096, 8192):
        for norm in ("layer", "rms"):
            assert Run(kernel, Variant(norm, "hardswish"), 150, k, where).check()
    assert Run(kernel, Variant("block_rms(256)"), 150, 8192, where).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_many_rows(name: str, where: str) -> None:
    """More tiles than `lokakern.sums` has lines."""
    kernel = kernel_here(name, where)
    assert Run(kernel, Variant("layer", "relu"), 64 * 128 + 130, 64, where).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_rowwise_scales_where_supported(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    variant = Variant(granularity=Granularity.ROW)
    taken = Run(kernel, variant, 140, 256, where).check()
    assert taken or kernel.language != "torch"


@pytest.mark.parametrize(("name", "where"), CASES)
def test_zeros_a_common_mean_and_nan(name: str, where: str) -> None:
    """A NaN makes its row, or its block, and every sum of columns NaN, and nothing else."""
    kernel = kernel_here(name, where)
    m, k = 140, 256
    for norm, last in itertools.product(("layer", "rms", "block_rms(64)"), LASTS):
        y, dd = (drawn(m, k, where=where, seed=seed) for seed in (2, 1))
        y[1] = 0.0
        dd[2] = 0.0
        y[3] += 64
        y[4] *= 1e9
        y[5] *= 1e-9
        dd[6] *= 1e-9
        assert Run(kernel, Variant(norm, last), m, k, where, dd, y).check()
        y[7, 9] = math.nan
        found = Run(kernel, Variant(norm, last, ()), m, k, where, dd, y)
        assert found.check()
        assert found.outputs.dy is not None and found.outputs.quantized is not None
        assert found.outputs.quantized_t is not None
        across = 64 if norm == "block_rms(64)" else k
        for values in (
            found.outputs.dy, found.outputs.quantized.data.float(),
            found.outputs.quantized_t.data.t().float(),
        ):  # fmt: skip
            assert values[7, :across].isnan().all() and values[7, across:].isfinite().all()
            assert values[:7].isfinite().all() and values[8:].isfinite().all()
            assert (values[2] == 0).all()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_infinite_gradients_do_not_affect_scales(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    dd = drawn(140, 256, where=where, seed=1)
    dd[3, 5], dd[130, 200] = math.inf, -math.inf
    variant = Variant("none", vectors=(), out=Format.E4M3FN, plain=False)
    found = Run(kernel, variant, 140, 256, where, dd)
    assert found.check()
    assert found.outputs.quantized is not None and found.outputs.quantized.scale is not None
    nan = found.outputs.quantized.data.float().isnan()
    assert int(nan.sum()) == 2 and bool(nan[3, 5]) and bool(nan[130, 200])


@pytest.mark.parametrize(("name", "where"), CASES)
def test_views_are_read(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    y, dd = (drawn(130, 3, 128, where=where, seed=seed)[:, 1] for seed in (1, 2))
    for last in LASTS:
        assert Run(kernel, Variant("layer", last), 130, 128, where, dd, y).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_repeated_rows_and_launches_are_bitwise_equal(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for norm, k in (("layer", 512), ("rms", 2048), ("layer", 4096)):
        y, dd = (drawn(128, k, where=where, seed=seed).repeat(3, 1) for seed in (1, 2))
        found = Run(kernel, Variant(norm, "silu"), 384, k, where, dd, y)
        out = found.outputs
        assert out.dy is not None and out.quantized is not None and out.sums is not None
        assert torch.equal(out.dy[:128], out.dy[256:])
        data = out.quantized.data.view(torch.uint8)
        assert torch.equal(data[:128], data[128:256])
        before = [out.dy.clone(), data.clone(), out.sums.clone()]
        for _ in range(3):
            found.launch()
            for one, other in zip(before, (out.dy, data, out.sums), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_bias_has_the_sums_of_float32_gradients_in_their_order(name: str, where: str) -> None:
    """Without a norm, only the sums are rounded."""
    kernel = kernel_here(name, where)
    for last in ("none", "relu"):
        found = Run(kernel, Variant("none", last, ("bias",)), 16700, 24, where)
        exact = norm_gradients(found.dd, found.y, found.epilogue).dy.float()
        assert found.outputs.sums is not None
        assert torch.equal(found.outputs.sums[0], column_sums(exact))


# --- the public function


def autograd_of(
    dd: Tensor, y: Tensor, norm: str, last: str, weight: Tensor, shift: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (y, weight, shift)]
    forward = NormEpilogue(norm_named(norm), None, leaves[1], leaves[2], last)
    return torch.autograd.grad(normalized(leaves[0], forward), leaves, dd.double())


@pytest.mark.parametrize("out_format", [None, "e4m3fn", "bfloat16"])
def test_the_public_function_equals_autograd(out_format: str | None) -> None:
    y, dd = (drawn(70, 200, where="cpu", seed=seed) for seed in (1, 2))
    bias, weight, shift = (drawn(200, where="cpu", seed=seed) for seed in (3, 4, 5))
    for norm, last in (("layer", "hardswish"), ("rms", "none"), ("block_rms(8)", "silu")):
        made = norm_backward(
            dd, y, norm=norm, bias=bias, norm_weight=weight, norm_bias=shift,
            activation=None if last == "none" else last, out_format=out_format,
        )  # fmt: skip
        exact = autograd_of(dd, y, norm, last, weight, shift)
        assert made.dy is not None and made.dy.dtype is torch.bfloat16
        torch.testing.assert_close(made.dy.double(), exact[0], rtol=0.01, atol=1e-4)
        if out_format == "bfloat16":
            assert made.quantized is None and made.quantized_t is None
        else:
            assert made.quantized is not None and made.quantized_t is not None
            assert made.quantized.format.value == (out_format or "e5m2")
            share = 0.04 if out_format else 0.07
            for quantized, wanted in ((made.quantized, exact[0]), (made.quantized_t, exact[0].t())):
                error = (numerics.dequantize(quantized, torch.float64) - wanted).norm()
                assert float(error / wanted.norm()) < share
        for found, wanted in (
            (made.norm_weight, exact[1]), (made.norm_bias, exact[2]), (made.bias, exact[0].sum(0)),
        ):  # fmt: skip
            assert found is not None
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


def test_unrequested_gradients_are_not_computed() -> None:
    y, dd = (drawn(20, 64, where="cpu", seed=seed) for seed in (1, 2))
    made = norm_backward(dd, y, norm="rms", plain=False)
    assert (made.dy, made.norm_weight, made.norm_bias, made.bias) == (None, None, None, None)
    assert made.quantized is not None
    made = norm_backward(dd, y, norm="rms", norm_bias=y[0], granularity="row")
    assert made.norm_bias is not None and made.norm_weight is None and made.dy is not None
    assert made.quantized_t is not None and made.quantized_t.granularity is Granularity.ROW


def test_any_strides_and_empty_inputs() -> None:
    y, dd = (drawn(64, 20, where="cpu", seed=seed) for seed in (1, 2))
    found = norm_backward(dd.t(), y.t(), norm="layer", bias=y[:, 0].contiguous(), activation="silu")
    same = norm_backward(
        dd.t().contiguous(), y.t(), norm="layer", bias=y[:, 0].contiguous(), activation="silu"
    )
    assert found.dy is not None and same.dy is not None and torch.equal(found.dy, same.dy)
    none = norm_backward(dd[:0], y[:0], norm="layer", bias=y[0])
    assert none.dy is not None and none.dy.shape == (0, 20)
    assert none.bias is not None and (none.bias == 0).all()


def test_invalid_arguments_raise() -> None:
    y, dd = (drawn(20, 64, where="cpu", seed=seed) for seed in (1, 2))
    for error, changed in (
        (ShapeError, {"dd": dd[:, :32]}),
        (ShapeError, {"norm": "block_rms(48)"}),
        (ShapeError, {"norm_weight": y[0, :32]}),
        (ShapeError, {"y": y[0]}),
        (FormatError, {"y": y.float()}),
        (FormatError, {"norm_weight": y[0].half()}),
        (FormatError, {"out_format": "float32"}),
        (FormatError, {"granularity": "tensor"}),
        (UnknownNameError, {"norm": "batch"}),
        (UnknownNameError, {"activation": "elu"}),
    ):
        given: dict[str, Any] = {"dd": dd, "y": y, "norm": "layer", **changed}
        with pytest.raises(error, match="norm_backward: "):
            norm_backward(given.pop("dd"), given.pop("y"), **given)
