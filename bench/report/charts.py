"""Pictures of a survey as Vega-Lite specs, the same for the page and for PNG files."""

from __future__ import annotations

import colorsys
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.bench.report.coverage import COUNTED
from lokakern.bench.report.survey import ESTIMATED, INTERPOLATED, PREDICTED, UNDECIDED
from lokakern.errors import DatabaseError, UnsupportedError

if TYPE_CHECKING:
    from lokakern.bench.report.survey import Row, Survey
    from lokakern.progress import Progress

Spec = dict[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier; never fetched
_VERSION = "6.4"  # of Vega-Lite
_FONT = "system-ui, sans-serif"
_WIDTH = 860
LINE = 4  # the dashed line of the roofline picture, in multiples of the least time
GAINS = {"speedup": "times as fast as unquantized", "light": "share of the roofline bound"}
TITLES = {
    "winners": "Winning kernel",
    "gains": "What it gains",
    "light": "Measured time against the roofline bound",
    "fronts": "Error against time",
    "typical": "Row error at the median shape",
    "worst": "Row error at the worst shape",
    "accuracy": "Row error",
    "coverage": "Problems of which every kernel was timed",
    "freshness": "Rows that are as new as their kernels",
}
NEVER = "never measured"
COVERED = ("covered", "partly", "not timed")  # by all kernels that support a problem, some, none
# Tints behind letters and numbers have a contrast of at least 4.5 to the text on them; `ordinal`
# are for points, with at least 3 to the background.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff", "text": "#1c2024", "faint": "#5f6770", "line": "#d9dde2",
        "ramp": ["#f3f6fa", "#6ea8e0"], "heatmap": ["#f2f8ec", "#e39a52"],
        "category": ["#b9c2cc", "#9ecae9", "#ffc98a", "#a8dba2", "#f5aeb0", "#d3bdf0", "#e3cf7a",
                     "#8fd6cf", "#f3b5d8", "#cdb49a"],
        "ordinal": ["#3b444d", "#0b57d0", "#b34a00", "#146c37", "#8a2be2", "#a3195b"],
    },
    "dark": {
        "ground": "#14171a", "text": "#e6e9ec", "faint": "#a3abb3", "line": "#343a41",
        "ramp": ["#222a33", "#1f69b3"], "heatmap": ["#1f2a20", "#94520e"],
        "category": ["#4a535c", "#205f8f", "#80500f", "#2b6b34", "#8a3438", "#5e4390", "#655a10",
                     "#16665f", "#83386a", "#6a513a"],
        "ordinal": ["#c5ccd3", "#9ec1ff", "#ffb27a", "#74d99f", "#d0a6ff", "#ff9ec6"],
    },
}  # fmt: skip


MOST_HUES = 64  # kernels of an op with a color of their own
STRIPES = 4  # of the background, over a predicted cell
_OF_MEASURED = "#7f8a96"  # in the legend of cells, whose colors have other meanings


def _more_hues(lightness: tuple[float, float], saturation: float) -> list[str]:
    """Colors after the first ten, by steps of the golden angle and in turn of two lightnesses."""
    found = []
    for place in range(MOST_HUES - 10):
        rgb = colorsys.hls_to_rgb(place * 0.381966 % 1, lightness[place % 2], saturation)
        found.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return found


THEMES["light"]["category"] += _more_hues((0.86, 0.74), 0.62)
THEMES["dark"]["category"] += _more_hues((0.24, 0.17), 0.45)


def _stripes(ground: str, edge: str, *, rising: bool = False) -> Spec:
    """Diagonal stripes over the fill of a cell, with edges, as the fill may be like the ground."""
    clear = f"{ground}00"
    parts = ((0, ground), (0.4, ground), (0.4, edge), (0.45, edge), (0.45, clear), (1, clear))
    stops = [
        {"offset": (start + at) / STRIPES, "color": color}
        for start in range(STRIPES)
        for at, color in parts
    ]
    ends = {"x1": 0, "y1": int(rising), "x2": 1, "y2": int(not rising)}
    return {"gradient": "linear", **ends, "stops": stops}


