"""Predicted times of ops that trees do not predict: scaled products, norms and quantizers."""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import json

import lokakern
from lokakern.bench.prediction.fit_laws import _with_known_parts, fitted_us, work_in
from lokakern.bench.prediction.left_out import Timings
from lokakern.errors import DatabaseError
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.selection.candidates import CARRIED, Evidence
from lokakern.selection.prediction.laws import BEYOND, work_of
from lokakern.selection.prediction.model_file import Model, parse
from lokakern.types import REALISTIC_DISTRIBUTIONS, Format, Granularity, Layout, Operand
from tests.support.left_out_errors import measured_and_predicted
from tests.support.shipped import H200_FILE

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def shipped():
    return load_snapshot([H200_FILE])


@pytest.fixture
def predicting(shipped, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(shipped)
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture
def model(predicting: None, shipped) -> Model:
    found = dispatcher.model_of(shipped.find_device(H200))
    assert found is not None
    return found


def test_of_plausible_layers_and_quantizers_few_have_no_number(predicting: None) -> None:
    """Of a twelfth of the sizes of `scripts/count_answers.py`; of all, 1.4 % have none."""
    script = Path(__file__).parents[3] / "scripts" / "count_answers.py"
    names = runpy.run_path(str(script))
    widths = names["WIDTHS"]
    pairs = [(n, widths[(5 * place + 2) % len(widths)]) for place, n in enumerate(widths)]
    answers = names["answers"](H200, pairs)
    cells = sum(map(len, answers.values()))
    assert cells == len(names["QUESTIONS"]) * len(names["ROWS"]) * len(widths)
    assert sum(how == "none" for found in answers.values() for how in found) <= 0.05 * cells
    for question, found in answers.items():
        assert found.count("none") <= 0.1 * len(found), question


@pytest.mark.parametrize(
    "operands",
    [
        {"a": Operand(Format.BFLOAT16, alignment=2)},
        {"b": Operand(Format.BFLOAT16, layout=Layout.ROW)},
        {"b": Operand(Format.BFLOAT16, layout=Layout.COLUMN, alignment=8)},
    ],
)
def test_operands_that_lie_as_none_that_were_timed_are_not_predicted(
    predicting: None, operands: dict[str, Operand]
) -> None:
    """Quantizers turn a row-major b, and libraries are slower where rows are not aligned."""
    shape, fields = (8192, 1536, 1280), {"epilogue": "layer+affine"}
    assert lokakern.dispatch("gemm_norm", shape, 0.06, device=H200, **fields).predicted
    assert not lokakern.dispatch(
        "gemm_norm", shape, 0.06, device=H200, **fields, **operands
    ).predicted


def test_a_quantizer_of_a_size_that_nobody_measured_is_predicted(
    predicting: None, model: Model
) -> None:
    choice = lokakern.dispatch("quantize", (2048, 896), 0.06, device=H200)
    found = choice.predicted
    assert found is not None and choice.is_miss and choice.latency_us is None
    assert found.plain == choice.kernel and found.quantizing == ""
    assert found.interval_us is not None
    assert found.interval_us[0] < found.latency_us < found.interval_us[1]
    assert f"({found.interval_us[0]:.2f} to {found.interval_us[1]:.2f})" in str(found)
    assert "predicted, not measured" in choice.explain()
    # No other kernel is faster at the upper end of its interval.
    law = {law.name: law for law in model.content.laws["quantize"].kernels}
    for name in ("cuda.quantize_row", "triton.quantize_row", "torch.quantize_row"):
        us = law[name].times_us(choice.problem, np.array([2048]), 132)[0]
        assert us * math.exp(law[name].spread.high) >= 0.99 * found.interval_us[1]


def test_a_norm_takes_fp8_only_where_the_lower_end_is_above_one(predicting: None) -> None:
    quantized = plain = 0
    for n, k in ((384, 896), (896, 1280), (2560, 1536), (3584, 1920), (4096, 1792)):
        for m in (600, 9000, 30000):
            problem = {"epilogue": "bias+layer+affine", "device": H200}
            choice = lokakern.dispatch("gemm_norm", (m, n, k), 0.06, **problem)
            found = choice.predicted
            assert found is not None and choice.is_miss
            is_quantized = KERNELS[choice.kernel].granularity is not Granularity.NONE
            assert is_quantized == (found.low > 1)
            quantized, plain = quantized + is_quantized, plain + (not is_quantized)
            unquantized = lokakern.dispatch("gemm_norm", (m, n, k), **problem)
            assert unquantized.predicted is not None
            assert unquantized.predicted.plain_us == pytest.approx(found.plain_us)
            assert KERNELS[unquantized.kernel].granularity is Granularity.NONE
    assert quantized and plain


def test_forms_and_parts_that_were_never_timed_are_not_predicted(predicting: None) -> None:
    def ask(op: str, *sizes: int, **fields):
        return lokakern.dispatch(op, sizes, 0.06, device=H200, **fields).predicted

    assert ask("gemm_norm", 2048, 896, 896, epilogue="layer") is not None
    assert ask("gemm_norm", 2048, 896, 896, epilogue="rms") is None, "of three pairs only"
    assert ask("gemm_norm", 2048, 896, 896, epilogue="layer+gate") is None
    assert ask("scaled_gemm", 2048, 896, 896) is not None
    assert ask("scaled_gemm", 2048, 896, 896, epilogue="hardswish") is None
    assert ask("scaled_gemm", 2048, 896, 900) is None, "rows are not aligned"
    assert ask("scaled_gemm", 2048, 896, 896, batch=2) is None


def test_a_law_is_carried_no_farther_than_it_was_tested(predicting: None, model: Model) -> None:
    law = next(x for x in model.content.laws["norm_quantize"].kernels if x.name[:4] == "cuda")
    (m, _, k), beyond = law.least, law.beyond
    assert beyond is not None and beyond != law.spread
    assert law.spread_at(m, 1, k) == law.spread
    assert law.spread_at(m - 1, 1, k) == law.spread_at(m, 1, k - 1) == beyond
    assert law.spread_at(m // BEYOND, 1, k // BEYOND) == beyond
    assert law.spread_at(m // BEYOND - 1, 1, k) is None
    assert law.spread_at(m, 1, law.largest[2] + 1) is None
    for rows, is_answered in ((m // BEYOND, True), (m // BEYOND - 1, False)):
        choice = lokakern.dispatch(
            "norm_quantize", (rows // 16 * 16, 896), 0.06, device=H200, epilogue="layer+affine"
        )
        assert (choice.predicted is not None) == is_answered
    norms = model.content.laws["gemm_norm"]
    assert norms.speedup is not None
    assert all(law.beyond is None for law in norms.kernels), "no speedup was tested there"


def test_laws_keep_their_bars(model: Model) -> None:
    assert set(model.content.laws) == {"gemm_norm", "norm_quantize", "quantize", "scaled_gemm"}
    for op, laws in model.content.laws.items():
        rows = [law.rows for law in laws.kernels]
        medians = [law.median_error for law in laws.kernels]
        assert np.average(medians, weights=rows) < 0.08, op
        assert all(law.spread.high < 1.5 and law.spread.low > -1 for law in laws.kernels), op


def test_rows_that_start_within_lines_take_longer(model: Model) -> None:
    """Of promoted products with k = 1680 about 1.5 times as long as with 1664 or 1792."""
    law = next(x for x in model.content.laws["scaled_gemm"].kernels
               if x.name == "cuda.scaled_gemm_row")  # fmt: skip
    fp8 = Operand(Format.E4M3FN, Granularity.ROW)
    b = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)
    us = {
        k: law.times_us(make_problem("scaled_gemm", (8192, 1680, k), a=fp8, b=b),
                        np.array([8192]), 132)[0]
        for k in (1664, 1680, 1792)
    }  # fmt: skip
    assert us[1680] > 1.3 * us[1792] > 1.3 * us[1664]


def test_rates_are_found_again_and_never_negative() -> None:
    problems = [
        make_problem("scaled_gemm", (m, n, k))
        for m in (512, 2048, 8192) for n in (256, 1024, 1536) for k in (384, 2048)
    ]  # fmt: skip
    kinds, work = work_in(problems, 132)
    true = dict.fromkeys(kinds, 0.0) | {"launch": 3.0, "products": 2e-3, "out": 0.5}
    times_us = work @ np.array([true[kind] for kind in kinds])
    found = dict(zip(kinds, fitted_us(work, times_us), strict=True))
    assert found == pytest.approx(true, abs=1e-6)
    cheaper = times_us - 0.3 * work[:, kinds.index("a")]
    assert (fitted_us(work, cheaper) >= 0).all()
    with_none = np.concatenate([work, np.zeros((len(work), 1))], 1)
    assert fitted_us(with_none, times_us)[-1] == 0


def test_products_with_a_part_of_few_pairs_are_not_fitted() -> None:
    problems = [
        make_problem("gemm_norm", (m, n, 512), epilogue=epilogue)
        for m in (512, 2048)
        for epilogue, sizes in (("layer", (256, 512, 768, 1024)), ("bias+cross", (256, 512, 768)))
        for n in sizes
    ]
    times_us = np.arange(float(len(problems)))
    found = _with_known_parts(Timings("x", "", Granularity.ROW, problems, times_us))
    assert {problem.epilogue for problem in found.problems} == {"layer"}
    assert [problems[int(us)] for us in found.times_us] == found.problems
    norms = [make_problem("norm_quantize", (512, 512), epilogue="layer", out_format="e4m3fn")]
    one = Timings("x", "", Granularity.ROW, norms, np.ones(1))
    assert _with_known_parts(one) is one


def test_a_wave_that_is_not_full_counts_as_full() -> None:
    problem = make_problem("scaled_gemm", (1, 128, 1024))
    work = work_of(problem, np.array([132 * 128, 132 * 128 + 1, 264 * 128]), 132)
    assert work["waves"].tolist() == pytest.approx([1024e-6, 2048e-6, 2048e-6])


def test_predicted_errors_of_norms_bound_those_left_out(
    shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every k left out; of all 307 bounds of fused kernels none is exceeded."""
    load_kernels()
    evidence = Evidence(shipped, shipped.find_device(H200), False, REALISTIC_DISTRIBUTIONS, {})
    row = KernelRow.of(KERNELS["cuda.quantize_row+cuda.gemm_norm_row"])
    checked = 0
    for epilogue in ("layer", "relu", "block_rms(256)+hardswish"):
        for true, bound in measured_and_predicted(
            shipped, evidence, row, "gemm_norm", epilogue, 1, monkeypatch
        ):
            checked += 1
            assert all(true.errors[limit] <= bound.errors[limit] for limit in CARRIED)
    assert checked >= 8


@pytest.mark.parametrize("change", ["no time", "twice"])
def test_laws_that_no_fit_writes_are_refused(model: Model, change: str) -> None:
    """A time of zero would divide by zero in `dispatch`."""
    content = json.decode(json.encode(model.content))
    assert parse(json.encode(content), "m")
    kernels = content["laws"]["gemm_norm"]["kernels"]
    if change == "twice":
        kernels.append(kernels[0])
    else:
        kernels[0]["us"] = dict.fromkeys(kernels[0]["us"], 0.0) | {"layer": 1.0}
    with pytest.raises(DatabaseError, match=change):
        parse(json.encode(content), "m")
