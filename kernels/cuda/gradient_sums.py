"""Gradients of vectors from sums of each 128 rows of norm_backward.cu, in their dtype.

The order is that of `lokakern.sums` in all. See gradient_sums.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import quantize_sums
from lokakern.sums import LINES

SOURCE = str(Path(__file__).with_suffix(".cu"))
HALF_SOURCE = str(Path(__file__).with_name("half_gradient_sums.cu"))
COLUMNS = quantize_sums.COLUMNS


@functools.cache
def bind(dtype: torch.dtype = torch.bfloat16) -> CudaLaunch:
    """The launch for a dtype, one for all sizes."""
    source = HALF_SOURCE if dtype is torch.float16 else SOURCE
    macros = {"COLUMNS": COLUMNS, "LINES": LINES}
    program = nvrtc.Program(source, "gradient_sums", tuple(macros.items()))
    threads = COLUMNS * LINES
    return CudaLaunch(program, pointers=2, scalars="ii", threads=threads, programmatic=True)


def launch_sums(parts: Tensor, sums: Tensor) -> None:
    """Add up the lines of parts, in float32, and round to the dtype of sums.

    Args:
        parts: What a kernel with sums of columns leaves in its workspace.
        sums: ``[columns of parts]``, float32, bfloat16 or float16, contiguous.
    """
    if sums.dtype is torch.float32:
        quantize_sums.launch_sums(parts, sums)
        return
    tiles, columns = parts.shape
    bind(sums.dtype)((-(-columns // COLUMNS), 1, 1), (parts, sums), (tiles, columns))
