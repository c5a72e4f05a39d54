"""Who chooses the kernel of a call on tensors: what was measured, or the caller."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from lokakern import selection
from lokakern.errors import UnsupportedError
from lokakern.operands import device_of
from lokakern.registry.register import FP8_GPUS, Kernel, kernels_for
from lokakern.table import Table
from lokakern.types import ErrorBudget, Problem, Rejected

logger = logging.getLogger("lokakern")
_WARNED: set[str] = set()


class Chooser(Protocol):
    """Gives the kernel for a problem; the tensor says on which device."""

    def __call__(self, problem: Problem, x: Tensor, needs: frozenset[str] = ...) -> Kernel: ...


def fastest_within(budget: ErrorBudget | float | None) -> Chooser:
    """Chooses the fastest kernel within a budget that does what the problem needs besides."""
    limits = None if budget is None else ErrorBudget.of(budget)

    def choose(problem: Problem, x: Tensor, needs: frozenset[str] = frozenset()) -> Kernel:
        table = selection.table_for(problem, limits, device=device_of(x), needs=needs)
        kernel = table.kernels[bisect_right(table.breakpoints, problem.m) - 1]
        if kernel is None:
            reasons = (f"{name}: {why}" for name, why in table.pick(problem.m).rejected)
            raise UnsupportedError(
                f"{problem.op}: no kernel runs {problem} on {table.device.product}: "
                + "; ".join(reasons)
            )
        if problem.op == "scaled_gemm" and "any" in kernel.architectures:
            _warn_of_emulation(problem, kernel, table, needs)
        return kernel

    return choose


def _warn_of_emulation(
    problem: Problem, kernel: Kernel, table: Table, needs: frozenset[str]
) -> None:
    """Say once for a family of problems why a GPU that multiplies FP8 is not asked to."""
    if table.device.architecture not in FP8_GPUS:
        return
    family = f"{replace(problem, m=0)} {' '.join(sorted(needs))}"
    if family in _WARNED:
        return
    _WARNED.add(family)
    against = dict(table.pick(problem.m).rejected)
    reasons = []
    for fast in kernels_for(problem.op, table.device):
        if "any" not in fast.architectures:
            answer = fast.supports(problem, table.device)
            why = answer.reason if isinstance(answer, Rejected) else fast.lacks(needs)
            reasons.append(f"{fast.name}: {why or against.get(fast.name, 'not chosen')}")
    logger.warning(
        "%s: %s: %s emulates it, slowly, on %s: %s",
        problem.op, problem, kernel.name, table.device.product, "; ".join(reasons),
    )  # fmt: skip


def only(kernel: Kernel) -> Chooser:
    """Chooses this kernel, or says why it does not do."""

    def choose(problem: Problem, x: Tensor, needs: frozenset[str] = frozenset()) -> Kernel:
        reason = kernel.lacks(needs)
        if reason is None:
            answer = kernel.supports(problem, device_of(x))
            reason = answer.reason if isinstance(answer, Rejected) else None
        if reason is not None:
            raise UnsupportedError(f"{kernel.name}: {problem}: {reason}")
        return kernel

    return choose
