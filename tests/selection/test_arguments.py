"""Arguments of dispatch: kinds of numbers, names with typos, and equal results of warm calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lokakern
from lokakern.device import current_device
from lokakern.errors import (
    BudgetError,
    DeviceError,
    FormatError,
    LokakernError,
    ShapeError,
    UnknownNameError,
)
from lokakern.functional.gemm import gemm
from lokakern.functional.prepare_weight import prepare_weight
from lokakern.registry.ops import EPILOGUE_OPS, OPS
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection import arguments, dispatcher
from lokakern.selection.dispatcher import dispatch
from lokakern.selection.misses import ON_MISS, check_on_miss
from lokakern.types import REGIMES, ErrorBudget, Format, Granularity, Layout, Operand
from tests.support.measurements import H200, Book, measured

NAN = math.nan


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snapshot]:
    path = tmp_path_factory.mktemp("arguments") / "rows.sqlite"
    Book(path).write(*measured(bf16=20.0, row=10.0))
    yield load_snapshot([path])
    dispatcher.use_snapshot(None)


def outcome(ask: Callable[[], Any]) -> tuple[object, ...]:
    """The answer, or the error."""
    try:
        choice = ask()
    except Exception as error:
        assert isinstance(error, LokakernError), f"{type(error).__name__}: {error}"
        return type(error), str(error)
    return choice.kernel, choice.m, type(choice.m), choice.explain()


BF16 = Format.BFLOAT16
SIZES = [
    1, True, 1.0, np.True_, np.int64(1), 0, -1, 512, 512.0, np.int32(512), np.uint64(512),
    np.float32(512), 4096, np.uint16(4096), "512", None, NAN, 2**70,
]  # fmt: skip
# Of each argument what may be passed, good or not; the first is good.
VALUES: dict[str, list[Any]] = {
    "shape": [
        (1, 1, 1), (4096, 512, 512), [1, 1, 1], (1, 1), (1, 1, 1, 1), (), (-1, 1, 1), "abc", None,
        7, np.array([4096, 512, 512]), np.array([4096.0, 512, 512]), {0: 1, 1: 1, 2: 1},
        *((size, 1, 1) for size in SIZES), *((1, 1, size) for size in SIZES),
        *((4096, size, 512) for size in SIZES),
    ],
    "error_budget": [
        1, 0.06, True, 1.0, np.float32(0.06), np.float64(1), np.True_, NAN, math.inf, -1, -0.0, "x",
        None, [0.06], Fraction(1), 10**400, Decimal("0.06"), 0.06 + 0j, np.array(0.06),
        ErrorBudget(row_err=1), ErrorBudget(row_err=1.0),
    ],
    "distribution": [
        None, "X3", ("X3",), ["X3"], (), "bogus", 3, ("X3", 3), {"X3": 1}, np.str_("X3"),
    ],
    "device": [
        H200, "NVIDIA H200", "nvidia-h200", "NVIDIA H2OO", "", "cuda", 3, [1], None,
        torch.device("cpu"), torch.device("meta"), torch.device("cuda:9"),
    ],
    "regime": [None, *REGIMES, "bogus", 1, ["eager"]],
    "prepared": [False, True, 1, 0, 1.0, np.True_, "yes", None],
    "accumulate": [False, 0, 0.0, np.False_],
    "epilogue": ["none", "bias", "bogus", 1, None, ["bias"]],
    "batch": [1, True, 1.0, 2, np.int64(1), 0, "1"],
    "out_format": [BF16, "bfloat16", "bogus", None, torch.bfloat16, []],
    "out_granularity": [Granularity.NONE, "none", "rwo", 1],
    "a": [
        Operand(BF16), None, Operand("bfloat16"), Operand(BF16, alignment=16.0),  # type: ignore[arg-type]
        Operand(BF16, alignment=3), Operand(BF16, "bogus"), Operand("bogus"), "bfloat16",  # type: ignore[arg-type]
    ],
}  # fmt: skip
GOOD = {name: values[0] for name, values in VALUES.items()}


def check_alike(facts: Snapshot, **given: Any) -> None:
    """Ask cold, warm, and after good questions whose keys are equal, as of 1, 1.0 and True."""

    def ask() -> Any:
        return dispatch("gemm", **{**GOOD, **given})

    dispatcher.use_snapshot(facts)
    cold = outcome(ask)
    assert outcome(ask) == cold
    dispatcher.use_snapshot(facts)
    for number in (1, 1.0):
        for shape in ((1, 1, 1), (4096, 512, 512), (4096, 1, 512)):
            for prepared in (False, True):
                good = {"shape": shape, "error_budget": number, "prepared": prepared}
                assert dispatch("gemm", **{**GOOD, **good}).kernel
    assert outcome(ask) == cold


@pytest.mark.parametrize("name", VALUES)
def test_malformed_arguments_raise_equally_cold_and_warm(facts: Snapshot, name: str) -> None:
    for value in VALUES[name]:
        check_alike(facts, **{name: value})


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_combinations_of_malformed_arguments_raise_equally_cold_and_warm(
    facts: Snapshot, data: st.DataObject
) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(VALUES)), min_size=2, max_size=3))
    check_alike(facts, **{name: data.draw(st.sampled_from(VALUES[name])) for name in sorted(names)})


@pytest.mark.parametrize("op", [["gemm"], 3, None, "gem"])
def test_an_unknown_op_is_named(op: Any) -> None:
    with pytest.raises(UnknownNameError, match="is unknown; expected one of dequantize, gemm"):
        dispatch(op, (1, 2, 3))


NUMBERS = [(np.float32, 0.0625), (np.float64, 0.06), (np.float16, 0.0625), (Fraction, 0.0625)]


@pytest.mark.parametrize(("kind", "value"), NUMBERS)
def test_numpy_budgets_equal_python_budgets(
    facts: Snapshot, kind: Callable[[float], Any], value: float
) -> None:
    dispatcher.use_snapshot(facts)
    expected = outcome(lambda: dispatch("gemm", (4096, 512, 512), value, device=H200))
    found = outcome(lambda: dispatch("gemm", (4096, 512, 512), kind(value), device=H200))
    assert found == expected and "quantize_row" in str(expected[0])
    assert arguments.budget_of(kind(value)) == ErrorBudget(row_err=value)


@pytest.mark.parametrize("kind", [np.uint64, np.int32, np.int64, np.uint16, torch.tensor])
def test_numpy_sizes_equal_python_sizes(facts: Snapshot, kind: Callable[[int], Any]) -> None:
    dispatcher.use_snapshot(facts)

    def found(shape: Any) -> tuple[object, ...]:
        return outcome(lambda: dispatch("gemm", shape, 0.06, device=H200))

    for shape in ((4096, 512, 512), (4104, 512, 512), (1, 512, 512)):
        expected = found(shape)
        assert found(tuple(map(kind, shape))) == found(np.array(shape)) == expected


@pytest.mark.parametrize("budget", [np.array(0.06), torch.tensor(0.06), [0.06], "0.06", True])
def test_budgets_must_be_numbers(budget: Any) -> None:
    """An array of one value is none: a tensor's would wait for its device."""
    x, w = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    asks: list[Callable[[], object]] = [
        lambda: dispatch("gemm", (1, 2, 3), budget, device=H200),
        lambda: lokakern.dispatch_chain([(512, 512, "none")], 64, budget, device=H200),
        lambda: prepare_weight(w, budget, (1, 2)),
        lambda: gemm(x, w, budget=budget),
        lambda: lokakern.gemm_norm(x, w, norm="layer", budget=budget),
    ]
    for ask in asks:
        with pytest.raises(BudgetError, match="budget is"):
            ask()


