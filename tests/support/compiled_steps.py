"""Training steps of small models that a compiler traces, and the ops of their backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """One training step whose gradients differ everywhere."""
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    return y


def calls_of(op: str, model: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How often a second step calls an op, such as "lokakern::norm_gradient"."""
    step(model, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step(model, x)
    return sum(event.name == op for event in found.events())


def compiled(model: nn.Module, **options: Any) -> Any:
    """The model as Dynamo and AOTAutograd trace it, without a compiler's code."""
    return torch.compile(model, backend="aot_eager", **options)


class Behind(nn.Module):
    """A model and a subtraction behind it, which may write to the model's output."""

    def __init__(self, model: nn.Module, *, writes: bool) -> None:
        super().__init__()
        self.model, self.writes = model, writes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y.sub_(1.0) if self.writes else y - 1.0
