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
from lokakern.registry.schema.row_keys import key_of
from lokakern.selection.candidates import (
    CARRIED,
    ERRORS_ELSEWHERE,
    WIDE,
    Bounds,
    Candidate,
    Evidence,
    bounds_or_reason,
    errors_or_reason,
    is_tried,
    unsafe,
)
from lokakern.types import Problem

MARGIN = ERRORS_ELSEWHERE
LEAST_K = 16  # errors of shorter sums differ more
# Errors of narrower outputs vary with the draw (X10, whose sums cancel): by emulation, 15 of 590
# bounds at n of 16 to 23 were exceeded, that of 18 x 204 by 15 %: 0.064 where 0.06 admitted it. Of
# 492 at n of 24 to 29 none was; the closest error was 0.98 of its bound.
LEAST_N = 24
FARTHEST_K = 4  # times the k that is asked for, or a part of it
NEAREST = 2  # values of k on each side
NARROWER = 4  # n may be so much larger than that of an error, if it is below `WIDE`


def predicted_errors(kernel: KernelRow, problem: Problem, evidence: Evidence) -> Bounds | str:
    """Measured bounds of errors of a kernel's numerics class, or predicted ones, or why neither.

    There are none where any error of the class is stored at this size, as of too few seeds: it may
    be larger. Nor where a result of the kernel itself was wrong at a size that was looked at.

    Args:
        kernel: The kernel.
        problem: At any m.
        evidence: The rows that count.
    """
    found = errors_or_reason(kernel, problem, evidence)
    asked = evidence.asked(problem)
    if isinstance(found, Bounds) or is_tried(kernel, key_of(asked), evidence):
        return found
    place = (str(replace(asked, m=0)), kernel.granularity, kernel.b_granularity,
             kernel.accumulation)  # fmt: skip
    if place not in evidence.memory:
        evidence.memory[place] = _around(kernel, problem, evidence) or found
    bounds = evidence.memory[place]
    if isinstance(bounds, Bounds) and any(_is_wrong(kernel, at, evidence) for at in bounds.around):
        return found
    return bounds


def _is_wrong(kernel: KernelRow, key: str, evidence: Evidence) -> bool:
    place = kernel.name, key
    if place not in evidence.memory:
        own = evidence.facts.accuracy_cells(evidence.device.architecture, kernel.name, key)
        current = (c for c in own if evidence.freshness(c) != "stale")
        bad = unsafe(current, lambda c: (c.distribution, c.parameters, c.seed))
        evidence.memory[place] = "" if bad is None else bad.status
    return bool(evidence.memory[place])


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
    if asked.b is not None and asked.n < LEAST_N:
        return None
    by_k: dict[int, Bounds] = {}
    around: list[str] = []
    for k, wide in _nearest_first(asked.n, asked.k, evidence.facts.accuracies_of_form(asked)):
        side = [its_k for its_k in by_k if (its_k > asked.k) == (k > asked.k)]
        if len(side) == NEAREST:
            continue
        for n, key in wide:
            around.append(key)
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
    return Bounds(errors, worst.worst_distribution, around=tuple(around))


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
