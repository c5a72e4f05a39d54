"""float16 operands and outputs of every kernel that takes them."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern import numerics
from lokakern.build.prebuild import jobs_for
from lokakern.device import current_device
from lokakern.functional import gemm_norm as functional
from lokakern.functional.checks import operand_of
from lokakern.functional.norm_backward import norm_backward
from lokakern.functional.run import run as run_kernel
from lokakern.kernels.cuda import gemm_norm, half, quantize, scaled_gemm, tiles
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.tiled_compare import compare_bytes, compare_sums
from lokakern.norm import norm_named
from lokakern.nvrtc import Program
from lokakern.problems import make_problem
from lokakern.registry import float16, ops
from lokakern.registry.norm_gradients import norm_gradients
from lokakern.registry.register import KERNELS, fp8_format
from lokakern.selection import dispatcher
from lokakern.types import (
    PLAIN,
    Device,
    Epilogue,
    Format,
    Granularity,
    NormEpilogue,
    Operand,
    Problem,
    Rejected,
)
from lokakern.workloads.suites import SUITES
from tests.kernels.test_kernels import launch_scaled_gemm, poisoned
from tests.support.kernel_cases import (
    BEHIND_CROSSES,
    CROSSING,
    RECTIFYING,
    cases,
    kernel_here,
)
from tests.support.norm_backward_runs import VARIANTS, Variant
from tests.support.norm_backward_runs import Run as BackwardRun
from tests.support.norm_runs import OUTPUTS, Run, epilogue_of

HALF = Format.FLOAT16
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)


def taking(*names: str) -> list[Any]:
    """Those of `cases` that take float16."""
    problem = make_problem("gemm", (8, 8, 8), a=Operand(HALF))
    return [
        case for case in cases(*names)
        if float16.refusal(case.values[0], KERNELS[case.values[0]].parts, problem) is None
    ]  # fmt: skip


def gradients_of_norms() -> list[Any]:
    return [case for case in taking("norm_backward") if case.values[0] not in BEHIND_CROSSES]


def products() -> list[Any]:
    """Those that multiply, but for scales of bytes."""
    found = taking("scaled_gemm")
    return [x for x in found if KERNELS[x.values[0]].granularity is not Granularity.MX]


def hostile(rows: int, columns: int, where: str) -> Tensor:
    """Rows of all sizes, with subnormals, zeros, 65504, infinity and NaN."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    x *= torch.logspace(-9, 4, rows).unsqueeze(1)
    x[rows // 2] = 0.0
    if rows > 6:
        x[1, -1], x[2, 0], x[3, columns // 2], x[4] = math.nan, math.inf, -math.inf, math.nan
        x[5, columns // 3] = -65504.0
    return x.to(HALF.dtype).to(where)


# Parts of a warp, a warp, a block, a cluster, in tiles and not; rows that start anywhere.
SHAPES = [(9, 13), (131, 479), (70, 1024), (3, 17281)]


@pytest.mark.parametrize(("name", "where"), taking("quantize", "quantize_transpose"))
def test_quantizers_equal_numerics(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    form, granularity = fp8_format(current_device(where)), kernel.granularity
    taken = 0
    for (rows, columns), turned in itertools.product(SHAPES, (False, True)):
        wide = (
            hostile(columns, rows + 9, where).t() if turned else hostile(rows, columns + 9, where)
        )
        x = wide[5 : 5 + rows, :columns] if turned else wide[:, 5 : 5 + columns]
        for source, epilogue in itertools.product((x, x.clone()), sorted(kernel.epilogues)):
            taken += check_quantizer(name, source, form, granularity, epilogue)
    assert taken, f"{name} took none of the shapes"


def check_quantizer(
    name: str, x: Tensor, form: Format, granularity: Granularity, epilogue: str
) -> bool:
    """Check all bytes, scales and sums; returns whether the kernel takes x."""
    kernel = KERNELS[name]
    rows, columns = x.shape
    problem = Problem(op=kernel.op, m=rows, n=1, k=columns, a=operand_of(x), epilogue=epilogue,
                      out_format=form, out_granularity=granularity)  # fmt: skip
    if isinstance(kernel.supports(problem, current_device(x.device.type)), Rejected):
        return False
    outputs: list[Tensor | None] = []
    expected = []
    by_power = "power_of_two" in epilogue
    for source in (x, x.t()) if kernel.op == "quantize_transpose" else (x,):
        exact = numerics.quantize(source, form, granularity, power_of_two_scale=by_power)
        amax = None
        scale = granularity.empty_scale(*source.shape, x.device)
        scale.view(torch.uint8).fill_(0xA5) if granularity is Granularity.MX else scale.fill_(
            math.nan
        )
        if "static" in epilogue or "delayed" in epilogue:
            assert exact.scale is not None
            exact, amax = numerics.quantize_static(source, form, granularity, exact.scale * 0.01)
            scale.copy_(exact.scale)  # type: ignore[arg-type]
        data = torch.full(source.shape, 0xA5, dtype=torch.uint8, device=x.device).view(form.dtype)
        outputs += [data, scale]
        expected.append((exact, amax))
    sums = None
    if kernel.op == "quantize_transpose":
        sums = (
            poisoned((1, columns), torch.float32, x.device.type)[0] if "sums" in epilogue else None
        )
        outputs.append(sums)
    workspace = kernel.workspace(x, *outputs)
    kernel.launch(x, *outputs, workspace)
    where = f"{name} {epilogue} {[rows, columns]} {x.stride()}"
    for (exact, amax), data, scale in zip(expected, outputs[::2], outputs[1::2], strict=False):
        wrong = compare_bytes(data, scale, exact.data, exact.scale)  # type: ignore[arg-type]
        assert not wrong, f"{where}: {wrong}"
        assert "delayed" not in epilogue or float(workspace[0]) == float(amax), where  # type: ignore[arg-type]
    wrong = "" if sums is None else compare_sums(sums, x)
    assert not wrong, f"{where}: {wrong}"
    return True


# m, n and k, with tails of each. A program takes a second to compile for each.
SIZES = [(33, 24, 39), (130, 33, 312), (64, 96, 720)]
LARGE = [(1000, 1, 256), (2048, 512, 1024)]


def integers(rows: int, columns: int, granularity: Granularity, where: str) -> Any:
    """Small integers with scales, of which all sums are exact in a tensor core, too."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randint(-2, 3, (rows, columns), generator=generator).float().to(where)
    made = numerics.quantize(x, fp8_format(current_device(where)), granularity)
    numerics.cast(x, made.data)
    assert made.scale is not None
    # Scales that change along k are powers of two, so that these sums are exact, too.
    along_k = granularity not in (Granularity.TENSOR, Granularity.ROW)
    scale = torch.rand(made.scale.shape, generator=generator).to(where) + 0.5
    made.scale.copy_(torch.ones_like(scale) if along_k else scale)
    return made


@pytest.mark.parametrize(("name", "where"), products())
def test_products_are_rounded_once_and_overflow_to_infinity(name: str, where: str) -> None:
    """An output is what float32 sums, scales and PyTorch's conversion make it."""
    kernel = kernel_here(name, where)
    taken = overflows = 0
    for m, n, k in [*SIZES, *(LARGE if where == "cuda" else [])]:
        left = integers(m, k, kernel.granularity, where)
        right = integers(n, k, kernel.b_granularity, where)
        if kernel.granularity is Granularity.ROW:
            left.scale[::3] *= 4096.0
        wide = poisoned((m, n + 5), HALF.dtype, where)
        for out in (wide[:, :n].clone(), wide[:, 3 : 3 + n]):  # of any alignment
            if launch_scaled_gemm(kernel, left, right, out) is not None:
                continue
            sums = left.data.double() @ right.data.double().t()
            by_b = right.scale if kernel.b_granularity is Granularity.TENSOR else right.scale.t()
            is_whole = kernel.granularity in (Granularity.TENSOR, Granularity.ROW)
            exact = (sums.float() * left.scale) * by_b if is_whole else sums.float()
            expected = exact.to(HALF.dtype)
            if name.startswith("cuda."):
                assert torch.equal(out, expected), f"{name} {m} x {n} x {k}"
            else:  # which add and scale in another order
                assert_close(name, out, *exact_product(left, right))
            overflows += int(expected.isinf().sum())
            taken += 1
        assert wide[:, n + 3 :].isnan().all(), "wrote beside its output"
    assert taken and (overflows or kernel.granularity is not Granularity.ROW)


@pytest.mark.parametrize(("name", "where"), products())
def test_epilogues_read_float16(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    taken = 0
    for (m, n, k), what in itertools.product(SIZES[1:], sorted(kernel.epilogues)):
        left = integers(m, k, kernel.granularity, where)
        right = integers(n, k, kernel.b_granularity, where)
        left.scale.mul_(0.01)
        if not what.startswith("bias") and what.endswith("none"):
            continue
        bias = torch.randn(n, device=where).to(HALF.dtype) if what.startswith("bias") else None
        last = what.removeprefix("bias").removeprefix("+") or "none"
        gap = n % 2  # pairs of columns are aligned where n is even
        wide = torch.randn(m, 2 * n + gap, device=where).to(HALF.dtype)
        epilogue = PLAIN if last == "none" else Epilogue(last)
        if last == "cross":
            epilogue = Epilogue(x0=wide[:, :n], x=wide[:, n + gap :])
        out = poisoned((m, n), HALF.dtype, where)
        if launch_scaled_gemm(kernel, left, right, out, bias, epilogue) is not None:
            continue
        taken += 1
        v, size = exact_product(left, right)
        if bias is not None:
            v, size = v + bias.double(), size + bias.double().abs()
        if last == "cross":
            x0, x = wide[:, :n].double(), wide[:, n + gap :].double()
            v, size = x0 * v + x, x0.abs() * size + x.abs()
        else:
            v = ops.ACTIVATIONS[last][0](v)
        assert_close(f"{name} {what}", out, v, size)
    assert taken


def assert_close(what: str, out: Tensor, exact: Tensor, size: Tensor) -> None:
    """Errors are those of one rounding to float16, beside those of float32 sums of such a size."""
    allowed = 2.0**-11 * exact.abs() + 2.0**-18 * size + 2.0**-25
    ends = exact.abs() > HALF.maximum
    assert torch.equal(out.isinf() & (exact.abs() > 65600), exact.abs() > 65600), what
    error = torch.where(ends, 0.0, (out.double() - exact).abs() - allowed)
    assert not out.isnan().any() and error.max() <= 0, f"{what}: {error.max()} too much"


def exact_product(left: Any, right: Any) -> tuple[Tensor, Tensor]:
    """The product, and that of absolute values."""
    a, b = (numerics.dequantize(x, torch.float64) for x in (left, right))
    return a @ b.t(), a.abs() @ b.abs().t()


# --- the functions on tensors


def test_functions_take_and_return_float16() -> None:
    x = hostile(40, 256, "cpu")[8:].nan_to_num(0.0, 0.0, 0.0) * 2.0**-4
    w = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).to(HALF.dtype)
    left, right = lokakern.quantize(x), lokakern.quantize(w)
    assert torch.equal(
        left.data.view(torch.uint8),
        numerics.quantize(x, left.format, left.granularity).data.view(torch.uint8),
    )
    x0 = torch.randn(32, 24).to(HALF.dtype)
    exact, size = exact_product(left, right)
    out = lokakern.scaled_gemm(left, right.t(), out_format="float16", cross=(x0, x0))
    assert isinstance(out, Tensor) and out.dtype is HALF.dtype
    crossed = x0.double() * exact + x0.double()
    assert_close("cross", out, crossed, x0.double().abs() * size + x0.double().abs())
    assert lokakern.dequantize(left, "float16").dtype is HALF.dtype
    assert torch.equal(lokakern.gemm(x, w.t()), x @ w.t())
    prepared = lokakern.prepare_weight(w, 0.06, (1, 64))
    assert torch.equal(lokakern.gemm(x, prepared, budget=0.06), x @ w.t())


def test_traced_functions_and_arrays_take_it_too() -> None:
    x, w = torch.randn(16, 128).to(HALF.dtype), torch.randn(24, 128).to(HALF.dtype)

    def whole(x: Tensor, w: Tensor) -> Any:
        left, right = lokakern.quantize(x), lokakern.quantize(w)
        product = lokakern.scaled_gemm(left, right.t(), out_format="float16")
        return product, lokakern.dequantize(left, "float16"), lokakern.gemm(x, w.t())

    for eager, traced in zip(
        whole(x, w), torch.compile(whole, backend="aot_eager")(x, w), strict=True
    ):
        assert torch.equal(eager, traced) and traced.dtype is HALF.dtype
    product = lokakern.gemm(x.numpy(), w.numpy().T)
    assert product.dtype == "float16"


def test_float16_does_not_mix_with_bfloat16() -> None:
    x = torch.randn(16, 32).to(HALF.dtype)
    with pytest.raises(lokakern.errors.LokakernError, match="convert one to the other's dtype"):
        lokakern.gemm(x, x.bfloat16().t())
    q = lokakern.quantize(x)
    with pytest.raises(lokakern.errors.LokakernError, match=r"expected \[16\] torch\.float16"):
        lokakern.scaled_gemm(q, q.t(), out_format="float16", bias=torch.zeros(16).bfloat16())
    with pytest.raises(lokakern.errors.LokakernError, match=r"torch\.float16, columns contiguous"):
        y = torch.zeros(16, 16).bfloat16()
        lokakern.scaled_gemm(q, q.t(), out_format="float16", cross=(y, y))
    with pytest.raises(lokakern.errors.LokakernError, match=r"expected \[16, 16\] torch\.float16"):
        lokakern.gemm_norm(x, x.t(), norm="rms", residual=y)
    with pytest.raises(lokakern.errors.LokakernError, match="out_format 'bfloat16'; leave"):
        lokakern.gemm_norm(x, x.t(), norm="rms", out_format="bfloat16")
    for given in ({"norm_weight": y[0].half()}, {"norm_weight": y[0], "gate": y.half()}):
        with pytest.raises(lokakern.errors.LokakernError, match=r"expected .*torch\.float16"):
            lokakern.gemm_norm(q, q.t(), norm="rms", residual=y, out_granularity="row", **given)


# --- norms of rows

NORMED = taking("norm_quantize")
WIDTHS = (8, 192, 1000, 1024, 2048, 4104)
FORMS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("layer", {"activation": "silu"}, ("norm_weight", "norm_bias")),
    ("rms", {"residual": 1, "activation": "hardswish"}, ("norm_weight",)),
    ("rms", {}, ()),
    ("block_rms(8)", {"residual": 1, "residual_last": True}, ()),
    ("layer", {"gate": 1}, ()),
    ("none", {"x0": 1, "x": 1}, ("norm_bias",)),
    ("none", {"activation": "relu"}, ()),
    ("none", {"activation": "silu"}, ()),
    ("none", {"activation": "gelu"}, ()),
    ("layer", {"activation": "gelu_tanh"}, ("norm_weight",)),
)


@pytest.mark.parametrize(("name", "where"), NORMED)
def test_rows_are_normalized_and_quantized(name: str, where: str) -> None:
    """Also rows without a norm that are activated; vectors are float16 or float32."""
    kernel, taken = kernel_here(name, where), 0
    for columns, (norm, last, vectors) in itertools.product(WIDTHS, FORMS):
        for granularity in (Granularity.ROW, Granularity.GROUP, Granularity.TENSOR):
            taken += check_norm(kernel, where, columns, granularity, norm, last, vectors)
    assert taken > 10


def check_norm(
    kernel: Any, where: str, columns: int, granularity: Granularity, norm: str,
    last: dict[str, Any], vectors: tuple[str, ...],
) -> bool:  # fmt: skip
    """Check a kernel against float64; returns whether it takes the problem."""
    x, epilogue = normed(where, columns, norm, last, vectors)
    return Run(kernel, x, None, epilogue, granularity).check()


def normed(
    where: str, columns: int, norm: str, last: dict[str, Any], vectors: tuple[str, ...]
) -> tuple[Tensor, NormEpilogue]:
    """Rows and what follows, in float16, or in float32 of long vectors."""
    epilogue = in_half(epilogue_of(norm, last, vectors, columns > 1000, 37, columns, where))
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(columns))
    x *= torch.logspace(-4, 3, 37).unsqueeze(1)
    x[5] = 0.0
    return x.to(HALF.dtype).to(where), epilogue


def in_half(epilogue: NormEpilogue) -> NormEpilogue:
    """With float16 in the place of bfloat16."""
    return epilogue._replace(**{
        key: value.to(HALF.dtype) for key, value in epilogue._asdict().items()
        if isinstance(value, Tensor) and value.dtype is torch.bfloat16
    })  # fmt: skip


@pytest.mark.parametrize(("name", "where"), NORMED)
def test_relu_and_a_quantizer_give_the_bytes_of_both(name: str, where: str) -> None:
    """Of rows with NaN, infinities and the largest numbers, which start anywhere."""
    kernel = kernel_here(name, where)
    for columns, skipped in itertools.product((64, 96, 2048, 2053), (0, 1, 8)):
        x = hostile(40, columns + 24, where)[:, skipped : skipped + columns]
        epilogue = NormEpilogue(activation="relu")
        made = Run(kernel, x, None, epilogue, Granularity.ROW)
        if isinstance(made.answer, Rejected):
            continue
        expected = numerics.quantize(torch.relu(x), made.form, Granularity.ROW)
        assert torch.equal(made.out.scale, expected.scale)
        left, right = (q.data.float().nan_to_num(-1.0) for q in (made.out, expected))
        # Kernels of norms multiply by a reciprocal: a step of FP8 at most.
        step = 0.0 if "activate" in name or "torch" in name else 0.125
        assert ((left - right).abs() <= step * right.abs()).all()


def test_norm_quantize_takes_float16() -> None:
    x = torch.randn(40, 96).to(HALF.dtype)
    weight = torch.rand(96).to(HALF.dtype) + 0.5
    for options in ({"norm": "none", "activation": "relu"}, {"norm": "rms", "out_scale": "static"},
                    {"norm": "layer", "norm_weight": weight, "granularity": "1x128"}):  # fmt: skip
        made = lokakern.norm_quantize(x, **options)  # type: ignore[arg-type]
        traced = torch.compile(lokakern.norm_quantize, backend="aot_eager")(x, **options)
        wide = lokakern.norm_quantize(x.bfloat16(), **{
            k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in options.items()
        })  # type: ignore[arg-type]  # fmt: skip
        y, z = lokakern.dequantize(made, "float32"), lokakern.dequantize(wide, "float32")
        assert torch.equal(made.data.view(torch.uint8), traced.data.view(torch.uint8))
        assert 0 < (y - z).norm() < 0.05 * z.norm()
    assert lokakern.norm_quantize(x[:0], norm="rms").data.shape == (0, 96)
    for wrong in ({"norm_weight": weight.bfloat16()}, {"residual": x.bfloat16()}):
        with pytest.raises(lokakern.errors.LokakernError, match=r"expected .*torch\.float16"):
            lokakern.norm_quantize(x, norm="rms", **wrong)


@pytest.mark.parametrize(("name", "where"), gradients_of_norms())
def test_gradients_of_norms_are_quantized_both_ways(name: str, where: str) -> None:
    """Rows that end within a tile, are shared by a cluster, or by no one."""
    kernel, taken = kernel_here(name, where), 0
    sizes = (140, 512), (259, 200), (1, 8), (130, 2056), (5, 8192), (300, 768)
    for place, variant in enumerate(VARIANTS):
        m, k = sizes[place % len(sizes)]
        if "block" in variant.norm and k % int(variant.norm[10:-1]):
            m, k = sizes[0]
        run = BackwardRun(kernel, variant, m, k, where, half=HALF)
        if run.outputs.dy is not None and not isinstance(run.answer, Rejected):
            assert run.outputs.dy.dtype is HALF.dtype
        taken += run.check()
    assert taken > 20


@pytest.mark.parametrize(("name", "where"), gradients_of_norms())
def test_gradients_of_hostile_rows(name: str, where: str) -> None:
    """Large, subnormal and zero rows are right; rows with NaN are NaN, and no others."""
    kernel = kernel_here(name, where)
    for norm in ("layer", "block_rms(64)", "rms"):
        y, dd = (torch.randn(140, 256, generator=torch.Generator().manual_seed(i)) for i in (2, 1))
        y[1], dd[2] = 0.0, 0.0
        y[3] += 64.0
        y[4], y[5], dd[6], dd[7] = y[4] * 1e4, y[5] * 1e-6, dd[6] * 1e-6, dd[7] * 1e4
        y, dd = y.half().to(where), dd.half().to(where)
        for out in (None, Format.E5M2):
            variant = Variant(norm, "hardswish", out=out)
            assert BackwardRun(kernel, variant, 140, 256, where, dd, y, half=HALF).check()
        y[8, 9], dd[9, 3] = torch.nan, torch.inf
        variant = Variant(norm, "hardswish", (), out=None)
        run = BackwardRun(kernel, variant, 140, 256, where, dd, y, half=HALF)
        assert run.check() and run.outputs.dy is not None
        wrong = (~run.outputs.dy.isfinite()).any(dim=1)
        assert wrong[[8, 9]].all() and int(wrong.sum()) == 2


def test_norm_backward_takes_float16() -> None:
    y, dd = (torch.randn(40, 96, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    weight = (torch.rand(96) + 0.5).half()
    y, dd = y.half(), dd.half()
    made = norm_backward(dd, y, norm="layer", norm_weight=weight, activation="silu")
    exact = norm_gradients(
        dd, y, NormEpilogue(norm_named("layer"), norm_weight=weight, activation="silu")
    ).dy  # fmt: skip
    assert made.dy is not None and made.dy.dtype is HALF.dtype and made.quantized is not None
    assert (made.dy.double() - exact).norm() < 1e-3 * exact.norm()
    assert (numerics.dequantize(made.quantized).double() - exact).norm() < 0.1 * exact.norm()
    plain = norm_backward(dd, y, norm="rms", out_format="float16")
    assert plain.quantized is None and plain.dy is not None and plain.dy.dtype is HALF.dtype
    assert norm_backward(dd[:0], y[:0], norm="rms").dy.dtype is HALF.dtype  # type: ignore[union-attr]
    for given, words in (
        ((dd.bfloat16(), y), "expected one dtype"), ((dd.float(), y), "torch.float16"),
    ):  # fmt: skip
        with pytest.raises(lokakern.errors.LokakernError, match=words):
            norm_backward(*given, norm="rms")
    with pytest.raises(lokakern.errors.LokakernError, match="expected 'float16' or an FP8 format"):
        norm_backward(dd, y, norm="rms", out_format="bfloat16")
    with pytest.raises(lokakern.errors.LokakernError, match=r"expected torch\.float16"):
        norm_backward(dd, y, norm="rms", norm_weight=weight.bfloat16())


# --- products with norms

NORMED_PRODUCTS = taking("gemm_norm")
PRODUCT_FORMS = (
    *FORMS,
    ("none", {"x0": 1, "x": 1}, ("bias",)),
    ("none", {"activation": "relu"}, ("bias",)),
    ("layer", {"activation": "silu"}, ("bias", "norm_weight", "norm_bias")),
    ("rms", {"residual": 1}, ("bias",)),
    ("block_rms(32)", {"activation": "hardswish"}, ("bias",)),
    ("block_rms(64)", {}, ("norm_weight",)),
)
# Tails of tiles of rows, columns and steps; one block of columns, and several that share a row.
PRODUCT_SIZES = ((37, 72, 264), (130, 256, 173), (67, 1024, 256), (300, 520, 512), (1, 8, 40))


def normed_product(
    kernel: Any, where: str, size: tuple[int, int, int], place: int, granularity: Granularity
) -> Run | None:
    """A launch, with vectors in float16 or float32; None from FP8 to FP8 without float16."""
    (m, n, k), (norm, last, vectors) = size, PRODUCT_FORMS[place]
    generator = torch.Generator().manual_seed(place)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    x *= torch.logspace(-3, 2, m).unsqueeze(1)
    x[m // 2] = 0.0
    epilogue = in_half(epilogue_of(norm, last, vectors, place % 2 == 0, m, n, where))
    is_fp8 = granularity is not Granularity.NONE and takes_fp8(kernel)
    if is_fp8 and not float16.has_half(None, None, epilogue):
        return None
    return Run(kernel, x.half().to(where), w.half().to(where), epilogue, granularity)


def takes_fp8(kernel: Any) -> bool:
    return kernel.granularity is not Granularity.NONE and not kernel.quantizes


def has_whole_blocks(place: int, size: tuple[int, int, int]) -> bool:
    return size[1] % (norm_named(PRODUCT_FORMS[place][0]).block or 1) == 0


@pytest.mark.parametrize(("name", "where"), NORMED_PRODUCTS)
def test_products_are_normalized(name: str, where: str) -> None:
    """Every form at a size, written as float16 and as FP8."""
    kernel, taken = kernel_here(name, where), 0
    for place in range(len(PRODUCT_FORMS)):
        for i, granularity in enumerate((Granularity.NONE, OUTPUTS[1 + place % 3])):
            size = PRODUCT_SIZES[(place + i) % len(PRODUCT_SIZES)]
            if not has_whole_blocks(place, size):
                continue
            run = normed_product(kernel, where, size, place, granularity)
            taken += run is not None and run.check()
    for size in PRODUCT_SIZES:  # of kernels with a single form
        for place in (10, 11, 14, 15):
            if not has_whole_blocks(place, size):
                continue
            run = normed_product(kernel, where, size, place, Granularity.NONE)
            taken += run is not None and run.check()
    assert taken >= 4


def rounds_sums(name: str) -> bool:
    """Whether a kernel rounds sums before what follows them."""
    return name == "torch.norm_unfused" or ("+" in name and "norm_quantize" in name)


@pytest.mark.parametrize(
    ("name", "where"), [x for x in NORMED_PRODUCTS if x.values[0] not in (*CROSSING, *RECTIFYING)]
)
def test_sums_beyond_float16_make_their_rows_nan_at_worst(name: str, where: str) -> None:
    """Kernels that keep sums in float32 are right; those that round them have rows of NaN."""
    kernel = kernel_here(name, where)
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, 256, generator=generator).half() for rows in (40, 256))
    w = w.abs()
    x[1, 3], x[2, 5], x[3] = math.nan, math.inf, 60000.0
    x[4], x[5] = 0.0, 1e-5
    x, w = x.to(where), w.to(where)
    for norm in ("layer", "rms", "block_rms(64)"):
        run = Run(kernel, x, w, NormEpilogue(norm_named(norm)))
        if isinstance(run.answer, Rejected):
            continue
        out = run.values()
        assert out[1:3].isnan().all() and out[6:].isfinite().all(), norm
        rounds = rounds_sums(name)
        assert out[3].isnan().all() if rounds else out[3].isfinite().all(), norm
        kept = torch.tensor([i for i in range(40) if i != 3 or not rounds])
        exact, size = ops.normalized(*run.sums, run.epilogue)
        size = size + normed_rounding(run)
        found = norm_kernel_error(out[kept].half(), exact[kept], size[kept], HALF.unit_roundoff)
        assert found.maximum <= kernel.bound_at(run.problem), norm


def normed_rounding(run: Run) -> Tensor:
    """What 2^-25 of a sum, its rounding to a subnormal, may be after the norm."""
    sums = torch.full_like(run.sums[0], 2.0**-12)
    return ops.normalized(run.sums[0], sums, run.epilogue)[1]


@pytest.mark.parametrize(
    ("name", "where"), [x for x in NORMED_PRODUCTS if not rounds_sums(x.values[0])]
)
def test_crosses_overflow_to_infinity(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    m, n, k = 70, 264, 256
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    x *= torch.logspace(0, 4, m).unsqueeze(1)
    x0, term = (torch.randn(m, 2 * n, generator=generator)[:, :n] for _ in range(2))
    x0, term = (y.to(where, HALF.dtype) for y in (x0, term))
    run = Run(kernel, x.half().to(where), w.half().to(where), NormEpilogue(x0=x0, x=term))
    if run.check():
        assert 0 < int(run.out.isinf().sum()) < run.out.numel() / 2 and not run.out.isnan().any()
    else:
        assert name in RECTIFYING or "block" in name


@pytest.mark.parametrize(
    "name",
    [
        "torch.emulated_row+torch.norm_quantize",
        "torch.quantize_row+torch.emulated_row+torch.norm_quantize",
    ],
)
def test_sums_between_kernels_are_float16_where_anything_is(name: str) -> None:
    """A bias alone, too, where operands and the output are FP8: the norm reads it beside them."""
    kernel = KERNELS[name]
    given: tuple[Any, Any] = torch.randn(8, 32).half(), torch.randn(16, 32).half().t()
    if not kernel.quantizes:
        given = tuple(numerics.quantize(x, Format.E4M3FN, Granularity.ROW) for x in
                      (given[0], given[1].t()))  # fmt: skip
        given = given[0], given[1].t()
    made = numerics.quantize(torch.zeros(8, 16), Format.E4M3FN, Granularity.ROW)
    for dtype in (torch.float16, torch.bfloat16):
        epilogue = NormEpilogue(norm_named("rms"), bias=torch.zeros(16, dtype=dtype))
        for out in (made, torch.zeros(8, 16, dtype=dtype)):
            plain = given if not kernel.quantizes else tuple(x.to(dtype) for x in given)
            sums, bias, *_ = kernel.workspace(*plain, out, epilogue)
            assert sums.dtype is dtype and bias is epilogue.bias


def test_gemm_norm_takes_float16() -> None:
    x, w = torch.randn(40, 96).half(), torch.randn(64, 96).half()
    weight, residual = torch.rand(64).half() + 0.5, torch.randn(40, 64).half()
    for options in ({"norm": "none", "activation": "relu"}, {"norm": "layer", "residual": residual},
                    {"norm": "rms", "norm_weight": weight}, {"norm": "block_rms(8)"}):  # fmt: skip
        made = lokakern.gemm_norm(x, w.t(), **options)
        traced = torch.compile(lokakern.gemm_norm, backend="aot_eager")(x, w.t(), **options)
        assert made.dtype is HALF.dtype and torch.equal(made, traced)
        exact = ops.normalized_product(x, w.t(), run_epilogue(options))
        assert (made.double() - exact).norm() < 2e-3 * exact.norm()
        q, p = lokakern.quantize(x), lokakern.quantize(w).t()
        wide = lokakern.gemm_norm(q, p, out_format="float16", **options)
        assert wide.dtype is HALF.dtype and (wide.double() - exact).norm() < 0.06 * exact.norm()
        out = poisoned((40, 64), HALF.dtype, "cpu")
        lokakern.gemm_norm(x, w.t(), out=out, **options)
        assert torch.equal(out, made)
        made = lokakern.gemm_norm(x, w.t(), out_granularity="row", **options)
        found = lokakern.dequantize(made, "float16").double()
        assert 0 < (found - exact).norm() < 0.06 * exact.norm()
        made = lokakern.gemm_norm(q, p, out_granularity="row", **options)
        traced = torch.compile(lokakern.gemm_norm, backend="aot_eager")(
            q, p, out_granularity="row", **options
        )
        found = lokakern.dequantize(made, "float16").double()
        assert torch.equal(found, lokakern.dequantize(traced, "float16").double())
        assert (found - exact).norm() < 0.08 * exact.norm()
    prepared = lokakern.prepare_weight(w, 0.06, (1, 64))
    assert lokakern.gemm_norm(x, prepared, norm="rms").dtype is HALF.dtype


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Choices of a test are no other test's."""
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


@pytest.mark.usefixtures("forgotten")
def test_from_fp8_to_fp8_kernels_are_chosen_that_take_float16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The problem is that of bfloat16: what is beside the sums tells, in frozen choices, too."""
    q, p = lokakern.quantize(torch.randn(8, 32)), lokakern.quantize(torch.randn(16, 32)).t()
    bias = torch.rand(16)

    def quantized(bias: Tensor) -> tuple[Any, list[str]]:
        ran: list[str] = []
        with monkeypatch.context() as patch:
            real = functional._launch
            patch.setattr(functional, "_launch", lambda kernel, *rest: (
                ran.append(kernel.name), real(kernel, *rest)))  # fmt: skip
            made = lokakern.gemm_norm(q, p, norm="rms", bias=bias, out_granularity="row")
        return made, ran

    half, wide = quantized(bias.half()), quantized(bias.half().float())
    assert half[1] == wide[1] == quantized(bias.bfloat16())[1]
    assert torch.equal(half[0].data.view(torch.uint8), wide[0].data.view(torch.uint8))
    lokakern.freeze(tmp_path / "choices.json")
    assert '"needs":["float16"]' in (tmp_path / "choices.json").read_text().replace(" ", "")
    dispatcher.use_choices(tmp_path / "choices.json")
    try:
        frozen = quantized(bias.half())
    finally:
        dispatcher.use_choices(None)
    assert frozen[1] == half[1] and torch.equal(frozen[0].scale, half[0].scale)
    takes, refused = float16.why_not, half[1][0]
    monkeypatch.setattr(
        float16, "why_not",
        lambda name, parts: "takes no float16" if name == refused else takes(name, parts),
    )  # fmt: skip
    dispatcher.use_snapshot(None)  # forgets choices
    assert refused in quantized(bias.bfloat16())[1] and refused not in quantized(bias.half())[1]
    with pytest.raises(lokakern.errors.UnsupportedError, match="takes no float16"):
        run_kernel(KERNELS[refused], q, p, norm="rms", bias=bias.half(), out_granularity="row")


def run_epilogue(options: dict[str, Any]) -> NormEpilogue:
    given = {k: v for k, v in options.items() if k != "norm"}
    return NormEpilogue(norm_named(options["norm"]), **given)


def test_gemm_norm_has_gradients_in_float16() -> None:
    given = [torch.randn(40, 96), torch.randn(64, 96), torch.rand(64) + 0.5]
    x, w, weight = (y.half().requires_grad_() for y in given)
    exact = [y.detach().double().requires_grad_() for y in (x, w, weight)]
    grad = torch.randn(40, 64).half()
    call = torch.compile(lokakern.gemm_norm, backend="aot_eager")
    for function in (lokakern.gemm_norm, call):
        y = function(x, w.t(), norm="layer", norm_weight=weight)
        found = torch.autograd.grad(y, (x, w, weight), grad)
        wide = torch.nn.functional.layer_norm(exact[0] @ exact[1].t(), (64,), exact[2])
        for one, other in zip(found, torch.autograd.grad(wide, exact, grad.double()), strict=True):
            assert one.dtype is HALF.dtype and (one.double() - other).norm() < 1e-3 * other.norm()


# --- programs


def test_programs_for_float16_are_of_their_own_sources() -> None:
    """And those for bfloat16, bound before or after, are not."""
    given = (1024, 1024, True, True)
    target = torch.float8_e4m3fn
    sources = {
        source: quantize.bind(*given, source, target).launch.program.source.rsplit("/", 1)[-1]
        for source in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert list(sources.values()) == ["quantize.cu", "half_quantize.cu", "quantize.cu"]
    kind = tiles.Kind("row")
    tile = tiles.tile_for(8192, 1024, 1024, kind, 1, 132)
    plain = scaled_gemm.bind(1024, 1024, tile, kind).program
    halved = scaled_gemm.bind(1024, 1024, tile, half.HalfKind(*kind)).program
    assert scaled_gemm.bind(1024, 1024, tile, kind).program is plain
    assert halved == replace(plain, source=plain.source.replace("scaled_", "half_scaled_"))
    out = torch.empty(64, 64)
    fp8 = torch.zeros(64, 64).to(target)
    found = {
        dtype: scaled_gemm._kind_of("row", (fp8,), fp8, out.to(dtype), None, PLAIN)
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert found[torch.bfloat16] != found[torch.float16]
    assert tuple(found[torch.bfloat16]) == tuple(found[torch.float16])
    assert isinstance(found[torch.float16]._replace(direct=True), half.HalfKind)


def test_what_is_beside_fp8_decides_the_program_of_a_product() -> None:
    """Whichever was launched first: a product of FP8 that writes FP8 has no other float16."""
    x = numerics.quantize(torch.randn(64, 64), Format.E4M3FN, Granularity.ROW)
    w, out = x.t(), numerics.quantize(torch.randn(64, 64), Format.E4M3FN, Granularity.ROW)
    forms, sources = set(), []
    for dtype in (torch.bfloat16, HALF.dtype, torch.bfloat16):
        matrix = torch.zeros(64, 64, dtype=dtype)
        epilogue = NormEpilogue(norm_named("rms"), residual=matrix)
        plan, kind = gemm_norm._planned("row", False, x, w, out, epilogue)
        sources.append(Path(plan.launch.program.source).name)
        assert isinstance(kind, half.HalfNormKind) is (dtype is HALF.dtype)
        if "triton.gemm_norm_row" in KERNELS:
            forms.add(sys.modules["lokakern.kernels.triton.gemm_norm"].pieces(epilogue, matrix)[0])
    assert sources == ["gemm_norm.cu", "half_gemm_norm.cu", "gemm_norm.cu"]
    assert len(forms) in (0, 2)


def test_launches_are_those_of_bfloat16_with_other_sources() -> None:
    """Equal macros, of compositions too."""
    found: set[str] = set()
    every = SUITES["float16"].cases(H200)
    for case in (*every[::6], *(x for x in every if x.problem.op in ops.EPILOGUE_OPS)):
        for kernel in KERNELS.values():
            if kernel.language != "cuda" or isinstance(
                kernel.supports(case.problem, H200), Rejected
            ):
                continue
            plain, made = (
                jobs_for([problem], H200, [kernel])
                for problem in (float16.as_bfloat16(case.problem), case.problem)
            )
            expected = []
            for job in plain:
                assert isinstance(job, Program)
                source = Path(job.source)
                macros = dict(job.macros)
                of_fp8 = job.entry == "gemm_norm" and not macros["BF16"] and macros["OUT"] == 1
                # A product of FP8 that writes FP8, with vectors in float32, has no float16.
                name = source.name if of_fp8 else half.SOURCES.get(source.name, source.name)
                expected.append(replace(job, source=str(source.with_name(name))))
            assert made == expected, f"{kernel} {case.problem}"
            found |= {Path(job.source).name for job in expected}
    of_float32 = {"quantize_scales.cu", "quantize_sums.cu", "gemm_norm.cu"}
    assert found - of_float32 == set(half.SOURCES.values()) - {
        "half_scaled_gemm_unaligned.cu", "half_quantize_tiles_together.cu",
        "half_quantize_long.cu",  # of longer rows than any there
        "half_quantize_short.cu",
    }  # fmt: skip


def test_one_step_of_the_division_rounds_all_quotients_correctly() -> None:
    """Of every significand of float16 by the scale of every other."""
    x = torch.arange(1024, 2048, dtype=torch.float64)
    for form in (Format.E4M3FN, Format.E5M2):
        scale = (x.float() / form.maximum).unsqueeze(1)
        reciprocal = 1.0 / scale
        values = x.float().unsqueeze(0)
        near = values * reciprocal
        # Products of 24 bits are exact in float64, and so is this difference.
        rest = (near.double() * scale.double() - values.double()).float()
        step = near.double() - rest.double() * reciprocal.double()
        assert torch.equal(step.float(), values / scale)


def test_what_is_written_for_bfloat16_says_so() -> None:
    """Sums that are never promoted."""
    fp8 = Operand(Format.E4M3FN, Granularity.ROW)
    for op, name in (("scaled_gemm", "triton.scaled_gemm_row_fast"),
                     ("gemm_norm", "cuda.gemm_norm_row_fast")):  # fmt: skip
        problem = make_problem(op, (64, 64, 512), a=fp8, out_format=HALF)
        assert KERNELS[name].supports(problem, H200) == Rejected("takes no float16")