def config_of(theme: str) -> Spec:
    """Vega-Lite configuration of the "light" or "dark" theme."""
    colors = THEMES[theme]
    words = {"labelColor": colors["text"], "titleColor": colors["text"], "labelFont": _FONT,
             "titleFont": _FONT, "titleFontWeight": 500, "labelFontSize": 12, "titleFontSize": 13,
             "aria": False}  # fmt: skip
    return {
        "background": colors["ground"],
        "view": {"stroke": None},
        "font": _FONT,
        "axis": words | {"gridColor": colors["line"], "domainColor": colors["faint"],
                         "tickColor": colors["faint"], "labelLimit": 620},
        "legend": words | {"labelLimit": 420, "titleLimit": 420, "symbolStrokeWidth": 1,
                           "symbolSize": 150},
        "title": {"color": colors["text"], "subtitleColor": colors["faint"], "anchor": "start",
                  "font": _FONT, "subtitleFont": _FONT},
        "range": {name: colors[name] for name in ("category", "ordinal", "ramp", "heatmap")},
        "text": {"color": colors["text"], "font": _FONT, "fontSize": 12},
        "rule": {"color": colors["text"]},
        "line": {"color": colors["text"]},
        "rect": {"stroke": colors["faint"], "strokeWidth": 0.5},
        "circle": {"stroke": colors["faint"], "strokeWidth": 1, "opacity": 1},
        "style": {
            "hatch": {"color": _stripes(colors["ground"], colors["faint"])},
            "undecided": {"color": _stripes(colors["ground"], colors["text"], rising=True)},
        },
        "bar": {"stroke": colors["ground"]},
        "mark": {"aria": False},
    }  # fmt: skip


# --- views of the rows of a table: on a page the HTML tables, in a PNG file those of the survey

# Each of `MOST_HUES` kernels has a color of its own, and a letter. A "?" is no answer.
_LETTERED = [
    {"calculate": "replace(datum.letter, '?', '')", "as": "plain"},
    {"calculate": "datum.plain + '  ' + datum.kernel", "as": "key"},
    {"calculate": "datum.plain === '-' ? 0 : (indexof('ABCDEFGHIJKLMNOPQRSTUVWXYZ', "
                  "slice(datum.plain, -1)) + 26 * (length(datum.plain) - 1)) % "
                  f"{MOST_HUES}", "as": "hue"},
]  # fmt: skip
_DERIVED = {
    "choices": _LETTERED,
    "times": [*_LETTERED, {"calculate": "'m=' + datum.m + (isValid(datum.n) ? ' n=' + datum.n : '')"
                                        " + ' k=' + datum.k", "as": "shape"}],
}  # fmt: skip


def _view(table: str, filters: Iterable[str], view: Spec) -> Spec:
    """A view of the rows of a table that pass all filters."""
    transform = [
        *_DERIVED.get(table, ()),
        *({"filter": test} for test in filters),
        *view.get("transform", ()),
    ]
    return view | {"data": {"name": table}, "transform": transform}


def _channel(field: str, kind: str = "quantitative", title: str | None = None, **more: Any) -> Spec:
    return {"field": field, "type": kind, "title": title, **more}


# Names of columns in pictures and, capitalized, in tables.
LABELS = {
    "plain_us": "unquantized us", "speedup": "times as fast", "least_us": "minimum us",
    "light": "share of roofline", "kind": "language", "front": "Pareto-optimal",
    "typical_row_err": "row error, median shape", "row_err": "row error",
    "row_p99": "99 % of rows", "quantized": "FP8 chosen", "median_speedup": "median gain of FP8",
    "largest_speedup": "largest gain", "median_light": "median share of roofline",
    "largest_light": "largest share of roofline", "most_often": "chosen most often",
}  # fmt: skip


def label_of(field: str) -> str:
    return LABELS.get(field, field.replace("_", " "))


