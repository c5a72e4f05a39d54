"""Sums of the columns of a matrix in bfloat16 or float16, in the order of `lokakern.sums`.

Each 128 rows in column_sums.cu, and these sums in gradient_sums.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.gradient_sums import launch_sums
from lokakern.types import GROUP

SOURCE = str(Path(__file__).with_suffix(".cu"))
HALF_SOURCE = str(Path(__file__).with_name("half_column_sums.cu"))
CHUNK = 8  # columns that a thread reads at once, 16 bytes
WARPS = 8  # of a block
SPAN = 32 * CHUNK  # columns of a block


@functools.cache
def bind(dtype: torch.dtype = torch.bfloat16) -> CudaLaunch:
    """The launch for a dtype, one for all sizes."""
    source = HALF_SOURCE if dtype is torch.float16 else SOURCE
    macros = {"CHUNK": CHUNK, "SIDE": GROUP, "WARPS": WARPS}
    program = nvrtc.Program(source, "column_sums", tuple(macros.items()))
    return CudaLaunch(program, pointers=2, scalars="iiq", threads=32 * WARPS, programmatic=True)


def launch(x: Tensor, sums: Tensor) -> None:
    """Sum the columns of x.

    Args:
        x: ``[m, n]``, bfloat16 or float16, row-major; n and the distance between rows are multiples
            of 8.
        sums: ``[n]``, float32, bfloat16 or float16, contiguous.
    """
    rows, columns = x.shape
    tiles = -(-rows // GROUP)
    parts = torch.empty((tiles, columns), dtype=torch.float32, device=x.device)
    blocks = tiles * -(-columns // SPAN)
    bind(x.dtype)((blocks, 1, 1), (x, parts), (rows, columns, x.stride(0)))
    launch_sums(parts, sums)
