"""The sum of two products, of which one has a left operand for all samples. See added_products.cu.

    out[s] = a[s] @ b[s] + w @ x[s]

a: [batch, m, k], b: [batch, k, n], w: [m, r], x: [batch, r, n], all bfloat16 or float16; rows of a,
b and x are contiguous, other strides and addresses multiples of 16 bytes. Sums are float32, rounded
once. Triton's kernel (kernels/triton/added_products.py) takes what this one does not.
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
from lokakern.kernels.cuda.tiles import SHARED_BYTES

SOURCE = str(Path(__file__).with_suffix(".cu"))
DEPTH = 64  # rows of x in a step
BOX_COLUMNS = 64  # of b and x, in a bulk copy
ROWS = 64  # of a warpgroup
MOST_WARPGROUPS = 3
WIDEST_OF_THREE = 192  # more sums do not fit the registers of three warpgroups
MOST_K, MOST_R, MOST_N = 64, 256, 256
LEAST_SLOTS, MOST_SLOTS = 3, 8
PIECE_COLUMNS = 32
PIECE_BYTES = 16 * PIECE_COLUMNS * 2  # of a warp's output on its way out
ALIGNMENT = 16  # bytes
DTYPES = {torch.bfloat16, torch.float16}


class Tile(NamedTuple):
    """What a block computes; the macros of added_products.cu explain it."""

    warpgroups: int
    width: int
    steps: int

    @property
    def rows(self) -> int:
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    @property
    def slot_bytes(self) -> int:
        return 2 * DEPTH * max(self.rows, -(-self.width // BOX_COLUMNS) * BOX_COLUMNS)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring: rows of w, output on its way, barriers."""
        return self.steps * self.rows * DEPTH * 2 + 4 * self.warpgroups * PIECE_BYTES + 16

    @property
    def slots(self) -> int:
        return min(MOST_SLOTS, (SHARED_BYTES - self.fixed_bytes) // (self.slot_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        return self.fixed_bytes + self.slots * (self.slot_bytes + 16)


def tile_of(m: int, n: int, r: int) -> Tile:
    """As many rows as registers and shared memory allow, with the least waste."""
    width, steps = -(-n // PIECE_COLUMNS) * PIECE_COLUMNS, -(-r // DEPTH)
    most = MOST_WARPGROUPS if width <= WIDEST_OF_THREE else MOST_WARPGROUPS - 1
    high = -(-m // -(-m // (ROWS * most)))
    tile = Tile(-(-high // ROWS), width, steps)
    while tile.slots < LEAST_SLOTS:
        tile = tile._replace(warpgroups=tile.warpgroups - 1)
    return tile


@functools.lru_cache(maxsize=256)
def bind(tile: Tile, k: int, r: int, dtype: torch.dtype) -> CudaLaunch:
    """The launch of one tile, of sums of so many products."""
    macros = {
        "K": k, "R": r, "WARPGROUPS": tile.warpgroups, "WIDTH": tile.width, "SLOTS": tile.slots,
        "IS_FLOAT16": int(dtype is torch.float16),
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "added_products", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=1, scalars="iiiii", threads=tile.threads,
        shared_bytes=tile.shared_bytes, tensor_maps=4, programmatic=True,
    )  # fmt: skip


def takes(a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> bool:
    """Whether this kernel computes the sum of these products, which are on a GPU."""
    (batch, m, k), (r, n) = a.shape, x.shape[1:]
    if not {a.dtype} == {b.dtype, w.dtype, x.dtype} <= DTYPES:
        return False
    if (b.shape, w.shape, x.shape[0]) != ((batch, k, n), (m, r), batch):
        return False
    step = ALIGNMENT // a.element_size()
    if not batch * m * n or not (0 < k <= MOST_K and 0 < r <= MOST_R and n <= MOST_N):
        return False
    if r % step or n % step or not all(map(_has_maps, (a, b, x))):
        return False
    device = current_device("cuda", a.device.index or 0)
    return device.architecture == "sm_90" and nvrtc.why_not(device) is None


def _has_maps(x: Tensor) -> bool:
    step = ALIGNMENT // x.element_size()
    *outer, inner = x.stride()
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and not any(stride % step for stride in outer)
    return inner == 1 and min(outer) > 0 and is_aligned


def added_products(a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """``a @ b + w @ x``, ``[batch, m, n]``, contiguous.

    Args:
        a: ``[batch, m, k]``.
        b: ``[batch, k, n]``.
        w: ``[m, r]``, of any strides: copied where its rows are not contiguous.
        x: ``[batch, r, n]``.
    """
    (batch, m, k), (r, n) = a.shape, x.shape[1:]
    out = a.new_empty((batch, m, n))
    w = w if _has_maps(w) else w.clone(memory_format=torch.contiguous_format)
    tile = tile_of(m, n, r)
    tiles = -(-m // tile.rows)
    groups = min(batch, max(1, jit.compute_units(a.get_device()) // tiles))
    right = (1, DEPTH, BOX_COLUMNS)
    maps = (
        tensor_map(a, (1, tile.rows, DEPTH)), tensor_map(b, right),
        tensor_map(w, (tile.rows, DEPTH)), tensor_map(x, right),
    )  # fmt: skip
    bind(tile, k, r, a.dtype)((tiles * groups, 1, 1), (out,), (batch, m, n, tiles, groups), maps)
    return out
