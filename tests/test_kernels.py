"""Every registered kernel is right: on every distribution, on hostile values, sizes and views.

Parametrized over the registry. Kernels that run anywhere are tested on the CPU, all of them on a
GPU where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lokakern import functional, numerics
from lokakern.bench.distributions import distribution_named, draw_rows, draw_weight
from lokakern.bench.pieces import compare_bytes
from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.operands import operand_of
from lokakern.problems import make_problem
from lokakern.registry import ops
from lokakern.registry.register import KERNELS, Kernel, fp8_format, load_kernels
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
    Rejected,
)

load_kernels()
SEEDS = (0, 3, 7)  # of everything drawn here; the first is torch's own before each test


def cases(*wanted: str) -> list[Any]:
    return list(_cases(*wanted))


def _cases(*wanted: str) -> Iterator[Any]:
    for name, kernel in sorted(KERNELS.items()):
        if kernel.op in wanted:
            if kernel.architectures == {"any"}:
                yield pytest.param(name, "cpu", id=f"{name}-cpu")
            yield pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)


def kernel_here(name: str, where: str) -> Kernel:
    kernel = KERNELS[name]
    if not kernel.runs_on(current_device(where)):
        pytest.skip(f"needs a GPU of {', '.join(sorted(kernel.architectures))}")
    return kernel


def hostile(
    rows: int, columns: int, where: str, form: Format, *, largest: float = 1e36
) -> torch.Tensor:
    """Normal values with a zero row, a row of subnormals, and magnitudes down to 1e-36."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    if rows > 4:
        x[1] = 0.0
        x[2] *= largest
        x[3] *= 1e-36
        x[4] = 1e-41  # a float32 subnormal
    return x.to(form.dtype).to(where)


def poisoned(shape: tuple[int, int], dtype: torch.dtype, where: str) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=where)


