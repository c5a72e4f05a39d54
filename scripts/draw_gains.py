"""Draw docs/gains.svg: speed-up and row error of dispatch's choice for published layers.

    python scripts/draw_gains.py

Reads the shipped measurements of an NVIDIA H200; needs vl-convert (extra `explore`), no GPU. Each
bar is one layer shape of `lokakern.workloads.published_models` at m = 8192: the time of the
unquantized kernel divided by the time of the choice within the budget, weight prepared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lokakern.bench.report.charts import vl_convert
from lokakern.bench.report.survey import USUAL_BUDGET, survey_of
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.paths import shipped_databases
from lokakern.selection import dispatcher
from lokakern.workloads.published_models import LAYERS

PLACE = Path(__file__).resolve().parent.parent / "docs" / "gains.svg"
DEVICE = "NVIDIA H200"
M = 8192
MODELS = {
    "A": "DLRM", "B": "Wukong S", "C": "Wukong M", "D": "Wukong L", "E": "Wukong XL",
    "F": "DCNv2", "H": "Wukong public", "I": "HSTU", "L": "InterFormer",
}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """The fastest choice for each layer shape, over the forms of a prepared weight."""
    facts = load_snapshot(shipped_databases())
    dispatcher.use_snapshot(facts)
    survey = survey_of(facts, dispatcher.device_named(DEVICE), (USUAL_BUDGET,))
    found = []
    for n, k, model in sorted(
        {
            (layer.n, layer.k, MODELS[layer.ids[0][0]])
            for layer in LAYERS
            if layer.batch == 1 and M in layer.m + tuple(m for _, m in layer.sizes((M,)))
        }
    ):
        choices = [
            row
            for row in survey.choices
            if (row["op"], row["m"], row["n"], row["k"]) == ("gemm", M, n, k)
            and row["budget"] == f"{USUAL_BUDGET:g}" and " prepared" in row["form"]
            and row["answered"] and row["speedup"] is not None
        ]  # fmt: skip
        if choices:
            best = min(choices, key=lambda row: row["us"])
            is_plain = best["kernel"] in ("torch.bf16", "torch.bf16_padded")
            chosen = "bf16 is kept" if is_plain else "FP8 is chosen"
            found.append(best | {"layer": f"{model}  {n} x {k}", "chosen": chosen})
    return sorted(found, key=lambda row: -row["speedup"])


def picture(data: list[dict[str, Any]]) -> dict[str, Any]:
    """A Vega-Lite chart: bars of speed-ups above, points of row errors below."""
    x = {"field": "layer", "type": "nominal", "sort": [row["layer"] for row in data]}
    color = {
        "field": "chosen",
        "type": "nominal",
        "scale": {"domain": ["FP8 is chosen", "bf16 is kept"], "range": ["#2f6db3", "#b5b5b5"]},
        "legend": {"title": None, "orient": "top"},
    }
    quantity = {"type": "quantitative"}
    gain = {"field": "speedup", **quantity, "title": "times as fast as bf16"}
    error = {"field": "row_err", **quantity, "title": "row error"}
    budget: dict[str, Any] = {"datum": USUAL_BUDGET}
    words = {"type": "text", "text": f"budget {USUAL_BUDGET:g}", "align": "right", "dy": -7}
    return {
        "data": {"values": data},
        "background": "white",
        "padding": 12,
        "title": f"Layers of published recommendation models, m = {M}, {DEVICE}",
        "config": {"font": "sans-serif", "view": {"stroke": None}},
        "spacing": 14,
        "vconcat": [
            {
                "width": {"step": 21},
                "height": 200,
                "layer": [
                    {
                        "mark": "bar",
                        "encoding": {"x": {**x, "axis": None}, "y": gain, "color": color},
                    },
                    {
                        "mark": {"type": "text", "dy": -6, "fontSize": 9},
                        "encoding": {
                            "x": {**x, "axis": None},
                            "y": gain,
                            "text": {"field": "speedup", "format": ".2f"},
                        },
                    },
                ],
            },
            {
                "width": {"step": 21},
                "height": 110,
                "layer": [
                    {
                        "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
                        "encoding": {
                            "x": {**x, "title": None, "axis": {"labelAngle": -60}},
                            "y": error,
                            "color": color,
                        },
                    },
                    {
                        "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#b03030"},
                        "encoding": {"y": budget},
                    },
                    {
                        "data": {"values": [{}]},  # once, not for each row
                        "mark": words | {"color": "#b03030", "x": "width"},
                        "encoding": {"y": budget},
                    },
                ],
            },
        ],
    }


def main() -> None:
    """Write the picture, and print the rows that it shows."""
    data = rows()
    for row in data:
        print(f"{row['layer']:26} {row['kernel']:42} {row['speedup']:5} {row['row_err']}")
    PLACE.write_text(vl_convert().vegalite_to_svg(picture(data), vl_version="6.4"), "utf-8")


if __name__ == "__main__":
    main()
