"""Pictures of a survey, in Vega-Lite: the same for a page, which draws them itself, and for PNG."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lokakern.bench.report.themes import THEMES, config_of
from lokakern.errors import DatabaseError, UnsupportedError

if TYPE_CHECKING:
    from lokakern.bench.report.survey import Row, Survey
    from lokakern.progress import Progress

Spec = dict[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, which nobody opens
_VERSION = "6.4"  # of Vega-Lite
HUES = len(THEMES["light"]["category"])
LINE = 4  # times the least: the dashed line beside the solid one of the least
GAINS = {"speedup": "times as fast as unquantized", "light": "share of the speed of light"}


def _spec(**parts: Any) -> Spec:
    return {"$schema": _SCHEMA, "data": {"name": "rows"}, **parts}


def _channel(field: str, kind: str = "quantitative", title: str | None = None, **more: Any) -> Spec:
    return {"field": field, "type": kind, "title": title, **more}


_HINTS = {
    "op": "op", "form": "form", "m": "m", "n": "n", "k": "k", "kernel": "kernel", "us": "us",
    "least_us": "least us", "plain_us": "unquantized us", "speedup": "times as fast",
    "light": "share of speed of light", "row_err": "row error", "note": "note",
    "arithmetic": "arithmetic", "distribution": "distribution",
    "typical_row_err": "median shape's row error", "row_p99": "99 % of rows",
    "mean_rel_err": "mean relative error", "mean_shift": "mean shift", "shapes": "shapes",
    "part": "part", "state": "state", "count": "count",
}  # fmt: skip


def _hints(*fields: str) -> list[Spec]:
    return [{"field": field, "title": _HINTS[field]} for field in fields]


def _map_axes(op: Row) -> Spec:
    x, y = op["axes"]
    titles = {"m": "m (rows)", "n": "n (columns of the weight)", "k": "k (summed over)"}
    titles["k"] = "k (columns)" if x == "m" else titles["k"]
    return {
        "x": _channel(x, "ordinal", titles[x], axis={"labelAngle": -60, "grid": False}),
        "y": _channel(y, "ordinal", titles[y], axis={"grid": False}),
        "tooltip": _hints("m", *(["n"] if y == "k" and x == "n" else []), "k", "kernel", "us",
                          "plain_us", "speedup", "light", "row_err", "note"),
    }  # fmt: skip


# The same for a kernel in all pictures of an op; who is who is said by letters beside them.
_HUE = {
    "field": "hue",
    "type": "ordinal",
    "scale": {"domain": list(range(HUES)), "range": "category"},
    "legend": None,
}
_CELL = {"width": {"step": 33}, "height": {"step": 21}}


def winners(op: Row) -> Spec:
    """Which kernel dispatch takes at each shape, by its letter."""
    return _spec(
        **_CELL,
        encoding=_map_axes(op),
        layer=[
            {"mark": "rect", "encoding": {"color": _HUE}},
            {
                "mark": {"type": "text", "fontWeight": 600},
                "encoding": {"text": {"field": "letter"}},
            },
        ],
    )


def gains(op: Row) -> Spec:
    """What that gains at each shape, in numbers."""
    field = op["gain"]
    scale: Spec = {"range": "ramp", "clamp": True, "nice": False}
    scale |= {"domainMin": 1} if field == "speedup" else {"domain": [0, 1]}
    color = _channel(
        field, title=GAINS[field], scale=scale, legend={"orient": "top", "gradientLength": 180}
    )
    return _spec(
        **_CELL,
        transform=[{"filter": f"isValid(datum.{field})"}],
        encoding=_map_axes(op),
        layer=[
            {"mark": "rect", "encoding": {"color": color}},
            {"mark": "text", "encoding": {"text": {"field": field, "format": ".2f"}}},
        ],
    )


def _log(field: str, title: str, **more: Any) -> Spec:
    scale = {"type": "log", "nice": False, "padding": 12}
    axis = {"format": "~r", "labelOverlap": True, "tickCount": 8}
    return _channel(field, title=title, scale=scale | more.pop("scale", {}), axis=axis | more)


def light(op: Row) -> Spec:
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
    return _spec(
        width="container",
        height=420,
        encoding={
            "x": _log("least_us", "the least possible, microseconds"),
            "y": _log("us", "measured, microseconds"),
        },
        layer=[points, bound(1), bound(LINE)],
    )


def fronts(op: Row, budgets: Sequence[str]) -> Spec:
    """Error against time at one shape; what no other kernel beats in both is on the line."""
    limits = [{"row_err": float(word), "words": f"budget {word}"}
              for word in budgets if word != "none" and float(word) > 0]  # fmt: skip
    x = _log("us", "microseconds", scale={"type": "linear", "zero": False, "padding": 24})
    y = _log("row_err", "worst row error")
    hints = _hints("kernel", "us", "row_err", "least_us")
    seen = [{"filter": "isValid(datum.row_err) && datum.row_err > 0"}]  # of a logarithm
    return _spec(
        width="container",
        height=380,
        layer=[
            {"data": {"values": limits}, "encoding": {"y": y},
             "layer": [{"mark": {"type": "rule", "strokeDash": [3, 4], "opacity": 0.6}},
                       {"mark": {"type": "text", "align": "left", "dx": 4, "dy": -7},
                        "encoding": {"x": {"value": 0}, "text": {"field": "words"}}}]},
            {"transform": [*seen, {"filter": "datum.front"}],
             "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
             "encoding": {"x": x, "y": y, "order": {"field": "us"}}},
            {"transform": seen, "encoding": {"x": x, "y": y, "tooltip": hints},
             "layer": [
                 {"mark": {"type": "circle", "size": 330},
                  "encoding": {
                      "color": _HUE,
                      "strokeWidth": {"condition": {"test": "datum.front", "value": 2.5},
                                      "value": 0.6}}},
                 {"mark": {"type": "text", "fontWeight": 600},
                  "encoding": {"text": {"field": "letter"}}}]},
        ],
    )  # fmt: skip


def accuracy(field: str, title: str) -> Spec:
    """An error of each arithmetic on each distribution."""
    return _spec(
        width={"step": 52},
        height={"step": 22},
        encoding={
            "x": _channel("distribution", "nominal", "distribution",
                          sort=[f"X{i}" for i in range(1, 33)],
                          axis={"labelAngle": 0, "grid": False}),
            "y": _channel("arithmetic", "nominal", None, axis={"grid": False}),
            "tooltip": _hints("arithmetic", "distribution", "typical_row_err", "row_err",
                              "row_p99", "mean_rel_err", "mean_shift", "shapes"),
        },
        layer=[
            {"mark": "rect", "encoding": {
                "color": _channel(field, title=title,
                                  scale={"type": "log", "range": "heatmap", "clamp": True,
                                         "domain": [0.001, 0.3]},
                                  legend={"orient": "top", "format": "~r", "gradientLength": 180,
                                          "values": [0.001, 0.01, 0.1]})}},
            {"mark": "text", "encoding": {"text": {"field": field, "format": ".3f"}}},
        ],
    )  # fmt: skip


def shares(states: Sequence[str], title: str, parts: int) -> Spec:
    """Of each part how much is in each state, in counts and widths."""
    order = f"indexof({list(states)!r}, datum.state)".replace('"', "'")
    stack = {"stack": "count", "as": ["from", "to"], "groupby": ["part"], "offset": "normalize",
             "sort": [{"field": "place"}]}  # fmt: skip
    return _spec(
        width="container",
        height=26 * parts,  # Vega-Lite fits no width beside a height in steps
        transform=[{"filter": "datum.count > 0"}, {"calculate": order, "as": "place"}, stack,
                   {"calculate": "(datum.from + datum.to) / 2", "as": "middle"},
                   {"calculate": "datum.to - datum.from > 0.3 ? datum.count + ' ' + datum.state : "
                                 "datum.to - datum.from > 0.06 ? datum.count : ''",
                    "as": "words"}],
        encoding={"y": _channel("part", "nominal", None, sort=None, axis={"grid": False})},
        layer=[
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
    )  # fmt: skip


COVERED = ("covered", "partly", "not timed")  # by all kernels that take a problem, some, none
FRESH = ("fresh", "usable", "stale", "older")


def specs_of(survey: Survey) -> dict[str, dict[str, Spec]]:
    """Pictures by op, and under "" those of all ops."""
    found: dict[str, dict[str, Spec]] = {
        op["op"]: {
            "winners": winners(op),
            "gains": gains(op),
            "light": light(op),
            "fronts": fronts(op, survey.budgets),
            "typical": accuracy("typical_row_err", TITLES["typical"]),
            "worst": accuracy("row_err", TITLES["worst"]),
        }
        for op in survey.ops
    }
    parts = {name: len({row["part"] for row in rows}) for name, rows in held_rows(survey).items()}
    found[""] = {
        "coverage": shares(COVERED, "share of problems", parts["coverage"]),
        "freshness": shares(FRESH, "share of rows", parts["freshness"]),
    }
    return found


def held_rows(survey: Survey) -> dict[str, list[Row]]:
    """Rows for the pictures of what is held: of problems, and of rows of times and errors."""
    coverage, freshness = [], []
    for row in survey.holdings:
        if row["covered"] is not None:
            rest = row["problems"] - row["covered"] - row["untimed"]
            counts = zip(COVERED, (row["covered"], rest, row["untimed"]), strict=True)
            coverage += [{"part": row["part"], "state": word, "count": n} for word, n in counts]
        if not row["part"].startswith("suite "):  # whose rows are those of ops
            part = {"part": f"{row['part']}, {row['of']}"}
            freshness += [part | {"state": word, "count": row[word]} for word in FRESH]
    return {"coverage": coverage, "freshness": freshness}


def rows_shown(survey: Survey, op: Row) -> dict[str, list[Row]]:
    """Rows of an op's pictures as a page shows them first."""

    def picked(rows: Sequence[Row], **wanted: Any) -> list[Row]:
        return [row for row in rows if all(row[name] == wanted[name] for name in wanted)]

    m, n, k = op["shape"]
    of_op = {"op": op["op"], "form": op["form"]}
    choices = picked(survey.choices, **of_op, budget=op["budget"])
    choices = picked(choices, m=op["m"]) if op["axes"] == ["n", "k"] else choices
    errors = picked(survey.errors, op=op["op"])
    return {
        "winners": choices,
        "gains": choices,
        "light": picked(survey.times, **of_op),
        "fronts": picked(survey.times, **of_op, m=m, n=n, k=k),
        "typical": errors,
        "worst": errors,
    }


