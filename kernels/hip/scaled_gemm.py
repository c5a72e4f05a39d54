"""FP8 GEMMs on AMD's matrix cores, with scales of rows, of 1x128 by 128x128, or of 1x32.

d[m, n] = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n]

a: [m, k] and b: [k, n] column-major, rows padded as `types.empty_data` does; d: [m, n] bfloat16,
any row stride; bias: [n] bfloat16. See scaled_gemm.hip.

Of scales of 1x128 by 128x128, sb and sa * sb must be less than 2^102, and on gfx942 the sums, too:
what is larger becomes infinite, and NaN where it meets 0.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit
from lokakern.errors import LaunchError
from lokakern.hip import HipLaunch, Program
from lokakern.kernels.hip.quantize import (
    ARCHITECTURES,
    MX_ARCHITECTURES,
    THREADS,
    UNMEASURED,
    why_not_counted,
)
from lokakern.registry.register import fp8_format, register
from lokakern.types import (
    ACCEPTED,
    GROUP,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    Rejected,
    Support,
)

SOURCE = str(Path(__file__).with_suffix(".hip"))


SCALES = (Granularity.ROW, Granularity.GROUP, Granularity.MX)  # of a
OF_B = {Granularity.GROUP: Granularity.BLOCK}  # where not the same


# Bytes between rows, less than: 256 rows lie within 2^31 bytes, which their offsets count.
LONGEST_PITCH = 2**23


class Tile(NamedTuple):
    """Sums that a block makes."""

    m: int
    n: int

    def threads(self, granularity: Granularity) -> int:
        """Threads of a block that multiplies an a with such scales."""
        is_shared = self.n > 128 and granularity is Granularity.GROUP  # a SIMD, by two waves
        return 2 * THREADS if is_shared else THREADS


# Cycles of a SIMD for a block, on gfx942 and on gfx950: counted with rowwise scales at k = 1024
# (kernels/hip/resources.json), never measured. Those of other scales and k have similar ratios.
TILES = {
    Tile(256, 256): (47220, 25260),
    Tile(128, 128): (13210, 7858),
    Tile(64, 128): (7850, 5080),
    Tile(128, 64): (7854, 5040),
    Tile(64, 64): (4599, 3354),
    Tile(128, 32): (4991, 3602),
    Tile(32, 32): (2100, 1944),
}


@functools.lru_cache(maxsize=256)
def tile_for(m: int, n: int, compute_units: int, fnuz: bool) -> Tile:
    """The tile in which the busiest SIMD needs the fewest cycles, the larger one of equals.

    Args:
        m: Rows of the output.
        n: Columns of the output.
        compute_units: Of the GPU.
        fnuz: Whether its FP8 is that of gfx942.
    """

    def cycles(tile: Tile) -> int:
        return -(-blocks_of(tile, m, n) // compute_units) * TILES[tile][not fnuz]

    return min(TILES, key=cycles)


def blocks_of(tile: Tile, m: int, n: int) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def check_pitches(**operands: Tensor) -> None:
    """Raise for operands whose rows are too far apart.

    Args:
        operands: Matrices of one byte an element by name, each row contiguous.

    Raises:
        LaunchError: `LONGEST_PITCH` bytes or more lie between the begins of two rows.
    """
    for name, rows in operands.items():
        if len(rows) > 1 and rows.stride(0) >= LONGEST_PITCH:
            raise LaunchError(
                f"{name}: rows, as they are stored, begin {rows.stride(0)} bytes apart; HIP "
                f"kernels take fewer than {LONGEST_PITCH}: copy {name}"
            )


@functools.lru_cache(maxsize=64)
def bind(tile: Tile, granularity: Granularity) -> HipLaunch:
    """The launch of one signature, for scales of a."""
    scales = SCALES.index(granularity)
    macros = (("TILE_M", tile.m), ("TILE_N", tile.n), ("SCALES", scales))
    program = Program(SOURCE, "scaled_gemm", macros)
    return HipLaunch(program, pointers=6, scalars="iiiiiiii", threads=tile.threads(granularity))


def _multiply(
    granularity: Granularity,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
) -> None:
    (m, k), n = a.shape, b.shape[1]
    check_pitches(a=a, b=b.t())
    fnuz = a.dtype is torch.float8_e4m3fnuz
    tile = tile_for(m, n, jit.compute_units(a.get_device()), fnuz)
    strides = (0, 0)
    if granularity is Granularity.GROUP:
        strides = a_scale.stride(1), b_scale.stride(1)
    elif granularity is Granularity.MX:
        check_pitches(a_scale=a_scale, b_scale=b_scale.t())
        strides = a_scale.stride(0), b_scale.stride(1)
    bind(tile, granularity)(
        blocks_of(tile, m, n), (a, a_scale, b, b_scale, out, bias),
        (m, n, k, a.stride(0), b.stride(1), out.stride(0), *strides),
    )  # fmt: skip


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    fnuz = fp8_format(device) is Format.E4M3FNUZ
    tile = tile_for(problem.m, problem.n, device.compute_units, fnuz)
    blocks = blocks_of(tile, problem.m, problem.n) * tile.threads(granularity) // THREADS
    why = why_not_operands(granularity, problem, device, blocks)
    if why is not None:
        return Rejected(why)
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    return ACCEPTED


def why_not_operands(
    granularity: Granularity, problem: Problem, device: Device, blocks: int
) -> str | None:
    """Why operands are none that `Rows` of products.hpp brings, or None.

    Args:
        granularity: Of the scales of a.
        problem: With operands that are quantized.
        device: The GPU.
        blocks: Of `THREADS` that its launch takes.
    """
    assert problem.b is not None  # an op with two operands
    have = (problem.a.granularity, problem.b.granularity)
    wanted = (granularity, OF_B.get(granularity, granularity))
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
    if granularity is Granularity.GROUP and -(-problem.k // GROUP) * (problem.m + 3) >= 2**31:
        return "counts scales in 32 bits"
    if problem.k > LONGEST_PITCH - 128:  # rows are padded to cache lines
        return f"takes rows of fewer than {LONGEST_PITCH} bytes, not {problem.k}"
    return why_not_counted(blocks, problem.m, problem.n, problem.k)


for _granularity in SCALES:
    _of_b = OF_B.get(_granularity, _granularity)
    _where = MX_ARCHITECTURES if _granularity is Granularity.MX else ARCHITECTURES
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_of_b.suffix}",
        architectures=_where,
        unmeasured={name: UNMEASURED[name] for name in _where},
        granularity=_granularity,
        b_granularity=_of_b,
        accumulation="promoted",  # the matrix cores sum in float32
        supports=functools.partial(_supports, _granularity),
    )(functools.partial(_multiply, _granularity))
