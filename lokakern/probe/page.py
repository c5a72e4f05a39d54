"""A Probe's report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lokakern.render.html import rendered

SAFETIES = ("safe", "undecided", "unsafe")
SPEEDS = ("fast", "tie", "slow", "not timed")


def page_of(content: Mapping[str, Any]) -> str:
    """HTML of what `ProbeReport.content` gives, or of its JSON read back.

    Names of sites, kernels and files are anybody's: all are escaped, and the page allows itself
    nothing from elsewhere.
    """
    verdicts = [{**v, "numbers": _numbers(v), "speed": v["speed"] or SPEEDS[-1]}
                for v in content["verdicts"]]  # fmt: skip
    counts = Counter(v["safety"] for v in verdicts)
    return rendered(
        Path(__file__).with_name("page.html"),
        {"number": _number, "evidence": _evidence},
        report=content,
        verdicts=verdicts,
        counts=[(safety, counts[safety]) for safety in SAFETIES],
        gemms=list(dict.fromkeys(v["gemm"] for v in verdicts)),
        safeties=SAFETIES,
        speeds=SPEEDS,
    )


def _numbers(verdict: Mapping[str, Any]) -> list[float | None]:
    """Error and time of the scales to take, beside bfloat16's; of none, the smallest error."""
    classes = verdict["classes"]
    best = next((c for c in classes if c["scales"] == verdict["best"]), None)
    errors = [c["row_err"] for c in classes if c["row_err"] is not None]
    return [
        best["row_err"] if best else min(errors, default=None),
        verdict["bf16_err"],
        best["latency_us"] if best else None,
        verdict["bf16_us"],
        verdict["saved_us"] or None,
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3g}"


def _evidence(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, those of operands after the operand's name."""
    rows = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += [(f"{name} {inner}", words) for inner, words in _evidence(value)]
        elif isinstance(value, str):
            rows += [(name, value)] if value else []
        else:
            rows.append((name, _number(value)))
    return [(name.replace("_", " "), words) for name, words in rows]
