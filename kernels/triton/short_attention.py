"""Attention over short sequences: all keys and values of a head in one tile, and its gradients.

    out[b, t, h, :] = sum_s p[t, s] v[b, h, s, :],    p = softmax_s(scale q k^T + bias)
                                                   or p = silu * silu(scale q k^T + bias)

q: [batch, heads, queries, d]; k, v: [batch, heads, keys, d]; bfloat16 or float16, rows of d are
contiguous, strides of the others are free (0 where one is for all). bias: as [batch, heads,
queries, keys] of any strides; of bfloat16, float16 or float32 it is added, as bool it excludes. At
most 128 keys and d = 64. Scores and sums are float32, p is rounded to the dtype of v.

The gradients of one head are computed in one program from what the forward pass read: with P of
the weights, their sums are in the tile, so that nothing but q, k and v is kept for them.

    dV = P^T dY,  dP = dY V^T,  dS = P (dP - rowsum(P dP)),  dQ = scale dS K,  dK = scale dS^T Q

and of p silu(s), dS = p dP sigmoid(s) (1 + s (1 - sigmoid(s))).

A general kernel of attention takes tiles of 64 or 128 queries by as many keys, with a loop and
state that one tile does without, and reads a bias for each score: at 54 tokens and heads of 16,
470 us of an H200 for 226 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lokakern.jit import TritonLauncher

MOST_KEYS = 128
MOST_COLUMNS = 64
# Major compute capabilities whose programs take silu of keys. Those of sm_89 and sm_120, which have
# no instruction for a warpgroup, spill up to 4.6 KiB a thread at 128 x 128 x 64.
ACTIVATING = (9, 10)
LEAST_TILE = 16  # of tensor cores
NO_BIAS = 0
ADDS, EXCLUDES = tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    bias_row: tl.tensor,
    bias_column: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    has_row: tl.tensor,
    keys: tl.tensor,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    EACH: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scores of queries and keys, of powers of two, and which are read."""
    score = tl.dot(left, right.T) * (SCALE * LOG2_E)
    is_read = (column < keys)[None, :]
    if BIAS:
        at = bias + column[None, :] * bias_column
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
    return score, is_read


@triton.jit
def _silu(x: tl.tensor) -> tl.tensor:
    """Silu in float32, rounded."""
    wide = x.to(tl.float32)
    return (wide / (1.0 + tl.exp2(-wide * LOG2_E))).to(x.dtype)


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
    ACTIVATED: tl.constexpr,
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
    if ACTIVATED:
        left, right, values = _silu(left), _silu(right), _silu(values)
    score, is_read = _scores(
        left, right, bias + sample * bias_sample + head * bias_head, bias_row, bias_column,
        row, column, has_row, keys, SCALE, BIAS, EACH, CAUSAL,
    )  # fmt: skip
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


