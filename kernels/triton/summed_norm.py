"""RMS norm of rows of concatenated tokens, to which others may be added.

    y[b, t, :] = v / sqrt(mean(v^2) + eps)
    v = cat(parts)[b, t, :] (+ addend[b, t, :]) (+ column[t] token[b, :])

parts: up to 3 of [batch, tokens, d], bfloat16 or float16; addend: [batch, all tokens, d] and token:
[batch, 1, d] of the same dtype; column: [all tokens], float32, contiguous. Rows of d are
contiguous, strides of the others are free. d is the sum of two powers of two, each at least 16:
with one power of two 3 of 8 lanes would be idle at d = 160.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import TritonLauncher

MOST_PARTS = 3
# Of 19 pairs within 1 % of the fastest on an H200: 117 and 175 us at 8192 samples of 64 and 96 rows
# of 160, two parts and an addend, which is 4.3 TB/s.
ROWS, WARPS, STAGES = 8, 4, 1


@triton.jit
def _loaded(
    part: tl.tensor, count: tl.tensor, by_sample: tl.tensor, by_token: tl.tensor,
    sample: tl.tensor, token: tl.tensor, inner: tl.tensor, is_there: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """A part's share of rows: zeros where a token is of another part."""
    is_mine = is_there & (token >= 0) & (token < count)
    place = sample * by_sample + (token * by_token).to(tl.int64)
    found = tl.load(part + place[:, None] + inner[None, :], is_mine[:, None], other=0.0)
    return found.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def summed_norm_kernel(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    addend: tl.tensor,
    column: tl.tensor,
    outer: tl.tensor,
    out: tl.tensor,
    first_count: tl.tensor,
    second_count: tl.tensor,
    third_count: tl.tensor,
    first_sample: tl.tensor,
    first_token: tl.tensor,
    second_sample: tl.tensor,
    second_token: tl.tensor,
    third_sample: tl.tensor,
    third_token: tl.tensor,
    addend_sample: tl.tensor,
    addend_token: tl.tensor,
    outer_sample: tl.tensor,
    rows: tl.tensor,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    OUTER: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of WIDE + NARROW columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = row < rows
    count = first_count + second_count + third_count
    sample, token = (row // count).to(tl.int64), row % count
    left, right = tl.arange(0, WIDE), WIDE + tl.arange(0, NARROW)
    v = _loaded(first, first_count, first_sample, first_token, sample, token, left, is_there)
    w = _loaded(first, first_count, first_sample, first_token, sample, token, right, is_there)
    if PARTS > 1:
        t = token - first_count
        v += _loaded(second, second_count, second_sample, second_token, sample, t, left, is_there)
        w += _loaded(second, second_count, second_sample, second_token, sample, t, right, is_there)
    if PARTS > 2:
        t = token - first_count - second_count
        v += _loaded(third, third_count, third_sample, third_token, sample, t, left, is_there)
        w += _loaded(third, third_count, third_sample, third_token, sample, t, right, is_there)
    if ADDS:
        v += _loaded(addend, count, addend_sample, addend_token, sample, token, left, is_there)
        w += _loaded(addend, count, addend_sample, addend_token, sample, token, right, is_there)
    if OUTER:
        factor = tl.load(column + token, is_there, other=0.0)[:, None]
        t = token * 0
        v += factor * _loaded(outer, 1, outer_sample, 0, sample, t, left, is_there)
        w += factor * _loaded(outer, 1, outer_sample, 0, sample, t, right, is_there)
    total = tl.sum(v * v, 1) + tl.sum(w * w, 1)
    scale = tl.rsqrt(total / (WIDE + NARROW) + EPS)
    to = out + row.to(tl.int64)[:, None] * (WIDE + NARROW)
    kind = out.dtype.element_ty
    tl.store(to + left[None, :], (v * scale[:, None]).to(kind), is_there[:, None])
    tl.store(to + right[None, :], (w * scale[:, None]).to(kind), is_there[:, None])


_launch = TritonLauncher(summed_norm_kernel)


def halves_of(d: int) -> tuple[int, int] | None:
    """The two powers of two whose sum is d, the larger first; None if there are none."""
    narrow = d & -d
    wide = d - narrow
    return (wide, narrow) if wide and wide & wide - 1 == 0 and narrow >= 16 else None


def _readable(x: Tensor) -> Tensor:
    """As the kernel reads it: by rows, at offsets within a sample of less than 2^31."""
    is_near = x.shape[1] * x.stride(1) < 2**31
    return x if x.stride(-1) == 1 and is_near else x.contiguous()


def summed_norm(
    parts: Sequence[Tensor], addend: Tensor | None, column: Tensor | None, token: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    """``[batch, tokens, d]``, contiguous.

    Raises:
        ValueError: There are more than `MOST_PARTS`, or d is no sum of two powers of two.
    """
    batch, _, d = parts[0].shape
    halves = halves_of(d)
    if halves is None or len(parts) > MOST_PARTS:
        raise ValueError(
            f"summed_norm: {len(parts)} parts of {d} columns; expected at most {MOST_PARTS} parts, "
            "and a sum of two powers of two from 16 on"
        )
    parts = [_readable(part) for part in parts]
    addend = None if addend is None else _readable(addend)
    token = None if token is None else _readable(token)
    first = parts[0]
    counts = [part.shape[1] for part in parts] + [0] * (MOST_PARTS - len(parts))
    out = first.new_empty((batch, sum(counts), d))
    rows = batch * sum(counts)
    if not rows:
        return out
    given = [*parts, *[first] * (MOST_PARTS - len(parts)), first if addend is None else addend]
    has_outer = column is not None and token is not None
    outer = (column, token) if column is not None and token is not None else (first, first)
    strides = [stride for x in given for stride in (x.stride(0), x.stride(1))]
    _launch(
        -(-rows // ROWS),
        (*given, *outer, out),
        (*counts, *strides, outer[1].stride(0)),
        (rows,),
        (eps, len(parts), addend is not None, has_outer, *halves, ROWS),
        WARPS,
        STAGES,
    )
    return out
