"""FP8 between layers: inputs that are quantized ahead, their scales, and calls without them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import lokakern
from lokakern import mods, numerics
from lokakern.device import current_device
from lokakern.epilogue import ACTIVATIONS
from lokakern.native import NATIVE
from lokakern.nn import routed_matmul
from lokakern.nn.activations import APPLY
from lokakern.nn.chain_plan import ChainLayer, ChainStep, plan_text
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import has_activator, reads_rows
from lokakern.nn.static_handoff import (
    BoundedSequential,
    is_affordable,
    scales_between,
    set_handoff,
)
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.types import ErrorBudget, Format, Granularity
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight
from lokakern.workloads.gemm_cases import prepared_weight
from lokakern.workloads.suite_files import suite_from_file
from tests.support import native
from tests.support.conversions import H200, K, N, gemm, measured, rows_of
from tests.support.measurements import Book, time
from tests.support.routed_layers import BLOCK_KERNEL, ROW_KERNEL, passed, rows, same

SEEDS = (0,)
BY_ROW = f"row;16:0=,16={ROW_KERNEL};1:0="
BY_BLOCK = f"128x128;16:0={BLOCK_KERNEL};1:0={BLOCK_KERNEL}"
NONE_ROW_NONE = (Granularity.NONE, Granularity.ROW, Granularity.NONE)
SCALE = repr(4.0 / 448.0)  # blocks of 16: no output passes 4


def model_of(route: str = BY_ROW, wide: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(64, wide), mods.BlockRMSNorm(wide, 16), nn.Hardswish(), Linear(wide, 40), nn.ReLU(),
        Linear(40, 8),
    ).bfloat16()  # fmt: skip
    for place in (3, 5):
        layer = model[place]
        assert isinstance(layer, Linear)
        layer.take_routes((route, route, ""), layer.weight)
    return model


def handed_over(model: nn.Sequential) -> nn.Sequential:
    scales = scales_between(model, current_device())
    set_handoff(model, scales, ("",) * len(scales))
    return model


def rounded(x: Tensor, form: Granularity) -> Tensor:
    return numerics.dequantize(numerics.quantize(x, Format.E4M3FN, form)).double()


@pytest.mark.parametrize("route", [BY_ROW, BY_BLOCK])
def test_the_product_equals_that_of_the_statically_scaled_input(route: str) -> None:
    model = handed_over(model_of(route))
    assert model._handoffs[-1].scales == ("", "", "", SCALE, "", "")
    h = nn.Sequential(*list(model)[:3])(rows()).detach()
    quantized, _ = numerics.quantize_static(
        h, Format.E4M3FN, Granularity.TENSOR, torch.tensor([[float(SCALE)]])
    )
    left = numerics.dequantize(quantized).double()
    layer = model[3]
    form = Granularity.ROW if route == BY_ROW else Granularity.BLOCK
    exact = left @ rounded(layer.weight.detach(), form).t() + layer.bias.detach().double()
    y = layer(h, input_scale=SCALE).detach().double()
    assert ((y - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * exact.abs().max()).all()
    plain = h.double() @ layer.weight.detach().double().t() + layer.bias.detach().double()
    assert numerics.measure_errors(y, plain).row_err < 0.05


@pytest.mark.parametrize("name", ["X2", "X5", "X6", "X10", "X13", "X14"])
def test_a_static_scale_has_the_error_of_rowwise_scales(name: str) -> None:
    y = draw_rows(distribution_named(name), 256, 512, 0).bfloat16()
    x = nn.functional.hardswish(mods.BlockRMSNorm(512, 256)(y))
    w = draw_weight(distribution_named("X2"), 64, 512, 0).bfloat16()
    exact, right = x.double() @ w.double().t(), rounded(w, Granularity.ROW).t()
    scale = torch.tensor([[16.0 / 448.0]])
    static, _ = numerics.quantize_static(x, Format.E4M3FN, Granularity.TENSOR, scale)
    known = numerics.measure_errors(numerics.dequantize(static).double() @ right, exact).row_err
    by_row = numerics.measure_errors(rounded(x, Granularity.ROW) @ right, exact).row_err
    assert known < 0.05 and known < 1.2 * by_row


def test_gradients_equal_the_gradients_of_the_unrounded_input() -> None:
    layer, found = model_of()[3], []
    h = nn.functional.hardswish(torch.rand(48, 48) * 6 - 3).bfloat16()
    for scale in ("", SCALE):
        x = h.clone().requires_grad_()
        y = layer(x, input_scale=scale)
        y.backward(rows(k=40, seed=2))
        found.append([x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
        layer.zero_grad()
    assert same(found[0], found[1])


def test_few_rows_are_not_quantized_and_no_rows_are_accepted() -> None:
    for m in (0, 7):
        assert torch.equal(handed_over(model_of())(rows(m)), nn.Sequential(*model_of())(rows(m)))


def test_at_m_without_kernels_layers_are_called_as_by_a_sequence() -> None:
    model, made = handed_over(model_of()), []
    with native.in_use() as library, torch.no_grad():

        def spy(*given: Any) -> Any:
            y = library.call_layer(*given)
            made.append(y is not None)
            return y

        NATIVE.call_layer = spy  # until the library is in use no more
        for m, expected in ((7, [True] * 3), (48, [True] * 2)):  # a static scale is Python's
            made.clear()
            model(rows(m))
            assert made == expected


def test_the_scale_is_that_of_rows_that_a_hook_adds() -> None:
    model, x = handed_over(model_of()), rows(4)
    model[0].register_forward_hook(lambda _, __, y: torch.cat([y, *[y * 2] * 11]))
    h = nn.Sequential(*list(model)[:3])(x)
    expected = model[5](nn.functional.relu(model[3](h, input_scale=SCALE)))
    assert len(h) == 48 and torch.equal(model(x), expected)
    assert not torch.equal(expected, nn.Sequential(*model)(x))


def test_gradients_alone_in_fp8() -> None:
    """At m where the output is not quantized and a gradient is."""
    model, found = handed_over(model_of()), []
    model[3].take_routes((f"row;16:0=,64={ROW_KERNEL};1:0=", BY_ROW, ""), model[3].weight)

    def with_scales(x: Tensor) -> Tensor:
        for module, scale in zip(model, model._handoffs[-1].scales, strict=True):
            x = module(x, input_scale=scale) if scale else module(x)
        return x

    for call in (model, with_scales):
        model.zero_grad()
        x = rows().requires_grad_()
        y = call(x)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    assert same(*found)


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("how", ["after", "before", "instead"])
def test_a_hook_that_leaves_the_bound_of_a_norm_ends_its_static_scale(place: int, how: str) -> None:
    model, x = handed_over(model_of()), rows()
    y, module = model(x), model[place]
    if how == "after":
        module.register_forward_hook(lambda _module, _given, y: 100 * y)
    elif how == "before":
        module.register_forward_pre_hook(lambda _module, given: (100 * given[0],))
    else:
        run = type(module).forward
        module.forward = lambda x: 100 * run(module, x)
    expected = nn.Sequential(*model)(x)
    assert torch.equal(model(x), expected) and not torch.equal(expected, y)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), expected)


def test_a_layer_with_a_static_scale_runs_no_chain_of_its_own() -> None:
    layer = LinearNormAct(64, 48, norm="none", activation="relu", dtype=torch.bfloat16)
    layer.take_routes((BY_ROW, "", ""), layer.weight)
    model = handed_over(nn.Sequential(mods.BlockRMSNorm(64, 16), layer))
    layer.take_routes(("", "", ""), layer.weight)
    step = ChainStep(0, "cuda.quantize_row+cuda.gemm_norm_row", *NONE_ROW_NONE)
    of_layer = ChainLayer(48, 64, "bias+relu", 1e-5, Granularity.ROW)
    layer.take_chain(plan_text([of_layer], [(0, ()), (16, (step,))], [(0, ())]))
    with torch.no_grad():
        h = model[0](rows())
        assert torch.equal(model(rows()), layer(h, input_scale=SCALE))
        assert not torch.equal(model(rows()), layer(h))


def test_zero_and_non_finite_rows() -> None:
    x = rows()
    x[1] = 0.0
    x[2, 0] = float("nan")
    model = handed_over(model_of())
    y = model(x)
    assert y[2].isnan().all() and y[[0, 1, *range(3, 48)]].isfinite().all()


def test_it_compiles_without_graph_breaks_to_the_same_result() -> None:
    torch._dynamo.reset()
    model = handed_over(model_of())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, gradient = rows(), rows(k=8, seed=2)
    assert same(passed(compiled, x, gradient), passed(model, x, gradient))


def test_static_scales_follow_block_norm_and_bounded_activations() -> None:
    layer = LinearNormAct(48, 48, norm="block_rms(16)", activation="silu")
    layer.take_routes((BY_ROW, "", ""), layer.weight)
    odd, plain = Linear(48, 48), Linear(24, 48)
    odd.take_routes((BY_ROW, "", ""), odd.weight)
    for modules, expected in (
        ([layer, layer, odd], ["", SCALE, SCALE]),
        ([mods.BlockRMSNorm(48, 16), nn.ELU(), odd], [""] * 3),
        ([mods.BlockRMSNorm(48, 16), nn.Dropout(), odd], [""] * 3),  # which enlarges what it keeps
        ([nn.LayerNorm(48), odd], [""] * 2),
        ([mods.BlockRMSNorm(24, 8), plain], [""] * 2),  # nothing is quantized there
    ):
        assert list(scales_between(nn.Sequential(*modules), current_device())) == expected


def test_budgets_that_admit_a_static_scale() -> None:
    assert is_affordable(ErrorBudget(row_err=0.06)) and not is_affordable(
        ErrorBudget(row_err=0.045)
    )
    assert not is_affordable(None)
    assert not is_affordable(ErrorBudget(row_err=0.06, mean_shift=1e-3))  # which nobody measured


@pytest.fixture
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    Book(tmp_path_factory.mktemp("book") / "rows.sqlite").write(*measured())
    yield
    dispatcher.use_snapshot(None)


@pytest.mark.usefixtures("known")
def test_convert_sets_and_undo_removes_the_handoff() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, K), mods.BlockRMSNorm(K, 16), nn.Hardswish(), nn.Linear(K, N)
    ).bfloat16()
    x = torch.randn(256, 8).bfloat16()
    before = model(x)
    found = lokakern.convert(model, 0.06, device=H200, distribution="X1")
    assert found.handed_over == ["3"] and "1 inputs quantized ahead" in repr(found)
    assert type(model) is BoundedSequential
    handed = model(x)
    found.refresh(None)
    assert found.handed_over == [] and type(model) is nn.Sequential
    assert torch.equal(model(x), before)
    found.refresh(0.06)
    assert torch.equal(model(x), handed)
    found.undo()
    assert type(model) is nn.Sequential and torch.equal(model(x), before)
    found = lokakern.convert(model, 0.06, device=H200, distribution="X1", between=False)
    assert found.handed_over == [] and type(model) is nn.Sequential
    assert not torch.equal(model(x), handed)


# ---- activations that a kernel quantizes ----


def activated_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, K), nn.ReLU(), nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 1)
    ).bfloat16()


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[None]:
    """The second product is FP8 at m = 256 and 512, the relu before it was timed at 256 alone."""
    rows = []
    for m in (256, 512):
        prepared = gemm(m, N, K, b=prepared_weight(Format.E4M3FN, Granularity.ROW), prepared=True)
        rows += rows_of(prepared, bf16=4.0, row=2.0, errors=m == 256)
    problem = make_problem(
        "norm_quantize", (256, K), epilogue="relu", out_format=Format.E4M3FN,
        out_granularity=Granularity.ROW,
    )  # fmt: skip
    rows += [time("cuda.norm_quantize", problem, 2.0), time("triton.norm_quantize", problem, 3.0)]
    Book(tmp_path / "rows.sqlite").write(*rows)
    yield
    dispatcher.use_snapshot(None)


def converted(model: nn.Sequential, **options: Any) -> lokakern.conversion.convert.Conversion:
    options = {"device": H200, "distribution": "X1", "inference": True, **options}
    return lokakern.convert(model, 0.06, **options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of kernels that activate and quantize, and rows, in order."""
    found: list[tuple[str, int]] = []
    real = routed_matmul._quantize_activated_fake

    def spy(x: Tensor, activation: str, name: str) -> tuple[Tensor, Tensor]:
        found.append((f"{name} {activation}", len(x)))
        return real(x, activation, name)

    monkeypatch.setattr(routed_matmul, "_quantize_activated_fake", spy)
    return found


