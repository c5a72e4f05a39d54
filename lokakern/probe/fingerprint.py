"""Fingerprints: which distribution of the bench a site is most like, without replaying it.

A fingerprint is a few numbers that decide how operands round: spreads of rows and columns, how far
the largest element is above the median one, zeros, means, and how much of the sums cancels. A site
inside the hull of the realistic distributions is taken for the nearest; one outside is like none of
them, and its kernels are bfloat16's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lokakern.probe.statistics import (
    OperandStatistics,
    SiteStatistics,
    cancellation_of,
    terms_of,
)
from lokakern.progress import tell
from lokakern.types import REALISTIC_DISTRIBUTIONS
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

ROWS, COLUMNS = 512, 256  # of the draws that make a hull
SEEDS = (0, 1, 2)
# How far beyond the hull is still inside: in octaves, but for shares. Errors grow with what
# cancels.
SLACK = {"zeros": 0.1, "zero_rows": 0.05, "cancellation": math.log2(1.1)}
OCTAVES_OF_SLACK = 1.0
OCTAVES_MOVED = 0.5  # from which what cancels has moved
# By what a difference is divided before distances are taken.
UNIT = {"zeros": 0.25, "zero_rows": 0.25}
OCTAVES_A_UNIT = 4.0
SPREADS = ("row_spread", "column_spread")
WIDE = 8.0  # octaves: features of 300 times the size of others, of the 15 that E4M3 has in full
LEAST_VARIANCE = 1e-13  # of the square of a mean; less is rounding of sums

Fingerprint = Mapping[str, float]


def _of_rows(operand: OperandStatistics) -> dict[str, float]:
    """Of inputs or gradients; octaves, but for shares."""
    rows = operand.kept()[0].double()
    row_sizes, elements = rows.abs().amax(dim=1), rows.abs().flatten()
    return {
        "row_spread": _octaves(row_sizes, 0.01, 0.99),
        "column_spread": _octaves(operand.column_sizes),
        "crest": _octaves(elements, 0.5, 0.999),
        "mean": mean_octaves(rows),
        "zeros": float((elements == 0).sum()) / max(len(elements), 1),
        "zero_rows": float((row_sizes == 0).sum()) / max(len(rows), 1),
    }


def mean_octaves(rows: Tensor) -> float:
    """Octaves by which means of columns make rows ``[.., columns]`` larger; 0 of constant ones."""
    variance, mean = torch.var_mean(rows, dim=0, correction=0) if len(rows) else (rows, rows)
    square, spread = float(mean.square().sum()), float(variance.sum())
    ratio = square / spread if spread > LEAST_VARIANCE * square else 0.0
    return 0.5 * math.log2(1.0 + ratio)


def _octaves(sizes: Tensor, low: float = 0.0, high: float = 1.0) -> float:
    """Octaves between two quantiles of nonzero sizes ``[count]``; 0 of none."""
    ordered = sizes[sizes > 0].sort().values
    first, last = (round(share * (len(ordered) - 1)) for share in (low, high))
    return math.log2(ordered[last] / ordered[first]) if len(ordered) else 0.0


def _cancelled(site: SiteStatistics, gemm: str) -> float:
    """Octaves by which sums are smaller than those of independent terms, and errors larger.

    0 where they are as large, or larger.
    """
    ratio = site.cancellation
    if gemm != "grad_weight":
        operands = site.products(gemm)
        if operands is None:
            return 0.0
        x, w = operands
        sizes = torch.linalg.vector_norm(x @ w.t(), dim=1)
        ratio = float(cancellation_of(terms_of(x.t(), w.t()), sizes))
    return 0.5 * math.log2(max(ratio, 1.0))


def fingerprint_of(site: SiteStatistics, gemm: str) -> dict[str, float]:
    """Of the operands of a GEMM of a site; of a weight's gradient the larger of both operands."""
    rows = site.input if gemm == "output" else site.grad_output
    found = _of_rows(rows) | {"cancellation": _cancelled(site, gemm)}
    if gemm == "grad_weight":
        other = _of_rows(site.input)
        return {name: max(value, other.get(name, value)) for name, value in found.items()}
    if site.snapshot is not None:
        wide = site.snapshot.detach().double().cpu().abs()
        found["weight_rows"] = _octaves(wide.amax(dim=1))
        found["weight_columns"] = _octaves(wide.amax(dim=0))
    if gemm == "output":
        found["output_mean"] = math.log2(1.0 + site.mean_ratio)
    return found


@functools.cache
def _benchmarked() -> dict[str, tuple[dict[str, float], ...]]:
    """Fingerprints of the realistic distributions, one for each seed."""
    found: dict[str, tuple[dict[str, float], ...]] = {}
    for place, name in enumerate(REALISTIC_DISTRIBUTIONS):
        tell("drawing benchmarked distributions", place / len(REALISTIC_DISTRIBUTIONS))
        recipe = distribution_named(name)
        prints = []
        for seed in SEEDS:
            x = draw_rows(recipe, ROWS, COLUMNS, seed)
            w = draw_weight(recipe, COLUMNS, COLUMNS, seed)
            site = SiteStatistics(COLUMNS, COLUMNS, torch.device("cpu"))
            keys = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            site.input.add(x, x, keys)
            site.snapshot = w
            prints.append(fingerprint_of(site, "output"))
        found[name] = tuple(prints)
    tell("drawing benchmarked distributions", 1)
    return found


def outside(found: Fingerprint) -> str:
    """What of a fingerprint is outside the hull of the realistic distributions; "" for nothing."""
    return ", ".join(
        f"{name} {found[name]:.3g} is outside {low:.3g} to {high:.3g}"
        for name, (low, high) in _exceeded(found).items()
    )


def _exceeded(found: Fingerprint) -> dict[str, tuple[float, float]]:
    """The hull in what of a fingerprint is outside of it."""
    every = [print_ for prints in _benchmarked().values() for print_ in prints]
    ends = {name: (min(p[name] for p in every), max(p[name] for p in every)) for name in found}
    return {
        name: (low, high) for name, (low, high) in ends.items()
        if not low - (slack := SLACK.get(name, OCTAVES_OF_SLACK)) <= found[name] <= high + slack
    }  # fmt: skip


def unusual(found: Fingerprint) -> str:
    """Wide spreads, and what is outside the hull, in a few words; "" for nothing."""
    exceeded = _exceeded(found)
    return ", ".join(
        f"{name} {value:.3g}" for name, value in found.items()
        if name in exceeded or (name in SPREADS and value >= WIDE)
    )  # fmt: skip


def nearest(found: Fingerprint) -> str:
    """The realistic distribution that a fingerprint is closest to."""

    def distance(name: str) -> float:
        return min(
            math.hypot(*((x - print_[key]) / UNIT.get(key, OCTAVES_A_UNIT)
                         for key, x in found.items()))
            for print_ in _benchmarked()[name]
        )  # fmt: skip

    return min(_benchmarked(), key=distance)


def moved(before: Fingerprint, now: Fingerprint) -> str:
    """What of a fingerprint moved: by more than an octave, or a tenth of a share."""
    words = []
    for name, value in now.items():
        slack = SLACK.get(name, OCTAVES_OF_SLACK) if name != "cancellation" else OCTAVES_MOVED
        if name in before and abs(value - before[name]) > slack:
            words.append(f"{name} moved from {before[name]:.3g} to {value:.3g}")
    return ", ".join(words)
