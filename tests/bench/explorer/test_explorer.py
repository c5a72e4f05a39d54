"""Databases in Datasette, queried in this process without a port."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lokakern.bench.explorer import server
from lokakern.bench.explorer.queries import _UNALIGNED, QUESTIONS
from lokakern.device import current_device, current_environment
from lokakern.errors import DatabaseError, UnsupportedError
from lokakern.problems import PADDED, make_problem, padded_sizes
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import DistributionRow, TimingRecord
from lokakern.registry.schema.tables import TABLES, tables_of
from lokakern.registry.sqlite_file import check_header
from lokakern.types import Format, Layout, Operand
from tests.support.measurements import BF16, ROW, gemm, measured, time
from tests.support.rows_at_once import RowsAtOnce
from tests.support.shipped import H100_FILE, H200_FILE

pytest.importorskip("datasette")
NAME = H200_FILE.stem
Get = Callable[..., Any]


@pytest.fixture(scope="module")
def found() -> Any:
    return server.explorer_of([H200_FILE])


@pytest.fixture(scope="module")
def get(found: Any) -> Iterator[Get]:
    with asyncio.Runner() as runner:

        def ask(path: str, **parameters: str) -> Any:
            return runner.run(found.client.get(f"/{NAME}{path}", params=parameters))

        yield ask


def rows_of(get: Get, name: str, **parameters: str) -> list[dict[str, Any]]:
    answer = get(f"/{name}.json", _shape="array", **parameters)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()
    return rows


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_query_has_an_answer_in_the_shipped_file(get: Get, name: str) -> None:
    # On the newest day no problem was timed again, so that nothing regressed there.
    given = {"since": "2026-11-23"} if name == "regressed" else {}
    answer = get(f"/{name}.json", _shape="objects", **given).json()
    assert answer["ok"], answer
    assert answer["rows"]
    columns = set(answer["rows"][0])
    if name != "runs":
        assert "kernel" in columns or "fastest_fp8" in columns
    assert QUESTIONS[name].title in get(f"/{name}", **{"m": "1"}).text


def test_the_fastest_kernel_equals_the_choice_of_dispatch(get: Get) -> None:
    """The README's shape: among kernels that are there, one that is 1.4 times as fast as bf16."""
    rows = rows_of(get, "fastest", m="32768", n="2048", k="2048", device="NVIDIA H200")
    (row,) = [r for r in rows if r["prepared"] and "/row/" in r["b"] and r["epilogue"] == "none"]
    assert row["row_err"] <= 0.06
    assert row["x_bf16"] == pytest.approx(row["bf16_us"] / row["us"])
    assert row["x_bf16"] > 1.3
    strict = rows_of(get, "fastest", m="32768", n="2048", k="2048", budget="0.01")
    assert {r["kernel"] for r in strict} == {"torch.bf16"}
    assert not rows_of(get, "fastest", device="no such GPU")


@pytest.mark.parametrize(("name", "kernel"), [("fastest", "kernel"), ("fp8_loses", "fastest_fp8")])
def test_no_query_chooses_what_dispatch_refuses(name: str, kernel: str) -> None:
    """Both operands quantized at once, where the weight is prepared."""
    client = server.explorer_of([H100_FILE]).client
    parameters = {"_shape": "array", "_size": "max"}
    answer = asyncio.run(client.get(f"/{H100_FILE.stem}/{name}.json", params=parameters))
    prepared = [row for row in answer.json() if row["prepared"]]
    assert len(prepared) > 10
    assert not [row for row in prepared if "quantize_together" in row[kernel]]


