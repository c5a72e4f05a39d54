"""FP8 GEMMs on AMD's matrix cores whose rows are normalized before they leave the registers.

    y = (sum_k a[m, k] * b[k, n]) * sa * sb + bias[n];  d = f(norm(y) * weight + shift)

a, b and their scales as scaled_gemm.py takes them; rows of at most 256 columns, whole or in
blocks; d bfloat16, or FP8 with scales of rows, of 1x128 or a given one. See gemm_norm.hip.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern.hip import HipLaunch, Program
from lokakern.kernels.hip.quantize import ARCHITECTURES, THREADS, UNMEASURED
from lokakern.kernels.hip.scaled_gemm import check_pitches, why_not_operands
from lokakern.norm import Norm
from lokakern.registry.register import fp8_format, register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
    norm_form,
)

SOURCE = str(Path(__file__).with_suffix(".hip"))
ROWS = 64  # of a block
TILES = (64, 128, 192, 256)  # columns
KINDS = {"none": 0, "layer": 1, "rms": 2, "block_rms": 2}
ACTIVATIONS = ("none", "relu", "hardswish", "silu", "gelu", "gelu_tanh")
OUTPUTS = (Granularity.NONE, Granularity.ROW, Granularity.GROUP, Granularity.TENSOR)


def tile_for(n: int, norm: Norm) -> int | None:
    """Columns of the tile that holds a row in whole blocks, or None."""
    fitting = (tile for tile in TILES if tile >= n and tile % (norm.block or tile) == 0)
    return next(fitting, None)


def blocks_of(m: int) -> int:
    return -(-m // ROWS)


@functools.lru_cache(maxsize=1024)
def bind(tile: int, by_group: bool, norm: Norm, activation: str, output: Granularity) -> HipLaunch:
    """The launch of one signature."""
    macros = {
        "TILE_N": tile,
        "BY_GROUP": int(by_group),
        "NORM": KINDS[norm.kind],
        "SPAN": norm.block or tile,
        "ACTIVATION": ACTIVATIONS.index(activation),
        "OUT": OUTPUTS.index(output),
    }
    program = Program(SOURCE, "gemm_norm", tuple(macros.items()))
    return HipLaunch(program, pointers=9, scalars="iiiiiiiiif", threads=THREADS)


def _gemm_norm(
    by_group: bool,
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    (m, k), n = a.shape, b.shape[1]
    data, scale = b.transpose
    assert a.scale is not None and scale is not None  # FP8 has scales
    check_pitches(a=a.data, b=data.t())
    given = (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    vectors = [_in_float32(x, room) for x, room in zip(given, workspace[0], strict=True)]
    made, made_scale, output, scale_stride = out, None, Granularity.NONE, 0
    if isinstance(out, QuantizedTensor):
        made, made_scale, output = out.data, out.scale, out.granularity
        if output is Granularity.GROUP and made_scale is not None:
            scale_stride = made_scale.stride(1)
    assert isinstance(made, Tensor)
    norm = epilogue.norm
    tile = tile_for(n, norm)
    assert tile is not None  # see _supports
    strides = (a.scale.stride(1), scale.stride(1)) if by_group else (0, 0)
    bind(tile, by_group, norm._replace(eps=0.0), epilogue.activation, output)(
        blocks_of(m), (a.data, a.scale, data, scale, made, made_scale, *vectors),
        (m, n, k, a.data.stride(0), data.stride(1), made.stride(0), *strides, scale_stride,
         norm.eps),
    )  # fmt: skip


def _in_float32(vector: Tensor | None, room: Tensor) -> Tensor | None:
    if vector is None or vector.dtype is torch.float32:
        return vector
    return room.copy_(vector)


def _room_for_vectors(a: QuantizedTensor, b: QuantizedTensor, *_: object) -> tuple[Tensor, ...]:
    return (torch.empty((3, b.shape[1]), dtype=torch.float32, device=a.data.device),)


def _supports(by_group: bool, problem: Problem, device: Device) -> Support:
    granularity = Granularity.GROUP if by_group else Granularity.ROW
    why = why_not_operands(granularity, problem, device, blocks_of(problem.m))
    if why is not None:
        return Rejected(why)
    own = fp8_format(device)
    if problem.out_format not in (Format.BFLOAT16, own):
        return Rejected(f"writes bfloat16 or {own.value} there, not {problem.out_format.value}")
    if problem.out_granularity not in OUTPUTS:
        return Rejected(f"makes no {problem.out_granularity.value} scales")
    form = norm_form(problem.epilogue)
    if form.residual or form.residual_last or form.last not in ACTIVATIONS:
        return Rejected("has activations only: no residual, gate or cross")
    norm = form.norm
    if norm.kind == "block_rms" and (norm.block % 16 or problem.n % norm.block):
        return Rejected(f"normalizes blocks of multiples of 16 that divide n={problem.n}")
    if tile_for(problem.n, norm) is None:
        return Rejected(f"holds whole rows of at most {TILES[-1]} columns; n={problem.n}, {norm}")
    return ACCEPTED


for _by_group in (False, True):
    register(
        "gemm_norm",
        name="gemm_norm_block" if _by_group else "gemm_norm_row",
        architectures=ARCHITECTURES,
        unmeasured=UNMEASURED,
        granularity=Granularity.GROUP if _by_group else Granularity.ROW,
        b_granularity=Granularity.BLOCK if _by_group else Granularity.ROW,
        accumulation="promoted",  # the matrix cores sum in float32
        supports=functools.partial(_supports, _by_group),
        workspace=_room_for_vectors,
    )(functools.partial(_gemm_norm, _by_group))
