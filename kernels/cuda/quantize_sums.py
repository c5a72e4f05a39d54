"""Sums of columns, from those of each 128 rows that the quantizers by tiles make on the way.

sums[c] = sum over tiles t of parts[t, c], in the order of `lokakern.sums`. See quantize_sums.cu.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.sums import LINES
from lokakern.types import GROUP

SOURCE = str(Path(__file__).with_suffix(".cu"))
COLUMNS = 8  # of a block: 32 bytes of a row of parts


def empty_parts(x: Tensor) -> Tensor:
    """Room for the sums of every 128 rows of x, ``[ceil(rows / 128), columns]``."""
    rows, columns = x.shape
    return torch.empty((-(-rows // GROUP), columns), dtype=torch.float32, device=x.device)


@functools.cache
def bind() -> CudaLaunch:
    """The launch, one for all sizes."""
    macros = {"COLUMNS": COLUMNS, "LINES": LINES}
    program = nvrtc.Program(SOURCE, "quantize_sums", tuple(macros.items()))
    threads = COLUMNS * LINES
    return CudaLaunch(program, pointers=2, scalars="ii", threads=threads, programmatic=True)


def launch_sums(parts: Tensor, sums: Tensor) -> None:
    """Add up the lines of parts."""
    tiles, columns = parts.shape
    bind()((-(-columns // COLUMNS), 1, 1), (parts, sums), (tiles, columns))
