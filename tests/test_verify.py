"""Measurements of others: what is measured again decides whether they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lokakern.bench import operands, sweep, verify
from lokakern.bench.cli import app
from lokakern.bench.known import distribution_row
from lokakern.bench.worker import AccuracyTask, Death, Done, Task, TimingTask
from lokakern.device import current_device
from lokakern.registry import identity
from lokakern.registry.exchange import import_file
from lokakern.registry.identity import distribution_key, problem_key
from lokakern.registry.reader import Rows, read_rows
from lokakern.registry.records import TimingRecord
from lokakern.registry.tables import COLUMNS
from lokakern.registry.trust import Tier, waiting_for
from lokakern.registry.writer import write_file
from lokakern.types import Device
from tests.inline_worker import run_tasks_here

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
        patch.setattr(sweep, "run_tasks", run_tasks_here)
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
    """What somebody with the same device measured."""
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


def tiers(database: Path) -> list[Tier]:
    return [waiting.tier for waiting in waiting_for(database, tuple(Tier))]


def as_measured_here(
    rows: Rows, factors: Callable[[str], float], *, spread: float = 1.01
) -> Callable[..., bool]:
    """Workers that find what the rows say, times some factor."""
    names = {row[0]: row[COLUMNS["kernel"].index("name")] for row in rows["kernel"]}
    times = {}
    for values in rows["timing"]:
        row = dict(zip(COLUMNS["timing"], values, strict=True))
        place = (names[row["kernel"]], row["problem"], row["distribution"])
        times[place] = row["latency_us_p50"]

    def run_tasks(tasks: dict[int, Task], done: Any, _died: Any, **_: Any) -> bool:
        for number, task in list(tasks.items()):
            assert isinstance(task, TimingTask)
            distribution = distribution_key(distribution_row(task.case.distribution))
            records = []
            for name in task.kernels:
                us = factors(name) * times[name, problem_key(task.case.problem), distribution]
                records.append(TimingRecord(
                    status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us * spread,
                    replay_count=9, void_count=0, calls_per_replay=1, kernel_err=0.1,
                    kernel_err_row_p99=0.1, timer="x",
                ))  # fmt: skip
            done(number, tasks.pop(number), Done(number, tuple(records), 0.1))
        return True

    return run_tasks


def test_errors_come_out_alike_and_the_file_joins_the_database(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    code, out, err = command({**measured, "timing": []}, "--count", 8)
    found = json.loads(out)
    assert code == 0 and "verified: it is in the database now (8 rows" in err
    assert len(found) == 8 and {row["what"] for row in found} == {"row_err"}
    assert all(row["here_over_there"] == pytest.approx(1, abs=1e-3) for row in found)
    assert tiers(mine) == [] and set(measured["accuracy"]) <= set(read_rows(mine)["accuracy"])
    runs = [dict(zip(COLUMNS["run"], row, strict=True)) for row in read_rows(mine)["run"]]
    assert {run["suite"] for run in runs} == {"shapes", "verify"}, "what was measured is kept"


def test_a_smaller_error_than_here_is_a_lie(
    measured: Rows, mine: Path, command: Callable[..., Ran]
) -> None:
    """All errors of the quantized kernel at two thirds of what they are."""
    place = COLUMNS["accuracy"].index
    lies = []
    for row in measured["accuracy"]:
        smaller = [*row]
        for column in ("row_err", "row_err_upper"):
            smaller[place(column)] = row[place(column)] / 1.5
        lies.append(tuple(smaller) if row[place("row_err")] > 0.02 else row)
    code, _, err = command({**measured, "timing": [], "accuracy": lies}, "--count", 20)
    assert code == 6 and "rejected: dispatch does not read it" in err
    assert "row_err is 0.0" in err and tiers(mine) == [Tier.REJECTED]


@pytest.mark.parametrize(
    ("factor", "tier", "words"),
    [
        (lambda name: 1.04, None, "verified"),
        (lambda name: 1.2, None, "verified"),  # a slower GPU, and every kernel in its place
        (lambda name: 1.5, Tier.REJECTED, "times here are 1.50 of those there"),
        (lambda name: 3.0 if "emulated" in name else 1.0, Tier.REJECTED, "out of place"),
    ],
)
def test_times_keep_their_place(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch,
    factor: Callable[[str], float], tier: Tier | None, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(verify, "run_tasks", as_measured_here(measured, factor))
    code, _, err = command({**measured, "accuracy": []})
    assert words in err and code == (6 if tier else 0)
    assert tiers(mine) == ([tier] if tier else [])


def test_a_busy_machine_judges_nothing(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = as_measured_here(measured, lambda _: 9.0, spread=1.4)
    monkeypatch.setattr(verify, "run_tasks", busy)
    code, _, err = command({**measured, "accuracy": []})
    assert code == 0 and "too busy" in err and tiers(mine) == [Tier.UNVERIFIED]


def test_times_of_another_gpu_wait(measured: Rows, mine: Path, command: Callable[..., Ran]) -> None:
    """Errors can be measured anywhere, times cannot."""
    h200 = identity.device_row(Device("nvidia", "NVIDIA H200", "sm_90", 132, 140))
    changes = {"device": h200["key"], "regime": "graph-cold", "latency_us_p20": 1e3,
               "latency_us_p50": 1e3, "latency_us_p80": 1e3}  # fmt: skip
    timing = []
    for values in measured["timing"]:
        row = dict(zip(COLUMNS["timing"], values, strict=True)) | changes
        timing.append((identity.row_key("timing", row), *list(row.values())[1:]))
    rows = {**measured, "timing": timing,
            "device": [tuple(h200[column] for column in COLUMNS["device"])]}  # fmt: skip
    code, _, err = command(rows, "--count", 4)
    assert code == 0 and "its errors hold, its times wait" in err
    assert "times can be measured here: another GPU" in err and tiers(mine) == [Tier.ERRORS]


def test_a_kernel_that_crashes_here_is_no_good(
    measured: Rows, mine: Path, command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(tasks: dict[int, Task], _done: Any, died: Any, **_: Any) -> bool:
        for number, task in list(tasks.items()):
            name = task.kernel if isinstance(task, AccuracyTask) else task.kernels[0]
            died(number, tasks.pop(number), Death(number, name, "crashed", "signal 11"))
        return True

    monkeypatch.setattr(verify, "run_tasks", crash)
    code, _, err = command({**measured, "timing": []}, "--count", 2)
    assert code == 6 and "crashed: signal 11" in err and tiers(mine) == [Tier.REJECTED]


def test_nothing_to_verify(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--db", mine) == 0
    assert "no import waits" in capsys.readouterr().err
    assert run("verify", "--db", "postgresql://nowhere/x") == 1
