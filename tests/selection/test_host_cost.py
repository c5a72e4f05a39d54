"""Host costs in choices: scripted costs of a machine, and what dispatch and convert choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lokakern
from lokakern.bench.cli.main import app
from lokakern.conversion.routes import GEMMS
from lokakern.problems import make_problem
from lokakern.registry.schema.records import HostCostRecord
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.run_files import RunFile
from lokakern.selection import dispatcher, host_cost
from lokakern.selection.choice import Choice
from lokakern.selection.host_cost import MachineClass, minor_version
from lokakern.selection.weight_forms import with_weight
from lokakern.types import Environment, Format, Granularity, Operand
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.measurements import (
    BF16,
    ENVIRONMENT,
    H200,
    ROW,
    Book,
    accuracy,
    gemm,
    measured,
    time,
)

HERE = MachineClass("AMD EPYC 9654 96-Core Processor", "2.11")
# By m: the times of bfloat16 and of a quantized kernel on the GPU, in us.
TIMES = {64: (6.0, 4.0), 1024: (11.0, 9.5), 8192: (60.0, 35.0)}


def cost(
    call: str, us: float, *, regime: str = "compiled", language: str = "torch",
    path: str = "torch", cpu: str = HERE.cpu, environment: Environment = ENVIRONMENT,
    spread: float = 0.001,
) -> Any:  # fmt: skip
    def write(run: RunFile) -> None:
        record = HostCostRecord(
            cpu=cpu, regime=regime, call=call, language=language, path=path,
            host_us_p20=us * (1 - spread), host_us_p50=us, host_us_p80=us * (1 + spread),
            round_count=40, calls_per_round=20,
        )  # fmt: skip
        run.add_host_cost(H200, environment, record)

    return write


def costs(bf16: float, quantized: float, **options: Any) -> list[Any]:
    return [
        cost("bf16", bf16, **options),
        cost("unprepared", quantized, path="python", **options),
    ]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Book]:
    """Times on a GPU of this machine, whose host makes calls in Python."""
    monkeypatch.setattr(dispatcher, "devices_here", lambda: frozenset({H200}))
    monkeypatch.setattr(host_cost, "machine_class", lambda: HERE)
    # Not by LOKAKERN_NATIVE: an earlier test of this process may use the library.
    monkeypatch.setattr(host_cost.native, "status", lambda: "off")
    book = Book(tmp_path / "book.sqlite")
    rows = [
        row
        for m, (bf16, quantized) in TIMES.items()
        for row in (time(BF16, gemm(m), bf16), time(ROW, gemm(m), quantized))
    ]
    book.write(*rows, accuracy(BF16, gemm(64), 0.003), accuracy(ROW, gemm(64), 0.04))
    yield book
    dispatcher.use_snapshot(None)


def chosen(m: int, regime: str | None) -> Choice:
    return lokakern.dispatch("gemm", (m, 512, 512), 0.06, device=H200, regime=regime)


def kernels(regime: str | None) -> list[str]:
    return [chosen(m, regime).kernel for m in TIMES]


def test_without_host_costs_nothing_changes_and_the_reason_is_told(book: Book) -> None:
    for m, (_, quantized) in TIMES.items():
        choice = chosen(m, "compiled")
        assert (choice.kernel, choice.latency_us, choice.host_us) == (ROW, quantized, None)
        assert choice.gpu_us == quantized
        assert f"host cost: not measured on this machine class ({HERE})" in choice.explain()
        assert "python -m lokakern.bench host" in choice.explain()
    eager = chosen(64, "eager")
    assert eager.is_miss and "only in graph-cold" in eager.pick.note, "it has times of its own"
    assert "times are those of the regime eager" in eager.explain()
    assert "times are those of the GPU alone" in chosen(64, "compiled").explain()
    assert "host cost" not in chosen(64, "graph-cold").explain()


def test_regimes_differ_where_the_host_is_the_limit(book: Book) -> None:
    book.write(*costs(12.0, 18.0), *costs(12.0, 9.0, regime="eager"))
    assert kernels("graph-cold") == kernels(None) == [ROW, ROW, ROW]
    assert kernels("compiled") == [BF16, BF16, ROW], "costlier calls lose small products"
    assert kernels("eager") == [BF16, BF16, ROW], "a cheaper call alone is no reason to quantize"
    assert "9.00 us a call" in chosen(8192, "eager").explain()
    assert "; counted as bf16's, 12.00 us)" in chosen(8192, "eager").explain()
    small, large = chosen(64, "compiled"), chosen(8192, "compiled")
    assert (small.latency_us, small.gpu_us, small.host_us) == (12.0, 6.0, 12.0)
    assert (large.latency_us, large.gpu_us, large.host_us) == (35.0, 35.0, 18.0)
    assert small.rejected[ROW] == "slower: 18.00 us of the host"
    assert f"12.00 us a call (measured on {HERE}, python calls)" in small.explain()
    assert "6.00 us on the GPU; the longer counts, that of the host" in small.explain()
    assert "35.00 us on the GPU; the longer counts, that of the GPU" in large.explain()
    in_graph = chosen(64, "graph-cold")
    assert (in_graph.latency_us, in_graph.host_us, in_graph.gpu_us) == (4.0, None, 4.0)


def test_float16_has_the_host_costs_of_bfloat16(book: Book) -> None:
    kernel = "cuda.quantize_row+cuda.scaled_gemm_row"
    half = make_problem("gemm", (64, 512, 512), a=Operand(Format.FLOAT16))
    times = [time(kernel, gemm(m), quantized) for m, (_, quantized) in TIMES.items()]
    quantized = cost("unprepared", 18.0, language="cuda", path="python")
    book.write(*times, cost("bf16", 12.0), quantized, accuracy(kernel, half, 0.03))

    def asked(m: int, regime: str) -> Choice:
        options = {"device": H200, "regime": regime, "a": half.a}
        return lokakern.dispatch("gemm", (m, 512, 512), 0.06, **options)

    assert [asked(m, "graph-cold").kernel for m in TIMES] == [kernel, kernel, kernel]
    assert [asked(m, "compiled").kernel for m in TIMES] == [BF16, BF16, kernel]
    assert f"(measured on {HERE}, python calls, with bfloat16)" in asked(64, "compiled").explain()


def test_equal_host_costs_are_a_tie_that_bf16_wins(book: Book) -> None:
    book.write(*costs(12.0, 12.0))
    assert kernels("compiled") == [BF16, BF16, ROW]
    assert chosen(64, "compiled").tied == (ROW,)


def test_host_costs_below_gpu_times_change_nothing(book: Book) -> None:
    book.write(*costs(1.0, 3.0))
    assert kernels("compiled") == kernels("graph-cold")
    assert [chosen(m, "compiled").latency_us for m in TIMES] == [4.0, 9.5, 35.0]


def test_the_winner_changes_where_the_gpu_outlasts_the_host(book: Book) -> None:
    """Between measured m times on the GPU are interpolated, not those of the host."""
    book.write(*costs(12.0, 18.0))
    start = next(m for m in range(1024, 8192) if chosen(m, "compiled").kernel == ROW)
    before, after = chosen(start - 1, "compiled"), chosen(start, "compiled")
    assert before.kernel == BF16 and before.gpu_us == pytest.approx(18.0, rel=0.06)
    assert after.latency_us == 18.0 and after.gpu_us is not None and after.gpu_us < 18.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu": "another CPU"}, "measured on another CPU, torch 2.11"),
        ({"environment": replace(ENVIRONMENT, torch="2.12.1")}, f"measured on {HERE.cpu}, torch 2"),
        ({"regime": "eager"}, ""),
    ],
)
def test_costs_of_another_machine_class_do_not_count(
    book: Book, change: dict[str, Any], words: str
) -> None:
    book.write(*costs(12.0, 18.0, **change))
    choice = chosen(64, "compiled")
    assert (choice.kernel, choice.latency_us, choice.host_us) == (ROW, 4.0, None)
    told = choice.explain()
    assert f"not measured on this machine class ({HERE})" in told and words in told


def test_the_patch_version_of_torch_does_not_matter(book: Book) -> None:
    book.write(*costs(12.0, 18.0, environment=replace(ENVIRONMENT, torch="2.11.3")))
    assert chosen(64, "compiled").host_us == 12.0
    assert minor_version("2.11.0+cu130") == minor_version("2.11.3") == "2.11"


def test_costs_of_another_path_do_not_count(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by the C++ library and calls in Python are measured apart."""
    book.write(cost("bf16", 3.0), cost("unprepared", 9.0, path="python"),
               cost("unprepared", 3.5, path="native"))  # fmt: skip
    choice = chosen(64, "compiled")
    assert (choice.kernel, choice.host_us) == (BF16, 3.0)
    monkeypatch.setattr(host_cost.native, "status", lambda: "in use, built by c++")
    dispatcher.use_snapshot(load_snapshot([book.path]))
    assert (chosen(64, "compiled").kernel, chosen(64, "compiled").host_us) == (ROW, 3.5)


