"""The public functions: results, errors for invalid arguments, autograd and torch.compile."""

from __future__ import annotations

import itertools
import json
import logging
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lokakern
from lokakern import numerics
from lokakern.device import current_device, current_environment
from lokakern.errors import (
    BudgetError,
    DatabaseError,
    DeviceError,
    FormatError,
    MeasurementError,
    MissError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.functional import gemm
from lokakern.functional.checks import gemm_problem
from lokakern.functional.run import run
from lokakern.measure.tiled_compare import compare_bytes
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS, fp8_format, load_kernels
from lokakern.registry.schema.records import AccuracyRecord, TimingRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, misses
from lokakern.selection.arguments import device_of
from lokakern.sweep.resume import distribution_row
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
)
from lokakern.workloads import gemm_gradient_cases
from tests.support.rows_at_once import RowsAtOnce

load_kernels()

WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
FP8_ROW = "torch.quantize_row+torch.emulated_row"


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    misses.LOGGED.clear()
    yield
    dispatcher.use_snapshot(None)
    misses._COUNTS.clear()


def operands(where: str = "cpu", m: int = 48, n: int = 40, k: int = 64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(m, k, device=where).bfloat16()
    return x, torch.randn(n, k, device=where).bfloat16()


class Fp8:
    """Makes FP8 the fastest kernel within a budget of 0.06, and tells its results from bf16's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wins(self, *calls: tuple[Any, ...]) -> None:
        """For calls of gemm with these a, b, bias and out, at their m and at m = 1."""
        rows = []
        for call in calls:
            asked = gemm_problem(*call)
            plain = "torch.fp32" if asked.a.format is Format.FLOAT32 else "torch.bf16"
            for m in sorted({1, asked.m}):
                problem = replace(asked, m=m)
                rows += [(plain, problem, 10.0, 0.003), (FP8_ROW, problem, 5.0, 0.04)]
        write(self._path, device_of(calls[0][0]), rows)
        dispatcher.use_snapshot(load_snapshot([self._path]))

    @staticmethod
    def made(y: torch.Tensor, exact: torch.Tensor) -> bool:
        """Whether the error is that of e4m3 operands: bf16's is under 0.004."""
        assert exact.abs().sum() > 0
        return 0.015 < numerics.measure_errors(y, exact).row_err < 0.06


@pytest.fixture
def fp8(tmp_path: Path) -> Fp8:
    return Fp8(tmp_path / "fp8.sqlite")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gemm_equals_the_product(where: str, dtype: torch.dtype, fp8: Fp8) -> None:
    x, w = (t.to(dtype) for t in operands(where))
    exact = x.double() @ w.t().double()
    fp8.wins((x, w.t()))
    unquantized, y = lokakern.gemm(x, w.t()), lokakern.gemm(x, w.t(), budget=0.06)
    assert unquantized.dtype == y.dtype == dtype
    assert numerics.measure_errors(unquantized, exact).row_err < 0.004
    assert fp8.made(y, exact)
    assert torch.equal(lokakern.gemm(x, w.t(), budget=0.03), unquantized)  # it errs by 0.04


@pytest.mark.parametrize("where", WHERE)
def test_gemm_adds_a_bias_and_writes_to_a_slice(where: str, fp8: Fp8) -> None:
    x, w = operands(where)
    bias = torch.randn(40, device=where).bfloat16()
    whole = torch.full((48, 120), 7.0, device=where, dtype=torch.bfloat16)
    fp8.wins((x, w.t(), bias, whole[:, 40:80]))
    y = lokakern.gemm(x, w.t(), bias=bias, out=whole[:, 40:80], budget=0.06)
    assert y.data_ptr() == whole[:, 40:80].data_ptr()
    exact = x.double() @ w.t().double() + bias.double()
    assert fp8.made(whole[:, 40:80], exact)
    assert (whole[:, :40] == 7).all() and (whole[:, 80:] == 7).all()


@pytest.mark.parametrize("m", [0, 1])
def test_gemm_of_few_rows(m: int, fp8: Fp8) -> None:
    x, w = operands(m=48)
    fp8.wins((x[:1], w.t()))
    few = lokakern.gemm(x[:m], w.t(), budget=0.06)
    assert not m or fp8.made(few, x[:m].double() @ w.t().double())
    assert lokakern.gemm(x[:m], w.t(), budget=0.06).shape == (m, 40)
    prepared = QuantizedTensor(w, None, Granularity.NONE, True)
    assert lokakern.gemm(x[:m], prepared).shape == (m, 40)
    assert lokakern.quantize(x[:m]).shape == (m, 64)
    assert lokakern.dequantize(lokakern.quantize(x[:m])).shape == (m, 64)


def test_gemm_accepts_any_strides(fp8: Fp8) -> None:
    x, w = operands()
    exact = x.double() @ w.t().double()
    lefts = (x, x.t().contiguous().t(), torch.stack([x, x], dim=2)[:, :, 1])
    rights = (w.t(), w.t().contiguous(), torch.stack([w, w], dim=2)[:, :, 0].t())
    pairs = list(itertools.product(lefts, rights))
    for a, b in pairs:
        unquantized = lokakern.gemm(a, b, budget=0.06)
        assert numerics.measure_errors(unquantized, exact).row_err < 0.004
    fp8.wins(*pairs)
    for a, b in pairs:
        assert fp8.made(lokakern.gemm(a, b, budget=0.06), exact)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("where", WHERE)
def test_dequantize_inverts_quantize_up_to_rounding(where: str, granularity: str) -> None:
    x, _ = operands(where, m=200, k=300)
    q = lokakern.quantize(x, granularity)
    expected = numerics.quantize(x, q.format, Granularity(granularity))
    assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert q.scale is not None and torch.equal(q.scale, expected.scale)
    back = lokakern.dequantize(q)
    assert back.dtype == torch.bfloat16
    assert numerics.measure_errors(back, x.double()).row_err < 0.04
    assert torch.equal(lokakern.dequantize(q.t()), back.t())


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_quantize_transpose_equals_quantize_of_x_and_its_transpose(granularity: str) -> None:
    x = torch.randn(200, 300)
    q, q_t = lokakern.quantize_transpose(x, granularity, out_format="e5m2")
    for found, source in ((q, x), (q_t, x.t())):
        expected = numerics.quantize(source, Format.E5M2, Granularity(granularity))
        assert not compare_bytes(found.data, found.scale, expected.data, expected.scale)  # type: ignore[arg-type]
    empty, empty_t = lokakern.quantize_transpose(x[:0], granularity)
    assert (empty.shape, empty_t.shape) == ((0, 300), (300, 0))


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_quantize_transpose_returns_column_sums(granularity: str) -> None:
    for x in (torch.randn(200, 300), torch.randn(300, 200).t()):
        both = lokakern.quantize_transpose(x, granularity)
        *same, sums = lokakern.quantize_transpose(x, granularity, column_sums=True)
        for found, expected in zip(same, both, strict=True):
            assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert (sums.shape, sums.dtype) == ((300,), torch.float32)
        torch.testing.assert_close(sums, x.sum(dim=0))
    *_, empty = lokakern.quantize_transpose(x[:0], granularity, column_sums=True)
    assert torch.equal(empty, torch.zeros(300))
    scale = torch.ones(1)
    *_, sums = lokakern.quantize_transpose(x, "tensor", scale=scale, column_sums=True)
    torch.testing.assert_close(sums, x.sum(dim=0))


@pytest.mark.parametrize("granularity", ["row", "1x128", "128x128"])
def test_scales_may_be_powers_of_two(granularity: str) -> None:
    x = torch.randn(200, 300)
    q = lokakern.quantize(x, granularity, power_of_two=True)
    exact = numerics.quantize(x, q.format, q.granularity, power_of_two_scale=True)
    assert not compare_bytes(q.data, q.scale, exact.data, exact.scale)  # type: ignore[arg-type]
    assert (torch.frexp(q.scale)[0] == 0.5).all()  # type: ignore[arg-type]


def test_static_and_delayed_scaling() -> None:
    first, second = torch.randn(200, 300), 3 * torch.randn(200, 300)
    scale, amax = torch.tensor(0.01), torch.zeros(1)
    for x in (first, second):
        q = lokakern.quantize(x, "tensor", scale=scale, amax=amax)
        exact, _ = numerics.quantize_static(x, q.format, q.granularity, scale.view(1, 1))
        assert torch.equal(q.data.view(torch.uint8), exact.data.view(torch.uint8))
        assert q.scale is not None and q.scale.data_ptr() == scale.data_ptr()
        assert float(amax) >= float(x.abs().max())
    assert float(amax) == float(max(first.abs().max(), second.abs().max()))
    static = lokakern.quantize(first, "tensor", scale=scale)
    _, turned = lokakern.quantize_transpose(first, "tensor", scale=scale)
    assert torch.equal(static.data.t().view(torch.uint8), turned.data.view(torch.uint8))
    assert float(turned.scale) == float(scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "right"), [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")]
)
@pytest.mark.parametrize("where", WHERE)
def test_scaled_gemm(where: str, left: str, right: str) -> None:
    x, w = operands(where, m=64, n=48, k=256)
    a, b = lokakern.quantize(x, left), lokakern.quantize(w, right).t()
    bias = torch.randn(48, device=where)
    for form, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        y = lokakern.scaled_gemm(a, b, out_format=form, bias=bias.to(dtype))
        assert y.dtype == dtype
        exact = x.double() @ w.t().double() + bias.to(dtype).double()
        assert numerics.measure_errors(y, exact).row_err < 0.06


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, w: lokakern.gemm(x, w), ShapeError, "pass weight.t()"),
        (lambda x, w: lokakern.gemm(x[0], w.t()), ShapeError, "two dimensions"),
        (lambda x, w: lokakern.gemm(x, 3), FormatError, "int"),
        (lambda x, w: lokakern.gemm(None, w.t()), FormatError, "NoneType"),
        (lambda x, w: lokakern.gemm(x.double(), w.t().double()), FormatError, "convert"),
        (lambda x, w: lokakern.gemm(x, w.t().float()), FormatError, "convert one"),
        (lambda x, w: lokakern.gemm(x, w.t().to("meta")), DeviceError, "one device"),
        (lambda x, w: lokakern.gemm(x, w.t(), budget=-1), BudgetError, "zero or larger"),
        (lambda x, w: lokakern.gemm(x, w.t(), budget=math.nan), BudgetError, "finite"),
        (lambda x, w: lokakern.gemm(x, w.t(), on_miss="ignore"), UnknownNameError, "measure"),
        (lambda x, w: lokakern.gemm(x, w.t(), distribution="X99", budget=1), UnknownNameError, ""),
        (lambda x, w: lokakern.gemm(x, w.t(), bias=x[0]), ShapeError, "[40]"),
        (lambda x, w: lokakern.gemm(x, w.t(), out=x), ShapeError, "[48, 40]"),
        (
            lambda x, w: lokakern.gemm(x, w.t(), out=x.new_empty((40, 48)).t()),
            ShapeError,
            "columns must be contiguous",
        ),
        (
            lambda x, w: lokakern.gemm(x, w.t(), out=x.new_empty(40).expand(48, 40)),
            ShapeError,
            "overlap",
        ),
        (lambda x, w: lokakern.gemm(x.to_sparse(), w.t()), FormatError, "dense tensor"),
        (
            lambda x, w: lokakern.gemm(x, w.t(), out=x.new_empty(48, 40).requires_grad_()),
            UnsupportedError,
            "out= cannot be differentiated",
        ),
        (lambda x, w: lokakern.gemm(x, lokakern.quantize(w)), ShapeError, ""),
        (lambda x, w: lokakern.gemm(x, lokakern.quantize(w).t()), FormatError, "prepare_weight"),
        (lambda x, w: lokakern.gemm(lokakern.quantize(x).data, w.t()), FormatError, ""),
        (lambda x, w: lokakern.quantize(x, "column"), FormatError, "128x128"),
        (lambda x, w: lokakern.quantize(x, out_format="int8"), FormatError, "e4m3fn"),
        (lambda x, w: lokakern.quantize(x, out_format="bfloat16"), FormatError, "FP8"),
        (lambda x, w: lokakern.quantize(x[0]), ShapeError, "two dimensions"),
        (lambda x, w: lokakern.quantize(x, "tensor", power_of_two=True), FormatError, "row, 1x128"),
        (lambda x, w: lokakern.quantize(x, scale=x[0, :1]), FormatError, "granularity 'tensor'"),
        (lambda x, w: lokakern.quantize(x, "tensor", amax=x), FormatError, "pass scale="),
        (lambda x, w: lokakern.quantize(x, "tensor", scale=x), ShapeError, "one element"),
        (lambda x, w: lokakern.quantize_transpose(x[0]), ShapeError, "two dimensions"),
        (lambda x, w: lokakern.dequantize(x), FormatError, "QuantizedTensor"),
        (
            lambda x, w: lokakern.dequantize(lokakern.quantize(x), "e5m2"),
            FormatError,
            "bfloat16, float16 or float32",
        ),
        (lambda x, w: lokakern.scaled_gemm(x, w), FormatError, "QuantizedTensor"),
        (
            lambda x, w: lokakern.scaled_gemm(lokakern.quantize(x), lokakern.quantize(w)),
            ShapeError,
            "quantize(weight).t()",
        ),
        (
            lambda x, w: lokakern.scaled_gemm(
                lokakern.quantize(x, "row"), lokakern.quantize(w, "tensor").t()
            ),
            UnsupportedError,
            "takes row x row",
        ),
        (lambda x, w: lokakern.prepare_weight(w.t(), 0.1, (1, 2)), ShapeError, "row-major"),
        (lambda x, w: lokakern.prepare_weight(w, 0.1, (5, 2)), ShapeError, "smallest"),
        (lambda x, w: lokakern.prepare_weight(w, -0.1, (1, 2)), BudgetError, "zero"),
    ],
)
def test_bad_input_gets_one_clear_error(call: Any, error: type[Exception], words: str) -> None:
    x, w = operands()
    with pytest.raises(error) as found:
        call(x, w)
    assert words in str(found.value)


