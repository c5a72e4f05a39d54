"""Operands of layers with a norm: laid out as asked, and a kernel that is wrong anywhere is found.

The kernels that are wrong here wrap a right one and spoil one thing each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.errors import MeasurementError
from lokakern.functional.checks import operand_of
from lokakern.measure import operand_cache, operands, tiled_compare
from lokakern.measure.norm_operands import (
    NormOperands,
    draw_epilogue,
    fitting_scale,
    operands_of,
    rows_of,
    written_parts,
)
from lokakern.measure.operand_cache import clear_operand_cache
from lokakern.measure.time_problem import contender_of
from lokakern.norm import NO_NORM, normalize, static_scale
from lokakern.problems import make_problem
from lokakern.registry import ops
from lokakern.registry.register import KERNELS, Kernel, load_kernels
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
    norm_form,
)

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
FP8 = Format.E4M3FN
ROW, GROUP, TENSOR = (Operand(FP8, g) for g in
                      (Granularity.ROW, Granularity.GROUP, Granularity.TENSOR))  # fmt: skip
SMALL: dict[str, Any] = {"out_format": FP8}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caps so small that everything here repeats, is cut and is checked in part."""
    clear_operand_cache()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(operands, "l2_bytes", lambda: 300_000)
    monkeypatch.setattr(operand_cache, "SAMPLED_ROWS", 256)
    monkeypatch.setattr(operand_cache, "FEWEST_ROWS", 128)
    monkeypatch.setattr(tiled_compare, "PIECE_ELEMENTS", 2_000)
    yield
    torch.set_num_threads(threads)
    clear_operand_cache()


def problems() -> list[Problem]:
    prepared = {"b": Operand(FP8, Granularity.BLOCK, Layout.COLUMN), "prepared": True}
    found = []
    for (m, n, k), epilogue, fields in [
        ((40, 24, 13), "layer", {}),
        ((300, 400, 48), "bias+layer+affine", {"a": ROW}),
        ((300, 384, 48), "bias+block_rms(128)+hardswish",
         {"a": ROW, "out_granularity": Granularity.TENSOR, **SMALL}),
        ((300, 48, 200), "residual+rms+silu", {"a": GROUP, **SMALL,
                                               "out_granularity": Granularity.GROUP}),
        ((40, 330, 136), "bias+residual+layer+affine+gate",
         {"a": TENSOR, **SMALL, "out_granularity": Granularity.ROW}),
        ((40, 330, 136), "rms+affine+cross", {"out_granularity": Granularity.TENSOR, **SMALL}),
        ((70, 40, 64), "bias+block_rms(8)+relu+residual_last", {}),
        ((70, 40, 64), "none", {"a": ROW, "out_granularity": Granularity.TENSOR, **SMALL}),
        ((70, 130, 64), "bias+layer", prepared),
    ]:  # fmt: skip
        found.append(make_problem("gemm_norm", (m, n, k), epilogue=epilogue, **fields))
    for epilogue, granularity in [
        ("layer+affine", Granularity.ROW), ("block_rms(16)+hardswish", Granularity.TENSOR),
        ("bias+residual+rms+affine+gate", Granularity.GROUP),
    ]:  # fmt: skip
        fields = {"epilogue": epilogue, "out_granularity": granularity}
        found.append(make_problem("norm_quantize", (300, 144), **fields))
    wide = {"out_format": Format.BFLOAT16, "epilogue": "residual+layer+relu"}
    return [*found, make_problem("norm_quantize", (40, 330), **wide)]


every_problem = pytest.mark.parametrize("problem", problems(), ids=str)


def right_kernel(problem: Problem) -> Kernel:
    """A kernel that is accurate, but where bfloat16 is normalized."""
    if problem.op == "norm_quantize":
        return KERNELS["torch.norm_quantize"]
    if not problem.a.format.is_fp8:
        return KERNELS["torch.norm_unfused"]
    assert problem.b is not None
    return KERNELS[f"torch.norm_emulated_{problem.b.granularity.suffix}"]


def make(problem: Problem, *, cold: bool = True, distribution: str = "X3") -> NormOperands:
    made = operands_of(problem, distribution, CPU, HERE, cold=cold)
    assert isinstance(made, NormOperands)
    return made


