"""HTML pages of a report: complete, escaped, and from the command line."""

from __future__ import annotations

import copy
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.errors import UnsupportedError
from lokakern.measure import operands
from lokakern.probe import files
from lokakern.probe.report import ProbeReport, page_of
from lokakern.sweep import engine
from tests.support.html_page import HOSTILE, Page
from tests.support.inline_worker import run_tasks_here
from tests.support.probe_sites import drawn, site_of

H200 = "NVIDIA H200"


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 256)
        yield


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    x, _, w = drawn("X14", 64, 64)
    sites = {name: site_of(x, w, norm=norm) for name, norm in (("a.b", "layer"), (HOSTILE, ""))}
    return ProbeReport.of(sites, seeds=(0,), device=H200).content()


def test_pages_are_complete_and_self_contained(content: dict[str, Any]) -> None:
    text = page_of(content)
    page = Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == tags.count("style") == 1
    assert not {"link", "img", "iframe", "object", "embed"} & {*tags}
    assert not any({"src", "href"} & {*attributes} for _, attributes in page.tags)
    assert "http://" not in text and "https://" not in text
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    assert all(a.get("scope") in ("col", "row") for tag, a in page.tags if tag == "th")
    assert sum("data-safety" in a for _, a in page.tags) == len(content["verdicts"])
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_names_are_escaped_in_pages(content: dict[str, Any]) -> None:
    hostile = copy.deepcopy(content)
    for verdict in hostile["verdicts"]:
        verdict |= {"change": HOSTILE, "notes": [HOSTILE], "best": HOSTILE, "norm": HOSTILE,
                    "outside": HOSTILE}  # fmt: skip
        verdict["classes"][0] |= {"kernel": HOSTILE, "reason": HOSTILE, "scales": HOSTILE}
    hostile["device"] = hostile["summary"] = HOSTILE
    for found in (content, hostile):
        text = page_of(found)
        assert "<script>alert" not in text
        assert "onload='y'" not in text  # an attribute
        page = Page(text)
        assert HOSTILE in [piece.strip() for piece in page.text]
        assert not any("onload" in attributes for _, attributes in page.tags)
        assert [tag for tag, _ in page.tags].count("script") == 1


def test_unknown_values_are_dashes_and_empty_reports_have_empty_tables(
    content: dict[str, Any],
) -> None:
    bare = copy.deepcopy(content)
    for verdict in bare["verdicts"]:
        verdict |= {"bf16_us": None, "bf16_err": None, "classes": [], "best": "", "speed": "",
                    "saved_us": 0.0}  # fmt: skip
    assert "not timed" in page_of(bare)
    assert Page(page_of(bare | {"verdicts": [], "device": None, "summary": ""})).open == []


def test_pages_can_be_made_from_json(content: dict[str, Any]) -> None:
    assert page_of(json.loads(json.dumps(content, allow_nan=False))) == page_of(content)


def test_saved_statistics_are_reported_by_the_command_line(tmp_path: Path) -> None:
    x, _, w = drawn("X2", 32, 48)
    path, page = tmp_path / "probe.bin", tmp_path / "probe.html"
    files.save(path, {"layers.0": site_of(x, w)})
    run = CliRunner().invoke
    table = run(app, ["report", "--probe", str(path)])
    assert table.exit_code == 0 and "layers.0" in table.stdout and "safe" in table.stdout
    as_json = run(app, ["report", "--probe", str(path), "--json", "--device", H200])
    assert json.loads(as_json.stdout)["verdicts"][0]["site"] == "layers.0"
    done = run(app, ["report", "--probe", str(path), "--out", str(page)])
    assert done.exit_code == 0 and done.stdout == ""
    assert "layers.0" in page.read_text(encoding="utf-8")
    for arguments in (
        ["--probe", str(tmp_path / "no.bin")],
        ["--probe", str(path), "--device", "a toaster"],
        ["--probe", str(path), "--out", str(tmp_path / "no" / "page.html")],
    ):
        failed = run(app, ["report", *arguments])
        assert failed.exit_code == (2 if "--device" in arguments else 1)
        assert len(failed.stderr.strip().splitlines()) == 1


def test_times_are_measured_into_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "run_tasks", run_tasks_here)
    monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
    x, _, w = drawn("X2", 32, 40)
    sites = {"a": site_of(x, w)}
    path = tmp_path / "rows.sqlite"
    with pytest.raises(UnsupportedError, match="into database="):
        ProbeReport.of(sites, times=True)
    with pytest.raises(UnsupportedError, match="device is 'NVIDIA H200'"):
        ProbeReport.of(sites, times=True, database=path, device=H200)
    (found,) = ProbeReport.of(sites, seeds=(0,), times=True, database=path)
    assert found.bf16_us is not None and found.speed in ("fast", "tie", "slow")
    assert all(c.latency_us for c in found.classes if c.scales in ("row", "tensor"))
    with sqlite3.connect(path) as connection:
        ask = "SELECT count(*), count(DISTINCT problem) FROM timing"
        before = connection.execute(ask).fetchone()
        assert before[1] == 2  # as it is, and with K padded to 48
        ProbeReport.of(sites, seeds=(0,), times=True, database=path)
        assert connection.execute(ask).fetchone() == before