def _hints(*fields: str) -> list[Spec]:
    return [{"field": field, "title": label_of(field)} for field in fields]


# Kernels have the same color in all pictures of an op.
_HUE = {
    "field": "hue",
    "type": "ordinal",
    "scale": {"domain": list(range(MOST_HUES)), "range": "category"},
    "legend": None,
}
_LETTER = {
    "mark": {"type": "text", "fontWeight": 600},
    "encoding": {"text": {"field": "letter"}},
}
_INDEPENDENT = {"scale": {"color": "independent", "shape": "independent"}}


def _kernels(title: str) -> Spec:
    """The legend of letters: a bar for each kernel with its number of rows."""
    return {
        "title": {"text": title, "fontSize": 12, "fontWeight": 500},
        "transform": [
            {"calculate": f"{_IS_HATCHED} ? 1 : 0", "as": "is_hatched"},
            {"aggregate": [{"op": "count", "as": "all"},
                           {"op": "sum", "field": "is_hatched", "as": "hatched"}],
             "groupby": ["key", "hue"]},
            {"calculate": "datum.all - datum.hatched", "as": "count"},
            {"calculate": "datum.count + (datum.hatched ? ' + ' + datum.hatched : '')",
             "as": "words"},
        ],
        "width": 120,
        "height": {"step": 20},
        "encoding": {
            # Long labels are on the right: on the left they would move all pictures.
            "y": _channel("key", "nominal", axis={"grid": False, "orient": "right"}),
            "x": _channel("count", axis=None, scale={"range": [0, 60]}),
            "tooltip": _hints("key", "count", "hatched"),
        },
        "layer": [
            {"mark": "bar", "encoding": {"color": _HUE}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4},
                "encoding": {"text": {"field": "words"}},
            },
        ],
    }  # fmt: skip


CELL = 33  # widest column of a map, in pixels; a page makes them narrower where it is
_STATES = ("measured", "predicted by the time model", NEVER)  # of cells
_INEXACT = "interpolated, estimated or predicted"  # the second, where there are such cells
_IS_HATCHED = f"indexof({[PREDICTED, INTERPOLATED, ESTIMATED]}, datum.answer) >= 0"
_UNDECIDED = "FP8 is faster, its error is not measured"  # the fourth, where there are such cells
_OUTLINE: Spec = {"type": "rect", "fillOpacity": 0, "strokeOpacity": 0.35, "strokeDash": [2, 3]}
_HATCH: Spec = {"type": "rect", "style": "hatch"}
_RISING: Spec = {"type": "rect", "style": "undecided"}


def _map(op: Row, name: str, color: Spec, text: Spec) -> Spec:
    """A cell for each pair of sizes.

    It is hatched if it was not measured, the other way if undecided, an outline if nothing is
    known. Without a value for its color it has none.
    """
    x, y = op["axes"]
    known = [{"filter": "isValid(datum.kernel)"}]
    colored = [*known, {"filter": f"isValid(datum.{color['field']})"}]
    hatched = [{"filter": _IS_HATCHED}]
    undecided = [{"filter": f"datum.answer === '{UNDECIDED}'"}]
    layer: list[Spec] = [
        {"mark": _OUTLINE},
        {"mark": "rect", "encoding": {"color": color}, "transform": colored},
        {"mark": _HATCH, "transform": hatched},
        *([{"mark": _RISING, "transform": undecided}] if op["undecided"] else []),
        text | {"transform": [*known, *text.get("transform", ())]},
    ]
    transform = [
        {"impute": "kernel", "key": x, "groupby": [y], "value": None},
        {"impute": "kernel", "key": y, "groupby": [x], "value": None},
        {"calculate": f"isValid(datum.kernel) ? datum.note : '{NEVER}'", "as": "note"},
    ]
    titles = {"m": "m (rows)", "n": "n (columns of the weight)", "k": "k (summed over)"}
    titles["k"] = "k (columns)" if x == "m" else titles["k"]
    encoding = {
        "x": _channel(x, "ordinal", titles[x], axis={"labelAngle": -60, "grid": False}),
        "y": _channel(y, "ordinal", titles[y], axis={"grid": False}),
        "tooltip": _hints("m", *(["n"] if x == "n" else []), "k", "kernel", "us", "plain_us",
                          "speedup", "light", "row_err", "note"),
    }  # fmt: skip
    size = {"name": f"{name}_map", "width": {"step": CELL}, "height": {"step": 21}}
    cells = size | {"encoding": encoding, "layer": layer, "transform": transform}
    measured, predicted, never = _STATES
    states = [measured, _INEXACT if op["inexact"] else predicted, never]
    states += [_UNDECIDED] if op["undecided"] else []
    return {"vconcat": [cells, _states(states)], "resolve": _INDEPENDENT}


