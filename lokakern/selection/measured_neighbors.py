"""Measured problems near one without measurements, for the message of a miss."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lokakern.types import Device, Operand, Problem

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot

_MOST_NEIGHBORS = 3  # in a message
_SHAPE = ("op", "m", "n", "k")


def measured_instead(facts: Snapshot, problem: Problem, device: Device, regime: str) -> str:
    """The measured problems with the same n and k that differ least, with their arguments.

    Returns:
        Such as "n=512 k=512 was measured on NVIDIA H200 only with bias: ask with epilogue='bias'";
        "" if there is none, or the problem itself was measured.
    """
    asked = replace(problem, m=0)
    found: dict[tuple[tuple[str, ...], ...], tuple[str, str]] = {}
    for other, its_regime in facts.timed_like(device, problem):
        words = [_words(name, other) for name in _differing(asked, other)]
        if its_regime != regime:
            words.append((f"in {its_regime}", f"regime={its_regime!r}"))
        if not words:
            return ""
        found[tuple(words)] = " ".join(w for w, _ in words), ", ".join(a for _, a in words)
    if not found:
        return ""
    few = min(map(len, found))
    nearest = sorted(told for words, told in found.items() if len(words) == few)[:_MOST_NEIGHBORS]
    ways = dict.fromkeys(way for _, way in nearest)
    told = " or ".join(told for told, _ in nearest)
    return (
        f"{sizes_of(problem)} was measured on {device.product} only {told}: ask with "
        + " or ".join(ways)
    )


def sizes_of(problem: Problem) -> str:
    """The sizes of a problem without m."""
    return f"n={problem.n} k={problem.k}" if problem.b is not None else f"k={problem.k}"


def _differing(asked: Problem, other: Problem) -> list[str]:
    """Names of differing fields; a prepared weight implies another b."""
    names = [
        field.name
        for field in fields(Problem)
        if field.name not in _SHAPE and getattr(asked, field.name) != getattr(other, field.name)
    ]
    return [name for name in names if not (name == "b" and "prepared" in names)]


def _words(name: str, other: Problem) -> tuple[str, str]:
    """The description of a differing field of a measured problem, and the argument for it."""
    value = getattr(other, name)
    if name == "prepared":
        if not value:
            return "not prepared", "prepared=False"
        assert other.b is not None
        return f"prepared ({other.b.granularity})", "prepared=True"
    if name == "epilogue":
        return (f"with {value}" if value != "none" else "without epilogue"), f"epilogue={value!r}"
    if isinstance(value, Operand):
        return f"with {name}={value}", f"{name}=Operand.parse({str(value)!r})"
    said = str(value) if isinstance(value, int) else repr(str(value))
    return f"with {name}={value}", f"{name}={said}"
