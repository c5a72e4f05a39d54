"""Frozen choices of conversions: the same routes and chains without a database, forged ones not."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lokakern
from lokakern.conversion.chains import PlannedChain
from lokakern.conversion.convert import Conversion
from lokakern.conversion.step_host import StepHost, host_of_step
from lokakern.device import current_device
from lokakern.errors import ChoicesError
from lokakern.nn.chain_plan import steps_at
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection import dispatcher
from lokakern.selection.frozen import file_format
from lokakern.selection.frozen.answers import LARGEST_M, question, spans_of_m
from lokakern.selection.weight_forms import with_weight
from lokakern.types import ErrorBudget, Granularity
from tests.conversion.test_chain_spans import normed
from tests.conversion.test_chain_verdicts import BOTH
from tests.conversion.test_chains import static_rows
from tests.conversion.test_convert import K, N, measured, model_of
from tests.conversion.test_inlined_forwards import made as blocks
from tests.support.chain_rows import FUSED, QUANTIZING, both
from tests.support.chained_models import chains_of, convert, is_chained, rows, tower
from tests.support.conversions import report_of
from tests.support.measurements import BF16, H200, Book, gemm, time
from tests.support.measurements import ROW as ROW_KERNEL

Edit = Callable[[list[str]], list[str]]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 is a device of this machine, whose kernels are emulated."""
    here = frozenset({H200, current_device("cpu")})
    for module in ("dispatcher", "frozen.lookup", "frozen.file_format", "frozen.write"):
        monkeypatch.setattr(f"lokakern.selection.{module}.devices_here", lambda: here)
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """Times and errors of the layers of `model_of`, and of the chain of `tower`."""
    book = Book(tmp_path / "rows.sqlite")
    prepared = []
    for m, bf16 in ((256, 4.0), (1024, 16.0)):
        problem = with_weight(gemm(m, N, K), Granularity.ROW, H200)
        prepared += [time(BF16, problem, bf16), time(ROW_KERNEL, problem, bf16 / 2)]
    return book.write(
        *prepared, *measured(), *both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}),
        time(RELU_KERNEL, gemm(64), 1.0),
    )  # fmt: skip


def freeze(path: Path) -> Path:
    """Write the choices that were made, answer from them, and forbid every database."""
    lokakern.freeze(path / "choices.json")
    dispatcher.use_choices(path / "choices.json")
    return path / "choices.json"