def test_a_miss_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    x, w = operands()
    with caplog.at_level(logging.WARNING, "lokakern"):
        for _ in range(3):
            lokakern.gemm(x, w.t(), budget=0.06)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "sweep --shape 48,40,64" in message and "torch.bf16" in message
    misses.save()
    ((problem, count),) = misses.read()
    assert (problem, count) == (make_problem("gemm", (48, 40, 64)), 3)


def test_a_call_without_a_budget_is_not_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    x, w = operands()
    with caplog.at_level(logging.WARNING, "lokakern"):
        lokakern.gemm(x, w.t())
    assert not caplog.records and not misses._COUNTS


def test_on_miss_raise() -> None:
    x, w = operands()
    with pytest.raises(MissError, match="sweep --shape 48,40,64"):
        lokakern.gemm(x, w.t(), budget=0.06, on_miss="raise")


def test_on_miss_measure_is_refused_under_torch_distributed(tmp_path: Path) -> None:
    x, w = operands()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(MeasurementError, match="ranks"):
            lokakern.gemm(x, w.t(), budget=0.06, on_miss="measure")
    finally:
        torch.distributed.destroy_process_group()


def test_a_truncated_file_of_misses_is_read_up_to_the_damage() -> None:
    path = misses.ledger_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    problem = make_problem("gemm", (16, 32, 64), epilogue="bias")
    misses.record(problem, current_device("cpu"))
    misses.save()
    with path.open("a") as file:
        file.write('{"problem": {"op": "ge\n[]\n7\n{"problem": {}, "count": 1}\n')
        whole = json.loads(path.read_text().splitlines()[0])
        for change in ({"k": "abc"}, {"k": None}, {"m": -5}, {"n": 1.5}, {"op": "foo"}):
            file.write(json.dumps({**whole, "problem": {**whole["problem"], **change}}) + "\n")
        file.write(json.dumps({**whole, "count": math.inf}) + "\n" + "[" * 200_000 + "\n")
    assert misses.read() == [(problem, 1)]


