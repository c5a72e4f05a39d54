"""Forms in which a weight is quantized ahead, as operands of problems."""

from __future__ import annotations

from dataclasses import replace

from lokakern.registry.register import fp8_format
from lokakern.types import Device, Granularity, Layout, Operand, Problem

FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)  # its scales


def with_weight(problem: Problem, form: Granularity, device: Device) -> Problem:
    """A problem whose right operand is a weight that was prepared in a form."""
    return replace(problem, b=Operand(fp8_format(device), form, Layout.COLUMN), prepared=True)
