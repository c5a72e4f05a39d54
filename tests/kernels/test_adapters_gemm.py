"""Adapters whose kernels quantize, take groups, or call C follow the calling rules of the library.

As in test_adapters.py, stand-ins compute what a library documents and check what it should.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.kernels.adapters import cublaslt, fbgemm, torchao
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import Accepted, Device, Format, Granularity, Layout, Operand, Problem, Rejected
from lokakern.workloads.gemm_cases import fused_case, whole_gemm_cases
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case
from lokakern.workloads.suites import Case
from tests.support.adapters import rowwise_out

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
CPU = torch.device("cpu")
FP8 = Format.E4M3FN
QUANTIZING = sorted(
    kernel.name for kernel in KERNELS.values() if kernel.library and kernel.quantized_as
)
DISTRIBUTIONS = ("X1", "X5")


# --- FBGEMM


def quantize_fp8_per_row(x: Tensor) -> list[Tensor]:
    k = x.shape[1]
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and k % 2 == 0 and k <= 24576
    scale = x.float().abs().amax(dim=1).clamp_min(1 / 512) / 448.0
    data = (x.float() / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return [data, scale]


def rowwise_batched(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, fast: bool,
    output: Tensor,
) -> Tensor:  # fmt: skip
    (batch, m, k), n = x.shape, w.shape[1]
    assert fast and w.shape == (batch, n, k) and output.shape == (batch, m, n)
    assert x_scale.shape == (batch, m) and w_scale.shape == (batch, n)
    for operand in (x, w, x_scale, w_scale, output):
        assert operand.is_contiguous()
    assert not output.data_ptr() % 16 and k % 16 == 0 and n % 8 == 0
    product = x.float() @ w.float().mT * x_scale[:, :, None] * w_scale[:, None, :]
    if bias is not None:
        assert bias.shape == (batch, n) and bias.dtype is torch.float32 and bias.is_contiguous()
        product += bias[:, None, :]
    return output.copy_(product)


# --- torchao and torch


def cast_of(
    cast: torchao.Cast, columns: int, turned: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def launch(x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.shape[1] == columns and x.stride(1) == 1 and x.dtype is torch.bfloat16
        made = cast.exact(x.t() if turned else x)
        assert made.scale is not None and made.data.is_contiguous()
        return made.data, made.scale

    return launch


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, _scale: None,
    dtype: torch.dtype, fast: bool, *, out: Tensor,
) -> None:  # fmt: skip
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous() and b.t().is_contiguous() and out.is_contiguous()
    assert k % 16 == 0 and n % 16 == 0 and not out.data_ptr() % 16 and out.dtype is dtype
    assert a.dtype is torch.float8_e4m3fn or b.dtype is torch.float8_e4m3fn
    if a_scale.numel() > 1 or b_scale.numel() > 1:
        assert a_scale.shape == (m, 1) and b_scale.shape == (1, n)
        assert a_scale.is_contiguous() and b_scale.is_contiguous()
    product = a.float() @ b.float() * a_scale * b_scale
    out.copy_(product if bias is None else product + bias)


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(
        f8f8bf16_rowwise_out=rowwise_out, quantize_fp8_per_row=quantize_fp8_per_row,
        f8f8bf16_rowwise_batched=rowwise_batched,
    )  # fmt: skip
    monkeypatch.setattr(fbgemm, "operators", lambda: operators)
    monkeypatch.setattr(torchao, "cast_of", cast_of)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torchao, "_scaled", lambda: lambda out, a, b: out.mul_(a * b))


def cases(distribution: str) -> Iterator[Case]:
    for epilogue in ("none", "bias"):
        yield from whole_gemm_cases(48, 32, 64, distribution, FP8, epilogue=epilogue)
    yield from whole_gemm_cases(7, 128, 48, distribution, FP8)
    yield from grad_input_cases(48, 32, 64, FP8)
    yield from grad_input_cases(5, 16, 32, FP8)
    yield grad_weight_case(48, 32, 64)
    yield grad_weight_case(160, 16, 32)


def accepts(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel supports a problem, wherever its library is installed."""
    if problem.op != kernel.op or problem.epilogue not in kernel.epilogues:
        return False
    return isinstance(kernel.supports_problem(problem, H200), Accepted)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", QUANTIZING)
def test_products_match_the_quantized_operands_of_the_library(name: str, distribution: str) -> None:
    kernel = KERNELS[name]
    taken = [case for case in cases(distribution) if accepts(kernel, case.problem)]
    assert len(taken) >= 2
    for case in taken:
        operands = operands_of(case.problem, case.distribution, CPU, H200, cold=False)
        contender_of(operands, kernel).calls[0]()
        error, wrong = operands.check(kernel)
        assert not wrong and error.maximum <= kernel.kernel_err_bound, f"{case}: {error} {wrong}"


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", QUANTIZING)
def test_another_quantizer_than_the_librarys_is_incorrect(name: str) -> None:
    """Gradients are below the floor of FBGEMM; scales of torchao are powers of two, or of E5M2."""
    if name == "torchao.tensorwise_fast":
        return  # whose scales differ from ours in the last bit, if at all
    kernel = KERNELS[name]
    plain = dataclasses.replace(kernel, quantized_as=None)
    taken = [case for case in cases("X5") if accepts(kernel, case.problem)]
    case = next(case for case in reversed(taken) if not case.problem.prepared)
    operands = operands_of(case.problem, case.distribution, CPU, H200, cold=False)
    contender_of(operands, kernel).calls[0]()
    assert "kernel_err" in operands.check(plain)[1]


@pytest.mark.parametrize("name", QUANTIZING)
def test_errors_of_library_quantizers_are_separate(name: str) -> None:
    kernel = KERNELS[name]
    assert kernel.accumulation.endswith(f"+{kernel.library}")
    assert kernel.library not in " ".join(
        other.accumulation for other in KERNELS.values() if other.library != kernel.library
    )


def test_rows_under_the_floor_lose_their_bits() -> None:
    """For this reason FBGEMM's own quantizer ruins gradients, and the CUDA quantizer does not."""
    rows = torch.full((1, 64), 2.0**-30, dtype=torch.bfloat16)
    made = fbgemm.quantized_with_floor("x", rows)
    assert made.scale is not None
    assert (made.data.float() * made.scale == 0).all()


@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2])
def test_torchao_rounds_scales_down_to_powers_of_two(form: Format) -> None:
    rows = torch.tensor([[3.0, -1.0], [0.0, 0.0], [1e-20, 0.0]]).bfloat16()
    made = torchao.Cast(Granularity.ROW, form, True).exact(rows)
    assert made.scale is not None
    mantissa, _ = torch.frexp(made.scale)
    assert (mantissa == 0.5).all() and made.scale.isfinite().all()
    assert made.scale[0].item() >= 3.0 / form.maximum > made.scale[0].item() / 2
    assert (made.data[1].float() == 0).all()


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize(
    "change",
    [
        {"a": Operand(Format.FLOAT32)}, {"out_format": Format.FLOAT32}, {"k": 40},
        {"n": 12}, {"out_strided": True},
    ],
)  # fmt: skip
def test_unsupported_operands_of_a_quantizing_kernel_are_rejected(
    name: str, change: dict[str, Any]
) -> None:
    kernel = KERNELS[name]
    good = next(case.problem for case in cases("X1") if accepts(kernel, case.problem))
    answer = kernel.supports_problem(dataclasses.replace(good, **change), H200)
    assert isinstance(answer, Rejected) and answer.reason


def test_only_rows_that_fit_the_quantizer_are_supported() -> None:
    kernel = KERNELS["fbgemm.quantized_rowwise"]
    good = next(case.problem for case in cases("X1") if accepts(kernel, case.problem))
    answer = kernel.supports_problem(dataclasses.replace(good, k=24592), H200)
    assert isinstance(answer, Rejected) and "24576" in answer.reason