@pytest.mark.parametrize("prepared", [False, True])
def test_gradients_equal_the_gradients_of_the_unquantized_product(prepared: bool, fp8: Fp8) -> None:
    x, w = operands()
    bias = torch.randn(40).bfloat16().requires_grad_()
    x.requires_grad_()
    w.requires_grad_()
    b: Any = w.t()
    if prepared:
        q = numerics.quantize(w.detach(), Format.E4M3FN, Granularity.ROW)
        b = QuantizedTensor(q.data, q.scale, q.granularity, True, w)
    fp8.wins((x, b, bias))
    y = lokakern.gemm(x, b, budget=0.06, bias=bias)
    assert fp8.made(y.detach(), torch.addmm(bias, x, w.t()).detach().double())
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, w, bias), grad)
    expected = torch.autograd.grad(torch.addmm(bias, x, w.t()), (x, w, bias), grad)
    assert [g.stride() for g in found] == [g.stride() for g in expected]  # that need no copy
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)
    with pytest.raises(UnsupportedError, match="no_grad"):
        lokakern.gemm(x, b, budget=0.06, out=torch.empty(48, 40, dtype=torch.bfloat16))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_gradients_of_gemm_norm_are_products_within_the_budget(is_compiled: bool, fp8: Fp8) -> None:
    """Both in FP8 where that was measured to be faster, with errors on gradients; the rest is not.

    The bias has the gradient of rows that are multiplied again, unquantized.
    """
    x, w = operands()
    bias = torch.randn(40).bfloat16()
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    grad = torch.randn(48, 40).bfloat16()
    fp8.wins((grad, w.detach()), (grad.t(), x.detach()))
    assert lokakern.functional.gemm_norm.GRADIENTS == gemm_gradient_cases.GRADIENTS

    def layer(*given: torch.Tensor) -> Any:
        a, weight, shift = given
        return lokakern.gemm_norm(
            a, weight.t(), norm="layer", bias=shift, activation="silu", budget=budget
        )

    exact = [t.detach().double().requires_grad_() for t in leaves]
    z = torch.nn.functional.layer_norm(exact[0] @ exact[1].t() + exact[2], (40,))
    wanted = torch.autograd.grad(torch.nn.functional.silu(z), exact, grad.double())
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    for limit, is_fp8 in ((None, False), (0.03, False), (0.06, True)):
        budget = limit
        found = torch.autograd.grad(run(*leaves), leaves, grad)
        assert [fp8.made(one, other) for one, other in zip(found[:2], wanted, strict=False)] == [
            is_fp8, is_fp8
        ]  # fmt: skip
        assert numerics.measure_errors(found[2][None], wanted[2][None]).row_err < 0.01
        assert [g.stride() for g in found] == [t.stride() for t in leaves]
    none = torch.autograd.grad(layer(x[:0], w, bias), (w, bias), grad[:0])  # not even a product
    assert not any(g.any() for g in none)
    again = torch.autograd.grad(layer(*leaves), leaves, grad, create_graph=True)
    assert not fp8.made(again[0].detach(), wanted[0])


