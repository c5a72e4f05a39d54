"""Suites of GEMM sizes that are drawn with a seed, for comparisons that no rule was fitted to.

``drawn-7`` is 60 sizes with seed 7, ``drawn-7-300`` is 300. A third of n and k are widths of MLPs,
each as often; a third are multiples of 16 and a third any number, uniform in their logarithm. So is
m, of which every second one is a multiple of 128.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator

from lokakern.errors import UnknownNameError
from lokakern.types import Format
from lokakern.workloads.gemm_cases import Case, shape_cases
from lokakern.workloads.suites import Suite

DRAWN = "drawn-"  # what names begin with
PATTERN = re.compile(rf"{DRAWN}(0|[1-9][0-9]{{0,17}})(?:-([1-9][0-9]{{0,8}}))?")
COUNT, MOST = 60, 10_000
WIDTHS = (128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
LEAST_M, MOST_M = 512, 40_960
LEAST, LARGEST = 16, 8192  # of n and k


def drawn_sizes(seed: int, count: int = COUNT) -> list[tuple[int, int, int]]:
    """``count`` different (m, n, k)."""
    source = random.Random(seed)
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        m = _between(source, LEAST_M, MOST_M)
        m = m if len(found) % 2 else round(m / 128) * 128
        found[m, _width(source), _width(source)] = None
    return list(found)


def drawn_suite(name: str) -> Suite:
    """The suite of a name such as ``drawn-7-300``.

    Raises:
        UnknownNameError: It is not written so, or draws no size or more than 10,000.
    """
    match = PATTERN.fullmatch(name)
    count = int(match[2] or COUNT) if match else 0
    if match is None or not 0 < count <= MOST:
        raise UnknownNameError(
            f"suite {name!r}: expected drawn-SEED or drawn-SEED-COUNT, such as drawn-7-{COUNT}, "
            f"with 1 to {MOST} sizes"
        )
    sizes = drawn_sizes(int(match[1]), count)

    def build(fp8: Format) -> Iterator[Case]:
        return shape_cases(sizes, fp8)

    return Suite(name, f"{count} sizes of GEMMs drawn with seed {match[1]}", build)


def _width(source: random.Random) -> int:
    kind = source.randrange(3)
    if kind == 0:
        return source.choice(WIDTHS)
    drawn = _between(source, LEAST, LARGEST)
    return drawn if kind == 1 else max(LEAST, round(drawn / 16) * 16)


def _between(source: random.Random, least: int, most: int) -> int:
    return round(math.exp(source.uniform(math.log(least), math.log(most))))