# --- groups


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("epilogue", ["none", "bias"])
@pytest.mark.parametrize("groups", [2, 5])
def test_groups_of_equal_rows(groups: int, epilogue: str) -> None:
    kernel = KERNELS["fbgemm.rowwise_batched_fast"]
    case = fused_case(16, 24, 48, Granularity.ROW, "X5", FP8, epilogue, batch=groups)
    assert accepts(kernel, case.problem)
    operands = operands_of(case.problem, "X5", CPU, H200, cold=False)
    contender_of(operands, kernel).calls[0]()
    error, wrong = operands.check(kernel)
    assert not wrong and error.maximum <= kernel.kernel_err_bound


def test_groups_with_different_rows_are_rejected() -> None:
    kernel = KERNELS["fbgemm.rowwise_batched_fast"]
    assert kernel.batched and kernel.lacks({"offsets"}) == "takes no groups of any rows"
    one = fused_case(16, 24, 48, Granularity.ROW, "X1", FP8)
    answer = kernel.supports_problem(one.problem, H200)
    assert isinstance(answer, Rejected) and "groups" in answer.reason


# --- cuBLASLt


class CublasLt:
    """Enough of its interface for products of a column-major world, on the CPU.

    Attribute numbers are those of cublasLt.h; what is not set has the library's default.
    """

    def __init__(self, algorithms: int) -> None:
        self.algorithms = algorithms
        self.made: dict[int, dict[str, Any]] = {}
        self.used: list[int] = []

    def _new(self, pointer: Any, **fields: Any) -> int:
        number = len(self.made) + 1
        self.made[number] = fields
        pointer._obj.value = number
        return 0

    def cublasLtCreate(self, pointer: Any) -> int:
        return self._new(pointer)

    def cublasLtMatmulDescCreate(self, pointer: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(pointer)

    def cublasLtMatrixLayoutCreate(
        self, pointer: Any, kind: int, rows: Any, columns: Any, stride: Any
    ) -> int:
        return self._new(pointer, kind=kind, shape=(rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, pointer: Any) -> int:
        return self._new(pointer)

    def cublasLtMatmulDescSetAttribute(self, made: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.made[made.value][name] = value._obj.value  # type: ignore[index]
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(
        self, _handle: Any, product: Any, _a: Any, _b: Any, _c: Any, _d: Any, _preference: Any,
        asked: int, found: Any, count: Any,
    ) -> int:  # fmt: skip
        assert self.made[product.value][17] and self.made[product.value][18]  # type: ignore[index]
        count._obj.value = min(asked, self.algorithms)
        for place in range(count._obj.value):
            found[place].algorithm.data[0] = place + 1
            found[place].workspace_bytes = 64 * place
        return 0

    def cublasLtMatmul(
        self, _handle: Any, product: Any, one: Any, a: Any, a_layout: Any, b: Any, b_layout: Any,
        zero: Any, c: Any, c_layout: Any, d: Any, d_layout: Any, algorithm: Any, _workspace: Any,
        room: Any, _stream: Any,
    ) -> int:  # fmt: skip
        asked, made = self.made[product.value], self.made
        assert asked[3] == 1 and asked[25] == 1  # A transposed, fast
        assert (one._obj.value, zero._obj.value) == (1.0, 0.0) and c.value == d.value
        place = algorithm._obj.data[0]
        assert room.value >= 64 * (place - 1)
        self.used.append(place)
        left = columns_of(a.value, made[a_layout.value]).float()  # [k, n]
        right = columns_of(b.value, made[b_layout.value]).float()  # [k, m]
        scale = number_at(asked[17]) * number_at(asked[18])
        result = left.t() @ right * scale
        if asked.get(7) == 4:
            assert asked[26] == 14
            n = result.shape[0]
            result += columns_of(asked[8], {"kind": 14, "shape": (n, 1, n)}).float()
        columns_of(d.value, made[d_layout.value]).copy_(result)
        return 0

    def cublasLtMatmulPreferenceDestroy(self, _made: Any) -> int:
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy


KINDS = {28: torch.float8_e4m3fn, 29: torch.float8_e5m2, 14: torch.bfloat16}


def columns_of(pointer: int, layout: dict[str, Any]) -> Tensor:
    """A column-major matrix somewhere in memory."""
    (rows, columns, stride), dtype = layout["shape"], KINDS[layout["kind"]]
    size = ((columns - 1) * stride + rows) * dtype.itemsize
    flat = torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype)
    return flat.as_strided((rows, columns), (1, stride))


def number_at(pointer: int) -> float:
    return ctypes.c_float.from_address(pointer).value


@pytest.fixture(params=[8, 3, 1])
def standing_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in = CublasLt(request.param)
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()
    monkeypatch.setattr(cublaslt, "library", lambda: stand_in)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    yield stand_in
    cublaslt._plan.cache_clear()
    cublaslt._handle.cache_clear()


@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2])
@pytest.mark.parametrize("epilogue", ["none", "bias"])
@pytest.mark.parametrize("rank", cublaslt.RANKS)
def test_cublaslt_runs_another_algorithm(
    standing_in: CublasLt, rank: int, epilogue: str, form: Format
) -> None:
    kernel = KERNELS[f"cublaslt.tensor_fast_{rank}"]
    case = fused_case(37, 32, 48, Granularity.TENSOR, "X5", FP8, epilogue)
    a = dataclasses.replace(case.problem.a, format=form)
    problem = dataclasses.replace(case.problem, a=a)
    assert accepts(kernel, problem)
    operands = operands_of(problem, "X5", CPU, H200, cold=False)
    contender_of(operands, kernel).calls[0]()
    error, wrong = operands.check(kernel)
    assert not wrong and error.maximum <= kernel.kernel_err_bound
    assert standing_in.used == [min(rank, standing_in.algorithms)]