def _states(states: Sequence[str]) -> Spec:
    """The legend of the cells of a map."""
    is_state = [{"filter": f"datum.state === '{state}'"} for state in states]
    filled = {"mark": "rect", "encoding": {"color": {"value": _OF_MEASURED}}}
    marks: list[tuple[Spec, int]] = [
        (filled, 0),
        (filled, 1),
        ({"mark": _HATCH}, 1),
        ({"mark": _OUTLINE}, 2),
    ]
    if _UNDECIDED in states:
        marks += [(filled, 3), ({"mark": _RISING}, 3)]
    return {
        "data": {"values": [{"state": state} for state in states]},
        "width": CELL,
        "height": {"step": 21},
        "encoding": {
            "y": _channel("state", "nominal", None, sort=None,
                          axis={"grid": False, "orient": "right", "domain": False, "ticks": False})
        },
        "layer": [mark | {"transform": [is_state[place]]} for mark, place in marks],
    }  # fmt: skip


def _winners(op: Row) -> Spec:
    found = _map(op, "winners", _HUE, _LETTER)
    others = "hatched" if op["inexact"] else PREDICTED
    kernels = _kernels(f"Kernels, and shapes: measured + {others}")
    return found | {"vconcat": [*found["vconcat"], kernels]}


def _gains(op: Row) -> Spec:
    field = op["gain"]
    scale: Spec = {"range": "ramp", "clamp": True, "nice": False}
    scale |= {"domainMin": 1} if field == "speedup" else {"domain": [0, 1]}
    color = _channel(
        field, title=GAINS[field], scale=scale, legend={"orient": "top", "gradientLength": 180}
    )
    # "-", as in tables, where no gain is known.
    words = {"calculate": f"isValid(datum.{field}) ? format(datum.{field}, '.2f') : '-'",
             "as": "words"}  # fmt: skip
    number = {"mark": {"type": "text"}, "encoding": {"text": {"field": "words"}},
              "transform": [words]}  # fmt: skip
    return _map(op, "gains", color, number)


def _log(field: str, title: str, **more: Any) -> Spec:
    scale = {"type": "log", "nice": False, "padding": 12}
    axis = {"format": "~r", "labelOverlap": True, "tickCount": 8}
    return _channel(field, title=title, scale=scale | more.pop("scale", {}), axis=axis | more)


def _counted(what: str, x: str, y: str, without: str) -> Spec:
    """The number of points, and of those that are left out or hidden behind others."""
    return {
        "transform": [
            {"calculate": f"datum.{x} > 0 && datum.{y} > 0", "as": "is_drawn"},
            {"aggregate": [{"op": "count", "as": "here"}], "groupby": [x, y, "is_drawn"]},
            {"calculate": "datum.is_drawn ? datum.here : 0", "as": "drawn"},
            {"calculate": "datum.is_drawn ? datum.here - 1 : 0", "as": "behind"},
            {"aggregate": [{"op": "sum", "field": name, "as": name}
                           for name in ("here", "drawn", "behind")]},
            {"calculate": f"datum.drawn + ' {what}'"
                          " + (datum.behind ? ', ' + datum.behind + ' behind others' : '')"
                          f" + (datum.here > datum.drawn ? ', and ' + (datum.here - datum.drawn)"
                          f" + ' {without}' : '')", "as": "words"},
        ],
        "mark": {"type": "text", "align": "right", "baseline": "bottom", "dx": -6, "dy": -6},
        "encoding": {"x": {"value": "width"}, "y": {"value": "height"},
                     "text": {"field": "words"}},
    }  # fmt: skip


