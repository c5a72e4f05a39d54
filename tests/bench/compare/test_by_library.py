"""By library: owners of kernels, times of each library, and the gain of dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lokakern.bench.cli.compare import _library_words
from lokakern.bench.compare import dispatch, race
from lokakern.bench.compare.dispatch import (
    ByLibrary,
    LibraryRow,
    by_library,
    owner_of,
    row_of,
    summaries_of,
)
from lokakern.bench.compare.race import Entry, Setting
from lokakern.device import current_device
from lokakern.measure import operand_cache, operands, timing
from lokakern.measure.timing import Contender
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Format, Problem
from lokakern.workloads.filters import parse_condition
from lokakern.workloads.gemm_cases import Case, unquantized_case, whole_gemm_cases
from tests.support.inline_worker import launches_take

load_kernels()
BF16 = "torch.bf16"
TORCH_ROW = "cuda.quantize_row+torch.scaled_mm_row"
OUR_ROW = "cuda.quantize_row+cuda.scaled_gemm_row"
CASES = list(whole_gemm_cases(64, 32, 128, "X1", Format.E4M3FN))
TENSOR, ROW, BLOCK = (case.problem for case in CASES[1:])
NAMES = ("acme", "cuda", "torch")


@pytest.fixture(autouse=True)
def _acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with a scaled GEMM, behind our quantizer."""
    gemm = replace(KERNELS["torch.emulated_row"], name="acme.gemm", language="a", library="acme")
    parts = ("cuda.quantize_row", gemm.name)
    whole = replace(KERNELS[OUR_ROW], name="cuda.quantize_row+acme.gemm", parts=parts)
    monkeypatch.setitem(KERNELS, gemm.name, gemm)
    monkeypatch.setitem(KERNELS, whole.name, whole)


ACME = "cuda.quantize_row+acme.gemm"


def entry(kernel: str, us: float | None, problem: Problem = ROW, *, wrong: bool = False) -> Entry:
    failed = "" if us else "broken"
    return Entry(kernel, str(problem), False, True, us, 0.0, False, failed, wrong)


def row(*entries: Entry, chosen: str = OUR_ROW, groups: Any = ()) -> LibraryRow:
    return row_of(ROW, chosen, NAMES, entries, groups)


def test_a_composition_belongs_to_the_owner_of_its_gemm() -> None:
    owners = {name: owner_of(KERNELS[name]) for name in (BF16, TORCH_ROW, OUR_ROW, ACME)}
    assert owners == {BF16: "torch", TORCH_ROW: "torch", OUR_ROW: "cuda", ACME: "acme"}
    assert owner_of(KERNELS["acme.gemm"]) == "acme"
    assert owner_of(KERNELS["triton.scaled_gemm_row"]) == "triton"


def test_a_library_has_the_time_of_its_fastest_kernel() -> None:
    found = row(entry(BF16, 9.0), entry(OUR_ROW, 4.0), entry(TORCH_ROW, 6.0), entry(ACME, 5.0))
    assert found.dispatch_us == 4.0
    assert found.library_us == {"acme": 5.0, "cuda": 4.0, "torch": 6.0}
    assert found.kernels == {"acme": ACME, "cuda": OUR_ROW, "torch": TORCH_ROW}
    assert (found.fastest, found.speedup) == ("cuda", 1.0)
    assert (found.fastest_other, found.other_speedup) == ("acme", 1.25)


def test_a_library_may_run_the_unquantized_kernel() -> None:
    """The unquantized kernel is used if the library's kernels are slower, incorrect or missing."""
    slow = row(entry(BF16, 5.0), entry(OUR_ROW, 4.0), entry(ACME, 6.0))
    wrong = row(entry(BF16, 5.0), entry(OUR_ROW, 4.0), entry(ACME, None, wrong=True))
    absent = row(entry(BF16, 5.0), entry(OUR_ROW, 4.0))
    for found in (slow, wrong, absent):
        assert found.library_us == {"acme": 5.0, "cuda": 4.0, "torch": 5.0}
        assert found.kernels["acme"] == found.kernels["torch"] == BF16
        assert found.fastest_other == "torch", "of equal kernels, the owner comes first"
        assert found.other_speedup == 1.25


