"""How far long work is, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, float], None]

_LISTENERS: list[Listener] = []


def tell(what: str, share: float) -> None:
    """Say what is being done and how much of it is done already, from 0 to 1.

    Where nobody listens this costs nothing.
    """
    if _LISTENERS:
        _LISTENERS[-1](what, share)


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Tell a listener, and nobody else, while inside."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


class Progress:
    """What a sweep tells about itself; replace the methods to show it."""

    def note(self, text: str) -> None:
        """A line for whoever waits."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of so many steps begins."""

    def step(self, text: str) -> None:
        """One step is done; the text says what comes next or came last."""

    def reach(self, done: int, text: str = "") -> None:
        """So many steps are done, by all ranks."""
