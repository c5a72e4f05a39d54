"""Which elements of an output are wrong, and what they have in common, in words for a trial."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

TILES = (256, 128, 64, 32, 16, 8)  # rows or columns of a kernel's tile
FEWEST = 8  # wrong elements that show what they have in common
FEWEST_IN_LINE = 3  # of a row or column with a factor of its own
BFLOAT16_ROUNDOFF = 2.0**-8
LARGEST_LOSS = 2.0**-4  # of precision; 0.05 of sums rounded to bfloat16 over k = 16384


class Compared(NamedTuple):
    """An output ``[m, n]`` beside what it should be, dequantized, float64.

    Attributes:
        found: The output.
        exact: What it should be.
        slack: How far off sums may be, before they are rounded.
        roundoff: Of the output's format, relative.
    """

    found: Tensor
    exact: Tensor
    slack: Tensor
    roundoff: float


def wrong_words(compared: Compared, bound: float, first_row: int = 0) -> str:
    """The number of wrong elements, the first one, and a pattern; "" if none is wrong.

    Args:
        compared: An output, or some of its rows.
        bound: The kernel's bound of errors, in multiples of what rounding and slack allow.
        first_row: Number of the first row, where these are not all.
    """
    found, exact, slack, roundoff = compared
    finite = exact.isfinite()
    wrong = ((found - exact).abs() > bound * (slack + roundoff * exact.abs())) & finite
    wrong |= (found.isfinite() != finite) | (found.isnan() != exact.isnan())
    wrong |= exact.isinf() & (found != exact)
    count = int(wrong.sum())
    if not count:
        return ""
    row, column = wrong.nonzero()[0].tolist()
    loss = _loss(compared, wrong)
    words = (
        f"{count} of {wrong.numel()} elements {'is' if count == 1 else 'are'} wrong, the first at "
        f"row {first_row + row}, "
        f"column {column}: {found[row, column]:.6g}, not {exact[row, column]:.6g}",
        _places(wrong.any(dim=1), "row", first_row, scattered=not loss),
        _places(wrong.any(dim=0), "column", scattered=not loss),
        loss or _values(compared, bound, wrong),
    )
    return "; ".join(filter(None, words))


def _loss(compared: Compared, wrong: Tensor) -> str:
    """What lost precision, where wrong elements are about right, or ""."""
    found, exact = compared.found, compared.exact
    off, size = (found - exact)[wrong], exact[wrong]
    share = float(off.norm() / size.norm().clamp_min(math.ulp(0.0)))
    if not share <= LARGEST_LOSS:  # also where one is NaN or infinite
        return ""
    if compared.roundoff < BFLOAT16_ROUNDOFF and torch.equal(found.bfloat16().double(), found):
        return "all are bfloat16 numbers, as if rounded before they are written"
    return f"off by {100 * share:.2g} %: sums or scales are rounded, or products left out"


def _places(wrong: Tensor, axis: str, first: int = 0, *, scattered: bool = True) -> str:
    """Which rows or columns have wrong elements, where these are not all, or "".

    ``scattered`` is whether to say how many, where they follow no rule.
    """
    places = [first + place for place in wrong.nonzero().flatten().tolist()]
    start, stop = places[0], first + len(wrong)
    if len(places) == len(wrong):
        return ""
    steps = {after - before for before, after in pairwise(places)}
    if steps <= {1} and places[-1] == stop - 1:
        tile = next((tile for tile in TILES if start == stop // tile * tile), None)
        past = f", past the last whole {tile}" if tile else ""
        return f"only {axis}s from {start} of {stop}{past}"
    if len(places) == 1:
        return f"only {axis} {start}"
    if steps == {1}:
        return f"only {axis}s {start} to {places[-1]}"
    if len(places) > 2 and len(steps) == 1:
        return f"only {axis}s {start} to {places[-1]} in steps of {steps.pop()}"
    # Errors of elements near 0 are within the bound: a few lines are right by chance.
    few = scattered and len(places) < 0.9 * len(wrong)
    return f"in {len(places)} of {len(wrong)} {axis}s" if few else ""


def _values(compared: Compared, bound: float, wrong: Tensor) -> str:
    """What the wrong elements have in common, or ""."""
    found, exact, slack, roundoff = compared
    if bool(found[wrong].isnan().all()):
        return "all of them NaN, as if not written, or read beyond k"
    if not bool((found[wrong].isfinite() & exact[wrong].isfinite()).all()):
        return ""
    if not bool(found[wrong].any()):
        return "all of them 0"
    if int(wrong.sum()) < FEWEST:
        return ""
    got, wanted = (torch.where(wrong, x, 0.0) for x in (found, exact))
    slack = bound * torch.where(wrong, slack, 0.0)

    def fits(law: Tensor, factor: Tensor) -> bool:
        allowed = slack * factor.abs().clamp_min(1.0) + 2 * roundoff * law.abs()
        return bool(((got - law).abs() <= allowed).all())

    def fewest(dim: int) -> int:
        counts = wrong.sum(dim)
        return int(counts[counts > 0].min())

    def factors(*dims: int) -> Tensor:
        """Least squares over all wrong elements, those of a row, or those of a column."""
        size = (wanted * wanted).sum(dims, keepdim=True).clamp_min(math.ulp(0.0))
        return (got * wanted).sum(dims, keepdim=True) / size

    if fits((factor := factors(0, 1)) * wanted, factor):
        return f"each {float(factor):.3g} times what it should be"
    for dim, axis in ((1, "row"), (0, "column")):
        if fewest(dim) >= FEWEST_IN_LINE and fits((factor := factors(dim)) * wanted, factor):
            return f"each {axis} is off by a factor of its own, as without its scale"
    off = (got - wanted).sum(0, keepdim=True) / wrong.sum(0, keepdim=True).clamp_min(1)
    if fewest(0) >= FEWEST_IN_LINE and fits(wanted + wrong * off, torch.ones_like(off)):
        return "each column is off by a value of its own, as without its bias"
    return ""
