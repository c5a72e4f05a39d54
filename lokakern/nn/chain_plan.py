"""Plans of chains: the launches of several layers in one op, for ranges of m, as text.

A plan is text, so that a compiled graph does not depend on this process. Its parts are separated by
semicolons: the layers, then segments of m for m that 16 divides and for other m, as those of
`lokakern.nn.routed_matmul`::

    1024|3456|bias+relu|1e-05|row,512|1024|bias+relu|1e-05|row;16:0=,2048=0|cuda.…|none|row+…;1:0=

A segment without steps is not used: there the modules run one by one. One more part, ``float16``,
says that what is not FP8 is that instead of bfloat16 (`lokakern.nn.routed_matmul.in_dtype`).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from lokakern.types import Granularity


class ChainLayer(NamedTuple):
    """A linear layer with what follows it.

    Attributes:
        n: Output columns.
        k: Input columns.
        epilogue: As in `Problem` of op gemm_norm, such as "bias+layer+affine+relu".
        eps: Of the norm.
        weight: Granularity of the quantized weight, the same for all m; NONE if no kernel reads it.
    """

    n: int
    k: int
    epilogue: str
    eps: float
    weight: Granularity


class ChainStep(NamedTuple):
    """One launch.

    Attributes:
        place: Index of the layer.
        kernel: Name of a kernel of op gemm_norm, quantize or dequantize.
        reads: Granularity of its left operand; NONE for bfloat16.
        weight: Granularity of its right operand; NONE for bfloat16, or without one.
        writes: Granularity of its output; NONE for bfloat16, TENSOR with the static scale of the
            norm.
    """

    place: int
    kernel: str
    reads: Granularity
    weight: Granularity
    writes: Granularity


Steps = tuple[ChainStep, ...]  # () where the chain is not used
ChainSegments = Sequence[tuple[int, Steps]]  # first m, and its steps


def plan_text(layers: Sequence[ChainLayer], aligned: ChainSegments, other: ChainSegments) -> str:
    """The text of a plan; "" if no segment has steps."""
    if not any(steps for _, steps in (*aligned, *other)):
        return ""
    parts = [",".join("|".join(map(str, layer)) for layer in layers)]
    for multiple, segments in ((16, aligned), (1, other)):
        words = (f"{start}={'+'.join(map(_step_text, steps))}" for start, steps in segments)
        parts.append(f"{multiple}:{','.join(words)}")
    return ";".join(parts)


def _step_text(step: ChainStep) -> str:
    # Names of compositions contain "+".
    return "|".join(map(str, step)).replace("+", "&")


@functools.lru_cache(maxsize=1024)
def read_plan(
    text: str,
) -> tuple[tuple[ChainLayer, ...], tuple[tuple[int, Steps], ...], tuple[tuple[int, Steps], ...]]:
    """Parse a text of `plan_text`: layers, segments for m that 16 divides, and for other m."""
    first, aligned, other = text.split(";")[:3]
    return _layers(first), _segments(aligned), _segments(other)


def _layers(text: str) -> tuple[ChainLayer, ...]:
    rows = (word.split("|") for word in text.split(","))
    return tuple(
        ChainLayer(int(n), int(k), epilogue, float(eps), Granularity(weight))
        for n, k, epilogue, eps, weight in rows
    )


def _segments(text: str) -> tuple[tuple[int, Steps], ...]:
    pairs = (pair.split("=") for pair in text.partition(":")[2].split(","))
    return tuple((int(start), _steps(steps)) for start, steps in pairs)


def _steps(text: str) -> Steps:
    rows = (word.replace("&", "+").split("|") for word in text.split("+") if word)
    return tuple(
        ChainStep(int(place), kernel, *map(Granularity, scales)) for place, kernel, *scales in rows
    )


@functools.lru_cache(maxsize=4096)
def steps_at(text: str, m: int) -> Steps:
    """The launches at m; none where the chain is not used."""
    _, *both = read_plan(text)
    segments = both[0] if m % 16 == 0 else both[1]
    return segments[bisect_right([start for start, _ in segments], m) - 1][1]
