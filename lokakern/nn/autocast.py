"""Dtypes that are multiplied in bfloat16 or float16: these, and what autocast casts to them."""

from __future__ import annotations

import torch

HALF = frozenset((torch.bfloat16, torch.float16))
CAST = HALF | {torch.float32}  # dtypes that autocast casts


def is_in_bfloat16(x: torch.dtype, weight: torch.dtype, device: str) -> bool:
    """`is_in` of bfloat16."""
    return is_in(torch.bfloat16, x, weight, device)


def is_in(half: torch.dtype, x: torch.dtype, weight: torch.dtype, device: str) -> bool:
    """Whether operands of these dtypes are multiplied in bfloat16, or in float16, as kernels need.

    It reads the state of autocast, which Dynamo guards.

    Args:
        half: The one or the other.
        x: Of the input of a layer.
        weight: Of its weight.
        device: Type of their device.
    """
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) is half and x in CAST and weight in CAST
    return x is weight is half