def vl_convert() -> Any:
    """The module that draws.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import vl_convert as module
    except ImportError as error:
        raise UnsupportedError(
            "pictures are drawn with vl-convert-python, which is not installed here; "
            "pip install 'lokakern[explore]'"
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
        How many there are.

    Raises:
        DatabaseError: A file cannot be written.
        UnsupportedError: vl-convert is not installed.
    """
    drawer = vl_convert()
    pictures = list(_pictures(survey))
    progress.begin("drawing", len(pictures))
    for name, title, spec, rows in pictures:
        whole = spec | {"data": {"values": rows}, "config": config_of("light"), "padding": 12,
                        "title": title}  # fmt: skip
        if whole.get("width") == "container":
            whole["width"] = 860
        png = drawer.vegalite_to_png(whole, vl_version=_VERSION, scale=2)
        path = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png)
        except OSError as error:
            raise DatabaseError(f"{str(path)!r} cannot be written: {error.strerror}") from error
        progress.step(name)
    return len(pictures)


TITLES = {
    "winners": "Winning kernel",
    "gains": "What it gains",
    "light": "Measured time against the least possible",
    "fronts": "Error against time",
    "typical": "Row error at the median shape",
    "worst": "Row error at the worst shape",
    "coverage": "Problems of which every kernel was timed",
    "freshness": "Rows that are as new as their kernels",
}