def _light() -> Spec:
    """Measured time against the least that FLOPs and bytes allow."""

    def bound(factor: int) -> Spec:
        ends = [{"op": "min", "field": "least_us", "as": "first"},
                {"op": "max", "field": "least_us", "as": "last"}]  # fmt: skip
        return {
            "transform": [
                {"aggregate": ends},
                {"calculate": "[datum.first, datum.last]", "as": "least_us"},
                {"flatten": ["least_us"]},
                {"calculate": f"{factor} * datum.least_us", "as": "us"},
            ],
            "mark": {"type": "line", "strokeDash": [1, 0] if factor == 1 else [5, 4]},
        }

    kind = _channel("kind", "nominal", "language", legend={"orient": "top"})
    points = {
        "mark": {"type": "point", "size": 30, "strokeWidth": 1.2, "opacity": 0.6},
        "encoding": {
            "color": kind | {"scale": {"range": "ordinal"}},
            "shape": kind,
            "tooltip": _hints("form", "m", "n", "k", "kernel", "us", "least_us", "row_err"),
        },
    }
    return {
        "width": _WIDTH,
        "height": 420,
        "encoding": {
            "x": _log("least_us", "roofline bound, microseconds"),
            "y": _log("us", "measured, microseconds"),
        },
        "layer": [
            points,
            bound(1),
            bound(LINE),
            _counted("times", "least_us", "us", "without a bound"),
        ],
    }


def _fronts(budgets: Sequence[str]) -> Spec:
    """Error against time at one shape; the line connects the Pareto front."""
    limits = [{"row_err": float(word), "words": f"budget {word}"}
              for word in budgets if word != "none" and float(word) > 0]  # fmt: skip
    x = _log("us", "microseconds", scale={"type": "linear", "zero": False, "padding": 24})
    y = _log("row_err", "worst row error")
    rules = [
        {"mark": {"type": "rule", "strokeDash": [3, 4], "opacity": 0.6}},
        {"mark": {"type": "text", "align": "left", "dx": 4, "dy": -7},
         "encoding": {"x": {"value": 0}, "text": {"field": "words"}}},
    ]  # fmt: skip
    size = {"condition": {"test": "datum.is_known", "value": 330}, "value": 0}
    width = {"condition": [{"test": "!datum.is_known", "value": 0},
                           {"test": "datum.front", "value": 2.5}], "value": 0.6}  # fmt: skip
    circle = {
        "mark": "circle",
        "encoding": {"color": _HUE, "size": size, "strokeWidth": width},
    }
    # Without a known error one row stands for all, and is not drawn: Vega warns of scales of none.
    points = {
        "width": _WIDTH,
        "height": 380,
        "layer": [
            {"data": {"values": limits}, "encoding": {"y": y}, "layer": rules},
            {"transform": [
                 {"filter": "datum.known ? datum.is_known : datum.place === 1"},
                 {"calculate": "datum.is_known ? datum.row_err : 0.05", "as": "row_err"},
                 {"calculate": "datum.is_known ? datum.letter : ''", "as": "letter"},
                 {"calculate": "datum.known ? '' : datum.timed ? 'no errors measured'"
                               " : 'nothing measured'", "as": "words"}],
             "encoding": {"x": x, "y": y},
             "layer": [
                {"transform": [{"filter": "datum.front || !datum.is_known"}],
                 "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
                 "encoding": {"order": {"field": "us"}}},
                {"encoding": {"tooltip": _hints("kernel", "us", "row_err", "least_us")},
                 "layer": [circle, _LETTER]},
                {"mark": {"type": "text", "fontSize": 14},
                 "encoding": {"text": {"field": "words"}}}]},
            {"transform": [{"filter": "datum.is_here"}],
             "layer": [_counted("kernels", "us", "row_err", "without a known error")]},
        ],
    }  # fmt: skip
    letters = _kernels("Letters of kernels")
    letters["transform"] = [{"filter": "datum.is_here"}, *letters["transform"]]
    transform = [
        {"calculate": "datum.form === form && datum.shape === shape", "as": "is_here"},
        {"calculate": "datum.is_here && datum.row_err > 0", "as": "is_known"},  # of a logarithm
        {"joinaggregate": [{"op": "sum", "field": "is_here", "as": "timed"},
                           {"op": "sum", "field": "is_known", "as": "known"}]},
        {"window": [{"op": "row_number", "as": "place"}]},
    ]  # fmt: skip
    return {"vconcat": [points, letters], "transform": transform, "resolve": _INDEPENDENT}


