"""Who chooses the kernel of a call on tensors: what was measured, or the caller."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from torch import Tensor

from lokakern import selection
from lokakern.errors import UnsupportedError
from lokakern.operands import device_of
from lokakern.registry.register import Kernel
from lokakern.types import ErrorBudget, Problem, Rejected


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
        return kernel

    return choose


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
