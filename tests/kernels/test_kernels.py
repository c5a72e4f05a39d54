"""Every registered kernel is correct on all distributions, hostile values, sizes and views.

Parametrized over the registry. Kernels that run anywhere are tested on the CPU, all of them on a
GPU where there is one.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.device import current_device
from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import UnsupportedError
from lokakern.functional.checks import gemm_problem, operand_of
from lokakern.functional.quantize import quantize
from lokakern.functional.run import run
from lokakern.measure.tiled_compare import compare_bytes, compare_sums
from lokakern.problems import make_problem
from lokakern.quantized_tensor import pitch_of
from lokakern.registry import ops
from lokakern.registry.register import (
    KERNELS,
    PROMOTED_KERNEL_ERR_BOUND,
    Kernel,
    fp8_format,
)
from lokakern.sums import error_bound
from lokakern.types import (
    ACCEPTED,
    PLAIN,
    REALISTIC_DISTRIBUTIONS,
    Device,
    Epilogue,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
    Rejected,
)
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight
from tests.support.kernel_cases import LONG_ROWS, LONG_SUMS, cases, columns_for, kernel_here

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
SEEDS = (0, 3, 7)  # of everything drawn here; the first is torch's own before each test


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
    epilogue: Epilogue = PLAIN,
) -> str | None:
    """Launch if the kernel takes the operands; returns its reason if it does not."""
    form = Format.of(out.dtype)
    pitch = pitch_of(out.shape[1]) if form.is_fp8 else out.shape[1]
    problem = Problem(
        op="scaled_gemm", m=-(-out.shape[0] // epilogue.groups), n=out.shape[1],
        k=left.data.shape[1], batch=epilogue.groups,
        a=replace(operand_of(left.data), granularity=left.granularity),
        b=replace(operand_of(right.data), granularity=right.granularity, layout=Layout.COLUMN),
        epilogue=epilogue.name(bias is not None), out_format=form,
        out_granularity=Granularity.TENSOR if form.is_fp8 else Granularity.NONE,
        out_strided=out.shape[0] > 1 and out.stride(0) != pitch, accumulate=epilogue.accumulate,
    )  # fmt: skip
    answer = kernel.supports(problem, current_device(out.device.type))
    if isinstance(answer, Rejected):
        return answer.reason
    operands = (left.data, left.scale, *right.transpose, out, bias)
    extra = () if epilogue is PLAIN else (epilogue,)
    kernel.launch(*operands, kernel.workspace(*operands, *extra), *extra)
    return None


def padded(
    rows: int, columns: int, dtype: torch.dtype, where: str, filling: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data with padded rows, and all its bytes, padding included, each the filling."""
    whole = torch.full((rows, pitch_of(columns)), filling, dtype=torch.uint8, device=where)
    return whole.view(dtype)[:, :columns], whole


def in_nan(q: QuantizedTensor) -> QuantizedTensor:
    """A copy with NaN between its rows, which no kernel may read."""
    data, _ = padded(*q.data.shape, q.data.dtype, q.device.type, q.format.nan_byte)
    data.view(torch.uint8).copy_(q.data.view(torch.uint8))
    return QuantizedTensor(data, q.scale, q.granularity, q.transposed)


