"""`convert(kernels=...)`: named kernels on a CPU, against products of quantized operands."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import mods, numerics
from lokakern.conversion import forced
from lokakern.conversion.convert import Conversion
from lokakern.conversion.forced import FORCED, forced_by, forced_routes
from lokakern.device import current_device
from lokakern.errors import FormatError, UnknownNameError, UnsupportedError
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import kernel_at
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format
from lokakern.selection import dispatcher
from lokakern.types import Device, Format, Granularity, Problem
from tests.support.measurements import H200, ROW, Book

M, N, K = 48, 144, 160
A100 = Device("nvidia", "NVIDIA A100", "sm_80", 108, 80)
B200 = Device("nvidia", "NVIDIA B200", "sm_100", 148, 180)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
TENSOR, BY_ROW = Granularity.TENSOR, Granularity.ROW
GROUP, BLOCK = Granularity.GROUP, Granularity.BLOCK
# Scales of the left and right operand: of both products with a weight, and of its gradient.
RECIPES = {
    "tensor": ((TENSOR, TENSOR), (TENSOR, TENSOR)),
    "row": ((BY_ROW, BY_ROW), (BY_ROW, BY_ROW)),
    "1x128": ((GROUP, BLOCK), (GROUP, GROUP)),
}
EMULATED_ROW = "torch.quantize_row+torch.emulated_row"
EMULATED_TENSOR = "torch.quantize_tensor+torch.emulated_tensor"
EMULATED_BLOCK = "torch.quantize_group+torch.emulated_block"
EMULATED_GROUP = "torch.quantize_group+torch.emulated_group"


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time or error of a GEMM may be read; of quantizers all kernels give the same bytes."""
    known = dispatcher.table_for

    def table_for(problem: Problem, *arguments: Any, **options: Any) -> Any:
        assert problem.op == "quantize", f"{problem} was looked up"
        return known(problem, *arguments, **options)

    monkeypatch.setattr(dispatcher, "table_for", table_for)


def layer_of(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, dtype=dtype)


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 1)).to(dtype)