def _accuracy() -> Spec:
    """The error of each arithmetic on each distribution; param `error` names the column."""
    legend = {"orient": "top", "format": "~r", "gradientLength": 180, "values": [0.001, 0.01, 0.1]}
    scale = {"type": "log", "range": "heatmap", "clamp": True, "domain": [0.001, 0.3]}
    return {
        "name": "errors_map",
        "transform": [{"calculate": "datum[error]", "as": "shown"}],
        "width": {"step": 52},
        "height": {"step": 22},
        "encoding": {
            "x": _channel("distribution", "nominal", "distribution",
                          sort=[f"X{i}" for i in range(1, 33)],
                          axis={"labelAngle": 0, "grid": False}),
            "y": _channel("arithmetic", "nominal", None, axis={"grid": False, "orient": "right"}),
            "tooltip": _hints("arithmetic", "distribution", "typical_row_err", "row_err",
                              "row_p99", "mean_rel_err", "mean_shift", "shapes"),
        },
        "layer": [
            {"mark": "rect", "encoding": {
                "color": _channel("shown", title="row error", scale=scale, legend=legend)}},
            {"mark": "text", "encoding": {"text": {"field": "shown", "format": ".3f"}}},
        ],
    }  # fmt: skip


def _shares(states: Sequence[str], title: str) -> Spec:
    """Of each part the share in each state, whose count is in a column of its name."""
    order = f"indexof({list(states)!r}, datum.state)"
    stack = {"stack": "count", "as": ["from", "to"], "groupby": ["part"], "offset": "normalize",
             "sort": [{"field": "place"}]}  # fmt: skip
    return {
        "width": _WIDTH,
        "height": {"step": 26},
        "transform": [{"fold": list(states), "as": ["state", "count"]},
                      {"filter": "datum.count > 0"},
                      {"calculate": order, "as": "place"}, stack,
                      {"calculate": "(datum.from + datum.to) / 2", "as": "middle"},
                      {"calculate": "datum.to - datum.from > 0.3 ? datum.count + ' ' + datum.state "
                                    ": datum.to - datum.from > 0.06 ? datum.count : ''",
                       "as": "words"}],
        "encoding": {"y": _channel("part", "nominal", None, sort=None, axis={"grid": False})},
        "layer": [
            {"mark": "bar", "encoding": {
                "x": _channel("from", title=title, axis={"format": "%", "tickCount": 10}),
                "x2": {"field": "to"},
                "color": _channel("state", "nominal", None, sort=list(states),
                                  scale={"domain": list(states), "range": "category"},
                                  legend={"orient": "top", "columns": 2}),
                "tooltip": _hints("part", "state", "count")}},
            {"mark": "text", "encoding": {"x": {"field": "middle", "type": "quantitative"},
                                          "text": {"field": "words"}}},
        ],
    }  # fmt: skip


# --- pictures


def sizes_of(row: Row) -> str:
    """Sizes of a row's problem in words."""
    return " ".join(f"{name}={row[name]}" for name in "mnk" if row[name] is not None)


