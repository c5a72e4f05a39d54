"""Choices by predicted times, from the shipped rows and their model."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import lokakern
from lokakern.errors import UnknownNameError
from lokakern.problems import PADDED, make_problem
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.paths import shipped_databases
from lokakern.selection import dispatcher, host_cost, misses
from lokakern.selection.candidates import HostCost
from lokakern.selection.padded_rows import padded_problem
from lokakern.selection.prediction import models
from lokakern.selection.prediction.errors import predicted_errors
from lokakern.selection.prediction.features import Rates, is_covered
from lokakern.selection.prediction.model_file import LARGEST_BYTES, LEAF, load, parse
from lokakern.types import Device, ErrorBudget, Format, Granularity, Layout, Operand
from tests.support.left_out_errors import measured_and_predicted
from tests.support.shipped import H100_FILE, H200_FILE

H200 = "NVIDIA H200"
BUDGET = ErrorBudget(row_err=0.06)
UNMEASURED = (32768, 2064, 2000)  # FP8 is predicted to be 1.4x as fast


@pytest.fixture(scope="module")
def shipped():
    return load_snapshot([H200_FILE])


@pytest.fixture
def predicting(shipped, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(shipped)
    yield
    dispatcher.use_snapshot(None)


def ask(m: int, n: int, k: int, budget: float | None = 0.06, **fields):
    return lokakern.dispatch("gemm", (m, n, k), budget, device=H200, **fields)


def test_a_size_that_nobody_measured_is_predicted_with_its_interval(predicting: None) -> None:
    choice = ask(*UNMEASURED)
    found = choice.predicted
    assert found is not None and choice.is_miss
    assert choice.latency_us is None  # never a fact
    assert choice.kernel == found.quantizing
    assert 1 < found.low < found.speedup < found.high
    assert found.latency_us == pytest.approx(found.plain_us / found.speedup)
    assert choice.errors["row_err"] <= 0.06
    words = choice.explain()
    assert f"{choice.kernel}, predicted, not measured: {found.latency_us:.2f} us" in words
    assert f"{found.speedup:.2f}x as fast as torch.bf16, {found.low:.2f} to" in words
    assert "error: a bound from measurements at other n and k" in words
    assert "predicted" in repr(choice)


def test_measured_times_come_before_predictions(predicting: None) -> None:
    measured = ask(8192, 4096, 4096)
    assert measured.predicted is None and measured.latency_us is not None
    assert not measured.is_miss
    beyond = ask(200_000, 4096, 4096)
    assert beyond.predicted is not None and "outside what was measured" in beyond.explain()


def test_off_gives_what_it_gave_before(shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "0")
    dispatcher.use_snapshot(shipped)
    choice = ask(*UNMEASURED)
    assert (choice.kernel, choice.predicted, choice.is_miss) == ("torch.bf16", None, True)
    dispatcher.use_snapshot(None)


def test_another_value_of_the_switch_is_refused(
    predicting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "yes")
    with pytest.raises(UnknownNameError, match="LOKAKERN_PREDICT is 'yes'"):
        ask(*UNMEASURED)


def test_fp8_is_taken_only_where_the_lower_end_is_above_one(predicting: None) -> None:
    draw = random.Random(7)
    taken = 0
    for _ in range(80):
        n, k = (16 * round(2 ** draw.uniform(2, 9)) for _ in range(2))
        choice = ask(draw.choice((2048, 8192, 50_000)), n, k)
        found = choice.predicted
        if found is None:
            assert not choice.is_miss
            continue
        is_fp8 = choice.kernel != found.plain
        assert is_fp8 == (bool(found.quantizing) and found.low > 1)
        assert is_fp8 == (choice.kernel == found.quantizing)
        taken += is_fp8
    assert 4 < taken < 70


def test_no_kernel_beyond_the_budget_is_predicted(predicting: None) -> None:
    tight = ask(*UNMEASURED, budget=0.03)
    assert tight.kernel == "torch.bf16"
    assert tight.predicted is not None and tight.predicted.quantizing == ""
    assert any("row_err" in why and "> 0.03" in why for why in tight.rejected.values())
    unknown = ask(*UNMEASURED, budget=ErrorBudget(row_err=0.06, mean_shift=0.5))
    assert unknown.kernel == "torch.bf16"
    assert any("mean_shift is not known" in why for why in unknown.rejected.values())


def test_without_a_budget_nothing_is_predicted(predicting: None) -> None:
    assert ask(*UNMEASURED, budget=None).predicted is None


def test_what_the_model_does_not_describe_stays_a_miss(predicting: None) -> None:
    for fields in ({"batch": 4}, {"out_format": Format.FLOAT32}, {"accumulate": True}):
        assert ask(*UNMEASURED, **fields).predicted is None
    assert ask(32, 2064, 2000).predicted is None  # fewer rows than it was fitted to
    assert ask(32768, 2064, 8).predicted is None


def test_winners_agree_with_picks_at_every_m(predicting: None) -> None:
    table = ask(*UNMEASURED).table
    draw = random.Random(1)
    for m in [draw.randint(1, 6_000_000) for _ in range(300)]:
        kernel = table.kernel_at(m)
        assert (kernel.name if kernel else "") == table.pick(m).name


def test_the_form_of_a_prepared_weight_is_chosen_by_predictions(predicting: None) -> None:
    choice = ask(16384, 4096, 4000, prepared=True)
    assert choice.predicted is not None
    assert choice.kernel == choice.predicted.quantizing
    assert choice.problem.b is not None and choice.problem.b.granularity is Granularity.ROW


def test_unaligned_rows_are_compared_with_padded_ones(predicting: None) -> None:
    choice = ask(32768, 2061, 2001)
    assert choice.predicted is not None
    assert choice.predicted.plain == "torch.bf16_padded"
    compiled = ask(32768, 2061, 2001, regime="compiled")
    assert compiled.predicted is not None
    assert compiled.predicted.plain_us < choice.predicted.plain_us  # no copies


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("a_layout", [Layout.ROW, Layout.COLUMN])
@pytest.mark.parametrize("b_layout", [Layout.ROW, Layout.COLUMN])
def test_a_compiled_product_takes_no_longer_than_with_padded_sizes(
    predicting: None, a_layout: Layout, b_layout: Layout
) -> None:
    """Nor than with the copies that a compiler spares, which the model was fitted to."""
    draw = random.Random(5)
    a, b = (Operand(Format.BFLOAT16, layout=x) for x in (a_layout, b_layout))
    seen = 0
    drawn = [[draw.randint(300, 4000) for _ in "mnk"] for _ in range(16)]
    for shape in ([1500, 1500, 16384], [1500, 1024, 16384], *drawn):
        problem = make_problem("gemm", shape, a=a, b=b)
        wide = padded_problem(problem)
        if wide is None:
            continue
        # Rows are padded to a multiple of 8 or of 16, of which the model may find either slower.
        wider = dataclasses.replace(wide, m=-(-wide.m // 16) * 16)
        alone, compiled, *aligned = (
            dispatcher.table_for(x, BUDGET, None, H200, regime).forecast
            for x, regime in ((problem, None), (problem, "compiled"), (wide, None), (wider, None))
        )
        assert alone is not None and compiled is not None
        us = compiled.time_us(PADDED, problem.m)
        # Up to 15 rows less, which the model does not always find faster.
        padded_us = [
            found.time_us("torch.bf16", x.m)
            for found, x in zip(aligned, (wide, wider), strict=True)
            if found is not None
        ]
        assert len(padded_us) == 2
        assert us <= 1.01 * max(padded_us), problem
        assert us <= alone.time_us(PADDED, problem.m), problem
        seen += 1
    assert seen > 12


def test_transposed_operands_are_predicted(predicting: None) -> None:
    a = Operand(Format.BFLOAT16, layout=Layout.COLUMN)
    b = Operand(Format.BFLOAT16, layout=Layout.ROW)
    assert ask(2064, 2000, 16384, a=a, b=b).predicted is not None


def test_random_plausible_problems_are_answered(predicting: None) -> None:
    """95 % at least, of m from 256 to 262144, n and k from 16 to 8192, also odd ones."""
    draw = random.Random(3)
    answered = 0
    for i in range(40):
        n, k = (round(2 ** draw.uniform(4, 13)) for _ in range(2))
        if i % 4:
            n, k = (-(-x // 16) * 16 for x in (n, k))
        choice = ask(round(2 ** draw.uniform(8, 18)), n, k)
        answered += choice.predicted is not None or not choice.is_miss
    assert answered >= 38


def test_a_failure_measured_at_the_problem_bars_a_kernel(predicting: None, shipped) -> None:
    from lokakern.selection.candidates import Evidence
    from lokakern.selection.prediction.forecast import forecast
    from lokakern.types import REALISTIC_DISTRIBUTIONS

    device = shipped.find_device(H200)
    model = dispatcher.model_of(device)
    assert model is not None
    evidence = Evidence(shipped, device, False, REALISTIC_DISTRIBUTIONS, {})
    best = ask(*UNMEASURED).kernel
    problem = make_problem("gemm", UNMEASURED)
    for barred, is_there in (((), True), ((best,), False)):
        found = forecast(problem, model, evidence, 16, frozenset(), barred, is_compiled=False)
        assert found is not None
        assert any(c.name == best for c in found.candidates) is is_there
    for barred in (("torch.bf16",),):  # without a baseline there is nothing to gain over
        assert forecast(problem, model, evidence, 16, frozenset(), barred,
                        is_compiled=False) is None  # fmt: skip


def test_a_kernel_that_changed_is_not_predicted(
    predicting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lokakern.registry.register import KERNELS

    chosen = ask(*UNMEASURED).kernel
    monkeypatch.setitem(vars(KERNELS[chosen]), "digest", "0" * 64)
    dispatcher.use_snapshot(dispatcher.snapshot())
    now = ask(*UNMEASURED)
    assert now.kernel != chosen
    assert now.predicted is not None and now.predicted.quantizing != chosen


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped database with its model beside it."""
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    database = tmp_path / H200_FILE.name
    shutil.copy(H200_FILE, database)
    device = load_snapshot([database]).find_device(H200)
    place = models.model_path(database, device)
    assert place == tmp_path / "models" / "nvidia-h200.json"
    place.parent.mkdir()
    shutil.copy(models.model_path(H200_FILE, device), place)
    return database


