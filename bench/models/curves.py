"""Loss curves: JSON lines, and a plot where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lokakern.bench.models.learning import Run

SMOOTHED = 50  # points of a curve: a step's loss is mostly noise


def save_curves(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Write the runs into a folder.

    Args:
        runs: Of all arms and seeds.
        folder: Made if it is not there.
        title: Above the plot.

    Returns:
        The files: ``runs.jsonl`` with one line for each run, and ``loss.png``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "runs.jsonl"
    lines.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs), encoding="utf-8")
    trained = [run for run in runs if run.losses]
    if not trained or importlib.util.find_spec("matplotlib") is None:
        return [lines]
    return [lines, _plot(trained, folder / "loss.png", title)]


def smoothed(losses: Sequence[float], points: int = SMOOTHED) -> tuple[list[float], list[float]]:
    """Means over equal runs of steps: the steps in their middles, and the means."""
    width = max(1, len(losses) // points)
    pieces = [losses[start : start + width] for start in range(0, len(losses), width)]
    middles = [place * width + (len(piece) - 1) / 2 for place, piece in enumerate(pieces)]
    return middles, [sum(piece) / len(piece) for piece in pieces]


def _plot(runs: Sequence[Run], path: Path, title: str) -> Path:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    ordered = sorted(runs, key=lambda run: run.arm)
    for place, (arm, mine) in enumerate(itertools.groupby(ordered, lambda run: run.arm)):
        for number, run in enumerate(mine):
            axes.plot(*smoothed(run.losses), color=f"C{place}", lw=1, alpha=0.8,
                      label=arm if number == 0 else None)  # fmt: skip
    axes.set(xlabel="step", ylabel="log loss (nats), mean over neighboring steps", title=title)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
