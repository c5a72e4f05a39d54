"""What a static scale behind a norm with a weight or a bias adds to the error of rounding.

Under a scale s, E4M3 rounds magnitudes of 2^-6 s and more relative to themselves, as under any
other scale. Smaller ones it rounds to multiples of a step, 2^-9 s: an error of step / sqrt(12).
The scale follows from the bound of the norm, ``s = max(bound * |weight| + |bias|) / 448``, so that
columns whose weight is far below the largest one are near this step, and so would all be if one
weight were much larger than the others. Rowwise scales follow the rows.

Column j of the output is ``f(weight_j t + bias_j)``, t of unit variance and, as for
`lokakern.chain.candidates.GAINS`, normal: it has a root mean square a_j. The next weight may
multiply small columns by large numbers, so each column counts alike: the root mean square over
columns of ``step / sqrt(12) / a_j``. Columns of zeros have no error. Independent of the relative
rounding, which stored errors contain, its square adds to theirs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lokakern.nn.activations import APPLY
from lokakern.norm import Norm, largest
from lokakern.types import Format

_STEP, _MAXIMUM = 2.0**-9, Format.E4M3FN.maximum  # those of fnuz are less, in steps of the maximum
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


def added_error(
    norm: Norm, columns: int, activation: str, weight: Tensor | None, bias: Tensor | None
) -> float:
    """The error that the smallest steps of a static scale add, relative to the output.

    Rounded up to a multiple of 0.0001. Infinite where nothing is known: without values, of a norm
    that bounds nothing, and of other functions behind it.

    Args:
        norm: The norm.
        columns: Of its rows.
        activation: Behind it, "none" without one.
        weight: ``[columns]``, or None for 1.
        bias: ``[columns]``, or None for 0.
    """
    given = [x for x in (weight, bias) if x is not None]
    if norm.kind == "none" or activation not in APPLY or any(x.is_meta for x in given):
        return math.inf
    ones = torch.ones(columns, dtype=torch.float64)
    factor = ones if weight is None else weight.detach().double().cpu().abs()
    shift = 0 * ones if bias is None else bias.detach().double().cpu()
    most = (largest(norm, columns) * factor + shift.abs()).max().item()
    nodes, shares = torch.from_numpy(_NODES), torch.from_numpy(_WEIGHTS / _WEIGHTS.sum())
    values = APPLY[activation](factor[:, None] * nodes + shift[:, None])
    squares = values.square() @ shares
    squares = squares[(factor != 0) | (shift != 0)]
    if not len(squares):
        return 0.0
    step = most / _MAXIMUM * _STEP / math.sqrt(12)
    found = step * math.sqrt((1 / squares).mean().item())
    return math.ceil(found * 1e4) / 1e4 if math.isfinite(found) else math.inf
