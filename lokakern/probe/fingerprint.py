"""Fingerprints: which distribution of the bench a site is most like, without replaying it.

A fingerprint is a few numbers that decide how operands round: spreads of rows and columns, how far
the largest element is above the middling one, zeros, means, and how much of the sums cancels. A
site inside the hull of the realistic distributions is taken for the nearest; one outside is like
none of them, and its kernels are bfloat16's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lokakern.probe.operand import OperandStatistics
from lokakern.probe.site import SiteStatistics, cancellation_of, terms_of
from lokakern.progress import tell
from lokakern.types import REALISTIC_DISTRIBUTIONS
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

ROWS, COLUMNS = 512, 256  # of the draws that make a hull
SEEDS = (0, 1, 2)
# How far beyond the hull is still inside: in octaves, but for shares. Errors grow with what
# cancels.
SLACK = {"zeros": 0.1, "zero_rows": 0.05, "cancellation": math.log2(1.1)}
OCTAVES_OF_SLACK = 1.0
OCTAVES_MOVED = 0.5  # from which what cancels is not where it was
MULTIPLIED_ROWS = 128  # of a sample, to see what cancels
# By what a difference is divided before distances are taken.
UNIT = {"zeros": 0.25, "zero_rows": 0.25}
OCTAVES_A_UNIT = 4.0

Fingerprint = Mapping[str, float]


def fingerprint_of_rows(operand: OperandStatistics) -> dict[str, float]:
    """Of inputs or gradients; octaves, but for shares."""
    columns = operand.column_sizes[operand.column_sizes > 0].double().log2().cpu()
    middle, top = operand.values.log2_quantiles(0.5, 0.999)
    moments = operand.moments
    variance = (moments.squares / moments.count.clamp_min(1.0)).sum()
    mean = moments.mean.square().sum()
    ratio = float(mean / variance) if float(variance) > 0 else 0.0
    return {
        "row_spread": operand.row_sizes.spread_log2(),
        "column_spread": float(columns.max() - columns.min()) if len(columns) else 0.0,
        "crest": 0.0 if math.isnan(middle) else top - middle,
        "mean": 0.5 * math.log2(1.0 + ratio),
        "zeros": operand.values.zero_share,
        "zero_rows": operand.zero_row_share,
    }


def fingerprint_of_weight(weight: Tensor) -> dict[str, float]:
    """Of a weight ``[n, k]``; octaves."""
    wide = weight.detach().double().cpu().abs()
    found = {}
    for name, axis in (("weight_rows", 1), ("weight_columns", 0)):
        sizes = wide.amax(dim=axis)
        sizes = sizes[sizes > 0].log2()
        found[name] = float(sizes.max() - sizes.min()) if len(sizes) else 0.0
    return found


def cancelled(site: SiteStatistics, gemm: str) -> float:
    """Octaves by which sums are smaller than they would be of terms that know nothing of another.

    By so much are errors larger. 0 where they are as large, or larger.
    """
    ratio = site.cancellation
    if gemm != "grad_weight":
        rows = (site.input if gemm == "output" else site.grad_output).sample.kept()[0]
        weight = site.snapshot if gemm == "output" else site.weight_t()
        if weight is None or not len(rows):
            return 0.0
        x, w = rows[:MULTIPLIED_ROWS].double().t(), weight.double().cpu().t()
        sizes = torch.linalg.vector_norm(x.t() @ w, dim=1)
        ratio = float(cancellation_of(terms_of(x, w), sizes))
    return 0.5 * math.log2(max(ratio, 1.0))


def fingerprint_of(site: SiteStatistics, gemm: str) -> dict[str, float]:
    """Of the operands of a GEMM of a site; of a weight's gradient both have a sample's."""
    rows = site.input if gemm == "output" else site.grad_output
    found = fingerprint_of_rows(rows) | {"cancellation": cancelled(site, gemm)}
    if gemm == "grad_weight":
        other = fingerprint_of_rows(site.input)
        return {name: max(value, other.get(name, value)) for name, value in found.items()}
    if site.snapshot is not None:
        found |= fingerprint_of_weight(site.snapshot)
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
            site.add_input(x, x, keys)
            site.add_output(x @ w.t())
            site.snapshot = w
            prints.append(fingerprint_of(site, "output"))
        found[name] = tuple(prints)
    tell("drawing benchmarked distributions", 1)
    return found


def outside(found: Fingerprint) -> str:
    """What of a fingerprint is outside the hull of the realistic distributions; "" for nothing."""
    every = [print_ for prints in _benchmarked().values() for print_ in prints]
    words = []
    for name, value in found.items():
        low, high = min(p[name] for p in every), max(p[name] for p in every)
        slack = SLACK.get(name, OCTAVES_OF_SLACK)
        if not low - slack <= value <= high + slack:
            words.append(f"{name} {value:.3g} is outside {low:.3g} to {high:.3g}")
    return ", ".join(words)


def nearest(found: Fingerprint) -> str:
    """The realistic distribution that a fingerprint is closest to."""

    def distance(name: str) -> float:
        return min(
            math.sqrt(sum(
                ((value - print_[key]) / UNIT.get(key, OCTAVES_A_UNIT)) ** 2
                for key, value in found.items()
            ))
            for print_ in _benchmarked()[name]
        )  # fmt: skip

    return min(_benchmarked(), key=distance)


def moved(before: Fingerprint, now: Fingerprint) -> str:
    """What of a fingerprint is not where it was: by more than an octave, or a tenth of a share."""
    words = []
    for name, value in now.items():
        slack = SLACK.get(name, OCTAVES_OF_SLACK) if name != "cancellation" else OCTAVES_MOVED
        if name in before and abs(value - before[name]) > slack:
            words.append(f"{name} moved from {before[name]:.3g} to {value:.3g}")
    return ", ".join(words)
