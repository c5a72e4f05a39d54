"""Bounds of errors at sizes (n, k) without measured errors, from those around them.

The error of a numerics class depends little on the sizes: with scales of rows or blocks it is that
of rounding, with one scale of a tensor it grows slowly with k. The bound is `MARGIN` times the
largest of bounds around k, at outputs that are as wide, or narrower. Over the shipped file, with
every k left out in turn, no row_err, row_p99 or rel_err exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lokakern.registry.schema.records import KernelRow
from lokakern.selection.candidates import (
    CARRIED,
    ERRORS_ELSEWHERE,
    WIDE,
    Bounds,
    Candidate,
    Evidence,
    bounds_or_reason,
    errors_or_reason,
    unsafe,
)
from lokakern.types import Problem

MARGIN = ERRORS_ELSEWHERE
LEAST_K = 16  # errors of shorter sums differ more
FARTHEST_K = 4  # times the k that is asked for, or a part of it
NEAREST = 2  # values of k on each side
NARROWER = 4  # n may be so much larger than that of an error, if it is below `WIDE`


def predicted_errors(kernel: KernelRow, problem: Problem, evidence: Evidence) -> Bounds | str:
    """Measured bounds of errors of a kernel's numerics class, or predicted ones, or why neither.

    Args:
        kernel: The kernel.
        problem: At any m.
        evidence: The rows that count.
    """
    found = errors_or_reason(kernel, problem, evidence)
    if isinstance(found, Bounds):
        return found
    place = (str(replace(evidence.asked(problem), m=0)), kernel.granularity,
             kernel.b_granularity, kernel.accumulation)  # fmt: skip
    if place not in evidence.memory:
        evidence.memory[place] = _around(kernel, problem, evidence) or found
    return evidence.memory[place]


def with_predicted_errors(
    candidates: Iterable[Candidate], problem: Problem, evidence: Evidence
) -> list[Candidate]:
    """Measured kernels, with bounds from around them where their errors were not measured.

    Else a size would lose its predicted choice once its times are measured without errors.
    """
    found = []
    for candidate in candidates:
        known: Bounds | str = ""
        if candidate.error_unknown and candidate.kernel is not None and not candidate.unquantized:
            known = predicted_errors(KernelRow.of(candidate.kernel), problem, evidence)
        if isinstance(known, Bounds):
            candidate = replace(
                candidate, errors=known.errors, worst_distribution=known.worst_distribution,
                error_unknown="", errors_at=known.elsewhere, errors_predicted=True,
            )  # fmt: skip
        found.append(candidate)
    return found


def _around(kernel: KernelRow, problem: Problem, evidence: Evidence) -> Bounds | None:
    asked = evidence.asked(problem)
    by_k: dict[int, Bounds] = {}
    for k, wide in _nearest_first(asked.n, asked.k, evidence.facts.accuracies_of_form(asked)):
        side = [its_k for its_k in by_k if (its_k > asked.k) == (k > asked.k)]
        if len(side) == NEAREST:
            continue
        for n, key in wide:
            own = evidence.facts.accuracy_cells(evidence.device.architecture, kernel.name, key)
            current = (c for c in own if evidence.freshness(c) != "stale")
            if unsafe(current, lambda c: (c.distribution, c.parameters, c.seed)) is not None:
                return None  # it is wrong nearby
            found = bounds_or_reason(kernel, replace(problem, n=n, k=k), key, evidence, True)
            if isinstance(found, Bounds):
                by_k[k] = found
                break
    if not by_k or not min(by_k) <= asked.k <= max(by_k):
        return None
    known = by_k.values()
    errors = {limit: MARGIN * max(x.errors[limit] for x in known) for limit in CARRIED}
    errors["sqnr_db"] = min(x.errors["sqnr_db"] for x in known) - 20 * math.log10(MARGIN)
    worst = max(known, key=lambda x: x.errors["row_err"])
    return Bounds(errors, worst.worst_distribution, is_predicted=True)


def _nearest_first(
    n: int, k: int, like: Sequence[tuple[int, int, str]]
) -> list[tuple[int, list[tuple[int, str]]]]:
    """Each k near enough, the nearest first, with n and keys of outputs that are wide enough."""
    by_k: dict[int, list[tuple[int, str]]] = {}
    for its_n, its_k, key in like:
        is_as_wide = its_n >= WIDE if n >= WIDE else n / NARROWER <= its_n <= n
        if is_as_wide and its_k >= LEAST_K and k / FARTHEST_K <= its_k <= k * FARTHEST_K:
            by_k.setdefault(its_k, []).append((its_n, key))
    return [
        (its_k, sorted(by_k[its_k], key=lambda one: (_far(one[0], n), one)))
        for its_k in sorted(by_k, key=lambda its_k: (_far(its_k, k), its_k))
    ]


def _far(a: int, b: int) -> float:
    return abs(math.log(a / b))