def test_a_weight_that_stays_unquantized_has_a_gradient() -> None:
    """Of x only, of the weight only: the weight is the data of what prepare_weight made."""
    for trained in ("x", "w"):
        x, w = operands()
        (x if trained == "x" else w).requires_grad_()
        b = lokakern.prepare_weight(w, 0.06, (1, 64))  # nothing was measured
        assert b.granularity is Granularity.NONE and b.source is None
        lokakern.gemm(x, b).sum().backward()
        lokakern.gemm_norm(x, b, norm="layer", residual=torch.ones(48, 40).bfloat16())
        with torch.no_grad():
            assert not lokakern.gemm(x, b).requires_grad
        found = x.grad if trained == "x" else w.grad
        assert found is not None and found.abs().sum() > 0


def test_torch_compile_does_not_fix_the_kernel_in_the_graph(fp8: Fp8) -> None:
    x, w = operands()
    fp8.wins((x, w.t()))
    w.requires_grad_()

    def layer(a: torch.Tensor) -> torch.Tensor:
        return torch.relu(lokakern.gemm(a, w.t(), budget=0.06))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert fp8.made(compiled(x).detach(), torch.relu(x.double() @ w.t().double()).detach())
    for m in (48, 7, 1):
        torch.testing.assert_close(compiled(x[:m]), layer(x[:m]))
    compiled(x).sum().backward()
    compiled_grad, w.grad = w.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(compiled_grad, w.grad)