@pytest.fixture
def _no_database(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        monkeypatch.setattr(dispatcher, "snapshot", lambda: pytest.fail("a database was read"))

    return forbid


def texts_of(found: Conversion) -> list[Any]:
    """All that a conversion chose."""
    sites = [[(r.text, r.eager) for r in site.routes] for site in found.sites.values()]
    chains = [
        (span.sites, [(c.start, c.stop, c.layers, c.text) for c in span.plan.chains])
        for span in found.spans
    ]
    return [sites, chains, found.rectified, found.joined, found.forms]


@pytest.mark.parametrize("regime", ["compiled", "graph-cold"])
@pytest.mark.parametrize("inference", [True, False])
def test_routes_equal_those_of_the_database(
    book: Book, tmp_path: Path, inference: bool, regime: str, _no_database: Callable[[], None]
) -> None:
    def convert_again() -> Conversion:
        return lokakern.convert(
            model_of(), 0.06, device=H200, inference=inference, distribution="X1", regime=regime
        )

    before = convert_again()
    assert before.sites["0"].routes[0].text
    assert inference or all(route.text for route in before.sites["0"].routes)
    freeze(tmp_path)
    _no_database()
    after = convert_again()
    assert texts_of(after) == texts_of(before)
    assert f"of the choices of {tmp_path}" in after.explain("0")
    (why,) = {route.why for route in after.sites["2"].routes if "inference" not in route.why}
    assert why.startswith(f"no kernel for it is among the choices of {tmp_path}")
    assert after.refresh() == []


def test_chains_across_forwards_equal_those_of_the_database(
    book: Book, tmp_path: Path, _no_database: Callable[[], None]
) -> None:
    model = blocks()
    before = convert(model, 0.06)
    assert chains_of(before) == ["blocks.0.fc blocks.1.fc"]
    freeze(tmp_path)
    _no_database()
    assert texts_of(convert(model, 0.06)) == texts_of(before) and is_chained(model)


@pytest.mark.parametrize("by", [0.06, report_of(*BOTH)], ids=["budget", "report"])
def test_chains_equal_those_of_the_database(
    book: Book, tmp_path: Path, by: Any, _no_database: Callable[[], None]
) -> None:
    model = tower()
    before = convert(model, by)
    with torch.no_grad():
        y = model(rows())
    freeze(tmp_path)
    _no_database()
    again = tower()
    again.load_state_dict(model.state_dict())
    after = convert(again, by)
    assert is_chained(again)
    assert texts_of(after) == texts_of(before)
    with torch.no_grad():
        assert torch.equal(again(rows()), y)
    assert f"{QUANTIZING}, {FUSED}" in after.explain()
    assert after.choices[-1]["choice"] == f"{QUANTIZING}, {FUSED}"
    assert "of the choices of" in after.choices[-1]["why"]


@pytest.mark.parametrize(
    "change",
    [{"report_or_budget": 0.05}, {"m_range": (600, 900)}, {"regime": "graph-hot"},
     {"weight_scales": ["row"]}, {"distribution": "X2"}],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_a_miss(book: Book, tmp_path: Path, change: dict[str, Any]) -> None:
    arguments = {"report_or_budget": 0.06, "distribution": "X1"}
    convert(tower(), **arguments)
    freeze(tmp_path)
    found = convert(tower(), **{**arguments, **change})
    assert not any(route.text for site in found.sites.values() for route in site.routes)
    assert [span.plan.chains for span in found.spans] == [()]
    assert "none is among the choices of" in found.explain()


def test_another_report_is_a_miss(book: Book, tmp_path: Path) -> None:
    convert(tower(), report_of(*BOTH))
    freeze(tmp_path)
    assert not convert(tower(), report_of(BOTH[0])).spans[0].plan.chains


def test_the_host_of_a_step_is_kept(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = lokakern.convert(model_of(), 0.06, device=H200, distribution="X1").sites["0"].routes
    expected = StepHost(60.25, 12.0, 3, 256)
    with monkeypatch.context() as patch:
        patch.setattr("lokakern.conversion.step_host.step_host", lambda *_: expected)
        assert host_of_step(routes, H200, "compiled") == expected
    path = freeze(tmp_path)
    assert host_of_step(routes, H200, "compiled") == expected
    assert host_of_step(routes[:2], H200, "compiled") is None
    forge(path, "training step ", lambda texts: [*texts[:3], "-1"])
    with pytest.raises(ChoicesError, match="are no numbers of a step"):
        host_of_step(routes, H200, "compiled")


# --- files


def forge(path: Path, about: str, edit: Edit) -> None:
    """Edit the answers to questions of a kind, with a valid digest."""
    whole = json.loads(path.read_text())
    answers = [x for x in whole["answers"] if x["question"].startswith(about)]
    assert answers
    for row in answers:
        row["answer"] = edit(row["answer"])
    whole["digest"] = file_format.digest_of(whole)
    path.write_text(json.dumps(whole))
    dispatcher.use_choices(path)


def replaced(old: str, new: str) -> Edit:
    def edit(texts: list[str]) -> list[str]:
        assert any(old in text for text in texts)
        return [text.replace(old, new) for text in texts]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda texts: texts[:5], "5 texts answer routes"),
        (lambda _: ["import os"] * 6, "'import os' is no route"),
        (replaced("row;16:", "none;16:"), "is no route here"),
        (replaced("row;16:", "tensor;16:"), "reads row weights"),
        (replaced("16:0=,", "16:"), "expected ascending m from 0"),
        (replaced("256=", "9" * 13 + "="), "is no route"),
        (replaced("cuda.quantize_row+", "cuda.quantize_rows+"), "is no kernel of the file"),
        (replaced("cuda.quantize_row+torch.scaled_mm_row", BF16), "is no kernel of the file"),
        (replaced("cuda.quantize_row+torch.scaled_mm_row", RELU_KERNEL), "reads none weights"),
        (lambda texts: [*texts[:2], texts[0], *texts[3:]], "kernels of gradients"),
    ],
)
def test_forged_routes_are_refused(book: Book, tmp_path: Path, edit: Edit, words: str) -> None:
    arguments = {"device": H200, "inference": True, "distribution": "X1"}
    lokakern.convert(model_of(), 0.06, **arguments)  # type: ignore[arg-type]
    path = freeze(tmp_path)
    forge(path, "routes ", edit)
    model = model_of()
    with pytest.raises(ChoicesError) as found:
        lokakern.convert(model, 0.06, **arguments)  # type: ignore[arg-type]
    assert words in str(found.value) and str(path) in str(found.value)
    assert type(model[0]) is nn.Linear


