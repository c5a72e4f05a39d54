"""Export: the file that ships keeps every answer and nothing that no choice rests on."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.bench.exchange.export import current_rows, export
from lokakern.errors import DatabaseError
from lokakern.progress import Progress
from lokakern.registry.register import kernels_for
from lokakern.registry.schema.records import KernelRow, TestResultRecord, TimingRecord
from lokakern.registry.schema.row_keys import from_row
from lokakern.registry.schema.tables import COLUMNS, REFERENCES
from lokakern.registry.sharing.import_file import union_of
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import merge
from lokakern.registry.storage.reader import Rows, read_rows
from lokakern.registry.storage.run_files import RunFile
from lokakern.selection import dispatcher
from lokakern.types import Device, Environment, ErrorBudget
from lokakern.workloads.suites import SUITES
from tests.support.run_files import HOST_COST
from tests.support.shipped import H200_FILE

H200 = "NVIDIA H200"
OK = TimingRecord(
    status="ok", latency_us_p20=10.0, latency_us_p50=20.0, latency_us_p80=30.0, replay_count=5,
    void_count=0, calls_per_replay=1, kernel_err=0.5, kernel_err_row_p99=0.4, timer="t",
    operand_digest="0" * 16,
)  # fmt: skip


class Shares(Progress):
    """Keeps what is told; an export of the shipped rows takes seconds."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def share(self, what: str, share: float) -> None:
        self.told.append((what, share))


@pytest.fixture(scope="module")
def shipped() -> Path:
    return H200_FILE


@pytest.fixture(scope="module")
def device(shipped: Path) -> Device:
    return load_snapshot([shipped]).find_device(H200)


def with_more(path: Path, device: Device) -> Path:
    """A database with rows of a kernel that changed since, and of another device."""
    from lokakern.sweep.resume import distribution_row

    kernel = kernels_for("gemm")[0]
    stale = replace(KernelRow.of(kernel), digest="0" * 64)
    problem = SUITES["smoke"].cases(device)[0].problem
    other = Device("nvidia", "another GPU", "sm_100", 1, 1)
    with RunFile.create(path, suite="s", command="c", harness_digest="h") as run:
        for row, where in ((stale, device), (KernelRow.of(kernel), other)):
            run.add_timing(row, problem, distribution_row("X1"), where, Environment(),
                           "graph-cold", OK)  # fmt: skip
        result = TestResultRecord(seeds="0", passed_count=1, failed_count=0, skipped_count=0)
        run.add_test_result(KernelRow.of(kernel), other.architecture, "t", Environment(), result)
        run.add_host_cost(device, Environment(), HOST_COST)
    return path


def as_they_are_now(rows: Rows) -> dict[str, int]:
    """Count the facts of kernels whose source did not change."""
    fresh = {
        row[0] for row in rows["kernel"]
        if is_current(from_row(KernelRow, dict(zip(COLUMNS["kernel"], row, strict=True))))
    }  # fmt: skip
    place = {name: COLUMNS[name].index("kernel") for name in FACTS if name != "host_cost"}
    found = {name: sum(row[place[name]] in fresh for row in rows[name]) for name in place}
    return found | {"host_cost": len(rows["host_cost"])}


