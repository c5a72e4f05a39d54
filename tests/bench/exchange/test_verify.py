"""Measurements of others: what is measured again decides whether they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lokakern.bench.cli.main import app
from lokakern.bench.exchange import verify
from lokakern.device import current_device
from lokakern.measure import operands
from lokakern.registry.quarantine import Tier, imports_folder, quarantined_files
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import TimingRecord
from lokakern.registry.schema.row_keys import key_of
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage import paths
from lokakern.registry.storage.reader import Rows, read_rows
from lokakern.registry.storage.writer import write_file
from lokakern.sweep import engine
from lokakern.sweep.resume import distribution_row
from lokakern.sweep.worker import AccuracyTask, Death, Done, Task, TimingTask
from lokakern.types import Device
from tests.support.inline_worker import run_tasks_here
from tests.support.run_files import HOST_COST

Ran = tuple[int, str, str]
SWEEP = ("sweep", "--shape", "64,32,32", "--quiet", "--kernel", "torch.bf16", "--kernel",
         "torch.emulated_row")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 64)
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", run_tasks_here)
        patch.setattr(verify, "run_tasks", run_tasks_here)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        current_device.cache_clear()
        yield
    current_device.cache_clear()
    torch.set_num_threads(threads)


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words], prog_name="python -m lokakern.bench")
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows measured by another user with the same device."""
    path = tmp_path_factory.mktemp("measured") / "theirs.sqlite"
    assert run(*SWEEP, "--db", path) == 0
    rows = read_rows(path)
    assert len(rows["timing"]) > 3 and len(rows["accuracy"]) > 30
    return rows


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return tmp_path / "mine.sqlite"