def exact_outputs(made: NormOperands, number: int) -> Tensor:
    """The expectation depends on the operands of one set alone."""
    *given, _out = made.sets[number]
    (epilogue,) = made.epilogues[number]
    if made.problem.b is None:
        return ops.normalized_rows(*given, epilogue)
    a, b = given
    if made.problem.prepared:
        b = b.source.t()
    return ops.normalized_product(a, b, epilogue)


@every_problem
def test_operands_have_the_formats_and_layouts_of_the_problem(problem: Problem) -> None:
    made = make(problem)
    assert len(made.sets) > 1
    form = norm_form(problem.epilogue)
    seen: set[int] = set()
    columns = problem.k if problem.b is None else problem.n
    for given, (epilogue,) in zip(made.sets, made.epilogues, strict=True):
        a, out = given[0], given[-1]
        assert a.shape == (problem.m, problem.k)
        assert out.shape == (problem.m, columns)
        if isinstance(a, Tensor):
            assert operand_of(a) == problem.a
        else:
            assert (a.format, a.granularity) == (problem.a.format, problem.a.granularity)
        if problem.b is not None:
            b = given[1]
            assert b.shape == (problem.k, problem.n)
            if isinstance(b, Tensor):
                assert operand_of(b, Layout.COLUMN) == problem.b
            else:
                assert (b.format, b.granularity) == (problem.b.format, problem.b.granularity)
                assert b.transposed and (b.source is not None) is problem.prepared
        granularity = out.granularity if isinstance(out, QuantizedTensor) else Granularity.NONE
        assert granularity is problem.out_granularity
        assert epilogue.form == form and epilogue.name() == problem.epilogue
        for name, x in epilogue._asdict().items():
            if isinstance(x, Tensor):
                vector = name in ("bias", "norm_weight", "norm_bias")
                assert x.shape == ((columns,) if vector else (problem.m, columns))
                assert x.dtype == (torch.float32 if vector else torch.bfloat16)
                seen.add(x.data_ptr())
    tensors = sum(isinstance(x, Tensor) for x in made.epilogues[0][0])
    assert len(seen) == tensors * len(made.sets), "every set has its own"


@every_problem
def test_correct_kernels_pass(problem: Problem) -> None:
    kernel = right_kernel(problem)
    assert kernel.supports(problem, HERE) == ACCEPTED
    made = make(problem)
    before = made.fingerprint()
    assert made.check(kernel)[1], "nothing was written yet"
    made.poison()
    assert made.check(kernel)[1], "what is poisoned is not right"
    for call in contender_of(made, kernel).calls:
        call()
    error, wrong = made.check(kernel)
    assert (wrong, error.maximum <= kernel.bound_at(problem)) == ("", True)
    assert made.fingerprint() == before


@every_problem
def test_references_follow_from_the_operands(problem: Problem) -> None:
    made = make(problem)
    kernel = right_kernel(problem)
    case = made.reference(kernel)
    for number in range(min(2, len(made.sets))):
        rows = made.order[number]
        sums = made._across(case.exact[rows]), made._across(case.magnitude[rows])
        found, magnitude = ops.normalized(*sums, made.epilogues[number][0])
        assert torch.allclose(found, exact_outputs(made, number), rtol=1e-9, atol=1e-12)
        assert (magnitude >= 0).all()


def test_a_composition_is_compared_with_its_quantized_operands() -> None:
    problem = make_problem("gemm_norm", (300, 333, 200), epilogue="bias+layer")
    right = KERNELS["torch.norm_emulated_block"]

    def launch(a: Tensor, b: Tensor, out: Any, epilogue: NormEpilogue, _workspace: Any) -> None:
        left = numerics.quantize(a, FP8, Granularity.GROUP)
        weight = numerics.quantize(b.t(), FP8, Granularity.BLOCK).t()
        right.launch(left, weight, out, epilogue, ())

    parts = ("torch.quantize_group", right.name)
    kernel = replace(right, name="some.composition", launch=launch, parts=parts)
    assert kernel.quantizes
    made = make(problem, distribution="X14")
    made.poison()
    for call in contender_of(made, kernel).calls:
        call()
    assert made.check(kernel)[1] == ""
    plain = replace(kernel, parts=())  # one that says it does not quantize is held to the product
    assert made.check(plain)[1].startswith("kernel_err ")


# --- wrong kernels

Fault = Callable[[Kernel, tuple[Any, ...]], None]