@triton.jit(do_not_specialize=["queries", "keys"])
def short_attention_gradients_kernel(
    dy: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    bias: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    heads: tl.tensor,
    d: tl.tensor,
    dy_sample: tl.tensor,
    dy_head: tl.tensor,
    dy_row: tl.tensor,
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
    """One head, QUERIES queries at a time."""
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    column, inner = tl.arange(0, KEYS), tl.arange(0, D)
    has_column, has_inner = (column < keys)[:, None], (inner < d)[None, :]
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
    of_keys = tl.zeros([KEYS, D], tl.float32)
    of_values = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, queries, QUERIES):
        row = start + tl.arange(0, QUERIES)
        has_row = (row < queries)[:, None]
        left = tl.load(
            q + sample * q_sample + head * q_head + row[:, None] * q_row + inner[None, :],
            has_row & has_inner,
            other=0.0,
        )
        given = tl.load(
            dy + sample * dy_sample + head * dy_head + row[:, None] * dy_row + inner[None, :],
            has_row & has_inner,
            other=0.0,
        )
        score, is_read = _scores(
            left, right, bias + sample * bias_sample + head * bias_head, bias_row, bias_column,
            row, column, has_row, keys, SCALE, BIAS, EACH, CAUSAL,
        )  # fmt: skip
        of_weights = tl.dot(given, values.T)
        if SILU != 0.0:
            sigmoid = 1.0 / (1.0 + tl.exp2(-score))
            score = score * (1.0 / LOG2_E)
            p = tl.where(is_read, score * sigmoid * SILU, 0.0)
            slope = sigmoid * (1.0 + score * (1.0 - sigmoid))
            of_score = tl.where(is_read, of_weights * slope * SILU, 0.0)
        else:
            score = tl.where(is_read, score, float("-inf"))
            most = tl.max(score, 1)
            if ZEROS:
                most = tl.where(most == float("-inf"), 0.0, most)
            p = tl.exp2(score - most[:, None])
            total = tl.sum(p, 1)
            if ZEROS:
                total = tl.where(total == 0.0, 1.0, total)
            p = p / total[:, None]
            of_score = p * (of_weights - tl.sum(p * of_weights, 1)[:, None])
            if BIAS == EXCLUDES:  # even if the query reads nothing, and p is NaN
                of_score = tl.where(is_read, of_score, 0.0)
            if CAUSAL:
                of_score = tl.where(is_read, of_score, 0.0)
        if EACH:  # keys that others do not read may have NaN
            p, of_score = tl.where(has_row, p, 0.0), tl.where(has_row, of_score, 0.0)
        if CAUSAL:
            p, of_score = tl.where(has_row, p, 0.0), tl.where(has_row, of_score, 0.0)
        of_values += tl.dot(p.to(given.dtype).T, given)
        rounded = of_score.to(left.dtype)
        of_keys += tl.dot(rounded.T, left)
        of_queries = tl.dot(rounded, right) * SCALE
        tl.store(
            dq + (sample * queries + row[:, None]) * (heads * d) + head * d + inner[None, :],
            of_queries.to(dq.dtype.element_ty),
            has_row & has_inner,
        )
    to = (sample * keys + column[:, None]) * (heads * d) + head * d + inner[None, :]
    tl.store(dk + to, (of_keys * SCALE).to(dk.dtype.element_ty), has_column & has_inner)
    tl.store(dv + to, of_values.to(dv.dtype.element_ty), has_column & has_inner)


_launch = TritonLauncher(short_attention_kernel)
_launch_gradients = TritonLauncher(short_attention_gradients_kernel)


