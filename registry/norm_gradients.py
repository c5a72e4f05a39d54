"""Gradients of a norm and of what follows it, in float64, with the scale of their rounding errors.

With h what was normalized, of r the reciprocal deviation, and means over what is normalized
together:

    h = (y - mean(y)) r;  z = h * weight + shift;  g = dd * last'(z);  t = g * weight
    dy = r (t - mean(t) - h mean(t h))

without mean(y) and mean(t) in rms; dy = t without a norm. Behind a cross, g = dd * y, where y is
x0. The weight's gradient is the sum of g h over rows, the shift's that of g, the bias's that of dy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lokakern.gradients import slope
from lokakern.types import NormEpilogue

# Of a float32 result, per step: approximate functions lose 2^-22, and sums of 2^15 rows pass 20
# additions.
STEP_ROUNDOFF = 2.0**-20
SUM_ROUNDOFF = 2.0**-13  # what `numerics.kernel_error` gives a magnitude
# Of each activation: its largest curvature, and where its slope jumps, by how much.
CURVATURES = {"none": 0.0, "relu": 0.0, "hardswish": 1 / 3, "silu": 0.5,
              "gelu": 0.8, "gelu_tanh": 0.8}  # fmt: skip
JUMPS = {"relu": ((0.0, 1.0),), "hardswish": ((-3.0, 0.5), (3.0, 0.5))}


class Gradients64(NamedTuple):
    """Exact gradients, and the scale of their rounding errors, float64.

    Attributes:
        dy: ``[m, k]``.
        size: Of dy's errors: `numerics.kernel_error` allows 2^-13 of it.
        sums: ``[n, k]``, as `NormGradients` has them.
        sums_size: Of theirs.
    """

    dy: Tensor
    size: Tensor
    sums: Tensor
    sums_size: Tensor


def norm_gradients(
    dd: Tensor, y: Tensor, epilogue: NormEpilogue, counts: Tensor | None = None
) -> Gradients64:
    """Gradients of an epilogue's norm and activation.

    Sizes follow errors of STEP_ROUNDOFF in each step, to first order: what a mean far from 0, a
    small deviation or a jump of a slope makes of them included.

    Args:
        dd: Of what followed, ``[m, k]``.
        y: What was normalized, ``[m, k]``.
        epilogue: Of the forward pass; a bias, a residual and what is added last only say whether
            their gradients are wanted.
        counts: How often each row is in the sums, ``[m]``; None for once.
    """
    norm, dd, y = epilogue.norm, dd.double(), y.double()
    rows, columns = y.shape
    shape = (rows, -1, norm.span(columns))
    weight, shift = (
        None if x is None else x.double() for x in (epilogue.norm_weight, epilogue.norm_bias)
    )
    size_of_weight = 1.0 if weight is None else weight.abs()

    def mean(x: Tensor) -> Tensor:
        """In every column of what is normalized together."""
        blocks = x.reshape(shape)
        return blocks.mean(-1, keepdim=True).expand_as(blocks).reshape(x.shape)

    step = STEP_ROUNDOFF
    h, r, off_h = y, torch.ones_like(y), torch.zeros_like(y)
    if norm.kind != "none":
        center = y - mean(y) if norm.kind == "layer" else y
        r = 1.0 / torch.sqrt(mean(center.square()) + norm.eps)
        h = center * r
        common = r * mean(y.abs()) if norm.kind == "layer" else torch.zeros_like(y)
        off_h = step * (common * (1.0 + h.abs()) + 2.0 * h.abs())
    z = h if weight is None else h * weight
    z = z if shift is None else z + shift
    off_z = size_of_weight * off_h + step * (z.abs() + (0.0 if shift is None else shift.abs()))
    g = dd * slope(z, epilogue.activation)
    off_slope = CURVATURES[epilogue.activation] * off_z
    if epilogue.activation != "none":
        off_slope = off_slope + 1.5 * step
    for place, jump in JUMPS.get(epilogue.activation, ()):
        off_slope = off_slope + jump * ((z - place).abs() <= 2.0 * off_z)
    off_g = dd.abs() * off_slope
    if epilogue.x0 is not None:
        g = dd * y
        off_g = step * g.abs()
    t = g if weight is None else g * weight
    off_t = size_of_weight * off_g + step * t.abs()
    dy, off = t, off_t
    if norm.kind != "none":
        pull, off_pull = torch.zeros_like(t), torch.zeros_like(t)
        if norm.kind == "layer":
            pull, off_pull = mean(t), mean(off_t) + step * mean(t.abs())
        turn = mean(t * h)
        off_turn = mean(t.abs() * off_h + h.abs() * off_t) + step * mean((t * h).abs())
        dy = r * (t - pull - h * turn)
        off = off_t + off_pull + h.abs() * off_turn + turn.abs() * off_h
        off = r * (off + step * (t.abs() + pull.abs() + (h * turn).abs()))
        off = off + (step + step * common) * dy.abs()
    sums = [
        (values, errors)
        for vector, values, errors in (
            (epilogue.bias, dy, off),
            (epilogue.norm_weight, g * h, g.abs() * off_h + h.abs() * off_g),
            (epilogue.norm_bias, g, off_g),
        )
        if vector is not None
    ]
    often = torch.ones(rows, dtype=torch.float64, device=y.device) if counts is None else counts

    def added(each: list[Tensor]) -> Tensor:
        return torch.stack([often @ x for x in each]) if each else dy.new_zeros((0, columns))

    sums_size = added([errors + step * values.abs() for values, errors in sums])
    return Gradients64(
        dy,
        torch.nan_to_num(off / SUM_ROUNDOFF, nan=0.0),
        added([values for values, _ in sums]),
        torch.nan_to_num(sums_size / SUM_ROUNDOFF, nan=0.0),
    )


def gradient_of_rows(dd: Tensor, y: Tensor, epilogue: NormEpilogue) -> Tensor:
    """What norm_backward must write of dy, float64, ``[m, k]``."""
    return norm_gradients(dd, y, epilogue).dy
