"""The sum of two products, of which one has a left operand for all samples.

    out[b] = A[b] B[b] + W X[b]

A: [batch, m, k]; B: [batch, k, n]; W: [m, r]; X: [batch, r, n]; all bfloat16 or float16, rows of A,
B and X are contiguous, strides of the others are free. Sums are float32, rounded once.

So is the gradient of embeddings that a factorization machine and products across tokens read: at
8192 samples, m = 720, n = 160, k = 24 and r = 120 two batched products and the sum that a compiler
writes move 9.4 GB for their results, this kernel 1.9: 2722 and 1287 us of an H200. With k = 48 and
r = 192 it takes 1663, and each program reads its part of W once, for many samples; one for each
sample takes 2173.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import TritonLauncher

MOST_K = 64
MOST_R = 256
# Of a loop over samples: above, and with k > 32, it takes 232 KiB of shared memory; Hopper has 227.
MOST_R_OF_MANY = 192
STAGES = 3


@triton.jit
def _added(
    left: tl.tensor,
    weight: tl.tensor,
    other_weight: tl.tensor,
    b: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    has_row: tl.tensor,
    column: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    r: tl.tensor,
    b_row: tl.tensor,
    x_row: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    MORE: tl.constexpr,
) -> None:
    """Write some columns of a sample; ``out`` points to the rows, b and x to the sample."""
    inner, shared = tl.arange(0, K), tl.arange(0, R)
    has_column = (column < n)[None, :]
    right = tl.load(
        b + inner[:, None] * b_row + column[None, :], (inner < k)[:, None] & has_column, other=0.0
    )
    given = tl.load(
        x + shared[:, None] * x_row + column[None, :], (shared < r)[:, None] & has_column, other=0.0
    )
    total = tl.dot(left, right)
    total = tl.dot(weight.T, given, total)
    if MORE:
        rest = R + tl.arange(0, MORE)
        others = tl.load(
            x + rest[:, None] * x_row + column[None, :], (rest < r)[:, None] & has_column, other=0.0
        )
        total = tl.dot(other_weight.T, others, total)
    tl.store(out + column[None, :], total.to(out.dtype.element_ty), has_row & has_column)


@triton.jit
def added_products_kernel(
    a: tl.tensor,
    b: tl.tensor,
    w: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    r: tl.tensor,
    samples: tl.tensor,
    groups: tl.tensor,
    a_sample: tl.tensor,
    a_row: tl.tensor,
    b_sample: tl.tensor,
    b_row: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    x_sample: tl.tensor,
    x_row: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    MORE: tl.constexpr,
    IS_ONE: tl.constexpr,
) -> None:
    """M rows of every groups-th sample; r is padded to R + MORE, of which MORE may be 0.

    With IS_ONE the groups are the samples. Else all loads of a program are one loop, so that those
    of a sample begin before the one before it is done.
    """
    tiles = tl.cdiv(m, M)
    group = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * M + tl.arange(0, M)
    has_row = (row < m)[:, None]
    inner, shared = tl.arange(0, K), tl.arange(0, R)
    weight = tl.load(
        w + shared[:, None] * w_column + row[None, :] * w_row,
        (shared < r)[:, None] & (row < m)[None, :],
        other=0.0,
    )
    other_weight = weight
    if MORE:
        rest = R + tl.arange(0, MORE)
        other_weight = tl.load(
            w + rest[:, None] * w_column + row[None, :] * w_row,
            (rest < r)[:, None] & (row < m)[None, :],
            other=0.0,
        )
    left_at = a + row[:, None] * a_row + inner[None, :]
    has_left = has_row & (inner < k)[None, :]
    if IS_ONE:
        sample = group.to(tl.int64)
        left = tl.load(left_at + sample * a_sample, has_left, other=0.0)
        for start in range(0, n, N):
            _added(
                left, weight, other_weight, b + sample * b_sample, x + sample * x_sample,
                out + (sample * m + row[:, None]) * n, has_row, start + tl.arange(0, N), n, k, r,
                b_row, x_row, K, R, MORE,
            )  # fmt: skip
    else:
        blocks = tl.cdiv(n, N)
        for i in range(tl.cdiv(samples - group, groups) * blocks):
            sample = (group + i // blocks * groups).to(tl.int64)
            left = tl.load(left_at + sample * a_sample, has_left, other=0.0)
            _added(
                left, weight, other_weight, b + sample * b_sample, x + sample * x_sample,
                out + (sample * m + row[:, None]) * n, has_row, i % blocks * N + tl.arange(0, N),
                n, k, r, b_row, x_row, K, R, MORE,
            )  # fmt: skip


_launch = TritonLauncher(added_products_kernel)


class Tile(NamedTuple):
    """Constants of the kernel, and its warps."""

    rows: int
    columns: int
    k: int
    r: int
    more: int
    is_one: bool
    warps: int


def tile_of(k: int, r: int) -> Tile:
    """The tile; of twenty on an H200 the fastest at r = 120 and, of many samples, at 192."""
    rows, columns, warps = (128, 32, 4) if r <= 128 else (128, 64, 8)
    is_one = r <= 128 or r > MOST_R_OF_MANY
    return Tile(rows, columns, max(16, triton.next_power_of_2(k)), *padded_to(r), is_one, warps)


def padded_to(r: int) -> tuple[int, int]:
    """R and MORE: the least sum of a power of two and one that is less, or 0."""
    whole = max(16, triton.next_power_of_2(r))
    for more in (16, 32, 64):
        if r <= whole // 2 + more < whole:
            return whole // 2, more
    return whole, 0


def added_products(a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """``a @ b + w @ x``, ``[batch, m, n]``, contiguous.

    Args:
        a: ``[batch, m, k]``.
        b: ``[batch, k, n]``.
        w: ``[m, r]``.
        x: ``[batch, r, n]``.

    Raises:
        ValueError: k or r is larger than a tile.
    """
    (batch, m, k), (r, n) = a.shape, x.shape[1:]
    if k > MOST_K or r > MOST_R:
        raise ValueError(
            f"added_products: k = {k} and r = {r}; expected at most {MOST_K} and {MOST_R}"
        )
    out = a.new_empty((batch, m, n))
    if not out.numel():
        return out
    a, b, x = (y if _reaches(y) else y.contiguous() for y in (a, b, x))
    strides = [stride for y in (a, b) for stride in y.stride()[:2]]
    tile = tile_of(k, r)
    tiles = -(-m // tile.rows)
    groups = batch if tile.is_one else min(batch, max(1, _processors(a.device) // tiles))
    _launch(
        tiles * groups,
        (a, b, w, x, out),
        (m, n, k, r, batch, groups, *strides, *w.stride(), *x.stride()[:2]),
        (),
        tile[:-1],
        tile.warps,
        STAGES,
    )
    return out


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    """Programs that run at once, one on each multiprocessor; few in the interpreter."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 2


def _reaches(x: Tensor) -> bool:
    """Whether rows are contiguous, and the offset of the last in a sample is less than 2^31."""
    return x.stride(-1) == 1 and x.shape[1] * x.stride(1) < 2**31
