"""Operands in other strides that launchers may get, for trials of plugins."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lokakern.build.empty_operands import OPERANDS
from lokakern.measure.operands import Operands
from lokakern.types import Problem, alignment_of

# Of each op, the matrices with strides that a launcher must read.
MOVED = {
    "quantize": ("x",), "quantize_transpose": ("x",),
    "gemm": ("out", "a", "b"), "scaled_gemm": ("out", "a", "b"),
}  # fmt: skip
GAP = 16  # elements between rows: the alignment stays


def moved_problem(problem: Problem, name: str) -> Problem | None:
    """The problem with an operand in other strides; None if there are none.

    Rows of FP8 have gaps for their alignment only, or none.
    """
    if name == "out":
        return None if problem.out_format.is_fp8 else replace(problem, out_strided=True)
    operand = problem.b if name == "b" else problem.a
    if operand is None or (name == "b" and problem.prepared):
        return None
    if not operand.format.is_fp8:
        return problem
    alignment = alignment_of(problem.k)
    if alignment == operand.alignment:
        return None
    moved = replace(operand, alignment=alignment)
    return replace(problem, b=moved) if name == "b" else replace(problem, a=moved)


def move(operands: Operands, name: str) -> None:
    """Move an operand of every set: FP8 rows without gaps, others with gaps."""
    place = OPERANDS[operands.problem.op].index(name)
    for number, given in enumerate(operands.sets):
        operands.sets[number] = (*given[:place], _moved(given[place]), *given[place + 1 :])


def _moved(x: Tensor) -> Tensor:
    if x.stride(-1) != 1:
        return _moved(x.mT).mT
    gap = 0 if x.element_size() == 1 else GAP
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + gap))
    return wide[..., : x.shape[-1]].copy_(x)
