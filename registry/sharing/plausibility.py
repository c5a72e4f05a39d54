"""Bounds of measurements: no time beats its GPU, and no error its output's format.

They are bounds, not models: refused values cannot have been measured, and no measured value is
refused. The closest time of the shipped file is 1.29 times its bound, the closest error 1.30.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lokakern.formats import Format
from lokakern.types import REALISTIC_DISTRIBUTIONS, Device, Problem

_SLACK = 0.9  # a clock or a memory somewhat faster than its data sheet
_LEAST_GPU_US = 0.3  # a quantizer of 256 x 16, alone in a graph, takes 1.26
LEAST_HOST_US = 0.3  # of a call that launches something: a launch alone takes 1.5 to 3
_ROUNDING_SLACK = 0.5  # rows of zeros, and whatever happens to be exact, have no error


@dataclass(frozen=True, slots=True)
class Rates:
    """The fastest that compute units of an architecture are.

    Attributes:
        flops_per_clock: Of a compute unit, dense FP8: 2 for each multiply-add.
        clock_ghz: The highest that one is sold with.
        bytes_per_us: The fastest memory that one is sold with, or the last cache, where it is
            larger than what the regime ``graph-cold`` reads between two uses.
    """

    flops_per_clock: int
    clock_ghz: float
    bytes_per_us: float


# From the vendors' data sheets: dense FP8 FLOPS over compute units and boost clock, memory rates.
_RATES = {
    "sm_80": Rates(4096, 1.41, 2.04e6),  # int8's rate: there is no FP8
    "sm_89": Rates(2048, 2.6, 1.01e6),
    "sm_90": Rates(8192, 1.98, 4.9e6),
    "sm_100": Rates(16384, 2.1, 8.0e6),
    "sm_103": Rates(16384, 2.1, 8.0e6),
    "sm_120": Rates(2048, 2.6, 1.8e6),
    "gfx942": Rates(4096, 2.1, 17.2e6),
    "gfx950": Rates(8192, 2.4, 17.2e6),
}
# One value may have most of the square, and the largest of a scale is rounded not at all.
_EVEN = frozenset(REALISTIC_DISTRIBUTIONS) - {"X9", "X12"}
_HAVE_A_MEAN = frozenset({"X10", "X13"})  # roundings of alike values cancel in long sums
_FEWEST = 64  # values of a scale: where they are few, the exact one has a large part of the square
_UNKNOWN = Rates(32768, 4.0, 20e6)
_CPU = Rates(4096, 6.0, 2e6)  # a core with matrix instructions


def least_us(problem: Problem, device: Device, regime: str) -> float:
    """A time that no kernel can be faster than, in microseconds.

    The FLOPs at the highest clock; in the regime ``graph-cold``, in which nothing that is read is
    in a cache, also the bytes of `Problem.bytes_moved` from memory.
    """
    rates = _RATES.get(device.architecture, _UNKNOWN) if device.is_gpu else _CPU
    units = max(device.compute_units, 1)
    least = problem.flops / (units * rates.flops_per_clock * rates.clock_ghz * 1e3)
    if not device.is_gpu:
        return _SLACK * least
    if regime == "graph-cold":
        least = max(least, problem.bytes_moved / rates.bytes_per_us)
    return max(_SLACK * least, _LEAST_GPU_US)


def least_error(problem: Problem, distribution: str, is_quantized: bool) -> float:
    """A relative error, root mean square or mean, that rounding leaves at least.

    With unit roundoff u, a value is rounded by at most u of the power of two below it, uniformly:
    u / sqrt(3) of that in the root mean square, and at least half as much of the value. So is the
    output; and operands that are quantized to FP8, whose roundings are independent of each other,
    so that a sum of products has them, too.

    Args:
        problem: What the error is of. 0 where it is to dequantize: a power of two rounds nothing.
        distribution: Of the operands. 0 where it is none of the realistic ones (of values that are
            powers of two nothing is rounded), or where few values decide the error.
        is_quantized: Whether operands are rounded to FP8.
    """
    if distribution not in _EVEN or problem.op == "dequantize":
        return 0.0
    roundoff = 0.0
    columns = problem.k if problem.b is None else problem.n
    is_rounded = problem.out_format is not Format.FLOAT32
    if is_rounded and (columns >= _FEWEST or not problem.out_format.is_fp8):
        roundoff = problem.out_format.unit_roundoff
    if is_quantized and distribution not in _HAVE_A_MEAN and problem.k >= _FEWEST:
        roundoff = max(roundoff, Format.E4M3FN.unit_roundoff)
    return _ROUNDING_SLACK * roundoff / math.sqrt(12)