def rows(m: int, columns: int, seed: int = 1) -> Tensor:
    """Rows of different sizes, for which scales matter."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, columns, generator=generator)
    return (x * torch.rand(m, 1, generator=generator).add(0.01)).bfloat16()


def passed(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    found = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [f for f in found if f is not None]


def multiplied(
    a: Tensor, b: Tensor, scales: tuple[Granularity, Granularity], fp8: Format = Format.E4M3FN
) -> Tensor:
    """``a @ b.t()`` in float32 of both operands in FP8."""
    left, right = (
        numerics.dequantize(numerics.quantize(x, fp8, form))
        for x, form in zip((a, b), scales, strict=True)
    )
    return left @ right.t()


def products_of(
    layer: nn.Linear, x: Tensor, grad: Tensor, kernels: str, fp8: Format = Format.E4M3FN
) -> list[Tensor]:
    """The output, and the gradients of input and weight, of quantized operands."""
    of_weight, of_samples = RECIPES[kernels]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    found = [
        multiplied(x, weight, of_weight, fp8) + bias.float(),
        multiplied(grad, weight.t(), of_weight, fp8),
        multiplied(grad.t(), x.t(), of_samples, fp8),
    ]
    return [product.bfloat16() for product in found]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).float().norm() / exact.float().norm()).item()


def names_of(conversion: Conversion, site: str, m: int = M) -> list[str]:
    return [kernel_at(route.text, m) for route in conversion.sites[site].routes]


# ---- numerics ----


@pytest.mark.parametrize("m", [M, 17])
@pytest.mark.parametrize("kernels", list(RECIPES))
def test_all_products_are_those_of_quantized_operands(
    nothing_measured: None, kernels: str, m: int
) -> None:
    layer, plain = layer_of(), layer_of()
    lokakern.convert(layer, kernels=kernels)
    x, grad = rows(m, K), rows(m, N, 2)
    *mine, grad_bias = passed(layer, x, grad)
    assert all(map(torch.equal, mine, products_of(plain, x, grad, kernels)))
    *theirs, expected_bias = passed(plain, x, grad)
    assert torch.equal(grad_bias, expected_bias)
    for found, bf16 in zip(mine, theirs, strict=True):
        assert 0.01 < relative_error(found, bf16) < 0.2, "E4M3 rounds by 4 %, bfloat16 by 0.3 %"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [M, 17])
@pytest.mark.parametrize("kernels", list(RECIPES))
def test_a_gpu_computes_these_products(kernels: str, m: int) -> None:
    layer, here = layer_of().cuda(), current_device("cuda")
    x, grad = rows(m, K), rows(m, N, 2)
    expected = products_of(layer_of(), x, grad, kernels, fp8_format(here))
    lokakern.convert(layer, kernels=kernels)
    for found, exact in zip(passed(layer, x.cuda(), grad.cuda()), expected, strict=False):
        assert relative_error(found.cpu(), exact) < 0.005, "bfloat16 rounds by 0.2 %"


def test_each_product_has_its_own_kernels_and_others_stay_bf16(nothing_measured: None) -> None:
    """The recipe of torchao with a weight gradient in high precision."""
    layer, plain, whole = layer_of(), layer_of(), layer_of()
    found = lokakern.convert(layer, kernels={"output": "row", "grad_input": "row"})
    lokakern.convert(whole, kernels="row")
    x, grad = rows(M, K), rows(M, N, 2)
    mine, theirs, all_fp8 = (passed(each, x, grad) for each in (layer, plain, whole))
    assert torch.equal(mine[0], all_fp8[0]) and torch.equal(mine[1], all_fp8[1])
    assert torch.equal(mine[2], theirs[2]) and not torch.equal(mine[2], all_fp8[2])
    assert names_of(found, "") == [EMULATED_ROW, EMULATED_ROW, ""]
    mixed = {"output": "row", "grad_input": "tensor", "grad_weight": EMULATED_GROUP}
    assert found.refresh(kernels=mixed) == ["/grad_input", "/grad_weight"]
    assert names_of(found, "") == [EMULATED_ROW, EMULATED_TENSOR, EMULATED_GROUP]
    found.refresh(kernels="bf16")
    assert all(map(torch.equal, passed(layer, x, grad), theirs))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", list(RECIPES))
def test_training_steps_descend_under_autocast(kernels: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = model_of(torch.float32)
    found = lokakern.convert(model, kernels=kernels)
    called: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = rows(M, K).float()
    target = x.sum(1, keepdim=True) / 8
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            y = called(x)
        loss = (y.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(all(names_of(found, site)) for site in ("0", "2"))


# ---- which kernels, on which device ----


def test_a_recipe_takes_a_new_kernel_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that all of them take, the first by name was never timed."""
    problem = make_problem("gemm", (16, 64, 17280))
    first = "cuda.quantize_long_row+cuda.scaled_gemm_row"
    usual = "cuda.quantize_row+cuda.scaled_gemm_row"
    for new, expected in (({(first, "sm_90"): "new"}, usual), ({}, first)):
        monkeypatch.setattr(forced, "NEW_KERNELS", new)
        kernel, _ = forced._kernel_for(problem, "output", "row", H200, inference=False)
        assert kernel is not None and kernel.name == expected


