"""float16 operands and outputs of every kernel that takes them."""

from __future__ import annotations

import itertools
import math
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
from lokakern.functional.checks import operand_of
from lokakern.kernels.cuda import half, quantize, scaled_gemm, tiles
from lokakern.measure.tiled_compare import compare_bytes, compare_sums
from lokakern.nvrtc import Program
from lokakern.problems import make_problem
from lokakern.registry import float16, ops
from lokakern.registry.register import KERNELS, fp8_format
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
from tests.support.kernel_cases import cases, kernel_here
from tests.support.norm_runs import Run, epilogue_of

HALF = Format.FLOAT16
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)


def taking(*names: str) -> list[Any]:
    """Those of `cases` that take float16."""
    problem = make_problem("gemm", (8, 8, 8), a=Operand(HALF))
    return [
        case for case in cases(*names)
        if float16.refusal(case.values[0], KERNELS[case.values[0]].parts, problem) is None
    ]  # fmt: skip


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
    with pytest.raises(lokakern.errors.LokakernError, match=r"expected torch\.bfloat16"):
        lokakern.gemm_norm(x, x.t(), norm="rms")


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
    epilogue = epilogue_of(norm, last, vectors, columns > 1000, 37, columns, where)
    epilogue = epilogue._replace(**{
        key: value.to(HALF.dtype) for key, value in epilogue._asdict().items()
        if isinstance(value, Tensor) and value.dtype is torch.bfloat16
    })  # fmt: skip
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(columns))
    x *= torch.logspace(-4, 3, 37).unsqueeze(1)
    x[5] = 0.0
    return x.to(HALF.dtype).to(where), epilogue


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


def test_launches_are_those_of_bfloat16_with_other_sources() -> None:
    """Equal macros, of compositions too."""
    found: set[str] = set()
    every = SUITES["float16"].cases(H200)
    for case in (*every[::6], *(x for x in every if x.problem.op == "norm_quantize")):
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
                name = half.SOURCES.get(source.name, source.name)
                expected.append(replace(job, source=str(source.with_name(name))))
            assert made == expected, f"{kernel} {case.problem}"
            found |= {Path(job.source).name for job in expected}
    assert found - {"quantize_scales.cu"} == set(half.SOURCES.values()) - {
        "half_scaled_gemm_unaligned.cu", "half_quantize_tiles_together.cu",
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
    """Products with norms, gradients, and sums that are never promoted."""
    wide = Operand(HALF)
    for op, shape in (("gemm_norm", (512, 256, 256)), ("norm_backward", (512, 256))):
        problem = make_problem(op, shape, a=wide, epilogue="rms")
        for name, kernel in KERNELS.items():
            if kernel.op == op:
                assert isinstance(kernel.supports(problem, H200), Rejected), name
    fast = KERNELS["triton.scaled_gemm_row_fast"]
    fields = {"a": Operand(Format.E4M3FN, Granularity.ROW), "out_format": HALF}
    answer = fast.supports(make_problem("scaled_gemm", (64, 64, 64), **fields), H200)
    assert answer == Rejected("takes no float16")