def test_a_library_uses_its_fastest_form_and_dispatch_its_choice() -> None:
    found = row(entry(BF16, 9.0, BLOCK), entry(OUR_ROW, 3.0, BLOCK), entry(OUR_ROW, 4.0))
    assert (found.dispatch_us, found.library_us["cuda"], found.speedup) == (4.0, 3.0, 0.75)
    unquantized = row(entry(BF16, 9.0, BLOCK), entry(TORCH_ROW, 10.0), chosen=BF16)
    assert unquantized.dispatch_us == 9.0, "it runs once, at any form"


def test_fp8_times_ignore_a_faster_unquantized_kernel() -> None:
    found = row(entry(BF16, 5.0), entry(OUR_ROW, 4.0), entry(ACME, 10.0), entry(ACME, 8.0, BLOCK))
    assert found.fp8_us == {"acme": 8.0, "cuda": 4.0, "torch": 5.0}
    every, others = summaries_of([found], NAMES)
    assert every.fp8_mean == {"acme": 2.0, "cuda": 1.0, "torch": 1.25}
    assert (every.fp8_best, every.fp8_speedup) == ("cuda", 1.0)
    assert (others.fp8_best, others.fp8_speedup) == ("torch", 1.25)
    assert row(entry(OUR_ROW, 4.0)).fp8_us == {}


def test_rows_without_times_are_not_compared() -> None:
    choice = row(entry(BF16, 9.0), entry(OUR_ROW, None, wrong=True))
    assert (choice.dispatch_us, choice.fastest, choice.speedup) == (None, "torch", None)
    base = row(entry(BF16, None), entry(OUR_ROW, 4.0))
    assert (base.dispatch_us, base.library_us, base.fastest) == (4.0, {}, "")
    every, others = summaries_of([choice, base], NAMES)
    assert (every.count, every.compared, every.best, every.speedup) == (2, 0, "", None)
    assert _library_words(others).endswith("all, 0 of 2 compared: nothing to compare")


def test_the_best_single_library_has_the_lowest_mean() -> None:
    small = [parse_condition("m < 64")]
    rows = [
        row(entry(BF16, 8.0), entry(OUR_ROW, 4.0), entry(ACME, 2.0)),  # dispatch chose badly
        row(entry(BF16, 8.0), entry(OUR_ROW, 1.0), entry(ACME, 8.0)),
    ]
    every, others, none, _ = summaries_of(rows, NAMES, small)
    assert (every.group, every.libraries, every.count, every.compared) == ("all", "all", 2, 2)
    assert every.geometric_mean == pytest.approx({"acme": 2.0, "cuda": 1.0, "torch": 4.0})
    assert every.least == {"acme": 0.5, "cuda": 1.0, "torch": 2.0}
    assert (every.best, every.speedup, every.least_speedup) == ("cuda", 1.0, 0.5)
    assert (others.libraries, others.best) == ("not ours", "acme")
    assert others.speedup == others.geometric_mean["acme"]
    assert others.geometric_mean.keys() == {"acme", "torch"}
    assert (none.group, none.count, none.speedup, none.least_speedup) == ("m < 64", 0, None, None)
    assert _library_words(others) == (
        "libraries that are not ours, all, 2 of 2 compared: 2.000x acme, the best single one; "
        "least 0.500x the best of a problem; acme 2.000x (least 0.500x), torch 4.000x "
        "(least 2.000x); in FP8 wherever they can: acme 2.000x, torch 4.000x"
    )


# --- races on the CPU


@dataclass
class Answer:
    """A choice of dispatch."""

    kernel: str
    latency_us: float
    rejected: dict[str, str]
    is_miss: bool = False


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current_device.cache_clear()
    launches_take(monkeypatch)
    yield
    current_device.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, of: Callable[[Problem], Answer]) -> None:
    monkeypatch.setattr(dispatch, "chooser", lambda _setting: lambda case: of(case.problem))