@pytest.mark.parametrize(
    ("device", "kernels", "expected"),
    [
        (None, "1x128", [EMULATED_BLOCK, EMULATED_BLOCK, EMULATED_GROUP]),
        (A100, "1x128", [EMULATED_BLOCK, EMULATED_BLOCK, EMULATED_GROUP]),
        (A100, "tensor", [EMULATED_TENSOR] * 3),
        (H200, "row", ["cuda.quantize_row+cuda.scaled_gemm_row"] * 3),
        (H200, "tensor", ["cuda.quantize_tensor+cuda.scaled_gemm_tensor"] * 3),
        (
            H200,
            "1x128",
            [
                *["cuda.quantize_group+cuda.scaled_gemm_block"] * 2,
                "cuda.quantize_group+cuda.scaled_gemm_group",
            ],
        ),
        (H200, ROW, [ROW] * 3),
        (H200, Granularity.ROW, ["cuda.quantize_row+cuda.scaled_gemm_row"] * 3),
        (MI300X, "row", ["hip.quantize_row+hip.scaled_gemm_row", *[EMULATED_ROW] * 2]),
    ],
)
def test_a_recipe_has_kernels_of_the_device_and_else_emulation(
    nothing_measured: None, device: Device | None, kernels: str, expected: list[str]
) -> None:
    """Kernels of an absent device are emulated, with the same results."""
    layer, here = layer_of(), layer_of()
    found = lokakern.convert(layer, kernels=kernels, device=device)
    assert names_of(found, "") == expected
    for row in found.choices:
        emulated = "; emulated" if row["choice"].startswith("torch.") else ""
        assert row["why"].partition("; bf16 at m that 16")[0] == FORCED + emulated
    lokakern.convert(here, kernels="row" if kernels == ROW else kernels)
    if device is MI300X:
        return  # whose FP8 format is another
    x, grad = rows(M, K), rows(M, N, 2)
    assert all(map(torch.equal, passed(layer, x, grad), passed(here, x, grad)))


def test_where_no_kernel_takes_a_product_it_stays_bf16_with_the_reason() -> None:
    """A GPU with FP8 hardware emulates only small products, and this one lacks such scales."""
    output, _, grad_weight = forced_routes(20480, 20480, forced_by("1x128"), B200)
    assert grad_weight.text == ""
    assert grad_weight.why.startswith(f"{FORCED}; bf16, because torch.quantize_group+torch.emul")
    assert "emulates up to 10 GFLOP on sm_100" in grad_weight.why
    assert kernel_at(forced_routes(64, 64, forced_by("1x128"), B200)[2].text, M) == EMULATED_GROUP
    assert output.gemm == "output"


def test_m_that_a_kernel_does_not_take_stay_bf16_with_the_reason() -> None:
    output, _, grad_weight = forced_routes(N, K, forced_by(ROW), H200)
    assert [kernel_at(output.text, m) for m in (M, 17)] == [ROW, ROW]
    assert [kernel_at(grad_weight.text, m) for m in (M, 17)] == [ROW, ""]
    assert "bf16 at m that 16 does not divide, because" in grad_weight.why
    assert "multiples of 16" in grad_weight.why


def test_a_range_of_m_restricts_what_is_quantized() -> None:
    found = lokakern.convert(layer_of(), kernels="row", m_range=(32, 64))
    assert [bool(names_of(found, "", m)[0]) for m in (16, 31, 32, 64, 65)] == [0, 0, 1, 1, 0]
    assert found.choices[0]["choice"] == f"bf16, {EMULATED_ROW}"


# ---- the handle ----


def test_choices_table_and_repr_say_that_kernels_are_forced(
    nothing_measured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lokakern.convert(model_of(), kernels={"output": "row", "grad_weight": "bf16"})
    first, second, third, *_ = found.choices
    assert first == {
        "site": "0", "gemm": "output", "n": N, "k": K, "choice": EMULATED_ROW,
        "eager_choice": EMULATED_ROW, "m": [], "us": [], "host_us": [],
        "why": f"{FORCED}; emulated",
    }  # fmt: skip
    assert [(row["choice"], row["why"]) for row in (second, third)] == [("bf16", FORCED)] * 2
    words = f"2 of 6 products quantized, kernels {FORCED}"
    assert repr(found) == f"Conversion(2 sites, {words})"
    found.table()
    out = capsys.readouterr().out
    assert FORCED in out and "times of regime" not in out
    assert found.explain("2").startswith(f"2: output: {FORCED}")


def test_undo_refresh_and_state_are_those_of_any_conversion(nothing_measured: None) -> None:
    model, plain = model_of(), model_of()
    x = rows(M, K)
    before = model(x)
    found = lokakern.convert(model, kernels="row")
    by_row = model(x)
    assert found.refresh() == [] and torch.equal(model(x), by_row)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), by_row)
    changed = found.refresh(kernels="tensor")
    assert len(changed) == 6 and not torch.equal(model(x), by_row)
    assert found.refresh() == [], "as the last time"
    assert found.refresh(None) == changed and torch.equal(model(x), before)
    assert FORCED not in repr(found)
    found.refresh(kernels="row")
    with pytest.raises(UnsupportedError):
        found.refresh(kernels=ROW)  # of an H200
    assert torch.equal(model(x), by_row), "all or nothing"
    found.undo()
    assert torch.equal(model(x), before) and type(model[0]) is nn.Linear


