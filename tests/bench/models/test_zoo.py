"""The command `model zoo`: the measurement of cells, the file of rows, and the table."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.bench.models import throughput
from lokakern.bench.models.blocks import perceptron
from lokakern.bench.models.zoo import ahead, table
from lokakern.bench.models.zoo import cell as cells
from lokakern.bench.models.zoo.ahead import compile_one
from lokakern.bench.models.zoo.architecture import Architecture, Feature
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.bench.models.zoo.cell import MODES, Cell, Row, measure
from lokakern.bench.models.zoo.hstu import HSTU
from lokakern.bench.models.zoo.table import FILE, cells_of, run, state_digest, table_of
from lokakern.conversion.convert import convert
from lokakern.conversion.variants import as_plain
from lokakern.errors import DeviceLostError, SuiteError, UnknownNameError
from lokakern.selection import dispatcher
from lokakern.types import COMPILED, COMPILED_GRAPH
from lokakern.workloads import zoo_layers
from tests.support.conversions import H200, K, N, measured
from tests.support.measurements import Book

CPU = torch.device("cpu")
TINY = {
    "deep": Architecture(lambda: perceptron((24, 16), norm=True, last=1), (Feature(24, "X5"),)),
    "hstu": Architecture(lambda: HSTU(16, 2, 1, 8), (Feature(16, "X3"),)),
}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "MOST_ROUNDS", 3)
    monkeypatch.setattr(throughput, "FEWEST_ROUNDS", 3)
    monkeypatch.setattr(cells, "GRAPH_US", 1.0)


@pytest.fixture
def tiny() -> Iterator[None]:
    """A zoo of two small models."""
    with mock.patch.dict(ZOO, TINY, clear=True):
        yield


# --- cells


def rows_of(name: str, batch: int, training: bool, modes: tuple[str, ...]) -> list[Row]:
    return list(measure(Cell(name, batch, training), modes, CPU, 0.06))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("training", [False, True])
def test_a_cell_under_autocast_has_float32_parameters(training: bool) -> None:
    cell = Cell("deep", 16, training, autocast=True)
    assert cell.step == ("train, autocast" if training else "infer, autocast")
    pair = cells._Pair(cell, CPU, 0.06, ("eager",))
    assert {p.dtype for model in pair.models.values() for p in model.parameters()} == {
        torch.float32
    }
    seen: list[torch.dtype] = []
    pair.models[""][0].register_forward_hook(lambda _m, _x, y: seen.append(y.dtype))
    pair._stepper("", "eager", 1).step()
    assert set(seen) == {torch.bfloat16}
    (row,) = measure(cell, ("compiled",), CPU, 0.06)
    assert row.error == "" and row.step == cell.step


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_a_cell_has_a_row_for_each_mode(name: str, training: bool) -> None:
    rows = rows_of(name, 32, training, MODES)
    assert [row.mode for row in rows] == list(MODES)
    assert rows[0].error == "UnsupportedError: mode graph needs a GPU; found cpu"
    assert rows[0].speedup is None and rows[0].us is None
    for row in rows[1:]:
        assert (row.model, row.batch, row.step) == (name, 32, "train" if training else "infer")
        assert row.error == "" and row.timer == throughput.HOST
        assert row.rounds == 3 and (row.graph_breaks, row.recompiles) == (0, 0)
        assert row.speedup and row.bf16_us and row.us
    products = sum(isinstance(m, nn.Linear) for m in TINY[name].build().modules())
    assert {row.products for row in rows} == {products * (3 if training else 1)}
    assert {row.quantized for row in rows} == {0}  # a CPU has no measurements


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices of an H200 for a layer, and a zoo of that layer."""
    Book(tmp_path / "rows.sqlite").write(*measured()).use()
    architecture = Architecture(lambda: nn.Linear(K, N, bias=False), (Feature(K, "X1"),))
    monkeypatch.setitem(ZOO, "layer", architecture)
    monkeypatch.setattr(
        cells, "convert", functools.partial(convert, device=H200, distribution="X1")
    )
    yield
    dispatcher.use_snapshot(None)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("batch", "training", "quantized"),
    [(16, False, 0), (16, True, 1), (256, True, 3), (1024, True, 2)],
)
def test_products_quantized_at_the_batch_size_are_counted(
    batch: int, training: bool, quantized: int
) -> None:
    """See `measured`: the output from 256, the input's gradient everywhere, the weight's at 256."""
    (row,) = rows_of("layer", batch, training, ("eager",))
    assert row.error == ""
    assert (row.products, row.quantized) == (3 if training else 1, quantized)