def test_torch_compile_of_a_prepared_weight(fp8: Fp8) -> None:
    x, w = operands()
    q = numerics.quantize(w, Format.E4M3FN, Granularity.ROW)
    b = QuantizedTensor(q.data, q.scale, q.granularity, True, w)

    def layer(a: torch.Tensor) -> torch.Tensor:
        return lokakern.gemm(a, b, budget=0.06)

    fp8.wins((x, b))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    assert fp8.made(compiled(x), x.double() @ w.t().double())


def test_the_custom_op_passes_opcheck() -> None:
    x, w = operands(m=8, n=8, k=16)
    arguments = (x, w.t(), None, None, None, "none/tensor", [], [], "bf16")
    torch.library.opcheck(torch.ops.lokakern.gemm.default, arguments)


def test_run_raises_if_the_kernel_rejects_the_operands() -> None:
    from lokakern.registry.register import kernel_named

    x, w = operands()
    with pytest.raises(UnsupportedError, match="float32"):
        run(kernel_named("torch.fp32"), x, w.t())
    y = run(kernel_named(FP8_ROW), x, w.t())
    assert 0.02 < numerics.measure_errors(y, x.double() @ w.t().double()).row_err < 0.05


def test_a_choice_for_this_device_is_callable(fp8: Fp8) -> None:
    x, w = operands()
    choice = lokakern.dispatch("gemm", (48, 40, 64), 0.06, device=current_device("cpu"))
    assert choice.callable
    torch.testing.assert_close(choice(x, w.t()), x @ w.t())
    fp8.wins((x, w.t()))
    choice = lokakern.dispatch("gemm", (48, 40, 64), 0.06, device=current_device("cpu"))
    assert choice.kernel == FP8_ROW
    assert fp8.made(choice(x, w.t()), x.double() @ w.t().double())