def emulated(problem: Problem) -> Answer:
    """Rowwise scaling is the fastest for a prepared weight; blockwise exceeds the budget."""
    rejected = {"torch.quantize_tensor+torch.emulated_tensor": "slower: 7.00 us",
                "torch.quantize_block+torch.emulated_block": "row_err 0.0700 > 0.06",
                BF16: "tied, larger error, more launches or later name: 6.00 us"}  # fmt: skip
    if problem == ROW:
        return Answer("torch.quantize_row+torch.emulated_row", 5.0, rejected)
    return Answer(BF16, 6.0, {name: why for name, why in rejected.items() if name != BF16})


def run(seed: int = 0) -> ByLibrary:
    return by_library(CASES, Setting(seed=seed))


def test_all_forms_of_a_shape_are_in_one_race(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, emulated)
    steps: list[Any] = []
    found = by_library(CASES, Setting(begin=steps.append, step=steps.append))
    assert steps == [2, str(CASES[0].problem), str(ROW)]
    assert found.libraries == ("torch",)
    whole, prepared = found.rows
    tensor, by_row = "torch.quantize_tensor+torch.emulated_tensor", emulated(ROW).kernel
    assert {e.kernel for e in whole.entries} == {BF16, tensor}
    assert {(e.kernel, e.problem) for e in prepared.entries} == {
        (BF16, str(ROW)), (by_row, str(ROW)), (tensor, str(TENSOR))
    }  # fmt: skip
    assert not any(e.failed for r in found.rows for e in r.entries)
    us = {e.kernel: e.latency_us for e in prepared.entries}
    assert (prepared.problem, prepared.chosen) == (str(ROW), by_row)
    assert prepared.dispatch_us == us[by_row]
    assert prepared.library_us == {"torch": min(time for time in us.values() if time)}
    assert found.summaries[0].compared == 2
    assert found.summaries[0].least_speedup == min(r.speedup or 0.0 for r in found.rows)


def test_dispatch_and_libraries_have_no_lower_bounds(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except a library that is slower than the unquantized kernel by its lower bound."""
    answer(monkeypatch, emulated)
    chosen, races = emulated(ROW).kernel, []

    def time(contenders: list[Contender], **_: object) -> None:
        names = [contender.name.split(" ")[0] for contender in contenders]
        races.append(names)
        for name, contender in zip(names, contenders, strict=True):
            contender.screened = len(names) > 1 and name != BF16
            contender.samples_us.append(1.0 if name == BF16 else 9.0)
            contender.calls[0]()
            contender.calls_per_replay = 1

    monkeypatch.setattr(race.timing, "time_contenders", time)
    monkeypatch.setattr(operands.Operands, "check", lambda *_: (None, ""))
    prepared = run().rows[1]
    assert races[2:] == [[chosen]]
    assert (prepared.dispatch_us, prepared.library_us) == (9.0, {"torch": 1.0})


def test_the_seed_determines_operands_and_order(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, emulated)
    seeds: set[Any] = set()
    plain_time, plain_make = timing.time_contenders, operand_cache._sample

    def time(contenders: Any, **options: Any) -> None:
        seeds.add(("order", options["seed"]))
        plain_time(contenders, **options)

    def make(key: operand_cache.OperandKey) -> torch.Tensor:
        seeds.add(("sample", key.seed))
        return plain_make(key)

    monkeypatch.setattr(timing, "time_contenders", time)
    monkeypatch.setattr(operand_cache, "_sample", make)
    operand_cache.clear_operand_cache()
    run(seed=7)
    assert seeds == {("order", 7), ("sample", 7)}


def test_operands_are_prefetched_for_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of as many groups as fit are prefetched."""
    asked: list[int] = []

    def finish(cases: list[Case], *, seed: int) -> int:
        asked.append(len(cases))
        return min(len(cases), 3)

    monkeypatch.setattr(operand_cache, "prefetch_and_wait", finish)
    cases = [unquantized_case(m, 16, 32, "X1") for m in range(1, 7)]
    groups = [cases[:2], cases[2:3], cases[3:5], cases[5:]]
    assert list(operand_cache.prefetched_groups(groups, seed=1)) == groups
    assert asked == [6, 3]