def test_a_kernel_has_to_take_its_routes(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"device": H200, "inference": True, "distribution": "X1"}
    lokakern.convert(model_of(), 0.06, **arguments)  # type: ignore[arg-type]
    freeze(tmp_path)
    monkeypatch.setattr(
        "lokakern.registry.register.Kernel.refusal",
        lambda _, problem, device: "too many rows" if problem.m > 1000 else None,
    )
    with pytest.raises(ChoicesError, match="does not take a product at m=1024: too many rows"):
        lokakern.convert(model_of(), 0.06, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda texts: ["0 2"], "'0 2' is no chain"),
        (replaced("0 2 ", "-1 2 "), "is no chain"),
        (replaced("0 2 ", "0 3 "), "a chain of layers 0 to 3 of 2"),
        (replaced("0 2 ", "1 2 "), "is no plan of"),
        (lambda texts: texts * 2, "a chain of layers 0 to 2 of 2"),
        (replaced("1024|512|bias", "1024|256|bias"), "is no plan of"),
        (replaced("1e-05", "nan"), "is no plan of"),
        (replaced("|row;16:", "|tensor;16:"), "weights of"),
        (replaced("|row;16:", "|1x32;16:"), "weights are"),
        (replaced("16:0=", "16:16="), "expected ascending m from 0"),
        (replaced(f"1|{FUSED}", f"0|{FUSED}"), "launch 2 of a chain does not fit"),
        (replaced(f"|{FUSED}|row|", f"|{FUSED}|none|"), "launch 2 of a chain does not fit"),
        (replaced("|row|row+1", "|row|1x128+1"), "launch 2 of a chain does not fit"),
        (replaced(FUSED, "cuda.gemm_norm_rows"), "is no kernel of the file"),
        (replaced(FUSED, "cuda.quantize_row"), "is no kernel of the file"),
    ],
)
def test_forged_chains_are_refused(book: Book, tmp_path: Path, edit: Edit, words: str) -> None:
    convert(tower(), 0.06)
    path = freeze(tmp_path)
    forge(path, "chains ", edit)
    model = tower()
    with pytest.raises(ChoicesError) as found:
        convert(model, 0.06)
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear
    assert words in str(found.value) and str(path) in str(found.value)


def test_a_rule_of_a_kernel_names_it(book: Book, tmp_path: Path) -> None:
    convert(tower(), 0.06)
    path = freeze(tmp_path)
    assert dispatcher.is_timed(RELU_KERNEL, H200)
    assert not dispatcher.is_timed(FUSED, H200), "nobody asked for it"
    forge(path, "timed ", lambda _: ["yes"])
    with pytest.raises(ChoicesError, match="is wrong"):
        dispatcher.is_timed(RELU_KERNEL, H200)


def test_a_file_of_the_first_version_has_no_answers(book: Book, tmp_path: Path) -> None:
    convert(tower(), 0.06)
    path = freeze(tmp_path)
    whole = json.loads(path.read_text())
    del whole["answers"]
    whole["version"] = 1
    whole["digest"] = file_format.digest_of(whole)
    path.write_text(json.dumps(whole))
    dispatcher.use_choices(path)
    assert not convert(tower(), 0.06).spans[0].plan.chains


def test_the_order_of_conversions_does_not_change_the_file(book: Book, tmp_path: Path) -> None:
    contents = []
    facts: Snapshot = dispatcher.snapshot()
    for budgets in ((0.06, 0.07), (0.07, 0.06)):
        dispatcher.use_snapshot(facts)
        for budget in budgets:
            convert(tower(), budget)
        lokakern.freeze(tmp_path / "choices.json")
        contents.append({**json.loads((tmp_path / "choices.json").read_text()), "frozen_utc_ms": 0})
    assert contents[0] == contents[1]


def test_questions_are_equal_for_equal_arguments_only() -> None:
    asked = question("routes", n=N, k=K, budget=ErrorBudget(row_err=0.06), form=Granularity.ROW)
    assert asked == f"routes n={N} k={K} budget={{'row_err':0.06}} form='row'"
    long = [question("routes", names=["X1"] * count) for count in (1000, 1001)]
    assert len({*long}) == 2 and all(len(text) < 80 for text in long)
    with pytest.raises(TypeError, match="object has no text"):
        question("routes", n=object())