def test_scales_or_data_with_unsupported_strides_raise() -> None:
    """Kernels take strides for granted; anything else would be silently wrong."""
    x, _ = operands(m=64, k=512)
    by_row, by_group = lokakern.quantize(x), lokakern.quantize(x, "1x128")
    assert by_row.scale is not None and by_group.scale is not None
    for data, scale, granularity in (
        (by_row.data[:, :256], by_row.scale, Granularity.ROW),
        (by_row.data[::2], by_row.scale[::2], Granularity.ROW),
        (by_group.data, by_group.scale.contiguous(), Granularity.GROUP),
    ):
        with pytest.raises(ShapeError, match="packed"):
            QuantizedTensor(data, scale, granularity)
        packed = QuantizedTensor.packed(data, scale, granularity)
        expected = data.double() * numerics.spread_scale(scale, granularity, *data.shape).double()
        assert torch.equal(numerics.dequantize(packed, torch.float64), expected)


def test_cached_tables_do_not_depend_on_earlier_calls() -> None:
    """One row hides the outer stride; more rows must not reuse its plan."""
    base = torch.randn(8, 33).bfloat16()
    w = torch.randn(16, 32).bfloat16()
    lokakern.gemm(base[:1, :32], w.t(), budget=0.06)
    lokakern.gemm(base[:3, :32], w.t(), budget=0.06)
    alignments = sorted(p.problem.a.alignment for p in gemm._PLANS.values())
    assert alignments == [2, 16]


