"""The choice of a kernel for a call on tensors, by measurements or by the caller."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from lokakern.errors import MeasurementError, MissError, UnknownNameError, UnsupportedError
from lokakern.registry.register import FP8_GPUS, Kernel, kernels_for
from lokakern.selection import dispatcher, misses
from lokakern.selection.arguments import budget_of, device_of
from lokakern.selection.table import FrozenTable, Table
from lokakern.types import ErrorBudget, Problem

logger = logging.getLogger("lokakern")
_WARNED: set[str] = set()
ON_MISS = ("bf16", "raise", "measure")


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


def check_on_miss(op: str, on_miss: str) -> None:
    if on_miss not in ON_MISS:
        raise UnknownNameError(
            f"{op}: on_miss is {on_miss!r}; expected one of {', '.join(ON_MISS)}"
        )


LOGGED: set[str] = set()  # families of problems whose miss was logged


def after_miss(table: Table, m: int, on_miss: str) -> Kernel | None:
    """Handle a miss: log it once, record it in the ledger and return the unquantized kernel.

    Misses of frozen choices are not recorded, because no database was asked.

    Returns:
        None if the problem was measured now, so that dispatch has an answer.

    Raises:
        MissError: ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
        UnsupportedError: No unquantized kernel runs here.
    """
    problem = replace(table.problem, m=m)
    pick = table.pick(m)
    remedy = _remedy(table, problem)
    if on_miss == "raise":
        raise MissError(f"{problem.op}: {problem}: {pick.note}; {remedy}")
    if on_miss == "measure":
        if table.origin is not None:
            raise MeasurementError(
                f'{problem.op}: on_miss="measure" is refused while answers are frozen, because '
                f"what is measured would not be read: {problem}: {pick.note}; {remedy}"
            )
        misses.measure(problem)
        dispatcher.use_snapshot(None)
        return None
    if table.origin is None:
        misses.record(problem, table.device)
    family = str(replace(problem, m=0))
    if family not in LOGGED:
        LOGGED.add(family)
        words = "%s: %s: %s; using %s. %s"
        remedy = remedy[0].upper() + remedy[1:]
        logger.warning(words, problem.op, problem, pick.note, pick.name, remedy)
    kernel = pick.candidate.kernel if pick.candidate else None
    if kernel is None:
        raise UnsupportedError(f"{problem.op}: {problem}: no kernel runs on {table.device.product}")
    return kernel


def _remedy(table: Table, problem: Problem) -> str:
    """The remedy for a miss."""
    if table.origin is not None and not isinstance(table, FrozenTable):
        return table.origin.remedy
    reason = misses.why_not_measurable(problem)
    command = misses.sweep_command(problem) if reason is None else f"nothing yet: {reason}"
    if table.origin is None:
        return f"measure it with: {command}"
    return f"{table.origin.remedy}, once it is measured with: {command}"


def only(kernel: Kernel) -> Chooser:
    """Choose this kernel, or raise with the reason why it cannot run the problem."""

    def choose(problem: Problem, x: Tensor, needs: frozenset[str] = frozenset()) -> Kernel:
        reason = kernel.lacks(needs) or kernel.refusal(problem, device_of(x))
        if reason is not None:
            raise UnsupportedError(f"{kernel.name}: {problem}: {reason}")
        return kernel

    return choose
