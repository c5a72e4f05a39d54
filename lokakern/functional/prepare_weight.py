"""Weights quantized once, with the granularity that is fastest over a range of m."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lokakern.arrays import accepted
from lokakern.errors import FormatError, ShapeError
from lokakern.functional.checks import check_matrix, operand_of
from lokakern.functional.quantize import quantize
from lokakern.problems import PADDED, make_problem
from lokakern.registry.register import fp8_format
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of, m_range_of
from lokakern.selection.dispatcher import CHOSEN_FORMS
from lokakern.selection.frozen.lookup import Weight
from lokakern.selection.table import Table
from lokakern.selection.weight_forms import FORMS, with_weight
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    ErrorBudget,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
    alignment_of,
)


@accepted
def prepare_weight(
    w: Tensor,
    budget: ErrorBudget | float,
    m_range: tuple[int, int],
    *,
    distribution: str | Sequence[str] | None = None,
) -> QuantizedTensor:
    """Quantize a weight once, with the granularity that is fastest over a range of m.

    The candidates are tensorwise, rowwise and 128x128 scales. The winner has the least geometric
    mean of the times of `dispatch`'s choices at measured m in the range. The weight stays
    unquantized where FP8 is not faster. Where unquantized rows are padded, a padded copy is made.
    The result refers to ``w``, but later changes of ``w`` have no effect.

    Args:
        w: ``[n, k]``, as in a linear layer, bfloat16, float16 or float32, row-major.
        budget: Largest accepted error of `gemm` on measured distributions, and its default budget.
        m_range: Smallest and largest expected m.
        distribution: Input distributions for the error; None means all realistic ones.

    Returns:
        ``[k, n]``: the right operand of `gemm`.

    Raises:
        ShapeError: ``w`` is not a row-major matrix, or the range is not two integers in order.
        BudgetError: The budget is not a finite, non-negative number.
    """
    check_matrix("prepare_weight", "w", w)
    least, largest = m_range_of("prepare_weight", m_range)
    limits = budget_of(budget)
    weight = operand_of(w)
    if weight.format.is_fp8:
        raise FormatError(f"prepare_weight: w is {w.dtype}; expected bfloat16, float16 or float32")
    if weight.layout is not Layout.ROW:
        raise ShapeError(
            f"prepare_weight: w has strides {w.stride()}; expected a row-major [n, k] weight"
        )
    device = device_of(w)
    names = dispatcher.distribution_names(distribution)
    n, k = w.shape
    judged = names or REALISTIC_DISTRIBUTIONS
    asked = Weight(n, k, weight.format, limits, judged, least, largest)
    held = dispatcher.choices()
    form = _fastest_form(asked, device, names) if held is None else held.form(asked, device)
    CHOSEN_FORMS[device, asked] = form
    padded = None
    if _is_padded(asked, form, device, names):
        from lokakern.kernels.torch.matmul_padded import pad_weight  # lazily: a module of kernels

        padded = pad_weight(w.detach())
    if form is Granularity.NONE:
        return QuantizedTensor(w, None, form, True, None, limits, padded)
    quantized = quantize(w.detach(), form, out_format=fp8_format(device))
    return QuantizedTensor(quantized.data, quantized.scale, form, True, w, limits, padded)


def _is_padded(
    asked: Weight, form: Granularity, device: Device, distributions: tuple[str, ...] | None
) -> bool:
    """Whether a kernel that pads the unquantized weight is chosen somewhere in the range."""
    problem = _problem(asked)
    if form is not Granularity.NONE:
        problem = with_weight(problem, form, device)
    sizes = (asked.least_m, asked.largest_m)
    tables = [
        dispatcher.table_for(
            replace(problem, m=m), asked.budget, distributions, device, is_choice=False
        )
        for m in sizes
    ]
    starts = {m for table in tables for m in table.breakpoints if sizes[0] < m <= sizes[1]}
    return any(
        table.winners[bisect_right(table.breakpoints, m) - 1] == PADDED
        for table in tables
        for m in (*sizes, *starts)
    )


def _fastest_form(
    asked: Weight, device: Device, distributions: tuple[str, ...] | None
) -> Granularity:
    """The fastest granularity; NONE where the unquantized kernel is fastest."""
    best = (0.0, "", Granularity.NONE)
    plain = _problem(asked)
    for granularity in FORMS:
        problem = with_weight(plain, granularity, device)
        gain = _mean_log_gain(problem, asked, device, distributions)
        best = min(best, (gain, granularity.value, granularity), key=lambda found: found[:2])
    return best[2]


def _problem(asked: Weight) -> Problem:
    """The product with the unquantized weight, at the least m."""
    a = Operand(asked.format, alignment=alignment_of(asked.k * asked.format.dtype.itemsize))
    return make_problem("gemm", (asked.least_m, asked.n, asked.k), a=a)


def _mean_log_gain(
    problem: Problem, asked: Weight, device: Device, distributions: tuple[str, ...] | None
) -> float:
    """Mean of log(time chosen / least time unquantized) over the range's ends and measured m."""

    def table_at(m: int) -> Table:
        return dispatcher.table_for(
            replace(problem, m=m), asked.budget, distributions, device, is_choice=False
        )

    low, high = asked.least_m, asked.largest_m
    table = table_at(low)
    sizes = {low, high, *(m for m in table.measured_m if low <= m <= high)}
    total = 0.0
    for m in sizes:
        pick = table_at(m).pick(m)
        plain = table.plain_at(m)
        if pick.time is not None and plain is not None:
            total += math.log(pick.time.latency_us / plain.latency_us)
    return total / len(sizes)