def by_answer(choices: Iterable[Row]) -> list[Row]:
    """Choices with equal answers at a problem as one row, whose `budgets` names all of them."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in choices:
        key = tuple(row[name] for name in ("op", "form", "m", "n", "k", "kernel", "note"))
        found.setdefault(key, []).append(row)
    return [rows[0] | {"budgets": " ".join(row["budget"] for row in rows)}
            for rows in found.values()]  # fmt: skip


def _select(name: str, title: str, value: Any, options: Iterable[Any], **more: Any) -> Spec:
    bind = {"input": "select", "name": f"{title} ", "options": list(options), **more}
    return {"name": name, "value": value, "bind": bind}


def tables_of(survey: Survey, op: Row) -> dict[str, list[Row]]:
    """An op's rows of each table that pictures show."""
    choices, predicted, times, errors = (
        [row for row in rows if row["op"] == op["op"]]
        for rows in (survey.choices, survey.predicted, survey.times, survey.errors)
    )
    answers = [*by_answer(choices), *by_answer(predicted)]
    return {"choices": answers, "times": times, "errors": errors}


def op_pictures(survey: Survey, op: Row) -> tuple[Spec, dict[str, Spec]]:
    """The params of an op's pictures, and their views by name."""
    tables = tables_of(survey, op)
    choices = tables["choices"]
    forms = [form for form, _ in Counter(row["form"] for row in choices).most_common()]
    shapes = sorted(tables["times"], key=lambda row: (row["m"], row["n"] or 0, row["k"]))
    first = sizes_of(dict(zip("mnk", op["shape"], strict=True)))
    by_m = op["axes"][0] != "m"
    params = [
        _select("form", "Form", op["form"], forms),
        *([_select("m", "m", op["m"], sorted({row["m"] for row in choices}))] if by_m else []),
        _select("budget", "Budget", op["budget"], survey.budgets),
        _select("shape", "Shape", first, dict.fromkeys(map(sizes_of, shapes))),
        _select("error", "Error of", "typical_row_err", ["typical_row_err", "row_err"],
                labels=["the median shape", "the worst shape"]),
    ]  # fmt: skip
    here = ["datum.form === form"]
    chosen = [*here, "indexof(split(datum.budgets, ' '), budget) >= 0"]
    chosen += ["datum.m === m"] if by_m else []
    views = {
        "winners": _view("choices", chosen, _winners(op)),
        "gains": _view("choices", chosen, _gains(op)),
        "light": _view("times", here, _light()),
        "fronts": _view("times", [], _fronts(survey.budgets)),
    }
    if tables["errors"]:
        views["accuracy"] = _view("errors", [], _accuracy())
    return {"$schema": _SCHEMA, "params": params}, views


def held_pictures() -> dict[str, Spec]:
    """The views of the coverage (problems) and the freshness (rows of the database) of all ops."""
    coverage, freshness = (
        _shares(states, f"share of {what}")
        for states, what in ((COVERED, "problems"), (COUNTED, "rows"))
    )
    rest = {"calculate": "datum.problems - datum.covered - datum.untimed", "as": "partly"}
    untimed = {"calculate": "datum.untimed", "as": "not timed"}
    part = {"calculate": "datum.part + ', ' + datum.of", "as": "part"}
    coverage["transform"] = [rest, untimed, *coverage["transform"]]
    freshness["transform"] = [part, *freshness["transform"]]
    is_op = "indexof(datum.part, 'suite ') !== 0"  # rows of suites are also rows of ops
    return {
        "coverage": _view("holdings", ["isValid(datum.covered)"], coverage),
        "freshness": _view("holdings", [is_op], freshness),
    }


def columns_of(survey: Survey) -> dict[str, int]:
    """The largest number of columns of an op's maps, whatever form and m are selected."""
    found: dict[tuple[str, Any, Any], set[Any]] = {}
    x_of = {op["op"]: op["axes"][0] for op in survey.ops}
    for row in survey.choices:
        x = x_of[row["op"]]
        place = row["op"], row["form"], None if x == "m" else row["m"]
        found.setdefault(place, set()).add(row[x])
    return {op: max(len(its) for (of, *_), its in found.items() if of == op) for op in x_of}