@pytest.mark.usefixtures("known")
def test_the_second_model_is_converted_and_the_first_is_not() -> None:
    pair = cells._Pair(Cell("layer", 256, True), CPU, 0.06, ("eager",))
    plain, converted = pair.models.values()
    (x,) = pair.batches[0]
    assert type(plain) is nn.Linear and type(converted) is not nn.Linear
    assert torch.equal(plain.weight, converted.weight)  # type: ignore[arg-type]
    a, b = plain(x).float(), converted(x).float()
    assert 0.01 < (a - b).norm() / a.norm() < 0.06, "E4M3 rounds by 4 %"


@pytest.mark.usefixtures("known")
def test_graphs_have_a_model_converted_without_host_costs() -> None:
    pair = cells._Pair(Cell("layer", 256, True), CPU, 0.06, cells.MODES)
    assert [*pair.models] == ["", "compiled", "compiled-graph"]
    assert pair.regimes == {"graph": "compiled-graph", "compiled": "compiled", "eager": "compiled"}


@pytest.mark.usefixtures("tiny")
def test_training_computes_the_gradients_of_parameters_and_drops_those_of_inputs() -> None:
    pair = cells._Pair(Cell("deep", 8, True), CPU, 0.06, ("eager",))
    pair._stepper("", "eager", 1).step()
    gradients = [p.grad for p in pair.models[""].parameters()]
    assert all(g is not None and g.count_nonzero() for g in gradients)
    assert all(p.grad is None for p in pair.models["compiled"].parameters())
    (x,) = pair.batches[0]
    assert x.requires_grad and x.grad is None
    seen: list[Tensor] = []
    handle = pair.models[""][0].register_full_backward_hook(  # type: ignore[index]
        lambda _module, given, _made: seen.append(given[0])
    )
    pair._trained(pair.models[""], pair.batches[0], list(pair.models[""].parameters()))
    handle.remove()
    assert seen[0].shape == x.shape and seen[0].count_nonzero()
    predicted = cells._Pair(Cell("deep", 8, False), CPU, 0.06, ("eager",))
    assert not predicted.batches[0][0].requires_grad
    assert not any(p.requires_grad for p in predicted.models[""].parameters())


@pytest.mark.usefixtures("tiny")
def test_a_replay_repeats_all_batches() -> None:
    pair = cells._Pair(Cell("deep", 8, False), CPU, 0.06, ("eager",))
    found = pair._stepper("", "eager", 3)
    seen: list[Tensor] = []
    handle = pair.models[""].register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    found.replay()
    handle.remove()
    assert found.steps == len(seen) == 3 * throughput.BATCHES
    assert all(seen[i] is pair.batches[i % throughput.BATCHES][0] for i in range(len(seen)))


