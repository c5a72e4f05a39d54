"""Dtypes that are multiplied in bfloat16: bfloat16, and what autocast casts to it."""

from __future__ import annotations

import torch

HALF = frozenset((torch.bfloat16, torch.float16))
CAST = HALF | {torch.float32}  # dtypes that autocast casts


def is_in_bfloat16(x: torch.dtype, weight: torch.dtype, device: str) -> bool:
    """Whether operands of these dtypes are multiplied in bfloat16, which kernels need.

    It reads the state of autocast, which Dynamo guards.

    Args:
        x: Of the input of a layer.
        weight: Of its weight.
        device: Type of their device.
    """
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype is torch.bfloat16 and x in CAST and weight in CAST
    return x is weight is torch.bfloat16