@pytest.fixture
def command(mine: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Imports rows, and verifies them."""

    def verified(rows: Rows, *words: object) -> Ran:
        theirs = mine.with_name("theirs.sqlite")
        theirs.unlink(missing_ok=True)
        write_file(theirs, rows)
        import_file(theirs, mine)
        capsys.readouterr()
        code = run("verify", "--db", mine, "--quiet", "--json", *words)
        found = capsys.readouterr()
        return code, found.out, found.err

    return verified


def quarantined_counts(database: Path) -> dict[str, int]:
    """The number of quarantined facts, by table."""
    found = [read_rows(imported.path) for imported in quarantined_files(database)]
    return {name: count for name in ("timing", "accuracy")
            if (count := sum(len(rows[name]) for rows in found))}  # fmt: skip


def is_rejected(database: Path) -> bool:
    return bool(quarantined_files(database, Tier.REJECTED)) and not quarantined_files(database)


def changed(
    rows: Rows, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[tuple[Any, ...]]:
    """A table's rows, each with other values, under the key of these."""
    found = []
    for values in rows[name]:
        row = dict(zip(COLUMNS[name], values, strict=True))
        row |= change(row)
        found.append((row_keys.row_key(name, row), *list(row.values())[1:]))
    return sorted(found)


def names_of(rows: Rows) -> dict[str, str]:
    return {row[0]: row[COLUMNS["kernel"].index("name")] for row in rows["kernel"]}


def as_measured_here(
    rows: Rows, factors: Callable[[str], float], *, spread: float = 1.01
) -> Callable[..., bool]:
    """Workers that find what the rows say, times some factor."""
    names = names_of(rows)
    times = {}
    for values in rows["timing"]:
        row = dict(zip(COLUMNS["timing"], values, strict=True))
        place = (names[row["kernel"]], row["problem"], row["distribution"])
        times[place] = row["latency_us_p50"]

    def run_tasks(tasks: dict[int, Task], done: Any, _died: Any, **_: Any) -> bool:
        for number, task in list(tasks.items()):
            assert isinstance(task, TimingTask)
            distribution = key_of(distribution_row(task.case.distribution))
            records = []
            for name in task.kernels:
                us = factors(name) * times[name, key_of(task.case.problem), distribution]
                records.append(TimingRecord(
                    status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us * spread,
                    replay_count=9, void_count=0, calls_per_replay=1, kernel_err=0.1,
                    kernel_err_row_p99=0.1, timer="x",
                ))  # fmt: skip
            done(number, tasks.pop(number), Done(number, tuple(records), 0.1))
        return True

    return run_tasks


def test_a_file_with_reproduced_errors_joins_the_database(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    code, out, err = command({**measured, "timing": []}, "--count", 8)
    found = json.loads(out)
    count = len(measured["accuracy"])
    assert code == 0 and f"verified: {count} rows are in the database now" in err
    assert len(found) >= 8 and all(row["what"].startswith(("row_", "rel_", "mean_"))
                                   for row in found)  # fmt: skip
    assert all(row["here_over_there"] == pytest.approx(1, abs=1e-3) for row in found)
    assert {row["kernel"] for row in found} >= {"torch.bf16", "torch.emulated_row"}, "of each kind"
    assert not quarantined_counts(mine) and set(measured["accuracy"]) <= set(
        read_rows(mine)["accuracy"]
    )
    runs = [dict(zip(COLUMNS["run"], row, strict=True)) for row in read_rows(mine)["run"]]
    assert {run["suite"] for run in runs} == {"shapes", "verify"}, "what was measured is kept"


def test_shipped_rows_are_counted_and_not_called_verified(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = mine.with_name("shipped.sqlite")
    write_file(shipped, measured)
    monkeypatch.setattr(paths, "shipped_databases", lambda: [shipped])
    code, out, err = command(measured)
    count = sum(len(measured[name]) for name in FACTS)
    assert code == 0 and out == "[]\n"
    assert "nothing to verify: all rows are known (0 measured again)" in err
    assert f"{count} rows are in shipped.sqlite (shipped) already, and were not measured" in err
    assert f"the shipped ones are in {mine} now, too" in err
    assert not quarantined_counts(mine) and read_rows(mine)["timing"] == measured["timing"]


def test_a_file_that_contradicts_a_shipped_one_is_rejected(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file imported before the release that ships its origin."""
    shipped = mine.with_name("shipped.sqlite")
    write_file(shipped, measured)
    place = COLUMNS["timing"].index("kernel_err")
    lies = [(*row[:place], 0.123, *row[place + 1 :]) for row in measured["timing"]]
    files = iter([[]])  # none while it is imported
    monkeypatch.setattr(paths, "shipped_databases", lambda: next(files, [shipped]))
    code, out, err = command(measured | {"timing": lies})
    assert (code, out) == (6, "[]\n") and is_rejected(mine)
    assert "it contradicts shipped.sqlite: timing row" in err and "kernel_err" in err


@pytest.mark.parametrize("name", ["row_err", "row_p99", "mean_rel_err"])
def test_an_error_below_the_measured_one_rejects_the_file(
    measured: Rows, mine: Path, command: Callable[..., Ran], name: str
) -> None:
    """Of whatever a budget may limit: those of the quantized kernel at two thirds of what they are.

    No other kernel's errors are made up, and the file is rejected as a whole.
    """

    def smaller(row: dict[str, Any]) -> dict[str, Any]:
        if row["row_err"] < 0.02:
            return {}
        return {name: row[name] / 1.5, f"{name}_upper": row[f"{name}_upper"] / 1.5}

    lies = changed(measured, "accuracy", smaller)
    code, _, err = command({**measured, "timing": [], "accuracy": lies}, "--count", 4)
    assert code == 6 and "rejected: dispatch does not read it" in err
    assert f"{name}_upper is 0." in err or f"{name} is 0." in err
    assert is_rejected(mine) and not set(lies) & set(read_rows(mine)["accuracy"])


@pytest.mark.parametrize(
    ("factor", "rejected", "words"),
    [
        (lambda name: 1.04, False, "verified"),
        (lambda name: 1.2, False, "verified"),  # a slower GPU, and every kernel in its place
        (lambda name: 1.5, True, "they are 1.50 of those there"),
        (lambda name: 3.0 if "emulated" in name else 1.0, True, "out of place"),
    ],
)
def test_times_must_agree_up_to_a_common_factor(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch,
    factor: Callable[[str], float], rejected: bool, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(verify, "run_tasks", as_measured_here(measured, factor))
    code, _, err = command({**measured, "accuracy": []})
    assert words in err and code == (6 if rejected else 0)
    assert is_rejected(mine) is rejected and not quarantined_counts(mine)


def test_one_time_that_deviates_by_half_rejects_the_file(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the times may deviate, but none by half."""
    times = [dict(zip(COLUMNS["timing"], row, strict=True)) for row in measured["timing"]]
    largest = max(time["latency_us_p50"] for time in times)

    def faster(row: dict[str, Any]) -> dict[str, Any]:
        us = row["latency_us_p50"] / (2 if row["latency_us_p50"] == largest else 1)
        return dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80"), us)

    lies = {**measured, "accuracy": [], "timing": changed(measured, "timing", faster)}
    monkeypatch.setattr(verify, "PLACED_SHARE", 0.0)
    monkeypatch.setattr(verify, "run_tasks", as_measured_here(measured, lambda _: 1.0))
    code, _, err = command(lies, "--count", 50)
    assert code == 6 and "out of place" in err and "by +100%" in err


def test_every_run_of_a_problem_is_judged(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run with false times at the same problems must not hide behind the first."""
    key = "f" * 32
    second = (key, *measured["run"][0][1:])

    def faster(row: dict[str, Any]) -> dict[str, Any]:
        columns = ("latency_us_p20", "latency_us_p50", "latency_us_p80")
        return {"run": key, **{name: row[name] / 2 for name in columns}}

    timing = sorted([*measured["timing"], *changed(measured, "timing", faster)])
    rows = {**measured, "accuracy": [], "timing": timing,
            "run": sorted([*measured["run"], second])}  # fmt: skip
    monkeypatch.setattr(verify, "run_tasks", as_measured_here(measured, lambda _: 1.0))
    code, _, err = command(rows)
    assert code == 6 and "out of place" in err and is_rejected(mine)


def test_many_copies_of_a_correct_row_hide_no_false_row(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    """Thousands of runs, or of seeds, of one honest cell, and few of a cell that is made up."""
    quantized = [row for row in measured["accuracy"]
                 if names_of(measured)[row[COLUMNS["accuracy"].index("kernel")]]
                 == "torch.emulated_row"]  # fmt: skip
    place = COLUMNS["accuracy"].index
    names = {row[0]: row[COLUMNS["distribution"].index("name")] for row in measured["distribution"]}
    honest, lie = (
        next(row for row in quantized if names[row[place("distribution")]] == name)
        for name in ("X3", "X1")  # whose errors are alike for every seed
    )
    runs = [(f"{number:032x}", *measured["run"][0][1:]) for number in range(1, 400)]
    copies = []
    for key, *_ in runs:
        one = {**measured, "accuracy": [honest]}
        copies += changed(one, "accuracy", lambda _, key=key: {"run": key})
    lies = changed({**measured, "accuracy": [lie]}, "accuracy", lambda row: {
        name: row[name] * 0.7 for name in row
        if name.startswith(("row_err", "row_p99", "rel_err", "mean_rel_err"))
        and row[name] is not None and "share" not in name})  # fmt: skip
    rest = [row for row in quantized if row[place("key")] != lie[place("key")]]
    rows = {**measured, "timing": [], "accuracy": sorted([*rest, *copies, *lies]),
            "run": sorted([*measured["run"], *runs])}  # fmt: skip
    code, out, err = command(rows, "--count", 6)
    assert code == 6 and "measured again" in err and is_rejected(mine)
    assert len(json.loads(out)) <= 12, "a cell is measured, and told, once"


def test_too_few_repetitions_accept_nothing(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of one problem are one place: three times are not three problems."""
    here = as_measured_here(measured, lambda _: 1.0)

    def one_only(tasks: dict[int, Task], done: Any, died: Any, **more: Any) -> bool:
        first = dict([*tasks.items()][:1])
        here(first, done, died, **more)
        return False

    monkeypatch.setattr(verify, "run_tasks", one_only)
    code, _, err = command({**measured, "accuracy": []})
    assert code == 0 and "are needed" in err
    assert quarantined_counts(mine) == {"timing": len(measured["timing"])}


def test_an_unreadable_file_does_not_stop_other_files(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    broken = imports_folder(mine) / Tier.UNVERIFIED / "0000000000000000.sqlite"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"x" * 5000)
    code, _, err = command({**measured, "timing": []}, "--count", 2)
    assert code == 1 and "cannot be verified" in err and "remove it" in err
    assert set(measured["accuracy"]) <= set(read_rows(mine)["accuracy"])


def test_a_busy_machine_accepts_and_rejects_nothing(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = as_measured_here(measured, lambda _: 9.0, spread=1.4)
    monkeypatch.setattr(verify, "run_tasks", busy)
    code, _, err = command({**measured, "accuracy": []})
    assert code == 0 and "too busy" in err and "are needed" in err
    assert quarantined_counts(mine) == {"timing": len(measured["timing"])}


def test_rows_that_cannot_be_measured_here_stay_quarantined(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    """Times of another GPU, errors of another FP8 format, failures: none can be found out here."""
    h200 = row_keys.row_of(Device("nvidia", "NVIDIA H200", "sm_90", 132, 140))
    changes = {"device": h200["key"], "regime": "graph-cold", "latency_us_p20": 1e3,
               "latency_us_p50": 1e3, "latency_us_p80": 1e3}  # fmt: skip
    timing = changed(measured, "timing", lambda _: changes)
    quantized = [row for row in measured["accuracy"]
                 if names_of(measured)[row[COLUMNS["accuracy"].index("kernel")]]
                 == "torch.emulated_row"]  # fmt: skip
    other = changed({**measured, "accuracy": quantized}, "accuracy",
                    lambda _: {"architecture": "gfx942"})  # fmt: skip
    failed = changed(
        {**measured, "accuracy": quantized[:2]}, "accuracy",
        lambda row: {"seed": 70 + row["seed"], "status": "wrong", "reason": "made up"},
    )  # fmt: skip
    rows = {**measured, "timing": timing,
            "accuracy": sorted([*measured["accuracy"], *other, *failed]),
            "device": [tuple(h200[column] for column in COLUMNS["device"])]}  # fmt: skip
    code, _, err = command(rows, "--count", 4)
    assert code == 0
    assert f"verified in part: {len(measured['accuracy'])} rows are in the database now" in err
    assert "were not measured here: failures, another GPU" in err
    assert quarantined_counts(mine) == {"timing": len(timing), "accuracy": len(other) + len(failed)}
    assert not set(failed) & set(read_rows(mine)["accuracy"])


def test_host_costs_stay_quarantined(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    """They depend on the CPU, its load and torch, and are never measured again."""
    row = {name: measured[name][0][0] for name in ("run", "device", "environment")}
    row |= asdict(HOST_COST)
    row["key"] = row_keys.row_key("host_cost", row)
    cost = tuple(row[column] for column in COLUMNS["host_cost"])
    code, _, err = command({**measured, "timing": [], "host_cost": [cost]}, "--count", 8)
    assert code == 0 and "verified in part" in err and "1 host costs were not measured here" in err
    (imported,) = quarantined_files(mine)
    assert read_rows(imported.path)["host_cost"] == [cost]
    assert read_rows(mine)["host_cost"] == [] and not quarantined_counts(mine)


def test_rows_that_are_already_trusted_are_no_evidence(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows of a shipped file must not hide a few false rows."""
    import_first = mine.with_name("first.sqlite")
    write_file(import_first, {**measured, "timing": []})
    import_file(import_first, mine, trusted=True)
    place = COLUMNS["accuracy"].index("seed")
    few = [row for row in measured["accuracy"] if row[place] == 0][:2]  # they get one seed
    lies = changed({**measured, "accuracy": few}, "accuracy", lambda row: {
        "seed": 5, **{name: value * 0.7 for name, value in row.items()
                      if name.startswith(("row_err", "row_p99", "rel_err"))}})  # fmt: skip
    accuracy = sorted([*measured["accuracy"], *lies])
    code, out, _ = command({**measured, "timing": [], "accuracy": accuracy}, "--count", 3)
    assert code == 6 and len(json.loads(out)) == 2


def test_a_kernel_that_crashes_twice_rejects_the_file(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(tasks: dict[int, Task], _done: Any, died: Any, **_: Any) -> bool:
        for number, task in list(tasks.items()):
            left: Task | None = task
            while left is not None:
                name = left.kernel if isinstance(left, AccuracyTask) else left.kernels[0]
                left = died(number, left, Death(number, name, "crashed", "signal 11"))
            del tasks[number]
        return True

    monkeypatch.setattr(verify, "run_tasks", crash)
    code, _, err = command({**measured, "timing": []}, "--count", 2)
    assert code == 6 and "crashed: signal 11" in err and is_rejected(mine)
    statuses = COLUMNS["accuracy"].index("status")
    assert {row[statuses] for row in read_rows(mine)["accuracy"]} == {"crashed"}, "it is our row"


def test_a_machine_out_of_memory_accepts_and_rejects_nothing(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(tasks: dict[int, Task], _done: Any, died: Any, **_: Any) -> bool:
        for number, task in list(tasks.items()):
            assert isinstance(task, AccuracyTask)
            for _once in range(2):
                died(number, task, Death(number, task.kernel, "out_of_memory", "killed"))
            del tasks[number]
        return True

    monkeypatch.setattr(verify, "run_tasks", die)
    code, _, _ = command({**measured, "timing": []}, "--count", 2)
    assert code == 0 and quarantined_counts(mine) == {"accuracy": len(measured["accuracy"])}


def test_nothing_to_verify(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--db", "postgresql://nowhere/x") == 1
    capsys.readouterr()
    assert run("verify", "--db", mine) == 1, "no pass: it may be the file that is meant"
    words = capsys.readouterr().err
    assert "no quarantined imports, so that nothing was verified; " in words
    assert f"import it first: python -m lokakern.bench import {mine}" in words
    imports_folder(mine).mkdir()
    assert run("verify", "--db", mine) == 0
    assert capsys.readouterr().err.endswith("so that nothing was verified\n")
    assert run("verify", "monday.sqlite") == 2
    assert "import it first: python -m lokakern.bench import monday.sqlite" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )
