"""Times as sums of work: of what trees do not predict, too few rows of which were measured.

A law says how long a kernel takes for each unit of its work: a launch, a wave of tiles, a multiply
and add, an element that is read or written, and what each part of an epilogue adds for an element.
These numbers are fitted to the times of the kernel by least squares of relative errors, none of
them negative. A part that the kernel was never timed with has none, so that no such problem is
predicted.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from lokakern.quantized_tensor import pitch_of
from lokakern.types import Format, Granularity, Layout, Problem

TILE = 128  # rows and columns of a block's output
LINE_BYTES = 128
NORMS = ("layer", "rms", "block_rms")
BEYOND = 4  # times smaller than what was timed: so far a law is carried, and was tested
_MILLION = 1e-6  # numbers of elements are in millions
_ALWAYS = ("launch", "a", "rows", "products", "waves", "b", "out")  # kinds of work of all problems

_Size = Annotated[int, Meta(ge=1, le=2**40)]
_Rate = Annotated[float, Meta(ge=0.0, le=1e9)]


class Spread(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Logarithms of measured over predicted values at sizes left out.

    Attributes:
        low: Lower end of the interval.
        high: Upper end.
        pairs: Number of pairs (n, k) that it rests on.
    """

    low: Annotated[float, Meta(ge=-50.0, le=0.0)]
    high: Annotated[float, Meta(ge=0.0, le=50.0)]
    pairs: _Size

    def around(self, value: float) -> tuple[float, float]:
        """The interval of a predicted value."""
        return value * math.exp(self.low), value * math.exp(self.high)


class Fitted(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was fitted to the times of one kernel, and how well.

    Attributes:
        name: Of the kernel.
        digest: Of its source, as it was timed.
        granularity: Of the scales of a.
        rows: Number of times that it was fitted to.
        median_error: Median over rows of the relative error at sizes (n, k) left out.
        p90_error: 90th percentile of that.
    """

    name: str
    digest: str
    granularity: Granularity
    rows: _Size
    median_error: Annotated[float, Meta(ge=0)]
    p90_error: Annotated[float, Meta(ge=0)]


class Law(Fitted, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one kernel takes for its work at an op.

    Attributes:
        least: Smallest m, n and k that were timed.
        largest: Largest.
        forms: The forms of problems that were timed, see `form_of`.
        us: Microseconds for a unit of each kind of `work_of`.
        spread: Of its times, at pairs (n, k) left out.
        beyond: Of its times where all sizes up to `BEYOND` times the smallest m, n or k were left
            out; None if it is not used below what was timed.
    """

    least: tuple[_Size, _Size, _Size]
    largest: tuple[_Size, _Size, _Size]
    forms: list[str]
    us: dict[str, _Rate]
    spread: Spread
    beyond: Spread | None

    def __post_init__(self) -> None:
        if not any(self.us.get(kind) for kind in _ALWAYS):
            raise ValueError(f"{self.name} takes no time")

    def covers(self, problem: Problem) -> bool:
        """Whether the kernel was timed with problems of this form and with each of its parts."""
        return form_of(problem) in self.forms and parts_of(problem) <= self.us.keys()

    def spread_at(self, m: int, n: int, k: int) -> Spread | None:
        """Of its time at sizes; None where it has none."""
        sizes = (m, n, k)
        if any(size > most for size, most in zip(sizes, self.largest, strict=True)):
            return None
        below = [least / size for size, least in zip(sizes, self.least, strict=True)]
        if max(below) <= 1:
            return self.spread
        return self.beyond if max(below) <= BEYOND else None

    @property
    def least_m(self) -> int:
        """The smallest m at which it has a time."""
        return self.least[0] if self.beyond is None else -(-self.least[0] // BEYOND)

    def times_us(
        self, problem: Problem, m: NDArray[np.int64], compute_units: int
    ) -> NDArray[np.float64]:
        """Predicted times, ``[count]``."""
        work = work_of(problem, m, compute_units)
        found: NDArray[np.float64] = sum(
            (self.us.get(kind, 0.0) * amount for kind, amount in work.items()),
            start=np.zeros(len(m)),
        )
        return found


class Laws(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The laws of an op.

    Attributes:
        speedup: Of quantizing kernels over the fastest unquantized one; None without one.
        kernels: One law for each.
    """

    speedup: Spread | None
    kernels: Annotated[list[Law], Meta(min_length=1, max_length=256)]

    def __post_init__(self) -> None:
        if len({law.name for law in self.kernels}) < len(self.kernels):
            raise ValueError("a kernel occurs twice")


def is_plain(problem: Problem) -> bool:
    """Whether a law may describe a problem: one product, or one quantization, of aligned rows.

    Operands lie as those that were timed: a by rows, b by columns.
    """
    b = problem.b
    return (
        problem.op in ("scaled_gemm", "gemm_norm", "quantize", "norm_quantize")
        and problem.batch == 1
        and not problem.accumulate
        and not problem.out_strided
        and (problem.a.layout, problem.a.alignment) == (Layout.ROW, 16)
        and problem.a.format is not Format.FLOAT32
        and problem.k % 8 == 0
        and (b is None or (b.layout, b.alignment, problem.n % 8) == (Layout.COLUMN, 16, 0))
    )


def form_of(problem: Problem) -> str:
    """Formats, scales and preparation, between which nothing is inferred."""
    a, out = problem.a, problem.out_format
    words = [f"{a.format.value}/{a.granularity.value}"]
    if problem.b is not None:
        words.append(f"{problem.b.format.value}/{problem.b.granularity.value}")
    words.append(f"{out.value}/{problem.out_granularity.value}")
    return " ".join(words + ["prepared"] * problem.prepared)


def parts_of(problem: Problem) -> set[str]:
    """The parts of an epilogue, norms without the length of their blocks."""
    return {word.partition("(")[0] for word in problem.epilogue.split("+")} - {"none"}


def work_of(
    problem: Problem, m: NDArray[np.int64], compute_units: int
) -> dict[str, NDArray[np.float64]]:
    """Amounts of each kind of work.

    Args:
        problem: At any m.
        m: Rows of a, ``[count]``.
        compute_units: Number of SMs.
    """
    rows = m.astype(float)
    n, k = problem.n, problem.k
    a = rows * k * _MILLION
    found = {"launch": np.ones(len(m)), "a": a}
    parts = parts_of(problem)
    if problem.b is None:
        out = a
        found["rows"] = rows * _MILLION
    else:
        out = rows * n * _MILLION
        tiles = np.ceil(rows / TILE) * math.ceil(n / TILE)
        found |= {
            "products": rows * n * k * _MILLION,
            "waves": np.ceil(tiles / compute_units) * k * _MILLION,
            "b": np.full(len(m), float(n) * k * _MILLION),
            "out": out,
            "quantized out": out * problem.out_format.is_fp8,
        }
        # Rows of FP8 data that start within lines of a cache lie in one more.
        is_askew = problem.a.format.is_fp8 and pitch_of(k) % LINE_BYTES != 0
        found["askew waves"] = found["waves"] * is_askew
    found |= {part: out for part in parts}
    if not parts.isdisjoint(NORMS):
        found["norm"] = np.ones(len(m))
    return found
