"""Operands of a problem of any op."""

from __future__ import annotations

import torch

from lokakern.measure.norm_backward_operands import NormBackwardOperands
from lokakern.measure.norm_operands import NormOperands
from lokakern.measure.operands import Operands
from lokakern.registry.ops import NORM_OPS
from lokakern.types import Device, Problem


def operands_of(
    problem: Problem,
    distribution: str,
    device: torch.device,
    target: Device,
    *,
    cold: bool,
    seed: int = 0,
) -> Operands:
    """The operands of a problem of any op; the arguments are those of `Operands`."""
    kind = {"norm_backward": NormBackwardOperands}.get(
        problem.op, NormOperands if problem.op in NORM_OPS else Operands
    )
    return kind(problem, distribution, device, target, cold=cold, seed=seed)
