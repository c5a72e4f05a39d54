"""Operands of FP8 products on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from lokakern import numerics
from lokakern.formats import Format
from lokakern.types import Granularity


def drawn(m: int, n: int, k: int, seed: int) -> tuple[Any, Any]:
    """FP8 rows without gaps, of magnitudes over six decades."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = []
    for rows, form in ((m, Format.E4M3FN), (n, Format.E4M3FN if seed % 3 else Format.E5M2)):
        x = torch.randn(rows, k, device="cuda", generator=generator)
        x *= torch.logspace(-3, 3, rows, device="cuda").unsqueeze(1)
        made.append(numerics.quantize(x, form, Granularity.ROW))
    return made[0], made[1]
