"""Normalizations of rows: what they compute, and what bounds it.

layer         z = (y - mean) / sqrt(var + eps),  var = mean((y - mean)^2)
rms           z = y / sqrt(mean(y^2) + eps)
block_rms(n)  rms of each n neighbors of a row, n a divisor of its length
none          z = y
then          z * weight + bias, each of them [columns]
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.formats import Format

KINDS = ("layer", "rms", "block_rms", "none")
_BLOCK = re.compile(r"block_rms\(([1-9][0-9]{0,8})\)")


class Norm(NamedTuple):
    """A normalization.

    Attributes:
        kind: One of `KINDS`.
        block: Columns that are normalized together; 0 for the whole row.
        eps: Added to the variance, or the mean of squares; not negative.
    """

    kind: str
    block: int = 0
    eps: float = 1e-5

    def __str__(self) -> str:
        return f"block_rms({self.block})" if self.kind == "block_rms" else self.kind

    def span(self, columns: int) -> int:
        """Columns that share statistics.

        Raises:
            ShapeError: Blocks do not divide the row.
        """
        span = self.block or columns
        if columns % max(span, 1):
            raise ShapeError(f"{self} of {columns} columns: blocks must divide the row")
        return span


NO_NORM = Norm("none")


def norm_named(name: str, eps: float = 1e-5) -> Norm:
    """The normalization of a name, such as ``layer`` or ``block_rms(256)``.

    Raises:
        UnknownNameError: There is none, or eps is no finite number that is not negative.
    """
    if not (isinstance(eps, int | float) and 0 <= eps < math.inf):
        raise UnknownNameError(f"norm {name!r}: eps is {eps!r}; expected a finite number >= 0")
    block = _BLOCK.fullmatch(name)
    if block:
        return Norm("block_rms", int(block[1]), float(eps))
    if name in KINDS and name != "block_rms":
        return Norm(name, 0, float(eps))
    raise UnknownNameError(
        f"norm {name!r} is unknown; expected layer, rms, block_rms(n) with n columns, or none"
    )


def normalize(
    y: Tensor, norm: Norm, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Rows of y, normalized in the dtype of y: the reference in float64.

    A row, or block, that holds NaN becomes NaN as far as it is normalized together; infinity
    becomes NaN, and the others with it or, under rms, 0. One of zeros stays 0 where eps is not 0.

    Args:
        y: ``[..., columns]``.
        norm: What to do.
        weight: ``[columns]``, or None for 1.
        bias: ``[columns]``, or None for 0.

    Raises:
        ShapeError: Blocks do not divide the row.
    """
    columns = y.shape[-1]
    span = norm.span(columns)
    blocks = y.reshape(*y.shape[:-1], columns // max(span, 1), span)
    if norm.kind == "layer":
        blocks = blocks - blocks.mean(-1, keepdim=True)
    if norm.kind != "none":
        blocks = blocks / torch.sqrt(blocks.square().mean(-1, keepdim=True) + norm.eps)
    z = blocks.reshape(y.shape)
    if weight is not None:
        z = z * weight.to(z.dtype)
    return z if bias is None else z + bias.to(z.dtype)


def largest(norm: Norm, columns: int) -> float:
    """Upper bound of ``|z|`` for any row, before weight and bias; infinite without a norm.

    Of n values that share a mean of squares, ``y_i^2 <= sum y^2 = n mean(y^2)``: sqrt(n) for rms.
    Centered values add up to 0, so ``c_i^2 = (sum of the others)^2 <= (n - 1) (sum c^2 - c_i^2)``,
    and ``c_i^2 <= (n - 1) var``: sqrt(n - 1) for layer. A row of one value that is not 0 comes
    arbitrarily near.
    """
    span = norm.span(columns)
    if norm.kind == "none":
        return math.inf
    return math.sqrt(max(span - (norm.kind == "layer"), 0))


def static_scale(
    norm: Norm,
    columns: int,
    form: Format,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> float:
    """A decode scale under which no output of a normalization saturates, known before any row is.

    Activations that do not enlarge a magnitude (all of `lokakern.epilogue.ACTIVATIONS`) keep it so.

    Args:
        norm: Not "none", of which no scale is known.
        columns: Of a row.
        form: FP8, of the output.
        weight: ``[columns]``, or None for 1.
        bias: ``[columns]``, or None for 0.

    Raises:
        UnknownNameError: The norm is "none".
    """
    if norm.kind == "none":
        raise UnknownNameError("norm 'none' bounds nothing: no scale is known beforehand")
    factor = 1.0 if weight is None else weight.double().abs()
    shift = 0.0 if bias is None else bias.double().abs()
    most = torch.as_tensor(largest(norm, columns) * factor + shift).max().item()
    return max(most / form.maximum, 2.0**-126) if most else 1.0


class Moments(NamedTuple):
    """Of some values: how many, their mean, and the sum of squared deviations from it."""

    number: int
    mean: Tensor
    squares: Tensor


def moments(y: Tensor) -> Moments:
    """Of the last axis."""
    mean = y.mean(-1)
    return Moments(y.shape[-1], mean, (y - mean.unsqueeze(-1)).square().sum(-1))


def merged(first: Moments, second: Moments) -> Moments:
    """Merge statistics of two parts (Chan et al., 1983).

    Unlike sums of y and of y^2, this loses no digits where the mean is large against the deviation.
    """
    number = first.number + second.number
    distance = second.mean - first.mean
    mean = first.mean + distance * (second.number / number)
    across = distance.square() * (first.number * second.number / number)
    return Moments(number, mean, first.squares + second.squares + across)