def test_weights_are_quantized_once_for_inference(
    nothing_measured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)).bfloat16()
    found = lokakern.convert(model, kernels="1x128", inference=True)
    assert names_of(found, "2") == [EMULATED_BLOCK, "", ""]
    assert [row["why"] for row in found.choices[1:3]] == ["inference has none"] * 2
    assert "2 of 2 products quantized" in repr(found)
    found.table()
    assert "inference has none" not in capsys.readouterr().out
    x = rows(M, K)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    with torch.no_grad():
        y = model(x)
        model[2].weight.zero_()
        assert torch.equal(model(x), y)
        model.load_state_dict(state)
        assert not torch.equal(model(x), y)
        y = model(x)
        assert found.offload() == 0  # from the CPU to the CPU
        assert model[0].is_offloaded and torch.equal(model(x), y)
        assert found.refresh(kernels={"output": "1x128"}) == [] and not model[0].is_offloaded
        assert torch.equal(model(x), y)


def test_micro_batches_share_quantized_weights() -> None:
    layer = layer_of()
    found = lokakern.convert(layer, kernels="row")
    x, grad = rows(M, K), rows(M, N, 2)
    expected = passed(layer, x, grad)
    with found.weights_unchanged():
        assert all(map(torch.equal, passed(layer, x, grad), expected))


def test_inputs_are_not_quantized_before_the_layer(book: Book) -> None:
    """A static scale would be another recipe."""
    parts = nn.Linear(K, 256), BlockRMSNorm(256, 256), nn.ReLU(), nn.Linear(256, 16)
    model = nn.Sequential(*parts).bfloat16()
    found = lokakern.convert(model, kernels="row", inference=True)
    assert type(model) is nn.Sequential and found.handed_over == []


@pytest.mark.parametrize("inference", [False, True])
def test_frozen_choices_do_not_hinder_forced_kernels(tmp_path: Path, inference: bool) -> None:
    x = torch.randn(32, 32).bfloat16()
    lokakern.gemm(x, x, budget=0.06)
    path = tmp_path / "choices.json"
    lokakern.freeze(path)

    def outcome() -> list[Tensor]:
        layer = layer_of()
        found = lokakern.convert(layer, kernels="row", inference=inference)
        assert names_of(found, "")[0] == EMULATED_ROW
        if not inference:
            return passed(layer, rows(M, K), rows(M, N, 2))
        with torch.no_grad():
            return [layer(rows(M, K))]

    expected = outcome()
    dispatcher.use_choices(path)
    try:
        assert all(map(torch.equal, outcome(), expected))
    finally:
        dispatcher.use_choices(None)


