"""Measured problems near one without measurements, and how they differ from it."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lokakern.types import Device, Operand, Problem

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot

_MOST_NEIGHBORS = 3  # in a message
_SHAPE = ("op", "m", "n", "k")


def measured_instead(
    facts: Snapshot, problem: Problem, device: Device, timed: str, regime: str
) -> str:
    """The measured problems that differ least, which attributes differ, and arguments for them.

    Those with the same n and k come first. ``timed`` is the regime of times, ``regime`` the one
    that was asked for, such as "compiled", for which times of another count.

    Returns:
        Such as "n=512 k=512 was measured on NVIDIA H200 only with bias (epilogue differs): ask with
        epilogue='bias' (--epilogue bias)", with the options of `explain` where it has them; "" if
        nothing is near, or the problem itself was measured.
    """
    asked = replace(problem, m=0)
    found: dict[tuple[tuple[str, ...], ...], tuple[str, str, str]] = {}
    for other, its_regime in facts.timed_like(device, problem):
        names = _differing(asked, other)
        words = [_words(name, other) for name in names]
        attributes = _attributes(names, asked, other)
        if its_regime != timed:
            words.append((f"in {its_regime}", f"regime={its_regime!r}", f"--regime {its_regime}"))
            attributes.append("regime")
        if not words:
            return ""
        told, way = " ".join(w for w, _, _ in words), ", ".join(a for _, a, _ in words)
        given = sorted((o for *_, o in words), key=lambda option: option.startswith("without"))
        options = " ".join(given) if all(given) else ""
        found[tuple(words)] = f"{told} ({_differ(attributes)})", way, options
    if not found:
        return _nearest(facts, asked, device, timed, regime)
    few = min(map(len, found))
    nearest = sorted(told for words, told in found.items() if len(words) == few)[:_MOST_NEIGHBORS]
    ways: dict[str, list[str]] = {}
    for _, way, options in nearest:
        ways.setdefault(way, []).extend([options] if options else [])
    said = [f"{way} ({', '.join(its)})" if its else way for way, its in ways.items()]
    return (
        f"{sizes_of(problem)} was measured on {device.product} only "
        f"{' or '.join(told for told, *_ in nearest)}: ask with {' or '.join(said)}"
    )


def _nearest(facts: Snapshot, asked: Problem, device: Device, timed: str, regime: str) -> str:
    """The nearest problem with another n or k."""
    other = facts.timed_nearest(device, asked, timed)
    if other is None:
        return ""
    names = _differing(asked, other)
    sizes = [size for size in ("n", "k") if getattr(asked, size) != getattr(other, size)]
    told = " ".join([sizes_of(other), *(_words(name, other)[0] for name in names)])
    return (
        f"nothing was measured at {sizes_of(asked)}, {regime}, on {device.product}; nearest is "
        f"{told} ({_differ([*sizes, *_attributes(names, asked, other)])})"
    )


def _differ(attributes: list[str]) -> str:
    *first, last = attributes
    return f"{', '.join(first)} and {last} differ" if first else f"{last} differs"


def _attributes(names: list[str], asked: Problem, other: Problem) -> list[str]:
    """What differs, by name: of operands, which of their attributes."""
    found = []
    for name in names:
        one, two = getattr(asked, name), getattr(other, name)
        if isinstance(one, Operand) and isinstance(two, Operand):
            parts = (field.name for field in fields(Operand))
            found += [f"{p} of {name}" for p in parts if getattr(one, p) != getattr(two, p)]
        else:
            found.append(name)
    return found


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


def _words(name: str, other: Problem) -> tuple[str, str, str]:
    """A differing field of a measured problem: in words, as an argument, and as an option.

    The option is that of `explain`; "" where it has none.
    """
    value = getattr(other, name)
    if name == "prepared":
        if not value:
            return "not prepared", "prepared=False", "without --prepared"
        assert other.b is not None
        scale = other.b.granularity
        return f"prepared ({scale})", "prepared=True", f"--prepared {scale}"
    if name == "epilogue":
        if value == "none":
            return "without epilogue", "epilogue='none'", "without --epilogue and --bias"
        return f"with {value}", f"epilogue={value!r}", f"--epilogue {shlex.quote(value)}"
    if isinstance(value, Operand):
        return f"with {name}={value}", f"{name}=lokakern.types.Operand.parse({str(value)!r})", ""
    said = str(value) if isinstance(value, int) else repr(str(value))
    return f"with {name}={value}", f"{name}={said}", ""
