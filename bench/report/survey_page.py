"""A survey as one HTML page that needs nothing else: tables, and pictures that it draws itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.bench.report import charts
from lokakern.bench.report.survey import USUAL_BUDGET
from lokakern.bench.report.themes import THEMES, config_of
from lokakern.render.html import hash_of, json_of, rendered, script_of
from lokakern.workloads.distributions import DISTRIBUTIONS

if TYPE_CHECKING:
    from lokakern.bench.report.survey import Row, Survey

_FOLDER = Path(__file__).parent


def page_of(survey: Survey) -> str:
    """HTML of a survey.

    Names of kernels, reasons and forms are anybody's: they are data, and become text only. The page
    runs our scripts alone, by their hashes, evaluates no text, and allows itself nothing from
    elsewhere.

    Raises:
        UnsupportedError: vl-convert, which brings the scripts that draw, is not installed.
    """
    scripts = [
        script_of(charts.bundle()),
        script_of(_FOLDER.joinpath("survey_page.js").read_text("utf-8")),
    ]
    usual = f"{USUAL_BUDGET:g}"
    content = {
        "device": survey.device.product,
        "budgets": survey.budgets,
        "budget": usual if usual in survey.budgets else survey.budgets[-1],
        "ops": survey.ops,
        "line": charts.LINE,
        "gains": charts.GAINS,
        "themes": {
            name: {"config": config_of(name), "hues": theme["category"]}
            for name, theme in THEMES.items()
        },
        "charts": charts.specs_of(survey),
        "tables": {
            name: _columns(rows)
            for name, rows in (
                ("choices", survey.choices),
                ("times", survey.times),
                ("errors", survey.errors),
                ("holdings", survey.holdings),
                *charts.held_rows(survey).items(),
            )
        },
    }
    newest = max((row["newest"] for row in survey.holdings if row["rows"]), default="never")
    return rendered(
        _FOLDER / "survey_page.html",
        survey=survey,
        newest=newest,
        line=charts.LINE,
        problems=sum(op["problems"] for op in survey.ops),
        distributions=[
            (d.name, d.title) for d in DISTRIBUTIONS.values()
            if d.name in {row["distribution"] for row in survey.errors}
        ],
        content=json_of(content),
        scripts=scripts,
        hashes=" ".join(map(hash_of, scripts)),
    )  # fmt: skip


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    """By column: numbers as they are; of texts, which repeat, each once, and places among them."""
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if all(isinstance(value, str) for value in values):
            words = dict.fromkeys(values)
            places = {word: place for place, word in enumerate(words)}
            columns[name] = {"words": list(words), "at": [places[value] for value in values]}
        else:
            columns[name] = {"values": values}
    return columns
