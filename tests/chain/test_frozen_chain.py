"""Chains in frozen choices: those of the database, and forged ones, which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lokakern
from lokakern import dispatch_chain
from lokakern.errors import ChoicesError
from lokakern.selection import dispatcher
from lokakern.selection.frozen import file_format
from tests.chain.test_chain import BLOCK, EMULATED, LAYERS, QUANTIZED, UNFUSED, known

__all__ = ["known"]  # a fixture: times of kernels that run here
M = 128
ASKED: list[dict[str, Any]] = [
    {"budget": 0.2},
    {"budget": 0.06},
    {"budget": None},
    {"budget": 0.2, "in_granularity": "row", "out_granularity": "tensor"},
    {"budget": None, "in_granularity": "row"},
    {"budget": 0.2, "prepared": False},
    {"budget": 0.2, "distribution": "X1", "regime": "eager"},
]


@pytest.fixture(autouse=True)
def _fresh(known: None) -> Iterator[None]:
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture
def freeze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    def write() -> Path:
        lokakern.freeze(tmp_path / "choices.json")
        dispatcher.use_choices(tmp_path / "choices.json")
        monkeypatch.setattr("lokakern.chain.candidates._measured", lambda *_, **__: iter(()))
        return tmp_path / "choices.json"

    return write


def launches(choice: Any) -> tuple[Any, ...]:
    return tuple((step.place, step.problem, step.kernel) for step in choice.steps)


def test_frozen_chains_equal_those_of_the_database(freeze: Callable[[], Path]) -> None:
    before = [dispatch_chain(LAYERS, M, **asked) for asked in ASKED]
    assert {name for choice in before for name in choice.kernels} >= {UNFUSED, EMULATED, QUANTIZED}
    path = freeze()
    after = [dispatch_chain(LAYERS, M, **asked) for asked in ASKED]
    assert [launches(x) for x in after] == [launches(x) for x in before]
    assert [x.formats for x in after] == [x.formats for x in before]
    assert [launches(x.unquantized) for x in after] == [launches(x.unquantized) for x in before]
    assert not any(choice.is_miss for choice in after)
    words = after[0].explain()
    assert f"by the choices of {path}" in words and "without times and errors" in words
    assert (after[0].latency_us, after[0].row_err, after[0].missing) == (None, None, ())


def test_a_frozen_chain_runs_with_the_same_bits(freeze: Callable[[], Path]) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(128, 128).bfloat16() for _ in LAYERS]
    biases = [torch.randn(128).bfloat16() for _ in LAYERS]
    x = torch.randn(M, 128).bfloat16()
    before = dispatch_chain(LAYERS, M, 0.2).prepare(weights, biases)(x)
    freeze()
    assert torch.equal(dispatch_chain(LAYERS, M, 0.2).prepare(weights, biases)(x), before)


@pytest.mark.parametrize(
    "asked",
    [{"m": M + 16}, {"budget": 0.1}, {"layers": LAYERS[:3]}, {"out_granularity": "row"},
     {"dtype": torch.float16}, {"distribution": "X1"}],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_a_miss(freeze: Callable[[], Path], asked: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"layers": LAYERS, "m": M, "budget": 0.2}
    dispatch_chain(**usual)
    path = freeze()
    choice = dispatch_chain(**{**usual, **asked})
    assert choice.is_miss and choice.steps == choice.plain
    assert choice.note.startswith(f"not among the choices of {path}")


def test_a_chain_that_was_not_measured_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lokakern.chain.candidates._measured", lambda *_, **__: iter(()))
    assert dispatch_chain(LAYERS, M, 0.2).is_miss
    with pytest.raises(ChoicesError, match="no choice was made here yet"):
        lokakern.freeze(tmp_path / "choices.json")


def first(old: str, new: str) -> Callable[[list[str]], list[str]]:
    """Replace a word in the first launch that has it."""

    def edit(texts: list[str]) -> list[str]:
        place = next(i for i, text in enumerate(texts) if old in text)
        return [*texts[:place], texts[place].replace(old, new, 1), *texts[place + 1 :]]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda texts: [], "Expected `array` of length >= 1"),
        (lambda texts: texts * 20, "Expected `array` of length <= 64"),
        (lambda texts: ["x" * 70_000], "at most 65536 printable characters"),
        (lambda texts: ["\x1b"], "printable characters"),
        (lambda texts: texts[0], "Expected `array`, got `str`"),
        (lambda texts: ["import os"], "are no launches"),
        (lambda texts: [f"{text}|row" for text in texts], "are no launches"),
        (first("|row|", "|rows|"), "are no launches"),
        (lambda texts: texts[:-1], "a chain of 4 layers ends after"),
        (lambda texts: texts * 2, "does not fit"),
        (lambda texts: texts[::-1], "launch 1 of a chain does not fit"),
        (lambda texts: [texts[0], *texts], "does not fit"),
        (first("0|", "4|"), "does not fit"),
        (first("0|", "-1|"), "does not fit"),
        (first(EMULATED, "torch.nothing"), "is no kernel of the file"),
        (first(EMULATED, "torch.norm_emulated_tensor"), "is no kernel of the file"),
        (first("|none|none|row", "|none|none|1x128"), "does not take"),
        (first("|none|none|row", "|none|row|row"), "is no launch of op quantize"),
        (first("|row|row|", "|row|1x128|"), "does not take"),
        (first(EMULATED, UNFUSED), "does not take"),
        (first("|row|tensor", "|row|none"), "launch 3 of a chain does not fit"),
    ],
)
def test_forged_chains_are_refused(
    freeze: Callable[[], Path], edit: Callable[[list[str]], Any], words: str
) -> None:
    dispatch_chain(LAYERS, M, 0.2)
    path = freeze()
    whole = json.loads(path.read_text())
    row = next(x for x in whole["answers"] if "row_err=0.2" in x["question"])
    quantizer, layer = "0|torch.quantize_row|none|none|row", f"0|{EMULATED}|row|row|tensor"
    assert row["answer"][:2] == [quantizer, layer]
    row["answer"] = edit(row["answer"])
    whole["digest"] = file_format.digest_of(whole)
    path.write_text(json.dumps(whole))
    with pytest.raises(ChoicesError) as found:
        dispatcher.use_choices(path)
        dispatch_chain(LAYERS, M, 0.2)
    assert words in str(found.value) and str(path) in str(found.value)


def test_a_question_occurs_once(freeze: Callable[[], Path]) -> None:
    dispatch_chain([(128, 128, BLOCK)], M, 0.2)
    path = freeze()
    whole = json.loads(path.read_text())
    whole["answers"].append(whole["answers"][0])
    whole["digest"] = file_format.digest_of(whole)
    path.write_text(json.dumps(whole))
    with pytest.raises(ChoicesError, match="a question occurs twice"):
        dispatcher.use_choices(path)