@pytest.mark.usefixtures("standing_in")
def test_cublaslt_writes_outputs_with_any_alignment() -> None:
    kernel = KERNELS["cublaslt.tensor_fast_2"]
    problem = fused_case(16, 32, 48, Granularity.TENSOR, "X5", FP8).problem
    *given, out, bias = operands_of(problem, "X5", CPU, H200, cold=False).sets[0]
    askew = torch.zeros(out.numel() + 3, dtype=out.dtype)[3:].view(out.shape)
    for target in (out, askew):
        kernel.launch(*given, target, bias, kernel.workspace(*given, target, bias))
    assert torch.equal(out, askew)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 24}, "multiples of 16"),
        ({"k": 4112}, "without promotion"),
        ({"a": Operand(FP8, Granularity.ROW)}, "tensor x tensor"),
        ({"a": Operand(FP8, Granularity.TENSOR, alignment=8)}, "16 bytes"),
        ({"a": Operand(FP8, Granularity.TENSOR, Layout.COLUMN)}, "row-major"),
        ({"a": Operand(Format.E4M3FNUZ, Granularity.TENSOR)}, "e4m3fnuz"),
        ({"out_format": Format.FLOAT32}, "bfloat16"),
    ],
)
def test_unsupported_operands_of_cublaslt_are_rejected(change: dict[str, Any], words: str) -> None:
    kernel = KERNELS["cublaslt.tensor_fast_2"]
    good = fused_case(64, 32, 48, Granularity.TENSOR, "X1", FP8).problem
    answer = kernel.supports_problem(dataclasses.replace(good, **change), H200)
    assert isinstance(answer, Rejected) and words in answer.reason


def test_an_error_of_cublaslt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(cublasLtCreate=lambda _pointer: 1)
    cublaslt._handle.cache_clear()
    monkeypatch.setattr(cublaslt, "library", lambda: stand_in)
    with pytest.raises(cublaslt.LaunchError, match="cublasLtCreate of cuBLASLt returned 1"):
        cublaslt._handle(0)
