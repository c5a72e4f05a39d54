"""What a watch takes of the operands of a pass, by one launch of window_samples.cu.

The C++ library launches it (`lokakern/native/window.cpp`).
"""

from __future__ import annotations

from pathlib import Path

from lokakern.nvrtc import Program

SOURCE = str(Path(__file__).with_suffix(".cu"))
SPAN = 256  # columns of a tile: 16 bytes of bfloat16 for each of 32 lanes
# Rows of a tile: more of them raise the sizes of columns less often, 64 times for 8192 rows.
TILE_ROWS = 128
MOST_KEPT = 256  # rows: each of 8 warps keeps 32 of them in registers
MOST_MATRICES = 32  # of 120 bytes each; a kernel may be given 4096


def program() -> Program:
    """The kernel, one for all sizes and dtypes."""
    macros = {
        "TILE_ROWS": TILE_ROWS, "SPAN": SPAN, "MOST_KEPT": MOST_KEPT,
        "MOST_MATRICES": MOST_MATRICES,
    }  # fmt: skip
    return Program(SOURCE, "window_samples", tuple(macros.items()))
