"""The fastest way through a chain of layers, for every error: pure search, no kernels.

A layer can be done in some ways. Each reads and writes one form, and takes a time and errs; times
add up, and so do squares of errors. Two ways that read and write the same differ for the rest of
the chain in these two numbers only, so that of the ways to reach a form those that are beaten in
both are forgotten: the answer is that of trying every combination.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Way(NamedTuple):
    """One way to do a layer.

    Attributes:
        reads: Form of what it reads.
        writes: Form of what it writes.
        time_us: What it takes.
        square: Of its relative error.
        what: Whatever does it; not looked at.
    """

    reads: Hashable
    writes: Hashable
    time_us: float
    square: float
    what: Any = None


class Path(NamedTuple):
    """Ways through the first layers, one each."""

    time_us: float
    square: float
    ways: tuple[Way, ...]


def best_paths(layers: Sequence[Iterable[Way]], first: Hashable, last: Hashable) -> list[Path]:
    """All paths that no other beats, from the fastest to the most accurate; empty without any.

    Of paths that are equal in both numbers one is kept.

    Args:
        layers: Ways to do each layer.
        first: Form of what the first layer reads.
        last: Form of what the last layer writes.
    """
    reached = {first: [Path(0.0, 0.0, ())]}
    for ways in layers:
        found: dict[Hashable, list[Path]] = {}
        for way in ways:
            found.setdefault(way.writes, []).extend(
                Path(before.time_us + way.time_us, before.square + way.square, (*before.ways, way))
                for before in reached.get(way.reads, ())
            )
        reached = {form: unbeaten(paths) for form, paths in found.items()}
    return reached.get(last, [])


def unbeaten(paths: Iterable[Path]) -> list[Path]:
    """Those that no other beats or equals in both numbers, the fastest first."""
    kept: list[Path] = []
    for path in sorted(paths, key=lambda path: path[:2]):
        if not kept or path.square < kept[-1].square:
            kept.append(path)
    return kept


def fastest_within(paths: Iterable[Path], square: float) -> Path | None:
    """The fastest whose squares add up to no more."""
    allowed = (path for path in paths if path.square <= square)
    return min(allowed, key=lambda path: path.time_us, default=None)