@pytest.fixture(scope="module")
def exported(
    shipped: Path, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """Export the shipped file and one with more rows; also return the counts left out."""
    folder = tmp_path_factory.mktemp("exported")
    more = with_more(folder / "more.sqlite", device)
    target = folder / "out" / "h200.sqlite"
    with Shares() as shares:
        left_out = export(union_of([shipped], [more]), target, device)
    assert [share for what, share in shares.told if what == "exporting"] == [0, 0.2, 0.6, 0.8, 1]
    return target, left_out


@pytest.mark.rest
def test_the_example_in_the_docs_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/share.md, but for sizes and counts, which versions of SQLite and libraries change."""
    page = Path(__file__).parents[3] / "docs" / "share.md"
    mark = r"<!-- run by tests/bench/exchange/test_export.py -->\n```\n(.*?)```"
    (block,) = re.findall(mark, page.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "lokakern.sqlite"))
    dispatcher.use_snapshot(None)
    for part in block.split("$ python -m lokakern.bench ")[1:]:
        line, expected = part.split("\n", 1)
        words = [str(p) for w in shlex.split(line) for p in (sorted(Path().glob(w)) or [w])]
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.output
        said = ended.output.replace(f"{tmp_path}/", "")
        counts = re.compile(r"[\d.]+")
        assert counts.sub("N", said) == counts.sub("N", expected), line


@pytest.mark.rest
def test_an_export_keeps_current_rows_unchanged(
    shipped: Path, device: Device, exported: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    target, left_out = exported
    assert not target.with_name(f"{target.name}.lock").exists()
    before, after = read_rows(shipped), read_rows(target)
    more = {"host_cost": len(before["host_cost"]) + 1}  # one of the other file
    assert {name: len(after[name]) for name in FACTS} == as_they_are_now(before) | more
    for name in before.keys() - {"host_cost", "run", "environment"}:
        assert set(after[name]) <= set(before[name])
    stale = {name: len(before[name]) - len(after[name]) for name in FACTS}
    assert left_out == {"timing": stale["timing"] + 2, "accuracy": stale["accuracy"],
                        "test_result": stale["test_result"] + 1, "host_cost": 0}  # fmt: skip
    for name in FACTS:
        for place, table in REFERENCES[name].items():
            assert {row[place] for row in after[name]} <= {row[0] for row in after[table]}
    again = tmp_path / "again.sqlite"
    assert set(export(union_of([], [target]), again, device).values()) == {0}
    assert again.read_bytes() == target.read_bytes()


@pytest.mark.rest
def test_dispatch_answers_the_same(
    shipped: Path, device: Device, exported: tuple[Path, dict[str, int]]
) -> None:
    target, _ = exported
    problems = [c.problem for c in SUITES["anchors"].cases(device) if c.problem.op == "gemm"]

    def answers(path: Path) -> list[tuple[str, dict[str, float]]]:
        dispatcher.use_snapshot(load_snapshot([path]))
        try:
            tables = [
                (dispatcher.table_for(p, ErrorBudget.of(0.06), None, device), p.m) for p in problems
            ]
            choices = [dispatcher.Choice(table, m) for table, m in tables]
            return [(c.kernel, c.errors) for c in choices]
        finally:
            dispatcher.use_snapshot(None)

    assert answers(target) == answers(shipped)


def test_a_file_of_20000_times_and_errors_may_be_shipped(shipped: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.sqlite"
    merge([shipped], packed)
    rows = read_rows(packed)
    facts = len(rows["timing"]) + len(rows["accuracy"])
    assert packed.stat().st_size / facts * 40_000 <= 10 * 2**20


def test_of_repeated_errors_the_newest_is_kept(shipped: Path, device: Device) -> None:
    rows = read_rows(shipped)
    columns = COLUMNS["accuracy"]
    key, time, value = map(columns.index, ("key", "measured_utc_ms", "row_err"))
    first, second = rows["accuracy"][:2]

    def again(row: tuple[Any, ...], number: int, **changed: Any) -> tuple[Any, ...]:
        made = list(row)
        made[key], made[time] = bytes([number]) * 32, row[time] + number
        for name, its in changed.items():
            made[columns.index(name)] = its
        return tuple(made)

    newer, other = again(first, 1), again(second, 2, row_err=second[value] / 2)
    rows["accuracy"] = [newer, first, second, other]
    assert current_rows(rows, device)["accuracy"] == [newer, second, other]
    rows["accuracy"] = [first, newer]
    assert current_rows(rows, device)["accuracy"] == [newer]


def test_nothing_to_ship_is_an_error(device: Device, tmp_path: Path) -> None:
    more = with_more(tmp_path / "more.sqlite", replace(device, product="NVIDIA H100"))
    with pytest.raises(DatabaseError, match="export: no measurement on NVIDIA H200 is of current"):
        export(
            union_of([more], []), tmp_path / "out.sqlite", replace(device, architecture="sm_90a")
        )
    assert not (tmp_path / "out.sqlite").exists()


def test_an_export_has_no_rows_of_other_devices(device: Device, tmp_path: Path) -> None:
    rows = read_rows(with_more(tmp_path / "more.sqlite", device))
    assert [len(current_rows(rows, device)[name]) for name in FACTS] == [0, 0, 0, 1]
    other = Device("nvidia", "another GPU", "sm_100", 1, 1)
    assert [len(current_rows(rows, other)[name]) for name in FACTS] == [1, 0, 1, 0]
