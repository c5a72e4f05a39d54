"""Words for misses: what to do about one, and how to measure a problem, or why nobody can."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

from lokakern.problems import make_problem
from lokakern.registry.schema.row_keys import row_of
from lokakern.selection.table import FrozenTable, Pick, Table
from lokakern.types import Layout, Operand, Problem, alignment_of


def miss_words(table: Table, pick: Pick, m: int) -> str:
    """Why there is no answer, what was measured nearest, and what to do."""
    if pick.candidate is None:
        return pick.note
    return f"{pick.note}; {_remedy(table, pick, replace(table.problem, m=m))}"


def _remedy(table: Table, pick: Pick, problem: Problem) -> str:
    if table.origin is not None and not isinstance(table, FrozenTable):
        return table.origin.remedy
    if pick.is_too_strict:
        return "allow a larger error"
    if not problem.m:
        return "there is nothing to measure, as without rows no kernel is launched"
    reason = why_not_measurable(problem)
    command = sweep_command(problem) if reason is None else f"nothing yet: {reason}"
    if table.origin is None:
        where = "" if table.callable_here else f" on {table.device.product}"
        return f"measure it{where} with: {command}"
    return f"{table.origin.remedy}, once it is measured with: {command}"


def plain(problem: Problem) -> dict[str, Any]:
    """A problem as JSON."""
    return {name: value for name, value in row_of(problem).items() if name != "key"}


def sweep_command(problem: Problem) -> str:
    """The command that measures a problem."""
    sizes = ",".join(map(str, problem.shape))
    if problem.op == "gemm" and problem == make_problem(problem.op, problem.shape):
        return f"python -m lokakern.bench sweep --shape {sizes}"
    return f"python -m lokakern.bench sweep --problem {shlex.quote(json.dumps(plain(problem)))}"


def why_not_measurable(problem: Problem) -> str | None:
    """Why a sweep cannot measure the problem, as with operands of its layout; None if it can."""
    if not problem.m:
        return "it has no rows"
    natural = _natural_alignment(problem.m, problem.k, problem.a)
    if problem.a.layout is not Layout.ROW or problem.a.alignment != natural:
        return "a is not row-major and aligned as an allocation of its own is"
    if problem.b is not None and problem.b.layout is not Layout.COLUMN:
        return "b is not weight.t() of a row-major weight"
    if problem.b is not None:
        natural = _natural_alignment(problem.n, problem.k, problem.b)
        if problem.b.alignment != natural:
            return "b is not aligned as an allocation of its own is"
    return "out is a slice" if problem.out_strided else None


def _natural_alignment(rows: int, columns: int, operand: Operand) -> int:
    if operand.format.is_fp8:  # rows of FP8 are padded
        return 16
    return alignment_of(columns * operand.format.dtype.itemsize) if rows > 1 else 16