def launch_scaled_gemm(
    kernel: Kernel,
    left: QuantizedTensor,
    right: QuantizedTensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> str | None:
    """Launch if the kernel takes the operands; returns its reason if it does not."""
    problem = Problem(
        op="scaled_gemm", m=out.shape[0], n=out.shape[1], k=left.data.shape[1],
        a=replace(operand_of(left.data), granularity=left.granularity),
        b=replace(operand_of(right.data), granularity=right.granularity, layout=Layout.COLUMN),
        epilogue="none" if bias is None else "bias",
        out_format=Format.of(out.dtype), out_strided=not out.is_contiguous(),
    )  # fmt: skip
    answer = kernel.supports(problem, current_device(out.device.type))
    if isinstance(answer, Rejected):
        return answer.reason
    operands = (left.data, left.scale, *right.transpose, out, bias)
    kernel.launch(*operands, kernel.workspace(*operands))
    return None


def assert_product(
    kernel: Kernel, out: torch.Tensor, a: Any, b: Any, bias: torch.Tensor | None = None
) -> None:
    exact = ops.product(a, b, bias)
    error = numerics.kernel_error(
        out, exact, ops.magnitude(a, b, bias), Format.of(out.dtype).unit_roundoff
    )
    bound = kernel.bound_at(make_problem("gemm", (*out.shape[-2:], b.shape[-2])))
    assert error.maximum <= bound, f"{kernel}: kernel_err {error.maximum:.3g} > {bound:g}"


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
@pytest.mark.parametrize("distribution", REALISTIC_DISTRIBUTIONS)
def test_scaled_gemm_on_every_distribution(name: str, where: str, distribution: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    m, n, k = (512, 384, 640) if where == "cuda" else (128, 128, 256)
    recipe = distribution_named(distribution)
    x = draw_rows(recipe, m, k, 7).bfloat16().to(where)
    w = draw_weight(recipe, n, k, 7).bfloat16().to(where)
    left = numerics.quantize(x, fp8, kernel.granularity)
    right = numerics.quantize(w, fp8, kernel.b_granularity)
    out = poisoned((m, n), torch.bfloat16, where)
    assert launch_scaled_gemm(kernel, left, right, out) is None
    assert_product(kernel, out, left, right.t())


SIZES = [(1, 8, 16), (1, 16, 128), (3, 24, 13), (65, 130, 200), (128, 48, 144), (257, 64, 384)]


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_scaled_gemm_on_odd_sizes_and_hostile_values(
    name: str, where: str, with_bias: bool
) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    taken = 0
    for m, n, k in [*SIZES, (512, 256, 256)]:
        # (acc * sa) * sb passes through 448 times the output: stay that far from float32's end.
        x = hostile(m, k, where, Format.FLOAT32, largest=1e30)
        left = numerics.quantize(x, fp8, kernel.granularity)
        right = numerics.quantize(torch.randn(n, k, device=where), fp8, kernel.b_granularity)
        bias = torch.randn(n, device=where).bfloat16() if with_bias else None
        out = poisoned((m, n), torch.bfloat16, where)
        if launch_scaled_gemm(kernel, left, right, out, bias) is None:
            assert_product(kernel, out, left, right.t(), bias)
            taken += 1
    assert taken, f"{name} took none of the sizes"


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_keeps_non_finite_values_to_their_rows(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    x = torch.randn(256, 256, device=where)
    x[3, 5], x[9, 0], x[200, 255] = math.nan, math.inf, -math.inf
    left = numerics.quantize(x, fp8, kernel.granularity)
    right = numerics.quantize(torch.randn(128, 256, device=where), fp8, kernel.b_granularity)
    out = poisoned((256, 128), torch.bfloat16, where)
    assert launch_scaled_gemm(kernel, left, right, out) is None
    bad = (~torch.isfinite(out)).any(dim=1).nonzero().flatten().tolist()
    assert bad == [3, 9, 200]
    assert (~torch.isfinite(out[bad])).all()
    assert_product(kernel, out, left, right.t())


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_writes_a_strided_slice_or_says_why_not(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    left = numerics.quantize(torch.randn(256, 256, device=where), fp8, kernel.granularity)
    right = numerics.quantize(torch.randn(128, 256, device=where), fp8, kernel.b_granularity)
    whole = torch.full((256, 384), 7.0, dtype=torch.bfloat16, device=where)
    reason = launch_scaled_gemm(kernel, left, right, whole[:, 128:256])
    if reason is not None:
        assert "contiguous" in reason
        return
    assert_product(kernel, whole[:, 128:256], left, right.t())
    assert (whole[:, :128] == 7).all() and (whole[:, 256:] == 7).all()


@pytest.mark.parametrize(("name", "where"), cases("gemm"))
@pytest.mark.parametrize("distribution", REALISTIC_DISTRIBUTIONS)
def test_gemm_multiplies_what_it_quantized(name: str, where: str, distribution: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    dtype = torch.float32 if name == "torch.fp32" else torch.bfloat16
    recipe = distribution_named(distribution)
    m, n, k = 256, 128, 256
    x = draw_rows(recipe, m, k, 3).to(dtype).to(where)
    w = draw_weight(recipe, n, k, 3).to(dtype).to(where)
    prepared = None
    if kernel.quantizes:
        left: Any = numerics.quantize(x, fp8, kernel.granularity)
        right = numerics.quantize(w, fp8, kernel.b_granularity)
        prepared = QuantizedTensor(right.data, right.scale, right.granularity, True, w)
        b: Any = right.t()
    else:
        left, b = x, w.t()
    for given in (w.t(), *([prepared] if prepared else [])):
        out = poisoned((m, n), dtype, where)
        functional.run(kernel, x, given, out=out)
        assert_product(kernel, out, left, b)


@pytest.mark.parametrize(("name", "where"), cases("gemm"))
def test_gemm_takes_views_and_odd_sizes_or_says_why_not(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    dtype = torch.float32 if name == "torch.fp32" else torch.bfloat16
    base = torch.randn(300, 700, device=where).to(dtype)
    weights = torch.randn(200, 700, device=where).to(dtype)
    taken = 0
    for m, n, k, offset in [
        (256, 128, 256, 0),
        (1, 16, 128, 8),
        (33, 65, 77, 1),
        (256, 128, 256, 3),
    ]:
        x, w = base[:m, offset : offset + k], weights[:n, offset : offset + k]
        out = poisoned((m, n), dtype, where)
        try:
            functional.run(kernel, x, w.t(), out=out)
        except UnsupportedError as refused:
            assert len(str(refused)) > 20
            continue
        taken += 1
        if kernel.quantizes:
            left: Any = numerics.quantize(x, fp8, kernel.granularity)
            right: Any = numerics.quantize(w, fp8, kernel.b_granularity).t()
        else:
            left, right = x, w.t()
        assert_product(kernel, out, left, right)
    assert taken, f"{name} took none of the operands"
    assert functional.run(kernel, base[:0, :256], weights[:128, :256].t()).shape == (0, 128)


def batched_cases() -> list[Any]:
    return [case for case in cases("gemm") if KERNELS[case.values[0]].batched]


@pytest.mark.parametrize(("name", "where"), batched_cases())
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_gemm_takes_a_batch_in_every_layout(name: str, where: str, with_bias: bool) -> None:
    kernel = kernel_here(name, where)
    dtype = torch.float32 if name == "torch.fp32" else torch.bfloat16
    for batch, m, n, k in [(1, 8, 16, 24), (5, 27, 13, 39), (3, 1, 1, 7), (40, 64, 24, 160)]:
        x = torch.randn(batch, m, k, device=where).to(dtype)
        w = torch.randn(batch, n, k, device=where).to(dtype)
        bias = torch.randn(n, device=where).to(dtype) if with_bias else None
        for a in (x, x.mT.contiguous().mT):
            for b in (w.mT, w.mT.contiguous()):
                out = torch.full((batch, m, n), math.nan, dtype=dtype, device=where)
                kernel.launch(a, b, out, bias, kernel.workspace(a, b))
                exact, size = ops.product(a, b, bias), ops.magnitude(a, b, bias)
                torch.testing.assert_close(exact[-1], ops.product(a[-1], b[-1], bias))
                error = numerics.kernel_error(
                    out.flatten(0, 1), exact.flatten(0, 1), size.flatten(0, 1),
                    Format.of(dtype).unit_roundoff,
                )  # fmt: skip
                # torch rounds the products of a batch before it adds the bias
                assert error.maximum <= (kernel.odd_kernel_err_bound or kernel.kernel_err_bound)


def formats(where: str) -> list[Format]:
    return [f for f in Format if f.is_fp8]


def quantized_wrong(kernel: Kernel, x: torch.Tensor, form: Format, padded: bool) -> str | None:
    """What a quantizer gets wrong, "" if nothing; None where it does not take x.

    What lies between the rows of padded data must stay as it was. A given scale is one that some
    values pass by far, and a delayed one comes with the largest value of a batch before.
    """
    rows, columns = x.shape
    where = x.device.type
    epilogue = "none" if "none" in kernel.epilogues else min(kernel.epilogues)
    problem = Problem(
        op="quantize", m=rows, n=1, k=columns, a=operand_of(x), out_format=form,
        out_granularity=kernel.granularity, epilogue=epilogue,
    )  # fmt: skip
    if isinstance(kernel.supports(problem, current_device(where)), Rejected):
        return None
    exact = numerics.quantize(
        x, form, kernel.granularity, power_of_two_scale=epilogue == "power_of_two"
    )
    pitch = -(-columns // 16) * 16 if padded else columns
    whole = torch.full((rows, pitch), 0xA5, dtype=torch.uint8, device=where)
    data = whole.view(form.dtype)[:, :columns]
    scale = kernel.granularity.empty_scale(rows, columns, x.device).fill_(math.nan)
    amax = None
    if epilogue in ("static", "delayed"):
        assert exact.scale is not None
        scale.copy_(exact.scale * 0.37)
        exact, amax = numerics.quantize_static(x, form, kernel.granularity, scale.clone())
    workspace = kernel.workspace(x, data, scale)
    for before in (0.0, 2.0**127) if epilogue == "delayed" else (0.0,):
        if epilogue == "delayed":
            workspace[0].fill_(before)
        kernel.launch(x, data, scale, workspace)
        wrong = compare_bytes(data, scale, exact.data, exact.scale)
        if wrong:
            return wrong
        if epilogue == "delayed" and float(workspace[0]) != max(float(amax), before):  # type: ignore[arg-type]
            return f"amax is {float(workspace[0])}, not {amax}, and was {before}"
    if not (whole[:, columns:] == 0xA5).all():
        return "wrote between the rows"
    return ""


QUANTIZED_SIZES = [(1, 1), (3, 129), (7, 13), (130, 257), (5, 9000), (3, 40001), (600, 512)]


@pytest.mark.parametrize(("name", "where"), cases("quantize"))
@pytest.mark.parametrize("source", [Format.BFLOAT16, Format.FLOAT32], ids=str)
def test_quantize_gives_the_bytes_of_the_emulation(name: str, where: str, source: Format) -> None:
    """Rows may start anywhere, columns may be contiguous instead, data may have padded rows."""
    kernel = kernel_here(name, where)
    taken = 0
    for form in formats(where):
        for rows, columns in QUANTIZED_SIZES:
            x = hostile(rows, columns, where, source)
            if rows > 100:
                x[5, 7], x[6, 0], x[6, 9] = math.nan, math.inf, -math.inf
            wide = torch.zeros(rows, columns + 40, dtype=x.dtype, device=where)
            wide[:, 3 : 3 + columns] = x
            tall = torch.zeros(columns, rows + 9, dtype=x.dtype, device=where)
            tall[:, 1 : 1 + rows] = x.t()
            views = (wide[:, 3 : 3 + columns], x.t().contiguous().t(), tall[:, 1 : 1 + rows].t())
            for given in (x, *views):
                for padded in (False, True) if kernel.language == "cuda" else (False,):
                    wrong = quantized_wrong(kernel, given, form, padded)
                    taken += wrong is not None
                    assert not wrong, f"{name} {form.value} {[rows, columns]}: {wrong}"
    assert taken


@pytest.mark.parametrize(("name", "where"), cases("quantize"))
def test_quantize_every_bfloat16_value(name: str, where: str) -> None:
    """All 65536 bfloat16 values under one scale, and each under a scale of its own."""
    kernel = kernel_here(name, where)
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(where)
    for x in (values.reshape(512, 128), values.reshape(65536, 1)):
        for form in formats(where):
            wrong = quantized_wrong(kernel, x, form, padded=False)
            assert not wrong, f"{name} {form.value}: {wrong}"


@pytest.mark.parametrize(("name", "where"), cases("dequantize"))
def test_dequantize_rounds_once(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    device = current_device(where)
    taken = 0
    for form in formats(where):
        for out_format in (Format.BFLOAT16, Format.FLOAT32):
            for rows, columns in [(1, 1), (3, 129), (130, 257), (5, 9000)]:
                x = numerics.quantize(
                    hostile(rows, columns, where, Format.FLOAT32), form, kernel.granularity
                )
                problem = Problem(
                    op="dequantize", m=rows, n=1, k=columns, out_format=out_format,
                    a=replace(operand_of(x.data), granularity=x.granularity),
                )  # fmt: skip
                if isinstance(kernel.supports(problem, device), Rejected):
                    continue
                taken += 1
                out = poisoned((rows, columns), out_format.dtype, where)
                kernel.launch(x.data, x.scale, out, kernel.workspace(x.data, x.scale, out))
                expected = numerics.dequantize(x, out_format.dtype)
                assert torch.equal(out.isnan(), expected.isnan())
                kept = ~expected.isnan()
                assert torch.equal(out[kept], expected[kept]), f"{name} {form.value}"
    assert taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        n
        for n, k in sorted(KERNELS.items())
        if (k.language in ("triton", "cuda") and "none" in k.epilogues)
        or n == "torch.scaled_mm_row"
    ],
)
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """Offsets past 2^31 are 64 bits wide: the last rows are right."""
    kernel = kernel_here(name, "cuda")
    fp8 = fp8_format(current_device("cuda"))
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs a GPU with 60 GiB")
    rows, k, n = 2**31 // 256 + 384, 256, 256
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda").normal_()
    last = slice(rows - 256, rows)
    if kernel.op == "quantize" or kernel.op == "dequantize":
        data = torch.empty(rows, k, dtype=fp8.dtype, device="cuda")
        scale = kernel.granularity.empty_scale(rows, k, x.device)
        maker = KERNELS[f"triton.quantize_{kernel.granularity.suffix}"]
        maker = kernel if kernel.op == "quantize" else maker
        maker.launch(x, data, scale, maker.workspace(x, data, scale))
        if kernel.op == "quantize":
            if kernel.granularity is Granularity.TENSOR:
                value = data[last].float() * scale
                assert (value - x[last].float()).abs().max() < 0.3
            else:
                expected = numerics.quantize(x[last], fp8, kernel.granularity)
                rows_of_scale = scale[-expected.scale.shape[0] :]
                assert not compare_bytes(data[last], rows_of_scale, expected.data, expected.scale)
            return
        out = torch.empty_like(x)
        kernel.launch(data, scale, out, kernel.workspace(data, scale, out))
        assert ((out[last].float() - x[last].float()).abs() < 0.3).all()
        return
    w = torch.randn(n, k, device="cuda").bfloat16()
    if kernel.op == "gemm":
        out = functional.run(kernel, x, w.t())
        left = numerics.quantize(x[last], fp8, kernel.granularity)
        right = numerics.quantize(w, fp8, kernel.b_granularity)
        if kernel.granularity is not Granularity.TENSOR:
            assert_product(kernel, out[last], left, right.t())
        return
    left_all = functional.quantize(x, kernel.granularity)
    right = numerics.quantize(w, fp8, kernel.b_granularity)
    out = torch.full((rows, n), math.nan, dtype=torch.bfloat16, device="cuda")
    assert launch_scaled_gemm(kernel, left_all, right, out) is None
    assert left_all.scale is not None
    scale = left_all.scale if kernel.granularity is Granularity.TENSOR else left_all.scale[last]
    assert_product(
        kernel,
        out[last],
        QuantizedTensor.packed(left_all.data[last], scale, kernel.granularity),
        right.t(),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [n for n, k in sorted(KERNELS.items()) if k.op == "scaled_gemm" and "_fast" not in n]
)
def test_promoted_sums_do_not_drift(name: str) -> None:
    """Sums of one sign lose 2^-13 of themselves at every step unless they are promoted.

    The fast twins show that this test can see it: they must drift at least four times as far.
    """
    kernel = kernel_here(name, "cuda")
    fp8 = fp8_format(current_device("cuda"))
    torch.manual_seed(0)
    x, w = (torch.rand(256, 4096, device="cuda") + 0.5 for _ in range(2))
    left = numerics.quantize(x, fp8, kernel.granularity)
    right = numerics.quantize(w, fp8, kernel.b_granularity)
    exact = ops.product(left, right.t())

    def shift(of: Kernel) -> float:
        out = poisoned((256, 256), torch.bfloat16, "cuda")
        assert launch_scaled_gemm(of, left, right, out) is None
        return numerics.measure_errors(out, exact).mean_shift

    found = shift(kernel)
    assert found < 1e-3, f"{name}: outputs shifted by {found:.2e}"
    if f"{name}_fast" in KERNELS:
        assert shift(KERNELS[f"{name}_fast"]) > 4 * found
