"""Differences: faster, slower, less accurate or missing cells, beyond noise only."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lokakern.bench.cli.main import app
from lokakern.bench.compare.diff import VERDICTS, Side, counts_of, differences, shared_by
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS
from lokakern.registry.storage.reader import Rows
from lokakern.registry.storage.writer import write_file
from lokakern.selection.ties import within_noise
from lokakern.types import Device
from tests.support.run_files import (
    ACCURATE,
    DEVICE,
    ENVIRONMENT,
    ERRORS,
    KERNEL,
    OK,
    PROBLEM,
    X1,
)

H100 = Device("nvidia", "NVIDIA H100", "sm_90", 132, 80)
NOW = 1_700_000_000_000
DAY = 24 * 3600 * 1000


def rows(*facts: dict[str, Any], first_run: int = 0) -> Rows:
    """A database of times (`us`) and errors (`err`), with defaults for other columns.

    Each is of a run of its own. Those of another ``first_run`` are other measurements.
    """
    from dataclasses import asdict, replace

    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in TABLES}

    def keep(name: str, row: dict[str, Any]) -> str:
        found[name][row["key"]] = row
        return str(row["key"])

    for number, fact in enumerate(facts, first_run):
        run = {"key": f"{number:032x}", "started_utc_ms": NOW, "suite": "s", "command": "c",
               "harness_digest": "h", "grade": fact.get("grade", "full")}  # fmt: skip
        kernel = replace(KERNEL, name=fact.get("kernel", "k"), digest=fact.get("digest", "d" * 64))
        device = fact.get("device", DEVICE)
        row: dict[str, Any] = {
            "run": keep("run", run),
            "kernel": keep("kernel", row_keys.row_of(kernel)),
            "problem": keep("problem", row_keys.row_of(replace(PROBLEM, m=fact.get("m", 1)))),
            "distribution": keep("distribution", row_keys.row_of(X1)),
            "environment": keep("environment", row_keys.row_of(ENVIRONMENT)),
        }
        status = fact.get("status", "ok")
        common = {"status": status, "reason": "" if status == "ok" else "x",
                  "measured_utc_ms": fact.get("at", NOW)}  # fmt: skip
        if "err" in fact:
            errors = asdict(replace(ERRORS, row_err=fact["err"], row_err_upper=fact["err"]))
            row |= asdict(ACCURATE) | errors | common
            row |= {"architecture": device.architecture, "seed": fact.get("seed", 0)}
            keep("accuracy", {"key": row_keys.row_key("accuracy", row), **row})
            continue
        us, spread = fact.get("us", 10.0), fact.get("spread", 0.0)
        row |= asdict(OK) | common | {"regime": "graph-cold"}
        row |= {"device": keep("device", row_keys.row_of(device)), "latency_us_p50": us,
                "latency_us_p20": us - spread, "latency_us_p80": us + spread}  # fmt: skip
        keep("timing", {"key": row_keys.row_key("timing", row), **row})
    return {
        name: sorted(tuple(row[c] for c in COLUMNS[name]) for row in table.values())
        for name, table in found.items()
    }


def verdicts(a: Rows, b: Rows, **sides: Any) -> list[str]:
    return [found.verdict for found in differences(Side(a), Side(b), **sides)]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ({"us": 10.0}, {"us": 9.0}, "faster"),
        ({"us": 10.0}, {"us": 11.0}, "slower"),
        ({"us": 10.0}, {"us": 10.25}, "same"),  # within the floor of 3 %
        ({"us": 10.0}, {"us": 10.4}, "slower"),
        ({"us": 10.0, "spread": 5.0}, {"us": 10.4, "spread": 5.0}, "same"),  # within their spread
        ({"us": 10.0, "spread": 9.0}, {"us": 10.6, "spread": 9.0}, "slower"),  # beyond 5 % always
        ({"us": 10.0}, {"status": "crashed"}, "fails"),
        ({"us": 10.0}, {"status": "wrong"}, "less accurate"),
        ({"status": "timeout"}, {"us": 10.0}, "works"),
        ({"status": "timeout"}, {"status": "timeout"}, "same"),
        ({"err": 0.04}, {"err": 0.05}, "less accurate"),
        ({"err": 0.04}, {"err": 0.0403}, "same"),
        ({"err": 0.05}, {"err": 0.04}, "more accurate"),
        ({"err": 0.0}, {"err": 0.0}, "same"),
        ({"err": 0.0}, {"err": 1e-9}, "less accurate"),
    ],
    ids=str,
)
def test_verdict_of_a_cell(before: dict[str, Any], after: dict[str, Any], verdict: str) -> None:
    assert verdicts(rows(before), rows(after)) == [verdict]


def test_infinite_errors_are_valid_json(diff: Callable[..., Ran]) -> None:
    code, out, _ = diff(rows({"err": 0.04}), rows({"err": math.inf}, first_run=1), "--json")
    (row,) = json.loads(out, parse_constant=pytest.fail)["cells"]
    assert code == 6 and (row["verdict"], row["b_over_a"], row["b"]) == (
        "less accurate",
        None,
        "infinite",
    )


def test_noise_is_the_same_as_for_dispatch() -> None:
    for us in (9.4, 9.55, 9.69, 9.71, 10.29, 10.31, 10.45, 10.6):
        a, b = rows({"us": 10.0, "spread": 1.0}), rows({"us": us, "spread": 1.0})
        margin = differences(Side(a), Side(b))[0].a
        assert margin is not None
        tied = within_noise(10.0, margin.margin, us, margin.margin)
        assert (verdicts(a, b) == ["same"]) == tied


def test_newest_source_and_best_grade_count() -> None:
    """Times are medians over runs; errors are maxima."""
    a = rows({"us": 10.0})
    old = {"us": 20.0, "digest": "e" * 64, "at": NOW - 1}
    quick = {"us": 30.0, "grade": "quick"}
    others = [{"us": us} for us in (9.9, 10.0, 40.0)]
    found = differences(Side(a), Side(rows(*others, old, quick)))
    assert [d.verdict for d in found] == ["same"]
    assert found[0].b is not None and found[0].b.value == 10.0
    assert verdicts(a, rows({**old, "at": NOW + 1}, *others)) == ["slower"]
    assert verdicts(rows({"err": 0.04}), rows({"err": 0.01}, {"err": 0.05})) == ["less accurate"]


def test_errors_are_compared_at_the_seeds_that_both_have() -> None:
    """Those of other seeds differ although nothing changed."""
    at = [{"err": err, "seed": seed} for seed, err in enumerate((0.04, 0.05, 0.06))]
    (found,) = differences(Side(rows(at[0], at[2])), Side(rows(at[0], at[1])))
    assert (found.verdict, found.effect) == ("same", 1.0)
    (found,) = differences(Side(rows(at[2])), Side(rows(at[0], at[1])))
    assert (found.verdict, found.effect) == ("other seeds", None)
    assert found.a is not None and found.b is not None
    assert (found.a.value, found.b.value) == (0.06, 0.05)
    worse = {"err": 0.07, "seed": 2}
    (found,) = differences(Side(rows(*at)), Side(rows(at[0], worse)))
    assert found.verdict == "less accurate" and found.effect == pytest.approx(0.07 / 0.06)


def test_cells_without_a_common_seed_are_counted_apart(diff: Callable[..., Ran]) -> None:
    a, b = rows({"err": 0.04}), rows({"err": 0.08, "seed": 1})
    code, out, err = diff(a, b, "--json")
    (row,) = json.loads(out)["cells"]
    assert code == 0 and err.endswith("\n1 cell of row_err: 1 other seeds\n")
    assert (row["a_seeds"], row["b_seeds"], row["b_over_a"]) == ("0", "1", None)


def test_rows_that_one_side_lacks_change_no_cell(diff: Callable[..., Ran]) -> None:
    """A merged file has the rows of its parts; the medians of these are of different rows."""
    times = [{"us": us} for us in (10.0, 20.0, 30.0)]
    errors = [{"err": err} for err in (0.01, 0.02, 0.03)]
    whole = rows(*times, *errors)
    parts = [
        whole | {name: [whole[name][place] for place in places] for name in ("timing", "accuracy")}
        for places in ((0,), (0, 1), (1, 2))
    ]
    for part in parts:
        for a, b in ((part, whole), (whole, part)):
            found = differences(Side(a), Side(b))
            assert [(d.verdict, d.effect) for d in found] == [("same", 1.0)] * 2
    assert sorted(verdicts(parts[0], parts[2])) == ["less accurate", "slower"]
    code, _, err = diff(parts[0], parts[2])
    assert code == 6 and err.startswith(
        "A and B share 6 runs and 0 rows; only in A: 2 rows, only in B: 4\n"
        "cells compare these other rows, too, which vary without an edit: of the runs of both, "
        "each file has a part\n"
    )
    code, _, err = diff(parts[1], whole)
    assert code == 0 and err.startswith(
        "A and B share 6 runs and 4 rows, none of them different; only in A: 0 rows, only in B: 2\n"
    )


def test_rows_of_other_runs_are_told_apart_from_parts_of_the_same() -> None:
    a, b = rows({"us": 10.0}), rows({"us": 20.0}, first_run=1)
    words = "cells compare these other rows, too, which vary without an edit: of other runs"
    assert str(shared_by(a, b)).splitlines()[1] == words
    both = [
        {name: sorted({*one[name], *other[name]}) for name in a}
        for one, other in ((a, rows({"m": 2}, first_run=2)), (b, rows({"m": 3}, first_run=2)))
    ]
    assert str(shared_by(*both)).endswith(f"{words}, and of parts of the same ones")


@pytest.mark.parametrize(("us", "verdict"), [(20.0, "slower"), (8.0, "faster")])
def test_an_edited_copy_is_noticed(diff: Callable[..., Ran], us: float, verdict: str) -> None:
    code, _, err = diff(rows({"us": 10.0}), rows({"us": us}))
    assert code == 7 and "share 1 runs and 1 rows, 1 of them different;" in err
    assert "\na row never changes: one of the files was edited or damaged\n" in err
    assert f"1 {verdict}" in err
    code, _, err = diff(rows({"us": 10.0}), rows({"us": 10.0}))
    assert code == 0 and "edited" not in err


def test_rows_that_differ_are_named_where_no_cell_is(diff: Callable[..., Ran]) -> None:
    edited = {4: 0.0402, 5: 0.0401, 6: 0.0402, 7: 0.0401}
    a, b = (
        rows({"us": 10.0}, *({"m": m, "err": errors.get(m, 0.04)} for m in range(3, 8)))
        for errors in ({}, edited)
    )
    keys = {row[0] for row in a["accuracy"]} - {
        row[0] for row in set(a["accuracy"]) & set(b["accuracy"])
    }
    code, out, err = diff(a, b, "--json")
    assert code == 7 and "5 cells of row_err: 5 same" in err
    named = [line for line in err.splitlines() if line.startswith("  accuracy row ")]
    assert len(named) == 3 and "\n  and 1 more: --json has all\n" in err
    assert all("row_err 0.04 and 0.040" in line for line in named)
    assert len({key for key in keys if any(f" {key}: " in line for line in named)}) == 3
    found = json.loads(out)
    assert found["cells"] == [] and found["shared"] == {
        "runs": 6, "rows": 6, "different": 4, "only_in_a": 0, "only_in_b": 0
    }  # fmt: skip
    assert {row["key"] for row in found["different"]} == keys
    for row in found["different"]:
        assert row["table"] == "accuracy"
        assert row["columns"].keys() == {"row_err", "row_err_upper"}
        assert row["columns"]["row_err"]["a"] == 0.04 < row["columns"]["row_err"]["b"]
    code, out, _ = diff(rows({"err": 0.04}), rows({"err": math.inf}), "--json")
    (row,) = json.loads(out, parse_constant=pytest.fail)["different"]
    assert code == 7 and row["columns"]["row_err"] == {"a": 0.04, "b": "infinite"}


def test_times_and_errors_have_tables_of_their_own(diff: Callable[..., Ran]) -> None:
    many = range(1, 61)
    a, b = (
        rows(
            *({"m": m, **fact} for m in many for fact in ({"us": us}, {"err": err})),
            first_run=round(100 * us),
        )
        for us, err in ((10.0, 0.01), (15.0, 0.04))
    )
    code, out, err = diff(a, b)
    assert code == 6 and out.count(" slower ") == out.count(" less accurate ") == 50
    assert err.count("and 10 more") == 2


def test_largest_effects_come_first_and_missing_cells_last() -> None:
    a = rows({"m": 1}, {"m": 2}, {"m": 3}, {"m": 4}, {"m": 6}, {"m": 8, "err": 0.1})
    b = rows({"m": 1, "us": 15.0}, {"m": 2, "us": 5.0}, {"m": 3}, {"m": 5},
             {"m": 6, "status": "error"}, {"m": 8, "err": 0.4})  # fmt: skip
    found = differences(Side(a), Side(b))
    assert [d.verdict for d in found] == ["fails", "less accurate", "faster", "slower", "only in A",
                                          "only in B", "same"]  # fmt: skip
    assert [d.effect for d in found] == [None, 4.0, 0.5, 1.5, None, None, 1.0]
    assert counts_of(found) == dict.fromkeys(VERDICTS, 1) | dict.fromkeys(
        ("more accurate", "works", "other seeds"), 0
    )
    back = differences(Side(b), Side(a))
    assert sorted(d.verdict for d in back) == ["faster", "more accurate", "only in A", "only in B",
                                               "same", "slower", "works"]  # fmt: skip


Ran = tuple[int, str, str]


@pytest.fixture
def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*words: str | Rows) -> Ran:
        arguments = []
        for number, word in enumerate(words):
            if not isinstance(word, str):
                path = tmp_path / f"{number}.sqlite"
                path.unlink(missing_ok=True)
                write_file(path, word)
                word = str(path)
            arguments.append(word)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(["diff", *arguments], prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    return run


def test_two_files(diff: Callable[..., Ran]) -> None:
    a, b = rows({"m": 1}, {"m": 2}), rows({"m": 1, "us": 15.0}, {"m": 2}, first_run=2)
    code, out, err = diff(a, b, "--json")
    found = json.loads(out)
    assert found["shared"] == {
        "runs": 0, "rows": 0, "different": 0, "only_in_a": 2, "only_in_b": 2
    } and found["different"] == []  # fmt: skip
    (row,) = found["cells"]
    assert code == 6 and "\n2 cells of time_us: 1 slower, 1 same\n" in err
    assert (row["verdict"], row["b_over_a"], row["a"], row["b"]) == ("slower", 1.5, 10.0, 15.0)
    assert row["where"] == "NVIDIA H200" and row["a_p20"] == row["a_p80"] == 10.0
    code, out, _ = diff(b, a, "--format", "csv", "--all")
    assert code == 0, "nothing is worse"
    assert [r["verdict"] for r in csv.DictReader(io.StringIO(out))] == ["faster", "same"]
    code, out, _ = diff(a, b)
    assert code == 6 and "slower" in out and "1.500" in out and "m=1 n=512" in out


def test_a_table_shows_the_largest_effects(diff: Callable[..., Ran]) -> None:
    a, b = (
        rows(*({"m": m, "us": us} for m in range(1, 61)), first_run=round(100 * us))
        for us in (10.0, 5.0)
    )
    code, out, err = diff(a, b)
    assert code == 0 and out.count("faster") == 50 and "and 10 more: --format csv" in err
    assert len(json.loads(diff(a, b, "--json")[1])["cells"]) == 60
    code, out, err = diff(a, a)
    assert (code, out) == (0, "") and err.endswith("\n60 cells of time_us: 60 same\n")


def test_two_gpus(diff: Callable[..., Ran]) -> None:
    both = rows({"us": 10.0}, {"us": 12.0, "device": H100}, {"err": 0.04})
    code, out, err = diff(both, "--from-device", "NVIDIA H200", "--to-device", "nvidia-h100",
                          "--json", "--all")  # fmt: skip
    assert code == 6 and "1 slower" in err and "1 same" in err
    found = json.loads(out)
    assert found["shared"] is None and {row["where"] for row in found["cells"]} == {"-"}
    code, _, err = diff(both, rows({"us": 13.0, "device": H100}), "--device", "NVIDIA H100")
    assert code == 6 and "1 slower" in err and "1 only in A" in err  # errors have no device
    code, _, err = diff(both, "--from-device", "NVIDIA H200", "--to-device", "no such")
    assert code == 2 and "device 'no such' is in no database" in err


def test_two_spans_of_time(diff: Callable[..., Ran]) -> None:
    both = rows({"us": 10.0, "at": NOW - DAY}, {"us": 12.0, "at": NOW + DAY})
    code, _, err = diff(both, "--before", "2023-11-15")
    assert code == 6 and "1 slower" in err
    code, _, err = diff(both, "--after", "2023-11-14T00:00", "--before", "2023-11-14T00:00+00:00")
    assert code == 6 and "1 slower" in err
    code, _, err = diff(both, "--before", "2030-01-01")
    assert code == 0 and "1 only in A" in err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "expected a second database"),
        (("--from-device", "NVIDIA H200"), "go together"),
        (("--before", "yesterday"), "'yesterday' is not a date"),
        (("--after", "tomorrow"), "for --after: 'tomorrow' is not a date"),
        (("--before", "2023-01-01", "--limit", "sqnr"), "'sqnr' is not one of"),
    ],
)
def test_usage(diff: Callable[..., Ran], words: tuple[str, ...], error: str) -> None:
    code, _, err = diff(rows({}), *words)
    assert code == 2 and error in " ".join(err.replace("│", " ").split())


def test_helper_rows_cover_every_table() -> None:
    assert {*rows({}, {"err": 0.1})} == {*DIMENSIONS, *FACTS}
