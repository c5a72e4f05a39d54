"""The gradient of a weight that multiplies across tokens: sum over samples of dY[b] X[b]^T.

dY: [batch, count, d]; x: [batch, n, d], both bfloat16 or float16; rows of d are contiguous, strides
of the others are free.
No matrix holds what is summed over, samples and columns: a batched product writes a gradient for
every sample, and adds 4.5 GB of traffic to the 2.4 that dY and x are at count = 192, n = 720,
d = 160 and 8192 samples. Here a program sums a tile of the gradient over many samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lokakern.jit import TritonLauncher, compute_units

# Of eleven tiles on an H200 none is faster at all of seven shapes, this is within 11 % of the best:
# 107 us at n = 64, count = 56 (d = 160, 8192 samples), 1140 at n = 720, count = 192, where a
# batched product and its sum take 120 and 2217.
COUNT, N, D = 64, 128, 64  # less of D where d is less
PROGRAMS = 2  # for each multiprocessor
WARPS, STAGES = 4, 3


@triton.jit(do_not_specialize=["batch", "samples"])
def token_gradient_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    grad_sample: tl.tensor,
    grad_row: tl.tensor,
    x_sample: tl.tensor,
    x_row: tl.tensor,
    batch: tl.tensor,
    samples: tl.tensor,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """A tile of COUNT x N, summed over a range of samples; tiles of a range run side by side."""
    across = tl.cdiv(n, N)
    tiles = tl.cdiv(count, COUNT) * across
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile // across * COUNT + tl.arange(0, COUNT)
    column = tile % across * N + tl.arange(0, N)
    first = part * samples
    last = tl.minimum(first + samples, batch)
    total = tl.zeros((COUNT, N), tl.float32)
    for step in range(first * STEPS, last * STEPS):  # one loop, which Triton pipelines
        sample = tl.cast(step // STEPS, tl.int64)
        inner = step % STEPS * D + tl.arange(0, D)
        left = tl.load(
            grad + sample * grad_sample + row[:, None] * grad_row + inner[None, :],
            (row < count)[:, None] & (inner < d)[None, :],
            other=0.0,
        )
        right = tl.load(
            x + sample * x_sample + column[:, None] * x_row + inner[None, :],
            (column < n)[:, None] & (inner < d)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right.T, total)
    target = out + part.to(tl.int64) * count * n + row[:, None] * n + column[None, :]
    tl.store(target, total, (row < count)[:, None] & (column < n)[None, :])


_launch = TritonLauncher(token_gradient_kernel)


def _reaches(x: Tensor) -> bool:
    """Whether rows are contiguous, and the offset of the last in a sample is less than 2^31."""
    return x.stride(-1) == 1 and x.shape[1] * x.stride(1) < 2**31


def token_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``sum(grad[b] @ x[b].T)`` in float32, ``[count, n]``; the same numbers at each call."""
    grad, x = (t if _reaches(t) else t.contiguous() for t in (grad, x))
    batch, count, d = grad.shape
    n = x.shape[1]
    if not (batch and count and n and d):
        return torch.zeros((count, n), dtype=torch.float32, device=x.device)
    inner = min(D, max(16, triton.next_power_of_2(d)))
    tiles = -(-count // COUNT) * -(-n // N)
    parts = max(1, PROGRAMS * compute_units(x.get_device()) // tiles)
    samples = -(-batch // parts)
    parts = -(-batch // samples)
    sums = torch.empty((parts, count, n), dtype=torch.float32, device=x.device)
    _launch(
        parts * tiles,
        (grad, x, sums),
        (count, n, d, grad.stride(0), grad.stride(1), x.stride(0), x.stride(1)),
        (batch, samples),
        (COUNT, N, inner, -(-d // inner)),
        WARPS,
        STAGES,
    )
    return sums[0] if parts == 1 else sums.sum(0)