@pytest.mark.usefixtures("tiny")
def test_an_error_of_a_model_or_a_mode_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    ZOO["deep"] = Architecture(fail, TINY["deep"].features)  # type: ignore[arg-type]
    rows = list(run(cells_of(("deep", "hstu"), (16,), False), ("compiled", "eager"), CPU, 0.06))
    assert [(row.model, row.mode) for row in rows] == [
        ("deep", "compiled"), ("deep", "eager"), ("hstu", "compiled"), ("hstu", "eager")
    ]  # fmt: skip
    assert [row.error for row in rows[:2]] == ["RuntimeError: out of luck"] * 2
    assert all(row.error == "" and row.speedup for row in rows[2:])
    monkeypatch.setattr(torch, "compile", fail)
    first, second = rows_of("hstu", 16, False, ("compiled", "eager"))
    assert first.error.startswith("TypeError") and first.products == 3
    assert second.error == "" and second.speedup


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    cells._check(CPU, "reason")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cells._check(cuda, "out of memory")
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLostError, match="cannot be used any more: reason; run the same"):
        cells._check(cuda, "reason")


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("training", [False, True])
def test_all_modes_are_timed_on_a_gpu(training: bool) -> None:
    rows = list(measure(Cell("deep", 512, training), MODES, torch.device("cuda"), 0.06))
    assert [(row.mode, row.error) for row in rows] == [(mode, "") for mode in MODES]
    assert rows[0].timer == throughput.GRAPH
    assert {row.timer for row in rows[1:]} == {throughput.EVENTS}


# --- the table


def row(model: str, batch: int, step: str, mode: str, speedup: float | None, **more: Any) -> Row:
    return dataclasses.replace(Row(model, batch, step, mode, speedup), **more)


def test_the_table_has_a_line_for_each_cell_and_a_summary() -> None:
    rows = [
        row("b", 8192, "train", "graph", 2.0, products=3, quantized=1),
        row("b", 512, "infer", "graph", 0.5, products=1, quantized=1),
        row("b", 512, "infer", "eager", None, products=1, quantized=1, error="no luck"),
        row("b", 8192, "infer", "graph", 2.0, products=1, quantized=0),
        row("b", 8192, "infer", "eager", 1.23456, products=1, quantized=0),
        row("a", 512, "infer", "graph", None, error="too large"),
        row("a", 512, "infer", "eager", None, error="too large"),
    ]
    *table, least_i, least_t, mean_i, mean_t = table_of(rows, ("graph", "eager"))
    assert [(line["model"], line["step"], line["batch"]) for line in table] == [
        ("b", "infer", 512), ("b", "infer", 8192), ("b", "train", 8192), ("a", "infer", 512)
    ]  # fmt: skip
    assert table[0] == {
        "model": "b", "batch": 512, "step": "infer", "graph": 0.5, "eager": None,
        "FP8 products": "1 of 1", "note": "eager: no luck",
    }  # fmt: skip
    assert table[1]["eager"] == 1.235 and table[2]["eager"] is None
    assert table[3]["note"] == "graph, eager: too large" and table[3]["FP8 products"] is None
    assert [line["model"] for line in (least_i, mean_t)] == ["least", "geometric mean"]
    assert (least_i["step"], least_i["graph"], least_i["eager"]) == ("infer", 0.5, 1.235)
    assert (mean_i["step"], mean_i["graph"], mean_i["note"]) == ("infer", 1.0, "3 of 6 failed")
    assert (least_t["graph"], mean_t["graph"], mean_t["eager"]) == (2.0, 2.0, None)
    assert mean_t["note"] == ""
    assert table_of([]) == []


def test_the_table_has_ratios_after_tune_where_there_are_some() -> None:
    rows = [
        row("a", 512, "infer", "eager", 0.98, tuned_speedup=1.0, tuned_margin=0.01, tune_s=20.0),
        row("b", 512, "infer", "eager", 0.5, error="no luck"),
    ]
    first, second, least, mean = table_of(rows, ("eager",))
    columns = [list(line) for line in (first, second, least, mean)]
    assert all(
        names[:5] == ["model", "batch", "step", "eager", "eager, tuned"] for names in columns
    )
    assert (first["eager, tuned"], second["eager, tuned"]) == (1.0, None)
    assert (least["eager"], least["eager, tuned"], mean["eager, tuned"]) == (0.5, 1.0, 1.0)
    done = dataclasses.replace(rows[0], speedup_margin=0.02, us=10.0, products=1, quantized=0)
    words = table._words(done)
    assert words.endswith("0 of 1 products in FP8; 1.000x +- 0.010 after 20 s of tune")


