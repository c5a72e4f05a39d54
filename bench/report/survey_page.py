"""A survey as one self-contained HTML page: static tables, and pictures from Vega-Lite specs."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.bench.report import charts
from lokakern.bench.report.survey import PREDICTED, USUAL_BUDGET
from lokakern.registry.register import KERNELS
from lokakern.render.html import hash_of, json_of, rendered, script_of
from lokakern.types import Granularity
from lokakern.workloads.distributions import DISTRIBUTIONS

if TYPE_CHECKING:
    from lokakern.bench.report.survey import Row, Survey

MOST_ROWS = 20_000  # of a table: browsers lay out and filter more too slowly
MOST_TIMES = 28_500  # of all ops: 4 of the 8 MB of a page
# What a table leaves out beyond these numbers, and what has it.
LEFT_OUT = {
    "times": "the slowest kernels of problems with many; lokakern explore has all",
    "choices": "predicted ones, then those that gain least; lokakern report --format csv has all "
               "measured ones, and lokakern explain tells any",
    "errors": "the last by name; lokakern explore has all",
}  # fmt: skip
NAMES = ("part", "of", "grade", "newest")  # columns of holdings that are not numbers


def page_of(survey: Survey) -> str:
    """HTML of a survey.

    Names of kernels, reasons and forms are untrusted: they are inserted as escaped text and as
    JSON. The Content-Security-Policy admits only the page's own scripts, by their hashes, no
    evaluation of text, and no network.

    Raises:
        UnsupportedError: vl-convert, which provides Vega's scripts, is not installed.
    """
    page = Path(__file__).with_suffix(".html")
    timed = Counter(row["op"] for row in survey.times)
    survey = replace(survey, times=_most_telling(survey.times))
    scripts = [script_of(charts.bundle()), script_of(page.with_suffix(".js").read_text("utf-8"))]
    specs = charts.page_specs(survey)
    content = {
        "themes": {name: charts.config_of(name) for name in charts.THEMES}, "specs": specs,
        "cell": charts.CELL, "columns": charts.columns_of(survey),
    }  # fmt: skip
    largest = max(survey.ops, key=lambda op: op["problems"])["op"]
    return rendered(
        page,
        {"words": _words, "label": _label},
        survey=survey,
        has_undecided=any(op["undecided"] for op in survey.ops),
        has_inexact=any(op["inexact"] for op in survey.ops),
        undecided=survey.undecided_words(f"{USUAL_BUDGET:g}"),
        largest=largest,
        line=charts.LINE,
        problems=sum(op["problems"] for op in survey.ops),
        ms=sorted({row["m"] for row in survey.choices}),
        tables={op["op"]: _tables(survey, op, timed[op["op"]]) for op in survey.ops},
        holdings=_table("holdings", "Rows and problems of each op and suite", survey.holdings,
                        " ".join(n for n in survey.holdings[0] if n not in NAMES),
                        " ".join(NAMES)),
        distributions=[(d.name, d.title) for d in DISTRIBUTIONS.values()
                       if d.name in {row["distribution"] for row in survey.errors}],
        content=json_of(content),
        scripts=scripts,
        hashes=" ".join(map(hash_of, scripts)),
    )  # fmt: skip


def _most_telling(times: Sequence[Row]) -> list[Row]:
    """At most `MOST_ROWS` times of an op and `MOST_TIMES` of all, of each problem the best ones.

    Those are the kernels on the front of times and errors, then the fastest others.
    """
    place: dict[int, int] = {}  # among the kernels of its problem
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in sorted(times, key=lambda row: (not row["front"], row["us"])):
        problem = tuple(row[name] for name in ("op", "form", "m", "n", "k"))
        place[id(row)] = seen[problem]
        seen[problem] += 1
    kept: list[Row] = []
    of: Counter[str] = Counter()
    for row in sorted(times, key=lambda row: place[id(row)]):
        if of[row["op"]] < MOST_ROWS and len(kept) < MOST_TIMES:
            of[row["op"]] += 1
            kept.append(row)
    ids = set(map(id, kept))
    return [row for row in times if id(row) in ids]


def _tables(survey: Survey, op: Row, timed: int) -> list[dict[str, Any]]:
    """Of an op, of which the survey had so many times."""
    found, gain = charts.tables_of(survey, op), op["gain"]
    choices = [row for row in survey.choices if row["op"] == op["op"]]
    answers = sorted(
        found["choices"],
        key=lambda row: (row["answer"] == PREDICTED, -(row[gain] or 0)),
    )
    return [
        _table("by_budget", "Choices of dispatch by budget", _by_budget(choices, op),
               f"problems answered quantized {'undecided ' * op['undecided']}"
               f"median_{gain} largest_{gain}",
               "budget largest_by largest_at most_often"),
        _table("choices", "Choices of dispatch", answers,
               "m n k us plain_us speedup light row_err", "budgets answer letter kernel note"),
        _table("times", "Times by kernel and problem", found["times"], "m n k us least_us row_err",
               "letter kernel kind front state", timed),
        _table("errors", "Errors by arithmetic and distribution", found["errors"],
               "typical_row_err row_err row_p99 mean_rel_err mean_shift shapes",
               "arithmetic distribution"),
    ]  # fmt: skip


def _table(
    name: str, caption: str, rows: list[Row], numbers: str, texts: str, total: int | None = None
) -> dict[str, Any]:
    """Rows in groups of equal form, which pictures read by the name; of `LEFT_OUT` `MOST_ROWS`.

    Columns are of numbers, from `text` on of texts. ``total`` counts rows that were left out.
    """
    total = len(rows) if total is None else total
    shown = rows[:MOST_ROWS] if name in LEFT_OUT else rows
    left_out = ""
    if len(shown) < total:
        left_out = f"{total - len(shown)} of {total} {name} are left out of this page: "
        left_out += f"{LEFT_OUT[name]}."
    shown = sorted(shown, key=lambda row: row.get("form", ""))
    groups = itertools.groupby(shown, key=lambda row: row.get("form", ""))
    return {
        "name": name,
        "caption": caption,
        "columns": [*numbers.split(), *texts.split()],
        "text": texts.split()[0],
        "groups": [(form, list(found)) for form, found in groups],
        "total": total,
        "left_out": left_out,
    }


def _by_budget(choices: Iterable[Row], op: Row) -> list[Row]:
    """For each budget: how often FP8 is chosen and what it gains, and the kernel chosen most often.

    Of ops without an unquantized counterpart, the gain is the share of the roofline.
    """
    gain, rows = op["gain"], []
    for budget, found in itertools.groupby(
        sorted(choices, key=lambda row: row["budget"]), key=lambda row: row["budget"]
    ):
        here = list(found)
        undecided = [row["undecided"] for row in here]
        answered = [row for row in here if row["answered"]]
        quantized = [row for row in answered if _quantizes(row["kernel"])]
        gains = [row for row in quantized if row[gain] is not None]
        median = statistics.median(row[gain] for row in gains) if gains else None
        best = max(gains, key=lambda row: row[gain], default=None)
        often = Counter(row["kernel"] for row in answered).most_common(1)
        rows.append(
            {
                "problems": len(here),
                "answered": len(answered),
                "quantized": len(quantized),
                **({"undecided": sum(map(bool, undecided))} if op["undecided"] else {}),
                f"median_{gain}": median and round(median, 4),
                f"largest_{gain}": best and best[gain],
                "budget": budget,
                "largest_by": best and best["kernel"],
                "largest_at": best and f"{charts.sizes_of(best)} {best['form']}",
                "most_often": f"{often[0][0]} ({often[0][1]})" if often else None,
            }
        )
    return rows


def _quantizes(name: str) -> bool:
    kernel = KERNELS.get(name)
    return kernel is None or kernel.granularity is not Granularity.NONE


def _label(name: str) -> str:
    title = charts.label_of(name)
    return title if len(title) < 3 else title[0].upper() + title[1:]  # not m, n, k and us


def _words(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.12g}"
    return str(value)