def test_unaligned_rows_have_a_gain_only_against_padded_ones(tmp_path: Path) -> None:
    """Half as fast as unaligned bf16, three times as fast, and 1.2 times as fast as padded bf16."""
    path = tmp_path / "unaligned.sqlite"
    sizes = {"k": (4096, 512, 479), "n": (4096, 477, 512), "m": (4095, 512, 512)}
    rows = [row for m, n, k in sizes.values() for row in measured(bf16=30.0, m=m, n=n, k=k)]
    rows += measured(bf16=30.0, row=60.0, m=64, n=24, k=479)
    rows += [time(PADDED, gemm(*sizes["n"]), 12.0)]
    with RowsAtOnce.create(path, suite="s", command="c", harness_digest="h") as run:
        for row in rows:
            row(run)
    answers = {(row["m"], row["n"], row["k"]): row for row in answers_of(path, "fastest")}
    found = {name: answers[size] for name, size in sizes.items()}
    told = {name: (row["kernel"], row["x_bf16"], row["baseline"]) for name, row in found.items()}
    assert told == {"k": (ROW, None, BF16), "n": (ROW, 1.2, PADDED), "m": (ROW, 3.0, BF16)}
    assert "torch.bf16_padded was not timed" in found["k"]["note"]
    assert (found["n"]["note"], found["m"]["note"]) == ("", "")
    (lost,) = answers_of(path, "fp8_loses")
    assert (lost["times_as_long"], lost["baseline"], lost["note"]) == (
        2.0,
        BF16,
        found["k"]["note"],
    )


def test_a_loss_of_an_emulation_alone_has_a_note(tmp_path: Path) -> None:
    path = tmp_path / "emulated.sqlite"
    emulated = "torch.quantize_row+torch.emulated_row"
    sizes = [(64, 512, 512), (64, 512, 479), (128, 512, 512)]
    rows = [time(name, gemm(*size), us) for size in sizes
            for name, us in ((BF16, 10.0), (emulated, 40.0))]  # fmt: skip
    with RowsAtOnce.create(path, suite="s", command="c", harness_digest="h") as run:
        for row in [*rows, time(ROW, gemm(*sizes[2]), 50.0)]:
            row(run)
    lost = {(row["m"], row["n"], row["k"]): row for row in answers_of(path, "fp8_loses")}
    assert [lost[size]["fastest_fp8"] for size in sizes] == [emulated] * 3
    assert [lost[size]["note"] for size in sizes] == [
        "only emulated FP8 was timed",
        "unaligned rows, and torch.bf16_padded was not timed; only emulated FP8 was timed",
        "",
    ], "the third has a time of FP8 hardware"


@pytest.mark.parametrize("a", [Layout.ROW, Layout.COLUMN])
@pytest.mark.parametrize("b", [Layout.ROW, Layout.COLUMN])
def test_rows_are_unaligned_where_a_kernel_pads(a: Layout, b: Layout) -> None:
    left, right = Operand(Format.BFLOAT16, layout=a), Operand(Format.BFLOAT16, layout=b)
    columns = ("m", "n", "k", "a", "b", "prepared")
    query = f"WITH problem({', '.join(columns)}) AS (VALUES (?, ?, ?, ?, ?, ?)) SELECT {_UNALIGNED}"
    with sqlite3.connect(":memory:") as memory:
        for m, n, k, prepared in itertools.product((1, 8, 9), (1, 8, 9), (1, 8, 9), (0, 1)):
            problem = replace(gemm(m, n, k), a=left, b=right, prepared=bool(prepared))
            row = row_keys.row_of(problem)
            (found,) = memory.execute(
                f"{query} FROM problem", [row[name] for name in columns]
            ).fetchone()
            assert bool(found) == (padded_sizes(problem) != (m, n, k)), problem


def test_fp8_loses_only_where_it_is_slower(get: Get) -> None:
    rows = rows_of(get, "fp8_loses")
    assert rows and all(row["fp8_us"] > row["bf16_us"] for row in rows)
    ratios = [row["times_as_long"] for row in rows]
    assert ratios == sorted(ratios, reverse=True)


def test_a_slower_kernel_is_a_regression(tmp_path: Path) -> None:
    """Twice as slow, 4 % slower and faster since a day; what was measured once has no before."""
    path = tmp_path / "twice.sqlite"
    noon = int(datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp() * 1000)
    day = 24 * 3600 * 1000
    load_kernels()
    before = {16: 10.0, 32: 10.0, 48: 10.0}
    for when, times in ((noon, before), (noon + day, {16: 20.0, 32: 10.4, 48: 5.0, 64: 10.0})):
        with RowsAtOnce.create(path, suite="s", command="c", harness_digest="h") as run:
            for m, us in times.items():
                timed(run, m, us, when)
    (regressed,) = slower_since(path, "2026-11-22")
    assert (regressed["kernel"], regressed["m"]) == ("torch.bf16", 16)
    assert (regressed["before_us"], regressed["after_us"]) == (10.0, 20.0)
    assert regressed["times_as_long"] == 2.0
    assert regressed["measured_before"] == "2026-11-21 12:00:00"
    assert regressed["measured_after"] == "2026-11-22 12:00:00"
    assert [row["m"] for row in slower_since(path, "")] == [16]  # the newest day of all
    assert not slower_since(path, "2026-11-21") and not slower_since(path, "2026-11-23")
    assert not slower_since(path, "no day")


