"""Scales of 1x32 (MX): one for 32 neighboring elements of a row, a power of two in one byte.

The byte is e8m0, ``2^(byte - 127)``, 255 is NaN (OCP Microscaling Formats 1.0, section 5.4). The
power is ``amax / MAX`` rounded up, so that nothing saturates; the specification's own rule, the
floor of ``log2(amax)`` less that of ``log2(MAX)``, cuts what is more than 448/512 of the next.
Included in the digests of the kernels that have such scales, and of no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns under one scale
TOGETHER = 4  # scales of a row start every 4 bytes: a word for each 128 columns
SCALE = torch.float8_e8m0fnu


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a ``[rows, columns]`` tensor."""
    return (rows, -(-columns // GROUP))


def scale_stride(width: int) -> tuple[int, int]:
    """Their strides, for rows of so many scales."""
    return (-(-width // TOGETHER) * TOGETHER, 1)


def empty_scale(rows: int, columns: int, device: torch.device) -> Tensor:
    """Uninitialized scales. What lies between rows is theirs too, so that words can be read."""
    width = scale_shape(rows, columns)[1]
    pitch = scale_stride(width)[0]
    return torch.empty((rows, pitch), dtype=SCALE, device=device)[:, :width]


def amax(magnitude: Tensor) -> Tensor:
    """Largest of each group of ``[rows, columns]``."""
    rows, columns = magnitude.shape
    width = scale_shape(rows, columns)[1]
    padded = torch.nn.functional.pad(magnitude, (0, width * GROUP - columns))
    return padded.view(rows, width, GROUP).amax(dim=2)


def spread(scale: Tensor, columns: int) -> Tensor:
    """Scales as float32 ``[rows, columns]``."""
    return scale.float().repeat_interleave(GROUP, dim=1)[:, :columns]