def data_of(out: Tensor | QuantizedTensor) -> Tensor:
    return out if isinstance(out, Tensor) else out.data


def without_eps(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    bare = epilogue._replace(norm=epilogue.norm._replace(eps=0.0))
    right.launch(*operands_, bare, workspace)


def with_statistics_of_another_row(right: Kernel, given: tuple[Any, ...]) -> None:
    """z of row 1 in row 2, scaled back to what row 2 would be: only the deviation is wrong."""
    *_, out, epilogue, _workspace = given
    right.launch(*given)
    a, b = given[:2]
    y = numerics.dequantize(a) @ numerics.dequantize(b)
    y = y if epilogue.bias is None else y + epilogue.bias
    centered = y - y.mean(1, keepdim=True)
    deviation = centered.square().mean(1, keepdim=True).add(epilogue.norm.eps).sqrt()
    z = centered[2] / deviation[1]
    out[2] = (z * epilogue.norm_weight + epilogue.norm_bias).to(out.dtype)


def with_statistics_of_half_a_row(right: Kernel, given: tuple[Any, ...]) -> None:
    *_, out, epilogue, _workspace = given
    a, b = given[:2]
    y = numerics.dequantize(a) @ numerics.dequantize(b)
    y = y if epilogue.bias is None else y + epilogue.bias
    half = y[:, : y.shape[1] // 2]
    deviation = (half - half.mean(1, keepdim=True)).square().mean(1, keepdim=True)
    z = (y - y.mean(1, keepdim=True)) / (deviation + epilogue.norm.eps).sqrt()
    out.copy_(z * epilogue.norm_weight + epilogue.norm_bias)


def without_the_last_element(right: Kernel, given: tuple[Any, ...]) -> None:
    data = data_of(given[-3]).view(torch.uint8)
    kept = data[-1, -1].clone()
    right.launch(*given)
    data[-1, -1] = kept


def without_bias(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    right.launch(*operands_, epilogue._replace(bias=None), workspace)


def without_the_norms_bias(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    right.launch(*operands_, epilogue._replace(norm_bias=None), workspace)


def with_rows_of_another(right: Kernel, given: tuple[Any, ...]) -> None:
    """The residual of the row above."""
    *operands_, epilogue, workspace = given
    right.launch(*operands_, epilogue._replace(residual=epilogue.residual.roll(1, 0)), workspace)


def with_the_residual_at_the_other_end(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    other = epilogue._replace(residual_last=not epilogue.residual_last)
    right.launch(*operands_, other, workspace)


def with_a_scale_of_another_row(right: Kernel, given: tuple[Any, ...]) -> None:
    right.launch(*given)
    out = given[-3]
    out.scale[3] *= 1.01


def with_one_wide_scale(right: Kernel, given: tuple[Any, ...]) -> None:
    """A scale twice as large, and data to match: right values, half of the format."""
    right.launch(*given)
    out = given[-3]
    values = numerics.dequantize(out)[5:6]
    out.scale[5] *= 2
    numerics.quantize_static(values, out.format, out.granularity, out.scale[5:6],
                             data=out.data[5:6])  # fmt: skip


def with_a_block_of_twice_the_width(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    norm = epilogue.norm._replace(block=2 * epilogue.norm.block)
    right.launch(*operands_, epilogue._replace(norm=norm), workspace)


def without_its_activation(right: Kernel, given: tuple[Any, ...]) -> None:
    *operands_, epilogue, workspace = given
    right.launch(*operands_, epilogue._replace(activation="none"), workspace)


def wrong_kernel(right: Kernel, fault: Fault) -> Kernel:
    def launch(*given: Any) -> None:
        fault(right, given)

    return replace(right, name=f"wrong.{fault.__name__}", launch=launch)


FAULTS: list[tuple[str, Granularity, str, Fault]] = [
    # X6 has rows of zeros, X12 gradients so small that eps is what they are divided by.
    ("layer", Granularity.NONE, "X12", without_eps),
    ("rms", Granularity.NONE, "X6", without_eps),
    ("block_rms(32)", Granularity.TENSOR, "X12", without_eps),
    ("bias+layer+affine", Granularity.NONE, "X14", with_statistics_of_another_row),
    ("bias+layer+affine", Granularity.NONE, "X1", with_statistics_of_half_a_row),
    ("bias+layer+affine", Granularity.NONE, "X1", without_the_last_element),
    ("bias+rms+hardswish", Granularity.ROW, "X1", without_the_last_element),
    ("bias+block_rms(32)+hardswish", Granularity.TENSOR, "X1", without_the_last_element),
    ("bias+layer", Granularity.NONE, "X1", without_bias),
    ("layer+affine", Granularity.GROUP, "X1", without_the_norms_bias),
    ("residual+layer+affine", Granularity.NONE, "X1", with_rows_of_another),
    ("layer+residual_last", Granularity.NONE, "X1", with_rows_of_another),
    ("layer+residual_last", Granularity.ROW, "X1", with_the_residual_at_the_other_end),
    ("residual+layer", Granularity.NONE, "X1", with_the_residual_at_the_other_end),
    ("layer+affine", Granularity.ROW, "X1", with_a_scale_of_another_row),
    ("layer+affine", Granularity.GROUP, "X1", with_a_scale_of_another_row),
    ("layer+affine", Granularity.ROW, "X1", with_one_wide_scale),
    ("block_rms(32)+hardswish", Granularity.TENSOR, "X1", with_a_block_of_twice_the_width),
    ("block_rms(32)+hardswish", Granularity.NONE, "X1", without_its_activation),
]


@pytest.mark.parametrize(
    ("epilogue", "out", "distribution", "fault"), FAULTS,
    ids=[f"{fault.__name__}-{epilogue}-{out.value}" for epilogue, out, _, fault in FAULTS],
)  # fmt: skip
def test_an_incorrect_kernel_is_found(
    epilogue: str, out: Granularity, distribution: str, fault: Fault
) -> None:
    form = Format.BFLOAT16 if out is Granularity.NONE else FP8
    problem = make_problem("gemm_norm", (70, 192, 64), a=ROW, epilogue=epilogue, out_format=form,
                           out_granularity=out)  # fmt: skip
    right = KERNELS["torch.norm_emulated_row"]
    made = make(problem, distribution=distribution)
    for kernel in (right, wrong_kernel(right, fault), right):
        made.poison()
        for call in contender_of(made, kernel).calls:
            call()
        error, wrong = made.check(kernel)
        assert bool(wrong) is (kernel is not right), f"kernel_err {error.maximum:.3g}"
        assert (error.maximum > 1) is (kernel is not right)


def test_partly_compared_outputs_are_searched_for_unwritten_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operands, "CHECKED_ELEMENTS", 400)
    for granularity in (Granularity.NONE, Granularity.TENSOR, Granularity.GROUP):
        form = Format.BFLOAT16 if granularity is Granularity.NONE else FP8
        problem = make_problem("gemm_norm", (300, 192, 64), a=ROW, epilogue="bias+layer+affine",
                               out_format=form, out_granularity=granularity)  # fmt: skip
        kernel = right_kernel(problem)
        made = make(problem, cold=False)
        made.poison()
        made.call_of(kernel, 0)()
        assert made.check(kernel)[1] == ""
        _, rest = tiled_compare.pieces_to_check((1, 300, 192), 400, seed=0)
        row = rest[len(rest) // 2].rows.start
        for part in written_parts(made.sets[0][-1]):
            small = part.dtype.itemsize == 1
            bits = part.view(torch.uint8) if small else part
            kept = bits[row, -1].clone()
            bits[row, -1] = FP8.nan_byte if small else math.nan
            assert made.check(kernel)[1].endswith("not written or are NaN")
            bits[row, -1] = kept
        assert made.check(kernel)[1] == ""


# --- static scales


def outputs_of(epilogue: NormEpilogue, y: Tensor) -> Tensor:
    return ops.normalized(y.double(), y.double().abs(), epilogue)[0]


@pytest.mark.parametrize(
    "text", ["layer", "rms+affine+relu", "bias+block_rms(16)+hardswish", "layer+affine+silu"]
)
def test_a_norm_bounds_its_static_scale(text: str) -> None:
    """The scale is known without any row, and no value saturates."""
    epilogue = draw_epilogue(norm_form(text), 4, 64, CPU)

    def never() -> Tensor:
        raise AssertionError("rows were asked for")

    scale = fitting_scale(epilogue, 64, FP8, never)
    assert scale == static_scale(
        epilogue.norm, 64, FP8, epilogue.norm_weight, epilogue.norm_bias
    )  # fmt: skip
    for y in (1e6 * torch.eye(4, 64), torch.randn(4, 64)):
        bare = epilogue._replace(bias=None)
        assert float(outputs_of(bare, y).abs().max()) <= scale * FP8.maximum * (1 + 1e-9)


@pytest.mark.parametrize("text", ["none", "layer+gate", "rms+cross", "layer+residual_last", "relu"])
def test_the_static_scale_of_unbounded_outputs_follows_from_their_amax(text: str) -> None:
    problem = make_problem("gemm_norm", (40, 64, 32), a=ROW, epilogue=text, **SMALL,
                           out_granularity=Granularity.TENSOR)  # fmt: skip
    made = make(problem, cold=False)
    out = made.sets[0][-1]
    assert float(out.scale) == pytest.approx(made.static_scale)
    order = torch.argsort(made.order[0])  # drawn row -> where it stands
    assert len(order) == 40
    largest = float(made._some_outputs().abs().max())
    assert made.static_scale == pytest.approx(largest / FP8.maximum)


def test_tensors_of_an_epilogue_do_not_depend_on_each_other() -> None:
    whole = draw_epilogue(norm_form("bias+residual+layer+affine+cross"), 6, 8, CPU)
    less = draw_epilogue(norm_form("layer+affine+cross"), 6, 8, CPU)
    assert torch.equal(whole.norm_weight, less.norm_weight)  # type: ignore[arg-type]
    assert torch.equal(whole.x0, less.x0)  # type: ignore[arg-type]
    assert not torch.equal(whole.x0, whole.x)  # type: ignore[arg-type]
    assert (less.bias, less.residual, less.gate) == (None, None, None)
    part = rows_of(whole, slice(2, 4))
    assert torch.equal(part.residual, whole.residual[2:4])  # type: ignore[arg-type,index]
    assert part.bias is whole.bias and part.norm == whole.norm
    assert draw_epilogue(norm_form("none"), 6, 8, CPU) == NormEpilogue(NO_NORM)


def test_a_row_longer_than_the_sampled_weight_is_normalized_whole() -> None:
    problem = make_problem("gemm_norm", (40, 700, 16), epilogue="layer")
    made = make(problem)
    assert made.w is not None and len(made.w) < 700
    a, b, _ = made.sets[0]
    y = a.double() @ b.double()
    norm = norm_form(made.problem.epilogue).norm
    assert torch.allclose(exact_outputs(made, 0), normalize(y, norm))


@pytest.mark.parametrize(
    ("op", "shape", "fields", "says"),
    [
        ("gemm_norm", (8, 8, 8), {"batch": 2}, "without batch and accumulation"),
        ("gemm_norm", (8, 8, 8), {"accumulate": True}, "without batch and accumulation"),
        ("gemm_norm", (8, 8, 8), {"out_strided": True}, "contiguous"),
        ("gemm_norm", (8, 8, 8), {"a": Operand(Format.BFLOAT16, layout=Layout.COLUMN)},
         "row-major a"),
        ("gemm_norm", (8, 8, 8), {"b": Operand(Format.BFLOAT16, layout=Layout.ROW)},
         "column-major b"),
        ("gemm_norm", (8, 8, 8), {"a": Operand(Format.BFLOAT16, layout=Layout.STRIDED)},
         "row-major a"),
        ("gemm_norm", (8, 8, 8), {"a": Operand(Format.FLOAT32)}, "in bfloat16 or scaled FP8"),
        ("gemm_norm", (8, 8, 8), {"a": Operand(FP8)}, "in bfloat16 or scaled FP8"),
        ("gemm_norm", (8, 8, 8), {"a": ROW, "b": Operand(Format.BFLOAT16, layout=Layout.COLUMN)},
         "both operands quantized"),
        ("gemm_norm", (8, 8, 8), {"b": replace(ROW, layout=Layout.COLUMN)}, "or a prepared weight"),
        ("norm_quantize", (8, 8), {"a": ROW}, "both operands quantized"),
        ("norm_quantize", (8, 8), {"a": Operand(Format.BFLOAT16, layout=Layout.COLUMN)},
         "row-major a"),
    ],
)  # fmt: skip
def test_problems_without_operands_raise(
    op: str, shape: tuple[int, ...], fields: dict[str, Any], says: str
) -> None:
    problem = make_problem(op, shape, epilogue="layer", **fields)
    with pytest.raises(MeasurementError, match=says):
        make(problem)
