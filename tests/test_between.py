"""FP8 between layers: what is handed over, by which scale, and that nobody else is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import mods, numerics, selection
from lokakern.bench.distributions import distribution_named, draw_rows, draw_weight
from lokakern.between import BoundedSequential, is_affordable, scales_between
from lokakern.device import current_device
from lokakern.linear import Linear
from lokakern.linear_norm_act import LinearNormAct
from lokakern.types import ErrorBudget, Format, Granularity
from tests.test_converting import H200, K, N, measured
from tests.test_linear import BLOCK_KERNEL, ROW_KERNEL, passed, rows, same
from tests.test_selection import Book

SEEDS = (0,)
BY_ROW = f"row;16:0=,16={ROW_KERNEL};1:0="
BY_BLOCK = f"128x128;16:0={BLOCK_KERNEL};1:0={BLOCK_KERNEL}"
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
    model.__class__ = BoundedSequential
    model.scales = scales  # type: ignore[assignment]
    return model


def rounded(x: Tensor, form: Granularity) -> Tensor:
    return numerics.dequantize(numerics.quantize(x, Format.E4M3FN, form)).double()


@pytest.mark.parametrize("route", [BY_ROW, BY_BLOCK])
def test_the_product_is_that_of_what_was_handed_over(route: str) -> None:
    model = handed_over(model_of(route))
    assert model.scales == ("", "", "", SCALE, "", "")
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
def test_a_scale_that_is_known_errs_as_those_of_rows_do(name: str) -> None:
    y = draw_rows(distribution_named(name), 256, 512, 0).bfloat16()
    x = nn.functional.hardswish(mods.BlockRMSNorm(512, 256)(y))
    w = draw_weight(distribution_named("X2"), 64, 512, 0).bfloat16()
    exact, right = x.double() @ w.double().t(), rounded(w, Granularity.ROW).t()
    scale = torch.tensor([[16.0 / 448.0]])
    static, _ = numerics.quantize_static(x, Format.E4M3FN, Granularity.TENSOR, scale)
    known = numerics.measure_errors(numerics.dequantize(static).double() @ right, exact).row_err
    by_row = numerics.measure_errors(rounded(x, Granularity.ROW) @ right, exact).row_err
    assert known < 0.05 and known < 1.2 * by_row


def test_gradients_are_those_of_an_input_that_was_not_rounded() -> None:
    layer, found = model_of()[3], []
    h = nn.functional.hardswish(torch.rand(48, 48) * 6 - 3).bfloat16()
    for scale in ("", SCALE):
        x = h.clone().requires_grad_()
        y = layer(x, input_scale=scale)
        y.backward(rows(k=40, seed=2))
        found.append([x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
        layer.zero_grad()
    assert same(found[0], found[1])


def test_few_rows_are_not_quantized_and_no_rows_are_none() -> None:
    for m in (0, 7):
        assert torch.equal(handed_over(model_of())(rows(m)), nn.Sequential(*model_of())(rows(m)))


def test_rows_of_zeros_and_such_as_are_not_finite() -> None:
    x = rows()
    x[1] = 0.0
    x[2, 0] = float("nan")
    model = handed_over(model_of())
    y = model(x)
    assert y[2].isnan().all() and y[[0, 1, *range(3, 48)]].isfinite().all()


def test_it_compiles_whole_and_computes_the_same() -> None:
    torch._dynamo.reset()
    model = handed_over(model_of())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, gradient = rows(), rows(k=8, seed=2)
    assert same(passed(compiled, x, gradient), passed(model, x, gradient))


def test_scales_are_known_behind_block_norm_and_what_enlarges_nothing() -> None:
    layer = LinearNormAct(48, 48, norm="block_rms(16)", activation="silu")
    layer.take_routes((BY_ROW, "", ""), layer.weight)
    odd, plain = Linear(48, 48), Linear(24, 48)
    odd.take_routes((BY_ROW, "", ""), odd.weight)
    for modules, expected in (
        ([layer, layer, odd], ["", SCALE, SCALE]),
        ([mods.BlockRMSNorm(48, 16), nn.GELU(), odd], [""] * 3),
        ([mods.BlockRMSNorm(48, 16), nn.Dropout(), odd], [""] * 3),  # which enlarges what it keeps
        ([nn.LayerNorm(48), odd], [""] * 2),
        ([mods.BlockRMSNorm(24, 8), plain], [""] * 2),  # nothing is quantized there
    ):
        assert list(scales_between(nn.Sequential(*modules), current_device())) == expected


def test_budgets_that_allow_for_it() -> None:
    assert is_affordable(ErrorBudget(row_err=0.06)) and not is_affordable(
        ErrorBudget(row_err=0.045)
    )
    assert not is_affordable(None)
    assert not is_affordable(ErrorBudget(row_err=0.06, mean_shift=1e-3))  # which nobody measured


@pytest.fixture
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    Book(tmp_path_factory.mktemp("book") / "rows.sqlite").write(*measured())
    yield
    selection.use_snapshot(None)


@pytest.mark.usefixtures("known")
def test_convert_hands_over_and_takes_it_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, K), mods.BlockRMSNorm(K, 16), nn.Hardswish(), nn.Linear(K, N)
    ).bfloat16()
    x = torch.randn(256, 8).bfloat16()
    before = model(x)
    found = lokakern.convert(model, 0.06, device=H200, distribution="X1")
    assert found.handed_over == ["3"] and "1 inputs handed over in FP8" in repr(found)
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
