"""Public `scaled_gemm`: epilogues, groups, slices and errors for invalid arguments."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lokakern
from lokakern import numerics
from lokakern.device import current_device
from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import (
    DeviceError,
    FormatError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.registry import ops
from lokakern.registry.register import KERNELS, PROMOTED_KERNEL_ERR_BOUND, fp8_format
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, kernel_policy
from lokakern.types import (
    PLAIN,
    Device,
    Epilogue,
    Format,
    Granularity,
    QuantizedTensor,
    empty_data,
)

WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
where_there_is = pytest.mark.parametrize("where", WHERE)
# Granularities that go together, with sizes of any remainder.
PAIRS = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")]
SIZES = [(1, 8, 13), (33, 24, 39), (65, 130, 312), (40, 16, 648), (128, 64, 720)]
ROW = Granularity.ROW
SEEDS = (0,)


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    yield
    dispatcher.use_snapshot(None)


def drawn(where: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=where).to(dtype)


def operands(
    where: str, m: int, n: int, k: int, left: str = "row", right: str = "row"
) -> tuple[QuantizedTensor, QuantizedTensor]:
    a = lokakern.quantize(drawn(where, m, k), left)
    return a, lokakern.quantize(drawn(where, n, k), right).t()


def assert_right(
    found: Tensor | QuantizedTensor,
    a: Any,
    b: QuantizedTensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    before: Tensor | None = None,
) -> None:
    out, scale = (found.data, found.scale) if isinstance(found, QuantizedTensor) else (found, None)
    exact, size = ops.finished(*ops.scaled_sums(a, b, epilogue), bias, epilogue, before)
    roundoff = Format.of(out.dtype).unit_roundoff
    bound = 1.0 if out.device.type == "cpu" else PROMOTED_KERNEL_ERR_BOUND
    error = numerics.kernel_error(out, exact, bound * size, roundoff, scale)
    assert error.maximum <= 1 + roundoff  # the bound is of the sums: outputs are rounded once


@where_there_is
@pytest.mark.parametrize("granularities", PAIRS, ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_granularity_with_any_remainder_of_sizes(
    where: str, granularities: tuple[str, str], sizes: tuple[int, int, int]
) -> None:
    a, b = operands(where, *sizes, *granularities)
    assert_right(lokakern.scaled_gemm(a, b), a, b)
    assert_right(lokakern.scaled_gemm(a, b, out_format="float32"), a, b)


def test_offsets_of_one_group_need_a_kernel_with_groups() -> None:
    from lokakern.functional.run import run

    a, b = operands("cpu", 8, 8, 16)
    emulation = replace(KERNELS["torch.emulated_row"], batched=False)
    with pytest.raises(UnsupportedError, match="takes no groups"):
        run(emulation, a, b, offsets=i32(0, 8))


@where_there_is
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("last", [*ACTIVATIONS, "cross"])
def test_epilogues_of_scaled_gemm(where: str, last: str, with_bias: bool, small: bool) -> None:
    m, n, k = 65, 40, 200
    a, b = operands(where, m, n, k)
    bias = drawn(where, n) if with_bias else None
    wide = drawn(where, m, 3 * n)
    x0, x = wide[:, :n], wide[:, 2 * n :]  # slices of a concatenation
    given: dict[str, Any] = {"cross": (x0, x)} if last == "cross" else {"activation": last}
    epilogue = Epilogue(x0=x0, x=x) if last == "cross" else Epilogue(last)
    found = lokakern.scaled_gemm(a, b, bias=bias, out_scale=0.25 if small else None, **given)
    if small:
        assert isinstance(found, QuantizedTensor)
        assert found.format is fp8_format(current_device(where))
        assert found.granularity is Granularity.TENSOR
        assert (found.scale == 0.25).all()
    assert_right(found, a, b, bias, epilogue)


def test_results_have_no_gradient() -> None:
    """As those of kernels on a GPU and of compiled calls."""
    a, b = lokakern.quantize(torch.randn(8, 16)), lokakern.quantize(torch.randn(24, 16)).t()
    bias, x = (torch.zeros(size, requires_grad=True) for size in (24, (8, 24)))
    for options in ({"bias": bias.bfloat16()}, {"cross": (x.bfloat16(), x.bfloat16())}):
        y = lokakern.scaled_gemm(a, b, **options)
        assert isinstance(y, Tensor) and not y.requires_grad
    out = torch.zeros(8, 24, requires_grad=True)
    lokakern.scaled_gemm(a, b, accumulate=True, out=out)
    assert out.requires_grad and out.is_leaf and out.any()


@where_there_is
def test_an_fp8_output_saturates_and_keeps_nan(where: str) -> None:
    a, b = operands(where, 48, 33, 64)
    a.data.view(torch.uint8)[5, 7] = a.format.nan_byte
    scale = torch.full((1, 1), 0.01, device=where)
    found = lokakern.scaled_gemm(a, b, out_scale=scale, out_format="e5m2", activation="relu")
    assert isinstance(found, QuantizedTensor) and found.format is Format.E5M2
    assert found.data.stride() == (48, 1)
    found = lokakern.scaled_gemm(a, b, out_scale=scale)
    assert isinstance(found, QuantizedTensor)
    value = found.data.float()
    assert value[5].isnan().all() and not value[6].isnan().any()
    assert (value.nan_to_num().abs() == found.format.maximum).any()
    assert_right(found, a, b)


@where_there_is
def test_accumulate_adds_to_a_slice_of_out(where: str) -> None:
    for left, right in (("row", "row"), ("1x128", "1x128")):
        a, b = operands(where, 40, 24, 300, left, right)
        whole = drawn(where, 40, 72, dtype=torch.float32)
        before = whole.clone()
        found = lokakern.scaled_gemm(a, b, accumulate=True, out=whole[:, 24:48])
        assert found is not whole and isinstance(found, Tensor)
        assert_right(found, a, b, before=before[:, 24:48])
        assert torch.equal(whole[:, :24], before[:, :24])
        assert torch.equal(whole[:, 48:], before[:, 48:])


@where_there_is
@pytest.mark.parametrize("formats", [("e5m2", "e4m3fn"), ("e4m3fn", "e5m2")], ids="-".join)
def test_gradients_in_e5m2(where: str, formats: tuple[str, str]) -> None:
    a = lokakern.quantize(drawn(where, 40, 144), "row", out_format=formats[0])
    b = lokakern.quantize(drawn(where, 24, 144), "row", out_format=formats[1]).t()
    assert_right(lokakern.scaled_gemm(a, b), a, b)


@where_there_is
@pytest.mark.parametrize("granularities", PAIRS, ids="-".join)
def test_each_group_multiplies_its_weight(where: str, granularities: tuple[str, str]) -> None:
    m, n, k, groups = 24, 128, 200, 3
    a, b = operands(where, groups * m, groups * n, k, *granularities)
    bias = drawn(where, n)
    found = lokakern.scaled_gemm(a, b, groups=groups, bias=bias, activation="relu")
    assert_right(found, a, b, bias, Epilogue("relu", groups=groups))
    assert isinstance(found, Tensor) and found.shape == (groups * m, n)


@where_there_is
@pytest.mark.parametrize(
    "ends", [(0, 10, 10, 47, 60), (5, 5, 30, 30, 50), (0, 60, 60, 60, 60)], ids=str
)
def test_offsets_define_the_rows_of_groups(where: str, ends: tuple[int, ...]) -> None:
    """Groups may be empty; rows outside of all keep what they hold."""
    a, b = operands(where, 60, 4 * 24, 200)
    offsets = torch.tensor(ends, dtype=torch.int32, device=where)
    out = torch.full((60, 24), 7.0, dtype=torch.bfloat16, device=where)
    lokakern.scaled_gemm(a, b, offsets=offsets, out=out)
    exact, size = ops.scaled_sums(a, b, Epilogue(groups=4, offsets=offsets))
    inside = slice(ends[0], ends[-1])
    error = numerics.kernel_error(out[inside], exact[inside], size[inside], 2.0**-8)
    assert error.maximum <= (1.0 if where == "cpu" else PROMOTED_KERNEL_ERR_BOUND)
    assert (out[: ends[0]] == 7).all() and (out[ends[-1] :] == 7).all()


@where_there_is
def test_projections_of_one_input_equal_a_product_with_stacked_weights(where: str) -> None:
    m, k, widths = 200, 64, [8, 1, 24]
    weights = [drawn(where, n, k) for n in widths]
    a = lokakern.quantize(drawn(where, m, k), "row")
    b = lokakern.quantize(torch.cat(weights), "row").t()
    out = torch.full((m, sum(widths) + 7), math.nan, dtype=torch.bfloat16, device=where)
    lokakern.scaled_gemm(a, b, out=out[:, : sum(widths)])
    assert out[:, sum(widths) :].isnan().all()
    for columns, weight in zip(out.split([*widths, 7], dim=1), weights, strict=False):
        assert_right(columns, [a], lokakern.quantize(weight, "row").t())


@where_there_is
def test_slices_along_k_equal_the_whole_operand(where: str) -> None:
    m, n = 40, 24
    parts = [128, 256, 39]
    x, w = drawn(where, m, sum(parts)), drawn(where, n, sum(parts))
    slices = [lokakern.quantize(part.contiguous(), "1x128") for part in x.split(parts, dim=1)]
    for right in ("128x128", "1x128"):
        b = lokakern.quantize(w, right).t()
        assert_right(lokakern.scaled_gemm(slices, b, activation="silu"), slices, b,
                     epilogue=Epilogue("silu"))  # fmt: skip
    whole = lokakern.quantize(x, "row")
    shared = []
    for part in whole.data.split(parts, dim=1):
        data = empty_data(m, part.shape[1], part.dtype, part.device)
        data.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
        shared.append(QuantizedTensor(data, whole.scale, ROW))
    b = lokakern.quantize(w, "row").t()
    assert_right(lokakern.scaled_gemm(shared, b), whole, b)
    assert_right(lokakern.scaled_gemm([whole], b), whole, b)


def test_a_file_of_an_earlier_version_is_laid_out_when_it_is_loaded() -> None:
    x = lokakern.quantize(drawn("cpu", 4, 1000))
    old = copy.copy(x)
    padded = functional.pad(x.data.view(torch.uint8), (0, 8)).view(x.data.dtype)
    object.__setattr__(old, "data", padded[:, :1000])  # the pitch before that of cache lines
    _ = old.signature, old.transpose
    file = io.BytesIO()
    torch.save(old, file)
    again: QuantizedTensor = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert old.data.stride(0) == 1008 and again.data.stride(0) == 1024
    assert torch.equal(lokakern.dequantize(again), lokakern.dequantize(x))
    assert again.transpose[0].data_ptr() == again.data.data_ptr()
    assert again.signature is x.signature


def test_fp8_rows_of_any_length_are_padded_or_contiguous() -> None:
    pitches = {1: 16, 13: 16, 16: 16, 39: 48, 512: 512, 515: 640, 656: 656, 719: 768}
    for rows, (columns, pitch) in itertools.product((1, 5), pitches.items()):
        x = drawn("cpu", rows, columns)
        padded = lokakern.quantize(x)
        assert padded.data.stride() == (pitch, 1) and padded.data.data_ptr() % 16 == 0
        dense = QuantizedTensor(padded.data.contiguous(), padded.scale, ROW)
        for q in (padded, dense):
            assert torch.equal(lokakern.dequantize(q), lokakern.dequantize(padded))
            again = QuantizedTensor.packed(q.data, q.scale, ROW)  # type: ignore[arg-type]
            assert again.data.stride(0) == pitch or rows == 1
            moved = q.to("cpu")
            assert moved.data.stride(0) == pitch or rows == 1
            assert torch.equal(moved.data.view(torch.uint8), q.data.view(torch.uint8))
            b = lokakern.quantize(drawn("cpu", 8, columns)).t()
            assert_right(lokakern.scaled_gemm(q, b), q, b)
    with pytest.raises(ShapeError, match="packed"):
        wide = lokakern.quantize(drawn("cpu", 4, 64))
        QuantizedTensor(wide.data[:, :32], wide.scale, ROW)


def test_batch_invariant_calls_need_batch_invariant_kernels() -> None:
    a, b = operands("cpu", 8, 8, 16)
    with pytest.raises(UnsupportedError, match="bits may depend on the number of rows"):
        lokakern.scaled_gemm(a, b, batch_invariant=True)


def test_empty_outputs() -> None:
    a, b = operands("cpu", 8, 8, 16)
    none = QuantizedTensor(a.data[:0], torch.empty(0, 1), ROW)
    assert lokakern.scaled_gemm(none, b).shape == (0, 8)
    small = lokakern.scaled_gemm(none, b, out_scale=1.0)
    assert isinstance(small, QuantizedTensor) and small.shape == (0, 8)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def nothing(rows: int) -> QuantizedTensor:
    return lokakern.quantize(X.new_empty(rows, 0), "row")


def scaled(**given: Any) -> Callable[[QuantizedTensor, QuantizedTensor], Any]:
    return lambda a, b: lokakern.scaled_gemm(a, b, **given)


X = torch.zeros(12, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (scaled(activation="elu"), UnknownNameError, "expected one of none, relu, hardswish"),
        (scaled(activation="relu", cross=(X, X)), UnknownNameError, "choose one"),
        (scaled(cross=X), ShapeError, "cross must be (x0, x)"),
        (scaled(cross=(X, X[:1])), ShapeError, "x of cross is [1, 16]"),
        (scaled(cross=(X.float(), X)), ShapeError, "x0 of cross is [12, 16] torch.float32"),
        (scaled(cross=(X.t().contiguous().t(), X)), ShapeError, "columns contiguous"),
        (scaled(cross=(X.to("meta"), X)), DeviceError, "one device"),
        (scaled(accumulate=True), ShapeError, "pass out="),
        (scaled(accumulate=True, out=X), ShapeError, "expected [12, 16] torch.float32"),
        (scaled(accumulate=True, out=X, out_format="bfloat16"), FormatError, "float32 only"),
        (scaled(out_format="e4m3fn"), FormatError, "needs out_scale="),
        (scaled(out_format="bfloat16", out_scale=1.0), FormatError, "takes no out_scale"),
        (scaled(accumulate=True, out=X, out_scale=1.0), FormatError, "float32 only"),
        (scaled(out_scale=torch.ones(2)), ShapeError, "expected float32 [1, 1]"),
        (scaled(out_scale=torch.ones(1).double()), ShapeError, "torch.float64"),
        (scaled(out_scale=torch.ones(1, 1, device="meta")), DeviceError, "one device"),
        (scaled(out_scale="1"), FormatError, "out_scale is '1'; expected a finite float32"),
        (scaled(out_scale=True), FormatError, "out_scale is True"),
        (scaled(out_scale=[1.0]), FormatError, "out_scale is [1.0]"),
        (scaled(out_scale=0), FormatError, "out_scale is 0"),
        (scaled(out_scale=-1.0), FormatError, "out_scale is -1.0"),
        (scaled(out_scale=math.nan), FormatError, "out_scale is nan"),
        (scaled(out_scale=math.inf), FormatError, "out_scale is inf"),
        (scaled(out_scale=1e-60), FormatError, "out_scale is 1e-60"),
        (scaled(out_scale=10**400), FormatError, "expected a finite float32"),
        (scaled(bias=torch.ones(16), out_scale=1.0), ShapeError, "[16] torch.bfloat16"),
        (scaled(groups=5), ShapeError, "a has 12 rows and b has 16 columns for 5 groups"),
        (scaled(groups=0), ShapeError, "integer >= 1"),
        (scaled(groups=True), ShapeError, "integer >= 1"),
        (scaled(groups=8), ShapeError, "pass offsets="),
        (scaled(offsets=[0, 12]), ShapeError, "offsets is list"),
        (scaled(offsets=i32(0)), ShapeError, "int32 [groups + 1]"),
        (scaled(offsets=i32(0, 12).long()), ShapeError, "torch.int64"),
        (scaled(offsets=i32(0, 12), groups=2), ShapeError, "offsets define 1"),
        (scaled(offsets=i32(0, 12, 12, 12)), ShapeError, "b has 16 columns for 3 groups"),
        (scaled(offsets=i32(0, 12).to("meta")), DeviceError, "one device"),
        (lambda a, b: lokakern.scaled_gemm([], b), FormatError, "a is no slices"),
        (lambda a, b: lokakern.scaled_gemm([a, X], b), FormatError, "a[1] is Tensor"),
        (lambda a, b: lokakern.scaled_gemm([a, a], b), ShapeError, "slices of a make [12, 64]"),
        (
            lambda a, b: lokakern.scaled_gemm([a, a], lokakern.quantize(X.new_ones(16, 64)).t()),
            ShapeError,
            "a[0] has 32 columns",
        ),
        (lambda a, b: lokakern.scaled_gemm(a.t(), b), ShapeError, "quantize(x)"),
        (
            lambda a, b: lokakern.scaled_gemm(nothing(12), nothing(16).t()),
            ShapeError,
            "a is [12, 0]; k must be at least 1",
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise_one_clear_error(
    call: Any, error: type[Exception], words: str
) -> None:
    a, b = operands("cpu", 12, 16, 32)
    with pytest.raises(error) as found:
        call(a, b)
    assert words in str(found.value)


def test_incompatible_slices_raise() -> None:
    wide = [lokakern.quantize(drawn("cpu", m, 128), g) for m, g in
            ((12, "row"), (12, "row"), (12, "1x128"), (8, "1x128"))]  # fmt: skip
    b = lokakern.quantize(drawn("cpu", 16, 256)).t()
    for a, error, words in (
        (wide[:2], FormatError, "different row scales"),
        (wide[1:3], FormatError, "quantized alike"),
        (wide[2:], ShapeError, "a[0] has 12 rows and a[1] 8"),
        ([nothing(12), *wide[:2]], ShapeError, "a[0] has no columns"),
    ):
        with pytest.raises(error) as found:
            lokakern.scaled_gemm(a, b)
        assert words in str(found.value)


def test_run_accepts_an_epilogue() -> None:
    from lokakern.functional.run import run
    from lokakern.registry.register import kernel_named

    a, b = operands("cpu", 12, 16, 32)
    kernel = kernel_named("torch.emulated_row")
    found = run(kernel, a, b, activation="relu", out_scale=0.5)
    assert_right(found, a, b, epilogue=Epilogue("relu"))
    with pytest.raises(UnsupportedError, match=r"torch.emulated_row: .* its bits may depend"):
        run(KERNELS["torch.emulated_row"], a, b, batch_invariant=True)


def test_emulation_on_fp8_hardware_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what each of the fast kernels has against a problem; on a CPU nothing is said."""
    a, b = operands("cpu", 12, 16, 32)
    longer, _ = operands("cpu", 24, 16, 32)
    with caplog.at_level(logging.WARNING, "lokakern"):
        lokakern.scaled_gemm(a, b)
        assert not caplog.records
        h200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
        monkeypatch.setattr(kernel_policy, "device_of", lambda _: h200)
        monkeypatch.setattr(dispatcher, "devices_here", lambda: {h200})
        monkeypatch.setattr(kernel_policy, "_WARNED", set())
        for name, kernel in list(KERNELS.items()):
            if kernel.op == "scaled_gemm" and kernel.language != "torch":
                monkeypatch.delitem(KERNELS, name)
        for left in (a, a, longer):
            lokakern.scaled_gemm(left, b, out_format="float32")
        assert len(caplog.records) == 1
        words = caplog.text
        assert "scaled_gemm m=12 n=16 k=32" in words and "torch.emulated_row emulates it" in words
        assert "on NVIDIA H200" in words
        assert "torch.scaled_mm_row: writes bfloat16 here, not float32" in words
        assert "torch.scaled_mm_tensor: takes tensor x tensor scales" in words
        lokakern.scaled_gemm(a, b, activation="relu")
        assert len(caplog.records) == 2
        assert "torch.scaled_mm_row: has no epilogue 'relu'" in caplog.records[1].getMessage()