def tile_of(
    queries: int, keys: int, d: int, *, activated: bool = False
) -> tuple[int, int, int, int]:
    """Queries, keys and columns of a tile, and warps: one for 1024 scores.

    Of more than 64 queries each tile would take silu of all keys and values once more: 25.7 us of
    an H200 at 64 x 8 heads of 128 x 128 x 64, and 21.3 with one tile of 8 warps.
    """
    tile = [max(LEAST_TILE, triton.next_power_of_2(size)) for size in (queries, keys, d)]
    rows = min(tile[0], 128 if activated else 64)
    return rows, tile[1], tile[2], max(1, min(rows * tile[1] // 1024, 8 if rows > 64 else 4))


def activates(device: torch.device) -> bool:
    """Whether programs of a device take silu of queries, keys and values."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in ACTIVATING


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, zeros: bool,
    silu: float = 0.0, activated: bool = False,
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
        activated: Whether q, k and v are silu of what is given, rounded to its dtype.

    Raises:
        ValueError: There are more keys or columns than a tile holds.
    """
    batch, heads, queries, keys, d = _sizes(q, k, v)
    out = q.new_empty((batch, queries, heads, d))
    if not out.numel():
        return out
    q, k, v = map(_readable, (q, k, v))
    if activated and not activates(q.device):
        q, k, v = map(functional.silu, (q, k, v))
        activated = False
    *tile, warps = tile_of(queries, keys, d, activated=activated)
    strides = [stride for x in (q, k, v) for stride in _steps(x)[:3]]
    bias, steps, kind, is_each = _read_bias(q, bias)
    _launch(
        batch * heads * -(-queries // tile[0]),
        (q, k, v, bias, out),
        (heads, d, *strides, *steps),
        (queries, keys),
        (scale, kind, is_each, silu, causal, zeros, *tile, activated),
        warps,
        1,
    )
    return out


# Queries and warps of gradients by keys and columns of a tile, the fastest of four to nine on an
# H200. What holds 2048 and more scores and sums a warp spills; wgmma takes 64 queries and 4 warps.
GRADIENT_TILES = {
    (128, 64): (32, 4), (128, 32): (64, 4), (128, 16): (32, 2), (64, 64): (64, 4),
    (64, 32): (16, 1), (64, 16): (32, 1),
}  # fmt: skip


def gradient_tile_of(queries: int, keys: int, d: int) -> tuple[int, int, int, int]:
    """Queries, keys and columns of a tile, and warps."""
    rows, columns, inner, _ = tile_of(queries, keys, d)
    most, warps = GRADIENT_TILES.get((columns, inner), (16, max(1, columns * inner // 1024)))
    return min(rows, most), columns, inner, warps


def short_attention_gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool,
    zeros: bool, silu: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, ``[batch, tokens, heads, d]``, contiguous.

    Args:
        dy: Of the output, ``[batch, heads, queries, d]``.
        q: As of `short_attention`.
        k: As of `short_attention`.
        v: As of `short_attention`.
        bias: As of `short_attention`; it gets no gradient.
        scale: As of `short_attention`.
        causal: As of `short_attention`.
        zeros: As of `short_attention`.
        silu: As of `short_attention`.

    Raises:
        ValueError: There are more keys or columns than a tile holds.
    """
    batch, heads, queries, keys, d = _sizes(q, k, v)
    dq, dk, dv = (q.new_empty((batch, tokens, heads, d)) for tokens in (queries, keys, keys))
    if not dk.numel():
        return dq.zero_(), dk, dv
    dy, q, k, v = map(_readable, (dy, q, k, v))
    *tile, warps = gradient_tile_of(queries, keys, d)
    strides = [stride for x in (dy, q, k, v) for stride in _steps(x)[:3]]
    bias, steps, kind, is_each = _read_bias(q, bias)
    _launch_gradients(
        batch * heads,
        (dy, q, k, v, bias, dq, dk, dv),
        (heads, d, *strides, *steps),
        (queries, keys),
        (scale, kind, is_each, silu, causal, zeros, *tile),
        warps,
        1,
    )
    return dq, dk, dv


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """Samples, heads, queries, keys and columns, if a tile holds them."""
    batch, heads = (max(x.shape[dim] for x in (q, k, v)) for dim in (0, 1))
    queries, d, keys = *q.shape[2:], k.shape[2]
    if keys > MOST_KEYS or d > MOST_COLUMNS:
        raise ValueError(
            f"short_attention: {keys} keys of {d} columns; expected at most {MOST_KEYS} keys of "
            f"{MOST_COLUMNS} columns"
        )
    return batch, heads, queries, keys, d


def _read_bias(q: Tensor, bias: Tensor | None) -> tuple[Tensor, list[int], int, bool]:
    """What a kernel reads as bias, its strides, its kind, and whether queries have their own."""
    if bias is None:
        return q, _steps(q), NO_BIAS, False
    bias = bias if _is_near(bias) else bias.contiguous()
    if bias.dtype is torch.bool:
        return bias.view(torch.uint8), _steps(bias), EXCLUDES.value, bias.shape[2] > 1
    return bias, _steps(bias), ADDS.value, bias.shape[2] > 1


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and _is_near(x) else x.contiguous()


def _is_near(x: Tensor) -> bool:
    """Whether offsets within a sample are less than 2^31, as the kernel computes them."""
    ends = zip(x.shape[1:], _steps(x)[1:], strict=True)
    return sum((size - 1) * step for size, step in ends) < 2**31


def _steps(x: Tensor) -> list[int]:
    """Strides, 0 along what is there once."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