def _pictures(survey: Survey) -> Iterator[tuple[str, Spec, Spec, list[Row]]]:
    """Names, titles, pictures and rows; of those that have rows."""
    specs = specs_of(survey)
    on = f"{survey.device.product}, {survey.regime}"
    for op in survey.ops:
        m, n, k = op["shape"]
        sizes = f"m={m} n={n} k={k}" if n is not None else f"m={m} k={k}"
        at = f"m={op['m']}, " if op["axes"] == ["n", "k"] else ""
        chosen = f"{op['form']}, {at}budget {op['budget']}, {on}"
        below = {
            "winners": chosen,
            "gains": chosen,
            "light": f"{op['form']}, {on}; lines: the least, and {LINE} times that",
            "fronts": f"{op['form']}, {sizes}, {on}",
        }
        for name, rows in rows_shown(survey, op).items():
            if name == "fronts":
                rows = [row for row in rows if row["row_err"] is not None]
            if rows:
                who = sorted({row["key"] for row in rows}) if name in ("winners", "fronts") else []
                title = {"text": f"{op['op']}: {TITLES[name][0].lower()}{TITLES[name][1:]}",
                         "subtitle": [below.get(name, on), *who]}  # fmt: skip
                yield f"{op['op']}-{name}", title, specs[op["op"]][name], rows
    for name, rows in held_rows(survey).items():
        yield name, {"text": TITLES[name], "subtitle": on}, specs[""][name], rows
