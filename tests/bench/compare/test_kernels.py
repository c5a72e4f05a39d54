"""Contests: their problems, their sides, and the ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lokakern.bench.cli.compare import _failures, _pair_words, _words
from lokakern.bench.compare import kernels as contests
from lokakern.bench.compare import race
from lokakern.bench.compare.kernels import Contest, bound_us, contest, contests_of, unscaled
from lokakern.bench.compare.race import Entrant, Entry, Setting
from lokakern.device import current_device
from lokakern.errors import DeviceLostError, UnknownNameError
from lokakern.measure import operands
from lokakern.measure.time_problem import floor_us
from lokakern.measure.timing import Contender
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device, Format, Granularity, Layout, Operand
from lokakern.workloads.filters import parse_condition
from lokakern.workloads.gemm_cases import (
    Case,
    gemm_cases,
    prepared_cases,
    quantize_case,
    scaled_gemm_cases,
)
from lokakern.workloads.gemm_gradient_cases import main_grad_case
from lokakern.workloads.norm_cases import gemm_norm_case, norm_quantize_cases
from lokakern.workloads.suites import SUITES
from tests.support.inline_worker import launches_take

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
SHAPES = list(scaled_gemm_cases(64, 32, 128, "X1", Format.E4M3FN))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current_device.cache_clear()
    launches_take(monkeypatch)
    yield
    current_device.cache_clear()


def run(cases: Sequence[Case], op: str, ours: str, rivals: str, *groups: str) -> Contest:
    conditions = [parse_condition(text) for text in groups]
    return contest(cases, op, Setting(groups=conditions), ours=[ours], rivals=[rivals])


def test_kernels_of_all_granularities_are_compared_at_a_shape() -> None:
    found = run(SHAPES, "scaled_gemm", "torch.*_row", "torch.*", "m >= 64", "m > 64")
    (row,) = found.rows
    assert row.problem == "scaled_gemm m=64 n=32 k=128 a=e4m3fn b=e4m3fn out=bfloat16"
    assert (row.m, row.n, row.k) == (64, 32, 128)
    assert row.ours == "torch.emulated_row"
    sides = {entry.kernel: entry.ours for entry in row.entries}
    assert sides == {"torch.emulated_tensor": False, "torch.emulated_row": True,
                     "torch.emulated_block": False}  # fmt: skip
    times = {entry.kernel: entry.latency_us for entry in row.entries}
    assert row.ours_us == times.pop(row.ours)
    assert row.rival_us == min(time for time in times.values() if time)
    assert row.speedup == pytest.approx((row.rival_us or 0) / (row.ours_us or 1))
    assert (row.accurate_rival, row.accurate_speedup) == (row.rival, row.speedup)
    assert row.groups == ("m >= 64",)
    every, some, none = found.summaries
    assert (every.group, every.count, every.compared) == ("all", 1, 1)
    assert [every.speedup, every.least_speedup] == pytest.approx([row.speedup] * 2)
    assert (some.group, some.speedup) == ("m >= 64", every.speedup)
    assert (none.count, none.speedup, none.most_over_bound) == (0, None, None)
    assert not any(entry.failed for entry in row.entries)


def test_the_anchors_are_27_contests() -> None:
    cases = SUITES["anchors"].cases(H200)
    found = contests_of(cases, "scaled_gemm")
    assert len(found) == 27
    scales = {Granularity.TENSOR, Granularity.ROW, Granularity.GROUP}
    for same in found.values():
        assert {case.problem.a.granularity for case in same} == scales
    whole = contests_of(cases, "gemm")  # with and without a bias; whole, and prepared in any form
    assert len(whole) == 27 * 2 * 2 + 3
    quantized = contests_of(cases, "quantize")
    assert {len(same) for same in quantized.values()} == {1}
    layers = contests_of(cases, "gemm_norm")  # with two norms; in bfloat16 and in FP8
    assert len(layers) == 27 * 2
    for same in layers.values():
        assert [case.problem.a.granularity for case in same] == [
            Granularity.NONE, Granularity.ROW, Granularity.TENSOR
        ]  # fmt: skip


def test_layers_of_all_formats_share_a_contest() -> None:
    """Formats of input and output may differ; the epilogue must be the same."""
    row, group = (Operand(Format.E4M3FN, g) for g in (Granularity.ROW, Granularity.GROUP))
    small: dict[str, Any] = {"out_format": Format.E4M3FN, "out_granularity": Granularity.TENSOR}
    weight = Operand(Format.E4M3FN, Granularity.BLOCK, Layout.COLUMN)
    forms: list[dict[str, Any]] = [
        {}, {"a": row}, {"a": group, **small}, {"b": weight, "prepared": True},
    ]  # fmt: skip
    cases = [
        gemm_norm_case(64, 32, 128, epilogue, "X1", **fields)
        for epilogue in ("bias+layer", "bias+rms") for fields in forms
    ]  # fmt: skip
    found = contests_of(cases, "gemm_norm")
    assert [len(same) for same in found.values()] == [4, 4]
    for problem, _ in found:
        assert problem == make_problem("gemm_norm", (64, 32, 128), epilogue=problem.epilogue)
    rows = [case for m in (64, 128) for case in norm_quantize_cases(m, 256, "X1", Format.E4M3FN)]
    assert {len(same) for same in contests_of(rows, "norm_quantize").values()} == {1}


@pytest.mark.parametrize(
    ("accumulation", "accurate"),
    [("float32", True), ("promoted", True), ("none", True), ("rounded", True),
     ("promoted+rounded", True), ("fast", False), ("fast+rounded", False)],
)  # fmt: skip
def test_rounded_sums_before_a_norm_are_accurate(accumulation: str, accurate: bool) -> None:
    kernel = replace(KERNELS["torch.norm_unfused"], accumulation=accumulation)
    problem = make_problem("gemm_norm", (64, 32, 128), epilogue="layer")
    assert Entrant(Case(problem, "X1"), kernel, "", True).accurate is accurate


def test_a_composition_with_a_rival_gemm_is_not_ours() -> None:
    theirs = replace(
        KERNELS["torch.emulated_row+torch.norm_quantize"],
        name="torch.scaled_mm_row+cuda.norm_quantize",
        parts=("torch.scaled_mm_row", "cuda.norm_quantize"),
    )
    assert not contests._is_ours(theirs, ["cuda.*"])
    assert contests._is_ours(theirs, ["cuda.*", "torch.scaled_mm_*"])
    assert contests._matches(theirs.name, ["*+cuda.norm_quantize"])
    ours = replace(theirs, name="cuda.scaled_gemm_row+cuda.norm_quantize",
                   parts=("cuda.scaled_gemm_row", "cuda.norm_quantize"))  # fmt: skip
    assert contests._is_ours(ours, ["cuda.*"])
    assert not contests._is_ours(ours, ["cuda.gemm_norm*"]), "then it is the unfused rival"


def test_a_pattern_selects_compositions_as_rivals() -> None:
    cases = [gemm_norm_case(64, 32, 128, "bias+layer", "X1",
                            Operand(Format.E4M3FN, Granularity.ROW))]  # fmt: skip
    (row,) = run(cases, "gemm_norm", "torch.norm_emulated_*", "*+torch.norm_quantize").rows
    assert (row.ours, row.rival, row.accurate_rival) == (
        "torch.norm_emulated_row", "torch.emulated_row+torch.norm_quantize", row.rival
    )  # fmt: skip
    assert not any(entry.failed for entry in row.entries)


def test_out_of_memory_moves_the_unquantized_kernel_to_another_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0

    def short_of_memory(*given: Any, **options: Any) -> operands.Operands:
        nonlocal made
        made += 1
        if made == 1:
            raise MemoryError("no room")
        return operands.Operands(*given, **options)

    monkeypatch.setattr(race, "operands_of", short_of_memory)
    cases = list(prepared_cases(64, 32, 128, "X1", Format.E4M3FN))
    (row,) = run(cases, "gemm", "torch.quantize_*+*", "torch.bf16").rows
    assert row.rival == "torch.bf16"
    times = [entry.latency_us for entry in row.entries if entry.kernel == "torch.bf16"]
    assert [time is None for time in times] == [True, False]


def test_a_composition_is_ours_if_all_its_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list(gemm_cases(64, 32, 128, "X1", Format.E4M3FN))
    mixed = replace(
        KERNELS["torch.quantize_row+torch.emulated_row"], name="ours.quantize_row+torch.gemm",
        parts=("ours.quantize_row", "torch.gemm"),
    )  # fmt: skip
    monkeypatch.setitem(KERNELS, mixed.name, mixed)
    assert not contests._is_ours(mixed, ["ours.*"])
    assert contests._is_ours(mixed, ["ours.*", "torch.gemm"])
    assert contests._is_ours(mixed, ["ours.*+torch.*"])
    with pytest.raises(UnknownNameError, match=r"only of parts that match ours\.\*"):
        run(cases, "gemm", "ours.*", "torch.*")
    row = run(cases, "gemm", "torch.*", "*").rows[0]
    assert {e.kernel for e in row.entries if not e.ours} == {mixed.name}


def test_a_prepared_weight_counts_in_its_fastest_form() -> None:
    cases = list(gemm_cases(64, 32, 128, "X1", Format.E4M3FN))
    found = run(cases, "gemm", "torch.quantize_*+*", "torch.bf16")
    whole, prepared = found.rows
    assert "prepared" in prepared.problem and "prepared" not in whole.problem
    assert whole.rival == prepared.rival == "torch.bf16"
    assert [entry.kernel for entry in prepared.entries].count("torch.bf16") == 1
    assert len({entry.kernel for entry in prepared.entries if entry.ours}) == 3


def test_quantizers_are_compared_by_granularity_and_with_their_bound() -> None:
    cases = [quantize_case(64, 256, granularity, "X1", Format.E4M3FN)
             for granularity in (Granularity.ROW, Granularity.GROUP)]  # fmt: skip
    found = run(cases, "quantize", "torch.*", "torch.*")
    assert [row.ours for row in found.rows] == ["torch.quantize_row", "torch.quantize_group"]
    for case, row in zip(cases, found.rows, strict=True):
        assert (row.rival, row.speedup, row.accurate_rival_us) == ("", None, None)
        assert row.bound_us == pytest.approx(1.2 * case.problem.bytes_moved / 4.3e6 + 2.0)
        assert row.over_bound == pytest.approx((row.ours_us or 0) / (row.bound_us or 1))
    every = found.summaries[0]
    assert (every.count, every.compared, every.speedup) == (2, 0, None)
    assert every.most_over_bound == max(row.over_bound or 0 for row in found.rows)


def test_the_bound_of_a_layer_is_its_bytes_or_products_and_a_launch() -> None:
    small = make_problem("gemm_norm", (64, 32, 128), epilogue="layer")
    assert bound_us(small) == pytest.approx(small.bytes_moved / 4.3e6 + 1.5) == floor_us(small)
    large = make_problem("gemm_norm", (8192, 2048, 2048), epilogue="layer")
    assert bound_us(large) == pytest.approx(large.flops / 1.979e9 + 1.5)
    assert "1979 TFLOP/s" in contests.bound_words("gemm_norm")
    assert contests.bound_words("quantize") == "bound: 1.2 times the bytes at 4.3 TB/s, and 2 us"


def test_the_bound_of_a_product_is_its_bytes() -> None:
    problem = SHAPES[1].problem
    assert bound_us(problem) == problem.bytes_moved / 4.3e6


def entry(kernel: str, ours: bool, accurate: bool, us: float | None) -> Entry:
    problem = str(SHAPES[0].problem)
    return Entry(kernel, problem, ours, accurate, us, 0.0, False, "" if us else "broken")


def row_of(*entries: Entry) -> contests.Row:
    return contests._row(unscaled(SHAPES[0].problem), SHAPES, entries, ())


def test_accurate_kernels_are_also_compared_among_themselves() -> None:
    row = row_of(
        entry("ours.fast", True, False, 1.0), entry("ours.promoted", True, True, 4.0),
        entry("theirs.fast", False, False, 2.0), entry("theirs.promoted", False, True, 6.0),
        entry("theirs.broken", False, True, None),
    )  # fmt: skip
    assert (row.ours, row.rival) == ("ours.fast", "theirs.fast")
    assert (row.accurate_ours, row.accurate_rival) == ("ours.promoted", "theirs.promoted")
    assert (row.speedup, row.accurate_speedup) == (2.0, 1.5)


def test_a_shape_without_ours_is_counted_and_not_compared() -> None:
    row = row_of(entry("ours.a", True, True, None), entry("b", False, True, 2.0))
    assert (row.ours, row.ours_us, row.speedup, row.over_bound) == ("", None, None, None)
    summary = contests._summary("all", [row])
    assert (summary.count, summary.compared, summary.speedup) == (1, 0, None)


def test_incorrect_outputs_are_counted_beside_the_mean() -> None:
    wrong = replace(entry("ours.c", True, True, None), wrong=True)
    rows = [
        row_of(entry("ours.a", True, True, 1.0), entry("b", False, True, 2.0), wrong,
               entry("ours.d", True, True, None)),
        row_of(wrong, replace(wrong, ours=False), entry("b", False, True, None)),
    ]  # fmt: skip
    summary = contests._summary("all", rows)
    assert (summary.wrong, summary.failed, summary.missing) == (2, 1, 1)
    assert _words(summary).startswith(
        "all, 1 of 2 compared, ours WRONG 2 times, ours did not run 1 times, none of ours at 1: "
        "2.000x"
    )
    lines = _failures(Contest(tuple(rows), ()))
    assert [line.split(":")[0] for line in lines] == [
        "WRONG", "WRONG", "WRONG", "not ok", "not ok", "none of ours"
    ]  # fmt: skip


def test_an_incorrect_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KERNELS["torch.emulated_row"]

    def launch(a, a_scale, b, b_scale, out, bias, workspace):  # type: ignore[no-untyped-def]
        right.launch(a, a_scale, b, b_scale, out, bias, workspace)
        out[1, 1] = 99.0

    wrong = replace(right, name="wrong.row", launch=launch)
    monkeypatch.setitem(KERNELS, wrong.name, wrong)
    (row,) = run(SHAPES, "scaled_gemm", "wrong.*", "torch.*").rows
    assert row.ours == ""
    (found,) = [entry for entry in row.entries if entry.ours]
    assert found.latency_us is None and found.failed.startswith("kernel_err ") and found.wrong


def test_accumulating_kernels_are_checked_after_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may hold a call several times."""

    def run_all(contender: Contender) -> None:
        for call in (*contender.calls, *contender.calls):
            call()

    monkeypatch.setattr(Contender, "run_all", run_all)
    case = main_grad_case(256, 24, 40, Format.E5M2, Format.E4M3FN)
    (row,) = run([case], "scaled_gemm", "torch.*", "torch.*").rows
    assert row.ours == "torch.emulated_group", [entry.failed for entry in row.entries]


