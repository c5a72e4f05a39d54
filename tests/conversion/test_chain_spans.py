"""Spans of layers in models, and chains in conversions."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern.chain.candidates import Layer
from lokakern.conversion.chain_spans import FoundLayer, spans_of
from lokakern.conversion.convert import Conversion
from lokakern.nn.adoption import adopt
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_norm import NORM_SCALE
from lokakern.nn.chain_plan import steps_at
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import kernel_at
from lokakern.nn.static_handoff import remove_handoff
from lokakern.selection import dispatcher
from lokakern.selection.weight_forms import with_weight
from lokakern.types import ErrorBudget, Format
from lokakern.workloads.norm_cases import norm_quantize_case
from lokakern.workloads.suite_files import suite_from_file
from tests.conversion.test_chains import static_rows
from tests.support import measurements
from tests.support.chain_rows import NARROW, NONE, ROW, WIDE, layer_problem, plain_rows
from tests.support.chained_models import convert, is_chained, line, rows, tower
from tests.support.conversions import H200
from tests.support.measurements import BF16, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED

EPILOGUES = {
    "relu": ([nn.ReLU()], "bias+relu"),
    "in place": ([nn.SiLU(inplace=True)], "bias+silu"),
    "norm": ([nn.LayerNorm(64)], "bias+layer+affine"),
    "norm and activation": ([nn.LayerNorm(64), nn.Hardswish()], "bias+layer+affine+hardswish"),
    "norm without parameters": (
        [nn.LayerNorm(64, elementwise_affine=False), nn.ReLU()], "bias+layer+relu",
    ),
    "norm without bias": ([nn.LayerNorm(64, bias=False)], "bias+layer+affine"),
    "rms": ([nn.RMSNorm(64, eps=1e-6), nn.SiLU()], "bias+rms+affine+silu"),
    "gelu": ([nn.GELU()], "bias+gelu"),
    "norm and gelu": ([nn.LayerNorm(64), nn.GELU("tanh")], "bias+layer+affine+gelu_tanh"),
    "blocks": ([BlockRMSNorm(64, 16), nn.ReLU()], "bias+block_rms(16)+relu"),
}  # fmt: skip


def found_in(module: nn.Module) -> list[list[FoundLayer]]:
    for layer in module.modules():
        adopt(layer)
    return spans_of(module, lambda _: True)


def names_of(module: nn.Module) -> list[list[str]]:
    return [[x.layer.epilogue for x in span] for span in found_in(module)]


@pytest.mark.parametrize("name", EPILOGUES)
def test_layers_have_what_follows_them(name: str) -> None:
    modules, epilogue = EPILOGUES[name]
    model = line(nn.Linear(32, 64), *modules, nn.Linear(64, 16, bias=False))
    ((first, last),) = found_in(model)
    assert first.layer == (64, 32, epilogue)
    assert last.layer == (16, 64, "none")
    assert (first.place, first.stop, last.place) == (0, 1 + len(modules), 1 + len(modules))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("place", [1, 2])
def test_a_norm_or_an_activation_with_a_hook_ends_a_layer(
    activation: type[nn.Module], place: int
) -> None:
    model = line(nn.Linear(32, 64), nn.LayerNorm(64), activation(), nn.Linear(64, 16))
    model[place].register_forward_hook(lambda *_: None)
    epilogues = {1: [], 2: [["bias+layer+affine"]]}  # products alone are no span
    assert names_of(model) == epilogues[place]


def test_eps_is_that_of_the_norm() -> None:
    ((first,),) = found_in(line(nn.Linear(32, 64), nn.LayerNorm(64, eps=1e-3)))
    assert first.eps == 1e-3


@pytest.mark.parametrize(
    "between",
    [nn.ELU(), nn.AlphaDropout(0.1), nn.Flatten(), nn.LayerNorm((8, 64)),
     nn.RMSNorm(64), nn.LayerNorm(64, dtype=torch.float32)],
    ids=repr,
)  # fmt: skip
def test_other_modules_end_a_span(between: nn.Module) -> None:
    model = nn.Sequential(
        *(nn.Linear(64, 64).bfloat16(), nn.ReLU(), nn.Linear(64, 64).bfloat16()),
        between, *(nn.Linear(64, 64).bfloat16(), nn.ReLU()),
    )  # fmt: skip
    assert names_of(model) == [["bias+relu", "bias"], ["bias+relu"]]


def test_identities_and_dropout_are_passed_over() -> None:
    model = line(
        nn.Identity(), nn.Linear(64, 64), nn.Identity(), nn.LayerNorm(64), nn.Dropout(), nn.ReLU(),
        nn.Dropout(), nn.Linear(64, 64), nn.Dropout(),
    )  # fmt: skip
    ((first, last),) = found_in(model)
    assert (first.place, first.stop, last.place, last.stop) == (1, 6, 7, 8)
    assert first.layer.epilogue == "bias+layer+affine+relu"


def test_a_norm_after_the_activation_ends_a_span() -> None:
    model = line(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU())
    assert names_of(model) == [["bias+relu"], ["bias+silu"]]


def test_sizes_that_do_not_fit_end_a_span() -> None:
    model = line(nn.Linear(64, 32), nn.ReLU(), nn.Linear(64, 64), nn.SiLU())
    assert names_of(model) == [["bias+relu"], ["bias+silu"]]


def test_products_alone_are_no_span() -> None:
    assert not found_in(line(nn.Linear(64, 64)))
    assert not found_in(line(nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 64)))


def test_float32_layers_are_no_span() -> None:
    assert not found_in(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))


def test_layers_with_norm_and_activation_are_layers_of_a_span() -> None:
    norm = functools.partial(LinearNormAct, dtype=torch.bfloat16)
    model = line(norm(32, 64), norm(64, 64, norm="none", activation=None), norm(64, 16, norm="rms"))
    assert names_of(model) == [["bias+layer+affine+relu", "bias", "bias+rms+affine+relu"]]
    assert names_of(norm(32, 64)) == [["bias+layer+affine+relu"]]
    assert not found_in(norm(32, 64, norm="none", activation=None))


# --- conversions


def chain_count(handle: Conversion) -> int:
    return sum(len(span.plan.chains) for span in handle.spans)


def test_a_conversion_tells_its_chains(
    chain_book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = convert(tower(), 0.06)
    assert "1 chain of 2 layers" in repr(handle)
    row = handle.choices[-1]
    assert (row["site"], row["gemm"], row["n"], row["k"]) == ("0 to 2", "chain", 512, 512)
    assert row["m"] == [512, 2048]
    assert row["us"] == pytest.approx([22.0, 62.0])
    assert row["rival_us"] == pytest.approx([40.0, 120.0])
    for name in (None, "0", "2"):
        assert "chain of 2 layers (1024 x 512 bias+relu, " in handle.explain(name)
    handle.table()
    assert "0 to 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (None, "there is no budget"),
        (ErrorBudget(sqnr_db=30), "the budget limits sqnr_db; of chains only row_err is known"),
    ],
)  # fmt: skip
def test_without_a_limit_on_row_errors_there_are_no_chains(
    chain_book: Book, budget: object, words: str
) -> None:
    handle = convert(tower(), budget)
    assert not handle.spans
    assert handle.explain().endswith(f"no chains: {words}")


def test_chains_are_on_unless_they_are_turned_off(chain_book: Book) -> None:
    on, off = (
        lokakern.convert(tower(), 0.06, device=H200, distribution="X1", inference=True, **given)
        for given in ({}, {"chains": False})
    )
    assert (chain_count(on), chain_count(off), on.why_no_chains) == (1, 0, "")
    assert off.explain().endswith("no chains: chains=False")


def test_forced_kernels_are_no_chains(chain_book: Book) -> None:
    handle = lokakern.convert(tower(), kernels="row", device=H200, inference=True)
    assert handle.why_no_chains == "kernels were forced"


def test_a_checked_conversion_has_no_chains(chain_book: Book) -> None:
    assert "check=" in convert(tower(), 0.06, check="10:4").explain()


def test_conversions_for_training_have_no_chains(chain_book: Book) -> None:
    handle = convert(tower(), 0.06, inference=False)
    assert not handle.spans
    assert "chain" not in handle.explain()


def test_layers_that_are_not_converted_are_in_no_chain(chain_book: Book) -> None:
    handle = convert(tower(), 0.06, skip="0")
    assert [span.sites for span in handle.spans] == [("2",)]


def test_a_refresh_plans_again(chain_book: Book) -> None:
    handle = convert(tower(), 0.06)
    assert chain_count(handle) == 1
    assert handle.refresh(0.06) == []
    assert handle.refresh(0.01) == ["0 to 2/chain"]
    assert chain_count(handle) == 0
    assert "over the budget" in handle.explain()
    assert handle.refresh(0.06) == ["0 to 2/chain"]
    assert chain_count(handle) == 1
    handle.undo()
    assert not handle.spans


def test_equal_spans_are_planned_once(chain_book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    from lokakern.conversion import chain_spans

    calls = []
    plan = chain_spans.plan_span
    monkeypatch.setattr(
        chain_spans, "plan_span", lambda *args: calls.append(args) or plan(*args)
    )  # fmt: skip
    handle = convert(nn.ModuleList([tower(), tower(), tower()]), 0.06)
    assert (chain_count(handle), len(calls)) == (3, 1)


def test_a_suite_lists_what_chains_need(chain_book: Book, tmp_path: Path) -> None:
    model = line(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.LayerNorm(512), nn.ReLU(),
        nn.Linear(512, 128), nn.ReLU(),
    )  # fmt: skip
    text = convert(model, 0.06).suite([512])
    assert 'n = 128\nk = 512\nepilogue = "bias+relu"\nforms = ["chain"]' in text
    assert text.count('"chain"') == 1
    (tmp_path / "s.toml").write_text(text)
    cases = list(suite_from_file(tmp_path / "s.toml").build(Format.E4M3FN))
    found = [case.problem for case in cases if case.problem.op == "gemm_norm"]
    layer = Layer(128, 512, "bias+relu")
    for reads, weight in ((NONE, NONE), (NONE, ROW), (ROW, ROW)):
        assert layer_problem(layer, 512, reads, weight, NONE) in found


def test_names_of_modules_may_be_any(chain_book: Book) -> None:
    model = nn.Sequential(OrderedDict(zip("abcde", tower(), strict=True)))
    assert convert(model, 0.06).choices[-1]["site"] == "a to c"


def test_a_layer_that_no_kernel_takes_is_in_no_chain(chain_book: Book) -> None:
    model = line(nn.Linear(512, 1023), nn.ReLU(), nn.Linear(1023, 512), nn.ReLU())
    spans = convert(model, 0.06).spans
    assert [span.sites for span in spans] == [("2",)]
    assert spans[0].plan.why.startswith("not measured")


def test_what_is_not_measured_is_told(chain_book: Book) -> None:
    chain_book.write(*plain_rows(WIDE, 512, 10.0), *plain_rows(NARROW, 512, 10.0))
    dispatcher.use_snapshot(None)
    handle = convert(line(nn.Linear(24, 48), nn.ReLU()), 0.06)
    assert "0: no chain: not measured at these sizes" in handle.explain()


# --- what runs


def test_a_chain_runs_at_m_where_it_is_faster(chain_book: Book) -> None:
    model = tower()
    with torch.no_grad():
        plain = {m: model(rows(m)) for m in (512, 100)}
    handle = convert(model, 0.06)
    assert (is_chained(model, 512), is_chained(model, 100)) == (True, False)
    with torch.no_grad():
        y = model(rows(512))
        assert torch.equal(model(rows(100)), plain[100])
    assert not torch.equal(y, plain[512])
    assert (y - plain[512]).float().norm() < 0.06 * plain[512].float().norm()
    handle.undo()
    assert type(model) is nn.Sequential
    assert not list(model.buffers())
    with torch.no_grad():
        assert torch.equal(model(rows(512)), plain[512])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_dropout_in_training_runs_the_layers(chain_book: Book, is_compiled: bool) -> None:
    first, relu, second, norm, last = tower()
    model = nn.Sequential(
        first, nn.Identity(), relu, nn.Dropout(0.5), second, norm, last, nn.Dropout(0.5)
    ).eval()
    handle = convert(model, 0.06)
    assert chain_count(handle) == 1
    call = torch.compile(model, backend="eager") if is_compiled else model
    assert is_chained(call)
    model.train()
    assert not is_chained(call)
    handle.use_routes({})  # as in tuning
    model.eval()
    assert is_chained(call)
    model[3].register_forward_hook(lambda *_: None)
    if not is_compiled:  # compiled code does not see hooks that come later
        assert not is_chained(call)


def test_a_copy_keeps_its_chains_after_an_undo(chain_book: Book) -> None:
    model = tower()
    handle = convert(model, 0.06)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(rows())
    handle.undo()
    assert is_chained(twin)
    with torch.no_grad():
        assert torch.equal(twin(rows()), before)


def test_a_refresh_without_chains_runs_the_layers(chain_book: Book) -> None:
    model = tower()
    handle = convert(model, 0.06)
    handle.refresh(0.01)
    assert not is_chained(model)
    handle.refresh(0.06)
    assert is_chained(model)


def test_a_refresh_quantizes_changed_weights(chain_book: Book) -> None:
    model, other = tower(), tower()
    handle = convert(model, 0.06)
    with torch.no_grad():
        for x in (*model.parameters(), *other.parameters()):
            x.mul_(2)
        handle.refresh()
        convert(other, 0.06)
        assert torch.equal(model(rows()), other(rows()))


def test_a_layer_with_norm_and_activation_alone_is_a_chain(chain_book: Book) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LinearNormAct(1024, 512, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.cat([x, x], 1))

    model = Owner()
    handle = convert(model, 0.06)
    assert [span.sites for span in handle.spans] == [("inner",)]
    assert chain_count(handle) == 1
    assert is_chained(model)
    handle.undo()
    assert not is_chained(model)


def test_static_scales_and_activations_hold_where_no_chain_runs(chain_book: Book) -> None:
    # The third layer reads what a BlockRMSNorm bounds; the first two are a chain.
    model = line(*tower(), nn.Linear(512, 512), BlockRMSNorm(512, 256), nn.ReLU(),
                 nn.Linear(512, 64))  # fmt: skip
    rows_ = []
    for n in (512, 64):
        prepared = with_weight(gemm(512, n, 512), ROW, measurements.H200)
        rows_ += [time(BF16, prepared, 20.0), time(ROUTED, prepared, 5.0),
                  accuracy(ROUTED, prepared, 0.04)]  # fmt: skip
    chain_book.write(*rows_)
    handle = convert(model, 0.06)
    assert chain_count(handle) == 1
    assert handle.handed_over == ["8"]
    assert is_chained(model)


def test_an_activation_before_a_chain_is_not_that_of_a_quantizer(chain_book: Book) -> None:
    """The chain begins with the layer behind the relu at m = 512, and not at m = 128."""
    model = line(nn.Linear(512, 512), nn.ReLU(), *tower())
    relu = norm_quantize_case(16, 512, "relu", "X1", Format.E4M3FN, ROW).problem
    prepared = with_weight(gemm(512, 1024, 512), ROW, measurements.H200)
    rows_ = [accuracy(ROUTED, prepared, 0.04)]
    for m in (128, 512):
        at = replace(prepared, m=m)
        rows_ += [time("cuda.activate_quantize_row", replace(relu, m=m), 1.0),
                  time(BF16, at, 30.0), time(ROUTED, at, 20.0)]  # fmt: skip
    chain_book.write(*rows_)
    handle = convert(model, 0.06)
    assert chain_count(handle) == 1
    handoff = model._handoffs[-1]
    assert steps_at(handoff.chains[2], 512) and not steps_at(handoff.chains[2], 128)
    assert [kernel_at(handoff.activating[1], m) for m in (128, 496, 512)] == [
        "cuda.activate_quantize_row", "cuda.activate_quantize_row", "",
    ]  # fmt: skip
    for run in (model, torch.compile(model, backend="eager", dynamic=False)):
        assert is_chained(run)
    handle = convert(model, 0.06, m_range=(512, 512))
    assert chain_count(handle) == 1 and model._handoffs[-1].activating[1] == ""
    handle = convert(model, 0.06, chains=False)
    assert kernel_at(model._handoffs[-1].activating[1], 512)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()) for _ in range(2)]
    model = line(*(module for some in layers for module in some)).requires_grad_(False)
    for norm in (model[1], model[4]):
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    return model


def writes_of(model: nn.Sequential) -> list[str]:
    return [str(step.writes) for step in steps_at(model._handoffs[-1].chains[0], 512)]


def test_a_static_scale_behind_an_affine_norm_follows_each_refresh(chain_book: Book) -> None:
    chain_book.write(*static_rows())
    model = normed()
    handle = convert(model, 0.06)
    assert writes_of(model) == ["tensor", "none"]
    x = torch.randn(512, 512).bfloat16()
    exact = copy.deepcopy(model).float()
    remove_handoff(exact)

    def error() -> float:
        with torch.no_grad():
            y = model(x).float()
            for norm, own in ((exact[1], model[1]), (exact[4], model[4])):
                norm.weight, norm.bias = (nn.Parameter(z.float()) for z in (own.weight, own.bias))
            for module in (z := x.float(), *exact)[1:]:
                z = module(z)
        return ((y - z).norm() / z.norm()).item()

    assert error() < 0.08
    model[1].weight.mul_(50)
    assert error() > 0.2, "the weight is frozen, as those of layers are"
    assert handle.refresh() == []  # the same kernels
    assert error() < 0.08
    model[1].weight[0] = 1e6  # all others are near the smallest steps
    assert handle.refresh() == ["0 to 3/chain"]
    assert writes_of(model) == ["row", "none"]
    assert NORM_SCALE not in model[0]._buffers
    handle.undo()
    assert not model[1]._load_state_dict_post_hooks


def test_a_small_budget_and_between_have_no_static_scales(chain_book: Book) -> None:
    chain_book.write(*static_rows(row_err=0.041))
    for arguments in ({"report_or_budget": 0.049}, {"report_or_budget": 0.06, "between": False}):
        model = normed()
        convert(model, **arguments)
        assert not hasattr(model, "_handoffs") or "tensor" not in model._handoffs[-1].chains[0]
        assert NORM_SCALE not in model[0]._buffers


def test_layers_of_chains_are_not_offloaded(chain_book: Book) -> None:
    model = tower()
    found = []
    for n, k in ((1024, 512), (512, 1024)):
        prepared = with_weight(gemm(512, n, k), ROW, measurements.H200)
        found += [time(BF16, prepared, 30.0), time(ROUTED, prepared, 19.0),
                  accuracy(ROUTED, prepared, 0.04)]  # fmt: skip
    chain_book.write(*found)
    handle = convert(model, 0.06)
    assert chain_count(handle) == 1
    handle.offload(m_range=(512, 512))
    assert not any(site.module.is_offloaded for site in handle.sites.values())
    assert is_chained(model)
    handle = convert(model, 0.06, between=False)
    handle.offload(m_range=(512, 512))
    assert all(site.module.is_offloaded for site in handle.sites.values())


def test_between_switches_chains_off(chain_book: Book) -> None:
    model = tower()
    assert convert(model, 0.06, between=False).why_no_chains == "between=False"
    assert not is_chained(model)
