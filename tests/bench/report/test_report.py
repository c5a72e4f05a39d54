"""The report of a device: its choices are those of dispatch, and its page works in a browser."""

from __future__ import annotations

import builtins
import itertools
import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lokakern import dispatch
from lokakern.bench.cli.main import app
from lokakern.bench.report import charts, survey, survey_page
from lokakern.bench.report.survey import Survey, survey_of
from lokakern.bench.report.survey_page import _tables, page_of
from lokakern.problems import make_problem
from lokakern.progress import Progress
from lokakern.registry.sharing.plausibility import least_us
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.render.html import hash_of
from lokakern.selection import dispatcher
from lokakern.types import ErrorBudget, Format, Granularity, Operand, Problem
from tests.support import box_font, browser, screenshots
from tests.support.html_page import HOSTILE
from tests.support.html_page import Page as Closed
from tests.support.measurements import BF16, H200, ROW, TENSOR, Book, accuracy, gemm, time
from tests.support.sharing import made_once, shared_folder
from tests.support.shipped import H200_FILE

needs_chromium = pytest.mark.skipif(browser.chromium() is None, reason="needs Chromium")
LOOKS = Path(__file__).parents[2] / "fixtures" / "report_page"
KEEP = "if the page looks right, run this test with --keep-screenshots, and commit the pictures"
SHIPPED_OPS = 8  # of the file of an H200; more when it has more
DRAWN = ("pictures", "held-pictures")
# All pictures that are drawn when a page is opened.
READY = " && ".join(f"document.querySelector('#{name} svg')" for name in DRAWN)


FACTS: Snapshot | None = None  # of `small`


