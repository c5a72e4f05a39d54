"""Activate rows and quantize them to FP8 with one read. See activate_quantize.cu.

    d = f(x);   s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;   q = cast(rn(d / s))

x: [rows, columns], bfloat16 or float32, any row stride; q: [rows, columns], any row stride, with
scales of rows; at most as many columns as a block holds, 16384 of bfloat16.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.epilogue import ACTIVATIONS
from lokakern.kernels.cuda.norm_tiles import LAST
from lokakern.kernels.cuda.quantize import LOADS, LONGEST_TEAM, tile_of
from lokakern.kernels.cuda.quantize_tile import ARCHITECTURES, CHUNK_BYTES
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
LONGEST_BYTES = LONGEST_TEAM * LOADS * CHUNK_BYTES  # of a row that a block holds


class Bound(NamedTuple):
    """A launch with what its grid is made of."""

    launch: CudaLaunch
    rows: int  # of a block


@functools.lru_cache(maxsize=1024)
def bind(
    columns: int,
    activation: str,
    in_place: bool,
    whole: bool,
    source: torch.dtype,
    target: torch.dtype,
) -> Bound:
    """The launch of one signature.

    Args:
        columns: Of x.
        activation: f.
        in_place: Whether every row of x starts at a multiple of 16 bytes.
        whole: Whether every row of data starts where 16 bytes of x are written at once.
        source: bfloat16 or float32.
        target: float8_e4m3fn or float8_e5m2.
    """
    tile = tile_of(columns, CHUNK_BYTES // source.itemsize)
    macros = {
        "INPUT_BYTES": source.itemsize,
        "IS_E5M2": int(Format.of(target) is Format.E5M2),
        "IN_PLACE": int(in_place),
        "WHOLE": int(whole),
        "POWER_OF_TWO": 0,
        "COLUMNS": columns,
        "TEAM": tile.team,
        "ACCESSES": tile.accesses,
        "THREADS": tile.threads,
        "ACTIVATION": LAST[activation],
    }
    program = nvrtc.Program(SOURCE, "activate_quantize", tuple(macros.items()))
    launch = CudaLaunch(program, pointers=3, scalars="iqq", threads=tile.threads, programmatic=True)
    return Bound(launch, tile.threads // tile.team)


def _supports(problem: Problem, device: Device) -> Support:
    if problem.epilogue not in ACTIVATIONS[1:]:
        return Rejected(f"applies an activation and nothing else, not {problem.epilogue}")
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    if problem.out_format not in (Format.E4M3FN, Format.E5M2):
        return Rejected(f"writes e4m3fn or e5m2, not {problem.out_format.value}")
    if problem.out_granularity is not Granularity.ROW:
        return Rejected(f"makes scales of rows, not {problem.out_granularity.value}")
    longest = LONGEST_BYTES // problem.a.format.dtype.itemsize
    if problem.k > longest or problem.m >= 2**31:
        return Rejected(
            f"holds rows of up to {longest} elements, of fewer than 2^31; they are {problem.shape}"
        )
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


@register(
    "norm_quantize", name="activate_quantize_row", architectures=ARCHITECTURES, supports=_supports
)
def activate_quantize(
    x: Tensor,
    out: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    """Teams of as many threads as rows of `quantize` have, so that as many loads are in flight."""
    assert isinstance(out, QuantizedTensor) and out.scale is not None  # as _supports says
    rows, columns = x.shape
    data, stride, pitch, item = out.data, x.stride(0), out.data.stride(0), x.element_size()
    in_place = not (x.data_ptr() | stride * item) & 15
    whole = not (data.data_ptr() | pitch) & CHUNK_BYTES // item - 1
    bound = bind(columns, epilogue.activation, in_place, whole, x.dtype, data.dtype)
    blocks = -(-rows // bound.rows)
    bound.launch((blocks, 1, 1), (x, data, out.scale), (rows, stride, pitch))