def test_a_budget_that_equals_a_good_one_is_refused_when_warm() -> None:
    x, w = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    for ask in (gemm, lambda *of, **how: lokakern.gemm_norm(*of, norm="layer", **how)):
        for good in (1, 1.0, np.float32(1), ErrorBudget(row_err=1)):
            assert ask(x, w, budget=good).shape == (8, 16)  # type: ignore[operator]
        with pytest.raises(BudgetError, match="budget is True"):
            ask(x, w, budget=True)  # type: ignore[operator]


@pytest.mark.parametrize("given", [6, 1.5, np.float32(6)])
def test_a_row_error_above_one_is_no_budget(given: Any) -> None:
    """6 is meant as 6 %, and would admit every kernel."""
    x, w = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    asked = (
        lambda: lokakern.convert(nn.Linear(16, 16, dtype=torch.bfloat16), given),
        lambda: lokakern.dispatch("gemm", (16, 16, 16), given),
        lambda: gemm(x, w, budget=given), lambda: arguments.budget_of(given),
    )  # fmt: skip
    for ask in asked:
        with pytest.raises(BudgetError, match=r"expected 1 at most.*0\.06 is 6 %"):
            ask()
    assert ErrorBudget(row_err=1, rel_err=2).limits == {"row_err": 1, "rel_err": 2}


@pytest.mark.parametrize("passed", [(np.int64(1), np.uint8(64)), [1, 64], np.array([1, 64])])
def test_ranges_of_m_may_be_numpy_integers(passed: Any) -> None:
    assert arguments.m_range_of("convert", passed) == (1, 64)
    assert all(type(m) is int for m in arguments.m_range_of("convert", passed))
    w = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert prepare_weight(w, np.float32(0.06), passed).budget == arguments.budget_of(
        np.float32(0.06)
    )
    lokakern.convert(nn.Linear(16, 16, dtype=torch.bfloat16), np.float32(0.06), m_range=passed)


