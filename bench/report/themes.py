"""Colors of pictures, light and dark."""

from __future__ import annotations

from typing import Any

_FONT = "system-ui, sans-serif"
# Tints behind letters and numbers, which have a contrast of at least 4.5 to all of them; `ordinal`
# are for points, with at least 3 to the ground.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "ground": "#ffffff", "text": "#1c2024", "faint": "#5f6770", "line": "#d9dde2",
        "none": "#f4f6f8", "ramp": ["#f3f6fa", "#6ea8e0"], "heatmap": ["#f2f8ec", "#e39a52"],
        "category": ["#b9c2cc", "#9ecae9", "#ffc98a", "#a8dba2", "#f5aeb0", "#d3bdf0", "#e3cf7a",
                     "#8fd6cf", "#f3b5d8", "#cdb49a"],
        "ordinal": ["#3b444d", "#0b57d0", "#b34a00", "#146c37", "#8a2be2", "#a3195b"],
    },
    "dark": {
        "ground": "#14171a", "text": "#e6e9ec", "faint": "#a3abb3", "line": "#343a41",
        "none": "#1e2327", "ramp": ["#222a33", "#1f69b3"], "heatmap": ["#1f2a20", "#94520e"],
        "category": ["#4a535c", "#205f8f", "#80500f", "#2b6b34", "#8a3438", "#5e4390", "#655a10",
                     "#16665f", "#83386a", "#6a513a"],
        "ordinal": ["#c5ccd3", "#9ec1ff", "#ffb27a", "#74d99f", "#d0a6ff", "#ff9ec6"],
    },
}  # fmt: skip


def config_of(theme: str) -> dict[str, Any]:
    """How Vega-Lite draws everything, in "light" or "dark"."""
    colors = THEMES[theme]
    words = {"labelColor": colors["text"], "titleColor": colors["text"], "labelFont": _FONT,
             "titleFont": _FONT, "titleFontWeight": 500, "labelFontSize": 12, "titleFontSize": 13,
             "aria": False}  # fmt: skip
    return {
        "background": colors["ground"],
        "view": {"stroke": None},
        "font": _FONT,
        "axis": words | {"gridColor": colors["line"], "domainColor": colors["faint"],
                         "tickColor": colors["faint"], "labelLimit": 420},
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
        "bar": {"stroke": colors["ground"]},
        "mark": {"aria": False},
    }  # fmt: skip
