"""Training steps of small models that a compiler traces, and the ops of their backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering


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


class _NotRun(Exception):
    """Generated code was called."""


def codes_of(model: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """What Inductor generates for a call, then for its gradients.

    No C++ compiler runs, which takes 2 s for each kernel.
    """
    codes = []

    def generated(graph: GraphLowering) -> SimpleNamespace:
        codes.append(graph.codegen()[0].value)
        return SimpleNamespace(call=mock.Mock(side_effect=_NotRun))

    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(GraphLowering, "compile_to_module", generated),
        suppress(_NotRun),
    ):
        torch.compile(model, fullgraph=True)(x)
    return codes


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