def test_a_kernel_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise RuntimeError("no such tile")

    broken = replace(KERNELS["torch.emulated_row"], name="broken.row", launch=launch)
    monkeypatch.setitem(KERNELS, broken.name, broken)
    (row,) = run(SHAPES, "scaled_gemm", "torch.*", "broken.*").rows
    assert row.ours and row.rival == ""
    assert "RuntimeError: no such tile" in {entry.failed for entry in row.entries}


def test_contenders_have_unique_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time spent on a contender is stored by name."""
    seen: list[str] = []

    def time(contenders: Sequence[Contender], **_: object) -> None:
        seen.extend(contender.name for contender in contenders)
        for contender in contenders:
            contender.fail(RuntimeError("not timed"))

    monkeypatch.setattr(race.timing, "time_contenders", time)
    run(list(gemm_cases(64, 32, 128, "X1", Format.E4M3FN)), "gemm", "torch.quantize*+*", "torch.*")
    assert len(set(seen)) == len(seen) > 6


def test_a_kernel_that_loses_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(contenders: Sequence[Contender], *, announce: Callable[[Contender], None],
             **_: object) -> None:  # fmt: skip
        announce(contenders[1])
        raise DeviceLostError("illegal memory access")

    monkeypatch.setattr(race.timing, "time_contenders", lose)
    with pytest.raises(DeviceLostError, match=r"^torch.emulated_row at .*: illegal .*; leave"):
        run(SHAPES, "scaled_gemm", "torch.*_row", "torch.*")


def test_leaders_are_timed_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time of a few warm calls is a lower bound only."""
    warm = {"torch.emulated_tensor": 3.0, "torch.emulated_row": 1.0, "torch.emulated_block": 5.0}
    cold = {"torch.emulated_tensor": 6.0, "torch.emulated_row": 1.0, "torch.emulated_block": 7.0}
    races: list[list[str]] = []

    def time(contenders: Sequence[Contender], **_: object) -> None:
        names = [contender.name.split(" ")[0] for contender in contenders]
        races.append(names)
        for name, contender in zip(names, contenders, strict=True):
            contender.screened = len(names) > 1 and name != "torch.emulated_row"
            contender.samples_us.append((warm if contender.screened else cold)[name])
            contender.calls[0]()
            contender.calls_per_replay = 1

    monkeypatch.setattr(race.timing, "time_contenders", time)
    monkeypatch.setattr(operands.Operands, "check", lambda *_: (None, ""))
    (row,) = run(SHAPES, "scaled_gemm", "torch.*_row", "torch.*").rows
    # The next fastest by its flattered time, and no more than that.
    assert races[1:] == [["torch.emulated_tensor"], ["torch.emulated_block"]]
    assert (row.ours_us, row.rival, row.rival_us) == (1.0, "torch.emulated_tensor", 6.0)
    assert not any(entry.is_lower_bound for entry in row.entries)


