"""The choice of a kernel for a call on tensors, by measurements or by the caller."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from lokakern.errors import UnsupportedError
from lokakern.registry.register import FP8_GPUS, Kernel, kernels_for
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, device_of
from lokakern.selection.table import Table
from lokakern.types import ErrorBudget, Problem

logger = logging.getLogger("lokakern")
_WARNED: set[str] = set()


class Chooser(Protocol):
    """Gives the kernel for a problem on the device of a tensor."""

    def __call__(self, problem: Problem, x: Tensor, needs: frozenset[str] = ...) -> Kernel: ...


def fastest_within(budget: ErrorBudget | float | None) -> Chooser:
    """Choose the fastest kernel within a budget that has the abilities ``needs``."""
    limits = None if budget is None else budget_of(budget)

    def choose(problem: Problem, x: Tensor, needs: frozenset[str] = frozenset()) -> Kernel:
        table = dispatcher.table_for(problem, limits, device=device_of(x), needs=needs)
        return kernel_of(table, problem.m, needs)

    return choose


def kernel_of(table: Table, m: int, needs: frozenset[str] = frozenset()) -> Kernel:
    """The kernel of a table at m.

    Raises:
        UnsupportedError: There is none.
    """
    problem = table.problem
    kernel = table.kernel_at(m)
    if kernel is None:
        pick = table.pick(m)
        reasons = [f"{name}: {why}" for name, why in pick.rejected]
        raise UnsupportedError(
            f"{problem.op}: no kernel runs {replace(problem, m=m)} on {table.device.product}: "
            + ("; ".join(reasons) or pick.note)
        )
    multiplies_fp8 = problem.b is not None and problem.a.format.is_fp8
    if multiplies_fp8 and "any" in kernel.architectures:
        _warn_of_emulation(replace(problem, m=m), kernel, table, needs)
    return kernel


def _warn_of_emulation(
    problem: Problem, kernel: Kernel, table: Table, needs: frozenset[str]
) -> None:
    """Warn, once for each family of problems, that FP8 is emulated on a GPU with FP8 units."""
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
            why = fast.refusal(problem, table.device) or fast.lacks(needs)
            reasons.append(f"{fast.name}: {why or against.get(fast.name, 'not chosen')}")
    logger.warning(
        "%s: %s: %s emulates it, slowly, on %s: %s",
        problem.op, problem, kernel.name, table.device.product, "; ".join(reasons),
    )  # fmt: skip


def only(kernel: Kernel) -> Chooser:
    """Choose this kernel, or raise with the reason why it cannot run the problem."""

    def choose(problem: Problem, x: Tensor, needs: frozenset[str] = frozenset()) -> Kernel:
        reason = kernel.lacks(needs) or kernel.refusal(problem, device_of(x))
        if reason is not None:
            raise UnsupportedError(f"{kernel.name}: {problem}: {reason}")
        return kernel

    return choose