def test_without_a_budget_no_database_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_text("no database")
    monkeypatch.setenv("LOKAKERN_DB", str(broken))
    dispatcher.use_snapshot(None)
    x, w = operands()
    torch.testing.assert_close(lokakern.gemm(x, w.t()), x @ w.t())
    with pytest.raises(DatabaseError, match=r"broken\.sqlite"):
        lokakern.gemm(x, w.t(), budget=0.06)
    assert broken.read_text() == "no database"


def test_budgets_can_be_pickled() -> None:
    budget = lokakern.ErrorBudget(row_err=0.06, sqnr_db=20.0)
    again = pickle.loads(pickle.dumps(budget))
    assert again == budget and again in {budget}


def test_an_epilogue_without_a_kernel_raises() -> None:
    with pytest.raises(UnknownNameError, match="epilogue is 'relu'; expected one of bias, none"):
        lokakern.dispatch("gemm", (48, 40, 64), device=current_device("cpu"), epilogue="relu")


def test_compiled_calls_raise_the_errors_of_eager_calls() -> None:
    x, w = operands(m=64, n=64, k=64)
    q = numerics.quantize(w, Format.E4M3FN, Granularity.ROW)
    wrong = QuantizedTensor(q.data, q.scale, q.granularity, False, w)
    for call in (
        lambda: lokakern.gemm(x, wrong, budget=0.06),
        lambda: lokakern.gemm(x, w.t(), out=torch.empty(64, 64)),
    ):
        with pytest.raises(Exception, match=r"quantize|expected"):
            torch.compile(call, backend="eager")()


def test_prepare_weight_chooses_the_fastest_granularity_over_the_range(tmp_path: Path) -> None:
    """Hand-made rows for the device here: 128x128 scales win at small m, row scales overall."""
    x, w = operands(m=64, n=256, k=256)
    device = device_of(x)
    path = tmp_path / "rows.sqlite"
    times = {Granularity.TENSOR: (9.0, 9.0), Granularity.ROW: (6.0, 5.0),
             Granularity.BLOCK: (4.0, 15.0)}  # fmt: skip
    write_rows(path, device, times)
    dispatcher.use_snapshot(load_snapshot([path]))
    chosen = lokakern.prepare_weight(w, 0.06, (1024, 4096))
    assert chosen.granularity is Granularity.ROW
    assert chosen.source is w and chosen.budget == lokakern.ErrorBudget(row_err=0.06)
    assert lokakern.prepare_weight(w, 0.06, (1024, 1024)).granularity is Granularity.BLOCK
    assert lokakern.prepare_weight(w, 0.03, (1024, 4096)).granularity is Granularity.NONE
    assert lokakern.prepare_weight(w, 0.06, (8192, 9000)).granularity is Granularity.NONE
    assert not misses._COUNTS