def test_each_pattern_of_ours_is_compared_with_each_of_the_rivals() -> None:
    """There are no pairings with one pattern on each side."""
    ours, rivals = ["torch.*_row", "torch.*_block"], ["torch.*_tensor", "torch.*_t*"]
    conditions = [parse_condition("m > 64")]
    found = contest(SHAPES, "scaled_gemm", Setting(groups=conditions), ours=ours, rivals=rivals)
    (row,) = found.rows
    us = {entry.kernel.rpartition("_")[2]: entry.latency_us or 0 for entry in row.entries}
    assert us.keys() == {"row", "block", "tensor"}
    assert [(p.ours, p.rivals, p.group, p.compared) for p in found.pairings] == [
        *((mine, theirs, "all", 1) for mine in ours for theirs in rivals),
        *((mine, theirs, "m > 64", 0) for mine in ours for theirs in rivals),
    ]
    speedups = [pairing.speedup for pairing in found.pairings]
    expected = [us["tensor"] / us["row"]] * 2 + [us["tensor"] / us["block"]] * 2
    assert speedups[:4] == [pytest.approx(ratio) for ratio in expected]
    assert speedups[4:] == [None] * 4
    assert _pair_words(found.pairings[0]).startswith(
        "torch.*_row against torch.*_tensor, all, 1 compared: "
    )
    assert _pair_words(found.pairings[4]).endswith("m > 64: nothing to compare")
    assert run(SHAPES, "scaled_gemm", "torch.*_row", "torch.*").pairings == ()


@pytest.mark.parametrize(("ours", "rivals"), [("nope.*", "torch.*"), ("torch.*", "torch.nope")])
def test_a_pattern_without_kernels_is_refused(ours: str, rivals: str) -> None:
    with pytest.raises(
        UnknownNameError, match=r"no kernel of scaled_gemm is named .* `list kernels`"
    ):
        run(SHAPES, "scaled_gemm", ours, rivals)
