"""Fits the time model of a device, and measures how well it predicts sizes that it did not see.

All pairs (n, k) are left out in turn: a model is fitted to the others and predicts them. From these
predictions come the errors of each kernel, the intervals of the speedup over bfloat16 (split
conformal, in which each pair counts once however many rows it has), and the quality of the choices
that these intervals lead to. The model that is written is fitted to all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lokakern.bench.prediction import left_out as folds
from lokakern.bench.prediction.fit_laws import fit_laws
from lokakern.bench.prediction.left_out import (
    COVERAGE,
    Timings,
    fold_of,
    least_and_largest,
    median_times,
    triple,
    upper_quantile,
)
from lokakern.errors import MeasurementError
from lokakern.problems import PADDED
from lokakern.progress import Progress
from lokakern.selection.prediction import features
from lokakern.selection.prediction.features import Rates, described, is_covered
from lokakern.selection.prediction.laws import Spread
from lokakern.selection.prediction.model_file import (
    FORMAT,
    KINDS,
    LEAF,
    File,
    KernelModel,
    Trees,
    file_of,
    kind_of,
)
from lokakern.selection.ties import TIE_FLOOR
from lokakern.types import Device, Granularity, Layout, Problem
from lokakern.version import __version__

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot

FEWEST_ROWS, FEWEST_PAIRS = 200, 50  # of a kernel that is predicted: at 192 times one erred by 11 %
LEAST = (64, 16, 16)  # m, n and k: below, launches are all that counts
_NEAR_PEAK = 0.99  # quantile of rates
_UNALIGNED_SHARE = 0.1  # of the peak, where no product with unaligned rows was timed
# Of 2, 4 and 6 levels, 150 to 300 trees and losses the errors differed by less than runs do.
_TREES: dict[str, Any] = {
    "n_estimators": 250, "learning_rate": 0.06, "max_depth": 4, "subsample": 0.7,
    "max_features": 0.3, "min_samples_leaf": 4, "random_state": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quality:
    """How predictions at left-out pairs (n, k) compare with the truth.

    Attributes:
        median_error: Median relative error of times.
        p90_error: 90th percentile.
        problems: Problems with times of bfloat16 and of a kernel that quantizes.
        chosen_share: Share of them where a kernel that quantizes was chosen.
        slower_share: Share of these choices that were slower than bfloat16 beyond noise.
        found_share: Share of problems where FP8 is over 10 % faster at which it was chosen.
        regret: Geometric mean of chosen over least time, minus 1.
        gain: Geometric mean of the speedup over bfloat16.
    """

    median_error: float
    p90_error: float
    problems: int
    chosen_share: float
    slower_share: float
    found_share: float
    regret: float
    gain: float

    def __str__(self) -> str:
        return (
            f"At sizes left out: median error {self.median_error:.1%}, 90th percentile "
            f"{self.p90_error:.1%}. Of {self.problems} choices {self.chosen_share:.0%} take FP8, "
            f"{self.slower_share:.1%} of which are slower than bf16 beyond noise; "
            f"{self.found_share:.0%} of the problems where FP8 is over 10 % faster take it; "
            f"{self.regret:.2%} slower than the best choices, {self.gain:.3f}x as fast as bf16, in "
            "geometric mean."
        )


def timings(facts: Snapshot, device: Device, regime: str) -> list[Timings]:
    """The times that trees are fitted to, of each kernel with enough of them."""
    return [
        one for one in median_times(facts, device, regime, is_covered)
        if len(one.problems) >= FEWEST_ROWS and len(set(one.pairs)) >= FEWEST_PAIRS
    ]  # fmt: skip


def fit(facts: Snapshot, device: Device, regime: str, progress: Progress) -> tuple[bytes, Quality]:
    """Fit a model to the rows of a device.

    Returns:
        The content of its file, and how well it predicts what it did not see.

    Raises:
        MeasurementError: There are too few rows, or scikit-learn is not installed.
    """
    known = timings(facts, device, regime)
    if not any(one.granularity is Granularity.NONE for one in known):
        raise MeasurementError(
            f"too few times of {device.product} in {regime} to fit: a model needs {FEWEST_ROWS} at "
            f"{FEWEST_PAIRS} pairs (n, k), of bfloat16, too; measure them with "
            "`python -m lokakern.bench sweep --suite lrm`"
        )
    rates = rates_of(known, device)
    progress.begin("fit", len(known) * (folds.FOLDS + 1))
    trees, left_out = [], []
    for one in known:
        base, rows = _described(one, rates)
        target = np.log(one.times_us / base)
        predicted = np.zeros(len(target))
        of = fold_of(one.pairs)
        for fold in range(folds.FOLDS):
            out = of == fold
            if out.any():
                predicted[out] = _boosted(rows[~out], target[~out]).predict(rows[out])
            progress.step(one.name)
        left_out.append(np.exp(predicted) * base)
        trees.append(exported(_boosted(rows, target)))
        progress.step(one.name)
    spreads = _spreads(known, left_out, fold=None)
    kernels = []
    for one, times, its in zip(known, left_out, trees, strict=True):
        error = np.abs(times / one.times_us - 1)
        kernels.append(
            KernelModel(
                name=one.name, digest=one.digest, granularity=one.granularity,
                rows=len(error), median_error=round(float(np.median(error)), 4),
                p90_error=round(float(np.quantile(error, 0.9)), 4), trees=its,
            )
        )  # fmt: skip
    least, largest = least_and_largest(known)
    content = File(
        format=FORMAT, features=features.VERSION, device=asdict(device), regime=regime,
        rows_digest=facts.digest, rates=rates, least=triple(np.maximum(least, LEAST)),
        largest=largest, coverage=COVERAGE, spreads=spreads, kernels=kernels,
        laws=fit_laws(facts, device, regime), fitted_by=f"lokakern {__version__}",
    )  # fmt: skip
    return file_of(content), _quality(known, left_out)


def rates_of(known: Sequence[Timings], device: Device) -> Rates:
    """The rates that kernels reach at the sizes where they are near their peak."""
    fp8: list[float] = []
    aligned: list[float] = []
    unaligned: list[float] = []
    traffic: list[float] = []
    for one in known:
        for problem, time_us in zip(one.problems, one.times_us.tolist(), strict=True):
            rate = problem.flops / time_us
            if one.granularity is not Granularity.NONE:
                fp8.append(rate)
                continue
            traffic.append(problem.bytes_moved / time_us)
            is_aligned = KINDS[kind_at(problem)] != "unaligned"
            (aligned if is_aligned else unaligned).append(rate)
    peak = _near_peak(aligned)
    return Rates(
        compute_units=device.compute_units,
        fp8_flops_per_us=_near_peak(fp8) if fp8 else 2 * peak,
        bf16_flops_per_us=peak,
        unaligned_flops_per_us=_near_peak(unaligned) if unaligned else _UNALIGNED_SHARE * peak,
        bytes_per_us=_near_peak(traffic),
    )


def _near_peak(rates: Sequence[float]) -> float:
    return float(f"{np.quantile(rates, _NEAR_PEAK):.3g}")


def _described(one: Timings, rates: Rates) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Base times and features of all problems of a kernel, in their order."""
    families: dict[Problem, list[int]] = {}
    for place, problem in enumerate(one.problems):
        families.setdefault(replace(problem, m=0), []).append(place)
    base = np.zeros(len(one.problems))
    rows = np.zeros((len(one.problems), features.FEATURES), np.float32)
    for family, places in families.items():
        m = np.array([one.problems[place].m for place in places])
        base[places], rows[places] = described(
            family, m, one.granularity, rates, pads=one.name == PADDED
        )
    return base, rows