@pytest.mark.usefixtures("timed")
def test_a_kernel_activates_and_quantizes_at_timed_m(launched: Any) -> None:
    model = activated_model()
    plain = copy.deepcopy(model)
    conversion = converted(model)
    assert conversion.handed_over == ["2"] and type(model) is BoundedSequential
    for m, expected in ((256, [("cuda.norm_quantize relu", 256)]), (512, []), (250, [])):
        x = torch.randn(m, 8).bfloat16()
        launched.clear()
        with torch.no_grad():
            y, h = model(x), plain[1](plain[0](x))
        assert launched == expected
        if m == 256:
            exact = rounded(h, Granularity.ROW) @ rounded(plain[2].weight, Granularity.ROW).t()
            exact += plain[2].bias.double()
            with torch.no_grad():
                assert torch.equal(y, plain[4](plain[3](exact.bfloat16())))
    conversion.undo()
    with torch.no_grad():
        assert type(model) is nn.Sequential and torch.equal(model(x), plain(x))


@pytest.mark.usefixtures("timed")
def test_hooks_and_other_readers_of_an_activation_still_run(launched: Any) -> None:
    """Gradients, hooks, other dtypes and autocast to them, leading axes."""
    model = activated_model()
    converted(model)
    x = torch.randn(256, 8).bfloat16()
    model(x)  # with gradients
    assert launched == []
    seen: list[Tensor] = []
    with torch.no_grad():
        y = model(x)
        assert len(launched) == 1
        for place in (1, 2):
            handle = model[place].register_forward_hook(lambda *given: seen.append(given[-1]))
            assert torch.equal(model(x), y)
            handle.remove()
        assert len(launched) == 1 and len(seen) == 2
        assert torch.equal(model(x.view(16, 16, 8)), y.view(16, 16, 1)) and len(launched) == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), y) and len(launched) == 3
        model(x[:0])
        model[0].float()
        with pytest.raises(RuntimeError), torch.autocast("cpu", enabled=False):
            model(x.float())
    assert len(launched) == 3


