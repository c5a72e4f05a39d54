"""The progress of long work, reported to an object that shows it."""

from __future__ import annotations

from typing import Self

_LISTENERS: list[Progress] = []


def tell(what: str, share: float) -> None:
    """Report which share of a task is done, from 0 to 1, to the innermost active `Progress`."""
    if _LISTENERS:
        _LISTENERS[-1].share(what, share)


def is_shown() -> bool:
    """Whether a `Progress` is active."""
    return bool(_LISTENERS)


class Progress:
    """Receives progress and shows nothing; subclasses show it.

    Work that has steps is given one and calls `begin` and `step` or `reach`. Other work calls
    `tell`, which reports to the `Progress` whose ``with`` block is active.
    """

    def __enter__(self) -> Self:
        _LISTENERS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LISTENERS.remove(self)

    def note(self, text: str) -> None:
        """Show a line of text."""

    def begin(self, phase: str, total: int) -> None:
        """Begin a phase with a number of steps, 0 if it is unknown."""

    def step(self, text: str) -> None:
        """Count one step; the text names it."""

    def reach(self, done: int, text: str = "") -> None:
        """Set the number of steps that all ranks have done."""

    def share(self, what: str, share: float) -> None:
        """Set the share of a task that is done, from 0 to 1."""
