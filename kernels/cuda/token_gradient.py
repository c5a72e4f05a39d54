"""The gradient of a weight that multiplies across tokens, on Hopper. See token_gradient.cu.

    out[i, j] = sum_b sum_d grad[b, i, d] * x[b, j, d]

grad: [batch, count, d], x: [batch, n, d], both bfloat16 or float16; columns of d are contiguous and
multiples of 16 bytes, as are other strides and addresses. Products and sums are in float32, in an
order that depends on sizes and the GPU alone. Triton's kernel (kernels/triton/token_gradient.py)
takes what this one does not.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.device import current_device
from lokakern.driver import CudaLaunch, tensor_map
from lokakern.kernels.cuda.tiles import MOST_STAGES, SHARED_BYTES

SOURCE = str(Path(__file__).with_suffix(".cu"))
DEPTH = 64  # columns of a step
ROWS = 64  # of a warpgroup
MOST_WARPGROUPS = 3
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
WIDEST_OF_THREE = 224  # more sums do not fit the registers of three warpgroups
LEAST_COLUMNS = 32  # below, boxes of 64 are mostly empty
# Products of 16 columns that a tensor core adds up: it cuts off what float32 does not hold, so that
# errors grow with their number, by 2^-25 of the sum each at most. 2490 are 0.8e-4 (8192 samples of
# 160 columns in 33 parts).
MOST_PRODUCTS = 4096
ALIGNMENT = 16  # bytes


class Tile(NamedTuple):
    """What a block computes; the macros of token_gradient.cu explain it."""

    warpgroups: int
    width: int

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def stage_bytes(self) -> int:
        return (ROWS * self.warpgroups + self.width) * DEPTH * 2

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (SHARED_BYTES - 1024) // self.stage_bytes)


def tile_of(count: int, n: int) -> Tile:
    """Of a gradient ``[count, n]``: as high and wide as registers allow, with the least waste."""
    high = -(-count // -(-count // (ROWS * MOST_WARPGROUPS)))
    warpgroups = -(-high // ROWS)
    most = WIDEST_OF_THREE if warpgroups == MOST_WARPGROUPS else WIDTHS[-1]
    wide = -(-n // -(-n // most))
    return Tile(warpgroups, next(width for width in WIDTHS if width >= wide))


def samples_of_part(batch: int, d: int, parts: int) -> int:
    """Samples of each of so many parts, or fewer, for `MOST_PRODUCTS`."""
    return max(1, min(-(-batch // max(1, parts)), MOST_PRODUCTS // -(-d // 16)))


@functools.lru_cache(maxsize=256)
def bind(tile: Tile, d: int, dtype: torch.dtype) -> CudaLaunch:
    """The launch of one tile, of samples with d columns."""
    macros = {
        "D": d, "WARPGROUPS": tile.warpgroups, "WIDTH": tile.width, "STAGES": tile.stages,
        "IS_FLOAT16": int(dtype is torch.float16),
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "token_gradient", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=1, scalars="iiiiii", threads=tile.threads,
        shared_bytes=tile.stages * (tile.stage_bytes + 16), tensor_maps=2, programmatic=True,
    )  # fmt: skip


def takes(grad: Tensor, x: Tensor) -> bool:
    """Whether this kernel computes the gradient of these operands, which are on a GPU."""
    if not (grad.numel() and x.numel()):
        return False
    d = x.shape[2]
    is_whole = d * x.element_size() % ALIGNMENT == 0
    if d < LEAST_COLUMNS or not is_whole or not all(map(_has_maps, (grad, x))):
        return False
    device = current_device("cuda", x.device.index or 0)
    return device.architecture == "sm_90" and nvrtc.why_not(device) is None


def _has_maps(x: Tensor) -> bool:
    step = ALIGNMENT // x.element_size()
    rows, columns, inner = x.stride()
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and rows % step == 0 and columns % step == 0
    return inner == 1 and min(rows, columns) > 0 and is_aligned


def token_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``sum(grad[b] @ x[b].T)`` in float32, ``[count, n]``; the same numbers at each call."""
    batch, count, d = grad.shape
    n = x.shape[1]
    tile = tile_of(count, n)
    height = ROWS * tile.warpgroups
    across = -(-n // tile.width)
    tiles = -(-count // height) * across
    samples = samples_of_part(batch, d, jit.compute_units(x.get_device()) // tiles)
    parts = -(-batch // samples)
    sums = torch.empty((parts, count, n), dtype=torch.float32, device=x.device)
    maps = (tensor_map(grad, (1, height, DEPTH)), tensor_map(x, (1, tile.width, DEPTH)))
    bind(tile, d, x.dtype)(
        (parts * tiles, 1, 1), (sums,), (count, n, batch, samples, across, tiles), maps
    )
    return sums[0] if parts == 1 else sums.sum(0)
