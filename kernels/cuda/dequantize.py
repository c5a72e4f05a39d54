"""Dequantize from FP8: x = rn(q * s) in float32, then rounded to the output.

q: [rows, columns], rows contiguous; x: [rows, columns], bfloat16, float16 or float32; both with any
row stride; scales as `Granularity.empty_scale` lays them out. See dequantize.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.quantize_tile import ARCHITECTURES, CHUNK_BYTES, SCALES
from lokakern.registry.register import register
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

SOURCE = str(Path(__file__).with_suffix(".cu"))
THREADS = 256
# A third of the bytes are read: 1.4 TB/s times a latency of 0.7 us are 1 MB, or 7.6 KiB for each of
# 132 SMs. Threads that fill all of them once read one piece of 8 bytes each, 16 KiB an SM; where
# there are more pieces, fewer threads read several each.
ACCESSES = 4
FILLING = 132 * 2048  # threads
# Columns, also of pieces that reach beyond a row, and the number of a thread are 32 bits wide.
LARGEST, MOST = 2**31 - 16, 2**35


@functools.lru_cache(maxsize=1024)
def bind(
    granularity: Granularity,
    in_place: bool,
    ragged: bool,
    accesses: int,
    source: torch.dtype,
    target: torch.dtype,
) -> CudaLaunch:
    """The launch of one signature.

    Args:
        granularity: What one scale covers.
        in_place: Whether every row of the output starts at a multiple of 16 bytes, and of q at one
            of as many bytes as become these.
        ragged: Whether rows do not consist of whole pieces of 16 bytes of the output.
        accesses: Pieces of a thread.
        source: float8_e4m3fn or float8_e5m2.
        target: bfloat16, float16 or float32.
    """
    macros = {
        "IS_E5M2": int(Format.of(source) is Format.E5M2),
        "OUT_BYTES": target.itemsize,
        "IS_HALF": int(target is torch.float16),
        "SCALES": SCALES[granularity],
        "IN_PLACE": int(in_place),
        "RAGGED": int(ragged),
        "ACCESSES": accesses,
        "THREADS": THREADS,
    }
    program = nvrtc.Program(SOURCE, "dequantize", tuple(macros.items()))
    return CudaLaunch(program, pointers=3, scalars="iiiqqq", threads=THREADS, programmatic=True)


def _dequantize(
    granularity: Granularity,
    data: Tensor,
    scale: Tensor,
    out: Tensor,
    _workspace: tuple[Tensor, ...],
) -> None:
    rows, columns = data.shape
    stride, pitch, item = data.stride(0), out.stride(0), out.element_size()
    piece = CHUNK_BYTES // item
    many = rows > 1
    whole = not (out.data_ptr() | (pitch * item if many else 0)) & CHUNK_BYTES - 1
    in_place = whole and not (data.data_ptr() | (stride if many else 0)) & piece - 1
    ragged = not in_place or columns % piece > 0
    across = -(-(columns if whole else columns + piece - 1) // piece)
    accesses = ACCESSES if rows >= ACCESSES and rows * across > FILLING else 1
    blocks = -(-(-(-rows // accesses) * across) // THREADS)
    launch = bind(granularity, in_place, ragged, accesses, data.dtype, out.dtype)
    by_group = int(granularity is Granularity.GROUP)  # the other stride of a scale is 1
    sizes = (rows, columns, across, stride, pitch, scale.stride(by_group))
    launch((blocks, 1, 1), (data, scale, out), sizes)


def _supports(granularity: Granularity, problem: Problem, device: Device) -> Support:
    if problem.a.granularity is not granularity:
        return Rejected(f"takes {granularity.value} scales, not {problem.a.granularity.value}")
    if problem.a.format not in (Format.E4M3FN, Format.E5M2):
        return Rejected(f"{device.architecture} does not convert from {problem.a.format.value}")
    if problem.a.layout is not Layout.ROW:
        return Rejected("takes row-major input")
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    if max(problem.m, problem.k) >= LARGEST or problem.m * problem.k >= MOST:
        return Rejected(
            "sizes must be less than 2^31 - 16, and elements less than 2^35; they are "
            f"{problem.shape}"
        )
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


for _granularity in SCALES:
    register(
        "dequantize",
        name=f"dequantize_{_granularity.suffix}",
        architectures=ARCHITECTURES,
        granularity=_granularity,
        supports=functools.partial(_supports, _granularity),
    )(functools.partial(_dequantize, _granularity))