def test_a_call_that_was_not_measured_neither_gains_nor_loses(book: Book) -> None:
    book.write(cost("bf16", 12.0))
    assert kernels("compiled") == [BF16, BF16, ROW]
    told = chosen(8192, "compiled").explain()
    assert "12.00 us a call (assumed to be that of bf16)" in told
    book.write(cost("unprepared", 3.0, language="cuda", path="python"))
    assert kernels("compiled") == [BF16, BF16, ROW], "of another library"


def test_the_host_of_another_machine_is_unknown(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.write(*costs(12.0, 18.0))
    monkeypatch.setattr(dispatcher, "devices_here", frozenset)
    dispatcher.use_snapshot(load_snapshot([book.path]))
    choice = chosen(64, "compiled")
    assert (choice.kernel, choice.host_us) == (ROW, None)
    assert "host cost: not counted: NVIDIA H200 is not in this machine" in choice.explain()


def test_runs_count_by_their_median(book: Book) -> None:
    for us in (11.0, 12.0, 40.0):
        book.write(cost("bf16", us))
    assert chosen(64, "compiled").host_us == 12.0


def test_prepared_weights_have_costs_of_their_own(book: Book) -> None:
    problem = with_weight(gemm(64, prepared=True), Granularity.ROW, H200)
    book.write(
        time(BF16, problem, 12.0), time(ROW, problem, 4.0), cost("bf16", 5.0),
        cost("prepared", 7.0, path="python"), cost("unprepared", 30.0, path="python"),
    )  # fmt: skip
    choice = lokakern.dispatch(
        "gemm", (64, 512, 512), 0.06, device=H200, regime="compiled", prepared=True,
        b=problem.b,
    )  # fmt: skip
    assert (choice.kernel, choice.host_us, choice.latency_us) == (ROW, 7.0, 7.0)


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16))