@pytest.fixture(scope="module", autouse=True)
def one_bundle() -> Iterator[None]:
    """Build the bundle, which takes seconds, in one process only."""
    make = charts.bundle
    path = shared_folder("report") / "bundle.js"
    made_once(path, lambda to: to.write_text(make(), encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "bundle", lambda: path.read_text(encoding="utf-8"))
        yield


def quantizing(m: int, k: int) -> Problem:
    return make_problem(
        "quantize", (m, k), out_format=Format.E4M3FN, out_granularity=Granularity.ROW
    )


def scaled(m: int, n: int, k: int) -> Problem:
    row = Operand(Format.E4M3FN, Granularity.ROW)
    return make_problem("scaled_gemm", (m, n, k), a=row, b=replace(row, layout="column-major"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survey]:
    """Three ops: gemm at four shapes; FP8 loses at one, and tensorwise errors are large."""
    book = Book(tmp_path_factory.mktemp("report") / "rows.sqlite")
    rows: list[Any] = []
    for n, k, us in ((512, 512, 10.0), (512, 2048, 30.0), (2048, 2048, 90.0), (64, 512, 5.0)):
        for m in (2048, 8192):
            problem = gemm(m, n, k)
            plain = us * m / 2048
            fast = plain * (1.5 if n == 64 else 0.6)
            rows += [time(BF16, problem, plain), time(ROW, problem, fast),
                     time(TENSOR, problem, fast * 0.9)]  # fmt: skip
        rows += [accuracy(BF16, problem, 0.003), accuracy(ROW, problem, 0.04),
                 accuracy(TENSOR, problem, 0.2, only=("X14",)),
                 accuracy(TENSOR, problem, 0.041, without=("X14",))]  # fmt: skip
    rows.append(time("torch.scaled_mm_row", scaled(2048, 2048, 2048), 40.0))
    rows += [time("cuda.quantize_row", quantizing(m, 512), m / 1e3) for m in (2048, 8192)]
    book.write(*rows)
    with pytest.MonkeyPatch.context() as patch:
        facts = dispatcher.snapshot()
        patch.setattr(f"{__name__}.FACTS", facts)
        yield survey_of(facts, H200)
    dispatcher.use_snapshot(None)


@pytest.fixture(autouse=True)
def answers_from_the_same(small: Survey) -> None:
    dispatcher.use_snapshot(FACTS)


def at(survey: Survey, **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in survey.choices if all(row[name] == wanted[name] for name in wanted)]
    return row


@pytest.mark.rest
def test_choices_equal_dispatch(small: Survey) -> None:
    assert small.budgets == ("none", "0.03", "0.045", "0.06", "0.08", "0.12")
    gemms = [row for row in small.choices if row["op"] == "gemm"]
    assert len(gemms) == 8 * len(small.budgets)
    for row in gemms:
        budget = None if row["budget"] == "none" else float(row["budget"])
        choice = dispatch("gemm", (row["m"], row["n"], row["k"]), budget, device=H200)
        assert (row["kernel"], row["us"]) == (choice.kernel, choice.latency_us)
        assert row["row_err"] == choice.errors["row_err"]
    assert {row["kernel"] for row in gemms} == {BF16, ROW}


def test_the_baseline_is_found_for_odd_rows() -> None:
    """Bfloat16 rows of 479 are aligned by 2 bytes, the FP8 of a prepared weight by 16."""
    weight = Operand(Format.E4M3FN, Granularity.ROW, "column-major")
    prepared = make_problem("gemm", (2048, 512, 479), prepared=True, b=weight)
    assert survey._plain_us(prepared, {prepared: 70.0}) == 70.0
    assert survey._plain_us(scaled(2048, 512, 479), {gemm(2048, 512, 479): 60.0}) == 60.0


def test_gains_are_over_the_unquantized_kernel(small: Survey) -> None:
    wide = {"op": "gemm", "m": 2048, "n": 2048, "k": 2048}
    row = at(small, budget="0.06", **wide)
    assert (row["kernel"], row["plain_us"], row["us"]) == (ROW, 90.0, 54.0)
    assert row["speedup"] == pytest.approx(90 / 54, rel=1e-3)
    least = least_us(gemm(2048, 2048, 2048), H200, "graph-cold")
    assert row["light"] == pytest.approx(least / 54, rel=1e-3)
    assert at(small, budget="0.03", **wide)["speedup"] == 1
    # Quantized operands are compared with the product of unquantized ones.
    assert at(small, budget="none", **wide | {"op": "scaled_gemm"})["speedup"] == 90 / 40
    quantizer = at(small, op="quantize", m=2048, budget="none")
    assert quantizer["plain_us"] is quantizer["speedup"] is None and quantizer["light"] > 0


def test_a_miss_has_a_reason(small: Survey) -> None:
    row = at(small, op="quantize", m=2048, budget="0.06")
    assert (row["kernel"], row["letter"], row["us"]) == ("no answer", "-", None)
    assert not row["answered"] and "no error is known" in row["note"]


def test_the_front_is_pareto_optimal(small: Survey) -> None:
    here = [row for row in small.times if (row["op"], row["m"]) == ("gemm", 2048)]
    narrow = {row["kernel"]: row["front"] for row in here if row["n"] == 64}
    wide = {row["kernel"]: row["front"] for row in here if row["n"] == 2048}
    assert narrow == {BF16: True, ROW: False, TENSOR: False}
    assert wide == {BF16: True, ROW: True, TENSOR: True}


def test_errors_and_holdings_are_counted(small: Survey) -> None:
    errors = {(row["arithmetic"], row["distribution"]): row for row in small.errors}
    assert errors["tensor x tensor, promoted", "X14"]["row_err"] == 0.2
    assert errors["tensor x tensor, promoted", "X1"]["typical_row_err"] == 0.041
    assert {row["op"] for row in small.errors} == {"gemm"}
    times = {row["part"]: row["rows"] for row in small.holdings if row["of"] == "times"}
    assert (times["gemm"], times["scaled_gemm"], times["quantize"]) == (24, 1, 2)
    for row in small.holdings:
        assert sum(row[word] for word in charts.COUNTED) == row["rows"]


class Parsed(Closed):
    """Elements of a page whose tables omit optional end tags."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag in ("td", "tr", "tbody"):
            self.open.pop()


def scripts_of(text: str) -> list[str]:
    return re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)


def test_a_page_runs_its_own_scripts_only(small: Survey) -> None:
    text = page_of(small)
    parsed = Parsed(text)
    assert parsed.open == []
    tags = [tag for tag, _ in parsed.tags]
    assert not {"link", "img", "iframe", "object", "embed"} & {*tags}
    data, *scripts = scripts_of(text)
    policy = next(a["content"] for _, a in parsed.tags if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    assert policy.endswith(f"script-src {' '.join(map(hash_of, scripts))}")
    assert len(scripts) == 2 and "unsafe-eval" not in policy
    specs = json.loads(data)["specs"]
    assert [*specs] == ["gemm", "quantize", "scaled_gemm", ""]
    assert not any("datasets" in spec for spec in specs.values())  # tables have the data


def test_the_tables_of_a_page_are_static(small: Survey) -> None:
    text = re.sub(r"<script.*?</script>", "", page_of(small), flags=re.DOTALL)
    rows = [re.findall(r"<td[^>]*>([^<\n]*)", row) for row in text.split("<tr>")]
    assert ["2048", "2048", "2048", "90", "90", "1", *rows_end(small, BF16)] in rows
    shown = {tuple(row[:3]) for row in rows if len(row) == 13}
    assert shown == {(str(r["m"]), str(r["n"] or "-"), str(r["k"])) for r in small.choices}
    assert sum(len(row) == 11 for row in rows) == len(small.times)
    assert sum(len(row) == 8 for row in rows) == len(small.errors)
    assert sum(len(row) == len(small.holdings[0]) for row in rows) == len(small.holdings)


def test_the_first_table_counts_fp8_and_its_gains_only(small: Survey) -> None:
    """The unquantized kernel, chosen at a fourth of the gemms, is no faster than itself."""
    (told,) = (each for each in _tables(small, at_op(small, "gemm"), 0)
               if each["name"] == "by_budget")  # fmt: skip
    by_budget = {row["budget"]: row for _, rows in told["groups"] for row in rows}
    usual, strict = by_budget["0.06"], by_budget["0.03"]
    assert (usual["problems"], usual["answered"], usual["quantized"]) == (8, 8, 6)
    assert usual["median_speedup"] == usual["largest_speedup"] == 1.667
    assert usual["largest_by"] == ROW and " n=64 " not in usual["largest_at"]
    assert usual["most_often"] == f"{ROW} (6)"
    assert (strict["quantized"], strict["median_speedup"], strict["largest_by"]) == (0, None, None)
    assert strict["most_often"] == f"{BF16} (8)"
    assert {*told["columns"]} == {*usual}


def at_op(survey: Survey, name: str) -> dict[str, Any]:
    return next(op for op in survey.ops if op["op"] == name)


def rows_end(survey: Survey, kernel: str) -> list[str]:
    """The last cells of the row of the widest gemm at a strict budget."""
    row = at(survey, op="gemm", m=2048, n=2048, k=2048, budget="0.03")
    light = f"{row['light']:.4g}"
    return [light, "0.003", "none 0.03", "measured", row["letter"], kernel, row["note"] or "-"]


def test_what_long_tables_leave_out_is_told(small: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "left out" not in page_of(small)
    monkeypatch.setattr(survey_page, "MOST_ROWS", 12)
    text = page_of(small)
    times = "12 of 24 times are left out of this page: the slowest kernels of problems with many; "
    choices = "2 of 14 choices are left out of this page: predicted ones, then those that gain "
    assert text.count(f"<p>{times}lokakern explore has all.</p>") == 1
    assert text.count(f'<p data-op="gemm">{choices}') == text.count(f"<p>{choices}") == 1
    assert "<p>27 of 39 errors are left out" in text
    assert "Times by kernel and problem (24 rows)" in text and "problem (2 rows)" in text
    assert f"op and suite ({len(small.holdings)} rows)" in text


def test_the_fastest_kernels_of_all_problems_are_kept(
    small: Survey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(most_rows: int, most_times: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(survey_page, "MOST_ROWS", most_rows)
        monkeypatch.setattr(survey_page, "MOST_TIMES", most_times)
        return survey_page._most_telling(small.times)

    assert kept(24, 27) == small.times
    # Eight problems of gemm: two with 64 columns, where bfloat16 is the fastest and the front.
    found = kept(10, 27)
    rows = [row for row in found if row["op"] == "gemm"]
    assert len(rows) == 10 and len({(row["m"], row["n"], row["k"]) for row in rows}) == 8
    assert all(row["front"] for row in found if row["op"] == "gemm")
    assert {row["kernel"] for row in rows if row["n"] == 64} == {BF16}
    assert sum(row["op"] != "gemm" for row in found) == 3
    assert found == [row for row in small.times if row in found]
    rows = kept(24, 11)
    assert len({(row["op"], row["m"], row["n"], row["k"]) for row in rows}) == len(rows) == 11


def hostile_of(survey: Survey) -> Survey:
    """The same survey with names and reasons that try to inject scripts."""
    names = {BF16: HOSTILE, ROW: "</script><script>window.ran = 1</script><!--"}

    def bad(row: dict[str, Any]) -> dict[str, Any]:
        kernel = names.get(row.get("kernel", ""), row.get("kernel"))
        spoiled = {"kernel": kernel, "key": f"A  {kernel}", "note": HOSTILE,
                   "form": HOSTILE if row.get("op") == "gemm" else row.get("form"),
                   "kind": '"]);window.ran=1;//', "arithmetic": "'+(window.ran=1)+'",
                   "part": HOSTILE}  # fmt: skip
        return row | {name: value for name, value in spoiled.items() if name in row}

    return replace(
        survey,
        device=replace(survey.device, product=HOSTILE),
        ops=[bad(op) for op in survey.ops],
        choices=[bad(row) for row in survey.choices],
        times=[bad(row) for row in survey.times],
        errors=[bad(row) for row in survey.errors],
        holdings=[bad(row) for row in survey.holdings],
    )


def test_hostile_names_do_not_break_the_markup(small: Survey) -> None:
    text = page_of(hostile_of(small))
    assert len(scripts_of(text)) == 3 and Parsed(text).open == []
    assert json.loads(scripts_of(text)[0])["specs"]["gemm"]["params"][0]["value"] == HOSTILE


@needs_chromium
def test_a_page_works_in_a_browser(small: Survey, tmp_path: Path) -> None:
    path, hostile = tmp_path / "small.html", tmp_path / "hostile.html"
    path.write_text(page_of(small), encoding="utf-8")
    hostile.write_text(page_of(hostile_of(small)), encoding="utf-8")
    with browser.opened(tmp_path / "profile") as page:
        page.open(path)
        page.until(READY)
        read = page.run("tablesOf('gemm')")
        for name, rows in charts.tables_of(small, small.ops[0]).items():
            assert len(read[name]) == len(rows)
            for row in read[name]:
                shown = {name: row[name] for name in row if name in rows[0] and name != "note"}
                assert len(shown) >= 8 and any(each.items() >= shown.items() for each in rows)
        letters = drawn_letters(page)
        assert letters.count("A") == 3 and letters.count("B") == 1
        # By keyboard: a smaller budget makes the map one of bfloat16, and a table sorts.
        page.run("document.querySelector('#params [name=budget]').focus()")
        for _ in range(2):
            page.press("ArrowUp")
        page.until(f"{TEXTS}.filter((text) => text === 'B').length >= 4")
        choices = "document.querySelectorAll('[data-op=gemm] table')[1]"
        page.run(f"{choices}.querySelector('thead button').focus()")
        page.press("Enter")
        assert page.run(f"{choices}.querySelector('[aria-sort=ascending]').textContent") == "m"
        ms = f"Array.from({choices}.querySelectorAll('td:first-child'), (m) => m.textContent)"
        assert page.run(ms) == sorted(page.run(ms), key=int)
        page.run("""{const f = document.getElementById('asked').elements;
            f.text.value = 'scaled_mm_row'; f.budgets.value = '0.06'; f.m.value = '2048';
            document.getElementById('asked').dispatchEvent(new Event('input'))}""")
        rows = f"Array.from({choices}.querySelectorAll('tr:not(.form, thead *, [hidden])'))"
        assert page.run(f"{rows}.length") == 3
        assert page.run(f"{rows}.every((row) => row.textContent.includes('{ROW}'))")
        tree = page.call("Accessibility.getFullAXTree")["nodes"]
        names = {n["name"]["value"] for n in tree if "name" in n and not n["ignored"]}
        assert {"Pictures of gemm", "Coverage and staleness"} <= names
        page.run("""{document.getElementById('pictures').replaceChildren();
            const s = document.querySelector('#asked [name=op]'); s.value = 'quantize';
            s.dispatchEvent(new Event('change', {bubbles: true}))}""")
        page.until(f"{TEXTS}.includes('no errors measured')")
        page.open(hostile)
        page.until(READY)
        assert page.run("document.title").startswith(HOSTILE)
        assert any(HOSTILE in text for text in page.run(TEXTS))
        assert page.run("window.ran") is None
        assert (page.errors, page.requests) == ([], [])


def test_screenshots_are_kept_and_compared(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    screenshots.keep(tmp_path / "a.png", blocks)
    kept = screenshots.kept_at(tmp_path / "a.png")
    assert np.abs(kept.astype(int) - blocks).max() <= screenshots.STEP // 2
    assert not screenshots.difference(blocks, kept)
    changed = kept.copy()
    changed[2:5, :] ^= 128
    assert "15 of 35 blocks" in screenshots.difference(changed, kept)
    assert "from (0, 16) to (40, 40)" in screenshots.difference(changed, kept)
    assert "40 x 48 pixels instead of 40 x 56" in screenshots.difference(blocks[1:], kept)


@needs_chromium
def test_a_page_looks_as_it_did(
    small: Survey, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Suites grow. Predictions make hatched cells.
    predicted = [row | {"n": n, "k": k, "note": "predicted", "answer": "predicted"}
                 for row in small.choices
                 if (row["op"], row["n"], row["k"]) == ("gemm", 512, 2048)
                 for n, k in ((64, 2048), (2048, 512))]  # fmt: skip
    held = [row for row in small.holdings if not row["part"].startswith("suite ")]
    path = tmp_path / "small.html"
    path.write_text(page_of(replace(small, predicted=predicted, holdings=held)), encoding="utf-8")
    differences = []
    with browser.opened(tmp_path / "profile", fonts=box_font.configuration(tmp_path)) as page:
        for theme, width in itertools.product(("light", "dark"), (1400, 420)):
            page.show(width, theme=theme)
            page.open(path)
            page.until(READY)
            picture = tmp_path / f"{theme}-{width}.png"
            picture.write_bytes(page.picture())
            found = screenshots.blocks_of(page, picture.read_bytes())
            if request.config.getoption("keep_screenshots"):
                screenshots.keep(LOOKS / picture.name, found)
            differs = screenshots.difference(found, screenshots.kept_at(LOOKS / picture.name))
            if differs:
                differences.append(f"{picture}: {differs}")
        assert (page.errors, page.requests) == ([], [])
    assert not differences, "\n".join([*differences, KEEP])


TEXTS = "Array.from(document.querySelectorAll('#pictures svg text'), (text) => text.textContent)"


def drawn_letters(page: browser.Page) -> list[str]:
    """Letters in the first map."""
    map_ = "document.querySelectorAll('#pictures svg .role-mark.mark-text')[0]"
    texts = f"Array.from({map_}.querySelectorAll('text'), (text) => text.textContent)"
    found: list[str] = page.run(texts)
    return found


@needs_chromium
def test_the_page_of_the_shipped_file_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "h200.html"
    dispatcher.use_snapshot(None)
    done = CliRunner().invoke(app, ["report", "--device", "NVIDIA H200", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    size = out.stat().st_size
    assert 100_000 < size < 8_000_000
    with sqlite3.connect(f"file:{H200_FILE}?mode=ro&immutable=1", uri=True) as database:
        ops = {op for (op,) in database.execute(
            "select distinct problem.op from timing join problem on problem.id = timing.problem"
        )}  # fmt: skip
    assert len(ops) >= SHIPPED_OPS
    with browser.opened(tmp_path / "profile") as page:
        for theme, width in (("light", 1400), ("dark", 420)):
            page.show(width, theme=theme)
            page.open(out)
            page.until(READY)
            assert page.run("document.documentElement.scrollWidth") == width
            page.until("document.querySelector('#held-pictures svg')")
            wider = "(part) => part.scrollWidth > part.clientWidth"
            assert not page.run(f"Array.from(document.querySelectorAll('.picture')).some({wider})")
        told = page.run(
            "Array.from(document.querySelector('#asked [name=op]').options, (o) => o.value)"
        )
        assert {*told} == ops
        for op in sorted(ops):
            page.run(f"""{{document.getElementById('pictures').replaceChildren();
                const s = document.querySelector('#asked [name=op]'); s.value = '{op}';
                s.dispatchEvent(new Event('change', {{bubbles: true}}))}}""")
            page.until("document.querySelector('#pictures svg .role-mark.mark-text text')")
        assert (page.errors, page.requests) == ([], [])
        choices = page.run("tablesOf('gemm').choices")
    usual = {"form": "a=bfloat16 b=bfloat16 out=bfloat16"}
    shown = {
        (row["m"], row["n"], row["k"]): (row["kernel"], row["us"])
        for row in choices
        if row.items() >= usual.items() and "0.06" in row["budgets"].split()
    }
    for shape in ((8192, 512, 512), (2048, 4096, 4096), (2048, 2048, 17280)):
        choice = dispatch("gemm", shape, 0.06, device="NVIDIA H200")
        assert shown[shape] == (choice.kernel, round(choice.latency_us or 0, 2))


def test_every_kernel_has_a_color_of_its_own(small: Survey) -> None:
    for theme in charts.THEMES.values():
        assert len({*theme["category"]}) == charts.MOST_HUES == len(theme["category"])
    tables = charts.tables_of(small, small.ops[0])
    assert len({row["kernel"] for row in tables["times"]}) > 1


def test_both_maps_have_the_same_cells_and_outline_what_was_never_measured(small: Survey) -> None:
    op = next(op for op in small.ops if op["op"] == "gemm")
    base, views = charts.op_pictures(small, op)
    base["datasets"] = charts.tables_of(small, op)
    here = [row for row in base["datasets"]["choices"]
            if (row["form"], row["m"]) == (op["form"], op["m"])
            and op["budget"] in row["budgets"].split()]  # fmt: skip
    cells = len({row["n"] for row in here}) * len({row["k"] for row in here})
    assert charts.columns_of(small)["gemm"] >= len({row["n"] for row in here})
    drawer = charts.vl_convert()
    for name in ("winners", "gains"):
        svg = drawer.vegalite_to_svg(base | views[name], vl_version=charts._VERSION)
        assert svg.count('stroke-dasharray="2,3"') == cells + 1, f"{name}, and its legend"


def test_predictions_are_those_of_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    device = dispatcher.device_named("NVIDIA H200")
    shapes = [(8192, 2064, 2000), (2048, 2064, 2000), (8192, 130_000, 2000)]
    monkeypatch.setattr(survey, "_gaps", lambda _: [gemm(*shape) for shape in shapes])
    limits = {"none": None, "0.01": ErrorBudget.of(0.01), "0.06": ErrorBudget.of(0.06)}
    rows = survey._predicted([], device, "graph-cold", limits, {}, Progress())
    found = {(row["m"], row["n"], row["k"], row["budget"]): row for row in rows}
    assert len(found) == len(rows)
    for shape in shapes:
        assert (*shape, "none") not in found
        for budget in (0.01, 0.06):
            choice = dispatch("gemm", shape, budget, device=device)
            row = found.pop((*shape, f"{budget:g}"), None)
            assert (row is None) == (choice.predicted is None)
            if row is not None and choice.predicted is not None:
                us = choice.predicted.latency_us
                assert (row["kernel"], row["us"]) == (choice.kernel, pytest.approx(us, abs=0.01))
                assert row["note"] == f"predicted, not measured: {choice.predicted}"
    assert not found


def test_gaps_are_at_sizes_of_two_or_more_times() -> None:
    there = [(64, 64), (64, 128), (128, 64), (256, 256), (256, 64)]
    problems = [gemm(2048, n, k) for n, k in there]
    gaps = [(p.n, p.k) for p in survey._gaps([*problems, gemm(4096, 512, 512)])]
    assert gaps == [] and survey._gaps([]) == []
    gaps = [p.shape for p in survey._gaps([*problems, gemm(2048, 512, 128)])]
    assert gaps == [(2048, 256, 128)]
    rows = [quantizing(m, k) for m, k in ((64, 512), (64, 1024), (128, 512), (256, 1024))]
    assert [p.shape for p in survey._gaps(rows)] == []
    assert [p.shape for p in survey._gaps([*rows, quantizing(128, 64)])] == [(128, 1024)]


def svg_of(found: Survey, name: str, of: str = "gemm") -> str:
    op = next(op for op in found.ops if op["op"] == of)
    base, views = charts.op_pictures(found, op)
    spec = base | views[name] | {"datasets": charts.tables_of(found, op)}
    config = charts.config_of("light")
    svg: str = charts.vl_convert().vegalite_to_svg(
        spec | {"config": config}, vl_version=charts._VERSION
    )
    return svg


def test_predicted_cells_are_hatched_and_no_others(small: Survey) -> None:
    op = next(op for op in small.ops if op["op"] == "gemm")
    here = [row for row in small.choices if row["op"] == "gemm" and row["m"] == op["m"]]
    gap = next(row for row in here if row["budget"] == op["budget"])
    sizes = {(row["n"], row["k"]) for row in here}
    gaps = [(n, k) for n in {n for n, _ in sizes} for k in {k for _, k in sizes}
            if (n, k) not in sizes]  # fmt: skip
    predicted = [gap | {"n": n, "k": k, "speedup": 7.77, "note": "predicted", "answer": "predicted"}
                 for n, k in gaps]  # fmt: skip
    assert predicted
    hatch = re.compile(r'fill="url\(#gradient[^"]*"')
    for name, legends in (("winners", 1), ("gains", 2)):
        before, after = (svg_of(s, name) for s in (small, replace(small, predicted=predicted)))
        assert len(hatch.findall(before)) == legends, "of cells, and of colors"
        assert len(hatch.findall(after)) == legends + len(predicted)
        assert all(f">{state}<" in after for state in charts._STATES)
    assert after.count(">7.77<") == len(predicted)
    tables = charts.tables_of(replace(small, predicted=predicted), op)
    assert sum(row["answer"] == "predicted" for row in tables["choices"]) == len(predicted)
    assert f" + {len(predicted)}<" in svg_of(replace(small, predicted=predicted), "winners")


def test_a_time_between_measured_m_is_told(tmp_path: Path) -> None:
    """As in a file that lost rows: FP8 alone was timed at 4096 rows, and its error is unknown."""
    narrow, wide = (gemm(4096, n, 512) for n in (512, 2048))
    rows = [time(BF16, replace(wide, m=m), us) for m, us in ((2048, 60.0), (8192, 90.0))]
    rows += [time(ROW, wide, 80.0), time(BF16, narrow, 20.0), time(ROW, narrow, 30.0)]
    Book(tmp_path / "rows.sqlite").write(*rows)
    found = survey_of(dispatcher.snapshot(), H200, {0.06})
    row = at(found, budget="0.06", n=2048, m=4096)
    assert (row["kernel"], row["us"], row["plain_us"]) == (BF16, 70.0, None)
    assert row["answer"] == "interpolated"
    assert row["note"] == f"no gain is known: {BF16} was not timed at m=4096"
    assert at(found, budget="0.06", n=512)["answer"] == "measured"
    (op,) = found.ops
    found = replace(found, ops=[op | {"m": 4096, "budget": "0.06"}])
    hatch = re.compile(r'fill="url\(#gradient[^"]*"')
    for name, legends in (("winners", 1), ("gains", 2)):
        svg = svg_of(found, name)
        assert f">{charts._INEXACT}<" in svg and len(hatch.findall(svg)) == legends + 1
        assert ">null<" not in svg
    assert ">-<" in svg and ">1.00<" in svg
    page = page_of(found)
    assert "<option>interpolated</option>" in page and "interpolated between measured m" in page


def test_a_faster_kernel_without_errors_is_undecided(tmp_path: Path) -> None:
    """Missing errors are no result: counted, noted, hatched, and told by `explain`."""
    rows: list[Any] = []
    for n in (512, 2048):
        problem = gemm(8192, n, 512)
        rows += [time(BF16, problem, 90.0), time(TENSOR, problem, 40.0 if n == 512 else 95.0),
                 time(ROW, problem, 60.0), accuracy(BF16, problem, 0.003),
                 accuracy(ROW, problem, 0.04, without=("X3",))]  # fmt: skip
    Book(tmp_path / "rows.sqlite").write(*rows)
    found = survey_of(dispatcher.snapshot(), H200, {0.03, 0.06})
    row = at(found, budget="0.06", n=2048)
    assert (row["kernel"], row["us"], row["undecided"]) == (BF16, 90.0, ROW)
    assert row["note"] == (
        f"undecided: {ROW} takes 60.00 us, 1.50x as fast: error not measured on X3 (3 seeds needed)"
    )
    assert at(found, budget="0.06", n=512)["undecided"] == TENSOR, "the fastest"
    assert not at(found, budget="0.03", n=2048)["undecided"], "no FP8 is within it"
    assert not at(found, budget="none", n=2048)["undecided"]
    assert "the unquantized one chosen at 2 problems within 0.06" in found.undecided_words("0.06")
    assert not found.undecided_words("0.03")
    (op,) = found.ops
    answers = charts.tables_of(found, op)["choices"]
    assert [row["answer"] for row in answers].count("undecided") == 2
    for name in ("winners", "gains"):
        assert f">{charts._UNDECIDED}<" in svg_of(found, name)
    page = page_of(found)
    assert "<strong>Undecided: a quantizing kernel is faster" in page
    assert row["note"] in page and '<option value="undecided">' in page
    choice = dispatch("gemm", (8192, 2048, 512), 0.06, device=H200)
    assert f"  undecided: {ROW} takes 60.00 us, 1.50x as fast" in choice.explain()
    assert choice.rejected[ROW].endswith("X3 (3 seeds needed); it takes 60.00 us")


def test_nothing_is_undecided_where_errors_are_known(small: Survey) -> None:
    assert not any(row["undecided"] for row in small.choices)
    page = page_of(small)
    assert "<strong>Undecided" not in page and '<option value="undecided">' not in page
    assert charts._UNDECIDED not in page


def test_points_without_a_place_of_their_own_are_counted(small: Survey) -> None:
    def changed(**values: Any) -> Survey:
        times = [row for row in small.times if row["op"] == "gemm"]
        return replace(small, times=[*times, *(row | values for row in times[:2])])

    assert ">24 times<" in svg_of(small, "light")
    assert ">26 times, 2 behind others<" in svg_of(changed(), "light")
    assert ">24 times, and 2 without a bound<" in svg_of(changed(least_us=0.0), "light")
    op = next(op for op in small.ops if op["op"] == "gemm")
    at = dict(zip("mnk", op["shape"], strict=True))
    assert ">3 kernels<" in svg_of(small, "fronts")
    unknown = changed(**at, row_err=None)
    assert ">3 kernels, and 2 without a known error<" in svg_of(unknown, "fronts")


def test_a_picture_says_that_no_errors_were_measured(small: Survey) -> None:
    assert ">no errors measured<" in svg_of(small, "fronts", "quantize")
    assert "measured<" not in svg_of(small, "fronts")
    at = {"m": 2048, "n": 64, "k": 512}
    without = [row | {"row_err": None, "front": False} for row in small.times
               if row.items() >= at.items()]  # fmt: skip
    others = [row for row in small.times if not row.items() >= at.items()]
    ops = [op | {"shape": [*at.values()]} for op in small.ops]
    found = replace(small, ops=ops, times=[*others, *without])
    assert len(without) == 3 and ">no errors measured<" in svg_of(found, "fronts")
    never = replace(small, ops=ops, times=others)
    assert ">nothing measured<" in svg_of(never, "fronts")


def test_pictures_need_no_browser(small: Survey, tmp_path: Path) -> None:
    one = replace(small, ops=[op for op in small.ops if op["op"] == "gemm"])
    done = charts.save_pictures(one, tmp_path / "png", Progress())
    found = sorted(path.name for path in (tmp_path / "png").iterdir())
    names = ["fronts", "gains", "light", "typical", "winners", "worst"]
    assert found == ["coverage.png", "freshness.png", *(f"gemm-{name}.png" for name in names)]
    assert done == len(found)
    for path in (tmp_path / "png").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_choices_are_printed_by_default(small: Survey) -> None:
    run = CliRunner().invoke
    done = run(app, ["report", "--device", "NVIDIA H200", "--budget", "0.05", "--json"])
    rows = json.loads(done.stdout)
    assert len(rows) == len(small.choices) / len(small.budgets)
    assert {row["kernel"] for row in rows if row["op"] == "gemm"} == {BF16, ROW}


def test_missing_times_and_packages_are_errors_of_one_line(
    small: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CliRunner().invoke
    nowhere = run(app, ["report", "--out", str(tmp_path / "a.html")])  # the CPU here was not timed
    assert nowhere.exit_code == 1 and "nothing was timed on" in nowhere.stderr
    assert run(app, ["report", "--probe", "a", "--png", "b"]).exit_code == 2
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "vl_convert":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = run(app, ["report", "--device", "NVIDIA H200", "--out", str(tmp_path / "a.html")])
    assert done.exit_code == 1 and "pip install '.[explore]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