def page_specs(survey: Survey) -> dict[str, Spec]:
    """One spec with all pictures of each op, and under "" that of all ops."""

    def titled(views: Mapping[str, Spec], *names: str) -> list[Spec]:
        return [{"title": {"text": TITLES[name]}, **views[name]} for name in names]

    specs = {}
    for op in survey.ops:
        base, views = op_pictures(survey, op)
        concat = titled(views, *views)
        specs[op["op"]] = base | {"description": f"Pictures of {op['op']}", "vconcat": concat}
    views = held_pictures()
    specs[""] = {
        "$schema": _SCHEMA,
        "description": "Coverage and staleness",
        "vconcat": titled(views, *views),
    }
    more = {"resolve": _INDEPENDENT, "spacing": 40}
    return {name: spec | more for name, spec in specs.items()}


def vl_convert() -> Any:
    """The module that renders Vega-Lite.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import vl_convert as module
    except ImportError as error:
        raise UnsupportedError(
            "pictures are drawn with vl-convert-python, which is not installed here; "
            "pip install '.[explore]' in a clone of lokakern"
        ) from error
    return module


@functools.cache  # it takes seconds
def bundle() -> str:
    """JavaScript of Vega, Vega-Lite and vega-embed, as ``vegaEmbed``."""
    text: str = vl_convert().javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_VERSION)
    return text


def save_pictures(survey: Survey, folder: Path, progress: Progress) -> int:
    """Write a PNG of every picture as a page shows it first, in the light theme.

    Returns:
        The number of pictures.

    Raises:
        DatabaseError: A file cannot be written.
        UnsupportedError: vl-convert is not installed.
    """
    drawer = vl_convert()
    pictures = list(_pictures(survey))
    progress.begin("drawing", len(pictures))
    for name, spec in pictures:
        whole = spec | {"config": config_of("light"), "padding": 12}
        png = drawer.vegalite_to_png(whole, vl_version=_VERSION, scale=2)
        path = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png)
        except OSError as error:
            raise DatabaseError(f"{str(path)!r} cannot be written: {error.strerror}") from error
        progress.step(name)
    return len(pictures)


def _pictures(survey: Survey) -> Iterator[tuple[str, Spec]]:
    """Names and whole specs of the pictures that have rows."""
    on = f"{survey.device.product}, {survey.regime}"
    for op in survey.ops:
        base, views = op_pictures(survey, op)
        base["datasets"] = tables_of(survey, op)
        values = {param["name"]: param["value"] for param in base["params"]}
        at = f"m={op['m']}, " if "m" in values else ""
        chosen = f"{op['form']}, {at}budget {op['budget']}, {on}"
        below = {
            "winners": chosen,
            "gains": chosen,
            "light": f"{op['form']}, {on}; lines: the bound, and {LINE} times that",
            "fronts": f"{op['form']}, {values['shape']}, {on}",
        }
        if not any(row["row_err"] for row in survey.times
                   if (row["op"], row["form"]) == (op["op"], op["form"])):  # fmt: skip
            del views["fronts"]
        for error, column in (("typical", "typical_row_err"), ("worst", "row_err")):
            if "accuracy" in views:
                shown = {"params": [{"name": "error", "value": column}]}
                views[error] = views["accuracy"] | shown
        views.pop("accuracy", None)
        for name, view in views.items():
            title = {"text": f"{op['op']}: {TITLES[name][0].lower()}{TITLES[name][1:]}",
                     "subtitle": below.get(name, on)}  # fmt: skip
            yield f"{op['op']}-{name}", base | view | {"title": title}
    data = {"$schema": _SCHEMA, "datasets": {"holdings": survey.holdings}}
    for name, view in held_pictures().items():
        yield name, data | view | {"title": {"text": TITLES[name], "subtitle": on}}