@pytest.mark.usefixtures("known")
def test_each_mode_is_tuned_from_what_convert_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """And timed after that; the next mode begins with the conversion's own choices."""
    calls, quantized = [], []

    def tune(conversion: Any, step: Any, *, graph: bool, time_limit: float) -> None:
        step()
        calls.append((graph, time_limit))
        routes = {
            name: tuple(as_plain(route, "slower") for route in routes)
            for name, routes in conversion.untuned.items()
        }
        conversion.use_routes(routes, keep_classes=True)

    def race(plain: Any, found: Any, _device: Any) -> throughput.Pace:
        quantized.append(sum(bool(r) for r in found_pair[0].models[COMPILED]._routes))
        return real_race(plain, found, _device)

    real_race, found_pair = cells.race, []
    make = cells._Pair.__init__

    def noted(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        found_pair.append(self)

    monkeypatch.setattr("lokakern.conversion.convert.Conversion.tune", tune)
    monkeypatch.setattr(cells, "race", race)
    monkeypatch.setattr(cells._Pair, "__init__", noted)
    rows = list(measure(Cell("layer", 256, True), ("compiled", "eager"), CPU, 0.06, 30.0))
    assert [row.error for row in rows] == ["", ""]
    assert calls == [(False, 30.0)] * 2
    assert quantized == [3, 0, 3, 0]
    assert all(row.tuned_speedup and row.tuned_margin is not None for row in rows)
    assert all(row.tune_s is not None and row.tune_s >= 0 for row in rows)


def test_cells_come_by_batch_size_and_predictions_first() -> None:
    found = cells_of(("hstu", "ple"), (8192, 512), None)
    assert [(c.batch, c.step, c.model) for c in found] == [
        (8192, "infer", "hstu"), (8192, "infer", "ple"),
        (8192, "train", "hstu"), (8192, "train", "ple"),
        (512, "infer", "hstu"), (512, "infer", "ple"),
        (512, "train", "hstu"), (512, "train", "ple"),
    ]  # fmt: skip
    assert {c.step for c in cells_of(("hstu",), (512,), True)} == {"train"}
    with pytest.raises(UnknownNameError, match="the zoo has no bert; expected some of dlrm-dcnv2"):
        cells_of(("bert",), (512,), None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Cells that were measured; each mode of them has a ratio of 1.5."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def measured_here(cell: Cell, modes: tuple[str, ...], *_: object) -> Iterator[Row]:
        found.append((f"{cell.model} {cell.batch} {cell.step}", tuple(modes)))
        for mode in modes:
            yield row(cell.model, cell.batch, cell.step, mode, 1.5, speedup_margin=0.0, us=10.0)

    monkeypatch.setattr("lokakern.bench.models.zoo.table.measure", measured_here)
    monkeypatch.setattr("lokakern.bench.models.zoo.table.free_memory", lambda: None)
    return found


def test_a_file_keeps_rows_and_the_next_run_resumes(
    tmp_path: Path, asked: list[tuple[str, tuple[str, ...]]]
) -> None:
    path = tmp_path / "new" / FILE
    some, more = (cells_of(("hstu",), batches, False) for batches in ((512,), (512, 8192)))
    first = list(run(some, ("graph",), CPU, 0.06, path=path))
    assert asked == [("hstu 512 infer", ("graph",))]
    again = list(run(more, ("graph", "eager"), CPU, 0.06, path=path))
    assert asked[1:] == [("hstu 512 infer", ("eager",)), ("hstu 8192 infer", ("graph", "eager"))]
    assert again[0] == first[0] and len(again) == 4
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[0])["state"] == state_digest(CPU, 0.06)
    with path.open("a") as file:
        file.write('{"model": "hs')  # cut off by a crash
    assert list(run(more, ("graph", "eager"), CPU, 0.06, path=path)) == again
    assert path.read_text().splitlines() == lines
    list(run(some, ("graph",), CPU, 0.05, path=path))  # another budget is another state
    assert len(asked) == 4
    path.write_text('{"arm": "bf16"}\n')
    with pytest.raises(SuiteError, match=r"zoo.jsonl, line 1: is no row of the zoo"):
        list(run(some, ("graph",), CPU, 0.06, path=path))


def test_a_lost_gpu_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(cell: Cell, *_: object) -> Iterator[Row]:
        yield row(cell.model, cell.batch, cell.step, "graph", None, error="illegal access")
        raise DeviceLostError("lost")

    monkeypatch.setattr("lokakern.bench.models.zoo.table.measure", lost)
    done = called("hstu", "--batches", "512", "--modes", "graph")
    assert done.exit_code == 1 and done.stderr.endswith("DeviceLostError: lost\n")
    assert "illegal access" in done.stdout
    path = tmp_path / FILE
    with pytest.raises(DeviceLostError):
        list(run(cells_of(("hstu",), (512,), False), ("graph",), CPU, 0.06, path=path))
    assert json.loads(path.read_text())["error"] == "illegal access"


def test_no_cell_begins_after_the_time_limit(
    tmp_path: Path, asked: list[tuple[str, tuple[str, ...]]]
) -> None:
    both = cells_of(("hstu",), (512, 8192), False)
    path = tmp_path / FILE
    first = list(run(both[1:], ("graph",), CPU, 0.06, path=path))
    left = list(run(both, ("graph",), CPU, 0.06, path=path, time_limit_s=0))
    assert left == first and len(asked) == 1


@pytest.mark.usefixtures("tiny")
def test_cells_are_compiled_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    stepper = cells._Pair._stepper

    def counted(pair: Any, regime: str, mode: str, repeats: int) -> Any:
        kept = inductor_config.autotune_local_cache, inductor_config.compile_threads
        assert (mode, repeats, kept) == ("compiled", 1, (False, 3))
        ran.append(f"{pair.cell.model} {regime}")
        return stepper(pair, regime, mode, repeats)

    monkeypatch.setattr(cells._Pair, "_stepper", counted)
    for modes, regimes in ((("graph",), [COMPILED_GRAPH]), (("compiled", "eager"), [COMPILED])):
        ran.clear()
        compile_one(Cell("deep", 16, True), modes, "cpu", 0.06, 3, None)
        assert ran == [f"deep {regime}" for regime in ("", *regimes)]
    assert inductor_config.autotune_local_cache


@pytest.mark.usefixtures("tiny")
def test_a_cell_that_fails_to_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delenv("LOKAKERN_DB", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    asked = [(Cell(name, 16, True), ("graph",)) for name in ("unknown", "deep")]

    def compiled(cell: Cell, *given: Any) -> None:
        assert given == (("graph",), "cuda", 0.06, 3, "mine.sqlite")
        cells.ZOO[cell.model]

    monkeypatch.setattr(ahead, "compile_one", compiled)
    ahead.compile_ahead(
        asked,
        "cuda",
        0.06,
        2,
        database="mine.sqlite",
        say=told.append,
        made=concurrent.futures.ThreadPoolExecutor,
    )
    assert len(told) == 2 and sum("KeyError" in text for text in told) == 1
    assert told[-1].startswith("compiled 2/2: ")
    del told[:]
    ahead.compile_ahead(
        asked, "cuda", 0.06, 2, end=0.0, database="mine.sqlite", say=told.append,
        made=concurrent.futures.ThreadPoolExecutor,
    )  # fmt: skip
    assert len(told) == 1  # no cell begins after the end, which has passed


def test_only_what_is_missing_is_compiled_ahead(
    tmp_path: Path, asked: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(table, "compile_ahead", lambda cells, *_a, **_o: found.append(cells))
    both, path, gpu = cells_of(("hstu",), (512, 8192), False), tmp_path / FILE, torch.device("cuda")
    list(run(both, ("graph", "eager"), CPU, 0.06, path=path, jobs=2))
    assert not found  # on a CPU there is nothing to compile
    monkeypatch.setattr(table, "state_digest", lambda *_: "as before")
    list(run(both[:1], ("graph",), gpu, 0.06, path=tmp_path / "gpu"))
    list(run(both, ("graph", "compiled", "eager"), gpu, 0.06, path=tmp_path / "gpu", jobs=2))
    assert found == [[(both[0], ["compiled"]), (both[1], ["graph", "compiled"])]]


# --- the command


def called(*words: str) -> Any:
    return CliRunner().invoke(app, ["model", *words])


@pytest.mark.usefixtures("tiny")
def test_one_command_prints_one_table(tmp_path: Path) -> None:
    words = ("zoo", "--batches", "16", "--modes", "compiled,eager", "--out", str(tmp_path))
    done = called(*words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception}"
    assert "1/4: deep, batch 16, infer" in done.stderr
    lines = [line for line in done.stdout.splitlines() if "│" in line]
    assert len(lines) == 4 + 4
    assert lines[-1].split("│")[0].strip() == "geometric mean"
    assert throughput.HOST in done.stdout
    assert len((tmp_path / FILE).read_text().splitlines()) == 2 * 2 * 2
    facts = json.loads(called(*words, "--json", "--quiet").stdout)  # from the file
    assert len(facts["rows"]) == 8 and len(facts["table"]) == 8
    assert facts["table"][0]["model"] == "deep" and facts["budget"] == 0.06
    (first,) = {line.split("│")[3].strip() for line in lines[:1]}
    assert first == f"{facts['table'][0]['compiled']:.3f}"
    cast = called("deep", "--batches", "16", "--modes", "eager", "--train", "--autocast", "--json")
    assert [row["step"] for row in json.loads(cast.stdout)["rows"]] == ["train, autocast"]
    one = called("hstu", "--batches", "16", "--modes", "graph", "--infer", "--quiet")
    assert one.exit_code == 5 and "graph needs a GPU" in one.stdout


def test_a_time_limit_has_its_exit_code(asked: list[tuple[str, tuple[str, ...]]]) -> None:
    done = called("zoo", "--time-limit", "0")
    assert done.exit_code == 3 and asked == []
    total = len(ZOO) * len(zoo_layers.BATCHES) * 2 * len(MODES)
    assert f"the time limit left {total} of {total} ratios" in done.stderr
    done = called("zoo", "--format", "csv")
    assert done.exit_code == 0
    batches = [int(name.split()[1]) for name, _ in asked]
    assert sorted(set(batches)) == sorted(zoo_layers.BATCHES) and batches[0] == 8192


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zoo", "--steps", "3"), "goes without a model of the zoo"),
        (("zoo", "--suite", "x.toml"), "sweep --suite zoo"),
        (("dlrm", "--batches", "512"), "goes with a model of the zoo"),
        (("dlrm", "--autocast"), "goes with a model of the zoo"),
        (("zoo", "--batches", "512,x"), "is no list of batch sizes"),
        (("zoo", "--batches", "0"), "is no list of batch sizes"),
        (("zoo", "--modes", "graphs"), "expected some of graph"),
        (("zoo", "--modes", ","), "expected some of graph"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], message: str) -> None:
    done = called(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_an_unknown_model_lists_those_of_the_zoo() -> None:
    done = called("bert")
    assert done.exit_code == 2
    assert "expected one of wukong" in done.stderr and "masknet" in done.stderr
