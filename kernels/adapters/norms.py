"""What libraries' norms have in common: bfloat16 rows, one after the other, in and out."""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Layout,
    NormEpilogue,
    NormForm,
    Problem,
    Rejected,
    Support,
    norm_form,
)

# Where two of a weight, a bias and their product are rounded to bfloat16: each loses up to 2^-8, 32
# times the 2^-13 of the bias that a bound of 1 leaves where product and bias cancel.
ROUNDED_BOUND = 1.0 + 2 * 32


def supports(kinds: tuple[str, ...], problem: Problem, device: Device) -> Support:
    form = norm_form(problem.epilogue)
    if form.norm.kind not in kinds or form != NormForm(form.norm, affine=form.affine):
        wanted = " or ".join(f"{kind} or {kind}+affine" for kind in kinds)
        return Rejected(f"does {wanted}, not {problem.epilogue}")
    given, out = problem.a.format, problem.out_format
    if (given, out) != (Format.BFLOAT16, Format.BFLOAT16):
        return Rejected(f"takes and writes bfloat16, not {given.value} and {out.value}")
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    if problem.out_strided:
        return Rejected("writes contiguous outputs only")
    if problem.k % 8:
        return Rejected(f"rows must have a multiple of 8 columns; k={problem.k}")
    if problem.m * problem.k >= 2**31:
        return Rejected("counts elements in 32 bits")
    return ACCEPTED


def room_for_vectors(x: Tensor, _out: Tensor, epilogue: NormEpilogue) -> tuple[Tensor, ...]:
    """A workspace for `as_bfloat16` of the norm's weight and of its bias."""
    return (torch.empty((2, x.shape[1]), dtype=torch.bfloat16, device=x.device),)


def as_bfloat16(vector: Tensor | None, room: Tensor, otherwise: float) -> Tensor:
    """A vector in the dtype of the rows; where there is none, one of a number."""
    if vector is None:
        return room.fill_(otherwise)
    return vector if vector.dtype is torch.bfloat16 else room.copy_(vector)
