"""Fences around the outputs of a launch, for trials: memory that a kernel must leave alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern.build.empty_operands import OPERANDS
from lokakern.gradients import NormGradients
from lokakern.measure.operands import Operands
from lokakern.types import QuantizedTensor

PATTERN = 0x5A  # every byte of a fence; 1.5e16 in bfloat16 and float32
MARGIN_ROWS = 128  # before the first and behind the last row: a tile of most kernels
ALIGNMENT = 512  # elements; begins of outputs stay aligned


class Fence(NamedTuple):
    """An output in a larger buffer; ``may_write`` are the elements of the buffer that are its."""

    name: str
    out: Tensor
    buffer: Tensor
    may_write: Tensor

    def damage(self) -> str:
        """What was written outside of the output, or ""."""
        width = self.buffer.element_size()
        changed = (self.buffer.view(torch.uint8).view(-1, width) != PATTERN).any(dim=1)
        places = (changed & ~self.may_write).nonzero()
        if not len(places):
            return ""
        at = int(places[0]) - int(self.out.storage_offset())
        *_, down, across = (1, *self.out.stride())
        row, column = divmod(at, down) if down >= across else reversed(divmod(at, across))
        what = "1 element" if len(places) == 1 else f"{len(places)} elements"
        return (f"writes {what} outside of {self.name} {[*self.out.shape]}, the "
                f"first at row {row}, column {column}")  # fmt: skip


def fence(operands: Operands) -> list[Fence]:
    """Move the outputs of every set into larger buffers, those in parts as well.

    Gaps between rows of FP8 data and of scales are lokakern's own and may be written; those of
    other outputs are a caller's.
    """
    names = OPERANDS[operands.problem.op]
    fences: list[Fence] = []
    for number, given in enumerate(operands.sets):
        written = {id(out) for out in operands.outputs(given)}
        operands.sets[number] = tuple(
            _moved(name, operand, written, fences)
            for name, operand in zip(names, given, strict=True)
        )
    return fences


def _moved(name: str, operand: Any, written: Container[int], fences: list[Fence]) -> Any:
    """An operand whose written tensors, by id, lie in larger buffers, which join the fences."""
    if isinstance(operand, Tensor) and id(operand) in written:
        fences.append(_fenced(name, operand))
        return fences[-1].out
    if isinstance(operand, QuantizedTensor):
        moved = {
            part: _moved(f"{name}.{part}", x, written, fences)
            for part in ("data", "scale")
            if id(x := getattr(operand, part)) in written
        }
        return replace(operand, **moved) if moved else operand
    if isinstance(operand, NormGradients):
        pairs = operand._asdict().items()
        return NormGradients(*(_moved(f"{name}.{part}", x, written, fences) for part, x in pairs))
    return operand


def _fenced(name: str, out: Tensor) -> Fence:
    stride = max(out.stride())
    margin = -(-MARGIN_ROWS * stride // ALIGNMENT) * ALIGNMENT
    span = max(size * step for size, step in zip(out.shape, out.stride(), strict=True))
    buffer = out.new_empty(margin + span + margin)
    buffer.view(torch.uint8).fill_(PATTERN)
    inside = buffer.as_strided(out.shape, out.stride(), margin)
    inside.copy_(out)
    may_write = torch.zeros(len(buffer), dtype=torch.bool, device=out.device)
    if "data" in name or "scale" in name:
        may_write[margin : margin + span] = True
    else:
        may_write.as_strided(out.shape, out.stride(), margin).fill_(True)
    return Fence(name, inside, buffer, may_write)
