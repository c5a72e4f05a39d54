"""Gradients of vectors from sums of each 128 rows of norm_backward.cu, float32 or bfloat16.

The order is that of `lokakern.sums` in both. See gradient_sums.cu.
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
COLUMNS = quantize_sums.COLUMNS


@functools.cache
def bind() -> CudaLaunch:
    """The launch, one for all sizes."""
    macros = {"COLUMNS": COLUMNS, "LINES": LINES}
    program = nvrtc.Program(SOURCE, "gradient_sums", tuple(macros.items()))
    threads = COLUMNS * LINES
    return CudaLaunch(program, pointers=2, scalars="ii", threads=threads, programmatic=True)


def launch_sums(parts: Tensor, sums: Tensor) -> None:
    """Add up the lines of parts, float32 or bfloat16 as sums are.

    Args:
        parts: What a kernel with sums of columns leaves in its workspace.
        sums: ``[columns of parts]``, contiguous.
    """
    if sums.dtype is not torch.bfloat16:
        quantize_sums.launch_sums(parts, sums)
        return
    tiles, columns = parts.shape
    bind()((-(-columns // COLUMNS), 1, 1), (parts, sums), (tiles, columns))