def test_convert_chooses_training_by_costs_of_training(book: Book) -> None:
    problem = grad_weight_case(8192, 512, 512).problem
    book.write(time(BF16, problem, 6.0), *costs(12.0, 9.0))
    found = lokakern.convert(model_of(), 0.06, device=H200)
    told = found.explain()
    assert "host cost: not measured for training steps on this machine class" in told
    assert quantized(found) == {"output"}
    book.write(cost("training bf16", 70.0), cost("training", 90.0, path="python"))
    found = lokakern.convert(model_of(), 0.06, device=H200)
    assert quantized(found) == set()
    assert "90.00 us of the host" in found.explain()
    inference = lokakern.convert(model_of(), 0.06, device=H200, regime="graph-cold")
    assert quantized(inference) == {"output"}


def quantized(found: lokakern.conversion.convert.Conversion) -> set[str]:
    (site,) = found.sites.values()
    return {gemm for gemm, route in zip(GEMMS, site.routes, strict=True) if route.text}


def test_imported_costs_count_after_trust_only(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here measures them again, so that they stay in quarantine."""
    other = Book(tmp_path / "other.sqlite")
    other.write(*costs(12.0, 18.0), *measured())
    monkeypatch.setenv("LOKAKERN_DB", str(book.path))
    monkeypatch.setattr("lokakern.registry.storage.paths.shipped_databases", list)
    import_file(other.path, book.path)
    dispatcher.use_snapshot(None)
    choice = chosen(64, "compiled")
    assert (choice.kernel, choice.host_us) == (ROW, None)
    assert "imported costs of this class were not verified and do not count" in choice.explain()
    import_file(other.path, book.path, trusted=True)
    dispatcher.use_snapshot(None)
    assert chosen(64, "compiled").host_us == 12.0


def test_ranks_with_other_host_costs_disagree(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    same = dispatcher._digest_here(H200)
    assert same == dispatcher.snapshot().digest, "no host costs: machines do not matter"
    book.write(*costs(12.0, 18.0))
    here = dispatcher._digest_here(H200)
    monkeypatch.setattr(host_cost, "machine_class", lambda: MachineClass("another CPU", "2.11"))
    assert len({same, here, dispatcher._digest_here(H200)}) == 3


def test_a_conversion_tells_regime_and_host_costs(
    book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    book.write(cost("bf16", 12.0, spread=0.01))
    found = lokakern.convert(model_of(), 0.06, device=H200, regime="compiled")
    assert repr(found) == repr(lokakern.convert(model_of(), 0.06, device=H200)), "the default"
    assert "regime compiled" in repr(found)
    found.table()
    words = "times of regime compiled (torch.compile, with each call made by the host; in CUDA"
    told = " ".join(capsys.readouterr().out.split())
    assert words in told and "host cost: not measured for training steps" in told
    assert words in found.explain()
    book.write(cost("training bf16", 12.0), cost("training", 18.0, path="python"))
    found = lokakern.convert(model_of(), 0.06, device=H200, m_range=(64, 8192))
    first = found.choices[0]
    assert first["m"] == [*TIMES] and first["host_us"] == [12.0, 12.0, 18.0]
    assert first["us"] == [12.0, 12.0, 35.0]
    in_graphs = lokakern.convert(model_of(), 0.06, device=H200, regime="graph-cold")
    assert "regime graph-cold" in repr(in_graphs) and "host cost" not in in_graphs.explain()
    assert in_graphs.choices[0]["host_us"] == [None] * 3


def test_explain_takes_the_regime_of_a_compiled_model(
    book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    book.write(*costs(12.0, 18.0))
    words = ("explain", "--shape", "64,512,512", "--device", "NVIDIA H200", "--json")
    facts = {}
    for regime in ("compiled", "graph-cold"):
        with pytest.raises(SystemExit):
            app((*words, "--regime", regime), prog_name="python -m lokakern.bench")
        facts[regime] = json.loads(capsys.readouterr().out)
    compiled, graph = facts["compiled"], facts["graph-cold"]
    assert (compiled["kernel"], compiled["latency_us"]) == (BF16, 12.0)
    assert (compiled["gpu_us"], compiled["host_us"]) == (6.0, 12.0)
    assert compiled["host_cost"] == f"measured on {HERE}, python calls"
    assert (graph["kernel"], graph["regime"], graph["host_us"]) == (ROW, "graph-cold", None)
