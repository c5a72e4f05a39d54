"""Outputs as libraries want them, which no problem tells of: beginning at multiples of 16 bytes."""

from __future__ import annotations

from torch import Tensor


def aligned(out: Tensor) -> Tensor:
    """The output, or a copy of it that begins where bulk copies can write.

    Whoever wrote into a copy copies it back: ``if target is not out: out.copy_(target)``.
    """
    return out if not out.data_ptr() % 16 else out.clone()
