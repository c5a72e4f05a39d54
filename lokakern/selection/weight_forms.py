"""The forms of prepared weights, as operands of problems."""

from __future__ import annotations

from dataclasses import replace

from lokakern.registry.register import fp8_format
from lokakern.types import Device, Granularity, Layout, Operand, Problem

FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)


def with_weight(problem: Problem, form: Granularity, device: Device) -> Problem:
    """A problem with a prepared weight as its right operand."""
    return replace(problem, b=Operand(fp8_format(device), form, Layout.COLUMN), prepared=True)
