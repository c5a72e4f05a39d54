"""Routes in frozen choices: texts that may be forged are checked before they are used.

Every kernel has to take its problem at the first and the last m of its range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lokakern.nn.routed_matmul import PLAIN
from lokakern.registry.register import KERNELS, Kernel
from lokakern.selection.frozen.answers import HeldAnswer, spans_of_m
from lokakern.types import Granularity

_RANGES = r"\d{1,12}=[^=,;]*(?:,\d{1,12}=[^=,;]*)*"
_ROUTE = re.compile(rf"([a-z0-9]+);16:({_RANGES});1:({_RANGES})")
_Used = TypeVar("_Used")
Refusal = Callable[[Kernel, int], str | None]  # why a kernel does not take the problem at an m


def checked_route(
    text: str,
    forms: Sequence[Granularity],
    refusal: Refusal,
    answer: HeldAnswer,
    reads_no_weight: bool = False,
) -> str:
    """A route from an answer.

    Args:
        text: The route, see `lokakern.nn.routed_matmul`.
        forms: Granularities of the right operand.
        refusal: Why a kernel does not take the problem at an m, or None.
        answer: Where it is from.
        reads_no_weight: Whether kernels need not read a weight of the form that the route names.

    Raises:
        ChoicesError: It is none, or a kernel does not take its problem.
    """
    if text == PLAIN:
        return text
    found = _ROUTE.fullmatch(text)
    answer.expect(found is not None and found[1] in forms, f"{text!r} is no route here")
    assert found is not None
    for is_aligned, part in ((True, found[2]), (False, found[3])):
        pairs = [pair.split("=") for pair in part.split(",")]
        starts, names = [int(start) for start, _ in pairs], [name for _, name in pairs]
        for name, m in ends_of(starts, names, is_aligned, answer):
            kernel = KERNELS.get(name) if name in answer.kernels else None
            answer.expect(kernel is not None, f"{name!r} is no kernel of the file")
            assert kernel is not None
            is_right = reads_no_weight or kernel.b_granularity == found[1]
            why = refusal(kernel, m) if is_right else f"it reads {kernel.b_granularity} weights"
            answer.expect(why is None, f"{name} does not take a product at m={m}: {why}")
    return text


def ends_of(
    starts: list[int], used: Sequence[_Used], is_aligned: bool, answer: HeldAnswer
) -> Iterator[tuple[_Used, int]]:
    """What is used in each range of m with its first and last m, without ranges of nothing."""
    is_ascending = starts[0] == 0 and starts == sorted(starts)
    answer.expect(is_ascending, f"ranges begin at {starts}; expected ascending m from 0")
    for something, ends in zip(used, spans_of_m(starts, is_aligned), strict=True):
        if something and ends is not None:
            yield from ((something, m) for m in ends)