def _boosted(rows: NDArray[np.float32], target: NDArray[np.float64]) -> Any:
    """Gradient boosting, fitted."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        raise MeasurementError(
            "fitting a model needs scikit-learn: pip install '.[fit]' in a clone of lokakern"
        ) from None
    return GradientBoostingRegressor(**_TREES).fit(rows, target)


def exported(boosted: Any) -> Trees:
    """The trees of a fitted `GradientBoostingRegressor`, as arrays."""
    sizes, feature, value, right = [], [], [], []
    for (estimator,) in boosted.estimators_:
        tree = estimator.tree_
        sizes.append(tree.node_count)
        for node in range(tree.node_count):  # scikit-learn numbers them depth first
            is_leaf = tree.children_left[node] < 0
            leaf = boosted.learning_rate * tree.value[node, 0, 0]
            feature.append(LEAF if is_leaf else tree.feature[node])
            value.append(leaf if is_leaf else tree.threshold[node])
            right.append(0 if is_leaf else tree.children_right[node] - node)
    return Trees(
        start=float(boosted.init_.constant_[0, 0]),
        sizes=np.array(sizes, np.uint8).tobytes(),
        feature=np.array(feature, np.uint8).tobytes(),
        value=_float32(np.array(value), np.array(feature) == LEAF).tobytes(),
        right=np.array(right, np.uint8).tobytes(),
    )


def _float32(value: NDArray[np.float64], is_leaf: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Thresholds rounded down, so that a float32 feature goes the same way; leaves to nearest."""
    nearest = value.astype(np.float32)
    down = np.where(nearest > value, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where(is_leaf, nearest, down).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Measured and predicted log times of bfloat16 and of a kernel at a problem."""

    problem: Problem
    kernel: str
    kind: int
    plain: float
    plain_predicted: float
    quantized: float
    quantized_predicted: float

    @property
    def surprise(self) -> float:
        """Logarithm of measured over predicted speedup."""
        return (self.plain - self.quantized) - (self.plain_predicted - self.quantized_predicted)


def _pairs(known: Sequence[Timings], left_out: Sequence[NDArray[np.float64]]) -> list[_Pair]:
    """All problems with times of bfloat16 and of a kernel that quantizes, within `LEAST`.

    bfloat16 is the faster of its kernels, with and without padded rows, as for dispatch.
    """
    plain: dict[Problem, tuple[float, float]] = {}
    for one, times in zip(known, left_out, strict=True):
        if one.granularity is Granularity.NONE:
            for problem, true, guess in zip(one.problems, one.times_us, times, strict=True):
                before = plain.get(problem, (math.inf, math.inf))
                plain[problem] = min(before[0], math.log(true)), min(before[1], math.log(guess))
    found = []
    for one, times in zip(known, left_out, strict=True):
        if one.granularity is Granularity.NONE:
            continue
        for problem, true, guess in zip(one.problems, one.times_us, times, strict=True):
            base = plain.get(problem)
            sizes = zip((problem.m, problem.n, problem.k), LEAST, strict=True)
            if base is not None and all(size >= least for size, least in sizes):
                found.append(
                    _Pair(problem, one.name, kind_at(problem), *base, math.log(true),
                          math.log(guess))
                )  # fmt: skip
    return found


def _chosen(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Of each problem the pair with the least predicted time."""
    found: dict[Problem, _Pair] = {}
    for pair in pairs:
        best = found.setdefault(pair.problem, pair)
        if pair.quantized_predicted < best.quantized_predicted:
            found[pair.problem] = pair
    return list(found.values())


def kind_at(problem: Problem) -> int:
    """The place in `KINDS` of a problem."""
    along_m = problem.a.layout is Layout.COLUMN
    return int(kind_of(np.array([problem.m]), problem.n, problem.k, along_m=along_m)[0])


def _spreads(
    known: Sequence[Timings], left_out: Sequence[NDArray[np.float64]], fold: int | None
) -> dict[str, Spread]:
    """Intervals of log speedups, measured over predicted, by kind.

    Of the quantizing kernel with the least predicted time at each problem, which is what would be
    chosen.

    Args:
        known: Times.
        left_out: Predictions of them.
        fold: Leave this fold out, too; None keeps all.
    """
    pairs = _chosen(_pairs(known, left_out))
    if fold is not None:
        out = fold_of([(pair.problem.n, pair.problem.k) for pair in pairs])
        pairs = [pair for pair, its in zip(pairs, out, strict=True) if its != fold]
    found = {}
    for place, kind in enumerate(KINDS):
        here = [pair for pair in pairs if pair.kind == place]
        if not here:
            raise MeasurementError(f"no measured speedup is {kind}; measure more sizes")
        groups = [(pair.problem.n, pair.problem.k) for pair in here]
        surprise = np.array([pair.surprise for pair in here])
        low = -upper_quantile(-surprise, groups, (1 + COVERAGE) / 2)
        high = upper_quantile(surprise, groups, (1 + COVERAGE) / 2)
        count = len(set(groups))
        found[kind] = Spread(low=round(min(low, 0), 4), high=round(max(high, 0), 4), pairs=count)
    return found


def _quality(known: Sequence[Timings], left_out: Sequence[NDArray[np.float64]]) -> Quality:
    """Quality of choices by intervals that rest on other folds only."""
    errors = np.concatenate(
        [np.abs(times / one.times_us - 1) for one, times in zip(known, left_out, strict=True)]
    )
    padded = {p for one in known if one.name == PADDED for p in one.problems}
    by_problem: dict[Problem, list[_Pair]] = {}
    for pair in _pairs(known, left_out):
        if KINDS[pair.kind] != "unaligned" or pair.problem in padded:
            by_problem.setdefault(pair.problem, []).append(pair)
    of = fold_of([(problem.n, problem.k) for problem in by_problem])
    spreads = {fold: _spreads(known, left_out, fold) for fold in set(of.tolist())}
    regrets, gains = [], []
    chosen = slower = better = found = 0
    for (_, pairs), fold in zip(by_problem.items(), of.tolist(), strict=True):
        best = min(pairs, key=lambda pair: pair.quantized_predicted)
        low = spreads[fold][KINDS[best.kind]].low
        takes = best.plain_predicted - best.quantized_predicted + low > 0
        true = best.quantized if takes else best.plain
        least = min(best.plain, *(pair.quantized for pair in pairs))
        regrets.append(true - least)
        gains.append(best.plain - true)
        chosen += takes
        slower += takes and true > best.plain + math.log1p(TIE_FLOOR)
        if best.plain - min(pair.quantized for pair in pairs) > math.log(1.1):
            better += 1
            found += takes
    return Quality(
        float(np.median(errors)), float(np.quantile(errors, 0.9)), len(by_problem),
        chosen / max(len(by_problem), 1), slower / max(chosen, 1), found / max(better, 1),
        math.expm1(float(np.mean(regrets))), math.exp(float(np.mean(gains))),
    )  # fmt: skip