@pytest.mark.parametrize(
    "passed",
    [(2, 1), (0, 1), (True, 2), (1.0, 2), (1,), (1, 2, 3), "12", 5, None, (1, NAN), {1, 2}],
)
def test_an_invalid_range_of_m_has_one_error(passed: Any) -> None:
    w = torch.zeros(16, 16, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"prepare_weight: m_range is .*; expected \(smallest"):
        prepare_weight(w, 0.06, passed)
    if passed is not None:
        with pytest.raises(ShapeError, match=r"convert: m_range is .*; expected \(smallest"):
            lokakern.convert(nn.Linear(16, 16), 0.06, m_range=passed)


# Names


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epilogue": "bogus"}, "epilogue is 'bogus'; expected one of bias, none"),
        ({"epilogue": "relu"}, "epilogue is 'relu'; expected one of bias, none"),
        ({"regime": "bogus"}, "regime 'bogus' is unknown; expected one of graph-cold, graph-hot"),
        ({"out_format": "bf16"}, "out_format is 'bf16'; expected one of e4m3fn, e5m2"),
        ({"out_granularity": "rwo"}, "out_granularity is 'rwo'; expected one of none, tensor, row"),
        ({"a": Operand("bf16")}, "format of a is 'bf16'; expected one of e4m3fn"),  # type: ignore[arg-type]
        ({"b": Operand(BF16, "rwo")}, "granularity of b is 'rwo'; expected one of none"),  # type: ignore[arg-type]
        ({"b": Operand(BF16, Granularity.NONE, "rows")}, "layout of b is 'rows'; expected one of "  # type: ignore[arg-type]
         "row-major, column-major, strided"),
        ({"epilog": "bias"}, "no field epilog; expected a, accumulate, b, batch, epilogue"),
    ],
)  # fmt: skip
def test_a_typo_in_a_field_is_named(facts: Snapshot, fields: dict[str, Any], words: str) -> None:
    dispatcher.use_snapshot(facts)
    for _ in range(2):
        with pytest.raises(UnknownNameError, match=re.escape(words)):
            dispatch("gemm", (4096, 512, 512), 0.06, device=H200, **fields)


def test_invalid_alignments_and_flags_are_refused() -> None:
    with pytest.raises(ShapeError, match="alignment of a is 3 bytes; expected 1, 2, 4, 8 or 16"):
        dispatch("gemm", (1, 2, 3), device=H200, a=Operand(BF16, alignment=3))
    for name in arguments.FLAGS:
        with pytest.raises(FormatError, match=f"{name} is 'no'; expected True or False"):
            dispatch("gemm", (1, 2, 3), device=H200, **{name: "no"})
    with pytest.raises(FormatError, match="prepared is 1; expected True or False"):
        lokakern.dispatch_chain([(8, 8, "none")], 1, device=H200, prepared=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_epilogue_that_no_kernel_of_an_op_has_is_named(op: str) -> None:
    shape = (64, 128, 128)[: len(OPS[op].axes)]
    for bogus in ("bogus", None, 3):
        with pytest.raises(UnknownNameError, match=r"'bogus'|None|3"):
            dispatch(op, shape, device=H200, epilogue=bogus)
    known = {"scaled_gemm": "bias+cross", "gemm": "bias", "quantize": "static",
             "quantize_transpose": "static+column_sums", "dequantize": "none"}  # fmt: skip
    word = "layer" if op in EPILOGUE_OPS else known[op]
    assert dispatch(op, shape, device=H200, epilogue=word).problem.epilogue == word
    if op in ("quantize", "dequantize"):
        with pytest.raises(UnknownNameError, match="epilogue is 'bias'"):
            dispatch(op, shape, device=H200, epilogue="bias")


def test_names_may_be_texts(facts: Snapshot) -> None:
    dispatcher.use_snapshot(facts)
    a = Operand("bfloat16", "none", "row-major")  # type: ignore[arg-type]
    asked = dispatch("gemm", (4096, 512, 512), 0.06, device=H200, a=a, out_granularity="none")
    plain = dispatch("gemm", (4096, 512, 512), 0.06, device=H200)
    assert asked.explain() == plain.explain() and asked.problem == plain.problem
    assert asked.problem.a.layout is Layout.ROW and asked.problem.a.format is BF16


# Devices


def test_a_device_of_torch_is_the_one_here(
    facts: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher.use_snapshot(facts)
    found = dispatch("gemm", (64, 64, 64), 0.06, device=torch.device("cpu"))
    assert found.table.device == current_device("cpu")
    chain = lokakern.dispatch_chain([(64, 64, "none")], 64, device=torch.device("cpu"))
    assert chain.chain.device == current_device("cpu")
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def here(kind: str = "auto", index: int = 0) -> Any:
        asked.append((kind, index))
        return H200

    monkeypatch.setattr(arguments, "current_device", here)
    for name in ("cuda", "cuda:0", "cuda:1"):
        assert dispatcher.device_named(torch.device(name)) == H200
    assert asked == [("cuda", 0), ("cuda", 0), ("cuda", 1)]
    with pytest.raises(DeviceError, match=r"torch.device\('cuda:2'\), and torch finds 2 GPUs here"):
        dispatcher.device_named(torch.device("cuda:2"))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (torch.device("meta"), "torch.device('meta'), on which nothing is measured; expected"),
        (0, "device is 0; expected a product such as 'NVIDIA H200', a torch.device, a lokakern"),
        ([1], "device is [1]; expected a product"),
        ("cuda:0", "device is 'cuda:0'; expected a product such as 'NVIDIA H200', a torch.device"),
        ("NVIDIA H20", "'NVIDIA H20' is in no database; did you mean 'NVIDIA H200'? known are"),
        ("h200", "did you mean 'NVIDIA H200'?"),
        ("NVIDA H200", "did you mean 'NVIDIA H200'?"),
        ("NVIDIA L40S", "'NVIDIA L40S' is in no database; known are"),
        ("TPU", "device 'TPU' is in no database; known are 'NVIDIA H200'"),
    ],
)  # fmt: skip
def test_an_invalid_device_has_one_error(facts: Snapshot, device: Any, words: str) -> None:
    dispatcher.use_snapshot(facts)
    asks: list[Callable[[], object]] = [
        lambda: dispatch("gemm", (4096, 512, 512), 0.06, device=device),
        lambda: lokakern.dispatch_chain([(512, 512, "none")], 64, 0.06, device=device),
        lambda: lokakern.convert(nn.Linear(16, 16), 0.06, device=device),
    ]
    for ask in asks:
        with pytest.raises(DeviceError, match=re.escape(words)):
            ask()


