"""What libraries want of memory, and no problem tells of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def aligned(out: Tensor) -> Iterator[Tensor]:
    """The output, or where it begins at no multiple of 16 bytes a copy, which is copied back."""
    target = out if not out.data_ptr() % 16 else out.clone()
    yield target
    if target is not out:
        out.copy_(target)


def room_for_packed_scales(
    _a: Tensor, _a_scale: Tensor, _b: Tensor, b_scale: Tensor, *_: Tensor | None
) -> tuple[Tensor, ...]:
    """A workspace for `packed_scales`; none where rows of the scales of b have no padding."""
    scales = b_scale.t()
    if scales.is_contiguous():
        return ()
    return (torch.empty(scales.shape, dtype=torch.float32, device=scales.device),)


def packed_scales(b_scale: Tensor, workspace: tuple[Tensor, ...]) -> Tensor:
    """128x128 scales of b as ``[n / 128, k / 128]``, without padding."""
    return workspace[0].copy_(b_scale.t()) if workspace else b_scale.t()
