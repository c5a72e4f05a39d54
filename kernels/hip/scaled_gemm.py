"""FP8 GEMMs on AMD's matrix cores, with scales of rows, or of 1x128 by 128x128.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

a: [m, k] and b: [k, n] column-major, rows padded as `types.empty_data` does; d: [m, n] bfloat16,
any row stride; bias: [n] bfloat16. See scaled_gemm.hip.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lokakern import jit
from lokakern.hip import HipLaunch, Program
from lokakern.kernels.hip.quantize import ARCHITECTURES, THREADS, UNMEASURED
from lokakern.registry.register import fp8_format, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
)

SOURCE = str(Path(__file__).with_suffix(".hip"))


class Tile(NamedTuple):
    """Sums that a block makes."""

    m: int
    n: int


# From the largest on the first that gives every compute unit a block: what 128 x 128 sums read is a
# quarter of what they read in tiles of 32 x 32. None of it was measured.
TILES = (Tile(128, 128), Tile(64, 128), Tile(64, 64), Tile(32, 32))


def tile_for(m: int, n: int, compute_units: int) -> Tile:
    """The tile of a product."""
    for tile in TILES:
        if blocks_of(tile, m, n) >= compute_units and tile.n <= max(32, 2 * n):
            return tile
    return TILES[-1]


def blocks_of(tile: Tile, m: int, n: int) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


@functools.lru_cache(maxsize=64)
def bind(tile: Tile, by_group: bool) -> HipLaunch:
    """The launch of one signature."""
    macros = (("TILE_M", tile.m), ("TILE_N", tile.n), ("BY_GROUP", int(by_group)))
    program = Program(SOURCE, "scaled_gemm", macros)
    return HipLaunch(program, pointers=6, scalars="iiiiiiii", threads=THREADS)


def _multiply(
    by_group: bool,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    (m, k), n = a.shape, b.shape[1]
    tile = tile_for(m, n, jit.compute_units(a.get_device()))
    strides = (a_scale.stride(1), b_scale.stride(1)) if by_group else (0, 0)
    bind(tile, by_group)(
        blocks_of(tile, m, n), (a, a_scale, b, b_scale, out, bias),
        (m, n, k, a.stride(0), b.stride(1), out.stride(0), *strides),
    )  # fmt: skip


def _supports(by_group: bool, problem: Problem, device: Device) -> Support:
    why = why_not_operands(by_group, problem, device)
    if why is not None:
        return Rejected(why)
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    return ACCEPTED


def why_not_operands(by_group: bool, problem: Problem, device: Device) -> str | None:
    """Why operands are none that `source_of` of products.hpp walks through, or None."""
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    wanted = (Granularity.GROUP, Granularity.BLOCK) if by_group else (Granularity.ROW,) * 2
    if have != wanted:
        words = f"{wanted[0].value} x {wanted[1].value}"
        return f"takes {words} scales, not {have[0].value} x {have[1].value}"
    own = fp8_format(device)
    for operand, name in ((problem.a, "a"), (problem.b, "b")):
        if operand.format is not own:
            return f"multiplies {own.value} there, E4M3 only; {name} is {operand.format.value}"
        if operand.alignment < 16:
            return f"rows of {name} must start at multiples of 16 bytes"
    if problem.a.layout is not Layout.ROW or problem.b.layout is not Layout.COLUMN:
        return "a must be row-major and b column-major"
    if max(problem.m, problem.n, problem.k) >= 2**31:
        return "counts rows in 32 bits"
    return None


for _by_group in (False, True):
    register(
        "scaled_gemm",
        name="scaled_gemm_block" if _by_group else "scaled_gemm_row",
        architectures=ARCHITECTURES,
        unmeasured=UNMEASURED,
        granularity=Granularity.GROUP if _by_group else Granularity.ROW,
        b_granularity=Granularity.BLOCK if _by_group else Granularity.ROW,
        accumulation="promoted",  # the matrix cores sum in float32
        supports=functools.partial(_supports, _by_group),
    )(functools.partial(_multiply, _by_group))