def operands_for(
    kernel: Kernel, where: str, m: int, n: int, k: int, forms: tuple[Format, Format] | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Left operand, and the right one as a weight; products are where activations differ."""
    fp8 = fp8_format(current_device(where))
    a_form, b_form = forms or (fp8, fp8)
    x, w = torch.randn(m, k, device=where), torch.randn(n, k, device=where)
    x *= 3 / math.sqrt(k)
    left = numerics.quantize(x, a_form, kernel.granularity)
    return in_nan(left), in_nan(numerics.quantize(w, b_form, kernel.b_granularity))


def assert_finished(
    kernel: Kernel,
    out: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    before: torch.Tensor | None = None,
) -> None:
    """The kernel's bound is of its sums: the output is rounded once, whatever the kernel."""
    exact, size = ops.finished(*sums, bias, epilogue, before)
    roundoff = Format.of(out.dtype).unit_roundoff
    error = numerics.kernel_error(
        out, exact, kernel.kernel_err_bound * size, roundoff, epilogue.out_scale
    )
    # What is rounded is as far from exact as sums may be: that much more of it.
    assert error.maximum <= 1 + roundoff, f"{kernel}: {error.maximum:.3g} times what is allowed"


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
    n = columns_for(kernel, n)
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


TAILS = [
    (1, 8, 13), (33, 24, 39), (130, 33, 312), (200, 130, 648), (64, 96, 720), (129, 257, 144),
    (1000, 1, 256), (300, 8, 64), (256, 256, 512),
]  # fmt: skip


def reasons_of(kernel: Kernel, where: str, *, none_ok: bool, reasons: list[str | None]) -> None:
    """A kernel must take something, unless it says of all why not."""
    taken = [reason for reason in reasons if reason is None]
    assert taken or (none_ok and all(reasons)), f"{kernel} on {where} took none"


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "FP8"])
def test_scaled_gemm_computes_every_declared_epilogue(name: str, where: str, small: bool) -> None:
    """Sizes have tails of m, n and k; NaN between rows and bytes of others have no effect."""
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    reasons = []
    for (m, n, k), what in itertools.product(TAILS, sorted(kernel.epilogues)):
        left, right = operands_for(kernel, where, m, n, k)
        bias = torch.randn(n, device=where).bfloat16() if what.startswith("bias") else None
        last = what.removeprefix("bias").removeprefix("+") or "none"
        wide = torch.randn(m, 2 * n + 1, device=where).bfloat16()  # rows that are not aligned
        epilogue = Epilogue(last)
        if last == "cross":
            epilogue = Epilogue(x0=wide[:, :n], x=wide[:, n + 1 :])
        whole = None
        if small:
            scale = torch.full((1, 1), 0.02, device=where)  # the largest of some saturate
            epilogue = epilogue._replace(out_scale=scale)
            out, whole = padded(m, n, fp8.dtype, where, 0xA5)
        else:
            out = poisoned((m, n), torch.bfloat16, where)
        epilogue = PLAIN if last == "none" and not small else epilogue
        reasons.append(launch_scaled_gemm(kernel, left, right, out, bias, epilogue))
        if reasons[-1] is None:
            sums = ops.scaled_sums(left, right.t())
            assert_finished(kernel, out, sums, bias, epilogue)
            assert whole is None or (whole[:, n:] == 0xA5).all(), "wrote between the rows"
    reasons_of(kernel, where, none_ok=small, reasons=reasons)


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("what", ["1.05 times", "silu for hardswish"])
def test_the_bound_of_tensor_cores_finds_slightly_incorrect_sums(what: str, small: bool) -> None:
    right = KERNELS["torch.emulated_row"]

    def launch(*given: Any) -> None:
        *operands, out, bias, workspace, epilogue = given
        if what == "silu for hardswish":
            epilogue = epilogue._replace(activation="silu")
        wide = torch.empty(out.shape)
        right.launch(*operands, wide, bias, workspace, epilogue._replace(out_scale=None))
        wide *= 1.05 if what == "1.05 times" else 1.0
        if small:
            numerics.cast(wide / epilogue.out_scale, out)
        else:
            out.copy_(wide)

    wrong = replace(right, launch=launch, kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND)
    scale = torch.full((1, 1), 0.02) if small else None
    dtype = Format.E4M3FN.dtype if small else torch.bfloat16
    for m, n, k in TAILS[1:]:  # the first has 8 outputs only
        left, right_operand = operands_for(wrong, "cpu", m, n, k)
        epilogue = Epilogue("hardswish", out_scale=scale)
        out, _ = padded(m, n, dtype, "cpu", 0) if small else (torch.empty(m, n).to(dtype), None)
        sums = ops.scaled_sums(left, right_operand.t())
        assert launch_scaled_gemm(wrong, left, right_operand, out, None, epilogue) is None
        with pytest.raises(AssertionError, match="times what is allowed"):
            assert_finished(wrong, out, sums, None, epilogue)


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_keeps_nan_through_every_epilogue(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    n = columns_for(kernel, 128)
    for what in kernel.epilogues & {*ACTIVATIONS, "cross"}:
        left, right = operands_for(kernel, where, 128, n, 256)
        left.data.view(torch.uint8)[5, 200] = left.format.nan_byte
        x = torch.randn(128, n, device=where).bfloat16()
        epilogue = Epilogue(x0=x, x=x) if what == "cross" else Epilogue(what)
        out = torch.zeros(128, n, dtype=torch.bfloat16, device=where)
        epilogue = PLAIN if what == "none" else epilogue
        assert launch_scaled_gemm(kernel, left, right, out, None, epilogue) is None
        assert out[5].isnan().all() and out.isnan().sum() == n, what


@pytest.mark.parametrize(("name", "where"), [
    case for case in cases("scaled_gemm") if KERNELS[case.values[0]].accumulates
])  # fmt: skip
def test_scaled_gemm_adds_to_its_output(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for (m, n, k), with_bias in itertools.product([*TAILS, (192, 128, 20000)], (False, True)):
        left, right = operands_for(kernel, where, m, n, k)
        bias = torch.randn(n, device=where) if with_bias else None
        whole = torch.randn(m, n + 5, device=where)
        before = whole.clone()
        for out, held in ((whole[:, 3 : 3 + n], before[:, 3 : 3 + n]),):
            epilogue = Epilogue(accumulate=True)
            reason = launch_scaled_gemm(kernel, left, right, out, bias, epilogue)
            assert reason is None, reason
            sums = ops.scaled_sums(left, right.t())
            assert_finished(kernel, out, sums, bias, epilogue, held)
        assert torch.equal(whole[:, :3], before[:, :3])
        assert torch.equal(whole[:, 3 + n :], before[:, 3 + n :])


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_multiplies_e5m2_by_e4m3(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    four = fp8_format(current_device(where))
    five = Format.E5M2FNUZ if four is Format.E4M3FNUZ else Format.E5M2
    n = columns_for(kernel, 128)
    for forms in ((five, four), (four, five)):
        left, right = operands_for(kernel, where, 128, n, 384, forms)
        out = poisoned((128, n), torch.bfloat16, where)
        reason = launch_scaled_gemm(kernel, left, right, out)
        assert reason is None or "E4M3 only" in reason
        if reason is None:
            assert_product(kernel, out, left, right.t())


def grouped_cases() -> list[Any]:
    return [case for case in cases("scaled_gemm") if KERNELS[case.values[0]].batched]


@pytest.mark.parametrize(("name", "where"), grouped_cases())
def test_scaled_gemm_supports_groups(name: str, where: str) -> None:
    """Groups of equal and of different sizes, with empty groups and rows outside all groups."""
    kernel = kernel_here(name, where)
    reasons = []
    for groups, m, width, k in [
        (3, 40, 24, 39),
        (5, 27, 128, 200),
        (2, 130, 256, 384),
        (40, 7, 16, 64),
    ]:
        n = columns_for(kernel, width)
        total = groups * m
        left, right = operands_for(kernel, where, total, groups * n, k)
        ends = [*sorted(torch.randint(1, total, (groups - 1,)).tolist()), total - 1]
        offsets = torch.tensor([1, *ends], dtype=torch.int32, device=where)
        if groups > 3:
            offsets[2] = offsets[1]  # an empty group
        bias = torch.randn(n, device=where).bfloat16()
        for epilogue in (Epilogue(groups=groups), Epilogue(groups=groups, offsets=offsets)):
            out = torch.full((total, n), 7.0, dtype=torch.bfloat16, device=where)
            reason = launch_scaled_gemm(kernel, left, right, out, bias, epilogue)
            reasons.append(reason)
            if reason is not None:
                continue
            exact, size = ops.scaled_sums(left, right.t(), epilogue)
            inside = slice(0, total) if epilogue.offsets is None else slice(1, total - 1)
            assert_finished(kernel, out[inside], (exact[inside], size[inside]), bias, epilogue)
            if epilogue.offsets is not None:
                assert (out[0] == 7).all() and (out[-1] == 7).all()
    reasons_of(kernel, where, none_ok=False, reasons=reasons)


@pytest.mark.parametrize(("name", "where"), [
    case for case in cases("scaled_gemm") if KERNELS[case.values[0]].k_slices
])  # fmt: skip
@pytest.mark.parametrize("parts", [(128, 39), (128, 256, 720), (384, 128, 128, 16)], ids=str)
def test_scaled_gemm_supports_slices_of_k(name: str, where: str, parts: tuple[int, ...]) -> None:
    """Each 1x128-quantized by itself, or all of one matrix under the same scales."""
    kernel = kernel_here(name, where)
    m, n, k = 130, columns_for(kernel, 96), sum(parts)
    left, right = operands_for(kernel, where, m, n, k)
    if kernel.granularity is Granularity.GROUP:
        slices = [operands_for(kernel, where, m, n, part)[0] for part in parts]
    else:
        slices = []
        for part in left.data.split(parts, dim=1):
            data, _ = padded(m, part.shape[1], part.dtype, where, left.format.nan_byte)
            data.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
            slices.append(QuantizedTensor(data, left.scale, left.granularity))
    out = poisoned((m, n), torch.bfloat16, where)
    bias = torch.randn(n, device=where).bfloat16()
    found = run(kernel, slices, right.t(), bias=bias, out=out)
    assert found is out
    assert_finished(kernel, out, ops.scaled_sums(slices, right.t()), bias, PLAIN)


@pytest.mark.parametrize(("name", "where"), [
    case for case in cases("scaled_gemm") if KERNELS[case.values[0]].batch_invariant
])  # fmt: skip
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for width, k in ((24, 39), (512, 2048), (64, 8192), (2048, 512)):
        n = columns_for(kernel, width)
        left, right = operands_for(kernel, where, 4096, n, k)
        seen = []
        for m in (4096, 1000, 129, 64, 7):
            scale = left.scale if kernel.granularity is Granularity.TENSOR else left.scale[:m]  # type: ignore[index]
            some = QuantizedTensor.packed(left.data[:m], scale, left.granularity)  # type: ignore[arg-type]
            out = poisoned((m, n), torch.bfloat16, where)
            same = Epilogue(batch_invariant=True)
            assert launch_scaled_gemm(kernel, some, right, out, None, same) is None
            seen.append(out[:7].view(torch.int16))
        assert all(torch.equal(rows, seen[0]) for rows in seen), f"n={n} k={k}"


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_keeps_non_finite_values_to_their_rows(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    x = torch.randn(256, 256, device=where)
    x[3, 5], x[9, 0], x[200, 255] = math.nan, math.inf, -math.inf
    left = numerics.quantize(x, fp8, kernel.granularity)
    n = columns_for(kernel, 128)
    right = numerics.quantize(torch.randn(n, 256, device=where), fp8, kernel.b_granularity)
    out = poisoned((256, n), torch.bfloat16, where)
    assert launch_scaled_gemm(kernel, left, right, out) is None
    bad = (~torch.isfinite(out)).any(dim=1).nonzero().flatten().tolist()
    assert bad == [3, 9, 200]
    assert (~torch.isfinite(out[bad])).all()
    assert_product(kernel, out, left, right.t())


@pytest.mark.parametrize(("name", "where"), cases("scaled_gemm"))
def test_scaled_gemm_writes_a_strided_slice_or_rejects_it(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    left = numerics.quantize(torch.randn(256, 256, device=where), fp8, kernel.granularity)
    n = columns_for(kernel, 128)
    right = numerics.quantize(torch.randn(n, 256, device=where), fp8, kernel.b_granularity)
    whole = torch.full((256, 384), 7.0, dtype=torch.bfloat16, device=where)
    reason = launch_scaled_gemm(kernel, left, right, whole[:, 128 : 128 + n])
    if reason is not None:
        assert "contiguous" in reason
        return
    assert_product(kernel, whole[:, 128 : 128 + n], left, right.t())
    assert (whole[:, :128] == 7).all() and (whole[:, 128 + n :] == 7).all()


@pytest.mark.parametrize(("name", "where"), cases("gemm"))
@pytest.mark.parametrize("distribution", REALISTIC_DISTRIBUTIONS)
def test_gemm_equals_the_product_of_its_quantized_operands(
    name: str, where: str, distribution: str
) -> None:
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    dtype = torch.float32 if name == "torch.fp32" else torch.bfloat16
    recipe = distribution_named(distribution)
    m, n, k = 256, columns_for(kernel, 128), 253 if kernel.pads else 256
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
    given: list[tuple[Any, Any]] = [(x, w.t()), *([(x, prepared)] if prepared else [])]
    if name.startswith("cuda.quantize_together"):
        turned = x.t().contiguous().t(), w.t().contiguous()  # as in the gradient of a weight
        given = [*given, (x, turned[1])] if kernel.granularity is Granularity.ROW else []
        given += [turned] if kernel.accumulation != "fast" else []
    for operands in given:
        out = poisoned((m, n), dtype, where)
        run(kernel, *operands, out=out)
        assert_product(kernel, out, left, b)


@pytest.mark.parametrize(("name", "where"), cases("gemm"))
def test_gemm_supports_views_and_odd_sizes_or_rejects_them(name: str, where: str) -> None:
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
        if name.startswith("cuda.quantize_together_group"):  # of the gradient of a weight
            x, w = x.t().contiguous().t(), w.t().contiguous().t()
        out = poisoned((m, n), dtype, where)
        try:
            run(kernel, x, w.t(), out=out)
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
    n = columns_for(kernel, 128)
    if not name.startswith("cuda.quantize_together_group"):
        assert run(kernel, base[:0, :256], weights[:n, :256].t()).shape == (0, n)


GRADIENTS = [(256, 128, 384), (130, 39, 77)]


@pytest.mark.parametrize(("name", "where"), cases("gemm"))
def test_gemm_reads_gradients_in_their_layout_or_rejects_them(name: str, where: str) -> None:
    """``dX = dY W`` with a row-major b, ``dW = dY^T X`` with a column-major a besides."""
    kernel = kernel_here(name, where)
    fp8 = fp8_format(current_device(where))
    dtype = torch.float32 if name == "torch.fp32" else torch.bfloat16
    for m, n, k in GRADIENTS:
        dy = torch.randn(m, n, device=where).to(dtype)
        x, w = (torch.randn(rows, k, device=where).to(dtype) for rows in (m, n))
        for a, b in ((dy, w), (dy.t(), x)):
            out = poisoned((a.shape[0], k), dtype, where)
            try:
                run(kernel, a, b, out=out)
            except UnsupportedError as refused:
                assert len(str(refused)) > 20
                continue
            left: Any = a
            right: Any = b
            if kernel.quantizes:
                left = numerics.quantize(a, fp8, kernel.granularity)
                right = numerics.quantize(b.t(), fp8, kernel.b_granularity).t()
            assert_product(kernel, out, left, right)


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        pytest.param(current_device("cpu"), "torch.quantize_*+torch.emulated_*", id="cpu"),
        pytest.param(H200, "cuda.quantize_*+cuda.scaled_gemm_*", id="sm_90"),
    ],
)
def test_some_fp8_gemm_reads_gradients_in_their_layout(device: Device, parts: str) -> None:
    """The test before checks the results; this one runs wherever the kernels compile."""
    composed = fnmatch.filter(sorted(KERNELS), parts)
    for m, n, k in GRADIENTS:
        dy, x, w = (torch.zeros(size).bfloat16() for size in ((m, n), (m, k), (n, k)))
        for a, b in ((dy, w), (dy.t(), x)):
            problem = gemm_problem(a, b, None, None)
            answers = {name: KERNELS[name].supports(problem, device) for name in composed}
            assert ACCEPTED in answers.values(), f"{problem}: {answers}"


def batched_cases() -> list[Any]:
    return [case for case in cases("gemm") if KERNELS[case.values[0]].batched]


@pytest.mark.parametrize(("name", "where"), batched_cases())
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_gemm_supports_a_batch_in_every_layout(name: str, where: str, with_bias: bool) -> None:
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
    """Describe the fault of a quantizer: "" for none, None if it does not take x.

    The padding between rows must stay unchanged. A given scale is one that some
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
    pitch = pitch_of(columns) if padded else columns
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


def transposed_wrong(
    kernel: Kernel, x: torch.Tensor, form: Format, column_sums: bool
) -> str | None:
    """Describe the fault of a quantizer of x and its transpose, as `quantized_wrong` does."""
    epilogue = "none" if "none" in kernel.epilogues else min(kernel.epilogues)
    given = None
    if epilogue in ("static", "delayed"):
        made = numerics.quantize(x, form, kernel.granularity).scale
        assert made is not None
        given = made * 0.37
    amax = torch.zeros(1, device=x.device) if epilogue == "delayed" else None
    by_power = epilogue == "power_of_two"
    try:
        both = run(
            kernel, x, out_format=form, power_of_two=by_power, scale=given, amax=amax,
            column_sums=column_sums,
        )  # fmt: skip
    except UnsupportedError:
        return None
    for name, source, found in zip(("", "transposed: "), (x, x.t()), both[:2], strict=True):
        if given is None:
            exact = numerics.quantize(source, form, kernel.granularity, power_of_two_scale=by_power)
        else:
            exact, largest = numerics.quantize_static(source, form, kernel.granularity, given)
            if amax is not None and float(amax) != float(largest):
                return f"amax is {float(amax)}, not {float(largest)}"
        wrong = compare_bytes(found.data, found.scale, exact.data, exact.scale)
        if wrong:
            return name + wrong
    return compare_sums(both[2], x) if column_sums else ""


@pytest.mark.parametrize(("name", "where"), cases("quantize_transpose"))
@pytest.mark.parametrize("source", [Format.BFLOAT16, Format.FLOAT32], ids=str)
@pytest.mark.parametrize("column_sums", [False, True], ids=["alone", "sums"])
@pytest.mark.sample(every=4, of=("name",))
def test_quantize_transpose_is_bitwise_equal_to_quantize(
    name: str, where: str, source: Format, column_sums: bool
) -> None:
    kernel = kernel_here(name, where)
    taken = 0
    for form in formats(where):
        for rows, columns in [(1, 1), (3, 129), (150, 13), (130, 257), (600, 512)]:
            x = hostile(rows, columns, where, source)
            if rows > 100:
                x[5, 7], x[6, 0], x[6, 9] = math.nan, math.inf, -math.inf
            wide = torch.zeros(rows, columns + 40, dtype=x.dtype, device=where)
            wide[:, 3 : 3 + columns] = x
            for given in (x, wide[:, 3 : 3 + columns], x.t().contiguous().t()):
                wrong = transposed_wrong(kernel, given, form, column_sums)
                taken += wrong is not None
                assert not wrong, f"{name} {form.value} {[rows, columns]}: {wrong}"
    assert taken or (column_sums and not adds_columns(kernel))


def adds_columns(kernel: Kernel) -> bool:
    return any("column_sums" in epilogue for epilogue in kernel.epilogues)


SUMMING = [x for x in cases("quantize_transpose") if adds_columns(KERNELS[str(x.values[0])])]


def sums_of(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    """Sums of the columns of x, with the scales that the kernel is for."""
    options: dict[str, Any] = {"power_of_two": "power_of_two" in kernel.epilogues}
    if kernel.epilogues & {"static", "delayed"}:
        options["scale"] = torch.ones(1, device=x.device)
    if "delayed" in kernel.epilogues:
        options["amax"] = torch.zeros(1, device=x.device)
    found: torch.Tensor = run(kernel, x, column_sums=True, **options)[2]
    return found


@pytest.mark.parametrize(("name", "where"), SUMMING)
@pytest.mark.parametrize("source", [Format.BFLOAT16, Format.FLOAT32], ids=str)
def test_column_sums_are_within_their_bound_of_float64(
    name: str, where: str, source: Format
) -> None:
    """Sums of few and many tiles, and of values that cancel, are accurate and reproducible."""
    kernel = kernel_here(name, where)
    for rows, columns in [(1, 9), (127, 33), (129, 130), (8193, 24), (20001, 3)]:
        x = torch.randn(rows, columns, device=where)
        x[:, 0] = torch.logspace(-30, 30, rows, device=where)
        x[1::2, 1] = -x[: rows - rows % 2 : 2, 1]
        x = x.to(source.dtype)
        found = [sums_of(kernel, x) for _ in range(2)]
        assert torch.equal(*found)
        error = (found[0].double() - x.double().sum(dim=0)).abs()
        assert (error <= error_bound(x)).all(), f"{name} {[rows, columns]}"


@pytest.mark.parametrize(("name", "where"), SUMMING)
def test_column_sums_keep_non_finite_values(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    x = torch.randn(300, 40, device=where)
    x[7, 0], x[200, 1], x[3, 2] = math.nan, math.inf, -math.inf
    x[299, 3], x[0, 3] = math.inf, -math.inf
    sums = sums_of(kernel, x)
    assert torch.equal(sums.isnan(), x.sum(dim=0).isnan()) and sums.isnan().sum() == 2
    assert sums[1] == math.inf and sums[2] == -math.inf and sums[4:].isfinite().all()


QUANTIZED_SIZES = [(1, 1), (3, 129), (7, 13), (130, 257), (5, 9000), (3, 40001), (600, 512)]


@pytest.mark.parametrize(("name", "where"), cases("quantize"))
@pytest.mark.parametrize("source", [Format.BFLOAT16, Format.FLOAT32], ids=str)
@pytest.mark.sample(every=3, of=("name",))
def test_quantize_is_bitwise_equal_to_the_emulation(name: str, where: str, source: Format) -> None:
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
                for padded in (False, True):
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
    """Of rows with and without gaps; on a GPU also of more than its threads read at once."""
    kernel = kernel_here(name, where)
    device = current_device(where)
    sizes = [(1, 1), (3, 129), (130, 257), (5, 9000)]
    sizes += [(4099, 1029), (2051, 2048)] if where == "cuda" else []
    outputs = (Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32)
    taken = 0
    for form, out_format, (rows, columns) in itertools.product(formats(where), outputs, sizes):
        x = numerics.quantize(
            hostile(rows, columns, where, Format.FLOAT32), form, kernel.granularity
        )
        for data in {x.data, x.data.contiguous()}:
            problem = Problem(
                op="dequantize", m=rows, n=1, k=columns, out_format=out_format,
                a=replace(operand_of(data), granularity=x.granularity),
            )  # fmt: skip
            if isinstance(kernel.supports(problem, device), Rejected):
                continue
            taken += 1
            out = poisoned((rows, columns), out_format.dtype, where)
            kernel.launch(data, x.scale, out, kernel.workspace(data, x.scale, out))
            expected = numerics.dequantize(x, out_format.dtype)
            assert torch.equal(out.isnan(), expected.isnan())
            kept = ~expected.isnan()
            assert torch.equal(out[kept], expected[kept]), f"{name} {form.value} {out_format.value}"
    assert taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        n
        for n, k in sorted(KERNELS.items())
        if n not in (*LONG_ROWS, *LONG_SUMS)
        and (
            (k.language in ("triton", "cuda") and "none" in k.epilogues)
            or n == "torch.scaled_mm_row"
        )
    ],
)
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """Offsets past 2^31 are 64 bits wide: the last rows are right."""
    kernel = kernel_here(name, "cuda")
    fp8 = fp8_format(current_device("cuda"))
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs a GPU with 60 GiB")
    k, n = 256, columns_for(kernel, 256)
    rows = 2**31 // n + 384
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda").normal_()
    w = torch.randn(n, k, device="cuda").bfloat16()
    last = slice(rows - 256, rows)
    if name.startswith("cuda.quantize_together") and kernel.accumulation != "fast":
        x, w = x.t().contiguous().t(), w.t().contiguous().t()
    if kernel.op == "quantize_transpose":
        both = run(kernel, x)
        assert both[0].scale is not None and both[1].scale is not None
        for found in (both[0].data[last].float(), both[1].data[:, last].t().float()):
            assert torch.isfinite(found).all() and (found != 0).float().mean() > 0.9
        if kernel.granularity in (Granularity.GROUP, Granularity.BLOCK):
            expected = numerics.quantize(x[last].t(), fp8, kernel.granularity)
            groups = slice(both[1].scale.shape[1] - 2, None)
            found = both[1].data[:, last]
            scale = both[1].scale[:, groups]
            assert not compare_bytes(found, scale, expected.data, expected.scale)
        return
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
    if kernel.op == "gemm":
        out = run(kernel, x, w.t())
        left = numerics.quantize(x[last], fp8, kernel.granularity)
        right = numerics.quantize(w, fp8, kernel.b_granularity)
        if kernel.granularity is not Granularity.TENSOR:
            assert_product(kernel, out[last], left, right.t())
        return
    left_all = quantize(x, kernel.granularity)
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
    "name",
    [
        n
        for n, k in sorted(KERNELS.items())
        if k.op == "scaled_gemm" and "_fast" not in n and not k.libraries
    ],
)
def test_promoted_sums_do_not_drift(name: str) -> None:
    """Sums of one sign lose 2^-13 of themselves at every step unless they are promoted.

    The fast twins show that this test can see it: they must drift at least four times as far.
    """
    kernel = kernel_here(name, "cuda")
    fp8 = fp8_format(current_device("cuda"))
    torch.manual_seed(0)
    n = columns_for(kernel, 256)
    k = 16384 if name in LONG_SUMS else 4096
    x, w = (torch.rand(rows, k, device="cuda") + 0.5 for rows in (256, n))
    left = numerics.quantize(x, fp8, kernel.granularity)
    right = numerics.quantize(w, fp8, kernel.b_granularity)
    exact = ops.product(left, right.t())

    def shift(of: Kernel) -> float:
        out = poisoned((256, n), torch.bfloat16, "cuda")
        assert launch_scaled_gemm(of, left, right, out) is None
        return numerics.measure_errors(out, exact).mean_shift

    found = shift(kernel)
    assert found < 1e-3, f"{name}: outputs shifted by {found:.2e}"
    if f"{name}_fast" in KERNELS:
        assert shift(KERNELS[f"{name}_fast"]) > 4 * found