@pytest.mark.parametrize("is_aligned", [True, False])
def test_ranges_of_m_have_ends_of_their_alignment(is_aligned: bool) -> None:
    starts = [0, 16, 17, 18, 32, 33, 100]
    for (low, high), ends in zip(
        zip(starts, [*(x - 1 for x in starts[1:]), 300], strict=True),
        spans_of_m(starts, is_aligned), strict=True,
    ):  # fmt: skip
        inside = [m for m in range(max(low, 1), high + 1) if (m % 16 == 0) is is_aligned]
        if low == 100:
            assert ends is not None and ends[0] == inside[0] and ends[1] > LARGEST_M - 17
        else:
            assert ends == ((inside[0], inside[-1]) if inside else None)


def test_a_plan_of_a_file_runs_where_the_database_ran_it(book: Book, tmp_path: Path) -> None:
    ((chain,),) = (span.plan.chains for span in convert(tower(), 0.06).spans)
    freeze(tmp_path)
    ((frozen,),) = (span.plan.chains for span in convert(tower(), 0.06).spans)
    for m in (1, 511, 512, 513, 1000, 2048, 2049):
        assert steps_at(frozen.text, m) == steps_at(chain.text, m)


def trained(spread: float) -> nn.Sequential:
    """Layers with norms whose weights spread around 1."""
    model = normed()
    for norm in (model[1], model[4]):
        norm.weight.uniform_(1 - spread, 1 + spread)
    return model.eval()


def chain_of(found: Conversion) -> PlannedChain:
    ((chain,),) = (span.plan.chains for span in found.spans)
    return chain


@pytest.mark.parametrize("is_reversed", [False, True])
def test_chains_of_a_file_run_after_training(tmp_path: Path, is_reversed: bool) -> None:
    """But not where a static scale behind a norm would now add too much to the error.

    Of spans that differ in the values of norms alone, the one with the fewest such scales is used.
    """
    Book(tmp_path / "rows.sqlite").write(*static_rows())
    extreme = trained(0.0)
    extreme[1].weight[0] = 1e5  # all others are near the smallest steps
    models = [trained(0.0), trained(0.3)]
    chains = [chain_of(convert(model, 0.06)) for model in models[:: -1 if is_reversed else 1]]
    assert chains[0].text == chains[1].text
    # What 0.045 leaves of 0.06.
    assert chains[0].most_added == (pytest.approx(0.0397, abs=1e-4), math.inf)
    assert [step.writes for step in chains[0].launches[0]] == [Granularity.TENSOR, Granularity.NONE]
    freeze(tmp_path)
    for spread in (0.0, 0.8):
        model = trained(spread)
        assert chain_of(convert(model, 0.06)).text == chains[0].text and is_chained(model)
    found = convert(extreme, 0.06)
    assert not found.spans[0].plan.chains and not is_chained(extreme)
    assert "over the budget: behind the norm of layer 1 a static scale adds" in found.explain()
    assert "has room for 0.03969" in found.explain()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_alike_spans_that_with_the_fewest_static_scales_is_for_others(
    tmp_path: Path, is_reversed: bool
) -> None:
    Book(tmp_path / "rows.sqlite").write(*static_rows())
    extreme = trained(0.0)
    extreme[1].weight[0] = 1e5
    texts = []
    for model in (trained(0.0), extreme)[:: -1 if is_reversed else 1]:
        texts.append(chain_of(convert(copy.deepcopy(model), 0.06)).text)
    static, by_row = texts[:: -1 if is_reversed else 1]
    assert static != by_row
    freeze(tmp_path)
    assert chain_of(convert(trained(0.0), 0.06)).text == static
    for model in (trained(0.8), extreme):
        assert chain_of(convert(model, 0.06)).text == by_row


@pytest.mark.parametrize("most", ["inf,inf", "nan,inf", "0.01", "0.5,inf", "a,inf"])
def test_forged_room_for_a_static_scale_is_refused(most: str, tmp_path: Path) -> None:
    Book(tmp_path / "rows.sqlite").write(*static_rows())
    convert(trained(0.0), 0.06)
    path = freeze(tmp_path)

    def edit(texts: list[str]) -> list[str]:
        first, last, _, plan = texts[0].split(" ")
        return [f"{first} {last} {most} {plan}"]

    forge(path, "chains of any norms", edit)
    with pytest.raises(ChoicesError):
        convert(trained(0.8), 0.06)
