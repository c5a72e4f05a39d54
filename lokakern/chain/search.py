"""The Pareto front of times and errors over a chain of layers: pure search, no kernels.

A layer has options, each with an input form, an output form, a time and an error. Times add up, and
so do squares of errors. Paths to the same form differ for the rest of the chain only in these two
numbers, so that paths which another path beats in both are dropped: the result is the same as that
of trying all combinations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class LayerOption(NamedTuple):
    """One option for a layer.

    Attributes:
        reads: Form of the input.
        writes: Form of the output.
        time_us: Time.
        square: Square of the relative error.
        steps: Its launches, which the search does not read.
    """

    reads: Hashable
    writes: Hashable
    time_us: float
    square: float
    steps: Any = None


class Path(NamedTuple):
    """Options for the first layers, one for each."""

    time_us: float
    square: float
    options: tuple[LayerOption, ...]


def best_paths(
    layers: Sequence[Iterable[LayerOption]], first: Hashable, last: Hashable
) -> list[Path]:
    """The Pareto-optimal paths, from the fastest to the most accurate.

    Args:
        layers: Options of each layer.
        first: Form of the first layer's input.
        last: Form of the last layer's output.
    """
    reached = {first: [Path(0.0, 0.0, ())]}
    for options in layers:
        found: dict[Hashable, list[Path]] = {}
        for option in options:
            found.setdefault(option.writes, []).extend(
                Path(
                    before.time_us + option.time_us,
                    before.square + option.square,
                    (*before.options, option),
                )
                for before in reached.get(option.reads, ())
            )
        reached = {form: pareto_optimal(paths) for form, paths in found.items()}
    return reached.get(last, [])


def pareto_optimal(paths: Iterable[Path]) -> list[Path]:
    """Pareto-optimal paths, the fastest first; one of equal paths is kept."""
    kept: list[Path] = []
    for path in sorted(paths, key=lambda path: path[:2]):
        if not kept or path.square < kept[-1].square:
            kept.append(path)
    return kept


def fastest_within(paths: Iterable[Path], square: float) -> Path | None:
    """The fastest path within a limit on the square of the error."""
    allowed = (path for path in paths if path.square <= square)
    return min(allowed, key=lambda path: path.time_us, default=None)
