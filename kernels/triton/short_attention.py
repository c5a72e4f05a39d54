"""Attention over short sequences: all keys and values of a head in one tile.

    out[b, t, h, :] = sum_s p[t, s] v[b, h, s, :],    p = softmax_s(scale q k^T + bias)
                                                   or p = silu * silu(scale q k^T + bias)

q: [batch, heads, queries, d]; k, v: [batch, heads, keys, d]; bfloat16 or float16, rows of d are
contiguous, strides of the others are free (0 where one is for all). bias: as [batch, heads,
queries, keys] of any strides; of bfloat16, float16 or float32 it is added, as bool it excludes. At
most 128 keys and d = 64. Scores and sums are float32, p is rounded to the dtype of v.

A general kernel of attention takes tiles of 64 or 128 queries by as many keys, with a loop and
state that one tile does without, and reads a bias for each score: at 54 tokens and heads of 16,
470 us of an H200 for 226 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import TritonLauncher

MOST_KEYS = 128
MOST_COLUMNS = 64
LEAST_TILE = 16  # of tensor cores
NO_BIAS, EXCLUDES = 0, 2
ADDS = tl.constexpr(1)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["queries", "keys"])
def short_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    d: tl.tensor,
    q_sample: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_sample: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_sample: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    bias_sample: tl.tensor,
    bias_head: tl.tensor,
    bias_row: tl.tensor,
    bias_column: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    EACH: tl.constexpr,
    SILU: tl.constexpr,
    CAUSAL: tl.constexpr,
    ZEROS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """QUERIES queries of one head."""
    tiles = tl.cdiv(queries, QUERIES)
    place, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sample, head = (place // heads).to(tl.int64), place % heads
    row, column, inner = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, D)
    has_row, has_column = (row < queries)[:, None], (column < keys)[:, None]
    has_inner = (inner < d)[None, :]
    left = tl.load(
        q + sample * q_sample + head * q_head + row[:, None] * q_row + inner[None, :],
        has_row & has_inner,
        other=0.0,
    )
    right = tl.load(
        k + sample * k_sample + head * k_head + column[:, None] * k_row + inner[None, :],
        has_column & has_inner,
        other=0.0,
    )
    values = tl.load(
        v + sample * v_sample + head * v_head + column[:, None] * v_row + inner[None, :],
        has_column & has_inner,
        other=0.0,
    )
    score = tl.dot(left, right.T) * (SCALE * LOG2_E)  # of powers of two
    is_read = (column < keys)[None, :]
    if BIAS:
        at = bias + sample * bias_sample + head * bias_head + column[None, :] * bias_column
        if EACH:
            found = tl.load(at + row[:, None] * bias_row, has_row & is_read, other=0.0)
        else:
            found = tl.load(at, is_read, other=0.0)
        if BIAS == ADDS:
            score += found.to(tl.float32) * LOG2_E
        else:
            is_read = is_read & (found == 0)
    if CAUSAL:
        is_read = is_read & (column[None, :] <= row[:, None])
    if SILU != 0.0:
        p = tl.where(is_read, score * (SILU / LOG2_E) / (1.0 + tl.exp2(-score)), 0.0)
        read = tl.dot(p.to(values.dtype), values)
    else:
        score = tl.where(is_read, score, float("-inf"))
        most = tl.max(score, 1)
        if ZEROS:
            most = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(score - most[:, None])
        total = tl.sum(p, 1)
        if ZEROS:
            total = tl.where(total == 0.0, 1.0, total)
        read = tl.dot(p.to(values.dtype), values) / total[:, None]
    to = out + (sample * queries + row[:, None]) * (heads * d) + head * d + inner[None, :]
    tl.store(to, read.to(out.dtype.element_ty), has_row & has_inner)


_launch = TritonLauncher(short_attention_kernel)


def tile_of(queries: int, keys: int, d: int) -> tuple[int, int, int, int]:
    """Queries, keys and columns of a tile, and warps: one for 1024 scores."""
    tile = [max(LEAST_TILE, triton.next_power_of_2(size)) for size in (queries, keys, d)]
    rows = min(tile[0], 64)
    return rows, tile[1], tile[2], max(1, min(rows * tile[1] // 1024, 4))


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float = 0.0,
) -> Tensor:  # fmt: skip
    """``[batch, queries, heads, d]``, contiguous.

    Args:
        q: ``[batch, heads, queries, d]``; as of the others, the first two may be 1 for all.
        k: ``[batch, heads, keys, d]``.
        v: ``[batch, heads, keys, d]``.
        bias: What is added to scores, or bool: where none is read; None. Of four dimensions, of
            which each is 1 or that of the scores.
        scale: Of the scores.
        causal: Whether query t reads keys up to t only.
        zeros: Whether a query that reads no key gets zeros, instead of NaN.
        silu: 0 for a softmax; else values are weighted by so many times silu of scores.

    Raises:
        ValueError: There are more keys or columns than a tile holds.
    """
    batch, heads = (max(x.shape[dim] for x in (q, k, v)) for dim in (0, 1))
    queries, d, keys = *q.shape[2:], k.shape[2]
    if keys > MOST_KEYS or d > MOST_COLUMNS:
        raise ValueError(
            f"short_attention: {keys} keys of {d} columns; expected at most {MOST_KEYS} keys of "
            f"{MOST_COLUMNS} columns"
        )
    out = q.new_empty((batch, queries, heads, d))
    if not out.numel():
        return out
    q, k, v = (x if x.stride(-1) == 1 and _is_near(x) else x.contiguous() for x in (q, k, v))
    bias = bias if bias is None or _is_near(bias) else bias.contiguous()
    *tile, warps = tile_of(queries, keys, d)
    strides = [stride for x in (q, k, v) for stride in _steps(x)[:3]]
    kind = NO_BIAS if bias is None else EXCLUDES if bias.dtype is torch.bool else ADDS.value
    if bias is None:
        bias = q
    elif bias.dtype is torch.bool:
        bias = bias.view(torch.uint8)
    _launch(
        batch * heads * -(-queries // tile[0]),
        (q, k, v, bias, out),
        (heads, d, *strides, *_steps(bias)),
        (queries, keys),
        (scale, kind, bias.shape[2] > 1, silu, causal, zeros, *tile),
        warps,
        1,
    )
    return out


def _is_near(x: Tensor) -> bool:
    """Whether offsets within a sample are less than 2^31, as the kernel computes them."""
    ends = zip(x.shape[1:], _steps(x)[1:], strict=True)
    return sum((size - 1) * step for size, step in ends) < 2**31


def _steps(x: Tensor) -> list[int]:
    """Strides, 0 along what is there once."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