def timed(run: RowsAtOnce, m: int, us: float, when_ms: int) -> None:
    record = TimingRecord(
        status="ok", latency_us_p20=us, latency_us_p50=us, latency_us_p80=us, replay_count=9,
        void_count=0, calls_per_replay=1, kernel_err=0.5, kernel_err_row_p99=0.5,
        measured_utc_ms=when_ms,
    )  # fmt: skip
    run.add_timing(
        KERNELS["torch.bf16"], make_problem("gemm", (m, 64, 64)), DistributionRow.of("X1"),
        current_device("cpu"), current_environment("cpu"), "eager", record,
    )  # fmt: skip


def slower_since(path: Path, day: str) -> list[dict[str, Any]]:
    return answers_of(path, "regressed", since=day)


def answers_of(path: Path, name: str, **parameters: str) -> list[dict[str, Any]]:
    client = server.explorer_of([path]).client
    parameters = {"_shape": "array", **parameters}
    answer = asyncio.run(client.get(f"/{path.stem}/{name}.json", params=parameters))
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()
    return rows


@pytest.mark.parametrize("table", tables_of(check_header(H200_FILE, "shipped")))
def test_every_table_has_facets_and_column_descriptions(get: Get, table: str) -> None:
    answer = get(f"/{table}.json", _facet_size="3").json()
    facets = answer["facet_results"]
    assert "facets_timed_out" not in answer or not answer["facets_timed_out"]
    assert set(facets) == set(server._FACETS.get(table, ()))
    has_rows = bool(answer["rows"])
    assert all(bool(facet["results"]) is has_rows for facet in facets.values())
    page = get(f"/{table}").text
    shown = re.findall(r"<dt>(\w+)</dt>", page)
    assert shown == [column.name for column in TABLES[table].columns]


def test_facets_show_names_of_references(get: Get) -> None:
    facets = get("/timing.json").json()["facet_results"]
    assert facets["device"]["results"][0]["label"] == "NVIDIA H200"
    assert "torch.bf16" in {result["label"] for result in facets["kernel"]["results"]}


def test_databases_are_read_only(found: Any, get: Get) -> None:
    before = hashlib.sha256(H200_FILE.read_bytes()).hexdigest()
    refused = get(".json", sql="DELETE FROM timing")
    assert refused.status_code == 400
    assert "SELECT" in refused.json()["error"]
    database = found.get_database(NAME)
    assert not database.is_mutable
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        asyncio.run(database.execute_fn(lambda c: c.execute("DELETE FROM timing")))
    assert hashlib.sha256(H200_FILE.read_bytes()).hexdigest() == before


def test_files_with_equal_names_are_numbered(tmp_path: Path) -> None:
    files = [tmp_path / folder / "a.sqlite" for folder in ("x", "y")]
    assert list(server._names_of([*files, tmp_path / "b.sqlite"])) == ["a", "a-2", "b"]


def test_foreign_databases_are_rejected(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE timing (a)")
    with pytest.raises(DatabaseError, match="application id"):
        server.explorer_of([other])
    with pytest.raises(DatabaseError, match="is not there"):
        server.explorer_of([tmp_path / "none.sqlite"])


@pytest.mark.parametrize("name", ["a#1", "a?mode=rw&x=", "a%41"])
def test_paths_with_uri_characters_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatabaseError, match="cannot open paths"):  # before it is looked for
        server.explorer_of([tmp_path / f"{name}.sqlite"])


def test_missing_datasette_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasette.app", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[explore\]'"):
        server.explorer_of([H200_FILE])


def test_the_server_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[str, int]] = []

    def taken(self: socket.socket, place: tuple[str, int]) -> None:
        bound.append(place)
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", taken)
    with pytest.raises(UnsupportedError, match=r"port 8001 of 127.0.0.1 .*in use; --port 0"):
        server.listen(8001)
    assert bound == [("127.0.0.1", 8001)]
