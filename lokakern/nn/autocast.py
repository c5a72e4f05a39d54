"""Dtypes that are multiplied in bfloat16 or float16: these, and what autocast casts to them."""

from __future__ import annotations

import torch

HALF = frozenset((torch.bfloat16, torch.float16))
CAST = HALF | {torch.float32}  # dtypes that autocast casts


def half_of(x: torch.dtype, weight: torch.dtype, device: str) -> torch.dtype | None:
    """In what operands of these dtypes are multiplied: bfloat16 or float16, else None.

    It reads the state of autocast, which Dynamo guards.

    Args:
        x: Of the input of a layer.
        weight: Of its weight.
        device: Type of their device.
    """
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        return half if half in HALF and x in CAST and weight in CAST else None
    return x if x is weight and x in HALF else None