# What docstrings give as examples, on the shipped database


@pytest.fixture
def shipped() -> Iterator[None]:
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


def examples_in(function: Any) -> list[dict[str, Any]]:
    """Arguments that a docstring writes as ``name=value``."""
    found = re.findall(r"``(\w+=[^`]+)``", " ".join(function.__doc__.split()))
    return [eval(f"dict({text})") for text in found if not text.endswith("=")]


def test_the_examples_of_dispatch_are_answered(shipped: None) -> None:
    examples = examples_in(dispatch)
    assert {"prepared": True} in examples and {"epilogue": "bias"} in examples
    for fields in examples:
        choice = dispatch("gemm", (32768, 2048, 2048), 0.06, device="NVIDIA H200", **fields)
        assert not choice.is_miss and choice.latency_us and choice.kernel != "torch.bf16", fields
    for op in re.findall(r"op: A key of .*? such as (.*?)\. ", " ".join(dispatch.__doc__.split())):  # type: ignore[union-attr]
        names = re.findall(r'"(\w+)"', op)
        assert len(names) == 4 and set(names) <= set(OPS)
    for name in re.findall(r'"([\w-]+)"', str(dispatch.__doc__).split("regime: ")[1].split(";")[0]):
        assert name in REGIMES


def test_the_examples_of_chains_are_answered(shipped: None) -> None:
    text = " ".join(str(lokakern.dispatch_chain.__doc__).split())
    epilogues = re.findall(r'"(bias\+[^"]+)"', text)
    assert len(epilogues) == 2
    for epilogue in epilogues:
        layers = [(2048, 2048, epilogue)] * 2
        choice = lokakern.dispatch_chain(layers, 32768, 0.09, device="NVIDIA H200")
        assert len(choice.chain.layers) == 2 and choice.chain.layers[0].epilogue == epilogue
    for scales in re.findall(r'"([\w]+)"', text.split("in_granularity: ")[1].split(";")[0]):
        lokakern.dispatch_chain(
            [(2048, 2048, "none")], 64, in_granularity=scales, device="NVIDIA H200"
        )


def test_the_examples_of_gemm_and_convert_are_taken() -> None:
    text = str(gemm.__doc__).split("on_miss: ")[1].split("check: ")[0]
    named = re.findall(r'"(\w+)"', text)
    assert tuple(named) == ON_MISS
    for name in named:
        check_on_miss("gemm", name)
    text = str(lokakern.convert.__doc__).split("weight_scales: ")[1].split("check: ")[0]
    scales = re.findall(r'"([\w]+)"', text)
    assert scales == ["tensor", "row", "128x128", "tensor"]
    model = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    lokakern.convert(model, 0.06, device="NVIDIA H200", weight_scales=scales, inference=True)