@pytest.mark.usefixtures("timed")
@pytest.mark.rest
def test_a_compiled_model_with_a_fused_activation_gives_the_same_result(launched: Any) -> None:
    torch._dynamo.reset()
    model = activated_model()
    converted(model)
    x = torch.randn(256, 8).bfloat16()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert {name for name, _ in launched} == {"cuda.norm_quantize relu"}
    symbolic = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        launched.clear()
        assert symbolic(x).shape == (256, 1) and launched == []


class Joined(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(parts, 1)


def test_compiled_sequences_of_unusual_inputs() -> None:
    """Tuples, and inputs without columns; exported, too."""
    joined = nn.Sequential(Joined(), nn.Linear(K, K), nn.ReLU(), nn.Linear(K, 8))
    empty = nn.Sequential(nn.Linear(0, K), nn.ReLU(), nn.Linear(K, 8))
    x = torch.randn(4, K, dtype=torch.bfloat16)
    cases = [(joined, (x[:, : K // 2], x[:, K // 2 :])), (empty, x[:, :0])]
    for model, given in cases:
        torch._dynamo.reset()
        model.bfloat16().requires_grad_(False)
        expected = model(given)
        set_handoff(model, [""] * len(model), [""] * len(model))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(given), expected) and torch.equal(model(given), expected)
        assert torch.equal(torch.export.export(model, (given,)).module()(given), expected)


@pytest.mark.usefixtures("timed")
def test_a_fused_activation_is_compiled_once(launched: Any) -> None:
    torch._dynamo.reset()
    model = activated_model()
    converted(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1 and len(launched) >= 1


@pytest.mark.usefixtures("timed")
def test_training_and_other_readers_run_the_activation() -> None:
    model = activated_model()
    assert converted(model, inference=False).handed_over == []
    other = activated_model()
    other[1] = nn.ELU()
    assert converted(other).handed_over == []
    model = activated_model()
    model[2].register_forward_hook(lambda *_: None)
    assert converted(model, between=False).handed_over == []


@pytest.mark.usefixtures("timed")
def test_changed_modules_disable_the_handoff(launched: Any) -> None:
    """Slices, and modules put in the place of others, or taken away."""
    model = activated_model()
    converted(model)
    x = torch.randn(256, 8).bfloat16()
    with torch.no_grad():
        assert torch.equal(model[3:](model[:3](x)), nn.Sequential(*model)(x))
        model[1] = nn.ELU()
        assert torch.equal(model(x), nn.Sequential(*model)(x))
        del model[1]
        assert torch.equal(model(x), nn.Sequential(*model)(x))
        bounded = handed_over(model_of())
        bounded[1] = nn.Identity()  # whose output may pass the scale
        assert torch.equal(bounded(rows()), nn.Sequential(*bounded)(rows()))
    assert launched == []


def test_infinite_and_nan_elements_affect_only_their_rows() -> None:
    x = rows(64, 48)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
    data, scale = torch.ops.lokakern.quantize_activated(x, "relu", "cuda.norm_quantize")
    found = data.float() * scale
    assert found[1].isnan().any() and found[2].isnan().any() and (found[3] == 0).all()
    others = [0, *range(4, 64)]
    expected = numerics.dequantize(numerics.quantize(x.relu(), Format.E4M3FN, Granularity.ROW))
    assert torch.equal(found[others], expected[others].float())


@pytest.mark.usefixtures("timed")
def test_untimed_activations_are_in_the_suite(tmp_path: Path) -> None:
    model = activated_model()
    model[1] = nn.SiLU()
    conversion = converted(model)
    assert conversion.handed_over == [] and type(model) is nn.Sequential
    (tmp_path / "s.toml").write_text(conversion.suite([256, 64]))
    cases = list(suite_from_file(tmp_path / "s.toml").build(Format.E4M3FN))
    found = [c.problem for c in cases if c.problem.op == "norm_quantize"]
    assert [(p.m, p.k, p.epilogue, p.out_granularity) for p in found] == [
        (m, K, "silu", Granularity.ROW) for m in (256, 64)
    ]
    assert '"activate"' not in converted(activated_model()).suite([256])


def test_long_rows_also_use_the_fused_activation() -> None:
    activating = "row;16:0=,256=cuda.activate_quantize_row;1:0="
    assert routed_matmul.LONGEST_HERE < 10240
    for k in (2048, 10240):
        assert routed_matmul.has_activator(activating, BY_ROW, k)
        assert (
            routed_matmul.find_activator(activating, BY_ROW, 256, k) == "cuda.activate_quantize_row"
        )
    assert not routed_matmul.has_activator(activating, BY_BLOCK, 10240)


@pytest.mark.gpu
@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("cuda.norm_quantize", 8192),
        ("triton.norm_quantize", 8192),
        ("cuda.activate_quantize_row", 16384),
    ],
)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gpu_kernels_activate_and_quantize_as_the_emulation(
    name: str, longest: int, half: torch.dtype
) -> None:
    """Each beside the emulation, of odd numbers of rows and rows that begin askew."""
    for m, k in ((256, K), (13, 2048), (1, longest)):
        x = torch.randn(m, k, device="cuda").to(half)
        for activation in ACTIVATIONS[1:]:
            if activation.startswith("gelu") and name.startswith("triton."):
                continue
            data, scale = torch.ops.lokakern.quantize_activated(x, activation, name)
            expected = APPLY[activation](x.float())
            error = (data.double() * scale.double() - expected.double()).norm()
            assert error <= 0.04 * expected.double().norm()
    shifted = torch.randn(m * k + 1, device="cuda").to(half)[1:].view(m, k)
    data, scale = torch.ops.lokakern.quantize_activated(shifted, "relu", name)
    assert ((data.float() * scale - shifted.float().relu()).norm() / shifted.float().norm()) < 0.04


@pytest.mark.gpu
@pytest.mark.usefixtures("timed")
def test_a_model_with_fused_activations_runs_in_a_cuda_graph() -> None:
    model = activated_model().cuda()
    plain = copy.deepcopy(model)
    assert converted(model).handed_over == ["2"]  # emulated on a GPU that is no H200
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    x = torch.randn(256, 8, device="cuda").bfloat16()
    with torch.no_grad():
        for _ in range(3):
            y = compiled(x).clone()
        assert torch.allclose(y, model(x), rtol=0.05, atol=0.01)
        assert (y - plain(x)).norm() <= 0.1 * plain(x).norm()


@pytest.mark.usefixtures("timed")
def test_only_rowwise_kernels_get_fused_activations(launched: Any, tmp_path: Path) -> None:
    """Layers with a norm, with blocks, or outside the range of m get none."""
    model = activated_model()
    model[2] = LinearNormAct(K, N, norm="layer", bias=False).bfloat16()
    assert converted(model).handed_over == []
    model = activated_model()
    assert converted(model, m_range=(300, 600)).handed_over == []
    model = activated_model()
    assert converted(model, m_range=(200, 300)).handed_over == ["2"]
    layer, x = model[2], torch.randn(256, K).bfloat16()
    route = "row;16:0=,256=cuda.norm_quantize;1:0="
    with torch.no_grad():
        assert layer.forward_activated(x, "relu", route) is not None
        assert layer.forward_activated(x[:, :-1], "relu", route) is None
        assert layer.forward_activated(x.float(), "relu", route) is None
        assert layer.forward_activated(x.to("meta"), "relu", route) is None
        with torch.autocast("cpu", torch.float16):
            assert layer.forward_activated(x, "relu", route) is None
        by_block = Linear(K, K).bfloat16()
        by_block.take_routes((BY_BLOCK, "", ""), by_block.weight)
        assert by_block.forward_activated(x, "relu", route) is None  # its weight is not frozen
        by_block.freeze()
        assert by_block.forward_activated(x, "relu", route) is None
        for name in ACTIVATIONS[1:]:
            data, scale = torch.ops.lokakern.quantize_activated(x, name, "cuda.norm_quantize")
            exact = APPLY[name](x.double())
            assert (data.double() * scale - exact).norm() < 0.03 * exact.norm()
        turned, _ = torch.ops.lokakern.quantize_activated(
            x.t().contiguous().t(), "relu", "cuda.norm_quantize"
        )
        straight, _ = torch.ops.lokakern.quantize_activated(x, "relu", "cuda.norm_quantize")
        assert torch.equal(turned.view(torch.uint8), straight.view(torch.uint8))


@pytest.mark.usefixtures("timed")
def test_a_static_scale_is_preferred_to_a_dynamic_one(launched: Any) -> None:
    model = nn.Sequential(
        nn.Linear(8, K), mods.BlockRMSNorm(K, 16), nn.ReLU(), nn.Linear(K, N)
    ).bfloat16()
    assert converted(model).handed_over == ["3"]
    with torch.no_grad():
        model(torch.randn(256, 8).bfloat16())
    assert launched == []


@pytest.mark.usefixtures("timed")
def test_a_refresh_clears_missing_activations(launched: Any) -> None:
    model = activated_model()
    conversion = converted(model)
    x = torch.randn(256, 8).bfloat16()
    with torch.no_grad():
        conversion.refresh(None)
        assert conversion.handed_over == [] and type(model) is nn.Sequential
        model(x)
        assert launched == []
        for _ in range(2):
            conversion.refresh(0.06)
        model(x)
        assert len(launched) == 1
        for place in (1, 2):
            handle = model[place].register_forward_pre_hook(lambda *_: None)
            model(x)
            handle.remove()
        assert len(launched) == 1
    other = activated_model()
    other[1] = nn.SiLU()
    conversion = converted(other)
    assert '"activate"' in conversion.suite([256])
    conversion.refresh(None)
    assert '"activate"' not in conversion.suite([256])


class Doubled(nn.ReLU):
    """Another function."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def zeroed(module: nn.Module, _args: Any, y: Tensor) -> Tensor | None:
    return y * 0 if isinstance(module, nn.ReLU) else None


@pytest.mark.usefixtures("timed")
def test_hooks_and_replaced_forwards_disable_the_fused_activation(launched: Any) -> None:
    """Replacements are in place, for all modules, on one object, or by another module."""
    x = torch.randn(256, 8).bfloat16()

    def heard(change: Any, after: bool = False) -> None:
        model = activated_model()
        if not after:
            change(model)
        converted(model)
        if after:
            change(model)
        with torch.no_grad():
            y, plain = model(x), nn.Sequential(*model)(x)
        assert torch.equal(y, plain) and launched == []

    def own_forward(place: int) -> Any:
        def change(model: nn.Sequential) -> None:
            real = model[place].forward
            model[place].forward = lambda x: real(x) * 0  # type: ignore[method-assign]

        return change

    def other(model: nn.Sequential) -> None:
        model[1] = Doubled()

    def in_place(model: nn.Sequential) -> None:
        model[1].inplace = True  # type: ignore[assignment]

    for after in (False, True):
        for change in (own_forward(1), own_forward(2), other, in_place):
            heard(change, after)
    handle = nn.modules.module.register_module_forward_hook(zeroed)
    try:
        heard(lambda _: None)
    finally:
        handle.remove()
    bounded = handed_over(model_of())
    bounded[1] = mods.BlockRMSNorm(48, 48)  # of which more passes the scale
    assert torch.equal(bounded(rows()), nn.Sequential(*bounded)(rows()))


@pytest.mark.usefixtures("timed")
def test_reported_handoffs_are_current_and_of_this_conversion(launched: Any) -> None:
    model = activated_model()
    options = {"device": H200, "distribution": "X1", "inference": True}
    lokakern.convert(model, 0.06, filter=lambda _, name: name == "2", between=False, **options)
    second = lokakern.convert(model, 0.06, filter=lambda _, name: name == "0", **options)
    assert second.handed_over == [] and "handed over" not in repr(second)
    model = activated_model()
    conversion = converted(model)
    model.append(nn.ReLU())
    assert conversion.handed_over == [] and "handed over" not in repr(conversion)
    named = nn.Sequential(
        OrderedDict(scales=nn.Linear(8, K), activating=nn.ReLU(), known=nn.Linear(K, N))
    ).bfloat16()
    assert converted(named).handed_over == ["known"]
    with torch.no_grad():
        named(torch.randn(256, 8).bfloat16())
        assert len(launched) == 1
        named.float()  # a weight that is multiplied in float32
        with pytest.raises(RuntimeError, match="dtype"):
            named[1:](torch.randn(256, K).bfloat16())
        with pytest.raises(RuntimeError, match="dtype"):
            converted(nn.Sequential(nn.ReLU(), nn.Linear(K, N)))  # of float32
            named[2](torch.randn(256, K).bfloat16())
    assert len(launched) == 1


def test_a_route_without_a_matching_activator_is_not_used() -> None:
    by_row = "row;16:0=,256=cuda.quantize_row+torch.scaled_mm_row,513=;1:0="
    for activating, expected in (
        ("row;16:0=,256=cuda.norm_quantize,257=;1:0=", True),
        ("row;16:0=,128=cuda.norm_quantize,257=;1:0=", True),
        ("row;16:0=,4096=cuda.norm_quantize,4097=;1:0=", False),
    ):
        assert has_activator(activating, by_row, 64) is expected
        assert not has_activator(activating, BY_BLOCK, 64)
    assert reads_rows(by_row) and not reads_rows(BY_BLOCK) and not reads_rows("")


def test_scales_that_a_graph_reads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other shapes come after it."""
    monkeypatch.setattr(routed_matmul, "_SCALES", {})
    monkeypatch.setattr(routed_matmul, "_SCALES_OF_GRAPHS", {})
    is_capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)

    def scales(rows: int) -> Tensor:
        x = SimpleNamespace(shape=torch.Size((rows, 16)), device=torch.device("cpu"), is_cuda=True)
        return routed_matmul.equal_scales(Granularity.ROW, x, "0.5")  # type: ignore[arg-type]

    first = scales(4)
    is_capturing = True
    assert scales(4) is first
    assert scales(5) is not scales(5)  # those of the graph's own memory are not kept
    is_capturing = False
    for m in range(6, 600):
        scales(m)
    assert scales(4) is first and len(routed_matmul._SCALES) < 300