def test_a_check_lists_errors_without_warnings() -> None:
    layer = layer_of()
    found = lokakern.convert(layer, kernels="row", check="1:64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed(layer, rows(M, K), rows(M, N, 2))
    assert {row["site"] for row in found.checks} == {"/output", "/grad_input", "/grad_weight"}
    assert all(0.01 < row["row_err"] < 0.1 for row in found.checks)


def test_float32_layers_are_quantized_under_autocast_alone() -> None:
    for dtype, words in ((torch.bfloat16, ""), (torch.float32, " under bfloat16 autocast")):
        found = lokakern.convert(model_of(dtype), kernels={"output": "row"})
        assert f", 2 of 6 products quantized{words}, kernels" in repr(found)


def test_all_products_become_a_suite_to_sweep() -> None:
    text = lokakern.convert(model_of(), kernels="row").suite([256])
    # The last layer, with one output, not with padded rows: `mods.Pad` leaves it alone.
    assert text.count("[[layer]]") == 2 and f"n = {N}\nk = {K}\n" in text


def test_changed_layers_have_forced_kernels_for_their_sizes() -> None:
    """Fused layers are one product, and layers across tokens have no FP8 kernel."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, 32), nn.Linear(K, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], dim=1)

    torch.manual_seed(0)
    model, x = Two().bfloat16(), rows(M, K)
    lokakern.convert(model, kernels="row").undo()
    mods.apply(model, [mods.FuseShared()])
    plain = model(x)
    found = lokakern.convert(model, kernels="row")
    assert [row["n"] for row in found.choices if row["gemm"] == "output"] == [96]
    assert 0.01 < relative_error(model(x), plain) < 0.1
    padded = layer_of(40, 100)
    mods.apply(nn.Sequential(padded), [mods.Pad(16, most_growth=2.0)])
    found = lokakern.convert(padded, kernels="row")
    assert (found.choices[0]["n"], found.choices[0]["k"]) == (48, 112)
    x = rows(M, 100)
    expected = multiplied(x, padded.weight.detach(), (BY_ROW, BY_ROW)) + padded.bias.float()
    assert torch.allclose(padded(x).float(), expected, rtol=0.01, atol=0.01)


# ---- skip ----


def test_skipped_layers_stay_linear_and_are_listed() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("first", "second", "head", "gate")})
    found = lokakern.convert(
        model, kernels="row", skip=["head", "[fg]*t*"], filter=lambda _, name: name != "gate"
    )
    assert list(found.sites) == ["second"]
    assert found.skipped == {
        "first": "skip='[fg]*t*' names it", "head": "skip='head' names it",
    }  # fmt: skip
    assert [type(m) for m in model.values()] == [nn.Linear, Linear, nn.Linear, nn.Linear]
    budgeted = lokakern.convert(model, 0.06, skip="*d*")
    assert set(budgeted.skipped) == {"second", "head"}


# ---- errors ----

FAST = "cuda.quantize_row+torch.scaled_mm_row_fast"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, FormatError, "neither of report_or_budget and kernels= is given; expected one"),
    ({"report_or_budget": 0.06, "kernels": "row"}, FormatError, "both report_or_budget and kern"),
    ({"report_or_budget": None, "kernels": "row"}, FormatError, "both report_or_budget and kern"),
    ({"kernels": 3}, FormatError, "kernels is 3; expected a text, or a mapping"),
    ({"kernels": {}}, FormatError, r"kernels is \{\}; expected a text, or a mapping"),
    ({"kernels": {"output": None}}, FormatError, "expected a text, or a mapping of texts"),
    ({"kernels": {"fprop": "row"}}, UnknownNameError, "names a GEMM 'fprop'; expected some of out"),
    (
        {"kernels": "1x32"},
        UnknownNameError,
        "'1x32', which is no kernel of .*expected tensor, row,",
    ),
    ({"kernels": "torch.bf16"}, UnknownNameError, "names 'torch.bf16', which is no kernel of op"),
    ({"kernels": "cuda.scaled_gemm_row"}, UnknownNameError, "'cuda.scaled_gemm_row', which is"),
    ({"kernels": ROW}, UnsupportedError, "compute output of layer '0' .* needs .*sm_90; device is"),
    (
        {"kernels": {"output": FAST}, "device": H200},
        UnsupportedError,
        r"row_fast does not compute output of layer '2' \(n=1 .*multiples of 16.*skip=",
    ),
    (
        {"kernels": FAST, "device": H200, "skip": "2"},
        UnsupportedError,
        "row_fast does not compute grad_weight of layer '0' .*sums over samples.*'bf16'",
    ),
    ({"kernels": EMULATED_GROUP}, UnsupportedError, "it reads weights with 1x128 scales, and"),
    ({"kernels": "row", "skip": "tail.*"}, UnknownNameError, "skip='tail.*' matches no layer"),
    ({"kernels": "row", "skip": 3}, FormatError, "skip is 3; expected names"),
    ({"kernels": "row", "skip": "*"}, UnknownNameError, "has no layer to convert"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), BAD)
def test_invalid_arguments_raise_and_leave_the_model_unchanged(
    wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = model_of()
    with pytest.raises(error, match=words):
        lokakern.convert(model, **wrong)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
