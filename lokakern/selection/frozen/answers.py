"""Answers of functions that combine many choices, such as chains and routes, in a frozen file.

A question is the text of a function's arguments, and an answer some texts, such as routes. Who asks
reads them and checks every kernel in them: here they are only text. Functions keep their answers by
`lokakern.selection.dispatcher.keep_answer`, if these name kernels, for `lokakern.freeze`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from lokakern.errors import ChoicesError
from lokakern.types import ErrorBudget

LONGEST_QUESTION = 800
LARGEST_M = 2**24  # 16 million rows: a batch of 4096 of 4096 each


class KeptAnswer(NamedTuple):
    """An answer with the names of its kernels, whose digests a file holds, and its rank, if any."""

    texts: tuple[str, ...]
    kernels: frozenset[str]
    rank: tuple[Any, ...] = ()


class HeldAnswer(NamedTuple):
    """An answer of a file, which may be forged, and the file's words for errors and reasons.

    Attributes:
        texts: The answer.
        kernels: Names of the kernels whose digests in the file are those here.
        origin: The file.
    """

    texts: tuple[str, ...]
    kernels: frozenset[str]
    origin: str

    def expect(self, is_right: bool, what: str) -> None:
        """Raise a `ChoicesError` that says what is wrong, unless it is right."""
        if not is_right:
            shown = "".join(c if c.isprintable() else " " for c in what[:300])
            raise ChoicesError(
                f"choices {self.origin}: {shown}; write it again with lokakern.freeze"
            )


def question(about: str, **asked: Any) -> str:
    """The text of arguments: equal for equal ones, in every process.

    Arguments are numbers, texts, enumerations, error budgets, and sequences and data classes of
    them.
    """
    words = [f"{name}={_text(value)}" for name, value in asked.items()]
    text = " ".join([about, *words])
    return text if len(text) <= LONGEST_QUESTION else f"{about} {digest_of(text)}"


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of a part of a question that is too long for it."""
    return hashlib.sha256(_text(value).encode()).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, default=_plain, separators=(",", ":")).replace('"', "'")


def _plain(value: Any) -> Any:
    if isinstance(value, ErrorBudget):
        return value.limits
    if is_dataclass(value):
        return {x.name: getattr(value, x.name) for x in fields(value)}
    raise TypeError(f"{type(value).__name__} has no text in a question")


def spans_of_m(starts: list[int], is_aligned: bool) -> Iterator[tuple[int, int] | None]:
    """Smallest and largest m, of those that 16 divides or others, from each start to the next.

    None where there is none. The last range ends at `LARGEST_M`, or at its first m.
    """
    for start, stop in pairwise([*starts, max(starts[-1], LARGEST_M) + 1]):
        if is_aligned:
            low, high = -(-max(start, 1) // 16) * 16, (stop - 1) // 16 * 16
        else:
            low, high = max(start, 1), stop - 1
            low, high = low + (low % 16 == 0), high - (high % 16 == 0)
        yield (low, high) if low <= high else None
