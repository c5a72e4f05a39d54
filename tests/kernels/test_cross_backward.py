"""Kernels that quantize the gradient behind a cross: every size, format, view, and NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.gradients import empty_gradients
from lokakern.problems import make_problem
from lokakern.registry.norm_gradients import norm_gradients
from lokakern.registry.register import KERNELS, Kernel
from lokakern.sums import column_sums
from lokakern.types import Format, Granularity, NormEpilogue, Operand, QuantizedTensor, Rejected
from lokakern.workloads.distributions import distribution_named, draw_rows
from tests.support.kernel_cases import BEHIND_CROSSES, cases, drawn, kernel_here
from tests.support.norm_backward_runs import Run, Variant, problem_of

SEEDS = (0,)  # of everything drawn here
CASES = [case for case in cases("norm_backward") if case.values[0] in BEHIND_CROSSES]


def variant(
    out: Format = Format.E4M3FN, *, sums: bool = True, granularity: Granularity = Granularity.GROUP,
    last: str = "cross",
) -> Variant:  # fmt: skip
    vectors = ("bias",) if sums else ()
    return Variant("none", last, vectors, True, out, False, granularity)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_every_size_and_format(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    forms = itertools.cycle((Format.E4M3FN, Format.E5M2))
    for m, k in itertools.product((1, 3, 127, 128, 130, 300), (8, 72, 128, 136, 520, 1000)):
        for sums in (True, False):
            assert Run(kernel, variant(next(forms), sums=sums), m, k, where).check()
            alone = Run(kernel, variant(next(forms), sums=sums, last="none"), m, k, where)
            assert alone.check() or kernel.language == "torch"  # which has another kernel for it


@pytest.mark.parametrize(("name", "where"), CASES)
def test_more_tiles_than_a_gpu_has_places(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    sizes = ((64 * 128 + 130, 264),) if where == "cpu" else ((8192, 3456), (65 * 128 + 3, 5000))
    for m, k in sizes:
        assert Run(kernel, variant(), m, k, where).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_float16(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for m, k in ((130, 264), (4, 8)):
        assert Run(kernel, variant(), m, k, where, half=Format.FLOAT16).check()


@pytest.mark.parametrize(("name", "where"), CASES)
def test_what_is_not_taken(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for other in (Variant(), Variant("none", "relu"), Variant("layer", "none", ())):
        assert not Run(kernel, other, 8, 16, where).check()
    by_rows = Run(kernel, variant(granularity=Granularity.ROW), 140, 256, where).check()
    assert by_rows == (kernel.language == "torch")


@pytest.mark.parametrize(("name", "where"), CASES)
def test_every_distribution(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for distribution in ("X1", "X5", "X12", "X13"):
        rows = draw_rows(distribution_named(distribution), 130, 264, seed=0)
        dd = rows.bfloat16().to(where)
        assert Run(kernel, variant(), 130, 264, where, dd=dd).check(), distribution


@pytest.mark.parametrize(("name", "where"), CASES)
def test_zeros_subnormals_and_what_is_not_finite(name: str, where: str) -> None:
    """Zero groups have a scale of 1; what is not finite is NaN, and no part of a scale."""
    kernel = kernel_here(name, where)
    m, k = 140, 264
    dd, x0 = drawn(m, k, where=where, seed=1), drawn(m, k, where=where, seed=2)
    dd[3] = 0.0
    dd[5] *= 1e-36
    dd[:, 130:132] = 0.0
    assert Run(kernel, variant(), m, k, where, dd=dd, y=x0).check()
    clean = Run(kernel, variant(), m, k, where, dd=dd, y=x0).outputs
    assert clean.quantized is not None and clean.quantized_t is not None
    assert clean.quantized.scale is not None and clean.quantized_t.scale is not None
    assert (clean.quantized.scale[3] == 1.0).all()
    assert (clean.quantized_t.scale[130:132] == 1.0).all()
    for place, value in (((7, 11), math.nan), ((130, 200), math.inf), ((0, 263), -math.inf)):
        hurt = dd.clone()
        hurt[place] = value
        hurt_dy = hurt.float() * x0.float()
        made = Run(kernel, variant(), m, k, where, dd=hurt, y=x0).outputs
        assert made.quantized is not None and made.quantized_t is not None
        for q, expected in ((made.quantized, hurt_dy), (made.quantized_t, hurt_dy.t())):
            nan = numerics.dequantize(q, torch.float32).isnan()
            assert torch.equal(nan, ~expected.isfinite())
        assert made.sums is not None
        assert torch.equal(made.sums[0].isfinite(), hurt_dy.isfinite().all(dim=0))


@pytest.mark.parametrize(("name", "where"), CASES)
def test_strided_operands_and_equal_bits_again(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    m, k = 200, 136
    wide, other = drawn(m, 2 * k, where=where, seed=3), drawn(m, 3 * k, where=where, seed=4)
    dd, x0 = wide[:, k:], other[:, k : 2 * k]
    first = Run(kernel, variant(), m, k, where, dd=dd, y=x0)
    assert first.check()
    again = Run(kernel, variant(), m, k, where, dd=dd.contiguous(), y=x0.contiguous())
    for one, two in ((first.outputs.quantized, again.outputs.quantized),
                     (first.outputs.quantized_t, again.outputs.quantized_t)):  # fmt: skip
        assert one is not None and two is not None
        assert torch.equal(one.data.view(torch.uint8), two.data.view(torch.uint8))
        assert torch.equal(one.scale, two.scale)  # type: ignore[arg-type]
    assert torch.equal(first.outputs.sums, again.outputs.sums)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_sums_are_in_the_order_of_all_sums(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    run = Run(kernel, variant(), 1000, 72, where)
    assert run.outputs.sums is not None
    assert torch.equal(run.outputs.sums[0], column_sums(run.dd.float() * run.y.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_factor", [True, False])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_terms_of_the_gradient_are_added_in_float32(
    terms: int, has_factor: bool, dtype: torch.dtype
) -> None:
    """As the emulation does with the exact sum; a sum in bfloat16 would differ by 2^-9."""
    kernel = kernel_here("cuda.cross_backward", "cuda")
    launch: Callable[..., None] = _module_of(kernel).launch
    for m, k in ((1, 8), (130, 264), (1000, 1032), (8192, 1152)):
        given = [drawn(m, k, where="cuda", seed=i, dtype=dtype) for i in range(terms)]
        x0 = drawn(m, k, where="cuda", seed=9, dtype=dtype)
        for sums_in in (torch.float32, torch.bfloat16, None):
            out = _outputs(m, k, Format.E4M3FN)
            sums = (
                None if sums_in is None else torch.full((k,), math.nan, device="cuda").to(sums_in)
            )
            launch(given, x0 if has_factor else None, out[0], out[1], sums)
            total = given[0].float()
            for more in given[1:]:
                total = total + more.float()
            exact = total * x0.float() if has_factor else total
            for made, value in ((out[0], exact), (out[1], exact.t())):
                wanted = numerics.quantize(value, Format.E4M3FN, Granularity.GROUP)
                assert torch.equal(made.scale, wanted.scale)  # type: ignore[arg-type]
                _assert_one_step_at_most(made.data, wanted.data)
            if sums is not None:
                assert torch.equal(sums, column_sums(exact).to(sums.dtype))


def _module_of(kernel: Kernel) -> object:
    import sys

    return sys.modules[kernel.launch.__module__]


def _outputs(m: int, k: int, form: Format) -> tuple[QuantizedTensor, QuantizedTensor]:
    problem = make_problem(
        "norm_backward", (m, k), epilogue="cross", out_format=form,
        out_granularity=Granularity.GROUP,
    )  # fmt: skip
    made = empty_gradients(problem, NormEpilogue(), torch.device("cuda"))
    assert made.quantized is not None and made.quantized_t is not None
    for q in (made.quantized, made.quantized_t):
        q.data.view(torch.uint8).fill_(form.nan_byte)
        assert q.scale is not None
        q.scale.fill_(math.nan)
    return made.quantized, made.quantized_t


def _assert_one_step_at_most(found: Tensor, wanted: Tensor) -> None:
    """A product with a reciprocal rounds a few quotients to the neighbor of the exact ones."""
    steps = (found.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) < 1e-3


def test_the_reference_of_a_cross_is_a_product() -> None:
    dd, x0 = drawn(5, 16, where="cpu", seed=1), drawn(5, 16, where="cpu", seed=2)
    bias = torch.zeros(16)
    found = norm_gradients(dd, x0, NormEpilogue(bias=bias, x0=x0))
    exact = dd.double() * x0.double()
    assert torch.equal(found.dy, exact)
    assert torch.equal(found.sums, exact.sum(0, keepdim=True))


def test_a_problem_of_a_cross_is_known() -> None:
    """Its bytes are those of two operands and of dy in FP8 both ways, with scales and sums."""
    asked = problem_of(variant(), NormEpilogue(bias=torch.zeros(256), x0=torch.zeros(128, 256)),
                       128, 256)  # fmt: skip
    assert asked.epilogue == "bias+cross"
    assert asked.bytes_moved == 128 * 256 * 6 + 4 * (128 * 2 + 256) + 256 * 4
    assert not isinstance(KERNELS["torch.cross_backward"].supports(asked, _cpu()), Rejected)
    unaligned = make_problem(
        "norm_backward", (128, 256), a=Operand(Format.BFLOAT16, alignment=2), epilogue="cross",
        out_format=Format.E4M3FN, out_granularity=Granularity.GROUP,
    )  # fmt: skip
    refused = KERNELS["cuda.cross_backward"].supports_problem(unaligned, _cpu())
    assert isinstance(refused, Rejected) and "16 bytes" in refused.reason


def _cpu() -> object:
    from lokakern.device import current_device

    return current_device("cpu")