def test_prepare_weight_pads_once_where_padded_rows_are_chosen(tmp_path: Path) -> None:
    x, w = operands(m=64, n=40, k=39)
    device = device_of(x)
    path = tmp_path / "rows.sqlite"
    weight = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)
    fp8 = "torch.quantize_row+torch.emulated_row"
    rows = []
    for m, padded_us in ((64, 5.0), (1024, 30.0)):
        plain = make_problem("gemm", (m, 40, 39))
        prepared = make_problem("gemm", (m, 40, 39), b=weight, prepared=True)
        rows += [(name, problem, us, error) for problem in (plain, prepared)
                 for name, us, error in (("torch.bf16", 20.0, 0.003),
                                         ("torch.bf16_padded", padded_us, 0.003))]  # fmt: skip
        rows.append((fp8, prepared, 10.0, 0.04))
    write(path, device, rows)
    dispatcher.use_snapshot(load_snapshot([path]))
    for m_range, form in (((64, 64), Granularity.NONE), ((64, 1024), Granularity.ROW)):
        prepared_weight = lokakern.prepare_weight(w, 0.06, m_range)
        assert prepared_weight.granularity is form and prepared_weight.padded is not None
        assert prepared_weight.padded.shape == (40, 40)
        y = lokakern.gemm(x, prepared_weight)
        wide = torch.nn.functional.pad(x, (0, 1)), torch.nn.functional.pad(w, (0, 1))
        assert torch.equal(y, wide[0] @ wide[1].t())
    assert lokakern.prepare_weight(w, 0.06, (1024, 1024)).padded is None
    assert torch.equal(lokakern.gemm(x, w.t(), budget=0.06), wide[0] @ wide[1].t())
    assert not misses._COUNTS


def write_rows(path: Path, device: Any, times: dict[Granularity, tuple[float, float]]) -> None:
    """Prepared weights by granularity, at m = 1024 and 4096; errors are measured at one m."""
    rows = []
    for granularity, latencies in times.items():
        suffix = Granularity.GROUP if granularity is Granularity.BLOCK else granularity
        fp8 = f"torch.quantize_{suffix.suffix}+torch.emulated_{granularity.suffix}"
        weight = Operand(Format.E4M3FN, granularity, Layout.COLUMN)
        for m, us in zip((1024, 4096), latencies, strict=True):
            problem = make_problem("gemm", (m, 256, 256), b=weight, prepared=True)
            rows += [("torch.bf16", problem, 10.0, 0.003), (fp8, problem, us, 0.04)]
    write(path, device, rows)


def write(path: Path, device: Any, rows: list[tuple[str, Problem, float, float]]) -> None:
    """A database of made-up times and row errors: kernel, problem, microseconds, error."""
    ones = torch.ones(4, 4, dtype=torch.float64)
    regime = dispatcher.default_regime(device)
    run = RowsAtOnce.create(path, suite="test", command="test", harness_digest="0" * 64)
    known = set()
    with run:
        for name, problem, latency, error in rows:
            kernel = KERNELS[name]
            run.add_timing(
                kernel, problem, distribution_row("X1"), device, current_environment(), regime,
                TimingRecord(
                    status="ok", latency_us_p20=latency, latency_us_p50=latency,
                    latency_us_p80=latency, replay_count=9, void_count=0,
                    calls_per_replay=1, kernel_err=0.5, kernel_err_row_p99=0.5,
                ),
            )  # fmt: skip
            asked = accuracy_problem(problem, fp8_format(device))
            if (name, asked) in known:
                continue
            known.add((name, asked))
            for distribution in REALISTIC_DISTRIBUTIONS:
                for seed in range(3):
                    run.add_accuracy(
                        kernel, asked, distribution_row(distribution), device.architecture,
                        current_environment(),
                        AccuracyRecord(
                            status="ok", seed=seed, rows=4, kernel_err=0.5,
                            errors=numerics.measure_errors(ones * (1 + error), ones),
                            kernel_err_row_p99=0.5, flushed_share=0.0, saturated_share=0.0,
                        ),
                    )  # fmt: skip