def test_a_model_of_other_rows_is_told_and_not_used(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = load_snapshot([copied])
    device = facts.find_device(H200)
    assert models.model_for(facts, device) is not None
    place = models.model_path(copied, device)
    text = place.read_bytes()
    digest = facts.digest.encode()
    assert digest in text
    place.write_bytes(text.replace(digest, b"0" * 64))
    with caplog.at_level(logging.WARNING, "lokakern"):
        assert models.model_for(facts, device) is None
    assert "was fitted from other rows" in caplog.text and "bench fit" in caplog.text


def test_a_model_of_another_device_is_told_and_not_used(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = load_snapshot([copied])
    other = Device("nvidia", H200, "sm_90", 66, 70, "half")
    with caplog.at_level(logging.WARNING, "lokakern"):
        assert models.model_for(facts, other) is None
    assert "is not used" in caplog.text


def test_a_damaged_model_is_told_and_not_used(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = load_snapshot([copied])
    device = facts.find_device(H200)
    models.model_path(copied, device).write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, "lokakern"):
        assert models.model_for(facts, device) is None
    assert "invalid" in caplog.text


def test_trees_that_overflow_are_refused(shipped) -> None:
    content = load(models.model_path(H200_FILE, shipped.find_device(H200))).content
    trees = content.kernels[0].trees
    for leaf in (-3e38, 3e38, 1.5):
        value = np.frombuffer(trees.value, np.float32).copy()
        value[np.frombuffer(trees.feature, np.uint8) == LEAF] = leaf
        with pytest.raises(ValueError, match="trees add up to"):
            replace(trees, value=value.tobytes())
    with pytest.raises(msgspec.ValidationError, match=r"1\.0"):
        msgspec.convert(msgspec.structs.asdict(content.rates) | {"bytes_per_us": 5e-324}, Rates)


def test_host_costs_count_in_predictions(shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host takes longer than bf16 on the GPU, nothing is gained."""
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")

    def costs(us: float):
        by_call = {(host_cost.BF16, "torch"): HostCost(us, 0.0)}
        return lambda *_, **__: host_cost.HostCosts("measured here", by_call)

    found = {}
    for us in (10.0, 320.0, 1000.0):
        monkeypatch.setattr(dispatcher, "host_costs", costs(us))
        dispatcher.use_snapshot(shipped)
        found[us] = ask(*UNMEASURED, regime="compiled").predicted
    dispatcher.use_snapshot(None)
    assert found[10.0].low > 1 and found[10.0].speedup > found[320.0].speedup > 1
    assert found[320.0].latency_us == 320.0, "of the host"
    assert (found[1000.0].speedup, found[1000.0].latency_us) == (1.0, 1000.0)
    assert found[1000.0].plain == "torch.bf16"


def test_each_shipped_model_belongs_to_a_shipped_file_and_keeps_its_bars() -> None:
    places = {}
    for file in shipped_databases():
        facts = load_snapshot([file])
        (device,) = facts.devices
        places[models.model_path(file, device)] = facts
    found = sorted(models.model_folder(H200_FILE).glob("*.json"))
    assert models.model_path(H200_FILE, load_snapshot([H200_FILE]).find_device(H200)) in found
    for place in found:
        check_model(place, places[place].digest)


def check_model(place: Path, rows_digest: str) -> None:
    assert place.stat().st_size <= LARGEST_BYTES
    content = load(place).content
    assert content.rows_digest == rows_digest
    rows = sum(kernel.rows for kernel in content.kernels)
    for bar, errors in (
        (0.05, [kernel.median_error for kernel in content.kernels]),
        (0.15, [kernel.p90_error for kernel in content.kernels]),
    ):
        pairs = zip(content.kernels, errors, strict=True)
        assert sum(kernel.rows * error for kernel, error in pairs) / rows <= bar
        assert max(errors) <= 2 * bar  # of unaligned rows, few of which were timed


def test_predicted_errors_bound_those_left_out(shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every fourth size; the decision record has all."""
    from lokakern.registry.register import KERNELS, load_kernels
    from lokakern.registry.schema.records import KernelRow
    from lokakern.selection.candidates import CARRIED, Evidence
    from lokakern.types import REALISTIC_DISTRIBUTIONS

    load_kernels()
    evidence = Evidence(shipped, shipped.find_device(H200), False, REALISTIC_DISTRIBUTIONS, {})
    checked = 0
    for name in ("cuda.quantize_row+cuda.scaled_gemm_row",
                 "cuda.quantize_tensor+cuda.scaled_gemm_tensor"):  # fmt: skip
        row = KernelRow.of(KERNELS[name])
        for true, bound in measured_and_predicted(
            shipped, evidence, row, "gemm", "none", 4, monkeypatch
        ):
            checked += 1
            assert all(true.errors[limit] <= bound.errors[limit] for limit in CARRIED)
    assert checked > 15


def test_narrow_outputs_and_far_sizes_have_no_predicted_error(predicting: None, shipped) -> None:
    from lokakern.registry.register import KERNELS
    from lokakern.registry.schema.records import KernelRow
    from lokakern.selection.candidates import Evidence
    from lokakern.types import REALISTIC_DISTRIBUTIONS

    ask(*UNMEASURED)
    evidence = Evidence(shipped, shipped.find_device(H200), False, REALISTIC_DISTRIBUTIONS, {})
    row = KernelRow.of(KERNELS["cuda.quantize_row+cuda.scaled_gemm_row"])
    for n, k in ((16, 4000), (18, 204), (512, 12)):
        assert isinstance(predicted_errors(row, make_problem("gemm", (64, n, k)), evidence), str)


def test_calls_of_gemm_run_the_predicted_kernel_and_count_a_miss(
    predicting: None, caplog: pytest.LogCaptureFixture
) -> None:
    table = ask(*UNMEASURED).table
    m = UNMEASURED[0]
    misses._COUNTS.clear()
    misses.LOGGED.clear()
    with caplog.at_level(logging.WARNING, "lokakern"):
        kernels = [misses.after_miss(table, m, "bf16") for _ in range(3)]
    assert {k.name for k in kernels if k} == {ask(*UNMEASURED).kernel}
    assert caplog.text.count("predicted:") == 1
    assert misses._COUNTS[make_problem("gemm", UNMEASURED), H200] == 3
    with pytest.raises(lokakern.errors.MissError):
        misses.after_miss(table, m, "raise")
    misses._COUNTS.clear()


def test_features_describe_plain_products_only() -> None:
    assert is_covered(make_problem("gemm", (64, 64, 64), epilogue="bias"))
    assert not is_covered(make_problem("gemm", (64, 64, 64), batch=2))
    assert not is_covered(make_problem("quantize", (64, 64), out_format="e4m3fn"))


def test_a_forest_adds_what_its_trees_say() -> None:
    from lokakern.selection.prediction.model_file import LEAF, Forest, Trees

    trees = Trees(
        start=1.0, sizes=bytes([3, 1]), feature=bytes([2, LEAF, LEAF, LEAF]),
        value=np.array([0.5, 10, 20, 100], np.float32).tobytes(), right=bytes([2, 0, 0, 0]),
    )  # fmt: skip
    rows = np.zeros((3, 46), np.float32)
    rows[:, 2] = 0.25, 0.5, 0.75
    assert Forest(trees)(rows).tolist() == [111, 111, 121]


def test_intervals_are_wider_where_predictions_are_worse(shipped) -> None:
    content = load(models.model_path(H200_FILE, shipped.find_device(H200))).content
    lows = [content.spreads[kind].low for kind in ("large", "small", "narrow", "unaligned")]
    assert lows == sorted(lows, reverse=True)
    assert all(-math.inf < low < 0 for low in lows)
    assert parse(models.model_path(H200_FILE, shipped.find_device(H200)).read_bytes(), "m")


def test_a_table_of_measurements_has_no_forecast(predicting: None) -> None:
    problem, budget = make_problem("gemm", UNMEASURED), ErrorBudget(row_err=0.06)
    device = dispatcher.device_named(H200)
    with_it, without = (
        dispatcher.table_for(problem, budget, None, device, predicts=x) for x in (True, False)
    )
    assert with_it.pick(UNMEASURED[0]).prediction is not None
    assert without.pick(UNMEASURED[0]).prediction is None
    assert without.pick(UNMEASURED[0]).name == "torch.bf16"


H100_NVL = Device("nvidia", "NVIDIA H100 NVL", "sm_90", 132, 94)


def test_predictions_of_another_gpu_type_are_shown_and_never_chosen(predicting: None) -> None:
    own = ask(*UNMEASURED)
    choice = lokakern.dispatch("gemm", UNMEASURED, 0.06, device=H100_NVL)
    assert (choice.kernel, choice.is_miss, choice.latency_us) == ("torch.bf16", True, None)
    found = choice.predicted
    assert found is not None and own.predicted is not None
    assert found.transferred_from == H200
    assert found.low > 1  # it would have been chosen on an H200
    assert found.plain_us > own.predicted.plain_us  # less bandwidth, fewer FLOPs
    words = choice.explain()
    assert "torch.bf16, not measured" in words
    assert f"transferred from {H200}, never chosen by: " in words
    assert "predicted" not in repr(choice)
    kernels = {choice.table.kernel_at(m) for m in (64, 1000, 10_000, 1_000_000)}
    assert {kernel.name for kernel in kernels if kernel} == {"torch.bf16"}


def test_nothing_is_transferred_to_another_architecture_or_to_a_part_of_a_gpu(
    predicting: None,
) -> None:
    for other in (
        Device("nvidia", "NVIDIA B200", "sm_100", 148, 180),
        Device("nvidia", "NVIDIA H100 80GB HBM3", "sm_90", 60, 40, "3g.40gb"),
        Device("nvidia", "NVIDIA H100 of tomorrow", "sm_90", 132, 80),
    ):
        assert lokakern.dispatch("gemm", UNMEASURED, 0.06, device=other).predicted is None


def test_a_device_with_rows_but_no_model_of_its_own_gets_a_transferred_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Models of shipped files are in one folder; that of another file is no reason to warn."""
    facts = load_snapshot([H100_FILE, H200_FILE])
    h100, h200 = map(facts.find_device, ("NVIDIA H100 80GB HBM3", H200))
    with caplog.at_level(logging.WARNING, "lokakern"):
        own, other = models.model_for(facts, h200), models.model_for(facts, h100)
    assert own is not None and (own.device, own.transferred_from) == (h200, "")
    assert other is not None and other.device == h100
    if other.transferred_from:  # until it has one
        assert other.transferred_from == H200
    assert not caplog.records


def test_two_files_in_one_folder_may_each_have_a_model(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = copied.with_name("x.sqlite")  # that is read after the file with the model
    shutil.copy(H100_FILE, later)
    facts = load_snapshot([copied, later])
    with caplog.at_level(logging.WARNING, "lokakern"):
        found = models.model_for(facts, facts.find_device(H200))
    assert found is not None and not found.transferred_from
    assert not caplog.records
    path = Path(found.path)
    path.write_bytes(path.read_bytes().replace(found.content.rows_digest.encode(), b"0" * 64))
    with caplog.at_level(logging.WARNING, "lokakern"):
        assert models.model_for(facts, facts.find_device(H200)) is None
    assert f"than those of {later} or {copied}" in caplog.text


def test_a_size_timed_without_errors_has_the_bounds_around_it(
    predicting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = 8192, 33, 1225  # of random sizes, whose errors nobody measured
    choice = ask(*measured)
    assert not choice.is_miss and choice.latency_us is not None
    assert choice.pick.candidate is not None and choice.pick.candidate.errors_predicted
    assert choice.kernel != "torch.bf16" and 0.03 < choice.errors["row_err"] <= 0.06
    assert "a bound from measurements at other n and k" in choice.explain()
    assert ask(*measured, 0.04).kernel == "torch.bf16"
    monkeypatch.setenv("LOKAKERN_PREDICT", "0")
    dispatcher.use_snapshot(dispatcher.snapshot())
    assert ask(*measured).kernel == "torch.bf16"
