"""Programs for norms of rows in float16, each beside that for bfloat16."""

from __future__ import annotations

import torch

from lokakern.kernels.cuda import activate_quantize, half, norm_quantize
from lokakern.kernels.cuda.norm_quantize import Signature
from lokakern.nvrtc import Program
from lokakern.registry.register import load_kernels
from tests.support.norm_programs import ACTIVATED, E4M3, SIGNATURES

load_kernels()  # with what binds them for float16


def programs() -> dict[str, tuple[Program, Program]]:
    """That for bfloat16, and that for float16."""
    found = {}
    for columns, activation in ACTIVATED:
        easy = columns % 8 == 0
        found[f"activate_quantize {columns} {activation}"] = tuple(
            activate_quantize.bind(columns, activation, easy, easy, dtype, E4M3).launch.program
            for dtype in (torch.bfloat16, torch.float16)
        )
    for words, fields in SIGNATURES.items():
        for columns in (192, 8192):
            is_to_fp8, is_of_halves = fields[-2] == 1, fields[0] == 2
            if is_to_fp8 and is_of_halves and not (fields[2] and columns % fields[2]):
                launch = norm_quantize.bind(Signature(columns, *fields)).launch  # type: ignore[arg-type]
                both = launch.program, half._in_half(launch).program
                found[f"norm_quantize {columns} {words}"] = both
    return found


PROGRAMS = programs()
